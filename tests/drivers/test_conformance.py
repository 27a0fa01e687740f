"""What every driver does alike: the contract of ``aiooffload.drivers.api``, tried on each of them."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import select
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiooffload._native import now_ns
from aiooffload.drivers.api import MAX_QUEUED, Device
from aiooffload.errors import DriverError, OutOfMemoryError, UsageError
from tests.drivers.support import COPY_WORD, GEOMETRY, SCALE_ADD, STORE, Kernel, Lane, Rig, give_way, until

M64 = 2**64


@pytest.fixture
def eventfd() -> Iterator[int]:
    descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    yield descriptor
    os.close(descriptor)


# Order


def test_stream_runs_in_order(rig: Rig) -> None:
    """Kernels queued behind a running one run one after another, in the order of their launches."""
    lane, word = rig.lane(), rig.word()
    latch = rig.hold(lane)
    expected = 0
    for value in range(1, 60):
        rig.launch(lane, SCALE_ADD, word, 3, value)
        expected = (expected * 3 + value) % M64
    latch.open()
    until(lane.done, "the last launch completes")
    assert word.load() == expected


def test_kinds_of_work_keep_their_order(rig: Rig) -> None:
    """Kernels, copies, fills and writes of one stream see what the one before left."""
    lane, staging, block = rig.lane(), rig.registered(64), rig.block(64)
    word = staging.word(0)
    latch = rig.hold(lane)
    rig.launch(lane, STORE, word, 5)
    lane.stream.enqueue_copy(block.address, staging.device_address, 8)
    lane.stream.enqueue_write(word, 7)
    lane.stream.enqueue_copy(block.address + 8, staging.device_address, 8)
    lane.stream.enqueue_fill(staging.device_address, b"\x01", 8)
    rig.launch(lane, SCALE_ADD, word, 1, 2)
    lane.stream.enqueue_copy(block.address + 16, staging.device_address, 8)
    latch.open()
    rig.finish(lane)
    assert list(rig.read(block.address, 24).view(np.uint64)) == [5, 7, 0x0101010101010103]


def test_streams_do_not_wait_for_each_other(rig: Rig) -> None:
    """A stream that is held holds up no other."""
    held, lane = rig.lane(), rig.lane()
    latch = rig.hold(held)
    word = rig.word()
    rig.launch(lane, STORE, word, 9)
    until(lane.done, "a kernel beside a held stream completes")
    assert word.load() == 9
    assert not held.done()
    latch.open()
    until(held.done, "the latch kernel ends")


def test_enqueueing_does_not_wait(rig: Rig) -> None:
    """A held stream takes as many entries as the contract says, and runs them all."""
    lane, word = rig.lane(), rig.word()
    latch = rig.hold(lane)
    for _ in range(MAX_QUEUED - 1):
        rig.launch(lane, SCALE_ADD, word, 1, 1, marked=False)
    rig.mark(lane)
    assert word.load() == 0
    latch.open()
    until(lane.done, "the mark after all entries arrives")
    assert word.load() == MAX_QUEUED - 1


# Words and marks


def test_mark_writes_the_slot_then_the_bell(rig: Rig) -> None:
    """Whoever sees the bell finds the sequence in the slot."""
    lane = rig.lane()
    for sequence in range(1, 201):
        lane.bell.store(0)
        rig.mark(lane)
        until(lambda: lane.bell.load() == 1, "the bell rings")
        assert lane.slot.load() == sequence


def test_mark_comes_after_the_kernel(rig: Rig) -> None:
    """Whoever sees a launch's mark sees what the kernel wrote."""
    lane, word = rig.lane(), rig.word()
    for value in range(1, 101):
        rig.launch(lane, STORE, word, value)
        until(lane.done, "the launch's mark arrives")
        assert word.load() == value


def test_kernel_without_sequence_writes_no_mark(rig: Rig) -> None:
    """Sequence 0 leaves slot and bell alone; a mark of its own may follow."""
    lane, word = rig.lane(), rig.word()
    rig.launch(lane, STORE, word, 1, marked=False)
    rig.finish(lane)
    assert (word.load(), lane.slot.load(), lane.bell.load()) == (1, 0, 0)
    rig.mark(lane)
    until(lane.done, "the mark arrives")
    assert lane.slot.load() == 1


