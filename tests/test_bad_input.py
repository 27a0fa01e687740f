"""Bad input: each kind raises what it should, says what to do, and leaves the Offload usable."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.host import HostDevice
from tests.kernels import Boom, Rig, add, fail, nothing, rig, saxpy, until

ROOT = Path(__file__).parents[1]


@pytest.fixture
async def usable(device_label: str) -> AsyncIterator[Rig]:
    """An Offload that has to be usable when the test is through with it."""
    async with rig(device_label, lanes=2) as r:
        yield r
        await works(r)


async def works(r: Rig) -> None:
    """Launch on every lane and get the right result."""
    word = r.word(1)
    for lane in r.off.lanes:
        r.launch(add, word, 1, lane=lane)
    assert await r.read(word) == 1 + len(r.off.lanes)


@pytest.mark.parametrize("label", ["gpu", "cuda:", "cuda:x", "cuda:-1", "host:1", "", "cuda:0:0", "rocm:0"])
async def test_unknown_device(label: str) -> None:
    """A label that names no device raises UsageError or DeviceUnavailableError, and the next Offload opens."""
    off = ao.Offload(label)
    with pytest.raises((ao.UsageError, ao.DeviceUnavailableError)):
        await off.__aenter__()
    await off.aclose()
    async with rig() as r:
        await works(r)


@pytest.mark.gpu
async def test_device_beyond_the_last() -> None:
    """The number of a GPU that is not there raises DeviceUnavailableError."""
    with pytest.raises(ao.DeviceUnavailableError):
        await ao.Offload("cuda:99").__aenter__()


NO_DRIVER = """
import asyncio, ctypes
load = ctypes.CDLL
def refuse(name, *args, **options):
    if name and "libcuda" in str(name):
        raise OSError(f"{name}: cannot open shared object file")
    return load(name, *args, **options)
ctypes.CDLL = refuse
import numpy as np, aiooffload as ao
async def main():
    try:
        await ao.Offload("cuda:0").__aenter__()
    except ao.DeviceUnavailableError as error:
        print(error)
    async with ao.Offload("auto") as off:
        print("auto is", off.properties.label, (await off.get(await off.put([3])))[0])
asyncio.run(main())
"""


def test_no_driver() -> None:
    """Without a driver "cuda:0" raises DeviceUnavailableError that says what to install, and "auto" is the host."""
    done = subprocess.run(
        [sys.executable, "-c", NO_DRIVER], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.strip().splitlines()
    assert "driver" in first.lower()
    assert "install" in first.lower()
    assert second == "auto is host 3"


@pytest.mark.parametrize("grid", [0, -1, (1, 0), (1, 1, 2**16), 2**31, (1, 1, 1, 1), (), 1.5, "x", None])
async def test_bad_grid(usable: Rig, grid: Any) -> None:
    """A grid of 0, beyond the device's limits or of another kind raises UsageError."""
    for kernel in (nothing, ao.Kernel("nothing", host=nothing.host_function, cuda=nothing.cuda_source)):
        with pytest.raises(ao.UsageError, match="grid"):
            usable.off.launch(kernel, grid=grid, block=1)


@pytest.mark.parametrize("block", [0, -1, (0, 1), 1025, (32, 64), (1, 1, 65), (1, 1, 1, 1), (), 1.5, "x", None])
async def test_bad_block(usable: Rig, block: Any) -> None:
    """A block of 0, beyond the device's limits or of another kind raises UsageError."""
    with pytest.raises(ao.UsageError, match="block"):
        usable.off.launch(nothing, grid=1, block=block)


@pytest.mark.parametrize("shared_bytes", [-1, 2**20, 2**40])
async def test_bad_shared_memory(usable: Rig, shared_bytes: int) -> None:
    """More shared memory than a block can get raises UsageError."""
    with pytest.raises(ao.UsageError, match="shared_bytes"):
        usable.off.launch(nothing, grid=1, block=1, shared_bytes=shared_bytes)


async def test_wrong_argument_count(usable: Rig) -> None:
    """Too few or too many arguments raise UsageError with both numbers, remembered geometry or not."""
    word = usable.word()
    for args in ((), (word,), (word, 1, 2)):
        with pytest.raises(ao.UsageError, match=f"{len(args)} were given"):
            usable.launch(add, *args)
    with pytest.raises(ao.UsageError, match="1 were given"):
        usable.launch(nothing, 1)


@pytest.mark.gpu
async def test_wrong_argument_size() -> None:
    """Without annotations an argument of the wrong size raises UsageError."""
    async with rig("cuda:0") as r:
        bare = ao.Kernel("add", cuda=add.cuda_source)
        await r.off.load(bare)
        with pytest.raises(ao.UsageError):
            r.launch(bare, r.word(), np.uint32(1))
        await works(r)


