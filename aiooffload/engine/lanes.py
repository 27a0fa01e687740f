"""The way to the device: lanes, what waits on the host for them, and in which order it goes.

The first lanes take any operation. Behind them come those with a purpose of their own: calling
lanes, for launches whose kernels call host functions, and the lanes of their mapped arguments.
What comes after a launch that calls waits on the host until that is done, so nothing on the
first lanes ever waits for a host function, and whatever a host function submits there goes on.

An operation that may not go to the device yet is either *held* (something it needs is not on
the device: a dependency that waits itself, a kernel's load, an awaitable) or *waiting* on a lane
that is full. Neither blocks the caller. A lane takes at most ``depth`` operations at a time, well
under what makes the driver block the enqueuing thread (FACTS of the CUDA driver: 510 pairs of a
launch and a write).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from aiooffload._native import Board, LaneQueue
from aiooffload.engine.health import as_loss
from aiooffload.errors import DependencyError, DeviceLostError, UsageError, WouldBlock
from aiooffload.rules.ordering import unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from aiooffload.drivers.api import Event, Stream
    from aiooffload.engine.completion import Completion
    from aiooffload.operation import Operation

__all__ = ["Lane", "Lanes", "dependency_error", "dependency_failure", "waits_for"]


class Lane:
    """One stream of an Offload, and its place in ``off.lanes``.

    Attributes
    ----------
    index
        Position in ``off.lanes``.
    handle
        The driver's stream handle, an integer.
    """

    __slots__ = ("_event", "_event_sequence", "index", "queue", "stream", "waiting")

    def __init__(self, index: int, stream: Stream, queue: LaneQueue, event: Event) -> None:
        self.index: Final = index
        self.stream: Final = stream
        self.queue: Final = queue
        # In submission order; the first is not finished, and waits because the queue is full or a
        # barrier is up.
        self.waiting: deque[Operation[Any]] = deque()
        # Recorded after operation `_event_sequence`; recording again leaves earlier waits alone.
        self._event = event
        self._event_sequence = queue.issued

    @property
    def handle(self) -> int:
        """The driver's stream handle."""
        return self.stream.handle

    @property
    def in_flight(self) -> int:
        """Operations of ours on the device."""
        return self.queue.in_flight

    def enqueue_wait_for(self, sequence: int, waiter: Stream) -> None:
        """Hold later work of ``waiter`` until operation ``sequence`` of this lane is done."""
        if sequence > self._event_sequence:
            self.stream.enqueue_record(self._event)
            self._event_sequence = self.queue.issued
        waiter.enqueue_wait_event(self._event)

    def drop_finished(self) -> None:
        """Drop what was stopped while it waited, from both ends.

        What is stopped in the middle stays until flush() gets there: a search for each would make
        stopping ten thousand quadratic.
        """
        while self.waiting and self.waiting[0].finished:
            self.waiting.popleft()
        while self.waiting and self.waiting[-1].finished:
            self.waiting.pop()

    def close(self) -> None:
        """Destroy the stream and its event."""
        self._event.close()
        self.stream.close()

    def __repr__(self) -> str:
        return f"<aiooffload.Lane {self.index}, {self.in_flight} in flight, {len(self.waiting)} waiting>"


