"""The awaitable handle: awaiting, cancelling waits and work, results, callbacks, failures nobody looked at."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.operation import Operation
from tests.kernels import add, fail, nothing, rig, turns, until

pytestmark = pytest.mark.all_loops

variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


async def test_await_values(device_label: str) -> None:
    """Launches, fills and copies await to None, put to its Buffer, get to its array, in whatever way awaited."""
    async with rig(device_label) as r:
        buffer = await r.off.put(np.arange(3, dtype=np.uint64))
        assert isinstance(buffer, ao.Buffer)
        out = np.zeros(3, np.uint64)
        assert await r.off.get(buffer, out=out) is out
        assert await r.launch(add, buffer, 1) is None
        assert await r.off.fill(buffer, 4) is None
        assert await r.off.copy(out, buffer) is None
        get = r.off.get(buffer)
        results = await asyncio.gather(get.wait(), asyncio.create_task(get.wait()), asyncio.wait_for(get.wait(), 5))
        assert all(value is results[0] for value in results)
        assert (await get).tolist() == [4] * 3
        async with asyncio.TaskGroup() as group:
            task = group.create_task(get.wait())
        assert task.result() is results[0]


async def test_awaiting_a_done_operation_does_not_yield(device_label: str) -> None:
    """Awaiting what is done returns without giving the loop a turn."""
    async with rig(device_label) as r:
        op = r.launch(nothing)
        await op
        ran: list[int] = []
        asyncio.get_running_loop().call_soon(ran.append, 1)
        await op
        await op.wait()
        assert ran == []


async def test_many_wait_and_one_gives_up(device_label: str) -> None:
    """Cancelling one wait ends that wait alone; the operation and the other waits go on."""
    async with rig(device_label) as r:
        await r.hold()
        op = r.holds[0]
        waits = [asyncio.create_task(op.wait()) for _ in range(5)]
        await turns(3)
        waits[1].cancel()
        waits[4].cancel()
        await turns(3)
        assert [wait.cancelled() for wait in waits] == [False, True, False, False, True]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(op.wait(), 0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await op
        assert not op.done()
        r.open_all()
        await asyncio.gather(*(waits[i] for i in (0, 2, 3)))
        assert not op.cancelled()


async def test_ten_thousand_waits_cancelled(device_label: str, loop_kind: str) -> None:
    """Ten thousand waits of one operation can be cancelled at once (fewer where debug mode makes tasks slow)."""
    async with rig(device_label) as r:
        await r.hold()
        waits = [asyncio.create_task(r.holds[0].wait()) for _ in range(1000 if loop_kind == "debug" else 10_000)]
        await turns(2)
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)
        r.open_all()
        await r.holds[0]


async def test_cancelled_as_it_completes(device_label: str) -> None:
    """A wait that is cancelled in the turn in which the operation completes ends once, either way."""
    async with rig(device_label) as r:
        op = r.launch(nothing)
        wait = asyncio.create_task(op.wait())
        await turns(1)
        while not op.done():
            pass
        wait.cancel()
        await asyncio.wait([wait])
        assert op.exception() is None


async def test_work_that_is_cancelled_wakes_its_waiters(device_label: str) -> None:
    """op.cancel() of what waits on the host wakes everybody with CancelledError, and nobody is told of it."""
    async with rig(device_label) as r:
        op = r.launch(nothing, after=[asyncio.get_running_loop().create_future()])
        waits = [asyncio.create_task(op.wait()) for _ in range(2)]
        await turns(2)
        assert op.cancel()
        await asyncio.wait(waits)
        assert all(wait.cancelled() for wait in waits)
        assert op.cancelled()
        assert isinstance(op.exception(), asyncio.CancelledError)
        assert not op.cancel()


async def test_coroutine_that_work_comes_after(device_label: str) -> None:
    """What an operation comes after is kept alive by it; a coroutine that was handed over is cancelled with it."""
    async with rig(device_label) as r:
        seen: list[str] = []

        async def forever() -> None:
            try:
                await asyncio.Event().wait()  # which nobody but its waiter has
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        mine = asyncio.create_task(forever())
        ops = [r.launch(nothing, after=[awaitable], coarse=True) for awaitable in (forever(), mine)]
        assert [op.coarse for op in ops] == [True, True]
        await turns(2)
        gc.collect()
        assert [op.done() for op in ops] == [False, False]
        for op in ops:
            op.cancel()
        await turns(4)
        assert (seen, mine.done()) == (["cancelled"], False)
        mine.cancel()
        await asyncio.wait([mine])


async def test_context_of_who_submits(device_label: str) -> None:
    """What a task has in its context goes with the task, although what it has submitted runs on."""
    async with rig(device_label) as r:
        large: contextvars.ContextVar[object] = contextvars.ContextVar("large")
        gone: list[weakref.ref[object]] = []

        class Large:
            pass

        async def submits() -> None:
            value = Large()
            gone.append(weakref.ref(value))
            large.set(value)
            await r.hold()

        await asyncio.create_task(submits())
        await turns(3)
        gc.collect()
        assert gone[0]() is None
        assert not r.holds[0].done()


async def test_result_and_exception(device_label: str) -> None:
    """result() and exception() raise until it is done, then give the value or the failure."""
    async with rig(device_label) as r:
        await r.hold()
        op = r.holds[0]
        for ask in (op.result, op.exception):
            with pytest.raises(RuntimeError, match="not done"):
                ask()
        assert not op.cancelled()
        assert op.duration_ns == 0
        r.open_all()
        await op
        assert op.result() is None
        assert op.exception() is None
        assert op.duration_ns > 0


async def test_failure_is_raised_to_everybody() -> None:
    """A failure is raised to each waiter, and its traceback does not grow with them."""
    async with rig() as r:
        op = r.launch(fail)

        def depth(error: BaseException) -> int:
            count, traceback = 0, error.__traceback__
            while traceback is not None:
                count, traceback = count + 1, traceback.tb_next
            return count

        depths = []
        for _ in range(5):
            with pytest.raises(ao.LaunchError) as caught:
                await op
            depths.append(depth(caught.value))
        assert depths[4] == depths[1]
        with pytest.raises(ao.LaunchError):
            op.result()
        assert isinstance(op.exception(), ao.LaunchError)


async def test_async_with_waits_at_the_end(device_label: str) -> None:
    """`async with op` awaits it at a normal exit and cancels it at an exceptional one."""
    async with rig(device_label) as r:
        gate = await r.hold()
        asyncio.get_running_loop().call_soon(gate.open)
        async with r.holds[0] as op:
            assert op is r.holds[0]
        assert op.done()
        held = r.launch(nothing, after=[asyncio.get_running_loop().create_future()])
        with pytest.raises(ZeroDivisionError):
            async with held:
                raise ZeroDivisionError
        assert held.cancelled()


async def test_callbacks(device_label: str) -> None:
    """Callbacks run once, on the loop, in order, in the context of their adding; removed ones do not."""
    async with rig(device_label) as r:
        await r.hold()
        op, seen = r.holds[0], []

        def note(name: str) -> Any:
            return lambda done: seen.append((name, variable.get(), done is op, threading.get_ident()))

        removed = note("removed")
        variable.set(1)
        op.add_done_callback(note("first"))
        op.add_done_callback(removed)
        op.add_done_callback(removed)
        variable.set(2)
        op.add_done_callback(note("second"))
        other = contextvars.copy_context()
        other.run(variable.set, 7)
        op.add_done_callback(note("given"), context=other)
        variable.set(3)
        assert op.remove_done_callback(removed) == 2
        assert op.remove_done_callback(removed) == 0
        r.open_all()
        await op
        await turns(2)
        op.add_done_callback(note("late"))
        assert len(seen) == 3
        await turns(2)
        here = threading.get_ident()
        names = ("first", 1), ("second", 2), ("given", 7), ("late", 3)
        assert seen == [(name, value, True, here) for name, value in names]


async def test_callback_that_raises_harms_nobody(device_label: str, loop_errors: list[dict[str, Any]]) -> None:
    """A callback's exception goes to the loop's handler; the other callbacks and the waiters go on."""
    async with rig(device_label) as r:
        op, seen = r.launch(nothing), []
        op.add_done_callback(lambda _: 1 // 0)
        op.add_done_callback(seen.append)
        await op
        await turns(3)
        assert seen == [op]
        assert [type(context["exception"]) for context in loop_errors] == [ZeroDivisionError]


async def test_failure_nobody_looked_at_is_told_once(loop_errors: list[dict[str, Any]]) -> None:
    """A failed operation that is dropped unlooked-at goes to the loop's exception handler, once."""
    async with rig() as r:
        await r.off.load(fail)
        r.launch(fail)
        await r.off.drain()
        await turns(3)
        gc.collect()
        assert len(loop_errors) == 1
        assert isinstance(loop_errors[0]["exception"], ao.LaunchError)
        assert "never retrieved" in loop_errors[0]["message"]
        looked = r.launch(fail)
        await until(looked.done)
        assert looked.exception() is not None
        del looked
        gc.collect()
        assert len(loop_errors) == 1


