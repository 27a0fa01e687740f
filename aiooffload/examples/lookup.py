"""Resolve keys on the device, and ask a SQLite database on the host for those that it does not hold.

The kernel ``lookup`` has a small hash table in device memory. A key found there is a hit. For a
miss the running kernel calls the host: each warp sends the keys its lanes miss as one request, the
host function ``fetch`` gets the requests of all warps as one batch and answers it with one query,
and the lanes put the values into the table for those that come after them.

A key that the database does not have resolves to NaN, which the table remembers like any value.

The table is open addressing without deletion. A slot's key is written once, and the bits of its
value are ``EMPTY`` until they are written: whoever finds the key before its value takes that for a
miss. So no thread waits for another one, and none sees half an entry. The one key that looks like
an empty slot is never put in the table, and is asked for each time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final
from weakref import WeakSet

import aiosqlite
import numpy as np
from numpy.typing import ArrayLike, NDArray

import aiooffload as ao

__all__ = ["Database", "Result", "create_database", "lookup", "resolve"]

TABLE_BITS: Final = 12
"""2**12 slots of 16 bytes: the table is meant to be smaller than the database."""
PROBES: Final = 16
"""How many slots from its own one a key may be."""
EMPTY: Final = 2**63 - 1
"""Of a slot's key and of its value's bits; as those of a float64 it is a NaN that no database gives."""
MULTIPLIER: Final = 0x9E3779B97F4A7C15

WARP: Final = 32
BLOCK: Final = 128
MOST_BLOCKS: Final = 64
"""Each thread takes one key after the other, so more blocks would only miss the same keys at once."""

Keys = np.ndarray[tuple[int], np.dtype[np.int64]]
Values = np.ndarray[tuple[int], np.dtype[np.float64]]

HITS, MISSES, BLOCKS_DONE = range(3)
"""Places in the kernel's ``counts``."""

SOURCE: Final = r"""
#include <aiooffload.cuh>

struct Slot {
    long long key, value;  // the value's bits
};

constexpr long long EMPTY = 0x7fffffffffffffffll;
constexpr int PROBES = 16;
constexpr int HITS = 0, MISSES = 1, BLOCKS_DONE = 2;

__device__ unsigned long long place(long long key, int bits, int probe)
{
    const unsigned long long home = (unsigned long long)key * 0x9E3779B97F4A7C15ull >> (64 - bits);
    return (home + probe) & ((1ull << bits) - 1);
}

__device__ bool find(const volatile Slot* table, int bits, long long key, double& value)
{
    for (int probe = 0; probe < PROBES; ++probe) {
        const volatile Slot& slot = table[place(key, bits, probe)];
        const long long other = slot.key;
        if (other == EMPTY)
            return false;
        if (other == key) {
            const long long held = slot.value;
            value = __longlong_as_double(held);
            return held != EMPTY;
        }
    }
    return false;
}

__device__ void insert(Slot* table, int bits, long long key, double value)
{
    if (key == EMPTY)
        return;
    for (int probe = 0; probe < PROBES; ++probe) {
        Slot& slot = table[place(key, bits, probe)];
        const long long other = (long long)atomicCAS(
            (unsigned long long*)&slot.key, (unsigned long long)EMPTY, (unsigned long long)key);
        if (other == EMPTY || other == key) {
            atomicExch((unsigned long long*)&slot.value, (unsigned long long)__double_as_longlong(value));
            return;
        }
    }
}

__device__ void report(ao::Launch& launch, unsigned long long* counts, long long count)
{
    const volatile unsigned long long* now = counts;
    launch.progress(now[HITS] + now[MISSES], count);
}

extern "C" __global__ void lookup(ao::Launch launch, const long long* keys, double* values, long long count,
                                  Slot* table, int bits, unsigned long long* counts)
{
    const unsigned whole = 0xffffffffu, lane = threadIdx.x % 32;
    const bool reporter = blockIdx.x == 0 && threadIdx.x == 0;
    const long long stride = (long long)gridDim.x * blockDim.x;
    // By warps rather than threads: the lanes stay together, so what they miss goes as one request.
    for (long long start = (long long)blockIdx.x * blockDim.x + threadIdx.x - lane; start < count; start += stride) {
        const long long i = start + lane;
        const bool mine = i < count;
        const long long key = mine ? keys[i] : EMPTY;
        double value = 0;
        const bool hit = mine && find(table, bits, key, value), miss = mine && !hit;
        ao::Status status = ao::Status::OK;
        if (miss) {
            status = launch.warp_call_each(ao::fn("fetch"), value, key);
            if (status == ao::Status::OK)
                insert(table, bits, key, value);
        }
        // Whatever has gone wrong, the host knows it, and the launch ends with it.
        if (__any_sync(whole, status != ao::Status::OK))
            break;
        if (mine)
            values[i] = value;
        const unsigned hits = __popc(__ballot_sync(whole, hit)), misses = __popc(__ballot_sync(whole, miss));
        if (lane == 0) {
            atomicAdd(&counts[HITS], (unsigned long long)hits);
            atomicAdd(&counts[MISSES], (unsigned long long)misses);
        }
        if (reporter)
            report(launch, counts, count);
    }
    __syncthreads();
    // One thread at a time may report: the last block does when all others, the reporter's too, are through.
    if (threadIdx.x == 0) {
        __threadfence_system();
        if (atomicAdd(&counts[BLOCKS_DONE], 1ull) == gridDim.x - 1)
            report(launch, counts, count);
    }
}
"""


