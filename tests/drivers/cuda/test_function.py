"""Packing kernel parameters. Planning needs a GPU: ``tests/gpu/test_launch.py``."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload._native import LaunchPlan, pack
from aiooffload.drivers.cuda.function import CudaFunction, pack_slowly
from aiooffload.errors import UsageError


class Array:
    """As much of a Buffer as packing reads."""

    def __init__(self, address: int) -> None:
        self.address = address


SCALARS: dict[str, tuple[type[np.generic], Any]] = {
    "i": (np.int32, st.integers(-(2**31), 2**31 - 1)),
    "I": (np.uint32, st.integers(0, 2**32 - 1)),
    "q": (np.int64, st.integers(-(2**63), 2**63 - 1)),
    "Q": (np.uint64, st.integers(0, 2**63 - 1)),
    "f": (np.float32, st.floats(width=32, allow_nan=False)),
    "d": (np.float64, st.floats(allow_nan=False)),
}
VALUES = st.one_of(
    *(st.tuples(st.just(letter), values) for letter, (_, values) in SCALARS.items()),
    st.tuples(st.just("P"), st.integers(0, 2**64 - 1)),
)


def unpack(block: bytes) -> list[int]:
    """Return the offsets of the values in a block."""
    (count,) = struct.unpack_from("<I", block)
    return list(struct.unpack_from(f"<{count}I", block, 4))


def values_of(block: bytes, sizes: Sequence[int]) -> list[bytes]:
    return [block[offset : offset + size] for offset, size in zip(unpack(block), sizes, strict=True)]


@given(st.lists(VALUES, max_size=40))
def test_slow_and_native_packing_agree(items: list[tuple[str, Any]]) -> None:
    """Both ways make the same block, byte for byte, of what both can pack."""
    plain = [Array(value) if letter == "P" else value for letter, value in items]
    typed = [Array(value) if letter == "P" else SCALARS[letter][0](value) for letter, value in items]
    sizes = tuple(8 if letter in "PqQd" else 4 for letter, _ in items)
    letters = "".join(letter for letter, _ in items).encode()
    assert pack_slowly("k", sizes, typed) == pack(letters, tuple(plain))


@pytest.mark.parametrize(
    "value",
    [
        np.int8(-3),
        np.uint16(65535),
        np.bool_(True),
        np.float16(1.5),
        np.float32("nan"),
        np.float64("-inf"),
        np.complex64(1 + 2j),
        np.complex128(1 - 2j),
        np.datetime64("2020-01-01", "ns"),
    ],
)
def test_any_numpy_scalar_keeps_its_bytes(value: np.generic) -> None:
    """A scalar of any type arrives with exactly the bytes it has in NumPy."""
    block = pack_slowly("k", (value.itemsize,), [value])
    assert values_of(block, [value.itemsize]) == [value.tobytes()]


STRUCT = np.dtype([("tag", np.int8), ("scale", np.float64), ("index", np.int32, (3,))], align=True)


def test_struct_keeps_the_layout_of_c() -> None:
    """A structured scalar arrives as C lays it out, with the padding that align=True gives it."""
    value = np.array((-2, 0.5, (7, 8, 9)), STRUCT)[()]
    assert STRUCT.itemsize == 32
    (data,) = values_of(pack_slowly("k", (32,), [value]), [32])
    assert struct.unpack("<b7xd3i4x", data) == (-2, 0.5, 7, 8, 9)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=12), st.integers(0, 255))
def test_values_of_any_size_lie_apart_and_aligned(sizes: list[int], seed: int) -> None:
    """Each value starts at a multiple of 16, behind the offsets, and no two overlap."""
    values = [np.frombuffer(bytes((seed + i) % 256 for i in range(size)), f"V{size}")[0] for size in sizes]
    block = pack_slowly("k", tuple(sizes), values)
    assert values_of(block, sizes) == [value.tobytes() for value in values]
    offsets = unpack(block)
    assert all(offset % 16 == 0 for offset in offsets)
    ends = [4 + 4 * len(sizes), *(offset + size for offset, size in zip(offsets, sizes, strict=True))]
    assert all(offset >= end for offset, end in zip(offsets, ends, strict=False))
    assert len(block) >= ends[-1]


def test_no_arguments() -> None:
    """A kernel without parameters has a block that says so."""
    assert unpack(pack_slowly("k", (), [])) == []
    assert pack_slowly("k", (), []) == pack(b"", ())


@pytest.mark.parametrize(("sizes", "given_count"), [((), 1), ((4,), 0), ((4, 4), 1), ((4,), 3)])
def test_wrong_count_is_a_usage_error(sizes: tuple[int, ...], given_count: int) -> None:
    """The error names the kernel, what it takes and what was given."""
    with pytest.raises(UsageError, match=f"kernel mine takes {len(sizes)} arguments, {given_count} were given"):
        pack_slowly("mine", sizes, [np.int32(0)] * given_count)


@pytest.mark.parametrize(
    ("size", "value"),
    [(4, np.float64(1)), (8, np.float32(1)), (4, Array(16)), (16, Array(16)), (31, np.zeros((), STRUCT)[()])],
)
def test_wrong_size_is_a_usage_error(size: int, value: Any) -> None:
    """The error names the argument, its size and the size that the kernel takes."""
    with pytest.raises(UsageError, match=f"argument 1 of kernel mine has .* bytes, the kernel takes {size}"):
        pack_slowly("mine", (4, size), [np.int32(0), value])


def test_function_prepares_by_its_sizes() -> None:
    """A loaded kernel checks arguments against what the driver told of its parameters."""
    function = CudaFunction("mine", object(), 1, (8, 4), contextlib.nullcontext)
    plan = LaunchPlan("mine", 1, None, (1, 1, 1), (1, 1, 1), 0, None, False)
    assert function.parameter_sizes == (8, 4)
    assert function.prepare(plan, [Array(64), np.int32(-1)]) == pack(b"Pi", (Array(64), -1))
    with pytest.raises(UsageError, match="takes 2 arguments"):
        function.prepare(plan, [])
