"""What the host device alone does: Python kernels, its options, the context lock, threads, exit and forks."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import select
import subprocess
import sys
import textwrap
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiooffload._native import HostContext, HostEvent, HostStream, LaunchPlan, Operation, Word
from aiooffload.drivers.host import HostDevice, device_count, open_device
from aiooffload.drivers.host.function import HostFunction, HostLaunch
from aiooffload.errors import ClosedError, DeviceUnavailableError, DriverError, OutOfMemoryError, UsageError
from tests.drivers.support import DEADLINE_S, STORE, Kernel, Lane, Rig, give_way, load_all, open_rig, until

ROOT = Path(__file__).parents[3]


@contextmanager
def host_rig(**options: Any) -> Iterator[Rig]:
    device = open_device(0, **options)
    with open_rig(device, load_all(device)) as rig:
        yield rig
    device.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    with host_rig() as made:
        yield made


def run(rig: Rig, lane: Lane, body: Callable[..., object], *arguments: Any) -> Operation:
    """Launch a Python function as a kernel; it gets no HostLaunch unless it is among the arguments."""
    operation = Operation(rig.loop)
    plan = LaunchPlan("body", 0, body, (1, 1, 1), (1, 1, 1), 0, None, False)
    lane.stream.enqueue_kernel(plan, arguments, operation, lane.next_sequence())
    return operation


@contextmanager
def thread(body: Callable[[], object]) -> Iterator[threading.Thread]:
    """Run ``body`` on a thread that has ended when the block has."""
    started = threading.Thread(target=body, daemon=True)
    started.start()
    yield started
    started.join(DEADLINE_S)
    assert not started.is_alive(), "the thread does not end"


def poll_keeping_interpreter(descriptor: int, timeout_s: float = DEADLINE_S) -> bool:
    """Whether the eventfd becomes readable while this thread holds the interpreter all the time."""
    entry = (ctypes.c_uint64 * 1)(descriptor | select.POLLIN << 32)  # struct pollfd
    return bool(ctypes.PyDLL(None).poll(entry, 1, int(timeout_s * 1000)) == 1)


@contextmanager
def interpreter_kept() -> Iterator[None]:
    """Let no other thread ask for the interpreter, so that it changes hands at blocking calls only."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


# Opening


def test_there_is_one_host_device() -> None:
    """Any index but 0 is refused with what exists."""
    assert device_count() == 1
    for index in (1, -1):
        with pytest.raises(DeviceUnavailableError, match="only one is 0"):
            open_device(index)


def test_properties_are_a_gpus_limits() -> None:
    """A geometry that is legal here is legal on a GPU."""
    device = open_device()
    properties = device.properties
    assert (properties.driver, properties.label, properties.compute_capability) == ("host", "host", (0, 0))
    assert (properties.max_threads_per_block, properties.max_block) == (1024, (1024, 1024, 64))
    assert (properties.max_grid, properties.max_shared_bytes) == ((2**31 - 1, 65535, 65535), 227 * 1024)
    assert (properties.memory_operations, properties.spins, properties.process_wide_faults) == (True, False, False)
    assert properties.unique_id == open_device().properties.unique_id
    device.close()


# Kernels


def test_launch_shows_the_geometry() -> None:
    """A kernel's first argument has the grid, the block and zeroed shared memory of the launch's own."""
    function = HostFunction("k", lambda launch: None)
    plan = function.plan((3, 2, 1), (64, 1, 1), 48, None, False)
    (launch,) = function.prepare(plan, [])
    assert isinstance(launch, HostLaunch)
    assert (launch.grid, launch.block) == ((3, 2, 1), (64, 1, 1))
    assert launch.shared.shape == (48,)
    assert launch.shared.dtype == np.uint8
    launch.shared[:] = 1
    assert launch.shared.all()
    assert not function.prepare(plan, [])[0].shared.any()