class Lanes:
    """Puts operations on lanes.

    Parameters
    ----------
    board
        Knows what is in flight and picks the least busy lane.
    lanes
        The lanes, by index.
    completion
        Told of every operation that went to the device.
    max_pending
        How many operations may wait on the host.
    on_lost
        Told when the driver says that the device is gone.
    on_finished
        Told when an operation ended on the host, without a mark.
    """

    def __init__(
        self,
        board: Board,
        lanes: list[Lane],
        completion: Completion,
        max_pending: int,
        on_lost: Callable[[DeviceLostError], None],
        on_finished: Callable[[], None],
    ) -> None:
        self._on_finished = on_finished
        self._board = board
        self._on_lost = on_lost
        # All of them; the first `board.open` take any operation, `calling` is among the others.
        self.lanes = lanes
        self.calling: list[Lane] = []
        # Barriers that were asked for: no launch that calls starts while there is one, except those of
        # host functions. Once no such launch is on the device, `board.paused` holds up all others, too.
        self.pauses = 0
        self._completion = completion
        self._max_pending = max_pending
        self.held: dict[Operation[Any], None] = {}
        # Operations that use no lane and have not started, each with what starts it.
        self.on_host: dict[Operation[Any], Callable[[], None]] = {}
        # board.pending counts the held and the waiting ones, board.paused the barriers up; they
        # live there because the launch path looks at them.
        # Released and not started yet; emptied before release() returns to whoever is outermost.
        self._ready: deque[Operation[Any]] = deque()
        self._starting = False
        # Set by abandon(): what everything ends with from then on.
        self.dead: BaseException | None = None
        self._rooms: deque[asyncio.Future[None]] = deque()

    # -- submission ------------------------------------------------------------------------

    def check_room(
        self, operation: Operation[Any], instant: bool, deps: Iterable[Operation[Any]], lane: Lane | None
    ) -> None:
        """Raise WouldBlock if one more operation may not wait on the host; changes nothing."""
        if instant:
            self._check_instant(operation, deps, lane)
        elif self._board.pending >= self._max_pending:
            raise WouldBlock(f"{self._board.pending} operations wait on the host (max_pending); await off.room()")

    def _check_instant(self, operation: Operation[Any], deps: Iterable[Operation[Any]], lane: Lane | None) -> None:
        waiting = next((dep for dep in deps if _needs_host(dep)), None)
        if waiting is not None:
            raise WouldBlock(f"it comes after {waiting!r}, which only the host can wait for")
        target = lane or self._home(operation, deps) or self._pick(operation)
        if self._is_paused(operation):
            raise WouldBlock("maintenance is going on")
        if target.waiting or target.queue.in_flight == target.queue.depth:
            raise WouldBlock(f"lane {target.index} is full")

    def check_lane(self, operation: Operation[Any], lane: Lane | None) -> None:
        """Raise UsageError if ``lane`` is none of those that ``operation`` may use."""
        ours = self.calling if operation.calling else self.open
        if lane is not None and not any(lane is one for one in ours):
            raise UsageError(f"{lane!r} is not a lane of this Offload: take one of off.lanes")

    @property
    def open(self) -> list[Lane]:
        """The lanes that take any operation."""
        return self.lanes[: self._board.open]

    def free_calling_lane(self) -> Lane | None:
        """Return a calling lane on which nothing runs or waits, None if there is none."""
        return next((lane for lane in self.calling if not lane.waiting and not lane.queue.in_flight), None)

    def place(self, operation: Operation[Any], lane: Lane | None) -> None:
        """Send ``operation`` to the device, or keep it on the host until it can go.

        ``operation.deps`` holds what must come before it, ``holds`` what else keeps it.
        """
        if self.dead is not None:
            self.on_host.pop(operation, None)
            operation.finish(failure=self.dead)
            return
        operation.lane = lane
        for dep in operation.deps or ():
            if operation in self.on_host:
                self._hold_until_done(operation, dep)
            else:
                self._hold_behind(operation, dep)
        if operation.holds:
            self.held[operation] = None
            self._board.pending += 1
        elif operation in self.on_host:
            self._ready.append(operation)
            self._start_ready()
        else:
            self._to_lane(operation, self._home_or_pick(operation))

    def _hold_until_done(self, operation: Operation[Any], dep: Operation[Any]) -> None:
        """Hold ``operation``, which runs on the host, until ``dep`` is done, not only on the device."""
        operation.holds += 1
        dep.add_done_callback(lambda _: self.release(operation))

    def _hold_behind(self, operation: Operation[Any], dep: Operation[Any]) -> None:
        """Hold ``operation`` until ``dep`` is on the device (done, if it calls), unless a lane's order is enough."""
        if _needs_host(dep) and not self._same_queue(dep, operation):
            operation.holds += 1
            if dep.followers is None:
                dep.followers = []
            dep.followers.append(operation)

    def _same_queue(self, dep: Operation[Any], operation: Operation[Any]) -> bool:
        """Whether the order of one lane's waiting operations is enough to put ``dep`` first."""
        lane = dep.lane
        if lane is None or dep.streamed or dep.calling or operation.calling or dep in self.held:
            return False
        if operation.lane is None and all(other.lane is lane for other in operation.deps or () if not other.finished):
            operation.lane = lane
        return operation.lane is lane

    def _home(self, operation: Operation[Any], deps: Iterable[Operation[Any]]) -> Lane | None:
        """The lane on which all unfinished dependencies sit, if it is one and ``operation`` may go there."""
        if operation.calling:
            return None
        home: Lane | None = None
        for dep in deps:
            if dep.finished:
                continue
            if home is not None and dep.lane is not home:
                return None
            home = dep.lane
        return home

    def _home_or_pick(self, operation: Operation[Any]) -> Lane:
        if operation.lane is not None:
            chosen: Lane = operation.lane
            return chosen
        return self._home(operation, operation.deps or ()) or self._pick(operation)

    def _pick(self, operation: Operation[Any]) -> Lane:
        if operation.calling:
            first = self.calling[0].index
            return self.lanes[self._board.pick(first, first + len(self.calling))]
        return self.lanes[self._board.pick(0, self._board.open)]

    def _is_paused(self, operation: Operation[Any]) -> bool:
        """Whether maintenance keeps it on the host; a host function's launch it has to wait for."""
        return bool(self.pauses if operation.calling == 1 else self._board.paused)

    def _to_lane(self, operation: Operation[Any], lane: Lane) -> None:
        operation.lane = lane
        if lane.waiting or self._is_paused(operation) or lane.queue.in_flight >= lane.queue.depth:
            lane.waiting.append(operation)
            lane.queue.load += 1
            self._board.pending += 1
        else:
            self._enqueue(operation, lane)

    def _enqueue(self, operation: Operation[Any], lane: Lane) -> None:
        """Put it on the device. A failure here is the operation's, wherever it was submitted from."""
        if self.dead is not None:
            self._finish_unstarted(operation, self.dead)
            return
        failure = dependency_failure(operation)
        if failure is not None:
            self._finish_unstarted(operation, failure)
            return
        try:
            for dep in unfinished(operation.deps or ()):
                if dep.lane is not lane:
                    dep.lane.enqueue_wait_for(dep.sequence, lane.stream)
            if operation.streamed:
                assert operation.steps is not None
                operation.steps(lane.stream)  # enqueues piece by piece and comes back by itself
                return
            self._enqueue_marked(operation, lane)
        except Exception as error:  # whatever it was, the operation ends with it
            self.refused(operation, error)
        if not operation.calling or operation.finished:
            self.release_followers(operation)

    def refused(self, operation: Operation[Any], error: BaseException) -> None:
        """The driver refused a part of it: it fails once what went before that part is done."""
        if isinstance(error, DeviceLostError):
            self._on_lost(error)
            operation.finish(failure=self.dead or error)
            return
        operation.failure = error
        operation.requires = None
        operation.steps = lambda stream: None
        try:
            self._enqueue_marked(operation, operation.lane)
        except Exception as unmarked:  # whatever it was, something may run that nothing will ever report
            self._on_lost(as_loss(unmarked))
            operation.finish(failure=error)

    def _enqueue_marked(self, operation: Operation[Any], lane: Lane) -> None:
        queue, stream, marks = lane.queue, lane.stream, self._completion.marks
        sequence = queue.next_sequence
        if marks:
            marks.reserve()  # before there is anything to mark
        if operation.steps is None:
            assert operation.plan is not None
            stream.enqueue_kernel(operation.plan, operation.prepared, operation, 0 if marks else sequence)
        else:
            operation.steps(stream)
            if not marks:
                stream.enqueue_mark(sequence)
        if marks:
            marks.enqueue(stream, queue.slot, sequence)
        queue.push(operation)
        operation.deps = operation.prepared = operation.steps = None
        self._completion.notice()

    def finish_streamed(self, operation: Operation[Any], failure: BaseException | None, result: object = None) -> None:
        """Everything that ``operation`` sent piece by piece is done."""
        operation.deps = None
        operation.finish(result, failure)
        self.release_followers(operation)
        self._on_finished()

    # -- progress --------------------------------------------------------------------------

    def release(self, operation: Operation[Any]) -> None:
        """One thing that held ``operation`` on the host is over."""
        operation.holds -= 1
        if operation.holds == 0 and operation in self.held:
            del self.held[operation]
            self._board.pending -= 1
            self._ready.append(operation)
            self._start_ready()

    def _start_ready(self) -> None:
        """Send what nothing holds any more; starting one may release the next, in a chain of any length."""
        if self._starting:
            return
        self._starting = True
        try:
            while self._ready:
                operation = self._ready.popleft()
                if operation.finished:
                    continue
                start = self.on_host.pop(operation, None)
                if operation.stop is not None:
                    self._finish_unstarted(operation, operation.stop)
                elif start is not None:
                    start()
                else:
                    self._to_lane(operation, self._home_or_pick(operation))
        finally:
            self._starting = False
        self._wake_rooms()

    def release_followers(self, operation: Operation[Any]) -> None:
        """``operation`` is on the device or done: what was held for it may go."""
        followers, operation.followers = operation.followers, None
        # One that never ran leaves what it had to come after to those who came after it.
        inherited = operation.deps if operation.finished else None
        for follower in followers or ():
            for dep in inherited or ():
                if follower.deps is not None and dep not in follower.deps:
                    follower.deps.append(dep)
                    self._hold_behind(follower, dep)
            self.release(follower)

    def flush(self) -> None:
        """Send what fits; called after every progress while something is pending."""
        if self._board.paused or self.dead is not None:
            return
        for lane in self.lanes:
            while lane.waiting and lane.queue.in_flight < lane.queue.depth and not self._board.paused:
                if self._is_paused(lane.waiting[0]) and not lane.waiting[0].finished:
                    break
                operation = lane.waiting.popleft()
                if operation.finished:  # stopped while it waited, and counted then
                    continue
                lane.queue.load -= 1
                self._board.pending -= 1
                self._enqueue(operation, lane)
        self._wake_rooms()

    # -- stopping --------------------------------------------------------------------------

    def stop(self, operation: Operation[Any], failure: BaseException) -> None:
        """End ``operation`` with ``failure`` if it is still on the host."""
        operation.stop = failure
        if operation.finished or operation.queue is not None:
            return
        if operation in self.held:
            del self.held[operation]
            self.on_host.pop(operation, None)
        elif operation in self._ready or operation.lane is None or (operation.streamed and operation.steps is None):
            return  # about to start, or going piece by piece: whoever does that sees `stop`
        else:
            operation.lane.queue.load -= 1
        self._board.pending -= 1
        self._finish_unstarted(operation, failure)
        if operation.lane is not None:
            operation.lane.drop_finished()

    def _finish_unstarted(self, operation: Operation[Any], failure: BaseException) -> None:
        operation.deps = unfinished(operation.deps or ()) or None
        for dep in operation.deps or ():  # it stands for them in histories, which hold it weakly
            dep.keep = (dep.keep, operation)
        operation.prepared = operation.steps = None
        operation.finish(failure=failure)
        self.release_followers(operation)
        self._wake_rooms()
        self._on_finished()

    def abandon(self, failure: BaseException) -> list[Operation[Any]]:
        """Fail everything on the host, because the device is gone; returns it."""
        self.dead = failure
        waiting = [*self.held, *self._ready, *(operation for lane in self.lanes for operation in lane.waiting)]
        self.held.clear()
        self.on_host.clear()
        self._ready.clear()
        for lane in self.lanes:
            lane.waiting.clear()
            lane.queue.load = 0
        self._board.pending = 0
        for operation in waiting:
            operation.finish(failure=failure)
        self._wake_rooms()
        return waiting

    # -- room ------------------------------------------------------------------------------

    async def room(self) -> None:
        """Wait until one more operation may wait on the host."""
        while self._board.pending >= self._max_pending:
            future = asyncio.get_running_loop().create_future()
            self._rooms.append(future)
            await future

    def _wake_rooms(self) -> None:
        while self._rooms and self._board.pending < self._max_pending:
            future = self._rooms.popleft()
            if not future.done():
                future.set_result(None)


