"""What a program holds: the Offload from opening to the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.kernels import add, hold, nothing, rig, saxpy, turns

ROOT = Path(__file__).parents[1]


@pytest.mark.all_loops
async def test_readme_program(device_label: str) -> None:
    """The program of the design runs as printed, on every device and loop."""
    n = 10_000
    async with ao.Offload(device_label, lanes=16) as off:
        x = await off.put(np.arange(n, dtype=np.float32))
        y = off.zeros(n, np.float32)
        op = off.launch(saxpy, grid=(n + 255) // 256, block=256, args=(2.0, x, y, n))
        await op
        result = await off.get(y)
        assert np.array_equal(result, 2 * np.arange(n, dtype=np.float32))
        assert repr(off) == f"<aiooffload.Offload {device_label}>"
        assert off.properties.label == device_label
    assert "closed" in repr(off)


@pytest.mark.parametrize(
    "value",
    [
        [1.5, 2.5],
        7,
        np.float32(3),
        np.zeros((0, 4)),
        np.array(5),
        np.array([(1, 2.5)], "i4,f4"),
        np.array([True, False]),
        np.arange(3, dtype=">i4"),
        np.array(["ab", "c"]),
        np.array(["2026-11-30"], "M8[D]"),
        memoryview(b"bytes"),
    ],
    ids=lambda value: f"{type(value).__name__}-{getattr(value, 'dtype', '')}",
)
async def test_put_and_get_keep_shape_and_dtype(device_label: str, value: Any) -> None:
    """put takes whatever NumPy makes an array of; get gives the same shape, dtype and content."""
    async with rig(device_label, load=False) as r:
        expected = np.asarray(value)
        result = await r.off.get(await r.off.put(value))
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        assert result.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "dtype", ["?", "i1", "u8", "f2", "f8", "c16", "M8[s]", "m8[ns]", "S5", "U3", "V3", "i4,f8", ">i2"]
)
async def test_zeros_are_numpys(device_label: str, dtype: str) -> None:
    """zeros of every dtype is what numpy.zeros gives."""
    async with rig(device_label, load=False) as r:
        buffer = r.off.zeros((2, 3), dtype)
        assert (buffer.shape, buffer.dtype) == ((2, 3), np.dtype(dtype))
        assert (await r.off.get(buffer)).tobytes() == np.zeros((2, 3), dtype).tobytes()


@pytest.mark.parametrize(
    "options",
    [
        {"lanes": 0}, {"lanes": 257}, {"wake": "never"}, {"ordering": "none"}, {"lane_depth": 0}, {"lane_depth": 201},
        {"max_pending": 0}, {"lanes": "many"}, {"lanes": 2.5}, {"scratch_keep_bytes": -1}, {"scratch_keep_bytes": 1e6},
    ],
    ids=str,
)  # fmt: skip
def test_options_out_of_range(options: dict[str, Any]) -> None:
    """An option out of range raises when the Offload is made, before any device is opened."""
    with pytest.raises((ao.UsageError, TypeError)):
        ao.Offload("host", **options)


@pytest.mark.parametrize("lanes", [1, 256])
async def test_any_number_of_lanes(lanes: int) -> None:
    """From one lane to 256 every lane works."""
    async with rig("host", lanes=lanes) as r:
        assert [lane.index for lane in r.off.lanes] == list(range(lanes))
        assert len({lane.handle for lane in r.off.lanes}) == lanes
        await asyncio.gather(*(r.launch(nothing, lane=lane).wait() for lane in r.off.lanes))


async def test_use_before_it_is_entered() -> None:
    """Before `async with` every use raises UsageError that says so; closing does nothing."""
    off = ao.Offload("host")
    for use in (
        lambda: off.launch(nothing, grid=1, block=1),
        lambda: off.empty(3, np.uint8),
        lambda: off.put([1]),
        off.stats,
        lambda: off.lanes,
    ):
        with pytest.raises(ao.UsageError, match="async with"):
            use()
    with pytest.raises(ao.UsageError, match="async with"):
        await off.drain()
    off.terminate()
    await off.aclose()


async def test_entering_twice(device_label: str) -> None:
    """Entering again, open or closed, raises UsageError; the open one goes on."""
    off = ao.Offload(device_label)
    async with off:
        with pytest.raises(ao.UsageError, match="already"):
            await off.__aenter__()
        await off.launch(nothing, grid=1, block=1)
    with pytest.raises(ao.UsageError):
        await off.__aenter__()


async def test_stats(device_label: str) -> None:
    """The counters count."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        await r.off.drain()
        before = r.off.stats()
        assert before["device"] == device_label
        await r.hold()
        op = r.launch(nothing)
        buffer = r.off.empty(100, np.uint8)
        after = r.off.stats()
        assert (after["in_flight"], after["pending"]) == (1, 1)
        assert after["submitted"] - before["submitted"] == 2
        assert after["buffers"] - before["buffers"] == 1
        assert after["allocated_bytes"] - before["allocated_bytes"] == buffer.nbytes
        r.open_all()
        await op
        done = r.off.stats()
        assert done["completed"] == done["submitted"] == after["submitted"]
        assert (done["in_flight"], done["pending"]) == (0, 0)


