"""Scan a directory tree with kernels and compare every count with plain Python.

For each file of a tree the device counts bytes, lines and the occurrences of some words: one launch
of ``count`` and one launch of ``find`` per word. Each file is its own task, hundreds of them run at
once, and their launches spread over all lanes. The same program runs on a GPU and on the host.

What is counted, on the device and in plain Python alike:

*Lines* are newline bytes (``\\n``), so a last line without one does not count.
*Matches* of a word are the positions at which its bytes stand, whether or not they overlap:
``b"aaa"`` holds ``b"aa"`` twice.

A file is sent in chunks that fit the buffers of a small pool. A chunk's *own* bytes are the places
where a match may start; it carries as many of the bytes behind them as the longest word needs to end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import aiooffload as ao
from aiooffload.examples.tree import Counts, TreeFile, list_files, plain_counts

__all__ = ["Difference", "FileReport", "ScanResult", "count", "find", "scan"]

CHUNK_BYTES: Final = 256 * 1024
"""Own bytes of a chunk: the size of the pool's buffers."""
FILES_IN_FLIGHT: Final = 256
BIG_FILE_BYTES: Final = 1024 * 1024
"""Above this size, few files are held in memory at once."""
BIG_FILES_IN_FLIGHT: Final = 4
READER_THREADS: Final = 4

BLOCK: Final = 256
BYTES_PER_THREAD: Final = 16
NEWLINE: Final = ord("\n")

SOURCE: Final = r"""
__device__ void add_warp(unsigned long long* total, unsigned long long value)
{
    for (int distance = 16; distance > 0; distance /= 2)
        value += __shfl_down_sync(0xffffffffu, value, distance);
    if (threadIdx.x % 32 == 0 && value != 0)
        atomicAdd(total, value);
}

extern "C" __global__ void count(const unsigned char* data, long long own, unsigned long long* counts)
{
    unsigned long long bytes = 0, lines = 0;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < own; i += stride) {
        ++bytes;
        lines += data[i] == '\n';
    }
    add_warp(&counts[0], bytes);
    add_warp(&counts[1], lines);
}

extern "C" __global__ void find(const unsigned char* data, long long own, long long available,
                                const unsigned char* word, int length, unsigned long long* counts, int slot)
{
    unsigned long long matches = 0;
    const long long stride = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < own; i += stride) {
        if (i + length > available)
            break;
        int k = 0;
        while (k < length && data[i + k] == word[k])
            ++k;
        matches += k == length;
    }
    add_warp(&counts[slot], matches);
}
"""


@ao.kernel(cuda=SOURCE)
def count(launch: Any, data: ao.In[np.uint8], own: np.int64, counts: ao.InOut[np.uint64]) -> None:
    """Add the number of bytes to ``counts[0]`` and of newlines to ``counts[1]``, over ``data[:own]``."""
    counts[0] += np.uint64(own)
    counts[1] += np.uint64(np.count_nonzero(data[:own] == NEWLINE))


@ao.kernel(cuda=SOURCE)
def find(
    launch: Any,
    data: ao.In[np.uint8],
    own: np.int64,
    available: np.int64,
    word: ao.In[np.uint8],
    length: np.int32,
    counts: ao.InOut[np.uint64],
    slot: np.int32,
) -> None:
    """Add to ``counts[slot]`` how often ``word`` starts in ``data[:own]`` and ends in ``data[:available]``."""
    starts = max(0, min(int(own), int(available) - int(length) + 1))
    places = np.flatnonzero(data[:starts] == word[0])
    for k in range(1, int(length)):
        if not places.size:
            return
        places = places[data[places + k] == word[k]]
    counts[slot] += np.uint64(places.size)


@dataclass(frozen=True, slots=True)
class FileReport:
    """One file, as the device counted it."""

    path: Path
    """Relative to the root."""
    counts: Counts


@dataclass(frozen=True, slots=True)
class Difference:
    """A count that differs between the device and plain Python."""

    path: Path
    counter: str
    """``"bytes"``, ``"lines"`` or the word in quotes."""
    device: int
    python: int


