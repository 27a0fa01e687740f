"""From a mark on the device to the task that awaits it.

A mark stores a lane's sequence number in its slot and 1 in the bell. The loop looks at the slots
while that pays, sleeps on a timer until shortly before a completion is due, and has the monitor
wake it otherwise (:mod:`aiooffload.rules.wake` decides).

The monitor is a wait on a stream of its own, ``bell >= 1``, followed by a wake that writes an
eventfd. Arming it is a protocol with the device::

    host                                    device
    bell = 0, fence                         slot = sequence
    look at the slots: anything? do not arm bell = 1
    enqueue wait(bell >= 1), wake

The device writes the slot before the bell. If the host's look misses a slot, that slot's bell is
written after the host's 0, and the wait sees it. So no completion is missed, and at most one
armed wait exists: the bell is not set to 0 again before the eventfd of the last one was read.

The wake runs on a thread of the driver's, at an unknown time, possibly while any other thread
holds the interpreter or a lock. Nothing happens there but one ``write`` to the eventfd. The eventfd
is closed only after that write was seen; after a lost device it is never closed, since the
driver might still write to whoever got its number next.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Final, Protocol

from aiooffload._native import Board, Timer, Word, now_ns, timer_slack
from aiooffload.engine.closing import close_all
from aiooffload.engine.health import as_loss
from aiooffload.engine.latency import Latencies
from aiooffload.errors import DeviceLostError, DriverError
from aiooffload.operation import Operation
from aiooffload.rules.wake import Wake, WakePolicy

if TYPE_CHECKING:
    import asyncio

    from aiooffload.drivers.api import Event, Stream

__all__ = ["Calls", "Completion", "EventMarks"]

_COLD_NS: Final = 2_000_000
"""After a sleep this long the CPU's caches are cold."""
_LOOK_NS: Final = 4_000
"""One look's spin inside the extension: how long other callbacks of the loop may wait for it."""


_precise = threading.local()
"""``count``: the Completions of this thread; ``slack_ns``: what the timer slack was before the first."""


def _precise_timers(wanted: bool) -> None:
    """Take the calling thread's timer slack of 50 us away while any Completion of it is open."""
    count = getattr(_precise, "count", 0) + (1 if wanted else -1)
    if wanted and count == 1:
        _precise.slack_ns = timer_slack(1)
    elif count == 0:
        timer_slack(_precise.slack_ns)
    _precise.count = count


class EventMarks:
    """Marks by event, for a device whose streams cannot write words or stall behind a wait.

    The host stores the slot itself once an event says that the lane got there.
    """

    def __init__(self, create: Callable[[], Event]) -> None:
        self._create = create
        self._free: list[Event] = []
        # Per lane, oldest first: the event after an operation and the sequence it stands for.
        self._pending: dict[Word, deque[tuple[Event, int]]] = {}

    def reserve(self) -> None:
        """Make sure that the next mark needs no new event."""
        if not self._free:
            self._free.append(self._create())

    def enqueue(self, stream: Stream, slot: Word, sequence: int) -> None:
        """Enqueue the mark ``sequence`` of the lane with ``slot``."""
        self.reserve()
        event = self._free[-1]
        stream.enqueue_record(event)
        self._free.pop()
        self._pending.setdefault(slot, deque()).append((event, sequence))

    def look(self) -> None:
        """Store the slots of all lanes that got further."""
        for slot, pending in self._pending.items():
            reached = None
            while pending and pending[0][0].query():
                event, reached = pending.popleft()
                self._free.append(event)
            if reached is not None:
                slot.store(reached)

    def close(self) -> None:
        """Destroy the events."""
        pending = [event for events in self._pending.values() for event, _ in events]
        free, self._free = self._free, []
        self._pending.clear()
        close_all(event.close for event in (*free, *pending))


class Calls(Protocol):
    """What running kernels ask of the host, as the loop's looks see it."""

    def settle(self) -> None:
        """End those launches of which everything was read."""

    def look(self) -> None:
        """See whether a kernel has given up."""

    @property
    def called_ns(self) -> int | None:
        """When a request was last read; None while no kernel that calls is on the device."""

    @property
    def gap_ns(self) -> int:
        """How long the last silence between two requests was, 0 if nothing is known."""