def test_marks_keep_all_64_bits(rig: Rig) -> None:
    """A sequence may be any number up to 2**64 - 1."""
    lane = rig.lane()
    lane.stream.enqueue_mark(M64 - 1)
    until(lambda: lane.slot.load() == M64 - 1, "the mark arrives")


def test_write_stores_after_earlier_work(rig: Rig) -> None:
    """A write waits for the work before it."""
    lane, word = rig.lane(), rig.word()
    latch = rig.hold(lane)
    lane.stream.enqueue_write(word, M64 - 3)
    rig.round_trip()
    assert word.load() == 0
    latch.open()
    until(lambda: word.load() == M64 - 3, "the write arrives")


def test_host_store_releases_a_wait(rig: Rig) -> None:
    """A wait enqueued before its signal holds the stream until the host stores the value."""
    lane, gate, word = rig.lane(), rig.word(), rig.word()
    lane.stream.enqueue_wait(gate, 1)
    rig.launch(lane, STORE, word, 4)
    rig.round_trip()
    assert word.load() == 0
    assert not lane.stream.query()
    gate.store(1)
    until(lane.done, "the released kernel completes")
    assert word.load() == 4


def test_stream_releases_a_wait(rig: Rig) -> None:
    """A write on one stream releases a wait that another enqueued before it."""
    waiting, writing, gate = rig.lane(), rig.lane(), rig.word()
    latch = rig.hold(writing)
    waiting.stream.enqueue_wait(gate, 5)
    rig.mark(waiting)
    writing.stream.enqueue_write(gate, 5)
    rig.round_trip()
    assert not waiting.done()
    latch.open()
    until(waiting.done, "the wait is released")


def test_mark_releases_a_wait(rig: Rig) -> None:
    """A wait for a lane's slot or bell is released by the lane's mark."""
    lane, slot_waiter, bell_waiter = rig.lane(), rig.lane(), rig.lane()
    latch = rig.hold(lane)
    rig.launch(lane, STORE, rig.word(), 1)
    slot_waiter.stream.enqueue_wait(lane.slot, lane.sequence)
    rig.mark(slot_waiter)
    bell_waiter.stream.enqueue_wait(lane.bell, 1)
    rig.mark(bell_waiter)
    assert not slot_waiter.done()
    latch.open()
    until(slot_waiter.done, "the wait for the slot is released")
    until(bell_waiter.done, "the wait for the bell is released")


def test_wait_that_is_met_already_does_not_hold(rig: Rig) -> None:
    """A word beyond the value lets the stream pass."""
    lane, gate = rig.lane(), rig.word()
    gate.store(8)
    lane.stream.enqueue_wait(gate, 7)
    rig.mark(lane)
    until(lane.done, "the stream passes the wait")


@pytest.mark.parametrize(
    ("have", "short", "want"),
    [(0, 4, 5), (M64 - 2, 0, 1), (M64 - 9, M64 - 1, 0), (2**63 - 1, 2**63, 2**63 + 1), (6, 5 + 2**63, 6 + 2**63)],
)
def test_wait_compares_cyclically(rig: Rig, have: int, short: int, want: int) -> None:
    """A wait looks at the signed difference, so sequences may wrap around."""
    lane, witness, gate = rig.lane(), rig.lane(), rig.word()
    gate.store(have)
    lane.stream.enqueue_wait(gate, want)
    rig.mark(lane)
    gate.store(short)
    witness.stream.enqueue_wait(gate, short)
    rig.mark(witness)
    until(witness.done, "a stream that waits for less passes")
    rig.round_trip()
    assert not lane.done()
    gate.store(want)
    until(lane.done, "the wait is released")


def test_wait_passes_across_the_wrap(rig: Rig) -> None:
    """A word that wrapped around is beyond a value from before."""
    lane, gate = rig.lane(), rig.word()
    gate.store(3)
    lane.stream.enqueue_wait(gate, M64 - 5)
    rig.mark(lane)
    until(lane.done, "the wait passes")


def test_many_waits_on_one_word(rig: Rig) -> None:
    """Each of several streams is released at its own value."""
    gate, lanes = rig.word(), [rig.lane() for _ in range(4)]
    for value, lane in enumerate(lanes, start=1):
        lane.stream.enqueue_wait(gate, value)
        rig.mark(lane)
    for value in range(1, 5):
        gate.store(value)
        until(lanes[value - 1].done, "the stream that waits for this value passes")
        assert not any(lane.done() for lane in lanes[value:])


