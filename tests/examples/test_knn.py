"""The search that is served: the nearest vectors, their texts out of the database, and the whole with its client."""

from __future__ import annotations

import json
import subprocess
import sys
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import aiooffload as ao
from aiooffload.examples import knn as example
from aiooffload.examples.knn import DIMENSIONS, MOST, THREADS, Index, app, characters, embed, knn, nearest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def names() -> list[str]:
    return [unicodedata.name(one) for one in characters()]


@pytest.fixture
async def off(device_label: str) -> AsyncIterator[ao.Offload]:
    async with ao.Offload(device_label, lanes=2) as off:
        yield off


@pytest.fixture
async def served(off: ao.Offload) -> AsyncIterator[ao.Offload]:
    await app.start(off)
    yield off
    await app.stop(off)


def one_k(rows: int, k: int) -> NDArray[np.int32]:
    return np.full((rows, 1), k, np.int32)


def test_like_texts_have_like_vectors(names: list[str]) -> None:
    """Vectors have length 1, and the nearest of a text is itself; case does not matter, nor does any input."""
    texts = ["BLACK HEART", "black heart", "HEAVY BLACK HEART", "DIGIT ONE", "", "ß \0 \ud800", "x"]
    vectors = embed(texts)
    assert (vectors.shape, vectors.dtype) == ((len(texts), DIMENSIONS), np.float32)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1.0)
    assert np.array_equal(vectors[0], vectors[1])
    assert vectors[0] @ vectors[2] > 0.8 > 0.3 > vectors[0] @ vectors[3]
    many = embed(names)
    assert np.array_equal(many[::997], embed(names[::997]))  # each as it is alone
    assert [names[i] for i in (many[::997] @ many.T).argmax(axis=1)] == names[::997]


async def test_kernel_finds_the_best(off: ao.Offload) -> None:
    """For any number of vectors, also fewer than asked for, and with equal scores: the lower id comes first."""
    asked: list[list[int]] = []

    @off.host_function
    async def resolve(ids: ao.In[np.int32], texts: ao.Out[np.uint8]) -> None:
        asked.append(ids.tolist())
        texts[:] = np.repeat(ids.astype(np.uint8), example.TEXT_NBYTES)

    await off.load(nearest)
    random = np.random.default_rng(1)
    for count in (1, 3, MOST, 200, 5000):
        # Small whole numbers: sums are exact in any order, and many are equal.
        vectors = random.integers(-2, 3, (count, DIMENSIONS)).astype(np.float32)
        vectors[: count // 2] = vectors[count - count // 2 :]
        queries = random.integers(-2, 3, (5, DIMENSIONS)).astype(np.float32)
        wanted = np.array([[0], [1], [3], [MOST], [MOST + 5]], np.int32)
        asked.clear()
        ids = await off.put(np.full((5, MOST), -1, np.int32))
        scores, texts = off.zeros((5, MOST), np.float32), off.zeros((5, MOST, example.TEXT_NBYTES), np.uint8)
        buffers = [await off.put(one) for one in (queries, wanted, vectors)]
        await off.launch(nearest, grid=5, block=THREADS, args=(*buffers, count, ids, scores, texts))
        expected_ids, expected_scores = np.full((5, MOST), -1), np.zeros((5, MOST))
        for row, (query, k) in enumerate(zip(queries, wanted[:, 0], strict=True)):
            products = vectors @ query
            best = np.argsort(-products, kind="stable")[: min(k, MOST)]
            expected_ids[row, : len(best)], expected_scores[row, : len(best)] = best, products[best]
        found = await off.get(ids)
        assert np.array_equal(found, expected_ids), count
        assert np.array_equal(await off.get(scores), expected_scores)
        shown = np.where(expected_ids < 0, 0, expected_ids).astype(np.uint8)
        assert np.array_equal((await off.get(texts))[..., 5], shown)
        assert sorted(asked) == sorted([i for i in row if i >= 0] for row in found.tolist()[1:])


async def test_handler(served: ao.Offload, names: list[str]) -> None:
    """Answers have the texts of the database, as many as asked for, in requests that were joined, too."""
    query = embed(["black heart", "snowman", "greek small letter alpha"])
    answer = await knn(served, query, np.array([[2], [1], [MOST]], np.int32))
    assert answer["text"][0].tolist() == ["🖤 BLACK HEART".encode(), "❤ HEAVY BLACK HEART".encode()] + [b""] * 14
    assert answer["text"][1, 0] == "☃ SNOWMAN".encode()
    assert answer["text"][2, 0] == "\u03b1 GREEK SMALL LETTER ALPHA".encode()
    assert (answer["id"] >= 0).sum(axis=1).tolist() == [2, 1, MOST]
    products = embed(names) @ query[2]
    assert np.allclose(answer["score"][2], np.sort(products)[: -MOST - 1 : -1], atol=1e-5)
    assert [names[i] for i in answer["id"][2]] == [text.decode()[2:] for text in answer["text"][2]]


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.filterwarnings("ignore:.*encountered in matmul:RuntimeWarning")
async def test_query_that_is_no_vector(served: ao.Offload, odd: float) -> None:
    """It finds nothing, and the queries of others in its call find what they do without it."""
    query = embed(["snowman", "black heart", "snowman"])
    query[1, ::2] = odd
    answer = await knn(served, query, one_k(3, 2))
    assert (answer["id"][1] == -1).all()
    assert not answer["score"][1].any()
    assert answer["text"][1].tolist() == [b""] * MOST
    assert answer["text"][0, 0] == answer["text"][2, 0] == "☃ SNOWMAN".encode()


async def test_failing_database_fails_the_request(served: ao.Offload, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the database raises is the cause of the handler's exception, and the next request is answered."""

    async def fail(self: Index, ids: list[int]) -> list[bytes]:
        raise OSError("disk")

    with monkeypatch.context() as failing:
        failing.setattr(Index, "texts", fail)
        with pytest.raises(ao.HostFunctionError) as caught:
            await knn(served, embed(["snowman"]), one_k(1, 1))
    assert isinstance(caught.value.__cause__, OSError)
    assert (await knn(served, embed(["snowman"]), one_k(1, 1)))["text"][0, 0] == "☃ SNOWMAN".encode()


def test_demo_serves_it(tmp_path: Path) -> None:
    """scripts/demo --serve starts the worker, asks it with Triton's client, and ends it: all by itself, exit 0."""
    report = tmp_path / "figures.json"
    command = [sys.executable, "scripts/_demo.py", "--serve", "--device", "host", "--texts", "snowman,black heart"]
    done = subprocess.run(
        [*command, "--requests", "20", "--json", str(report)], cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "☃ SNOWMAN " in done.stdout
    assert done.stdout.splitlines()[-1].startswith("ok: 20 requests")
    figures = json.loads(report.read_text())
    assert (figures["mismatches"], figures["exit_status"], figures["device"]) == (0, 0, "host")
    assert 1 <= figures["calls"] <= 20
