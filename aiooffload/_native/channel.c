/* The host's end of a channel: reads requests, takes the first step of their handlers, writes replies.
 *
 * The layout is that of device/aiooffload_wire.h. A request whose function is plain (an async def
 * with scalar arguments and a scalar result or none) is decoded here, its coroutine is started as an
 * eager task, and if that is done with its first step the reply goes out at once. All others go
 * to the owner's begin(), which builds a coroutine around the function and starts the request with
 * that. A batch function gets all requests that one drain has found, as one.
 *
 * Whatever a device wrote is checked before it is used: it may be a stray write of some kernel.
 */
#include "calls.h"

#define CLOCK_EVERY 16      /* requests between two looks at the clock */
#define GATHER_NS 1500      /* how long a batch waits for requests that came together with these the last time */
#define PUBLISH_EVERY 512   /* posts read between two stores of the tail */
#define BURST_NS 200000
#define LONG_NS 100000000
#define MOST_ROWS 65536     /* rows in one batch */

#define BITS(word, shift, count) ((word) >> (shift) & ((1ull << (count)) - 1))

static PyObject *s_begin;
PyObject *ao_calling;

static inline const unsigned char *slot_of(const AoChannel *self, uint64_t ticket) {
    return self->shared + AO_RING_OFFSET + ticket % AO_RING_SLOTS * 16;
}

static inline uint64_t slot_control(const AoChannel *self, uint64_t ticket) {
    return __atomic_load_n((const uint64_t *)(slot_of(self, ticket) + 8), __ATOMIC_ACQUIRE);
}

static inline int is_published(uint64_t control, uint64_t ticket) {
    return control >> AO_TAG_SHIFT == ((ticket / AO_RING_SLOTS + 1) & ((1u << AO_TAG_BITS) - 1));
}

int ao_channel_pending(const struct AoChannel *self) {
    return !self->closed && is_published(slot_control(self, self->position), self->position);
}

/* torn() -> whether a request is missing that others came after. Between taking a ticket and publishing it that is
 * so for a moment. */
