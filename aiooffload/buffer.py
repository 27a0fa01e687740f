"""Device arrays, pinned arrays, and what keeps their memory alive.

Who holds what: a program holds Buffers; Buffers of one allocation share an Allocation; the
Allocation and every operation in flight hold its Lease. The memory is freed when the last holder
of the Lease lets go, so closing or collecting a Buffer never frees what the device still uses.
Memory of somebody else is an Allocation as well; what its Lease holds is the owner, and nothing is freed.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Sequence
from types import EllipsisType, TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, NoReturn, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from aiooffload._native import History, Operation
from aiooffload.drivers.api import RegisteredMemory
from aiooffload.errors import ClosedError, UsageError
from aiooffload.interchange import CPU, CUDA, Described, capsule, describe, is_array
from aiooffload.rules.copyplan import c_strides, check_extent, is_contiguous, span

if TYPE_CHECKING:
    from aiooffload.operation import OperationOwner

__all__ = ["Allocation", "Buffer", "Lease", "PinnedArray"]

_B = TypeVar("_B")


class Lease(Generic[_B]):
    """Gives its block back when the last holder is gone; any thread may be that one."""

    __slots__ = ("_retire", "block")

    # An entry for each that lives: unlike a number, a list is counted up and down by any thread without a lock.
    _living: ClassVar[list[None]] = []

    def __init__(self, block: _B, retire: Callable[[_B], None]) -> None:
        self.block: Final = block
        self._retire = retire
        self._living.append(None)

    def __del__(self) -> None:
        self._living.pop()
        self._retire(self.block)

    @classmethod
    def count(cls) -> int:
        """Return how many there are in the process."""
        return len(cls._living)


class Allocation:
    """One allocation, shared by the Buffers that view it."""

    __slots__ = ("address", "history", "host_array", "lease", "nbytes", "owner")

    def __init__(self, lease: Lease[Any], owner: object) -> None:
        # None once closed. Operations in flight have their own reference.
        self.lease: Lease[Any] | None = lease
        self.address: Final[int] = lease.block.address
        self.nbytes: Final[int] = lease.block.nbytes
        self.host_array: NDArray[np.uint8] | None = lease.block.host_array
        self.history: History = History()
        # The engine it belongs to: memory of another device or Offload is refused.
        self.owner = owner

    @property
    def plain(self) -> bool:
        """Whether it was allocated by its engine: then kernels of that device reach it, whatever it is."""
        return True

    def belongs_to(self, engine: OperationOwner) -> bool:
        """Whether ``engine`` may use it."""
        return self.owner is engine

    def close(self) -> None:
        """Let go of the memory; idempotent. It is freed once nothing in flight uses it."""
        self.lease = None
        self.host_array = None


class Foreign:
    """The block of memory that somebody else frees. It keeps what keeps the memory."""

    __slots__ = ("address", "device_type", "gpu", "host_array", "keep", "nbytes", "owner", "shared")

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.address: Final = address
        self.nbytes: Final = nbytes
        self.owner: Final = owner
        # The memory itself where it is ours: closing the owner would let go of it.
        self.keep: Final = owner.open_lease() if isinstance(owner, Buffer | PinnedArray) else None
        self.host_array: NDArray[np.uint8] | None = None
        # DLPack's type of the devices that reach it; None: whichever uses it.
        self.device_type: int | None = None
        # The ordinal of the GPU whose memory it is; None if that is not known, or others reach it too.
        self.gpu: int | None = None
        # Set with the first use. Operations in flight hold the block: as long, the history has to be found.
        self.shared: Shared | None = None


class Shared:
    """What one engine has submitted on memory of one owner."""

    __slots__ = ("__weakref__", "engine", "history", "owner")

    def __init__(self, engine: OperationOwner, owner: object) -> None:
        # Both are held, so that no other object has their identity while this is in the table.
        self.engine: Final = engine
        self.owner: Final = owner
        self.history: Final = History()


# By the identities of engine and owner, which need be neither hashable nor weakly referable. An entry lives
# as long as a Buffer on memory of the owner, or an operation that uses it.
_shared: Final[weakref.WeakValueDictionary[tuple[int, int], Shared]] = weakref.WeakValueDictionary()


class ForeignAllocation(Allocation):
    """Memory of somebody else. It belongs to the Offload that uses it first."""

    __slots__ = ()

    @property
    def plain(self) -> bool:
        """Whether it is a part of such memory."""
        owner = self.lease.block.owner if self.lease is not None else None
        return isinstance(owner, Buffer) and owner.allocation.plain

    def __init__(self, block: Foreign) -> None:
        super().__init__(Lease(block, lambda _: None), None)

    def belongs_to(self, engine: OperationOwner) -> bool:
        """Whether ``engine`` may use it; the first that asks is the one from then on."""
        if self.owner is None and self.lease is not None:
            self._bind(self.lease, engine)
        return self.owner is engine

    def _bind(self, lease: Lease[Foreign], engine: OperationOwner) -> None:
        """Take the history of what a raw pointer counts as: its owner."""
        block = lease.block
        owner = block.owner
        if isinstance(owner, Buffer) and not owner.allocation.belongs_to(engine):
            if owner.allocation.owner is None:
                return
            engine = cast("OperationOwner", owner.allocation.owner)  # it is memory of that Offload
        elif isinstance(owner, PinnedArray):
            engine = cast("OperationOwner", owner.owner)
        if block.device_type not in (None, CPU if engine.label == "host" else CUDA):
            raise UsageError(f"device {engine.label} does not reach the memory of this array")
        if block.gpu is not None and engine.label != f"cuda:{block.gpu}":
            raise UsageError(f"this array is in the memory of cuda:{block.gpu}, not of {engine.label}")
        if isinstance(owner, Buffer):
            self.history = owner.allocation.history
        elif isinstance(owner, PinnedArray):
            self.history = owner.history
        elif owner is not None:
            key = (id(engine), id(owner))
            block.shared = _shared.get(key) or Shared(engine, owner)
            _shared[key] = block.shared
            self.history = block.shared.history
        if engine.label == "host":
            self.host_array = _as_array(lease)
        self.owner = engine


class Buffer:
    """An array in device memory. Made by ``off.put``, ``off.empty``, ``off.zeros``, slicing and ``from_pointer``.

    Attributes
    ----------
    shape
        Length of each dimension.
    strides
        Bytes from one element to the next in each dimension.
    dtype
        NumPy dtype of the elements.
    nbytes
        Size of the elements in bytes.
    c_contiguous
        Whether the elements lie one behind the other, in C order.

    Notes
    -----
    *Ordering.* Operations that share an allocation (a slice counts as the whole) run in the order
    of submission, unless both only read it.
    *Lifetime.* Memory is freed when every Buffer of the allocation was closed or collected and no
    operation in flight uses it. ``close()`` closes all slices of the allocation at once.
    *Kernels.* A kernel on a GPU gets the address of the first element, whatever the strides are; pass it
    the strides as well. A host kernel gets a NumPy array that has them.
    """

    __slots__ = (
        "__weakref__",
        "_address",
        "_view",
        "_view_read_only",
        "allocation",
        "c_contiguous",
        "dtype",
        "nbytes",
        "offset",
        "shape",
        "strides",
    )

    def __init__(
        self,
        allocation: Allocation,
        offset: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self.allocation: Final = allocation
        self.offset: Final = offset
        self.shape: Final = shape
        self.dtype: Final = dtype
        self.strides: Final = c_strides(shape, dtype.itemsize) if strides is None else strides
        self.nbytes: Final = math.prod(shape) * dtype.itemsize
        self.c_contiguous: Final = strides is None or is_contiguous(shape, dtype.itemsize, strides)
        self._address = allocation.address + offset
        self._view: NDArray[Any] | None = None
        self._view_read_only: NDArray[Any] | None = None

    @staticmethod
    def from_pointer(
        ptr: int,
        nbytes: int,
        owner: object = None,
        *,
        shape: int | Sequence[int] | None = None,
        dtype: DTypeLike = np.uint8,
        strides: Sequence[int] | None = None,
    ) -> Buffer:
        """Return a Buffer on memory that somebody else allocates and frees.

        Parameters
        ----------
        ptr
            Address for the device: of device, managed, registered or mapped (virtual) memory, such as
            ``tensor.data_ptr()``; on the host device any address of this process.
        nbytes
            Bytes from there on that belong to it.
        owner
            What keeps the memory, held as long as a Buffer or an operation uses it. None: nobody has to.
        shape
            Length of each dimension; by default one dimension of as many elements as fit.
        dtype
            Anything NumPy takes for a dtype without Python objects.
        strides
            Bytes from one element to the next in each dimension, above 0; by default C order. A pitch from
            ``cudaMallocPitch`` is that of the rows.

        Returns
        -------
        Buffer
            It belongs to the Offload that uses it first, whose device has to reach the memory.

        Raises
        ------
        UsageError
            The array does not fit into the memory, or does not describe one.

        Notes
        -----
        *Ordering.* A raw pointer counts as its ``owner``: Buffers of the same owner (the same object, also a
        Buffer or a PinnedArray) are ordered like slices of one Buffer. Without an owner each call is memory
        of its own. What others do with the memory is for the program to order.
        *Lifetime.* ``close()`` lets go of the owner, and frees nothing.
        """
        try:
            ptr, nbytes = operator.index(ptr), operator.index(nbytes)
        except TypeError:
            nbytes = -1
        if nbytes < 0 or not 0 <= ptr <= 2**64 - nbytes:
            raise UsageError("ptr and nbytes are integers, the address and the size of memory")
        if ptr == 0 and nbytes:
            raise UsageError(f"{nbytes} bytes at address 0: the pointer is null")
        kind = np.dtype(dtype)
        if kind.hasobject or kind.itemsize == 0:
            raise UsageError(f"dtype {kind} holds Python objects or nothing")
        if shape is None:
            if strides is not None or nbytes % kind.itemsize:
                raise UsageError(f"{nbytes} bytes of {kind} with strides {strides} need a shape")
            shape = nbytes // kind.itemsize
        sizes = _integers("shape", shape if isinstance(shape, Sequence) else (shape,))
        steps = c_strides(sizes, kind.itemsize) if strides is None else _integers("strides", strides)
        if min(sizes, default=0) < 0 or len(steps) != len(sizes):
            raise UsageError(f"shape {sizes} and strides {steps} do not describe an array")
        if 0 not in sizes and any(n > 1 and step < 1 for n, step in zip(sizes, steps, strict=True)):
            raise UsageError(f"strides are above 0, not {steps}: copy the array to a contiguous one first")
        check_extent(sizes, kind.itemsize, steps, 0, nbytes)
        return Buffer(ForeignAllocation(Foreign(ptr, nbytes, owner)), 0, sizes, kind, steps)

    @staticmethod
    def from_dlpack(array: Any) -> Buffer:
        """Return a Buffer on the memory of an array of torch, CuPy, numba, NumPy (host device) or another library.

        Parameters
        ----------
        array
            Has ``__cuda_array_interface__`` or ``__dlpack__``. It is held as long as the memory is used. An
            array of the same library in a launch's ``args`` is taken like this by itself.

        Returns
        -------
        Buffer
            Of the same shape, dtype (``uint16`` for bfloat16) and strides; see :meth:`from_pointer`.

        Raises
        ------
        UsageError
            It is no such array, is masked, broadcast or reversed, or has a dtype that NumPy does not know.

        Notes
        -----
        *Ordering.* Arrays of one owner, here the array object, are ordered like slices of one Buffer. What its library
        has still to do with it is for the program to order: launch on its stream (``off.adopt``), or come
        after it (``after=[off.completion(stream)]``).
        *Source.* DLPack 1.0; the Python array API standard; the CUDA Array Interface, version 3.
        """
        if not is_array(array) and not isinstance(array, np.ndarray):
            raise UsageError(f"expected an array with __dlpack__ or __cuda_array_interface__, not {array!r}")
        on_host = not hasattr(array, "__cuda_array_interface__") and array.__dlpack_device__()[0] == CPU
        return Buffer._of(describe(array, CPU if on_host else CUDA), CPU if on_host else CUDA)

    @staticmethod
    def _of(array: Described, device_type: int) -> Buffer:
        strides = c_strides(array.shape, array.dtype.itemsize) if array.strides is None else array.strides
        if 0 not in array.shape and any(n > 1 and step < 1 for n, step in zip(array.shape, strides, strict=True)):
            raise UsageError(f"strides are above 0, not {strides}: copy the array to a contiguous one first")
        nbytes = span(array.shape, array.dtype.itemsize, strides)
        buffer = Buffer.from_pointer(
            array.address, nbytes, array.owner, shape=array.shape, dtype=array.dtype, strides=strides
        )
        assert buffer.allocation.lease is not None
        block = buffer.allocation.lease.block
        block.device_type, block.gpu = device_type, array.gpu
        return buffer

    # -- for other libraries ---------------------------------------------------------------

    def _sharer(self) -> tuple[OperationOwner, tuple[int, int]]:
        """Return who orders others after our work, and the device as DLPack names it."""
        self.check_open()
        owner: Any = self.allocation.owner
        if owner is None:
            raise BufferError("this buffer is on somebody else's memory, and no Offload has used it yet")
        kind, _, number = owner.label.partition(":")
        return owner, (CPU, 0) if kind == "host" else (CUDA, int(number))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._sharer()[1]

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule: torch and CuPy call this in their ``from_dlpack``.

        On a GPU the consumer's stream waits, on the device, for what was submitted on the buffer so far; on the
        host device that has to be done. What the consumer does then is for the program to order, as for
        :meth:`from_dlpack`. The memory is held until the consumer lets go of it. Raises BufferError where
        that cannot be done: a copy is asked for, or the buffer waits for something only the host knows.
        """
        owner, device = self._sharer()
        if copy or (dl_device is not None and tuple(dl_device) != device):
            raise BufferError("a buffer is shared where it is, never copied")
        if device[0] == CUDA and stream == 0:
            raise BufferError("stream 0 is ambiguous: 1 is the legacy default stream, 2 the thread's")
        if stream != -1:
            wanted = None if device[0] == CPU else 1 if stream is None else stream
            owner.share(self.allocation.history.conflicts(True), wanted)
        return capsule(self.open_lease(), self._address, device, self.shape, self.strides, self.dtype, max_version)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """What numba, CuPy and torch read of an array on a GPU; absent on the host device.

        Its stream is one of ours on which what was submitted on the buffer so far is done.
        """
        owner, device = self._sharer()
        if device[0] == CPU:
            raise AttributeError("this buffer is on the host device")
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "strides": None if self.c_contiguous else self.strides,
            "stream": owner.share(self.allocation.history.conflicts(True), None),
        }

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

    def retained(self) -> Buffer:
        """Return the same array for a launch that reads its arguments later: closing this one leaves that one open."""
        self.check_open()
        lease = self.allocation.lease
        assert lease is not None
        strides = None if self.c_contiguous else self.strides
        allocation = Allocation(lease, self.allocation.owner)
        allocation.host_array = self.allocation.host_array  # of memory of somebody else its lease has none
        return Buffer(allocation, self.offset, self.shape, self.dtype, strides)

    def check_open(self) -> None:
        """Raise ClosedError if the allocation was closed."""
        if self.allocation.lease is None:
            raise ClosedError(f"the buffer of shape {self.shape} and dtype {self.dtype} was closed")

    def open_lease(self) -> Lease[Any] | None:
        """Return what keeps the memory; raises ClosedError if it was closed."""
        self.check_open()
        return self.allocation.lease

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

    def __array__(self, *args: object, **options: object) -> NoReturn:
        """Refuse ``np.asarray(buffer)``, which would make an array of Buffers."""
        raise UsageError("a Buffer is device memory: await off.get(buffer) gives a NumPy array")

    def __getitem__(self, key: int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]) -> Buffer:
        """Return a view of the same memory, as NumPy's basic indexing does.

        Indices, slices of a step above 0 and one Ellipsis. Raises UsageError for a step below 0, IndexError
        for an index that is outside its dimension or too many of them.
        """
        self.check_open()
        if key is Ellipsis:
            return self
        offset = self.offset
        shape, strides = [], []
        for index, length, stride in zip(self._expand(key), self.shape, self.strides, strict=True):
            if isinstance(index, slice):
                start, stop, step = index.indices(length)
                if step < 0:
                    raise UsageError(
                        f"a slice of a Buffer has a step above 0, not {step}: reverse the array on the host"
                    )
                count = len(range(start, stop, step))
                offset += start * stride if count else 0  # an empty one might begin behind the allocation
                shape.append(count)
                strides.append(stride * step)
                continue
            if isinstance(index, bool):
                raise TypeError("a Buffer has no masks: an index is an integer")
            place = operator.index(index)
            if not -length <= place < length:
                raise IndexError(f"index {place} is outside a dimension of {length}, of a Buffer of shape {self.shape}")
            offset += place % length * stride
        return Buffer(self.allocation, offset, tuple(shape), self.dtype, tuple(strides))

    def _expand(self, key: Any) -> list[Any]:
        """Return an index for each dimension."""
        keys = list(key) if isinstance(key, tuple) else [key]
        ellipses = [i for i, index in enumerate(keys) if index is Ellipsis]
        missing = self.ndim - (len(keys) - len(ellipses))
        if missing < 0 or len(ellipses) > 1:
            raise IndexError(f"{len(keys)} indices for a Buffer of shape {self.shape}")
        place = ellipses[0] if ellipses else len(keys)
        keys[place : place + 1] = [slice(None)] * missing
        return keys

    def view(self, dtype: DTypeLike) -> Buffer:
        """Return the same bytes as another dtype; the last dimension changes with the item size.

        Raises UsageError if that does not go up, or if elements of the last dimension lie apart and the item
        size changes.
        """
        self.check_open()
        new = np.dtype(dtype)
        if new.hasobject or new.itemsize == 0:
            raise UsageError(f"a buffer cannot be viewed as {new!r}")
        if new.itemsize == self.dtype.itemsize:
            return Buffer(self.allocation, self.offset, self.shape, new, self.strides)
        last = (self.shape[-1] if self.shape else 1) * self.dtype.itemsize
        if not self.shape or last % new.itemsize:
            raise UsageError(f"shape {self.shape} of {self.dtype} cannot be viewed as {new}")
        if self.shape[-1] > 1 and self.strides[-1] != self.dtype.itemsize:
            raise UsageError(f"elements {self.strides[-1]} bytes apart cannot be viewed as {new}; {_COPY_FIRST}")
        shape, strides = (*self.shape[:-1], last // new.itemsize), (*self.strides[:-1], new.itemsize)
        return Buffer(self.allocation, self.offset, shape, new, strides)

    def reshape(self, *shape: int) -> Buffer:
        """Return the same elements in another shape of the same size; raises UsageError if they lie apart."""
        self.check_open()
        if math.prod(shape) != self.size or min(shape, default=0) < 0:
            raise UsageError(f"a buffer of shape {self.shape} cannot take shape {shape}")
        if not self.c_contiguous:
            raise UsageError(f"a buffer of strides {self.strides} cannot take another shape; {_COPY_FIRST}")
        return Buffer(self.allocation, self.offset, shape, self.dtype)

    def host_view(self, read_only: bool) -> NDArray[Any]:
        """Return the elements as a NumPy array where the host can touch them (host device only)."""
        if self._view is None:
            self.check_open()
            whole = self.allocation.host_array
            if whole is None:
                raise UsageError("the host cannot reach the memory of this buffer: use off.get")
            if self.nbytes:
                self._view = np.ndarray(self.shape, self.dtype, whole, self.offset, self.strides)
            else:  # NumPy holds the strides of nothing against the memory, too
                self._view = np.empty(self.shape, self.dtype)
            self._view_read_only = self._view.view()
            self._view_read_only.flags.writeable = False
        view = self._view_read_only if read_only else self._view
        assert view is not None
        return view

    def __repr__(self) -> str:
        return f"<aiooffload.Buffer {self.dtype} {self.shape}{' closed' if self.closed else ''}>"


_COPY_FIRST: Final = "copy it to a contiguous buffer first"


def no_buffer(value: object) -> str:
    """Say what was given in place of a Buffer, and how to make one of it."""
    if isinstance(value, Operation):
        return "Operation: await it first"
    return type(value).__name__ + (": await off.put(array) first" if isinstance(value, np.ndarray) else "")


def _integers(what: str, values: Sequence[Any]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise UsageError(f"{what} has an integer per dimension, not {values!r}") from None


class _Exporter:
    """What an array on memory of a lease is a view of: the lease goes back when the last view is gone."""

    __slots__ = ("__array_interface__", "_keep")

    def __init__(self, address: int, nbytes: int, *keep: object) -> None:
        self._keep = keep
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (address, False)}


def _as_array(lease: Lease[Foreign]) -> NDArray[np.uint8]:
    """Return memory of somebody else that the host can touch."""
    block = lease.block
    return np.asarray(_Exporter(block.address, block.nbytes, lease)) if block.nbytes else np.empty(0, np.uint8)


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

    __slots__ = ("__weakref__", "_array", "history", "lease", "owner")

    def __init__(
        self, lease: Lease[RegisteredMemory], owner: object, shape: tuple[int, ...], dtype: np.dtype[Any]
    ) -> None:
        # The engine it belongs to, which orders its uses.
        self.owner: Final = owner
        # None once closed. Operations in flight have their own reference.
        self.lease: Lease[RegisteredMemory] | None = lease
        self.history: Final = History()
        block = lease.block
        # The mapping stays as long as a view, even after the Offload has closed.
        whole = np.asarray(_Exporter(block.host_address, block.nbytes, lease, block.array))
        self._array: NDArray[Any] | None = whole[: math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)

    @property
    def array(self) -> NDArray[Any]:
        """The memory as a NumPy array; raises ClosedError once closed."""
        if self._array is None:
            raise ClosedError("the pinned array was closed")
        return self._array

    def open_lease(self) -> Lease[RegisteredMemory]:
        """Return what keeps the memory; raises ClosedError if it was closed."""
        if self.lease is None:
            raise ClosedError("the pinned array was closed")
        return self.lease

    def close(self) -> None:
        """Give the memory back to the pool; idempotent, never waits."""
        self.lease = None
        self._array = None

    def __repr__(self) -> str:
        what = "closed" if self._array is None else f"{self._array.dtype} {self._array.shape}"
        return f"<aiooffload.PinnedArray {what}>"
