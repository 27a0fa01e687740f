"""GPUs through the CUDA driver. The only place that imports ``cuda.*``.

``library.py`` finds the driver, ``status.py`` turns its statuses into errors, ``device.py`` is the
device of the contract with ``function.py`` and ``compiler.py`` behind it, and
``xid.py`` asks NVML what the system knows about a fault. The launch path is C
(``_native/cuda_stream.c``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiooffload.drivers.cuda.library import count_devices

if TYPE_CHECKING:
    from aiooffload.drivers.api import Device

__all__ = ["device_count", "open_device"]


def device_count() -> int:
    """Return how many GPUs there are, 0 where there is no driver; raises if the driver is broken."""
    return count_devices()


def open_device(index: int) -> Device:
    """Open GPU ``index`` with its primary context; raises DeviceUnavailableError."""
    from aiooffload.drivers.cuda.device import CudaDevice

    return CudaDevice(index)
