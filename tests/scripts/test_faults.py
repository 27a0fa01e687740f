"""``scripts/faults``: a part of the sweep finds nothing, and the shape of its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def faults(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "_faults.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_part_of_the_sweep() -> None:
    """Every 47th place of every scenario: nothing hangs, is wrong or leaks."""
    done = faults("--device", "host", "--smoke", "--workers", "2", "--json", "-")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["injected"] > 130
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
