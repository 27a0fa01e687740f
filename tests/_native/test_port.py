"""``port.c``: the device's end of a channel, against the host's end and against ``rules/wire.py``."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
import struct
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import aiooffload
from aiooffload._native import Caller, Channel, Handler, Port, Request
from aiooffload.drivers.mapped import MappedMemory
from aiooffload.rules import wire
from aiooffload.rules.wire import Code, Descriptor, Form, Kind, LaunchParameter, Reply, Status

HEADER = Path(aiooffload.__file__).parent / "device" / "aiooffload_wire.h"
NUMBERS = {
    name: int(value) for name, value in re.findall(r"^#define AO_(\w+) +(-?\d+)\b", HEADER.read_text(), re.MULTILINE)
}
FOREVER_NS = 60 * 10**9
SHORT_NS = 2 * 10**6
DEADLINE_S = 10.0
ALL = np.uint32(0xFFFFFFFF)


async def until(condition: Callable[[], object], step: Callable[[], object] = lambda: None) -> None:
    """Let the loop run, with a ``step`` each time, until ``condition`` holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            step()
            await asyncio.sleep(0)


class Device:
    """The two blocks of a channel and the bell, with a look at every word of them."""

    def __init__(self) -> None:
        self.shared = MappedMemory(wire.SHARED_NBYTES)
        self.state = MappedMemory(wire.STATE_NBYTES)
        self.bell = MappedMemory(8).word(0)
        self.words = self.shared.array.view(np.uint64)
        bitmap = wire.CELLS // 8
        taken, left, tickets = (NUMBERS[f"STATE_{name}"] for name in ("TAKEN", "LEFT", "TICKETS"))
        self.taken = self.state.array[taken : taken + bitmap].view(np.uint32)
        self.left = self.state.array[left : left + bitmap].view(np.uint32)
        self.tickets = self.state.array[tickets : tickets + 8 * wire.CELLS].view(np.uint64)
        self.head = self.state.word(wire.STATE_HEAD)
        self.posts = self.state.word(NUMBERS["STATE_POSTS"])
        self.tail = self.shared.word(wire.TAIL_OFFSET)

    def port(self, launch: int = 0, timeout_ns: int = FOREVER_NS) -> Port:
        parameter = LaunchParameter(
            self.shared.host_address, self.state.host_address, self.bell.host_address, timeout_ns, launch
        )
        return Port(parameter.pack(), self)

    def block(self, offset: int, launch: int = 0) -> int:
        """A word of a launch's block."""
        return int(self.words[(wire.launch_offset(launch) + offset) // 8])

    def cancel(self, launch: int = 0) -> None:
        self.shared.word(wire.launch_offset(launch) + wire.LAUNCH_CANCEL).store(1)

    def trouble(self, launch: int = 0) -> tuple[int, Code] | None:
        """What a launch has reported, of which it may be only one kind."""
        given_up, other = (self.block(word, launch) for word in (wire.LAUNCH_GIVEN_UP, wire.LAUNCH_TROUBLE))
        assert not (given_up and other)
        reported = wire.trouble(given_up or other)
        assert reported is None or (reported[1] is Code.NO_ANSWER) == bool(given_up)
        return reported

    def descriptor(self, ticket: int) -> Descriptor | None:
        """The request of ``ticket`` as the host reads it."""
        at = wire.slot_offset(ticket) // 8
        return Descriptor.unpack(ticket, int(self.words[at]), int(self.words[at + 1]))

    def published(self, ticket: int) -> bool:
        """Whether a request was written there; slots of a lap with tag 0 are only ever reached when all was written."""
        at = wire.slot_offset(ticket) // 8
        return self.words[at + 1] != 0 and self.descriptor(ticket) is not None

    def arguments(self, descriptor: Descriptor) -> bytes:
        nbytes, _ = descriptor.extent
        if descriptor.form <= wire.INLINE_NBYTES:
            return descriptor.argument.to_bytes(8, "little")[:nbytes]
        return self.shared.array[wire.payload_offset(descriptor.ticket) :][:nbytes].tobytes()

    def reply(
        self,
        cell: int,
        ticket: int,
        data: bytes = b"",
        *,
        status: Status = Status.OK,
        kind: Kind = Kind.NONE,
        code: int = 0,
    ) -> None:
        """Write a reply as the host does."""
        at = wire.cell_offset(cell)
        value = data.ljust(8, b"\0") if len(data) <= wire.INLINE_NBYTES else bytes(8)
        if status == Status.ERROR:
            value = struct.pack("q", code)
        if len(data) > wire.INLINE_NBYTES:
            self.shared.array[at + wire.CELL_DATA :][: len(data)] = np.frombuffer(data, np.uint8)
        self.words[at // 8] = int.from_bytes(value, "little")
        self.shared.word(at + 8).store(Reply(ticket, status, kind, len(data)).pack())  # wakes whoever waits

    def cells(self, bitmap: Any) -> set[int]:
        """The cells whose bit is set in a bitmap."""
        return {int(cell) for cell in np.flatnonzero(np.unpackbits(bitmap.view(np.uint8), bitorder="little"))}


@pytest.fixture
def device() -> Device:
    return Device()


class Owner:
    """Begins whatever is not plain with a coroutine of the test's choice; nothing is expected to fail."""

    def __init__(self) -> None:
        self.refusals: list[int] = []
        self.make: Callable[[Request], Any] = lambda request: None

    def begin(self, request: Request) -> None:
        request.start(self.make(request))

    def failed(self, request: Request, error: BaseException) -> None:
        request.end(Status.ERROR, 77)

    def encode(self, request: Request, result: Any) -> bytes:
        return bytes(result)

    def idle(self, caller: Caller) -> None:
        raise AssertionError(caller)

    def refused(self, caller: Caller, function: int, handler: Handler | None, nbytes: int) -> None:
        self.refusals.append(function)


class Host:
    """The host's end of the channel of a device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.owner = Owner()
        self.handlers: dict[int, Handler] = {}
        self.channel = Channel(
            device.shared.host_address, device.shared, asyncio.get_running_loop(), self.handlers, self.owner
        )
        self.callers = [Caller(contextvars.copy_context(), launch) for launch in range(4)]
        for launch, caller in enumerate(self.callers):
            self.channel.attach(launch, caller)

    def add(
        self,
        function: int,
        callable: Callable[..., Any],
        letters: str = "q",
        reply: str = "q",
        *,
        nbytes: int | None = None,
        reply_nbytes: int | None = None,
        plain: bool = True,
        batch: bool = False,
    ) -> None:
        """Add a function; the owner makes the coroutine unless it is ``plain``."""
        nbytes = struct.calcsize(letters) if nbytes is None else nbytes
        reply_nbytes = struct.calcsize(reply) if reply_nbytes is None else reply_nbytes
        self.handlers[function] = Handler(
            callable=callable,
            context=contextvars.copy_context(),
            formats=letters.encode(),
            read=np.frombuffer,
            dtype=np.dtype(letters or "V0"),
            nbytes=nbytes,
            reply_format=reply.encode(),
            reply_kind=Kind.INT,
            reply_nbytes=reply_nbytes,
            plain=plain,
            batch=batch,
        )

    def drain(self) -> None:
        self.channel.drain(FOREVER_NS)

    async def serve(self, *work: Awaitable[Any]) -> list[Any]:
        """Drain until ``work``, which runs in threads, is done; its results."""
        done = asyncio.gather(*work)
        await until(done.done, self.drain)
        return await done


@pytest.fixture
async def host(device: Device) -> AsyncIterator[Host]:
    made = Host(device)
    yield made
    made.channel.close()


async def twice(number: int) -> int:
    return 2 * number


def number(value: int) -> bytes:
    return struct.pack("q", value)


# -- against the host's end ----------------------------------------------------------------


@pytest.mark.all_loops
async def test_a_call(host: Host, device: Device) -> None:
    """A call from a thread is served by the loop's drain, and its wait gives the result."""
    host.add(1, twice)
    port = device.port()

    def kernel() -> Any:
        status, cell, ticket = port.call(1, number(21))
        assert status == Status.OK
        return port.wait(cell, ticket, 1)

    assert await host.serve(asyncio.to_thread(kernel)) == [(Status.OK, Kind.INT, number(42))]
    assert device.bell.load() == 1
    assert not device.taken.any()
    assert not device.left.any()
    assert device.trouble() is None


async def test_a_call_of_a_handler_that_waits(host: Host, device: Device) -> None:
    """A wait goes on while the handler is suspended, and ends with its reply."""
    gate = asyncio.Event()

    async def handler(value: int) -> int:
        await gate.wait()
        return value + 1

    host.add(1, handler)
    port = device.port()
    _, cell, ticket = port.call(1, number(1))
    host.drain()
    waiting = asyncio.ensure_future(asyncio.to_thread(port.wait, cell, ticket, 1))
    await until(lambda: host.callers[0].active == 1)
    assert not waiting.done()
    gate.set()
    assert await asyncio.wait_for(waiting, DEADLINE_S) == (Status.OK, Kind.INT, number(2))


async def test_poll(host: Host, device: Device) -> None:
    """poll() gives None until the reply is there, then gives it and frees the cell; it never waits."""
    host.add(1, twice)
    port = device.port()
    status, cell, ticket = port.call(1, number(4))
    assert (status, port.poll(cell, ticket)) == (Status.OK, None)
    assert device.cells(device.taken) == {cell}
    host.drain()
    await until(lambda: not host.callers[0].active)
    assert port.poll(cell, ticket) == (Status.OK, Kind.INT, number(8))
    assert not device.taken.any()


async def test_a_post(host: Host, device: Device) -> None:
    """A post takes no cell, is served like a call, and its place is free once the host has read it."""
    seen: list[int] = []

    async def handler(value: int) -> None:
        seen.append(value)

    host.add(1, handler, reply="")
    port = device.port(launch=3)
    assert [port.post(1, number(value)) for value in range(10)] == [Status.OK] * 10
    assert (device.posts.load(), device.tail.load()) == (10, 0)
    assert not device.taken.any()
    host.drain()
    await until(lambda: not host.callers[3].active)
    assert seen == list(range(10))
    assert device.tail.load() == 10


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 15, 16, 17, 255, 256])
@pytest.mark.parametrize("reply_nbytes", [0, 1, 8, 9, 256])
async def test_arguments_and_results_of_any_size(host: Host, device: Device, nbytes: int, reply_nbytes: int) -> None:
    """Arguments and results of up to 256 bytes go over unchanged."""
    data, result = bytes(range(1, nbytes + 1 if nbytes < 256 else 256)), bytes(range(256))[:reply_nbytes]
    data = data.ljust(nbytes, b"x")
    seen: list[bytes] = []

    async def handler(request: Request) -> bytes:
        seen.append(bytes(request.data or b""))
        return result

    host.owner.make = handler
    host.add(1, handler, "", "", nbytes=nbytes, reply_nbytes=reply_nbytes, plain=False)
    port = device.port()
    _, cell, ticket = port.call(1, data)
    host.drain()
    await until(lambda: not host.callers[0].active)
    assert seen == [data]
    assert port.wait(cell, ticket, 1) == (Status.OK, Kind.INT, result)


async def test_rows(host: Host, device: Device) -> None:
    """A request of several rows is as many rows of a batch, and its results come back together."""

    async def handler(column: Any) -> Any:
        return column + 1

    host.add(1, handler, batch=True)
    port, other = device.port(0), device.port(1)
    calls = [port.call(1, struct.pack("4q", *range(4)), 4), port.call(1, number(10))]
    _, cell, ticket = other.call(1, struct.pack("32q", *range(32)), 32)
    host.drain()
    await until(lambda: not any(caller.active for caller in host.callers))
    assert port.wait(calls[0][1], calls[0][2], 1)[2] == struct.pack("4q", *range(1, 5))
    assert port.wait(calls[1][1], calls[1][2], 1)[2] == number(11)
    assert other.wait(cell, ticket, 1)[2] == struct.pack("32q", *range(1, 33))


@pytest.mark.parametrize(
    ("function", "data", "stopped", "expected"),
    [
        (1, number(1), False, (Status.ERROR, Kind.NONE, number(77))),
        (2, number(1), False, (Status.ERROR, Kind.NONE, number(Code.UNKNOWN_FUNCTION))),
        (1, b"", False, (Status.ERROR, Kind.NONE, number(Code.WRONG_ARGUMENTS))),
        (1, number(1), True, (Status.CANCELLED, Kind.NONE, b"")),
    ],
)
async def test_other_replies(
    host: Host, device: Device, function: int, data: bytes, stopped: bool, expected: Any
) -> None:
    """An ERROR brings its code in place of the result, CANCELLED nothing; either frees the cell."""

    async def handler(value: int) -> int:
        raise LookupError

    host.add(1, handler)
    host.callers[0].stopped = stopped
    port = device.port()
    _, cell, ticket = port.call(function, data)
    host.drain()
    await until(lambda: not host.callers[0].active)
    assert port.wait(cell, ticket, function) == expected
    assert not device.taken.any()


@pytest.mark.parametrize("how", ["wait", "poll"])
@pytest.mark.parametrize("nbytes", [257, 1023])
@pytest.mark.parametrize("status", [Status.OK, 7])
def test_a_reply_of_a_size_that_no_host_sends(device: Device, how: str, nbytes: int, status: Any) -> None:
    """A control word that some kernel wrote is an ERROR, not a look at what is behind the cell; the cell is free."""
    port = device.port()
    _, cell, ticket = port.call(1, b"")
    device.shared.word(wire.cell_offset(cell) + 8).store(Reply(ticket, status, Kind.INT, nbytes).pack())
    reply = port.wait(cell, ticket, 1) if how == "wait" else port.poll(cell, ticket)
    assert reply == (Status.ERROR, Kind.NONE, number(Code.WRONG_REPLY))
    assert not device.taken.any()


async def test_many_threads(host: Host, device: Device) -> None:
    """Threads of several launches call at once: each gets the replies to its own calls, and no cell is given twice."""
    threads, rounds, burst = 6, 60, 5
    lock = threading.Lock()
    held: set[int] = set()

    async def handler(value: int) -> int:
        if value % 3 == 0:
            await asyncio.sleep(0)
        return 2 * value

    async def post(value: int) -> None:
        posted.append(value)

    posted: list[int] = []
    host.add(1, handler)
    host.add(2, post, reply="")

    def kernel(index: int) -> list[Any]:
        port = device.port(index % 4)
        wrong: list[Any] = []
        for round in range(rounds):
            calls = []
            for step in range(burst):
                value = (index * rounds + round) * burst + step
                status, cell, ticket = port.call(1, number(value))
                with lock:
                    if status != Status.OK or cell in held:
                        wrong.append((status, cell))
                    held.add(cell)
                calls.append((value, cell, ticket))
            port.post(2, number(index))
            for value, cell, ticket in reversed(calls):
                with lock:
                    held.discard(cell)
                reply = port.wait(cell, ticket, 1)
                if reply != (Status.OK, Kind.INT, number(2 * value)):
                    wrong.append((value, reply))
        return wrong

    assert await host.serve(*(asyncio.to_thread(kernel, index) for index in range(threads))) == [[]] * threads
    await until(lambda: host.channel.position == threads * rounds * (burst + 1), host.drain)
    await until(lambda: not any(caller.active for caller in host.callers))
    assert device.head.load() == threads * rounds * (burst + 1)
    assert device.posts.load() == device.tail.load() == threads * rounds
    assert sorted(posted) == sorted(list(range(threads)) * rounds)
    assert not device.taken.any()
    assert not device.left.any()
    assert host.channel.dropped == 0


async def test_more_posts_than_places(host: Host, device: Device) -> None:
    """A thread that posts more than there are places goes on as the host reads, over several laps of the ring."""
    total = 2 * wire.RING_SLOTS + 100
    seen = 0

    def handler(value: int) -> Any:
        nonlocal seen
        assert value == seen
        seen += 1
        raise LookupError  # costs no task

    host.add(1, handler, reply="")
    port = device.port()

    def kernel() -> set[int]:
        return {port.post(1, number(value)) for value in range(total)}

    assert await host.serve(asyncio.to_thread(kernel)) == [{Status.OK}]
    await until(lambda: seen == total, host.drain)
    assert device.tail.load() == device.posts.load() == total


# -- requests in the memory ----------------------------------------------------------------


@given(
    st.integers(0, 2**25 - 1),
    st.integers(1, 32).flatmap(
        lambda rows: st.tuples(st.just(rows), st.integers(0, wire.PAYLOAD_NBYTES // rows).map(lambda n: n * rows))
    ),
    st.integers(0, wire.LAUNCHES - 1),
    st.one_of(st.integers(0, 3 * wire.RING_SLOTS), st.just(1023 * wire.RING_SLOTS - 1), st.integers(0, 2**47)),
    st.randoms(use_true_random=False),
)
def test_a_request_is_what_the_rules_read(
    function: int, shape: tuple[int, int], launch: int, head: int, rng: Any
) -> None:
    """Call and post write a sound descriptor with exactly what they were given, at the ticket that was next."""
    rows, nbytes = shape
    data = rng.randbytes(nbytes)
    device = Device()
    device.head.store(head)
    port = device.port(launch)
    status, cell, ticket = port.call(function, data, rows)
    assert (status, ticket, device.head.load()) == (Status.OK, head, head + 1)
    assert port.post(function, data, rows) == Status.OK
    for at, where in ((head, cell), (head + 1, wire.NO_CELL)):
        found = device.descriptor(at)
        assert found is not None
        assert found.sound
        assert (found.function, found.launch, found.cell, found.extent) == (function, launch, where, (nbytes, rows))
        assert device.arguments(found) == data
        if rows == 1:
            assert found.form == (nbytes if nbytes <= wire.INLINE_NBYTES else Form.PAYLOAD)
        else:
            assert found.form == Form.ROWS
    assert not device.published(head + 2)
    assert device.bell.load() == 1


def test_launches_begin_with_different_cells(device: Device) -> None:
    """Ports of different launches take cells from different places, so that they do not meet."""
    cells = [device.port(launch).call(1, b"")[1] for launch in range(8)]
    assert len({cell // 32 for cell in cells}) == 8


@pytest.mark.parametrize(("data", "rows"), [(bytes(257), 1), (b"", 0), (bytes(33), 33), (bytes(10), 3), (b"", 2**31)])
def test_requests_that_cannot_be(device: Device, data: bytes, rows: int) -> None:
    """More than 256 bytes, no row, more than 32 or broken ones raise ValueError; nothing was sent or taken."""
    port = device.port()
    for send in (port.call, port.post):
        with pytest.raises(ValueError, match="256 bytes"):
            send(1, data, rows)
    assert (device.head.load(), device.posts.load(), device.bell.load()) == (0, 0, 0)
    assert not device.taken.any()


@pytest.mark.parametrize("cell", [wire.CELLS, wire.NO_CELL, 2**31])
def test_cells_that_there_are_not(device: Device, cell: int) -> None:
    """wait(), poll() and leave() raise ValueError for a cell that there is not."""
    port = device.port()
    for use in (lambda: port.wait(cell, 0, 1), lambda: port.poll(cell, 0), lambda: port.leave(cell, 0)):
        with pytest.raises(ValueError, match="no such cell"):
            use()


# -- the parameter -------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 40, 63, 65, 128])
def test_a_parameter_of_another_length(device: Device, nbytes: int) -> None:
    """Anything but 64 bytes is no launch parameter."""
    with pytest.raises(ValueError, match="no launch parameter"):
        Port(bytes(nbytes), device)


@pytest.mark.parametrize(
    ("field", "value"),
    [("shared", 0), ("state", 0), ("bell", 0), ("launch", wire.LAUNCHES), ("launch", 2**32 - 1)],
)
def test_a_parameter_that_cannot_be(device: Device, field: str, value: int) -> None:
    """A null address or a launch that there is not raises ValueError."""
    sound = LaunchParameter(
        device.shared.host_address, device.state.host_address, device.bell.host_address, FOREVER_NS, 0
    )
    Port(sound.pack(), device)
    with pytest.raises(ValueError, match="no launch parameter"):
        Port(sound._replace(**{field: value}).pack(), device)


@pytest.mark.parametrize("version", [0, wire.WIRE_VERSION + 1, 2**32 - 1])
def test_a_parameter_of_another_version(device: Device, version: int) -> None:
    """A parameter of another wire version raises ValueError, and holds no reference."""
    data = bytearray(
        LaunchParameter(device.shared.host_address, device.state.host_address, device.bell.host_address, 1, 0).pack()
    )
    Port(data, device)
    data[36:40] = version.to_bytes(4, "little")
    before = sys.getrefcount(device)
    with pytest.raises(ValueError, match="wire version"):
        Port(data, device)
    assert sys.getrefcount(device) == before
    data.clear()  # not exported any more


def test_the_owner_lives_as_long_as_the_port() -> None:
    """A port holds whoever keeps its memory alive, and lets go of it, also out of a cycle."""
    device = Device()
    port, watched = device.port(), weakref.ref(device)
    del device
    assert port.call(1, b"")[0] == Status.OK
    assert watched() is not None
    del port
    assert watched() is None
    device = Device()
    device.own = device.port()  # type: ignore[attr-defined]
    watched = weakref.ref(device)
    del device
    gc.collect()
    assert watched() is None


def test_sending_holds_nothing(device: Device) -> None:
    """The arguments are copied: a call keeps no reference to them, nor a buffer."""
    port = device.port()
    data = bytearray(b"arguments of more than eight bytes")
    before = sys.getrefcount(data)
    for _ in range(100):
        port.call(1, data)
        port.post(1, data)
    assert sys.getrefcount(data) == before
    data.clear()


# -- words of the launch -------------------------------------------------------------------


def test_cancelled(device: Device) -> None:
    """cancelled() is the launch's own word, and leaves the note that it was seen."""
    ports = [device.port(launch) for launch in (0, 1)]
    assert [port.cancelled() for port in ports] == [False, False]
    assert device.block(wire.LAUNCH_SEEN) == 0
    device.cancel(1)
    assert device.block(wire.LAUNCH_SEEN, 1) == 0
    assert [port.cancelled() for port in ports] == [False, True]
    assert [device.block(wire.LAUNCH_SEEN, launch) for launch in (0, 1)] == [0, 1]


@given(st.integers(0, wire.LAUNCHES - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_progress(launch: int, done: int, total: int) -> None:
    """progress() writes its two words into the launch's block and nothing else."""
    device = Device()
    device.port(launch).progress(done, total)
    assert device.block(wire.LAUNCH_PROGRESS, launch) == done
    assert device.block(wire.LAUNCH_PROGRESS + 8, launch) == total
    at = wire.launch_offset(launch) + wire.LAUNCH_PROGRESS
    device.shared.array[at : at + 16] = 0
    assert not device.shared.array[: wire.slot_offset(0)].any()
    assert not device.state.array.any()


# -- waits that end without a reply --------------------------------------------------------


def test_a_wait_that_times_out(device: Device) -> None:
    """A wait without a reply ends after the timeout, leaves the cell, and tells the host which function it was."""
    port = device.port(launch=2, timeout_ns=SHORT_NS)
    _, cell, ticket = port.call(4711, b"")
    before = time.monotonic_ns()
    assert port.wait(cell, ticket, 4711) == (Status.TIMEOUT, Kind.NONE, b"")
    assert time.monotonic_ns() - before >= SHORT_NS
    assert device.trouble(2) == (4711, Code.NO_ANSWER)
    assert device.cells(device.taken) == device.cells(device.left) == {cell}
    assert int(device.tickets[cell]) == ticket
    assert device.trouble(0) is None


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (0, 2, 1, 3)])
def test_a_call_that_was_given_up_has_a_word_of_its_own(device: Device, order: tuple[int, ...]) -> None:
    """Whatever else goes wrong, and when: the host sees that a call was given up. Of each kind the first stays."""
    troubles = [(1, Code.NO_ANSWER), (2, Code.NO_ANSWER), (3, Code.TOO_LARGE), (4, Code.WRONG_REPLY)]
    port = device.port(launch=3)
    for i in order:
        port.report(*troubles[i])
    assert wire.trouble(device.block(wire.LAUNCH_GIVEN_UP, 3)) == (1, Code.NO_ANSWER)
    assert wire.trouble(device.block(wire.LAUNCH_TROUBLE, 3)) == (3, Code.TOO_LARGE)


def test_the_timeout_can_be_set(device: Device) -> None:
    """A port's timeout counts for the waits that follow."""
    port = device.port()
    assert port.timeout_ns == FOREVER_NS
    port.timeout_ns = 0
    _, cell, ticket = port.call(1, b"")
    assert port.wait(cell, ticket, 1)[0] == Status.TIMEOUT


def test_a_wait_that_is_cancelled(device: Device) -> None:
    """A wait of a launch that was asked to stop ends CANCELLED, leaves the cell, and reports no trouble."""
    port = device.port()
    _, cell, ticket = port.call(1, b"")
    device.cancel()
    assert port.wait(cell, ticket, 1) == (Status.CANCELLED, Kind.NONE, b"")
    assert device.block(wire.LAUNCH_SEEN) == 1
    assert device.trouble() is None
    assert device.cells(device.left) == {cell}


async def test_a_wait_is_cancelled_under_way(device: Device) -> None:
    """A wait that has begun looks at the cancel word by itself."""
    port = device.port()
    _, cell, ticket = port.call(1, b"")
    waiting = asyncio.ensure_future(asyncio.to_thread(port.wait, cell, ticket, 1))
    await asyncio.sleep(0)
    device.cancel()
    assert await asyncio.wait_for(waiting, DEADLINE_S) == (Status.CANCELLED, Kind.NONE, b"")


def test_a_reply_that_is_there_comes_first(device: Device) -> None:
    """If the reply is there, it does not matter that the launch was cancelled or has no time left."""
    port = device.port(timeout_ns=0)
    _, cell, ticket = port.call(1, b"")
    device.cancel()
    device.reply(cell, ticket, b"yes", kind=Kind.UINT)
    assert port.wait(cell, ticket, 1) == (Status.OK, Kind.UINT, b"yes")
    assert not device.taken.any()


@pytest.mark.parametrize("timeout_ns", [2**62, 2**63 - 1, 2**63, 2**64 - 1])
async def test_very_long_timeouts(device: Device, timeout_ns: int) -> None:
    """Whatever a parameter can say, in 64 bits without a sign, is waited for, as on a GPU, and asleep."""
    port = device.port(timeout_ns=timeout_ns)
    _, cell, ticket = port.call(1, b"")

    def kernel() -> Any:
        before = time.thread_time()
        return port.wait(cell, ticket, 1), time.thread_time() - before

    waiting = asyncio.ensure_future(asyncio.to_thread(kernel))
    await asyncio.sleep(0.1)  # long enough to tell a wait that sleeps from one that does not
    device.reply(cell, ticket, b"late")
    reply, busy_s = await asyncio.wait_for(waiting, DEADLINE_S)
    assert reply == (Status.OK, Kind.NONE, b"late")
    assert busy_s < 0.03


# -- cells ---------------------------------------------------------------------------------


def test_every_cell_is_given_once(device: Device) -> None:
    """Until the last cell is taken no cell is given twice; freed ones are given again."""
    ports = [device.port(launch, SHORT_NS) for launch in (0, 5, wire.LAUNCHES - 1)]
    calls = [ports[index % 3].call(1, b"") for index in range(wire.CELLS)]
    assert {status for status, _, _ in calls} == {Status.OK}
    assert {cell for _, cell, _ in calls} == set(range(wire.CELLS))
    assert (device.taken == ALL).all()
    assert ports[0].call(1, b"") == (Status.TIMEOUT, wire.NO_CELL, 0)
    for _, cell, ticket in calls[100:110]:
        device.reply(cell, ticket)
        assert ports[0].poll(cell, ticket) == (Status.OK, Kind.NONE, b"")
    again = {ports[0].call(1, b"")[1] for _ in range(10)}
    assert again == {cell for _, cell, _ in calls[100:110]}


def test_a_call_without_a_cell_times_out(device: Device) -> None:
    """If all cells are taken, a call waits for one, then ends with TIMEOUT and sends nothing."""
    device.taken[:] = ALL
    port = device.port(launch=1, timeout_ns=SHORT_NS)
    before = time.monotonic_ns()
    status, _, _ = port.call(99, b"")
    assert status == Status.TIMEOUT
    assert time.monotonic_ns() - before >= SHORT_NS
    assert (device.head.load(), device.trouble(1)) == (0, (99, Code.NO_ANSWER))


def test_a_call_without_a_cell_is_cancelled(device: Device) -> None:
    """A call that waits for a cell ends CANCELLED if its launch was asked to stop, and sends nothing."""
    device.taken[:] = ALL
    device.cancel()
    assert device.port().call(99, b"")[0] == Status.CANCELLED
    assert (device.head.load(), device.trouble(), device.block(wire.LAUNCH_SEEN)) == (0, None, 1)


async def test_a_call_goes_on_when_a_cell_is_free(device: Device) -> None:
    """A call that waits for a cell takes the one that somebody frees."""
    other, port = device.port(0), device.port(1)
    _, cell, ticket = other.call(1, b"")
    device.taken[:] = ALL
    calling = asyncio.ensure_future(asyncio.to_thread(port.call, 2, b""))
    device.reply(cell, ticket)
    assert other.poll(cell, ticket) is not None
    assert await asyncio.wait_for(calling, DEADLINE_S) == (Status.OK, cell, 1)


def test_a_cell_that_was_left(device: Device) -> None:
    """A cell that was left is nobody's until the late reply is written, then somebody else's, whom that reply does
    not disturb."""
    port = device.port(timeout_ns=0)
    _, cell, ticket = port.call(1, b"")
    port.leave(cell, ticket)
    device.taken[:] = ALL
    assert device.cells(device.left) == {cell}
    assert port.call(2, b"")[0] == Status.TIMEOUT
    device.reply(cell, ticket - 1 if ticket else 2**47, b"other")  # of somebody else, long ago
    assert port.call(2, b"")[0] == Status.TIMEOUT
    device.reply(cell, ticket, b"late")
    status, again, second = port.call(3, b"")
    assert (status, again) == (Status.OK, cell)
    assert not device.left.any()
    assert port.poll(cell, second) is None
    assert port.poll(cell, ticket + 2**40) is None
    device.reply(cell, second, b"own")
    assert port.wait(cell, second, 3) == (Status.OK, Kind.NONE, b"own")
    assert (device.taken != ALL).sum() == 1


def test_the_right_one_of_many_left_cells_is_reclaimed(device: Device) -> None:
    """Of the cells that were left exactly those with their own late reply are given again, each once."""
    port = device.port(timeout_ns=0)
    calls = [port.call(1, b"")[1:] for _ in range(200)]
    for cell, ticket in calls:
        port.leave(cell, ticket)
    device.taken[:] = ALL
    answered = calls[::7]
    for cell, ticket in answered:
        device.reply(cell, ticket)
    given_again = [port.call(1, b"")[1] for _ in answered]
    assert sorted(given_again) == sorted(cell for cell, _ in answered)
    assert port.call(1, b"")[0] == Status.TIMEOUT
    assert device.cells(device.left) == {cell for cell, _ in calls} - set(given_again)


def test_a_free_cell_is_taken_before_one_that_was_left(device: Device) -> None:
    """A cell that was left keeps its bit: as long as there are others nearby, those are taken."""
    port = device.port()
    _, cell, ticket = port.call(1, b"")
    port.leave(cell, ticket)
    cells = {port.call(1, b"")[1] for _ in range(31)}
    assert len(cells) == 31
    assert cell not in cells


async def test_a_late_reply_of_the_host(host: Host, device: Device) -> None:
    """After a TIMEOUT the handler goes on; its reply frees the cell for the next call, which gets its own reply."""
    gate = asyncio.Event()

    async def handler(value: int) -> int:
        await gate.wait()
        return value

    host.add(1, handler)
    host.add(2, twice)
    port = device.port(timeout_ns=0)
    _, cell, ticket = port.call(1, number(1))
    host.drain()
    assert port.wait(cell, ticket, 1)[0] == Status.TIMEOUT
    device.taken[:] = ALL
    assert port.call(2, number(4))[0] == Status.TIMEOUT
    gate.set()
    await until(lambda: not host.callers[0].active)
    status, again, second = port.call(2, number(5))
    assert (status, again) == (Status.OK, cell)
    assert port.poll(cell, second) is None
    host.drain()
    await until(lambda: not host.callers[0].active)
    assert port.poll(cell, second) == (Status.OK, Kind.INT, number(10))


async def test_left_cells_under_load(host: Host, device: Device) -> None:
    """Threads that leave some of their calls, with few cells, neither get each other's replies nor lose a cell."""
    few = 24
    device.taken[:] = ALL
    device.taken[0] = ALL << np.uint32(few)

    async def handler(value: int) -> int:
        if value % 2:
            await asyncio.sleep(0)
        return 2 * value

    host.add(1, handler)

    def kernel(index: int) -> list[Any]:
        port, wrong = device.port(index), []
        for step in range(300):
            value = index * 1000 + step
            status, cell, ticket = port.call(1, number(value))
            if status != Status.OK:
                wrong.append((value, status))
            elif step % 3 == 0:
                port.leave(cell, ticket)
            elif (reply := port.wait(cell, ticket, 1)) != (Status.OK, Kind.INT, number(2 * value)):
                wrong.append((value, reply))
        return wrong

    assert await host.serve(*(asyncio.to_thread(kernel, index) for index in range(4))) == [[]] * 4
    await until(lambda: host.channel.position == 1200, host.drain)
    await until(lambda: not any(caller.active for caller in host.callers))
    # Every cell is free, or was left and has its reply: all can be had again.
    port = device.port(timeout_ns=0)
    assert {port.call(1, number(0))[1] for _ in range(few)} == set(range(few))
    assert port.call(1, number(0))[0] == Status.TIMEOUT


# -- posts ---------------------------------------------------------------------------------


def fill_posts(device: Device, start: int = 0) -> Port:
    """Take all places for posts, as posts that the host has not read."""
    device.tail.store(start)
    device.posts.store(start + wire.POSTS)
    return device.port(timeout_ns=SHORT_NS)


@pytest.mark.parametrize("start", [0, 5 * wire.POSTS, 2**63 - 5, 2**64 - 5])
def test_a_post_without_a_place_times_out(device: Device, start: int) -> None:
    """If the host has read none of that many posts, a post rings, waits, ends with TIMEOUT and sends nothing."""
    port = fill_posts(device, start)
    assert port.post(98, b"") == Status.TIMEOUT
    assert device.bell.load() == 1
    assert (device.head.load(), device.trouble()) == (0, (98, Code.NO_ANSWER))
    assert device.posts.load() == (start + wire.POSTS) % 2**64
    device.tail.store(start + 2)
    assert [port.post(98, b"") for _ in range(3)] == [Status.OK, Status.OK, Status.TIMEOUT]
    assert device.head.load() == 2


def test_a_post_without_a_place_is_cancelled(device: Device) -> None:
    """A post that waits for a place ends CANCELLED if its launch was asked to stop."""
    port = fill_posts(device)
    device.cancel()
    assert port.post(98, b"") == Status.CANCELLED
    assert (device.head.load(), device.trouble(), device.posts.load()) == (0, None, wire.POSTS)


async def test_a_post_goes_on_when_the_host_has_read(device: Device) -> None:
    """A post that waits, which rings the bell meanwhile, goes on when the tail is published."""
    port = fill_posts(device)
    port.timeout_ns = FOREVER_NS
    posting = asyncio.ensure_future(asyncio.to_thread(port.post, 1, b""))
    await until(lambda: device.bell.load())
    assert device.head.load() == 0
    device.tail.store(1)
    assert await asyncio.wait_for(posting, DEADLINE_S) == Status.OK
    assert device.head.load() == 1
    assert device.posts.load() == wire.POSTS + 1


async def test_many_posts_wait(device: Device) -> None:
    """Of threads that wait for a place as many go on as there are places."""
    port = fill_posts(device)
    port.timeout_ns = FOREVER_NS
    posting = [asyncio.ensure_future(asyncio.to_thread(port.post, 1, b"")) for _ in range(4)]
    for places in range(1, 5):
        device.tail.store(places)
        await until(lambda places=places: device.head.load() == places)
        # None of those that try in vain keeps a place: after each other they are as many as were given.
        await until(lambda places=places: device.posts.load() == wire.POSTS + places)
    assert await asyncio.wait_for(asyncio.gather(*posting), DEADLINE_S) == [Status.OK] * 4


def test_calls_need_no_place(device: Device) -> None:
    """Calls go out although no post can."""
    port = fill_posts(device)
    assert port.call(1, b"")[0] == Status.OK


# -- against a model -----------------------------------------------------------------------

SIZES = st.one_of(st.integers(0, 9), st.integers(0, wire.PAYLOAD_NBYTES))


class PortMachine(RuleBasedStateMachine):
    """Calls, posts and replies in any order, with few cells and few places, against a plain account of them."""

    def __init__(self) -> None:
        super().__init__()
        self.device = Device()
        self.ports = [self.device.port(launch, 0) for launch in (0, 1, 511, wire.LAUNCHES - 1)]
        self.free: set[int] = set()
        self.waiting: dict[int, int] = {}
        """Cell to ticket of calls that are under way and have no reply."""
        self.replied: dict[int, tuple[int, tuple[int, int, bytes]]] = {}
        """The same of those that have one, with what it is."""
        self.left: dict[int, tuple[int, bool]] = {}
        """Cell to ticket of calls that were given up, and whether the reply was written."""
        self.cancelled: set[int] = set()
        self.requests: dict[int, tuple[int, int, int, bytes, int]] = {}

    @initialize(
        cells=st.sets(st.integers(0, wire.CELLS - 1), min_size=1, max_size=4),
        near=st.sets(st.integers(0, 64), max_size=3),
        head=st.one_of(
            st.just(0), st.integers(1, 1100).map(lambda lap: lap * wire.RING_SLOTS - 3), st.integers(0, 2**47)
        ),
        places=st.integers(0, 4),
        read=st.one_of(st.integers(0, 2**40), st.integers(2**64 - 10, 2**64 - 1)),
    )
    def start(self, cells: set[int], near: set[int], head: int, places: int, read: int) -> None:
        self.free = cells | near
        self.device.taken[:] = ALL
        for cell in self.free:
            self.device.taken[cell // 32] ^= np.uint32(1 << cell % 32)
        self.head = head
        self.device.head.store(head)
        self.read, self.reserved = read, read + wire.POSTS - places
        self.device.tail.store(self.read)
        self.device.posts.store(self.reserved)

    def sent(self, port: int, function: int, cell: int, data: bytes, rows: int) -> None:
        launch = (0, 1, 511, wire.LAUNCHES - 1)[port]
        self.requests[self.head] = (function, launch, cell, data, rows)
        self.head += 1

    @rule(
        port=st.integers(0, 3),
        function=st.integers(0, 2**25 - 1),
        nbytes=SIZES,
        rows=st.sampled_from([1, 1, 2, 32]),
        rng=st.randoms(use_true_random=False),
    )
    def call(self, port: int, function: int, nbytes: int, rows: int, rng: Any) -> None:
        data = rng.randbytes(nbytes // rows * rows)
        can = self.free | {cell for cell, (_, late) in self.left.items() if late}
        status, cell, ticket = self.ports[port].call(function, data, rows)
        if not can:
            assert status == (Status.CANCELLED if port in self.cancelled else Status.TIMEOUT)
            return
        assert (status, ticket) == (Status.OK, self.head)
        assert cell in can
        self.free.discard(cell)
        self.left.pop(cell, None)
        self.waiting[cell] = ticket
        self.sent(port, function, cell, data, rows)

    @rule(
        port=st.integers(0, 3),
        function=st.integers(0, 2**25 - 1),
        nbytes=SIZES,
        rng=st.randoms(use_true_random=False),
    )
    def post(self, port: int, function: int, nbytes: int, rng: Any) -> None:
        data = rng.randbytes(nbytes)
        status = self.ports[port].post(function, data)
        if self.reserved - self.read >= wire.POSTS:
            assert status == (Status.CANCELLED if port in self.cancelled else Status.TIMEOUT)
            return
        assert status == Status.OK
        self.reserved += 1
        self.sent(port, function, wire.NO_CELL, data, 1)

    @precondition(lambda self: self.reserved > self.read)
    @rule(count=st.integers(1, 3))
    def host_reads(self, count: int) -> None:
        self.read = min(self.read + count, self.reserved)
        self.device.tail.store(self.read)

    @rule(port=st.integers(0, 3))
    def host_cancels(self, port: int) -> None:
        self.device.cancel((0, 1, 511, wire.LAUNCHES - 1)[port])
        self.cancelled.add(port)

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(),
        status=st.sampled_from(Status),
        kind=st.sampled_from(Kind),
        nbytes=SIZES,
        code=st.integers(-(2**63), 2**63 - 1),
        rng=st.randoms(use_true_random=False),
    )
    def host_replies(self, data: Any, status: Status, kind: Kind, nbytes: int, code: int, rng: Any) -> None:
        cell = data.draw(st.sampled_from(sorted(self.waiting)))
        ticket = self.waiting.pop(cell)
        body = rng.randbytes(nbytes) if status == Status.OK else b""
        self.device.reply(cell, ticket, body, status=status, kind=kind, code=code)
        self.replied[cell] = (ticket, (status, kind, number(code) if status == Status.ERROR else body))

    @precondition(lambda self: any(not late for _, late in self.left.values()))
    @rule(data=st.data(), nbytes=SIZES)
    def host_replies_late(self, data: Any, nbytes: int) -> None:
        cell = data.draw(st.sampled_from(sorted(cell for cell, (_, late) in self.left.items() if not late)))
        ticket, _ = self.left[cell]
        self.device.reply(cell, ticket, b"\xee" * nbytes)
        self.left[cell] = (ticket, True)

    @precondition(lambda self: self.replied)
    @rule(data=st.data(), port=st.integers(0, 3), polls=st.booleans())
    def collect(self, data: Any, port: int, polls: bool) -> None:
        cell = data.draw(st.sampled_from(sorted(self.replied)))
        ticket, expected = self.replied.pop(cell)
        used = self.ports[port]
        assert (used.poll(cell, ticket) if polls else used.wait(cell, ticket, 1)) == expected
        self.free.add(cell)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), port=st.integers(0, 3), how=st.sampled_from(["wait", "leave"]))
    def give_up(self, data: Any, port: int, how: str) -> None:
        cell = data.draw(st.sampled_from(sorted(self.waiting)))
        ticket = self.waiting.pop(cell)
        if how == "wait":
            expected = Status.CANCELLED if port in self.cancelled else Status.TIMEOUT
            assert self.ports[port].wait(cell, ticket, 5)[0] == expected
        else:
            self.ports[port].leave(cell, ticket)
        self.left[cell] = (ticket, False)

    @precondition(lambda self: self.replied)
    @rule(data=st.data(), port=st.integers(0, 3))
    def leave_although_there_is_a_reply(self, data: Any, port: int) -> None:
        cell = data.draw(st.sampled_from(sorted(self.replied)))
        ticket, _ = self.replied.pop(cell)
        self.ports[port].leave(cell, ticket)
        self.left[cell] = (ticket, True)

    @invariant()
    def nobody_has_a_reply_that_was_not_given(self) -> None:
        for cell, ticket in self.waiting.items():
            assert self.ports[0].poll(cell, ticket) is None

    @invariant()
    def the_memory_says_the_same(self) -> None:
        if not hasattr(self, "head"):
            return
        device = self.device
        assert device.cells(~device.taken) == self.free  # so all others are taken
        assert device.cells(device.left) == set(self.left)
        assert {cell: int(device.tickets[cell]) for cell in self.left} == {
            cell: ticket for cell, (ticket, _) in self.left.items()
        }
        assert device.head.load() == self.head
        assert device.posts.load() == self.reserved % 2**64
        assert not device.published(self.head)

    def teardown(self) -> None:
        for ticket, (function, launch, cell, data, rows) in self.requests.items():
            found = self.device.descriptor(ticket)
            assert found is not None
            assert found.sound
            assert (found.function, found.launch, found.cell) == (function, launch, cell)
            assert found.extent == (len(data), rows)
            assert self.device.arguments(found) == data


TestPort = PortMachine.TestCase
"""The port's memory after any sequence of calls, posts and replies is what a plain account says."""
