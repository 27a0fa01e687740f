"""A program as a user writes it, type-checked strictly by ``scripts/check`` and never run.

Each ``assert_type`` states what a user may rely on.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import aiooffload as ao

SAXPY = r"""
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""


@ao.kernel(cuda=SAXPY)
def saxpy(launch: ao.Launch, a: np.float32, x: ao.In[np.float32], y: ao.InOut[np.float32], n: np.int32) -> None:
    y[:n] += a * x[:n]


@ao.kernel
def clear(launch: ao.Launch, y: ao.InOut[np.float32]) -> None:
    y[:] = 0


@ao.kernel(calls=True)
def ask(launch: ao.Launch, y: ao.Out[np.float64]) -> None:
    pending = launch.call_async("price", 3)
    y[0] = launch.call("price", 2) + pending.wait()
    launch.call("scale", launch.tofrom(y))
    launch.post("note", 1.5)
    launch.progress(1, 1)


async def memory(off: ao.Offload, n: int) -> None:
    """Buffers in every way to get one, and what comes back."""
    buffer = await off.put(np.arange(n, dtype=np.float32))
    assert_type(buffer, ao.Buffer)
    half = off.empty((n // 2,), np.float32)
    off.copy(half, buffer[: n // 2])
    off.fill(half, np.float32(1))
    result: NDArray[Any] = await off.get(half)
    await off.get(buffer, out=result)
    half.close()
    matrix = buffer.reshape(2, n // 2)
    assert_type(matrix[:, ::2], ao.Buffer)
    assert_type(matrix[..., 0].strides, tuple[int, ...])
    off.copy(matrix[1, 1:], result[::2], extent=3)
    off.copy(matrix, result.reshape(2, -1), (1, 3))
    foreign = ao.Buffer.from_pointer(0x1000, 64, result, shape=(4, 4), dtype=np.float32, strides=(16, 4))
    print(foreign.c_contiguous)
    pinned = await off.pinned((n,), np.float32)
    pinned.array[:] = 0
    print(buffer.shape, buffer.dtype)


async def launches(off: ao.Offload, n: int) -> None:
    """Launches, dependencies, waiting and cancelling."""
    x, y = off.zeros(n, np.float32), off.zeros(n, np.float32)
    await off.load(saxpy, clear)
    first = off.launch(saxpy, grid=(n + 255) // 256, block=256, args=(2.0, x, y, n))
    assert_type(first, ao.Operation[None])
    second = off.launch(clear, grid=(1, 1, 1), block=(32, 1, 1), args=(y,), after=[first], timeout_s=5.0)
    off.launch(clear, grid=4, block=256, args=(ao.Scratch(per_thread=16),)).add_done_callback(print)
    off.launch(clear, grid=1, block=1, args=(ao.Scratch(4096),))
    async with second:
        await second
    async with asyncio.TaskGroup() as group:
        group.create_task(first.wait())
    first.add_done_callback(lambda operation: print(operation.done(), operation.cancelled(), operation.exception()))
    first.cancel()
    bound = off.bind(saxpy, grid=(n + 255) // 256, block=256, args=(2.0, x, y, n))
    assert_type(bound, ao.BoundLaunch)
    assert_type(bound(a=3.0, lane=off.lanes[0], after=[first]), ao.Operation[None])
    await bound()
    await off.room()
    await off.drain()
    print(off.stats(), first.result())


async def calls(off: ao.Offload) -> None:
    """Host functions, bare and with options, and a launch that calls them."""

    @off.host_function
    async def price(item: int) -> float:
        call = ao.current_call()
        assert call is not None
        print(call.operation, call.lane, call.device)
        return item * 1.5

    @off.host_function(batch=True, limit=4, timeout_s=1.0, on_error="collect")
    async def prices(items: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.full(items.shape, 1.5)

    @off.host_function(name="scale")
    async def anything(y: ao.InOut[np.float64]) -> None:
        y *= 2

    assert_type(await price(2), float)
    operation = off.launch(ask, grid=1, block=1, args=(off.zeros(1, np.float64),))
    async for done, total in operation.progress():
        assert_type(done, int)
        print(done, total)
    try:
        await operation
    except ao.HostFunctionError as error:
        print(error.code, error.__cause__)
    print(ao.include_dir(), prices, anything)


async def traces(off: ao.Offload) -> None:
    """A trace of what is submitted inside, into a file."""
    async with off.trace("trace.json") as trace:
        off.launch(clear, grid=1, block=1, args=(off.zeros(4, np.float32),))
    assert_type(trace.path, str)
    async with off.trace(Path("trace.json"), timeout_s=5):
        pass


async def errors(off: ao.Offload) -> str:
    """Errors by class, with what they carry."""
    try:
        await off.launch(clear, grid=1, block=1, args=(), instant=True)
    except ao.WouldBlock:
        return "later"
    except ao.DeviceLostError as error:
        return f"{error.operation} {error.status} {error.code} {error.lane} {error.suspects}"
    except ao.CompileError as error:
        return error.log
    except (ao.OutOfMemoryError, ao.OffloadTimeout, ao.UsageError) as error:
        return str(error)
    return "ok"


async def main() -> None:
    async with ao.Offload("auto", lanes=16, wake="hybrid", scratch_keep_bytes=1 << 20, allocator=None) as off:
        await memory(off, 1024)
        await launches(off, 1024)
        await calls(off)
        await traces(off)
        print(await errors(off))


if __name__ == "__main__":
    asyncio.run(main())
