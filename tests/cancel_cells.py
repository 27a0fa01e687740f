"""The cells of the cancellation matrix: what is submitted (a kind), where it is (a state), how one gives up (a way).

`EXCLUDED` says of which kinds and states there is no cell, and why. Everything is held by latches: a kernel or a
host function that waits for a gate, a future, a worker thread that waits for an event.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from aiooffload.engine import copies
from aiooffload.engine.copies import LARGE_BLOCKS, PIECE_NBYTES
from tests.kernels import DEADLINE_S, Boom, Gate, Rig, add, combine, hold_write, rig, turns, until
from tests.reverse_kernels import ask, deaf, silent, until_cancelled

SMALL = 16
LARGE = 512 * 1024 // 8
"""Elements: goes through a worker thread, in one piece."""
PIECES = (LARGE_BLOCKS + 2) * PIECE_NBYTES // 8
"""Elements: more pieces than there are blocks, so that it cannot be through while the first one is held."""
TIMEOUT_S = 0.05
FILLED = 9

LAUNCHES = ("launch", "coarse", "bound")
PAGEABLE = ("copy in", "copy out", "put", "get")
LARGES = tuple(f"{name}, large" for name in PAGEABLE)
PINNED = ("copy in, pinned", "copy out, pinned")
ACROSS = ("copy across", "copy in many calls", "copy from elsewhere", "copy to elsewhere")
KINDS = (
    *LAUNCHES, "calling", *PAGEABLE, *LARGES, *PINNED, *ACROSS, "fill", "fill, strided", "custom operation",
    "host task", "gate", "completion", "graph",
)  # fmt: skip
STREAMED = (*LARGES, "copy in many calls")
STATES = (
    "full lane", "after the device", "after the host", "loading", "enqueued", "running", "moving", "completing",
    "in a call",
)  # fmt: skip
WAITS = ("task", "timeout", "wait_for", "group")
"""Ways to give up a wait."""
WORKS = ("cancel", "timeout_s", "async with")
"""Ways to stop the work."""

EXCLUDED: dict[tuple[str, str], str] = {
    **{(kind, "loading"): "has no kernel" for kind in KINDS if kind not in ("launch", "coarse", "calling")},
    ("bound", "loading"): "is bound to a kernel that is loaded",
    **{(kind, "in a call"): "calls nobody" for kind in KINDS if kind != "calling"},
    **{(kind, "moving"): "no worker thread touches its memory" for kind in KINDS if kind not in LARGES},
    **{
        (kind, "running"): "is one driver call, or a few: nothing holds it while the device is at it"
        for kind in (*PAGEABLE, *PINNED, *ACROSS, "fill", "fill, strided", "custom operation", "completion")
    },
    **{(kind, "completing"): "no mark of its own: the host puts its end together" for kind in (*STREAMED, "host task")},
    ("host task", "full lane"): "uses no lane",
    ("host task", "enqueued"): "uses no lane",
    **{("gate", state): "is on the host, and done when it opens" for state in ("enqueued", "running", "completing")},
    ("calling", "enqueued"): "a calling lane takes one launch at a time: it runs, or waits for room",
    **{("completion", state): "comes after one stream, and takes no after=" for state in STATES if "after" in state},
    ("completion", "full lane"): "waits for room as anything on that lane does, and names nothing to hold",
    **{("graph", state): "the host device has none, and cuda.core makes them: tests/gpu" for state in STATES},
}
"""By kind and state: why there is no such cell."""

NO_TIMEOUT = "only a launch and a gate take timeout_s="


def cells() -> list[tuple[str, str, str]]:
    """Return what there is to test."""
    return [
        (kind, state, way)
        for kind in KINDS
        for state in STATES
        if (kind, state) not in EXCLUDED
        for way in (*WAITS, *WORKS)
        if way != "timeout_s" or kind in ("launch", "coarse", "calling", "gate")
        # A loop that does not look cannot let a time pass either.
        if way != "timeout_s" or state != "completing"
    ]


def size_of(kind: str, state: str) -> int:
    """Return how many elements it works on."""
    if kind not in LARGES:
        return SMALL
    return PIECES if state == "running" else LARGE


def where(kind: str, state: str) -> str:
    """Return who decides when a stopped operation ends.

    ``"host"``: nothing has begun, it ends at once. ``"device"``: it completes all the same. ``"late"``: it ends
    stopped, once what has begun is over.
    """
    if state in ("full lane", "after the host", "loading"):
        return "host"
    if kind in ("host task", "gate"):
        return "late" if state == "running" else "host"
    if kind in STREAMED or (kind == "calling" and state in ("running", "in a call")):
        return "late"
    return "device"


@dataclass
class Cell:
    """One operation in one state, with what it works on."""

    r: Rig
    there: Rig
    """Another Offload, for the copies between two."""
    kind: str
    state: str
    terms: dict[str, Any] = field(default_factory=dict)
    releases: list[Callable[[], None]] = field(default_factory=list)
    enter: Callable[[], Awaitable[None]] | None = None
    """What brings it to its state after it was submitted."""
    give_up: asyncio.Event = field(default_factory=asyncio.Event)
    flags: list[str] = field(default_factory=list)
    op: Any = None
    deadline: Any = None
    held: Callable[[], bool] | None = None
    """Whether what only the operation holds is still there."""

    # -- memory ----------------------------------------------------------------------------

    async def prepare(self) -> None:
        """Make what the kinds work on."""
        count, off, there = size_of(self.kind, self.state), self.r.off, self.there.off
        self.numbers = np.arange(1, count + 1, dtype=np.uint64)
        shape = (4, SMALL // 4) if self.kind == "copy in many calls" else (count,)
        self.numbers = self.numbers.reshape(shape)
        self.host, self.out = self.numbers.copy(), np.zeros(shape, np.uint64)
        source_at, target_at = (there if self.kind == f"copy {way} elsewhere" else off for way in ("from", "to"))
        self.source: Any = await source_at.put(self.numbers)
        self.target: Any = target_at.zeros(shape, np.uint64)
        self.flag = off.zeros(1, np.int32)
        if self.kind in PINNED:
            self.pinned = await off.pinned(shape, np.uint64)
            self.pinned.array[:] = self.numbers if self.kind == "copy in, pinned" else 0
        if self.kind == "bound":
            kernel = (hold_write, (self.r.gate().address, self.target, np.uint64(1)))
            kernel = kernel if self.state == "running" else (combine, (self.target, self.source))
            self.bound = off.bind(kernel[0], grid=1, block=1, args=kernel[1])
            self.gate = self.r.gates[-1]
        await off.drain()
        await there.drain()

    def drop(self) -> None:
        """Let go of what the operation reads, so that it alone holds it."""
        off = (self.there if self.kind == "copy from elsewhere" else self.r).off
        if self.kind in ("put", "put, large", "copy in", "copy in, large"):
            host = weakref.ref(self.host)
            self.host = None  # type: ignore[assignment]  # it is not read after this
            self.held = lambda: host() is not None
        elif self.kind == "calling" and self.state not in ("running", "in a call"):
            self.result = off.get(self.flag)  # comes after it
            self.flag.close()
        elif self.kind in PINNED:
            address = self.pinned.open_lease().block.device_address
            if self.kind == "copy in, pinned":
                self.pinned.close()
                assert off._engine is not None
                free = off._engine.memory
                self.held = lambda: address not in _free_pinned(free)
        elif self.kind in (*LAUNCHES, "get", "get, large", "copy out", "copy out, large", *ACROSS):
            if self.state == "running" and self.kind in LAUNCHES:
                return  # its kernel has no source
            before = off.stats()["buffers"]
            self.source.close()
            self.source = self.bound = None
            self.held = lambda: off.stats()["buffers"] == before

    def check_held(self) -> None:
        """Nothing is freed or given to others while the operation is not done."""
        assert self.op.finished or self.held is None or self.held()

    async def happened(self) -> bool:
        """Whether the operation did what it is for; fails if it did a part of it."""
        off = (self.there if self.kind == "copy to elsewhere" else self.r).off
        if self.kind == "host task":
            return "ran" in self.flags
        if self.kind in ("gate", "completion"):
            return self.op.failure is None
        if self.kind == "calling":
            return int((await self.result)[0]) in (7, 3)  # what `silent` and `deaf` leave there
        found, expected = await off.get(self.target), self.numbers
        if self.kind in ("get", "get, large", "copy out", "copy out, large", "copy out, pinned"):
            found = self.pinned.array if self.kind == "copy out, pinned" else self.out
        elif self.kind in ("put", "put, large"):
            if not self.op.finished or self.op.failure is not None:
                return False
            found = await off.get(self.op.result())
        elif self.kind == "copy in many calls":
            expected = self.numbers.T.reshape(found.shape)
        elif self.kind in LAUNCHES:
            found, expected = found[:1], np.ones(1, np.uint64)
        elif self.kind == "fill, strided":
            assert not found[1::2].any()
            found, expected = found[::2], np.full(SMALL // 2, FILLED)
        elif self.kind in ("fill", "custom operation"):
            expected = np.full(SMALL, FILLED)
        assert np.array_equal(found, expected) or not found.any()
        return bool(found.any())

    # -- submission ------------------------------------------------------------------------

    def submit(self, **terms: Any) -> ao.Operation[Any]:
        """Submit the operation."""
        off, kind = self.r.off, self.kind
        terms = {**self.terms, **terms}
        if kind in ("launch", "coarse"):
            return self._launch(coarse=kind == "coarse", **terms)
        if kind == "bound":
            return self.bound(**terms)
        if kind == "calling":
            return self._calling(**terms)
        if kind.startswith("put"):
            return off.put(self.host, **terms)
        if kind.startswith("get"):
            return off.get(self.source, out=self.out, **terms)
        if kind.startswith("copy"):
            return off.copy(*self._copied(), **terms)
        if kind.startswith("fill"):
            return off.fill(self.target[::2] if kind == "fill, strided" else self.target, FILLED, **terms)
        if kind == "custom operation":
            return off.custom_operation(self._native, **terms)
        if kind == "host task":
            return off.host_task(self._on_host, after=terms.get("after", ()))
        if kind == "gate":
            opened = asyncio.get_running_loop().create_future()
            self.releases.append(lambda: opened.done() or opened.set_result(None))
            return off.gate(opened, **{"lane": off.lanes[1], **terms})
        assert kind == "completion"
        return off.completion(terms["lane"])

    def _launch(self, **terms: Any) -> ao.Operation[None]:
        if self.state == "running":
            self.gate = self.r.gate()
            return self.r.launch(hold_write, self.gate.address, self.target, np.uint64(1), **terms)
        kernel = combine
        if self.state == "loading":
            kernel = ao.Kernel("combine", cuda=combine.cuda_source, host=combine.host_function)
        return self.r.launch(kernel, self.target, self.source, **terms)

    def _calling(self, **terms: Any) -> ao.Operation[None]:
        terms.pop("lane", None)
        if self.state == "running":
            return self.r.launch(until_cancelled, self.r.off.zeros(1, np.int32), **terms)
        if self.state == "in a call":
            return self.r.launch(ask, 5, self.r.off.zeros(1, np.int64), self.r.off.zeros(2, np.int32), **terms)
        if self.state == "completing":
            gate = self.r.gate()
            self.releases.append(gate.open)
            return self.r.launch(deaf, gate.address, self.flag, **terms)
        kernel = silent
        if self.state == "loading":
            kernel = ao.Kernel("silent", cuda=silent.cuda_source, host=silent.host_function, calls=True)
        return self.r.launch(kernel, self.flag, **terms)

    def _copied(self) -> tuple[Any, Any]:
        """Return (dst, src)."""
        if self.kind in ("copy in", "copy in, large"):
            return self.target, self.host
        if self.kind in ("copy out", "copy out, large"):
            return self.out, self.source
        if self.kind == "copy in, pinned":
            return self.target, self.pinned
        if self.kind == "copy out, pinned":
            return self.pinned, self.source
        if self.kind == "copy in many calls":
            shape, strides = self.source.shape[::-1], self.source.strides[::-1]
            options = {"shape": shape, "dtype": np.uint64, "strides": strides}
            return self.target, ao.Buffer.from_pointer(self.source.address, self.source.nbytes, self.source, **options)
        return self.target, self.source

    def _native(self, lane: Any) -> str:
        lane.stream.enqueue_fill(self.target.address, FILLED.to_bytes(8, "little"), SMALL)
        return "value"

    async def _on_host(self) -> None:
        self.flags.append("began")
        if self.state == "running":
            await self.go.wait()
        self.flags.append("ran")

    # -- states ----------------------------------------------------------------------------

    async def set_up(self) -> None:
        """Do what has to be there before it is submitted."""
        self.go = asyncio.Event()
        self.releases.append(self.go.set)
        lanes = self.r.off.lanes
        self.terms["lane"] = lanes[1]
        if self.state in ("full lane", "enqueued", "completing"):
            await self._hold(lanes[1])
        elif self.state == "after the device":
            await self._hold(lanes[0])
            self.terms["after"] = [self.r.holds[-1]]
        elif self.state == "after the host":
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.terms["after"] = [future]
            self.releases.append(lambda: future.done() or future.set_result(None))
        elif self.state == "loading":
            await self._hold(lanes[0])
        elif self.state == "running":
            await self._set_up_running()
        elif self.state == "moving":
            self._set_up_moving()
        else:
            assert self.state == "in a call"
            self.r.off.host_function(self._called, name="f")
            self.enter = lambda: until(lambda: self.flags, "the host function is called")

    async def _hold(self, lane: ao.Lane) -> None:
        if self.kind == "calling" and self.state == "full lane":
            gate = self.r.gate()
            self.r.holds.append(self.r.launch(deaf, gate.address, self.r.off.zeros(1, np.int32)))
            await until(lambda: gate.started)
        elif self.kind == "calling" and self.state == "completing":
            return  # its kernel has a gate of its own
        else:
            gate = await self.r.hold(lane)
        self.releases.append(gate.open)

    async def _set_up_running(self) -> None:
        if self.kind in LARGES:
            await self._hold(self.r.off.lanes[1])
            self.enter = lambda: until(lambda: self.r.off.lanes[1].in_flight > 1, "a piece is on the device")
        elif self.kind in LAUNCHES:
            self.enter = lambda: until(lambda: self.gate.started, "the kernel runs")
            self.releases.append(lambda: self.gate.open())
        elif self.kind == "calling":
            self.r.off.host_function(self._started, name="started")
            self.enter = lambda: until(lambda: self.flags, "the kernel runs")
        else:
            self.enter = lambda: until(lambda: self.flags, "the host task runs")

    def _set_up_moving(self) -> None:
        """Let the worker thread that touches the program's memory wait there."""
        moving, go, move = threading.Event(), threading.Event(), copies._move

        def held(*args: Any) -> None:
            moving.set()
            assert go.wait(DEADLINE_S)
            move(*args)

        patch = mock.patch.object(copies, "_move", held)
        patch.start()
        self.releases += [go.set, patch.stop]
        self.enter = lambda: until(moving.is_set, "a worker thread copies")

    async def _started(self) -> None:
        self.flags.append("started")

    async def _called(self, x: int) -> int:
        self.flags.append("called")
        await self.go.wait()
        return x

    def release(self) -> None:
        """Let everything go on."""
        releases, self.releases = self.releases, []
        for one in releases:
            one()

    def complete(self) -> None:
        """Let the device get through with it while the loop does not look."""
        if self.kind == "coarse":
            assert self.r.off._engine is not None
            self.r.off._engine.lanes.mark_all()
        self.release()
        while not self.op.lane.stream.query():
            pass

    # -- ways ------------------------------------------------------------------------------

    async def wait(self, way: str) -> Any:
        """Wait for the operation as one does who gives up in this way."""
        if way == "timeout":
            async with asyncio.timeout(None) as self.deadline:
                return await self.op
        if way == "wait_for":
            return await asyncio.wait_for(self.op.wait(), TIMEOUT_S)
        if way == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(self.op.wait())
                await self.give_up.wait()
                raise Boom
        if way == "async with":
            async with self.op:
                await self.give_up.wait()
                raise Boom
        return await self.op

    async def trigger(self, way: str, victim: asyncio.Task[Any]) -> None:
        """Make whoever waits give up."""
        if way == "task":
            victim.cancel()
        elif way == "timeout":
            self.deadline.reschedule(asyncio.get_running_loop().time())
        elif way == "cancel":
            assert self.op.cancel() == (self.state != "completing")
        elif way == "timeout_s":
            await until(lambda: self.op.stop is not None or self.op.finished, "the time is over")
        self.give_up.set()

    async def go_on(self) -> None:
        """Every lane works, and the operation, made again, is right."""
        for lane in self.r.off.lanes:
            word = self.r.word(1)
            self.r.launch(add, word, 2, lane=lane)
            assert await self.r.read(word) == 3
        if self.kind == "calling":
            flag = self.r.off.zeros(1, np.int32)
            await self.r.launch(silent, flag)
            assert (await self.r.off.get(flag))[0] == 7
        if self.kind in STREAMED:
            await self.r.off.copy(self.r.off.empty(self.numbers.shape, np.uint64), self.numbers)


