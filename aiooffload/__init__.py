"""Await CUDA kernels from asyncio, on a pool of streams; the same program runs without a GPU.

Layers, each importing only what stands to its right::

    group -> offload -> engine -> rules, operation, drivers.api, _native -> types, errors

``offload.py`` is what a program holds, ``group.py`` the same for several devices, ``kernel.py`` and
``buffer.py`` are what it passes in, ``operation.py`` is what it gets back. ``engine/`` runs one
device under one loop, ``rules/`` decides and does no I/O, ``drivers/`` are the devices (``cuda`` is
the only place that imports ``cuda.*``), ``_native/`` is the C extension. ``service/``
stands above: it serves programs over HTTP.
"""

from typing import TYPE_CHECKING, Any

from aiooffload.buffer import Buffer, PinnedArray
from aiooffload.drivers.api import DeviceProperties
from aiooffload.engine.bound import BoundLaunch
from aiooffload.engine.host_functions import Call, current_call
from aiooffload.engine.lanes import Lane
from aiooffload.errors import (
    ClosedError,
    CompileError,
    DependencyError,
    DeviceLostError,
    DeviceUnavailableError,
    DriverError,
    HostFunctionError,
    LaunchError,
    OffloadError,
    OffloadTimeout,
    OutOfMemoryError,
    UsageError,
    WouldBlock,
)
from aiooffload.group import OffloadGroup as _OffloadGroup  # noqa: F401  # Offload makes it
from aiooffload.kernel import In, InOut, Kernel, Launch, Out, Scratch, kernel
from aiooffload.offload import Offload
from aiooffload.operation import Operation
from aiooffload.paths import include_dir

if TYPE_CHECKING:
    from aiooffload.service.app import App

__all__ = [
    "App",
    "BoundLaunch",
    "Buffer",
    "Call",
    "ClosedError",
    "CompileError",
    "DependencyError",
    "DeviceLostError",
    "DeviceProperties",
    "DeviceUnavailableError",
    "DriverError",
    "HostFunctionError",
    "In",
    "InOut",
    "Kernel",
    "Lane",
    "Launch",
    "LaunchError",
    "Offload",
    "OffloadError",
    "OffloadTimeout",
    "Operation",
    "Out",
    "OutOfMemoryError",
    "PinnedArray",
    "Scratch",
    "UsageError",
    "WouldBlock",
    "current_call",
    "include_dir",
    "kernel",
]


def __getattr__(name: str) -> Any:
    """Import what only some programs use when they name it."""
    if name == "App":
        from aiooffload.service.app import App

        return App
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
