"""Serve a search: the nearest of many vectors, by a kernel that asks a SQLite database for what they stand for.

``aiooffload serve aiooffload.examples.knn:app``. The vectors are those of the names of Unicode's characters, each name
as a histogram of its trigrams. A request is one or more vectors of the same kind, made by :func:`embed`, and how many
neighbours it wants of each. A block of the kernel ``nearest`` finds those of one vector; then, still running, it calls
the host function ``resolve`` with their numbers, and gets the texts into device memory.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiosqlite
import numpy as np
from numpy.typing import NDArray

import aiooffload as ao

__all__ = ["DIMENSIONS", "MOST", "app", "characters", "embed", "nearest"]

DIMENSIONS: Final = 256
MOST: Final = 16
"""Neighbours that a request can have of each vector."""
LARGEST: Final = np.float32(1e30)
"""Magnitude of a query's elements: sums of their products are numbers."""
TEXT_NBYTES: Final = 96
"""Of a text in device memory, zeros at its end included; a longer one is cut."""
THREADS: Final = 256
# The planes with most characters, without the blocks whose names are only numbers.
RANGES: Final = (range(0x20, 0x3400), range(0xA000, 0xAC00), range(0xF900, 0x17000), range(0x1B000, 0x20000))
NUMBERED: Final = ("CJK ", "YI ", "VARIATION ", "EGYPTIAN ", "CUNEIFORM ", "BAMUM ")

SOURCE: Final = r"""
#include <aiooffload.cuh>

constexpr int DIMENSIONS = 256, MOST = 16, TEXT_NBYTES = 96, WARPS = 8, CANDIDATES = WARPS * MOST;
constexpr unsigned WHOLE = 0xffffffffu;

// One block of 256 threads for each query.
extern "C" __global__ void nearest(ao::Launch launch, const float* queries, const int* wanted, const float* vectors,
                                   int count, int* ids, float* scores, unsigned char* texts)
{
    __shared__ float query[DIMENSIONS], found_score[CANDIDATES];
    __shared__ int found[CANDIDATES];
    const int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int k = max(0, min(wanted[row], min(MOST, count)));
    query[threadIdx.x] = queries[row * DIMENSIONS + threadIdx.x];
    __syncthreads();

    // Each warp has the best of its share, the i-th in lane i.
    float score = __int_as_float(0xff800000);
    int id = -1;
    for (int i = warp; i < count; i += WARPS) {
        float sum = 0;
        for (int d = lane; d < DIMENSIONS; d += 32)
            sum += query[d] * vectors[(long long)i * DIMENSIONS + d];
        for (int step = 16; step; step /= 2)
            sum += __shfl_xor_sync(WHOLE, sum, step);
        const int better = __popc(__ballot_sync(WHOLE, lane < MOST && score >= sum));
        const float next_score = __shfl_up_sync(WHOLE, score, 1);
        const int next = __shfl_up_sync(WHOLE, id, 1);
        if (lane >= better) {
            score = lane == better ? sum : next_score;
            id = lane == better ? i : next;
        }
    }
    if (lane < MOST) {
        found[warp * MOST + lane] = id;
        found_score[warp * MOST + lane] = score;
    }
    __syncthreads();

    // A candidate's place is the number of those before it.
    if (threadIdx.x < CANDIDATES) {
        const int mine = found[threadIdx.x];
        const float my_score = found_score[threadIdx.x];
        int place = 0;
        for (int i = 0; i < CANDIDATES; ++i) {
            const bool same = found_score[i] == my_score;
            place += found[i] >= 0 && (found_score[i] > my_score || (same && found[i] < mine));
        }
        if (mine >= 0 && place < k) {
            ids[row * MOST + place] = mine;
            scores[row * MOST + place] = my_score;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0 && k)
        launch.call(ao::fn("resolve"), ao::None(), ao::to(ids + row * MOST, k),
                    ao::from(texts + row * MOST * TEXT_NBYTES, k * TEXT_NBYTES));
}
"""


@ao.kernel(cuda=SOURCE, calls=True)
def nearest(
    launch: ao.Launch,
    queries: ao.In[np.float32],
    wanted: ao.In[np.int32],
    vectors: ao.In[np.float32],
    count: np.int32,
    ids: ao.InOut[np.int32],
    scores: ao.InOut[np.float32],
    texts: ao.InOut[np.uint8],
) -> None:
    """Write the ``wanted[i]`` best of ``vectors[:count]`` for each query, the best first."""
    products = queries @ vectors[: int(count)].T
    for row, k in enumerate(np.clip(wanted.reshape(-1), 0, min(MOST, int(count)))):
        if k:
            least = np.partition(products[row], -k)[-k]
            best = np.flatnonzero(products[row] >= least)  # of equal ones those with lower ids
            best = best[np.lexsort((best, -products[row, best]))][:k]
            ids[row, :k], scores[row, :k] = best, products[row, best]
            launch.call("resolve", launch.to(ids[row, :k]), launch.from_(texts[row, :k].reshape(-1)))


