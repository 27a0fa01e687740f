"""A load for ``scripts/bench serve``: connections that send one request after another. Run as a program of its own.

Usage: ``python -m benchmarks.serve_client PORT PATH CONNECTIONS SECONDS``, with the request's body on standard input.
Prints JSON: ``requests``, ``failures`` (answers that are not 200), ``unanswered``, ``seconds``, ``p50_us``, ``p99_us``.
A connection that the server closes, or says that it closes, is not opened again.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import cast

import uvloop


class Connection(asyncio.Protocol):
    """Sends a request whenever the last one was answered, until the time is over."""

    def __init__(self, request: bytes, end: float, times: list[float]) -> None:
        self.failures = 0
        self.waiting = False  # for an answer
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._end = end
        self._times = times
        self._began = 0.0
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._send()

    def _send(self) -> None:
        self._began = time.perf_counter()
        if self._began > self._end:
            self._transport.close()
            return
        self.waiting = True
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        at = head.lower().index(b"content-length:") + len(b"content-length:")
        if len(body) < int(head[at:].split(b"\r\n", 1)[0]):
            return
        self._buffer = b""
        self.waiting = False
        self._times.append(time.perf_counter() - self._began)
        self.failures += not head.startswith(b"HTTP/1.1 200")
        if b"connection: close" in head:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self.over.set_result(None)


async def load(port: int, path: str, connections: int, seconds: float, body: bytes) -> dict[str, float]:
    """Keep so many connections busy for so many seconds."""
    loop = asyncio.get_running_loop()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    times: list[float] = []
    began = time.perf_counter()
    made = [
        await loop.create_connection(
            lambda: Connection(head.encode() + body, began + seconds, times), "127.0.0.1", port
        )
        for _ in range(connections)
    ]
    await asyncio.gather(*(protocol.over for _, protocol in made))
    elapsed = time.perf_counter() - began
    times.sort()
    return {
        "requests": len(times),
        "failures": sum(protocol.failures for _, protocol in made),
        "unanswered": sum(protocol.waiting for _, protocol in made),
        "seconds": round(elapsed, 3),
        "p50_us": round(times[len(times) // 2] * 1e6, 1),
        "p99_us": round(times[len(times) * 99 // 100] * 1e6, 1),
    }


def main() -> None:
    port, path, connections, seconds = sys.argv[1:]
    body = sys.stdin.buffer.read()
    print(json.dumps(uvloop.run(load(int(port), path, int(connections), float(seconds), body))))


if __name__ == "__main__":
    main()
