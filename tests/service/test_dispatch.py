"""The queue, with device processes that the tests play."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from aiooffload.service import dispatch
from aiooffload.service.app import Declaration
from aiooffload.service.dispatch import Dispatcher, Held, Refusal, Ticket
from aiooffload.service.protocol import InferRequest, Tensor
from aiooffload.service.tensors import DATATYPES, Spec, pack_bytes

INT = Spec("x", DATATYPES["INT32"], (-1,))
TEXT = Spec("t", DATATYPES["BYTES"], (-1,))
SINGLE = Declaration("single", (INT,), (INT,), 0, 0)
JOINED = Declaration("joined", (INT, TEXT), (TEXT, INT), 4, 0)
PATIENT = Declaration("patient", (INT,), (INT,), 4, 1000)


class Clock:
    """What the queue takes for the time, in the hands of the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that stands still: no delay is over before the test says so."""
    clock = Clock()
    monkeypatch.setattr("aiooffload.service.dispatch.time", clock)
    return clock


class Process:
    """A device process in the hands of the test."""

    def __init__(self, label: str = "host") -> None:
        self.device = {"label": label}
        self.calls: dict[int, Any] = {}
        self.sent: list[tuple[str, Any, list[bytes], bool]] = []
        self.cancelled: list[int] = []
        self.called = asyncio.Event()
        self.sent_nbytes = 0
        self.taken_nbytes = 0

    def has_taken(self, nbytes: int) -> bool:
        return self.taken_nbytes >= nbytes

    def call(self, endpoint: str, shapes: Any, data: Any, call: Any, progress: bool) -> int:
        number = len(self.sent)
        self.calls[number] = call
        self.sent.append((endpoint, shapes, [bytes(one) for one in data], progress))
        self.sent_nbytes += sum(map(len, data))
        self.called.set()
        return number

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)

    def echo(self, number: int) -> None:
        """Answer a call with its inputs, in reverse order."""
        _, shapes, data, _ = self.sent[number]
        outputs = [memoryview(one) for one in reversed(data)]
        message = {
            "kind": "result",
            "shapes": [list(one) for one in reversed(shapes)],
            "handler_s": 1.0,
            "device_s": 0.5,
        }
        self.calls.pop(number).on_answer(message, outputs)

    def fail(self, number: int, status: int) -> None:
        self.calls.pop(number).on_answer({"kind": "error", "status": status, "text": "why"}, [])


class Processes:
    """A supervisor in the hands of the test."""

    def __init__(self, *processes: Process) -> None:
        self.ready = list(processes)
        self.stuck: list[Process] = []

    @property
    def moving(self) -> list[Process]:
        return [process for process in self.ready if process not in self.stuck]

    def why_not_ready(self) -> str:
        return "" if self.ready else "nobody is there"


def dispatcher_of(*processes: Process, max_queue: int = 100, concurrency: int = 2) -> Dispatcher:
    return Dispatcher(Processes(*processes), max_queue, 100, concurrency)  # type: ignore[arg-type]


def numbers(*values: int) -> Tensor:
    return Tensor((len(values),), np.array(values, np.int32).tobytes())


def texts(*values: str) -> Tensor:
    return Tensor((len(values),), pack_bytes(value.encode() for value in values))


def submit(dispatcher: Dispatcher, declaration: Declaration, *inputs: Tensor, **options: Any) -> Ticket:
    return dispatcher.submit(declaration, InferRequest("", list(inputs), [], None), **options)


def values(tensors: Sequence[Tensor]) -> list[Any]:
    return [np.frombuffer(one.data, np.int32).tolist() for one in tensors]


async def refusal_of(ticket: Ticket) -> Refusal:
    with pytest.raises(Refusal) as caught:
        await ticket.future
    return caught.value


async def test_request_goes_through() -> None:
    """A request is sent at once, and its answer says where it was and how long things took."""
    process = Process("cuda:3")
    dispatcher = dispatcher_of(process)
    ticket = submit(dispatcher, SINGLE, numbers(1, 2))
    assert process.sent == [("single", [(2,)], [numbers(1, 2).data], False)]
    assert dispatcher.in_flight == 1
    process.echo(0)
    answer = await ticket.future
    assert values(answer.outputs) == [[1, 2]]
    assert (answer.device, answer.batch, answer.handler_s, answer.device_s) == ("cuda:3", 1, 1.0, 0.5)
    assert answer.queue_s >= 0
    assert dispatcher.in_flight == 0


async def test_concurrency_is_limited() -> None:
    """A device process has so many calls of an endpoint at a time; the next goes when one has ended, however it did."""
    process = Process()
    dispatcher = dispatcher_of(process, concurrency=2)
    tickets = [submit(dispatcher, SINGLE, numbers(i)) for i in range(4)]
    assert len(process.sent) == 2
    process.fail(0, 500)
    process.echo(1)
    assert len(process.sent) == 4
    process.echo(2)
    process.echo(3)
    assert (await refusal_of(tickets[0])).status == 500
    assert [values((await ticket.future).outputs) for ticket in tickets[1:]] == [[[i]] for i in (1, 2, 3)]


async def test_least_busy_device_is_used() -> None:
    """Calls are spread over the devices."""
    first, second = Process(), Process()
    dispatcher = dispatcher_of(first, second)
    tickets = [submit(dispatcher, SINGLE, numbers(i)) for i in range(4)]
    assert (len(first.sent), len(second.sent)) == (2, 2)
    for process in (first, second):
        process.echo(0)
        process.echo(1)
    assert [values((await ticket.future).outputs) for ticket in tickets] == [[[i]] for i in range(4)]


async def test_waiting_requests_share_a_call() -> None:
    """What waits for a place is joined, and each gets its own rows back, of every output."""
    process = Process()
    dispatcher = dispatcher_of(process)
    tickets = [submit(dispatcher, JOINED, numbers(i), texts(str(i))) for i in range(2)]  # both places
    tickets += [
        submit(dispatcher, JOINED, numbers(2, 3), texts("2", "three")),
        submit(dispatcher, JOINED, numbers(4), texts("")),
        submit(dispatcher, JOINED, numbers(5, 6), texts("5", "6")),
    ]
    process.echo(0)
    assert process.sent[2][1:3] == ([(3,), (3,)], [numbers(2, 3, 4).data, texts("2", "three", "").data])
    for number in range(1, 4):
        process.echo(number)
    answers = [await ticket.future for ticket in tickets]
    assert [answer.batch for answer in answers] == [1, 1, 2, 2, 1]
    assert [values(answer.outputs[1:]) for answer in answers] == [[[0]], [[1]], [[2, 3]], [[4]], [[5, 6]]]
    assert [bytes(answer.outputs[0].data) for answer in answers[2:4]] == [texts("2", "three").data, texts("").data]
    assert [answer.outputs[0].shape for answer in answers] == [(1,), (1,), (2,), (1,), (2,)]


async def test_large_bytes_are_split_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the rows of many bytes are looked for, the loop turns; then each request gets its own."""
    real, begun, go_on = dispatch.split_rows, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return real(*arguments)

    monkeypatch.setattr(dispatch, "split_rows", slow)
    process = Process()
    dispatcher = dispatcher_of(process, concurrency=1)
    large = [texts("a" * 200_000), texts("b" * 200_000)]
    tickets = [submit(dispatcher, JOINED, numbers(i), texts("")) for i in range(2)]  # both places
    tickets += [submit(dispatcher, JOINED, numbers(i), large[i]) for i in range(2)]
    process.echo(0)
    process.echo(1)
    process.echo(2)
    await asyncio.to_thread(begun.wait, 10)
    go_on.set()
    answers = [await ticket.future for ticket in tickets[2:]]
    assert [bytes(answer.outputs[0].data) for answer in answers] == [bytes(one.data) for one in large]
    assert [values(answer.outputs[1:]) for answer in answers] == [[[0]], [[1]]]
    await asyncio.gather(*(ticket.future for ticket in tickets[:2]))


