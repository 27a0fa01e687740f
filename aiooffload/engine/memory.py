"""Device memory and pinned memory of one engine: allocating, and giving back without waiting."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np

from aiooffload.buffer import Allocation, Buffer, Lease, PinnedArray
from aiooffload.engine.closing import close_all
from aiooffload.errors import DeviceLostError, OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike

    from aiooffload.drivers.api import Block, Device, RegisteredMemory

__all__ = ["Memory", "Returns", "normalise"]

_T = TypeVar("_T")


def normalise(shape: int | tuple[int, ...], dtype: DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape as a tuple of sizes and dtype as a dtype; raises UsageError for negative or object ones."""
    try:
        sizes = tuple(n.__index__() for n in (shape if isinstance(shape, tuple | list) else (shape,)))
        kind = np.dtype(dtype)
    except (AttributeError, TypeError, ValueError) as error:
        raise UsageError(f"shape {shape!r} and dtype {dtype!r} do not describe an array: {error}") from None
    if any(n < 0 for n in sizes):
        raise UsageError(f"shape {sizes} has a negative dimension")
    if kind.hasobject:
        raise UsageError(f"dtype {kind} holds Python objects, which a device cannot")
    return sizes, kind


class Returns(Generic[_T]):
    """Takes back what leases let go of, on the loop's thread.

    The last holder of a lease may let go on any thread and at any point of a program, the garbage collector's
    included. So giving back only notes it down; ``take`` is called where nothing else of its owner's is going on.

    Parameters
    ----------
    loop
        The loop of the thread on which this is made.
    take
        Called with each thing that came back.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[_T], None]) -> None:
        self._loop = loop
        self._take = take
        self._thread = threading.get_ident()
        # Appended to by any thread, emptied by the loop's.
        self._given: deque[_T] = deque()
        # How deep in work of the owner's this thread is: the collector must not interrupt it.
        self._busy = 0
        self._stopped = False

    def give(self, item: _T) -> None:
        """Take ``item`` back, now or soon. On any thread."""
        if self._stopped:
            return  # it went with the device, or was freed with all others
        self._given.append(item)
        if threading.get_ident() == self._thread:
            self.settle()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.settle)

    def settle(self) -> None:
        """Take what came back; what comes back meanwhile is taken by whoever is at it already."""
        if not self._busy:
            with self:
                pass

    def __enter__(self) -> None:
        """Take what came back, and begin what may not be interrupted."""
        self._busy += 1
        try:
            while self._busy == 1 and self._given and not self._stopped:
                self._take(self._given.popleft())
        except BaseException:
            self._busy -= 1  # or nothing would ever be taken again
            raise

    def __exit__(self, *error: object) -> None:
        self._busy -= 1  # first: what comes back from now on is taken at once
        if self._given:
            self.settle()

    def stop(self) -> None:
        """Take nothing any more."""
        self._stopped = True
        self._given.clear()


def _put_back(pool: dict[int, list[RegisteredMemory]], memory: RegisteredMemory) -> None:
    """Keep registered memory for the next who wants some of its size. On any thread."""
    pool.setdefault(memory.nbytes, []).append(memory)


class Memory:
    """Memory of one engine.

    Parameters
    ----------
    device
        Where to allocate.
    loop
        The loop that owns the engine.
    owner
        The engine, as the allocations name it.
    on_lost
        Told when the driver says that the device is gone.
    """

    def __init__(
        self,
        device: Device,
        loop: asyncio.AbstractEventLoop,
        owner: object,
        on_lost: Callable[[DeviceLostError], None],
    ) -> None:
        self._on_lost = on_lost
        self._device = device
        self._owner = owner
        self._returns: Final[Returns[Block]] = Returns(loop, self.free)
        self._wanted_pinned: dict[int, list[RegisteredMemory]] = {}
        self._pinned: list[RegisteredMemory] = []
        # Set once nothing may be freed by a call any more.
        self._lost = False
        # What the driver said when a block was freed, until somebody can be told.
        self._loss: DeviceLostError | None = None
        self.allocated_bytes = 0
        # What was allocated and not freed, by identity.
        self._blocks: dict[int, Block] = {}
        # Frees what is kept for reuse; called when memory has run out.
        self.give_up_kept: Callable[[], None] = lambda: None

    # -- device memory ---------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """Allocate a Buffer; raises as :meth:`allocate` does."""
        sizes, kind = normalise(shape, dtype)
        block = self.allocate(math.prod(sizes) * kind.itemsize)
        return Buffer(Allocation(Lease(block, self._returns.give), self._owner), 0, sizes, kind)

    def allocate(self, nbytes: int) -> Block:
        """Allocate; raises OutOfMemoryError after giving back what is kept and trying once more."""
        self._returns.settle()
        total = self._device.properties.total_bytes
        if nbytes > total:
            raise OutOfMemoryError(f"{nbytes} bytes were asked for, the device has {total} in all")
        try:
            block = self._allocate(nbytes)
        except DeviceLostError as error:
            self._on_lost(error)
            raise
        self.allocated_bytes += nbytes
        self._blocks[id(block)] = block
        return block

    def _allocate(self, nbytes: int) -> Block:
        self._check_well()
        try:
            return self._device.allocate(nbytes)
        except OutOfMemoryError:
            self.give_up_kept()
            self._check_well()
            self._device.trim()
            return self._device.allocate(nbytes)

    def _check_well(self) -> None:
        """Raise what freeing met, rather than call a driver that has lost its device."""
        if self._loss is not None:
            raise self._loss

    def free(self, block: Block) -> None:
        """Free a block that nothing enqueued touches. On the loop's thread."""
        if self._lost or self._blocks.pop(id(block), None) is None:
            return
        self.allocated_bytes -= block.nbytes
        try:
            close_all([lambda: self._device.free(block)])
        except DeviceLostError as error:
            self._loss = error
            self._on_lost(error)

    @property
    def live(self) -> int:
        """How many allocations there are."""
        return len(self._blocks)

    # -- pinned memory ---------------------------------------------------------------------

    def register(self, nbytes: int) -> RegisteredMemory:
        """Register host memory that lives as long as the engine; any thread."""
        memory = self._device.register(nbytes)
        self._pinned.append(memory)
        return memory

    async def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike, register: Any) -> PinnedArray:
        """Return pinned memory from the pool, or register more through ``await register(nbytes)``."""
        sizes, kind = normalise(shape, dtype)
        nbytes = max(math.prod(sizes) * kind.itemsize, 1)
        rounded = 1 << max(nbytes - 1, 4095).bit_length()
        kept = self._wanted_pinned.get(rounded)
        memory = kept.pop() if kept else await register(rounded)
        # Arrays hold the lease, and the collector does not see through an array: nothing here may lead to the engine.
        return PinnedArray(Lease(memory, partial(_put_back, self._wanted_pinned)), self._owner, sizes, kind)

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> list[RegisteredMemory]:
        """Free everything, Buffers that live on included; return the registered memory, to be unregistered."""
        self._returns.stop()
        for block in list(self._blocks.values()):
            self.free(block)
        self._wanted_pinned.clear()
        pinned, self._pinned = self._pinned, []
        return pinned

    def lose(self) -> None:
        """The device is gone: from now on nothing is freed by a call."""
        self._lost = True
        self._returns.stop()
