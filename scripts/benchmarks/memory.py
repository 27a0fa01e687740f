"""What many launches leave behind: resident memory, descriptors, threads."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import aiooffload as ao
from benchmarks.kernels import empty
from benchmarks.mechanism import LANES

TASKS = 512
WARM_UP = 40_000


async def measure(device: str, launches: int) -> dict[str, Any]:
    """Launch empty kernels, half of them awaited one by one and half by many tasks."""
    async with ao.Offload(device, lanes=LANES) as off:
        await off.load(empty)
        await _run(off, min(WARM_UP, launches))
        before = footprint()
        await _run(off, launches)
        after = footprint()
    grown = after["resident_bytes"] - before["resident_bytes"]
    return {"launches": launches, "grown_mb": round(grown / 1e6, 3), "before": before, "after": after}


def footprint() -> dict[str, int]:
    """Return what the process holds now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


async def _run(off: ao.Offload, launches: int) -> None:
    await _worker(off, launches // 2)
    async with asyncio.TaskGroup() as group:
        for task in range(TASKS):
            group.create_task(_worker(off, (launches - launches // 2 + task) // TASKS))


async def _worker(off: ao.Offload, launches: int) -> None:
    for _ in range(launches):
        await off.launch(empty, grid=1, block=32)
