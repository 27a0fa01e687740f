"""Memory of a GPU through the public API: full devices, staging, pinned arrays, buffers in flight."""

from __future__ import annotations

import asyncio
import functools
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.gpu.support import Words, add, device_bytes_used, latch, until

pytestmark = pytest.mark.gpu


@pytest.fixture
async def off() -> AsyncIterator[ao.Offload]:
    async with ao.Offload("cuda:0", lanes=4) as opened:
        await opened.load(add, latch)
        yield opened


async def hold(off: ao.Offload, lane: ao.Lane) -> Words:
    """Hold a lane by a kernel that runs when this returns; ``array[1] = 1`` lets it go."""
    words = await Words.of(off)
    off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)), lane=lane)
    await words.until(0)
    return words


async def test_full_device(off: ao.Offload) -> None:
    """A device that is full raises OutOfMemoryError, a MemoryError; the next small allocation works."""
    for call in (off.empty, off.zeros):
        with pytest.raises(ao.OutOfMemoryError) as caught:
            call(off.properties.total_bytes + (1 << 30), np.uint8)
        assert isinstance(caught.value, MemoryError)
    x = await off.put(np.arange(10))
    assert (await off.get(x)).tolist() == list(range(10))
    assert off.stats()["buffers"] == 1


async def test_filling_the_device(off: ao.Offload) -> None:
    """Allocating until nothing is left fails with OutOfMemoryError; after closing, as much fits again."""
    size, kept = 8 << 30, []

    def fill_up() -> None:
        kept.extend(off.empty(size, np.uint8) for _ in range(1 + off.properties.total_bytes // size))

    def close_all() -> None:
        while kept:
            kept.pop().close()

    try:
        with pytest.raises(ao.OutOfMemoryError):
            fill_up()
        count = len(kept)
        assert count > 0
        small = await off.put(np.ones(100))
        close_all()
        kept.extend(off.empty(size, np.uint8) for _ in range(count))
        assert (await off.get(small) == 1).all()
    finally:
        close_all()


@ao.kernel(cuda='extern "C" __global__ void touch(unsigned char* work) { *work = 1; }')
def touch(launch: Any, work: ao.InOut[np.uint8]) -> None:
    """Write to the first byte of its workspace."""


async def test_every_allocator_runs_out(off: ao.Offload) -> None:
    """Whoever allocates when nothing is left gets OutOfMemoryError, has lost nothing, and may try again later."""
    source = np.zeros(1 << 28, np.uint8)
    small = await off.put(np.arange(4))
    await off.load(touch)
    kept: list[ao.Buffer] = []

    def fill_up(size: int) -> None:
        kept.extend(off.empty(size, np.uint8) for _ in range(1 + off.properties.total_bytes // size))

    for size in (8 << 30, 1 << 30, 1 << 28):
        with pytest.raises(ao.OutOfMemoryError):
            fill_up(size)
    launch = functools.partial(off.launch, touch, grid=1, block=1, args=(ao.Scratch(1 << 28),))
    for call in (
        lambda: off.empty(1 << 28, np.uint8),
        lambda: off.zeros(1 << 28, np.uint8),
        lambda: off.put(source),
        lambda: launch(),
    ):
        with pytest.raises(ao.OutOfMemoryError):
            await call()
    with pytest.raises(ao.OutOfMemoryError):
        await off.pinned(1 << 50, np.uint8)
    assert (await off.get(small)).tolist() == [0, 1, 2, 3]
    kept.clear()
    await launch()
    assert not (await off.get(await off.put(source))).any()


async def test_buffer_that_outlives_its_offload() -> None:
    """Memory of a buffer that is still held when its Offload closes goes back to the device all the same."""
    before = device_bytes_used()
    async with ao.Offload("cuda:0", lanes=2) as off:
        buffer = off.zeros(1 << 30, np.uint8)
        await off.drain()
        assert device_bytes_used() - before >= 1 << 30
    buffer.close()
    del buffer
    gc.collect()
    await until(lambda: device_bytes_used() - before < 1 << 29, "the memory is given back")


async def test_staging_is_not_reused_before_its_copy_is_done(off: ao.Offload) -> None:
    """Many small puts behind a held lane, from sources that change afterwards, all arrive (cudf #22284)."""
    lane = off.lanes[0]
    words = await hold(off, lane)
    sources = [np.full(1000, number, np.int32) for number in range(60)]
    puts = [off.put(source, lane=lane) for source in sources]
    for source in sources:
        source[:] = -1  # small arrays were read when they were submitted
    others = await asyncio.gather(*(off.put(np.full(1000, -2, np.int32), lane=off.lanes[1]).wait() for _ in range(4)))
    assert not any(put.done() for put in puts)
    words.array[1] = 1
    for number, put in enumerate(puts):
        assert (await off.get(await put) == number).all()
    for other in others:
        assert (await off.get(other) == -2).all()


async def test_more_puts_than_staging_blocks(off: ao.Offload) -> None:
    """Puts beyond what staging holds wait for a block, and none gets another's bytes."""
    lane = off.lanes[0]
    words = await hold(off, lane)
    sources = [np.full(50_000, number, np.int32) for number in range(200)]
    puts = [off.put(source, lane=lane) for source in sources]
    words.array[1] = 1
    buffers = await asyncio.gather(*(put.wait() for put in puts))
    backs = await asyncio.gather(*(off.get(buffer).wait() for buffer in buffers))
    assert [int(back[0]) for back in backs] == [int(back[-1]) for back in backs] == list(range(200))


async def test_pinned_array_is_not_reused_in_flight(off: ao.Offload) -> None:
    """A pinned array that was closed while its copy waits is not given to anybody before the copy is done."""
    lane = off.lanes[0]
    words = await hold(off, lane)
    pinned = await off.pinned(1000, np.int64)
    pinned.array[:] = 7
    put = off.put(pinned, lane=lane)
    pinned.close()
    del pinned
    gc.collect()
    fresh = [await off.pinned(1000, np.int64) for _ in range(4)]
    for array in fresh:
        array.array[:] = -1
    words.array[1] = 1
    assert (await off.get(await put) == 7).all()


async def test_buffer_closed_in_flight(off: ao.Offload) -> None:
    """A buffer that was closed while a launch waits with it is not given to anybody before the launch is done."""
    lane = off.lanes[0]
    words = await hold(off, lane)
    x = off.empty(1000, np.uint64)
    address = x.address
    late = off.launch(add, grid=1, block=1, args=(x, 1), lane=lane)
    x.close()
    del x
    gc.collect()
    fresh = [off.empty(1000, np.uint64) for _ in range(50)]
    assert address not in {buffer.address for buffer in fresh}
    words.array[1] = 1
    await late
    before = off.stats()["buffers"]
    for buffer in fresh:
        buffer.close()
    del fresh, buffer
    gc.collect()
    await until(lambda: off.stats()["buffers"] == before - 50, "the buffers are freed")


@pytest.mark.parametrize("nbytes", [0, 1, 255 * 1024, 257 * 1024, (2 << 20) - 1, (2 << 20) + 1, 50_000_001])
async def test_round_trip(off: ao.Offload, nbytes: int) -> None:
    """Arrays of any size come back as they were, whatever way they take, and into pinned memory too."""
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    buffer = await off.put(data)
    assert (await off.get(buffer) == data).all()
    pinned = await off.pinned(data.shape, data.dtype)
    await off.get(buffer, out=pinned)
    assert (pinned.array == data).all()


async def test_program_order_over_lanes(off: ao.Offload) -> None:
    """Operations that share a buffer run in the order of submission although they are on different lanes."""
    words = await hold(off, off.lanes[0])
    x = off.zeros(1, np.uint64)
    off.launch(add, grid=1, block=1, args=(x, 1), lane=off.lanes[0])
    off.fill(x, 100, lane=off.lanes[1])
    off.launch(add, grid=1, block=1, args=(x, 2), lane=off.lanes[2])
    first = off.get(x, lane=off.lanes[3])
    off.fill(x, 5, lane=off.lanes[0])
    second = off.get(x, lane=off.lanes[1])
    assert not first.done()
    words.array[1] = 1
    assert ((await first)[0], (await second)[0]) == (102, 5)


# Copies of any shape: what the host device cannot show.


@contextmanager
def primary_context() -> Iterator[Any]:
    """Make the driver's entry points usable on this thread."""
    from cuda.bindings import driver

    status, context = driver.cuDevicePrimaryCtxRetain(0)
    assert int(status) == 0
    driver.cuCtxPushCurrent(context)
    try:
        yield driver
    finally:
        driver.cuCtxPopCurrent()
        driver.cuDevicePrimaryCtxRelease(0)


@pytest.mark.parametrize("kind", ["pitched", "managed"])
async def test_memory_of_others(off: ao.Offload, kind: str) -> None:
    """Rows of pitched and of managed memory are copied in each direction, and no byte between them."""
    height, width = 33, 130
    with primary_context() as driver:
        if kind == "pitched":
            status, address, pitch = driver.cuMemAllocPitch(width, height, 4)
        else:
            pitch = 200
            flags = driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value
            status, address = driver.cuMemAllocManaged(pitch * height, flags)
    assert int(status) == 0
    try:
        nbytes = int(pitch) * height
        whole = ao.Buffer.from_pointer(int(address), nbytes)
        rows = ao.Buffer.from_pointer(int(address), nbytes, whole, shape=(height, width), strides=(int(pitch), 1))
        data = np.random.default_rng(0).integers(0, 256, (height, 2 * width), np.uint8)
        expected = np.full((height, int(pitch)), 0xA5, np.uint8)
        expected[:, :width] = data[:, ::2]
        pinned = await off.pinned((height, 2 * width), np.uint8)
        other = await off.put(data)
        pinned.array[:, :width] = data[:, ::2]
        for source, extent in ((data[:, ::2], None), (other[:, ::2], None), (pinned, (height, width))):
            off.fill(whole, 0xA5)
            off.copy(rows, source, extent)
            assert np.array_equal(await off.get(whole), expected.reshape(-1))
            assert np.array_equal(await off.get(rows), data[:, ::2])
        pinned.array[:] = 0
        await off.copy(pinned, rows, (height, width))
        assert np.array_equal(pinned.array[:, :width], data[:, ::2])
        assert not pinned.array[:, width:].any()
    finally:
        await off.drain()
        with primary_context() as driver:
            assert int(driver.cuMemFree(address)[0]) == 0


async def test_box_at_the_end_of_memory(off: ao.Offload) -> None:
    """A box whose last row is the end of an allocation is one copy, although its last slice is not whole."""
    shape = (64, 96, 2048)  # 48 MiB: an allocation of its own, whose end is the end of what is mapped
    data = np.random.default_rng(0).integers(0, 2**32, shape, np.uint32)
    whole, pinned = await off.put(data), await off.pinned(shape, np.uint32)
    part = (slice(1, None), slice(90, None), slice(2000, None))
    small = off.zeros((63, 6, 48), np.uint32)
    await off.copy(small, whole[part])
    assert np.array_equal(await off.get(small), data[part])
    await off.fill(whole[part], 7)
    await off.copy(pinned, whole[part], (63, 6, 48))
    assert (pinned.array[:63, :6, :48] == 7).all()
    data[part] = 7
    assert np.array_equal(await off.get(whole), data)


async def test_rows_as_far_apart_as_they_may_be(off: ao.Offload) -> None:
    """Rows beyond the largest pitch are copied all the same, one by one."""
    if (pitch := off.properties.max_pitch) * 4 > off.properties.total_bytes:
        pytest.skip("the device is too small for rows so far apart")
    whole = off.empty(2 * pitch + 1024, np.uint8)
    for distance in (pitch, pitch + 1):
        rows = ao.Buffer.from_pointer(whole.address, whole.nbytes, whole, shape=(3, 16), strides=(distance, 1))
        data = np.random.default_rng(distance).integers(0, 256, (3, 16), np.uint8)
        off.copy(rows, data)
        assert np.array_equal(await off.get(rows), data)
        assert np.array_equal(await off.get(whole[distance : distance + 16]), data[1])
