"""The channel of one engine: when it is made, which launches it knows, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import struct
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.host import open_device
from aiooffload.engine.reverse import CallingLaunch, Reverse
from aiooffload.rules import wire
from aiooffload.testing import FaultyDevice, open_offload
from tests.kernels import hold, nothing, rig, until
from tests.reverse_kernels import (
    HOLD,
    INCLUDE,
    OK,
    CallingRig,
    ask,
    attempt,
    calling_rig,
    end_of,
    in_steps,
    post_many,
)


def reverse_of(r: CallingRig) -> Reverse:
    engine = r.off._engine
    assert engine is not None
    return engine.reverse


async def test_nothing_is_made_before_it_is_needed(device_label: str) -> None:
    """Without a kernel that calls there is no channel, no memory and no further lane."""
    async with rig(device_label, load=False) as r:
        await r.off.load(nothing)
        engine = r.off._engine
        assert engine is not None
        assert engine.reverse.channel is None
        assert len(engine.lanes.lanes) == len(r.off.lanes)
        assert r.off.stats()["calls"] == {"served": 0, "dropped": 0, "resident": 0, "open": 0}


async def test_channel_is_made_once(device_label: str) -> None:
    """Kernels that are loaded at the same time share one channel, and lanes that are not among the program's."""
    async with calling_rig(device_label, calling_lanes=3) as r:
        await asyncio.gather(r.off.load(ask), r.off.load(in_steps), r.off.load(post_many))
        engine = r.off._engine
        assert engine is not None
        assert len(engine.lanes.lanes) == len(r.off.lanes) + 3 + 2
        assert engine.board.channel is engine.reverse.channel


async def test_memory_of_the_channel_stays(device_label: str) -> None:
    """Kernels have the address of their channel's device memory and nothing else: it is freed with the Offload."""
    async with calling_rig(device_label) as r:
        before = r.off.stats()["allocated_bytes"]
        await r.off.load(ask)
        for _ in range(2):
            gc.collect()
            await asyncio.sleep(0)  # what came back is freed with the next turn of the loop, or the next allocation
            r.off.empty(1, np.uint8).close()
            assert r.off.stats()["allocated_bytes"] == before + wire.STATE_NBYTES


async def test_cancelled_load_leaves_the_channel_to_others(device_label: str) -> None:
    """Who stops waiting for a load stops nobody else's."""
    async with calling_rig(device_label) as r:
        first = asyncio.create_task(r.off.load(ask))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await r.off.load(ask)
        assert reverse_of(r).channel is not None


async def test_more_launches_than_indices(device_label: str) -> None:
    """Indices of launches are used again; none is lost, whatever the launches ended with."""
    async with calling_rig(device_label) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            if x % 3 == 0:
                raise KeyError(x)
            return x

        await r.off.load(ask)
        value, report = r.array(1), r.array(2, np.int32)
        for x in range(wire.LAUNCHES + 10):
            failure = await end_of(r.launch(ask, x, value, report))
            assert (failure is None) == (x % 3 != 0)
        reverse = reverse_of(r)
        assert sorted(reverse._free) == list(range(wire.LAUNCHES))
        assert reverse.callers == {}
        assert r.off.stats()["calls"]["served"] == wire.LAUNCHES + 10


async def test_progress_after_the_end(device_label: str) -> None:
    """What a launch said last is known after it is done, and of one that said nothing nothing is."""
    async with calling_rig(device_label) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            return x

        await r.off.load(in_steps, ask)
        op = r.launch(in_steps, 4)
        await end_of(op)
        assert [pair async for pair in op.progress()][-1:] == [(4, 4)]
        quiet = r.launch(ask, 1, r.array(1), r.array(2, np.int32))
        await quiet
        assert [pair async for pair in quiet.progress()] == []


