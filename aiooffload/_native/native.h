/* What the files of the extension share. Each struct's invariants stand beside its fields. */
#ifndef AIOOFFLOAD_NATIVE_H
#define AIOOFFLOAD_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <stdint.h>
#include <time.h>

static inline int64_t ao_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void ao_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* module.c: streams and events of any driver that were neither closed nor collected; with the interpreter. */
extern Py_ssize_t ao_open_streams, ao_open_events;

/* Sequence numbers wrap: compare by difference, as the device's GEQ wait does. */
static inline int ao_reached(uint64_t have, uint64_t want) { return (int64_t)(have - want) >= 0; }

/* ---- word.c: a 64-bit word shared with a device ---- */
typedef struct {
    PyObject_HEAD
    uint64_t *host;           /* valid as long as owner lives */
    uint64_t device;          /* the device's address of the same word */
    PyObject *owner;
} AoWord;
extern PyTypeObject AoWord_Type;

static inline uint64_t ao_word_load(const AoWord *w) { return __atomic_load_n(w->host, __ATOMIC_ACQUIRE); }

/* host_stream.c: wakes every host stream that waits for a word or an event. Cheap if none does. */
void ao_host_notify(void);
/* host_stream.c: sleeps, without the interpreter, until the word reached `value` or the time is over. */
void ao_host_wait(const uint64_t *address, uint64_t value, int64_t until_ns);

/* ---- plan.c: geometry of a launch and the running estimate of its duration ---- */
#define AO_PLAN_WINDOW 5
typedef struct {
    PyObject_HEAD
    PyObject *name;           /* str */
    void *function;           /* CUfunction, NULL on the host */
    PyObject *callable;       /* host implementation, or NULL */
    unsigned grid[3], block[3], cluster[3]; /* cluster[0] == 0: none */
    unsigned shared_bytes;
    int cooperative;
    /* The last durations, at samples % AO_PLAN_WINDOW; touched with the interpreter held only. */
    uint32_t samples;
    double recent_ns[AO_PLAN_WINDOW];
    double median_ns;         /* of the known ones */
    /* What a host stream measured of the call alone; its thread updates it, with the interpreter. */
    double run_ns;
    uint32_t runs;
    int probes;               /* censored samples since the last exact one */
    int steady;               /* whether they are close enough together to predict from */
} AoPlan;
extern PyTypeObject AoPlan_Type;
void ao_plan_record(AoPlan *plan, int64_t duration_ns);
void ao_plan_record_between(AoPlan *plan, int64_t lower_ns, int64_t upper_ns);
void ao_plan_ran(AoPlan *plan, int64_t run_ns);
/* Whether it is a host kernel so short that waking another thread for it costs more than it does. */
int ao_plan_is_tiny(const AoPlan *plan);
/* Expected duration in ns, or 0 while too few or too scattered samples are known. */
int64_t ao_plan_expected(const AoPlan *plan);

/* ---- operation.c: the awaitable's core ---- */
typedef struct {
    PyObject_HEAD
    PyObject *loop;           /* never NULL */
    PyObject *plan;           /* AoPlan or NULL */
    PyObject *keep;           /* arguments and leases: dropped when finished, not before */
    PyObject *arrival;        /* called instead of finish() when its mark arrives, or NULL */
    PyObject *result;         /* set once finished without failure */
    PyObject *failure;        /* host kernels put theirs here before the mark; final once finished */
    PyObject *waiters;        /* NULL, one asyncio.Future, or a dict of futures */
    PyObject *callbacks;      /* NULL or a list of (callable, context) */
    /* What the engine keeps with it; this file and the board only hold them. NULL reads as None. */
    PyObject *owner, *name, *lane, *deps, *requires, *prepared, *steps, *stop, *followers, *kind;
    PyObject *behind;         /* what `deps` was as of its push, if `waited`; NULL once it is finished */
    int64_t nbytes;           /* what it moves, as far as anybody wants to know: 0 for a launch */
    int holds;
    int priority;
    char streamed;
    char calling;             /* its kernel calls: 2 if a handler launched it */
    char gate;                /* what comes after it on its lane waits behind it on the host */
    char coarse;              /* no mark of its own: it counts as done with the lane's next one */
    char instant;             /* it went to the device while it was submitted */
    PyObject *weakrefs;
    struct AoUse *uses;       /* its places in histories; gone once it is finished, unless it has deps then */
    PyObject *queue;          /* the AoQueue it was pushed to, or NULL */
    uint64_t sequence;        /* its mark on that lane; meaningless while queue is NULL */
    int64_t submitted_ns, finished_ns;
    int64_t due_ns;           /* when it is expected to be done, as of its push */
    char tiny;                /* as of its push: see AoQueue.heavy */
    char waited;              /* as of its push: it came after something on another lane */
    char finished;            /* goes from 0 to 1 once; result and failure are final from then on */
    char looked;              /* somebody saw the failure */
} AoOperation;
extern PyTypeObject AoOperation_Type, AoWait_Type;
/* Whether something that `op` requires has failed: then it does not start, or counts as if it had not. */
static inline int ao_requires_failed(const AoOperation *op) {
    if (!op->requires) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(op->requires); i++)
        if (((AoOperation *)PyTuple_GET_ITEM(op->requires, i))->failure) return 1;
    return 0;
}
/* Takes no references. Returns 1 if this call finished it, 0 if it was, -1 with an exception set. */
int ao_operation_finish(AoOperation *op, PyObject *result, PyObject *failure);
/* The mark of `op` was seen: arrival or finish. Errors go to sys.unraisablehook. */
void ao_operation_arrive(AoOperation *op);