def test_ping_pong_loses_no_wake_up(rig: Rig) -> None:
    """Two streams that release each other in turn go on to the end."""
    left, right, ping, pong = rig.lane(), rig.lane(), rig.word(), rig.word()
    turns = 120
    for turn in range(1, turns + 1):
        left.stream.enqueue_wait(pong, turn - 1)
        left.stream.enqueue_write(ping, turn)
        right.stream.enqueue_wait(ping, turn)
        right.stream.enqueue_write(pong, turn)
    until(lambda: pong.load() == turns, "the last turn is taken")


# Events


def test_event_orders_two_streams(rig: Rig) -> None:
    """What waits for an event sees what was done before its record."""
    first, second, event = rig.lane(), rig.lane(), rig.event()
    source, target = rig.word(), rig.word()
    latch = rig.hold(first)
    rig.launch(first, STORE, source, 11)
    first.stream.enqueue_record(event)
    second.stream.enqueue_wait_event(event)
    rig.launch(second, COPY_WORD, target, source)
    rig.round_trip()
    assert not event.query()
    assert not second.done()
    latch.open()
    until(second.done, "the waiting stream goes on")
    assert target.load() == 11
    assert event.query()


def test_event_without_a_record_is_done(rig: Rig) -> None:
    """An event that was never recorded holds nothing."""
    lane, event = rig.lane(), rig.event()
    assert event.query()
    lane.stream.enqueue_wait_event(event)
    rig.mark(lane)
    until(lane.done, "the stream passes")


def test_wait_keeps_the_record_it_saw(rig: Rig) -> None:
    """Recording again changes what later waits and queries see, not an earlier wait."""
    held, other, early, late, event = rig.lane(), rig.lane(), rig.lane(), rig.lane(), rig.event()
    latch = rig.hold(held)
    held.stream.enqueue_record(event)
    early.stream.enqueue_wait_event(event)
    rig.mark(early)
    other.stream.enqueue_record(event)
    late.stream.enqueue_wait_event(event)
    rig.mark(late)
    until(late.done, "the wait for the second record passes")
    assert event.query()
    assert not early.done()
    latch.open()
    until(early.done, "the wait for the first record passes")


def test_event_recorded_again_is_not_done(rig: Rig) -> None:
    """A query looks at the last record only, also in the same stream."""
    lane, event = rig.lane(), rig.event()
    lane.stream.enqueue_record(event)
    until(event.query, "the first record is done")
    latch = rig.hold(lane)
    lane.stream.enqueue_record(event)
    assert not event.query()
    latch.open()
    until(event.query, "the second record is done")


def test_event_may_be_closed_while_pending(rig: Rig) -> None:
    """Closing an event leaves the waits for it as they were."""
    held, waiting = rig.lane(), rig.lane()
    event = rig.device.create_event()
    latch = rig.hold(held)
    held.stream.enqueue_record(event)
    waiting.stream.enqueue_wait_event(event)
    rig.mark(waiting)
    event.close()
    rig.round_trip()
    assert not waiting.done()
    latch.open()
    until(waiting.done, "the wait passes")


def test_timer_is_an_event(rig: Rig) -> None:
    """A timer is queried, waited for and closed like any event."""
    held, waiting, timer = rig.lane(), rig.lane(), rig.timer()
    latch = rig.hold(held)
    held.stream.enqueue_record(timer)
    waiting.stream.enqueue_wait_event(timer)
    rig.mark(waiting)
    rig.round_trip()
    assert not timer.query()
    assert not waiting.done()
    latch.open()
    until(waiting.done, "the wait passes")
    assert timer.query()


def test_timers_measure_what_is_between_them(rig: Rig) -> None:
    """The time from one timer to another is the device's: at least as long as a kernel in between was held."""
    lane, before, after = rig.lane(), rig.timer(), rig.timer()
    lane.stream.enqueue_record(before)
    until(before.query, "the first timer is reached")
    latch = rig.hold(lane)
    lane.stream.enqueue_record(after)
    began = now_ns()
    until(lambda: now_ns() - began > 3_000_000, "some time passes")
    latch.open()
    until(after.query, "the second timer is reached")
    assert 2_500_000 < after.elapsed_ns(before) < 30_000_000_000
    assert abs(after.elapsed_ns(before) + before.elapsed_ns(after)) < 1000
    assert before.elapsed_ns(before) == 0


