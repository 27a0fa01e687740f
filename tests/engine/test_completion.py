"""From a mark to the task that awaits it: every policy, the monitor, the fallback, nothing left behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import select
import time
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload._native import timer_slack
from aiooffload.drivers.host import HostDevice
from aiooffload.drivers.mapped import MappedMemory
from aiooffload.engine.completion import EventMarks
from tests.kernels import Boom, SpyDevice, add, fail, nothing, rig, saxpy, turns, until

WAKES = ("hybrid", "interrupt", "poll")
DEVICES = [
    pytest.param("host", id="host"),
    pytest.param("fallback", id="host without memory operations"),
    pytest.param("cuda:0", id="cuda:0", marks=pytest.mark.gpu),
]


def device(kind: str) -> Any:
    return HostDevice(memory_operations=False) if kind == "fallback" else kind


@pytest.mark.all_loops
@pytest.mark.parametrize("wake", WAKES)
@pytest.mark.parametrize("kind", DEVICES)
async def test_awaits_under_every_policy(kind: str, wake: Any) -> None:
    """Single awaits, many at once and a held lane all complete, with marks and with events."""
    async with rig(device(kind), lanes=3, wake=wake, lane_depth=4) as r:
        x, y = await r.off.put(np.ones(100, np.float32)), r.off.zeros(100, np.float32)
        for _ in range(20):
            await r.off.launch(saxpy, grid=1, block=128, args=(1, x, y, 100))
        assert (await r.off.get(y) == 20).all()
        await asyncio.gather(*(r.launch(nothing).wait() for _ in range(200)))
        gate = await r.hold(r.off.lanes[1])
        held = r.launch(nothing, lane=r.off.lanes[1])
        await r.launch(nothing, lane=r.off.lanes[2])
        gate.open()
        await held
        assert bool(r.off.stats()["fallback"]) == (kind == "fallback")


@pytest.mark.parametrize("kind", DEVICES)
async def test_polling_without_yielding(kind: str) -> None:
    """A loop that asks done() and never yields sees its operations complete, and queued ones start."""
    async with rig(device(kind), lanes=1, lane_depth=2) as r:
        word = r.word()
        ops = [r.launch(add, word, 1) for _ in range(20)]
        deadline = time.monotonic() + 5
        while not all(op.done() for op in ops):
            assert time.monotonic() < deadline
        assert await r.read(word) == 20


async def test_monitor_wakes_an_idle_loop(device_label: str) -> None:
    """With "interrupt" the loop sleeps while a kernel runs and the monitor wakes it."""
    async with rig(device_label, wake="interrupt") as r:
        gate = await r.hold()
        before = r.off.stats()
        asyncio.get_running_loop().call_later(0.05, gate.open)
        await r.holds[0]
        after = r.off.stats()
        assert after["wakes"]["monitor"] > 0
        late = after["wake_latency"]["monitor"]
        assert late["count"] == after["wakes"]["monitor"]
        assert 0 < late["sum_s"] < 10 * late["count"]  # times of one clock
        assert after["armings"] - before["armings"] <= 2


@pytest.mark.parametrize("wake", WAKES)
async def test_nothing_is_left_on_an_idle_device(wake: Any) -> None:
    """When nothing is in flight no wait is armed and every stream, the monitor's too, is idle."""
    async with rig("host", wake=wake, lanes=3) as r:
        engine = r.off._engine
        assert engine is not None
        for _ in range(5):
            await r.hold()
            await turns(20)
            r.open_all()
            await r.off.drain()
            await until(lambda: not engine.completion.armed, "the wake is read")
            await until(engine._monitor.query, "the monitor is idle")
            assert all(lane.stream.query() for lane in r.off.lanes)


async def test_one_wait_is_armed_at_a_time() -> None:
    """However much is in flight, the monitor carries one wait and one wake at a time."""
    spy = SpyDevice()
    async with rig(spy, wake="interrupt", lanes=4) as r:
        spy.calls.clear()
        await r.hold_all()
        for _ in range(10):
            await turns(20)
            r.launch(nothing)
        assert spy.calls.count("enqueue_wait") <= 5
        assert spy.calls.count("enqueue_wait") == spy.calls.count("enqueue_wake")
        assert spy.calls.count("enqueue_wait") - r.off.stats()["wakes"]["monitor"] <= 1


