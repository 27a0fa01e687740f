"""A loop whose clock is put forward: timers fall due at once, and in their order."""

from __future__ import annotations

import asyncio
import time

import pytest
import structlog

import aiooffload as ao
from aiooffload.testing import ForwardLoop, Latch


def test_timers_fall_due_in_order() -> None:
    """What was to happen in hours happens now, the earliest first, and what is later still does not."""
    seen: list[str] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ForwardLoop)
        began = time.monotonic()
        loop.call_later(7200, seen.append, "late")
        loop.call_later(3600, seen.append, "early")
        never = loop.call_later(9000, seen.append, "never")
        loop.advance(7300)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert time.monotonic() - began < 60
        never.cancel()
        with pytest.raises(ao.UsageError, match="does not go back"):
            loop.advance(-1)

    with asyncio.Runner(loop_factory=ForwardLoop) as runner:
        runner.run(main())
    assert seen == ["early", "late"]


def test_a_stall_is_warned_of_at_once() -> None:
    """The watchdog warns of what has not moved for 20 seconds, and a launch's timeout_s ends it, without waiting."""

    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ForwardLoop)
        async with ao.Offload("host", lanes=1) as off:
            latch = await Latch.make(off)
            held = latch.hold(off.lanes[0])
            with structlog.testing.capture_logs() as lines:
                async with asyncio.timeout(300):
                    while not lines:
                        loop.advance(0.05)
                        await asyncio.sleep(0)
            gate = off.gate(loop.create_future(), lane=off.lanes[0])
            loop.advance(31)
            with pytest.raises(ao.OffloadTimeout):
                await gate
            latch.open()
            await held
        return [line["event"] for line in lines]

    with asyncio.Runner(loop_factory=ForwardLoop) as runner:
        assert runner.run(main()) == ["nothing has completed for a while"]
