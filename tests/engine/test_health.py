"""A lost device: everything fails with suspects, nobody calls the driver again, and nothing hangs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.engine import health
from aiooffload.engine.copies import LARGE_BLOCKS, PIECE_NBYTES
from aiooffload.engine.health import Loss, Watchdog, suspects
from tests.kernels import SpyDevice, add, hold_write, nothing, rig, turns, until

WAKES = ("hybrid", "interrupt", "poll")


@pytest.fixture(autouse=True)
def no_loss_before_or_after() -> Iterator[None]:
    """Give every test a process that has lost nothing."""
    assert health.loss.error is None
    yield
    health.loss.error = None


@pytest.mark.all_loops
@pytest.mark.parametrize("wake", WAKES)
async def test_everything_fails_with_suspects(wake: str) -> None:
    """Operations in flight, queued and held all fail with DeviceLostError, which names what had not finished."""
    device = SpyDevice()
    async with rig(device, lanes=2, lane_depth=2, wake=wake, bury=True) as r:
        word = r.word()
        await r.off.drain()
        await r.hold_all()
        ops = [r.launch(add, word, 1) for _ in range(4)]
        ops.append(r.launch(nothing, after=[asyncio.get_running_loop().create_future()]))
        get = r.off.get(word)
        device.lost = True
        for op in (*r.holds, *ops, get):
            with pytest.raises(ao.DeviceLostError) as caught:
                await op
            assert caught.value.status == "ILLEGAL_ADDRESS"
            assert caught.value.suspects[0] == "hold on lane 0"
            assert "hold on lane 1" in caught.value.suspects
        await r.off.drain()


@pytest.mark.parametrize("found", ["watchdog", "launch", "copy", "launch path", "done"])
async def test_no_driver_call_after_a_loss(found: str) -> None:
    """However the loss was found, every submission then raises it, aclose() returns at once, no driver is called."""
    device = SpyDevice()
    async with rig(device, lanes=2, bury=True) as r:
        word, pinned = r.word(), await r.off.pinned(4, np.uint64)
        await r.off.drain()
        await r.launch(nothing)
        await r.hold(r.off.lanes[0])
        device.lost = True
        if found == "launch":
            failed = r.launch(add, word, 1)
        elif found == "launch path":
            failed = r.launch(nothing)
        elif found == "copy":
            failed = r.off.fill(word, 1)
        else:
            failed = r.holds[0]
        if found == "done":
            deadline = time.monotonic() + 3
            while not failed.done() and time.monotonic() < deadline:
                pass  # a program that polls without yielding must not hang either
            assert failed.done()
        with pytest.raises(ao.DeviceLostError):
            await failed
        calls = len(device.calls)
        for submit in (
            lambda: r.launch(nothing),
            lambda: r.launch(add, word, 1),
            lambda: r.off.get(word),
            lambda: r.off.put(np.zeros(3)),
            lambda: r.off.put(pinned),
            lambda: r.off.empty(3, np.uint8),
            lambda: r.off.fill(word, 2),
        ):
            with pytest.raises(ao.DeviceLostError):
                submit()
        with pytest.raises(ao.DeviceLostError):
            await r.off.load(add)
        with pytest.raises(ao.DeviceLostError):
            await r.off.pinned(3, np.uint8)
        word.close()
        pinned.close()
        r.open_all()
        await turns(200)
        before = time.monotonic()
        await r.off.aclose()
        assert time.monotonic() - before < 1
        assert device.calls[calls:] == []


@pytest.mark.parametrize("direction", ["in", "out"])
async def test_large_copy_stops_at_a_loss(direction: str) -> None:
    """A copy that goes piece by piece sends no further piece to a lost device."""
    device = SpyDevice()
    async with rig(device, lanes=2, bury=True) as r:
        nbytes = (LARGE_BLOCKS + 20) * PIECE_NBYTES
        buffer, host = r.off.empty(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        await r.off.drain()
        await r.hold(r.off.lanes[0])
        lane = r.off.lanes[0]
        op = r.off.copy(buffer, host, lane=lane) if direction == "in" else r.off.copy(host, buffer, lane=lane)
        await until(lambda: r.off.stats()["in_flight"] > 2)
        device.lost = True
        with pytest.raises(ao.DeviceLostError):
            await r.holds[0]
        calls = len(device.calls)
        with pytest.raises(ao.DeviceLostError):
            await op
        await turns(300)
        assert device.calls[calls:] == []


async def test_loss_while_a_kernel_loads() -> None:
    """A load that waits behind the barrier for what never ends fails too, and does not call the driver."""
    device = SpyDevice()
    async with rig(device, lanes=2, load=False, bury=True) as r:
        await r.off.load(add)
        await r.off.load(*[hold_write])
        word, gate = r.word(), r.gate()
        op = r.launch(hold_write, gate.address, word, 1)
        await until(lambda: gate.started)
        load = asyncio.ensure_future(r.off.load(nothing))
        launch = r.launch(nothing)
        await turns()
        loads = device.calls.count("load")
        device.lost = True
        for wait in (op.wait(), launch.wait(), load):
            with pytest.raises(ao.OffloadError):
                await wait
        assert device.calls.count("load") == loads


async def test_process_wide_loss_reaches_every_offload() -> None:
    """Where a fault ends every device of the process, the other Offloads fail too, and no new one opens."""
    device, second = SpyDevice(process_wide_faults=True), SpyDevice(process_wide_faults=True)
    async with rig(second, bury=True) as other, rig(device, bury=True) as r:
        await r.hold()
        await other.hold()
        device.lost = True
        for op in (r.holds[0], other.holds[0]):
            with pytest.raises(ao.DeviceLostError):
                await op
        third = SpyDevice(process_wide_faults=True)
        with pytest.raises(ao.DeviceLostError):
            await ao.Offload()._enter(third)
        async with rig() as host:  # the host device has no part in it
            await host.launch(nothing)


async def test_host_offload_survives_a_gpu() -> None:
    """An Offload whose device has no part in the fault goes on."""
    device = SpyDevice(process_wide_faults=True)
    async with rig() as host, rig(device, bury=True) as r:
        await r.hold()
        device.lost = True
        with pytest.raises(ao.DeviceLostError):
            await r.holds[0]
        async with asyncio.timeout(3):
            await host.launch(nothing)


async def test_loss_while_idle_is_found_by_the_next_use() -> None:
    """A device that is lost while nothing is in flight fails the next operation."""
    device = SpyDevice()
    async with rig(device, bury=True) as r:
        await r.launch(nothing)
        device.lost = True
        with pytest.raises(ao.DeviceLostError):
            await r.launch(nothing)


async def test_idle_engine_asks_nothing() -> None:
    """With nothing in flight the watchdog has no timer, and the driver is asked nothing."""
    device = SpyDevice()
    async with rig(device) as r:
        await r.launch(nothing)
        engine = r.off._engine
        assert engine is not None
        await until(lambda: engine.watchdog._handle is None)
        calls = len(device.calls)
        await turns(100)
        assert len(device.calls) == calls


# The parts


class Clockwork:
    """An event loop's timer, turned by hand."""

    def __init__(self) -> None:
        self.call: object = None
        self.cancelled = 0
        self.delay_s = 0.0

    def call_later(self, delay_s: float, call: object, context: object) -> Clockwork:
        self.call, self.delay_s = call, delay_s
        return self

    def cancel(self) -> None:
        self.cancelled += 1
        self.call = None

    def tick(self) -> None:
        call, self.call = self.call, None
        assert callable(call)
        call()


