"""The scheduler: which operation goes to which lane, when, and what waits on the host meanwhile.

It takes events (submitted, released, arrived, stopped, lost) and decides; a subclass carries out
what it decides (:class:`aiooffload.engine.lanes.Lanes` does it on streams). An operation goes
through these states::

    held      something it needs is not on the device: a dependency that waits itself, a kernel's
              load, an awaitable
    waiting   on its lane, which is full, paused, or has others waiting; a launch whose kernel calls
              host functions, for any lane of its kind
    started   on the device, in the order of its lane; or in the hands of the host (a host task, a
              copy that goes piece by piece)
    finished

Order on the device costs nothing on one lane, and an event between two. An operation with
unfinished dependencies goes where it is expected to start first, by how long the kernels in between
took so far, or all alike where nothing is known. Where several lanes are as good, as at the end of a
chain, that is the lane that holds all dependencies, if there is one. One without goes to the least busy lane of its
priority. What only the host can wait for (a host task, a gate, a launch whose kernel calls) holds
what comes after it on the host.

Whatever waits, waits for something submitted before it, or for the device: so nothing waits in a circle.
To that end what was submitted before a gate goes ahead of it, however late it comes to the lane; and launches
whose kernels call, each of which may wait for another by way of its host functions, have a lane of their own
while they run, of which one is kept for each that a host function has submitted. What that one comes after may
use it meanwhile.

The first lanes take any operation of the ordinary priority; then come those of other priorities,
and those with a purpose of their own: calling lanes, the lanes of mapped arguments, and streams of
somebody else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, Protocol, TypeVar

from aiooffload.errors import DependencyError, UsageError, WouldBlock
from aiooffload.rules.ordering import unfinished

__all__ = [
    "Board",
    "Line",
    "Queue",
    "Scheduler",
    "Work",
    "dependency_error",
    "dependency_failure",
    "needs_host",
    "waits_for",
]


class Queue(Protocol):
    """What a lane has on the device."""

    @property
    def in_flight(self) -> int:
        """Operations on the device."""

    @property
    def depth(self) -> int:
        """How many it takes at a time."""

    load: int
    """Operations that wait on the host for this lane."""
    reserved: bool
    """Whether it takes only what names it."""


class Board(Protocol):
    """The queues of all lanes."""

    pending: int
    """Operations that are held or waiting."""
    paused: int
    """Why nothing starts: barriers that are up, and operations that are being put together."""

    def pick(self, first: int, last: int, /) -> int:
        """Return the index of the least busy lane of a range that is not reserved."""

    def pick_after(self, first: int, last: int, deps: list[Any], /) -> int:
        """Return the index of the lane, not reserved, on which what comes after ``deps`` is expected to start first.

        Of several, the one that holds all of ``deps``: order costs nothing there.
        """


class Work(Protocol):
    """An operation, as far as the scheduler reads and writes it."""

    name: str
    lane: Any
    """The lane it is on or is bound for; None while that is open."""
    deps: Any
    """What must come before it on the device, as a list; None once it is there."""
    requires: Any
    """Those whose failure is its failure."""
    followers: Any
    """What is held until this one is on the device, or done."""
    steps: Any
    prepared: Any
    keep: Any
    holds: int
    """How many things keep it on the host."""
    stop: BaseException | None
    """What it ends with if it can be stopped."""
    calling: int
    """Its kernel calls host functions: 1, or 2 if a host function launched it."""
    priority: int
    streamed: bool
    """It goes piece by piece: the order of its lane alone does not put others after it."""
    gate: bool
    """What comes after it on its lane waits behind it on the host."""

    @property
    def finished(self) -> bool:
        """Whether the device no longer touches its memory."""

    @property
    def failure(self) -> BaseException | None:
        """What it failed with."""

    @property
    def queue(self) -> Any:
        """The queue that it is or was on; None before."""

    def look(self) -> Any:
        """Return what it failed with, which then has been looked at."""

    def finish(self, result: Any = None, failure: BaseException | None = None) -> bool:
        """End it."""

    def add_done_callback(self, fn: Callable[[Any], object], /) -> None:
        """Call ``fn`` once it is finished."""


_W = TypeVar("_W", bound=Work)
_AWAITS: Final = "it comes after something that only the host can wait for"


class Line(Generic[_W]):
    """A lane: what it has on the device, and what waits for it."""

    __slots__ = ("adopted", "ahead", "index", "priority", "queue", "waiting")

    def __init__(self, index: int, queue: Queue, priority: int = 0, adopted: bool = False) -> None:
        self.index: Final = index
        self.queue = queue
        self.priority: Final = priority
        # A stream of somebody else's: what is kept on the host would come after what its owner enqueues.
        self.adopted: Final = adopted
        # In submission order; the first is not finished, and waits because the queue is full, a
        # barrier is up, or it is a gate.
        self.waiting: deque[_W] = deque()
        # For each gate among them its number, and what was submitted before it and arrived behind it: that
        # goes ahead of it, or a gate that comes after something held for this lane would keep it away for ever.
        self.ahead: dict[_W, tuple[int, deque[_W]]] = {}

    def first(self) -> deque[_W]:
        """Return what the next one is the first of."""
        _, ahead = self.ahead.get(self.waiting[0], (0, None))
        return ahead or self.waiting

    def gate_after(self, gates: int) -> _W | None:
        """Return the first gate that waits and is none of the first ``gates``."""
        return next((gate for gate, (number, _) in self.ahead.items() if number > gates and not gate.finished), None)

    def behind_gates(self) -> dict[_W, tuple[_W, ...]]:
        """Return what waits here behind gates, with the gates that keep it."""
        found: dict[_W, tuple[_W, ...]] = {}
        gates: tuple[_W, ...] = ()
        for operation in self.waiting:
            _, ahead = self.ahead.get(operation, (0, ()))
            if gates:
                found.update(dict.fromkeys((*ahead, operation), gates))
            if operation.gate and not operation.finished:
                gates = (*gates, operation)
        return found

    def drop_finished(self) -> None:
        """Drop what was stopped while it waited, from both ends.

        What is stopped in the middle stays until flush() gets there: a search for each would make
        stopping ten thousand quadratic.
        """
        while self.waiting and self._is_over(self.waiting[0]):
            self.ahead.pop(self.waiting.popleft(), None)
        while self.waiting and self._is_over(self.waiting[-1]):
            self.ahead.pop(self.waiting.pop(), None)

    def _is_over(self, operation: _W) -> bool:
        if not operation.finished:
            return False
        _, ahead = self.ahead.get(operation, (0, None))
        while ahead and ahead[0].finished:
            ahead.popleft()
        return not ahead


_L = TypeVar("_L", bound=Line[Any])


class Scheduler(Generic[_W, _L]):
    """Decides for one device. None of its methods waits.

    Parameters
    ----------
    board
        Counts what waits, and picks the least busy lane.
    lanes
        All lanes, by index; more may be appended.
    groups
        By priority: the range of indices of the lanes that take any operation of that priority.
    max_pending
        How many operations may wait on the host.
    """

    def __init__(self, board: Board, lanes: list[_L], groups: dict[int, tuple[int, int]], max_pending: int) -> None:
        self._board = board
        self.lanes: Final = lanes
        self.groups: Final = groups
        # Lanes for launches whose kernels call, and streams of somebody else's, among `lanes`.
        self.calling: list[_L] = []
        self.adopted: set[_L] = set()
        # Such launches that nothing holds any more, by their `calling`, in order; they get a lane when they start.
        self._calls: dict[int, dict[_W, None]] = {1: {}, 2: {}}
        # Those of host functions that have not started, held ones among them: a lane is kept for each.
        self._promised: dict[_W, None] = {}
        self._taken: _L | None = None  # the lane of the one that is being started
        # Launches that call and have not started, for which something is held: only they can be in its way.
        self._followed: dict[_W, None] = {}
        # Launches that call and have not started, which host functions wait for: a pause does not keep them.
        self._awaited: dict[_W, None] = {}
        # Barriers that were asked for: no launch that calls starts while there is one, except those of
        # host functions. Once no such launch is on the device, `board.paused` holds up all others, too.
        self.pauses = 0
        self.max_pending: Final = max_pending
        # With those that nothing holds any more, until they start. Each with how many gates there were before it.
        self.held: dict[_W, int] = {}
        self._gates = 0
        # Operations that use no lane and have not started, each with what starts it.
        self.on_host: dict[_W, Callable[[], None]] = {}
        # board.pending counts the held and the waiting ones, board.paused the barriers up; they
        # live there because the launch path looks at them.
        # What nothing holds any more, gates on their lanes among it; emptied before release() returns
        # to whoever is outermost. What was stopped meanwhile stays in it.
        self._ready: deque[_W] = deque()
        self._starting = False
        # Lanes on which something waits, so that progress need not look at every stream of somebody else's.
        self._crowded: dict[_L, None] = {}
        # What _start() is putting together: it may run a program's code, which may stop that very operation.
        self._entering: _W | None = None
        # Set by abandon(): what everything ends with from then on.
        self.dead: BaseException | None = None

    # -- what a subclass carries out -------------------------------------------------------

    def _start(self, operation: _W, lane: _L, waits: list[_W]) -> None:
        """Put it on the device behind ``waits``, which are there, on other lanes.

        What the driver refuses fails the operation. Only what is no Exception is raised, after that.
        """
        raise NotImplementedError  # Lanes has its own, as the tests' device has

    def _on_room(self) -> None:
        """Fewer operations wait on the host."""

    def _on_finished(self) -> None:
        """An operation ended on the host, without a mark."""

    # -- submission ------------------------------------------------------------------------

    def check_room(
        self, operation: _W, instant: bool, deps: Iterable[_W], lane: _L | None, awaits: bool = False
    ) -> None:
        """Raise WouldBlock if it would have to wait on the host and may not; changes nothing.

        It may not if ``instant``, on a stream of somebody else's, and where ``max_pending`` others do.
        What can start at once needs no room: nobody's flood keeps others from their own lanes.
        ``awaits``: it comes after an awaitable.
        """
        full = self._board.pending >= self.max_pending
        if not (instant or full or (lane is not None and lane.adopted)):
            return
        obstacle = _AWAITS if awaits or operation.holds else self._obstacle(operation, deps, lane)
        if obstacle is None:
            return
        if instant:
            raise WouldBlock(obstacle)
        if full:
            raise WouldBlock(
                f"{self._board.pending} operations wait on the host (max_pending), and {obstacle}; await off.room()"
            )
        raise WouldBlock(f"{obstacle}, and on a stream that is not ours nothing waits on the host")

    def _obstacle(self, operation: _W, deps: Iterable[_W], lane: _L | None) -> str | None:
        """Return why it would wait on the host, None if it would not."""
        if operation.streamed:
            return "it goes piece by piece"
        on_host = operation in self.on_host
        waiting = next((dep for dep in deps if needs_host(dep) or (on_host and not dep.finished)), None)
        if waiting is not None:
            return f"it comes after {waiting!r}, which only the host can wait for"
        if on_host:
            return None
        if self._is_paused(operation):
            return "maintenance is going on, or an operation is being put together"
        if operation.calling:
            return None if self.may_nest() else "every calling lane is taken"
        target = lane or self._choose(operation, deps)
        if target.waiting or target.queue.in_flight >= target.queue.depth:
            return f"lane {target.index} is full"
        return None

    def check_lane(self, operation: _W, lane: _L | None, priority: int = 0) -> int:
        """Return the priority of the lanes that ``operation`` may go to: its lane's, if it names one.

        Raises UsageError if it may not use ``lane``, or there is none of that priority.
        """
        if lane is None:
            if type(priority) is not int or priority not in self.groups:
                there = ", ".join(map(str, sorted(self.groups)))
                raise UsageError(f"there are no lanes of priority {priority!r}; there are: {there}")
            return priority
        if not self._may_name(operation, lane):
            raise UsageError(f"{lane!r} is not a lane of this Offload: take one of off.lanes")
        return lane.priority

    def _may_name(self, operation: _W, lane: object) -> bool:
        if not isinstance(lane, Line):  # whatever a program passed
            return False
        if operation.calling:  # it gets one when it starts
            return False
        if lane.adopted:
            return lane in self.adopted
        first, last = self.groups.get(lane.priority, (0, 0))
        return first <= lane.index < last and lane is self.lanes[lane.index]

    def has(self, lane: object) -> bool:
        """Whether it is a lane of this scheduler, of whatever kind."""
        if not isinstance(lane, Line):
            return False
        return lane in self.adopted or (lane.index < len(self.lanes) and lane is self.lanes[lane.index])

    @property
    def open(self) -> list[_L]:
        """The lanes that take any operation."""
        return [lane for first, last in self.groups.values() for lane in self.lanes[first:last]]

    def may_nest(self) -> bool:
        """Whether a calling lane is free and kept for nothing: a launch of a host function must not wait for one."""
        return len(self._free()) > len(self._promised)

    def wait_in_call(self, operation: _W) -> None:
        """A host function waits for ``operation``: maintenance, which waits for that, must not keep what is before it.

        What another engine has does not concern this one.
        """
        awaited = [one for one in _ahead([operation], lanes=True) if one.calling == 1]
        self._awaited |= dict.fromkeys(one for one in awaited if one in self.held or one in self._calls[1])
        if awaited:
            self._start_calls()

    def _free(self) -> list[_L]:
        return [lane for lane in self.calling if not lane.queue.in_flight and lane is not self._taken]

    def place(self, operation: _W, lane: _L | None, part_of: _W | None = None) -> None:
        """Send ``operation`` to the device, or keep it on the host until it can go.

        ``operation.deps`` holds what must come before it, ``holds`` what else keeps it. ``part_of``: the
        streamed operation that it belongs to, which has started on ``lane``, and so came before every gate that waits.
        """
        if self.dead is not None:
            self.on_host.pop(operation, None)
            operation.finish(failure=self.dead)
            return
        operation.lane = lane
        if operation.calling == 2:
            self._promised[operation] = None
        on_host = operation in self.on_host
        if operation.deps and on_host:
            self._hold_until_done(operation, operation.deps)
        elif operation.deps:
            self._hold_behind(operation, operation.deps)
        if operation.gate and operation.holds:
            assert lane is not None
            self._wait(operation, lane)
        elif operation.holds or on_host:
            self.held[operation] = self._gates
            self._board.pending += 1
            if not operation.holds:
                self._ready.append(operation)
                self._start_ready()
            elif operation.calling == 2:
                self._start_calls()  # what it comes after may use its lane
        else:
            self._go(operation, self._gates if part_of is None else 0)

    def _hold_until_done(self, operation: _W, deps: Iterable[_W]) -> None:
        """Hold ``operation``, which runs on the host, until ``deps`` are done, not only on the device."""
        for dep in deps:
            operation.holds += 1
            dep.add_done_callback(lambda _: self.release(operation))
            self._note_followed(dep)

    def _note_followed(self, dep: _W) -> None:
        if dep.calling == 1 and dep.queue is None and not dep.finished and dep is not self._entering:
            self._followed[dep] = None

    def _hold_behind(self, operation: _W, deps: Iterable[_W]) -> None:
        """Hold ``operation`` until ``deps`` are on the device (done, if one calls), unless a lane's order is enough."""
        lane = operation.lane or self._home(operation, operation.deps or ())
        for dep in deps:
            if not needs_host(dep):
                continue
            if lane is not None and self._is_in_order(dep, operation, lane):
                operation.lane = lane
                continue
            operation.holds += 1
            if dep.followers is None:
                dep.followers = []
            dep.followers.append(operation)
            self._note_followed(dep)

    def _is_in_order(self, dep: _W, operation: _W, lane: _L) -> bool:
        """Whether ``dep`` waits on ``lane``, and the order there puts it first."""
        if dep.lane is not lane or dep.streamed or dep.calling or operation.calling:
            return False
        return dep not in self.held

    def _joins(self, operation: _W, lane: _L) -> bool:
        """Whether ``operation``, which names no lane, may go to ``lane``: no gate there is to keep it away."""
        first, last = self.groups.get(operation.priority, (0, 0))
        return first <= lane.index < last and not lane.queue.reserved and not lane.ahead

    def _home(self, operation: _W, deps: Iterable[_W]) -> _L | None:
        """The lane on which all unfinished dependencies sit, if it is one and ``operation`` may go there."""
        if operation.calling:
            return None
        home: _L | None = None
        for dep in deps:
            if dep.finished:
                continue
            if dep.lane is None or (home is not None and dep.lane is not home):
                return None
            home = dep.lane
        return home if home is not None and self._joins(operation, home) else None

    def _choose(self, operation: _W, deps: Iterable[_W]) -> _L:
        """Return the lane for an operation: the one it names, or that was found for it, else the best."""
        if operation.lane is not None:
            chosen: _L = operation.lane
            return chosen
        first, last = self.groups[operation.priority]
        ahead = [dep for dep in deps if not dep.finished]
        picked = self.lanes[self._board.pick_after(first, last, ahead) if ahead else self._board.pick(first, last)]
        if picked.ahead:
            others = [lane for lane in self.lanes[first:last] if self._joins(operation, lane)]
            picked = min(others, key=lambda lane: lane.queue.in_flight + lane.queue.load, default=picked)
        return picked

    def _is_paused(self, operation: _W) -> bool:
        """Whether maintenance keeps it on the host; a host function's launch it has to wait for."""
        return bool(self._board.paused or (operation.calling == 1 and self.pauses))

    def _go(self, operation: _W, gates: int) -> None:
        """Start it, or let it wait for a lane; nothing else holds it any more."""
        if operation.calling:
            self._calls[operation.calling][operation] = None
            self._board.pending += 1
            self._start_calls()
        else:
            self._to_lane(operation, self._choose(operation, operation.deps or ()), gates)

    def _start_calls(self) -> None:
        """Start what calls as long as lanes are free for it."""
        if self._taken is not None:  # by way of a program's code: who is at it goes on
            return
        while (found := self._next_call()) is not None:
            operation, lane = found
            del self._calls[operation.calling][operation]
            self._leave(operation)
            self._board.pending -= 1
            operation.lane = self._taken = lane
            try:
                self._enqueue(operation, lane)
            finally:
                self._taken = None

    def _leave(self, operation: _W) -> None:
        """It starts, or never will."""
        for launches in (self._promised, self._followed, self._awaited):
            launches.pop(operation, None)

    def _next_call(self) -> tuple[_W, _L] | None:
        """Return which can start, with its lane.

        Those of host functions come first, and what they come after can do with one of the lanes kept for them.
        """
        nested, others = self._calls[2], self._calls[1]
        if not (nested or others) or self._board.paused or self.dead is not None:
            return None
        free, kept = self._free(), len(self._promised)
        if not free:
            return None
        operation = next(iter(nested), None)
        if operation is None and len(free) > kept:
            able = (one for one in self._awaited if one in others) if self.pauses else iter(others)
            operation = next(able, None)
        if operation is None and 0 < kept <= len(free) and any(one in others for one in self._followed):
            awaited = {dep for promised in self._promised for dep in _ahead(promised.deps or (), lanes=True)}
            operation = next((one for one in others if one in awaited), None)
        return None if operation is None else (operation, free[0])

    def _to_lane(self, operation: _W, lane: _L, gates: int) -> None:
        """Start it, or let it wait on ``lane``, behind none but the first ``gates`` gates."""
        operation.lane = lane
        if not (lane.waiting or self._is_paused(operation) or lane.queue.in_flight >= lane.queue.depth):
            self._enqueue(operation, lane)
            return
        gate = lane.gate_after(gates)
        self._wait(operation, lane, gate)
        if gate is not None:
            self._flush_lane(lane)

    def _wait(self, operation: _W, lane: _L, gate: _W | None = None) -> None:
        """Let it wait on ``lane``, behind all others or ahead of ``gate``."""
        if gate is None:
            lane.waiting.append(operation)
        else:
            lane.ahead[gate][1].append(operation)
        if operation.gate:
            self._gates += 1
            lane.ahead[operation] = self._gates, deque()
        self._crowded[lane] = None
        lane.queue.load += 1
        self._board.pending += 1

    def _enqueue(self, operation: _W, lane: _L) -> None:
        """Start it. A failure here is the operation's, wherever it was submitted from."""
        failure = self.dead or dependency_failure(operation)
        if failure is not None:
            self._finish_unstarted(operation, failure)
            return
        waits = [dep for dep in unfinished(operation.deps) if dep.lane is not lane] if operation.deps else []
        outer, self._entering = self._entering, operation
        try:
            self._start(operation, lane, waits)
        finally:
            self._entering = outer
            if operation.finished or (operation.queue is not None and not operation.calling):
                self.release_followers(operation)

    # -- progress --------------------------------------------------------------------------

    def release(self, operation: _W) -> None:
        """One thing that held ``operation`` on the host is over."""
        self._let_go(operation)
        self._start_ready()

    def _let_go(self, operation: _W) -> None:
        operation.holds -= 1
        if not operation.holds and not operation.finished and operation.queue is None:
            self._ready.append(operation)

    def _start_ready(self) -> None:
        """Send what nothing holds any more; starting one may release the next, in a chain of any length."""
        if self._starting or not self._ready:
            return
        self._starting = True
        try:
            while self._ready:
                operation = self._ready.popleft()
                gates = self.held.pop(operation, None)
                if gates is not None:
                    self._board.pending -= 1
                    self._start_released(operation, gates)
                elif operation.gate and not operation.finished:
                    self._flush_lane(operation.lane)
        finally:
            self._starting = False
        self._start_calls()  # what went behind a gate comes after what opens that
        self._on_room()

    def _start_released(self, operation: _W, gates: int) -> None:
        start = self.on_host.pop(operation, None)
        if start is not None:
            start()
        else:
            self._go(operation, gates)

    def release_followers(self, operation: _W) -> None:
        """``operation`` is on the device or done: what was held for it may go."""
        followers, operation.followers = operation.followers, None
        # One that never ran leaves what it had to come after to those who came after it.
        inherited = operation.deps if operation.finished else None
        for follower in followers or ():
            # One that is over leads there by what it came after itself, as far as anybody asks.
            if inherited and follower.deps is not None and not follower.finished:
                known = set(follower.deps)
                new = [dep for dep in inherited if dep not in known]
                follower.deps += new
                self._hold_behind(follower, new)
            self._let_go(follower)
        self._start_ready()

    def flush(self) -> None:
        """Send what fits; called after every progress while something is pending."""
        self._start_ready()  # only what an interrupt left behind
        for lane in list(self._crowded):
            self._flush_lane(lane)
        self._start_calls()
        self._on_room()

    def _flush_lane(self, lane: _L) -> None:
        while lane.waiting and lane.queue.in_flight < lane.queue.depth and not self._board.paused:
            waiting = lane.first()
            operation = waiting[0]
            if self.dead is not None or ((self._is_paused(operation) or operation.holds) and not operation.finished):
                break
            waiting.popleft()
            if operation.gate:
                lane.ahead.pop(operation, None)
            if operation.finished:  # stopped while it waited, and counted then
                continue
            lane.queue.load -= 1
            self._board.pending -= 1
            self._enqueue(operation, lane)
        if not lane.waiting:
            self._crowded.pop(lane, None)

    # -- stopping --------------------------------------------------------------------------

    def stop(self, operation: _W, failure: BaseException) -> None:
        """End ``operation`` with ``failure`` if it is still on the host."""
        operation.stop = failure
        if operation.finished or operation.queue is not None or operation is self._entering:
            return
        if self.held.pop(operation, None) is not None:
            self.on_host.pop(operation, None)
        elif operation.calling:
            if operation not in self._calls[operation.calling]:
                return
            del self._calls[operation.calling][operation]
        elif operation.lane is None or (operation.streamed and operation.steps is None):
            return  # in the hands of the host, or going piece by piece: whoever does that sees `stop`
        else:
            operation.lane.queue.load -= 1
        self._board.pending -= 1
        self._finish_unstarted(operation, failure)
        if operation.calling:
            self._start_calls()  # a lane may have been kept for it
        elif operation.lane is not None:
            operation.lane.drop_finished()
            if operation.gate:
                self._flush_lane(operation.lane)

    def _finish_unstarted(self, operation: _W, failure: BaseException) -> None:
        # A gate orders its lane alone: what comes after it by name fails, and nothing else does.
        operation.deps = None if operation.gate else (unfinished(operation.deps or ()) or None)
        for dep in operation.deps or ():  # it stands for them in histories, which hold it weakly
            dep.keep = (dep.keep, operation)
        operation.prepared = operation.steps = None
        self._leave(operation)
        operation.finish(failure=failure)
        self.release_followers(operation)
        self._on_room()
        self._on_finished()

    def on_the_host(self) -> list[_W]:
        """Return what is held or waits, and what was stopped among that."""
        ahead = [operation for lane in self.lanes for _, ahead in lane.ahead.values() for operation in ahead]
        waiting = [*self.held, *ahead, *(operation for lane in self.lanes for operation in lane.waiting)]
        return waiting + [operation for calls in self._calls.values() for operation in calls]

    def abandon(self, failure: BaseException) -> list[_W]:
        """Fail everything on the host, because the device is gone; returns it.

        A signal handler may be who does that, in the midst of any method here, so what those go through stays as
        it is until ``forget``.
        """
        self.dead = failure
        waiting = self.on_the_host()
        self.held.clear()
        self.on_host.clear()
        for lane in self.lanes:
            lane.queue.load = 0
        self._board.pending = 0
        for operation in waiting:
            operation.finish(failure=failure)
        self._on_room()
        return waiting

    def forget(self) -> None:
        """Let go of what was abandoned."""
        self._ready.clear()
        self._crowded.clear()
        self._promised.clear()
        self._followed.clear()
        self._awaited.clear()
        for calls in self._calls.values():
            calls.clear()
        for lane in self.lanes:
            lane.waiting.clear()
            lane.ahead.clear()