async def test_delay_waits_for_others(clock: Clock) -> None:
    """With a delay the first request waits, and goes alone when nobody comes."""
    process = Process()
    dispatcher = dispatcher_of(process)
    ticket = submit(dispatcher, PATIENT, numbers(1))
    assert process.sent == []
    clock.now += 0.001
    await process.called.wait()
    process.echo(0)
    assert (await ticket.future).batch == 1
    tickets = [submit(dispatcher, PATIENT, numbers(i)) for i in range(4)]
    assert process.sent[1][1] == [(4,)]  # full: at once
    process.echo(1)
    assert [(await ticket.future).batch for ticket in tickets] == [4] * 4
    dispatcher.stop()


async def test_error_of_a_call_is_that_of_all_its_requests() -> None:
    """Requests that share a call share its failure."""
    process = Process()
    dispatcher = dispatcher_of(process)
    tickets = [submit(dispatcher, PATIENT, numbers(i)) for i in range(4)]
    process.fail(0, 503)
    for ticket in tickets:
        refusal = await refusal_of(ticket)
        assert (refusal.status, refusal.outcome, refusal.retry_after_s, str(refusal)) == (503, "no_room", 1, "why")


async def test_full_queue() -> None:
    """Beyond its size the queue takes nothing, and says when to try again."""
    process = Process()
    dispatcher = dispatcher_of(process, max_queue=2)
    tickets = [submit(dispatcher, SINGLE, numbers(i)) for i in range(2)]
    with pytest.raises(Refusal, match="2 requests are waiting") as caught:
        submit(dispatcher, SINGLE, numbers(3))
    assert (caught.value.status, caught.value.retry_after_s, caught.value.outcome) == (429, 1, "overloaded")
    process.echo(0)
    await tickets[0].future
    tickets.append(submit(dispatcher, SINGLE, numbers(3)))
    process.echo(1)
    process.echo(2)
    await asyncio.gather(*(ticket.future for ticket in tickets[1:]))


