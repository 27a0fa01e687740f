"""Reverse offload: what a kernel that calls coroutines on the host can rely on, on every device.

The first part follows what OpenMP defines for a target region with ``device(ancestor: 1)`` (5.2, section
13.8): values and mapped data, several regions, many threads, more than one device at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.cuda.compiler import compile_source
from aiooffload.engine import health
from aiooffload.engine.reverse import CallingLaunch
from aiooffload.errors import CompileError
from aiooffload.rules import wire
from tests.kernels import Boom, add, hold, nothing, turns, until
from tests.reverse_kernels import (
    ALLOC,
    C_TYPES,
    CANCELLED,
    FROM,
    INCLUDE,
    KERNELS,
    MIXED,
    MIXED_C,
    OK,
    POWERS,
    TO,
    TOFROM,
    CallingRig,
    ask,
    ask_ahead,
    ask_and_poll,
    ask_each,
    ask_last,
    calling_rig,
    deaf,
    drop_calls,
    echo_kernel,
    either,
    end_of,
    four_at_once,
    in_steps,
    in_turn,
    keep_argument,
    map_array,
    map_scalar,
    map_several,
    map_twice,
    padded,
    post_in_order,
    post_many,
    several,
    silent,
    struct_of,
    tell,
    until_cancelled,
    warp_ask,
    warp_ask_each,
    warp_ask_none,
    warp_ask_small,
    warp_ask_struct,
    warp_ask_wide,
    warp_tell,
)

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100", "sm_120")
ALL_LANES = 0xFFFFFFFF
SOME_LANES = 0b1010_0000_0000_0110_0000_0001_0001_0100
STRUCTS = (1, 3, 8, 9, 16, 17, 255, 256)

word = contextvars.ContextVar("word", default="none")


@pytest.fixture
async def r(device_label: str) -> AsyncIterator[CallingRig]:
    """An Offload that has nothing left over when the test is through with it."""
    async with calling_rig(device_label) as opened:
        yield opened
        await opened.off.drain()
        calls = opened.off.stats()["calls"]
        assert (calls["dropped"], calls["resident"], calls["open"]) == (0, 0, 0)


# The kernels


def sources() -> dict[str, str]:
    """Return the CUDA source of every kernel that these tests share, by name."""
    found = {name: kernel.cuda_source or "" for name, kernel in KERNELS.items()}
    found |= {f"echo {name}": echo_kernel(np.dtype(name), c_type).cuda_source or "" for name, c_type in C_TYPES.items()}
    found |= {f"echo struct of {n}": echo_kernel(*struct_of(n)).cuda_source or "" for n in STRUCTS}
    return found | {"echo mixed struct": echo_kernel(MIXED, "Mixed", MIXED_C).cuda_source or ""}


SOURCES = sources()


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", SOURCES)
def test_every_kernel_compiles(name: str, arch: str) -> None:
    """Every kernel of these tests compiles for every architecture; needs no GPU."""
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        code = compile_source(SOURCES[name], arch, {})
    except CompileError as error:
        if "is not installed" in str(error):
            pytest.skip(str(error))
        raise
    assert code[:4] == b"\x7fELF"


# Values


@pytest.mark.all_loops
async def test_scalar_in_and_out(r: CallingRig) -> None:
    """A number goes to the host function, and its result comes back, whether or not the function suspends."""

    @r.off.host_function
    async def f(x: int) -> int:
        if x % 2:
            await asyncio.sleep(0)
        return 3 * x

    for x in (7, 8, -(2**61), 0):
        assert await r.asked(ask, x) == ([OK, 0], 3 * x, None)


async def test_scalar_is_passed_by_value(r: CallingRig) -> None:
    """What a host function does to its scalar argument is not seen on the device."""
    seen = []

    @r.off.host_function
    async def f(x: int) -> None:
        seen.append(x)
        x += 100

    x = await r.off.put(np.array([5, 0, 0], np.int64))
    await r.launch(keep_argument, x)
    assert await r.values(x) == [5, 5, 5]
    assert seen == [5]


async def test_scalar_mapped_in_both_directions(r: CallingRig) -> None:
    """A single element that is mapped tofrom arrives, and the kernel sees what the host function made of it."""

    @r.off.host_function
    async def f(x: ao.InOut[np.int64]) -> None:
        assert x.shape == (1,)
        x += 1

    x = r.array(4)
    await r.launch(map_scalar, x)
    assert await r.values(x) == [0, 21, 21, 0]


@pytest.mark.parametrize("name", C_TYPES)
async def test_result_of_every_type(r: CallingRig, name: str) -> None:
    """The ends of every type's range go to the host and come back as they were."""
    dtype = np.dtype(name)
    if dtype.kind == "f":
        info = np.finfo(dtype)
        values = [info.min, info.max, info.tiny, -0.0, np.inf, np.nan]
    else:
        values = [False, True] if dtype.kind == "b" else [np.iinfo(dtype).min, np.iinfo(dtype).max, 1]
    seen: list[Any] = []

    async def f(x: Any) -> Any:
        seen.append(x)
        return x

    f.__annotations__.update({"x": dtype.type, "return": dtype.type})
    r.host_function(f)
    kernel = echo_kernel(dtype, C_TYPES[name])
    for value in values:
        x, y, report = await r.off.put(np.array([value, 0], dtype)), r.array(1, dtype), r.array(1, np.int32)
        await r.launch(kernel, x, y, report)
        assert await r.values(report) == [OK]
        assert (await r.off.get(y)).tobytes() == np.array([value], dtype).tobytes()
    assert {type(x) for x in seen} == {type(np.zeros((), dtype).item())}


@pytest.mark.parametrize("nbytes", [*STRUCTS, "mixed"])
async def test_struct_as_argument_and_result(r: CallingRig, nbytes: Any) -> None:
    """A struct of up to 256 bytes goes to the host as a record and comes back whole."""
    dtype, c_type, definition = (MIXED, "Mixed", MIXED_C) if nbytes == "mixed" else struct_of(nbytes)

    async def f(x: Any) -> Any:
        return x

    f.__annotations__.update({"x": dtype, "return": dtype})
    r.host_function(f)
    x = np.zeros(2, dtype)
    if nbytes == "mixed":
        x[0] = (-3, 0.25, (4, 5, 6))
    else:
        x["bytes"][0] = (np.arange(nbytes) * 7 + 1) % 256
    y, report = r.array(1, dtype), r.array(1, np.int32)
    await r.launch(echo_kernel(dtype, c_type, definition), await r.off.put(x), y, report)
    assert await r.values(report) == [OK]
    assert (await r.off.get(y))[0] == x[0]


async def test_no_result(r: CallingRig) -> None:
    """A function that gives nothing can be called."""
    seen = []

    @r.off.host_function
    async def f(x: int) -> None:
        seen.append(x)

    report = r.array(2, np.int32)
    await r.launch(tell, 3, report)
    assert await r.values(report) == [OK, 0]
    assert seen == [3]


async def test_result_that_nobody_wants(r: CallingRig) -> None:
    """A function that gives something can be called without wanting that."""

    @r.off.host_function
    async def f(x: int) -> int:
        return x

    report = r.array(2, np.int32)
    await r.launch(tell, 3, report)
    assert await r.values(report) == [OK, 0]


async def test_arguments_with_padding(r: CallingRig) -> None:
    """Arguments of different sizes arrive as a C compiler lays out a struct of them."""
    seen: list[tuple[Any, ...]] = []

    @r.off.host_function
    async def f(
        a: np.int8,
        b: float,
        c: np.int16,
        d: int,
        e: bool,
        g: np.float32,
        h: np.uint8,
    ) -> float:
        seen.append((a, b, c, d, e, g, h))
        return a + b + c + d + e + g + h

    value = r.array(1, np.float64)
    await r.launch(padded, value)
    assert seen == [(-5, 2.5, -300, 2**40, True, 0.125, 9)]
    assert await r.values(value) == [sum(seen[0])]


# Mapped arrays


