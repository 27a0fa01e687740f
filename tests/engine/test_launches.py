"""Loading kernels, planning geometries, preparing arguments."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.engine.test_scratch import sum_up
from tests.kernels import Boom, Rig, SpyDevice, add, fail_at, nothing, rig, saxpy, shape, turns
from tests.reverse_kernels import silent


@pytest.mark.parametrize("grid", [1, (3,), (3, 2), (4, 3, 2), [5, 6], np.int64(7)], ids=str)
@pytest.mark.parametrize("block", [1, (32, 2), (8, 4, 2), [16]], ids=str)
async def test_geometry_reaches_the_kernel(device_label: str, grid: Any, block: Any) -> None:
    """Integers, tuples, lists and NumPy integers, of one to three dimensions."""
    async with rig(device_label) as r:
        out = r.off.zeros(6, np.uint64)
        for _ in range(2):  # the second time by the remembered plan
            await r.off.launch(shape, grid=grid, block=block, args=(out,))

        def three(value: Any) -> list[int]:
            sizes = list(value) if isinstance(value, tuple | list) else [int(value)]
            return sizes + [1] * (3 - len(sizes))

        assert (await r.off.get(out)).tolist() == three(grid) + three(block)


async def test_more_geometries_than_are_remembered(device_label: str) -> None:
    """Thousands of geometries of one kernel all run in their own."""
    async with rig(device_label) as r:
        out = r.off.zeros(6, np.uint64)
        for grid in range(1, 5000):
            r.off.launch(shape, grid=grid, block=1, args=(out,))
            if grid in (1, 4096, 4097, 4999):
                assert (await r.off.get(out))[0] == grid


async def test_first_launch_loads_the_kernel(device_label: str) -> None:
    """A launch of a kernel that is not loaded waits for the load, and those behind it for their turn."""
    async with rig(device_label, load=False) as r:
        word = r.word(1)
        ops = [r.launch(add, word, i) for i in range(300)]
        assert r.off.stats()["pending"] > 0
        await ops[-1]
        assert all(op.done() for op in ops)
        assert await r.read(word) == 1 + sum(range(300))


async def test_one_load_for_many_launches() -> None:
    """Launches and load() calls of one kernel at once share one load."""
    device = SpyDevice()
    async with rig(device, load=False) as r:
        ops = [r.launch(nothing) for _ in range(5)]
        await asyncio.gather(r.off.load(nothing), r.off.load(nothing, nothing), *(op.wait() for op in ops))
        assert (device.calls.count("compile"), device.calls.count("load")) == (1, 1)


async def test_cancelled_load_goes_on(device_label: str) -> None:
    """Cancelling one load() leaves the load to those who still wait for it."""
    async with rig(device_label, load=False) as r:
        first, second = asyncio.ensure_future(r.off.load(nothing)), asyncio.ensure_future(r.off.load(nothing))
        await turns(2)
        first.cancel()
        await second
        await r.launch(nothing, instant=True)


@pytest.mark.parametrize("error", [ao.CompileError("bad", log="line 1"), RuntimeError("broken"), OSError("disk full")])
@pytest.mark.parametrize("step", ["compile", "load"])
async def test_failed_load_fails_the_launch(error: Exception, step: str) -> None:
    """Whatever a load raises is the failure of the launches that wait for it; a later one tries again."""
    device = SpyDevice()
    async with rig(device, load=False) as r:
        device.failures[step] = error
        word = r.word(1)
        op = r.launch(add, word, 1)
        with pytest.raises(type(error)):
            await op
        with pytest.raises(type(error)):
            await r.off.load(add)
        device.failures.clear()
        r.launch(add, word, 1)
        assert await r.read(word) == 2
    error.__traceback__ = None  # the parameter outlives the test, and its frames what they hold


async def test_cancel_while_loading(device_label: str) -> None:
    """A launch that waits for its load can be cancelled; its buffers are free at once."""
    async with rig(device_label, load=False) as r:
        word = r.word(1)
        op = r.launch(add, word, 1)
        assert op.cancel()
        assert op.cancelled()
        assert await r.read(word) == 1
        r.launch(add, word, 1)
        assert await r.read(word) == 2


@pytest.mark.parametrize("late", ["load", "calls", "scratch"])
async def test_buffer_closed_before_the_arguments_are_packed(device_label: str, late: str) -> None:
    """A buffer may be closed as soon as its launch was submitted, also where that is packed when it starts."""
    async with rig(device_label) as r:
        await r.off.load(silent, sum_up)
        out, before = r.off.zeros(1, np.int32), asyncio.get_running_loop().create_future()
        if late == "load":
            unloaded = ao.Kernel("silent", cuda=silent.cuda_source, host=silent.host_function, calls=True)
            op = r.launch(unloaded, out)
        elif late == "calls":
            op = r.launch(silent, out, after=[before])
        else:
            out = r.off.zeros(2, np.uint64)
            op = r.launch(sum_up, ao.Scratch(400), out, 100, after=[before])
        found = r.off.get(out)
        out.close()
        assert op.queue is None
        before.set_result(None)
        await op
        assert (await found)[0] == (4950 if late == "scratch" else 7)


async def test_arguments_are_checked_before_the_load(device_label: str) -> None:
    """A wrong argument of a kernel that is not loaded raises at the launch."""
    async with rig(device_label, load=False) as r:
        word = r.word(1)
        for args in ((), (word,), (word, 1, 2), (word, "1"), (1, word), (word, np.float32(1))):
            with pytest.raises(ao.UsageError):
                r.launch(add, *args)
        r.launch(add, word, 1)
        assert await r.read(word) == 2


@pytest.mark.parametrize("loaded", [False, True])
async def test_kernel_without_host_implementation(loaded: bool) -> None:
    """A kernel with CUDA source alone fails on the host device with UsageError that says what to do."""
    async with rig(load=loaded) as r:
        op = r.launch(ao.Kernel("k", cuda='extern "C" __global__ void k() {}'))
        with pytest.raises(ao.UsageError, match="host implementation"):
            await op
        await r.launch(nothing)


async def test_read_only_arguments_are_read_only() -> None:
    """On the host device a kernel that writes an argument declared ao.In fails with LaunchError."""

    def body(launch: Any, x: Any) -> None:
        x[0] = 1

    body.__annotations__ = {"x": ao.In[np.uint64]}
    async with rig() as r:
        word = r.word(3)
        with pytest.raises(ao.LaunchError) as caught:
            await r.launch(ao.kernel(body), word)
        assert isinstance(caught.value.__cause__, ValueError)
        assert await r.read(word) == 3


async def test_scalars_are_converted(device_label: str) -> None:
    """Python numbers become the annotated type, in remembered launches too; NumPy scalars pass as they are."""
    async with rig(device_label) as r:
        for a in (2, 2.0, np.float32(2), np.array(2, np.float32)):
            x, y = await r.off.put(np.full(10, 3, np.float32)), r.off.zeros(10, np.float32)
            r.off.launch(saxpy, grid=1, block=32, args=(a, x, y, 10))
            assert (await r.off.get(y)).tolist() == [6] * 10


@pytest.mark.parametrize("bad", [2**64, -1, 1.5, "x", None, True + 0j])
async def test_scalars_that_do_not_fit(device_label: str, bad: Any) -> None:
    """A number that its parameter cannot hold raises UsageError at the launch."""
    async with rig(device_label) as r:
        word = r.word(1)
        with pytest.raises(ao.UsageError, match="n"):
            r.launch(add, word, bad)
        assert await r.read(word) == 1


async def test_buffer_of_another_offload_is_refused(device_label: str) -> None:
    """Memory belongs to its Offload: another one's launches, gets and fills refuse it."""
    async with rig(device_label) as r, rig(device_label) as other:
        theirs, ours = other.word(1), r.word(1)
        for submit in (
            lambda: r.launch(add, theirs, 1),
            lambda: r.off.fill(theirs, 1),
            lambda: r.off.get(theirs),
        ):
            with pytest.raises(ao.UsageError, match="another Offload"):
                submit()
        assert [await r.read(ours), await other.read(theirs)] == [1, 1]


