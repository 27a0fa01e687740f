"""How the ways to answer a kernel's calls are measured, each step under a time limit."""

from __future__ import annotations

import math
import os
import statistics
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from benchmarks.measure import percentile

WARM_UP = 50
"""Calls before those that count."""
CALLS_LIMIT = 20_000
"""Calls of one kernel whose times are kept."""
FIRST_CALLS = 256
GROWTH = 64
"""A first try says little of how many calls a second has; the next has at most so many times more."""
Values = dict[str, float]


class Served(ABC):
    """A way to answer the calls of a running kernel. All times are in nanoseconds of the device's clock."""

    name: ClassVar[str]
    label: ClassVar[str]
    latency: ClassVar[bool] = True
    """Whether there is a reply, so that a round trip can be measured."""

    @abstractmethod
    async def calls(self, count: int, silence_ns: int = 0) -> Sequence[int]:
        """Let one thread of a kernel call ``count`` times, after a silence each; return how long each took."""

    @abstractmethod
    async def rate(self, warps: int, count: int) -> int:
        """Let one lane of each warp call ``count`` times; return the time from the first start to the last end."""


async def round_trip(served: Served, count: int) -> Values:
    """Measure calls of one thread, one right after the other."""
    samples = (await served.calls(WARM_UP + count))[WARM_UP:]
    return {
        "p50_us": percentile(samples, 50) / 1000,
        "p99_us": percentile(samples, 99) / 1000,
        "mean_us": statistics.fmean(samples) / 1000,
        "clock_step_ns": math.gcd(*map(int, samples)),
    }


async def rate(served: Served, warps: int, seconds: float, known: dict[tuple[str, int], int]) -> Values:
    """Measure calls per second, with as many calls as take about ``seconds``; ``known`` keeps how many those are."""
    count = known.get((served.name, warps), 0)
    if count:
        return {"calls_per_s": warps * count / await served.rate(warps, count) * 1e9}
    count = max(1, FIRST_CALLS // warps)
    while (took := await served.rate(warps, count)) < seconds * 0.5e9:
        count = max(count + 1, int(count * min(GROWTH, seconds * 1e9 / took)))
    known[served.name, warps] = count
    return {"calls_per_s": warps * count / took * 1e9}


async def after_silence(served: Served, silence_us: int, count: int) -> Values:
    """Measure calls that come after a silence, and the CPU that the whole takes."""
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    samples = (await served.calls(1 + count, silence_us * 1000))[1:]
    cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
    return {"excess_p50_us": percentile(samples, 50) / 1000, "cpu_percent": 100 * cpu / wall}


async def resident(served: Served, silence_ms: int) -> Values:
    """Measure the CPU while a kernel is there that could call, but keeps silent until its one call at the end."""
    wall, cpu = time.perf_counter_ns(), time.process_time_ns()
    await served.calls(1, silence_ms * 1_000_000)
    return {"cpu_percent": 100 * (time.process_time_ns() - cpu) / (time.perf_counter_ns() - wall)}


class Watch:
    """Ends the process when a step hangs where no exception can get at it, such as in a driver's call."""

    def __init__(self, last_words: Callable[[], None]) -> None:
        self._last_words = last_words

    @contextmanager
    def step(self, what: str, limit_s: float) -> Iterator[None]:
        timer = threading.Timer(limit_s, self._give_up, (what, limit_s))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _give_up(self, what: str, limit_s: float) -> None:
        print(f"scripts/bench reverse: gave up: {what} hangs since {limit_s:.0f} s", file=sys.stderr, flush=True)
        try:
            self._last_words()
        finally:
            sys.stdout.flush()
            os._exit(3)


class Recorder:
    """All figures, one sample per round; every one is printed when it comes."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, int], list[Values]]] = {}
        self.problems: list[dict[str, str]] = []

    def add(self, section: str, key: tuple[str, int], what: str, values: Values) -> None:
        self._samples.setdefault(section, {}).setdefault(key, []).append(values)
        say(f"{what}: {', '.join(f'{name} {value:,.6g}' for name, value in values.items())}")

    def fail(self, what: str, problem: str) -> None:
        self.problems.append({"step": what, "problem": problem})
        say(f"{what}: FAILED: {problem}")

    def rows(self, section: str, at: str | None) -> list[dict[str, Any]]:
        """Return the medians over the rounds; ``at`` is what the second part of the key is called."""
        return [
            {"name": name, **({at: place} if at else {}), **medians(samples)}
            for (name, place), samples in self._samples.get(section, {}).items()
        ]


def medians(samples: Sequence[Values]) -> Values:
    return {key: round(statistics.median(values[key] for values in samples), 3) for key in samples[0]}


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
