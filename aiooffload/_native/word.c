/* A 64-bit word that the host and a device both read and write. */
#include "native.h"

static PyObject *word_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"host_address", "device_address", "owner", NULL};
    unsigned long long host, device;
    PyObject *owner;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKO:Word", names, &host, &device, &owner)) return NULL;
    if (host == 0 || host % 8 != 0 || device % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "a word's addresses are multiples of 8 and not 0");
        return NULL;
    }
    AoWord *self = (AoWord *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->host = (uint64_t *)(uintptr_t)host;
    self->device = device;
    self->owner = Py_NewRef(owner);
    return (PyObject *)self;
}

static int word_traverse(AoWord *self, visitproc visit, void *arg) {
    Py_VISIT(self->owner);
    return 0;
}

static void word_dealloc(AoWord *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->owner);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *word_load(AoWord *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLongLong(ao_word_load(self));
}

static PyObject *word_store(AoWord *self, PyObject *value) {
    unsigned long long number = PyLong_AsUnsignedLongLongMask(value);
    if (number == (unsigned long long)-1 && PyErr_Occurred()) return NULL;
    /* Sequentially consistent: arming the monitor relies on "bell = 0, then read the slots". */
    __atomic_store_n(self->host, (uint64_t)number, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    ao_host_notify();
    Py_RETURN_NONE;
}

static PyObject *word_host_address(AoWord *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong((uintptr_t)self->host);
}

static PyObject *word_device_address(AoWord *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->device);
}

static PyMethodDef word_methods[] = {
    {"load", (PyCFunction)word_load, METH_NOARGS, "Read it (acquire)."},
    {"store", (PyCFunction)word_store, METH_O, "Write it, fence, and wake host streams that wait for words."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef word_getset[] = {
    {"host_address", (getter)word_host_address, NULL, NULL, NULL},
    {"device_address", (getter)word_device_address, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject AoWord_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Word",
    .tp_doc = "A 64-bit word in memory shared with a device.",
    .tp_basicsize = sizeof(AoWord),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = word_new,
    .tp_dealloc = (destructor)word_dealloc,
    .tp_traverse = (traverseproc)word_traverse,
    .tp_methods = word_methods,
    .tp_getset = word_getset,
};
