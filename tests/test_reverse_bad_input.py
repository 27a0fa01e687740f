"""Reverse offload with bad input: each kind ends, says what is wrong, and leaves the Offload usable."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import functools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.rules.wire import Code, function_id
from tests.kernels import Boom, Gate, nothing, turns, until
from tests.reverse_kernels import (
    CANCELLED,
    ERROR,
    INCLUDE,
    OK,
    TIMEOUT,
    TOFROM,
    CallingRig,
    ask,
    ask_double,
    ask_each,
    ask_float,
    ask_narrow,
    attempt,
    calling_rig,
    echo_kernel,
    end_of,
    give_up,
    map_array,
    post_and_hold,
    post_many,
    several,
    silent,
    tell,
    too_large,
    warp_ask_each,
    warp_ask_small,
)

ROOT = Path(__file__).parents[1]
ALL_LANES = 0xFFFFFFFF


@pytest.fixture
async def r(device_label: str) -> AsyncIterator[CallingRig]:
    """An Offload that has to be usable when the test is through with it."""
    async with calling_rig(device_label) as opened:
        yield opened
        await works(opened)


async def works(r: CallingRig) -> None:
    """Launch what calls, and what does not, and find nothing left over of what came before."""

    @r.off.host_function(name="works")
    async def gives(x: int) -> int:
        await asyncio.sleep(0)
        return x + 1

    for x in range(5):
        value, report = r.array(1), r.array(2, np.int32)
        await r.launch(ask_works, x, value, report)
        assert await r.values(value) == [x + 1]
    await r.launch(nothing)
    await r.off.drain()
    calls = r.off.stats()["calls"]
    assert (calls["dropped"], calls["resident"], calls["open"]) == (0, 0, 0)


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_works(ao::Launch launch, long long x, long long* value, int* report) {
        report[0] = (int)launch.call(ao::fn("works"), value[0], x);
    }""",
    calls=True,
)
def ask_works(launch: Any, x: np.int64, value: ao.Out[np.int64], report: ao.Out[np.int32]) -> None:
    """Call works(x)."""
    report[0], _, value[0] = attempt(lambda: launch.call("works", x, dtype=np.int64))


def failed(failure: BaseException | None, code: int, *texts: str) -> BaseException | None:
    """Check that a launch has failed with a HostFunctionError with this code and these texts; return its cause."""
    assert isinstance(failure, ao.HostFunctionError), failure
    assert failure.code == code
    for text in texts:
        assert text in str(failure)
    return failure.__cause__


# Calls that fit no function


async def test_unknown_function(r: CallingRig) -> None:
    """A call of what is not registered gets ERROR; the launch fails, and the error names what there is."""

    @r.off.host_function
    async def other(x: int) -> int:
        return x

    report, value, failure = await r.asked(ask, 1)
    assert (report, value) == ([ERROR, Code.UNKNOWN_FUNCTION], -1)
    failed(failure, Code.UNKNOWN_FUNCTION, "kernel ask", "not registered", "'other'")


async def test_post_to_an_unknown_function(r: CallingRig) -> None:
    """A post to what is not registered fails its launch, although nobody waits for an answer."""
    op = r.launch(post_many, 3, r.array(1, np.int32))
    failed(await end_of(op), Code.UNKNOWN_FUNCTION, "post_many", "not registered")


async def test_arguments_of_another_size(r: CallingRig) -> None:
    """A call with other arguments than the function takes gets ERROR; the error has both sizes."""
    seen = []

    @r.off.host_function
    async def f(x: int) -> None:
        seen.append(x)

    report = r.array(2, np.int32)
    op = r.launch(ask_narrow, 1, report)
    failed(await end_of(op), Code.WRONG_ARGUMENTS, "'f'", "4 bytes", "takes 8", "x: int64")
    assert await r.values(report) == [ERROR, Code.WRONG_ARGUMENTS]
    assert seen == []


async def test_arguments_that_are_too_large(r: CallingRig) -> None:
    """264 bytes of arguments get ERROR, as a call and as a post; what lies beside them stays as it is."""

    async def f(x: Any) -> Any:
        await asyncio.sleep(0)
        return x

    f.__annotations__.update({"x": np.dtype("V256"), "return": np.dtype("V256")})
    r.host_function(f)
    guard, report = r.array(512, np.uint8), r.array(3, np.int32)
    op = r.launch(too_large, guard, report)
    failed(await end_of(op), Code.TOO_LARGE, "256 bytes", "map them")
    assert await r.values(report) == [ERROR, Code.TOO_LARGE, ERROR]
    assert await r.values(guard) == [*range(256), *reversed(range(256))]


# Results that do not fit


@pytest.mark.parametrize(
    ("kernel", "dtype", "returned"),
    [
        (ask_double, np.float64, np.int64),
        (ask_float, np.float32, np.float64),
        (ask, np.int64, np.float64),
        (ask, np.int64, np.uint64),
        (ask, np.int64, np.int32),
        (ask, np.int64, np.bool_),
        (ask, np.int64, None),
    ],
)
async def test_kernel_that_wants_another_result(r: CallingRig, kernel: ao.Kernel, dtype: Any, returned: Any) -> None:
    """A kernel that wants a result of another kind or size than there is gets ERROR, not a wrong number."""

    async def f(x: int) -> Any:
        return None if returned is None else returned(1)

    f.__annotations__["return"] = returned
    r.host_function(f)
    report, value, failure = await r.asked(kernel, 1, dtype)
    assert (report, value) == ([ERROR, Code.WRONG_REPLY], -1)
    failed(failure, Code.WRONG_REPLY, kernel.name, "'f'", "another type or size")


@pytest.mark.parametrize("suspends", [False, True])
@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (int, None),
        (int, 2**70),
        (int, -(2**63) - 1),
        (int, "text"),
        (int, math.nan),
        (int, 1.0),
        (int, np.int32(3)),
        (int, [1]),
        (float, None),
        (float, "1.5"),
        (float, 1j),
        (np.float32, 1e300),
        (np.int8, 128),
        (np.uint8, -1),
        (np.uint64, 2**64),
        (np.uint64, -1),
        (bool, 1),
        (bool, None),
        (None, 5),
        (None, "text"),
        (np.dtype([("a", np.int32), ("b", np.int32)]), 5.5j),
    ],
    ids=str,
)
async def test_result_that_does_not_fit(r: CallingRig, returned: Any, value: Any, suspends: bool) -> None:
    """What does not fit the annotation, or comes where nothing was announced, is an error of the function's."""

    async def f(x: int) -> Any:
        if suspends:
            await asyncio.sleep(0)
        return value

    f.__annotations__["return"] = returned
    r.host_function(f)
    report = r.array(2, np.int32)
    failure = await end_of(r.launch(tell, 1, report))
    cause = failed(failure, Code.WRONG_REPLY, "result of host function f")
    assert isinstance(cause, ao.UsageError)
    assert await r.values(report) == [ERROR, Code.WRONG_REPLY]


@pytest.mark.parametrize(
    "result",
    [
        lambda x: None,
        lambda x: 5,
        lambda x: x[:-1],
        lambda x: np.append(x, 0),
        lambda x: x.reshape(1, -1),
        lambda x: x.astype(np.float64),
        lambda x: x.astype(np.uint64),
        lambda x: ["text"] * len(x),
        lambda x: [2**70] * len(x),
        lambda x: [1.5] * len(x),
        lambda x: ["12"] * len(x),
        lambda x: (*range(31), None),
        lambda x: list(x.astype(np.int32)),
        lambda x: [[i] for i in range(32)],
        lambda x: dict.fromkeys(range(32), 0),
    ],
    ids=[
        "None", "a number", "shorter", "longer", "another shape", "float64", "uint64", "text", "out of range",
        "fractions", "digits", "None among others", "of another type", "a list of lists", "a dictionary",
    ],
)  # fmt: skip
async def test_batch_with_a_wrong_result(r: CallingRig, result: Callable[[Any], Any]) -> None:
    """A batch function that gives anything but one result per row fails all launches it had rows of."""

    @r.off.host_function(batch=True)
    async def f(lane: np.int32, half: np.float32) -> np.int64:
        return result(lane.astype(np.int64))

    values, statuses = r.array(32), r.array(32, np.int32)
    op = r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32)
    failed(await end_of(op), Code.WRONG_REPLY, "result of host function f")
    assert await r.values(statuses) == [ERROR] * 32


