/* One request of a kernel, or a batch of them: starts the handler, and answers when it is done.
 *
 * A handler runs as an eager task. If it is done with its first step, the reply goes out at once;
 * otherwise the request is the task's done callback.
 */
#include "calls.h"

static PyObject *s_failed, *s_encode, *s_idle, *s_result, *s_done, *s_add_done_callback, *s_create_task, *s_cancel;
static PyObject *task_type, *cancelled_error, *task_names; /* names of the keyword arguments of a task */

int ao_request_prepare(void) {
    if (task_names) return 0;
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    if (!asyncio) return -1;
    task_type = PyObject_GetAttrString(asyncio, "Task");
    cancelled_error = PyObject_GetAttrString(asyncio, "CancelledError");
    Py_DECREF(asyncio);
    s_failed = PyUnicode_InternFromString("failed");
    s_encode = PyUnicode_InternFromString("encode");
    s_idle = PyUnicode_InternFromString("idle");
    s_result = PyUnicode_InternFromString("result");
    s_done = PyUnicode_InternFromString("done");
    s_add_done_callback = PyUnicode_InternFromString("add_done_callback");
    s_create_task = PyUnicode_InternFromString("create_task");
    s_cancel = PyUnicode_InternFromString("cancel");
#if PY_VERSION_HEX >= 0x030C0000
    task_names = Py_BuildValue("(sss)", "loop", "context", "eager_start");
#else
    task_names = Py_BuildValue("(s)", "context");
#endif
    return task_type && cancelled_error && task_names && !PyErr_Occurred() ? 0 : -1;
}

/* ---- replies ---- */

static void write_reply(const AoChannel *self, const AoEntry *entry, uint64_t status, uint64_t kind, uint64_t value, size_t nbytes) {
    unsigned char *cell = self->shared + AO_CELLS_OFFSET + (size_t)entry->cell * AO_CELL_STRIDE;
    uint64_t control = nbytes | kind << AO_REPLY_KIND_SHIFT | status << AO_REPLY_STATUS_SHIFT | (entry->ticket + 1) << AO_REPLY_TICKET_SHIFT;
    /* Value before control, on one cache line: a device reads both with one load. */
    __atomic_store_n((uint64_t *)cell, value, __ATOMIC_RELAXED);
    __atomic_store_n((uint64_t *)(cell + 8), control, __ATOMIC_RELEASE);
}

void ao_answer(AoChannel *self, AoEntry *entry, uint64_t status, uint64_t kind, const unsigned char *data, size_t nbytes, int64_t code) {
    if (!entry->open) return;
    entry->open = 0;
    if (entry->cell == AO_NO_CELL) return;
    self->awaited[entry->cell / 32] &= ~(1u << entry->cell % 32);
    if (status == AO_STATUS_CANCELLED) entry->caller->told = 1;
    uint64_t value = (uint64_t)code;
    size_t total = nbytes * entry->rows;
    if (total > AO_INLINE_NBYTES) {
        memcpy(self->shared + AO_CELLS_OFFSET + (size_t)entry->cell * AO_CELL_STRIDE + AO_CELL_DATA, data, total);
    } else if (total) {
        value = 0;
        memcpy(&value, data, total);
    }
    write_reply(self, entry, status, kind, value, total);
}

/* Answers whatever is open, in order; a result has handler->reply_nbytes bytes per row. */
static void answer_all(AoRequest *self, uint64_t status, const unsigned char *data, int64_t code) {
    if (self->channel->closed) return;
    size_t nbytes = data ? self->handler->reply_nbytes : 0;
    for (uint32_t i = 0; i < self->count; i++) {
        ao_answer(self->channel, &self->entries[i], status, data ? self->handler->reply_kind : AO_KIND_NONE, data, nbytes, code);
        if (data) data += nbytes * self->entries[i].rows;
    }
    ao_host_notify();
}

static void tell_served(AoRequest *self) {
    PyObject *told = Py_NewRef(self->channel->on_served);
    PyObject *ignored = PyObject_CallFunction(told, "OLi", (PyObject *)self, (long long)self->began_ns, (int)self->failed);
    if (!ignored) PyErr_WriteUnraisable(told);
    Py_XDECREF(ignored);
    Py_DECREF(told);
}

