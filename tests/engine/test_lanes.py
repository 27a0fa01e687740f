"""The way to the device: order per buffer, `after`, lanes, depth, room, and stopping what still waits."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from tests.kernels import (
    Boom,
    Rig,
    SpyDevice,
    add,
    combine,
    fail,
    fail_at,
    hold,
    hold_read,
    hold_write,
    nothing,
    rig,
    scale_add,
    turns,
    until,
)

M64 = 2**64


# Order per buffer


@pytest.mark.all_loops
async def test_chain_runs_in_order_across_lanes(device_label: str) -> None:
    """Launches on one buffer run in the order of submission although each is sent to another lane."""
    async with rig(device_label, lanes=4) as r:
        word, gate, expected = r.word(1), r.gate(), 7
        r.launch(hold_write, gate.address, word, 7, lane=r.off.lanes[0])
        for i in range(40):
            r.launch(scale_add, word, 3, i, lane=r.off.lanes[i % 4])
            expected = (expected * 3 + i) % M64
        await until(lambda: gate.started)
        gate.open()
        assert await r.read(word) == expected


async def test_chain_stays_on_one_lane(device_label: str) -> None:
    """Dependent launches that name no lane go to the one their buffer is in use on."""
    async with rig(device_label, lanes=4) as r:
        word, gate = r.word(), r.gate()
        first = r.launch(hold_write, gate.address, word, 0, lane=r.off.lanes[2])
        rest = [r.launch(add, word, 1) for _ in range(5)]
        assert {op.lane.index for op in rest} == {2}
        gate.open()
        await first
        assert await r.read(word) == 5


async def test_readers_overlap(device_label: str) -> None:
    """Two launches that only read a buffer may run at the same time."""
    async with rig(device_label, lanes=4) as r:
        word, gates = r.word(9), [r.gate(), r.gate()]
        outs = [r.word(), r.word()]
        ops = [r.launch(hold_read, gate.address, word, out) for gate, out in zip(gates, outs, strict=True)]
        await until(lambda: all(gate.started for gate in gates), "both readers run at once")
        r.open_all()
        for op in ops:
            await op
        assert [await r.read(out) for out in outs] == [9, 9]


@pytest.mark.parametrize("writer", ["launch", "fill", "copy", "put", "copy_pinned"])
async def test_write_after_read(device_label: str, writer: str) -> None:
    """Whatever writes a buffer waits for what was submitted to read it, on another lane too."""
    async with rig(device_label, lanes=4) as r:
        lanes = r.off.lanes
        word, out, gate = r.word(1), r.word(), r.gate()
        read = r.launch(hold_read, gate.address, word, out, lane=lanes[0])
        await until(lambda: gate.started)
        if writer == "launch":
            write: ao.Operation[Any] = r.launch(add, word, 1, lane=lanes[1])
        elif writer == "fill":
            write = r.off.fill(word, 2, lane=lanes[1])
        elif writer == "copy":
            write = r.off.copy(word, await r.off.put(np.array([2], np.uint64)), lane=lanes[1])
        elif writer == "put":
            write = r.off.copy(word, np.array([2], np.uint64), lane=lanes[1])
        else:
            pinned = await r.off.pinned(1, np.uint64)
            pinned.array[:] = 2
            write = r.off.copy(word, pinned, lane=lanes[1])
        await r.launch(nothing, lane=lanes[2])
        await turns()
        assert not write.done()
        gate.open()
        await read
        assert await r.read(out) == 1
        assert await r.read(word) == 2


@pytest.mark.parametrize("reader", ["get", "copy", "launch", "get_pinned"])
async def test_read_after_write(device_label: str, reader: str) -> None:
    """Whatever reads a buffer sees what was submitted before to write it, on another lane too."""
    async with rig(device_label, lanes=4) as r:
        lanes = r.off.lanes
        word, other, gate = r.word(1), r.word(), r.gate()
        r.launch(hold_write, gate.address, word, 5, lane=lanes[0])
        if reader == "get":
            read: ao.Operation[Any] = r.off.get(word, lane=lanes[1])
        elif reader == "get_pinned":
            read = r.off.get(word, out=await r.off.pinned(1, np.uint64), lane=lanes[1])
        elif reader == "copy":
            read = r.off.copy(other, word, lane=lanes[1])
        else:
            read = r.launch(combine, other, word, lane=lanes[1])
        await r.launch(nothing, lane=lanes[2])
        await turns()
        assert not read.done()
        gate.open()
        value = await read
        assert int(value[0] if value is not None else await r.read(other)) == 5


async def test_slices_count_as_the_whole(device_label: str) -> None:
    """A launch on one slice comes after a launch on another slice of the same allocation."""
    async with rig(device_label, lanes=4) as r:
        whole, gate = r.off.zeros(2, np.uint64), r.gate()
        r.launch(hold_write, gate.address, whole[:1], 5, lane=r.off.lanes[0])
        second = r.launch(add, whole[1:], 1, lane=r.off.lanes[1])
        await r.launch(nothing, lane=r.off.lanes[2])
        await turns()
        assert not second.done()
        gate.open()
        assert (await r.off.get(whole)).tolist() == [5, 1]


@pytest.mark.parametrize("submitted", ["before", "after"])
@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_order_survives_a_writer_that_never_started(device_label: str, how: str, submitted: str) -> None:
    """When a writer in the middle never starts, those behind it still wait for those before it."""
    async with rig(device_label, lanes=4) as r:
        word, gate = r.word(1), r.gate()
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        first = r.launch(hold_write, gate.address, word, 5, lane=r.off.lanes[0])
        middle = r.launch(add, word, 1000, after=[held])

        def last() -> ao.Operation[None]:
            return r.launch(scale_add, word, 2, 1, lane=r.off.lanes[1])

        op = last() if submitted == "before" else None
        if how == "cancelled":
            middle.cancel()
        else:
            held.set_exception(Boom())
            await until(middle.done)
            assert isinstance(middle.exception(), ao.DependencyError)
        op = op or last()
        await r.launch(nothing, lane=r.off.lanes[1] if op.lane is None else r.off.lanes[2])
        await turns()
        assert not op.done()
        gate.open()
        await first
        assert await r.read(word) == 11


async def run_program(r: Rig, seed: int, steps: int) -> None:
    """Submit a random program and compare what is left with NumPy running it in submission order."""
    choose = random.Random(seed)
    lanes = [None, *r.off.lanes]
    model = [np.array([i], np.uint64) for i in range(4)]
    buffers = [r.word(i) for i in range(4)]
    gates, reads = [], []
    for _ in range(steps):
        lane = choose.choice(lanes)
        a, b = choose.sample(range(4), 2)
        kind = choose.choice(("scale", "combine", "fill", "copy", "in", "get", "new", "hold"))
        if kind == "scale":
            r.launch(scale_add, buffers[a], 3, b, lane=lane)
            model[a] = np.array([(int(model[a][0]) * 3 + b) % M64], np.uint64)
        elif kind == "combine":
            r.launch(combine, buffers[a], buffers[b], lane=lane)
            model[a] = np.array([(int(model[a][0]) * 3 + int(model[b][0])) % M64], np.uint64)
        elif kind == "fill":
            r.off.fill(buffers[a], b, lane=lane)
            model[a] = np.array([b], np.uint64)
        elif kind == "copy":
            r.off.copy(buffers[a], buffers[b], lane=lane)
            model[a] = model[b].copy()
        elif kind == "in":
            value = np.array([choose.getrandbits(60)], np.uint64)
            r.off.copy(buffers[a], value, lane=lane)
            model[a] = value.copy()
        elif kind == "get":
            reads.append((r.off.get(buffers[a], lane=lane), model[a].copy()))
        elif kind == "new":
            buffers[a] = r.word(b)
            model[a] = np.array([b], np.uint64)
        elif len(gates) < 6:
            gates.append(r.gate())
            r.launch(hold_write, gates[-1].address, buffers[a], b, lane=lane)
            model[a] = np.array([b], np.uint64)
        if gates and choose.random() < 0.1:
            choose.choice(gates).open()
    r.open_all()
    for op, expected in reads:
        assert (await op).tolist() == expected.tolist()
    assert [await r.read(buffer) for buffer in buffers] == [int(value[0]) for value in model]


@pytest.mark.parametrize("depth", [1, 3, 128])
async def test_random_programs_match_a_model(device_label: str, depth: int) -> None:
    """Random mixes of everything, on random lanes with gates in between, end as if run one by one."""
    async with rig(device_label, lanes=3, lane_depth=depth) as r:
        for seed in range(12):
            await run_program(r, seed, 80)


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 60), lanes=st.integers(1, 4), depth=st.integers(1, 4))
def test_any_program_matches_a_model(seed: int, steps: int, lanes: int, depth: int) -> None:
    """The same for programs, lane counts and depths that Hypothesis chooses, on the host device."""

    async def main() -> None:
        async with rig("host", lanes=lanes, lane_depth=depth) as r:
            await run_program(r, seed, steps)

    asyncio.run(main())


async def test_explicit_ordering_orders_nothing_by_itself(device_label: str) -> None:
    """With ordering="explicit" a launch does not wait for another on its buffer, unless `after` says so."""
    async with rig(device_label, lanes=3, ordering="explicit") as r:
        word, gate = r.word(1), r.gate()
        await r.off.drain()
        first = r.launch(hold_write, gate.address, word, 5, lane=r.off.lanes[0])
        await until(lambda: gate.started)
        await r.launch(add, word, 1, lane=r.off.lanes[1])
        assert not first.done()
        third = r.launch(add, word, 1, lane=r.off.lanes[1], after=[first])
        await r.launch(nothing, lane=r.off.lanes[2])
        await turns()
        assert not third.done()
        gate.open()
        await third
        assert await r.read(word) == 6


# after=


@pytest.mark.all_loops
async def test_after_operations(device_label: str) -> None:
    """A launch waits for the operations it comes after, on other lanes and still waiting ones included."""
    async with rig(device_label, lanes=3, lane_depth=1) as r:
        gates = [await r.hold(lane) for lane in r.off.lanes[:2]]
        waiting = r.launch(nothing, lane=r.off.lanes[0])
        flying = r.off.lanes[1].queue.operations()[0]
        last = r.launch(nothing, lane=r.off.lanes[2], after=[waiting, flying])
        await r.launch(nothing, lane=r.off.lanes[2], instant=True)
        gates[0].open()
        await waiting
        await turns()
        assert not last.done()
        gates[1].open()
        await last
        assert waiting.done()


async def test_after_takes_one_operation_and_a_generator(device_label: str) -> None:
    """`after` is one operation or anything to iterate over."""
    async with rig(device_label) as r:
        first = r.launch(nothing)
        await r.launch(nothing, after=first)  # type: ignore[arg-type]
        assert first.done()
        await r.launch(nothing, after=(op for op in [first, first]))


async def test_generator_in_after_that_submits(device_label: str) -> None:
    """What it submits came first, whether it names it or not."""
    async with rig(device_label, lanes=2) as r:
        word = r.word()
        await r.off.drain()
        gate = r.gate()

        def generate() -> Iterator[ao.Operation[None]]:
            r.launch(hold_write, gate.address, word, 5, lane=r.off.lanes[0])
            yield from ()

        op = r.launch(add, word, 1, after=generate(), lane=r.off.lanes[1])
        await turns()
        gate.open()
        await op
        assert await r.read(word) == 6


@pytest.mark.all_loops
@pytest.mark.parametrize("kind", ["future", "coroutine", "task"])
async def test_after_awaitables(device_label: str, kind: str) -> None:
    """A launch waits on the host for futures, coroutines and tasks."""
    async with rig(device_label) as r:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def body() -> None:
            await future

        awaitable = {"future": lambda: future, "coroutine": body, "task": lambda: asyncio.ensure_future(body())}[kind]()
        op = r.launch(nothing, after=[awaitable])
        await turns()
        assert not op.done()
        assert r.off.stats()["pending"] == 1
        future.set_result(None)
        await op


@pytest.mark.parametrize("kind", ["exception", "cancelled"])
async def test_after_an_awaitable_that_fails(device_label: str, kind: str) -> None:
    """It fails with DependencyError, whose cause is the failure, and never starts."""
    async with rig(device_label) as r:
        word = r.word(1)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        op = r.launch(add, word, 1, after=[future])
        if kind == "exception":
            future.set_exception(Boom("no"))
        else:
            future.cancel()
        with pytest.raises(ao.DependencyError) as caught:
            await op
        assert isinstance(caught.value.__cause__, Boom if kind == "exception" else asyncio.CancelledError)
        assert await r.read(word) == 1


@pytest.mark.parametrize("state", ["done", "held", "in flight"])
async def test_after_an_operation_that_fails(state: str) -> None:
    """It fails with DependencyError and never starts, whenever the operation before it fails."""
    async with rig(lanes=2) as r:
        await r.off.load(fail, fail_at)
        word, gate = r.word(1), r.gate()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if state == "in flight":
            first = r.launch(fail_at, gate.address)
        else:
            first = r.launch(fail, after=[future] if state == "held" else ())
        if state == "done":
            await until(first.done)
        op = r.launch(add, word, 1, after=[first])
        future.set_result(None)
        gate.open()
        with pytest.raises(ao.DependencyError) as caught:
            await op
        assert caught.value.__cause__ is first.exception()
        assert await r.read(word) == 1


async def test_after_a_cancelled_operation(device_label: str) -> None:
    """A cancelled operation never happened, so what comes after it fails with DependencyError."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.hold()
        waiting = r.launch(nothing)
        op = r.launch(nothing, after=[waiting])
        assert waiting.cancel()
        r.open_all()
        with pytest.raises(ao.DependencyError) as caught:
            await op
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)


