"""Copies and fills: staging that is never reused too soon, large copies in pieces, cancelling in the middle."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from aiooffload.drivers.mapped import MappedMemory
from aiooffload.engine.copies import INLINE_NBYTES, LARGE_BLOCKS, PIECE_NBYTES, SMALL_BLOCKS, Staging
from tests.kernels import SpyDevice, nothing, rig, turns, until

SIZES = (0, 1, 255, INLINE_NBYTES - 1, INLINE_NBYTES, INLINE_NBYTES + 1, PIECE_NBYTES, 2 * PIECE_NBYTES + 3)


def pattern(nbytes: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize("nbytes", SIZES)
async def test_round_trip(device_label: str, nbytes: int) -> None:
    """put and get give back every byte, for sizes around each limit."""
    async with rig(device_label) as r:
        data = pattern(nbytes)
        buffer = await r.off.put(data)
        assert np.array_equal(await r.off.get(buffer), data)
        out = np.zeros(nbytes, np.uint8)
        assert await r.off.get(buffer, out=out) is out
        assert np.array_equal(out, data)


@pytest.mark.all_loops
async def test_large_copy_while_the_loop_works(device_label: str) -> None:
    """A copy of many pieces goes on while the loop runs other callbacks, and is right."""
    async with rig(device_label) as r:
        data, count = pattern(8 * PIECE_NBYTES + 5), 0
        op = r.off.put(data)
        while not op.done():
            count += 1
            await asyncio.sleep(0)
        assert count > 3
        assert np.array_equal(await r.off.get(op.result()), data)


@pytest.mark.parametrize("count", [SMALL_BLOCKS // 2, SMALL_BLOCKS + LARGE_BLOCKS + 20])
async def test_staging_is_not_reused_before_its_copy_is_done(device_label: str, count: int) -> None:
    """Puts that queue behind a held lane keep their data, also when there are more of them than blocks."""
    async with rig(device_label, lanes=1, lane_depth=200) as r:
        gate = await r.hold()
        sources = [np.full(1000, i, np.uint32) for i in range(count)]
        puts = [r.off.put(source) for source in sources]
        await turns()
        gate.open()
        for source, put in zip(sources, puts, strict=True):
            assert np.array_equal(await r.off.get(await put), source)


async def test_gets_are_not_mixed_up(device_label: str) -> None:
    """More gets than blocks behind a held lane each deliver their own buffer."""
    async with rig(device_label, lanes=1, lane_depth=200) as r:
        buffers = [await r.off.put(np.full(500, i, np.uint32)) for i in range(SMALL_BLOCKS + LARGE_BLOCKS + 20)]
        gate = await r.hold()
        gets = [r.off.get(buffer) for buffer in buffers]
        await turns()
        gate.open()
        for i, get in enumerate(gets):
            assert np.array_equal(await get, np.full(500, i, np.uint32))


async def test_small_source_is_read_at_once(device_label: str) -> None:
    """What a small put takes is what the array held when it was submitted."""
    async with rig(device_label, lanes=1) as r:
        gate = await r.hold()
        source = np.full(10, 1, np.uint8)
        put = r.off.put(source)
        source[:] = 2
        gate.open()
        assert (await r.off.get(await put)).tolist() == [1] * 10


@pytest.mark.parametrize("nbytes", [100, PIECE_NBYTES * (LARGE_BLOCKS + 2)])
async def test_held_lane_starves_no_other(device_label: str, nbytes: int) -> None:
    """Copies on a free lane complete while a held lane has as many as it likes waiting."""
    async with rig(device_label, lanes=2, lane_depth=200) as r:
        gate = await r.hold(r.off.lanes[0])
        waiting = [r.off.put(pattern(nbytes, i), lane=r.off.lanes[0]) for i in range(100 if nbytes == 100 else 1)]
        await turns(200)
        data = pattern(nbytes, 7)
        async with asyncio.timeout(3):
            buffer = await r.off.put(data, lane=r.off.lanes[1])
            assert np.array_equal(await r.off.get(buffer, lane=r.off.lanes[1]), data)
        gate.open()
        for put in waiting:
            await put


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_large_copy_keeps_the_order_of_its_buffer(device_label: str, direction: str) -> None:
    """What is submitted after a copy of many pieces sees all of it, and what was before is seen by it."""
    async with rig(device_label, lanes=4) as r:
        nbytes = 3 * PIECE_NBYTES
        buffer = r.off.zeros(nbytes, np.uint8)
        if direction == "in":
            r.off.fill(buffer, 1)
            r.off.copy(buffer, np.full(nbytes, 2, np.uint8), lane=r.off.lanes[1])
            assert (await r.off.get(buffer, lane=r.off.lanes[2]) == 2).all()
        else:
            r.off.fill(buffer, 1, lane=r.off.lanes[0])
            get = r.off.get(buffer, lane=r.off.lanes[1])
            r.off.fill(buffer, 2, lane=r.off.lanes[2])
            assert (await get == 1).all()
            assert (await r.off.get(buffer) == 2).all()


@pytest.mark.parametrize("direction", ["in", "out"])
@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_large_copy_stopped_in_the_middle(device_label: str, direction: str, how: str) -> None:
    """A copy whose first pieces are on the device stops there, gives its blocks back, and later ones are right."""
    async with rig(device_label, lanes=1) as r:
        nbytes = (LARGE_BLOCKS + 4) * PIECE_NBYTES  # more pieces than blocks: it cannot be through
        buffer = r.off.empty(nbytes, np.uint8)
        await r.off.drain()
        gate = await r.hold()
        host = pattern(nbytes)
        options: dict[str, Any] = {}
        op = r.off.copy(buffer, host, **options) if direction == "in" else r.off.copy(host, buffer, **options)
        await until(lambda: r.off.stats()["in_flight"] > 1, "a piece is on the device")
        if how == "cancel":
            assert op.cancel()
        else:
            assert r.off._engine is not None
            r.off._engine.cancel(op, ao.OffloadTimeout("late"))
        await turns()
        assert not op.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else TimeoutError):
            await op
        assert op.cancelled() == (how == "cancel")
        for seed in range(3):
            data = pattern(nbytes, seed)
            r.off.copy(buffer, data)
            assert np.array_equal(await r.off.get(buffer), data)


async def test_large_copy_cancelled_before_its_turn(device_label: str) -> None:
    """A large copy that still waits for its lane ends at once."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.hold()
        waiting = r.launch(nothing)
        op = r.off.put(pattern(PIECE_NBYTES))
        assert op.cancel()
        assert op.cancelled()
        r.open_all()
        await waiting