class Completion:
    """The way back of one engine.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    board
        Queues and slots of the lanes.
    bell
        The word that every mark rings.
    monitor
        The stream that waits for the bell; carries nothing else.
    policy
        When to look and when to sleep.
    on_progress
        Called after a look that finished something, if something is pending or ``attention`` is set.
    on_flight
        Called in every turn that leaves something in flight.
    on_lost
        Told when the driver says that the device is gone.
    warm_up
        Makes driver calls that change nothing, before a completion that was slept for.
    mark_all
        Enqueues the marks that are missing, before a sleep that they have to end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        board: Board,
        bell: Word,
        monitor: Stream,
        policy: WakePolicy,
        on_progress: Callable[[], None],
        on_flight: Callable[[], None],
        on_lost: Callable[[DeviceLostError], None],
        warm_up: Callable[[], None] = lambda: None,
        mark_all: Callable[[], None] = lambda: None,
    ) -> None:
        self._loop = loop
        # Looks are nobody's affair: in the context of whoever submits they would keep that alive, and pass it on.
        self._context = copy_context()
        self._mark_all = mark_all
        self._warm_up = warm_up
        self._on_flight = on_flight
        self._on_lost = on_lost
        self._board = board
        self._bell = bell
        self._monitor = monitor
        self.policy = policy
        self._on_progress = on_progress
        self._spin_ns = _LOOK_NS if policy.spins and policy.mode != "interrupt" else 0
        self.marks: EventMarks | None = None
        # Reads the requests of running kernels, once there is a kernel that calls.
        self.calls: Calls | None = None
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = Timer()
        _precise_timers(True)
        # Whether a wait is on the monitor stream whose wake was not read yet.
        self.armed = False
        self._disarmed: asyncio.Future[None] | None = None
        self._slept_ns = 0
        # Whether the timer ends a nap: then a glance is enough.
        self._napping = False
        self._timer_ns = 0
        self._suspended = 0
        self._closed = False
        # Whether on_progress has something to do besides sending what is pending.
        self.attention = False
        self.wakes = {"timer": 0, "monitor": 0}
        # From the driver's wake to the loop's read, and from the time of the timer.
        self.late = {"timer": Latencies(), "monitor": Latencies()}
        self.armings = 0
        loop.add_reader(self._eventfd, self._on_bell)
        loop.add_reader(self._timer.fileno(), self._on_timer)

    def notice(self) -> None:
        """Something was enqueued while nobody looks: look soon. Called after a push."""
        if not self._board.watched:
            self._board.watched = True
            self._loop.call_soon(self._turn, context=self._context)

    def look(self) -> int:
        """Finish what has arrived, serve what was asked for, and return how many of both.

        It makes no driver call but for event marks.
        """
        if self.marks is not None:
            self.marks.look()
        return self._poll()

    def _turn(self) -> None:
        """Look once, then decide how to find the next completion."""
        board = self._board
        board.watched = False
        if self._closed:
            return
        if self.marks is not None:
            self._store_marks()
        if self._poll(self._spin_ns if self._settled() else 0):
            # Whoever was woken runs in the loop's next turn: decide after that, not before.
            if board.pending or self.attention:
                self._on_progress()
            if board.in_flight:
                self.notice()
            elif self._timer_ns:
                self._set_timer(0)
        elif not self._closed:
            self._decide()

    def _settled(self) -> bool:
        """Whether no handler has suspended since the last turn: then nobody waits for the loop to go on."""
        channel = self._board.channel
        if channel is None or channel.suspended == self._suspended:
            return True
        self._suspended = channel.suspended
        return False

    def _poll(self, spin_ns: int = 0) -> int:
        """Finish what has arrived and serve what was asked for; return how many of both."""
        board = self._board
        try:
            count = board.poll(spin_ns)
        except DeviceLostError as error:  # of a slot, not of a host function: those failures are their launches'
            self._on_lost(error)
            return 0
        except BaseException:  # of a host function: the loop's to deal with, and no reason to look no more
            self.notice()
            raise
        channel = board.channel
        if channel is not None and channel.unsettled and self.calls is not None:
            self.calls.settle()
            if channel.unsettled:  # nothing in flight may be left to look for, but there is something to read
                self.notice()
        return count

    def _store_marks(self) -> None:
        assert self.marks is not None
        try:
            self.marks.look()
        except DriverError as error:
            self._on_lost(as_loss(error))

    def _decide(self) -> None:
        """Nothing has arrived: how to find the next completion."""
        board = self._board
        self._napping = False
        if board.in_flight:
            self._on_flight()
        called_ns, gap_ns = None, 0
        if self.calls is not None:
            self.calls.look()
            called_ns, gap_ns = self.calls.called_ns, self.calls.gap_ns
        now, due_ns = now_ns(), board.due_ns()
        decision = self.policy.decide(now, board.in_flight, board.progress_ns, due_ns, called_ns, gap_ns)
        if board.unmarked and (decision.wake is not Wake.LOOK or now - board.progress_ns > _COLD_NS):
            self._mark_all()
            self.notice()
            return
        if decision.wake is Wake.LOOK:
            self.notice()
        elif decision.wake is Wake.NAP:
            self._set_timer(decision.timer_ns)
            self._napping = True
        elif decision.wake is Wake.SLEEP:
            if decision.monitor and not self.armed and self._arm():
                self.notice()
            elif decision.timer_ns:
                self._set_timer(decision.timer_ns)
        elif self._timer_ns:
            self._set_timer(0)

    def _arm(self) -> bool:
        """Arm the monitor; True if something arrived meanwhile, and it was not armed."""
        try:
            return self.arm()
        except DriverError as error:
            self._on_lost(as_loss(error))
            return False

    def arm(self) -> bool:
        """The host's side of the protocol; True if something arrived meanwhile, and it was not armed."""
        self._bell.store(0)
        if self._poll():
            self._on_progress()
            return True
        if self._closed:  # what the look ran has ended everything
            return False
        self._monitor.enqueue_wait(self._bell, 1)
        self._monitor.enqueue_wake(self._eventfd)
        self.armed = True
        self.armings += 1
        return False

    def cancel_monitor(self) -> None:
        """Release an armed wait from the host; its wake still arrives."""
        self._bell.store(1)

    async def disarmed(self) -> None:
        """Wait until the wake of an armed wait was seen."""
        while self.armed:
            if self._disarmed is None or self._disarmed.done():
                self._disarmed = self._loop.create_future()
            await self._disarmed

    def _set_timer(self, when_ns: int) -> None:
        if self._closed:  # the device was lost a moment ago
            return
        self._timer_ns = when_ns
        if when_ns:
            self._slept_ns = when_ns - now_ns()
            self._timer.set_at(when_ns)
        else:
            self._timer.clear()

    def _on_bell(self) -> None:
        if self._closed:
            return
        try:
            written_ns = os.eventfd_read(self._eventfd)
        except BlockingIOError:
            return
        self.late["monitor"].add(now_ns() - written_ns)
        self.armed = False
        if self._disarmed is not None and not self._disarmed.done():
            self._disarmed.set_result(None)
        self.wakes["monitor"] += 1
        self._wake()

    def _on_timer(self) -> None:
        if self._closed:
            return
        self.wakes["timer"] += 1
        napping = self._napping
        if napping and self._nap_on():
            return
        if self._timer_ns and not napping:
            self.late["timer"].add(now_ns() - self._timer_ns)
        self._set_timer(0)
        if self._slept_ns > _COLD_NS and self.policy.spins:
            self._rehearse()
        self._wake()

    def _nap_on(self) -> bool:
        """Glance, and nap again if nothing is there. All else that a turn does would cost what the nap saves."""
        self._napping = False
        if self._board.watched or self._closed or self.marks is not None or self.calls is None:
            return False
        if self._poll():
            self._on_progress()
            return False
        called_ns, now = self.calls.called_ns, now_ns()
        if self._closed or called_ns is None or self._board.due_ns():
            return False
        nap_ns = self.policy.nap(now - max(called_ns, self._board.progress_ns), self.calls.gap_ns)
        if not nap_ns:
            return False
        self._timer.set_at(now + nap_ns)
        self._napping = True
        return True

    def _rehearse(self) -> None:
        """Run once through what the completion that is due will run through, and the launch after it.

        A CPU that slept for milliseconds has forgotten this code, and fetching it back takes longer
        than the rest of the wake (measured on an H200 machine for kernels of 10 ms: an excess of
        57 us without, 40 us with this and the longer margin of rules/wake.py).
        """
        operation: Operation[None] = Operation(self._loop, None, "rehearsal")
        self._loop.create_task(operation.wait(), name="aiooffload rehearsal")
        self._loop.call_soon(operation.arrive)
        try:
            self._warm_up()
        except DriverError as error:
            self._on_lost(as_loss(error))

    def _wake(self) -> None:
        if not self._board.watched and not self._closed:
            self._turn()

    def disown(self) -> None:
        """In a forked child: look no more. What the loop watches is the parent's, too, and is left alone."""
        self._closed = True

    def stop(self, *, lost: bool) -> None:
        """Take everything off the loop. The monitor was released and seen before, unless ``lost``."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._eventfd)
        self._loop.remove_reader(self._timer.fileno())
        self._timer.close()
        _precise_timers(False)
        if not self.armed:
            os.close(self._eventfd)
        # else: lost or released too late to be seen; the number must not be used by anybody else.
        if self.marks is not None and not lost:
            self.marks.close()
