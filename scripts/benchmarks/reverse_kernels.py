"""The kernels of ``scripts/bench reverse`` that call through aiooffload.

Results are in nanoseconds of the device's own clock, -1 for what went wrong.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import aiooffload as ao

EAGER, AWAITING, BATCH, NOTE, FILL = range(1, 6)
"""Numbers of the host functions."""

SOURCE = r"""
#include <aiooffload.cuh>

__device__ long long now()
{
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns) :: "memory");
    return ns;
}

// Up to a quarter more than asked for, so that no call falls into step with a sleep of the host.
__device__ long long varied(long long ns, unsigned i)
{
    return ns + (ns / 4 * (i * 2654435761u >> 8) >> 24);
}

__device__ bool ask(ao::Launch& launch, unsigned function, long long value)
{
    long long out;
    return launch.call(ao::Function(function), out, value) == ao::Status::OK && out == 2 * value;
}

// One thread: `count` calls, about so many nanoseconds of silence before each.
extern "C" __global__ void calls(ao::Launch launch, long long* samples, unsigned function, int count,
                                 long long silence_ns)
{
    for (int i = 0; i < count; ++i) {
        for (long long start = now(), silent = varied(silence_ns, i); now() - start < silent;)
            ;
        long long start = now();
        bool good = ask(launch, function, i);
        samples[i] = good ? now() - start : -1;
        if (!good) return;
    }
}

// One lane of each warp: `count` calls. times: start and end of each warp. With more than 32 registers
// the 64 warps that a multiprocessor can hold would not fit, and the last would start when others are over.
extern "C" __global__ void __maxnreg__(32) rates(ao::Launch launch, long long* times, unsigned function,
                                                        int count)
{
    if (threadIdx.x % 32) return;
    unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    long long start = now();
    bool good = true;
    for (int i = 0; i < count && good; ++i) good = ask(launch, function, i);
    times[2 * warp] = start;
    times[2 * warp + 1] = good ? now() : -1;
}

// The same with posts. The host sees what a thread sends in order: once the call at the end is
// answered, the posts before it were read.
extern "C" __global__ void __maxnreg__(32) posts(ao::Launch launch, long long* times, unsigned function,
                                                        int count, unsigned last)
{
    if (threadIdx.x % 32) return;
    unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    long long start = now();
    bool good = true;
    for (int i = 0; i < count && good; ++i)
        good = launch.post(ao::Function(function), static_cast<long long>(i)) == ao::Status::OK;
    good = good && ask(launch, last, 1);
    times[2 * warp] = start;
    times[2 * warp + 1] = good ? now() : -1;
}

// One thread: `count` calls with `nbytes` at `data` mapped in both directions.
extern "C" __global__ void maps(ao::Launch launch, long long* samples, unsigned char* data, unsigned function,
                                int count, long long nbytes)
{
    for (int i = 0; i < count; ++i) {
        long long start = now();
        bool good = launch.call(ao::Function(function), ao::None(), ao::tofrom(data, nbytes)) == ao::Status::OK;
        samples[i] = good ? now() - start : -1;
        if (!good) return;
    }
}
"""


def varied(ns: int, i: int) -> int:
    """Return up to a quarter more than ``ns``: the host's ``varied``."""
    return ns + (ns // 4 * ((i * 2654435761 & 0xFFFFFFFF) >> 8) >> 24)


@ao.kernel(cuda=SOURCE, calls=True)
def calls(launch: Any, samples: ao.Out[np.int64], function: np.uint32, count: np.int32, silence_ns: np.int64) -> None:
    """Call ``count`` times, and keep still before each."""
    number, silence, clock = int(function), int(silence_ns), time.perf_counter_ns
    for i in range(int(count)):
        if silence:
            time.sleep(varied(silence, i) / 1e9)  # on the kernel's own thread: this is the silence
        start = clock()
        out = launch.call(number, i)
        samples[i] = clock() - start if out == 2 * i else -1


@ao.kernel(cuda=SOURCE, calls=True)
def rates(launch: Any, times: ao.Out[np.int64], function: np.uint32, count: np.int32) -> None:
    """Call ``count`` times per warp; the host has one warp a launch."""
    number, good = int(function), True
    times[0] = time.perf_counter_ns()
    for i in range(int(count)):
        good &= launch.call(number, i) == 2 * i
    times[1] = time.perf_counter_ns() if good else -1


@ao.kernel(cuda=SOURCE, calls=True)
def posts(launch: Any, times: ao.Out[np.int64], function: np.uint32, count: np.int32, last: np.uint32) -> None:
    """Post ``count`` times per warp, then call ``last``."""
    number = int(function)
    times[0] = time.perf_counter_ns()
    for i in range(int(count)):
        launch.post(number, i)
    good = launch.call(int(last), 1) == 2
    times[1] = time.perf_counter_ns() if good else -1


@ao.kernel(cuda=SOURCE, calls=True)
def maps(
    launch: Any,
    samples: ao.Out[np.int64],
    data: ao.InOut[np.uint8],
    function: np.uint32,
    count: np.int32,
    nbytes: np.int64,
) -> None:
    """Call ``count`` times with ``data`` mapped in both directions."""
    for i in range(int(count)):
        start = time.perf_counter_ns()
        launch.call(int(function), launch.tofrom(data[: int(nbytes)]))
        samples[i] = time.perf_counter_ns() - start
