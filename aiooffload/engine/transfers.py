"""Transfers: what a program asks to be copied or filled, checked and made an operation.

How the bytes go is the business of :mod:`aiooffload.engine.copies`; here it is decided what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiooffload.buffer import Allocation, Buffer, PinnedArray, no_buffer
from aiooffload.engine.copies import PIECE_NBYTES, Place
from aiooffload.engine.visits import visit
from aiooffload.errors import UsageError
from aiooffload.operation import Operation
from aiooffload.rules.copyplan import c_strides, check_strides, overlaps, span
from aiooffload.scalars import scalar_bytes

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    from aiooffload.engine.copies import Copies
    from aiooffload.engine.memory import Memory
    from aiooffload.engine.submission import Terms
    from aiooffload.operation import OperationOwner

__all__ = ["Transfers"]


class Transfers:
    """Takes the copies and fills of one engine. See the methods of ``Offload`` of the same names.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    memory
        Where ``put`` allocates.
    copies
        Moves the bytes.
    submit
        Orders and places an operation.
    owner
        The engine, as operations and memory name it.
    check_open
        Raises if nothing can be submitted, nor allocated, any more.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        memory: Memory,
        copies: Copies,
        submit: Callable[..., None],
        owner: OperationOwner,
        check_open: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._memory = memory
        self._copies = copies
        self._submit = submit
        self._owner = owner
        self._check_open = check_open

    def put(self, array: ArrayLike | PinnedArray, terms: Terms) -> Operation[Buffer]:
        """Allocate a Buffer and copy ``array`` into it."""
        self._check_open()
        try:
            source = array if isinstance(array, PinnedArray) else np.asarray(array)
        except (TypeError, ValueError) as error:
            raise UsageError(f"what is put is an array, or what NumPy makes one of: {error}") from error
        host = source.array if isinstance(source, PinnedArray) else source
        target = self._memory.empty(host.shape, host.dtype)
        operation: Operation[Buffer] = self._to_device("put", target, source, None, target, terms)
        return operation

    def get(self, buffer: Buffer, out: NDArray[Any] | PinnedArray | None, terms: Terms) -> Operation[NDArray[Any]]:
        """Copy ``buffer`` to ``out``, or to a new array."""
        self._check(buffer)
        target = np.empty(buffer.shape, buffer.dtype) if out is None else out
        array = target.array if isinstance(target, PinnedArray) else target
        if not isinstance(array, np.ndarray):
            raise UsageError(f"out is a NumPy array or a PinnedArray, not {type(array).__name__}")
        if array.shape != buffer.shape or array.dtype != buffer.dtype:
            raise UsageError(
                f"out has shape {array.shape} and dtype {array.dtype}, the buffer {buffer.shape} and {buffer.dtype}"
            )
        operation: Operation[NDArray[Any]] = self._to_host("get", target, buffer, None, array, terms)
        return operation

    def copy(
        self,
        dst: Buffer | NDArray[Any] | PinnedArray,
        src: Buffer | NDArray[Any] | PinnedArray,
        extent: int | Sequence[int] | None,
        terms: Terms,
    ) -> Operation[None]:
        """Copy ``src`` to ``dst``, at least one of them a Buffer."""
        if isinstance(dst, Buffer) and isinstance(src, Buffer):
            return self._on_device(dst, src, extent, terms)
        if isinstance(dst, Buffer):
            assert not isinstance(src, Buffer)
            operation: Operation[None] = self._to_device("copy", dst, src, extent, None, terms)
            return operation
        if isinstance(src, Buffer):
            back: Operation[None] = self._to_host("copy", dst, src, extent, None, terms)
            return back
        raise UsageError("copy takes a Buffer as source, destination or both")

    def fill(self, buffer: Buffer, value: object, terms: Terms) -> Operation[None]:
        """Set every element of ``buffer`` to ``value``."""
        self._check(buffer)
        pattern = scalar_bytes(value, buffer.dtype, "the value")
        if not any(pattern):
            return self.clear(buffer, terms)
        if len(pattern) not in (1, 2, 4, 8, 16):
            raise UsageError(f"a dtype of {len(pattern)} bytes can be filled with zeros only")
        return self._fill(buffer, pattern, terms)

    def clear(self, buffer: Buffer, terms: Terms) -> Operation[None]:
        """Set every byte of ``buffer`` to 0."""
        return self._fill(buffer, b"\0", terms)

    def _fill(self, buffer: Buffer, pattern: bytes, terms: Terms) -> Operation[None]:
        self._check_open()
        operation: Operation[None] = Operation(self._loop, self._owner, "fill")
        operation.kind, operation.nbytes = "fill", buffer.nbytes
        if buffer.c_contiguous:
            self._copies.fill(operation, buffer, pattern, buffer.nbytes // len(pattern))
        else:
            itemsize = buffer.dtype.itemsize
            nbytes = min(buffer.nbytes, max(PIECE_NBYTES // itemsize, 1) * itemsize)
            check_strides(buffer.shape, itemsize, buffer.strides, c_strides(buffer.shape, itemsize))
            self._copies.fill_strided(operation, buffer, pattern, self._memory.empty(nbytes, np.uint8))
        self._submit(operation, [(buffer.allocation, True)], terms)
        return operation

    def _to_device(
        self,
        name: str,
        dst: Buffer,
        src: NDArray[Any] | PinnedArray,
        extent: int | Sequence[int] | None,
        result: object,
        terms: Terms,
    ) -> Operation[Any]:
        self._check(dst)
        operation: Operation[Any] = Operation(self._loop, self._owner, name)
        host = _host_array(src, writes=False)
        layout = _match(dst, host, extent)
        operation.kind, operation.nbytes = name, layout.nbytes
        target = Place(dst.address, layout.dst_strides)
        uses: list[tuple[Allocation | PinnedArray, bool]] = [(dst.allocation, True)]
        if isinstance(src, PinnedArray):
            uses.append((src, False))
            source = Place(src.open_lease().block.device_address, layout.src_strides)
            self._submit_direct(operation, layout, target, source, uses, terms, result)
        else:
            self._copies.host_to_device(operation, target, layout.of(host), result)
            self._submit(operation, uses, terms, keep=src)
        return operation

    def _to_host(
        self,
        name: str,
        dst: NDArray[Any] | PinnedArray,
        src: Buffer,
        extent: int | Sequence[int] | None,
        result: object,
        terms: Terms,
    ) -> Operation[Any]:
        self._check(src)
        operation: Operation[Any] = Operation(self._loop, self._owner, name)
        host = _host_array(dst, writes=True)
        layout = _match(host, src, extent)
        operation.kind, operation.nbytes = name, layout.nbytes
        source = Place(src.address, layout.src_strides)
        uses: list[tuple[Allocation | PinnedArray, bool]] = [(src.allocation, False)]
        if isinstance(dst, PinnedArray):
            uses.append((dst, True))
            target = Place(dst.open_lease().block.device_address, layout.dst_strides)
            self._submit_direct(operation, layout, target, source, uses, terms, result)
        else:
            self._copies.device_to_host(operation, layout.of(host), source, result)
            self._submit(operation, uses, terms, keep=dst)
        return operation

    def _on_device(self, dst: Buffer, src: Buffer, extent: int | Sequence[int] | None, terms: Terms) -> Operation[None]:
        for buffer in (dst, src):
            buffer.check_open()
        ours = [buffer.allocation.belongs_to(self._owner) for buffer in (dst, src)]  # both: the first to ask has it
        if not any(ours):
            raise UsageError("both buffers belong to another Offload")
        layout = _match(dst, src, extent)
        shape, itemsize, dst_strides, src_strides, flat = layout
        target, source = Place(dst.address, dst_strides), Place(src.address, src_strides)
        spans = (shape[0], shape[0]) if flat else (span(shape, itemsize, s) for s in (dst_strides, src_strides))
        dst_span, src_span = spans
        # By address: two allocations that were made from pointers may be the same memory.
        if overlaps(target.address, dst_span, source.address, src_span):
            raise UsageError("source and destination overlap")
        operation: Operation[None] = Operation(self._loop, self._owner, "copy")
        operation.kind, operation.nbytes = "copy", layout.nbytes
        within = dst.allocation.plain and src.allocation.plain
        uses: list[tuple[Allocation | PinnedArray, bool]] = [(dst.allocation, True), (src.allocation, False)]
        self._submit_direct(operation, layout, target, source, uses, terms, within=within)
        return operation

    def _submit_direct(
        self,
        operation: Operation[Any],
        layout: _Layout,
        target: Place,
        source: Place,
        uses: list[tuple[Allocation | PinnedArray, bool]],
        terms: Terms,
        result: object = None,
        *,
        within: bool = False,
    ) -> None:
        """Submit a copy that needs no staging, one side of which may belong to another Offload."""
        shape, itemsize = layout.shape, layout.itemsize
        theirs = next((use for use in uses if use[0].owner is not self._owner), None)
        if theirs is None:
            self._copies.direct(operation, shape, itemsize, target, source, result, within=within)
            self._submit(operation, uses, terms)
            return
        uses.remove(theirs)
        with visit(*theirs, operation) as (turn, peers):
            self._copies.direct(operation, shape, itemsize, target, source, result, peers=peers)
            self._submit(operation, uses, terms.also_after(turn), keep=theirs[0].lease)

    def _check(self, buffer: Buffer) -> None:
        if not isinstance(buffer, Buffer):
            raise UsageError(f"expected a Buffer, not {no_buffer(buffer)}")
        buffer.check_open()
        if not buffer.allocation.belongs_to(self._owner):
            raise UsageError("the buffer belongs to another Offload")


class _Layout(NamedTuple):
    """What is copied, as both sides have it."""

    shape: tuple[int, ...]
    itemsize: int
    dst_strides: tuple[int, ...]
    src_strides: tuple[int, ...]
    flat: bool = False
    """Both are contiguous: their bytes, whatever their shapes and dtypes are."""

    @property
    def nbytes(self) -> int:
        """How much is copied."""
        return prod(self.shape) * self.itemsize

    def of(self, array: NDArray[Any]) -> NDArray[Any]:
        """Return the elements of ``array`` that are copied."""
        if not self.flat:
            return array[tuple(map(slice, self.shape))]
        return array.reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)


def _match(dst: Buffer | NDArray[Any], src: Buffer | NDArray[Any], extent: int | Sequence[int] | None) -> _Layout:
    """Return what is copied from ``src`` to ``dst``; raises UsageError if that is not clear or not possible."""
    shape = dst.shape
    if extent is not None:
        shape = _checked_extent(extent, dst.shape, src.shape)
    elif _is_contiguous(dst) and _is_contiguous(src):
        if dst.nbytes != src.nbytes:
            raise UsageError(f"the source has {src.nbytes} bytes, the destination {dst.nbytes}")
        return _Layout((dst.nbytes,), 1, (1,), (1,), True)
    elif dst.shape != src.shape:
        raise UsageError(f"the source has shape {src.shape}, the destination {dst.shape}: slice them or give an extent")
    if dst.dtype.itemsize != src.dtype.itemsize:
        raise UsageError(f"the source has dtype {src.dtype}, the destination {dst.dtype}, of another item size")
    layout = _Layout(shape, dst.dtype.itemsize, dst.strides, src.strides)
    check_strides(*layout[:4])
    return layout


def _checked_extent(extent: int | Sequence[int], *shapes: tuple[int, ...]) -> tuple[int, ...]:
    try:
        sizes = tuple(map(index, extent if isinstance(extent, Sequence) else (extent,)))
    except TypeError:
        raise UsageError(f"extent has an integer per dimension, not {extent!r}") from None
    for shape in shapes:
        if len(shape) != len(sizes):
            raise UsageError(f"extent {sizes} has {len(sizes)} dimensions, an array of shape {shape} has {len(shape)}")
        if any(not 0 <= size <= length for size, length in zip(sizes, shape, strict=True)):
            raise UsageError(f"extent {sizes} leaves an array of shape {shape}")
    return sizes


def _is_contiguous(array: Buffer | NDArray[Any]) -> bool:
    return array.c_contiguous if isinstance(array, Buffer) else array.flags.c_contiguous


def _host_array(array: NDArray[Any] | PinnedArray, *, writes: bool) -> NDArray[Any]:
    """Return host memory as a plain array; raises UsageError, ClosedError."""
    if isinstance(array, PinnedArray):
        array = array.array
    if not isinstance(array, np.ndarray):
        raise UsageError(f"expected a NumPy array or a PinnedArray, not {type(array).__name__}")
    if array.dtype.hasobject:
        raise UsageError(f"dtype {array.dtype} holds Python objects, which a device cannot")
    if writes and not array.flags.writeable:
        raise UsageError("the host array is read-only")
    return array if type(array) is np.ndarray else array.view(np.ndarray)
