"""Device memory and pinned memory of one engine: allocating, and giving back without waiting.

A block comes back when the last holder of its lease lets go, which may happen on any thread and
at any point of a program, the garbage collector's included. So giving back only notes it down;
the memory is freed on the loop's thread, where the next progress or allocation finds the note.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from aiooffload.buffer import Allocation, Buffer, Lease, PinnedArray
from aiooffload.errors import DeviceLostError, OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import DTypeLike

    from aiooffload.drivers.api import Block, Device, RegisteredMemory

__all__ = ["Memory", "normalise"]


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
        self._loop = loop
        self._owner = owner
        self._thread = threading.get_ident()
        # Appended to by any thread, emptied by the loop's.
        self._returned: deque[Block] = deque()
        self._wanted_pinned: dict[int, list[RegisteredMemory]] = {}
        self._pinned: list[RegisteredMemory] = []
        self._closed = False
        self._lost = False
        self.allocated_bytes = 0
        # What was allocated and not freed, by identity.
        self._blocks: dict[int, Block] = {}

    # -- device memory ---------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """Allocate; raises OutOfMemoryError after giving back what is kept and trying once more."""
        sizes, kind = normalise(shape, dtype)
        nbytes = math.prod(sizes) * kind.itemsize
        self.collect()
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
        return Buffer(Allocation(Lease(block, self._give_back), self._owner), 0, sizes, kind)

    def _allocate(self, nbytes: int) -> Block:
        try:
            return self._device.allocate(nbytes)
        except OutOfMemoryError:
            self._device.trim()
            return self._device.allocate(nbytes)

    def _give_back(self, block: Block) -> None:
        if self._lost or self._closed:
            return  # it went with the device, or was freed with all others
        self._returned.append(block)
        if threading.get_ident() == self._thread:
            self.collect()
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.collect)

    def collect(self) -> None:
        """Free what came back. On the loop's thread."""
        while self._returned and not self._lost:
            self._free(self._returned.popleft())

    def _free(self, block: Block) -> None:
        if self._blocks.pop(id(block), None) is not None:
            self.allocated_bytes -= block.nbytes
            try:
                self._device.free(block)
            except DeviceLostError as error:
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
        return PinnedArray(Lease(memory, self._give_back_pinned), sizes, kind)

    def _give_back_pinned(self, memory: RegisteredMemory) -> None:
        self._wanted_pinned.setdefault(memory.nbytes, []).append(memory)

    # -- the end ---------------------------------------------------------------------------

    def close(self) -> list[RegisteredMemory]:
        """Free everything, Buffers that live on included; return the registered memory, to be unregistered."""
        self._closed = True
        for block in list(self._blocks.values()):
            if not self._lost:
                self._free(block)
        self._wanted_pinned.clear()
        pinned, self._pinned = self._pinned, []
        return pinned

    def lose(self) -> None:
        """The device is gone: from now on nothing is freed by a call."""
        self._lost = True
        self._returned.clear()
