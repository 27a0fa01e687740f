"""``operation.c``: the core of the awaitable: its outcome, and everybody who waits for it."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import gc
import random
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from aiooffload import _native
from aiooffload._native import Board, LaunchPlan
from aiooffload.errors import UsageError
from aiooffload.operation import Operation

VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE", default="unset")
NONE_MEMBERS = ("lane", "deps", "requires", "prepared", "steps", "stop", "followers", "plan", "keep", "arrival")


class Thing:
    """Something that can be watched going away, and called."""

    def __call__(self, operation: object) -> None: ...


class Owner:
    """Stands for the engine: nothing arrives by itself."""

    def progress(self) -> int:
        return 0


class Mishap(Exception):
    """What a kernel might raise."""


class NoLoop:
    """For operations whose loop does not matter."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        raise AssertionError(context)


def make(loop: Any = None) -> Operation[Any]:
    return Operation(loop or asyncio.get_running_loop(), Owner(), "op")


def idle() -> Operation[Any]:
    """An operation for a test without a loop."""
    return make(NoLoop())


async def turns(count: int = 3) -> None:
    """Let the loop go round, so that everything that is ready has run."""
    for _ in range(count):
        await asyncio.sleep(0)


# -- construction --------------------------------------------------------------------------


def test_a_new_operation_is_empty() -> None:
    """It knows its loop, owner and name, and when it was made; everything else is empty."""
    loop, owner = NoLoop(), Owner()
    before = _native.now_ns()
    operation = _native.Operation(loop, owner, "name")  # type: ignore[arg-type]
    assert (operation.loop, operation.owner, operation.name) == (loop, owner, "name")
    assert before <= operation.submitted_ns <= _native.now_ns()
    assert [getattr(operation, name) for name in NONE_MEMBERS] == [None] * len(NONE_MEMBERS)
    assert (operation.failure, operation.queue, operation.holds, operation.streamed) == (None, None, 0, False)
    assert (operation.finished, operation.looked, operation.finished_ns, operation.sequence) == (False, False, 0, 0)


def test_owner_and_name_may_be_left_out() -> None:
    """Only the loop is needed, and it is needed."""
    operation = _native.Operation(NoLoop())  # type: ignore[arg-type]
    assert (operation.owner, operation.name) == (None, None)
    with pytest.raises(TypeError):
        _native.Operation()  # type: ignore[call-arg]


@pytest.mark.parametrize("name", [*NONE_MEMBERS, "failure"])
def test_it_holds_what_it_is_given_once(name: str) -> None:
    """A member holds one reference to its value, gives it back when replaced, and with the operation."""
    operation, value = idle(), make_value(name)
    before = sys.getrefcount(value)
    setattr(operation, name, value)
    setattr(operation, name, value)
    assert getattr(operation, name) is value
    assert sys.getrefcount(value) == before + 1
    del operation
    assert sys.getrefcount(value) == before


def make_value(name: str) -> Any:
    if name == "failure":
        return Mishap()
    if name == "plan":
        return LaunchPlan("k", 0, None, (1, 1, 1), (1, 1, 1), 0, None, False)
    if name == "requires":
        return (idle(),)
    return Thing()


@pytest.mark.parametrize("name", ["loop", "owner", "name", "finished", "looked", "finished_ns", "sequence", "queue"])
def test_what_it_is_cannot_be_changed(name: str) -> None:
    """Identity and state are read-only."""
    operation = idle()
    with pytest.raises(AttributeError):
        setattr(operation, name, getattr(operation, name))


@pytest.mark.parametrize("name", [*NONE_MEMBERS, "failure"])
def test_a_cycle_through_a_member_is_collected(name: str) -> None:
    """An operation that holds itself goes with the next collection."""
    operation, value = idle(), make_value(name)
    if name == "plan":
        value = LaunchPlan("k", 0, [operation].copy, (1, 1, 1), (1, 1, 1), 0, None, False)
    elif name == "requires":
        value = (operation,)
    else:
        value.operation = operation
    setattr(operation, name, value)
    watched = weakref.ref(operation)
    del operation, value
    gc.collect()
    assert watched() is None


