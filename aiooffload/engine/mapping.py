"""Mapped arguments: device memory that a host function sees as arrays while the kernel runs.

The copies have lanes of their own, one in each direction, and go through pinned memory that is kept
for the next call, so that a call which finds a block there allocates nothing. Arguments that
overlap share host memory, as they do on the device.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from sys import getrefcount
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiooffload.operation import Operation
from aiooffload.rules.mapping import place
from aiooffload.rules.wire import MapKind

if TYPE_CHECKING:
    from aiooffload.drivers.api import RegisteredMemory, Stream
    from aiooffload.engine.lanes import Lane, Lanes
    from aiooffload.operation import OperationOwner

__all__ = ["Arena", "Fetched", "Mapping"]

_SMALLEST: Final = 4096
_NO_VIEWS: Final = 2
"""References to a block's array without a view of it: the block's and the counting one. A copy in flight has a view."""


class Block(NamedTuple):
    """Pinned memory for the arguments of one call."""

    array: NDArray[np.uint8]
    device_address: int


class Arena:
    """Pinned blocks, of a power of two bytes each, kept for the next call.

    Parameters
    ----------
    register
        Registers memory that lives as long as the engine, off the loop's thread.
    """

    def __init__(self, register: Callable[[int], Awaitable[RegisteredMemory]]) -> None:
        self._register = register
        self._free: dict[int, list[Block]] = {}

    async def take(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``."""
        size = max(_SMALLEST, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        for index, block in enumerate(free):
            if getrefcount(block.array) == _NO_VIEWS:  # else a host function has kept its array
                return free.pop(index)
        memory = await self._register(size)
        # Of a memoryview: the base of any view is then this array, and not the one it is made from.
        return Block(np.frombuffer(memory.array.data, np.uint8, size), memory.device_address)

    def give_back(self, block: Block) -> None:
        """The call is over; views of the block may live on."""
        self._free[len(block.array)].append(block)


class Fetched(NamedTuple):
    """The mapped arguments of one call, on the host."""

    views: list[NDArray[np.uint8]]
    block: Block
    back: list[tuple[int, int, int]]
    """(device address, host address as the device sees it, bytes) to copy back."""
    memory: list[object]
    """What keeps the memory of the device alive."""


class Mapping:
    """Copies mapped arguments of one engine.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    lanes
        Enqueues the copies.
    to_host, to_device
        The lanes for each direction; nothing else runs there.
    arena
        Where the arguments go on the host.
    owner
        The engine, as the operations name it.
    memory
        Returns what keeps device memory alive; raises UsageError if it is none. See ``Device.mapped_memory``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lanes: Lanes,
        to_host: Lane,
        to_device: Lane,
        arena: Arena,
        owner: OperationOwner,
        memory: Callable[[int, int], object],
    ) -> None:
        self._loop: Final = loop
        self._lanes = lanes
        self._to_host = to_host
        self._to_device = to_device
        self._arena = arena
        self._owner = owner
        self._memory = memory

    async def fetch(self, arguments: Sequence[tuple[int, int, MapKind]]) -> Fetched:
        """Bring the arguments (address, bytes, kind) to the host; raises UsageError if they are no device memory."""
        memory = [self._memory(address, nbytes) for address, nbytes, _ in arguments if nbytes]
        layout = place(arguments)
        block = await self._arena.take(layout.nbytes)
        base = block.device_address
        inward = [(base + offset, address, nbytes) for address, offset, nbytes in layout.inward]
        try:
            if inward:
                await self._copy("map to", inward, self._to_host, block, memory)
        except BaseException:
            self._arena.give_back(block)
            raise
        views = []
        for offset, (_, nbytes, kind) in zip(layout.offsets, arguments, strict=True):
            view = block.array[offset : offset + nbytes]
            if kind is MapKind.TO:
                view.flags.writeable = False
            views.append(view)
        back = [(address, base + offset, nbytes) for address, offset, nbytes in layout.outward]
        return Fetched(views, block, back, memory)

    async def copy_back(self, fetched: Fetched) -> None:
        """Copy back what the kernel is to see."""
        if fetched.back:
            await self._copy("map from", fetched.back, self._to_device, fetched.block, fetched.memory)

    def release(self, fetched: Fetched) -> None:
        """The call is over."""
        self._arena.give_back(fetched.block)

    async def _copy(
        self, name: str, copies: list[tuple[int, int, int]], lane: Lane, block: Block, memory: list[object]
    ) -> None:
        """Make copies of (destination, source, bytes); also when cancelled it returns only when they are over.

        The launch is done when its handlers are, and then its memory may go.
        """
        operation = self._submit(name, copies, lane, (block.array[:], memory))
        failure: BaseException | None = None
        while not operation.finished:
            try:
                await operation
            except asyncio.CancelledError as error:
                failure = error
            except Exception:  # what look() returns
                break
        failed = operation.look()
        failure = failure or failed
        try:
            if failure is not None:
                raise failure
        finally:
            del failure, failed  # its traceback has this frame: each would keep the other, and the arrays

    def _submit(self, name: str, copies: list[tuple[int, int, int]], lane: Lane, keep: object) -> Operation[None]:
        operation: Operation[None] = Operation(self._loop, self._owner, name)

        def steps(stream: Stream) -> None:
            for destination, source, nbytes in copies:
                stream.enqueue_copy(destination, source, nbytes)

        operation.steps = steps
        operation.kind, operation.nbytes = "copy", sum(nbytes for _, _, nbytes in copies)
        operation.keep = keep
        self._lanes.place(operation, lane)
        return operation
