"""The self-test at start: does an armed wait leave the lanes alone, and does its wake arrive?

With ``CUDA_DEVICE_MAX_CONNECTIONS=1``, which some frameworks set, one blocked wait stalls every
stream. The test arms the monitor, runs a kernel on every lane, and rings the bell from the host.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiooffload._native import now_ns
from aiooffload.errors import DriverError
from aiooffload.operation import Operation

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiooffload.drivers.api import Function
    from aiooffload.engine.completion import Completion
    from aiooffload.engine.lanes import Lane

__all__ = ["selftest"]

LIMIT_NS = 500_000_000


async def selftest(lanes: list[Lane], completion: Completion, look: Callable[[], int], function: Function) -> str:
    """Return why completions have to fall back to events, or an empty string if all is well.

    To be run alone, behind the maintenance barrier. ``look`` finishes what has arrived.
    """
    completion.arm()
    try:
        operations = [_launch(lane, function) for lane in lanes]
    except DriverError:  # some run: closing waits for them, and for the monitor
        completion.cancel_monitor()
        completion.notice()
        raise
    stalled = not await _until(lambda: look() >= 0 and all(op.finished for op in operations))
    completion.cancel_monitor()
    woken = await _until(lambda: not completion.armed)
    drained = await _until(lambda: look() >= 0 and all(op.finished for op in operations))
    if not drained:
        return "a lane does not run even with nothing waiting on the device"
    if stalled:
        return "a lane stalls while another stream waits for the host"
    return "" if woken else "the wake of a released wait does not arrive"


def _launch(lane: Lane, function: Function) -> Operation[None]:
    """Run the kernel with a mark that leaves the bell alone, since the bell would end the wait."""
    operation: Operation[None] = Operation(asyncio.get_running_loop(), None, "self-test")
    operation.add_done_callback(Operation.look)  # nobody awaits it: a failure is that of opening
    plan = function.plan((1, 1, 1), (1, 1, 1), 0, None, False)
    sequence = lane.queue.next_sequence
    lane.stream.enqueue_kernel(plan, function.prepare(plan, ()), operation, 0)
    lane.stream.enqueue_write(lane.queue.slot, sequence)
    lane.queue.push(operation)
    return operation


async def _until(condition: Callable[[], bool]) -> bool:
    deadline = now_ns() + LIMIT_NS
    while not condition():
        if now_ns() > deadline:
            return False
        await asyncio.sleep(0)
    return True
