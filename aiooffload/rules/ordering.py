"""Program order per allocation: who must come before whom.

Operations that share an allocation run in the order they were submitted, unless both only read
it. The history of an allocation is what that needs: its last writer, and its readers since.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

__all__ = ["History", "Orderable"]

_PRUNE_AT = 16


class Orderable(Protocol):
    """What the rule reads of an operation."""

    @property
    def finished(self) -> bool:
        """Whether the device no longer touches its memory."""


_Op = TypeVar("_Op", bound=Orderable)


class History(Generic[_Op]):
    """What has been submitted on one allocation and may still be unfinished."""

    __slots__ = ("readers", "writer")

    def __init__(self) -> None:
        # Everything submitted before `writer` is ordered before it already.
        self.writer: _Op | None = None
        # Submitted after `writer`, in order; finished ones are dropped now and then.
        self.readers: list[_Op] = []

    def conflicts(self, writes: bool) -> list[_Op]:
        """Return the unfinished operations that one submitted now has to come after."""
        before: list[_Op] = []
        if self.writer is not None and not self.writer.finished:
            before.append(self.writer)
        if writes:
            before.extend(reader for reader in self.readers if not reader.finished)
        return before

    def record(self, operation: _Op, writes: bool) -> None:
        """Note that ``operation`` was submitted now."""
        if writes:
            self.writer = operation
            self.readers.clear()
            return
        if len(self.readers) >= _PRUNE_AT and len(self.readers) & (len(self.readers) - 1) == 0:
            self.readers = [reader for reader in self.readers if not reader.finished]
        self.readers.append(operation)
