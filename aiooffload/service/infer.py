"""The route that matters: inference, as one response or as a stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qs

import orjson
from starlette.types import Receive, Scope, Send

from aiooffload.log import log
from aiooffload.service import protocol
from aiooffload.service.app import Declaration
from aiooffload.service.connections import ABORT
from aiooffload.service.dispatch import RETRY_AFTER_S, Answer, Dispatcher, Held, Refusal, Ticket
from aiooffload.service.logs import log_request
from aiooffload.service.metrics import Metrics
from aiooffload.service.protocol import InferRequest, ProtocolError
from aiooffload.service.supervisor import Supervisor
from aiooffload.service.threads import maybe_in_thread

__all__ = ["BUG", "DEADLINE", "JSON", "ClientGone", "Infer", "Site", "header", "natural", "read_body", "send_whole"]

DEADLINE: Final = b"x-request-timeout-ms"
"""The header in which a client says how many milliseconds the answer is worth waiting for."""
MOST_DEADLINE_MS: Final = 86_400_000
WATCH_AFTER_S: Final = 0.02
"""A request that takes longer is watched for its client going away; for shorter ones that is not worth its price."""
COMPRESS_FROM_NBYTES: Final = 1024
INFLATION: Final = 1032
"""How many bytes one of a compressed body can stand for."""
COMMENT_S: Final = 15.0
"""A stream without news has a comment so often, for whoever closes silent connections."""
SEND_S: Final = 30.0
"""How long a client may take to take an event, or a piece of an answer."""
PIECE_NBYTES: Final = 256 << 10
"""An answer that has more is sent in such pieces, and is held until the client has taken it."""
BUG: Final = "the server failed; its log says how"
JSON: Final = (b"content-type", b"application/json")
_TRACE_NBYTES: Final = 128
_EVENTS: Final = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"))

Headers: TypeAlias = Mapping[bytes, bytes]
"""By name, in lower case; of several of one name the last."""


class ClientGone(Exception):
    """The client closed the connection, or takes nothing; nobody is to be answered."""


@dataclass(frozen=True, slots=True)
class Site:
    """What the routes work on."""

    supervisor: Supervisor
    dispatcher: Dispatcher
    metrics: Metrics
    version: str
    token: str = ""
    max_body_nbytes: int = 64 << 20
    max_json_nbytes: int = 8 << 20
    request_timeout_s: float = 60.0

    def declaration(self, name: str, version: str = "") -> Declaration:
        """Return an endpoint's declaration; raises ProtocolError if there is none, Refusal if none is known yet."""
        for one in self.supervisor.declarations:
            if one.name == name and version in ("", protocol.VERSION):
                return one
        if not self.supervisor.declarations:
            reason = self.supervisor.why_not_ready() or "no model is there yet"
            raise Refusal(503, reason, "unavailable", RETRY_AFTER_S)
        shown = f"{name[: protocol.MAX_NAME]!r}" + (f" version {version[:32]!r}" if version else "")
        raise ProtocolError(f"unknown model {shown}", 404)

    def why_not_ready(self) -> str:
        """Return why no request is served now; "" if it is."""
        return "the server is shutting down" if self.dispatcher.draining else self.supervisor.why_not_ready()


async def read_body(
    headers: Headers, receive: Receive, most: int, arrived: Callable[[int], None] | None = None
) -> bytes:
    """Return the body of a request; ``arrived`` is called with how many bytes of it are there, as they come.

    Raises
    ------
    ProtocolError
        It has more bytes than ``most``, or says so; then it was not read to its end.
    ClientGone
        It ended too early.
    """
    length = header(headers, b"content-length")
    if length.isdigit() and int(length[:20]) > most:
        raise ProtocolError(f"the body has more than {most} bytes", 413)
    message = await receive()
    if message["type"] == "http.request" and not message.get("more_body"):
        body: bytes = message.get("body", b"")
        if len(body) > most:
            raise ProtocolError(f"the body has more than {most} bytes", 413)
        return body
    parts, nbytes = [], 0
    while True:
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        nbytes += len(part)
        if nbytes > most:
            raise ProtocolError(f"the body has more than {most} bytes", 413)
        if arrived is not None:
            arrived(nbytes)
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


