/* The launch path: from `off.launch(kernel, grid=..., block=..., args=...)` to the driver.
 *
 * It takes the plain launches: a kernel that was launched in this geometry before, nothing
 * waiting on the host, a lane with room, and if its buffers are in use, then by operations on that one
 * lane alone. What is named in `after` has to be on the device, on any lane. For everything else
 * launch() returns None and Python does it, by the same steps with the same outcome
 * (engine/submission.py, engine/lanes.py). What it saves is the interpretation of those steps, which
 * costs more than the driver's part.
 */
#include "native.h"

#include <stddef.h>

#define MAX_BUFFERS 32     /* among the arguments of a launch */

/* Where Python's classes keep what is read here: the places of their slots. */
typedef struct {
    PyTypeObject *buffer, *allocation;
    Py_ssize_t of_allocation, of_address, of_dtype; /* in a buffer */
    Py_ssize_t of_lease, of_history, of_owner;      /* in its allocation */
} Layout;

typedef struct {
    PyObject_HEAD
    AoBoard *board;
    PyObject *loop, *owner;
    PyTypeObject *operation_type; /* a subclass of AoOperation_Type */
    PyObject *notice;         /* called after a push while nobody watches the board */
    PyObject *on_error;       /* called with (operation, exception) if the driver refused it */
    PyObject *sites;          /* dict: (kernel, grid, block) -> site */
    Layout layout;
    char ready;               /* open, and marks are words: kept by the engine */
    char ordered;             /* program order holds: kept by the engine */
} Launcher;

static PyObject *s_enqueue_kernel, *s_enqueue_wait_for, *s_enqueue_position;

static int launcher_clear(Launcher *self) {
    Py_CLEAR(self->board);
    Py_CLEAR(self->loop);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->operation_type);
    Py_CLEAR(self->notice);
    Py_CLEAR(self->on_error);
    Py_CLEAR(self->sites);
    Py_CLEAR(self->layout.buffer);
    Py_CLEAR(self->layout.allocation);
    return 0;
}

static int launcher_traverse(Launcher *self, visitproc visit, void *arg) {
    Py_VISIT(self->board);
    Py_VISIT(self->loop);
    Py_VISIT(self->owner);
    Py_VISIT(self->operation_type);
    Py_VISIT(self->notice);
    Py_VISIT(self->on_error);
    Py_VISIT(self->sites);
    Py_VISIT(self->layout.buffer);
    Py_VISIT(self->layout.allocation);
    return 0;
}

