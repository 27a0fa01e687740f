"""structlog's set-up, for the front and the device processes, and a writer that never blocks the loop."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from typing import Any, Final, TextIO

import orjson
import structlog

__all__ = ["FORMATS", "LEVELS", "LineWriter", "configure_logs"]

FORMATS: Final = ("json", "console")
LEVELS: Final = ("debug", "info", "warning", "error")


class LineWriter:
    """Writes lines on a thread of its own: whoever reads them may be slow.

    Lines beyond ``MOST_WAITING`` are dropped, and their number is written when there is room again.
    """

    MOST_WAITING: Final = 100_000

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._dropped = 0
        self._thread = threading.Thread(target=self._write, name="aiooffload-log", daemon=True)
        self._thread.start()

    def write_line(self, line: str) -> None:
        """Take a line without its end; any thread."""
        if self._lines.qsize() < self.MOST_WAITING:
            self._lines.put(line)
        else:
            self._dropped += 1

    def _write(self) -> None:
        going = True
        while going:
            batch = [self._lines.get()]
            while self._lines.qsize():
                batch.append(self._lines.get())
            going = None not in batch
            dropped, self._dropped = self._dropped, 0
            text = "".join(f"{line}\n" for line in batch if line is not None)
            if dropped:
                text += f"{dropped} lines of the log were dropped: they are read too slowly\n"
            try:
                self._file.write(text)
                self._file.flush()
            except (OSError, ValueError):
                return  # nobody reads any more

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what was taken, for so many seconds at most; idempotent."""
        self._lines.put(None)
        self._thread.join(timeout_s)


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
    writer = LineWriter(file or sys.stderr)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    ends = {
        "json": lambda: [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_to_json)],
        "console": lambda: [structlog.dev.ConsoleRenderer(colors=writer._file.isatty())],
    }
    structlog.configure(
        processors=[*shared, *ends[format]()],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=lambda *_: _Logger(writer),
        cache_logger_on_first_use=True,
    )
    return writer


def _to_json(event: Any, **_: Any) -> str:
    return orjson.dumps(event, default=str).decode()
