"""The collector's settings, in a process of their own: they are the whole process's."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
from aiooffload.service.collector import EVERY, settle_collector

class Node:
    pass

def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)

settle_collector()
assert gc.isenabled() and gc.get_freeze_count() > 1000
first = cycle()
kept = [[] for _ in range(EVERY // 2)]
assert first() is not None  # not looked at yet
kept += [[] for _ in range(EVERY)]
assert first() is None
"""


def test_cycles_are_found_later_and_what_was_there_is_left_alone() -> None:
    """A cycle lives until so many objects have been made, and no longer."""
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=30)
