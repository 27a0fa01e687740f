"""``scripts/soak --serve``: a short run finds nothing, and what it looks for would be found."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiooffload.service.protocol import ProtocolError, parse_request
from tests.scripts.support import load_script

ROOT = Path(__file__).resolve().parents[2]


def test_a_short_run() -> None:
    """Nothing is wrong, unanswered or leaked; the figures have the agreed keys, the device process was killed."""
    arguments = ["--device", "host", "--minutes", "0.04", "--kill-every-s", "0.8", "--seed", "7", "--json", "-"]
    command = [sys.executable, str(ROOT / "scripts" / "_soak.py"), "--serve", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [figures[kind] for kind in ("wrong", "unanswered", "leaks", "problems")] == [0, 0, 0, []]
    assert all(figures[kind] > 0 for kind in ("requests", "served", "retried", "aborted", "malformed", "kills"))
    assert 0 < figures["replacement_s_p50"] <= figures["replacement_s_max"]
    assert len(figures["replacement_s"]) == figures["kills"]
    assert 0 < figures["slowest_s"] < 30
    assert (figures["seed"], figures["device"]) == (7, "host")
    assert "ok: host, " in done.stderr


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module behind scripts/soak --serve."""
    load_script(monkeypatch, "soak")
    return importlib.import_module("trials.serving")


@pytest.fixture
def requests(serving: ModuleType) -> ModuleType:
    """The module with what is asked."""
    return importlib.import_module("trials.serving_requests")


