"""The way to the device: streams, and what is enqueued on them.

Which operation goes to which lane, and when, is decided in :mod:`aiooffload.rules.scheduler`. Here
it is carried out: waits between lanes, the kernel or the steps of an operation, its mark. A lane
takes at most ``depth`` operations at a time, well under what makes the driver block the enqueuing
thread (FACTS of the CUDA driver: 510 pairs of a launch and a write).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Final

from aiooffload._native import Board, LaneQueue
from aiooffload.engine.closing import close_all
from aiooffload.engine.health import as_loss
from aiooffload.errors import DeviceLostError, DriverError, UsageError
from aiooffload.operation import Operation
from aiooffload.rules.scheduler import Line, Scheduler, dependency_failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiooffload.drivers.api import Event, Stream
    from aiooffload.engine.completion import Completion
    from aiooffload.engine.ranges import Ranges
    from aiooffload.types import Recorder

__all__ = ["ALWAYS", "Lane", "Lanes", "Positions"]

ALWAYS: Final = 2**32 - 1
"""As ``LaneQueue.precise``: every operation has an event of its own."""
_PRECISE: Final = 1024
"""Operations for which a lane records events, once somebody has waited for one that had others behind it."""


class Positions:
    """Events behind operations of one lane, each of which others can wait for.

    Parameters
    ----------
    stream
        The lane's.
    create
        Makes an event.
    depth
        How many operations the lane takes at a time: as far apart are two that share an event.
    """

    __slots__ = ("_at", "_create", "_events", "_last", "_stream")

    def __init__(self, stream: Stream, create: Callable[[], Event], depth: int) -> None:
        self._stream = stream
        self._create = create
        # Recording an event again leaves earlier waits for it alone.
        self._events: list[Event | None] = [None] * (depth + 1)
        self._at = [0] * (depth + 1)  # the sequence behind which each was recorded
        self._last = 0

    def record(self, sequence: int) -> Event:
        """Record one behind operation ``sequence``, the last on the lane."""
        place = sequence % len(self._events)
        event = self._events[place] or self._create()
        self._events[place] = event
        self._stream.enqueue_record(event)
        self._at[place] = self._last = sequence
        return event

    def behind(self, sequence: int) -> Event | None:
        """Return the one right behind operation ``sequence``."""
        place = sequence % len(self._events)
        return self._events[place] if self._at[place] == sequence else None

    def at_or_after(self, sequence: int) -> Event | None:
        """Return the one right behind operation ``sequence``, or one that comes later, if there is any."""
        return self.behind(sequence) or (self.behind(self._last) if self._last >= sequence else None)

    def close(self) -> None:
        """Destroy the events."""
        close_all(event.close for event in self._events if event is not None)


class Lane(Line[Operation[Any]]):
    """One stream of an Offload, and its place in ``off.lanes``.

    Attributes
    ----------
    index
        Its number; that of ``off.lanes[i]`` is ``i`` where all lanes have one priority.
    priority
        The priority of its stream: smaller numbers are more urgent.
    handle
        The driver's stream handle, an integer. A lane has ``__cuda_stream__``, too, so other libraries
        take it for a stream.
    """

    __slots__ = ("_on_lost", "_positions", "stream")

    queue: LaneQueue

    def __init__(
        self,
        index: int,
        stream: Stream,
        queue: LaneQueue,
        create_event: Callable[[], Event],
        on_lost: Callable[[DeviceLostError], None],
        priority: int = 0,
        adopted: bool = False,
    ) -> None:
        super().__init__(index, queue, priority, adopted)
        self.stream: Final = stream
        self._positions = Positions(stream, create_event, queue.depth)
        self._on_lost = on_lost

    @property
    def handle(self) -> int:
        """The driver's stream handle."""
        return self.stream.handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle

    def release(self) -> None:
        """Stop using an adopted stream, with no effect on what is on it; UsageError for any other lane.

        Work of ours that is on it completes as if it had not been released.
        """
        raise UsageError(f"{self!r} is a lane of the Offload's own: only adopted ones are released")

    @property
    def in_flight(self) -> int:
        """Operations of ours on the device."""
        return self.queue.in_flight

    def enqueue_wait_for(self, sequence: int, waiter: Stream) -> None:
        """Hold later work of ``waiter`` until operation ``sequence`` of this lane is done.

        Without an event of its own (see ``precise``) it waits for what was enqueued behind that as well; from
        then on each operation of the lane has one, for a while.
        """
        positions = self._positions
        if positions.behind(sequence) is None and sequence != self.queue.issued:
            self.queue.precise = max(self.queue.precise, _PRECISE)
        waiter.enqueue_wait_event(positions.at_or_after(sequence) or positions.record(self.queue.issued))

    def enqueue_position(self) -> None:
        """Record an event behind the last operation, so that others can wait for it and nothing that comes later."""
        if self.queue.precise != ALWAYS:
            self.queue.precise -= 1
        try:
            self._positions.record(self.queue.issued)
        except DriverError as error:
            self._on_lost(as_loss(error))

    def close(self) -> None:
        """Destroy the stream and its events."""
        close_all((self._positions.close, self.stream.close))

    def __repr__(self) -> str:
        return f"<aiooffload.Lane {self.index}, {self.in_flight} in flight, {len(self.waiting)} waiting>"


