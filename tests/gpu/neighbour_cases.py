"""Cases with other CUDA libraries in the process, each run in one of its own by ``test_neighbours.py``."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import aiooffload as ao
from tests.gpu.support import Words, add, latch, library, nothing, on_thread, run_as_main, spin, until
from tests.reverse_kernels import ask, calling_rig

BUSY_NS = 100_000_000


async def settle(off: ao.Offload) -> None:
    """Return once nothing is in flight and no wait is armed: what the Offload leaves on the device is what it has."""
    await off.drain()
    engine = off._engine
    assert engine is not None
    await until(lambda: not engine.completion.armed, "the monitor is off the device")


async def busy_round(off: ao.Offload, launches: int = 200) -> int:
    """Run launches, copies and fills over all lanes, and return how many adds arrived."""
    x = off.zeros(1, np.uint64)
    assert int((await off.get(x))[0]) == 0
    ops = [off.launch(add, grid=1, block=1, args=(x, 1)) for _ in range(launches)]
    await ops[-1]
    found = int((await off.get(x))[0])
    data = np.arange(200_000, dtype=np.float32)
    assert (await off.get(await off.put(data)) == data).all()
    return found


def torch_calls(torch: Any) -> dict[str, Callable[[], Any]]:
    """Calls of torch that wait for the device, or load their kernels when they are first made."""

    def item() -> None:
        assert torch.full((1,), 3.0, device="cuda").item() == 3.0

    def matmul() -> None:
        ones = torch.ones(64, 64, device="cuda")
        assert (ones @ ones).cpu()[0, 0] == 64.0

    return {
        "synchronize": torch.cuda.synchronize,
        "item": item,
        "matmul": matmul,
        "empty_cache": torch.cuda.empty_cache,
        "synchronize again": torch.cuda.synchronize,
    }


async def torch_idle(wake: Any) -> dict[str, Any]:
    """Make torch's calls while the Offload is open and idle, right after it was busy and slept on the monitor."""
    torch = library("torch")
    async with ao.Offload("cuda:0", wake=wake) as off:
        await off.load(nothing, add, spin)
        # Long enough that every policy that arms the monitor has armed it.
        await asyncio.gather(*(off.launch(spin, grid=1, block=1, args=(5_000_000,)).wait() for _ in range(4)))
        await busy_round(off)
        await settle(off)
        armings = off.stats()["armings"]
        seconds = {name: await on_thread(call) for name, call in torch_calls(torch).items()}
        still = off.stats()["armings"]
        return {
            "seconds": seconds,
            "armings": armings,
            "armed_meanwhile": still - armings,
            "sum": await busy_round(off),
        }


async def torch_blocked() -> dict[str, Any]:
    """The other side of ``torch_idle``: with a wait on the device, the same calls really wait."""
    torch = library("torch")
    async with ao.Offload("cuda:0", lanes=2) as off:
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        words = await Words.of(off)
        held = off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)))
        await words.until(0)
        call = asyncio.ensure_future(on_thread(torch.cuda.synchronize))
        for _ in range(20_000):
            await asyncio.sleep(0)
        returned = call.done()
        words.array[1] = 1
        await call
        await held
        return {"returned": returned}


async def torch_busy(wake: Any) -> dict[str, Any]:
    """Make torch's calls with a kernel of ours in flight, and note how long after its end they return."""
    torch = library("torch")
    async with ao.Offload("cuda:0", wake=wake) as off:
        await off.load(spin)
        await off.launch(spin, grid=1, block=1, args=(1000,))
        late: dict[str, float] = {}
        for name, call in torch_calls(torch).items():
            operation = off.launch(spin, grid=1, block=1, args=(BUSY_NS,))
            ended: list[float] = []
            operation.add_done_callback(lambda _, ended=ended: ended.append(time.perf_counter()))
            await on_thread(call)
            returned = time.perf_counter()
            await operation
            await until(lambda ended=ended: ended, "the callback ran")
            late[name] = max(0.0, returned - ended[0])
        return {"late": late, "sum": await busy_round(off)}


async def called(which: str) -> dict[str, Any]:
    """Make one of torch's calls in a host function, on the loop's thread, for a kernel that waits for the result."""
    torch = library("torch")
    calls = torch_calls(torch)
    for call in calls.values():  # loads what they need
        call()
    async with calling_rig("cuda:0", call_timeout_s=1.0) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            calls[which]()
            return 10 * x

        await r.off.load(ask)
        await settle(r.off)
        before = time.perf_counter()
        report, value, failure = await r.asked(ask, 3)
        seconds = time.perf_counter() - before
        return {
            "report": report,
            "value": value,
            "failure": str(failure),
            "seconds": seconds,
            "sum": await busy_round(r.off),
        }


