"""What a kernel that writes where it must not can do to the host: an error, or the end of the device, and no more.

Everything here runs on the host device, whose memory a test can scribble on as a kernel would. What each word may
hold is tested where it is read, in ``_native/test_board.py``, ``_native/test_channel.py`` and ``_native/test_port.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload.engine import health, reverse
from aiooffload.engine.reverse import Opened, Reverse
from aiooffload.rules import wire
from aiooffload.rules.wire import MapKind
from tests import scribble
from tests.kernels import DEADLINE_S, add, hold, nothing, rig, turns, until
from tests.reverse_kernels import CallingRig, ask, calling_rig, end_of, in_steps, map_array, post_many, until_cancelled

FROM_KERNELS = (2**64 - 1, 2**63, 2**40, wire.RING_SLOTS + 1000)


@pytest.fixture(autouse=True)
def no_loss_before_or_after() -> Iterator[None]:
    """Give every test a process that has lost nothing."""
    assert health.loss.error is None
    yield
    health.loss.error = None


def parts(r: CallingRig) -> tuple[Reverse, Opened]:
    """Return the reverse offload of a rig, and what its channel is made of."""
    engine = r.off._engine
    assert engine is not None
    assert engine.reverse._opened is not None
    return engine.reverse, engine.reverse._opened


def words_of(memory: Any) -> Any:
    """Return a block of memory as 64-bit words."""
    return memory.view(np.uint64)


WRITES = st.builds(
    scribble.Write,
    st.sampled_from(scribble.REGIONS),
    st.integers(0, 2**20),
    st.one_of(
        st.binary(min_size=1, max_size=64), st.sampled_from(scribble.WORDS).map(lambda n: n.to_bytes(8, "little"))
    ),
)
DESCRIPTORS = st.randoms(use_true_random=False).map(scribble.random_descriptor)


@hypothesis.settings(max_examples=20)
@given(st.lists(st.one_of(st.sampled_from(scribble.CALLS), WRITES, DESCRIPTORS), min_size=1, max_size=30))
async def test_kernel_that_writes_anything_anywhere(steps: list[scribble.Step]) -> None:
    """Whatever a kernel writes to the memory it shares, its launches fail, the device ends, or nothing happens.

    Another Offload's work comes out right all the while, and everything ends.
    """
    await scribble.attack(steps)


# -- slots ---------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 2**63, 2**64 - 1, 1 << 20])
async def test_slot_that_no_mark_has_written(value: int) -> None:
    """A slot out of range ends the device: nothing counts as done that is not, and nothing is freed."""
    async with rig("host", lanes=1, bury=True) as r:
        word = r.word()
        await r.launch(add, word, 1)
        await r.hold()
        behind = r.launch(add, word, 1)
        word.close()
        r.off.lanes[0].queue.slot.store(value)
        failure = await end_of(r.holds[0])
        assert isinstance(failure, ao.DeviceLostError)
        assert "slot" in str(failure)
        assert isinstance(await end_of(behind), ao.DeviceLostError)
        with pytest.raises(ao.DeviceLostError):
            r.launch(nothing)


@pytest.mark.parametrize("kind", ["launch", "fill", "coarse"])
async def test_mark_that_is_overwritten(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mark that nobody has seen and that is gone ends the device, rather than let its operation wait for ever."""
    monkeypatch.setattr(health, "TICK_S", 0.001)
    async with rig("host", lanes=2, bury=True) as r:
        await r.launch(nothing, lane=r.off.lanes[0])
        gate, lane = await r.hold(r.off.lanes[0]), r.off.lanes[0]
        buffer = r.off.empty(1, np.uint64)
        last = r.holds[0]
        if kind == "fill":
            last = r.off.fill(buffer, 3, lane=lane)
        elif kind == "coarse":
            last = r.launch(nothing, lane=lane, coarse=True)
        before = lane.queue.slot.load()
        asyncio.get_running_loop().call_soon(_overwrite, lane, before, gate)
        failure = await end_of(last)
        assert isinstance(failure, ao.DeviceLostError)
        assert "mark of it never arrived" in str(failure)
        assert "hold on lane 0" in failure.suspects


def _overwrite(lane: ao.Lane, value: int, gate: Any) -> None:
    """Let everything on a lane end, and take its mark back before anybody looks."""
    gate.open()
    while not lane.stream.query():
        pass
    lane.queue.slot.store(value)