class Lanes(Scheduler[Operation[Any], Lane]):
    """Puts operations on lanes.

    Parameters
    ----------
    board, lanes, groups, max_pending
        As for the scheduler.
    completion
        Told of every operation that went to the device.
    on_lost
        Told when the driver says that the device is gone.
    on_finished
        Told when an operation ended on the host, without a mark.
    """

    def __init__(
        self,
        board: Board,
        lanes: list[Lane],
        groups: dict[int, tuple[int, int]],
        completion: Completion,
        max_pending: int,
        on_lost: Callable[[DeviceLostError], None],
        on_finished: Callable[[], None],
    ) -> None:
        super().__init__(board, lanes, groups, max_pending)
        self._tell_finished = on_finished
        self._on_lost = on_lost
        self._completion = completion
        # Told of what happens while there is a trace, else None.
        self.recorder: Recorder | None = None
        # Where a profiler is attached: a range around the driver calls of each operation.
        self.ranges: Ranges | None = None
        self._rooms: deque[asyncio.Future[None]] = deque()
        self._lessees: list[asyncio.Future[None]] = []
        # Those of them that were told and have not run yet: each may take one place.
        self._told: set[asyncio.Future[None]] = set()
        # Those of `board.paused` that are barriers.
        self.barriers = 0

    # -- carrying out ----------------------------------------------------------------------

    def place(self, operation: Operation[Any], lane: Lane | None, part_of: Operation[Any] | None = None) -> None:
        """Send ``operation`` to the device, or keep it on the host until it can go."""
        recorder = self.recorder
        if recorder is not None:
            recorder.submitted(operation, part_of)
        super().place(operation, lane, part_of)
        if recorder is not None:
            recorder.placed(operation)

    def _start(self, operation: Operation[Any], lane: Lane, waits: list[Operation[Any]]) -> None:
        """Enqueue it behind ``waits``."""
        with nullcontext() if self.ranges is None else self.ranges.range(operation.name):
            self._start_now(operation, lane, waits)

    def _start_now(self, operation: Operation[Any], lane: Lane, waits: list[Operation[Any]]) -> None:
        try:
            for dep in waits:
                dep.lane.enqueue_wait_for(dep.sequence, lane.stream)
            if operation.streamed:
                assert operation.steps is not None
                self.tell_on_host(operation)
                operation.steps(lane.stream)  # enqueues piece by piece and comes back by itself
            else:
                self._enqueue_marked(operation, lane)
        except BaseException as error:  # whatever it was, the operation ends with it
            self.refused(operation, error)
            if not isinstance(error, Exception):
                operation.add_done_callback(Operation.look)  # it is raised here
                raise

    def refused(self, operation: Operation[Any], error: BaseException) -> None:
        """The driver refused a part of it: it fails once what went before that part is done."""
        if isinstance(error, DeviceLostError):
            self._on_lost(error)
        if self.dead is not None or isinstance(error, DeviceLostError):
            operation.finish(failure=self.dead or error)
            return
        operation.failure = error
        operation.requires = None
        operation.coarse = False
        operation.steps = lambda stream: None
        try:
            self._enqueue_marked(operation, operation.lane)
        except Exception as unmarked:  # whatever it was, something may run that nothing will ever report
            self._on_lost(as_loss(unmarked))
            operation.finish(failure=error)

    def _enqueue_marked(self, operation: Operation[Any], lane: Lane) -> None:
        queue, marks = lane.queue, self._completion.marks
        if marks:
            marks.reserve()  # before there is anything to mark
        recorder = self.recorder
        if recorder is not None:
            recorder.begins(operation, lane)
        if operation.steps is None:
            assert operation.plan is not None
            sequence = 0 if marks or recorder or operation.coarse else queue.next_sequence
            lane.stream.enqueue_kernel(operation.plan, operation.prepared, operation, sequence)
        else:
            operation.steps(lane.stream)
            if self.dead is not None:  # a program's code ran, and found the device lost or ended the Offload
                operation.finish(failure=self.dead)
                return
        if recorder is not None:
            recorder.ends(operation, lane)
        if (marks or recorder or operation.steps is not None) and not operation.coarse:
            self._enqueue_mark(lane, queue.next_sequence)
        queue.push(operation)
        if queue.precise:
            lane.enqueue_position()
        operation.deps = operation.prepared = operation.steps = None
        self._completion.notice()

    def tell_on_host(self, operation: Operation[Any]) -> None:
        """Let a trace know that the host begins to work on ``operation``."""
        if self.recorder is not None:
            self.recorder.on_host(operation)

    def _enqueue_mark(self, lane: Lane, sequence: int) -> None:
        if self._completion.marks is None:
            lane.stream.enqueue_mark(sequence)
        else:
            self._completion.marks.enqueue(lane.stream, lane.queue.slot, sequence)

    @contextmanager
    def nothing_else(self) -> Iterator[None]:
        """Keep whatever is submitted meanwhile on the host: an operation is being put together on its lane."""
        self._board.paused += 1
        try:
            yield
        finally:
            self._board.paused -= 1
            if self._board.pending and not self._board.paused:
                # Once that operation is there. It may wait, on the device, for what it has submitted.
                asyncio.get_running_loop().call_soon(self.flush)

    def count_barriers(self, count: int) -> None:
        """So many barriers keep everything on the host from now on."""
        self._board.paused += count - self.barriers
        self.barriers = count

    @property
    def stopped(self) -> bool:
        """Whether barriers keep everything on the host, and nothing is just being put together."""
        return 0 < self.barriers == self._board.paused

    def finish_streamed(self, operation: Operation[Any], failure: BaseException | None, result: object = None) -> None:
        """Everything that ``operation`` sent piece by piece is done."""
        operation.deps = None
        operation.finish(result, failure or dependency_failure(operation))
        self.release_followers(operation)
        self._on_finished()

    def _on_finished(self) -> None:
        self._tell_finished()

    # -- missing marks ---------------------------------------------------------------------

    def mark(self, lane: Lane) -> None:
        """Give the lane's last operation the mark that it went without, if so."""
        if not lane.queue.unmarked:
            return
        try:
            self._enqueue_mark(lane, lane.queue.issued)
        except DriverError as error:
            self._on_lost(as_loss(error))
            return
        lane.queue.marked()
        self._completion.notice()

    def mark_all(self) -> None:
        """Give each lane's last operation its mark: nothing coarse stays unseen from here on."""
        for lane in self.lanes:
            self.mark(lane)

    def want_mark(self, operation: Operation[Any]) -> None:
        """Somebody waits for a coarse operation."""
        if operation.queue is None:
            operation.coarse = False
        elif self.dead is None:
            self.mark(operation.lane)

    def _wait(self, operation: Operation[Any], lane: Lane, gate: Operation[Any] | None = None) -> None:
        super()._wait(operation, lane, gate)
        self.mark(lane)  # or a lane that is full of coarse ones would never have room again

    # -- leases ----------------------------------------------------------------------------

    @asynccontextmanager
    async def lease(self, priority: int, check_open: Callable[[], None]) -> AsyncIterator[Lane]:
        """Reserve a lane, the least busy one, once there is one besides the last; see ``Offload.lease``."""
        first, last = self.groups.get(priority, (0, 0))
        if last - first < 2:
            raise UsageError(f"a lease needs two lanes of priority {priority}: the last one stays with all others")
        while len(free := [lane for lane in self.lanes[first:last] if not lane.queue.reserved]) < 2:
            future = asyncio.get_running_loop().create_future()
            self._lessees.append(future)
            await future
            check_open()
        lane = min(free, key=lambda lane: lane.queue.in_flight + lane.queue.load)
        lane.queue.reserved = True
        try:
            yield lane
        finally:
            lane.queue.reserved = False
            self.wake_lessees()

    def wake_lessees(self) -> None:
        """A lane is free again, or none will ever be: let whoever waits for one look."""
        lessees, self._lessees = self._lessees, []
        for future in lessees:
            if not future.done():
                future.set_result(None)

    # -- room ------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until one more operation may wait on the host."""
        loop = asyncio.get_running_loop()
        while self._board.pending >= self.max_pending:
            future = loop.create_future()
            self._rooms.append(future)
            try:
                await future
            finally:
                future.cancel()
                self._told.discard(future)
                if not loop.is_closed():
                    loop.call_soon(self._on_room)  # for the next one, in case this one leaves its place

    def _on_room(self) -> None:
        while self._rooms and self._board.pending + len(self._told) < self.max_pending:
            future = self._rooms.popleft()
            if not future.done():
                self._told.add(future)
                future.set_result(None)
