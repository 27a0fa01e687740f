"""A worker that is asked by many clients at once while its device process is killed again and again.

Whatever happens to the device process, the front answers each request, rightly or with a status that says when to try
again, and keeps nothing of it.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop
from benchmarks.command import say
from benchmarks.serve import Worker

from trials.growth import EPOCHS, Findings, Held, compare, held_by
from trials.serving_requests import Request, Response, Wrong, check, make

APP = "trials.serving_app:app"
CONNECTIONS = 16
MAX_QUEUE = 14
"""Fewer than there are connections, so that some requests are refused for that."""
ABORTED = 0.04
"""Share of requests whose client goes away."""
ABORT_AFTER_S = (0.0, 0.002, 0.03)
"""At once, while the request runs, and when the worker watches the connection."""
ANSWER_S = 30.0
"""After so long a request counts as unanswered."""
REPLACED_S = 60.0
"""After so long a device process counts as not replaced: the worker pauses for 30 s at most between two starts."""
PAUSE_S = (0.01, 0.05)
"""For so long a client waits before it tries again."""
REST_S = 0.1
"""What takes the front a moment to close is closed by then."""
SETTLE_S = 10.0
"""In which a spare process has to be there again."""
BEFORE_STOP_S = 0.3
STOP_S = 60.0


@dataclass
class Tally(Findings):
    """What happened so far."""

    requests: int = 0
    served: int = 0
    retried: int = 0
    aborted: int = 0
    malformed: int = 0
    kills: int = 0
    wrong: int = 0
    unanswered: int = 0
    slowest_s: float = 0.0
    """What an answer took, at most."""
    replacement_s: list[float] = field(default_factory=list)
    """From each kill until a request was served again."""

    def mistake(self, text: str) -> None:
        self.wrong += 1
        self.note(text)

    def silence(self, text: str) -> None:
        self.unanswered += 1
        self.note(text)

    @property
    def bad(self) -> bool:
        return bool(self.wrong or self.unanswered or self.leaks)

    @property
    def done(self) -> str:
        counts = f"{self.requests} requests, {self.retried} retried, {self.aborted} aborted, {self.malformed} malformed"
        return f"{counts}, {self.kills} kills"

    @property
    def found(self) -> str:
        times = f"replaced in {max(self.replacement_s, default=0):.2f} s and answered in {self.slowest_s:.2f} s at most"
        return f"{times}, {self.wrong} wrong, {self.unanswered} unanswered, {self.leaks} leaks"

    def figures(self) -> dict[str, Any]:
        figures, times = super().figures(), self.replacement_s
        figures["replacement_s_p50"] = round(statistics.median(times), 3) if times else None
        return figures | {"replacement_s_max": max(times, default=None)}


@dataclass(frozen=True)
class Footprint(Held):
    """What the front holds while it has nothing to answer."""

    processes: int


# -- clients -----------------------------------------------------------------------------------


@dataclass
class Load:
    """What all clients share."""

    port: int
    tally: Tally
    stopping: bool = False
    """No connection is opened any more."""
    killed_at: float = math.inf
    served_again: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by what was sent after that, and served."""


async def read_response(reader: asyncio.StreamReader) -> Response:
    """Read one response; raises EOFError or OSError if the connection ends before it does, Wrong if it is none."""
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        else:
            body = await reader.readexactly(int(headers["content-length"]))
        return Response(int(first.split()[1]), headers, body)
    except (ValueError, LookupError, asyncio.LimitOverrunError) as error:
        raise Wrong(f"no response of HTTP: {error!r}") from error


class Client:
    """Sends one request after another; a connection that was closed is opened anew."""

    def __init__(self, load: Load, chance: random.Random) -> None:
        self._load = load
        self._chance = chance
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def keep_asking(self, resting: asyncio.Event) -> None:
        """Ask until the event is set, or nobody may connect any more."""
        tally = self._load.tally
        again: Request | None = None
        while not resting.is_set() and (self._is_open() or not self._load.stopping):
            request = again or make(self._chance)
            again = None
            tally.requests += 1
            try:
                async with asyncio.timeout(ANSWER_S):
                    if self._chance.random() < ABORTED:
                        await self._abort(request)
                    elif not await self._ask(request):
                        tally.retried += 1
                        again = request
                        await asyncio.sleep(self._chance.uniform(*PAUSE_S))
            except Wrong as error:
                tally.mistake(str(error))
                self._close()  # nobody knows where the next response begins
            except (OSError, EOFError) as error:  # a timeout is one, too
                tally.silence(f"no answer to {request.content[:40]!r}: {error!r}")
                self._close()
                await asyncio.sleep(PAUSE_S[0])  # nothing may be there to connect to
        self._close()

    async def _ask(self, request: Request) -> bool:
        """Whether the request was answered for good; False if it may be sent again."""
        load = self._load
        reader, writer = await self._open()
        sent_at = time.monotonic()
        writer.write(request.content)
        response = await read_response(reader)
        load.tally.slowest_s = max(load.tally.slowest_s, round(time.monotonic() - sent_at, 3))
        if response.headers.get("connection") == "close":
            self._close()
        if not check(request, response):
            return False
        if request.result is None:
            load.tally.malformed += 1
            return True
        load.tally.served += 1
        if sent_at > load.killed_at:
            load.served_again.set()
        return True

    async def _abort(self, request: Request) -> None:
        """Send a request or the beginning of one and go away, with a goodbye or without."""
        _, writer = await self._open()
        self._load.tally.aborted += 1
        size = len(request.content)
        writer.write(request.content[: self._chance.choice((size, self._chance.randrange(size)))])
        await asyncio.sleep(self._chance.choice(ABORT_AFTER_S))
        if self._chance.random() < 0.5:
            writer.transport.abort()
        self._close()

    def _is_open(self) -> bool:
        if self._connection is None:
            return False
        reader, writer = self._connection
        return not (reader.at_eof() or writer.is_closing())

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._connection is None or not self._is_open():
            self._close()
            self._connection = await asyncio.open_connection("127.0.0.1", self._load.port)
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None


