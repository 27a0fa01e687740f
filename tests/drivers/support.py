"""What the driver tests share: kernels with an implementation for every driver, and a rig around a device.

Kernels take 64-bit numbers only; addresses are device addresses. Nothing here sleeps: a stream is
held by the latch kernel, and :func:`until` gives up after a deadline with what it waited for.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aiooffload._native import Operation, Word
from aiooffload.drivers.api import Block, Device, Event, Function, RegisteredMemory, Stream, TimedEvent
from aiooffload.kernel import Signature

DEADLINE_S = 20.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Poll ``condition`` until it holds; fail with ``what`` after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not after {DEADLINE_S} s"
        time.sleep(0)  # gives the interpreter away, waits for nothing


def give_way(turns: int = 2000) -> None:
    """Let other threads go on, so that what is able to happen does. Proves nothing by itself."""
    for _ in range(turns):
        time.sleep(0)


@dataclass(frozen=True)
class Kernel:
    """A kernel as a driver sees it."""

    name: str
    cuda_source: str | None = None
    host_function: Any = None
    image: bytes | None = None
    core: Any = None
    calls: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def signature(self) -> Signature | None:
        return None if self.host_function is None else Signature.of(self.host_function)


def u64(address: np.uint64) -> ctypes.c_uint64:
    """The 64-bit number at an address of the host device."""
    return ctypes.c_uint64.from_address(int(address))


def _store(launch: Any, address: np.uint64, value: np.uint64) -> None:
    u64(address).value = int(value)


def _scale_add(launch: Any, address: np.uint64, factor: np.uint64, value: np.uint64) -> None:
    u64(address).value = u64(address).value * int(factor) + int(value)


def _copy_word(launch: Any, target: np.uint64, source: np.uint64) -> None:
    u64(target).value = u64(source).value


def _latch(launch: Any, started: np.uint64, opened: np.uint64) -> None:
    u64(started).value = 1
    while not u64(opened).value:
        time.sleep(0)


def _geometry(launch: Any, address: np.uint64) -> None:
    numbers = (*launch.grid, *launch.block, launch.shared.nbytes)
    (ctypes.c_uint64 * 7).from_address(int(address))[:] = numbers


STORE = Kernel(
    "store",
    'extern "C" __global__ void store(unsigned long long* p, unsigned long long value) { *p = value; }',
    _store,
)
SCALE_ADD = Kernel(
    "scale_add",
    """extern "C" __global__ void scale_add(unsigned long long* p, unsigned long long factor, unsigned long long n) {
        *p = *p * factor + n;
    }""",
    _scale_add,
)
COPY_WORD = Kernel(
    "copy_word",
    'extern "C" __global__ void copy_word(unsigned long long* p, const unsigned long long* q) { *p = *q; }',
    _copy_word,
)
LATCH = Kernel(
    "latch",
    """extern "C" __global__ void latch(volatile unsigned long long* started, volatile unsigned long long* opened) {
        *started = 1;
        __threadfence_system();
        while (!*opened) {}
    }""",
    _latch,
)
GEOMETRY = Kernel(
    "geometry",
    """extern "C" __global__ void geometry(unsigned long long* out) {
        unsigned shared;
        asm("mov.u32 %0, %dynamic_smem_size;" : "=r"(shared));
        out[0] = gridDim.x, out[1] = gridDim.y, out[2] = gridDim.z;
        out[3] = blockDim.x, out[4] = blockDim.y, out[5] = blockDim.z;
        out[6] = shared;
    }""",
    _geometry,
)
KERNELS = (STORE, SCALE_ADD, COPY_WORD, LATCH, GEOMETRY)


@dataclass
class Lane:
    """A stream with marks of its own."""

    stream: Stream
    slot: Word
    bell: Word
    sequence: int = 0

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence

    def done(self) -> bool:
        """Whether the last mark that was asked for arrived."""
        return self.slot.load() == self.sequence


@dataclass
class Latch:
    """Holds a lane from within a kernel."""

    opened: Word
    running: Callable[[], bool]

    def open(self) -> None:
        self.opened.store(1)


@dataclass
class Rig:
    """A device and what one test made on it."""

    device: Device
    functions: dict[str, Function]
    loop: asyncio.AbstractEventLoop
    page: RegisteredMemory
    offset: int = 0
    lanes: list[Lane] = field(default_factory=list)
    latches: list[Latch] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    memories: list[RegisteredMemory] = field(default_factory=list)

    def word(self) -> Word:
        """A fresh word, 0."""
        self.offset += 8
        return self.page.word(self.offset - 8)

    def lane(self) -> Lane:
        lane = Lane(self.device.create_stream(), self.word(), self.word())
        lane.stream.bind_marks(lane.slot, lane.bell)
        self.lanes.append(lane)
        return lane

    def event(self) -> Event:
        event = self.device.create_event()
        self.events.append(event)
        return event

    def timer(self) -> TimedEvent:
        timer = self.device.create_timed_event()
        self.events.append(timer)
        return timer

    def block(self, nbytes: int) -> Block:
        block = self.device.allocate(nbytes)
        self.blocks.append(block)
        return block

    def registered(self, nbytes: int) -> RegisteredMemory:
        memory = self.device.register(nbytes)
        self.memories.append(memory)
        return memory

    def launch(
        self,
        lane: Lane,
        kernel: Kernel,
        *arguments: Word | int,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (1, 1, 1),
        shared_bytes: int = 0,
        marked: bool = True,
    ) -> Operation:
        """Enqueue a kernel; a word stands for its device address."""
        function = self.functions[kernel.name]
        plan = function.plan(grid, block, shared_bytes, None, False)
        numbers = [np.uint64(a.device_address if isinstance(a, Word) else a) for a in arguments]
        operation = Operation(self.loop)
        sequence = lane.next_sequence() if marked else 0
        lane.stream.enqueue_kernel(plan, function.prepare(plan, numbers), operation, sequence)
        return operation

    def mark(self, lane: Lane) -> None:
        lane.stream.enqueue_mark(lane.next_sequence())

    def hold(self, lane: Lane) -> Latch:
        """Hold a lane by a kernel that runs until the latch is opened; returns once it runs."""
        started, opened = self.word(), self.word()
        self.launch(lane, LATCH, started, opened)
        latch = Latch(opened, lambda: started.load() == 1)
        self.latches.append(latch)
        until(latch.running, "the latch kernel starts")
        return latch

    def finish(self, lane: Lane) -> None:
        """Wait until everything enqueued on the lane is done."""
        until(lane.stream.query, "the stream gets idle")

    def round_trip(self) -> None:
        """Run a kernel from launch to mark on a lane of its own: what was free to run, had its chance."""
        lane = self.lane()
        self.launch(lane, STORE, self.word(), 1)
        until(lane.done, "a kernel on an idle lane completes")

    def bytes_on_device(self, content: NDArray[np.uint8]) -> Block:
        """New device memory with this content."""
        block, staging, lane = self.block(content.nbytes), self.registered(content.nbytes), self.lane()
        staging.array[: content.nbytes] = content
        lane.stream.enqueue_copy(block.address, staging.device_address, content.nbytes)
        self.finish(lane)
        return block

    def read(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """What is in device memory now."""
        staging, lane = self.registered(nbytes), self.lane()
        lane.stream.enqueue_copy(staging.device_address, address, nbytes)
        self.finish(lane)
        return staging.array[:nbytes].copy()

    def clear(self) -> None:
        """Let everything end, and give back what the test made."""
        for latch in self.latches:
            latch.open()
        for lane in self.lanes:
            self.finish(lane)
            lane.stream.close()
        for event in self.events:
            event.close()
        for block in self.blocks:
            self.device.free(block)
        for memory in (*self.memories, self.page):
            self.device.unregister(memory)


@contextmanager
def open_rig(device: Device, functions: dict[str, Function]) -> Iterator[Rig]:
    """Make a rig on the device and clear it at the end."""
    loop = asyncio.new_event_loop()
    rig = Rig(device, functions, loop, device.register(1 << 16))
    try:
        yield rig
    finally:
        rig.clear()
        loop.close()


def load_all(device: Device) -> dict[str, Function]:
    """Load every kernel above: maintenance, so not while something is held."""
    return {kernel.name: device.load(kernel, device.compile(kernel)) for kernel in KERNELS}
