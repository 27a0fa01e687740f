"""``rules/copyplan.py``: plans are carried out on bytes, and held against what NumPy copies."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload.errors import UsageError
from aiooffload.rules.copyplan import (
    MAX_PITCH,
    Axis,
    Plan,
    Step,
    c_strides,
    check_extent,
    is_contiguous,
    overlaps,
    parts,
    plan,
    span,
)

ITEMSIZES = (1, 2, 4, 8, 16)
SMALL_PITCH = 64
STEPS = st.sampled_from([1, 1, 1, 2, 3])
GAPS = st.sampled_from([0, 0, 1])
pitches = st.sampled_from([MAX_PITCH, SMALL_PITCH])


class Side(NamedTuple):
    """An array that is part of an allocation."""

    memory: np.ndarray
    """All bytes of the allocation."""
    view: np.ndarray

    @property
    def offset(self) -> int:
        return self.view.ctypes.data - self.memory.ctypes.data


@st.composite
def side(draw: st.DrawFn, shape: tuple[int, ...], itemsize: int) -> Side:
    """Draw an array of ``shape``: its dimensions in any order in memory, with steps and with gaps around it."""
    order = draw(st.permutations(range(len(shape))))
    dimensions = [(n, *draw(st.tuples(STEPS, GAPS, GAPS))) for n in shape]
    allocated = [before + n * step + after for n, step, before, after in dimensions]
    memory = np.full(math.prod(allocated) * itemsize, 0xFF, np.uint8)
    whole = memory.view(f"V{itemsize}").reshape([allocated[axis] for axis in order]).transpose(np.argsort(order))
    # The ellipsis keeps it a view, also if it has no dimensions.
    view = whole[(..., *(slice(before, before + n * step, step) for n, step, before, _ in dimensions))]
    assert view.shape == shape
    return Side(memory, view)


@st.composite
def copies(draw: st.DrawFn, shortest: int = 0) -> tuple[Side, Side]:
    """Draw a destination and a source of the same shape and item size."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, shortest]), max_size=5)))
    itemsize = draw(st.sampled_from(ITEMSIZES))
    return draw(side(shape, itemsize)), draw(side(shape, itemsize))


def planned(dst: np.ndarray, src: np.ndarray, max_pitch: int = MAX_PITCH) -> Plan:
    return plan(dst.shape, dst.itemsize, dst.strides, src.strides, max_pitch=max_pitch)


def check_copy(steps: Plan, dst: Side, src: Side) -> None:
    """Do on bytes what the driver would, and compare all memory of the destination with what NumPy makes of it."""
    src.memory[:] = np.random.default_rng(0).integers(0, 0xFF, src.memory.size)
    result, source = bytearray(dst.memory), memoryview(src.memory)
    for step in steps:
        for z, y in itertools.product(range(step.depth), range(step.height)):
            to = dst.offset + step.dst_offset + z * step.dst_slice + y * step.dst_pitch
            at = src.offset + step.src_offset + z * step.src_slice + y * step.src_pitch
            assert 0 <= to <= to + step.width <= len(result)
            assert 0 <= at <= at + step.width <= len(source)
            result[to : to + step.width] = source[at : at + step.width]
    dst.view[...] = src.view
    assert result == dst.memory.tobytes()


# What is copied.


@given(copies(), pitches)
def test_plan_copies_what_numpy_copies(sides: tuple[Side, Side], max_pitch: int) -> None:
    """Carrying out a plan does what assigning to the view does, and no byte outside the view changes."""
    dst, src = sides
    check_copy(planned(dst.view, src.view, max_pitch), dst, src)


@given(st.data(), pitches)
def test_overlapping_source_is_copied(data: st.DataObject, max_pitch: int) -> None:
    """The elements of a source may overlap one another, as those of a sliding window do."""
    array = data.draw(
        side(data.draw(st.sampled_from([(9,), (4, 6), (3, 4, 3)])), data.draw(st.sampled_from(ITEMSIZES)))
    )
    window = tuple(data.draw(st.integers(1, n)) for n in array.view.shape)
    src = Side(array.memory, np.lib.stride_tricks.sliding_window_view(array.view, window))
    dst = data.draw(side(src.view.shape, src.view.itemsize))
    steps = planned(dst.view, src.view, max_pitch)
    check_copy(steps, dst, src)
    assert all(legal(step, max_pitch) for step in steps)


