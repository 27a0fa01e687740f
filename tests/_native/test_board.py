"""``board.c``: what is in flight on every lane, and finding what arrived. Against a model in Python."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import weakref
from collections import deque
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiooffload._native import Board, LaneQueue, LaunchPlan, Operation, Word, now_ns
from aiooffload.errors import DeviceLostError

MODULUS = 2**64
STARTS = st.one_of(
    st.integers(MODULUS - 20, MODULUS - 1), st.integers(2**63 - 10, 2**63 + 10), st.integers(0, MODULUS - 1)
)
FOREVER_NS = 60 * 10**9


class NoLoop:
    """For operations that nobody awaits."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(context)


def word(value: int = 0) -> Word:
    box = ctypes.c_uint64(value)
    return Word(ctypes.addressof(box), 0, box)


def make() -> Operation:
    return Operation(NoLoop())  # type: ignore[arg-type]


def plan(*durations: int) -> LaunchPlan:
    made = LaunchPlan("k", 0, None, (1, 1, 1), (1, 1, 1), 0, None, False)
    for duration in durations:
        made.record(duration)
    return made


def fill(queue: LaneQueue, count: int) -> list[Operation]:
    operations = [make() for _ in range(count)]
    for operation in operations:
        queue.push(operation)
    return operations


def reach(queue: LaneQueue, sequence: int) -> None:
    """Write a mark, as the device does."""
    queue.slot.store(sequence)


# -- against a model -----------------------------------------------------------------------


class ModelLane:
    """A lane as one would write it without thinking of speed."""

    def __init__(self, depth: int, start: int) -> None:
        self.depth = depth
        self.issued = start
        self.load = 0
        self.flight: deque[tuple[Operation, int]] = deque()
        self.marked = 0
        """How many of `flight`, from the oldest, the device is through with."""

    @property
    def busy(self) -> int:
        return len(self.flight) + self.load


class BoardMachine(RuleBasedStateMachine):
    """Lanes that take, complete and lose operations in any order, with marks that arrive in batches."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Board()
        self.queues: list[LaneQueue] = []
        self.model: list[ModelLane] = []
        self.order: list[Operation] = []
        """As the operations' arrivals ran."""
        self.rotate = self.pushed = self.completed = 0

    @initialize(lanes=st.lists(st.tuples(st.integers(1, 5), STARTS), min_size=1, max_size=4))
    def add_lanes(self, lanes: list[tuple[int, int]]) -> None:
        for depth, start in lanes:
            slot = word(123)
            self.queues.append(self.board.add(slot, depth, start))
            assert (slot.load(), self.queues[-1].slot) == (start, slot)
            self.model.append(ModelLane(depth, start))

    @rule(data=st.data(), count=st.integers(1, 6))
    def push(self, data: st.DataObject, count: int) -> None:
        index = data.draw(st.integers(0, len(self.model) - 1))
        queue, lane = self.queues[index], self.model[index]
        for _ in range(count):
            operation = make()
            operation.arrival = self.arrived
            if len(lane.flight) == lane.depth:
                with pytest.raises(IndexError, match="full"):
                    queue.push(operation)
                assert operation.queue is None
                return
            lane.issued = (lane.issued + 1) % MODULUS
            assert queue.next_sequence == lane.issued
            queue.push(operation)
            assert (operation.sequence, operation.queue) == (lane.issued, queue)
            lane.flight.append((operation, lane.issued))
            self.pushed += 1

    def arrived(self, operation: Operation) -> None:
        self.order.append(operation)
        operation.finish()

    @rule(data=st.data())
    def mark(self, data: st.DataObject) -> None:
        """The device gets through with some of the lane's operations; only its last mark stands in the slot."""
        index = data.draw(st.integers(0, len(self.model) - 1))
        lane = self.model[index]
        lane.marked = data.draw(st.integers(lane.marked, len(lane.flight)))
        if lane.marked:
            reach(self.queues[index], lane.flight[lane.marked - 1][1])

    @rule(spin_ns=st.sampled_from([None, 0, 1, 1000]))
    def poll(self, spin_ns: int | None) -> None:
        expected = []
        for lane in self.model:
            expected += [lane.flight.popleft()[0] for _ in range(lane.marked)]
            lane.marked = 0
        self.order.clear()
        before = now_ns()
        found = self.board.poll() if spin_ns is None else self.board.poll(spin_ns)
        assert found == len(expected)
        assert self.order == expected
        assert all(before <= operation.finished_ns <= now_ns() for operation in expected)
        self.completed += found

    @rule(data=st.data(), load=st.integers(0, 5))
    def set_load(self, data: st.DataObject, load: int) -> None:
        index = data.draw(st.integers(0, len(self.model) - 1))
        self.queues[index].load = self.model[index].load = load

    @rule(data=st.data())
    def pick(self, data: st.DataObject) -> None:
        first = data.draw(st.integers(0, len(self.model) - 1))
        last = data.draw(st.integers(first + 1, len(self.model)))
        begin = self.rotate if first <= self.rotate < last else first
        order = [*range(begin, last), *range(first, begin)]
        chosen = min(order, key=lambda index: self.model[index].busy)
        assert self.board.pick(first, last) == chosen
        self.rotate = chosen + 1

    @precondition(lambda self: self.board.in_flight)
    @rule()
    def abandon(self) -> None:
        expected = [operation for lane in self.model for operation, _ in lane.flight]
        assert self.board.abandon() == expected
        assert not any(operation.finished for operation in expected)
        for lane in self.model:
            lane.flight.clear()
            lane.marked = 0
        # The marks of what was abandoned would never come; the next ones follow in sequence.
        for queue in self.queues:
            reach(queue, queue.issued)

    @invariant()
    def counts_agree(self) -> None:
        for queue, lane in zip(self.queues, self.model, strict=True):
            assert (queue.issued, queue.next_sequence) == (lane.issued, (lane.issued + 1) % MODULUS)
            assert (queue.in_flight, queue.depth, queue.load) == (len(lane.flight), lane.depth, lane.load)
            assert queue.operations() == [operation for operation, _ in lane.flight]
        assert self.board.in_flight == sum(len(lane.flight) for lane in self.model)
        assert (self.board.pushed, self.board.completed) == (self.pushed, self.completed)
        assert self.board.due_ns() == 0