@pytest.mark.parametrize("kind", [list, tuple, deque, lambda found: range(0, 3 * len(found), 3)])
async def test_batch_with_a_sequence(r: CallingRig, kind: Callable[[list[int]], Any]) -> None:
    """A list of numbers that fit will do as the result of a batch, and so will any sequence of them."""

    @r.off.host_function(batch=True)
    async def f(x: np.uint8) -> np.uint8:
        return kind([3 * int(i) for i in x])  # type: ignore[attr-defined, no-any-return]  # an array

    values = r.array(32, np.uint8)
    await r.launch(warp_ask_small, ALL_LANES, values, block=32)
    assert await r.values(values) == [3 * i for i in range(32)]


echo_float = echo_kernel(np.dtype(np.float32), "float")


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_nothing(ao::Launch launch) { launch.call(ao::fn("f"), ao::None()); }""",
    calls=True,
)
def ask_nothing(launch: Any) -> None:
    """Call f, which takes and gives nothing."""
    launch.call("f")


@pytest.mark.parametrize("value", [None, 1e300, "0.5"])
async def test_batch_with_a_list_that_does_not_fit(r: CallingRig, value: Any) -> None:
    """What a single call could not return is no element of a list either; nothing is rounded to infinity or NaN."""

    @r.off.host_function(batch=True)
    async def f(x: np.float32) -> np.float32:
        return [value] * len(x)  # type: ignore[arg-type, return-value]  # an array

    x, y, report = await r.off.put(np.ones(2, np.float32)), r.off.zeros(1, np.float32), r.array(1, np.int32)
    failed(await end_of(r.launch(echo_float, x, y, report)), Code.WRONG_REPLY, "result of host function f", "float32")
    assert await r.values(report) == [ERROR]


@pytest.mark.parametrize("options", [{}, {"limit": 1}, {"timeout_s": 30.0}], ids=["plain", "limit", "timeout_s"])
async def test_batch_without_arguments(r: CallingRig, options: dict[str, Any]) -> None:
    """A batch function may take nothing."""
    served = []

    @r.off.host_function(batch=True, **options)
    async def f() -> None:
        call = ao.current_call()
        assert call is not None
        served.append(len(call.operations))

    await r.launch(ask_nothing)
    assert served == [1]


async def test_array_that_is_no_whole_number_of_elements(r: CallingRig) -> None:
    """A mapped array whose bytes are no whole number of what the function takes is an error that says so."""

    @r.off.host_function
    async def f(x: ao.InOut[np.float64]) -> None:
        x[:] = 0

    x, report = await r.off.put(np.ones(3, np.float32)), r.array(2, np.int32)
    failure = await end_of(r.launch(map_array, x, 3, TOFROM, report))
    failed(failure, Code.RAISED, "12 bytes", "float64")
    assert await r.values(x) == [1, 1, 1]
    assert await r.values(report) == [ERROR, Code.RAISED]


# Functions that raise, or do not return


@pytest.mark.all_loops
@pytest.mark.parametrize("suspends", [False, True])
async def test_function_that_raises(r: CallingRig, suspends: bool) -> None:
    """The kernel gets ERROR; the launch fails with the exception as its cause, which has its traceback."""

    @r.off.host_function
    async def f(x: int) -> int:
        if suspends:
            await asyncio.sleep(0)
        raise Boom(f"not {x}")

    report, value, failure = await r.asked(ask, 7)
    assert (report, value) == ([ERROR, Code.RAISED], -1)
    cause = failed(failure, Code.RAISED, "'f'", "kernel ask", "not 7")
    assert isinstance(cause, Boom)
    names = []
    traceback = cause.__traceback__
    while traceback is not None:
        names.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert "f" in names


@pytest.mark.all_loops
async def test_first_exception_cancels(r: CallingRig) -> None:
    """By default the first exception cancels the launch: its other handlers, and its waits."""
    cancelled, n = [], 20
    all_called = asyncio.Event()
    called = 0

    @r.off.host_function
    async def f(x: int) -> int:
        nonlocal called
        called += 1
        if called == n:
            all_called.set()
        if x == 5:
            await all_called.wait()
            raise Boom("of the fifth")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(x)
            raise
        return x

    values, statuses = r.array(n), r.array(n, np.int32)
    op = r.launch(ask_each, values, statuses, n, block=n)
    cause = failed(await end_of(op), Code.RAISED, "of the fifth")
    assert isinstance(cause, Boom)
    assert sorted(cancelled) == [x for x in range(n) if x != 5]
    assert await r.values(statuses) == [ERROR if x == 5 else CANCELLED for x in range(n)]
    assert not op.cancelled()


@pytest.mark.all_loops
async def test_collected_exceptions(r: CallingRig) -> None:
    """With on_error="collect" everything goes on, and the launch fails with all exceptions in a group."""
    n = 20

    @r.off.host_function(on_error="collect")
    async def f(x: int) -> int:
        if x % 2:
            await asyncio.sleep(0)
        if x % 5 == 0:
            raise Boom(x)
        return x

    values, statuses = r.array(n), r.array(n, np.int32)
    op = r.launch(ask_each, values, statuses, n, block=n)
    cause = failed(await end_of(op), Code.RAISED, "and 3 more")
    assert isinstance(cause, ExceptionGroup)
    assert all(isinstance(failure, ao.HostFunctionError) for failure in cause.exceptions)
    causes = [failure.__cause__ for failure in cause.exceptions]
    assert all(isinstance(one, Boom) for one in causes)
    assert sorted(one.args[0] for one in causes if one is not None) == [0, 5, 10, 15]
    assert await r.values(statuses) == [ERROR if x % 5 == 0 else OK for x in range(n)]
    assert [x for x in await r.values(values) if x != -1] == [x for x in range(n) if x % 5]


async def test_many_collected_exceptions(r: CallingRig) -> None:
    """The error has the first hundred and says how many there were."""
    n = 150

    @r.off.host_function(on_error="collect")
    async def f(x: int) -> int:
        raise Boom(x)

    values, statuses = r.array(n), r.array(n, np.int32)
    op = r.launch(ask_each, values, statuses, n, block=n)
    cause = failed(await end_of(op), Code.RAISED, "and 149 more")
    assert isinstance(cause, ExceptionGroup)
    assert len(cause.exceptions) == 100
    assert await r.values(statuses) == [ERROR] * n


async def test_one_collected_exception(r: CallingRig) -> None:
    """A single exception that was collected is the cause itself."""

    @r.off.host_function(on_error="collect")
    async def f(x: int) -> int:
        raise Boom(x)

    _, _, failure = await r.asked(ask, 3)
    assert isinstance(failed(failure, Code.RAISED), Boom)


class Reason(enum.IntEnum):
    GONE = 9


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        (17, 17), (1, 1), (2**31 - 1, 2**31 - 1), (0, -1), (-1, -1), (-4, -1), (Reason.GONE, 9), (np.int32(8), 8),
    ],
)  # fmt: skip
async def test_code_of_the_functions_own(r: CallingRig, code: int, seen: int) -> None:
    """A function chooses what its kernel gets by HostFunctionError(code=...), a positive number."""

    @r.off.host_function
    async def f(x: int) -> int:
        raise ao.HostFunctionError("so it is", code=code)

    report, _, failure = await r.asked(ask, 3)
    assert report == [ERROR, seen]
    failed(failure, seen, "so it is")


@pytest.mark.parametrize("code", [2**31, 2**63, 2**70, "x", None])
async def test_code_that_does_not_fit(r: CallingRig, code: Any) -> None:
    """A code that is none a kernel could get is an error like any other."""

    @r.off.host_function
    async def f(x: int) -> int:
        raise ao.HostFunctionError("so it is", code=code)

    report, _, failure = await r.asked(ask, 3)
    assert report == [ERROR, Code.RAISED]
    failed(failure, Code.RAISED)


@pytest.mark.all_loops
@pytest.mark.parametrize("suspends", [False, True])
async def test_one_row_that_raises(r: CallingRig, suspends: bool) -> None:
    """If the function raises for one lane of warp_call_each, all get ERROR; the code and the cause are its own."""

    @r.off.host_function
    async def f(lane: np.int32, half: np.float32) -> int:
        if suspends:
            await asyncio.sleep(0)
        if lane == 5:
            raise ao.HostFunctionError("not the fifth", code=17)
        return lane

    values, statuses = r.array(32), r.array(32, np.int32)
    op = r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32)
    cause = failed(await end_of(op), 17, "not the fifth")
    assert isinstance(cause, ao.HostFunctionError)
    assert await r.values(statuses) == [ERROR] * 32


async def test_row_that_cancels_itself(r: CallingRig) -> None:
    """A row that ends by a CancelledError of its own stops the others like any failure."""
    stopped = []

    @r.off.host_function
    async def f(lane: np.int32, half: np.float32) -> np.int64:
        if lane == 3:
            raise asyncio.CancelledError
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(lane)
        return np.int64(0)

    values, statuses = r.array(32), r.array(32, np.int32)
    failure = await end_of(r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32))
    assert isinstance(failed(failure, Code.RAISED), asyncio.CancelledError)
    assert sorted(stopped) == [lane for lane in range(32) if lane != 3]
    assert await r.values(statuses) == [CANCELLED] * 32


@pytest.mark.all_loops
async def test_rows_of_which_several_raise(r: CallingRig) -> None:
    """If the function raises for several lanes of one request, the cause has them all."""

    @r.off.host_function
    async def f(lane: np.int32, half: np.float32) -> int:
        await asyncio.sleep(0)
        if lane % 10 == 0:
            raise Boom(lane)
        return lane

    values, statuses = r.array(32), r.array(32, np.int32)
    op = r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32)
    cause = failed(await end_of(op), Code.RAISED)
    assert isinstance(cause, ExceptionGroup)
    assert sorted(error.args[0] for error in cause.exceptions) == [0, 10, 20, 30]
    assert all(isinstance(error, Boom) for error in cause.exceptions)
    assert await r.values(statuses) == [ERROR] * 32


@pytest.mark.parametrize("suspends", [False, True])
@pytest.mark.parametrize("rows", [1, 32])
async def test_group_of_the_functions_own(r: CallingRig, rows: int, suspends: bool) -> None:
    """An ExceptionGroup that the function raises is the cause as it is, whatever codes are in it."""

    @r.off.host_function
    async def f(lane: np.int32, half: np.float32) -> int:
        if lane == 0:
            if suspends:
                await asyncio.sleep(0)
            raise ExceptionGroup("mine", [ao.HostFunctionError(text, code=9) for text in ("first", "second")])
        await asyncio.Event().wait()
        return 0

    values, statuses = r.array(32), r.array(32, np.int32)
    op = r.launch(warp_ask_each, (1 << rows) - 1, values, statuses, block=32)
    cause = failed(await end_of(op), Code.RAISED, "mine")
    assert isinstance(cause, ExceptionGroup)
    assert [str(one) for one in cause.exceptions] == ["first", "second"]
    assert (await r.values(statuses))[:rows] == [ERROR] * rows


async def test_task_group_that_fails(r: CallingRig) -> None:
    """All failures of a TaskGroup in the function are told, also where they have the same code."""

    @r.off.host_function
    async def f(x: int) -> int:
        async def fail(text: str) -> None:
            raise ao.HostFunctionError(text, code=9)

        async with asyncio.TaskGroup() as group:
            group.create_task(fail("first"))
            group.create_task(fail("second"))
        return x

    report, _, failure = await r.asked(ask, 1)
    assert report == [ERROR, Code.RAISED]
    cause = failed(failure, Code.RAISED)
    assert isinstance(cause, ExceptionGroup)
    assert [str(one) for one in cause.exceptions] == ["first", "second"]


class Unspeakable(Exception):
    def __repr__(self) -> str:
        raise ValueError("no text")

    __str__ = __repr__


class NoText(Exception):
    def __repr__(self) -> Any:
        return 5


class Unreachable(BaseException):
    def __repr__(self) -> str:
        raise asyncio.CancelledError


class NoClass(Exception):
    @property
    def __class__(self) -> Any:
        raise ValueError("no class")


class NoCode(ao.HostFunctionError):
    def __init__(self) -> None:
        pass


class UnreadableCode(ao.HostFunctionError):
    code = property(lambda self: 1 // 0)

    def __init__(self) -> None:
        pass


class ListedCode(ao.HostFunctionError):
    def __init__(self) -> None:
        super().__init__("listed", code=[1])  # type: ignore[arg-type]  # that is the test


UNRULY: list[type[BaseException]] = [Unspeakable, NoText, Unreachable, NoClass, NoCode, UnreadableCode, ListedCode]


@pytest.mark.parametrize("suspends", [False, True])
@pytest.mark.parametrize("kind", UNRULY)
async def test_unruly_exception(r: CallingRig, kind: type[BaseException], suspends: bool) -> None:
    """An exception fails the launch also if its own methods raise, or its code is none."""

    @r.off.host_function
    async def f(x: int) -> int:
        if suspends:
            await asyncio.sleep(0)
        raise kind

    report, value, failure = await r.asked(ask, 1)
    assert (report, value) == ([ERROR, Code.RAISED], -1)
    assert type(failed(failure, Code.RAISED, "'f'", kind.__name__)) is kind


@pytest.mark.parametrize("kind", UNRULY)
async def test_unruly_exceptions_of_rows(r: CallingRig, kind: type[BaseException]) -> None:
    """So it does if several rows of one request raise such exceptions."""

    @r.off.host_function
    async def f(lane: np.int32, half: np.float32) -> int:
        await asyncio.sleep(0)
        raise kind

    values, statuses = r.array(32), r.array(32, np.int32)
    failure = await end_of(r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32))
    cause = failed(failure, Code.RAISED, "'f'")
    assert isinstance(cause, BaseExceptionGroup)
    assert {type(one) for one in cause.exceptions} == {kind}
    assert await r.values(statuses) == [ERROR] * 32


async def test_function_that_raises_cancelled_error(r: CallingRig) -> None:
    """A function that is cancelled by somebody else ends its kernel's wait with CANCELLED; the launch says so."""

    @r.off.host_function
    async def f(x: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
        return x

    report, _, failure = await r.asked(ask, 3)
    assert report == [CANCELLED, 0]
    assert isinstance(failed(failure, Code.RAISED, "'f'", "CancelledError"), asyncio.CancelledError)


async def test_function_that_does_not_return(r: CallingRig) -> None:
    """With timeout_s the kernel gets TIMEOUT, the function is cancelled, and the launch fails with the reason."""
    cancelled = []

    @r.off.host_function(timeout_s=0.05)
    async def f(x: int) -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(x)
            raise
        return x

    report, value, failure = await r.asked(ask, 3)
    assert (report, value) == ([TIMEOUT, 0], -1)
    cause = failed(failure, Code.NO_ANSWER, "'f'", "took over 0.05 s")
    assert isinstance(cause, ao.OffloadTimeout)
    assert cancelled == [3]


async def test_timeout_error_of_the_functions_own(r: CallingRig) -> None:
    """A TimeoutError that the function raises by itself is an exception like any other."""

    @r.off.host_function(timeout_s=60)
    async def f(x: int) -> int:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()
        return x

    report, _, failure = await r.asked(ask, 3)
    assert report == [ERROR, Code.RAISED]
    assert isinstance(failed(failure, Code.RAISED), TimeoutError)


async def test_rows_that_do_not_return(r: CallingRig) -> None:
    """The timeout of a function that was called for the lanes of a warp is named as that of one call is."""

    @r.off.host_function(timeout_s=0.05)
    async def f(lane: np.int32, half: np.float32) -> int:
        await asyncio.Event().wait()
        return int(lane)

    values, statuses = r.array(32), r.array(32, np.int32)
    failure = await end_of(r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32))
    assert isinstance(failed(failure, Code.NO_ANSWER, "took over 0.05 s"), ao.OffloadTimeout)


