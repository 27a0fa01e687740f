"""How the mechanisms are measured."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field

from benchmarks import kernels
from benchmarks.mechanism import LANES, Mechanism, Shift

WARM_UP = 12
"""Launches before a measurement: enough for a mechanism that learns how long a kernel takes."""


@dataclass
class Latency:
    """Every sample of one mechanism with one kernel, over all rounds."""

    mechanism: str
    kernel_us: int
    excess_us: list[float] = field(default_factory=list)
    wall_ns: int = 0
    cpu_ns: int = 0

    def row(self) -> dict[str, str | float]:
        return {
            "mechanism": self.mechanism,
            "kernel_us": self.kernel_us,
            "excess_p50_us": round(percentile(self.excess_us, 50), 2),
            "excess_p99_us": round(percentile(self.excess_us, 99), 2),
            "cpu_percent": round(100 * self.cpu_ns / self.wall_ns, 2),
        }


@dataclass
class Throughput:
    """Awaits per second of one mechanism with a number of tasks; one sample for each round."""

    mechanism: str
    tasks: int
    rates: list[float] = field(default_factory=list)

    def row(self) -> dict[str, str | float]:
        rate = round(statistics.median(self.rates), 1)
        return {"mechanism": self.mechanism, "tasks": self.tasks, "lanes": LANES, "awaits_per_s": rate}


@dataclass
class Held:
    """The longest time for which a mechanism kept the loop from its other callbacks, over all rounds."""

    mechanism: str
    load: str
    longest_us: float = 0.0

    def row(self) -> dict[str, str | float]:
        return {"mechanism": self.mechanism, "load": self.load, "longest_us": round(self.longest_us, 1)}


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the smallest sample that ``percent`` of all samples do not exceed."""
    return sorted(samples)[max(0, math.ceil(len(samples) * percent / 100) - 1)]


async def latency(mechanism: Mechanism, into: Latency, repeats: int) -> None:
    """Await one kernel after another and add to ``into``."""
    duration_ns = into.kernel_us * 1000
    await mechanism.each(duration_ns, min(WARM_UP, repeats))
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    kernels.durations_ns.clear()
    samples = await mechanism.each(duration_ns, repeats)
    into.cpu_ns += time.process_time_ns() - cpu
    into.wall_ns += time.perf_counter_ns() - wall
    durations = kernels.durations_ns or [duration_ns] * repeats
    into.excess_us += [(sample - duration) / 1000 for sample, duration in zip(samples, durations, strict=True)]


async def cpu_percent(mechanism: Mechanism, kernel_us: int) -> float:
    """Return the CPU that one kernel costs, from its launch to the end of the await."""
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    await mechanism.each(kernel_us * 1000, 1)
    return 100 * (time.process_time_ns() - cpu) / (time.perf_counter_ns() - wall)


async def throughput(mechanism: Mechanism, into: Throughput, seconds: float) -> None:
    """Let tasks await empty kernels for so long and add to ``into``."""
    into.rates.append(await rate(mechanism, into.tasks, seconds))


async def rate(mechanism: Mechanism, tasks: int, seconds: float) -> float:
    """Return how many awaits per second that many tasks make."""
    shift = Shift()
    start = time.perf_counter()
    loop = asyncio.get_running_loop()
    # From the loop's next turn on: its clock stands still within one, and may be late by then.
    loop.call_soon(loop.call_later, seconds, shift.end)
    done = await asyncio.gather(*(mechanism.worker(task % LANES, shift) for task in range(tasks)))
    return sum(done) / (time.perf_counter() - start)


async def held(into: Held, load: Awaitable[object]) -> None:
    """Watch how evenly the loop turns while ``load`` runs, and add to ``into``."""
    heartbeat = Heartbeat()
    await load
    into.longest_us = max(into.longest_us, heartbeat.stop() / 1000)


async def one_by_one(mechanism: Mechanism, kernel_us: int, repeats: int) -> None:
    """Be the load of single kernels, the loop running freely between them."""
    for _ in range(repeats):
        await mechanism.each(kernel_us * 1000, 1)
        await asyncio.sleep(0)


class Heartbeat:
    """A callback that runs once in each turn of the loop and keeps the longest gap."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._longest = 0
        self._last = time.perf_counter_ns()
        self._handle = self._loop.call_soon(self._beat)

    def _beat(self) -> None:
        now = time.perf_counter_ns()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        self._handle = self._loop.call_soon(self._beat)

    def stop(self) -> int:
        """End it and return the longest gap, the one up to now included, in nanoseconds."""
        self._handle.cancel()
        return max(self._longest, time.perf_counter_ns() - self._last)
