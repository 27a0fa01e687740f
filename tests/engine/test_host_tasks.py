"""Host tasks: coroutines between launches and copies."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import inspect
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.kernels import add, rig, turns, until
from tests.reverse_kernels import ask, calling_rig

word = contextvars.ContextVar("word", default="none")


@pytest.mark.all_loops
async def test_graph_of_host_and_device(device_label: str) -> None:
    """A host task starts when the launch before it is done, and the launch after it waits until it has returned."""
    async with rig(device_label) as r:
        gate, order = await r.hold(), []
        total = r.word(1)
        first = r.off.launch(add, grid=1, block=1, args=(total, 2), after=[r.holds[0]])

        async def look() -> int:
            order.append("started")
            seen = int((await r.off.get(total))[0])
            await turns()
            order.append("ended")
            return seen

        task = r.off.host_task(look, after=[first])
        after = r.off.launch(add, grid=1, block=1, args=(r.word(), 1), after=[task])
        after.add_done_callback(lambda _: order.append("after"))
        await turns()
        assert order == []
        gate.open()
        assert await task == 3
        await after
        await turns()
        assert order == ["started", "ended", "after"]


async def test_without_dependencies_it_starts_at_once(device_label: str) -> None:
    """With nothing to wait for it is a task like any other, with a result that can be awaited again."""
    async with rig(device_label) as r:

        async def answer(x: int, y: int = 0) -> int:
            return x + y

        task = r.off.host_task(partial(answer, 40, y=2))
        assert await task == 42
        assert await task == 42
        assert task.result() == 42
        done = r.off.zeros(1, np.uint64)
        await r.off.drain()
        assert await r.off.host_task(partial(answer, 1), after=[task]) == 1
        done.close()


async def test_tasks_in_a_row(device_label: str) -> None:
    """A chain of a thousand runs in order, without a lane."""
    async with rig(device_label, lanes=1) as r:
        seen: list[int] = []

        async def note(i: int) -> None:
            seen.append(i)

        last: list[ao.Operation[Any]] = []
        for i in range(1000):
            last = [r.off.host_task(partial(note, i), after=last)]
        await last[0]
        assert seen == list(range(1000))
        assert r.off.stats()["in_flight"] == 0


async def test_failure_is_the_operations(device_label: str) -> None:
    """What the coroutine raises is raised by the await, and what comes after it does not start."""
    async with rig(device_label) as r:

        async def fail() -> None:
            raise KeyError("x")

        never: list[int] = []

        async def note() -> None:
            never.append(1)

        total = r.word()
        task = r.off.host_task(fail)
        launch = r.off.launch(add, grid=1, block=1, args=(total, 1), after=[task])
        follower = r.off.host_task(note, after=[launch])
        with pytest.raises(KeyError):
            await task
        for operation in (launch, follower):
            with pytest.raises(ao.DependencyError, match="fail"):
                await operation
        assert never == []
        assert await r.read(total) == 0


async def test_failure_that_is_passed_on_is_told_once(device_label: str, loop_errors: list[dict[str, Any]]) -> None:
    """Of a graph in which something fails, each end that nobody looks at is told to the loop, and nothing else."""
    async with rig(device_label) as r:

        async def fail() -> None:
            raise KeyError("x")

        for awaited in (True, False):
            last: ao.Operation[Any] = r.off.host_task(fail)
            for _ in range(5):
                last = r.off.launch(add, grid=1, block=1, args=(r.word(), 1), after=[last])
                last = r.off.host_task(fail, after=[last])
            if awaited:
                with pytest.raises(ao.DependencyError, match="KeyError"):
                    await last
            await r.off.drain()
            del last
            gc.collect()
            assert [type(error["exception"]) for error in loop_errors] == [ao.DependencyError] * (not awaited)


async def test_cancelled_before_and_while_it_runs(device_label: str) -> None:
    """cancel() ends one that waits, and cancels the coroutine of one that runs."""
    async with rig(device_label) as r:
        started, cancelled = asyncio.Event(), []

        async def hang() -> None:
            started.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(1)
                raise

        gate = await r.hold()
        waiting = r.off.host_task(hang, after=[r.holds[0]])
        assert waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.open()
        assert cancelled == []
        running = r.off.host_task(hang)
        await started.wait()
        assert running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert cancelled == [1]
        assert r.off.stats()["pending"] == 0


async def test_drain_and_close_wait_for_it(device_label: str) -> None:
    """A host task counts as work: drain() and aclose() wait for those that run and those that wait."""
    async with rig(device_label) as r:
        let_go, ended = asyncio.Event(), []

        async def work(i: int) -> None:
            await let_go.wait()
            ended.append(i)

        first = r.off.host_task(partial(work, 1))
        r.off.host_task(partial(work, 2), after=[first])
        drain = asyncio.create_task(r.off.drain())
        await turns()
        assert not drain.done()
        let_go.set()
        await drain
        assert ended == [1, 2]


async def test_terminate_cancels_it(device_label: str) -> None:
    """terminate() fails those that run and those that wait, and cancels their coroutines."""
    async with rig(device_label) as r:
        cancelled = asyncio.Event()

        async def hang() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        running = r.off.host_task(hang)
        waiting = r.off.host_task(hang, after=[running])
        await turns()
        r.off.terminate()
        for operation in (running, waiting):
            with pytest.raises(ao.ClosedError):
                await operation
        await cancelled.wait()
        await r.bury()


async def test_after_an_awaitable_and_context(device_label: str) -> None:
    """after= takes awaitables, and the coroutine runs in a copy of the context of its submission."""
    async with rig(device_label) as r:
        future = asyncio.get_running_loop().create_future()

        async def read() -> str:
            value = word.get()
            word.set("inside")
            return value

        word.set("then")
        task = r.off.host_task(read, after=[future])
        word.set("later")
        await turns()
        assert not task.done()
        future.set_result(None)
        assert await task == "then"
        assert word.get() == "later"


@pytest.mark.parametrize(
    "function", [5, lambda: None, None, asyncio.sleep(0)], ids=["number", "lambda", "none", "coroutine"]
)
async def test_what_is_no_coroutine_function(function: Any) -> None:
    """Anything but a coroutine function is refused, and nothing is left."""
    async with rig("host") as r:
        with pytest.raises(ao.UsageError, match="async def"):
            r.off.host_task(function)
        assert r.off.stats()["pending"] == 0
        if asyncio.iscoroutine(function):
            function.close()


@pytest.mark.parametrize("after", [False, True])
async def test_function_that_cannot_be_called(after: bool) -> None:
    """What calling it raises, or what it returns in place of a coroutine, is the failure: nothing waits for ever."""

    async def takes(result: int) -> None: ...

    def gives() -> int:
        return 5

    wrong: list[tuple[Any, str]] = [(takes, "missing 1 required")]
    if sys.version_info >= (3, 12):  # before, nothing passes for a coroutine function that is none
        wrong.append((inspect.markcoroutinefunction(gives), "await"))
    async with rig("host", load=False) as r:
        for function, text in wrong:
            op = r.off.host_task(function, after=[r.off.get(r.off.zeros(1, np.uint8))] if after else [])
            with pytest.raises(TypeError, match=text):
                await op
        assert r.off.stats()["pending"] == 0


@pytest.mark.all_loops
async def test_waiting_for_itself_or_for_what_comes_after_it() -> None:
    """A host task that awaits itself or what waits for it gets UsageError; a task that it starts may await that."""
    left: list[asyncio.Task[Any]] = []

    async with rig("host") as r:
        go = asyncio.Event()

        async def step() -> str:
            await go.wait()
            for op in (task, after):
                with pytest.raises(ao.UsageError, match=r"would wait for .*step"):
                    await op
            left.append(asyncio.ensure_future(after.wait()))
            await asyncio.sleep(0)
            return "done"

        task = r.off.host_task(step)
        after = r.off.get(r.off.zeros(1, np.uint8), after=[r.off.host_task(turns, after=[task])])
        go.set()
        assert await task == "done"
        assert (await left[0]).tolist() == [0]


@pytest.mark.all_loops
async def test_tasks_of_a_host_task_may_wait_for_what_comes_after_it() -> None:
    """Also where it starts them in its first step, and where another Offload has what they wait for."""
    async with rig("host") as r, rig("host", load=False) as other:
        tasks: list[asyncio.Task[Any]] = []
        go = asyncio.get_running_loop().create_future()

        async def wait(index: int) -> Any:
            return await ops[index]

        async def step() -> None:
            tasks.extend(asyncio.ensure_future(wait(index)) for index in range(2))
            await turns()

        word, there = r.word(5), other.word()
        task = r.off.host_task(step, after=[go])
        ops: list[ao.Operation[Any]] = [r.off.host_task(turns, after=[task])]
        r.off.fill(word, 7, after=[task])
        ops.append(other.off.copy(there, word))
        go.set_result(None)
        await task
        await asyncio.gather(*tasks)
        assert await other.read(there) == 7


def test_interrupt_in_the_first_step_of_an_eager_task() -> None:
    """It ends the loop, and the operation; what comes after that does not wait for ever."""
    if sys.version_info < (3, 12):
        pytest.skip("this Python has no eager tasks")
    source = """