@pytest.mark.all_loops
@pytest.mark.parametrize("kind", [ALLOC, TO, FROM, TOFROM])
@pytest.mark.parametrize("n", [0, 1, 5, 70_000])
async def test_mapped_array(r: CallingRig, kind: int, n: int) -> None:
    """to gives the host the content, from gives the device what the host leaves, tofrom both, alloc neither."""
    before = np.arange(n + 1, dtype=np.float32) + 1
    seen: list[np.ndarray[Any, Any]] = []

    @r.off.host_function
    async def f(x: ao.InOut[np.float32]) -> None:
        await asyncio.sleep(0)
        seen.append(x.copy())
        if kind != TO:
            x[:] = -4

    x, report = await r.off.put(before), r.array(2, np.int32)
    await r.launch(map_array, x, n, kind, report)
    assert await r.values(report) == [OK, 0]
    assert seen[0].shape == (n,)
    if kind in (TO, TOFROM):
        assert np.array_equal(seen[0], before[:n])
    after = await r.off.get(x)
    assert after[n] == before[n]
    assert np.array_equal(after[:n], np.full(n, -4) if kind in (FROM, TOFROM) else before[:n])


async def test_array_that_is_only_read_is_read_only(r: CallingRig) -> None:
    """An array that is mapped `to` cannot be written, since nothing would come of it."""
    writeable = []

    @r.off.host_function
    async def f(x: ao.In[np.float32]) -> None:
        writeable.append(x.flags.writeable)

    for kind in (TO, TOFROM):
        await r.launch(map_array, r.array(3, np.float32), 3, kind, r.array(2, np.int32))
    assert writeable == [False, True]


async def test_numbers_beside_arrays(r: CallingRig) -> None:
    """Scalars and arrays in one call, with a result."""

    @r.off.host_function
    async def f(a: np.float32, x: ao.In[np.float32], factor: np.int8, y: ao.InOut[np.float32]) -> float:
        y += a * x * factor
        return float(y.sum())

    n = 1000
    x, y = await r.off.put(np.arange(n, dtype=np.float32)), await r.off.put(np.ones(n, np.float32))
    total = r.array(1, np.float64)
    await r.launch(map_several, x, y, n, 0.5, total)
    expected = 1 + 1.5 * np.arange(n, dtype=np.float32)
    assert np.array_equal(await r.off.get(y), expected)
    assert await r.values(total) == [float(expected.sum())]


@pytest.mark.parametrize(("first", "count"), [(0, 100), (0, 3), (20, 30), (99, 1), (50, 0)])
async def test_memory_that_is_mapped_twice(r: CallingRig, first: int, count: int) -> None:
    """An array and a part of it, in one call, are the same memory on the host as on the device."""
    shared: list[bool] = []

    @r.off.host_function
    async def f(part: ao.InOut[np.int32], whole: ao.InOut[np.int32]) -> None:
        assert (part.shape, whole.shape) == ((count,), (100,))
        shared.append(np.shares_memory(part, whole) or count == 0)
        part += 1000
        whole += 1
        assert np.array_equal(part, whole[first : first + count])

    x = await r.off.put(np.arange(100, dtype=np.int32))
    await r.launch(map_twice, x, 100, first, count)
    expected = np.arange(100) + 1
    expected[first : first + count] += 1000
    assert np.array_equal(await r.off.get(x), expected)
    assert shared == [True]


async def test_arrays_of_calls_at_the_same_time(device_label: str) -> None:
    """Calls that are under way at the same time have host memory of their own."""
    async with calling_rig(device_label, calling_lanes=4) as r:
        together = asyncio.Barrier(4)

        @r.off.host_function
        async def f(x: ao.InOut[np.float32]) -> None:
            mine = x.copy()
            await together.wait()
            x *= 2
            await together.wait()
            assert np.array_equal(x, 2 * mine)

        await r.off.load(map_array)
        arrays = [await r.off.put(np.full(500, i, np.float32)) for i in range(4)]
        reports = [r.array(2, np.int32) for _ in range(4)]
        ops = [r.launch(map_array, x, 500, TOFROM, report) for x, report in zip(arrays, reports, strict=True)]
        for i, op in enumerate(ops):
            await op
            assert np.array_equal(await r.off.get(arrays[i]), np.full(500, 2 * i))


# Calls in a kernel


async def test_several_functions_in_one_kernel(r: CallingRig) -> None:
    """A kernel may call any number of functions, by name or number, each with what another gave."""
    calls: list[str] = []

    @r.off.host_function
    async def f(x: int) -> int:
        calls.append("f")
        return x + 1

    @r.off.host_function(name="g")
    async def something_else(d: float, x: int) -> float:
        calls.append("g")
        await asyncio.sleep(0)
        return d * x

    @r.off.host_function(name=7)
    async def seventh(d: float) -> float:
        calls.append("7")
        return d / 4

    @r.off.host_function
    async def h() -> None:
        calls.append("h")

    values = r.array(3, np.float64)
    await r.launch(several, 5, values)
    assert await r.values(values) == [6, 30, 7.5]
    assert calls == ["f", "g", "7", "h"]


@pytest.mark.all_loops
async def test_calls_in_a_loop(r: CallingRig) -> None:
    """Each call of a loop may use what the one before gave."""

    @r.off.host_function
    async def f(i: int, before: int) -> int:
        if i % 3 == 0:
            await asyncio.sleep(0)
        return before + i

    values = r.array(300)
    await r.launch(in_turn, values, 300)
    assert await r.values(values) == np.cumsum(np.arange(300)).tolist()


@pytest.mark.all_loops
async def test_kernel_that_never_calls(r: CallingRig) -> None:
    """A kernel that could call and does not just runs; ten of them in a row run in order."""
    x = r.array(1, np.int32)
    for _ in range(10):
        r.launch(silent, x)
    assert await r.values(x) == [70]


async def test_call_as_the_last_thing(r: CallingRig) -> None:
    """A call with which a kernel ends is served, with what the kernel wrote before, and copied back."""

    @r.off.host_function
    async def f(x: ao.InOut[np.int64]) -> None:
        await asyncio.sleep(0)
        x *= 3

    x = r.array(1)
    await r.launch(ask_last, x)
    assert await r.values(x) == [15]


@pytest.mark.all_loops
@pytest.mark.parametrize("count", [1, 500])
async def test_post_as_the_last_thing(r: CallingRig, count: int) -> None:
    """When a launch is done, the handlers of all its posts have returned, whatever they wait for."""
    ended: list[int] = []

    @r.off.host_function
    async def f(x: int) -> None:
        for _ in range(x % 4):
            await asyncio.sleep(0)
        ended.append(x)

    report = r.array(1, np.int32)
    await r.launch(post_many, count, report)
    assert sorted(ended) == list(range(count))
    assert await r.values(report) == [OK]


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void post_scratch(ao::Launch launch, long long* scratch, long long n) {
        for (int i = 0; i < 64; ++i) scratch[i] = n;
        launch.post(ao::fn("f"), n, ao::to(scratch, 64));
    }""",
    calls=True,
)
def post_scratch(launch: Any, scratch: ao.InOut[np.int64], n: np.int64) -> None:
    """Fill the scratch with n, post it, and end."""
    scratch[:] = n
    launch.post("f", n, launch.to(scratch))


async def test_scratch_is_the_launchs_until_it_is_done(device_label: str) -> None:
    """What a kernel has posted from its scratch is there for the handler, whatever runs on that lane meanwhile."""
    async with calling_rig(device_label, calling_lanes=1) as r:
        await r.off.load(post_scratch)
        seen: dict[int, set[int]] = {}

        @r.off.host_function
        async def f(n: int, scratch: ao.In[np.int64]) -> None:
            seen[n] = set(scratch.tolist())

        await asyncio.gather(*(r.launch(post_scratch, ao.Scratch(8 * 64), n).wait() for n in range(6)))
        assert seen == {n: {n} for n in range(6)}


async def test_what_comes_after_waits_for_the_handlers(r: CallingRig) -> None:
    """Work on a buffer of a launch that calls starts when its handlers have returned, not when its kernel has."""
    let_go = asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> None:
        await let_go.wait()

    report = r.array(1, np.int32)
    op = r.launch(post_many, 1, report)
    after = r.off.get(report)
    await until(lambda: r.off.stats()["calls"]["open"] and not r.off.stats()["calls"]["resident"])
    await turns()
    assert not after.done()
    assert not op.done()
    let_go.set()
    assert (await after).tolist() == [OK]
    assert op.done()


@pytest.mark.all_loops
async def test_calls_overlap(r: CallingRig) -> None:
    """Four calls made with call_async are under way together, and each gets its own result in any order of waiting."""
    together = asyncio.Barrier(4)

    @r.off.host_function
    async def f(x: int) -> int:
        await together.wait()
        return 10 + x

    values, statuses = r.array(4), r.array(4, np.int32)
    await r.launch(four_at_once, values, statuses)
    assert await r.values(values) == [10, 11, 12, 13]
    assert await r.values(statuses) == [OK] * 4


async def test_poll(r: CallingRig) -> None:
    """poll() says no while the function runs, then gives the result, and gives the same status again."""
    go_on = asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> int:
        await go_on.wait()
        return 10 * x

    @r.off.host_function
    async def go() -> None:
        go_on.set()

    values = r.array(4)
    await r.launch(ask_and_poll, values)
    assert await r.values(values) == [40, OK, 0, 1]


async def test_call_under_way_while_the_kernel_does_something_else(
    device_label: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that nobody waits for yet wakes the host: the two work at the same time."""
    monkeypatch.setattr(health, "TICK_S", 60.0)  # which would find the call, too, if later
    async with calling_rig(device_label) as r:
        gate = r.gate()

        @r.off.host_function
        async def f(x: int) -> int:
            gate.open()
            return 10 * x

        value, report = r.array(1), r.array(2, np.int32)
        await r.launch(ask_ahead, gate.address, 4, value, report)
        assert await r.values(report) == [True, OK]
        assert await r.values(value) == [40]