def test_requests_are_malformed_or_not(requests: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own parser takes what has a result, bit by bit as it was meant, and refuses the rest with 400."""
    app = importlib.import_module("trials.serving_app").app
    chance, refused = random.Random(5), set()
    monkeypatch.setattr(requests, "MALFORMED", 0.5)
    for request in (requests.make(chance) for _ in range(400)):
        head, _, body = request.content.partition(b"\r\n\r\n")
        declaration = app.endpoints[head.split(b"/")[3].decode()].declaration
        size = int(head.split(b"inference-header-content-length: ")[1].split(b"\r\n")[0])
        if request.result is not None:
            parsed = parse_request(declaration, body, size)
            assert (parsed.id, parsed.outputs[0].binary) == (request.id, request.binary)
            x = np.frombuffer(parsed.inputs[0].data, request.result.dtype).reshape(request.result.shape)
            factor, more = (2, 1) if declaration.name == "asked" else (3, 1)
            if declaration.name == "scaled":
                factor, more = (np.frombuffer(tensor.data, np.uint64) for tensor in parsed.inputs[1:])
            assert np.array_equal(x * factor + more, request.result)
        else:
            with pytest.raises(ProtocolError) as refusal:
                parse_request(declaration, body, size)
            assert refusal.value.status == 400
            refused.add(str(refusal.value)[:20])
    assert len(refused) > 10


# -- a server that makes mistakes ----------------------------------------------------------------


def whole(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} -", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(*events: tuple[str, object]) -> bytes:
    chunks = [f"event: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in events]
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in [b":\n\n", *chunks])
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"


ID = "c0ffee"
RESULT = np.array([2, 2**64 - 1], np.uint64)


def message(**changes: object) -> dict[str, Any]:
    output = {"name": "y", "datatype": "UINT64", "shape": [2], "data": RESULT.tolist()} | changes
    return {"id": ID, "outputs": [output]}


def as_json(content: object) -> bytes:
    return whole(200, json.dumps(content).encode())


def as_binary(values: Any) -> bytes:
    text = json.dumps(message(data=None)).encode()
    return whole(200, text + values.tobytes(), f"inference-header-content-length: {len(text)}")


FINE = {"result": RESULT}
BINARY = FINE | {"binary": True}
STREAM = FINE | {"streamed": True}
BAD = {"result": None}
ERROR = b'{"error": "why"}'
GOOD = [
    (FINE, as_json(message()), "served"),
    (BINARY, as_binary(RESULT), "served"),
    (STREAM, chunked(("progress", {"done": 1, "total": 2}), ("result", message())), "served"),
    (BAD, whole(400, ERROR), "malformed"),
    (FINE, whole(503, ERROR, "Retry-After: 1"), "retried"),
    (FINE, whole(429, ERROR, "retry-after: 1", "connection: close"), "retried"),
    (STREAM, chunked(("error", {"error": "why", "status": 503})), "retried"),
]
MISTAKES = [
    (FINE, as_json(message(data=[2, 2**64 - 2])), "wrong values"),
    (FINE, as_json(message(data=[2])), "wrong values"),
    (FINE, as_json(message(shape=[1, 2])), "instead of"),
    (FINE, as_json(message() | {"id": "another's"}), "instead of"),
    (FINE, as_json({"id": ID}), "makes no sense"),
    (FINE, whole(200, b"{"), "makes no sense"),
    (BINARY, as_binary(RESULT[::-1].copy()), "wrong values"),
    (BINARY, as_binary(RESULT[:1]), "wrong values"),
    (STREAM, chunked(("result", message(data=[2, 3]))), "wrong values"),
    (STREAM, chunked(("progress", {"done": 1, "total": 2})), "ends with 'progress'"),
    (STREAM, chunked(("result", message()), ("result", message())), "ends with"),
    (STREAM, chunked(("error", {"error": "why", "status": 500})), "ends with 'error'"),
    (FINE, whole(500, ERROR), "status 500"),
    (FINE, whole(400, ERROR), "status 400"),
    (BAD, as_json(message()), "status 200"),
    (BAD, whole(400, b"{}"), "makes no sense"),
    (FINE, whole(503, ERROR), "without Retry-After"),
    (FINE, whole(429, ERROR, "retry-after: soon"), "without Retry-After"),
    (FINE, b"nonsense\r\n\r\n", "no response of HTTP"),
]
SILENCES = [
    (FINE, b"", "IncompleteReadError"),
    (FINE, as_json(message())[:-1], "IncompleteReadError"),
    (STREAM, chunked(("result", message()))[:-5], "IncompleteReadError"),
    (FINE, None, "TimeoutError"),
]


@pytest.fixture
async def ask(serving: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Let a client ask a server that has one answer, None for none; return what was found."""
    from trials.serving_requests import Request

    monkeypatch.setattr(serving, "ABORTED", 0.0)

    async def ask(request: dict[str, Any], answer: bytes | None) -> Any:
        resting = asyncio.Event()
        if answer is None:
            monkeypatch.setattr(serving, "ANSWER_S", 0.2)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            resting.set()
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
            writer.close()

        monkeypatch.setattr(serving, "make", lambda chance: Request(b"a request\n", ID, **request))
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            load = serving.Load(server.sockets[0].getsockname()[1], serving.Tally())
            await serving.Client(load, random.Random(1)).keep_asking(resting)
        return load.tally

    return ask


@pytest.mark.parametrize(("request_", "answer", "counted"), GOOD)
async def test_what_an_answer_may_be(
    ask: Callable[..., Any], request_: dict[str, Any], answer: bytes, counted: str
) -> None:
    """The right result in each form, a reason where nothing can be right, and not now."""
    tally = await ask(request_, answer)
    assert not tally.bad, tally.problems
    assert (tally.requests, getattr(tally, counted)) == (1, 1)


@pytest.mark.parametrize(("request_", "answer", "problem"), MISTAKES)
async def test_what_an_answer_must_not_be(
    ask: Callable[..., Any], request_: dict[str, Any], answer: bytes, problem: str
) -> None:
    """Anything else is wrong, and the text says how."""
    tally = await ask(request_, answer)
    assert (tally.wrong, tally.unanswered, tally.served, tally.retried) == (1, 0, 0, 0)
    assert problem in tally.problems[0]


@pytest.mark.parametrize(("request_", "answer", "problem"), SILENCES)
async def test_what_is_no_answer(
    ask: Callable[..., Any], request_: dict[str, Any], answer: bytes | None, problem: str
) -> None:
    """A connection that ends before the whole response, or that has none in time, leaves a request unanswered."""
    tally = await ask(request_, answer)
    assert (tally.wrong, tally.unanswered, tally.served, tally.retried) == (0, 1, 0, 0)
    assert problem in tally.problems[0]


async def test_nobody_there_is_no_answer(serving: ModuleType) -> None:
    """Nor has a request one that could not be sent."""
    async with await asyncio.start_server(lambda *_: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
    resting = asyncio.Event()

    class Patience(serving.Tally):  # type: ignore[misc,name-defined]  # of a module without types
        def silence(self, text: str) -> None:
            super().silence(text)
            if self.unanswered == 2:
                resting.set()

    load = serving.Load(port, Patience())
    await serving.Client(load, random.Random(1)).keep_asking(resting)
    assert load.tally.unanswered == load.tally.requests == 2
    load.stopping = True
    await serving.Client(load, random.Random(1)).keep_asking(asyncio.Event())  # it does not even try


@pytest.mark.allows_blocking("it starts a process")
async def test_exit_status(serving: ModuleType) -> None:
    """A worker that ends otherwise than with 0 is wrong."""
    load = serving.Load(0, serving.Tally())
    with subprocess.Popen(["sleep", "60"]) as process:  # noqa: ASYNC220  (as a worker is)
        await serving.stop(SimpleNamespace(process=process), [], load)
    assert load.tally.problems == ["the worker's exit status was -15"]


GONE = json.dumps({"event": "device process is gone", "level": "error"})
READY = json.dumps({"event": "device process is ready", "level": "info"})
FAILED = json.dumps({"event": "a handler failed", "level": "error"})


@pytest.mark.parametrize(
    ("log", "problems"),
    [
        ([GONE, READY, GONE], []),
        ([GONE, GONE, GONE], ["3 device processes ended, and 2 were killed"]),
        ([GONE, FAILED, GONE], [f"in the log: {FAILED}"]),
        ([GONE, GONE, "Traceback\n"], ["in the log: Traceback"]),
    ],
)
def test_what_only_the_log_tells(serving: ModuleType, log: list[str], problems: list[str]) -> None:
    """So is what failed without a client's being told, and a device process that ended by itself."""
    tally = serving.Tally(kills=2)
    serving.look_through(log, tally)
    assert (tally.problems, tally.wrong) == (problems, len(problems))


def test_processes_that_stay_are_a_leak(serving: ModuleType) -> None:
    """The front may have more memory and processes for a while, not for good."""
    prints = [serving.Footprint(resident_bytes=100 << 20, descriptors=9, threads=2, processes=2)] * 10
    more = [serving.Footprint(resident_bytes=150 << 20, descriptors=9, threads=2, processes=3)]
    assert serving.compare(tally := serving.Tally(), [*prints, *more]) == 0
    assert not tally.bad
    assert serving.compare(tally, prints + 3 * more) == 50 << 20
    assert tally.leaks == 2
