"""Bound launches: the same as ``off.launch`` in everything but what a call costs."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.kernels import (
    Rig,
    SpyDevice,
    add,
    combine,
    hold_write,
    nothing,
    rig,
    saxpy,
    scale_add,
    until,
)
from tests.reverse_kernels import ask, calling_rig, end_of


def bind(r: Rig, kernel: ao.Kernel, *args: Any, **options: Any) -> ao.BoundLaunch:
    """Bind with one thread."""
    return r.off.bind(kernel, grid=1, block=1, args=args, **options)


def no_long_way(r: Rig) -> None:
    """From now on a launch that leaves the launch path fails the test."""
    assert r.off._engine is not None

    def launch(*args: Any) -> Any:
        raise AssertionError("a launch went the long way")

    r.off._engine.submission.launch = launch  # type: ignore[method-assign]


@pytest.mark.all_loops
async def test_calls_launch(device_label: str) -> None:
    """Each call is a launch of its own, of the arguments that were bound."""
    async with rig(device_label) as r:
        x, y = await r.off.put(np.full(1000, 3, np.float32)), r.off.zeros(1000, np.float32)
        bound = r.off.bind(saxpy, grid=(1000 + 255) // 256, block=256, args=(2.0, x, y, 1000))
        operations = [bound() for _ in range(5)]
        assert all(type(operation) is ao.Operation for operation in operations)
        assert [await operation for operation in operations] == [None] * 5
        assert (await r.off.get(y)).tolist() == [30] * 1000
        assert repr(bound) == "<aiooffload.BoundLaunch saxpy>"
        assert bound.arguments == (2.0, x, y, 1000)


async def test_changes_are_of_one_launch(device_label: str) -> None:
    """A scalar is changed by its name, for one call; NumPy scalars and numbers that need a conversion will do."""
    async with rig(device_label) as r:
        x, y = await r.off.put(np.ones(4, np.float32)), r.off.zeros(4, np.float32)
        bound = r.off.bind(saxpy, grid=1, block=32, args=(1.0, x, y, 4))
        bound(a=0.5, n=2)
        bound(a=np.float32(8))
        bound(n=np.int32(1), a=16)
        bound()
        assert (await r.off.get(y)).tolist() == [25.5, 9.5, 9, 9]


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("seed", range(6))
async def test_program_order(device_label: str, lanes: int, seed: int) -> None:
    """Bound launches, launches, fills and copies of shared words, in any order: the result is the program's."""
    async with rig(device_label, lanes=lanes) as r:
        dice = random.Random(seed)
        words, model = [r.word(number) for number in range(4)], list(range(4))
        scale = [bind(r, scale_add, word, 3, 1) for word in words]
        mixed = {(i, j): bind(r, combine, words[i], words[j]) for i in range(4) for j in range(4) if i != j}
        for step in range(300):
            i, j = dice.sample(range(4), 2)
            match dice.randrange(7):
                case 0:
                    scale[i]()
                    model[i] = model[i] * 3 + 1
                case 1:
                    scale[i](b=step)
                    model[i] = model[i] * 3 + step
                case 2 | 3:
                    mixed[i, j]()
                    model[i] = model[i] * 3 + model[j]
                case 4:
                    r.launch(combine, words[i], words[j])
                    model[i] = model[i] * 3 + model[j]
                case 5:
                    scale[i](lane=dice.choice(r.off.lanes))
                    model[i] = model[i] * 3 + 1
                case 6:
                    r.off.copy(words[i], words[j])
                    model[i] = model[j]
            if dice.random() < 0.03:
                assert await r.read(words[j]) == model[j] % 2**64
        assert [await r.read(word) for word in words] == [value % 2**64 for value in model]


async def test_it_takes_the_short_way(device_label: str) -> None:
    """A chain on the same buffers, what only reads them, and other lanes' work: none of it goes the long way."""
    async with rig(device_label, lanes=3) as r:
        word, other, total = r.word(1), r.word(5), r.word(0)
        await r.off.drain()
        bound, reads = bind(r, add, word, 2), bind(r, combine, total, word)
        r.launch(add, other, 1)  # from here on its geometry is known
        no_long_way(r)
        chain = [bound() for _ in range(20)] + [r.launch(add, word, 1), bound(n=3)]
        assert len({operation.lane for operation in chain}) == 1
        assert r.launch(add, other, 1).lane is not chain[0].lane
        assert reads().lane is chain[0].lane
        await r.off.drain()
        assert [await r.read(word), await r.read(other), await r.read(total)] == [45, 7, 45]


