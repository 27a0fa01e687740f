"""The worker as an operator has it: faults under load, draining, signals, logs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import structlog

from aiooffload.service import protocol
from aiooffload.service.config import Config
from aiooffload.service.worker import Worker
from tests.service.support import (
    ROOT,
    SAMPLE,
    Response,
    Served,
    ask,
    ends,
    held,
    infer,
    infer_body,
    output,
    running,
    served,
    until,
)

# -- the beginning -------------------------------------------------------------------------------


async def test_before_there_is_a_device_process() -> None:
    """It listens at once; until something can serve, a request is told when to try again."""
    worker = Worker(Config(device="host", port=0, log_level="error"), SAMPLE)
    await worker.start()
    try:
        (slot,) = worker.supervisor.slots
        await until(lambda: slot.process and slot.process.pid)
        assert slot.process is not None
        with held(slot.process.pid):  # it is not ready before everything was asked
            for response in (
                await infer(worker.port, "double", [1.0]),
                await ask(worker.port, "GET /v2/models/double"),
                await ask(worker.port, "GET /v2/models/double/ready"),
            ):
                assert (response.status, response.headers["retry-after"]) == (503, "1")
        await worker.ready()
        assert output(await infer(worker.port, "double", [1.0]), "y") == [2.0]
    finally:
        await worker.stop(0.0)


async def test_auto_is_decided_once() -> None:
    """From the first device process on the device has its name, in metrics and logs, and for the next process."""
    async with running(device="auto") as worker:
        (slot,), (process,) = worker.supervisor.slots, worker.supervisor.ready
        assert slot.device == process.device["label"] != "auto"
        metrics = (await ask(worker.port, "GET /metrics")).body.decode()
        assert f'aiooffload_device_up{{device="{slot.device}"}} 1.0' in metrics
        assert "auto" not in metrics


async def test_mistake_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception that nobody expected is a 500 in the protocol's shape, in the log, and the end of one request."""

    def fail(*arguments: object) -> None:
        raise ZeroDivisionError("secret")

    async with running() as worker:
        with monkeypatch.context() as failing, structlog.testing.capture_logs() as lines:
            failing.setattr(protocol, "parse_request", fail)
            response = await infer(worker.port, "double", [1.0])
        assert (response.status, response.json) == (500, {"error": "the server failed; its log says how"})
        assert [type(line.get("exc_info")) for line in lines if line["log_level"] == "error"] == [ZeroDivisionError]
        assert output(await infer(worker.port, "double", [1.0]), "y") == [2.0]


# -- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["die", "lose"])
async def test_fault_costs_its_own_requests_alone(how: str) -> None:
    """What was in flight on a lost device gets 503 with ``Retry-After``, then another serves; it stays live."""
    async with running() as worker:
        waiting = [asyncio.create_task(infer(worker.port, "gate", i)) for i in range(5)]
        await infer(worker.port, "wait_inside", 5)
        (slot,) = worker.supervisor.slots
        await until(lambda: slot._spare and slot._spare.pid)
        assert slot._spare is not None
        with held(slot._spare.pid):  # the next one is not ready before everything was asked
            responses = [await infer(worker.port, how), *await asyncio.gather(*waiting)]
            for response in responses:
                assert (response.status, response.headers["retry-after"]) == (503, "1")
                assert "the device process is gone" in response.error
            ready = await ask(worker.port, "GET /v2/health/ready")
            assert (ready.status, ready.json["ready"]) == (503, False)
            assert "is being replaced" in ready.json["reason"]
            assert (await ask(worker.port, "GET /v2/health/live")).json == {"live": True}
            refused = await infer(worker.port, "double", [1.0])
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert (await ask(worker.port, "GET /v2/models/double")).status == 200
            assert (await ask(worker.port, "GET /v2/models/double/ready")).status == 503
        await worker.ready()
        assert output(await infer(worker.port, "double", [1.0]), "y") == [2.0]
        assert (await ask(worker.port, "GET /v2/health/ready")).json["devices"][0]["generation"] == 2
        metrics = (await ask(worker.port, "GET /metrics")).body.decode()
        assert 'aiooffload_device_faults_total{device="host"} 1.0' in metrics
        assert 'aiooffload_requests_total{endpoint="gate",outcome="device_lost"} 5.0' in metrics


