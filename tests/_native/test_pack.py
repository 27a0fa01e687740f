"""``pack.c``: kernel parameters as one self-contained block."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload._native import pack


class Address:
    """What has an address, as a buffer has."""

    def __init__(self, address: Any) -> None:
        self.address = address


def f32_fits(number: float) -> bool:
    try:
        struct.pack("<f", number)
    except OverflowError:
        return False
    return True


FLOATS = st.floats(allow_nan=True, allow_infinity=True)
VALUES = {
    "P": st.integers(0, 2**64 - 1).map(Address),
    "f": FLOATS.filter(f32_fits),
    "d": FLOATS,
    "i": st.integers(-(2**31), 2**31 - 1),
    "I": st.integers(0, 2**32 - 1),
    "q": st.integers(-(2**63), 2**63 - 1),
    "Q": st.integers(0, 2**63 - 1),
}
RANGES = {"i": (-(2**31), 2**31 - 1), "I": (0, 2**32 - 1), "q": (-(2**63), 2**63 - 1), "Q": (0, 2**63 - 1)}
PARAMETERS = st.lists(st.sampled_from(sorted(VALUES)).flatmap(lambda f: st.tuples(st.just(f), VALUES[f])), max_size=20)


def expected(formats: str, values: tuple[Any, ...]) -> bytes:
    """The block as ``struct`` makes it: count, offsets, and each value at a multiple of 16."""
    count = len(formats)
    start = -(-(4 + 4 * count) // 16) * 16
    head = struct.pack(f"<I{count}I", count, *(start + 16 * i for i in range(count))).ljust(start, b"\0")
    codes = {"P": "Q"}
    numbers = [value.address if code == "P" else value for code, value in zip(formats, values, strict=True)]
    body = (
        struct.pack(f"<{codes.get(code, code)}", number).ljust(16, b"\0")
        for code, number in zip(formats, numbers, strict=True)
    )
    return head + b"".join(body)


@given(PARAMETERS)
def test_it_packs_as_struct_does(parameters: list[tuple[str, Any]]) -> None:
    """Values that the formats take make the block that ``struct`` makes, byte by byte."""
    formats = "".join(code for code, _ in parameters)
    values = tuple(value for _, value in parameters)
    assert pack(formats.encode(), values) == expected(formats, values)


@given(st.sampled_from("iIqQ"), st.integers(-(2**66), 2**66))
def test_an_integer_is_exact_or_left_alone(code: str, number: int) -> None:
    """An integer that its format cannot hold is for the slow path, never a number cut short."""
    low, high = RANGES[code]
    packed = pack(code.encode(), (number,))
    assert packed == (expected(code, (number,)) if low <= number <= high else None)


@given(FLOATS)
def test_a_float_is_finite_or_left_alone(number: float) -> None:
    """A double beyond a float's range is for the slow path; infinities and NaN pass."""
    packed = pack(b"f", (number,))
    assert (packed is None) == (not f32_fits(number))
    if packed is not None:
        (value,) = struct.unpack_from("<f", packed, 16)
        assert math.isnan(value) == math.isnan(number)


@given(st.sampled_from("fd"), st.integers(-(2**53), 2**53))
def test_an_integer_for_a_float_is_not_rounded(code: str, number: int) -> None:
    """An integer that a float holds exactly is packed as that; any other is for the slow path."""
    exact = code == "d" or abs(number) <= 2**24
    assert pack(code.encode(), (number,)) == (expected(code, (float(number),)) if exact else None)


NUMPY = {"f": np.float32, "d": np.float64, "i": np.int32, "I": np.uint32, "q": np.int64, "Q": np.uint64}


@given(st.sampled_from(sorted(NUMPY)), st.binary(min_size=8, max_size=8))
def test_a_numpy_scalar_passes_as_it_is(code: str, data: bytes) -> None:
    """One of the format's own type keeps every bit, of a NaN as well."""
    value = np.frombuffer(data, NUMPY[code])[0]
    packed = pack(b"i" + code.encode(), (1, value))
    assert packed is not None
    assert packed[32:] == value.tobytes().ljust(16, b"\0")


@pytest.mark.parametrize(
    ("code", "value"),
    [
        *((code, value) for code in "iIqQ" for value in (1.0, True, "1", None)),
        *((code, value) for code in "fd" for value in (True, "1", None)),
        *(("f", value) for value in (2**24 + 1, -(2**24) - 1, 2**70, np.float64(1), np.int32(1), np.longdouble(1))),
        *(("d", value) for value in (2**53 + 1, -(2**53) - 1, 2**70, np.float32(1), np.int64(1))),
        *(("i", value) for value in (np.int64(1), np.uint32(1), np.int16(1), np.bool_(True), np.array(1, np.int32))),
        *(("q", value) for value in (np.longlong(1), np.uint64(1), np.float64(1))),
        ("\0", np.int32(1)),
        ("P", np.uint64(1)),
        ("P", 4096),
        ("P", None),
        ("x", 1),
        ("x", 1.0),
    ],
)
def test_other_types_are_for_the_slow_path(code: str, value: Any) -> None:
    """What is no exact int, float, NumPy scalar or address is left to Python, and so is an unknown format."""
    assert pack(code.encode(), (value,)) is None
    assert pack(b"i" + code.encode(), (1, value)) is None


@pytest.mark.parametrize(("formats", "values"), [(b"", (1,)), (b"i", ()), (b"ii", (1,)), (b"i", (1, 2))])
def test_a_wrong_count_is_for_the_slow_path(formats: bytes, values: tuple[int, ...]) -> None:
    """Python raises the error that names the count."""
    assert pack(formats, values) is None


def test_no_parameters_are_a_block_too() -> None:
    """A kernel without parameters has a block with the count 0."""
    assert pack(b"", ()) == bytes(16)


@pytest.mark.parametrize(("address", "error"), [(-1, OverflowError), (2**64, OverflowError), ("8", TypeError)])
def test_an_impossible_address_raises(address: Any, error: type[Exception]) -> None:
    """An address that is no 64-bit number is an error, not a pointer to somewhere."""
    with pytest.raises(error):
        pack(b"P", (Address(address),))


def test_an_error_of_the_address_is_passed_on() -> None:
    """A closed buffer's own error reaches the caller as it is."""

    class Closed:
        @property
        def address(self) -> int:
            raise RuntimeError("closed")

    with pytest.raises(RuntimeError, match="closed"):
        pack(b"iP", (1, Closed()))


def test_the_arguments_are_a_tuple() -> None:
    """Anything but a tuple raises TypeError."""
    with pytest.raises(TypeError):
        pack(b"i", [1])  # type: ignore[arg-type]
