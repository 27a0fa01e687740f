"""Which of the calls to come are to go wrong, and how. Knows no device."""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

from aiooffload.errors import UsageError

__all__ = ["Plan"]

_E = TypeVar("_E")


@dataclass
class _Planned(Generic[_E]):
    names: frozenset[str] | None
    """None: any."""
    left: int
    """Matching calls until it is due, that one included."""
    times: int
    """How many in a row are concerned."""
    effect: _E


class Plan(Generic[_E]):
    """Effects on calls, each on the n-th of some names. Used by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[_Planned[_E]] = []
        # Calls asked for so far.
        self.calls = 0

    def add(self, effect: _E, names: str | Collection[str] | None, at: int, times: int = 1) -> None:
        """Plan ``effect`` for the ``at``-th call from now of ``names`` (None: of any), and the ``times - 1`` after it.

        Raises UsageError for numbers below 1.
        """
        if at < 1 or times < 1:
            raise UsageError(f"at and times are at least 1, not {at} and {times}")
        chosen = None if names is None else frozenset([names] if isinstance(names, str) else names)
        with self._lock:
            self._planned.append(_Planned(chosen, at, times, effect))

    def take(self, name: str) -> _E | None:
        """Count a call and return what is to happen to it: the effect planned first of those that are due."""
        with self._lock:
            self.calls += 1
            due = [one for one in self._planned if self._is_due(one, name)]
            self._planned = [one for one in self._planned if one.times]
        return due[0].effect if due else None

    @staticmethod
    def _is_due(planned: _Planned[_E], name: str) -> bool:
        if planned.names is not None and name not in planned.names:
            return False
        planned.left -= 1
        if planned.left > 0:
            return False
        planned.times -= 1
        return True

    def clear(self) -> None:
        """Let everything go well from now on."""
        with self._lock:
            self._planned.clear()

    def __len__(self) -> int:
        return len(self._planned)
