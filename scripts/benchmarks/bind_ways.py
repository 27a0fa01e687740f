"""The ways to enqueue a launch that ``scripts/bench bind`` compares: ours, and whose peers there are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import aiooffload as ao
from benchmarks.mechanism import LANES, Shift

COUNT = 256
SOURCE = r"""
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n)
        y[i] += a * x[i];
}
"""

Worker = Callable[[int, Shift], Awaitable[int]]
TASKS = 512
ROW = 64
"""Launches of which the last is awaited, where they are coarse: half of what a lane takes at a time."""


@ao.kernel(cuda=SOURCE)
def saxpy(launch: Any, a: np.float32, x: ao.In[np.float32], y: ao.InOut[np.float32], n: np.int32) -> None:
    """Do nothing on the host device, where NumPy would cost more than what is measured."""


@dataclass
class Way:
    """One way: what enqueues a launch, and what waits until everything enqueued is done."""

    name: str
    enqueue: Callable[[], object]
    settle: Callable[[], Awaitable[object]]

    def burst(self, count: int) -> int:
        """Enqueue so many; return what it took, in nanoseconds."""
        enqueue, clock = self.enqueue, time.perf_counter_ns
        start = clock()
        for _ in range(count):
            enqueue()
        return clock() - start


@asynccontextmanager
async def all_ways(device: str) -> AsyncIterator[tuple[list[Way], dict[str, Load], dict[str, str]]]:
    """Yield the ways of a device, loads by name, and which peers are missing and why."""
    async with ao.Offload(device, lanes=LANES) as off:
        await off.load(saxpy)
        x, y = off.zeros(COUNT, np.float32), off.zeros(COUNT, np.float32)
        ways = ours(off, x, y)
        await off.drain()
        if device == "host":
            yield ways, loads(off, x), {}
            return
        from benchmarks import bind_peers_cuda

        peers, missing = bind_peers_cuda.open_all(int(device.partition(":")[2]), x.address, y.address)
        try:
            yield [*ways, *(peer.way() for peer in peers)], loads(off, x), missing
        finally:
            await off.drain()
            for peer in peers:
                peer.close()


def ours(off: ao.Offload, x: ao.Buffer, y: ao.Buffer) -> list[Way]:
    """Return the ways through aiooffload."""
    bound = off.bind(saxpy, grid=1, block=COUNT, args=(2.0, x, y, COUNT))
    return [
        Way("launch", lambda: off.launch(saxpy, grid=1, block=COUNT, args=(2.0, x, y, COUNT)), off.drain),
        Way("bound", bound, off.drain),
        Way("changed", lambda: bound(a=3.0), off.drain),
        Way("coarse", lambda: bound(coarse=True), off.drain),
    ]


@dataclass
class Load:
    """So many tasks that launch until their shift ends, and return how often they did."""

    tasks: int
    worker: Worker

    async def rate(self, seconds: float) -> float:
        """Return how many launches per second they make."""
        shift, loop = Shift(), asyncio.get_running_loop()
        start = time.perf_counter()
        # From the loop's next turn on: its clock stands still within one, and may be late by then.
        loop.call_soon(loop.call_later, seconds, shift.end)
        done = await asyncio.gather(*(self.worker(number, shift) for number in range(self.tasks)))
        return sum(done) / (time.perf_counter() - start)


def loads(off: ao.Offload, x: ao.Buffer) -> dict[str, Load]:
    """Return what is measured for its rate, by name; as many tasks as there are lanes have memory of their own."""
    results = [off.zeros(COUNT, np.float32) for _ in range(LANES)]
    bound = [off.bind(saxpy, grid=1, block=COUNT, args=(2.0, x, y, COUNT)) for y in results]

    async def launches(number: int, shift: Shift) -> int:
        y, done = results[number % LANES], 0
        while shift.goes_on:
            await off.launch(saxpy, grid=1, block=COUNT, args=(2.0, x, y, COUNT))
            done += 1
        return done

    async def calls(number: int, shift: Shift) -> int:
        call, done = bound[number % LANES], 0
        while shift.goes_on:
            await call()
            done += 1
        return done

    async def rows(number: int, shift: Shift) -> int:
        call, done = bound[number % LANES], 0
        while shift.goes_on:
            for _ in range(ROW - 1):
                call(coarse=True)
            await call()
            done += ROW
        return done

    # Of the coarse ones no more tasks than lanes: what a lane has no room for would wait on the host.
    return {"launch": Load(TASKS, launches), "bound": Load(TASKS, calls), "coarse": Load(LANES, rows)}
