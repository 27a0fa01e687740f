"""The acts of a soak: each submits some work of one kind on memory of its own, and checks what comes of it.

An act may be cancelled at any point; what it has submitted goes on, and its buffers are dropped while in use.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import aiooffload as ao
from trials.kernels import ask, ask_mapped, ask_together, combine, reverse, scale_add, tell, until_stopped
from trials.world import BAD, Boom, World

Act = Callable[[World], Awaitable[None]]


# -- on the device ---------------------------------------------------------------------------


async def chains(w: World) -> None:
    """Launch a chain on two arrays, over lanes, coarse or not."""
    n = w.chance.choice((1, 33, 1000, 5000))
    a, b = w.numbers(n), w.numbers(n)
    x, y = await w.off.put(a), await w.off.put(b)
    last: list[ao.Operation[Any]] = []
    for _ in range(w.chance.randrange(1, 12)):
        k = np.uint64(w.chance.getrandbits(64))
        after = last[-1:] if w.maybe(0.3) else ()
        if w.maybe(0.5):
            last.append(w.launch(scale_add, n, x, k, 1, n, after=after, coarse=w.maybe(0.3), **w.where()))
            a = a * k + np.uint64(1)
        else:
            last.append(w.launch(combine, n, y, x, n, after=after, **w.where()))
            b = b * np.uint64(3) + a
    got_x, got_y = await asyncio.gather(w.off.get(x).wait(), w.off.get(y, **w.where()).wait())
    w.check("a chain", got_x, a)
    w.check("a chain's second array", got_y, b)


async def bound(w: World) -> None:
    """Call a bound launch many times, with changed scalars in between."""
    a = w.numbers(64)
    x = await w.off.put(a)
    call = w.off.bind(scale_add, grid=1, block=64, args=(x, 3, 1, 64))
    for i in range(w.chance.randrange(1, 40)):
        if i % 7 == 6:
            call(b=i)
            a = a * np.uint64(3) + np.uint64(i)
        else:
            call(coarse=w.maybe(0.5))
            a = a * np.uint64(3) + np.uint64(1)
    w.check("bound launches", await w.off.get(x), a)


async def first_launches(w: World) -> None:
    """Launch a kernel that may not be loaded yet: loading waits for everybody."""
    a = w.numbers(50)
    x = await w.off.put(a)
    w.launch(w.chance.choice(w.unloaded), 50, x, np.uint64(5), np.uint64(2), np.int32(50))
    w.check("a first launch", await w.off.get(x), a * np.uint64(5) + np.uint64(2))


async def scratch(w: World) -> None:
    """Launch with scratch of any size."""
    n = w.chance.choice((16, 700, 3000))
    a = w.numbers(n)
    x, y = await w.off.put(a), w.off.empty(n, np.uint64)
    for _ in range(w.chance.randrange(1, 4)):
        nbytes = 8 * n * w.chance.choice((1, 1, 2, 50))
        w.launch(reverse, n, y, x, ao.Scratch(nbytes), n, **w.where())
    w.check("scratch", await w.off.get(y), a[::-1] + np.uint64(1))


# -- copies ------------------------------------------------------------------------------------


def some_slice(w: World, length: int) -> slice:
    first = w.chance.randrange(length)
    return slice(first, w.chance.randrange(first, length) + 1, w.chance.choice((1, 1, 2, 3)))


async def copies(w: World) -> None:
    """Copy arrays of any shape and strides, in every direction."""
    shape = tuple(w.chance.choice((1, 2, 5, 17, 40)) for _ in range(w.chance.randrange(1, 4)))
    base = w.numbers(int(np.prod(shape))).reshape(shape)
    part = tuple(some_slice(w, length) for length in shape)
    x = await w.off.put(base)
    w.check("a view", await w.off.get(x[part]), base[part])
    w.check("a strided put", await w.off.get(await w.off.put(base[part])), base[part])
    y, want = w.off.zeros(shape, np.uint64), np.zeros(shape, np.uint64)
    w.off.copy(y[part], x[part], **w.where())
    want[part] = base[part]
    out = np.zeros((*shape[:-1], 2 * shape[-1]), np.uint64)[..., ::2]
    w.check("a strided get", await w.off.get(y, out=out), want)
    extent = tuple(w.chance.randrange(length + 1) for length in shape)
    back = np.zeros(shape, np.uint64)
    await w.off.copy(back, x, extent)
    corner = tuple(map(slice, extent))
    want = np.zeros(shape, np.uint64)
    want[corner] = base[corner]
    w.check("an extent", back, want)


async def large_copies(w: World) -> None:
    """Copy what is staged piece by piece, beside pinned memory."""
    host = w.numbers(w.chance.choice((40_000, 200_000, 700_000)))
    put = w.off.put(host)
    if w.maybe(0.2):
        put.cancel()
    if await w.ends(put) is not None:
        return
    x = put.result()
    out = None
    if w.maybe(0.3):
        out = await w.off.pinned(host.shape, host.dtype)
    w.check("a large copy", await w.off.get(x, out=out), host)
    w.check("a large strided copy", await w.off.get(x[1::3]), host[1::3])


async def pinned_copies(w: World) -> None:
    """Copy from and to pinned arrays, which are dropped at once."""
    a = w.numbers(w.chance.choice((8, 500, 9000)))
    pinned, back = await w.off.pinned(a.shape, a.dtype), await w.off.pinned(a.shape, a.dtype)
    pinned.array[:] = a
    x = w.off.empty(a.shape, a.dtype)
    w.off.copy(x, pinned, **w.where())
    pinned.close()
    w.check("pinned copies", await w.off.get(x, out=back), a)


async def fills(w: World) -> None:
    """Fill views of an array with values of different sizes."""
    dtype = w.chance.choice((np.uint8, np.uint16, np.uint32, np.uint64))
    x, want = w.off.zeros((30, 20), dtype), np.zeros((30, 20), dtype)
    for _ in range(w.chance.randrange(1, 4)):
        part, value = (some_slice(w, 30), some_slice(w, 20)), dtype(w.chance.randrange(256))
        w.off.fill(x[part], value, **w.where())
        want[part] = value
    w.check("fills", await w.off.get(x), want)


async def two_devices(w: World) -> None:
    """Open a second Offload on the same device, copy to and from it, and close it."""
    if w.others.locked():
        return
    a = w.numbers(3000)
    async with w.others, ao.Offload(w.device, lanes=2) as other:
        x = await w.off.put(a)
        y = other.empty(3000, np.uint64)
        w.off.copy(y, x)
        z = w.off.empty(3000, np.uint64)
        other.copy(z, y)
        w.check("copies between two Offloads", await w.off.get(z), a)


# -- the graph -----------------------------------------------------------------------------------


def resolve(future: asyncio.Future[None]) -> None:
    """Let a future be done, unless it is."""
    if not future.done():
        future.set_result(None)


async def graphs(w: World) -> None:
    """Host tasks, gates and custom operations between launches; any of them may fail."""
    a = w.numbers(40)
    x = await w.off.put(a)
    opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    fails = w.maybe(0.3)

    async def decide() -> int:
        await asyncio.sleep(0)
        if fails:
            raise Boom("a host task broke")
        return 3

    first = w.launch(scale_add, 40, x, 3, 0, 40)
    asked = w.off.host_task(decide, after=[first])
    lane = w.chance.choice(w.off.lanes)
    gate = w.off.gate(opened, lane=lane)
    behind = w.launch(scale_add, 40, x, 5, 1, 40, lane=lane)
    dependent = w.launch(scale_add, 40, x, 7, 2, 40, after=[asked, behind])
    asyncio.get_running_loop().call_later(w.chance.random() * 0.002, resolve, opened)
    want = a * np.uint64(15) + np.uint64(1)
    if await w.ends(dependent, ao.DependencyError) is None:
        want = want * np.uint64(7) + np.uint64(2)
    if (dependent.exception() is None) is fails:
        w.tally.mismatch("what came after a host task did not end as it did")
    await w.ends(asked, Boom)
    await gate
    w.check("a graph", await w.off.get(x), want)


async def custom_operations(w: World) -> None:
    """Enqueue on a lane by hand, and fail now and then after that."""
    x = await w.off.put(w.numbers(100))
    fails = w.maybe(0.3)

    def clear(lane: ao.Lane) -> int:
        lane.stream.enqueue_fill(x._address, b"\7", x.nbytes)
        if fails:
            raise Boom("a custom operation broke")
        return lane.index

    operation = w.off.custom_operation(clear, **w.where())
    failure = await w.ends(operation, Boom)
    if (failure is not None) is not fails:
        w.tally.mismatch(f"a custom operation ended with {failure!r}")
    w.check("a custom operation", await w.off.get(x), np.full(100, 0x0707070707070707, np.uint64))


async def leases(w: World) -> None:
    """Have a lane to oneself, order others' lanes, and await what is on one."""
    a = w.numbers(20)
    x = await w.off.put(a)
    async with w.off.lease() as lane:
        operation = w.launch(scale_add, 20, x, 2, 3, 20, lane=lane)
        other = w.chance.choice(w.off.lanes)
        if operation.instant:
            w.off.order(other, after=[operation])
        await w.off.completion(lane)
    w.check("a lease", await w.off.get(x, lane=other), a * np.uint64(2) + np.uint64(3))