def test_an_operation_is_pushed_to_a_queue() -> None:
    """Its queue and sequence say where its mark will be seen."""
    box = ctypes.c_uint64()
    queue = Board().add(_native.Word(ctypes.addressof(box), 0, box), 4)
    operation = idle()
    with pytest.raises(IndexError):  # the board is gone
        queue.push(operation)
    board = Board()
    queue = board.add(_native.Word(ctypes.addressof(box), 0, box), 4, 41)
    queue.push(operation)
    assert (operation.queue, operation.sequence) == (queue, 42)


# -- finishing -----------------------------------------------------------------------------


def test_it_finishes_once() -> None:
    """The first outcome stays: later ones are refused with False and change nothing."""
    operation = idle()
    assert operation.finish("first") is True
    finished_ns = operation.finished_ns
    assert operation.finish("second") is False
    assert operation.finish(failure=Mishap()) is False
    assert (operation.outcome(), operation.failure, operation.finished_ns) == ("first", None, finished_ns)
    assert operation.finished
    assert operation.submitted_ns <= finished_ns <= _native.now_ns()


@pytest.mark.parametrize("result", [None, 5, (1, 2), (), Mishap("returned"), StopIteration(3)])
def test_any_value_is_a_result(result: Any) -> None:
    """The result is what was given, an exception included."""
    operation = idle()
    operation.finish(result)
    assert operation.outcome() is result
    assert operation.look() is None


@pytest.mark.parametrize("failure", ["text", Mishap, 5])
def test_a_failure_is_an_exception(failure: Any) -> None:
    """Anything else, a class too, raises TypeError and the operation goes on."""
    operation = idle()
    with pytest.raises(TypeError, match="exception or None"):
        operation.finish(failure=failure)
    assert not operation.finished


def test_a_failure_put_there_before_counts() -> None:
    """A host kernel's exception, stored before the mark, is the outcome of a plain finish."""
    operation, failure = idle(), Mishap()
    operation.failure = failure
    operation.finish("unused")
    assert operation.look() is failure


def test_a_failure_given_replaces_one_put_there_before() -> None:
    """What finish() is given is the outcome."""
    operation, failure = idle(), Mishap()
    operation.failure = Mishap("earlier")
    operation.finish(failure=failure)
    assert operation.look() is failure


@pytest.mark.parametrize("method", ["outcome", "look"])
def test_there_is_no_outcome_before_it_is_done(method: str) -> None:
    """Asking early raises RuntimeError."""
    with pytest.raises(RuntimeError, match="not done"):
        getattr(idle(), method)()


@pytest.mark.parametrize("name", ["keep", "arrival"])
@pytest.mark.parametrize("failure", [None, Mishap()])
def test_what_it_keeps_is_dropped_when_it_finishes(name: str, failure: BaseException | None) -> None:
    """Arguments and leases live until the operation is done and not a moment longer, however it ends."""
    operation, thing = idle(), Thing()
    watched = weakref.ref(thing)
    setattr(operation, name, lambda op, thing=thing: None) if name == "arrival" else setattr(operation, name, thing)
    del thing
    gc.collect()
    assert watched() is not None
    operation.finish(failure=failure)
    assert watched() is None
    assert getattr(operation, name) is None
    operation.look()


def test_it_is_done_when_what_it_kept_goes() -> None:
    """A destructor that runs because the operation let go sees it done, and may use it."""
    operation = idle()
    seen: list[Any] = []

    class Lease:
        def __del__(self) -> None:
            seen.append((operation.finished, operation.outcome(), operation.finish("again")))

    operation.keep = Lease()
    operation.finish("result")
    assert seen == [(True, "result", False)]


def test_nothing_kept_goes_before_it_is_done() -> None:
    """An arrival that does not finish the operation leaves everything it keeps alone."""
    operation, thing = idle(), Thing()
    watched = weakref.ref(thing)
    operation.keep = thing
    operation.arrival = lambda op: None
    del thing
    operation.arrive()
    assert not operation.finished
    assert watched() is not None


# -- arrival -------------------------------------------------------------------------------


def test_an_arrival_without_more_to_do_finishes() -> None:
    """The mark of a plain operation finishes it with None, or with the failure put there before."""
    plain, failed, failure = idle(), idle(), Mishap()
    failed.failure = failure
    plain.arrive()
    failed.arrive()
    assert (plain.outcome(), failed.look()) == (None, failure)


