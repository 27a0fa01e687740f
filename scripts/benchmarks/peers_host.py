"""The peers on the host device: other ways to await the same Python functions."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np

from benchmarks.kernels import run_empty, run_spin
from benchmarks.mechanism import LANES, Mechanism, Shift

Kernel = Callable[[], None]


def kernel(duration_ns: int) -> Kernel:
    """Return the host kernel of this duration as a function of no arguments."""
    if duration_ns == 0:
        return lambda: run_empty(None)
    return lambda: run_spin(None, np.int64(duration_ns))


class HostPeer(Mechanism):
    """A peer whose kernels are run by ``once``, or by a coroutine ``once_async``."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(LANES)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown()
        self._pool = ThreadPoolExecutor(LANES)  # Starts no thread before it is used.

    async def each(self, duration_ns: int, repeats: int) -> list[int]:
        run, clock = kernel(duration_ns), time.perf_counter_ns
        samples = [0] * repeats
        for i in range(repeats):
            start = clock()
            await self.once(run)
            samples[i] = clock() - start
        return samples

    async def worker(self, lane: int, shift: Shift) -> int:
        run, done = kernel(0), 0
        while shift.goes_on:
            await self.once(run)
            done += 1
        return done

    async def once(self, run: Kernel) -> None:
        """Run the kernel and wait for its end."""
        raise NotImplementedError


class Sync(HostPeer):
    """Call the kernel in the loop's thread."""

    name = "sync"
    concurrent = False

    async def once(self, run: Kernel) -> None:
        run()


class Executor(HostPeer):
    """``run_in_executor``."""

    name = "executor"

    async def each(self, duration_ns: int, repeats: int) -> list[int]:
        run, clock, loop, pool = kernel(duration_ns), time.perf_counter_ns, asyncio.get_running_loop(), self._pool
        samples = [0] * repeats
        for i in range(repeats):
            start = clock()
            await loop.run_in_executor(pool, run)
            samples[i] = clock() - start
        return samples

    async def worker(self, lane: int, shift: Shift) -> int:
        run, loop, pool, done = kernel(0), asyncio.get_running_loop(), self._pool, 0
        while shift.goes_on:
            await loop.run_in_executor(pool, run)
            done += 1
        return done


class Sleep0(HostPeer):
    """Ask after each turn of the loop."""

    name = "sleep0"

    async def once(self, run: Kernel) -> None:
        future = self._pool.submit(run)
        while not future.done():
            await asyncio.sleep(0)


class Usleep(HostPeer):
    """Ask every microsecond, blocking the loop's thread meanwhile, as libgomp does."""

    name = "usleep"
    concurrent = False

    async def once(self, run: Kernel) -> None:
        future: Future[None] = self._pool.submit(run)
        while not future.done():
            time.sleep(1e-6)


class Callback(HostPeer):
    """A thread per lane that runs the kernel and tells the loop with ``call_soon_threadsafe``."""

    name = "callback"

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._queue: queue.SimpleQueue[tuple[Kernel, asyncio.Future[None]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._serve) for _ in range(LANES)]
        for thread in self._threads:
            thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        while item := self._queue.get():
            run, future = item
            run()
            self._loop.call_soon_threadsafe(future.set_result, None)

    async def once(self, run: Kernel) -> None:
        future = self._loop.create_future()
        self._queue.put((run, future))
        await future


def mechanisms() -> list[Mechanism]:
    """Return every peer of the host device."""
    return [Sync(), Executor(), Sleep0(), Callback(), Usleep()]
