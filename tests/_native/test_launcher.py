"""``launcher.c``: which launches the short path takes, and that it does what the long one does."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

from aiooffload import _native
from aiooffload._native import Board, Launcher, now_ns, pack
from aiooffload.buffer import Allocation, Buffer
from aiooffload.errors import LaunchError
from aiooffload.operation import Operation
from tests._native.launch_rig import (
    GEOMETRY,
    NO_PARAMETERS,
    TYPES,
    Kernel,
    Rig,
    Stream,
    complete,
    make,
    make_buffer,
    make_plan,
    make_site,
    word,
)


def nothing_happened(rig: Rig) -> bool:
    return not (rig.enqueued or rig.board.pushed or rig.notices or rig.errors)


@pytest.mark.all_loops
async def test_a_known_launch_goes_to_the_device() -> None:
    """The operation is what the long path makes: on a lane, pushed, with its plan, name, owner and time."""
    rig = await make()
    before = now_ns()
    operation = rig.launch(3, 2.5)
    assert type(operation) is Operation
    assert (operation.loop, operation.owner) == (asyncio.get_running_loop(), rig.owner)
    assert (operation.name, operation.plan, operation.lane) == ("k", rig.plan, "lane 0")
    assert (operation.queue, operation.sequence) == (rig.queues[0], 1)
    assert before <= operation.submitted_ns <= now_ns()
    assert not operation.finished
    assert rig.streams[0].calls == [(rig.plan, pack(b"if", (3, 2.5)), operation, 1)]
    assert rig.notices == [1]
    rig.queues[0].slot.store(1)
    assert rig.board.poll() == 1
    assert await operation is None


async def test_launches_go_round_the_lanes() -> None:
    """The lane is the board's choice, the sequence that lane's next."""
    rig = await make(lanes=2, depth=4)
    operations = [rig.launch(1, 1.0) for _ in range(4)]
    assert [operation.lane for operation in operations] == ["lane 0", "lane 1", "lane 0", "lane 1"]
    assert [call[3] for stream in rig.streams for call in stream.calls] == [1, 2, 1, 2]


async def test_the_board_is_told_only_while_nobody_watches() -> None:
    """A push while a look is scheduled needs no notice."""
    rig = await make(depth=8)
    rig.launch(1, 1.0)
    rig.board.watched = True
    rig.launch(1, 1.0)
    rig.board.watched = False
    rig.launch(1, 1.0)
    assert rig.notices == [1, 3]


async def test_a_launch_without_arguments_uses_what_was_prepared() -> None:
    """The block given to learn() is passed on as it is."""
    rig = await make(formats=b"", prepared=NO_PARAMETERS)
    operation = rig.launch()
    assert rig.streams[0].calls == [(rig.plan, NO_PARAMETERS, operation, 1)]
    assert rig.streams[0].calls[0][1] is NO_PARAMETERS


@pytest.mark.parametrize(
    ("formats", "prepared", "args"),
    [
        (b"if", None, ()),
        (b"if", None, (1,)),
        (b"if", None, (1, 1.0, 2)),
        (b"if", None, (1.0, 1.0)),
        (b"if", None, (2**31, 1.0)),
        (b"iP", None, (1, Kernel())),
        (None, None, (1,)),  # what has to be prepared, and cannot be
        (b"", NO_PARAMETERS, (1,)),
    ],
)
async def test_other_arguments_are_for_the_long_path(
    formats: bytes | None, prepared: Any, args: tuple[Any, ...]
) -> None:
    """Buffers, wrong counts and values that need a conversion or an error: None, and nothing was done."""
    rig = await make(formats=formats, prepared=prepared)
    assert rig.launch(*args) is None
    assert nothing_happened(rig)


@pytest.mark.parametrize(("name", "value"), [("pending", 1), ("paused", 1)])
async def test_what_waits_on_the_host_goes_first(name: str, value: int) -> None:
    """While operations are pending or a barrier is up, the long path queues behind them."""
    rig = await make()
    setattr(rig.board, name, value)
    assert rig.launch(1, 1.0) is None
    assert nothing_happened(rig)
    setattr(rig.board, name, 0)
    assert rig.launch(1, 1.0) is not None


async def test_it_has_to_be_ready() -> None:
    """A new launcher, and one of an Offload that is closed, takes nothing."""
    rig = await make()
    rig.launcher.ready = False
    assert rig.launch(1, 1.0) is None
    assert nothing_happened(rig)
    loop = asyncio.get_running_loop()
    assert Launcher(rig.board, loop, None, *TYPES, print, print).ready is False  # type: ignore[arg-type]


async def test_full_lanes_are_for_the_long_path() -> None:
    """When the least busy lane has no room, the launch has to wait on the host."""
    rig = await make(lanes=2, depth=1)
    assert [rig.launch(1, 1.0) is None for _ in range(3)] == [False, False, True]
    assert rig.enqueued == 2
    rig.queues[1].slot.store(1)
    rig.board.poll()
    assert rig.launch(1, 1.0).lane == "lane 1"


async def test_a_lane_without_a_stream_is_for_the_long_path() -> None:
    """A lane that nothing was attached to is not launched on."""
    rig = await make(lanes=1)
    board = Board()
    board.add(word(), 4)
    launcher = Launcher(board, asyncio.get_running_loop(), None, *TYPES, print, print)  # type: ignore[arg-type]
    launcher.learn(rig.kernel, *GEOMETRY, make_site(rig.plan, b"", NO_PARAMETERS))
    launcher.ready = True
    assert launcher.launch(rig.kernel, *GEOMETRY, ()) is None
    assert board.pushed == 0


async def test_unknown_geometries_are_for_the_long_path() -> None:
    """Another kernel, grid or block, also one that cannot be a key, is not known."""
    rig = await make()
    grid, block = GEOMETRY
    unknown: list[tuple[Any, Any, Any]] = [
        (Kernel(), grid, block),
        (rig.kernel, (2, 1, 1), block),
        (rig.kernel, grid, 32),
        (rig.kernel, list(grid), block),
        (rig.kernel, grid, list(block)),
    ]
    assert [rig.launcher.launch(*key, (1, 1.0)) for key in unknown] == [None] * 5
    assert nothing_happened(rig)


async def test_an_error_of_a_key_is_raised() -> None:
    """What comparing or hashing raises, other than that it has no hash, reaches the caller."""
    rig = await make()

    class Odd:
        def __hash__(self) -> int:
            raise LaunchError("odd")

    with pytest.raises(LaunchError, match="odd"):
        rig.launcher.launch(Odd(), *GEOMETRY, (1, 1.0))
    assert nothing_happened(rig)


@pytest.mark.parametrize("args", [[1, 1.0], None, 5])
async def test_arguments_are_a_tuple(args: Any) -> None:
    """Anything else is for the long path, which says so."""
    rig = await make()
    assert rig.launcher.launch(rig.kernel, *GEOMETRY, args) is None
    assert nothing_happened(rig)


async def test_launch_takes_four_arguments() -> None:
    """A call with another number of them raises TypeError."""
    rig = await make()
    with pytest.raises(TypeError, match="launch"):
        rig.launcher.launch(rig.kernel, *GEOMETRY)  # type: ignore[call-arg]


async def test_another_loop_is_for_the_long_path() -> None:
    """Without the Offload's loop running here nothing is launched; the long path raises the UsageError."""
    rig = await make()
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        assert rig.launch(1, 1.0) is None
    finally:
        asyncio._set_running_loop(loop)
    assert nothing_happened(rig)


