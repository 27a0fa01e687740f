"""Device arrays, pinned arrays, and what keeps their memory alive.

Who holds what: a program holds Buffers; Buffers of one allocation share an Allocation; the
Allocation and every operation in flight hold its Lease. The memory is freed when the last holder
of the Lease lets go, so closing or collecting a Buffer never frees what the device still uses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from types import EllipsisType, TracebackType
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiooffload._native import History
from aiooffload.drivers.api import Block, RegisteredMemory
from aiooffload.errors import ClosedError, UsageError

__all__ = ["Allocation", "Buffer", "Lease", "PinnedArray"]

_B = TypeVar("_B")


class Lease(Generic[_B]):
    """Gives its block back when the last holder is gone; any thread may be that one."""

    __slots__ = ("_retire", "block")

    def __init__(self, block: _B, retire: Callable[[_B], None]) -> None:
        self.block: Final = block
        self._retire = retire

    def __del__(self) -> None:
        self._retire(self.block)


class Allocation:
    """One allocation, shared by the Buffers that view it."""

    __slots__ = ("address", "history", "host_array", "lease", "nbytes", "owner")

    def __init__(self, lease: Lease[Block], owner: object) -> None:
        # None once closed. Operations in flight have their own reference.
        self.lease: Lease[Block] | None = lease
        self.address: Final = lease.block.address
        self.nbytes: Final = lease.block.nbytes
        self.host_array: NDArray[np.uint8] | None = lease.block.host_array
        self.history: Final = History()
        # The engine it belongs to: memory of another device or Offload is refused.
        self.owner: Final = owner

    def close(self) -> None:
        """Let go of the memory; idempotent. It is freed once nothing in flight uses it."""
        self.lease = None
        self.host_array = None


class Buffer:
    """A C-contiguous array in device memory. Made by ``off.put``, ``off.empty`` and ``off.zeros``.

    Attributes
    ----------
    shape
        Length of each dimension.
    dtype
        NumPy dtype of the elements.
    nbytes
        Size in bytes.

    Notes
    -----
    *Ordering.* Operations that share an allocation (a slice counts as the whole) run in the order
    of submission, unless both only read it.
    *Lifetime.* Memory is freed when every Buffer of the allocation was closed or collected and no
    operation in flight uses it. ``close()`` closes all slices of the allocation at once.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_view",
        "_view_read_only",
        "allocation",
        "dtype",
        "nbytes",
        "offset",
        "shape",
    )

    def __init__(self, allocation: Allocation, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.allocation: Final = allocation
        self.offset: Final = offset
        self.shape: Final = shape
        self.dtype: Final = dtype
        self.nbytes: Final = math.prod(shape) * dtype.itemsize
        self._address = allocation.address + offset
        self._view: NDArray[Any] | None = None
        self._view_read_only: NDArray[Any] | None = None

    @property
    def address(self) -> int:
        """Device address of the first element; raises ClosedError once closed."""
        if self.allocation.lease is None:
            self.check_open()
        return self._address

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def closed(self) -> bool:
        """Whether the allocation was closed."""
        return self.allocation.lease is None

    def check_open(self) -> None:
        """Raise ClosedError if the allocation was closed."""
        if self.allocation.lease is None:
            raise ClosedError(f"the buffer of shape {self.shape} and dtype {self.dtype} was closed")

    def close(self) -> None:
        """Close the allocation with all its slices; idempotent, never waits, frees nothing in use."""
        self.allocation.close()
        self._view = self._view_read_only = None

    def __enter__(self) -> Buffer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a Buffer without dimensions")
        return self.shape[0]

    def __getitem__(self, key: int | slice | EllipsisType) -> Buffer:
        """Return a view of rows ``key`` of the first dimension: an index, or a slice of step 1.

        Raises UsageError for a step other than 1, IndexError beyond the first dimension.
        """
        self.check_open()
        if key is Ellipsis:
            return self
        if not self.shape:
            raise IndexError("a Buffer without dimensions has no rows")
        row_nbytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        if isinstance(key, slice):
            start, stop, step = key.indices(self.shape[0])
            if step != 1:
                raise UsageError(f"a slice of a Buffer has step 1, not {step}: it would not be contiguous")
            rows = max(stop - start, 0)
            return Buffer(self.allocation, self.offset + start * row_nbytes, (rows, *self.shape[1:]), self.dtype)
        index = operator.index(key)
        if not -self.shape[0] <= index < self.shape[0]:
            raise IndexError(f"index {index} is outside the first dimension of {self.shape}")
        return Buffer(self.allocation, self.offset + index % self.shape[0] * row_nbytes, self.shape[1:], self.dtype)

    def view(self, dtype: DTypeLike) -> Buffer:
        """Return the same bytes as another dtype; the last dimension changes with the item size."""
        self.check_open()
        new = np.dtype(dtype)
        if new.hasobject or new.itemsize == 0:
            raise UsageError(f"a buffer cannot be viewed as {new!r}")
        if new.itemsize == self.dtype.itemsize:
            return Buffer(self.allocation, self.offset, self.shape, new)
        last = (self.shape[-1] if self.shape else 1) * self.dtype.itemsize
        if not self.shape or last % new.itemsize:
            raise UsageError(f"shape {self.shape} of {self.dtype} cannot be viewed as {new}")
        return Buffer(self.allocation, self.offset, (*self.shape[:-1], last // new.itemsize), new)

    def reshape(self, *shape: int) -> Buffer:
        """Return the same elements in another shape of the same size."""
        self.check_open()
        if math.prod(shape) != self.size or min(shape, default=0) < 0:
            raise UsageError(f"a buffer of shape {self.shape} cannot take shape {shape}")
        return Buffer(self.allocation, self.offset, shape, self.dtype)

    def host_view(self, read_only: bool) -> NDArray[Any]:
        """Return the elements as a NumPy array where the host can touch them (host device only)."""
        if self._view is None:
            self.check_open()
            whole = self.allocation.host_array
            if whole is None:
                raise UsageError("this buffer is in the memory of a GPU: use off.get")
            self._view = whole[self.offset : self.offset + self.nbytes].view(self.dtype).reshape(self.shape)
            self._view_read_only = self._view.view()
            self._view_read_only.flags.writeable = False
        view = self._view_read_only if read_only else self._view
        assert view is not None
        return view

    def __repr__(self) -> str:
        return f"<aiooffload.Buffer {self.dtype} {self.shape}{' closed' if self.closed else ''}>"


class _Exporter:
    """What a pinned array is a view of: its lease goes back when the last view is gone."""

    __slots__ = ("__array_interface__", "_lease", "_mapping")

    def __init__(self, lease: Lease[RegisteredMemory], nbytes: int) -> None:
        self._lease = lease
        self._mapping = lease.block.array  # stays mapped as long, even after the Offload has closed
        data = (lease.block.host_address, False)
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": data}


class PinnedArray:
    """Host memory that copies use without staging. Made by ``await off.pinned(shape, dtype)``.

    Attributes
    ----------
    array
        The memory as a NumPy array, C order; raises ClosedError once closed.

    Notes
    -----
    *Ordering.* Copies from and to it are ordered like operations on a Buffer.
    *Lifetime.* The memory goes back to the Offload's pool when it was closed or collected, the last
    array made from it is gone and no copy uses it.
    """

    __slots__ = ("__weakref__", "_array", "history", "lease")

    def __init__(self, lease: Lease[RegisteredMemory], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        # None once closed. Operations in flight have their own reference.
        self.lease: Lease[RegisteredMemory] | None = lease
        self.history: Final = History()
        whole = np.asarray(_Exporter(lease, lease.block.nbytes))
        self._array: NDArray[Any] | None = whole[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    @property
    def array(self) -> NDArray[Any]:
        """The memory as a NumPy array; raises ClosedError once closed."""
        if self._array is None:
            raise ClosedError("the pinned array was closed")
        return self._array

    def close(self) -> None:
        """Give the memory back to the pool; idempotent, never waits."""
        self.lease = None
        self._array = None

    def __repr__(self) -> str:
        what = "closed" if self._array is None else f"{self._array.dtype} {self._array.shape}"
        return f"<aiooffload.PinnedArray {what}>"
