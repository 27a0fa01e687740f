"""What the worker costs for each request, and how long faults and stops take.

Connections send small requests (16 float32 in JSON) one after another, from a process of their own, to:

  echo      a bare Starlette application that returns the request's bytes
  fastapi   FastAPI, the same kernel as a Python function in run_in_executor
  nothing   aiooffload serve, a handler that returns its input: what the worker itself costs
  single    aiooffload serve, a kernel for each request
  batched   the same, requests joined

CPU is that of the server's processes for each request, which says more than the rate does where other
programs use the machine. Then device processes are killed, one of each worker, and the time taken until
another serves; and the worker is stopped under load.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TextIO

from benchmarks.command import add_efforts, run, say

SCRIPTS = Path(__file__).resolve().parent.parent
WAYS = {
    "echo": ("starlette", "/echo"),
    "fastapi": ("fastapi", "/infer"),
    "nothing": ("aiooffload", "/v2/models/nothing/infer"),
    "single": ("aiooffload", "/v2/models/single/infer"),
    "batched": ("aiooffload", "/v2/models/batched/infer"),
}
BARS = {("single", "echo"): 0.35, ("single", "fastapi"): 1.1, ("batched", "fastapi"): 2.0}
REPLACED_BAR_S = 1.0
VALUES = [i / 8 for i in range(16)]
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 16], "data": VALUES}]}).encode()


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    seconds: float
    kills: int
    stops: int


FULL = Effort(rounds=5, seconds=4.0, kills=5, stops=5)
QUICK = Effort(rounds=2, seconds=2.0, kills=3, stops=2)
SMOKE = Effort(rounds=1, seconds=0.2, kills=1, stops=1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_efforts(parser, FULL, QUICK, SMOKE, "less than a minute")
    parser.add_argument("--connections", type=int, default=32, help="default: %(default)s")


def main(options: argparse.Namespace) -> int:
    return run("serve", options, lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, as ``--json`` writes them."""
    effort: Effort = options.effort
    samples: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with peer("starlette") as starlette, peer("fastapi") as fastapi, Worker(options.device) as worker:
        servers: dict[str, Server] = {"starlette": starlette, "fastapi": fastapi, "aiooffload": worker}
        for number in range(effort.rounds):
            for way, (server, path) in WAYS.items():
                say(f"round {number + 1} of {effort.rounds}: {way}")
                samples[way].append(loaded(servers[server], path, options.connections, effort.seconds))
        device = worker.device
    replaced = [replaced_once(options.device) for _ in range(effort.kills)]
    stops = [stopped_under_load(options) for _ in range(effort.stops)]
    rows = {way: {key: statistics.median(one[key] for one in runs) for key in runs[0]} for way, runs in samples.items()}
    ratios = {
        f"{ours} / {theirs}": round(rows[ours]["requests_per_s"] / rows[theirs]["requests_per_s"], 2)
        for ours, theirs in BARS
    }
    return {
        "device": device,
        "connections": options.connections,
        "rows": rows,
        "ratios": ratios,
        "bars": {f"{ours} / {theirs}": bar for (ours, theirs), bar in BARS.items()},
        "replaced_s": [round(one, 3) for one in replaced],
        "replaced_bar_s": REPLACED_BAR_S,
        "stops": stops,
        "load_average": os.getloadavg()[0],
    }


def replaced_once(device: str) -> float:
    """Kill the device process of a new worker: one that dies again and again is started after growing pauses."""
    with Worker(device) as worker:
        return worker.replace()


def show(figures: dict[str, Any], out: TextIO) -> None:
    from benchmarks.report import print_table

    print(f"device {figures['device']}, {figures['connections']} connections", file=out)
    cells = {
        way: [
            f"{row['requests_per_s']:,.0f}",
            f"{row['p50_us'] / 1e3:.1f} / {row['p99_us'] / 1e3:.1f}",
            f"{row['cpu_us']:.0f}",
            f"{row['failures']:.0f}",
        ]
        for way, row in figures["rows"].items()
    }
    print_table(["", "requests/s", "p50 / p99, ms", "CPU, us", "failed"], cells, out)
    for name, ratio in figures["ratios"].items():
        bar = figures["bars"][name]
        print(f"{name}: {ratio:.2f}x, bar {bar}x: {'met' if ratio >= bar else 'MISSED'}", file=out)
    replaced = figures["replaced_s"]
    met = "met" if max(replaced) <= figures["replaced_bar_s"] else "MISSED"
    print(
        f"a killed device process was replaced in {min(replaced):.2f} to {max(replaced):.2f} s, bar 1 s: {met}",
        file=out,
    )
    seconds = [one["seconds"] for one in figures["stops"]]
    unanswered = sum(one["unanswered"] for one in figures["stops"])
    statuses = {one["status"] for one in figures["stops"]}
    print(
        f"SIGTERM under load: {min(seconds):.2f} to {max(seconds):.2f} s, {unanswered} of "
        f"{sum(one['answered'] for one in figures['stops'])} requests unanswered, exit status {statuses}",
        file=out,
    )
    print(f"load average of the machine: {figures['load_average']:.1f}", file=out)