@pytest.mark.parametrize("suspends", [False, True])
async def test_exception_that_is_no_exception(r: CallingRig, suspends: bool) -> None:
    """A handler that ends with a BaseException of its own is blamed, after a post, too."""

    class Stop(BaseException):
        pass

    @r.off.host_function
    async def f(x: int) -> None:
        if suspends:
            await asyncio.sleep(0)
        raise Stop

    failure = await end_of(r.launch(post_many, 1, r.array(2, np.int32)))
    assert isinstance(failed(failure, Code.RAISED), Stop)


async def test_late_reply(r: CallingRig) -> None:
    """What a function gives after its launch was cancelled goes nowhere, and not to a later call."""
    started = asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> int:
        if x < 1000:
            started.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        return x

    for x in range(5):
        started.clear()
        value, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, x, value, report)
        await started.wait()
        op.cancel()
        assert isinstance(await end_of(op), asyncio.CancelledError)
        assert await r.values(report) == [CANCELLED, 0]
        assert await r.values(value) == [-1]
        for y in range(1000, 1010):
            assert await r.asked(ask, y) == ([OK, 0], y, None)


async def test_answer_after_the_deadline(device_label: str) -> None:
    """A kernel that has given up waiting gets TIMEOUT; the late answer does not reach a later call."""
    async with calling_rig(device_label, call_timeout_s=1.0) as r:
        let_go = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            if x < 1000:
                with contextlib.suppress(asyncio.CancelledError):  # it is not in a hurry
                    await asyncio.Event().wait()
                await let_go.wait()
            return x

        value, report = r.array(1), r.array(2, np.int32)
        op = r.launch(ask, 1, value, report)
        await until(lambda: r.off.stats()["calls"]["open"])
        await until(lambda: not r.off.stats()["calls"]["resident"])
        await turns(3)
        assert not op.done()
        let_go.set()
        cause = failed(await end_of(op), Code.NO_ANSWER, "'f'", "within its deadline")
        assert isinstance(cause, ao.OffloadTimeout)
        assert await r.values(report) == [TIMEOUT, 0]
        for y in range(1000, 1005):
            assert await r.asked(ask, y) == ([OK, 0], y, None)


