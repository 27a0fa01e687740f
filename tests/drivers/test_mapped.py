"""Memory that both sides map: shared, zeroed, not inherited by a fork, alive as long as somebody holds a view."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from aiooffload.drivers.mapped import MappedMemory
from aiooffload.errors import ClosedError, OutOfMemoryError


@pytest.mark.parametrize("nbytes", [0, 1, mmap.PAGESIZE, mmap.PAGESIZE + 1])
def test_whole_zeroed_pages(nbytes: int) -> None:
    """The size is rounded up to whole pages, at least one, all zero."""
    memory = MappedMemory(nbytes)
    assert memory.nbytes % mmap.PAGESIZE == 0
    assert 0 <= memory.nbytes - nbytes <= mmap.PAGESIZE
    assert memory.array.shape == (memory.nbytes,)
    assert not memory.array.any()
    assert memory.host_address == memory.device_address == memory.array.ctypes.data
    memory.unmap()


def test_words() -> None:
    """A word is eight bytes of the memory; an offset that is none raises ValueError."""
    memory = MappedMemory(64)
    word = memory.word(16)
    word.store(0x0102030405060708)
    assert memory.array[16:24].tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    memory.array[16] = 9
    assert word.load() & 0xFF == 9
    memory.device_address += 4096
    assert memory.word(8).device_address == memory.device_address + 8
    for offset in (-8, 4, memory.nbytes):
        with pytest.raises(ValueError, match="multiple of 8"):
            memory.word(offset)


def test_unmapped_under_a_view() -> None:
    """Views and words outlive unmap(), which may be called twice; new ones are refused."""
    memory = MappedMemory(64)
    view, word = memory.array[:8], memory.word(0)
    memory.unmap()
    memory.unmap()
    word.store(5)
    assert view[0] == 5
    for use in (lambda: memory.array, lambda: memory.word(0)):
        with pytest.raises(ClosedError):
            use()


@pytest.mark.parametrize("nbytes", [2**50, 2**63, 2**80])
def test_too_much(nbytes: int) -> None:
    """More than can be mapped raises OutOfMemoryError."""
    with pytest.raises(OutOfMemoryError):
        MappedMemory(nbytes)


FORK = """
import os
from aiooffload.drivers.mapped import MappedMemory
memory = MappedMemory(64)
child = os.fork()
if child == 0:
    inside = [line for line in open("/proc/self/maps") if line.startswith(f"{memory.host_address:x}-")]
    memory.unmap()
    os._exit(len(inside))
memory.array[0] = 1
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), memory.array[0])
"""


def test_child_has_no_copy() -> None:
    """A forked child has no mapping of it and may drop the object; the parent's goes on."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FORK], cwd=root, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == ["0", "1"]