def test_an_arrival_decides_about_its_operation() -> None:
    """What the arrival is given is the operation, and it may finish it with a result."""
    operation = idle()
    operation.arrival = lambda op: op.finish(("of", op))
    operation.arrive()
    assert operation.outcome() == ("of", operation)
    operation.finish()


def test_an_arrival_that_raises_fails_its_operation() -> None:
    """Nobody waits for ever: the exception is the operation's failure, with the traceback of where it was raised."""
    operation, failure = idle(), Mishap()

    def arrival(op: Any) -> None:
        raise failure

    operation.arrival = arrival
    operation.arrive()
    assert operation.failure is failure
    assert [frame.name for frame in traceback.extract_tb(failure.__traceback__)] == ["arrival"]
    assert operation.look() is failure


def test_a_finished_operation_has_no_arrival() -> None:
    """A mark that is seen after the operation was finished otherwise changes nothing."""
    operation = idle()
    operation.finish(1)
    operation.arrival = lambda op: pytest.fail("it is done")
    operation.arrive()
    assert operation.outcome() == 1


# -- failures, looked at or not ------------------------------------------------------------


def report_of(contexts: list[dict[str, Any]]) -> list[BaseException]:
    return [context["exception"] for context in contexts]


async def test_a_failure_that_nobody_looked_at_is_told(loop_errors: list[dict[str, Any]]) -> None:
    """When the operation goes, its failure goes to the loop's exception handler, with the operation."""
    operation, failure = make(), Mishap()
    operation.finish(failure=failure)
    number = id(operation)
    assert loop_errors == []
    del operation
    (context,) = loop_errors
    assert context["exception"] is failure
    assert "never retrieved" in context["message"]
    assert id(context["operation"]) == number


async def test_a_failure_is_told_once(loop_errors: list[dict[str, Any]]) -> None:
    """An operation that the handler keeps is not told of again when that goes."""
    operation = make()
    operation.finish(failure=Mishap())
    watched = weakref.ref(operation)
    del operation
    assert len(loop_errors) == 1
    loop_errors[0].clear()
    gc.collect()
    assert watched() is None
    assert len(loop_errors) == 1


async def test_a_failure_in_a_cycle_is_told_once(loop_errors: list[dict[str, Any]]) -> None:
    """The same for an operation that a collection finds."""
    operation, failure = make(), Mishap()
    operation.followers = [operation]
    operation.finish(failure=failure)
    del operation
    assert loop_errors == []
    gc.collect()
    assert report_of(loop_errors) == [failure]


async def test_a_failure_that_a_collected_exception_refers_to_is_told_once(loop_errors: list[dict[str, Any]]) -> None:
    """A traceback that leads back to the operation does not hide its failure."""
    operation = make()
    try:
        raise Mishap
    except Mishap as error:
        operation.finish(failure=error.with_traceback(None))
        error.operation = operation  # type: ignore[attr-defined]
    del operation
    gc.collect()
    assert len(loop_errors) == 1
    loop_errors[0].clear()


async def look_by_awaiting(operation: Operation[Any]) -> None:
    with pytest.raises(Mishap):
        await operation


async def look_by_outcome(operation: Operation[Any]) -> None:
    with pytest.raises(Mishap):
        operation.outcome()


async def look_by_look(operation: Operation[Any]) -> None:
    assert isinstance(operation.look(), Mishap)


@pytest.mark.parametrize("look", [look_by_awaiting, look_by_outcome, look_by_look])
async def test_a_failure_that_was_looked_at_is_not_told(
    look: Callable[[Operation[Any]], Any], loop_errors: list[dict[str, Any]]
) -> None:
    """Awaiting it, or asking for the outcome or the failure, counts as looking."""
    operation = make()
    operation.finish(failure=Mishap())
    assert not operation.looked
    await look(operation)
    assert operation.looked
    del operation
    gc.collect()
    assert loop_errors == []


@pytest.mark.parametrize("finish", [False, True])
async def test_only_failures_are_told(finish: bool, loop_errors: list[dict[str, Any]]) -> None:
    """A cancelled operation, one with a result and one that never finished go quietly."""
    cancelled, done, unfinished = make(), make(), make()
    cancelled.finish(failure=asyncio.CancelledError())
    done.finish(5)
    unfinished.failure = Mishap()
    del cancelled, done, unfinished
    gc.collect()
    assert loop_errors == []