static PyObject *channel_torn(AoChannel *self, PyObject *Py_UNUSED(ignored)) {
    if (self->closed || ao_channel_pending(self)) Py_RETURN_FALSE;
    for (uint64_t ticket = self->position + 1; ticket < self->position + AO_RING_SLOTS; ticket++)
        if (is_published(slot_control(self, ticket), ticket)) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* Whether a call waits for the reply in `cell`: no kernel makes another one with it until it has that. */
static int is_awaited(const AoChannel *self, unsigned cell) { return cell < AO_CELLS && self->awaited[cell / 32] >> cell % 32 & 1; }

/* ---- the drain ---- */

typedef struct {
    uint64_t ticket, argument;
    unsigned function, launch, cell, form, nbytes, rows;
} Descriptor;

/* Reads the descriptor at `position`, whose control word is given. Unsound ones have rows == 0. */
static inline void read_descriptor(const AoChannel *self, uint64_t control, Descriptor *d) {
    d->ticket = self->position;
    /* Once: what is looked at below may be written again meanwhile. */
    d->argument = __atomic_load_n((const uint64_t *)slot_of(self, self->position), __ATOMIC_RELAXED);
    d->function = (unsigned)BITS(control, 0, AO_FUNCTION_BITS);
    d->launch = (unsigned)BITS(control, AO_LAUNCH_SHIFT, AO_LAUNCH_BITS);
    d->cell = (unsigned)BITS(control, AO_CELL_SHIFT, AO_CELL_BITS);
    d->form = (unsigned)BITS(control, AO_FORM_SHIFT, AO_FORM_BITS);
    d->nbytes = d->form <= AO_INLINE_NBYTES ? d->form : (unsigned)(d->argument & 0xFFFF);
    d->rows = d->form <= AO_INLINE_NBYTES ? 1 : d->argument >> 16 > 32 ? 0 : (unsigned)(d->argument >> 16);
    if (d->cell >= AO_CELLS && d->cell != AO_NO_CELL) d->rows = 0;
    if (d->form > AO_FORM_ROWS || d->nbytes > AO_PAYLOAD_NBYTES) d->rows = 0;
    if (d->form == AO_FORM_PAYLOAD && d->rows != 1) d->rows = 0;
    if (d->rows > 1 && d->nbytes % d->rows) d->rows = 0;
}

/* Answers without a handler. */
static void answer(AoChannel *self, AoCaller *caller, const Descriptor *d, uint64_t status, int64_t code) {
    if (self->closed) return;
    AoEntry entry = {.ticket = d->ticket, .caller = caller, .cell = d->cell, .rows = (uint16_t)d->rows, .open = 1};
    ao_answer(self, &entry, status, AO_KIND_NONE, NULL, 0, code);
    ao_host_notify();
}

static int refuse(AoChannel *self, AoCaller *caller, const Descriptor *d, AoHandler *handler) {
    answer(self, caller, d, AO_STATUS_ERROR, handler ? AO_CODE_WRONG_ARGUMENTS : AO_CODE_UNKNOWN_FUNCTION);
    PyObject *ignored = PyObject_CallMethod(self->owner, "refused", "OIOI", (PyObject *)caller, d->function, handler ? (PyObject *)handler : Py_None,
                                            d->rows ? d->nbytes / d->rows : 0);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

static int begin(AoChannel *self, AoRequest *request) {
    if (ao_request_seal(request) < 0) return ao_request_fail(request);
    PyObject *ignored = PyObject_CallMethodOneArg(self->owner, s_begin, (PyObject *)request);
    Py_XDECREF(ignored);
    if (!ignored && request->finished) return -1; /* its handler has failed in its first step, and it was told so */
    return ignored ? 0 : ao_request_fail(request);
}

static int begin_batch(AoChannel *self, AoHandler *handler) {
    AoRequest *request = handler->collecting;
    handler->collecting = NULL;
    int status;
    if (request->count == 0) status = 0; /* there was no memory for the first */
    else if (!ao_request_drop(request)) status = ao_request_close(request); /* stopped since it was read */
    else if (!handler->plain) status = begin(self, request);
    else status = ao_request_seal(request) < 0 ? ao_request_fail(request) : ao_request_start(request, ao_handler_call_batch(handler, request));
    Py_DECREF(request);
    return status;
}

/* `collected` is the list of handlers with an unfinished batch. */
static int collect(AoChannel *self, AoHandler *handler, AoCaller *caller, const Descriptor *d, const unsigned char *data, PyObject *collected) {
    if (handler->collecting && handler->collecting->rows + d->rows > MOST_ROWS && begin_batch(self, handler) < 0) return -1;
    if (!handler->collecting) {
        if (PyList_Append(collected, (PyObject *)handler) < 0) return -1;
        if (!(handler->collecting = ao_request_make(self, handler))) return -1;
    }
    return ao_request_add(handler->collecting, caller, d->ticket, d->cell, d->rows, data);
}

static int start(AoChannel *self, AoHandler *handler, AoCaller *caller, const Descriptor *d, const unsigned char *data) {
    int plain = handler->plain && d->form != AO_FORM_ROWS;
    AoRequest *request = ao_request_make(self, handler);
    if (!request) return answer(self, caller, d, AO_STATUS_ERROR, AO_CODE_RAISED), -1;
    int status = ao_request_add(request, caller, d->ticket, d->cell, d->rows, plain ? NULL : data);
    if (status < 0) answer(self, caller, d, AO_STATUS_ERROR, AO_CODE_RAISED);
    else status = plain ? ao_request_start(request, ao_handler_call(handler, data)) : begin(self, request);
    Py_DECREF(request);
    return status;
}

/* Borrowed reference, or NULL with or without an exception. */
static AoHandler *find_handler(AoChannel *self, unsigned function) {
    if (self->last && self->last_id == function) return self->last;
    PyObject *id = PyLong_FromUnsignedLong(function);
    AoHandler *handler = id ? (AoHandler *)PyDict_GetItemWithError(self->handlers, id) : NULL;
    Py_XDECREF(id);
    if (handler) {
        Py_XSETREF(self->last, (AoHandler *)Py_NewRef(handler));
        self->last_id = function;
    }
    return handler;
}

/* -1 with an exception that is not the handler's. `caller` is held by who calls this. */
static int serve(AoChannel *self, AoCaller *caller, const Descriptor *d, PyObject *collected) {
    if (caller->stopped) return answer(self, caller, d, AO_STATUS_CANCELLED, 0), 0;
    AoHandler *handler = find_handler(self, d->function);
    if (!handler && PyErr_Occurred()) return -1;
    /* Rows of results may be too many for a cell where a row of arguments is small. */
    if (!handler || d->nbytes != d->rows * handler->nbytes || d->rows * handler->reply_nbytes > AO_PAYLOAD_NBYTES) return refuse(self, caller, d, handler);
    const unsigned char *sent = (const unsigned char *)&d->argument;
    if (d->form > AO_INLINE_NBYTES) sent = self->shared + AO_PAYLOADS_OFFSET + d->ticket % AO_RING_SLOTS * AO_PAYLOAD_NBYTES;
    if (handler->batch) {
        int status = collect(self, handler, caller, d, sent, collected);
        if (status < 0) answer(self, caller, d, AO_STATUS_ERROR, AO_CODE_RAISED); /* it is in no batch */
        return status;
    }
    unsigned char data[AO_PAYLOAD_NBYTES]; /* a copy: what runs below may take long, and the slot is free from now on */
    memcpy(data, sent, d->nbytes);
    return start(self, handler, caller, d, data);
}

static void publish(AoChannel *self) {
    if (self->published == self->posts) return;
    self->published = self->posts;
    __atomic_store_n((uint64_t *)(self->shared + AO_TAIL_OFFSET), self->posts, __ATOMIC_RELEASE);
    ao_host_notify();
}

/* A burst is not a silence, and one of seconds says nothing about the next. */
static void note_served(AoChannel *self) {
    int64_t now = ao_now_ns(), gap = now - self->served_ns;
    if (gap > BURST_NS && gap < LONG_NS) self->gap_ns = gap;
    self->served_ns = now;
}

/* Whether the next request is published. A batch waits a moment for those of the last one that are not
 * there yet: warps that were answered together ask again together. */
static inline int next_request(const AoChannel *self, Py_ssize_t count, int batching, Descriptor *d) {
    if (self->closed) return 0;
    uint64_t control = slot_control(self, self->position);
    if (!is_published(control, self->position)) {
        if (!batching || count >= self->together) return 0;
        for (int64_t until = ao_now_ns() + GATHER_NS; !is_published(control = slot_control(self, self->position), self->position); ao_pause())
            if (ao_now_ns() >= until) return 0;
    }
    read_descriptor(self, control, d);
    return 1;
}

static Py_ssize_t drain(AoChannel *self, int64_t until, PyObject *collected) {
    Py_ssize_t count = 0;
    Descriptor d;
    AoCaller *caller = NULL; /* held from one request to the next: what is run may detach it */
    int status = 0;
    while (status == 0 && next_request(self, count, PyList_GET_SIZE(collected) > 0, &d)) {
        self->position++;
        count++;
        if (caller != self->callers[d.launch]) Py_XSETREF(caller, (AoCaller *)Py_XNewRef(self->callers[d.launch]));
        if (self->closed) break; /* by what went with the launch before */
        if (caller && d.rows && !is_awaited(self, d.cell)) status = serve(self, caller, &d, collected);
        else self->dropped++;
        /* Not before its payload was copied: with the place another post gets the slot. */
        if (d.cell == AO_NO_CELL && ++self->posts - self->published >= PUBLISH_EVERY && !self->closed) publish(self);
        if (count % CLOCK_EVERY == 0 && ao_now_ns() >= until) break;
    }
    Py_XDECREF(caller);
    if (status < 0) return -1;
    if (count) note_served(self);
    self->together = PyList_GET_SIZE(collected) ? count : 0;
    return count;
}

/* How many requests were read, or -1 with an exception. What it calls may ask for a drain: that one does nothing. */
Py_ssize_t ao_channel_drain(AoChannel *self, int64_t budget) {
    if (self->busy || !ao_channel_pending(self)) return 0;
    PyObject *collected = PyList_New(0);
    if (!collected) return -1;
    self->busy = 1;
    Py_INCREF(self);
    Py_ssize_t count = drain(self, ao_now_ns() + budget, collected);
    int status = count < 0 ? -1 : 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(collected); i++) {
        AoHandler *handler = (AoHandler *)PyList_GET_ITEM(collected, i);
        /* A batch is begun also if something else went wrong: its requests were read. */
        PyObject *type, *value, *traceback;
        PyErr_Fetch(&type, &value, &traceback);
        if (handler->collecting && begin_batch(self, handler) < 0) {
            status = -1;
            if (type) PyErr_WriteUnraisable((PyObject *)self);
        }
        if (type) PyErr_Restore(type, value, traceback);
    }
    if (!self->closed) publish(self);
    self->busy = 0;
    Py_DECREF(collected);
    Py_DECREF(self);
    return status < 0 ? -1 : count;
}

/* drain(budget_ns) -> how many requests were read */
static PyObject *channel_drain(AoChannel *self, PyObject *arg) {
    long long budget = PyLong_AsLongLong(arg);
    if (budget == -1 && PyErr_Occurred()) return NULL;
    Py_ssize_t count = ao_channel_drain(self, budget);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

uint64_t ao_channel_suspended(const AoChannel *self) { return self->suspended; }

static PyObject *channel_pending(AoChannel *self, PyObject *Py_UNUSED(ignored)) { return PyBool_FromLong(ao_channel_pending(self)); }

/* attach(launch, caller): requests of that index are `caller`'s; None: nobody's. */
static PyObject *channel_attach(AoChannel *self, PyObject *args) {
    unsigned launch;
    PyObject *caller;
    if (!PyArg_ParseTuple(args, "IO:attach", &launch, &caller)) return NULL;
    if (launch >= AO_LAUNCHES || (caller != Py_None && !PyObject_TypeCheck(caller, &AoCaller_Type))) {
        PyErr_SetString(PyExc_ValueError, "attach(launch, caller) takes an index below 1024 and a Caller or None");
        return NULL;
    }
    Py_XSETREF(self->callers[launch], caller == Py_None ? NULL : (AoCaller *)Py_NewRef(caller));
    Py_RETURN_NONE;
}

/* close(): nothing is read or answered any more, and the memory is not touched. */
static PyObject *channel_close(AoChannel *self, PyObject *Py_UNUSED(ignored)) {
    self->closed = 1;
    for (unsigned i = 0; i < AO_LAUNCHES; i++) Py_CLEAR(self->callers[i]);
    Py_RETURN_NONE;
}

int ao_channel_module_init(PyObject *module) {
    if (!(ao_calling = PyContextVar_New("aiooffload_call", NULL))) return -1;
    return PyModule_AddObjectRef(module, "calling", ao_calling);
}

static int channel_prepare(void) {
    if (!s_begin && !(s_begin = PyUnicode_InternFromString("begin"))) return -1;
    return ao_request_prepare();
}

static PyObject *channel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"address", "memory", "loop", "handlers", "owner", NULL};
    unsigned long long address;
    PyObject *memory, *loop, *handlers, *owner;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KOOO!O:Channel", names, &address, &memory, &loop, &PyDict_Type, &handlers, &owner)) return NULL;
    if (address == 0 || address % 64) {
        PyErr_SetString(PyExc_ValueError, "the shared block is aligned to 64 bytes");
        return NULL;
    }
    if (channel_prepare() < 0) return NULL;
    AoChannel *self = (AoChannel *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->shared = (unsigned char *)(uintptr_t)address;
    self->memory = Py_NewRef(memory);
    self->loop = Py_NewRef(loop);
    self->handlers = Py_NewRef(handlers);
    self->owner = Py_NewRef(owner);
    if (!(self->context = PyContext_CopyCurrent())) Py_CLEAR(self);
    return (PyObject *)self;
}

static int channel_traverse(AoChannel *self, visitproc visit, void *arg) {
    Py_VISIT(self->memory);
    Py_VISIT(self->loop);
    Py_VISIT(self->handlers);
    Py_VISIT(self->owner);
    Py_VISIT(self->context);
    Py_VISIT(self->last);
    Py_VISIT(self->on_served);
    for (unsigned i = 0; i < AO_LAUNCHES; i++) Py_VISIT(self->callers[i]);
    return 0;
}

static int channel_clear(AoChannel *self) {
    self->closed = 1; /* the memory may go */
    for (unsigned i = 0; i < AO_LAUNCHES; i++) Py_CLEAR(self->callers[i]);
    Py_CLEAR(self->memory);
    Py_CLEAR(self->loop);
    Py_CLEAR(self->handlers);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->context);
    Py_CLEAR(self->last);
    Py_CLEAR(self->on_served);
    return 0;
}

