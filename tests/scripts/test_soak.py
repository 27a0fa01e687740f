"""``scripts/soak``: a short run finds nothing, and what it looks for would be found."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import aiooffload as ao
from tests.scripts.support import load_script

ROOT = Path(__file__).resolve().parents[2]


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "_soak.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_short_run(loop: str) -> None:
    """No result is wrong and nothing leaks; the figures have the agreed keys; the seed is told."""
    done = soak("--device", "host", "--minutes", "0.04", "--seed", "7", "--loop", loop, "--json", "-")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["operations"] > 0
    assert all(type(figures[kind]) is int for kind in ("cancelled", "faults"))
    assert (figures["mismatches"], figures["leaks"], figures["problems"]) == (0, 0, [])
    assert (figures["seed"], figures["device"]) == (7, "host")
    assert "seed 7" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "abacus"], "abacus"),
        (["--minutes", "0"], "above 0"),
        (["--minutes", "x"], "invalid float"),
        (["--serve", "--device", "abacus"], "abacus"),
        (["--serve", "--device", "cuda:0,cuda:1"], "one device"),
        (["--serve", "--loop", "uvloop"], "--loop is not for --serve"),
        (["--serve", "--kill-every-s", "nan"], "above 0"),
        (["--kill-every-s", "5"], "for --serve"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    """What the user got wrong is said on standard error, with exit code 2."""
    done = soak(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module behind scripts/soak."""
    module = load_script(monkeypatch, "soak")
    for name in ("trials.acts", "aiooffload.drivers.host"):  # now: a loop must not read files
        importlib.import_module(name)
    return module


@pytest.mark.parametrize(
    ("field", "growth", "leaks"),
    [
        ("resident_bytes", 10 << 20, 0),
        ("resident_bytes", 50 << 20, 1),
        ("descriptors", 1, 1),
        ("threads", 2, 0),
        ("threads", 3, 1),
        ("device_bytes", 1, 1),
        ("handles", 1, 1),
    ],
)
def test_growth_is_a_leak(script: ModuleType, field: str, growth: int, leaks: int) -> None:
    """What has grown since the warm-up is a leak: anything of what is counted, much of memory."""
    from trials.world import Tally

    before = {"resident_bytes": 100 << 20, "device_bytes": 5, "descriptors": 9, "threads": 4, "handles": 3}
    prints = [script.Footprint(**before)] * 10
    tally = Tally()
    after = before | {field: before[field] + growth}
    late = [script.Footprint(**after)]
    assert script.compare(Tally(), prints + late) == 0  # it may be gone the next time
    assert script.compare(tally, prints + 3 * late) == (growth if "resident" in field else 0)
    assert (tally.leaks, len(tally.problems)) == (leaks, leaks)


@pytest.mark.allows_blocking("traces are written and read")
async def test_every_act(script: ModuleType) -> None:
    """Each act, several times: nothing is wrong, some work is cancelled, and some fails on purpose."""
    import random

    from trials import acts, kernels
    from trials.world import Tally, World

    tally = Tally()
    script.watch_loop(tally)
    async with ao.Offload("host", lanes={0: 3, -1: 1}, calling_lanes=2) as off:
        await off.load(*kernels.PLAIN, *kernels.CALLING)
        world: Any = World(off, "host", random.Random(5), tally)
        for act in list(acts.ACTS) * 4:
            await act(world)
    assert tally.problems == []
    assert tally.cancelled > 0
    assert tally.faults > 0


async def test_a_wrong_result_is_a_mismatch(script: ModuleType) -> None:
    """A device that leaves out a fill is found out by the acts that fill, and nothing else is blamed."""
    import random

    from trials import acts
    from trials.world import Tally, World

    from aiooffload.testing import FaultyDevice, open_offload

    device, tally = FaultyDevice(), Tally()
    async with open_offload(device, lanes={0: 2, -1: 1}) as off:
        world: Any = World(off, "host", random.Random(1), tally)
        await acts.fills(world)
        assert tally.mismatches == 0
        device.skip("enqueue_fill", times=100)
        await acts.fills(world)
    assert tally.problems == [problem for problem in tally.problems if problem.startswith("fills: ")]
    assert tally.mismatches == 1