@pytest.mark.parametrize("length", [16, 1000])
async def test_failure_runs_down_a_long_chain(device_label: str, length: int) -> None:
    """When the first of many operations, each after the last, is cancelled, all the rest fail, and say so briefly."""
    async with rig(device_label) as r:
        for count in (16, length):  # the short one shows first whether messages grow with the chain
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            first = op = r.launch(nothing, after=[future])
            chain = []
            for _ in range(count):
                op = r.launch(nothing, after=[op])
                chain.append(op)
            first.cancel()
            async with asyncio.timeout(5):
                await until(lambda ops=chain: all(op.done() for op in ops))  # type: ignore[misc]
            assert all(isinstance(op.exception(), ao.DependencyError) for op in chain)
            assert len(str(chain[-1].exception())) < 1000
        await r.launch(nothing)


async def test_long_chain_is_released_at_once(device_label: str) -> None:
    """A thousand operations, each after the last, run when what held the first is over."""
    async with rig(device_label, lane_depth=200) as r:
        word = r.word()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        op = r.launch(add, word, 1, after=[future])
        for _ in range(1000):
            op = r.launch(add, word, 1, after=[op])
        future.set_result(None)
        await op
        assert await r.read(word) == 1001


@pytest.mark.parametrize("after", ["number", "list of numbers"])
async def test_after_something_else_changes_nothing(device_label: str, after: str) -> None:
    """`after` of the wrong kind raises, and leaves its buffers usable."""
    async with rig(device_label) as r:
        word = r.word(1)
        with pytest.raises((ao.UsageError, TypeError)):
            r.launch(add, word, 1, after=3 if after == "number" else [3])  # type: ignore[arg-type]
        async with asyncio.timeout(3):
            assert await r.read(word) == 1
            await r.off.drain()


