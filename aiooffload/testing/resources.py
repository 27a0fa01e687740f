"""What a process has open, to be compared before and after."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from dataclasses import dataclass
from typing import Final

from aiooffload.testing.handles import live_handles

__all__ = ["Resources"]

_GRACE_S: Final = 2.0
_LOOK_AGAIN_S: Final = 0.001


@dataclass(frozen=True)
class Resources:
    """Threads, file descriptors and handles of the library."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    """Each with what it stands for."""
    handles: dict[str, int]

    @classmethod
    def now(cls) -> Resources:
        """Look at this process."""
        return cls(frozenset(threading.enumerate()), _descriptors(), live_handles())

    def leaks(self) -> list[str]:
        """Return in words what is there now and was not when this was taken.

        Threads that are about to end get two seconds for it, and cycles are collected. It blocks meanwhile.
        """
        deadline = time.monotonic() + _GRACE_S
        for thread in threading.enumerate():
            if thread not in self.threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        found = self._since()
        if found:
            gc.collect()
            found = self._since()
        while found and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)  # threads that threading does not know tell nobody when they end
            found = self._since()
        return found

    def _since(self) -> list[str]:
        now = Resources.now()
        found = [f"thread {thread.name}" for thread in now.threads - self.threads]
        found += [f"file descriptor {entry}" for entry in now.descriptors - self.descriptors]
        grown = {kind: count - self.handles[kind] for kind, count in now.handles.items()}
        return found + [f"{count} {kind}" for kind, count in grown.items() if count > 0]


def _descriptors() -> frozenset[str]:
    """Return the open descriptors, less what a GPU's driver opens for good."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.add(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
    return frozenset(entry for entry in found if "/dev/nvidia" not in entry)
