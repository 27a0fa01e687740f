/* A launch with arguments of its own: checked and packed once, submitted by each call.
 *
 * A call goes the launch path (launcher.c) with the block as it is, or with a copy in which it has put
 * other scalars. For whatever that does not take, `otherwise` is called just as this was.
 */
#include "native.h"

#include <stddef.h>

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *launcher, *site;
    PyObject *arguments;      /* tuple */
    PyObject *formats;        /* bytes: a letter per argument, '?' for one that only Python converts */
    PyObject *names;          /* dict: name -> index of the arguments that a call may change */
    PyObject *packed;         /* the arguments as the stream takes them; NULL: prepared for each call */
    PyObject *otherwise;      /* the long way */
} Bound;

static PyObject *s_lane, *s_after, *s_coarse;

/* What one call launches. Each reference is its own, but for the lane and what it comes after. */
typedef struct {
    PyObject *lane, *after;   /* NULL: any, nothing */
    int coarse;
    PyObject *arguments, *packed;
} Call;

/* Gives `call` a block or arguments of its own, if it has ours. */
static int separate(const Bound *self, Call *call) {
    if (self->packed) {
        if (call->packed != self->packed) return 0;
        PyObject *copy = PyBytes_FromStringAndSize(PyBytes_AS_STRING(self->packed), PyBytes_GET_SIZE(self->packed));
        if (!copy) return -1;
        Py_SETREF(call->packed, copy);
        return 0;
    }
    if (call->arguments != self->arguments) return 0;
    Py_ssize_t count = PyTuple_GET_SIZE(self->arguments);
    PyObject *copy = PyTuple_New(count);
    if (!copy) return -1;
    for (Py_ssize_t i = 0; i < count; i++) PyTuple_SET_ITEM(copy, i, Py_NewRef(PyTuple_GET_ITEM(self->arguments, i)));
    Py_SETREF(call->arguments, copy);
    return 0;
}

/* 1 done, 0 for the long way, -1 exception. */
static int change(const Bound *self, Call *call, PyObject *name, PyObject *value) {
    PyObject *number = PyDict_GetItemWithError(self->names, name);
    if (!number) return PyErr_Occurred() ? -1 : 0;
    Py_ssize_t index = PyLong_AsSsize_t(number);
    if (index < 0 || index >= PyTuple_GET_SIZE(self->arguments)) return PyErr_Occurred() ? -1 : 0;
    if (separate(self, call) < 0) return -1;
    if (call->packed) return ao_pack_scalar(PyBytes_AS_STRING(self->formats)[index], value, call->packed, index);
    PyObject *old = PyTuple_GET_ITEM(call->arguments, index);
    PyTuple_SET_ITEM(call->arguments, index, Py_NewRef(value));
    Py_DECREF(old);
    return 1;
}

static int read_keyword(const Bound *self, Call *call, PyObject *name, PyObject *value) {
    if (name == s_lane) {
        call->lane = value == Py_None ? NULL : value;
        return 1;
    }
    if (name == s_after) {
        call->after = value;
        return 1;
    }
    if (name == s_coarse) return (call->coarse = PyObject_IsTrue(value)) < 0 ? -1 : 1;
    return change(self, call, name, value);
}

/* The operation, None: for the long way, or NULL. */
static PyObject *launch(const Bound *self, PyObject *const *values, PyObject *keywords) {
    int status = ao_launcher_may(self->launcher);
    if (status < 0) return NULL;
    Call call = {.arguments = Py_NewRef(self->arguments), .packed = Py_XNewRef(self->packed)};
    PyObject *result = NULL;
    for (Py_ssize_t i = 0; status > 0 && keywords && i < PyTuple_GET_SIZE(keywords); i++)
        status = read_keyword(self, &call, PyTuple_GET_ITEM(keywords, i), values[i]);
    if (status > 0) result = ao_launcher_go(self->launcher, self->site, call.arguments, call.packed, call.lane, call.after,
                                            call.coarse);
    else if (status == 0) result = Py_NewRef(Py_None);
    Py_DECREF(call.arguments);
    Py_XDECREF(call.packed);
    return result;
}

