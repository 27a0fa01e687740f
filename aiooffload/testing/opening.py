"""Offloads on devices that fail, which leave nothing behind whatever happens to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiooffload.engine import engine as engines
from aiooffload.errors import DeviceLostError
from aiooffload.offload import Offload
from aiooffload.testing.device import FaultyDevice

__all__ = ["open_offload"]


@asynccontextmanager
async def open_offload(device: FaultyDevice, *, timeout_s: float = 5.0, **options: Any) -> AsyncIterator[Offload]:
    """Open an Offload on ``device`` and close it again: ``async with open_offload(device) as off``.

    Parameters
    ----------
    device
        A device that nothing was opened on yet.
    timeout_s
        How long closing waits for what was submitted, in seconds; then it falls to ``terminate``.
    **options
        Those of ``Offload``, except ``device``.

    Raises
    ------
    DriverError
        Opening failed; nothing is left of it.

    Notes
    -----
    At the end delayed completions are released. What a lost device or a deadline leaves with the process on purpose
    (streams, registered memory, the eventfd of an armed wait) is cleared away: the test goes on.
    """
    off, held = Offload(**options), len(engines._in_use)
    try:
        await off._enter(device)
        try:
            yield off
        except BaseException:
            off._stop_calls()
            raise
        finally:
            device.release()
            await off.aclose(timeout_s)
    finally:
        if not device.closed:
            with suppress(DeviceLostError):  # a real fault: what is left goes with the process
                await asyncio.to_thread(device.bury)
            del engines._in_use[held:]  # its streams have run out