@dataclass(slots=True)
class ScanResult:
    """Everything a scan found, files in the order of their paths."""

    words: tuple[str, ...]
    files: list[FileReport] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)
    unreadable: list[tuple[Path, str]] = field(default_factory=list)
    awaits: int = 0
    """Operations of the Offload that were awaited."""
    launches: int = 0
    peak_launches: int = 0
    """The most launches that were in flight at once."""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of the whole process, plain Python's counting included."""

    @property
    def nbytes(self) -> int:
        """Bytes in all files."""
        return sum(report.counts.nbytes for report in self.files)

    @property
    def lines(self) -> int:
        """Lines in all files."""
        return sum(report.counts.lines for report in self.files)

    @property
    def matches(self) -> tuple[int, ...]:
        """Matches of each word in all files."""
        return tuple(sum(report.counts.matches[word] for report in self.files) for word in range(len(self.words)))

    @property
    def awaits_per_s(self) -> float:
        """Awaited operations per second of the scan."""
        return self.awaits / self.wall_s if self.wall_s else 0.0


async def scan(
    off: ao.Offload,
    root: Path,
    words: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
) -> ScanResult:
    """Count bytes, lines and words in every file below ``root``, and check each count.

    Parameters
    ----------
    off
        Where the kernels run. It is left open.
    root
        The tree to scan.
    words
        What to look for, as UTF-8; at least one character each.
    progress
        Called in the loop's thread with the number of files done and of all files.

    Raises
    ------
    NotADirectoryError
        ``root`` is not a folder.
    ValueError
        A word is empty.
    aiooffload.OffloadError
        The device failed. The Offload is as usable as the error says.

    Notes
    -----
    *Cancellation.* Cancelling the call ends the scan; the Offload stays usable.
    A file that cannot be read is listed in the result and ends nothing.
    """
    if not all(words):
        raise ValueError("a word needs at least one character")
    files = await asyncio.to_thread(list_files, root)
    await off.load(count, find)
    scanner = _Scanner(off, root, words)
    try:
        await scanner.prepare(min(FILES_IN_FLIGHT, len(files)))
        await scanner.run(files, progress)
    finally:
        await scanner.aclose()
    return scanner.result


class _Unreadable(Exception):
    """A file could not be read; the message says why."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Buffers of one file in flight; they go back to the pool when the file is done."""

    data: ao.Buffer
    counts: ao.Buffer


