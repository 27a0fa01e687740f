/* The launch path on a GPU: streams and events by the driver's own entry points.
 *
 * Everything here releases the interpreter around the driver. A callback of somebody else's
 * that takes the interpreter (Python callbacks through cuLaunchHostFunc do) could otherwise hold
 * a lock of the driver while it waits for the thread that waits for the driver.
 *
 * No context is made current, but for copies and for the default streams: a call on a stream takes the
 * stream's (measured on driver 580 with no context, and with another one, current), and making one
 * current twice per launch would cost more than the rest of this file. With the context of another GPU
 * current, copies alone fail; a default stream is that of the current context. Calls that a capturing
 * thread must not make run with its capture mode relaxed. Both leave the caller's thread as it was found.
 *
 * The wake is `wake_by_eventfd` below: it runs on a thread of the driver's, at an unknown time,
 * possibly while any other thread holds the interpreter or any lock. One write(2), of the time, is all it does.
 * cuda-bindings before 13.5 wrap the pointer given to cuLaunchHostFunc in a function that takes
 * the interpreter; that is why the entry point is resolved here.
 */
#include "native.h"

#include <dlfcn.h>
#include <unistd.h>

/* CUDA_MEMCPY2D_v2: rows of `width` bytes. Where the memory is, the driver finds out from the address. */
typedef struct {
    size_t x, y;
    unsigned memory_type;
    const void *host;         /* unused, as `array` is */
    uint64_t address;
    void *array;
    size_t pitch;             /* bytes from one row to the next */
} plane;
typedef struct {
    plane source, destination;
    size_t width, height;
} memcpy_2d;

/* CUDA_MEMCPY3D_v2: slices of such rows; and CUDA_MEMCPY3D_PEER, which differs in one field. */
typedef struct {
    size_t x, y, z, level;
    unsigned memory_type;
    const void *host;         /* unused, as `array` is */
    uint64_t address;
    void *array;              /* NULL */
    void *context;            /* of a peer copy; reserved otherwise */
    size_t pitch, rows;       /* `rows` of `pitch` bytes from one slice to the next */
} volume;
typedef struct {
    volume source, destination;
    size_t width, height, depth;
} memcpy_3d;

_Static_assert(sizeof(memcpy_2d) == 128 && sizeof(memcpy_3d) == 200, "the driver's layout of its copy parameters");

enum { MEMORY_DEVICE = 2, MEMORY_UNIFIED = 4 };

/* X(return type is CUresult) name in the struct, exported symbol, parameters */
#define ENTRY_POINTS(X)                                                                                                \
    X(ctx_push, "cuCtxPushCurrent_v2", (void *))                                                                       \
    X(ctx_pop, "cuCtxPopCurrent_v2", (void **))                                                                        \
    X(capture_mode, "cuThreadExchangeStreamCaptureMode", (int *))                                                      \
    X(launch, "cuLaunchKernel",                                                                                        \
      (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))        \
    X(launch_ex, "cuLaunchKernelEx", (const void *, void *, void **, void **))                                         \
    X(batch_memop, "cuStreamBatchMemOp_v2", (void *, unsigned, void *, unsigned))                                      \
    X(wait_value, "cuStreamWaitValue64_v2", (void *, uint64_t, uint64_t, unsigned))                                    \
    X(write_value, "cuStreamWriteValue64_v2", (void *, uint64_t, uint64_t, unsigned))                                  \
    X(host_func, "cuLaunchHostFunc", (void *, void (*)(void *), void *))                                               \
    X(memcpy_async, "cuMemcpyAsync", (uint64_t, uint64_t, size_t, void *))                                             \
    X(memcpy_2d_async, "cuMemcpy2DAsync_v2", (const memcpy_2d *, void *))                                              \
    X(memcpy_3d_async, "cuMemcpy3DAsync_v2", (const memcpy_3d *, void *))                                              \
    X(memcpy_peer_async, "cuMemcpyPeerAsync", (uint64_t, void *, uint64_t, void *, size_t, void *))                    \
    X(memcpy_3d_peer_async, "cuMemcpy3DPeerAsync", (const memcpy_3d *, void *))                                        \
    X(memset_d8, "cuMemsetD8Async", (uint64_t, unsigned char, size_t, void *))                                         \
    X(memset_d16, "cuMemsetD16Async", (uint64_t, unsigned short, size_t, void *))                                      \
    X(memset_d32, "cuMemsetD32Async", (uint64_t, unsigned, size_t, void *))                                            \
    X(memset_2d32, "cuMemsetD2D32Async", (uint64_t, size_t, unsigned, size_t, size_t, void *))                         \
    X(event_create, "cuEventCreate", (void **, unsigned))                                                              \
    X(event_record, "cuEventRecord", (void *, void *))                                                                 \
    X(event_query, "cuEventQuery", (void *))                                                                           \
    X(event_elapsed, "cuEventElapsedTime", (float *, void *, void *))                                                  \
    X(event_destroy, "cuEventDestroy_v2", (void *))                                                                    \
    X(stream_wait_event, "cuStreamWaitEvent", (void *, void *, unsigned))                                              \
    X(stream_query, "cuStreamQuery", (void *))                                                                         \
    X(stream_is_capturing, "cuStreamIsCapturing", (void *, int *))                                                     \
    X(stream_destroy, "cuStreamDestroy_v2", (void *))

