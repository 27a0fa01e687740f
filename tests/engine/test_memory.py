"""Device and pinned memory: nothing in use is freed, nothing is lost, a full device can be used again."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from tests.kernels import SpyDevice, add, hold_read, hold_write, nothing, rig, turns, until


@pytest.mark.parametrize("how", ["close", "collect"])
@pytest.mark.parametrize("use", ["launch", "get", "queued", "held"])
async def test_buffer_in_use_is_not_freed(use: str, how: str) -> None:
    """A buffer that is closed or collected while something needs it lives until that is done."""
    async with rig(HostDevice(poison=True), lanes=2, lane_depth=1) as r:
        word, out = r.word(41), r.word()
        await r.off.drain()
        gate = r.gate()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if use == "launch":
            op: ao.Operation[Any] = r.launch(hold_read, gate.address, word, out)
        elif use == "get":
            r.launch(hold_write, gate.address, word, 41, lane=r.off.lanes[1])
            op = r.off.get(word, lane=r.off.lanes[0])
        else:
            await r.hold(r.off.lanes[0])
            if use == "queued":
                op = r.off.copy(out, word, lane=r.off.lanes[0])
            else:
                op = r.off.copy(out, word, lane=r.off.lanes[1], after=[future])
        before = r.off.stats()["buffers"]
        if how == "close":
            word.close()
            assert word.closed
        else:
            del word
            gc.collect()
        await turns()
        assert not op.done()
        assert r.off.stats()["buffers"] == before
        future.set_result(None)
        r.open_all()
        value = await op
        assert int(value[0] if use == "get" else await r.read(out)) == 41
        await until(lambda: r.off.stats()["buffers"] == before - 1)


async def test_cancelled_use_frees_the_buffer(device_label: str) -> None:
    """An operation that is cancelled before it starts holds its buffers no longer."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.hold()
        word = r.off.empty(1, np.uint64)
        before = r.off.stats()
        op = r.launch(add, word, 1)
        word.close()
        assert op.cancel()
        after = r.off.stats()
        assert (before["buffers"] - after["buffers"], before["allocated_bytes"] - after["allocated_bytes"]) == (1, 8)


async def test_slice_keeps_the_allocation(device_label: str) -> None:
    """The memory lives as long as any slice of it; closing one closes all."""
    async with rig(device_label) as r:
        before = r.off.stats()["buffers"]
        whole = await r.off.put(np.arange(10))
        part = whole[5:]
        del whole
        gc.collect()
        assert r.off.stats()["buffers"] == before + 1
        assert (await r.off.get(part)).tolist() == [5, 6, 7, 8, 9]
        other = part[1:]
        part.close()
        part.close()
        assert other.closed
        with pytest.raises(ao.ClosedError):
            r.off.get(other)
        assert r.off.stats()["buffers"] == before


async def test_buffer_collected_on_another_thread() -> None:
    """A buffer whose last reference goes on another thread is freed on the loop's."""
    async with rig(HostDevice(poison=True)) as r:
        before = r.off.stats()["buffers"]
        box = [r.off.empty(100, np.uint8)]
        thread = threading.Thread(target=box.clear)
        thread.start()
        await until(lambda: not thread.is_alive())
        await until(lambda: r.off.stats()["buffers"] == before)


async def test_out_of_memory_is_typed_and_passes() -> None:
    """A full device raises OutOfMemoryError, a MemoryError, submits nothing, and works again after a close."""
    async with rig(HostDevice(memory_limit=10_000), load=False) as r:
        big = r.off.empty(8000, np.uint8)
        for ask in (
            lambda: r.off.empty(8000, np.uint8),
            lambda: r.off.zeros(8000, np.uint8),
            lambda: r.off.put(np.zeros(8000, np.uint8)),
        ):
            with pytest.raises(MemoryError) as caught:
                ask()
            assert isinstance(caught.value, ao.OutOfMemoryError)
        assert r.off.stats()["allocated_bytes"] == 8000
        assert (await r.off.get(await r.off.put(np.ones(100, np.uint8)))).all()
        big.close()
        await r.off.put(np.zeros(8000, np.uint8))


