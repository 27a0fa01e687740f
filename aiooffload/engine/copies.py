"""Copies between host and device, and fills.

Ordinary host memory is pageable, which a device cannot read by itself. It goes through *staging*:
blocks of registered memory, each lent to one copy until that copy's mark has arrived, so a block is
never written while the device still reads it. Small copies pass through a block at once, on the
loop's thread; large ones go piece by piece, and a worker thread moves the bytes. Pinned arrays
need no staging.

A copy of any shape is a plan of driver calls (``rules/copyplan.py``). Where it is staged, NumPy follows the
strides of the host, and a block has the elements in the order of the device's memory: only gaps there take
calls. What needs more calls than one operation may enqueue goes to its lane in portions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiooffload.buffer import Buffer, Lease
from aiooffload.engine.memory import Returns
from aiooffload.operation import Operation
from aiooffload.rules.copyplan import Step, c_strides, parts, plan, span

if TYPE_CHECKING:
    from aiooffload.drivers.api import Device, RegisteredMemory, Stream
    from aiooffload.engine.lanes import Lane, Lanes

__all__ = [
    "INLINE_NBYTES",
    "LARGE_BLOCKS",
    "MOST_LARGE_BLOCKS",
    "PIECE_NBYTES",
    "SMALL_BLOCKS",
    "Copies",
    "Place",
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

CALLS_AT_ONCE: Final = 2
"""Driver calls of one operation at most: with its mark three entries, so that a full lane is no full stream."""
PORTION_CALLS: Final = 32
PORTIONS_IN_FLIGHT: Final = 2
"""On one lane, of all its copies together: each has more entries than the lane's depth allows for."""

Bytes = NDArray[np.uint8]
Call = Callable[["Stream"], None]
_BYTES: Final = (1,)
"""The strides of contiguous bytes."""