@ao.kernel(cuda=SOURCE, calls=True)
def lookup(
    launch: ao.Launch,
    keys: ao.In[np.int64],
    values: ao.Out[np.float64],
    count: np.int64,
    table: ao.InOut[np.int64],
    bits: np.int32,
    counts: ao.InOut[np.uint64],
) -> None:
    """Write the value of ``keys[:count]`` to ``values``; ``table`` has rows of key and the value's bits."""
    for start in range(0, int(count), WARP):
        asked = keys[start : min(start + WARP, int(count))]
        places = _places(asked, int(bits))
        found, hit = _find(table, asked, places)
        misses = np.flatnonzero(~hit)
        if misses.size:
            found[misses] = launch.call_each("fetch", asked[misses])
            _insert(table, asked[misses], places[misses], found[misses])
        values[start : start + asked.size] = found
        counts[HITS] += np.uint64(asked.size - misses.size)
        counts[MISSES] += np.uint64(misses.size)
        launch.progress(start + asked.size, int(count))


def _places(keys: NDArray[np.int64], bits: int) -> NDArray[np.int64]:
    """Return the slots in which each key may be, one row per key."""
    home = (keys.view(np.uint64) * np.uint64(MULTIPLIER) >> np.uint64(64 - bits)).astype(np.int64)
    return (home[:, np.newaxis] + np.arange(PROBES)) & ((1 << bits) - 1)