@given(copies(), pitches)
def test_steps_copy_each_byte_once(sides: tuple[Side, Side], max_pitch: int) -> None:
    """A plan has as many steps as it says, and they copy as many bytes as there are."""
    dst, src = sides
    steps = planned(dst.view, src.view, max_pitch)
    assert len(list(steps)) == len(steps)
    assert sum(step.width * step.height * step.depth for step in steps) == dst.view.nbytes


# What the driver takes.


def legal(step: Step, max_pitch: int) -> bool:
    """Whether the driver takes ``step``: the conditions of each call, as its manual has them."""
    sides = ((step.dst_pitch, step.dst_slice), (step.src_pitch, step.src_slice))
    if step.dimensions == 1:
        return step.width > 0 and step.height == step.depth == 1
    rows = all(step.width <= pitch <= max_pitch for pitch, _ in sides)
    if step.dimensions == 2:
        return rows and step.depth == 1
    return rows and all(distance % pitch == 0 and distance // pitch >= step.height for pitch, distance in sides)


@given(copies(), pitches)
def test_driver_takes_every_step(sides: tuple[Side, Side], max_pitch: int) -> None:
    """No step breaks a rule about pitches and slices, also where the largest pitch is small."""
    dst, src = sides
    assert all(legal(step, max_pitch) for step in planned(dst.view, src.view, max_pitch))


def test_of_as_many_steps_those_of_closer_rows_are_taken() -> None:
    """Where it does not matter for their number, a step copies what is close together in the destination."""
    (step, *_) = steps = list(plan((8, 8), 4, (32, 4), (4, 32)))
    assert (len(steps), step.dst_pitch, step.src_pitch) == (8, 4, 32)
    strides = np.zeros((3, 3, 3, 3, 3), np.int8).strides
    (step, *_) = steps = list(plan((2, 2, 2, 2, 2), 1, strides, strides))
    assert (len(steps), step.dst_pitch, step.dst_slice) == (4, 3, 9)


def test_unused_sizes_are_those_of_contiguous_memory() -> None:
    """What a call does not take is as if it were contiguous there, so any of the three calls could do it."""
    assert list(plan((4, 5), 8, (40, 8), (40, 8))) == [Step(0, 0, 160, 1, 1, 160, 160, 160, 160)]
    assert list(plan((4, 5), 8, (48, 8), (64, 8))) == [Step(0, 0, 40, 4, 1, 48, 64, 192, 256)]


# How many steps there are.


def volume(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


TABLE: dict[str, tuple[np.ndarray, np.ndarray, int, int]] = {
    # Destination, source; steps, dimensions of each.
    "scalar": (volume(), volume(), 1, 1),
    "contiguous": (volume(3, 4, 5, 6, 7), volume(3, 4, 5, 6, 7), 1, 1),
    "contiguous, both in another order": (volume(3, 4, 5).transpose(1, 2, 0), volume(3, 4, 5).transpose(1, 2, 0), 1, 1),
    "rows of a matrix": (volume(3, 6), volume(8, 6)[2:5], 1, 1),
    "columns of a matrix": (volume(8, 3), volume(8, 6)[:, 1:4], 1, 2),
    "columns of a matrix to columns": (volume(8, 9)[:, 2:5], volume(8, 6)[:, 1:4], 1, 2),
    "one column": (volume(8), volume(8, 6)[:, 1], 1, 2),
    "one column to one row": (volume(6, 8)[1], volume(8, 6)[:, 1], 1, 2),
    "every second element": (volume(10), volume(20)[::2], 1, 2),
    "whole planes of a volume": (volume(3, 5, 7), volume(6, 5, 7)[::2], 1, 2),
    "columns in rows that are merged": (volume(4, 5, 3), volume(4, 5, 7)[..., :3], 1, 2),
    "a box of a volume": (volume(3, 4, 5), volume(6, 8, 10)[1:4, 2:6, 3:8], 1, 3),
    "a box to a box": (volume(9, 6, 7)[2:5, 1:5, 2:7], volume(6, 8, 10)[1:4, 2:6, 3:8], 1, 3),
    "a box in the same permutation": (
        volume(9, 6, 7)[2:5, 1:5, 2:7].transpose(2, 0, 1),
        volume(6, 8, 10)[1:4, 2:6, 3:8].transpose(2, 0, 1),
        1,
        3,
    ),
    "every second element of a matrix": (volume(3, 5), volume(6, 10)[::2, ::2], 1, 3),
    "every second element of a volume": (volume(3, 4, 5), volume(6, 8, 10)[::2, ::2, ::2], 3, 3),
    "a box in four dimensions": (volume(2, 3, 4, 5), volume(9, 6, 8, 10)[1:3, 1:4, 2:6, 3:8], 2, 3),
    "a box in four dimensions, the first longest": (volume(7, 2, 4, 5), volume(9, 6, 8, 10)[1:8, 1:3, 2:6, 3:8], 2, 3),
    "a box in five dimensions": (volume(2, 3, 2, 2, 5), volume(3, 4, 3, 3, 6)[:2, :3, :2, :2, :5], 4, 3),
    "transposed, wide": (volume(3, 8), volume(8, 3).T, 3, 2),
    "transposed, tall": (volume(8, 3), volume(3, 8).T, 3, 2),
    "planes transposed": (volume(4, 5, 6), volume(5, 4, 6).transpose(1, 0, 2), 4, 2),
    "rows, rather than as many in slices": (
        volume(4, 2, 2, 5),
        volume(2, 3, 4, 8)[:, :2, :, :5].transpose(2, 0, 1, 3),
        4,
        2,
    ),
    "slices as far beyond a multiple of the pitch on either side": (
        volume(7, 7, 2)[:6, ::2][:, :3],
        volume(6, 9, 2)[:, ::2][:, :3],
        3,
        2,
    ),
    "slices no multiple of the pitch": (volume(6, 3, 2), volume(6, 7, 2)[:, ::2][:, :3], 3, 2),
    "a window of three": (volume(20, 3), np.lib.stride_tricks.sliding_window_view(volume(22), 3), 3, 2),
    "three windows": (volume(3, 20), np.lib.stride_tricks.sliding_window_view(volume(22), 20), 3, 1),
}


@pytest.mark.parametrize("case", TABLE)
def test_steps_are_fewest(case: str) -> None:
    """Known cases take as few steps as the driver allows, of the dimensions that they have."""
    dst, src, count, dimensions = TABLE[case]
    steps = list(planned(dst, src))
    assert (len(steps), {step.dimensions for step in steps}) == (count, {dimensions})
    assert all(legal(step, MAX_PITCH) for step in steps)


def merges(axes: frozenset[Axis]) -> Iterator[frozenset[Axis]]:
    """Yield ``axes`` with any of them merged, in every way there is."""
    yield axes
    for inner, outer in itertools.permutations(axes, 2):
        if (outer.dst, outer.src) == (inner.dst * inner.length, inner.src * inner.length):
            yield from merges(axes - {inner, outer} | {inner._replace(length=inner.length * outer.length)})


def axes_of(dst: np.ndarray, src: np.ndarray) -> frozenset[Axis]:
    """The item and every dimension of more than one element."""
    axes = map(Axis, (dst.itemsize, *dst.shape), (1, *dst.strides), (1, *src.strides))
    return frozenset(axis for axis in axes if axis.length > 1)


def fewest(nbytes: int, axes: frozenset[Axis]) -> int:
    """Try every width and every choice of rows and slices."""
    best = nbytes
    # A byte at the least; a plan need not have rows or slices.
    for run in (Axis(1, 1, 1), *(axis for axis in axes if axis[1:] == (1, 1))):
        for rows, slices in itertools.product((None, *axes - {run}), repeat=2):
            height, dst_pitch, src_pitch = rows or Axis(1, run.length, run.length)
            depth, dst_slice, src_slice = slices or Axis(1, dst_pitch * height, src_pitch * height)
            step = Step(0, 0, run.length, height, depth, dst_pitch, src_pitch, dst_slice, src_slice)
            if (rows is None or rows != slices) and legal(step, MAX_PITCH):
                best = min(best, nbytes // (step.width * height * depth))
    return best


@given(copies(shortest=1))
def test_one_call_is_found_where_there_is_one(sides: tuple[Side, Side]) -> None:
    """A copy that one call can do, with dimensions merged in whatever way, is planned as one call."""
    dst, src = sides[0].view, sides[1].view
    possible = any(fewest(dst.nbytes, merged) == 1 for merged in merges(axes_of(dst, src)))
    assert (len(planned(dst, src)) == 1) == possible


@given(copies(shortest=1))
def test_no_other_choice_of_merged_dimensions_is_fewer(sides: tuple[Side, Side]) -> None:
    """With all merged that can be, trying every choice finds the same number of steps."""
    dst, src = sides[0].view, sides[1].view
    assert len(planned(dst, src)) == fewest(dst.nbytes, min(merges(axes_of(dst, src)), key=len))


def test_dimensions_left_apart_may_be_fewer() -> None:
    """What the plan does not promise: every second slice of four is a multiple of the pitch on both sides."""
    dst = np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8), (2, 2, 3, 2), (18, 9, 3, 1))
    src = np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8), (2, 2, 3, 2), (14, 7, 2, 1))
    assert len(planned(dst, src)) == 3
    assert min(fewest(dst.nbytes, merged) for merged in merges(axes_of(dst, src))) == 2


