"""The routes, by the real clients, by hand-made requests, and by thousands of broken ones."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tritonclient.http.aio as triton
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import ASGIApp
from tritonclient.utils import InferenceServerException

from aiooffload.service.app import Declaration
from aiooffload.service.dispatch import Answer, Held, Refusal
from aiooffload.service.http import make_app
from aiooffload.service.infer import Site
from aiooffload.service.protocol import Tensor
from aiooffload.service.tensors import DATATYPES, Spec
from tests.service import triton_client
from tests.service.support import ROOT, Response, Served, ask, infer, infer_body, output, running

# -- the real clients ----------------------------------------------------------------------------


def test_the_real_client(worker: Served) -> None:
    """tritonclient's synchronous client gets what it asks for, whichever form, compression and option it asks for."""
    command = [sys.executable, triton_client.__file__, str(worker.port)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    assert (result.stdout, result.returncode) == ("ok\n", 0), result.stderr


@contextlib.asynccontextmanager
async def client_of(port: int) -> AsyncIterator[triton.InferenceServerClient]:
    async with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        yield client


def given_input(datatype: str, array: np.ndarray[Any, Any], binary: bool = True) -> Any:
    tensor = triton.InferInput("x", list(array.shape), datatype)
    return tensor.set_data_from_numpy(array, binary_data=binary)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("datatype", [name for name in triton_client.ARRAYS if name not in ("FP16", "BF16")])
async def test_the_real_asyncio_client(port: int, datatype: str, binary: bool) -> None:
    """tritonclient's asyncio client gets every data type back as it was."""
    array = triton_client.ARRAYS[datatype]
    async with client_of(port) as client:
        outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
        result = await client.infer(f"echo_{datatype}", [given_input(datatype, array, binary)], outputs=outputs)
        assert triton_client.as_text(result.as_numpy("y")) == triton_client.as_text(array)


async def test_the_real_asyncio_client_asks_about_things(port: int) -> None:
    """Health, metadata, ids, compression and deadlines work as that client expects."""
    x = given_input("FP32", np.arange(2000, dtype=np.float32))
    async with client_of(port) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("double")
        assert not await client.is_model_ready("double", "2")
        assert (await client.get_server_metadata())["name"] == "sample"
        assert (await client.get_model_metadata("double"))["name"] == "double"
        assert await client.get_model_repository_index()
        for algorithm in ("gzip", "deflate"):
            options = {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm}
            result = await client.infer("double", [x], request_id="id", **options)
            assert result.as_numpy("y")[-1] == 3998
            assert result.get_response()["id"] == "id"
        with pytest.raises(InferenceServerException, match=r"deadline of 0\.02 s") as caught:
            await client.infer("gate", [given_input("INT32", np.array([1], np.int32))], timeout=20_000)
        assert caught.value.status() == "504"


# -- by hand -------------------------------------------------------------------------------------


async def test_health_says_which_device(port: int) -> None:
    """Readiness names the devices; liveness is true."""
    ready = await ask(port, "GET /v2/health/ready")
    assert (ready.status, ready.json["ready"]) == (200, True)
    assert [(one["device"], one["up"]) for one in ready.json["devices"]] == [("host", True)]
    assert (await ask(port, "GET /v2/health/live")).json == {"live": True}


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /v2/models/nothing", 404),
        ("GET /v2/models/double/versions/7", 404),
        ("POST /v2/models/nothing/infer", 404),
        ("GET /v2/models/double/infer", 405),
        ("GET /nothing", 404),
        ("POST /v2/repository/models/double/load", 404),
        ("POST /v2/models/double/infer", 400),
        ("POST /v2/models/double/versions/1/infer", 400),
        ("POST /v2/models/double/versions/7/infer", 404),
        ("POST /v2/models//infer", 404),
        ("POST /v2/models/double/versions//infer", 404),
        ("POST /v2/models/double/more/infer", 404),
        ("POST /v2/models/double%2Fmore/infer", 404),
        ("DELETE /v2", 405),
        ("GET /v2/models/%F0%9F%98%80/ready", 404),
    ],
)
async def test_errors_have_the_shape_of_the_protocol(port: int, head: str, status: int) -> None:
    """Every refusal is JSON with one key, ``error``."""
    response = await ask(port, head)
    assert response.status == status
    assert response.error
    assert response.headers["content-type"] == "application/json"


