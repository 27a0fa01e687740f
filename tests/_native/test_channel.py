"""``channel.c``: the host's end of a channel, given descriptors that the test writes as a kernel would."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import inspect
import struct
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload._native import Caller, Channel, Handler, Request, calling, now_ns
from aiooffload.drivers.mapped import MappedMemory
from aiooffload.rules import wire
from aiooffload.rules.wire import Code, Descriptor, Form, Kind, Reply, Status

EAGER = sys.version_info >= (3, 12)
"""Whether the first step of a handler is taken within the drain."""
FOREVER_NS = 60 * 10**9
DEADLINE_S = 10.0
U64 = st.integers(0, 2**64 - 1)
ROOT = Path(__file__).parents[2]

INTEGERS = {
    "b": (-(2**7), 2**7 - 1),
    "B": (0, 2**8 - 1),
    "h": (-(2**15), 2**15 - 1),
    "H": (0, 2**16 - 1),
    "i": (-(2**31), 2**31 - 1),
    "I": (0, 2**32 - 1),
    "q": (-(2**63), 2**63 - 1),
    "Q": (0, 2**64 - 1),
}
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "?": st.booleans(),
    **{letter: st.integers(*limits) for letter, limits in INTEGERS.items()},
    "f": st.floats(width=32),
    "d": st.floats(),
}
LETTERS = "".join(VALUES)


def c_struct(letters: str) -> str:
    """A format of ``struct`` for a C struct with these members, padded at its end as C does."""
    return f"@{letters}0{max(letters, key=struct.calcsize, default='B')}"


def numpy_struct(letters: str) -> np.dtype[Any]:
    """The same for NumPy: one member by itself, several as fields f0, f1 and so on."""
    return np.dtype(",".join(letters), align=True) if len(letters) > 1 else np.dtype(letters or "V0")


async def until(condition: Callable[[], object]) -> None:
    """Let the loop run until ``condition`` holds."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 (it is about memory, which sets no event)
            await asyncio.sleep(0)


class Answer(NamedTuple):
    """What a kernel finds in its reply cell; the body of an ERROR is its code."""

    status: int
    kind: int
    body: bytes | int


OK = Answer(Status.OK, Kind.NONE, b"")
CANCELLED = Answer(Status.CANCELLED, Kind.NONE, b"")


def error(code: int) -> Answer:
    return Answer(Status.ERROR, Kind.NONE, code)


class Owner:
    """Records what the channel asks of it, and does what the test wants."""

    def __init__(self) -> None:
        self.begun: list[Request] = []
        self.failures: list[tuple[Request, BaseException]] = []
        self.encoded: list[tuple[Request, Any]] = []
        self.idled: list[Caller] = []
        self.refusals: list[tuple[Caller, int, Handler | None, int]] = []
        self.on_begin: Callable[[Request], object] = lambda request: None
        self.on_failed: Callable[[Request, BaseException], object] = lambda request, error: None
        self.on_encode: Callable[[Request, Any], Any] | None = None
        self.on_idle: Callable[[Caller], object] = lambda caller: None

    def begin(self, request: Request) -> None:
        self.begun.append(request)
        self.on_begin(request)

    def failed(self, request: Request, error: BaseException) -> None:
        self.failures.append((request, error))
        self.on_failed(request, error)

    def encode(self, request: Request, result: Any) -> bytes:
        self.encoded.append((request, result))
        if self.on_encode is None:
            raise TypeError(f"no reply: {result!r}")
        return self.on_encode(request, result)

    def idle(self, caller: Caller) -> None:
        self.idled.append(caller)
        self.on_idle(caller)

    def refused(self, caller: Caller, function: int, handler: Handler | None, nbytes: int) -> None:
        self.refusals.append((caller, function, handler, nbytes))

    def forget(self) -> None:
        """Let go of everything it has recorded."""
        for record in (self.begun, self.failures, self.encoded, self.idled, self.refusals):
            record.clear()