@pytest.mark.parametrize("count", [1, 300])
async def test_dropped_calls(r: CallingRig, count: int) -> None:
    """A pending call that goes out of scope runs to its end all the same, before the launch is done."""
    let_go, ended = asyncio.Event(), []

    @r.off.host_function
    async def f(x: int) -> int:
        await let_go.wait()
        ended.append(x)
        return x

    @r.off.host_function
    async def g(n: int) -> int:
        let_go.set()
        return -n

    value = r.array(1)
    for _ in range(3):
        ended.clear()
        let_go.clear()
        await r.launch(drop_calls, value, count)
        assert await r.values(value) == [-count]
        assert sorted(ended) == list(range(count))


# Many threads


@pytest.mark.parametrize(("grid", "block"), [(1, 32), (3, 100), (64, 256)])
async def test_calls_from_many_threads(r: CallingRig, grid: int, block: int) -> None:
    """Every thread of every block gets its own result."""
    n = grid * block

    @r.off.host_function
    async def f(x: int) -> int:
        if x % 100 == 0:
            await asyncio.sleep(0)
        return x * x

    values, statuses = r.array(n), r.array(n, np.int32)
    await r.launch(ask_each, values, statuses, n, grid=grid, block=block)
    assert np.array_equal(await r.off.get(values), np.arange(n) ** 2)
    assert not (await r.off.get(statuses)).any()
    assert r.off.stats()["calls"]["served"] == n


async def test_calls_from_many_launches(device_label: str) -> None:
    """More launches than calling lanes, all of which call, each gets its own results."""
    async with calling_rig(device_label, calling_lanes=4) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            operation = ao.current_call().operation  # type: ignore[union-attr]
            await asyncio.sleep(0)
            return numbers[operation] * 1000 + x

        numbers: dict[Any, int] = {}
        results = []
        for i in range(30):
            values, statuses = r.array(40), r.array(40, np.int32)
            numbers[r.launch(ask_each, values, statuses, 40, grid=2, block=20)] = i
            results.append(values)
        for i, values in enumerate(results):
            assert await r.values(values) == [1000 * i + x for x in range(40)]


async def test_divergent_lanes(r: CallingRig) -> None:
    """Half of a warp calls one function, the other half another, which has to wait for the first half's calls."""
    counts: Counter[str] = Counter()

    @r.off.host_function
    async def f(x: int) -> int:
        counts["f"] += 1
        return 100 + x

    @r.off.host_function
    async def g(x: int) -> int:
        counts["g"] += 1
        await asyncio.sleep(0)
        return 200 + x

    values = r.array(32)
    await r.launch(either, values, block=32)
    assert await r.values(values) == [(100 if i % 2 else 200) + i for i in range(32)]
    assert counts == {"f": 16, "g": 16}


async def test_divergent_lanes_that_wait_for_each_other(r: CallingRig) -> None:
    """The calls of one half of a warp may wait for those of the other half: its lanes go on by themselves."""
    f_called, g_called = asyncio.Event(), asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> int:
        f_called.set()
        await g_called.wait()
        return x

    @r.off.host_function
    async def g(x: int) -> int:
        g_called.set()
        await f_called.wait()
        return x

    values = r.array(32)
    await r.launch(either, values, block=32)
    assert await r.values(values) == list(range(32))


@pytest.mark.parametrize(("grid", "block", "n"), [(1, 1, 300), (4, 64, 12)])
async def test_order_of_one_threads_requests(r: CallingRig, grid: int, block: int, n: int) -> None:
    """Handlers of one thread's requests, posts and calls, are started in the order in which it made them."""
    seen: dict[int, list[int]] = {}

    @r.off.host_function
    async def f(thread: int, i: int) -> None:
        seen.setdefault(thread, []).append(i)
        if i % 2:
            await asyncio.sleep(0)

    await r.launch(post_in_order, n, grid=grid, block=block)
    assert seen == {thread: list(range(n)) for thread in range(grid * block)}


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES, 1, 1 << 31])
async def test_warp_call(r: CallingRig, mask: int) -> None:
    """warp_call makes one call for all active lanes, and each gets its result."""
    seen = []

    @r.off.host_function
    async def f(lane: int) -> int:
        seen.append(lane)
        await asyncio.sleep(0)
        return 100 + lane

    values, statuses = r.array(32), r.array(32, np.int32)
    r.off.fill(statuses, 9)
    await r.launch(warp_ask, mask, values, statuses, block=32)
    (speaker,) = seen
    assert mask >> speaker & 1
    assert await r.values(values) == [100 + speaker if mask >> i & 1 else 0 for i in range(32)]
    assert await r.values(statuses) == [OK if mask >> i & 1 else 9 for i in range(32)]


@pytest.mark.all_loops
@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES, 1, 1 << 31])
async def test_warp_call_each(r: CallingRig, mask: int) -> None:
    """warp_call_each makes a call for each active lane, in one request, and each gets its own result."""
    seen = []

    @r.off.host_function
    async def f(lane: np.int32, half: np.float32) -> int:
        seen.append((lane, half))
        if lane % 3 == 0:
            await asyncio.sleep(0)
        return 7 * lane

    values, statuses = r.array(32), r.array(32, np.int32)
    r.off.fill(statuses, 9)
    await r.launch(warp_ask_each, mask, values, statuses, block=32)
    lanes = [i for i in range(32) if mask >> i & 1]
    assert await r.values(values) == [7 * i if i in lanes else 0 for i in range(32)]
    assert await r.values(statuses) == [OK if i in lanes else 9 for i in range(32)]
    assert sorted(seen) == [(i, i / 2) for i in lanes]
    assert r.off.stats()["calls"]["served"] == 1


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES, 0x0000_0700])
async def test_warp_call_each_of_single_bytes(r: CallingRig, mask: int) -> None:
    """Rows and results of a byte each come right, also where they fit the descriptor or the reply itself."""

    @r.off.host_function
    async def f(lane: np.uint8) -> np.uint8:
        return 255 - lane  # type: ignore[return-value]

    values = r.array(32, np.uint8)
    await r.launch(warp_ask_small, mask, values, block=32)
    assert await r.values(values) == [255 - i if mask >> i & 1 else 0 for i in range(32)]


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES])
async def test_warp_call_each_that_takes_several_requests(r: CallingRig, mask: int) -> None:
    """Where the lanes' arguments do not fit one request, each lane gets its result all the same."""

    @r.off.host_function
    async def f(lane: int, twice: int) -> int:
        return lane + twice

    values = r.array(32)
    await r.launch(warp_ask_wide, mask, values, block=32)
    assert await r.values(values) == [3 * i if mask >> i & 1 else 0 for i in range(32)]


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES, 1])
async def test_warp_call_each_for_structs(r: CallingRig, mask: int) -> None:
    """Where the lanes' results do not fit one reply, each lane gets its result all the same."""

    @r.off.host_function
    async def f(lane: int) -> POWERS:  # type: ignore[valid-type]  # a dtype
        return lane**2, lane**3

    values = r.array(64)
    await r.launch(warp_ask_struct, mask, values, block=32)
    assert await r.values(values) == [i**power if mask >> i & 1 else 0 for i in range(32) for power in (2, 3)]


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES, 1])
async def test_warp_call_each_without_a_result(r: CallingRig, mask: int) -> None:
    """warp_call_each waits for functions that have no result, too."""
    seen = []

    @r.off.host_function
    async def f(lane: int) -> None:
        await asyncio.sleep(0)
        seen.append(lane)

    statuses = r.array(32, np.int32)
    r.off.fill(statuses, 9)
    await r.launch(warp_ask_none, mask, statuses, block=32)
    lanes = [i for i in range(32) if mask >> i & 1]
    assert await r.values(statuses) == [OK if i in lanes else 9 for i in range(32)]
    assert sorted(seen) == lanes
    assert r.off.stats()["calls"]["served"] == 1


