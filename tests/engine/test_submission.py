"""Submitting: what would wait for itself is refused, and what is refused has done nothing."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.engine.maintenance import barrier
from aiooffload.engine.submission import Terms
from aiooffload.operation import Operation
from aiooffload.rules.scheduler import waits_for
from tests.kernels import Boom, SpyDevice, add, fail_at, hold_write, nothing, rig, turns, until
from tests.reverse_kernels import ask, calling_rig, end_of


def operation(deps: list[Operation[Any]] | None = None) -> Operation[Any]:
    made: Operation[Any] = Operation(asyncio.get_running_loop(), None, "made")
    made.deps = deps
    return made


async def test_waits_for_follows_what_is_on_the_host() -> None:
    """A chain of operations on the host leads to the launch at its end, in any number of steps."""
    launch = operation()
    chain = [launch]
    for _ in range(2000):
        chain.append(operation([chain[-1]]))
    assert waits_for([chain[-1]], launch)
    assert not waits_for(chain[-1:], operation())
    assert not waits_for([], launch)


async def test_waits_for_sees_each_once() -> None:
    """Diamonds do not multiply, and finished operations lead nowhere."""
    launch = operation()
    layer = [operation([launch])]
    for _ in range(60):
        layer = [operation(list(layer)), operation(list(layer))]
    assert waits_for(layer, launch)
    done = operation([launch])
    done.finish()
    assert not waits_for([done], launch)


def test_terms_by_default() -> None:
    """An operation may run at any time, anywhere, and as late as it has to."""
    assert Terms() == ((), None, False, None, 0, False)


async def test_refused_launch_of_a_kernel_that_calls_does_nothing(device_label: str) -> None:
    """A lane of the program's, or instant where it would have to wait, is refused, and nothing is left pending."""
    async with calling_rig(device_label) as r:
        arguments = (1, r.array(1), r.array(2, "i4"))
        with pytest.raises(ao.UsageError, match="lanes of their own"):
            r.launch(ask, *arguments, lane=r.off.lanes[0])
        with pytest.raises(ao.WouldBlock, match="not loaded"):
            r.launch(ask, *arguments, instant=True)
        with pytest.raises(ao.UsageError):
            r.launch(ask, *arguments[:2])
        await r.off.drain()
        assert r.off.stats()["pending"] == 0


async def test_what_comes_after_a_launch_that_calls_waits_on_the_host(device_label: str) -> None:
    """It is pending until that launch is done, so no lane is held up meanwhile; instant, it would block."""
    async with calling_rig(device_label, lanes=1) as r:
        asked, go_on, total = asyncio.Event(), asyncio.Event(), r.word()

        @r.off.host_function
        async def f(x: int) -> int:
            asked.set()
            await go_on.wait()
            return x

        await r.off.load(ask, add)
        value, report = r.array(1), r.array(2, "i4")
        op = r.launch(ask, 5, value, report)
        read = r.off.get(value)
        await asked.wait()
        await turns()
        assert not read.done()
        with pytest.raises(ao.WouldBlock, match="only the host can wait for"):
            r.launch(add, value.view("u8"), 1, instant=True)
        await r.launch(add, total, 1)  # goes past it on the only lane
        go_on.set()
        assert (await read).tolist() == [5]
        assert await end_of(op) is None
        assert await r.read(total) == 1


async def test_dependent_of_a_failed_call(device_label: str) -> None:
    """after= a launch whose host function failed never starts; one that only shares a buffer does."""
    async with calling_rig(device_label) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            raise KeyError(x)

        await r.off.load(ask, add)
        value, report, word = r.array(1), r.array(2, "i4"), r.word()
        op = r.launch(ask, 5, value, report)
        dependent, sharing = r.launch(add, word, 1, after=[op]), r.off.get(value)
        assert isinstance(await end_of(op), ao.HostFunctionError)
        assert isinstance(await end_of(dependent), ao.DependencyError)
        await sharing
        assert await r.read(word) == 0


# Custom operations


async def test_call_after_what_fails_while_it_is_on_the_device() -> None:
    """A launch that calls fails with what it was enqueued behind, and is over: maintenance and drain wait no longer."""
    async with calling_rig() as r:

        @r.off.host_function
        async def f(x: int) -> int:
            return x

        await r.off.load(ask, fail_at)
        gate, value, report = r.gate(), r.array(1), r.array(2, "i4")
        first = r.launch(fail_at, gate.address)
        second = r.launch(ask, 5, value, report, after=[first])
        assert second.instant
        gate.open()
        assert isinstance(await end_of(second), ao.DependencyError)
        await end_of(first)
        await r.off.load(add)
        await r.off.drain()


