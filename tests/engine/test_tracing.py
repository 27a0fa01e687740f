"""Recording on the device: timed events around operations, how they come back, and what a driver may refuse."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload._native import now_ns
from aiooffload.engine import tracing
from aiooffload.engine.tracing import Tracer
from aiooffload.errors import DriverError
from aiooffload.rules.timeline import Recorded
from aiooffload.testing import FaultyDevice, open_offload
from tests.kernels import Rig, SpyDevice, add, nothing, rig, until
from tests.reverse_kernels import calling_rig, post_many


class EventsDevice(SpyDevice):
    """Keeps the timed events that it has made, and counts those that were closed."""

    def __init__(self) -> None:
        super().__init__()
        self.timed: list[Any] = []

    def _call(self, owner: Any, name: str, call: Any, args: tuple[Any, ...]) -> Any:
        result = super()._call(owner, name, call, args)
        if name == "create_timed_event":
            self.timed.append(result)
        return result

    @property
    def closed(self) -> int:
        """How many a stream refuses: they were closed."""
        stream, count = self.inner.create_stream(), 0
        for event in self.timed:
            try:
                stream.enqueue_record(event)
            except RuntimeError:
                count += 1
        stream.close()
        return count


async def begun(r: Rig) -> Tracer:
    """Start a tracer on a rig's engine, without a file."""
    engine = r.off._engine
    assert engine is not None
    tracer = Tracer(engine.loop, engine.device, engine.idle_stream, engine.lanes, engine.lose)
    await tracer.begin()
    engine.record(tracer)
    return tracer


async def ended(r: Rig, tracer: Tracer, timeout_s: float = 5) -> list[Recorded]:
    assert r.off._engine is not None
    await tracer.settle(timeout_s)
    r.off._engine.record(None)
    tracer.end()
    return tracer.operations


async def test_device_times_lie_within_the_hosts(device_label: str) -> None:
    """An operation begins after it was enqueued and ends before it was seen, as far as the clocks are known."""
    async with rig(device_label, lanes=2) as r:
        tracer = await begun(r)
        before_ns = now_ns()
        for _ in range(50):
            await r.launch(nothing)
        records, after_ns = await ended(r, tracer), now_ns()
        assert len(records) == 50
        slack = tracer.uncertainty_ns + 2000
        for record in records:
            assert record.tie is not None
            assert record.ended_ns is not None
            assert record.enqueued_ns is not None
            began, end = record.tie.host_ns(record.began_ns), record.tie.host_ns(record.ended_ns)
            assert before_ns <= record.submitted_ns <= record.enqueued_ns <= began + slack
            assert began <= end <= after_ns + slack


async def test_device_says_how_long_a_kernel_was_held(device_label: str) -> None:
    """The time on the device is that between the gate's words, not that until the host looked."""
    async with rig(device_label, lanes=1) as r:
        tracer = await begun(r)
        gate = await r.hold()
        held_ns = now_ns()
        await until(lambda: now_ns() - held_ns > 5_000_000)
        gate.open()
        (record,) = await ended(r, tracer)
        assert record.ended_ns is not None
        assert record.ended_ns - record.began_ns > 4_900_000


async def test_events_are_reused_and_closed() -> None:
    """One launch after the other takes no more than a handful of events, and none is left open."""
    device = EventsDevice()
    async with rig(device, lanes=2) as r:
        await r.off.drain()
        tracer = await begun(r)
        for _ in range(200):
            await r.launch(nothing)
        await ended(r, tracer)
        assert 3 <= len(device.timed) <= 8
        assert device.closed == len(device.timed)


async def test_no_event_without_a_trace() -> None:
    """Outside of a trace nothing is recorded on any lane."""
    device = EventsDevice()
    async with rig(device, lanes=2) as r:
        await ended(r, await begun(r))
        count = len(device.timed)
        device.calls.clear()
        for _ in range(10):
            await r.launch(nothing)
        assert "enqueue_record" not in device.calls
        assert len(device.timed) == count