async def test_operation_of_another_offload_is_refused(device_label: str) -> None:
    """An operation of another Offload in `after` raises UsageError."""
    async with rig(device_label) as r, rig(device_label) as other:
        op = other.launch(nothing)
        with pytest.raises(ao.UsageError, match="another Offload"):
            r.launch(nothing, after=[op])
        await op


# lane=


async def test_lane_is_taken(device_label: str) -> None:
    """A launch goes to the lane it names."""
    async with rig(device_label, lanes=3) as r:
        for lane in r.off.lanes:
            op = r.launch(nothing, lane=lane)
            assert op.lane is lane
            await op


async def test_spread_over_lanes(device_label: str) -> None:
    """Launches that share nothing go to the least busy lanes, around a held one."""
    async with rig(device_label, lanes=4) as r:
        await r.hold(r.off.lanes[0])
        ops = [r.launch(nothing) for _ in range(3)]
        assert sorted(op.lane.index for op in ops) == [1, 2, 3]
        for op in ops:
            await op


async def test_tiny_host_kernels_share_an_awake_lane() -> None:
    """Host kernels known to be tiny join a lane that is awake, up to 8 at a time; others spread."""
    async with rig("host", lanes=4) as r:
        placed: list[int] = []
        for _ in range(50):  # one that other threads interrupted looks long, until some more have run
            for _ in range(2000):
                await r.launch(nothing)
            ops = [r.launch(nothing) for _ in range(10)]
            placed = [op.lane.index for op in ops]
            for op in ops:
                await op
            if placed.count(placed[0]) == 8:
                break
        assert placed.count(placed[0]) == 8
        spread = [r.launch(add, r.word(), 1, lane=None) for _ in range(4)]
        assert len({op.lane.index for op in spread}) > 1
        for op in spread:
            await op


