"""The queue between clients and device processes: who may enter, what goes where, and what happens in time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from aiooffload.service.app import Declaration
from aiooffload.service.batching import Batch, Batcher
from aiooffload.service.process import DeviceProcess
from aiooffload.service.protocol import InferRequest, Tensor
from aiooffload.service.supervisor import Supervisor
from aiooffload.service.tensors import Data, split_rows
from aiooffload.service.threads import THREAD_FROM_NBYTES

__all__ = ["RETRY_AFTER_S", "Answer", "Dispatcher", "Held", "Refusal", "Ticket"]

RETRY_AFTER_S: Final = 1
BATCHES_IN_FLIGHT: Final = 2
"""Of one endpoint on one device: one that runs, and one that is on its way."""


class Refusal(Exception):
    """A request has no result.

    Parameters
    ----------
    status
        That of HTTP.
    text
        What the client is told.
    outcome
        One word for metrics and logs.
    retry_after_s
        Seconds after which trying again makes sense; 0 if it does not.
    """

    def __init__(self, status: int, text: str, outcome: str, retry_after_s: int = 0) -> None:
        super().__init__(text)
        self.status: Final = status
        self.outcome: Final = outcome
        self.retry_after_s: Final = retry_after_s


@dataclass(slots=True)
class Answer:
    """What a call gave."""

    outputs: list[Tensor]
    device: str
    batch: int
    """How many requests the call had."""
    queue_s: float
    handler_s: float
    device_s: float
    first: bool = True
    """It is the call's first answer: what is counted once for each call is counted here."""

    @property
    def nbytes(self) -> int:
        """Of all outputs."""
        return sum([len(tensor.data) for tensor in self.outputs])


