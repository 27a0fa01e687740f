"""Offloads on devices that fail: they open, they fail, and nothing is left of them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.testing import FaultyDevice, open_offload
from tests.kernels import add, until


async def test_a_lost_device_is_cleared_away() -> None:
    """After a loss with an armed wait and work in flight the gates find no thread, descriptor or handle left."""
    device = FaultyDevice()
    async with open_offload(device, lanes=2, wake="interrupt") as off:
        await off.load(add)
        x = await off.put(np.zeros(1, np.uint64))
        device.delay()
        held = off.launch(add, grid=1, block=1, args=(x, 1))
        await until(lambda: off.stats()["armings"])
        device.lose()
        with pytest.raises(ao.DeviceLostError):
            await held
        assert device.left()
    assert device.closed
    assert device.left() == {}
    assert device.problems == []


async def test_opening_that_fails_leaves_nothing() -> None:
    """What opening raises comes through, and the device is closed."""
    device = FaultyDevice()
    device.fail("create_stream", ao.OutOfMemoryError, at=3)
    with pytest.raises(ao.OutOfMemoryError, match="create_stream failed on demand"):
        async with open_offload(device, lanes=2):
            raise AssertionError("it was opened")
    assert device.closed
    assert device.left() == {}


async def test_a_body_that_raises_stops_kernels_that_call() -> None:
    """An exception in the body comes through, and stops what waits for the program."""
    stopped: list[object] = []

    @ao.kernel(calls=True)
    def wait(launch: ao.Launch) -> None:
        try:
            launch.call("never")
        except asyncio.CancelledError as error:
            stopped.append(error)

    async def body() -> None:
        async with open_offload(FaultyDevice(), lanes=1, calling_lanes=1) as off:
            started = asyncio.Event()

            @off.host_function
            async def never() -> None:
                started.set()
                await asyncio.get_running_loop().create_future()

            operations.append(off.launch(wait, grid=1, block=1))
            await started.wait()
            raise ZeroDivisionError

    operations: list[ao.Operation[None]] = []
    with pytest.raises(ZeroDivisionError):
        await body()
    assert operations[0].cancelled()
    assert len(stopped) == 1


async def test_delayed_completions_arrive_at_the_end() -> None:
    """Leaving does not wait for the deadline because of a completion that was held back."""
    device = FaultyDevice()
    async with open_offload(device, timeout_s=60, lanes=1) as off:
        device.delay()
        operation = off.fill(off.empty(4, np.uint8), 1)
    assert operation.exception() is None
