"""A kernel that calls host functions and meanwhile writes anything anywhere in the memory it shares with the host.

``attack`` runs one such program on the host device; ``test_hostile_device.py`` gives it what Hypothesis draws. For
longer runs, also on an extension that was built with sanitizers::

    python -m tests.scribble --minutes 5 --seed 1

    CFLAGS="-fsanitize=address,undefined -fno-sanitize-recover=undefined -g -O1" \\
        LDFLAGS="-fsanitize=address,undefined" python setup.py build_ext --inplace --force
    LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \\
        ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc python -m tests.scribble --minutes 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import aiooffload as ao
from aiooffload.engine import health, reverse
from aiooffload.rules import wire
from tests.kernels import add
from tests.reverse_kernels import CallingRig, ask, attempt, calling_rig, end_of

LIMIT_S = 20.0
CALL_TIMEOUT_S = 0.02
REGIONS = (
    "tail", "abort", "block", "blocks", "slot ahead", "ring", "cell", "cells", "payload", "payloads", "head", "posts",
    "device tail", "bitmaps", "tickets", "state", "slot", "bell",
)  # fmt: skip
CALLS = ("call", "post", "rows", "batch", "post batch", "map", "async", "slow", "struct", "unknown", "progress")
WORDS = (0, 1, 2, 0xFF, 2**15, 2**31, 2**32, 2**48, 2**56, 2**63, 2**64 - 1)


class Write(NamedTuple):
    """Bytes for somewhere in a region, in words of 8 from its beginning; outside it they wrap round."""

    region: str
    place: int
    data: bytes


class Descriptor(NamedTuple):
    """A request without a ticket, so many tickets ahead of the host, with the tag that makes it valid."""

    ahead: int
    argument: int
    control: int


Step = Write | Descriptor | str
"""The last: one of CALLS."""


class Attack:
    """The kernel: what it writes to, and what it does."""

    def __init__(self, r: CallingRig, steps: Sequence[Step]) -> None:
        engine = r.off._engine
        assert engine is not None
        assert engine.reverse._opened is not None
        assert engine.reverse.channel is not None
        opened, self._channel = engine.reverse._opened, engine.reverse.channel
        self._reverse = engine.reverse
        self._steps = steps
        self._shared, self._state = opened.shared.host_address, opened.state.address
        self._slots = [lane.queue.slot.host_address for lane in engine.lanes.lanes]
        self._bell = opened.bell.host_address
        self._launch = 0

    def run(self, launch: Any) -> None:
        """Do everything, whatever becomes of it."""
        callers = list(self._reverse.callers.values())
        self._launch = next(caller.index for caller in callers if caller.operation.name == "attack")
        for step in self._steps:
            if isinstance(step, Write):
                self._write(step)
            elif isinstance(step, Descriptor):
                self._publish(step)
            else:
                attempt(lambda step=step: self._call(launch, step))

    def _region(self, name: str) -> tuple[int, int]:
        """Return (address, bytes)."""
        shared, state, position = self._shared, self._state, self._channel.position
        return {
            "tail": (shared + wire.TAIL_OFFSET, 8),
            "abort": (shared + wire.ABORT_OFFSET, wire.ABORT_NBYTES),
            "block": (shared + wire.launch_offset(self._launch), 64),
            "blocks": (shared + wire.launch_offset(0), 64 * wire.LAUNCHES),
            "slot ahead": (shared + wire.slot_offset(position), 16),
            "ring": (shared + wire.slot_offset(0), 16 * wire.RING_SLOTS),
            "cell": (shared + wire.cell_offset(32 * self._launch % wire.CELLS), 4 * 320),
            "cells": (shared + wire.cell_offset(0), 320 * wire.CELLS),
            "payload": (shared + wire.payload_offset(position), wire.PAYLOAD_NBYTES),
            "payloads": (shared + wire.payload_offset(0), wire.PAYLOAD_NBYTES * wire.RING_SLOTS),
            "head": (state + wire.STATE_HEAD, 8),
            "posts": (state + 128, 8),
            "device tail": (state + 256, 8),
            "bitmaps": (state + 1024, 2 * wire.CELLS // 8),
            "tickets": (state + 5120, 8 * wire.CELLS),
            "state": (state, wire.STATE_NBYTES),
            "slot": (self._slots[self._launch % len(self._slots)], 8),
            "bell": (self._bell, 8),
        }[name]

    def _write(self, write: Write) -> None:
        address, nbytes = self._region(write.region)
        data = write.data[:nbytes]
        at = write.place * 8 % nbytes
        ctypes.memmove(address + min(at, nbytes - len(data)), data, len(data))

    def _publish(self, request: Descriptor) -> None:
        ticket = self._channel.position + request.ahead
        words = (ctypes.c_uint64 * 2).from_address(self._shared + wire.slot_offset(ticket))
        words[0] = request.argument
        words[1] = request.control % 2**54 | wire.tag_of(ticket) << 54

    def _call(self, launch: Any, what: str) -> None:
        array = np.arange(100, dtype=np.float32)
        {
            "call": lambda: launch.call("f", 3, dtype=np.int64),
            "post": lambda: launch.post("f", 4),
            "rows": lambda: launch.call_each("f", np.arange(9)),
            "batch": lambda: launch.call("batch", 1, 2.5, dtype=np.float64),
            "post batch": lambda: launch.post("batch", 1, 2.5),
            "map": lambda: launch.call("mapped", launch.tofrom(array)),
            "async": lambda: launch.call_async("f", 5),
            "slow": lambda: launch.call("slow", 5, dtype=np.int64),
            "struct": lambda: launch.call("record", np.zeros((), STRUCT)[()]),
            "unknown": lambda: launch.post("nobody", 1),
            "progress": lambda: launch.progress(1, 2),
        }[what]()


STRUCT = np.dtype([("name", "U3"), ("flag", "?"), ("when", "M8[s]"), ("bytes", "V40")], align=True)


def register(off: ao.Offload) -> None:
    """Register functions of every kind."""

    @off.host_function(on_error="collect")
    async def f(x: int) -> int:
        return x if -(2**62) < x < 2**62 else 0

    @off.host_function(batch=True)
    async def batch(x: np.int64, y: np.float64) -> np.float64:
        result: Any = y * 2
        return result

    @off.host_function
    async def mapped(x: ao.InOut[np.float32]) -> None:
        with np.errstate(all="ignore"):
            x += 1

    @off.host_function(limit=2, timeout_s=0.01)
    async def slow(x: int) -> int:
        await asyncio.sleep(0)
        return 7

    @off.host_function
    async def record(x: STRUCT) -> None:  # type: ignore[valid-type]
        repr(x)


async def attack(steps: Sequence[Step]) -> str:
    """Run the steps as a kernel beside an innocent one, on an Offload and beside an innocent Offload; how it has ended.

    Raises AssertionError if anything but an error of the launches or the end of the device came of it, or nothing
    within the limit.
    """
    patches = (
        mock.patch.object(health, "TICK_S", 0.003),
        mock.patch.object(health, "MARK_TICKS", 5),
        mock.patch.object(reverse, "TORN_S", 0.05),
    )
    loop, told = asyncio.get_running_loop(), list[Any]()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: told.append(context.get("exception")))
    with contextlib.ExitStack() as stack:
        stack.callback(loop.set_exception_handler, before)
        for patch in patches:
            stack.enter_context(patch)
        async with asyncio.timeout(LIMIT_S), calling_rig("host", lanes=2) as innocent:
            outcome = await _attack(steps, innocent)
    health.loss.error = None
    assert all(isinstance(error, ao.DeviceLostError) for error in told), told  # of what nobody looked at
    return outcome


async def _attack(steps: Sequence[Step], innocent: CallingRig) -> str:
    innocent.host_function(_double, name="f")
    word = innocent.word(1)
    async with calling_rig("host", lanes=2, calling_lanes=3, call_timeout_s=CALL_TIMEOUT_S, bury=True) as r:
        register(r.off)
        await r.off.load(ask, add)
        kernel = ao.Kernel("attack", host=Attack(r, steps).run, calls=True)
        await r.off.load(kernel)
        ops: list[ao.Operation[Any]] = [r.launch(kernel), r.launch(ask, 2, r.array(1), r.array(2, np.int32))]
        beside = innocent.asked(ask, 21)
        innocent.launch(add, word, 1)
        ops += [r.launch(add, r.word(1), 1) for _ in range(3)]
        assert await beside == ([0, 0], 42, None)
        ends = [await end_of(op) for op in ops]
        expected = (ao.HostFunctionError, ao.LaunchError, ao.DeviceLostError, type(None))
        assert all(isinstance(end, expected) for end in ends), ends
        assert await innocent.read(word) == 2
        if not any(isinstance(end, ao.DeviceLostError) for end in ends):
            await _is_well(r)
        engine = r.off._engine
        assert engine is not None
        lost = engine.lost is not None
    return "lost" if lost else "failed" if any(ends) else "ignored"


async def _double(x: int) -> int:
    return 2 * x


async def _is_well(r: CallingRig) -> None:
    """What an attack did not end goes on: ordinary work is done right, or finds now that the device is lost."""
    with contextlib.suppress(ao.DeviceLostError):
        word = r.off.empty(1, np.uint64)
        r.off.fill(word, 4)
        r.launch(add, word, 5)
        assert await r.read(word) == 9
        await r.off.drain()


# -- long runs -----------------------------------------------------------------------------


def random_steps(random: random.Random) -> list[Step]:
    """Return steps as Hypothesis would draw them."""
    steps: list[Step] = []
    for _ in range(random.randrange(1, 40)):
        kind = random.random()
        if kind < 0.5:
            steps.append(random.choice(CALLS))
        elif kind < 0.8:
            steps.append(Write(random.choice(REGIONS), random.randrange(2**20), _random_data(random)))
        else:
            steps.append(random_descriptor(random))
    return steps


def _random_data(random: random.Random) -> bytes:
    if random.random() < 0.5:
        words = [random.choice(WORDS) for _ in range(random.choice((1, 1, 2, 8)))]
        return b"".join(word.to_bytes(8, "little") for word in words)
    return random.randbytes(random.choice((1, 8, 8, 16, 64, 256, 4096)))


def random_descriptor(random: random.Random) -> Descriptor:
    names: list[str | int] = ["f", "batch", "mapped", "slow", "record", random.randrange(2**24)]
    made = wire.Descriptor(
        0,
        wire.function_id(random.choice(names)),
        random.choice((0, 0, 1, random.randrange(wire.LAUNCHES))),
        random.choice((0, 1, 32, wire.NO_CELL, random.randrange(2**15))),
        random.choice((8, 9, 10, random.randrange(16))),
        random.choice((8, 16, 16 | 1 << 16, 32 | 2 << 16, random.randrange(2**64))),
    )
    return Descriptor(random.choice((0, 0, 1, 2, 100)), *made.pack())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first attack; each has one more than the last")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    seed, end = options.seed, time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        if (seed - options.seed) % 100 == 0:  # so that whoever finds a crash knows where to look
            print("seed", seed, file=sys.stderr, flush=True)
        outcomes[asyncio.run(attack(random_steps(random.Random(seed))))] += 1
        seed += 1
    print(json.dumps({"attacks": seed - options.seed, **outcomes}))


if __name__ == "__main__":
    main()
