"""What the GPU tests share: kernels, what opens the driver once, and cases in their own process.

What may hang, loses the device, or brings torch or CuPy in runs as a *case*: a coroutine function of a
``*_cases.py`` module, run by :func:`run_case` in a process with a time limit of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiooffload as ao

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 20.0
_RESULT = "RESULT "

# Kernels. Those that wait for the host give up after 20 s of the device's clock, so that a failed test ends.

CLOCK = r"""
typedef unsigned long long u64;
__device__ u64 now_ns() { u64 ns; asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)); return ns; }
__device__ void wait_for(volatile u64* word)
{
    for (u64 start = now_ns(); !*word && now_ns() - start < 20000000000ull;) {}
}
"""
LATCH = (
    CLOCK
    + r"""
extern "C" __global__ void latch(volatile u64* started, volatile u64* opened)
{
    *started = 1;
    __threadfence_system();
    wait_for(opened);
}
"""
)
SPIN = (
    CLOCK
    + r"""
extern "C" __global__ void spin(u64 ns) { for (u64 start = now_ns(); now_ns() - start < ns;) {} }
"""
)
FAULT = (
    CLOCK
    + r"""
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
extern "C" __global__ void fault(volatile u64* started, volatile u64* opened, int kind)
{
    *started = 1;
    __threadfence_system();
    wait_for(opened);
    switch (kind) {
    case 1: asm volatile("trap;"); break;
    case 2: *(volatile int*)((volatile char*)started + 2) = 1; break;
    case 3: __assertfail("false", "support.py", 1, "fault", 1); break;
    default: *(volatile int*)8 = 1;
    }
}
"""
)
OVERFLOW = (
    CLOCK
    + r"""
__device__ __noinline__ int deep(volatile int* word, int n)
{
    volatile int frame[256];
    frame[n & 255] = n;
    return *word < 0 ? 0 : deep(word, n + 1) + frame[(n + 1) & 255];
}
extern "C" __global__ void overflow(volatile u64* started, volatile u64* opened, int kind)
{
    *started = 1;
    __threadfence_system();
    wait_for(opened);
    *(volatile int*)started = deep((volatile int*)started, kind);
}
"""
)
FOREVER = r"""
extern "C" __global__ void forever(volatile unsigned long long* started)
{
    *started = 1;
    while (*started) {}
}
"""

latch = ao.Kernel("latch", cuda=LATCH)
"""Arguments: the device addresses of two words, as np.uint64. Sets the first, then waits for the second."""
fault = ao.Kernel("fault", cuda=FAULT)
"""As ``latch``, then what the third argument says, an np.int32: writes to address 8, traps, writes to an odd address,
or fails an assertion."""
overflow = ao.Kernel("overflow", cuda=OVERFLOW)
"""As ``fault``, but calls itself until the stack is full."""
forever = ao.Kernel("forever", cuda=FOREVER)
"""Sets the word at its argument, and ends when somebody clears that, which nobody does."""


@ao.kernel(cuda=SPIN)
def spin(launch: Any, ns: np.uint64) -> None:
    """Take ``ns`` nanoseconds."""


@ao.kernel(cuda='extern "C" __global__ void nothing() {}')
def nothing(launch: Any) -> None:
    """Do nothing."""


@ao.kernel(cuda='extern "C" __global__ void add(unsigned long long* x, unsigned long long n) { atomicAdd(x, n); }')
def add(launch: Any, x: ao.InOut[np.uint64], n: np.uint64) -> None:
    """Add ``n`` to the first element, atomically."""


# Written by hand, since the compiler's own PTX may be too new for the driver.
PTX_STORE = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry store(.param .u64 store_p, .param .u64 store_value)
{
    .reg .u64 %rd<4>;
    ld.param.u64 %rd1, [store_p];
    ld.param.u64 %rd2, [store_value];
    cvta.to.global.u64 %rd3, %rd1;
    st.global.u64 [%rd3], %rd2;
    ret;
}
"""


class Words:
    """Words of pinned memory that the host and kernels share.

    Parameters
    ----------
    pinned
        From ``await off.pinned(n, np.uint64)``.
    """

    def __init__(self, pinned: ao.PinnedArray) -> None:
        assert pinned.lease is not None
        self.pinned = pinned
        self.array = pinned.array
        self.array[:] = 0
        self._base = pinned.lease.block.device_address

    @classmethod
    async def of(cls, off: ao.Offload, count: int = 8) -> Words:
        return cls(await off.pinned(count, np.uint64))

    def address(self, index: int) -> np.uint64:
        """The device's address of a word, as a kernel takes it."""
        return np.uint64(self._base + 8 * index)

    async def until(self, index: int) -> None:
        """Wait until the word is not 0."""
        await until(lambda: bool(self.array[index]), f"word {index} is set")