async def test_wrong_dtype(usable: Rig) -> None:
    """A buffer or scalar of another dtype than annotated raises UsageError that names both."""
    x = usable.off.zeros(4, np.float64)
    y = usable.off.zeros(4, np.float32)
    with pytest.raises(ao.UsageError, match=r"float64.*float32"):
        usable.launch(saxpy, 1.0, x, y, 4)
    with pytest.raises(ao.UsageError, match=r"int64.*int32"):
        usable.launch(saxpy, 1.0, y, y, np.int64(4))
    with pytest.raises(ao.UsageError, match="Buffer"):
        usable.launch(saxpy, 1.0, np.zeros(4, np.float32), y, 4)


async def test_strides_that_no_copy_has(usable: Rig) -> None:
    """Arrays that run backwards, are broadcast or written twice raise UsageError that says what to do instead."""
    off = usable.off
    backwards, broadcast = np.zeros(4, np.float32)[::-1], np.broadcast_to(np.float32(1), 4)
    twice = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (4,), (2,))
    buffer = off.zeros(4, np.float32)
    sources: tuple[Callable[[], object], ...] = (
        lambda: off.put(backwards),
        lambda: off.put(broadcast),
        lambda: off.copy(buffer, backwards),
        lambda: off.copy(buffer, broadcast),
        lambda: off.copy(buffer, broadcast, 2),
    )
    targets: tuple[Callable[[], object], ...] = (
        lambda: off.get(buffer, out=backwards),
        lambda: off.get(buffer, out=twice),
        lambda: off.copy(backwards, buffer),
        lambda: off.copy(backwards, buffer, (3,)),
        lambda: off.copy(twice, buffer),
    )
    for submits, remedy in ((sources, r"pass np\.ascontiguousarray\(source\)"), (targets, "contiguous array first")):
        for submit in submits:
            with pytest.raises(ao.UsageError, match=remedy):
                submit()
    with pytest.raises(ao.UsageError, match="step above 0"):
        buffer[::-1]
    assert (await off.get(buffer)).tolist() == [0] * 4


async def test_shapes_that_do_not_fit(usable: Rig) -> None:
    """Shapes and item sizes that differ, and extents that leave an array, raise UsageError and submit nothing."""
    off = usable.off
    a, b = off.zeros((6, 8), np.float32), off.zeros((6, 8), np.float32)
    host = np.zeros((6, 8), np.float32)
    before = off.stats()["submitted"]
    cases: tuple[tuple[Callable[[], object], str], ...] = (
        (lambda: off.copy(a[:, :4], b), r"shape \(6, 8\), the destination \(6, 4\).*extent"),
        (lambda: off.copy(a[:, :4], host[:, :6]), "shape"),
        (lambda: off.copy(host[:, :4], a[:, :6]), "shape"),
        (lambda: off.copy(a[::2], b[::3]), "shape"),
        (lambda: off.copy(a[:, :4], np.zeros((6, 4), np.float64)), "item size"),
        (lambda: off.copy(a, b.view(np.uint16), (6, 8)), "item size"),
        (lambda: off.copy(a, b, (7, 8)), "leaves"),
        (lambda: off.copy(a, b[:, 1:], (6, 8)), "leaves"),
        (lambda: off.copy(a, b, (6, -1)), "leaves"),
        (lambda: off.copy(a, b, (48,)), "dimensions"),
        (lambda: off.copy(a, b, 6), "dimensions"),
        (lambda: off.copy(a, b, ("6", 8)), "integer"),
        (lambda: off.copy(a, b, 2.5), "integer"),
        (lambda: off.copy(a[:3], a[2:5]), "overlap"),
        (lambda: off.copy(a[:, :4], a[:, 4:]), "overlap"),
        (lambda: off.copy(a, a, (2, 2)), "overlap"),
    )
    for submit, message in cases:
        with pytest.raises(ao.UsageError, match=message):
            submit()
    assert off.stats()["submitted"] == before


async def test_closed_buffer(usable: Rig) -> None:
    """A closed buffer raises ClosedError wherever it is passed."""
    word, other = usable.word(), usable.word()
    word.close()
    submits: tuple[Callable[[], object], ...] = (
        lambda: usable.launch(add, word, 1),
        lambda: usable.off.get(word),
        lambda: usable.off.fill(word, 1),
        lambda: usable.off.copy(word, other),
        lambda: usable.off.copy(other, word),
        lambda: word[0],
    )
    for submit in submits:
        with pytest.raises(ao.ClosedError):
            submit()


