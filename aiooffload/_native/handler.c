/* Launches that call and the functions they call: what the drain has to know of each, and how
 * arguments become Python objects and results bytes.
 */
#include "calls.h"

#include <math.h>

/* ---- Caller: a launch on the device whose kernel calls ---- */

static PyObject *caller_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"context", "operation", NULL};
    PyObject *context, *operation;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O:Caller", names, &PyContext_Type, &context, &operation)) return NULL;
    AoCaller *self = (AoCaller *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->context = Py_NewRef(context);
    self->operation = Py_NewRef(operation);
    if (!(self->requests = PySet_New(NULL))) Py_CLEAR(self);
    return (PyObject *)self;
}

static int caller_traverse(AoCaller *self, visitproc visit, void *arg) {
    Py_VISIT(self->context);
    Py_VISIT(self->operation);
    Py_VISIT(self->requests);
    return 0;
}

static int caller_clear(AoCaller *self) {
    Py_CLEAR(self->context);
    Py_CLEAR(self->operation);
    Py_CLEAR(self->requests);
    return 0;
}

static void caller_dealloc(AoCaller *self) {
    PyObject_GC_UnTrack(self);
    caller_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef caller_members[] = {
    {"context", T_OBJECT, offsetof(AoCaller, context), READONLY, NULL},
    {"operation", T_OBJECT, offsetof(AoCaller, operation), READONLY, NULL},
    {"requests", T_OBJECT, offsetof(AoCaller, requests), READONLY, NULL},
    {"active", T_PYSSIZET, offsetof(AoCaller, active), READONLY, NULL},
    {"stopped", T_BOOL, offsetof(AoCaller, stopped), 0, NULL},
    {"told", T_BOOL, offsetof(AoCaller, told), 0, NULL},
    {"ended", T_BOOL, offsetof(AoCaller, ended), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
PyTypeObject AoCaller_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Caller",
    .tp_doc = "A launch on the device whose kernel calls.",
    .tp_basicsize = sizeof(AoCaller),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = caller_new,
    .tp_dealloc = (destructor)caller_dealloc,
    .tp_traverse = (traverseproc)caller_traverse,
    .tp_clear = (inquiry)caller_clear,
    .tp_members = caller_members,
};

/* ---- Handler: a host function ---- */

static unsigned format_nbytes(char format) {
    switch (format) {
    case '?': case 'b': case 'B': return 1;
    case 'h': case 'H': return 2;
    case 'i': case 'I': case 'f': return 4;
    default: return 8;
    }
}

/* Where the last argument ends, laid out like the members of a struct. */
static unsigned layout_nbytes(PyObject *formats) {
    unsigned offset = 0;
    for (Py_ssize_t i = 0; i < PyBytes_GET_SIZE(formats); i++) {
        unsigned nbytes = format_nbytes(PyBytes_AS_STRING(formats)[i]);
        offset = (offset + nbytes - 1) / nbytes * nbytes + nbytes;
    }
    return offset;
}

static PyObject *handler_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"callable", "context", "formats", "read", "dtype", "nbytes", "reply_format", "reply_kind", "reply_nbytes", "plain", "batch", NULL};
    PyObject *callable, *context, *formats, *read, *dtype;
    const char *reply_format;
    unsigned nbytes, reply_nbytes, reply_kind;
    int plain, batch;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO!SOOIyIIpp:Handler", names, &callable, &PyContext_Type, &context, &formats, &read, &dtype, &nbytes, &reply_format, &reply_kind,
                                     &reply_nbytes, &plain, &batch))
        return NULL;
    if (nbytes > AO_PAYLOAD_NBYTES || reply_nbytes > AO_PAYLOAD_NBYTES) {
        PyErr_SetString(PyExc_ValueError, "arguments and results have at most 256 bytes");
        return NULL;
    }
    if (PyBytes_GET_SIZE(formats) > AO_PAYLOAD_NBYTES || (plain && !batch && layout_nbytes(formats) > nbytes)) {
        PyErr_SetString(PyExc_ValueError, "the formats take more bytes than the arguments have");
        return NULL;
    }
    AoHandler *self = (AoHandler *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->callable = Py_NewRef(callable);
    self->context = Py_NewRef(context);
    self->formats = Py_NewRef(formats);
    self->read = Py_NewRef(read);
    self->dtype = Py_NewRef(dtype);
    self->nbytes = nbytes;
    self->reply_format = reply_format[0];
    self->reply_kind = (unsigned char)reply_kind;
    self->reply_nbytes = reply_nbytes;
    self->plain = (char)plain;
    self->batch = (char)batch;
    return (PyObject *)self;
}

static int handler_traverse(AoHandler *self, visitproc visit, void *arg) {
    Py_VISIT(self->callable);
    Py_VISIT(self->context);
    Py_VISIT(self->read);
    Py_VISIT(self->dtype);
    Py_VISIT(self->collecting);
    return 0;
}

static int handler_clear(AoHandler *self) {
    Py_CLEAR(self->callable);
    Py_CLEAR(self->context);
    Py_CLEAR(self->read);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->collecting);
    return 0;
}

