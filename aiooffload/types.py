"""Frozen values and small protocols that every layer may use."""

from __future__ import annotations

import enum
from typing import Any, Protocol

__all__ = ["Access", "Recorder"]


class Access(enum.Enum):
    """What a kernel does with an array argument."""

    READ = "in"
    WRITE = "out"
    READ_WRITE = "inout"

    @property
    def writes(self) -> bool:
        """Whether the kernel may write it."""
        return self is not Access.READ


class Recorder(Protocol):
    """What is told of everything that happens to operations while there is a trace; raises DeviceLostError alone."""

    def submitted(self, operation: Any, part_of: Any) -> None:
        """``operation`` was submitted, with its dependencies; ``part_of``: it is a piece of that copy."""

    def placed(self, operation: Any) -> None:
        """It went where it could go: the device, the hands of the host, or a place to wait."""

    def on_host(self, operation: Any) -> None:
        """The host begins to work on it."""

    def begins(self, operation: Any, lane: Any) -> None:
        """It is next to be enqueued on ``lane``."""

    def ends(self, operation: Any, lane: Any) -> None:
        """It was enqueued; its mark was not."""

    def served(self, request: Any, began_ns: int, failed: int) -> None:
        """A host function has ended that began at ``began_ns``."""

    def release(self) -> None:
        """Give back what is the device's: it is about to be closed."""
