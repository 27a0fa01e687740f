/* One request of a kernel, or a batch of them: starts the handler, and answers when it is done.
 *
 * A handler runs as an eager task. What the task runs is the request itself, which passes everything
 * on to the handler's coroutine: so it knows when that is done, and the reply goes out at once, not
 * with the callbacks of the task in the loop's next turn.
 */
#include "calls.h"

static PyObject *s_failed, *s_encode, *s_idle, *s_throw, *s_close, *s_create_task, *s_cancel, *s_call_soon, *s_add_done_callback;
static PyObject *task_type, *look, *coroutine_type, *cancelled_error; /* look: calls exception() of a task */
static PyObject *context_name, *task_names; /* names of the keyword arguments of a task */

int ao_request_prepare(void) {
    if (task_names) return 0;
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    if (!asyncio) return -1;
    task_type = PyObject_GetAttrString(asyncio, "Task");
    cancelled_error = PyObject_GetAttrString(asyncio, "CancelledError");
    Py_DECREF(asyncio);
    PyObject *operator = PyImport_ImportModule("operator");
    look = operator ? PyObject_CallMethod(operator, "methodcaller", "s", "exception") : NULL;
    Py_XDECREF(operator);
    PyObject *abc = PyImport_ImportModule("collections.abc");
    coroutine_type = abc ? PyObject_GetAttrString(abc, "Coroutine") : NULL;
    Py_XDECREF(abc);
    s_failed = PyUnicode_InternFromString("failed");
    s_encode = PyUnicode_InternFromString("encode");
    s_idle = PyUnicode_InternFromString("idle");
    s_throw = PyUnicode_InternFromString("throw");
    s_close = PyUnicode_InternFromString("close");
    s_add_done_callback = PyUnicode_InternFromString("add_done_callback");
    s_call_soon = PyUnicode_InternFromString("call_soon");
    context_name = Py_BuildValue("(s)", "context");
    s_create_task = PyUnicode_InternFromString("create_task");
    s_cancel = PyUnicode_InternFromString("cancel");
#if PY_VERSION_HEX >= 0x030C0000
    task_names = Py_BuildValue("(sss)", "loop", "context", "eager_start");
#else
    task_names = Py_BuildValue("(s)", "context");
#endif
    return task_type && look && context_name && coroutine_type && cancelled_error && task_names && !PyErr_Occurred() ? 0 : -1;
}

/* Most of what is sent is one word, for which memcpy is a long way. */
static inline void copy_few(void *to, const void *from, size_t nbytes) {
    if (nbytes == 8) memcpy(to, from, 8);
    else memcpy(to, from, nbytes);
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
        copy_few(&value, data, total);
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

/* Whether entry `i` is of another launch than the one before. A launch is kept alive once for a run of entries. */
static int starts_run(const AoRequest *self, uint32_t i) { return i == 0 || self->entries[i].caller != self->entries[i - 1].caller; }

/* The current exception, normalised and with its traceback, taken off the thread; NULL if there is none. */
static PyObject *take_exception(void) {
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    if (!type) return NULL;
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback) PyException_SetTraceback(error, traceback);
    Py_DECREF(type);
    Py_XDECREF(traceback);
    return error;
}

static void raise(PyObject *error) {
    PyObject *traceback = PyException_GetTraceback(error);
    PyErr_Restore(Py_NewRef(Py_TYPE(error)), Py_NewRef(error), traceback);
}

static void tell_served(AoRequest *self) {
    PyObject *told = Py_NewRef(self->channel->on_served);
    PyObject *ignored = PyObject_CallFunction(told, "OLi", (PyObject *)self, (long long)self->began_ns, (int)self->failed);
    if (!ignored) PyErr_WriteUnraisable(told);
    Py_XDECREF(ignored);
    Py_DECREF(told);
}

/* Nothing of an ended launch runs any more. Told from outside of the last handler: what follows is not its affair, and
 * runs neither in its context nor as its task. */