async def test_lane_of_another_offload_is_refused(device_label: str) -> None:
    """A lane of another Offload raises UsageError, for launches and copies."""
    async with rig(device_label) as r, rig(device_label) as other:
        word = r.word()
        for submit in (
            lambda: r.launch(nothing, lane=other.off.lanes[0]),
            lambda: r.off.fill(word, 1, lane=other.off.lanes[0]),
            lambda: r.off.get(word, lane=other.off.lanes[0]),
        ):
            with pytest.raises(ao.UsageError):
                submit()
        assert await r.read(word) == 0


async def test_something_else_as_lane_is_refused(device_label: str) -> None:
    """A lane that is none raises UsageError and leaves the Offload usable."""
    async with rig(device_label) as r:
        word = r.word()
        with pytest.raises(ao.UsageError):
            r.launch(add, word, 1, lane=1)  # type: ignore[arg-type]
        async with asyncio.timeout(3):
            assert await r.read(word) == 0


# Depth


@pytest.mark.parametrize("depth", [1, 7])
async def test_depth_is_never_exceeded(device_label: str, depth: int) -> None:
    """Thousands of launches behind a gate: a lane takes `lane_depth` of them, the rest run later, in order."""
    async with rig(device_label, lanes=2, lane_depth=depth) as r:
        word, expected = r.word(), 0
        await r.off.drain()
        gates = await r.hold_all()
        seen = 0
        for i in range(3000):
            r.launch(scale_add, word, 3, i, lane=r.off.lanes[i % 2 if i % 50 == 0 else 0])
            expected = (expected * 3 + i) % M64
            seen = max(seen, *(lane.in_flight for lane in r.off.lanes))
        assert seen == depth
        for gate in gates:
            gate.open()
        op = r.off.get(word)
        while not op.done():
            assert all(lane.in_flight <= depth for lane in r.off.lanes)
            await asyncio.sleep(0)
        assert int(op.result()[0]) == expected


async def test_queued_on_a_held_lane_keep_their_order(device_label: str) -> None:
    """Launches without buffers that wait on the host for one lane complete in the order of submission."""
    async with rig(device_label, lanes=1, lane_depth=2) as r:
        gate = await r.hold()
        order: list[int] = []
        ops = [r.launch(nothing) for _ in range(200)]
        for i, op in enumerate(ops):
            op.add_done_callback(lambda _, i=i: order.append(i))
        gate.open()
        await r.off.drain()
        await turns(3)
        assert order == list(range(200))


# max_pending, room, instant


async def test_max_pending(device_label: str) -> None:
    """Beyond `max_pending` a submission raises WouldBlock and submits nothing; room() waits for space."""
    async with rig(device_label, lanes=1, lane_depth=1, max_pending=3) as r:
        word = r.word()
        await r.off.drain()
        gate = await r.hold()
        for _ in range(3):
            r.launch(add, word, 1)
        for submit in (lambda: r.launch(add, word, 1), lambda: r.off.fill(word, 0), lambda: r.off.get(word)):
            with pytest.raises(ao.WouldBlock, match="room"):
                submit()
        waits = [asyncio.ensure_future(r.off.room()) for _ in range(3)]
        await turns()
        assert not any(wait.done() for wait in waits)
        gate.open()
        for wait in waits:
            await wait
        r.launch(add, word, 1)
        await r.off.drain()
        assert await r.read(word) == 4


async def test_room_when_what_waits_is_cancelled(device_label: str) -> None:
    """Cancelling what waits makes room at once, and cancelling a wait for room harms nobody."""
    async with rig(device_label, lanes=1, lane_depth=1, max_pending=1) as r:
        await r.hold()
        waiting = r.launch(nothing)
        given_up = asyncio.ensure_future(r.off.room())
        wait = asyncio.ensure_future(r.off.room())
        await turns(3)
        given_up.cancel()
        await turns(3)
        assert not wait.done()
        waiting.cancel()
        await wait
        op = r.launch(nothing)
        r.open_all()
        await op