def _free_pinned(memory: Any) -> set[int]:
    """Return the addresses of pinned memory that the next one may get."""
    return {block.device_address for blocks in memory._wanted_pinned.values() for block in blocks}


@asynccontextmanager
async def cell(device_label: str, kind: str, state: str) -> AsyncIterator[Cell]:
    """Open what a cell needs; freed memory is poisoned where the device can."""

    def device() -> Any:
        return HostDevice(poison=True) if device_label == "host" else device_label

    options: dict[str, Any] = {"lane_depth": 1} if state == "full lane" else {}
    async with AsyncExitStack() as stack:
        r = await stack.enter_async_context(rig(device(), lanes=2, calling_lanes=1, **options))
        there = await stack.enter_async_context(rig(device(), lanes=1)) if "elsewhere" in kind else r
        if kind == "calling":
            await r.off.load(silent, ask, deaf, until_cancelled)
        before = r.off.stats()["buffers"], there.off.stats()["buffers"]
        made = Cell(r, there, kind, state)
        await made.prepare()
        try:
            yield made
        finally:
            made.release()
        await turns(3)
        for name in ("source", "target", "flag", "bound", "op", "held"):
            setattr(made, name, None)
        made.terms.clear()
        await r.off.drain()
        if kind.startswith("put"):
            gc.collect()  # the traceback of who gave up has the operation, and that its result
        await until(lambda: (r.off.stats()["buffers"], there.off.stats()["buffers"]) == before, "everything is freed")


__all__ = ["EXCLUDED", "KINDS", "STATES", "WAITS", "WORKS", "Cell", "Gate", "cell", "cells", "where"]
