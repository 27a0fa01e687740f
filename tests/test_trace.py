"""``off.trace(path)``: the file of whatever happens inside, and how the block is entered and left."""

from __future__ import annotations

import asyncio
import json
import time
import weakref
from bisect import bisect_right
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from aiooffload.engine.copies import PIECE_NBYTES
from aiooffload.trace import Trace
from tests.kernels import Boom, SpyDevice, add, combine, fail, nothing, rig, scale_add, turns, until
from tests.reverse_kernels import calling_rig, in_turn

DEVICE, HOST = 1, 2
SLACK_US = 0.002


class File:
    """A trace that was read, and checked for what holds for any."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.about: dict[str, Any] = content["otherData"]
        self.events: list[dict[str, Any]] = content["traceEvents"]
        self.operations = [event for event in self.events if event.get("cat") == "operation"]
        self.slices = [event for event in self.events if event["ph"] == "X"]
        self._check_times()
        self._check_rows()
        self._check_arrows()

    def _check_times(self) -> None:
        numbers = [event["args"]["number"] for event in self.operations]
        assert sorted(numbers) == list(range(1, self.about["operations"] + 1))
        for event in self.operations:
            arguments = event["args"]
            end = event["ts"] + event.get("dur", 0)
            times = [
                arguments["submitted_us"],
                arguments.get("enqueued_us"),
                event["ts"],
                end,
                arguments.get("seen_us"),
            ]
            known = [time for time in times if time is not None]
            assert all(a <= b + SLACK_US for a, b in pairwise(known)), event
            if event["ph"] == "X" and event["pid"] == DEVICE:
                assert event["tid"] == arguments["lane"]

    def _check_rows(self) -> None:
        in_order = sorted(self.slices, key=lambda e: (e["pid"], e["tid"], e["ts"]))
        for one, other in pairwise(in_order):
            if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
                assert one["ts"] + one["dur"] <= other["ts"] + SLACK_US
        named = {(e["pid"], e["tid"]) for e in self.events if e["ph"] == "M" and e["name"] == "thread_name"}
        assert {(e["pid"], e["tid"]) for e in self.slices} <= named

    def _check_arrows(self) -> None:
        # For each row the starts of its slices in order, and the last end of those that have started by then.
        rows: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
        for e in sorted(self.slices, key=lambda e: e["ts"]):
            starts, last_ends = rows.setdefault((e["pid"], e["tid"]), ([], []))
            starts.append(e["ts"] - SLACK_US)
            last_ends.append(max([e["ts"] + e["dur"], *last_ends[-1:]]))
        ends = [event for event in self.events if event["ph"] in "sf"]
        for e in ends:
            starts, last_ends = rows[e["pid"], e["tid"]]
            started = bisect_right(starts, e["ts"])
            assert started, e
            assert e["ts"] <= last_ends[started - 1], e
        assert Counter(e["id"] for e in ends if e["ph"] == "s") == Counter(e["id"] for e in ends if e["ph"] == "f")

    def names(self) -> Counter[str]:
        return Counter(event["name"] for event in self.operations)

    def one(self, name: str) -> dict[str, Any]:
        (event,) = (event for event in self.operations if event["name"] == name)
        return event

    def after(self, name: str) -> list[str]:
        """The names of what the operation came after."""
        by_number = {event["args"]["number"]: event["name"] for event in self.operations}
        return [by_number[number] for number in self.one(name)["args"].get("after", [])]


async def load(path: Path) -> File:
    return await asyncio.to_thread(File, path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@pytest.mark.all_loops
async def test_everything_is_in_it_once(device_label: str, path: Path) -> None:
    """Every kind of operation is in the file exactly once, with its kind, its lane, and its times in order."""
    async with rig(device_label, lanes=4) as r:
        off, lanes = r.off, r.off.lanes
        handle = lanes[2].handle  # that of a closed lane is 0

        async def step() -> None:
            await asyncio.sleep(0)

        async with off.trace(path) as trace:
            assert trace.path == str(path)
            word, other = off.empty(1, np.uint64), off.empty(4, np.uint64)
            off.fill(word, 3)
            put = off.put(np.arange(4, dtype=np.uint64))
            off.copy(other, await put)
            launch = r.launch(add, word, 1, lane=lanes[2])
            off.get(word)
            task = off.host_task(step, after=[launch])
            off.custom_operation(lambda lane: None, after=[task], lane=lanes[3])
            off.gate(asyncio.sleep(0), lane=lanes[1])
            bound = off.bind(scale_add, grid=1, block=1, args=(word, 1, 0))
            bound(b=2)
            r.launch(nothing, coarse=True)
        assert await r.read(word) == 6
        file = await load(path)
    expected = ["fill", "put", "copy", "add", "get", "step", "<lambda>", "gate", "scale_add", "nothing"]
    assert file.names() == Counter(expected)
    assert file.about == {"device": device_label, "operations": 10, "complete": True} | {
        "clock_uncertainty_us": file.about["clock_uncertainty_us"]
    }
    assert 0 <= file.about["clock_uncertainty_us"] < 50_000
    kinds = [file.one(name)["args"]["kind"] for name in expected]
    assert kinds == [
        "fill",
        "put",
        "copy",
        "launch",
        "get",
        "host task",
        "custom operation",
        "gate",
        "launch",
        "launch",
    ]
    assert file.one("put")["args"]["bytes"] == file.one("copy")["args"]["bytes"] == 32
    assert file.one("add")["args"]["grid"] == file.one("add")["args"]["block"] == [1, 1, 1]
    assert (file.one("add")["tid"], file.one("add")["args"]["stream"]) == (2, handle)
    assert (file.one("<lambda>")["tid"], file.one("step")["pid"]) == (3, HOST)
    clocks = {event["args"].get("clock") for event in file.operations if event["pid"] == DEVICE}
    assert clocks == {"device"}


async def test_dependencies_are_arrows(device_label: str, path: Path) -> None:
    """Program order and `after=` are arrows from the end of one operation to the start of another, across lanes."""
    async with rig(device_label, lanes=4) as r:
        word, target = r.word(), r.word()
        await r.off.drain()
        async with r.off.trace(path):
            gate = await r.hold(r.off.lanes[0])
            held = r.holds[0]
            r.launch(add, word, 1, after=[held], lane=r.off.lanes[1])
            r.launch(combine, target, word, lane=r.off.lanes[2])
            r.launch(nothing)
            gate.open()
        file = await load(path)
    assert (file.after("add"), file.after("combine"), file.after("nothing")) == (["hold"], ["add"], [])
    starts = [e for e in file.events if e["ph"] == "s"]
    finishes = [e for e in file.events if e["ph"] == "f"]
    assert [(e["tid"]) for e in starts] == [0, 1]
    assert [(e["tid"], e["ts"]) for e in finishes] == [(1, file.one("add")["ts"]), (2, file.one("combine")["ts"])]
    hold = file.one("hold")
    assert hold["ts"] + hold["dur"] <= file.one("add")["ts"] + SLACK_US


async def test_nothing_outside_is_recorded(device_label: str, path: Path) -> None:
    """What was submitted before or after is not in it, nor its pieces, although it runs meanwhile."""
    async with rig(device_label, lanes=2) as r:
        gate = await r.hold(r.off.lanes[0])
        early = r.off.put(np.zeros(3 * PIECE_NBYTES, np.uint8), lane=r.off.lanes[0])
        r.launch(add, r.word(), 1, lane=r.off.lanes[0])
        async with r.off.trace(path):
            r.launch(nothing, lane=r.off.lanes[1])
            gate.open()
            await early
        await r.launch(scale_add, r.word(), 1, 1)
        assert (await load(path)).names() == {"nothing": 1}


async def test_what_waits_on_the_host(device_label: str, path: Path) -> None:
    """What is held, or whose lane is full, has a slice of waiting that ends where it is enqueued."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        future = asyncio.get_running_loop().create_future()
        async with r.off.trace(path):
            gate = await r.hold()
            r.launch(add, r.off.empty(1, np.uint64), 1)
            r.launch(nothing, after=[future])
            await turns()
            gate.open()
            future.set_result(None)
        file = await load(path)
    begins = {e["name"]: e for e in file.events if e["ph"] == "b"}
    ends = {e["name"]: e for e in file.events if e["ph"] == "e"}
    assert set(begins) == set(ends) == {"add waits", "nothing waits"}
    for name in ("add", "nothing"):
        arguments = file.one(name)["args"]
        assert begins[f"{name} waits"]["ts"] == arguments["submitted_us"]
        assert ends[f"{name} waits"]["ts"] == arguments["enqueued_us"]
    assert "lane 0" in begins["add waits"]["args"]["for"]
    assert "comes after" in begins["nothing waits"]["args"]["for"]