async def test_copy_out_of_range(usable: Rig) -> None:
    """A copy between sizes that differ, or between overlapping slices, raises UsageError; so does a bad row."""
    a, b = usable.off.zeros(4, np.uint8), usable.off.zeros(5, np.uint8)
    submits: tuple[Callable[[], object], ...] = (
        lambda: usable.off.copy(a, b),
        lambda: usable.off.copy(a, np.zeros(5, np.uint8)),
        lambda: usable.off.copy(np.zeros(3, np.uint8), a),
        lambda: usable.off.copy(b[1:], b[:4]),
    )
    for submit in submits:
        with pytest.raises(ao.UsageError):
            submit()
    with pytest.raises(IndexError):
        a[4]


@pytest.mark.gpu
async def test_kernel_name_not_in_the_module() -> None:
    """A name that the source does not define fails with CompileError that names it."""
    async with rig("cuda:0") as r:
        with pytest.raises(ao.CompileError, match="absent"):
            await r.launch(ao.Kernel("absent", cuda=nothing.cuda_source))
        await works(r)


@pytest.mark.gpu
async def test_source_that_does_not_compile() -> None:
    """Source that does not compile fails with CompileError, and the compiler's log is in it."""
    async with rig("cuda:0") as r:
        kernel = ao.Kernel("k", cuda='extern "C" __global__ void k() { nonsense; /* DOES NOT COMPILE */ }')
        with pytest.raises(ao.CompileError) as caught:
            await r.off.load(kernel)
        assert "nonsense" in caught.value.log
        await works(r)


async def test_use_after_close(device_label: str) -> None:
    """After aclose() every use raises ClosedError, and a new Offload works."""
    async with rig(device_label) as r:
        word = r.word()
    uses: tuple[Callable[[], object], ...] = (
        lambda: r.launch(nothing),
        lambda: r.launch(add, word, 1),
        lambda: r.off.put([1]),
        lambda: r.off.get(word),
        lambda: r.off.fill(word, 1),
        lambda: r.off.empty(1, np.uint8),
        lambda: r.off.zeros(1, np.uint8),
    )
    for use in uses:
        with pytest.raises(ao.ClosedError):
            use()
    for coroutine in (r.off.load(nothing), r.off.pinned(1, np.uint8)):
        with pytest.raises(ao.ClosedError):
            await coroutine
    await r.off.aclose()
    async with rig(device_label) as again:
        await works(again)


USES: dict[str, Callable[[Rig, ao.Buffer], object]] = {
    "launch": lambda r, word: r.launch(nothing),
    "launch with a buffer": lambda r, word: r.launch(add, word, 1),
    "put": lambda r, word: r.off.put([1]),
    "get": lambda r, word: r.off.get(word),
    "fill": lambda r, word: r.off.fill(word, 1),
    "empty": lambda r, word: r.off.empty(1, np.uint8),
    "stats": lambda r, word: r.off.stats(),
    "lanes": lambda r, word: r.off.lanes,
    "terminate": lambda r, word: r.off.terminate(),
}


@pytest.mark.parametrize("use", USES)
async def test_use_from_another_thread(usable: Rig, use: str) -> None:
    """Another thread, with a loop of its own or none, gets UsageError that names run_coroutine_threadsafe."""
    word, errors = usable.word(), []

    async def there() -> None:
        USES[use](usable, word)

    def body() -> None:
        for call in (lambda: USES[use](usable, word), lambda: asyncio.run(there())):
            try:
                call()
            except ao.UsageError as error:
                errors.append(str(error))

    thread = threading.Thread(target=body)
    thread.start()
    await until(lambda: not thread.is_alive())
    assert len(errors) == 2
    assert all("run_coroutine_threadsafe" in text for text in errors)


@pytest.mark.parametrize("use", ["drain", "room", "load", "pinned", "aclose"])
def test_use_from_another_loop(use: str) -> None:
    """Another loop of the same thread gets UsageError that names run_coroutine_threadsafe."""
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    context = rig("host")
    r = first.run_until_complete(context.__aenter__())

    async def there() -> None:
        call = {
            "drain": r.off.drain,
            "room": r.off.room,
            "load": lambda: r.off.load(nothing),
            "pinned": lambda: r.off.pinned(1, np.uint8),
            "aclose": r.off.aclose,
        }[use]
        with pytest.raises(ao.UsageError, match="run_coroutine_threadsafe"):
            await call()

    try:
        second.run_until_complete(there())
        first.run_until_complete(works(r))
    finally:
        first.run_until_complete(context.__aexit__(None, None, None))
        first.close()
        second.close()