static void launcher_dealloc(Launcher *self) {
    PyObject_GC_UnTrack(self);
    launcher_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The place of a slot (an entry of __slots__) in the objects of a class; -1 with an exception. */
static Py_ssize_t slot_of(PyTypeObject *type, const char *name) {
    PyObject *found = PyObject_GetAttrString((PyObject *)type, name);
    if (!found) return -1;
    Py_ssize_t offset = -1;
    if (Py_IS_TYPE(found, &PyMemberDescr_Type) && ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX)
        offset = ((PyMemberDescrObject *)found)->d_member->offset;
    else
        PyErr_Format(PyExc_TypeError, "%s of %s is not a slot", name, type->tp_name);
    Py_DECREF(found);
    return offset;
}

static int read_layout(Layout *layout, PyObject *buffer, PyObject *allocation) {
    layout->buffer = (PyTypeObject *)Py_NewRef(buffer);
    layout->allocation = (PyTypeObject *)Py_NewRef(allocation);
    return (layout->of_allocation = slot_of(layout->buffer, "allocation")) < 0 ||
                   (layout->of_address = slot_of(layout->buffer, "_address")) < 0 ||
                   (layout->of_dtype = slot_of(layout->buffer, "dtype")) < 0 ||
                   (layout->of_lease = slot_of(layout->allocation, "lease")) < 0 ||
                   (layout->of_history = slot_of(layout->allocation, "history")) < 0 ||
                   (layout->of_owner = slot_of(layout->allocation, "owner")) < 0
               ? -1
               : 0;
}

/* Borrowed, NULL if it is not set. */
static inline PyObject *slot(PyObject *object, Py_ssize_t offset) { return *(PyObject **)((char *)object + offset); }

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"board", "loop", "owner", "operation_type", "buffer_type", "allocation_type",
                            "notice", "on_error", NULL};
    PyObject *board, *loop, *owner, *operation_type, *buffer_type, *allocation_type, *notice, *on_error;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOO!O!O!OO:Launcher", names, &AoBoard_Type, &board, &loop, &owner,
                                     &PyType_Type, &operation_type, &PyType_Type, &buffer_type, &PyType_Type,
                                     &allocation_type, &notice, &on_error))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)operation_type, &AoOperation_Type)) {
        PyErr_SetString(PyExc_TypeError, "operation_type is a subclass of Operation");
        return NULL;
    }
    if (!s_enqueue_kernel && !(s_enqueue_kernel = PyUnicode_InternFromString("enqueue_kernel"))) return NULL;
    if (!s_enqueue_wait_for && !(s_enqueue_wait_for = PyUnicode_InternFromString("enqueue_wait_for"))) return NULL;
    if (!s_enqueue_position && !(s_enqueue_position = PyUnicode_InternFromString("enqueue_position"))) return NULL;
    Launcher *self = (Launcher *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->board = (AoBoard *)Py_NewRef(board);
    self->loop = Py_NewRef(loop);
    self->owner = Py_NewRef(owner);
    self->operation_type = (PyTypeObject *)Py_NewRef(operation_type);
    self->notice = Py_NewRef(notice);
    self->on_error = Py_NewRef(on_error);
    self->ordered = 1;
    if (!(self->sites = PyDict_New()) || read_layout(&self->layout, buffer_type, allocation_type) < 0) Py_CLEAR(self);
    return (PyObject *)self;
}

int ao_site_check(PyObject *site) {
    if (PyTuple_CheckExact(site) && PyTuple_GET_SIZE(site) == AO_SITE_SIZE) {
        PyObject **item = ((PyTupleObject *)site)->ob_item;
        if (PyObject_TypeCheck(item[AO_SITE_PLAN], &AoPlan_Type) &&
            (item[AO_SITE_FORMATS] == Py_None || PyBytes_CheckExact(item[AO_SITE_FORMATS])) &&
            PyBytes_CheckExact(item[AO_SITE_READ_ONLY]) && PyTuple_CheckExact(item[AO_SITE_DTYPES]) &&
            PyCallable_Check(item[AO_SITE_PREPARE]))
            return 0;
    }
    PyErr_SetString(PyExc_TypeError, "a site is a tuple (plan, formats, bare, read_only, dtypes, prepare)");
    return -1;
}

/* Borrowed reference, or NULL with or without an exception. */
static PyObject *find_site(Launcher *self, PyObject *kernel, PyObject *grid, PyObject *block) {
    PyObject *key = PyTuple_Pack(3, kernel, grid, block);
    PyObject *site = key ? PyDict_GetItemWithError(self->sites, key) : NULL;
    Py_XDECREF(key);
    if (!site && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear(); /* a list as grid: not for this path */
    return site;
}

/* learn(kernel, grid, block, site): from now on launch() knows this geometry. */
static PyObject *launcher_learn(Launcher *self, PyObject *args) {
    PyObject *kernel, *grid, *block, *site;
    if (!PyArg_ParseTuple(args, "OOOO:learn", &kernel, &grid, &block, &site) || ao_site_check(site) < 0) return NULL;
    PyObject *key = PyTuple_Pack(3, kernel, grid, block);
    int status = key ? PyDict_SetItem(self->sites, key, site) : -1;
    Py_XDECREF(key);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *launcher_forget(Launcher *self, PyObject *Py_UNUSED(ignored)) {
    PyDict_Clear(self->sites);
    Py_RETURN_NONE;
}

/* ---- arguments ---- */

/* The buffers among a launch's arguments, in order. Each reference is its own. */
typedef struct {
    int count;
    PyObject *keep;           /* (arguments, lease, ...): what the operation holds until it is done; NULL without any */
    AoHistory *histories[MAX_BUFFERS];
    char writes[MAX_BUFFERS];
} Buffers;

static void release_buffers(Buffers *buffers) {
    while (buffers->count) Py_DECREF(buffers->histories[--buffers->count]);
    Py_CLEAR(buffers->keep);
}

/* Numbers, of which there are many, are told apart at once. */
static inline int is_buffer(const Launcher *self, PyObject *value) {
    if (Py_IS_TYPE(value, self->layout.buffer)) return 1;
    return !PyLong_CheckExact(value) && !PyFloat_CheckExact(value) && PyObject_TypeCheck(value, self->layout.buffer);
}

static int count_buffers(const Launcher *self, PyObject *arguments) {
    int count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); i++)
        count += is_buffer(self, PyTuple_GET_ITEM(arguments, i));
    return count;
}