static PyObject *bound_call(Bound *self, PyObject *const *args, size_t nargsf, PyObject *keywords) {
    PyObject *result = PyVectorcall_NARGS(nargsf) ? Py_NewRef(Py_None) : launch(self, args, keywords);
    if (result != Py_None) return result;
    Py_DECREF(result);
    return PyObject_Vectorcall(self->otherwise, args, PyVectorcall_NARGS(nargsf), keywords);
}

/* Whether it is a block for so many arguments with room for any scalar in each place. */
static int is_block(PyObject *packed, Py_ssize_t count) {
    size_t size = PyBytes_CheckExact(packed) ? (size_t)PyBytes_GET_SIZE(packed) : 0, header = 4 + 4 * (size_t)count;
    const uint32_t *block = size ? (const uint32_t *)PyBytes_AS_STRING(packed) : NULL;
    if (size < header || block[0] != (size_t)count) return 0;
    for (Py_ssize_t i = 0; i < count; i++)
        if (block[1 + i] < header || block[1 + i] + (size_t)8 > size) return 0;
    return 1;
}

static int check(PyObject *site, PyObject *arguments, PyObject *formats, PyObject *packed) {
    if (ao_site_check(site) < 0) return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(arguments);
    if (PyBytes_GET_SIZE(formats) == count && (packed == Py_None || is_block(packed, count))) return 0;
    PyErr_SetString(PyExc_ValueError, "formats has a letter and packed a place for each argument");
    return -1;
}

static PyObject *bound_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"launcher", "site", "arguments", "formats", "names", "packed", "otherwise", NULL};
    PyObject *launcher, *site, *arguments, *formats, *changeable, *packed, *otherwise;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO!SO!OO:BoundLaunch", names, &AoLauncher_Type, &launcher, &site,
                                     &PyTuple_Type, &arguments, &formats, &PyDict_Type, &changeable, &packed, &otherwise) ||
        check(site, arguments, formats, packed) < 0)
        return NULL;
    if (!s_lane && !(s_lane = PyUnicode_InternFromString("lane"))) return NULL;
    if (!s_coarse && !(s_coarse = PyUnicode_InternFromString("coarse"))) return NULL;
    if (!s_after && !(s_after = PyUnicode_InternFromString("after"))) return NULL;
    Bound *self = (Bound *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->vectorcall = (vectorcallfunc)bound_call;
    self->launcher = Py_NewRef(launcher);
    self->site = Py_NewRef(site);
    self->arguments = Py_NewRef(arguments);
    self->formats = Py_NewRef(formats);
    self->names = Py_NewRef(changeable);
    self->packed = packed == Py_None ? NULL : Py_NewRef(packed);
    self->otherwise = Py_NewRef(otherwise);
    return (PyObject *)self;
}

#define MEMBERS(X) X(launcher) X(site) X(arguments) X(formats) X(names) X(packed) X(otherwise)

static int bound_traverse(Bound *self, visitproc visit, void *arg) {
#define VISIT(member) Py_VISIT(self->member);
    MEMBERS(VISIT)
#undef VISIT
    return 0;
}

static int bound_clear(Bound *self) {
#define CLEAR(member) Py_CLEAR(self->member);
    MEMBERS(CLEAR)
#undef CLEAR
    return 0;
}

static void bound_dealloc(Bound *self) {
    PyObject_GC_UnTrack(self);
    bound_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef bound_members[] = {
    {"arguments", T_OBJECT, offsetof(Bound, arguments), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
PyTypeObject AoBound_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.BoundLaunch",
    .tp_doc = "A launch with arguments of its own.",
    .tp_basicsize = sizeof(Bound),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Bound, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_new = bound_new,
    .tp_dealloc = (destructor)bound_dealloc,
    .tp_traverse = (traverseproc)bound_traverse,
    .tp_clear = (inquiry)bound_clear,
    .tp_members = bound_members,
};
