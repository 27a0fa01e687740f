"""What a program holds of a trace: ``async with off.trace(path)``."""

from __future__ import annotations

import asyncio
import os
from json import dumps
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from aiooffload.engine.host_functions import check_outside
from aiooffload.engine.tracing import Tracer
from aiooffload.errors import UsageError
from aiooffload.log import log
from aiooffload.rules.timeline import events

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiooffload.engine.engine import Engine

__all__ = ["Trace"]


class Trace:
    """Records what is submitted inside ``async with``; made by ``off.trace``.

    Attributes
    ----------
    path
        The file, complete once the block was left.
    """

    def __init__(self, path: str | os.PathLike[str], timeout_s: float, open_engine: Callable[[], Engine]) -> None:
        if not isinstance(timeout_s, int | float) or not timeout_s >= 0:
            raise UsageError(f"timeout_s is a number of seconds, at least 0, not {timeout_s!r}")
        self.path = os.fspath(path)
        self._timeout_s = timeout_s
        self._open_engine = open_engine
        self._engine: Engine | None = None
        self._tracer: Tracer | None = None
        self._file: IO[str] | None = None

    async def __aenter__(self) -> Trace:
        engine = self._open_engine()
        engine.check_open()
        check_outside("leaving a trace")
        if self._engine is not None:
            raise UsageError("this trace was entered already: call off.trace for another one")
        if engine.tracing:
            raise UsageError("there is a trace already, and an Offload has one at a time")
        self._engine, engine.tracing = engine, True
        tracer = Tracer(engine.loop, engine.device, engine.idle_stream, engine.lanes, engine.lose)
        try:
            self._file = await _opened(engine.aside(_open, self.path))
            await tracer.begin()
            engine.check_open()
        except BaseException:
            engine.tracing = False
            tracer.end()
            if self._file is not None:
                await asyncio.shield(engine.aside(self._file.close))
            raise
        self._tracer = tracer
        engine.record(tracer)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        engine, tracer = self._engine, self._tracer
        assert engine is not None
        assert tracer is not None
        complete = False
        try:
            complete = await tracer.settle(self._timeout_s)
            if not complete:
                log.warning("a trace ends before what it recorded", seconds=self._timeout_s, path=self.path)
        finally:
            engine.record(None)
            tracer.end()
            engine.tracing = False
            await asyncio.shield(engine.aside(self._write, engine.device.properties.label, tracer, complete))

    def _write(self, device: str, tracer: Tracer, complete: bool) -> None:
        """Write everything, on a thread of its own; piece by piece, so that the loop gets its turns in between."""
        assert self._file is not None
        about = {
            "device": device,
            "operations": len(tracer.operations),
            "complete": complete,
            "clock_uncertainty_us": tracer.uncertainty_ns / 1000,
        }
        with self._file as file:
            file.write(f'{{"displayTimeUnit": "ns",\n"otherData": {dumps(about)},\n"traceEvents": [\n')
            before = ""
            for event in events(tracer.operations, tracer.calls, device, tracer.began_ns, tracer.ended_ns):
                file.write(before + dumps(event, separators=(",", ":")))
                before = ",\n"
            file.write("\n]}\n")

    def __repr__(self) -> str:
        return f"<aiooffload trace into {self.path}>"


async def _opened(opening: asyncio.Future[IO[str]]) -> IO[str]:
    """Wait for a file; if nobody does any more, it is closed again."""
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda done: done.exception() or done.result().close())
        raise


def _open(path: Any) -> IO[str]:
    return open(path, "w", encoding="utf-8")
