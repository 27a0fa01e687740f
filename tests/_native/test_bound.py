"""``bound.c``: calls of a launch with arguments of its own, and what it leaves to the long way."""

from __future__ import annotations

import asyncio
import gc
import struct
import sys
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from aiooffload._native import BoundLaunch, pack
from tests._native.launch_rig import Kernel, Rig, complete, make, make_buffer, make_site

NAMES = {"a": 0, "n": 3}


@dataclass
class Bound:
    """A bound launch of ``(a: f, x: P, y: P, n: i)``, its launcher, and what went the long way."""

    rig: Rig
    x: Any
    y: Any
    call: Any = None
    long: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return (2.0, self.x, self.y, 5)

    def otherwise(self, *args: Any, **kwargs: Any) -> str:
        self.long.append((args, kwargs))
        return "long"

    def bind(self, packed: bytes | None, prepare: Any = lambda arguments: arguments) -> Any:
        site = make_site(self.rig.plan, b"fPPi" if packed else None, None, b"\0\1\0\0", (None,) * 4, prepare)
        return BoundLaunch(self.rig.launcher, site, self.arguments, b"fPPi", dict(NAMES), packed, self.otherwise)

    @property
    def blocks(self) -> list[Any]:
        return [call[1] for stream in self.rig.streams for call in stream.calls]


@pytest_asyncio.fixture
async def bound() -> AsyncIterator[Bound]:
    rig = await make(lanes=3, depth=8)
    one = Bound(rig, make_buffer(rig.owner), make_buffer(rig.owner, 0x2000))
    one.call = one.bind(pack(b"fPPi", one.arguments))
    yield one
    complete(rig)


async def test_a_call_launches(bound: Bound) -> None:
    """With the block that was packed, on a lane, recorded in its buffers, held until it is done."""
    packed = pack(b"fPPi", bound.arguments)
    operation = bound.call()
    assert bound.rig.streams[0].calls == [(bound.rig.plan, packed, operation, 1)]
    assert bound.y.allocation.history.conflicts(False) == [operation]
    assert operation.keep == (bound.arguments, bound.x.allocation.lease, bound.y.allocation.lease)
    assert bound.call().lane == operation.lane
    assert bound.long == []
    assert bound.blocks[0] is bound.blocks[1]


async def test_a_changed_scalar_is_of_one_launch(bound: Bound) -> None:
    """Its bytes are those of a launch packed with it; the next call has the old ones again."""
    bound.call(a=0.5)
    bound.call(n=-7)
    bound.call(n=np.int32(9), a=np.float32(0.1))
    bound.call(a=3)
    bound.call()
    expected = [(0.5, 5), (2.0, -7), (0.1, 9), (3.0, 5), (2.0, 5)]
    assert bound.blocks == [pack(b"fPPi", (a, bound.x, bound.y, n)) for a, n in expected]
    assert bound.long == []