async def until(condition: Callable[[], object], what: str, limit_s: float = DEADLINE_S) -> None:
    """Run the loop until ``condition`` holds."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {limit_s} s"
        await asyncio.sleep(0)


def device_bytes_used() -> int:
    """Bytes of the whole device that are in use, by anybody."""
    from cuda.bindings import driver

    status, context = driver.cuDevicePrimaryCtxRetain(0)
    assert int(status) == 0
    driver.cuCtxPushCurrent(context)
    try:
        status, free, total = driver.cuMemGetInfo()
        assert int(status) == 0
        return int(total) - int(free)
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(0)


def resident_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def native_threads() -> int:
    """Threads of this process, those of the driver included."""
    return len(os.listdir("/proc/self/task"))


def descriptor_count() -> int:
    """Open descriptors of this process, those of the driver included."""
    return len(os.listdir("/proc/self/fd"))


def open_driver() -> None:
    """Open and close an Offload on each GPU before the first test: what a driver opens for good is no test's leak.

    In a thread of its own and not on a loop's, because the first import of the bindings reads files.
    """
    import structlog  # noqa: F401

    import aiooffload.drivers.cuda.device  # noqa: F401

    async def open_once(label: str) -> None:
        async with ao.Offload(label, lanes=2, wake="interrupt") as off:
            await off.launch(spin, grid=1, block=1, args=(1_000_000,))
            await off.get(await off.put(np.arange(4)))

    problems: list[BaseException] = []

    def body() -> None:
        try:
            for index in range(count_devices()):
                asyncio.run(open_once(f"cuda:{index}"))
        except BaseException as error:
            problems.append(error)

    from cuda.bindings import nvml, nvrtc  # noqa: F401

    from aiooffload.drivers.cuda import open_device
    from aiooffload.drivers.cuda.library import count_devices

    open_device(0).close()
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]


# Cases


def start_case(module: str, case: str, *args: object, env: Mapping[str, str | None] | None = None) -> Any:
    """Start ``case`` of ``tests/gpu/<module>.py`` in a process of its own, with standard input and output as pipes."""
    settings = dict(os.environ)
    for name, value in (env or {}).items():
        settings.pop(name, None)
        if value is not None:
            settings[name] = value
    settings["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-X", "faulthandler", "-m", f"tests.gpu.{module}", case, *map(str, args)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=settings, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def end_case(process: Any, timeout_s: float = 60.0, feed: str = "") -> dict[str, Any]:
    """Wait for a case and return its result; fails if it hangs, or ends with anything but 0."""
    try:
        out, errors = process.communicate(feed, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
        pytest.fail(f"killed after {timeout_s} s\n--- stdout\n{out}\n--- stderr\n{errors}", pytrace=False)
    results = [line.removeprefix(_RESULT) for line in out.splitlines() if line.startswith(_RESULT)]
    said = f"exit code {process.returncode}\n--- stdout\n{out}\n--- stderr\n{errors}"
    if process.returncode != 0 or len(results) != 1:
        pytest.fail(said, pytrace=False)
    result: dict[str, Any] = json.loads(results[0])
    if "skip" in result:
        pytest.skip(result["skip"])
    result["stderr"] = errors
    return result


def run_case(
    module: str,
    case: str,
    *args: object,
    env: Mapping[str, str | None] | None = None,
    timeout_s: float = 60.0,
) -> dict[str, Any]:
    """Run a case and return its result."""
    return end_case(start_case(module, case, *args, env=env), timeout_s)


class Skip(Exception):
    """Raised by a case that lacks a library."""


def library(name: str) -> Any:
    """Import a library that only some machines have."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Skip(f"{name} is not installed: {error}") from error


def tell(result: dict[str, Any]) -> None:
    """Print a case's result where :func:`end_case` finds it, whatever else was printed."""
    print(f"\n{_RESULT}{json.dumps(result)}", flush=True)


def run_as_main(cases: Mapping[str, Callable[..., Coroutine[Any, Any, dict[str, Any]]]]) -> None:
    """Run the case that the command line names, on uvloop."""
    import faulthandler

    import uvloop

    faulthandler.dump_traceback_later(40)
    name, *args = sys.argv[1:]
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(cases[name](*args))
    except Skip as error:
        result = {"skip": str(error)}
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    tell(result)


async def on_thread(call: Callable[[], Any], limit_s: float = 30.0) -> float:
    """Run ``call`` on a thread while the loop goes on; return its seconds. Ends the process if it hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[float] = loop.create_future()

    def body() -> None:
        start = time.perf_counter()
        try:
            call()
        except BaseException as error:
            loop.call_soon_threadsafe(done.set_exception, error)
        else:
            loop.call_soon_threadsafe(done.set_result, time.perf_counter() - start)

    threading.Thread(target=body, daemon=True).start()
    try:
        return await asyncio.wait_for(done, limit_s)
    except TimeoutError:
        print(f"a call did not return within {limit_s} s", file=sys.stderr, flush=True)
        os._exit(3)
