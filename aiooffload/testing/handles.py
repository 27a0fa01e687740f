"""How many handles of the library are open: what a test compares before and after."""

from __future__ import annotations

from aiooffload._native import open_handles
from aiooffload.buffer import Lease
from aiooffload.drivers.mapped import registered
from aiooffload.engine.maintenance import barrier

__all__ = ["live_handles"]


def live_handles() -> dict[str, int]:
    """Return how many handles of this process are open, by kind.

    Returns
    -------
    dict
        ``streams`` and ``events`` of any driver, pieces of host memory that are ``registered``, ``leases`` on
        memory of either kind (Buffers, pinned arrays, staging, scratch), ``offloads`` that are open.

    Notes
    -----
    It looks at counters alone and costs about a microsecond. What is held by a reference cycle counts until
    the garbage collector has run.
    """
    streams, events = open_handles()
    return {
        "streams": streams,
        "events": events,
        "registered": len(registered),
        "leases": Lease.count(),
        "offloads": barrier.count(),
    }
