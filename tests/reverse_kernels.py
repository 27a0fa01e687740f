"""What the tests of reverse offload share: kernels that call host functions, on every device.

Each kernel says what every call returned, so that a test sees the same on every device: its status
and, where that is ERROR, its code. Kernels that spin give up after some seconds of the device's clock.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

import aiooffload as ao
from aiooffload.rules.wire import Status
from tests.kernels import Rig, rig

OK, ERROR, CANCELLED, TIMEOUT = (int(status) for status in Status)
ALLOC, TO, FROM, TOFROM = range(4)
CHUNK = 12_000
SPIN_S = 8.0

INCLUDE = "#include <aiooffload.cuh>\n"
SPIN = """
__device__ bool spins(unsigned long long start) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now - start < 8000000000ull;
}
__device__ unsigned long long spin_start() {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}
"""


def attempt(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """Return (status, code, result) of a call, as CUDA code sees them."""
    try:
        return OK, 0, call()
    except asyncio.CancelledError:
        return CANCELLED, 0, None
    except ao.OffloadTimeout:
        return TIMEOUT, 0, None
    except ao.HostFunctionError as error:
        return ERROR, error.code, None


POWERS = np.dtype([("square", np.int64), ("cube", np.int64)])
"""16 bytes."""

# One thread


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask(ao::Launch launch, long long x, long long* value, int* report) {
        long long out = -1;
        report[0] = (int)launch.call(ao::fn("f"), out, x);
        report[1] = launch.error();
        value[0] = report[0] == 0 ? out : -1;
    }""",
    calls=True,
)
def ask(launch: Any, x: np.int64, value: ao.Out[np.int64], report: ao.Out[np.int32]) -> None:
    """Call f(x): an int64."""
    report[0], report[1], result = attempt(lambda: launch.call("f", x, dtype=np.int64))
    value[0] = -1 if result is None else result


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void tell(ao::Launch launch, long long x, int* report) {
        report[0] = (int)launch.call(ao::fn("f"), ao::None(), x);
        report[1] = launch.error();
    }""",
    calls=True,
)
def tell(launch: Any, x: np.int64, report: ao.Out[np.int32]) -> None:
    """Call f(x) and want no result."""
    report[0], report[1], _ = attempt(lambda: launch.call("f", x))


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_double(ao::Launch launch, long long x, double* value, int* report) {
        double out = -1;
        report[0] = (int)launch.call(ao::fn("f"), out, x);
        report[1] = launch.error();
        value[0] = report[0] == 0 ? out : -1;
    }""",
    calls=True,
)
def ask_double(launch: Any, x: np.int64, value: ao.Out[np.float64], report: ao.Out[np.int32]) -> None:
    """Call f(x): a float64."""
    report[0], report[1], result = attempt(lambda: launch.call("f", x, dtype=np.float64))
    value[0] = -1 if result is None else result


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_float(ao::Launch launch, long long x, float* value, int* report) {
        float out = -1;
        report[0] = (int)launch.call(ao::fn("f"), out, x);
        report[1] = launch.error();
        value[0] = report[0] == 0 ? out : -1;
    }""",
    calls=True,
)
def ask_float(launch: Any, x: np.int64, value: ao.Out[np.float32], report: ao.Out[np.int32]) -> None:
    """Call f(x): a float32."""
    report[0], report[1], result = attempt(lambda: launch.call("f", x, dtype=np.float32))
    value[0] = -1 if result is None else result


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_narrow(ao::Launch launch, int x, int* report) {
        report[0] = (int)launch.call(ao::fn("f"), ao::None(), x);
        report[1] = launch.error();
    }""",
    calls=True,
)
def ask_narrow(launch: Any, x: np.int32, report: ao.Out[np.int32]) -> None:
    """Call f with an int32 and want no result."""
    report[0], report[1], _ = attempt(lambda: launch.call("f", x))


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void keep_argument(ao::Launch launch, long long* x) {
        long long mine = x[0];
        launch.call(ao::fn("f"), ao::None(), mine);
        x[1] = mine;
        x[2] = x[0];
    }""",
    calls=True,
)
def keep_argument(launch: Any, x: ao.InOut[np.int64]) -> None:
    """Pass a number by value, then store what its variable and its memory hold."""
    mine = int(x[0])
    launch.call("f", mine)
    x[1] = mine
    x[2] = x[0]


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void in_turn(ao::Launch launch, long long* values, int n) {
        for (int i = 0; i < n; ++i) {
            long long out = -1;
            launch.call(ao::fn("f"), out, (long long)i, i ? values[i - 1] : 0LL);
            values[i] = out;
        }
    }""",
    calls=True,
)
def in_turn(launch: Any, values: ao.InOut[np.int64], n: np.int32) -> None:
    """Call f(i, the result before) in a loop."""
    for i in range(n):
        values[i] = launch.call("f", i, int(values[i - 1]) if i else 0)


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void several(ao::Launch launch, long long x, double* values) {
        long long n = 0;
        double d = 0;
        launch.call(ao::fn("f"), n, x);
        launch.call(ao::fn("g"), d, (double)n, x);
        launch.call(ao::Function(7), values[2], d);
        launch.call(ao::fn("h"), ao::None());
        values[0] = n;
        values[1] = d;
    }""",
    calls=True,
)
def several(launch: Any, x: np.int64, values: ao.InOut[np.float64]) -> None:
    """Call f, g, the function with the number 7, and h, each with what the one before gave."""
    n = launch.call("f", int(x))
    d = launch.call("g", float(n), int(x))
    values[2] = launch.call(7, d)
    launch.call("h")
    values[0] = n
    values[1] = d


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void padded(ao::Launch launch, double* value) {
        signed char a = -5;
        short c = -300;
        unsigned char h = 9;
        launch.call(ao::fn("f"), value[0], a, 2.5, c, 1LL << 40, true, 0.125f, h);
    }""",
    calls=True,
)
def padded(launch: Any, value: ao.Out[np.float64]) -> None:
    """Call f with arguments that a C compiler puts padding between, and behind."""
    args = (np.int8(-5), 2.5, np.int16(-300), 1 << 40, True, np.float32(0.125), np.uint8(9))
    value[0] = launch.call("f", *args)


