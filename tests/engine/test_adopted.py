"""Streams of somebody else: adopting, ordering against them, and waiting for what is on them."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from aiooffload.drivers.host.adopted import AdoptedStream
from aiooffload.engine.adopted import handle_of
from tests.kernels import Rig, Spy, SpyDevice, add, hold_write, nothing, rig, turns, until


@asynccontextmanager
async def two_rigs(device_label: str) -> AsyncIterator[tuple[Rig, Rig]]:
    """An Offload that adopts, and one whose lanes are somebody else's streams to it."""
    async with rig(device_label, lanes=2) as r, rig(device_label, lanes=2) as other:
        yield r, other


class Foreign:
    """A stream of some library."""

    def __init__(self, **names: Any) -> None:
        self.__dict__.update(names)

    def __repr__(self) -> str:
        return f"Foreign({', '.join(self.__dict__)})"


def test_handles_of_streams() -> None:
    """A stream is what says so by the protocol, in its old form too, torch's and CuPy's, and an integer."""
    assert handle_of(Foreign(__cuda_stream__=lambda: (0, 17))) == 17
    assert handle_of(Foreign(__cuda_stream__=(0, 18))) == 18
    assert handle_of(Foreign(cuda_stream=19)) == 19
    assert handle_of(Foreign(ptr=20)) == 20
    assert handle_of(21) == 21


@pytest.mark.parametrize(
    "wrong", [None, "stream", 1.5, True, -1, Foreign(), Foreign(ptr="x"), Foreign(__cuda_stream__=(1, 17))], ids=repr
)
def test_what_is_no_stream(wrong: object) -> None:
    """Anything else raises UsageError."""
    with pytest.raises(ao.UsageError, match=r"expected a stream|version"):
        handle_of(wrong)


async def test_work_runs_among_its_owners(device_label: str) -> None:
    """What is launched on an adopted stream comes after what its owner has enqueued, and before what comes next."""
    async with two_rigs(device_label) as (r, other):
        theirs, ours = other.off.lanes[0], other.word(3)
        gate = await other.hold(theirs)
        other.launch(add, ours, 4, lane=theirs)
        lane = r.off.adopt(theirs)
        assert lane.handle == theirs.handle
        op = r.launch(nothing, lane=lane)
        later = other.launch(nothing, lane=theirs)
        assert op.instant
        await turns()
        assert not op.done()
        gate.open()
        await op
        assert await other.read(ours) == 7
        await later
        lane.release()


async def test_adopting_twice_is_one_lane(device_label: str) -> None:
    """The same stream is the same lane until it was released as often as it was adopted."""
    async with two_rigs(device_label) as (r, other):
        lane = r.off.adopt(other.off.lanes[0])
        assert r.off.adopt(other.off.lanes[0].handle) is lane
        lane.release()
        await r.launch(nothing, lane=lane)
        lane.release()
        with pytest.raises(ao.UsageError, match="not a lane of this Offload"):
            r.launch(nothing, lane=lane)
        with pytest.raises(ao.UsageError, match="released already"):
            lane.release()


class Aliased(HostDevice):
    """A device whose first stream has the handle 0 as well, as a GPU's default stream has."""

    first = 0

    def adopt_stream(self, handle: int) -> Any:
        return super().adopt_stream(handle or self.first)


async def test_stream_of_two_handles_is_one_lane() -> None:
    """Whichever of its handles comes first, the other one finds the same lane, until both uses are over."""
    async with rig("host", lanes=1) as other:
        device = Aliased()
        device.first = other.off.lanes[0].handle
        async with rig(device, lanes=1) as r:
            for handles in ((0, device.first), (device.first, 0)):
                lanes = [r.off.adopt(handle) for handle in handles]
                assert lanes[0] is lanes[1]
                lanes[0].release()
                await r.launch(nothing, lane=lanes[0])
                lanes[0].release()
                with pytest.raises(ao.UsageError):
                    r.launch(nothing, lane=lanes[0])


