"""The device process's own part, without a process: handlers, their operations, start and stop.

What a loss does is in ``test_supervisor.py``: an Offload that is lost leaves threads behind, as it must.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.service import app as module
from aiooffload.service.app import RequestError
from aiooffload.service.device import DeviceProcess, Link, ServedOffload, load_app
from aiooffload.service.frames import encode
from aiooffload.service.tensors import Datatype, pack_bytes
from tests.service import sample_app


class Front(Link):
    """The other end of the connection, with what was sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, Any]] = []
        self.news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()

    def send(self, message: dict[str, Any], data: Sequence[Any] = ()) -> None:
        if message["kind"] == "beat":
            return
        self.sent.append(message | {"data": [bytes(one) for one in data]})
        task = asyncio.create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self.news:
            self.news.notify_all()

    async def heard(self, kind: str, **values: Any) -> dict[str, Any]:
        """Wait for a message and return it."""

        def found() -> dict[str, Any] | None:
            return next((one for one in self.sent if one["kind"] == kind and one.items() >= values.items()), None)

        async with self.news, asyncio.timeout(10):
            await self.news.wait_for(found)
        message = found()
        assert message is not None
        return message

    def call(self, number: int, endpoint: str, value: int = 0, **more: Any) -> None:
        data = np.array([value], np.int32).tobytes()
        message = {"kind": "call", "call": number, "endpoint": endpoint, "shapes": [[1]], "sizes": [len(data)]} | more
        assert self._receive is not None
        self._receive(message, memoryview(data))

    def say(self, kind: str, **values: Any) -> None:
        assert self._receive is not None
        self._receive({"kind": kind, **values}, memoryview(b""))


@contextlib.asynccontextmanager
async def device_of(app: ao.App = sample_app.app) -> AsyncIterator[tuple[Front, asyncio.Task[int]]]:
    """A device process on the test's loop, ready; the task gives its exit status."""
    sample_app.states.clear()
    front = Front()
    async with ServedOffload("host", lanes=2) as off:
        running = asyncio.create_task(DeviceProcess(front, app, off).run())
        await front.heard("ready")
        try:
            yield front, running
        finally:
            front.say("stop")
            async with asyncio.timeout(10):
                await running
            await asyncio.gather(*front._tasks)


async def test_call_is_answered() -> None:
    """A call gets its result with the time of its handler and of its operations."""
    async with device_of() as (front, _):
        front.call(1, "double", shapes=[[1]])  # the bytes of an integer 0 are those of 0.0
        answer = await front.heard("result", call=1)
        assert (answer["shapes"], answer["data"]) == ([(1,)], [bytes(4)])
        assert answer["handler_s"] >= answer["device_s"] > 0


async def test_stop_lets_calls_finish() -> None:
    """After ``stop`` what was called is still answered, and the program's stop hooks run last."""
    order = []
    app = ao.App()
    app.endpoints.update(sample_app.app.endpoints)
    app.host_functions.extend(sample_app.app.host_functions)
    app.on_start(sample_app.prepare)

    @app.on_stop
    async def last(off: ao.Offload) -> None:
        order.append("second declared runs last")

    @app.on_stop
    async def first(off: ao.Offload) -> None:
        order.append(f"{len(front.sent)} messages sent")

    async with device_of(app) as (front, running):
        front.call(1, "gate")
        front.call(2, "wait_inside", 1)
        await front.heard("result", call=2)
        front.say("stop")
        sample_app.states[0].gate.set()
        assert await running == 0
        assert [one["kind"] for one in front.sent] == ["ready", "result", "result"]
        assert order == ["3 messages sent", "second declared runs last"]


async def test_cancelled_call_ends_its_operations() -> None:
    """Cancelling a call cancels the kernels that it launched, and it is answered all the same."""
    async with device_of() as (front, _):
        front.call(1, "gate_in_kernel")
        front.call(2, "wait_inside", 1)
        await front.heard("result", call=2)
        front.say("cancel", call=1)
        front.say("cancel", call=77)  # one that is over
        assert (await front.heard("error", call=1))["status"] == 499
        front.call(3, "wait_cancelled", 1)
        await front.heard("result", call=3)
        assert sample_app.states[0].kernels_cancelled == 1