/* Takes argument `index`, a buffer, if it is open, ours, and of the right dtype. */
static int take_buffer(const Launcher *self, PyObject *site, PyObject *buffer, Py_ssize_t index, Buffers *buffers) {
    const Layout *at = &self->layout;
    PyObject *allocation = slot(buffer, at->of_allocation);
    if (!allocation || !PyObject_TypeCheck(allocation, at->allocation)) return 0;
    PyObject *lease = slot(allocation, at->of_lease), *history = slot(allocation, at->of_history);
    if (!lease || lease == Py_None || slot(allocation, at->of_owner) != self->owner) return 0;
    if (!history || !Py_IS_TYPE(history, &AoHistory_Type)) return 0;
    PyObject *dtypes = PyTuple_GET_ITEM(site, AO_SITE_DTYPES), *read_only = PyTuple_GET_ITEM(site, AO_SITE_READ_ONLY);
    PyObject *dtype = index < PyTuple_GET_SIZE(dtypes) ? PyTuple_GET_ITEM(dtypes, index) : Py_None;
    if (dtype != Py_None && dtype != slot(buffer, at->of_dtype)) return 0; /* an equal one is for Python */
    int n = buffers->count++;
    PyTuple_SET_ITEM(buffers->keep, 1 + n, Py_NewRef(lease));
    buffers->histories[n] = (AoHistory *)Py_NewRef(history);
    buffers->writes[n] = index >= PyBytes_GET_SIZE(read_only) || !PyBytes_AS_STRING(read_only)[index];
    return 1;
}

/* 1 found, 0 not for this path, -1 exception; to be released in any case. */
static int find_buffers(const Launcher *self, PyObject *site, PyObject *arguments, Buffers *buffers) {
    int count = count_buffers(self, arguments), status = 1;
    if (count == 0) return 1;
    if (count > MAX_BUFFERS) return 0;
    if (!(buffers->keep = PyTuple_New(1 + count))) return -1;
    PyTuple_SET_ITEM(buffers->keep, 0, Py_NewRef(arguments));
    for (Py_ssize_t i = 0; status > 0 && i < PyTuple_GET_SIZE(arguments); i++) {
        PyObject *value = PyTuple_GET_ITEM(arguments, i);
        if (is_buffer(self, value)) status = take_buffer(self, site, value, i, buffers);
    }
    return status;
}

/* Reads the addresses of the buffers, which stand where the formats have them; 0 if they do not, -1 exception. */
static int find_addresses(const Launcher *self, const char *formats, PyObject *arguments, uint64_t *addresses) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); i++) {
        PyObject *value = PyTuple_GET_ITEM(arguments, i);
        if ((formats[i] == 'P') != is_buffer(self, value)) return 0;
        if (formats[i] != 'P') continue;
        PyObject *address = slot(value, self->layout.of_address);
        if (!address) return 0;
        *addresses = PyLong_AsUnsignedLongLong(address);
        if (*addresses++ == (uint64_t)-1 && PyErr_Occurred()) return -1;
    }
    return 1;
}

