"""Where mapped arguments go in host memory, and what is copied."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aiooffload.rules.mapping import ALIGNMENT, place
from aiooffload.rules.wire import MapKind

BASE = 1 << 40
arguments = st.lists(
    st.tuples(st.integers(0, 2000).map(lambda n: BASE + n), st.integers(0, 500), st.sampled_from(MapKind)), max_size=8
)


def test_one_argument_is_the_whole_block() -> None:
    """A single argument begins at 0, and its kind says what is copied."""
    for kind, inward, outward in (
        (MapKind.ALLOC, 0, 0),
        (MapKind.TO, 1, 0),
        (MapKind.FROM, 0, 1),
        (MapKind.TOFROM, 1, 1),
    ):
        layout = place([(BASE, 100, kind)])
        assert (layout.nbytes, layout.offsets) == (100, [0])
        assert layout.inward == [(BASE, 0, 100)] * inward
        assert layout.outward == [(BASE, 0, 100)] * outward


def test_nothing_is_copied_of_zero_bytes() -> None:
    """Zero bytes are legal: there is a block, and nothing to copy."""
    for count in (0, 1, 2):
        layout = place([(0, 0, MapKind.TOFROM)] * count)
        assert layout.nbytes >= 1
        assert (layout.inward, layout.outward) == ([], [])


def test_the_same_range_twice_is_copied_once() -> None:
    """Two arguments that are the same memory share it on the host, and it is copied once in each direction."""
    layout = place([(BASE, 64, MapKind.TOFROM), (BASE, 64, MapKind.TOFROM)])
    assert layout.offsets[0] == layout.offsets[1]
    assert layout.inward == layout.outward == [(BASE, layout.offsets[0], 64)]


def test_a_part_shares_the_memory_of_the_whole() -> None:
    """A range within another lies within it on the host, whichever comes first."""
    whole, part = (BASE, 1000, MapKind.TO), (BASE + 8, 16, MapKind.FROM)
    for order in ([whole, part], [part, whole]):
        layout = place(order)
        at = dict(zip(order, layout.offsets, strict=True))
        assert at[part] == at[whole] + 8
        assert layout.inward == [(BASE, at[whole], 1000)]
        assert layout.outward == [(BASE + 8, at[part], 16)]


@given(arguments)
def test_layout_is_sound(mapped: list[tuple[int, int, MapKind]]) -> None:
    """All lie within the block; only what is the same device memory, or lies within it, shares host memory."""
    layout = place(mapped)
    spans = list(zip(mapped, layout.offsets, strict=True))
    for (address, nbytes, _), offset in spans:
        assert 0 <= offset <= offset + nbytes <= max(layout.nbytes, 1)
        for (other, extent, _), place_of_other in spans:
            apart = offset + nbytes <= place_of_other or place_of_other + extent <= offset
            assert apart or place_of_other - offset == other - address


@given(arguments)
def test_copies_are_what_the_kinds_ask_for(mapped: list[tuple[int, int, MapKind]]) -> None:
    """Each byte that is mapped to, or from, is copied in that direction, and no other."""
    layout = place(mapped)
    for copies, kinds in (
        (layout.inward, (MapKind.TO, MapKind.TOFROM)),
        (layout.outward, (MapKind.FROM, MapKind.TOFROM)),
    ):
        wanted = {
            (address + i, offset + i)
            for (address, nbytes, kind), offset in zip(mapped, layout.offsets, strict=True)
            if kind in kinds
            for i in range(nbytes)
        }
        assert {(address + i, offset + i) for address, offset, nbytes in copies for i in range(nbytes)} == wanted


def test_ranges_begin_aligned() -> None:
    """Ranges that are not within one another begin as aligned as device memory does."""
    layout = place([(BASE + 1000 * i, 100 + i, MapKind.TO) for i in range(5)])
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert len(set(layout.offsets)) == 5
