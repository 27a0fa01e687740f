/* Packing kernel parameters.
 *
 * A packed block is self-contained: a uint32 count, a uint32 offset per parameter, and the
 * values, each at a multiple of 16, which satisfies every alignment CUDA asks for. What this
 * file does not know how to convert exactly it leaves to Python, which either does it or raises
 * an error that names the parameter.
 */
#include "native.h"

#include <math.h>

static PyObject *s_address;

/* NumPy's scalar types by format; another type of the same size, such as longlong, is for Python. */
#define NUMPY 6
static const char numpy_formats[NUMPY] = {'f', 'd', 'i', 'I', 'q', 'Q'};
static const char *const numpy_names[NUMPY] = {"float32", "float64", "int32", "uint32", "int64", "uint64"};
static PyObject *numpy_types[NUMPY];

int ao_pack_module_init(void) {
    PyObject *numpy = PyImport_ImportModule("numpy");
    for (int i = 0; numpy && i < NUMPY; i++)
        if (!(numpy_types[i] = PyObject_GetAttrString(numpy, numpy_names[i]))) Py_CLEAR(numpy);
    Py_XDECREF(numpy);
    return numpy && (s_address = PyUnicode_InternFromString("address")) ? 0 : -1;
}

/* Writes the address that a buffer says it has; 1 done, 0 not for this path, -1 exception. */
static int pack_address(PyObject *value, char *out) {
    PyObject *address = PyObject_GetAttr(value, s_address);
    if (!address) {
        if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    uint64_t number = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (number == (uint64_t)-1 && PyErr_Occurred()) return -1;
    memcpy(out, &number, 8);
    return 1;
}

/* A NumPy scalar of the format's own type; 1 done, 0 not for this path, -1 exception. */
static int pack_numpy(char format, PyObject *value, char *out) {
    const char *at = memchr(numpy_formats, format, NUMPY);
    if (!at || (PyObject *)Py_TYPE(value) != numpy_types[at - numpy_formats]) return 0;
    Py_buffer view;
    if (PyObject_GetBuffer(value, &view, PyBUF_SIMPLE) < 0) return -1;
    memcpy(out, view.buf, (size_t)view.len);
    PyBuffer_Release(&view);
    return 1;
}

static int pack_double(char format, double number, char *out) {
    float narrow = (float)number;
    if (format == 'd') {
        memcpy(out, &number, 8);
    } else if (isinf(narrow) && !isinf(number)) {
        return 0;
    } else {
        memcpy(out, &narrow, 4);
    }
    return 1;
}

/* Writes one number; 1 done, 0 not for this path, -1 exception. Runs no Python code. */
static int pack_number(char format, PyObject *value, char *out) {
    int is_float = format == 'd' || format == 'f', overflow;
    if (is_float && PyFloat_CheckExact(value)) return pack_double(format, PyFloat_AS_DOUBLE(value), out);
    if (!PyLong_CheckExact(value)) return pack_numpy(format, value, out);
    long long number = PyLong_AsLongLongAndOverflow(value, &overflow);
    if (overflow) return 0;
    if (is_float) { /* as long as nothing has to be rounded */
        long long most = format == 'f' ? 1LL << 24 : 1LL << 53;
        return number >= -most && number <= most ? pack_double(format, (double)number, out) : 0;
    }
    switch (format) {
        case 'i':
            if (number < INT32_MIN || number > INT32_MAX) return 0;
            break;
        case 'I':
            if (number < 0 || number > UINT32_MAX) return 0;
            break;
        case 'Q':
            if (number < 0) return 0;
            break;
        case 'q':
            break;
        default:
            return 0;
    }
    memcpy(out, &number, format == 'i' || format == 'I' ? 4 : 8); /* little-endian, as every CUDA host */
    return 1;
}

static char *place(PyObject *packed, Py_ssize_t index) {
    char *block = PyBytes_AS_STRING(packed);
    return block + ((uint32_t *)block)[1 + index];
}

int ao_pack_scalar(char format, PyObject *value, PyObject *packed, Py_ssize_t index) {
    return pack_number(format, value, place(packed, index));
}

PyObject *ao_pack_arguments(const char *formats, Py_ssize_t count, PyObject *arguments, const uint64_t *addresses) {
    if (PyTuple_GET_SIZE(arguments) != count) Py_RETURN_NONE;
    Py_ssize_t header = ((4 + 4 * count) + 15) / 16 * 16, total = header + 16 * count;
    PyObject *packed = PyBytes_FromStringAndSize(NULL, total);
    if (!packed) return NULL;
    char *out = PyBytes_AS_STRING(packed);
    memset(out, 0, (size_t)total);
    ((uint32_t *)out)[0] = (uint32_t)count;
    for (Py_ssize_t i = 0; i < count; i++) {
        ((uint32_t *)out)[1 + i] = (uint32_t)(header + 16 * i);
        PyObject *value = PyTuple_GET_ITEM(arguments, i);
        int status = 1;
        if (formats[i] != 'P') status = pack_number(formats[i], value, place(packed, i));
        else if (addresses) memcpy(place(packed, i), addresses++, 8);
        else status = pack_address(value, place(packed, i));
        if (status > 0) continue;
        Py_DECREF(packed);
        if (status < 0) return NULL;
        Py_RETURN_NONE;
    }
    return packed;
}

/* pack(formats: bytes, arguments: tuple) -> bytes, or None if one needs the slow path */
PyObject *ao_pack(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *formats;
    Py_ssize_t count;
    PyObject *arguments;
    if (!PyArg_ParseTuple(args, "y#O!:pack", &formats, &count, &PyTuple_Type, &arguments)) return NULL;
    return ao_pack_arguments(formats, count, arguments, NULL);
}
