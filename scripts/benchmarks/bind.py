"""What it costs to enqueue a launch: of off.launch, of a bound launch, and of other ways from Python.

The kernel takes two buffers and two scalars and does next to nothing. Launches are enqueued in bursts that
the device's queue has room for, all on one stream since they share a buffer; what counts is the time of a
burst over its launches, until it is enqueued, not until it has run. Ours, on a GPU, includes the mark by
which the loop learns of the end; of the peers only the one with an event has anything of the kind:

  launch         off.launch(kernel, grid=..., block=..., args=(a, x, y, n))
  bound          bound()
  changed        bound(a=...)
  driver         cuLaunchKernel of cuda.bindings, its parameters packed before
  driver, event  the same, and cuEventRecord
  cuda.core      launch(stream, config, kernel, a, x, y, n)
  cupy           RawKernel(grid, block, (a, x, y, n))

The peers are for GPUs, and those that are not installed are left out. Awaits per second are those of 512 tasks
that each launch and await in a loop, through 16 bound launches with buffers of their own.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.command import add_efforts, add_loop, device_of, loop_factory, run, say

if TYPE_CHECKING:
    from benchmarks.bind_ways import Way

BURST = 64
TASKS = 512
BARS = {"enqueue": 6.0, "awaits": 150_000.0}
"""Microseconds at most for a bound launch, and awaits per second at least; for GPUs."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    bursts: int
    """Bursts of each way in a round."""
    seconds: float
    """What a rate's measurement takes."""


FULL = Effort(rounds=5, bursts=300, seconds=1.0)
QUICK = Effort(rounds=3, bursts=60, seconds=0.3)
SMOKE = Effort(rounds=1, bursts=3, seconds=0.01)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_efforts(parser, FULL, QUICK, SMOKE, "a few seconds")
    add_loop(parser)


def main(options: argparse.Namespace) -> int:
    def measured() -> dict[str, Any]:
        with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
            device, name = runner.run(device_of(options.device))
            figures = {"device": device, "device_name": name, "loop": options.loop}
            return figures | runner.run(measure(device, options.effort))

    return run("bind", options, measured, show)


async def measure(device: str, effort: Effort) -> dict[str, Any]:
    """Return all figures but the device's name, as ``--json`` writes them."""
    from benchmarks import bind_ways
    from benchmarks.measure import percentile

    async with bind_ways.all_ways(device) as (ways, workers, missing):
        samples: dict[str, list[float]] = {way.name: [] for way in ways}
        rates: dict[str, list[float]] = {name: [] for name in workers}
        for number in range(effort.rounds):
            say(f"round {number + 1} of {effort.rounds}")
            first = number % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                samples[way.name] += await bursts(way, effort.bursts)
            for name, worker in workers.items():
                rates[name].append(await bind_ways.rate(worker, TASKS, effort.seconds))
    figures: dict[str, Any] = {
        "burst": BURST,
        "enqueue": [
            {"way": name, "p50_us": round(percentile(all_of, 50), 3), "p90_us": round(percentile(all_of, 90), 3)}
            for name, all_of in samples.items()
        ],
        "throughput": [
            {"way": name, "tasks": TASKS, "awaits_per_s": round(percentile(all_of, 50))}
            for name, all_of in rates.items()
        ],
        "missing": missing,
    }
    figures["bars"] = bars(figures) if device != "host" else []
    return figures


async def bursts(way: Way, count: int) -> list[float]:
    """Return what a launch cost in each of so many bursts, in microseconds."""
    for _ in range(2):  # the first knows no geometry yet
        way.burst(BURST)
        await way.settle()
    samples = []
    for _ in range(count):
        samples.append(way.burst(BURST) / BURST / 1000)
        await way.settle()
    return samples


def bars(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """Hold the figures of a GPU against what they have to reach."""
    enqueue = {row["way"]: row["p50_us"] for row in figures["enqueue"]}
    awaits = {row["way"]: row["awaits_per_s"] for row in figures["throughput"]}
    most, least = BARS["enqueue"], BARS["awaits"]
    rows = [(f"{way}, enqueue, us", enqueue[way], f"<= {most:g}", enqueue[way] <= most) for way in ("bound", "changed")]
    rows.append((f"bound, awaits/s, {TASKS} tasks", awaits["bound"], f">= {least:g}", awaits["bound"] >= least))
    return [{"figure": what, "measured": value, "bar": bar, "met": met} for what, value, bar, met in rows]


def show(figures: dict[str, Any], out: Any) -> None:
    """Print everything that was measured."""
    from benchmarks.report import print_table, ratio

    print(f"device {figures['device']} ({figures['device_name']}), loop {figures['loop']}", file=out)
    print(f"\nEnqueuing one of {figures['burst']} launches in a row, us", file=out)
    bound = next(row["p50_us"] for row in figures["enqueue"] if row["way"] == "bound")
    cells = {
        row["way"]: [f"{row['p50_us']:.2f}", f"{row['p90_us']:.2f}", ratio(row["p50_us"], bound)]
        for row in figures["enqueue"]
    }
    print_table(["", "p50", "p90", "over bound"], cells, out)
    for name, reason in figures["missing"].items():
        print(f"  {name}: {reason}", file=out)
    print("\nAwaits per second", file=out)
    rates = {row["way"]: [f"{row['awaits_per_s']:,}"] for row in figures["throughput"]}
    print_table(["", f"{TASKS} tasks"], rates, out)
    if figures["bars"]:
        print("\nBars", file=out)
    for row in figures["bars"]:
        print(f"  {row['figure']}: {row['measured']:,} {row['bar']} {'yes' if row['met'] else 'NO'}", file=out)
