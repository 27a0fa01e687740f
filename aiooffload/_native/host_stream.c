/* Streams, events and the context lock of the host device: a GPU's ordering rules on threads.
 *
 * A stream is a FIFO of commands and one Python thread (`HostStream.run`) that executes them in
 * order. Only Python kernels need the interpreter; everything else runs without it, so a stream
 * that waits, copies or wakes an eventfd never holds up the program.
 *
 * Lock order: interpreter, then context->lock, stream->mutex, context->state or parking.mutex.
 * No mutex is ever held while the interpreter is taken: at exit such a take never returns.
 */
#include "native.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

enum {
    FIRST_CAPACITY = 64,       /* commands a new stream has room for; a power of two */
    INLINE_BYTES = 16 << 10,   /* copies and fills up to here are cheaper than letting the interpreter go */
    PIECE_BYTES = 256 << 10,   /* longer ones look in between whether the interpreter is going away */
};

#if PY_VERSION_HEX < 0x030D0000
#define Py_IsFinalizing _Py_IsFinalizing
#endif

/* ---- forks: threads do not survive one, so nothing made before it may be used after it ---- */

static unsigned fork_generation; /* how many forks lie between this process and the first import */

/* ---- parking: streams that wait for a word or an event ---- */

typedef struct Waiter {
    const uint64_t *address;   /* stays valid while linked: the waiting command holds its owner */
    uint64_t value;
    int released;              /* goes from 0 to 1 once; a later change of the word does not matter */
    pthread_cond_t wake;
    struct Waiter *next, *previous;
} Waiter;

static struct {
    pthread_mutex_t mutex;     /* guards the list and every `released` */
    Waiter *first;
    uint32_t count;            /* length of the list; written under the mutex, read without it */
} parking = {PTHREAD_MUTEX_INITIALIZER, NULL, 0};

static int reached(const uint64_t *address, uint64_t value) {
    return ao_reached(__atomic_load_n(address, __ATOMIC_ACQUIRE), value);
}

/* No wake-up is lost: the caller stored the word, fences, reads `count`; a waiter raises `count`,
 * fences, reads the word. One of the two sees the other, and if it is this side, the mutex makes
 * it wait until the waiter either saw the word or sleeps. */
void ao_host_notify(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    if (__atomic_load_n(&parking.count, __ATOMIC_RELAXED) == 0) return;
    pthread_mutex_lock(&parking.mutex);
    for (Waiter *w = parking.first; w; w = w->next) {
        if (w->released || !reached(w->address, w->value)) continue;
        w->released = 1;
        pthread_cond_signal(&w->wake);
    }
    pthread_mutex_unlock(&parking.mutex);
}

/* Sleeps, without the interpreter, until the word at `address` reached `value`, or until the time is over (0: never). */
static void park(const uint64_t *address, uint64_t value, int64_t until_ns) {
    Waiter w = {.address = address, .value = value};
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&w.wake, &monotonic);
    pthread_condattr_destroy(&monotonic);
    struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
    pthread_mutex_lock(&parking.mutex);
    w.next = parking.first;
    if (w.next) w.next->previous = &w;
    parking.first = &w;
    __atomic_fetch_add(&parking.count, 1, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    while (!w.released && !reached(address, value)) {
        if (!until_ns) pthread_cond_wait(&w.wake, &parking.mutex);
        else if (pthread_cond_timedwait(&w.wake, &parking.mutex, &until)) break;
    }
    __atomic_fetch_sub(&parking.count, 1, __ATOMIC_SEQ_CST);
    if (w.previous) w.previous->next = w.next;
    else parking.first = w.next;
    if (w.next) w.next->previous = w.previous;
    pthread_mutex_unlock(&parking.mutex);
    pthread_cond_destroy(&w.wake);
}

void ao_host_wait(const uint64_t *address, uint64_t value, int64_t until_ns) { park(address, value, until_ns); }

static void after_fork(void) {
    fork_generation++;
    pthread_mutex_init(&parking.mutex, NULL);
    parking.first = NULL;
    parking.count = 0;
}

/* ---- points: one record of an event ---- */

typedef struct {
    uint64_t done;             /* goes from 0 to 1 once */
    int64_t reached_ns;        /* when it did; set before */
    uint32_t references;       /* the event's latest, its record command, the waits for it */
} Point;

static Point *point_hold(Point *point) {
    __atomic_fetch_add(&point->references, 1, __ATOMIC_RELAXED);
    return point;
}

static void point_release(Point *point) {
    if (point && __atomic_fetch_sub(&point->references, 1, __ATOMIC_ACQ_REL) == 1) free(point);
}

/* ---- the objects ---- */