@pytest.mark.parametrize("mask", [ALL_LANES, SOME_LANES])
async def test_warp_post(r: CallingRig, mask: int) -> None:
    """warp_post tells one thing for all active lanes."""
    seen = []

    @r.off.host_function
    async def f(lane: int) -> None:
        seen.append(lane)

    await r.launch(warp_tell, mask, block=32)
    assert len(seen) == 1
    assert mask >> seen[0] & 1


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("grid", [264, 2500])
async def test_more_callers_than_cells(grid: int) -> None:
    """With more threads calling at once than there are reply cells, or more blocks than fit, all make progress."""
    async with calling_rig("cuda:0", limit_s=20) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            await asyncio.sleep(0)
            return x + 1

        n = grid * 256
        values, statuses = r.array(n), r.array(n, np.int32)
        await r.launch(ask_each, values, statuses, n, grid=grid, block=256)
        assert np.array_equal(await r.off.get(values), np.arange(n) + 1)
        assert not (await r.off.get(statuses)).any()


@pytest.mark.allows_blocking("a loop that is held up leaves the ring full")
async def test_more_posts_than_places(r: CallingRig) -> None:
    """A post that finds the ring full waits until the host has read; none is lost, and their order stays."""
    seen: list[int] = []

    def sent(ticket: int) -> int:
        assert ticket < wire.RING_SLOTS
        return int(r.shared_block().word(wire.slot_offset(ticket) + 8).load())

    @r.off.host_function
    async def f(x: int) -> None:
        if not seen:
            full = r.shared_block().word(wire.TAIL_OFFSET).load() + wire.POSTS  # with what the host has read
            while not sent(full - 1):
                time.sleep(0.001)  # noqa: ASYNC251  # the loop has to stand still
            time.sleep(0.05)  # noqa: ASYNC251  # does the kernel send one more?
            assert not sent(full)
        seen.append(x)

    report, n = r.array(1, np.int32), 3 * wire.POSTS
    await r.launch(post_many, n, report)
    assert seen == list(range(n))
    assert await r.values(report) == [OK]


async def test_more_dropped_calls_than_cells(r: CallingRig) -> None:
    """A reply cell that nobody waits for any more is used again once its reply has come."""
    seen = 0

    @r.off.host_function
    async def f(x: int) -> int:
        nonlocal seen
        assert x == seen
        seen += 1
        return x

    @r.off.host_function
    async def g(n: int) -> int:
        return n

    value, n = r.array(1), 40_000
    await r.launch(drop_calls, value, n)
    assert await r.values(value) == [n]
    assert seen == n


# More than one Offload


async def both_at_once(first: str, second: str) -> None:
    """Let two Offloads' kernels call at the same time, each the function f of its own."""
    async with calling_rig(first) as a, calling_rig(second) as b:
        together = asyncio.Barrier(2)

        def function(factor: int) -> Callable[..., Any]:
            async def f(x: int) -> int:
                await together.wait()
                return factor * x

            return f

        a.host_function(function(10))
        b.host_function(function(100))
        await a.off.load(ask)
        await b.off.load(ask)
        found = await asyncio.gather(a.asked(ask, 3), b.asked(ask, 3))
        assert found == [([OK, 0], 30, None), ([OK, 0], 300, None)]


async def test_two_offloads(device_label: str) -> None:
    """Kernels of two Offloads of one device call at the same time; each reaches the functions of its own."""
    await both_at_once(device_label, device_label)


@pytest.mark.gpu
async def test_host_and_gpu() -> None:
    """Kernels on the host device and on a GPU call at the same time."""
    await both_at_once("host", "cuda:0")


@pytest.mark.gpu
async def test_two_gpus() -> None:
    """Kernels on two GPUs call at the same time."""
    from aiooffload.drivers.cuda import library

    if library.count_devices() < 2:
        pytest.skip("needs two GPUs")
    await both_at_once("cuda:0", "cuda:1")


# What a handler sees


@pytest.mark.all_loops
async def test_context_variables(r: CallingRig) -> None:
    """Handlers run in the context of their launch as it was then; what they set there, only they see."""
    seen = []

    @r.off.host_function
    async def f(x: int) -> int:
        seen.append(word.get())
        word.set("of a handler")
        await asyncio.sleep(0)
        return x

    await r.off.load(ask)
    for value in ("first", "second"):
        word.set(value)
        value_buffer, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, 1, value_buffer, report)
        word.set("later")
        await op
    assert seen == ["first", "second"]
    assert word.get() == "later"


@pytest.mark.all_loops
async def test_current_call(r: CallingRig) -> None:
    """current_call() names the launch, its lane and its device, in tasks of the handler, too, and nowhere else."""
    seen = []

    async def deeper() -> Any:
        return ao.current_call()

    @r.off.host_function
    async def f(x: int) -> int:
        call = ao.current_call()
        assert call is not None
        await asyncio.sleep(0)
        both = (call, await asyncio.create_task(deeper()))
        seen.extend((other.operation, other.operations, other.lane, other.device) for other in both)
        assert "ask" in repr(call)
        return x

    assert ao.current_call() is None
    op = r.launch(ask, 1, r.array(1), r.array(2, np.int32))
    await op
    assert ao.current_call() is None
    assert seen == [(op, (op,), op.lane, r.off.properties.label)] * 2


async def test_batch(r: CallingRig) -> None:
    """A batch function gets arrays of all requests that are there, and gives an array of results."""
    sizes = []

    @r.off.host_function(batch=True)
    async def f(lane: np.int32, half: np.float32) -> np.int64:
        assert isinstance(lane, np.ndarray)
        assert (lane.dtype, half.dtype) == (np.int32, np.float32)
        assert np.array_equal(half, lane / 2)
        sizes.append(len(lane))
        return lane.astype(np.int64) * 5

    values, statuses = r.array(32), r.array(32, np.int32)
    await r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32)
    assert await r.values(values) == [5 * i for i in range(32)]
    assert sizes == [32]


@pytest.mark.all_loops
async def test_batch_of_many_threads(r: CallingRig) -> None:
    """However the requests of many threads fall into batches, each thread gets its own result."""
    sizes: list[int] = []

    @r.off.host_function(batch=True)
    async def f(x: np.int64) -> np.int64:
        sizes.append(len(x))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        return x * 2

    n = 2000
    values, statuses = r.array(n), r.array(n, np.int32)
    await r.launch(ask_each, values, statuses, n, grid=20, block=100)
    assert np.array_equal(await r.off.get(values), 2 * np.arange(n))
    assert sum(sizes) == n
    assert len(sizes) < n


async def test_batch_over_several_launches(device_label: str) -> None:
    """A batch may have requests of several launches; current_call() names them all, and each gets its results."""
    async with calling_rig(device_label, calling_lanes=2) as r:
        held, found = asyncio.Event(), []

        @r.off.host_function(batch=True)
        async def f(x: np.int64) -> np.int64:
            call = ao.current_call()
            assert call is not None
            found.append(call.operations)
            await held.wait()
            return x + 1

        await r.off.load(ask)
        results = [(r.array(1), r.array(2, np.int32)) for _ in range(2)]
        await r.off.drain()
        ops = [r.launch(ask, i, *results[i]) for i in range(2)]
        await until(lambda: sum(len(operations) for operations in found) == 2)
        assert {op for operations in found for op in operations} == set(ops)
        held.set()
        for i in range(2):
            assert await r.values(results[i][0]) == [i + 1]