@ao.kernel(cuda=INCLUDE + 'extern "C" __global__ void silent(ao::Launch launch, int* x) { x[0] += 7; }', calls=True)
def silent(launch: Any, x: ao.InOut[np.int32]) -> None:
    """Call nothing."""
    x[0] += 7


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void post_many(ao::Launch launch, int n, int* report) {
        for (int i = 0; i < n; ++i) {
            int status = (int)launch.post(ao::fn("f"), (long long)i);
            if (status) report[0] = status;
        }
    }""",
    calls=True,
)
def post_many(launch: Any, n: np.int32, report: ao.InOut[np.int32]) -> None:
    """Post f(i) for i below n, and end."""
    for i in range(n):
        status, _, _ = attempt(lambda i=i: launch.post("f", i))
        if status:
            report[0] = status


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_last(ao::Launch launch, long long* x) {
        x[0] = 5;
        launch.call(ao::fn("f"), ao::None(), ao::tofrom(x, 1));
    }""",
    calls=True,
)
def ask_last(launch: Any, x: ao.InOut[np.int64]) -> None:
    """Write, then call as the last thing."""
    x[0] = 5
    launch.call("f", launch.tofrom(x[:1]))


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void four_at_once(ao::Launch launch, long long* values, int* statuses) {
        ao::Pending a = launch.call_async(ao::fn("f"), 0LL);
        ao::Pending b = launch.call_async(ao::fn("f"), 1LL);
        ao::Pending c = launch.call_async(ao::fn("f"), 2LL);
        ao::Pending d = launch.call_async(ao::fn("f"), 3LL);
        statuses[3] = (int)launch.wait(d, values[3]);
        statuses[0] = (int)launch.wait(a, values[0]);
        statuses[1] = (int)launch.wait(b, values[1]);
        statuses[2] = (int)launch.wait(c, values[2]);
    }""",
    calls=True,
)
def four_at_once(launch: Any, values: ao.Out[np.int64], statuses: ao.Out[np.int32]) -> None:
    """Make four calls, then wait for them, the last one first."""
    pending = [launch.call_async("f", i) for i in range(4)]
    for i in (3, 0, 1, 2):
        statuses[i], _, values[i] = attempt(pending[i].wait)


@ao.kernel(
    cuda=INCLUDE
    + SPIN
    + """extern "C" __global__ void ask_and_poll(ao::Launch launch, long long* values) {
        ao::Pending pending = launch.call_async(ao::fn("f"), 4LL);
        long long out = -1, polls = 0;
        ao::Status status = ao::Status::ERROR;
        values[2] = launch.poll(pending, out, status);
        launch.post(ao::fn("go"));
        for (unsigned long long start = spin_start(); !launch.poll(pending, out, status) && spins(start);) ++polls;
        values[0] = out;
        values[1] = (long long)status;
        values[3] = launch.poll(pending, out, status) && status == ao::Status::OK;
    }""",
    calls=True,
)
def ask_and_poll(launch: Any, values: ao.Out[np.int64]) -> None:
    """Make a call, look (too soon), post go(), and look until it is over."""
    pending = launch.call_async("f", 4)
    values[2] = pending.poll()
    launch.post("go")
    end = time.monotonic() + SPIN_S
    while not pending.poll() and time.monotonic() < end:
        time.sleep(0)
    values[1], _, values[0] = attempt(pending.wait)
    values[3] = pending.poll()


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void drop_calls(ao::Launch launch, long long* value, int n) {
        for (int i = 0; i < n; ++i) launch.call_async(ao::fn("f"), (long long)i);
        launch.call(ao::fn("g"), value[0], (long long)n);
    }""",
    calls=True,
)
def drop_calls(launch: Any, value: ao.Out[np.int64], n: np.int32) -> None:
    """Make n calls of f and let go of them, then call g."""
    for i in range(n):
        launch.call_async("f", i)
    value[0] = launch.call("g", int(n))


