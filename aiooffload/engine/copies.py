"""Copies between host and device, and fills.

Ordinary host memory is pageable, which a device cannot read by itself. It goes through *staging*:
blocks of registered memory, each lent to one copy until that copy's mark has arrived, so a block is
never written while the device still reads it. Small copies pass through a block at once, on the
loop's thread; large ones go piece by piece, and a worker thread moves the bytes. Pinned arrays
need no staging.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from aiooffload.buffer import Buffer, Lease, PinnedArray
from aiooffload.operation import Operation

if TYPE_CHECKING:
    from aiooffload.drivers.api import RegisteredMemory, Stream
    from aiooffload.engine.lanes import Lanes

__all__ = [
    "INLINE_NBYTES",
    "LARGE_BLOCKS",
    "MOST_LARGE_BLOCKS",
    "PIECE_NBYTES",
    "SMALL_BLOCKS",
    "Copies",
    "Staging",
]

INLINE_NBYTES: Final = 256 * 1024
"""Copies up to this size use the loop's thread: about as long as waking another one takes."""
PIECE_NBYTES: Final = 2 * 1024 * 1024
SMALL_BLOCKS: Final = 64
LARGE_BLOCKS: Final = 8
MOST_LARGE_BLOCKS: Final = 128
PIECES_IN_FLIGHT: Final = 4
"""Of one copy: enough to keep the bus busy, few enough to leave blocks for others."""

Bytes = NDArray[np.uint8]


class StagingBlock:
    """A stretch of registered memory, lent to one copy at a time."""

    __slots__ = ("array", "device_address")

    def __init__(self, memory: RegisteredMemory, offset: int, nbytes: int) -> None:
        self.array: Final[Bytes] = memory.array[offset : offset + nbytes]
        self.device_address: Final = memory.device_address + offset


class Staging:
    """Blocks of one size.

    Parameters
    ----------
    memory
        Registered memory to cut up.
    nbytes
        Size of a block.
    most
        How many blocks there may be; more are registered when all are out.
    grow
        Starts registering more and hands the memory to :meth:`add`.
    """

    def __init__(
        self, memory: RegisteredMemory, nbytes: int, most: int = 0, grow: Callable[[], object] | None = None
    ) -> None:
        self._nbytes = nbytes
        self._most = most
        self._grow = grow
        self._growing = False
        self._count = 0
        # A block is here, or with exactly one copy whose mark has not arrived.
        self._free: list[StagingBlock] = []
        self._waiters: deque[asyncio.Future[Lease[StagingBlock]]] = deque()
        self.add(memory)

    def add(self, memory: RegisteredMemory) -> None:
        """Cut up more memory."""
        self._growing = False
        for offset in range(0, memory.nbytes - self._nbytes + 1, self._nbytes):
            self._count += 1
            self._give_back(StagingBlock(memory, offset, self._nbytes))
        self._grow_if_wanted()

    def _grow_if_wanted(self) -> None:
        if self._waiters and self._grow is not None and not self._growing and self._count < self._most:
            self._growing = True
            self._grow()

    def take_now(self) -> Lease[StagingBlock] | None:
        """Return a free block, or None. It comes back when the last holder of its lease lets go."""
        return Lease(self._free.pop(), self._give_back) if self._free else None

    async def take(self) -> Lease[StagingBlock]:
        """Return a block, in the order of asking."""
        lease = None if self._waiters else self.take_now()
        if lease is not None:
            return lease
        future: asyncio.Future[Lease[StagingBlock]] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        self._grow_if_wanted()
        return await future

    def _give_back(self, block: StagingBlock) -> None:
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                future.set_result(Lease(block, self._give_back))
                return
        self._free.append(block)