async def together(name: str, order: str) -> dict[str, Any]:
    """Use torch or CuPy, initialised before the Offload opens or after, in turns with it."""
    other = library(name)

    def work() -> float:
        if name == "torch":
            return float((other.arange(1000, device="cuda", dtype=other.float64) * 2).sum().item())
        return float((other.arange(1000, dtype=other.float64) * 2).sum().get())

    sums, theirs = [], []
    if order == "before":
        theirs.append(work())
    async with ao.Offload("cuda:0") as off:
        for _ in range(3):
            sums.append(await busy_round(off))
            theirs.append(work())
            flying = [off.launch(spin, grid=1, block=1, args=(3_000_000,)) for _ in range(32)]
            theirs.append(work())
            await asyncio.gather(*(op.wait() for op in flying))
        fallback = off.stats()["fallback"]
    theirs.append(work())
    async with ao.Offload("cuda:0", lanes=2) as off:
        sums.append(await busy_round(off))
    return {"sums": sums, "theirs": theirs, "fallback": fallback}


async def alone() -> dict[str, Any]:
    """Use the Offload where no other CUDA library was ever imported."""
    async with ao.Offload("cuda:0") as off:
        found = await busy_round(off)
        fallback = off.stats()["fallback"]
    others = [name for name in ("torch", "cupy", "numba") if name in sys.modules]
    return {"sum": found, "others": others, "fallback": fallback}


async def fallback(wake: Any) -> dict[str, Any]:
    """Work with the environment as it is, and return what was logged."""
    from structlog.testing import capture_logs

    with capture_logs() as lines:
        async with ao.Offload("cuda:0", wake=wake) as off:
            await off.load(add, nothing, spin)
            found = await busy_round(off, 1000)
            await asyncio.gather(*(off.launch(nothing, grid=1, block=1).wait() for _ in range(5000)))
            await asyncio.gather(*(off.launch(spin, grid=1, block=1, args=(5_000_000,)).wait() for _ in range(8)))
            words = await Words.of(off)
            held = off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)))
            await words.until(0)
            words.array[1] = 1
            await held
            stats = off.stats()
    return {"sum": found, "stats": stats, "warnings": [line for line in lines if line["log_level"] == "warning"]}


async def peer(device: str = "cuda:0") -> dict[str, Any]:
    """Work beside another process: say that it is open, wait for a line, work, say so, wait for a line."""
    loop = asyncio.get_running_loop()
    async with ao.Offload(device) as off:
        first = await busy_round(off)
        print("open", flush=True)
        await loop.run_in_executor(None, sys.stdin.readline)
        sums = [await busy_round(off, 1000) for _ in range(10)]
        async with ao.Offload(device, lanes=2) as second:
            sums.append(await busy_round(second, 1000))
        return {"first": first, "sums": sums}


async def two() -> dict[str, Any]:
    """Two Offloads on one device in one process, busy at the same time, one of them loading kernels meanwhile."""
    async with ao.Offload("cuda:0", lanes=8) as one, ao.Offload("cuda:0", lanes=8, wake="interrupt") as other:
        stop = False

        async def rounds(off: ao.Offload) -> list[int]:
            found = []
            while not stop:
                found.append(await busy_round(off, 300))
            return found

        first, second = asyncio.create_task(rounds(one)), asyncio.create_task(rounds(other))
        for number in range(6):
            source = f'extern "C" __global__ void fresh{number}(unsigned long long* x) {{ *x = {number}; }}'
            kernel = ao.Kernel(f"fresh{number}", cuda=source)
            off = (one, other)[number % 2]
            x = off.zeros(1, np.uint64)
            await off.load(kernel)
            await off.launch(kernel, grid=1, block=1, args=(x,))
            assert int((await off.get(x))[0]) == number
        stop = True
        sums = [await first, await second]
    return {"sums": [sorted(set(found)) for found in sums], "rounds": [len(found) for found in sums]}


