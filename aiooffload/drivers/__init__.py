"""Drivers, opened by name. ``api.py`` is the contract; a driver knows nothing of the layers above."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from aiooffload.errors import DeviceUnavailableError, UsageError

if TYPE_CHECKING:
    from aiooffload.drivers.api import Device

__all__ = ["labels", "open_device"]

_MODULES: Final = {"cuda": "aiooffload.drivers.cuda", "host": "aiooffload.drivers.host"}


def open_device(label: str) -> Device:
    """Open a device by its label: ``"host"``, ``"cuda"``, ``"cuda:1"`` or ``"auto"``.

    ``"auto"`` is the first GPU, and the host device only where no driver or no GPU exists: a driver
    that is present and broken raises. Raises UsageError for a label that is none of these,
    DeviceUnavailableError for a device that does not exist.
    """
    if label == "auto":
        label = "cuda:0" if _count("cuda") else "host"
    name, _, index = label.partition(":")
    if name not in _MODULES or (index and not index.isdecimal()):
        raise UsageError(f'device {label!r} is none of "auto", "host", "cuda" or "cuda:N"')
    device: Device = importlib.import_module(_MODULES[name]).open_device(int(index or 0))
    return device


def labels(text: str) -> list[str]:
    """Return the labels of the devices that ``"cuda:*"`` or ``"cuda:0,cuda:2"`` names.

    Raises DeviceUnavailableError where there is no GPU for ``"cuda:*"``, UsageError where nothing is named.
    """
    if text == "cuda:*":
        count = _count("cuda")
        if not count:
            raise DeviceUnavailableError("there is no GPU, or no NVIDIA driver")
        return [f"cuda:{index}" for index in range(count)]
    found = [label.strip() for label in text.split(",")]
    if not all(found) or any(label.endswith(":*") for label in found):
        raise UsageError(f'devices are named as in "cuda:0,cuda:2", not {text!r}')
    return found


def _count(name: str) -> int:
    count: int = importlib.import_module(_MODULES[name]).device_count()
    return count