async def test_own_lane_stays_what_it_is(device_label: str) -> None:
    """Adopting a lane of the same Offload returns it, and it cannot be released."""
    async with rig(device_label, lanes=2) as r:
        assert r.off.adopt(r.off.lanes[1]) is r.off.lanes[1]
        with pytest.raises(ao.UsageError, match="only adopted ones"):
            r.off.lanes[1].release()


async def test_nothing_is_picked_for_it(device_label: str) -> None:
    """No launch goes to an adopted stream by itself, also if what it comes after sits there."""
    async with two_rigs(device_label) as (r, other):
        lane = r.off.adopt(other.off.lanes[0])
        gate, word = r.gate(), r.word()
        first = r.launch(hold_write, gate.address, word, 5, lane=lane)
        second = r.launch(add, word, 1)
        assert second.lane in r.off.lanes
        assert lane not in r.off.lanes
        gate.open()
        await first
        assert await r.read(word) == 6


async def test_nothing_is_kept_on_the_host(device_label: str) -> None:
    """What could not be enqueued now is refused with the reason; nothing was submitted."""
    async with rig(device_label, lanes=2, lane_depth=2) as r, rig(device_label, lanes=1) as other:
        lane = r.off.adopt(other.off.lanes[0])
        gate = await other.hold(other.off.lanes[0])
        ops = [r.launch(nothing, lane=lane) for _ in range(2)]
        with pytest.raises(ao.WouldBlock, match=r"is full.*not ours"):
            r.launch(nothing, lane=lane)
        with pytest.raises(ao.WouldBlock, match=r"only the host can wait for.*not ours"):
            r.launch(nothing, lane=lane, after=[asyncio.get_running_loop().create_future()])
        with pytest.raises(ao.UsageError, match="keeps work on the host"):
            r.off.gate(asyncio.get_running_loop().create_future(), lane=lane)
        gate.open()
        await asyncio.gather(*(op.wait() for op in ops))


async def test_released_with_work_pending(device_label: str) -> None:
    """A lane that is released completes what is on it; its slot is used again, but not before."""
    async with two_rigs(device_label) as (r, other):
        gate = await other.hold(other.off.lanes[0])
        lane = r.off.adopt(other.off.lanes[0])
        op, word = r.launch(nothing, lane=lane, coarse=True), r.word(1)
        lane.release()
        second = r.off.adopt(other.off.lanes[1])
        assert second.index != lane.index
        second.release()
        gate.open()
        await op
        r.launch(add, word, 1)
        third = r.off.adopt(other.off.lanes[0])
        assert third.index in (lane.index, second.index)
        await r.launch(nothing, lane=third)
        assert await r.read(word) == 2


async def test_thousand_adoptions_take_one_slot(device_label: str) -> None:
    """Adopting, using and releasing again and again leaves nothing behind."""
    async with two_rigs(device_label) as (r, other):
        for _ in range(1000):
            lane = r.off.adopt(other.off.lanes[0])
            await r.launch(nothing, lane=lane)
            lane.release()
        engine = r.off._engine
        assert engine is not None
        assert len(engine.lanes.lanes) == 3


async def test_owner_lives_as_long_as_the_lane(device_label: str) -> None:
    """The stream object and its owner are held until the lane is released."""
    async with two_rigs(device_label) as (r, other):
        stream, owner = Foreign(ptr=other.off.lanes[0].handle), Foreign()
        held = [weakref.ref(stream), weakref.ref(owner)]
        lane = r.off.adopt(stream, owner=owner)
        del stream, owner
        gc.collect()
        assert all(ref() is not None for ref in held)
        lane.release()
        again = r.off.adopt(other.off.lanes[0])
        del lane
        gc.collect()
        assert [ref() for ref in held] == [None, None]
        again.release()