async def test_same_buffer_twice(device_label: str) -> None:
    """A buffer may be two arguments of one launch, which does not wait for itself."""
    async with rig(device_label) as r:
        x = await r.off.put(np.ones(4, np.float32))
        await r.off.launch(saxpy, grid=1, block=32, args=(1, x, x, 4))
        assert (await r.off.get(x)).tolist() == [2] * 4


# What comes after others by name goes the launch path, too


def no_long_way(r: Rig) -> None:
    """From now on a launch that leaves the launch path fails the test."""
    assert r.off._engine is not None

    def launch(*args: Any) -> Any:
        raise AssertionError("a launch went the long way")

    r.off._engine.submission.launch = launch  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [list, tuple])
async def test_after_others_on_the_device(device_label: str, kind: Any) -> None:
    """A launch after those in flight on several lanes is ordered by the device, without the long way."""
    async with rig(device_label, lanes=4, ordering="explicit") as r:
        await r.launch(nothing)
        await r.launch(add, r.word(), 1)
        total, words = r.word(), [r.word() for _ in range(3)]
        await r.off.drain()
        gates = [await r.hold(lane) for lane in r.off.lanes[:3]]
        firsts = [r.launch(add, word, 1, lane=lane) for word, lane in zip(words, r.off.lanes[:3], strict=True)]
        no_long_way(r)
        op = r.launch(add, total, 1, after=kind(firsts))
        then = r.launch(nothing, after=kind([op, firsts[0]]))
        assert op.instant
        assert then.instant
        gates[0].open()
        gates[1].open()
        await firsts[0]
        await firsts[1]
        await turns()
        assert not op.done()
        assert not then.done()
        gates[2].open()
        await then
        assert op.finished
        assert all(first.finished for first in firsts)


