"""What a graph of kernels costs: dependencies on the device, and on the host.

A random graph of 1,000 kernels, each of which comes after up to two of all earlier ones, over 16 lanes:

  device    ours: all of it is submitted at once, with after=
  host      ours: a task for each kernel awaits what it comes after, and then its launch
  callback  the same tasks, with a Python callback from the driver and call_soon_threadsafe

What bounds it is the longest path through the graph, the work of each lane, or what it takes to enqueue
1,000 kernels that wait for nothing, whichever is longest.

The second part has one task await empty kernels, while another submits kernels of 1 ms as fast as it
can: with a lane leased, with lanes of a priority of its own, and on the lanes of everybody.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.command import add_efforts, loop_factory, run, say

if TYPE_CHECKING:
    import aiooffload as ao

LANES = 16
FLOOD_NS = 1_000_000
"""Longer than it takes to submit them, by far: else they would not pile up."""
DURATIONS_US = (400, 20)
PATHS = ("alone", "leased lane", "priority", "no lane of its own")
BOUND_BAR, CALLBACK_BAR = 1.2, 3.0


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    nodes: int
    rounds: int
    awaits: int
    """Awaits of the task beside the flood."""
    flood: int
    """Operations that wait all the time meanwhile."""


FULL = Effort(nodes=1000, rounds=9, awaits=2000, flood=1000)
QUICK = Effort(nodes=1000, rounds=3, awaits=500, flood=1000)
SMOKE = Effort(nodes=30, rounds=1, awaits=5, flood=20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_efforts(parser, FULL, QUICK, SMOKE, "some seconds")
    parser.add_argument("--seed", type=int, default=1, help="of the graph (default: %(default)s)")


def main(options: argparse.Namespace) -> int:
    def measured() -> dict[str, Any]:
        with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
            return runner.run(measure(options.device, options.effort, options.seed))

    return run("graph", options, measured, show)


# The graph


def random_graph(nodes: int, seed: int) -> list[list[int]]:
    """Return, for each node, the earlier ones that it comes after."""
    choice = random.Random(seed)
    return [choice.sample(range(node), min(node, choice.randint(0, 2))) for node in range(nodes)]


def longest_path(graph: list[list[int]]) -> int:
    """Return how many nodes it has."""
    length: list[int] = []
    for before in graph:
        length.append(1 + max((length[node] for node in before), default=0))
    return max(length)


# Measuring


async def measure(device: str, effort: Effort, seed: int) -> dict[str, Any]:
    """Return all figures, as ``--json`` writes them."""
    import aiooffload as ao
    from benchmarks.kernels import empty, spin

    graph = random_graph(effort.nodes, seed)
    async with ao.Offload(device, lanes=LANES, ordering="explicit", max_pending=1 << 20) as off:
        await off.load(empty, spin)
        label = off.properties.label
        async with callback_peer(label) as peer:
            ways = {
                "device": lambda ns: on_the_device(off, graph, ns),
                "host": lambda ns: on_the_host(graph, lambda node: off.launch(spin, grid=1, block=1, args=(ns,))),
                "callback": lambda ns: on_the_host(graph, peer(ns)),
            }
            walls = await in_turns(ways, effort.rounds)
        enqueue = [await enqueuing(off, effort.nodes) for _ in range(effort.rounds)]
        figures = {"device": label, "device_name": off.properties.name, "nodes": effort.nodes, "lanes": LANES}
    rows = []
    for us in DURATIONS_US:
        bounds = {
            "longest_path_ms": longest_path(graph) * us / 1000,
            "work_ms": effort.nodes * us / LANES / 1000,
            "enqueue_ms": round(statistics.median(enqueue), 3),
        }
        for way in ways:
            wall = statistics.median(walls[way, us])
            over = round(wall / max(bounds.values()), 3)
            rows.append({"kernel_us": us, "way": way, "wall_ms": round(wall, 3), "over_bound": over, **bounds})
    return {**figures, "rows": rows, "flood": await flood(device, effort)}


async def in_turns(
    ways: Mapping[str, Callable[[int], Awaitable[float]]], rounds: int
) -> dict[tuple[str, int], list[float]]:
    """Return wall times in ms by way and duration; the order changes with each round, and the first is a rehearsal."""
    walls: dict[tuple[str, int], list[float]] = {(way, us): [] for us in DURATIONS_US for way in ways}
    names = list(ways)
    for us in DURATIONS_US:
        for number in range(-1, rounds):
            first = number % len(names)
            for way in [*names[first:], *names[:first]]:
                say(f"{us} us, round {max(number, 0) + 1} of {rounds}: {way}")
                wall = await ways[way](us * 1000)
                if number >= 0:
                    walls[way, us].append(wall)
    return walls


async def on_the_device(off: ao.Offload, graph: list[list[int]], ns: int) -> float:
    """Submit everything at once."""
    from benchmarks.kernels import spin

    start = time.perf_counter()
    made: list[ao.Operation[None]] = []
    for before in graph:
        made.append(off.launch(spin, grid=1, block=1, args=(ns,), after=[made[node] for node in before]))
    await off.drain()
    return (time.perf_counter() - start) * 1000


async def on_the_host(graph: list[list[int]], launch: Callable[[int], Awaitable[None]]) -> float:
    """Let a task for each node await those before it."""
    start = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []

    async def run(node: int, before: list[int]) -> None:
        for other in before:
            await tasks[other]
        await launch(node)

    for node, before in enumerate(graph):
        tasks.append(asyncio.create_task(run(node, before)))
    await asyncio.gather(*tasks)
    return (time.perf_counter() - start) * 1000


async def enqueuing(off: ao.Offload, nodes: int) -> float:
    """Return what it takes, in ms, to submit kernels that wait for nothing."""
    from benchmarks.kernels import empty

    start = time.perf_counter()
    for _ in range(nodes):
        off.launch(empty, grid=1, block=32)
    wall = (time.perf_counter() - start) * 1000
    await off.drain()
    return wall


@asynccontextmanager
async def callback_peer(label: str) -> AsyncIterator[Callable[[int], Callable[[int], Awaitable[None]]]]:
    """Yield what makes, for a duration, what runs a node's kernel and waits for it."""
    if label == "host":
        from benchmarks import peers_host

        async with peers_host.Callback() as host:

            def host_runner(ns: int) -> Callable[[int], Awaitable[None]]:
                run = peers_host.kernel(ns)
                return lambda node: host.once(run)

            yield host_runner
        return
    from benchmarks import peers_cuda

    gpu = peers_cuda.Gpu(int(label.partition(":")[2]))
    try:
        async with peers_cuda.Callback(gpu) as peer:

            def runner(ns: int) -> Callable[[int], Awaitable[None]]:
                launch = peers_cuda.Launch(gpu, ns)

                async def run(node: int) -> None:
                    stream = gpu.streams[node % LANES]
                    launch.start(stream)
                    await peer.wait(stream)

                return run

            yield runner
    finally:
        gpu.close()


