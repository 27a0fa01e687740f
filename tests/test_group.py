"""An Offload of several devices: where things go, and that it is one Offload otherwise."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers import labels
from aiooffload.group import OffloadGroup
from tests.kernels import Gate, add, hold, hold_write, nothing, saxpy, turns, until
from tests.reverse_kernels import ask

DEVICES = ["host,host", pytest.param("cuda:*", marks=pytest.mark.gpu)]


@dataclass
class Group:
    """An open group and a page of words for gates."""

    off: ao.Offload
    page: ao.PinnedArray
    gates: int = 0

    @property
    def members(self) -> tuple[ao.Offload, ...]:
        return self.off.devices

    def gate(self) -> Gate:
        index, self.gates = 2 * self.gates, self.gates + 1
        assert self.page.lease is not None
        address = self.page.lease.block.device_address + 8 * index
        return Gate(self.page.array[index : index + 2], np.uint64(address))

    def launch(self, kernel: ao.Kernel, *args: Any, **options: Any) -> ao.Operation[None]:
        return self.off.launch(kernel, grid=1, block=1, args=args, **options)

    def where(self, thing: Any) -> int:
        """Which member a Buffer or an operation belongs to."""
        owner = thing.allocation.owner if isinstance(thing, ao.Buffer) else thing.owner
        return [member._engine for member in self.members].index(owner)


@asynccontextmanager
async def group(device: str, **options: Any) -> AsyncIterator[Group]:
    if device == "cuda:*" and len(labels(device)) < 2:
        pytest.skip("needs two GPUs")
    async with ao.Offload(device, **options) as off:
        await off.load(nothing, add, hold, hold_write, saxpy)
        made = Group(off, await off.pinned(64, np.uint64))
        made.page.array[:] = 0
        await off.drain()
        try:
            async with asyncio.timeout(20):
                yield made
        finally:
            made.page.array[1::2] = 1
            await off.drain()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """What the group is of."""
    return str(request.param)


def test_what_names_several() -> None:
    """A list, or a star; everything else is one device. Without a GPU there is nothing for the star."""
    assert type(ao.Offload("host")) is ao.Offload
    assert isinstance(ao.Offload("cuda:*"), OffloadGroup)
    assert isinstance(ao.Offload("cuda:0, cuda:1"), OffloadGroup)
    assert labels("cuda:0, cuda:2") == ["cuda:0", "cuda:2"]
    for wrong in ("cuda:0,", "host:*", "auto:*", "cuda:0,cuda:*"):
        with pytest.raises(ao.UsageError, match="named as in"):
            labels(wrong)


@pytest.mark.parametrize(
    ("count", "found"), [(0, None), (1, ["cuda:0"]), (3, ["cuda:0", "cuda:1", "cuda:2"])], ids=["none", "one", "three"]
)
def test_the_star_is_every_gpu(count: int, found: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands for as many as there are; where there is none, that is an error, and not the host device."""
    monkeypatch.setattr("aiooffload.drivers._count", lambda name: count)
    if found is None:
        with pytest.raises(ao.DeviceUnavailableError):
            labels("cuda:*")
    else:
        assert labels("cuda:*") == found


@pytest.mark.all_loops
async def test_work_goes_where_its_buffers_are(device: str) -> None:
    """A launch, copy, fill and get go to the device of their buffers, and a lane decides before all else."""
    async with group(device) as g:
        for index, member in enumerate(g.members):
            x, y = member.empty(1, np.uint64), member.zeros(1, np.uint64)
            ops = [
                g.off.fill(x, 3),
                g.launch(add, x, 4),
                g.off.copy(y, x),
                g.off.get(y),
                g.off.bind(add, grid=1, block=1, args=(y, 1))(),
                g.off.put(np.zeros(3), lane=member.lanes[2]),
                g.off.custom_operation(lambda lane: lane, lane=member.lanes[3]),
                g.launch(nothing, lane=member.lanes[1]),
            ]
            assert [g.where(op) for op in ops] == [index] * len(ops)
            assert (await ops[3])[0] == 7
            assert g.where(await ops[5]) == index
            assert await ops[6] is member.lanes[3]
            assert (await g.off.get(y))[0] == 8


