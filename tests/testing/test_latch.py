"""A latch: what is behind it waits on the device until it is opened."""

from __future__ import annotations

import gc

import numpy as np

import aiooffload as ao
from aiooffload.testing import Latch
from tests.kernels import turns


async def test_a_latch_holds_lanes(device_label: str) -> None:
    """Lanes that it holds wait, others go on, and opening it lets all of them go for good."""
    async with ao.Offload(device_label, lanes=3) as off:
        latch = await Latch.make(off)
        holds = [latch.hold(lane) for lane in off.lanes[:2]]
        x = off.empty(4, np.uint8)
        behind = off.fill(x, 7, lane=off.lanes[0])
        await off.custom_operation(lambda lane: None, lane=off.lanes[2])
        await turns()
        assert not any(operation.done() for operation in (*holds, behind))
        latch.open()
        for operation in (*holds, behind):
            await operation
        await latch.hold(off.lanes[0])
        assert (await off.get(x)).tolist() == [7] * 4


async def test_a_latch_that_is_dropped_can_be_waited_for(device_label: str) -> None:
    """The memory of a latch lives as long as something waits for it."""
    async with ao.Offload(device_label, lanes=1) as off:
        latch = await Latch.make(off)
        held, opened = latch.hold(off.lanes[0]), latch.open
        other = await Latch.make(off)
        del latch
        gc.collect()
        await turns()
        assert not held.done()
        opened()
        await held
        other.open()