async def test_chain_by_name_needs_no_event(device_label: str) -> None:
    """What comes after one operation goes to its lane."""
    async with rig(device_label, lanes=4, ordering="explicit") as r:
        await r.launch(nothing)
        gate = await r.hold(r.off.lanes[2])
        no_long_way(r)
        op = r.launch(nothing, after=[r.holds[0]])
        ops = [op := r.launch(nothing, after=[op]) for _ in range(20)]
        assert {op.lane for op in ops} == {r.off.lanes[2]}
        gate.open()
        await ops[-1]


async def test_bound_launch_after_others(device_label: str) -> None:
    """A bound launch takes ``after`` and ``lane`` on the launch path, and waits for what is on other lanes."""
    async with rig(device_label, lanes=2, ordering="explicit") as r:
        word = r.word()
        await r.off.drain()  # nothing orders the launch behind the fill
        await r.launch(add, word, 1)
        bound = r.off.bind(add, grid=1, block=1, args=(word, 1))
        gate = await r.hold(r.off.lanes[0])
        no_long_way(r)
        op = bound(after=[r.holds[0]], lane=r.off.lanes[1])
        assert op.lane is r.off.lanes[1]
        await turns()
        assert not op.done()
        gate.open()
        await op
        assert await r.read(word) == 2


async def test_after_one_that_fails_meanwhile() -> None:
    """When what it comes after fails, a launch that went straight to the device does not run."""
    async with rig(lanes=2) as r:
        await r.off.load(fail_at)
        gate, word = r.gate(), r.word(1)
        await r.launch(add, word, 1)
        first = r.launch(fail_at, gate.address, lane=r.off.lanes[0])
        no_long_way(r)
        op = r.launch(add, word, 10, after=[first])
        gate.open()
        with pytest.raises(ao.DependencyError) as caught:
            await op
        assert isinstance(caught.value.__cause__, ao.LaunchError)
        assert await r.read(word) == 2
        assert first.exception() is not None


@pytest.mark.parametrize(
    "what", ["failed", "cancelled", "held", "awaitable", "generator", "other", "nonsense", "host task", "done"]
)
async def test_after_what_the_launch_path_does_not_know(device_label: str, what: str) -> None:
    """Everything else is decided as it always was."""
    async with rig(device_label, lanes=2) as r, rig(device_label, lanes=1) as other:
        word, future = r.word(1), asyncio.get_running_loop().create_future()
        await r.launch(add, word, 1)
        done = r.launch(nothing)
        await done
        held = r.launch(nothing, after=[future])

        async def task() -> None:
            await future

        after: Any = {
            "failed": lambda: [r.off.custom_operation(refuse)],
            "cancelled": lambda: [held],
            "held": lambda: [held],
            "awaitable": lambda: [future],
            "generator": lambda: (one for one in [done]),
            "other": lambda: [other.launch(nothing)],
            "nonsense": lambda: [5],
            "host task": lambda: [r.off.host_task(task)],
            "done": lambda: [done, done],
        }[what]()
        if what == "failed":
            await turns()
            assert isinstance(await outcome(after[0]), Boom)
        if what == "cancelled":
            held.cancel()
        if what in ("other", "nonsense"):
            with pytest.raises(ao.UsageError):
                r.launch(add, word, 1, after=after)
        else:
            op = r.launch(add, word, 1, after=after)
            await turns()
            assert op.instant == (what in ("generator", "done"))
            assert op.finished or op.instant or what not in ("failed", "cancelled")
            future.set_result(None)
            failure = await outcome(op)
            assert isinstance(failure, ao.DependencyError) if what in ("failed", "cancelled") else failure is None
        if not future.done():
            future.set_result(None)
        await outcome(held)
        assert await r.read(word) == (2 if what in ("failed", "cancelled", "other", "nonsense") else 3)


def refuse(lane: ao.Lane) -> None:
    raise Boom("no")


async def outcome(operation: ao.Operation[Any]) -> BaseException | None:
    try:
        await operation
    except (Exception, asyncio.CancelledError) as error:
        return error
    return None


async def test_wait_that_the_driver_refuses() -> None:
    """The launch fails, what comes later goes on."""
    device = SpyDevice()
    async with rig(device, lanes=2, ordering="explicit") as r:
        word = r.word(1)
        await r.off.drain()  # nothing orders the launch behind the fill
        await r.launch(add, word, 1)
        await r.launch(nothing)
        gate = await r.hold(r.off.lanes[0])
        behind = r.launch(nothing, lane=r.off.lanes[0])
        bound = r.off.bind(add, grid=1, block=1, args=(word, 1))
        device.failures["enqueue_wait_event"] = ao.DriverError("no more events")
        op = bound(after=[behind], lane=r.off.lanes[1])
        device.failures.clear()
        with pytest.raises(ao.DriverError, match="no more events"):
            await op
        gate.open()
        await bound()
        assert await r.read(word) == 3
