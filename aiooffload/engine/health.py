"""The watchdog: asks the driver, at a low rate, whether the device is still well.

A fault is found only by asking, and after one no mark ever arrives, so without this an await would
hang for ever. On the same tick it
looks at the slots, so that a lost bell costs milliseconds rather than an await, and for launches past the hard limit.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, Protocol

from aiooffload._native import now_ns
from aiooffload.errors import DeviceLostError

if TYPE_CHECKING:
    import asyncio

    from aiooffload.engine.lanes import Lane
    from aiooffload.operation import Operation

__all__ = ["Loss", "LostMarks", "Watchdog", "as_loss", "first_of_each_lane", "loss", "loss_text", "suspects"]

TICK_S: Final = 0.03
SLOWEST: Final = 3
"""So many times as long a tick takes after a while in which nothing moved.

A CPU that sleeps between ticks needs 0.2 ms for one (measured on an H200 machine): 0.65 % of it at the full rate.
"""
STALL_S: Final = 20.0
MARK_TICKS: Final = 11
"""Ticks, about a second where nothing moves, between two looks for marks that were lost."""


class Losable(Protocol):
    """What a loss does to an engine."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it."""

    def lose(self, error: DeviceLostError) -> None:
        """Fail everything; make no driver call from now on. On its loop."""