async def test_words_of_a_launch_start_anew(device_label: str) -> None:
    """A launch that gets a block that was used before does not see what was there."""
    async with calling_rig(device_label) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            return x

        await r.off.load(ask)
        reverse = reverse_of(r)
        assert reverse._opened is not None
        index = reverse._free[0]
        at = wire.launch_offset(index)
        reverse._opened.shared.array[at : at + wire.LAUNCH_END] = 0xFF
        value = r.array(1)
        await r.launch(ask, 6, value, r.array(2, np.int32))
        assert await r.values(value) == [6]


async def test_block_that_is_another_launchs_already(device_label: str) -> None:
    """A launch whose posts are still being served keeps what its kernel said: its block may be another's by then."""
    async with calling_rig(device_label) as r:
        gate, served = asyncio.Event(), []

        @r.off.host_function
        async def f(x: int) -> None:
            await gate.wait()
            served.append(x)

        await r.off.load(post_many)
        op = r.launch(post_many, 3, r.array(1, np.int32))
        reverse = reverse_of(r)
        assert reverse._opened is not None
        await until(lambda: any(caller.ended for caller in reverse.callers.values()))
        (caller,) = reverse.callers.values()
        at = wire.launch_offset(caller.index)
        reverse._opened.shared.array[at : at + wire.LAUNCH_END] = 0xFF
        gate.set()
        await op
        assert served == [0, 1, 2]
        assert [pair async for pair in op.progress()] == []


async def test_cancelled_when_its_block_is_another_launchs(device_label: str) -> None:
    """Who stops a launch of which only handlers are left stops no other one, which may have its index by then."""
    async with calling_rig(device_label) as r:
        go_on = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            await (go_on if x else asyncio.Event()).wait()
            return x

        await r.off.load(ask, post_many)
        reverse = reverse_of(r)
        while len(reverse._free) > 1:
            reverse._free.pop()
        op = r.launch(post_many, 1, r.array(1, np.int32))
        await until(lambda: any(caller.ended for caller in reverse.callers.values()))
        value = r.array(1)
        other = r.launch(ask, 6, value, r.array(2, np.int32))
        await until(lambda: r.off.stats()["calls"]["open"] == 2)
        assert reverse.callers[op].index == reverse.callers[other].index
        op.cancel()
        assert isinstance(await end_of(op), asyncio.CancelledError)
        assert not reverse.callers[other].read(wire.LAUNCH_CANCEL)
        go_on.set()
        assert await end_of(other) is None
        assert await r.values(value) == [6]


@ao.kernel(
    cuda=INCLUDE
    + HOLD
    + """extern "C" __global__ void hold_then_ask(
        ao::Launch launch, unsigned long long gate, long long* value, int* status) {
        hold_at(gate);
        status[0] = (int)launch.call(ao::fn("f"), value[0]);
    }""",
    calls=True,
)
def hold_then_ask(launch: Any, gate: np.uint64, value: ao.Out[np.int64], status: ao.Out[np.int32]) -> None:
    """Wait for a gate, then call f."""
    assert hold.host_function is not None
    hold.host_function(launch, gate)
    status[0], _, value[0] = attempt(lambda: launch.call("f"))


async def test_request_whose_bell_is_lost(device_label: str) -> None:
    """What a kernel sends while only the monitor is left is served although its bell is not heard: by the watchdog."""
    async with calling_rig(device_label, call_timeout_s=2) as r:

        @r.off.host_function
        async def f() -> int:
            return 7

        await r.off.load(hold_then_ask)
        engine, reverse = r.off._engine, reverse_of(r)
        assert engine is not None
        assert reverse._opened is not None
        reverse._opened = reverse._opened._replace(bell=engine._spare_word())  # nobody waits for that one
        gate, value, status = r.gate(), r.array(1), r.array(1, np.int32)
        await r.off.drain()
        op = r.launch(hold_then_ask, gate.address, value, status)
        await until(lambda: gate.started and engine.completion.armed)
        gate.open()
        await op
        assert await r.values(status) == [OK]
        assert await r.values(value) == [7]


