"""``rules/scheduler.py``: which operation goes where and when, without a device.

A random machine and a simulation run it against the rules of :mod:`tests.rules.device`; then come
its decisions, one by one.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiooffload.errors import DependencyError, UsageError, WouldBlock
from aiooffload.rules.scheduler import Line, dependency_error, dependency_failure, waits_for
from tests.rules.device import Device, Lost, Memory, Op, Queue, Refused

LONG = 100_000


class Boom(Exception):
    """What an awaitable fails with."""


def test_is_pure() -> None:
    """Importing the scheduler imports neither asyncio nor threads nor CUDA."""
    code = "import sys, aiooffload.rules.scheduler; print('cuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# -- against rules of its own --------------------------------------------------------------


def needs_host(dep: Op) -> bool:
    """Whether only the host can wait for ``dep``, as DESIGN has it."""
    return not dep.finished and (bool(dep.calling) or dep.on_host or dep.queue is None)


KINDS = ["plain"] * 6 + ["streamed", "calling", "calling", "gate", "gate", "task", "refused"]


class SchedulerMachine(RuleBasedStateMachine):
    """Submissions of every kind, and every event in any order; the rules are checked after each."""

    device: Device

    @initialize(
        lanes=st.integers(1, 3),
        urgent=st.integers(0, 2),
        depth=st.integers(1, 3),
        max_pending=st.sampled_from([2, 6, 1000, 1000]),
    )
    def open(self, lanes: int, urgent: int, depth: int, max_pending: int) -> None:
        groups = {0: lanes} | ({-1: urgent} if urgent else {})
        self.device = Device(groups, depth, calling=2, adopted=1, max_pending=max_pending)
        self.memory = [Memory() for _ in range(3)]
        self.ops: list[Op] = []
        # Of those that did not go on as if nothing had happened: what they may fail with.
        self.excuses: dict[Op, BaseException] = {}

    def unfinished(self) -> list[Op]:
        return [op for op in self.ops if not op.finished]

    # What is submitted

    @precondition(lambda self: self.device.dead is None)
    @rule(data=st.data(), kind=st.sampled_from(KINDS), instant=st.sampled_from([False, False, False, True]))
    def submit(self, data: st.DataObject, kind: str, instant: bool) -> None:
        device = self.device
        op = Op(f"{kind} {len(self.ops)}", streamed=kind == "streamed", gate=kind == "gate", on_host=kind == "task")
        if kind == "calling":
            op.calling = data.draw(st.sampled_from([1, 1, 2])) if device.may_nest() else 1
        if kind == "refused":
            op.refuse = lambda: self.excuses.setdefault(op, Refused())
        uses: list[tuple[Memory, bool]] = []
        if kind not in ("gate", "task"):
            chosen = data.draw(st.lists(st.sampled_from(self.memory), max_size=2, unique_by=id))
            uses = [(memory, data.draw(st.booleans())) for memory in chosen]
        after = data.draw(st.lists(st.sampled_from(self.ops[-12:]), max_size=2, unique=True)) if self.ops else []
        awaits = data.draw(st.sampled_from([1, 2])) if kind == "gate" else data.draw(st.sampled_from([0, 0, 0, 0, 1]))
        lane = self.draw_lane(data, op)
        op.priority = 0 if lane is not None else data.draw(st.sampled_from(sorted(device.groups)))
        before = self.snapshot()
        can_start = not awaits and self.can_start(op, uses, after, lane)
        may_wait = not instant and device.board.pending < device.max_pending and not (lane and lane.adopted)
        try:
            device.submit(op, uses, after, lane, instant, awaits)
        except WouldBlock:
            assert not can_start, "refused although it could start at once"
            assert not may_wait
            assert self.snapshot() == before, "refused, and something has changed"
            return
        self.ops.append(op)
        assert may_wait or can_start
        known_failure = next((dep for dep in after if dep.failure is not None), None)
        assert not can_start or op.started or (known_failure and op.finished), "it could have started at once"

    def draw_lane(self, data: st.DataObject, op: Op) -> Line[Op] | None:
        if op.calling or op.on_host:
            return None
        if op.gate:
            return data.draw(st.sampled_from(self.device.open))
        return data.draw(st.none() | st.sampled_from([*self.device.open, *self.device.open, *self.device.adopted]))

    def can_start(self, op: Op, uses: list[tuple[Memory, bool]], after: list[Op], lane: Line[Op] | None) -> bool:
        """Whether nothing keeps it on the host."""
        device = self.device
        conflicts = {dep for memory, writes in uses for dep, wrote in memory.users if writes or wrote} | set(after)
        # One that never ran stands for what it had to come after.
        deps, ahead = set(), list(conflicts)
        while ahead:
            dep = ahead.pop()
            if not dep.finished:
                deps.add(dep)
            elif not dep.started and not dep.gate:
                ahead += dep.direct
        if op.streamed or any(needs_host(dep) for dep in deps):
            return False
        if op.on_host:
            return not deps
        if device.pauses if op.calling == 1 else device.board.paused:
            return False
        if op.calling:
            return self.free_for_calls() > len(device.promised())
        candidates = [lane] if lane else []
        if not lane:
            group = device.lanes[slice(*device.groups[op.priority])]
            homes = {dep.lane for dep in deps}
            home = homes.pop() if len(homes) == 1 else None
            closed = home is None or home.queue.reserved or any(one.gate for one in device.live(home))
            candidates = [home] if home in group and not closed and self.has_room(home) else group
        return any(self.has_room(one) for one in candidates if one is lane or not one.queue.reserved)

    def free_for_calls(self) -> int:
        return sum(not lane.queue.in_flight for lane in self.device.calling)

    def has_room(self, lane: Line[Op]) -> bool:
        """Whether what comes to a lane goes to its queue at once."""
        return not self.device.live(lane) and lane.queue.in_flight < lane.queue.depth

    def snapshot(self) -> object:
        device = self.device
        lanes = [(len(device.live(lane)), lane.queue.load, lane.queue.in_flight) for lane in device.lanes]
        ops = [(op.holds, op.started, op.finished, op.lane, len(op.followers or ())) for op in self.ops]
        users = [len(memory.users) for memory in self.memory]
        return device.board.pending, len(device.held), len(device.on_host), lanes, ops, users, device.may_nest()

    @precondition(lambda self: self.device.dead is None)
    @rule(data=st.data())
    def submit_to_a_wrong_lane(self, data: st.DataObject) -> None:
        """A lane of another kind or of nobody, or a priority without lanes, is refused and changes nothing."""
        calling, plain = Op(calling=1), Op()
        wrong: list[tuple[Op, Any]] = [
            *((calling, lane) for lane in (*self.device.open, *self.device.adopted, *self.device.calling, 0)),
            *((plain, lane) for lane in (*self.device.calling, Line(0, Queue(1)), Line(99, Queue(1)), "lane", [])),
            (plain, Line(self.device.lanes[-1].index, Queue(1), adopted=True)),
            (Op(priority=5), None),
        ]
        before = self.snapshot()
        op, lane = data.draw(st.sampled_from(wrong))
        with pytest.raises(UsageError):
            self.device.submit(op, [(self.memory[0], True)], (), lane)
        assert self.snapshot() == before

    # What happens

    @precondition(lambda self: any(map(self.device.can_arrive, self.device.lanes)))
    @rule(data=st.data(), most=st.integers(1, 3))
    def arrive(self, data: st.DataObject, most: int) -> None:
        for _ in range(most):
            if ready := [lane for lane in self.device.lanes if self.device.can_arrive(lane)]:
                self.device.arrive(data.draw(st.sampled_from(ready)))

    @precondition(lambda self: any(op.awaits for op in self.unfinished()))
    @rule(data=st.data(), failure=st.sampled_from([None, None, Boom()]))
    def end_awaitable(self, data: st.DataObject, failure: BaseException | None) -> None:
        op = data.draw(st.sampled_from([op for op in self.unfinished() if op.awaits]))
        if failure is not None:
            self.excuses.setdefault(op, failure)
        self.device.end_awaitable(op, failure)
        assert failure is None or (op.finished and op.failure is failure)

    @precondition(lambda self: self.device.in_hand)
    @rule(data=st.data(), failure=st.sampled_from([None, None, Boom()]))
    def end_on_host(self, data: st.DataObject, failure: BaseException | None) -> None:
        op = data.draw(st.sampled_from(self.device.in_hand))
        if failure is not None:
            self.excuses[op] = failure
        self.device.end_on_host(op, failure)

    @precondition(lambda self: self.device.ending)
    @rule(data=st.data())
    def end_calling(self, data: st.DataObject) -> None:
        self.device.end_calling(data.draw(st.sampled_from(self.device.ending)))

    @precondition(lambda self: self.device.dead is None and self.unfinished())
    @rule(data=st.data())
    def wait_in_call(self, data: st.DataObject) -> None:
        """A host function waits for something; what else there is goes on by the same rules."""
        self.device.wait_in_call(data.draw(st.sampled_from(self.unfinished())))

    @precondition(lambda self: self.device.later)
    @rule()
    def turn(self) -> None:
        self.device.run_later()

    @precondition(lambda self: self.device.pauses < 2)
    @rule()
    def pause(self) -> None:
        self.device.pause()

    @precondition(lambda self: self.device.pauses)
    @rule()
    def resume(self) -> None:
        self.device.resume()

    @precondition(lambda self: self.unfinished())
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        """What is on the host ends at once, with what it was given; what has started goes on."""
        op, why = data.draw(st.sampled_from(self.unfinished())), Boom("stopped")
        was_started = op.started
        self.excuses.setdefault(op, why)
        self.device.stop(op, why)
        assert op.stop is why
        assert op.finished is not was_started
        assert was_started or op.failure is why

    @rule(data=st.data())
    def reserve(self, data: st.DataObject) -> None:
        """A lane is reserved, or no longer; one of each priority stays with all others."""
        first, last = data.draw(st.sampled_from(sorted(self.device.groups.values())))
        lane = data.draw(st.sampled_from(self.device.lanes[first:last]))
        if lane.queue.reserved:
            lane.queue.reserved = False
        elif sum(not one.queue.reserved for one in self.device.lanes[first:last]) > 1:
            lane.queue.reserved = True
            for op in self.unfinished():  # what was bound for it before is
                if op.lane is lane:
                    op.excused.add(lane)

    @precondition(lambda self: self.device.dead is None and len(self.ops) > 8)
    @rule(dice=st.integers(0, 3), starts=st.booleans())
    def lose(self, dice: int, starts: bool) -> None:
        """Seldom: the device is gone, between two events or while something is put on it."""
        if dice:
            return
        failure, before = Lost(), self.unfinished()
        if starts:
            self.ops.append(Op("loses", refuse=lambda: failure))
            before.append(self.ops[-1])
            self.device.place(self.ops[-1], None)
        if self.device.dead is None:
            self.device.lose(failure)
        assert all(op.finished and op.failure is failure for op in before)
        late = Op("late")
        self.device.place(late, None)
        assert late.failure is failure

    # What holds at any time

    @invariant()
    def counts(self) -> None:
        """``pending`` is what has not started, ``load`` what waits on the lane; no lane has more than its depth."""
        device = self.device
        assert device.board.pending == sum(not op.started for op in self.unfinished())
        for lane in device.lanes:
            assert lane.queue.load == len(device.live(lane))
            assert lane.queue.in_flight <= lane.queue.depth
            assert not (lane.adopted and lane.queue.load), "somebody else's stream waits on the host"

    @invariant()
    def nothing_is_forgotten(self) -> None:
        """Whatever has not started has a reason now: its lane, maintenance, or something before it."""
        device = self.device
        for lane in device.lanes:
            if waiting := device.live(lane):
                head = waiting[0]
                full = lane.queue.in_flight == lane.queue.depth
                paused = device.pauses if head.calling == 1 else device.board.paused
                gated = head.gate and self.is_held(head)
                assert full or paused or gated, f"{head} could start"
        waiting = [op for lane in device.lanes for op in device.live(lane)]
        free, kept = self.free_for_calls(), len(device.promised())
        borrowed = any(not op.finished for op in device.borrowers)
        for op in self.unfinished():
            if op.calling and not op.started and not self.is_held(op):
                if op.calling == 2:
                    assert device.board.paused or (borrowed and not free), f"{op} waits for a lane"
                elif device.is_awaited(op):
                    assert device.board.paused or free < kept, f"{op} could start, for those of host functions"
                else:
                    paused = device.board.paused if op in device.needed else device.pauses
                    assert paused or free <= kept, f"{op} could start"
            else:
                assert op.started or op in waiting or self.is_held(op), f"{op} could go to its lane"

    def is_held(self, op: Op) -> bool:
        if op.on_host and self.device.later:
            return True
        return bool(op.awaits) or any(needs_host(dep) or (op.on_host and not dep.finished) for dep in op.before)

    @invariant()
    def failures_have_their_reason(self) -> None:
        """Only what was stopped or refused fails by itself; what names a failed one fails with DependencyError."""
        for op in self.ops:
            if not op.finished or (op.failure is not None and op.failure is self.device.dead):
                continue
            if isinstance(op.failure, DependencyError):
                lost = self.device.dead is not None  # then what was refused, and still there, ended with that
                assert lost or any(dep.failure is op.failure.__cause__ for dep in op.after)
                assert not isinstance(op.failure.root, DependencyError | None)
            elif op.failure is not None:
                assert op.failure is self.excuses[op] or op.failure is op.stop
            else:
                assert op.started
                assert not any(dep.failure for dep in op.after if dep.finished), "it succeeded after a failure"

    def teardown(self) -> None:
        """Nothing is lost: once everything that can end has ended, everything is finished and nothing is counted."""
        if not hasattr(self, "device"):
            return
        device = self.device
        while device.pauses:
            device.resume()
        device.settle()
        for op in self.ops:
            while op.awaits and not op.finished:
                device.end_awaitable(op)
                device.settle()
        assert self.unfinished() == []
        assert (device.board.pending, device.held, device.on_host) == (0, {}, {})
        assert device.may_nest() is bool(device.calling)
        assert not any(lane.queue.load or lane.waiting for lane in device.lanes)
        self.failures_have_their_reason()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(stateful_step_count=50, max_examples=2 * settings.default.max_examples)


# -- many of them --------------------------------------------------------------------------


class Simulation:
    """A random graph over 16 lanes of three priorities, with holds, stops, refusals and maintenance."""

    def __init__(self, seed: int) -> None:
        self.choose = random.Random(seed)
        self.device = Device({0: 12, -1: 3, 1: 1}, depth=8, max_pending=5000, checked=False)
        self.recent: list[Op] = []
        self.held: list[Op] = []
        self.made = self.ended = 0
        self.orders: list[tuple[int, tuple[int, ...]]] = []

    def run(self, count: int) -> None:
        device, choose = self.device, self.choose
        while self.made < count:
            for _ in range(choose.randrange(24)):
                if self.made < count:
                    self.submit()
            self.progress(choose.randrange(20))
            if self.held and choose.random() < 0.3:
                device.end_awaitable(self.held.pop(choose.randrange(len(self.held))))
            if choose.random() < 0.001:
                device.pause()
                self.progress(10)
                device.resume()
        for op in self.held:
            if not op.finished:
                device.end_awaitable(op)
        while device.board.pending or any(lane.queue.in_flight for lane in device.lanes):
            assert self.progress(1000), "nothing goes on"

    def submit(self) -> None:
        choose, device = self.choose, self.device
        op = Op("op", priority=choose.choices((0, -1, 1), (12, 3, 1))[0])
        op.number = self.made
        kind = choose.random()
        after = [self.recent[-1 - min(int(choose.expovariate(0.2)), len(self.recent) - 1)]] if self.recent else []
        after = [dep for dep in after * choose.choice((0, 1, 1)) if kind > 0.9 or dep.failure is None]
        lane = choose.choice(device.open) if choose.random() < 0.3 else None
        if kind < 0.002:
            op.refuse = Refused
        try:
            device.submit(op, (), after, lane, awaits=0.01 < kind < 0.03)
        except WouldBlock:
            return
        self.made += 1
        self.recent.append(op)
        if len(self.recent) > 200:
            del self.recent[:100]
        if op.awaits:
            self.held.append(op)
        op.add_done_callback(self.note)
        if kind > 0.998:
            device.stop(op, Boom())

    def note(self, _: object) -> None:
        self.ended += 1

    def progress(self, most: int) -> int:
        """Let up to ``most`` marks arrive; what a lane waits for arrives first."""
        done = 0
        for lane in self.choose.sample(self.device.lanes, len(self.device.lanes)):
            for _ in range(min(most - done, 3)):
                if self.device.can_arrive(lane):
                    self.device.arrive(lane)
                    done += 1
        self.device.run_later()
        return done


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_many_operations_all_end(count: int) -> None:
    """Every operation of a large random graph ends, and starts once and in order; nothing stays behind."""
    simulation = Simulation(count)
    simulation.run(count)
    device = simulation.device
    assert simulation.ended == simulation.made == count
    assert len(device.order) > 0.9 * count
    assert len(set(device.order)) == len(device.order)
    places = {op: i for i, op in enumerate(device.order)}
    for op in device.order:
        assert all(dep not in places or places[dep] < places[op] for dep in op.after)
    assert (device.board.pending, device.held, device.on_host) == (0, {}, {})
    assert not any(lane.waiting or lane.queue.load for lane in device.lanes)


def chain(device: Device, count: int, **given: Any) -> list[Op]:
    """Submit operations each of which comes after the last, the first one after an awaitable."""
    ops = [device.submit(Op("first", **given), awaits=1)]
    for _ in range(count - 1):
        ops.append(device.submit(Op(**given), after=[ops[-1]]))
    return ops


def test_a_long_chain_is_released_at_once() -> None:
    """A hundred thousand held operations, each after the last, start without recursion."""
    device = Device({0: 2}, depth=LONG, checked=False)
    ops = chain(device, LONG)
    assert device.board.pending == LONG
    device.end_awaitable(ops[0])
    assert device.order == ops
    assert device.board.pending == 0


def test_a_failure_runs_down_a_long_chain() -> None:
    """When the first of many fails, all others do, in little time and with short messages."""
    device = Device({0: 2}, checked=False)
    ops = chain(device, LONG // 4)
    began = time.process_time()
    device.end_awaitable(ops[0], Boom())
    assert time.process_time() - began < 10
    assert all(isinstance(op.failure, DependencyError) for op in ops[1:])
    assert len(str(ops[-1].failure)) < 100
    assert device.board.pending == 0
    for op in ops:  # or whatever shows a failure follows all the causes
        op.failure = None


def test_a_long_chain_of_gates() -> None:
    """Thousands of gates on two lanes, each after the last, open one after the other without recursion."""
    device = Device({0: 2}, depth=LONG, checked=False)
    gates = [device.submit(Op(gate=True), lane=device.lanes[0], awaits=1)]
    for i in range(2000):
        gates.append(device.submit(Op(gate=True), after=[gates[-1]], lane=device.lanes[(i + 1) % 2], awaits=1))
    for gate in gates[1:]:
        device.end_awaitable(gate)
    assert device.order == []
    device.end_awaitable(gates[0])
    assert device.order == gates


@pytest.mark.parametrize("order", ["oldest first", "newest first", "random"])
def test_stopping_many(order: str) -> None:
    """Stopping ten thousand that wait on one lane is quick in any order, and leaves the lane empty."""
    device = Device({0: 1}, depth=1, checked=False)
    running, *ops = [device.submit(Op()) for _ in range(10_001)]
    random.Random(1).shuffle(ops) if order == "random" else ops.sort(key=lambda op: op.number, reverse=order[0] == "n")
    began = time.process_time()
    for op in ops:
        device.stop(op, Boom())
    assert time.process_time() - began < 5
    assert (device.board.pending, device.lanes[0].queue.load, len(device.lanes[0].waiting)) == (0, 0, 0)
    device.settle()
    assert device.order == [running]


def test_a_writer_after_many_readers() -> None:
    """Being placed after ten thousand, waiting on several lanes, costs no time squared."""
    device = Device({0: 2}, depth=1, checked=False)
    memory = Memory()
    first = [device.submit(Op(), [(memory, False)], lane=device.lanes[0]) for _ in range(10_000)]
    device.submit(Op(), [(memory, False)], lane=device.lanes[1])
    began = time.process_time()
    last = device.submit(Op(), [(memory, True)])
    assert time.process_time() - began < 2
    device.settle()
    assert device.order[-1] is last
    assert len(device.order) == len(first) + 2


def test_progress_does_not_look_at_every_stream() -> None:
    """Thousands of adopted streams cost an event nothing while nothing waits on them, nor does naming one."""
    device = Device({0: 1}, depth=1, adopted=5000, checked=False)
    looked = 0

    class Counting(list[Line[Op]]):
        def __iter__(self) -> Iterator[Line[Op]]:
            nonlocal looked
            looked += 1
            return super().__iter__()

    device.lanes = Counting(device.lanes)  # type: ignore[misc]
    device.submit(Op(), lane=device.lanes[0])
    device.submit(Op(), lane=device.lanes[0])
    device.submit(Op(), lane=device.lanes[-1])
    device.arrive(device.lanes[0])
    device.flush()
    assert looked == 0


# -- one decision each ---------------------------------------------------------------------


def busy(device: Device, lane: int, count: int = 1) -> list[Op]:
    return [device.submit(Op("busy"), lane=device.lanes[lane]) for _ in range(count)]


@pytest.mark.parametrize(
    ("setup", "expected"),
    [
        pytest.param(lambda d: (busy(d, 0), ())[1], {1}, id="the least busy lane"),
        pytest.param(lambda d: busy(d, 1, 2)[:1], {1}, id="where all it comes after is, however busy"),
        pytest.param(lambda d: [*busy(d, 1), *busy(d, 2)], {0, 3}, id="the least busy if they are on two lanes"),
        pytest.param(lambda d: busy(d, 4), {0, 1, 2, 3}, id="not to a lane of another priority"),
        pytest.param(lambda d: busy(d, -1), {0, 1, 2, 3}, id="not to somebody else's stream"),
        pytest.param(lambda d: (setattr(d.lanes[1].queue, "reserved", True), busy(d, 1))[1], {0, 2, 3}, id="reserved"),
        pytest.param(lambda d: (gated(d, 1), *(busy(d, i, 3) for i in (0, 2, 3)), [])[4], {0, 2, 3}, id="no gate"),
        pytest.param(lambda d: (busy(d, 1), gated(d, 1))[0], {0, 2, 3}, id="nor there where it comes after something"),
    ],
)
def test_where_it_goes(setup: Callable[[Device], list[Op]], expected: set[int]) -> None:
    """Home where its dependencies are, or the least busy of its priority that is open to all."""
    device = Device({0: 4, -1: 2}, depth=8, adopted=1)
    op = device.submit(Op(), after=setup(device))
    assert op.started
    assert op.lane.index in expected


@pytest.mark.parametrize("newest_first", [False, True])
def test_it_is_bound_for_no_lane_before_all_it_comes_after_are(newest_first: bool) -> None:
    """Beside something that has no lane yet, what waits on one does not decide."""
    device = Device({0: 2}, depth=1)
    waiting = busy(device, 0, 2)[1]
    held = device.submit(Op(), awaits=1)
    after = [held, waiting][:: -1 if newest_first else 1]
    assert device.submit(Op(), after=after).lane is None


def gated(device: Device, lane: int) -> Op:
    return device.submit(Op("gate", gate=True), lane=device.lanes[lane], awaits=1)


def test_priority() -> None:
    """It goes to lanes of its priority, whose lane it names goes there; a priority without lanes is refused."""
    device = Device({0: 1, -1: 2})
    assert {device.submit(Op(priority=-1)).lane.index for _ in range(4)} == {1, 2}
    assert device.submit(Op(priority=-1), lane=device.lanes[0]).lane is device.lanes[0]
    with pytest.raises(UsageError, match="no lanes of priority 3; there are: -1, 0"):
        device.submit(Op(priority=3))


def test_the_order_of_one_lane_is_enough() -> None:
    """What comes after something that waits on a lane waits there, too, and needs nobody to release it."""
    device = Device({0: 2}, depth=1)
    busy(device, 0)
    first = device.submit(Op(), lane=device.lanes[0])
    second = device.submit(Op(), after=[first])
    assert second.lane is device.lanes[0]
    assert (second.holds, first.followers) == (0, None)
    device.settle()
    assert device.order[1:] == [first, second]


@pytest.mark.parametrize("kind", ["streamed", "calling", "held", "other lane"])
def test_the_order_of_one_lane_is_not_enough(kind: str) -> None:
    """What goes piece by piece, calls, or is not on the lane yet holds what comes after it."""
    device = Device({0: 2}, depth=1, calling=1)
    busy(device, 0), busy(device, 1)
    first = Op(streamed=kind == "streamed", calling=int(kind == "calling"))
    lane = None if kind == "calling" else device.lanes[kind == "other lane"]
    device.submit(first, lane=lane, awaits=kind == "held")
    second = device.submit(Op(), after=[first], lane=device.lanes[0])
    assert second.holds == 1
    if first.awaits:
        device.end_awaitable(first)
    device.settle()
    assert device.order.index(first) < device.order.index(second)


@pytest.mark.parametrize(
    ("prepare", "kind", "text"),
    [
        (lambda d: busy(d, 0, 2), {}, "lane 0 is full"),
        (lambda d: d.submit(Op("slow"), awaits=1), {}, "it comes after <slow>, which only the host can wait for"),
        (lambda d: (d.pause(), None)[1], {}, "maintenance is going on"),
        (lambda d: None, {"streamed": True}, "it goes piece by piece"),
        (lambda d: (d.submit(Op(calling=1)), d.pause(), None)[2], {"calling": 1}, "maintenance is going on"),
        (lambda d: (d.submit(Op(calling=1)), None)[1], {"calling": 1}, "every calling lane is taken"),
        (lambda d: (d.submit(Op(calling=2), awaits=1), None)[1], {"calling": 1}, "every calling lane is taken"),
        (lambda d: d.submit(Op("runs")), {"on_host": True}, "it comes after <runs>, which only the host can wait for"),
    ],
)
def test_obstacles(prepare: Callable[[Device], Any], kind: dict[str, Any], text: str) -> None:
    """Instant, on somebody else's stream, or with nothing more to wait: WouldBlock says why, and nothing changes."""
    for how in ("instant", "adopted", "full"):
        device = Device({0: 1}, depth=2, calling=1, adopted=1)
        before = prepare(device)
        after = [before] if isinstance(before, Op) else []
        lane = device.lanes[-1] if how == "adopted" else None
        if how == "full":
            device.max_pending = device.board.pending  # type: ignore[misc]
        if how == "adopted" and ("full" in text or kind.get("on_host") or kind.get("calling")):
            continue
        pending = device.board.pending
        with pytest.raises(WouldBlock, match=text):
            device.submit(Op(**kind), after=after, lane=lane, instant=how == "instant")
        assert device.board.pending == pending
        assert not device.on_host


