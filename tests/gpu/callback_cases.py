"""Cases around callbacks of the driver, each run in a process of its own by ``test_callbacks.py``."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import sys
import time
import warnings
from typing import Any

import numpy as np

import aiooffload as ao
from tests.gpu.support import Words, add, latch, library, nothing, run_as_main, spin, tell, until

HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # takes the interpreter when it is called
STREAM_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)


class Foreign:
    """Another library: its own stream in the primary context, with Python callbacks on it."""

    def __init__(self, kind: str) -> None:
        from cuda.bindings import driver

        status, context = driver.cuDevicePrimaryCtxRetain(0)
        assert int(status) == 0
        assert int(driver.cuCtxPushCurrent(context)[0]) == 0
        status, stream = driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        assert int(status) == 0
        driver.cuCtxPopCurrent()
        self.kind = kind
        self.called = 0
        self.made = 0
        self.stream = ctypes.c_void_p(int(stream))
        self.library = ctypes.CDLL("libcuda.so.1")
        self.host_function = HOST_FUNCTION(lambda _: self._callback())
        self.stream_callback = STREAM_CALLBACK(lambda *_: self._callback())

    def _callback(self) -> None:
        sum(range(200))  # needs the interpreter for a while, which others may take meanwhile
        self.called += 1

    def enqueue(self) -> None:
        """Enqueue one callback."""
        if self.kind == "host function":
            status = self.library.cuLaunchHostFunc(self.stream, self.host_function, None)
        else:
            status = self.library.cuStreamAddCallback(self.stream, self.stream_callback, None, 0)
        assert status == 0
        self.made += 1


async def python_callbacks(kind: str, rounds: str, per_round: str) -> dict[str, Any]:
    """Launch thousands of kernels while another library's Python callbacks keep coming."""
    async with ao.Offload("cuda:0", wake="interrupt" if kind == "stream callback" else "hybrid") as off:
        await off.load(add, nothing)
        foreign = Foreign(kind)
        x = off.zeros(1, np.uint64)
        start = time.perf_counter()
        for _ in range(int(rounds)):
            foreign.enqueue()
            ops = [off.launch(add, grid=1, block=1, args=(x, 1)) for _ in range(int(per_round) // 2)]
            ops += [off.launch(nothing, grid=1, block=1) for _ in range(int(per_round) // 2)]
            foreign.enqueue()
            await asyncio.gather(*(op.wait() for op in ops))
        seconds = time.perf_counter() - start
        await until(lambda: foreign.called == foreign.made, "every callback ran")
        found = int((await off.get(x))[0])
        return {"sum": found, "called": foreign.called, "made": foreign.made, "seconds": round(seconds, 2)}


async def numba_callbacks() -> dict[str, Any]:
    """Launch while numba's own stream callbacks keep coming; its ``async_done`` may fail, ours may not."""
    cuda = library("numba.cuda")
    async with ao.Offload("cuda:0") as off:
        await off.load(add)
        x = off.zeros(1, np.uint64)
        stream, called, made, failure = cuda.stream(), [], 0, ""
        for number in range(100):
            try:
                stream.add_callback(lambda stream, status, arg: called.append(arg), number)
                made += 1
            except Exception as error:  # seen with numba-cuda 0.30.4: it does not know the handle's type
                failure = repr(error)
            await asyncio.gather(*(off.launch(add, grid=1, block=1, args=(x, 1)).wait() for _ in range(50)))
        await until(lambda: len(called) == made, "every callback of numba's ran")
        return {"sum": int((await off.get(x))[0]), "called": len(called), "made": made, "numba": failure}


def late_wake() -> None:
    """Let a wake arrive after its loop was closed, with the Offload still open (CPython asyncio #258)."""
    kept: list[Any] = []

    async def leave() -> None:
        off = ao.Offload("cuda:0", lanes=2, wake="interrupt")
        await off.__aenter__()
        await off.load(latch)
        words = await Words.of(off)
        kept.extend([off, words, off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)))])
        await words.until(0)
        engine = off._engine
        assert engine is not None
        await until(lambda: engine.completion.armed, "the monitor is armed")
        kept.append(engine.completion._eventfd)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    eventfd = kept[-1]
    kept[1].array[1] = 1
    deadline = time.monotonic() + 10
    woken = 0
    while not woken and time.monotonic() < deadline:
        try:
            woken = int(os.eventfd_read(eventfd) > 0)
        except BlockingIOError:
            time.sleep(0)

    async def again() -> str:
        try:
            kept[0].launch(latch, grid=1, block=1)
        except ao.UsageError as error:
            return str(error)
        return "nothing"

    # A later loop, which may be given the same descriptors, is not disturbed.
    refused = asyncio.run(again())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept.clear()
        gc.collect()
    # What the first one mapped may be mapped again at the same addresses now.
    found = asyncio.run(work())
    tell({"woken": woken, "refused": refused, "warnings": [item.category.__name__ for item in caught], "sum": found})


async def work() -> int:
    """Use an Offload of its own, and return how many adds arrived."""
    async with ao.Offload("cuda:0", lanes=4) as off:
        x = off.zeros(1, np.uint64)
        await asyncio.gather(*(off.launch(add, grid=1, block=1, args=(x, 1)).wait() for _ in range(50)))
        await off.get(await off.put(np.zeros(3_000_000)))
        return int((await off.get(x))[0])


async def exit_busy(wake: Any) -> dict[str, Any]:
    """Leave the interpreter without ``aclose``, with a kernel that runs and a monitor that is armed."""
    off = ao.Offload("cuda:0", lanes=2, wake=wake)
    await off.__aenter__()
    await off.load(latch, spin)
    words = await Words.of(off)
    off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)))
    await words.until(0)
    KEPT.extend([off, words])
    return {"left_at": time.time()}


KEPT: list[Any] = []

CASES = {
    "python_callbacks": python_callbacks,
    "numba_callbacks": numba_callbacks,
    "exit_busy": exit_busy,
}

if __name__ == "__main__":
    if sys.argv[1] == "late_wake":
        late_wake()
    else:
        run_as_main(CASES)
