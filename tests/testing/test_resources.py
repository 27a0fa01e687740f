"""What a process has open: threads, descriptors and handles that came and did not go."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from aiooffload._native import HostEvent
from aiooffload.testing import resources
from aiooffload.testing.resources import Resources


def test_leaks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread, a descriptor and an event that stayed are named; once they are gone, nothing is."""
    monkeypatch.setattr(resources, "_GRACE_S", 0.0)
    gc.collect()
    before, end = Resources.now(), threading.Event()
    thread = threading.Thread(target=end.wait, name="lingering", daemon=True)
    thread.start()
    descriptor, event = os.eventfd(0), HostEvent()
    found = before.leaks()
    assert sorted(leak.split()[0] for leak in found) == ["1", "file", "thread"]
    assert "thread lingering" in found
    assert "1 events" in found
    end.set()
    thread.join()
    os.close(descriptor)
    event.close()
    assert before.leaks() == []


def test_threads_that_end_soon_are_waited_for() -> None:
    """A thread that is about to end is no leak."""
    before = Resources.now()
    started = threading.Event()
    threading.Thread(target=started.wait, args=(0.05,), daemon=True).start()
    assert before.leaks() == []
