"""The barrier: maintenance runs while nothing of any Offload of the process is in flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.engine.maintenance import Barrier
from tests.kernels import Rig, add, nothing, rig, turns, until
from tests.reverse_kernels import ask, calling_rig, end_of


def fresh() -> ao.Kernel:
    """A kernel that nobody has loaded."""
    return ao.Kernel("nothing", cuda=nothing.cuda_source, host=nothing.host_function)


def paused(r: Rig) -> bool:
    """Whether a barrier is up."""
    assert r.off._engine is not None
    return r.off._engine.board.paused > 0


@pytest.mark.all_loops
async def test_load_waits_for_what_is_in_flight(device_label: str) -> None:
    """A load runs when what is in flight is done; what is submitted meanwhile waits on the host and then runs."""
    async with rig(device_label, lanes=2) as r:
        word = r.word(1)
        await r.off.drain()
        gate = await r.hold()
        load = asyncio.ensure_future(r.off.load(fresh()))
        await until(lambda: paused(r))
        op = r.launch(add, word, 1)
        await turns()
        assert not load.done()
        assert not op.done()
        gate.open()
        await load
        await op
        assert await r.read(word) == 2


async def test_load_waits_for_other_offloads(device_label: str) -> None:
    """A load of one Offload waits for what another has in flight, which is paused meanwhile."""
    async with rig(device_label) as r, rig(device_label) as other:
        gate = await other.hold()
        load = asyncio.ensure_future(r.off.load(fresh()))
        await until(lambda: paused(other))
        op = other.launch(nothing)
        await turns()
        assert not load.done()
        assert not op.done()
        gate.open()
        await asyncio.gather(load, op.wait())


async def test_loads_at_once(device_label: str) -> None:
    """Many loads of two Offloads at once take turns, with launches between them."""
    async with rig(device_label) as r, rig(device_label) as other:
        work = [side.launch(fresh()).wait() for side in (r, other) for _ in range(10)]
        await asyncio.gather(*work, *(side.off.load(fresh()) for side in (r, other) for _ in range(5)))


def test_two_threads_with_a_loop_each() -> None:
    """Offloads on two threads' loops load kernels between their launches without a deadlock."""

    async def main() -> int:
        async with rig() as r:
            word = r.word()
            for _ in range(10):
                for _ in range(20):
                    r.launch(add, word, 1)
                await r.launch(fresh())
            return await r.read(word)

    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(asyncio.run, main()) for _ in range(2)]
        assert [future.result(30) for future in futures] == [200, 200]


def test_idle_offload_on_a_loop_that_does_not_run() -> None:
    """An idle Offload whose loop is not running at the moment holds up nobody's load."""
    loop = asyncio.new_event_loop()
    first = rig("host", load=False)
    loop.run_until_complete(first.__aenter__())

    async def main() -> None:
        async with rig("host", load=False, limit_s=3) as r:
            await r.launch(fresh())

    try:
        asyncio.run(main())
    finally:
        loop.run_until_complete(first.__aexit__(None, None, None))
        loop.close()


def test_kernel_that_calls_on_a_loop_that_does_not_run() -> None:
    """A kernel that waits for a host function of a loop that is not running holds up nobody's load."""
    loop = asyncio.new_event_loop()
    first = calling_rig("host")

    async def begin() -> ao.Operation[None]:
        r = await first.__aenter__()
        inside = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            inside.set()
            await asyncio.Event().wait()
            return x

        op = r.launch(ask, 1, r.array(1), r.array(2, np.int32))
        await inside.wait()
        return op

    async def main() -> None:
        async with rig("host", load=False, limit_s=5) as r:
            await r.launch(fresh())

    async def end(op: ao.Operation[None]) -> None:
        op.cancel()
        assert isinstance(await end_of(op), asyncio.CancelledError)
        await first.__aexit__(None, None, None)

    op = loop.run_until_complete(begin())
    try:
        asyncio.run(main())
    finally:
        loop.run_until_complete(end(op))
        loop.close()


