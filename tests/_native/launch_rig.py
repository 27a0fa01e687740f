"""What the tests of the launch path share: a launcher with lanes, buffers and streams of its own."""

from __future__ import annotations

import asyncio
import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiooffload._native import Board, Launcher, LaunchPlan, Word, pack
from aiooffload.buffer import Allocation, Buffer, Lease
from aiooffload.operation import Operation

GEOMETRY = ((1, 1, 1), (32, 1, 1))
NO_PARAMETERS = pack(b"", ())
TYPES: tuple[Any, Any, Any] = (Operation, Buffer, Allocation)


def word() -> Word:
    box = ctypes.c_uint64()
    return Word(ctypes.addressof(box), 0, box)


class Stream:
    """Notes what is enqueued, or refuses it."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refusal: BaseException | None = None

    def enqueue_kernel(self, plan: Any, prepared: Any, operation: Any, sequence: int) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append((plan, prepared, operation, sequence))


class Kernel:
    """A key that can be watched going away."""


def make_plan(name: str = "k") -> LaunchPlan:
    return LaunchPlan(name, 0, None, (1, 1, 1), (32, 1, 1), 0, None, False)


def no_preparation(arguments: tuple[Any, ...]) -> None:
    """Nothing here is for the stream to take."""


def make_site(
    plan: LaunchPlan,
    formats: bytes | None,
    bare: Any = None,
    reads: bytes = b"",
    dtypes: tuple[Any, ...] = (),
    prepare: Any = no_preparation,
) -> Any:
    return (plan, formats, bare, reads, dtypes, prepare)


@dataclass
class Rig:
    """A launcher with lanes of its own that knows one kernel."""

    board: Board
    launcher: Launcher
    owner: Any
    streams: list[Stream]
    queues: list[Any]
    lanes: list[str]
    kernel: Kernel = field(default_factory=Kernel)
    plan: LaunchPlan = field(default_factory=make_plan)
    notices: list[int] = field(default_factory=list)
    errors: list[tuple[Any, BaseException]] = field(default_factory=list)

    def launch(self, *args: Any) -> Any:
        return self.launcher.launch(self.kernel, *GEOMETRY, args)

    @property
    def enqueued(self) -> int:
        return sum(len(stream.calls) for stream in self.streams)


async def make(lanes: int = 2, depth: int = 2, formats: bytes | None = b"if", prepared: Any = None) -> Rig:
    board, owner = Board(), Kernel()
    notices: list[int] = []
    errors: list[tuple[Any, BaseException]] = []
    loop = asyncio.get_running_loop()
    launcher = Launcher(
        board,
        loop,
        owner,
        *TYPES,
        lambda: notices.append(board.in_flight),
        lambda operation, error: errors.append((operation, error)),
    )
    queues = [board.add(word(), depth) for _ in range(lanes)]
    streams, names = [Stream() for _ in queues], [f"lane {number}" for number in range(lanes)]
    for queue, stream, name in zip(queues, streams, names, strict=True):
        queue.attach(stream, name)
    rig = Rig(board, launcher, owner, streams, queues, names, notices=notices, errors=errors)
    launcher.learn(rig.kernel, *GEOMETRY, make_site(rig.plan, formats, prepared))
    launcher.ready = True
    return rig


class Block:
    """Memory that is nobody's."""

    host_array = None
    nbytes = 64

    def __init__(self, address: int) -> None:
        self.address = address


def make_buffer(owner: Any, address: int = 0x1000, dtype: Any = np.float32) -> Buffer:
    lease: Any = Lease(Block(address), lambda block: None)
    return Buffer(Allocation(lease, owner), 0, (4,), np.dtype(dtype))


def complete(rig: Rig) -> None:
    """Everything enqueued is done."""
    for queue in rig.queues:
        queue.slot.store(queue.issued)
    rig.board.poll()
