"""The self-test at start: what it finds, the fallback it leads to, and the one warning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import structlog

import aiooffload as ao
from aiooffload.drivers.mapped import MappedMemory
from aiooffload.testing import FaultyDevice, open_offload
from tests.kernels import Spy, SpyDevice, add, nothing, rig


@pytest.fixture
def logged() -> Iterator[list[dict[str, Any]]]:
    """What is logged."""
    with structlog.testing.capture_logs() as lines:
        yield lines


class OneQueue(SpyDevice):
    """A device with one hardware queue: while the monitor waits for the bell, no stream goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = MappedMemory(4096)
        self.bell: Any = None
        self.streams: list[Any] = []

    def _call(self, owner: Any, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if name == "create_stream":
            result = super()._call(owner, name, call, args)
            self.streams.append(result.inner)
            return result
        if name == "enqueue_wait":
            for stream in self.streams:
                if stream is not owner:
                    stream.enqueue_wait(*args)
        return super()._call(owner, name, call, args)


async def test_stalling_lanes(logged: list[dict[str, Any]]) -> None:
    """Where an armed wait stalls the lanes, one warning names cause and cure, and everything works by events."""
    async with rig(OneQueue(), lanes=2) as r:
        assert "stalls" in r.off.stats()["fallback"]
        word = r.word(1)
        for _ in range(10):
            r.launch(add, word, 1)
            await r.launch(nothing)
        assert await r.read(word) == 11
        armings = r.off.stats()["armings"]
        assert armings == 1
    warnings = [line for line in logged if line["log_level"] == "warning"]
    assert len(warnings) == 1
    assert "stalls" in warnings[0]["cause"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in warnings[0]["cure"]


async def test_device_without_memory_operations(logged: list[dict[str, Any]]) -> None:
    """Without memory operations nothing is tried, one warning says so, and everything works by events."""
    from aiooffload.drivers.host import HostDevice

    async with rig(HostDevice(memory_operations=False), lanes=2) as r:
        assert r.off.stats()["fallback"]
        word = r.word(1)
        r.launch(add, word, 1)
        assert await r.read(word) == 2
    assert len([line for line in logged if line["log_level"] == "warning"]) == 1


async def test_wake_that_never_arrives(logged: list[dict[str, Any]]) -> None:
    """A wake that does not arrive leads to the fallback, and closing does not wait for it."""
    device = SpyDevice()
    device.swallowed.add("enqueue_wake")
    async with rig(device, lanes=2, bury=True) as r:
        assert "wake" in r.off.stats()["fallback"]
        await r.launch(nothing)
    assert len([line for line in logged if line["log_level"] == "warning"]) == 1


async def test_healthy_device_warns_of_nothing(device_label: str, logged: list[dict[str, Any]]) -> None:
    """On a healthy device there is no fallback and no warning, and nothing stays armed."""
    async with rig(device_label) as r:
        assert r.off.stats()["fallback"] == ""
        assert r.off._engine is not None
        assert not r.off._engine.completion.armed
        assert r.off.stats()["in_flight"] == 0
    assert logged == []


async def test_self_test_that_raises_closes_the_device() -> None:
    """When the self-test cannot be run, opening raises and leaves nothing behind."""
    device = SpyDevice()
    device.failures["selftest_function"] = ao.DriverError("no module")
    with pytest.raises(ao.DriverError, match="no module"):
        await ao.Offload()._enter(device)
    assert "close" in device.calls
    assert isinstance(device, Spy)


@pytest.mark.parametrize("call", ["plan", "enqueue_kernel", "enqueue_write"])
@pytest.mark.parametrize("at", [1, 2])
async def test_self_test_that_is_refused(call: str, at: int, logged: list[dict[str, Any]]) -> None:
    """When a lane's kernel is refused with the monitor armed, opening raises that, and waits for no deadline."""
    device = FaultyDevice()
    device.fail(call, ao.LaunchError, at=at)
    with pytest.raises(ao.LaunchError):
        async with open_offload(device, lanes=2):
            raise AssertionError("it was opened")
    assert device.left() == {}
    assert logged == []