async def test_a_refusal_of_the_driver_goes_to_the_engine() -> None:
    """The operation is returned all the same, was not pushed, and the engine is told of the error."""
    rig = await make()
    rig.streams[0].refusal = refusal = LaunchError("refused")
    operation = rig.launch(1, 1.0)
    assert rig.errors == [(operation, refusal)]
    assert operation.queue is None
    assert (rig.board.pushed, rig.queues[0].issued, rig.notices) == (0, 0, [])
    assert rig.launch(1, 1.0).lane == "lane 1"
    operation.finish(failure=refusal)
    operation.look()
    rig.errors.clear()


async def test_an_error_of_the_engine_is_raised() -> None:
    """What the engine's own handler or notice raises reaches the caller of launch()."""

    def fail(*args: Any) -> None:
        raise KeyError("engine")

    rig = await make()
    for refusal, pushed in ((LaunchError("refused"), 0), (None, 1)):
        launcher = Launcher(rig.board, asyncio.get_running_loop(), None, *TYPES, fail, fail)  # type: ignore[arg-type]
        launcher.learn(rig.kernel, *GEOMETRY, make_site(rig.plan, b"", NO_PARAMETERS))
        launcher.ready = True
        for stream in rig.streams:
            stream.refusal = refusal
        with pytest.raises(KeyError, match="engine"):
            launcher.launch(rig.kernel, *GEOMETRY, ())
        assert rig.board.in_flight == pushed


