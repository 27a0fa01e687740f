"""Callbacks of the driver: other libraries' that take the interpreter, ours that does not, and what stays behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import select
import sys
import time
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.gpu.support import (
    Words,
    add,
    descriptor_count,
    device_bytes_used,
    latch,
    native_threads,
    nothing,
    resident_bytes,
    run_case,
    spin,
    until,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


def run(case: str, *args: object, **options: Any) -> dict[str, Any]:
    return run_case("callback_cases", case, *args, **options)


@pytest.mark.parametrize("kind", ["host function", "stream callback"])
def test_python_callbacks_of_others_do_not_deadlock(kind: str) -> None:
    """Thousands of launches and another library's callbacks that take the interpreter all end (numba-cuda #317)."""
    found = run("python_callbacks", kind, 300, 60)
    assert found["called"] == found["made"] == 600
    assert found["sum"] == 300 * 30


def test_numba_beside_us() -> None:
    """numba's stream callbacks, which may fail by a handle's type, do not touch our launches."""
    found = run("numba_callbacks", timeout_s=90)
    assert found["sum"] == 100 * 50
    assert found["called"] == found["made"]


def test_wake_after_the_loop_was_closed() -> None:
    """A wake that arrives after its loop was closed disturbs nobody, not even a later Offload (asyncio #258)."""
    found = run("late_wake")
    assert found["woken"] == 1
    assert "run_coroutine_threadsafe" in found["refused"]
    assert found["warnings"] == ["ResourceWarning"]
    assert found["sum"] == 50


@pytest.mark.parametrize("wake", ["hybrid", "interrupt", "poll"])
def test_leaving_the_interpreter_with_work_in_flight(wake: str) -> None:
    """Without aclose, with a kernel still running, the interpreter leaves at once, with a ResourceWarning."""
    found = run("exit_busy", wake, env={"PYTHONWARNINGS": "always::ResourceWarning"})
    assert time.time() - found["left_at"] < 10
    assert "ResourceWarning" in found["stderr"]
    assert "was not closed" in found["stderr"]


# The wake of ours


@pytest.mark.parametrize("wake", ["hybrid", "interrupt"])
async def test_wake_while_another_thread_holds_the_interpreter(wake: Any) -> None:
    """The wake arrives in the middle of a C call that keeps the interpreter, and the await ends right after it."""
    seen: dict[str, Any] = {}
    async with ao.Offload("cuda:0", lanes=2, wake=wake) as off:
        await off.load(latch)
        words = await Words.of(off)
        operation = off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)))
        await words.until(0)
        engine = off._engine
        assert engine is not None
        await until(lambda: engine.completion.armed, "the monitor is armed")
        entry = (ctypes.c_uint64 * 1)(engine.completion._eventfd | select.POLLIN << 32)  # struct pollfd
        poll = ctypes.PyDLL(None).poll  # a PyDLL call keeps the interpreter

        def hold() -> None:
            interval = sys.getswitchinterval()
            sys.setswitchinterval(1000.0)  # nobody gets it between the store and the calls
            try:
                words.array[1] = 1
                seen["ready"] = poll(entry, 1, 10_000)
                poll(None, 0, 2_000)
                seen["released"] = time.perf_counter()
            finally:
                sys.setswitchinterval(interval)

        thread = asyncio.get_running_loop().run_in_executor(None, hold)
        await operation
        ended = time.perf_counter()
        await thread
    assert seen["ready"] == 1
    assert ended - seen["released"] < 0.5


async def test_many_wakes_while_others_want_the_interpreter() -> None:
    """With threads that compute all the time, awaits by interrupt all end."""
    stop = False

    def burn() -> None:
        while not stop:
            sum(range(1000))

    async with ao.Offload("cuda:0", lanes=4, wake="interrupt") as off:
        await off.load(spin)
        loop = asyncio.get_running_loop()
        burners = [loop.run_in_executor(None, burn) for _ in range(3)]
        try:
            for _ in range(20):
                waits = (off.launch(spin, grid=1, block=1, args=(300_000,)).wait() for _ in range(4))
                await asyncio.gather(*waits)
        finally:
            stop = True
            await asyncio.gather(*burners)
        assert off.stats()["completed"] >= 80


# What stays behind


async def open_work_close(wake: Any) -> None:
    async with ao.Offload("cuda:0", lanes=4, wake=wake) as off:
        x = off.zeros(1, np.uint64)
        await asyncio.gather(*(off.launch(add, grid=1, block=1, args=(x, 1)).wait() for _ in range(50)))
        await off.launch(spin, grid=1, block=1, args=(2_000_000,))
        assert int((await off.get(x))[0]) == 50
        data = np.ones(600_000, np.float32)
        y = await off.put(data)
        pinned = await off.pinned(data.shape, data.dtype)
        await off.get(y, out=pinned)
        assert pinned.array[-1] == 1


@pytest.mark.allows_blocking("it counts descriptors and threads in /proc")
async def test_opening_and_closing_leaks_nothing() -> None:
    """Opening and closing again and again keeps no descriptor, thread, device memory or host memory."""
    wakes = ("hybrid", "interrupt", "poll")

    async def cycles(count: int) -> None:
        for number in range(count):
            await open_work_close(wakes[number % 3])
        gc.collect()

    def figures() -> dict[str, int]:
        return {
            "descriptors": descriptor_count(),
            "threads": native_threads(),
            "device": device_bytes_used(),
            "resident": resident_bytes(),
        }

    await cycles(6)
    before = figures()
    await cycles(30)
    after = figures()
    assert after["descriptors"] <= before["descriptors"], (before, after)
    assert after["threads"] <= before["threads"], (before, after)
    assert after["device"] - before["device"] <= 8 << 20, (before, after)
    assert after["resident"] - before["resident"] <= 16 << 20, (before, after)


async def test_idle_offload_leaves_nothing_on_the_device() -> None:
    """After each way out of flight the monitor is off the device: a wait there would block other libraries."""
    async with ao.Offload("cuda:0", lanes=2, wake="interrupt") as off:
        await off.load(nothing, spin)
        engine = off._engine
        assert engine is not None
        for _ in range(20):
            operation = off.launch(spin, grid=1, block=1, args=(1_000_000,))
            await until(lambda: engine.completion.armed, "the monitor is armed")
            await operation
            await until(lambda: not engine.completion.armed, "the monitor is off the device")
            await until(engine._monitor.query, "the monitor stream is empty")
