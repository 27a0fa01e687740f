"""Copies and fills as operations: when they may be submitted, where they go, and what is refused.

Which bytes go where is tested in ``test_copies.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.kernels import Rig, SpyDevice, nothing, rig

LARGE = 1 << 20

Make = Callable[..., ao.Operation[Any]]


def transfers(r: Rig, pinned: ao.PinnedArray) -> dict[str, Make]:
    """One of each kind, small enough to go at once."""
    x, y = r.off.empty(8, np.uint64), r.off.empty(8, np.uint64)
    host = np.zeros(8, np.uint64)
    return {
        "put": lambda **options: r.off.put(host, **options),
        "get": lambda **options: r.off.get(x, **options),
        "get into": lambda **options: r.off.get(x, out=host, **options),
        "copy": lambda **options: r.off.copy(x, y, **options),
        "from pinned": lambda **options: r.off.copy(x, pinned, **options),
        "to pinned": lambda **options: r.off.copy(pinned, x, **options),
        "fill": lambda **options: r.off.fill(x, 3, **options),
    }


async def test_small_transfers_are_instant(device_label: str) -> None:
    """Where a lane has room and nothing is waited for, a small copy or fill goes straight to the device."""
    async with rig(device_label, lanes={0: 1, -1: 1}) as r:
        pinned = await r.off.pinned(8, np.uint64)
        await r.off.drain()
        for name, make in transfers(r, pinned).items():
            operation = make(instant=True)
            assert operation.instant, name
            await operation
            urgent = make(priority=-1)
            assert urgent.lane.priority == -1, name
            await urgent


async def test_instant_transfers_would_block(device_label: str) -> None:
    """On a full lane each of them raises WouldBlock, submits nothing and allocates nothing that stays."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        pinned = await r.off.pinned(8, np.uint64)
        makes = transfers(r, pinned)
        await r.off.drain()
        await r.hold()
        before = r.off.stats()
        for make in makes.values():
            with pytest.raises(ao.WouldBlock, match="lane 0 is full"):
                make(instant=True)
        assert r.off.stats() == before


async def test_large_pageable_copies_are_never_instant(device_label: str) -> None:
    """They go piece by piece, through the host."""
    async with rig(device_label) as r:
        x, host = r.off.empty(LARGE, np.uint8), np.zeros(LARGE, np.uint8)
        await r.off.drain()
        for make in (lambda: r.off.put(host, instant=True), lambda: r.off.get(x, instant=True)):
            with pytest.raises(ao.WouldBlock, match="piece by piece"):
                make()
        operation = r.off.copy(x, host)
        assert not operation.instant
        await operation


@pytest.mark.parametrize("end", ["closed", "terminated", "lost"])
async def test_ended_offload_is_not_asked_for_memory(end: str) -> None:
    """After the end every transfer raises, before anything is allocated."""
    device = SpyDevice()
    async with rig(device, bury=end != "closed") as r:
        pinned = await r.off.pinned(8, np.uint64)
        makes = transfers(r, pinned)
        strided = r.off.empty((8, 8), np.uint64)[:, ::2]
        makes["strided fill"] = lambda: r.off.fill(strided, 5)
        await r.off.drain()
        if end == "closed":
            await r.off.aclose()
        elif end == "terminated":
            r.off.terminate()
        else:
            device.lost = True
            with pytest.raises(ao.DeviceLostError):
                await r.launch(nothing)
        device.calls.clear()
        for name, make in makes.items():
            with pytest.raises((ao.ClosedError, ao.DeviceLostError)):
                make()
            assert device.calls == [], name


async def test_what_is_no_memory(device_label: str) -> None:
    """Anything but Buffers, NumPy arrays and pinned arrays is refused, and so are Buffers of another Offload."""
    async with rig(device_label) as r, rig(device_label) as other:
        x, foreign = r.off.empty(4, np.uint64), other.off.empty(4, np.uint64)
        for call in (
            lambda: r.off.copy([1, 2], [3, 4]),
            lambda: r.off.copy(x, [1, 2, 3, 4]),
            lambda: r.off.copy(np.zeros(4), np.zeros(4)),
            lambda: r.off.get(np.zeros(4)),
            lambda: r.off.get(x, out=[0] * 4),
            lambda: r.off.fill(np.zeros(4), 1),
            lambda: r.off.copy(foreign, np.zeros(4)),
            lambda: r.off.copy(np.zeros(4), foreign),
            lambda: r.off.get(foreign),
            lambda: r.off.fill(foreign, 1),
        ):
            with pytest.raises(ao.UsageError):
                call()