class Host:
    """A channel, its memory, and a kernel's part in it."""

    def __init__(self) -> None:
        self.memory = MappedMemory(wire.SHARED_NBYTES)
        self.words = self.memory.array.view(np.uint64)
        self.owner = Owner()
        self.handlers: dict[int, Handler] = {}
        self.channel = Channel(
            self.memory.host_address, self.memory, asyncio.get_running_loop(), self.handlers, self.owner
        )
        self.ticket = 0
        self.callers: list[Caller] = []

    def attach(self, launch: int = 0, context: contextvars.Context | None = None) -> Caller:
        caller = Caller(context or contextvars.copy_context(), f"launch {launch}")
        self.channel.attach(launch, caller)
        self.callers.append(caller)
        return caller

    def add(
        self,
        function: int,
        callable: Callable[..., Any],
        letters: str = "",
        reply: str = "",
        *,
        nbytes: int | None = None,
        reply_nbytes: int | None = None,
        kind: Kind = Kind.NONE,
        plain: bool | None = None,
        batch: bool = False,
        context: contextvars.Context | None = None,
        read: Callable[[Any, Any], Any] = np.frombuffer,
    ) -> Handler:
        handler = make_handler(
            callable=callable,
            context=context or contextvars.copy_context(),
            formats=letters.encode(),
            read=read,
            dtype=numpy_struct(letters),
            nbytes=struct.calcsize(c_struct(letters)) if nbytes is None else nbytes,
            reply_format=reply.encode(),
            reply_kind=kind,
            reply_nbytes=struct.calcsize(reply) if reply_nbytes is None else reply_nbytes,
            plain=not batch if plain is None else plain,
            batch=batch,
        )
        self.handlers[function] = handler
        return handler

    def send(
        self, function: int, data: bytes = b"", *, cell: int = wire.NO_CELL, launch: int = 0, rows: int = 1
    ) -> int:
        """Write a request as a kernel does; its ticket."""
        ticket, self.ticket = self.ticket, self.ticket + 1
        form, argument = len(data), int.from_bytes(data, "little")
        if rows > 1 or len(data) > wire.INLINE_NBYTES:
            form, argument = Form.PAYLOAD if rows == 1 else Form.ROWS, len(data) | rows << 16
            at = wire.payload_offset(ticket)
            self.memory.array[at : at + len(data)] = np.frombuffer(data, np.uint8)
        self.write(ticket, *Descriptor(ticket, function, launch, cell, form, argument).pack())
        return ticket

    def write(self, ticket: int, argument: int, control: int) -> None:
        at = wire.slot_offset(ticket) // 8
        self.words[at] = argument
        self.words[at + 1] = control

    def drain(self, budget_ns: int = FOREVER_NS) -> int:
        return self.channel.drain(budget_ns)

    async def settle(self) -> None:
        """Let the loop run until nothing is left of what was drained."""
        await until(lambda: not any(caller.active for caller in self.callers))
        await asyncio.sleep(0)  # for the callbacks of tasks, where there are any

    def reply(self, cell: int, ticket: int) -> Answer | None:
        """The reply to ``ticket``, if the cell has it."""
        at = wire.cell_offset(cell)
        value, control = (int(word) for word in self.words[at // 8 : at // 8 + 2])
        head = Reply.unpack(control)
        if head.ticket != ticket:
            return None
        if head.status == Status.ERROR:
            assert head.nbytes == 0
            return Answer(head.status, head.kind, int.from_bytes(value.to_bytes(8, "little"), "little", signed=True))
        data = value.to_bytes(8, "little")
        if head.nbytes > wire.INLINE_NBYTES:
            data = self.memory.array[at + wire.CELL_DATA :][: head.nbytes].tobytes()
        return Answer(head.status, head.kind, data[: head.nbytes])

    def used_cells(self) -> set[int]:
        """The cells that were ever answered."""
        first, stride = wire.cell_offset(0) // 8, (wire.cell_offset(1) - wire.cell_offset(0)) // 8
        controls = self.words[first : first + wire.CELLS * stride].reshape(wire.CELLS, stride)[:, 1]
        return {int(cell) for cell in np.flatnonzero(controls)}

    @property
    def tail(self) -> int:
        return int(self.words[wire.TAIL_OFFSET // 8])


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    made = Host()
    yield made
    made.channel.close()


def make_handler(**fields: Any) -> Handler:
    """A handler with these fields, and something harmless in all others."""
    harmless = {
        "callable": nothing,
        "context": contextvars.copy_context(),
        "formats": b"",
        "read": np.frombuffer,
        "dtype": None,
        "nbytes": 0,
        "reply_format": b"",
        "reply_kind": 0,
        "reply_nbytes": 0,
        "plain": True,
        "batch": False,
    }
    return Handler(**{**harmless, **fields})


async def nothing(*arguments: Any) -> None:
    """A handler that has nothing to say."""


def count_requests() -> int:
    """How many requests there are, those of earlier tests that failed included."""
    gc.collect()
    return sum(type(found) is Request for found in gc.get_objects())


# -- plain handlers ------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(LETTERS).flatmap(lambda letter: st.tuples(st.just(letter), VALUES[letter])), max_size=32)
)
async def test_arguments_are_laid_out_like_a_c_struct(members: list[tuple[str, Any]]) -> None:
    """A plain handler gets each argument from where C has it in a struct, with Python's type for it."""
    host = Host()
    host.attach()
    seen: list[Any] = []

    async def handler(*arguments: Any) -> None:
        seen.extend(arguments)

    letters = "".join(letter for letter, _ in members)
    values = [value for _, value in members]
    host.add(1, handler, letters)
    ticket = host.send(1, struct.pack(c_struct(letters), *values), cell=3)
    assert host.drain() == 1
    await host.settle()
    assert repr(seen) == repr(values)  # tells types, signs of zero and not-a-numbers apart
    assert host.reply(3, ticket) == OK
    assert not host.owner.begun + host.owner.refusals + host.owner.encoded
    host.channel.close()


@pytest.mark.parametrize("letter", LETTERS)
async def test_as_many_arguments_as_fit(host: Host, letter: str) -> None:
    """256 bytes of arguments of one type reach the handler, in order."""
    host.attach()
    seen: list[Any] = []

    async def handler(*arguments: Any) -> None:
        seen.extend(arguments)

    count = wire.PAYLOAD_NBYTES // struct.calcsize(letter)
    values = [{"?": bool, "f": float, "d": float}.get(letter, int)(index % 2) for index in range(count)]
    host.add(1, handler, letter * count)
    host.send(1, struct.pack(f"{count}{letter}", *values))
    host.drain()
    await host.settle()
    assert repr(seen) == repr(values)


@pytest.mark.parametrize("byte", [1, 2, 0x80, 0xFF])
async def test_any_byte_but_zero_is_true(host: Host, byte: int) -> None:
    """A bool that is not 0 is True, whatever a stray kernel has made of it."""
    host.attach()
    seen: list[Any] = []

    async def handler(flag: bool) -> None:
        seen.append(flag)

    host.add(1, handler, "?")
    host.send(1, bytes([byte]))
    host.drain()
    await host.settle()
    assert seen == [True]


@pytest.mark.all_loops
async def test_a_reply_within_the_drain(host: Host) -> None:
    """A handler that does not wait is answered by the drain itself, or, before Python 3.12, once the loop has run."""
    caller = host.attach()

    async def twice(number: int) -> int:
        return 2 * number

    host.add(1, twice, "q", "q", kind=Kind.INT)
    assert not host.channel.pending()
    ticket = host.send(1, struct.pack("q", -21), cell=7)
    assert host.channel.pending()
    assert host.drain() == 1
    expected = Answer(Status.OK, Kind.INT, struct.pack("q", -42))
    assert host.reply(7, ticket) == (expected if EAGER else None)
    await host.settle()
    assert host.reply(7, ticket) == expected
    assert (host.channel.position, host.channel.posts, host.channel.dropped) == (1, 0, 0)
    assert not caller.requests
    assert not host.channel.pending()


@pytest.mark.all_loops
async def test_whoever_asks_is_told_of_each_handlers_end(host: Host) -> None:
    """``on_served`` gets each request with the time its handler began, once, and whether that failed; None: nobody."""
    caller = host.attach()
    told: list[tuple[list[Caller], int, int]] = []

    async def halve(number: int) -> int:
        if number % 2:
            raise ValueError(number)
        await asyncio.sleep(0)
        return number // 2

    host.add(1, halve, "i", "i", kind=Kind.INT)
    host.send(1, struct.pack("i", 2), cell=0)
    host.drain()  # nobody is there when it begins
    host.channel.on_served = lambda request, began_ns, failed: told.append((request.callers, began_ns, failed))
    await host.settle()
    assert told == []
    began_ns = now_ns()
    for cell, number in enumerate((4, 5, 6)):
        host.send(1, struct.pack("i", number), cell=cell)
    host.drain()
    await host.settle()
    assert sorted(failed for _, _, failed in told) == [0, 0, 1]
    assert all(callers == [caller] and began_ns <= ns <= now_ns() for callers, ns, _ in told)
    host.channel.on_served = None
    assert host.channel.on_served is None
    host.send(1, struct.pack("i", 8), cell=3)
    host.drain()
    await host.settle()
    assert len(told) == 3


async def test_who_is_told_may_raise(host: Host) -> None:
    """What ``on_served`` raises is nobody's; the reply and the launch are as they would be."""
    caller = host.attach()
    texts: list[str] = []

    async def handler(number: int) -> int:
        return number

    def raises(request: Request, began_ns: int, failed: int) -> None:
        raise ZeroDivisionError

    host.add(1, handler, "i", "i", kind=Kind.INT)
    host.channel.on_served = raises
    previous, sys.unraisablehook = sys.unraisablehook, lambda args: texts.append(repr(args.exc_value))
    try:
        ticket = host.send(1, struct.pack("i", 4), cell=0)
        host.drain()
        await host.settle()
    finally:
        sys.unraisablehook = previous
    assert texts == ["ZeroDivisionError()"]
    assert host.reply(0, ticket) == Answer(Status.OK, Kind.INT, struct.pack("i", 4))
    assert not caller.requests


@pytest.mark.all_loops
async def test_a_handler_that_waits_replies_later(host: Host) -> None:
    """A handler that has suspended is among its caller's requests until it ends, which writes the reply."""
    caller = host.attach()
    gate = asyncio.Event()

    async def handler(number: int) -> int:
        await gate.wait()
        return number + 1

    host.add(1, handler, "i", "i", kind=Kind.INT)
    ticket = host.send(1, struct.pack("i", 4), cell=0)
    host.drain()
    (request,) = caller.requests
    assert isinstance(request.task, asyncio.Task)
    assert (request.rows, request.count, request.finished, request.callers) == (1, 1, False, [caller])
    assert request.handler is host.handlers[1]
    assert (caller.active, host.reply(0, ticket)) == (1, None)
    gate.set()
    await host.settle()
    assert host.reply(0, ticket) == Answer(Status.OK, Kind.INT, struct.pack("i", 5))
    assert request.finished
    assert request.task is None
    assert not caller.requests


@pytest.mark.all_loops
async def test_a_reply_goes_out_with_the_handlers_last_step(host: Host) -> None:
    """When a handler that has suspended ends, its reply is written in that turn of the loop, not in the next."""
    caller = host.attach()
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def handler() -> int:
        return await ready

    host.add(1, handler, "", "q", kind=Kind.INT)
    ticket = host.send(1, cell=0)
    host.drain()
    await until(lambda: caller.requests)
    await asyncio.sleep(0)  # where tasks do not start at once, it is only now that it waits
    await asyncio.sleep(0)
    ready.set_result(7)
    await asyncio.sleep(0)
    assert host.reply(0, ticket) == Answer(Status.OK, Kind.INT, struct.pack("q", 7))
    assert not caller.requests


@pytest.mark.all_loops
async def test_a_task_shows_its_handler(host: Host) -> None:
    """What shows tasks, such as a debugger, sees the handler and where it waits, and afterwards its name."""
    caller = host.attach()
    gate = asyncio.Event()

    async def patient() -> None:
        await gate.wait()

    host.add(1, patient)
    host.send(1)
    host.drain()
    await until(lambda: caller.requests)
    await asyncio.sleep(0)
    (request,) = caller.requests
    task = request.task
    assert asyncio.iscoroutine(request)
    assert "patient()" in repr(task)
    assert "test_channel.py" in repr(task)
    assert task.get_coro().cr_code is patient.__code__
    assert inspect.getcoroutinestate(task.get_coro()) == inspect.CORO_SUSPENDED
    (frame,) = task.get_stack()
    assert frame.f_code is patient.__code__
    assert task.get_coro().cr_await is not None
    gate.set()
    await host.settle()
    assert "patient" in repr(task)
    assert inspect.getcoroutinestate(request) == inspect.CORO_CLOSED  # type: ignore[arg-type]  # not by name


async def test_a_task_factory_that_wraps(host: Host) -> None:
    """A task factory may run what it is given inside a coroutine of its own, as tracers do."""
    host.attach()
    loop = asyncio.get_running_loop()
    wrapped: list[object] = []

    async def wrapper(coroutine: Any) -> Any:
        wrapped.append(coroutine)
        return await coroutine

    async def handler(number: int) -> int:
        await asyncio.sleep(0)
        return number + 1

    loop.set_task_factory(lambda loop, coroutine, **options: asyncio.Task(wrapper(coroutine), loop=loop, **options))
    host.add(1, handler, "i", "i", kind=Kind.INT)
    ticket = host.send(1, struct.pack("i", 4), cell=0)
    host.drain()
    await host.settle()
    assert host.reply(0, ticket) == Answer(Status.OK, Kind.INT, struct.pack("i", 5))
    assert len(wrapped) == (not EAGER)  # eager tasks are made without the factory


@pytest.mark.parametrize("by", ["send", "next", "await", "throw", "close"])
async def test_a_request_is_a_coroutine(host: Host, by: str) -> None:
    """What its task can do with it, others can: let its handler go on, raise something there, or give it up."""
    caller = host.attach()
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ends: list[str] = []

    async def handler() -> int:
        try:
            return await ready
        except LookupError:
            ends.append("raised")
            return 8
        except GeneratorExit:
            ends.append("given up")
            raise

    host.add(1, handler, "", "q", kind=Kind.INT)
    ticket = host.send(1, cell=0)
    host.drain()
    await asyncio.sleep(0)
    (request,) = caller.requests
    task = request.task
    ready.set_result(7)

    async def wait() -> None:
        await request

    drive: dict[str, Callable[[], object]] = {
        "send": lambda: request.send(None),
        "next": lambda: next(request),
        "await": lambda: wait().send(None),
        "throw": lambda: request.throw(LookupError()),
    }
    if by == "close":
        assert request.close() is None
        request.close()  # there is nothing left to give up
    else:
        with pytest.raises(StopIteration) as stop:
            drive[by]()
        assert stop.value.value is None
    expected = {"throw": (8, ["raised"]), "close": (Code.RAISED, ["given up"])}.get(by, (7, []))
    reply = host.reply(0, ticket)
    assert reply is not None
    assert (reply.body if isinstance(reply.body, int) else int.from_bytes(reply.body, "little"), ends) == expected
    await asyncio.wait([task])
    assert isinstance(task.exception(), RuntimeError)  # its handler was taken out of its hands
    assert caller.active == 0


@pytest.mark.parametrize("how", ["send", "throw", "close"])
@pytest.mark.parametrize("suspends", [False, True])
async def test_a_handler_in_its_own_way(host: Host, how: str, suspends: bool) -> None:
    """A handler cannot drive its own coroutine: that is running already, and goes on."""
    host.attach()

    async def handler() -> int:
        if suspends:
            await asyncio.sleep(0)
        (request,) = host.owner.begun
        with pytest.raises(ValueError, match="already"):
            {"send": lambda: request.send(None), "throw": lambda: request.throw(LookupError()), "close": request.close}[
                how
            ]()
        await asyncio.sleep(0)
        return 5

    host.owner.on_begin = lambda request: request.start(handler())
    host.add(1, nothing, "", "q", kind=Kind.INT, plain=False)
    ticket = host.send(1, cell=0)
    host.drain()
    await host.settle()
    assert host.reply(0, ticket) == Answer(Status.OK, Kind.INT, struct.pack("q", 5))
    (request,) = host.owner.begun
    with pytest.raises(TypeError, match="takes an exception"):
        request.throw()
    with pytest.raises(RuntimeError, match="over"):
        request.send(None)


@pytest.mark.parametrize("suspends", [False, True])
async def test_a_handler_that_cancels_its_task_at_its_end(host: Host, suspends: bool) -> None:
    """What it returns is the answer: its task is told to stop at the next step, and there is none."""
    host.attach()

    async def handler() -> int:
        if suspends:
            await asyncio.sleep(0)
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        return 5

    host.add(1, handler, "", "q", kind=Kind.INT)
    ticket = host.send(1, cell=0)
    host.drain()
    await host.settle()
    assert host.reply(0, ticket) == Answer(Status.OK, Kind.INT, struct.pack("q", 5))
    assert not host.owner.failures


async def test_a_request_has_one_handler(host: Host) -> None:
    """A second coroutine for a request that has one is refused, and closed."""
    host.attach()
    gate, second = asyncio.Event(), nothing()
    host.owner.on_begin = lambda request: request.start(gate.wait())
    host.add(1, nothing, plain=False)
    ticket = host.send(1, cell=0)
    host.drain()
    (request,) = host.owner.begun
    with pytest.raises(RuntimeError, match="has a handler"):
        request.start(second)
    second.close()
    host.owner.on_encode = lambda request, result: b""
    gate.set()
    await host.settle()
    assert host.reply(0, ticket) == OK


async def test_the_end_of_a_launch_is_not_its_handlers_affair(host: Host) -> None:
    """idle() is called neither in the context of the handler that was the last nor as its task."""
    mark: contextvars.ContextVar[str] = contextvars.ContextVar("mark", default="none")
    context = contextvars.copy_context()
    context.run(mark.set, "the launch's")
    caller = host.attach(context=context)
    seen: list[tuple[str, object]] = []
    host.owner.on_idle = lambda caller: seen.append((mark.get(), asyncio.current_task()))

    async def handler() -> None:
        assert mark.get() == "the launch's"
        await asyncio.sleep(0)

    host.add(1, handler)
    host.send(1)
    host.drain()
    caller.ended = True
    await until(lambda: seen)
    assert seen == [("none", None)]


async def test_handlers_interleave(host: Host) -> None:
    """Suspended handlers do not hold up those behind them, and reply in the order in which they end."""
    caller = host.attach()
    gates = [asyncio.Event() for _ in range(5)]

    async def handler(index: int) -> int:
        await gates[index].wait()
        return index

    host.add(1, handler, "i", "i", kind=Kind.INT)
    tickets = [host.send(1, struct.pack("i", index), cell=index) for index in range(5)]
    assert host.drain() == 5
    assert caller.active == len(caller.requests) == 5
    for done, index in enumerate((3, 0, 4, 1, 2), 1):
        gates[index].set()
        await until(lambda done=done: caller.active == 5 - done)
        assert host.reply(index, tickets[index]) == Answer(Status.OK, Kind.INT, struct.pack("i", index))
        assert len(host.used_cells()) == done


@pytest.mark.all_loops
async def test_the_context_of_the_caller(host: Host) -> None:
    """A handler sees the context variables of its caller; what it sets, nobody else sees."""
    variable = contextvars.ContextVar("variable", default="nobody's")
    seen: list[str] = []

    async def handler() -> None:
        seen.append(variable.get())
        variable.set("the handler's")
        await asyncio.sleep(0)
        seen.append(variable.get())

    host.add(1, handler)
    for launch in (0, 1):
        context = contextvars.copy_context()
        context.run(variable.set, f"launch {launch}'s")
        host.attach(launch, context)
    variable.set("the drain's")
    for launch in (0, 1, 0):
        host.send(1, launch=launch)
        host.drain()
        await host.settle()
    assert seen[0::2] == ["launch 0's", "launch 1's", "launch 0's"]
    assert seen[1::2] == ["the handler's"] * 3
    assert variable.get() == "the drain's"


@pytest.mark.all_loops
async def test_timeouts_work_in_handlers(host: Host) -> None:
    """asyncio.timeout and asyncio.current_task in a handler mean its own task, in its first step, too."""
    host.attach()
    tasks: list[asyncio.Task[Any] | None] = []

    async def handler() -> int:
        tasks.append(asyncio.current_task())
        try:
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
        except TimeoutError:
            return 1
        return 0

    host.add(1, handler, "", "b", kind=Kind.INT)
    ticket = host.send(1, cell=1)
    host.drain()
    await host.settle()
    assert host.reply(1, ticket) == Answer(Status.OK, Kind.INT, b"\1")
    assert tasks != [None]
    assert tasks != [asyncio.current_task()]


async def test_the_task_that_drains_stays_the_current_one(host: Host) -> None:
    """A drain from within a task leaves that the current one, whether handlers end, suspend or fail."""
    host.attach()
    gate = asyncio.Event()

    async def fail() -> None:
        raise LookupError

    host.add(1, nothing)
    host.add(2, gate.wait)  # returns True, for which there is no reply
    host.add(3, fail)
    before = asyncio.current_task()
    for function in (1, 2, 3):
        host.send(function)
    host.drain()
    assert asyncio.current_task() is before
    gate.set()
    await host.settle()


# -- results -------------------------------------------------------------------------------


@pytest.mark.parametrize("letter", INTEGERS)
@given(value=st.one_of(st.integers(-(2**70), 2**70), st.integers(-300, 300)))
async def test_integers_as_results(letter: str, value: int) -> None:
    """An int that fits is the reply as C has it; one that does not, and any unsigned 64-bit one, the owner encodes."""
    await check_result(letter, value, by_owner=letter == "Q")


@pytest.mark.parametrize("letter", "fd")
@given(value=st.floats())
async def test_floats_as_results(letter: str, value: float) -> None:
    """A float is the reply as C has it; one beyond a 32-bit reply's range the owner encodes."""
    await check_result(letter, value)


@pytest.mark.parametrize(
    ("letter", "value"),
    [
        ("?", True),
        ("q", True),
        ("q", np.int64(3)),
        ("i", 1.0),
        ("i", None),
        ("d", 1),
        ("d", np.float64(2.0)),
        ("f", None),
        ("b", "text"),
    ],
)
async def test_other_results_are_the_owners(letter: str, value: Any) -> None:
    """Whatever is no plain int or float where one is expected goes to the owner's encode()."""
    await check_result(letter, value, by_owner=True)


async def check_result(letter: str, value: Any, by_owner: bool = False) -> None:
    host = Host()
    host.attach()

    async def handler() -> Any:
        return value

    foreign = bytes(range(100, 100 + struct.calcsize(letter)))
    host.owner.on_encode = lambda request, result: foreign
    host.add(1, handler, "", letter, kind=Kind.UINT)
    ticket = host.send(1, cell=9)
    host.drain()
    await host.settle()
    expected = foreign
    if not by_owner:
        try:
            expected = struct.pack(f"<{letter}", value)  # as natively, but it checks the range of floats, too
        except (struct.error, OverflowError):
            by_owner = True
    assert host.reply(9, ticket) == Answer(Status.OK, Kind.UINT, expected)
    assert [result is value for _, result in host.owner.encoded] == [True] * by_owner
    assert not host.owner.failures
    host.channel.close()


@pytest.mark.parametrize("nbytes", [1, 7, 8, 9, 16, 255, 256])
@pytest.mark.parametrize("as_type", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
async def test_results_of_any_size(host: Host, nbytes: int, as_type: Callable[[bytes], Any]) -> None:
    """Any buffer that encode() returns is the reply: in the cell's word up to 8 bytes, behind it above."""
    host.attach()
    data = bytes(range(nbytes % 256, 256)) + bytes(range(nbytes % 256))
    data = data[:nbytes]
    host.owner.on_encode = lambda request, result: as_type(result)

    async def handler() -> bytes:
        return data

    host.add(1, handler, reply_nbytes=nbytes, kind=Kind.STRUCT)
    ticket = host.send(1, cell=wire.CELLS - 1)
    host.drain()
    await host.settle()
    assert host.reply(wire.CELLS - 1, ticket) == Answer(Status.OK, Kind.STRUCT, data)
    end = wire.cell_offset(wire.CELLS - 1) + wire.CELL_DATA + max(0, nbytes if nbytes > 8 else 0)
    assert not host.memory.array[end:].any()


async def test_no_result(host: Host) -> None:
    """A handler without a result that returns None is answered OK; anything else is for encode() to judge."""
    host.attach()
    host.owner.on_encode = lambda request, result: b""

    async def handler(number: int) -> Any:
        return number or None

    host.add(1, handler, "i")
    tickets = [host.send(1, struct.pack("i", cell), cell=cell) for cell in (0, 1)]
    host.drain()
    await host.settle()
    assert [host.reply(cell, tickets[cell]) for cell in (0, 1)] == [OK, OK]
    assert [result for _, result in host.owner.encoded] == [1]


@pytest.mark.parametrize("encoded", [b"", b"123", b"12345"])
async def test_a_reply_of_the_wrong_size(host: Host, encoded: bytes) -> None:
    """What encode() returns has the reply's size, or the handler has failed with a ValueError."""
    host.attach()
    host.owner.on_encode = lambda request, result: encoded
    host.add(1, nothing, reply_nbytes=4)
    ticket = host.send(1, cell=2)
    host.drain()
    await host.settle()
    assert host.reply(2, ticket) == error(Code.RAISED)
    ((_, failure),) = host.owner.failures
    assert isinstance(failure, ValueError)


async def test_what_encode_raises_the_handler_raised(host: Host) -> None:
    """A result that cannot be encoded is a failure of the handler, as is one that is no buffer."""
    caller = host.attach()
    problem = LookupError("no such type")
    answers: list[Any] = [problem, 17]

    def encode(request: Request, result: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    host.owner.on_encode = encode
    host.add(1, nothing, reply_nbytes=4)
    tickets = [host.send(1, cell=cell) for cell in (0, 1)]
    host.drain()
    await host.settle()
    assert [host.reply(cell, tickets[cell]) for cell in (0, 1)] == [error(Code.RAISED)] * 2
    failures = [failure for _, failure in host.owner.failures]
    assert failures[0] is problem
    assert isinstance(failures[1], TypeError)
    assert (caller.active, caller.told) == (0, False)


# -- failures ------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.parametrize("where", ["call", "first step", "later"])
async def test_a_handler_that_raises(host: Host, where: str) -> None:
    """What a handler raises goes to the owner's failed(), and the kernel gets ERROR RAISED."""
    caller = host.attach()
    problem = LookupError(where)

    def call() -> Any:
        raise problem

    async def step() -> None:
        raise problem

    async def later() -> None:
        await asyncio.sleep(0)
        raise problem

    host.add(1, {"call": call, "first step": step, "later": later}[where])
    ticket = host.send(1, cell=5)
    assert host.drain() == 1
    await host.settle()
    assert [failure for _, failure in host.owner.failures] == [problem]
    assert problem.__traceback__ is not None
    assert host.reply(5, ticket) == error(Code.RAISED)
    assert (caller.active, caller.told, caller.requests) == (0, False, set())


@pytest.mark.parametrize("callable", [lambda: None, lambda: 5, len])
async def test_a_handler_that_is_none(host: Host, callable: Callable[..., Any]) -> None:
    """A function that returns no coroutine, or takes other arguments, has failed with a TypeError."""
    host.attach()
    host.add(1, callable)
    ticket = host.send(1, cell=5)
    host.drain()
    await host.settle()
    ((_, failure),) = host.owner.failures
    assert isinstance(failure, TypeError)
    assert host.reply(5, ticket) == error(Code.RAISED)


async def test_the_owner_may_answer_a_failure(host: Host) -> None:
    """If failed() answers, that is the reply, with whatever code it gives."""
    host.attach()
    host.owner.on_failed = lambda request, error: request.end(Status.ERROR, 1234)

    async def handler() -> None:
        raise LookupError

    host.add(1, handler)
    ticket = host.send(1, cell=5)
    host.drain()
    await host.settle()
    assert host.reply(5, ticket) == error(1234)


@pytest.mark.all_loops
@pytest.mark.parametrize("suspends", [False, True])
async def test_a_handler_that_is_cancelled(host: Host, suspends: bool) -> None:
    """After CancelledError out of a handler the kernel gets CANCELLED, its caller is marked, and the owner is told."""
    caller = host.attach()

    async def handler() -> None:
        if suspends:
            await asyncio.sleep(0)
        raise asyncio.CancelledError

    host.add(1, handler)
    ticket = host.send(1, cell=5)
    host.drain()
    await host.settle()
    assert host.reply(5, ticket) == CANCELLED
    assert caller.told
    assert [type(failure) for _, failure in host.owner.failures] == [asyncio.CancelledError]


async def test_cancelling_the_task(host: Host) -> None:
    """The task of a suspended handler can be cancelled from outside, with the same effect."""
    caller = host.attach()
    host.add(1, asyncio.Event().wait)
    ticket = host.send(1, cell=5)
    host.drain()
    (request,) = caller.requests
    request.task.cancel()
    await host.settle()
    assert host.reply(5, ticket) == CANCELLED
    assert (caller.told, caller.requests, request.finished) == (True, set(), True)


async def test_encode_may_cancel(host: Host) -> None:
    """CancelledError out of encode() is the handler's as well."""
    caller = host.attach()

    def encode(request: Request, result: Any) -> bytes:
        raise asyncio.CancelledError

    host.owner.on_encode = encode
    host.add(1, nothing, reply_nbytes=4)
    ticket = host.send(1, cell=5)
    host.drain()
    await host.settle()
    assert (host.reply(5, ticket), caller.told) == (CANCELLED, True)
    assert [type(failure) for _, failure in host.owner.failures] == [asyncio.CancelledError]


async def test_an_owner_that_fails(host: Host) -> None:
    """What failed() raises comes out of the drain; the kernel has its answer, and the rest is served next time."""
    host.attach()

    def on_failed(request: Request, error: BaseException) -> None:
        raise RuntimeError("the owner's own")

    host.owner.on_failed = on_failed

    def handler() -> Any:
        raise LookupError

    host.add(1, handler)
    host.add(2, nothing)
    tickets = [host.send(1, cell=0), host.send(2, cell=1)]
    with pytest.raises(RuntimeError, match="the owner's own"):
        host.drain()
    assert host.reply(0, tickets[0]) == error(Code.RAISED)
    assert not host.channel.busy
    assert host.drain() == 1
    await host.settle()
    assert host.reply(1, tickets[1]) == OK


async def test_an_owner_that_fails_is_still_told_that_a_caller_is_idle(host: Host) -> None:
    """If failed() raises for the last request of a caller that has ended, idle() is called all the same."""
    caller = host.attach()
    caller.ended = True

    def on_failed(request: Request, error: BaseException) -> None:
        raise RuntimeError("the owner's own")

    host.owner.on_failed = on_failed

    def on_idle(caller: Caller) -> None:
        # What any code may do, as long as it is not run with an exception pending.
        with contextlib.suppress(KeyError):
            {}["nothing"]

    host.owner.on_idle = on_idle

    def handler() -> Any:
        raise LookupError

    host.add(1, handler)
    host.send(1, cell=0)
    with pytest.raises(RuntimeError, match="the owner's own"):
        host.drain()
    assert host.owner.idled == [caller]


async def test_a_batch_is_begun_although_something_else_went_wrong(host: Host) -> None:
    """An exception of the owner ends the drain, not before the batches that were collected have begun."""
    host.attach()
    host.owner.on_begin = lambda request: request.end(Status.OK)

    def on_failed(request: Request, error: BaseException) -> None:
        raise RuntimeError("the owner's own")

    host.owner.on_failed = on_failed

    def handler() -> Any:
        raise LookupError

    host.add(1, handler)
    host.add(2, nothing, "i", batch=True)
    ticket = host.send(2, b"1234", cell=0)
    host.send(1)
    with pytest.raises(RuntimeError, match="the owner's own"):
        host.drain()
    assert host.reply(0, ticket) == OK


async def test_a_begin_that_raises(host: Host) -> None:
    """What begin() raises is a failure of the handler."""
    caller = host.attach()
    problem = LookupError()

    def begin(request: Request) -> None:
        raise problem

    host.owner.on_begin = begin
    host.add(1, nothing, plain=False)
    host.add(2, nothing, batch=True)
    tickets = [host.send(function, cell=function) for function in (1, 2)]
    assert host.drain() == 2
    assert [failure for _, failure in host.owner.failures] == [problem, problem]
    assert [host.reply(cell, tickets[cell - 1]) for cell in (1, 2)] == [error(Code.RAISED)] * 2
    assert caller.active == 0


# -- posts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("outcome", ["result", "raises", "cancelled", "unknown", "wrong size", "stopped"])
async def test_a_post_writes_no_cell(host: Host, outcome: str) -> None:
    """However a post ends, no reply cell is written; a stopped launch is not told anything by it."""
    caller = host.attach()

    async def handler(number: int) -> int:
        if outcome == "raises":
            raise LookupError
        if outcome == "cancelled":
            raise asyncio.CancelledError
        return number

    host.add(1, handler, "q", "q")
    caller.stopped = outcome == "stopped"
    host.send(2 if outcome == "unknown" else 1, bytes(4 if outcome == "wrong size" else 8))
    assert host.drain() == 1
    await host.settle()
    assert not host.used_cells()
    assert not host.memory.array[wire.cell_offset(0) : wire.payload_offset(0)].any()
    assert caller.told is False
    assert (host.channel.posts, host.tail) == (1, 1)


async def test_the_tail_counts_posts(host: Host) -> None:
    """After a drain the tail in the memory is the number of posts read, calls not counted."""
    host.attach()
    host.add(1, nothing)
    posts = 0
    for round in range(5):
        for index in range(7 * round):
            host.send(1, cell=wire.NO_CELL if index % 3 else 1)
            posts += index % 3 != 0
        assert host.tail == host.channel.posts <= posts
        host.drain()
        assert host.tail == host.channel.posts == posts
        await host.settle()


async def test_the_tail_goes_on_during_a_long_drain(host: Host) -> None:
    """A drain of many posts tells the device in between, and never more than it has read."""
    host.attach()
    tails: list[int] = []

    def handler() -> Any:
        tails.append(host.tail)
        return nothing()

    host.add(1, handler)
    for _ in range(3000):
        host.send(1)
    assert host.drain() == 3000
    assert 0 < tails[-1] < 3000
    assert all(tail <= read for read, tail in enumerate(tails, 1))
    assert host.tail == 3000
    await host.settle()


async def test_closed_during_a_long_drain(host: Host) -> None:
    """The tail is not written with the next batch of posts: the memory may be gone."""
    host.attach()
    served = 0

    def handler() -> Any:
        nonlocal served
        served += 1
        if served == 512:  # PUBLISH_EVERY
            host.channel.close()
        return nothing()

    host.add(1, handler)
    for _ in range(600):
        host.send(1)
    host.drain()
    assert (served, host.tail) == (512, 0)


async def test_unsound_posts_count_as_read(host: Host) -> None:
    """A post that is dropped has had a place all the same, which is given back."""
    host.send(1, launch=5)
    host.drain()
    assert (host.channel.dropped, host.channel.posts, host.tail) == (1, 1, 1)


# -- requests that the owner begins --------------------------------------------------------


@given(data=st.binary(max_size=256))
async def test_begin_gets_the_arguments(data: bytes) -> None:
    """A request that is not plain is begun by the owner, and has the arguments as its buffer."""
    host = Host()
    caller = host.attach()
    handler = host.add(1, nothing, nbytes=len(data), reply_nbytes=2, kind=Kind.STRUCT, plain=False)
    ticket = host.send(1, data, cell=4)
    assert host.drain() == 1
    (request,) = host.owner.begun
    assert bytes(request.data) == data
    assert (request.handler, request.rows, request.count, request.callers) == (handler, 1, 1, [caller])
    assert (request.task, request.finished, caller.active, caller.requests) == (None, False, 1, set())

    async def reply() -> str:
        return "ab"

    host.owner.on_encode = lambda request, result: result.encode()
    request.start(reply())
    await host.settle()
    assert host.reply(4, ticket) == Answer(Status.OK, Kind.STRUCT, b"ab")
    assert request.finished
    host.channel.close()


async def test_the_arguments_are_a_copy(host: Host) -> None:
    """What the kernel writes to the payload afterwards does not change the arguments; views outlive the request."""
    host.attach()
    host.owner.on_begin = lambda request: request.end(Status.OK)
    host.add(1, nothing, nbytes=16, plain=False)
    ticket = host.send(1, bytes(range(16)), cell=4)
    host.drain()
    view = np.frombuffer(host.owner.begun.pop().data, np.uint8)
    host.memory.array[wire.payload_offset(ticket) :][:16] = 0xEE
    gc.collect()
    assert view.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (Status.OK, 0, OK),
        (Status.ERROR, 99, error(99)),
        (Status.ERROR, -(2**63), error(-(2**63))),
        (Status.CANCELLED, 0, CANCELLED),
        (Status.TIMEOUT, 0, Answer(Status.TIMEOUT, Kind.NONE, b"")),
    ],
)
async def test_end(host: Host, status: Status, code: int, expected: Answer) -> None:
    """A request that was not started is over with end(), which answers once and for all."""
    caller = host.attach()
    host.add(1, nothing, plain=False)
    ticket = host.send(1, cell=4)
    host.drain()
    (request,) = host.owner.begun
    request.end(status, code)
    assert (request.finished, caller.active) == (True, 0)
    assert host.reply(4, ticket) == expected
    assert caller.told == (status == Status.CANCELLED)
    request.end(Status.ERROR, 5)
    assert host.reply(4, ticket) == expected
    assert caller.active == 0


async def test_end_while_the_handler_runs(host: Host) -> None:
    """end() answers for a suspended handler; the request is over only when that has ended."""
    caller = host.attach()
    caller.ended = True
    gate = asyncio.Event()
    host.owner.on_begin = lambda request: request.start(gate.wait())
    host.add(1, nothing, plain=False)
    ticket = host.send(1, cell=4)
    host.drain()
    (request,) = host.owner.begun
    request.end(Status.TIMEOUT)
    expected = Answer(Status.TIMEOUT, Kind.NONE, b"")
    assert host.reply(4, ticket) == expected
    assert (request.finished, caller.active, host.owner.idled) == (False, 1, [])
    gate.set()
    await host.settle()
    assert host.reply(4, ticket) == expected
    assert (request.finished, caller.requests) == (True, set())
    await until(lambda: host.owner.idled)


async def test_end_in_the_first_step_of_the_handler(host: Host) -> None:
    """A handler whose request is answered during its first step still runs: the request is over when it has ended."""
    caller = host.attach()
    caller.ended = True
    gate = asyncio.Event()

    async def steps(request: Request) -> None:
        request.end(Status.ERROR, 7)
        await gate.wait()

    host.owner.on_begin = lambda request: request.start(steps(request))
    host.add(1, nothing, plain=False)
    ticket = host.send(1, cell=4)
    host.drain()
    (request,) = host.owner.begun
    await until(lambda: host.reply(4, ticket))
    assert host.reply(4, ticket) == error(7)
    try:
        assert (request.finished, caller.active, host.owner.idled) == (False, 1, [])
        assert caller.requests == {request}
    finally:
        gate.set()
        task = request.task
        if task is not None:
            await task
    await host.settle()
    assert (request.finished, caller.requests, host.owner.idled) == (True, set(), [caller])


def test_requests_are_made_by_a_channel() -> None:
    """Nobody else makes a Request."""
    with pytest.raises(TypeError):
        Request()


async def test_the_buffer_of_a_plain_request(host: Host) -> None:
    """A failed plain request has no data to show: its arguments were decoded at once."""
    host.attach()
    shown: list[bytearray | None] = []

    def on_failed(request: Request, error: BaseException) -> None:
        shown.append(request.data)

    host.owner.on_failed = on_failed

    async def handler(number: int) -> None:
        raise LookupError

    host.add(1, handler, "q")
    host.send(1, b"12345678")
    host.drain()
    await host.settle()
    assert shown == [None]


# -- batches -------------------------------------------------------------------------------


async def test_a_batch(host: Host) -> None:
    """All requests of a drain for a batch function are one, whose reply is dealt out to their cells."""
    callers = [host.attach(launch) for launch in range(3)]
    host.add(1, nothing, "i", "q", kind=Kind.INT, batch=True)
    sent = [(launch, 100 * launch + index) for index in range(40) for launch in (2, 0, 1)]
    tickets = [host.send(1, struct.pack("i", value), cell=1000 + value, launch=launch) for launch, value in sent]
    assert host.drain() == len(sent)
    (request,) = host.owner.begun
    assert (request.rows, request.count, request.callers) == (120, 120, [callers[2], callers[0], callers[1]])
    rows = np.frombuffer(request.data, np.int32)
    assert rows.tolist() == [value for _, value in sent]
    assert [caller.active for caller in callers] == [40, 40, 40]

    async def squares() -> Any:
        await asyncio.sleep(0)
        return rows.astype(np.int64) ** 2

    host.owner.on_encode = lambda request, result: result.tobytes()
    request.start(squares())
    assert all(caller.requests == {request} for caller in callers)
    assert not host.used_cells()
    await host.settle()
    for ticket, (_, value) in zip(tickets, sent, strict=True):
        assert host.reply(1000 + value, ticket) == Answer(Status.OK, Kind.INT, struct.pack("q", value**2))
    assert not any(caller.requests for caller in callers)


async def test_batches_by_function_and_by_drain(host: Host) -> None:
    """Each batch function has its own batch, in the order of their first requests, and each drain begins new ones."""
    host.attach()
    host.owner.on_begin = lambda request: request.end(Status.OK)
    for function in (1, 2):
        host.add(function, nothing, "i", batch=True)
    for _ in range(2):
        for index in range(6):
            host.send(1 + (index % 3 == 0), struct.pack("i", index))
        host.drain()
    expected = [[0, 3], [1, 2, 4, 5]] * 2
    assert [np.frombuffer(request.data, np.int32).tolist() for request in host.owner.begun] == expected
    assert [request.handler for request in host.owner.begun] == [host.handlers[2], host.handlers[1]] * 2


async def test_a_batch_starts_from_the_context_of_its_function(host: Host) -> None:
    """The handler of a batch sees the context in which its function was registered, not one caller's."""
    variable = contextvars.ContextVar("variable", default="")
    registered, launched = contextvars.copy_context(), contextvars.copy_context()
    registered.run(variable.set, "registered")
    launched.run(variable.set, "launched")
    host.attach(0, launched)
    seen: list[str] = []

    async def handler() -> None:
        seen.append(variable.get())

    host.owner.on_begin = lambda request: request.start(handler())
    host.add(1, nothing, batch=True, context=registered)
    host.add(2, nothing, plain=False, context=registered)
    host.send(1)
    host.send(2)
    host.drain()
    await host.settle()
    assert sorted(seen) == ["launched", "registered"]


async def test_drop_from_a_batch(host: Host) -> None:
    """drop() answers CANCELLED to launches that were stopped and says whether there are others; those get their
    results."""
    first, second, third = (host.attach(launch) for launch in range(3))
    gate = asyncio.Event()

    async def handler() -> str:
        await gate.wait()
        return "abcdef"

    host.owner.on_begin = lambda request: request.start(handler())
    host.owner.on_encode = lambda request, result: result.encode()
    host.add(1, nothing, reply_nbytes=1, kind=Kind.UINT, batch=True)
    tickets = [host.send(1, cell=cell, launch=cell % 3) for cell in range(6)]
    host.drain()
    (request,) = first.requests
    assert request.drop() is True
    assert [host.reply(cell, tickets[cell]) for cell in range(6)] == [None] * 6
    first.stopped = True
    assert request.drop() is True
    assert [host.reply(cell, tickets[cell]) for cell in range(6)] == [CANCELLED, None, None] * 2
    third.stopped = True
    assert request.drop() is True
    assert [host.reply(cell, tickets[cell]) for cell in range(6)] == [CANCELLED, None, CANCELLED] * 2
    assert (first.told, second.told, third.told, first.active, request.finished) == (True, False, True, 2, False)
    gate.set()
    await host.settle()
    of_second = {cell: Answer(Status.OK, Kind.UINT, b"abcdef"[cell : cell + 1]) for cell in (1, 4)}
    assert [host.reply(cell, tickets[cell]) for cell in range(6)] == [of_second.get(i, CANCELLED) for i in range(6)]


async def test_drop_of_the_last_launch(host: Host) -> None:
    """drop() says that nobody is left once each of its launches was stopped, in whatever order."""
    callers = [host.attach(launch) for launch in range(2)]
    host.add(1, nothing, plain=False, batch=True)
    tickets = [host.send(1, cell=cell, launch=cell) for cell in range(2)]
    host.drain()
    (request,) = host.owner.begun
    for caller, wanted in zip(reversed(callers), (True, False), strict=True):
        caller.stopped = True
        assert request.drop() is wanted
    assert [host.reply(cell, tickets[cell]) for cell in range(2)] == [CANCELLED] * 2
    assert not request.finished
    request.end(Status.OK)
    assert (request.finished, host.reply(0, tickets[0])) == (True, CANCELLED)


@pytest.mark.parametrize("stopped", [{0}, {0, 1}])
async def test_stopped_between_read_and_begun(host: Host, stopped: set[int]) -> None:
    """What a launch has sent that was stopped meanwhile gets CANCELLED; a batch of nothing else is not begun."""
    callers = [host.attach(launch) for launch in range(2)]

    def stop() -> Any:
        for launch in stopped:
            callers[launch].stopped = True
        return nothing()

    host.add(1, nothing, plain=False, batch=True)
    host.add(2, stop)
    tickets = [host.send(1, cell=cell, launch=cell) for cell in range(2)]
    host.send(2, cell=wire.NO_CELL, launch=1)
    host.drain()
    expected = [CANCELLED if cell in stopped else None for cell in range(2)]
    assert [host.reply(cell, tickets[cell]) for cell in range(2)] == expected
    assert len(host.owner.begun) == (len(stopped) < 2)
    for request in host.owner.begun:
        request.end(Status.OK)
    await host.settle()
    assert [caller.active for caller in callers] == [0, 0]


async def test_a_batch_that_fails(host: Host) -> None:
    """What a batch raises is one failure, and every request of it gets ERROR."""
    host.attach()

    async def handler() -> None:
        raise LookupError

    host.owner.on_begin = lambda request: request.start(handler())
    host.add(1, nothing, "i", batch=True)
    tickets = [host.send(1, bytes(4), cell=cell) for cell in range(100)]
    host.drain()
    await host.settle()
    assert [host.reply(cell, ticket) for cell, ticket in enumerate(tickets)] == [error(Code.RAISED)] * 100
    assert len(host.owner.failures) == 1


@given(st.lists(st.tuples(st.integers(1, 32), st.booleans()), min_size=1, max_size=40))
async def test_rows(sizes: list[tuple[int, bool]]) -> None:
    """A request of many rows has as many in the batch, and gets as many results into its cell."""
    host = Host()
    host.attach()
    host.add(1, nothing, "hb", "d", kind=Kind.FLOAT, batch=True)
    count, rows, tickets = 0, [], []
    for cell, (size, post) in enumerate(sizes):
        rows.append(range(count, count + size))
        data = b"".join(struct.pack(c_struct("hb"), number, 1) for number in rows[-1])
        tickets.append(host.send(1, data, cell=wire.NO_CELL if post else cell, rows=size))
        count += size
    host.drain()
    (request,) = host.owner.begun
    assert (request.rows, request.count) == (count, len(sizes))
    numbers = np.frombuffer(request.data, np.dtype("i2,i1,i1"))["f0"]
    assert numbers.tolist() == list(range(count))

    async def handler() -> Any:
        return numbers.astype(np.float64)

    host.owner.on_encode = lambda request, result: result.tobytes()
    request.start(handler())
    await host.settle()
    for cell, (_, post) in enumerate(sizes):
        expected = Answer(Status.OK, Kind.FLOAT, struct.pack(f"{len(rows[cell])}d", *rows[cell]))
        assert host.reply(cell, tickets[cell]) == (None if post else expected)
    host.channel.close()


async def test_rows_for_a_function_that_takes_no_batch(host: Host) -> None:
    """Many rows for a plain function are for the owner to begin: the drain starts one coroutine at most."""
    host.attach()
    calls: list[Any] = []

    async def handler(*arguments: Any) -> None:
        calls.append(arguments)

    host.add(1, handler, "h")
    ticket = host.send(1, struct.pack("5h", *range(5)), cell=1, rows=5)
    host.drain()
    (request,) = host.owner.begun
    assert (request.rows, request.count) == (5, 1)
    assert np.frombuffer(request.data, np.int16).tolist() == list(range(5))
    request.end(Status.OK)
    assert host.reply(1, ticket) == OK
    assert not calls


@pytest.mark.parametrize(("rows", "nbytes"), [(32, 9), (32, 256), (2, 129), (3, 100)])
async def test_results_that_do_not_fit_the_cell(host: Host, rows: int, nbytes: int) -> None:
    """If all rows of a request have more results than its cell has room for, it gets ERROR, and nobody else's memory
    is touched."""
    host.attach()
    host.owner.on_encode = lambda request, result: b"\xee" * (request.rows * nbytes)
    host.owner.on_begin = lambda request: request.start(nothing())
    host.add(1, nothing, "b", reply_nbytes=nbytes, kind=Kind.STRUCT, batch=True)
    ticket = host.send(1, bytes(rows), cell=10, rows=rows)
    host.drain()
    await host.settle()
    assert not host.memory.array[wire.cell_offset(11) :][: wire.CELLS].any()
    answer = host.reply(10, ticket)
    assert answer is not None
    assert answer.status == Status.ERROR


async def test_a_huge_batch_is_begun_in_parts(host: Host) -> None:
    """A batch is begun when it has 65536 rows, and another is collected."""
    host.attach()
    host.owner.on_begin = lambda request: request.end(Status.OK)
    host.add(1, nothing, "b", batch=True)
    data = bytes(32)
    tickets = [host.send(1, data, cell=index, rows=32) for index in range(2049)]
    assert host.drain() == 2049
    assert [request.rows for request in host.owner.begun] == [65536, 32]
    assert host.reply(0, tickets[0]) == host.reply(2048, tickets[2048]) == OK


PARTS = """
import asyncio, contextvars
from tests._native.test_channel import Host, Status, nothing
from aiooffload._native import Caller

async def main():
    host = Host()
    host.channel.attach(0, Caller(contextvars.copy_context(), None))
    seen = []

    def begin(request):
        seen.append([caller.active for caller in request.callers])
        host.owner.begun.clear()
        host.channel.attach(0, None)
        request.end(Status.OK)

    host.owner.on_begin = begin
    host.add(1, nothing, "b", batch=True)
    data = bytes(32)
    for index in range(2049):
        host.send(1, data, cell=index, rows=32)
    host.drain()
    print(seen)

asyncio.run(main())
"""


def test_a_launch_that_goes_between_the_parts_of_a_batch() -> None:
    """If the launch is detached while a part of a huge batch begins, the request that is being read keeps its caller
    alive."""
    # In a process of its own, where freed memory is overwritten: a caller that was freed does not look alive.
    done = subprocess.run(
        [sys.executable, "-c", PARTS],
        cwd=ROOT,
        env={"PYTHONMALLOC": "debug", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[[2048], [1]]"), done.stderr[-2000:]


NO_MEMORY = """
import asyncio, struct, sys
from _testcapi import remove_mem_hooks, set_nomemory
from tests._native.test_channel import Host, Kind, count_requests

async def main(kind):
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    refused = 0
    for n in range(1, 25):
        host, gate = Host(), asyncio.Event()
        callers = [host.attach(launch) for launch in range(3)]

        async def answer(x):
            if kind != "plain":
                await gate.wait()
            return x

        host.add(1, answer, "q", "q", kind=Kind.INT, batch=kind == "batch", plain=True)
        tickets = [host.send(1, struct.pack("q", i), cell=i, launch=i // 20 % 3) for i in range(80)]
        drain = host.channel.drain
        set_nomemory(n, n + 1)
        try:
            drain(10**9)
        except MemoryError:
            remove_mem_hooks()
            refused += 1
        remove_mem_hooks()
        host.drain()
        gate.set()
        await host.settle()
        assert all(host.reply(cell, ticket) for cell, ticket in enumerate(tickets)), n
        host.owner.forget()
        host.channel.close()
        del host, callers
    print(refused > 0, count_requests())

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("kind", ["plain", "suspends", "batch"])
def test_no_memory(kind: str) -> None:
    """Whatever allocation fails in a drain, every call is answered and nothing is left."""
    pytest.importorskip("_testcapi", reason="this Python cannot pretend that memory has run out")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", NO_MEMORY, kind],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "True 0"), done.stderr[-2000:]


# -- batches that the drain starts by itself -----------------------------------------------


@given(
    st.lists(st.sampled_from(LETTERS), min_size=1, max_size=6).flatmap(
        lambda letters: st.tuples(
            st.just("".join(letters)),
            st.lists(st.tuples(*(VALUES[letter] for letter in letters)), min_size=1, max_size=20),
        )
    )
)
async def test_columns(given_rows: tuple[str, list[tuple[Any, ...]]]) -> None:
    """A plain batch function is called by the drain with one array per argument, a value for each request."""
    letters, rows = given_rows
    host = Host()
    caller = host.attach()
    seen: list[Any] = []

    async def handler(*columns: Any) -> Any:
        seen.extend(column.copy() for column in columns)

    host.add(1, handler, letters, plain=True, batch=True)
    tickets = [host.send(1, struct.pack(c_struct(letters), *row), cell=cell) for cell, row in enumerate(rows)]
    assert host.drain() == len(rows)
    await host.settle()
    assert [column.dtype for column in seen] == [np.dtype(letter) for letter in letters]
    assert repr([tuple(row) for row in zip(*(column.tolist() for column in seen), strict=True)]) == repr(rows)
    assert [host.reply(cell, ticket) for cell, ticket in enumerate(tickets)] == [OK] * len(rows)
    assert not host.owner.begun + host.owner.failures
    assert caller.active == 0
    host.channel.close()


async def test_no_columns(host: Host) -> None:
    """A plain batch function without arguments is called once per drain."""
    host.attach()
    calls: list[Any] = []

    async def handler(*columns: Any) -> None:
        calls.append(columns)

    host.add(1, handler, plain=True, batch=True)
    for _ in range(2):
        for _ in range(10):
            host.send(1)
        host.drain()
        await host.settle()
    assert calls == [(), ()]


async def test_the_columns_of_many_rows(host: Host) -> None:
    """Requests with one row and with many are rows of the same columns, and results are dealt out to all of them."""
    host.attach()

    async def handler(first: Any, second: Any) -> Any:
        await asyncio.sleep(0)
        return first * 1000 + second

    host.add(1, handler, "qb", "q", kind=Kind.INT, plain=True, batch=True)
    tickets, count = [], 0
    for cell, rows in enumerate((1, 5, 16, 1)):
        data = b"".join(struct.pack(c_struct("qb"), count + row, row) for row in range(rows))
        tickets.append((cell, rows, count, host.send(1, data, cell=cell, rows=rows)))
        count += rows
    host.drain()
    await host.settle()
    for cell, rows, first, ticket in tickets:
        expected = struct.pack(f"{rows}q", *((first + row) * 1000 + row for row in range(rows)))
        assert host.reply(cell, ticket) == Answer(Status.OK, Kind.INT, expected)
    assert not host.owner.encoded


@pytest.mark.parametrize("letter", LETTERS)
async def test_arrays_as_results(host: Host, letter: str) -> None:
    """An array of just the reply's type and length is the reply as it is, without encode()."""
    host.attach()
    kind = wire.kind_of(np.dtype(letter))
    result = np.arange(10).astype(letter)

    async def handler(column: Any) -> Any:
        return result

    host.add(1, handler, "b", letter, kind=kind, plain=True, batch=True)
    tickets = [host.send(1, b"1", cell=cell) for cell in range(10)]
    host.drain()
    await host.settle()
    expected = [Answer(Status.OK, kind, value.tobytes()) for value in result]
    assert [host.reply(cell, ticket) for cell, ticket in enumerate(tickets)] == expected
    assert not host.owner.encoded


OTHER_ARRAYS = {
    "too short": np.arange(9, dtype="i4"),
    "too long": np.arange(11, dtype="i4"),
    "another size": np.arange(10, dtype="i8"),
    "another kind": np.arange(10, dtype="u4"),
    "floats": np.arange(10, dtype="f4"),
    "another byte order": np.arange(10, dtype=">i4"),
    "two dimensions": np.arange(10, dtype="i4").reshape(10, 1),
    "no dimension": np.array(1, dtype="i4"),
    "with gaps": np.arange(20, dtype="i4")[::2],
    "backwards": np.arange(10, dtype="i4")[::-1],
    "fields": np.zeros(10, [("a", "i4")]),
    "times": np.zeros(10, "M8[s]"),
    "bytes": bytes(40),
    "a list": list(range(10)),
    "a number": 1,
    "nothing": None,
}


@pytest.mark.parametrize("result", OTHER_ARRAYS.values(), ids=OTHER_ARRAYS)
async def test_other_results_of_a_batch_are_the_owners(host: Host, result: Any) -> None:
    """Any other result of a batch goes to encode() as it is."""
    host.attach()

    async def handler(column: Any) -> Any:
        return result

    data = bytes(range(40))
    host.owner.on_encode = lambda request, result: data
    host.add(1, handler, "b", "i", kind=Kind.INT, plain=True, batch=True)
    tickets = [host.send(1, b"1", cell=cell) for cell in range(10)]
    host.drain()
    await host.settle()
    assert [given_result is result for _, given_result in host.owner.encoded] == [True]
    expected = [Answer(Status.OK, Kind.INT, data[4 * cell : 4 * cell + 4]) for cell in range(10)]
    assert [host.reply(cell, ticket) for cell, ticket in enumerate(tickets)] == expected


@pytest.mark.parametrize("where", ["read", "fields", "call", "first step", "later"])
async def test_a_plain_batch_that_fails(host: Host, where: str) -> None:
    """Whatever fails between the columns and the end of a plain batch is its handler's failure, once for all."""
    caller = host.attach()

    async def handler(*columns: Any) -> None:
        if where == "later":
            await asyncio.sleep(0)
        raise LookupError

    def read(data: bytearray, dtype: Any) -> Any:
        if where == "read":
            raise LookupError
        return {"f0": 1} if where == "fields" else np.frombuffer(data, dtype)

    def call(*columns: Any) -> Any:
        raise LookupError

    host.add(1, call if where == "call" else handler, "hb", plain=True, batch=True, read=read)
    tickets = [host.send(1, bytes(4), cell=cell) for cell in range(3)]
    assert host.drain() == 3
    await host.settle()
    ((request, failure),) = host.owner.failures
    assert isinstance(failure, LookupError)
    assert (request.rows, request.finished, caller.active) == (3, True, 0)
    assert [host.reply(cell, ticket) for cell, ticket in enumerate(tickets)] == [error(Code.RAISED)] * 3
    host.owner.forget()  # the failure's frames hold columns


async def test_what_a_batch_is_called_for(host: Host) -> None:
    """The handler of a batch finds its own Request in the context variable, in its first step and later."""
    callers = [host.attach(launch) for launch in (0, 1)]
    found: list[Any] = []

    async def handler(column: Any) -> None:
        found.append(calling.get())
        await asyncio.sleep(0)
        found.append(calling.get())

    host.add(1, handler, "b", plain=True, batch=True)
    for launch in (0, 1):
        host.send(1, b"1", launch=launch)
    host.drain()
    await host.settle()
    first, later = found
    assert first is later
    assert (first.callers, first.rows) == (callers, 2)
    assert calling.get(None) is None


async def test_a_batch_function_that_keeps_its_columns() -> None:
    """Columns that a batch function keeps for itself do not keep the channel for good, although the collector cannot
    see what an array refers to."""

    class Kept(list[Any]):
        """A list that can be watched."""

    async def scenario() -> tuple[weakref.ref[Owner], weakref.ref[Kept]]:
        host = Host()
        host.attach()
        kept = Kept()

        async def handler(column: Any) -> None:
            kept.append(column)

        host.add(1, handler, "b", plain=True, batch=True)
        host.send(1, b"1", cell=0)
        host.drain()
        await host.settle()
        assert kept[0].tolist() == [ord("1")]
        return weakref.ref(host.owner), weakref.ref(kept)

    owner, kept = await scenario()
    gc.collect()
    try:
        assert owner() is None
    finally:
        if (found := kept()) is not None:
            found.clear()


async def test_handlers_are_let_go() -> None:
    """A handler in a cycle through anything that it was given is collected."""

    class Registry:
        """Holds handlers, and is what they are made of."""

        handler: Handler

        def read(self, data: bytearray, dtype: Any) -> Any:
            return np.frombuffer(data, dtype)

        async def call(self) -> None:
            """Does nothing."""

    watched = {}
    for name in ("callable", "context", "read", "dtype"):
        registry = Registry()
        context = contextvars.copy_context()
        context.run(contextvars.ContextVar[Any]("registry").set, registry)
        parts = {"callable": registry.call, "context": context, "read": registry.read, "dtype": registry}
        registry.handler = make_handler(**{name: parts[name]})
        watched[name] = weakref.ref(registry)
        del registry, context, parts
    gc.collect()
    assert [name for name, found in watched.items() if found() is not None] == []


# -- what is refused, dropped or cancelled -------------------------------------------------


async def test_an_unknown_function(host: Host) -> None:
    """A request of a function that there is not gets that code, and the owner is told."""
    caller = host.attach()
    ticket = host.send(4711, b"123", cell=0)
    host.send(4711, struct.pack("8i", *range(8)), rows=4)
    assert host.drain() == 2
    assert host.reply(0, ticket) == error(Code.UNKNOWN_FUNCTION)
    assert host.owner.refusals == [(caller, 4711, None, 3), (caller, 4711, None, 8)]
    assert (caller.active, host.channel.dropped) == (0, 0)


@pytest.mark.parametrize("kind", ["plain", "begun", "batch"])
async def test_arguments_of_another_size(host: Host, kind: str) -> None:
    """A request with more or fewer bytes of arguments than its function takes gets that code, and the owner is told."""
    caller = host.attach()
    handler = host.add(1, nothing, "iqq", plain=kind != "begun", batch=kind == "batch")
    sizes = [0, 4, 8, 16, 23, 25, 256]
    tickets = [host.send(1, bytes(size), cell=cell) for cell, size in enumerate(sizes)]
    assert host.drain() == len(sizes)
    replies = [host.reply(cell, ticket) for cell, ticket in enumerate(tickets)]
    assert replies == [error(Code.WRONG_ARGUMENTS)] * len(sizes)
    assert host.owner.refusals == [(caller, 1, handler, size) for size in sizes]
    assert not host.owner.begun


async def test_a_function_registered_later(host: Host) -> None:
    """A function that was unknown before is found once it is there."""
    host.attach()
    host.send(1, cell=0)
    host.drain()
    host.add(1, nothing)
    ticket = host.send(1, cell=0)
    host.drain()
    await host.settle()
    assert host.reply(0, ticket) == OK


async def test_a_launch_that_was_stopped(host: Host) -> None:
    """Calls of a stopped launch get CANCELLED without a handler, and it is told; other launches go on."""
    stopped, other = host.attach(0), host.attach(1)
    stopped.stopped = True
    host.add(1, nothing)
    tickets = [host.send(1, cell=0), host.send(77, cell=1), host.send(1, cell=2, launch=1)]
    assert host.drain() == 3
    await host.settle()
    assert [host.reply(cell, ticket) for cell, ticket in enumerate(tickets)] == [CANCELLED, CANCELLED, OK]
    assert (stopped.told, other.told, stopped.active) == (True, False, 0)
    assert not host.owner.refusals


async def test_a_launch_stopped_from_a_handler(host: Host) -> None:
    """What a launch has sent behind the request whose handler stops it is not served any more."""
    caller = host.attach()
    calls = 0

    def handler() -> Any:
        nonlocal calls
        calls += 1
        caller.stopped = True
        return nothing()

    host.add(1, handler)
    tickets = [host.send(1, cell=cell) for cell in range(3)]
    host.drain()
    await host.settle()
    assert calls == 1
    first = OK if sys.version_info >= (3, 12) else CANCELLED  # before that its task begins later
    assert [host.reply(cell, ticket) for cell, ticket in enumerate(tickets)] == [first, CANCELLED, CANCELLED]


async def test_an_unknown_launch(host: Host) -> None:
    """Requests of a launch that there is not, or no longer is, are dropped and counted."""
    host.attach(3)
    host.add(1, nothing)
    host.channel.attach(3, None)
    for launch in (0, 3, wire.LAUNCHES - 1):
        host.send(1, cell=launch, launch=launch)
    assert host.drain() == 3
    assert (host.channel.dropped, host.channel.position) == (3, 3)
    assert not host.used_cells()


async def test_attach_refuses_what_is_no_launch(host: Host) -> None:
    """attach() takes an index below 1024, and a Caller or None."""
    caller = Caller(contextvars.copy_context(), None)
    before = sys.getrefcount(caller)
    for launch, given_caller in ((wire.LAUNCHES, caller), (2**32 - 1, None), (0, "launch"), (0, Caller)):
        with pytest.raises(ValueError, match="attach"):
            host.channel.attach(launch, given_caller)  # type: ignore[arg-type]
    assert sys.getrefcount(caller) == before


UNSOUND = {
    "a cell that there is not": Descriptor(0, 1, 0, wire.CELLS, 0, 0),
    "the last cell number but one": Descriptor(0, 1, 0, wire.NO_CELL - 1, 0, 0),
    "an unknown form": Descriptor(0, 1, 0, 0, 11, 0x1_0000),
    "the last form": Descriptor(0, 1, 0, 0, 15, 0x1_0000),
    "a payload too long": Descriptor(0, 1, 0, 0, Form.PAYLOAD, 257 | 1 << 16),
    "a payload of no row": Descriptor(0, 1, 0, 0, Form.PAYLOAD, 16),
    "a payload of two rows": Descriptor(0, 1, 0, 0, Form.PAYLOAD, 16 | 2 << 16),
    "no rows": Descriptor(0, 1, 0, 0, Form.ROWS, 16),
    "33 rows": Descriptor(0, 1, 0, 0, Form.ROWS, 33 | 33 << 16),
    "very many rows": Descriptor(0, 1, 0, 0, Form.ROWS, 16 | 1 << 63),
    "rows of 2**32 and one": Descriptor(0, 1, 0, 0, Form.ROWS, 16 | (2**32 + 1) << 16),
    "a broken row": Descriptor(0, 1, 0, 0, Form.ROWS, 16 | 3 << 16),
    "rows too long": Descriptor(0, 1, 0, 0, Form.ROWS, 320 | 32 << 16),
}


@pytest.mark.parametrize("descriptor", UNSOUND.values(), ids=UNSOUND)
async def test_unsound_descriptors_are_dropped(host: Host, descriptor: Descriptor) -> None:
    """A descriptor that no kernel writes is counted and otherwise ignored; the next is served."""
    host.attach()
    host.add(1, nothing)
    assert not descriptor.sound
    host.write(0, *descriptor.pack())
    host.ticket = 1
    ticket = host.send(1, cell=1)
    assert host.drain() == 2
    await host.settle()
    assert host.channel.dropped == 1
    assert host.used_cells() == {1}
    assert host.reply(1, ticket) == OK
    assert not host.owner.refusals


STRAY = st.builds(
    lambda function, launch, cell, form, argument: (argument, Descriptor(0, function, launch, cell, form, 0).pack()[1]),
    st.one_of(st.integers(1, 4), st.integers(0, 2**25 - 1)),
    st.one_of(st.integers(0, 2), st.integers(0, wire.LAUNCHES - 1)),
    st.one_of(st.integers(0, 5), st.just(wire.NO_CELL), st.integers(0, 2**15 - 1)),
    st.one_of(st.just(8), st.sampled_from(Form), st.integers(0, 15)),
    st.one_of(
        st.builds(
            lambda nbytes, rows: nbytes | rows << 16, st.integers(0, 33).map(lambda n: 8 * n), st.integers(0, 33)
        ),
        U64,
    ),
)


@given(st.lists(st.one_of(STRAY, st.tuples(U64, U64)), max_size=60))
async def test_stray_descriptors(words: list[tuple[int, int]]) -> None:
    """Whatever has a valid tag is served if it makes sense, and dropped if not; a sound one behind it is served.

    Nothing is written but the tail and the cells that were named.
    """
    host = Host()
    served, stopped = host.attach(0), host.attach(1)
    stopped.stopped = True
    seen: list[int] = []

    async def echo(number: int) -> int:
        seen.append(number)
        return number

    async def result(value: bytes) -> bytes:
        return value

    host.add(1, echo, "q", "q", kind=Kind.INT)
    host.add(2, nothing, "q", "q", kind=Kind.INT, batch=True)
    host.add(3, nothing, nbytes=16, reply_nbytes=8, kind=Kind.STRUCT, plain=False)
    host.owner.on_begin = lambda request: request.start(result(bytes(8 * request.rows)))
    host.owner.on_encode = lambda request, result: result
    dropped, begun, refused, batched, expected = 0, 0, [], 0, []
    named: dict[int, set[int]] = {}
    awaited: set[int] = set()
    """Cells of calls that the drain leaves unanswered."""
    for ticket, (argument, control) in enumerate(words):
        control = control % 2**54 | wire.tag_of(ticket) << 54
        host.write(ticket, argument, control)
        descriptor = Descriptor.unpack(ticket, argument, control)
        assert descriptor is not None
        if not descriptor.sound or descriptor.launch > 1 or descriptor.cell in awaited:
            dropped += 1
            continue
        if descriptor.cell != wire.NO_CELL:
            named.setdefault(descriptor.cell, set()).add(ticket)
        if descriptor.launch == 1:
            continue
        nbytes, rows = descriptor.extent
        handler = host.handlers.get(descriptor.function)
        if handler is None or handler.nbytes * rows != nbytes:
            refused.append((served, descriptor.function, handler, nbytes // rows))
            continue
        if descriptor.cell != wire.NO_CELL and (descriptor.function == 2 or not EAGER):
            awaited.add(descriptor.cell)
        if descriptor.function == 2:
            batched += rows
        elif descriptor.function == 3 or descriptor.form == Form.ROWS:
            begun += 1
        else:
            inline = descriptor.form <= 8
            expected.append(struct.unpack("q", struct.pack("Q", argument))[0] if inline else 0)
    host.ticket = len(words)
    free = next(cell for cell in range(wire.CELLS) if cell not in named)
    named[free] = {host.send(1, struct.pack("q", 99), cell=free)}
    before = host.memory.array[: wire.cell_offset(0)].copy()
    assert host.drain() == len(words) + 1
    await host.settle()
    assert seen == [*expected, 99]
    assert host.channel.dropped == dropped
    assert host.owner.refusals == refused
    batches = [request for request in host.owner.begun if request.handler.batch]
    assert sum(request.rows for request in batches) == batched
    assert len(batches) == (batched > 0)
    assert len(host.owner.begun) == begun + len(batches)
    assert host.used_cells() == set(named)
    for cell, tickets in named.items():
        assert any(host.reply(cell, ticket) for ticket in tickets)
        at = wire.cell_offset(cell)
        host.memory.array[at : at + wire.CELL_DATA + wire.PAYLOAD_NBYTES] = 0
    before[wire.TAIL_OFFSET : wire.TAIL_OFFSET + 8] = host.memory.array[wire.TAIL_OFFSET : wire.TAIL_OFFSET + 8]
    assert np.array_equal(before, host.memory.array[: wire.cell_offset(0)])
    assert not host.words[wire.cell_offset(0) // 8 :].any()
    assert not host.owner.failures
    host.channel.close()


@given(U64, U64.filter(lambda control: control >> 54 != 1))
async def test_words_without_the_tag_are_no_request(argument: int, control: int) -> None:
    """A slot whose tag is not the next ticket's is not read, however often one looks."""
    host = Host()
    host.attach()
    host.write(0, argument, control)
    assert not host.channel.pending()
    assert host.drain() == host.drain() == 0
    assert (host.channel.position, host.channel.dropped, host.channel.served_ns) == (0, 0, 0)
    host.channel.close()


async def test_a_cell_that_is_waited_on(host: Host) -> None:
    """A call with a cell whose reply another one waits for is dropped; once that has it, the cell is anybody's."""
    host.attach()
    results = [asyncio.get_running_loop().create_future() for _ in range(2)]
    waiting = iter(results)

    async def later() -> int:
        value: int = await next(waiting)
        return value

    host.add(1, later, "", "q", kind=Kind.INT)
    host.add(2, nothing)
    first = host.send(1, cell=5)
    host.drain()
    for function in (1, 2, 3):
        host.send(function, cell=5)
    other = host.send(2, cell=6)
    host.drain()
    await until(lambda: host.reply(6, other))
    assert (host.channel.dropped, host.used_cells(), host.owner.refusals) == (3, {6}, [])
    results[0].set_result(10)
    await until(lambda: host.reply(5, first))
    second = host.send(1, cell=5)
    results[1].set_result(11)
    host.drain()
    await host.settle()
    assert host.reply(5, second) == Answer(Status.OK, Kind.INT, struct.pack("q", 11))
    assert host.channel.dropped == 3


@pytest.mark.parametrize("gap", [1, 2, wire.RING_SLOTS - 1])
async def test_a_ring_with_a_gap(host: Host, gap: int) -> None:
    """torn() says whether a request is published behind one that is not; what is left of laps before does not count."""
    host.attach()
    host.add(1, nothing)
    for _ in range(wire.RING_SLOTS - 3):
        host.send(1)
    host.drain()
    assert not host.channel.torn()
    missing = host.ticket
    host.ticket += gap
    host.send(1)
    assert host.channel.torn()
    host.ticket = missing
    host.send(1)
    assert not host.channel.torn()
    host.channel.close()
    assert not host.channel.torn()


async def test_requests_are_read_in_order(host: Host) -> None:
    """A request that is published behind one that is not waits for that."""
    host.attach()
    seen: list[int] = []

    async def handler(number: int) -> None:
        seen.append(number)

    host.add(1, handler, "b")
    host.ticket = 1
    host.send(1, b"\1")
    assert host.drain() == 0
    host.ticket = 0
    host.send(1, b"\0")
    assert host.drain() == 2
    await host.settle()
    assert seen == [0, 1]


# -- laps ----------------------------------------------------------------------------------


async def test_more_requests_than_slots(host: Host) -> None:
    """Requests go on into the next lap: each is served once, with its own arguments, short or long."""
    host.attach()
    seen: list[int] = []

    async def short(number: int) -> None:
        seen.append(number)

    async def long(first: int, second: int) -> int:
        seen.append(first)
        return second

    host.add(1, short, "q")
    host.add(2, long, "qq", "q", kind=Kind.INT)
    total = wire.RING_SLOTS + 3000
    while host.ticket < total:
        first = host.ticket
        for number in range(first, min(first + 1000, total)):
            if number % 5:
                host.send(1, struct.pack("q", number))
            else:
                host.send(2, struct.pack("2q", number, -number), cell=number % 1000)
        host.drain()
        await host.settle()
        for number in range(first, host.ticket, 5):
            expected = Answer(Status.OK, Kind.INT, struct.pack("q", -number))
            assert host.reply(number % 1000, number) == expected
    assert seen == list(range(total))
    assert host.channel.position == total
    assert host.tail == host.channel.posts == total - total // 5 - (total % 5 > 0)


async def test_as_many_laps_as_there_are_tags(host: Host) -> None:
    """The slot of one lap is not read again in the next, also where the tags begin anew."""
    first = wire.slot_offset(0) // 8
    ring = host.words[first : first + 2 * wire.RING_SLOTS].reshape(-1, 2)
    for lap in range(1026):
        assert not host.channel.pending()
        # For a launch that there is not: they are dropped without a step of Python.
        ring[:, 1] = Descriptor(lap * wire.RING_SLOTS, 1, 9, 0, 0, 0).pack()[1]
        assert host.drain() == wire.RING_SLOTS
        assert host.drain() == 0
    assert host.channel.dropped == host.channel.position == 1026 * wire.RING_SLOTS
    host.attach()
    host.add(1, nothing)
    host.ticket = host.channel.position
    ticket = host.send(1, cell=0)
    assert host.drain() == 1
    await host.settle()
    assert host.reply(0, ticket) == OK


# -- the drain itself ----------------------------------------------------------------------


async def test_a_drain_from_within_a_drain(host: Host) -> None:
    """A handler or owner that asks for a drain gets 0: the one that runs goes on with the rest."""
    host.attach()
    counts: list[int] = []

    def look(*arguments: Any) -> None:
        assert host.channel.busy
        counts.append(host.drain())

    def handler() -> Any:
        look()
        return nothing()

    def begin(request: Request) -> None:
        look()
        request.end(Status.OK)

    host.owner.on_begin = begin
    host.owner.refused = look  # type: ignore[method-assign]
    host.add(1, handler)
    host.add(2, nothing, plain=False)
    host.add(3, nothing, batch=True)
    for function in (1, 2, 3, 4, 1):
        host.send(function)
    assert host.drain() == 5
    assert counts == [0] * 5
    assert not host.channel.busy
    await host.settle()


async def test_what_comes_during_a_drain_is_read_by_it(host: Host) -> None:
    """A request that is published while a handler takes its first step belongs to the same drain."""
    host.attach()

    def handler() -> Any:
        if host.ticket < 50:
            host.send(1)
        return nothing()

    host.add(1, handler)
    host.send(1)
    assert host.drain() == 50
    await host.settle()


async def test_the_budget_ends_a_drain(host: Host) -> None:
    """A drain without time reads some requests and leaves the rest to the next ones, in order."""
    host.attach()
    seen: list[int] = []

    def handler(number: int) -> Any:
        seen.append(number)
        return nothing()

    host.add(1, handler, "i")
    for number in range(500):
        host.send(1, struct.pack("i", number))
    counts = []
    while host.channel.pending():
        counts.append(host.drain(0))
        assert 0 < counts[-1] < 500
        assert host.tail == sum(counts)
    assert sum(counts) == 500
    assert seen == list(range(500))
    await host.settle()


async def test_when_it_was_served(host: Host) -> None:
    """served_ns is the time of the last drain that has read something; the owner may set it."""
    host.attach()
    host.add(1, nothing)
    assert host.channel.served_ns == 0
    before = now_ns()
    host.send(1)
    host.drain()
    served = host.channel.served_ns
    assert before <= served <= now_ns()
    host.drain()
    assert host.channel.served_ns == served
    host.channel.served_ns = 5
    assert host.channel.served_ns == 5
    await host.settle()


@pytest.mark.parametrize("budget", [None, "1", 1.5])
async def test_a_budget_is_a_number(host: Host, budget: Any) -> None:
    """drain() takes an int, and is not left busy by anything else."""
    host.send(1)
    with pytest.raises(TypeError):
        host.channel.drain(budget)
    assert host.drain() == 1


@pytest.mark.parametrize("address", [0, 1, 8, 32])
async def test_a_block_that_is_not_aligned(host: Host, address: int) -> None:
    """A channel refuses no address, and one that is no multiple of 64."""
    base = host.memory.host_address if address else 0
    with pytest.raises(ValueError, match="aligned"):
        Channel(base + address, host.memory, asyncio.get_running_loop(), {}, host.owner)


async def test_handlers_are_a_dict(host: Host) -> None:
    """A channel takes a dict of handlers and nothing else."""
    with pytest.raises(TypeError):
        Channel(host.memory.host_address, host.memory, asyncio.get_running_loop(), [], host.owner)  # type: ignore[arg-type]


@pytest.mark.parametrize(("nbytes", "reply_nbytes"), [(257, 0), (0, 257), (2**31, 0)])
def test_handlers_that_cannot_be(nbytes: int, reply_nbytes: int) -> None:
    """Arguments and results of more than 256 bytes are refused."""
    with pytest.raises(ValueError, match="256 bytes"):
        make_handler(nbytes=nbytes, reply_nbytes=reply_nbytes)


def test_a_context_is_a_context() -> None:
    """Caller and Handler refuse anything else as their context."""
    with pytest.raises(TypeError):
        Caller({}, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        make_handler(context={})


# -- close ---------------------------------------------------------------------------------


async def test_after_close_nothing_is_read_or_written(host: Host) -> None:
    """close() ends it all: handlers that still run end without a reply, and the memory stays as it is."""
    caller = host.attach()
    gate = asyncio.Event()

    async def handler() -> int:
        await gate.wait()
        return 1

    host.add(1, handler, "", "q")
    host.add(2, nothing, plain=False)
    host.send(1, cell=0)
    host.send(2, cell=1)
    host.send(2, cell=2)
    host.drain()
    requests = host.owner.begun
    host.channel.close()
    host.send(1, cell=3)
    before = host.memory.array.copy()
    assert host.channel.closed
    assert not host.channel.pending()
    assert host.drain() == 0
    requests[0].end(Status.OK)
    caller.stopped = True
    assert requests[1].drop() is False
    requests[1].end(Status.ERROR, 3)
    gate.set()
    await host.settle()
    host.channel.close()
    assert np.array_equal(before, host.memory.array)
    assert (host.channel.position, caller.active, caller.requests) == (3, 0, set())


async def test_after_close_failures_go_to_the_owner(host: Host) -> None:
    """A handler that fails after close() is still reported, and its caller still becomes idle."""
    caller = host.attach()
    caller.ended = True
    gate = asyncio.Event()

    async def handler() -> None:
        await gate.wait()
        raise LookupError

    host.add(1, handler)
    host.send(1, cell=0)
    host.drain()
    host.channel.close()
    gate.set()
    await host.settle()
    assert len(host.owner.failures) == 1
    await until(lambda: host.owner.idled)
    assert host.owner.idled == [caller]
    assert not host.used_cells()


@pytest.mark.parametrize("where", ["handler", "begin", "failed", "encode", "refused", "batch"])
async def test_close_from_within_a_drain(host: Host, where: str) -> None:
    """close() from anything that a drain calls ends that drain, and nothing is written any more."""
    host.attach()
    before: list[Any] = []

    def close(*arguments: Any) -> Any:
        if not before:
            host.channel.close()
            before.append(host.memory.array.copy())

    def handler(number: int) -> Any:
        if where == "handler":
            close()
        if where == "failed":
            raise LookupError
        return nothing()

    def encode(request: Request, result: Any) -> bytes:
        close()
        return bytes(8)

    def begin(request: Request) -> None:
        close()
        request.end(Status.OK)

    host.owner.on_begin = begin
    host.owner.on_failed = close
    host.owner.on_encode = encode
    host.owner.refused = close  # type: ignore[method-assign]
    reply_nbytes = 8 if where == "encode" else 0
    host.add(1, handler, "b", reply_nbytes=reply_nbytes, plain=where not in ("begin", "batch"), batch=where == "batch")
    host.send(1, b"" if where == "refused" else b"1", cell=0)
    if where != "batch":
        for cell in range(1, 40):
            host.send(1, b"1", cell=cell)
    host.drain()
    await until(lambda: before)
    await host.settle()
    assert np.array_equal(before[0], host.memory.array)
    # Before Python 3.12 encode() comes from the loop, when all is read.
    if EAGER or where != "encode":
        assert host.channel.position == 1
    assert not host.channel.busy


# -- idle ----------------------------------------------------------------------------------


async def test_idle_comes_once_at_the_end(host: Host) -> None:
    """idle() is called when a caller that has ended has no request left, once, and not before."""
    caller = host.attach()
    gate = asyncio.Event()

    async def handler() -> None:
        await gate.wait()

    host.add(1, handler)
    host.add(2, nothing)
    host.send(2)
    host.drain()
    await host.settle()
    assert not host.owner.idled
    for _ in range(3):
        host.send(1)
    host.drain()
    caller.ended = True
    host.send(2)
    host.drain()
    await until(lambda: caller.active == 3)
    assert not host.owner.idled
    gate.set()
    await host.settle()
    await until(lambda: host.owner.idled)
    await asyncio.sleep(0)
    assert host.owner.idled == [caller]


async def test_idle_after_a_batch(host: Host) -> None:
    """Each caller of a batch that has ended becomes idle once, however many requests it had in that."""
    callers = [host.attach(launch) for launch in range(3)]
    host.owner.on_begin = lambda request: request.end(Status.OK)
    host.add(1, nothing, batch=True)
    for index in range(30):
        host.send(1, launch=index % 3)
    callers[0].ended = callers[2].ended = True
    host.drain()
    assert sorted(host.owner.idled, key=id) == sorted([callers[0], callers[2]], key=id)


@pytest.mark.parametrize("how", ["unknown", "wrong size", "stopped", "dropped"])
async def test_requests_that_start_nothing_make_nobody_idle(host: Host, how: str) -> None:
    """A request that is refused or cancelled at once was never active."""
    caller = host.attach()
    caller.ended = True
    caller.stopped = how == "stopped"
    host.add(1, nothing)
    host.send(2 if how == "unknown" else 1, b"1" if how == "wrong size" else b"", launch=5 if how == "dropped" else 0)
    host.drain()
    assert (host.owner.idled, caller.active) == ([], 0)


# -- references ----------------------------------------------------------------------------


class Watched(Caller):
    """A caller that can be watched going away."""


async def test_a_caller_is_let_go(host: Host) -> None:
    """With its index given away and its requests over, nothing holds a caller."""
    before_any = count_requests()
    caller = Watched(contextvars.copy_context(), object())
    watched = weakref.ref(caller)
    host.channel.attach(0, caller)
    host.callers.append(caller)

    async def fail() -> None:
        raise LookupError

    async def later() -> None:
        await asyncio.sleep(0)

    host.owner.on_begin = lambda request: request.start(later())
    host.add(1, nothing)
    host.add(2, later)
    host.add(3, fail)
    host.add(4, nothing, batch=True)
    host.add(5, nothing, plain=False)
    for function in range(1, 7):
        host.send(function, cell=function)
        host.send(function)
    host.drain()
    await host.settle()
    host.owner.forget()
    host.callers.clear()
    host.channel.attach(0, None)
    del caller
    gc.collect()
    assert watched() is None
    assert count_requests() <= before_any


async def test_nothing_is_held_too_often(host: Host) -> None:
    """Thousands of requests leave no reference to caller, handlers, context, owner, loop or results behind."""
    before_any = count_requests()
    caller = host.attach()
    result = 10**15
    problem = LookupError()

    async def value() -> int:
        return result

    async def later() -> int:
        await asyncio.sleep(0)
        return result

    def fail() -> Any:
        raise problem

    async def batch() -> None:
        await asyncio.sleep(0)

    host.owner.on_begin = lambda request: request.start(batch())
    host.owner.on_encode = lambda request, result: bytes(request.handler.nbytes * request.rows)
    handlers = [
        host.add(1, value, "", "q"),
        host.add(2, later, "", "q"),
        host.add(3, fail),
        host.add(4, batch, batch=True),
        host.add(5, batch, "q", plain=False),
        host.add(6, value, "", ""),  # its result goes to encode()
    ]
    objects = [caller, caller.context, caller.operation, host.owner, host.channel, host.channel, result, *handlers]
    objects += [value, later, fail, batch, asyncio.get_running_loop(), host.memory, host.handlers]

    async def run(count: int) -> None:
        for index in range(count):
            function = 1 + index % 8  # two of them are unknown
            host.send(function, bytes(8) if function == 5 else b"", cell=index % 100)
            if index % 50 == 49:
                host.drain()
        host.drain()
        await host.settle()
        host.owner.forget()
        problem.__traceback__ = problem.__context__ = None
        # Whatever the loop still has scheduled for tasks that are done.
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()

    await run(800)
    before = [sys.getrefcount(each) for each in objects]
    await run(4000)
    assert [sys.getrefcount(each) for each in objects] == before
    assert count_requests() <= before_any


async def test_a_channel_is_let_go() -> None:
    """A channel in a cycle with its owner is collected, with requests that were never ended, and lets its memory go."""
    before_any = count_requests()
    host = Host()
    caller = host.attach()
    host.add(1, nothing, plain=False)
    host.send(1, cell=0)
    host.drain()
    host.owner.channel = host.channel  # type: ignore[attr-defined]
    host.owner.memory = host.memory  # type: ignore[attr-defined]
    watched = weakref.ref(host.owner)
    assert caller.active == 1
    del host, caller
    gc.collect()
    assert watched() is None
    assert count_requests() <= before_any


async def test_the_memory_lives_as_long_as_the_channel() -> None:
    """A channel holds what it was given as its memory."""

    class Memory:
        """Something that can be watched going away."""

    memory, block = Memory(), MappedMemory(wire.SHARED_NBYTES)
    channel = Channel(block.host_address, memory, asyncio.get_running_loop(), {}, Owner())
    watched = weakref.ref(memory)
    del memory
    assert watched() is not None
    del channel
    gc.collect()
    assert watched() is None


async def test_a_suspended_request_keeps_what_it_needs() -> None:
    """A handler that still runs keeps its channel and the memory, and replies although nobody else holds them."""
    host = Host()
    host.attach()
    gate = asyncio.Event()

    async def handler() -> int:
        await gate.wait()
        return 7

    host.add(1, handler, "", "q", kind=Kind.INT)
    ticket = host.send(1, cell=0)
    host.drain()
    del host.channel
    gc.collect()
    gate.set()
    await host.settle()
    assert host.reply(0, ticket) == Answer(Status.OK, Kind.INT, struct.pack("q", 7))
