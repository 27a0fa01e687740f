/* The core of the awaitable: its state, its outcome, and everybody who waits for it.
 *
 * Each `await` gets a future of its own, so that cancelling one wait leaves the operation and the
 * other waits alone. Futures are a dict from the second one on: removing one of ten thousand is
 * one look-up.
 */
#include "native.h"

static PyObject *s_set_result, *s_create_future, *s_blocking, *s_call_soon, *s_context, *s_handler, *s_fail_dependent,
    *s_want_mark, *s_check_wait;
PyObject *ao_host_steps;
static PyObject *get_running_loop, *copy_context, *cancelled_error, *invalid_state;

int ao_operation_module_init(PyObject *module) {
    PyObject *asyncio = PyImport_ImportModule("asyncio"), *contextvars = PyImport_ImportModule("contextvars");
    if (!asyncio || !contextvars) return -1;
    get_running_loop = PyObject_GetAttrString(asyncio, "_get_running_loop");
    cancelled_error = PyObject_GetAttrString(asyncio, "CancelledError");
    invalid_state = PyObject_GetAttrString(asyncio, "InvalidStateError");
    copy_context = PyObject_GetAttrString(contextvars, "copy_context");
    Py_DECREF(asyncio);
    Py_DECREF(contextvars);
    s_set_result = PyUnicode_InternFromString("set_result");
    s_create_future = PyUnicode_InternFromString("create_future");
    s_blocking = PyUnicode_InternFromString("_asyncio_future_blocking");
    s_call_soon = PyUnicode_InternFromString("call_soon");
    s_context = PyUnicode_InternFromString("context");
    s_fail_dependent = PyUnicode_InternFromString("fail_dependent");
    s_want_mark = PyUnicode_InternFromString("want_mark");
    s_check_wait = PyUnicode_InternFromString("check_wait");
    s_handler = PyUnicode_InternFromString("call_exception_handler");
    if (!(ao_host_steps = PyContextVar_New("aiooffload_host_steps", NULL))) return -1;
    if (PyModule_AddObjectRef(module, "host_steps", ao_host_steps) < 0) return -1;
    return get_running_loop && cancelled_error && invalid_state && copy_context && s_fail_dependent && s_want_mark && s_check_wait && s_handler ? 0 : -1;
}

PyObject *ao_running_loop(void) { return PyObject_CallNoArgs(get_running_loop); }

/* ---- finishing ---- */

static int wake_future(PyObject *future) {
    PyObject *ignored = PyObject_CallMethodOneArg(future, s_set_result, Py_None);
    if (ignored) {
        Py_DECREF(ignored);
        return 0;
    }
    /* Cancelled, and its task has not run yet: nothing to wake. */
    if (!PyErr_ExceptionMatches(invalid_state)) return -1;
    PyErr_Clear();
    return 0;
}

static int schedule_callback(AoOperation *op, PyObject *fn, PyObject *context) {
    PyObject *method = PyObject_GetAttr(op->loop, s_call_soon);
    if (!method) return -1;
    PyObject *args = PyTuple_Pack(2, fn, (PyObject *)op), *kwargs = PyDict_New(), *handle = NULL;
    if (args && kwargs && PyDict_SetItem(kwargs, s_context, context) == 0) handle = PyObject_Call(method, args, kwargs);
    Py_XDECREF(args);
    Py_XDECREF(kwargs);
    Py_XDECREF(handle);
    Py_DECREF(method);
    return handle ? 0 : -1;
}

static int wake_waiters(PyObject *waiters) {
    if (!PyDict_CheckExact(waiters)) return wake_future(waiters);
    Py_ssize_t position = 0;
    PyObject *future, *value;
    while (PyDict_Next(waiters, &position, &future, &value))
        if (wake_future(future) < 0) return -1;
    return 0;
}