class _Scanner:
    """One run of :func:`scan`: the pool of buffers and the tasks that use it."""

    def __init__(self, off: ao.Offload, root: Path, words: Sequence[str]) -> None:
        self.result: Final = ScanResult(tuple(words))
        self._off: Final = off
        self._root: Final = root
        self._words: Final = [word.encode("utf-8", "surrogateescape") for word in words]
        self._overlap: Final = max((len(word) for word in self._words), default=1) - 1
        self._readers: Final = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="scan-reader")
        self._big: Final = asyncio.Semaphore(BIG_FILES_IN_FLIGHT)
        self._word_buffers: list[ao.Buffer] = []
        self._slots: list[_Slot] = []
        self._free: Final[asyncio.Queue[_Slot]] = asyncio.Queue()
        self._launches = 0
        """Launched and not yet awaited."""

    async def prepare(self, slots: int) -> None:
        for word in self._words:
            self._word_buffers.append(await self._off.put(np.frombuffer(word, np.uint8)))
        for _ in range(slots):
            data = self._off.empty(CHUNK_BYTES + self._overlap, np.uint8)
            slot = _Slot(data, self._off.empty(2 + len(self._words), np.uint64))
            self._slots.append(slot)
            self._free.put_nowait(slot)

    async def aclose(self) -> None:
        """Give the buffers back; the Offload keeps what is still in use until it is not."""
        for buffer in self._word_buffers:
            buffer.close()
        for slot in self._slots:
            slot.data.close()
            slot.counts.close()
        await asyncio.to_thread(self._readers.shutdown, cancel_futures=True)

    async def run(self, files: Sequence[TreeFile], progress: Callable[[int, int], None] | None) -> None:
        done = 0

        def one_more(_task: asyncio.Task[None]) -> None:
            nonlocal done
            done += 1
            if progress is not None:
                progress(done, len(files))

        wall, cpu = time.perf_counter(), time.process_time()
        try:
            async with asyncio.TaskGroup() as group:
                for file in files:
                    slot = await self._free.get()
                    group.create_task(self._scan_file(file, slot)).add_done_callback(one_more)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures  # The others are of the same fault.
        self.result.wall_s, self.result.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        self.result.files.sort(key=lambda report: report.path)
        self.result.unreadable.sort()

    async def _scan_file(self, file: TreeFile, slot: _Slot) -> None:
        name = file.path.relative_to(self._root)
        try:
            if file.problem is not None:
                raise _Unreadable(file.problem)
            async with self._big if file.nbytes > BIG_FILE_BYTES else nullcontext():
                content, expected = await self._read(file.path)
                counts = await self._count(content, slot)
            self.result.files.append(FileReport(name, counts))
            self.result.differences += self._compare(name, counts, expected)
        except _Unreadable as error:
            self.result.unreadable.append((name, str(error)))
        finally:
            self._free.put_nowait(slot)

    async def _read(self, path: Path) -> tuple[bytes, Counts]:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._readers, _read, path, self._words)
        except OSError as error:
            raise _Unreadable(error.strerror or str(error)) from error
        except MemoryError as error:
            raise _Unreadable("too large for the memory") from error

    async def _count(self, content: bytes, slot: _Slot) -> Counts:
        # The buffers order all of this on the device: the fill and the copies come before the
        # launches that use them, and the result is fetched after the last of those.
        result = self.result
        submitted: list[ao.Operation[Any]] = [self._off.fill(slot.counts, 0)]
        try:
            for chunk, own in _chunks(content, self._overlap):
                with self._launched(1 + len(self._words)):
                    self._submit(chunk, own, slot, submitted)
                    for operation in submitted:
                        await operation
                result.awaits += len(submitted)
                submitted.clear()
            totals = await self._off.get(slot.counts)
        except BaseException:
            for operation in submitted:
                operation.cancel()
                operation.add_done_callback(_look_at)
            raise
        result.awaits += 1
        nbytes, lines, *matches = totals.tolist()
        return Counts(nbytes, lines, tuple(matches))

    def _submit(self, chunk: NDArray[np.uint8], own: int, slot: _Slot, into: list[ao.Operation[Any]]) -> None:
        """Submit all that one chunk takes, adding the operations to ``into``."""
        off, data, counts = self._off, slot.data, slot.counts
        if chunk.size:
            into.append(off.copy(data[: chunk.size], chunk))
        grid = max(1, -(-own // (BLOCK * BYTES_PER_THREAD)))
        into.append(off.launch(count, grid=grid, block=BLOCK, args=(data, own, counts)))
        for index, word in enumerate(self._word_buffers):
            args = (data, own, chunk.size, word, len(self._words[index]), counts, 2 + index)
            into.append(off.launch(find, grid=grid, block=BLOCK, args=args))

    @contextmanager
    def _launched(self, number: int) -> Iterator[None]:
        """Keep count of what is in flight."""
        self._launches += number
        self.result.launches += number
        self.result.peak_launches = max(self.result.peak_launches, self._launches)
        try:
            yield
        finally:
            self._launches -= number

    def _compare(self, path: Path, device: Counts, python: Counts) -> Iterator[Difference]:
        names = ["bytes", "lines", *(repr(word) for word in self.result.words)]
        ours = [device.nbytes, device.lines, *device.matches]
        theirs = [python.nbytes, python.lines, *python.matches]
        for name, one, other in zip(names, ours, theirs, strict=True):
            if one != other:
                yield Difference(path, name, one, other)


def _look_at(operation: ao.Operation[Any]) -> None:
    """See how an operation of a failed file ended, so that nobody need be told that nobody looked."""
    if not operation.cancelled():
        operation.exception()


def _read(path: Path, words: Sequence[bytes]) -> tuple[bytes, Counts]:
    """Read a file and count in it what the device will count; runs in a thread."""
    content = path.read_bytes()
    return content, plain_counts(content, words)


def _chunks(content: bytes, overlap: int) -> Iterator[tuple[NDArray[np.uint8], int]]:
    """Yield ``(data, own)``: up to ``CHUNK_BYTES`` own bytes, then up to ``overlap`` further ones.

    An empty file has one empty chunk, so that the device counts it like any other.
    """
    whole = np.frombuffer(content, np.uint8)
    for start in range(0, max(1, whole.size), CHUNK_BYTES):
        own = min(CHUNK_BYTES, whole.size - start)
        yield whole[start : start + own + overlap], own