def test_full_of_what_waits() -> None:
    """Where no more may wait, what can start at once still does, and the refusal names off.room()."""
    device = Device({0: 2}, depth=1, max_pending=1)
    busy(device, 0, 2)
    with pytest.raises(WouldBlock, match=r"1 operations wait on the host \(max_pending\).*lane 0 is full.*room"):
        busy(device, 0)
    with pytest.raises(WouldBlock, match="only the host can wait"):
        device.submit(Op(), awaits=1)
    assert busy(device, 1)[0].started


def test_a_host_task_waits_until_its_dependencies_are_done() -> None:
    """On the device is not enough; where no more may wait it is refused, and stopping it forgets it."""
    device = Device({0: 1}, depth=2)
    first = busy(device, 0)
    task, stopped = (device.submit(Op(on_host=True), after=first) for _ in range(2))
    device.stop(stopped, Boom())
    assert not task.started
    assert len(device.on_host) == 1
    device.arrive(device.lanes[0])
    device.run_later()
    assert (task.started, stopped.started) == (True, False)


@pytest.mark.parametrize("end", ["opens", "fails", "is stopped"])
def test_gate(end: str) -> None:
    """What comes after a gate on its lane waits; however the gate ends, the lane goes on."""
    device = Device({0: 2}, depth=4)
    first = busy(device, 0)[0]
    gate = gated(device, 0)
    behind, named = busy(device, 0)[0], device.submit(Op(), after=[gate], lane=device.lanes[1])
    assert (first.started, behind.started, named.started) == (True, False, False)
    assert busy(device, 1)[0].started
    if end == "is stopped":
        device.stop(gate, Boom())
    else:
        device.end_awaitable(gate, None if end == "opens" else Boom())
    assert behind.started
    assert gate.started is named.started is (end == "opens")
    assert isinstance(named.failure, DependencyError) is (end != "opens")
    device.settle()
    assert device.board.pending == 0


