"""A million launches in a row leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.gpu.support import add, descriptor_count, native_threads, nothing, resident_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(400)]

LAUNCHES = 1_000_000
TASKS = 256
GROWTH_BYTES = 5_000_000


async def launches(off: ao.Offload, x: ao.Buffer, count: int) -> None:
    """Launch and await ``count`` kernels from many tasks; every 50th has a buffer."""

    async def task(number: int) -> None:
        for turn in range(count // TASKS):
            if (turn + number) % 50:
                await off.launch(nothing, grid=1, block=32)
            else:
                await off.launch(add, grid=1, block=1, args=(x, 1))

    await asyncio.gather(*map(task, range(TASKS)))


async def copies(off: ao.Offload, count: int) -> None:
    """Copy in and out ``count`` times, small and large in turns."""
    for number in range(count):
        data = np.full(1000 if number % 10 else 300_000, number, np.float32)
        assert (await off.get(await off.put(data)))[-1] == number


@pytest.mark.allows_blocking("it counts descriptors and threads in /proc")
@pytest.mark.parametrize("wake", ["hybrid", "interrupt"])
async def test_million_launches(wake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Resident memory grows by less than 5 MB, and descriptors, threads and buffers stay as many as they were."""
    total = LAUNCHES if wake == "hybrid" else LAUNCHES // 5
    async with ao.Offload("cuda:0", lanes=16, wake=wake) as off:
        x = off.zeros(1, np.uint64)

        def figures() -> dict[str, int]:
            gc.collect()
            stats = off.stats()
            return {
                "descriptors": descriptor_count(),
                "threads": native_threads(),
                "buffers": stats["buffers"],
                "in_flight": stats["in_flight"],
                "pending": stats["pending"],
                "resident": resident_bytes(),
            }

        await launches(off, x, 60_000)
        await copies(off, 200)
        before = figures()
        start = time.perf_counter()
        for _ in range(10):
            await launches(off, x, total // 10)
            await copies(off, 50)
        seconds = time.perf_counter() - start
        after = figures()
        growth = after.pop("resident") - before.pop("resident")
        with capsys.disabled():
            print("\n" + json.dumps({"wake": wake, "launches": total, "seconds": seconds, "growth_bytes": growth}))
        assert after == before
        assert growth < GROWTH_BYTES
