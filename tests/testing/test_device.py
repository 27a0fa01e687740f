"""A device that fails on demand: what is asked for happens, once, and everything else goes on."""

from __future__ import annotations

import asyncio
import ctypes

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.testing import ALLOCATIONS, ENQUEUES, FaultyDevice, open_offload
from aiooffload.testing.memory import POISON
from tests.kernels import add, turns


async def test_the_third_copy_fails() -> None:
    """The n-th call of a name raises what was asked for, in its operation alone; calls before and after it do not."""
    device = FaultyDevice()
    async with open_offload(device, lanes=2) as off:
        buffer = off.empty(4, np.uint8)
        device.fail("enqueue_copy", at=3)
        copies = [off.copy(buffer, np.full(4, value, np.uint8)) for value in range(5)]
        outcomes = [await asyncio.gather(copy.wait(), return_exceptions=True) for copy in copies]
        assert [type(outcome) for (outcome,) in outcomes] == [type(None)] * 2 + [ao.DriverError] + [type(None)] * 2
        assert outcomes[2] == device.injected
        assert device.injected[0].status == "INJECTED"  # type: ignore[attr-defined]
        assert (await off.get(buffer)).tolist() == [4] * 4
    assert device.problems == []
    assert device.left() == {}


async def test_several_names_and_errors_of_ones_own() -> None:
    """A set of names counts together, and what makes an exception is called for each."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1) as off:
        device.fail(ALLOCATIONS, lambda: ao.OutOfMemoryError("the attic is full"), at=2, times=2)
        off.empty(4, np.uint8)
        with pytest.raises(ao.OutOfMemoryError, match="attic"):  # and once more after giving up what is kept
            off.empty(4, np.uint8)
        assert len(device.injected) == 2
        off.empty(4, np.uint8)
        device.fail(ENQUEUES)
        device.heal()
        await off.fill(off.empty(4, np.uint8), 1)


async def test_a_completion_that_is_late() -> None:
    """A delayed completion, and what follows it on its lane, arrives with release(), and other lanes go on."""
    device = FaultyDevice()
    async with open_offload(device, lanes=2) as off:
        x, y = off.empty(4, np.uint8), off.empty(4, np.uint8)
        device.delay(at=2)
        first = off.fill(x, 1, lane=off.lanes[0])
        late = off.fill(x, 2, lane=off.lanes[0])
        behind = off.fill(x, 3, lane=off.lanes[0])
        await off.fill(y, 4, lane=off.lanes[1])
        await first
        await turns()
        assert (late.done(), behind.done(), device.delayed) == (False, False, 1)
        device.release()
        await asyncio.gather(late.wait(), behind.wait())


async def test_a_completion_that_never_arrives() -> None:
    """A later completion of the lane stands for a dropped one; without one the operation ends with the Offload."""
    device = FaultyDevice()
    async with open_offload(device, timeout_s=0.05, lanes=1) as off:
        x = off.empty(4, np.uint8)
        device.drop()
        dropped = off.fill(x, 1)
        await off.fill(x, 2)
        assert dropped.done()
        device.drop()
        dropped = off.fill(x, 3)
        await turns()
        assert not dropped.done()
    assert isinstance(dropped.exception(), ao.ClosedError)
    assert device.dropped == 2


async def test_a_device_that_is_lost() -> None:
    """From the call on with which it is lost, every call raises, and one more of the same thread is a problem."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1) as off:
        x = off.empty(4, np.uint8)
        device.lose("enqueue_fill", at=2)
        await off.fill(x, 1)
        with pytest.raises(ao.DeviceLostError):
            await off.fill(x, 2)
        with pytest.raises(ao.DeviceLostError):
            off.empty(4, np.uint8)
        assert device.lost
        assert device.problems == []
        with pytest.raises(ao.DeviceLostError):
            device.memory_info()
        assert device.problems == ["memory_info was called after the device was lost"]