async def test_bytes_are_limited() -> None:
    """Bodies have so many bytes together; what is let go makes room."""
    dispatcher = dispatcher_of(Process())
    dispatcher.hold(60)
    dispatcher.hold(40)
    with pytest.raises(Refusal, match="too many bytes") as caught:
        dispatcher.hold(1)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1)
    dispatcher.let_go(60)
    dispatcher.hold(1)
    assert dispatcher.held_nbytes == 41


def submit_held(dispatcher: Dispatcher, nbytes: int, **options: Any) -> tuple[Ticket, Held]:
    held = Held(dispatcher)
    held.resize(nbytes)
    return submit(dispatcher, SINGLE, numbers(1), held=held, **options), held


@pytest.mark.parametrize("how", ["taken", "answered", "lost"])
async def test_bytes_count_until_they_have_left(how: str) -> None:
    """The bytes of a request that ends while they wait for the device process keep their room until they are gone."""
    process = Process()
    dispatcher = dispatcher_of(process)
    early, first = submit_held(dispatcher, 10)
    process.taken_nbytes = process.sent_nbytes
    late, second = submit_held(dispatcher, 60)
    for ticket, held in ((early, first), (late, second)):
        dispatcher.abandon(ticket, Refusal(504, "too late", "timeout"))
        await refusal_of(ticket)
        held.resize(0)
    with pytest.raises(Refusal, match="too many bytes"):
        dispatcher.hold(41)
    dispatcher.hold(40)
    dispatcher.let_go(40)
    if how == "taken":
        process.taken_nbytes = process.sent_nbytes
    elif how == "answered":
        process.fail(1, 499)
    else:
        process.calls.pop(1).on_lost("a fault")
    dispatcher.hold(100)
    dispatcher.let_go(100)
    assert dispatcher.held_nbytes == 0