async def test_another_lane_is_waited_for(device_label: str) -> None:
    """Behind work on two lanes, or on another than the one it is sent to, it runs after both."""
    async with rig(device_label, lanes=3) as r:
        gate, x, y = r.gate(), r.word(1), r.word(2)
        await r.off.drain()
        first, second, third = r.off.lanes
        r.launch(hold_write, gate.address, x, 10, lane=first)
        r.launch(add, y, 5, lane=second)
        bound = bind(r, combine, y, x)
        operation = bound(lane=third)
        await until(lambda: gate.started)
        assert operation.lane is third
        assert not operation.done()
        gate.open()
        await operation
        assert await r.read(y) == 7 * 3 + 10


async def test_after(device_label: str) -> None:
    """What ``after`` names comes first, an awaitable too; if it fails, the launch does not start."""
    async with rig(device_label) as r:
        word, other = r.word(1), r.word(0)
        bound, go_on = bind(r, add, word, 2), asyncio.get_running_loop().create_future()
        operation = bound(after=[r.launch(add, other, 1), go_on])
        assert not operation.done()
        go_on.set_result(None)
        await operation
        failing = asyncio.get_running_loop().create_future()
        failing.set_exception(KeyError("no"))
        with pytest.raises(ao.DependencyError):
            await bound(after=[failing], n=5)
        assert await r.read(word) == 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"nobody": 1}, "nobody"),
        ({"x": 1}, "x"),
        ({"n": 1.5}, "n"),
        ({"n": "1"}, "n"),
        ({"n": -1}, "n"),
        ({"n": np.float32(1)}, "n"),
        ({"n": None}, "n"),
        ({"n": 1, "nobody": 1}, "nobody"),
        ({"lane": 1}, "lane"),
        ({"after": [1]}, "after"),
    ],
    ids=str,
)
async def test_wrong_changes(device_label: str, change: dict[str, Any], text: str) -> None:
    """A name that is none, a buffer's, a value that does not fit: UsageError names it, and nothing was submitted."""
    async with rig(device_label) as r:
        word = r.word(1)
        bound = bind(r, add, word, 2)
        await r.off.drain()
        with pytest.raises(ao.UsageError, match=text):
            bound(**change)
        assert word.allocation.history.conflicts(True) == []
        with pytest.raises(TypeError, match="bound add"):
            bound(3)  # type: ignore[call-arg]
        await bound()
        assert await r.read(word) == 3


async def test_a_buffer_does_not_change(device_label: str) -> None:
    """Not even for another buffer: the error says what may change, also where nothing may."""
    async with rig(device_label) as r:
        x, y = r.word(1), r.word(2)
        with pytest.raises(ao.UsageError, match="only n, not x"):
            bind(r, add, x, 2)(x=y)
        with pytest.raises(ao.UsageError, match="nothing, not y"):
            bind(r, combine, x, y)(y=x)


async def test_parameters_named_like_the_options() -> None:
    """``lane`` and ``after`` are the call's own, whatever the kernel's parameters are called."""
    seen = []

    @ao.kernel
    def body(launch: Any, lane: np.int64, after: np.int64, n: np.int64) -> None:
        seen.append((int(lane), int(after), int(n)))

    async with rig(lanes=2) as r:
        await r.off.load(body)
        bound = bind(r, body, 1, 2, 3)
        assert (await bound(lane=r.off.lanes[1], n=4)) is None
        with pytest.raises(ao.UsageError, match="lane"):
            bound(**{"".join(["la", "ne"]): 7})
        assert seen == [(1, 2, 4)]


async def test_bad_bindings(device_label: str) -> None:
    """What ``off.launch`` refuses is refused when it is bound, and a kernel that is not loaded."""
    async with rig(device_label) as r, rig(device_label) as other:
        word, theirs, closed = r.word(1), other.word(1), r.word(1)
        closed.close()
        bad: list[Callable[[], Any]] = [
            lambda: bind(r, add, word),
            lambda: bind(r, add, word, 1.5),
            lambda: bind(r, add, 1, 1),
            lambda: bind(r, add, theirs, 1),
            lambda: bind(r, add, closed, 1),
            lambda: bind(r, add.name, word, 1),  # type: ignore[arg-type]
            lambda: bind(r, add, word, 1, shared_bytes=2**40),
            lambda: bind(r, add, word, 1, shared_bytes="1"),
            lambda: r.off.bind(add, grid=0, block=1, args=(word, 1)),
            lambda: r.off.bind(add, grid=1, block=1, args=[word, 1]),  # type: ignore[arg-type]
        ]
        for call in bad:
            with pytest.raises(ao.UsageError):
                call()
        with pytest.raises(ao.UsageError, match=r"await off\.load\(unknown\)"):
            bind(r, ao.Kernel("unknown", host=add.host_function, cuda=add.cuda_source), word, 1)
        assert r.off.stats()["pending"] == 0


