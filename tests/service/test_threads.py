"""Which work is left to a thread."""

from __future__ import annotations

import threading

import pytest

from aiooffload.service.threads import THREAD_FROM_NBYTES, maybe_in_thread


@pytest.mark.parametrize("large", [False, True])
async def test_only_large_work_has_a_thread(large: bool) -> None:
    """A small piece of work is done at once, a large one elsewhere."""
    thread = await maybe_in_thread(THREAD_FROM_NBYTES - (not large), threading.current_thread)
    assert (thread is not threading.current_thread()) is large


async def test_exceptions_are_the_callers() -> None:
    """What the work raises is raised, wherever that was."""
    for nbytes in (0, THREAD_FROM_NBYTES):
        with pytest.raises(ValueError, match="invalid literal"):
            await maybe_in_thread(nbytes, int, "x")
