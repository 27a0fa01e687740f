/* The parts of the benchmarks that have to run at the speed of C, called through ctypes and therefore
   without the interpreter: two peers and the host device's kernel. Compiled when a benchmark starts. */

#include <stdint.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */

typedef int (*launch_function)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                               void **, void **);
typedef int (*stream_function)(void *);

/* Mirrored by native.Work. */
struct work {
    launch_function launch;
    stream_function synchronize;
    stream_function query;
    void *function;
    void *stream;
    void **parameters;
    unsigned block;
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * INT64_C(1000000000) + time.tv_nsec;
}

static int launch(const struct work *work)
{
    return work->launch(work->function, 1, 1, 1, work->block, 1, 1, 0, work->stream, work->parameters, 0);
}

/* Launch and wait, spinning in the driver; the least that any waiter can pay. Returns the driver's status. */
int peer_sync(const struct work *work, int64_t repeats, int64_t *samples)
{
    for (int64_t i = 0; i < repeats; i++) {
        int64_t start = now_ns();
        int status = launch(work);
        if (!status)
            status = work->synchronize(work->stream);
        if (status)
            return status;
        samples[i] = now_ns() - start;
    }
    return 0;
}

/* The waiting loop of GCC's libgomp (nvptx plugin, reverse offload). */
int peer_usleep(const struct work *work, int64_t repeats, int64_t *samples)
{
    int slack = prctl(PR_GET_TIMERSLACK), status = 0;
    prctl(PR_SET_TIMERSLACK, 50000); /* what a process starts with; aiooffload may have changed it */
    for (int64_t i = 0; i < repeats && !status; i++) {
        int64_t start = now_ns();
        status = launch(work);
        if (!status)
            while ((status = work->query(work->stream)) == NOT_READY)
                usleep(1);
        samples[i] = now_ns() - start;
    }
    prctl(PR_SET_TIMERSLACK, slack);
    return status;
}

/* A kernel of the host device that takes about this long: it sleeps, and spins for the last stretch,
   since no sleep ends on time. Returns how long it took. */
int64_t wait_ns(int64_t duration)
{
    static const int64_t stretch = 40000;
    int64_t start = now_ns(), now, end = start + duration;
    if (duration > 2 * stretch) {
        struct timespec until = {(end - stretch) / INT64_C(1000000000), (end - stretch) % INT64_C(1000000000)};
        int slack = prctl(PR_GET_TIMERSLACK); /* sync calls this in the loop's thread: leave that as it was */
        prctl(PR_SET_TIMERSLACK, 1);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, 0);
        prctl(PR_SET_TIMERSLACK, slack);
    }
    while ((now = now_ns()) < end)
        ;
    return now - start;
}
