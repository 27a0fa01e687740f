"""``rules/wake.py``: when to look, when to sleep, and what wakes the sleeper."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload.rules.wake import BOUNDED_NS, Decision, Wake, WakePolicy, margin_ns

NOW = st.integers(0, 2**62)
SPANS = st.one_of(st.integers(0, 1_000), st.integers(0, 1_000_000), st.integers(0, 10**12))
POLICIES = st.builds(
    WakePolicy,
    mode=st.sampled_from(["hybrid", "interrupt", "poll"]),
    spins=st.booleans(),
    monitor=st.booleans(),
    spin_ns=st.integers(0, 10**7),
    timer_ns=st.integers(1, 10**7),
)
STEPS = st.lists(
    st.tuples(SPANS, st.sampled_from([0, 1, 2, 1000]), SPANS, st.none() | SPANS | SPANS.map(lambda span: -span)),
    min_size=1,
    max_size=10,
)
LONG_OVER_NS = 1_000_000
"""Longer after a due time than looking is ever worth, with the default of ``spin_ns``."""


def hybrid(**changed: Any) -> WakePolicy:
    options: dict[str, Any] = {"mode": "hybrid", "spins": True, "monitor": True}
    return WakePolicy(**options | changed)


def check(policy: WakePolicy, now: int, in_flight: int, decision: Decision) -> None:
    """What holds for every decision."""
    assert (decision.wake is Wake.IDLE) == (in_flight == 0)
    assert decision.monitor <= policy.monitor
    if decision.wake is not Wake.SLEEP:
        assert (decision.timer_ns, decision.monitor) == (0, False)
    else:
        assert decision.timer_ns or decision.monitor
        assert decision.timer_ns == 0 or decision.timer_ns > now
        if not decision.monitor:
            assert decision.timer_ns <= now + max(BOUNDED_NS, policy.timer_ns)
    looks_by_mode = {"poll": True, "interrupt": False, "hybrid": policy.spins}
    assert decision.wake is not Wake.LOOK or looks_by_mode[policy.mode]
    assert decision.wake is not Wake.SLEEP or policy.mode != "poll"


@given(POLICIES, NOW, STEPS)
def test_every_input_has_a_sound_decision(policy: WakePolicy, now: int, steps: list[tuple[Any, ...]]) -> None:
    """Idle exactly with nothing in flight; poll never sleeps, interrupt never looks; every sleep is bounded.

    A sleep without the monitor is bounded by a timer of about a millisecond or the policy's own.
    """
    for later, in_flight, since_progress, until_due in steps:
        now += later
        due = 0 if until_due is None else max(1, now + until_due)
        check(policy, now, in_flight, policy.decide(now, in_flight, now - since_progress, due))


@given(NOW, SPANS)
def test_without_a_due_time_it_looks_for_the_spin_and_sleeps(now: int, since: int) -> None:
    """Hybrid looks for ``spin_ns`` after the last progress and then leaves it to the monitor."""
    decision = hybrid().decide(now, 1, now - since, 0)
    assert decision == (Decision(Wake.LOOK) if since < hybrid().spin_ns else Decision(Wake.SLEEP, 0, True))


@given(NOW, st.integers(0, 10**12), st.booleans())
def test_it_sleeps_towards_a_due_time_and_looks_before_it(now: int, lead: int, monitor: bool) -> None:
    """A few timers, each before the completion is due, lead to looking; a long one has the monitor behind it."""
    policy, due, start, sleeps = hybrid(monitor=monitor), now + lead + 1, now, 0
    while (decision := policy.decide(now, 1, start, due)).wake is Wake.SLEEP:
        assert now < decision.timer_ns < due
        assert decision.monitor == (monitor and decision.timer_ns - now > BOUNDED_NS)
        sleeps += 1
        now = decision.timer_ns if monitor or decision.timer_ns > due - BOUNDED_NS else due - BOUNDED_NS
    assert decision.wake is Wake.LOOK
    assert now < due
    assert sleeps <= 5


@given(NOW, SPANS, st.integers(0, 10**10), st.booleans())
def test_what_is_overdue_is_not_looked_for_for_ever(now: int, since: int, lead: int, monitor: bool) -> None:
    """Long after the due time hybrid sleeps, however it began to wait."""
    policy, due = hybrid(monitor=monitor), now + 1
    policy.decide(max(0, due - lead), 1, now - since, due)
    decision = policy.decide(due + LONG_OVER_NS, 1, now - since, due)
    assert decision == (
        Decision(Wake.SLEEP, 0, True) if monitor else Decision(Wake.SLEEP, due + LONG_OVER_NS + policy.timer_ns)
    )


@given(NOW, st.integers(0, 10**10))
def test_it_looks_longer_after_a_longer_sleep(now: int, lead: int) -> None:
    """At the due time, and for as long after it as the margin was before it, hybrid looks."""
    policy, due = hybrid(), now + lead + 1
    policy.decide(now, 1, now, due)
    for late in (0, policy.spin_ns - 1, margin_ns(lead) - 1):
        assert policy.decide(due + late, 1, now, due) == Decision(Wake.LOOK)


@given(NOW, st.integers(0, 10**9))
def test_each_completion_has_a_patience_of_its_own(now: int, lead: int) -> None:
    """After one that came late the next is not waited for any longer than if it had been the first."""
    fresh, used = hybrid(), hybrid()
    used.decide(now, 1, now, now + 10**10)  # a long one, with a long patience
    later = now + 2 * 10**10
    for policy in (fresh, used):
        policy.decide(later, 1, now, later + lead)
    for late in range(0, 500_000, 10_000):
        times = (later + lead + late, 1, now, later + lead)
        assert fresh.decide(*times) == used.decide(*times)


@given(NOW, SPANS, st.none() | SPANS, st.booleans(), st.sampled_from(["interrupt", "hybrid"]))
def test_a_driver_that_must_not_spin_never_does(
    now: int, since: int, due: int | None, monitor: bool, mode: Any
) -> None:
    """Where spinning does not pay, hybrid does what interrupt does: the monitor, or the timer in its place."""
    policy = hybrid(mode=mode, spins=mode == "interrupt", monitor=monitor)
    decision = policy.decide(now, 1, now - since, 0 if due is None else now + due)
    assert decision == (Decision(Wake.SLEEP, 0, True) if monitor else Decision(Wake.SLEEP, now + policy.timer_ns))


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_the_margin_grows_with_the_sleep(one: int, other: int) -> None:
    """A longer sleep has at least the margin of a shorter one; it begins and ends within reason."""
    short, long = sorted((one, other))
    assert 10_000 <= margin_ns(short) <= margin_ns(long) <= margin_ns(10**13) < LONG_OVER_NS


@pytest.mark.parametrize("monitor", [True, False])
def test_losing_the_monitor_is_seen_at_once(monitor: bool) -> None:
    """The engine may take the monitor away at any time: the next decision has a timer."""
    policy = hybrid(mode="interrupt")
    assert policy.decide(5, 1, 0, 0) == Decision(Wake.SLEEP, 0, True)
    policy.monitor = monitor
    assert policy.decide(5, 1, 0, 0).timer_ns == (0 if monitor else 5 + policy.timer_ns)


# Kernels that call


@given(now=NOW, since_call=st.integers(0, 10**9), since_progress=st.integers(0, 10**9), gap=st.integers(0, 10**9))
def test_a_call_is_looked_for_then_napped_for_then_left_to_the_monitor(
    now: int, since_call: int, since_progress: int, gap: int
) -> None:
    """After a call: looks, then naps that get longer up to 250 us, then the monitor, in this order."""
    policy = hybrid()
    called, progress = max(0, now - since_call), max(0, now - since_progress)
    silent = now - max(called, progress)
    decision = policy.decide(now, 1, progress, 0, called, gap)
    limit = max(policy.recent_ns, min(gap * 3 // 2, 20_000_000))
    if silent < policy.spin_ns:
        assert decision == Decision(Wake.LOOK)
    elif silent < limit:
        assert decision.wake is Wake.NAP
        assert 50_000 <= decision.timer_ns - now <= 250_000
        assert decision.timer_ns - now == 50_000 or decision.timer_ns - now <= silent // 20
    else:
        assert decision == Decision(Wake.SLEEP, 0, True)


@given(silent=st.integers(0, 10**8), gap=st.integers(0, 10**9))
def test_naps_are_few(silent: int, gap: int) -> None:
    """A silence of any length costs fewer than 200 naps, however long the last one was."""
    policy, count = hybrid(), 0
    while nap := policy.nap(silent, gap):
        silent += nap
        count += 1
    assert count < 200


@given(now=NOW, lead=st.integers(60_000, 10**8), since_call=st.integers(50_000, 10**9), monitor=st.booleans())
def test_a_kernel_that_may_call_is_never_slept_through(now: int, lead: int, since_call: int, monitor: bool) -> None:
    """Towards the due time of something else it naps, or sleeps with the monitor armed, and never past that time."""
    policy = WakePolicy("hybrid", spins=True, monitor=monitor)
    called = max(0, now - since_call)
    decision = policy.decide(now, 2, called, now + lead, called)
    if decision.wake is Wake.SLEEP:
        assert decision.monitor is monitor
        assert monitor or decision.timer_ns - now <= policy.timer_ns
    elif decision.wake is Wake.NAP:
        assert now < decision.timer_ns <= min(now + 250_000, now + lead)
    else:
        assert lead <= 500_000 or now - called < policy.spin_ns


@given(now=NOW, since=st.integers(0, 10**9), called=st.integers(0, 10**9))
def test_calls_change_nothing_where_it_may_not_spin(now: int, since: int, called: int) -> None:
    """A driver that must not spin, and the mode that never does, have the monitor alone."""
    for mode, spins in (("interrupt", True), ("hybrid", False)):
        policy = WakePolicy(mode, spins=spins, monitor=True)  # type: ignore[arg-type]
        assert policy.decide(now, 1, max(0, now - since), 0, max(0, now - called)) == Decision(Wake.SLEEP, 0, True)