async def test_pieces_of_a_large_copy(device_label: str, path: Path) -> None:
    """A large copy is on the host as a whole, its pieces on its lane; what it came after has an arrow to the first."""
    async with rig(device_label, lanes=2) as r:
        async with r.off.trace(path):
            buffer = r.off.zeros(3 * PIECE_NBYTES, np.uint8)
            r.off.get(buffer)
        file = await load(path)
    assert file.names() == {"fill": 1, "get": 1, "piece of get": 3}
    whole = file.one("get")
    pieces = [e for e in file.operations if e["name"] == "piece of get"]
    assert (whole["pid"], whole["args"]["bytes"], file.after("get")) == (HOST, 3 * PIECE_NBYTES, ["fill"])
    assert {e["args"]["part_of"] for e in pieces} == {whole["args"]["number"]}
    assert len({(e["pid"], e["tid"]) for e in pieces}) == 1
    (arrow,) = (e for e in file.events if e["ph"] == "f")
    assert arrow["ts"] == min(e["ts"] for e in pieces)


async def test_calls_of_kernels(device_label: str, path: Path) -> None:
    """Each run of a host function is a slice in a row of its own, with an arrow from the launch that called it."""
    async with calling_rig(device_label) as r:
        off = r.off

        @off.host_function
        async def f(x: int, before: int) -> int:
            return x + before

        values = await off.put(np.zeros(5, np.int64))
        await off.launch(in_turn, grid=1, block=1, args=(values, 2))
        async with off.trace(path):
            await off.launch(in_turn, grid=1, block=1, args=(values, 5))
        await off.launch(in_turn, grid=1, block=1, args=(values, 3))
        file = await load(path)
    launch = file.one("in_turn")
    calls = [e for e in file.slices if e["cat"] == "host function"]
    assert [(e["name"], e["pid"], e["args"]["launches"]) for e in calls] == [("f", HOST, [1])] * 5
    assert all(launch["ts"] <= e["ts"] for e in calls)
    assert len([e for e in file.events if e["ph"] == "s" and e["cat"] == "call"]) == 5