async def test_host_function_that_never_returns(device_label: str) -> None:
    """Once a kernel that has given up waiting is over, what it called is cancelled: the launch ends all the same."""
    async with calling_rig(device_label, call_timeout_s=1.0) as r:
        ended: list[str] = []

        @r.off.host_function
        async def f(x: int) -> int:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("f")
            return x

        value, report = r.array(1), r.array(2, np.int32)
        cause = failed(await end_of(r.launch(ask, 1, value, report)), Code.NO_ANSWER, "'f'", "within its deadline")
        assert isinstance(cause, ao.OffloadTimeout)
        assert await r.values(report) == [TIMEOUT, 0]
        assert ended == ["f"]


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_briefly(ao::Launch launch, int* report) {
        report[0] = (int)launch.call(ao::fn("f"), ao::None(), 1LL);
        launch.set_timeout_ns(20000000);
        report[1] = (int)launch.call(ao::fn("f"), ao::None(), 2LL);
        launch.set_timeout_ns(30000000000);
        report[2] = (int)launch.call(ao::fn("f"), ao::None(), 3LL);
    }""",
    calls=True,
)
def ask_briefly(launch: Any, report: ao.Out[np.int32]) -> None:
    """Call f three times, for the second time with little patience."""
    for i, timeout_s in enumerate((None, 0.02, 30)):
        if timeout_s is not None:
            launch.set_timeout_s(timeout_s)
        report[i], _, _ = attempt(lambda i=i: launch.call("f", i + 1))


async def test_deadline_that_the_kernel_sets(device_label: str) -> None:
    """A kernel may set the deadline of its calls; the one that got no answer is cancelled, those beside it are not."""
    async with calling_rig(device_label) as r:
        ended: list[int] = []

        @r.off.host_function
        async def f(x: int) -> None:
            try:
                await asyncio.sleep(0.1 if x != 2 else 60)
            finally:
                ended.append(x)

        report = r.array(3, np.int32)
        failed(await end_of(r.launch(ask_briefly, report)), Code.NO_ANSWER, "'f'", "within its deadline")
        assert await r.values(report) == [OK, TIMEOUT, OK]
        assert ended == [1, 3, 2]


@ao.kernel(
    cuda=INCLUDE
    + """struct Large { unsigned char bytes[264]; };
    extern "C" __global__ void two_troubles(ao::Launch launch, int large_first, int* report) {
        Large large = {};
        for (int i = 0; i < 2; ++i)
            report[i] = (int)(i == large_first ? launch.call(ao::fn("f"), ao::None(), 1LL)
                                               : launch.call(ao::fn("f"), ao::None(), large));
    }""",
    calls=True,
)
def two_troubles(launch: Any, large_first: np.int32, report: ao.Out[np.int32]) -> None:
    """Make two calls: one that gets no answer, and one with more than a call takes."""
    large = np.zeros((), "V264")[()]
    for i in range(2):
        report[i], _, _ = attempt(lambda i=i: launch.call("f", 1 if i == large_first else large))


@pytest.mark.parametrize("large_first", [0, 1])
async def test_giving_up_is_not_the_only_trouble(device_label: str, large_first: int) -> None:
    """That a kernel has given up a call is known whatever else it met before or since."""
    async with calling_rig(device_label, call_timeout_s=0.2) as r:
        ended: list[int] = []

        @r.off.host_function
        async def f(x: int) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(x)

        report = r.array(2, np.int32)
        failure = await end_of(r.launch(two_troubles, large_first, report))
        assert isinstance(failed(failure, Code.NO_ANSWER, "'f'", "within its deadline"), ao.OffloadTimeout)
        assert await r.values(report) == ([ERROR, TIMEOUT] if large_first else [TIMEOUT, ERROR])
        assert ended == [1]


@pytest.mark.allows_blocking("that is the test")
@pytest.mark.parametrize("where", ["first step", "later step", "elsewhere"])
async def test_loop_that_is_blocked(device_label: str, where: str) -> None:
    """A program that blocks the loop's thread for longer than the deadline gets an error that says what happened."""
    async with calling_rig(device_label, call_timeout_s=0.2) as r:
        called = asyncio.Event()

        @r.off.host_function
        async def f(x: int) -> int:
            called.set()
            if where == "later step":
                await asyncio.sleep(0)
            if where == "elsewhere":
                await asyncio.sleep(60)
            else:
                time.sleep(0.5)  # noqa: ASYNC251
            return x

        await r.off.load(ask)
        value, report = r.array(1), r.array(2, np.int32)
        await r.off.drain()
        op = r.launch(ask, 1, value, report)
        if where == "elsewhere":
            await called.wait()
            time.sleep(0.5)  # noqa: ASYNC251
            op.cancel()
        failure = await end_of(op)
        assert await r.values(report) == [TIMEOUT, 0]
        if where == "elsewhere":
            assert isinstance(failure, ao.HostFunctionError | asyncio.CancelledError)
        else:
            cause = failed(failure, Code.NO_ANSWER, "'f'", "within its deadline")
            assert "blocked the event loop" in str(cause)
        await r.launch(silent, r.array(1, np.int32))


# Functions that are no host functions


async def test_registering_while_a_kernel_runs(r: CallingRig) -> None:
    """A host function can be registered at any time, also by another one, and is called from then on."""

    @r.off.host_function
    async def f(x: int) -> int:
        @r.off.host_function
        async def g(d: float, x: int) -> float:
            @r.off.host_function(name=7)
            async def seventh(d: float) -> float:
                return d + 1

            @r.off.host_function
            async def h() -> None:
                pass

            return d * x

        return x

    values = r.array(3, np.float64)
    await r.launch(several, 5, values)
    assert await r.values(values) == [5, 25, 26]


async def test_name_that_is_taken(r: CallingRig) -> None:
    """A second function of the same name or number is refused; the first one stays."""

    @r.off.host_function
    async def f(x: int) -> int:
        return x

    async def other(x: int) -> int:
        return -x

    with pytest.raises(ao.UsageError, match="'f' already"):
        r.host_function(other, name="f")
    r.host_function(other, name=5)
    with pytest.raises(ao.UsageError, match="5 already"):
        r.host_function(other, name=5)
    assert await r.asked(ask, 3) == ([OK, 0], 3, None)


async def test_names_with_the_same_id(r: CallingRig) -> None:
    """Two names that cannot be told apart on the wire are refused, and both are named."""
    first, second = "find_key", "split_page_c"  # found by trying names
    assert function_id(first) == function_id(second)

    async def f(x: int) -> int:
        return x

    r.host_function(f, name=first)
    with pytest.raises(ao.UsageError, match="find_key") as caught:
        r.host_function(f, name=second)
    assert second in str(caught.value)


async def good(x: int) -> int:
    return x


async def gives(x: int) -> Any:
    return x


def annotated(parameter: Any, returned: Any = None) -> Callable[..., Any]:
    async def f(x: Any) -> Any:
        return x

    f.__annotations__ = {"x": parameter, "return": returned}
    return f


async def bare(x):  # type: ignore[no-untyped-def]
    pass


async def star(*x: int) -> None:
    pass


async def keyword(*, x: int) -> None:
    pass


async def keywords(**x: int) -> None:
    pass


async def unknown(x: DoesNotExist) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


async def many_arguments(a: np.dtype("V200"), b: np.dtype("V57")) -> None:  # type: ignore[valid-type]
    pass


ANNOTATIONS: dict[str, Callable[..., Any]] = {
    "none": bare,
    "str": annotated(str),
    "list": annotated(list),
    "bytes": annotated(bytes),
    "object": annotated(object),
    "an array of objects": annotated(ao.In[np.object_]),
    "a value": annotated(3),
    "a name that does not exist": unknown,
    "returns str": annotated(int, str),
    "returns list": annotated(int, list),
    "returns an array": annotated(int, ao.Out[np.int64]),
    "*args": star,
    "keyword-only": keyword,
    "**kwargs": keywords,
    "an argument that is too large": annotated(np.dtype("V257")),
    "arguments that are too large together": many_arguments,
    "a result that is too large": annotated(int, np.dtype("V257")),
    "an array of any type": annotated(ao.In),
    "a short array": annotated(np.dtype((np.float32, 3))),
    "returns a short array": annotated(int, np.dtype((np.float32, 3))),
}