@asynccontextmanager
async def asking(clients: Iterable[Client]) -> AsyncIterator[None]:
    """Let clients ask until the end of the block; then they have their answers, and no connections."""
    resting = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.keep_asking(resting))
        yield
        resting.set()


# -- the worker --------------------------------------------------------------------------------


async def device_pid(port: int) -> int:
    """Return the device process that serves now, 0 if there is none."""
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /v2/health/ready HTTP/1.1\r\nhost: soak\r\n\r\n")
        ready = json.loads((await read_response(reader)).body)
        writer.close()
    return int(ready["devices"][0]["pid"])


async def kill(load: Load) -> None:
    """Kill the device process and wait until a request is served that was sent afterwards."""
    tally = load.tally
    try:
        if not (pid := await device_pid(load.port)):
            return  # it ended by itself, which the log tells
        load.served_again.clear()
        os.kill(pid, signal.SIGKILL)
    except (OSError, EOFError, Wrong) as error:
        tally.mistake(f"the device process could not be killed: {error!r}")
        return
    load.killed_at = time.monotonic()
    tally.kills += 1
    try:
        await asyncio.wait_for(load.served_again.wait(), REPLACED_S)
    except TimeoutError:
        tally.mistake(f"nothing was served for {REPLACED_S:g} s after a kill")
    else:
        tally.replacement_s.append(round(time.monotonic() - load.killed_at, 3))


def children_of(pid: int) -> int:
    return len(Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


async def at_rest(pid: int) -> Footprint:
    """Look at the front when it has closed all connections, and has a device process and a spare one."""
    end = time.monotonic() + SETTLE_S
    while children_of(pid) < 2 and time.monotonic() < end:  # noqa: ASYNC110  (of another process's children nobody tells)
        await asyncio.sleep(0.01)
    await asyncio.sleep(REST_S)
    return Footprint(**held_by(pid), processes=children_of(pid))


async def stop(worker: Worker, clients: Sequence[Client], load: Load) -> None:
    """End the worker while it is asked: it answers what it has, and ends with 0."""
    async with asking(clients):
        await asyncio.sleep(BEFORE_STOP_S)  # into the middle of it
        load.stopping = True
        worker.process.send_signal(signal.SIGTERM)
        try:
            status = await asyncio.to_thread(worker.process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            load.tally.mistake(f"the worker did not end within {STOP_S:g} s of SIGTERM")
        else:
            if status:
                load.tally.mistake(f"the worker's exit status was {status}")


def look_through(log: Iterable[str], tally: Tally) -> None:
    """Count what a worker's log has beside the device processes that were killed: what it tells no client."""
    gone = 0
    for text in log:
        line = json.loads(text) if text.startswith("{") else {"level": "error"}
        if line.get("event") == "device process is gone":
            gone += 1
        elif line["level"] not in ("info", "warning"):
            tally.mistake(f"in the log: {text.strip()}")
    if gone != tally.kills:
        tally.mistake(f"{gone} device processes ended, and {tally.kills} were killed")


async def soak(worker: Worker, seconds: float, seed: int, kill_every_s: float, tally: Tally) -> int:
    """Ask, kill and stop a worker; return the growth of its front's resident memory."""
    chance, load, prints = random.Random(seed), Load(worker.port, tally), []
    clients = [Client(load, random.Random(chance.getrandbits(64))) for _ in range(CONNECTIONS)]
    began = time.monotonic()
    due = began + kill_every_s
    for epoch in range(EPOCHS):
        until = began + seconds * (epoch + 1) / EPOCHS
        if time.monotonic() > until:
            continue  # the one before took so long
        async with asking(clients):
            while due < until:
                await asyncio.sleep(due - time.monotonic())
                await kill(load)
                due = time.monotonic() + kill_every_s
            await asyncio.sleep(until - time.monotonic())
        if (status := worker.process.poll()) is not None:
            tally.mistake(f"the worker ended by itself, with exit status {status}")
            return 0
        prints.append(await at_rest(worker.process.pid))
        say(f"{time.monotonic() - began:.0f} of {seconds:.0f} s: {tally.done}, {prints[-1].resident_bytes >> 20} MiB")
    await stop(worker, clients, load)
    return compare(tally, prints)


def run(device: str, seconds: float, seed: int, kill_every_s: float, tally: Tally) -> tuple[str, int]:
    """Soak a worker for so long; return its device and the growth of its front's resident memory."""
    with tempfile.TemporaryFile("w+") as log:
        flags = ("--max-queue", str(MAX_QUEUE))
        # The lines of requests are millions, and the clients know better.
        with Worker(device, APP, flags, sink=("grep", "-vF", '"event":"request"'), log=log) as worker:
            growth = uvloop.run(soak(worker, seconds, seed, kill_every_s, tally))
        log.seek(0)
        look_through(log, tally)
    return worker.device, growth
