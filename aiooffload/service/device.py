"""The device process: one device, one Offload, the program's handlers. Started by the supervisor, never by hand.

It ends when the front closes the connection, when the device is lost, or when the front itself dies: it must not
outlive the one that answers for it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from contextvars import ContextVar
from typing import Any, Final, cast

import uvloop

from aiooffload.engine.bound import BoundLaunch
from aiooffload.errors import (
    DependencyError,
    DeviceLostError,
    OffloadError,
    OffloadTimeout,
    OutOfMemoryError,
    UsageError,
    WouldBlock,
)
from aiooffload.log import log
from aiooffload.offload import Offload
from aiooffload.operation import Operation
from aiooffload.service import frames
from aiooffload.service.app import App, Endpoint, RequestError
from aiooffload.service.collector import settle_collector
from aiooffload.service.logs import bridge_logging, configure_logs
from aiooffload.service.tensors import Data

__all__ = ["BEAT_S", "EXIT_FAILED", "EXIT_LOST", "load_app", "main", "result_of"]

BEAT_S: Final = 0.25
"""Seconds between two beats of a loop that is not held up."""
EXIT_FAILED: Final = 3
EXIT_LOST: Final = 4
_FRONTS_SIGNALS: Final[dict[signal.Signals, Any]] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
}
"""The front ends a device process when it has finished; with the usual handlers."""
_PR_SET_PDEATHSIG: Final = 1
_FLUSH_S: Final = 2.0
_LOG_S: Final = 0.5
"""For the last lines of the log: what they say of the end is worth less than the next process."""
_CANCELLED: Final = {"kind": "error", "status": 499, "text": "cancelled"}
_UNANSWERED: Final = {"kind": "error", "status": 500, "text": "the device process failed; its log says how"}

_operations: ContextVar[list[Operation[Any]] | None] = ContextVar("aiooffload_operations", default=None)


class ServedOffload(Offload):
    """The Offload that handlers get: it knows which operations belong to which call."""

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, on_lost=lambda error: self.lost.set(), **options)
        self.lost = asyncio.Event()

    @property
    def loss(self) -> DeviceLostError | None:
        """Why the device is lost: known before ``lost`` is set, and before any handler goes on."""
        return None if self._engine is None else self._engine.lost

    def launch(self, *args: Any, **kwargs: Any) -> Operation[None]:
        return _noted(super().launch(*args, **kwargs))

    def bind(self, *args: Any, **kwargs: Any) -> Any:
        return NotedLaunch(super().bind(*args, **kwargs))

    def launch_graph(self, *args: Any, **kwargs: Any) -> Operation[None]:
        return _noted(super().launch_graph(*args, **kwargs))

    def custom_operation(self, *args: Any, **kwargs: Any) -> Operation[Any]:
        return _noted(super().custom_operation(*args, **kwargs))

    def host_task(self, *args: Any, **kwargs: Any) -> Operation[Any]:
        return _noted(super().host_task(*args, **kwargs))

    def put(self, *args: Any, **kwargs: Any) -> Operation[Any]:
        return _noted(super().put(*args, **kwargs))

    def get(self, *args: Any, **kwargs: Any) -> Operation[Any]:
        return _noted(super().get(*args, **kwargs))

    def copy(self, *args: Any, **kwargs: Any) -> Operation[None]:
        return _noted(super().copy(*args, **kwargs))

    def fill(self, *args: Any, **kwargs: Any) -> Operation[None]:
        return _noted(super().fill(*args, **kwargs))


class NotedLaunch:
    """A bound launch whose operations belong to the call that makes them, whoever bound it."""

    __slots__ = ("_bound",)

    def __init__(self, bound: BoundLaunch) -> None:
        self._bound = bound

    def __call__(self, **options: Any) -> Operation[None]:
        return _noted(self._bound(**options))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bound, name)

    def __repr__(self) -> str:
        return repr(self._bound)


def _noted(operation: Operation[Any]) -> Operation[Any]:
    if (mine := _operations.get()) is not None:
        mine.append(operation)
    return operation


def load_app(target: str) -> App:
    """Import ``MODULE:APP`` and return the App.

    Raises
    ------
    UsageError
        There is no such module or attribute, or it is no App.
    """
    module_name, colon, attribute = target.partition(":")
    if not module_name or not colon or not attribute:
        raise UsageError(f"an app is named as MODULE:APP, not {target!r}")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # something that the module needs
        raise UsageError(f"there is no module {module_name!r} (looked for in {', '.join(sys.path)})") from None
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UsageError(f"{module_name!r} has no {attribute!r}")
        value = getattr(value, part)
    if not isinstance(value, App):
        raise UsageError(f"{target!r} is {value!r}, not an ao.App")
    if not value.endpoints:
        raise UsageError(f"{target!r} declares no endpoints")
    return value


async def result_of(
    endpoint: Endpoint,
    off: ServedOffload,
    shapes: Sequence[Sequence[int]],
    data: Sequence[Data],
    operations: list[Operation[Any]],
) -> tuple[list[tuple[int, ...]], list[Data]]:
    """Call a handler, as :meth:`Endpoint.call_with_data` does; what it submits is added to ``operations``.

    Raises what the handler raises, and the failure of an operation that it has not looked at.
    """
    _operations.set(operations)
    result = await endpoint.call_with_data(off, shapes, data)
    _raise_unseen(operations)
    return result


class Link(asyncio.Protocol):
    """The connection to the front. What comes before somebody receives it waits."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._decoder = frames.Decoder()
        self._early: list[tuple[dict[str, Any], memoryview]] = []
        self._receive: Callable[[dict[str, Any], memoryview], None] | None = None
        self._first: asyncio.Future[dict[str, Any] | None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for message, content in self._decoder.feed(data):
            if self._receive is not None:
                self._receive(message, content)
            elif not self._first.done():
                self._first.set_result(message)
            else:
                self._early.append((message, content))

    def connection_lost(self, error: Exception | None) -> None:
        self.closed.set()
        if not self._first.done():
            self._first.set_result(None)

    async def first(self) -> dict[str, Any] | None:
        """Return the first message; None if there never is one."""
        return await self._first

    def receive(self, receiver: Callable[[dict[str, Any], memoryview], None]) -> None:
        """Give what came after the first message, and all that comes from now on, to ``receiver``."""
        self._receive = receiver
        for message, content in self._early:
            receiver(message, content)
        self._early.clear()

    def send(self, message: dict[str, Any], data: Sequence[Data] = ()) -> None:
        """Send a frame, unless the front is gone."""
        if self._transport is not None and not self.closed.is_set():
            self._transport.writelines(frames.encode(message, data))

    async def close(self) -> None:
        """Send what is still to be sent, then close."""
        if self._transport is not None:
            self._transport.close()
            with suppress(TimeoutError):
                await asyncio.wait_for(self.closed.wait(), _FLUSH_S)


class DeviceProcess:
    """Answers calls until the front stops it or goes away, or the device is lost."""

    def __init__(self, link: Link, app: App, off: ServedOffload) -> None:
        self._link = link
        self._app = app
        self._off = off
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stopped = asyncio.Event()  # by the front: what was called is still answered
        self._beat_due = 0.0
        self._beat_handle: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        """Return the exit status."""
        await self._app.start(self._off)
        properties = self._off.properties
        self._link.send(
            {
                "kind": "ready",
                "app": self._app.name,
                "device": {"label": properties.label, "name": properties.name, "driver": properties.driver},
                "endpoints": [endpoint.declaration.as_message() for endpoint in self._app.endpoints.values()],
            }
        )
        self._beat()
        self._link.receive(self._on_message)
        try:
            await _first_of(self._stopped, self._off.lost, self._link.closed)
            if self._link.closed.is_set():
                for task in self._tasks.values():
                    task.cancel()
            if self._tasks and not self._off.lost.is_set():
                await self._finish_calls()
        finally:
            if self._beat_handle is not None:
                self._beat_handle.cancel()
        if self._off.lost.is_set():
            self._link.send({"kind": "lost", "text": str(self._off.loss)})
            return EXIT_LOST
        await self._app.stop(self._off)
        return 0

    async def _finish_calls(self) -> None:
        """Wait until every call has been answered, or the device is lost."""
        lost = asyncio.ensure_future(self._off.lost.wait())
        try:
            while self._tasks and not lost.done():
                await asyncio.wait((*self._tasks.values(), lost), return_when=asyncio.FIRST_COMPLETED)
        finally:
            lost.cancel()

    def _on_message(self, message: dict[str, Any], data: memoryview) -> None:
        kind = message["kind"]
        if kind == "call":
            number = message["call"]
            task = asyncio.get_running_loop().create_task(self._call(number, message, data))
            self._tasks[number] = task
            task.add_done_callback(lambda task: self._on_end(number, task))
        elif kind == "cancel":
            if (running := self._tasks.get(message["call"])) is not None:
                running.cancel()
        elif kind == "stop":
            self._stopped.set()

    def _on_end(self, number: int, task: asyncio.Task[None]) -> None:
        """A call is over. One that was cancelled before its first step could not answer by itself."""
        self._tasks.pop(number, None)
        if task.cancelled():
            answer = _CANCELLED
        elif (error := task.exception()) is not None:  # not of the handler, but in answering: a mistake of ours
            log.error("a call could not be answered", exc_info=error)
            answer = _UNANSWERED
        else:
            return
        if self._off.loss is None:
            self._link.send(answer | {"call": number, "handler_s": 0.0, "device_s": 0.0})

    async def _call(self, number: int, message: dict[str, Any], data: memoryview) -> None:
        """Answer one call with exactly one result or error, unless the device is lost."""
        operations: list[Operation[Any]] = []
        endpoint = self._app.endpoints[message["endpoint"]]
        follower = self._follow(number, operations) if message.get("progress") else None
        began = time.perf_counter()
        answer: tuple[dict[str, Any], Sequence[Data]]
        try:
            inputs = frames.cut(message, data)
            shapes, contents = await result_of(endpoint, self._off, message["shapes"], inputs, operations)
            answer = {"kind": "result", "shapes": shapes}, contents
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            asked = task is not None and task.cancelling()  # if not, the handler met the end of something else
            answer = dict(_CANCELLED) if asked else self._failure(endpoint, error), ()
        except (Exception, SystemExit) as error:  # whatever a handler raises is this call's end, not the process's
            answer = self._failure(endpoint, error), ()
        running = [operation for operation in operations if not operation.finished and self._off.loss is None]
        for operation in running:
            operation.add_done_callback(Operation.look)  # how they end is nobody's concern any more
        for operation in running:
            operation.cancel()
        if follower is not None:
            follower.cancel()
        if self._off.loss is not None:  # nothing that was computed since can be trusted
            return
        head, outputs = answer
        head |= {"call": number, "handler_s": time.perf_counter() - began, "device_s": _device_s(operations)}
        # The connection takes its time, and the handler's next call may write to what it returned.
        self._link.send(head, [bytes(one) for one in outputs])

    def _failure(self, endpoint: Endpoint, error: Exception | asyncio.CancelledError | SystemExit) -> dict[str, Any]:
        """Return what a client may know of a handler's exception; the log has the rest."""
        name = endpoint.declaration.name
        if isinstance(error, RequestError):
            return {"kind": "error", "status": 400, "text": _text(error)}
        if isinstance(error, OutOfMemoryError | WouldBlock):
            return {
                "kind": "error",
                "status": 503,
                "text": f"model {name!r} has no room on the device now: {_text(error)}",
            }
        if isinstance(error, OffloadTimeout):
            return {"kind": "error", "status": 504, "text": f"model {name!r} ran out of time: {_text(error)}"}
        if not isinstance(error, DeviceLostError):
            log.error("a handler failed", endpoint=name, exc_info=error)
        kind = type(error).__name__
        text = f"{kind}: {_text(error)}" if isinstance(error, OffloadError) else kind
        return {"kind": "error", "status": 500, "text": f"model {name!r} failed: {text}"}

    def _follow(self, number: int, operations: list[Operation[Any]]) -> asyncio.Task[None]:
        """Pass on what the kernels of a call say of their progress."""
        return asyncio.get_running_loop().create_task(self._tell_progress(number, operations))

    async def _tell_progress(self, number: int, operations: list[Operation[Any]]) -> None:
        last = (0, 0)
        while True:
            await asyncio.sleep(0.05)
            # The newest that has said anything: a handler may launch several, one after the other.
            said = [operation.owner.device_progress(operation) for operation in operations if operation.calling]
            now = next((one for one in reversed(said) if one != (0, 0)), last)
            if now != last:
                last = now
                self._link.send({"kind": "progress", "call": number, "done": now[0], "total": now[1]})

    # -- the pulse -------------------------------------------------------------------------

    def _beat(self) -> None:
        """Tell the front that the loop turns, how late it is, and what the Offload counts."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._off.loss is not None:
            return
        lag_s = max(0.0, now - self._beat_due) if self._beat_due else 0.0
        stats = self._off.stats()
        stats["lanes_busy"] = sum(1 for lane in self._off.lanes if lane.in_flight)
        self._link.send({"kind": "beat", "lag_s": lag_s, "calls": len(self._tasks), "stats": stats})
        self._beat_due = now + BEAT_S
        self._beat_handle = loop.call_later(BEAT_S, self._beat)


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _text(error: Exception) -> str:
    """Return what an exception says, as UTF-8 can have it: the name of a file, for one, may not be."""
    return str(error).encode(errors="backslashreplace").decode()


def _raise_unseen(operations: list[Operation[Any]]) -> None:
    """Raise the failure of a call's operation that its handler has not looked at: it may have read stale data."""
    for operation in operations:
        failure = operation.look() if operation.finished and not operation.looked else None
        cause = failure.root if isinstance(failure, DependencyError) else failure
        if failure is not None and not isinstance(cause, asyncio.CancelledError):  # which the handler itself asked for
            raise failure


def _device_s(operations: list[Operation[Any]]) -> float:
    """Return the seconds from the first submission of a call to its last completion."""
    done = [operation for operation in operations if operation.finished]
    if not done:
        return 0.0
    return (max(one.finished_ns for one in done) - min(one.submitted_ns for one in done)) / 1e9


async def serve(connection: socket.socket) -> int:
    """Serve the front at the other end of a socket; returns the exit status."""
    link = Link()
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connection)
    except OSError:
        return 0  # the front has gone already
    if (configuration := await link.first()) is None:
        return 0
    writer = configure_logs(configuration["log_format"], configuration["log_level"])
    bridge_logging()
    try:
        app = load_app(configuration["app"])
        off = ServedOffload(configuration["device"], **configuration["offload"])
        async with off:
            settle_collector()
            status = await DeviceProcess(link, app, off).run()
            if status == EXIT_LOST:
                await link.close()
                writer.close(_LOG_S)
                os._exit(status)  # nothing of a lost device can be given back, and the driver may hang in trying
    except Exception as error:  # the front is told what any of the program's own code raised, too
        link.send({"kind": "failed", "text": f"{type(error).__name__}: {_text(error)}"})
        if not isinstance(error, OffloadError):
            log.error("the program cannot be started", app=configuration["app"], exc_info=error)
        status = EXIT_FAILED
    await link.close()
    writer.close(_LOG_S)
    return status


def die_with_parent() -> None:
    """End this process when the front ends, however that ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def outlive_signals() -> None:
    """Leave the signals that end a worker to the front, though a process manager may send them to all processes.

    What the program starts has the usual handlers, be it forked or another program.
    """
    for number in _FRONTS_SIGNALS:
        signal.signal(number, lambda *_: None)  # and not SIG_IGN, which other programs would inherit
    os.register_at_fork(after_in_child=_restore_signals)


def _restore_signals() -> None:
    for number, handler in _FRONTS_SIGNALS.items():
        signal.signal(number, handler)


def main(arguments: list[str]) -> int:
    """Serve the front on an inherited socket, whose descriptor is the one argument."""
    die_with_parent()
    outlive_signals()
    connection = socket.socket(fileno=int(arguments[0]))
    connection.set_inheritable(False)  # the program's children have no part in the conversation
    return run(serve(connection))


def run(coroutine: Coroutine[Any, Any, int]) -> int:
    """Run a coroutine to its end on uvloop."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


if __name__ == "__main__":
    # The standard library's shutdown would join threads that may wait in the driver for ever.
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