@ao.kernel(
    cuda=INCLUDE
    + SPIN
    + """extern "C" __global__ void until_cancelled(ao::Launch launch, int* seen) {
        launch.post(ao::fn("started"));
        unsigned long long start = spin_start();
        while (spins(start) && !launch.cancelled()) {}
        seen[0] = launch.cancelled();
    }""",
    calls=True,
)
def until_cancelled(launch: Any, seen: ao.Out[np.int32]) -> None:
    """Post started(), then work until the launch is asked to stop."""
    launch.post("started")
    end = time.monotonic() + SPIN_S
    while not launch.cancelled() and time.monotonic() < end:
        time.sleep(0)
    seen[0] = launch.cancelled()


def _hold_at(gate: np.uint64) -> None:
    words = (ctypes.c_uint64 * 2).from_address(int(gate))
    words[0] = 1
    end = time.monotonic() + SPIN_S
    while not words[1] and time.monotonic() < end:
        time.sleep(0)


HOLD = (
    SPIN
    + """
__device__ void hold_at(unsigned long long gate) {
    volatile unsigned long long* word = (volatile unsigned long long*)gate;
    word[0] = 1;
    __threadfence_system();
    for (unsigned long long start = spin_start(); !word[1] && spins(start);) {}
    __threadfence_system();
}
"""
)


@ao.kernel(
    cuda=INCLUDE
    + HOLD
    + """extern "C" __global__ void deaf(ao::Launch launch, unsigned long long gate, int* x) {
        hold_at(gate);
        x[0] = 3;
    }""",
    calls=True,
)
def deaf(launch: Any, gate: np.uint64, x: ao.Out[np.int32]) -> None:
    """Wait for a gate and never look whether the launch was asked to stop."""
    _hold_at(gate)
    x[0] = 3


@ao.kernel(
    cuda=INCLUDE
    + HOLD
    + """extern "C" __global__ void post_and_hold(ao::Launch launch, unsigned long long gate) {
        launch.post(ao::fn("f"), 1LL);
        hold_at(gate);
    }""",
    calls=True,
)
def post_and_hold(launch: Any, gate: np.uint64) -> None:
    """Post f(1), then wait for a gate."""
    launch.post("f", 1)
    _hold_at(gate)