def header(headers: Headers, name: bytes) -> str:
    value = headers.get(name)
    return "" if value is None else value.decode("latin-1")


async def send_whole(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@dataclass(slots=True)
class _Record:
    """What the log and the metrics are told of one request."""

    began: float
    endpoint: str = ""
    id: str = ""
    traceparent: str = ""
    status: int = 0
    outcome: str = "ok"
    error: str = ""
    answer: Answer | None = None

    def fail(self, status: int, outcome: str, error: Exception) -> None:
        """Note how it failed."""
        self.status, self.outcome, self.error = status, outcome, str(error)


class _Progress:
    """What kernels said last, and a way to wait for more."""

    def __init__(self) -> None:
        self._news = asyncio.Event()
        self._last: tuple[int, int] | None = None  # what was not sent yet: a slow client misses some

    def said(self, done: int, total: int) -> None:
        self._last = done, total
        self._news.set()

    def ended(self, _: object) -> None:
        self._news.set()

    async def next(self) -> bytes:
        """Return the next event; a comment if there was nothing for a while, or nothing more."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), COMMENT_S)
        self._news.clear()
        if self._last is None:
            return b":\n\n"
        done, total = self._last
        self._last = None
        return _event("progress", orjson.dumps({"done": done, "total": total}))


class Infer:
    """The route that matters, as an ASGI application of its own."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = _Record(time.perf_counter())
        asked: Headers = dict(scope["headers"])
        record.traceparent = header(asked, b"traceparent")[:_TRACE_NBYTES]
        headers: list[tuple[bytes, bytes]]
        held = Held(self._site.dispatcher)
        try:
            path = scope["path_params"]
            declaration = self._site.declaration(path["model"], path.get("version", ""))
            record.endpoint = declaration.name
            self._site.dispatcher.check_open()
            streamed = _is_streamed(scope["query_string"])
            request = await self._read(declaration, asked, receive, held)
            record.id = request.id
            if streamed:
                await self._stream(declaration, request, asked, receive, send, record, held)
                self._note(record)
                return
            headers, body = await self._answer(declaration, request, asked, receive, record, held)
            record.status = 200
            if len(body) > PIECE_NBYTES:
                headers.append((b"content-length", b"%d" % len(body)))
                self._may_close(record, headers)
                await _send_in_time(send, {"type": "http.response.start", "status": 200, "headers": headers})
                await _send_rest(send, body)
                self._note(record)
                return
        except ProtocolError as error:
            record.fail(error.status, "invalid", error)
            headers, body = [JSON], protocol.error_body(str(error))
        except Refusal as error:
            record.fail(error.status, error.outcome, error)
            headers, body = [JSON], protocol.error_body(str(error))
            if error.retry_after_s:
                headers.append((b"retry-after", b"%d" % error.retry_after_s))
        except ClientGone as error:
            if record.status:  # it has a part of its response, which keeps the connection open until it is taken
                scope["extensions"][ABORT]()
            record.fail(499, "cancelled", error)
            self._note(record)
            return
        except Exception as error:  # a mistake of ours: the client is told, and the log has it
            log.error("a request failed", endpoint=record.endpoint, exc_info=error)
            if record.status:  # in the middle of a stream, which the server then cuts off
                raise
            record.fail(500, "failed", error)
            headers, body = [JSON], protocol.error_body(BUG)
        finally:
            held.resize(0)
        self._may_close(record, headers)
        self._note(record)
        await send_whole(send, record.status, headers, body)

    def _may_close(self, record: _Record, headers: list[tuple[bytes, bytes]]) -> None:
        """Let the connection end with this response, where it is to be the last."""
        if self._site.dispatcher.draining or record.status == 413:
            headers.append((b"connection", b"close"))

    async def _answer(
        self,
        declaration: Declaration,
        request: InferRequest,
        asked: Headers,
        receive: Receive,
        record: _Record,
        held: Held,
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return headers and body of a response that is a success."""
        ticket = self._site.dispatcher.submit(declaration, request, self._timeout_s(asked, request), held=held)
        record.answer = answer = await self._wait(ticket, receive)
        held.replace(answer.nbytes)
        slow_nbytes = sum(len(answer.outputs[wanted.place].data) for wanted in request.outputs if not wanted.binary)
        body, json_nbytes = await maybe_in_thread(
            slow_nbytes, protocol.encode_response, declaration, request, answer.outputs
        )
        headers = [JSON]
        if json_nbytes is not None:
            headers = [
                (b"content-type", b"application/octet-stream"),
                (protocol.HEADER_LENGTH.encode(), b"%d" % json_nbytes),
            ]
        if len(body) >= COMPRESS_FROM_NBYTES and (accepted := header(asked, b"accept-encoding")):
            body, encoding = await maybe_in_thread(len(body), protocol.compress, body, accepted)
            if encoding:
                headers.append((b"content-encoding", encoding.encode()))
        answer.outputs.clear()
        held.replace(len(body))
        return headers, body

    async def _stream(
        self,
        declaration: Declaration,
        request: InferRequest,
        asked: Headers,
        receive: Receive,
        send: Send,
        record: _Record,
        held: Held,
    ) -> None:
        """Answer with server-sent events: ``progress`` as kernels say it, then one ``result`` or ``error``."""
        if any(wanted.binary for wanted in request.outputs):
            raise ProtocolError("a stream of events has no binary outputs")
        progress = _Progress()
        timeout_s = self._timeout_s(asked, request)
        ticket = self._site.dispatcher.submit(declaration, request, timeout_s, progress.said, held)
        ticket.future.add_done_callback(progress.ended)
        watch = asyncio.create_task(self._watch(ticket, receive))
        record.status = 200
        try:
            await _send_in_time(send, {"type": "http.response.start", "status": 200, "headers": list(_EVENTS)})
            while not ticket.future.done():
                await _send_in_time(
                    send, {"type": "http.response.body", "body": await progress.next(), "more_body": True}
                )
            try:
                record.answer = answer = ticket.future.result()
                body, _ = protocol.encode_response(declaration, request, answer.outputs)
                answer.outputs.clear()
                last = _event("result", body)
                held.replace(len(last))
            except ProtocolError as error:
                record.fail(error.status, "invalid", error)
                last = _event("error", orjson.dumps({"error": str(error), "status": error.status}))
            except Refusal as error:
                record.fail(error.status, error.outcome, error)
                last = _event("error", orjson.dumps({"error": str(error), "status": error.status}))
            await _send_rest(send, last)
        finally:
            watch.cancel()
            self._site.dispatcher.abandon(ticket, Refusal(499, "the request was cancelled", "cancelled"))

    async def _read(self, declaration: Declaration, asked: Headers, receive: Receive, held: Held) -> InferRequest:
        site = self._site
        # What was only announced is not held: a few clients that send nothing would keep all others out.
        body = await read_body(asked, receive, site.max_body_nbytes, held.resize)
        if encoding := header(asked, b"content-encoding"):
            most = site.max_body_nbytes
            body = await maybe_in_thread(len(body) * INFLATION, protocol.decompress, body, encoding, most)
        held.resize(len(body))
        json_nbytes = natural(asked, protocol.HEADER_LENGTH.encode(), len(body))
        slow_nbytes = len(body) if json_nbytes is None else json_nbytes
        if slow_nbytes > site.max_json_nbytes:
            raise ProtocolError(f"more than {site.max_json_nbytes} bytes of JSON: send tensors in binary form", 413)
        if any(not spec.datatype.nbytes for spec in declaration.inputs):  # BYTES is looked at element by element
            slow_nbytes = len(body)
        request: InferRequest = await maybe_in_thread(
            slow_nbytes, protocol.parse_request, declaration, body, json_nbytes
        )
        return request

    def _timeout_s(self, asked: Headers, request: InferRequest) -> float | None:
        """Return the shortest of what the header, the request and the configuration ask for."""
        limits = [self._site.request_timeout_s or None, request.timeout_s]
        if (milliseconds := natural(asked, DEADLINE, MOST_DEADLINE_MS)) is not None:
            limits.append(milliseconds / 1000)
        return min((limit for limit in limits if limit is not None), default=None)

    async def _wait(self, ticket: Ticket, receive: Receive) -> Answer:
        """Wait for the answer; a client that goes away ends the request."""
        watch: asyncio.Task[None] | None = None

        def begin() -> None:
            nonlocal watch
            watch = asyncio.create_task(self._watch(ticket, receive))

        timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, begin)
        try:
            return await ticket.future
        except asyncio.CancelledError:
            self._site.dispatcher.abandon(ticket, Refusal(499, "the request was cancelled", "cancelled"))
            raise
        finally:
            timer.cancel()
            if watch is not None:
                watch.cancel()

    async def _watch(self, ticket: Ticket, receive: Receive) -> None:
        """End a request when its client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._site.dispatcher.abandon(ticket, Refusal(499, "the client is gone", "cancelled"))

    def _note(self, record: _Record) -> None:
        """Write the request's line, and count it."""
        seconds = time.perf_counter() - record.began
        line: dict[str, Any] = {
            "id": record.id,
            "endpoint": record.endpoint,
            "status": record.status,
            "outcome": record.outcome,
            "duration_ms": round(seconds * 1e3, 3),
        }
        answer = record.answer
        if answer is not None:
            line["device"] = answer.device
            line["batch"] = answer.batch
            line["queue_ms"] = round(answer.queue_s * 1e3, 3)
            line["handler_ms"] = round(answer.handler_s * 1e3, 3)
            line["device_ms"] = round(answer.device_s * 1e3, 3)
        if record.status == 200 and answer is not None:
            self._site.metrics.answered(record.endpoint, answer, seconds)
        else:
            self._site.metrics.ended(record.endpoint, record.outcome)
            line["error"] = record.error
        if record.traceparent:
            line["traceparent"] = record.traceparent
        log_request(line)


def natural(headers: Headers, name: bytes, most: int) -> int | None:
    """Return the number that a header has; None without the header."""
    if not (text := header(headers, name)):
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) > most:
        raise ProtocolError(f"{name.decode()} is a number from 0 to {most}, not {text[:32]!r}")
    return int(text)


def _is_streamed(query: bytes) -> bool:
    """Whether the query asks for a stream of events; what else it has is left alone."""
    if not query:
        return False
    values = parse_qs(query.decode("latin-1")).get("stream", ["0"])
    if values not in (["0"], ["1"]):
        raise ProtocolError("stream is 0 or 1")
    return values == ["1"]


def _event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


async def _send_in_time(send: Send, message: Any) -> None:
    """Send a part of a response to a client that may not be there, or may not read."""
    try:
        async with asyncio.timeout(SEND_S):
            await send(message)
    except TimeoutError:
        raise ClientGone("the client does not read") from None


async def _send_rest(send: Send, body: bytes) -> None:
    """Send the rest of a response in pieces; when it is done, nothing to speak of waits for the client to take it."""
    for at in range(0, len(body), PIECE_NBYTES):
        piece = body[at : at + PIECE_NBYTES]
        await _send_in_time(send, {"type": "http.response.body", "body": piece, "more_body": True})
    await _send_in_time(send, {"type": "http.response.body", "body": b""})