def test_what_was_submitted_before_a_gate_goes_ahead_of_it() -> None:
    """A gate after something held for its own lane does not keep that away for ever, nor what came between."""
    device = Device({0: 1}, depth=8)
    lane = device.lanes[0]
    first, other = (device.submit(Op(), lane=lane, awaits=1) for _ in range(2))
    gate = device.submit(Op(gate=True), after=[first], lane=lane, awaits=1)
    behind = device.submit(Op(), lane=lane)
    late = device.submit(Op(), lane=lane, awaits=1)
    for op in (gate, late, first):
        device.end_awaitable(op)
    assert device.order == [first, gate, behind, late]
    device.end_awaitable(other)
    assert device.order[-1] is other


def test_what_goes_ahead_of_a_gate_can_be_stopped() -> None:
    """On a lane that is paused, a gate and what would go ahead of it are stopped, and the lane is free again."""
    device = Device({0: 1}, depth=4)
    lane = device.lanes[0]
    first = device.submit(Op(), lane=lane, awaits=1)
    gate = gated(device, 0)
    device.pause()
    device.end_awaitable(first)
    for op in (gate, first):
        device.stop(op, Boom())
    assert (device.board.pending, lane.queue.load, len(lane.waiting), lane.ahead) == (0, 0, 0, {})
    device.resume()
    assert busy(device, 0)[0].started