@pytest.mark.parametrize("what", ANNOTATIONS)
async def test_annotations_that_do_not_fit(r: CallingRig, what: str) -> None:
    """Annotations that describe nothing a kernel can send or get are refused when the function is registered."""
    with pytest.raises(ao.UsageError):
        r.host_function(ANNOTATIONS[what], name="f")
    r.host_function(good, name="f")  # the name is free


async def test_batch_with_a_mapped_array(r: CallingRig) -> None:
    """A batch function cannot take mapped arrays."""
    with pytest.raises(ao.UsageError, match="batch"):
        r.host_function(annotated(ao.In[np.int64]), batch=True)


async def generator(x: int) -> AsyncIterator[int]:
    yield x


class Callable_:
    async def __call__(self, x: int) -> int:
        return x


NO_COROUTINE_FUNCTIONS: dict[str, Any] = {
    "def": lambda x: x,
    "async generator": generator,
    "class": Callable_,
    "object": Callable_(),
    "None": 5,
    "text": "good",
}


@pytest.mark.parametrize("what", NO_COROUTINE_FUNCTIONS)
async def test_no_async_def(r: CallingRig, what: str) -> None:
    """What is no async def is refused, bare and with options."""
    with pytest.raises(ao.UsageError, match="async def"):
        r.off.host_function(NO_COROUTINE_FUNCTIONS[what])
    with pytest.raises(ao.UsageError, match="async def"):
        r.off.host_function(name="f")(NO_COROUTINE_FUNCTIONS[what])


async def test_methods_and_partial_functions(r: CallingRig) -> None:
    """A bound method is a host function; so is a partial one, under the name it is given."""

    class Table:
        async def f(self, x: int) -> int:
            return x + 1

    async def add(y: int, x: int) -> int:
        return x + y

    r.off.host_function(Table().f)
    assert await r.asked(ask, 3) == ([OK, 0], 4, None)
    async with calling_rig(r.off.properties.label) as other:
        with pytest.raises(ao.UsageError):
            other.off.host_function(functools.partial(add, 10))
        other.host_function(functools.partial(add, 10), name="f")
        assert await other.asked(ask, 3) == ([OK, 0], 13, None)


@pytest.mark.parametrize(
    "options",
    [
        {"limit": 0}, {"limit": -1}, {"limit": 1.5}, {"limit": "2"}, {"limit": True},
        {"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": "1"}, {"timeout_s": math.nan},
        {"on_error": "ignore"}, {"on_error": None}, {"on_error": True},
        {"name": 2**24}, {"name": -1}, {"name": 1.5}, {"name": b"f"}, {"name": ("f",)},
    ],
    ids=str,
)  # fmt: skip
async def test_bad_options(r: CallingRig, options: dict[str, Any]) -> None:
    """An option out of range is refused when the function is registered, and the error names it."""
    with pytest.raises(ao.UsageError, match=next(iter(options)).removesuffix("_s")):
        r.host_function(good, **options)
    r.host_function(good)


@pytest.mark.parametrize("options", [{"calling_lanes": 0}, {"calling_lanes": 65}, {"calling_lanes": 1.5},
    {"calling_lanes": "8"}, {"call_timeout_s": 0}, {"call_timeout_s": -1}, {"call_timeout_s": "1"},
    {"call_timeout_s": math.nan}, {"call_timeout_s": math.inf}, {"call_timeout_s": None}], ids=str)  # fmt: skip
def test_options_out_of_range(options: dict[str, Any]) -> None:
    """An option of the Offload that is out of range raises when it is made, before any device is opened."""
    with pytest.raises((ao.UsageError, TypeError)):
        ao.Offload("host", **options)


async def test_registering_at_the_wrong_time() -> None:
    """Before it is entered and after it was closed an Offload takes no host functions."""
    off = ao.Offload("host")
    with pytest.raises(ao.UsageError, match="async with"):
        off.host_function(good)
    async with off:
        off.host_function(good)
    with pytest.raises(ao.ClosedError):
        off.host_function(good)


# Many handlers, and what they may use


