"""Buffers as arrays: shape, slices, views, closing."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload import buffer as buffer_module
from aiooffload.buffer import Allocation, Lease
from aiooffload.drivers.host.memory import HostBlock
from tests.kernels import Rig, hold_write, rig, saxpy, turns, until


def make(shape: tuple[int, ...], dtype: Any = np.float32) -> tuple[ao.Buffer, np.ndarray[Any, Any]]:
    """A buffer in host memory and an array of the same content."""
    array = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    block = HostBlock(array.nbytes)
    assert block.host_array is not None
    block.host_array[:] = array.reshape(-1).view(np.uint8)
    return ao.Buffer(Allocation(Lease(block, lambda _: None), None), 0, shape, array.dtype), array


def test_attributes() -> None:
    """Shape, dtype, size, length and number of dimensions are NumPy's."""
    buffer, array = make((3, 4, 5), np.int16)
    assert (buffer.shape, buffer.dtype, buffer.nbytes) == (array.shape, array.dtype, array.nbytes)
    assert (buffer.size, buffer.ndim, len(buffer)) == (array.size, array.ndim, len(array))
    assert not buffer.closed
    assert repr(buffer) == "<aiooffload.Buffer int16 (3, 4, 5)>"
    scalar, _ = make(())
    assert (scalar.size, scalar.ndim) == (1, 0)
    with pytest.raises(TypeError):
        len(scalar)


@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple),
    start=st.none() | st.integers(-8, 8),
    stop=st.none() | st.integers(-8, 8),
)
def test_slices_are_numpys(shape: tuple[int, ...], start: int | None, stop: int | None) -> None:
    """A slice of step 1 is the slice that NumPy gives, and so is a slice of it."""
    buffer, array = make(shape)
    part, expected = buffer[start:stop], array[start:stop]
    assert part.shape == expected.shape
    assert np.array_equal(part.host_view(True), expected)
    assert np.array_equal(part[1:].host_view(True), expected[1:])
    assert part[...] is part


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple), index=st.integers(-6, 6))
def test_indices_are_numpys(shape: tuple[int, ...], index: int) -> None:
    """An index gives the row that NumPy gives, or raises IndexError where NumPy does."""
    buffer, array = make(shape)
    if -shape[0] <= index < shape[0]:
        assert np.array_equal(buffer[index].host_view(True), array[index])
        assert np.array_equal(buffer[np.int64(index)].host_view(True), array[index])
    else:
        with pytest.raises(IndexError):
            buffer[index]


keys = st.one_of(
    st.integers(-5, 5),
    st.builds(slice, *(st.none() | st.integers(-7, 7) for _ in range(2)), st.none() | st.integers(1, 4)),
    st.just(...),
)


@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    key=st.lists(keys, max_size=4).map(tuple) | keys,
    again=st.lists(keys, max_size=2).map(tuple),
)
def test_basic_indexing_is_numpys(shape: tuple[int, ...], key: Any, again: Any) -> None:
    """Any tuple of indices, slices and an Ellipsis gives what NumPy gives, also of what they gave."""
    buffer, array = make(shape)
    for one in (key, again):
        try:
            expected = array[(*one, ...) if isinstance(one, tuple) and ... not in one else one]
        except IndexError:
            with pytest.raises(IndexError):
                buffer[one]
            return
        expected = np.asarray(expected)
        buffer, array = buffer[one], expected
        assert (buffer.shape, buffer.nbytes) == (expected.shape, expected.nbytes)
        assert buffer.c_contiguous == expected.flags.c_contiguous
        assert np.array_equal(buffer.host_view(True), expected)
        if expected.size:
            steps = zip(buffer.strides, expected.strides, expected.shape, strict=True)
            assert all(mine == numpys for mine, numpys, length in steps if length > 1)
            assert buffer.host_view(True).ctypes.data == buffer.address
            assert buffer.allocation.address <= buffer.address


