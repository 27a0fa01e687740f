"""The engine as a whole: opening, draining, closing, terminating, and what that leaves."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import numpy as np
import pytest
import structlog

import aiooffload as ao
from aiooffload.engine.copies import LARGE_BLOCKS, PIECE_NBYTES
from aiooffload.testing import FaultyDevice, open_offload
from tests.kernels import SpyDevice, add, hold_write, nothing, rig, turns, until


@pytest.mark.all_loops
async def test_aclose_waits_for_what_was_submitted(device_label: str) -> None:
    """aclose() lets everything in flight and queued complete, refuses new work meanwhile, and may be called again."""
    async with rig(device_label, lanes=2, lane_depth=1) as r:
        word = r.word(0)
        await r.off.drain()
        gate = await r.hold()
        ops = [r.launch(add, word, 1) for _ in range(10)]
        get = r.off.get(word)
        closing = [asyncio.ensure_future(r.off.aclose()) for _ in range(2)]
        await turns(5)
        with pytest.raises(ao.ClosedError):
            r.launch(add, word, 1)
        with pytest.raises(ao.ClosedError):
            r.launch(nothing)
        gate.open()
        await asyncio.gather(*closing)
        await r.off.aclose()
        assert [op.exception() for op in ops] == [None] * 10
        assert int(get.result()[0]) == 10


async def test_aclose_lets_a_first_launch_run(device_label: str) -> None:
    """A launch that still waits for its kernel's load when aclose() is called runs."""
    async with rig(device_label, load=False) as r:
        word = r.word(1)
        op = r.launch(add, word, 1)
        get = r.off.get(word)
        await r.off.aclose()
        assert op.exception() is None
        assert int(get.result()[0]) == 2


async def test_aclose_cancelled_goes_on(device_label: str) -> None:
    """Cancelling aclose() ends that wait alone; the next one waits for the same close."""
    async with rig(device_label) as r:
        gate = await r.hold()
        closing = asyncio.ensure_future(r.off.aclose())
        await turns(5)
        closing.cancel()
        await turns(5)
        gate.open()
        await r.off.aclose()
        assert r.holds[0].done()


async def test_aclose_at_its_deadline_terminates() -> None:
    """What is not done at the deadline fails with ClosedError, in flight, queued and held."""
    async with rig(lanes=2, lane_depth=1, bury=True) as r:
        word = r.word()
        await r.off.drain()
        await r.hold_all()
        ops = [r.launch(add, word, 1), r.launch(nothing, after=[asyncio.get_running_loop().create_future()])]
        before = time.monotonic()
        await r.off.aclose(0.05)
        assert time.monotonic() - before < 2
        for op in (*r.holds, *ops):
            with pytest.raises(ao.ClosedError):
                await op


@pytest.mark.parametrize("state", ["idle", "held", "queued", "loading", "copying", "maintenance"])
async def test_terminate(state: str) -> None:
    """terminate() returns at once in every state, fails what is not done, may be repeated, and calls nobody after."""
    device = SpyDevice()
    async with rig(device, lanes=2, lane_depth=1, bury=True, load=state != "loading") as r:
        word = r.word()
        await r.off.drain()
        ops: list[ao.Operation[object]] = []
        if state == "loading":
            ops.append(r.launch(add, word, 1))
        elif state != "idle":
            await r.hold_all()
        if state == "queued":
            ops += [r.launch(add, word, 1) for _ in range(5000)]
        elif state == "copying":
            host = np.zeros((LARGE_BLOCKS + 4) * PIECE_NBYTES, np.uint8)
            ops.append(r.off.put(host, lane=r.off.lanes[1]))
            await turns(100)
        elif state == "maintenance":
            ops.append(r.launch(ao.Kernel("nothing", host=nothing.host_function)))
            await turns()
        r.off.terminate()
        calls = len(device.calls)
        r.off.terminate()
        for op in ops:
            with pytest.raises(ao.ClosedError):
                await op
        with pytest.raises(ao.ClosedError):
            r.launch(nothing)
        await turns(300)
        await r.off.aclose()
        r.off.terminate()
        assert device.calls[calls:] == []