async def test_large_copy_after_what_fails_while_it_waits_on_the_device() -> None:
    """A copy in pieces fails with what it was enqueued behind, as any other does."""
    async with rig("host", lanes=2) as r:
        await r.off.load(fail_at)
        buffer = r.off.zeros(4 << 20, np.uint8)
        first = r.launch(fail_at, r.gate().address)
        copy = r.off.get(buffer, after=[first])
        await turns()
        r.open_all()
        assert isinstance(await end_of(copy), ao.DependencyError)
        await end_of(first)


async def test_custom_operation_runs_on_its_lane(device_label: str) -> None:
    """The function gets the lane; what it enqueues there is part of the operation, whose value is what it returns."""
    async with rig(device_label, lanes=2) as r:
        word, gate = r.word(1), r.gate()
        first = r.launch(hold_write, gate.address, word, 5, lane=r.off.lanes[0])

        def native(lane: ao.Lane) -> int:
            lane.stream.enqueue_fill(word.address, b"\7\0\0\0\0\0\0\0", 1)
            return lane.handle

        op = r.off.custom_operation(native, after=[first])
        assert op.lane is r.off.lanes[0]
        assert op.instant
        await turns()
        assert not op.done()
        gate.open()
        assert await op == r.off.lanes[0].handle
        assert await r.read(word) == 7


async def test_custom_operation_that_enqueues_nothing(device_label: str) -> None:
    """It is done when what came before it on its lane is."""
    async with rig(device_label, lanes=1) as r:
        gate = await r.hold()
        op = r.off.custom_operation(lambda lane: None)
        await turns()
        assert not op.done()
        gate.open()
        assert await op is None


async def test_custom_operation_that_raises_half_way(device_label: str) -> None:
    """It fails with the exception, once what it had enqueued is done; dependents fail, the lane goes on."""
    async with rig(device_label, lanes=1) as r:
        word, gate = r.word(1), r.gate()

        def native(lane: ao.Lane) -> None:
            r.off.lanes[0].stream.enqueue_fill(word.address, b"\7\0\0\0\0\0\0\0", 1)
            raise Boom("half-way")

        hold_op = r.launch(hold_write, gate.address, r.word(), 5)
        op = r.off.custom_operation(native)
        dependent = r.launch(add, word, 1, after=[op])
        await turns()
        assert not op.done()
        gate.open()
        with pytest.raises(Boom):
            await op
        assert hold_op.finished
        assert isinstance(await end_of(dependent), ao.DependencyError)
        assert await r.read(word) == 7


async def test_custom_operation_that_submits(device_label: str) -> None:
    """What the function submits to the same Offload waits until it has returned, and comes after it on its lane."""
    async with rig(device_label, lanes=1) as r:
        word, inner = r.word(1), []

        def native(lane: ao.Lane) -> None:
            inner.append(r.launch(add, word, 1, lane=lane))
            with pytest.raises(ao.WouldBlock, match="only the host"):
                r.launch(add, word, 1, instant=True)
            lane.stream.enqueue_fill(word.address, b"\7\0\0\0\0\0\0\0", 1)

        await r.off.custom_operation(native)
        await inner[0]
        assert await r.read(word) == 8


async def test_custom_operation_holds_its_function(no_collector: None) -> None:
    """What only the function holds is not freed before the work that uses it is done, and then at once."""
    async with rig("host", lanes=1) as r:
        gate = await r.hold()

        def native(buffer: ao.Buffer, lane: ao.Lane) -> None:
            lane.stream.enqueue_fill(buffer.address, b"\1", 100)

        op = r.off.custom_operation(partial(native, r.off.empty(100, np.uint8)))
        assert op.instant
        assert r.off.stats()["allocated_bytes"] == 100
        gate.open()
        await op
        assert r.off.stats()["allocated_bytes"] == 0


