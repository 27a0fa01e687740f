"""Freed memory that is kept: who writes or names it is found out."""

from __future__ import annotations

import numpy as np
import pytest

from aiooffload.testing import memory
from aiooffload.testing.memory import POISON, Freed


def test_freed_memory_is_poisoned_and_watched() -> None:
    """It is filled; naming any byte of it is a problem, and so is having written one."""
    problems: list[str] = []
    freed, block = Freed(problems), np.zeros(64, np.uint8)
    freed.add(block)
    assert (block == POISON).all()
    first = block.ctypes.data
    freed.touch("copy", first - 8, 8)
    freed.touch("copy", first + 64, 8)
    assert problems == []
    freed.touch("copy", first + 63, 1)
    freed.touch("fill", first - 8, 9)
    assert [problem.split()[0] for problem in problems] == ["copy", "fill"]
    problems.clear()
    block[5] = 1
    freed.check()
    assert problems == ["a block of 64 bytes was written after it was freed"]
    freed.touch("copy", first, 1)
    assert len(problems) == 1


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a limit the oldest blocks are checked and let go."""
    problems: list[str] = []
    freed, blocks = Freed(problems), [np.zeros(100, np.uint8) for _ in range(3)]
    monkeypatch.setattr(memory, "_KEEP_NBYTES", 250)
    freed.add(blocks[0])
    blocks[0][0] = 1
    freed.add(blocks[1])
    assert problems == []
    freed.add(blocks[2])
    assert len(problems) == 1
    freed.touch("copy", blocks[0].ctypes.data, 1)
    assert len(problems) == 1