import asyncio
import aiooffload as ao
async def main():
    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
    async with ao.Offload("host") as off:
        async def step():
            raise SystemExit(5)
        async def other(): ...
        go = asyncio.get_running_loop().create_future()
        op = off.host_task(step, after=[go])
        after = off.host_task(other, after=[op])
        go.set_result(None)
        try:
            await asyncio.sleep(5)
        finally:
            print(repr(op.exception()), type(after.exception()).__name__)
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (5, "SystemExit(5) DependencyError\n"), done.stderr


async def test_refused_for_its_dependencies(device_label: str) -> None:
    """after= of another Offload, or a launch that waits for this very host function, is refused and leaves nothing."""
    async with calling_rig(device_label) as r, rig("host") as other:
        refused: list[str] = []

        async def nothing() -> None: ...

        with pytest.raises(ao.UsageError, match="another Offload"):
            r.off.host_task(nothing, after=[other.off.host_task(nothing)])

        @r.off.host_function
        async def f(x: int) -> int:
            try:
                r.off.host_task(nothing, after=[op])
            except ao.UsageError as error:
                refused.append(str(error))
            return x

        await r.off.load(ask)
        op = r.launch(ask, 1, r.array(1), r.array(2, np.int32))
        await op
        assert len(refused) == 1
        await until(lambda: r.off.stats()["pending"] == 0)


@pytest.mark.all_loops
async def test_host_task_that_ends_everything() -> None:
    """It ends with the Offload, also if its first step, which an eager task runs at once, terminates that."""
    async with rig("host", lanes=1, bury=True) as r:

        async def task() -> None:
            r.off.terminate()
            await asyncio.Event().wait()

        op = r.off.host_task(task)
        with pytest.raises(ao.ClosedError):
            await asyncio.wait_for(op.wait(), 5)