async def test_what_a_custom_operation_submits_goes_once_it_is_there() -> None:
    """It goes when the function has returned, not when that operation is done: that may wait for it on the device."""
    async with rig("host", lanes=2) as r:
        inner: list[ao.Operation[None]] = []
        assert r.off._engine is not None
        word = r.off._engine.memory.register(4096).word(0)

        def native(lane: ao.Lane) -> None:
            lane.stream.enqueue_wait(word, 1)
            inner.append(r.launch(nothing, lane=r.off.lanes[1]))

        op = r.off.custom_operation(native, lane=r.off.lanes[0])
        await inner[0]
        assert not op.done()
        word.store(1)
        await op


@pytest.mark.parametrize("then", ["returns", "raises"])
@pytest.mark.parametrize("end", ["terminated", "lost"])
async def test_custom_operation_during_which_everything_ends(end: str, then: str) -> None:
    """It ends as well if its function ends the Offload or finds the device lost; the driver is not called again."""
    device = SpyDevice()
    async with rig(device, lanes=1, bury=True) as r:
        assert r.off._engine is not None
        engine = r.off._engine

        def native(lane: ao.Lane) -> None:
            if end == "terminated":
                r.off.terminate()
            else:
                engine.lose(ao.DeviceLostError("the device fell off"))
            device.calls.clear()
            if then == "raises":
                raise Boom

        op = r.off.custom_operation(native)
        assert isinstance(await end_of(op), ao.ClosedError if end == "terminated" else ao.DeviceLostError)
        assert engine.board.in_flight == 0
        assert device.calls == []


async def test_pause_that_begins_in_a_custom_operation() -> None:
    """Maintenance for which a custom operation sees the last obstacle go waits for that operation, and holds then."""
    async with rig("host", lanes=2) as r:
        assert r.off._engine is not None
        engine, idle = r.off._engine, []
        barrier.count_calling(1, engine.loop)
        engine.pause(lambda: idle.append(True))

        def native(lane: ao.Lane) -> None:
            barrier.count_calling(-1, engine.loop)
            assert not idle

        op = r.off.custom_operation(native)
        assert engine.board.paused == 1
        await until(lambda: idle, "the pause begins")
        assert op.finished
        engine.resume()
        assert engine.board.paused == 0
        await r.launch(nothing)


async def test_pause_does_not_take_a_custom_operation_for_itself() -> None:
    """That nothing starts while a custom operation is put together is no pause: kernels that call still run."""
    async with rig("host", lanes=2) as r:
        assert r.off._engine is not None
        engine, idle = r.off._engine, []
        first = r.launch(nothing)
        barrier.count_calling(1, engine.loop)
        engine.pause(lambda: idle.append(True))

        def native(lane: ao.Lane) -> None:
            while not first.done():
                pass
            assert not idle

        await r.off.custom_operation(native)
        assert not idle
        barrier.count_calling(-1, engine.loop)
        assert idle
        engine.resume()
        await r.launch(nothing)


@pytest.mark.parametrize("what", ["copy", "custom operation"])
async def test_refused_submission_keeps_nothing(no_collector: None, what: str) -> None:
    """What was not submitted lets go of memory and of the function at once, without the garbage collector."""
    async with rig("host", lanes=1, lane_depth=1) as r:
        await r.hold()
        if what == "copy":
            with pytest.raises(ao.WouldBlock):
                r.off.put(np.zeros(4 << 20, np.uint8), instant=True)
        else:
            buffer = r.off.empty(4, np.uint8)
            with pytest.raises(ao.WouldBlock):
                r.off.custom_operation(partial(_with, buffer), instant=True)
            del buffer
        assert r.off.stats()["allocated_bytes"] == 0


def _with(buffer: ao.Buffer, lane: ao.Lane) -> None:
    """Do nothing, with a buffer."""


async def test_custom_operation_takes_plain_functions(loop_errors: list[dict[str, object]]) -> None:
    """A coroutine function is refused, and so is a function that returns a coroutine after all."""

    async def coroutine(lane: ao.Lane) -> None: ...

    async with rig("host") as r:
        for wrong in (coroutine, None, 5):
            with pytest.raises(ao.UsageError, match="plain function"):
                r.off.custom_operation(wrong)  # type: ignore[arg-type]
        with pytest.raises(ao.UsageError, match="plain function"):
            await r.off.custom_operation(lambda lane: coroutine(lane))


