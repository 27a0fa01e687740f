"""Devices for the driver tests. The conformance suite runs on every driver, its own tests on one."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from aiooffload.drivers.api import Device
from tests.drivers.support import Rig, load_all, open_rig


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def driver_device(request: pytest.FixtureRequest) -> Iterator[Device]:
    """One device of every driver in turn."""
    device: Device = importlib.import_module(f"aiooffload.drivers.{request.param}").open_device(0)
    yield device
    device.close()


@pytest.fixture
def rig(driver_device: Device) -> Iterator[Rig]:
    """The device with every kernel loaded; what a test makes with it is cleared away."""
    with open_rig(driver_device, load_all(driver_device)) as made:
        yield made
