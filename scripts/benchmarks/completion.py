"""How soon a coroutine learns that its kernel is done, and what the waiting costs.

Measures aiooffload with each wake policy (hybrid, interrupt, poll) beside other ways to await a kernel:

  sync      cuStreamSynchronize, spinning in the loop's thread: the lower bound
  executor  run_in_executor with cuStreamSynchronize
  sleep0    cuStreamQuery and asyncio.sleep(0) in turn
  callback  a Python callback from the driver and call_soon_threadsafe, as numba's async_done does it
  usleep    cuStreamQuery and usleep(1) in turn, in C, as GCC's libgomp does it

On the host device the kernels are Python functions, which the peers call directly (sync), through a
pool of 16 threads (executor, sleep0, usleep) or on 16 threads that use call_soon_threadsafe (callback).

The excess is the time from before the launch until the awaiting code runs, less the kernel's duration:
it includes the launch. On a GPU the duration is what the kernel was asked for (it watches the clock), on
the host device what the kernel measured. CPU is that of the process; a kernel of the host device sleeps
and then spins for its last 40 us, and this counts as well.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.command import add_efforts, add_loop, check_target, device_of, loop_factory, run, say

if TYPE_CHECKING:
    from benchmarks.mechanism import Mechanism

SAMPLES = {0: 3000, 20: 2000, 100: 1500, 1_000: 400, 10_000: 80}
"""Awaits in each round, by the kernel's duration in microseconds."""
TASKS = (1, 16, 512)
LONG_KERNEL_US = 300_000
HELD_KERNEL_US = 10_000


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    scale: float
    """Share of :data:`SAMPLES` and of a second for each throughput."""
    least: int = 10
    """Samples at least."""
    long_kernels: int = 1
    """Runs of the long kernel in each round."""

    def samples(self, kernel_us: int) -> int:
        return max(self.least, int(SAMPLES[kernel_us] * self.scale))


FULL = Effort(rounds=3, scale=1.0, long_kernels=3)
QUICK = Effort(rounds=1, scale=0.15)
SMOKE = Effort(rounds=1, scale=0.01, least=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_efforts(parser, FULL, QUICK, SMOKE, "under 30 seconds")
    add_loop(parser)
    parser.add_argument("--plot", metavar="FILE.png", help="draw excess against CPU")
    parser.add_argument("--memory", action="store_true", help="also: what many launches in a row leave behind")
    parser.add_argument("--launches", type=int, default=1_000_000, help="how many those are (default: %(default)s)")
    parser.add_argument("--faults", action="store_true", help="also: how soon 1,000 awaits learn of a fault (GPU)")
    parser.add_argument("--no-timings", action="store_true", help="leave out everything but --memory and --faults")


def main(options: argparse.Namespace) -> int:
    from benchmarks import chart, report

    def measure() -> dict[str, Any]:
        check_target(options.plot)
        return measure_all(options)

    def show(figures: dict[str, Any], out: TextIO) -> None:
        report.show(figures, out)
        if options.plot and figures["rows"]:
            chart.plot(figures, options.plot)
            print(f"\nplot: {options.plot}", file=out)

    return run("completion", options, measure, show)


def measure_all(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, as ``--json`` writes them."""
    from benchmarks import faults, memory

    figures: dict[str, Any] = {"rows": [], "throughput": []}
    with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
        figures["device"], figures["device_name"] = runner.run(device_of(options.device))
        figures["loop"] = options.loop
        if not options.no_timings:
            figures |= runner.run(Timings(figures["device"], options.effort).run())
        if options.memory:
            say(f"{options.launches:,} launches in a row")
            figures["memory"] = runner.run(memory.measure(figures["device"], options.launches))
    if options.faults:
        say("faults")
        figures["faults"] = faults.measure(figures["device"], options.loop)
    return figures


@asynccontextmanager
async def all_mechanisms(device: str) -> AsyncIterator[list[Mechanism]]:
    """Yield ours and the peers of a device."""
    from benchmarks import ours

    if device == "host":
        from benchmarks import peers_host

        yield [*ours.mechanisms(device), *peers_host.mechanisms()]
        return
    from benchmarks import peers_cuda

    gpu = peers_cuda.Gpu(int(device.partition(":")[2]))
    try:
        yield [*ours.mechanisms(device), *peers_cuda.mechanisms(gpu)]
    finally:
        gpu.close()


class Timings:
    """All mechanisms side by side: in each round each of them is measured once, the first a different one."""

    def __init__(self, device: str, effort: Effort) -> None:
        from benchmarks.measure import Held, Latency, Throughput

        self._device = device
        self._effort = effort
        self._latency: dict[tuple[str, int], Latency] = {}
        self._throughput: dict[tuple[str, int], Throughput] = {}
        self._held: dict[tuple[str, str], Held] = {}
        self._long: dict[str, list[float]] = {}

    async def run(self) -> dict[str, Any]:
        async with all_mechanisms(self._device) as mechanisms:
            for number in range(self._effort.rounds):
                for mechanism in [*mechanisms[number:], *mechanisms[:number]]:
                    self._round = f"round {number + 1} of {self._effort.rounds}: {mechanism.name}"
                    async with mechanism:
                        await self._measure(mechanism)
        order = {mechanism.name: place for place, mechanism in enumerate(mechanisms)}
        in_order = sorted(self._throughput.values(), key=lambda one: (one.tasks, order[one.mechanism]))
        return {
            "rows": [
                one.row()
                for one in sorted(self._latency.values(), key=lambda one: (one.kernel_us, order[one.mechanism]))
            ],
            "throughput": [one.row() for one in in_order],
            "loop_held": [
                one.row() for one in sorted(self._held.values(), key=lambda one: (one.load, order[one.mechanism]))
            ],
            "cpu_during_300ms": {name: round(statistics.median(self._long[name]), 2) for name in order},
        }

    async def _measure(self, mechanism: Mechanism) -> None:
        from benchmarks import measure

        name, effort = mechanism.name, self._effort
        for kernel_us in SAMPLES:
            say(f"{self._round}, {kernel_us} us")
            into = self._latency.setdefault((name, kernel_us), measure.Latency(name, kernel_us))
            await measure.latency(mechanism, into, effort.samples(kernel_us))
        for _ in range(effort.long_kernels):
            say(f"{self._round}, {LONG_KERNEL_US // 1000} ms")
            self._long.setdefault(name, []).append(await measure.cpu_percent(mechanism, LONG_KERNEL_US))
        load = f"kernels of {HELD_KERNEL_US // 1000} ms"
        say(f"{self._round}, {load}")
        held = self._held.setdefault((name, load), measure.Held(name, load))
        await measure.held(held, measure.one_by_one(mechanism, HELD_KERNEL_US, effort.least))
        for tasks in TASKS if mechanism.concurrent else ():
            load = f"{tasks} task" + "s" * (tasks > 1)
            say(f"{self._round}, {load}")
            rate = self._throughput.setdefault((name, tasks), measure.Throughput(name, tasks))
            await measure.throughput(mechanism, rate, effort.scale)
            held = self._held.setdefault((name, load), measure.Held(name, load))
            await measure.held(held, measure.rate(mechanism, tasks, effort.scale / 4))
