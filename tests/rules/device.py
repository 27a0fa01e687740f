"""A device that is nothing but Python, and operations on it, for the tests of the scheduler.

It carries out what the scheduler decides, and checks each start against what it was told at
submission, by rules of its own: it never looks at what the scheduler notes for itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiooffload.rules.ordering import History, unfinished
from aiooffload.rules.scheduler import Line, Scheduler, dependency_failure, waits_for


class Refused(Exception):
    """What an operation fails with that the driver refused."""


class Lost(Exception):
    """What everything fails with when the device is gone."""


class Op:
    """An operation; what the scheduler reads and writes, and below it what the tests know."""

    def __init__(self, name: str = "op", **given: Any) -> None:
        self.name = name
        self.lane: Any = None
        self.deps: list[Op] | None = None
        self.requires: tuple[Op, ...] | None = None
        self.followers: list[Op] | None = None
        self.steps: Any = None
        self.prepared: Any = None
        self.keep: Any = None
        self.holds = 0
        self.stop: BaseException | None = None
        self.calling = 0
        self.priority = 0
        self.streamed = False
        self.gate = False
        self.finished = False
        self.failure: BaseException | None = None
        self.queue: Any = None
        # Not the scheduler's.
        self.on_host = False
        self.started = False
        self.refuse: Callable[[], BaseException] | None = None
        """What the driver answers when it is to start."""
        self.on_start: Callable[[], object] | None = None
        """Code of the program that runs while it starts."""
        self.named: Line[Op] | None = None
        self.after: tuple[Op, ...] = ()
        self.number = 0
        self.awaits = 0
        """Awaitables that are not over."""
        self.direct: set[Op] = set()
        """What must come before it by its memory and by name, all of it."""
        self.before: set[Op] = set()
        """And what must come before that."""
        self.ahead: set[Op] = set()
        """What the device runs before it."""
        self.waits: list[Op] = []
        self.excused: set[Line[Op]] = set()
        self._callbacks: list[Callable[[Any], object]] = []
        self.device: Device | None = None
        for key, value in given.items():
            assert hasattr(self, key), key
            setattr(self, key, value)
        if self.streamed:
            self.steps = object()

    def look(self) -> BaseException | None:
        return self.failure

    def finish(self, result: Any = None, failure: BaseException | None = None) -> bool:
        if self.finished:
            return False
        self.failure = failure if failure is not None else self.failure
        self.finished, self.requires, self.keep = True, None, None
        if self.device is not None and self._callbacks:
            self.device.later.extend(self._callbacks)
        return True

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        assert self.device is not None
        (self.device.later if self.finished else self._callbacks).append(fn)

    def __repr__(self) -> str:
        return f"<{self.name}>"


class Queue:
    """What a lane has on the device."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.load = 0
        self.reserved = False
        self.operations: deque[Op] = deque()

    @property
    def in_flight(self) -> int:
        return len(self.operations)


class Board:
    """Picks like the real one."""

    def __init__(self, lanes: list[Line[Op]]) -> None:
        self.pending = 0
        self.paused = 0
        self._lanes = lanes
        self._rotate = 0

    def pick(self, first: int, last: int, /) -> int:
        assert 0 <= first < last <= len(self._lanes)
        start = self._rotate if first <= self._rotate < last else first
        free = [i for i in (*range(start, last), *range(first, start)) if not self._lanes[i].queue.reserved]
        best = min(free or [first], key=lambda i: self._lanes[i].queue.in_flight + self._lanes[i].queue.load)
        self._rotate = best + 1
        return best

    def pick_after(self, first: int, last: int, deps: list[Any], /) -> int:
        """As where no durations are known: the lane of all of ``deps``, else the least busy; one without room last."""

        def rank(index: int) -> tuple[bool, bool, int]:
            queue = self._lanes[index].queue
            away = any(dep.queue is not queue for dep in deps)
            return queue.load > 0 or queue.in_flight >= queue.depth, away, queue.in_flight + queue.load

        free = [i for i in range(first, last) if not self._lanes[i].queue.reserved]
        return min(free or [first], key=rank)


class Memory:
    """An allocation: the rule's history, and everything that ever used it."""

    def __init__(self) -> None:
        self.history: History[Op] = History()
        self.users: list[tuple[Op, bool]] = []


