"""Scratch: it arrives as asked for, stays with its lane, is never two launches' at a time, and goes when it should."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from aiooffload.engine.memory import Memory, Returns
from aiooffload.engine.scratch import IDLE_S, NOWHERE, ScratchCache, layout
from aiooffload.rules.scratch import aligned
from tests.kernels import Boom, Rig, SpyDevice, hold, rig, turns, until
from tests.reverse_kernels import calling_rig

MIB = 1 << 20


@ao.kernel(
    cuda="""extern "C" __global__ void sum_up(unsigned* work, unsigned long long* out, int n) {
        for (int i = 0; i < n; i++) work[i] = i;
        out[0] = 0;
        for (int i = 0; i < n; i++) out[0] += work[i];
        out[1] = (unsigned long long)work;
    }"""
)
def sum_up(launch: Any, work: ao.InOut[np.uint32], out: ao.Out[np.uint64], n: np.int32) -> None:
    assert work.dtype == np.uint32
    assert work.shape == (n,)
    work[:] = range(n)
    out[:2] = work.sum(), work.ctypes.data


@ao.kernel(
    cuda="""extern "C" __global__ void addresses(unsigned long long* out, void* a, void* b, void* c) {
        out[0] = (unsigned long long)a, out[1] = (unsigned long long)b, out[2] = (unsigned long long)c;
    }"""
)
def addresses(launch: Any, out, a, b, c) -> None:  # type: ignore[no-untyped-def]
    """Without annotations: scratch comes as bytes."""
    assert {a.dtype, b.dtype, c.dtype} == {np.dtype(np.uint8)}
    out[:3] = [x.ctypes.data for x in (a, b, c)]


@ao.kernel(
    cuda="""extern "C" __global__ void fill_up(unsigned char* work, unsigned long long n) {
        if (n) work[0] = work[n - 1] = 1;
    }"""
)
def fill_up(launch: Any, work: ao.InOut[np.uint8], n: np.uint64) -> None:
    work[:] = 1


@ao.kernel(
    cuda="""#include <aiooffload.cuh>
    extern "C" __global__ void ask_scratch(ao::Launch launch, long long* work, long long* out) {
        work[0] = 20;
        launch.call(ao::fn("twice"), work[1], work[0]);
        out[0] = work[0] + work[1];
    }""",
    calls=True,
)
def ask_scratch(launch: Any, work: ao.InOut[np.int64], out: ao.Out[np.int64]) -> None:
    work[0] = 20
    work[1] = launch.call("twice", int(work[0]))
    out[0] = work[0] + work[1]


KERNELS = (sum_up, addresses, fill_up)


def cache_of(r: Any) -> ScratchCache:
    engine = r.off._engine
    assert engine is not None
    return engine.scratch


def use(r: Rig, nbytes: int, **options: Any) -> ao.Operation[None]:
    """Launch something that writes all of its scratch."""
    return r.launch(fill_up, ao.Scratch(nbytes), nbytes, **options)


# What a kernel gets.


@pytest.mark.parametrize("loaded", [True, False])
async def test_scratch_arrives(device_label: str, loaded: bool) -> None:
    """A kernel gets as much as was asked for, aligned, of its dtype on the host; the first launch loads it."""
    async with rig(device_label) as r:
        if loaded:
            await r.off.load(sum_up)
        out = r.off.zeros(2, np.uint64)
        for n in (1000, 3, 70_000):
            await r.launch(sum_up, ao.Scratch(4 * n), out, n)
            total, address = map(int, await r.off.get(out))
            assert total == n * (n - 1) // 2
            assert address % 256 == 0


async def test_several_are_disjoint(device_label: str) -> None:
    """The pieces of one launch do not overlap; each is aligned."""
    async with rig(device_label) as r:
        out = r.off.zeros(3, np.uint64)
        await r.launch(addresses, out, ao.Scratch(1000), ao.Scratch(1), ao.Scratch(300))
        first, second, last = map(int, await r.off.get(out))
        assert first + 1000 <= second < last
        assert {first % 256, second % 256, last % 256} == {0}


async def test_nothing_asked_for(device_label: str) -> None:
    """Scratch of no bytes is legal, alone and where nothing is kept."""
    async with rig(device_label, scratch_keep_bytes=0) as r:
        for _ in range(3):
            await use(r, 0)


async def test_per_thread(device_label: str) -> None:
    """A size per thread counts all threads of the grid, in all dimensions."""
    async with rig(device_label) as r:
        out = r.off.zeros(3, np.uint64)
        args = (out, ao.Scratch(per_thread=100), ao.Scratch(1), ao.Scratch(1))
        await r.off.launch(addresses, grid=(2, 3), block=(4, 1, 5), args=args)
        first, second, _ = map(int, await r.off.get(out))
        assert second - first == aligned(100 * 2 * 3 * 4 * 5)


async def test_kernel_that_calls(device_label: str) -> None:
    """A kernel that calls takes scratch as any other."""
    async with calling_rig(device_label) as r:

        @r.off.host_function
        async def twice(x: int) -> int:
            return 2 * x

        out = r.off.zeros(1, np.int64)
        for _ in range(3):
            await r.off.launch(ask_scratch, grid=1, block=1, args=(ao.Scratch(16), out))
            with pytest.raises(ao.OutOfMemoryError):
                await r.off.launch(ask_scratch, grid=1, block=1, args=(ao.Scratch(2**62), out))
        assert (await r.off.get(out))[0] == 60
        assert r.off.stats()["scratch"]["blocks"] <= 3


@pytest.mark.parametrize("loaded", [True, False])
async def test_refused(device_label: str, loaded: bool) -> None:
    """Scratch for a scalar, or of a size that is no array of the dtype, raises at submission and takes nothing."""
    async with rig(device_label) as r:
        if loaded:
            await r.off.load(sum_up)
            await use(r, 10)
        out, before = r.off.zeros(2, np.uint64), r.off.stats()["scratch"]
        for args, text in (
            ((ao.Scratch(4), out, ao.Scratch(4)), "scalar of int32, not a Scratch"),
            ((ao.Scratch(10), out, 1), "no array of uint32"),
            ((ao.Scratch(4), out), "takes 3 arguments"),
        ):
            with pytest.raises(ao.UsageError, match=text):
                r.launch(sum_up, *args)
        assert r.off.stats()["pending"] == 0
        assert r.off.stats()["scratch"] == before


@pytest.mark.gpu
async def test_scalar_without_annotation_is_refused() -> None:
    """Where a GPU's kernel takes four bytes, the size of the parameter says that it is no pointer."""
    kernel = ao.Kernel("narrow", cuda='extern "C" __global__ void narrow(int x) {}')
    async with rig("cuda:0", load=False) as r:
        await r.off.load(kernel)
        with pytest.raises(ao.UsageError, match="8 bytes"):
            r.launch(kernel, ao.Scratch(100))


