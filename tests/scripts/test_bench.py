"""``scripts/bench``: that every mechanism runs, and the shape of its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ["hybrid", "interrupt", "poll"]
MECHANISMS = [*OURS, "sync", "executor", "sleep0", "callback", "usleep"]
CONCURRENT = [*OURS, "executor", "sleep0", "callback"]
KERNELS = [0, 20, 100, 1_000, 10_000]


def bench(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "_bench.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What one short run wrote to standard output, and its plot."""
    plot = tmp_path_factory.mktemp("bench") / "plot.png"
    extra = ["--memory", "--launches", "2000", "--faults", "--plot", str(plot)]
    done = bench("completion", "--device", "host", "--smoke", "--json", "-", *extra)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), plot


def test_every_mechanism_has_a_row_for_every_kernel(smoke: tuple[dict[str, Any], Path]) -> None:
    """``rows`` has the agreed keys, for all mechanisms and durations, in order."""
    figures, _ = smoke
    rows = figures["rows"]
    assert [(row["kernel_us"], row["mechanism"]) for row in rows] == [
        (us, name) for us in KERNELS for name in MECHANISMS
    ]
    for row in rows:
        assert set(row) == {"mechanism", "kernel_us", "excess_p50_us", "excess_p99_us", "cpu_percent"}
        assert row["excess_p50_us"] <= row["excess_p99_us"]
        assert row["cpu_percent"] >= 0
    assert (figures["device"], figures["loop"]) == ("host", "uvloop")


def test_throughput_of_what_can_run_at_once(smoke: tuple[dict[str, Any], Path]) -> None:
    """``throughput`` has the agreed keys, for every mechanism that does not block the loop."""
    figures, _ = smoke
    rows = figures["throughput"]
    assert [(row["tasks"], row["mechanism"]) for row in rows] == [
        (n, name) for n in (1, 16, 512) for name in CONCURRENT
    ]
    for row in rows:
        assert set(row) == {"mechanism", "tasks", "lanes", "awaits_per_s"}
        assert row["lanes"] == 16
        assert row["awaits_per_s"] > 0


def test_what_else_is_measured(smoke: tuple[dict[str, Any], Path]) -> None:
    """The loop's longest turn, the CPU of a long kernel, memory and the plot are there."""
    figures, plot = smoke
    assert set(figures["cpu_during_300ms"]) == set(MECHANISMS)
    held = {(row["mechanism"], row["load"]): row["longest_us"] for row in figures["loop_held"]}
    assert held["sync", "kernels of 10 ms"] >= 10_000
    assert all(value > 0 for value in held.values())
    memory = figures["memory"]
    assert memory["launches"] == 2000
    assert memory["before"]["descriptors"] == memory["after"]["descriptors"]
    assert figures["faults"] == []
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_tables_are_printed(tmp_path: Path) -> None:
    """Without timings only what was asked for is printed; figures go to a file."""
    arguments = ["--device", "host", "--loop", "asyncio", "--no-timings", "--memory", "--launches", "100"]
    done = bench("completion", *arguments, "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "100 launches in a row" in done.stdout
    assert json.loads((tmp_path / "figures.json").read_text())["loop"] == "asyncio"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["completion", "--device", "abacus", "--smoke"], "abacus"),
        (["completion", "--smoke", "--quick"], "not allowed with"),
        (["nonsense"], "invalid choice"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    """What the user got wrong is said on standard error, with exit code 2."""
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
