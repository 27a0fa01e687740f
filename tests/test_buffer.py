"""Buffers as arrays: shape, slices, views, closing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload.buffer import Allocation, Lease
from aiooffload.drivers.host.memory import HostBlock
from tests.kernels import rig


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
