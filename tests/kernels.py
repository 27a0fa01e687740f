"""What the tests of the engine and the public API share: kernels for every device, gates, devices that fail.

A gate holds a lane by a kernel that spins until the host opens it; nothing here sleeps. A `Spy` stands
between the engine and a real device: it notes every call, can swallow or fail some, and can lose the device.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from aiooffload.engine import engine as engines

DEADLINE_S = 8.0
LIMIT_S = 10.0


# Kernels, each with an implementation for every device.


@ao.kernel(
    cuda=r"""extern "C" __global__ void saxpy(float a, const float* x, float* y, int n) {
        int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] += a * x[i];
    }"""
)
def saxpy(launch: Any, a: np.float32, x: ao.In[np.float32], y: ao.InOut[np.float32], n: np.int32) -> None:
    y[:n] += a * x[:n]


@ao.kernel(cuda='extern "C" __global__ void nothing() {}')
def nothing(launch: Any) -> None:
    pass


@ao.kernel(cuda='extern "C" __global__ void add(unsigned long long* x, unsigned long long n) { *x += n; }')
def add(launch: Any, x: ao.InOut[np.uint64], n: np.uint64) -> None:
    x[0] += n


@ao.kernel(
    cuda="""extern "C" __global__ void scale_add(unsigned long long* x, unsigned long long a, unsigned long long b) {
        *x = *x * a + b;
    }"""
)
def scale_add(launch: Any, x: ao.InOut[np.uint64], a: np.uint64, b: np.uint64) -> None:
    x[0] = np.uint64((int(x[0]) * int(a) + int(b)) % 2**64)


@ao.kernel(
    cuda="""extern "C" __global__ void combine(unsigned long long* y, const unsigned long long* x) {
        *y = *y * 3 + *x;
    }"""
)
def combine(launch: Any, y: ao.InOut[np.uint64], x: ao.In[np.uint64]) -> None:
    y[0] = np.uint64((int(y[0]) * 3 + int(x[0])) % 2**64)


@ao.kernel(
    cuda="""extern "C" __global__ void shape(unsigned long long* out) {
        out[0] = gridDim.x, out[1] = gridDim.y, out[2] = gridDim.z;
        out[3] = blockDim.x, out[4] = blockDim.y, out[5] = blockDim.z;
    }"""
)
def shape(launch: Any, out: ao.Out[np.uint64]) -> None:
    out[:6] = (*launch.grid, *launch.block)


_SPIN = """
__device__ void hold_at(unsigned long long gate) {
    volatile unsigned long long* word = (volatile unsigned long long*)gate;
    word[0] = 1;
    __threadfence_system();
    while (!word[1]) {}
    __threadfence_system();
}
"""


def _hold_at(gate: np.uint64) -> None:
    words = (ctypes.c_uint64 * 2).from_address(int(gate))
    words[0] = 1
    while not words[1]:
        time.sleep(0)


@ao.kernel(cuda=_SPIN + 'extern "C" __global__ void hold(unsigned long long gate) { hold_at(gate); }')
def hold(launch: Any, gate: np.uint64) -> None:
    """Wait for the gate."""
    _hold_at(gate)


@ao.kernel(
    cuda=_SPIN
    + """extern "C" __global__ void hold_write(unsigned long long gate, unsigned long long* x, unsigned long long v) {
        hold_at(gate);
        *x = v;
    }"""
)
def hold_write(launch: Any, gate: np.uint64, x: ao.InOut[np.uint64], value: np.uint64) -> None:
    """Wait for the gate, then write."""
    _hold_at(gate)
    x[0] = value


@ao.kernel(
    cuda=_SPIN
    + """extern "C" __global__ void hold_read(
        unsigned long long gate, const unsigned long long* x, unsigned long long* y) {
        hold_at(gate);
        *y = *(volatile const unsigned long long*)x;
    }"""
)
def hold_read(launch: Any, gate: np.uint64, x: ao.In[np.uint64], y: ao.Out[np.uint64]) -> None:
    """Wait for the gate, then read."""
    _hold_at(gate)
    y[0] = x[0]


class Boom(Exception):
    """What `fail` raises."""


@ao.kernel
def fail(launch: Any) -> None:
    """Raise, which only a host kernel can."""
    raise Boom("the kernel broke")


@ao.kernel
def fail_at(launch: Any, gate: np.uint64) -> None:
    """Wait for the gate, then raise."""
    _hold_at(gate)
    raise Boom("the kernel broke")


KERNELS = (saxpy, nothing, add, scale_add, combine, shape, hold, hold_write, hold_read)


# Gates


@dataclass
class Gate:
    """Holds a kernel: two words of pinned memory, `started` and `opened`."""

    words: np.ndarray[Any, np.dtype[np.uint64]]
    address: np.uint64

    @property
    def started(self) -> bool:
        """Whether the kernel runs."""
        return bool(self.words[0])

    def open(self) -> None:
        """Let the kernel end."""
        self.words[1] = 1


async def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Run the loop until ``condition`` holds; fails after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {DEADLINE_S} s"
        await asyncio.sleep(0)


async def turns(count: int = 50) -> None:
    """Let the loop and the other threads go on. Proves nothing by itself."""
    for _ in range(count):
        await asyncio.sleep(0)


@dataclass
class Rig:
    """An Offload with every kernel loaded, and its gates."""

    off: ao.Offload
    device: Any
    page: ao.PinnedArray
    gates: list[Gate] = field(default_factory=list)
    holds: list[ao.Operation[None]] = field(default_factory=list)

    def gate(self) -> Gate:
        """Make a closed gate."""
        index = 2 * len(self.gates)
        words = self.page.array[index : index + 2]
        assert self.page.lease is not None
        gate = Gate(words, np.uint64(self.page.lease.block.device_address + 8 * index))
        self.gates.append(gate)
        return gate

    async def hold(self, lane: ao.Lane | None = None) -> Gate:
        """Hold a lane by a kernel, which runs when this returns."""
        gate = self.gate()
        self.holds.append(self.launch(hold, gate.address, lane=lane))
        await until(lambda: gate.started, "the holding kernel starts")
        return gate

    async def hold_all(self) -> list[Gate]:
        """Hold every lane."""
        return [await self.hold(lane) for lane in self.off.lanes]

    def launch(self, kernel: ao.Kernel, *args: Any, **options: Any) -> ao.Operation[None]:
        """Launch with one thread."""
        return self.off.launch(kernel, grid=1, block=1, args=args, **options)

    def word(self, value: int = 0) -> ao.Buffer:
        """Make a device word and submit its value."""
        buffer = self.off.empty(1, np.uint64)
        self.off.fill(buffer, value)
        return buffer

    async def read(self, buffer: ao.Buffer) -> int:
        """Return the word in a buffer."""
        return int((await self.off.get(buffer))[0])

    def open_all(self) -> None:
        """Let everything end."""
        for gate in self.gates:
            gate.open()

    async def bury(self) -> None:
        """Clear away what a lost or terminated Offload leaves on purpose: on a GPU the process's end does."""
        self.open_all()
        engine = self.off._engine
        assert engine is not None
        await self.off.aclose(5)
        engine._bell.store(1)  # the monitor may wait for a mark that was lost
        for operation in self.holds:
            operation.exception()
        device = getattr(self.device, "inner", self.device)
        if isinstance(device, HostDevice):
            await asyncio.to_thread(device.close)
        else:  # terminated, since nothing can be lost and go on
            await asyncio.to_thread(engine._unregister, engine.memory.close())
        engines._in_use.clear()  # nothing of it uses anything any more
        if engine.completion.armed:
            with contextlib.suppress(OSError):
                os.close(engine.completion._eventfd)


