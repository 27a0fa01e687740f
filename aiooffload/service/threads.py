"""What would hold up a loop is left to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

__all__ = ["THREAD_FROM_NBYTES", "maybe_in_thread"]

THREAD_FROM_NBYTES: Final = 256 << 10
"""Work on so many bytes that takes longer than copying them is left to a thread."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


async def maybe_in_thread(nbytes: int, function: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Call a function that works on so many bytes, where the loop can wait for it."""
    if nbytes < THREAD_FROM_NBYTES:
        return function(*arguments, **options)
    return await asyncio.to_thread(function, *arguments, **options)