int ao_operation_finish(AoOperation *op, PyObject *result, PyObject *failure) {
    if (op->finished) return 0;
    if (failure && failure != Py_None) Py_XSETREF(op->failure, Py_NewRef(failure));
    if (!op->failure) Py_XSETREF(op->result, Py_NewRef(result ? result : Py_None));
    op->finished = 1;
    ao_uses_settle(op);
    if (!op->finished_ns) op->finished_ns = ao_now_ns(); /* the board sets it when it saw the mark */
    PyObject *waiters = op->waiters, *callbacks = op->callbacks, *keep = op->keep, *arrival = op->arrival;
    op->waiters = op->callbacks = op->keep = op->arrival = NULL;
    Py_CLEAR(op->requires); /* or a chain of operations keeps all of them */
    Py_CLEAR(op->behind);
    int status = 1;
    if (waiters && wake_waiters(waiters) < 0) status = -1;
    for (Py_ssize_t i = 0; status > 0 && callbacks && i < PyList_GET_SIZE(callbacks); i++) {
        PyObject *pair = PyList_GET_ITEM(callbacks, i);
        if (schedule_callback(op, PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1)) < 0) status = -1;
    }
    Py_XDECREF(waiters);
    Py_XDECREF(callbacks);
    Py_XDECREF(arrival);
    Py_XDECREF(keep); /* last: it may free device memory, which runs Python code */
    return status;
}

void ao_operation_arrive(AoOperation *op) {
    if (op->finished) return;
    int dependency_failed = !op->failure && ao_requires_failed(op);
    if (op->arrival || dependency_failed) {
        PyObject *arrival = dependency_failed ? PyObject_GetAttr(op->owner, s_fail_dependent) : Py_NewRef(op->arrival);
        PyObject *ignored = arrival ? PyObject_CallOneArg(arrival, (PyObject *)op) : NULL;
        Py_XDECREF(arrival);
        if (ignored) {
            Py_DECREF(ignored);
            return;
        }
        /* An arrival that fails, fails its operation: nobody may wait for ever. */
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        PyErr_NormalizeException(&type, &value, &traceback);
        if (traceback) PyException_SetTraceback(value, traceback);
        int finished = ao_operation_finish(op, NULL, value);
        if (finished == 0) PyErr_SetObject(type, value); /* it had finished before it failed: at least say so */
        if (finished <= 0) PyErr_WriteUnraisable((PyObject *)op);
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return;
    }
    if (ao_operation_finish(op, NULL, NULL) < 0) PyErr_WriteUnraisable((PyObject *)op);
}

/* Somebody waits for `op`: it needs a mark after all if it has none. */
static int want_mark(AoOperation *op) {
    if (!op->coarse || op->finished) return 0;
    PyObject *ignored = PyObject_CallMethodOneArg(op->owner, s_want_mark, (PyObject *)op);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

/* ---- looking at the outcome ---- */

static PyObject *outcome(AoOperation *op) {
    if (!op->failure) return Py_NewRef(op->result);
    op->looked = 1;
    /* One exception may be raised to many waiters: without this its traceback grows by each. */
    if (PyException_SetTraceback(op->failure, Py_None) < 0) return NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(op->failure), op->failure);
    return NULL;
}

static PyObject *not_finished(void) {
    PyErr_SetString(PyExc_RuntimeError, "the operation is not done");
    return NULL;
}

static PyObject *operation_outcome(AoOperation *self, PyObject *Py_UNUSED(ignored)) {
    return self->finished ? outcome(self) : not_finished();
}

static PyObject *operation_look(AoOperation *self, PyObject *Py_UNUSED(ignored)) {
    if (!self->finished && !self->failure) return not_finished(); /* some fail before the device is through */
    self->looked = 1;
    return Py_NewRef(self->failure ? self->failure : Py_None);
}

static PyObject *operation_finish(AoOperation *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"result", "failure", NULL};
    PyObject *result = Py_None, *failure = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|OO:finish", names, &result, &failure)) return NULL;
    if (failure != Py_None && !PyExceptionInstance_Check(failure)) {
        PyErr_SetString(PyExc_TypeError, "failure is an exception or None");
        return NULL;
    }
    int status = ao_operation_finish(self, result, failure);
    return status < 0 ? NULL : PyBool_FromLong(status);
}

static PyObject *operation_arrive(AoOperation *self, PyObject *Py_UNUSED(ignored)) {
    ao_operation_arrive(self);
    Py_RETURN_NONE;
}

