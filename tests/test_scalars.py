"""Python numbers as NumPy scalars (aiooffload.scalars)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload.errors import UsageError
from aiooffload.scalars import scalar

PAIR = np.dtype([("a", np.int32), ("b", np.float32)])


@given(st.integers(-(2**70), 2**70), st.sampled_from([np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64]))
def test_integers_are_exact_or_refused(value: int, kind: type[np.integer[Any]]) -> None:
    """An integer becomes the same number, or raises UsageError where the dtype cannot hold it."""
    limits = np.iinfo(kind)
    if limits.min <= value <= limits.max:
        converted = scalar(value, np.dtype(kind), "it")
        assert (type(converted), int(converted)) == (kind, value)
    else:
        with pytest.raises(UsageError, match="it cannot be"):
            scalar(value, np.dtype(kind), "it")


@given(st.floats(allow_nan=False) | st.integers(-(2**80), 2**80), st.sampled_from([np.float16, np.float32, np.float64]))
def test_floats_round_but_never_overflow(value: float, kind: type[np.floating[Any]]) -> None:
    """A float is rounded to the dtype; one beyond its range raises rather than become infinite."""
    largest = float(np.finfo(kind).max)
    if math.isinf(value) or abs(value) <= largest:
        converted = scalar(value, np.dtype(kind), "it")
        assert type(converted) is kind
        assert math.isinf(converted) == math.isinf(value)
    else:
        with pytest.raises(UsageError, match="out of range"):
            scalar(value, np.dtype(kind), "it")


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (True, np.bool_, np.True_),
        (1 + 2j, np.complex64, np.complex64(1 + 2j)),
        (3, np.complex128, np.complex128(3)),
        (np.array(5, np.int32), np.int32, np.int32(5)),
        ((1, 2.5), PAIR, np.array((1, 2.5), PAIR)[()]),
        ("2026-11-30", "M8[D]", np.datetime64("2026-11-30")),
    ],
)
def test_what_is_accepted(value: object, dtype: Any, expected: np.generic) -> None:
    """Booleans, complex numbers, arrays without dimensions, structs from tuples and dates from text."""
    converted = scalar(value, np.dtype(dtype), "it")
    assert converted.dtype == np.dtype(dtype)
    assert converted == expected


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (2.5, np.int32),
        (None, np.float32),
        ("1", np.int32),
        (1j, np.float64),
        (1, np.bool_),
        ([1, 2], np.float32),
        (np.float64(1), np.float32),
        (np.int64(1), np.int32),
        ((1, 2, 3), PAIR),
        ([(1, 2.0), (3, 4.0)], PAIR),
    ],
)
def test_what_is_refused(value: object, dtype: Any) -> None:
    """What would lose something, and what is no number at all, raises UsageError with the name of the value."""
    with pytest.raises(UsageError, match="the factor"):
        scalar(value, np.dtype(dtype), "the factor")