async def test_wake_arrives_while_another_thread_keeps_the_interpreter() -> None:
    """The wake takes no lock: it arrives while the loop's thread holds the interpreter in a foreign call."""
    async with rig("host", wake="interrupt", lanes=1) as r:
        engine = r.off._engine
        assert engine is not None
        memory = MappedMemory(4096)
        word = memory.word(0)
        stream = r.off.lanes[0].stream
        stream.enqueue_wait(word, 1)  # holds the lane without the interpreter
        op = r.launch(nothing, lane=r.off.lanes[0])
        copy = r.off.fill(r.off.empty(8, np.uint8), 1, lane=r.off.lanes[0])
        await until(lambda: engine.completion.armed, "the monitor is armed")
        word.store(1)
        await op
        await copy
        await until(lambda: not engine.completion.armed)
        # Armed again for a lane that needs no interpreter to go on: a copy behind a word.
        word.store(0)
        stream.enqueue_wait(word, 1)
        copy = r.off.fill(r.off.empty(8, np.uint8), 1, lane=r.off.lanes[0])
        await until(lambda: engine.completion.armed, "the monitor is armed again")
        word.store(1)
        entry = (ctypes.c_uint64 * 1)(engine.completion._eventfd | select.POLLIN << 32)  # struct pollfd
        assert ctypes.PyDLL(None).poll(entry, 1, 5000) == 1, "no wake while the interpreter was kept"
        await copy


async def test_many_completions_in_one_look(device_label: str) -> None:
    """Completions that are there at once are all found by one look."""
    async with rig(device_label, lanes=2, lane_depth=200) as r:
        gates = await r.hold_all()
        ops = [r.launch(nothing) for _ in range(300)]
        for gate in gates:
            gate.open()
        engine = r.off._engine
        assert engine is not None
        await until(lambda: all(lane.stream.query() for lane in r.off.lanes))
        engine.progress()
        assert all(op.finished for op in ops)


async def test_no_descriptor_is_closed_under_the_driver(device_label: str) -> None:
    """aclose() right after the last completion waits for the wake before it closes the eventfd."""
    for _ in range(10):
        async with rig(device_label, load=False, wake="interrupt", lanes=1) as r:
            r.word(1)
    async with rig(device_label, load=False) as r:
        assert r.off.stats()["pending"] == 0


async def test_timer_slack_is_put_back(device_label: str) -> None:
    """The thread's timer slack is as it was once all its Offloads are closed, in whatever order."""
    before = timer_slack(50_000)
    timer_slack(before)
    first, second = ao.Offload(device_label), ao.Offload(device_label)
    await first.__aenter__()
    await second.__aenter__()
    await first.aclose()
    await second.aclose()
    after = timer_slack(before)
    assert after == before


async def test_hundred_thousand_launches_leak_nothing(device_label: str) -> None:
    """After 100,000 launches there are no more objects than before, and nothing is in flight."""
    async with rig(device_label, limit_s=40) as r:

        async def run(count: int) -> None:
            for _ in range(count // 100):
                ops = [r.launch(nothing) for _ in range(100)]
                await ops[-1]
            await r.off.drain()

        def objects() -> int:
            gc.collect()
            return len(gc.get_objects())

        await run(1000)
        before = objects()
        await run(100_000)
        assert objects() - before < 200
        assert r.off.stats()["in_flight"] == r.off.stats()["pending"] == 0


# Events as marks


class Events:
    """A driver of events that are reached when the test says so."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def create(self) -> Any:
        outer = self

        class Event:
            def __init__(self) -> None:
                self.reached = self.closed = False
                outer.made.append(self)

            def query(self) -> bool:
                return self.reached

            def close(self) -> None:
                self.closed = True

        return Event()

    def enqueue_record(self, event: Any) -> None:
        event.reached = False


def test_event_marks_store_what_was_reached() -> None:
    """The slot gets the last sequence whose event was reached, in order; events are used again and closed."""
    driver, memory = Events(), MappedMemory(4096)
    marks, slots = EventMarks(driver.create), (memory.word(0), memory.word(64))
    for sequence in (1, 2, 3):
        marks.enqueue(driver, slots[0], sequence)  # type: ignore[arg-type]
    marks.enqueue(driver, slots[1], 9)  # type: ignore[arg-type]
    marks.look()
    assert [slot.load() for slot in slots] == [0, 0]
    driver.made[1].reached = True  # not before the first one
    marks.look()
    assert slots[0].load() == 0
    driver.made[0].reached = driver.made[3].reached = True
    marks.look()
    assert [slot.load() for slot in slots] == [2, 9]
    marks.enqueue(driver, slots[1], 10)  # type: ignore[arg-type]
    assert len(driver.made) == 4
    marks.close()
    assert all(event.closed for event in driver.made)


async def test_failure_of_a_host_kernel_under_the_fallback() -> None:
    """A host kernel that raises fails its operation also where events stand for marks."""
    async with rig(device("fallback"), lanes=2) as r:
        op = r.launch(fail)
        with pytest.raises(ao.LaunchError) as caught:
            await op
        assert isinstance(caught.value.__cause__, Boom)
        await r.launch(nothing)