def test_pieces_pass_gates() -> None:
    """The pieces of something streamed that has started go ahead of every gate that waits, and keep their order."""
    device = Device({0: 1}, depth=1)
    lane = device.lanes[0]
    streamed = device.submit(Op(streamed=True), lane=lane)
    gate = device.submit(Op(gate=True), after=[streamed], lane=lane, awaits=1)
    device.end_awaitable(gate)
    pieces = [Op(f"piece {i}") for i in range(3)]
    for piece in pieces:
        device.place(piece, lane, part_of=streamed)
    while any(lane.queue.operations):
        device.arrive(lane)
    assert all(piece.finished for piece in pieces)
    device.end_on_host(streamed)
    device.settle()
    assert device.order == [streamed, *pieces, gate]


def test_a_stopped_gate_orders_nothing_else() -> None:
    """What failed with it does not make others wait for what the gate came after."""
    device = Device({0: 2}, depth=4)
    memory = Memory()
    slow = device.submit(Op("slow"), awaits=1)
    gate = device.submit(Op(gate=True), after=[slow], lane=device.lanes[0], awaits=1)
    failed = device.submit(Op(), [(memory, True)], after=[gate], lane=device.lanes[0])
    sharing = device.submit(Op(), [(memory, True)], lane=device.lanes[0])
    device.stop(gate, Boom())
    assert isinstance(failed.failure, DependencyError)
    assert sharing.started
    assert not slow.started


