"""Allocations of the host device."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aiooffload.errors import OutOfMemoryError

__all__ = ["ALIGNMENT", "HostBlock"]

ALIGNMENT: Final = 256
"""What every allocation is aligned to, in bytes, as on a GPU."""


class HostBlock:
    """One allocation: aligned, not zeroed, alive as long as a view of it is."""

    __slots__ = ("address", "host_array", "nbytes")

    def __init__(self, nbytes: int) -> None:
        try:
            raw: NDArray[np.uint8] = np.empty(nbytes + ALIGNMENT - 1, np.uint8)
        except MemoryError as error:
            raise OutOfMemoryError(f"the host has no {nbytes} bytes left", operation="allocate") from error
        skip = -raw.ctypes.data % ALIGNMENT
        array: NDArray[np.uint8] = raw[skip : skip + nbytes]
        self.address: Final[int] = raw.ctypes.data + skip
        self.nbytes: Final[int] = nbytes
        self.host_array: NDArray[np.uint8] | None = array
        """The memory; None once freed."""