async def test_progress_without_anybody_awaiting(device_label: str) -> None:
    """What nobody awaits runs all the same."""
    async with rig(device_label) as r:
        word = r.word()
        for _ in range(10):
            r.launch(add, word, 1)
        await r.off.drain()
        assert await r.read(word) == 10


async def test_drain_comes_after_the_callbacks(device_label: str) -> None:
    """When drain() returns, what was to be called at an end has been called, also when all was done before."""
    async with rig(device_label) as r:
        word, seen = r.word(), []

        def go_on(operation: ao.Operation[None]) -> None:
            seen.append(operation)
            if len(seen) < 3:
                launch()

        def launch() -> ao.Operation[None]:
            op = r.launch(add, word, 1)
            op.add_done_callback(go_on)
            return op

        op = launch()
        while not op.done():
            pass
        assert not seen
        await r.off.drain()
        assert len(seen) == 3
        assert all(one.done() for one in seen)
        assert await r.read(word) == 3


@pytest.mark.parametrize("use", ["await", "done", "result", "cancel", "exception"])
async def test_use_from_another_thread(device_label: str, use: str) -> None:
    """Another thread gets a UsageError that says what to do, and the operation goes on."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.hold()
        op = r.launch(nothing)
        errors: list[BaseException] = []

        def body() -> None:
            try:
                asyncio.run(op.wait()) if use == "await" else getattr(op, use)()
            except BaseException as error:
                errors.append(error)

        await asyncio.to_thread(body)
        r.open_all()
        assert len(errors) == 1
        assert isinstance(errors[0], ao.UsageError)
        assert "run_coroutine_threadsafe" in str(errors[0])
        await op


async def test_await_through_run_coroutine_threadsafe(device_label: str) -> None:
    """Another thread may wait through asyncio.run_coroutine_threadsafe."""
    async with rig(device_label) as r:
        op, loop = r.launch(nothing), asyncio.get_running_loop()
        assert await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(op.wait(), loop).result(5)) is None


async def test_repr(device_label: str) -> None:
    """The repr names the kernel, the lane and the state."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.hold()
        queued = r.launch(nothing)
        assert repr(r.holds[0]) == "<aiooffload.Operation hold on lane 0, enqueued>"
        assert repr(queued) == "<aiooffload.Operation nothing on lane 0, waiting>"
        r.open_all()
        await queued
        assert repr(queued) == "<aiooffload.Operation nothing on lane 0, done>"
        cancelled = r.launch(nothing, after=[asyncio.get_running_loop().create_future()])
        cancelled.cancel()
        assert "failed: CancelledError()" in repr(cancelled)


async def test_value_that_is_an_exception_or_a_tuple() -> None:
    """Whatever the result is, awaiting gives just that."""
    for value in ((1, 2), ValueError("kept"), StopIteration(3), None, 0):
        op: Operation[Any] = Operation(asyncio.get_running_loop(), None, "x")
        op.finish(value)
        assert await op is value
        assert await op.wait() is value