def _needs_host(dep: Operation[Any]) -> bool:
    """Whether only the host can wait for ``dep``: it is not on the device yet, or its kernel calls."""
    return not dep.finished and (dep.queue is None or dep.calling != 0)


def waits_for(deps: Iterable[Operation[Any]], launch: Operation[Any]) -> bool:
    """Whether one of ``deps`` is ``launch``, or waits on the host for something that comes after it."""
    ahead, seen = list(deps), set()
    while ahead:
        dep = ahead.pop()
        if dep is launch:
            return True
        if dep not in seen and dep.queue is None and not dep.finished:
            seen.add(dep)
            ahead += dep.deps or ()
    return False


def dependency_failure(operation: Operation[Any]) -> DependencyError | None:
    """Return the failure of an operation of which something named in ``after`` has failed, or None."""
    for dep in operation.requires or ():
        if dep.failure is not None:
            return dependency_error(f"{dep.name}, which {operation.name} came after,", dep.failure)
    return None


def dependency_error(what: str, cause: BaseException) -> DependencyError:
    """Return the failure of an operation that did not start because ``what`` failed."""
    root = cause
    while isinstance(root, DependencyError) and root.__cause__ is not None:
        root = root.__cause__
    error = DependencyError(f"{what} failed: {root!r}")
    error.__cause__ = cause
    return error
