"""Program order per allocation: who must come before whom.

Operations that share an allocation run in the order they were submitted, unless both only read
it. The history of an allocation is what that needs: its last writer, and its readers since.

:class:`History` is the rule. What runs is the same in C (``_native.History``), since the launch path asks it
for every buffer of every launch; the tests hold one against the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
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
    """What has been submitted on one allocation and may still be unfinished.

    It holds operations weakly: whoever runs an unfinished one holds it, and a finished one must not
    be kept alive, with its result, by the memory it once used.
    """

    __slots__ = ("_readers", "_writer")

    def __init__(self) -> None:
        # Everything submitted before the writer is ordered before it already.
        self._writer: Callable[[], _Op | None] = _nothing
        # Submitted after the writer, in order; dead and finished ones are dropped now and then.
        self._readers: list[Callable[[], _Op | None]] = []

    def conflicts(self, writes: bool) -> list[_Op]:
        """Return the unfinished operations that one submitted now has to come after."""
        before = (self._writer, *self._readers) if writes else (self._writer,)
        return unfinished(operation for ref in before if (operation := ref()) is not None)

    def record(self, operation: _Op, writes: bool) -> None:
        """Note that ``operation`` was submitted now."""
        if writes:
            self._writer = weakref.ref(operation)
            self._readers.clear()
            return
        if len(self._readers) >= _PRUNE_AT and len(self._readers) & (len(self._readers) - 1) == 0:
            self._readers = [ref for ref in self._readers if (reader := ref()) is not None and unfinished((reader,))]
        self._readers.append(weakref.ref(operation))


def _nothing() -> None:
    return None
