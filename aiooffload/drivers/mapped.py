"""Memory that both sides of any driver map: shared, and not inherited by a fork."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aiooffload._native import Word
from aiooffload.errors import ClosedError, OutOfMemoryError

__all__ = ["MappedMemory", "registered"]

_mappings: Final[weakref.WeakSet[mmap.mmap]] = weakref.WeakSet()  # of every MappedMemory, as long as mapped


registered: Final[weakref.WeakSet[MappedMemory]] = weakref.WeakSet()
"""Those that a driver has registered, until it unmaps them; kept by the drivers."""


def _keep_mappings() -> None:
    """Make a forked child's copies immortal: their addresses are free there, and might be another's."""
    for mapping in _mappings:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
    _mappings.clear()


os.register_at_fork(after_in_child=_keep_mappings)


class MappedMemory:
    """Pages of our own: a driver may register them, and they outlive whatever happens to it.

    Parameters
    ----------
    nbytes
        Size in bytes, rounded up to whole pages. The memory is zeroed.

    Raises
    ------
    OutOfMemoryError
        The host cannot map so much.
    """

    __slots__ = ("__weakref__", "_array", "_map", "device_address", "host_address", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes: Final[int] = max(1, -(-nbytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        try:
            mapping = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OutOfMemoryError(f"the host cannot map {nbytes} bytes: {error}", operation="register") from error
        mapping.madvise(mmap.MADV_DONTFORK)
        _mappings.add(mapping)
        self._map: mmap.mmap | None = mapping
        # The array's export keeps the mapping in place: it ends with the last view or word, not before.
        self._array: NDArray[np.uint8] | None = np.frombuffer(mapping, np.uint8)
        self.host_address: Final[int] = self._array.ctypes.data
        # The host's unless a driver that registers the memory says otherwise.
        self.device_address: int = self.host_address

    @property
    def array(self) -> NDArray[np.uint8]:
        """The memory as ``(nbytes,) uint8``. Raises ClosedError once unregistered."""
        if self._array is None:
            raise ClosedError("this memory was unregistered")
        return self._array

    def word(self, offset: int) -> Word:
        """Return the 64-bit word at ``offset``, a multiple of 8 below ``nbytes``."""
        if offset % 8 or not 0 <= offset < self.nbytes:
            raise ValueError(f"a word's offset is a multiple of 8 below {self.nbytes}, not {offset}")
        return Word(self.host_address + offset, self.device_address + offset, self.array)

    def unmap(self) -> None:
        """Give the memory back, now or when the last view or word of it goes."""
        registered.discard(self)
        self._array = None
        mapping, self._map = self._map, None
        if mapping is not None and mapping in _mappings:
            with contextlib.suppress(BufferError):  # somebody still holds a view
                mapping.close()