@pytest.mark.parametrize("on_host", [True, False])
def test_what_never_ran_leaves_its_place(on_host: bool) -> None:
    """When a writer in the middle is stopped, those behind it wait for those before it, wherever these are."""
    device = Device({0: 2}, depth=4)
    memory = Memory()
    first = device.submit(Op("first"), [(memory, True)], lane=device.lanes[0], awaits=int(on_host))
    middle = device.submit(Op("middle"), [(memory, True)], awaits=1)
    last = device.submit(Op("last"), [(memory, True)], lane=device.lanes[1])
    device.stop(middle, Boom())
    late = device.submit(Op("late"), [(memory, True)], lane=device.lanes[1])
    assert (last.started, late.started) == (not on_host, not on_host)
    assert last.waits == ([] if on_host else [first])
    if on_host:
        device.end_awaitable(first)
    assert device.order == [first, last, late]
    assert last.waits == [first]


def test_maintenance_and_calls() -> None:
    """While a kernel that calls is on the device, a pause holds up calling launches alone, but not its own ones."""
    device = Device({0: 1}, calling=3)
    resident = device.submit(Op(calling=1))
    device.pause()
    assert not device.submit(Op(calling=1)).started
    assert device.submit(Op()).started
    assert device.may_nest()
    nested = device.submit(Op(calling=2), instant=True)
    assert nested.started
    for op in (resident, nested):
        device.arrive(op.lane)
    assert not device.submit(Op()).started
    device.resume()
    device.settle()
    assert device.board.pending == 0
    assert len(device.order) == 5