async def test_enqueuing_may_replace_the_site() -> None:
    """A stream that makes the launcher forget while it enqueues does not pull the plan from under it."""
    rig = await make()

    class Forgetful(Stream):
        def enqueue_kernel(self, plan: Any, prepared: Any, operation: Any, sequence: int) -> None:
            rig.launcher.forget()
            gc.collect()
            super().enqueue_kernel(plan, prepared, operation, sequence)

    rig.queues[0].attach(Forgetful(), "forgetful")
    rig.plan = make_plan("other")
    assert rig.launch(1, 1.0).name == "k"
    assert rig.launch(1, 1.0) is None


async def test_learning_again_replaces() -> None:
    """A geometry has one plan: the last one learned."""
    rig = await make()
    other = make_plan("other")
    rig.launcher.learn(rig.kernel, *GEOMETRY, make_site(other, b"i"))
    assert rig.launch(1, 1.0) is None
    assert rig.launch(1).plan is other


async def test_forgotten_kernels_are_let_go() -> None:
    """learn() holds kernel and plan, forget() gives both back."""
    rig = await make()
    kernel, plan = Kernel(), make_plan()
    before = sys.getrefcount(kernel), sys.getrefcount(plan)
    rig.launcher.learn(kernel, *GEOMETRY, make_site(plan, b"", NO_PARAMETERS))
    assert (sys.getrefcount(kernel), sys.getrefcount(plan)) == (before[0] + 1, before[1] + 1)
    rig.launcher.forget()
    assert (sys.getrefcount(kernel), sys.getrefcount(plan)) == before
    assert rig.launch(1, 1.0) is None


@pytest.mark.parametrize(
    "arguments",
    [
        (Kernel(), 1, 1),
        (Kernel(), [1], 1, make_site(make_plan(), b"")),
        (Kernel(), 1, 1, None),
        (Kernel(), 1, 1, make_site(None, b"")),  # type: ignore[arg-type]
        (Kernel(), 1, 1, make_site(make_plan(), "P")),  # type: ignore[arg-type]
        (Kernel(), 1, 1, make_site(make_plan(), b"", reads=None)),  # type: ignore[arg-type]
        (Kernel(), 1, 1, make_site(make_plan(), b"", dtypes=[])),  # type: ignore[arg-type]
        (Kernel(), 1, 1, make_site(make_plan(), b"", prepare=None)),
        (Kernel(), 1, 1, make_site(make_plan(), b"")[:5]),
    ],
)
async def test_only_sites_of_keys_are_learned(arguments: tuple[Any, ...]) -> None:
    """A site of another form, a missing argument and a geometry that cannot be a key raise TypeError."""
    rig = await make()
    with pytest.raises(TypeError):
        rig.launcher.learn(*arguments)


async def test_the_operation_type_is_a_subclass() -> None:
    """A type that is no operation, and a board that is none, raise TypeError."""
    loop = asyncio.get_running_loop()
    for wrong in (int, Operation(loop, None, "x")):
        with pytest.raises(TypeError):
            Launcher(Board(), loop, None, wrong, print, print)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Launcher(None, loop, None, *TYPES, print, print)  # type: ignore[arg-type]
    assert Launcher(Board(), loop, None, _native.Operation, Buffer, Allocation, print, print)  # type: ignore[arg-type]


