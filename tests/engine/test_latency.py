"""The histogram of latencies."""

from __future__ import annotations

from aiooffload.engine.latency import BOUNDS_NS, Latencies


def test_counts_are_cumulated() -> None:
    """A value is in the first bucket whose bound it does not exceed, and in all after it; the last have none."""
    latencies = Latencies()
    values = [-3, 0, 5_000, 5_001, 19_999, 20_000_001, 10**12]
    for value in values:
        latencies.add(value)
    stats = latencies.stats()
    assert stats["count"] == len(values)
    assert stats["sum_s"] == sum(values[1:]) / 1e9
    assert stats["buckets"] == [[bound / 1e9, sum(value <= bound for value in values)] for bound in BOUNDS_NS]
    assert stats["buckets"][-1][1] == 5