async def test_piece_that_the_driver_refuses() -> None:
    """When a piece fails the whole copy fails, once no piece is in flight, and the next one works."""
    device = SpyDevice()
    async with rig(device, lanes=2) as r:
        buffer = r.off.empty(3 * PIECE_NBYTES, np.uint8)
        device.failures["enqueue_copy"] = ao.DriverError("no copy engine")
        with pytest.raises(ao.DriverError, match="copy engine"):
            await r.off.copy(buffer, pattern(buffer.nbytes))
        device.failures.clear()
        data = pattern(buffer.nbytes, 1)
        await r.off.copy(buffer, data)
        assert np.array_equal(await r.off.get(buffer), data)


async def test_memory_of_a_stopped_copy_is_kept_until_its_pieces_are_done() -> None:
    """The buffer of a copy that was cancelled in the middle is not freed under its last pieces."""
    async with rig(HostDevice(poison=True), lanes=1) as r:
        nbytes = (LARGE_BLOCKS + 2) * PIECE_NBYTES
        gate = await r.hold()
        op = r.off.put(np.full(nbytes, 7, np.uint8))
        before = r.off.stats()["buffers"]
        await until(lambda: r.off.stats()["in_flight"] > 1)
        op.cancel()
        await turns()
        assert r.off.stats()["buffers"] == before
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await op
        del op
        await until(lambda: r.off.stats()["buffers"] == before - 1)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        *((np.dtype(kind), 3) for kind in "bBhHiIlLqQ"),
        *((np.dtype(kind), -2.5) for kind in "efd"),
        (np.dtype(np.complex64), 1 + 2j),
        (np.dtype(np.complex128), 1 - 2j),
        (np.dtype(bool), True),
        (np.dtype(np.float64), -0.0),
        (np.dtype("M8[s]"), np.datetime64("2026-11-30", "s")),
        (np.dtype([("a", "<i4"), ("b", "<f4")]), (1, 2.5)),
    ],
    ids=str,
)
async def test_fill(device_label: str, dtype: np.dtype[Any], value: Any) -> None:
    """fill sets every element, of every width that a device can fill."""
    async with rig(device_label, load=False) as r:
        buffer = r.off.zeros(37, dtype)
        assert await r.off.fill(buffer[1:36], value) is None
        expected = np.zeros(37, dtype)
        expected[1:36] = value
        assert (await r.off.get(buffer)).tobytes() == expected.tobytes()