static void handler_dealloc(AoHandler *self) {
    PyObject_GC_UnTrack(self);
    handler_clear(self);
    Py_CLEAR(self->formats);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef handler_members[] = {
    {"callable", T_OBJECT, offsetof(AoHandler, callable), READONLY, NULL},
    {"nbytes", T_UINT, offsetof(AoHandler, nbytes), READONLY, NULL},
    {"batch", T_BOOL, offsetof(AoHandler, batch), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
PyTypeObject AoHandler_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Handler",
    .tp_doc = "A host function, as the drain knows it.",
    .tp_basicsize = sizeof(AoHandler),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = handler_new,
    .tp_dealloc = (destructor)handler_dealloc,
    .tp_traverse = (traverseproc)handler_traverse,
    .tp_clear = (inquiry)handler_clear,
    .tp_members = handler_members,
};

/* ---- values ---- */

static PyObject *decode_one(char format, const unsigned char *at) {
    union { int8_t b; uint8_t B; int16_t h; uint16_t H; int32_t i; uint32_t I; int64_t q; uint64_t Q; float f; double d; } v;
    memcpy(&v, at, format_nbytes(format));
    switch (format) {
    case '?': return PyBool_FromLong(v.B);
    case 'b': return PyLong_FromLong(v.b);
    case 'B': return PyLong_FromLong(v.B);
    case 'h': return PyLong_FromLong(v.h);
    case 'H': return PyLong_FromLong(v.H);
    case 'i': return PyLong_FromLong(v.i);
    case 'I': return PyLong_FromUnsignedLong(v.I);
    case 'q': return PyLong_FromLongLong(v.q);
    case 'Q': return PyLong_FromUnsignedLongLong(v.Q);
    case 'f': return PyFloat_FromDouble((double)v.f);
    default: return PyFloat_FromDouble(v.d);
    }
}

PyObject *ao_handler_call(const AoHandler *handler, const unsigned char *data) {
    PyObject *arguments[AO_PAYLOAD_NBYTES];
    Py_ssize_t count = PyBytes_GET_SIZE(handler->formats), made = 0;
    const char *formats = PyBytes_AS_STRING(handler->formats);
    PyObject *coroutine = NULL;
    unsigned offset = 0;
    for (; made < count; made++) {
        unsigned nbytes = format_nbytes(formats[made]);
        offset = (offset + nbytes - 1) / nbytes * nbytes;
        if (!(arguments[made] = decode_one(formats[made], data + offset))) break;
        offset += nbytes;
    }
    if (made == count) coroutine = PyObject_Vectorcall(handler->callable, arguments, (size_t)count, NULL);
    for (Py_ssize_t i = 0; i < made; i++) Py_DECREF(arguments[i]);
    return coroutine;
}

int ao_handler_encode(const AoHandler *handler, PyObject *value, unsigned char out[8]) {
    char format = handler->reply_format;
    if (format == 'd' || format == 'f') {
        if (!PyFloat_CheckExact(value)) return 0;
        double number = PyFloat_AS_DOUBLE(value);
        float narrow = (float)number;
        if (format == 'f' && isinf(narrow) && !isinf(number)) return 0;
        memcpy(out, format == 'd' ? (void *)&number : (void *)&narrow, format_nbytes(format));
        return 1;
    }
    if (format == 0 || format == '?' || format == 'Q' || !PyLong_CheckExact(value)) return 0;
    int overflow;
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    int bits = 8 * (int)format_nbytes(format), is_signed = format >= 'a';
    if (overflow) return 0;
    if (bits < 64) {
        long long low = is_signed ? -(1ll << (bits - 1)) : 0, high = is_signed ? (1ll << (bits - 1)) - 1 : (1ll << bits) - 1;
        if (number < low || number > high) return 0;
    }
    memcpy(out, &number, format_nbytes(format));
    return 1;
}

/* The columns of a batch, one per argument. New references; -1 with an exception. */
static int read_columns(AoRequest *request, const AoHandler *handler, PyObject **columns) {
    Py_ssize_t count = PyBytes_GET_SIZE(handler->formats), made = 0;
    if (count == 0) return 0;
    PyObject *args[] = {request->data, handler->dtype};
    PyObject *rows = PyObject_Vectorcall(handler->read, args, 2, NULL);
    if (!rows) return -1;
    if (count == 1) {
        columns[0] = rows;
        return 0;
    }
    for (; made < count; made++) {
        PyObject *name = PyUnicode_FromFormat("f%zd", made);
        columns[made] = name ? PyObject_GetItem(rows, name) : NULL;
        Py_XDECREF(name);
        if (!columns[made]) break;
    }
    Py_DECREF(rows);
    if (made == count) return 0;
    while (made > 0) Py_DECREF(columns[--made]);
    return -1;
}

PyObject *ao_handler_call_batch(const AoHandler *handler, AoRequest *request) {
    PyObject *columns[AO_PAYLOAD_NBYTES] = {NULL};
    if (read_columns(request, handler, columns) < 0) return NULL;
    Py_ssize_t count = PyBytes_GET_SIZE(handler->formats);
    PyObject *coroutine = PyObject_Vectorcall(handler->callable, columns, (size_t)count, NULL);
    for (Py_ssize_t i = 0; i < count; i++) Py_DECREF(columns[i]);
    return coroutine;
}

/* Whether a buffer's elements are what `kind` and `nbytes` say. */
static int is_kind(const Py_buffer *view, unsigned kind, unsigned nbytes) {
    if ((unsigned)view->itemsize != nbytes || !view->format) return 0;
    const char *format = view->format;
    if (*format == '@' || *format == '=' || *format == '<') format++;
    if (format[0] == 0 || format[1] != 0) return 0;
    switch (kind) {
    case AO_KIND_BOOL: return *format == '?';
    case AO_KIND_INT: return strchr("bhilq", *format) != NULL;
    case AO_KIND_UINT: return strchr("BHILQ", *format) != NULL;
    case AO_KIND_FLOAT: return strchr("efd", *format) != NULL;
    default: return 0;
    }
}

int ao_handler_gives(const AoHandler *handler, const Py_buffer *view, uint32_t rows) {
    return view->ndim == 1 && view->shape[0] == (Py_ssize_t)rows && is_kind(view, handler->reply_kind, handler->reply_nbytes);
}