def test_timers_of_two_streams_share_a_clock(rig: Rig) -> None:
    """A timer on another stream that was ordered behind one is not before it, to a microsecond."""
    first, second, before, after = rig.lane(), rig.lane(), rig.timer(), rig.timer()
    for _ in range(20):
        first.stream.enqueue_record(before)
        second.stream.enqueue_wait_event(before)
        second.stream.enqueue_record(after)
        until(after.query, "the second timer is reached")
        assert -1000 <= after.elapsed_ns(before) < 30_000_000_000


def test_timer_that_was_not_reached_has_no_time(rig: Rig) -> None:
    """Asking for a time that is not known yet raises; afterwards it can be had."""
    lane, before, after = rig.lane(), rig.timer(), rig.timer()
    lane.stream.enqueue_record(before)
    until(before.query, "the first timer is reached")
    latch = rig.hold(lane)
    lane.stream.enqueue_record(after)
    with pytest.raises((DriverError, RuntimeError)):
        after.elapsed_ns(before)
    latch.open()
    until(after.query, "the second timer is reached")
    assert after.elapsed_ns(before) > 0


# Copies and fills


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4097, 20_000, (1 << 20) + 3])
def test_copies_in_every_direction(rig: Rig, nbytes: int) -> None:
    """Registered to device, device to device, device to registered, registered to registered."""
    content = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    up, down, side = (rig.registered(nbytes + 1) for _ in range(3))
    first, second, lane = rig.block(nbytes), rig.block(nbytes), rig.lane()
    up.array[:nbytes] = content
    down.array[:] = side.array[:] = 0xA5
    lane.stream.enqueue_copy(first.address, up.device_address, nbytes)
    lane.stream.enqueue_copy(second.address, first.address, nbytes)
    lane.stream.enqueue_copy(down.device_address, second.address, nbytes)
    lane.stream.enqueue_copy(side.device_address, down.device_address, nbytes)
    rig.mark(lane)
    until(lane.done, "the copies are done")
    for memory in (down, side):
        assert np.array_equal(memory.array[:nbytes], content)
        assert (memory.array[nbytes:] == 0xA5).all()


