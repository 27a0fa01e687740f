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
from aiooffload.errors import OutOfMemoryError, UsageError

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from aiooffload.drivers.api import Block, Device, RegisteredMemory

__all__ = ["Memory", "normalise"]


def normalise(shape: int | tuple[int, ...], dtype: DTypeLike) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape as a tuple of sizes and dtype as a dtype; raises UsageError for negative or object ones."""
    sizes = tuple(int(n) for n in shape) if isinstance(shape, tuple | list) else (int(shape),)
    kind = np.dtype(dtype)
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
    """

    def __init__(self, device: Device, loop: asyncio.AbstractEventLoop, owner: object) -> None:
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
        self.live = 0

    # -- device memory ---------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """Allocate; raises OutOfMemoryError after giving back what is kept and trying once more."""
        sizes, kind = normalise(shape, dtype)
        nbytes = math.prod(sizes) * kind.itemsize
        self.collect()
        try:
            block = self._device.allocate(nbytes)
        except OutOfMemoryError:
            self._device.trim()
            block = self._device.allocate(nbytes)
        self.allocated_bytes += nbytes
        self.live += 1
        return Buffer(Allocation(Lease(block, self._give_back), self._owner), 0, sizes, kind)

    def _give_back(self, block: Block) -> None:
        if self._lost:
            return  # the memory went with the device
        self._returned.append(block)
        if threading.get_ident() == self._thread:
            if self._closed:
                return
            self.collect()
        elif not self._closed and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.collect)

    def collect(self) -> None:
        """Free what came back. On the loop's thread."""
        while self._returned and not self._lost:
            block = self._returned.popleft()
            self.allocated_bytes -= block.nbytes
            self.live -= 1
            self._device.free(block)

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
        """Free everything that came back; return the registered memory, to be unregistered."""
        self.collect()
        self._closed = True
        self._wanted_pinned.clear()
        pinned, self._pinned = self._pinned, []
        return pinned

    def lose(self) -> None:
        """The device is gone: from now on nothing is freed by a call."""
        self._lost = True
        self._returned.clear()
