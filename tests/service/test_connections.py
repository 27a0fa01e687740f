"""What one client may take of the server, by hand-made connections."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvicorn

from aiooffload.service.connections import MAX_HEAD_NBYTES, LimitedProtocol, Limits, limited
from tests.service.support import Response


class Site:
    """An ASGI application that reads everything, notes how that ended, and answers with so many bytes."""

    def __init__(self, nbytes: int = 2) -> None:
        self.ends: asyncio.Queue[str] = asyncio.Queue()
        self._nbytes = nbytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        while message.get("more_body"):
            message = await receive()
        self.ends.put_nowait(message["type"])
        headers = [(b"content-length", b"%d" % self._nbytes)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(self._nbytes)})


@asynccontextmanager
async def server_of(
    site: Site, keep_alive_s: float = 5.0, refused: Callable[[str], None] = lambda reason: None, **limits: Any
) -> AsyncIterator[int]:
    """A server with these limits; gives its port."""
    given = {"max_connections": 100, "receive_timeout_s": 5.0} | limits
    protocol = limited(Limits(**given), refused)
    config = uvicorn.Config(site, http=protocol, ws="none", lifespan="off", log_config=None)
    config.timeout_keep_alive = keep_alive_s  # type: ignore[assignment]
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[])
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(
        lambda: protocol(config=config, server_state=server.server_state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        await listener.wait_closed()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int, text: bytes = b"", **options: Any) -> Streams:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    writer.write(text)
    return reader, writer


async def rest(streams: Streams) -> Response:
    """Read until the connection is closed."""
    try:
        return Response(await asyncio.wait_for(streams[0].read(), 10))
    except ConnectionResetError:
        return Response(b"")
    finally:
        streams[1].close()


GET = b"GET / HTTP/1.1\r\nhost: x\r\n"


async def test_request_in_time() -> None:
    """An ordinary request is answered, and its connection serves another."""
    async with server_of(Site(), receive_timeout_s=5.0) as port:
        reader, writer = await connect(port, GET + b"\r\n")
        assert (await reader.readuntil(b"\0\0")).startswith(b"HTTP/1.1 200")
        writer.write(GET + b"connection: close\r\n\r\n")
        assert (await rest((reader, writer))).status == 200


async def test_what_is_no_http() -> None:
    """It is refused in the protocol's shape, as everything is, and counted."""
    reasons: list[str] = []
    async with server_of(Site(), refused=reasons.append) as port:
        response = await rest(await connect(port, b"GET\r\n\r\n"))
        assert (response.status, response.error) == (400, "the request is not HTTP")
    assert reasons == ["not_http"]


