"""Keys resolved by a kernel that asks a SQLite database: every value, every count, every failure."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import sqlite3
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import ModuleType

import aiosqlite
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload.examples import lookup as lookup_module
from aiooffload.examples.lookup import EMPTY, MULTIPLIER, PROBES, Database, Result, create_database, lookup, resolve

LEAST, MOST = -(2**63), 2**63 - 1

RANDOM = np.random.default_rng(5)
ENTRIES = dict(zip(RANDOM.integers(LEAST, MOST, 2000).tolist(), RANDOM.standard_normal(2000).tolist(), strict=True))
# No -0.0: SQLite stores it as 0.
ENTRIES |= {0: 0.0, -1: -math.inf, 1: math.inf, 2: 5e-324, LEAST: 0.1, MOST: 0.3}
MISSING = [404, -404, 2**40]


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    await create_database(tmp_path / "entries #1?.sqlite", ENTRIES.items())
    return tmp_path / "entries #1?.sqlite"


@pytest.fixture
async def database(path: Path) -> AsyncIterator[Database]:
    async with Database(path) as database:
        yield database


@pytest.fixture
async def off(device_label: str) -> AsyncIterator[ao.Offload]:
    async with ao.Offload(device_label, lanes=2) as off:
        yield off


def check_values(result: Result, keys: Sequence[int]) -> None:
    """Every value is bit for bit what a dict gives."""
    expected = np.array([ENTRIES.get(key, math.nan) for key in keys], np.float64)
    assert result.values.tobytes() == expected.tobytes()
    assert result.hits + result.misses == len(keys)


def check(result: Result, keys: Sequence[int]) -> None:
    """The counts of a launch that had the database to itself fit together, too."""
    check_values(result, keys)
    assert result.batches <= result.misses
    assert len({key for key in keys if key in ENTRIES}) <= result.rows <= result.misses


# What comes out.


async def test_every_value_is_that_of_a_dict(off: ao.Offload, database: Database) -> None:
    """Keys in any order, many of them more than once, resolve to exactly the values of the database."""
    keys = RANDOM.choice(np.array([*ENTRIES, *MISSING], np.int64), 5000).tolist()
    check(await resolve(off, database, keys), keys)


@pytest.mark.parametrize("number", [0, 1, 31, 32, 33, 129])
async def test_any_number_of_keys(off: ao.Offload, database: Database, number: int) -> None:
    """The number of keys need not fill a warp or a block; none at all is no error."""
    keys = list(ENTRIES)[:number]
    check(await resolve(off, database, keys), keys)


@pytest.mark.parametrize("bits", [1, 4, 20])
async def test_any_size_of_the_table(off: ao.Offload, database: Database, bits: int) -> None:
    """A table that is too small for the keys costs queries, and no value."""
    keys = [*ENTRIES, *MISSING] * 2
    check(await resolve(off, database, keys, table_bits=bits), keys)


async def test_keys_that_the_database_does_not_have(off: ao.Offload, database: Database) -> None:
    """A missing key is NaN wherever it stands, and no row is returned for it."""
    keys = MISSING * 100
    result = await resolve(off, database, keys)
    check(result, keys)
    assert result.rows == 0


async def test_key_that_looks_like_an_empty_slot(off: ao.Offload, database: Database) -> None:
    """It is asked for each time, and spoils no slot for the others."""
    keys = [MOST, *list(ENTRIES)[:100]] * 10
    result = await resolve(off, database, keys, table_bits=8)
    check(result, keys)
    assert (await resolve(off, database, [MOST] * 50)).hits == 0


async def test_counts_by_hand(database: Database) -> None:
    """A warp asks for what it misses in one query; what was asked for is a hit from then on, missing or not."""
    async with ao.Offload("host", lanes=1) as off:
        first = await resolve(off, database, [1] * 32 + [1] * 32)
        assert (first.hits, first.misses, first.batches, first.rows) == (32, 32, 1, 1)
        second = await resolve(off, database, [1, 404] * 16 + [404, 2] * 16)
        assert (second.hits, second.misses, second.batches, second.rows) == (16, 48, 2, 2)
        nothing = await resolve(off, database, [])
        assert (nothing.hits, nothing.misses, nothing.batches, nothing.rows) == (0, 0, 0, 0)


async def test_launches_at_once_have_their_own_results(off: ao.Offload, database: Database) -> None:
    """Several launches share the database and nothing else."""
    lists = [list(ENTRIES)[start : start + 300] for start in range(0, 1200, 300)]
    results = await asyncio.gather(*(resolve(off, database, keys) for keys in lists))
    for keys, result in zip(lists, results, strict=True):
        check_values(result, keys)


async def test_progress_comes_from_the_device(off: ao.Offload, database: Database) -> None:
    """What is told grows, and ends with all keys."""
    told: list[tuple[int, int]] = []
    keys = list(ENTRIES)
    await resolve(off, database, keys, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(set(told))
    assert told[-1] == (len(keys), len(keys))


# What goes wrong.


async def test_query_that_fails(off: ao.Offload, path: Path, database: Database) -> None:
    """The launch ends with the database's own error as the cause; the next one is right again."""
    async with aiosqlite.connect(path) as other:
        await other.execute("ALTER TABLE entries RENAME TO hidden")
        with pytest.raises(ao.HostFunctionError, match="no such table: entries") as caught:
            await resolve(off, database, list(ENTRIES))
        assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
        await other.execute("ALTER TABLE hidden RENAME TO entries")
    check(await resolve(off, database, [1, 2]), [1, 2])


