"""structlog's set-up, for the front and the device processes, and a writer that never blocks the loop."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import os
import select
import stat
import struct
import sys
import termios
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import orjson
import structlog

__all__ = ["LineWriter", "bridge_logging", "configure_logs", "log_request"]

_MOST_NBYTES: Final = 1 << 20
"""Of one write to what is no pipe."""


class LineWriter:
    """Writes lines on a thread of its own: whoever reads them may be slow.

    The thread is woken once for all lines of ``GATHER_S`` seconds, since waking it costs more than a line. Lines
    beyond ``MOST_WAITING`` are lost, and those that cannot be written; how many is written as soon as something can.
    Several processes may have the file: none writes in the middle of another's line, unless that is longer than a
    pipe keeps together.

    Parameters
    ----------
    file
        Where to; what it buffers itself is not used if it has a descriptor.
    notice
        Gives the line that says how many were lost.
    """

    MOST_WAITING: Final = 100_000
    GATHER_S: Final = 0.02

    def __init__(self, file: TextIO, notice: Callable[[int], str] = "{} lines of the log were lost".format) -> None:
        self._file = file
        self._notice = notice
        self._number: int | None = None
        with suppress(io.UnsupportedOperation):
            self._number = file.fileno()
        self._room = 0  # of a pipe
        if self._number is not None and stat.S_ISFIFO(os.fstat(self._number).st_mode):
            self._room = fcntl.fcntl(self._number, fcntl.F_GETPIPE_SZ)
        self._cut = False  # the last write ended in the middle of a line
        self._lines: deque[str] = deque()
        self._lost = 0
        self._woken = False
        self._closed = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aiooffload-log", daemon=True)
        self._thread.start()

    def write_line(self, line: str) -> None:
        """Take a line without its end; any thread."""
        if len(self._lines) >= self.MOST_WAITING:
            self._lost += 1
            return
        self._lines.append(line)
        if not self._woken:
            self._woken = True
            self._wake.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            self._wake.clear()
            self._closed.wait(self.GATHER_S)
            self._woken = False  # before the lines are taken: whoever comes later wakes again
            self._write()
        self._write()

    def _write(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        lost, self._lost = self._lost, 0
        for some in _portions(lines, self._most_nbytes):
            lost += 0 if self._put(some) else len(some)
        if lost and not self._put([self._notice(lost).encode()]):
            self._lost += lost

    def _most_nbytes(self) -> int:
        """How many bytes one write may have, so that a pipe keeps them together. Each gives up the interpreter once."""
        if self._room == 0:
            return _MOST_NBYTES
        assert self._number is not None  # a pipe has one
        try:
            queued = struct.unpack("i", fcntl.ioctl(self._number, termios.FIONREAD, bytes(4)))[0]
        except OSError:  # the write that follows finds out, and what it cannot write is counted
            return select.PIPE_BUF
        return select.PIPE_BUF if queued else self._room // 4  # of an empty one four processes have a part each

    def _put(self, lines: list[bytes]) -> bool:
        """Write lines; whether all of them were."""
        data = b"\n".join((*lines, b""))
        try:
            if self._number is None:
                self._file.write(data.decode())
                self._file.flush()
                return True
            if self._cut:
                data = b"\n" + data
            while data:
                data = data[os.write(self._number, data) :]
                self._cut = bool(data)
        except (OSError, ValueError):  # there may be room again, or a reader
            return False
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what was taken, for so many seconds at most; idempotent."""
        self._closed.set()
        self._wake.set()
        self._thread.join(timeout_s)


def _portions(lines: list[str], most_nbytes: Callable[[], int]) -> Iterator[list[bytes]]:
    """Cut lines into writes; ``most_nbytes`` is asked before each how large it may be."""
    some: list[bytes] = []
    nbytes, most = 0, most_nbytes() if lines else 0
    for line in lines:
        data = line.encode(errors="backslashreplace")
        if some and nbytes + len(data) + 1 > most:
            yield some
            some, nbytes, most = [], 0, most_nbytes()
        some.append(data)
        nbytes += len(data) + 1
    if some:
        yield some


class _Logger:
    """What structlog calls with a finished line."""

    def __init__(self, writer: LineWriter) -> None:
        self._writer = writer

    def msg(self, line: str) -> None:
        self._writer.write_line(line)

    log = debug = info = warn = warning = error = err = critical = exception = fatal = failure = msg


def configure_logs(format: str, level: str, file: TextIO | None = None) -> LineWriter:
    """Let structlog write lines of that format, from that level on, to standard error or ``file``.

    Raises
    ------
    KeyError
        There is no such format.
    """
    global _requests
    file = file or sys.stderr
    forms: dict[str, list[Any]] = {
        "json": [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)],
        "console": [structlog.dev.ConsoleRenderer(colors=file.isatty())],
    }
    ends = forms[format]
    writer = LineWriter(file, _json_notice) if format == "json" else LineWriter(file)
    least = getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *ends,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=lambda *_: _Logger(writer),
        cache_logger_on_first_use=True,
    )
    _requests = (writer if format == "json" else None, least <= logging.INFO)
    return writer


class _Bridge(logging.Handler):
    """Gives structlog what other libraries say to the standard library's logging."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger("aiooffload")
        log.log(record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info)


def bridge_logging(level: int = logging.WARNING) -> logging.Handler:
    """Let what is said to the standard library's logging come out as lines of the log, from that level on."""
    bridge = _Bridge(level)
    logging.getLogger().addHandler(bridge)
    return bridge


# Where the lines of requests go past structlog, None if nowhere; and whether they are written at all.
_requests: tuple[LineWriter | None, bool] = (None, True)


def log_request(fields: dict[str, Any]) -> None:
    """Write the line of one request, at level ``info``.

    As JSON it is made here, the same as structlog would make it: its chain of processors costs as much as all the
    rest of a request.
    """
    writer, wanted = _requests
    if not wanted:
        return
    if writer is None:
        structlog.get_logger("aiooffload").info("request", **fields)
        return
    fields["event"], fields["level"] = "request", "info"
    fields["timestamp"] = datetime.now(UTC)
    writer.write_line(orjson.dumps(fields, option=orjson.OPT_UTC_Z).decode())


def _json_notice(lost: int) -> str:
    fields = {"event": "lines of the log were lost", "lines": lost, "level": "warning", "timestamp": datetime.now(UTC)}
    return orjson.dumps(fields, option=orjson.OPT_UTC_Z).decode()


def _to_json(event: Any, **_: Any) -> str:
    try:
        return orjson.dumps(event, default=str).decode()
    except TypeError:  # a text that is no UTF-8, such as a file's name in an exception
        return json.dumps(event, default=str)
