"""The routes: the Open Inference Protocol v2 over HTTP, and what operators ask."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import Any, Final

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from aiooffload.service import protocol
from aiooffload.service.dispatch import Refusal
from aiooffload.service.infer import BUG, JSON, ClientGone, Infer, Site, read_body, send_whole
from aiooffload.service.metrics import CONTENT_TYPE
from aiooffload.service.protocol import ProtocolError

__all__ = ["make_app"]

_OPEN: Final = frozenset(("/v2/health/live", "/v2/health/ready"))
"""Paths that need no token: whoever probes a container has none."""


def make_app(site: Site) -> ASGIApp:
    """Return the ASGI application."""
    infer = Infer(site)
    views = Views(site)
    model = "/v2/models/{model}"
    both = [model, model + "/versions/{version}"]
    app = Starlette(
        routes=[
            *(Route(path + "/infer", infer, methods=["POST"]) for path in both),  # for what Shortcut leaves
            Route("/v2/health/live", views.live),
            Route("/v2/health/ready", views.ready),
            Route("/metrics", views.metrics),
            *(Route(path + "/ready", views.model_ready) for path in both),
            *(Route(path, views.model) for path in both),
            Route("/v2/repository/index", views.repository, methods=["POST"]),
            Route("/v2", views.server),
            Route("/v2/", views.server),
        ],
        exception_handlers={
            HTTPException: _on_http_error,
            ProtocolError: _on_protocol_error,
            Refusal: _on_refusal,
            ClientGone: _on_client_gone,
            500: _on_bug,
        },
    )
    whole = Shortcut(app, infer)
    return Guard(whole, site) if site.token else whole


class Shortcut:
    """Inference past Starlette's router and middlewares, which would take an eighth of a small request's time."""

    def __init__(self, app: ASGIApp, infer: Infer) -> None:
        self._app = app
        self._infer = infer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            match scope["path"].split("/"):
                case ["", "v2", "models", model, "infer"] if model:
                    scope["path_params"] = {"model": model}
                    return await self._infer(scope, receive, send)
                case ["", "v2", "models", model, "versions", version, "infer"] if model and version:
                    scope["path_params"] = {"model": model, "version": version}
                    return await self._infer(scope, receive, send)
        return await self._app(scope, receive, send)


class Guard:
    """Lets nobody in without the token."""

    def __init__(self, app: ASGIApp, site: Site) -> None:
        self._app = app
        self._metrics = site.metrics
        self._expected = site.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN:
            given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
            scheme, _, token = given.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(token, self._expected):
                self._metrics.refused("token")
                headers = [JSON, (b"www-authenticate", b"Bearer"), (b"connection", b"close")]
                await send_whole(send, 401, headers, protocol.error_body("a bearer token is needed"))
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


async def _on_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    headers = {"retry-after": str(error.retry_after_s)} if error.retry_after_s else None
    return _json({"error": str(error)}, error.status, headers)


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return _json({"error": "the client is gone"}, 499)  # which nobody reads


async def _on_bug(request: Request, error: Exception) -> Response:
    return _json({"error": BUG}, 500)


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
                "pid": slot.ready.pid if slot.ready else 0,
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
        body = await read_body(dict(request.scope["headers"]), request.receive, 1 << 16)
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