async def test_buffers_have_slots() -> None:
    """A class of buffers or allocations in which the launch path would not find what it reads raises."""
    loop = asyncio.get_running_loop()

    class Computed:
        __slots__ = ("_address", "dtype")
        allocation = property()

    wrong: list[tuple[Any, Any, Any]] = [
        (Computed, Allocation, TypeError),
        (Buffer, Kernel, AttributeError),
        (Buffer, Buffer, AttributeError),
        (Buffer, None, TypeError),
    ]
    for buffer, allocation, error in wrong:
        with pytest.raises(error):
            Launcher(Board(), loop, None, Operation, buffer, allocation, print, print)  # type: ignore[arg-type]


async def test_a_launch_leaves_no_references() -> None:
    """After an operation is done and gone, plan, kernel, owner and lane are held as before."""
    rig = await make(lanes=1, depth=1)
    things = (rig.plan, rig.kernel, rig.owner, rig.lanes[0], rig.streams[0])
    rig.launch(1, 1.0)
    for _ in range(3):
        rig.queues[0].slot.store(rig.queues[0].issued)
        rig.board.poll()
        rig.streams[0].calls.clear()
        before = [sys.getrefcount(thing) for thing in things]
        assert rig.launch(1, "no float") is None
        operation = rig.launch(1, 1.0)
        rig.queues[0].slot.store(rig.queues[0].issued)
        rig.board.poll()
        rig.streams[0].calls.clear()
        del operation
        assert [sys.getrefcount(thing) for thing in things] == before
        rig.launch(1, 1.0)


async def test_a_launcher_in_a_cycle_is_collected() -> None:
    """An engine that holds its launcher and is its owner goes with the next collection."""
    rig = await make()
    rig.owner.launcher = rig.launcher
    rig.launch(1, 1.0)
    watched = weakref.ref(rig.owner)
    del rig
    gc.collect()
    assert watched() is None


# -- buffers -------------------------------------------------------------------------------


async def make_with_buffers(
    reads: bytes = b"\1\0", lanes: int = 3, depth: int = 4, **options: Any
) -> tuple[Rig, Buffer, Buffer]:
    """A launcher that knows a kernel of a buffer that it reads and one that it writes, and two buffers."""
    rig = await make(lanes, depth)
    dtypes = (np.dtype(np.float32), None)
    rig.launcher.learn(rig.kernel, *GEOMETRY, make_site(rig.plan, b"PP", None, reads, dtypes, **options))
    return rig, make_buffer(rig.owner), make_buffer(rig.owner, 0x2000)


async def test_a_launch_with_buffers_is_recorded() -> None:
    """It packs their addresses, is what later ones come after, and holds arguments and leases until it is done."""
    rig, x, y = await make_with_buffers()
    operation = rig.launch(x, y)
    assert rig.streams[0].calls == [(rig.plan, pack(b"PP", (x, y)), operation, 1)]
    assert (x.allocation.history.conflicts(True), x.allocation.history.conflicts(False)) == ([operation], [])
    assert y.allocation.history.conflicts(False) == [operation]
    assert operation.keep == ((x, y), x.allocation.lease, y.allocation.lease)
    assert operation.deps is None
    complete(rig)
    assert operation.finished
    assert operation.keep is None
    assert y.allocation.history.conflicts(True) == []


async def test_what_shares_a_buffer_goes_to_its_lane() -> None:
    """Behind what is unfinished, on its lane; once that is done, wherever there is room."""
    rig, x, y = await make_with_buffers()
    assert [rig.launch(x, y).lane for _ in range(3)] == ["lane 0"] * 3
    assert [call[3] for call in rig.streams[0].calls] == [1, 2, 3]
    complete(rig)
    assert rig.launch(x, y).lane == "lane 1"


async def test_readers_go_round_the_lanes() -> None:
    """Launches that only read what they share are not ordered, so they may run at the same time."""
    rig, x, _ = await make_with_buffers()
    assert [rig.launch(x, make_buffer(rig.owner)).lane for _ in range(3)] == ["lane 0", "lane 1", "lane 2"]