/* New reference; None: not for this path. At most MAX_BUFFERS of the arguments are buffers. */
static PyObject *prepare(const Launcher *self, PyObject *site, PyObject *arguments) {
    PyObject *formats = PyTuple_GET_ITEM(site, AO_SITE_FORMATS), *bare = PyTuple_GET_ITEM(site, AO_SITE_BARE);
    if (PyTuple_GET_SIZE(arguments) == 0 && bare != Py_None) return Py_NewRef(bare);
    if (formats == Py_None) return PyObject_CallOneArg(PyTuple_GET_ITEM(site, AO_SITE_PREPARE), arguments);
    uint64_t addresses[MAX_BUFFERS];
    Py_ssize_t count = PyBytes_GET_SIZE(formats);
    int fit = count == PyTuple_GET_SIZE(arguments)
                  ? find_addresses(self, PyBytes_AS_STRING(formats), arguments, addresses)
                  : 0;
    if (fit < 0) return NULL;
    if (!fit) Py_RETURN_NONE;
    return ao_pack_arguments(PyBytes_AS_STRING(formats), count, arguments, addresses);
}

/* ---- what has to come before ---- */

/* What a launch comes after by name. Each reference is its own. */
typedef struct {
    PyObject *requires;       /* tuple of all of them, or NULL */
    PyObject *deps;           /* list of the unfinished ones, or NULL */
} Before;

static void release_before(Before *before) {
    Py_CLEAR(before->requires);
    Py_CLEAR(before->deps);
}

/* 1 it may be waited for on the device, or is done; 0 not for this path. */
static int is_on_device(const Launcher *self, PyObject *item) {
    if (!PyObject_TypeCheck(item, self->operation_type)) return 0;
    const AoOperation *op = (AoOperation *)item;
    if (op->owner != self->owner || op->failure) return 0;
    if (op->finished) return 1;
    return op->queue && ((AoQueue *)op->queue)->board == self->board && !op->calling && !op->streamed;
}

/* 1 found, 0 not for this path, -1 exception; to be released in any case. `after` may be NULL. */
static int find_before(const Launcher *self, PyObject *after, Before *before) {
    if (!after || (PyTuple_CheckExact(after) && PyTuple_GET_SIZE(after) == 0)) return 1;
    if (!PyTuple_CheckExact(after) && !PyList_CheckExact(after)) return 0;
    if (!(before->requires = PySequence_Tuple(after)) || !(before->deps = PyList_New(0))) return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(before->requires); i++) {
        PyObject *item = PyTuple_GET_ITEM(before->requires, i);
        if (!is_on_device(self, item)) return 0;
        if (!((AoOperation *)item)->finished && PyList_Append(before->deps, item) < 0) return -1;
    }
    if (PyList_GET_SIZE(before->deps) == 0) Py_CLEAR(before->deps);
    return 1;
}

/* Lets the lane wait for those on other lanes; -1 with an exception. */
static int enqueue_waits(const AoQueue *lane, PyObject *deps) {
    for (Py_ssize_t i = 0; deps && i < PyList_GET_SIZE(deps); i++) {
        const AoOperation *dep = (AoOperation *)PyList_GET_ITEM(deps, i);
        if (dep->queue == (PyObject *)lane) continue;
        PyObject *sequence = PyLong_FromUnsignedLongLong(dep->sequence);
        if (!sequence) return -1;
        PyObject *args[] = {dep->lane, sequence, lane->stream};
        PyObject *ignored = PyObject_VectorcallMethod(s_enqueue_wait_for, args, 3, NULL);
        Py_DECREF(sequence);
        Py_XDECREF(ignored);
        if (!ignored) return -1;
    }
    return 0;
}

/* ---- launching ---- */

static AoOperation *new_operation(Launcher *self, AoPlan *plan) {
    AoOperation *op = (AoOperation *)self->operation_type->tp_alloc(self->operation_type, 0);
    if (!op) return NULL;
    op->loop = Py_NewRef(self->loop);
    op->owner = Py_NewRef(self->owner);
    op->plan = Py_NewRef(plan);
    op->name = Py_NewRef(plan->name);
    op->submitted_ns = ao_now_ns();
    op->instant = 1; /* or it fails */
    return op;
}