int ao_request_close(AoRequest *self) {
    if (self->finished) return 0;
    self->finished = 1;
    int status = 0;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (self->began_ns && self->channel->on_served) tell_served(self);
    Py_CLEAR(self->task);
    for (uint32_t i = 0; i < self->count; i++) {
        AoCaller *caller = self->entries[i].caller;
        if (PySet_Discard(caller->requests, (PyObject *)self) < 0) status = -1;
        if (--caller->active == 0 && caller->ended) {
            PyObject *ignored = PyObject_CallMethodOneArg(self->channel->owner, s_idle, (PyObject *)caller);
            if (!ignored) status = -1;
            Py_XDECREF(ignored);
        }
        if (status < 0 && type) PyErr_WriteUnraisable((PyObject *)self);
    }
    if (type) PyErr_Restore(type, value, traceback);
    return status;
}
/* ---- the end of a handler ---- */

int ao_request_fail(AoRequest *self) {
    PyObject *type, *error, *traceback;
    self->failed = 1;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    if (PyErr_GivenExceptionMatches(error, cancelled_error)) answer_all(self, AO_STATUS_CANCELLED, NULL, 0);
    PyObject *ignored = PyObject_CallMethodObjArgs(self->channel->owner, s_failed, (PyObject *)self, error, NULL);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(ignored);
    int status = ignored ? 0 : -1;
    answer_all(self, AO_STATUS_ERROR, NULL, AO_CODE_RAISED); /* unless failed() has answered */
    return ao_request_close(self) < 0 ? -1 : status;
}

/* An array of just what the reply takes needs no look of Python's; 1: it is none. */
static int complete_batch(AoRequest *self, PyObject *result) {
    Py_buffer view;
    if (!PyObject_CheckBuffer(result) || PyObject_GetBuffer(result, &view, PyBUF_ND | PyBUF_FORMAT) < 0) {
        PyErr_Clear();
        return 1;
    }
    int fits = ao_handler_gives(self->handler, &view, self->rows);
    if (fits) answer_all(self, AO_STATUS_OK, view.buf, 0);
    PyBuffer_Release(&view);
    return fits ? ao_request_close(self) : 1;
}

/* `result` is what the handler returned; steals nothing. */
static int complete(AoRequest *self, PyObject *result) {
    unsigned char plain[8];
    if (self->handler->reply_nbytes == 0 && result == Py_None) {
        answer_all(self, AO_STATUS_OK, NULL, 0);
        return ao_request_close(self);
    }
    if (self->rows == 1 && !self->handler->batch && ao_handler_encode(self->handler, result, plain)) {
        answer_all(self, AO_STATUS_OK, plain, 0);
        return ao_request_close(self);
    }
    if (self->handler->batch) {
        int status = complete_batch(self, result);
        if (status <= 0) return status;
    }
    PyObject *bytes = PyObject_CallMethodObjArgs(self->channel->owner, s_encode, (PyObject *)self, result, NULL);
    if (!bytes) return ao_request_fail(self);
    Py_buffer view;
    if (PyObject_GetBuffer(bytes, &view, PyBUF_SIMPLE) < 0) {
        Py_DECREF(bytes);
        return ao_request_fail(self);
    }
    int status;
    if ((size_t)view.len == (size_t)self->rows * self->handler->reply_nbytes) {
        answer_all(self, AO_STATUS_OK, view.buf, 0);
        status = ao_request_close(self);
    } else {
        PyErr_Format(PyExc_ValueError, "encode() gave %zd bytes for %u rows", view.len, self->rows);
        status = ao_request_fail(self);
    }
    PyBuffer_Release(&view);
    Py_DECREF(bytes);
    return status;
}

static int finish_task(AoRequest *self, PyObject *task) {
    PyObject *result = PyObject_CallMethodNoArgs(task, s_result);
    if (!result) return ao_request_fail(self);
    int status = complete(self, result);
    Py_DECREF(result);
    return status;
}

/* request(task): the task's done callback. */
static PyObject *request_call(AoRequest *self, PyObject *args, PyObject *Py_UNUSED(kwargs)) {
    PyObject *task;
    if (!PyArg_ParseTuple(args, "O:Request", &task)) return NULL;
    if (finish_task(self, task) < 0) return NULL;
    Py_RETURN_NONE;
}

/* ---- the start of a handler ---- */

/* The context of a handler: its launch's, which names that launch already, or a batch's, which names the batch. */
static PyObject *make_context(AoRequest *self) {
    if (!self->handler->batch) return PyContext_Copy(self->entries[0].caller->context);
    PyObject *context = PyContext_Copy(self->handler->context);
    if (!context || PyContext_Enter(context) < 0) {
        Py_XDECREF(context);
        return NULL;
    }
    PyObject *token = PyContextVar_Set(ao_calling, (PyObject *)self);
    Py_XDECREF(token);
    if (PyContext_Exit(context) < 0 || !token) Py_CLEAR(context);
    return context;
}