async def test_readers_on_one_lane_are_followed_there() -> None:
    """A write after reads on one lane goes there; after reads on two it has to wait for one of them."""
    rig, x, y = await make_with_buffers()
    first = rig.launch(x, y)
    assert rig.launch(y, x).lane == first.lane
    complete(rig)
    readers = [rig.launch(x, make_buffer(rig.owner)) for _ in range(2)]
    assert readers[0].lane != readers[1].lane
    enqueued = rig.enqueued
    assert rig.launch(y, x) is None
    assert (rig.enqueued, x.allocation.history.conflicts(False)) == (enqueued, [])
    queue = rig.queues[rig.lanes.index(readers[0].lane)]
    queue.slot.store(queue.issued)
    rig.board.poll()
    assert rig.launch(y, x) is not None


async def test_two_buffers_in_use_on_two_lanes_are_for_the_long_path() -> None:
    """One lane's order cannot put both first."""
    rig, x, y = await make_with_buffers()
    rig.launch(make_buffer(rig.owner), x)
    rig.launch(make_buffer(rig.owner), y)
    assert rig.launch(x, y) is None
    assert rig.enqueued == 2


async def test_one_buffer_twice() -> None:
    """It is written then, and the launch does not come after itself."""
    rig, x, _ = await make_with_buffers()
    operation = rig.launch(x, x)
    assert x.allocation.history.conflicts(False) == [operation]
    second = rig.launch(x, x)
    assert second.lane == operation.lane
    assert x.allocation.history.conflicts(False) == [second]


@pytest.mark.parametrize("change", ["waits", "calls", "goes piece by piece", "never ran"])
async def test_what_a_lane_does_not_order_is_for_the_long_path(change: str) -> None:
    """Behind what is on the host, calls, is streamed, or stands for others, Python knows what to do."""
    rig, x, y = await make_with_buffers()
    before: Any = Operation(asyncio.get_running_loop(), rig.owner, "before")
    if change != "waits":
        rig.queues[0].push(before)
    before.calling, before.streamed = change == "calls", change == "goes piece by piece"
    if change == "never ran":
        before.deps = [Operation(asyncio.get_running_loop(), rig.owner, "running")]
        before.finish()
    y.allocation.history.record(before, True)
    assert rig.launch(x, y) is None
    assert rig.enqueued == 0
    before.deps = None
    before.finish()
    assert rig.launch(x, y) is not None


async def test_a_full_lane_is_waited_for() -> None:
    """When the lane that orders it is full the launch waits on the host, although another has room."""
    rig, x, y = await make_with_buffers(depth=2)
    for _ in range(2):
        rig.launch(x, y)
    assert rig.launch(x, y) is None
    assert rig.launch(make_buffer(rig.owner), make_buffer(rig.owner)).lane == "lane 1"


async def test_a_lane_of_another_board_is_for_the_long_path() -> None:
    """What is unfinished elsewhere is ordered by nothing here."""
    rig, x, y = await make_with_buffers()
    other = await make()
    y.allocation.history.record(other.launch(1, 1.0), True)
    assert rig.launch(x, y) is None


async def test_without_program_order() -> None:
    """With explicit ordering launches are neither ordered nor recorded, and hold their memory all the same."""
    rig, x, y = await make_with_buffers()
    rig.launcher.ordered = False
    operations = [rig.launch(x, y) for _ in range(3)]
    assert [operation.lane for operation in operations] == rig.lanes
    assert y.allocation.history.conflicts(True) == []
    assert operations[0].keep == ((x, y), x.allocation.lease, y.allocation.lease)


async def test_buffers_that_are_not_as_they_should_be() -> None:
    """A closed one, another's, one of another dtype, or none where one belongs: for the long path, which raises."""
    rig, x, y = await make_with_buffers()
    closed, foreign, other = make_buffer(rig.owner), make_buffer(Kernel()), make_buffer(rig.owner, dtype=np.int32)
    closed.close()
    wrong: list[tuple[Any, ...]] = [
        (closed, y),
        (x, closed),
        (foreign, y),
        (other, y),
        (1, y),
        (x, 1),
        (x,),
        (x, y, y),
        (),
    ]
    assert [rig.launch(*args) for args in wrong] == [None] * len(wrong)
    assert nothing_happened(rig)
    assert rig.launch(x, other) is not None