def characters() -> Iterator[str]:
    """Yield the characters that have a name of their own."""
    for numbers in RANGES:
        for character in map(chr, numbers):
            name = unicodedata.name(character, "")
            if name and not name.startswith(NUMBERED):
                yield character


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the vectors of texts: their trigrams, each hashed to a place and a sign, of length 1.

    Parameters
    ----------
    texts
        In any case; an empty one is as a space.

    Returns
    -------
    ``(len(texts), DIMENSIONS)`` float32.
    """
    encoded = [f" {text.upper()} ".encode(errors="replace").replace(b"\0", b" ").ljust(3) for text in texts]
    lengths = np.array([len(one) for one in encoded], np.int64)
    content = np.frombuffer(b"".join(encoded), np.uint8).astype(np.uint32)
    rows = np.repeat(np.arange(len(encoded)), lengths)
    starts = np.flatnonzero(rows[:-2] == rows[2:])
    trigrams = content[starts] | content[starts + 1] << np.uint32(8) | content[starts + 2] << np.uint32(16)
    hashed = trigrams * np.uint32(0x9E3779B1)
    places = rows[starts] * DIMENSIONS + (hashed >> np.uint32(24))
    signs = 1.0 - 2.0 * (hashed >> np.uint32(23) & np.uint32(1))
    counts = np.bincount(places, signs, len(encoded) * DIMENSIONS).reshape(-1, DIMENSIONS)
    norms = np.linalg.norm(counts, axis=1, keepdims=True)
    return (counts / np.where(norms, norms, 1.0)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Index:
    """What is searched: the vectors, on the device, and the database of what they stand for."""

    vectors: ao.Buffer
    """``(n, DIMENSIONS)`` float32; the id of what one stands for is its row."""
    database: aiosqlite.Connection

    @classmethod
    async def create(cls, off: ao.Offload) -> Index:
        """Fill the database, in memory, and put the vectors on the device."""
        entries = [(character, unicodedata.name(character)) for character in characters()]
        database = await aiosqlite.connect(":memory:")
        await database.execute("CREATE TABLE payloads (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")
        texts = ((i, f"{character} {name}") for i, (character, name) in enumerate(entries))
        await database.executemany("INSERT INTO payloads VALUES (?, ?)", texts)
        return cls(await off.put(embed([name for _, name in entries])), database)

    async def close(self) -> None:
        """Close the database and free the vectors."""
        await self.database.close()
        self.vectors.close()

    async def search(self, off: ao.Offload, queries: NDArray[np.float32], wanted: NDArray[np.int32]) -> dict[str, Any]:
        """Return ids, scores and texts of the neighbours of each query; -1, 0 and nothing in places beyond.

        A query with an element that is no number, or too large, has no neighbours: it may share a call with others.
        """
        rows = len(queries)
        wanted = np.where((np.abs(queries) <= LARGEST).all(axis=1, keepdims=True), wanted, np.int32(0))
        with (
            await off.put(queries) as device_queries,
            await off.put(wanted) as device_wanted,
            off.empty((rows, MOST), np.int32) as ids,
            off.zeros((rows, MOST), np.float32) as scores,
            off.zeros((rows, MOST, TEXT_NBYTES), np.uint8) as texts,
        ):
            off.fill(ids, -1)
            args = (device_queries, device_wanted, self.vectors, self.vectors.shape[0], ids, scores, texts)
            await off.launch(nearest, grid=rows, block=THREADS, args=args)
            content = await off.get(texts)
            return {
                "id": await off.get(ids),
                "score": await off.get(scores),
                "text": content.view(f"S{TEXT_NBYTES}")[..., 0].astype(object),
            }

    async def texts(self, ids: list[int]) -> list[bytes]:
        """Return the text of each id, cut so that a zero follows it."""
        query = "SELECT id, text FROM payloads WHERE id IN (SELECT value FROM json_each(?))"
        rows = await self.database.execute_fetchall(query, (json.dumps(ids),))
        found: dict[int, str] = {row[0]: row[1] for row in rows}
        return [found[i].encode()[: TEXT_NBYTES - 1] for i in ids]


app = ao.App("knn")
_index: list[Index] = []
"""Of this process: one while it serves."""


@app.on_start
async def start(off: ao.Offload) -> None:
    """Make what is searched."""
    _index.append(await Index.create(off))
    await off.load(nearest)


@app.on_stop
async def stop(off: ao.Offload) -> None:
    """Give it back."""
    await _index.pop().close()


@app.host_function
async def resolve(ids: ao.In[np.int32], texts: ao.Out[np.uint8]) -> None:
    """Write the text of each id to its place."""
    for place, text in zip(texts.reshape(-1, TEXT_NBYTES), await _index[0].texts(ids.tolist()), strict=True):
        place[:] = np.frombuffer(text.ljust(TEXT_NBYTES, b"\0"), np.uint8)


@app.endpoint(
    "knn",
    inputs={"query": (np.float32, (-1, DIMENSIONS)), "k": (np.int32, (-1, 1))},
    outputs={"id": (np.int32, (-1, MOST)), "score": (np.float32, (-1, MOST)), "text": (bytes, (-1, MOST))},
    max_batch_size=64,
)
async def knn(off: ao.Offload, query: NDArray[np.float32], k: NDArray[np.int32]) -> dict[str, Any]:
    """Return the ``k`` characters, 16 at most, whose names are nearest to each query; id -1 in places beyond."""
    return await _index[0].search(off, query, k)
