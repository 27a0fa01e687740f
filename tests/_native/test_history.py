"""``history.c``: the same order as ``rules/ordering.py``, on operations that it does not keep alive."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aiooffload._native import History, Operation
from aiooffload.rules import ordering

MANY = 10_000


def make(deps: list[Operation] | None = None) -> Operation:
    operation = Operation(None)  # type: ignore[arg-type]
    operation.deps = deps
    return operation


def submit(history: History, writes: bool) -> Operation:
    operation = make(history.conflicts(writes) or None)
    history.record(operation, writes)
    return operation


def run(operation: Operation) -> None:
    """It has run to its end."""
    operation.deps = None
    operation.finish()


def give_up(operation: Operation) -> None:
    """It ends without having run, as one that is cancelled on the host."""
    operation.deps = ordering.unfinished(operation.deps or ()) or None
    operation.finish()


class SameOrder(RuleBasedStateMachine):
    """Two allocations used by the same operations, each with a history in C and one by the rule."""

    def __init__(self) -> None:
        super().__init__()
        self.native = [History(), History()]
        self.rule: list[ordering.History[Operation]] = [ordering.History(), ordering.History()]
        self.operations: list[Operation] = []

    def conflicts(self, which: int, writes: bool) -> set[Operation]:
        found = self.native[which].conflicts(writes)
        assert len(found) == len(set(found))
        assert set(found) == set(self.rule[which].conflicts(writes))
        return set(found)

    def compare(self) -> None:
        for which in (0, 1):
            self.conflicts(which, False)
            self.conflicts(which, True)

    @rule(
        uses=st.lists(st.tuples(st.integers(0, 1), st.booleans()), min_size=1, max_size=3),
        count=st.sampled_from([1, 1, 2, 20]),
    )
    def submit(self, uses: list[tuple[int, bool]], count: int) -> None:
        """Operations on one or both of them, perhaps on one of them several times."""
        for _ in range(count):
            deps = set().union(*(self.conflicts(which, writes) for which, writes in uses))
            operation = make(list(deps) or None)
            for which, writes in uses:
                self.native[which].record(operation, writes)
                self.rule[which].record(operation, writes)
            self.operations.append(operation)
            self.compare()

    def pending(self) -> list[Operation]:
        return [operation for operation in self.operations if not operation.finished]

    @precondition(pending)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        """One ends, in whichever order; what comes after it was submitted need not know."""
        run(data.draw(st.sampled_from(self.pending())))
        self.compare()

    @precondition(pending)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """One ends on the host, and stands for what it would have waited for."""
        give_up(data.draw(st.sampled_from(self.pending())))
        self.compare()

    @precondition(lambda self: self.operations)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        """Nobody holds one any more but those that come after it."""
        self.operations.remove(data.draw(st.sampled_from(self.operations)))
        self.compare()

    @rule(which=st.integers(0, 1))
    def free(self, which: int) -> None:
        """The memory goes, before the operations that used it, and other memory takes its place."""
        self.native[which], self.rule[which] = History(), ordering.History()
        self.compare()


TestSameOrder = SameOrder.TestCase
TestSameOrder.settings = settings(stateful_step_count=30)


def test_nobody_is_kept_alive() -> None:
    """An operation goes when nobody else holds it, finished or not, with its result."""
    history = History()
    watched: list[Any] = []
    for writes in (True, False, False, True):
        operation = submit(history, writes)
        before = sys.getrefcount(operation)
        history.record(operation, writes)
        assert sys.getrefcount(operation) == before
        watched.append(weakref.ref(operation))
        del operation
        assert watched[-1]() is None
        assert history.conflicts(True) == []


def test_the_history_goes_first() -> None:
    """Operations that outlive the memory they used end as ever."""
    history = History()
    operations = [submit(history, writes) for writes in (True, False, False)]
    replaced = submit(history, True)
    del history
    for operation in (*operations, replaced):
        operation.deps = None
        assert operation.finish()


def test_one_operation_in_many_histories() -> None:
    """It leaves all of them when it ends."""
    histories = [History() for _ in range(100)]
    operation = make()
    for history in histories:
        history.record(operation, True)
    assert all(history.conflicts(False) == [operation] for history in histories)
    operation.finish()
    assert all(history.conflicts(True) == [] for history in histories)


def test_finished_readers_are_forgotten() -> None:
    """What is read for ever and never written has nothing left of those that are done, nor memory for them."""
    history = History()
    for _ in range(10):
        operation = submit(history, False)
        run(operation)
    before = sys.getallocatedblocks()
    for _ in range(MANY):
        operation = submit(history, False)
        run(operation)
    assert sys.getallocatedblocks() - before < 100
    assert history.conflicts(True) == []


def test_long_chains_of_what_never_ran() -> None:
    """Ten thousand cancelled operations, each behind the last, are looked through without recursion."""
    history = History()
    running = submit(history, True)
    cancelled = [submit(history, True) for _ in range(MANY)]
    for operation in reversed(cancelled):
        operation.finish()  # with its deps: nobody has looked through them yet
    assert history.conflicts(False) == [running]
    while cancelled:  # the last first: each frees the one before it
        cancelled.pop().deps = None


def test_an_operation_that_is_collected_is_whole_or_gone() -> None:
    """What asks while an unfinished operation is collected gets it whole, which saves it, and afterwards nothing."""
    history = History()
    saved: list[Any] = []

    class Saviour:
        def __del__(self) -> None:
            saved.extend(history.conflicts(True))

    def abandon() -> None:
        operation = Operation(None, None, "lost")  # type: ignore[arg-type]
        history.record(operation, True)
        operation.keep = [operation, Saviour()]

    abandon()
    gc.collect()
    assert [operation.name for operation in saved] == ["lost"]
    assert saved[0].keep[0] is saved[0]
    assert history.conflicts(True) == saved
    saved.clear()
    gc.collect()  # it asks once more, in vain: a finaliser runs once
    assert saved == []
    assert history.conflicts(True) == []


def test_a_callback_of_the_last_reference_finds_nothing() -> None:
    """When an unfinished operation goes, what is told of it finds the history without it."""
    history = History()
    seen: list[Any] = []
    operation = make()
    history.record(operation, False)
    watched = weakref.ref(operation, lambda _: seen.append(history.conflicts(True)))
    del operation
    assert (seen, watched()) == ([[]], None)


@pytest.mark.parametrize("arguments", [(), (make(),), (None, True), (object(), False), (make(), True, 1)])
def test_record_takes_an_operation(arguments: tuple[Any, ...]) -> None:
    """Anything else raises TypeError and changes nothing."""
    history = History()
    with pytest.raises(TypeError, match="record"):
        history.record(*arguments)
    assert history.conflicts(True) == []


def test_deps_are_operations() -> None:
    """Something else that a cancelled one came after raises TypeError, as does what is no sequence."""
    history = History()
    for deps in ([1], 1):
        operation = make()
        history.record(operation, True)
        operation.deps = deps
        operation.finish()
        with pytest.raises(TypeError):
            history.conflicts(True)


def test_it_takes_no_arguments() -> None:
    """A history begins empty."""
    with pytest.raises(TypeError):
        History(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        History().conflicts()  # type: ignore[call-arg]


def test_what_writes_is_asked() -> None:
    """``writes`` is anything with a truth; what that raises is raised."""

    class Odd:
        def __bool__(self) -> bool:
            raise KeyError("odd")

    odd: Any = Odd()
    history = History()
    for call in (lambda: history.conflicts(odd), lambda: history.record(make(), odd)):
        with pytest.raises(KeyError, match="odd"):
            call()
