"""Finding and initialising the driver library, without which nothing of ``cuda.*`` may be touched.

Without a driver, ``cuda.core`` raises SystemError at its first call and may hang at the next; so the
library is looked for by its name first.
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

from aiooffload.drivers.cuda.status import status_error, status_name
from aiooffload.errors import DeviceUnavailableError

__all__ = ["check_version", "count_devices", "initialise"]

_LIBRARY: Final = "libcuda.so.1"
_NO_DEVICE: Final = 100
MINIMUM_VERSION: Final = 13_000
"""What the driver has to support: CUDA 13.0, which is release 580."""
CONNECTIONS: Final = "32"


def _load() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        return None


def _initialise(library: ctypes.CDLL) -> int:
    # Wait-values hold hardware queues; with the default of 8, seven of them stall every stream.
    # Read once by the driver when it initialises, and left alone where somebody has set it.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", CONNECTIONS)
    status: int = library.cuInit(0)
    return status


def count_devices() -> int:
    """Return how many GPUs there are: 0 without a driver or a GPU; raises if the driver is broken."""
    library = _load()
    if library is None:
        return 0
    status = _initialise(library)
    if status == _NO_DEVICE:
        return 0
    if status:
        raise _unusable("cuInit", status)
    count = ctypes.c_int()
    status = library.cuDeviceGetCount(ctypes.byref(count))
    if status:
        raise _unusable("cuDeviceGetCount", status)
    return count.value


def initialise(index: int) -> None:
    """Initialise the driver; raises DeviceUnavailableError unless it is new enough and has GPU ``index``."""
    library = _load()
    if library is None:
        raise DeviceUnavailableError(
            f"no CUDA driver on this machine ({_LIBRARY} was not found): install NVIDIA's driver, release 580 or "
            'newer, and in a container run it with the NVIDIA runtime; or use the device "host"'
        )
    count = count_devices()
    if index >= count:
        have = "the driver finds none" if not count else f"it has {count}, cuda:0 to cuda:{count - 1}"
        raise DeviceUnavailableError(f"no device cuda:{index} on this machine: {have}", operation="cuDeviceGet")
    version = ctypes.c_int()
    library.cuDriverGetVersion(ctypes.byref(version))
    check_version(version.value)


def check_version(version: int) -> None:
    """Raise DeviceUnavailableError if the driver supports less than CUDA 13.0 (``version`` is 13000)."""
    if version < MINIMUM_VERSION:
        raise DeviceUnavailableError(
            f"the CUDA driver is too old: it supports CUDA {version // 1000}.{version % 1000 // 10}, aiooffload needs "
            "13.0; install release 580 or newer",
            operation="cuDriverGetVersion",
        )


def _unusable(operation: str, status: int) -> DeviceUnavailableError:
    error = status_error(operation, status)
    return DeviceUnavailableError(
        f"the CUDA driver is installed but cannot be used: {error}",
        operation=operation,
        status=status_name(status),
        code=status,
    )
