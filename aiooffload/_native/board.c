/* The board: one completion slot per lane, and the operations waiting on it in order.
 *
 * A mark on the device stores a lane's next sequence number in its slot. Looking is a load per
 * lane in flight; one look finishes everything that arrived.
 */
#include "native.h"

#define EXACT_NS 20000     /* a look this soon after the last one saw the end as it happened; */
#define EXACT_SHARE 64     /* or within this fraction of the duration */
#define GUESS_NS 20000
#define MOST_TOGETHER 8    /* tiny operations put on one lane while others are idle */
#define BATCH 256          /* operations finished per scan, so that the list fits on the stack */
#define SERVE_NS 200000    /* one look reads requests for so long before others have their turn */
#define STAY_NS 20000      /* how long a look stays with a kernel that calls again and again */
#define MAX_SPIN_LANES 256 /* lanes watched while spinning; more are looked at between spins */

/* ---- queue ---- */

static void set_unmarked(AoQueue *self, int unmarked) {
    if (self->unmarked == unmarked) return;
    self->unmarked = (char)unmarked;
    if (self->board) self->board->unmarked += unmarked ? 1 : -1;
}

static inline uint64_t head_sequence(const AoQueue *q) { return q->issued - q->in_flight + 1; }

/* When the last of `deps` (a list of operations, or NULL) is expected to be done. */
static int64_t ready_ns(PyObject *deps) {
    int64_t ready = 0;
    for (Py_ssize_t i = 0; deps && PyList_CheckExact(deps) && i < PyList_GET_SIZE(deps); i++) {
        const AoOperation *dep = (AoOperation *)PyList_GET_ITEM(deps, i);
        if (!dep->finished && dep->due_ns > ready) ready = dep->due_ns;
    }
    return ready;
}

/* Whether one of `deps` is unfinished on another lane. */
static int waits_elsewhere(PyObject *deps, const AoQueue *here) {
    for (Py_ssize_t i = 0; deps && PyList_CheckExact(deps) && i < PyList_GET_SIZE(deps); i++) {
        const AoOperation *dep = (AoOperation *)PyList_GET_ITEM(deps, i);
        if (!dep->finished && dep->queue != (PyObject *)here) return 1;
    }
    return 0;
}

/* How long an operation may take: what is known of its plan, be it unsteady, or a guess. Where nothing is known
 * all count the same, so a lane with more before it counts as later. */
static int64_t guess_ns(const AoOperation *op) {
    const AoPlan *plan = (AoPlan *)op->plan;
    return plan && plan->samples && plan->median_ns >= 1.0 ? (int64_t)plan->median_ns : GUESS_NS;
}

/* When the lane is expected to be done with what it has. */
static int64_t free_ns(const AoQueue *self, int64_t now) { return self->in_flight && self->end_ns > now ? self->end_ns : now; }

void ao_queue_push(AoQueue *self, AoOperation *op, int64_t started_ns) {
    uint32_t place = (self->head + self->in_flight) % self->depth;
    int64_t start = free_ns(self, started_ns), ready = ready_ns(op->deps);
    self->end_ns = op->due_ns = (start > ready ? start : ready) + guess_ns(op);
    self->ring[place] = (AoOperation *)Py_NewRef(op);
    self->started_ns[place] = started_ns;
    self->in_flight++;
    self->issued++;
    self->board->in_flight++;
    self->board->pushed++;
    self->board->progress_ns = started_ns;
    op->sequence = self->issued;
    op->tiny = op->plan && ao_plan_is_tiny((AoPlan *)op->plan);
    if (!op->tiny) self->heavy++;
    op->waited = (char)waits_elsewhere(op->deps, self);
    if (op->waited) Py_XSETREF(op->behind, Py_NewRef(op->deps));
    set_unmarked(self, op->coarse);
    Py_XSETREF(op->queue, Py_NewRef(self));
}

