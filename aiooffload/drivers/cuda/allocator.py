"""Device memory from an allocator of the program's, instead of the device's own pool.

It has the protocol of ``cuda.core.MemoryResource``: ``allocate(nbytes, stream=...)`` gives an object with
``handle`` and ``close(stream)``. Such an object frees itself on a stream of its own choice when it is collected,
in use or not: each is held here from its allocation until it is closed.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aiooffload.drivers.cuda.status import STATUSES, status_error
from aiooffload.errors import DriverError, OutOfMemoryError, UsageError

__all__ = ["Allocator", "AllocatorBlock"]

_ALIGNMENT: Final = 256
_CODES: Final = {name: code for code, (name, _) in STATUSES.items()}

# By identity. What a lost or terminated device leaves is never freed by a call, so it stays here.
_open: Final[dict[int, Any]] = {}


class AllocatorBlock:
    """One allocation of an allocator's."""

    __slots__ = ("address", "buffer", "nbytes")
    host_array: NDArray[np.uint8] | None = None

    def __init__(self, address: int, nbytes: int, buffer: Any) -> None:
        self.address: Final = address
        self.nbytes: Final = nbytes
        self.buffer: Final = buffer


class Allocator:
    """Allocates from ``resource`` in the order of ``stream``, which carries nothing else.

    Raises
    ------
    UsageError
        Its memory is not for devices.
    """

    def __init__(self, resource: Any, stream: object) -> None:
        if not getattr(resource, "is_device_accessible", True):
            raise UsageError(f"the memory of {resource!r} is not accessible from a device")
        self._resource = resource
        self._stream = stream

    def allocate(self, nbytes: int) -> AllocatorBlock:
        """Allocate; raises OutOfMemoryError, another DriverError, or UsageError for memory that is not aligned."""
        try:
            buffer = self._resource.allocate(nbytes, stream=self._stream)
        except Exception as error:  # the program's own code: whatever it raises, it becomes one of our errors
            raise _translated("allocate", error, nbytes) from error
        _open[id(buffer)] = buffer
        block = AllocatorBlock(int(buffer.handle), nbytes, buffer)
        if block.address % _ALIGNMENT:
            self.free(block)
            raise UsageError(f"the allocator's memory is not aligned to {_ALIGNMENT} bytes: {block.address:#x}")
        return block

    def free(self, block: AllocatorBlock) -> None:
        """Close a block's object; raises DriverError."""
        try:
            block.buffer.close(self._stream)
        except Exception as error:  # the program's own code: whatever it raises, it becomes one of our errors
            raise _translated("close", error, block.nbytes) from error
        del _open[id(block.buffer)]


def _translated(what: str, error: Exception, nbytes: int) -> DriverError:
    """Return the error of the library that an allocator's stands for: cuda.core's names the status in its text."""
    operation = f"allocator.{what}"
    found = re.search(r"CUDA_ERROR_\w+", str(error))
    if found and found[0] in _CODES:
        return status_error(operation, _CODES[found[0]], f"{nbytes} bytes")
    kind = OutOfMemoryError if isinstance(error, MemoryError) else DriverError
    return kind(f"the allocator could not {what} {nbytes} bytes: {error!r}", operation=operation)
