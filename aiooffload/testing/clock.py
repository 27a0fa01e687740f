"""An event loop whose clock a test can put forward."""

from __future__ import annotations

import asyncio

from aiooffload.errors import UsageError

__all__ = ["ForwardLoop"]


class ForwardLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop that skips time on demand: ``asyncio.Runner(loop_factory=ForwardLoop)``.

    Every timer of the loop sees it: ``timeout_s=``, ``asyncio.timeout``, ``asyncio.sleep``, the watchdog and what it
    warns of after 20 seconds. The device's clock, and with it the deadline of a kernel's call, goes on as ever, and
    so does that of kept scratch.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ahead_s = 0.0

    def time(self) -> float:
        """Return the monotonic clock and what was skipped, in seconds."""
        return super().time() + self._ahead_s

    def advance(self, seconds: float) -> None:
        """Skip ``seconds``, at least 0: timers that fall due run in the loop's next turn. On the loop's thread."""
        if seconds < 0:
            raise UsageError(f"a clock does not go back by {-seconds} s")
        self._ahead_s += seconds
