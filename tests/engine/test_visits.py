"""Copies between two Offloads of one loop: on one device, and on two GPUs."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.kernels import Rig, add, hold_write, nothing, rig, turns, until
from tests.reverse_kernels import ask, calling_rig

PAIRS = [
    ("host", "host"),
    pytest.param(("cuda:0", "cuda:0"), marks=pytest.mark.gpu),
    pytest.param(("cuda:0", "cuda:1"), marks=pytest.mark.gpu),
]


@pytest.fixture(params=PAIRS, ids=["host", "one GPU", "two GPUs"])
def labels(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The devices of the two Offloads."""
    pair: tuple[str, str] = request.param
    if pair[1] == "cuda:1":
        from aiooffload.drivers.cuda import library

        if library.count_devices() < 2:
            pytest.skip("needs two GPUs")
    return pair


@asynccontextmanager
async def two(labels: tuple[str, str], **options: Any) -> AsyncIterator[tuple[Rig, Rig]]:
    async with rig(labels[0], **options) as here, rig(labels[1], **options) as there:
        yield here, there


async def drained(*rigs: Rig) -> None:
    """Wait until nothing is under way, so that what comes next may be instant."""
    for r in rigs:
        await r.off.drain()


async def test_there_and_back(labels: tuple[str, str]) -> None:
    """Either Offload copies in either direction, contiguous memory and slices of it, also in many calls."""
    numbers = np.arange(5 * 6 * 7, dtype=np.int32).reshape(5, 6, 7)
    async with two(labels) as (here, there):
        x = await here.off.put(numbers)
        for off in (here.off, there.off):
            y = there.off.zeros(numbers.shape, np.int32)
            assert await off.copy(y, x) is None
            assert (await there.off.get(y) == numbers).all()
            await off.copy(y[1:3, ::2, :3], x[2:4, :3, 4:])
            expected = numbers.copy()
            expected[1:3, ::2, :3] = numbers[2:4, :3, 4:]
            assert (await there.off.get(y) == expected).all()
            back = here.off.zeros((100, 3), np.int32)
            await off.copy(back[:5, :1], y[:, 0, :1])
            assert (await here.off.get(back))[:5, 0].tolist() == expected[:, 0, 0].tolist()
        many = await here.off.put(np.arange(4096, dtype=np.uint8).reshape(16, 16, 16))
        spread = there.off.zeros((16, 16, 16), np.uint8)
        await there.off.copy(spread[::2, ::2, ::2], many[1::2, 1::2, 1::2])
        found = await there.off.get(spread)
        assert (found[::2, ::2, ::2] == np.arange(4096).astype(np.uint8).reshape(16, 16, 16)[1::2, 1::2, 1::2]).all()
        assert not found[1::2].any()


@pytest.mark.all_loops
async def test_it_is_ordered_on_both_sides(labels: tuple[str, str]) -> None:
    """It comes after what writes its source there, and what writes the source afterwards comes after it."""
    async with two(labels) as (here, there):
        source, target = there.word(1), here.word(7)
        gate = there.gate()
        there.launch(hold_write, gate.address, source, np.uint64(40))
        copy = here.off.copy(target, source)
        late = there.launch(add, source, 100)
        after = here.launch(add, target, 2)
        await until(lambda: gate.started)
        await turns()
        assert not copy.finished
        assert not late.finished
        gate.open()
        await after
        assert await here.read(target) == 42
        assert await there.read(source) == 140


@pytest.mark.all_loops
async def test_a_target_elsewhere_is_ordered_too(labels: tuple[str, str]) -> None:
    """It waits for readers and writers of its target, and those submitted later see what it wrote."""
    async with two(labels) as (here, there):
        source, target = here.word(5), there.word(1)
        gate = there.gate()
        there.launch(hold_write, gate.address, target, np.uint64(9))
        copy = here.off.copy(target, source)
        seen = there.off.get(target)
        await until(lambda: gate.started)
        await turns()
        assert not copy.finished
        gate.open()
        assert (await seen)[0] == 5


