"""Copies between two Offloads: how each orders them among its own work.

Such a copy is an operation of the Offload that was asked, on its lanes. In the other one a host task stands for it,
the *visit*: it starts when it is the turn of the memory there, and ends when the copy is over. So neither engine
has to know the other's graph, and whoever uses, closes or drains there waits for the copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from aiooffload.errors import UsageError
from aiooffload.operation import Operation

if TYPE_CHECKING:
    from aiooffload.buffer import Allocation
    from aiooffload.engine.engine import Engine

__all__ = ["visit"]


@contextmanager
def visit(memory: Allocation, writes: bool, operation: Operation[Any]) -> Iterator[tuple[list[Awaitable[None]], int]]:
    """Let ``operation``, which the body submits, use memory of another engine in its turn there.

    Parameters
    ----------
    memory, writes
        What it uses, and whether it writes it.
    operation
        Of the engine that was asked.

    Yields
    ------
    list, int
        What the operation has to come after, nothing where it is the memory's turn already; and the handle of the
        other device.

    Raises
    ------
    UsageError
        The other engine is of another loop, or of another driver.
    ClosedError, DeviceLostError, WouldBlock
        As it refuses submissions.
    """
    engine = cast("Engine", memory.owner)
    engine.check_caller()
    if engine.device.properties.driver != operation.owner.label.partition(":")[0]:
        raise UsageError(
            f"{operation.owner.label} and {engine.label} do not reach each other's memory: get the one and put it"
        )
    turn: asyncio.Future[None] = engine.loop.create_future()
    over: asyncio.Future[None] = engine.loop.create_future()

    async def stay() -> None:
        if not turn.done():
            turn.set_result(None)
        await over

    def leave(_: object = None) -> None:
        if not over.done():
            over.set_result(None)

    standing = engine.submission.host_task(stay, (), [(memory, writes)], operation.name)
    standing.add_done_callback(lambda standing: _end_turn(turn, standing.look()))
    try:
        yield ([] if standing.deps is None else [turn]), engine.device.handle
    except BaseException:
        leave()
        raise
    operation.add_done_callback(leave)


def _end_turn(turn: asyncio.Future[None], failure: BaseException | None) -> None:
    """Let the copy fail with a visit that ended before its turn: the other engine was terminated or lost."""
    if not turn.done():
        turn.set_exception(failure or asyncio.CancelledError())
        turn.exception()  # nobody may be waiting, and the copy says it if somebody is
