"""Program order per allocation: who must come before whom.

Operations that share an allocation run in the order they were submitted, unless both only read
it. The history of an allocation is what that needs: its last writer, and its readers since.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

__all__ = ["History", "Orderable", "unfinished"]

_PRUNE_AT = 16
_Op = TypeVar("_Op", bound="Orderable")


class Orderable(Protocol):
    """What the rule reads of an operation."""

    @property
    def finished(self) -> bool:
        """Whether the device no longer touches its memory."""

    @property
    def deps(self: _Op) -> Iterable[_Op] | None:
        """What it still had to come after when it ended without having run; None once it ran."""


def unfinished(operations: Iterable[_Op]) -> list[_Op]:
    """Return those that are not finished; one that ended without having run stands for what it had to come after."""
    found: dict[_Op, None] = {}
    seen: set[_Op] = set()
    stack = list(operations)
    while stack:
        operation = stack.pop()
        if not operation.finished:
            found[operation] = None
        elif operation.deps and operation not in seen:
            seen.add(operation)
            stack.extend(operation.deps)
    return list(found)


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
        before = [] if self.writer is None else unfinished((self.writer,))
        return before + unfinished(self.readers) if writes else before

    def record(self, operation: _Op, writes: bool) -> None:
        """Note that ``operation`` was submitted now."""
        if writes:
            self.writer = operation
            self.readers.clear()
            return
        if len(self.readers) >= _PRUNE_AT and len(self.readers) & (len(self.readers) - 1) == 0:
            self.readers = unfinished(self.readers)
        self.readers.append(operation)