async def test_room_wakes_as_many_as_there_is_room_for() -> None:
    """One that goes lets one in, the longest waiting; not all of a thousand, to find the place taken."""
    async with rig(lanes=1, lane_depth=1, max_pending=4) as r:
        await r.hold()
        waiting, entered = [r.launch(nothing) for _ in range(4)], []

        async def enter(number: int) -> None:
            await r.off.room()
            entered.append(number)
            waiting.append(r.launch(nothing))  # raises WouldBlock if it was woken for nothing

        tasks = [asyncio.ensure_future(enter(i)) for i in range(1000)]
        await turns()
        queued = list(r.off._open_engine().lanes._rooms)
        for count in (1, 3):
            for _ in range(count):
                waiting.pop(0).cancel()
            await turns()
        assert entered == [0, 1, 2, 3]
        assert list(r.off._open_engine().lanes._rooms) == queued[4:]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        r.open_all()


@pytest.mark.parametrize("how", ["leaves", "is cancelled"])
async def test_room_is_passed_on(how: str) -> None:
    """Who was let in and does not use the place leaves it to the next."""
    async with rig(lanes=1, lane_depth=1, max_pending=1) as r:
        await r.hold()
        waiting = r.launch(nothing)
        waits = [asyncio.ensure_future(r.off.room()) for _ in range(5)]
        await turns()
        waiting.cancel()
        if how == "is cancelled":
            waits[0].cancel()
        await asyncio.wait(waits, timeout=5)
        assert all(wait.done() for wait in waits)
        r.open_all()


async def test_room_at_once(device_label: str) -> None:
    """With nothing waiting, room() returns without yielding."""
    async with rig(device_label) as r:
        coroutine = r.off.room()
        with pytest.raises(StopIteration):
            coroutine.send(None)


async def test_instant_goes_where_there_is_room(device_label: str) -> None:
    """`instant` is an ordinary launch where nothing has to wait, behind work in flight too."""
    async with rig(device_label, lanes=2) as r:
        word, gate = r.word(), r.gate()
        await r.off.drain()
        r.launch(hold_write, gate.address, word, 1, lane=r.off.lanes[0], instant=True)
        op = r.launch(add, word, 1, lane=r.off.lanes[1], instant=True)
        gate.open()
        await op
        assert await r.read(word) == 2


@pytest.mark.parametrize("reason", ["lane", "lanes", "dependency", "awaitable", "kernel", "maintenance"])
async def test_instant_would_block(device_label: str, reason: str) -> None:
    """`instant` raises WouldBlock for every reason to wait on the host, and submits nothing."""
    async with rig(device_label, lanes=1 if reason == "lanes" else 2, lane_depth=1) as r:
        word, lanes = r.word(), r.off.lanes
        await r.off.drain()
        options: dict[str, Any] = {}
        fresh = ao.Kernel("nothing", cuda=nothing.cuda_source, host=nothing.host_function)
        loading: asyncio.Future[None] | None = None
        if reason != "kernel":
            await r.hold(lanes[0])
        if reason == "lane":
            options["lane"] = lanes[0]
        elif reason == "dependency":
            options["after"] = [r.launch(nothing, lane=lanes[0])]
        elif reason == "awaitable":
            options["after"] = [asyncio.get_running_loop().create_future()]
        elif reason == "maintenance":
            loading = asyncio.ensure_future(r.off.load(fresh))
            await until(lambda: r.off._engine.board.paused)  # type: ignore[union-attr]
        before = r.off.stats()
        kernel, args = (fresh, ()) if reason == "kernel" else (add, (word, 1))
        with pytest.raises(ao.WouldBlock):
            r.launch(kernel, *args, instant=True, **options)
        assert r.off.stats() == before
        r.open_all()
        if loading is not None:
            await loading
        async with asyncio.timeout(3):
            assert await r.read(word) == 0


async def test_instant_after_what_is_done(device_label: str) -> None:
    """A dependency that is done is no reason to refuse an `instant` launch."""
    async with rig(device_label) as r:
        first = r.launch(nothing)
        await first
        await r.launch(nothing, after=[first], instant=True)


# Stopping


@pytest.mark.all_loops
async def test_cancel_in_every_state(device_label: str) -> None:
    """cancel() ends what is held or queued with CancelledError, and leaves what is on the device alone."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        word = r.word(1)
        await r.off.drain()
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await r.hold()
        flying = r.holds[0]
        queued, held = r.launch(add, word, 1), r.launch(add, word, 1, after=[future])
        assert flying.cancel()
        assert queued.cancel()
        assert held.cancel()
        for op in (queued, held):
            assert op.done()
            assert op.cancelled()
            assert not op.cancel()
            with pytest.raises(asyncio.CancelledError):
                await op
        assert not flying.done()
        r.open_all()
        await flying
        assert not flying.cancelled()
        assert not flying.cancel()
        future.set_result(None)
        assert await r.read(word) == 1


async def test_lane_goes_on_after_all_that_waited_was_cancelled(device_label: str) -> None:
    """When everything that waited for a lane is cancelled, later submissions run as if it had never been."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        word = r.word(1)
        await r.off.drain()
        await r.hold()
        for _ in range(3):
            r.launch(nothing).cancel()
        r.open_all()
        await r.holds[0]
        async with asyncio.timeout(3):
            await r.launch(add, word, 1)
            assert await r.read(word) == 2
        assert not r.off.lanes[0].waiting


