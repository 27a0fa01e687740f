"""Lines of the log, and a writer that holds nobody up."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import logging
import os
import re
import select
import threading
from collections.abc import Iterator

import pytest
import structlog

from aiooffload.service.logs import LineWriter, bridge_logging, configure_logs, log_request


@pytest.fixture(autouse=True)
def _unconfigured() -> Iterator[None]:
    """What structlog was told is forgotten again."""
    yield
    structlog.reset_defaults()


def test_json_lines() -> None:
    """A line is one JSON object with level and time; less severe ones are left out."""
    file = io.StringIO()
    writer = configure_logs("json", "info", file)
    log = structlog.get_logger("x")
    log.debug("left out")
    log.info("event", number=1, odd=object)
    try:
        raise ValueError("inside")
    except ValueError as error:
        log.error("failed", exc_info=error)
    writer.close()
    first, second = map(json.loads, file.getvalue().splitlines())
    assert first.items() >= {"event": "event", "number": 1, "level": "info", "odd": "<class 'object'>"}.items()
    assert first["timestamp"].endswith("Z")
    assert "ValueError: inside" in second["exception"]


def test_text_that_is_no_utf8() -> None:
    """A line is written, as JSON, whatever it says: the name of a file, for one, may be no text."""
    file = io.StringIO()
    writer = configure_logs("json", "info", file)
    structlog.get_logger("aiooffload").error("bad", path=os.fsdecode(b"x\xff"))
    writer.close()
    assert json.loads(file.getvalue())["path"] == os.fsdecode(b"x\xff")


def test_console_lines() -> None:
    """For people a line is text, without colours where there is no terminal."""
    file = io.StringIO()
    writer = configure_logs("console", "warning", file)
    structlog.get_logger("x").warning("event", number=1)
    writer.close()
    assert "event" in file.getvalue()
    assert "number=1" in file.getvalue()
    assert "\x1b" not in file.getvalue()


def test_unknown_format() -> None:
    """There are two formats."""
    with pytest.raises(KeyError):
        configure_logs("xml", "info", io.StringIO()).close()


def test_standard_logging_comes_out_as_lines() -> None:
    """What other libraries log is a line like any other, with the exception."""
    file = io.StringIO()
    writer = configure_logs("json", "info", file)
    bridge = bridge_logging()
    try:
        logging.getLogger("some.library").info("left out")
        try:
            raise ValueError("inside")
        except ValueError:
            logging.getLogger("some.library").exception("failed %d times", 3)
    finally:
        logging.getLogger().removeHandler(bridge)
    writer.close()
    [line] = map(json.loads, file.getvalue().splitlines())
    assert line.items() >= {"event": "failed 3 times", "level": "error", "logger": "some.library"}.items()
    assert "ValueError: inside" in line["exception"]


def test_request_lines_are_like_the_others() -> None:
    """A request's line has the same form in both formats, and is left out where its level is."""
    for format, level in (("json", "info"), ("console", "info"), ("json", "warning")):
        file = io.StringIO()
        writer = configure_logs(format, level, file)
        log_request({"id": "seven", "duration_ms": 1.5})
        structlog.get_logger("x").info("request", id="seven", duration_ms=1.5)
        writer.close()
        lines = file.getvalue().splitlines()
        if level == "warning":
            assert lines == []
        elif format == "console":
            assert [line.partition("Z")[2] for line in lines[1:]] == [lines[0].partition("Z")[2]]
        else:
            made, usual = map(json.loads, lines)
            assert made.keys() == usual.keys()
            assert re.sub(r"\d", "0", made["timestamp"]) == re.sub(r"\d", "0", usual["timestamp"])


class Slow(io.StringIO):
    """A file whose reader takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        self.entered.set()
        self.go_on.wait(10)
        return super().write(text)


def test_slow_reader_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines are taken at once while the reader is slow; those that are too many are counted, not kept."""
    monkeypatch.setattr(LineWriter, "MOST_WAITING", 3)
    file = Slow()
    writer = LineWriter(file)
    writer.write_line("first")
    assert file.entered.wait(10)
    for number in range(5):
        writer.write_line(str(number))
    file.go_on.set()
    writer.close()
    lines = file.getvalue().splitlines()
    assert lines == ["first", "0", "1", "2", "2 lines of the log were lost"]