@ao.kernel(
    cuda=INCLUDE
    + HOLD
    + """extern "C" __global__ void ask_ahead(
        ao::Launch launch, unsigned long long gate, long long x, long long* value, int* report) {
        for (unsigned long long start = spin_start(); spin_start() - start < 50000000ull;) {}
        ao::Pending pending = launch.call_async(ao::fn("f"), x);
        hold_at(gate);
        report[0] = ((volatile unsigned long long*)gate)[1] != 0;
        report[1] = (int)launch.wait(pending, value[0]);
    }""",
    calls=True,
)
def ask_ahead(launch: Any, gate: np.uint64, x: np.int64, value: ao.Out[np.int64], report: ao.Out[np.int32]) -> None:
    """Once the host has fallen asleep, call f(x), wait for a gate before the result, and say whether it opened."""
    time.sleep(0.05)  # as long as CUDA's code above
    pending = launch.call_async("f", x, dtype=np.int64)
    _hold_at(gate)
    report[0] = (ctypes.c_uint64 * 2).from_address(int(gate))[1] != 0
    report[1], _, value[0] = attempt(pending.wait)


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void in_steps(ao::Launch launch, int n) {
        for (int i = 1; i <= n; ++i) {
            launch.progress(i, n);
            if (launch.call(ao::fn("f"), ao::None(), (long long)i) != ao::Status::OK) break;
        }
    }""",
    calls=True,
)
def in_steps(launch: Any, n: np.int32) -> None:
    """Say how far it is, then call f, n times."""
    for i in range(1, n + 1):
        launch.progress(i, n)
        launch.call("f", i)


# Mapped arrays


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void map_array(ao::Launch launch, float* x, int n, int kind, int* report) {
        ao::Mapped mapped = ao::alloc(x, n);
        if (kind == 1) mapped = ao::to(x, n);
        if (kind == 2) mapped = ao::from(x, n);
        if (kind == 3) mapped = ao::tofrom(x, n);
        report[0] = (int)launch.call(ao::fn("f"), ao::None(), mapped);
        report[1] = launch.error();
    }""",
    calls=True,
)
def map_array(launch: Any, x: ao.InOut[np.float32], n: np.int32, kind: np.int32, report: ao.Out[np.int32]) -> None:
    """Call f with the first n elements of x: alloc, to, from or tofrom."""
    map_as = (launch.alloc, launch.to, launch.from_, launch.tofrom)[kind]
    report[0], report[1], _ = attempt(lambda: launch.call("f", map_as(x[:n])))


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void map_scalar(ao::Launch launch, long long* x) {
        long long* mine = x + 1;
        *mine = 20;
        launch.call(ao::fn("f"), ao::None(), ao::tofrom(mine, 1));
        x[2] = *(volatile long long*)mine;
    }""",
    calls=True,
)
def map_scalar(launch: Any, x: ao.InOut[np.int64]) -> None:
    """Map one element of x, and store what it is after the call."""
    x[1] = 20
    launch.call("f", launch.tofrom(x[1:2]))
    x[2] = x[1]


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void map_several(
        ao::Launch launch, const float* x, float* y, int n, float a, double* total) {
        launch.call(ao::fn("f"), total[0], a, ao::to(x, n), (signed char)3, ao::tofrom(y, n));
    }""",
    calls=True,
)
def map_several(
    launch: Any, x: ao.In[np.float32], y: ao.InOut[np.float32], n: np.int32, a: np.float32, total: ao.Out[np.float64]
) -> None:
    """Call f(a, x, 3, y), which gives a number."""
    total[0] = launch.call("f", a, launch.to(x[:n]), np.int8(3), launch.tofrom(y[:n]))


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void map_twice(ao::Launch launch, int* x, int n, int first, int count) {
        launch.call(ao::fn("f"), ao::None(), ao::tofrom(x + first, count), ao::tofrom(x, n));
    }""",
    calls=True,
)
def map_twice(launch: Any, x: ao.InOut[np.int32], n: np.int32, first: np.int32, count: np.int32) -> None:
    """Call f with a part of x, then x."""
    launch.call("f", launch.tofrom(x[first : first + count]), launch.tofrom(x[:n]))


# Many threads


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_each(ao::Launch launch, long long* values, int* statuses, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        long long out = -1;
        statuses[i] = (int)launch.call(ao::fn("f"), out, (long long)i);
        values[i] = out;
    }""",
    calls=True,
)
def ask_each(launch: Any, values: ao.Out[np.int64], statuses: ao.Out[np.int32], n: np.int32) -> None:
    """Call f(i) from thread i of n; here as many at once as a chunk has."""
    for first in range(0, n, CHUNK):
        pending = [attempt(lambda i=i: launch.call_async("f", i)) for i in range(first, min(first + CHUNK, n))]
        for i, (status, _, call) in enumerate(pending, first):
            statuses[i], _, result = (status, 0, None) if call is None else attempt(call.wait)
            values[i] = -1 if result is None else result


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void either(ao::Launch launch, long long* values) {
        long long i = threadIdx.x, out = -1;
        if (i % 2) launch.call(ao::fn("f"), out, i);
        else launch.call(ao::fn("g"), out, i);
        values[i] = out;
    }""",
    calls=True,
)
def either(launch: Any, values: ao.Out[np.int64]) -> None:
    """Call f from every other lane of a warp, g from the others."""
    pending = [launch.call_async("f" if i % 2 else "g", i) for i in range(32)]
    values[:32] = [call.wait() for call in pending]


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void post_in_order(ao::Launch launch, int n) {
        int thread = blockIdx.x * blockDim.x + threadIdx.x;
        for (int i = 0; i < n; ++i) {
            if (i % 3 == 2) launch.call(ao::fn("f"), ao::None(), (long long)thread, (long long)i);
            else launch.post(ao::fn("f"), (long long)thread, (long long)i);
        }
    }""",
    calls=True,
)
def post_in_order(launch: Any, n: np.int32) -> None:
    """From each thread: two posts and a call, again and again; here one thread after the other."""
    for thread in range(launch.grid[0] * launch.block[0]):
        for i in range(n):
            (launch.call if i % 3 == 2 else launch.post)("f", thread, i)


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void warp_ask(ao::Launch launch, unsigned mask, long long* values, int* statuses) {
        unsigned lane = threadIdx.x;
        if (mask >> lane & 1) {
            long long out = -1;
            statuses[lane] = (int)launch.warp_call(ao::fn("f"), out, (long long)lane);
            values[lane] = out;
        }
    }""",
    calls=True,
)
def warp_ask(launch: Any, mask: np.uint32, values: ao.InOut[np.int64], statuses: ao.InOut[np.int32]) -> None:
    """One call for all lanes in mask, with the number of the first."""
    lanes = [i for i in range(32) if int(mask) >> i & 1]
    status, _, result = attempt(lambda: launch.call("f", lanes[0]))
    for i in lanes:
        statuses[i], values[i] = status, -1 if result is None else result


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void warp_ask_each(ao::Launch launch, unsigned mask, long long* values, int* statuses) {
        unsigned lane = threadIdx.x;
        if (mask >> lane & 1) {
            long long out = -1;
            statuses[lane] = (int)launch.warp_call_each(ao::fn("f"), out, (int)lane, (float)lane / 2);
            values[lane] = out;
        }
    }""",
    calls=True,
)
def warp_ask_each(launch: Any, mask: np.uint32, values: ao.InOut[np.int64], statuses: ao.InOut[np.int32]) -> None:
    """A call for each lane in mask, in one request, with its number and half of it."""
    lanes = np.array([i for i in range(32) if int(mask) >> i & 1], np.int32)
    status, _, results = attempt(lambda: launch.call_each("f", lanes, lanes.astype(np.float32) / 2))
    statuses[lanes] = status
    values[lanes] = -1 if results is None else results


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void warp_ask_small(ao::Launch launch, unsigned mask, unsigned char* values) {
        unsigned char lane = threadIdx.x, out = 0;
        if (mask >> lane & 1) {
            launch.warp_call_each(ao::fn("f"), out, lane);
            values[lane] = out;
        }
    }""",
    calls=True,
)
def warp_ask_small(launch: Any, mask: np.uint32, values: ao.InOut[np.uint8]) -> None:
    """A call for each lane in mask, in one request, with and for a single byte."""
    lanes = np.array([i for i in range(32) if int(mask) >> i & 1], np.uint8)
    values[lanes] = launch.call_each("f", lanes)


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void warp_ask_wide(ao::Launch launch, unsigned mask, long long* values) {
        long long lane = threadIdx.x, out = -1;
        if (mask >> lane & 1) {
            launch.warp_call_each(ao::fn("f"), out, lane, 2 * lane);
            values[lane] = out;
        }
    }""",
    calls=True,
)
def warp_ask_wide(launch: Any, mask: np.uint32, values: ao.InOut[np.int64]) -> None:
    """A call for each lane in mask, with arguments of which one request cannot take 32."""
    lanes = np.array([i for i in range(32) if int(mask) >> i & 1], np.int64)
    values[lanes] = launch.call_each("f", lanes, 2 * lanes)