async def capture(mode: str) -> dict[str, Any]:
    """Work during a graph capture of torch's on this thread; replay the graph afterwards."""
    torch = library("torch")
    async with ao.Offload("cuda:0", wake="interrupt") as off:
        await off.load(add, nothing)
        x = off.zeros(1, np.uint64)
        await off.get(x)
        theirs = torch.zeros(4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            theirs += 1
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        await settle(off)
        late = ao.Kernel("late", cuda='extern "C" __global__ void late(unsigned long long* x) { *x += 1000; }')
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            theirs += 1
            ops = [off.launch(add, grid=1, block=1, args=(x, 1)) for _ in range(100)]
            ops += [off.launch(spin, grid=1, block=1, args=(2_000_000,))]  # is loaded during the capture
            await asyncio.gather(*(op.wait() for op in ops))
            y = await off.put(np.arange(5))
            back = await off.get(y)
            await off.load(late)
            await off.launch(late, grid=1, block=1, args=(x,))
            pinned = await off.pinned(1000, np.float32)
            big = await off.put(np.zeros(500_000))
            big.close()
            y.close()
            theirs += 1
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        del pinned
        return {
            "ours": int((await off.get(x))[0]),
            "theirs": theirs.tolist(),
            "back": back.tolist(),
        }


async def opened_during_capture(mode: str) -> dict[str, Any]:
    """Open and close an Offload during a graph capture of torch's on this thread."""
    torch = library("torch")
    theirs = torch.zeros(4, device="cuda")
    theirs += 1
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        theirs += 1
        async with ao.Offload("cuda:0", lanes=4) as off:
            found = await busy_round(off)
            unused = off.stats()["fallback"]
        theirs += 1
    graph.replay()
    torch.cuda.synchronize()
    return {"sum": found, "theirs": theirs.tolist(), "fallback": unused}


async def contexts() -> dict[str, Any]:
    """Work on a thread whose current context is somebody else's, and one that has none."""
    from cuda.bindings import driver

    def current() -> int:
        status, context = driver.cuCtxGetCurrent()
        assert int(status) == 0
        return int(context)

    assert int(driver.cuInit(0)[0]) == 0  # before that there is nothing to ask
    seen: dict[str, list[int]] = {"none": [current()], "foreign": []}
    async with ao.Offload("cuda:0", lanes=4) as off:
        sums = [await busy_round(off)]
        seen["none"].append(current())
        status, foreign = driver.cuCtxCreate(None, 0, driver.cuDeviceGet(0)[1])
        assert int(status) == 0
        seen["foreign"].append(current())
        sums.append(await busy_round(off))
        seen["foreign"].append(current())
        late = ao.Kernel("late", cuda='extern "C" __global__ void late() {}')
        await off.load(late)
        await off.launch(late, grid=1, block=1)
        await off.launch(late, grid=2, block=1, shared_bytes=60_000)
        off.launch(spin, grid=1, block=1, args=(30_000_000,))
        await off.drain()
        async with ao.Offload("cuda:0", lanes=2) as other:
            sums.append(await busy_round(other))
        seen["foreign"].append(current())
        driver.cuCtxDestroy(foreign)
        seen["none"].append(current())
        sums.append(await busy_round(off))
    seen["none"].append(current())
    return {
        "seen": {name: [int(value == values[0]) for value in values] for name, values in seen.items()},
        "sums": sums,
    }


async def collected() -> dict[str, Any]:
    """Drop a closed Offload and its kernels, for the collector, while another has a kernel in flight."""
    source = 'extern "C" __global__ void mine(unsigned long long* x) { *x = 1; }'
    async with ao.Offload("cuda:0", lanes=2) as other:
        await other.load(latch, nothing)
        words = await Words.of(other)
        one = ao.Offload("cuda:0", lanes=2)
        await one.__aenter__()
        await one.launch(ao.Kernel("mine", cuda=source), grid=1, block=1, args=(one.zeros(1, np.uint64),))
        await one.aclose()
        gc.collect()
        held = other.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)))
        await words.until(0)
        start = time.perf_counter()
        del one
        gc.collect()
        collecting = time.perf_counter() - start
        start = time.perf_counter()
        await other.launch(nothing, grid=1, block=1)
        launching = time.perf_counter() - start
        words.array[1] = 1
        await held
        return {"collecting": collecting, "launching": launching}


async def handles() -> dict[str, Any]:
    """Give the handle of a lane to other libraries, as the integer that it is, and work on it in turns."""
    results: dict[str, Any] = {}
    async with ao.Offload("cuda:0", lanes=2) as off:
        lane = off.lanes[0]
        await off.load(nothing)

        async def after_theirs() -> None:
            await off.launch(nothing, grid=1, block=1, lane=lane)

        try:
            torch = library("torch")
            with torch.cuda.stream(torch.cuda.ExternalStream(lane.handle)):
                ones = torch.full((1000,), 1.0, device="cuda")
                ones += 1
            await after_theirs()
            results["torch"] = float(ones.sum().item())
        except Exception as error:
            results["torch"] = repr(error)
        try:
            cupy = library("cupy")
            with cupy.cuda.ExternalStream(lane.handle):
                two = cupy.full(1000, 2.0)
            await after_theirs()
            results["cupy"] = float(two.get()[0])
        except Exception as error:
            results["cupy"] = repr(error)
        from cuda.bindings import driver
        from cuda.core import Stream

        stream = Stream.from_handle(lane.handle)
        results["core"] = int(stream.handle) == lane.handle
        results["bindings"] = int(driver.cuStreamQuery(driver.CUstream(lane.handle))[0])
        results["int"] = type(lane.handle).__name__
        results["distinct"] = len({one.handle for one in off.lanes})
    return results


CASES = {
    "torch_idle": torch_idle,
    "torch_blocked": torch_blocked,
    "torch_busy": torch_busy,
    "called": called,
    "together": together,
    "alone": alone,
    "fallback": fallback,
    "peer": peer,
    "two": two,
    "capture": capture,
    "opened_during_capture": opened_during_capture,
    "contexts": contexts,
    "handles": handles,
    "collected": collected,
}

if __name__ == "__main__":
    run_as_main(CASES)