class Place(NamedTuple):
    """Where a device finds one side of a copy."""

    address: int
    """Of the first element."""
    strides: tuple[int, ...]
    """Bytes from one element to the next in each dimension."""

    def part(self, part: tuple[slice, ...]) -> Place:
        """Return the place of a part."""
        distance = sum(one.start * stride for one, stride in zip(part, self.strides, strict=True))
        return self._replace(address=self.address + distance)

    def ordered(self) -> tuple[Place, list[int]]:
        """Return it with its dimensions in the order of memory, outermost first, and which they were."""
        order = sorted(range(len(self.strides)), key=lambda axis: -self.strides[axis])
        return self._replace(strides=tuple(self.strides[axis] for axis in order)), order


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
        # The worker that moved a block's bytes may be the last to let go of it.
        self._returns: Final[Returns[StagingBlock]] = Returns(asyncio.get_running_loop(), self._give_back)
        self.add(memory)

    def add(self, memory: RegisteredMemory) -> None:
        """Cut up more memory."""
        self._growing = False
        for offset in range(0, memory.nbytes - self._nbytes + 1, self._nbytes):
            self._count += 1
            self._give_back(StagingBlock(memory, offset, self._nbytes))
        self._grow_if_wanted()

    def stay(self) -> None:
        """There is no more memory: what waits goes on with the blocks there are, the next that waits tries again."""
        self._growing = False

    def _grow_if_wanted(self) -> None:
        if self._waiters and self._grow is not None and not self._growing and self._count < self._most:
            self._growing = True
            self._grow()

    def take_now(self) -> Lease[StagingBlock] | None:
        """Return a free block, or None. It comes back when the last holder of its lease lets go."""
        return Lease(self._free.pop(), self._returns.give) if self._free else None

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
                future.set_result(Lease(block, self._returns.give))
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
    device
        Where they are made.
    crowded
        Whether kernels may be on the device that fill it and wait for the host.
    """

    def __init__(
        self,
        lanes: Lanes,
        small: Staging,
        large: Staging,
        offload: Callable[..., Awaitable[Any]],
        spawn: Callable[[Any], asyncio.Task[None]],
        owner: Any,
        device: Device,
        crowded: Callable[[], bool],
    ) -> None:
        self._max_pitch = device.properties.max_pitch
        self._device = device
        self._crowded = crowded
        self._portions: dict[Lane, asyncio.Semaphore] = {}
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

    def fill_strided(self, operation: Operation[Any], target: Buffer, pattern: bytes, scratch: Buffer) -> None:
        """Write ``pattern`` over ``target``: fill ``scratch``, which is contiguous, and copy from there."""
        place, order = Place(target.address, target.strides).ordered()
        shape, itemsize = tuple(target.shape[axis] for axis in order), target.dtype.itemsize
        filled, nbytes = scratch.address, scratch.nbytes

        def calls() -> Iterator[Call]:
            yield lambda stream: stream.enqueue_fill(filled, pattern, nbytes // len(pattern))
            for part in parts(shape, itemsize, nbytes):
                sizes = tuple(one.stop - one.start for one in part)
                staged = Place(filled, c_strides(sizes, itemsize))
                yield from self._calls(sizes, itemsize, place.part(part), staged, within=target.allocation.plain)

        operation.keep = scratch.open_lease()
        self._send(operation, calls(), None)

    def direct(
        self,
        operation: Operation[Any],
        shape: tuple[int, ...],
        itemsize: int,
        target: Place,
        source: Place,
        result: object = None,
        peers: tuple[int, ...] = (),
        within: bool = False,
    ) -> None:
        """Copy between any two of device memory and pinned memory.

        ``peers`` are the handles of two devices between which it goes, and ``within`` says that kernels of this
        device reach both sides.
        """
        outcome = None if result is None else lambda: result
        self._send(operation, self._calls(shape, itemsize, target, source, peers, within), outcome)

    def host_to_device(self, operation: Operation[Any], target: Place, source: NDArray[Any], result: object) -> None:
        """Copy pageable memory; a small source is read now, a large one until the operation is done."""
        source, target = _in_order(source, target)
        lease = self._small.take_now() if _extent(source) <= INLINE_NBYTES else None
        if lease is None:
            self._stream(operation, lambda: self._pump_in(operation, target, source, result))
            return
        np.copyto(_staged(lease, source), source)
        operation.keep = (operation.keep, lease)
        calls = self._calls(source.shape, source.itemsize, target, _place_in(lease, source))
        self._send(operation, calls, None if result is None else lambda: result)

    def device_to_host(self, operation: Operation[Any], target: NDArray[Any], source: Place, result: object) -> None:
        """Copy to pageable memory."""
        target, source = _in_order(target, source)
        lease = self._small.take_now() if _extent(target) <= INLINE_NBYTES else None
        if lease is None:
            self._stream(operation, lambda: self._pump_out(operation, target, source, result))
            return
        staged = _staged(lease, target)
        calls = self._calls(target.shape, target.itemsize, _place_in(lease, target), source)
        operation.keep = (operation.keep, lease)

        def arrived() -> object:
            np.copyto(target, staged)
            return result

        self._send(operation, calls, arrived)

    # -- driver calls ----------------------------------------------------------------------

    def _calls(
        self,
        shape: tuple[int, ...],
        itemsize: int,
        target: Place,
        source: Place,
        peers: tuple[int, ...] = (),
        within: bool = False,
    ) -> Iterator[Call]:
        """Plan a copy, now, and make its calls as they are asked for."""
        to, dst_strides = target
        at, src_strides = source
        if itemsize == 1 and dst_strides == src_strides == _BYTES:  # what most copies are needs no planning
            return iter((_call(to, at, shape[0], None, peers),) if shape[0] else ())
        steps = plan(shape, itemsize, dst_strides, src_strides, max_pitch=self._max_pitch)
        make = self._rows if within and steps.first is not None and steps.first.dimensions > 1 else _call
        return (make(to + step.dst_offset, at + step.src_offset, step.width, step, peers) for step in steps)

    def _rows(self, target: int, source: int, width: int, step: Step, peers: tuple[int, ...]) -> Call:
        """Copy by a kernel if that is faster, and nobody has to fear that it waits for a kernel that waits for it."""
        plain = _call(target, source, width, step, peers)
        kernel = self._device.rows(target, source, *step[2:])
        if kernel is None:
            return plain
        return lambda stream: (plain if self._crowded() else kernel)(stream)

    def _send(self, operation: Operation[Any], calls: Iterator[Call], outcome: Callable[[], object] | None) -> None:
        """Make ``calls`` what it has to do, and ``outcome()`` its result; many calls go in portions."""
        first = tuple(islice(calls, CALLS_AT_ONCE + 1))
        if len(first) > CALLS_AT_ONCE:
            self._stream(operation, lambda: self._pump_calls(operation, chain(first, calls), outcome))
            return
        operation.steps = _together(first)
        if outcome is not None:
            operation.arrival = lambda op: op.finish(outcome())

    async def _pump_calls(
        self, operation: Operation[Any], calls: Iterator[Call], outcome: Callable[[], object] | None
    ) -> None:
        await self._in_portions(operation, calls, None)
        stop = operation.stop
        self._lanes.finish_streamed(operation, stop, outcome() if outcome is not None and stop is None else None)

    async def _in_portions(
        self, parent: Operation[Any], calls: Iterator[Call], lease: Lease[StagingBlock] | None
    ) -> bool:
        """Submit calls on the lane of ``parent`` and wait until they are done; False if it was stopped meanwhile."""
        turns = self._portions.setdefault(parent.lane, asyncio.Semaphore(PORTIONS_IN_FLIGHT))
        portions: deque[Operation[None]] = deque()
        try:
            while portion := tuple(islice(calls, PORTION_CALLS)):
                await turns.acquire()
                if parent.stop is not None:
                    turns.release()
                    return False
                portions.append(self._piece(parent, portion, lease))
                portions[-1].add_done_callback(lambda _: turns.release())
                if len(portions) > PORTIONS_IN_FLIGHT:
                    await portions.popleft()
        finally:
            failures = await _settle([portion.wait() for portion in portions])
        if failures:
            raise failures[0]
        return True

    # -- piece by piece --------------------------------------------------------------------

    def _stream(self, operation: Operation[Any], pump: Callable[[], Any]) -> None:
        operation.streamed = True

        def start(_: Stream) -> None:
            operation.steps = None  # from here on the pump has it
            task = self._spawn(self._guard(operation, pump))
            task.add_done_callback(lambda _: self._end_unless_ended(operation))

        operation.steps = start

    def _end_unless_ended(self, operation: Operation[Any]) -> None:
        """Nothing of a task runs that was cancelled before its first step."""
        if not operation.finished:
            self._lanes.finish_streamed(operation, self._lanes.dead or asyncio.CancelledError())

    async def _guard(self, operation: Operation[Any], pump: Callable[[], Any]) -> None:
        """Whatever ends the pump ends the operation."""
        try:
            await pump()
        except Exception as error:
            self._lanes.finish_streamed(operation, error)
        except asyncio.CancelledError as error:
            self._lanes.finish_streamed(operation, self._lanes.dead or error)
            raise

    def _piece(
        self, parent: Operation[Any], calls: tuple[Call, ...], lease: Lease[StagingBlock] | None
    ) -> Operation[None]:
        """Submit one piece on the lane of ``parent``; the block comes back when its mark has arrived."""
        piece: Operation[None] = Operation(parent.loop, self._owner, f"piece of {parent.name}")
        piece.keep = (parent.keep, lease)
        piece.add_done_callback(Operation.look)  # its failure is the copy's, told there
        piece.steps = _together(calls)
        piece.kind = "piece"
        self._lanes.place(piece, parent.lane, part_of=parent)
        return piece

    async def _pass(
        self, parent: Operation[Any], calls: Iterator[Call], lease: Lease[StagingBlock]
    ) -> list[Operation[None]] | None:
        """Submit the calls of one block and return those in flight, none if they were many; None if it was stopped."""
        first = tuple(islice(calls, CALLS_AT_ONCE + 1))
        if len(first) <= CALLS_AT_ONCE:
            return [self._piece(parent, first, lease)]
        return [] if await self._in_portions(parent, chain(first, calls), lease) else None

    async def _pump_in(self, operation: Operation[Any], target: Place, source: NDArray[Any], result: object) -> None:
        pieces: list[Operation[None]] = []
        try:
            for part in parts(source.shape, source.itemsize, PIECE_NBYTES):
                if len(pieces) >= PIECES_IN_FLIGHT:
                    await pieces[-PIECES_IN_FLIGHT]
                lease = await self._large.take()
                piece = source[part]
                await self._offload(_move, _staged(lease, piece), piece, lease)
                if operation.stop is not None:
                    break
                calls = self._calls(piece.shape, piece.itemsize, target.part(part), _place_in(lease, piece))
                pieces += await self._pass(operation, calls, lease) or ()
                del lease
        finally:
            # Done means that the device no longer touches the memory, whatever else went wrong.
            failures = await _settle([piece.wait() for piece in pieces])
        self._lanes.finish_streamed(operation, failures[0] if failures else operation.stop, result)

    async def _pump_out(self, operation: Operation[Any], target: NDArray[Any], source: Place, result: object) -> None:
        moves: list[asyncio.Task[None]] = []
        try:
            for part in parts(target.shape, target.itemsize, PIECE_NBYTES):
                if len(moves) >= PIECES_IN_FLIGHT:
                    await moves[-PIECES_IN_FLIGHT]
                lease = await self._large.take()
                if operation.stop is not None:
                    break
                piece = target[part]
                calls = self._calls(piece.shape, piece.itemsize, _place_in(lease, piece), source.part(part))
                arriving = await self._pass(operation, calls, lease)
                if arriving is None:  # what the block has is not all of this piece
                    break
                moves.append(operation.loop.create_task(self._move_out(arriving, lease, piece)))
                del lease
        finally:
            failures = await _settle(moves)
        self._lanes.finish_streamed(operation, failures[0] if failures else operation.stop, result)

    async def _move_out(
        self, arriving: list[Operation[None]], lease: Lease[StagingBlock], target: NDArray[Any]
    ) -> None:
        for piece in arriving:
            await piece
        await self._offload(_move, target, _staged(lease, target), lease)


def _call(target: int, source: int, width: int, step: Step | None, peers: tuple[int, ...]) -> Call:
    if step is None or step.dimensions == 1:
        return lambda stream: stream.enqueue_copy(target, source, width, *peers)
    return lambda stream: stream.enqueue_copy_box(target, source, *step[2:], *peers)


def _together(calls: tuple[Call, ...]) -> Call:
    if len(calls) == 1:
        return calls[0]

    def steps(stream: Stream) -> None:
        for call in calls:
            call(stream)

    return steps


def _extent(array: NDArray[Any]) -> int:
    """Return how many bytes it has, or its elements are spread over: what it costs to go over them."""
    nbytes = array.nbytes
    return nbytes if array.flags.c_contiguous else max(nbytes, span(array.shape, array.itemsize, array.strides))


def _in_order(array: NDArray[Any], place: Place) -> tuple[NDArray[Any], Place]:
    """Return both with their dimensions in the order of the device's memory, in items that NumPy moves as they are."""
    if place.strides == _BYTES:
        return array, place
    place, order = place.ordered()
    array = array.transpose(order)
    itemsize = array.itemsize
    if itemsize <= PIECE_NBYTES:
        # Not their own dtype: NumPy may leave out what is between the fields of a struct.
        return array.view(f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"), place
    # An item that fits into no block is a dimension of bytes.
    return array[..., np.newaxis].view(np.uint8), place._replace(strides=(*place.strides, 1))


def _staged(lease: Lease[StagingBlock], array: NDArray[Any]) -> NDArray[Any]:
    """Return the array in the block that has the elements of ``array``, in C order."""
    staged: NDArray[Any] = lease.block.array[: array.nbytes]
    return staged if array.ndim == 1 and array.dtype == np.uint8 else staged.view(array.dtype).reshape(array.shape)


def _place_in(lease: Lease[StagingBlock], array: NDArray[Any]) -> Place:
    """Return where that is for the device."""
    return Place(lease.block.device_address, c_strides(array.shape, array.itemsize))


def _move(target: NDArray[Any], source: NDArray[Any], lease: Lease[StagingBlock]) -> None:
    """Copy on a worker thread, which holds the lease until it has, whatever becomes of the task."""
    np.copyto(target, source)


async def _settle(waits: list[Any]) -> list[BaseException]:
    """Wait for all of them and return their failures."""
    return [outcome for outcome in await asyncio.gather(*waits, return_exceptions=True) if outcome is not None]
