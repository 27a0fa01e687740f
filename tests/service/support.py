"""Workers for the tests: one as a process of its own, as an operator has it, and ways to talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

from aiooffload.service.config import Config
from aiooffload.service.worker import Worker

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = "tests.service.sample_app:app"


class Served:
    """A worker process; its log is read as it is written."""

    def __init__(self, *flags: str, app: str = SAMPLE, **environment: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("AIOOFFLOAD_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "aiooffload", "serve", "--device", "host", "--port", "0", *flags, app],
            cwd=ROOT,
            env=clean | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[dict[str, Any]] = []
        self.other: list[str] = []  # what is no line of the log
        self._news = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                if line.startswith("{"):
                    self.lines.append(json.loads(line))
                else:
                    self.other.append(line)
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    def line(self, event: str, since: int = 0, timeout_s: float = 20.0, **values: Any) -> dict[str, Any]:
        """Return the first line of the log with that event and those values, from a position on; wait for it."""

        def found() -> dict[str, Any] | None:
            for line in self.lines[since:]:
                if line["event"] == event and line.items() >= values.items():
                    return line
            return None

        with self._news:
            self._news.wait_for(lambda: found() or self._ended, timeout_s)
            line = found()
        assert line is not None, f"no line {event!r} with {values}: {self.lines[-5:]} {self.other}"
        return line

    @property
    def port(self) -> int:
        return int(self.line("serving")["url"].rpartition(":")[2])

    @property
    def device_pid(self) -> int:
        """The first device process."""
        return int(self.line("device process is ready")["pid"])

    def wait(self, timeout_s: float = 20.0) -> int:
        """Wait for the end of the process; returns its exit status."""
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def close(self) -> None:
        """End it if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextlib.contextmanager
def served(*flags: str, **options: Any) -> Iterator[Served]:
    """A worker process until the end of the block."""
    worker = Served(*flags, **options)
    try:
        yield worker
    finally:
        worker.close()


@contextlib.asynccontextmanager
async def running(app: str = SAMPLE, **settings: Any) -> AsyncIterator[Worker]:
    """A worker on the test's own loop, ready, until the end of the block."""
    worker = Worker(Config(**{"device": "host", "port": 0, "lanes": 4, "log_level": "error"} | settings), app)
    await worker.start()
    try:
        await worker.ready()
        yield worker
    finally:
        await worker.stop(0.0)


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """Let a process not go on until the end of the block; it can be killed."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def ends(pidfd: int) -> bool:
    """Whether a process ends within ten seconds."""
    return bool(select.select([pidfd], [], [], 10)[0])


async def until(condition: Callable[[], object]) -> None:
    """Let the loop turn until something holds that is seen nowhere but in the worker's own state."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  (nobody sets an event for it)
            await asyncio.sleep(0)


async def ask(port: int, head: str, body: bytes = b"", *, headers: dict[str, Any] | None = None) -> Response:
    """Send one request on a connection of its own and return the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        lines = {"host": "test", "connection": "close", "content-length": len(body)} | (headers or {})
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
        writer.write(f"{head} HTTP/1.1\r\n{text}\r\n".encode() + body)
        return Response(await reader.read())
    finally:
        writer.close()


class Response:
    """A response in bytes, taken apart."""

    def __init__(self, content: bytes) -> None:
        head, _, self.body = content.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        self.status = int(first.split()[1]) if content else 0  # 0: the connection was closed without a response
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        assert set(self.json) == {"error"}
        return str(self.json["error"])


def infer_body(datatype: str, data: list[Any], shape: list[int] | None = None, **more: Any) -> bytes:
    """Return a JSON request with one input, ``x``."""
    tensor = {"name": "x", "datatype": datatype, "shape": shape or [len(data)], "data": data}
    return json.dumps({"inputs": [tensor]} | more).encode()


async def infer(port: int, model: str, value: int | list[float] = 0, **options: Any) -> Response:
    """Ask an endpoint that takes an INT32 or a vector of FP32."""
    body = infer_body("INT32", [value]) if isinstance(value, int) else infer_body("FP32", value)
    return await ask(port, f"POST /v2/models/{model}/infer", body, **options)


def output(response: Response, name: str = "count") -> Any:
    """Return the data of an output."""
    assert response.status == 200, response.body
    return next(entry["data"] for entry in response.json["outputs"] if entry["name"] == name)