def _find(
    table: NDArray[np.int64], keys: NDArray[np.int64], places: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the values that the table has, and for which keys it has one."""
    match = table[places, 0] == keys[:, np.newaxis]
    where = places[np.arange(keys.size), match.argmax(axis=1)]
    held = table[where, 1]
    return held.view(np.float64), match.any(axis=1) & (held != EMPTY)


def _insert(
    table: NDArray[np.int64], keys: NDArray[np.int64], places: NDArray[np.int64], values: NDArray[np.float64]
) -> None:
    """Put entries into the table, as far as there is room near their places."""
    for key, at, bits in zip(keys, places, values.view(np.int64), strict=True):
        taken = table[at, 0]
        usable = (taken == EMPTY) | (taken == key)
        if key != EMPTY and usable.any():
            table[at[usable.argmax()]] = key, bits


@dataclass(frozen=True, slots=True)
class Result:
    """What :func:`resolve` found."""

    values: NDArray[np.float64]
    """In the order of the keys; NaN for a key that the database does not have."""
    hits: int
    misses: int
    """Keys that the device's table had, and had not."""
    batches: int
    """Queries that it took part in; one may have been for other launches of the Offload as well."""
    rows: int
    """Rows that these queries returned, for whichever launch."""
    wall_s: float


@dataclass(slots=True)
class _Tally:
    """What the database did for one launch."""

    batches: int = 0
    rows: int = 0


async def create_database(path: Path, entries: Iterable[tuple[int, float]]) -> None:
    """Create a database of ``entries``, indexed by key, in a file of its own.

    Raises
    ------
    sqlite3.Error
        The file cannot be written or is in use already, or a key comes twice.
    """
    async with aiosqlite.connect(path) as connection:
        # The table of a primary key is itself the index.
        await connection.execute("CREATE TABLE entries (key INTEGER PRIMARY KEY, value REAL NOT NULL)")
        await connection.executemany("INSERT INTO entries VALUES (?, ?)", entries)
        await connection.commit()


class Database:
    """A database of :func:`create_database`, open for reading. Use it as an async context manager.

    Parameters
    ----------
    path
        Its file.

    Raises
    ------
    sqlite3.Error
        The file does not exist or cannot be opened, at ``__aenter__``.

    Notes
    -----
    *Lifetime.* Close it after the launches that ask it are done.
    """

    def __init__(self, path: Path) -> None:
        self.connection: Final = aiosqlite.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)
        self._served: Final[WeakSet[ao.Offload]] = WeakSet()
        # Of the launches under way.
        self._tallies: Final[dict[ao.Operation[None], _Tally]] = {}

    async def __aenter__(self) -> Database:
        await self.connection
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.connection.close()

    def serve(self, off: ao.Offload) -> None:
        """Let kernels of ``off`` call ``fetch``; idempotent.

        Raises
        ------
        aiooffload.UsageError
            Another database serves this Offload.
        """
        if off in self._served:
            return

        @off.host_function(batch=True)
        async def fetch(keys: Keys) -> Values:
            asked = keys.tolist()
            found = await self.query(asked)
            call = ao.current_call()
            for operation in call.operations if call is not None else ():
                if (tally := self._tallies.get(operation)) is not None:
                    tally.batches += 1
                    tally.rows += len(found)
            return np.array([found.get(key, np.nan) for key in asked])

        self._served.add(off)

    async def query(self, keys: list[int]) -> dict[int, float]:
        """Return the entries of ``keys``, in one query however many there are."""
        # As one parameter, since SQLite limits how many a statement may have.
        text = "SELECT key, value FROM entries WHERE key IN (SELECT value FROM json_each(?))"
        rows = await self.connection.execute_fetchall(text, (json.dumps(keys),))
        return {key: float(value) for key, value in rows}

    def tally(self, operation: ao.Operation[None]) -> _Tally:
        """Count from now on what is done for ``operation``, until it is done."""
        tally = self._tallies[operation] = _Tally()
        operation.add_done_callback(lambda one: self._tallies.pop(one, None))
        return tally


async def resolve(
    off: ao.Offload,
    database: Database,
    keys: ArrayLike,
    *,
    table_bits: int = TABLE_BITS,
    progress: Callable[[int, int], None] | None = None,
) -> Result:
    """Find the value of every key, in one launch.

    Parameters
    ----------
    off
        Where the kernel runs. It is left open.
    database
        What is asked for the keys that the device misses; one for each Offload.
    keys
        int64, one dimension. They may repeat, and the database need not have them.
    table_bits
        The device's table has ``2**table_bits`` slots, at least 2.
    progress
        Called in the loop's thread with the number of keys done and of all keys, as the device says it.

    Raises
    ------
    ValueError
        ``keys`` has not one dimension, or ``table_bits`` is below 1.
    aiooffload.HostFunctionError
        The database failed; its exception is the cause.
    aiooffload.OffloadError
        The device failed. The Offload is as usable as the error says.

    Notes
    -----
    *Cancellation.* Cancelling the call cancels the launch; the Offload stays usable.
    """
    asked = np.ascontiguousarray(keys, np.int64)
    if asked.ndim != 1 or table_bits < 1:
        raise ValueError("keys have one dimension, and table_bits is at least 1")
    database.serve(off)
    await off.load(lookup)
    start = time.perf_counter()
    with (
        await off.put(asked) as device_keys,
        off.empty(asked.shape, np.float64) as values,
        off.empty((1 << table_bits, 2), np.int64) as table,
        off.zeros(3, np.uint64) as counts,
    ):
        await off.fill(table, EMPTY)
        grid = min(MOST_BLOCKS, max(1, -(-asked.size // BLOCK)))
        args = (device_keys, values, asked.size, table, table_bits, counts)
        async with off.launch(lookup, grid=grid, block=BLOCK, args=args) as operation:
            tally = database.tally(operation)
            if progress is not None:
                async for done, total in operation.progress():
                    progress(done, total)
            await operation  # in the block, which cancels the launch if this wait is cancelled
        found = await off.get(values)
        hits, misses, _ = (await off.get(counts)).tolist()
    return Result(found, hits, misses, tally.batches, tally.rows, time.perf_counter() - start)
