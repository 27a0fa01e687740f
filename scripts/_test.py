"""Run the tests: the fast part by default.

Arguments that are not listed below go to pytest, for example a file, ``-k word`` or ``-x``. The
order is random: pytest's head line names the seed, ``--randomly-seed=SEED`` repeats a run, and
``-p no:randomly`` keeps the order of the files.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class Figures:
    """A pytest plugin that counts."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.values: dict[str, Any] = {"passed": 0, "failed": 0, "skipped": 0}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        count = {outcome: len(reports) for outcome, reports in terminalreporter.stats.items()}
        self.values = {
            "passed": count.get("passed", 0) + count.get("xfailed", 0),
            "failed": count.get("failed", 0) + count.get("error", 0),
            "skipped": count.get("skipped", 0),
        }

    def write(self, file: str, stdout: int) -> None:
        text = json.dumps(self.values | {"seconds": round(time.monotonic() - self.began, 2)}) + "\n"
        if file == "-":
            os.write(stdout, text.encode())
        else:
            Path(file).write_text(text, encoding="utf-8")


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="scripts/test", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slow", action="store_true", help="also run the slow part")
    parser.add_argument("--device", choices=("auto", "host", "cuda"), default="auto", help="tests of one device only")
    parser.add_argument("--require-gpu", action="store_true", help="a GPU test that is skipped fails")
    parser.add_argument(
        "--workers", type=int, help="processes that run tests (default: one per CPU, at most 4; with a GPU one)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures; - for standard output")
    parser.add_argument("--no-setup", action="store_true", help="run in the Python at hand, installing nothing")
    return parser.parse_known_args()


def default_workers() -> int:
    """Return how many processes may run tests at a time: those that need a GPU share it with nobody."""
    if Path("/dev/nvidiactl").exists() or not importlib.util.find_spec("xdist"):
        return 1
    return min(4, len(os.sched_getaffinity(0)))


def main() -> int:
    options, arguments = parse()
    if not importlib.util.find_spec("pytest"):
        sys.exit(f"{sys.executable} has no pytest: install the package's extra 'test', or leave out --no-setup")
    import pytest

    file = options.json if options.json in (None, "-") else os.path.abspath(options.json)
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)
    marks = {"host": ["-m", "not gpu"], "cuda": ["-m", "gpu"], "auto": []}[options.device]
    flags = [flag for flag, given in [("--slow", options.slow), ("--require-gpu", options.require_gpu)] if given]
    workers = options.workers or default_workers()
    if workers > 1:
        flags += ["-n", str(workers)]
    stdout = os.dup(1)
    if file == "-":
        os.dup2(2, 1)  # nothing but the figures goes to standard output
    figures = Figures()
    status = int(pytest.main([*marks, *flags, *arguments], plugins=[figures]))
    if file:
        figures.write(file, stdout)
    return status


if __name__ == "__main__":
    sys.exit(main())
