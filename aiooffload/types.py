"""Frozen values and small protocols that every layer may use."""

from __future__ import annotations

import enum

__all__ = ["Access"]


class Access(enum.Enum):
    """What a kernel does with an array argument."""

    READ = "in"
    WRITE = "out"
    READ_WRITE = "inout"

    @property
    def writes(self) -> bool:
        """Whether the kernel may write it."""
        return self is not Access.READ
