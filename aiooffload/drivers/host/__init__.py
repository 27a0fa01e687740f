"""The embedded device: kernels are Python functions, streams are threads of this process.

It follows the same contract as a GPU (:mod:`aiooffload.drivers.api`), down to the context lock that
makes maintenance dangerous while kernels run, so what deadlocks on a GPU deadlocks here too. Memory
is NumPy arrays; device addresses are host addresses.
"""

from __future__ import annotations

from aiooffload.drivers.host.device import HostDevice

__all__ = ["HostDevice", "device_count", "open_device"]


def device_count() -> int:
    """Return how many host devices there are: one."""
    return 1


def open_device(
    index: int = 0,
    *,
    memory_operations: bool = True,
    memory_limit: int | None = None,
    poison: bool = False,
) -> HostDevice:
    """Open the host device; see :class:`HostDevice` for the parameters.

    Raises
    ------
    DeviceUnavailableError
        If ``index`` is not 0.
    """
    return HostDevice(index, memory_operations=memory_operations, memory_limit=memory_limit, poison=poison)
