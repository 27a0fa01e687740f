/* Arrays to and from other libraries by DLPack, version 1 and what was before it.
 *
 * The layout is that of the DLPack specification (dlpack.h, versions 0.8 and 1.0): a tensor, and with
 * it a deleter that whoever takes it calls once, on any thread.
 */
#include "native.h"

typedef struct {
    void *data;
    int32_t device_type, device_id;
    int32_t ndim;
    uint8_t code, bits;
    uint16_t lanes;
    int64_t *shape, *strides; /* strides in elements; NULL: C order */
    uint64_t byte_offset;
} tensor;

typedef struct plain {
    tensor tensor;
    void *context;
    void (*deleter)(struct plain *);
} plain;

typedef struct versioned {
    uint32_t major, minor;
    void *context;
    void (*deleter)(struct versioned *);
    uint64_t flags;
    tensor tensor;
} versioned;

enum { READ_ONLY = 1, MAX_DIMENSIONS = 64, OLD_ABI = 0, ABI = 1 };
#define PLAIN "dltensor"
#define VERSIONED "dltensor_versioned"
#define KEPT "aiooffload.dlpack"

/* ---- to others ---- */

/* One allocation: what is handed out, and behind it shape and strides. */
typedef struct {
    union {
        plain plain;
        versioned versioned;
    } managed;
    PyObject *holder;         /* keeps the memory */
    int64_t sizes[];          /* ndim of the shape, ndim of the strides */
} export;

static void release(export *self) {
    if (Py_IsInitialized()) { /* else the memory goes with the process */
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(self->holder);
        PyGILState_Release(state);
    }
    free(self);
}

static void delete_plain(plain *managed) { release(managed->context); }
static void delete_versioned(versioned *managed) { release(managed->context); }

/* Nobody took it. */
static void drop(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, PLAIN)) delete_plain(PyCapsule_GetPointer(capsule, PLAIN));
    else if (PyCapsule_IsValid(capsule, VERSIONED)) delete_versioned(PyCapsule_GetPointer(capsule, VERSIONED));
}

static int read_sizes(PyObject *tuple, int64_t *sizes) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) {
        sizes[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (sizes[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* dlpack_export(holder, address, device_type, device_id, shape, strides, code, bits, is_versioned) -> capsule */
PyObject *ao_dlpack_export(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *holder, *shape, *strides;
    unsigned long long address;
    int device_type, device_id, code, bits, is_versioned;
    if (!PyArg_ParseTuple(args, "OKiiO!O!iip:dlpack_export", &holder, &address, &device_type, &device_id, &PyTuple_Type,
                          &shape, &PyTuple_Type, &strides, &code, &bits, &is_versioned))
        return NULL;
    Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    if (ndim != PyTuple_GET_SIZE(strides) || ndim > MAX_DIMENSIONS)
        return PyErr_Format(PyExc_ValueError, "shape and strides of up to %d dimensions", MAX_DIMENSIONS);
    export *self = calloc(1, sizeof *self + 2 * (size_t)ndim * sizeof *self->sizes);
    if (!self) return PyErr_NoMemory();
    if (read_sizes(shape, self->sizes) < 0 || read_sizes(strides, self->sizes + ndim) < 0) {
        free(self);
        return NULL;
    }
    tensor described = {.data = (void *)(uintptr_t)address, .device_type = device_type, .device_id = device_id,
                        .ndim = (int32_t)ndim, .code = (uint8_t)code, .bits = (uint8_t)bits, .lanes = 1,
                        .shape = self->sizes, .strides = self->sizes + ndim};
    if (is_versioned)
        self->managed.versioned = (versioned){.major = ABI, .context = self, .deleter = delete_versioned, .tensor = described};
    else
        self->managed.plain = (plain){.tensor = described, .context = self, .deleter = delete_plain};
    PyObject *capsule = PyCapsule_New(&self->managed, is_versioned ? VERSIONED : PLAIN, drop);
    if (!capsule) free(self);
    else self->holder = Py_NewRef(holder);
    return capsule;
}

/* ---- from others ---- */

/* Destructors of a keeper. The owner's deleter may run Python code, and an exception may be under way. */
#define GIVE_BACK(kind)                                                                                                \
    static void give_back_##kind(PyObject *capsule) {                                                                  \
        PyObject *type, *value, *traceback;                                                                            \
        PyErr_Fetch(&type, &value, &traceback);                                                                        \
        kind *managed = PyCapsule_GetPointer(capsule, KEPT);                                                           \
        if (managed && managed->deleter) managed->deleter(managed);                                                    \
        PyErr_Restore(type, value, traceback);                                                                         \
    }
GIVE_BACK(plain)
GIVE_BACK(versioned)
#undef GIVE_BACK

static PyObject *write_sizes(const int64_t *sizes, int32_t ndim) {
    if (!sizes) Py_RETURN_NONE;
    PyObject *tuple = PyTuple_New(ndim);
    for (int32_t i = 0; tuple && i < ndim; i++) {
        PyObject *size = PyLong_FromLongLong(sizes[i]);
        if (!size) Py_CLEAR(tuple);
        else PyTuple_SET_ITEM(tuple, i, size);
    }
    return tuple;
}

/* dlpack_import(capsule) -> (keeper, address, device_type, device_id, shape, strides, code, bits, lanes, read_only).
 * The capsule is used up; the tensor is given back when `keeper` goes. */
PyObject *ao_dlpack_import(PyObject *Py_UNUSED(module), PyObject *capsule) {
    int is_versioned = PyCapsule_IsValid(capsule, VERSIONED);
    if (!is_versioned && !PyCapsule_IsValid(capsule, PLAIN)) {
        PyErr_SetString(PyExc_TypeError, "not a DLPack capsule, or one that was used already");
        return NULL;
    }
    void *managed = PyCapsule_GetPointer(capsule, is_versioned ? VERSIONED : PLAIN);
    if (is_versioned && ((versioned *)managed)->major != ABI)
        return PyErr_Format(PyExc_BufferError, "DLPack version %u is not known", ((versioned *)managed)->major);
    const tensor *t = is_versioned ? &((versioned *)managed)->tensor : &((plain *)managed)->tensor;
    int read_only = is_versioned && ((versioned *)managed)->flags & READ_ONLY;
    PyObject *shape = write_sizes(t->shape, t->ndim), *strides = write_sizes(t->strides, t->ndim), *result = NULL;
    PyObject *keeper = PyCapsule_New(managed, KEPT, NULL); /* without a destructor until it owns the tensor */
    if (shape && strides && keeper)
        result = Py_BuildValue("(OKiiOOiiii)", keeper, (unsigned long long)(uintptr_t)t->data + t->byte_offset,
                               (int)t->device_type, (int)t->device_id, shape, strides, (int)t->code, (int)t->bits,
                               (int)t->lanes, read_only);
    if (result && PyCapsule_SetName(capsule, is_versioned ? "used_" VERSIONED : "used_" PLAIN) == 0)
        PyCapsule_SetDestructor(keeper, is_versioned ? give_back_versioned : give_back_plain);
    Py_XDECREF(shape);
    Py_XDECREF(strides);
    Py_XDECREF(keeper);
    return result;
}