struct HostStream;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t lock;      /* the simulated context lock: synchronise() holds it while it waits */
    pthread_mutex_t state;     /* guards busy; nothing is locked under it */
    pthread_cond_t idle;       /* busy became 0 */
    Py_ssize_t busy;           /* number of streams whose `busy` is set */
    Py_ssize_t open;           /* streams that were not closed; with the interpreter */
    struct HostStream *first;  /* all streams, borrowed: each unlinks itself; with the interpreter */
    unsigned generation;       /* fork_generation it was made in */
} HostContext;

typedef struct {
    PyObject_HEAD
    Point *latest;             /* the last record, or NULL; with the interpreter */
    char closed;
} HostEvent;

enum { KERNEL, MARK, WRITE, WAIT, WAKE, COPY, COPY_BOX, FILL, RECORD, WAIT_EVENT };

/* Rows of `width` bytes: `height` of them in each of `depth` slices. Pitches and slices are distances in bytes. */
typedef struct {
    char *destination;
    const char *source;
    uint64_t width, height, depth, destination_pitch, source_pitch, destination_slice, source_slice;
} Box;

/* A command owns its plan, prepared, operation, word and point. */
typedef struct {
    uint8_t kind;
    uint8_t width;             /* FILL: bytes of the pattern */
    int descriptor;            /* WAKE */
    union {
        struct { AoPlan *plan; PyObject *prepared; AoOperation *operation; uint64_t sequence; } kernel;
        uint64_t sequence;                                                    /* MARK */
        struct { AoWord *word; uint64_t value; } word;                        /* WRITE, WAIT */
        struct { char *destination; const char *source; size_t nbytes; } copy;
        Box box;                                                              /* COPY_BOX */
        struct { char *address; uint64_t count; unsigned char pattern[16]; } fill;
        Point *point;                                                         /* RECORD, WAIT_EVENT */
    };
} Command;

typedef struct HostStream {
    PyObject_HEAD
    HostContext *context;      /* strong */
    AoWord *slot, *bell;       /* strong; NULL until bind_marks, fixed afterwards */
    uint64_t handle;           /* unique in the process, never 0 */
    struct HostStream *next, *previous; /* the context's list; with the interpreter */
    pthread_mutex_t mutex;     /* guards everything below */
    pthread_cond_t filled;     /* only the stream's thread waits for it */
    Command *ring;             /* ring[(head + i) % capacity] for i < count; capacity a power of two */
    uint32_t capacity, head, count;
    AoWord **used;             /* words of finished commands, owned; dropped by who has the interpreter */
    size_t used_count, used_capacity;
    char busy;                 /* something is queued or executing; counted in context->busy */
    char asleep;               /* the thread waits for `filled` */
    char running;              /* run() is active */
    char closing;              /* set once by close(): nothing is appended any more */
} HostStream;

/* ---- HostContext ---- */

static PyObject *context_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    static int prepared_for_forks;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":HostContext", names)) return NULL;
    if (!prepared_for_forks) {
        int code = pthread_atfork(NULL, NULL, after_fork);
        if (code) return PyErr_NoMemory();
        prepared_for_forks = 1;
    }
    HostContext *self = (HostContext *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    pthread_mutex_init(&self->lock, NULL);
    pthread_mutex_init(&self->state, NULL);
    pthread_cond_init(&self->idle, NULL);
    self->generation = fork_generation;
    return (PyObject *)self;
}

static void context_dealloc(HostContext *self) {
    if (self->generation == fork_generation) { /* else a copied waiter would make the destroy hang */
        pthread_cond_destroy(&self->idle);
        pthread_mutex_destroy(&self->state);
        pthread_mutex_destroy(&self->lock);
    }
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* -1 with RuntimeError in a forked child, where the threads and whoever held a lock are gone. */
static int context_check(const HostContext *context) {
    if (context->generation == fork_generation) return 0;
    PyErr_SetString(PyExc_RuntimeError, "host streams do not survive a fork: open the device in the child");
    return -1;
}

static void context_count(HostContext *context, int change) {
    pthread_mutex_lock(&context->state);
    context->busy += change;
    if (context->busy == 0) pthread_cond_broadcast(&context->idle);
    pthread_mutex_unlock(&context->state);
}

static void drop_used(HostStream *self);

static PyObject *context_synchronise(HostContext *self, PyObject *Py_UNUSED(ignored)) {
    if (context_check(self) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->lock);
    pthread_mutex_lock(&self->state);
    while (self->busy) pthread_cond_wait(&self->idle, &self->state);
    pthread_mutex_unlock(&self->state);
    pthread_mutex_unlock(&self->lock);
    Py_END_ALLOW_THREADS
    /* Dropping a word may run anything, so hold on to the stream and read `next` afterwards. */
    HostStream *stream = (HostStream *)Py_XNewRef((PyObject *)self->first);
    while (stream) {
        drop_used(stream);
        HostStream *next = (HostStream *)Py_XNewRef((PyObject *)stream->next);
        Py_DECREF(stream);
        stream = next;
    }
    Py_RETURN_NONE;
}

static PyObject *context_streams(HostContext *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSsize_t(self->open);
}

/* ---- HostEvent ---- */

static PyObject *event_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":HostEvent", names)) return NULL;
    PyObject *self = type->tp_alloc(type, 0);
    if (self) ao_open_events++;
    return self;
}