async def test_blocked_handler_does_not_reach_the_front() -> None:
    """While a handler blocks its loop, health is answered and other requests wait; the hard limit ends it."""
    async with running(hard_timeout_s=0.5) as worker:
        blocked = asyncio.create_task(infer(worker.port, "block", 600_000))
        waiting = asyncio.create_task(infer(worker.port, "double", [1.0]))
        await until(lambda: worker.dispatcher.in_flight >= 2)
        assert (await ask(worker.port, "GET /v2/health/live")).json == {"live": True}
        for response in (await blocked, await waiting):
            assert response.status == 503
            assert "longer than the hard limit" in response.error
        await worker.ready()
        assert output(await infer(worker.port, "double", [1.0]), "y") == [2.0]


async def test_kernel_over_the_hard_limit_costs_the_process() -> None:
    """A kernel that does not end costs the device process, and the client is told which one it was."""
    async with running(hard_timeout_s=0.2) as worker:
        response = await infer(worker.port, "gate_in_kernel")
        assert response.status == 503
        assert "wait_for_host" in response.error
        await worker.ready()
        assert output(await infer(worker.port, "double", [1.0]), "y") == [2.0]


SLOW_ELEMENTS = 70_000
SLOW_HEAD = (
    b'{"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1, %d], "parameters": {"binary_data_size": %d}}]}'
    % (SLOW_ELEMENTS, SLOW_ELEMENTS * 4)
)


