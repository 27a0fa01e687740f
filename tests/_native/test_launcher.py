"""``launcher.c``: which launches the short path takes, and that it does what the long one does."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest

from aiooffload import _native
from aiooffload._native import Board, Launcher, LaunchPlan, Word, now_ns, pack
from aiooffload.errors import LaunchError
from aiooffload.operation import Operation

GEOMETRY = ((1, 1, 1), (32, 1, 1))
NO_PARAMETERS = pack(b"", ())


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
        Operation,
        lambda: notices.append(board.in_flight),
        lambda operation, error: errors.append((operation, error)),
    )
    queues = [board.add(word(), depth) for _ in range(lanes)]
    streams, names = [Stream() for _ in queues], [f"lane {number}" for number in range(lanes)]
    for queue, stream, name in zip(queues, streams, names, strict=True):
        queue.attach(stream, name)
    rig = Rig(board, launcher, owner, streams, queues, names, notices=notices, errors=errors)
    launcher.learn(rig.kernel, *GEOMETRY, rig.plan, formats, prepared)
    launcher.ready = True
    return rig


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
        (None, None, (1,)),
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
    assert Launcher(rig.board, loop, None, Operation, print, print).ready is False  # type: ignore[arg-type]


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
    launcher = Launcher(board, asyncio.get_running_loop(), None, Operation, print, print)  # type: ignore[arg-type]
    launcher.learn(rig.kernel, *GEOMETRY, rig.plan, b"", NO_PARAMETERS)
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
        launcher = Launcher(rig.board, asyncio.get_running_loop(), None, Operation, fail, fail)  # type: ignore[arg-type]
        launcher.learn(rig.kernel, *GEOMETRY, rig.plan, b"", NO_PARAMETERS)
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
    rig.launcher.learn(rig.kernel, *GEOMETRY, other, b"i", None)
    assert rig.launch(1, 1.0) is None
    assert rig.launch(1).plan is other


async def test_forgotten_kernels_are_let_go() -> None:
    """learn() holds kernel and plan, forget() gives both back."""
    rig = await make()
    kernel, plan = Kernel(), make_plan()
    before = sys.getrefcount(kernel), sys.getrefcount(plan)
    rig.launcher.learn(kernel, *GEOMETRY, plan, b"", NO_PARAMETERS)
    assert (sys.getrefcount(kernel), sys.getrefcount(plan)) == (before[0] + 1, before[1] + 1)
    rig.launcher.forget()
    assert (sys.getrefcount(kernel), sys.getrefcount(plan)) == before
    assert rig.launch(1, 1.0) is None


@pytest.mark.parametrize(
    "arguments", [(Kernel(), 1, 1, None, b"", b""), (Kernel(), 1, 1), (Kernel(), [1], 1, make_plan(), b"", b"")]
)
async def test_only_plans_of_keys_are_learned(arguments: tuple[Any, ...]) -> None:
    """A plan of another type, a missing argument and a geometry that cannot be a key raise TypeError."""
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
        Launcher(None, loop, None, Operation, print, print)  # type: ignore[arg-type]
    assert Launcher(Board(), loop, None, _native.Operation, print, print)  # type: ignore[arg-type]


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
