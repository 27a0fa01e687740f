"""Arrays to and from other libraries, on the host device by DLPack; with real libraries on a GPU in ``tests/gpu``."""

from __future__ import annotations

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload._native import dlpack_export
from aiooffload.interchange import CPU, CUDA, describe
from tests.kernels import add, hold_write, nothing, rig, saxpy

DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "?"]


class Interface:
    """What some library's array on a GPU says of itself."""

    def __init__(self, **changed: Any) -> None:
        self.interface = {"version": 3, "shape": (2, 3), "typestr": "<f4", "data": (0x1000, False), "strides": None}
        self.interface |= changed

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.interface


class Foreign:
    """An array that only speaks DLPack."""

    def __init__(self, array: np.ndarray[Any, Any], device: tuple[int, int] = (CPU, 0)) -> None:
        self.array = array
        self.device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


# Ours to others


@pytest.mark.parametrize("dtype", DTYPES)
async def test_numpy_takes_our_buffers(dtype: str) -> None:
    """NumPy's array of a buffer is its memory, with shape, dtype and strides."""
    async with rig("host", load=False) as r:
        buffer = await r.off.put(np.arange(60).reshape(3, 4, 5).astype(dtype))
        for view in (buffer, buffer[1:, ::2], buffer[0, 0, 0], buffer[:0]):
            array = np.from_dlpack(view)
            assert (array.shape, array.dtype) == (view.shape, view.dtype)
            assert np.array_equal(array, view.host_view(True))
        array = np.from_dlpack(buffer)
        if array.flags.writeable:
            array[...] = 1
            assert (await r.off.get(buffer) == np.ones(60).reshape(3, 4, 5).astype(dtype)).all()
        assert buffer.__dlpack_device__() == (CPU, 0)


async def test_memory_lives_as_long_as_the_consumer_holds_it() -> None:
    """Closing the buffer frees nothing that another library has; dropping an unused capsule frees it."""
    async with rig("host", load=False) as r:
        buffer = await r.off.put(np.arange(100))
        live = r.off.stats()["buffers"]
        array = np.from_dlpack(buffer)
        unused = buffer.__dlpack__(max_version=(1, 0)), buffer.__dlpack__()
        buffer.close()
        gc.collect()
        assert array.tolist() == list(range(100))
        assert r.off.stats()["buffers"] == live
        del unused
        assert r.off.stats()["buffers"] == live
        del array
        assert r.off.stats()["buffers"] == live - 1


async def test_buffer_in_use_is_not_shared() -> None:
    """On the host device nobody can wait for work in flight: BufferError, until that is done."""
    async with rig("host") as r:
        word, gate = r.word(1), r.gate()
        await r.off.drain()
        op = r.launch(hold_write, gate.address, word, 5)
        with pytest.raises(BufferError, match="await it first"):
            np.from_dlpack(word)
        gate.open()
        await op
        assert np.from_dlpack(word).tolist() == [5]
        future = asyncio.get_running_loop().create_future()
        held = r.launch(add, word, 1, after=[future])
        with pytest.raises(BufferError, match="await it first"):
            word.__dlpack__()
        future.set_result(None)
        await held


async def test_what_cannot_be_shared() -> None:
    """Copies, other devices, dtypes that DLPack has not, closed buffers, memory nobody has used yet."""
    async with rig("host", load=False) as r:
        buffer = r.off.zeros(4, np.float32)
        await r.off.drain()
        for options in ({"copy": True}, {"dl_device": (CUDA, 0)}):
            with pytest.raises(BufferError, match="never copied"):
                buffer.__dlpack__(**options)  # type: ignore[arg-type]
        for dtype in ("S4", "M8[s]", ">i4", [("a", "i4")]):
            with pytest.raises(BufferError, match="cannot describe"):
                r.off.empty(2, dtype).__dlpack__()
        assert not hasattr(buffer, "__cuda_array_interface__")
        buffer.close()
        with pytest.raises(ao.ClosedError):
            buffer.__dlpack__()
        unbound = ao.Buffer.from_pointer(0x1000, 8)
        with pytest.raises(BufferError, match="no Offload has used it"):
            unbound.__dlpack__()