class Echo(Site):
    """It answers with what it was asked."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        names = b",".join(name for name, _ in scope["headers"])
        body = b" ".join((scope["method"].encode(), scope["path"].encode(), names, body))
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


UPGRADE = b"connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: %b\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
@pytest.mark.parametrize("pieces", [1, 2, 1000])
@pytest.mark.parametrize("framing", ["length", "chunks"])
async def test_other_protocols_are_not_offered(protocol: bytes, pieces: int, framing: str) -> None:
    """A request that would rather speak another protocol is answered in this one, and its body is its body."""
    head = b"POST /it HTTP/1.1\r\nhost: x\r\n" + UPGRADE % protocol
    if framing == "length":
        head, body = head + b"content-length: %d\r\n\r\n" % len(SMUGGLED), SMUGGLED
    else:
        head, body = head + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(SMUGGLED), SMUGGLED)
    text = head + body
    step = {1: len(text), 2: len(head), 1000: 1}[pieces]
    async with server_of(Echo()) as port:
        reader, writer = await connect(port)
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(text), step):
            writer.write(text[at : at + step])
            await asyncio.sleep(0)
        response = await rest((reader, writer))
        names = b"host,connection," + {"length": b"content-length", "chunks": b"transfer-encoding"}[framing]
        assert (response.status, response.body) == (200, b"POST /it " + names + b" " + SMUGGLED)


async def test_many_wishes_for_another_protocol() -> None:
    """Requests that come together are answered one by one, whatever each of them would rather speak."""
    wish = GET + b"connection: upgrade\r\nupgrade: h2c\r\n"
    async with server_of(Site()) as port:
        reader, _ = streams = await connect(port, (wish + b"\r\n") * 2000 + wish + b"connection: close\r\n\r\n")
        text = await asyncio.wait_for(reader.read(), 10)
        assert text.count(b"HTTP/1.1 200 OK") == 2001
        streams[1].close()


async def test_tunnels_are_not_offered() -> None:
    """This is no proxy: nothing that comes behind such a request is looked at."""
    async with server_of(Site()) as port:
        text = b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n" + SMUGGLED
        response = await rest(await connect(port, text))
        assert (response.status, response.error) == (400, "the request is not HTTP")


ARRIVED_S = 1.0
"""A limit for what never ends, in which that of it which does come has certainly been read."""


async def test_head_that_never_ends() -> None:
    """A client that does not get to the end of its headers is told so and cut off."""
    reasons: list[str] = []
    async with server_of(Site(), refused=reasons.append, receive_timeout_s=ARRIVED_S) as port:
        slow = [await connect(port, text) for text in (b"", b"GET / HT", GET, GET + b"more: ")]
        assert [response.status for response in await asyncio.gather(*map(rest, slow))] == [408] * 4
    assert reasons == ["slow"] * 4


async def test_body_that_never_ends() -> None:
    """A client that does not get to the end of its body is cut off, and the application hears of it."""
    site, reasons = Site(), list[str]()
    async with server_of(site, refused=reasons.append, receive_timeout_s=ARRIVED_S) as port:
        streams = await connect(port, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nbody")
        assert (await rest(streams)).status == 0
        assert await site.ends.get() == "http.disconnect"
    assert reasons == ["slow"]


async def test_idle_connection_is_closed() -> None:
    """A connection without a further request ends after a while."""
    async with server_of(Site(), keep_alive_s=0.05) as port:
        assert (await rest(await connect(port, GET + b"\r\n"))).status == 200


@pytest.mark.parametrize("last", [b"", b"connection: close\r\n"], ids=["kept", "closed"])
async def test_slow_download(last: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that takes its response slowly gets all of it, however often an idle one's time is over meanwhile."""
    looked = asyncio.Event()
    takes = LimitedProtocol._takes

    def note(self: LimitedProtocol) -> bool:
        looked.set()
        return takes(self)

    monkeypatch.setattr(LimitedProtocol, "_takes", note)
    nbytes, part = 64 << 20, 4 << 20
    async with server_of(Site(nbytes), keep_alive_s=0.2) as port:
        reader, writer = await connect(port, GET + last + b"\r\n", limit=1 << 16)
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(4):
            await reader.readexactly(part)
            looked.clear()
            await looked.wait()
        await reader.readexactly(nbytes - 4 * part)
        writer.close()


