"""Cases that lose the device, each run in a process of its own by ``test_faults.py``."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import numpy as np

import aiooffload as ao
from tests.gpu.support import Words, fault, latch, nothing, run_as_main, until

FAULTY_LANE = 5
STARTED, OPENED, NEVER = 0, 1, 3  # words; 2 is where the other kernels say that they run
KINDS = {"illegal": np.int32(0), "trap": np.int32(1)}


async def open_loaded(wake: Any = "hybrid", lanes: int = 16) -> tuple[ao.Offload, Words]:
    off = ao.Offload("cuda:0", lanes=lanes, wake=wake)
    await off.__aenter__()
    await off.load(fault, latch, nothing)
    words = await Words.of(off)
    await asyncio.gather(*(off.launch(nothing, grid=1, block=1, lane=lane).wait() for lane in off.lanes))
    return off, words


def launch_fault(off: ao.Offload, words: Words, kind: str) -> ao.Operation[None]:
    """Launch what faults as soon as the word OPENED is set, on the lane FAULTY_LANE."""
    args = (words.address(STARTED), words.address(OPENED), KINDS[kind])
    return off.launch(fault, grid=1, block=1, args=args, lane=off.lanes[FAULTY_LANE % len(off.lanes)])


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
}

if __name__ == "__main__":
    run_as_main(CASES)