TestBoard = BoardMachine.TestCase


# -- lanes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError),
        ((None, 1), TypeError),
        ((word(), "1"), TypeError),
        ((word(), 0), ValueError),
        ((word(), 2**31, 0, 0), TypeError),
    ],
)
def test_a_lane_has_a_slot_and_a_depth(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    """Anything else than a word and a depth of at least 1 raises, and no lane is added."""
    board = Board()
    with pytest.raises(error):
        board.add(*arguments)
    with pytest.raises(ValueError, match="range of lanes"):
        board.pick(0, 1)


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (-1, 1), (0, 3), (2, 2), (3, 4)])
def test_a_pick_is_from_lanes_that_exist(first: int, last: int) -> None:
    """An empty range and one beyond the lanes raise ValueError."""
    board = Board()
    for _ in range(2):
        board.add(word(), 1)
    with pytest.raises(ValueError, match="range of lanes"):
        board.pick(first, last)


@pytest.mark.parametrize("arguments", [(), (0,), (0, 1, 2), ("0", "1"), (0.0, 1.0)])
def test_a_pick_takes_two_integers(arguments: tuple[Any, ...]) -> None:
    """Other arguments raise instead of choosing."""
    board = Board()
    board.add(word(), 1)
    with pytest.raises((TypeError, ValueError)):
        board.pick(*arguments)