async def test_a_pending_exception_survives_the_telling(loop_errors: list[dict[str, Any]]) -> None:
    """An operation that goes while an exception is on its way does not disturb that one."""

    def fail() -> None:
        operation = make()
        operation.finish(failure=Mishap("told"))
        raise KeyError("raised")

    with pytest.raises(KeyError, match="raised"):
        fail()
    gc.collect()
    assert [str(error) for error in report_of(loop_errors)] == ["told"]


async def test_the_traceback_does_not_grow() -> None:
    """A failure that is raised a hundred times, to many tasks, has the traceback of one raise."""
    operation, failure = make(), Mishap()
    operation.finish(failure=failure)
    depths = []
    for _ in range(100):
        try:
            await operation
        except Mishap as error:
            depths.append(len(traceback.extract_tb(error.__traceback__)))
    results = await asyncio.gather(*(operation.wait() for _ in range(100)), return_exceptions=True)
    assert results == [failure] * 100
    assert len(traceback.extract_tb(failure.__traceback__)) <= depths[0] + 3
    assert set(depths) == {1}


def test_raising_costs_no_references() -> None:
    """A failure that is raised and caught holds as many references as before."""
    operation, failure = idle(), Mishap()
    operation.finish(failure=failure)
    before = None
    for _ in range(10):
        with pytest.raises(Mishap):
            operation.outcome()
        failure.__traceback__ = None
        count = sys.getrefcount(failure)
        assert count == (before or count)
        before = count


# -- awaiting ------------------------------------------------------------------------------


@pytest.mark.all_loops
async def test_many_tasks_await_one_operation() -> None:
    """Everybody who waits gets the result, in the order in which they began to wait."""
    operation, order = make(), []

    async def wait(number: int) -> Any:
        result = await operation
        order.append(number)
        return result

    tasks = [asyncio.create_task(wait(number)) for number in range(100)]
    await turns()
    assert order == []
    operation.finish("result")
    assert await asyncio.gather(*tasks) == ["result"] * 100
    assert order == list(range(100))


@pytest.mark.all_loops
@pytest.mark.parametrize("count", [1, 2, 7])
async def test_a_failure_reaches_everybody(count: int) -> None:
    """Every task that waits gets the same exception."""
    operation, failure = make(), Mishap()
    tasks = [asyncio.create_task(operation.wait()) for _ in range(count)]
    await turns()
    operation.finish(failure=failure)
    assert await asyncio.gather(*tasks, return_exceptions=True) == [failure] * count


@pytest.mark.all_loops
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("victim", [0, -1])
async def test_cancelling_one_wait_ends_that_one_alone(count: int, victim: int) -> None:
    """The operation and the other waits go on."""
    operation = make()
    tasks = [asyncio.create_task(operation.wait()) for _ in range(count)]
    await turns()
    cancelled = tasks.pop(victim)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert not operation.finished
    assert not any(task.done() for task in tasks)
    operation.finish("result")
    assert await asyncio.gather(*tasks) == ["result"] * (count - 1)


@pytest.mark.all_loops
async def test_a_wait_cancelled_in_the_turn_it_is_woken_is_cancelled() -> None:
    """A cancel and a finish before the task has run again: the task is cancelled, whichever came first."""
    for first in ("cancel", "finish"):
        operation = make()
        task, other = asyncio.create_task(operation.wait()), asyncio.create_task(operation.wait())
        await turns()
        steps = {"cancel": task.cancel, "finish": lambda operation=operation: operation.finish(1)}
        steps.pop(first)()
        for step in steps.values():
            step()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await other == 1


class CountingFuture(asyncio.Future):  # type: ignore[type-arg]
    """A future that counts how often a container asks which one it is."""

    asked = 0

    def __hash__(self) -> int:
        CountingFuture.asked += 1
        return id(self) >> 4

    def __eq__(self, other: object) -> bool:
        CountingFuture.asked += 1
        return self is other


class CountingLoop(asyncio.SelectorEventLoop):
    def create_future(self) -> Any:
        return CountingFuture(loop=self)


def on_counting_loop(main: Callable[[], Any]) -> int:
    """Run ``main`` and return how many looks at futures it took."""
    CountingFuture.asked = 0
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(main())
    return CountingFuture.asked