class World:
    """What a watchdog looks at."""

    def __init__(self) -> None:
        self.in_flight, self.completed, self.checked = 1, 0, 0
        self.arriving = 0
        self.error: ao.DeviceLostError | None = None
        self.lost: list[ao.DeviceLostError] = []
        self.stalls: list[float] = []
        self.clock = Clockwork()
        self.dog = Watchdog(
            self.clock,  # type: ignore[arg-type]
            lambda: self.in_flight,
            lambda: self.completed,
            self.look,
            self.check,
            self.lost.append,
            self.stalls.append,
        )

    def look(self) -> None:
        self.in_flight -= self.arriving

    def check(self) -> None:
        self.checked += 1
        if self.error:
            raise self.error


def test_watchdog_asks_at_every_tick() -> None:
    """Every tick asks the driver once, whatever has arrived since the last; it ends with the flight."""
    world = World()
    world.dog.notice()
    world.dog.notice()
    world.completed = 1
    world.clock.tick()
    assert world.checked == 1
    world.clock.tick()
    assert world.checked == world.dog.checks == 2
    world.in_flight = 0
    world.clock.tick()
    assert world.clock.call is None
    world.dog.notice()
    world.dog.stop()
    assert world.clock.cancelled == 1
    world.dog.stop()


def test_watchdog_tells_of_a_loss_once() -> None:
    """When the driver says the device is gone, that is told, and it ticks no more."""
    world = World()
    world.error = ao.DeviceLostError("gone")
    world.dog.notice()
    world.clock.tick()
    assert world.lost == [world.error]
    assert world.clock.call is None