@asynccontextmanager
async def rig(
    device: Any = "host", *, load: bool = True, bury: bool = False, limit_s: float = LIMIT_S, **options: Any
) -> AsyncIterator[Rig]:
    """Open an Offload on a device or its label, for ``limit_s``; opens the gates and closes it at the end."""
    async with asyncio.timeout(4 * LIMIT_S):
        off = await ao.Offload(**options)._enter(device)
    assert off._engine is not None
    made = Rig(off, off._engine.device, await off.pinned(2048, np.uint64))
    made.page.array[:] = 0
    try:
        if load:
            await off.load(*KERNELS)
        async with asyncio.timeout(limit_s):
            yield made
    finally:
        made.open_all()
        if bury:
            await made.bury()
        else:
            await off.aclose(5)


# Devices that fail


class Spy:
    """Passes everything on to a device, stream or event, past a hook that may do otherwise."""

    def __init__(self, inner: Any, hook: Callable[[Any, str, Callable[..., Any], tuple[Any, ...]], Any]) -> None:
        self.inner = inner
        self.hook = hook

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            plain = tuple(arg.inner if isinstance(arg, Spy) else arg for arg in args)
            return self.hook(self.inner, name, lambda: value(*plain, **options), plain)

        return call


_LOST_CALLS = ("check", "query", "enqueue_kernel", "enqueue_copy", "enqueue_copy_box", "enqueue_fill")


class SpyDevice(Spy):
    """A host device whose calls are noted, and fail or vanish on demand.

    Attributes
    ----------
    calls
        The name of every call of the device and its streams, in order.
    lost
        From now on everything that asks the driver raises DeviceLostError.
    failures
        What a call of this name raises, by name.
    swallowed
        Names of calls that do nothing.
    """

    def __init__(self, inner: Any = None, **changed: Any) -> None:
        super().__init__(HostDevice() if inner is None else inner, self._call)
        self.calls: list[str] = []
        self.lost = False
        self.failures: dict[str, BaseException] = {}
        self.swallowed: set[str] = set()
        self.changed = changed

    @property
    def properties(self) -> Any:
        return dataclasses.replace(self.inner.properties, **self.changed)

    def _call(self, owner: Any, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if name != "health_note":  # makes no driver call
            self.calls.append(name)
        if name in self.failures:
            raise self.failures[name]
        if self.lost and name in _LOST_CALLS:
            raise ao.DeviceLostError("the device fell off", operation=name, status="ILLEGAL_ADDRESS", code=700)
        if name in self.swallowed:
            return None
        result = call()
        return Spy(result, self._call) if name == "create_stream" else result
