"""``rules/ordering.py``: program order on one allocation, against a list of everything ever submitted."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from aiooffload.rules.ordering import History, unfinished

MANY = 10_000


class Op:
    """An operation, and how often any was asked whether it is done."""

    asked = 0

    def __init__(self, writes: bool = True) -> None:
        self.writes = writes
        self.done = False
        self.deps: list[Op] | None = None
        # What comes before it, directly or through others: by the rule, at least, and at most.
        self.enforced: set[Op] = set()
        self.required: set[Op] = set()
        self.allowed: set[Op] = set()

    @property
    def finished(self) -> bool:
        Op.asked += 1
        assert Op.asked < 100 * MANY
        return self.done

    def run(self) -> None:
        """It has run to its end."""
        self.done, self.deps = True, None

    def give_up(self) -> None:
        """It ends without having run, as one that is cancelled on the host."""
        self.deps = unfinished(self.deps or ()) or None
        self.done = True


def submit(history: History[Op], writes: bool) -> Op:
    operation = Op(writes)
    operation.deps = history.conflicts(writes)
    history.record(operation, writes)
    return operation


def closure(direct: list[Op], name: str) -> set[Op]:
    """``direct`` and what came before each of them, as far as it is not done."""
    return {op for op in set(direct).union(*(getattr(before, name) for before in direct)) if not op.done}


class OrderMachine(RuleBasedStateMachine):
    """Reads and writes of one allocation that end in any order that the device allows, or without running."""

    def __init__(self) -> None:
        super().__init__()
        Op.asked = 0
        self.history: History[Op] = History()
        # Without those that ran: whatever came before one of them was done before it.
        self.everything: list[Op] = []

    @rule(writes=st.booleans(), count=st.sampled_from([1, 1, 2, 20]))
    def submit(self, writes: bool, count: int) -> None:
        for _ in range(count):
            direct = self.history.conflicts(writes)
            assert not any(before.done for before in direct)
            assert self.history.conflicts(writes) == direct  # asking changes nothing
            operation = submit(self.history, writes)
            conflicting = [before for before in self.everything if before.writes or writes]
            operation.enforced = closure(direct, "enforced")
            operation.required = closure([before for before in conflicting if not before.done], "required")
            operation.allowed = closure(conflicting, "allowed")
            assert operation.required <= operation.enforced <= operation.allowed
            if not any(before.done for before in conflicting):
                assert operation.required == operation.enforced
            self.everything.append(operation)

    def pending(self) -> list[Op]:
        return [op for op in self.everything if not op.done]

    @precondition(pending)
    @rule(data=st.data())
    def run(self, data: st.DataObject) -> None:
        """One that everything enforced lets run is done."""
        ready = [op for op in self.pending() if all(before.done for before in op.enforced)]
        chosen = data.draw(st.sampled_from(ready))
        chosen.run()
        self.everything.remove(chosen)

    @precondition(pending)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        """One ends on the host, whatever it would have had to wait for."""
        data.draw(st.sampled_from(self.pending())).give_up()


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(stateful_step_count=25)


@pytest.fixture(autouse=True)
def _count_from_zero() -> None:
    Op.asked = 0


def test_a_new_allocation_orders_nobody() -> None:
    """The first operation comes after nothing."""
    history: History[Op] = History()
    assert (history.conflicts(False), history.conflicts(True)) == ([], [])


def test_readers_run_together() -> None:
    """Reads come after the last write alone, a write after the reads since and the write before them."""
    history: History[Op] = History()
    first = submit(history, True)
    readers = [submit(history, False) for _ in range(3)]
    assert history.conflicts(False) == [first]
    assert set(history.conflicts(True)) == {first, *readers}
    last = submit(history, True)
    assert history.conflicts(True) == history.conflicts(False) == [last]


def test_finished_readers_are_forgotten() -> None:
    """What is read for ever and never written does not remember every reader, nor ask them all again."""
    history: History[Op] = History()
    for _ in range(MANY):
        submit(history, False).run()
        assert len(history._readers) <= 16
    assert Op.asked <= 2 * MANY


def test_unfinished_readers_are_remembered_at_a_linear_cost() -> None:
    """While nothing finishes every reader counts, and looking for finished ones stays rare."""
    history: History[Op] = History()
    readers = [submit(history, False) for _ in range(MANY)]
    assert Op.asked <= 2 * MANY
    assert set(history.conflicts(True)) == set(readers)


@pytest.mark.parametrize("writes", [False, True])
def test_an_operation_that_never_ran_hides_nobody(writes: bool) -> None:
    """A write that is cancelled on the host, while what it came after runs, leaves that to be waited for."""
    history: History[Op] = History()
    running = submit(history, writes)
    cancelled = submit(history, True)
    cancelled.give_up()
    assert history.conflicts(True) == [running]
    running.run()
    assert history.conflicts(True) == []


def build_layers(history: History[Op], count: int) -> tuple[Op, list[Op]]:
    """A write that runs, and behind it ``count`` times a write with two reads of what it wrote."""
    running = submit(history, True)
    return running, [submit(history, writes) for _ in range(count) for writes in (True, False, False)]


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_cancelled_pipeline_is_looked_through_at_a_linear_cost(newest_first: bool) -> None:
    """However many layers were cancelled, in whichever order, each is asked a few times, not along every path."""
    history: History[Op] = History()
    running, layers = build_layers(history, 100)
    for operation in reversed(layers) if newest_first else layers:
        operation.give_up()
    Op.asked = 0
    assert set(history.conflicts(True)) == {running}
    assert Op.asked <= 20 * len(layers)