async def test_inputs_do_not_outlive_their_request() -> None:
    """What waits in a lane, and what was joined with others, keeps nothing that is not needed any more."""
    process = Process()
    dispatcher = dispatcher_of(process, concurrency=1)
    tickets = [submit(dispatcher, SINGLE, numbers(i)) for i in range(2)]
    assert not tickets[0].request.inputs
    assert tickets[1].request.inputs
    dispatcher.abandon(tickets[1], Refusal(504, "too late", "timeout"))
    assert not tickets[1].request.inputs
    process.echo(0)
    assert len(process.sent) == 1
    await asyncio.wait([ticket.future for ticket in tickets])
    await refusal_of(tickets[1])


async def test_no_device() -> None:
    """Without a device process that takes calls a request is refused, with the reason."""
    dispatcher = dispatcher_of()
    with pytest.raises(Refusal, match="nobody is there") as caught:
        submit(dispatcher, SINGLE, numbers(3))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1)


async def test_lost_device() -> None:
    """What was on a lost device is refused with 503; what waited goes to another device, or is refused, too."""
    first, second = Process(), Process()
    dispatcher = dispatcher_of(first, second, concurrency=1)
    tickets = [submit(dispatcher, SINGLE, numbers(i)) for i in range(3)]
    dispatcher._supervisor.ready.remove(first)  # type: ignore[arg-type]
    first.calls.pop(0).on_lost("a fault")
    dispatcher.on_change()
    refusal = await refusal_of(tickets[0])
    assert (refusal.status, refusal.outcome, refusal.retry_after_s) == (503, "device_lost", 1)
    assert "a fault" in str(refusal)
    second.echo(0)
    assert values((await tickets[1].future).outputs) == [[1]]
    tickets.append(submit(dispatcher, SINGLE, numbers(3)))
    dispatcher._supervisor.ready.remove(second)  # type: ignore[arg-type]
    second.calls.pop(1).on_lost("another fault")
    dispatcher.on_change()
    assert "another fault" in str(await refusal_of(tickets[2]))
    assert (await refusal_of(tickets[3])).outcome == "unavailable"
    assert dispatcher.in_flight == 0


async def test_device_that_hangs_gets_nothing_more() -> None:
    """What could go to a device that makes no progress waits for a place at another, and goes there when it does."""
    first, second = Process(), Process()
    dispatcher = dispatcher_of(first, second, concurrency=1)
    dispatcher._supervisor.stuck.append(first)  # type: ignore[attr-defined]  # the test's own
    for number in range(2):
        submit(dispatcher, SINGLE, numbers(number))
    assert (len(first.sent), len(second.sent)) == (0, 1)
    dispatcher._supervisor.stuck.clear()  # type: ignore[attr-defined]  # the test's own
    dispatcher.on_change()
    assert (len(first.sent), len(second.sent)) == (1, 1)


async def test_waiting_requests_go_to_the_replacement() -> None:
    """A device process that comes up takes what waits for another."""
    first, second = Process(), Process()
    dispatcher = dispatcher_of(first, concurrency=1)
    tickets = [submit(dispatcher, SINGLE, numbers(i)) for i in range(2)]
    dispatcher._supervisor.ready.append(second)  # type: ignore[arg-type]
    dispatcher.on_change()
    first.echo(0)
    second.echo(0)
    assert [values((await ticket.future).outputs) for ticket in tickets] == [[[0]], [[1]]]


async def test_deadline() -> None:
    """A request that is late is refused where it is; one on a device is cancelled there, and its answer ignored."""
    process = Process()
    dispatcher = dispatcher_of(process, concurrency=1)
    sent = submit(dispatcher, SINGLE, numbers(1), timeout_s=0.001)
    waiting = submit(dispatcher, SINGLE, numbers(2), timeout_s=0.001)
    assert (await refusal_of(sent)).status == 504
    assert (await refusal_of(waiting)).outcome == "timeout"
    assert process.cancelled == [0]
    process.fail(0, 499)
    assert len(process.sent) == 1  # nobody waits for the second
    last = submit(dispatcher, SINGLE, numbers(3))
    process.echo(1)
    assert values((await last.future).outputs) == [[3]]