async def test_kernels_that_call_are_not_bound(device_label: str) -> None:
    """They have lanes and a context of their own for each launch: UsageError, loaded or not."""
    async with calling_rig(device_label) as r:
        arguments = (1, r.array(1), r.array(2, "i4"))
        for _ in range(2):
            with pytest.raises(ao.UsageError, match=r"off\.launch"):
                bind(r, ask, *arguments)
            await r.off.load(ask)


@pytest.mark.parametrize("grid", [(3, 2), [4, 1, 1], np.int64(2)], ids=str)
async def test_any_geometry(device_label: str, grid: Any) -> None:
    """Whatever is a grid for a launch is one here, the long way too."""
    async with rig(device_label) as r:
        word = r.word(1)
        bound = r.off.bind(scale_add, grid=grid, block=[1], args=(word, 1, 0))  # type: ignore[arg-type]
        await bound()
        await bound(after=[bound()])
        assert await r.read(word) == 1


async def test_a_closed_buffer(device_label: str) -> None:
    """Closing one frees its memory although it is bound, and calls raise ClosedError."""
    async with rig(device_label) as r:
        assert r.off._engine is not None
        word = r.word(1)
        bound = bind(r, add, word, 2)
        await bound()
        live = r.off._engine.memory.live
        word.close()
        await until(lambda: r.off._engine.memory.live == live - 1)  # type: ignore[union-attr]
        for call in (bound, lambda: bound(n=3), lambda: bound(lane=r.off.lanes[0])):
            with pytest.raises(ao.ClosedError, match="buffer"):
                call()


async def test_arguments_are_held(device_label: str) -> None:
    """The bound launch holds them, and an operation their memory, when both are dropped while it runs."""
    async with rig(device_label) as r:
        assert r.off._engine is not None
        word, gate = r.word(1), r.gate()
        bound = bind(r, hold_write, gate.address, word, 7)
        watched = weakref.ref(word)
        del word
        gc.collect()
        assert watched() is not None
        operation, live = bound(), r.off._engine.memory.live
        del bound
        gc.collect()
        assert r.off._engine.memory.live == live
        gate.open()
        await operation
        del operation
        gc.collect()
        await until(lambda: watched() is None)
        await until(lambda: r.off._engine.memory.live == live - 1)  # type: ignore[union-attr]


@pytest.mark.parametrize("end", ["aclose", "terminate"])
async def test_after_the_end(end: str) -> None:
    """An Offload that is over refuses a bound call as it refuses a launch."""
    async with rig(bury=True) as r:
        word = r.word(1)
        bound = bind(r, add, word, 2)
        await bound()
        if end == "aclose":
            await r.off.aclose()
        else:
            r.off.terminate()
        for call in (bound, lambda: bound(n=1), lambda: bind(r, add, word, 2), lambda: r.launch(add, word, 2)):
            with pytest.raises(ao.ClosedError):
                call()


async def test_after_a_loss() -> None:
    """A call that finds the device gone fails like a launch; later ones raise DeviceLostError."""
    device = SpyDevice()
    async with rig(device, bury=True) as r:
        word = r.word(1)
        bound = bind(r, add, word, 2)
        await bound()
        device.lost = True
        operation = bound()
        with pytest.raises(ao.DeviceLostError):
            await operation
        for call in (bound, lambda: bound(n=1), lambda: bind(r, add, word, 2)):
            with pytest.raises(ao.DeviceLostError):
                call()


async def test_from_elsewhere() -> None:
    """Another thread gets the UsageError of a launch, and nothing is submitted."""
    async with rig() as r:
        word = r.word(1)
        bound = bind(r, add, word, 2)
        await r.off.drain()
        errors: list[BaseException] = []

        def call() -> None:
            try:
                bound()
            except ao.UsageError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert "loop" in str(errors[0])
        assert await r.read(word) == 1


