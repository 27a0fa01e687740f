"""How long it takes to cancel 10,000 awaits that are pending, on the host device, in any order.

Three ways to have so many: tasks that all await one operation, tasks that each await one of their own, and
operations that wait on the host and are cancelled themselves (``op.cancel()``), each with a task that awaits it.
What is timed is the loop's thread from the first ``cancel()`` until the last task has ended, without the time in which
other programs have the CPU; the tasks and operations are made before. Of the awaits, the first two ways, the slowest
order may take no more than the bar.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import statistics
import time
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.command import add_json, run

if TYPE_CHECKING:
    import aiooffload as ao

COUNT = 10_000
BAR_MS = 100.0
WAYS = ("one operation", "own operations", "op.cancel()")
ORDERS = ("first to last", "last to first", "shuffled")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="fewer rounds")
    effort.add_argument("--smoke", action="store_true", help="only see that it runs, with 200 awaits")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    return run("cancel", options, lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, as ``--json`` writes them."""
    import uvloop

    count, rounds = (200, 1) if options.smoke else (COUNT, 3 if options.quick else 7)
    rows: list[dict[str, Any]] = []
    for loop, factory in (("asyncio", asyncio.new_event_loop), ("uvloop", uvloop.new_event_loop)):
        with asyncio.Runner(loop_factory=factory) as runner:
            rows += [{"loop": loop, **row} for row in runner.run(_measure(count, rounds))]
    slowest = max(row["ms"] for row in rows if row["way"] != "op.cancel()")
    return {
        "rows": rows, "count": count, "rounds": rounds,
        "slowest_ms": slowest, "bar_ms": BAR_MS, "met": slowest <= BAR_MS,
    }  # fmt: skip


def show(figures: dict[str, Any], out: TextIO) -> None:
    from benchmarks.report import print_table

    print(f"ms to cancel {figures['count']:,} pending awaits, median of {figures['rounds']}", file=out)
    cells: dict[str, list[str]] = {}
    for row in figures["rows"]:
        cells.setdefault(f"{row['way']}, {row['loop']}", []).append(f"{row['ms']:.1f}")
    print_table(["", *ORDERS], cells, out)
    print(f"bar: {figures['bar_ms']:.0f} ms: {'met' if figures['met'] else 'MISSED'}", file=out)


async def _measure(count: int, rounds: int) -> list[dict[str, Any]]:
    import aiooffload as ao

    rows = []
    async with ao.Offload("host", lanes=4) as off:
        for way in WAYS:
            for order in ORDERS:
                samples = [await _cancel(off, way, order, count) for _ in range(rounds)]
                rows.append({"way": way, "order": order, "ms": round(statistics.median(samples), 2)})
    return rows


async def _cancel(off: ao.Offload, way: str, order: str, count: int) -> float:
    """Make so many awaits, cancel them, and return the milliseconds until all have ended."""
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    buffer = off.empty(1, "u8")
    made = [off.fill(buffer, 0, after=[gate]) for _ in range(1 if way == "one operation" else count)]
    operations = made * count if way == "one operation" else made
    tasks = [asyncio.create_task(operation.wait()) for operation in operations]
    await asyncio.sleep(0)
    targets: list[Any] = list(made if way == "op.cancel()" else tasks)
    if order == "last to first":
        targets.reverse()
    elif order == "shuffled":
        random.Random(0).shuffle(targets)
    gc.collect()
    gc.disable()
    start = time.thread_time()
    for target in targets:
        target.cancel()
    await asyncio.wait(tasks)
    elapsed = time.thread_time() - start
    gc.enable()
    if not all(task.cancelled() for task in tasks):
        raise RuntimeError("a cancelled await did not end so")
    gate.set_result(None)
    await off.drain()
    return 1e3 * elapsed
