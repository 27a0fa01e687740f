"""Copies between two Offloads: how each orders them among its own work.

Such a copy is an operation of the Offload that was asked, on its lanes. In the other one a *visit* stands for it, an
operation on the host: it begins when it is the turn of the memory there, and ends with the copy. So neither engine
has to know the other's graph, and whoever uses, closes or drains there waits for the copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from aiooffload.buffer import PinnedArray
from aiooffload.errors import UsageError
from aiooffload.operation import Operation

if TYPE_CHECKING:
    from aiooffload.buffer import Allocation
    from aiooffload.engine.engine import Engine

__all__ = ["visit"]


@contextmanager
def visit(
    memory: Allocation | PinnedArray, writes: bool, operation: Operation[Any]
) -> Iterator[tuple[list[Awaitable[None]], tuple[int, ...]]]:
    """Let ``operation``, which the body submits, use memory of another engine in its turn there.

    Parameters
    ----------
    memory, writes
        What it uses, and whether it writes it.
    operation
        Of the engine that was asked.

    Yields
    ------
    list, tuple
        What the operation has to come after, nothing where it is the memory's turn already; and the ``peers`` of its
        driver calls, which pinned memory has none of: every device reaches it.

    Raises
    ------
    UsageError
        The other engine is of another loop, or of another driver.
    ClosedError, DeviceLostError, WouldBlock
        As it refuses submissions.
    """
    here, there = cast("Engine", operation.owner), cast("Engine", memory.owner)
    there.check_caller()
    if there.device.properties.driver != here.device.properties.driver:
        raise UsageError(f"{here.label} and {there.label} do not reach each other's memory: get the one and put it")
    turn: asyncio.Future[None] = there.loop.create_future()

    standing, leave = there.submission.stand_in(operation.name, memory, writes, lambda: turn.set_result(None))
    standing.add_done_callback(lambda standing: _end_turn(turn, standing.look()))
    waits = standing.deps is not None
    target, source = (there.device, here.device) if writes else (here.device, there.device)
    pinned = isinstance(memory, PinnedArray)
    peers = () if pinned or target.handle == source.handle else (target.handle, source.handle)
    try:
        yield ([turn] if waits else []), peers
    except BaseException:
        leave()
        raise
    if waits:  # or nobody would see that it waits for what the visit waits for
        _name_until(turn, operation, standing)

    def ended(operation: Operation[Any]) -> None:
        on_device = operation.queue is not None or (operation.streamed and operation.steps is None)
        if writes and operation.failure is not None and on_device and here.lanes.dead is not None:
            memory.close()  # nobody looks at that device any more, and it may still write here
        leave()

    finish = operation.arrival or Operation.finish

    def arrived(operation: Operation[Any]) -> None:
        finish(operation)
        leave()  # now: whoever awaited the copy may use the memory there at once

    operation.add_done_callback(ended)
    if not operation.streamed:
        operation.arrival = arrived


def _end_turn(turn: asyncio.Future[None], failure: BaseException | None) -> None:
    """Let the copy fail with a visit that ended before its turn: the other engine was terminated or lost."""
    if not turn.done():
        turn.set_exception(failure or asyncio.CancelledError())
        turn.exception()  # nobody may be waiting, and the copy says it if somebody is


def _name_until(turn: asyncio.Future[None], operation: Operation[Any], standing: Operation[None]) -> None:
    """Have the visit among what ``operation`` comes after by name, as long as it waits for its turn."""
    named = operation.requires
    operation.requires = (*(named or ()), standing)

    def begun(_: asyncio.Future[None]) -> None:
        operation.requires = named

    turn.add_done_callback(begun)
