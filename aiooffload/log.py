"""The package's logger. structlog is imported with the first line that is logged, not before."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["load_log", "log"]


def load_log() -> None:
    """Import structlog now, on a thread that may block."""
    import structlog  # noqa: F401  (for its side effect alone)


class _Log:
    """Passes everything on to structlog's logger ``"aiooffload"``.

    Where the program has not configured structlog, lines go to standard error: standard output
    belongs to the program.
    """

    def __getattr__(self, name: str) -> Any:
        import structlog

        if structlog.is_configured():
            return getattr(structlog.get_logger("aiooffload"), name)
        return getattr(structlog.wrap_logger(structlog.PrintLogger(sys.stderr)), name)


log = _Log()
