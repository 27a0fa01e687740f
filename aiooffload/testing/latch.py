"""A latch on the device: lanes wait at it until the test opens it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from aiooffload._native import Word
    from aiooffload.buffer import PinnedArray
    from aiooffload.engine.lanes import Lane
    from aiooffload.offload import Offload
    from aiooffload.operation import Operation

__all__ = ["Latch"]


class Latch:
    """Holds lanes, on the device and without a kernel, until it is opened. Made by :meth:`make`.

    Notes
    -----
    It takes no multiprocessor. On a GPU a blocked stream holds one of the hardware queues, of which there are 32 at
    most (``CUDA_DEVICE_MAX_CONNECTIONS``): hold few lanes at a time.
    """

    def __init__(self, off: Offload, memory: PinnedArray, word: Word) -> None:
        self._off = off
        self._memory = memory
        self._word = word

    @classmethod
    async def make(cls, off: Offload) -> Latch:
        """Make a closed latch.

        Raises
        ------
        OutOfMemoryError
            No page of host memory can be pinned.
        """
        memory = await off.pinned(1, np.uint64)
        memory.array[:] = 0
        return cls(off, memory, memory.open_lease().block.word(0))

    def hold(self, lane: Lane) -> Operation[None]:
        """Let what is submitted to ``lane`` from now on wait; the operation is done once the latch is open.

        Raises
        ------
        UsageError
            ``lane`` is none of the Offload's.
        WouldBlock
            As for ``off.custom_operation``.
        """
        memory, word = self._memory, self._word

        def wait(lane: Lane) -> None:
            memory.open_lease()  # held by the operation, through this function
            lane.stream.enqueue_wait(word, 1)

        return self._off.custom_operation(wait, lane=lane)

    def open(self) -> None:
        """Let everything go on, for good. On any thread."""
        self._word.store(1)
