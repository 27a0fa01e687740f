"""Which requests share one call of a handler, and when that call may start.

Pure: times are given, never taken. Requests with equal keys are joined until their rows are as many as a call may
have. What waits for a free device process stays open to others, so batches grow by themselves under load.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

__all__ = ["Batch", "Batcher"]

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Batch(Generic[_T]):
    """Requests of one call, in the order of their arrival."""

    number: int
    due: float
    """From when on it may start, whatever room is left in it."""
    items: list[_T] = field(default_factory=list)
    rows: int = 0


class Batcher(Generic[_T]):
    """The waiting requests of one endpoint.

    Parameters
    ----------
    max_rows
        How many rows a call may have; 0 if requests are never joined.
    delay_s
        How long the first request of a call waits for others.
    """

    def __init__(self, max_rows: int, delay_s: float) -> None:
        self._max_rows = max_rows
        self._delay_s = delay_s
        self._count = 0
        # In the order of their making, thus of their due times.
        self._open: dict[Hashable, Batch[_T]] = {}
        # No more can be joined to these; in the order in which that came about.
        self._full: deque[Batch[_T]] = deque()

    def put(self, item: _T, rows: int, key: Hashable, now: float) -> None:
        """Take a request of so many rows, at most ``max_rows``, that may be joined with those of the same key."""
        if not self._max_rows:
            self._full.append(self._new(item, rows, now))
            return
        batch = self._open.get(key)
        if batch is not None and batch.rows + rows > self._max_rows:
            self._full.append(self._open.pop(key))
            batch = None
        if batch is None:
            batch = self._open[key] = self._new(item, rows, now + self._delay_s)
        else:
            batch.items.append(item)
            batch.rows += rows
        if batch.rows == self._max_rows:
            self._full.append(self._open.pop(key))

    def _new(self, item: _T, rows: int, due: float) -> Batch[_T]:
        self._count += 1
        return Batch(self._count, due, [item], rows)

    def take(self, now: float) -> Batch[_T] | None:
        """Return the next batch that may start, the oldest first; None if there is none."""
        key, first = next(iter(self._open.items()), (None, None))
        if first is not None and first.due <= now and not (self._full and self._full[0].number < first.number):
            return self._open.pop(key)
        return self._full.popleft() if self._full else None

    def next_due(self) -> float | None:
        """Return from when on :meth:`take` has something; None if nothing waits, 0 if that is now."""
        if self._full:
            return 0.0
        return next(iter(self._open.values())).due if self._open else None

    def clear(self) -> list[_T]:
        """Forget everything and return it, in the order of arrival within a batch."""
        batches = [*self._full, *self._open.values()]
        self._full.clear()
        self._open.clear()
        return [item for batch in batches for item in batch.items]