def test_arguments_become_views_and_scalars() -> None:
    """Buffers are passed as views, read-only as the signature says; NumPy scalars pass through."""

    class FakeBuffer:
        def host_view(self, read_only: bool) -> str:
            return "read-only" if read_only else "writable"

    class FakeSignature:
        def read_only(self, index: int) -> bool:
            return index == 2

    function = HostFunction("k", print, FakeSignature())
    plan = function.plan((1, 1, 1), (1, 1, 1), 0, None, False)
    number = np.float32(2.5)
    _, *arguments = function.prepare(plan, [FakeBuffer(), number, FakeBuffer()])
    assert arguments == ["writable", number, "read-only"]
    assert arguments[1] is number
    assert HostFunction("k", print).prepare(plan, [FakeBuffer()])[1] == "writable"


def test_load_reads_the_signature() -> None:
    """A kernel that declares an argument as read-only gets it so."""
    device = open_device()
    asked: list[bool] = []

    class FakeBuffer:
        def host_view(self, read_only: bool) -> None:
            asked.append(read_only)

    class Declared(Kernel):
        @property
        def signature(self) -> Any:
            return type("S", (), {"read_only": staticmethod(lambda index: index == 0)})

    kernel = Declared("k", None, print)
    function = device.load(kernel, device.compile(kernel))
    function.prepare(function.plan((1, 1, 1), (1, 1, 1), 0, None, False), [FakeBuffer(), FakeBuffer()])
    assert asked == [True, False]
    device.close()


def test_kernel_for_a_gpu_only_says_what_to_add() -> None:
    """A kernel with CUDA source alone is a usage error here."""
    device = open_device()
    with pytest.raises(UsageError, match=r"'gpu_only' has no host implementation.*@kernel"):
        device.compile(Kernel("gpu_only", "__global__ ..."))
    device.close()


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, BaseException])
def test_exception_becomes_the_failure(rig: Rig, kind: type[BaseException]) -> None:
    """Whatever a kernel raises is in ``failure`` before the mark; the stream goes on."""
    lane, word = rig.lane(), rig.word()

    def body() -> None:
        raise kind("on purpose")

    operation = run(rig, lane, body)
    until(lane.done, "the failed kernel's mark arrives")
    failure = operation.failure
    assert type(failure) is kind
    assert failure.args == ("on purpose",)
    assert [entry.name for entry in traceback.extract_tb(failure.__traceback__)] == ["body"]
    rig.launch(lane, STORE, word, 3)
    until(lane.done, "the next kernel completes")
    assert word.load() == 3


def test_wrong_arguments_become_the_failure(rig: Rig) -> None:
    """A kernel that cannot even be called fails its launch."""
    lane = rig.lane()
    operation = run(rig, lane, lambda: None, 1, 2)
    until(lane.done, "the failed kernel's mark arrives")
    assert isinstance(operation.failure, TypeError)