static PyObject *operation_add_done_callback(AoOperation *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fn", "context", NULL};
    PyObject *fn, *given = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|$O:add_done_callback", names, &fn, &given)) return NULL;
    PyObject *context = given == Py_None ? PyObject_CallNoArgs(copy_context) : Py_NewRef(given);
    if (!context) return NULL;
    int status = -1;
    if (self->finished) {
        status = schedule_callback(self, fn, context);
    } else if (want_mark(self) == 0 && (self->callbacks || (self->callbacks = PyList_New(0)))) {
        PyObject *pair = PyTuple_Pack(2, fn, context);
        if (pair) status = PyList_Append(self->callbacks, pair);
        Py_XDECREF(pair);
    }
    Py_DECREF(context);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *operation_remove_done_callback(AoOperation *self, PyObject *fn) {
    Py_ssize_t removed = 0, kept = 0;
    if (!self->callbacks) return PyLong_FromLong(0);
    PyObject *rest = PyList_New(0);
    if (!rest) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->callbacks); i++) {
        PyObject *pair = PyList_GET_ITEM(self->callbacks, i);
        int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(pair, 0), fn, Py_EQ);
        if (same < 0 || (!same && (kept++, PyList_Append(rest, pair)) < 0)) {
            Py_DECREF(rest);
            return NULL;
        }
        removed += same;
    }
    Py_SETREF(self->callbacks, rest);
    return PyLong_FromSsize_t(removed);
}

/* ---- one await ---- */

typedef struct {
    PyObject_HEAD
    AoOperation *op;
    PyObject *future;         /* NULL until suspended; a key of op->waiters, or op->waiters itself, until woken */
} AoWait;

static int add_waiter(AoOperation *op, PyObject *future) {
    if (!op->waiters) {
        op->waiters = Py_NewRef(future);
        return 0;
    }
    if (!PyDict_CheckExact(op->waiters)) {
        PyObject *all = PyDict_New();
        if (!all || PyDict_SetItem(all, op->waiters, Py_None) < 0) {
            Py_XDECREF(all);
            return -1;
        }
        Py_SETREF(op->waiters, all);
    }
    return PyDict_SetItem(op->waiters, future, Py_None);
}

/* Leaves a pending exception as it was. */
static void remove_waiter(AoWait *wait) {
    AoOperation *op = wait->op;
    if (!wait->future || !op->waiters) return;
    if (op->waiters == wait->future) {
        Py_CLEAR(op->waiters);
    } else if (PyDict_CheckExact(op->waiters)) {
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (PyDict_DelItem(op->waiters, wait->future) < 0) PyErr_Clear(); /* was never added or was woken */
        PyErr_Restore(type, value, traceback);
    }
}

static int check_loop(AoOperation *op) {
    PyObject *running = ao_running_loop();
    if (!running) return -1;
    int same = running == op->loop;
    Py_DECREF(running);
    if (same) return 0;
    PyObject *errors = PyImport_ImportModule("aiooffload.errors");
    PyObject *usage_error = errors ? PyObject_GetAttrString(errors, "UsageError") : NULL;
    if (usage_error)
        PyErr_SetString(usage_error,
                        "this operation belongs to another event loop or thread; await it there, for example through "
                        "asyncio.run_coroutine_threadsafe(operation.wait(), loop)");
    Py_XDECREF(usage_error);
    Py_XDECREF(errors);
    return -1;
}

/* Whether a context variable has a value here; -1 for an error. */
static int is_set(PyObject *variable) {
    PyObject *value = NULL;
    if (variable && PyContextVar_Get(variable, NULL, &value) < 0) return -1;
    Py_XDECREF(value);
    return value != NULL;
}