async def test_owner_goes_with_what_is_on_the_stream(no_collector: None) -> None:
    """A released stream is held until what is on it is done, and no longer, although the lane's slot is kept."""
    async with two_rigs("host") as (r, other):
        gate, owner = await other.hold(other.off.lanes[0]), Foreign()
        held = weakref.ref(owner)
        lane = r.off.adopt(other.off.lanes[0], owner=owner)
        op = r.launch(nothing, lane=lane)
        del owner
        lane.release()
        assert held() is not None
        gate.open()
        await op
        assert held() is None


async def test_completion_of_a_stream(device_label: str) -> None:
    """``completion`` is done when what was on the stream is, not what came later."""
    async with two_rigs(device_label) as (r, other):
        theirs = other.off.lanes[0]
        await r.off.completion(theirs)
        first = await other.hold(theirs)
        completion = r.off.completion(theirs)
        second = other.gate()
        later = other.launch(hold_write, second.address, other.word(), 1, lane=theirs)
        await turns()
        assert not completion.done()
        first.open()
        await completion
        assert not later.done()
        second.open()


async def test_completion_of_an_own_lane(device_label: str) -> None:
    """A lane of the Offload is a stream like any other."""
    async with rig(device_label, lanes=2) as r:
        gate = await r.hold(r.off.lanes[1])
        completion = r.off.completion(r.off.lanes[1])
        await turns()
        assert not completion.done()
        gate.open()
        await completion


async def test_order_of_a_stream_after_ours(device_label: str) -> None:
    """A stream's later work waits, on the device, for operations of ours; its earlier work does not."""
    async with two_rigs(device_label) as (r, other):
        theirs = other.off.lanes[0]
        gate = await r.hold(r.off.lanes[0])
        op = r.launch(nothing, lane=r.off.lanes[0])
        before = other.launch(nothing, lane=theirs)
        r.off.order(theirs, after=[op])
        behind = other.launch(nothing, lane=theirs)
        await before
        await turns()
        assert not behind.done()
        gate.open()
        await behind
        assert op.done()
        r.off.order(theirs, after=op)
        await other.launch(nothing, lane=theirs)


async def test_order_after_what_is_on_the_host(device_label: str) -> None:
    """A stream cannot wait for what the host holds, nor for awaitables."""
    async with two_rigs(device_label) as (r, other):
        future = asyncio.get_running_loop().create_future()
        held = r.launch(nothing, after=[future])
        with pytest.raises(ao.WouldBlock, match="only the host can wait for"):
            r.off.order(other.off.lanes[0], after=[held])
        with pytest.raises(ao.UsageError, match="not for"):
            r.off.order(other.off.lanes[0], after=[future])
        with pytest.raises(ao.UsageError, match="another Offload"):
            r.off.order(other.off.lanes[0], after=[other.launch(nothing)])
        future.set_result(None)
        await held


async def test_copies_on_an_adopted_stream(device_label: str) -> None:
    """Small copies and fills go to it like launches; large ones, which go piece by piece, do not."""
    async with two_rigs(device_label) as (r, other):
        lane = r.off.adopt(other.off.lanes[0])
        x = await r.off.put(np.arange(10), lane=lane)
        assert (await r.off.get(x, lane=lane) == np.arange(10)).all()
        with pytest.raises(ao.WouldBlock, match="piece by piece"):
            r.off.put(np.zeros(1 << 20), lane=lane)


async def test_terminated_with_an_adopted_stream(device_label: str) -> None:
    """Ending the Offload leaves the stream to its owner."""
    async with rig(device_label, lanes=1) as other:
        async with rig(device_label, lanes=1) as r:
            await r.launch(nothing, lane=r.off.adopt(other.off.lanes[0]))
        word = other.word(1)
        other.launch(add, word, 1)
        assert await other.read(word) == 2


async def test_unknown_host_stream() -> None:
    """On the host device a handle is that of a lane of an open Offload."""
    async with rig("host", lanes=1) as r:
        async with rig("host", lanes=1) as other:
            handle = other.off.lanes[0].handle
        await until(lambda: True)
        with pytest.raises(ao.UsageError, match="no host stream"):
            r.off.adopt(handle)


