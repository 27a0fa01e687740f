"""aiooffload itself, answering calls with each kind of host function."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

import aiooffload as ao
from benchmarks import reverse_kernels as kernels
from benchmarks.measure import percentile
from benchmarks.reverse_kernels import AWAITING, BATCH, EAGER, FILL, NOTE
from benchmarks.reverse_measure import CALLS_LIMIT, WARM_UP, Served, Values

CALL_TIMEOUT_S = 5.0
BLOCK = 256
"""Threads per block where warps are many: blocks of one warp each would not all fit a GPU at once."""
ONE_WARP_BLOCKS = 1056
MAPPED_NBYTES = 1 << 20


class Session:
    """The Offload that all of ours share, with its host functions and buffers."""

    def __init__(self, device: str, most_warps: int) -> None:
        self.device = device
        self._most_warps = most_warps
        self._off: ao.Offload | None = None
        self.noted = 0

    async def open(self) -> None:
        on_host = self.device == "host"
        launches = self._most_warps if on_host else 1
        off = ao.Offload(self.device, lanes=4, calling_lanes=launches, call_timeout_s=CALL_TIMEOUT_S)
        await off.__aenter__()
        self._off = off
        self._register(off)
        # On the host each launch is one warp, and launches that share a buffer would wait for each other.
        self.times = [off.zeros(2 if on_host else 2 * self._most_warps, np.int64) for _ in range(launches)]
        self.samples = off.zeros(CALLS_LIMIT, np.int64)
        self.data = off.zeros(MAPPED_NBYTES, np.uint8)
        self.pinned = await off.pinned(MAPPED_NBYTES, np.uint8)
        await off.load(kernels.calls, kernels.rates, kernels.posts, kernels.maps)

    async def close(self) -> None:
        if self._off is not None:
            off, self._off = self._off, None
            await off.aclose(timeout_s=2 * CALL_TIMEOUT_S)

    @property
    def off(self) -> ao.Offload:
        assert self._off is not None
        return self._off

    def _register(self, off: ao.Offload) -> None:
        @off.host_function(name=EAGER)
        async def eager(x: int) -> int:
            return 2 * x

        @off.host_function(name=AWAITING)
        async def awaiting(x: int) -> int:
            await asyncio.sleep(0)
            return 2 * x

        @off.host_function(name=BATCH, batch=True)
        async def batch(x: np.int64) -> np.int64:
            return 2 * x

        @off.host_function(name=NOTE, batch=True)
        async def note(x: np.int64) -> None:
            self.noted += len(x)  # type: ignore[arg-type]  # a batch gets arrays

        @off.host_function(name=FILL)
        async def fill(z: ao.InOut[np.uint8]) -> None:
            pass

    async def one(self, kernel: ao.Kernel, count: int, *args: Any) -> Sequence[int]:
        """Run a kernel of one thread and return the ``count`` samples that it made."""
        if count > CALLS_LIMIT:
            raise ValueError(f"{count} samples are more than {CALLS_LIMIT}")
        await self._all([self.off.launch(kernel, grid=1, block=1, args=(self.samples, *args))])
        samples: list[int] = (await self.off.get(self.samples))[:count].tolist()
        if min(samples) < 0:
            raise RuntimeError("a call went wrong")
        return samples

    async def many(self, kernel: ao.Kernel, warps: int, *args: Any) -> int:
        """Run a kernel of so many warps and return the time from the first start to the last end."""
        off = self.off
        if self.device == "host":
            used = self.times[:warps]
            await self._all([off.launch(kernel, grid=1, block=1, args=(times, *args)) for times in used])
        else:
            used = self.times
            block = 32 if warps <= ONE_WARP_BLOCKS else BLOCK
            grid = warps * 32 // block
            await self._all([off.launch(kernel, grid=grid, block=block, args=(used[0], *args))])
        times = np.concatenate([await off.get(buffer) for buffer in used])[: 2 * warps]
        if times.min() < 0:
            raise RuntimeError("a call went wrong")
        return int(times[1::2].max() - times[::2].min())

    async def _all(self, launches: Sequence[ao.Operation[None]]) -> None:
        try:
            for launch in launches:
                await launch
        except asyncio.CancelledError:
            for launch in launches:
                launch.cancel()
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("a launch was cancelled") from None


class Ours(Served):
    """One kind of host function."""

    function: ClassVar[int]

    def __init__(self, session: Session) -> None:
        self.session = session

    async def calls(self, count: int, silence_ns: int = 0) -> Sequence[int]:
        return await self.session.one(kernels.calls, count, self.function, count, silence_ns)

    async def rate(self, warps: int, count: int) -> int:
        return await self.session.many(kernels.rates, warps, self.function, count)


class Eager(Ours):
    name = "eager"
    label = "ours: a coroutine that does not suspend"
    function = EAGER


class Awaiting(Ours):
    name = "awaiting"
    label = "ours: a coroutine with `await asyncio.sleep(0)`"
    function = AWAITING


class Batch(Ours):
    name = "batch"
    label = "ours: a batch function, all pending calls as one array"
    function = BATCH


class Post(Ours):
    name = "post"
    label = "ours: posts (no reply) to a batch function"
    latency = False
    function = NOTE

    async def rate(self, warps: int, count: int) -> int:
        before = self.session.noted
        took = await self.session.many(kernels.posts, warps, NOTE, count, BATCH)
        if self.session.noted - before != warps * count:
            raise RuntimeError(f"{self.session.noted - before} of {warps * count} posts arrived")
        return took


async def mapped(session: Session, count: int) -> Values:
    """Measure calls with 1 MiB mapped in both directions, and beside them two awaited copies of as much."""
    off, clock = session.off, time.perf_counter_ns
    args = (session.data, FILL, WARM_UP + count, MAPPED_NBYTES)
    calls = (await session.one(kernels.maps, WARM_UP + count, *args))[WARM_UP:]
    copies = []
    for _ in range(WARM_UP + count):
        start = clock()
        await off.get(session.data, out=session.pinned)
        await off.copy(session.data, session.pinned)
        copies.append(clock() - start)
    call_us, copies_us = percentile(calls, 50) / 1000, percentile(copies[WARM_UP:], 50) / 1000
    return {"mapped_us": call_us, "copies_us": copies_us, "speed_percent": 100 * copies_us / call_us}


def mechanisms(session: Session) -> list[Served]:
    """Return aiooffload with each kind of host function."""
    return [Eager(session), Awaiting(session), Batch(session), Post(session)]
