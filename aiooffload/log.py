"""The package's logger. structlog is imported with the first line that is logged, not before."""

from __future__ import annotations

from typing import Any

__all__ = ["load_log", "log"]


def load_log() -> None:
    """Import structlog now, on a thread that may block."""
    import structlog  # noqa: F401  (for its side effect alone)


class _Log:
    """Passes everything on to ``structlog.get_logger("aiooffload")``."""

    def __getattr__(self, name: str) -> Any:
        import structlog

        return getattr(structlog.get_logger("aiooffload"), name)


log = _Log()