@pytest.mark.parametrize("order", ["first to last", "last to first", "random"])
@pytest.mark.parametrize("way", ["throw", "close", "drop"])
def test_ten_thousand_cancelled_waits_are_linear(order: str, way: str) -> None:
    """Ending waits in any order and way takes a few looks each, not one at every other waiter."""
    count = 10_000

    async def main() -> None:
        operation = make()
        waits = {number: operation.__await__() for number in range(count)}
        for wait in waits.values():
            wait.send(None)
        numbers = list(range(count))
        if order == "random":
            random.Random(5).shuffle(numbers)
        elif order == "last to first":
            numbers.reverse()
        for number in numbers[: count - 1]:
            wait = waits.pop(number)
            if way == "throw":
                with pytest.raises(asyncio.CancelledError):
                    wait.throw(asyncio.CancelledError())
            elif way == "close":
                wait.close()
        operation.finish("result")
        (last,) = waits.values()
        with pytest.raises(StopIteration) as stop:
            last.send(None)
        assert stop.value.value == "result"

    assert on_counting_loop(main) <= 6 * count


def test_cancelling_tasks_is_linear_too() -> None:
    """The same with tasks that are cancelled, all in one turn of the loop."""
    count = 2_000

    async def main() -> None:
        operation = make()
        tasks = [asyncio.create_task(operation.wait()) for _ in range(count)]
        await turns()
        for task in random.Random(6).sample(tasks, count):
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        assert not operation.finished

    assert on_counting_loop(main) <= 6 * count


@pytest.mark.parametrize("result", [None, 7, (1, 2), Mishap("value"), StopIteration(3)])
def test_awaiting_what_is_done_does_not_yield(result: Any) -> None:
    """The coroutine ends in its first step, even where no loop runs, with exactly the result."""
    operation = idle()
    operation.finish(result)
    coroutine = operation.wait()
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    assert stop.value.value is result
    wait = operation.__await__()
    with pytest.raises(StopIteration) as stop:
        next(wait)
    assert stop.value.value is result


def test_awaiting_a_failure_that_is_there_does_not_yield() -> None:
    """The failure is raised in the first step."""
    operation = idle()
    operation.finish(failure=Mishap())
    with pytest.raises(Mishap):
        operation.wait().send(None)
    with pytest.raises(Mishap):
        next(operation.__await__())


@pytest.mark.all_loops
async def test_it_can_be_awaited_again() -> None:
    """The outcome is there for every later await."""
    operation = make()
    operation.finish(3)
    assert [await operation for _ in range(3)] == [3] * 3


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
@pytest.mark.all_loops
async def test_an_eager_task_on_what_is_done_is_done(loop_kind: str) -> None:
    """A task that starts eagerly and awaits a finished operation never goes through the loop."""
    operation = make()
    operation.finish(3)
    task = asyncio.create_task(operation.wait())
    assert task.done() == (loop_kind == "eager")
    assert await task == 3


async def test_another_loop_is_refused() -> None:
    """Awaiting from another thread's loop raises a UsageError that says what to do instead."""
    operation = make()
    seen: list[BaseException] = []

    def other() -> None:
        try:
            asyncio.run(operation.wait())
        except BaseException as error:
            seen.append(error)

    await in_thread(other)
    assert [type(error) for error in seen] == [UsageError]
    assert "run_coroutine_threadsafe" in str(seen[0])
    operation.finish()
    assert await operation is None