class NotServing(RuntimeError):
    """A server did not start; the text has what it said."""


class Server:
    """A server process, with a port."""

    port = 0

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def cpu_s(self) -> float:
        """Return the CPU seconds that it and its children have used."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return sum(_cpu_s(int(one)) for one in [str(pid), *children])


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def peer(way: str) -> Iterator[Server]:
    """One of the servers that the worker is compared with."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.serve_app", way, str(port)]
    process = subprocess.Popen(command, cwd=SCRIPTS, text=True)
    server = Server(process)
    server.port = port
    try:
        _until_it_listens(server)
        yield server
    finally:
        process.terminate()
        process.wait()


def _until_it_listens(server: Server) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", server.port)).close()
            return
        except OSError:
            if server.process.poll() is not None:
                break
            time.sleep(0.05)  # nobody says when another process listens
    raise NotServing(f"a server did not start: {server.process.args!r}")


class Worker(Server):
    """``aiooffload serve``, as anybody would start it, its log read as far as it is needed.

    What the log has afterwards goes through ``sink`` to ``log``, which is complete at the end of the block: somebody
    has to take it.
    """

    def __init__(
        self,
        device: str,
        app: str = "benchmarks.serve_app:app",
        flags: Sequence[str] = (),
        sink: Sequence[str] = ("cat",),
        log: IO[str] | int = subprocess.DEVNULL,
    ) -> None:
        command = [sys.executable, "-m", "aiooffload", "serve", "--device", device, "--port", "0", *flags, app]
        path = os.pathsep.join(filter(None, [str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path}
        super().__init__(subprocess.Popen(command, cwd=SCRIPTS, env=environment, text=True, stderr=subprocess.PIPE))
        assert self.process.stderr is not None
        try:
            self.device = self._line("device process is ready")["device"]
            self.port = int(self._line("serving")["url"].rpartition(":")[2])
        except BaseException:  # of whoever interrupts this, too: there is no block yet that would end it
            self.process.kill()
            self.process.wait()
            self.process.stderr.close()
            raise
        self._sink = subprocess.Popen(sink, stdin=self.process.stderr, stdout=log)

    def _line(self, event: str) -> dict[str, Any]:
        assert self.process.stderr is not None
        for text in self.process.stderr:
            line: dict[str, Any] = json.loads(text) if text.startswith("{") else {}
            if line.get("event") == event:
                return line
            if line.get("level") == "error":
                raise NotServing(f"the worker did not start: {line.get('reason', text.strip())}")
        raise NotServing("the worker did not start")

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait()
        self._sink.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def replace(self) -> float:
        """Kill the device process and return the seconds until another serves."""
        generation = self._ready()["devices"][0]["generation"]
        began = time.monotonic()
        os.kill(int(self._ready()["devices"][0]["pid"]), signal.SIGKILL)
        while True:
            ready = self._ready()
            if ready["ready"] and ready["devices"][0]["generation"] > generation:
                return time.monotonic() - began
            if time.monotonic() - began > 60:
                raise RuntimeError("the device process was not replaced within a minute")
            time.sleep(0.005)  # how finely the time is measured, and asking must not load the worker

    def _ready(self) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v2/health/ready") as response:
                content: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            content = json.load(error)
        return content


def loaded(server: Server, path: str, connections: int, seconds: float) -> dict[str, float]:
    """Load a server and return rate, latencies and CPU of one round."""
    before = server.cpu_s()
    result = _finish(_client(server, path, connections, seconds))
    requests = max(1, result["requests"])
    return {
        "requests_per_s": round(result["requests"] / result["seconds"], 1),
        "p50_us": result["p50_us"],
        "p99_us": result["p99_us"],
        "cpu_us": round((server.cpu_s() - before) / requests * 1e6, 1),
        "failures": result["failures"],
    }


def _client(server: Server, path: str, connections: int, seconds: float) -> subprocess.Popen[bytes]:
    arguments = [str(server.port), path, str(connections), str(seconds)]
    command = [sys.executable, "-m", "benchmarks.serve_client", *arguments]
    process = subprocess.Popen(command, cwd=SCRIPTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(BODY)
    process.stdin.close()
    assert process.stdout is not None
    if process.stdout.readline() != b"connected\n":
        raise RuntimeError("the load could not connect")
    return process


def _finish(process: subprocess.Popen[bytes]) -> dict[str, float]:
    assert process.stdout is not None
    with process.stdout:
        result: dict[str, float] = json.load(process.stdout)
    process.wait()
    return result


def stopped_under_load(options: argparse.Namespace) -> dict[str, Any]:
    """Send SIGTERM while requests come in; return how long it took, and what became of the requests."""
    say("stopping under load")
    with Worker(options.device) as worker:
        client = _client(worker, WAYS["single"][1], options.connections, 60.0)
        time.sleep(0.5)  # into the middle of it
        began = time.monotonic()
        worker.process.send_signal(signal.SIGTERM)
        result = _finish(client)
        status = worker.process.wait()
        return {
            "seconds": round(time.monotonic() - began, 3),
            "status": status,
            "answered": result["requests"],
            "unanswered": result["unanswered"],
        }