static void event_dealloc(HostEvent *self) {
    if (!self->closed) ao_open_events--;
    point_release(self->latest);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *event_query(HostEvent *self, PyObject *Py_UNUSED(ignored)) {
    return PyBool_FromLong(self->latest == NULL || reached(&self->latest->done, 1));
}

/* 0 with an exception unless it was recorded and reached. */
static int64_t reached_ns(PyObject *event) {
    const Point *point = PyObject_TypeCheck(event, &AoHostEvent_Type) ? ((HostEvent *)event)->latest : NULL;
    if (point && reached(&point->done, 1)) return point->reached_ns;
    PyErr_SetString(PyExc_RuntimeError, "not an event that was recorded and reached");
    return 0;
}

static PyObject *event_elapsed_ns(HostEvent *self, PyObject *since) {
    int64_t began = reached_ns(since), ended = began ? reached_ns((PyObject *)self) : 0;
    return ended ? PyLong_FromLongLong(ended - began) : NULL;
}

static PyObject *event_close(HostEvent *self, PyObject *Py_UNUSED(ignored)) {
    if (!self->closed) ao_open_events--;
    self->closed = 1;
    point_release(self->latest);
    self->latest = NULL;
    Py_RETURN_NONE;
}

/* ---- the queue ---- */

static uint32_t place(const HostStream *self, uint32_t i) { return (self->head + i) & (self->capacity - 1); }

static int grow(HostStream *self) {
    uint32_t capacity = self->capacity ? self->capacity * 2 : FIRST_CAPACITY;
    Command *ring = malloc((size_t)capacity * sizeof *ring);
    if (!ring) return -1;
    for (uint32_t i = 0; i < self->count; i++) ring[i] = self->ring[place(self, i)];
    free(self->ring);
    self->ring = ring;
    self->capacity = capacity;
    self->head = 0;
    return 0;
}

static void command_hold(const Command *c) {
    if (c->kind == KERNEL) {
        Py_INCREF(c->kernel.plan);
        Py_INCREF(c->kernel.prepared);
        Py_INCREF(c->kernel.operation);
    } else if (c->kind == WRITE || c->kind == WAIT) {
        Py_INCREF(c->word.word);
    } else if (c->kind == RECORD || c->kind == WAIT_EVENT) {
        point_hold(c->point);
    }
}

static void command_release(const Command *c) {
    if (c->kind == KERNEL) {
        Py_DECREF(c->kernel.prepared);
        Py_DECREF(c->kernel.operation);
        Py_DECREF(c->kernel.plan);
    } else if (c->kind == WRITE || c->kind == WAIT) {
        Py_DECREF(c->word.word);
    } else if (c->kind == RECORD || c->kind == WAIT_EVENT) {
        point_release(c->point);
    }
}

/* With the interpreter. */
static void drop_used(HostStream *self) {
    pthread_mutex_lock(&self->mutex);
    AoWord **words = self->used;
    size_t count = self->used_count;
    self->used = NULL;
    self->used_count = self->used_capacity = 0;
    pthread_mutex_unlock(&self->mutex);
    for (size_t i = 0; i < count; i++) Py_DECREF(words[i]);
    free(words);
}

enum { CLOSED = 1, NO_MEMORY = 2, SOME_USED = 4 };

/* Moves a held command to the end of the queue, unless CLOSED or NO_MEMORY is in the outcome. With
 * the interpreter, but runs no Python: the context lock may be held. Never waits. */
static int append(HostStream *self, const Command *c) {
    int outcome = 0, asleep = 0;
    pthread_mutex_lock(&self->mutex);
    if (self->closing) outcome = CLOSED;
    else if (self->count == self->capacity && grow(self) < 0) outcome = NO_MEMORY;
    else {
        self->ring[place(self, self->count++)] = *c;
        asleep = self->asleep;
        self->asleep = 0; /* one signal is enough */
        if (!self->busy) {
            self->busy = 1;
            context_count(self->context, 1);
        }
    }
    if (self->used_count) outcome |= SOME_USED;
    pthread_mutex_unlock(&self->mutex);
    if (asleep) pthread_cond_signal(&self->filled);
    return outcome;
}

/* What is left to do after append(): None, or NULL with an exception. */
static PyObject *settle(HostStream *self, const Command *c, int outcome) {
    if (outcome & SOME_USED) drop_used(self);
    if (!(outcome & (CLOSED | NO_MEMORY))) Py_RETURN_NONE;
    command_release(c);
    if (outcome & NO_MEMORY) return PyErr_NoMemory();
    PyErr_SetString(PyExc_RuntimeError, "the stream was closed");
    return NULL;
}

static PyObject *enqueue(HostStream *self, const Command *c) {
    if (context_check(self->context) < 0) return NULL;
    command_hold(c);
    return settle(self, c, append(self, c));
}

/* ---- the stream's thread; `*released` is its thread state while it lacks the interpreter ---- */

static void interpreter_release(PyThreadState **released) {
    if (!*released) *released = PyEval_SaveThread();
}

static void interpreter_take(PyThreadState **released) {
    if (!*released) return;
    PyEval_RestoreThread(*released); /* does not return once the interpreter is finalising */
    *released = NULL;
}

/* Takes the next command, sleeping until there is one; 0 once the stream is closed and drained. */
static int next_command(HostStream *self, Command *c, PyThreadState **released) {
    pthread_mutex_lock(&self->mutex);
    while (self->count == 0) {
        if (self->busy) {
            self->busy = 0;
            context_count(self->context, -1);
        }
        if (self->closing) break;
        if (!*released) {
            pthread_mutex_unlock(&self->mutex);
            interpreter_release(released);
            pthread_mutex_lock(&self->mutex);
            continue;
        }
        self->asleep = 1;
        pthread_cond_wait(&self->filled, &self->mutex);
        self->asleep = 0;
    }
    int found = self->count > 0;
    if (found) {
        *c = self->ring[self->head];
        self->head = place(self, 1);
        self->count--;
    }
    pthread_mutex_unlock(&self->mutex);
    return found;
}

static void write_word(AoWord *word, uint64_t value) {
    __atomic_store_n(word->host, value, __ATOMIC_SEQ_CST);
    ao_host_notify();
}

static void write_mark(HostStream *self, uint64_t sequence) {
    __atomic_store_n(self->slot->host, sequence, __ATOMIC_SEQ_CST);
    write_word(self->bell, 1);
}

/* Moves the current exception, whatever its class, into the operation. */
static void keep_failure(AoOperation *operation) {
#if PY_VERSION_HEX >= 0x030C0000
    PyObject *failure = PyErr_GetRaisedException();
#else
    PyObject *type, *failure, *traceback;
    PyErr_Fetch(&type, &failure, &traceback);
    PyErr_NormalizeException(&type, &failure, &traceback);
    if (traceback) PyException_SetTraceback(failure, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
#endif
    if (operation->finished) Py_XDECREF(failure); /* its outcome is final */
    else Py_XSETREF(operation->failure, failure);
}

/* With the interpreter, which only the kernel offers to others: a Python function does on its entry.
 * The references go before the mark: who sees the mark finds nothing of the launch held here, and
 * the operation's last reference is not dropped on this thread. */
static void run_kernel(HostStream *self, const Command *c) {
    /* What must not start runs nothing: its mark says that it is over, the board why. */
    int64_t began = ao_now_ns();
    PyObject *result = ao_requires_failed(c->kernel.operation)
                           ? Py_NewRef(Py_None)
                           : PyObject_Call(c->kernel.plan->callable, c->kernel.prepared, NULL);
    ao_plan_ran(c->kernel.plan, ao_now_ns() - began);
    if (result) Py_DECREF(result);
    else keep_failure(c->kernel.operation);
    uint64_t sequence = c->kernel.sequence;
    command_release(c);
    if (sequence) write_mark(self, sequence);
}

/* A command's word is done with: the reference waits for somebody who has the interpreter. */
static void keep_used(HostStream *self, AoWord *word, PyThreadState **released) {
    if (!*released) {
        Py_DECREF(word);
        return;
    }
    pthread_mutex_lock(&self->mutex);
    if (self->used_count == self->used_capacity) {
        size_t capacity = self->used_capacity ? 2 * self->used_capacity : 16;
        AoWord **words = realloc(self->used, capacity * sizeof *words);
        if (words) {
            self->used = words;
            self->used_capacity = capacity;
        }
    }
    int kept = self->used_count < self->used_capacity;
    if (kept) self->used[self->used_count++] = word;
    pthread_mutex_unlock(&self->mutex);
    if (kept) return;
    interpreter_take(released);
    Py_DECREF(word);
}

static void wait_for(const uint64_t *address, uint64_t value, PyThreadState **released) {
    if (reached(address, value)) return;
    interpreter_release(released);
    park(address, value, 0);
}

/* Before each piece of a long transfer: a finalising interpreter frees the memory it works on. */
static void check_alive(PyThreadState **released) {
    if (*released && Py_IsFinalizing()) interpreter_take(released);
}

static void copy(const Command *c, PyThreadState **released) {
    size_t nbytes = c->copy.nbytes;
    if (nbytes > INLINE_BYTES) interpreter_release(released);
    /* Pieces would not do what memmove does if the two ranges overlap. */
    size_t distance = c->copy.destination > c->copy.source ? (size_t)(c->copy.destination - c->copy.source)
                                                           : (size_t)(c->copy.source - c->copy.destination);
    size_t piece = distance < nbytes ? nbytes : PIECE_BYTES;
    for (size_t done = 0; done < nbytes; done += piece) {
        check_alive(released);
        memmove(c->copy.destination + done, c->copy.source + done, nbytes - done < piece ? nbytes - done : piece);
    }
}

/* Constant sizes, so that the compiler makes a single element one load and one store. */
static void copy_row(char *destination, const char *source, size_t width) {
    switch (width) {
    case 1: memcpy(destination, source, 1); break;
    case 2: memcpy(destination, source, 2); break;
    case 4: memcpy(destination, source, 4); break;
    case 8: memcpy(destination, source, 8); break;
    case 16: memcpy(destination, source, 16); break;
    default: memcpy(destination, source, width);
    }
}

static void copy_box(const Box *box, PyThreadState **released) {
    size_t since = 0; /* bytes since the last look whether the interpreter is going away */
    if (box->width * box->height * box->depth > INLINE_BYTES) interpreter_release(released);
    for (uint64_t z = 0; z < box->depth; z++) {
        char *destination = box->destination + z * box->destination_slice;
        const char *source = box->source + z * box->source_slice;
        for (uint64_t y = 0; y < box->height; y++, since += box->width) {
            if (since >= PIECE_BYTES) {
                since = 0;
                check_alive(released);
            }
            copy_row(destination + y * box->destination_pitch, source + y * box->source_pitch, box->width);
        }
    }
}

static void fill(const Command *c, PyThreadState **released) {
    unsigned char tile[4096]; /* a multiple of every width */
    size_t nbytes = (size_t)c->fill.count * c->width;
    if (nbytes > INLINE_BYTES) interpreter_release(released);
    for (size_t i = 0; i < sizeof tile && i < nbytes; i += c->width) memcpy(tile + i, c->fill.pattern, c->width);
    for (size_t done = 0; done < nbytes; done += sizeof tile) {
        if (done % PIECE_BYTES == 0) check_alive(released);
        memcpy(c->fill.address + done, tile, nbytes - done < sizeof tile ? nbytes - done : sizeof tile);
    }
}

static void wake(int descriptor) {
    uint64_t now = (uint64_t)ao_now_ns();
    /* A full counter (EAGAIN) is readable all the same; nobody is there to be told of another error. */
    while (write(descriptor, &now, sizeof now) < 0 && errno == EINTR) {}
}

static void execute(HostStream *self, const Command *c, PyThreadState **released) {
    switch (c->kind) {
    case KERNEL:
        interpreter_take(released);
        run_kernel(self, c);
        break;
    case MARK: write_mark(self, c->sequence); break;
    case WRITE:
        write_word(c->word.word, c->word.value);
        keep_used(self, c->word.word, released);
        break;
    case WAIT:
        wait_for(c->word.word->host, c->word.value, released);
        keep_used(self, c->word.word, released);
        break;
    case WAKE: wake(c->descriptor); break;
    case COPY: copy(c, released); break;
    case COPY_BOX: copy_box(&c->box, released); break;
    case FILL: fill(c, released); break;
    case RECORD:
        c->point->reached_ns = ao_now_ns();
        __atomic_store_n(&c->point->done, 1, __ATOMIC_SEQ_CST);
        ao_host_notify();
        point_release(c->point);
        break;
    case WAIT_EVENT:
        wait_for(&c->point->done, 1, released);
        point_release(c->point);
        break;
    }
}

static PyObject *stream_run(HostStream *self, PyObject *Py_UNUSED(ignored)) {
    if (context_check(self->context) < 0) return NULL;
    pthread_mutex_lock(&self->mutex);
    int running = self->running;
    self->running = 1;
    pthread_mutex_unlock(&self->mutex);
    if (running) {
        PyErr_SetString(PyExc_RuntimeError, "the stream runs already");
        return NULL;
    }
    PyThreadState *released = NULL;
    Command c;
    while (next_command(self, &c, &released)) execute(self, &c, &released);
    interpreter_take(&released);
    drop_used(self);
    pthread_mutex_lock(&self->mutex);
    self->running = 0;
    pthread_mutex_unlock(&self->mutex);
    Py_RETURN_NONE;
}

/* ---- HostStream: life ---- */

static PyObject *stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"context", NULL};
    static uint64_t handles; /* with the interpreter */
    HostContext *context;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!:HostStream", names, &AoHostContext_Type, &context)) return NULL;
    if (context_check(context) < 0) return NULL;
    HostStream *self = (HostStream *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    pthread_mutex_init(&self->mutex, NULL);
    pthread_cond_init(&self->filled, NULL);
    self->context = (HostContext *)Py_NewRef((PyObject *)context);
    self->handle = ++handles;
    self->next = context->first;
    if (self->next) self->next->previous = self;
    context->first = self;
    context->open++;
    ao_open_streams++;
    return (PyObject *)self;
}

/* The queue is left out on purpose: its thread takes commands off without the interpreter, which
 * would make two passes of one collection disagree. What is queued counts as reachable. */
static int stream_traverse(HostStream *self, visitproc visit, void *arg) {
    Py_VISIT(self->context);
    Py_VISIT(self->slot);
    Py_VISIT(self->bell);
    return 0;
}

static int stream_clear(HostStream *self) {
    Py_CLEAR(self->slot);
    Py_CLEAR(self->bell);
    return 0;
}

static void stream_destroy(HostStream *self) {
    if (!self->closing) self->context->open--;
    if (self->busy) context_count(self->context, -1);
    for (; self->count; self->count--) { /* it never ran */
        command_release(&self->ring[self->head]);
        self->head = place(self, 1);
    }
    drop_used(self);
    free(self->ring);
    pthread_cond_destroy(&self->filled);
    pthread_mutex_destroy(&self->mutex);
}

/* run() holds a reference, so no thread is in here any more. */
static void stream_dealloc(HostStream *self) {
    PyObject_GC_UnTrack(self);
    if (!self->closing) ao_open_streams--;
    if (self->next) self->next->previous = self->previous;
    if (self->previous) self->previous->next = self->next;
    else self->context->first = self->next;
    if (self->context->generation == fork_generation) stream_destroy(self);
    stream_clear(self);
    Py_CLEAR(self->context);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *stream_close(HostStream *self, PyObject *Py_UNUSED(ignored)) {
    if (self->context->generation != fork_generation) Py_RETURN_NONE;
    pthread_mutex_lock(&self->mutex);
    int first = !self->closing;
    self->closing = 1;
    pthread_mutex_unlock(&self->mutex);
    pthread_cond_signal(&self->filled);
    if (first) {
        self->context->open--;
        ao_open_streams--;
    }
    drop_used(self);
    Py_RETURN_NONE;
}

static PyObject *stream_query(HostStream *self, PyObject *Py_UNUSED(ignored)) {
    if (context_check(self->context) < 0) return NULL;
    pthread_mutex_lock(&self->mutex);
    int busy = self->busy, used = self->used_count > 0;
    pthread_mutex_unlock(&self->mutex);
    if (used) drop_used(self);
    return PyBool_FromLong(!busy);
}

static PyObject *stream_capturing(HostStream *Py_UNUSED(self), PyObject *Py_UNUSED(ignored)) { Py_RETURN_FALSE; }

static PyObject *stream_handle(HostStream *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->handle);
}

/* ---- HostStream: enqueueing ---- */

static int argument_count(const char *name, Py_ssize_t have, Py_ssize_t want) {
    if (have == want) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, %zd were given", name, want, have);
    return -1;
}

static int argument_type(const char *name, PyObject *have, PyTypeObject *want) {
    if (PyObject_TypeCheck(have, want)) return 0;
    PyErr_Format(PyExc_TypeError, "%s takes a %s, not %s", name, want->tp_name, Py_TYPE(have)->tp_name);
    return -1;
}

/* Sequences and words wrap, so the number is taken modulo 2**64. */
static int argument_value(PyObject *number, uint64_t *value) {
    *value = PyLong_AsUnsignedLongLongMask(number);
    return *value == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int argument_size(PyObject *number, uint64_t *value) {
    *value = PyLong_AsUnsignedLongLong(number);
    return *value == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int marks_bound(HostStream *self) {
    if (self->slot) return 0;
    PyErr_SetString(PyExc_RuntimeError, "bind_marks comes before the first mark");
    return -1;
}

static PyObject *stream_bind_marks(HostStream *self, PyObject *const *args, Py_ssize_t nargs) {
    if (argument_count("bind_marks", nargs, 2) < 0) return NULL;
    for (int i = 0; i < 2; i++)
        if (argument_type("bind_marks", args[i], &AoWord_Type) < 0) return NULL;
    if (self->slot) {
        PyErr_SetString(PyExc_RuntimeError, "the stream's marks were bound already");
        return NULL;
    }
    self->slot = (AoWord *)Py_NewRef(args[0]);
    self->bell = (AoWord *)Py_NewRef(args[1]);
    Py_RETURN_NONE;
}

/* Appends under the context lock, as a launch on a GPU does; see HostContext.synchronise. */
static PyObject *enqueue_locked(HostStream *self, const Command *c) {
    pthread_mutex_t *lock = &self->context->lock;
    if (context_check(self->context) < 0) return NULL;
    while (pthread_mutex_trylock(lock) != 0) {
        Py_BEGIN_ALLOW_THREADS
        pthread_mutex_lock(lock);
        pthread_mutex_unlock(lock); /* not kept: the interpreter is taken without a mutex */
        Py_END_ALLOW_THREADS
    }
    command_hold(c);
    int outcome = append(self, c);
    pthread_mutex_unlock(lock);
    return settle(self, c, outcome);
}

static PyObject *stream_enqueue_kernel(HostStream *self, PyObject *const *args, Py_ssize_t nargs) {
    Command c = {.kind = KERNEL};
    if (argument_count("enqueue_kernel", nargs, 4) < 0 || argument_type("enqueue_kernel", args[0], &AoPlan_Type) < 0 ||
        argument_type("enqueue_kernel", args[1], &PyTuple_Type) < 0 ||
        argument_type("enqueue_kernel", args[2], &AoOperation_Type) < 0 ||
        argument_value(args[3], &c.kernel.sequence) < 0)
        return NULL;
    c.kernel.plan = (AoPlan *)args[0];
    c.kernel.prepared = args[1];
    c.kernel.operation = (AoOperation *)args[2];
    if (!c.kernel.plan->callable) {
        PyErr_SetString(PyExc_ValueError, "the plan has no host implementation");
        return NULL;
    }
    if (c.kernel.sequence && marks_bound(self) < 0) return NULL;
    return enqueue_locked(self, &c);
}

static PyObject *stream_enqueue_mark(HostStream *self, PyObject *sequence) {
    Command c = {.kind = MARK};
    if (argument_value(sequence, &c.sequence) < 0 || marks_bound(self) < 0) return NULL;
    return enqueue(self, &c);
}

static PyObject *enqueue_word(HostStream *self, PyObject *const *args, Py_ssize_t nargs, uint8_t kind,
                              const char *name) {
    Command c = {.kind = kind};
    if (argument_count(name, nargs, 2) < 0 || argument_type(name, args[0], &AoWord_Type) < 0 ||
        argument_value(args[1], &c.word.value) < 0)
        return NULL;
    c.word.word = (AoWord *)args[0];
    return enqueue(self, &c);
}

static PyObject *stream_enqueue_write(HostStream *self, PyObject *const *args, Py_ssize_t nargs) {
    return enqueue_word(self, args, nargs, WRITE, "enqueue_write");
}

static PyObject *stream_enqueue_wait(HostStream *self, PyObject *const *args, Py_ssize_t nargs) {
    return enqueue_word(self, args, nargs, WAIT, "enqueue_wait");
}

static PyObject *stream_enqueue_wake(HostStream *self, PyObject *descriptor) {
    Command c = {.kind = WAKE};
    c.descriptor = PyObject_AsFileDescriptor(descriptor);
    if (c.descriptor < 0) return NULL;
    return enqueue(self, &c);
}

static PyObject *stream_enqueue_copy(HostStream *self, PyObject *const *args, Py_ssize_t nargs) {
    Command c = {.kind = COPY};
    uint64_t destination, source, nbytes;
    if (argument_count("enqueue_copy", nargs, 3) < 0 || argument_size(args[0], &destination) < 0 ||
        argument_size(args[1], &source) < 0 || argument_size(args[2], &nbytes) < 0)
        return NULL;
    c.copy.destination = (char *)(uintptr_t)destination;
    c.copy.source = (const char *)(uintptr_t)source;
    c.copy.nbytes = nbytes;
    return enqueue(self, &c);
}

static PyObject *stream_enqueue_copy_box(HostStream *self, PyObject *const *args, Py_ssize_t nargs) {
    Command c = {.kind = COPY_BOX};
    uint64_t destination, source;
    uint64_t *sizes[] = {&c.box.width, &c.box.height, &c.box.depth, &c.box.destination_pitch,
                         &c.box.source_pitch, &c.box.destination_slice, &c.box.source_slice};
    if (argument_count("enqueue_copy_box", nargs, 9) < 0 || argument_size(args[0], &destination) < 0 ||
        argument_size(args[1], &source) < 0)
        return NULL;
    for (int i = 0; i < 7; i++)
        if (argument_size(args[2 + i], sizes[i]) < 0) return NULL;
    c.box.destination = (char *)(uintptr_t)destination;
    c.box.source = (const char *)(uintptr_t)source;
    return enqueue(self, &c);
}

static PyObject *stream_enqueue_fill(HostStream *self, PyObject *const *args, Py_ssize_t nargs) {
    Command c = {.kind = FILL};
    uint64_t address;
    if (argument_count("enqueue_fill", nargs, 3) < 0 || argument_size(args[0], &address) < 0 ||
        argument_type("enqueue_fill", args[1], &PyBytes_Type) < 0 || argument_size(args[2], &c.fill.count) < 0)
        return NULL;
    Py_ssize_t width = PyBytes_GET_SIZE(args[1]);
    if (width < 1 || width > 16 || (width & (width - 1)) != 0) {
        PyErr_Format(PyExc_ValueError, "a pattern has 1, 2, 4, 8 or 16 bytes, not %zd", width);
        return NULL;
    }
    c.fill.address = (char *)(uintptr_t)address;
    c.width = (uint8_t)width;
    memcpy(c.fill.pattern, PyBytes_AS_STRING(args[1]), (size_t)width);
    return enqueue(self, &c);
}

static HostEvent *open_event(PyObject *object, const char *name) {
    if (argument_type(name, object, &AoHostEvent_Type) < 0) return NULL;
    if (!((HostEvent *)object)->closed) return (HostEvent *)object;
    PyErr_SetString(PyExc_RuntimeError, "the event was closed");
    return NULL;
}

/* Every record is a point of its own, so a wait keeps what it saw whatever is recorded later. */
static PyObject *stream_enqueue_record(HostStream *self, PyObject *object) {
    HostEvent *event = open_event(object, "enqueue_record");
    if (!event) return NULL;
    Point *point = malloc(sizeof *point);
    if (!point) return PyErr_NoMemory();
    *point = (Point){.done = 0, .references = 1};
    Command c = {.kind = RECORD, .point = point};
    PyObject *outcome = enqueue(self, &c);
    if (outcome) { /* the reference moves into the event */
        Point *before = event->latest;
        event->latest = point;
        point = before;
    }
    point_release(point);
    return outcome;
}

static PyObject *stream_enqueue_wait_event(HostStream *self, PyObject *object) {
    HostEvent *event = open_event(object, "enqueue_wait_event");
    if (!event) return NULL;
    if (!event->latest) Py_RETURN_NONE; /* never recorded: nothing to wait for */
    Command c = {.kind = WAIT_EVENT, .point = event->latest};
    return enqueue(self, &c);
}

/* ---- types ---- */

static PyMethodDef context_methods[] = {
    {"synchronise", (PyCFunction)context_synchronise, METH_NOARGS,
     "Wait, holding the context lock, until every stream of the context is idle; any thread."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef context_getset[] = {
    {"streams", (getter)context_streams, NULL, "How many streams were not closed.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject AoHostContext_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.HostContext",
    .tp_doc = "What the streams of one host device share: the simulated context lock.",
    .tp_basicsize = sizeof(HostContext),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = context_new,
    .tp_dealloc = (destructor)context_dealloc,
    .tp_methods = context_methods,
    .tp_getset = context_getset,
};

static PyMethodDef event_methods[] = {
    {"query", (PyCFunction)event_query, METH_NOARGS, "Whether the work before the last record is done."},
    {"elapsed_ns", (PyCFunction)event_elapsed_ns, METH_O, "Nanoseconds since another one was reached."},
    {"close", (PyCFunction)event_close, METH_NOARGS, "Destroy it; pending waits keep what they saw."},
    {NULL, NULL, 0, NULL},
};

PyTypeObject AoHostEvent_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.HostEvent",
    .tp_doc = "A point in a host stream that other streams and the program can look at.",
    .tp_basicsize = sizeof(HostEvent),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = event_new,
    .tp_dealloc = (destructor)event_dealloc,
    .tp_methods = event_methods,
};

#define FAST(name) {#name, (PyCFunction)(void (*)(void))stream_##name, METH_FASTCALL, NULL}
#define ONE(name) {#name, (PyCFunction)stream_##name, METH_O, NULL}
static PyMethodDef stream_methods[] = {
    {"run", (PyCFunction)stream_run, METH_NOARGS, "Body of the stream's thread; returns after close()."},
    {"capturing", (PyCFunction)stream_capturing, METH_NOARGS, "False: there are no graphs."},
    {"query", (PyCFunction)stream_query, METH_NOARGS, "Whether everything enqueued is done."},
    {"close", (PyCFunction)stream_close, METH_NOARGS, "Take no more commands; what is queued still runs."},
    FAST(bind_marks),
    FAST(enqueue_kernel),
    ONE(enqueue_mark),
    FAST(enqueue_write),
    FAST(enqueue_wait),
    ONE(enqueue_wake),
    FAST(enqueue_copy),
    FAST(enqueue_copy_box),
    FAST(enqueue_fill),
    ONE(enqueue_record),
    ONE(enqueue_wait_event),
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef stream_getset[] = {
    {"handle", (getter)stream_handle, NULL, "A number unique in the process, never 0.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyTypeObject AoHostStream_Type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "aiooffload._native._core.HostStream",
    .tp_doc = "An in-order queue of commands for one thread of the host device.",
    .tp_basicsize = sizeof(HostStream),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = stream_new,
    .tp_dealloc = (destructor)stream_dealloc,
    .tp_traverse = (traverseproc)stream_traverse,
    .tp_clear = (inquiry)stream_clear,
    .tp_methods = stream_methods,
    .tp_getset = stream_getset,
};
