/* The device's end of a channel, for kernels of the host device: what aiooffload.cuh does, in C.
 *
 * It works on the same two blocks of memory by the same rules, so what the host's end has to
 * cope with is the same. Waits give the interpreter away and sleep until the host writes.
 */
#include "native.h"
#include "../device/aiooffload_wire.h"

#define SLICE_NS 20000000   /* a wait looks at its launch's cancel word this often */
#define MOST_NS (INT64_MAX / 4) /* of a timeout: no clock gets there */
#define NAP_NS 50000        /* between two looks for a free cell or for room */

typedef struct {
    PyObject_HEAD
    PyObject *owner;          /* keeps both blocks alive */
    unsigned char *shared, *state;
    uint64_t *bell;
    int64_t timeout_ns;       /* at most MOST_NS */
    unsigned launch;
} Port;

static PyObject *port_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"parameter", "owner", NULL};
    Py_buffer parameter;
    PyObject *owner;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*O:Port", names, &parameter, &owner)) return NULL;
    struct { uint64_t shared, state, bell, timeout_ns; uint32_t launch, version; } fields;
    int fits = parameter.len == AO_PARAMETER_NBYTES;
    if (fits) memcpy(&fields, parameter.buf, sizeof fields);
    PyBuffer_Release(&parameter);
    if (!fits || fields.version != AO_WIRE_VERSION || fields.launch >= AO_LAUNCHES || !fields.shared || !fields.state || !fields.bell) {
        PyErr_SetString(PyExc_ValueError, "this is no launch parameter of this wire version");
        return NULL;
    }
    Port *self = (Port *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->owner = Py_NewRef(owner);
    self->shared = (unsigned char *)(uintptr_t)fields.shared;
    self->state = (unsigned char *)(uintptr_t)fields.state;
    self->bell = (uint64_t *)(uintptr_t)fields.bell;
    self->timeout_ns = fields.timeout_ns < MOST_NS ? (int64_t)fields.timeout_ns : MOST_NS;
    self->launch = fields.launch;
    return (PyObject *)self;
}

static int port_traverse(Port *self, visitproc visit, void *arg) {
    Py_VISIT(self->owner);
    return 0;
}

static void port_dealloc(Port *self) {
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->owner);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* ---- words ---- */

static uint64_t *block_word(const Port *self, size_t offset) {
    return (uint64_t *)(self->shared + AO_LAUNCHES_OFFSET + (size_t)self->launch * AO_LAUNCH_STRIDE + offset);
}

static uint64_t *state_word(const Port *self, size_t offset) { return (uint64_t *)(self->state + offset); }

static uint32_t *bitmap(const Port *self, size_t offset, unsigned word) { return (uint32_t *)(self->state + offset) + word; }

static unsigned char *cell_at(const Port *self, unsigned cell) { return self->shared + AO_CELLS_OFFSET + (size_t)cell * AO_CELL_STRIDE; }

static uint64_t *cell_control(const Port *self, unsigned cell) { return (uint64_t *)(cell_at(self, cell) + 8); }

static void ring_bell(const Port *self) {
    __atomic_store_n(self->bell, 1, __ATOMIC_SEQ_CST);
    ao_host_notify();
}

static int is_cancelled(const Port *self) {
    if (!__atomic_load_n(block_word(self, AO_LAUNCH_CANCEL), __ATOMIC_ACQUIRE)) return 0;
    __atomic_store_n(block_word(self, AO_LAUNCH_SEEN), 1, __ATOMIC_RELAXED);
    return 1;
}