@pytest.mark.allows_blocking("the parent waits for its child")
@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
async def test_use_after_fork(usable: Rig) -> None:
    """A forked child gets UsageError that says to open a new one; the parent goes on."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            usable.launch(nothing)
        except ao.UsageError as error:
            code = 0 if "child" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0  # noqa: ASYNC222


async def test_out_of_memory() -> None:
    """A full device raises OutOfMemoryError, also a MemoryError, and the next small allocation works."""
    async with rig(HostDevice(memory_limit=1 << 20), lanes=2) as r:
        with pytest.raises(MemoryError) as caught:
            r.off.empty(2 << 20, np.uint8)
        assert isinstance(caught.value, ao.OutOfMemoryError)
        with pytest.raises(ao.OutOfMemoryError):
            r.off.put(np.zeros(2 << 20, np.uint8))
        await works(r)


async def test_host_kernel_that_raises() -> None:
    """It fails with LaunchError, its exception with traceback is the cause, and other lanes go on."""
    async with rig(lanes=2) as r:
        op = r.launch(fail)
        await works(r)
        with pytest.raises(ao.LaunchError) as caught:
            await op
        cause = caught.value.__cause__
        assert isinstance(cause, Boom)
        assert cause.__traceback__ is not None
        assert "fail" in str(caught.value)


def test_exit_without_aclose() -> None:
    """A program that ends without aclose() does not hang and gives a ResourceWarning."""
    source = """
import asyncio, numpy as np, aiooffload as ao
async def main():
    off = ao.Offload("host")
    await off.__aenter__()
    print((await off.get(await off.put([5])))[0])
asyncio.run(main())
"""
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "5")
    assert "ResourceWarning" in done.stderr
    assert "aclose" in done.stderr


async def test_what_is_no_buffer_yet(usable: Rig) -> None:
    """An operation or an array in place of a Buffer raises UsageError that says how to make one of it."""
    put = usable.off.put(np.zeros(1, np.uint64))
    with pytest.raises(ao.UsageError, match="not Operation: await it first"):
        usable.launch(add, put, 1)
    with pytest.raises(ao.UsageError, match="not Operation: await it first"):
        usable.off.get(put)  # type: ignore[arg-type]
    with pytest.raises(ao.UsageError, match=r"await off\.put"):
        usable.launch(add, np.zeros(1, np.uint64), 1)
    await put


async def test_buffer_is_no_array(usable: Rig) -> None:
    """``np.asarray(buffer)`` raises UsageError that says how to get the array, in place of an array of Buffers."""
    word = usable.word()
    for use in (np.asarray, np.array, lambda buffer: np.add(buffer, 1), usable.off.put):
        with pytest.raises(ao.UsageError, match=r"await off\.get"):
            use(word)


async def test_after_a_single_one_or_none(usable: Rig, loop_errors: list[dict[str, Any]]) -> None:
    """``after=`` takes one awaitable in place of several, and leaves it to others; what is none raises UsageError."""
    loop = asyncio.get_running_loop()
    future, failed = loop.create_future(), loop.create_future()
    word = usable.word()
    ops = [usable.off.get(word, after=one) for one in (future, loop.create_task(asyncio.sleep(0)), asyncio.sleep(0))]
    waiting = usable.off.get(word, after=failed)

    async def ask() -> int:
        return int(await future)

    somebody = loop.create_task(ask())
    await asyncio.sleep(0)
    assert not ops[0].done()
    future.set_result(5)
    failed.set_exception(KeyError("no"))
    assert await somebody == 5
    await asyncio.gather(*(op.wait() for op in ops))
    with pytest.raises(ao.DependencyError):
        await waiting
    for wrong in (None, 5, [None], "ab"):
        with pytest.raises(ao.UsageError, match="after takes"):
            usable.off.get(word, after=wrong)  # type: ignore[arg-type]  # that is the point
    assert loop_errors == []


async def test_coroutine_that_was_called(usable: Rig) -> None:
    """A host task is given the function, and a gate what it makes; the error names the other."""

    async def nothing() -> None: ...

    called = nothing()
    with pytest.raises(ao.UsageError, match="without calling it"):
        usable.off.host_task(called)  # type: ignore[arg-type]
    called.close()
    with pytest.raises(ao.UsageError, match="a gate is opened by an awaitable"):
        usable.off.gate(nothing, lane=usable.off.lanes[0])  # type: ignore[arg-type]


async def test_coarse_is_any_truth(usable: Rig) -> None:
    """``coarse=1`` is as good as True."""
    word = usable.word()
    await usable.off.launch(add, grid=1, block=1, args=(word, 2), coarse=1)  # type: ignore[arg-type]
    assert await usable.read(word) == 2
