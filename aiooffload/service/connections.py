"""What one client may take of the server: uvicorn's protocol with limits on time, headers and connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aiooffload.service.metrics import Refused
from aiooffload.service.protocol import error_body

__all__ = ["ABORT", "MAX_HEAD_NBYTES", "Limits", "limited"]

ABORT: Final = "aiooffload.abort"
"""The extension of ASGI that ends a connection at once, whatever the client has still to take."""
MAX_HEAD_NBYTES: Final = 64 << 10
"""Bytes of a request's line and headers, and of what follows without being its body: trailers, and what chunks say of
themselves. What comes in a single piece may have more, as much as a read gives."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a client is held to."""

    max_connections: int
    receive_timeout_s: float
    """From a request's first byte to its last; a new connection's first request counts from its opening."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. Nothing that a client does or leaves undone keeps it open for longer than the limits."""

    limits: Limits
    refused: Callable[[Refused], None]

    _deadline: asyncio.TimerHandle | None = None
    _in_head = True
    _head_nbytes = 0
    _went_on = False  # a head or a body ended, or there was some of a body, in the data that is looked at
    _left_nbytes = 0  # of responses that the client had not taken when its time began
    _head_again = b""  # of a request that asks for another protocol: without that, for another parser

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            self.refused("connections")
            transport.abort()
            return
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._unset_keepalive_if_required()  # uvicorn leaves it when the connection was reset
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        idle, self.timeout_keep_alive_task = self.timeout_keep_alive_task, None  # uvicorn would cancel it
        self._went_on = False
        self._parse(data)
        answered = self.cycle is not None and self.cycle.response_complete
        if answered and self._deadline is None and self.timeout_keep_alive_task is None:
            # No request has begun by it: line ends between two, or the end of one that was answered before it was read.
            self.timeout_keep_alive_task = idle or self._call_when_idle()
        elif idle is not None:
            idle.cancel()
        self._head_nbytes = 0 if self._went_on else self._head_nbytes + len(data)
        if self._head_nbytes > MAX_HEAD_NBYTES:
            if self._in_head:
                self._refuse("head", b"431 Request Header Fields Too Large", "the headers are too large")
            else:
                self.refused("head")
                self.transport.abort()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Only HTTP/1.1 is offered, so a wish for another protocol is left alone (RFC 9110, 7.8).

        The parser goes by that wish: it takes the head for a whole request, and what follows for the other protocol.
        """
        rest = memoryview(data)
        try:
            while True:
                try:
                    self.parser.feed_data(rest)
                    return
                except httptools.HttpParserUpgrade as upgrade:
                    rest = rest[upgrade.args[0] :]
                    self.parser = httptools.HttpRequestParser(self)
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
                    head, self._head_again = self._head_again, b""
                    self.parser.feed_data(head)
        except httptools.HttpParserError as error:
            self.logger.warning("a request is not HTTP: %s", error)
            self.send_400_response(str(error))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: self.transport.abort}  # type: ignore[dict-item]  # as no server defines it
        self._in_head = True
        if self._deadline is None:
            self._arm()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # trailers are no headers: whoever stands before this server has not looked at them
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserError("this is no proxy")
            lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self._head_again = b"\r\n".join((*lines, b"", b""))
            return
        self._in_head = False
        self._went_on = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._went_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._head_again:
            return
        self._went_on = True
        self._disarm()
        super().on_message_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection; one that has taken nothing of its response in all the time is cut off."""
        if self._takes():
            self.timeout_keep_alive_task = self._call_when_idle()
            return
        if not self.transport.is_closing() and self._left_nbytes:
            self.transport.abort()
        super().timeout_keep_alive_handler()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._takes()
        if self.transport.is_closing():
            self._cut_off_in_time()

    def _takes(self) -> bool:
        """Whether the client has taken something since this was last asked."""
        before, self._left_nbytes = self._left_nbytes, self.transport.get_write_buffer_size()
        return self._left_nbytes < before

    def send_400_response(self, msg: str) -> None:
        self._refuse("not_http", b"400 Bad Request", "the request is not HTTP")

    def _cut_off_in_time(self) -> None:
        """Give a client no longer to take some of its last response than an idle one has: closing waits for ever."""
        self._unset_keepalive_if_required()
        self._takes()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self._cut_off)

    def _cut_off(self) -> None:
        if self._takes():
            self._cut_off_in_time()
        else:
            self.transport.abort()

    def _call_when_idle(self) -> asyncio.TimerHandle:
        return self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self.limits.receive_timeout_s, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._refuse("slow", b"408 Request Timeout", "the request did not come in time")
            return
        self.refused("slow")
        if self.cycle.response_complete:  # answered before it was read: it gets no second response
            self.transport.close()
            self._cut_off_in_time()
        else:
            self.transport.abort()  # the application sees that the client is gone

    def _refuse(self, reason: Refused, status: bytes, text: str) -> None:
        """Answer a request that is none, or of which there is no whole head, and close."""
        if not self.transport.is_closing():
            self.refused(reason)
            body = error_body(text)
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
            self.transport.close()
            self._cut_off_in_time()


def limited(limits: Limits, refused: Callable[[Refused], None]) -> type[LimitedProtocol]:
    """Return a protocol class with these limits, as uvicorn's configuration takes it; it tells what it refuses."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "refused": staticmethod(refused)})