def needs_host(dep: Work) -> bool:
    """Whether only the host can wait for ``dep``: it is not on the device yet, or its kernel calls."""
    return not dep.finished and (dep.queue is None or dep.calling != 0)


def waits_for(deps: Iterable[_W], launch: _W, *, lanes: bool = False) -> bool:
    """Whether one of ``deps`` is ``launch``, or waits on the host for something that comes after it.

    With ``lanes`` that includes the gates that it waits behind on its lane.
    """
    return any(dep is launch for dep in _ahead(deps, lanes))


def _ahead(deps: Iterable[_W], lanes: bool = False) -> Iterator[_W]:
    """Iterate over ``deps`` and what those of them that have not started wait for."""
    ahead, seen = list(deps), set()
    gates: dict[Any, dict[_W, tuple[_W, ...]]] = {}  # by lane
    while ahead:
        dep = ahead.pop()
        yield dep
        if dep in seen or dep.queue is not None or dep.finished:
            continue
        seen.add(dep)
        ahead += (*(dep.deps or ()), *(dep.requires or ()))
        if lanes and dep.lane is not None and dep.lane.ahead:
            if dep.lane not in gates:
                gates[dep.lane] = dep.lane.behind_gates()
            ahead += gates[dep.lane].get(dep, ())


def dependency_failure(operation: Work) -> DependencyError | None:
    """Return the failure of an operation of which something named in ``after`` has failed, or None.

    A failure that is passed on has been looked at: of a graph of thousands only the ends have to be.
    """
    for dep in operation.requires or ():
        if dep.failure is not None:
            return dependency_error(f"{dep.name}, which {operation.name} came after,", dep.look())
    return None


def dependency_error(what: str, cause: BaseException) -> DependencyError:
    """Return the failure of an operation that did not start because ``what`` failed."""
    root = (cause.root if isinstance(cause, DependencyError) else None) or cause
    error = DependencyError(f"{what} failed: {root!r}")
    error.__cause__ = cause
    error.root = root
    return error
