"""Take a file of any size through device memory that holds two chunks of it, in a single launch.

The running kernel ``summarize`` asks the host for the next chunk: its call maps half of its buffer,
and the host function ``next_chunk`` reads from the file into the array it gets for that. The kernel
asks for a chunk before it starts on the one it has, so reading and computing go on at the same time.

What is computed: how often each byte value occurs, and a checksum in which each byte counts with its
position, so that a chunk that is lost, repeated or out of order changes it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

import aiooffload as ao

__all__ = ["Summary", "stream", "summarize"]

CHUNK_BYTES: Final = 1024 * 1024
BLOCK: Final = 1024
NEWLINE: Final = ord("\n")

SOURCE: Final = r"""
#include <aiooffload.cuh>

extern "C" __global__ void summarize(ao::Launch launch, unsigned char* buffer, long long capacity, long long size,
                                     unsigned long long* histogram, unsigned long long* checksum)
{
    __shared__ unsigned long long bins[256];
    __shared__ long long available;  // bytes in the current half: 0 at the end of the file, -1 if a call failed
    const bool caller = threadIdx.x == 0;
    const ao::Function next_chunk = ao::fn("next_chunk");
    unsigned char *half = buffer, *other = buffer + capacity;
    unsigned long long sum = 0;
    long long done = 0;
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        bins[i] = 0;
    if (caller) {
        long long nbytes;
        available = launch.call(next_chunk, nbytes, ao::from(half, capacity)) == ao::Status::OK ? nbytes : -1;
    }
    __syncthreads();
    while (available > 0) {
        ao::Pending ahead;
        if (caller) ahead = launch.call_async(next_chunk, ao::from(other, capacity));
        const long long nbytes = available;
        for (long long i = threadIdx.x; i < nbytes; i += blockDim.x) {
            atomicAdd(&bins[half[i]], 1ull);
            sum += (unsigned long long)(done + i + 1) * half[i];
        }
        done += nbytes;
        unsigned char* const read = half;
        half = other;
        other = read;
        __syncthreads();  // all are through with what thread 0 asks for and writes from here on
        if (caller) {
            launch.progress(done, size);
            long long following;
            available = launch.wait(ahead, following) == ao::Status::OK ? following : -1;
        }
        __syncthreads();
    }
    // After a failure nobody reads this: the launch ends with what the host knows.
    for (int i = threadIdx.x; i < 256; i += blockDim.x)
        atomicAdd(&histogram[i], bins[i]);
    atomicAdd(checksum, sum);
}
"""


@ao.kernel(cuda=SOURCE, calls=True)
def summarize(
    launch: ao.Launch,
    buffer: ao.Out[np.uint8],
    capacity: np.int64,
    size: np.int64,
    histogram: ao.InOut[np.uint64],
    checksum: ao.InOut[np.uint64],
) -> None:
    """Take all chunks through the two halves of ``buffer``; ``size`` is what progress is measured by."""
    half, other = buffer[:capacity], buffer[capacity:]
    positions = np.arange(1, int(capacity) + 1, dtype=np.uint64)
    done = total = 0
    pending = launch.call_async("next_chunk", launch.from_(half))
    while nbytes := pending.wait():
        pending = launch.call_async("next_chunk", launch.from_(other))
        chunk = half[:nbytes]
        histogram += np.bincount(chunk, minlength=256).astype(np.uint64)
        total += done * int(chunk.sum(dtype=np.uint64)) + int(positions[:nbytes] @ chunk)
        done += nbytes
        half, other = other, half
        launch.progress(done, int(size))
    checksum[0] = total % 2**64


@dataclass(frozen=True, slots=True)
class Summary:
    """A file as the device saw it."""

    histogram: NDArray[np.uint64]
    """How often each of the 256 byte values occurs."""
    checksum: int
    """The sum of each byte times its position, counted from 1, modulo 2**64."""
    chunks: int
    """How many there were; the last may be short, and so may any that the system reads in parts."""
    wall_s: float

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.histogram.sum())

    @property
    def lines(self) -> int:
        """Newlines in the file."""
        return int(self.histogram[NEWLINE])


class _Source:
    """The file of one launch."""

    def __init__(self, file: FileIO) -> None:
        self.chunks = 0
        self._file = file

    async def read(self, chunk: NDArray[np.uint8]) -> int:
        reading = asyncio.ensure_future(asyncio.to_thread(self._file.readinto, chunk.data))
        try:
            nbytes = await asyncio.shield(reading) or 0
        except asyncio.CancelledError:
            # Nothing stops the thread. A launch is done when its handlers are, and whoever waited for
            # that may close the file.
            await asyncio.gather(reading, return_exceptions=True)
            raise
        self.chunks += nbytes > 0
        return nbytes


_served: Final[WeakKeyDictionary[ao.Offload, dict[ao.Operation[None], _Source]]] = WeakKeyDictionary()
"""The files of the launches under way."""


def _sources(off: ao.Offload) -> dict[ao.Operation[None], _Source]:
    """Return what ``next_chunk`` reads from, by launch; registers it with an Offload it does not serve yet."""
    if off in _served:
        return _served[off]
    sources: dict[ao.Operation[None], _Source] = {}

    @off.host_function
    async def next_chunk(chunk: ao.Out[np.uint8]) -> int:
        call = ao.current_call()
        assert call is not None
        return await sources[call.operation].read(chunk)

    _served[off] = sources
    return sources


async def stream(
    off: ao.Offload,
    path: Path,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> Summary:
    """Summarize a file, chunk by chunk, in one launch.

    Parameters
    ----------
    off
        Where the kernel runs. It is left open.
    path
        The file; what can only be read from start to end, such as a pipe, will do.
    chunk_bytes
        The most that is read at a time; the device holds two chunks.
    progress
        Called in the loop's thread with the bytes done and the file's size (0 if the system does not
        know it), as the device says it.

    Raises
    ------
    OSError
        The file cannot be opened.
    ValueError
        ``chunk_bytes`` is below 1.
    aiooffload.HostFunctionError
        Reading failed; the OSError is the cause.
    aiooffload.OffloadError
        The device failed. The Offload is as usable as the error says.

    Notes
    -----
    *Cancellation.* Cancelling the call cancels the launch, and ends when that has; the Offload stays usable.
    """
    if chunk_bytes < 1:
        raise ValueError("chunk_bytes is at least 1")
    sources = _sources(off)
    await off.load(summarize)
    start = time.perf_counter()
    file = await asyncio.to_thread(FileIO, path)
    try:
        size = (await asyncio.to_thread(os.fstat, file.fileno())).st_size
        with (
            off.empty(2 * chunk_bytes, np.uint8) as buffer,
            off.zeros(256, np.uint64) as histogram,
            off.zeros(1, np.uint64) as checksum,
        ):
            source = _Source(file)
            operation = off.launch(
                summarize, grid=1, block=BLOCK, args=(buffer, chunk_bytes, size, histogram, checksum)
            )
            sources[operation] = source
            operation.add_done_callback(lambda one: sources.pop(one, None))
            try:
                if progress is not None:
                    async for done, total in operation.progress():
                        progress(done, total)
                await operation
            finally:
                operation.cancel()
                await asyncio.gather(operation.wait(), return_exceptions=True)
            bins = await off.get(histogram)
            (total_sum,) = (await off.get(checksum)).tolist()
    finally:
        await asyncio.to_thread(file.close)
    return Summary(bins, total_sum, source.chunks, time.perf_counter() - start)
