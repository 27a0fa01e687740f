"""A file that a kernel asks for chunk by chunk: every byte is counted, and reading may fail."""

from __future__ import annotations

import asyncio
import errno
import json
import threading
from collections.abc import AsyncIterator
from io import FileIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload.examples import stream as stream_module
from aiooffload.examples.stream import Summary, stream, summarize

CHUNK = 4096

RANDOM = np.random.default_rng(7)
CONTENTS = {
    "empty": b"",
    "one byte": b"\xff",
    "less than a chunk": b"one\ntwo\n\nthree",
    "one chunk": RANDOM.bytes(CHUNK),
    "chunks exactly": RANDOM.bytes(4 * CHUNK),
    "and a byte": RANDOM.bytes(4 * CHUNK) + b"\n",
    "less a byte": RANDOM.bytes(3 * CHUNK - 1),
    "all the same": b"\0" * (2 * CHUNK + 17),
    "many chunks": RANDOM.bytes(100 * CHUNK + 1000),
}


@pytest.fixture(params=CONTENTS)
def file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bytes]:
    path = tmp_path / request.param
    path.write_bytes(CONTENTS[request.param])
    return path, CONTENTS[request.param]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENTS["many chunks"])
    return path


@pytest.fixture
async def off(device_label: str) -> AsyncIterator[ao.Offload]:
    async with ao.Offload(device_label, lanes=2) as off:
        yield off


def checksum(content: bytes) -> int:
    return sum(position * byte for position, byte in enumerate(content, 1)) % 2**64


def check(summary: Summary, content: bytes) -> None:
    assert summary.histogram.tolist() == np.bincount(np.frombuffer(content, np.uint8), minlength=256).tolist()
    assert summary.checksum == checksum(content)
    assert (summary.nbytes, summary.lines) == (len(content), content.count(b"\n"))


# What comes out.