def test_what_comes_after_a_call_waits_until_it_is_done() -> None:
    """That the call has started is not enough, nor that its kernel is over: its host functions may still run."""
    device = Device({0: 1}, calling=1)
    first, call = (device.submit(Op(calling=1)) for _ in range(2))
    after = device.submit(Op(), after=[call])
    for op in (first, call):
        assert op.started
        device.arrive(op.lane)
        assert not after.started
        device.end_calling(op)
    assert after.started


def test_calls_take_whichever_lane_is_free() -> None:
    """What waits for a calling lane gets the first that is free, in order, whatever the others run."""
    device = Device({0: 1}, calling=2)
    first, second, third, fourth = (device.submit(Op(calling=1)) for _ in range(4))
    assert (first.started, second.started, third.started, fourth.started) == (True, True, False, False)
    device.arrive(second.lane)
    assert (third.started, third.lane, fourth.started) == (True, second.lane, False)
    device.submit(Op(), after=[fourth])
    device.stop(fourth, Boom())
    assert device.board.pending == 0
    assert not device._followed


@pytest.mark.parametrize("end", ["starts", "is stopped", "fails"])
def test_a_lane_is_kept_for_a_launch_of_a_host_function(end: str) -> None:
    """While one is held, others leave it a lane: it starts as soon as it can, before what came earlier."""
    device = Device({0: 1}, calling=3)
    caller = device.submit(Op(calling=1))
    assert device.may_nest()
    nested = device.submit(Op(calling=2), awaits=1)
    others = [device.submit(Op(calling=1)) for _ in range(3)]
    assert [op.started for op in others] == [True, False, False]
    assert not device.may_nest()
    if end == "is stopped":
        device.stop(nested, Boom())
    else:
        device.end_awaitable(nested, None if end == "starts" else Boom())
    assert nested.started is (end == "starts")
    assert others[1].started is (end != "starts")
    assert not others[2].started
    device.arrive(caller.lane)
    assert others[1].started
    device.settle()
    assert device.board.pending == 0