async def traces(w: World) -> None:
    """Record some other acts, and read the file."""
    if w.tracing:
        return
    w.tracing = True
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            async with w.off.trace(path):
                await chains(w)
                await eager_calls(w)
            with path.open(encoding="utf-8") as file:
                if not json.load(file)["otherData"]["complete"]:
                    w.tally.mismatch("a trace is not complete")
    finally:
        w.tracing = False


# -- calls from kernels --------------------------------------------------------------------------


async def eager_calls(w: World) -> None:
    """Let a kernel ask; one of its questions may have no answer."""
    values = w.integers(w.chance.randrange(1, 20))
    fails = w.maybe(0.2)
    if fails:
        values[w.chance.randrange(len(values))] = BAD
    n = len(values)
    x, y = await w.off.put(values), w.off.zeros(n, np.int64)
    operation = w.off.launch(ask, grid=1, block=1, args=(x, y, n))
    if w.maybe(0.1):
        asyncio.get_running_loop().call_later(w.chance.random() * 0.001, operation.cancel)
    failure = await w.ends(operation, ao.HostFunctionError)
    if failure is None:
        w.check("calls", await w.off.get(y), values * 2 + 1)
    if failure is None and fails:
        w.tally.mismatch("a host function broke, and its launch did not fail")
    elif isinstance(failure, ao.HostFunctionError) and not fails:
        w.tally.mismatch(f"calls failed with {failure!r}")