# Others' to us


@pytest.mark.parametrize("dtype", DTYPES)
async def test_buffers_of_numpy_arrays(dtype: str) -> None:
    """On the host device a NumPy array's memory becomes a Buffer, strided ones too."""
    array = np.arange(60).reshape(3, 4, 5).astype(dtype)
    async with rig("host", load=False) as r:
        for view in (array, array[1:, ::2], array.T, array[:0]):
            buffer = ao.Buffer.from_dlpack(view)
            assert (buffer.shape, buffer.dtype) == (view.shape, view.dtype)
            assert np.array_equal(await r.off.get(buffer), view)


async def test_owner_is_held_as_long_as_the_memory_is_used() -> None:
    """The array lives until the last Buffer and operation on it are done."""

    class Watched(np.ndarray):  # type: ignore[type-arg]
        pass

    array = np.zeros(4, np.float32).view(Watched)
    held = weakref.ref(array)
    async with rig("host") as r:
        buffer = ao.Buffer.from_dlpack(array)
        x, gate = await r.off.put(np.ones(4, np.float32)), await r.hold(r.off.lanes[0])
        op = r.off.launch(saxpy, grid=1, block=4, args=(2.0, x, buffer, 4), lane=r.off.lanes[0])
        del array, buffer
        gc.collect()
        assert held() is not None
        gate.open()
        await op
        del op
        gc.collect()
        assert held() is None


async def test_arrays_as_arguments() -> None:
    """A launch takes an array of another library in the place of a Buffer, and orders by it."""
    array = np.zeros(4, np.float32)
    async with rig("host") as r:
        x = await r.off.put(np.ones(4, np.float32))
        y = Foreign(array)
        ops = [r.off.launch(saxpy, grid=1, block=4, args=(2.0, x, y, 4)) for _ in range(10)]
        await asyncio.gather(*(op.wait() for op in ops))
        assert array.tolist() == [20] * 4
        assert {type(op) for op in ops} == {ao.Operation}
        with pytest.raises(ao.UsageError, match="float32"):
            r.off.launch(saxpy, grid=1, block=4, args=(2.0, x, Foreign(np.zeros(4)), 4))
        with pytest.raises(ao.UsageError, match="does not reach"):
            r.off.launch(saxpy, grid=1, block=4, args=(2.0, x, Foreign(array, (CUDA, 0)), 4))
        with pytest.raises(ao.UsageError, match="pass a Buffer"):
            r.off.launch(saxpy, grid=1, block=4, args=(2.0, x, array, 4))


async def test_memory_of_others_where_arguments_are_read_late() -> None:
    """A launch that waits for a load, that calls, or that has scratch takes Buffers on memory of somebody else, too."""

    def body(launch: Any, x: ao.InOut[np.float64]) -> None:
        x += 1

    def with_scratch(launch: Any, x: ao.InOut[np.float64], s: ao.Out[np.uint8]) -> None:
        x += 1

    array = np.zeros(4)
    late, calls = ao.kernel(body), ao.kernel(calls=True)(body)
    async with rig("host", load=False) as r:
        buffer = ao.Buffer.from_dlpack(array)
        for value in (buffer, Foreign(array), buffer):
            await r.off.launch(late, grid=1, block=1, args=(value,))
        await r.off.load(calls)
        await r.off.launch(calls, grid=1, block=1, args=(buffer,))
        await r.off.launch(ao.kernel(with_scratch), grid=1, block=1, args=(buffer[2:], ao.Scratch(8)))
        assert array.tolist() == [4, 4, 5, 5]


