"""Copies and fills: staging that is never reused too soon, large copies in pieces, cancelling in the middle."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from aiooffload.drivers.mapped import MappedMemory
from aiooffload.engine import copies as engine_copies
from aiooffload.engine.copies import (
    CALLS_AT_ONCE,
    INLINE_NBYTES,
    LARGE_BLOCKS,
    PIECE_NBYTES,
    PORTION_CALLS,
    PORTIONS_IN_FLIGHT,
    SMALL_BLOCKS,
    Staging,
)
from aiooffload.engine.maintenance import barrier
from aiooffload.rules.copyplan import span
from tests.kernels import SpyDevice, nothing, rig, turns, until
from tests.rules.test_copyplan import Side, side
from tests.rules.test_copyplan import copies as pairs

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
        (np.dtype("S8"), b"ab"),
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
        ("S2", b"abc"), ("i4,f4", (1.5, 2)),
    ],
    ids=str,
)  # fmt: skip
async def test_fill_with_what_does_not_fit(device_label: str, dtype: Any, value: Any) -> None:
    """A value that the dtype cannot hold, or more than one value, raises UsageError and changes nothing."""
    async with rig(device_label, load=False) as r:
        buffer = r.off.zeros(6, dtype)
        with pytest.raises(ao.UsageError):
            r.off.fill(buffer, value)
        assert not any((await r.off.get(buffer)).tobytes())


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


@pytest.mark.all_loops
async def test_staging_takes_back_on_the_loops_thread() -> None:
    """A worker may be the last to let go of a block: whoever waits for one is woken on the loop all the same."""
    staging = Staging(MappedMemory(4096), 4096)
    leases = [staging.take_now()]
    wait = asyncio.ensure_future(staging.take())
    await turns(3)
    thread = threading.Thread(target=leases.clear)
    thread.start()
    await until(lambda: not thread.is_alive())
    await asyncio.wait_for(wait, 5)
    assert staging.take_now() is None
    del wait
    await turns(3)
    assert staging.take_now() is not None


async def test_staging_that_cannot_grow() -> None:
    """Where no more memory can be registered copies share what there is; the next that has to wait tries again."""
    device = SpyDevice()
    async with rig(device) as r:
        data = pattern(2 * LARGE_BLOCKS * PIECE_NBYTES)
        for _ in range(2):
            device.calls.clear()
            device.failures["register"] = ao.OutOfMemoryError("no more memory can be registered")
            buffers = await asyncio.gather(*(r.off.put(data).wait() for _ in range(4)))
            assert "register" in device.calls
            device.failures.clear()
        assert np.array_equal(await r.off.get(buffers[-1]), data)


@pytest.mark.parametrize("direction", ["put", "get"])
async def test_large_copy_before_whose_first_step_everything_ends(direction: str) -> None:
    """A copy in pieces that has not got as far as its first piece ends with the Offload."""
    async with rig("host", lanes=1, bury=True) as r:
        data = pattern(2 * PIECE_NBYTES)
        op: ao.Operation[Any] = r.off.put(data)
        if direction == "get":
            op = r.off.get(await op)
        r.off.terminate()
        with pytest.raises(ao.ClosedError):
            await asyncio.wait_for(op.wait(), 5)


# Any shape.


def run_examples(
    device: str, check: Callable[..., Awaitable[None]], *strategies: st.SearchStrategy[Any], prepare: Any = None
) -> None:
    """Let Hypothesis call ``check(off, *drawn)`` on one Offload, more often than its profile says: each is short."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        off = ao.Offload(device, lanes=3)
        runner.run(off.__aenter__())
        try:
            if prepare is not None:
                prepare(off)

            @settings(max_examples=min(6 * settings.default.max_examples, 1500))
            @given(st.tuples(*strategies))
            def example(drawn: tuple[Any, ...]) -> None:
                runner.run(check(off, *drawn))

            example()
        finally:
            runner.run(off.aclose())