async def test_cancelling_thousands_is_quick(device_label: str) -> None:
    """Cancelling what waits frees it at once, and the count of what waits is right."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.hold()
        ops = [r.launch(nothing) for _ in range(10_000)]
        for op in ops[::2]:
            op.cancel()
        assert r.off.stats()["pending"] == 5000
        r.open_all()
        await r.off.drain()
        assert [op.cancelled() for op in ops[:4]] == [True, False, True, False]
        assert r.off.stats()["pending"] == 0


async def test_timeout_of_what_waits(device_label: str) -> None:
    """`timeout_s` ends what still waits on the host with OffloadTimeout, a TimeoutError."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        word = r.word(1)
        await r.off.drain()
        await r.hold()
        op = r.launch(add, word, 1, timeout_s=0.01)
        with pytest.raises(TimeoutError) as caught:
            await op
        assert isinstance(caught.value, ao.OffloadTimeout)
        r.open_all()
        assert await r.read(word) == 1


async def test_timeout_that_is_not_reached(device_label: str) -> None:
    """A launch that is done in time completes, and its timer is gone."""
    async with rig(device_label) as r:
        await r.launch(nothing, timeout_s=60.0)
        await r.launch(nothing, timeout_s=0)


async def test_negative_timeout_changes_nothing(device_label: str) -> None:
    """A negative `timeout_s` raises UsageError and leaves its buffers usable."""
    async with rig(device_label) as r:
        word = r.word(1)
        with pytest.raises(ao.UsageError, match="timeout_s"):
            r.launch(add, word, 1, timeout_s=-1)
        async with asyncio.timeout(3):
            assert await r.read(word) == 1


async def test_host_kernel_that_raises_is_its_own_failure() -> None:
    """LaunchError with the exception as cause; the lane and all others go on."""
    async with rig(lanes=2) as r:
        word = r.word(1)
        ops = [r.launch(fail, lane=lane) for lane in r.off.lanes]
        r.launch(add, word, 1)
        assert await r.read(word) == 2
        for op in ops:
            with pytest.raises(ao.LaunchError) as caught:
                await op
            assert isinstance(caught.value.__cause__, Boom)


async def test_refused_by_the_driver() -> None:
    """A launch that the driver refuses fails alone, and gives its buffers free."""
    device = SpyDevice()
    async with rig(device, lanes=2) as r:
        word = r.word(1)
        await r.off.drain()
        device.failures["enqueue_kernel"] = ao.LaunchError("too many registers")
        ops = [r.launch(nothing), r.launch(add, word, 1), r.launch(nothing, lane=r.off.lanes[0])]
        device.failures.clear()
        for op in ops:
            with pytest.raises(ao.LaunchError, match="registers"):
                await op
        r.launch(add, word, 1)
        assert await r.read(word) == 2


async def test_finished_operations_are_let_go(device_label: str) -> None:
    """An operation keeps none of those before it, however long the chain on a buffer."""
    async with rig(device_label) as r:
        big = r.off.empty(300_000, np.uint8)
        source = np.zeros(300_000, np.uint8)
        word = r.word()
        first = [weakref.ref(r.off.copy(big, source)), weakref.ref(r.launch(add, word, 1))]
        for _ in range(3):
            await r.off.copy(big, source)
            await r.launch(add, word, 1)
        gc.collect()
        assert [ref() for ref in first] == [None, None]


# Priorities, leases, floods


async def test_lanes_of_several_priorities(device_label: str) -> None:
    """An operation goes to a lane of its priority; the first lanes are those of priority 0."""
    async with rig(device_label, lanes={-1: 1, 0: 2, 1: 1}) as r:
        assert sorted(lane.priority for lane in r.off.lanes) == [-1, 0, 0, 1]
        assert [lane.index for lane in r.off.lanes if lane.priority == 0] == [0, 1]
        ops = [r.launch(nothing, priority=priority) for priority in (-1, 0, 1, -1)]
        assert [op.lane.priority for op in ops] == [-1, 0, 1, -1]
        urgent = next(lane for lane in r.off.lanes if lane.priority == -1)
        assert r.launch(nothing, lane=urgent).lane is urgent
        await r.off.drain()


async def test_urgent_work_passes_a_flood(device_label: str) -> None:
    """What has a priority of its own does not wait behind thousands of others."""
    async with rig(device_label, lanes={0: 1, -1: 1}, lane_depth=4) as r:
        await r.hold(r.off.lanes[0])
        flood = [r.launch(nothing) for _ in range(2000)]
        await r.launch(nothing, priority=-1)
        assert not any(op.finished for op in flood)


async def test_dependency_across_priorities(device_label: str) -> None:
    """An urgent operation keeps its lane, also behind one of another priority, and comes after it."""
    async with rig(device_label, lanes={0: 1, -1: 1}) as r:
        word, gate = r.word(), r.gate()
        r.launch(hold_write, gate.address, word, 5)
        op = r.launch(add, word, 1, priority=-1)
        assert op.lane.priority == -1
        await turns()
        assert not op.done()
        gate.open()
        await op
        assert await r.read(word) == 6