@pytest.mark.parametrize(
    ("dst", "src", "count", "dimensions"),
    [
        (volume(8, 16), volume(8, 20)[:, :16], 8, 1),  # both pitches may be 64, one is 80
        (volume(8, 15), volume(8, 16)[:, :15], 1, 2),
        (volume(3, 4, 2), volume(6, 8, 20)[:3, :4, :2], 12, 1),
        (volume(3, 4, 2), volume(6, 8, 10)[:3, :4, :2], 1, 3),  # only the slices are further apart
        (volume(3, 40), volume(5, 40)[::2], 3, 1),
    ],
)
def test_pitch_beyond_the_limit_takes_more_steps(dst: np.ndarray, src: np.ndarray, count: int, dimensions: int) -> None:
    """Rows further apart than the largest pitch are not copied as rows, but one by one."""
    steps = list(planned(dst, src, SMALL_PITCH))
    assert (len(steps), {step.dimensions for step in steps}) == (count, {dimensions})


def test_default_limit_is_that_of_drivers() -> None:
    """A pitch of 2 GiB - 1 is the largest."""
    assert MAX_PITCH == 2**31 - 1
    assert len(plan((5,), 1, (MAX_PITCH,), (1,))) == len(plan((5,), 1, (1,), (MAX_PITCH,))) == 1
    assert len(plan((5,), 1, (MAX_PITCH + 1,), (1,))) == len(plan((5,), 1, (1,), (MAX_PITCH + 1,))) == 5