async def test_batch_of_which_all_launches_are_cancelled(device_label: str) -> None:
    """A batch for several launches is cancelled with the last of them."""
    async with calling_rig(device_label, calling_lanes=2) as r:
        found: list[tuple[ao.Operation[None], ...]] = []
        cancelled = asyncio.Event()

        @r.off.host_function(batch=True)
        async def f(x: np.int64) -> np.int64:
            call = ao.current_call()
            assert call is not None
            found.append(call.operations)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if len(call.operations) == 2:
                    cancelled.set()
                raise
            return x

        await r.off.load(ask)
        results = [(r.array(1), r.array(2, np.int32)) for _ in range(2)]
        await r.off.drain()
        for attempt in range(12):
            found.clear()
            ops = [r.launch(ask, i, *results[i]) for i in range(2)]
            end = time.monotonic() + 0.001 * 2**attempt  # without a turn of the loop, so that both are read at once
            while time.monotonic() < end:
                pass
            await until(lambda: sum(map(len, found)) == 2)
            ops[0].cancel()
            await turns(3)
            assert not cancelled.is_set()
            ops[1].cancel()
            for i, op in enumerate(ops):
                assert isinstance(await end_of(op), asyncio.CancelledError)
                assert (await r.values(results[i][1]))[0] == CANCELLED
            if cancelled.is_set():
                break
        assert len(found) == 1


async def test_progress(r: CallingRig) -> None:
    """progress() gives what the kernel says, in order, and the last of it at the end."""
    seen: list[tuple[int, int]] = []
    looked = asyncio.Event()

    @r.off.host_function
    async def f(i: int) -> None:
        while not seen or seen[-1][0] < i:
            looked.clear()
            await looked.wait()

    await r.off.load(in_steps)
    op = r.launch(in_steps, 5)
    async for pair in op.progress(0.001):
        seen.append(pair)
        looked.set()
    assert seen == [(i, 5) for i in range(1, 6)]
    assert op.done()
    assert [pair async for pair in op.progress()] == [(5, 5)]


async def test_progress_of_one_that_fails(r: CallingRig) -> None:
    """progress() ends with the launch, and leaves its failure to whoever awaits it."""

    @r.off.host_function
    async def f(i: int) -> None:
        if i == 3:
            raise KeyError(i)

    op = r.launch(in_steps, 5)
    assert [pair async for pair in op.progress()][-1][0] == 3
    with pytest.raises(ao.HostFunctionError):
        await op


# Stopping


@pytest.mark.all_loops
async def test_cancelled_is_seen(r: CallingRig) -> None:
    """A kernel that looks at cancelled() sees that its launch was asked to stop; awaiting it says so."""

    @r.off.host_function
    async def started() -> None:
        running.set()

    running, seen = asyncio.Event(), r.array(1, np.int32)
    op = r.launch(until_cancelled, seen)
    await running.wait()
    assert not op.done()
    assert op.cancel()
    with pytest.raises(asyncio.CancelledError):
        await op
    assert op.cancelled()
    assert not op.cancel()
    assert await r.values(seen) == [1]


@pytest.mark.all_loops
@pytest.mark.parametrize("count", [1, 200])
async def test_cancel_ends_calls_and_handlers(r: CallingRig, count: int) -> None:
    """After cancel() every wait on the device is CANCELLED, and every handler gets CancelledError from its await."""
    open_calls, cancelled = set(), set()

    @r.off.host_function
    async def f(x: int) -> int:
        open_calls.add(x)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.add(x)
            raise
        return x

    values, statuses = r.array(count), r.array(count, np.int32)
    op = r.launch(ask_each, values, statuses, count, block=count)
    await until(lambda: len(open_calls) == count)
    op.cancel()
    with pytest.raises(asyncio.CancelledError):
        await op
    assert cancelled == open_calls
    assert await r.values(statuses) == [CANCELLED] * count


async def test_handler_that_cancels_its_own_launch(r: CallingRig) -> None:
    """A handler stopped before it suspended for the first time gets CancelledError from its first await."""
    ends: list[str] = []

    @r.off.host_function
    async def f(x: int) -> int:
        call = ao.current_call()
        assert call is not None
        call.operation.cancel()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        return x

    value, report = r.array(1), r.array(2, np.int32)
    op = r.launch(ask, 6, value, report)
    with pytest.raises(asyncio.CancelledError):
        await op
    assert ends == ["cancelled"]
    assert (await r.values(report))[0] == CANCELLED