class Loss:
    """What the process knows of lost devices: a fault of one GPU is the end of all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engines: weakref.WeakSet[Losable] = weakref.WeakSet()
        self.error: DeviceLostError | None = None

    def join(self, engine: Losable) -> None:
        """From now on a loss is told to ``engine``."""
        with self._lock:
            self._engines.add(engine)

    def after_fork(self) -> None:
        """Forget the parent's engines. A loss stays: the child's copy of the driver is of no use either."""
        self._lock = threading.Lock()
        self._engines = weakref.WeakSet()

    def latch(self, error: DeviceLostError, here: Losable) -> None:
        """Note the loss and tell every other engine of the process, each on its own loop."""
        with self._lock:
            self.error = self.error or error
            others = [engine for engine in self._engines if engine is not here]
        for engine in others:
            try:
                engine.loop.call_soon_threadsafe(engine.lose, error)
            except RuntimeError:
                continue  # its loop is closed, nobody waits there


loss: Final = Loss()
"""The loss latch of this process."""


def as_loss(error: Exception) -> DeviceLostError:
    """Return ``error`` as a loss: the driver failed where nothing but a well device can go on."""
    if isinstance(error, DeviceLostError):
        return error
    lost = DeviceLostError(f"the driver failed in a way that leaves work unaccounted for: {error!r}")
    lost.__cause__ = error
    return lost


def suspects(abandoned: Iterable[Operation[Any]]) -> tuple[str, ...]:
    """Name the launches that had not finished, oldest first per lane."""
    return tuple(_place(operation) for operation in abandoned if operation.lane is not None)


def first_of_each_lane(abandoned: Iterable[Operation[Any]]) -> list[str]:
    """Name the oldest unfinished launch of each lane: one of them is to blame."""
    first: dict[int, str] = {}
    for operation in abandoned:
        if operation.lane is not None:
            first.setdefault(operation.lane.index, _place(operation))
    return list(first.values())


def _place(operation: Operation[Any]) -> str:
    return f"{operation.name} on lane {operation.lane.index}"


def loss_text(label: str, error: DeviceLostError, oldest: list[str], note: str, process_wide: bool) -> str:
    """Say which device, what happened, who may have done it, and what is left to do."""
    left = "this process can use no GPU any more; start a new one" if process_wide else "open a new Offload"
    blame = (
        f"oldest unfinished on each lane: {', '.join(oldest)}" if oldest else "nothing of this Offload was in flight"
    )
    parts = [f"{label} is lost: {error}", blame, note, left]
    return "; ".join(part for part in parts if part)


class LostMarks:
    """Finds lanes that the device is through with although their slots do not say so.

    A kernel that writes where it must not may overwrite a mark before anybody has seen it, and whoever awaits that
    would wait for ever. Streams of somebody else are left out: asking one that captures would spoil the capture.

    Parameters
    ----------
    lanes
        All there are.
    look
        Looks at the slots.
    """

    def __init__(self, lanes: Callable[[], Iterable[Lane]], look: Callable[[], object]) -> None:
        self._lanes = lanes
        self._look = look
        self._ticks = 0
        # By index of the lane: how many operations were done the last time.
        self._done: dict[int, int] = {}

    def check(self) -> None:
        """Ask for lanes that have not moved since the last time; every tick calls this. Raises DeviceLostError."""
        self._ticks += 1
        if self._ticks % MARK_TICKS:
            return
        before, self._done = self._done, {}
        for lane in list(self._lanes()):
            if not lane.queue.in_flight or lane.queue.unmarked or lane.adopted:
                continue
            done = self._done[lane.index] = _done_on(lane)
            if before.get(lane.index) != done or not lane.stream.query():
                continue
            self._look()  # the mark may have come meanwhile
            if lane.queue.in_flight and _done_on(lane) == done:
                raise DeviceLostError(f"lane {lane.index} is idle, but a completion mark of it never arrived")


def _done_on(lane: Lane) -> int:
    return lane.queue.issued - lane.queue.in_flight


class Watchdog:
    """Ticks while something is in flight, slower and slower while nothing moves.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    in_flight
        How many operations are on the device.
    completed
        How many have ever arrived.
    look
        Looks at the slots.
    check
        Asks the driver; raises DeviceLostError.
    on_lost
        Told of a loss.
    on_stall
        Told once when nothing has moved for ``STALL_S`` seconds.
    check_limit
        Tells of a loss if a launch is past the hard limit.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        in_flight: Callable[[], int],
        completed: Callable[[], int],
        look: Callable[[], object],
        check: Callable[[], None],
        on_lost: Callable[[DeviceLostError], None],
        on_stall: Callable[[float], None],
        check_limit: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        self._context = copy_context()  # a tick is nobody's affair
        self._in_flight = in_flight
        self._completed = completed
        self._look = look
        self._check = check
        self._on_lost = on_lost
        self._on_stall = on_stall
        self._check_limit = check_limit
        # None while nothing is in flight: an idle engine wakes nobody.
        self._handle: asyncio.TimerHandle | None = None
        self._last = 0
        # How long nothing has moved, and how long the next tick takes.
        self._still_s, self._interval_s = 0.0, TICK_S
        self._asked_ns = 0
        self.checks = 0

    def notice(self) -> None:
        """Something went to the device."""
        if self._handle is None:
            self._still_s, self._interval_s = 0.0, TICK_S
            self._last = self._completed()
            self._call_later()

    def _call_later(self) -> None:
        self._handle = self._loop.call_later(self._interval_s, self._tick, context=self._context)

    def ask_if_due(self) -> None:
        """For a program that polls and never lets the loop run a tick."""
        now = now_ns()
        if self._in_flight() and now - self._asked_ns > TICK_S * 1e9:
            self._ask()

    def _ask(self) -> bool:
        """Ask the driver; False if the device is lost, of which others were told."""
        self._asked_ns = now_ns()
        self.checks += 1
        try:
            self._check()
        except DeviceLostError as error:
            self._on_lost(error)
            return False
        return True

    def _tick(self) -> None:
        self._handle = None
        if not self._in_flight():
            return
        self._look()
        if not self._in_flight():  # all has arrived, or the look has found the device lost
            return
        completed, before_s = self._completed(), self._still_s
        if completed == self._last:
            self._still_s += self._interval_s
            self._interval_s = min(self._interval_s + TICK_S, SLOWEST * TICK_S)
        else:
            self._still_s, self._interval_s = 0.0, TICK_S
        self._last = completed
        # Also while marks arrive: after a fault on one lane, others may go on for seconds.
        if not self._ask():
            return
        self._check_limit()
        if self._still_s >= STALL_S > before_s:
            self._on_stall(STALL_S)
        if self._in_flight():
            self._call_later()

    def stop(self) -> None:
        """Tick no more."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
