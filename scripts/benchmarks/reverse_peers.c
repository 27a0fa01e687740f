/* The peers of `scripts/bench reverse`: loops that answer the calls of a running kernel, and the "kernel" of
   the host device, threads that make them. Called through ctypes, hence without the interpreter.

   A request is one 64-bit word, sequence << 32 | argument, and so is its reply: the least that can be. */

#include <sched.h>
#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */
#define TOO_LATE -1

typedef int (*query_function)(void *);

/* Mirrored by reverse_peers.Ask and the kernel in reverse_peers_cuda.py. */
struct ask {
    uint64_t *requests, *replies, *done; /* in host memory: a word per slot, and one for the end */
    int64_t *times;                      /* start and end of each warp, the end -1 if it got no answer */
    int64_t *samples;                    /* of the first warp, one per call; or none */
    uint32_t *state;                     /* the lock of the one slot, its sequence, warps that are over */
    int64_t silence_ns, limit_ns;
    int32_t count, warps, one_slot, reserved;
};

/* Mirrored by reverse_peers.Serving. */
struct serving {
    uint64_t *requests, *replies, *done;
    uint32_t *served; /* sequence of the last request of each slot */
    int64_t slots, limit_ns;
    query_function query;
    void *stream;
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

/* -- serving -- */

/* Answer whatever is there; return how much that was. */
static int64_t look(const struct serving *s)
{
    int64_t answered = 0;
    for (int64_t slot = 0; slot < s->slots; slot++) {
        uint64_t word = __atomic_load_n(&s->requests[slot], __ATOMIC_ACQUIRE);
        uint32_t sequence = word >> 32, argument = word;
        if (sequence == s->served[slot])
            continue;
        s->served[slot] = sequence;
        __atomic_store_n(&s->replies[slot], (uint64_t)sequence << 32 | 2 * argument, __ATOMIC_RELEASE);
        answered++;
    }
    return answered;
}

static int is_done(const struct serving *s)
{
    return __atomic_load_n(s->done, __ATOMIC_ACQUIRE) != 0;
}

/* The lower bound: do nothing but look. */
int serve_spin(const struct serving *s)
{
    int64_t end = now_ns() + s->limit_ns;
    for (uint32_t turn = 1; !is_done(s); turn++) {
        look(s);
        if (turn % 1024 == 0 && now_ns() > end)
            return TOO_LATE;
    }
    return 0;
}

/* The loop of GCC's libgomp (nvptx plugin, reverse offload). */
int serve_libgomp(const struct serving *s)
{
    int64_t end = now_ns() + s->limit_ns;
    int slack = prctl(PR_GET_TIMERSLACK), status;
    prctl(PR_SET_TIMERSLACK, 50000); /* what a process starts with; aiooffload may have changed it */
    while ((status = s->query(s->stream)) == NOT_READY) {
        look(s);
        if (now_ns() > end) {
            status = TOO_LATE;
            break;
        }
        usleep(1);
    }
    prctl(PR_SET_TIMERSLACK, slack);
    return status;
}

/* The policy of the RPC thread in LLVM's offload runtime: spin, and sleep once 25 us went by without a call. */
int serve_llvm(const struct serving *s)
{
    int64_t last = now_ns(), end = last + s->limit_ns;
    int slack = prctl(PR_GET_TIMERSLACK), status = 0;
    prctl(PR_SET_TIMERSLACK, 50000);
    while (!is_done(s)) {
        int64_t answered = look(s), now = now_ns();
        if (answered)
            last = now;
        else if (now - last > 25000)
            usleep(250);
        if (now > end) {
            status = TOO_LATE;
            break;
        }
    }
    prctl(PR_SET_TIMERSLACK, slack);
    return status;
}

/* What stands for cuStreamQuery on the host device: `stream` is the word for the end. */
int query_done(void *stream)
{
    return __atomic_load_n((uint64_t *)stream, __ATOMIC_ACQUIRE) ? 0 : NOT_READY;
}

/* -- the kernel of the host device: one call of this function per warp, each in a thread -- */

static int call(const struct ask *a, int64_t slot, uint32_t sequence, uint32_t argument, int64_t end)
{
    uint64_t reply;
    __atomic_store_n(&a->requests[slot], (uint64_t)sequence << 32 | argument, __ATOMIC_RELEASE);
    for (uint32_t turn = 1;; turn++) {
        reply = __atomic_load_n(&a->replies[slot], __ATOMIC_ACQUIRE);
        if (reply >> 32 == sequence)
            return (uint32_t)reply == 2 * argument;
        if (turn % 64 == 0) {
            if (now_ns() > end)
                return 0;
            if (a->warps > 1)
                sched_yield(); /* there are more threads than CPUs */
        }
    }
}

static int call_in_turn(const struct ask *a, uint32_t argument, int64_t end)
{
    while (__atomic_exchange_n(&a->state[0], 1, __ATOMIC_ACQUIRE)) {
        if (now_ns() > end)
            return 0;
        sched_yield();
    }
    int good = call(a, 0, ++a->state[1], argument, end);
    __atomic_store_n(&a->state[0], 0, __ATOMIC_RELEASE);
    return good;
}

/* Up to a quarter more than asked for, so that no call falls into step with a sleep of the loop. */
static void keep_silent(int64_t ns, uint32_t i)
{
    ns += ns / 4 * (i * 2654435761u >> 8) >> 24;
    struct timespec silence = {ns / INT64_C(1000000000), ns % INT64_C(1000000000)};
    nanosleep(&silence, 0);
}

void run_warp(const struct ask *a, int32_t warp)
{
    int64_t start = now_ns(), end = start + a->limit_ns;
    int good = 1;
    for (int32_t i = 0; i < a->count && good; i++) {
        if (a->silence_ns)
            keep_silent(a->silence_ns, i);
        int64_t before = now_ns();
        good = a->one_slot ? call_in_turn(a, i, end) : call(a, warp, i + 1, i, end);
        if (a->samples && good)
            a->samples[i] = now_ns() - before;
    }
    a->times[2 * warp] = start;
    a->times[2 * warp + 1] = good ? now_ns() : -1;
    if (__atomic_add_fetch(&a->state[2], 1, __ATOMIC_ACQ_REL) == (uint32_t)a->warps)
        __atomic_store_n(a->done, 1, __ATOMIC_RELEASE);
}
