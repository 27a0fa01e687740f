"""How soon every await learns of a fault.

A lost GPU stays lost for its process, so each fault happens in a process of its own, which is this file.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[folder]) for folder in (1, 2)]

import aiooffload as ao
from benchmarks.kernels import fault, spin
from benchmarks.mechanism import LANES

IN_FLIGHT = 1_000
FAULT_AFTER_NS = 30_000_000
"""Long enough for all the launches to be made before the fault."""
OTHERS_TAKE_NS = 60_000_000
KINDS = {"illegal address": 0, "trap": 1}
LIMIT_S = 60


def measure(device: str, loop: str) -> list[dict[str, Any]]:
    """Return a row for each kind of fault; none on the host device, which has no such faults."""
    if device == "host":
        return []
    return [_measure(kind, device, loop) for kind in KINDS]


def _measure(kind: str, device: str, loop: str) -> dict[str, Any]:
    command = [sys.executable, __file__, kind, device, loop]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"fault": kind, "problem": f"killed after {LIMIT_S} s"}
    try:
        return {"fault": kind, **json.loads(done.stdout)}
    except json.JSONDecodeError:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return {"fault": kind, "problem": f"ended with {done.returncode}: {lines[-1]}"}


async def lose(kind: str, device: str) -> dict[str, Any]:
    """Lose the device with many launches in flight and return what the awaits saw."""
    off = ao.Offload(device, lanes=LANES)
    await off.__aenter__()
    await off.load(spin, fault)
    await asyncio.gather(*(off.launch(spin, grid=1, block=1, args=(1000,)).wait() for _ in range(64)))
    started = time.perf_counter()
    faulty = off.launch(fault, grid=1, block=1, args=(FAULT_AFTER_NS, 8, KINDS[kind]))
    others = [off.launch(spin, grid=1, block=1, args=(OTHERS_TAKE_NS,)) for _ in range(IN_FLIGHT - 1)]
    submitted = time.perf_counter()
    ends = await asyncio.gather(*map(end_of, [faulty, *others]))
    closing = time.perf_counter()
    await off.aclose()
    closed = time.perf_counter()
    return {
        "in_flight": IN_FLIGHT,
        "last_await_ms": round((max(when for when, _ in ends) - started) * 1e3 - FAULT_AFTER_NS / 1e6, 1),
        "first_await_ms": round((min(when for when, _ in ends) - started) * 1e3 - FAULT_AFTER_NS / 1e6, 1),
        "lost": sum(outcome == "DeviceLostError" for _, outcome in ends),
        "other_outcomes": sorted({outcome for _, outcome in ends} - {"DeviceLostError"}),
        "submitting_ms": round((submitted - started) * 1e3, 1),
        "aclose_ms": round((closed - closing) * 1e3, 1),
    }


async def end_of(operation: ao.Operation[None]) -> tuple[float, str]:
    """Return when an operation ended and how."""
    try:
        await operation
    except ao.OffloadError as error:
        return time.perf_counter(), type(error).__name__
    return time.perf_counter(), "done"


def main() -> None:
    from benchmarks.command import loop_factory

    kind, device, loop = sys.argv[1:]
    with asyncio.Runner(loop_factory=loop_factory(loop)) as runner:
        print(json.dumps(runner.run(lose(kind, device))))


if __name__ == "__main__":
    main()
