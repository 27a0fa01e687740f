"""Inference as a stream of events. (As one response it is in ``test_http.py``, with the real clients.)"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from aiooffload.service import infer as module
from aiooffload.service import protocol
from tests.service.support import ask, infer, infer_body, output, running, until

HEAD = "POST /v2/models/{}/infer?stream=1 HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n"


class Stream:
    """A stream of events that is read one by one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._text = b""

    async def head(self) -> bytes:
        return await self._reader.readuntil(b"\r\n\r\n")

    async def event(self) -> tuple[str, Any]:
        """Return the next event that is no comment."""
        while True:
            text, end, rest = self._text.partition(b"\n\n")
            if end:
                self._text = rest
                if not text.startswith(b":"):
                    lines = dict(line.split(": ", 1) for line in text.decode().splitlines())
                    return lines["event"], json.loads(lines["data"])
                continue
            size = int(await self._reader.readline(), 16)  # a chunk
            self._text += (await self._reader.readexactly(size + 2))[:-2]

    async def rest(self) -> bytes:
        return await self._reader.read()


async def stream(port: int, model: str, value: int = 0, **more: Any) -> Stream:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = infer_body("INT32", [value], **more)
    writer.write(HEAD.format(model, len(body)).encode() + body)
    return Stream(reader, writer)


async def test_progress_then_result(port: int) -> None:
    """A stream tells what a kernel says while it runs, then has the result, and ends."""
    events = await stream(port, "gate_in_kernel", 7, id="seven")
    head = await events.head()
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-type: text/event-stream\r\n" in head
    assert await events.event() == ("progress", {"done": 1, "total": 3})
    await infer(port, "wait_inside", 1)
    await infer(port, "open_gate")
    kind, result = await events.event()
    if kind == "progress":
        assert result == {"done": 3, "total": 3}
        kind, result = await events.event()
    assert (kind, result["id"], result["outputs"][0]["data"]) == ("result", "seven", [7])
    assert await events.rest() == b"0\r\n\r\n"
    events.writer.close()


@pytest.mark.parametrize(
    ("model", "value", "more", "status", "text"),
    [
        ("fail", 1, {}, 400, "secret or not"),
        ("fail", 0, {}, 500, "ValueError"),
        ("gate", 0, {"parameters": {"timeout": 15_000}}, 504, "deadline"),
    ],
)
async def test_error_is_an_event(
    port: int, model: str, value: int, more: dict[str, Any], status: int, text: str
) -> None:
    """What fails after the stream began is its last event, with the status that it would have had."""
    events = await stream(port, model, value, **more)
    await events.head()
    kind, error = await events.event()
    assert (kind, error["status"]) == ("error", status)
    assert text in error["error"]
    events.writer.close()


async def test_mistakes_are_no_stream(port: int) -> None:
    """A request that is refused gets an ordinary response."""
    head = "POST /v2/models/gate/infer?stream="
    assert (await ask(port, head + "1", b"{}")).error == "the request has no inputs"
    assert (await ask(port, head + "yes", infer_body("INT32", [1]))).error == "stream is 0 or 1"
    binary = infer_body("INT32", [1], parameters={"binary_data_output": True})
    assert (await ask(port, head + "1", binary)).error == "a stream of events has no binary outputs"
    assert output(await ask(port, "POST /v2/models/double/infer?stream=0&x=1", infer_body("FP32", [1])), "y") == [2.0]


async def test_client_that_leaves_a_stream_ends_its_call(port: int) -> None:
    """Closing the stream cancels the handler and its kernel."""
    before = await infer(port, "wait_cancelled", 0)
    events = await stream(port, "gate_in_kernel")
    await events.head()
    await infer(port, "wait_inside", 1)
    events.writer.close()
    after = await infer(port, "wait_cancelled", output(before)[0] + 1)
    assert output(after, "kernels")[0] == output(before, "kernels")[0] + 1


async def test_comments_keep_a_silent_stream_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is said for a while, a comment is sent; progress that was not sent in time is left out."""
    monkeypatch.setattr(module, "COMMENT_S", 0.001)
    progress = module._Progress()
    assert await progress.next() == b":\n\n"
    progress.said(1, 3)
    progress.said(2, 3)
    assert await progress.next() == b'event: progress\ndata: {"done":2,"total":3}\n\n'
    assert await progress.next() == b":\n\n"


LARGE = 6_000_000
ANSWERS = pytest.mark.parametrize(
    ("query", "more", "nbytes"),
    [
        ("", {"parameters": {"binary_data_output": True}}, 8 * LARGE),
        ("", {"outputs": [{"name": "y"}]}, 9 * LARGE),
        ("?stream=1", {"outputs": [{"name": "y"}]}, 9 * LARGE),
    ],
    ids=["binary", "JSON", "stream"],
)


async def ask_without_reading(port: int, query: str, more: dict[str, Any]) -> Stream:
    """Ask for an answer of many MiB and read its headers; the rest waits."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
    body = infer_body("INT32", [LARGE], **more)
    writer.write(HEAD.format("large", len(body)).replace("?stream=1", query).encode() + body)
    answer = Stream(reader, writer)
    await answer.head()
    return answer


@ANSWERS
async def test_answers_count_until_they_were_taken(query: str, more: dict[str, Any], nbytes: int) -> None:
    """While a client does not read, what waits for it leaves no room for others; when it has read, all came."""
    async with running(max_queue_mib=1, max_body_mib=1) as worker:
        answer = await ask_without_reading(worker.port, query, more)
        await until(lambda: worker.dispatcher.held_nbytes > nbytes)
        refused = await infer(worker.port, "double", [1.0])
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert len(await answer.rest()) > nbytes
        answer.writer.close()
        await until(lambda: not worker.dispatcher.held_nbytes)
        assert output(await infer(worker.port, "double", [1.0]), "y") == [2.0]


async def test_answers_count_while_they_are_put_into_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that waits for its turn in a thread leaves no room for others either."""
    held, encode = list[int](), protocol.encode_response

    def note(*arguments: Any) -> Any:
        held.append(worker.dispatcher.held_nbytes)
        return encode(*arguments)

    monkeypatch.setattr(protocol, "encode_response", note)
    async with running() as worker:
        assert (await infer(worker.port, "large", 100_000)).status == 200
        assert held == [800_000]


@ANSWERS
async def test_client_that_does_not_take_its_answer(
    query: str, more: dict[str, Any], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut off, and nothing of its answer stays, in the connection neither."""
    monkeypatch.setattr(module, "SEND_S", 0.05)
    async with running() as worker:
        answer = await ask_without_reading(worker.port, query, more)
        assert worker._server is not None
        connections = worker._server.server_state.connections
        await until(lambda: not connections)
        assert worker.dispatcher.held_nbytes == 0
        metrics = (await ask(worker.port, "GET /metrics")).body.decode()
        assert 'aiooffload_requests_total{endpoint="large",outcome="cancelled"} 1.0' in metrics
        answer.writer.transport.abort()


async def test_client_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending to a client that does not read has an end."""
    monkeypatch.setattr(module, "SEND_S", 0.001)

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    with pytest.raises(module.ClientGone):
        await module._send_in_time(send, {})
