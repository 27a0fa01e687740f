"""The package's logger. structlog is imported with the first line that is logged, not before."""

from __future__ import annotations

from typing import Any

__all__ = ["log"]


class _Log:
    """Passes everything on to ``structlog.get_logger("aiooffload")``."""

    def __getattr__(self, name: str) -> Any:
        import structlog

        return getattr(structlog.get_logger("aiooffload"), name)


log = _Log()