static PyObject *make_task(AoRequest *self, PyObject *coroutine) {
    AoChannel *channel = self->channel;
    PyObject *context = make_context(self), *task = NULL;
    if (!context) return NULL;
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *args[] = {coroutine, channel->loop, context, Py_True};
    task = PyObject_Vectorcall(task_type, args, 1, task_names);
#else
    PyObject *args[] = {channel->loop, coroutine, context};
    task = PyObject_VectorcallMethod(s_create_task, args, 2, task_names);
#endif
    Py_DECREF(context);
    return task;
}

/* Whether all of its launches were stopped. */
static int is_unwanted(const AoRequest *self) {
    if (self->channel->closed) return 1;
    for (uint32_t i = 0; i < self->count; i++)
        if (!self->entries[i].caller->stopped) return 0;
    return 1;
}

/* Its handler has suspended: its launches have to know it, to be able to stop it. */
static int await_task(AoRequest *self, PyObject *task) {
    self->channel->suspended++;
    for (uint32_t i = 0; i < self->count; i++)
        if (PySet_Add(self->entries[i].caller->requests, (PyObject *)self) < 0) return -1;
    Py_XSETREF(self->task, Py_NewRef(task));
    PyObject *ignored = PyObject_CallMethodOneArg(task, s_add_done_callback, (PyObject *)self);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

int ao_request_start(AoRequest *self, PyObject *coroutine) {
    if (self->channel->on_served) self->began_ns = ao_now_ns();
    if (!coroutine) return ao_request_fail(self);
    int wanted = !is_unwanted(self);
    self->running = 1;
    PyObject *task = make_task(self, coroutine);
    self->running = 0;
    Py_DECREF(coroutine);
    if (!task) return ao_request_fail(self);
    PyObject *done = PyObject_CallMethodNoArgs(task, s_done);
    int status = !done ? -1 : done == Py_True ? finish_task(self, task) : await_task(self, task);
    /* Stopped in its first step, when nobody could see its task yet. */
    if (status == 0 && done == Py_False && wanted && is_unwanted(self)) {
        PyObject *ignored = PyObject_CallMethodNoArgs(task, s_cancel);
        Py_XDECREF(ignored);
        status = ignored ? 0 : -1;
    }
    Py_XDECREF(done);
    Py_DECREF(task);
    return status;
}

static PyObject *request_start(AoRequest *self, PyObject *coroutine) {
    if (ao_request_start(self, Py_NewRef(coroutine)) < 0) return NULL;
    Py_RETURN_NONE;
}

/* end(status, code): answers what is open without a result, and closes the request. */
static PyObject *request_end(AoRequest *self, PyObject *args) {
    unsigned status;
    long long code = 0;
    if (!PyArg_ParseTuple(args, "I|L:end", &status, &code)) return NULL;
    answer_all(self, status, NULL, code);
    if (!self->running && self->task == NULL && ao_request_close(self) < 0) return NULL;
    Py_RETURN_NONE;
}

/* drop(caller) -> whether somebody else still wants an answer: those of `caller` get CANCELLED. */
static PyObject *request_drop(AoRequest *self, PyObject *caller) {
    int others = 0;
    for (uint32_t i = 0; i < self->count; i++) {
        AoEntry *entry = &self->entries[i];
        if ((PyObject *)entry->caller != caller) others = 1;
        else if (!self->channel->closed) ao_answer(self->channel, entry, AO_STATUS_CANCELLED, AO_KIND_NONE, NULL, 0, 0);
    }
    ao_host_notify();
    return PyBool_FromLong(others);
}

static PyObject *request_callers(AoRequest *self, void *Py_UNUSED(closure)) {
    PyObject *found = PyDict_New(); /* ordered, each once */
    for (uint32_t i = 0; found && i < self->count; i++)
        if (PyDict_SetItem(found, (PyObject *)self->entries[i].caller, Py_None) < 0) Py_CLEAR(found);
    PyObject *list = found ? PyDict_Keys(found) : NULL;
    Py_XDECREF(found);
    return list;
}

AoRequest *ao_request_make(AoChannel *channel, AoHandler *handler) {
    AoRequest *self = PyObject_GC_New(AoRequest, &AoRequest_Type);
    if (!self) return NULL;
    memset((char *)self + sizeof(PyObject), 0, sizeof *self - sizeof(PyObject));
    self->channel = (AoChannel *)Py_NewRef(channel);
    self->handler = (AoHandler *)Py_NewRef(handler);
    self->entries = &self->first;
    self->capacity = 1;
    PyObject_GC_Track(self);
    return self;
}

static int add_rows(AoRequest *self, uint32_t rows, const unsigned char *data) {
    size_t width = self->handler->nbytes;
    if (!self->data && !(self->data = PyByteArray_FromStringAndSize(NULL, 0))) return -1;
    if (self->rows + rows > self->row_capacity) {
        uint32_t capacity = self->row_capacity ? 4 * self->row_capacity : self->handler->batch ? 64 : rows;
        if (PyByteArray_Resize(self->data, (Py_ssize_t)(capacity * width)) < 0) return -1;
        self->row_capacity = capacity;
    }
    memcpy(PyByteArray_AS_STRING(self->data) + self->rows * width, data, rows * width);
    return 0;
}

int ao_request_seal(AoRequest *self) {
    return self->data ? PyByteArray_Resize(self->data, (Py_ssize_t)((size_t)self->rows * self->handler->nbytes)) : 0;
}

int ao_request_add(AoRequest *self, const AoEntry *entry, const unsigned char *data) {
    if (self->count == self->capacity) {
        uint32_t capacity = self->capacity == 1 ? 64 : 4 * self->capacity;
        AoEntry *entries = PyMem_Malloc(capacity * sizeof *entries);
        if (!entries) return PyErr_NoMemory(), -1;
        memcpy(entries, self->entries, self->count * sizeof *entries);
        if (self->entries != &self->first) PyMem_Free(self->entries);
        self->entries = entries;
        self->capacity = capacity;
    }
    if (data && add_rows(self, entry->rows, data) < 0) return -1;
    self->entries[self->count] = *entry;
    if (entry->cell != AO_NO_CELL) self->channel->awaited[entry->cell / 32] |= 1u << entry->cell % 32;
    Py_INCREF(entry->caller);
    entry->caller->active++;
    self->count++;
    self->rows += entry->rows;
    return 0;
}

static int request_traverse(AoRequest *self, visitproc visit, void *arg) {
    Py_VISIT(self->channel);
    Py_VISIT(self->handler);
    Py_VISIT(self->task);
    for (uint32_t i = 0; i < self->count; i++) Py_VISIT(self->entries[i].caller);
    return 0;
}

static int request_clear(AoRequest *self) {
    Py_CLEAR(self->task);
    uint32_t count = self->count;
    self->count = 0;
    for (uint32_t i = 0; i < count; i++) Py_DECREF(self->entries[i].caller);
    return 0;
}

static void request_dealloc(AoRequest *self) {
    PyObject_GC_UnTrack(self);
    request_clear(self);
    if (self->entries != &self->first) PyMem_Free(self->entries);
    Py_CLEAR(self->data);
    Py_CLEAR(self->handler);
    Py_CLEAR(self->channel);
    PyObject_GC_Del(self);
}

static PyMethodDef request_methods[] = {
    {"start", (PyCFunction)request_start, METH_O, "Run a coroutine whose result is the reply."},
    {"end", (PyCFunction)request_end, METH_VARARGS, "Answer what is open without a result."},
    {"drop", (PyCFunction)request_drop, METH_O, "Answer CANCELLED to one launch; whether others remain."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef request_members[] = {
    {"handler", T_OBJECT, offsetof(AoRequest, handler), READONLY, NULL},
    {"data", T_OBJECT, offsetof(AoRequest, data), READONLY, NULL},
    {"task", T_OBJECT, offsetof(AoRequest, task), READONLY, NULL},
    {"rows", T_UINT, offsetof(AoRequest, rows), READONLY, NULL},
    {"count", T_UINT, offsetof(AoRequest, count), READONLY, NULL},
    {"finished", T_BOOL, offsetof(AoRequest, finished), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef request_getset[] = {
    {"callers", (getter)request_callers, NULL, "The launches it comes from, each once.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
PyTypeObject AoRequest_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Request",
    .tp_doc = "One request, or a batch of them.",
    .tp_basicsize = sizeof(AoRequest),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)request_dealloc,
    .tp_traverse = (traverseproc)request_traverse,
    .tp_clear = (inquiry)request_clear,
    .tp_call = (ternaryfunc)request_call,
    .tp_methods = request_methods,
    .tp_members = request_members,
    .tp_getset = request_getset,
};
