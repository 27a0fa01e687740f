"""Where a device's clock lies on the host's.

All that is ever known are bounds: what the host enqueued at one time and saw done at another lay in between. Each
such interval narrows where the zero of the device's clock can be; the more there are, the closer the bounds. Two
clocks run apart, so a tie serves some seconds and is then moved to a new zero, with bounds as far apart as that allows.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MOVE_NS", "Tie"]

MOVE_NS: Final = 2_000_000_000
"""After so long a new zero: later times would be too coarse, for a driver that measures in single precision."""
DRIFT: Final = 50e-6
"""How far two clocks run apart at most, in seconds per second."""


class Tie:
    """Bounds, on the host's clock, of the zero of a device's clock.

    Parameters
    ----------
    low_ns, high_ns
        The earliest and the latest host time that it can be.
    """

    __slots__ = ("high_ns", "low_ns")

    def __init__(self, low_ns: int, high_ns: int) -> None:
        self.low_ns = low_ns
        self.high_ns = high_ns

    def include(self, after_ns: int, began_ns: int, ended_ns: int, before_ns: int) -> None:
        """Take in that from ``began_ns`` to ``ended_ns`` on the device lay within ``after_ns`` and ``before_ns``."""
        self.low_ns = max(self.low_ns, after_ns - began_ns)
        self.high_ns = min(self.high_ns, before_ns - ended_ns)

    def host_ns(self, device_ns: int) -> int:
        """Return the host's time of a device's, in the middle of what is possible."""
        return (self.low_ns + self.high_ns) // 2 + device_ns

    @property
    def uncertainty_ns(self) -> int:
        """How far off a time may be."""
        return max(0, self.high_ns - self.low_ns) // 2

    def moved(self, by_ns: int) -> Tie:
        """Return the tie of a clock whose zero is ``by_ns`` later."""
        drift = int(by_ns * DRIFT)
        return Tie(self.low_ns + by_ns - drift, self.high_ns + by_ns + drift)