def test_watchdog_asks_nothing_after_a_look_that_ended_the_flight() -> None:
    """Once its look has left nothing in flight, because it arrived or the device was lost, the driver is not asked."""
    world = World()
    world.dog.notice()
    world.arriving = 1
    world.clock.tick()
    assert world.checked == 0
    assert world.clock.call is None


def test_watchdog_slows_down_while_nothing_moves() -> None:
    """The ticks get longer up to a limit, at which they stay until something arrives or a new flight begins."""
    world = World()
    world.dog.notice()
    delays = []
    for moves in (0, 0, 0, 0, 1, 0, 0, 0):
        delays.append(round(world.clock.delay_s / health.TICK_S))
        world.completed += moves
        world.clock.tick()
    assert delays == [1, 2, 3, 3, 3, 1, 2, 3]
    world.in_flight = 0
    world.clock.tick()
    world.in_flight = 1
    world.dog.notice()
    assert world.clock.delay_s == health.TICK_S


def test_watchdog_warns_once_of_a_stall() -> None:
    """When nothing has moved for 20 s, that is told once, and again only after something moved."""
    world = World()
    world.dog.notice()
    waited_s, told_at = 0.0, 0.0
    for _ in range(3000):
        waited_s += world.clock.delay_s
        world.clock.tick()
        if world.stalls and not told_at:
            told_at = waited_s
    assert world.stalls == [health.STALL_S]
    assert health.STALL_S <= told_at <= health.STALL_S + health.TICK_S * health.SLOWEST
    world.completed += 1
    for _ in range(1002):
        world.clock.tick()
    assert len(world.stalls) == 2


def test_suspects_are_launches_on_lanes() -> None:
    """Suspects are named with their lane, in the order given."""

    class Named:
        def __init__(self, name: str, index: int | None) -> None:
            self.name = name
            self.lane = None if index is None else type("L", (), {"index": index})()

    assert suspects([Named("a", 0), Named("b", None), Named("c", 3)]) == ("a on lane 0", "c on lane 3")  # type: ignore[list-item]


def test_latch_tells_every_loop() -> None:
    """A loss is told to each engine on its own loop's thread; one with a closed loop is passed over."""
    latch, told = Loss(), threading.Event()
    threads: list[int] = []

    class Engine:
        def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
            self.loop = loop

        def lose(self, error: ao.DeviceLostError) -> None:
            threads.append(threading.get_ident())
            told.set()
            self.loop.stop()

    closed, running = asyncio.new_event_loop(), asyncio.new_event_loop()
    closed.close()
    dead, engine, here = Engine(closed), Engine(running), Engine(running)
    for one in (dead, engine, here):
        latch.join(one)
    thread = threading.Thread(target=running.run_forever)
    thread.start()
    error = ao.DeviceLostError("gone")
    latch.latch(error, here)
    assert told.wait(5)
    thread.join()
    running.close()
    assert threads == [thread.ident]
    assert latch.error is error