async def test_refused_by_the_driver() -> None:
    """A call that the driver refuses fails alone, and what came before it still comes before what follows."""
    device = SpyDevice()
    async with rig(device, lanes=3) as r:
        word, gate = r.word(1), r.gate()
        await r.off.drain()
        bound = bind(r, add, word, 1)
        r.launch(hold_write, gate.address, word, 10)
        device.failures["enqueue_kernel"] = ao.LaunchError("too many registers")
        refused = bound()
        device.failures.clear()
        following = [bound(), bound(lane=r.off.lanes[2])]
        gate.open()
        with pytest.raises(ao.LaunchError, match="registers"):
            await refused
        await asyncio.gather(*(operation.wait() for operation in following))
        assert await r.read(word) == 12


async def test_queued_on_the_host(device_label: str) -> None:
    """What a lane cannot take waits on the host, in order, up to max_pending; then it raises WouldBlock."""
    async with rig(device_label, lanes=1, lane_depth=2, max_pending=20) as r:
        word = r.word(1)
        await r.off.drain()
        bound, gate = bind(r, scale_add, word, 2, 0), await r.hold()
        operations = [bound(b=number) for number in range(21)]
        with pytest.raises(ao.WouldBlock):
            bound()
        assert r.off.stats()["pending"] == 20
        gate.open()
        await operations[-1]
        expected = 1
        for number in range(21):
            expected = expected * 2 + number
        assert await r.read(word) == expected


async def test_explicit_ordering(device_label: str) -> None:
    """Without program order calls on one buffer go to any lane, unless ``after`` orders them."""
    async with rig(device_label, lanes=3, ordering="explicit") as r:
        word = r.word(1)
        await r.off.drain()
        bound = bind(r, add, word, 0)
        gate = await r.hold(r.off.lanes[0])
        lanes = {bound().lane.index for _ in range(6)}
        assert len(lanes) > 1
        assert word.allocation.history.conflicts(True) == []
        gate.open()


async def test_shared_memory_is_new_for_each_launch() -> None:
    """On the host device, too, no launch sees what another left in its shared memory."""
    seen = []

    @ao.kernel
    def body(launch: Any) -> None:
        seen.append((launch.shared.size, int(launch.shared.sum())))
        launch.shared[:] = 1

    async with rig() as r:
        await r.off.load(body)
        bound = bind(r, body, shared_bytes=64)
        for _ in range(3):
            await bound()
        assert seen == [(64, 0)] * 3


async def test_in_a_host_function(device_label: str) -> None:
    """It may launch a bound kernel, but not behind the launch that waits for it."""
    async with calling_rig(device_label) as r:
        await r.off.load(ask, add)
        word, value, report = r.word(1), r.array(1), r.array(2, "i4")
        free, taken = bind(r, add, word, 1), bind(r, add, value.view(np.uint64), 1)

        @r.off.host_function
        async def f(x: int) -> int:
            with pytest.raises(ao.UsageError, match="share a buffer"):
                taken()
            await free()
            return x

        await end_of(r.launch(ask, 5, value, report))
        assert await r.read(word) == 2
        assert (await r.off.get(value))[0] == 5


async def test_unannotated_kernels(device_label: str) -> None:
    """Arguments of their own types are packed once as well; a change keeps its parameter's name and checks."""

    def body(launch: Any, x: Any, n: Any) -> None:
        x[0] += n

    body.__annotations__ = {}
    async with rig(device_label) as r:
        kernel = ao.Kernel("add", cuda=add.cuda_source, host=body)
        await r.off.load(kernel)
        word = r.word(1)
        bound = bind(r, kernel, word, np.uint64(2))
        bound()
        bound(n=np.uint64(5))
        with pytest.raises(ao.UsageError, match="NumPy"):
            bound(n=5)
        assert await r.read(word) == 8


@pytest.mark.all_loops
async def test_many_tasks(device_label: str) -> None:
    """Hundreds of tasks that each await one bound launch in a loop all come to their end."""
    async with rig(device_label) as r:
        word = r.word(0)
        counts, empties = bind(r, add, word, 1), bind(r, nothing)

        async def worker(bound: ao.BoundLaunch) -> None:
            for _ in range(5):
                await bound()

        await asyncio.gather(*(worker(counts if number % 4 else empties) for number in range(200)))
        assert await r.read(word) == 150 * 5
