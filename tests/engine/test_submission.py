"""Submitting: what would wait for itself is refused, and what is refused has done nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import aiooffload as ao
from aiooffload.engine.submission import Terms
from aiooffload.operation import Operation
from aiooffload.rules.scheduler import waits_for
from tests.kernels import add, turns
from tests.reverse_kernels import ask, calling_rig, end_of


def operation(deps: list[Operation[Any]] | None = None) -> Operation[Any]:
    made: Operation[Any] = Operation(asyncio.get_running_loop(), None, "made")
    made.deps = deps
    return made


async def test_waits_for_follows_what_is_on_the_host() -> None:
    """A chain of operations on the host leads to the launch at its end, in any number of steps."""
    launch = operation()
    chain = [launch]
    for _ in range(2000):
        chain.append(operation([chain[-1]]))
    assert waits_for([chain[-1]], launch)
    assert not waits_for(chain[-1:], operation())
    assert not waits_for([], launch)


async def test_waits_for_sees_each_once() -> None:
    """Diamonds do not multiply, and finished operations lead nowhere."""
    launch = operation()
    layer = [operation([launch])]
    for _ in range(60):
        layer = [operation(list(layer)), operation(list(layer))]
    assert waits_for(layer, launch)
    done = operation([launch])
    done.finish()
    assert not waits_for([done], launch)


def test_terms_by_default() -> None:
    """An operation may run at any time, anywhere, and as late as it has to."""
    assert Terms() == ((), None, False, None, 0, False)


async def test_refused_launch_of_a_kernel_that_calls_does_nothing(device_label: str) -> None:
    """A lane of the program's, or instant where it would have to wait, is refused, and nothing is left pending."""
    async with calling_rig(device_label) as r:
        arguments = (1, r.array(1), r.array(2, "i4"))
        with pytest.raises(ao.UsageError, match="lanes of their own"):
            r.launch(ask, *arguments, lane=r.off.lanes[0])
        with pytest.raises(ao.WouldBlock, match="not loaded"):
            r.launch(ask, *arguments, instant=True)
        with pytest.raises(ao.UsageError):
            r.launch(ask, *arguments[:2])
        await r.off.drain()
        assert r.off.stats()["pending"] == 0


async def test_what_comes_after_a_launch_that_calls_waits_on_the_host(device_label: str) -> None:
    """It is pending until that launch is done, so no lane is held up meanwhile; instant, it would block."""
    async with calling_rig(device_label, lanes=1) as r:
        asked, go_on, total = asyncio.Event(), asyncio.Event(), r.word()

        @r.off.host_function
        async def f(x: int) -> int:
            asked.set()
            await go_on.wait()
            return x

        await r.off.load(ask, add)
        value, report = r.array(1), r.array(2, "i4")
        op = r.launch(ask, 5, value, report)
        read = r.off.get(value)
        await asked.wait()
        await turns()
        assert not read.done()
        with pytest.raises(ao.WouldBlock, match="only the host can wait for"):
            r.launch(add, value.view("u8"), 1, instant=True)
        await r.launch(add, total, 1)  # goes past it on the only lane
        go_on.set()
        assert (await read).tolist() == [5]
        assert await end_of(op) is None
        assert await r.read(total) == 1


async def test_dependent_of_a_failed_call(device_label: str) -> None:
    """after= a launch whose host function failed never starts; one that only shares a buffer does."""
    async with calling_rig(device_label) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            raise KeyError(x)

        await r.off.load(ask, add)
        value, report, word = r.array(1), r.array(2, "i4"), r.word()
        op = r.launch(ask, 5, value, report)
        dependent, sharing = r.launch(add, word, 1, after=[op]), r.off.get(value)
        assert isinstance(await end_of(op), ao.HostFunctionError)
        assert isinstance(await end_of(dependent), ao.DependencyError)
        await sharing
        assert await r.read(word) == 0
