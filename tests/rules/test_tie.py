"""Two clocks, and what is known of one on the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiooffload.rules.tie import MOVE_NS, Tie

TIMES = st.integers(0, 10**9)


def test_the_middle_of_what_is_possible() -> None:
    """A time of the device is taken to lie in the middle of the bounds."""
    tie = Tie(100, 300)
    assert tie.host_ns(0) == 200
    assert tie.host_ns(50) == 250
    assert tie.host_ns(-50) == 150
    assert tie.uncertainty_ns == 100


@given(st.integers(-(10**12), 10**12), st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES), max_size=20))
def test_bounds_keep_the_truth(zero: int, intervals: list[tuple[int, int, int, int]]) -> None:
    """However many intervals are included, the true zero stays within bounds that never get wider."""
    tie = Tie(zero - 10**6, zero + 10**6)
    for start, early, length, late in intervals:
        before = tie.uncertainty_ns
        tie.include(zero + start - early, start, start + length, zero + start + length + late)
        assert tie.low_ns <= zero <= tie.high_ns
        assert tie.uncertainty_ns <= before
        assert abs(tie.host_ns(start) - (zero + start)) <= tie.uncertainty_ns + 1


def test_an_interval_that_fits_exactly_leaves_no_doubt() -> None:
    """What the host saw begin and end at once tells where the zero is."""
    tie = Tie(0, 10**6)
    tie.include(500_700, 200, 400, 500_900)
    assert (tie.low_ns, tie.high_ns, tie.uncertainty_ns) == (500_500, 500_500, 0)


def test_moving_allows_for_drift() -> None:
    """A later zero is where it is by the clock, give or take what two clocks may run apart."""
    moved = Tie(90, 110).moved(MOVE_NS)
    assert moved.host_ns(0) == 100 + MOVE_NS
    assert 10 + MOVE_NS // 10**5 < moved.uncertainty_ns < MOVE_NS // 10**3


def test_bounds_that_cross_give_a_time_all_the_same() -> None:
    """Clocks that ran apart faster than was allowed for cost precision, not the trace."""
    tie = Tie(0, 100)
    tie.include(300, 100, 200, 250)
    assert tie.low_ns > tie.high_ns
    assert tie.uncertainty_ns == 0
    assert tie.high_ns <= tie.host_ns(0) <= tie.low_ns
