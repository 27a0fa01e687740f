"""Giving things back to a driver that may refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from aiooffload.errors import DeviceLostError, DriverError
from aiooffload.log import log

__all__ = ["close_all"]


def close_all(calls: Iterable[Callable[[], object]]) -> None:
    """Make all ``calls``, each of which gives something back, whatever becomes of the others.

    A refusal is logged: nobody can do more about it. Raises DeviceLostError, after which nothing more is called.
    """
    for call in calls:
        try:
            call()
        except DeviceLostError:
            raise
        except DriverError as error:
            log.warning("the driver failed to take something back", error=repr(error))