# The barrier by itself


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Where the calls run."""
    with ThreadPoolExecutor(1) as made:
        yield made


class Side:
    """A participant that counts."""

    def __init__(self, busy: bool = False) -> None:
        self.loop = asyncio.get_running_loop()
        self.busy = busy
        self.paused = 0
        self.idle: list[Callable[[], None]] = []

    def pause(self, idle: Callable[[], None]) -> None:
        self.paused += 1
        self.idle.append(idle)
        if not self.busy:
            self.finish()

    def finish(self) -> None:
        self.busy = False
        while self.idle:
            self.idle.pop()()

    def resume(self) -> None:
        self.paused -= 1


class CallingSide(Side):
    """One that pauses only while no kernel that calls is on a device."""

    def __init__(self, barrier: Barrier) -> None:
        super().__init__(busy=True)
        self.barrier = barrier

    def pause(self, idle: Callable[[], None]) -> None:
        super().pause(idle)
        self.settle_pauses()

    def settle_pauses(self) -> None:
        if self.paused and not self.barrier.calling:
            self.finish()


async def test_pause_waits_for_kernels_that_call(pool: ThreadPoolExecutor) -> None:
    """No pause begins before the last kernel that calls is over, on whatever loop."""
    barrier, here = Barrier(), asyncio.get_running_loop()
    barrier.join(CallingSide(barrier))
    barrier.count_calling(2, here)
    run = asyncio.ensure_future(barrier.run(lambda: 7, pool))
    await turns(5)
    barrier.count_calling(-1, here)
    await turns(5)
    assert barrier.calling == 1
    assert not run.done()
    barrier.count_calling(-1, here)
    assert await run == 7


async def test_loop_that_ends_with_a_kernel_that_calls(pool: ThreadPoolExecutor) -> None:
    """Kernels that call count while the loop runs that serves them: when it ends, a pause goes on, told or not."""
    barrier, counted, stop = Barrier(), threading.Event(), threading.Event()
    barrier.join(CallingSide(barrier))

    async def leave_one() -> None:
        barrier.count_calling(1, asyncio.get_running_loop())
        counted.set()
        await asyncio.to_thread(stop.wait)

    thread = asyncio.ensure_future(asyncio.to_thread(asyncio.run, leave_one()))
    await until(counted.is_set)
    run = asyncio.ensure_future(barrier.run(lambda: 7, pool))
    await turns(5)
    assert barrier.calling == 1
    assert not run.done()
    stop.set()
    await thread
    assert await asyncio.wait_for(run, 5) == 7
    assert barrier.calling == 0


async def test_call_runs_while_all_are_paused(pool: ThreadPoolExecutor) -> None:
    """The call starts when the last participant is idle, runs elsewhere, and all go on after it."""
    barrier, sides = Barrier(), [Side(), Side(busy=True)]
    for side in sides:
        barrier.join(side)
    seen: list[tuple[list[int], bool]] = []
    here = threading.get_ident()
    run = asyncio.ensure_future(
        barrier.run(lambda: seen.append(([s.paused for s in sides], threading.get_ident() == here)), pool)
    )
    await turns(5)
    assert seen == []
    assert [side.paused for side in sides] == [1, 1]
    sides[1].finish()
    await run
    assert seen == [([1, 1], False)]
    assert [side.paused for side in sides] == [0, 0]


async def test_outcome_is_passed_on(pool: ThreadPoolExecutor) -> None:
    """The call's value is returned and its exception raised; either way all go on."""
    barrier, side = Barrier(), Side()
    barrier.join(side)
    assert await barrier.run(lambda: 7, pool) == 7
    with pytest.raises(ZeroDivisionError):
        await barrier.run(lambda: 1 // 0, pool)
    assert side.paused == 0
    barrier.leave(side)
    side.busy = True
    assert await barrier.run(lambda: 8, pool) == 8


async def test_cancelled_while_it_waits(pool: ThreadPoolExecutor) -> None:
    """Cancelled before its turn or while others are still busy, it never calls, and the next one runs."""
    barrier, side = Barrier(), Side(busy=True)
    barrier.join(side)
    calls: list[int] = []
    runs = [asyncio.ensure_future(barrier.run(lambda i=i: calls.append(i), pool)) for i in range(3)]
    await turns(5)
    runs[1].cancel()
    runs[0].cancel()
    await turns(5)
    side.finish()
    await runs[2]
    assert calls == [2]
    assert side.paused == 0


async def test_cancelled_while_it_runs(pool: ThreadPoolExecutor) -> None:
    """Cancelled during the call, which cannot be stopped, all stay paused until it has returned."""
    barrier, side, release, started = Barrier(), Side(), threading.Event(), threading.Event()
    barrier.join(side)

    def call() -> None:
        started.set()
        release.wait(10)

    run = asyncio.ensure_future(barrier.run(call, pool))
    await until(started.is_set)
    run.cancel()
    await turns(5)
    assert side.paused == 1
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert side.paused == 0


def test_turn_of_a_loop_that_was_closed(pool: ThreadPoolExecutor) -> None:
    """A turn that nobody will take any more, since its loop was closed, is passed over for good."""
    barrier = Barrier()
    main, other = asyncio.new_event_loop(), asyncio.new_event_loop()
    release = threading.Event()
    first = main.create_task(barrier.run(lambda: release.wait(10), pool))
    main.run_until_complete(turns(5))
    stale = other.create_task(barrier.run(lambda: None, pool))
    other.run_until_complete(turns(5))
    other.close()
    second = main.create_task(barrier.run(lambda: 2, pool))
    main.run_until_complete(turns(5))
    release.set()
    try:
        main.run_until_complete(asyncio.wait_for(first, 5))
        assert main.run_until_complete(asyncio.wait_for(second, 5)) == 2
        assert main.run_until_complete(asyncio.wait_for(barrier.run(lambda: 3, pool), 5)) == 3
    finally:
        stale._log_destroy_pending = False  # type: ignore[attr-defined]
        stale.get_coro().close()  # type: ignore[union-attr]
        main.close()