async def test_terminate_while_room_and_drain_wait() -> None:
    """Whoever waits in room() or drain() goes on when the Offload is terminated."""
    async with rig(lanes=1, lane_depth=1, max_pending=1, bury=True) as r:
        await r.hold()
        op = r.launch(nothing)
        waits = [asyncio.ensure_future(wait) for wait in (r.off.room(), r.off.drain())]
        await turns(5)
        r.off.terminate()
        await asyncio.wait_for(asyncio.gather(*waits), 3)
        assert isinstance(op.exception(), ao.ClosedError)


class Owner:
    """Somebody else's memory, a word."""

    def __init__(self, value: int) -> None:
        self.array = np.full(1, value, np.uint64)


@pytest.mark.all_loops
async def test_a_launch_past_the_hard_limit() -> None:
    """It cannot be stopped, so the device counts as lost: everything fails, what is in use stays, on_lost() is told."""
    told: list[ao.DeviceLostError] = []
    async with rig(lanes=3, hard_timeout_s=0.1, on_lost=told.append, bury=True) as r:
        owner = Owner(1)
        kept = weakref.ref(owner)
        x = ao.Buffer.from_pointer(owner.array.ctypes.data, 8, owner, shape=(1,), dtype=np.uint64)
        gate = r.gate()
        stuck = r.launch(hold_write, gate.address, x, np.uint64(9), lane=r.off.lanes[1])
        elsewhere = r.launch(nothing, lane=r.off.lanes[0], after=[stuck])  # in flight as well, but it waits
        behind = r.launch(add, x, 1)
        waiting = r.launch(nothing, after=[asyncio.get_running_loop().create_future()])
        for op in (stuck, elsewhere, behind, waiting):
            with pytest.raises(ao.DeviceLostError, match=r"hold_write on lane 1 is past hard_timeout_s=0\.1"):
                await op
        await turns()
        assert [error.lane for error in told] == [1]
        assert told[0] is stuck.exception()
        assert "open a new Offload" in str(told[0])  # no fault of the process: nothing else is lost
        with pytest.raises(ao.DeviceLostError):
            r.launch(nothing)
        del x, owner, stuck, elsewhere, behind, waiting, op
        gc.collect()
        assert kept() is not None  # the kernel still writes there
    assert len(told) == 1


async def test_what_on_lost_raises_is_the_loops(loop_errors: list[dict[str, Any]]) -> None:
    """An exception of on_lost() goes to the loop's exception handler, and the loss goes its way."""

    def broken(error: ao.DeviceLostError) -> None:
        raise ValueError("no")

    device = SpyDevice()
    async with rig(device, on_lost=broken, bury=True) as r:
        device.lost = True
        with pytest.raises(ao.DeviceLostError):
            await r.off.get(r.word())
        await turns()
        assert [type(context["exception"]) for context in loop_errors].count(ValueError) == 1


@pytest.mark.parametrize(
    "wrong",
    [{"hard_timeout_s": 0}, {"hard_timeout_s": "1"}, {"on_lost": 5}, {"on_lost": asyncio.sleep}],
    ids=["zero", "text", "number", "coroutine function"],
)
def test_limits_that_are_none(wrong: dict[str, Any]) -> None:
    """A limit is a number above 0, and on_lost can be called and is no coroutine function, which would never run."""
    with pytest.raises(ao.UsageError, match=next(iter(wrong))):
        ao.Offload("host", **wrong)


@pytest.mark.all_loops
async def test_drain(device_label: str) -> None:
    """drain() waits for what was submitted before and meanwhile, and raises nothing of theirs."""
    async with rig(device_label, lanes=2) as r:
        await r.off.drain()
        gate = await r.hold()
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        failing = r.launch(nothing, after=[held])
        drains = [asyncio.ensure_future(r.off.drain()) for _ in range(2)]
        await turns()
        meanwhile = r.off.put(np.zeros(1_000_000, np.uint8))
        gate.open()
        await turns()
        assert not drains[0].done()
        held.set_exception(ValueError())
        await asyncio.gather(*drains)
        assert meanwhile.done()
        assert isinstance(failing.exception(), ao.DependencyError)