static void channel_dealloc(AoChannel *self) {
    PyObject_GC_UnTrack(self);
    channel_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef channel_methods[] = {
    {"pending", (PyCFunction)channel_pending, METH_NOARGS, "Whether a request can be read."},
    {"drain", (PyCFunction)channel_drain, METH_O, "Read requests and start their handlers, for about so many ns."},
    {"torn", (PyCFunction)channel_torn, METH_NOARGS, "Whether a request is missing that others came after."},
    {"attach", (PyCFunction)channel_attach, METH_VARARGS, "Name the launch that an index stands for."},
    {"close", (PyCFunction)channel_close, METH_NOARGS, "Read and answer nothing any more."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef channel_members[] = {
    {"position", T_ULONGLONG, offsetof(AoChannel, position), READONLY, NULL},
    {"posts", T_ULONGLONG, offsetof(AoChannel, posts), READONLY, NULL},
    {"dropped", T_ULONGLONG, offsetof(AoChannel, dropped), READONLY, NULL},
    {"served_ns", T_LONGLONG, offsetof(AoChannel, served_ns), 0, NULL},
    {"gap_ns", T_LONGLONG, offsetof(AoChannel, gap_ns), 0, NULL},
    {"suspended", T_ULONGLONG, offsetof(AoChannel, suspended), READONLY, NULL},
    {"unsettled", T_INT, offsetof(AoChannel, unsettled), 0, NULL},
    {"busy", T_BOOL, offsetof(AoChannel, busy), READONLY, NULL},
    {"closed", T_BOOL, offsetof(AoChannel, closed), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyObject *channel_get_on_served(AoChannel *self, void *Py_UNUSED(closure)) {
    return Py_NewRef(self->on_served ? self->on_served : Py_None);
}

static int channel_set_on_served(AoChannel *self, PyObject *value, void *Py_UNUSED(closure)) {
    Py_XSETREF(self->on_served, value == Py_None ? NULL : Py_XNewRef(value));
    return 0;
}

static PyGetSetDef channel_getset[] = {
    {"on_served", (getter)channel_get_on_served, (setter)channel_set_on_served, "Told of each handler that ended, or None.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
PyTypeObject AoChannel_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Channel",
    .tp_doc = "The host's end of a channel.",
    .tp_basicsize = sizeof(AoChannel),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = channel_new,
    .tp_dealloc = (destructor)channel_dealloc,
    .tp_traverse = (traverseproc)channel_traverse,
    .tp_clear = (inquiry)channel_clear,
    .tp_methods = channel_methods,
    .tp_members = channel_members,
    .tp_getset = channel_getset,
};