def test_millions_of_steps_are_counted_without_being_made() -> None:
    """The number of steps is there at once, and so is the first of them."""
    steps = plan((10**6, 10**5, 10), 4, (2 * 10**9, 10**4, 100), (5 * 10**9, 3 * 10**4, 100), max_pitch=64)
    assert len(steps) == 10**12
    three = itertools.islice(steps, 9, 12)
    assert [(step.dst_offset, step.src_offset) for step in three] == [(900, 900), (10_000, 30_000), (10_100, 30_100)]


def test_plan_can_be_iterated_over_again() -> None:
    """Each iteration yields all steps."""
    steps = plan((3, 8), 4, (32, 4), (4, 12))
    assert list(steps) == list(steps)
    assert len(list(steps)) == 3


# What does not matter.


@pytest.mark.parametrize("shape", [(0,), (3, 0, 2), (0, 0)])
def test_nothing_is_copied_of_an_empty_shape(shape: tuple[int, ...]) -> None:
    """A dimension of length 0 leaves no step, whatever the strides are."""
    strides = (-8, 0, 8)[: len(shape)]
    steps = plan(shape, 4, strides, strides)
    assert (len(steps), list(steps), bool(steps)) == (0, [], False)


def test_nothing_is_copied_of_items_without_bytes() -> None:
    """Items of 0 bytes, as of an empty string, leave no step."""
    assert list(plan((3, 4), 0, (0, 0), (0, 0))) == []