def test_layout_needs_no_device() -> None:
    """What has no Scratch is not looked at; what has some is laid out in order."""
    assert layout(fill_up, (NOWHERE, 1), 1, 1) is None
    wanted = layout(addresses, (0, ao.Scratch(1), 0, ao.Scratch(per_thread=3)), 10, (2, 2))
    assert wanted is not None
    assert [(piece.argument, piece.offset, piece.length) for piece in wanted.pieces] == [(1, 0, 1), (3, 256, 120)]
    assert wanted.nbytes == 256 + 120
    assert wanted.fill([0, 1, 2, 3], None) == [0, NOWHERE, 2, NOWHERE]


# Whose it is, and for how long.


async def test_launches_on_a_lane_share_the_block(device_label: str) -> None:
    """Launches behind each other use one block without waiting; another lane has another one."""
    async with rig(device_label, lanes=2) as r:
        await r.off.load(*KERNELS)
        gates = await r.hold_all()
        outs = [r.off.empty(3, np.uint64) for _ in range(4)]
        for out, nbytes, lane in zip(outs, [5000, 3000, 0, 4000], [0, 0, 0, 1], strict=True):
            args = (out, ao.Scratch(nbytes), ao.Scratch(0), ao.Scratch(0))
            r.launch(addresses, *args, lane=r.off.lanes[lane])
        await turns()
        stats = r.off.stats()["scratch"]
        assert (stats["blocks"], stats["allocations"], stats["reuses"], stats["kept_bytes"]) == (2, 2, 2, 0)
        for gate in gates:
            gate.open()
        first, second, _, other = [int((await r.off.get(out))[0]) for out in outs]
        assert first == second
        assert abs(other - first) >= 4000
        await until(lambda: r.off.stats()["scratch"]["kept_bytes"] == 5120 + 4096)


async def test_outgrown_block_lives_until_its_launches_are_done() -> None:
    """A block that is too small goes when those that use it are done, not when its successor comes."""
    device = SpyDevice(HostDevice(poison=True))
    async with rig(device, lanes=1) as r:
        await r.off.load(*KERNELS)
        gate = await r.hold()
        small, large = use(r, 1000), use(r, 10_000)
        await turns()
        assert r.off.stats()["scratch"]["blocks"] == 2
        assert "free" not in device.calls
        gate.open()
        await small
        await large
        await until(lambda: r.off.stats()["scratch"]["blocks"] == 1)
        assert device.calls.count("free") == 1


