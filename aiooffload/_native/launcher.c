/* The launch path: from `off.launch(kernel, grid=..., block=..., args=...)` to the driver.
 *
 * It takes the plain launches: a kernel that was launched in this geometry before, scalar
 * arguments only, nothing waiting on the host, and a lane with room. For everything else launch()
 * returns None and Python does it, by the same steps with the same outcome (engine/lanes.py).
 * What it saves is the interpretation of those steps, which costs more than the driver's part.
 */
#include "native.h"

typedef struct {
    PyObject_HEAD
    AoBoard *board;
    PyObject *loop, *owner;
    PyTypeObject *operation_type; /* a subclass of AoOperation_Type */
    PyObject *notice;         /* called after a push while nobody watches the board */
    PyObject *on_error;       /* called with (operation, exception) if the driver refused it */
    PyObject *sites;          /* dict: (kernel, grid, block) -> site, a tuple (plan, formats, prepared without arguments) */
    char ready;               /* open, and marks are words: kept by the engine */
} Launcher;

static PyObject *s_enqueue_kernel;

static int launcher_clear(Launcher *self) {
    Py_CLEAR(self->board);
    Py_CLEAR(self->loop);
    Py_CLEAR(self->owner);
    Py_CLEAR(self->operation_type);
    Py_CLEAR(self->notice);
    Py_CLEAR(self->on_error);
    Py_CLEAR(self->sites);
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
    return 0;
}

static void launcher_dealloc(Launcher *self) {
    PyObject_GC_UnTrack(self);
    launcher_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"board", "loop", "owner", "operation_type", "notice", "on_error", NULL};
    PyObject *board, *loop, *owner, *operation_type, *notice, *on_error;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OOO!OO:Launcher", names, &AoBoard_Type, &board, &loop, &owner,
                                     &PyType_Type, &operation_type, &notice, &on_error))
        return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)operation_type, &AoOperation_Type)) {
        PyErr_SetString(PyExc_TypeError, "operation_type is a subclass of Operation");
        return NULL;
    }
    if (!s_enqueue_kernel && !(s_enqueue_kernel = PyUnicode_InternFromString("enqueue_kernel"))) return NULL;
    Launcher *self = (Launcher *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->board = (AoBoard *)Py_NewRef(board);
    self->loop = Py_NewRef(loop);
    self->owner = Py_NewRef(owner);
    self->operation_type = (PyTypeObject *)Py_NewRef(operation_type);
    self->notice = Py_NewRef(notice);
    self->on_error = Py_NewRef(on_error);
    if (!(self->sites = PyDict_New())) Py_CLEAR(self);
    return (PyObject *)self;
}

/* Borrowed reference, or NULL with or without an exception. */
static PyObject *find_site(Launcher *self, PyObject *kernel, PyObject *grid, PyObject *block) {
    PyObject *key = PyTuple_Pack(3, kernel, grid, block);
    PyObject *site = key ? PyDict_GetItemWithError(self->sites, key) : NULL;
    Py_XDECREF(key);
    if (!site && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError)) PyErr_Clear(); /* a list as grid: not for this path */
    return site;
}

/* learn(kernel, grid, block, plan, formats, prepared): from now on launch() knows this geometry. */
static PyObject *launcher_learn(Launcher *self, PyObject *args) {
    PyObject *kernel, *grid, *block, *plan, *formats, *prepared;
    if (!PyArg_ParseTuple(args, "OOOO!OO:learn", &kernel, &grid, &block, &AoPlan_Type, &plan, &formats, &prepared))
        return NULL;
    PyObject *key = PyTuple_Pack(3, kernel, grid, block), *site = PyTuple_Pack(3, plan, formats, prepared);
    int status = key && site ? PyDict_SetItem(self->sites, key, site) : -1;
    Py_XDECREF(key);
    Py_XDECREF(site);
    if (status < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *launcher_forget(Launcher *self, PyObject *Py_UNUSED(ignored)) {
    PyDict_Clear(self->sites);
    Py_RETURN_NONE;
}

/* New reference; None: not for this path. */
static PyObject *prepare(PyObject *site, PyObject *arguments) {
    PyObject *formats = PyTuple_GET_ITEM(site, 1);
    if (PyTuple_GET_SIZE(arguments) == 0) return Py_NewRef(PyTuple_GET_ITEM(site, 2));
    if (!PyBytes_Check(formats) || memchr(PyBytes_AS_STRING(formats), 'P', (size_t)PyBytes_GET_SIZE(formats)))
        Py_RETURN_NONE; /* buffers have to be ordered, which Python does */
    return ao_pack_arguments(PyBytes_AS_STRING(formats), PyBytes_GET_SIZE(formats), arguments);
}

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
    if (Py_IS_TYPE(lane->stream, &AoCudaStream_Type))
        return ao_cuda_enqueue_kernel(lane->stream, plan, prepared, lane->issued + 1);
    PyObject *sequence = PyLong_FromUnsignedLongLong(lane->issued + 1);
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

static PyObject *submit(Launcher *self, PyObject *site, PyObject *prepared, AoQueue *lane) {
    AoPlan *plan = (AoPlan *)PyTuple_GET_ITEM(site, 0);
    AoOperation *op = new_operation(self, plan);
    if (!op) return NULL;
    op->lane = Py_NewRef(lane->lane);
    if (enqueue(lane, plan, prepared, op) < 0) {
        if (report(self, op) < 0) Py_CLEAR(op);
        return (PyObject *)op;
    }
    ao_queue_push(lane, op, op->submitted_ns);
    if (!self->board->watched) {
        PyObject *ignored = PyObject_CallNoArgs(self->notice);
        if (!ignored) Py_CLEAR(op);
        Py_XDECREF(ignored);
    }
    return (PyObject *)op;
}

/* launch(kernel, grid, block, args) -> Operation, or None: not for this path, nothing was done. */
static PyObject *launcher_launch(Launcher *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "launch(kernel, grid, block, args)");
    if (!self->ready || !self->board->open || self->board->pending || self->board->paused || !PyTuple_CheckExact(args[3])) Py_RETURN_NONE;
    PyObject *running = ao_running_loop();
    if (!running) return NULL;
    Py_DECREF(running); /* only its identity matters */
    if (running != self->loop) Py_RETURN_NONE;
    PyObject *site = find_site(self, args[0], args[1], args[2]);
    if (!site) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    AoPlan *plan = (AoPlan *)PyTuple_GET_ITEM(site, 0);
    AoQueue *lane = ao_board_lane(self->board, ao_board_pick(self->board, 0, self->board->open, plan));
    if (lane->in_flight == lane->depth || !lane->stream) Py_RETURN_NONE;
    Py_INCREF(site); /* enqueuing may run other code, which may replace it */
    PyObject *prepared = prepare(site, args[3]), *result = NULL;
    if (prepared) result = prepared == Py_None ? Py_NewRef(Py_None) : submit(self, site, prepared, lane);
    Py_XDECREF(prepared);
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