async def test_zero_of_the_clock_moves_on(device_label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the device's clock gets a new zero, times stay in order and within the host's."""
    monkeypatch.setattr(tracing, "MOVE_NS", 1)
    device: Any = EventsDevice() if device_label == "host" else device_label
    async with rig(device, lanes=1) as r:
        tracer = await begun(r)
        for _ in range(100):
            await r.launch(nothing)
        records = await ended(r, tracer)
        assert len({id(record.tie) for record in records}) == 100
        slack, last = 100_000, 0
        for record in records:
            assert record.tie is not None
            assert record.enqueued_ns is not None
            began = record.tie.host_ns(record.began_ns)
            assert record.enqueued_ns <= began + slack
            assert last <= began + slack
            last = began
        if device_label == "host":
            assert device.closed == len(device.timed) <= 8


@pytest.mark.parametrize("call", ["create_timed_event", "enqueue_record"])
async def test_driver_without_events_left(call: str) -> None:
    """A driver that has no event to give costs times, not operations."""
    device = EventsDevice()
    async with rig(device, lanes=2) as r:
        word = r.word()
        await r.off.drain()
        tracer = await begun(r)
        tracer._free.clear()
        device.failures[call] = DriverError("no more of those", operation=call)
        await r.launch(add, word, 1, lane=r.off.lanes[0])
        del device.failures[call]
        await r.launch(add, word, 1, lane=r.off.lanes[0])
        first, second = await ended(r, tracer)
        assert (first.tie, first.failure, second.tie is None) == (None, "", False)
        assert await r.read(word) == 2


async def test_loss_at_an_event() -> None:
    """A device that is lost where an event is recorded or read fails what is in flight, as anywhere else."""
    device = EventsDevice()
    async with rig(device, lanes=1, bury=True) as r:
        await begun(r)
        device.failures["enqueue_record"] = ao.DeviceLostError("gone", operation="cuEventRecord")
        with pytest.raises(ao.DeviceLostError):
            await r.launch(nothing)
        assert r.off._engine is not None
        assert r.off._engine.lost is not None


async def test_loss_at_the_beginning() -> None:
    """A device that is lost where the clocks are compared is lost for the whole Offload."""
    device = SpyDevice()
    async with rig(device, lanes=1, bury=True) as r:
        await r.off.drain()
        device.failures["enqueue_record"] = ao.DeviceLostError("gone", operation="cuEventRecord")
        with pytest.raises(ao.DeviceLostError):
            await begun(r)
        with pytest.raises(ao.DeviceLostError):
            r.launch(nothing)


async def test_terminated_at_the_beginning() -> None:
    """Terminating while the clocks are compared ends that, with no driver call afterwards."""

    class Never:
        """An event that is never reached."""

        queries = 0

        def query(self) -> bool:
            self.queries += 1
            return False

        def close(self) -> None:
            raise AssertionError("a driver call")

    class NeverDevice(SpyDevice):
        event = Never()

        def create_timed_event(self) -> Never:
            return self.event

    device = NeverDevice()
    device.swallowed.add("enqueue_record")
    async with rig(device, lanes=1, bury=True) as r:
        task = asyncio.create_task(begun(r))
        await until(lambda: device.event.queries > 2)
        r.off.terminate()
        count = device.event.queries
        with pytest.raises(ao.ClosedError):
            await task
        assert device.event.queries == count


async def test_what_the_driver_refuses(device_label: str) -> None:
    """A custom operation that raises after it has enqueued something is in it once, with its failure and its times."""
    async with rig(device_label, lanes=1) as r:

        def broken(lane: ao.Lane) -> None:
            raise ZeroDivisionError

        tracer = await begun(r)
        with pytest.raises(ZeroDivisionError):
            await r.off.custom_operation(broken)
        (record,) = await ended(r, tracer)
        assert (record.kind, record.failure) == ("custom operation", "ZeroDivisionError()")
        assert record.tie is not None


async def test_host_functions_that_fail_or_take_batches(device_label: str) -> None:
    """A batch is one slice with its rows and one launch; one that raised says so; outside nothing is kept."""
    async with calling_rig(device_label) as r:

        @r.off.host_function(batch=True, name="f")
        async def f(x: np.ndarray[Any, np.dtype[np.int64]]) -> None:
            if 39 in x:
                raise ValueError("the last one")

        report = r.off.zeros(1, np.int32)
        await r.off.load(post_many)
        await r.launch(post_many, 5, report)
        tracer = await begun(r.rig)
        with pytest.raises(ao.HostFunctionError):
            await r.launch(post_many, 40, report)
        assert r.off._engine is not None
        assert r.off._engine.board.channel is not None
        await ended(r.rig, tracer)
        assert r.off._engine.board.channel.on_served is None
        assert sum(call.rows for call in tracer.calls) <= 40
        assert [call.failed for call in tracer.calls][-1] is True
        assert all(call.callers == (1,) and call.began_ns <= call.ended_ns for call in tracer.calls)


async def test_channel_that_opens_inside(device_label: str) -> None:
    """The first kernel that calls may be launched inside: its host functions are recorded, too."""
    async with calling_rig(device_label) as r:

        @r.off.host_function(name="f")
        async def f(x: int) -> None:
            await asyncio.sleep(0)

        tracer = await begun(r.rig)
        await r.launch(post_many, 3, r.off.zeros(1, np.int32))
        await ended(r.rig, tracer)
        assert [(call.name, call.rows) for call in tracer.calls] == [("f", 1)] * 3


async def test_late_ends_do_not_come_back(device_label: str) -> None:
    """What ends after the trace did changes nothing in it."""
    async with rig(device_label, lanes=1) as r:
        tracer = await begun(r)
        gate = await r.hold()
        (record,) = await ended(r, tracer, timeout_s=0)
        gate.open()
        await r.holds[0]
        assert (record.seen_ns, record.ended_ns) == (None, None)
        assert tracer._open == {}


@pytest.mark.parametrize("call", ["enqueue_record", "query_event", "elapsed"])
@pytest.mark.parametrize("at", range(1, 8))
async def test_no_event_is_left(call: str, at: int, tmp_path: Any) -> None:
    """Whatever the driver refuses of a trace, on entry or later, every event that it has made is destroyed."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1) as off:
        await off.load(nothing)
        before = device.left()
        device.fail(call, at=at)
        with contextlib.suppress(DriverError):  # on entry; later it costs a time, and no operation
            async with off.trace(tmp_path / "trace.json"):
                for _ in range(3):
                    await off.launch(nothing, grid=1, block=1)
        assert len(device.injected) == 1
        assert device.left() == before


async def test_a_loss_that_the_end_of_a_trace_finds(tmp_path: Any) -> None:
    """A loss found while a trace destroys its events ends that, and the Offload knows of it."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1) as off:
        await off.load(nothing)
        async with off.trace(tmp_path / "trace.json"):
            await off.launch(nothing, grid=1, block=1)
            device.lose("close_event", at=1)
        with pytest.raises(ao.DeviceLostError):
            off.launch(nothing, grid=1, block=1)
    assert device.problems == []
