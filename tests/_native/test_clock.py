"""``clock.c``: the clock, the timerfd, and the timer slack of a thread."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import select
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from aiooffload._native import Timer, now_ns, timer_slack

FAR_NS = 3600 * 10**9


@pytest.fixture
def timer() -> Any:
    made = Timer()
    yield made
    made.close()


def left_ns(timer: Timer) -> int:
    """Nanoseconds until it fires, 0 if it is not armed, as the kernel tells."""
    text = Path(f"/proc/self/fdinfo/{timer.fileno()}").read_text()
    match = re.search(r"it_value: \((\d+), (\d+)\)", text)
    assert match
    return int(match[1]) * 10**9 + int(match[2])


def wait_for_firing(timer: Timer) -> None:
    assert select.select([timer], [], [], 10)[0] == [timer]


def fired(timer: Timer) -> bool:
    return bool(select.select([timer], [], [], 0)[0])


def test_the_clock_is_the_monotonic_one() -> None:
    """now_ns() is CLOCK_MONOTONIC: it lies between two readings of time.monotonic_ns()."""
    before = time.monotonic_ns()
    now = now_ns()
    assert before <= now <= time.monotonic_ns()


def test_the_descriptor_is_safe_for_a_loop(timer: Timer) -> None:
    """Reading never blocks, and a child process does not inherit it."""
    assert fcntl.fcntl(timer.fileno(), fcntl.F_GETFL) & os.O_NONBLOCK
    assert not os.get_inheritable(timer.fileno())


def test_a_new_timer_is_not_armed(timer: Timer) -> None:
    """Nothing fires before a time was set."""
    assert left_ns(timer) == 0
    assert not fired(timer)


def test_it_fires_at_its_time_and_not_before(timer: Timer) -> None:
    """It fires once the clock has reached the time that was set."""
    when = now_ns() + 2_000_000
    timer.set_at(when)
    wait_for_firing(timer)
    assert now_ns() >= when


@pytest.mark.parametrize("when", [1, 0, -1, -(2**63)])
def test_a_time_in_the_past_fires_at_once(timer: Timer, when: int) -> None:
    """A time that is over fires, also 0 and below, which the kernel would take for disarming."""
    timer.set_at(when)
    wait_for_firing(timer)


def test_it_fires_once(timer: Timer) -> None:
    """After its firing was read it is not armed any more."""
    timer.set_at(1)
    wait_for_firing(timer)
    assert int.from_bytes(os.read(timer.fileno(), 8), "little") == 1
    assert left_ns(timer) == 0
    assert not fired(timer)


def test_a_new_time_replaces_the_old_one(timer: Timer) -> None:
    """There is one time at a time: the last one set."""
    timer.set_at(now_ns() + FAR_NS)
    timer.set_at(now_ns() + 2 * FAR_NS)
    assert FAR_NS < left_ns(timer) <= 2 * FAR_NS


def test_clear_disarms(timer: Timer) -> None:
    """A cleared timer has no time."""
    timer.set_at(now_ns() + FAR_NS)
    assert left_ns(timer) > 0
    timer.clear()
    assert left_ns(timer) == 0


def test_clear_swallows_a_firing(timer: Timer) -> None:
    """A firing that nobody read is gone after clear(), and the timer can be set again."""
    timer.set_at(1)
    wait_for_firing(timer)
    timer.clear()
    assert not fired(timer)
    timer.set_at(1)
    wait_for_firing(timer)


def test_clear_needs_no_firing(timer: Timer) -> None:
    """Clearing what was never set changes nothing."""
    timer.clear()
    assert left_ns(timer) == 0


def test_a_closed_timer_refuses() -> None:
    """After close(), which may be called twice, there is no descriptor and nothing to set."""
    timer = Timer()
    timer.close()
    timer.close()
    assert timer.fileno() == -1
    with pytest.raises(ValueError, match="closed"):
        timer.set_at(1)
    with pytest.raises(ValueError, match="closed"):
        timer.clear()


def test_a_forgotten_timer_closes_its_descriptor() -> None:
    """A timer that is collected gives its descriptor back."""
    timer = Timer()
    number = timer.fileno()
    del timer
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


@pytest.mark.parametrize(("when", "error"), [("1", TypeError), (1.5, TypeError), (2**63, OverflowError)])
def test_a_time_is_a_64_bit_integer(timer: Timer, when: Any, error: type[Exception]) -> None:
    """Other values raise and leave the timer alone."""
    with pytest.raises(error):
        timer.set_at(when)
    assert left_ns(timer) == 0


def test_it_takes_no_arguments() -> None:
    """There is one kind of timer."""
    with pytest.raises(TypeError):
        Timer(1)  # type: ignore[call-arg]


@pytest.mark.all_loops
async def test_it_wakes_a_loop(timer: Timer) -> None:
    """A loop that watches the descriptor is woken by the firing."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()
    loop.add_reader(timer.fileno(), lambda: woken.done() or woken.set_result(now_ns()))
    try:
        when = now_ns() + 1_000_000
        timer.set_at(when)
        assert await woken >= when
    finally:
        loop.remove_reader(timer.fileno())


def test_the_slack_is_set_and_the_old_one_returned() -> None:
    """timer_slack() returns what was in force, so that it can be put back."""
    before = timer_slack(12_345)
    try:
        assert timer_slack(1) == 12_345
    finally:
        assert timer_slack(before) == 1
    assert timer_slack(before) == before


def test_the_slack_is_the_threads_own() -> None:
    """Another thread's slack is not touched."""
    before = timer_slack(23_456)
    try:
        thread = threading.Thread(target=timer_slack, args=(777,))
        thread.start()
        thread.join()
    finally:
        assert timer_slack(before) == 23_456


@pytest.mark.parametrize(("slack", "error"), [(-1, OverflowError), ("1", TypeError)])
def test_a_slack_is_a_number_of_nanoseconds(slack: Any, error: type[Exception]) -> None:
    """Other values raise and change nothing."""
    before = timer_slack(34_567)
    try:
        with pytest.raises(error):
            timer_slack(slack)
    finally:
        assert timer_slack(before) == 34_567
