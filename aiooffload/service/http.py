"""The routes of the Open Inference Protocol v2 over HTTP, and those that operators ask."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import orjson
import structlog
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from aiooffload.service import protocol
from aiooffload.service.app import Declaration
from aiooffload.service.dispatch import Answer, Dispatcher, Refusal, Ticket
from aiooffload.service.metrics import CONTENT_TYPE, Metrics
from aiooffload.service.protocol import InferRequest, ProtocolError
from aiooffload.service.supervisor import Supervisor

__all__ = ["DEADLINE", "Site", "make_app"]

DEADLINE: Final = b"x-request-timeout-ms"
"""The header in which a client says how many milliseconds the answer is worth waiting for."""
MOST_DEADLINE_MS: Final = 86_400_000
WATCH_AFTER_S: Final = 0.02
"""A request that takes longer is watched for its client going away; for shorter ones that is not worth its price."""
COMPRESS_FROM_NBYTES: Final = 1024
THREAD_FROM_NBYTES: Final = 256 << 10
"""(De)compressing so much is left to a thread."""
_TRACE_NBYTES: Final = 128
_JSON: Final = (b"content-type", b"application/json")
_OPEN: Final = frozenset(("/v2/health/live", "/v2/health/ready"))
"""Paths that need no token: whoever probes a container has none."""


Headers: TypeAlias = Mapping[bytes, bytes]
"""By name, in lower case; of several of one name the last."""


class ClientGone(Exception):
    """The client closed the connection; nobody is to be answered."""


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
        """Return an endpoint's declaration; raises ProtocolError if there is none."""
        for one in self.supervisor.declarations:
            if one.name == name and version in ("", protocol.VERSION):
                return one
        if not self.supervisor.declarations:
            raise ProtocolError(self.supervisor.why_not_ready() or "no model is there yet", 503)
        shown = f"{name[: protocol.MAX_NAME]!r}" + (f" version {version[:32]!r}" if version else "")
        raise ProtocolError(f"unknown model {shown}", 404)

    def why_not_ready(self) -> str:
        """Return why no request is served now; "" if it is."""
        return "the server is shutting down" if self.dispatcher.draining else self.supervisor.why_not_ready()


def make_app(site: Site) -> ASGIApp:
    """Return the ASGI application."""
    infer = Infer(site)
    views = Views(site)
    model = "/v2/models/{model}"
    both = [model, model + "/versions/{version}"]
    app = Starlette(
        routes=[
            *(Route(path + "/infer", infer, methods=["POST"]) for path in both),
            Route("/v2/health/live", views.live),
            Route("/v2/health/ready", views.ready),
            Route("/metrics", views.metrics),
            *(Route(path + "/ready", views.model_ready) for path in both),
            *(Route(path, views.model) for path in both),
            Route("/v2/repository/index", views.repository, methods=["POST"]),
            Route("/v2", views.server),
            Route("/v2/", views.server),
        ],
        exception_handlers={HTTPException: _on_http_error, ProtocolError: _on_protocol_error, 500: _on_bug},
    )
    return Guard(app, site.token) if site.token else app