@pytest.mark.parametrize("nbytes", [2**50, 2**62, 2**64, 2**70])
async def test_absurd_sizes_are_out_of_memory(device_label: str, nbytes: int) -> None:
    """More than any machine has raises OutOfMemoryError, and the next small allocation works."""
    async with rig(device_label, load=False) as r:
        with pytest.raises(ao.OutOfMemoryError):
            r.off.empty(nbytes, np.uint8)
        with pytest.raises(ao.OutOfMemoryError):
            await r.off.pinned(nbytes, np.uint8)
        buffer = r.off.zeros(4, np.uint8)
        assert (await r.off.get(buffer)).tolist() == [0] * 4


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(-1, np.uint8), ((2, -3), np.uint8), (3, object), (3, [("a", object)]), ("abc", np.uint8), (2.5, np.uint8),
     (None, np.uint8), (3, "nonsense")],
    ids=str,
)  # fmt: skip
async def test_bad_shapes_and_dtypes(device_label: str, shape: Any, dtype: Any) -> None:
    """A shape or dtype that is none raises, for pinned arrays too, and nothing is rounded."""
    async with rig(device_label, load=False) as r:
        with pytest.raises((ao.UsageError, TypeError, ValueError)):
            r.off.empty(shape, dtype)
        with pytest.raises((ao.UsageError, TypeError, ValueError)):
            await r.off.pinned(shape, dtype)


async def test_pinned_arrays(device_label: str) -> None:
    """A pinned array has the shape and dtype asked for, sizes of zero included, and copies both ways."""
    async with rig(device_label) as r:
        for shape in ((3, 4), 7, (), 0):
            pinned = await r.off.pinned(shape, np.float32)
            pinned.array[...] = 2.5
            buffer = await r.off.put(pinned)
            assert buffer.shape == pinned.array.shape
            pinned.array[...] = 0
            await r.off.get(buffer, out=pinned)
            assert (pinned.array == 2.5).all()
            pinned.close()
            pinned.close()


async def test_pinned_memory_is_pooled(device_label: str) -> None:
    """A closed or collected pinned array's memory serves the next one of that size."""
    async with rig(device_label) as r:
        first = await r.off.pinned(5000, np.uint8)
        assert first.lease is not None
        address = first.lease.block.host_address
        first.close()
        second = await r.off.pinned(6000, np.uint8)
        assert second.lease is not None
        assert second.lease.block.host_address == address
        del second, first
        gc.collect()
        third = await r.off.pinned(5000, np.uint8)
        assert third.lease is not None
        assert third.lease.block.host_address == address


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("how", ["close", "collect"])
async def test_pinned_memory_in_flight_is_not_reused(device_label: str, direction: str, how: str) -> None:
    """A pinned array that is given up while its copy is in flight does not come back before that is done."""
    async with rig(device_label, lanes=1) as r:
        buffer = r.off.zeros(1000, np.uint8)
        await r.off.drain()
        gate = await r.hold()
        pinned = await r.off.pinned(1000, np.uint8)
        pinned.array[:] = 1
        op = r.off.copy(buffer, pinned) if direction == "in" else r.off.copy(pinned, buffer)
        if how == "close":
            pinned.close()
        else:
            del pinned
            gc.collect()
        other = await r.off.pinned(1000, np.uint8)
        other.array[:] = 9
        gate.open()
        await op
        assert (other.array == 9).all()
        assert (await r.off.get(buffer) == (1 if direction == "in" else 0)).all()


async def test_closed_pinned_array_is_refused(device_label: str) -> None:
    """Copying from or to a closed pinned array raises ClosedError."""
    async with rig(device_label, load=False) as r:
        buffer, pinned = r.off.zeros(4, np.uint8), await r.off.pinned(4, np.uint8)
        pinned.close()
        for submit in (
            lambda: r.off.put(pinned),
            lambda: r.off.copy(buffer, pinned),
            lambda: r.off.get(buffer, out=pinned),
        ):
            with pytest.raises(ao.ClosedError):
                submit()
        assert (await r.off.get(buffer)).tolist() == [0] * 4


async def test_buffers_outlive_the_offload(device_label: str) -> None:
    """A buffer that is dropped after the Offload was closed does no harm."""
    async with rig(device_label, load=False) as r:
        buffer = await r.off.put(np.arange(4))
        pinned = await r.off.pinned(4, np.uint8)
    pinned.array[:] = 3
    buffer.close()
    del buffer, pinned
    gc.collect()


