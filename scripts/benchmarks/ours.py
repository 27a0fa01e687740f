"""aiooffload itself, with each of its wake policies."""

from __future__ import annotations

import time
from types import TracebackType
from typing import ClassVar, Literal, Self

import aiooffload as ao
from benchmarks.kernels import empty, spin
from benchmarks.mechanism import LANES, Mechanism, Shift


class Ours(Mechanism):
    """One wake policy, through the calls that a program makes."""

    name: ClassVar[Literal["hybrid", "interrupt", "poll"]]

    def __init__(self, device: str) -> None:
        self._device = device

    async def __aenter__(self) -> Self:
        self._off = ao.Offload(self._device, lanes=LANES, wake=self.name)
        await self._off.__aenter__()
        await self._off.load(empty, spin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._off.__aexit__(kind, error, traceback)

    async def each(self, duration_ns: int, repeats: int) -> list[int]:
        off, clock = self._off, time.perf_counter_ns
        samples = [0] * repeats
        if duration_ns == 0:
            for i in range(repeats):
                start = clock()
                await off.launch(empty, grid=1, block=32)
                samples[i] = clock() - start
        else:
            for i in range(repeats):
                start = clock()
                await off.launch(spin, grid=1, block=1, args=(duration_ns,))
                samples[i] = clock() - start
        return samples

    async def worker(self, lane: int, shift: Shift) -> int:
        off, done = self._off, 0
        while shift.goes_on:
            await off.launch(empty, grid=1, block=32)
            done += 1
        return done


class Hybrid(Ours):
    name = "hybrid"


class Interrupt(Ours):
    name = "interrupt"


class Poll(Ours):
    name = "poll"


def mechanisms(device: str) -> list[Mechanism]:
    """Return aiooffload with each of its wake policies."""
    return [Hybrid(device), Interrupt(device), Poll(device)]
