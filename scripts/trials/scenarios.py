"""The scenarios of ``scripts/faults``: each a small program, run once for every driver call that can fail in it."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiooffload as ao
from aiooffload.testing import Run, Scenario
from trials.kernels import ask, ask_mapped, ask_together, combine, reverse, scale_add, tell, until_stopped

N = 96
LARGE = 1_200_000
"""Bytes of a copy that goes through staging piece by piece, on worker threads."""
OPTIONS: dict[str, Any] = {"lanes": 2, "calling_lanes": 2, "lane_depth": 8}
DEADLINE: dict[str, Any] = {"call_timeout_s": 0.3}
"""For kernels that call: an answer that was lost ends their wait soon."""


class Boom(Exception):
    """What a scenario's own code raises."""


def numbers(count: int = N, first: int = 1) -> NDArray[np.uint64]:
    return np.arange(first, first + count, dtype=np.uint64)


def once(off: ao.Offload, kernel: ao.Kernel, *args: Any, **options: Any) -> ao.Operation[None]:
    """Launch with a thread for each of N elements."""
    return off.launch(kernel, grid=1, block=N, args=args, **options)


# -- opening ---------------------------------------------------------------------------------


async def opening(run: Run) -> None:
    """Open and close, with every call of that going wrong."""
    async with run.open(armed=True, **OPTIONS) as off:
        run.expect(run(off.get(await off.put(numbers()))), numbers())


async def opening_with_priorities(run: Run) -> None:
    """Open with lanes of two priorities and close, with nothing done."""
    async with run.open(armed=True, **OPTIONS | {"lanes": {0: 2, -1: 1}}, wake="interrupt"):
        pass


# -- launches and copies ---------------------------------------------------------------------


async def chain(run: Run) -> None:
    """Put, three launches that share buffers, get; nothing is awaited in between."""
    async with run.open(**OPTIONS) as off:
        await off.load(scale_add, combine)
        put_x, put_y = run(off.put(numbers())), run(off.put(numbers(first=5)))
        x, y = await put_x, await put_y
        steps: list[ao.Operation[Any]] = [put_x, put_y]
        steps.append(run(once(off, scale_add, x, 3, 1, N)))
        steps.append(run(once(off, combine, y, x, N)))
        steps.append(run(once(off, scale_add, y, 5, 2, N)))
        want_x = numbers() * 3 + 1
        want_y = (numbers(first=5) * 3 + want_x) * 5 + 2
        run.expect(run(off.get(x)), want_x, steps)
        run.expect(run(off.get(y)), want_y, steps)


async def two_lanes(run: Run) -> None:
    """Work that crosses lanes, with after=, coarse launches, and more of it than a lane takes."""
    async with run.open(**OPTIONS) as off:
        await off.load(scale_add)
        x, y = await off.put(numbers()), await off.put(numbers())
        first, second = off.lanes
        steps = []
        for i in range(12):
            steps.append(run(once(off, scale_add, x, 2, i, N, lane=first, coarse=i % 3 == 0)))
            steps.append(run(once(off, scale_add, y, 2, i, N, lane=second, after=steps[-1:])))
        want = numbers()
        for i in range(12):
            want = want * 2 + np.uint64(i)
        run.expect(run(off.get(x, lane=second)), want, steps)
        run.expect(run(off.get(y, lane=first)), want, steps)


async def bound(run: Run) -> None:
    """Bound launches, one with another scalar, several of them coarse."""
    async with run.open(**OPTIONS) as off:
        await off.load(scale_add)
        x = await off.put(numbers())
        twice = off.bind(scale_add, grid=1, block=N, args=(x, 2, 0, N))
        steps = [run(twice(coarse=i % 2 == 0)) for i in range(4)]
        steps.append(run(twice(b=7)))
        run.expect(run(off.get(x)), numbers() * 32 + 7, steps)


async def strided(run: Run) -> None:
    """Copies of rows, columns and boxes, which take one driver call, several, or portions of many."""
    host = np.arange(24 * 20 * 8, dtype=np.uint64).reshape(24, 20, 8)
    async with run.open(**OPTIONS) as off:
        put = run(off.put(host))
        cube = await put
        target = off.empty(host.shape, np.uint64)
        clear = run(off.fill(target, 0))
        steps: list[ao.Operation[Any]] = [put, clear, run(off.copy(target, cube, (12, 20, 8)))]
        steps.append(run(off.copy(target[12:, ::2], cube[12:, ::2])))
        want = np.zeros_like(host)
        want[:12] = host[:12]
        want[12:, ::2] = host[12:, ::2]
        run.expect(run(off.get(target)), want, steps)
        out = np.zeros((24, 20, 16), np.uint64)
        run.expect(run(off.get(cube[:, :, 1:5], out=out[:, :, 3:7])), host[:, :, 1:5], steps)