async def test_read_only_arrays_are_for_reading() -> None:
    """An array that says that it is read-only goes to parameters that are only read."""
    source = np.ones(4, np.float32)
    source.flags.writeable = False
    async with rig("host") as r:
        y = r.off.zeros(4, np.float32)
        await r.off.launch(saxpy, grid=1, block=4, args=(2.0, Versioned(source), y, 4))
        assert (await r.off.get(y)).tolist() == [2] * 4
        with pytest.raises(ao.UsageError, match="read-only"):
            r.off.launch(saxpy, grid=1, block=4, args=(2.0, y, Versioned(source), 4))


class Versioned(Foreign):
    """One that exports by version 1, which alone says that it is read-only."""

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(max_version=(1, 0))


@pytest.mark.parametrize("value", [5, "array", None, [1, 2], np.float32(1)], ids=repr)
def test_what_is_no_array(value: object) -> None:
    """Anything without one of the protocols is refused."""
    with pytest.raises(ao.UsageError, match="expected an array"):
        ao.Buffer.from_dlpack(value)


def test_broadcast_and_reversed_arrays_are_refused() -> None:
    """Strides are above 0."""
    for array in (np.zeros(4)[::-1], np.broadcast_to(np.zeros(1), (4,)).copy()[:0:-1]):
        with pytest.raises(ao.UsageError, match="above 0"):
            ao.Buffer.from_dlpack(Foreign(array))


async def test_gpu_arrays_are_described_by_their_interface() -> None:
    """Address, shape, strides and dtype are those that the interface says; a host Offload does not take them."""
    array = Interface(strides=(16, 4))
    assert describe(array, CUDA) == (0x1000, (2, 3), (16, 4), np.dtype("f4"), False, array, None, None)
    assert describe(Interface(stream=7), CUDA).stream == 7
    buffer = ao.Buffer.from_dlpack(array)
    assert (buffer.address, buffer.shape, buffer.strides) == (0x1000, (2, 3), (16, 4))
    for wrong in ({"mask": object()}, {"stream": 0}):
        with pytest.raises(ao.UsageError):
            describe(Interface(**wrong), CUDA)
    async with rig("host") as r:
        with pytest.raises(ao.UsageError, match="does not reach"):
            r.off.get(buffer)
        await r.launch(nothing)


class OnGpu(Interface):
    """Says which GPU it is on, as torch's and CuPy's arrays do."""

    def __init__(self, kind: int, index: int) -> None:
        super().__init__()
        self.device = kind, index

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def test_the_array_of_another_gpu_is_refused() -> None:
    """A kernel that reads the memory of another GPU would end the process; managed memory is everybody's."""
    engine: Any = SimpleNamespace(label="cuda:0")
    with pytest.raises(ao.UsageError, match="in the memory of cuda:1, not of cuda:0"):
        ao.Buffer.from_dlpack(OnGpu(2, 1)).allocation.belongs_to(engine)
    assert ao.Buffer.from_dlpack(OnGpu(2, 0)).allocation.belongs_to(engine)
    assert ao.Buffer.from_dlpack(OnGpu(13, 1)).allocation.belongs_to(engine)
    assert ao.Buffer.from_dlpack(Interface()).allocation.belongs_to(engine)


# Types


@pytest.mark.parametrize(("code", "bits", "dtype"), [(4, 16, "u2"), (6, 8, "?"), (2, 16, "f2")])
def test_types_of_others(code: int, bits: int, dtype: str) -> None:
    """bfloat16 comes as its bits; others by NumPy's names."""
    assert describe(Made(dlpack_export(object(), 1, CPU, 0, (2,), (1,), code, bits, True)), CPU).dtype == np.dtype(
        dtype
    )


@pytest.mark.parametrize(("code", "bits"), [(2, 12), (3, 64), (17, 8)])
def test_types_that_numpy_has_not(code: int, bits: int) -> None:
    """Others raise UsageError, and the memory is given back."""
    with pytest.raises(ao.UsageError, match="none of NumPy's"):
        describe(Made(dlpack_export(object(), 1, CPU, 0, (2,), (1,), code, bits, True)), CPU)


class Made:
    """Exports a capsule that was made by hand."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __dlpack_device__(self) -> tuple[int, int]:
        return (CPU, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.made