async def test_database_that_was_closed(off: ao.Offload, path: Path) -> None:
    """Asking it is an error of the launch."""
    async with Database(path) as database:
        await resolve(off, database, [1])
    with pytest.raises(ao.HostFunctionError, match="'fetch', called by kernel lookup, failed") as caught:
        await resolve(off, database, [1])
    assert isinstance(caught.value.__cause__, ValueError)


async def test_database_that_does_not_exist(tmp_path: Path) -> None:
    """It is not created by opening it."""
    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        async with Database(tmp_path / "missing.sqlite"):
            pass
    assert await asyncio.to_thread(lambda: list(tmp_path.iterdir())) == []


async def test_database_that_exists_is_not_overwritten(path: Path) -> None:
    """Creating one needs a file of its own, and keys that differ."""
    with pytest.raises(sqlite3.OperationalError, match="already exists"):
        await create_database(path, [])
    with pytest.raises(sqlite3.IntegrityError):
        await create_database(path.with_name("other"), [(1, 1.0), (1, 2.0)])


class Hanging(Database):
    """Never answers, and says when it was asked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked = asyncio.Event()

    async def query(self, keys: list[int]) -> dict[int, float]:
        self.asked.set()
        return await asyncio.get_running_loop().create_future()


async def test_cancelling_in_the_middle(off: ao.Offload, path: Path) -> None:
    """A kernel that waits for the database is told, and the call ends; the Offload stays usable."""
    async with Hanging(path) as database:
        task = asyncio.create_task(resolve(off, database, list(ENTRIES)))
        await database.asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await off.drain()
    with await off.put(np.arange(3)) as buffer:
        assert (await off.get(buffer)).tolist() == [0, 1, 2]


async def test_cancelling_the_operation(off: ao.Offload, path: Path) -> None:
    """``cancel`` on the launch itself ends it as cancelled, with nothing left to count for."""
    async with Hanging(path) as database:
        database.serve(off)
        keys, values, counts = await off.put(np.arange(100)), off.empty(100, np.float64), off.zeros(3, np.uint64)
        table = off.empty((16, 2), np.int64)
        await off.fill(table, EMPTY)
        operation = off.launch(lookup, grid=1, block=128, args=(keys, values, 100, table, 4, counts))
        database.tally(operation)
        await database.asked.wait()
        assert operation.cancel()
        with pytest.raises(asyncio.CancelledError):
            await operation
        await asyncio.sleep(0)  # for the callbacks
        assert database._tallies == {}


async def test_bad_arguments(off: ao.Offload, database: Database) -> None:
    """Keys of two dimensions and a table without slots are refused before anything is launched."""
    with pytest.raises(ValueError, match="one dimension"):
        await resolve(off, database, [[1, 2]])
    with pytest.raises(ValueError, match="at least 1"):
        await resolve(off, database, [1], table_bits=0)


async def test_an_offload_has_one_database(off: ao.Offload, path: Path, database: Database) -> None:
    """A second one is refused, and the first goes on."""
    await resolve(off, database, [1])
    async with Database(path) as other:
        with pytest.raises(ao.UsageError, match="fetch"):
            await resolve(off, other, [1])
    check(await resolve(off, database, [1]), [1])


# The table.


@given(
    keys=st.lists(st.integers(-5, 40) | st.sampled_from([LEAST, MOST]), max_size=100),
    bits=st.integers(1, 6),
)
def test_table_never_gives_a_wrong_value(keys: list[int], bits: int) -> None:
    """Whatever was put in, a key is found with its own value or not at all."""
    table = np.full((1 << bits, 2), EMPTY)
    values = {key: float(key) / 3 for key in keys}
    for key in keys:
        asked = np.array([key])
        places = lookup_module._places(asked, bits)
        found, hit = lookup_module._find(table, asked, places)
        assert not hit[0] or found[0] == values[key]
        lookup_module._insert(table, asked, places, np.array([values[key]]))
    used = table[:, 0] != EMPTY
    assert (table[used, 1] != EMPTY).all()
    assert (table[~used, 1] == EMPTY).all()
    assert len(set(table[used, 0].tolist())) == np.count_nonzero(used)


def test_host_and_cuda_agree_on_the_table() -> None:
    """Both implementations have the same constants."""
    assert f"PROBES = {PROBES};" in lookup_module.SOURCE
    assert f"EMPTY = {EMPTY:#x}ll;" in lookup_module.SOURCE
    assert f"{MULTIPLIER:#X}ull".replace("0X", "0x") in lookup_module.SOURCE
    assert (lookup_module.HITS, lookup_module.MISSES, lookup_module.BLOCKS_DONE) == (0, 1, 2)
    assert "HITS = 0, MISSES = 1, BLOCKS_DONE = 2;" in lookup_module.SOURCE


# The demo around it.


prints = pytest.mark.allows_blocking("the demo prints from the loop's thread")
SMALL = ["lookup", "--device", "host", "--rows", "300", "--keys", "1000"]


@prints
def test_demo_ends_well(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how far it is and what it found; the last line sums up and the exit code is 0."""
    assert demo.main(SMALL) == 0
    first, *progress, counts, last = capsys.readouterr().out.splitlines()
    assert first == "resolving 1000 keys on host, 300 rows in the database"
    assert progress[-1] == "1000 of 1000 keys"
    assert " hits, " in counts
    assert last.startswith("ok: 1000 keys, ")


@prints
def test_demo_writes_json_alone(demo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--json -`` standard output is JSON and nothing else."""
    assert demo.main([*SMALL, "--json", "-"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    assert (figures["keys"], figures["hits"] + figures["misses"], figures["mismatches"]) == (1000, 1000, 0)
    assert "ok: " in captured.err


@prints
def test_demo_fails_on_a_difference(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One value that is not plain Python's makes the exit code 1."""

    async def wrong(self: Database, keys: list[int]) -> dict[int, float]:
        return dict.fromkeys(keys, 7.0)

    monkeypatch.setattr(Database, "query", wrong)
    assert demo.main(SMALL) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("failed: 1000 values differ")


@prints
def test_demo_says_what_is_wrong(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A device that does not exist and a package that is not installed are one line, and exit code 2."""
    assert demo.main(["lookup", "--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert demo.main(SMALL) == 2
    assert "pip install 'aiooffload[demo]'" in capsys.readouterr().err