/* In a host function or a host task, and in what those started, the engine has a say: the operation may wait for it. */
static int check_wait(AoOperation *op) {
    int within = is_set(ao_calling);
    if (!within) within = is_set(ao_host_steps);
    if (within <= 0 || op->owner == Py_None) return within < 0 ? -1 : 0;
    PyObject *ignored = PyObject_CallMethodOneArg(op->owner, s_check_wait, (PyObject *)op);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

static PyObject *suspend(AoWait *self) {
    AoOperation *op = self->op;
    PyObject *future = PyObject_CallMethodNoArgs(op->loop, s_create_future);
    if (!future) return NULL;
    if (add_waiter(op, future) < 0 || PyObject_SetAttr(future, s_blocking, Py_True) < 0) {
        Py_DECREF(future);
        return NULL;
    }
    self->future = Py_NewRef(future);
    return future;
}

static PySendResult wait_send(AoWait *self, PyObject *Py_UNUSED(value), PyObject **result) {
    AoOperation *op = self->op;
    *result = NULL;
    if (!op->finished && self->future) {
        PyErr_SetString(PyExc_RuntimeError, "resumed before the operation was done");
        return PYGEN_ERROR;
    }
    /* What the engine does when it is asked may be the end of it. */
    if (!op->finished && (check_loop(op) < 0 || check_wait(op) < 0 || want_mark(op) < 0)) return PYGEN_ERROR;
    if (op->finished) {
        *result = outcome(op);
        return *result ? PYGEN_RETURN : PYGEN_ERROR;
    }
    *result = suspend(self);
    return *result ? PYGEN_NEXT : PYGEN_ERROR;
}

static PyObject *wait_iternext(AoWait *self) {
    PyObject *result;
    PySendResult status = wait_send(self, Py_None, &result);
    if (status != PYGEN_RETURN) return result;
    if (result != Py_None) { /* ending without an exception means None, which is what most await to */
        /* Built by hand: as a bare value, a tuple or an exception would be unpacked. */
        PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
        if (stop) PyErr_SetObject(PyExc_StopIteration, stop);
        Py_XDECREF(stop);
    }
    Py_DECREF(result);
    return NULL;
}

static PyObject *wait_py_send(AoWait *self, PyObject *Py_UNUSED(value)) {
    PyObject *result = wait_iternext(self);
    if (!result && !PyErr_Occurred()) PyErr_SetNone(PyExc_StopIteration); /* a method has to say it */
    return result;
}

static PyObject *wait_throw(AoWait *self, PyObject *args) {
    PyObject *type, *value = NULL, *traceback = NULL;
    if (!PyArg_ParseTuple(args, "O|OO:throw", &type, &value, &traceback)) return NULL;
    remove_waiter(self);
    if (PyExceptionInstance_Check(type)) {
        PyErr_SetObject((PyObject *)Py_TYPE(type), type);
    } else {
        PyErr_SetObject(type, value == Py_None ? NULL : value);
    }
    return NULL;
}

static PyObject *wait_close(AoWait *self, PyObject *Py_UNUSED(ignored)) {
    remove_waiter(self);
    Py_RETURN_NONE;
}

static PyObject *operation_await(AoOperation *self) {
    AoWait *wait = PyObject_GC_New(AoWait, &AoWait_Type);
    if (!wait) return NULL;
    wait->op = (AoOperation *)Py_NewRef(self);
    wait->future = NULL;
    PyObject_GC_Track(wait);
    return (PyObject *)wait;
}

static int wait_traverse(AoWait *self, visitproc visit, void *arg) {
    Py_VISIT(self->op);
    Py_VISIT(self->future);
    return 0;
}

static void wait_dealloc(AoWait *self) {
    PyObject_GC_UnTrack(self);
    if (!self->op->finished) remove_waiter(self);
    Py_CLEAR(self->future);
    Py_CLEAR(self->op);
    PyObject_GC_Del(self);
}

static PyAsyncMethods wait_async = {.am_send = (sendfunc)wait_send};
static PyMethodDef wait_methods[] = {
    {"send", (PyCFunction)wait_py_send, METH_O, NULL},
    {"throw", (PyCFunction)wait_throw, METH_VARARGS, NULL},
    {"close", (PyCFunction)wait_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
PyTypeObject AoWait_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Wait",
    .tp_basicsize = sizeof(AoWait),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)wait_dealloc,
    .tp_traverse = (traverseproc)wait_traverse,
    .tp_iter = PyObject_SelfIter,
    .tp_iternext = (iternextfunc)wait_iternext,
    .tp_as_async = &wait_async,
    .tp_methods = wait_methods,
};

/* ---- the type ---- */

static PyObject *operation_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs)) {
    AoOperation *self = (AoOperation *)type->tp_alloc(type, 0);
    if (self) self->loop = Py_NewRef(Py_None);
    return (PyObject *)self;
}

static int operation_init(AoOperation *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"loop", "owner", "name", NULL};
    PyObject *loop, *owner = Py_None, *name = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|OO:Operation", names, &loop, &owner, &name)) return -1;
    Py_XSETREF(self->loop, Py_NewRef(loop));
    Py_XSETREF(self->owner, Py_NewRef(owner));
    Py_XSETREF(self->name, Py_NewRef(name));
    self->submitted_ns = ao_now_ns();
    return 0;
}

/* Every object member but the loop, which is never NULL. */
#define MEMBERS(X)                                                                                                     \
    X(plan) X(keep) X(arrival) X(result) X(failure) X(waiters) X(callbacks) X(queue) X(owner) X(name) X(lane) X(deps)  \
    X(requires) X(prepared) X(steps) X(stop) X(followers) X(kind) X(behind)

static int operation_traverse(AoOperation *self, visitproc visit, void *arg) {
    Py_VISIT(self->loop);
#define VISIT(member) Py_VISIT(self->member);
    MEMBERS(VISIT)
#undef VISIT
    return 0;
}