async def in_thread(call: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()
    over = loop.create_future()

    def body() -> None:
        try:
            call()
        finally:
            loop.call_soon_threadsafe(over.set_result, None)

    thread = threading.Thread(target=body)
    thread.start()
    await over


async def test_what_the_refusal_recommends_works() -> None:
    """run_coroutine_threadsafe(operation.wait(), loop) gives another thread the result."""
    operation, loop = make(), asyncio.get_running_loop()
    results: list[Any] = []
    begun = loop.create_future()

    def other() -> None:
        future = asyncio.run_coroutine_threadsafe(operation.wait(), loop)
        loop.call_soon_threadsafe(begun.set_result, None)
        results.append(future.result(timeout=30))

    thread = asyncio.create_task(in_thread(other))
    await begun
    operation.finish("result")
    await thread
    assert results == ["result"]


def test_no_loop_is_refused() -> None:
    """Awaiting what is not done outside any loop raises the same UsageError."""
    coroutine = idle().wait()
    with pytest.raises(UsageError, match="run_coroutine_threadsafe"):
        coroutine.send(None)


# -- the iterator of one await -------------------------------------------------------------


async def test_a_wait_is_an_iterator_of_one_future() -> None:
    """It yields a future of the loop, marked as awaited, and ends with the result once that is done."""
    operation = make()
    wait = operation.__await__()
    assert iter(wait) is wait
    future = next(wait)
    assert asyncio.isfuture(future)
    assert future.get_loop() is asyncio.get_running_loop()
    assert future._asyncio_future_blocking is True
    future._asyncio_future_blocking = False
    operation.finish(5)
    assert future.done()
    with pytest.raises(StopIteration) as stop:
        wait.send(None)
    assert stop.value.value == 5


async def test_a_wait_resumed_early_raises() -> None:
    """Whoever resumes a wait before its operation is done gets RuntimeError, and the wait goes on."""
    operation = make()
    wait = operation.__await__()
    future = wait.send(None)
    with pytest.raises(RuntimeError, match="resumed before"):
        wait.send(None)
    operation.finish()
    assert future.done()


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [((Mishap("a"),), Mishap), ((Mishap,), Mishap), ((Mishap, "a"), Mishap), ((Mishap, Mishap("a"), None), Mishap)],
)
@pytest.mark.parametrize("others", [0, 1, 2])
async def test_throw_ends_the_wait(arguments: tuple[Any, ...], kind: type[BaseException], others: int) -> None:
    """What is thrown is raised, and the wait's future is not woken any more; the others are."""
    operation = make()
    rest = [operation.__await__() for _ in range(others)]
    futures = [wait.send(None) for wait in rest]
    wait = operation.__await__()
    future = wait.send(None)
    with pytest.raises(kind) as caught:
        wait.throw(*arguments)
    if isinstance(arguments[0], Mishap):
        assert caught.value is arguments[0]
    operation.finish()
    assert not future.done()
    assert all(other.done() for other in futures)


async def test_throw_works_before_the_first_step_and_after_the_last() -> None:
    """A wait that has no future yet, or whose operation is done, raises what is thrown."""
    operation = make()
    with pytest.raises(Mishap):
        operation.__await__().throw(Mishap())
    wait = operation.__await__()
    wait.send(None)
    operation.finish()
    with pytest.raises(Mishap):
        wait.throw(Mishap())


@pytest.mark.parametrize("others", [0, 1, 2])
@pytest.mark.parametrize("way", ["close", "drop"])
async def test_a_wait_that_is_closed_or_dropped_is_over(others: int, way: str) -> None:
    """The operation lets go of its future at once; the other waits are woken."""
    operation = make()
    rest = [operation.__await__() for _ in range(others)]
    futures = [wait.send(None) for wait in rest]
    wait = operation.__await__()
    future = weakref.ref(wait.send(None))
    if way == "close":
        wait.close()
        wait.close()
    del wait
    assert future() is None
    operation.finish()
    assert all(other.done() for other in futures)


async def test_a_wait_holds_its_operation() -> None:
    """An operation that only its waiter knows stays until the wait is over."""
    operation = make()
    watched = weakref.ref(operation)
    wait = operation.__await__()
    wait.send(None)
    del operation
    gc.collect()
    operation_again = watched()
    assert operation_again is not None
    operation_again.finish()
    assert list(wait) == []
    del wait, operation_again
    assert watched() is None


async def test_waiting_leaves_no_references() -> None:
    """After waits that ended in every way, the operation is held by nobody but the test."""
    operation = make()
    before = sys.getrefcount(operation)
    tasks = [asyncio.create_task(operation.wait()) for _ in range(4)]
    await turns()
    tasks[0].cancel()
    tasks[1].cancel()
    operation.__await__().close()
    await turns()
    operation.finish()
    await asyncio.wait(tasks)
    del tasks
    await turns()
    assert sys.getrefcount(operation) == before


def test_a_wait_cannot_be_made_directly() -> None:
    """Only an operation makes waits."""
    with pytest.raises(TypeError):
        type(idle().__await__())()


async def test_an_abandoned_wait_is_collected() -> None:
    """A task's wait on an operation that nobody finishes goes with both, cycles included."""
    operation, thing = make(), Thing()
    wait = operation.__await__()
    wait.send(None)
    operation.followers = [wait, thing]
    watched = weakref.ref(thing)
    del operation, wait, thing
    gc.collect()
    assert watched() is None