async def test_a_driver_that_lies() -> None:
    """A skipped call does nothing and raises nothing."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1) as off:
        x = await off.put(np.full(4, 5, np.uint8))
        device.skip("enqueue_fill")
        await off.fill(x, 6)
        assert (await off.get(x)).tolist() == [5] * 4


async def test_use_of_freed_memory_is_noticed() -> None:
    """Freed memory is poison; a copy, a box or a fill there is a problem, and so is a kernel's write."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1) as off:
        x, y = off.empty(64, np.uint8), off.empty(64, np.uint8)
        address = x._address
        x.close()
        assert (ctypes.c_ubyte * 64).from_address(address)[:] == [POISON] * 64

        def use(lane: ao.Lane) -> None:
            lane.stream.enqueue_copy(y._address, address + 60, 4)
            lane.stream.enqueue_copy_box(address, y._address, 4, 2, 1, 8, 8, 0, 0)
            lane.stream.enqueue_fill(address + 8, b"\1\2", 2)

        await off.custom_operation(use)
        assert [problem.split()[:2] for problem in device.problems] == [
            [name, "uses"] for name in ("enqueue_copy", "enqueue_copy_box", "enqueue_fill")
        ]
    assert device.problems[3:] == ["a block of 64 bytes was written after it was freed"]


async def test_giving_back_is_done_all_the_same() -> None:
    """A planned failure of free, unregister or a close is raised after the deed, so nothing leaks."""
    device = FaultyDevice()
    async with open_offload(device, lanes=2) as off:
        off.empty(4, np.uint8).close()
        device.fail({"free", "unregister", "close_stream", "close_event", "close"}, times=100)
        off.empty(4, np.uint8).close()
    assert device.closed
    assert device.left() == {}
    assert len(device.injected) > 5


async def test_a_block_that_is_not_the_devices() -> None:
    """Freeing what was freed already is a problem, and does nothing."""
    device = FaultyDevice()
    block = device.allocate(8)
    device.free(block)
    device.free(block)
    assert device.problems == ["a block of 8 bytes was freed that is none of this device's"]
    device.close()


@pytest.mark.parametrize("early", [True, False])
async def test_a_torn_descriptor(early: bool) -> None:
    """A descriptor that makes no sense is dropped, the call that it replaced ends by its deadline, the next goes on."""
    device, asked = FaultyDevice(), []

    @ao.kernel(calls=True)
    def ask(launch: ao.Launch) -> None:
        for value in range(3):
            try:
                launch.call("note", value)
            except ao.OffloadTimeout:
                asked.append(-1)

    if early:
        device.tear(1)
    async with open_offload(device, lanes=1, calling_lanes=1, call_timeout_s=0.05) as off:

        @off.host_function
        async def note(x: int) -> None:
            asked.append(x)

        await off.load(ask)
        if not early:
            device.tear(1)
        with pytest.raises(ao.HostFunctionError, match="no answer"):
            await off.launch(ask, grid=1, block=1)
        assert asked == [0, -1, 2]
        assert off.stats()["calls"]["dropped"] == 1


@pytest.mark.gpu
async def test_on_a_gpu() -> None:
    """The wrapper stands before a GPU as well: a failure, a delay and a latch of its marks."""
    device = FaultyDevice("cuda:0")
    async with open_offload(device, lanes=2) as off:
        await off.load(add)
        x = off.zeros(1, np.uint64)
        device.fail("enqueue_kernel", ao.LaunchError, at=2)
        operations = [off.launch(add, grid=1, block=1, args=(x, 1)) for _ in range(3)]
        await asyncio.gather(*(operation.wait() for operation in operations), return_exceptions=True)
        assert isinstance(operations[1].exception(), ao.LaunchError)
        device.delay()
        late = off.launch(add, grid=1, block=1, args=(x, 1))
        await turns()
        assert not late.done()
        device.release()
        await late
        assert (await off.get(x)).tolist() == [3]
    assert device.left() == {}
