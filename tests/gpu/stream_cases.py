"""Cases with streams, graphs and calls of other libraries, each run in a process of its own by ``test_streams.py``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import aiooffload as ao
from tests.gpu.support import Skip, Words, add, latch, library, nothing, run_as_main, spin

N = 1 << 16
ADD_ONE = """
extern "C" __global__ void add_one(float* x, int n)
{
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n)
        x[i] += 1;
}"""
add_one = ao.Kernel("add_one", cuda=ADD_ONE)


def refused(call: Callable[[], Any]) -> str:
    """Return what the UsageError says that ``call`` raises."""
    try:
        call()
    except ao.UsageError as error:
        return str(error)
    raise AssertionError("it was not refused")


def on(off: ao.Offload, lane: ao.Lane, address: int, **options: Any) -> ao.Operation[None]:
    """Add 1 to each of N floats."""
    args = (np.uint64(address), np.int32(N))
    return off.launch(add_one, grid=N // 256, block=256, args=args, lane=lane, **options)


async def torch_stream(which: str) -> dict[str, Any]:
    """A torch op, a kernel of ours and a torch op on torch's stream, with no synchronisation by the host between."""
    torch = library("torch")
    stream = torch.cuda.Stream() if which == "side" else torch.cuda.default_stream()
    async with ao.Offload("cuda:0") as off:
        await off.load(add_one)
        lane = off.adopt(stream)
        with torch.cuda.stream(stream):
            found = []
            for _ in range(20):
                x = torch.full((N,), 2.0, device="cuda")
                x *= 3
                operation = on(off, lane, x.data_ptr())
                x *= 2
                found.append(x.sum())
            sums = {float(value) for value in torch.stack(found).cpu()}
        await operation
        lane.release()
        return {"sums": sorted(sums), "instant": operation.instant, "handle": lane.handle}


async def torch_completion() -> dict[str, Any]:
    """``completion`` of a torch stream is done when torch's work is, and ``order`` holds torch's stream up."""
    torch = library("torch")
    stream = torch.cuda.Stream()
    async with ao.Offload("cuda:0") as off:
        await off.load(latch, nothing)
        words = await Words.of(off)
        with torch.cuda.stream(stream):
            x = torch.ones(N, device="cuda")
            x.fill_(1)
            x += 1  # torch loads its kernels with their first launch, which would wait for the latch
        await off.completion(stream)
        held = off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)))
        off.order(stream, after=[held])
        with torch.cuda.stream(stream):
            x.fill_(1)
            x += 1
        completion = off.completion(stream)
        await words.until(0)
        for _ in range(2000):
            await asyncio.sleep(0)
        early = completion.done() or stream.query()
        words.array[1] = 1
        await completion
        return {"early": early, "late": not stream.query(), "value": float(x[0].cpu())}


async def torch_capture() -> dict[str, Any]:
    """A stream that captures a graph is refused, when it is adopted and when it is used, and the graph is unharmed."""
    torch = library("torch")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = torch.zeros(N, device="cuda")
    async with ao.Offload("cuda:0") as off:
        await off.load(add_one, nothing)
        lane = off.adopt(stream)
        await on(off, lane, x.data_ptr())
        torch.cuda.synchronize()
        texts = []
        with torch.cuda.graph(graph, stream=stream):
            x += 10
            texts.append(refused(lambda: on(off, lane, x.data_ptr())))
            texts.append(refused(lambda: off.completion(stream)))
            lane.release()
            texts.append(refused(lambda: off.adopt(stream)))
            aside = off.launch(nothing, grid=1, block=1)
        graph.replay()
        torch.cuda.synchronize()
        await aside
        lane = off.adopt(stream)
        await on(off, lane, x.data_ptr())
        return {"texts": texts, "value": float(x[0].cpu())}


async def cupy_stream() -> dict[str, Any]:
    """CuPy's stream as a lane, and a lane as CuPy's stream."""
    cupy = library("cupy")
    async with ao.Offload("cuda:0", lanes=2) as off:
        await off.load(add_one)
        stream = cupy.cuda.Stream(non_blocking=True)
        lane = off.adopt(stream)
        with stream:
            x = cupy.full(N, 2.0, cupy.float32)
            operation = on(off, lane, x.data.ptr)
            x *= 2
            first = float(x.sum())
        await operation

        def native(lane: ao.Lane) -> Any:
            with cupy.cuda.ExternalStream(lane.handle):
                return cupy.multiply(x, 10.0)

        y = await off.custom_operation(native)
        return {"first": first, "second": float(y.sum())}