@pytest.mark.parametrize("priority", [1, -7, 10**12, 0.5, True])
async def test_priority_without_lanes(priority: Any) -> None:
    """A priority that no lane has raises UsageError that names those there are; nothing is submitted."""
    async with rig(lanes={0: 1, -1: 1}) as r:
        with pytest.raises(ao.UsageError, match="priority"):
            r.launch(nothing, priority=priority)
        assert r.off.stats()["pending"] == 0


@pytest.mark.parametrize("lanes", [{}, {-1: 2}, {0: 0}, {0: 1, -1: 0}, {0: 200, 1: 57}, {0: "1"}, {0.5: 1, 0: 1}])
def test_lanes_that_make_no_sense(lanes: Any) -> None:
    """There are 1 to 256 lanes, some of them of priority 0."""
    with pytest.raises(ao.UsageError, match="lanes"):
        ao.Offload("host", lanes=lanes)


async def test_leased_lane_is_left_alone(device_label: str) -> None:
    """While a lane is leased only what names it goes there; afterwards it is one among others."""
    async with rig(device_label, lanes=2) as r:
        async with r.off.lease() as lane:
            gate, word = r.gate(), r.word()
            mine = r.launch(hold_write, gate.address, word, 1, lane=lane)
            others = [r.launch(nothing) for _ in range(8)]
            behind = r.launch(add, word, 1)  # its only dependency sits on the leased lane
            assert mine.lane is lane
            assert all(op.lane is not lane for op in [*others, behind])
            gate.open()
            await behind
        assert {r.launch(nothing).lane for _ in range(4)} == set(r.off.lanes)
        await r.off.drain()


async def test_lease_waits_for_another(device_label: str) -> None:
    """One lane stays with all others; a second lease waits until the first has ended, cancelled or not."""
    async with rig(device_label, lanes=2) as r:
        got: list[ao.Lane] = []

        async def lessee() -> None:
            async with r.off.lease() as lane:
                got.append(lane)

        async with r.off.lease() as first:
            tasks = [asyncio.create_task(lessee()) for _ in range(3)]
            await turns()
            tasks[0].cancel()
            await turns()
            assert got == []
        await asyncio.gather(*tasks[1:])
        assert len(got) == 2
        assert first in r.off.lanes


async def test_lease_of_the_last_lane() -> None:
    """Where there is one lane of a priority, or none, a lease is refused."""
    async with rig(lanes={0: 2, -1: 1}) as r:
        for priority in (-1, 3):
            with pytest.raises(ao.UsageError, match="two lanes"):
                async with r.off.lease(priority=priority):
                    pass


@pytest.mark.parametrize("end", ["aclose", "terminate"])
async def test_lease_that_waits_when_the_offload_ends(end: str) -> None:
    """Who waits for a lease gets ClosedError, and is not left behind."""
    async with rig(lanes=2, bury=end == "terminate") as r, r.off.lease():

        async def lessee() -> None:
            async with r.off.lease():
                pass

        task = asyncio.create_task(lessee())
        await turns()
        if end == "aclose":
            await r.off.aclose()
        else:
            r.off.terminate()
        with pytest.raises(ao.ClosedError):
            await task


async def test_flood_leaves_others_their_lanes(device_label: str) -> None:
    """Where ``max_pending`` operations wait, what can start at once is taken, and what cannot is refused."""
    async with rig(device_label, lanes=2, lane_depth=2, max_pending=10) as r:
        await r.hold(r.off.lanes[0])
        for _ in range(11):
            r.launch(nothing, lane=r.off.lanes[0])
        with pytest.raises(ao.WouldBlock, match="max_pending"):
            r.launch(nothing, lane=r.off.lanes[0])
        await r.launch(nothing, lane=r.off.lanes[1])
        await r.launch(nothing)
        with pytest.raises(ao.WouldBlock, match="max_pending"):
            r.launch(nothing, after=[asyncio.get_running_loop().create_future()])


# Coarse operations

COARSE = [
    pytest.param("host", id="host"),
    pytest.param("fallback", id="host without memory operations"),
    pytest.param("cuda:0", id="cuda:0", marks=pytest.mark.gpu),
]


def coarse_device(kind: str) -> Any:
    return HostDevice(memory_operations=False) if kind == "fallback" else kind


@pytest.mark.parametrize("kind", COARSE)
@pytest.mark.parametrize("wait", ["await", "callback", "done", "drain", "dependent", "close", "load", "timeout"])
async def test_coarse_operation_completes_when_somebody_waits(kind: str, wait: str) -> None:
    """However it is waited for, the missing mark comes."""
    async with rig(coarse_device(kind), lanes=2) as r:
        word = r.word(1)
        op = r.launch(add, word, 1, lane=r.off.lanes[0], coarse=True, timeout_s=60 if wait == "timeout" else None)
        called = asyncio.Event()
        if wait in ("await", "timeout"):
            await op
        elif wait == "callback":
            op.add_done_callback(lambda _: called.set())
            await called.wait()
        elif wait == "done":
            while not op.done():
                pass
        elif wait == "drain":
            await r.off.drain()
        elif wait == "dependent":
            await r.launch(nothing, after=[op], lane=r.off.lanes[1])
            await op
        elif wait == "close":
            await r.off.aclose()
        else:
            await r.off.load(ao.Kernel("nothing", cuda=nothing.cuda_source, host=nothing.host_function))
        assert op.finished


