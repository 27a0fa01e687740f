"""``plan.c``: a launch's geometry, and the running estimate of its duration."""

from __future__ import annotations

import gc
import statistics
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload._native import LaunchPlan

WINDOW = 5
"""How many of the last durations the estimate goes by."""

DURATIONS = st.integers(1_000, 10**10)


def make(**changed: Any) -> LaunchPlan:
    arguments: dict[str, Any] = {
        "name": "k",
        "function": 0,
        "callable": None,
        "grid": (1, 1, 1),
        "block": (1, 1, 1),
        "shared_bytes": 0,
        "cluster": None,
        "cooperative": False,
    }
    return LaunchPlan(**arguments | changed)


def known(duration_ns: int) -> LaunchPlan:
    """A plan that is sure of its duration."""
    plan = make()
    for _ in range(WINDOW):
        plan.record(duration_ns)
    return plan


# -- geometry ------------------------------------------------------------------------------


def test_it_says_what_it_was_given() -> None:
    """Every value that was given can be read."""

    def fn() -> None: ...

    plan = make(name="käse", function=2**64 - 1, callable=fn, grid=(1, 2, 3), block=(4, 5, 2**32 - 1), shared_bytes=99)
    assert (plan.name, plan.function, plan.callable) == ("käse", 2**64 - 1, fn)
    assert (plan.grid, plan.block, plan.shared_bytes) == ((1, 2, 3), (4, 5, 2**32 - 1), 99)
    assert (plan.samples, plan.expected_ns) == (0, 0)
    assert make().callable is None


@pytest.mark.parametrize("which", ["grid", "block", "cluster"])
@pytest.mark.parametrize(
    ("value", "error"),
    [
        ((1, 1), TypeError),
        ([1, 1, 1], TypeError),
        (1, TypeError),
        ((1, 1, 1.0), TypeError),
        ((1, -1, 1), OverflowError),
        ((1, 1, 2**32), ValueError),
        ((2**64, 1, 1), OverflowError),
    ],
)
def test_dimensions_are_three_32_bit_integers(which: str, value: Any, error: type[Exception]) -> None:
    """Anything else raises instead of being cut short, and what was given is given back."""

    def fn() -> None: ...

    before = sys.getrefcount(fn)
    with pytest.raises(error):
        make(callable=fn, **{which: value})
    assert sys.getrefcount(fn) == before


def test_what_it_was_given_is_read_only() -> None:
    """A plan is one geometry for good."""
    plan = make()
    for name in ("name", "function", "callable", "grid", "block", "shared_bytes", "samples", "expected_ns"):
        with pytest.raises(AttributeError):
            setattr(plan, name, getattr(plan, name))


def test_the_callable_lives_as_long_as_the_plan() -> None:
    """A plan holds its host implementation, also through a cycle, which is collected."""

    class Implementation:
        plan: LaunchPlan | None = None

        def __call__(self) -> None: ...

    implementation = Implementation()
    watched = weakref.ref(implementation)
    implementation.plan = make(callable=implementation)
    del implementation
    assert watched() is not None
    gc.collect()
    assert watched() is None


# -- the estimate --------------------------------------------------------------------------


@given(st.lists(DURATIONS, min_size=1, max_size=20))
def test_it_is_the_median_of_the_last_exact_durations(durations: list[int]) -> None:
    """Of the last five the lower median, if none is more than twice another; 0 for a single one."""
    plan = make()
    for duration in durations:
        plan.record(duration)
    last = durations[-WINDOW:]
    sure = len(durations) > 1 and max(last) <= 2 * min(last)
    assert plan.samples == len(durations)
    assert plan.expected_ns == (statistics.median_low(last) if sure else 0)


@given(DURATIONS, st.lists(st.floats(0.9, 1.1), min_size=2, max_size=30))
def test_it_converges(duration: int, noise: list[float]) -> None:
    """From the second launch on, a kernel with 10 % of noise is expected within that noise."""
    plan = make()
    for count, factor in enumerate(noise, 1):
        plan.record(int(duration * factor))
        assert plan.expected_ns == 0 if count < 2 else 0.89 * duration <= plan.expected_ns <= 1.11 * duration


@given(DURATIONS, st.integers(0, 10**11))
def test_one_disturbed_launch_changes_nothing_for_long(duration: int, disturbed: int) -> None:
    """After a launch of any duration, the estimate is what it was, or withheld while that one is remembered."""
    plan = known(duration)
    plan.record(disturbed)
    for _ in range(WINDOW):
        assert plan.expected_ns in (0, duration)
        plan.record(duration)
    assert plan.expected_ns == duration