async def test_bound_launch_belongs_to_the_call_that_makes_it() -> None:
    """Cancelling a call cancels what it launched through a binding that was made at the start."""
    app, bound, launched = ao.App(), [], asyncio.Queue[ao.Operation[None]]()

    @app.on_start
    async def bind(off: ao.Offload) -> None:
        await off.load(sample_app.scale)
        y = off.zeros(4, np.float32)
        bound.append(off.bind(sample_app.scale, grid=1, block=4, args=(y, 2.0, 4)))
        assert bound[0].arguments == (y, 2.0, 4)

    @app.endpoint("launch", inputs=sample_app.NUMBER, outputs=sample_app.COUNT)
    async def launch(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        launched.put_nowait(bound[0](a=3.0, after=[asyncio.Event().wait()]))
        await asyncio.Event().wait()
        return sample_app.count(0)

    async with device_of(app) as (front, _):
        front.call(1, "launch")
        operation = await launched.get()
        assert not operation.done()
        front.say("cancel", call=1)
        await front.heard("error", call=1)
        with pytest.raises(asyncio.CancelledError):
            await operation


MANY = 70_000


@pytest.mark.parametrize("step", ["array_of", "data_of"])
async def test_large_bytes_do_not_hold_up_the_loop(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While many elements of BYTES are converted, other calls are answered; what the handler returned stays as it was.

    Its next call may write to the arrays.
    """
    real, begun, go_on = getattr(module, step), threading.Event(), threading.Event()

    def slow(datatype: Datatype, *arguments: Any) -> Any:
        if not datatype.nbytes:
            begun.set()
            assert go_on.wait(10)
        return real(datatype, *arguments)

    app, scratch = ao.App(), np.array([1], np.int32)

    @app.endpoint("texts", inputs={"x": (bytes, (-1,))}, outputs={**sample_app.COUNT, "y": (bytes, (-1,))})
    async def texts(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {"y": x, "count": scratch}

    @app.endpoint("number", inputs=sample_app.NUMBER, outputs=sample_app.COUNT)
    async def number(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {"count": x}

    monkeypatch.setattr(module, step, slow)
    data = pack_bytes([b"x"] * MANY)
    async with device_of(app) as (front, _):
        assert front._receive is not None
        message = {"kind": "call", "call": 1, "endpoint": "texts", "shapes": [[MANY]], "sizes": [len(data)]}
        front._receive(message, memoryview(data))
        await asyncio.to_thread(begun.wait, 10)
        front.call(2, "number", 7)
        await front.heard("result", call=2)
        if step == "data_of":
            scratch[:] = 2
        go_on.set()
        answer = await front.heard("result", call=1)
        assert answer["shapes"] == [(1,), (MANY,)]
        assert answer["data"] == [np.int32(1).tobytes(), data]


@pytest.mark.parametrize("handled", [False, True])
async def test_failure_that_the_handler_did_not_see(handled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A result from behind a launch that failed is no answer, unless the handler knows of the failure."""
    monkeypatch.setattr("aiooffload.service.device.log", Mock())
    app = ao.App()

    @ao.kernel
    def fails(launch: Any, y: ao.Out[np.int32]) -> None:
        raise LookupError("not in the table")

    @app.endpoint("lookup", inputs=sample_app.NUMBER, outputs=sample_app.COUNT)
    async def lookup(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        y = await off.put(x)
        launched = off.launch(fails, grid=1, block=1, args=(y,))
        other = off.zeros(1, np.int32)
        off.launch(fails, grid=1, block=1, args=(other,), after=[asyncio.Event().wait()])  # ends with the call
        given_up = off.launch(fails, grid=1, block=1, args=(other,))
        given_up.cancel()
        off.launch(fails, grid=1, block=1, args=(other,), after=[given_up])
        found = await off.get(y)
        if handled:
            with pytest.raises(ao.LaunchError):
                await launched
        return {"count": found}

    async with device_of(app) as (front, _):
        front.call(1, "lookup", 7)
        if handled:
            assert (await front.heard("result", call=1))["data"] == [np.int32(7).tobytes()]
            return
        answer = await front.heard("error", call=1)
        assert answer["status"] == 500
        assert "LaunchError: kernel fails raised LookupError" in answer["text"]


async def test_call_that_is_cancelled_before_it_began() -> None:
    """A call and its end that arrive together, as from a client that goes away at once, have an answer, too."""
    async with device_of() as (front, _):
        front.call(1, "gate")
        front.say("cancel", call=1)
        assert (await front.heard("error", call=1))["status"] == 499
        front.call(2, "open_gate")
        assert (await front.heard("result", call=2))["data"] == [bytes(4)]  # nobody was ever inside


class Unspeakable(Exception):
    """It cannot even be shown."""

    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (FileNotFoundError(2, "no such file", os.fsdecode(b"x\xff")), 500, "model 'raise' failed: FileNotFoundError"),
        (RequestError(os.fsdecode(b"x\xff")), 400, r"x\udcff"),
        (Unspeakable(), 500, "model 'raise' failed: Unspeakable"),
        (type("Both", (RequestError, Unspeakable), {"__str__": Unspeakable.__str__})(), 500, "its log says how"),
    ],
    ids=["name of a file", "text", "none", "none for the client"],
)
async def test_exception_whose_text_is_none(
    error: Exception, status: int, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is answered whatever its exception says."""
    monkeypatch.setattr("aiooffload.service.device.log", Mock())
    app = ao.App()

    @app.endpoint("raise", inputs=sample_app.NUMBER, outputs=sample_app.COUNT)
    async def handler(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        raise error

    async with device_of(app) as (front, _):
        front.call(1, "raise")
        answer = await front.heard("error", call=1)
        assert answer["status"] == status
        assert text in answer["text"]
        encode({"text": answer["text"]})


async def test_handler_that_cancels_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CancelledError that nobody asked for, as of an operation that something else cancelled, is a failure."""
    monkeypatch.setattr("aiooffload.service.device.log", Mock())
    app = ao.App()

    @app.endpoint("cancelled", inputs=sample_app.NUMBER, outputs=sample_app.COUNT)
    async def handler(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        raise asyncio.CancelledError

    async with device_of(app) as (front, _):
        front.call(1, "cancelled")
        answer = await front.heard("error", call=1)
        assert (answer["status"], answer["text"]) == (500, "model 'cancelled' failed: CancelledError")


async def test_handler_that_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler's SystemExit is its own failure, in the log as any, and the end of nothing else."""
    monkeypatch.setattr("aiooffload.service.device.log", log := Mock())
    app = ao.App()

    @app.endpoint("exit", inputs=sample_app.NUMBER, outputs=sample_app.COUNT)
    async def handler(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        sys.exit(int(x[0]))

    async with device_of(app) as (front, _):
        front.call(1, "exit", 7)
        answer = await front.heard("error", call=1)
        assert (answer["status"], answer["text"]) == (500, "model 'exit' failed: SystemExit")
        assert isinstance(log.error.call_args.kwargs["exc_info"], SystemExit)


async def test_progress_of_a_kernel() -> None:
    """A call that asks for it hears what its kernel says."""
    async with device_of() as (front, _):
        front.call(1, "gate_in_kernel", progress=True)
        said = await front.heard("progress", call=1)
        assert (said["done"], said["total"]) == (1, 3)
        sample_app.states[0].gate.set()
        await front.heard("result", call=1)


async def test_front_that_goes_away_ends_everything() -> None:
    """When the connection ends, so do the calls, and the process."""
    async with device_of() as (front, running):
        front.call(1, "gate")
        front.call(2, "wait_inside", 1)
        await front.heard("result", call=2)
        front.connection_lost(None)
        assert await running == 0
        assert sample_app.states[0].cancelled == 1


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("tests.service.nothing:app", "there is no module"),
        ("nothing_at_all.x:app", "there is no module"),
        ("tests.service.sample_app:nothing", "has no 'nothing'"),
        ("tests.service.sample_app:VECTOR", r"not an ao\.App"),
        ("nonsense", "MODULE:APP"),
        (":app", "MODULE:APP"),
        ("tests.service.broken_app:empty", "no endpoints"),
    ],
)
def test_apps_that_cannot_be_loaded(target: str, text: str) -> None:
    """What is wrong with the name of a program is said."""
    with pytest.raises(ao.UsageError, match=text):
        load_app(target)


def test_app_is_loaded() -> None:
    """A program is found by module and attribute, which may be nested."""
    assert load_app("tests.service.sample_app:app") is sample_app.app
    assert load_app("tests.service:sample_app.app") is sample_app.app