async def test_lane_that_is_only_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that works for long, and one that is empty, have lost nothing."""
    monkeypatch.setattr(health, "TICK_S", 0.0005)
    async with rig("host", lanes=2) as r:
        await r.launch(nothing, lane=r.off.lanes[1])
        gate = await r.hold(r.off.lanes[0])
        coarse = r.launch(nothing, lane=r.off.lanes[1], coarse=True)
        checks = r.off.stats()["watchdog_checks"]
        await until(lambda: r.off.stats()["watchdog_checks"] > checks + 5 * health.MARK_TICKS)
        gate.open()
        await r.holds[0]
        await coarse


# -- the ring ------------------------------------------------------------------------------


@pytest.mark.parametrize("head", FROM_KERNELS)
async def test_head_out_of_range(head: int) -> None:
    """A launch that says it has sent more than fits the ring ends the device: nobody waits for what never comes."""
    async with calling_rig("host", bury=True) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            words_of(parts(r)[1].state.allocation.host_array)[wire.STATE_HEAD // 8] = head
            return x

        op = r.launch(ask, 1, r.array(1), r.array(2, np.int32))
        failure = await end_of(op)
        assert isinstance(failure, ao.DeviceLostError)
        assert "corrupt" in str(failure)


@pytest.mark.parametrize("others", ["none", "silent", "calling"])
async def test_request_that_is_overwritten(others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap in the ring ends the device after a while, whether others are silent or call behind it."""
    monkeypatch.setattr(reverse, "TORN_S", 0.02)
    async with calling_rig("host", bury=True) as r:
        called = 0

        @r.off.host_function
        async def f(x: int) -> int:
            nonlocal called
            called += 1
            words_of(parts(r)[1].state.allocation.host_array)[wire.STATE_HEAD // 8] += 1
            broken.set()
            return x

        @r.off.host_function
        async def started() -> None:
            running.set()

        running, broken = asyncio.Event(), asyncio.Event()
        await r.off.load(ask, until_cancelled)
        ops = []
        if others == "silent":
            ops.append(r.launch(until_cancelled, r.array(1, np.int32)))
            await running.wait()
        ops.append(r.launch(ask, 1, r.array(1), r.array(2, np.int32)))
        await broken.wait()
        if others == "calling":
            ops.append(r.launch(ask, 2, r.array(1), r.array(2, np.int32)))
        for op in ops:
            failure = await end_of(op)
            assert isinstance(failure, ao.DeviceLostError)
            assert "missing" in str(failure)
        assert called == 1


async def test_request_that_is_overwritten_for_a_kernel_that_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap in the ring ends the device also where only the kernel behind it is on the device, and goes on waiting."""
    monkeypatch.setattr(reverse, "TORN_S", 0.02)
    async with calling_rig("host", bury=True) as r:

        @r.off.host_function
        async def f(x: int) -> None:
            words_of(parts(r)[1].state.allocation.host_array)[wire.STATE_HEAD // 8] += 1

        failure = await end_of(r.launch(in_steps, 3))
        assert isinstance(failure, ao.DeviceLostError)
        assert "request 1 is missing" in str(failure)


@pytest.mark.allows_blocking("the host function looks at the device in its first step, again and again")
async def test_request_that_nobody_can_read_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a host function is in its first step nothing is read, so that nothing is missing either."""
    monkeypatch.setattr(reverse, "TORN_S", 0.01)
    async with calling_rig("host") as r:
        await r.off.load(ask, post_many, hold)
        gate, report, seen = r.gate(), r.array(1, np.int32), []
        opening = threading.Timer(0.2, gate.open)

        @r.off.host_function
        async def f(x: int) -> int:
            seen.append(x)
            if x == 7:
                held, _ = r.launch(hold, gate.address), r.launch(post_many, 1, report)
                opening.start()
                while not held.done():
                    time.sleep(0.001)  # noqa: ASYNC251  # the loop has to stand still
            return x

        assert await r.asked(ask, 7) == ([0, 0], 7, None)
        await r.off.drain()
        assert seen == [7, 0]
        opening.join()


async def test_silent_kernel_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sends nothing for long, with a call open, loses nothing."""
    monkeypatch.setattr(reverse, "TORN_S", 0.0)
    async with calling_rig("host") as r:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        @r.off.host_function
        async def f(x: int) -> int:
            return await answer

        value = r.array(1)
        op = r.launch(ask, 1, value, r.array(2, np.int32))
        await until(lambda: r.off.stats()["calls"]["open"])
        checks = r.off.stats()["watchdog_checks"]
        await until(lambda: r.off.stats()["watchdog_checks"] > checks + 3)
        answer.set_result(5)
        await op
        assert await r.values(value) == [5]


# -- a launch's block ----------------------------------------------------------------------


async def test_cancel_word_that_nobody_set() -> None:
    """A launch that was told to stop by a stray write fails, and says so; the next one is well."""
    async with calling_rig("host") as r:

        @r.off.host_function
        async def started() -> None:
            reverse, _ = parts(r)
            (caller,) = reverse.callers.values()
            caller.words[wire.LAUNCH_CANCEL].store(1)

        seen = r.array(1, np.int32)
        failure = await end_of(r.launch(until_cancelled, seen))
        assert isinstance(failure, ao.HostFunctionError)
        assert "by nobody" in str(failure)

        @r.off.host_function
        async def f(x: int) -> int:
            return 2 * x

        assert await r.asked(ask, 4) == ([0, 0], 8, None)


@pytest.mark.parametrize("where", [wire.LAUNCH_TROUBLE, wire.LAUNCH_GIVEN_UP])
@pytest.mark.parametrize("word", [1, 2**32, 2**64 - 1, 7 << 32, 0xDEADBEEF])
async def test_trouble_that_no_kernel_reports(word: int, where: int) -> None:
    """Whatever stands in the trouble words of a launch is an error of that launch alone."""
    async with calling_rig("host") as r:

        @r.off.host_function
        async def f(x: int) -> int:
            reverse, _ = parts(r)
            (caller,) = reverse.callers.values()
            caller.words[where].store(word)
            return x

        report, value, failure = await r.asked(ask, 3)
        assert (report, value) == ([0, 0], 3)
        assert isinstance(failure, ao.HostFunctionError)


async def test_progress_of_any_numbers() -> None:
    """Progress is whatever the words hold, and harms nobody."""
    async with calling_rig("host") as r:

        @r.off.host_function
        async def f(x: int) -> int:
            reverse, _ = parts(r)
            (caller,) = reverse.callers.values()
            caller.words[wire.LAUNCH_PROGRESS].store(2**64 - 1)
            caller.words[wire.LAUNCH_PROGRESS + 8].store(3)
            return x

        op = r.launch(ask, 3, r.array(1), r.array(2, np.int32))
        await op
        assert [pair async for pair in op.progress()] == [(2**64 - 1, 3)]


# -- giving up -----------------------------------------------------------------------------


async def test_abort_record_that_comes_and_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort word that is gone when its message is read is no message."""
    async with calling_rig("host") as r:
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        @r.off.host_function
        async def f(x: int) -> int:
            return await answer

        op = r.launch(ask, 3, r.array(1), r.array(2, np.int32))
        await until(lambda: r.off.stats()["calls"]["open"])
        reverse, opened = parts(r)

        class Flickers:
            def load(self) -> int:
                return 1

        reverse._opened = opened._replace(abort=Flickers())  # type: ignore[arg-type]
        reverse.look()
        await turns()
        reverse._opened = opened
        answer.set_result(1)
        await op


@pytest.mark.parametrize(
    "record",
    [
        struct.pack("<Qqq", 2**64 - 1, -(2**63), 2**63 - 1) + b"\xff" * 360,
        struct.pack("<Qqq", 5000, 3, -7) + b"text",
        struct.pack("<Qqq", 1, 2**63 - 1, 10**6) + "\N{SNOWMAN}".encode()[:2],
    ],
    ids=["ones", "negative length", "torn text"],
)
async def test_abort_record_of_anything(record: bytes) -> None:
    """An abort record of any content ends the device with what of it can be read."""
    async with calling_rig("host", bury=True) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            at = wire.ABORT_OFFSET
            parts(r)[1].shared.array[at : at + len(record)] = np.frombuffer(record, np.uint8)
            return await asyncio.get_running_loop().create_future()

        failure = await end_of(r.launch(ask, 3, r.array(1), r.array(2, np.int32)))
        assert isinstance(failure, ao.DeviceLostError)
        assert "aborted with code" in str(failure)


# -- mapped arguments ----------------------------------------------------------------------

PAGE = np.zeros(4096, np.uint8)
"""Memory of the host that no kernel has named."""


@pytest.mark.parametrize("kind", [MapKind.TO, MapKind.FROM, MapKind.TOFROM, 4, 255])
@pytest.mark.parametrize(
    ("address", "nbytes"),
    [
        (0, 64),
        (8, 2**56 - 1),
        (2**64 - 8, 64),
        (None, 64),
        (PAGE.ctypes.data, 4096),
    ],
    ids=["null", "everything", "wraps", "larger than the array", "host memory"],
)
async def test_mapped_argument_of_anywhere(address: int | None, nbytes: int, kind: int) -> None:
    """An argument that is no device memory, or of no known kind, is an error of the launch; nothing is copied."""
    before = PAGE.copy()
    async with calling_rig("host") as r:
        called = 0

        @r.off.host_function
        async def f(x: ao.InOut[np.float32]) -> None:
            nonlocal called
            called += 1

        x = r.array(8, np.float32)
        report = r.array(2, np.int32)
        place, rows = (x.address if address is None else address), nbytes | int(kind) << 56
        forged = ao.Kernel("forged", host=_forge(place, rows), calls=True)
        failure = await end_of(r.launch(forged))
        assert isinstance(failure, ao.HostFunctionError)
        assert called == 0
        assert np.array_equal(PAGE, before)
        await r.launch(map_array, x, 8, int(MapKind.TOFROM), report)
        assert called == 1


def _forge(address: int, extent: int) -> Any:
    """Return a kernel that sends the words of a mapped argument itself."""

    def forged(launch: Any) -> None:
        with np.errstate(all="ignore"):
            launch.call_async("f", np.uint64(address), np.uint64(extent)).poll()

    return forged


async def test_array_of_a_kernel_that_left() -> None:
    """An array that a kernel has mapped lives until the copy back to it is over, also if nobody else holds it."""
    async with calling_rig("host") as r:
        fetched, go = threading.Event(), asyncio.Event()
        arrays: list[weakref.ref[Any]] = []
        left: list[bool] = []
        kept: list[ao.Call | None] = []

        @r.off.host_function
        async def f(x: ao.InOut[np.float32]) -> None:
            kept.append(ao.current_call())  # whoever keeps that keeps nothing of the kernel
            fetched.set()
            await go.wait()
            x[:] = 7

        def leave(launch: Any) -> None:
            array = np.zeros(1 << 16, np.float32)
            arrays.append(weakref.ref(array))
            pending = launch.call_async("f", launch.tofrom(array))
            assert fetched.wait(DEADLINE_S)
            del array, pending
            left.append(True)

        op = r.launch(ao.Kernel("leave", host=leave, calls=True))
        await until(lambda: left)
        assert arrays[0]() is not None
        go.set()
        await op
        await until(lambda: arrays[0]() is None)


@pytest.mark.allows_blocking("the loop must not look while the kernel gives its call up")
@pytest.mark.parametrize("how", ["dropped", "timed out"])
async def test_array_of_a_call_that_was_given_up(how: str) -> None:
    """An array whose call was given up before the host came to it is there for the host until the launch is done."""
    async with calling_rig("host", call_timeout_s=0.05) as r:
        seen: list[list[float]] = []
        arrays: list[weakref.ref[Any]] = []

        @r.off.host_function
        async def f(x: ao.InOut[np.float32]) -> None:
            seen.append(x.tolist())

        def leave(launch: Any) -> None:
            assert loaded.wait(DEADLINE_S)
            array = np.full(4, 7, np.float32)
            arrays.append(weakref.ref(array))
            if how == "dropped":
                launch.call_async("f", launch.tofrom(array))
            else:
                with contextlib.suppress(ao.OffloadTimeout):
                    launch.call("f", launch.tofrom(array))
            dropped.set()

        loaded, dropped = threading.Event(), threading.Event()
        op = r.launch(ao.Kernel("leave", host=leave, calls=True))
        await until(lambda: op.queue is not None)
        loaded.set()
        assert dropped.wait(DEADLINE_S)  # the loop has not looked meanwhile
        failure = await end_of(op)
        await until(lambda: arrays[0]() is None)
        if how == "dropped":
            assert (seen, failure) == ([[7] * 4], None)
        else:  # cancelled if it comes after the end of the kernel
            assert seen in ([], [[7] * 4])
            assert isinstance(failure, ao.HostFunctionError)
            assert isinstance(failure.__cause__, ao.OffloadTimeout)