#define DECLARE(name, symbol, parameters) int(*name) parameters;
static struct { ENTRY_POINTS(DECLARE) } cu; /* all set once cuda_initialise() returned */
#undef DECLARE

static PyObject *make_error; /* (entry point: str, status: int) -> exception; set with cu */

enum { INVALID_VALUE = 1, NOT_READY = 600, CAPTURE_IMPLICIT = 906, EVENT_DISABLE_TIMING = 2, WAIT_GEQ = 0, CAPTURE_RELAXED = 2 };
enum { LEGACY_STREAM = 1, PER_THREAD_STREAM = 2 }; /* handles of the default streams */

/* CUstreamBatchMemOpParams, the writeValue member; the union is 48 bytes. */
typedef union {
    struct {
        uint32_t operation;   /* 5: 64-bit write */
        uint64_t address, value;
        uint32_t flags;       /* 0: earlier writes of the stream are visible first */
        uint64_t alias;
    } write;
    uint64_t size[6];
} memop;

/* CUlaunchConfig and its attributes, for clusters and cooperative launches. */
typedef struct {
    unsigned id;
    char pad[4];
    union {
        char size[64];
        unsigned cluster[3];
        int cooperative;
    } value;
} launch_attribute;
typedef struct {
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
    launch_attribute *attributes;
    unsigned count;
} launch_config;
enum { ATTRIBUTE_COOPERATIVE = 2, ATTRIBUTE_CLUSTER = 4 };

/* cuda_initialise(make_error): resolve the driver's entry points; RuntimeError names one that is missing. */
PyObject *ao_cuda_initialise(PyObject *Py_UNUSED(module), PyObject *error) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL); /* kept for the life of the process */
    if (!library) return PyErr_Format(PyExc_RuntimeError, "libcuda.so.1: %s", dlerror());
#define RESOLVE(name, symbol, parameters)                                                                              \
    *(void **)(&cu.name) = dlsym(library, symbol);                                                                     \
    if (!cu.name) return PyErr_Format(PyExc_RuntimeError, "the CUDA driver has no %s", symbol);
    ENTRY_POINTS(RESOLVE)
#undef RESOLVE
    Py_XSETREF(make_error, Py_NewRef(error));
    Py_RETURN_NONE;
}

static PyObject *fail(const char *entry_point, int status) {
    PyObject *error = PyObject_CallFunction(make_error, "si", entry_point, status);
    if (!error) return NULL;
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
    Py_DECREF(error);
    return NULL;
}

static PyObject *none_or_fail(const char *entry_point, int status) {
    if (status) return fail(entry_point, status);
    Py_RETURN_NONE;
}

/* Runs CALL without the interpreter and leaves its CUresult in `status`. */
#define WITHOUT_INTERPRETER(CALL)                                                                                      \
    Py_BEGIN_ALLOW_THREADS;                                                                                            \
    status = CALL;                                                                                                     \
    Py_END_ALLOW_THREADS

