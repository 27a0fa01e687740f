"""What NVML knows of a fault. A stand-in plays NVML; the real one is only held against its names."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cuda.bindings
import pytest

from aiooffload.drivers.cuda.xid import XidWatch


class Nvml:
    """NVML's part: a queue of events, and a note of every call."""

    def __init__(self, events: list[int], refuses: str = "") -> None:
        self.events = list(events)
        self.refuses = refuses
        self.calls: list[str] = []

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.refuses:
            raise RuntimeError("Not Supported")

    def init_v2(self) -> None:
        self._note("init_v2")

    def shutdown(self) -> None:
        self._note("shutdown")

    def event_set_create(self) -> int:
        self._note("event_set_create")
        return 77

    def event_set_free(self, events: int) -> None:
        assert events == 77
        self._note("event_set_free")

    def device_get_handle_by_uuid(self, uuid: str) -> int:
        assert uuid == "GPU-1"
        self._note("device_get_handle_by_uuid")
        return 5

    def device_register_events(self, device: int, kinds: int, events: int) -> None:
        assert (device, kinds, events) == (5, 8, 77)
        self._note("device_register_events")

    def event_set_wait_v2(self, events: int, milliseconds: int) -> Any:
        assert (events, milliseconds) == (77, 0)
        if not self.events:
            raise TimeoutError("Timeout")
        return SimpleNamespace(event_data=self.events.pop(0))


def watch(monkeypatch: pytest.MonkeyPatch, nvml: Nvml) -> XidWatch:
    monkeypatch.setattr(cuda.bindings, "nvml", nvml, raising=False)
    return XidWatch("GPU-1")


def test_nothing_seen_is_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an event the note is empty, and asking does not wait."""
    assert watch(monkeypatch, Nvml([])).note() == ""


def test_note_names_each_xid_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The note has every XID in the order of its first appearance, and tells it only once."""
    watched = watch(monkeypatch, Nvml([31, 43, 31]))
    assert watched.note() == "NVML reports XID 31, 43"
    assert watched.note() == ""


def test_a_storm_of_events_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many events there are, one note takes a bounded number of them."""
    nvml = Nvml([31] * 1000)
    assert watch(monkeypatch, nvml).note() == "NVML reports XID 31"
    assert len(nvml.events) > 900


def test_close_gives_everything_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing frees the events and shuts NVML down; again does nothing; a note afterwards is empty."""
    nvml = Nvml([31])
    watched = watch(monkeypatch, nvml)
    watched.close()
    watched.close()
    assert nvml.calls[-2:] == ["event_set_free", "shutdown"]
    assert nvml.calls.count("shutdown") == 1
    assert watched.note() == ""


@pytest.mark.parametrize(
    "refused", ["init_v2", "event_set_create", "device_get_handle_by_uuid", "device_register_events"]
)
def test_nvml_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch, refused: str) -> None:
    """Where NVML gives no events (containers, MIG), there is no note, and closing is fine."""
    watched = watch(monkeypatch, Nvml([31], refused))
    assert watched.note() == ""
    watched.close()


def test_names_are_those_of_the_bindings() -> None:
    """The installed bindings have every function that is called, if they have NVML at all."""
    nvml = pytest.importorskip("cuda.bindings.nvml")
    names = [name for name in vars(Nvml) if not name.startswith("_")]
    assert [name for name in names if not callable(getattr(nvml, name, None))] == []


@pytest.mark.gpu
def test_well_device_has_no_note() -> None:
    """On a GPU the real NVML is asked, and has nothing to tell."""
    from aiooffload.drivers.cuda import open_device

    device = open_device(0)
    try:
        assert device.properties.unique_id.startswith("GPU-")
        assert device.health_note() == ""
    finally:
        device.close()
