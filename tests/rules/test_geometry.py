"""``rules/geometry.py``: grids, blocks and clusters as three numbers within a device's limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload.errors import UsageError
from aiooffload.rules.geometry import Triple, check_launch, triple

SIZES = st.integers(1, 2**40)
SMALL = st.tuples(*[st.integers(1, 12)] * 3)
LIMITS: dict[str, Any] = {
    "max_grid": (100, 50, 25),
    "max_block": (64, 32, 16),
    "max_threads": 128,
    "max_shared_bytes": 4096,
}


class Index:
    """An integer that is no int."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


@given(st.lists(SIZES, min_size=1, max_size=3), st.sampled_from([tuple, list]))
def test_missing_dimensions_are_one(sizes: list[int], kind: type[Any]) -> None:
    """One to three sizes, in any sequence, become three."""
    assert triple(kind(sizes), "grid") == (*sizes, *[1] * (3 - len(sizes)))


@given(SIZES)
def test_a_number_is_one_dimension(size: int) -> None:
    """An integer stands for a line; NumPy's integers and others with an index count as one."""
    assert triple(size, "grid") == triple(Index(size), "grid") == triple((Index(size),), "grid") == (size, 1, 1)
    assert triple(np.int64(size), "grid") == triple([np.int64(size)], "grid") == (size, 1, 1)


@given(st.lists(SIZES, min_size=1, max_size=3))
def test_three_dimensions_stay(sizes: list[int]) -> None:
    """What was normalised once is not changed again, and is made of plain integers."""
    once = triple(sizes, "grid")
    assert triple(once, "grid") == once
    assert [type(size) for size in once] == [int] * 3


@given(st.lists(st.integers(-3, 5), max_size=5))
def test_a_size_is_at_least_one(sizes: list[int]) -> None:
    """Sizes are taken if they are one to three and none is below 1; a refusal names what it is about."""
    if 1 <= len(sizes) <= 3 and min(sizes) >= 1:
        triple(sizes, "block")
    else:
        with pytest.raises(UsageError, match=r"^block "):
            triple(sizes, "block")


@pytest.mark.parametrize(
    "value", [1.0, "1", "", None, (1, 2.0), (1, None), [[1]], {1}, np.float32(1), np.ones(3, int), int, b""]
)
def test_other_values_are_usage_errors(value: Any) -> None:
    """What is no integer, and no sequence of integers, is refused with the value in the text."""
    with pytest.raises(UsageError, match="grid"):
        triple(value, "grid")


def possible(grid: Triple, block: Triple, shared_bytes: int, cluster: Triple | None) -> bool:
    """The limits, as one would write them down."""
    fits = all(grid[i] <= LIMITS["max_grid"][i] and block[i] <= LIMITS["max_block"][i] for i in range(3))
    threads = int(np.prod(block))
    divides = cluster is None or all(grid[i] % cluster[i] == 0 for i in range(3))
    return fits and threads <= 128 and 0 <= shared_bytes <= 4096 and divides


GRIDS = st.tuples(*[st.one_of(st.integers(1, 12), st.integers(20, 110))] * 3)
BLOCKS = st.tuples(*[st.one_of(st.integers(1, 6), st.integers(1, 70))] * 3)


@given(GRIDS, BLOCKS, st.integers(-10, 4106), st.none() | SMALL)
def test_a_launch_is_taken_if_the_device_can_run_it(
    grid: Triple, block: Triple, shared_bytes: int, cluster: Triple | None
) -> None:
    """Exactly the launches within every limit pass."""
    if possible(grid, block, shared_bytes, cluster):
        check_launch(grid, block, shared_bytes, cluster, **LIMITS)
    else:
        with pytest.raises(UsageError):
            check_launch(grid, block, shared_bytes, cluster, **LIMITS)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"grid": (101, 1, 1)}, r"grid \(101, 1, 1\) .*\(100, 50, 25\)"),
        ({"grid": (1, 1, 26)}, r"grid \(1, 1, 26\)"),
        ({"block": (1, 33, 1)}, r"block \(1, 33, 1\) .*\(64, 32, 16\)"),
        ({"block": (64, 3, 1)}, r"192 threads, this device takes 128"),
        ({"shared_bytes": 4097}, r"0 to 4096 .* not 4097"),
        ({"shared_bytes": -1}, r"0 to 4096 .* not -1"),
        ({"cluster": (3, 1, 1)}, r"grid \(100, 50, 25\) is not a multiple of cluster \(3, 1, 1\)"),
    ],
)
def test_a_refusal_names_the_limit(change: dict[str, Any], text: str) -> None:
    """Each limit, one beyond it, is refused with its value; exactly at all of them is taken."""
    launch: dict[str, Any] = {"grid": (100, 50, 25), "block": (64, 2, 1), "shared_bytes": 4096, "cluster": (2, 5, 25)}
    check_launch(**launch, **LIMITS)
    with pytest.raises(UsageError, match=text):
        check_launch(**launch | change, **LIMITS)