async def test_waiter_that_was_cancelled() -> None:
    """A request whose waiter was cancelled leaves the worker when it is abandoned."""
    process = Process()
    dispatcher = dispatcher_of(process)
    ticket = submit(dispatcher, SINGLE, numbers(1))
    ticket.future.cancel()
    assert dispatcher.in_flight == 1
    dispatcher.abandon(ticket, Refusal(499, "gone", "cancelled"))
    assert (dispatcher.in_flight, process.cancelled) == (0, [0])
    process.fail(0, 499)
    assert await dispatcher.drain(0)


async def test_call_is_cancelled_with_its_last_request() -> None:
    """A call for several is cancelled when nobody waits for it any more."""
    process = Process()
    dispatcher = dispatcher_of(process)
    tickets = [submit(dispatcher, PATIENT, numbers(i)) for i in range(4)]
    gone = Refusal(499, "gone", "cancelled")
    for ticket in tickets[:3]:
        dispatcher.abandon(ticket, gone)
    assert process.cancelled == []
    dispatcher.abandon(tickets[3], gone)
    dispatcher.abandon(tickets[3], gone)
    assert process.cancelled == [0]
    for ticket in tickets:
        assert await refusal_of(ticket) is gone
    process.fail(0, 499)


async def test_progress_is_not_shared(clock: Clock) -> None:
    """A request that wants to hear of its progress has a call to itself."""
    process = Process()
    dispatcher = dispatcher_of(process)
    heard: list[tuple[int, int]] = []
    tickets = [submit(dispatcher, PATIENT, numbers(i)) for i in range(3)]
    tickets.append(submit(dispatcher, PATIENT, numbers(9), on_progress=lambda *said: heard.append(said)))
    tickets.append(submit(dispatcher, PATIENT, numbers(3)))
    assert process.sent[0][1] == [(4,)]
    process.called.clear()
    clock.now += 0.001
    await process.called.wait()
    assert process.sent[1][1:] == ([(1,)], [numbers(9).data], True)
    process.calls[1].on_progress(1, 2)
    process.echo(0)
    process.echo(1)
    await asyncio.gather(*(ticket.future for ticket in tickets))
    assert heard == [(1, 2)]


async def test_endpoint_that_was_declared_anew() -> None:
    """When a new device process declares an endpoint otherwise, what waits for the old one is refused."""
    process = Process()
    dispatcher = dispatcher_of(process, concurrency=1)
    tickets = [submit(dispatcher, SINGLE, numbers(i)) for i in range(2)]
    same = Declaration.from_message(SINGLE.as_message())
    tickets.append(submit(dispatcher, same, numbers(2)))
    other = Declaration("single", (INT,), (INT, INT), 0, 0)
    tickets.append(submit(dispatcher, other, numbers(3)))
    for ticket in tickets[1:3]:
        assert (await refusal_of(ticket)).status == 503
    process.echo(0)
    await tickets[0].future
    assert len(process.sent) == 2
    process.fail(1, 500)
    await refusal_of(tickets[3])


async def test_drain() -> None:
    """While draining nothing is taken; it ends when everything was answered, or the time is over."""
    process = Process()
    dispatcher = dispatcher_of(process)
    ticket = submit(dispatcher, SINGLE, numbers(1))
    assert not await dispatcher.drain(0.001)
    with pytest.raises(Refusal, match="shutting down") as caught:
        submit(dispatcher, SINGLE, numbers(1))
    assert (caught.value.status, caught.value.outcome) == (503, "draining")
    draining = asyncio.create_task(dispatcher.drain(5.0))
    process.echo(0)
    assert await draining
    assert values((await ticket.future).outputs) == [[1]]


async def test_stop_refuses_what_waits() -> None:
    """Stopping leaves no request without an answer."""
    process = Process()
    dispatcher = dispatcher_of(process)
    ticket = submit(dispatcher, PATIENT, numbers(1))
    dispatcher.stop()
    assert (await refusal_of(ticket)).status == 503