async def test_the_rest_goes_where_the_least_is_to_do(device: str) -> None:
    """Without buffers or a lane, the device with the least work takes it; of idle ones that with the least memory."""
    async with group(device) as g:
        kept = [g.off.empty(1 << 16, np.uint8) for _ in range(2 * len(g.members))]
        assert Counter(map(g.where, kept)) == Counter(dict.fromkeys(range(len(g.members)), 2))
        busy = g.members[0]
        gate = g.gate()
        busy.launch(hold, grid=1, block=1, args=(gate.address,), lane=busy.lanes[0])
        for _ in range(9):
            busy.launch(nothing, grid=1, block=1, lane=busy.lanes[0])
        await until(lambda: gate.started)
        assert g.where(await g.off.put(np.zeros(4))) != 0
        launched = g.launch(nothing)
        assert g.where(launched) != 0
        assert g.where(g.off.host_task(_nothing)) != 0
        async with g.off.lease() as lane:
            assert lane not in busy.lanes
        gate.open()
        await launched


async def _nothing() -> None:
    """Do nothing."""


async def test_buffers_of_two_devices(device: str) -> None:
    """A launch with both is refused, and says where they are; a copy moves between them and orders both."""
    async with group(device) as g:
        one, two = g.members[:2]
        x, y = one.empty(1, np.uint64), two.zeros(1, np.uint64)
        with pytest.raises(ao.UsageError, match="copy them to one device first"):
            g.launch(saxpy, 1.0, x, y, 1)
        gate = g.gate()
        g.launch(hold_write, gate.address, x, np.uint64(5))
        copy = g.off.copy(y, x)
        late = g.launch(add, y, 10)
        assert (g.where(copy), g.where(late)) == (1, 1)
        await until(lambda: gate.started)
        await turns()
        assert not copy.done()
        gate.open()
        await late
        assert (await g.off.get(y))[0] == 15


@pytest.mark.all_loops
async def test_after_across_devices(device: str) -> None:
    """Operations of one device may stand in after= of another, which waits on the host; a failure is told by name."""
    async with group(device) as g:
        one, two = g.members[:2]
        x = two.zeros(1, np.uint64)
        gate = g.gate()
        first = one.launch(hold, grid=1, block=1, args=(gate.address,))
        second = g.launch(add, x, 2, after=[first])
        await until(lambda: gate.started)
        await turns()
        assert not second.done()
        with pytest.raises(ao.WouldBlock):
            g.launch(add, x, 2, after=[first], instant=True)
        gate.open()
        await second
        assert first.done()

        async def broken() -> None:
            raise ValueError("no")

        task = one.host_task(broken)
        with pytest.raises(ao.DependencyError, match=r"broken.*that add came after") as caught:
            await g.launch(add, x, 2, after=[task])
        assert isinstance(caught.value.root, ValueError)
        async with ao.Offload("host") as other:
            stranger = other.host_task(_nothing)
            with pytest.raises(ao.UsageError, match="belongs to another Offload"):
                g.launch(add, x, 2, after=[stranger])
            await stranger


async def test_kernels_of_each_device_call(device: str) -> None:
    """A host function is one for all of them, and knows on which device it was called."""
    async with group(device) as g:
        seen: list[ao.Operation[Any]] = []

        @g.off.host_function
        async def f(x: np.int64) -> np.int64:
            seen.append(ao.current_call().operation)
            return np.int64(2 * x)

        for member in g.members:
            value, report = member.zeros(1, np.int64), member.zeros(2, np.int32)
            await g.launch(ask, 21, value, report)
            assert (await g.off.get(value))[0] == 42
        assert [g.where(launch) for launch in seen] == list(range(len(g.members)))