async def test_a_pinned_array_of_the_other_one(labels: tuple[str, str]) -> None:
    """Pinned memory of one Offload is used by another in its turn, whoever of the two wrote or read it last."""
    async with two(labels) as (here, there):
        pinned = await there.off.pinned(1, np.uint64)
        source, target = there.word(1), here.word()
        gate = there.gate()
        write = there.launch(hold_write, gate.address, source, np.uint64(9))
        down = there.off.copy(pinned, source)  # behind the kernel
        up = here.off.copy(target, pinned)
        put = here.off.put(pinned)
        await until(lambda: gate.started)
        await turns()
        assert not up.finished
        assert not put.finished
        gate.open()
        assert await here.read(target) == 9
        assert await here.read(await put) == 9
        assert [await write, await down, await up] == [None] * 3

        gate = here.gate()
        here.launch(hold_write, gate.address, target, np.uint64(11))
        down = here.off.get(target, out=pinned)  # type: ignore[assignment]
        up = there.off.copy(source, pinned)
        await until(lambda: gate.started)
        await turns()
        assert not up.finished
        gate.open()
        assert await there.read(source) == 11
        assert (await down) is pinned.array


async def test_a_pinned_array_of_a_closed_one(labels: tuple[str, str]) -> None:
    """Its memory went back to the system, so it is refused."""
    async with rig(labels[0]) as here:
        async with rig(labels[1]) as there:
            pinned = await there.off.pinned(1, np.uint64)
            pinned.array[:] = 3
            target = here.word()
            await here.off.copy(target, pinned)
            assert await here.read(target) == 3
        with pytest.raises(ao.ClosedError):
            here.off.copy(target, pinned)
        assert await here.read(target) == 3


async def test_a_pointer_into_a_pinned_array(labels: tuple[str, str]) -> None:
    """A Buffer on pinned memory belongs to the Offload of that memory, whichever uses it first."""
    async with two(labels) as (here, there):
        pinned = await there.off.pinned(1, np.uint64)
        assert pinned.lease is not None
        address = pinned.lease.block.device_address
        view = ao.Buffer.from_pointer(address, 8, pinned, shape=(1,), dtype=np.uint64)
        target = here.word()
        pinned.array[:] = 4
        await here.off.copy(target, view)
        assert await here.read(target) == 4
        await there.launch(add, view, 5)
        assert pinned.array[0] == 9


async def test_behind_coarse_work(labels: tuple[str, str]) -> None:
    """A launch there that has no mark of its own gets one when a copy waits for it."""
    async with two(labels, lanes=1) as (here, there):
        source, target = there.word(1), here.word()
        there.launch(add, source, 4, coarse=True)
        await here.off.copy(target, source)
        assert await here.read(target) == 5
        there.launch(add, source, 4, coarse=True)
        await there.off.copy(target, source)
        assert await here.read(target) == 9


async def test_explicit_order_is_the_programs(labels: tuple[str, str]) -> None:
    """With ordering="explicit" a copy waits for nothing there that after= does not name."""
    async with rig(labels[0]) as here, rig(labels[1], ordering="explicit") as there:
        source, target = there.word(1), here.word()
        await there.off.drain()
        gate = there.gate()
        write = there.launch(hold_write, gate.address, source, np.uint64(3))
        await until(lambda: gate.started)
        await here.off.copy(target, source)
        assert await here.read(target) == 1
        gate.open()
        await write
        await here.off.copy(target, source, after=[asyncio.ensure_future(write.wait())])
        assert await here.read(target) == 3


async def test_instant(labels: tuple[str, str]) -> None:
    """With nothing in its way it goes straight to the device; behind work of the other Offload it cannot."""
    async with two(labels) as (here, there):
        source, target = there.word(3), here.word()
        await drained(here, there)
        copy = here.off.copy(target, source, instant=True)
        assert copy.instant
        await copy
        await there.off.drain()
        gate = there.gate()
        there.launch(hold_write, gate.address, source, np.uint64(4))
        with pytest.raises(ao.WouldBlock):
            here.off.copy(target, source, instant=True)
        gate.open()
        await there.off.drain()
        assert await here.read(target) == 3


async def test_memory_stays_until_it_is_done(labels: tuple[str, str]) -> None:
    """Closing the other buffer, draining or closing the other Offload waits for the copy."""
    async with two(labels, lanes=1) as (here, there):
        source, target = there.word(6), here.word()
        await drained(here, there)
        gate = await here.hold()
        copy = here.off.copy(target, source)
        source.close()
        drain = asyncio.create_task(there.off.drain())
        closing = asyncio.create_task(there.off.aclose())
        await turns()
        assert not drain.done()
        assert not closing.done()
        gate.open()
        await drain
        await closing
        assert copy.finished
        assert await here.read(target) == 6