@pytest.mark.parametrize("words", [True, False])
async def test_nothing_is_allocated_after_warm_up(words: bool) -> None:
    """Mixed sizes below the bound, awaited or not, on all lanes: the driver allocates nothing any more.

    However completions are seen: by words or by events.
    """
    device, sizes = SpyDevice(HostDevice(memory_operations=words)), [1, 100_000, 5000, 70_000, 0, 300]
    async with rig(device, lanes=4) as r:
        await r.off.load(*KERNELS)
        for lane in r.off.lanes:
            await use(r, max(sizes), lane=lane)
        device.calls.clear()
        for _ in range(10):
            for nbytes in sizes:
                use(r, nbytes)
                await use(r, nbytes)
        await r.off.drain()
        assert "enqueue_kernel" in device.calls
        assert {"allocate", "free"}.isdisjoint(device.calls)


@pytest.mark.parametrize("keep", [0, 2048])
async def test_large_blocks_are_not_kept(device_label: str, keep: int) -> None:
    """A block above the bound is shared while it is in use, goes then, and leaves the lane's kept one alone."""
    async with rig(device_label, lanes=1, scratch_keep_bytes=keep) as r:
        await r.off.load(*KERNELS)
        before = r.off.stats()["allocated_bytes"]
        await use(r, 2048)
        assert r.off.stats()["scratch"]["kept_bytes"] == keep
        gate = await r.hold()
        ops = [use(r, 100_000) for _ in range(5)]
        assert r.off.stats()["scratch"]["blocks"] == 1 + bool(keep)
        gate.open()
        for op in ops:
            await op
        await until(lambda: r.off.stats()["allocated_bytes"] == before + keep)


async def test_cancelled_launch_takes_none(device_label: str) -> None:
    """A launch that ends on the host has no block; what it stood behind is none the worse."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.off.load(*KERNELS)
        await r.hold()
        op = use(r, 1000)
        assert op.cancel()
        assert r.off.stats()["scratch"]["blocks"] == 0


async def test_refused_launch_gives_it_back() -> None:
    """A launch that the driver refuses fails, and its block is the next one's."""
    device = SpyDevice()
    async with rig(device, lanes=1) as r:
        await r.off.load(*KERNELS)
        device.failures["enqueue_kernel"] = ao.LaunchError("not so", operation="enqueue_kernel")
        with pytest.raises(ao.LaunchError):
            await use(r, 1000)
        device.failures.clear()
        await until(lambda: r.off.stats()["scratch"]["kept_bytes"])
        await use(r, 1000)
        assert r.off.stats()["scratch"]["allocations"] == 1


async def test_failed_kernel_gives_it_back() -> None:
    """A kernel that raises gives its scratch back, and its traceback does not keep the block in use."""

    @ao.kernel
    def broken(launch: Any, work: ao.InOut[np.uint8]) -> None:
        raise KeyError(len(work))

    async with rig(lanes=1) as r:
        for _ in range(3):
            with pytest.raises(ao.LaunchError, match="1000"):
                await r.launch(broken, ao.Scratch(1000))
        await until(lambda: r.off.stats()["scratch"]["kept_bytes"] == 1024)


async def test_refused_submission_keeps_nothing(device_label: str, no_collector: None) -> None:
    """A launch that was not taken lets go of its other arguments at once, without a collection."""
    async with rig(device_label, lanes=1, lane_depth=1, max_pending=1) as r:
        await r.off.load(*KERNELS)
        await r.hold()
        waiting = r.launch(hold, r.gate().address)
        out, before = r.off.empty(3, np.uint64), r.off.stats()["buffers"]
        with pytest.raises(ao.WouldBlock):
            r.launch(addresses, out, ao.Scratch(1), ao.Scratch(1), ao.Scratch(1))
        del out
        assert r.off.stats()["buffers"] == before - 1
        assert waiting.cancel()


# When memory runs out.


