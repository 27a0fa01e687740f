"""The peers on a GPU: other ways to await the same kernels, in the same process and context.

Those in C time themselves and loop in C; those in Python use ``cuda.bindings`` as a program would.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from cuda.bindings import driver
from cuda.core import Program, ProgramOptions

from benchmarks import native
from benchmarks.kernels import SOURCE
from benchmarks.mechanism import LANES, Mechanism, Shift

NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
SUCCESS = driver.CUresult.CUDA_SUCCESS


def checked(outcome: tuple[Any, ...]) -> Any:
    """Return what a driver call returned, or raise."""
    status, *values = outcome
    if status != SUCCESS:
        raise RuntimeError(f"a peer's driver call failed: {status.name}")
    return values[0] if values else None


class Gpu:
    """What all peers share: the primary context, the two kernels, a stream for each lane.

    It is opened after aiooffload was, which asks for its number of connections before the driver starts.
    """

    def __init__(self, index: int) -> None:
        checked(driver.cuInit(0))
        self._device = checked(driver.cuDeviceGet(index))
        self._context = checked(driver.cuDevicePrimaryCtxRetain(self._device))
        checked(driver.cuCtxSetCurrent(self._context))
        attribute = driver.CUdevice_attribute
        major = checked(
            driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        )
        minor = checked(
            driver.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        )
        program = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{major}{minor}"))
        self._module = checked(driver.cuModuleLoadData(program.compile("cubin").code))
        self.empty = checked(driver.cuModuleGetFunction(self._module, b"empty"))
        self.spin = checked(driver.cuModuleGetFunction(self._module, b"spin"))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self.streams = [checked(driver.cuStreamCreate(flags)) for _ in range(LANES)]
        for stream in self.streams:
            Launch(self, 0).start(stream)
            Launch(self, 1).start(stream)
            checked(driver.cuStreamSynchronize(stream))

    def close(self) -> None:
        for stream in self.streams:
            checked(driver.cuStreamDestroy(stream))
        checked(driver.cuModuleUnload(self._module))
        checked(driver.cuDevicePrimaryCtxRelease(self._device))


class Launch:
    """One kernel with its argument, ready to be launched any number of times."""

    def __init__(self, gpu: Gpu, duration_ns: int) -> None:
        self.function = gpu.spin if duration_ns else gpu.empty
        self.block = 1 if duration_ns else 32
        self._argument = ctypes.c_int64(duration_ns)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._argument))
        self.parameters = ctypes.addressof(self._pointers) if duration_ns else 0

    def start(self, stream: driver.CUstream) -> None:
        """Launch it, as a Python program does."""
        checked(driver.cuLaunchKernel(self.function, 1, 1, 1, self.block, 1, 1, 0, stream, self.parameters, 0))


class PythonPeer(Mechanism):
    """A peer that launches from Python and waits with a coroutine of its own."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    async def each(self, duration_ns: int, repeats: int) -> list[int]:
        launch, stream, wait, clock = (
            Launch(self._gpu, duration_ns),
            self._gpu.streams[0],
            self.wait,
            time.perf_counter_ns,
        )
        samples = [0] * repeats
        for i in range(repeats):
            start = clock()
            launch.start(stream)
            await wait(stream)
            samples[i] = clock() - start
        return samples

    async def worker(self, lane: int, shift: Shift) -> int:
        launch, stream, done = Launch(self._gpu, 0), self._gpu.streams[lane], 0
        while shift.goes_on:
            launch.start(stream)
            await self.wait(stream)
            done += 1
        return done

    async def wait(self, stream: driver.CUstream) -> None:
        """Wait until everything on the stream is done."""
        raise NotImplementedError


class Executor(PythonPeer):
    """``run_in_executor`` with ``cuStreamSynchronize``, a thread for each lane."""

    name = "executor"

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._pool = ThreadPoolExecutor(LANES)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()

    async def wait(self, stream: driver.CUstream) -> None:
        checked(await self._loop.run_in_executor(self._pool, driver.cuStreamSynchronize, stream))


class Sleep0(PythonPeer):
    """Ask after each turn of the loop."""

    name = "sleep0"

    async def wait(self, stream: driver.CUstream) -> None:
        while (status := driver.cuStreamQuery(stream)[0]) == NOT_READY:
            await asyncio.sleep(0)
        checked((status,))

    async def worker(self, lane: int, shift: Shift) -> int:
        # With several tasks on a stream it may never be found idle, so each asks for its own event.
        launch, stream, done = Launch(self._gpu, 0), self._gpu.streams[lane], 0
        event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        while shift.goes_on:
            launch.start(stream)
            checked(driver.cuEventRecord(event, stream))
            while (status := driver.cuEventQuery(event)[0]) == NOT_READY:
                await asyncio.sleep(0)
            checked((status,))
            done += 1
        checked(driver.cuEventDestroy(event))
        return done


class Callback(PythonPeer):
    """A Python function called by the driver, which tells the loop: how numba's ``async_done`` works."""

    name = "callback"

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._tickets = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        # Kept for as long as the driver may call it, and with it the address.
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._called)
        self._address = driver.CUhostFn(ctypes.cast(self._function, ctypes.c_void_p).value)
        return self

    def _called(self, ticket: int) -> None:
        self._loop.call_soon_threadsafe(self._waiting.pop(ticket).set_result, None)

    async def wait(self, stream: driver.CUstream) -> None:
        ticket = next(self._tickets)
        future = self._waiting[ticket] = self._loop.create_future()
        checked(driver.cuLaunchHostFunc(stream, self._address, ticket))
        await future


class NativePeer(Mechanism):
    """A peer whose loop is in ``peers.c`` and holds the loop's thread."""

    concurrent = False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        cuda = ctypes.CDLL("libcuda.so.1")
        names = ("cuLaunchKernel", "cuStreamSynchronize", "cuStreamQuery")
        self._entry_points = [ctypes.cast(getattr(cuda, name), ctypes.c_void_p).value for name in names]
        self._run: Callable[..., int] = getattr(native.library(), f"peer_{self.name}")

    async def each(self, duration_ns: int, repeats: int) -> list[int]:
        launch = Launch(self._gpu, duration_ns)
        handles = int(launch.function), int(self._gpu.streams[0])
        work = native.Work(*self._entry_points, *handles, launch.parameters, launch.block)
        samples = (ctypes.c_int64 * repeats)()
        checked((driver.CUresult(self._run(ctypes.byref(work), repeats, samples)),))
        return list(samples)


class Sync(NativePeer):
    """Spin in ``cuStreamSynchronize``: the honest lower bound."""

    name = "sync"


class Usleep(NativePeer):
    """``cuStreamQuery`` and ``usleep(1)`` in turn: GCC's libgomp."""

    name = "usleep"


def mechanisms(gpu: Gpu) -> list[Mechanism]:
    """Return every peer of a GPU."""
    return [Sync(gpu), Executor(gpu), Sleep0(gpu), Callback(gpu), Usleep(gpu)]