def test_what_a_launch_of_a_host_function_comes_after_uses_its_lane() -> None:
    """Where all lanes are kept for others, and during a pause, too; one at a time, and whatever waits before it."""
    device = Device({0: 1}, calling=3)
    device.submit(Op(calling=1))
    early = [device.submit(Op(calling=1), awaits=1) for _ in range(2)]
    between = device.submit(Op(), after=early)
    nested = [device.submit(Op(calling=2), after=[between]) for _ in range(2)]
    other = device.submit(Op(calling=1))
    device.pause()
    for op in early:
        device.end_awaitable(op)
    assert (early[0].started, early[1].started, other.started) == (True, False, False)
    device.arrive(early[0].lane)
    device.end_calling(early[0])
    assert (early[1].started, other.started, nested[0].started) == (True, False, False)
    device.arrive(early[1].lane)
    device.end_calling(early[1])
    device.arrive(between.lane)
    assert all(op.started for op in nested)
    device.resume()
    device.settle()
    assert other.finished


@pytest.mark.parametrize("task", [False, True])
def test_what_waits_in_a_pause_goes_when_a_host_function_needs_it(task: bool) -> None:
    """A launch that a pause holds up starts as soon as one of a host function comes after it, or after a task of it."""
    device = Device({0: 1}, calling=3)
    device.submit(Op(calling=1))
    device.pause()
    early = device.submit(Op(calling=1))
    assert not early.started
    nested = device.submit(Op(calling=2), after=[device.submit(Op(on_host=True), after=[early]) if task else early])
    assert early.started
    device.arrive(early.lane)
    device.end_calling(early)
    device.run_later()
    for op in list(device.tasks):
        device.end_on_host(op)
    assert nested.started
    assert not device._followed


@pytest.mark.parametrize("what", ["itself", "what comes after it"])
def test_what_waits_in_a_pause_goes_when_a_host_function_awaits_it(what: str) -> None:
    """A launch that a pause holds up starts as soon as a host function awaits it, or what comes after it."""
    device = Device({0: 1}, calling=3)
    device.submit(Op(calling=1))
    device.pause()
    call, other = (device.submit(Op(calling=1)) for _ in range(2))
    after = device.submit(Op(), after=[call])
    device.wait_in_call(call if what == "itself" else after)
    assert (call.started, other.started) == (True, False)
    device.arrive(call.lane)
    device.end_calling(call)
    assert after.started
    device.resume()
    device.settle()
    assert device.board.pending == 0


def test_no_lane_is_kept_for_what_a_host_function_awaits() -> None:
    """What it is held by may need one. One lane after the other serves all of them, also during a pause."""
    device = Device({0: 1}, calling=2)
    device.submit(Op(calling=1))
    held = [device.submit(Op(calling=1), awaits=1) for _ in range(2)]
    last = device.submit(Op(), after=held)
    device.wait_in_call(last)
    assert device.may_nest()
    first = device.submit(Op(calling=1))
    assert first.started
    device.pause()
    for op in held:
        device.end_awaitable(op)
    other = device.submit(Op(calling=1))
    for _ in range(3):
        device.end_calling(device.arrive(first.lane))
    assert (last.started, other.started) == (True, False)
    assert not device._awaited


def test_what_another_device_has_is_not_ours() -> None:
    """A host function that waits for what another device has changes nothing here, nor there by way of this one."""
    here, there = (Device({0: 1}, calling=2, checked=False) for _ in range(2))
    for device in (here, there):
        device.submit(Op(calling=1))
        device.pause()
    call = there.submit(Op(calling=1))
    visit = there.submit(Op(), after=[call])
    here.wait_in_call(visit)
    assert not here._awaited
    assert not call.started
    there.wait_in_call(visit)
    assert call.started


@pytest.mark.parametrize("late", [False, True])
def test_what_opens_a_gate_is_awaited_by_what_is_behind_it(late: bool) -> None:
    """So it may use the lane of a launch of a host function that comes after something behind the gate."""
    device = Device({0: 1}, calling=2)
    device.submit(Op(calling=1))
    opener = device.submit(Op(calling=1), awaits=1)
    device.submit(Op(gate=True), after=[opener], lane=device.lanes[0])
    behind = device.submit(Op(), lane=device.lanes[0], awaits=int(late))
    nested = device.submit(Op(calling=2), after=[behind])
    device.end_awaitable(opener)
    if late:
        device.end_awaitable(behind)
    assert opener.started
    device.settle()
    assert nested.finished


def test_the_lane_of_what_is_being_started_is_not_free() -> None:
    """What a program's code asks for meanwhile does not get it."""
    device = Device({0: 1}, calling=1)
    seen: list[bool] = []
    op = Op(calling=1)
    op.on_start = lambda: seen.append(device.may_nest())
    device.submit(op)
    assert seen == [False]


def test_many_launches_that_wait_are_not_searched() -> None:
    """With lanes kept for others, a look costs the same however many wait."""
    device = Device({0: 1}, calling=2, checked=False)
    device.submit(Op(calling=1))
    device.submit(Op(calling=2), awaits=1)
    for _ in range(2000):
        device.submit(Op(calling=1))
    device._calls[1] = Unsearched(device._calls[1])
    for _ in range(100):
        device.flush()