@ao.kernel(
    cuda=INCLUDE
    + """struct Powers { long long square; long long cube; };
    extern "C" __global__ void warp_ask_struct(ao::Launch launch, unsigned mask, long long* values) {
        long long lane = threadIdx.x;
        if (mask >> lane & 1) {
            Powers out = {-1, -1};
            launch.warp_call_each(ao::fn("f"), out, lane);
            values[2 * lane] = out.square;
            values[2 * lane + 1] = out.cube;
        }
    }""",
    calls=True,
)
def warp_ask_struct(launch: Any, mask: np.uint32, values: ao.InOut[np.int64]) -> None:
    """A call for each lane in mask, for structs of which one reply cannot take 32."""
    lanes = np.array([i for i in range(32) if int(mask) >> i & 1], np.int64)
    results = launch.call_each("f", lanes, dtype=POWERS)
    values[2 * lanes], values[2 * lanes + 1] = results["square"], results["cube"]


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void warp_ask_none(ao::Launch launch, unsigned mask, int* statuses) {
        unsigned lane = threadIdx.x;
        ao::None none;
        if (mask >> lane & 1) statuses[lane] = (int)launch.warp_call_each(ao::fn("f"), none, (long long)lane);
    }""",
    calls=True,
)
def warp_ask_none(launch: Any, mask: np.uint32, statuses: ao.InOut[np.int32]) -> None:
    """A call for each lane in mask, in one request, without a result."""
    lanes = np.array([i for i in range(32) if int(mask) >> i & 1], np.int64)
    status, _, result = attempt(lambda: launch.call_each("f", lanes))
    assert result is None
    statuses[lanes] = status


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void warp_tell(ao::Launch launch, unsigned mask) {
        if (mask >> threadIdx.x & 1) launch.warp_post(ao::fn("f"), (long long)threadIdx.x);
    }""",
    calls=True,
)
def warp_tell(launch: Any, mask: np.uint32) -> None:
    """One post for all lanes in mask, with the number of the first."""
    launch.post("f", next(i for i in range(32) if int(mask) >> i & 1))