static int operation_clear(AoOperation *self) {
    ao_uses_free(self); /* first: no history may hand out what is being taken apart */
#define CLEAR(member) Py_CLEAR(self->member);
    MEMBERS(CLEAR)
#undef CLEAR
    return 0;
}

/* On the loop's thread if it runs: the last reference may go on another one. */
static PyObject *tell_loop(PyObject *loop, PyObject *report) {
    PyObject *running = ao_running_loop(), *is_running = PyObject_CallMethod(loop, "is_running", NULL), *done = NULL;
    if (running && is_running) {
        if (running == loop || is_running != Py_True) {
            done = PyObject_CallMethodOneArg(loop, s_handler, report);
        } else {
            PyObject *handler = PyObject_GetAttr(loop, s_handler);
            done = handler ? PyObject_CallMethod(loop, "call_soon_threadsafe", "OO", handler, report) : NULL;
            Py_XDECREF(handler);
        }
    }
    Py_XDECREF(running);
    Py_XDECREF(is_running);
    return done;
}

/* A failure that nobody looked at is told to the loop once, as a task's would be. */
static void operation_finalize(AoOperation *self) {
    if (!self->finished || !self->failure || self->looked) return;
    if (PyErr_GivenExceptionMatches(self->failure, cancelled_error)) return;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *report = Py_BuildValue("{s:s,s:O,s:O}", "message", "the failure of an offload operation was never retrieved",
                                     "exception", self->failure, "operation", (PyObject *)self);
    PyObject *ignored = report ? tell_loop(self->loop, report) : NULL;
    if (!ignored) PyErr_WriteUnraisable((PyObject *)self);
    Py_XDECREF(ignored);
    Py_XDECREF(report);
    PyErr_Restore(type, value, traceback);
}