static PyObject *queue_push(AoQueue *self, PyObject *arg) {
    if (!PyObject_TypeCheck(arg, &AoOperation_Type)) {
        PyErr_SetString(PyExc_TypeError, "push() takes an Operation");
        return NULL;
    }
    if (!self->board || self->in_flight == self->depth) {
        PyErr_SetString(PyExc_IndexError, "the lane is full or its board is gone");
        return NULL;
    }
    ao_queue_push(self, (AoOperation *)arg, ao_now_ns());
    Py_RETURN_NONE;
}

/* The mark `issued` was enqueued. */
static PyObject *queue_marked(AoQueue *self, PyObject *Py_UNUSED(ignored)) {
    set_unmarked(self, 0);
    Py_RETURN_NONE;
}

static PyObject *queue_attach(AoQueue *self, PyObject *args) {
    PyObject *stream, *lane;
    if (!PyArg_ParseTuple(args, "OO:attach", &stream, &lane)) return NULL;
    Py_XSETREF(self->stream, Py_NewRef(stream));
    Py_XSETREF(self->lane, Py_NewRef(lane));
    Py_RETURN_NONE;
}

/* Steals the head from the ring. */
static AoOperation *queue_pop(AoQueue *self) {
    AoOperation *op = self->ring[self->head];
    self->ring[self->head] = NULL;
    self->head = (self->head + 1) % self->depth;
    self->in_flight--;
    if (!op->tiny) self->heavy--;
    if (self->board) self->board->in_flight--;
    return op;
}

static int64_t queue_due(const AoQueue *self) {
    if (!self->in_flight) return 0;
    AoPlan *plan = (AoPlan *)self->ring[self->head]->plan;
    int64_t expected = plan ? ao_plan_expected(plan) : 0;
    if (!expected) return 0;
    int64_t started = self->started_ns[self->head];
    return (started > self->last_done_ns ? started : self->last_done_ns) + expected;
}

static PyObject *queue_running_since_ns(AoQueue *self, PyObject *Py_UNUSED(ignored)) {
    if (!self->in_flight) return PyLong_FromLong(0);
    const AoOperation *op = self->ring[self->head];
    int64_t since = self->started_ns[self->head];
    if (self->last_done_ns > since) since = self->last_done_ns;
    for (Py_ssize_t i = 0; op->behind && i < PyList_GET_SIZE(op->behind); i++) {
        const AoOperation *dep = (AoOperation *)PyList_GET_ITEM(op->behind, i);
        if (!dep->finished) return PyLong_FromLong(0);
        if (dep->finished_ns > since) since = dep->finished_ns;
    }
    return PyLong_FromLongLong(since);
}

static PyObject *queue_due_ns(AoQueue *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromLongLong(queue_due(self));
}

static PyObject *queue_operations(AoQueue *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(self->in_flight);
    if (!list) return NULL;
    for (uint32_t i = 0; i < self->in_flight; i++)
        PyList_SET_ITEM(list, i, Py_NewRef(self->ring[(self->head + i) % self->depth]));
    return list;
}

static int queue_traverse(AoQueue *self, visitproc visit, void *arg) {
    Py_VISIT(self->slot);
    Py_VISIT(self->stream);
    Py_VISIT(self->lane);
    for (uint32_t i = 0; self->ring && i < self->in_flight; i++) Py_VISIT(self->ring[(self->head + i) % self->depth]);
    return 0;
}

static int queue_clear(AoQueue *self) {
    Py_CLEAR(self->stream);
    Py_CLEAR(self->lane);
    while (self->ring && self->in_flight) Py_DECREF(queue_pop(self));
    return 0;
}

static void queue_dealloc(AoQueue *self) {
    PyObject_GC_UnTrack(self);
    queue_clear(self);
    PyMem_Free(self->ring);
    PyMem_Free(self->started_ns);
    Py_CLEAR(self->slot);
    PyObject_GC_Del(self);
}

static PyObject *queue_next_sequence(AoQueue *self, void *Py_UNUSED(c)) {
    return PyLong_FromUnsignedLongLong(self->issued + 1);
}