def test_slices_that_are_refused() -> None:
    """A step below 1, an index too deep or of another kind raise."""
    buffer, _ = make((6,))
    with pytest.raises(ao.UsageError, match="step above 0"):
        buffer[::-1]
    with pytest.raises(ValueError, match="zero"):
        buffer[::0]
    with pytest.raises(IndexError):
        buffer[0][0]
    with pytest.raises(IndexError):
        buffer[..., ...]
    for key in ("a", 1.5, (0, 0), None, True, np.zeros(6, bool)):
        with pytest.raises((TypeError, ao.UsageError, IndexError)):
            buffer[key]  # type: ignore[index]


def test_views_of_what_is_not_contiguous() -> None:
    """The item size can change where the last dimension is contiguous; no other shape can be taken."""
    buffer, array = make((4, 6), np.float32)
    part, expected = buffer[::2, 2:4], array[::2, 2:4]
    assert np.array_equal(part.view(np.int32).host_view(True), expected.view(np.int32))
    assert np.array_equal(part.view(np.uint8).host_view(True), expected.view(np.uint8))
    assert np.array_equal(part.view(np.float64).host_view(True), expected.view(np.float64), equal_nan=True)
    assert np.array_equal(buffer[:, ::2].view(np.int32).host_view(True), array[:, ::2].view(np.int32))
    for refused in (lambda: buffer[:, ::2].view(np.uint16), lambda: part.reshape(4), lambda: buffer[0, ::2].reshape(3)):
        with pytest.raises(ao.UsageError, match="contiguous buffer first"):
            refused()
    assert buffer[1:3].reshape(12).shape == (12,)


def test_iteration_ends() -> None:
    """Iterating goes over the rows and ends."""
    buffer, array = make((3, 2))
    assert [row.host_view(True).tolist() for row in buffer] == array.tolist()


@pytest.mark.parametrize(("shape", "dtype", "new"), [((4,), "f4", "i4"), ((3, 4), "i2", "u1"), ((2, 8), "u1", "f8")])
def test_views_are_numpys(shape: tuple[int, ...], dtype: str, new: str) -> None:
    """view() takes the same bytes as another dtype, as NumPy does."""
    buffer, array = make(shape, dtype)
    assert np.array_equal(buffer.view(new).host_view(True), array.view(new), equal_nan=True)
    assert buffer.view(new).nbytes == buffer.nbytes


@pytest.mark.parametrize(
    ("shape", "dtype", "new"),
    [((3,), "u1", "i4"), ((), "f4", "u1"), ((4,), "f8", object), ((4,), "u1", "V0"), ((4,), "u1", [("a", object)])],
)
def test_views_that_are_refused(shape: tuple[int, ...], dtype: str, new: Any) -> None:
    """Bytes that do not divide, objects and items of no size raise UsageError."""
    with pytest.raises(ao.UsageError):
        make(shape, dtype)[0].view(new)


def test_reshape() -> None:
    """reshape() keeps the elements; another size or a negative length raises UsageError."""
    buffer, array = make((3, 4))
    assert np.array_equal(buffer.reshape(2, 6).host_view(True), array.reshape(2, 6))
    assert make((1,))[0].reshape().shape == ()
    for shape in ((5,), (-1,), (-3, -4)):
        with pytest.raises(ao.UsageError):
            buffer.reshape(*shape)


def test_closing_closes_every_slice() -> None:
    """After close() the buffer and all its slices raise ClosedError; closing twice does no harm."""
    buffer, _ = make((4,))
    part = buffer[1:]
    with buffer as same:
        assert same is buffer
    buffer.close()
    assert part.closed
    assert "closed" in repr(part)
    for use in (
        lambda: part.address,
        lambda: part[0],
        lambda: part.view("u1"),
        lambda: part.reshape(3, 1),
        lambda: part.host_view(True),
    ):
        with pytest.raises(ao.ClosedError):
            use()


def test_read_only_views() -> None:
    """host_view(True) cannot be written, host_view(False) can, and both are the same memory."""
    buffer, _ = make((4,))
    with pytest.raises(ValueError, match="read-only"):
        buffer.host_view(True)[0] = 1
    buffer.host_view(False)[0] = 9
    assert buffer.host_view(True)[0] == 9


