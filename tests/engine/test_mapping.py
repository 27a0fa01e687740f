"""Copies of mapped arguments: pinned blocks that are kept, and never lent twice at a time."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.api import RegisteredMemory
from aiooffload.drivers.mapped import MappedMemory
from aiooffload.engine.mapping import Arena
from aiooffload.rules.wire import MapKind
from aiooffload.testing import FaultyDevice, open_offload
from tests.kernels import rig, turns, until
from tests.reverse_kernels import TOFROM, ask, map_array


class Registering:
    """Registers memory and counts."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def __call__(self, nbytes: int) -> MappedMemory:
        self.sizes.append(nbytes)
        await asyncio.sleep(0)
        return MappedMemory(nbytes)


async def test_block_is_kept_for_the_next_call() -> None:
    """Blocks are a power of two bytes, at least a page, and one that came back is taken before any is registered."""
    registering = Registering()
    arena = Arena(registering)
    block = await arena.take(1)
    assert len(block.array) == 4096
    arena.give_back(block)
    again = await arena.take(4096)
    assert again.device_address == block.device_address
    larger = await arena.take(4097)
    assert len(larger.array) == 8192
    assert registering.sizes == [4096, 8192]


async def test_block_with_a_view_is_not_lent() -> None:
    """A host function that kept its array keeps the block from others; when it lets go, the block is free again."""
    registering = Registering()
    arena = Arena(registering)
    block = await arena.take(100)
    kept, address = block.array[10:20].view(np.uint16), block.device_address
    kept[:] = 7
    arena.give_back(block)
    del block
    other = await arena.take(100)
    assert other.device_address != address
    other.array[:] = 1
    assert (kept == 7).all()
    del kept
    assert (await arena.take(100)).device_address == address


async def test_concurrent_calls_have_blocks_of_their_own() -> None:
    """Calls at the same time share no memory."""
    arena = Arena(Registering())
    blocks = await asyncio.gather(*(arena.take(1000) for _ in range(20)))
    assert len({block.device_address for block in blocks}) == 20
    for block in blocks:
        arena.give_back(block)


async def test_arguments_come_and_go(device_label: str) -> None:
    """fetch() brings device memory to the host, read-only where nothing goes back, and copy_back() returns it."""
    async with rig(device_label, load=False) as r:
        await r.off.load(ask)
        engine = r.off._engine
        assert engine is not None
        opened = engine.reverse._opened
        assert opened is not None
        mapping = opened.mapping
        buffer = await r.off.put(np.arange(64, dtype=np.uint8))
        fetched = await mapping.fetch(
            [
                (buffer.address, 64, MapKind.TO),
                (buffer.address + 8, 8, MapKind.TOFROM),
                (buffer.address, 0, MapKind.FROM),
            ]
        )
        whole, part, empty = fetched.views
        assert whole.tolist() == list(range(64))
        assert part.tolist() == list(range(8, 16))
        assert (len(empty), whole.flags.writeable, part.flags.writeable) == (0, False, True)
        part[:] = 99
        assert whole[8] == 99  # the same memory
        await mapping.copy_back(fetched)
        mapping.release(fetched)
        expected = np.arange(64, dtype=np.uint8)
        expected[8:16] = 99
        assert np.array_equal(await r.off.get(buffer), expected)


async def test_block_comes_back_after_a_failed_fetch(device_label: str) -> None:
    """A fetch that is cancelled gives its block back, once the device no longer writes to it."""
    async with rig(device_label, load=False) as r:
        await r.off.load(ask)
        engine = r.off._engine
        assert engine is not None
        assert engine.reverse._opened is not None
        mapping = engine.reverse._opened.mapping
        buffer: ao.Buffer = r.off.zeros(1 << 16, np.uint8)
        await r.off.drain()
        fetching = asyncio.create_task(mapping.fetch([(buffer.address, 1 << 16, MapKind.TO)]))
        await asyncio.sleep(0)
        fetching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await fetching
        await r.off.drain()
        fetched = await mapping.fetch([(buffer.address, 1 << 16, MapKind.TO)])
        assert fetched.views[0].sum() == 0
        mapping.release(fetched)


async def test_block_of_a_function_that_raised(device_label: str) -> None:
    """What a function raises keeps the block of its arguments as long as it is kept itself, and no longer."""
    async with rig(device_label, load=False) as r:

        @r.off.host_function
        async def f(x: ao.InOut[np.float32]) -> None:
            raise KeyError(len(x))

        x, report = r.off.zeros(4, np.float32), r.off.zeros(2, np.int32)
        await r.off.load(map_array)
        engine = r.off._engine
        assert engine is not None
        assert engine.reverse._opened is not None
        for _ in range(10):
            op = r.off.launch(map_array, grid=1, block=1, args=(x, 4, TOFROM, report))
            with pytest.raises(ao.HostFunctionError):
                await op
            del op
        assert [len(blocks) for blocks in engine.reverse._opened.mapping._arena._free.values()] == [1]


async def test_registration_that_nobody_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was registered for somebody who was cancelled meanwhile goes to the next one."""
    async with rig("host", load=False) as r:
        engine = r.off._engine
        assert engine is not None
        go, sizes = threading.Event(), []
        register = engine.memory.register

        def slow(nbytes: int) -> RegisteredMemory:
            sizes.append(nbytes)
            go.wait(10)
            return register(nbytes)

        monkeypatch.setattr(engine.memory, "register", slow)
        waiting = asyncio.create_task(engine.register(8192))
        await until(lambda: bool(sizes))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        drain = asyncio.create_task(r.off.drain())
        await turns(5)
        assert not drain.done()  # or closing would miss it
        go.set()
        await drain
        for size in (8192, 4096, 8192):
            await engine.register(size)
        assert sizes == [8192, 4096, 8192]


async def test_end_while_memory_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for pinned memory when the Offload is terminated hears that, not of a cancellation that nobody asked
    for."""
    async with rig("host", load=False, bury=True) as r:
        engine = r.off._engine
        assert engine is not None
        begun, go = threading.Event(), threading.Event()
        register = engine.memory.register

        def slow(nbytes: int) -> RegisteredMemory:
            begun.set()
            go.wait(10)
            return register(nbytes)

        monkeypatch.setattr(engine.memory, "register", slow)

        async def late() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await r.off.pinned(100_000, np.uint8)  # nobody cancels this wait

        waiting = asyncio.create_task(late())
        await turns(2)
        waiting.cancel()
        await until(begun.is_set)
        r.off.terminate()
        with pytest.raises(ao.ClosedError):
            await waiting
        go.set()


async def test_a_loss_that_asking_for_memory_finds() -> None:
    """A device that is lost when it is asked for a mapped argument is lost for everything, and is not called again."""
    device = FaultyDevice()
    async with open_offload(device, lanes=1, calling_lanes=1) as off:

        @off.host_function(name="f")
        async def f(array: ao.InOut[np.float32]) -> None:
            raise AssertionError("it was called")

        await off.load(map_array)
        x, report = off.zeros(4, np.float32), off.zeros(2, np.int32)
        await off.drain()
        device.lose("mapped_memory", at=1)
        with pytest.raises(ao.DeviceLostError):
            await off.launch(map_array, grid=1, block=1, args=(x, 4, TOFROM, report))
        with pytest.raises(ao.DeviceLostError):
            off.empty(4, np.uint8)
    assert device.problems == []