def test_equally_busy_lanes_take_turns() -> None:
    """Idle lanes are chosen one after the other, round and round."""
    board = Board()
    for _ in range(3):
        board.add(word(), 1)
    assert [board.pick(0, 3) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("value", [None, 5, "operation", object()])
def test_only_operations_are_pushed(value: Any) -> None:
    """Anything else raises TypeError and takes no place."""
    board = Board()
    queue = board.add(word(), 1)
    with pytest.raises(TypeError, match="Operation"):
        queue.push(value)
    assert (queue.in_flight, queue.issued, board.pushed) == (0, 0, 0)


def test_a_lane_without_its_board_refuses() -> None:
    """After its board is gone a lane takes nothing more; what was in flight can still be listed."""
    board = Board()
    queue = board.add(word(), 4)
    operations = fill(queue, 2)
    del board
    with pytest.raises(IndexError, match="board is gone"):
        queue.push(make())
    assert queue.operations() == operations
    assert queue.due_ns() == 0


def test_since_when_the_oldest_can_have_been_running() -> None:
    """Since its push, or the end of the last that it came after, on its lane or another; not before all are over."""
    board = Board()
    one, two = (board.add(word(), 4) for _ in range(2))
    assert one.running_since_ns() == 0
    before = now_ns()
    (first,) = fill(one, 1)
    since = one.running_since_ns()
    assert before <= since <= now_ns()
    behind = make()
    behind.deps = [first]
    two.push(behind)
    behind.deps = None  # as the engine leaves it
    (second,) = fill(one, 1)
    assert two.running_since_ns() == 0
    assert one.running_since_ns() == since
    reach(one, first.sequence)
    assert board.poll() == 1
    assert one.running_since_ns() == two.running_since_ns() == first.finished_ns > since
    reach(one, second.sequence)
    assert board.poll() == 1
    assert one.running_since_ns() == 0
    assert two.running_since_ns() == first.finished_ns


def test_what_an_operation_waited_for_goes_with_its_end() -> None:
    """It is held while the operation is in flight, so that its end is known, and no longer."""
    board = Board()
    one, two = (board.add(word(), 4) for _ in range(2))
    (first,) = fill(one, 1)
    behind = make()
    behind.deps = [first]
    two.push(behind)
    behind.deps = None
    reach(one, 1)
    board.poll()
    count = sys.getrefcount(first)
    reach(two, 1)
    board.poll()
    gc.collect()
    assert sys.getrefcount(first) == count - 1


def test_a_lane_is_made_by_its_board() -> None:
    """A lane queue of its own would have no board."""
    with pytest.raises(TypeError):
        LaneQueue()


def test_what_the_engine_keeps_on_the_board() -> None:
    """pending, paused and watched are the engine's to set; the counts are not."""
    board = Board()
    assert (board.pending, board.paused, board.watched) == (0, 0, False)
    board.pending, board.paused, board.watched = 3, 1, True
    assert (board.pending, board.paused, board.watched) == (3, 1, True)
    for name in ("in_flight", "pushed", "completed"):
        with pytest.raises(AttributeError):
            setattr(board, name, 1)


def test_a_lane_holds_its_stream_and_lane() -> None:
    """attach() keeps both alive, replaces earlier ones, and takes exactly two."""
    board, things = Board(), [object() for _ in range(4)]
    queue = board.add(word(), 1)
    before = [sys.getrefcount(thing) for thing in things]
    queue.attach(things[0], things[1])
    assert [sys.getrefcount(thing) for thing in things] == [before[0] + 1, before[1] + 1, *before[2:]]
    queue.attach(things[2], things[3])
    assert [sys.getrefcount(thing) for thing in things] == [*before[:2], before[2] + 1, before[3] + 1]
    with pytest.raises(TypeError):
        queue.attach(things[0])  # type: ignore[call-arg]
    del queue, board
    assert [sys.getrefcount(thing) for thing in things] == before


# -- looking -------------------------------------------------------------------------------


def test_more_than_a_batch_arrives_at_once() -> None:
    """One look finishes everything that arrived, also if it is more than fits into one scan."""
    board = Board()
    queues = [board.add(word(), 400) for _ in range(2)]
    operations = [operation for queue in queues for operation in fill(queue, 400)]
    for queue in queues:
        reach(queue, 400)
    assert board.poll() == 800
    assert all(operation.finished for operation in operations)
    assert (board.in_flight, board.completed) == (0, 800)


def test_a_board_without_lanes_has_nothing() -> None:
    """Looking at no lanes finds nothing, with a spin too."""
    board = Board()
    assert (board.poll(), board.poll(FOREVER_NS), board.abandon(), board.due_ns()) == (0, 0, [], 0)


def test_a_spin_ends_without_anything_in_flight() -> None:
    """Looking for a minute at idle lanes returns at once: the time limit of the test would tell."""
    board = Board()
    board.add(word(), 1)
    assert board.poll(FOREVER_NS) == 0


def test_a_spin_ends_at_its_time() -> None:
    """Without an arrival it looks for as long as it was told."""
    board = Board()
    fill(board.add(word(), 1), 1)
    before = now_ns()
    assert board.poll(2_000_000) == 0
    assert now_ns() - before >= 2_000_000


def test_a_spin_sees_an_arrival_from_another_thread() -> None:
    """It looks without the interpreter, so a thread that needs it can store the mark it waits for."""
    board = Board()
    queues = [board.add(word(), 1) for _ in range(3)]
    operations = [operation for queue in queues for operation in fill(queue, 1)]
    thread = threading.Thread(target=reach, args=(queues[1], 1))
    thread.start()
    assert board.poll(FOREVER_NS) == 1
    thread.join()
    assert [operation.finished for operation in operations] == [False, True, False]


@pytest.mark.parametrize("spin", ["1", 1.5, 2**63])
def test_a_spin_is_a_64_bit_integer(spin: Any) -> None:
    """Other values raise, and what arrived is there for the next look."""
    board = Board()
    queue = board.add(word(), 1)
    fill(queue, 1)
    reach(queue, 1)
    with pytest.raises((TypeError, OverflowError)):
        board.poll(spin)
    assert board.poll(-1) == 1


def test_an_arrival_may_push_and_look() -> None:
    """What runs when an operation finishes may submit more and look itself; nothing is lost or seen twice."""
    board, seen = Board(), []
    queue = board.add(word(), 2)

    def again(operation: Operation) -> None:
        seen.append(operation)
        operation.finish()
        if len(seen) < 10:
            following = make()
            following.arrival = again
            queue.push(following)
            reach(queue, queue.issued)
            board.poll()

    first = make()
    first.arrival = again
    queue.push(first)
    reach(queue, 1)
    board.poll()
    assert len(set(seen)) == 10
    assert (board.in_flight, board.completed, board.pushed) == (0, 10, 10)


def test_a_look_during_an_arrival_finishes_what_came_with_it() -> None:
    """Code that an arrival runs may poll for what arrived in the same look."""
    board = Board()
    queue = board.add(word(), 4)
    first, second, third = fill(queue, 3)
    seen: list[bool] = []

    def arrival(operation: Operation) -> None:
        operation.finish()
        board.poll()
        seen.append(third.finished)

    first.arrival = second.arrival = arrival
    reach(queue, 3)
    assert board.poll() == 3
    assert seen == [True, True]
    assert board.completed == 3


def test_an_arrival_that_raises_stops_nobody() -> None:
    """The exception is that operation's failure; the others of the same look finish."""
    board = Board()
    queue = board.add(word(), 3)
    operations = fill(queue, 3)

    def fail(operation: Operation) -> None:
        raise KeyError

    operations[1].arrival = fail
    reach(queue, 3)
    assert board.poll() == 3
    assert [type(operation.look()) for operation in operations] == [type(None), KeyError, type(None)]


def test_a_mark_from_before_the_start_is_none() -> None:
    """A value behind the lane's sequence, across the wrap too, is not taken for an arrival."""
    board = Board()
    queue = board.add(word(), 2, MODULUS - 1)
    (first, second) = fill(queue, 2)
    assert (first.sequence, second.sequence) == (0, 1)
    reach(queue, MODULUS - 1)
    assert board.poll() == 0
    reach(queue, 0)
    assert board.poll() == 1
    reach(queue, 1)
    assert board.poll() == 1
    assert queue.seen == 1


# -- what is held --------------------------------------------------------------------------


def test_operations_in_flight_are_held_until_they_finish() -> None:
    """The lane holds one reference from the push to the look that finishes it."""
    board = Board()
    queue = board.add(word(), 2)
    operation = make()
    before = sys.getrefcount(operation)
    queue.push(operation)
    assert sys.getrefcount(operation) == before + 1
    reach(queue, 1)
    board.poll()
    assert sys.getrefcount(operation) == before


def test_abandoned_operations_are_the_callers() -> None:
    """abandon() gives its references away."""
    board = Board()
    operation = make()
    before = sys.getrefcount(operation)
    board.add(word(), 2).push(operation)
    assert board.abandon() == [operation]
    assert sys.getrefcount(operation) == before


@pytest.mark.parametrize("finish", [False, True])
def test_a_board_with_work_in_flight_is_collected(finish: bool) -> None:
    """A board, its lanes and what is in flight on them go together, although each knows the other."""
    board = Board()
    queue = board.add(word(), 2)
    operation = make()
    operation.lane = [board, queue]
    queue.attach(operation, board)
    queue.push(operation)
    if finish:
        reach(queue, 1)
        board.poll()
    watched = weakref.ref(operation)
    del board, queue, operation
    gc.collect()
    assert watched() is None


# -- when the next one is due --------------------------------------------------------------


def test_an_operation_without_an_estimate_has_no_due_time() -> None:
    """Without a plan, or with one that knows too little, nothing is known."""
    board = Board()
    queue = board.add(word(), 4)
    for known in (None, plan(), plan(1000)):
        operation = make()
        if known is not None:
            operation.plan = known
        queue.push(operation)
        assert (queue.due_ns(), board.due_ns()) == (0, 0)
        reach(queue, queue.issued)
        board.poll()


def test_the_head_of_an_idle_lane_is_due_after_its_duration() -> None:
    """The due time is when it was pushed, and its expected duration; those behind it do not count."""
    board = Board()
    queue = board.add(word(), 4)
    operation, behind = make(), make()
    operation.plan, behind.plan = plan(5_000_000, 5_000_000), plan(1, 1)
    before = now_ns()
    queue.push(operation)
    after = now_ns()
    queue.push(behind)
    assert before + 5_000_000 <= queue.due_ns() <= after + 5_000_000
    assert board.due_ns() == queue.due_ns()


def test_the_next_in_line_starts_when_the_one_before_ends() -> None:
    """Its due time counts from the completion before it on its lane."""
    board = Board()
    queue = board.add(word(), 4)
    first, second = make(), make()
    second.plan = plan(5_000_000, 5_000_000)
    queue.push(first)
    queue.push(second)
    assert queue.due_ns() == 0
    reach(queue, 1)
    board.poll()
    assert queue.due_ns() == first.finished_ns + 5_000_000


def test_the_board_is_due_with_its_first_lane() -> None:
    """Of several lanes the earliest known time counts; lanes that know nothing or are idle do not."""
    board = Board()
    queues = [board.add(word(), 4) for _ in range(4)]
    for queue, known in zip(queues[:3], (plan(9_000_000_000, 9_000_000_000), plan(), plan(1_000, 1_000)), strict=True):
        operation = make()
        operation.plan = known
        queue.push(operation)
    assert board.due_ns() == queues[2].due_ns() > 0
    reach(queues[2], 1)
    board.poll()
    assert board.due_ns() == queues[0].due_ns() > 0


def test_a_completion_teaches_its_plan() -> None:
    """One that arrived alone is a sample; of several that arrived together nothing is learned."""
    board = Board()
    queue = board.add(word(), 4)
    known = plan()
    for count, samples in ((1, 1), (2, 1), (1, 2)):
        for _ in range(count):
            operation = make()
            operation.plan = known
            queue.push(operation)
        reach(queue, queue.issued)
        board.poll()
        assert known.samples == samples


# -- choosing a lane -----------------------------------------------------------------------


def running(queue: LaneQueue, *durations_ns: int) -> list[Operation]:
    """Push operations that are known to take so long; 0 means that nothing is known."""
    operations = []
    for duration in durations_ns:
        operation = make()
        if duration:
            operation.plan = plan(duration, duration)
        queue.push(operation)
        operations.append(operation)
    return operations


LONG = 1_000_000_000
"""Long enough that the clock does not catch up within a test."""


def test_reserved_lanes_are_passed_over() -> None:
    """Neither of the two ways to choose takes a reserved lane, however idle it is."""
    board = Board()
    queues = [board.add(word(), 4) for _ in range(3)]
    queues[0].reserved = True
    assert {board.pick(0, 3) for _ in range(6)} == {1, 2}
    (first,) = running(queues[1], LONG)
    assert board.pick_after(0, 3, [first]) == 1
    queues[1].reserved = True
    assert board.pick_after(0, 3, [first]) == 2


def test_chain_stays_on_its_lane() -> None:
    """What comes after the last operation of a lane goes there: no other lane could start it earlier."""
    board = Board()
    queues = [board.add(word(), 8) for _ in range(4)]
    last = running(queues[2], LONG, LONG, LONG)[-1]
    assert board.pick_after(0, 4, [last]) == 2


def test_lane_that_goes_on_with_something_else_is_left() -> None:
    """What comes after an operation behind which others wait starts earlier on another lane."""
    board = Board()
    queues = [board.add(word(), 8) for _ in range(3)]
    first = running(queues[0], LONG, 5 * LONG)[0]
    running(queues[1], 3 * LONG)
    assert board.pick_after(0, 3, [first]) == 2
    running(queues[2], 2 * LONG)
    assert board.pick_after(0, 3, [first]) == 2


def test_lane_that_would_be_idle_for_the_shortest_time() -> None:
    """Of lanes that are free in time, the one that is busy longest: the others stay for what can start earlier."""
    board = Board()
    queues = [board.add(word(), 8) for _ in range(4)]
    first = running(queues[0], 5 * LONG, 5 * LONG)[0]
    for queue, busy in zip(queues[1:], (1, 4, 2), strict=True):
        running(queue, busy * LONG)
    assert board.pick_after(0, 4, [first]) == 2


def test_dependencies_on_several_lanes() -> None:
    """The last of them counts; where it ends and nothing follows, nothing is lost by going there."""
    board = Board()
    queues = [board.add(word(), 8) for _ in range(3)]
    early, late = running(queues[0], LONG)[0], running(queues[1], 6 * LONG)[0]
    assert board.pick_after(0, 3, [early, late]) == 1


def test_where_nothing_is_known() -> None:
    """All count the same: the end of a chain is followed on its lane, and what is behind others elsewhere."""
    board = Board()
    queues = [board.add(word(), 8) for _ in range(3)]
    first = running(queues[0], 0, 0, 0)
    second = running(queues[1], 0)[0]
    assert board.pick_after(0, 3, [first[-1]]) == 0
    assert board.pick_after(0, 3, [first[0]]) in (1, 2)
    assert board.pick_after(0, 3, [second]) == 1


def test_full_lane_comes_last() -> None:
    """A lane without room, or with operations that wait on the host, is taken only if all are so."""
    board = Board()
    queues = [board.add(word(), 2) for _ in range(3)]
    chain = running(queues[0], LONG, LONG)
    running(queues[1], 9 * LONG)
    queues[2].load = 1
    assert board.pick_after(0, 3, [chain[-1]]) == 1
    running(queues[1], LONG)
    assert board.pick_after(0, 3, [chain[-1]]) == 0


def test_finished_dependencies_do_not_count() -> None:
    """They are neither waited for nor a reason to go anywhere."""
    board = Board()
    queues = [board.add(word(), 4) for _ in range(2)]
    first = running(queues[0], 9 * LONG)[0]
    second = running(queues[1], LONG)[0]
    reach(queues[0], 1)
    board.poll()
    assert first.finished
    assert board.pick_after(0, 2, [first, second]) == 1


@pytest.mark.parametrize("arguments", [(0, 0, []), (0, 3, []), (-1, 1, []), (0, 1, [None]), (0, 1, ()), (0, 1)])
def test_choosing_from_nothing(arguments: tuple[Any, ...]) -> None:
    """A range without lanes, or what are no operations, is refused."""
    board = Board()
    board.add(word(), 1)
    with pytest.raises((ValueError, TypeError)):
        board.pick_after(*arguments)


def test_lanes_whose_last_operation_is_coarse() -> None:
    """A coarse push leaves its lane unmarked until a later push, or a mark after all."""
    board = Board()
    queues = [board.add(word(), 4) for _ in range(2)]
    for queue in queues:
        operation = make()
        operation.coarse = True
        queue.push(operation)
    assert board.unmarked == 2
    assert all(queue.unmarked for queue in queues)
    queues[0].push(make())
    queues[1].marked()
    queues[1].marked()
    assert (board.unmarked, queues[0].unmarked, queues[1].unmarked) == (0, False, False)
    operation = make()
    operation.coarse = True
    queues[0].push(operation)
    board.abandon()
    assert board.unmarked == 0


@pytest.mark.parametrize("start", [0, 7, MODULUS - 2, 2**63 - 1])
@pytest.mark.parametrize("off_by", [3, 4, 1000, 2**63, MODULUS - 1])
def test_slot_that_no_mark_has_written(start: int, off_by: int) -> None:
    """A slot behind what was seen, or ahead of what was pushed, is said at every look, and finishes nothing."""
    board = Board()
    queue = board.add(word(), 4, start)
    done, *rest = fill(queue, 3)
    reach(queue, (start + 1) % MODULUS)
    assert board.poll() == 1
    reach(queue, (start + 1 + off_by) % MODULUS)
    for _ in range(2):
        with pytest.raises(DeviceLostError, match="slot"):
            board.poll()
    assert done.finished
    assert not any(operation.finished for operation in rest)
    assert (queue.seen, queue.in_flight) == ((start + 1) % MODULUS, 2)
    assert board.abandon() == rest