# Beside a flood


async def flood(device: str, effort: Effort) -> list[dict[str, Any]]:
    """Return how long an await of an empty kernel takes, alone and beside a task that floods the lanes."""
    import aiooffload as ao
    from benchmarks.kernels import empty, spin

    rows = []
    async with ao.Offload(device, lanes={0: LANES - 2, -1: 2}, max_pending=2 * effort.flood) as off:
        await off.load(empty, spin)
        for path in PATHS:
            say(f"flood: {path}")
            stop = asyncio.Event()
            flooding = asyncio.create_task(submit_until(off, stop)) if path != "alone" else None
            if flooding is not None:
                await until_flooded(off, effort.flood)
            if path in ("alone", "leased lane"):
                async with off.lease() as lane:
                    samples = await await_each(lambda: off.launch(empty, grid=1, block=32, lane=lane), effort.awaits)
            elif path == "priority":
                samples = await await_each(lambda: off.launch(empty, grid=1, block=32, priority=-1), effort.awaits)
            else:
                samples = await await_each(
                    lambda: off.launch(empty, grid=1, block=32), max(effort.awaits // 100, 3), off
                )
            stop.set()
            if flooding is not None:
                await flooding
            await off.drain()
            ordered = sorted(samples)
            rows.append(
                {
                    "path": path,
                    "p50_us": round(ordered[len(ordered) // 2], 1),
                    "p99_us": round(ordered[len(ordered) * 99 // 100], 1),
                }
            )
    return rows


async def until_flooded(off: ao.Offload, count: int) -> None:
    """Wait until operations wait for every lane."""
    while off.stats()["pending"] < count:  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0)


async def submit_until(off: ao.Offload, stop: asyncio.Event) -> None:
    """Keep as many operations waiting as there is room for."""
    import aiooffload as ao
    from benchmarks.kernels import spin

    while not stop.is_set():
        try:
            for _ in range(16):
                off.launch(spin, grid=1, block=1, args=(FLOOD_NS,))
        except ao.WouldBlock:
            await off.room()
        await asyncio.sleep(0)


async def await_each(launch: Callable[[], Awaitable[None]], count: int, off: ao.Offload | None = None) -> list[float]:
    """Return how long each took, in us; ``off``: its room is waited for, which counts."""
    import aiooffload as ao

    samples = []
    for _ in range(count):
        start = time.perf_counter()
        while True:
            try:
                await launch()
                break
            except ao.WouldBlock:
                assert off is not None
                await off.room()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples


# Showing


def show(figures: dict[str, Any], out: TextIO) -> None:
    """Print the tables, and whether the bars are met."""
    print(f"device {figures['device']} ({figures['device_name']}), {figures['nodes']} kernels, {LANES} lanes", file=out)
    for us in DURATIONS_US:
        rows = {row["way"]: row for row in figures["rows"] if row["kernel_us"] == us}
        first = rows["device"]
        print(
            f"\nKernels of {us} us: longest path {first['longest_path_ms']:.1f} ms, work of a lane "
            f"{first['work_ms']:.1f} ms, enqueuing {first['enqueue_ms']:.1f} ms",
            file=out,
        )
        for way, row in rows.items():
            ratio = row["wall_ms"] / first["wall_ms"]
            print(
                f"  {way:9} {row['wall_ms']:8.1f} ms  {row['over_bound']:5.2f} x bound  {ratio:5.2f} x device", file=out
            )
    print("\nAwait of an empty kernel, us", file=out)
    for row in figures["flood"]:
        what = row["path"] if row["path"] == "alone" else f"beside a flood, {row['path']}"
        print(f"  {what:36} p50 {row['p50_us']:9,.1f}  p99 {row['p99_us']:9,.1f}", file=out)
    walls = {(row["way"], row["kernel_us"]): row for row in figures["rows"]}
    slow, fast = DURATIONS_US
    print("\nBars", file=out)
    over = walls["device", slow]["over_bound"]
    print(f"  {slow} us: {over:.2f} x the bound, bar <= {BOUND_BAR}: {yes_or_no(over <= BOUND_BAR)}", file=out)
    ratio = walls["callback", fast]["wall_ms"] / walls["device", fast]["wall_ms"]
    met = yes_or_no(ratio >= CALLBACK_BAR)
    print(f"  {fast} us: {ratio:.1f} x faster than callback, bar >= {CALLBACK_BAR}: {met}", file=out)


def yes_or_no(met: bool) -> str:
    return "yes" if met else "NO"