/* The same for what a thread that captures a stream must not call. */
#define RELAXED(CALL)                                                                                                  \
    Py_BEGIN_ALLOW_THREADS;                                                                                            \
    int mode_ = CAPTURE_RELAXED;                                                                                       \
    cu.capture_mode(&mode_);                                                                                           \
    status = CALL;                                                                                                     \
    cu.capture_mode(&mode_);                                                                                           \
    Py_END_ALLOW_THREADS

static PyObject *query_result(const char *entry_point, int status) {
    if (status && status != NOT_READY) return fail(entry_point, status);
    return PyBool_FromLong(status == 0);
}

/* ---- events ---- */

typedef struct {
    PyObject_HEAD
    void *event;              /* NULL once closed */
    void *context;            /* the event's */
} CudaEvent;

/* An event belongs to the context that is current, so this one call needs ours. */
static int create_event(void *context, int timed, void **event) {
    void *ignored;
    int status = cu.ctx_push(context);
    if (status) return status;
    status = cu.event_create(event, timed ? 0 : EVENT_DISABLE_TIMING);
    cu.ctx_pop(&ignored);
    return status;
}

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"context", "timed", NULL};
    unsigned long long context;
    int status, timed = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K|p:CudaEvent", names, &context, &timed)) return NULL;
    if (!make_error) return PyErr_Format(PyExc_RuntimeError, "cuda_initialise() was not called");
    CudaEvent *self = (CudaEvent *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->context = (void *)(uintptr_t)context;
    RELAXED(create_event(self->context, timed, &self->event));
    if (status) {
        self->event = NULL;
        Py_DECREF(self);
        return fail("cuEventCreate", status);
    }
    ao_open_events++;
    return (PyObject *)self;
}

static PyObject *event_query(CudaEvent *self, PyObject *Py_UNUSED(ignored)) {
    int status;
    RELAXED(cu.event_query(self->event));
    return query_result("cuEventQuery", status);
}

static CudaEvent *as_event(PyObject *value) {
    if (!PyObject_TypeCheck(value, &AoCudaEvent_Type) || !((CudaEvent *)value)->event) {
        PyErr_SetString(PyExc_TypeError, "not an open CudaEvent");
        return NULL;
    }
    return (CudaEvent *)value;
}

/* In the events' context: of the calls on events this one alone was not tried without. */
static int elapsed(const CudaEvent *self, const CudaEvent *since, float *milliseconds) {
    void *ignored;
    int status = cu.ctx_push(self->context);
    if (status) return status;
    status = cu.event_elapsed(milliseconds, since->event, self->event);
    cu.ctx_pop(&ignored);
    return status;
}

/* The driver gives milliseconds as a float: exact to half a microsecond within seconds, and worse beyond. */
static PyObject *event_elapsed_ns(CudaEvent *self, PyObject *value) {
    CudaEvent *since = as_event(value);
    float milliseconds = 0;
    int status;
    if (!since || !as_event((PyObject *)self)) return NULL;
    RELAXED(elapsed(self, since, &milliseconds));
    if (status) return fail("cuEventElapsedTime", status);
    return PyLong_FromLongLong((long long)((double)milliseconds * 1e6 + (milliseconds < 0 ? -0.5 : 0.5)));
}

static PyObject *event_close(CudaEvent *self, PyObject *Py_UNUSED(ignored)) {
    int status = 0;
    if (self->event) {
        ao_open_events--;
        WITHOUT_INTERPRETER(cu.event_destroy(self->event));
    }
    self->event = NULL;
    return none_or_fail("cuEventDestroy", status);
}