@pytest.mark.all_loops
async def test_two_offloads_on_one_loop(device_label: str) -> None:
    """Two Offloads work beside each other, one held, one not, and close in any order."""
    first, second = ao.Offload(device_label), ao.Offload(device_label)
    await first.__aenter__()
    async with rig(device_label) as r:
        gate = await r.hold()
        opening = asyncio.ensure_future(second.__aenter__())  # which is maintenance: it waits for the flight
        await turns()
        gate.open()
        await opening
        await r.off.launch(nothing, grid=1, block=1)
        await asyncio.gather(*(off.launch(nothing, grid=1, block=1).wait() for off in (first, second)))
        await first.aclose()
        await second.launch(nothing, grid=1, block=1)
    await second.aclose()


async def test_opened_and_closed_again_and_again(device_label: str) -> None:
    """Opening and closing leaves nothing behind, however often."""
    for _ in range(10):
        async with ao.Offload(device_label, lanes=2) as off:
            await off.fill(off.empty(4, np.uint8), 1)


async def test_get_of_something_else(device_label: str) -> None:
    """get, fill and copy of what is no Buffer, and put of objects, raise UsageError."""
    async with rig(device_label, load=False) as r:
        word = r.word()
        array = np.zeros(1, np.uint64)
        for submit in (
            lambda: r.off.get(array),
            lambda: r.off.get(None),
            lambda: r.off.fill(array, 1),
            lambda: r.off.copy(array, array),
            lambda: r.off.copy(word, "x"),
            lambda: r.off.copy([0], word),
            lambda: r.off.put(np.array([object()])),
            lambda: r.off.put(None),
            lambda: r.off.get(word, out=np.zeros(1, np.int64)),
            lambda: r.off.get(word, out=np.zeros(2, np.uint64)),
            lambda: r.off.get(word, out=[0]),
        ):
            with pytest.raises(ao.UsageError):
                submit()  # type: ignore[no-untyped-call]
        read_only = np.zeros(1, np.uint64)
        read_only.flags.writeable = False
        with pytest.raises(ao.UsageError, match="read-only"):
            r.off.get(word, out=read_only)
        assert await r.read(word) == 0


async def test_used_through_run_coroutine_threadsafe(device_label: str) -> None:
    """What the error for another thread recommends works."""
    async with rig(device_label) as r:
        loop = asyncio.get_running_loop()

        async def work() -> int:
            word = r.word(4)
            r.launch(add, word, 1)
            return await r.read(word)

        assert await asyncio.to_thread(lambda: asyncio.run_coroutine_threadsafe(work(), loop).result(10)) == 5


@pytest.mark.allows_blocking("threads are joined on the loop's thread")
async def test_dropped_without_aclose_warns() -> None:
    """An Offload that is dropped open warns with ResourceWarning that says what to do."""
    off = ao.Offload("host")
    await off.__aenter__()
    with pytest.warns(ResourceWarning, match="aclose"):
        off.__del__()
    await off.aclose()
    off.__del__()


# The end of the process, and forks