@given(DURATIONS, st.floats(1.01, 100))
def test_it_follows_a_longer_kernel(duration: int, factor: float) -> None:
    """When a kernel gets longer and the loop saw it, a window of launches later the new duration is known."""
    plan, longer = known(duration), int(duration * factor)
    for _ in range(WINDOW):
        plan.record(longer)
    assert plan.expected_ns == longer


@given(DURATIONS, st.floats(0.01, 0.99))
def test_it_follows_a_shorter_kernel(duration: int, factor: float) -> None:
    """When a kernel gets shorter and the loop saw it, a window of launches later the new duration is known."""
    plan, shorter = known(duration), int(duration * factor)
    for _ in range(WINDOW):
        plan.record(shorter)
    assert plan.expected_ns == max(1, shorter)


@given(DURATIONS, st.floats(1.01, 100), st.floats(1.0, 2.0))
def test_it_follows_a_longer_kernel_at_once_after_waiting(duration: int, factor: float, late: float) -> None:
    """A completion that was late although the loop looked and waited replaces everything known."""
    plan = known(duration)
    lower = int(duration * factor) + 1
    upper = int(lower * late)
    plan.record_between(lower, upper)
    assert max(lower, int(0.96 * upper)) <= plan.expected_ns <= max(lower, upper)


@given(DURATIONS, st.lists(st.tuples(st.floats(0, 1), st.floats(0, 10)), max_size=30))
def test_late_wakes_never_drift_up(duration: int, wakes: list[tuple[float, float]]) -> None:
    """However late the loop wakes, a sample that agrees with the estimate never raises it."""
    plan = known(duration)
    for low, late in wakes:
        before = plan.expected_ns
        lower = int(before * low)
        plan.record_between(lower, max(lower, duration + int(duration * late)))  # never before the end
        after = plan.expected_ns
        assert after <= before or before == 0
        if after == 0:  # too scattered to be used
            break


@given(st.integers(10_000, 10**9), st.floats(0.05, 0.5), st.integers(2, 200))
def test_a_loop_that_wakes_late_learns_the_true_duration(duration: int, late: float, launches: int) -> None:
    """If the timer's lateness is the same each time, the estimate ends where the loop sees the end happen."""
    plan = make()
    lateness = int(duration * late)
    for _ in range(launches):
        woken = plan.expected_ns - lateness // 2 + lateness if plan.expected_ns else duration + lateness
        if woken <= duration:
            plan.record(duration)  # it was looking when the end came
        else:
            plan.record_between(0, woken)
        assert plan.expected_ns <= duration + lateness
    if launches > 100:
        assert plan.expected_ns <= duration
        assert plan.expected_ns >= 0.9 * (duration - lateness)


@given(st.integers(0, 10**10), st.integers(0, 10**10))
def test_the_first_sample_may_be_a_late_one(lower: int, upper: int) -> None:
    """A first launch seen late is known to its bounds; the second makes it an expectation within them."""
    lower, upper = sorted((lower, upper))
    plan = make()
    plan.record_between(lower, upper)
    assert (plan.samples, plan.expected_ns) == (1, 0)
    plan.record_between(lower, upper)
    assert plan.samples == 2
    assert min(lower, upper) <= plan.expected_ns <= max(1, upper)


@pytest.mark.parametrize("duration", [0, -1, -(2**63)])
def test_no_time_at_all_is_expected_as_little(duration: int) -> None:
    """A duration of 0 or less counts as nothing, and is told from the 0 that means unknown."""
    plan = make()
    plan.record(duration)
    plan.record(duration)
    assert plan.expected_ns == 1


def test_negative_bounds_count_as_nothing() -> None:
    """A lower bound before the start, as the clock of a late look gives, is 0."""
    plan = known(1_000_000)
    plan.record_between(-5_000_000, 2_000_000)
    assert 970_000 <= plan.expected_ns <= 1_000_000


@pytest.mark.parametrize(
    "call",
    [
        lambda plan: plan.record("1"),
        lambda plan: plan.record(1.5),
        lambda plan: plan.record_between(1),
        lambda plan: plan.record_between(1, None),
    ],
)
def test_durations_are_integers(call: Callable[[LaunchPlan], None]) -> None:
    """Anything else raises TypeError and is not taken into the estimate."""
    plan = make()
    with pytest.raises(TypeError):
        call(plan)
    assert plan.samples == 0


def test_a_duration_has_64_bits() -> None:
    """A number beyond that raises OverflowError and is not taken into the estimate."""
    plan = make()
    with pytest.raises(OverflowError):
        plan.record(2**63)
    assert plan.samples == 0
