"""Recording: what happened to each operation while there is a trace, and when, on the device's clock and the host's.

A timed event is recorded on the lane before and after each operation, and read when the host sees that one done. What
the device says is put on the host's clock by a tie (``rules/tie.py``), which every operation narrows: it began after
the host enqueued it and ended before the host saw it. Nothing here makes a driver call once the device is lost.
"""

from __future__ import annotations

import asyncio
import math
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

from aiooffload._native import now_ns
from aiooffload.engine.closing import close_all
from aiooffload.errors import DeviceLostError, DriverError
from aiooffload.rules.tie import MOVE_NS, Tie
from aiooffload.rules.timeline import Recorded, Served

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiooffload.drivers.api import Device, Stream, TimedEvent
    from aiooffload.engine.lanes import Lane, Lanes
    from aiooffload.operation import Operation

__all__ = ["Tracer"]


class _Entry:
    """An operation that is not done: its record, and the events around it on its lane once they are recorded."""

    __slots__ = ("after", "before", "record")

    def __init__(self, record: Recorded) -> None:
        self.record: Final = record
        self.before: TimedEvent | None = None
        self.after: TimedEvent | None = None


class Tracer:
    """Records for one trace. It is the ``Recorder`` of the engine.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    device
        Makes timed events.
    idle
        A stream that carries nothing of the program's: where the clocks are compared.
    lanes
        Knows whether the device is still there.
    on_lost
        Told when the driver says that it is not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device: Device,
        idle: Stream,
        lanes: Lanes,
        on_lost: Callable[[DeviceLostError], None],
    ) -> None:
        self._loop = loop
        self._device = device
        self._idle = idle
        self._lanes = lanes
        self._on_lost = on_lost
        self._open: dict[Operation[Any], _Entry] = {}
        # All that were made, until they are destroyed; and those of them that nothing uses.
        self._events: list[TimedEvent] = []
        self._free: list[TimedEvent] = []
        # Zero of the device's clock, and where that is on the host's; None before begin() and after release().
        self._reference: TimedEvent | None = None
        self._tie = Tie(0, 0)
        self._context: Final = Context()
        self._accepting = True
        self._settled: asyncio.Future[None] | None = None
        self._count = 0
        self.operations: Final[list[Recorded]] = []
        self.calls: Final[list[Served]] = []
        self.began_ns = self.ended_ns = 0
        # How well the two clocks were known to agree, at worst.
        self.uncertainty_ns = 0

    async def begin(self) -> None:
        """Compare the clocks. Raises DeviceLostError, DriverError, or ClosedError if it was terminated meanwhile."""
        try:
            for _ in range(3):
                event, after_ns = self._take(), now_ns()
                self._idle.enqueue_record(event)
                while not event.query():
                    await asyncio.sleep(0 if now_ns() - after_ns < 1_000_000 else 0.001)
                    self._check_alive()  # before the driver is called again
                before_ns = now_ns()
                if self._reference is None:
                    self._reference, self._tie = event, Tie(after_ns, before_ns)
                else:
                    at = event.elapsed_ns(self._reference)
                    self._tie.include(after_ns, at, at, before_ns)
                    self._free.append(event)
        except DeviceLostError as error:
            self._on_lost(error)
            raise
        self.began_ns = now_ns()

    def _check_alive(self) -> None:
        if self._lanes.dead is not None:
            raise self._lanes.dead.with_traceback(None)

    # -- what it is told -------------------------------------------------------------------

    def submitted(self, operation: Operation[Any], part_of: Operation[Any] | None) -> None:
        """Start a record, with arrows from what is recorded of its dependencies."""
        parent = None if part_of is None else self._open.get(part_of)
        if parent is None and (part_of is not None or not self._accepting):
            return  # it belongs to something from before, or comes when all is over
        self._count += 1
        found = (self._open.get(dep) for dep in operation.deps or ())
        record = Recorded(
            self._count,
            str(operation.name),
            operation.kind or "launch",
            operation.submitted_ns,
            tuple(entry.record.number for entry in found if entry is not None),
            None if parent is None else parent.record.number,
        )
        if operation.nbytes:
            record.arguments["bytes"] = operation.nbytes
        self._open[operation] = _Entry(record)
        self.operations.append(record)
        operation.add_done_callback(self._done, context=self._context)

    def placed(self, operation: Operation[Any]) -> None:
        """Note why it waits, if it does."""
        entry = self._open.get(operation)
        if entry is None or operation.finished:
            return
        record = entry.record
        if operation.lane is not None:
            record.lane = operation.lane.index
        if record.enqueued_ns is None:
            record.waited_for = "what it comes after, or a load" if operation.holds else f"room on lane {record.lane}"

    def on_host(self, operation: Operation[Any]) -> None:
        """The host begins to work on it."""
        entry = self._open.get(operation)
        if entry is not None:
            entry.record.on_host = True
            entry.record.enqueued_ns = now_ns()

    def begins(self, operation: Operation[Any], lane: Lane) -> None:
        """Record an event before it, unless one is there: what was refused is enqueued again, without its work."""
        entry = self._open.get(operation)
        if entry is None or entry.record.enqueued_ns is not None:
            return
        record = entry.record
        record.enqueued_ns = now_ns()
        record.lane, record.stream = lane.index, lane.handle
        plan = operation.plan
        if plan is not None:
            record.arguments |= {"grid": plan.grid, "block": plan.block}
            if plan.shared_bytes:
                record.arguments["shared_bytes"] = plan.shared_bytes
        entry.before = self._mark(lane.stream)

    def ends(self, operation: Operation[Any], lane: Lane) -> None:
        """Record an event after it."""
        entry = self._open.get(operation)
        if entry is not None and entry.before is not None and entry.after is None:
            entry.after = self._mark(lane.stream)

    def served(self, request: Any, began_ns: int, failed: int) -> None:
        """Note what a host function did, if a launch of this trace called it."""
        entries = (self._open.get(caller.operation) for caller in request.callers)
        callers = tuple(entry.record.number for entry in entries if entry is not None)
        if callers:
            name = str(request.handler.name)
            self.calls.append(Served(name, began_ns, now_ns(), request.rows, bool(failed), callers))

    # -- times -----------------------------------------------------------------------------

    def _take(self) -> TimedEvent:
        if self._free:
            return self._free.pop()
        self._events.append(self._device.create_timed_event())
        return self._events[-1]

    def _mark(self, stream: Stream) -> TimedEvent | None:
        """Record an event; None where the driver has none to give: an operation does not fail for its trace."""
        if self._reference is None:
            return None
        try:
            event = self._take()
            stream.enqueue_record(event)
        except DeviceLostError:
            raise
        except DriverError:
            return None
        return event

    def _done(self, operation: Operation[Any]) -> None:
        entry = self._open.pop(operation, None)
        if entry is None:
            return
        record, failure = entry.record, operation.failure
        record.seen_ns = operation.finished_ns
        if failure is not None:
            record.failure = repr(failure)
        self._read(entry)
        if not self._open and self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def _read(self, entry: _Entry) -> None:
        """Take the times of what is done, or as far as it got, and its events back."""
        if entry.before is None or self._reference is None or self._lanes.dead is not None:
            return
        try:
            self._read_times(entry, entry.before, self._reference)
        except DeviceLostError as error:
            self._on_lost(error)
        except DriverError:
            return  # the host's times have to do, and its events are not used again

    def _read_times(self, entry: _Entry, before: TimedEvent, reference: TimedEvent) -> None:
        if not before.query():
            return
        record, after, seen_ns = entry.record, entry.after, now_ns()
        began_ns = before.elapsed_ns(reference)
        record.tie, record.began_ns = self._tie, began_ns
        self._free.append(before)
        assert record.enqueued_ns is not None
        if after is None or not after.query():
            return
        record.ended_ns = ended_ns = after.elapsed_ns(reference)
        self._tie.include(record.enqueued_ns, began_ns, ended_ns, seen_ns)
        if ended_ns < MOVE_NS:
            self._free.append(after)
            return
        self.uncertainty_ns = max(self.uncertainty_ns, self._tie.uncertainty_ns)
        self._tie = self._tie.moved(ended_ns)
        self._reference = after
        self._free.append(reference)

    # -- the end ---------------------------------------------------------------------------

    async def settle(self, timeout_s: float) -> bool:
        """Take no more operations and wait until those that were taken are done; False if they were not in time."""
        self._accepting = False
        if self._open:
            self._settled = self._loop.create_future()
            timeout = None if timeout_s == math.inf else timeout_s
            await asyncio.wait([self._settled], timeout=timeout)
        return not self._open

    def release(self) -> None:
        """Read what can be read and destroy the events; from here on the host's times have to do."""
        for entry in self._open.values():
            self._read(entry)
        events, self._events = self._events, []
        self._reference = None
        self._free.clear()
        self.uncertainty_ns = max(self.uncertainty_ns, self._tie.uncertainty_ns)
        if self._lanes.dead is None:
            close_all(event.close for event in events)

    def end(self) -> None:
        """Record nothing any more."""
        self.ended_ns = now_ns()
        try:
            self.release()
        except DeviceLostError as error:
            self._on_lost(error)
        for operation in self._open:
            operation.remove_done_callback(self._done)
        self._open.clear()
