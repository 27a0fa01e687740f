/* Program order per allocation, as rules/ordering.py defines it; tests hold this file against that one.
 *
 * The rule's weak references are uses here: places in the list of a history that belong to their
 * operation. It takes them away when it is done, or goes, so a history holds nobody alive and
 * remembers nobody for long. One that ended without having run keeps its uses until it goes, since it
 * stands for what it still had to come after.
 */
#include "native.h"

static int stands_for_others(const AoOperation *op) { return op->deps && op->deps != Py_None; }

static void leave(AoUse *use) {
    if (!use->link) return;
    *use->link = use->next;
    if (use->next) use->next->link = use->link;
    use->link = NULL;
    use->next = NULL;
}

static void enter(AoUse *use, AoUse **list) {
    leave(use);
    use->next = *list;
    use->link = list;
    if (use->next) use->next->link = &use->next;
    *list = use;
}

AoUse *ao_use_new(AoOperation *op) {
    AoUse *use = PyMem_Malloc(sizeof *use);
    if (!use) {
        PyErr_NoMemory();
        return NULL;
    }
    *use = (AoUse){.op = op, .sibling = op->uses};
    return op->uses = use;
}

void ao_uses_free(AoOperation *op) {
    while (op->uses) {
        AoUse *use = op->uses;
        op->uses = use->sibling;
        leave(use);
        PyMem_Free(use);
    }
}

void ao_uses_settle(AoOperation *op) {
    if (!stands_for_others(op)) ao_uses_free(op);
}

static void forget(AoHistory *self) {
    while (self->writer) leave(self->writer);
    while (self->readers) leave(self->readers);
}

void ao_history_record(AoHistory *self, AoUse *use, int writes) {
    if (writes) forget(self); /* they come before this one already */
    enter(use, writes ? &self->writer : &self->readers);
}

/* Whether the order of *home alone puts the operation of `use` first; sets *home if that is still open. */
static int is_home(const AoUse *use, AoQueue **home) {
    const AoOperation *op = use->op;
    if (op->finished) return !stands_for_others(op);
    AoQueue *queue = (AoQueue *)op->queue;
    if (!queue || op->calling || op->streamed || (*home && *home != queue)) return 0;
    *home = queue;
    return 1;
}

int ao_history_home(const AoHistory *self, int writes, AoQueue **home) {
    if (self->writer && !is_home(self->writer, home)) return 0;
    for (const AoUse *use = writes ? self->readers : NULL; use; use = use->next)
        if (!is_home(use, home)) return 0;
    return 1;
}

/* ---- for Python ---- */

static PyObject *history_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":History", names)) return NULL;
    return type->tp_alloc(type, 0);
}

static void history_dealloc(AoHistory *self) {
    forget(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int add_deps(PyObject *ahead, const AoOperation *op) {
    PyObject *deps = PySequence_List(op->deps);
    Py_ssize_t end = PyList_GET_SIZE(ahead);
    int status = deps ? PyList_SetSlice(ahead, end, end, deps) : -1;
    Py_XDECREF(deps);
    return status;
}

/* The unfinished ones among `ahead` and what stands behind those that never ran; grows `ahead`. */
static int collect(PyObject *ahead, PyObject *found, PyObject *seen) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ahead); i++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(ahead, i)); /* nobody else has the list, but to be plain */
        int status = 0;
        if (!PyObject_TypeCheck(item, &AoOperation_Type)) {
            PyErr_SetString(PyExc_TypeError, "deps holds Operations");
            status = -1;
        } else if (!((AoOperation *)item)->finished) {
            status = PyDict_SetItem(found, item, Py_None);
        } else if (stands_for_others((AoOperation *)item) && (status = PySet_Contains(seen, item)) == 0) {
            status = PySet_Add(seen, item) < 0 ? -1 : add_deps(ahead, (AoOperation *)item);
        }
        Py_DECREF(item);
        if (status < 0) return -1;
    }
    return 0;
}

static int append_uses(PyObject *list, const AoUse *use) {
    for (; use; use = use->next)
        if (PyList_Append(list, (PyObject *)use->op) < 0) return -1;
    return 0;
}

static PyObject *history_conflicts(AoHistory *self, PyObject *value) {
    int writes = PyObject_IsTrue(value);
    if (writes < 0) return NULL;
    PyObject *ahead = PyList_New(0), *found = PyDict_New(), *seen = PySet_New(NULL), *result = NULL;
    if (ahead && found && seen && append_uses(ahead, self->writer) == 0 &&
        (!writes || append_uses(ahead, self->readers) == 0) && collect(ahead, found, seen) == 0)
        result = PyDict_Keys(found);
    Py_XDECREF(ahead);
    Py_XDECREF(found);
    Py_XDECREF(seen);
    return result;
}

static PyObject *history_record(AoHistory *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyObject_TypeCheck(args[0], &AoOperation_Type))
        return PyErr_Format(PyExc_TypeError, "record(operation, writes)");
    int writes = PyObject_IsTrue(args[1]);
    AoUse *use = writes < 0 ? NULL : ao_use_new((AoOperation *)args[0]);
    if (!use) return NULL;
    ao_history_record(self, use, writes);
    Py_RETURN_NONE;
}

static PyMethodDef history_methods[] = {
    {"conflicts", (PyCFunction)history_conflicts, METH_O, "The unfinished operations that one submitted now comes after."},
    {"record", (PyCFunction)(void (*)(void))history_record, METH_FASTCALL, "Note that an operation was submitted now."},
    {NULL, NULL, 0, NULL},
};
PyTypeObject AoHistory_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.History",
    .tp_doc = "What was submitted on one allocation and may still be unfinished.",
    .tp_basicsize = sizeof(AoHistory),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = history_new,
    .tp_dealloc = (destructor)history_dealloc,
    .tp_methods = history_methods,
};
