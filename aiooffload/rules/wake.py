"""When to look, when to sleep, and what wakes the sleeper.

Looking costs a core, an interrupt costs tens of microseconds, and a timer is cheap but has to
know the time. So the hybrid policy looks while something is expected to arrive, sleeps on a
timer until shortly before the next completion is due, and keeps the monitor (a wait on the
device that ends in an interrupt) as the catch-all that costs nothing.

When a kernel calls a host function next is not known. For a while after a call the next one is looked
for; then come naps, which keep the CPU awake, since a core that slept for milliseconds takes 200 us
to answer an interrupt. They get longer with the silence, from 50 us to 250 us, and end when it is half as
long again as the last one was, or after 1.5 ms; then there is only the monitor.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

__all__ = ["Decision", "Wake", "WakeMode", "WakePolicy"]

WakeMode = Literal["hybrid", "interrupt", "poll"]

BOUNDED_NS: Final = 1_000_000
"""A sleep that a timer bounds to this long needs no monitor behind it."""
_MARGIN_NS: Final = 18_000
_MARGIN_SHARE: Final = 64
_LONG_NS: Final = 2_000_000
_LONG_SHARE: Final = 32
_MARGIN_MAX_NS: Final = 400_000
_WORTH_NS: Final = 30_000
_NAP_SHARE: Final = 20
_NAP_MIN_NS: Final = 50_000
_NAP_MAX_NS: Final = 250_000
_NAPS_END_NS: Final = 20_000_000


class Wake(enum.Enum):
    """How the loop finds the next completion."""

    IDLE = "idle"
    """Nothing is in flight: leave nothing on the device."""
    LOOK = "look"
    """Look at the slots in every iteration of the loop."""
    SLEEP = "sleep"
    """Sleep until the timer of the decision, or the monitor if it asks for one."""
    NAP = "nap"
    """Nap until the timer of the decision and glance, again and again as :meth:`WakePolicy.nap` says."""


class Decision(NamedTuple):
    """What to do now. ``timer_ns`` is an absolute time, 0 for no timer."""

    wake: Wake
    timer_ns: int = 0
    monitor: bool = False


_IDLE: Final = Decision(Wake.IDLE)
_LOOK: Final = Decision(Wake.LOOK)
_MONITOR: Final = Decision(Wake.SLEEP, 0, True)


def margin_ns(lead_ns: int) -> int:
    """How long before the due time to start looking.

    The longer a CPU slept, the later it wakes and the colder its caches are; the figures are those
    at which a kernel of 100 us, 1 ms and 10 ms was seen soonest for its share of a core.
    """
    margin = _MARGIN_NS + max(lead_ns, 0) // _MARGIN_SHARE + max(lead_ns - _LONG_NS, 0) // _LONG_SHARE
    return min(_MARGIN_MAX_NS, margin)


@dataclass(slots=True)
class WakePolicy:
    """The decision, from what is in flight and the clock. All times in ns of one monotonic clock."""

    mode: WakeMode
    spins: bool
    """Whether hybrid may look without a due time; a property of the driver."""
    monitor: bool
    """Whether the device can wake the loop; without it a timer looks instead."""
    spin_ns: int = 50_000
    """How long hybrid looks after the last progress when nothing is known of the duration."""
    timer_ns: int = 1_000_000
    """How often a timer looks where there is no monitor."""
    recent_ns: int = 1_500_000
    """How long naps go on after a call of a running kernel, at least."""
    # The due time that `decide` saw last, and how long before it looking starts; it goes on for as
    # long after it.
    _due_ns: int = 0
    _margin_ns: int = 0

    def nap(self, silent_ns: int, gap_ns: int) -> int:
        """Return how long to nap after ``silent_ns`` without a call, 0 for no nap; ``gap_ns``: the last silence."""
        if silent_ns >= max(self.recent_ns, min(gap_ns + gap_ns // 2, _NAPS_END_NS)):
            return 0
        return min(max(silent_ns // _NAP_SHARE, _NAP_MIN_NS), _NAP_MAX_NS)

    def decide(
        self,
        now_ns: int,
        in_flight: int,
        progress_ns: int,
        due_ns: int,
        called_ns: int | None = None,
        gap_ns: int = 0,
    ) -> Decision:
        """Decide how to find the next completion, or the next request of a running kernel.

        Parameters
        ----------
        now_ns
            The time.
        in_flight
            Operations on the device.
        progress_ns
            When something was last submitted or completed.
        due_ns
            When the next completion is expected, 0 if nothing is known.
        called_ns
            When a running kernel last called; None if no kernel that calls is on the device.
        gap_ns
            How long the last silence between two calls was, 0 if nothing is known.
        """
        if in_flight == 0:
            return _IDLE
        if self.mode == "poll":
            return _LOOK
        if self.mode == "hybrid" and self.spins:
            decision = self._predict(now_ns, progress_ns, due_ns, called_ns, gap_ns)
            if decision is not None:
                return decision
        return _MONITOR if self.monitor else Decision(Wake.SLEEP, now_ns + self.timer_ns)

    def _predict(
        self, now_ns: int, progress_ns: int, due_ns: int, called_ns: int | None, gap_ns: int
    ) -> Decision | None:
        """Decide where something is expected; None where nothing is."""
        silent_ns = now_ns - (progress_ns if called_ns is None else max(called_ns, progress_ns))
        if silent_ns < self.spin_ns and (called_ns is not None or due_ns == 0):
            return _LOOK
        nap_ns = 0 if called_ns is None else self.nap(silent_ns, gap_ns)
        if due_ns:
            if due_ns != self._due_ns:
                self._due_ns, self._margin_ns = due_ns, margin_ns(due_ns - now_ns)
            # One sleep for each due time: dozing off again shortly before it would let the CPU
            # cool down once more.
            wake_ns = due_ns - self._margin_ns
            if wake_ns - now_ns > _WORTH_NS:
                if nap_ns:
                    return Decision(Wake.NAP, min(now_ns + nap_ns, wake_ns))
                return self._sleep(now_ns, wake_ns, called_ns is not None)
            if now_ns - due_ns < max(self.spin_ns, self._margin_ns):
                return _LOOK
        return Decision(Wake.NAP, now_ns + nap_ns) if nap_ns else None

    def _sleep(self, now_ns: int, until_ns: int, may_call: bool) -> Decision:
        if until_ns - now_ns <= BOUNDED_NS and not may_call:
            return Decision(Wake.SLEEP, until_ns)
        if self.monitor:
            return Decision(Wake.SLEEP, until_ns, True)
        return Decision(Wake.SLEEP, min(until_ns, now_ns + self.timer_ns))
