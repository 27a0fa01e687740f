"""Host streams of another device of the process; what they have in common with a GPU's is in the conformance suite."""

from __future__ import annotations

import pytest

from aiooffload._native import Word
from aiooffload.drivers.host import HostDevice
from aiooffload.errors import DriverError, UsageError
from tests.drivers.support import Kernel, open_rig, until


def test_stream_of_another_device_object() -> None:
    """Any open host device's stream can be adopted, and none after its device has closed."""
    first, second = HostDevice(), HostDevice()
    stream = first.create_stream()
    adopted = second.adopt_stream(stream.handle)
    assert adopted.handle == stream.handle
    assert adopted.query()
    first.close()
    with pytest.raises(UsageError, match="no host stream"):
        second.adopt_stream(stream.handle)
    second.close()


@pytest.mark.parametrize("handle", [0, 1, 2**63])
def test_unknown_handles(handle: int) -> None:
    """There is no default stream, and no stream of a number that nobody has."""
    device = HostDevice()
    with pytest.raises(UsageError, match="no host stream"):
        device.adopt_stream(handle)
    device.close()


def test_without_memory_operations() -> None:
    """A device whose streams cannot write words adopts streams that cannot."""
    device, owner = HostDevice(memory_operations=False), HostDevice()
    stream = owner.create_stream()
    adopted = device.adopt_stream(stream.handle)
    with pytest.raises(DriverError, match="memory operations"):
        adopted.enqueue_mark(1)
    adopted.close()
    stream.enqueue_record(owner.create_event())  # it is still its owner's
    owner.close()
    device.close()


def test_failure_is_there_before_the_mark() -> None:
    """An exception of a kernel is in its operation when the adopted stream's mark has arrived."""
    device = HostDevice()
    with open_rig(device, {}) as rig:

        def broken(launch: object) -> None:
            raise KeyError("broken")

        rig.functions["broken"] = device.load(Kernel("broken", None, broken), None)
        stream = device.adopt_stream(rig.lane().stream.handle)
        slot, bell = rig.word(), rig.word()
        stream.bind_marks(slot, bell)
        plan = rig.functions["broken"].plan((1, 1, 1), (1, 1, 1), 0, None, False)
        operation = type(rig.launch(rig.lanes[0], Kernel("broken")))(rig.loop)
        stream.enqueue_kernel(plan, rig.functions["broken"].prepare(plan, []), operation, 1)
        until(lambda: _load(slot) == 1, "the mark arrives")
        assert isinstance(operation.failure, Exception)
        assert _load(bell) == 1
    device.close()


def _load(word: Word) -> int:
    return word.load()