def test_lease_gives_back_once() -> None:
    """A lease gives its block back when its last holder lets go."""
    back: list[int] = []
    first = Lease(3, back.append)
    second = first
    del first
    assert back == []
    del second
    assert back == [3]


async def test_slices_on_the_device(device_label: str) -> None:
    """Slices, views and reshapes name the right bytes on the device."""
    async with rig(device_label, load=False) as r:
        array = np.arange(24, dtype=np.int32).reshape(4, 6)
        buffer = await r.off.put(array)
        assert np.array_equal(await r.off.get(buffer[1:3]), array[1:3])
        assert np.array_equal(await r.off.get(buffer[-1]), array[-1])
        assert np.array_equal(await r.off.get(buffer.view(np.uint8)), array.view(np.uint8))
        r.off.fill(buffer.reshape(24)[5:7], -1)
        array.reshape(-1)[5:7] = -1
        assert np.array_equal(await r.off.get(buffer), array)
        assert buffer.address % 256 == 0


async def test_strided_slices_on_the_device(device_label: str) -> None:
    """Slices with steps and in several dimensions can be read, written and filled on the device."""
    async with rig(device_label, load=False) as r:
        array = np.arange(24 * 5, dtype=np.int32).reshape(5, 4, 6)
        buffer = await r.off.put(array)
        assert np.array_equal(await r.off.get(buffer[1:4, 1, ::2]), array[1:4, 1, ::2])
        r.off.copy(buffer[::2, :2, 3:], np.full((3, 2, 3), -1, np.int32))
        r.off.fill(buffer[..., 0], -2)
        array[::2, :2, 3:], array[..., 0] = -1, -2
        assert np.array_equal(await r.off.get(buffer), array)


async def test_strided_argument_of_a_host_kernel() -> None:
    """A host kernel gets a strided buffer as a NumPy array with its strides."""
    async with rig() as r:
        y, x = r.off.zeros((4, 3), np.float32), await r.off.put(np.arange(8, dtype=np.float32))
        await r.launch(saxpy, 2.0, x[::2], y[:, 1], 4)
        assert (await r.off.get(y)).tolist() == [[0, 0, 0], [0, 4, 0], [0, 8, 0], [0, 12, 0]]


# Memory of somebody else.


class Owner:
    """Keeps an allocation; may be collected like the owner of any memory."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory


async def owned(r: Rig, count: int = 1, wrap: Any = Owner) -> tuple[Any, int]:
    """Return an owner of ``count`` cleared words of device memory, and their address."""
    memory = await r.off.put(np.zeros(count, np.uint64))
    return wrap(memory), memory.address


async def test_pointer_is_read_and_written(device_label: str) -> None:
    """A Buffer on a pointer is used like any other, as an argument, too; shape, dtype and a pitch are the program's."""
    async with rig(device_label) as r:
        owner, address = await owned(r, 12)
        rows = ao.Buffer.from_pointer(address + 8, 80, owner, shape=(3, 4), dtype=np.float32, strides=(32, 4))
        x = await r.off.put(np.arange(4, dtype=np.float32))
        await r.off.launch(saxpy, grid=1, block=32, args=(2.0, x, rows[1], 4))
        expected = np.zeros((3, 8), np.float32)
        expected[1, :4] = 2 * np.arange(4)
        assert np.array_equal(await r.off.get(rows), expected[:, :4])
        whole = ao.Buffer.from_pointer(address, 96, owner)
        assert (whole.shape, whole.dtype, rows.c_contiguous) == ((96,), np.uint8, False)
        flat = (await r.off.get(whole)).view(np.float32)
        assert np.array_equal(flat[2:22], expected.reshape(-1)[:20])
        assert not flat[:2].any()


