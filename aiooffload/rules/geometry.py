"""Grids, blocks and clusters: normalised to three dimensions and held against a device's limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsIndex, TypeAlias

from aiooffload.errors import UsageError

__all__ = ["Dimensions", "Triple", "check_launch", "triple"]

Triple: TypeAlias = tuple[int, int, int]
Dimensions: TypeAlias = SupportsIndex | Sequence[SupportsIndex]


def triple(value: Dimensions, what: str) -> Triple:
    """Return ``value``, one to three sizes, as three; raises UsageError if any is below 1."""
    try:
        sizes = [size.__index__() for size in (value if isinstance(value, Sequence) else (value,))]
    except (AttributeError, TypeError):
        raise UsageError(f"{what} is an integer or up to three of them, not {value!r}") from None
    if not 1 <= len(sizes) <= 3:
        raise UsageError(f"{what} has 1 to 3 dimensions, not {len(sizes)}")
    if min(sizes) < 1:
        raise UsageError(f"{what} {tuple(sizes)} has a dimension below 1")
    sizes += [1] * (3 - len(sizes))
    return sizes[0], sizes[1], sizes[2]


def check_launch(
    grid: Triple,
    block: Triple,
    shared_bytes: int,
    cluster: Triple | None,
    *,
    max_grid: Triple,
    max_block: Triple,
    max_threads: int,
    max_shared_bytes: int,
) -> None:
    """Raise UsageError, naming the limit, unless a device with these limits can run the launch."""
    for what, sizes, limits in (("grid", grid, max_grid), ("block", block, max_block)):
        if any(size > limit for size, limit in zip(sizes, limits, strict=True)):
            raise UsageError(f"{what} {sizes} is beyond this device's limit of {limits}")
    threads = block[0] * block[1] * block[2]
    if threads > max_threads:
        raise UsageError(f"block {block} has {threads} threads, this device takes {max_threads}")
    if not 0 <= shared_bytes <= max_shared_bytes:
        raise UsageError(f"shared_bytes is 0 to {max_shared_bytes} on this device, not {shared_bytes}")
    if cluster is not None and any(g % c for g, c in zip(grid, cluster, strict=True)):
        raise UsageError(f"grid {grid} is not a multiple of cluster {cluster}")
