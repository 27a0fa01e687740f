"""What the cyclic garbage collector looks at in a process that serves, and how often."""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["settle_collector"]

EVERY: Final = 20_000
"""New objects, less those that are gone. A request makes no cycles unless it fails; Python's 700 would have a few dozen
requests in flight looked at again with every few more."""


def settle_collector() -> None:
    """Leave alone what is there now, which stays, and look at the rest less often."""
    gc.freeze()
    gc.set_threshold(EVERY, *gc.get_threshold()[1:])