async def test_buffers_that_were_put_go_by_themselves(device_label: str, no_collector: None) -> None:
    """A Buffer of put() is freed when it is dropped, without a collection."""
    async with rig(device_label) as r:
        before = r.off.stats()["buffers"]
        for size in (10, 1_000_000):
            buffer = await r.off.put(np.zeros(size, np.uint8))
            assert r.off.stats()["buffers"] == before + 1
            del buffer
            await turns(3)
            assert r.off.stats()["buffers"] == before


async def test_buffer_keeps_no_results(device_label: str, no_collector: None) -> None:
    """What was read from a Buffer goes when its reader drops it, while the Buffer lives."""
    async with rig(device_label) as r:
        word = r.word(7)
        arrays = [await r.off.get(word) for _ in range(12)]
        watched = [weakref.ref(array) for array in arrays]
        del arrays
        await turns(3)
        assert [ref() for ref in watched] == [None] * 12


async def test_chain_of_after_keeps_nothing(device_label: str, no_collector: None) -> None:
    """Each launch after the one before it: those that are done go."""
    async with rig(device_label) as r:
        previous = r.launch(nothing)
        watched = []
        for _ in range(50):
            watched.append(weakref.ref(previous))
            previous = r.launch(nothing, after=[previous])
            await previous
        await turns(3)
        assert sum(ref() is not None for ref in watched) <= 1


async def test_pinned_memory_is_lent_once(device_label: str) -> None:
    """The memory of a pinned array serves no other while an array made from it lives."""
    async with rig(device_label) as r:
        first = (await r.off.pinned(4, np.uint32)).array
        second = (await r.off.pinned(4, np.uint32)).array
        first[:] = 1
        second[:] = 2
        assert first.tolist() == [1] * 4
        address = first.ctypes.data
        del first
        assert (await r.off.pinned(4, np.uint32)).array.ctypes.data == address


async def test_pinned_array_outlives_its_offload(device_label: str) -> None:
    """An array of pinned memory stays readable after the Offload has closed."""
    async with rig(device_label) as r:
        array = (await r.off.pinned(4, np.uint32)).array
        array[:] = 3
    assert array.tolist() == [3] * 4


async def test_copies_through_pinned_memory_are_ordered(device_label: str) -> None:
    """A copy into pinned memory comes before a later one out of it, whatever their lanes."""
    async with rig(device_label, lanes=2) as r:
        source, target, pinned = r.word(42), r.word(0), await r.off.pinned(1, np.uint64)
        pinned.array[:] = 5
        gate = await r.hold(r.off.lanes[0])
        r.off.copy(pinned, source, lane=r.off.lanes[0])
        out = r.off.copy(target, pinned, lane=r.off.lanes[1])
        await turns()
        assert not out.done()
        gate.open()
        assert await r.read(target) == 42


class Owner:
    """Owns memory."""


@pytest.mark.parametrize("what", ["launch", "custom operation"])
async def test_terminated_frees_nothing_of_others(what: str) -> None:
    """Terminating lets go of nothing that the device may still use, memory of other libraries included."""
    device = SpyDevice()
    async with rig(device, lanes=1, bury=True) as r:
        await r.hold()
        owner, memory = Owner(), np.zeros(1, np.uint64)
        held = weakref.ref(owner)
        if what == "launch":
            device.swallowed.add("enqueue_kernel")  # the host's would hold the memory itself
            buffer = ao.Buffer.from_pointer(memory.ctypes.data, 8, owner, dtype=np.uint64)
            op: ao.Operation[Any] = r.launch(add, buffer, 1)
            del buffer
        else:
            op = r.off.custom_operation(lambda lane, owner=owner: None)  # type: ignore[misc]
        del owner
        r.off.terminate()
        assert isinstance(op.exception(), ao.ClosedError)
        gc.collect()
        assert held() is not None


async def closed_offload_with_a_pinned_array() -> weakref.ref[Any]:
    """Return a reference to the engine of an Offload whose host function holds a pinned array."""
    async with ao.Offload("host", lanes=1) as off:
        pinned = (await off.pinned(4, np.int64)).array

        @off.host_function
        async def first() -> int:
            return int(pinned[0])

        return weakref.ref(off._engine)


async def test_a_pinned_array_does_not_keep_the_engine() -> None:
    """A closed Offload goes although a host function holds a pinned array: the collector sees no way through arrays."""
    engine = await closed_offload_with_a_pinned_array()
    await turns()
    gc.collect()
    assert engine() is None