static PyMethodDef queue_methods[] = {
    {"push", (PyCFunction)queue_push, METH_O, "Take an operation whose mark next_sequence was enqueued."},
    {"marked", (PyCFunction)queue_marked, METH_NOARGS, "The mark of what was pushed last was enqueued after all."},
    {"attach", (PyCFunction)queue_attach, METH_VARARGS, "Name the stream and the lane it belongs to."},
    {"due_ns", (PyCFunction)queue_due_ns, METH_NOARGS, "When the oldest operation is expected to be done, 0 if unknown."},
    {"running_since_ns", (PyCFunction)queue_running_since_ns, METH_NOARGS,
     "When nothing was left that the oldest operation had to wait for, 0 if it still has."},
    {"operations", (PyCFunction)queue_operations, METH_NOARGS, "The operations in flight, oldest first."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef queue_members[] = {
    {"slot", T_OBJECT, offsetof(AoQueue, slot), READONLY, NULL},
    {"depth", T_UINT, offsetof(AoQueue, depth), READONLY, NULL},
    {"in_flight", T_UINT, offsetof(AoQueue, in_flight), READONLY, NULL},
    {"issued", T_ULONGLONG, offsetof(AoQueue, issued), READONLY, NULL},
    {"seen", T_ULONGLONG, offsetof(AoQueue, seen), READONLY, NULL},
    {"load", T_PYSSIZET, offsetof(AoQueue, load), 0, NULL},
    {"reserved", T_BOOL, offsetof(AoQueue, reserved), 0, NULL},
    {"unmarked", T_BOOL, offsetof(AoQueue, unmarked), READONLY, NULL},
    {"precise", T_UINT, offsetof(AoQueue, precise), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
static PyGetSetDef queue_getset[] = {
    {"next_sequence", (getter)queue_next_sequence, NULL, "What the next mark on this stream has to write.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
PyTypeObject AoQueue_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.LaneQueue",
    .tp_doc = "The operations in flight on one stream, in order, and the slot that says how far it got.",
    .tp_basicsize = sizeof(AoQueue),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)queue_dealloc,
    .tp_traverse = (traverseproc)queue_traverse,
    .tp_clear = (inquiry)queue_clear,
    .tp_methods = queue_methods,
    .tp_members = queue_members,
    .tp_getset = queue_getset,
};

/* ---- board ---- */

static void record_duration(const AoBoard *board, AoQueue *lane, int64_t started, AoPlan *plan, int64_t now) {
    if (lane->last_done_ns > started) started = lane->last_done_ns;
    int64_t gap = now - board->looked_ns;
    if (gap <= EXACT_NS || gap <= (now - started) / EXACT_SHARE)
        ao_plan_record(plan, now - started);
    else
        ao_plan_record_between(plan, board->looked_ns - started, now - started);
}

/* Pops what arrived on one lane into out[]; the caller owns the references. A slot that went back, or says what was
 * never asked for, was written by some kernel: nothing can be said of the lane any more, and nothing is popped. */
static Py_ssize_t collect_lane(AoBoard *board, AoQueue *lane, AoOperation **out, Py_ssize_t room, int64_t now) {
    Py_ssize_t count = 0;
    uint64_t seen = ao_word_load(lane->slot);
    if (seen - lane->seen > lane->issued - lane->seen) {
        board->stray = 1;
        return 0;
    }
    lane->seen = seen;
    int64_t started = lane->started_ns[lane->head];
    while (lane->in_flight && count < room && ao_reached(seen, head_sequence(lane))) {
        out[count] = queue_pop(lane);
        out[count++]->finished_ns = now;
    }
    if (count == 0) return 0;
    /* Of several that arrived together only the sum is known: that teaches nothing about one. Nor does
     * what also waited for another lane, or for its mark. */
    if (count == 1 && out[0]->plan && !out[0]->coarse && !out[0]->waited) record_duration(board, lane, started, (AoPlan *)out[0]->plan, now);
    lane->last_done_ns = now;
    return count;
}

static Py_ssize_t collect(AoBoard *board, AoOperation **out) {
    Py_ssize_t count = 0, lanes = PyList_GET_SIZE(board->lanes);
    int64_t now = ao_now_ns();
    for (Py_ssize_t i = 0; i < lanes && count < BATCH; i++) {
        AoQueue *lane = ao_board_lane(board, i);
        if (lane->in_flight) count += collect_lane(board, lane, out + count, BATCH - count, now);
    }
    board->looked_ns = now;
    if (count) board->progress_ns = now;
    return count;
}

struct AoBatch {
    AoOperation *arrived[BATCH];
    Py_ssize_t next, count;   /* arrived[next .. count) are popped, ours, and not finished yet */
    struct AoBatch *outer;
};

static void finish(struct AoBatch *batch) {
    while (batch->next < batch->count) {
        AoOperation *op = batch->arrived[batch->next++];
        ao_operation_arrive(op);
        Py_DECREF(op);
    }
}

/* Finishes everything that arrived. Finishing runs Python code, which may push or poll again: that finishes what
 * was popped and is on no queue any more, or whoever polls for it would do so for ever. */
static Py_ssize_t drain(AoBoard *board) {
    for (struct AoBatch *outer = board->batches; outer; outer = outer->outer) finish(outer);
    struct AoBatch batch = {.outer = board->batches};
    board->batches = &batch;
    Py_ssize_t total = 0;
    do {
        batch.count = batch.next = 0; /* collecting runs nothing */
        batch.count = board->in_flight ? collect(board, batch.arrived) : 0;
        finish(&batch);
        total += batch.count;
    } while (batch.count == BATCH);
    board->batches = batch.outer;
    board->completed += (unsigned long long)total;
    return total;
}

/* Looks without the interpreter until any lane's head or a request arrives, or the time is over. */
static void spin(AoBoard *board, int64_t until) {
    const AoWord *slots[MAX_SPIN_LANES];
    uint64_t heads[MAX_SPIN_LANES];
    int watched = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(board->lanes) && watched < MAX_SPIN_LANES; i++) {
        AoQueue *lane = ao_board_lane(board, i);
        if (!lane->in_flight) continue;
        slots[watched] = (AoWord *)Py_NewRef(lane->slot);
        heads[watched++] = head_sequence(lane);
    }
    PyObject *channel = Py_XNewRef(board->channel);
    Py_BEGIN_ALLOW_THREADS;
    int64_t now;
    do {
        for (int i = 0; i < watched; i++)
            if (ao_reached(ao_word_load(slots[i]), heads[i])) goto arrived;
        if (channel && ao_channel_pending((struct AoChannel *)channel)) goto arrived;
        ao_pause();
        now = ao_now_ns();
        __atomic_store_n(&board->looked_ns, now, __ATOMIC_RELAXED);
    } while (now < until);
arrived:;
    Py_END_ALLOW_THREADS;
    for (int i = 0; i < watched; i++) Py_DECREF((PyObject *)slots[i]);
    Py_XDECREF(channel);
}

static int is_called(const AoBoard *self) {
    return self->channel && ao_channel_pending((struct AoChannel *)self->channel);
}

static Py_ssize_t fail_stray(void) {
    PyObject *errors = PyImport_ImportModule("aiooffload.errors");
    PyObject *lost = errors ? PyObject_GetAttrString(errors, "DeviceLostError") : NULL;
    if (lost) PyErr_SetString(lost, "a lane's slot holds what no completion mark has stored: some kernel wrote where it must not");
    Py_XDECREF(lost);
    Py_XDECREF(errors);
    return -1;
}

/* Finishes what arrived and serves what was asked for; -1 with an exception. */
static Py_ssize_t look(AoBoard *self) {
    Py_ssize_t count = drain(self);
    if (self->stray) return fail_stray();
    if (!is_called(self)) return count;
    PyObject *channel = Py_NewRef(self->channel);
    Py_ssize_t served = ao_channel_drain((struct AoChannel *)channel, SERVE_NS);
    Py_DECREF(channel);
    return served < 0 ? -1 : count + served;
}

/* Looks, for up to `spin_ns` if nothing is there; -1 with an exception. While nothing but requests arrives,
 * and each is answered at once, the next one of the same kernel is near, and going through the loop in
 * between would only be late for it: so it stays for a while. */
static Py_ssize_t look_on(AoBoard *self, int64_t spin_ns) {
    int64_t began = ao_now_ns();
    Py_ssize_t total = 0;
    for (;;) {
        unsigned long long completed = self->completed;
        uint64_t suspended = self->channel ? ao_channel_suspended((struct AoChannel *)self->channel) : 0;
        Py_ssize_t count = look(self);
        if (count == 0 && spin_ns > 0 && self->in_flight) {
            spin(self, ao_now_ns() + spin_ns);
            count = look(self);
        }
        if (count < 0) return -1;
        total += count;
        if (count == 0 || spin_ns <= 0 || !self->in_flight || !self->channel || self->completed != completed ||
            ao_channel_suspended((struct AoChannel *)self->channel) != suspended || ao_now_ns() - began > STAY_NS)
            return total;
    }
}

static PyObject *board_poll(AoBoard *self, PyObject *const *args, Py_ssize_t nargs) {
    long long spin_ns = nargs > 0 ? PyLong_AsLongLong(args[0]) : 0;
    if (spin_ns == -1 && PyErr_Occurred()) return NULL;
    Py_ssize_t count = look_on(self, spin_ns);
    return count < 0 ? NULL : PyLong_FromSsize_t(count);
}

/* A lane that is awake with a few tiny operations, or -1. Each of the host's lanes is a thread: spread
 * over all of them, tiny kernels cost a wake and a turn with the interpreter apiece. */
static Py_ssize_t pick_awake(const AoBoard *self, Py_ssize_t first, Py_ssize_t last) {
    for (Py_ssize_t i = first; i < last; i++) {
        const AoQueue *lane = ao_board_lane(self, i);
        if (lane->in_flight && lane->in_flight < MOST_TOGETHER && lane->in_flight < lane->depth && !lane->heavy &&
            !lane->load && !lane->reserved)
            return i;
    }
    return -1;
}

Py_ssize_t ao_board_pick(AoBoard *self, Py_ssize_t first, Py_ssize_t last, const AoPlan *plan) {
    Py_ssize_t awake = plan && ao_plan_is_tiny(plan) ? pick_awake(self, first, last) : -1;
    if (awake >= 0) return awake;
    Py_ssize_t span = last - first, best = first, best_load = PY_SSIZE_T_MAX;
    Py_ssize_t i = self->rotate >= first && self->rotate < last ? self->rotate : first;
    for (Py_ssize_t k = 0; k < span && best_load > 0; k++) {
        AoQueue *lane = ao_board_lane(self, i);
        Py_ssize_t load = (Py_ssize_t)lane->in_flight + lane->load;
        if (load < best_load && !lane->reserved) best = i, best_load = load;
        if (++i == last) i = first;
    }
    self->rotate = best + 1;
    return best;
}

typedef struct {
    int full;                 /* it would wait on the host */
    int64_t start;            /* when it would start, */
    int away;                 /* behind an event, since not all that it comes after is there, */
    int64_t idle;             /* and how long the lane would have been idle by then */
    Py_ssize_t load;
} prospect;

static int is_better(const prospect *a, const prospect *b) {
    if (a->full != b->full) return a->full < b->full;
    if (a->start != b->start) return a->start < b->start;
    if (a->away != b->away) return a->away < b->away;
    if (a->idle != b->idle) return a->idle < b->idle;
    return a->load < b->load;
}

Py_ssize_t ao_board_pick_after(AoBoard *self, Py_ssize_t first, Py_ssize_t last, PyObject *deps) {
    int64_t now = ao_now_ns(), ready = ready_ns(deps);
    Py_ssize_t best = first;
    prospect of_best = {.full = 2};
    for (Py_ssize_t i = first; i < last; i++) {
        const AoQueue *lane = ao_board_lane(self, i);
        if (lane->reserved) continue;
        int64_t free = free_ns(lane, now), start = free > ready ? free : ready;
        prospect p = {lane->in_flight == lane->depth || lane->load > 0, start, waits_elsewhere(deps, lane), start - free,
                      (Py_ssize_t)lane->in_flight + lane->load};
        if (is_better(&p, &of_best)) best = i, of_best = p;
    }
    return best;
}

static PyObject *board_pick_after(AoBoard *self, PyObject *args) {
    Py_ssize_t first, last;
    PyObject *deps;
    if (!PyArg_ParseTuple(args, "nnO!:pick_after", &first, &last, &PyList_Type, &deps)) return NULL;
    if (first < 0 || last > PyList_GET_SIZE(self->lanes) || first >= last) {
        PyErr_SetString(PyExc_ValueError, "pick_after(first, last, deps) takes a range of lanes that is not empty");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(deps); i++)
        if (!PyObject_TypeCheck(PyList_GET_ITEM(deps, i), &AoOperation_Type))
            return PyErr_Format(PyExc_TypeError, "pick_after() takes a list of operations");
    return PyLong_FromSsize_t(ao_board_pick_after(self, first, last, deps));
}

static PyObject *board_pick(AoBoard *self, PyObject *const *args, Py_ssize_t nargs) {
    Py_ssize_t first = nargs == 2 ? PyLong_AsSsize_t(args[0]) : -1, last = nargs == 2 ? PyLong_AsSsize_t(args[1]) : -1;
    if (PyErr_Occurred()) return NULL;
    if (first < 0 || last > PyList_GET_SIZE(self->lanes) || first >= last) {
        PyErr_SetString(PyExc_ValueError, "pick(first, last) takes a range of lanes that is not empty");
        return NULL;
    }
    return PyLong_FromSsize_t(ao_board_pick(self, first, last, NULL));
}

static PyObject *board_add(AoBoard *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"slot", "depth", "sequence", "apart", NULL};
    PyObject *slot;
    unsigned depth;
    unsigned long long sequence = 0;
    int apart = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!I|K$p:add", names, &AoWord_Type, &slot, &depth, &sequence, &apart)) return NULL;
    if (!apart && self->open < PyList_GET_SIZE(self->lanes)) {
        PyErr_SetString(PyExc_ValueError, "lanes for any launch come before those that are apart");
        return NULL;
    }
    if (depth == 0) {
        PyErr_SetString(PyExc_ValueError, "depth is at least 1");
        return NULL;
    }
    AoQueue *lane = PyObject_GC_New(AoQueue, &AoQueue_Type);
    if (!lane) return NULL;
    memset((char *)lane + sizeof(PyObject), 0, sizeof *lane - sizeof(PyObject));
    lane->slot = (AoWord *)Py_NewRef(slot);
    lane->depth = depth;
    lane->issued = lane->seen = sequence;
    lane->board = self;
    lane->ring = PyMem_Calloc(depth, sizeof *lane->ring);
    lane->started_ns = PyMem_Calloc(depth, sizeof *lane->started_ns);
    PyObject_GC_Track(lane);
    if (!lane->ring || !lane->started_ns || PyList_Append(self->lanes, (PyObject *)lane) < 0) {
        Py_DECREF(lane);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    lane->open = !apart;
    if (!apart) self->open++;
    __atomic_store_n(lane->slot->host, sequence, __ATOMIC_SEQ_CST);
    return (PyObject *)lane;
}

static PyObject *board_due_ns(AoBoard *self, PyObject *Py_UNUSED(ignored)) {
    int64_t earliest = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->lanes); i++) {
        AoQueue *lane = ao_board_lane(self, i);
        if (!lane->in_flight) continue;
        int64_t due = queue_due(lane);
        if (due && (!earliest || due < earliest)) earliest = due;
    }
    return PyLong_FromLongLong(earliest);
}

static PyObject *board_abandon(AoBoard *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; list && i < PyList_GET_SIZE(self->lanes); i++) {
        AoQueue *lane = ao_board_lane(self, i);
        set_unmarked(lane, 0);
        while (lane->in_flight) {
            AoOperation *op = queue_pop(lane);
            int status = PyList_Append(list, (PyObject *)op);
            Py_DECREF(op);
            if (status < 0) {
                Py_DECREF(list);
                return NULL;
            }
        }
    }
    return list;
}