@pytest.mark.parametrize(
    ("ptr", "nbytes", "options", "message"),
    [
        (-1, 4, {}, "address"),
        (4096, -4, {}, "address"),
        (4096.0, 4, {}, "address"),
        (None, 4, {}, "address"),
        (2**64 - 2, 4, {}, "address"),
        (0, 4, {}, "null"),
        (4096, 6, {"dtype": np.float32}, "need a shape"),
        (4096, 8, {"dtype": object}, "objects"),
        (4096, 8, {"dtype": "V0"}, "objects"),
        (4096, 8, {"shape": (3, 3)}, "leaves its allocation"),
        (4096, 8, {"shape": (2, 2), "strides": (7, 1)}, "leaves its allocation"),
        (4096, 8, {"shape": -2}, "describe"),
        (4096, 8, {"shape": (2.5,)}, "integer"),
        (4096, 8, {"shape": (2, 2), "strides": (4,)}, "describe"),
        (4096, 8, {"shape": (2, 2), "strides": (0, 1)}, "above 0"),
        (4096, 8, {"shape": (2,), "strides": (-1,)}, "above 0"),
        (4096, 8, {"strides": (1,)}, "need a shape"),
    ],
)
def test_pointers_that_are_refused(ptr: Any, nbytes: int, options: dict[str, Any], message: str) -> None:
    """What describes no array within the memory raises UsageError."""
    with pytest.raises(ao.UsageError, match=message):
        ao.Buffer.from_pointer(ptr, nbytes, **options)


async def test_empty_pointer(device_label: str) -> None:
    """Memory of no bytes may be anywhere, and copies of it do nothing."""
    async with rig(device_label, load=False) as r:
        nothing = ao.Buffer.from_pointer(0, 0, dtype=np.float32, shape=(0, 3))
        assert (await r.off.get(nothing)).shape == (0, 3)
        await r.off.copy(nothing, np.empty((0, 3), np.float32))


async def test_owner_lives_as_long_as_what_uses_it(device_label: str) -> None:
    """The owner is held by Buffers and by operations in flight, then let go; so is its history."""
    async with rig(device_label, lanes=1) as r:
        owner, address = await owned(r)
        alive, entries = weakref.ref(owner), len(buffer_module._shared)
        word = ao.Buffer.from_pointer(address, 8, owner, dtype=np.uint64)
        part = word[:]
        del owner, word
        gate = r.gate()
        op = r.launch(hold_write, gate.address, part, 7)
        del part
        gc.collect()
        await until(lambda: gate.started)
        assert alive() is not None
        assert len(buffer_module._shared) == entries + 1
        gate.open()
        await op
        del op
        await turns()
        gc.collect()
        assert alive() is None
        assert len(buffer_module._shared) == entries


@pytest.mark.parametrize(
    "wrap", [Owner, lambda memory: [memory], lambda memory: (memory,)], ids=["object", "list", "tuple"]
)
@pytest.mark.parametrize("keep", [True, False])
async def test_pointers_of_one_owner_are_ordered(device_label: str, wrap: Any, keep: bool) -> None:
    """Buffers of the same owner come after one another, on other lanes and when the first is gone, too."""
    async with rig(device_label, lanes=2) as r:
        owner, address = await owned(r, wrap=wrap)
        first = ao.Buffer.from_pointer(address, 8, owner, dtype=np.uint64)
        gate = r.gate()
        write = r.launch(hold_write, gate.address, first, 7, lane=r.off.lanes[0])
        if not keep:
            del first
            gc.collect()
        second = ao.Buffer.from_pointer(address, 8, owner, dtype=np.uint64)
        get = r.off.get(second, lane=r.off.lanes[1])
        await turns()
        assert not get.done()
        gate.open()
        assert (await get).tolist() == [7]
        await write


async def test_pointers_of_others_are_not_ordered(device_label: str) -> None:
    """Different owners, even equal ones, and pointers without one wait for nobody."""
    async with rig(device_label, lanes=2) as r:
        memory = await r.off.put(np.zeros(4, np.uint64))
        owners: list[Any] = [[1], [1], None, None]
        words = [
            ao.Buffer.from_pointer(memory.address + 8 * i, 8, owner, dtype=np.uint64) for i, owner in enumerate(owners)
        ]
        gate = r.gate()
        write = r.launch(hold_write, gate.address, words[0], 7, lane=r.off.lanes[0])
        another = r.launch(hold_write, r.gate().address, words[2], 7, lane=r.off.lanes[0])
        async with asyncio.timeout(3):
            for word in (words[1], words[3]):
                assert (await r.off.get(word, lane=r.off.lanes[1])).tolist() == [0]
        assert not write.done()
        r.open_all()
        await write
        await another