class Copies:
    """Submits the copies of one engine.

    Parameters
    ----------
    lanes
        Where they go.
    small, large
        Staging for copies on the loop's thread, and for pieces of larger ones.
    offload
        Runs a call on a worker thread.
    spawn
        Starts a background task of the engine.
    owner
        The engine, as its operations name it.
    """

    def __init__(
        self,
        lanes: Lanes,
        small: Staging,
        large: Staging,
        offload: Callable[..., Awaitable[Any]],
        spawn: Callable[[Any], object],
        owner: Any,
    ) -> None:
        self._lanes = lanes
        self._small = small
        self._large = large
        self._offload = offload
        self._spawn = spawn
        self._owner = owner

    # Each method fills in what the operation has to do; the engine orders and places it.

    def fill(self, operation: Operation[Any], target: Buffer, pattern: bytes, count: int) -> None:
        """Write ``pattern`` over ``target``."""
        address = target.address
        operation.steps = lambda stream: stream.enqueue_fill(address, pattern, count)

    def device_to_device(self, operation: Operation[Any], target: Buffer, source: Buffer) -> None:
        """Copy all of ``source`` to ``target``."""
        self._direct(operation, target.address, source.address, source.nbytes)

    def pinned_to_device(self, operation: Operation[Any], target: Buffer, source: PinnedArray) -> None:
        """Copy without staging."""
        assert source.lease is not None
        self._direct(operation, target.address, source.lease.block.device_address, target.nbytes)

    def device_to_pinned(self, operation: Operation[Any], target: PinnedArray, source: Buffer) -> None:
        """Copy without staging."""
        assert target.lease is not None
        self._direct(operation, target.lease.block.device_address, source.address, source.nbytes)

    def _direct(self, operation: Operation[Any], target: int, source: int, nbytes: int) -> None:
        operation.steps = lambda stream: stream.enqueue_copy(target, source, nbytes)

    def host_to_device(self, operation: Operation[Any], target: Buffer, source: Bytes, result: object) -> None:
        """Copy pageable memory; a small source is read now, a large one until the operation is done."""
        lease = self._small.take_now() if source.nbytes <= INLINE_NBYTES else None
        if lease is None:
            self._stream(operation, lambda: self._pump_in(operation, target.address, source, result))
            return
        lease.block.array[: source.nbytes] = source
        self._direct(operation, target.address, lease.block.device_address, source.nbytes)
        operation.keep = (operation.keep, lease)
        if result is not None:
            operation.arrival = lambda op: op.finish(result)

    def device_to_host(self, operation: Operation[Any], target: Bytes, source: Buffer, result: object) -> None:
        """Copy to pageable memory."""
        lease = self._small.take_now() if target.nbytes <= INLINE_NBYTES else None
        if lease is None:
            self._stream(operation, lambda: self._pump_out(operation, target, source.address, result))
            return
        staged = lease.block.array[: target.nbytes]
        self._direct(operation, lease.block.device_address, source.address, target.nbytes)
        operation.keep = (operation.keep, lease)

        def arrived(op: Operation[Any]) -> None:
            target[:] = staged
            op.finish(result)

        operation.arrival = arrived

    # -- piece by piece --------------------------------------------------------------------

    def _stream(self, operation: Operation[Any], pump: Callable[[], Any]) -> None:
        operation.streamed = True

        def start(_: Stream) -> None:
            operation.steps = None  # from here on the pump has it
            self._spawn(self._guard(operation, pump()))

        operation.steps = start

    async def _guard(self, operation: Operation[Any], pump: Any) -> None:
        """Whatever ends the pump ends the operation."""
        try:
            await pump
        except Exception as error:
            self._lanes.finish_streamed(operation, error)
        except asyncio.CancelledError as error:
            self._lanes.finish_streamed(operation, self._lanes.dead or error)
            raise

    def _pieces(self, nbytes: int) -> list[slice]:
        return [slice(start, min(start + PIECE_NBYTES, nbytes)) for start in range(0, nbytes, PIECE_NBYTES)]

    def _piece(
        self, parent: Operation[Any], target: int, source: int, nbytes: int, lease: Lease[StagingBlock]
    ) -> Operation[None]:
        """Submit one piece on the lane of ``parent``; the block comes back when its mark has arrived."""
        piece: Operation[None] = Operation(parent.loop, self._owner, f"piece of {parent.name}")
        piece.keep = (parent.keep, lease)
        piece.add_done_callback(Operation.look)  # its failure is the copy's, told there
        self._direct(piece, target, source, nbytes)
        self._lanes.place(piece, parent.lane, is_piece=True)
        return piece

    async def _pump_in(self, operation: Operation[Any], target: int, source: Bytes, result: object) -> None:
        pieces: list[Operation[None]] = []
        try:
            for part in self._pieces(source.nbytes):
                if len(pieces) >= PIECES_IN_FLIGHT:
                    await pieces[-PIECES_IN_FLIGHT]
                lease = await self._large.take()
                await self._offload(_move, lease.block.array[: part.stop - part.start], source[part], lease)
                if operation.stop is not None:
                    break
                address = lease.block.device_address
                pieces.append(self._piece(operation, target + part.start, address, part.stop - part.start, lease))
                del lease
        finally:
            # Done means that the device no longer touches the memory, whatever else went wrong.
            failures = await _settle([piece.wait() for piece in pieces])
        self._lanes.finish_streamed(operation, failures[0] if failures else operation.stop, result)

    async def _pump_out(self, operation: Operation[Any], target: Bytes, source: int, result: object) -> None:
        moves: list[asyncio.Task[None]] = []
        try:
            for part in self._pieces(target.nbytes):
                if len(moves) >= PIECES_IN_FLIGHT:
                    await moves[-PIECES_IN_FLIGHT]
                lease = await self._large.take()
                if operation.stop is not None:
                    break
                address = lease.block.device_address
                piece = self._piece(operation, address, source + part.start, part.stop - part.start, lease)
                moves.append(operation.loop.create_task(self._move_out(piece, lease, target[part])))
                del lease
        finally:
            failures = await _settle(moves)
        self._lanes.finish_streamed(operation, failures[0] if failures else operation.stop, result)

    async def _move_out(self, piece: Operation[None], lease: Lease[StagingBlock], target: Bytes) -> None:
        await piece
        await self._offload(_move, target, lease.block.array[: target.nbytes], lease)


def _move(target: Bytes, source: Bytes, lease: Lease[StagingBlock]) -> None:
    """Copy on a worker thread, which holds the lease until it has, whatever becomes of the task."""
    np.copyto(target, source)


async def _settle(waits: list[Any]) -> list[BaseException]:
    """Wait for all of them and return their failures."""
    return [outcome for outcome in await asyncio.gather(*waits, return_exceptions=True) if outcome is not None]