class Device(Scheduler[Op, Line[Op]]):
    """Carries out what the scheduler decides.

    Parameters
    ----------
    groups
        How many lanes there are of each priority.
    depth, calling_depth
        How many operations one lane takes.
    calling, adopted
        How many lanes there are of these kinds.
    max_pending
        How many may wait on the host.
    checked
        Check each start; a million of them leave that out.
    """

    def __init__(
        self,
        groups: dict[int, int],
        depth: int = 2,
        calling: int = 0,
        adopted: int = 0,
        max_pending: int = 1 << 40,
        checked: bool = True,
    ) -> None:
        lanes: list[Line[Op]] = []
        ranges = {}
        for priority, count in groups.items():
            ranges[priority] = (len(lanes), len(lanes) + count)
            lanes += [Line(len(lanes) + i, Queue(depth), priority) for i in range(count)]
        super().__init__(Board(lanes), lanes, ranges, max_pending)
        self.board = self._board
        self.calling = [Line(len(lanes) + i, Queue(1)) for i in range(calling)]
        lanes += self.calling
        others = [Line(len(lanes) + i, Queue(depth), adopted=True) for i in range(adopted)]
        self.adopted.update(others)
        lanes += others
        self.checked = checked
        self.later: deque[Callable[[Any], object]] = deque()
        # What waits on each lane, in the order in which it began to; started and finished ones are passed over.
        self.log: dict[Line[Op], deque[Op]] = {lane: deque() for lane in lanes}
        self.order: list[Op] = []
        self.streams: list[Op] = []
        self.tasks: list[Op] = []
        self.ending: list[Op] = []
        """Calling ones whose kernel is over."""
        self.calls: list[Op] = []
        """Those that call, ever."""
        self.needed: set[Op] = set()
        """What calls and had not started when a host function began to wait for it, or for what comes after it."""
        self.borrowers: set[Op] = set()
        """What has started on a lane that is kept for something that comes after it."""
        self.rooms = 0
        self._submitted = 0
        self.gated = False

    # -- submission, as the engine does it -------------------------------------------------

    def submit(
        self,
        op: Op,
        uses: Sequence[tuple[Memory, bool]] = (),
        after: Iterable[Op] = (),
        lane: Line[Op] | None = None,
        instant: bool = False,
        awaits: int = 0,
    ) -> Op:
        after = tuple(after)
        op.priority = self.check_lane(op, lane, op.priority)
        if op.on_host:
            self.on_host[op] = lambda: self._run_on_host(op)
        deps = [dep for memory, writes in uses for dep in memory.history.conflicts(writes)] + unfinished(after)
        try:
            self.check_room(op, instant, deps, lane, bool(awaits))
        except BaseException:
            self.on_host.pop(op, None)
            raise
        self._submitted += 1
        op.number = self._submitted
        op.device, op.named, op.after, op.awaits = self, lane, after, awaits
        if op.calling:
            self.calls.append(op)
        if self.checked:
            users = [user for memory, writes in uses for user, wrote in memory.users if writes or wrote]
            op.direct = {*after, *users} - {op}
            op.before = op.direct.union(*(dep.before for dep in op.direct))
        for memory, writes in uses:
            memory.history.record(op, writes)
            memory.users.append((op, writes))
        op.deps = list(dict.fromkeys(deps)) or None
        op.requires = after or None
        op.holds += awaits
        self.place(op, lane)
        return op

    def promised(self) -> list[Op]:
        """The launches of host functions that have not started: a calling lane is kept for each."""
        return [op for op in self.calls if op.calling == 2 and not op.finished and not op.started]

    def wait_in_call(self, operation: Op) -> None:
        waiting = [op for op in self.calls if not op.started and not op.finished]
        self.needed |= {op for op in waiting if waits_for([operation], op, lanes=True)}
        super().wait_in_call(operation)

    def is_awaited(self, op: Op) -> bool:
        """Whether a launch of a host function, which has not started, comes after ``op``."""
        return any(
            op in promised.before or waits_for(promised.deps or (), op, lanes=True) for promised in self.promised()
        )

    # -- carrying out ----------------------------------------------------------------------

    def _wait(self, operation: Op, lane: Line[Op], gate: Op | None = None) -> None:
        super()._wait(operation, lane, gate)
        log = self.log[lane]
        self.gated |= operation.gate
        later = [op for op in log if op.gate and op.number > operation.number and not op.finished] if self.gated else []
        later = [op for op in later if not op.started]
        if later:  # what was submitted before a gate goes ahead of it
            log.insert(log.index(later[0]), operation)
        else:
            log.append(operation)

    def live(self, lane: Line[Op]) -> list[Op]:
        """Those that wait on a lane."""
        return [op for op in self.log[lane] if not op.started and not op.finished]

    def _start(self, operation: Op, lane: Line[Op], waits: list[Op]) -> None:
        log = self.log[lane]
        while log and log[0] is not operation and (log[0].finished or log[0].started):
            log.popleft()
        assert not operation.started, "started twice"
        assert not log or log[0] is operation, "out of order on its lane"
        if self.checked:
            self._check_start(operation, lane, waits)
        operation.started, operation.waits, operation.lane = True, waits, lane
        self.order.append(operation)
        if operation.on_start is not None:
            operation.on_start()
        error = None if operation.refuse is None else operation.refuse()
        if isinstance(error, Lost):
            self.lose(error)
            operation.finish(failure=self.dead)
            return
        if error is not None:
            operation.failure, operation.requires = error, None
        elif operation.streamed:
            operation.steps = None
            self.streams.append(operation)
            return
        operation.queue = lane.queue
        lane.queue.operations.append(operation)
        operation.deps = operation.steps = None
        if error is not None and not isinstance(error, Exception):
            raise error

    def _check_start(self, op: Op, lane: Line[Op], waits: list[Op]) -> None:
        assert not op.finished
        assert self.dead is None
        exempt = op.calling != 1 or op in self.needed or self.is_awaited(op)
        assert not (self.board.paused if exempt else self.pauses), "started during maintenance"
        free = sum(not lane.queue.in_flight for lane in self.calling)
        if op.calling == 1 and free <= len(self.promised()):
            assert self.is_awaited(op), "on a lane that is kept for another"
            self.borrowers.add(op)
        assert lane.queue.in_flight < lane.queue.depth, "its lane is full"
        assert not op.awaits, "started before an awaitable was over"
        assert not any(dep.failure for dep in op.after), "started although what it names has failed"
        if op.named is not None:
            assert lane is op.named
        elif op.calling:
            assert lane in self.calling
        else:
            first, last = self.groups[op.priority]
            assert first <= lane.index < last, "on a lane of another priority"
            assert not lane.queue.reserved or lane in op.excused, "on a reserved lane"
        for dep in waits:
            assert dep.queue is not None, f"the device cannot wait for {dep}, which is not there"
            assert not dep.calling
            assert dep.lane is not lane
        there = {*lane.queue.operations, *waits}
        op.ahead = there.union(*(dep.ahead for dep in there))
        for dep in op.direct:
            host = dep.calling or dep.on_host or dep.queue is None
            assert dep.finished or (dep in op.ahead and not host), f"started before {dep}"

    def _run_on_host(self, op: Op) -> None:
        assert not op.started
        assert not op.awaits
        if self.checked:
            assert all(dep.finished for dep in op.direct), "a host task started before what it comes after was done"
        op.started = True
        self.order.append(op)
        failure = dependency_failure(op)
        if failure is None:
            self.tasks.append(op)
        else:
            self.end_on_host(op, failure)

    def _on_room(self) -> None:
        self.rooms += 1

    def _on_finished(self) -> None:
        pass

    # -- events ----------------------------------------------------------------------------

    def run_later(self) -> None:
        """Run the callbacks of what has finished."""
        while self.later:
            self.later.popleft()(None)

    @property
    def in_hand(self) -> list[Op]:
        """What the host may be through with: host tasks, and what goes piece by piece behind what the device is at."""
        return self.tasks + [op for op in self.streams if all(dep.finished for dep in op.ahead)]

    def can_arrive(self, lane: Line[Op]) -> bool:
        """Whether the device may be through with the first operation of a lane."""
        operations = lane.queue.operations
        return bool(operations) and all(dep.finished for dep in operations[0].waits)

    def arrive(self, lane: Line[Op]) -> Op:
        """The mark of the first operation of a lane arrives."""
        op: Op = lane.queue.operations.popleft()
        failure = None if op.failure is not None else dependency_failure(op)
        if op.calling and op.failure is None:
            self.ending.append(op)
        else:
            op.finish(failure=failure)
            if op.calling:
                self.release_followers(op)
        op.ahead, op.waits = set(), []
        self.settle_pauses()
        if self.board.pending:
            self.flush()
        return op

    def end_calling(self, op: Op) -> None:
        """No host function of it runs any more."""
        self.ending.remove(op)
        op.finish(failure=dependency_failure(op))
        self.release_followers(op)

    def end_on_host(self, op: Op, failure: BaseException | None = None) -> None:
        """A host task, or what goes piece by piece, is over."""
        for hands in (self.tasks, self.streams):
            if op in hands:
                hands.remove(op)
        op.deps = None
        op.finish(failure=failure if failure is not None else op.stop)
        self.release_followers(op)

    def end_awaitable(self, op: Op, failure: BaseException | None = None) -> None:
        """One that ``op`` comes after is over."""
        op.awaits -= 1
        if failure is None:
            self.release(op)
        else:
            self.stop(op, failure)

    def pause(self) -> None:
        self.pauses += 1
        self.settle_pauses()

    def settle_pauses(self) -> None:
        if self.pauses and not any(lane.queue.in_flight for lane in self.calling):
            self.board.paused = self.pauses

    def resume(self) -> None:
        self.pauses -= 1
        if self.board.paused:
            self.board.paused = self.pauses
        if not self.pauses and self.dead is None:
            self.flush()

    def lose(self, failure: Lost) -> None:
        """The device is gone."""
        there = [op for lane in self.lanes for op in lane.queue.operations]
        for lane in self.lanes:
            lane.queue.operations.clear()
        for op in (*there, *self.ending, *self.tasks, *self.streams):
            op.finish(failure=failure)
        for hands in (self.ending, self.tasks, self.streams):
            hands.clear()
        self.abandon(failure)
        self.forget()

    def settle(self) -> None:
        """Let everything come to its end that can."""
        while True:
            self.run_later()
            if hands := self.in_hand:
                self.end_on_host(hands[0])
            elif self.ending:
                self.end_calling(self.ending[0])
            elif (lane := next((lane for lane in self.lanes if self.can_arrive(lane)), None)) is not None:
                self.arrive(lane)
            else:
                return