class Guard:
    """Lets nobody in without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            if not hmac.compare_digest(given, self._expected):
                headers = [_JSON, (b"www-authenticate", b"Bearer"), (b"connection", b"close")]
                await _send(send, 401, headers, protocol.error_body("a bearer token is needed"))
                return
        await self._app(scope, receive, send)


def _json(content: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(content), status, headers, "application/json")


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code, error.headers)


async def _on_protocol_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProtocolError)
    return _json({"error": str(error)}, error.status)


async def _on_bug(request: Request, error: Exception) -> Response:
    return _json({"error": "the server failed; its log says how"}, 500)


class Views:
    """Everything that is answered without a device."""

    def __init__(self, site: Site) -> None:
        self._site = site

    async def live(self, request: Request) -> Response:
        """Say whether restarting the worker would be of no use."""
        reason = self._site.supervisor.why_dead()
        return _json({"live": False, "reason": reason}, 503) if reason else _json({"live": True})

    async def ready(self, request: Request) -> Response:
        """Say whether a request would be served now, and by which devices."""
        reason = self._site.why_not_ready()
        content: dict[str, Any] = {"ready": not reason, "devices": self._devices()}
        if reason:
            content["reason"] = reason
        return _json(content, 503 if reason else 200)

    def _devices(self) -> list[dict[str, Any]]:
        return [
            {
                "device": slot.ready.device["label"] if slot.ready else slot.device,
                "name": slot.ready.device["name"] if slot.ready else "",
                "up": slot.ready is not None,
                "generation": slot.generation,
            }
            for slot in self._site.supervisor.slots
        ]

    async def model_ready(self, request: Request) -> Response:
        """Say whether one endpoint would be served now."""
        declaration = self._site.declaration(**_model_of(request))
        reason = self._site.why_not_ready()
        return _json({"name": declaration.name, "ready": not reason}, 503 if reason else 200)

    async def model(self, request: Request) -> Response:
        """Describe one endpoint."""
        return _json(protocol.model_metadata(self._site.declaration(**_model_of(request))))

    async def server(self, request: Request) -> Response:
        """Describe the server."""
        return _json(protocol.server_metadata(self._site.supervisor.app_name or "aiooffload", self._site.version))

    async def repository(self, request: Request) -> Response:
        """List the endpoints."""
        body = await _read_body(dict(request.scope["headers"]), request.receive, 1 << 16)
        try:
            options = orjson.loads(body or b"{}")
        except orjson.JSONDecodeError as error:
            raise ProtocolError(f"the request is not JSON: {error}") from None
        only_ready = options.get("ready", False) if isinstance(options, dict) else None
        if type(only_ready) is not bool:
            raise ProtocolError("the request is an object in which ready is true or false")
        ready = not self._site.why_not_ready()
        return _json(protocol.repository_index(self._site.supervisor.declarations, ready, only_ready))

    async def metrics(self, request: Request) -> Response:
        """Tell Prometheus."""
        return Response(self._site.metrics.text(), headers={"content-type": CONTENT_TYPE})


def _model_of(request: Request) -> dict[str, str]:
    parameters = request.path_params
    return {"name": parameters["model"], "version": parameters.get("version", "")}


async def _read_body(headers: Headers, receive: Receive, most: int) -> bytes:
    """Return the body of a request.

    Raises
    ------
    ProtocolError
        It has more bytes than ``most``, or says so; then it was not read to its end.
    ClientGone
        It ended too early.
    """
    length = _header(headers, b"content-length")
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
        parts.append(part)
        if not message.get("more_body"):
            return b"".join(parts)
        message = await receive()


def _header(headers: Headers, name: bytes) -> str:
    value = headers.get(name)
    return "" if value is None else value.decode("latin-1")


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
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


class Infer:
    """The route that matters, as an ASGI application of its own."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._log = structlog.get_logger("aiooffload")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = _Record(time.perf_counter())
        asked: Headers = dict(scope["headers"])
        record.traceparent = _header(asked, b"traceparent")[:_TRACE_NBYTES]
        headers: list[tuple[bytes, bytes]]
        try:
            headers, body = await self._answer(scope["path_params"], asked, receive, record)
            record.status = 200
        except ProtocolError as error:
            headers, body = self._refused(record, error.status, str(error), "invalid")
        except Refusal as error:
            headers, body = self._refused(record, error.status, str(error), error.outcome)
            if error.retry_after_s:
                headers.append((b"retry-after", b"%d" % error.retry_after_s))
        except ClientGone:
            record.status, record.outcome = 499, "cancelled"
            self._note(record)
            return
        if self._site.dispatcher.draining or record.status == 413:
            headers.append((b"connection", b"close"))
        self._note(record)
        await _send(send, record.status, headers, body)

    def _refused(
        self, record: _Record, status: int, text: str, outcome: str
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        record.status, record.outcome, record.error = status, outcome, text
        return [_JSON], protocol.error_body(text)

    async def _answer(
        self, path: Mapping[str, str], asked: Headers, receive: Receive, record: _Record
    ) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Return headers and body of a response that is a success."""
        site = self._site
        declaration = site.declaration(path["model"], path.get("version", ""))
        record.endpoint = declaration.name
        site.dispatcher.check_open()
        request = await self._read(declaration, asked, receive)
        record.id = request.id
        ticket = site.dispatcher.submit(declaration, request, self._timeout_s(asked, request))
        record.answer = answer = await self._wait(ticket, receive)
        body, json_nbytes = protocol.encode_response(declaration, request, answer.outputs)
        headers = [_JSON]
        if json_nbytes is not None:
            headers = [
                (b"content-type", b"application/octet-stream"),
                (protocol.HEADER_LENGTH.encode(), b"%d" % json_nbytes),
            ]
        if len(body) >= COMPRESS_FROM_NBYTES and (accepted := _header(asked, b"accept-encoding")):
            body, encoding = await _maybe_in_thread(len(body), protocol.compress, body, accepted)
            if encoding:
                headers.append((b"content-encoding", encoding.encode()))
        return headers, body

    async def _read(self, declaration: Declaration, asked: Headers, receive: Receive) -> InferRequest:
        site = self._site
        body = await _read_body(asked, receive, site.max_body_nbytes)
        if encoding := _header(asked, b"content-encoding"):
            body = await _maybe_in_thread(len(body), protocol.decompress, body, encoding, site.max_body_nbytes)
        json_nbytes = _natural(asked, protocol.HEADER_LENGTH.encode(), len(body))
        if (len(body) if json_nbytes is None else json_nbytes) > site.max_json_nbytes:
            raise ProtocolError(f"more than {site.max_json_nbytes} bytes of JSON: send tensors in binary form", 413)
        return protocol.parse_request(declaration, body, json_nbytes)

    def _timeout_s(self, asked: Headers, request: InferRequest) -> float | None:
        """Return the shortest of what the header, the request and the configuration ask for."""
        limits = [self._site.request_timeout_s or None, request.timeout_s]
        if (milliseconds := _natural(asked, DEADLINE, MOST_DEADLINE_MS)) is not None:
            limits.append(milliseconds / 1000)
        return min((limit for limit in limits if limit is not None), default=None)

    async def _wait(self, ticket: Ticket, receive: Receive) -> Answer:
        """Wait for the answer; a client that goes away ends the request."""
        watch: asyncio.Task[None] | None = None

        async def watch_client() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._site.dispatcher.abandon(ticket, Refusal(499, "the client is gone", "cancelled"))

        def begin() -> None:
            nonlocal watch
            watch = asyncio.create_task(watch_client())

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

    def _note(self, record: _Record) -> None:
        """Write the request's line, and count it."""
        seconds = time.perf_counter() - record.began
        answer = record.answer
        details: dict[str, Any] = {}
        if answer is not None:
            if record.status == 200:
                self._site.metrics.answered(record.endpoint, answer, seconds)
            details = {
                "device": answer.device,
                "batch": answer.batch,
                "queue_ms": round(answer.queue_s * 1e3, 3),
                "handler_ms": round(answer.handler_s * 1e3, 3),
                "device_ms": round(answer.device_s * 1e3, 3),
            }
        if record.status != 200:
            self._site.metrics.ended(record.endpoint, record.outcome)
            details["error"] = record.error
        if record.traceparent:
            details["traceparent"] = record.traceparent
        self._log.info(
            "request",
            id=record.id,
            endpoint=record.endpoint,
            status=record.status,
            outcome=record.outcome,
            duration_ms=round(seconds * 1e3, 3),
            **details,
        )


def _natural(headers: Headers, name: bytes, most: int) -> int | None:
    """Return the number that a header has; None without the header."""
    if not (text := _header(headers, name)):
        return None
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or int(text) > most:
        raise ProtocolError(f"{name.decode()} is a number from 0 to {most}, not {text[:32]!r}")
    return int(text)


async def _maybe_in_thread(nbytes: int, function: Callable[..., Any], *arguments: Any) -> Any:
    if nbytes < THREAD_FROM_NBYTES:
        return function(*arguments)
    return await asyncio.to_thread(function, *arguments)