class Capture:
    """Lets adopted host streams say that they capture a graph, and notes the marks enqueued meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.going_on = False
        self.marks = 0
        enqueue_mark = AdoptedStream.enqueue_mark

        def mark(stream: AdoptedStream, sequence: int) -> None:
            self.marks += self.going_on
            enqueue_mark(stream, sequence)

        monkeypatch.setattr(AdoptedStream, "capturing", lambda stream: self.going_on)
        monkeypatch.setattr(AdoptedStream, "enqueue_mark", mark)


async def test_nothing_of_ours_gets_into_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on a stream when its owner begins to capture has its mark already, coarse or not."""
    capture = Capture(monkeypatch)
    async with two_rigs("host") as (r, other):
        gate = await other.hold(other.off.lanes[0])
        lane = r.off.adopt(other.off.lanes[0])
        op = r.launch(nothing, lane=lane, coarse=True)
        capture.going_on = True
        waiting = asyncio.ensure_future(op.wait())
        await turns()
        gate.open()
        await waiting
        lane.release()
        assert capture.marks == 0


async def test_nothing_is_ordered_after_a_capturing_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event recorded there would draw our lane into the graph: what comes after work of ours there is refused."""
    capture = Capture(monkeypatch)
    async with two_rigs("host") as (r, other):
        gate = await other.hold(other.off.lanes[0])
        lane, word = r.off.adopt(other.off.lanes[0]), r.word()
        first = r.launch(add, word, 1, lane=lane)
        capture.going_on = True
        second = r.launch(add, word, 2)
        with pytest.raises(ao.UsageError, match="capturing"):
            r.off.order(r.off.lanes[0], after=[first])
        gate.open()
        await first
        with pytest.raises(ao.UsageError, match="capturing"):
            await second
        capture.going_on = False
        await r.launch(add, word, 4, lane=lane)
        assert await r.read(word) == 5


@pytest.mark.parametrize("call", ["adopt_stream", "capturing"])
async def test_loss_that_shows_on_a_stream_of_others(call: str) -> None:
    """A device that is found lost there is lost for everything else: the driver is not called again."""
    device = SpyDevice()
    async with rig("host", lanes=1) as other, rig(device, lanes=1, bury=True) as r:
        lane = Spied(device).adopt(r, other.off.lanes[0])
        gate = await r.hold()
        device.failures[call] = ao.DeviceLostError("the device fell off")
        calls = {
            "capturing": lambda: r.launch(nothing, lane=lane),
            "adopt_stream": lambda: r.off.completion(other.off.lanes[0].handle + 1),
        }
        with pytest.raises(ao.DeviceLostError):
            calls[call]()
        assert r.holds[0].finished
        gate.open()


class Spied:
    """Adopts so that the calls of the adopted stream are the device's."""

    def __init__(self, device: SpyDevice) -> None:
        self._device = device

    def adopt(self, r: Rig, stream: Any) -> ao.Lane:
        lane = r.off.adopt(stream)
        spy = Spy(lane.stream, self._device._call)
        lane.queue.attach(spy, lane)
        lane.stream = spy  # type: ignore[misc,assignment]
        return lane


async def test_adopting_that_fails_half_way() -> None:
    """What fails has changed nothing: lanes and their queues still have the same numbers."""
    device = SpyDevice()
    async with rig("host", lanes=1) as other, rig(device, lanes=1) as r:
        device.failures["register"] = ao.OutOfMemoryError("no slot")
        with pytest.raises(ao.OutOfMemoryError):
            r.off.adopt(other.off.lanes[0])
        device.failures.clear()
        lane = r.off.adopt(other.off.lanes[0])
        assert r.off._engine is not None
        with pytest.raises(ValueError, match="range of lanes"):
            r.off._engine.board.pick(0, lane.index + 2)