async def test_a_program_that_cancels_every_task(labels: tuple[str, str]) -> None:
    """Nothing of a copy that is on the device can be cancelled by that: what is submitted there later still waits."""
    async with two(labels, lanes=1) as (here, there):
        source, target = here.word(6), there.word()
        await drained(here, there)
        gate = await here.hold()
        copy = here.off.copy(target, source)
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        fill = there.off.fill(target, 9)
        await turns()
        assert not copy.finished
        assert not fill.finished
        gate.open()
        await fill
        assert copy.finished
        assert await there.read(target) == 9


@pytest.mark.all_loops
async def test_once_it_was_awaited_the_memory_is_free(labels: tuple[str, str]) -> None:
    """Work on either side goes straight to the device, and other libraries get the memory."""
    async with two(labels) as (here, there):
        x, y = here.word(1), there.word(2)
        await drained(here, there)
        await here.off.copy(x, y)
        assert there.off.fill(y, 3, instant=True).instant
        await there.off.drain()
        await here.off.copy(y, x)
        if labels[1] == "host":
            assert np.from_dlpack(y).tolist() == [2]
        else:
            there.off._open_engine().share(y.allocation.history.conflicts(True), None)
        with pytest.raises(ao.UsageError):
            here.off.copy(x, y, lane=there.off.lanes[0])
        assert there.off.fill(y, 4, instant=True).instant
        await there.off.drain()


async def test_memory_of_a_buffer_of_the_other(labels: tuple[str, str]) -> None:
    """A raw pointer into a Buffer counts as memory of that one's Offload, whoever uses it first."""
    async with two(labels) as (here, there):
        source, target = there.word(5), here.word()
        for copied in (here.off, there.off):
            view = ao.Buffer.from_pointer(source.address, 8, source, dtype=np.uint64, shape=1)
            there.off.fill(source, 5)
            here.off.fill(target, 0)
            await copied.copy(target, view)
            assert await here.read(target) == 5
            again = ao.Buffer.from_pointer(source.address, 8, source, dtype=np.uint64, shape=1)
            here.off.fill(target, 7)
            await copied.copy(again, target)
            assert await there.read(source) == 7


async def test_terminated_while_it_writes_elsewhere() -> None:
    """Memory that a terminated Offload may still write is closed: nobody would see the end of that."""
    async with rig("host", lanes=1, bury=True) as here, rig("host") as there:
        source, target, other = here.word(1), there.word(2), there.word(3)
        await drained(here, there)
        await here.hold()
        copy = here.off.copy(target, source)
        read = here.off.copy(source, other)
        here.off.terminate()
        assert isinstance(copy.exception(), ao.ClosedError)
        assert isinstance(read.exception(), ao.ClosedError)
        await there.off.drain()
        with pytest.raises(ao.ClosedError):
            there.off.fill(target, 9)
        assert await there.read(other) == 3


async def test_readers_do_not_wait_for_it(labels: tuple[str, str]) -> None:
    """While a copy of its memory waits for a lane here, others read the same memory there; writers wait."""
    async with two(labels, lanes=1) as (here, there):
        source, target = there.word(6), here.word()
        await here.off.drain()
        gate = await here.hold()
        copy = here.off.copy(target, source)
        assert await there.read(source) == 6
        write = there.launch(add, source, 1)
        await turns()
        assert not copy.finished
        assert not write.finished
        gate.open()
        await write
        assert await here.read(target) == 6


async def test_cancelled_before_its_turn(labels: tuple[str, str]) -> None:
    """A copy that is cancelled while it waits lets both Offloads go on."""
    async with two(labels) as (here, there):
        source, target = there.word(1), here.word(2)
        gate = there.gate()
        there.launch(hold_write, gate.address, source, np.uint64(3))
        copy = here.off.copy(target, source)
        assert copy.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copy
        late = there.launch(add, source, 1)
        gate.open()
        await late
        assert await there.read(source) == 4
        assert await here.read(target) == 2


async def test_the_other_is_terminated() -> None:
    """A copy that waits for an Offload that is terminated fails and says why; its own Offload goes on."""
    async with rig("host") as here, rig("host", bury=True) as there:
        source, target = there.word(1), here.word(2)
        await there.hold_all()
        written = there.launch(hold_write, there.gate().address, source, np.uint64(3))
        copy = here.off.copy(target, source)
        there.off.terminate()
        with pytest.raises(ao.DependencyError) as caught:
            await copy
        assert isinstance(caught.value.__cause__, ao.ClosedError)
        assert isinstance(written.exception(), ao.ClosedError)
        with pytest.raises(ao.ClosedError):
            here.off.copy(target, source)
        assert await here.read(target) == 2


