"""Which driver calls copy between two strided arrays: pure arithmetic on shapes and strides.

The driver copies bytes in one (``cuMemcpyAsync``), two (``cuMemcpy2DAsync``) or three dimensions
(``cuMemcpy3DAsync``). Two dimensions that are contiguous across one another on both sides are one;
of what is left, the plan gives to a call what makes the calls fewest, and repeats it over the rest.
So it is one call wherever one call can do it, and else the fewest over the merged dimensions. Once in
a while leaving two of them apart would save some more (two calls rather than three); that is not looked
for. A dimension is never divided between calls, not even where, say, each second slice would be a
multiple of the pitch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from aiooffload.errors import UsageError

__all__ = [
    "MAX_PITCH",
    "Axis",
    "Plan",
    "Step",
    "c_strides",
    "check_extent",
    "check_strides",
    "is_contiguous",
    "overlaps",
    "parts",
    "plan",
    "span",
]

MAX_PITCH: Final = 2**31 - 1
"""The largest pitch that a driver takes, in bytes, where the device does not say another."""

_SOURCE_REMEDY: Final = "pass np.ascontiguousarray(source)"
_DESTINATION_REMEDY: Final = "copy to a contiguous array first, such as np.ascontiguousarray makes, and on from there"


class Axis(NamedTuple):
    """One dimension of a copy."""

    length: int
    dst: int
    """Bytes from one to the next in the destination."""
    src: int
    """The same in the source."""


class Step(NamedTuple):
    """One driver call. Sizes that a call does not take are those it would have if it were contiguous there."""

    dst_offset: int
    """Bytes from the first element of the destination."""
    src_offset: int
    """Bytes from the first element of the source."""
    width: int
    """Bytes of a row, contiguous on both sides."""
    height: int
    """Rows."""
    depth: int
    """Slices."""
    dst_pitch: int
    """Bytes from one row to the next; at least ``width``."""
    src_pitch: int
    dst_slice: int
    """Bytes from one slice to the next; a multiple of the pitch, and at least ``height`` times it."""
    src_slice: int

    @property
    def dimensions(self) -> Literal[1, 2, 3]:
        """Those of the driver call that does it."""
        return 3 if self.depth > 1 else 2 if self.height > 1 else 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps of one copy, made as they are iterated over: their number costs neither time nor memory.

    Steps differ in nothing but their offsets, and no two write the same byte.
    """

    first: Step | None
    """The one at offset 0 on both sides; None if nothing is copied."""
    loops: tuple[Axis, ...] = ()
    """What the first is repeated over, outermost first."""

    def __len__(self) -> int:
        return 0 if self.first is None else math.prod(loop.length for loop in self.loops)

    def __iter__(self) -> Iterator[Step]:
        if self.first is None:
            return
        _, _, *sizes = self.first
        for dst, src in _offsets(self.loops, 0, 0):
            yield Step(dst, src, *sizes)


