"""Where mapped arguments go in host memory, and what is copied: pure arithmetic on ranges.

Arguments of one call that overlap share memory, so a handler that changes the one sees it in the
other, as a kernel would. Each is copied as it asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from aiooffload.rules.wire import MapKind

__all__ = ["Layout", "place"]

ALIGNMENT: Final = 256
"""Of each range, in bytes, as device memory has it."""


_INWARD: Final = (MapKind.TO, MapKind.TOFROM)
_OUTWARD: Final = (MapKind.FROM, MapKind.TOFROM)


class Layout(NamedTuple):
    """Offsets in one block of host memory."""

    nbytes: int
    """Size of the block."""
    offsets: list[int]
    """Where each argument begins."""
    inward: list[tuple[int, int, int]]
    """(device address, offset, bytes) to copy to the host before the function runs."""
    outward: list[tuple[int, int, int]]
    """The same, to copy back after it."""


def place(arguments: Sequence[tuple[int, int, MapKind]]) -> Layout:
    """Lay out arguments (device address, bytes, kind); zero bytes are legal, and lie anywhere."""
    if len(arguments) == 1:
        ((address, nbytes, kind),) = arguments
        whole = [(address, 0, nbytes)] if nbytes else []
        inward, outward = kind in _INWARD, kind in _OUTWARD
        return Layout(max(nbytes, 1), [0], whole if inward else [], whole if outward else [])
    placed = [0] * len(arguments)
    base = limit = offset = end = 0  # of the range at hand: device addresses, and where it is on the host
    for index in sorted(range(len(arguments)), key=lambda i: arguments[i][0]):
        address, nbytes, _ = arguments[index]
        if nbytes == 0:
            continue
        if address >= limit:
            base = limit = address
            offset = -(-end // ALIGNMENT) * ALIGNMENT
        placed[index] = offset + address - base
        limit = max(limit, address + nbytes)
        end = offset + limit - base
    return Layout(max(end, 1), placed, _copies(arguments, placed, _INWARD), _copies(arguments, placed, _OUTWARD))


def _copies(
    arguments: Sequence[tuple[int, int, MapKind]], placed: list[int], kinds: tuple[MapKind, ...]
) -> list[tuple[int, int, int]]:
    """Return (address, offset, bytes) of what is copied, each byte once where ranges are the same."""
    wanted = {
        (address, offset, nbytes)
        for (address, nbytes, kind), offset in zip(arguments, placed, strict=True)
        if kind in kinds and nbytes
    }
    return sorted(wanted)