async def test_refused(labels: tuple[str, str]) -> None:
    """What is refused leaves nothing behind in either Offload."""
    async with two(labels) as (here, there), rig(labels[0]) as third:
        source, target = there.word(1), here.word(2)
        await drained(here, there)
        for call, message in (
            (lambda: third.off.copy(target, source), "both buffers belong to another Offload"),
            (lambda: here.off.copy(target, source[:0]), "0 bytes"),
            (lambda: here.off.copy(target, source, after=[there.launch(nothing)]), "belongs to another Offload"),
            (lambda: here.off.copy(target, source, lane=there.off.lanes[0]), "lane"),
        ):
            with pytest.raises(ao.UsageError, match=message):
                call()
        await there.off.drain()
        await there.launch(add, source, 1)
        assert here.off.stats()["pending"] == there.off.stats()["pending"] == 0


@pytest.mark.gpu
async def test_host_and_gpu_do_not_reach_each_other() -> None:
    """Memory of the host device is no GPU's."""
    async with rig("host") as here, rig("cuda:0") as there:
        with pytest.raises(ao.UsageError, match="do not reach each other's memory"):
            here.off.copy(here.word(1), there.word(1))


async def test_another_loop() -> None:
    """A buffer of an Offload of another thread's loop is refused."""
    async with rig("host") as here:
        target = here.word(1)

        async def elsewhere() -> None:
            async with rig("host") as there:
                await there.off.drain()
                with pytest.raises(ao.UsageError, match="another event loop"):
                    there.off.copy(there.word(1), target)

        await asyncio.to_thread(asyncio.run, elsewhere())


async def test_no_deadlock_with_a_host_function(device_label: str) -> None:
    """A host function is told of what waits for the launch that waits for it, also by way of another Offload."""
    async with calling_rig(device_label) as r, rig(device_label) as other:
        target, out, buffer, report = other.word(), r.array(1), r.array(1), r.array(2, np.int32)
        submissions: list[Callable[[], Any]] = [lambda: other.off.copy(target, buffer)]
        errors: list[str] = []

        @r.off.host_function
        async def f(x: int) -> int:
            for submit in submissions:
                try:
                    await submit()
                except ao.UsageError as error:
                    errors.append(str(error))
            return x

        await r.off.load(ask)
        await r.launch(ask, 1, buffer, report)
        assert len(errors) == 1
        submissions[:] = [lambda: other.off.get(target), lambda: r.off.copy(out, target)]
        launch = r.launch(ask, 1, buffer, report)
        behind = other.off.copy(target, buffer)
        await launch
        await behind
        assert len(errors) == 3
        assert all("waits for this host function" in error for error in errors)


@dataclasses.dataclass
class Named:
    """A device under another handle."""

    inner: Any
    handle: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def test_devices_are_named_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the devices differ each call names them, the destination's first."""
    from aiooffload.drivers.host import HostDevice

    calls: list[tuple[Any, ...]] = []
    async with rig(Named(HostDevice(), 11)) as here, rig(Named(HostDevice(), 22)) as there:
        x, y = here.off.zeros((4, 4), np.uint8), there.off.zeros((4, 4), np.uint8)
        await drained(here, there)
        for lane in here.off.lanes:
            note(lane, calls, monkeypatch)
        await here.off.copy(x, y)
        await here.off.copy(y, x)
        await here.off.copy(x[:, :2], y[:, 2:])
        await here.off.copy(x[1:2], x[3:])
    assert [call[3:] for call in calls[:2]] == [(11, 22), (22, 11)]
    assert calls[2][-2:] == (11, 22)
    assert len(calls[3]) == 3


def note(lane: Any, calls: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the copies of a lane, and make them without the names."""
    stream = lane.stream

    class Noting:
        def __getattr__(self, name: str) -> Any:
            return getattr(stream, name)

        def enqueue_copy(self, *args: int) -> None:
            calls.append(args)
            stream.enqueue_copy(*args[:3])

        def enqueue_copy_box(self, *args: int) -> None:
            calls.append(args)
            stream.enqueue_copy_box(*args[:9])

    monkeypatch.setattr(lane, "stream", Noting())