async def test_failures_and_cancelled_ones(path: Path) -> None:
    """What failed says how; what was cancelled before it started, or failed with what it came after, never ran."""
    async with rig("host", lanes=2) as r:
        await r.off.load(fail)
        future = asyncio.get_running_loop().create_future()
        async with r.off.trace(path):
            broken = r.launch(fail)
            with pytest.raises(ao.LaunchError) as caught:
                await broken
            assert isinstance(caught.value.__cause__, Boom)
            held = r.launch(nothing, after=[future])
            after = r.launch(add, r.word(), 1, after=[held])
            held.cancel()
            with pytest.raises(ao.DependencyError):
                await after
        file = await load(path)
    assert "the kernel broke" in file.one("fail")["args"]["failure"]
    assert file.one("fail")["ph"] == "X"
    assert (file.one("nothing")["ph"], file.one("add")["ph"]) == ("i", "i")
    assert "CancelledError" in file.one("nothing")["args"]["failure"]
    assert "DependencyError" in file.one("add")["args"]["failure"]


async def test_body_that_raises(device_label: str, path: Path) -> None:
    """An exception leaves the block as it is, after the file was completed."""
    async with rig(device_label, lanes=2) as r:

        async def record() -> None:
            async with r.off.trace(path):
                r.launch(nothing)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await record()
        assert (await load(path)).names() == {"nothing": 1}
        assert (await load(path)).about["complete"] is True


