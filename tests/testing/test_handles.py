"""The count of live handles: up with each that is made, down with each that goes."""

from __future__ import annotations

import gc

import numpy as np

import aiooffload as ao
from aiooffload.testing import live_handles
from tests.kernels import turns


def since(before: dict[str, int]) -> dict[str, int]:
    """Return how many more there are of each kind."""
    return {kind: count - before[kind] for kind, count in live_handles().items() if count != before[kind]}


async def test_what_an_offload_holds_is_counted() -> None:
    """Streams, memory, leases and the Offload count from opening to closing, buffers and events from their making."""
    gc.collect()
    before = live_handles()
    async with ao.Offload("host", lanes=3) as off:
        assert since(before) == {"streams": 5, "registered": 3, "offloads": 1}
        buffer, pinned = off.empty(4, np.uint8), await off.pinned(4, np.uint8)
        first = off.fill(buffer, 1, lane=off.lanes[0])
        await off.custom_operation(lambda lane: None, lane=off.lanes[1], after=[first])
        await off.copy(buffer, pinned, lane=off.lanes[2])
        assert since(before)["leases"] == 2
        assert since(before)["registered"] == 4
        assert since(before)["events"] >= 1
        del buffer, pinned, first
    del off
    await turns()
    gc.collect()
    assert since(before) == {}