def plan(
    shape: Sequence[int],
    itemsize: int,
    dst_strides: Sequence[int],
    src_strides: Sequence[int],
    *,
    max_pitch: int = MAX_PITCH,
) -> Plan:
    """Return driver calls that copy an array to another, each of which does whole dimensions.

    One call if one can do it, otherwise the fewest over the merged dimensions.
    The memory of the two must not overlap. The calls may run in any order.

    Parameters
    ----------
    shape
        Elements in each dimension, of both sides; ``()`` is one element.
    itemsize
        Bytes of an element.
    dst_strides
        Bytes from one element to the next in each dimension of the destination. That of a
        dimension of length 1 does not matter.
    src_strides
        The same of the source, whose elements may overlap one another.
    max_pitch
        The largest pitch that the device takes, in bytes.

    Raises
    ------
    UsageError
        If a stride is negative or zero, or elements of the destination overlap one another.
    """
    check_strides(shape, itemsize, dst_strides, src_strides)
    if itemsize == 0 or 0 in shape:
        return Plan(None)
    run, *axes = _merged(shape, itemsize, dst_strides, src_strides)
    width, block = run.length, _block(run.length, axes, max_pitch)
    if width > itemsize and any(axis.src < width for axis in axes):
        # Rows that overlap one another in the source are none to the driver, but their columns may be.
        columns = [Axis(width // itemsize, itemsize, itemsize), *axes]
        narrow = _block(itemsize, columns, max_pitch)
        if itemsize * _size(narrow) > width * _size(block):
            width, block, axes = itemsize, narrow, columns
    height, dst_pitch, src_pitch = block[0] if block else Axis(1, width, width)
    contiguous = Axis(1, dst_pitch * height, src_pitch * height)
    depth, dst_slice, src_slice = block[1] if len(block) > 1 else contiguous
    first = Step(0, 0, width, height, depth, dst_pitch, src_pitch, dst_slice, src_slice)
    return Plan(first, tuple(axis for axis in reversed(axes) if axis not in block))


def parts(shape: Sequence[int], itemsize: int, most_nbytes: int) -> Iterator[tuple[slice, ...]]:
    """Yield the parts of an array, one behind the other in C order, that have ``most_nbytes`` at most.

    Each is a slice per dimension: whole inner dimensions, some of one, one of each outer one. An element
    is never divided, so one that is larger is a part by itself.
    """
    if 0 in shape:
        return
    axis, inner = len(shape), itemsize  # bytes of the dimensions from `axis` on
    while axis and inner * shape[axis - 1] <= most_nbytes:
        axis -= 1
        inner *= shape[axis]
    whole = tuple(slice(0, length) for length in shape[axis:])
    if not axis:
        yield whole
        return
    length, rows = shape[axis - 1], max(most_nbytes // max(inner, 1), 1)
    for index in itertools.product(*map(range, shape[: axis - 1])):
        outer = tuple(slice(i, i + 1) for i in index)
        for start in range(0, length, rows):
            yield (*outer, slice(start, min(start + rows, length)), *whole)


def _size(block: Sequence[Axis]) -> int:
    return math.prod(axis.length for axis in block)


def _block(width: int, axes: Sequence[Axis], max_pitch: int) -> tuple[Axis, ...]:
    """Return the rows, or rows and slices, of one call that does most of ``axes``.

    Of those that do as much the one in fewer dimensions is returned, then that of closer rows.
    """
    best: tuple[Axis, ...] = ()
    most = 1
    for index, row in enumerate(axes):
        if not (width <= row.dst <= max_pitch and width <= row.src <= max_pitch):
            continue
        if row.length > most or (row.length == most and len(best) == 2):
            best, most = (row,), row.length
        # Slices are further apart than rows, so they come later in the order of strides.
        for other in axes[index + 1 :]:
            if row.length * other.length > most and _are_slices(other, row):
                best, most = (row, other), row.length * other.length
    return best


def _are_slices(axis: Axis, row: Axis) -> bool:
    """Whether the driver takes ``axis`` as slices, each of which is ``row``."""
    return (
        axis.dst % row.dst == axis.src % row.src == 0
        and axis.dst >= row.dst * row.length
        and axis.src >= row.src * row.length
    )


def _merged(shape: Sequence[int], itemsize: int, dst_strides: Sequence[int], src_strides: Sequence[int]) -> list[Axis]:
    """Return the bytes that are contiguous on both sides, then the other dimensions by destination stride."""
    axes = [axis for axis in map(Axis, shape, dst_strides, src_strides) if axis.length > 1]
    merged = [Axis(itemsize, 1, 1)]
    for axis in sorted(axes, key=lambda axis: axis.dst):
        inner = merged[-1]
        if (axis.dst, axis.src) == (inner.dst * inner.length, inner.src * inner.length):
            merged[-1] = inner._replace(length=inner.length * axis.length)
        else:
            merged.append(axis)
    return merged


def check_strides(shape: Sequence[int], itemsize: int, dst_strides: Sequence[int], src_strides: Sequence[int]) -> None:
    """Raise UsageError if a stride is negative or zero, or elements of the destination overlap one another."""
    if itemsize == 0 or 0 in shape:
        return
    _check("source", _SOURCE_REMEDY, shape, src_strides)
    _check("destination", _DESTINATION_REMEDY, shape, dst_strides)
    reach = itemsize
    for stride, length in sorted(zip(dst_strides, shape, strict=True)):
        if length > 1:
            if stride < reach:
                raise UsageError(
                    f"elements of the destination overlap: a dimension has stride {stride}, "
                    f"those within it span {reach} bytes; {_DESTINATION_REMEDY}"
                )
            reach += (length - 1) * stride


def _check(side: str, remedy: str, shape: Sequence[int], strides: Sequence[int]) -> None:
    """Raise UsageError unless each stride that matters is above 0."""
    for axis, (length, stride) in enumerate(zip(shape, strides, strict=True)):
        if length > 1 and stride <= 0:
            what = "is broadcast along" if stride == 0 else "runs backwards along"
            raise UsageError(f"the {side} {what} dimension {axis} (stride {stride}); {remedy}")


def _offsets(loops: tuple[Axis, ...], dst: int, src: int) -> Iterator[tuple[int, int]]:
    """Yield the offset on either side of each repetition."""
    if not loops:
        yield dst, src
        return
    loop, *inner = loops
    for index in range(loop.length):
        yield from _offsets(tuple(inner), dst + index * loop.dst, src + index * loop.src)


def c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Return the strides of an array in C order."""
    if len(shape) == 1:  # most are
        return (itemsize,)
    strides = []
    for length in reversed(shape):
        strides.append(itemsize)
        itemsize *= length
    return tuple(reversed(strides))


def is_contiguous(shape: Sequence[int], itemsize: int, strides: Sequence[int]) -> bool:
    """Whether elements lie one behind the other in C order; so do none, and one."""
    expected = c_strides(shape, itemsize)
    return 0 in shape or all(n == 1 or a == b for n, a, b in zip(shape, strides, expected, strict=True))


def span(shape: Sequence[int], itemsize: int, strides: Sequence[int]) -> int:
    """Return the bytes from the first element of an array to behind its last; 0 if it has none.

    Raises UsageError if a stride is negative, since the first element then is not the lowest.
    """
    if 0 in shape:
        return 0
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    if min(steps, default=0) < 0:
        raise UsageError(f"an array with negative strides {tuple(strides)} reaches below its first element")
    return sum(steps) + itemsize


def overlaps(offset_a: int, span_a: int, offset_b: int, span_b: int) -> bool:
    """Whether two ranges (offset and length in bytes) of one allocation share a byte."""
    return max(offset_a, offset_b) < min(offset_a + span_a, offset_b + span_b)


def check_extent(shape: Sequence[int], itemsize: int, strides: Sequence[int], offset: int, nbytes: int) -> None:
    """Raise UsageError unless an array that begins at ``offset`` lies within an allocation of ``nbytes``."""
    end = offset + span(shape, itemsize, strides)
    if offset < 0 or end > nbytes:
        raise UsageError(f"an array in bytes {offset} to {end} leaves its allocation of {nbytes} bytes")
