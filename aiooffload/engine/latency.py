"""How late things were: a histogram that costs a search among a few bounds for each value."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import Any, Final

__all__ = ["BOUNDS_NS", "Latencies"]

BOUNDS_NS: Final = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000, 5_000_000, 20_000_000)


class Latencies:
    """Counts of nanoseconds, by :data:`BOUNDS_NS`, for one thread."""

    __slots__ = ("_counts", "_sum_ns")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_NS) + 1)
        self._sum_ns = 0

    def add(self, ns: int) -> None:
        """Count one; what is below 0 was not late."""
        self._counts[bisect_left(BOUNDS_NS, ns)] += 1
        self._sum_ns += max(ns, 0)

    def stats(self) -> dict[str, Any]:
        """Return ``count``, ``sum_s``, and ``buckets``: pairs of seconds and how many were at most that."""
        bounds = (bound / 1e9 for bound in BOUNDS_NS)
        cumulated = list(accumulate(self._counts))
        pairs = [list(pair) for pair in zip(bounds, cumulated[:-1], strict=True)]
        return {"count": cumulated[-1], "sum_s": self._sum_ns / 1e9, "buckets": pairs}