async def test_interrupted_custom_operation_is_done(device_label: str) -> None:
    """KeyboardInterrupt in the function reaches the caller; the operation ends with it, and work goes on."""
    async with rig(device_label, lanes=1) as r:

        def native(lane: ao.Lane) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            r.off.custom_operation(native)
        word = r.word(1)
        await r.launch(add, word, 1)
        assert await r.read(word) == 2
        await r.off.drain()


async def test_graph_on_the_host() -> None:
    """The host device has no graphs: UsageError, and nothing is submitted."""
    async with rig("host") as r:
        with pytest.raises(ao.UsageError, match="no graphs"):
            r.off.launch_graph(17)


# Gates


async def test_gate_holds_its_lane(device_label: str) -> None:
    """What is submitted to the lane later waits behind the gate, what was before and other lanes do not."""
    async with rig(device_label, lanes=2) as r:
        word, future = r.word(1), asyncio.get_running_loop().create_future()
        await r.off.drain()
        before = r.launch(nothing, lane=r.off.lanes[0])
        gate = r.off.gate(future, lane=r.off.lanes[0])
        behind = r.launch(add, word, 1, lane=r.off.lanes[0])
        await before
        await r.launch(nothing, lane=r.off.lanes[1])
        await turns()
        assert not gate.done()
        assert not behind.done()
        future.set_result("ignored")
        assert await gate is None
        await behind
        assert await r.read(word) == 2


async def test_gate_that_fails_lets_the_lane_go_on(device_label: str) -> None:
    """What names it fails with DependencyError; what only stands behind it runs."""
    async with rig(device_label, lanes=1) as r:
        word, future = r.word(1), asyncio.get_running_loop().create_future()
        gate = r.off.gate(future, lane=r.off.lanes[0])
        named, behind = r.launch(add, word, 10, after=[gate]), r.launch(add, word, 1, lane=r.off.lanes[0])
        future.set_exception(Boom("no"))
        assert isinstance(await end_of(gate), ao.DependencyError)
        assert isinstance(await end_of(named), ao.DependencyError)
        await behind
        assert await r.read(word) == 2


@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_cycle_through_a_gate_ends(device_label: str, how: str) -> None:
    """A gate that waits, by a way round, for what stands behind it fails, and the lane goes on."""
    async with rig(device_label, lanes=1) as r:
        word, behind = r.word(1), asyncio.get_running_loop().create_future()

        async def way_round() -> None:
            await (await behind)

        gate = r.off.gate(way_round(), lane=r.off.lanes[0], timeout_s=0.05 if how == "timeout" else 30.0)
        op = r.launch(add, word, 1, lane=r.off.lanes[0])
        behind.set_result(op.wait())
        await turns()
        assert not op.done()
        if how == "cancel":
            gate.cancel()
        expected = ao.OffloadTimeout if how == "timeout" else asyncio.CancelledError
        assert isinstance(await end_of(gate), expected)
        await op
        assert await r.read(word) == 2


async def test_gate_of_an_operation_is_ordered_by_the_device(device_label: str) -> None:
    """An operation as what opens the gate is a dependency like any other: it was submitted before, so no cycle."""
    async with rig(device_label, lanes=2) as r:
        hold = await r.hold(r.off.lanes[1])
        gate = r.off.gate(r.holds[0], lane=r.off.lanes[0])
        behind = r.launch(nothing, lane=r.off.lanes[0])
        assert behind.instant
        await turns()
        assert not behind.done()
        hold.open()
        await gate
        await behind


async def test_gate_stands_on_a_lane() -> None:
    """Without a lane of this Offload there is no gate."""
    async with rig("host") as r, rig("host") as other:
        for wrong in (None, 0, other.off.lanes[0]):
            with pytest.raises(ao.UsageError, match="lane"):
                r.off.gate(asyncio.get_running_loop().create_future(), lane=wrong)  # type: ignore[arg-type]


# Instant


async def test_what_went_straight_to_the_device(device_label: str) -> None:
    """``op.instant`` says whether an operation was on the device when its submission returned."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.off.drain()
        future = asyncio.get_running_loop().create_future()
        straight, waiting = r.launch(nothing), r.launch(nothing)
        held, task = r.launch(nothing, after=[future]), r.off.host_task(_nothing)
        assert [op.instant for op in (straight, waiting, held, task)] == [True, False, False, False]
        future.set_result(None)
        await r.off.drain()
        assert not waiting.instant


async def _nothing() -> None: ...