async def test_repository_index(port: int) -> None:
    """The index can be limited to what is ready; what is no such question is refused."""
    everything = await ask(port, "POST /v2/repository/index")
    ready = await ask(port, "POST /v2/repository/index", b'{"ready": true}')
    assert everything.json == ready.json
    assert "double" in {entry["name"] for entry in ready.json}
    for body in (b"[]", b"{", b'{"ready": 1}'):
        assert (await ask(port, "POST /v2/repository/index", body)).status == 400


async def test_metrics_are_served(port: int) -> None:
    """The metrics are on the same port, and name the device."""
    await infer(port, "double", [1.0])
    response = await ask(port, "GET /metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert b'aiooffload_requests_total{endpoint="double",outcome="ok"}' in response.body
    assert b'aiooffload_device_up{device="host"} 1.0' in response.body


@pytest.mark.parametrize(
    ("kind", "status", "text", "retry"),
    [
        (0, 500, "model 'fail' failed: ValueError", None),
        (1, 400, "secret or not", None),
        (2, 500, "model 'fail' failed: UsageError: secret or not", None),
        (3, 500, "model 'fail' failed: MemoryError", None),
        (4, 503, "no room on the device", "1"),
        (5, 504, "ran out of time", None),
    ],
)
async def test_exceptions_of_handlers(port: int, kind: int, status: int, text: str, retry: str | None) -> None:
    """A handler's exception is a status that says whose fault it is; what others raised keeps its text to itself."""
    response = await infer(port, "fail", kind)
    assert response.status == status
    assert text in response.error
    assert ("secret" in response.error) is (kind not in (0, 3))
    assert response.headers.get("retry-after") == retry


@pytest.mark.parametrize("kind", range(5))
async def test_results_that_were_not_declared(port: int, kind: int) -> None:
    """A handler that returns something else than it declared is never an answer."""
    response = await infer(port, "wrong", kind)
    assert response.status == 500
    assert "'wrong'" in response.error


async def test_deadline_header(port: int) -> None:
    """A client says in a header how long it waits, and the shortest of all limits counts."""
    headers = {"x-request-timeout-ms": 15}
    body = infer_body("INT32", [1], parameters={"timeout": 9_000_000})
    response = await ask(port, "POST /v2/models/gate/infer", body, headers=headers)
    assert (response.status, response.error) == (504, "the deadline of 0.015 s has passed")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-request-timeout-ms": "soon"}, 400),
        ({"x-request-timeout-ms": "-1"}, 400),
        ({"x-request-timeout-ms": "9" * 30}, 400),
        ({"inference-header-content-length": "x"}, 400),
        ({"inference-header-content-length": 1 << 40}, 400),
        ({"content-encoding": "br"}, 415),
        ({"content-encoding": "gzip"}, 400),
        ({"content-length": 1 << 40}, 413),
    ],
)
async def test_headers_that_make_no_sense(port: int, headers: dict[str, Any], status: int) -> None:
    """Headers are checked like the rest; a body that says it is too large is not even read."""
    response = await ask(port, "POST /v2/models/double/infer", infer_body("FP32", [1]), headers=headers)
    assert response.status == status
    assert response.error