/* The first trouble stays. A call that was given up has a word of its own: then what was called is to be cancelled. */
static void report(const Port *self, unsigned function, int code) {
    uint64_t *word = block_word(self, code == AO_CODE_NO_ANSWER ? AO_LAUNCH_GIVEN_UP : AO_LAUNCH_TROUBLE);
    uint64_t none = 0, value = ((uint64_t)function + 1) | (uint64_t)-code << 32;
    __atomic_compare_exchange_n(word, &none, value, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* Between two looks for something that is not there yet; -1: go on, else how the wait has ended. */
static int nap(const Port *self, int64_t start, unsigned function) {
    if (is_cancelled(self)) return AO_STATUS_CANCELLED;
    if (ao_now_ns() - start > self->timeout_ns) {
        report(self, function, AO_CODE_NO_ANSWER);
        return AO_STATUS_TIMEOUT;
    }
    struct timespec t = {0, NAP_NS};
    nanosleep(&t, NULL);
    return -1;
}

/* ---- cells ---- */

static int try_cell(const Port *self, unsigned cell) {
    uint32_t bit = 1u << (cell % 32);
    return !(__atomic_fetch_or(bitmap(self, AO_STATE_TAKEN, cell / 32), bit, __ATOMIC_ACQ_REL) & bit);
}

static int reclaim(const Port *self, unsigned word, unsigned *cell) {
    for (uint32_t left = __atomic_load_n(bitmap(self, AO_STATE_LEFT, word), __ATOMIC_ACQUIRE); left; left &= left - 1) {
        unsigned candidate = word * 32 + (unsigned)__builtin_ctz(left);
        uint64_t ticket = __atomic_load_n((uint64_t *)(self->state + AO_STATE_TICKETS) + candidate, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(cell_control(self, candidate), __ATOMIC_ACQUIRE) >> AO_REPLY_TICKET_SHIFT != ticket + 1) continue;
        uint32_t bit = 1u << (candidate % 32);
        if (!(__atomic_fetch_and(bitmap(self, AO_STATE_LEFT, word), ~bit, __ATOMIC_ACQ_REL) & bit)) continue;
        /* Between the two looks it may have been used and left once more. */
        ticket = __atomic_load_n((uint64_t *)(self->state + AO_STATE_TICKETS) + candidate, __ATOMIC_ACQUIRE);
        if (__atomic_load_n(cell_control(self, candidate), __ATOMIC_ACQUIRE) >> AO_REPLY_TICKET_SHIFT != ticket + 1) {
            __atomic_fetch_or(bitmap(self, AO_STATE_LEFT, word), bit, __ATOMIC_ACQ_REL);
            continue;
        }
        *cell = candidate;
        return 1;
    }
    return 0;
}

static int find_cell(const Port *self, unsigned *cell) {
    for (unsigned k = 0; k < AO_CELLS / 32; k++) {
        unsigned word = (self->launch * 32 + k) % (AO_CELLS / 32);
        uint32_t taken = __atomic_load_n(bitmap(self, AO_STATE_TAKEN, word), __ATOMIC_RELAXED);
        for (; taken != UINT32_MAX; taken |= taken + 1) {
            *cell = word * 32 + (unsigned)__builtin_ctz(~taken);
            if (try_cell(self, *cell)) return 1;
        }
        if (reclaim(self, word, cell)) return 1;
    }
    return 0;
}

static int take_cell(const Port *self, unsigned function, unsigned *cell) {
    int64_t start = ao_now_ns();
    while (!find_cell(self, cell)) {
        int status = nap(self, start, function);
        if (status >= 0) return status;
    }
    return AO_STATUS_OK;
}

static void free_cell(const Port *self, unsigned cell) {
    __atomic_fetch_and(bitmap(self, AO_STATE_TAKEN, cell / 32), ~(1u << (cell % 32)), __ATOMIC_ACQ_REL);
}

static void leave_cell(const Port *self, unsigned cell, uint64_t ticket) {
    __atomic_store_n((uint64_t *)(self->state + AO_STATE_TICKETS) + cell, ticket, __ATOMIC_RELEASE);
    __atomic_fetch_or(bitmap(self, AO_STATE_LEFT, cell / 32), 1u << (cell % 32), __ATOMIC_ACQ_REL);
}

static int try_post(const Port *self) {
    uint64_t *reserved = state_word(self, AO_STATE_POSTS);
    uint64_t tail = __atomic_load_n((uint64_t *)(self->shared + AO_TAIL_OFFSET), __ATOMIC_ACQUIRE);
    if ((int64_t)(__atomic_fetch_add(reserved, 1, __ATOMIC_ACQ_REL) - tail) < AO_POSTS) return 1;
    __atomic_fetch_sub(reserved, 1, __ATOMIC_ACQ_REL);
    return 0;
}

static int reserve_post(const Port *self, unsigned function) {
    int64_t start = ao_now_ns();
    while (!try_post(self)) {
        ring_bell(self);
        int status = nap(self, start, function);
        if (status >= 0) return status;
    }
    return AO_STATUS_OK;
}

/* ---- requests ---- */

static uint64_t send(const Port *self, unsigned function, unsigned cell, const unsigned char *data, unsigned nbytes, unsigned rows) {
    uint64_t ticket = __atomic_fetch_add(state_word(self, AO_STATE_HEAD), 1, __ATOMIC_ACQ_REL), argument = 0;
    unsigned form = nbytes;
    if (rows == 1 && nbytes <= AO_INLINE_NBYTES) {
        memcpy(&argument, data, nbytes);
    } else {
        memcpy(self->shared + AO_PAYLOADS_OFFSET + ticket % AO_RING_SLOTS * AO_PAYLOAD_NBYTES, data, nbytes);
        argument = nbytes | (uint64_t)rows << 16;
        form = rows == 1 ? AO_FORM_PAYLOAD : AO_FORM_ROWS;
    }
    uint64_t tag = (ticket / AO_RING_SLOTS + 1) & ((1u << AO_TAG_BITS) - 1);
    uint64_t control = (function & ((1u << AO_FUNCTION_BITS) - 1)) | (uint64_t)self->launch << AO_LAUNCH_SHIFT |
                       (uint64_t)cell << AO_CELL_SHIFT | (uint64_t)form << AO_FORM_SHIFT | tag << AO_TAG_SHIFT;
    uint64_t *slot = (uint64_t *)(self->shared + AO_RING_OFFSET + ticket % AO_RING_SLOTS * 16);
    __atomic_store_n(slot, argument, __ATOMIC_RELAXED);
    __atomic_store_n(slot + 1, control, __ATOMIC_RELEASE);
    ring_bell(self);
    return ticket;
}

/* Parses (function, data, rows=1); the buffer has to be released. */
static int parse_request(PyObject *args, const char *format, unsigned *function, Py_buffer *data, unsigned *rows) {
    *rows = 1;
    if (!PyArg_ParseTuple(args, format, function, data, rows)) return -1;
    if (data->len <= AO_PAYLOAD_NBYTES && *rows >= 1 && *rows <= 32 && data->len % *rows == 0) return 0;
    PyBuffer_Release(data);
    PyErr_SetString(PyExc_ValueError, "a request has up to 256 bytes and up to 32 rows");
    return -1;
}

/* call(function, data, rows=1) -> (status, cell, ticket): made, not waited for; cell and ticket only if OK */
static PyObject *port_call(Port *self, PyObject *args) {
    Py_buffer data;
    unsigned function, rows, cell = AO_NO_CELL;
    if (parse_request(args, "Iy*|I:call", &function, &data, &rows) < 0) return NULL;
    int status;
    uint64_t ticket = 0;
    Py_BEGIN_ALLOW_THREADS
    status = take_cell(self, function, &cell);
    if (status == AO_STATUS_OK) ticket = send(self, function, cell, data.buf, (unsigned)data.len, rows);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return Py_BuildValue("(iIK)", status, cell, (unsigned long long)ticket);
}

/* post(function, data, rows=1) -> status */
static PyObject *port_post(Port *self, PyObject *args) {
    Py_buffer data;
    unsigned function, rows;
    if (parse_request(args, "Iy*|I:post", &function, &data, &rows) < 0) return NULL;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = reserve_post(self, function);
    if (status == AO_STATUS_OK) send(self, function, AO_NO_CELL, data.buf, (unsigned)data.len, rows);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&data);
    return PyLong_FromLong(status);
}

static PyObject *take_reply(Port *self, unsigned cell, uint64_t control) {
    unsigned char *at = cell_at(self, cell);
    Py_ssize_t nbytes = (Py_ssize_t)(control & 1023);
    unsigned status = control >> AO_REPLY_STATUS_SHIFT & 7, kind = control >> AO_REPLY_KIND_SHIFT & 7;
    if (nbytes > AO_PAYLOAD_NBYTES) { /* a stray write: no host sends that */
        int64_t code = AO_CODE_WRONG_REPLY;
        free_cell(self, cell);
        return Py_BuildValue("(iiy#)", AO_STATUS_ERROR, AO_KIND_NONE, (char *)&code, (Py_ssize_t)sizeof code);
    }
    if (status == AO_STATUS_ERROR) nbytes = 8;
    PyObject *reply = Py_BuildValue("(IIy#)", status, kind, nbytes <= AO_INLINE_NBYTES ? at : at + AO_CELL_DATA, nbytes);
    free_cell(self, cell);
    return reply;
}

static int parse_cell(PyObject *args, const char *format, unsigned *cell, unsigned long long *ticket, unsigned *function) {
    if (!PyArg_ParseTuple(args, format, cell, ticket, function)) return -1;
    if (*cell < AO_CELLS) return 0;
    PyErr_SetString(PyExc_ValueError, "there is no such cell");
    return -1;
}

/* poll(cell, ticket) -> (status, kind, bytes), or None; the bytes of an ERROR are its code */
static PyObject *port_poll(Port *self, PyObject *args) {
    unsigned cell;
    unsigned long long ticket;
    if (parse_cell(args, "IK:poll", &cell, &ticket, NULL) < 0) return NULL;
    uint64_t control = __atomic_load_n(cell_control(self, cell), __ATOMIC_ACQUIRE);
    if (control >> AO_REPLY_TICKET_SHIFT != ticket + 1) Py_RETURN_NONE;
    return take_reply(self, cell, control);
}

/* wait(cell, ticket, function) -> (status, kind, bytes) */
static PyObject *port_wait(Port *self, PyObject *args) {
    unsigned cell, function;
    unsigned long long ticket;
    if (parse_cell(args, "IKI:wait", &cell, &ticket, &function) < 0) return NULL;
    int status = -1;
    uint64_t control, *word = cell_control(self, cell);
    Py_BEGIN_ALLOW_THREADS
    int64_t start = ao_now_ns();
    for (;;) {
        control = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (control >> AO_REPLY_TICKET_SHIFT == ticket + 1) break;
        int64_t now = ao_now_ns(), until = start + self->timeout_ns + 1;
        int stopped = is_cancelled(self);
        if (!stopped && now < until) {
            ao_host_wait(word, (ticket + 1) << AO_REPLY_TICKET_SHIFT, now + SLICE_NS < until ? now + SLICE_NS : until);
            continue;
        }
        /* This thread may have been held up since it looked: what was answered before the end of the wait counts. */
        control = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (control >> AO_REPLY_TICKET_SHIFT != ticket + 1) status = stopped ? AO_STATUS_CANCELLED : AO_STATUS_TIMEOUT;
        break;
    }
    if (status >= 0) leave_cell(self, cell, ticket);
    if (status == AO_STATUS_TIMEOUT) report(self, function, AO_CODE_NO_ANSWER);
    Py_END_ALLOW_THREADS
    if (status >= 0) return Py_BuildValue("(iiy#)", status, AO_KIND_NONE, "", (Py_ssize_t)0);
    return take_reply(self, cell, control);
}

/* leave(cell, ticket): nobody waits for it any more */
static PyObject *port_leave(Port *self, PyObject *args) {
    unsigned cell;
    unsigned long long ticket;
    if (parse_cell(args, "IK:leave", &cell, &ticket, NULL) < 0) return NULL;
    leave_cell(self, cell, ticket);
    Py_RETURN_NONE;
}

static PyObject *port_cancelled(Port *self, PyObject *Py_UNUSED(ignored)) { return PyBool_FromLong(is_cancelled(self)); }

static PyObject *port_progress(Port *self, PyObject *args) {
    unsigned long long done, total;
    if (!PyArg_ParseTuple(args, "KK:progress", &done, &total)) return NULL;
    __atomic_store_n(block_word(self, AO_LAUNCH_PROGRESS + 8), total, __ATOMIC_RELAXED);
    __atomic_store_n(block_word(self, AO_LAUNCH_PROGRESS), done, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

/* report(function, code): a call went wrong in a way that the host does not see */
static PyObject *port_report(Port *self, PyObject *args) {
    unsigned function;
    int code;
    if (!PyArg_ParseTuple(args, "Ii:report", &function, &code)) return NULL;
    report(self, function, code);
    Py_RETURN_NONE;
}

static PyMethodDef port_methods[] = {
    {"call", (PyCFunction)port_call, METH_VARARGS, "Send a request that wants a reply."},
    {"post", (PyCFunction)port_post, METH_VARARGS, "Send a request that wants none."},
    {"poll", (PyCFunction)port_poll, METH_VARARGS, "The reply if it is there."},
    {"wait", (PyCFunction)port_wait, METH_VARARGS, "Wait for the reply."},
    {"leave", (PyCFunction)port_leave, METH_VARARGS, "Give a reply up."},
    {"cancelled", (PyCFunction)port_cancelled, METH_NOARGS, "Whether the launch was asked to stop."},
    {"report", (PyCFunction)port_report, METH_VARARGS, "Say that a call went wrong in a way that the host does not see."},
    {"progress", (PyCFunction)port_progress, METH_VARARGS, "Say how far the launch is."},
    {NULL, NULL, 0, NULL},
};

static PyObject *port_get_timeout(Port *self, void *Py_UNUSED(closure)) { return PyLong_FromLongLong(self->timeout_ns); }

static int port_set_timeout(Port *self, PyObject *value, void *Py_UNUSED(closure)) {
    unsigned long long timeout = value ? PyLong_AsUnsignedLongLong(value) : 0;
    if (PyErr_Occurred()) return -1;
    self->timeout_ns = timeout < MOST_NS ? (int64_t)timeout : MOST_NS;
    return 0;
}

static PyGetSetDef port_getset[] = {
    {"timeout_ns", (getter)port_get_timeout, (setter)port_set_timeout, "After so long a wait ends with TIMEOUT.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
PyTypeObject AoPort_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Port",
    .tp_doc = "The device's end of a channel, for a launch on the host device.",
    .tp_basicsize = sizeof(Port),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = port_new,
    .tp_dealloc = (destructor)port_dealloc,
    .tp_traverse = (traverseproc)port_traverse,
    .tp_methods = port_methods,
    .tp_getset = port_getset,
};
