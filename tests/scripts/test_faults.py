"""``scripts/faults``: a part of the sweep finds nothing, and the shape of its figures."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import deque
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts.support import load_script

ROOT = Path(__file__).resolve().parents[2]


def faults(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "_faults.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.timeout(240)
def test_a_part_of_the_sweep() -> None:
    """Some places of every scenario: nothing hangs, is wrong or leaks."""
    done = faults("--device", "host", "--smoke", "--workers", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["injected"] > 100
    assert [figures[kind] for kind in ("hangs", "wrong", "leaks")] == [0, 0, 0]
    assert figures["problems"] == []
    assert done.stderr.startswith("ok: ")


def test_one_scenario(tmp_path: Path) -> None:
    """A scenario that is named is swept alone; the figures go to a file, the verdict to standard output."""
    target = tmp_path / "figures.json"
    done = faults("opening_with_priorities", "--smoke", "--workers", "1", "--json", str(target))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ok: ")
    assert 0 < json.loads(target.read_text())["injected"] < 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cuda:0"], "invalid choice"),
        (["--workers", "0"], "at least 1"),
        (["nonsense"], "no such scenario: nonsense"),
        (["--json", "/nowhere/figures.json"], "/nowhere"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    """What the user got wrong is said on standard error, with exit code 2."""
    done = faults(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module behind scripts/faults."""
    module = load_script(monkeypatch, "faults")
    importlib.import_module("benchmarks.command")  # now: a loop must not read files
    return module


# A process that gets stuck, or dies, after its first case of each unit; begun anew it goes on.
WORKER = """
import json, os, sys, time
for line in sys.stdin:
    scenario, fault, first, step, by_events = json.loads(line)
    if first == 1:
        case = {{"at": 1, "injected": True, "hangs": [], "wrong": ["odd"], "leaks": [], "problems": ["odd"]}}
        print(json.dumps(case), flush=True)
        {end}
    print("null", flush=True)
"""


@pytest.mark.allows_blocking("it writes a file and starts processes")
@pytest.mark.parametrize(
    ("end", "counts", "text"),
    [
        ("time.sleep(60)", (1, 1, 1, 0), "chain, lost 3: hang: the process does not go on"),
        ("os._exit(3)", (1, 0, 2, 0), "chain, lost 3: wrong: the process ended with 3"),
    ],
)
async def test_a_process_that_hangs_is_replaced(
    end: str,
    counts: tuple[int, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: ModuleType,
) -> None:
    """One that says nothing any more is killed and a hang, one that dies is wrong; the rest is done by another."""
    (tmp_path / "worker.py").write_text(WORKER.format(end=end))
    monkeypatch.setattr(script, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(script, "SILENT_S", 1.0 if "sleep" in end else 30.0)
    ahead = deque([script.Unit("chain", "lost", 1, 2), script.Unit("chain", "refused", 5, 2)])
    tally = await script.everything(ahead, 1, "asyncio")
    assert (tally.injected, tally.hangs, tally.wrong, tally.leaks) == counts
    assert tally.problems == ["odd", text]
    assert tally.bad