async def test_chunked_body_that_is_too_large(port: int) -> None:
    """A body of unknown size is read up to the limit, and the connection is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    chunk = b"%x\r\n" % (8 << 20) + bytes(8 << 20) + b"\r\n"
    with contextlib.suppress(ConnectionError):
        for _ in range(9):
            writer.write(chunk)
            await writer.drain()
    with contextlib.suppress(ConnectionError):  # it may not even have been able to tell
        assert Response(await reader.read()).status == 413
    writer.close()


async def test_json_that_is_too_large(port: int) -> None:
    """Tensors of many MiB have to come in binary: parsing would hold up everybody."""
    body = b'{"inputs": [' + b" " * (9 << 20) + b"]}"
    response = await ask(port, "POST /v2/models/double/infer", body)
    assert response.status == 413
    assert "binary" in response.error


async def test_compressed_body_that_stands_for_too_much(port: int) -> None:
    """A small body that would become too large is refused."""
    body = await asyncio.to_thread(gzip.compress, bytes(65 << 20), 1)
    response = await ask(port, "POST /v2/models/double/infer", body, headers={"content-encoding": "gzip"})
    assert response.status == 413


async def test_large_tensors_both_ways(port: int) -> None:
    """A tensor of most of a MiB comes back whole."""
    array = np.arange(200_000, dtype=np.float32)
    async with client_of(port) as client:
        result = await client.infer("double", [given_input("FP32", array)])
        assert np.array_equal(result.as_numpy("y"), array * 2)


async def test_small_responses_are_not_compressed(port: int) -> None:
    """Compressing pays from some size on."""
    small = await infer(port, "large", 3, headers={"accept-encoding": "gzip"})
    large = await infer(port, "large", 3000, headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in small.headers
    assert large.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(large.body))["outputs"][0]["shape"] == [3000]


async def test_client_that_goes_away_ends_its_call(port: int) -> None:
    """A client that closes the connection cancels its handler, and with it the kernel that it launched."""
    before = await infer(port, "wait_cancelled", 0)
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    body = infer_body("INT32", [1])
    head = f"POST /v2/models/gate_in_kernel/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await infer(port, "wait_inside", 1)
    writer.close()
    after = await infer(port, "wait_cancelled", output(before)[0] + 1)
    assert output(after, "kernels")[0] == output(before, "kernels")[0] + 1


async def test_bearer_token() -> None:
    """With a token everything but health asks for it; who has it not is counted."""
    async with running(token="secret") as worker:
        port = worker.port
        assert (await ask(port, "GET /v2/health/ready")).status == 200
        assert (await ask(port, "GET /v2/health/live")).status == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic secret"}):
            for head in ("GET /v2", "GET /metrics", "POST /v2/models/double/infer", "GET /v2/health/live/"):
                response = await ask(port, head, headers=headers)
                assert (response.status, response.error) == (401, "a bearer token is needed")
        for given in ("Bearer secret", "bearer secret", "BEARER secret"):  # RFC 9110, 11.1
            response = await ask(port, "GET /v2", headers={"authorization": given})
            assert response.json["name"] == "sample"
        metrics = await ask(port, "GET /metrics", headers={"authorization": "Bearer secret"})
        assert 'aiooffload_refused_total{reason="token"} 12.0' in metrics.body.decode()


# -- thousands of broken requests ----------------------------------------------------------------

SPEC = Spec("x", DATATYPES["INT32"], (-1,))
DECLARED = Declaration("m", (SPEC,), (SPEC,), 0, 0)


class Echo:
    """A dispatcher that answers each request with its own inputs."""

    draining = False
    in_flight = 0

    held_nbytes = 0

    def check_open(self) -> None: ...

    def hold(self, nbytes: int) -> None:
        self.held_nbytes += nbytes
        if self.held_nbytes > 500:
            raise Refusal(429, "too much", "overloaded", 1)

    def let_go(self, nbytes: int) -> None:
        self.held_nbytes -= nbytes

    def submit(self, declaration: Declaration, request: Any, timeout_s: float | None, held: Held) -> Any:
        future = asyncio.get_running_loop().create_future()
        if timeout_s == 0:
            future.set_exception(Refusal(504, "no time", "timeout"))
        else:
            inputs = [Tensor(one.shape, bytes(one.data)) for one in request.inputs]
            future.set_result(Answer(inputs, "host", 1, 0.0, 0.0, 0.0))
        return SimpleNamespace(future=future)


def site() -> Site:
    supervisor = SimpleNamespace(declarations=[DECLARED], why_not_ready=str, why_dead=str, app_name="a", slots=[])
    metrics = SimpleNamespace(answered=lambda *_: None, ended=lambda *_: None, text=bytes)
    return Site(supervisor, Echo(), metrics, "1", max_body_nbytes=500, max_json_nbytes=400)  # type: ignore[arg-type]


async def call(app: ASGIApp, method: str, path: str, headers: list[tuple[bytes, bytes]], body: list[bytes]) -> Response:
    """Call an ASGI application once; an exception of its is the caller's."""
    parts = [{"type": "http.request", "body": part, "more_body": True} for part in body]
    events = iter([*parts, {"type": "http.request", "body": b"", "more_body": False}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(events, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        sent.append(message)

    path_only, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path_only,
        "raw_path": path_only.encode("utf-8", "replace"),
        "query_string": query.encode("utf-8", "replace"),
        "root_path": "",
        "headers": headers,
    }
    await app(scope, receive, send)
    head = "".join(f"\r\n{name.decode()}: {value.decode()}" for name, value in sent[0]["headers"])
    return Response(f"HTTP/1.1 {sent[0]['status']}{head}\r\n\r\n".encode() + b"".join(one["body"] for one in sent[1:]))


GOOD = infer_body("INT32", [1, 2], outputs=[{"name": "x", "parameters": {"binary_data": True}}])
HEADERS = st.tuples(
    st.sampled_from(
        [
            b"inference-header-content-length",
            b"content-length",
            b"content-encoding",
            b"accept-encoding",
            b"x-request-timeout-ms",
            b"traceparent",
            b"authorization",
        ]
    ),
    st.sampled_from(
        [b"0", b"1", b"-1", b"99", b"gzip", b"deflate", b"1e3", b"\xff", b"", b"9" * 40, str(len(GOOD)).encode()]
    ),
)
PATHS = st.sampled_from(
    ["/v2/models/m/infer"] * 4
    + ["/v2/models/m/versions/1/infer", "/v2", "/v2/", "/v2/models/m", "/v2/models//infer", "/v2/repository/index"]
    + [
        "/metrics",
        "/v2/health/ready",
        "/v2/models/m/ready",
        "/v2/models/\ud800/infer",
        "//",
        "",
        "/v2/models/m/infer?stream=2",
    ]
)


@st.composite
def bodies(draw: st.DrawFn) -> list[bytes]:
    """Bodies of any bytes, and good ones with some bytes changed, cut into pieces."""
    body = bytearray(draw(st.binary(max_size=30) | st.just(GOOD) | st.just(GOOD * 3)))
    for _ in range(draw(st.integers(0, 3))):
        if body:
            at = draw(st.integers(0, len(body) - 1))
            body[at : at + draw(st.integers(0, 9))] = draw(st.binary(max_size=3))
    cuts = sorted(draw(st.lists(st.integers(0, len(body)), max_size=2)))
    return [bytes(body[start:end]) for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]


REQUESTS = st.tuples(
    st.sampled_from(["POST"] * 4 + ["GET", "PUT", "HEAD"]), PATHS, st.lists(HEADERS, max_size=3), bodies()
)


def check_malformed(requests: list[Any]) -> None:
    async def check() -> None:
        worked_on = site()
        app = make_app(worked_on)
        for method, path, headers, body in requests:
            response = await call(app, method, path, headers, body)
            assert response.status in (200, 307, 400, 404, 405, 413, 415, 504)
            assert worked_on.dispatcher.held_nbytes == 0
            if response.status >= 400 and method != "HEAD":
                assert response.error

    asyncio.run(check())


@given(st.lists(REQUESTS, min_size=1, max_size=30))
def test_malformed_requests(requests: list[Any]) -> None:
    """Whatever a client sends is answered, in the protocol's shape, and never with 500."""
    check_malformed(requests)


@pytest.mark.slow
@pytest.mark.timeout(600)
@settings(max_examples=1000)
@given(st.lists(REQUESTS, min_size=15, max_size=30))
def test_ten_thousand_malformed_requests(requests: list[Any]) -> None:
    """The same, 15,000 times and more."""
    check_malformed(requests)


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v2/repository/index"])
async def test_client_that_goes_away_while_it_sends(path: str) -> None:
    """A body that ends too early is nobody's error, and nothing of it stays."""
    worked_on = site()
    events = iter([{"type": "http.request", "body": b"{", "more_body": True}, {"type": "http.disconnect"}])
    scope = {"type": "http", "method": "POST", "path": path, "root_path": "", "headers": [], "query_string": b""}

    held = []

    async def receive() -> Any:
        held.append(worked_on.dispatcher.held_nbytes)
        return next(events)

    async def send(message: Any) -> None:
        assert "repository" in path

    await make_app(worked_on)(scope, receive, send)
    assert held == ([0, 1] if "infer" in path else [0, 0])
    assert worked_on.dispatcher.held_nbytes == 0


async def test_broken_http_leaves_the_worker_well(port: int) -> None:
    """Bytes that are no HTTP are refused on that connection alone."""
    for garbage in (
        b"\0" * 50,
        b"GET\r\n\r\n",
        b"GET http://x HTTP/1.1\r\n\r\n",
        b"POST /v2 HTTP/9\r\n\r\n",
        b"\x16\x03\x01",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        writer.write_eof()
        assert Response(await reader.read()).status in (0, 400, 404, 408)
        writer.close()
    assert output(await infer(port, "double", [1.5]), "y") == [3.0]