async def test_pointer_into_a_buffer_counts_as_the_buffer(device_label: str) -> None:
    """With a Buffer or a PinnedArray as owner it is ordered like a slice, and closing those frees nothing it is in."""
    async with rig(device_label, lanes=2) as r:
        buffer = r.word(3)
        inside = ao.Buffer.from_pointer(buffer.address, 8, buffer, dtype=np.uint64)
        gate = r.gate()
        r.launch(hold_write, gate.address, buffer, 7, lane=r.off.lanes[0])
        get = r.off.get(inside, lane=r.off.lanes[1])
        live = r.off.stats()["buffers"]
        buffer.close()
        del buffer
        await turns()
        assert not get.done()
        gate.open()
        assert (await get).tolist() == [7]
        assert r.off.stats()["buffers"] == live
        assert (await r.off.get(inside)).tolist() == [7]
        inside.close()
        assert r.off.stats()["buffers"] == live - 1
        closed = r.word()
        closed.close()
        with pytest.raises(ao.ClosedError):
            ao.Buffer.from_pointer(4096, 8, closed)

        pinned = await r.off.pinned(1, np.uint64)
        assert pinned.lease is not None
        device = ao.Buffer.from_pointer(pinned.lease.block.device_address, 8, pinned, dtype=np.uint64)
        gate = r.gate()
        r.launch(hold_write, gate.address, device, 9, lane=r.off.lanes[0])
        word = r.off.empty(1, np.uint64)
        copy = r.off.copy(word, pinned, lane=r.off.lanes[1])
        await turns()
        assert not copy.done()
        gate.open()
        assert await r.read(word) == 9


async def test_pointer_belongs_to_its_first_offload() -> None:
    """It belongs to the Offload that used it first; with the same owner another one is for another Offload."""
    memory = np.zeros(4, np.uint64)

    def make_one() -> ao.Buffer:
        return ao.Buffer.from_pointer(memory.ctypes.data, memory.nbytes, memory, dtype=np.uint64)

    first = make_one()
    async with rig(load=False) as one, rig(load=False) as two:
        await one.off.fill(first, 3)
        with pytest.raises(ao.UsageError, match="another Offload"):
            two.off.get(first)
        assert (await two.off.get(make_one())).tolist() == [3] * 4
        foreign = one.word()
        inside = ao.Buffer.from_pointer(foreign.address, 8, foreign)
        with pytest.raises(ao.UsageError, match="another Offload"):
            two.off.get(inside)
        await one.off.get(inside)
    async with rig(load=False) as three:
        await three.off.fill(make_one(), 4)
    assert memory.tolist() == [4] * 4


async def test_aliases_that_overlap_are_refused(device_label: str) -> None:
    """Overlap is found by address, also between pointers that say nothing of each other."""
    async with rig(device_label, load=False) as r:
        buffer = await r.off.put(np.arange(64, dtype=np.uint8))
        alias = ao.Buffer.from_pointer(buffer.address + 16, 32)
        with pytest.raises(ao.UsageError, match="overlap"):
            r.off.copy(alias, buffer[:32])
        await r.off.copy(alias[:16], buffer[:16])
        assert (await r.off.get(buffer)).tolist() == [*range(16), *range(16), *range(32, 64)]


def test_pointer_before_its_first_use() -> None:
    """Before an Offload used it nobody knows where the memory is: the host cannot view it."""
    word = ao.Buffer.from_pointer(4096, 8)
    with pytest.raises(ao.UsageError, match="cannot reach"):
        word.host_view(True)
    word.close()
    with pytest.raises(ao.ClosedError):
        _ = word.address
