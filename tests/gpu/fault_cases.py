"""Cases that lose the device, each run in a process of its own by ``test_faults.py``."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from typing import Any

import numpy as np

import aiooffload as ao
from tests.gpu.support import CLOCK, FAULT, Words, fault, forever, latch, nothing, overflow, run_as_main, until

FAULTY_LANE = 5
STARTED, OPENED, NEVER = 0, 1, 3  # words; 2 is where the other kernels say that they run
KINDS = {kind: np.int32(number) for number, kind in enumerate(("illegal", "trap", "misaligned", "assert", "stack"))}

ask_and_fault = ao.Kernel(
    "ask_and_fault",
    cuda="#include <aiooffload.cuh>\n"
    + FAULT
    + """extern "C" __global__
    void ask_and_fault(ao::Launch launch, volatile u64* started, volatile u64* opened, int kind)
    {
        if (threadIdx.x == 0) launch.call(ao::fn("never"), ao::None());
        if (threadIdx.x == 32) {
            *started = 1;
            wait_for(opened);
            if (kind == 1) launch.abort(7, "the table is broken");
            *(volatile int*)8 = 1;
        }
    }""",
    calls=True,
)
"""A warp calls never(), another one faults meanwhile."""
send = ao.Kernel(
    "send",
    cuda="#include <aiooffload.cuh>\n"
    + CLOCK
    + """extern "C" __global__ void send(ao::Launch launch, volatile u64* started, unsigned char* data, long long n)
    {
        *started = 1;
        launch.call(ao::fn("take"), ao::None(), ao::tofrom(data, n));
    }""",
    calls=True,
)
"""Calls take() with a mapped array."""


async def open_loaded(wake: Any = "hybrid", lanes: int = 16) -> tuple[ao.Offload, Words]:
    off = ao.Offload("cuda:0", lanes=lanes, wake=wake)
    await off.__aenter__()
    await off.load(fault, overflow, latch, nothing)
    words = await Words.of(off)
    await asyncio.gather(*(off.launch(nothing, grid=1, block=1, lane=lane).wait() for lane in off.lanes))
    return off, words


def launch_fault(off: ao.Offload, words: Words, kind: str) -> ao.Operation[None]:
    """Launch what faults as soon as the word OPENED is set, on the lane FAULTY_LANE."""
    args = (words.address(STARTED), words.address(OPENED), KINDS[kind])
    kernel = overflow if kind == "stack" else fault
    return off.launch(kernel, grid=1, block=1, args=args, lane=off.lanes[FAULTY_LANE % len(off.lanes)])


def launch_stuck(off: ao.Offload, words: Words, **options: Any) -> ao.Operation[None]:
    """Launch what cannot complete within the test."""
    return off.launch(latch, grid=1, block=1, args=(words.address(2), words.address(NEVER)), **options)


async def end_of(operation: ao.Operation[Any]) -> tuple[float, BaseException | None]:
    """Return when an await ended and with what."""
    error: BaseException | None = None
    try:
        await operation
    except BaseException as caught:
        error = caught
    return time.perf_counter(), error


def kind_of(call: Any) -> str:
    """Return the class that a submission raises."""
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def count(ends: list[tuple[float, BaseException | None]]) -> dict[str, int]:
    kinds = [type(error).__name__ for _, error in ends]
    return {kind: kinds.count(kind) for kind in kinds}


async def in_flight(kind: str, wake: str, launches: str) -> dict[str, Any]:
    """Fault with so many operations in flight, and look at everything that is promised afterwards."""
    off, words = await open_loaded(wake)
    x, lanes = await off.put(np.zeros(4)), off.lanes
    before = [lane.queue.slot.load() for lane in lanes]
    faulty = launch_fault(off, words, kind)
    others = [launch_stuck(off, words) for _ in range(int(launches) - 1)]
    await words.until(STARTED)
    flying = off.stats()["in_flight"]
    waits = asyncio.gather(*map(end_of, [faulty, *others]))
    await asyncio.sleep(0)
    start = time.perf_counter()
    words.array[OPENED] = 1
    ends = await waits
    error = faulty.exception()
    assert isinstance(error, ao.DeviceLostError), error
    after = {
        "launch": kind_of(lambda: off.launch(nothing, grid=1, block=1)),
        "put": kind_of(lambda: off.put(np.zeros(4))),
        "get": kind_of(lambda: off.get(x)),
        "fill": kind_of(lambda: off.fill(x, 1.0)),
        "empty": kind_of(lambda: off.empty(4, np.float32)),
    }
    slots = [lane.queue.slot.load() for lane in lanes]
    closing = time.perf_counter()
    await off.aclose()
    closed = time.perf_counter()
    x.close()
    gc.collect()  # frees the buffers and pinned memory: no driver call may come of it
    return {
        "elapsed_ms": round((max(when for when, _ in ends) - start) * 1e3, 1),
        "first_ms": round((min(when for when, _ in ends) - start) * 1e3, 1),
        "aclose_ms": round((closed - closing) * 1e3, 1),
        "in_flight": flying,
        "ends": count(ends),
        "suspects": list(error.suspects),
        "text": str(error),
        "status": error.status,
        "after": after,
        "slots_before": before,
        "slots": slots,
        "slots_closed": [lane.queue.slot.load() for lane in lanes],
        "word": int(words.array[STARTED]),
    }


async def two_lanes(one: str, two: str) -> dict[str, Any]:
    """Fault on two lanes at once."""
    off, words = await open_loaded()
    first = launch_fault(off, words, one)
    args = (words.address(4), words.address(OPENED), KINDS[two])
    second = off.launch(fault, grid=1, block=1, args=args, lane=off.lanes[FAULTY_LANE + 1])
    await words.until(STARTED)
    await words.until(4)
    words.array[OPENED] = 1
    ends = await asyncio.gather(end_of(first), end_of(second))
    await off.aclose()
    return {"ends": count(ends), "suspects": list(getattr(ends[0][1], "suspects", ()))}


async def never_ends(limit_s: str) -> dict[str, Any]:
    """Launch what never ends, with a hard limit, among other work."""
    told: list[str] = []
    off = ao.Offload("cuda:0", hard_timeout_s=float(limit_s), on_lost=lambda error: told.append(str(error)))
    await off.__aenter__()
    await off.load(forever, nothing, latch)
    words, lanes = await Words.of(off), off.lanes
    x = await off.put(np.zeros(4))
    start = time.perf_counter()
    stuck = off.launch(forever, grid=1, block=1, args=(words.address(STARTED),), lane=lanes[FAULTY_LANE])
    behind = [off.launch(nothing, grid=1, block=1, lane=lanes[0], after=[stuck])]
    behind += [off.launch(nothing, grid=1, block=1, lane=lanes[FAULTY_LANE]) for _ in range(100)]
    waits = asyncio.gather(*map(end_of, [stuck, *behind]))
    others = 0
    with contextlib.suppress(ao.DeviceLostError):  # the one that is under way then fails, too
        while not stuck.done():
            await off.launch(nothing, grid=1, block=1, lane=lanes[1])
            others += 1
    ends = await waits
    after = {
        "launch": kind_of(lambda: off.launch(nothing, grid=1, block=1)),
        "get": kind_of(lambda: off.get(x)),
        "empty": kind_of(lambda: off.empty(4, np.float32)),
    }
    closing = time.perf_counter()
    await off.aclose()
    return {
        "elapsed_s": max(when for when, _ in ends) - start,
        "ends": count(ends),
        "others": others,
        "after": after,
        "told": told,
        "aclose_ms": round((time.perf_counter() - closing) * 1e3, 1),
        "text": str(stuck.exception()),
        "still": int(words.array[STARTED]),
    }


async def calling(kind: str) -> dict[str, Any]:
    """Fault, or abort with a text, while the same launch waits for a host function."""
    off, words = await open_loaded()
    await off.load(ask_and_fault)
    state: list[str] = []

    @off.host_function
    async def never() -> None:
        state.append("entered")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            state.append("cancelled")
            raise

    args = (words.address(STARTED), words.address(OPENED), KINDS[kind])
    op = off.launch(ask_and_fault, grid=1, block=64, args=args)
    await words.until(STARTED)
    await until(lambda: state, "the host function was called")
    words.array[OPENED] = 1
    ends = [await end_of(op)]
    await asyncio.sleep(0)
    await off.aclose()
    return {"ends": count(ends), "handler": state, "text": str(ends[0][1])}


async def mapped_copy() -> dict[str, Any]:
    """Fault while the array of a call is being copied to the host."""
    off, words = await open_loaded()
    await off.load(send)
    state: list[str] = []

    @off.host_function
    async def take(data: ao.InOut[np.uint8]) -> None:
        state.append("called")

    data = off.zeros(1 << 30, np.uint8)
    await off.drain()
    faulty = launch_fault(off, words, "illegal")
    await words.until(STARTED)
    op = off.launch(send, grid=1, block=1, args=(words.address(4), data, np.int64(data.nbytes)))
    await words.until(4)
    engine = off._engine
    assert engine is not None
    copies = engine.lanes.lanes[-2:]  # those of mapped arrays
    await until(lambda: any(lane.in_flight for lane in copies), "the array is being copied")
    words.array[OPENED] = 1
    ends = await asyncio.gather(end_of(faulty), end_of(op))
    await off.aclose()
    return {"ends": count(ends), "handler": state}


async def host_function_left() -> dict[str, Any]:
    """Fault on an adopted stream on which its owner has left a host function."""
    import ctypes

    from cuda.bindings import driver

    off, words = await open_loaded()
    status, context = driver.cuDevicePrimaryCtxRetain(0)
    assert int(status) == 0
    driver.cuCtxPushCurrent(context)
    status, stream = driver.cuStreamCreate(1)
    assert int(status) == 0
    ran: list[int] = []
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: ran.append(1))
    lane = off.adopt(int(stream))
    args = (words.address(STARTED), words.address(OPENED), KINDS["illegal"])
    faulty = off.launch(fault, grid=1, block=1, args=args, lane=lane)
    address = ctypes.cast(function, ctypes.c_void_p).value
    (status,) = driver.cuLaunchHostFunc(stream, driver.CUhostFn(address), 0)
    assert int(status) == 0
    driver.cuCtxPopCurrent()
    behind = off.completion(lane)
    await words.until(STARTED)
    words.array[OPENED] = 1
    ends = await asyncio.gather(end_of(faulty), end_of(behind))
    start = time.perf_counter()
    await off.aclose()
    return {"ends": count(ends), "ran": ran, "aclose_ms": round((time.perf_counter() - start) * 1e3, 1)}


async def second(kind: str) -> dict[str, Any]:
    """Fault in one Offload while another has work in flight; then open a third."""
    first, words = await open_loaded()
    other = ao.Offload("cuda:0", lanes=2)
    await other.__aenter__()
    await other.load(latch, nothing)
    await other.launch(nothing, grid=1, block=1)
    stuck = other.launch(latch, grid=1, block=1, args=(words.address(2), words.address(NEVER)))
    faulty = launch_fault(first, words, kind)
    await words.until(STARTED)
    words.array[OPENED] = 1
    ends = await asyncio.gather(end_of(faulty), end_of(stuck))
    refused = kind_of(lambda: other.launch(nothing, grid=1, block=1))
    start = time.perf_counter()
    opened, text = "nothing", ""
    try:
        async with ao.Offload("cuda:0", lanes=1):
            pass
    except BaseException as error:
        opened, text = type(error).__name__, str(error)
    took = time.perf_counter() - start
    async with ao.Offload("host", lanes=1) as host:
        host_works = host.properties.label
    await first.aclose()
    await other.aclose()
    return {
        "ends": count(ends),
        "refused": refused,
        "opened": opened,
        "text": text,
        "open_ms": round(took * 1e3, 1),
        "lost_text": str(faulty.exception()),
        "host": host_works,
    }


async def idle_other(kind: str) -> dict[str, Any]:
    """Fault in one Offload while another is idle and asks for nothing."""
    first, words = await open_loaded()
    other = ao.Offload("cuda:0", lanes=2)
    await other.__aenter__()
    faulty = launch_fault(first, words, kind)
    await words.until(STARTED)
    words.array[OPENED] = 1
    _, error = await end_of(faulty)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    refused = kind_of(lambda: other.launch(nothing, grid=1, block=1))
    start = time.perf_counter()
    await other.aclose()
    await first.aclose()
    closed_ms = round((time.perf_counter() - start) * 1e3, 1)
    return {"error": type(error).__name__, "refused": refused, "closed_ms": closed_ms}


async def unasked(kind: str) -> dict[str, Any]:
    """Fault while nobody awaits anything and nobody asks the stream."""
    off, words = await open_loaded()
    loop = asyncio.get_running_loop()
    told: asyncio.Future[BaseException | None] = loop.create_future()

    def handler(_: Any, context: dict[str, Any]) -> None:
        if not told.done():
            told.set_result(context.get("exception"))

    loop.set_exception_handler(handler)
    words.array[OPENED] = 1
    start = time.perf_counter()
    launch_fault(off, words, kind)
    error = await asyncio.wait_for(told, 20)
    elapsed = time.perf_counter() - start
    refused = kind_of(lambda: off.launch(nothing, grid=1, block=1))
    await off.aclose()
    return {"error": type(error).__name__, "elapsed_ms": round(elapsed * 1e3, 1), "refused": refused}


async def polled(kind: str) -> dict[str, Any]:
    """Fault while the program looks at ``done()`` only."""
    off, words = await open_loaded()
    words.array[OPENED] = 1
    faulty = launch_fault(off, words, kind)
    await until(faulty.done, "the operation is done")
    error = faulty.exception()
    await off.aclose()
    return {"error": type(error).__name__, "suspects": list(getattr(error, "suspects", ()))}


async def chained(kind: str) -> dict[str, Any]:
    """Fault before a get of the buffer that the faulting lane would have written."""
    off, words = await open_loaded()
    x = await off.put(np.zeros(4))
    faulty = launch_fault(off, words, kind)
    lane = off.lanes[FAULTY_LANE]
    behind = [off.fill(x, 1.0, lane=lane), off.get(x), off.put(np.zeros(3_000_000), lane=lane)]
    held = off.launch(nothing, grid=1, block=1, after=[faulty])
    awaited = off.launch(nothing, grid=1, block=1, after=[faulty.wait()])
    await words.until(STARTED)
    words.array[OPENED] = 1
    ends = await asyncio.gather(*map(end_of, [faulty, *behind, held, awaited]))
    drained = time.perf_counter()
    await off.drain()
    drained = time.perf_counter() - drained
    await off.aclose()
    return {"ends": [type(error).__name__ for _, error in ends], "drain_ms": round(drained * 1e3, 1)}


async def maintenance(kind: str) -> dict[str, Any]:
    """Fault while a load waits behind the barrier for what is in flight."""
    off, words = await open_loaded()
    faulty = launch_fault(off, words, kind)
    await words.until(STARTED)
    late = ao.Kernel("late", cuda='extern "C" __global__ void late() {}')
    load = asyncio.create_task(off.load(late))
    queued = off.launch(late, grid=1, block=1)
    engine = off._engine
    assert engine is not None
    await until(lambda: engine.board.paused, "the barrier is up")
    words.array[OPENED] = 1
    ends = await asyncio.gather(end_of(faulty), end_of(queued))
    done, _ = await asyncio.wait([load], timeout=10)
    loaded = type(load.exception()).__name__ if done else "hangs"
    start = time.perf_counter()
    await off.aclose()
    closed_ms = round((time.perf_counter() - start) * 1e3, 1)
    return {"ends": [type(error).__name__ for _, error in ends], "load": loaded, "aclose_ms": closed_ms}


CASES = {
    "in_flight": in_flight,
    "second": second,
    "idle_other": idle_other,
    "unasked": unasked,
    "polled": polled,
    "chained": chained,
    "maintenance": maintenance,
    "two_lanes": two_lanes,
    "never_ends": never_ends,
    "calling": calling,
    "mapped_copy": mapped_copy,
    "host_function_left": host_function_left,
}

if __name__ == "__main__":
    run_as_main(CASES)
