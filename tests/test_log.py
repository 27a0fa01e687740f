"""The package's logger."""

from __future__ import annotations

import structlog

from aiooffload.log import log


def test_lines_go_to_structlog() -> None:
    """A line goes through structlog, as the program has configured it, with its fields."""
    with structlog.testing.capture_logs() as lines:
        log.warning("something", seconds=3)
    assert lines == [{"event": "something", "seconds": 3, "log_level": "warning"}]