static void operation_dealloc(AoOperation *self) {
    PyObject_GC_UnTrack(self);
    ao_uses_free(self); /* before anything that runs Python code: a history must not give a new reference to it */
    if (self->weakrefs) PyObject_ClearWeakRefs((PyObject *)self);
    operation_clear(self);
    Py_CLEAR(self->loop);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *operation_finished(AoOperation *self, void *Py_UNUSED(c)) { return PyBool_FromLong(self->finished); }
static PyObject *operation_looked(AoOperation *self, void *Py_UNUSED(c)) { return PyBool_FromLong(self->looked); }

static PyAsyncMethods operation_async = {.am_await = (unaryfunc)operation_await};
static PyMethodDef operation_methods[] = {
    {"finish", (PyCFunction)(void (*)(void))operation_finish, METH_VARARGS | METH_KEYWORDS,
     "Make it done and wake everybody waiting; False if it already was."},
    {"arrive", (PyCFunction)operation_arrive, METH_NOARGS, "Its mark was seen: run its arrival, or finish it."},
    {"outcome", (PyCFunction)operation_outcome, METH_NOARGS, "Return the result or raise the failure."},
    {"look", (PyCFunction)operation_look, METH_NOARGS, "Return the failure or None, marking it as seen."},
    {"add_done_callback", (PyCFunction)(void (*)(void))operation_add_done_callback, METH_VARARGS | METH_KEYWORDS,
     "Call fn(operation) soon after it is done, on the loop."},
    {"remove_done_callback", (PyCFunction)operation_remove_done_callback, METH_O,
     "Take fn off the callbacks and return how often it was there."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef operation_members[] = {
    {"loop", T_OBJECT, offsetof(AoOperation, loop), READONLY, NULL},
    {"keep", T_OBJECT, offsetof(AoOperation, keep), 0, NULL},
    {"queue", T_OBJECT, offsetof(AoOperation, queue), READONLY, NULL},
    {"name", T_OBJECT, offsetof(AoOperation, name), READONLY, NULL},
    {"owner", T_OBJECT, offsetof(AoOperation, owner), READONLY, NULL},
    {"lane", T_OBJECT, offsetof(AoOperation, lane), 0, NULL},
    {"deps", T_OBJECT, offsetof(AoOperation, deps), 0, NULL},
    {"prepared", T_OBJECT, offsetof(AoOperation, prepared), 0, NULL},
    {"steps", T_OBJECT, offsetof(AoOperation, steps), 0, NULL},
    {"stop", T_OBJECT, offsetof(AoOperation, stop), 0, NULL},
    {"followers", T_OBJECT, offsetof(AoOperation, followers), 0, NULL},
    {"kind", T_OBJECT, offsetof(AoOperation, kind), 0, NULL},
    {"nbytes", T_LONGLONG, offsetof(AoOperation, nbytes), 0, NULL},
    {"holds", T_INT, offsetof(AoOperation, holds), 0, NULL},
    {"streamed", T_BOOL, offsetof(AoOperation, streamed), 0, NULL},
    {"calling", T_BYTE, offsetof(AoOperation, calling), 0, NULL},
    {"priority", T_INT, offsetof(AoOperation, priority), 0, NULL},
    {"gate", T_BOOL, offsetof(AoOperation, gate), 0, NULL},
    {"coarse", T_BOOL, offsetof(AoOperation, coarse), 0, NULL},
    {"instant", T_BOOL, offsetof(AoOperation, instant), 0, NULL},
    {"sequence", T_ULONGLONG, offsetof(AoOperation, sequence), READONLY, NULL},
    {"submitted_ns", T_LONGLONG, offsetof(AoOperation, submitted_ns), 0, NULL},
    {"finished_ns", T_LONGLONG, offsetof(AoOperation, finished_ns), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
/* Members that this extension uses as what they are: None is stored as NULL, anything else is checked. */
static PyObject *get_member(PyObject **member) { return Py_NewRef(*member ? *member : Py_None); }

static int set_member(PyObject **member, PyObject *value, int is_right, const char *what) {
    if (!value || (value != Py_None && !is_right)) {
        PyErr_Format(PyExc_TypeError, "%s or None", what);
        return -1;
    }
    Py_XSETREF(*member, value == Py_None ? NULL : Py_NewRef(value));
    return 0;
}

static PyObject *get_plan(AoOperation *self, void *Py_UNUSED(c)) { return get_member(&self->plan); }
static int set_plan(AoOperation *self, PyObject *value, void *Py_UNUSED(c)) {
    return set_member(&self->plan, value, value && PyObject_TypeCheck(value, &AoPlan_Type), "plan is a LaunchPlan");
}
static PyObject *get_arrival(AoOperation *self, void *Py_UNUSED(c)) { return get_member(&self->arrival); }
static int set_arrival(AoOperation *self, PyObject *value, void *Py_UNUSED(c)) {
    return set_member(&self->arrival, value, value && PyCallable_Check(value), "arrival is callable");
}
static PyObject *get_failure(AoOperation *self, void *Py_UNUSED(c)) { return get_member(&self->failure); }
static int set_failure(AoOperation *self, PyObject *value, void *Py_UNUSED(c)) {
    if (self->finished) {
        PyErr_SetString(PyExc_RuntimeError, "the outcome of a finished operation is final");
        return -1;
    }
    return set_member(&self->failure, value, value && PyExceptionInstance_Check(value), "failure is an exception");
}
static PyObject *get_requires(AoOperation *self, void *Py_UNUSED(c)) { return get_member(&self->requires); }
static int set_requires(AoOperation *self, PyObject *value, void *Py_UNUSED(c)) {
    int is_right = value && PyTuple_CheckExact(value);
    for (Py_ssize_t i = 0; is_right && i < PyTuple_GET_SIZE(value); i++)
        is_right = PyObject_TypeCheck(PyTuple_GET_ITEM(value, i), &AoOperation_Type);
    return set_member(&self->requires, value, is_right, "requires is a tuple of Operations");
}

static PyGetSetDef operation_getset[] = {
    {"plan", (getter)get_plan, (setter)set_plan, NULL, NULL},
    {"arrival", (getter)get_arrival, (setter)set_arrival, NULL, NULL},
    {"failure", (getter)get_failure, (setter)set_failure, NULL, NULL},
    {"requires", (getter)get_requires, (setter)set_requires, NULL, NULL},
    {"finished", (getter)operation_finished, NULL, NULL, NULL},
    {"looked", (getter)operation_looked, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
PyTypeObject AoOperation_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Operation",
    .tp_doc = "Core of the awaitable operation.",
    .tp_basicsize = sizeof(AoOperation),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = operation_new,
    .tp_init = (initproc)operation_init,
    .tp_dealloc = (destructor)operation_dealloc,
    .tp_finalize = (destructor)operation_finalize,
    .tp_traverse = (traverseproc)operation_traverse,
    .tp_clear = (inquiry)operation_clear,
    .tp_weaklistoffset = offsetof(AoOperation, weakrefs),
    .tp_as_async = &operation_async,
    .tp_methods = operation_methods,
    .tp_members = operation_members,
    .tp_getset = operation_getset,
};