def test_failure_of_a_finished_operation_is_dropped(rig: Rig) -> None:
    """An outcome is final: a kernel that raises after its operation was finished changes nothing."""
    lane, gate = rig.lane(), rig.word()
    lane.stream.enqueue_wait(gate, 1)
    operation = run(rig, lane, lambda: 1 // 0)
    operation.finish("early")
    gate.store(1)
    until(lane.done, "the kernel's mark arrives")
    assert operation.outcome() == "early"


def test_references_are_gone_with_the_mark(rig: Rig) -> None:
    """Whoever sees the mark finds that the stream holds nothing of the launch any more."""

    class Argument:
        pass

    lane = rig.lane()
    for body in (lambda _: None, lambda _: 1 // 0):
        argument = Argument()
        alive = weakref.ref(argument)
        operation = run(rig, lane, body, argument)
        del argument
        until(lane.done, "the mark arrives")
        operation.failure = None  # its traceback has the arguments
        assert alive() is None
        assert sys.getrefcount(operation) == 2


def test_word_references_go_with_the_next_call(rig: Rig) -> None:
    """A word that a stream waited for or wrote is let go at the next call, or by maintenance."""
    lane, word = rig.lane(), rig.word()
    count = sys.getrefcount(word)
    lane.stream.enqueue_wait(word, 1)
    lane.stream.enqueue_write(word, 2)
    word.store(1)
    rig.finish(lane)
    assert lane.stream.query()
    assert sys.getrefcount(word) == count
    for _ in range(40):
        lane.stream.enqueue_write(word, 3)
    rig.device.selftest_function()
    assert sys.getrefcount(word) == count


def test_kernels_that_are_not_python_functions_share_the_interpreter(rig: Rig) -> None:
    """A long queue of kernels written in C does not keep other threads waiting to its end."""
    lane, gate, total = rig.lane(), rig.word(), 2000
    plan = HostFunction("sum", sum).plan((1, 1, 1), (1, 1, 1), 0, None, False)
    lane.stream.enqueue_wait(gate, 1)
    for _ in range(total):
        lane.stream.enqueue_kernel(plan, (range(10_000),), Operation(rig.loop), lane.next_sequence())
    gate.store(1)
    until(lambda: lane.slot.load() > 0, "the first kernel runs")
    assert lane.slot.load() < total


def test_work_without_kernels_needs_no_interpreter(rig: Rig) -> None:
    """Waits, copies, fills, writes, events and wakes go on while another thread keeps the interpreter."""
    first, second, gate, word = rig.lane(), rig.lane(), rig.word(), rig.word()
    source, target, box, event = rig.block(1 << 20), rig.block(1 << 20), rig.block(1 << 19), rig.event()
    descriptor = os.eventfd(0)
    first.stream.enqueue_wait(gate, 1)
    first.stream.enqueue_fill(source.address, b"\x11", 1 << 20)
    first.stream.enqueue_copy(target.address, source.address, 1 << 20)
    first.stream.enqueue_copy_box(box.address, target.address, 1 << 10, 16, 32, 1 << 10, 1 << 11, 1 << 14, 1 << 15)
    first.stream.enqueue_write(word, 1)
    first.stream.enqueue_record(event)
    rig.mark(first)
    second.stream.enqueue_wait_event(event)
    second.stream.enqueue_wait(word, 1)
    second.stream.enqueue_wake(descriptor)
    with interpreter_kept():
        gate.store(1)
        ready = poll_keeping_interpreter(descriptor)
    rig.finish(second)  # only then is the eventfd ours alone
    os.close(descriptor)
    assert ready
    assert target.host_array is not None
    assert (target.host_array == 0x11).all()
    assert box.host_array is not None
    assert (box.host_array == 0x11).all()


def test_overlapping_copy(rig: Rig) -> None:
    """A copy within one block is as if it went through a second one, whatever its size."""
    nbytes, shift = 1 << 20, 1000
    content = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    for source, target in ((0, shift), (shift, 0)):
        block, lane = rig.bytes_on_device(content), rig.lane()
        lane.stream.enqueue_copy(block.address + target, block.address + source, nbytes - shift)
        rig.finish(lane)
        got = rig.read(block.address, nbytes)
        assert np.array_equal(got[target : target + nbytes - shift], content[source : source + nbytes - shift])


def test_events_and_waits_order_a_random_graph(rig: Rig) -> None:
    """Kernels on many streams, tied by events and words at random, never run before what they follow."""
    chance = random.Random(7)
    lanes, events = [rig.lane() for _ in range(5)], [rig.event() for _ in range(4)]
    words: list[tuple[Word, int]] = []  # a word that is written, after which kernel
    last, recorded = [-1] * 5, [-1] * 4  # the last kernel per lane; the one before an event's last record
    follows = [set[int]() for _ in lanes]
    done, violations = set[int](), list[tuple[int, set[int]]]()

    def body(number: int, before: set[int]) -> None:
        if not before <= done:
            violations.append((number, before - done))
        done.add(number)

    for number in range(3000):
        i = chance.randrange(5)
        lane, choice = lanes[i], chance.random()
        if choice < 0.5:
            run(rig, lane, body, number, follows[i] - {-1})
            last[i], follows[i] = number, {number}
        elif choice < 0.65:
            e = chance.randrange(4)
            lane.stream.enqueue_record(events[e])
            recorded[e] = last[i]
        elif choice < 0.8:
            e = chance.randrange(4)
            lane.stream.enqueue_wait_event(events[e])
            follows[i] = follows[i] | {recorded[e]}
        elif choice < 0.9 or not words:
            words.append((rig.word(), last[i]))
            lane.stream.enqueue_write(words[-1][0], 1)
        else:
            word, after = chance.choice(words)
            lane.stream.enqueue_wait(word, 1)
            follows[i] = follows[i] | {after}
    for lane in lanes:
        rig.finish(lane)
    assert len(done) > 1000
    assert not violations


# The context lock


def test_launches_block_while_maintenance_waits(rig: Rig) -> None:
    """While a load waits for a held stream, launches of other threads block, as on a GPU; nothing else does."""
    held, lane, other = rig.lane(), rig.lane(), rig.lane()
    latch = rig.hold(held)
    stop = threading.Event()
    launched = [0]

    def launch() -> None:
        while not stop.is_set():
            rig.launch(lane, STORE, latch.opened, 0, marked=False)
            launched[0] += 1

    def stuck() -> bool:
        before = launched[0]
        give_way()
        return launched[0] == before > 0

    store, nothing = rig.functions[STORE.name], HostFunction("nothing", lambda *_: None)
    rig.functions[STORE.name] = nothing
    with thread(launch), thread(rig.device.selftest_function) as loading:
        until(stuck, "launches block")
        word, event = rig.word(), rig.event()
        other.stream.enqueue_fill(word.host_address, b"\x01", 4)
        other.stream.enqueue_copy(word.host_address + 4, word.host_address, 4)
        other.stream.enqueue_wait(word, 1)
        other.stream.enqueue_record(event)
        other.stream.enqueue_wait_event(event)
        rig.mark(other)
        until(other.done, "work that is not a kernel goes on")
        assert word.load() == 0x0101010101010101
        assert not lane.stream.query() or stuck()
        assert loading.is_alive()
        latch.open()
        before = launched[0]
        until(lambda: launched[0] > before, "launches go on")
        stop.set()
    rig.functions[STORE.name] = store


@pytest.mark.parametrize("what", ["load", "selftest", "unregister"])
def test_maintenance_waits_for_a_stream_blocked_in_a_wait(rig: Rig, what: str) -> None:
    """An armed wait holds up maintenance until it is released."""
    lane, gate, memory = rig.lane(), rig.word(), rig.device.register(1)
    calls: dict[str, Callable[[], object]] = {
        "load": lambda: rig.device.load(STORE, rig.device.compile(STORE)),
        "selftest": rig.device.selftest_function,
        "unregister": lambda: rig.device.unregister(memory),
    }
    lane.stream.enqueue_wait(gate, 1)
    with thread(calls[what]) as waiting:
        give_way()
        assert waiting.is_alive()
        gate.store(1)
    if what != "unregister":
        rig.device.unregister(memory)


def test_maintenance_of_one_device_leaves_another_alone(rig: Rig) -> None:
    """Each opened device has a context lock of its own."""
    with host_rig() as other:
        latch = rig.hold(rig.lane())
        with thread(rig.device.selftest_function) as waiting:
            other.device.selftest_function()
            other.round_trip()
            assert waiting.is_alive()
            latch.open()


# Memory


def test_memory_limit_is_kept() -> None:
    """Beyond the limit allocation fails, and succeeds again once something was freed."""
    device = open_device(memory_limit=1000)
    assert device.properties.total_bytes == 1000
    first = device.allocate(600)
    assert device.memory_info() == (400, 1000)
    with pytest.raises(OutOfMemoryError, match="600 bytes were asked for, 400 of 1000 are free"):
        device.allocate(600)
    device.free(first)
    assert device.memory_info() == (1000, 1000)
    device.free(device.allocate(1000))
    device.close()


def test_poison_marks_new_and_freed_memory() -> None:
    """With ``poison`` new memory is full of 0xCD and a view of freed memory of 0xDD."""
    device = open_device(poison=True)
    block = device.allocate(1000)
    view = block.host_array
    assert view is not None
    assert (view == 0xCD).all()
    device.free(block)
    assert (view == 0xDD).all()
    assert block.host_array is None
    device.close()


def test_without_poison_freed_memory_is_left_alone() -> None:
    """By default freeing costs no pass over the memory."""
    device = open_device()
    block = device.allocate(100)
    view = block.host_array
    assert view is not None
    view[:] = 7
    device.free(block)
    assert (view == 7).all()
    device.close()


def test_freeing_twice_is_refused() -> None:
    """A block can be freed once."""
    device = open_device()
    block = device.allocate(100)
    device.free(block)
    with pytest.raises(UsageError, match="freed already"):
        device.free(block)
    device.close()


def test_unregistering_twice_is_refused() -> None:
    """Registered memory can be given back once, to its own device; its array is gone then."""
    device, other = open_device(), open_device()
    memory = device.register(1)
    with pytest.raises(UsageError, match="not the host device's"):
        other.unregister(memory)
    device.unregister(memory)
    with pytest.raises(UsageError, match="unregistered already"):
        device.unregister(memory)
    with pytest.raises(ClosedError, match="unregistered"):
        _ = memory.array
    device.close()
    other.close()


def mapped(address: int) -> bool:
    """Whether something is mapped at an address of this process."""
    ranges = [line.split(maxsplit=1)[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def test_unregistered_memory_lives_as_long_as_its_words() -> None:
    """A word or a view that is still held keeps the memory mapped; the last one unmaps it."""
    device = open_device()
    memory = device.register(1 << 20)
    address, word, view = memory.host_address, memory.word(8), memory.array[:16]
    device.unregister(memory)
    word.store(5)
    assert view[8] == 5
    del view
    assert mapped(address)
    del word
    assert not mapped(address)
    device.close()


def test_too_much_registered_memory() -> None:
    """Memory that cannot be mapped raises OutOfMemoryError, and the device stays usable."""
    device = open_device()
    for nbytes in (1 << 60, 1 << 70):
        with pytest.raises(OutOfMemoryError):
            device.register(nbytes)
    device.unregister(device.register(1))
    device.close()


# Without memory operations


def test_streams_without_memory_operations_refuse_words(rig: Rig) -> None:
    """With ``memory_operations=False`` words and marks are refused; kernels, copies and events work."""
    device = open_device(memory_operations=False)
    assert not device.properties.memory_operations
    stream, event, memory = device.create_stream(), device.create_event(), device.register(8)
    word, function = memory.word(0), device.load(STORE, device.compile(STORE))
    stream.bind_marks(word, word)
    plan = function.plan((1, 1, 1), (1, 1, 1), 0, None, False)
    operation = Operation(rig.loop)
    prepared = function.prepare(plan, [np.uint64(word.device_address), np.uint64(4)])
    for call in (
        lambda: stream.enqueue_mark(1),
        lambda: stream.enqueue_write(word, 1),
        lambda: stream.enqueue_wait(word, 0),
        lambda: stream.enqueue_kernel(plan, prepared, operation, 1),
    ):
        with pytest.raises(DriverError, match="no stream memory operations"):
            call()
    stream.enqueue_kernel(plan, prepared, operation, 0)
    stream.enqueue_wait_event(event)
    stream.enqueue_copy(word.device_address + 4, word.device_address, 1)
    stream.enqueue_fill(word.device_address + 1, b"\x01", 1)
    stream.enqueue_copy_box(word.device_address + 5, word.device_address, 1, 2, 1, 2, 1, 4, 2)
    stream.enqueue_record(event)
    until(event.query, "the event is done")
    assert word.load() == 0x0100040400000104
    assert stream.handle > 0
    until(stream.query, "the stream gets idle")
    device.unregister(memory)
    stream.close()
    device.close()


# Streams, threads and the end


def stream_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("aiooffload-host-stream-")]


def test_closing_the_device_ends_its_threads() -> None:
    """Each stream is a daemon thread with its number in the name; closing the device joins them all."""
    device = open_device()
    streams = [device.create_stream() for _ in range(3)]
    names = {f"aiooffload-host-stream-{stream.handle}" for stream in streams}
    threads = [t for t in stream_threads() if t.name in names]
    assert len(threads) == 3
    assert all(t.daemon for t in threads)
    streams[0].close()
    streams[0].close()
    device.close()
    assert not any(t.is_alive() for t in threads)
    device.close()
    with pytest.raises(ClosedError):
        device.create_stream()


def test_closing_a_busy_device_warns() -> None:
    """A stream that does not end in time is named in a ResourceWarning and left to itself."""
    device = HostDevice()
    stream, memory = device.create_stream(), device.register(8)
    gate = memory.word(0)
    stream.enqueue_wait(gate, 1)
    with pytest.warns(ResourceWarning, match=f"still busy.*aiooffload-host-stream-{stream.handle}"):
        device.close(timeout_s=0.0)
    gate.store(1)
    device.close()
    assert not any(t.name.endswith(f"-{stream.handle}") for t in stream_threads())


def closed_stream() -> tuple[HostContext, HostStream, Word, np.ndarray[Any, Any]]:
    context, memory = HostContext(), np.zeros(8, np.uint64)
    word = Word(memory.ctypes.data, memory.ctypes.data, memory)
    stream = HostStream(context)
    stream.bind_marks(word, word)
    assert context.streams == 1
    stream.close()
    assert context.streams == 0
    return context, stream, word, memory


def test_closed_stream_refuses_work(rig: Rig) -> None:
    """After close() every enqueue raises RuntimeError; queries still answer."""
    _, stream, word, _ = closed_stream()
    event, plan = HostEvent(), LaunchPlan("k", 0, print, (1, 1, 1), (1, 1, 1), 0, None, False)
    recorded = rig.event()
    lane = rig.lane()
    lane.stream.enqueue_record(recorded)
    calls: list[Callable[[], object]] = [
        lambda: stream.enqueue_kernel(plan, (), Operation(rig.loop), 1),
        lambda: stream.enqueue_mark(1),
        lambda: stream.enqueue_write(word, 1),
        lambda: stream.enqueue_wait(word, 1),
        lambda: stream.enqueue_wake(0),
        lambda: stream.enqueue_copy(0, 0, 0),
        lambda: stream.enqueue_copy_box(0, 0, 0, 0, 0, 0, 0, 0, 0),
        lambda: stream.enqueue_fill(0, b"\0", 0),
        lambda: stream.enqueue_record(event),
        lambda: stream.enqueue_wait_event(recorded),
    ]
    count = sys.getrefcount(word)
    for call in calls:
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert stream.query()
    assert event.query()
    assert sys.getrefcount(word) == count
    stream.run()  # returns at once


def test_closed_event_is_refused(rig: Rig) -> None:
    """A closed event can be neither recorded nor waited for."""
    lane, event = rig.lane(), HostEvent()
    event.close()
    for call in (lane.stream.enqueue_record, lane.stream.enqueue_wait_event):
        with pytest.raises(RuntimeError, match="the event was closed"):
            call(event)


def test_stream_runs_on_one_thread(rig: Rig) -> None:
    """run() of a stream that runs already is refused."""
    lane = rig.lane()
    rig.round_trip()
    rig.launch(lane, STORE, rig.word(), 1)
    until(lane.done, "the stream's thread runs")
    assert isinstance(lane.stream, HostStream)
    with pytest.raises(RuntimeError, match="runs already"):
        lane.stream.run()


def test_marks_are_bound_once_and_first() -> None:
    """No mark without its words, and the words do not change."""
    stream, memory = HostStream(HostContext()), np.zeros(2, np.uint64)
    word = Word(memory.ctypes.data, memory.ctypes.data, memory)
    with pytest.raises(RuntimeError, match="bind_marks comes before"):
        stream.enqueue_mark(1)
    stream.bind_marks(word, word)
    with pytest.raises(RuntimeError, match="bound already"):
        stream.bind_marks(word, word)


def test_wrong_arguments_are_refused(rig: Rig) -> None:
    """Arguments of the wrong kind, number or size raise and enqueue nothing."""
    stream: Any = rig.lane().stream
    plan = LaunchPlan("k", 0, print, (1, 1, 1), (1, 1, 1), 0, None, False)
    nothing = LaunchPlan("k", 0, None, (1, 1, 1), (1, 1, 1), 0, None, False)
    operation, word = Operation(rig.loop), rig.word()
    for kind, call in [
        (TypeError, lambda: stream.enqueue_kernel(plan, [], operation, 1)),
        (TypeError, lambda: stream.enqueue_kernel(print, (), operation, 1)),
        (TypeError, lambda: stream.enqueue_kernel(plan, (), None, 1)),
        (TypeError, lambda: stream.enqueue_kernel(plan, (), operation, "1")),
        (TypeError, lambda: stream.enqueue_kernel(plan, (), operation)),
        (ValueError, lambda: stream.enqueue_kernel(nothing, (), operation, 1)),
        (TypeError, lambda: stream.enqueue_mark(None)),
        (TypeError, lambda: stream.enqueue_write(1, 1)),
        (TypeError, lambda: stream.enqueue_write(word, 1.5)),
        (TypeError, lambda: stream.enqueue_wait(word)),
        (ValueError, lambda: stream.enqueue_wake(-1)),
        (OverflowError, lambda: stream.enqueue_copy(0, 0, -1)),
        (OverflowError, lambda: stream.enqueue_copy_box(0, 0, 1, 1, 1, 1, 1, 1, -1)),
        (TypeError, lambda: stream.enqueue_copy_box(0, 0, 1, 1, 1, 1, 1, 1)),
        (TypeError, lambda: stream.enqueue_copy_box(0, 0, 1, 1.5, 1, 1, 1, 1, 1)),
        (TypeError, lambda: stream.enqueue_fill(0, bytearray(4), 1)),
        (ValueError, lambda: stream.enqueue_fill(0, b"123", 1)),
        (ValueError, lambda: stream.enqueue_fill(0, b"", 1)),
        (ValueError, lambda: stream.enqueue_fill(0, bytes(32), 1)),
        (TypeError, lambda: stream.enqueue_record(stream)),
        (TypeError, lambda: HostStream(None)),  # type: ignore[arg-type]
    ]:
        with pytest.raises(kind):
            call()
    assert stream.query()


def test_stream_in_a_cycle_is_collected() -> None:
    """A stream that its own words lead back to goes once its thread has ended."""

    class Owner:
        stream: HostStream

    memory = np.zeros(1, np.uint64)
    owner = Owner()
    word = Word(memory.ctypes.data, memory.ctypes.data, owner)
    context = HostContext()
    owner.stream = HostStream(context)
    owner.stream.bind_marks(word, word)
    body = threading.Thread(target=owner.stream.run)
    body.start()
    owner.stream.enqueue_mark(3)
    owner.stream.close()
    body.join()
    assert memory[0] == 1
    alive = weakref.ref(owner)
    del owner, word, body
    gc.collect()
    assert alive() is None


def test_stream_that_never_ran_drops_its_queue(rig: Rig) -> None:
    """Work queued on a stream without a thread goes with the stream, which leaves its context idle."""
    context, event = HostContext(), HostEvent()
    stream, word = HostStream(context), rig.word()
    count = sys.getrefcount(word)
    for _ in range(100):
        stream.enqueue_write(word, 1)
        stream.enqueue_wait(word, 1)
        stream.enqueue_record(event)
        stream.enqueue_wait_event(event)
    assert not stream.query()
    del stream
    assert context.streams == 0
    assert sys.getrefcount(word) == count
    context.synchronise()
    assert not event.query()


# Leaving the process, and forks

PRELUDE = """
import asyncio, os, sys, threading, time
import numpy as np
from aiooffload._native import LaunchPlan, Operation
from aiooffload.drivers.host import open_device
device = open_device()
memory = device.register(4096)
loop = asyncio.new_event_loop()

def stream(n):
    made = device.create_stream()
    made.bind_marks(memory.word(16 * n), memory.word(16 * n + 8))
    return made

def launch(stream, body, sequence=1):
    plan = LaunchPlan("body", 0, body, (1, 1, 1), (1, 1, 1), 0, None, False)
    stream.enqueue_kernel(plan, (), Operation(loop), sequence)

def until(condition):
    while not condition():
        time.sleep(0)

gate = memory.word(4088)
first, second = stream(0), stream(1)
started = []
"""


def run_program(body: str) -> str:
    """Run a program after the prelude; it must end by itself, well, and with nothing on stderr."""
    code = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]  # forking with threads, from 3.12
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


EXITS = {
    "idle": "",
    "closed": "loop.close(); device.unregister(memory); first.close(); second.close(); device.close()",
    "waiting for a word": "first.enqueue_wait(gate, 1); first.enqueue_wake(1)",
    "waiting for an event": """
        event = device.create_event()
        first.enqueue_wait(gate, 1)
        first.enqueue_record(event)
        second.enqueue_wait_event(event)
    """,
    "kernel runs for ever": """
        def forever():
            started.append(1)
            while True:
                pass
        launch(first, forever)
        until(lambda: started)
    """,
    "kernel sleeps": """
        def sleep():
            started.append(1)
            time.sleep(1000)
        launch(first, sleep)
        until(lambda: started)
    """,
    "kernels queued": """
        for _ in range(20000):
            launch(first, lambda: started.append(1))
            launch(second, lambda: None)
        until(lambda: started)
    """,
    "kernels queued behind a wait": """
        first.enqueue_wait(gate, 1)
        for _ in range(1000):
            launch(first, lambda: None)
    """,
    "a failing kernel": "launch(first, lambda: sys.exit(3)); until(lambda: memory.word(0).load())",
    "long copies and fills": """
        big = device.allocate(64 << 20)
        for _ in range(200):
            first.enqueue_copy(big.address, big.address + (32 << 20), 32 << 20)
            first.enqueue_copy_box(big.address, big.address + 4, 4, 4 << 20, 2, 8, 8, 32 << 20, 32 << 20)
            second.enqueue_fill(big.address, b"abcd", 16 << 20)
    """,
    "marks in full flow": """
        def more():
            while True:
                for _ in range(100):
                    first.enqueue_mark(1)
                    first.enqueue_write(gate, 1)
                until(first.query)
        threading.Thread(target=more, daemon=True).start()
        until(gate.load)
    """,
    "maintenance waits": """
        first.enqueue_wait(gate, 1)
        threading.Thread(target=device.selftest_function, daemon=True).start()
        threading.Thread(target=lambda: [launch(second, lambda: None) for _ in range(1000)], daemon=True).start()
    """,
}


@pytest.mark.parametrize("state", list(EXITS))
def test_exit(state: str) -> None:
    """The interpreter exits at once and quietly, whatever the streams are doing."""
    run_program(EXITS[state])


def test_exit_ends_a_program_that_failed() -> None:
    """An exception in the main thread ends the process with its own status although a stream is held."""
    code = textwrap.dedent(PRELUDE) + "first.enqueue_wait(gate, 1)\nraise SystemExit(7)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=40, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (7, b"")


def test_forked_child_gets_errors_not_hangs() -> None:
    """In a forked child streams refuse work, closing does nothing and exit is clean; the parent goes on."""
    output = run_program(
        """
        first.enqueue_wait(gate, 1)
        for _ in range(2000):
            time.sleep(0)  # the stream goes to sleep
        child = os.fork()
        if not child:
            for call in (lambda: launch(first, print), lambda: first.enqueue_mark(1), lambda: second.query(),
                         lambda: device.selftest_function(), lambda: device.create_stream()):
                try:
                    call()
                except RuntimeError as error:
                    assert "fork" in str(error)
                else:
                    raise AssertionError("no error")
            first.close()
            device.close()
            first = second = None
            fresh = open_device()
            one = fresh.create_stream()
            words = fresh.register(1 << 20)  # larger than the hole that the parent's memory left
            one.enqueue_wait(words.word(0), 1)
            words.word(0).store(1)
            until(one.query)
            fresh.unregister(words)
            one.close()
            fresh.close()
            print("child", flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        gate.store(1)
        first.enqueue_mark(9)
        until(lambda: memory.word(0).load() == 9)
        print("parent")
        """
    )
    assert output.split() == ["child", "parent"]


def test_forked_child_never_unmaps_registered_memory() -> None:
    """A child has no registered memory; its addresses may be another's there, and nothing unmaps them."""
    output = run_program(
        """
        import ctypes, gc, mmap
        big = device.register(1 << 20)
        big.array[:] = 85
        address = big.host_address
        call = ctypes.CDLL(None).mmap
        call.restype = ctypes.c_void_p
        call.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        child = os.fork()
        if not child:
            # 0x100000: MAP_FIXED_NOREPLACE; where it fails, something else is at the address already
            call(address, 1 << 20, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000, -1, 0)
            before = ctypes.string_at(address, 1 << 20)
            assert before != b"U" * (1 << 20)
            device._registered.discard(big)
            big.unmap()
            big = None
            gc.collect()
            ctypes.string_at(address, 1 << 20)
            print("kept", flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        """
    )
    assert output.split() == ["kept"]