async def test_what_is_a_matter_of_one_device(device: str) -> None:
    """It is asked of that one; the group refuses, with what to do."""
    async with group(device) as g:
        for call in (
            lambda: g.off.properties,
            lambda: g.off.trace("x"),
            lambda: g.off.adopt(1),
            lambda: g.off.completion(1),
            lambda: g.off.launch_graph(object()),
        ):
            with pytest.raises(ao.UsageError, match="take one of off"):
                call()
        for member in g.members:
            assert member.devices == (member,)
            await g.off.completion(member.lanes[0])
            await g.off.gate(_nothing(), lane=member.lanes[0])
            g.off.order(member.lanes[0], after=[member.launch(nothing, grid=1, block=1)])
        async with ao.Offload("host") as other:
            with pytest.raises(ao.UsageError, match="not a lane of this Offload"):
                g.launch(nothing, lane=other.lanes[0])
        assert len(g.off.lanes) == sum(len(member.lanes) for member in g.members)


async def test_draining_and_figures(device: str) -> None:
    """drain() waits for work that goes on from one device to the other; stats() adds up."""
    async with group(device) as g:
        one, two = g.members[:2]
        x = two.zeros(1, np.uint64)

        async def on() -> None:
            for _ in range(5):
                await one.launch(nothing, grid=1, block=1)
                await two.launch(add, grid=1, block=1, args=(x, 1))

        one.host_task(on)
        await g.off.drain()
        await g.off.room()
        assert (await two.get(x))[0] == 5
        stats = g.off.stats()
        assert stats["in_flight"] == stats["pending"] == 0
        assert stats["completed"] == sum(each["completed"] for each in stats["devices"])


async def test_closing_is_one(device: str) -> None:
    """It closes all of them; what comes later is refused, and so is entering twice."""
    async with group(device) as g:
        off, members = g.off, g.members
        with pytest.raises(ao.UsageError, match="entered already"):
            await off.__aenter__()
    for call in (
        lambda: off.empty(1, "f4"),
        lambda: members[1].empty(1, "f4"),
        lambda: off.launch(nothing, grid=1, block=1),
    ):
        with pytest.raises(ao.ClosedError):
            call()
    await off.aclose()
    with pytest.raises(ao.UsageError, match="not entered"):
        ao.Offload(device).empty(1, "f4")


async def test_terminating_is_one() -> None:
    """What is under way on any of them fails."""
    async with ao.Offload("host,host") as off:
        gates = [asyncio.get_running_loop().create_future() for _ in off.devices]
        held = [
            member.launch(nothing, grid=1, block=1, after=[gate])
            for member, gate in zip(off.devices, gates, strict=True)
        ]
        off.terminate()
        for op in held:
            with pytest.raises(ao.ClosedError):
                await op
        for gate in gates:
            gate.set_result(None)
        members = off.devices
    assert "terminated" in repr(off)
    for member in members:  # what a process's end does
        assert member._engine is not None
        await asyncio.to_thread(member._engine.device.close)


async def test_one_that_does_not_open() -> None:
    """Those that did are closed again, and it may be tried once more."""
    off = ao.Offload("host,nothing")
    for _ in range(2):
        with pytest.raises(ao.UsageError, match="none of"):
            await off.__aenter__()


async def test_another_thread_may_not() -> None:
    """It belongs to its loop, as any Offload does."""
    async with ao.Offload("host,host") as off:

        def elsewhere() -> None:
            for call in (lambda: off.empty(1, "f4"), lambda: off.launch(nothing, grid=1, block=1), lambda: off.stats()):
                with pytest.raises(ao.UsageError, match="event loop"):
                    call()

        await asyncio.to_thread(elsewhere)


async def test_host_function_is_registered_on_all_or_none() -> None:
    """Where one device has that name already, the others do not get it either."""
    async with ao.Offload("host,host") as g:
        first, second = g.devices

        @second.host_function
        async def f() -> int:
            return 2

        async def other() -> int:
            return 1

        with pytest.raises(ao.UsageError, match="already"):
            g.host_function(other, name="f")
        first.host_function(other, name="f")
