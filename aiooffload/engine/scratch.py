"""Workspace of launches: blocks that stay with their lanes, given out when a launch is enqueued.

Which block a launch gets is decided by :mod:`aiooffload.rules.scratch`; this is the memory and the time around it.
A launch with a :class:`~aiooffload.kernel.Scratch` among its arguments is packed when its lane is known.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from aiooffload._native import now_ns
from aiooffload.buffer import Allocation, Buffer, Lease
from aiooffload.engine.memory import Returns
from aiooffload.errors import UsageError
from aiooffload.kernel import Scratch
from aiooffload.rules.geometry import triple
from aiooffload.rules.scratch import ScratchPolicy, aligned

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from aiooffload.drivers.api import Block
    from aiooffload.engine.memory import Memory
    from aiooffload.kernel import Kernel
    from aiooffload.operation import Operation
    from aiooffload.rules.geometry import Dimensions

__all__ = ["NOWHERE", "SHARE", "ScratchCache", "ScratchLayout", "layout"]

IDLE_S: Final = 5.0
"""How long a block is kept while nothing uses it."""
SHARE: Final = 8
"""What all lanes keep together is this part of the device's memory at most."""
_SCRATCH: Final = frozenset({Scratch})


class _Piece(NamedTuple):
    argument: int
    offset: int
    length: int
    dtype: np.dtype[Any]


class ScratchLayout(NamedTuple):
    """The scratch of one launch, all in one block."""

    nbytes: int
    pieces: tuple[_Piece, ...]

    def fill(self, arguments: Sequence[Any], allocation: Allocation | None) -> list[Any]:
        """Return the arguments with Buffers for Scratch; without an allocation, such as say nothing of an address."""
        filled = list(arguments)
        for argument, offset, length, dtype in self.pieces:
            filled[argument] = NOWHERE if allocation is None else Buffer(allocation, offset, (length,), dtype)
        return filled


def layout(kernel: Kernel, arguments: Sequence[object], grid: Dimensions, block: Dimensions) -> ScratchLayout | None:
    """Lay out the Scratch among the arguments, whose count was checked; None if there is none.

    Raises UsageError for one to a scalar parameter, or of a size that its dtype does not divide.
    """
    if _SCRATCH.isdisjoint(map(type, arguments)):  # on the way of every launch
        return None
    threads = math.prod(triple(grid, "grid")) * math.prod(triple(block, "block"))
    pieces, end = [], 0
    for index, value in enumerate(arguments):
        if not isinstance(value, Scratch):
            continue
        dtype = np.dtype(np.uint8)
        if kernel.signature.parameters is not None:
            parameter = kernel.signature.parameters[index]
            parameter.check(value)
            dtype = dtype if parameter.dtype is None else parameter.dtype
        nbytes = value.size(threads)
        if nbytes % dtype.itemsize:
            raise UsageError(
                f"{value!r} of {nbytes} bytes, argument {index} of kernel {kernel.name}, is no array of {dtype}"
            )
        pieces.append(_Piece(index, aligned(end), nbytes // dtype.itemsize, dtype))
        end = aligned(end) + nbytes
    return ScratchLayout(end, tuple(pieces))


class ScratchCache:
    """The scratch blocks of one engine. Everything but giving back runs on the loop's thread.

    Parameters
    ----------
    memory
        Where blocks come from and go to.
    loop
        Its timer ends what was idle for long; it has one only while something is idle.
    owner
        The engine, as the allocations name it.
    keep_nbytes
        The largest block that is kept.
    total_nbytes
        What is kept of all lanes together, at most.
    clock
        Returns nanoseconds.
    """

    def __init__(
        self,
        memory: Memory,
        loop: asyncio.AbstractEventLoop,
        owner: object,
        keep_nbytes: int,
        total_nbytes: int,
        clock: Callable[[], int] = now_ns,
    ) -> None:
        self._memory = memory
        self._loop = loop
        self._owner = owner
        self._clock = clock
        self._policy: Final[ScratchPolicy[Block]] = ScratchPolicy(keep_nbytes, total_nbytes, int(IDLE_S * 1e9))
        self._returns: Final[Returns[Block]] = Returns(loop, self._done)
        # Armed only while something is idle.
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.reuses = 0
        self.allocations = 0
        memory.give_up_kept = self._give_up

    def fill(self, operation: Operation[Any], wanted: ScratchLayout, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments of ``operation``, whose lane is known, with its scratch, which it holds until done.

        Raises OutOfMemoryError, DeviceLostError.
        """
        lease = self._lend(operation.lane.index, wanted.nbytes, bool(operation.calling))
        operation.keep = (operation.keep, lease)
        return wanted.fill(arguments, Allocation(lease, self._owner))

    def _lend(self, lane: int, nbytes: int, alone: bool) -> Lease[Block]:
        with self._returns:
            block, rounded, free = self._policy.want(lane, nbytes, alone)
            if block is None:
                self._free(free)
                block = self._memory.allocate(rounded)
                self._policy.allocated(lane, block, rounded)
                self.allocations += 1
            else:
                self.reuses += 1
            return Lease(block, self._returns.give)

    def _done(self, block: Block) -> None:
        self._free(self._policy.done(block, self._clock()))
        self._arm()

    def _arm(self) -> None:
        due_ns = self._policy.due_ns
        if due_ns is not None and self._timer is None and not self._stopped and not self._loop.is_closed():
            self._timer = self._loop.call_later(max(due_ns - self._clock(), 0) / 1e9, self._expire)

    def _expire(self) -> None:
        self._timer = None
        with self._returns:
            self._free(self._policy.expire(self._clock()))
        self._arm()

    def _give_up(self) -> None:
        """Memory has run out: free what nothing uses."""
        with self._returns:
            self._free(self._policy.out_of_memory())

    def _free(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._memory.free(block)

    def stop(self) -> None:
        """Give nothing back any more, since the device is gone or about to free everything."""
        self._stopped = True
        self._returns.stop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def blocks(self) -> int:
        """How many there are, those in use included."""
        return len(self._policy)

    def stats(self) -> dict[str, int]:
        """Return counters; see ``Offload.stats``."""
        return {
            "kept_bytes": self._policy.idle_nbytes,
            "blocks": self.blocks,
            "reuses": self.reuses,
            "allocations": self.allocations,
        }


class _Nothing:
    """The block of what takes the place of scratch while its address is not known."""

    address = nbytes = 0
    host_array: NDArray[np.uint8] | None = np.empty(0, np.uint8)


NOWHERE: Final = Buffer(Allocation(Lease(_Nothing(), lambda _: None), None), 0, (0,), np.dtype(np.uint8))
