"""Giving back to a driver that refuses: the others go back all the same."""

from __future__ import annotations

import pytest
import structlog

import aiooffload as ao
from aiooffload.engine.closing import close_all


def refusing(error: Exception, done: list[str]) -> object:
    """Return a call that raises, and notes that it was made."""

    def call() -> None:
        done.append(type(error).__name__)
        raise error

    return call


def test_every_call_is_made() -> None:
    """A refusal is logged, with its text, and what comes after it is called; any other exception comes through."""
    done: list[str] = []
    calls = [refusing(ao.DriverError("it is busy"), done), lambda: done.append("last")]
    with structlog.testing.capture_logs() as lines:
        close_all(calls)  # type: ignore[arg-type]
    assert done == ["DriverError", "last"]
    assert ["busy" in line["error"] for line in lines] == [True]
    with pytest.raises(ZeroDivisionError):
        close_all([lambda: 1 / 0])


def test_nothing_is_called_after_a_loss() -> None:
    """A lost device ends it at once."""
    done: list[str] = []
    calls = [refusing(ao.DeviceLostError("it fell off"), done), lambda: done.append("last")]
    with pytest.raises(ao.DeviceLostError):
        close_all(calls)  # type: ignore[arg-type]
    assert done == ["DeviceLostError"]