def run(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the kernels of the tests at hand; fails if it hangs."""
    preamble = "import asyncio, os, sys, warnings, numpy as np, aiooffload as ao\nfrom tests.kernels import *\n"
    command = [sys.executable, *options, "-c", preamble + source]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)


EXITS = {
    "idle": "pass",
    "global": "globals()['kept'] = off",
    "in flight": "off.launch(hold, grid=1, block=1, args=(gate,))",
    "armed": "off.launch(hold, grid=1, block=1, args=(gate,)); await asyncio.sleep(0.05)",
    "queued": "[off.launch(hold, grid=1, block=1, args=(gate,)) for _ in range(3000)]",
    "loading": "off.launch(saxpy, grid=1, block=1, args=(1, x, x, 1)); globals()['kept'] = off",
    "copying": "kept = off.put(np.zeros(50_000_000, np.uint8))",
    "load behind a held lane": "off.launch(hold, grid=1, block=1, args=(gate,)); off.launch(nothing, grid=1, block=1)",
    "exit": "off.launch(hold, grid=1, block=1, args=(gate,)); sys.exit(0)",
}


@pytest.mark.parametrize("state", EXITS)
def test_exit_without_aclose(state: str) -> None:
    """A program that ends without aclose() ends at once, with a ResourceWarning and no other complaint."""
    done = run(
        f"""
async def main():
    off = ao.Offload("host", lanes=2)
    await off.__aenter__()
    await off.load(hold)
    pinned = await off.pinned(2, np.uint64)
    gate = np.uint64(pinned.lease.block.device_address)
    x = off.zeros(4, np.float32)
    {EXITS[state]}
asyncio.run(main())
print("end")
""",
        "-W",
        "always::ResourceWarning",
    )
    assert done.returncode == 0, done.stderr
    assert "was not closed" in done.stderr
    assert "Traceback" not in done.stderr
    assert "Fatal" not in done.stderr


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_completion_after_the_loop_was_closed(loop: str) -> None:
    """What completes after its loop was closed calls nothing there, and a new Offload on a new loop works."""
    done = run(
        f"""
import uvloop
async def first():
    off = ao.Offload("host", lanes=2, wake="interrupt")
    await off.__aenter__()
    await off.load(hold)
    pinned = await off.pinned(2, np.uint64)
    op = off.launch(hold, grid=1, block=1, args=(np.uint64(pinned.lease.block.device_address),))
    while not off._engine.completion.armed or not pinned.array[0]:
        await asyncio.sleep(0)
    return off, pinned, op
make = uvloop.new_event_loop if "{loop}" == "uvloop" else asyncio.new_event_loop
loop = make()
off, pinned, op = loop.run_until_complete(first())
loop.close()
pinned.array[1] = 1
while not off._engine._monitor.query():
    pass
async def second():
    async with ao.Offload("host") as other:
        word = other.zeros(1, np.uint64)
        other.launch(add, grid=1, block=1, args=(word, 5))
        print("value", (await other.get(word))[0])
make().run_until_complete(second())
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["value", "5"]
    assert "Traceback" not in done.stderr


def test_forked_child() -> None:
    """In a forked child every use raises UsageError, dropping things calls no driver, and a new Offload works."""
    done = run(
        """
warnings.simplefilter("ignore", DeprecationWarning)
uses = {
    "launch": lambda off, op, buffer: off.launch(nothing, grid=1, block=1),
    "empty": lambda off, op, buffer: off.empty(3, np.uint8),
    "stats": lambda off, op, buffer: off.stats(),
    "done": lambda off, op, buffer: op.done(),
    "cancel": lambda off, op, buffer: op.cancel(),
    "result": lambda off, op, buffer: op.result(),
}
def child(name, off, op, buffer, device):
    calls = len(device.calls)
    if name == "close":
        buffer.close()
        return 0 if device.calls[calls:] == [] else 4
    if name == "new":
        async def fresh():
            async with ao.Offload("host") as other:
                return int((await other.get(await other.put([7])))[0])
        asyncio._set_running_loop(None)
        return 0 if asyncio.new_event_loop().run_until_complete(fresh()) == 7 else 5
    try:
        uses[name](off, op, buffer)
    except ao.UsageError as error:
        return 0 if device.calls[calls:] == [] else 4
    return 3
async def main():
    device = SpyDevice()
    async with rig(device, lanes=2) as r:
        gate = await r.hold()
        buffer = r.off.empty(4, np.uint8)
        op = r.holds[0]
        for name in (*uses, "close", "new"):
            pid = os.fork()
            if pid == 0:
                code = 99
                try:
                    code = child(name, r.off, op, buffer, device)
                finally:
                    os._exit(code)
            print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        gate.open()
        await op
        await r.launch(nothing)
asyncio.run(main())
print("parent 0")
"""
    )
    assert done.returncode == 0, done.stderr
    results = dict(line.split() for line in done.stdout.splitlines())
    assert len(results) == 9
    assert {name: code for name, code in results.items() if code != "0"} == {}


async def test_collector_on_another_thread(device_label: str) -> None:
    """Buffers and operations collected on other threads while the loop works do no harm."""
    async with rig(device_label) as r:
        stop = threading.Event()
        boxes: list[list[Any]] = [[] for _ in range(200)]

        def clear() -> None:
            while not stop.is_set():
                for box in boxes:
                    box.clear()
                time.sleep(0)

        thread = threading.Thread(target=clear)
        thread.start()
        try:
            for i in range(1000):
                word = r.word(i)
                op = r.launch(add, word, 1)
                boxes[i % 200].extend((word, op))
                del word, op
                if i % 50 == 0:
                    await turns(2)
            await r.off.drain()
        finally:
            stop.set()
            await asyncio.to_thread(thread.join)
        for box in boxes:
            box.clear()
        await turns(5)
        assert r.off.stats()["buffers"] == 0


def test_hold_kernel_is_what_the_exits_use() -> None:
    """The programs above and the tests share one holding kernel, with an implementation for every device."""
    assert hold.cuda_source is not None
    assert hold.host_function is not None