static int enqueue(AoQueue *lane, AoPlan *plan, PyObject *prepared, AoOperation *op) {
    uint64_t mark = op->coarse ? 0 : lane->issued + 1;
    if (Py_IS_TYPE(lane->stream, &AoCudaStream_Type)) return ao_cuda_enqueue_kernel(lane->stream, plan, prepared, mark);
    PyObject *sequence = PyLong_FromUnsignedLongLong(mark);
    if (!sequence) return -1;
    PyObject *args[] = {lane->stream, (PyObject *)plan, prepared, (PyObject *)op, sequence};
    PyObject *ignored = PyObject_VectorcallMethod(s_enqueue_kernel, args, 5, NULL);
    Py_DECREF(sequence);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

static int report(Launcher *self, AoOperation *op) {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    PyObject *ignored = PyObject_CallFunctionObjArgs(self->on_error, (PyObject *)op, value, NULL);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(traceback);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

/* Borrowed, or NULL if it is none that takes any launch. */
static AoQueue *queue_of(const AoBoard *board, PyObject *lane) {
    for (Py_ssize_t i = 0; i < board->open; i++)
        if (ao_board_lane(board, i)->lane == lane) return ao_board_lane(board, i);
    return NULL;
}

/* The lane to go to at once, borrowed; NULL: not for this path. `lane` and `deps` may be NULL. */
static AoQueue *choose(const Launcher *self, const AoPlan *plan, const Buffers *buffers, PyObject *lane, PyObject *deps) {
    AoBoard *board = self->board;
    AoQueue *home = NULL;
    if (lane && !(home = queue_of(board, lane))) return NULL;
    for (int i = 0; self->ordered && i < buffers->count; i++)
        if (!ao_history_home(buffers->histories[i], buffers->writes[i], &home)) return NULL;
    if (home && !lane && (!home->open || home->reserved)) return NULL; /* nothing goes there that does not name it */
    if (!home && deps) home = ao_board_lane(board, ao_board_pick_after(board, 0, board->open, deps));
    if (!home) home = ao_board_lane(board, ao_board_pick(board, 0, board->open, plan));
    return home->board == board && home->in_flight < home->depth && home->stream ? home : NULL;
}

/* Whether anything may go straight to the device. */
static int takes(const Launcher *self) {
    return self->ready && self->board->open && !self->board->pending && !self->board->paused;
}

static int make_uses(const Launcher *self, AoOperation *op, const Buffers *buffers) {
    for (int i = 0; self->ordered && i < buffers->count; i++)
        if (!ao_use_new(op)) return -1;
    return 0;
}

/* The operation was submitted, and is what its buffers' later ones come after. */
static void record(const Buffers *buffers, const AoOperation *op) {
    AoUse *use = op->uses; /* none if it is finished, or nothing is ordered */
    for (int i = 0; use && i < buffers->count; i++, use = use->sibling)
        ao_history_record(buffers->histories[i], use, buffers->writes[i]);
}

/* Enqueues and pushes; -1 with an exception. A refusal of the driver is the engine's, which may push it all the same. */
static int send(Launcher *self, AoQueue *lane, AoPlan *plan, PyObject *prepared, AoOperation *op) {
    self->board->paused++; /* waits are enqueued by Python code: whatever that submits comes later */
    int status = enqueue_waits(lane, op->deps);
    self->board->paused--;
    if (status < 0 || enqueue(lane, plan, prepared, op) < 0) return report(self, op);
    ao_queue_push(lane, op, op->submitted_ns);
    Py_CLEAR(op->deps);
    if (!lane->precise) return 0;
    PyObject *ignored = PyObject_CallMethodNoArgs(lane->lane, s_enqueue_position);
    Py_XDECREF(ignored);
    return ignored ? 0 : -1;
}

static PyObject *submit(Launcher *self, AoPlan *plan, PyObject *prepared, Buffers *buffers, PyObject *lane, Before *before,
                        int coarse) {
    AoOperation *op = new_operation(self, plan);
    if (!op || make_uses(self, op, buffers) < 0) goto failed;
    op->keep = buffers->keep;
    buffers->keep = NULL;
    op->coarse = (char)coarse;
    op->requires = before->requires;
    op->deps = before->deps;
    before->requires = before->deps = NULL;
    /* From here until it is recorded nothing may run that submits: all that is needed is made. */
    AoQueue *queue = takes(self) ? choose(self, plan, buffers, lane, op->deps) : NULL;
    if (!queue) {
        Py_DECREF(op);
        Py_RETURN_NONE;
    }
    op->lane = Py_NewRef(queue->lane);
    if (send(self, queue, plan, prepared, op) < 0) goto failed;
    record(buffers, op);
    if (!self->board->watched && op->queue) {
        PyObject *ignored = PyObject_CallNoArgs(self->notice);
        if (!ignored) goto failed;
        Py_DECREF(ignored);
    }
    return (PyObject *)op;
failed:
    Py_XDECREF(op);
    return NULL;
}

PyObject *ao_launcher_go(PyObject *launcher, PyObject *site, PyObject *arguments, PyObject *prepared, PyObject *lane,
                         PyObject *after, int coarse) {
    Launcher *self = (Launcher *)launcher;
    Buffers buffers;
    buffers.count = 0;
    buffers.keep = NULL;
    Before before = {NULL, NULL};
    PyObject *result = NULL, *block = NULL;
    int status = find_before(self, after, &before);
    if (status > 0) status = find_buffers(self, site, arguments, &buffers);
    if (status > 0) block = prepared ? Py_NewRef(prepared) : prepare(self, site, arguments);
    if (status == 0 || block == Py_None) result = Py_NewRef(Py_None);
    else if (block) result = submit(self, (AoPlan *)PyTuple_GET_ITEM(site, AO_SITE_PLAN), block, &buffers, lane, &before, coarse);
    Py_XDECREF(block);
    release_buffers(&buffers);
    release_before(&before);
    return result;
}

int ao_launcher_may(PyObject *launcher) {
    const Launcher *self = (const Launcher *)launcher;
    if (!takes(self)) return 0;
    PyObject *running = ao_running_loop();
    Py_XDECREF(running); /* only its identity matters */
    return running ? running == self->loop : -1;
}

/* launch(kernel, grid, block, args[, after]) -> Operation, or None: not for this path, nothing was done. */
static PyObject *launcher_launch(Launcher *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 && nargs != 5) return PyErr_Format(PyExc_TypeError, "launch(kernel, grid, block, args[, after])");
    int may = PyTuple_CheckExact(args[3]) ? ao_launcher_may((PyObject *)self) : 0;
    PyObject *site = may > 0 ? find_site(self, args[0], args[1], args[2]) : NULL;
    if (!site) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    Py_INCREF(site); /* what runs meanwhile may replace it */
    PyObject *result = ao_launcher_go((PyObject *)self, site, args[3], NULL, NULL, nargs == 5 ? args[4] : NULL, 0);
    Py_DECREF(site);
    return result;
}

static PyMethodDef launcher_methods[] = {
    {"launch", (PyCFunction)(void (*)(void))launcher_launch, METH_FASTCALL, "Launch, or return None."},
    {"learn", (PyCFunction)launcher_learn, METH_VARARGS, "Take a kernel in one geometry."},
    {"forget", (PyCFunction)launcher_forget, METH_NOARGS, "Forget every geometry."},
    {NULL, NULL, 0, NULL},
};
static PyMemberDef launcher_members[] = {
    {"ready", T_BOOL, offsetof(Launcher, ready), 0, NULL},
    {"ordered", T_BOOL, offsetof(Launcher, ordered), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};
PyTypeObject AoLauncher_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.Launcher",
    .tp_doc = "The launch path of one Offload.",
    .tp_basicsize = sizeof(Launcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = launcher_new,
    .tp_dealloc = (destructor)launcher_dealloc,
    .tp_traverse = (traverseproc)launcher_traverse,
    .tp_clear = (inquiry)launcher_clear,
    .tp_methods = launcher_methods,
    .tp_members = launcher_members,
};