# -- done callbacks ------------------------------------------------------------------------


@pytest.mark.all_loops
async def test_callbacks_run_soon_in_order() -> None:
    """Callbacks run on the loop after the operation is done, in the order in which they were added."""
    operation, seen = make(), []
    for number in range(3):
        operation.add_done_callback(lambda op, number=number: seen.append((number, op)))
    operation.finish()
    assert seen == []
    operation.add_done_callback(lambda op: seen.append((3, op)))
    assert seen == []
    await turns(1)
    assert seen == [(number, operation) for number in range(4)]


@pytest.mark.all_loops
@pytest.mark.parametrize("late", [False, True])
async def test_callbacks_run_in_their_context(late: bool) -> None:
    """The context is the one given, or the one in force when the callback was added."""
    operation, seen = make(), []

    def note(op: Any) -> None:
        seen.append(VARIABLE.get())

    given = contextvars.copy_context()
    given.run(VARIABLE.set, "given")
    if late:
        operation.finish()
    token = VARIABLE.set("at adding")
    operation.add_done_callback(note)
    VARIABLE.reset(token)
    operation.add_done_callback(note, context=given)
    operation.finish()
    await turns()
    assert seen == ["at adding", "given"]


async def test_the_context_is_named() -> None:
    """It is given by keyword, as a Future's."""
    with pytest.raises(TypeError):
        make().add_done_callback(print, contextvars.copy_context())  # type: ignore[misc]


async def test_removed_callbacks_do_not_run() -> None:
    """remove_done_callback() takes off every entry of the callable and says how many there were."""
    operation, seen = make(), []

    class Listener:
        def heard(self, op: Any) -> None:
            seen.append("method")

    def other(op: Any) -> None:
        seen.append("other")

    listener = Listener()
    assert operation.remove_done_callback(other) == 0
    for fn in (listener.heard, other, listener.heard):
        operation.add_done_callback(fn)
    assert operation.remove_done_callback(listener.heard) == 2  # bound methods are equal, not identical
    assert operation.remove_done_callback(listener.heard) == 0
    operation.finish()
    assert operation.remove_done_callback(other) == 0
    await turns()
    assert seen == ["other"]


async def test_an_error_in_comparing_callbacks_is_raised() -> None:
    """remove_done_callback() passes on what a comparison raises and removes nothing."""
    operation, seen = make(), []

    class Odd:
        def __eq__(self, other: object) -> bool:
            raise Mishap

        __hash__ = None  # type: ignore[assignment]

    operation.add_done_callback(seen.append)
    with pytest.raises(Mishap):
        operation.remove_done_callback(Odd())  # type: ignore[arg-type]
    operation.finish()
    await turns()
    assert seen == [operation]


@pytest.mark.all_loops
async def test_a_callback_that_raises_hurts_nobody(loop_errors: list[dict[str, Any]]) -> None:
    """Its exception goes to the loop's handler; the other callbacks and the waiters are told."""
    operation, seen, failure = make(), [], Mishap()

    def fail(op: Any) -> None:
        raise failure

    operation.add_done_callback(fail)
    operation.add_done_callback(seen.append)
    task = asyncio.create_task(operation.wait())
    await turns()
    operation.finish("result")
    assert await task == "result"
    await turns()
    assert seen == [operation]
    assert report_of(loop_errors) == [failure]
    loop_errors.clear()


async def test_callbacks_are_dropped_with_the_operation() -> None:
    """A callback lives until it has run, or until the operation goes unfinished."""
    finished, unfinished = make(), make()
    things = [Thing(), Thing()]
    watched = [weakref.ref(thing) for thing in things]
    for operation, thing in zip((finished, unfinished), things, strict=True):
        operation.add_done_callback(lambda op, thing=thing: None)
    del things, thing, operation
    gc.collect()
    assert all(ref() is not None for ref in watched)
    finished.finish()
    del unfinished
    await turns()
    assert [ref() for ref in watched] == [None, None]


# -- asyncio's own tools -------------------------------------------------------------------


async def finishing(operation: Operation[Any], result: Any = None) -> None:
    """Finish it from another task, a few turns from now."""
    await turns()
    operation.finish(result)