class Unsearched(dict[Op, None]):
    """A dictionary of which nobody may go through the keys."""

    def __iter__(self) -> Iterator[Op]:
        raise AssertionError


def test_launches_of_host_functions_go_first() -> None:
    """They start before what has waited longer: that may be waited for by nobody, they are."""
    device = Device({0: 1}, calling=2)
    first = device.submit(Op(calling=1))
    nested = device.submit(Op(calling=2), awaits=1)
    waiting = device.submit(Op(calling=1))
    device.pause()
    device.end_awaitable(nested)
    assert nested.started
    device.resume()
    assert not waiting.started
    device.arrive(first.lane)
    assert waiting.started


def test_stopped_while_it_is_put_together() -> None:
    """A program's code that runs while its operation starts may stop it: it goes on, and the counts stay right."""
    device = Device({0: 1}, depth=4)
    op = Op()
    op.on_start = lambda: device.stop(op, Boom())
    device.submit(op)
    assert (op.started, op.finished, device.board.pending, device.lanes[0].queue.load) == (True, False, 0, 0)


def test_an_interrupt_loses_nothing() -> None:
    """What is no Exception passes through to whoever caused it; what was about to start does with the next event."""
    device = Device({0: 2}, depth=8)
    ops = chain(device, 2, refuse=KeyboardInterrupt)
    others = [device.submit(Op(), after=[ops[1]]) for _ in range(3)] + [device.submit(Op(), after=[ops[0]])]
    sharing = Memory()
    first = device.submit(Op(refuse=KeyboardInterrupt), [(sharing, True)], awaits=1)
    then = [device.submit(Op(), [(sharing, False)]) for _ in range(3)]
    for op in (ops[0], first):
        with pytest.raises(KeyboardInterrupt):
            device.end_awaitable(op)
    device.flush()
    assert all(op.started for op in then)
    assert all(isinstance(op.failure, DependencyError) for op in (ops[1], *others))


def test_what_was_released_is_not_on_its_lane_yet() -> None:
    """A host task that runs at once may submit something after what was released with it: that comes after it."""
    device = Device({0: 1}, depth=4)
    memory, made = Memory(), []
    first = device.submit(Op("first", on_host=True), awaits=1)
    device.on_host[first] = lambda: device.end_on_host(first)
    task = device.submit(Op("task", on_host=True), awaits=1)
    task.awaits = 0
    device.on_host[task] = lambda: made.append(device.submit(Op("made"), [(memory, True)], lane=device.lanes[0]))
    first.followers = [task]  # as if it held it, before anything else
    behind = device.submit(Op("behind"), [(memory, True)], after=[first], lane=device.lanes[0])
    device.end_awaitable(first)
    assert device.order == [behind, *made]


def test_failure_of_a_dependency() -> None:
    """It fails what names it unless that has started; what only shares memory with it goes on."""
    device = Device({0: 1}, depth=2)
    memory = Memory()
    first = device.submit(Op("first", refuse=Refused), [(memory, True)], awaits=1)
    named, sharing = device.submit(Op("named"), after=[first]), device.submit(Op(), [(memory, True)])
    device.end_awaitable(first)
    assert isinstance(named.failure, DependencyError)
    assert str(named.failure) == "first, which named came after, failed: Refused()"
    assert sharing.started
    assert dependency_failure(Op(after=(first,), requires=None)) is None


def test_dependency_error_names_the_root() -> None:
    """The cause is what failed right before; the message names what failed first."""
    root = Boom("root")
    middle = dependency_error("a", root)
    last = dependency_error("b", middle)
    assert (str(last), last.__cause__, last.root) == ("b failed: Boom('root')", middle, root)
    bare = DependencyError("from elsewhere")
    assert dependency_error("c", bare).root is bare


def test_waits_for() -> None:
    """What waits on the host is followed to the launch at its end; what is on the device or done leads nowhere."""
    launch = Op()
    chained = [launch]
    for _ in range(2000):
        chained.append(Op(deps=[chained[-1]]))
    assert waits_for(chained[-1:], launch)
    assert not waits_for(chained[-1:], Op())
    assert not waits_for([Op(deps=[launch], queue=Queue(1)), Op(deps=[launch], finished=True)], launch)


def test_waits_for_a_gate_on_its_lane() -> None:
    """What waits behind a gate waits for what opens that; what goes ahead of the gate, or is elsewhere, does not."""
    launch, line, other = Op(), Line[Op](0, Queue(1)), Line[Op](1, Queue(1))
    first, gate, overtaking, last = Op(lane=line), Op(lane=line, gate=True, deps=[launch]), Op(lane=line), Op(lane=line)
    over = Op(lane=line, gate=True, deps=[launch], finished=True)
    line.waiting.extend((over, first, gate, last))
    line.ahead = {over: (1, deque()), gate: (2, deque([overtaking]))}
    other.waiting.append(elsewhere := Op(lane=other))
    every = (over, first, overtaking, last, elsewhere, Op(lane=line))
    assert [op for op in every if waits_for([op], launch, lanes=True)] == [last]
    assert not waits_for(every, launch)


def test_after_the_end() -> None:
    """What is submitted once the device is gone ends with its failure, host tasks and gates alike."""
    device = Device({0: 1}, depth=1, calling=1)
    lane, lost = device.lanes[0], Lost()
    busy(device, 0, 3)
    early = device.submit(Op(), lane=lane, awaits=1)
    gated(device, 0)
    device.end_awaitable(early)
    calls = [device.submit(Op(calling=1)) for _ in range(2)]
    device.lose(lost)
    assert {op.failure for op in (early, *calls)} == {lost}
    assert (device.board.pending, lane.queue.load, len(lane.waiting), lane.ahead) == (0, 0, 0, {})
    for kind in ({}, {"on_host": True}, {"gate": True}):
        assert device.submit(Op(**kind), lane=None if kind == {"on_host": True} else lane).failure is lost
    assert not device.on_host
