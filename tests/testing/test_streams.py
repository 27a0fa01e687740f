"""Streams, events and kernels of a device that fails on demand: everything goes through them, and can fail."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers import api
from aiooffload.testing import FaultyDevice, open_offload
from aiooffload.testing.streams import FaultyEvent, FaultyFunction, FaultyStream
from tests.kernels import add, nothing, until


@pytest.mark.parametrize(("call", "path"), [("enqueue_kernel", "short"), ("enqueue_kernel", "long")])
async def test_the_launch_path_is_wrapped(call: str, path: str) -> None:
    """Launches by the extension's short path go through the wrapper as well, and so do bound ones."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1) as off:
        await off.load(nothing)
        bound = off.bind(nothing, grid=1, block=1)
        await off.launch(nothing, grid=1, block=1)
        device.fail(call, ao.LaunchError, times=2)
        after = [asyncio.get_running_loop().create_future()] if path == "long" else []
        first, second = off.launch(nothing, grid=1, block=1, after=after), bound()
        for future in after:
            future.set_result(None)
        for operation in (first, second):
            with pytest.raises(ao.LaunchError, match="on demand"):
                await operation
        await off.launch(nothing, grid=1, block=1)


async def test_events_and_timing() -> None:
    """Events, timed ones too, work through the wrapper, and fail by the names it gives their calls."""
    device = FaultyDevice()
    stream, events = device.create_stream(), [device.create_timed_event() for _ in range(2)]
    for event in events:
        stream.enqueue_record(event)
    await until(lambda: all(event.query() for event in events))
    assert events[1].elapsed_ns(events[0]) >= 0
    other = device.create_stream()
    other.enqueue_wait_event(events[0])
    device.fail("query_event")
    device.fail("elapsed")
    for call in (events[0].query, lambda: events[1].elapsed_ns(events[0])):
        with pytest.raises(ao.DriverError):
            call()
    assert device.left() == {"streams": 2, "events": 2}
    for handle in (*events, stream, other):
        handle.close()
    assert device.left() == {}
    await asyncio.to_thread(device.close)


async def test_streams_of_others_and_traces(tmp_path: Any) -> None:
    """Adopting, completion(), order() and a trace go through the wrapper."""
    device = FaultyDevice()
    async with open_offload(device, lanes=2) as off, ao.Offload("host", lanes=1) as other:
        lane = off.adopt(other.lanes[0])
        async with off.trace(tmp_path / "trace.json"):
            first = off.fill(off.empty(4, np.uint8), 1, lane=lane)
            off.order(off.lanes[0], after=[first])
            await off.completion(lane.handle)
            await off.load(add)
            await off.launch(add, grid=1, block=1, args=(off.zeros(1, np.uint64), 1), lane=off.lanes[0])
        lane.release()
    assert device.problems == []


@pytest.mark.parametrize("ours", [FaultyDevice, FaultyStream, FaultyEvent, FaultyFunction])
def test_it_has_all_of_the_contract(ours: type[Any]) -> None:
    """Every method and property of the driver's contract is there."""
    contracts = (api.Device, api.Stream, api.TimedEvent, api.Function)
    contract = dict(zip((FaultyDevice, FaultyStream, FaultyEvent, FaultyFunction), contracts, strict=True))[ours]
    names = {name for base in contract.__mro__ for name in vars(base) if not name.startswith("_")}
    assert [name for name in sorted(names) if not hasattr(ours, name)] == []