async def test_kept_blocks_make_room_for_others() -> None:
    """A full device drops what no launch uses and tries again, for a Buffer and for scratch; what is in use stays."""
    async with rig(HostDevice(memory_limit=80_000, poison=True), lanes=2, load=False) as r:
        await r.off.load(*KERNELS, hold)
        for lane in r.off.lanes:
            await use(r, 4000, lane=lane)
        assert r.off.stats()["scratch"]["kept_bytes"] == 8192
        gate = await r.hold(r.off.lanes[0])
        op = use(r, 4000, lane=r.off.lanes[0])
        r.off.empty(75_000, np.uint8).close()
        assert r.off.stats()["scratch"]["blocks"] == 1
        gate.open()
        await op
        await until(lambda: r.off.stats()["scratch"]["kept_bytes"])
        await use(r, 72_000, lane=r.off.lanes[1])
        assert r.off.stats()["allocated_bytes"] == 0


async def test_launch_without_memory_fails_and_the_next_works(device_label: str) -> None:
    """A launch that cannot get its scratch ends with OutOfMemoryError; others on its lane go on."""
    async with rig(device_label, lanes=1) as r:
        await r.off.load(*KERNELS)
        gate = await r.hold()
        before = use(r, 1000)
        op, after = use(r, 2**62), use(r, 900)
        gate.open()
        with pytest.raises(ao.OutOfMemoryError):
            await op
        await before
        await after
        with pytest.raises(ao.OutOfMemoryError):
            await r.launch(fill_up, ao.Scratch(2**70), 1)
        assert r.off.stats()["scratch"]["blocks"] == 1


# Time.


class FakeLoop:
    """Notes timers, which the test fires."""

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.cancelled = 0

    def is_closed(self) -> bool:
        return False

    def call_later(self, delay_s: float, call: Callable[[], None]) -> FakeLoop:
        self.timers.append((delay_s, call))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

    def fire(self) -> None:
        self.timers.pop(0)[1]()


class Handles:
    """An operation, as far as scratch goes."""

    def __init__(self, lane: int) -> None:
        self.lane = type("Lane", (), {"index": lane})
        self.calling = 0
        self.keep: object = None


def test_idle_blocks_go_after_a_while() -> None:
    """One timer, armed only while something is idle, frees what was idle long enough; used again, it stays longer."""
    loop, now, device = FakeLoop(), [0.0], HostDevice()
    memory = Memory(device, loop, None, lambda error: None)  # type: ignore[arg-type]
    cache = ScratchCache(memory, loop, None, MIB, MIB, lambda: int(now[0] * 1e9))  # type: ignore[arg-type]
    wanted = layout(fill_up, (ao.Scratch(1000), 1), 1, 1)
    assert wanted is not None

    def run(lane: int) -> None:
        operation: Any = Handles(lane)
        cache.fill(operation, wanted, (None, 1))
        assert len(loop.timers) <= 1
        operation.keep = None

    run(0)
    assert [delay for delay, _ in loop.timers] == [IDLE_S]
    now[0] = 2
    run(1)
    now[0] = 3
    run(0)
    assert len(loop.timers) == 1
    now[0] = IDLE_S
    loop.fire()
    assert cache.blocks == 2
    assert [delay for delay, _ in loop.timers] == [2]
    now[0] = 2 + IDLE_S
    loop.fire()
    assert cache.blocks == 1
    assert [delay for delay, _ in loop.timers] == [1]
    now[0] = 3 + IDLE_S
    loop.fire()
    assert (cache.blocks, memory.allocated_bytes, loop.timers) == (0, 0, [])
    run(0)
    assert len(loop.timers) == 1
    cache.stop()
    assert loop.cancelled == 1
    assert memory.close() == []
    assert memory.allocated_bytes == 0


async def test_idle_offload_has_no_timer(device_label: str) -> None:
    """Nothing is armed before scratch was used, and again once none is kept."""
    async with rig(device_label, scratch_keep_bytes=1000) as r:
        cache = cache_of(r)
        await use(r, 2000)
        await until(lambda: not cache.blocks)
        assert cache._timer is None
        await use(r, 1000)
        await until(lambda: cache._timer is not None)
        cache._give_up()
        cache._expire()
        assert cache._timer is None


# The end.


async def test_close_frees_everything() -> None:
    """Closing frees what is kept, and its timer goes."""
    device = SpyDevice(HostDevice(memory_limit=10 * MIB))
    async with rig(device) as r:
        for lane in r.off.lanes:
            await use(r, 10_000, lane=lane)
        cache = cache_of(r)
        assert cache._timer is not None
    assert (
        device.calls.count("allocate")
        == device.calls.count("free")
        == len(device.calls)
        - sum(name not in ("allocate", "free") for name in device.calls)
        - device.calls.count("free")
    )
    assert device.memory_info()[0] == 10 * MIB
    assert cache._timer is None