class Held:
    """How many bytes of a request, later of its answer, the worker has for it."""

    __slots__ = ("_dispatcher", "_nbytes")

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._nbytes = 0

    def resize(self, nbytes: int) -> None:
        """Hold so many instead; raises Refusal if there is no room for them."""
        if nbytes > self._nbytes:
            self._dispatcher.hold(nbytes - self._nbytes)
        elif nbytes < self._nbytes:
            self._dispatcher.let_go(self._nbytes - nbytes)
        self._nbytes = nbytes

    def replace(self, nbytes: int) -> None:
        """Hold so many instead, which are there already, be there room or not."""
        self._dispatcher.let_go(self._nbytes - nbytes)
        self._nbytes = nbytes

    def give(self) -> int:
        """Leave what is held to the caller, and return how much that is."""
        nbytes, self._nbytes = self._nbytes, 0
        return nbytes


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the queue or on a device, until its future is done."""

    declaration: Declaration
    request: InferRequest
    rows: int
    entered_at: float
    future: asyncio.Future[Answer]
    on_progress: Callable[[int, int], None] | None = None
    held: Held | None = None
    call: _BatchCall | None = None
    """Set when it was sent."""
    timer: asyncio.TimerHandle | None = None
    ended: bool = False
    """It is no longer in the worker. Its future may be done earlier only if its waiter was cancelled."""


@dataclass(slots=True, eq=False)
class _BatchCall:
    """One call of a handler, for one or more tickets."""

    dispatcher: Dispatcher
    lane: _Lane
    process: DeviceProcess
    tickets: list[Ticket]
    sent_at: float
    number: int = 0
    end: int = 0
    """How many bytes its process had been sent with it."""
    kept_nbytes: int = 0
    """Of requests that ended before the call had left."""
    waiting: int = field(init=False)
    """Tickets whose client still waits."""

    def __post_init__(self) -> None:
        self.waiting = len(self.tickets)

    def on_answer(self, message: dict[str, Any], outputs: Sequence[memoryview]) -> None:
        self.lane.release(self.process)
        self.dispatcher.let_go_of(self)
        if message["kind"] == "error":
            status = message["status"]
            retry = RETRY_AFTER_S if status == 503 else 0
            self._refuse(Refusal(status, message["text"], _OUTCOMES.get(status, "failed"), retry))
        elif self._is_slow(outputs):
            self.dispatcher.start(self._resolve_in_thread(message, outputs))
        else:
            self._resolve(message, self._split(message, outputs))
        self.dispatcher.pump(self.lane)

    def _is_slow(self, outputs: Sequence[memoryview]) -> bool:
        """Whether rows are to be found in so much of BYTES that the loop would be held up."""
        if len(self.tickets) == 1:
            return False
        specs = self.lane.declaration.outputs
        nbytes = [len(data) for spec, data in zip(specs, outputs, strict=True) if not spec.datatype.nbytes]
        return sum(nbytes) >= THREAD_FROM_NBYTES

    async def _resolve_in_thread(self, message: dict[str, Any], outputs: Sequence[memoryview]) -> None:
        self._resolve(message, await asyncio.to_thread(self._split, message, outputs))

    def _split(self, message: dict[str, Any], outputs: Sequence[memoryview]) -> list[list[Tensor]]:
        """Return the outputs of each ticket."""
        shapes = [tuple(shape) for shape in message["shapes"]]
        if len(self.tickets) == 1:
            return [[Tensor(shape, data) for shape, data in zip(shapes, outputs, strict=True)]]
        rows = [ticket.rows for ticket in self.tickets]
        specs = self.lane.declaration.outputs
        columns = [
            [
                Tensor((count, *shape[1:]), piece)
                for count, piece in zip(rows, split_rows(spec.datatype, shape, data, rows), strict=True)
            ]
            for spec, shape, data in zip(specs, shapes, outputs, strict=True)
        ]
        return [list(row) for row in zip(*columns, strict=True)]

    def _resolve(self, message: dict[str, Any], each: list[list[Tensor]]) -> None:
        tickets = self.tickets
        label = self.process.device["label"]
        for ticket, tensors in zip(tickets, each, strict=True):
            times = self.sent_at - ticket.entered_at, message["handler_s"], message["device_s"]
            self.dispatcher.finish(ticket, Answer(tensors, label, len(tickets), *times, ticket is tickets[0]))

    def on_lost(self, reason: str) -> None:
        self.lane.release(self.process)
        self.dispatcher.let_go_of(self)
        self._refuse(Refusal(503, f"the device process is gone: {reason}", "device_lost", RETRY_AFTER_S))

    def _refuse(self, refusal: Refusal) -> None:
        for ticket in self.tickets:
            self.dispatcher.finish(ticket, refusal)

    def on_progress(self, done: int, total: int) -> None:
        for ticket in self.tickets:
            if ticket.on_progress is not None:
                ticket.on_progress(done, total)

    def leave(self, ticket: Ticket) -> None:
        """A client waits no more; the last of them ends the call."""
        if ticket.held is not None and not self.process.has_taken(self.end):
            self.dispatcher.keep(self, ticket.held)
        self.waiting -= 1
        if not self.waiting:
            self.process.cancel(self.number)


_OUTCOMES: Final = {400: "invalid", 499: "cancelled", 503: "no_room", 504: "timeout"}


class _Lane:
    """What waits for one endpoint, and how much of it each device process has."""

    def __init__(self, declaration: Declaration, concurrency: int) -> None:
        self.declaration = declaration
        self.batcher: Batcher[Ticket] = Batcher(declaration.max_batch_size, declaration.batch_delay_us / 1e6)
        self.timer: asyncio.TimerHandle | None = None
        self._limit = BATCHES_IN_FLIGHT if declaration.max_batch_size else concurrency
        self._in_flight: dict[DeviceProcess, int] = {}

    def choose(self, processes: Sequence[DeviceProcess]) -> DeviceProcess | None:
        """Return the process with the fewest calls that may have another of this endpoint."""
        best = None
        for process in processes:
            if self._in_flight.get(process, 0) < self._limit and (best is None or len(process.calls) < len(best.calls)):
                best = process
        return best

    def take(self, process: DeviceProcess) -> None:
        """A call went to ``process``."""
        self._in_flight[process] = self._in_flight.get(process, 0) + 1

    def release(self, process: DeviceProcess) -> None:
        """A call of ``process`` has ended; one that is gone is forgotten with its last."""
        left = self._in_flight[process] - 1
        if left:
            self._in_flight[process] = left
        else:
            del self._in_flight[process]


class Dispatcher:
    """Takes requests, joins them, hands them to device processes.

    Parameters
    ----------
    supervisor
        Whose processes are used.
    max_queue
        How many requests may be in the worker, waiting or on a device.
    max_nbytes
        How many bytes there may be of their bodies and answers: of a body from when it comes until the request has
        ended and a device process has taken it, of an answer until its client has.
    concurrency
        How many calls of an endpoint without batching one device process has at a time.

    Notes
    -----
    *Refusals.* With no device process that takes calls, what comes and what waits is refused at once (503): nobody
    knows when one will be there. A full queue is 429.
    """

    def __init__(self, supervisor: Supervisor, max_queue: int, max_nbytes: int, concurrency: int) -> None:
        self.in_flight = 0
        self.held_nbytes = 0
        self.draining = False
        self._supervisor = supervisor
        self._max_queue = max_queue
        self._max_nbytes = max_nbytes
        self._concurrency = concurrency
        self._lanes: dict[str, _Lane] = {}
        self._keeping: set[_BatchCall] = set()  # each with bytes of its own in held_nbytes
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def check_open(self) -> None:
        """Refuse a request whose body was not even read.

        Raises
        ------
        Refusal
            None would be taken now.
        """
        if self.draining:
            raise Refusal(503, "the server is shutting down", "draining", RETRY_AFTER_S)
        if self.in_flight >= self._max_queue:
            raise Refusal(429, f"{self.in_flight} requests are waiting already", "overloaded", RETRY_AFTER_S)
        if not self._supervisor.ready:
            raise Refusal(503, self._supervisor.why_not_ready(), "unavailable", RETRY_AFTER_S)

    def hold(self, nbytes: int) -> None:
        """Count bytes of a body, until as many are given to :meth:`let_go`; raises Refusal if they are too many."""
        if self.held_nbytes + nbytes > self._max_nbytes:
            for call in [call for call in self._keeping if call.process.has_taken(call.end)]:
                self.let_go_of(call)
        if self.held_nbytes + nbytes > self._max_nbytes:
            raise Refusal(429, "too many bytes of requests are waiting already", "overloaded", RETRY_AFTER_S)
        self.held_nbytes += nbytes

    def let_go(self, nbytes: int) -> None:
        """Bytes that were held are no longer there."""
        self.held_nbytes -= nbytes

    def keep(self, call: _BatchCall, held: Held) -> None:
        """Go on counting the bytes of a request that ends while they wait for the device process."""
        call.kept_nbytes += held.give()
        self._keeping.add(call)

    def let_go_of(self, call: _BatchCall) -> None:
        """The bytes of a call have left, or its process is gone."""
        if call.kept_nbytes:
            self.let_go(call.kept_nbytes)
            call.kept_nbytes = 0
            self._keeping.discard(call)

    def submit(
        self,
        declaration: Declaration,
        request: InferRequest,
        timeout_s: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        held: Held | None = None,
    ) -> Ticket:
        """Take a request; its ticket's future gets the Answer, or a Refusal.

        Parameters
        ----------
        declaration
            Its endpoint.
        request
            What was asked for.
        timeout_s
            After so many seconds it is refused, with 504, wherever it is; None for never.
        on_progress
            Called with what its kernels say of their progress. Such a request is never joined with others.
        held
            What counts its bytes; if it ends before they have left, they are counted until then.

        Raises
        ------
        Refusal
            It is not taken.
        """
        self.check_open()
        loop = asyncio.get_running_loop()
        lane = self._lanes.get(declaration.name)
        if lane is None or lane.declaration is not declaration:
            lane = self._renew(declaration, lane)
        now = time.monotonic()  # finer than the loop's, which is in milliseconds
        rows = request.inputs[0].shape[0] if declaration.max_batch_size else 1
        ticket = Ticket(declaration, request, rows, now, loop.create_future(), on_progress, held)
        self.in_flight += 1
        self._idle.clear()
        if timeout_s is not None:
            ticket.timer = loop.call_later(timeout_s, self._expire, ticket, timeout_s)
        alone = None if on_progress is None else ticket
        lane.batcher.put(ticket, rows, (alone, *(tensor.shape[1:] for tensor in request.inputs)), now)
        self.pump(lane)
        return ticket

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Let something go on that a ticket waits for."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _renew(self, declaration: Declaration, old: _Lane | None) -> _Lane:
        """Return a lane for an endpoint that is new, or was declared anew by another device process."""
        if old is not None and old.declaration == declaration:
            old.declaration = declaration
            return old
        if old is not None:
            self._refuse_waiting(old, Refusal(503, "the program was replaced", "unavailable", RETRY_AFTER_S))
        lane = self._lanes[declaration.name] = _Lane(declaration, self._concurrency)
        return lane

    def finish(self, ticket: Ticket, end: Answer | Refusal) -> None:
        """Give a ticket its end, unless it had one."""
        if ticket.ended:
            return
        ticket.ended = True
        ticket.call = None  # which has the ticket: nothing is left to the cyclic collector
        ticket.request.inputs.clear()  # it may be in its lane for long yet
        if ticket.timer is not None:
            ticket.timer.cancel()
        self.in_flight -= 1
        if not self.in_flight:
            self._idle.set()
        if ticket.future.done():
            return
        if isinstance(end, Refusal):
            ticket.future.set_exception(end)
        else:
            ticket.future.set_result(end)

    def _expire(self, ticket: Ticket, timeout_s: float) -> None:
        self.abandon(ticket, Refusal(504, f"the deadline of {timeout_s:g} s has passed", "timeout"))

    def abandon(self, ticket: Ticket, refusal: Refusal) -> None:
        """End a request that nobody waits for any more; a call that has no other is cancelled."""
        call = ticket.call
        if not ticket.ended:
            self.finish(ticket, refusal)
            if call is not None:
                call.leave(ticket)

    def pump(self, lane: _Lane) -> None:
        """Send what may start now and has a place."""
        if lane.batcher.next_due() is None:
            return
        now = time.monotonic()
        processes = self._supervisor.moving  # what waits for a place there is better off than what hangs
        while (process := lane.choose(processes)) is not None:
            batch = lane.batcher.take(now)
            if batch is None:
                self._set_timer(lane, now)
                return
            self._send(lane, process, batch, now)

    def _send(self, lane: _Lane, process: DeviceProcess, batch: Batch[Ticket], now: float) -> None:
        tickets = [ticket for ticket in batch.items if not ticket.ended]
        if not tickets:
            return
        call = _BatchCall(self, lane, process, tickets, now)
        for ticket in tickets:
            ticket.call = call
        requests = [ticket.request for ticket in tickets]
        shapes, data = _joined(requests, sum(ticket.rows for ticket in tickets))
        for request in requests:
            request.inputs.clear()  # joined, they are there once more
        lane.take(process)
        progress = any(ticket.on_progress is not None for ticket in tickets)
        call.number = process.call(lane.declaration.name, shapes, data, call, progress)
        call.end = process.sent_nbytes

    def _set_timer(self, lane: _Lane, now: float) -> None:
        """Look again when the next call is due."""
        due = lane.batcher.next_due()
        if due is not None and lane.timer is None:
            # The loop's timers are in whole milliseconds: never before it is due.
            delay_s = math.ceil((due - now) * 1000) / 1000
            lane.timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer, lane)

    def _on_timer(self, lane: _Lane) -> None:
        lane.timer = None
        self.pump(lane)

    def on_change(self) -> None:
        """A device process came up or is gone, or makes progress no more or again."""
        if self._supervisor.ready:
            for lane in self._lanes.values():
                self.pump(lane)
            return
        reason = self._supervisor.why_not_ready()
        for lane in self._lanes.values():
            self._refuse_waiting(lane, Refusal(503, reason, "unavailable", RETRY_AFTER_S))

    def _refuse_waiting(self, lane: _Lane, refusal: Refusal) -> None:
        for ticket in lane.batcher.clear():
            self.finish(ticket, refusal)

    async def drain(self, timeout_s: float) -> bool:
        """Take nothing more and wait for what was taken; False if so many seconds were not enough."""
        self.draining = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Refuse what is still there; nothing happens any more afterwards."""
        for lane in self._lanes.values():
            if lane.timer is not None:
                lane.timer.cancel()
            self._refuse_waiting(lane, Refusal(503, "the server is shutting down", "draining", RETRY_AFTER_S))


def _joined(requests: Sequence[InferRequest], rows: int) -> tuple[list[tuple[int, ...]], list[Data]]:
    """Return shapes and data of the inputs of a call for these requests, one behind the other."""
    first = requests[0].inputs
    if len(requests) == 1:
        return [tensor.shape for tensor in first], [tensor.data for tensor in first]
    shapes = [(rows, *tensor.shape[1:]) for tensor in first]
    return shapes, [b"".join(request.inputs[i].data for request in requests) for i in range(len(first))]