async def large(run: Run) -> None:
    """Pageable copies that are staged piece by piece, both ways, beside pinned ones."""
    host = np.arange(LARGE // 8, dtype=np.uint64)
    async with run.open(**OPTIONS) as off:
        put = run(off.put(host))
        x = await put
        pinned = await off.pinned(N, np.uint64)
        pinned.array[:] = numbers()
        small = run(off.put(pinned))
        y = await small
        run.expect(run(off.get(x)), host, [put])
        back = run(off.get(y, out=pinned))
        run.expect(back, numbers(), [small])
        run.expect(run(off.get(x[:-1:2])), host[:-1:2], [put])


async def fills(run: Run) -> None:
    """Fills: contiguous, with a pattern, of a view with gaps."""
    async with run.open(**OPTIONS) as off:
        x = off.empty((6, 16), np.uint32)
        steps = [run(off.fill(x, 7)), run(off.fill(x[:, ::2], 0x01020304)), run(off.fill(x[2:4], 0))]
        want = np.full((6, 16), 7, np.uint32)
        want[:, ::2] = 0x01020304
        want[2:4] = 0
        run.expect(run(off.get(x)), want, steps)


async def scratch(run: Run) -> None:
    """Launches with scratch that grows, so that blocks are replaced while others use them."""
    async with run.open(**OPTIONS, scratch_keep_bytes=1 << 14) as off:
        await off.load(reverse)
        x, y = await off.put(numbers()), off.zeros(N, np.uint64)
        for nbytes in (8 * N, 32 * N, 8 * N, 400 * N):
            step = run(once(off, reverse, y, x, ao.Scratch(nbytes), N))
            run.expect(run(off.get(y)), numbers()[::-1] + np.uint64(1), [step])


async def freed(run: Run) -> None:
    """Buffers that are closed while work on them is in flight, and memory that is used again."""
    async with run.open(**OPTIONS) as off:
        await off.load(scale_add, combine)
        total = await off.put(numbers())
        steps: list[ao.Operation[Any]] = []
        want = numbers()
        for i in range(5):
            put = run(off.put(numbers(first=i)))
            steps += [put, run(once(off, combine, total, await put, N))]
            (await put).close()
            want = want * 3 + numbers(first=i)
        run.expect(run(off.get(total)), want, steps)


# -- the graph -------------------------------------------------------------------------------


async def graph(run: Run) -> None:
    """A host task, a gate and a custom operation between launches, and a failure that is passed on."""
    async with run.open(**OPTIONS) as off:
        await off.load(scale_add)
        x = await off.put(numbers())
        opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def decide() -> int:
            opened.set_result(None)
            await asyncio.sleep(0)
            return 17

        async def fail() -> None:
            raise Boom("the host task broke")

        first = run(once(off, scale_add, x, 3, 0, N, lane=off.lanes[0]))
        asked = run(off.host_task(decide, after=[first]))
        run.expect(asked, 17)
        gate = run(off.gate(opened, lane=off.lanes[1], timeout_s=1), may=(ao.OffloadTimeout,))
        behind = run(once(off, scale_add, x, 2, 1, N, lane=off.lanes[1]))
        other = run(off.custom_operation(lambda lane: lane.index, after=[asked]))
        broken = run(off.host_task(fail, after=[behind]), may=(Boom,))
        run(once(off, scale_add, x, 0, 0, N, after=[broken]), may=(Boom,))
        run.expect(run(off.get(x, after=[other])), numbers() * 6 + 1, [first, gate, behind])


async def custom(run: Run) -> None:
    """Custom operations: one that enqueues, one that raises after it has, and what comes after them."""
    async with run.open(**OPTIONS) as off:
        x = await off.put(numbers())

        def clear(lane: ao.Lane) -> str:
            lane.stream.enqueue_fill(x._address, b"\0", x.nbytes)
            return "cleared"

        def broken(lane: ao.Lane) -> None:
            lane.stream.enqueue_fill(x._address, b"\1", 8)
            raise Boom("a custom operation broke")

        first = run(off.custom_operation(clear, lane=off.lanes[0]))
        run.expect(first, "cleared")
        second = run(off.custom_operation(broken, after=[first]), may=(Boom,))
        run(off.get(x, after=[second]), may=(Boom,))
        await asyncio.gather(second.wait(), return_exceptions=True)
        want = np.zeros(N, np.uint64)
        want[0] = 0x0101010101010101
        failure = second.look()
        if isinstance(failure, Boom):
            run.expect(run(off.get(x)), want, [first])


async def streams(run: Run) -> None:
    """A lane adopted from another Offload on the same device's streams, order() and completion()."""
    async with run.open(**OPTIONS) as off:
        x = await off.put(numbers())
        first = run(off.fill(x, 3, lane=off.lanes[0]))
        off.order(off.lanes[1], after=[first])
        second = run(off.custom_operation(lambda lane: lane.handle, lane=off.lanes[1]))
        run(off.completion(off.lanes[1]))
        async with off.lease() as lane:
            third = run(off.fill(x[: N // 2], 4, lane=lane))
        want = np.full(N, 3, np.uint64)
        want[: N // 2] = 4
        run.expect(run(off.get(x, after=[second])), want, [first, third])


async def traced(run: Run) -> None:
    """A chain inside a trace, which is written whatever happens."""
    with tempfile.TemporaryDirectory() as folder:
        async with run.open(**OPTIONS) as off:
            await off.load(scale_add)
            async with off.trace(Path(folder) / "trace.json", timeout_s=2):
                put = run(off.put(numbers()))
                step = run(once(off, scale_add, await put, 3, 1, N))
                run.expect(run(off.get(await put)), numbers() * 3 + 1, [put, step])


# -- calls from kernels ----------------------------------------------------------------------


def doubled(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return values * 2


async def calls(run: Run) -> None:
    """Calls that are answered in their first step, and calls whose function awaits a launch."""
    values = np.arange(6, dtype=np.int64)
    async with run.open(**OPTIONS, **DEADLINE) as off:
        other = await off.put(numbers())

        @off.host_function
        async def answer(x: int) -> int:
            if x == 3:
                await run(once(off, scale_add, other, 2, 0, N))
            return 2 * x

        await off.load(scale_add, ask)
        x, y = await off.put(values), off.zeros(6, np.int64)
        step = run(off.launch(ask, grid=1, block=1, args=(x, y, 6)), may=(ao.HostFunctionError,))
        run.expect(run(off.get(y)), doubled(values), [step])


async def batched_calls(run: Run) -> None:
    """Calls that are served together."""
    values = np.arange(N, dtype=np.int64)
    async with run.open(**OPTIONS, **DEADLINE) as off:

        @off.host_function(batch=True)
        async def batched(x: np.int64) -> np.int64:
            return doubled(x)  # type: ignore[arg-type, return-value]  # a batch: arrays

        await off.load(ask_together)
        x, y = await off.put(values), off.zeros(N, np.int64)
        step = run(once(off, ask_together, x, y, N), may=(ao.HostFunctionError,))
        run.expect(run(off.get(y)), doubled(values), [step])


async def mapped_calls(run: Run) -> None:
    """A call that maps an array in both directions."""
    values = np.arange(N, dtype=np.int64)
    async with run.open(**OPTIONS, **DEADLINE) as off:

        @off.host_function
        async def mapped(array: ao.InOut[np.int64]) -> int:
            total = int(array.sum())
            array *= 3
            return total

        await off.load(ask_mapped)
        x, y = await off.put(values), off.zeros(1, np.int64)
        step = run(once(off, ask_mapped, x, N, y), may=(ao.HostFunctionError,))
        run.expect(run(off.get(x)), values * 3, [step])
        run.expect(run(off.get(y)), [values.sum()], [step])


async def failing_calls(run: Run) -> None:
    """Host functions that raise, or take too long, beside ordinary work."""
    values = np.arange(6, dtype=np.int64)
    async with run.open(**OPTIONS, **DEADLINE) as off:

        @off.host_function(timeout_s=0.05)
        async def answer(x: int) -> int:
            if x == 2:
                await asyncio.sleep(10)
            return 2 * x

        @off.host_function
        async def mapped(array: ao.InOut[np.int64]) -> int:
            raise Boom("the host function broke")

        await off.load(scale_add, ask, ask_mapped)
        x, y = await off.put(values), off.zeros(6, np.int64)
        beside = await off.put(numbers())
        run(off.launch(ask, grid=1, block=1, args=(x, y, 6)), may=(ao.HostFunctionError,))
        run(once(off, ask_mapped, x, 6, y), may=(ao.HostFunctionError,))
        step = run(once(off, scale_add, beside, 3, 1, N))
        run.expect(run(off.get(beside)), numbers() * 3 + 1, [step])


async def posts(run: Run) -> None:
    """Posts, whose functions may return after the kernel has ended."""
    told: list[int] = []
    async with run.open(**OPTIONS, **DEADLINE) as off:

        @off.host_function(name="told")
        async def note(x: int) -> None:
            await asyncio.sleep(0)
            told.append(x)

        await off.load(tell)
        step = run(off.launch(tell, grid=1, block=1, args=(5,)), may=(ao.HostFunctionError,))
        await asyncio.gather(step.wait(), return_exceptions=True)
        if step.failure is None:
            assert sorted(told) == list(range(5)), told


# -- the end ---------------------------------------------------------------------------------


async def cancelled(run: Run) -> None:
    """Cancels: of what waits on the host, of a kernel that runs, of a copy under way, of a wait alone."""
    cancel = (asyncio.CancelledError,)
    async with run.open(**OPTIONS, **DEADLINE) as off:
        started = asyncio.Event()

        @off.host_function(name="told")
        async def note(x: int) -> None:
            started.set()

        await off.load(scale_add, until_stopped)
        x, y = await off.put(numbers()), off.zeros(1, np.int64)
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = run(once(off, scale_add, x, 2, 0, N, after=[never]), may=cancel)
        running = run(off.launch(until_stopped, grid=1, block=1, args=(y,)), may=(*cancel, ao.HostFunctionError))
        copying = run(off.put(np.zeros(LARGE, np.uint8)), may=cancel)
        task = asyncio.ensure_future(running.wait())
        start = asyncio.ensure_future(started.wait())
        await asyncio.wait([task, start], return_when=asyncio.FIRST_COMPLETED)
        for one in (task, start):
            one.cancel()
        await asyncio.gather(task, start, return_exceptions=True)
        for operation in (waiting, running, copying):
            operation.cancel()
        await run.settle()
        never.cancel()
        run.expect(run(off.get(x)), numbers())


async def closing(run: Run) -> None:
    """Leave with everything still under way: launches that wait, copies, a host task, a call."""
    async with run.open(**OPTIONS, **DEADLINE) as off:

        @off.host_function
        async def answer(x: int) -> int:
            await asyncio.sleep(0.001)
            return x

        await off.load(scale_add, ask)
        x = await off.put(numbers())
        values = await off.put(np.arange(3, dtype=np.int64))
        for i in range(20):
            run(once(off, scale_add, x, 3, i, N))
        run(off.put(np.zeros(LARGE, np.uint8)))
        run(off.launch(ask, grid=1, block=1, args=(values, off.zeros(3, np.int64), 3)), may=(ao.HostFunctionError,))
        run(off.host_task(a_moment))


async def a_moment() -> None:
    await asyncio.sleep(0.001)


async def terminated(run: Run) -> None:
    """End it at once with work under way."""
    closed = (ao.ClosedError,)
    async with run.open(**OPTIONS) as off:
        await off.load(scale_add)
        x = await off.put(numbers())
        for i in range(12):
            run(once(off, scale_add, x, 3, i, N), may=closed)
        run(off.put(np.zeros(LARGE, np.uint8)), may=closed)
        await asyncio.sleep(0)
        off.terminate()


SCENARIOS: tuple[Scenario, ...] = (
    opening,
    opening_with_priorities,
    chain,
    two_lanes,
    bound,
    strided,
    large,
    fills,
    scratch,
    freed,
    graph,
    custom,
    streams,
    traced,
    calls,
    batched_calls,
    mapped_calls,
    failing_calls,
    posts,
    cancelled,
    closing,
    terminated,
)
CALLING: tuple[Scenario, ...] = (calls, batched_calls, mapped_calls, failing_calls, closing)
"""Those whose kernels wait for what they ask, and so can tell that a request was lost."""
BY_EVENTS: tuple[Scenario, ...] = (opening, chain, two_lanes, graph, traced, calls, cancelled, closing)
"""Those that also run where streams cannot write words."""