@given(copies(shortest=1), st.data())
def test_dimensions_of_one_element_do_not_matter(sides: tuple[Side, Side], data: st.DataObject) -> None:
    """A dimension of length 1 anywhere changes nothing, whatever its strides are."""
    dst, src = sides[0].view, sides[1].view
    at = data.draw(st.integers(0, dst.ndim))
    d, s = data.draw(st.integers(-100, 100)), data.draw(st.integers(-100, 100))
    shape, dst_strides, src_strides = (
        (*values[:at], one, *values[at:]) for values, one in ((dst.shape, 1), (dst.strides, d), (src.strides, s))
    )
    assert plan(shape, dst.itemsize, dst_strides, src_strides) == planned(dst, src)


@given(copies(shortest=1), st.data())
def test_order_of_dimensions_does_not_matter(sides: tuple[Side, Side], data: st.DataObject) -> None:
    """The same permutation of both sides changes nothing."""
    dst, src = sides[0].view, sides[1].view
    order = data.draw(st.permutations(range(dst.ndim)))
    assert planned(dst.transpose(order), src.transpose(order)) == planned(dst, src)


@given(st.data(), pitches)
def test_merging_changes_nothing(data: st.DataObject, max_pitch: int) -> None:
    """A dimension written as two, the one within the other, is planned as the one that it is."""
    shape = tuple(data.draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=4)))
    itemsize = data.draw(st.sampled_from(ITEMSIZES))
    dst, src = (data.draw(side(shape, itemsize)).view for _ in range(2))
    at = data.draw(st.integers(0, len(shape) - 1))
    inner = data.draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if shape[at] % n == 0]))
    divided = (*shape[:at], shape[at] // inner, inner, *shape[at + 1 :])
    dst_strides, src_strides = (
        (*strides[:at], strides[at] * inner, strides[at], *strides[at + 1 :]) for strides in (dst.strides, src.strides)
    )
    assert plan(divided, itemsize, dst_strides, src_strides, max_pitch=max_pitch) == planned(dst, src, max_pitch)


# Parts.


@given(st.lists(st.integers(0, 6), max_size=4), st.sampled_from([1, 3, 8]), st.integers(1, 200))
def test_parts_are_the_array_in_order(shape: list[int], itemsize: int, most: int) -> None:
    """One behind the other the parts are all elements in C order, each part contiguous and not too large."""
    array = np.arange(math.prod(shape)).reshape(shape)
    found = [array[part] for part in parts(shape, itemsize, most)]
    assert np.array_equal(
        np.concatenate([part.reshape(-1) for part in found] or [array.reshape(-1)]), array.reshape(-1)
    )
    assert all(0 < part.size * itemsize <= max(most, itemsize) for part in found)
    assert all(part.flags.c_contiguous for part in found)


def test_parts_are_no_smaller_than_they_have_to_be() -> None:
    """As many inner dimensions are whole as fit, and as many of the next one as fit beside each other."""
    assert len(list(parts((100, 10, 4), 4, 3 * 160))) == 34
    assert list(parts((5, 3), 1, 15)) == [(slice(0, 5), slice(0, 3))]
    assert [part[0] for part in parts((5, 3), 1, 7)] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(parts((), 8, 1)) == [()]


# What is refused.


@pytest.mark.parametrize(
    ("dst_strides", "src_strides", "message"),
    [
        ((20, 4), (-20, 4), r"source runs backwards along dimension 0 \(stride -20\).*np\.ascontiguousarray\(source\)"),
        ((20, -4), (20, 4), r"destination runs backwards along dimension 1 \(stride -4\).*contiguous array first"),
        ((20, 4), (20, 0), r"source is broadcast along dimension 1 \(stride 0\).*np\.ascontiguousarray\(source\)"),
        ((0, 4), (20, 4), r"destination is broadcast along dimension 0 \(stride 0\).*contiguous array first"),
    ],
)
def test_strides_that_are_not_above_zero_are_refused(
    dst_strides: tuple[int, ...], src_strides: tuple[int, ...], message: str
) -> None:
    """A side that runs backwards or is broadcast is refused, and the message says which and what to do."""
    with pytest.raises(UsageError, match=message):
        plan((3, 5), 4, dst_strides, src_strides)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [((5,), (3,)), ((3, 5), (16, 4)), ((3, 5), (4, 4)), ((5, 3), (4, 16)), ((2, 3, 4), (64, 32, 16))],
)
def test_destination_that_overlaps_itself_is_refused(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Elements that would be written twice are refused; as a source the same array is legal."""
    contiguous = np.zeros(shape, np.int32).strides
    with pytest.raises(UsageError, match=r"elements of the destination overlap.*contiguous array first"):
        plan(shape, 4, strides, contiguous)
    assert len(plan(shape, 4, contiguous, strides)) >= 1


def test_destination_may_be_as_close_as_its_elements_allow() -> None:
    """Padding after the last row need not be there: rows may begin right behind the last element of one before."""
    assert len(plan((3, 5), 4, (36, 8), (20, 4))) == 3
    with pytest.raises(UsageError, match="span 36 bytes"):
        plan((3, 5), 4, (35, 8), (20, 4))


def test_shape_and_strides_are_of_the_same_length() -> None:
    """A stride too few or too many is an error of the caller."""
    for strides in ((4,), (20, 4, 1)):
        with pytest.raises(ValueError, match="zip"):
            plan((3, 5), 4, strides, (20, 4))
        with pytest.raises(ValueError, match="zip"):
            plan((3, 5), 4, (20, 4), strides)
        with pytest.raises(ValueError, match="zip"):
            span((3, 5), 4, strides)


# Where an array lies.


@given(copies())
def test_contiguous_is_what_numpy_calls_so(sides: tuple[Side, Side]) -> None:
    """C order and its strides are NumPy's, for arrays of no and of one element as well."""
    view = sides[0].view
    whole = np.empty(view.shape, view.dtype)
    for one in (view, whole):
        assert is_contiguous(one.shape, one.itemsize, one.strides) == one.flags.c_contiguous
    if whole.size:
        assert c_strides(whole.shape, whole.itemsize) == whole.strides


@given(copies())
def test_span_is_from_the_first_byte_to_behind_the_last(sides: tuple[Side, Side]) -> None:
    """The span is the distance between the lowest and the highest address that NumPy has for the array."""
    view = sides[0].view
    low, high = np.lib.array_utils.byte_bounds(view)
    assert span(view.shape, view.itemsize, view.strides) == (high - low if view.size else 0)


def test_span_of_what_is_not_contiguous() -> None:
    """A scalar spans itself, and what is broadcast spans the same bytes however often."""
    assert span((), 8, ()) == 8
    assert span((4, 3), 8, (0, 16)) == 40
    assert span((1,), 8, (-8,)) == 8
    assert span((0, 3), 8, (-8, -8)) == 0
    with pytest.raises(UsageError, match=r"negative strides \(-8,\)"):
        span((2,), 8, (-8,))
    with pytest.raises(UsageError, match="negative strides"):
        span((2, 3), 8, (-8, 16))


@given(*[st.integers(0, 12)] * 4)
def test_ranges_overlap_if_they_share_a_byte(offset_a: int, span_a: int, offset_b: int, span_b: int) -> None:
    """Two ranges overlap if there is a byte in both; one without bytes overlaps nothing."""
    shared = set(range(offset_a, offset_a + span_a)) & set(range(offset_b, offset_b + span_b))
    assert overlaps(offset_a, span_a, offset_b, span_b) == bool(shared)


@given(copies(), st.integers(-3, 3))
def test_array_has_to_lie_within_its_allocation(sides: tuple[Side, Side], change: int) -> None:
    """An array that ends a byte behind its allocation is refused, one that fills it is not."""
    view, offset = sides[0].view, 5
    end = offset + span(view.shape, view.itemsize, view.strides)
    if change < 0:
        with pytest.raises(UsageError, match=f"bytes 5 to {end} leaves its allocation of {end + change} bytes"):
            check_extent(view.shape, view.itemsize, view.strides, offset, end + change)
    else:
        check_extent(view.shape, view.itemsize, view.strides, offset, end + change)


def test_array_does_not_begin_before_its_allocation() -> None:
    """A negative offset is refused, also where the end of the array is within the allocation."""
    check_extent((4,), 4, (4,), 0, 100)
    with pytest.raises(UsageError, match="bytes -1 to 15 leaves"):
        check_extent((4,), 4, (4,), -1, 100)


def test_array_that_runs_backwards_has_no_extent() -> None:
    """Negative strides are refused, since they lead below the first element."""
    with pytest.raises(UsageError, match="below its first element"):
        check_extent((4,), 4, (-4,), 50, 100)