# Width, height, depth; destination's and source's pitch; rows from one slice to the next of each.
BOXES = [
    (1, 5, 1, 7, 4, 5, 5),
    (13, 9, 1, 13, 29, 9, 9),
    (4, 1, 3, 4, 9, 1, 2),
    (16, 4, 3, 40, 16, 4, 7),
    (5, 3, 4, 11, 6, 9, 3),
    (8, 3000, 1, 24, 8, 3000, 3000),
    (4096, 17, 6, 4099, 5001, 20, 17),
    (70_000, 9, 2, 70_001, 70_002, 9, 10),
    (0, 3, 2, 8, 8, 3, 3),
    (8, 0, 2, 8, 8, 3, 3),
    (8, 3, 0, 8, 8, 3, 3),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
@pytest.mark.parametrize("direction", ["up", "across", "down", "on the host"])
def test_boxes_in_every_direction(rig: Rig, box: tuple[int, ...], direction: str) -> None:
    """Rows and slices of any pitch arrive, and no byte between them changes. Memory ends behind the last row."""
    width, height, depth, dst_pitch, src_pitch, dst_rows, src_rows = box

    def rows(pitch: int, slice_rows: int) -> NDArray[np.intp]:
        starts = np.arange(depth)[:, None] * pitch * slice_rows + np.arange(height) * pitch
        return (starts[..., None] + np.arange(width)).reshape(-1)

    to, at = rows(dst_pitch, dst_rows), rows(src_pitch, src_rows)
    sizes = [int(index.max(initial=-1)) + 1 for index in (to, at)]
    content = np.random.default_rng(width).integers(0, 256, sizes[1], np.uint8)
    expected = np.full(sizes[0], 0xA5, np.uint8)
    expected[to] = content[at]
    if direction in ("up", "on the host"):
        up = rig.registered(sizes[1] + 1)
        up.array[: sizes[1]] = content
        source = up.device_address
    else:
        source = rig.bytes_on_device(content).address
    if direction in ("down", "on the host"):
        memory = rig.registered(sizes[0] + 1)
        memory.array[:] = 0xA5
        destination = memory.device_address
    else:
        destination = rig.bytes_on_device(np.full(sizes[0], 0xA5, np.uint8)).address
    lane = rig.lane()
    slices = (dst_pitch * dst_rows, src_pitch * src_rows)
    lane.stream.enqueue_copy_box(destination, source, width, height, depth, dst_pitch, src_pitch, *slices)
    rig.finish(lane)
    assert np.array_equal(rig.read(destination, sizes[0]), expected)


def test_box_keeps_its_place_in_the_stream(rig: Rig) -> None:
    """A box is copied after the work before it and before the work after it."""
    lane, block = rig.lane(), rig.bytes_on_device(np.arange(32, dtype=np.uint8))
    latch = rig.hold(lane)
    lane.stream.enqueue_fill(block.address, b"\x07", 8)
    lane.stream.enqueue_copy_box(block.address + 16, block.address, 2, 4, 1, 4, 2, 16, 8)
    lane.stream.enqueue_fill(block.address, b"\x09", 8)
    latch.open()
    rig.finish(lane)
    expected = [*[9] * 8, *range(8, 16), 7, 7, 18, 19, 7, 7, 22, 23, 7, 7, 26, 27, 7, 7, 30, 31]
    assert rig.read(block.address, 32).tolist() == expected


def test_largest_pitch_is_one_that_copies_need(rig: Rig) -> None:
    """A device takes rows 1 GiB apart at the least."""
    assert rig.device.properties.max_pitch >= 2**30


@pytest.mark.parametrize("width", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("count", [1, 3, 5000])
def test_fill_repeats_the_pattern(rig: Rig, width: int, count: int) -> None:
    """A fill writes the whole pattern ``count`` times and nothing around it."""
    pattern = bytes(range(0x31, 0x31 + width))
    nbytes, edge = width * count, 64
    block, lane = rig.bytes_on_device(np.full(nbytes + 2 * edge, 0xEE, np.uint8)), rig.lane()
    lane.stream.enqueue_fill(block.address + edge, pattern, count)
    rig.finish(lane)
    content = rig.read(block.address, nbytes + 2 * edge).tobytes()
    assert content == b"\xee" * edge + pattern * count + b"\xee" * edge


# The wake


def test_wake_adds_to_the_eventfd(rig: Rig, eventfd: int) -> None:
    """Each wake adds the time at which it was written, after the work before it."""
    lane, gate = rig.lane(), rig.word()
    lane.stream.enqueue_wait(gate, 1)
    lane.stream.enqueue_wake(eventfd)
    lane.stream.enqueue_wake(eventfd)
    rig.round_trip()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(eventfd)
    begin = now_ns()
    gate.store(1)
    rig.finish(lane)
    assert 2 * begin <= os.eventfd_read(eventfd) <= 2 * now_ns()


def test_wake_needs_no_interpreter(rig: Rig, eventfd: int) -> None:
    """A wake arrives while another thread holds the interpreter all the time."""
    lane, gate = rig.lane(), rig.word()
    lane.stream.enqueue_wait(gate, 1)
    lane.stream.enqueue_wake(eventfd)
    entry = (ctypes.c_uint64 * 1)(eventfd | select.POLLIN << 32)  # struct pollfd
    poll = ctypes.PyDLL(None).poll  # a PyDLL call keeps the interpreter
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # nobody can ask for it between the store and the poll
    try:
        begin = now_ns()
        gate.store(1)
        ready = poll(entry, 1, 20_000)
    finally:
        sys.setswitchinterval(interval)
    assert ready == 1
    assert begin <= os.eventfd_read(eventfd) <= now_ns()
    rig.finish(lane)


# Queries


def test_query_tells_whether_work_is_left(rig: Rig) -> None:
    """A stream is idle when new, busy while held, idle afterwards."""
    lane = rig.lane()
    assert lane.stream.query()
    latch = rig.hold(lane)
    assert not lane.stream.query()
    latch.open()
    until(lane.stream.query, "the stream gets idle")
    assert lane.done()


def test_handles_differ(rig: Rig) -> None:
    """Each stream has a handle of its own, not 0."""
    handles = {rig.lane().stream.handle for _ in range(8)}
    assert len(handles) == 8
    assert 0 not in handles


def test_closed_stream_finishes_its_work(rig: Rig) -> None:
    """Closing a stream with work pending does not cancel the work."""
    stream, gate, word = rig.device.create_stream(), rig.word(), rig.word()
    stream.enqueue_wait(gate, 1)
    stream.enqueue_write(word, 6)
    stream.close()
    gate.store(1)
    until(lambda: word.load() == 6, "the pending write arrives")


# Memory


def test_blocks_are_aligned_and_apart(rig: Rig) -> None:
    """Allocations start at multiples of 256 and do not overlap, whatever their size."""
    sizes = [1, 255, 256, 257, 4096, 100_001]
    blocks = sorted((rig.block(n) for n in sizes), key=lambda b: b.address)
    assert sorted(b.nbytes for b in blocks) == sizes
    assert all(b.address % 256 == 0 for b in blocks)
    assert all(a.address + a.nbytes <= b.address for a, b in itertools.pairwise(blocks))


def test_empty_block(rig: Rig) -> None:
    """An allocation of 0 bytes is legal."""
    assert rig.block(0).nbytes == 0


def test_freed_memory_can_be_had_again(rig: Rig) -> None:
    """Allocating and freeing goes on for much more than a device has."""
    total = rig.device.memory_info()[1]
    nbytes = min(total // 16, 1 << 30)
    for _ in range(2 * total // nbytes):
        rig.device.free(rig.device.allocate(nbytes))


def test_host_array_is_the_memory(rig: Rig) -> None:
    """Where the host can touch device memory, ``host_array`` shows it."""
    block = rig.bytes_on_device(np.arange(200, dtype=np.uint8))
    if rig.device.properties.driver == "host":
        assert block.host_array is not None
        assert block.host_array.tolist() == list(range(200))
        assert block.host_array.ctypes.data == block.address
    else:
        assert block.host_array is None


def test_out_of_memory_is_typed_and_harmless(rig: Rig) -> None:
    """Asking for too much raises OutOfMemoryError, a MemoryError; the device stays usable."""
    with pytest.raises(OutOfMemoryError) as caught:
        rig.device.allocate(1 << 60)
    assert isinstance(caught.value, MemoryError)
    rig.block(1 << 16)
    rig.round_trip()


def test_memory_info(rig: Rig) -> None:
    """Free memory is between 0 and the total, which the properties name too."""
    free, total = rig.device.memory_info()
    assert 0 < free <= total
    assert total <= rig.device.properties.total_bytes
    rig.device.trim()
    assert rig.device.memory_info()[1] == total


def test_memory_calls_do_not_wait_for_kernels(rig: Rig) -> None:
    """Allocating, freeing, registering, making streams and events work while a kernel is held."""
    latch = rig.hold(rig.lane())
    rig.device.free(rig.device.allocate(1 << 20))
    rig.registered(1 << 20)
    rig.event()
    rig.lane()
    assert latch.running()
    assert not rig.lanes[0].done()


def test_registered_memory_is_shared(rig: Rig) -> None:
    """Registered memory is zeroed, whole pages, and the same for the host and the device."""
    memory = rig.registered(5000)
    assert memory.nbytes >= 5000
    assert memory.nbytes % mmap.PAGESIZE == 0
    assert memory.array.shape == (memory.nbytes,)
    assert not memory.array.any()
    assert memory.array.ctypes.data == memory.host_address
    lane, word = rig.lane(), memory.word(4096)
    assert word.host_address == memory.host_address + 4096
    assert word.device_address == memory.device_address + 4096
    rig.launch(lane, STORE, word, 77)
    until(lane.done, "the kernel completes")
    assert memory.array[4096:4104].view(np.uint64)[0] == word.load() == 77
    memory.array[4096:4104].view(np.uint64)[0] = 78
    assert word.load() == 78
    target = rig.word()
    rig.launch(lane, COPY_WORD, target, word)
    until(lane.done, "the kernel completes")
    assert target.load() == 78


@pytest.mark.parametrize("offset", [-8, 4, 1 << 40])
def test_registered_memory_refuses_words_that_do_not_fit(rig: Rig, offset: int) -> None:
    """A word lies inside the memory, at a multiple of 8."""
    with pytest.raises(ValueError, match="multiple of 8"):
        rig.registered(4096).word(offset)


def test_registering_on_another_thread(rig: Rig) -> None:
    """Any thread may register and unregister."""
    results: list[int] = []

    def body() -> None:
        memory = rig.device.register(100)
        results.append(memory.nbytes)
        rig.device.unregister(memory)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert results == [mmap.PAGESIZE]


def test_unregister_waits_for_what_is_in_flight(rig: Rig) -> None:
    """Unregistering returns only after a running kernel ended."""
    lane = rig.lane()
    latch = rig.hold(lane)
    memory = rig.device.register(100)
    seen: list[bool] = []
    entered = threading.Event()

    def body() -> None:
        entered.set()
        rig.device.unregister(memory)
        seen.append(latch.opened.load() == 1)

    thread = threading.Thread(target=body)
    thread.start()
    entered.wait()
    give_way()
    latch.open()
    thread.join()
    assert seen == [True]


# Kernels


def test_geometry_reaches_the_kernel(rig: Rig) -> None:
    """A kernel sees the grid, the block and the shared memory of its plan."""
    lane, out = rig.lane(), rig.registered(56)
    rig.launch(lane, GEOMETRY, out.device_address, grid=(5, 4, 3), block=(8, 4, 2), shared_bytes=1024)
    until(lane.done, "the kernel completes")
    assert out.array[:56].view(np.uint64).tolist() == [5, 4, 3, 8, 4, 2, 1024]


def test_all_shared_memory_may_be_asked_for(rig: Rig) -> None:
    """A plan opts in to as much dynamic shared memory as the properties say."""
    lane, out, most = rig.lane(), rig.registered(56), rig.device.properties.max_shared_bytes
    assert most >= 48 << 10
    rig.launch(lane, GEOMETRY, out.device_address, shared_bytes=most)
    until(lane.done, "the kernel completes")
    assert out.array[:56].view(np.uint64)[6] == most


def test_largest_block_can_run(rig: Rig) -> None:
    """A block may have as many threads as the properties say."""
    lane, out, most = rig.lane(), rig.registered(56), rig.device.properties.max_threads_per_block
    rig.launch(lane, GEOMETRY, out.device_address, block=(most, 1, 1))
    until(lane.done, "the kernel completes")
    assert out.array[:56].view(np.uint64)[3] == most


def test_parameter_sizes(rig: Rig) -> None:
    """A driver knows the sizes of all parameters, or says that it does not."""
    expected = None if rig.device.properties.driver == "host" else (8, 8, 8)
    assert rig.functions[SCALE_ADD.name].parameter_sizes == expected


def test_plan_carries_the_name_and_geometry(rig: Rig) -> None:
    """A plan tells what it launches."""
    plan = rig.functions[STORE.name].plan((2, 3, 4), (5, 6, 7), 8, None, False)
    assert (plan.name, plan.grid, plan.block, plan.shared_bytes) == ("store", (2, 3, 4), (5, 6, 7), 8)


def test_kernel_without_an_implementation(rig: Rig) -> None:
    """Compiling a kernel that has nothing for the driver is a usage error that names it."""
    with pytest.raises(UsageError, match="hollow"):
        rig.device.compile(Kernel("hollow"))


def test_selftest_function(driver_device: Device, rig: Rig) -> None:
    """The self-test's kernel takes nothing, does nothing and completes."""
    rig.functions["selftest"] = driver_device.selftest_function()
    lane = rig.lane()
    rig.launch(lane, Kernel("selftest"))
    until(lane.done, "the self-test's kernel completes")


# Streams of somebody else


def adopted(rig: Rig, handle: int) -> Lane:
    """A stream by its handle, with marks of its own."""
    lane = Lane(rig.device.adopt_stream(handle), rig.word(), rig.word())
    lane.stream.bind_marks(lane.slot, lane.bell)
    return lane


def test_adopted_stream_is_the_same_queue(rig: Rig) -> None:
    """What is enqueued through it runs among its owner's work; each has its own marks."""
    owner = rig.lane()
    lane = adopted(rig, owner.stream.handle)
    assert lane.stream.handle == owner.stream.handle
    word = rig.word()
    latch = rig.hold(owner)
    rig.launch(owner, STORE, word, 5)
    rig.launch(lane, SCALE_ADD, word, 2, 1)
    rig.launch(owner, SCALE_ADD, word, 3, 0)
    rig.mark(lane)
    rig.round_trip()
    assert (lane.slot.load(), lane.stream.query()) == (0, False)
    latch.open()
    until(lane.done, "the adopted stream's mark arrives")
    until(owner.done, "the owner's mark arrives")
    assert (word.load(), lane.slot.load(), owner.slot.load()) == (33, 2, 3)
    assert lane.bell.load() == owner.bell.load() == 1


def test_adopted_stream_takes_everything_that_a_stream_does(rig: Rig, eventfd: int) -> None:
    """Copies, fills, words, events and wakes work on it."""
    owner, other = rig.lane(), rig.lane()
    lane = adopted(rig, owner.stream.handle)
    block, memory, word, go = rig.block(64), rig.registered(64), rig.word(), rig.word()
    event, before = rig.event(), rig.event()
    rig.mark(other)
    other.stream.enqueue_record(before)
    lane.stream.enqueue_wait_event(before)
    lane.stream.enqueue_wait(go, 1)
    lane.stream.enqueue_fill(block.address, b"\5", 64)
    lane.stream.enqueue_copy(memory.device_address, block.address, 64)
    lane.stream.enqueue_write(word, 9)
    lane.stream.enqueue_wake(eventfd)
    lane.stream.enqueue_record(event)
    rig.mark(lane)
    until(other.done, "what it waits for is done")
    other.stream.enqueue_wait_event(event)
    rig.mark(other)
    rig.round_trip()
    assert not other.done()
    go.store(1)
    until(other.done, "what waits for it is done")
    until(lane.done, "its mark, which comes after the event, is there")
    assert (word.load(), memory.array[:64].tolist()) == (9, [5] * 64)
    assert select.select([eventfd], [], [], 5)[0] == [eventfd]


def test_closing_an_adopted_stream_leaves_it(rig: Rig) -> None:
    """The owner goes on using it, and what was enqueued through it runs."""
    owner = rig.lane()
    lane, word = adopted(rig, owner.stream.handle), rig.word()
    latch = rig.hold(owner)
    rig.launch(lane, STORE, word, 7)
    lane.stream.close()
    rig.launch(owner, SCALE_ADD, word, 2, 0)
    latch.open()
    until(owner.done, "the owner's stream goes on")
    assert word.load() == 14


def test_no_stream_captures_by_itself(rig: Rig) -> None:
    """A stream says that it does not capture, an adopted one too."""
    owner = rig.lane()
    assert not owner.stream.capturing()
    assert not adopted(rig, owner.stream.handle).stream.capturing()


def test_device_is_current_inside(rig: Rig) -> None:
    """Entering the device, also twice, changes nothing for the streams."""
    lane, word = rig.lane(), rig.word()
    with rig.device.current(), rig.device.current():
        rig.launch(lane, STORE, word, 3)
    until(lane.done, "the kernel completes")
    assert word.load() == 3


@pytest.mark.parametrize("wrong", ["graph", None, 1.5])
def test_what_is_no_graph_is_refused(rig: Rig, wrong: Any) -> None:
    """Only an instantiated graph can be replayed, and on the host none."""
    with pytest.raises(UsageError, match="graph"):
        rig.device.replay(wrong)


# Health


def test_a_well_device_passes_its_check(rig: Rig) -> None:
    """Checking an idle and a busy stream neither waits nor complains."""
    lane = rig.lane()
    rig.device.check(lane.stream)
    latch = rig.hold(lane)
    rig.device.check(lane.stream)
    assert rig.device.health_note() == ""
    latch.open()
    until(lane.done, "the latch kernel ends")


def test_properties(driver_device: Device) -> None:
    """The properties are those of a usable device, and its label is how a user names it."""
    properties = driver_device.properties
    assert properties.label == ("host" if properties.driver == "host" else "cuda:0")
    assert properties.index == 0
    assert properties.name
    assert properties.unique_id
    assert properties.multiprocessors >= 1
    assert properties.total_bytes > 1 << 28
    assert properties.memory_operations
    assert all(n >= 64 for n in properties.max_block)
    assert all(n >= 65535 for n in properties.max_grid)
