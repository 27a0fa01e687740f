"""Python numbers as NumPy scalars (aiooffload.scalars)."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload.errors import UsageError
from aiooffload.scalars import scalar, scalar_bytes

PAIR = np.dtype([("a", np.int32), ("b", np.float32)])
WIDE = np.dtype(
    [("u", np.uint8), ("ok", np.bool_), ("w", np.float32), ("n", "S4"), ("p", PAIR, (2,)), ("m", np.int16, (2, 2))],
    align=True,
)
WHOLE = (200, True, 0.5, b"ab", [(1, 2.5), (3, 4.5)], [[1, 2], [3, 4]])


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


@pytest.mark.parametrize("dtype", ["complex64", "bfloat16", "float8_e5m2", "float8_e4m3fn"])
def test_other_floats_never_overflow(dtype: str) -> None:
    """The same for complex numbers, each part of them, and for ml_dtypes' floats."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for value in (1e60, -1e60) if dtype != "complex64" else (1e60, 1e60j, complex(1, -1e60)):
        with pytest.raises(UsageError, match="out of range"):
            scalar(value, kind, "it")
    assert scalar(2, kind, "it") == 2
    assert math.isnan(float(scalar(math.nan, kind, "it").real))


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (True, np.bool_, np.True_),
        (1 + 2j, np.complex64, np.complex64(1 + 2j)),
        (3, np.complex128, np.complex128(3)),
        (np.array(5, np.int32), np.int32, np.int32(5)),
        ((1, 2.5), PAIR, np.array((1, 2.5), PAIR)[()]),
        ((np.int64(1), np.float64(2.5)), PAIR, np.array((1, 2.5), PAIR)[()]),
        (WHOLE, WIDE, np.array(WHOLE, WIDE)[()]),
        ((*WHOLE[:5], np.array([[1, 2], [3, 4]])), WIDE, np.array(WHOLE, WIDE)[()]),
        (b"ab", "S4", np.bytes_(b"ab")),
        ("ab", "U2", np.str_("ab")),
        ("2026-11-30", "M8[D]", np.datetime64("2026-11-30")),
    ],
)
def test_what_is_accepted(value: object, dtype: Any, expected: np.generic) -> None:
    """Booleans, complex numbers, arrays without dimensions, structs from tuples and dates from text."""
    converted = scalar(value, np.dtype(dtype), "it")
    assert converted.dtype == expected.dtype
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
        ([1, 2.0], PAIR),
        ({"a": 1, "b": 2.0}, PAIR),
        ((1.5, 2.0), PAIR),
        ((np.float64(1), 2.0), PAIR),
        ((2**31, 2.0), PAIR),
        ((np.int64(2**31), 2.0), PAIR),
        (("1", 2.0), PAIR),
        ((True, "2"), PAIR),
        ((1, 1e300), PAIR),
        ((np.int32(1), np.float64(1e300)), PAIR),
        ((256, *WHOLE[1:]), WIDE),
        ((200, 1, *WHOLE[2:]), WIDE),
        ((*WHOLE[:3], b"long!", *WHOLE[4:]), WIDE),
        ((*WHOLE[:3], "ab", *WHOLE[4:]), WIDE),
        ((*WHOLE[:4], [(1, 2.5)], WHOLE[5]), WIDE),
        ((*WHOLE[:4], [(1, 2.5), (3, None)], WHOLE[5]), WIDE),
        ((*WHOLE[:5], [1, 2]), WIDE),
        ((*WHOLE[:5], [[1, 2], [3, 4.5]]), WIDE),
        ((*WHOLE[:5], b"ab"), WIDE),
        (b"long!", "S4"),
        ("ab", "S4"),
        ("abc", "U2"),
    ],
)
def test_what_is_refused(value: object, dtype: Any) -> None:
    """What would lose something, and what is no number at all, raises UsageError with the name of the value."""
    with pytest.raises(UsageError, match="the factor"):
        scalar(value, np.dtype(dtype), "the factor")


def test_bytes_are_as_many_as_the_dtype_has() -> None:
    """What is between the fields of a struct, and behind a short text, is 0."""
    gaps = np.dtype([("a", np.int8), ("b", np.float64), ("c", "S3")], align=True)
    poison = [np.full(gaps.itemsize, 0xAA, np.uint8) for _ in range(100)]
    del poison  # what NumPy allocates next was used before
    expected = b"\x01" + bytes(7) + np.float64(2.5).tobytes() + b"x\0\0" + bytes(5)
    assert scalar_bytes((1, 2.5, b"x"), gaps, "it") == expected
    assert scalar_bytes(b"ab", np.dtype("S4"), "it") == b"ab\0\0"
    assert scalar_bytes("", np.dtype("U2"), "it") == bytes(8)
    assert scalar_bytes(7, np.dtype(np.int16), "it") == b"\x07\0"
