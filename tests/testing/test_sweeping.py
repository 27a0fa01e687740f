"""Sweeps: healthy programs pass, and each kind of mistake is found and counted as what it is."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.testing import FAULTS, TEARS, Case, Fault, FaultyDevice, Run, run_case, sweep, sweeping
from tests.kernels import add

pytestmark = pytest.mark.allows_blocking("each run has a loop of its own, and its leaks are looked for in between")
NONE = Fault("none", lambda device, n: None, lambda run, n: False)


async def small(run: Run) -> None:
    """A launch between a put and a get."""
    async with run.open(lanes=1) as off:
        await off.load(add)
        put = run(off.put(np.full(1, 3, np.uint64)))
        step = run(off.launch(add, grid=1, block=1, args=(await put, 4)))
        run.expect(run(off.get(await put)), [7], [put, step])


def test_every_place_is_tried() -> None:
    """Each fault is injected at the first call, the second, and so on to the last; nothing is found."""
    cases = list(sweep(small))
    assert [case.problems for case in cases if case.problems] == []
    by_fault = {fault.name: [case.at for case in cases if case.fault == fault.name] for fault in FAULTS}
    assert all(places == list(range(1, len(places) + 1)) for places in by_fault.values())
    assert min(len(by_fault[name]) for name in ("refused", "out of memory", "launch failed", "lost")) > 10
    assert min(len(by_fault[name]) for name in ("delayed", "dropped")) >= 3
    assert all(case.injected for case in cases)


def test_places_may_be_left_out() -> None:
    """With a first place and a step, those places are tried."""
    assert [case.at for case in sweep(small, FAULTS[:1], first=2, step=5)][:3] == [2, 7, 12]


def test_torn_requests() -> None:
    """Each request of a kernel is torn in turn; its launch fails, or it was answered before."""

    @ao.kernel(calls=True)
    def ask(launch: ao.Launch) -> None:
        for value in range(2):
            launch.call("note", value)

    async def calls(run: Run) -> None:
        async with run.open(lanes=1, calling_lanes=1, call_timeout_s=0.05) as off:

            @off.host_function
            async def note(x: int) -> None:
                pass

            run(off.launch(ask, grid=1, block=1))

    cases = list(sweep(calls, TEARS))
    assert [(case.fault, case.at, case.problems) for case in cases] == [
        (name, at, [])
        for name in ("torn", "forged")
        for at in (1, 2, 3)  # the last one stands behind all requests
    ]


# Mistakes that are planted


class Lying(FaultyDevice):
    """Its second copy does nothing, and nobody is told."""

    def __init__(self) -> None:
        super().__init__()
        self.skip("enqueue_copy", at=2)


def found(scenario: Callable[[Run], Any], make: Callable[[], FaultyDevice] = FaultyDevice, **options: Any) -> Case:
    """Run a scenario without any fault."""
    return run_case(scenario, NONE, 0, make, **options)


def test_a_driver_that_lies_is_found() -> None:
    """A wrong result counts as wrong, and a scenario that is wrong without a fault is not swept."""
    case = found(small, Lying)
    assert (case.hangs, case.leaks) == ([], [])
    assert len(case.wrong) == 1
    assert "not [7]" in case.wrong[0]
    with pytest.raises(AssertionError, match="gave"):
        next(sweep(small, make=Lying))


def test_a_failure_that_nobody_injected_is_found() -> None:
    """An operation, or the scenario itself, that fails for another reason than the fault is wrong."""

    async def broken(run: Run) -> None:
        async with run.open(lanes=1) as off:

            async def task() -> None:
                raise ZeroDivisionError("mine")

            run(off.host_task(task))
            run(off.host_task(task), may=(ZeroDivisionError,))
            await run.settle()
            raise ValueError("of the scenario")

    wrong = found(broken).wrong
    assert len(wrong) == 2
    assert "ValueError" in wrong[0]
    assert "ZeroDivisionError" in wrong[1]


def test_what_goes_to_nobody_is_found() -> None:
    """An exception in the loop, one in a destructor and a warning are wrong."""

    class Bad:
        def __del__(self) -> None:
            raise ValueError("in a destructor")

    async def careless(run: Run) -> None:
        async with run.open(lanes=1):
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)
            Bad()
            await asyncio.sleep(0)
            import warnings

            warnings.warn("old", DeprecationWarning, stacklevel=1)

    wrong = sorted(text.split(":")[0] for text in found(careless).wrong)
    assert wrong == ["DeprecationWarning", "event loop", "unraisable"]


def test_a_scenario_that_hangs_is_ended() -> None:
    """After its limit a run counts as hanging, says where, and is cleared away."""

    async def stuck(run: Run) -> None:
        async with run.open(lanes=1) as off:
            await off.fill(off.empty(4, np.uint8), 1)
            await asyncio.get_running_loop().create_future()

    case = found(stuck, limit_s=0.1)
    assert len(case.hangs) == 1
    assert "stuck" in case.hangs[0]
    assert case.leaks == []


def test_leaks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor, a task and a buffer's memory that stay are leaks."""
    monkeypatch.setattr(sweeping, "_CLOSE_S", 0.1)
    monkeypatch.setattr("aiooffload.testing.resources._GRACE_S", 0.1)
    kept: list[Any] = []

    class Forgetful(FaultyDevice):
        def _unregister(self, memory: Any) -> None:
            self.inner.unregister(memory)

    async def leaky(run: Run) -> None:
        async with run.open(lanes=1) as off:
            kept.append(off.empty(4, np.uint8))
            kept.append(os.eventfd(0))
            kept.append(asyncio.ensure_future(asyncio.sleep(60)))

    case = found(leaky, Forgetful)
    os.close(kept[1])
    kept.clear()
    assert case.wrong == []
    for text in ("sleep", "registered of the device", "eventfd", "leases"):
        assert any(text in leak for leak in case.leaks), text


def test_use_of_freed_memory_is_found() -> None:
    """A result that is poison is wrong, and so is a copy from memory that was freed."""

    async def late(run: Run) -> None:
        async with run.open(lanes=1) as off:
            x, y = off.empty(16, np.uint8), off.empty(16, np.uint8)
            address = x._address
            x.close()
            await off.custom_operation(lambda lane: lane.stream.enqueue_copy(y._address, address, 16))
            run.expect(run(off.get(y)), np.zeros(16))

    wrong = found(late).wrong
    assert len(wrong) == 2
    assert "freed" in wrong[0]
    assert "gave memory that was freed" in wrong[1]


def test_running_out_of_memory_must_not_lose_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that takes a full device for a lost one is wrong."""
    from aiooffload.engine.memory import Memory

    allocate = Memory.allocate

    def hasty(self: Memory, nbytes: int) -> Any:
        try:
            return allocate(self, nbytes)
        except ao.OutOfMemoryError as error:
            self._on_lost(ao.DeviceLostError(f"{error}"))
            raise

    monkeypatch.setattr(Memory, "allocate", hasty)
    full = Fault(
        "full",
        lambda device, n: device.fail("allocate", ao.OutOfMemoryError, times=2),
        lambda run, n: bool(run.device.injected),
    )
    assert "running out of memory was taken for the end of the device" in run_case(small, full, 1).wrong
