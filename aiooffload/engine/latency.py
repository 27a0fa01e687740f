"""How late things were, and other histograms: each value costs a search among a few bounds."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Final

__all__ = ["BOUNDS_NS", "Histogram", "Latencies"]

BOUNDS_NS: Final = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 5_000_000, 20_000_000)


class Histogram:
    """Counts of values, for one thread; what is below 0 counts as 0."""

    __slots__ = ("_counts", "bounds", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += max(value, 0)

    def cumulated(self) -> list[int]:
        """Return how many were at most each bound, and how many there were."""
        return list(accumulate(self._counts))


class Latencies(Histogram):
    """Counts of nanoseconds, by :data:`BOUNDS_NS`."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(BOUNDS_NS)

    def stats(self) -> dict[str, Any]:
        """Return ``count``, ``sum_s``, and ``buckets``: pairs of seconds and how many were at most that."""
        *counts, count = self.cumulated()
        buckets = [[bound / 1e9, at_most] for bound, at_most in zip(self.bounds, counts, strict=True)]
        return {"count": count, "sum_s": self.sum / 1e9, "buckets": buckets}