/* ---- history.c: program order on one allocation ---- */
typedef struct AoUse {
    AoOperation *op;          /* borrowed: it frees its uses before it goes */
    struct AoUse *sibling;    /* the operation's next use */
    struct AoUse *next, **link; /* in a history's list, and what points there; NULL while in none */
} AoUse;
typedef struct {
    PyObject_HEAD
    AoUse *writer;            /* the last one, alone; everything submitted before it is ordered before it already */
    AoUse *readers;           /* since then, the last first */
} AoHistory;
extern PyTypeObject AoHistory_Type;
/* A use of `op` that is in no history yet; NULL with an exception. */
AoUse *ao_use_new(AoOperation *op);
void ao_uses_free(AoOperation *op);
/* `op` is finished: its uses go unless it stands for others. */
void ao_uses_settle(AoOperation *op);
/* Enters a new use: its operation was submitted now. */
void ao_history_record(AoHistory *history, AoUse *use, int writes);
/* Whether one queue's order alone puts first everything that one submitted now has to come after, and whatever
 * sits on *home (NULL: anything does so far); sets *home to that queue if there is anything. */
struct AoQueue;
int ao_history_home(const AoHistory *history, int writes, struct AoQueue **home);

/* ---- board.c: slots and what waits on them ---- */
typedef struct AoQueue {
    PyObject_HEAD
    AoWord *slot;
    uint64_t issued;          /* sequence of the last push; the mark of push k writes issued_0 + k */
    uint64_t seen;            /* last value read from the slot; issued - in_flight <= seen <= issued */
    uint32_t depth, head, in_flight; /* ring[head .. head + in_flight) mod depth */
    AoOperation **ring;       /* strong references */
    int64_t *started_ns;      /* per ring place: when it was pushed */
    int64_t last_done_ns;     /* when the lane last completed something */
    int64_t end_ns;           /* due_ns of the last push: when the lane is expected to be done with everything */
    uint32_t heavy;           /* in flight and not tiny */
    Py_ssize_t load;          /* operations queued for it on the host */
    char open;                /* takes any launch */
    char reserved;            /* takes only what names it: pick() passes over it */
    char unmarked;            /* the last push was coarse: no mark will say that it is done */
    uint32_t precise;         /* after so many more pushes an event is recorded: somebody waited for one in the middle */
    PyObject *stream, *lane;  /* what it belongs to; NULL until attach() */
    struct AoBoard *board;    /* borrowed: the board outlives its queues' use, it empties them when it goes */
} AoQueue;
typedef struct AoBoard {
    PyObject_HEAD
    PyObject *lanes;          /* list of AoQueue, grows only */
    Py_ssize_t in_flight;     /* sum over the lanes */
    Py_ssize_t rotate;        /* where pick() starts looking */
    int64_t progress_ns;      /* when something was last pushed or arrived */
    int64_t looked_ns;        /* when poll() last looked: what arrived since has an inexact end */
    unsigned long long pushed, completed; /* ever */
    Py_ssize_t pending;       /* operations on the host that could not go yet: later ones queue behind */
    Py_ssize_t paused;        /* why nothing starts: barriers up, an operation that is being put together */
    Py_ssize_t unmarked;      /* lanes that are */
    Py_ssize_t open;          /* lanes [0, open) take any launch; those behind have a purpose of their own */
    struct AoBatch *batches;  /* what was popped and is being finished, the innermost look's first; NULL: nothing */
    PyObject *channel;        /* AoChannel that a look has to watch, too, or NULL */
    char watched;             /* a look is scheduled: a push need not tell anybody */
    char stray;               /* a slot held what its device never stored: every look from then on says so */
} AoBoard;
extern PyTypeObject AoQueue_Type, AoBoard_Type;
static inline AoQueue *ao_board_lane(const AoBoard *board, Py_ssize_t i) {
    return (AoQueue *)PyList_GET_ITEM(board->lanes, i);
}
/* Index of the least busy lane of [first, last), which is not empty; for a tiny plan rather one that is
 * awake with tiny work. `plan` may be NULL. */
