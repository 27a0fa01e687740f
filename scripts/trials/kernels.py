"""The kernels that are tried, each for every device. Arithmetic is that of uint64, which wraps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

import aiooffload as ao

INCLUDE = "#include <aiooffload.cuh>\n"
SPIN_S = 2.0
"""A kernel that waits to be stopped gives up after so long."""


@ao.kernel(
    cuda="""extern "C" __global__ void scale_add(
        unsigned long long* x, unsigned long long a, unsigned long long b, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) x[i] = x[i] * a + b;
    }"""
)
def scale_add(launch: Any, x: ao.InOut[np.uint64], a: np.uint64, b: np.uint64, n: np.int32) -> None:
    """Multiply and add."""
    x[:n] = x[:n] * a + b


@ao.kernel(
    cuda="""extern "C" __global__ void combine(unsigned long long* y, const unsigned long long* x, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = y[i] * 3 + x[i];
    }"""
)
def combine(launch: Any, y: ao.InOut[np.uint64], x: ao.In[np.uint64], n: np.int32) -> None:
    """Mix one array into another."""
    y[:n] = y[:n] * np.uint64(3) + x[:n]


@ao.kernel(
    cuda="""extern "C" __global__ void reverse(
        unsigned long long* y, const unsigned long long* x, unsigned long long* scratch, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i >= n) return;
        scratch[i] = x[n - 1 - i];
        __threadfence();
        y[i] = scratch[i] + 1;
    }"""
)
def reverse(launch: Any, y: ao.Out[np.uint64], x: ao.In[np.uint64], scratch: ao.InOut[np.uint64], n: np.int32) -> None:
    """Turn an array around by way of scratch, and add 1."""
    scratch[:n] = x[:n][::-1]
    y[:n] = scratch[:n] + np.uint64(1)


def _answer(call: Any) -> int | None:
    """Return what a call gave, None if it gave nothing."""
    try:
        return int(call())
    except (ao.HostFunctionError, ao.OffloadTimeout, asyncio.CancelledError):
        return None


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask(
        ao::Launch launch, const long long* x, long long* y, int n) {
        for (int i = 0; i < n; ++i) {
            long long out = 0;
            if (launch.call(ao::fn("answer"), out, x[i]) != ao::Status::OK) break;
            y[i] = out;
        }
    }""",
    calls=True,
)
def ask(launch: Any, x: ao.In[np.int64], y: ao.InOut[np.int64], n: np.int32) -> None:
    """Ask for each element, one after the other, until there is no answer."""
    for i in range(n):
        out = _answer(lambda i=i: launch.call("answer", int(x[i])))
        if out is None:
            break
        y[i] = out


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_together(
        ao::Launch launch, const long long* x, long long* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        long long out = 0;
        if (i < n && launch.call(ao::fn("batched"), out, x[i]) == ao::Status::OK) y[i] = out;
    }""",
    calls=True,
)
def ask_together(launch: Any, x: ao.In[np.int64], y: ao.InOut[np.int64], n: np.int32) -> None:
    """Ask for all elements at once."""
    pending = [_pending(launch, int(x[i])) for i in range(n)]
    for i, call in enumerate(pending):
        out = None if call is None else _answer(call.wait)
        if out is not None:
            y[i] = out


def _pending(launch: Any, value: int) -> Any:
    try:
        return launch.call_async("batched", value)
    except (ao.HostFunctionError, ao.OffloadTimeout, asyncio.CancelledError):
        return None


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_mapped(ao::Launch launch, long long* x, int n, long long* y) {
        long long sum = 0;
        if (launch.call(ao::fn("mapped"), sum, ao::tofrom(x, n)) == ao::Status::OK) y[0] = sum;
    }""",
    calls=True,
)
def ask_mapped(launch: Any, x: ao.InOut[np.int64], n: np.int32, y: ao.InOut[np.int64]) -> None:
    """Let the host see an array and change it."""
    out = _answer(lambda: launch.call("mapped", launch.tofrom(x[:n])))
    if out is not None:
        y[0] = out


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void tell(ao::Launch launch, int n) {
        for (int i = 0; i < n; ++i) launch.post(ao::fn("told"), (long long)i);
    }""",
    calls=True,
)
def tell(launch: Any, n: np.int32) -> None:
    """Tell the host the numbers below n."""
    for i in range(n):
        launch.post("told", i)


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void until_stopped(ao::Launch launch, long long* y) {
        launch.post(ao::fn("told"), -1LL);
        unsigned long long start, now;
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
        do {
            asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
        } while (!launch.cancelled() && now - start < 2000000000ull);
        y[0] = launch.cancelled();
    }""",
    calls=True,
)
def until_stopped(launch: Any, y: ao.InOut[np.int64]) -> None:
    """Tell the host -1, then run until the launch is asked to stop."""
    launch.post("told", -1)
    end = time.monotonic() + SPIN_S
    while not launch.cancelled() and time.monotonic() < end:
        time.sleep(0)  # gives the interpreter away, waits for nothing
    y[0] = launch.cancelled()


PLAIN = (scale_add, combine, reverse)
CALLING = (ask, ask_together, ask_mapped, tell, until_stopped)