@pytest.mark.parametrize("end", ["lost", "terminated"])
async def test_nothing_is_freed_after_a_loss(end: str) -> None:
    """Once the device is gone, or the Offload was terminated, no block is freed by a call, whoever lets go of it."""
    device = SpyDevice()
    async with rig(device, lanes=1, bury=True) as r:
        await r.off.load(*KERNELS)
        await use(r, 1000)
        await r.hold()
        small, large = use(r, 1000), use(r, 2000)
        await turns()
        device.calls.clear()
        if end == "lost":
            device.lost = True
            with pytest.raises(ao.DeviceLostError):
                await large
        else:
            r.off.terminate()
        for op in (small, large):
            assert isinstance(op.exception(), ao.DeviceLostError | ao.ClosedError)
        del small, large, op
        gc.collect()
        await turns()
        assert cache_of(r)._timer is None
        assert "free" not in device.calls
        assert "allocate" not in device.calls


async def test_loss_while_freeing_is_the_launch_s_failure() -> None:
    """A block that cannot be freed because the device is gone ends the launch that made room for itself."""
    device = SpyDevice()
    async with rig(device, lanes=1, bury=True) as r:
        await r.off.load(*KERNELS)
        await use(r, 1000)
        device.failures["free"] = ao.DeviceLostError("gone", operation="free")
        device.calls.clear()
        op = use(r, 5000)
        assert isinstance(op.exception(), ao.DeviceLostError)
        assert device.calls.count("allocate") == 0


async def test_loss_while_making_room_calls_the_driver_no_more() -> None:
    """Where freeing what is kept finds that the device is gone, the allocation is not tried again."""
    device = SpyDevice(HostDevice(memory_limit=10_000))
    async with rig(device, lanes=1, load=False, bury=True) as r:
        await use(r, 1000)
        device.failures["free"] = ao.DeviceLostError("gone", operation="free")
        device.calls.clear()
        with pytest.raises(ao.DeviceLostError):
            r.off.empty(9500, np.uint8)
        assert device.calls == ["allocate", "free"]


async def test_many_launches_leak_nothing() -> None:
    """Ten thousand launches of random sizes on random lanes, some large: what is left is what may be kept."""
    device, dice = SpyDevice(HostDevice(memory_limit=64 * MIB)), random.Random(1)
    async with rig(device, lanes=5, scratch_keep_bytes=32_768, limit_s=30) as r:
        await r.off.load(*KERNELS)
        before = r.off.stats()["allocated_bytes"]
        for number in range(10_000):
            op = use(r, dice.choice((0, 100, 20_000, 32_768, 40_000)) * dice.randrange(2) + dice.randrange(256),
                     lane=dice.choice(r.off.lanes))  # fmt: skip
            if number % 50 == 0:
                await op
        await r.off.drain()
        await until(lambda: r.off.stats()["scratch"]["kept_bytes"] == r.off.stats()["allocated_bytes"] - before)
        stats = r.off.stats()["scratch"]
        assert 1 <= stats["blocks"] <= 5
        assert stats["kept_bytes"] <= 5 * 32_768
        assert stats["reuses"] + stats["allocations"] == 10_000
        assert r.off.stats()["buffers"] == 0
    assert device.calls.count("allocate") == device.calls.count("free")


# What gives back.


async def test_returns_takes_on_its_own_thread() -> None:
    """What is given on another thread is taken on the loop's, once."""
    loop, threads = asyncio.get_running_loop(), []
    returns: Returns[int] = Returns(loop, lambda item: threads.append((item, threading.get_ident())))
    thread = threading.Thread(target=returns.give, args=(1,))
    thread.start()
    await until(lambda: threads)
    thread.join()
    assert threads == [(1, threading.get_ident())]


async def test_returns_waits_for_its_owner() -> None:
    """What comes back while the owner is at work, or while something is taken, is taken after that."""
    taken: list[int] = []

    def take(item: int) -> None:
        if item == 1:
            returns.give(2)
            assert taken == []
        taken.append(item)

    returns: Returns[int] = Returns(asyncio.get_running_loop(), take)
    with returns:
        returns.give(1)
        with returns:
            assert taken == []
        assert taken == []
    assert taken == [1, 2]
    returns.stop()
    returns.give(3)
    assert taken == [1, 2]


async def test_returns_goes_on_after_a_failure() -> None:
    """What fails to be taken is told; what comes back later is taken."""
    taken: list[int] = []

    def take(item: int) -> None:
        if item == 1:
            raise Boom
        taken.append(item)

    returns: Returns[int] = Returns(asyncio.get_running_loop(), take)
    with pytest.raises(Boom):
        returns.give(1)
    returns.give(2)
    assert taken == [2]
