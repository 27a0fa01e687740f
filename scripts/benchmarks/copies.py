"""How fast a strided copy is, beside a contiguous one of the same bytes.

Copies half of the columns of a matrix of 4096 x 4096 float32 to the same columns of another, in each
direction, in three ways:

  1D        the same bytes, contiguous on both sides
  strided   off.copy of the columns: one driver call, or through staging where the host side is pageable
  rows      a 1D copy for each row: driver calls in a loop, with nothing else of ours around them; where the
            host side is pageable, an off.copy for each row

Several copies wait on the host behind one future and are timed from its result to the end of the last, so that
submitting them is not measured. Rates are of the bytes copied, each counted once; they are medians.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.command import add_efforts, device_of, loop_factory, run, say

if TYPE_CHECKING:
    import aiooffload as ao

DIRECTIONS = ("device to device", "pinned to device", "device to pinned", "pageable to device", "device to pageable")
WAYS = ("1D", "strided", "rows")
LEAST_PERCENT = 80


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    size: int = 4096
    """Rows and columns of the matrices."""
    copies: int = 10
    """In a measurement; a tenth of them where the host side is pageable."""


FULL = Effort(rounds=15)
QUICK = Effort(rounds=5)
SMOKE = Effort(rounds=1, size=256)

Measure = Callable[[], Awaitable[float]]
"""Returns the seconds that one copy took."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_efforts(parser, FULL, QUICK, SMOKE, "under 30 seconds")


def main(options: argparse.Namespace) -> int:
    from benchmarks import copies_report

    def measured() -> dict[str, Any]:
        with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
            device, name = runner.run(device_of(options.device))
            rows = runner.run(measure(device, options.effort))
        bars = copies_report.bars(rows, LEAST_PERCENT) if device != "host" else []
        size = options.effort.size
        return {"device": device, "device_name": name, "loop": "uvloop", "size": size, "rows": rows, "bars": bars}

    return run("copies", options, measured, copies_report.show)


async def measure(device: str, effort: Effort) -> list[dict[str, Any]]:
    """Measure each way in each direction, in turns, so that what changes with time hits all of them."""
    import aiooffload as ao

    seconds: dict[tuple[str, str], list[float]] = {(one, way): [] for one in DIRECTIONS for way in WAYS}
    async with ao.Offload(device, lanes=1) as off:
        with driver_rows(device, effort) as rows:
            ways = await measures(off, effort, rows)
            for number in range(effort.rounds + 1):
                for direction, way in seconds:
                    say(f"round {number} of {effort.rounds}: {direction}, {way}")
                    took = await ways[direction, way]()
                    if number:  # the first one is to warm up
                        seconds[direction, way].append(took)
    say("")
    nbytes = effort.size * (effort.size // 2) * 4
    return [row(one, {way: nbytes / statistics.median(seconds[one, way]) / 1e9 for way in WAYS}) for one in DIRECTIONS]


def row(direction: str, rates: dict[str, float]) -> dict[str, Any]:
    return {
        "direction": direction,
        "contiguous_gb_s": round(rates["1D"], 6),
        "strided_gb_s": round(rates["strided"], 6),
        "rows_gb_s": round(rates["rows"], 6),
        "percent": round(100 * rates["strided"] / rates["1D"], 1),
        "rows_percent": round(100 * rates["rows"] / rates["1D"], 3),
    }


async def measures(
    off: ao.Offload, effort: Effort, rows: dict[str, Callable[[], float]]
) -> dict[tuple[str, str], Measure]:
    """Return what is measured, by direction and way."""
    import numpy as np

    size, half = effort.size, effort.size // 2
    a, b = off.zeros((size, size), np.float32), off.zeros((size, size), np.float32)
    pinned, flat = await off.pinned((size, size), np.float32), await off.pinned((size, half), np.float32)
    pinned.array[:], flat.array[:] = 1, 1
    host = np.ones((size, size), np.float32)
    columns, top, extent = (slice(None), slice(0, half)), slice(0, half), (size, half)
    # For each direction destination and source of either kind: contiguous, then the columns.
    pairs: dict[str, tuple[Any, ...]] = {
        DIRECTIONS[0]: (a[top], b[top], a[columns], b[columns], None),
        DIRECTIONS[1]: (a[top], flat, a, pinned, extent),
        DIRECTIONS[2]: (flat, a[top], pinned, a, extent),
        DIRECTIONS[3]: (a[top], host[top], a[columns], host[columns], None),
        DIRECTIONS[4]: (host[top], a[top], host[columns], a[columns], None),
    }
    found: dict[tuple[str, str], Measure] = {}
    for direction, (dst, src, strided_dst, strided_src, box) in pairs.items():
        count = effort.copies if direction in rows else max(effort.copies // 10, 1)
        found[direction, "1D"] = timed(off, dst, src, None, count)
        found[direction, "strided"] = timed(off, strided_dst, strided_src, box, count)
        found[direction, "rows"] = (
            blocking(rows[direction]) if direction in rows else by_row(off, strided_dst, strided_src)
        )
    return found


def timed(off: ao.Offload, dst: Any, src: Any, extent: tuple[int, int] | None, count: int) -> Measure:
    async def run() -> float:
        start = asyncio.get_running_loop().create_future()
        operations = [off.copy(dst, src, extent, after=() if i else (start,)) for i in range(count)]
        await asyncio.sleep(0)
        began = time.perf_counter()
        start.set_result(None)
        await operations[-1]
        return (time.perf_counter() - began) / count

    return run


def by_row(off: ao.Offload, dst: Any, src: Any) -> Measure:
    async def run() -> float:
        pairs = [(dst[i], src[i]) for i in range(len(dst))]
        began = time.perf_counter()
        for to, at in pairs:
            operation = off.copy(to, at)
        await operation
        return time.perf_counter() - began

    return run


def blocking(rows: Callable[[], float]) -> Measure:
    async def run() -> float:
        return rows()

    return run


@contextmanager
def driver_rows(label: str, effort: Effort) -> Iterator[dict[str, Callable[[], float]]]:
    """Yield, by direction, what copies the columns with one call of the driver for each row."""
    kind, _, index = label.partition(":")
    device = importlib.import_module(f"aiooffload.drivers.{kind}").open_device(int(index or 0))
    pitch, width = effort.size * 4, effort.size // 2 * 4
    a, b = device.allocate(effort.size * pitch), device.allocate(effort.size * pitch)
    memory, stream = device.register(effort.size * pitch), device.create_stream()
    memory.array[:] = 1
    for block in (a, b):  # pages that nobody wrote would be read from the cache
        stream.enqueue_fill(block.address, b"\1", block.nbytes)

    def copy(destination: int, source: int) -> Callable[[], float]:
        def run() -> float:
            began = time.perf_counter()
            for distance in range(0, effort.size * pitch, pitch):
                stream.enqueue_copy(destination + distance, source + distance, width)
            while not stream.query():
                time.sleep(0)  # the host device's streams are threads that want the interpreter
            return time.perf_counter() - began

        return run

    try:
        yield {
            DIRECTIONS[0]: copy(a.address, b.address),
            DIRECTIONS[1]: copy(a.address, memory.device_address),
            DIRECTIONS[2]: copy(memory.device_address, a.address),
        }
    finally:
        stream.close()
        device.free(a)
        device.free(b)
        device.unregister(memory)
        device.close()