async def test_deadline(device_label: str, path: Path) -> None:
    """What is not done by the deadline is in the file as unfinished; later it ends as if there had been no trace."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        async with r.off.trace(path, timeout_s=0.05):
            gate = await r.hold()
            late = r.launch(nothing)
        file = await load(path)
        assert file.about["complete"] is False
        assert [file.one(name)["args"]["unfinished"] for name in ("hold", "nothing")] == [True, True]
        assert (file.one("hold")["ph"], file.one("hold")["args"]["clock"]) == ("X", "device")
        assert file.one("nothing")["ph"] == "i"
        gate.open()
        await late
        async with r.off.trace(path):
            await r.launch(nothing)
        assert (await load(path)).names() == {"nothing": 1}


async def test_cancelled_while_leaving(device_label: str, path: Path) -> None:
    """Cancelling the task that leaves the block ends the wait; the file is complete all the same."""
    async with rig(device_label, lanes=1) as r:
        opened = asyncio.Event()

        async def record() -> None:
            async with r.off.trace(path):
                await r.hold()
                opened.set()

        task = asyncio.create_task(record())
        await opened.wait()
        await turns()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await load(path)).one("hold")["args"]["unfinished"] is True
        r.open_all()


async def test_lost_device(path: Path) -> None:
    """A lost device ends the block at once, with a file of what is known, and no driver call after the loss."""
    device = SpyDevice()
    async with rig(device, lanes=2, bury=True) as r:
        async with r.off.trace(path):
            await r.launch(nothing)
            await r.hold(r.off.lanes[0])
            queued = r.launch(add, r.off.empty(1, np.uint64), 1, lane=r.off.lanes[0])
            device.lost = True
            with pytest.raises(ao.DeviceLostError):
                await queued
            device.calls.clear()
        file = await load(path)
        assert device.calls == []
        assert "DeviceLostError" in file.one("hold")["args"]["failure"]
        assert (file.one("nothing")["args"]["clock"], file.one("hold")["args"]["clock"]) == ("device", "host")
        with pytest.raises(ao.DeviceLostError):
            async with r.off.trace(path):
                pass


async def test_terminated_inside(path: Path) -> None:
    """Terminating the Offload inside gives a valid file."""
    async with rig("host", lanes=2, bury=True) as r:
        async with r.off.trace(path):
            await r.hold(r.off.lanes[0])
            r.launch(nothing, after=[r.holds[0]], lane=r.off.lanes[1]).add_done_callback(ao.Operation.exception)
            r.off.terminate()
        file = await load(path)
        assert "ClosedError" in file.one("hold")["args"]["failure"]


async def test_closed_inside(device_label: str, path: Path) -> None:
    """Closing the Offload inside drains it; the file has the times of the device."""
    async with rig(device_label, lanes=2) as r, r.off.trace(path):
        r.launch(nothing)
        await r.off.aclose()
    assert (await load(path)).one("nothing")["args"]["clock"] == "device"


async def test_one_at_a_time(device_label: str, path: Path, tmp_path: Path) -> None:
    """A second trace raises UsageError and leaves the first alone; after that one the next can begin."""
    async with rig(device_label) as r:
        async with r.off.trace(path) as first:
            second = tmp_path / "second.json"
            with pytest.raises(ao.UsageError, match="already"):
                await r.off.trace(second).__aenter__()
            with pytest.raises(ao.UsageError, match="already"):
                await first.__aenter__()
            assert not await asyncio.to_thread(second.exists)
            r.launch(nothing)
        assert (await load(path)).names() == {"nothing": 1}
        async with r.off.trace(path):
            pass
        assert (await load(path)).operations == []


async def test_two_offloads_trace_at_once(path: Path, tmp_path: Path) -> None:
    """Each Offload has its own trace."""
    other = tmp_path / "other.json"
    async with rig() as a, rig() as b, a.off.trace(path), b.off.trace(other):
        a.launch(nothing)
        b.launch(add, b.off.empty(1, np.uint64), 1)
    assert ((await load(path)).names(), (await load(other)).names()) == ({"nothing": 1}, {"add": 1})


@pytest.mark.parametrize("where", ["missing/trace.json", "."])
async def test_path_that_cannot_be_written(device_label: str, tmp_path: Path, where: str) -> None:
    """It raises on entry, before the block has run; the Offload, and its next trace, work."""
    async with rig(device_label) as r:
        with pytest.raises((FileNotFoundError, IsADirectoryError)):
            async with r.off.trace(tmp_path / where):
                pytest.fail("the block ran")
        await r.launch(nothing)
        async with r.off.trace(tmp_path / "trace.json"):
            r.launch(nothing)


async def test_bad_arguments(path: Path) -> None:
    """What is wrong with the call is said by it, or on entry."""
    off = ao.Offload("host")
    with pytest.raises(ao.UsageError, match="async with"):
        off.trace(path)
    async with rig() as r:
        for timeout in (-1, "long", float("nan")):
            with pytest.raises(ao.UsageError, match="timeout_s"):
                r.off.trace(path, timeout_s=timeout)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            r.off.trace(7)  # type: ignore[arg-type]
    with pytest.raises(ao.ClosedError):
        await r.off.trace(path).__aenter__()


async def test_short_path_before_and_after(device_label: str, path: Path) -> None:
    """Outside a trace plain launches take the short path, inside none does, and afterwards they do again."""
    async with rig(device_label) as r:
        engine = r.off._engine
        assert engine is not None

        def short() -> bool:
            return engine.launcher.launch(nothing, 1, 1, ()) is not None

        await r.launch(nothing)
        assert (engine.launcher.ready, short()) == (True, True)
        async with r.off.trace(path):
            assert (engine.launcher.ready, short()) == (False, False)
        assert (engine.launcher.ready, short(), engine.lanes.recorder) == (True, True, None)
        await r.off.drain()


async def test_where_completions_fall_back_to_events(path: Path) -> None:
    """A device without memory operations is traced just so, and its short path stays off."""
    async with rig(HostDevice(memory_operations=False), lanes=2) as r:
        async with r.off.trace(path):
            word = r.off.zeros(1, np.uint64)
            for _ in range(5):
                r.launch(add, word, 1)
        assert await r.read(word) == 5
        assert r.off._engine is not None
        assert r.off._engine.launcher.ready is False
        file = await load(path)
    assert file.names() == {"fill": 1, "add": 5}
    assert {e["args"]["clock"] for e in file.operations} == {"device"}


async def test_ten_thousand_launches(path: Path) -> None:
    """A long trace keeps the order of the work, stays reasonable in time and size, and drops nothing."""
    async with rig("host", lanes=4, limit_s=30) as r:
        began = time.monotonic()
        async with r.off.trace(path):
            word = r.off.zeros(1, np.uint64)
            for _ in range(10_000):
                r.launch(add, word, 1)
        assert time.monotonic() - began < 15
        assert await r.read(word) == 10_000
    file = await load(path)
    assert len(json.dumps(file.events)) < 12_000_000
    assert file.names() == {"fill": 1, "add": 10_000}


async def test_in_a_host_function(path: Path) -> None:
    """A host function must not wait for what may wait for it: a trace there is refused."""
    async with calling_rig("host") as r:
        errors = []

        @r.off.host_function
        async def f(x: int, before: int) -> int:
            try:
                await r.off.trace(path).__aenter__()
            except ao.UsageError as error:
                errors.append(str(error))
            return x

        values = await r.off.put(np.zeros(1, np.int64))
        await r.off.launch(in_turn, grid=1, block=1, args=(values, 1))
    assert len(errors) == 1
    assert not await asyncio.to_thread(path.exists)


async def test_results_are_not_kept(path: Path) -> None:
    """A trace keeps neither results nor arguments of what is done."""
    async with rig() as r, r.off.trace(path):
        array = await r.off.get(r.off.zeros(10, np.uint8))
        kept: Any = weakref.ref(array)
        del array
        await until(lambda: kept() is None, "the array goes")


def test_repr() -> None:
    """It says where it writes."""
    trace: Any = Trace("x.json", 1, lambda: None)  # type: ignore[arg-type,return-value]
    assert repr(trace) == "<aiooffload trace into x.json>"