async def test_cancelled_while_an_array_is_copied(device_label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that is cancelled while a mapped array is copied is not over before the copy is."""
    async with calling_rig(device_label, lanes=1) as r:

        @r.off.host_function
        async def f(x: ao.InOut[np.float32]) -> None:
            return None

        array, report = r.array(4, np.float32), r.array(2, np.int32)
        await r.off.load(hold, map_array)
        await r.off.drain()
        [lane] = r.off.lanes
        engine = r.off._engine
        assert engine is not None
        assert engine.reverse._opened is not None
        monkeypatch.setattr(engine.reverse._opened.mapping, "_to_host", lane)  # rather than the copies' own
        [gate] = await r.rig.hold_all()
        op = r.launch(map_array, array, 4, TO, report)
        await until(lambda: any(one.name.startswith("map") for one in lane.queue.operations()))
        op.cancel()
        await turns()
        assert not op.done()
        gate.open()
        assert isinstance(await end_of(op), asyncio.CancelledError)


async def test_cancelling_a_task_leaves_the_launch_alone(r: CallingRig) -> None:
    """A task that awaits a launch can be cancelled; the launch and its handlers go on."""
    let_go = asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> int:
        await let_go.wait()
        return x

    value, report = r.array(1), r.array(2, np.int32)
    op = r.launch(ask, 6, value, report)
    waiting = asyncio.create_task(op.wait())
    await until(lambda: r.off.stats()["calls"]["open"])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    let_go.set()
    await op
    assert await r.values(value) == [6]


async def test_handler_that_cleans_up(r: CallingRig) -> None:
    """A launch that was cancelled is done when its handlers have cleaned up, not before."""
    let_go, cleaned, started = asyncio.Event(), [], asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> int:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            await let_go.wait()
            cleaned.append(x)
        return x

    op = r.launch(ask, 6, r.array(1), r.array(2, np.int32))
    await started.wait()
    op.cancel()
    await until(lambda: not r.off.stats()["calls"]["resident"])
    await turns()
    assert not op.done()
    let_go.set()
    assert isinstance(await end_of(op), asyncio.CancelledError)
    assert cleaned == [6]


@pytest.mark.all_loops
def with_clean_up(r: CallingRig, clean_up: Callable[[], Coroutine[Any, Any, object]]) -> asyncio.Event:
    """Register an f that waits until it is cancelled and then cleans up; return what it sets when it is called."""
    called = asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> int:
        called.set()
        try:
            await asyncio.Event().wait()
        finally:
            await clean_up()
        return x

    return called


async def test_the_first_stop_counts(r: CallingRig) -> None:
    """A launch that was cancelled is cancelled, also if its timeout passes while its handlers clean up."""
    called = with_clean_up(r, lambda: asyncio.sleep(0.3))
    await r.off.load(ask)
    op = r.launch(ask, 6, r.array(1), r.array(2, np.int32), timeout_s=0.2)
    await called.wait()
    op.cancel()
    assert isinstance(await end_of(op), asyncio.CancelledError)
    assert op.cancelled()


@pytest.mark.parametrize("how", ["cancel", "timeout_s"])
async def test_handler_whose_cleaning_up_fails(r: CallingRig, how: str) -> None:
    """What a host function raises while it is cancelled is the cause of how its launch ends."""

    async def fails() -> None:
        raise OSError("rollback failed")

    called = with_clean_up(r, fails)
    value, report = r.array(1), r.array(2, np.int32)
    op = r.launch(ask, 6, value, report, timeout_s=None if how == "cancel" else 0.05)
    await called.wait()
    if how == "cancel":
        op.cancel()
    failure = await end_of(op)
    assert isinstance(failure, asyncio.CancelledError if how == "cancel" else ao.OffloadTimeout)
    assert isinstance(failure.__cause__, ao.HostFunctionError)
    assert isinstance(failure.__cause__.__cause__, OSError)
    assert await r.values(report) == [CANCELLED, 0]


async def test_timeout_of_a_launch(r: CallingRig) -> None:
    """timeout_s ends a launch that calls, on the device too: its handlers are cancelled, its waits end."""
    cancelled = []

    @r.off.host_function
    async def f(x: int) -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(x)
            raise
        return x

    await r.off.load(ask)
    value, report = r.array(1), r.array(2, np.int32)
    op = r.launch(ask, 6, value, report, timeout_s=0.1)
    with pytest.raises(ao.OffloadTimeout, match=r"ask took over 0\.1 s"):
        await op
    assert cancelled == [6]
    assert await r.values(report) == [CANCELLED, 0]


async def test_timeout_that_is_not_reached(r: CallingRig) -> None:
    """A launch that is done before its timeout_s has nothing of it."""

    @r.off.host_function
    async def f(x: int) -> int:
        return x

    value = r.array(1)
    await r.launch(ask, 6, value, r.array(2, np.int32), timeout_s=60)
    assert await r.values(value) == [6]


async def test_launch_that_completes_all_the_same(r: CallingRig) -> None:
    """A kernel that does not look completes, and counts as completed, although it was asked to stop."""
    gate, x = r.gate(), r.array(1, np.int32)
    op = r.launch(deaf, gate.address, x)
    await until(lambda: gate.started)
    assert op.cancel()
    await turns()
    assert not op.done()
    gate.open()
    await op
    assert not op.cancelled()
    assert await r.values(x) == [3]


async def test_cancelled_when_only_handlers_are_left(r: CallingRig) -> None:
    """A launch whose kernel is over can be cancelled while handlers of its posts run: they are cut short."""
    cancelled = []
    started = 0

    @r.off.host_function
    async def f(x: int) -> None:
        nonlocal started
        started += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(x)
            raise

    op = r.launch(post_many, 3, r.array(1, np.int32))
    await until(lambda: started == 3 and not r.off.stats()["calls"]["resident"])
    assert op.cancel()
    with pytest.raises(asyncio.CancelledError):
        await op
    assert sorted(cancelled) == [0, 1, 2]


async def test_cancelled_while_it_waits_on_the_host(device_label: str) -> None:
    """A launch that waits for a calling lane is cancelled at once, and never calls."""
    async with calling_rig(device_label, calling_lanes=1) as r:
        let_go, seen = asyncio.Event(), []

        @r.off.host_function
        async def f(x: int) -> int:
            seen.append(x)
            await let_go.wait()
            return x

        first, report = r.array(1), r.array(2, np.int32)
        running = r.launch(ask, 1, first, report)
        waiting = r.launch(ask, 2, r.array(1), r.array(2, np.int32))
        await until(lambda: seen)
        waiting.cancel()
        assert waiting.done()
        assert waiting.cancelled()
        let_go.set()
        await running
        await r.off.drain()
        assert seen == [1]
        assert await r.values(first) == [1]


# Work on the same Offload from within a handler


@pytest.mark.all_loops
@pytest.mark.parametrize("queued", ["nothing", "on its buffer", "after it"])
async def test_handler_launches_and_awaits(device_label: str, queued: str) -> None:
    """A handler launches ordinary work on its Offload and awaits it, on the only lane, whatever is queued there."""
    async with calling_rig(device_label, lanes=1) as r:
        await r.off.load(add, nothing, ask)
        total = r.word(5)
        go_on = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            await go_on.wait()
            await r.launch(add, total, x)
            (found,) = await r.off.get(total)
            copied = await r.off.put(np.array([int(found)], np.uint64))
            return await r.read(copied)

        value, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, 6, value, report)
        later: list[ao.Operation[Any]] = []
        if queued == "on its buffer":
            later = [r.off.fill(report, 9), r.off.get(report)]
        elif queued == "after it":
            later = [r.launch(nothing, after=[op]), r.launch(nothing, after=op, lane=r.off.lanes[0])]
        await until(lambda: r.off.stats()["calls"]["open"])
        await turns()
        assert not any(other.done() for other in later)
        go_on.set()
        await op
        assert await r.values(value) == [11]
        for other in later:
            await other


async def test_handlers_of_many_calls_launch(device_label: str) -> None:
    """Handlers of many calls at once each launch work on the only lane and await it."""
    async with calling_rig(device_label, lanes=1, lane_depth=2) as r:
        await r.off.load(add)

        @r.off.host_function
        async def f(x: int) -> int:
            mine = r.word(x)
            await r.launch(add, mine, 1000)
            return await r.read(mine)

        values, statuses = r.array(100), r.array(100, np.int32)
        await r.launch(ask_each, values, statuses, 100, block=100)
        assert await r.values(values) == [1000 + x for x in range(100)]


async def test_nested_call(device_label: str) -> None:
    """A handler launches another kernel that calls, where a calling lane is free, down to the last one."""
    async with calling_rig(device_label, calling_lanes=3) as r:
        await r.off.load(ask)
        failures: list[BaseException] = []

        @r.off.host_function
        async def f(x: int) -> int:
            if x == 0:
                with pytest.raises(ao.UsageError, match="calling_lanes") as caught:
                    r.launch(ask, 0, r.array(1), r.array(2, np.int32))
                failures.append(caught.value)
                return 1
            value, report = r.array(1), r.array(2, np.int32)
            await r.launch(ask, x - 1, value, report)
            return (await r.values(value))[0] + 10

        assert await r.asked(ask, 2) == ([OK, 0], 21, None)
        assert len(failures) == 1


async def test_failure_of_a_nested_call(device_label: str) -> None:
    """A failure quotes the one below it once, so that its text grows by a line with each launch in between."""
    async with calling_rig(device_label, calling_lanes=16) as r:
        lengths: list[int] = []

        @r.off.host_function
        async def f(x: int) -> int:
            if x == 0:
                raise Boom('the "last" one')
            inner = await end_of(r.launch(ask, x - 1, r.array(1), r.array(2, np.int32)))
            assert inner is not None
            lengths.append(len(str(inner)))
            raise inner

        failure = await end_of(r.launch(ask, 8, r.array(1), r.array(2, np.int32)))
        assert "Boom('the \"last\" one')" in str(failure)
        steps = np.diff([*lengths, len(str(failure))])
        assert steps.max() == steps.min() < 150


async def test_nested_launches_of_which_one_is_held(device_label: str) -> None:
    """A launch of a host function that comes after something keeps its lane: what is launched meanwhile has another."""
    async with calling_rig(device_label, call_timeout_s=4) as r:
        await r.off.load(ask, silent, drop_calls)
        held: list[ao.Operation[None]] = []

        async def slow() -> None:
            await asyncio.sleep(0.05)

        @r.off.host_function
        async def f(x: int) -> int:
            held.append(r.launch(silent, r.array(1, np.int32), after=[r.off.host_task(slow)]))
            await r.launch(drop_calls, r.array(1), 0)
            return x

        @r.off.host_function
        async def g(n: int) -> int:
            await held[0]
            return n

        assert await r.asked(ask, 6) == ([OK, 0], 6, None)


async def test_launch_from_within_a_custom_operation(device_label: str) -> None:
    """A launch that calls, submitted while something else is put together, goes once that is there."""
    async with calling_rig(device_label, lanes=2) as r:
        await r.off.load(hold, silent)
        gate, made, x = r.gate(), [], r.array(1, np.int32)
        await r.off.drain()
        held = r.launch(hold, gate.address, lane=r.off.lanes[0])
        await until(lambda: gate.started)
        custom = r.off.custom_operation(lambda lane: made.append(r.launch(silent, x)), lane=r.off.lanes[0])
        assert made
        async with asyncio.timeout(5):
            await made[0]
        gate.open()
        await held
        await custom


async def test_launches_take_whichever_lane_is_free(device_label: str) -> None:
    """A launch that calls waits for no other one as long as there is a lane for it."""
    async with calling_rig(device_label, calling_lanes=2, call_timeout_s=4) as r:
        await r.off.load(ask, silent)
        last = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            if x == 1:
                await last.wait()
            else:
                last.set()
            return x

        values, reports = [r.array(1) for _ in range(2)], [r.array(2, np.int32) for _ in range(2)]
        first = r.launch(ask, 1, values[0], reports[0])
        await r.launch(silent, r.array(1, np.int32))
        both = r.launch(silent, r.array(1, np.int32)), r.launch(ask, 2, values[1], reports[1])
        for op in (*both, first):
            await op


async def test_nested_call_while_others_wait_for_a_lane(device_label: str) -> None:
    """A nested launch is refused, and nothing hangs, also where other launches wait for the calling lanes."""
    async with calling_rig(device_label, calling_lanes=1) as r:
        await r.off.load(ask)
        refused = []

        @r.off.host_function
        async def f(x: int) -> int:
            try:
                r.launch(ask, 0, r.array(1), r.array(2, np.int32))
            except ao.UsageError as error:
                refused.append(str(error))
            return x

        found = await asyncio.gather(*(r.asked(ask, x) for x in range(4)))
        assert found == [([OK, 0], x, None) for x in range(4)]
        assert len(refused) == 4


async def begin_load(r: CallingRig, kernel: ao.Kernel) -> asyncio.Task[None]:
    """Load a kernel in a task that waits by now for maintenance, which a kernel that calls holds up."""
    engine = r.off._engine
    assert engine is not None
    load = asyncio.create_task(r.off.load(kernel))
    await until(lambda: engine.lanes.pauses, "maintenance was asked for")
    return load


@pytest.mark.all_loops
async def test_maintenance_while_a_kernel_calls(device_label: str) -> None:
    """A load that another task asks for waits for the kernel that calls, whose handler's work goes on."""
    async with calling_rig(device_label, lanes=2) as r:
        await r.off.load(add, ask)
        go_on, total = asyncio.Event(), r.word(5)

        @r.off.host_function
        async def f(x: int) -> int:
            await go_on.wait()
            await r.launch(add, total, x)
            return await r.read(total)

        value, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, 6, value, report)
        await until(lambda: r.off.stats()["calls"]["open"])
        fresh = ao.Kernel("nothing", cuda=nothing.cuda_source, host=nothing.host_function)
        load = await begin_load(r, fresh)
        second = r.launch(ask, 7, r.array(1), r.array(2, np.int32))  # comes after the load
        await turns()
        assert not load.done()
        assert r.off.stats()["calls"]["resident"] == 1
        go_on.set()
        await op
        await load
        await r.launch(fresh)
        await second
        assert await r.values(value) == [11]


