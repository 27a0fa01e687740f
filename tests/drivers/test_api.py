"""The contract itself: what every driver offers, by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from aiooffload._native import CudaStream, HostEvent, HostStream
from aiooffload.drivers import api
from aiooffload.drivers.host import HostDevice
from aiooffload.drivers.host.function import HostFunction
from aiooffload.drivers.host.limited import LimitedStream
from aiooffload.drivers.host.memory import HostBlock
from aiooffload.drivers.mapped import MappedMemory


def names(protocol: type) -> set[str]:
    """Return the public names that a protocol asks for."""
    return {name for name in vars(protocol) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("protocol", "implementation"),
    [
        (api.Stream, HostStream),
        (api.Stream, LimitedStream),
        (api.Stream, CudaStream),
        (api.Event, HostEvent),
        (api.Device, HostDevice(0)),
        (api.Function, HostFunction),
        (api.RegisteredMemory, MappedMemory),
        (api.Block, HostBlock(1)),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_drivers_have_every_name(protocol: type, implementation: Any) -> None:
    """Each class of a driver has every method and property of its protocol."""
    assert {name for name in names(protocol) if not hasattr(implementation, name)} == set()


def test_label() -> None:
    """A device's label is what Offload takes; there is one host."""
    device = HostDevice()
    properties = device.properties
    device.close()
    assert properties.label == "host"
    assert dataclasses.replace(properties, driver="cuda", index=3).label == "cuda:3"


def test_every_enqueue_names_its_hip_equivalent() -> None:
    """Each enqueue's documentation says what it would be in HIP."""
    for name in names(api.Stream):
        if name.startswith("enqueue_"):
            assert "*HIP:*" in getattr(api.Stream, name).__doc__, name