async def test_fill_of_nothing_and_of_odd_widths(device_label: str) -> None:
    """An empty buffer can be filled, and one of odd width with zeros."""
    async with rig(device_label, load=False) as r:
        await r.off.fill(r.off.empty(0, np.float32), 1)
        buffer = await r.off.put(np.array([(1, 2), (3, 4)], "i4,i1"))
        await r.off.fill(buffer, np.zeros((), buffer.dtype)[()])
        assert not any((await r.off.get(buffer)).tobytes())
        with pytest.raises(ao.UsageError, match="zeros only"):
            r.off.fill(buffer, (1, 1))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (np.uint8, 300), (np.uint8, -1), (np.int32, "x"), (np.int32, 2.5), (np.float32, [1, 2]),
        (np.float32, [1, 2, 3, 4]), (np.uint8, np.zeros(3)), (np.float32, 1e300), (np.float32, 1j),
    ],
    ids=str,
)  # fmt: skip
async def test_fill_with_what_does_not_fit(device_label: str, dtype: Any, value: Any) -> None:
    """A value that the dtype cannot hold, or more than one value, raises UsageError and changes nothing."""
    async with rig(device_label, load=False) as r:
        buffer = r.off.zeros(6, dtype)
        with pytest.raises(ao.UsageError):
            r.off.fill(buffer, value)
        assert not (await r.off.get(buffer)).any()


async def test_copy_in_all_directions(device_label: str) -> None:
    """copy goes between arrays, pinned arrays and buffers, and awaits to None."""
    async with rig(device_label) as r:
        data = pattern(1000)
        a, b = r.off.empty(1000, np.uint8), r.off.empty((10, 100), np.uint8)
        pinned, out = await r.off.pinned(1000, np.uint8), np.zeros(1000, np.uint8)
        for dst, src in ((a, data), (b, a), (pinned, b), (a, pinned), (out, a)):
            assert await r.off.copy(dst, src) is None
        assert np.array_equal(out, data)
        await r.off.copy(a[:400], a[600:])
        expected = data.copy()
        expected[:400] = data[600:]
        assert np.array_equal(await r.off.get(a), expected)


async def test_pinned_needs_no_staging() -> None:
    """A copy of a pinned array of any size is one copy of the driver's."""
    device = SpyDevice()
    async with rig(device) as r:
        pinned = await r.off.pinned(4 * PIECE_NBYTES, np.uint8)
        device.calls.clear()
        buffer = await r.off.put(pinned)
        await r.off.get(buffer, out=pinned)
        assert device.calls.count("enqueue_copy") == 2


async def test_staging_hands_blocks_out_in_order() -> None:
    """Whoever asks first gets the next block; one that gave up is passed over, and a block is never lost."""
    staging = Staging(MappedMemory(2 * 4096), 4096)
    first, second = staging.take_now(), staging.take_now()
    assert first is not None
    assert second is not None
    assert staging.take_now() is None
    waits = [asyncio.ensure_future(staging.take()) for _ in range(3)]
    await turns(3)
    waits[0].cancel()
    del first
    await turns(3)
    assert [wait.done() for wait in waits] == [True, True, False]
    waits[2].cancel()
    await turns(3)
    del second
    waits.clear()
    blocks = [staging.take_now(), staging.take_now()]
    assert None not in blocks
    assert staging.take_now() is None