async def test_drain_returns_when_the_last_is_cancelled(device_label: str) -> None:
    """drain() ends when what it waited for is cancelled."""
    async with rig(device_label) as r:
        op = r.launch(nothing, after=[asyncio.get_running_loop().create_future()])
        drain = asyncio.ensure_future(r.off.drain())
        await turns(5)
        op.cancel()
        await asyncio.wait_for(drain, 3)


async def test_opening_cancelled_leaves_nothing() -> None:
    """A task cancelled while it opens an Offload leaves no thread, descriptor or engine behind."""
    for count in range(1, 12, 2):
        off = ao.Offload("host")
        task = asyncio.ensure_future(off.__aenter__())
        await turns(count)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            continue
        await off.aclose()


@pytest.mark.parametrize("call", ["create_stream", "register"])
async def test_opening_that_fails_leaves_nothing(call: str) -> None:
    """When the driver refuses something while opening, that is raised and the device is closed."""
    device = SpyDevice()
    device.failures[call] = ao.OutOfMemoryError("no more")
    with pytest.raises(ao.OutOfMemoryError, match="no more"):
        await ao.Offload()._enter(device)
    assert "close" in device.calls


async def test_depth_of_the_driver_is_never_reached(device_label: str) -> None:
    """With the largest lane_depth a held lane takes launches without blocking the loop."""
    async with rig(device_label, lanes=1, lane_depth=200) as r:
        await r.hold()
        before = time.monotonic()
        ops = [r.launch(nothing) for _ in range(5000)]
        assert time.monotonic() - before < 2
        r.open_all()
        await ops[-1]
        await until(lambda: all(op.done() for op in ops))


@pytest.mark.parametrize("at", range(1, 6))
async def test_opening_that_fails_gives_everything_back(at: int) -> None:
    """Whichever stream or memory is refused while opening: what was made before it is given back, one by one."""
    device = FaultyDevice()
    device.fail({"create_stream", "register"}, ao.OutOfMemoryError, at=at)
    with pytest.raises(ao.OutOfMemoryError):
        await ao.Offload(lanes=2)._enter(device)
    assert device.closed
    assert device.left() == {}


@pytest.mark.parametrize("call", ["create_stream", "register", "selftest_function", "plan", "enqueue_write"])
async def test_a_loss_while_opening(call: str) -> None:
    """A device that is lost while it is opened is not called again."""
    device = FaultyDevice()
    device.lose(call, at=2 if call in ("create_stream", "register") else 1)
    with pytest.raises(ao.DeviceLostError):
        async with open_offload(device, lanes=2):
            raise AssertionError("it was opened")
    assert device.problems == []


@pytest.mark.parametrize("call", ["close_stream", "close_event", "unregister", "free", "close"])
async def test_closing_goes_on_past_a_refusal(call: str) -> None:
    """What the driver fails to take back is logged; everything else is given back, and the device is closed."""
    device = FaultyDevice()
    with structlog.testing.capture_logs() as lines:
        async with open_offload(device, lanes=2) as off:
            x = off.empty(4, np.uint8)
            first = off.fill(x, 1, lane=off.lanes[0])
            await off.fill(off.empty(4, np.uint8), 2, lane=off.lanes[1], after=[first])
            device.fail(call)
    assert len(device.injected) == 1
    assert device.closed
    assert device.left() == {}
    assert [line["log_level"] for line in lines] == ["warning"]


async def test_a_loss_that_a_worker_thread_finds() -> None:
    """A loss found by registering memory, off the loop's thread, fails what is in flight at once."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1) as off:
        device.delay()
        held = off.fill(off.empty(4, np.uint8), 1)
        device.lose("register", at=1)
        with pytest.raises(ao.DeviceLostError):
            await off.pinned(4, np.uint8)
        assert isinstance(held.exception(), ao.DeviceLostError)
        with pytest.raises(ao.DeviceLostError):
            off.empty(4, np.uint8)
    assert device.problems == []


async def test_a_loss_that_closing_finds() -> None:
    """A loss found while the channel's memory is given back ends closing: the driver is not called again."""

    @ao.kernel(calls=True)
    def silent(launch: ao.Launch) -> None:
        pass

    device = FaultyDevice()
    async with open_offload(device, lanes=1, calling_lanes=1) as off:
        await off.launch(silent, grid=1, block=1)
        device.lose("free", at=1)
    assert device.problems == []