/* A handle that nobody closed goes with the process: after a fault no driver call is allowed. */
static void event_dealloc(CudaEvent *self) {
    if (self->event) ao_open_events--;
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *event_handle(CudaEvent *self, void *Py_UNUSED(c)) {
    return PyLong_FromUnsignedLongLong((uintptr_t)self->event);
}

static PyMethodDef event_methods[] = {
    {"query", (PyCFunction)event_query, METH_NOARGS, "Whether the work before the last record is done."},
    {"elapsed_ns", (PyCFunction)event_elapsed_ns, METH_O, "Nanoseconds on the device since another one; both timed."},
    {"close", (PyCFunction)event_close, METH_NOARGS, "Destroy it; idempotent."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef event_getset[] = {
    {"handle", (getter)event_handle, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
PyTypeObject AoCudaEvent_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.CudaEvent",
    .tp_basicsize = sizeof(CudaEvent),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = event_new,
    .tp_dealloc = (destructor)event_dealloc,
    .tp_methods = event_methods,
    .tp_getset = event_getset,
};

/* ---- streams ---- */

typedef struct {
    PyObject_HEAD
    void *stream;             /* NULL once closed */
    void *context;            /* the stream's */
    char owned;               /* close() destroys it */
    char is_default;          /* it is the current context's, whichever that is */
    memop marks[2];           /* slot then bell: a reader that sees the bell sees the slot */
    PyObject *slot, *bell;    /* keep the words alive; NULL until bind_marks() */
} CudaStream;

static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"handle", "context", "owned", NULL};
    unsigned long long handle, context;
    int owned = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KK|p:CudaStream", names, &handle, &context, &owned)) return NULL;
    if (!make_error) return PyErr_Format(PyExc_RuntimeError, "cuda_initialise() was not called");
    CudaStream *self = (CudaStream *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->stream = (void *)(uintptr_t)handle;
    self->context = (void *)(uintptr_t)context;
    self->owned = (char)owned;
    if (handle && owned) ao_open_streams++;
    self->is_default = handle == LEGACY_STREAM || handle == PER_THREAD_STREAM;
    return (PyObject *)self;
}

/* A pair around calls on the stream, which may be the current context's. */
static int enter(const CudaStream *self) { return self->is_default ? cu.ctx_push(self->context) : 0; }
static void leave(const CudaStream *self) {
    void *ours;
    if (self->is_default) cu.ctx_pop(&ours);
}

/* Runs CALL on the stream `self` without the interpreter and leaves its CUresult in `status`. */
#define ON_STREAM(CALL)                                                                                                \
    Py_BEGIN_ALLOW_THREADS;                                                                                            \
    status = enter(self);                                                                                              \
    if (!status) {                                                                                                     \
        status = CALL;                                                                                                 \
        leave(self);                                                                                                   \
    }                                                                                                                  \
    Py_END_ALLOW_THREADS

/* A closed stream's handle is NULL, which the driver takes for the legacy default stream. */
static int is_closed(const CudaStream *self) {
    if (!self->stream) PyErr_SetString(PyExc_RuntimeError, "the stream is closed");
    return !self->stream;
}

static PyObject *stream_bind_marks(CudaStream *self, PyObject *args) {
    PyObject *slot, *bell;
    if (!PyArg_ParseTuple(args, "O!O!:bind_marks", &AoWord_Type, &slot, &AoWord_Type, &bell)) return NULL;
    Py_XSETREF(self->slot, Py_NewRef(slot));
    Py_XSETREF(self->bell, Py_NewRef(bell));
    memset(self->marks, 0, sizeof self->marks);
    self->marks[0].write.operation = self->marks[1].write.operation = 5;
    self->marks[0].write.address = ((AoWord *)slot)->device;
    self->marks[1].write.address = ((AoWord *)bell)->device;
    self->marks[1].write.value = 1;
    Py_RETURN_NONE;
}

/* The interpreter is released; `sequence` goes into the slot, 1 into the bell. */
static int mark(CudaStream *self, uint64_t sequence) {
    memop marks[2] = {self->marks[0], self->marks[1]};
    marks[0].write.value = sequence;
    return cu.batch_memop(self->stream, 2, marks, 0);
}

static int launch_with_attributes(CudaStream *self, AoPlan *plan, void **parameters) {
    launch_attribute attributes[2];
    launch_config config = {.shared_bytes = plan->shared_bytes, .stream = self->stream, .attributes = attributes};
    memset(attributes, 0, sizeof attributes);
    memcpy(config.grid, plan->grid, sizeof config.grid);
    memcpy(config.block, plan->block, sizeof config.block);
    if (plan->cluster[0]) {
        attributes[config.count].id = ATTRIBUTE_CLUSTER;
        memcpy(attributes[config.count++].value.cluster, plan->cluster, sizeof plan->cluster);
    }
    if (plan->cooperative) {
        attributes[config.count].id = ATTRIBUTE_COOPERATIVE;
        attributes[config.count++].value.cooperative = 1;
    }
    return cu.launch_ex(&config, plan->function, parameters, NULL);
}

static int launch(CudaStream *self, AoPlan *plan, void **parameters) {
    if (plan->cooperative || plan->cluster[0]) return launch_with_attributes(self, plan, parameters);
    return cu.launch(plan->function, plan->grid[0], plan->grid[1], plan->grid[2], plan->block[0], plan->block[1],
                     plan->block[2], plan->shared_bytes, self->stream, parameters, NULL);
}

/* The launch's status; that of its mark goes into `marked`. */
static int launch_marked(CudaStream *self, AoPlan *plan, void **parameters, uint64_t sequence, int *marked) {
    int status = launch(self, plan, parameters);
    if (!status && sequence) *marked = mark(self, sequence);
    return status;
}

/* Points parameters[i] into a block made by pack(); -1 with an exception if it is not one. */
static int unpack(PyObject *prepared, void **parameters, uint32_t capacity) {
    if (!PyBytes_Check(prepared)) {
        PyErr_SetString(PyExc_TypeError, "a CUDA launch takes packed parameters");
        return -1;
    }
    char *block = PyBytes_AS_STRING(prepared);
    Py_ssize_t size = PyBytes_GET_SIZE(prepared);
    uint32_t count = size >= 4 ? ((uint32_t *)block)[0] : 0;
    if (count > capacity || (count && (Py_ssize_t)(4 + 4 * count) > size)) {
        PyErr_SetString(PyExc_ValueError, "malformed parameter block");
        return -1;
    }
    for (uint32_t i = 0; i < count; i++) parameters[i] = block + ((uint32_t *)block)[1 + i];
    return 0;
}

#define MAX_PARAMETERS 512

int ao_cuda_enqueue_kernel(PyObject *stream, AoPlan *plan, PyObject *prepared, uint64_t sequence) {
    CudaStream *self = (CudaStream *)stream;
    void *parameters[MAX_PARAMETERS];
    int status, marked = 0;
    if (is_closed(self) || unpack(prepared, parameters, MAX_PARAMETERS) < 0) return -1;
    ON_STREAM(launch_marked(self, plan, parameters, sequence, &marked));
    if (status) fail(plan->cooperative || plan->cluster[0] ? "cuLaunchKernelEx" : "cuLaunchKernel", status);
    else if (marked) fail("cuStreamBatchMemOp", marked);
    return status || marked ? -1 : 0;
}

static PyObject *stream_enqueue_kernel(CudaStream *self, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyObject_TypeCheck(args[0], &AoPlan_Type)) {
        PyErr_SetString(PyExc_TypeError, "enqueue_kernel(plan, prepared, operation, sequence)");
        return NULL;
    }
    uint64_t sequence = PyLong_AsUnsignedLongLong(args[3]);
    if (PyErr_Occurred()) return NULL;
    if (ao_cuda_enqueue_kernel((PyObject *)self, (AoPlan *)args[0], args[1], sequence) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *stream_enqueue_mark(CudaStream *self, PyObject *value) {
    uint64_t sequence = PyLong_AsUnsignedLongLong(value);
    int status;
    if (PyErr_Occurred() || is_closed(self)) return NULL;
    ON_STREAM(mark(self, sequence));
    return none_or_fail("cuStreamBatchMemOp", status);
}

static PyObject *stream_enqueue_write(CudaStream *self, PyObject *args) {
    AoWord *word;
    unsigned long long value;
    int status;
    if (!PyArg_ParseTuple(args, "O!K:enqueue_write", &AoWord_Type, &word, &value) || is_closed(self)) return NULL;
    ON_STREAM(cu.write_value(self->stream, word->device, value, 0));
    return none_or_fail("cuStreamWriteValue64", status);
}

static PyObject *stream_enqueue_wait(CudaStream *self, PyObject *args) {
    AoWord *word;
    unsigned long long value;
    int status;
    if (!PyArg_ParseTuple(args, "O!K:enqueue_wait", &AoWord_Type, &word, &value) || is_closed(self)) return NULL;
    ON_STREAM(cu.wait_value(self->stream, word->device, value, WAIT_GEQ));
    return none_or_fail("cuStreamWaitValue64", status);
}

static void wake_by_eventfd(void *descriptor) {
    uint64_t now = (uint64_t)ao_now_ns();
    ssize_t ignored = write((int)(intptr_t)descriptor, &now, sizeof now); /* fails only when full, which wakes too */
    (void)ignored;
}

static PyObject *stream_enqueue_wake(CudaStream *self, PyObject *value) {
    long descriptor = PyLong_AsLong(value);
    int status;
    if ((descriptor == -1 && PyErr_Occurred()) || is_closed(self)) return NULL;
    ON_STREAM(cu.host_func(self->stream, wake_by_eventfd, (void *)(intptr_t)descriptor));
    return none_or_fail("cuLaunchHostFunc", status);
}

/* The contexts of a copy between two devices, which the driver takes through the host where they do not reach each
 * other; NULL for one within a device, or between it and the host. */
typedef struct {
    unsigned long long destination, source;
} peers;

/* A copy looks its addresses up in the current context, whatever its stream's is. */
static int copy(const CudaStream *self, uint64_t destination, uint64_t source, size_t nbytes, const peers *p) {
    void *ours, *to = (void *)(uintptr_t)p->destination, *from = (void *)(uintptr_t)p->source;
    int status = cu.ctx_push(self->context);
    if (status) return status;
    status = to ? cu.memcpy_peer_async(destination, to, source, from, nbytes, self->stream)
                : cu.memcpy_async(destination, source, nbytes, self->stream);
    cu.ctx_pop(&ours);
    return status;
}

static PyObject *stream_enqueue_copy(CudaStream *self, PyObject *args) {
    unsigned long long destination, source, nbytes;
    peers p = {0, 0};
    int status = 0;
    if (!PyArg_ParseTuple(args, "KKK|KK:enqueue_copy", &destination, &source, &nbytes, &p.destination, &p.source) ||
        is_closed(self))
        return NULL;
    if (nbytes) WITHOUT_INTERPRETER(copy(self, destination, source, nbytes, &p));
    return none_or_fail(p.destination ? "cuMemcpyPeerAsync" : "cuMemcpyAsync", status);
}

/* Pitches and slices are distances in bytes; a slice is a multiple of the pitch (the planner sees to it). */
typedef struct {
    unsigned long long destination, source, width, height, depth, destination_pitch, source_pitch, destination_slice,
        source_slice;
    peers devices;
} box;

static int copy_2d(const CudaStream *self, const box *b) {
    memcpy_2d copy = {
        .source = {.memory_type = MEMORY_UNIFIED, .address = b->source, .pitch = b->source_pitch},
        .destination = {.memory_type = MEMORY_UNIFIED, .address = b->destination, .pitch = b->destination_pitch},
        .width = b->width,
        .height = b->height,
    };
    return cu.memcpy_2d_async(&copy, self->stream);
}

static int copy_3d(const CudaStream *self, const box *b) {
    const unsigned type = b->devices.destination ? MEMORY_DEVICE : MEMORY_UNIFIED;
    memcpy_3d copy = {
        .source = {.memory_type = type, .address = b->source, .pitch = b->source_pitch, .rows = b->height},
        .destination = {.memory_type = type, .address = b->destination, .pitch = b->destination_pitch,
                        .rows = b->height},
        .width = b->width,
        .height = b->height,
        .depth = b->depth,
    };
    if (b->depth > 1) { /* slices may be 0 otherwise */
        copy.source.rows = b->source_slice / b->source_pitch;
        copy.destination.rows = b->destination_slice / b->destination_pitch;
    }
    if (!b->devices.destination) return cu.memcpy_3d_async(&copy, self->stream);
    copy.source.context = (void *)(uintptr_t)b->devices.source;
    copy.destination.context = (void *)(uintptr_t)b->devices.destination;
    return cu.memcpy_3d_peer_async(&copy, self->stream);
}

static const char *box_call(const box *b) {
    if (b->devices.destination) return "cuMemcpy3DPeerAsync";
    return b->depth == 1 ? "cuMemcpy2DAsync" : "cuMemcpy3DAsync";
}

/* In the stream's context, as copy() is. The manual lets cuMemcpy2DAsync refuse pitches between two places of
 * device memory that cuMemAllocPitch did not compute, and cuMemcpy3DAsync none. */
static int copy_box(const CudaStream *self, const box *b) {
    const int flat = b->depth == 1 && !b->devices.destination;
    void *ours;
    int status = cu.ctx_push(self->context);
    if (status) return status;
    status = flat ? copy_2d(self, b) : copy_3d(self, b);
    if (status == INVALID_VALUE && flat) status = copy_3d(self, b);
    cu.ctx_pop(&ours);
    return status;
}

/* (destination, source, width, height, depth, then pitches and slices, each of the destination first, then peers) */
static PyObject *stream_enqueue_copy_box(CudaStream *self, PyObject *args) {
    box b = {.devices = {0, 0}};
    int status = 0;
    if (!PyArg_ParseTuple(args, "KKKKKKKKK|KK:enqueue_copy_box", &b.destination, &b.source, &b.width, &b.height,
                          &b.depth, &b.destination_pitch, &b.source_pitch, &b.destination_slice, &b.source_slice,
                          &b.devices.destination, &b.devices.source) ||
        is_closed(self))
        return NULL;
    if (b.depth > 1 && !(b.destination_pitch && b.source_pitch)) {
        PyErr_SetString(PyExc_ValueError, "slices have rows, which are a pitch above 0 apart");
        return NULL;
    }
    if (b.width && b.height && b.depth) WITHOUT_INTERPRETER(copy_box(self, &b));
    return none_or_fail(box_call(&b), status);
}

/* The driver fills with 1, 2 or 4 bytes; longer patterns are one strided fill per 4 bytes. */
static int fill(CudaStream *self, uint64_t address, const char *pattern, size_t width, size_t count) {
    uint32_t part;
    if (width == 1) return cu.memset_d8(address, (unsigned char)pattern[0], count, self->stream);
    if (width == 2) {
        uint16_t half;
        memcpy(&half, pattern, 2);
        return cu.memset_d16(address, half, count, self->stream);
    }
    int uniform = 1;
    for (size_t i = 4; i < width; i += 4) uniform &= memcmp(pattern, pattern + i, 4) == 0;
    memcpy(&part, pattern, 4);
    if (uniform) return cu.memset_d32(address, part, count * (width / 4), self->stream);
    for (size_t i = 0; i < width; i += 4) {
        memcpy(&part, pattern + i, 4);
        int status = cu.memset_2d32(address + i, width, part, 1, count, self->stream);
        if (status) return status;
    }
    return 0;
}

static PyObject *stream_enqueue_fill(CudaStream *self, PyObject *args) {
    unsigned long long address, count;
    const char *pattern;
    Py_ssize_t width;
    int status = 0;
    if (!PyArg_ParseTuple(args, "Ky#K:enqueue_fill", &address, &pattern, &width, &count) || is_closed(self)) return NULL;
    if (width != 1 && width != 2 && width != 4 && width != 8 && width != 16)
        return PyErr_Format(PyExc_ValueError, "a pattern has 1, 2, 4, 8 or 16 bytes, not %zd", width);
    if (count) ON_STREAM(fill(self, address, pattern, (size_t)width, count));
    return none_or_fail("cuMemsetAsync", status);
}

static PyObject *stream_enqueue_record(CudaStream *self, PyObject *value) {
    CudaEvent *event = as_event(value);
    int status;
    if (!event || is_closed(self)) return NULL;
    ON_STREAM(cu.event_record(event->event, self->stream));
    return none_or_fail("cuEventRecord", status);
}

static PyObject *stream_enqueue_wait_event(CudaStream *self, PyObject *value) {
    CudaEvent *event = as_event(value);
    int status;
    if (!event || is_closed(self)) return NULL;
    ON_STREAM(cu.stream_wait_event(self->stream, event->event, 0));
    return none_or_fail("cuStreamWaitEvent", status);
}

static int query(const CudaStream *self) {
    int status = enter(self);
    if (status) return status;
    status = cu.stream_query(self->stream);
    leave(self);
    return status;
}

static PyObject *stream_query(CudaStream *self, PyObject *Py_UNUSED(ignored)) {
    int status;
    if (is_closed(self)) return NULL;
    RELAXED(query(self));
    return query_result("cuStreamQuery", status);
}

static PyObject *stream_capturing(CudaStream *self, PyObject *Py_UNUSED(ignored)) {
    int status, capturing = 0;
    if (is_closed(self)) return NULL;
    ON_STREAM(cu.stream_is_capturing(self->stream, &capturing));
    if (status && status != CAPTURE_IMPLICIT) return fail("cuStreamIsCapturing", status);
    return PyBool_FromLong(status || capturing);
}

static PyObject *stream_close(CudaStream *self, PyObject *Py_UNUSED(ignored)) {
    int status = 0;
    if (self->stream && self->owned) {
        ao_open_streams--;
        WITHOUT_INTERPRETER(cu.stream_destroy(self->stream));
    }
    self->stream = NULL;
    return none_or_fail("cuStreamDestroy", status);
}

static void stream_dealloc(CudaStream *self) {
    if (self->stream && self->owned) ao_open_streams--;
    Py_CLEAR(self->slot);
    Py_CLEAR(self->bell);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *stream_handle(CudaStream *self, void *Py_UNUSED(c)) {
    return PyLong_FromUnsignedLongLong((uintptr_t)self->stream);
}

static PyMethodDef stream_methods[] = {
    {"bind_marks", (PyCFunction)stream_bind_marks, METH_VARARGS, "Name the words that marks write."},
    {"enqueue_kernel", (PyCFunction)(void (*)(void))stream_enqueue_kernel, METH_FASTCALL, "Enqueue a kernel and its mark."},
    {"enqueue_mark", (PyCFunction)stream_enqueue_mark, METH_O, "Enqueue a completion mark."},
    {"enqueue_write", (PyCFunction)stream_enqueue_write, METH_VARARGS, "Store a value in a word in stream order."},
    {"enqueue_wait", (PyCFunction)stream_enqueue_wait, METH_VARARGS, "Hold later work until a word reaches a value."},
    {"enqueue_wake", (PyCFunction)stream_enqueue_wake, METH_O, "Add the time to an eventfd in stream order."},
    {"enqueue_copy", (PyCFunction)stream_enqueue_copy, METH_VARARGS, "Copy between device and registered memory."},
    {"enqueue_copy_box", (PyCFunction)stream_enqueue_copy_box, METH_VARARGS, "Copy rows, or slices of rows."},
    {"enqueue_fill", (PyCFunction)stream_enqueue_fill, METH_VARARGS, "Repeat a pattern."},
    {"enqueue_record", (PyCFunction)stream_enqueue_record, METH_O, "Record an event."},
    {"enqueue_wait_event", (PyCFunction)stream_enqueue_wait_event, METH_O, "Hold later work until an event is done."},
    {"query", (PyCFunction)stream_query, METH_NOARGS, "Whether everything enqueued is done."},
    {"capturing", (PyCFunction)stream_capturing, METH_NOARGS, "Whether what is enqueued would be captured."},
    {"close", (PyCFunction)stream_close, METH_NOARGS, "Destroy it if it is owned; pending work still runs."},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef stream_getset[] = {
    {"handle", (getter)stream_handle, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
PyTypeObject AoCudaStream_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.CudaStream",
    .tp_basicsize = sizeof(CudaStream),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = stream_new,
    .tp_dealloc = (destructor)stream_dealloc,
    .tp_methods = stream_methods,
    .tp_getset = stream_getset,
};