@pytest.mark.parametrize("how", ["call", "post"])
async def test_ten_thousand_handlers(r: CallingRig, how: str) -> None:
    """Ten thousand handlers may be suspended at once; once released, all end."""
    n, started = 10_000, 0
    let_go = asyncio.Event()

    async def handler(x: int) -> Any:
        nonlocal started
        started += 1
        await let_go.wait()
        return x if how == "call" else None

    handler.__annotations__["return"] = int if how == "call" else None
    r.host_function(handler, name="f")
    values, statuses = r.array(n), r.array(n, np.int32)
    if how == "call":
        op = r.launch(ask_each, values, statuses, n, grid=-(-n // 250), block=250)
    else:
        op = r.launch(post_many, n, statuses)
    await until(lambda: started == n)
    let_go.set()
    await op
    assert started == n
    if how == "call":
        assert np.array_equal(await r.off.get(values), np.arange(n))


@pytest.mark.parametrize("limit", [1, 3])
async def test_limit(r: CallingRig, limit: int) -> None:
    """Never more than limit handlers of a function run at a time, and as many do."""
    running = most = 0
    order = []
    full = asyncio.Event()  # the calls come one after the other

    @r.off.host_function(limit=limit)
    async def f(x: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append(x)
        if running == limit:
            full.set()
        await full.wait()
        await turns(3)
        running -= 1
        return x

    n = 100
    values, statuses = r.array(n), r.array(n, np.int32)
    await r.launch(ask_each, values, statuses, n, block=n)
    assert await r.values(values) == list(range(n))
    assert most == limit
    assert sorted(order) == list(range(n))


@pytest.mark.parametrize("limit", [1, 3])
async def test_limit_keeps_the_order(r: CallingRig, limit: int) -> None:
    """Those that wait for their turn get it in the order of the requests, however long each takes."""
    order = []

    @r.off.host_function(limit=limit)
    async def f(x: int) -> None:
        order.append(x)
        await turns(x * 7 % 5)

    report = r.array(1, np.int32)
    await r.launch(post_many, 100, report)
    assert await r.values(report) == [OK]
    assert order == list(range(100))


@pytest.mark.parametrize("limit", [1, 2])
async def test_limit_of_batches(device_label: str, limit: int) -> None:
    """The limit of a batch function is one of batches: what comes while as many run waits, in a batch of its own."""
    async with calling_rig(device_label, calling_lanes=2) as r:
        let_go, sizes = asyncio.Event(), []
        running = most = 0

        @r.off.host_function(batch=True, limit=limit)
        async def f(x: np.int64) -> np.int64:
            nonlocal running, most
            running += 1
            most = max(most, running)
            sizes.append(len(x))  # type: ignore[arg-type]  # a batch gets arrays
            await let_go.wait()
            running -= 1
            return x + 1

        await r.off.load(ask)
        results = [(r.array(1), r.array(2, np.int32)) for _ in range(2)]
        await r.off.drain()
        ops = []
        for i in range(2):
            ops.append(r.launch(ask, i, *results[i]))
            await until(lambda i=i: r.off.stats()["calls"]["open"] == i + 1)  # type: ignore[misc]  # binds i
        await turns()
        assert running == limit
        let_go.set()
        for i, op in enumerate(ops):
            await op
            assert await r.values(results[i][0]) == [i + 1]
        assert (most, sizes) == (limit, [1, 1])


async def test_batch_that_does_not_return(r: CallingRig) -> None:
    """With timeout_s a batch is cancelled, all its calls get TIMEOUT, and the next one is served."""
    cancelled = []

    @r.off.host_function(batch=True, timeout_s=0.05)
    async def f(lane: np.int32, half: np.float32) -> np.int64:
        if not cancelled:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(len(lane))  # type: ignore[arg-type]  # an array
                raise
        return lane.astype(np.int64)

    values, statuses = r.array(32), r.array(32, np.int32)
    failure = await end_of(r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32))
    assert isinstance(failed(failure, Code.NO_ANSWER, "'f'", "took over 0.05 s"), ao.OffloadTimeout)
    assert await r.values(statuses) == [TIMEOUT] * 32
    assert cancelled == [32]
    await r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32)
    assert await r.values(values) == list(range(32))


@ao.kernel(
    cuda=INCLUDE
    + """extern "C" __global__ void ask_in_turn(ao::Launch launch, int narrow, int* report, int n) {
        for (int i = 0; i < n; ++i) {
            long long out = -1;
            if (i == narrow) report[2 * i] = (int)launch.call(ao::fn("f"), out, i);
            else report[2 * i] = (int)launch.call(ao::fn("f"), out, (long long)i);
            report[2 * i + 1] = report[2 * i] == (int)ao::Status::ERROR ? launch.error() : 0;
        }
    }""",
    calls=True,
)
def ask_in_turn(launch: Any, narrow: np.int32, report: ao.Out[np.int32], n: np.int32) -> None:
    """Call f(i) for i below n, one call after the other whatever they return; with an int32 where i is narrow."""
    for i in range(n):
        x = np.int32(i) if i == narrow else i
        report[2 * i], report[2 * i + 1], _ = attempt(lambda x=x: launch.call("f", x, dtype=np.int64))


async def test_collected_exceptions_of_batches(r: CallingRig) -> None:
    """With on_error="collect" a batch function that raises fails the calls of that batch; later ones are served."""

    @r.off.host_function(batch=True, on_error="collect")
    async def f(x: np.int64) -> np.int64:
        if (x % 2).any():  # type: ignore[attr-defined]  # an array
            raise Boom(x.tolist())
        return x

    report = r.array(10, np.int32)
    cause = failed(await end_of(r.launch(ask_in_turn, -1, report, 5)), Code.RAISED, "and 1 more")
    assert isinstance(cause, ExceptionGroup)
    assert [getattr(one.__cause__, "args", None) for one in cause.exceptions] == [([1],), ([3],)]
    assert await r.values(report) == [OK, 0, ERROR, Code.RAISED] * 2 + [OK, 0]


@pytest.mark.parametrize("batch", [False, True])
async def test_collected_call_of_another_size(r: CallingRig, batch: bool) -> None:
    """With on_error="collect" a call with other arguments than the function takes lets the launch go on, too."""
    seen: list[int] = []

    @r.off.host_function(batch=batch, on_error="collect")
    async def f(x: np.int64) -> np.int64:
        seen.extend(np.atleast_1d(x))
        return x

    report = r.array(8, np.int32)
    failure = await end_of(r.launch(ask_in_turn, 1, report, 4))
    failed(failure, Code.WRONG_ARGUMENTS, "'f'", "4 bytes", "takes 8")
    assert await r.values(report) == [OK, 0, ERROR, Code.WRONG_ARGUMENTS, OK, 0, OK, 0]
    assert seen == [0, 2, 3]


async def test_limit_of_rows(r: CallingRig) -> None:
    """The limit holds also for the calls of a warp that come as one request."""
    running = most = 0

    @r.off.host_function(limit=2)
    async def f(lane: np.int32, half: np.float32) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await turns(3)
        running -= 1
        return lane

    values, statuses = r.array(32), r.array(32, np.int32)
    await r.launch(warp_ask_each, ALL_LANES, values, statuses, block=32)
    assert await r.values(values) == list(range(32))
    assert most == 2


async def test_cancelled_while_the_limit_holds_it(r: CallingRig) -> None:
    """Handlers that wait for their turn are cancelled with their launch, and the limit holds for the next one."""
    started = asyncio.Event()

    @r.off.host_function(limit=1)
    async def f(x: int) -> int:
        started.set()
        if x < 1000:
            await asyncio.Event().wait()
        return x

    values, statuses = r.array(10), r.array(10, np.int32)
    op = r.launch(ask_each, values, statuses, 10, block=10)
    await started.wait()
    await until(lambda: r.off.stats()["calls"]["open"] == 10)
    op.cancel()
    assert isinstance(await end_of(op), asyncio.CancelledError)
    assert await r.values(statuses) == [CANCELLED] * 10
    assert await r.asked(ask, 1000) == ([OK, 0], 1000, None)


@pytest.mark.all_loops
async def test_timeouts_and_groups_in_a_handler(r: CallingRig) -> None:
    """A handler may use what needs a running task from its first step: timeouts, task groups, current_task."""
    tasks = set()

    async def child(x: int) -> int:
        await asyncio.sleep(0)
        return x

    @r.off.host_function
    async def f(x: int) -> int:
        tasks.add(asyncio.current_task())
        try:
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        except TimeoutError:
            async with asyncio.TaskGroup() as group:
                children = [group.create_task(child(x + i)) for i in range(3)]
            return sum(task.result() for task in children)
        return -1

    found = [await r.asked(ask, x) for x in (1, 2)]
    assert found == [([OK, 0], 6, None), ([OK, 0], 9, None)]
    assert len(tasks) == 2
    assert asyncio.current_task() not in tasks


async def test_group_that_fails(r: CallingRig) -> None:
    """The exception group of a task group in a handler is the cause of the launch's failure."""

    async def child(x: int) -> None:
        raise Boom(x)

    @r.off.host_function
    async def f(x: int) -> int:
        async with asyncio.TaskGroup() as group:
            group.create_task(child(x))
        return x

    _, _, failure = await r.asked(ask, 1)
    cause = failed(failure, Code.RAISED)
    assert isinstance(cause, ExceptionGroup)
    assert isinstance(cause.exceptions[0], Boom)


# Kernels that are wrong


@ao.kernel
def calls_undeclared(launch: Any) -> None:
    """Call without having been declared as a kernel that calls."""
    launch.call("f", 1)


async def test_kernel_that_was_not_declared() -> None:
    """A host kernel that calls without calls=True fails with an error that names calls=True."""
    async with calling_rig() as r:
        r.host_function(good, name="f")
        with pytest.raises(ao.LaunchError, match="calls=True"):
            await r.launch(calls_undeclared)
        await works(r)


NO_PARAMETER = 'extern "C" __global__ void no_parameter(int* x) { *x = 1; }'
EMPTY = 'extern "C" __global__ void no_parameter() {}'


@pytest.mark.gpu
@pytest.mark.parametrize("source", [NO_PARAMETER, EMPTY])
async def test_kernel_without_the_launch_parameter(source: str) -> None:
    """A kernel that is declared with calls=True and has no ao::Launch is refused when it is loaded."""
    async with calling_rig("cuda:0") as r:
        with pytest.raises(ao.UsageError, match="ao::Launch"):
            await r.off.load(ao.Kernel("no_parameter", cuda=source, calls=True))
        await works(r)


async def test_lane_for_a_kernel_that_calls(r: CallingRig) -> None:
    """A launch that calls has a lane of its own kind: to name one is an error, before anything was submitted."""
    await r.off.load(silent)
    before = r.off.stats()["submitted"]
    with pytest.raises(ao.UsageError, match="lanes of their own"):
        r.launch(silent, r.off.empty(1, np.int32), lane=r.off.lanes[0])
    assert r.off.stats()["submitted"] == before


async def test_wrong_arguments_of_a_kernel_that_calls(r: CallingRig) -> None:
    """The arguments of a kernel that calls are checked as any other's, loaded or not."""
    for _ in range(2):
        with pytest.raises(ao.UsageError, match="1 were given"):
            r.launch(tell, 1)
        with pytest.raises(ao.UsageError, match="report"):
            r.launch(tell, 1, r.array(2, np.int64))
        await r.off.load(tell)


@pytest.mark.parametrize("count", [1, 10])
async def test_host_kernel_that_raises(count: int) -> None:
    """A host kernel that raises while its handlers run fails with its exception; they are cancelled."""

    @ao.kernel(calls=True)
    def breaks(launch: Any, gate: np.uint64) -> None:
        pending = [launch.call_async("f", i) for i in range(count)]
        launch.call("g")
        del pending
        raise Boom("the kernel broke")

    async with calling_rig() as r:
        cancelled = []

        @r.off.host_function
        async def f(x: int) -> int:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(x)
                raise
            return x

        @r.off.host_function
        async def g() -> None:
            pass

        with pytest.raises(ao.LaunchError, match="the kernel broke") as caught:
            await r.launch(breaks, np.uint64(0))
        assert isinstance(caught.value.__cause__, Boom)
        assert sorted(cancelled) == list(range(count))
        await works(r)


async def test_launch_that_is_kept_after_its_kernel() -> None:
    """What a kernel has left behind may say nothing in its name: its place is another launch's by then."""
    kept: list[Any] = []

    @ao.kernel(calls=True)
    def leaves(launch: Any) -> None:
        kept.extend([launch, launch.call_async("f")])

    async with calling_rig() as r:

        @r.off.host_function
        async def f() -> None: ...

        await r.launch(leaves)
        launch, pending = kept
        array = np.zeros(1)
        for use in (
            lambda: launch.call("f"),
            lambda: launch.post("f"),
            lambda: launch.call_each("f", [1]),
            lambda: launch.progress(1, 2),
            lambda: launch.call("f", launch.to(array)),
            launch.cancelled,
            pending.wait,
        ):
            with pytest.raises(ao.UsageError, match="is over"):
                use()
        await works(r)


@pytest.mark.parametrize("wrong", [-1, float("nan")])
async def test_deadline_that_is_none(wrong: float) -> None:
    """A host kernel that sets a deadline which is no time fails, and says what was wrong."""

    @ao.kernel(calls=True)
    def sets(launch: Any) -> None:
        launch.set_timeout_s(wrong)

    async with calling_rig() as r:
        with pytest.raises(ao.LaunchError, match="timeout_s is a number"):
            await r.launch(sets)
        await works(r)


async def test_exception_of_a_kernel_that_cannot_be_told() -> None:
    """A host kernel's exception whose text raises is the cause of a LaunchError like any other."""

    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    @ao.kernel
    def breaks(launch: Any) -> None:
        raise Silent

    async with calling_rig() as r:
        with pytest.raises(ao.LaunchError, match="Silent object") as caught:
            await r.launch(breaks)
        assert type(caught.value.__cause__) is Silent
        await works(r)


async def test_host_kernel_that_raises_after_it_was_cancelled() -> None:
    """The launch ends as it was asked to, although its kernel has seen nothing of that."""
    started, go_on = threading.Event(), threading.Event()

    @ao.kernel(calls=True)
    def breaks(launch: Any) -> None:
        started.set()
        assert go_on.wait(8)
        raise Boom("the kernel broke")

    async with calling_rig() as r:
        op = r.launch(breaks)
        await until(started.is_set)
        assert op.cancel()
        go_on.set()
        assert isinstance(await end_of(op), asyncio.CancelledError)
        await works(r)


async def test_abort_that_the_kernel_swallows() -> None:
    """A host kernel that goes on after abort() has failed all the same, as one on a GPU could not go on."""

    @ao.kernel(calls=True)
    def goes_on(launch: Any) -> None:
        with contextlib.suppress(Exception):
            launch.abort(42, "the matrix is singular")

    async with calling_rig() as r:
        with pytest.raises(ao.LaunchError, match=r"code 42.*the matrix is singular"):
            await r.launch(goes_on)
        await works(r)


async def test_abort_on_the_host() -> None:
    """abort() on the host device fails that launch alone, with the code and the text."""
    async with calling_rig() as r:
        called = []

        @r.off.host_function
        async def f() -> None:
            called.append(1)

        with pytest.raises(ao.LaunchError, match=r"code 42.*the matrix is singular") as caught:
            await r.launch(give_up)
        assert caught.value.code == 42
        assert called == [1]
        await works(r)


async def test_kernel_that_fails_by_itself_after_a_call_has_failed() -> None:
    """Both are told: the failure of the call, and with it what the kernel ended with."""

    @ao.kernel(calls=True)
    def goes_on(launch: Any, own: np.bool_) -> None:
        try:
            launch.call("f")
        except ao.HostFunctionError:
            if not own:
                raise
            raise IndexError("its own bug") from None

    async with calling_rig() as r:

        @r.off.host_function(on_error="collect")
        async def f() -> None:
            raise Boom

        for own in (False, True):
            failure = await end_of(r.launch(goes_on, own))
            assert isinstance(failed(failure, Code.RAISED, "'f'"), Boom)
            notes = getattr(failure, "__notes__", [])
            assert [("IndexError" in note, "its own bug" in note) for note in notes] == [(True, True)] * own
        await works(r)


async def test_exceptions_that_keep_calls() -> None:
    """Failed kernels whose exceptions the program keeps hold no reply cells: others go on calling."""

    @ao.kernel(calls=True)
    def leaves_calls(launch: Any) -> None:
        _calls = [launch.call_async("f") for _ in range(1000)]
        raise Boom

    async with calling_rig(call_timeout_s=2) as r:

        @r.off.host_function
        async def f() -> None: ...

        kept = [await end_of(r.launch(leaves_calls)) for _ in range(17)]
        assert all(isinstance(error, ao.LaunchError) for error in kept)
        await works(r)


# The end of an Offload, and of the process


def run(source: str, *, timeout_s: float = 20) -> subprocess.CompletedProcess[str]:
    """Run a program with the kernels of the tests at hand; fails if it hangs."""
    preamble = """
import asyncio, os, sys, threading, warnings, numpy as np, aiooffload as ao, uvloop
from tests.kernels import *
from tests.reverse_kernels import *
"""
    command = [sys.executable, "-X", "faulthandler", "-c", preamble + source]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.gpu
@pytest.mark.timeout(90)
def test_abort_on_a_gpu() -> None:
    """abort() on a GPU ends the use of GPUs by the process, with an error that has the code and the text."""
    done = run(
        """
async def main():
    off = ao.Offload("cuda:0", lanes=2)
    await off.__aenter__()
    called = []
    @off.host_function
    async def f() -> None:
        called.append(1)
    await off.load(give_up, nothing)
    try:
        await off.launch(give_up, grid=1, block=1)
    except ao.DeviceLostError as error:
        print(called, error.code, "singular" in str(error), "give_up" in str(error))
    try:
        off.launch(nothing, grid=1, block=1)
    except ao.DeviceLostError:
        print("lost")
    await off.aclose()
asyncio.run(main())
""",
        timeout_s=80,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[1] 42 True True", "lost"]


CLOSING = """
async def main():
    off = ao.Offload("{label}", lanes=2)
    await off.__aenter__()
    called, cancelled = asyncio.Event(), []
    @off.host_function
    async def f(x: int) -> int:
        called.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(x)
            raise
    value, report = off.zeros(1, np.int64), off.zeros(2, np.int32)
    op = off.launch(ask, grid=1, block=1, args=(3, value, report))
    await called.wait()
    {close}
    print(type(op.exception()).__name__)
    for _ in range(10):
        await asyncio.sleep(0)
    print(cancelled)
    try:
        off.host_function(f)
    except ao.ClosedError:
        print("closed")
    engine = off._engine
    lane = engine.lanes.calling[0]
    async with asyncio.timeout(5):
        while not lane.stream.query():
            await asyncio.sleep(0.001)
    print("kernel ended")
asyncio.run(main())
"""


@pytest.mark.parametrize("runner", ["asyncio", "uvloop"])
@pytest.mark.parametrize("kind", ["KeyboardInterrupt", "SystemExit"])
def test_interrupt_by_a_post_of_a_kernel_that_is_over(kind: str, runner: str) -> None:
    """It ends the loop as from any task, also where the request is read when its launch ends."""
    done = run(f"""
import time
@ao.kernel(calls=True)
def post(launch): launch.post("f", 1)
async def main():
    async with ao.Offload("host") as off:
        await off.load(post)
        @off.host_function
        async def f(x: int): raise {kind}(3)
        op = off.launch(post, grid=1, block=1)
        time.sleep(0.05)  # the kernel is over before the loop looks
        await asyncio.sleep(10)
        print("went on")
try:
    {runner}.run(main())
except BaseException as error:
    print("ended by", repr(error))
""")
    assert (done.stdout, done.returncode) == (f"ended by {kind}(3)\n", 0), done.stderr


@pytest.mark.parametrize("options", ["", "limit=2", "timeout_s=5"])
def test_interrupt_in_a_first_step_is_noted_once(options: str) -> None:
    """The launch fails with that one failure, whatever the function is registered with."""
    done = run(f"""
async def main():
    async with ao.Offload("host") as off:
        await off.load(tell)
        @off.host_function({options})
        async def f(x: int): raise SystemExit(3)
        op = off.launch(tell, grid=1, block=1, args=(1, off.zeros(2, np.int32)))
        try:
            await asyncio.sleep(10)
        finally:
            while not op.done(): await asyncio.sleep(0)
            print(repr(op.exception().__cause__), "more" in str(op.exception()))
try:
    asyncio.run(main())
except SystemExit:
    print("ended")
""")
    assert (done.stdout, done.returncode, done.stderr) == ("SystemExit(3) False\nended\n", 0, "")


@pytest.mark.skipif(sys.version_info < (3, 12), reason="without eager tasks both kernels are read apart")
def test_launches_that_end_together() -> None:
    """Where what comes after one of them raises SystemExit, the others end all the same."""
    done = run("""
import time
@ao.kernel(calls=True)
def post(launch): launch.post("f", 1); started.append(1)
started, ops = [], []
async def main():
    off = ao.Offload("host", calling_lanes=4)
    async with off:
        await off.load(post, tell)
        def custom(lane): raise SystemExit(3)
        @off.host_function
        async def f(x: int):
            if x == 2:
                ops[:] = [off.launch(post, grid=1, block=1) for _ in range(2)]
                off.custom_operation(custom, after=ops[:1])
                while len(started) < 2: time.sleep(0.01)
                time.sleep(0.05)  # both say so just before their end
                ops[0].done()  # one look, as a program may: both kernels are over now
        op = off.launch(tell, grid=1, block=1, args=(2, off.zeros(2, np.int32)))
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.wait_for(asyncio.gather(*(one.wait() for one in (op, *ops))), 3)
            print("open", off.stats()["calls"]["open"])
try:
    asyncio.run(main())
except SystemExit:
    print("ended")
""")
    assert (done.stdout, done.returncode) == ("open 0\nended\n", 0), done.stderr


@pytest.mark.parametrize("close", ["await off.aclose(0.3)", "off.terminate()"])
@pytest.mark.timeout(60)
def test_closing_while_a_handler_hangs(device_label: str, close: str) -> None:
    """aclose() falls to terminate() at its deadline: the handler is cancelled, the kernel ends, the await fails."""
    done = run(CLOSING.format(label=device_label, close=close), timeout_s=50)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["ClosedError", "[3]", "closed", "kernel ended"]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["terminate", "aclose"])
async def test_nothing_leaks_when_closed_while_calls_are_pending(how: str) -> None:
    """After terminate(), or aclose() past its deadline, kernels that wait for calls end, and no thread is left."""
    statuses: list[int] = []
    started: list[int] = []
    cancelled: list[int] = []

    @ao.kernel(calls=True)
    def waits(launch: Any) -> None:
        pending = [launch.call_async("f", i) for i in range(20)]
        statuses.extend(attempt(call.wait)[0] for call in pending)

    async with calling_rig(bury=True) as r:

        @r.off.host_function
        async def f(x: int) -> int:
            started.append(x)
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(x)
                raise
            return x

        op = r.launch(waits)
        behind = r.launch(nothing, after=[op])
        await until(lambda: len(started) == 20)
        if how == "terminate":
            r.off.terminate()
        else:
            await r.off.aclose(0.2)
        assert isinstance(op.exception(), ao.ClosedError)
        assert isinstance(behind.exception(), ao.ClosedError)
        await until(lambda: len(statuses) == 20, "the kernel ended")
        assert set(statuses) == {CANCELLED}
        await turns()
        assert sorted(cancelled) == list(range(20))


@pytest.mark.parametrize("how", ["drain", "aclose"])
async def test_end_waits_for_handlers(device_label: str, how: str) -> None:
    """drain() and aclose() wait for the handlers of what was launched, also where the kernel is over."""
    ended, let_go = [], asyncio.Event()
    async with calling_rig(device_label) as r:

        @r.off.host_function
        async def f(x: int) -> None:
            await let_go.wait()
            ended.append(x)

        r.launch(post_many, 3, r.array(1, np.int32))
        await until(lambda: r.off.stats()["calls"]["open"] == 3 and not r.off.stats()["calls"]["resident"])
        end = asyncio.create_task(r.off.drain() if how == "drain" else r.off.aclose())
        await turns()
        assert not end.done()
        let_go.set()
        await end
        assert sorted(ended) == [0, 1, 2]


@pytest.mark.allows_blocking("the parent waits for its child")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
async def test_fork_while_a_kernel_calls(r: CallingRig) -> None:
    """A forked child can neither launch nor register; the parent's calls go on."""
    let_go = asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> int:
        await let_go.wait()
        return x

    value, report = r.array(1), r.array(2, np.int32)
    op = r.launch(ask, 6, value, report)
    await until(lambda: r.off.stats()["calls"]["open"])
    child = os.fork()
    if child == 0:
        code, refused = 1, 0
        try:
            for use in (lambda: r.off.host_function(good), lambda: r.launch(silent), op.cancel, op.done):
                try:
                    use()
                except ao.UsageError:
                    refused += 1
            code = 0 if refused == 4 else 10 + refused
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222
    let_go.set()
    await op
    assert await r.values(value) == [6]


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("error", ["KeyboardInterrupt", "SystemExit"])
@pytest.mark.parametrize("suspends", [False, True])
@pytest.mark.parametrize("last", ["raise {error}(3)", "return Result()"])
def test_interrupt_in_a_handler(loop: str, error: str, suspends: bool, last: str) -> None:
    """KeyboardInterrupt and SystemExit of a handler, or of its result, reach whoever runs the loop; the kernel gets
    ERROR."""
    done = run(
        f"""
statuses = []
class Result:
    def __array__(self, *args, **kwargs):
        raise {error}(3)
@ao.kernel(calls=True)
def asks(launch):
    statuses.append(attempt(lambda: launch.call("f", 1))[:2])
async def main():
    async with ao.Offload("host", lanes=1) as off:
        @off.host_function(batch={last.startswith("return")})
        async def f(x: np.int64) -> np.int64:
            if {suspends}:
                await asyncio.sleep(0)
            {last.format(error=error)}
        op = off.launch(asks, grid=1, block=1)
        try:
            await op
        finally:
            print("end of main")
try:
    with asyncio.Runner(loop_factory={"uvloop.new_event_loop" if loop == "uvloop" else "None"}) as runner:
        runner.run(main())
except {error} as caught:
    print("caught", caught)
print(statuses)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["end of main", "caught 3", f"[({ERROR}, {int(Code.RAISED)})]"], done.stderr
    assert "Task exception" not in done.stderr


@pytest.mark.parametrize("suspends", [False, True])
def test_interrupt_while_a_failure_is_told(suspends: bool) -> None:
    """A KeyboardInterrupt out of an exception's __repr__ ends the loop, but no sooner than the launch has failed."""
    done = run(
        f"""
statuses = []
@ao.kernel(calls=True)
def asks(launch):
    statuses.append(attempt(lambda: launch.call("f", 1))[:2])
class Interrupted(Exception):
    def __repr__(self):
        raise KeyboardInterrupt(3)
async def main():
    async with ao.Offload("host", lanes=1) as off:
        @off.host_function
        async def f(x: int) -> int:
            if {suspends}:
                await asyncio.sleep(0)
            raise Interrupted
        op = off.launch(asks, grid=1, block=1)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:  # as asyncio.run does it after an interrupt
            pass
        try:
            await op
        except ao.HostFunctionError as error:
            print(type(error.__cause__).__name__)
try:
    asyncio.run(main())
except KeyboardInterrupt as caught:
    print("caught", caught)
print(statuses)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["Interrupted", "caught 3", f"[({ERROR}, {int(Code.RAISED)})]"], done.stderr


def test_signal_while_a_kernel_calls() -> None:
    """Ctrl-C while a handler waits ends the program as in any asyncio program, and nothing hangs."""
    program = """
async def main():
    async with ao.Offload("host", lanes=1) as off:
        @off.host_function
        async def f(x: int) -> int:
            print("called", flush=True)
            await asyncio.Event().wait()
        try:
            await off.launch(ask, grid=1, block=1, args=(1, off.zeros(1, np.int64), off.zeros(2, np.int32)))
        except asyncio.CancelledError:
            off.terminate()
            raise
try:
    asyncio.run(main())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    preamble = """
import asyncio, signal, numpy as np, aiooffload as ao
from tests.reverse_kernels import ask
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what is in the background without
"""
    command = [sys.executable, "-X", "faulthandler", "-c", preamble + program]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "called\n"
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=15)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert out == "interrupted\n"


async def test_failure_that_nobody_awaits(r: CallingRig, loop_errors: list[dict[str, Any]]) -> None:
    """A launch that fails in a host function and is awaited by nobody is told once to the loop."""

    @r.off.host_function
    async def f(x: int) -> int:
        raise Boom("unseen")

    op = r.launch(ask, 1, r.array(1), r.array(2, np.int32))
    await r.off.drain()
    del op
    await until(lambda: loop_errors)
    assert "unseen" in str(loop_errors[0]["exception"])
    assert len(loop_errors) == 1


async def test_host_functions_that_fail_at_the_end(r: CallingRig) -> None:
    """A handler of a post that raises after its kernel is over fails the launch all the same."""
    gate, let_go = r.gate(), asyncio.Event()

    @r.off.host_function
    async def f(x: int) -> None:
        await let_go.wait()
        raise Boom("late")

    op = r.launch(post_and_hold, gate.address)
    assert isinstance(gate, Gate)
    await until(lambda: gate.started)
    gate.open()
    await until(lambda: not r.off.stats()["calls"]["resident"])
    let_go.set()
    assert isinstance(failed(await end_of(op), Code.RAISED, "late"), Boom)