@pytest.mark.all_loops
@pytest.mark.parametrize("what", ["launch", "get"])
async def test_awaited_launch_that_maintenance_holds_up(device_label: str, what: str) -> None:
    """A launch that calls, of another task, starts where a handler awaits it, or a copy behind it: a load waits on."""
    async with calling_rig(device_label, call_timeout_s=5) as r:
        await r.off.load(ask)
        go_on, second_value = asyncio.Event(), r.array(1)

        @r.off.host_function
        async def f(x: int) -> int:
            if x == 6:
                await go_on.wait()
                await (second if what == "launch" else r.off.get(second_value))
            return x + 1

        value, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, 6, value, report)
        await until(lambda: r.off.stats()["calls"]["open"])
        load = await begin_load(r, ao.Kernel("nothing", cuda=nothing.cuda_source, host=nothing.host_function))
        second = r.launch(ask, 7, second_value, r.array(2, np.int32))
        await turns()
        assert not second.done()
        go_on.set()
        await op
        await load
        assert (await r.values(value), await r.values(second_value)) == ([7], [8])


async def test_awaited_launch_that_fails_as_soon_as_maintenance_lets_it_go(device_label: str) -> None:
    """Waiting for it lets it go, and it ends at once, since what it names has failed: the handler is told."""

    async def breaks() -> None:
        raise Boom

    async with calling_rig(device_label, call_timeout_s=5) as r:
        await r.off.load(ask)
        go_on, seen = asyncio.Event(), []
        failed = r.off.host_task(breaks)
        assert isinstance(await end_of(failed), Boom)

        @r.off.host_function
        async def f(x: int) -> int:
            await go_on.wait()
            with pytest.raises(ao.DependencyError):
                await second
            seen.append(x)
            return x

        value = r.array(1)
        op = r.launch(ask, 6, value, r.array(2, np.int32))
        await until(lambda: r.off.stats()["calls"]["open"])
        load = await begin_load(r, ao.Kernel("nothing", cuda=nothing.cuda_source, host=nothing.host_function))
        second = r.launch(ask, 7, r.array(1), r.array(2, np.int32), after=[failed])
        go_on.set()
        await op
        await load
        assert seen == [6]


async def test_awaited_copy_behind_a_launch_of_another_offload() -> None:
    """A handler of one may wait for what comes after a launch of the other, which has lanes of its own."""
    async with calling_rig("host", calling_lanes=2) as a, calling_rig("host", calling_lanes=1) as b:
        await a.off.load(ask)
        await b.off.load(ask)
        go_on = asyncio.Event()

        async def f(x: int) -> int:
            if x == 1:
                await go_on.wait()
            if x == 2:
                asyncio.get_running_loop().call_soon(go_on.set)
                await copied
            return x * 10

        for r in (a, b):
            r.host_function(f)
        first = b.launch(ask, 1, b.array(1), b.array(2, np.int32))
        source, target, value = b.array(1), a.array(1), a.array(1)
        behind = b.launch(ask, 3, source, b.array(2, np.int32))  # waits for a lane
        copied = a.off.copy(target, source)
        await a.launch(ask, 2, value, a.array(2, np.int32))
        await asyncio.gather(first.wait(), behind.wait())
        assert (await a.values(target), await a.values(value)) == ([30], [20])


async def test_opening_another_offload_while_a_kernel_calls(device_label: str) -> None:
    """Another Offload can be opened, and closed, by another task while a kernel calls: it waits for that."""
    async with calling_rig(device_label) as r:
        go_on = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            await go_on.wait()
            return x

        value, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, 6, value, report)
        await until(lambda: r.off.stats()["calls"]["open"])

        async def another() -> int:
            async with ao.Offload(device_label, lanes=1) as other:
                return int((await other.get(await other.put([3])))[0])

        opening = asyncio.create_task(another())
        await turns()
        go_on.set()
        assert await opening == 3
        await op
        assert await r.values(value) == [6]


async def test_work_on_another_offload_while_a_kernel_calls(device_label: str) -> None:
    """A load on one Offload waits for the kernel that calls on another; the handler's work on either goes on."""
    async with calling_rig(device_label) as r, ao.Offload(device_label, lanes=1) as other:
        await r.off.load(ask)
        go_on = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            await go_on.wait()
            return int((await other.get(await other.put([x + 1])))[0])

        value, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, 6, value, report)
        await until(lambda: r.off.stats()["calls"]["open"])
        fresh = ao.Kernel("nothing", cuda=nothing.cuda_source, host=nothing.host_function)
        load = asyncio.create_task(other.load(fresh))
        await turns()
        go_on.set()
        await op
        await load
        assert await r.values(value) == [7]


async def test_handler_that_wants_what_another_task_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler is refused a kernel that another task is loading; the other task's launch takes no harm."""
    async with calling_rig("host") as r:
        await r.off.load(ask)
        engine = r.off._engine
        assert engine is not None
        compile_kernel, go_on = engine.device.compile, threading.Event()

        def slow(kernel: ao.Kernel) -> Any:
            assert go_on.wait(20)
            return compile_kernel(kernel)

        monkeypatch.setattr(engine.device, "compile", slow)
        fresh, called = ao.Kernel("nothing", host=nothing.host_function), asyncio.Event()
        refused: list[str] = []

        @r.off.host_function
        async def f(x: int) -> int:
            called.set()
            await loading.wait()
            try:
                await r.off.load(fresh)
            except ao.UsageError as error:
                refused.append(str(error))
            return x

        loading = asyncio.Event()
        value, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, 6, value, report)
        await called.wait()
        outside = r.launch(fresh)
        await turns()
        loading.set()
        await until(lambda: refused or op.done())
        go_on.set()
        await op
        await outside
        assert len(refused) == 1
        assert await r.values(value) == [6]


async def test_terminated_while_progress_is_watched() -> None:
    """terminate() ends progress() with what the kernel said last."""
    async with calling_rig(bury=True) as r:
        called = asyncio.Event()

        @r.off.host_function
        async def f(i: int) -> None:
            called.set()
            await asyncio.Event().wait()

        op = r.launch(in_steps, 5)
        await called.wait()
        r.off.terminate()
        assert [pair async for pair in op.progress()] == [(1, 5)]
        assert isinstance(await end_of(op), ao.OffloadError)


