"""The kernels that the benchmarks run, for every device and every mechanism the same."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiooffload as ao
from benchmarks import native

SOURCE = r"""
extern "C" __global__ void empty() {}

__device__ void wait(long long ns)
{
    long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < ns);
}

extern "C" __global__ void spin(long long ns) { wait(ns); }

extern "C" __global__ void fault(long long ns, long long address, int trap)
{
    wait(ns);
    if (trap)
        asm volatile("trap;");
    *(volatile int*)address = 1;
}
"""


durations_ns: list[int] = []
"""How long each ``spin`` of the host device took: no sleep ends on time, and that is no mechanism's fault."""


def run_empty(launch: Any) -> None:
    """Do nothing: the host's ``empty``."""


def run_spin(launch: Any, ns: np.int64) -> None:
    """Take about ``ns`` nanoseconds without the interpreter: the host's ``spin``."""
    durations_ns.append(native.library().wait_ns(int(ns)))


@ao.kernel(cuda=SOURCE)
def empty(launch: Any) -> None:
    """Do nothing."""


@ao.kernel(cuda=SOURCE)
def spin(launch: Any, ns: np.int64) -> None:
    """Take ``ns`` nanoseconds, launching not counted."""
    run_spin(launch, ns)


@ao.kernel(cuda=SOURCE)
def fault(launch: Any, ns: np.int64, address: np.int64, trap: np.int32) -> None:
    """Fault after ``ns`` nanoseconds; for GPUs."""
    raise RuntimeError("the host device has no such faults")