# What goes wrong


@ao.kernel(
    cuda=INCLUDE
    + """struct Large { unsigned char bytes[264]; };
    struct Full { unsigned char bytes[256]; };
    extern "C" __global__ void too_large(ao::Launch launch, unsigned char* guard, int* report) {
        Full before, after, out;
        Large large;
        for (int i = 0; i < 256; ++i) before.bytes[i] = i, after.bytes[i] = 255 - i;
        for (int i = 0; i < 264; ++i) large.bytes[i] = 0xAA;
        ao::Pending first = launch.call_async(ao::fn("f"), before);
        report[0] = (int)launch.call(ao::fn("f"), ao::None(), large);
        report[1] = launch.error();
        report[2] = (int)launch.post(ao::fn("f"), large);
        ao::Pending second = launch.call_async(ao::fn("f"), after);
        launch.wait(first, out);
        for (int i = 0; i < 256; ++i) guard[i] = out.bytes[i];
        launch.wait(second, out);
        for (int i = 0; i < 256; ++i) guard[256 + i] = out.bytes[i];
    }""",
    calls=True,
)
def too_large(launch: Any, guard: ao.Out[np.uint8], report: ao.Out[np.int32]) -> None:
    """Send 264 bytes between two calls with 256 that are under way meanwhile."""
    before = np.arange(256, dtype=np.uint8).view("V256")[0]
    after = np.arange(256, dtype=np.uint8)[::-1].copy().view("V256")[0]
    large = np.full(264, 0xAA, np.uint8).view("V264")[0]
    first = launch.call_async("f", before)
    report[0], report[1], _ = attempt(lambda: launch.call("f", large))
    report[2], _, _ = attempt(lambda: launch.post("f", large))
    second = launch.call_async("f", after)
    for i, call in enumerate((first, second)):
        guard[256 * i : 256 * i + 256] = np.frombuffer(attempt(call.wait)[2] or bytes(256), np.uint8)


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void give_up(ao::Launch launch) {
        launch.call(ao::fn("f"), ao::None());
        launch.abort(42, "the matrix is singular");
    }""",
    calls=True,
)
def give_up(launch: Any) -> None:
    """Call f, then abort."""
    launch.call("f")
    launch.abort(42, "the matrix is singular")


KERNELS = {kernel.name: kernel for kernel in list(globals().values()) if isinstance(kernel, ao.Kernel) and kernel.calls}


# Results of every type

C_TYPES = {
    "int8": "signed char", "int16": "short", "int32": "int", "int64": "long long",
    "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned", "uint64": "unsigned long long",
    "float32": "float", "float64": "double", "bool": "bool",
}  # fmt: skip


def echo_kernel(dtype: np.dtype[Any], c_type: str, definition: str = "") -> ao.Kernel:
    """Make a kernel that calls f with the value in x, of some type, and stores the result, of the same."""
    source = f"""{INCLUDE}{definition}
    extern "C" __global__ void echo(ao::Launch launch, const {c_type}* x, {c_type}* y, int* report) {{
        {c_type} out = x[1];
        report[0] = (int)launch.call(ao::fn("f"), out, x[0]);
        y[0] = out;
    }}"""

    def echo(launch: Any, x: ao.In[Any], y: ao.InOut[Any], report: ao.Out[np.int32]) -> None:
        report[0], _, result = attempt(lambda: launch.call("f", x[0], dtype=dtype))
        y[0] = x[1] if result is None else result

    echo.__annotations__.update(x=ao.In[dtype.type], y=ao.InOut[dtype.type])
    if dtype.kind == "V":
        echo.__annotations__.clear()
    return ao.Kernel("echo", cuda=source, host=echo, calls=True)


def struct_of(nbytes: int) -> tuple[np.dtype[Any], str, str]:
    """Return (dtype, C type, its definition) of a struct of so many bytes."""
    return np.dtype([("bytes", np.uint8, (nbytes,))]), "S", f"struct S {{ unsigned char bytes[{nbytes}]; }};"


MIXED = np.dtype([("tag", np.int8), ("scale", np.float64), ("index", np.int32, (3,))], align=True)
MIXED_C = "struct Mixed { signed char tag; double scale; int index[3]; };"


@asynccontextmanager
async def calling_rig(device: Any = "host", **options: Any) -> AsyncIterator[CallingRig]:
    """Open a rig for kernels that call: nothing is loaded, and whatever is launched is loaded first."""
    async with rig(device, load=False, **options) as r:
        yield CallingRig(r)


class CallingRig:
    """A rig, and what tests of calls do again and again."""

    def __init__(self, r: Rig) -> None:
        self.rig = r
        self.off = r.off
        self.gate = r.gate
        self.word = r.word
        self.read = r.read

    def host_function(self, function: Callable[..., Any], **options: Any) -> None:
        """Register a function."""
        self.off.host_function(**options)(function)

    def launch(
        self, kernel: ao.Kernel, *args: Any, grid: Any = 1, block: Any = 1, **options: Any
    ) -> ao.Operation[None]:
        """Launch, by default with one thread."""
        return self.off.launch(kernel, grid=grid, block=block, args=args, **options)

    def shared_block(self) -> Any:
        """Return the memory in which the kernels and the host talk."""
        assert self.off._engine is not None
        assert self.off._engine.reverse._opened is not None
        return self.off._engine.reverse._opened.shared

    def array(self, count: int, dtype: Any = np.int64) -> ao.Buffer:
        """Make a device array of zeros."""
        return self.off.zeros(count, dtype)

    async def values(self, buffer: ao.Buffer) -> list[Any]:
        """Return what a buffer holds."""
        found: list[Any] = (await self.off.get(buffer)).tolist()
        return found

    async def asked(
        self, kernel: ao.Kernel, x: int, dtype: Any = np.int64
    ) -> tuple[list[int], Any, BaseException | None]:
        """Launch one of the kernels that ask f(x): the report, the value, and how the launch ended."""
        value, report = self.array(1, dtype), self.array(2, np.int32)
        operation = self.launch(kernel, x, value, report)
        failure = await end_of(operation)
        return await self.values(report), (await self.values(value))[0], failure


async def end_of(operation: ao.Operation[Any]) -> BaseException | None:
    """Wait for an operation and return its failure, None if it has none."""
    done = asyncio.Event()
    operation.add_done_callback(lambda _: done.set())
    await done.wait()
    return operation.exception()