async def test_more_buffers_than_it_has_room_for() -> None:
    """A launch with 33 buffers goes the long way, one with 32 does not."""
    rig = await make()
    buffers = tuple(make_buffer(rig.owner, 16 * number) for number in range(33))
    for count in (33, 32):
        rig.launcher.learn(rig.kernel, *GEOMETRY, make_site(rig.plan, b"P" * count))
        assert (rig.launch(*buffers[:count]) is None) == (count == 33)
    assert rig.streams[0].calls[0][1] == pack(b"P" * 32, buffers[:32])


async def test_prepared_in_python() -> None:
    """Without formats ``prepare`` makes what the stream takes; what it raises is raised, and nothing was done."""
    rig, x, y = await make_with_buffers()

    def prepare(arguments: tuple[Any, ...]) -> tuple[str, Any]:
        if arguments[0] is y:
            raise LaunchError("not this one")
        return ("prepared", arguments)

    rig.launcher.learn(rig.kernel, *GEOMETRY, make_site(rig.plan, None, prepare=prepare))
    operation = rig.launch(x, y, "anything")
    assert rig.streams[0].calls == [(rig.plan, ("prepared", (x, y, "anything")), operation, 1)]
    with pytest.raises(LaunchError, match="not this one"):
        rig.launch(y, x)
    assert (rig.enqueued, rig.board.pushed) == (1, 1)
    assert y.allocation.history.conflicts(True) == [operation]


async def test_preparing_may_change_everything() -> None:
    """What runs while the arguments are prepared counts: a submission that waits, a launch on the same buffers."""
    rig, x, y = await make_with_buffers()
    actions: list[Any] = []

    def prepare(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if actions:
            actions.pop()()
        return arguments

    rig.launcher.learn(rig.kernel, *GEOMETRY, make_site(rig.plan, None, prepare=prepare))
    actions.append(lambda: setattr(rig.board, "pending", 1))
    assert rig.launch(x, y) is None
    assert nothing_happened(rig)
    rig.board.pending = 0
    inner: list[Any] = []
    actions.append(lambda: inner.append(rig.launch(x, y)))
    outer = rig.launch(x, y)
    assert (inner[0].sequence, outer.sequence, inner[0].lane) == (1, 2, outer.lane)
    assert y.allocation.history.conflicts(True) == [outer]


async def test_a_refused_launch_hides_nobody() -> None:
    """One that ended at once leaves what it came after; one that the engine pushed, failed, stands for it."""
    rig, x, y = await make_with_buffers()
    refusal = LaunchError("refused")
    first = rig.launch(x, y)
    rig.streams[0].refusal = refusal
    push = [False]

    def on_error(operation: Any, error: BaseException) -> None:
        if push[0]:
            operation.failure = error
            rig.queues[0].push(operation)
        else:
            operation.finish(failure=error)
        operation.look() if operation.finished else None

    launcher = Launcher(rig.board, asyncio.get_running_loop(), rig.owner, *TYPES, print, on_error)
    launcher.learn(rig.kernel, *GEOMETRY, make_site(rig.plan, b"PP"))
    launcher.ready = rig.board.watched = True
    assert launcher.launch(rig.kernel, *GEOMETRY, (x, y)).finished
    assert y.allocation.history.conflicts(True) == [first]
    push[0] = True
    second = launcher.launch(rig.kernel, *GEOMETRY, (x, y))
    assert y.allocation.history.conflicts(True) == [second]
    assert second.lane == first.lane
    complete(rig)
    assert second.exception() is refusal


async def test_buffers_are_let_go() -> None:
    """A launch, one for the long path and one that raises leave no reference behind once they are over."""
    rig, x, y = await make_with_buffers()
    things = (x, y, x.allocation.history, y.allocation.history, x.allocation.lease, y.allocation.lease, rig.plan)
    for _ in range(3):
        before = [sys.getrefcount(thing) for thing in things]
        assert rig.launch(x, y) is not None
        rig.launcher.ready = False
        assert rig.launch(x, y) is None
        rig.launcher.ready = True
        assert rig.launch(x, y, 1) is None
        complete(rig)
        for stream in rig.streams:
            stream.calls.clear()
        assert [sys.getrefcount(thing) for thing in things] == before