@pytest.mark.parametrize(
    ("step", "model", "body", "headers"),
    [
        ("parse_request", "echo_FP32", infer_body("FP32", [1.5] * 70_000, [1, 70_000]), {}),
        (
            "parse_request",
            "echo_BYTES",
            SLOW_HEAD + bytes(SLOW_ELEMENTS * 4),
            {"inference-header-content-length": len(SLOW_HEAD)},
        ),
        ("encode_response", "large", infer_body("INT32", [70_000]), {}),
        ("decompress", "echo_FP32", zlib.compress(b" " * (8 << 20)), {"content-encoding": "deflate"}),
    ],
    ids=["JSON", "BYTES", "JSON of outputs", "compressed"],
)
async def test_large_requests_do_not_hold_up_the_front(
    step: str, model: str, body: bytes, headers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long in a client's request is not done on the loop: health is answered meanwhile."""
    real, begun, go_on = getattr(protocol, step), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(10)
        return real(*arguments)

    monkeypatch.setattr(protocol, step, slow)
    async with running() as worker:
        asked = asyncio.create_task(ask(worker.port, f"POST /v2/models/{model}/infer", body, headers=headers))
        await until(begun.is_set)
        assert (await ask(worker.port, "GET /v2/health/live")).json == {"live": True}
        go_on.set()
        assert (await asked).status == (400 if step == "decompress" else 200)


async def test_admission() -> None:
    """A full worker says so at once, before it has read a body."""
    async with running(max_queue=2) as worker:
        waiting = [asyncio.create_task(infer(worker.port, "gate", i)) for i in range(2)]
        await until(lambda: worker.dispatcher.in_flight >= 2)
        head = "POST /v2/models/double/infer"
        refused = await ask(worker.port, head, headers={"content-length": 60_000_000})
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        process = worker.supervisor.ready[0]
        process.kill_now()
        assert [(await one).status for one in waiting] == [503, 503]


async def test_bodies_that_do_not_come_keep_nobody_out() -> None:
    """What clients announce takes no room; what they have sent does, until they go."""
    head = b"POST /v2/models/double/infer HTTP/1.1\r\nhost: x\r\n"
    async with running(max_queue_mib=1, max_body_mib=1) as worker:
        slow = []
        for size in (b"content-length: 1048576\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n"):
            _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
            writer.write(head + size)
            slow.append(writer)
        assert output(await infer(worker.port, "double", [1.0]), "y") == [2.0]
        slow[0].write(bytes(1_000_000))
        await until(lambda: worker.dispatcher.held_nbytes >= 1_000_000)
        refused = await ask(worker.port, head.decode().split(" HTTP")[0], bytes(100_000))
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        for writer in slow:
            writer.close()
        await until(lambda: not worker.dispatcher.held_nbytes)


async def test_bodies_count_until_the_device_process_has_taken_them() -> None:
    """A request that ran out of time makes no room for others while its body waits for a process that is held up."""
    head = "POST /v2/models/echo_UINT8/infer"
    n = 1_000_000
    text = b'{"inputs": [{"name": "x", "datatype": "UINT8", "shape": [1, %d], "parameters": {"binary_data_size": %d}}]}'
    large = text % (n, n) + bytes(n)
    headers = {"inference-header-content-length": len(large) - n}
    in_no_time = {"x-request-timeout-ms": 50}
    async with running(max_queue_mib=1, max_body_mib=1) as worker:
        with held(worker.supervisor.ready[0].pid):
            assert (await infer(worker.port, "double", [1.0], headers=in_no_time)).status == 504
            await until(lambda: not worker.dispatcher.in_flight)
            assert worker.dispatcher.held_nbytes == 0  # the socket has room for a small one
            assert (await ask(worker.port, head, large, headers=headers | in_no_time)).status == 504
            assert (worker.dispatcher.in_flight, worker.dispatcher.held_nbytes) == (0, len(large))
            refused = await ask(worker.port, head, bytes(100_000))
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        await until(lambda: not worker.dispatcher.held_nbytes)
        assert (await ask(worker.port, head, large, headers=headers)).status == 200


async def test_handlers_may_use_their_arrays_again() -> None:
    """An answer is what the handler returned, whatever becomes of its array before the answer is sent."""
    async with running() as worker:
        responses = await asyncio.gather(*(infer(worker.port, "scratch", i) for i in range(8)))
        assert [set(output(response, "y")) for response in responses] == [{i} for i in range(8)]


async def test_requests_are_joined() -> None:
    """Requests that wait share a call, each gets its own rows back, and shapes that differ are not mixed."""
    async with running() as worker:
        first = [asyncio.create_task(infer(worker.port, "gated_rows", [1.0])) for _ in range(2)]
        await until(lambda: len(worker.supervisor.ready[0].calls) >= 2)
        rest = [asyncio.create_task(infer(worker.port, "gated_rows", [1.0, 2.0])) for _ in range(2)]
        await until(lambda: worker.dispatcher.in_flight >= 4)
        await infer(worker.port, "wait_inside", 2)
        await infer(worker.port, "open_gate", 1)
        assert [output(await one, "rows") for one in first] == [[1], [1]]
        assert [output(await one, "rows") for one in rest] == [[4, 4], [4, 4]]


@pytest.mark.parametrize(("grace_s", "least_s", "most_s"), [(600.0, 500.0, 600.0), (0.0, 5.0, 5.0)])
async def test_stop_hooks_have_the_rest_of_the_grace_time(
    grace_s: float, least_s: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program has as long to stop as its requests have left of the grace time, and five seconds in any case."""
    async with running() as worker:
        stop, given = worker.supervisor.stop, list[float]()

        async def note(timeout_s: float) -> None:
            given.append(timeout_s)
            await stop(timeout_s)

        monkeypatch.setattr(worker.supervisor, "stop", note)
        assert await worker.stop(grace_s)
        assert least_s <= given[0] <= most_s


# -- as a process --------------------------------------------------------------------------------


def test_log_has_a_line_for_each_request(tmp_path: Path) -> None:
    """A request's line has its id, endpoint, durations, outcome and trace; SIGTERM drains, stops and exits with 0."""
    goodbye = tmp_path / "goodbye"
    with served(SAMPLE_APP_GOODBYE=str(goodbye)) as worker:
        port = worker.port
        traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        body = {"id": "seven", "inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]}
        head = "POST /v2/models/double/infer"
        asyncio.run(ask(port, head, json.dumps(body).encode(), headers={"traceparent": traceparent}))
        line = worker.line("request", id="seven")
        expected = {"endpoint": "double", "status": 200, "outcome": "ok", "device": "host", "traceparent": traceparent}
        assert line.items() >= expected.items()
        assert line["duration_ms"] > line["handler_ms"] > line["device_ms"] > 0
        assert line["queue_ms"] >= 0
        asyncio.run(infer(port, "fail", 0))
        assert worker.line("a handler failed")["exception"].endswith("ValueError: secret or not")
        assert worker.line("request", endpoint="fail")["outcome"] == "failed"
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert worker.line("stopped")["finished"] is True
        assert goodbye.read_text() == "stopped\n"
        assert worker.other == []


def test_termination_under_load() -> None:
    """SIGTERM: not ready, nothing new is taken, everything that was taken is answered, exit 0."""

    async def load(worker: Served, port: int) -> list[Response]:
        waiting = [asyncio.create_task(infer(port, "gate", i)) for i in range(20)]
        await infer(port, "wait_inside", 20)
        opener = await asyncio.open_connection("127.0.0.1", port)  # from before: no new connection is needed
        watcher = await asyncio.open_connection("127.0.0.1", port)
        worker.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(worker.line, "shutting down", requests=20)
        watcher[1].write(b"GET /v2/health/ready HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        ready = Response(await watcher[0].read())
        assert (ready.status, ready.json["reason"]) == (503, "the server is shutting down")
        refused = await infer(port, "open_gate")
        assert (refused.status, refused.error) == (503, "the server is shutting down")
        assert refused.headers["connection"] == "close"
        os.kill(worker.device_pid, signal.SIGUSR1)  # opens the gate: no request could
        for _, writer in (opener, watcher):
            writer.close()
        return await asyncio.gather(*waiting)

    with served() as worker:
        responses = asyncio.run(load(worker, worker.port))
        assert [output(one)[0] for one in responses] == list(range(20))
        assert worker.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_for_all_processes(number: signal.Signals) -> None:
    """A signal that a process manager sends to the device process, too, lets it finish all the same."""

    async def stop(worker: Served, port: int) -> Response:
        waiting = asyncio.create_task(infer(port, "gate", 7))
        await infer(port, "wait_inside", 1)
        for pid in (worker.device_pid, worker.process.pid):
            os.kill(pid, number)
        await asyncio.to_thread(worker.line, "shutting down")
        os.kill(worker.device_pid, signal.SIGUSR1)
        return await waiting

    with served() as worker:
        assert output(asyncio.run(stop(worker, worker.port))) == [7]
        assert worker.wait() == 0


def test_health_check_of_the_image(worker: Served) -> None:
    """The image's check asks the worker itself, whatever proxy its environment has, and fails where there is none."""
    text = (ROOT / "Dockerfile").read_text()
    _, program, code = json.loads(re.findall(r"HEALTHCHECK .*\\\n +CMD (\[.*\])", text)[0])
    for port, status in ((worker.port, 0), (1, 1)):
        environment = os.environ | {"AIOOFFLOAD_PORT": str(port), "http_proxy": "http://127.0.0.1:1", "no_proxy": ""}
        done = subprocess.run([sys.executable, program, code], env=environment, capture_output=True, check=False)
        assert done.returncode == status


def test_grace_time_that_is_not_enough() -> None:
    """What is not finished within the grace time is answered with 503, and the exit status says so."""
    with served("--grace-s", "0.05") as worker:

        async def cut_off(port: int) -> Response:
            waiting = asyncio.create_task(infer(port, "gate"))
            await infer(port, "wait_inside", 1)
            worker.process.send_signal(signal.SIGINT)
            return await waiting

        response = asyncio.run(cut_off(worker.port))
        assert response.status == 503
        assert worker.wait() == 1
        assert worker.line("stopped")["finished"] is False


def test_second_signal_ends_at_once() -> None:
    """A second signal ends the worker and its device processes without waiting for anything."""
    with served() as worker:

        async def block(port: int) -> None:
            waiting = asyncio.create_task(infer(port, "gate"))
            await infer(port, "wait_inside", 1)
            worker.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(worker.line, "shutting down")
            worker.process.send_signal(signal.SIGTERM)
            assert (await waiting).status == 0

        port = worker.port
        device = os.pidfd_open(worker.device_pid)
        asyncio.run(block(port))
        assert worker.wait() == 128 + signal.SIGTERM
        assert ends(device)
        os.close(device)


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["tests.service.nothing:app"], 1, "there is no module"),
        (["tests.service.broken_app:app"], 1, "broken_app.py"),  # where it failed
        (["--device", "cuda:77", "tests.service.sample_app:app"], 1, "cuda:77"),
        (["--host", "192.0.2.1", "--insecure", "tests.service.sample_app:app"], 2, "cannot listen"),
    ],
)
def test_worker_that_cannot_start(arguments: list[str], status: int, text: str) -> None:
    """A worker that cannot serve says why and ends."""
    command = [sys.executable, "-m", "aiooffload", "serve", "--device", "host", "--port", "0", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=30)
    assert result.returncode == status
    assert text in result.stderr


def resident_kib(pid: int) -> int:
    return int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_soak_with_kills() -> None:
    """The device process is killed again and again under load: no wrong answer, none missing, no memory lost."""

    async def client(port: int, number: int, stopping: asyncio.Event, tally: Counter[int]) -> None:
        while not stopping.is_set():
            value = float(number * 1000 + tally.total() % 1000)
            response = await infer(port, "double", [value])
            tally[response.status] += 1
            assert response.status in (200, 503)
            if response.status == 200:
                assert output(response, "y") == [2 * value]
            else:
                assert response.headers["retry-after"] == "1"
                await asyncio.sleep(0.01)

    async def soak(worker: Served, port: int) -> tuple[Counter[int], list[int]]:
        tally: Counter[int] = Counter()
        stopping = asyncio.Event()
        clients = [asyncio.create_task(client(port, number, stopping, tally)) for number in range(16)]
        sizes = []
        for generation in range(1, 7):  # with ever longer pauses: it looks like a crash loop
            ready = await asyncio.to_thread(worker.line, "device process is ready", generation=generation)
            served = tally[200]
            await until(lambda served=served: tally[200] > served + 300)
            os.kill(ready["pid"], signal.SIGKILL)
            sizes.append(await asyncio.to_thread(resident_kib, worker.process.pid))
        stopping.set()
        await asyncio.gather(*clients)
        return tally, sizes

    with served("--log-level", "info") as worker:
        tally, sizes = asyncio.run(soak(worker, worker.port))
        assert tally[200] > 1800
        assert tally[503] > 0
        assert sizes[-1] < sizes[1] + 20_000


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("attempt", range(20))
def test_twenty_terminations_under_load(attempt: int) -> None:
    """SIGTERM while 32 connections send without a pause: each request is answered, 0 is the exit status."""

    async def client(port: int, stopping: asyncio.Event, answers: list[Any]) -> None:
        while not stopping.is_set():
            try:
                response = await infer(port, "double", [float(len(answers))])
            except OSError:
                return  # not accepted
            answers.append(response)

    async def load(worker: Served, port: int) -> list[Response]:
        answers: list[Response] = []
        stopping = asyncio.Event()
        clients = [asyncio.create_task(client(port, stopping, answers)) for _ in range(32)]
        await until(lambda: len(answers) >= 100 + 10 * attempt)
        worker.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(worker.wait)
        stopping.set()
        await asyncio.gather(*clients)
        return answers

    with served() as worker:
        answers = asyncio.run(load(worker, worker.port))
        assert worker.process.returncode == 0
        assert {one.status for one in answers} <= {200, 503}