static int tell_idle(AoRequest *self, AoCaller *caller) {
    AoChannel *channel = self->channel;
    PyObject *ignored;
    if (!self->ending) {
        ignored = PyObject_CallMethodOneArg(channel->owner, s_idle, (PyObject *)caller);
    } else {
        PyObject *idle = PyObject_GetAttr(channel->owner, s_idle);
        PyObject *args[] = {channel->loop, idle, (PyObject *)caller, channel->context};
        ignored = idle ? PyObject_VectorcallMethod(s_call_soon, args, 3, context_name) : NULL;
        Py_XDECREF(idle);
    }
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

int ao_request_close(AoRequest *self) {
    if (self->finished) return 0;
    self->finished = 1;
    PyObject *before = take_exception(), *failure = NULL;
    if (self->began_ns && self->channel->on_served) tell_served(self);
    Py_CLEAR(self->task);
    for (uint32_t i = 0; i < self->count; i++) {
        AoCaller *caller = self->entries[i].caller;
        int status = self->listed && starts_run(self, i) ? PySet_Discard(caller->requests, (PyObject *)self) : 0;
        if (--caller->active == 0 && caller->ended && status >= 0) status = tell_idle(self, caller);
        if (status >= 0) continue;
        if (failure) PyErr_WriteUnraisable((PyObject *)self); /* each launch is told, whatever another one's end meets */
        else failure = take_exception();
    }
    int status = failure ? -1 : 0;
    if (failure) raise(failure);
    if (failure && before) PyErr_WriteUnraisable((PyObject *)self);
    if (before) raise(before);
    Py_XDECREF(failure);
    Py_XDECREF(before);
    return status;
}

/* ---- the end of a handler ---- */

/* The handler has raised `error`. */
static int fail(AoRequest *self, PyObject *error) {
    self->failed = 1;
    if (PyErr_GivenExceptionMatches(error, cancelled_error)) answer_all(self, AO_STATUS_CANCELLED, NULL, 0);
    PyObject *ignored = PyObject_CallMethodObjArgs(self->channel->owner, s_failed, (PyObject *)self, error, NULL);
    Py_XDECREF(ignored);
    int status = ignored ? 0 : -1;
    answer_all(self, AO_STATUS_ERROR, NULL, AO_CODE_RAISED); /* unless failed() has answered */
    return ao_request_close(self) < 0 ? -1 : status;
}

int ao_request_fail(AoRequest *self) {
    PyObject *error = take_exception();
    int status = fail(self, error);
    Py_DECREF(error);
    return status;
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

/* The handler has returned `result`. 1: it is no answer, and the current exception, which says why, is the handler's. */
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
    if (!bytes) return 1;
    Py_buffer view;
    int status = 1;
    if (PyObject_GetBuffer(bytes, &view, PyBUF_SIMPLE) == 0) {
        if ((size_t)view.len == (size_t)self->rows * self->handler->reply_nbytes) {
            answer_all(self, AO_STATUS_OK, view.buf, 0);
            status = ao_request_close(self);
        } else {
            PyErr_Format(PyExc_ValueError, "encode() gave %zd bytes for %u rows", view.len, self->rows);
        }
        PyBuffer_Release(&view);
    }
    Py_DECREF(bytes);
    return status;
}

/* ---- what the task runs ---- */

/* Those end the task as well, and all but the first the loop; other exceptions are the launch's affair alone. */
static int ends_task(PyObject *error) {
    return PyErr_GivenExceptionMatches(error, cancelled_error) || PyErr_GivenExceptionMatches(error, PyExc_KeyboardInterrupt) ||
           PyErr_GivenExceptionMatches(error, PyExc_SystemExit);
}

/* Somebody has to look at the exception that a task ends with, or it is reported as one that nobody did. */
static int look_at_end(PyObject *task) {
    PyObject *ignored = PyObject_CallMethodOneArg(task, s_add_done_callback, look);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

/* The handler has ended in a step of its task: answers. -1: the current exception is the task's end, too. */
static int end_in_task(AoRequest *self, PyObject *outcome, int raised) {
    PyObject *error = raised ? Py_NewRef(outcome) : NULL;
    if (!raised) {
        int status = complete(self, outcome);
        if (status <= 0) return status;
        error = take_exception();
    }
    PyObject *task = ends_task(error) ? Py_XNewRef(self->task) : NULL;
    int status = fail(self, error);
    if (status == 0 && task && (PyErr_GivenExceptionMatches(error, cancelled_error) || look_at_end(task) == 0)) raise(error);
    Py_XDECREF(task);
    Py_DECREF(error);
    return PyErr_Occurred() ? -1 : status;
}

/* What a step of the handler has come to, as a step of its task. In the first one, of which ao_request_start() waits
 * for the end, the outcome is left to that: the task is then no longer the current one. */
static PySendResult pass_on(AoRequest *self, PySendResult step, PyObject **result) {
    self->stepping = 0;
    if (step == PYGEN_NEXT) return step;
    Py_CLEAR(self->coroutine);
    int raised = step == PYGEN_ERROR, status = 0;
    PyObject *outcome = raised ? take_exception() : *result;
    if (self->running) {
        self->outcome = Py_NewRef(outcome);
        self->raised = (char)raised;
    } else {
        self->ending = 1;
        status = end_in_task(self, outcome, raised);
        self->ending = 0;
    }
    Py_DECREF(outcome);
    *result = status < 0 ? NULL : Py_NewRef(Py_None);
    return status < 0 ? PYGEN_ERROR : PYGEN_RETURN;
}

/* The coroutine, for a step of it; NULL with an exception if it cannot take one. */
static PyObject *begin_step(AoRequest *self) {
    if (self->stepping) return PyErr_SetString(PyExc_ValueError, "the handler of this request runs already"), NULL;
    if (!self->coroutine) return PyErr_SetString(PyExc_RuntimeError, "the handler of this request is over"), NULL;
    self->stepping = 1;
    return Py_NewRef(self->coroutine);
}

static PySendResult request_am_send(AoRequest *self, PyObject *value, PyObject **result) {
    *result = NULL;
    PyObject *coroutine = begin_step(self);
    if (!coroutine) return PYGEN_ERROR;
    PySendResult step = pass_on(self, PyIter_Send(coroutine, value, result), result);
    Py_DECREF(coroutine);
    return step;
}

/* The result of a step as send() and throw() give it. */
static PyObject *as_call(PySendResult step, PyObject *result) {
    if (step != PYGEN_RETURN) return result;
    Py_XDECREF(result);
    PyErr_SetNone(PyExc_StopIteration);
    return NULL;
}

static PyObject *request_send(AoRequest *self, PyObject *value) {
    PyObject *result;
    PySendResult step = request_am_send(self, value, &result);
    return as_call(step, result);
}

static PyObject *request_iternext(AoRequest *self) {
    PyObject *result;
    PySendResult step = request_am_send(self, Py_None, &result);
    if (step == PYGEN_RETURN) Py_CLEAR(result); /* None, which no exception stands for as well */
    return result;
}

static PyObject *request_throw(AoRequest *self, PyObject *args) {
    if (PyTuple_GET_SIZE(args) == 0) return PyErr_SetString(PyExc_TypeError, "throw() takes an exception"), NULL;
    PyObject *coroutine = begin_step(self);
    if (!coroutine) return NULL;
    PyObject *throw = PyObject_GetAttr(coroutine, s_throw), *result = throw ? PyObject_Call(throw, args, NULL) : NULL;
    Py_XDECREF(throw);
    PySendResult step = result ? PYGEN_NEXT : PYGEN_ERROR;
    if (!result && PyErr_ExceptionMatches(PyExc_StopIteration)) {
        PyObject *stop = take_exception();
        result = PyObject_GetAttrString(stop, "value");
        Py_DECREF(stop);
        if (result) step = PYGEN_RETURN;
    }
    step = pass_on(self, step, &result);
    Py_DECREF(coroutine);
    return as_call(step, result);
}

static int give_up(AoRequest *self, const char *why) {
    PyErr_SetString(PyExc_RuntimeError, why);
    return ao_request_fail(self);
}

/* close(): ends the handler where it waits. */
static PyObject *request_close(AoRequest *self, PyObject *Py_UNUSED(ignored)) {
    if (!self->coroutine) Py_RETURN_NONE;
    PyObject *coroutine = begin_step(self);
    if (!coroutine) return NULL;
    PyObject *ignored = PyObject_CallMethodNoArgs(coroutine, s_close);
    Py_DECREF(coroutine);
    self->stepping = 0;
    if (!ignored) return NULL;
    Py_DECREF(ignored);
    Py_CLEAR(self->coroutine);
    if (give_up(self, "the host function's coroutine was closed") < 0) return NULL;
    Py_RETURN_NONE;
}

/* What debuggers and the texts of tasks ask a coroutine for is the handler's. */
static PyObject *request_of_coroutine(AoRequest *self, void *name) {
    if (self->coroutine) return PyObject_GetAttrString(self->coroutine, name);
    if (strcmp(name, "cr_running") == 0 || strcmp(name, "cr_suspended") == 0) Py_RETURN_FALSE;
    if (strncmp(name, "cr_", 3) == 0) Py_RETURN_NONE;
    return PyObject_GetAttrString(self->handler->callable, name);
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

static PyObject *make_task(AoRequest *self) {
    AoChannel *channel = self->channel;
    PyObject *context = make_context(self), *task = NULL;
    if (!context) return NULL;
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *args[] = {(PyObject *)self, channel->loop, context, Py_True};
    task = PyObject_Vectorcall(task_type, args, 1, task_names);
#else
    PyObject *args[] = {channel->loop, (PyObject *)self, context};
    task = PyObject_VectorcallMethod(s_create_task, args, 2, task_names);
#endif
    Py_DECREF(context);
    return task;
}

int ao_request_drop(AoRequest *self) {
    if (self->channel->closed) return 0;
    int wanted = 0, answered = 0;
    for (uint32_t i = 0; i < self->count; i++) {
        AoEntry *entry = &self->entries[i];
        wanted |= !entry->caller->stopped;
        if (!entry->caller->stopped || !entry->open) continue;
        ao_answer(self->channel, entry, AO_STATUS_CANCELLED, AO_KIND_NONE, NULL, 0, 0);
        answered = 1;
    }
    if (answered) ao_host_notify();
    return wanted;
}

/* Its handler has suspended: its launches have to know it, to be able to stop it. */
static int await_task(AoRequest *self, PyObject *task) {
    self->channel->suspended++;
    self->listed = 1;
    for (uint32_t i = 0; i < self->count; i++)
        if (starts_run(self, i) && PySet_Add(self->entries[i].caller->requests, (PyObject *)self) < 0) return -1;
    Py_XSETREF(self->task, Py_NewRef(task));
#if PY_VERSION_HEX >= 0x030C0000
    return 0;
#else /* a task factory may have made it of something that never comes here */
    PyObject *ended = PyObject_GetAttrString((PyObject *)self, "task_ended");
    PyObject *ignored = ended ? PyObject_CallMethodOneArg(task, s_add_done_callback, ended) : NULL;
    Py_XDECREF(ended);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
#endif
}

/* task_ended(task): its done callback, where the task may be somebody else's. */
static PyObject *request_task_ended(AoRequest *self, PyObject *Py_UNUSED(task)) {
    if (self->finished) Py_RETURN_NONE;
    PyObject *ignored = request_close(self, NULL);
    Py_XDECREF(ignored);
    if (!ignored || (!self->finished && give_up(self, "the task of the host function has ended without it") < 0)) return NULL;
    Py_RETURN_NONE;
}

/* As a task checks what it is given. */
static int check_coroutine(PyObject *coroutine) {
    if (PyCoro_CheckExact(coroutine)) return 0;
    int is_one = PyObject_IsInstance(coroutine, coroutine_type);
    if (is_one == 0) PyErr_Format(PyExc_TypeError, "a coroutine was expected, got %R", coroutine);
    return is_one > 0 ? 0 : -1;
}

int ao_request_start(AoRequest *self, PyObject *coroutine) {
    if (self->coroutine) {
        Py_XDECREF(coroutine);
        PyErr_SetString(PyExc_RuntimeError, "this request has a handler");
        return -1;
    }
    if (self->channel->on_served) self->began_ns = ao_now_ns();
    if (!coroutine) return ao_request_fail(self);
    if (check_coroutine(coroutine) < 0) {
        Py_DECREF(coroutine);
        return ao_request_fail(self);
    }
    self->coroutine = coroutine;
    self->running = 1;
    PyObject *task = make_task(self);
    self->running = 0;
    if (!task) {
        Py_CLEAR(self->coroutine);
        return ao_request_fail(self);
    }
    int status;
    if (self->outcome) {
        PyObject *outcome = self->outcome;
        self->outcome = NULL;
        status = self->raised ? fail(self, outcome) : complete(self, outcome);
        if (status > 0) status = ao_request_fail(self);
        Py_DECREF(outcome);
    } else {
        status = await_task(self, task);
        /* Stopped in its first step, when nobody could see its task yet. */
        if (status == 0 && !ao_request_drop(self)) {
            PyObject *ignored = PyObject_CallMethodNoArgs(task, s_cancel);
            Py_XDECREF(ignored);
            status = ignored ? 0 : -1;
        }
    }
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

static PyObject *request_drop(AoRequest *self, PyObject *Py_UNUSED(ignored)) { return PyBool_FromLong(ao_request_drop(self)); }

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
    copy_few(PyByteArray_AS_STRING(self->data) + self->rows * width, data, rows * width);
    return 0;
}

int ao_request_seal(AoRequest *self) {
    return self->data ? PyByteArray_Resize(self->data, (Py_ssize_t)((size_t)self->rows * self->handler->nbytes)) : 0;
}

static int grow_entries(AoRequest *self) {
    uint32_t capacity = self->capacity == 1 ? 64 : 4 * self->capacity;
    AoEntry *entries = PyMem_Malloc(capacity * sizeof *entries);
    if (!entries) return PyErr_NoMemory(), -1;
    memcpy(entries, self->entries, self->count * sizeof *entries);
    if (self->entries != &self->first) PyMem_Free(self->entries);
    self->entries = entries;
    self->capacity = capacity;
    return 0;
}

int ao_request_add(AoRequest *self, AoCaller *caller, uint64_t ticket, unsigned cell, unsigned rows, const unsigned char *data) {
    if (self->count == self->capacity && grow_entries(self) < 0) return -1;
    if (data && add_rows(self, rows, data) < 0) return -1;
    AoEntry *entry = &self->entries[self->count];
    entry->ticket = ticket;
    entry->caller = caller;
    entry->cell = cell;
    entry->rows = (uint16_t)rows;
    entry->open = 1;
    if (cell != AO_NO_CELL) self->channel->awaited[cell / 32] |= 1u << cell % 32;
    if (starts_run(self, self->count++)) Py_INCREF(caller);
    caller->active++;
    self->rows += rows;
    return 0;
}

static int request_traverse(AoRequest *self, visitproc visit, void *arg) {
    Py_VISIT(self->channel);
    Py_VISIT(self->handler);
    Py_VISIT(self->task);
    Py_VISIT(self->coroutine);
    Py_VISIT(self->outcome);
    for (uint32_t i = 0; i < self->count; i++)
        if (starts_run(self, i)) Py_VISIT(self->entries[i].caller);
    return 0;
}

static int request_clear(AoRequest *self) {
    Py_CLEAR(self->task);
    Py_CLEAR(self->coroutine);
    Py_CLEAR(self->outcome);
    uint32_t count = self->count;
    self->count = 0;
    for (uint32_t i = 0; i < count; i++)
        if (starts_run(self, i)) Py_DECREF(self->entries[i].caller);
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
    {"drop", (PyCFunction)request_drop, METH_NOARGS, "Answer CANCELLED to launches that were stopped; whether others remain."},
    {"task_ended", (PyCFunction)request_task_ended, METH_O, "End what the task has not."},
    {"send", (PyCFunction)request_send, METH_O, "Let its handler go on, for the task that runs it."},
    {"throw", (PyCFunction)request_throw, METH_VARARGS, "Raise something in its handler, for the task that runs it."},
    {"close", (PyCFunction)request_close, METH_NOARGS, "Give its handler up, for the task that runs it."},
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
    {"__name__", (getter)request_of_coroutine, NULL, NULL, "__name__"},
    {"__qualname__", (getter)request_of_coroutine, NULL, NULL, "__qualname__"},
    {"cr_await", (getter)request_of_coroutine, NULL, NULL, "cr_await"},
    {"cr_code", (getter)request_of_coroutine, NULL, NULL, "cr_code"},
    {"cr_frame", (getter)request_of_coroutine, NULL, NULL, "cr_frame"},
    {"cr_origin", (getter)request_of_coroutine, NULL, NULL, "cr_origin"},
    {"cr_running", (getter)request_of_coroutine, NULL, NULL, "cr_running"},
    {"cr_suspended", (getter)request_of_coroutine, NULL, NULL, "cr_suspended"},
    {NULL, NULL, NULL, NULL, NULL},
};
/* With send(), throw() and close() it is a collections.abc.Coroutine, which is what a task runs. */
static PyAsyncMethods request_as_async = {.am_await = PyObject_SelfIter, .am_send = (sendfunc)request_am_send};
PyTypeObject AoRequest_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Request",
    .tp_doc = "One request, or a batch of them.",
    .tp_basicsize = sizeof(AoRequest),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)request_dealloc,
    .tp_traverse = (traverseproc)request_traverse,
    .tp_clear = (inquiry)request_clear,
    .tp_as_async = &request_as_async,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)request_iternext,
    .tp_methods = request_methods,
    .tp_members = request_members,
    .tp_getset = request_getset,
};