async def cublas() -> dict[str, Any]:
    """cuBLAS between two kernels on a lane, through CuPy's bindings of it."""
    library("cupy")
    from cupy_backends.cuda.libs import cublas as blas

    async with ao.Offload("cuda:0", lanes=2) as off:
        await off.load(add_one)
        handle = blas.create()
        x = await off.put(np.zeros(N, np.float32))
        y = await off.put(np.arange(N, dtype=np.float32))
        two = np.array([2.0], np.float32)

        def axpy(lane: ao.Lane) -> None:
            blas.setStream(handle, lane.handle)
            blas.saxpy(handle, N, two.ctypes.data, x.address, 1, y.address, 1)

        before = off.launch(add_one, grid=N // 256, block=256, args=(x, np.int32(N)))
        operation = off.custom_operation(axpy, after=[before])
        after = off.launch(add_one, grid=N // 256, block=256, args=(y, np.int32(N)), after=[operation])
        await after
        found = await off.get(y)
        blas.destroy(handle)
        return {"right": bool((found == np.arange(N) + 3).all()), "same lane": operation.lane is before.lane}


async def graph() -> dict[str, Any]:
    """A graph made by cuda.core, replayed and awaited, behind a kernel and before a copy."""
    from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

    device = Device(0)
    device.set_current()
    async with ao.Offload("cuda:0", lanes=2) as off:
        await off.load(add_one, spin)
        x = await off.put(np.zeros(N, np.float32))
        options = ProgramOptions(arch=f"sm_{device.arch}")
        kernel = Program(ADD_ONE, code_type="c++", options=options).compile("cubin").get_kernel("add_one")
        config = LaunchConfig(grid=N // 256, block=256)
        stream = device.create_stream()
        builder = stream.create_graph_builder()
        builder.begin_building()
        for _ in range(3):
            launch(builder, config, kernel, np.uint64(x.address), np.int32(N))
        made = builder.end_building().complete()
        first = off.launch(spin, grid=1, block=1, args=(5_000_000,))
        replay = off.launch_graph(made, after=[first], lane=first.lane)
        early = replay.done()
        instant = replay.instant
        await replay
        values = [float((await off.get(x))[5])]
        last = None
        for _ in range(10):
            last = off.launch_graph(made, after=[last] if last else ())
        await last
        values.append(float((await off.get(x))[-1]))
        wrong = [refused(partial(off.launch_graph, bad)) for bad in ("graph", None, 1.5)]
        made.close()
        return {"values": values, "early": early, "instant": instant, "wrong": wrong}


async def nccl() -> dict[str, Any]:
    """An all-reduce over two GPUs, awaited between kernels on both."""
    cupy = library("cupy")
    from cupy.cuda import nccl as lib

    if cupy.cuda.runtime.getDeviceCount() < 2:
        raise Skip("needs two GPUs")
    comms = lib.NcclCommunicator.initAll([0, 1])
    async with ao.Offload("cuda:0") as a, ao.Offload("cuda:1") as b:
        await a.load(add_one)
        await b.load(add_one)
        x = await a.put(np.full(N, 1.0, np.float32))
        y = await b.put(np.full(N, 10.0, np.float32))
        lanes = a.lanes[0], b.lanes[0]
        on(a, lanes[0], x.address)
        before = on(b, lanes[1], y.address)

        def reduce(lane: ao.Lane) -> None:
            lib.groupStart()
            comms[0].allReduce(x.address, x.address, N, lib.NCCL_FLOAT32, lib.NCCL_SUM, lane.handle)
            comms[1].allReduce(y.address, y.address, N, lib.NCCL_FLOAT32, lib.NCCL_SUM, lanes[1].handle)
            lib.groupEnd()

        assert before.instant
        await a.custom_operation(reduce, lane=lanes[0])
        await b.completion(lanes[1])
        await on(a, lanes[0], x.address)
        await on(b, lanes[1], y.address)
        found = [sorted(set((await a.get(x)).tolist())), sorted(set((await b.get(y)).tolist()))]
    for comm in comms:
        comm.destroy()
    return {"found": found}


async def foreign_context() -> dict[str, Any]:
    """A stream of another GPU's context is refused."""
    torch = library("torch")
    if torch.cuda.device_count() < 2:
        raise Skip("needs two GPUs")
    stream = torch.cuda.Stream(device=1)
    async with ao.Offload("cuda:0") as off, ao.Offload("cuda:1") as right:
        text = refused(lambda: off.adopt(stream))
        await right.load(nothing)
        await right.launch(nothing, grid=1, block=1, lane=right.adopt(stream))
        return {"text": text}


async def priorities() -> dict[str, Any]:
    """Lanes have the stream priorities that were asked for, as the driver says."""
    from cuda.bindings import driver

    async with ao.Offload("cuda:0", lanes={0: 2, -1: 1, -5: 1}) as off:
        await off.load(add)
        x = off.zeros(1, np.uint64)
        for priority in (0, -1, -5):
            await off.launch(add, grid=1, block=1, args=(x, 1), priority=priority)
        found = [int(driver.cuStreamGetPriority(lane.handle)[1]) for lane in off.lanes]
        return {"asked": [lane.priority for lane in off.lanes], "found": found, "sum": int((await off.get(x))[0])}


SAXPY = """
extern "C" __global__ void saxpy(float a, const float* x, float* y, int n)
{
    int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n)
        y[i] += a * x[i];
}"""


@ao.kernel(cuda=SAXPY)
def saxpy(launch: Any, a: np.float32, x: ao.In[np.float32], y: ao.InOut[np.float32], n: np.int32) -> None:
    """y += a x."""


async def arrays_as_arguments(name: str) -> dict[str, Any]:
    """Arrays of another library in the place of Buffers, right after its own work on them."""
    async with ao.Offload("cuda:0", lanes=2) as off:
        await off.load(saxpy)
        if name == "torch":
            torch = library("torch")
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                x = torch.arange(N, device="cuda", dtype=torch.float32)
                y = torch.full((N,), 5.0, device="cuda")
            after = [off.completion(stream)]
        elif name == "cupy":
            cupy = library("cupy")
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                x = cupy.arange(N, dtype=cupy.float32)
                y = cupy.full(N, 5.0, cupy.float32)
                after = []  # its interface names the stream that is current
                operation = off.launch(saxpy, grid=N // 256, block=256, args=(2.0, x, y, N))
            await operation
            return {"right": bool((cupy.asnumpy(y) == 5 + 2 * np.arange(N)).all())}
        else:
            cuda = library("numba.cuda")
            x = cuda.to_device(np.arange(N, dtype=np.float32))
            y = cuda.to_device(np.full(N, 5, np.float32))
            after = []
        operation = off.launch(saxpy, grid=N // 256, block=256, args=(2.0, x, y, N), after=after)
        again = off.launch(saxpy, grid=N // 256, block=256, args=(0.0, y, x, N))
        await operation
        await again
        found = y.cpu().numpy() if name == "torch" else y.copy_to_host()
        return {"right": bool((found == 5 + 2 * np.arange(N)).all())}


async def buffers_in_others(name: str) -> dict[str, Any]:
    """Our buffer as an array of another library, whose work on it waits, on the device, for ours."""
    other = library(name)
    async with ao.Offload("cuda:0", lanes=2) as off:
        await off.load(saxpy, latch)
        x, y = await off.put(np.arange(N, dtype=np.float32)), off.zeros((4, N // 4), np.float32)
        stream = other.cuda.Stream() if name == "torch" else other.cuda.Stream(non_blocking=True)
        with other.cuda.stream(stream) if name == "torch" else stream:
            warm = other.from_dlpack(off.zeros((4, N // 4), np.float32))
            (warm[1:, ::2] * 3).sum().item()  # loads its kernels, which would wait for the latch
        words = await Words.of(off)
        held = off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)))
        off.launch(saxpy, grid=N // 256, block=256, args=(2.0, x, y.reshape(N), N), after=[held])
        with other.cuda.stream(stream) if name == "torch" else stream:
            shared = other.from_dlpack(y)
            result = (shared[1:, ::2] * 3).sum()
        early = (stream.query() if name == "torch" else stream.done) is True
        words.array[1] = 1
        await off.completion(stream)
        expected = (2 * np.arange(N, dtype=np.float32).reshape(4, -1)[1:, ::2] * 3).astype(np.float64).sum()
        close = abs(float(result) - expected) / expected
        y.close()
        pointer = shared.data_ptr() if name == "torch" else shared.data.ptr
        interface = other.as_tensor(x, device="cuda") if name == "torch" else other.asarray(x)
        same = (interface.data_ptr() if name == "torch" else interface.data.ptr) == x.address
        return {"early": early, "error": close, "same": same, "pointer": pointer, "shape": list(shared.shape)}


if __name__ == "__main__":
    cases = (
        torch_stream,
        torch_completion,
        torch_capture,
        cupy_stream,
        cublas,
        graph,
        nccl,
        foreign_context,
        priorities,
        arrays_as_arguments,
        buffers_in_others,
    )
    run_as_main({case.__name__: case for case in cases})
