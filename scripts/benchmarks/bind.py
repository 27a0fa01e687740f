"""What it costs to enqueue a launch: of off.launch, of a bound launch, and of other ways from Python.

The kernel takes two buffers and two scalars and does next to nothing. Launches are enqueued in bursts that
the device's queue has room for, all on one stream since they share a buffer; what counts is the time of a
burst over its launches, until it is enqueued, not until it has run. Ours, on a GPU, includes the mark by
which the loop learns of the end; of the peers only the one with an event has anything of the kind:

  launch         off.launch(kernel, grid=..., block=..., args=(a, x, y, n))
  bound          bound()
  changed        bound(a=...)
  coarse         bound(coarse=True), which has no mark
  driver         cuLaunchKernel of cuda.bindings, its parameters packed before
  driver, event  the same, and cuEventRecord
  cuda.core      launch(stream, config, kernel, a, x, y, n)
  cupy           RawKernel(grid, block, (a, x, y, n))

The peers are for GPUs, and those that are not installed are left out. Launches per second are those of 512 tasks
that each launch and await in a loop, through 16 bound launches with buffers of their own; of coarse ones, of 16
tasks that await the last of 64, which is not.
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
BAR_US = 6.0
BARS_PER_S = {"bound": 150_000, "coarse": 190_000}
"""Microseconds at most to enqueue a bound launch, and launches per second at least; for GPUs."""


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

    async with bind_ways.all_ways(device) as (ways, loads, missing):
        samples: dict[str, list[float]] = {way.name: [] for way in ways}
        rates: dict[str, list[float]] = {name: [] for name in loads}
        for number in range(effort.rounds):
            say(f"round {number + 1} of {effort.rounds}")
            first = number % len(ways)
            for way in [*ways[first:], *ways[:first]]:
                samples[way.name] += await bursts(way, effort.bursts)
            for name, load in loads.items():
                rates[name].append(await load.rate(effort.seconds))
    figures: dict[str, Any] = {
        "burst": BURST,
        "enqueue": [
            {"way": name, "p50_us": round(percentile(all_of, 50), 3), "p90_us": round(percentile(all_of, 90), 3)}
            for name, all_of in samples.items()
        ],
        "throughput": [
            {"way": name, "tasks": loads[name].tasks, "launches_per_s": round(percentile(all_of, 50))}
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
    rows: list[tuple[str, float, str, bool]] = [
        (f"{way}, enqueue, us", enqueue[way], f"<= {BAR_US:g}", enqueue[way] <= BAR_US) for way in ("bound", "changed")
    ]
    for row in figures["throughput"]:
        if least := BARS_PER_S.get(row["way"]):
            name, measured = f"{row['way']}, launches/s, {row['tasks']} tasks", row["launches_per_s"]
            rows.append((name, measured, f">= {least:,}", measured >= least))
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
    print("\nLaunches per second, awaited", file=out)
    rates = {row["way"]: [f"{row['tasks']}", f"{row['launches_per_s']:,}"] for row in figures["throughput"]}
    print_table(["", "tasks", "launches/s"], rates, out)
    if figures["bars"]:
        print("\nBars", file=out)
    for row in figures["bars"]:
        print(f"  {row['figure']}: {row['measured']:,} {row['bar']} {'yes' if row['met'] else 'NO'}", file=out)
