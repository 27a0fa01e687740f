"""Giving up, at every moment of every kind of operation: what the waiters get, what is held, and that lanes go on.

The matrix is in ``cancel_cells.py``. What belongs to one kind alone is tested with it: a cancelled large copy in
``engine/test_copies.py``, handlers and mapped arrays in ``test_reverse_semantics.py``.
"""

from __future__ import annotations

import asyncio
import gc
import random
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.cancel_cells import EXCLUDED, KINDS, STATES, WAITS, cell, cells, where
from tests.kernels import Boom, add, hold, rig, turns, until
from tests.reverse_kernels import ask, calling_rig

EXPECTED: dict[str, Any] = {
    "task": asyncio.CancelledError,
    "timeout": TimeoutError,
    "wait_for": TimeoutError,
    "group": ExceptionGroup,
    "cancel": asyncio.CancelledError,
    "timeout_s": ao.OffloadTimeout,
    "async with": Boom,
}


def test_every_cell_is_there_or_has_a_reason() -> None:
    """Each kind in each state is tested, or excluded with a reason; there is no reason without a cell."""
    tested = {(kind, state) for kind, state, _ in cells()}
    assert tested.isdisjoint(EXCLUDED)
    assert tested | set(EXCLUDED) == {(kind, state) for kind in KINDS for state in STATES}
    assert all(EXCLUDED.values())


async def end(task: asyncio.Task[Any]) -> BaseException | None:
    """Return how a task has ended."""
    await asyncio.wait([task])
    return asyncio.CancelledError() if task.cancelled() else task.exception()


@pytest.mark.parametrize(("kind", "state", "way"), [pytest.param(*one, id="; ".join(one)) for one in cells()])
async def test_giving_up(device_label: str, kind: str, state: str, way: str) -> None:
    """Who gives up a wait leaves the work and other waits alone; stopped work ends at once, late, or not at all.

    What it reads is neither freed nor reused before it is done, and afterwards it is; its lane goes on.
    """
    async with cell(device_label, kind, state) as c:
        await c.set_up()
        c.op = c.submit(**({"timeout_s": 0.05} if way == "timeout_s" else {}))
        if c.enter is not None:
            await c.enter()
        other = asyncio.create_task(c.op.wait())
        victim = asyncio.create_task(c.wait(way))
        c.drop()
        await turns(3)
        c.check_held()
        assert not c.op.finished
        if state == "completing":
            c.complete()
        await c.trigger(way, victim)
        await (_wait_given_up(c, way, victim, other) if way in WAITS else _work_stopped(c, way, victim, other))
        del other, victim  # they may have the operation's result
        await c.go_on()


async def _wait_given_up(c: Any, way: str, victim: asyncio.Task[Any], other: asyncio.Task[Any]) -> None:
    failure = await end(victim)
    if c.state != "completing" or failure is not None:
        assert isinstance(failure, EXPECTED[way])
    if isinstance(failure, ExceptionGroup):
        assert [type(one) for one in failure.exceptions] == [Boom]
    if c.state != "completing":
        await turns(3)
        assert not c.op.finished
        assert not other.done()
        c.check_held()
        c.release()
    if c.kind == "calling" and c.state == "running":  # it runs until somebody stops it
        c.op.cancel()
        assert isinstance(await end(other), asyncio.CancelledError)
        return
    assert await end(other) is None
    assert c.op.exception() is None
    if c.state not in ("running", "in a call") or c.kind not in ("calling", "gate"):
        assert await c.happened()


async def _work_stopped(c: Any, way: str, victim: asyncio.Task[Any], other: asyncio.Task[Any]) -> None:
    outcome, ended = where(c.kind, c.state), EXPECTED["cancel" if way == "async with" else way]
    if outcome == "host":
        assert isinstance(await end(other), ended)
        assert c.op.cancelled() == (way != "timeout_s")
    elif outcome == "device" and c.state != "completing":
        await turns(5)
        assert not c.op.finished
    c.check_held()
    c.release()
    failure = await end(other)
    if outcome == "device":
        assert failure is None
    else:
        assert isinstance(failure, ended)
    assert c.op.finished
    if way == "async with":
        assert isinstance(await end(victim), Boom)
    else:
        assert type(await end(victim)) is type(failure)
    if outcome != "late":
        assert await c.happened() == (outcome == "device")


@pytest.mark.parametrize("order", ["first to last", "last to first", "shuffled"])
async def test_chain_is_cancelled_in_any_order(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations that come after one another are cancelled at the same cost each, from wherever one begins."""
    async with rig("host", lanes=2) as r:
        word, count = r.word(7), 500
        before: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        chain = [r.launch(add, word, 1, after=[before]) for _ in range(count)]
        assert r.off._engine is not None
        lanes, held = r.off._engine.lanes, 0

        def hold_behind(operation: Any, deps: Any) -> None:
            nonlocal held
            held += 1
            type(lanes)._hold_behind(lanes, operation, deps)

        monkeypatch.setattr(lanes, "_hold_behind", hold_behind)
        if order == "last to first":
            chain.reverse()
        elif order == "shuffled":
            random.Random(0).shuffle(chain)
        for operation in chain:
            assert operation.cancel()
        assert held <= count
        assert all(operation.cancelled() for operation in chain)
        before.set_result(None)
        await r.launch(add, word, 1)
        assert await r.read(word) == 8


async def test_dropping_an_operation_waits_for_nothing(device_label: str) -> None:
    """The last reference to an operation in flight may go: nobody waits, and its memory lives until it is done."""
    async with rig(device_label, lanes=1) as r:
        word, gate = r.word(1), await r.hold()
        before = r.off.stats()["buffers"]
        dropped = [r.launch(add, r.word(1), 1) for _ in range(10)]
        r.launch(add, word, 1)
        del dropped
        gc.collect()
        assert r.off.stats()["buffers"] == before + 10
        assert not r.holds[0].finished
        gate.open()
        assert await r.read(word) == 2
        await until(lambda: r.off.stats()["buffers"] == before)


@pytest.mark.parametrize("where", ["done callback", "handler", "host task", "custom operation"])
async def test_memory_freed_in_what_the_library_calls(device_label: str, where: str) -> None:
    """A program may free memory, in use or not, in whatever the library calls, while other work is in flight."""
    async with calling_rig(device_label) as r:
        await r.off.load(ask, add, hold)
        gate = await r.rig.hold(r.off.lanes[0])
        value, report = r.array(1), r.array(2, np.int32)
        used, idle = r.rig.word(1), r.off.empty(100, np.uint8)
        r.rig.launch(add, used, 1, lane=r.off.lanes[0])
        before, freed = r.off.stats()["buffers"], asyncio.Event()

        def free(*_: object) -> None:
            used.close()
            idle.close()
            freed.set()

        @r.off.host_function
        async def f(x: int) -> int:
            free()
            return x

        async def step() -> None:
            free()

        if where == "done callback":
            r.off.host_task(turns).add_done_callback(free)
        elif where == "handler":
            await r.launch(ask, 3, value, report)
        elif where == "host task":
            await r.off.host_task(step)
        else:
            r.off.custom_operation(free, lane=r.off.lanes[1])
        await freed.wait()
        await until(lambda: r.off.stats()["buffers"] == before - 1, "what nothing uses is freed")
        await turns()
        assert r.off.stats()["buffers"] == before - 1
        gate.open()
        await until(lambda: r.off.stats()["buffers"] == before - 2, "and the other one when its launch is done")