async def test_every_byte_is_counted(off: ao.Offload, file: tuple[Path, bytes]) -> None:
    """Whatever the size of the file, the summary is NumPy's, and there are as many chunks as it takes."""
    path, content = file
    summary = await stream(off, path, chunk_bytes=CHUNK)
    check(summary, content)
    assert summary.chunks == -(-len(content) // CHUNK)


@pytest.mark.parametrize("chunk_bytes", [1000, 1001, 2**20])
async def test_any_size_of_a_chunk(off: ao.Offload, path: Path, chunk_bytes: int) -> None:
    """A chunk may have any size, also more than the file."""
    check(await stream(off, path, chunk_bytes=chunk_bytes), CONTENTS["many chunks"])


async def test_a_byte_at_a_time(off: ao.Offload, tmp_path: Path) -> None:
    """The smallest chunk works as well."""
    path = tmp_path / "file"
    await asyncio.to_thread(path.write_bytes, b"ab\n" * 10)
    summary = await stream(off, path, chunk_bytes=1)
    check(summary, b"ab\n" * 10)
    assert summary.chunks == 30


async def test_files_at_once(off: ao.Offload, tmp_path: Path) -> None:
    """Each launch gets the chunks of its own file."""
    for name, content in CONTENTS.items():
        await asyncio.to_thread((tmp_path / name).write_bytes, content)
    streams = (stream(off, tmp_path / name, chunk_bytes=CHUNK) for name in CONTENTS)
    for summary, content in zip(await asyncio.gather(*streams), CONTENTS.values(), strict=True):
        check(summary, content)


async def test_progress_comes_from_the_device(off: ao.Offload, path: Path) -> None:
    """What is told grows, and ends with the size of the file."""
    told: list[tuple[int, int]] = []
    await stream(off, path, chunk_bytes=CHUNK, progress=lambda done, total: told.append((done, total)))
    size = len(CONTENTS["many chunks"])
    assert told == sorted(set(told))
    assert told[-1] == (size, size)


class Lending:
    """A launch that serves ``next_chunk`` itself, and keeps the order of what it is asked."""

    def __init__(self, content: bytes) -> None:
        self.events: list[str] = []
        self._content = content
        self._done = 0

    def from_(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return array

    def call_async(self, function: str, chunk: np.ndarray[Any, Any]) -> Lending:
        self.events.append("ask")
        self._chunk = chunk
        return self

    def wait(self) -> int:
        part = self._content[self._done : self._done + self._chunk.size]
        self._chunk[: len(part)] = np.frombuffer(part, np.uint8)
        self._done += len(part)
        return len(part)

    def progress(self, done: int, total: int) -> None:
        self.events.append("done")


def run_here(launch: Lending, capacity: int) -> tuple[np.ndarray[Any, Any], int]:
    histogram, total = np.zeros(256, np.uint64), np.zeros(1, np.uint64)
    assert summarize.host_function is not None
    summarize.host_function(launch, np.zeros(2 * capacity, np.uint8), np.int64(capacity), 0, histogram, total)
    return histogram, int(total[0])


def test_asks_ahead() -> None:
    """The kernel asks for a chunk before it starts on the one it has."""
    launch = Lending(b"abcd")
    run_here(launch, 2)
    assert launch.events == ["ask", "ask", "done", "ask", "done"]


@given(content=st.binary(max_size=200), capacity=st.integers(1, 50))
def test_chunks_count_as_the_whole(content: bytes, capacity: int) -> None:
    """However a file is cut, the host kernel computes what plain Python computes in one piece."""
    histogram, total = run_here(Lending(content), capacity)
    assert histogram.tolist() == [content.count(byte) for byte in range(256)]
    assert total == checksum(content)


# What goes wrong.


class Special(FileIO):
    """A file of which the third read is special."""

    reads = 0

    def readinto(self, buffer: Any, /) -> int:
        self.reads += 1
        if self.reads == 3:
            self.special()
        return super().readinto(buffer)

    def special(self) -> None:
        raise OSError(errno.EIO, "Input/output error")


async def test_read_error_in_the_middle(off: ao.Offload, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch ends with the OSError as the cause; the next one is right again."""
    with monkeypatch.context() as patch:
        patch.setattr(stream_module, "FileIO", Special)
        with pytest.raises(ao.HostFunctionError, match="'next_chunk', called by kernel summarize, failed") as caught:
            await stream(off, path, chunk_bytes=CHUNK)
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EIO
    check(await stream(off, path, chunk_bytes=CHUNK), CONTENTS["many chunks"])


async def test_read_error_of_the_system(off: ao.Offload) -> None:
    """A file that the system opens but cannot read: its own error is the cause."""
    with pytest.raises(ao.HostFunctionError) as caught:
        await stream(off, Path("/proc/self/mem"))
    assert isinstance(caught.value.__cause__, OSError)


async def test_file_removed_in_the_middle(off: ao.Offload, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open file that is removed is read to its end all the same."""

    class Removed(Special):
        def special(self) -> None:
            path.unlink()

    monkeypatch.setattr(stream_module, "FileIO", Removed)
    check(await stream(off, path, chunk_bytes=CHUNK), CONTENTS["many chunks"])
    assert not await asyncio.to_thread(path.exists)


async def test_file_cut_off_in_the_middle(off: ao.Offload, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no longer there is not counted, and nothing hangs."""

    class Cut(Special):
        def special(self) -> None:
            with path.open("r+b") as file:
                file.truncate(2 * CHUNK)

    monkeypatch.setattr(stream_module, "FileIO", Cut)
    check(await stream(off, path, chunk_bytes=CHUNK), CONTENTS["many chunks"][: 2 * CHUNK])


async def test_what_cannot_be_opened(off: ao.Offload, tmp_path: Path) -> None:
    """A missing file, a folder and a chunk of no size are refused before anything is launched."""
    with pytest.raises(FileNotFoundError):
        await stream(off, tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        await stream(off, tmp_path)
    with pytest.raises(ValueError, match="at least 1"):
        await stream(off, tmp_path, chunk_bytes=0)


async def test_cancelling_in_the_middle(off: ao.Offload, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call ends once the read under way has, and not before: the file stays open as long."""
    reading, go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    class Slow(Special):
        def special(self) -> None:
            loop.call_soon_threadsafe(reading.set)
            assert go_on.wait(10)
            assert not self.closed

    with monkeypatch.context() as patch:
        patch.setattr(stream_module, "FileIO", Slow)
        task = asyncio.create_task(stream(off, path, chunk_bytes=CHUNK))
        await reading.wait()
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    check(await stream(off, path, chunk_bytes=CHUNK), CONTENTS["many chunks"])


# The demo around it.


prints = pytest.mark.allows_blocking("the demo prints from the loop's thread")


@prints
def test_demo_ends_well(demo: ModuleType, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how far it is and what it found; the last line sums up and the exit code is 0."""
    content = CONTENTS["many chunks"]
    assert demo.main(["stream", str(path), "--device", "host", "--chunk-kib", "4"]) == 0
    first, *progress, found, last = capsys.readouterr().out.splitlines()
    assert first == f"streaming {path} through host, 4 KiB at a time"
    assert progress[-1] == f"{len(content)} of {len(content)} bytes"
    assert found.startswith(f"101 chunks, checksum {checksum(content):016x}; ")
    assert last.startswith(f"ok: {len(content)} bytes, {content.count(10)} lines, ")


@prints
def test_demo_makes_a_file(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a file it makes one; with ``--json -`` standard output is JSON and nothing else."""
    assert demo.main(["stream", "--mib", "2", "--device", "host", "--json", "-"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert (figures["bytes"], figures["chunks"], figures["mismatches"]) == (2 * 2**20, 2, 0)
    assert "ok: " in captured.err


@prints
def test_demo_fails_on_a_difference(
    demo: ModuleType, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If plain Python counts otherwise, the exit code is 1."""
    monkeypatch.setattr(demo, "plain_summary", lambda path: (np.zeros(256, np.int64), 0))
    assert demo.main(["stream", str(path), "--device", "host"]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed: ")


@prints
@pytest.mark.parametrize("name", ["", "missing"])
def test_demo_says_what_is_wrong(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """What cannot be read is one line on standard error and exit code 2."""
    assert demo.main(["stream", str(tmp_path / name), "--device", "host"]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err