class Full(io.StringIO):
    """A file that has no room at first."""

    def __init__(self) -> None:
        super().__init__()
        self.refused = threading.Event()
        self.room = threading.Event()

    def write(self, text: str) -> int:
        if not self.room.is_set():
            self.refused.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_write_that_fails() -> None:
    """What cannot be written is counted, and what comes later is written when it can be."""
    file = Full()
    writer = LineWriter(file)
    writer.write_line("first")
    assert file.refused.wait(10)
    file.room.set()
    writer.write_line("second")
    writer.close()
    assert file.getvalue().splitlines() == ["second", "1 lines of the log were lost"]


def test_loss_is_told_in_the_same_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads JSON reads of lost lines in JSON."""
    monkeypatch.setattr(LineWriter, "MOST_WAITING", 1)
    file = Slow()
    writer = configure_logs("json", "info", file)
    log = structlog.get_logger("x")
    log.info("first")
    assert file.entered.wait(10)
    for _ in range(3):
        log.info("next")
    file.go_on.set()
    writer.close()
    *_, last = map(json.loads, file.getvalue().splitlines())
    assert last.items() >= {"event": "lines of the log were lost", "lines": 2, "level": "warning"}.items()
    assert last["timestamp"].endswith("Z")


def test_lines_are_written_whole() -> None:
    """No write ends within a line, or is larger than what a pipe keeps together while the reader is behind."""
    read, write = os.pipe2(os.O_DIRECT)  # each read gives what one write gave
    os.write(write, b"not read yet")
    with os.fdopen(write, "w") as file:
        writer = LineWriter(file)
        lines = [str(number) * 50 for number in range(200)]
        for line in lines:
            writer.write_line(line)
        writer.close()
    assert os.read(read, 100) == b"not read yet"
    writes = []
    while some := os.read(read, 1 << 16):
        writes.append(some)
    os.close(read)
    assert b"".join(writes).decode().splitlines() == lines
    assert all(some.endswith(b"\n") and len(some) <= select.PIPE_BUF for some in writes)


def test_writes_to_a_reader_that_keeps_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write is as large as an empty pipe keeps together, with room for three others: each costs something."""
    read, write = os.pipe()
    put, sizes = os.write, []

    def noted(number: int, data: bytes) -> int:
        sizes.append(len(data))
        return put(number, data)

    most = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) // 4
    monkeypatch.setattr(os, "write", noted)
    with os.fdopen(write, "w") as file:
        writer = LineWriter(file)
        writer.write_line("x" * (most - 1001))
        writer.write_line("y" * 999)
        writer.close()
    assert sizes == [most]
    os.close(read)


def test_line_that_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written behind a line that only began is a line of its own."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    room = fcntl.fcntl(write, fcntl.F_GETPIPE_SZ)
    put, refused = os.write, threading.Event()

    def noted(number: int, data: bytes) -> int:
        try:
            return put(number, data)
        except BlockingIOError:
            refused.set()
            raise

    monkeypatch.setattr(os, "write", noted)
    with os.fdopen(write, "w") as file:
        writer = LineWriter(file)
        writer.write_line("x" * (room + 1))  # a pipe takes what it has room for
        assert refused.wait(10)
        assert os.read(read, room) == b"x" * room
        writer.write_line("next")
        writer.close()
    text = os.read(read, room)
    assert text.startswith(b"\n")
    assert sorted(text.split()) == sorted(b"next 1 lines of the log were lost".split())
    assert text.count(b"\n") == 3
    os.close(read)


def test_file_that_was_closed() -> None:
    """The thread goes on, and says nothing of its own."""
    read, write = os.pipe()
    file = os.fdopen(write, "w")
    writer = LineWriter(file)
    file.close()
    writer.write_line("line")
    writer.close()
    assert os.read(read, 100) == b""
    assert writer._lost == 1
    os.close(read)


def test_reader_that_is_gone() -> None:
    """A closed pipe ends nothing else."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as file:
        writer = LineWriter(file)
        writer.write_line("line")
        writer.close()
        writer.close()