@pytest.mark.parametrize("kind", COARSE)
@pytest.mark.parametrize("wake", ["hybrid", "interrupt", "poll"])
async def test_coarse_operation_that_nobody_waits_for(kind: str, wake: Any) -> None:
    """Before the loop sleeps, or after a while of polling, it gets its mark: nothing stays in flight for ever."""
    async with rig(coarse_device(kind), lanes=2, wake=wake) as r:
        ops = [r.launch(nothing, coarse=True) for _ in range(5)]
        await until(lambda: all(op.finished for op in ops))


async def test_coarse_operations_have_one_mark() -> None:
    """Of a row of coarse operations on a lane the next mark tells; they complete together with it."""
    device = SpyDevice()
    async with rig(device, lanes=1) as r:
        gate, word = r.gate(), r.word()
        await r.off.drain()
        device.calls.clear()
        ops = [r.launch(hold_write, gate.address, word, 5, coarse=True)]
        ops += [r.launch(add, word, 1, coarse=True) for _ in range(20)]
        assert r.off.lanes[0].queue.unmarked
        last = r.launch(add, word, 1)
        assert not r.off.lanes[0].queue.unmarked
        assert device.calls.count("enqueue_kernel") == 22
        assert device.calls.count("enqueue_mark") == 0
        gate.open()
        await last
        assert all(op.finished for op in ops)
        assert await r.read(word) == 26


async def test_more_coarse_operations_than_a_lane_takes(device_label: str) -> None:
    """A lane that is full of them gets a mark, so that the rest goes on."""
    async with rig(device_label, lanes=1, lane_depth=3) as r:
        word = r.word()
        ops = [r.launch(add, word, 1, coarse=True) for _ in range(50)]
        await ops[-1]
        assert all(op.finished for op in ops)
        assert await r.read(word) == 50


async def test_coarse_operation_that_fails() -> None:
    """A host kernel that raises fails its operation and no other."""
    async with rig(lanes=1) as r:
        await r.off.load(fail)
        first, second = r.launch(fail, coarse=True), r.launch(nothing, coarse=True)
        await second
        with pytest.raises(ao.LaunchError):
            await first


async def test_coarse_operation_held_on_the_host(device_label: str) -> None:
    """One that waits on the host when somebody awaits it has a mark of its own once it starts."""
    async with rig(device_label, lanes=1) as r:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        op = r.launch(nothing, coarse=True, after=[future])
        task = asyncio.create_task(op.wait())
        await turns()
        future.set_result(None)
        async with asyncio.timeout(3):
            await task


# What is waited for


@pytest.mark.parametrize("ordering", ["explicit", "program"])
async def test_others_on_the_lane_are_not_waited_for(device_label: str, ordering: str) -> None:
    """What comes after an operation waits for that one, not for what was enqueued behind it.

    Where the order is the program's, a lane learns that from the first that waits.
    """
    async with rig(device_label, lanes=3, ordering=ordering) as r:
        lane, other, third = r.off.lanes
        if ordering == "program":
            gates = [r.gate(), r.gate()]
            first = r.launch(hold, gates[0].address, lane=lane)
            r.launch(hold, gates[1].address, lane=lane)
            learned = r.launch(nothing, after=[first], lane=other)
            for gate in gates:
                gate.open()
            await learned
        a, b = r.gate(), r.gate()
        first, second = r.launch(hold, a.address, lane=lane), r.launch(hold, b.address, lane=lane)
        behind = [r.launch(nothing, after=[first], lane=other), r.launch(nothing, after=[first], lane=third)]
        last = r.launch(nothing, after=[second], lane=other)
        await until(lambda: a.started)
        await turns()
        assert not any(op.done() for op in behind)
        a.open()
        for op in behind:
            await op
        await until(lambda: b.started)
        await turns()
        assert not last.done()
        b.open()
        await last


async def test_random_graph_waits_for_the_right_ones(device_label: str) -> None:
    """In a graph of hundreds of kernels over all lanes each sees what those it comes after have left."""
    async with rig(device_label, lanes=4, lane_depth=16, ordering="explicit") as r:
        choice = random.Random(7)
        words = [r.word() for _ in range(300)]
        await r.off.drain()
        made: list[ao.Operation[None]] = []
        expected: list[int] = []
        for node, word in enumerate(words):
            before = choice.sample(range(node), min(node, choice.randint(0, 2)))
            after = [made[one] for one in before]
            last, value = r.launch(add, word, 1, after=after), 1
            for one in before:
                last = r.launch(combine, word, words[one], after=[last, *after])
                value = (value * 3 + expected[one]) % M64
            made.append(last)
            expected.append(value)
        await r.off.drain()
        found = [await r.read(word) for word in words]
        assert found == expected


async def test_event_that_the_driver_refuses() -> None:
    """An event that cannot be recorded behind an operation ends the device: later ones would not wait for it."""
    device = SpyDevice()
    async with rig(device, lanes=2, ordering="explicit", bury=True) as r:
        await r.off.drain()
        device.failures["enqueue_record"] = ao.DriverError("no more events")
        op = r.launch(nothing)
        device.failures.clear()
        with pytest.raises(ao.DeviceLostError):
            await op
