"""The small values."""

from __future__ import annotations

from aiooffload.types import Access


def test_access() -> None:
    """Everything but READ may write; the values are what a trace shows."""
    assert [access.writes for access in (Access.READ, Access.WRITE, Access.READ_WRITE)] == [False, True, True]
    assert [access.value for access in Access] == ["in", "out", "inout"]