FORBIDDEN: dict[str, Callable[[CallingRig, ao.Buffer], Any]] = {
    "load": lambda r, buffer: r.off.load(ao.Kernel("nothing", cuda=nothing.cuda_source, host=nothing.host_function)),
    "drain": lambda r, buffer: r.off.drain(),
    "aclose": lambda r, buffer: r.off.aclose(),
    "open": lambda r, buffer: ao.Offload(r.off.properties.label).__aenter__(),
    "progress": lambda r, buffer: anext(mine().progress()),
    "get": lambda r, buffer: r.off.get(buffer),
    "fill": lambda r, buffer: r.off.fill(buffer, 0),
    "launch": lambda r, buffer: r.launch(silent, buffer),
    "launch of what is not loaded": lambda r, buffer: r.launch(ao.Kernel("nothing", host=nothing.host_function)),
    "after": lambda r, buffer: r.launch(nothing, after=[ao.current_call().operation]),  # type: ignore[union-attr]
    "await": lambda r, buffer: mine().wait(),
    "await in a task": lambda r, buffer: asyncio.gather(mine()),
    "await what comes after it": lambda r, buffer: later.get()[0].wait(),
}
later: contextvars.ContextVar[list[ao.Operation[None]]] = contextvars.ContextVar("later")
"""What comes after the launch."""


def mine() -> ao.Operation[None]:
    """The launch that the running host function serves."""
    call = ao.current_call()
    assert call is not None
    return call.operation


@pytest.mark.parametrize("what", FORBIDDEN)
async def test_what_would_wait_for_the_launch(device_label: str, what: str) -> None:
    """In a handler whatever would wait for its own launch raises UsageError, in tasks it makes, too; work goes on."""
    async with calling_rig(device_label) as r:
        await r.off.load(nothing, ask, silent)
        refused: list[str] = []
        submitted: list[ao.Operation[Any]] = []
        report = r.array(2, np.int32)

        async def try_it() -> None:
            try:
                done = FORBIDDEN[what](r, report)
                submitted.extend([done] if isinstance(done, ao.Operation) else [])
                async with asyncio.timeout(2):
                    await done
            except ao.UsageError as error:
                refused.append(str(error))

        @r.off.host_function
        async def f(x: int) -> int:
            await try_it()
            await asyncio.create_task(try_it())
            return x

        value = r.array(1)
        behind: list[ao.Operation[None]] = []
        later.set(behind)
        op = r.launch(ask, 6, value, report)
        behind.append(r.launch(nothing, after=[op]))
        await op
        await behind[0]
        assert len(refused) == 2
        assert all("host function" in text for text in refused)
        assert submitted == []  # refused, not taken to fail later
        assert "closed" not in repr(r.off)
        assert await r.values(value) == [6]
        assert await r.values(report) == [OK, 0]


async def test_what_comes_after_a_launch_is_not_its_handlers_affair(r: CallingRig) -> None:
    """Work behind a launch of which a handler ended last is put together outside of that handler and its context."""
    started, go_on = asyncio.Event(), asyncio.Event()
    seen: list[object] = []

    @r.off.host_function
    async def f(x: int) -> None:
        started.set()
        await go_on.wait()

    def custom(stream: object) -> None:
        seen.extend([ao.current_call(), asyncio.current_task()])
        r.launch(nothing)  # in the handler it would be the handler's

    await r.off.load(post_many, nothing)
    op = r.launch(post_many, 1, r.array(2, np.int32))
    behind = r.off.custom_operation(custom, after=[op])
    await started.wait()
    await until(lambda: not r.off.stats()["calls"]["resident"])
    go_on.set()
    await behind
    assert seen == [None, None]


async def test_launches_that_call_for_one_another(r: CallingRig) -> None:
    """Where each host function has the next launch made, those that are done are not kept by those after them."""
    await r.off.load(ask)
    done, rounds = asyncio.Event(), 0
    tasks: set[asyncio.Task[None]] = set()

    async def one() -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 200:
            done.set()
        else:
            await r.launch(ask, 1, r.array(1), r.array(2, np.int32))

    @r.off.host_function
    async def f(x: int) -> int:
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return x

    await one()
    await done.wait()
    await asyncio.gather(*tasks)
    await r.off.drain()
    gc.collect()
    assert sum(type(found) is CallingLaunch for found in gc.get_objects()) < 10


async def test_launches_that_call_for_the_next_before_they_are_done(r: CallingRig) -> None:
    """What the last of a long row still keeps are the few that are not done."""
    await r.off.load(ask)
    kept = 0

    @r.off.host_function
    async def f(x: int) -> int:
        nonlocal kept
        await until(lambda: r.off.stats()["calls"]["resident"] < 3)
        if x:
            r.launch(ask, x - 1, r.array(1), r.array(2, np.int32))
        else:
            gc.collect()
            kept = sum(type(found) is CallingLaunch for found in gc.get_objects())
        return x

    await r.launch(ask, 50, r.array(1), r.array(2, np.int32))
    await r.off.drain()
    assert 0 < kept < 10


async def test_what_would_wait_for_an_outer_launch(r: CallingRig) -> None:
    """In the handler of a nested launch this goes for the outer launch, too, which waits for all of it."""
    await r.off.load(ask, nothing)
    refused: list[str] = []

    @r.off.host_function
    async def f(x: int) -> int:
        if x:
            await r.launch(ask, 0, r.array(1), r.array(2, np.int32))
            return x
        for use in (lambda: r.off.get(report), lambda: r.launch(nothing, after=[op])):
            try:
                use()
            except ao.UsageError as error:
                refused.append(str(error))
        return x

    value, report = r.array(1), r.array(2, np.int32)
    op = r.launch(ask, 6, value, report)
    await op
    assert len(refused) == 2
    assert await r.values(value) == [6]


async def test_what_waits_for_something_behind_the_launch(r: CallingRig) -> None:
    """A handler may not wait either for what was queued behind its launch: UsageError, not a deadlock."""
    await r.off.load(nothing, ask)
    behind: list[ao.Operation[Any]] = []
    refused: list[str] = []

    @r.off.host_function
    async def f(x: int) -> int:
        try:
            await r.launch(nothing, after=behind)
        except ao.UsageError as error:
            refused.append(str(error))
        return x

    value, report = r.array(1), r.array(2, np.int32)
    op = r.launch(ask, 6, value, report)
    behind.append(r.launch(nothing, after=[op]))
    await op
    assert len(refused) == 1
    await behind[0]


async def test_what_waits_behind_a_gate_that_waits_for_the_launch(device_label: str) -> None:
    """Nor for what is behind a gate on its lane which the end of the launch opens; before the gate there is nothing to
    wait for."""
    async with calling_rig(device_label, lanes=2) as r:
        await r.off.load(nothing, ask, hold, add)
        refused: list[str] = []
        word = r.word()
        shut, free = r.off.lanes
        gate = r.gate()

        @r.off.host_function
        async def f(x: int) -> int:
            behind.extend(r.launch(add, word, 1, lane=shut) for _ in range(2))  # one comes after the other
            gate.open()
            await before
            await r.launch(nothing, lane=free)
            for waits in (opened, *behind):
                try:
                    await waits
                except ao.UsageError as error:
                    refused.append(str(error))
            return x

        behind: list[ao.Operation[None]] = []
        value, report = r.array(1), r.array(2, np.int32)
        await r.off.drain()
        holding, before = r.launch(hold, gate.address, lane=shut), r.launch(nothing, lane=shut)
        op = r.launch(ask, 6, value, report)
        opened = r.off.gate(op, lane=shut)
        await op
        assert len(refused) == 3
        assert await r.values(value) == [6]
        for later in (holding, opened, *behind):
            await later
        assert await r.read(word) == 2


async def test_task_that_outlives_its_handler(r: CallingRig) -> None:
    """What a handler has left running may do anything once its launch is done."""
    await r.off.load(ask)
    tasks, done = [], asyncio.Event()

    async def later(report: ao.Buffer) -> list[Any]:
        await done.wait()
        await r.off.drain()
        return await r.values(report)

    @r.off.host_function
    async def f(x: int) -> int:
        tasks.append(asyncio.create_task(later(report)))
        return x

    report = r.array(2, np.int32)
    await r.launch(ask, 6, r.array(1), report)
    done.set()
    assert await tasks[0] == [OK, 0]