static PyObject *board_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Board", names)) return NULL;
    AoBoard *self = (AoBoard *)type->tp_alloc(type, 0);
    if (self && !(self->lanes = PyList_New(0))) Py_CLEAR(self);
    return (PyObject *)self;
}

static int board_traverse(AoBoard *self, visitproc visit, void *arg) {
    Py_VISIT(self->lanes);
    Py_VISIT(self->channel);
    return 0;
}

static int board_clear(AoBoard *self) {
    for (Py_ssize_t i = 0; self->lanes && i < PyList_GET_SIZE(self->lanes); i++) ao_board_lane(self, i)->board = NULL;
    Py_CLEAR(self->lanes);
    Py_CLEAR(self->channel);
    return 0;
}

static void board_dealloc(AoBoard *self) {
    PyObject_GC_UnTrack(self);
    board_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef board_methods[] = {
    {"add", (PyCFunction)(void (*)(void))board_add, METH_VARARGS | METH_KEYWORDS, "Add a lane and return its queue."},
    {"poll", (PyCFunction)(void (*)(void))board_poll, METH_FASTCALL, "Finish every operation whose mark arrived."},
    {"pick", (PyCFunction)(void (*)(void))board_pick, METH_FASTCALL, "Index of the least busy lane of a range."},
    {"pick_after", (PyCFunction)board_pick_after, METH_VARARGS,
     "Index of the lane of a range on which an operation would start first that comes after some others."},
    {"due_ns", (PyCFunction)board_due_ns, METH_NOARGS, "The earliest known due time over all lanes, 0 if none is known."},
    {"abandon", (PyCFunction)board_abandon, METH_NOARGS, "Empty every queue, finishing nothing."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef board_members[] = {
    {"in_flight", T_PYSSIZET, offsetof(AoBoard, in_flight), READONLY, NULL},
    {"pushed", T_ULONGLONG, offsetof(AoBoard, pushed), READONLY, NULL},
    {"completed", T_ULONGLONG, offsetof(AoBoard, completed), READONLY, NULL},
    {"progress_ns", T_LONGLONG, offsetof(AoBoard, progress_ns), READONLY, NULL},
    {"pending", T_PYSSIZET, offsetof(AoBoard, pending), 0, NULL},
    {"paused", T_PYSSIZET, offsetof(AoBoard, paused), 0, NULL},
    {"unmarked", T_PYSSIZET, offsetof(AoBoard, unmarked), READONLY, NULL},
    {"open", T_PYSSIZET, offsetof(AoBoard, open), READONLY, NULL},
    {"watched", T_BOOL, offsetof(AoBoard, watched), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *board_get_channel(AoBoard *self, void *Py_UNUSED(closure)) {
    return Py_NewRef(self->channel ? self->channel : Py_None);
}

static int board_set_channel(AoBoard *self, PyObject *value, void *Py_UNUSED(closure)) {
    if (value && value != Py_None && !PyObject_TypeCheck(value, &AoChannel_Type)) {
        PyErr_SetString(PyExc_TypeError, "channel is a Channel or None");
        return -1;
    }
    Py_XSETREF(self->channel, value == Py_None ? NULL : Py_XNewRef(value));
    return 0;
}

static PyGetSetDef board_getset[] = {
    {"channel", (getter)board_get_channel, (setter)board_set_channel, "What a look watches besides the lanes, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
PyTypeObject AoBoard_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Board",
    .tp_doc = "All lanes' queues of one Offload; finds what arrived.",
    .tp_basicsize = sizeof(AoBoard),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = board_new,
    .tp_dealloc = (destructor)board_dealloc,
    .tp_traverse = (traverseproc)board_traverse,
    .tp_clear = (inquiry)board_clear,
    .tp_methods = board_methods,
    .tp_getset = board_getset,
    .tp_members = board_members,
};
