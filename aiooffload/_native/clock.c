/* A one-shot timerfd: the loop's own timers round to a millisecond. */
#include "native.h"

#include <errno.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <unistd.h>

typedef struct {
    PyObject_HEAD
    int fd;                   /* -1 once closed */
} AoTimer;

static int timer_arm(AoTimer *self, int64_t when_ns) {
    struct itimerspec spec = {{0, 0}, {when_ns / 1000000000, when_ns % 1000000000}};
    if (self->fd < 0) {
        PyErr_SetString(PyExc_ValueError, "the timer is closed");
        return -1;
    }
    if (timerfd_settime(self->fd, TFD_TIMER_ABSTIME, &spec, NULL) < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return 0;
}

static PyObject *timer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Timer", names)) return NULL;
    AoTimer *self = (AoTimer *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (self->fd < 0) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyObject *timer_set_at(AoTimer *self, PyObject *value) {
    long long when = PyLong_AsLongLong(value);
    if (when == -1 && PyErr_Occurred()) return NULL;
    if (timer_arm(self, when > 0 ? when : 1) < 0) return NULL; /* 0 would disarm it */
    Py_RETURN_NONE;
}

static PyObject *timer_clear(AoTimer *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t count;
    if (timer_arm(self, 0) < 0) return NULL;
    if (read(self->fd, &count, sizeof count) < 0 && errno != EAGAIN) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *timer_close(AoTimer *self, PyObject *Py_UNUSED(ignored)) {
    if (self->fd >= 0) close(self->fd);
    self->fd = -1;
    Py_RETURN_NONE;
}

static PyObject *timer_fileno(AoTimer *self, PyObject *Py_UNUSED(ignored)) { return PyLong_FromLong(self->fd); }

static void timer_dealloc(AoTimer *self) {
    if (self->fd >= 0) close(self->fd);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The kernel may delay a sleeping thread's timers by its slack, 50 us unless changed. */
PyObject *ao_timer_slack(PyObject *Py_UNUSED(module), PyObject *value) {
    unsigned long wanted = PyLong_AsUnsignedLong(value);
    if (wanted == (unsigned long)-1 && PyErr_Occurred()) return NULL;
    int before = prctl(PR_GET_TIMERSLACK);
    if (before < 0 || prctl(PR_SET_TIMERSLACK, wanted) < 0) return PyErr_SetFromErrno(PyExc_OSError);
    return PyLong_FromLong(before);
}

static PyMethodDef timer_methods[] = {
    {"set_at", (PyCFunction)timer_set_at, METH_O, "Fire at an absolute time of now_ns()."},
    {"clear", (PyCFunction)timer_clear, METH_NOARGS, "Disarm it and swallow a firing that was not read."},
    {"close", (PyCFunction)timer_close, METH_NOARGS, "Close the descriptor; idempotent."},
    {"fileno", (PyCFunction)timer_fileno, METH_NOARGS, "The descriptor, -1 once closed."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject AoTimer_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Timer",
    .tp_doc = "A one-shot timerfd with nanosecond resolution.",
    .tp_basicsize = sizeof(AoTimer),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = timer_new,
    .tp_dealloc = (destructor)timer_dealloc,
    .tp_methods = timer_methods,
};
