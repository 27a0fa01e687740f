"""The package's logger."""

from __future__ import annotations

import subprocess
import sys

import structlog

from aiooffload.log import log


def test_lines_go_to_structlog() -> None:
    """A line goes through structlog, as the program has configured it, with its fields."""
    with structlog.testing.capture_logs() as lines:
        log.warning("something", seconds=3)
    assert lines == [{"event": "something", "seconds": 3, "log_level": "warning"}]


def test_lines_of_an_unconfigured_program_go_to_standard_error() -> None:
    """Standard output belongs to the program, unless it configured structlog otherwise."""
    code = "from aiooffload.log import log; log.warning('something', seconds=3); print('mine')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "mine\n"
    assert "something" in done.stderr