@pytest.fixture(params=["real", "small"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[ao.Offload], None]:
    """With small limits, a few hundred bytes are many pieces, portions and rows too far apart for a call."""
    if request.param == "real":
        return lambda off: None
    small = {"INLINE_NBYTES": 40, "PIECE_NBYTES": 100, "CALLS_AT_ONCE": 1, "PORTION_CALLS": 2}
    for name, value in small.items():
        monkeypatch.setattr(engine_copies, name, value)

    def prepare(off: ao.Offload) -> None:
        assert off._engine is not None
        off._engine.copies._max_pitch = 64

    return prepare


async def on_device(off: ao.Offload, one: Side, content: np.ndarray) -> tuple[ao.Buffer, ao.Buffer]:
    """Return device memory with this content, and in it the elements that ``one`` has."""
    whole = await off.put(content)
    view = one.view
    nbytes = span(view.shape, view.itemsize, view.strides)
    options = {"shape": view.shape, "dtype": view.dtype, "strides": view.strides}
    return whole, ao.Buffer.from_pointer(whole.address + one.offset * (nbytes > 0), nbytes, whole, **options)


async def copy_every_way(off: ao.Offload, sides: tuple[Side, Side], gaps: list[int]) -> None:
    dst, src = sides
    src.memory[:] = np.random.default_rng(1).integers(0, 0xFF, src.memory.size)
    before = dst.memory.copy()
    dst.view[...] = src.view
    after = dst.memory.copy()
    from_whole, source = await on_device(off, src, src.memory)

    # To the device: from there, from pageable and from pinned memory.
    pinned = await off.pinned(tuple(n + gap for n, gap in zip(src.view.shape, gaps, strict=False)), src.view.dtype)
    box = tuple(map(slice, src.view.shape))
    pinned.array[box] = src.view
    for origin in (source, src.view, pinned):
        whole, target = await on_device(off, dst, before)
        off.copy(target, origin, src.view.shape if origin is pinned else None)
        assert (await off.get(whole)).tobytes() == after.tobytes()

    # To the host: pageable, with copy and with get; pinned.
    for get in (lambda: off.copy(dst.view, source), lambda: off.get(source, out=dst.view)):
        dst.memory[:] = before
        await get()
        assert dst.memory.tobytes() == after.tobytes()
    pinned.array.reshape(-1).view(np.uint8)[:] = 0xA5
    expected = pinned.array.copy()
    expected[box] = src.view
    await off.copy(pinned, source, src.view.shape)
    assert pinned.array.tobytes() == expected.tobytes()

    # Into new memory.
    assert (await off.get(source)).tobytes() == src.view.tobytes()
    assert (await off.get(await off.put(src.view))).tobytes() == src.view.tobytes()
    assert (await off.get(from_whole)).tobytes() == src.memory.tobytes()


def test_copies_of_any_shape_are_numpys(device_label: str, limits: Callable[[ao.Offload], None]) -> None:
    """In each direction a copy does what assigning to the view does, and no byte outside the view changes."""
    gaps = st.lists(st.integers(0, 2), min_size=5, max_size=5)
    run_examples(device_label, copy_every_way, pairs(), gaps, prepare=limits)


def fillable() -> st.SearchStrategy[Side]:
    shapes = st.lists(st.sampled_from([0, 1, 2, 3, 4]), max_size=4).map(tuple)
    return st.tuples(shapes, st.sampled_from([1, 2, 4, 8, 16])).flatmap(lambda drawn: side(*drawn))


async def fill_one(off: ao.Offload, one: Side, number: int) -> None:
    itemsize = one.view.itemsize
    dtype = np.dtype("c16" if itemsize == 16 else f"u{itemsize}")
    view = one.view.view(dtype)
    value = dtype.type(number)
    whole, target = await on_device(off, Side(one.memory, view), one.memory)
    off.fill(target, value)
    view[...] = value
    assert (await off.get(whole)).tobytes() == one.memory.tobytes()


def test_fills_of_any_shape_are_numpys(device_label: str, limits: Callable[[ao.Offload], None]) -> None:
    """Filling sets every element and no byte between them, whatever the strides are."""
    run_examples(device_label, fill_one, fillable(), st.integers(0, 200), prepare=limits)


# Driver calls.


def count_calls(device: SpyDevice) -> dict[str, int]:
    """Return how many copies and fills the driver was asked for since the last time."""
    found = Counter(name for name in device.calls if name in ("enqueue_copy", "enqueue_copy_box", "enqueue_fill"))
    device.calls.clear()
    return dict(found)


async def test_one_call_where_one_can_do_it() -> None:
    """Rows and slices are one call between devices and with pinned memory; staged, gaps of the host cost none."""
    device = SpyDevice()
    async with rig(device, load=False) as r:
        off = r.off
        a, b = off.zeros((40, 30, 20), np.int32), off.zeros((40, 30, 20), np.int32)
        host, pinned = np.zeros((40, 30, 20), np.int32), await off.pinned((50, 60, 20), np.int32)
        one, box = {"enqueue_copy": 1}, {"enqueue_copy_box": 1}
        count_calls(device)
        for dst, src, extent, expected in (
            (a, b, None, one),
            (a[3:9], b[30:36], None, one),
            (a[:, 4:8], b[:, 4:8], None, box),
            (a[::2, 4:8, 2:3], b[20:, 3:7, 5:6], None, box),
            (a, b, (5, 6, 7), box),
            (pinned, b, b.shape, box),
            (a, pinned, (1, 2, 3), box),
            (a, host[::-1, ::-1][::-1, ::-1], None, one),
            (a[5], host[:, :20, 3][:30], None, one),
            (a[:20], host[::2], None, one),
            (host[::2], a[:20], None, one),
            (a[1:, :5, ::2], host[1:, :5, ::2], None, box),
            (host[1:, :5, ::2], a[1:, :5, ::2], None, box),
        ):
            await off.copy(dst, src, extent)  # type: ignore[arg-type]
            assert count_calls(device) == expected
        await off.fill(a[:, 4:8, 1:3], 7)
        assert count_calls(device) == {"enqueue_fill": 1, **box}
        await off.put(host.transpose(2, 0, 1))
        assert count_calls(device) == one


class RowsDevice(SpyDevice):
    """A device that has a kernel for rows; what that was asked to copy is in ``copied``."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[tuple[int, ...]] = []

    def rows(self, *box: int) -> Callable[[Any], None]:
        def call(stream: Any) -> None:
            self.copied.append(box)
            stream.enqueue_copy_box(*box)

        return call


async def test_rows_within_the_device_are_a_kernels() -> None:
    """Rows go by the device's kernel where both sides are memory that it allocated, and what is contiguous never."""
    device = RowsDevice()
    async with rig(device, load=False) as r:
        off = r.off
        a, b = await off.put(np.arange(600).reshape(20, 30)), off.zeros((20, 30), np.int64)
        part = ao.Buffer.from_pointer(a.address, a.nbytes, a, shape=a.shape, dtype=a.dtype)
        array = np.zeros((20, 30), np.int64)
        other = ao.Buffer.from_pointer(array.ctypes.data, array.nbytes, array, shape=a.shape, dtype=a.dtype)
        pinned = await off.pinned(a.shape, a.dtype)
        for dst, src, kernels in (
            (b[:, :7], a[:, :7], 1),
            (b[:, 7:], part[:, 7:], 1),
            (other[:, :7], a[:, :7], 0),
            (b[:, :7], other[:, :7], 0),
            (pinned, a[:, :5], 0),
            (b, a, 0),
        ):
            device.copied.clear()
            await off.copy(dst, src, (20, 5) if dst is pinned else None)
            assert len(device.copied) == kernels
        assert np.array_equal(await off.get(b), await off.get(a))
        device.copied.clear()
        await off.fill(b[:, 3:9], 7)
        assert len(device.copied) == 1


async def test_no_kernel_for_rows_beside_one_that_calls() -> None:
    """While a kernel that calls is on the device, which may wait for this very copy, the copy engine does it."""
    device = RowsDevice()
    async with rig(device, load=False) as r:
        a, b = await r.off.put(np.arange(600).reshape(20, 30)), r.off.zeros((20, 30), np.int64)
        barrier.count_calling(1, asyncio.get_running_loop())
        await r.off.copy(b[:, :7], a[:, :7])
        assert not device.copied
        barrier.count_calling(-1, asyncio.get_running_loop())
        await r.off.copy(b[:, 7:], a[:, 7:])
        assert len(device.copied) == 1
        assert np.array_equal(await r.off.get(b), await r.off.get(a))


def transposed(buffer: ao.Buffer) -> ao.Buffer:
    """Return a view of a matrix with its dimensions exchanged; to copy it takes a call for each row."""
    options = {"shape": buffer.shape[::-1], "dtype": buffer.dtype, "strides": buffer.strides[::-1]}
    return ao.Buffer.from_pointer(buffer.address, buffer.nbytes, buffer, **options)


@pytest.mark.parametrize("copies", [1, 5])
async def test_many_calls_do_not_fill_a_lane(copies: int) -> None:
    """Of copies that take thousands of calls only two portions are on a lane at a time; other lanes are free."""
    device = SpyDevice()
    async with rig(device, lanes=2) as r:
        data = np.random.default_rng(0).integers(0, 256, (2000, 300), np.uint8)
        source, other = await r.off.put(data), r.off.empty((300, 400), np.uint8)
        targets = [r.off.empty((300, 2000), np.uint8) for _ in range(copies)]
        gate = await r.hold(r.off.lanes[0])
        device.calls.clear()
        ops = [r.off.copy(target, transposed(source), lane=r.off.lanes[0]) for target in targets]
        await turns(200)
        enqueued = count_calls(device)["enqueue_copy_box"]
        assert enqueued == PORTIONS_IN_FLIGHT * PORTION_CALLS
        assert not any(op.done() for op in ops)
        await r.off.copy(other, transposed(source)[:, :400], lane=r.off.lanes[1])  # 300 calls
        assert np.array_equal(await r.off.get(other, lane=r.off.lanes[1]), data[:400].T)
        gate.open()
        for op, target in zip(ops, targets, strict=True):
            assert await op is None
            assert np.array_equal(await r.off.get(target), data.T)


async def test_fewer_calls_go_at_once() -> None:
    """What takes a few calls is one operation, enqueued whole."""
    device = SpyDevice()
    async with rig(device, lanes=1) as r:
        source, target = r.off.zeros((CALLS_AT_ONCE, 9), np.uint8), r.off.empty((9, CALLS_AT_ONCE), np.uint8)
        await r.hold()
        device.calls.clear()
        op = r.off.copy(target, transposed(source))
        assert count_calls(device) == {"enqueue_copy_box": CALLS_AT_ONCE}
        assert not op.done()


async def test_loop_runs_while_calls_are_many(device_label: str) -> None:
    """A copy of a hundred thousand calls lets other callbacks run in between, and is right."""
    async with rig(device_label, lanes=2) as r:
        assert r.off._engine is not None
        r.off._engine.copies._max_pitch = 1
        data, count = pattern(200_000), 0
        source, target = await r.off.put(data), r.off.zeros(100_000, np.uint8)
        op = r.off.copy(target, source[::2])
        while not op.done():
            count += 1
            await asyncio.sleep(0)
        assert count > 100_000 / PORTION_CALLS / 4
        assert np.array_equal(await r.off.get(target), data[::2])


@pytest.mark.parametrize("direction", ["across", "in", "out"])
async def test_portions_keep_the_order_of_their_buffers(device_label: str, direction: str) -> None:
    """What is submitted after a copy in portions sees all of it, and it sees what was before."""
    async with rig(device_label, lanes=3) as r:
        off, shape = r.off, (500, 400)
        source, target = off.zeros(shape, np.uint8), off.zeros(shape[::-1], np.uint8)
        host = np.zeros(shape[::-1], np.uint8)
        off.fill(source, 1, lane=off.lanes[0])
        off.fill(target, 5, lane=off.lanes[1])
        if direction == "across":
            off.copy(target, transposed(source), lane=off.lanes[2])
            off.fill(source, 2, lane=off.lanes[0])
            assert (await off.get(target, lane=off.lanes[1]) == 1).all()
        elif direction == "in":  # staged in the order of the device, whose rows are apart
            off._engine.copies._max_pitch = 1  # type: ignore[union-attr]
            off.copy(target[:, ::2], np.full((400, 250), 7, np.uint8), lane=off.lanes[2])
            expected = np.full(shape[::-1], 5)
            expected[:, ::2] = 7
            assert np.array_equal(await off.get(target, lane=off.lanes[1]), expected)
        else:
            off._engine.copies._max_pitch = 1  # type: ignore[union-attr]
            get = off.get(target[:, ::2], out=host[:, ::2], lane=off.lanes[2])
            off.fill(target, 6, lane=off.lanes[0])
            await get
            assert (host[:, ::2] == 5).all()
            assert not host[:, 1::2].any()
            assert (await off.get(target) == 6).all()


@pytest.mark.parametrize("direction", ["across", "in", "out"])
async def test_portions_stopped_in_the_middle(device_label: str, direction: str) -> None:
    """A copy in portions that is cancelled ends after those on the device, and the lane works on."""
    async with rig(device_label, lanes=1) as r:
        assert r.off._engine is not None
        source, target = r.off.zeros((3000, 300), np.uint8), r.off.zeros((300, 3000), np.uint8)
        host = np.zeros((300, 3000), np.uint8)
        await r.off.drain()
        r.off._engine.copies._max_pitch = 1
        gate = await r.hold()
        if direction == "across":
            op = r.off.copy(target, transposed(source))
        else:
            small = target[:, ::2]
            op = r.off.copy(small, host[:, ::2]) if direction == "in" else r.off.copy(host[:, ::2], small)
        await until(lambda: r.off.stats()["in_flight"] == 1 + PORTIONS_IN_FLIGHT, "two portions are on the device")
        assert op.cancel()
        await turns()
        assert not op.done()
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await op
        r.off._engine.copies._max_pitch = 2**31 - 1
        data = pattern(900_000).reshape(3000, 300)
        r.off.copy(source, data)
        r.off.copy(target, transposed(source))
        assert np.array_equal(await r.off.get(target), data.T)


@pytest.mark.parametrize("direction", ["across", "in", "out"])
async def test_portion_that_the_driver_refuses(direction: str) -> None:
    """When one call of thousands fails the copy fails with it, once nothing of it is in flight."""
    device = SpyDevice()
    async with rig(device, lanes=1) as r:
        assert r.off._engine is not None
        buffer, other = r.off.zeros((500, 600), np.uint8), r.off.zeros((600, 500), np.uint8)
        host = np.ones((500, 300), np.uint8)
        await r.off.drain()
        r.off._engine.copies._max_pitch = 1
        kept = r.off.stats()["buffers"]
        device.failures["enqueue_copy"] = ao.DriverError("no copy engine")
        pair = {"across": (other, transposed(buffer)), "in": (buffer[:, ::2], host), "out": (host, buffer[:, ::2])}
        with pytest.raises(ao.DriverError, match="copy engine"):
            await r.off.copy(*pair[direction])
        device.failures.clear()
        assert r.off.stats()["in_flight"] == 0
        r.off._engine.copies._max_pitch = 2**31 - 1
        await r.off.copy(buffer[:, ::2], host)
        assert (await r.off.get(buffer)).sum() == host.size
        assert r.off.stats()["buffers"] == kept


async def test_lost_device_ends_a_copy_in_portions() -> None:
    """A device that is lost between two portions ends the copy with DeviceLostError; it does not hang."""
    device = SpyDevice()
    async with rig(device, lanes=1, bury=True) as r:
        source, target = r.off.zeros((3000, 300), np.uint8), r.off.zeros((300, 3000), np.uint8)
        await r.off.drain()
        gate = await r.hold()
        op = r.off.copy(target, transposed(source))
        await until(lambda: r.off.stats()["in_flight"] == 1 + PORTIONS_IN_FLIGHT, "two portions are on the device")
        device.lost = True
        gate.open()
        with pytest.raises(ao.DeviceLostError):
            await op


# Large and strided.


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_large_strided_copies_are_piece_by_piece(direction: str) -> None:
    """A strided array of many pieces goes through blocks of staging, each passed on by one call, in bounded memory."""
    device = SpyDevice()
    async with rig(device, lanes=2) as r:
        data = pattern(9 * PIECE_NBYTES).view(np.float32).reshape(3, -1, 1024)
        whole = r.off.zeros(data.shape, np.float32)
        host, part = data[:, 1:, ::2], whole[:, 1:, ::2]
        blocks = r.off._engine.copies._large._count  # type: ignore[union-attr]
        await r.off.drain()
        count_calls(device)
        expected = np.zeros(data.shape, np.float32)
        expected[:, 1:, ::2] = host
        if direction == "in":
            await r.off.copy(part, host)
            calls = count_calls(device)
            assert (await r.off.get(whole)).tobytes() == expected.tobytes()
        else:
            await r.off.copy(whole, data)
            count_calls(device)
            out = np.zeros(data.shape, np.float32)
            await r.off.copy(out[:, 1:, ::2], part)
            calls = count_calls(device)
            assert out.tobytes() == expected.tobytes()
        # 3 MiB of each of the three slices are two pieces; rows of single elements are one call in three dimensions.
        assert calls == {"enqueue_copy_box": 6}
        assert r.off._engine.copies._large._count == blocks  # type: ignore[union-attr]


async def test_items_larger_than_a_block(device_label: str) -> None:
    """Structs that fit into no block of staging are copied in pieces of bytes, padding included."""
    async with rig(device_label, load=False) as r:
        dtype = np.dtype({"names": ["a"], "formats": ["u1"], "offsets": [5], "itemsize": PIECE_NBYTES + 77})
        data = pattern(4 * dtype.itemsize).view(dtype)
        buffer = await r.off.put(data[::2])
        assert (await r.off.get(buffer)).tobytes() == np.ascontiguousarray(
            data.view(f"V{dtype.itemsize}")[::2]
        ).tobytes()
        out = np.zeros(4, dtype)
        await r.off.get(buffer, out=out[1::2])
        assert out.view(np.uint8).reshape(4, -1)[1::2].tobytes() == data.view(np.uint8).reshape(4, -1)[::2].tobytes()


async def test_padding_of_structs_is_copied(device_label: str) -> None:
    """Bytes between the fields of a struct are copied like the fields."""
    async with rig(device_label, load=False) as r:
        data = pattern(16 * 20).view(np.dtype([("a", "u1"), ("b", "f8")], align=True))
        raw = data.view("V16")
        assert (await r.off.get(await r.off.put(data[::2]))).tobytes() == raw[::2].tobytes()


@pytest.mark.parametrize("nbytes", [1000, 3 * PIECE_NBYTES])
async def test_window_of_an_array_is_a_source(device_label: str, nbytes: int) -> None:
    """Elements of a source may overlap one another; it counts as large by what is copied."""
    async with rig(device_label, load=False) as r:
        data = pattern(nbytes // 1000 + 1000)
        windows = np.lib.stride_tricks.sliding_window_view(data, 1000)[: nbytes // 1000]
        buffer = await r.off.put(windows)
        assert np.array_equal(await r.off.get(buffer), windows)
