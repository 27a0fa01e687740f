"""NVTX ranges: the names of operations in the time line of a profiler such as Nsight Systems.

A range stands around the driver calls of an operation, on the loop's thread. Profilers take the kernels and copies
that were enqueued inside for parts of it, and show its name above them on the device's rows, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

__all__ = ["Ranges", "profiler_ranges"]


class Ranges:
    """Ranges of one NVTX domain.

    Parameters
    ----------
    domain
        An ``nvtx.Domain``.
    """

    def __init__(self, domain: Any) -> None:
        self._domain: Final = domain
        # By name: a program has few, and the profiler is told each once.
        self._attributes: dict[str, Any] = {}

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Put what runs inside under ``name``."""
        attributes = self._attributes.get(name)
        if attributes is None:
            attributes = self._attributes[name] = self._domain.get_event_attributes(message=name)
        self._domain.push_range(attributes)
        try:
            yield
        finally:
            self._domain.pop_range()


def profiler_ranges() -> Ranges | None:
    """Return ranges if a profiler is attached that wants them and the package ``nvtx`` is there. Reads files."""
    try:
        import nvtx

        domain = nvtx.get_domain("aiooffload")
        attached = isinstance(domain, nvtx.Domain)
    except (ImportError, AttributeError):  # not installed, or something else of that name
        return None
    return Ranges(domain) if attached else None