class Hasty(Site):
    """It answers before it has read anything."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def test_idle_connection_is_closed_whatever_came_after_its_request() -> None:
    """Line ends are no request, nor is the end of a body whose request was answered already: the time goes on."""
    async with server_of(Site(), keep_alive_s=0.05) as port:
        reader, writer = await connect(port, GET + b"\r\n")
        await reader.readuntil(b"\0\0")
        writer.write(b"\r\n")
        assert (await rest((reader, writer))).status == 0
    async with server_of(Hasty(), keep_alive_s=0.05) as port:
        reader, writer = await connect(port, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"body")
        assert (await rest((reader, writer))).status == 0


async def test_body_that_never_ends_of_a_request_that_was_answered() -> None:
    """It is cut off without a second response, which would be taken for that of another request."""
    async with server_of(Hasty(), receive_timeout_s=ARRIVED_S) as port:
        reader, writer = await connect(port, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nbody")
        assert (await asyncio.wait_for(reader.read(), 10)).count(b"HTTP/1.1") == 1
        writer.close()


@pytest.mark.parametrize(
    ("more", "then"),
    [(b"", b""), (b"connection: close\r\n", b""), (b"", b"GET / HT"), (b"", b"\0\0\r\n")],
    ids=["kept", "closed", "half a head", "nonsense"],
)
async def test_client_that_does_not_take_its_response(more: bytes, then: bytes) -> None:
    """A response that nobody reads does not stay for ever, also where the server has closed the connection."""
    async with server_of(Site(1 << 26), keep_alive_s=0.05, receive_timeout_s=0.05) as port:
        reader, writer = await connect(port, GET + more + b"\r\n", limit=1)
        reader._transport.pause_reading()  # type: ignore[attr-defined]
        ended = asyncio.Event()
        if then:
            await asyncio.sleep(0.02)
            writer.write(then)
            await asyncio.sleep(0.2)
        for _ in range(500):
            if writer.transport.is_closing() or ended.is_set():
                break
            writer.write(b"x")  # fails once the other side is gone
            try:
                await asyncio.wait_for(writer.drain(), 5)
            except ConnectionError:
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("the connection is still there")
        writer.close()


async def send(writer: asyncio.StreamWriter, junk: bytes) -> None:
    """Send bytes in several pieces, or as many as the other side takes."""
    for at in range(0, len(junk), MAX_HEAD_NBYTES // 4):
        writer.write(junk[at : at + MAX_HEAD_NBYTES // 4])
        try:
            await writer.drain()
        except ConnectionError:
            break


async def test_head_that_is_too_large() -> None:
    """Headers have a limit, whether they are many or one."""
    for junk in (b"a: b\r\n" * 20_000, b"a: " + b"b" * 120_000):
        reasons: list[str] = []
        async with server_of(Site(), refused=reasons.append) as port:
            reader, writer = await connect(port, GET)
            await send(writer, junk)
            assert (await rest((reader, writer))).status in (431, 0)
        assert reasons == ["head"]


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "junk", [b"a: b\r\n" * 200_000, b"a: " + b"b" * 1_200_000], ids=["many trailers", "a long trailer"]
)
async def test_trailers_that_are_too_large(junk: bytes) -> None:
    """What comes behind a body has the limit of headers, and the application hears of the end."""
    site, began = Site(), asyncio.get_running_loop().time()
    reasons: list[str] = []
    async with server_of(site, refused=reasons.append) as port:
        reader, writer = await connect(port, CHUNKED + b"1\r\nx\r\n0\r\n")
        await send(writer, junk)
        assert (await rest((reader, writer))).status == 0
        assert await site.ends.get() == "http.disconnect"
        assert asyncio.get_running_loop().time() - began < 4  # it was not the time limit
    assert reasons == ["head"]


async def test_trailers_are_no_headers() -> None:
    """What a client says behind a body does not pass for what it said before it."""
    seen: list[list[bytes]] = []

    async def site(scope: Any, receive: Any, send: Any) -> None:
        seen.append([name for name, _ in scope["headers"]])
        await Site()(scope, receive, send)

    async with server_of(site) as port:  # type: ignore[arg-type]  # an application of the test
        text = CHUNKED.replace(b"host: x", b"host: x\r\nconnection: close") + b"0\r\nauthorization: Bearer t\r\n\r\n"
        assert (await rest(await connect(port, text))).status == 200
        assert seen == [[b"host", b"connection", b"transfer-encoding"]]


async def test_large_body_in_small_chunks() -> None:
    """What a body costs beyond its bytes has no limit of its own."""
    async with server_of(Site()) as port:
        reader, writer = await connect(port, CHUNKED)
        for _ in range(20):
            writer.write(b"1\r\nx\r\n" * 2000)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert (await reader.readuntil(b"\0\0")).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_too_many_connections() -> None:
    """Beyond the limit a connection is closed at once; when another has ended there is room again."""
    reasons: list[str] = []
    async with server_of(Site(), refused=reasons.append, max_connections=2) as port:
        first = await connect(port, GET)
        second = await connect(port, GET)
        third = await connect(port, GET + b"\r\n")
        assert (await rest(third)).status == 0
        first[1].write(b"connection: close\r\n\r\n")
        assert (await rest(first)).status == 200
        fourth = await connect(port, GET + b"connection: close\r\n\r\n")
        assert (await rest(fourth)).status == 200
        second[1].close()
    assert reasons == ["connections"]
