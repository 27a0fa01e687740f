"""Freed memory that is kept, full of poison, to see who still uses it."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["POISON", "Freed"]

POISON: Final = 0xDD
_KEEP_NBYTES: Final = 256 << 20


class Freed:
    """Blocks that were freed, the latest 256 MiB of them. On one thread.

    Parameters
    ----------
    problems
        Where uses are noted down.
    """

    def __init__(self, problems: list[str]) -> None:
        self._problems: Final = problems
        self._blocks: deque[NDArray[np.uint8]] = deque()
        self._nbytes = 0

    def add(self, block: NDArray[np.uint8]) -> None:
        """Poison a block and keep it."""
        block.fill(POISON)
        self._blocks.append(block)
        self._nbytes += block.nbytes
        while self._nbytes > _KEEP_NBYTES:
            oldest = self._blocks.popleft()
            self._nbytes -= oldest.nbytes
            self._check(oldest)

    def touch(self, call: str, address: int, nbytes: int) -> None:
        """Note it if any of those bytes were freed."""
        for block in self._blocks:
            first = block.ctypes.data
            if address < first + block.nbytes and first < address + nbytes:
                self._problems.append(f"{call} uses {nbytes} bytes of memory that was freed")

    def check(self) -> None:
        """Note what was written since it was freed, and let go of everything."""
        while self._blocks:
            self._check(self._blocks.popleft())
        self._nbytes = 0

    def _check(self, block: NDArray[np.uint8]) -> None:
        if (block != POISON).any():
            self._problems.append(f"a block of {block.nbytes} bytes was written after it was freed")
