"""The peers of ``scripts/bench reverse``: other runtimes' ways to answer calls, in C (``reverse_peers.c``).

Each answers with the same tiny function, in C as well, so what differs is how the host finds a request.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from benchmarks import native
from benchmarks.reverse_measure import CALLS_LIMIT, Served

LIMIT_NS = 8_000_000_000
"""After so long kernels and loops alike give up."""


class Ask(ctypes.Structure):
    """What a kernel of the peers does; mirrors ``struct ask``."""

    _fields_ = (
        ("requests", ctypes.c_void_p),
        ("replies", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("times", ctypes.c_void_p),
        ("samples", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("silence_ns", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("count", ctypes.c_int32),
        ("warps", ctypes.c_int32),
        ("one_slot", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


class Serving(ctypes.Structure):
    """What a loop answers; mirrors ``struct serving``."""

    _fields_ = (
        ("requests", ctypes.c_void_p),
        ("replies", ctypes.c_void_p),
        ("done", ctypes.c_void_p),
        ("served", ctypes.c_void_p),
        ("slots", ctypes.c_int64),
        ("limit_ns", ctypes.c_int64),
        ("query", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Return ``reverse_peers.c``. Its functions run without the interpreter lock."""
    loaded = native.compiled("reverse_peers.c")
    for serve in (loaded.serve_spin, loaded.serve_libgomp, loaded.serve_llvm):
        serve.argtypes, serve.restype = (ctypes.POINTER(Serving),), ctypes.c_int
    loaded.run_warp.argtypes, loaded.run_warp.restype = (ctypes.POINTER(Ask), ctypes.c_int32), None
    return loaded


class Words:
    """The words through which a kernel and a loop talk, in memory that both can see."""

    def __init__(self, memory: NDArray[np.uint64], slots: int) -> None:
        self._memory = memory
        self._served = np.zeros(slots, np.uint32)
        self.slots = slots

    @staticmethod
    def nbytes(slots: int) -> int:
        return 8 * (2 * slots + 8)

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Requests, replies, and the word for the end, which has a cache line to itself."""
        address = self._memory.ctypes.data
        return address + 64, address + 64 + 8 * self.slots, address

    def clear(self) -> None:
        self._memory[:] = 0
        self._served[:] = 0

    def serving(self, slots: int, query: int, stream: int) -> Serving:
        return Serving(*self.addresses, self._served.ctypes.data, slots, LIMIT_NS, query, stream)


class Caller(ABC):
    """A device whose kernel calls through words; it runs one kernel at a time."""

    words: Words
    query: int
    """Address of a function that tells of ``stream`` whether the kernel is over."""
    stream: int

    @abstractmethod
    def start(self, ask: Ask, sampled: bool) -> None:
        """Launch the kernel; fills in the addresses of its memory."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the kernel is over."""

    @abstractmethod
    def times(self, warps: int) -> NDArray[np.int64]:
        """Return start and end of each warp."""

    @abstractmethod
    def samples(self, count: int) -> NDArray[np.int64]:
        """Return how long each call took."""

    @abstractmethod
    def close(self) -> None:
        """Release the device."""


class Peer(Served):
    """One loop."""

    one_slot: ClassVar[bool] = False
    """Whether all warps share a slot and a lock, so that there is one request at a time."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller
        self._serve = getattr(library(), f"serve_{self.name}")

    async def calls(self, count: int, silence_ns: int = 0) -> Sequence[int]:
        if count > CALLS_LIMIT:
            raise ValueError(f"{count} samples are more than {CALLS_LIMIT}")
        self._run(1, count, silence_ns, sampled=True)
        samples: list[int] = self._caller.samples(count).tolist()
        return samples

    async def rate(self, warps: int, count: int) -> int:
        times = self._run(warps, count, 0, sampled=False)
        return int(times[1::2].max() - times[::2].min())

    def _run(self, warps: int, count: int, silence_ns: int, sampled: bool) -> NDArray[np.int64]:
        caller = self._caller
        caller.words.clear()
        ask = Ask(silence_ns=silence_ns, limit_ns=LIMIT_NS, count=count, warps=warps, one_slot=self.one_slot)
        ask.requests, ask.replies, ask.done = caller.words.addresses
        serving = caller.words.serving(1 if self.one_slot else warps, caller.query, caller.stream)
        caller.start(ask, sampled)
        try:
            status = self._serve(ctypes.byref(serving))
        finally:
            caller.finish()
        if status:
            raise RuntimeError(f"the loop ended with {status}" + (", too late" if status == -1 else ""))
        times = caller.times(warps)
        if times.min() < 0:
            raise RuntimeError(f"{(times < 0).sum()} warps got no answer")
        return times


class Spin(Peer):
    name = "spin"
    label = "a C thread that spins on the request words, one slot per warp"


class Libgomp(Peer):
    name = "libgomp"
    label = "libgomp's loop (query, look, usleep(1)); one slot for all warps, a lock, one request at a time"
    one_slot = True


class Llvm(Peer):
    name = "llvm"
    label = "LLVM RPC's policy (spin 25 us, then sleep 250 us), one slot per warp"


class HostThreads(Caller):
    """The host device: each warp is a C thread."""

    def __init__(self, most_warps: int) -> None:
        self._memory = np.zeros(Words.nbytes(most_warps) // 8, np.uint64)
        self.words = Words(self._memory, most_warps)
        query = ctypes.cast(library().query_done, ctypes.c_void_p).value
        assert query is not None
        self.query, self.stream = query, self.words.addresses[2]
        self._times = np.zeros(2 * most_warps, np.int64)
        self._samples = np.zeros(CALLS_LIMIT, np.int64)
        self._state = np.zeros(3, np.uint32)
        self._threads: list[threading.Thread] = []

    def start(self, ask: Ask, sampled: bool) -> None:
        self._state[:] = 0
        self._times[:] = -1
        ask.times, ask.state = self._times.ctypes.data, self._state.ctypes.data
        ask.samples = self._samples.ctypes.data if sampled else None
        run = library().run_warp
        # The loop looks at nothing but words until all are over, so `ask` stays where it is.
        self._threads = [threading.Thread(target=run, args=(ctypes.byref(ask), warp)) for warp in range(ask.warps)]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        for thread in self._threads:
            thread.join()

    def times(self, warps: int) -> NDArray[np.int64]:
        return self._times[: 2 * warps]

    def samples(self, count: int) -> NDArray[np.int64]:
        return self._samples[:count]

    def close(self) -> None:
        pass


def mechanisms(caller: Caller) -> list[Served]:
    """Return every peer."""
    return [Spin(caller), Libgomp(caller), Llvm(caller)]