@pytest.mark.all_loops
async def test_wait_for_returns_the_result() -> None:
    """asyncio.wait_for() takes an operation as it is."""
    operation = make()
    task = asyncio.create_task(finishing(operation, 5))
    assert await asyncio.wait_for(operation, 60) == 5
    await task


@pytest.mark.all_loops
@pytest.mark.parametrize("tool", ["wait_for", "timeout"])
async def test_a_timeout_ends_the_wait_alone(tool: str) -> None:
    """After asyncio's own timeout the operation goes on and can be awaited again."""
    operation = make()

    async def wait() -> None:
        if tool == "wait_for":
            await asyncio.wait_for(operation, 0)
        async with asyncio.timeout(0):
            await operation

    with pytest.raises(TimeoutError):
        await wait()
    assert not operation.finished
    operation.finish(5)
    assert await operation == 5


@pytest.mark.all_loops
async def test_a_task_group_takes_waits() -> None:
    """TaskGroup.create_task(operation.wait()) gives the results, and a failure ends the group."""
    operations = [make(), make()]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(operation.wait()) for operation in operations]
        for number, operation in enumerate(operations):
            group.create_task(finishing(operation, number))
    assert [task.result() for task in tasks] == [0, 1]

    failing, going_on = make(), make()

    async def group_of_both() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(failing.wait())
            group.create_task(going_on.wait())
            await turns()
            failing.finish(failure=Mishap())

    with pytest.raises(ExceptionGroup) as caught:
        await group_of_both()
    assert caught.group_contains(Mishap)
    assert not going_on.finished


@pytest.mark.all_loops
async def test_gather_takes_operations() -> None:
    """asyncio.gather() of operations, one of them twice, gives their results in order."""
    first, second = make(), make()
    tasks = [asyncio.create_task(finishing(second, 2)), asyncio.create_task(finishing(first, 1))]
    assert await asyncio.gather(first, second, first) == [1, 2, 1]
    await asyncio.wait(tasks)


@pytest.mark.all_loops
async def test_shield_takes_an_operation() -> None:
    """Cancelling a shielded wait leaves the inner one waiting."""
    operation = make()

    async def shielded() -> Any:
        return await asyncio.shield(operation)

    task = asyncio.create_task(shielded())
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    operation.finish(5)
    await turns()
    assert await asyncio.shield(operation) == 5


@pytest.mark.all_loops
async def test_asyncio_wait_takes_tasks_of_operations() -> None:
    """asyncio.wait(FIRST_COMPLETED) tells the finished from the others."""
    operations = [make(), make()]
    tasks = [asyncio.create_task(operation.wait()) for operation in operations]
    await turns()
    operations[1].finish()
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    assert (done, pending) == ({tasks[1]}, {tasks[0]})
    operations[0].finish()
    await tasks[0]


# -- known defects -------------------------------------------------------------------------

CLEARED = {
    "failure before": "op.failure = None; op.finish(3); assert op.outcome() == 3",
    "failure after": """
op.finish(failure=ValueError())
op.look()
try:
    del op.failure
    op.outcome()
except Exception:
    pass
""",
    "arrival": "op.arrival = None; op.arrive(); assert op.look() is None",
    "wrong plan": """
try:
    op.plan = "x" * 999
except TypeError:
    pass
else:
    raise SystemExit("a plan that is none")
""",
}


@pytest.mark.parametrize("case", CLEARED)
def test_members_can_be_cleared(case: str) -> None:
    """None, which they read as when unset, can be given to failure and arrival; a plan is a plan."""
    program = f"""
import asyncio, ctypes
from aiooffload._native import Board, Operation, Word
box = ctypes.c_uint64()
word = Word(ctypes.addressof(box), ctypes.addressof(box), box)
b = Board()
q = b.add(word, 4)
op = Operation(None)
{CLEARED[case]}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


async def test_a_finished_wait_that_is_sent_to_stops() -> None:
    """send() on a wait whose operation ended with None raises StopIteration, as next() does."""
    operation = make()
    operation.finish()
    with pytest.raises(StopIteration):
        operation.__await__().send(None)


def test_what_a_trace_says_of_it() -> None:
    """Kind and size are nothing until somebody sets them, and are kept."""
    op = idle()
    assert (op.kind, op.nbytes) == (None, 0)
    op.kind, op.nbytes = "copy", 2**40
    assert (op.kind, op.nbytes) == ("copy", 2**40)