Py_ssize_t ao_board_pick(AoBoard *board, Py_ssize_t first, Py_ssize_t last, const AoPlan *plan);
/* Index of the lane of [first, last) on which an operation would start first that comes after `deps`, a list. */
Py_ssize_t ao_board_pick_after(AoBoard *board, Py_ssize_t first, Py_ssize_t last, PyObject *deps);
/* The mark issued + 1 of a lane that has room was enqueued for `op`. */
void ao_queue_push(AoQueue *queue, AoOperation *op, int64_t started_ns);

/* ---- channel.c: the host's end of a channel; port.c: the device's, for host kernels ---- */
struct AoChannel;
extern PyTypeObject AoChannel_Type, AoCaller_Type, AoHandler_Type, AoRequest_Type, AoPort_Type;
extern PyObject *ao_calling; /* the context variable that says which request or launch a handler serves */
extern PyObject *ao_host_steps; /* operation.c: that which names the host tasks that run */
/* Whether a request can be read. Needs no interpreter, as long as the channel is kept alive. */
int ao_channel_pending(const struct AoChannel *channel);
/* Reads requests and starts their handlers for about so long; how many, or -1 with an exception. */
Py_ssize_t ao_channel_drain(struct AoChannel *channel, int64_t budget_ns);
/* How many handlers, ever, were not done with their first step: those need the loop to go on. */
uint64_t ao_channel_suspended(const struct AoChannel *channel);
int ao_channel_module_init(PyObject *module);

/* ---- launcher.c: the launch path; bound.c: launches with arguments of their own ---- */
extern PyTypeObject AoLauncher_Type, AoBound_Type;
/* A site is what is known of a kernel in one geometry, a tuple of these. */
enum {
    AO_SITE_PLAN,
    AO_SITE_FORMATS,          /* bytes for ao_pack_arguments(), or None: prepare() makes what the stream takes */
    AO_SITE_BARE,             /* what the stream takes for a launch without arguments, or None */
    AO_SITE_READ_ONLY,        /* bytes: per parameter, whether the kernel only reads it; others it may write */
    AO_SITE_DTYPES,           /* tuple: per parameter, the dtype of a buffer there, None for any */
    AO_SITE_PREPARE,          /* prepare(arguments), checking and converting them */
    AO_SITE_SIZE
};
/* -1 with an exception unless `site` is one. */
int ao_site_check(PyObject *site);
/* Whether a launch may go to the device now, from here; -1 with an exception. */
int ao_launcher_may(PyObject *launcher);
/* Launches, after ao_launcher_may(): the operation, None if it has to go the long way and nothing was done, or NULL.
 * `prepared` and `lane` may be NULL: then they are found. */
PyObject *ao_launcher_go(PyObject *launcher, PyObject *site, PyObject *arguments, PyObject *prepared, PyObject *lane,
                         PyObject *after, int coarse);

extern PyTypeObject AoTimer_Type;                                   /* clock.c */
PyObject *ao_timer_slack(PyObject *module, PyObject *value);        /* clock.c */
extern PyTypeObject AoCudaStream_Type, AoCudaEvent_Type;            /* cuda_stream.c */
extern PyTypeObject AoHostContext_Type, AoHostEvent_Type, AoHostStream_Type; /* host_stream.c */

PyObject *ao_pack(PyObject *module, PyObject *args);                 /* pack.c */
PyObject *ao_dlpack_export(PyObject *module, PyObject *args);        /* dlpack.c */
PyObject *ao_dlpack_import(PyObject *module, PyObject *capsule);
PyObject *ao_cuda_initialise(PyObject *module, PyObject *error);     /* cuda_stream.c */
/* The launch path's way into enqueue_kernel() of an AoCudaStream; -1 with an exception. */
int ao_cuda_enqueue_kernel(PyObject *stream, AoPlan *plan, PyObject *prepared, uint64_t sequence);
int ao_operation_module_init(PyObject *module);                      /* operation.c */
PyObject *ao_running_loop(void);                                     /* operation.c; new reference */
int ao_pack_module_init(void);                                       /* pack.c */
/* pack.c: None: slow path. `addresses` holds those of the buffers, in order; NULL: they are asked. */
PyObject *ao_pack_arguments(const char *formats, Py_ssize_t count, PyObject *arguments, const uint64_t *addresses);
/* pack.c: puts another scalar into a packed block; 1 done, 0 slow path, -1 exception. Not 'P'. */
int ao_pack_scalar(char format, PyObject *value, PyObject *packed, Py_ssize_t index);

#endif