async def batched_calls(w: World) -> None:
    """Let many threads ask at once."""
    n = w.chance.choice((1, 32, 400))
    values = w.integers(n)
    x, y = await w.off.put(values), w.off.zeros(n, np.int64)
    if await w.ends(w.launch(ask_together, n, x, y, n)) is None:
        w.check("batched calls", await w.off.get(y), values * 2 + 1)


async def mapped_calls(w: World) -> None:
    """Let a kernel show an array to the host."""
    values = w.integers(w.chance.choice((1, 64, 3000)))
    fails = w.maybe(0.2)
    if fails:
        values[0] = BAD
    x, y = await w.off.put(values), w.off.zeros(1, np.int64)
    operation = w.off.launch(ask_mapped, grid=1, block=1, args=(x, len(values), y))
    failure = await w.ends(operation, ao.HostFunctionError)
    if (failure is not None) is not fails:
        w.tally.mismatch(f"a call with an array ended with {failure!r}")
    w.check("a mapped array", await w.off.get(x), values if fails else values * 3)
    w.check("its sum", await w.off.get(y), np.array([0 if fails else values.sum()]))


async def posts(w: World) -> None:
    """Let a kernel tell something."""
    n = w.chance.randrange(1, 50)
    operation = w.off.launch(tell, grid=1, block=1, args=(n,))
    try:
        await operation
        w.check("posts", sorted(w.told[operation]), range(n))
    finally:
        operation.add_done_callback(lambda op: w.told.pop(op, None))


# -- cancels and timeouts --------------------------------------------------------------------------


async def stops(w: World) -> None:
    """Stop a kernel that runs until it is asked to."""
    y = w.off.zeros(1, np.int64)
    options: dict[str, Any] = {"timeout_s": 0.01} if w.maybe(0.3) else {}
    operation = w.off.launch(until_stopped, grid=1, block=1, args=(y,), **options)
    operation.add_done_callback(lambda op: w.told.pop(op, None))
    if not options:
        asyncio.get_running_loop().call_later(w.chance.random() * 0.01, operation.cancel)
    failure = await w.ends(operation, ao.OffloadTimeout)
    if not isinstance(failure, asyncio.CancelledError | ao.OffloadTimeout):
        w.tally.mismatch(f"a kernel that was stopped ended with {failure!r}")


async def waits_in_vain(w: World) -> None:
    """Cancel what waits on the host, or let its time pass."""
    a: NDArray[np.uint64] = w.numbers(10)
    x = await w.off.put(a)
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    late = w.launch(scale_add, 10, x, 0, 0, 10, after=[never], timeout_s=0.005)
    other = w.launch(scale_add, 10, x, 0, 0, 10, after=[never])
    other.cancel()
    failures = [await w.ends(late, ao.OffloadTimeout), await w.ends(other)]
    never.cancel()
    if [type(failure) for failure in failures] != [ao.OffloadTimeout, asyncio.CancelledError]:
        w.tally.mismatch(f"what waited in vain ended with {failures}")
    w.check("what was not run", await w.off.get(x), a)


async def abandoned_waits(w: World) -> None:
    """Cancel a wait, not the work, and look at it later."""
    a = w.numbers(30)
    x = await w.off.put(a)
    operation = w.launch(scale_add, 30, x, 9, 4, 30)
    task = asyncio.ensure_future(operation.wait())
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.wait([task])
    w.check("an abandoned wait", await w.off.get(x), a * np.uint64(9) + np.uint64(4))


ACTS: dict[Act, int] = {
    chains: 20,
    bound: 10,
    first_launches: 2,
    scratch: 8,
    copies: 20,
    large_copies: 4,
    pinned_copies: 6,
    fills: 8,
    two_devices: 1,
    graphs: 10,
    custom_operations: 6,
    leases: 4,
    traces: 1,
    eager_calls: 10,
    batched_calls: 6,
    mapped_calls: 8,
    posts: 6,
    stops: 3,
    waits_in_vain: 6,
    abandoned_waits: 6,
}
"""Each with its weight."""