@pytest.mark.allows_blocking("waits for the threads of a device that was given up")
async def test_message_of_a_kernel_that_gave_up_is_the_loss() -> None:
    """A message in the abort record loses the device at the next look, with its code and text, and names the kernel."""
    # Without a monitor, whose eventfd stays open after a loss.
    async with calling_rig(open_device(memory_operations=False), bury=True) as r:
        asked = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            asked.set()
            await asyncio.get_running_loop().create_future()
            return x

        await r.off.load(ask)
        op = r.launch(ask, 1, r.array(1), r.array(2, np.int32))
        await asked.wait()
        reverse = reverse_of(r)
        assert reverse._opened is not None
        (caller,) = reverse.callers.values()
        assert isinstance(caller, CallingLaunch)
        record = struct.pack("<Qqq", caller.index + 1, 42, 9) + b"gave up!?"
        reverse._opened.shared.array[wire.ABORT_OFFSET : wire.ABORT_OFFSET + len(record)] = np.frombuffer(
            record, np.uint8
        )
        failure = await end_of(op)
        assert isinstance(failure, ao.DeviceLostError)
        assert "ask" in str(failure)
        assert "code 42: gave up!?" in str(failure)
        with pytest.raises(ao.DeviceLostError):
            r.launch(nothing)
        engine = r.off._engine
        assert engine is not None
        engine.device.close()  # a lost device's is left alone, but this one is well


async def test_registering() -> None:
    """A name or number is given once; the same function may have several names."""
    async with calling_rig("host") as r:

        async def f(x: int) -> int:
            return x

        r.host_function(f)
        r.host_function(f, name="other")
        r.host_function(f, name=5)
        for name in ("f", "other", 5):
            with pytest.raises(ao.UsageError, match="already"):
                r.host_function(f, name=name)
        number = wire.function_id("f")
        reverse_of(r).functions[wire.function_id("g")] = reverse_of(r).functions[number]
        with pytest.raises(ao.UsageError, match="same id"):
            r.host_function(f, name="g")


async def test_a_loss_while_the_channel_is_made() -> None:
    """A device that is lost with the making of a calling lane is lost for everything, and is not called again."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1, calling_lanes=1) as off:
        device.lose("create_stream", at=1)
        with pytest.raises(ao.DeviceLostError):
            await off.load(ask)
        with pytest.raises(ao.DeviceLostError):
            off.empty(4, np.uint8)
    assert device.problems == []


async def test_launch_that_the_driver_refuses() -> None:
    """It fails alone: what comes after it goes on, nothing of it stays, and its index is another launch's."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1, calling_lanes=1) as off:

        @off.host_function
        async def f(x: int) -> int:
            return x

        await off.load(ask)
        value, report = off.zeros(1, np.int64), off.zeros(2, np.int32)
        await off.drain()
        device.fail("enqueue_kernel", ao.LaunchError)
        refused = off.launch(ask, grid=1, block=1, args=(1, value, report))
        then = off.launch(ask, grid=1, block=1, args=(2, value, report))
        named = off.launch(ask, grid=1, block=1, args=(3, value, report), after=[refused])
        async with asyncio.timeout(5):
            assert isinstance(await end_of(refused), ao.LaunchError)
            assert isinstance(await end_of(named), ao.DependencyError)
            assert await end_of(then) is None
            await off.drain()
        assert (await off.get(value)).tolist() == [2]
        engine = off._engine
        assert engine is not None
        assert sorted(engine.reverse._free) == list(range(wire.LAUNCHES))
        assert off.stats()["calls"] == {"served": 1, "dropped": 0, "resident": 0, "open": 0}


@pytest.mark.parametrize("call", ["register", "create_stream"])
async def test_channel_that_could_not_be_made(call: str) -> None:
    """There was no memory for it, say: the load fails, and the next one tries again."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1, calling_lanes=1) as off:
        device.fail(call, ao.OutOfMemoryError)
        with pytest.raises(ao.OutOfMemoryError):
            await off.load(ask)
        await off.load(ask)
