"""Loading kernels, planning geometries, preparing arguments."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.kernels import SpyDevice, add, nothing, rig, saxpy, shape, turns


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
    """Memory belongs to its Offload: another one's launches, copies and fills refuse it."""
    async with rig(device_label) as r, rig(device_label) as other:
        theirs, ours = other.word(1), r.word(1)
        for submit in (
            lambda: r.launch(add, theirs, 1),
            lambda: r.off.fill(theirs, 1),
            lambda: r.off.get(theirs),
            lambda: r.off.copy(ours, theirs),
            lambda: r.off.copy(theirs, ours),
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
