"""All of the front together: from binding the socket to the exit status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from typing import Final

import uvicorn

from aiooffload.log import log
from aiooffload.service.collector import settle_collector
from aiooffload.service.config import Config
from aiooffload.service.connections import Limits, limited
from aiooffload.service.dispatch import Dispatcher
from aiooffload.service.http import make_app
from aiooffload.service.infer import Site
from aiooffload.service.metrics import Metrics
from aiooffload.service.process import Settings, StartFailed
from aiooffload.service.supervisor import Supervisor
from aiooffload.service.versions import version_of

__all__ = ["Worker", "serve"]

VERSION: Final = version_of("aiooffload")
_LAG_S: Final = 0.25
LINGER_S: Final = 0.25
"""A request may have been sent on a connection just before this end closes it: its client is to have an answer."""
_BACKLOG: Final = 2048
_CLOSE_S: Final = 5.0
"""For connections to close, in addition to the grace time; and at least so long for the program's stop hooks, which
have the rest of it."""


class Server(uvicorn.Server):
    """uvicorn's server, whose signals are the worker's to handle."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nothing more, give requests that are on their way a moment to be refused, then close."""
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        end = loop.time() + LINGER_S
        while self.server_state.connections and loop.time() < end:  # noqa: ASYNC110  (uvicorn sets no event)
            await asyncio.sleep(0.01)
        await super().shutdown(sockets)


class Worker:
    """One worker, on the running loop.

    Parameters
    ----------
    config
        Its settings.
    app
        ``MODULE:APP``, which only the device processes import.

    Notes
    -----
    *States.* ``start`` listens at once, not ready; it becomes ready with the first device process. ``stop`` is
    the one way out: not ready, no new work, what was taken is finished within the grace time, everything is closed.
    """

    def __init__(self, config: Config, app: str) -> None:
        self.config = config
        settings = Settings(
            app=app,
            offload={"lanes": config.lanes, "hard_timeout_s": config.hard_timeout_s or None},
            log_format=config.log_format,
            log_level=config.log_level,
            start_timeout_s=config.start_timeout_s,
            hard_timeout_s=config.hard_timeout_s,
            stall_s=config.stall_s,
        )
        self.supervisor = Supervisor(settings, config.devices, self._on_change)
        self.dispatcher = Dispatcher(self.supervisor, config.max_queue, config.max_queue_mib << 20, config.concurrency)
        self.metrics = Metrics(self.supervisor, self.dispatcher, VERSION)
        self.port = 0
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._lag_handle: asyncio.TimerHandle | None = None
        self._lag_due = 0.0

    def _on_change(self) -> None:
        self.dispatcher.on_change()

    async def start(self) -> None:
        """Listen and start the device processes.

        Raises
        ------
        OSError
            The address cannot be listened on. Nothing was started.
        """
        config = self.config
        listener = await asyncio.to_thread(listen, config.host, config.port)
        self.port = listener.getsockname()[1]
        site = Site(
            supervisor=self.supervisor,
            dispatcher=self.dispatcher,
            metrics=self.metrics,
            version=VERSION,
            token=config.token,
            max_body_nbytes=config.max_body_mib << 20,
            max_json_nbytes=config.max_json_mib << 20,
            request_timeout_s=config.request_timeout_s,
        )
        self._server = Server(
            uvicorn.Config(
                make_app(site),
                http=limited(Limits(config.max_connections, config.receive_timeout_s), self.metrics.refused),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=_BACKLOG,
                timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]  # goes to call_later as it is
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="serve")
        self.supervisor.start()
        self._beat()

    async def ready(self) -> None:
        """Wait for the first device process; raises StartFailed if there will be none."""
        await self.supervisor.first_ready()

    async def stop(self, grace_s: float) -> bool:
        """Finish what was taken within so many seconds and close everything; False if something was not finished."""
        loop = asyncio.get_running_loop()
        end = loop.time() + grace_s
        finished = await self.dispatcher.drain(grace_s)
        self.dispatcher.stop()
        await self.supervisor.stop(max(_CLOSE_S, end - loop.time()) if finished else 0.0)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            self._server.config.timeout_graceful_shutdown = int(_CLOSE_S)
            await self._serving
        if self._lag_handle is not None:
            self._lag_handle.cancel()
        return finished

    def _beat(self) -> None:
        """Measure how late the loop is."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.metrics.loop_lag.set(max(0.0, now - self._lag_due) if self._lag_due else 0.0)
        self._lag_due = now + _LAG_S
        self._lag_handle = loop.call_later(_LAG_S, self._beat)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; raises OSError if it cannot."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


async def serve(config: Config, app: str) -> int:
    """Run a worker until a signal ends it; returns the exit status.

    SIGTERM and SIGINT: 0 if everything was finished within the grace time. A second one ends the process at once.
    """
    worker = Worker(config, app)
    try:
        await worker.start()
    except OSError as error:
        log.error("cannot listen", host=config.host, port=config.port, error=str(error))
        return 2
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, worker, stopping, number)
    stopped, ready = asyncio.ensure_future(stopping.wait()), asyncio.ensure_future(worker.ready())
    try:
        await asyncio.wait((stopped, ready), return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and (failure := ready.exception()) is not None:
            if not isinstance(failure, StartFailed):
                raise failure
            log.error("the program cannot be served", app=app, reason=str(failure))
            await worker.stop(0.0)
            return 1
        if not stopping.is_set():
            settle_collector()
            devices = [process.device["label"] for process in worker.supervisor.ready]
            log.info("serving", url=f"http://{config.host}:{worker.port}", app=app, devices=devices)
        await stopped
        log.info("shutting down", requests=worker.dispatcher.in_flight, grace_s=config.grace_s)
        finished = await worker.stop(config.grace_s)
        log.info("stopped", finished=finished)
        return 0 if finished else 1
    finally:
        for future in (stopped, ready):
            future.cancel()


def _on_signal(worker: Worker, stopping: asyncio.Event, number: int) -> None:
    if stopping.is_set():
        worker.supervisor.kill_now()
        os._exit(128 + number)
    stopping.set()