async def test_a_lane_can_be_named(bound: Bound) -> None:
    """It goes there, unless its buffers are in use elsewhere."""
    _, second, third = bound.rig.lanes
    assert bound.call(lane=third).lane is third
    assert bound.call(lane=third, after=()).lane is third
    assert bound.call(lane=None).lane is third
    assert bound.call(lane=second) == "long"
    complete(bound.rig)
    assert bound.call(lane=second).lane is second
    assert bound.long == [((), {"lane": second})]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {"lane": "lane 3"}),
        ((), {"after": [1]}),
        ((), {"after": ("x",)}),
        ((), {"a": 2**24 + 1}),
        ((), {"a": "x"}),
        ((), {"n": 1.0}),
        ((), {"n": 2**31}),
        ((), {"x": 1}),
        ((), {"nobody": 1}),
        ((), {"a": 1.0, "nobody": 1}),
        ((1,), {}),
        ((1, 2), {"a": 1.0}),
    ],
    ids=str,
)
async def test_anything_else_goes_the_long_way(bound: Bound, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The long way is called as this was, and what it returns is returned; nothing else was done."""
    assert bound.call(*args, **kwargs) == "long"
    assert bound.long == [(args, kwargs)]
    assert (bound.rig.enqueued, bound.rig.board.pushed) == (0, 0)


@pytest.mark.parametrize("obstacle", ["pending", "paused", "not ready", "closed", "another loop"])
async def test_what_is_in_the_way(bound: Bound, obstacle: str) -> None:
    """Whatever keeps a launch from the launch path keeps a bound one from it, too."""
    if obstacle in ("pending", "paused"):
        setattr(bound.rig.board, obstacle, 1)
    elif obstacle == "not ready":
        bound.rig.launcher.ready = False
    elif obstacle == "closed":
        bound.x.close()
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None if obstacle == "another loop" else loop)
    try:
        assert bound.call(a=1.0) == "long"
    finally:
        asyncio._set_running_loop(loop)
    assert bound.rig.enqueued == 0


async def test_an_error_of_the_long_way_is_raised(bound: Bound) -> None:
    """It reaches the caller."""
    bound.rig.launcher.ready = False

    def fail(**kwargs: Any) -> None:
        raise KeyError("long")

    site = make_site(bound.rig.plan, None)
    call = BoundLaunch(bound.rig.launcher, site, (), b"", {}, None, fail)
    with pytest.raises(KeyError, match="long"):
        call()


async def test_prepared_for_each_call(bound: Bound) -> None:
    """Where nothing can be packed once, the arguments are prepared anew, with what was changed."""
    call = bound.bind(None, lambda arguments: ("prepared", *arguments))
    call()
    call(a="whatever it takes", n=1)
    call()
    x, y = bound.x, bound.y
    assert bound.blocks == [
        ("prepared", 2.0, x, y, 5),
        ("prepared", "whatever it takes", x, y, 1),
        ("prepared", 2.0, x, y, 5),
    ]
    assert call.arguments == bound.arguments


async def test_what_a_call_was_packed_with_stays(bound: Bound) -> None:
    """A block that a stream still has is not written again."""
    bound.call(a=7.0)
    first = bytes(bound.blocks[0])
    bound.call(a=8.0)
    assert bound.blocks[0] == first
    offset = struct.unpack_from("<I", first, 4)[0]
    assert [struct.unpack_from("<f", block, offset)[0] for block in bound.blocks] == [7.0, 8.0]


async def test_calls_leave_no_references(bound: Bound) -> None:
    """Calls of every kind, once they are over, hold nothing."""
    call = bound.bind(None)
    things = (bound.x, bound.y, bound.call, call, bound.x.allocation.history, bound.y.allocation.lease, bound.rig.plan)
    for _ in range(3):
        before = [sys.getrefcount(thing) for thing in things]
        bound.call(a=1.0)
        call(n=1)
        bound.call(after=[1])
        bound.call(nobody=bound.x)
        bound.long.clear()
        complete(bound.rig)
        for stream in bound.rig.streams:
            stream.calls.clear()
        assert [sys.getrefcount(thing) for thing in things] == before


async def test_a_cycle_is_collected(bound: Bound) -> None:
    """A bound launch that is reached from its arguments and its own long way goes with the next collection."""

    holder: Any = Kernel()
    site = make_site(bound.rig.plan, None)
    holder.call = BoundLaunch(bound.rig.launcher, site, (holder,), b"?", {}, None, holder.__init__)
    watched = weakref.ref(holder)
    del holder
    gc.collect()
    assert watched() is None


@pytest.mark.parametrize(
    ("position", "value", "error"),
    [
        (0, None, TypeError),
        (1, (), TypeError),
        (2, [], TypeError),
        (3, "fPPi", TypeError),
        (3, b"fPP", ValueError),
        (4, None, TypeError),
        (5, b"", ValueError),
        (5, "block", ValueError),
        (5, pack(b"i", (1,)), ValueError),
        (5, struct.pack("<5I", 4, 0, 32, 48, 64).ljust(80, b"\0"), ValueError),
        (5, struct.pack("<5I", 4, 32, 48, 64, 73).ljust(80, b"\0"), ValueError),
    ],
)
async def test_bad_parts(bound: Bound, position: int, value: Any, error: type[Exception]) -> None:
    """A part of the wrong type raises TypeError, one that does not fit the arguments ValueError."""
    packed = pack(b"fPPi", bound.arguments)
    site = make_site(bound.rig.plan, b"fPPi")
    parts: list[Any] = [bound.rig.launcher, site, bound.arguments, b"fPPi", NAMES, packed, print]
    assert BoundLaunch(*parts)
    parts[position] = value
    with pytest.raises(error):
        BoundLaunch(*parts)


async def test_names_that_lead_nowhere(bound: Bound) -> None:
    """An index beyond the arguments goes the long way, and what is no index raises."""
    site = make_site(bound.rig.plan, b"fPPi")
    packed = pack(b"fPPi", bound.arguments)
    names: dict[str, Any] = {"far": 4, "negative": -1, "text": "x"}
    call: Any = BoundLaunch(bound.rig.launcher, site, bound.arguments, b"fPPi", names, packed, bound.otherwise)
    assert [call(far=1), call(negative=1)] == ["long", "long"]
    with pytest.raises(TypeError):
        call(text=1)
