"""Loaded kernels: their parameters, launch plans, and packing."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiooffload._native import LaunchPlan
from aiooffload.drivers.cuda.status import unwrap
from aiooffload.errors import LaunchError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiooffload.drivers.api import CallParameter

__all__ = ["CudaFunction", "pack_slowly"]

_PLAIN_SHARED_BYTES: Final = 48 * 1024
_PORTABLE_CLUSTER: Final = 8


class CudaFunction:
    """A kernel on one GPU.

    Parameters
    ----------
    name
        The entry point.
    kernel
        The ``cuda.core.Kernel``, which keeps the library loaded.
    function
        Its ``CUfunction`` in the primary context, loaded.
    sizes
        Size of each parameter in bytes.
    context
        Enters the primary context.
    """

    def __init__(
        self,
        name: str,
        kernel: object,
        function: int,
        sizes: tuple[int, ...],
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._name = name
        self._kernel = kernel
        self._function = function
        self._context = context
        self.parameter_sizes: Final = sizes
        # Opted in to so far: the attribute belongs to the function, and a smaller launch needs no change.
        self._shared_bytes = _PLAIN_SHARED_BYTES

    def plan(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        cluster: tuple[int, int, int] | None,
        cooperative: bool,
    ) -> LaunchPlan:
        """Return the plan, opting in to shared memory above 48 KiB and to large clusters."""
        from cuda.bindings import driver

        attributes = driver.CUfunction_attribute
        if shared_bytes > self._shared_bytes:
            self._set(attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes, "shared_bytes")
            self._shared_bytes = shared_bytes
        if cluster is not None and cluster[0] * cluster[1] * cluster[2] > _PORTABLE_CLUSTER:
            self._set(attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, "cluster")
        threads = self._get(attributes.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        if block[0] * block[1] * block[2] > threads:
            raise LaunchError(f"kernel {self._name} uses so many registers that a block can have {threads} threads")
        return LaunchPlan(self._name, self._function, None, grid, block, shared_bytes, cluster, cooperative)

    def _set(self, attribute: Any, value: int, what: str) -> None:
        from cuda.bindings import driver

        with self._context():
            (status,) = driver.cuFuncSetAttribute(self._function, attribute, value)
        if int(status):
            raise LaunchError(
                f"kernel {self._name} cannot be launched with {what}={value} on this device",
                operation="cuFuncSetAttribute",
                status=status.name,
                code=int(status),
            )

    def _get(self, attribute: Any) -> int:
        from cuda.bindings import driver

        with self._context():
            value: int = unwrap("cuFuncGetAttribute", driver.cuFuncGetAttribute(attribute, self._function))
        return value

    def prepare(self, plan: LaunchPlan, arguments: Sequence[Any], calls: CallParameter | None = None) -> bytes:
        """Pack checked arguments; raises UsageError if their count or sizes do not fit."""
        return pack_slowly(self._name, self.parameter_sizes, arguments, calls.data if calls else b"")


def pack_slowly(name: str, sizes: tuple[int, ...], arguments: Sequence[Any], first: bytes = b"") -> bytes:
    """Pack Buffers and NumPy scalars of any size into the form that ``_native.pack`` makes.

    ``first``, of a multiple of 16 bytes, goes before them as one more parameter, unless it is empty.
    """
    if len(arguments) != len(sizes):
        raise UsageError(f"kernel {name} takes {len(sizes)} arguments, {len(arguments)} were given")
    values = [first] if first else []
    for index, (size, value) in enumerate(zip(sizes, arguments, strict=True)):
        data = value.tobytes() if isinstance(value, np.generic) else struct.pack("<Q", value.address)
        if len(data) != size:
            raise UsageError(f"argument {index} of kernel {name} has {len(data)} bytes, the kernel takes {size}")
        values.append(data + bytes(-len(data) % 16))
    header = 4 + 4 * len(values)
    header += -header % 16
    offsets, offset = [], header
    for data in values:
        offsets.append(offset)
        offset += len(data)
    return struct.pack(f"<{1 + len(values)}I", len(values), *offsets).ljust(header, b"\0") + b"".join(values)
