"""An allocator of the program's: what is asked of it, what its failures become, and who holds its objects."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.drivers.cuda.allocator import Allocator
from aiooffload.drivers.host import HostDevice
from tests.kernels import add, rig

STREAM = object()


class Memory:
    """What a resource hands out."""

    def __init__(self, handle: int, failure: Exception | None) -> None:
        self.handle = handle
        self.failure = failure
        self.closed_on: list[object] = []

    def close(self, stream: object = None) -> None:
        if self.failure is not None:
            raise self.failure
        self.closed_on.append(stream)


class Resource:
    """A resource that notes what it is asked, and fails on demand."""

    is_device_accessible = True

    def __init__(self, handle: int = 4096) -> None:
        self.handle = handle
        self.failure: Exception | None = None
        self.close_failure: Exception | None = None
        self.asked: list[tuple[int, object]] = []
        self.made: list[weakref.ref[Memory]] = []

    def allocate(self, nbytes: int, *, stream: object) -> Memory:
        self.asked.append((nbytes, stream))
        if self.failure is not None:
            raise self.failure
        memory = Memory(self.handle, self.close_failure)
        self.made.append(weakref.ref(memory))
        return memory


def test_allocates_and_closes_on_the_stream() -> None:
    """Both calls name the stream that carries memory alone; the object is let go of once it is closed."""
    resource = Resource()
    allocator = Allocator(resource, STREAM)
    block = allocator.allocate(1000)
    assert resource.asked == [(1000, STREAM)]
    assert (block.address, block.nbytes, block.host_array) == (4096, 1000, None)
    memory = resource.made[0]()
    assert memory is not None
    allocator.free(block)
    assert memory.closed_on == [STREAM]
    del memory, block
    assert resource.made[0]() is None


def test_what_is_not_closed_is_not_collected() -> None:
    """An object that nobody closes stays, whoever else lets go of it: its end would free memory in use."""
    resource = Resource()
    allocator = Allocator(resource, STREAM)
    block = allocator.allocate(1)
    buffer = block.buffer
    del block
    gc.collect()
    assert resource.made[0]() is buffer
    del buffer
    gc.collect()
    left = resource.made[0]()
    assert left is not None
    assert left.closed_on == []


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: the API call failed"), ao.OutOfMemoryError),
        (MemoryError("std::bad_alloc"), ao.OutOfMemoryError),
        (RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS: it has faulted"), ao.DeviceLostError),
        (RuntimeError("CUDA_ERROR_INVALID_VALUE"), ao.DriverError),
        (RuntimeError("CUDA_ERROR_OF_THE_FUTURE"), ao.DriverError),
        (KeyError("what"), ao.DriverError),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_failures(failure: Exception, kind: type[ao.DriverError]) -> None:
    """What it raises is the cause of the error that the driver's own call would have raised, in both calls."""
    resource = Resource()
    allocator = Allocator(resource, STREAM)
    resource.failure = failure
    with pytest.raises(ao.DriverError) as caught:
        allocator.allocate(1000)
    assert (type(caught.value), caught.value.operation) == (kind, "allocator.allocate")
    assert caught.value.__cause__ is failure
    resource.failure, resource.close_failure = None, failure
    block = allocator.allocate(1000)
    with pytest.raises(kind):
        allocator.free(block)


def test_unaligned_memory_is_given_back() -> None:
    """Memory that is aligned to less than kernels may expect is refused, and closed."""
    resource = Resource(handle=4096 + 128)
    with pytest.raises(ao.UsageError, match="aligned"):
        Allocator(resource, STREAM).allocate(1)
    assert resource.made[0]() is None


def test_host_memory_is_refused() -> None:
    """A resource of host memory raises before anything is allocated."""
    resource = Resource()
    resource.is_device_accessible = False
    with pytest.raises(ao.UsageError, match="not accessible"):
        Allocator(resource, STREAM)


async def test_host_device_takes_none() -> None:
    """The host device refuses an allocator when it is opened, and is closed again."""
    device = HostDevice()
    with pytest.raises(ao.UsageError, match="takes no allocator"):
        async with rig(device, allocator=Resource()):
            pass
    with pytest.raises(ao.ClosedError):
        device.create_stream()


def test_what_is_no_allocator() -> None:
    """What has no allocate() is refused before anything is opened."""
    with pytest.raises(ao.UsageError, match="allocate"):
        ao.Offload("host", allocator=object())


@pytest.mark.gpu
async def test_memory_comes_from_the_resource(request: pytest.FixtureRequest) -> None:
    """Buffers and scratch of a GPU come from the resource that was given, work, and go back to it."""
    from cuda.bindings import driver
    from cuda.core import Device, DeviceMemoryResource, DeviceMemoryResourceOptions

    gpu = Device(0)
    gpu.set_current()  # as cuda.core asks of whoever uses its resources
    request.addfinalizer(lambda: driver.cuCtxSetCurrent(driver.CUcontext(0)))
    resource: Any = DeviceMemoryResource(gpu, DeviceMemoryResourceOptions(max_size=64 << 20))
    async with rig("cuda:0", allocator=resource) as r:
        buffer = await r.off.put(np.arange(1 << 20, dtype=np.uint8))
        assert resource.attributes.used_mem_current >= 1 << 20
        assert np.array_equal(await r.off.get(buffer), np.arange(1 << 20, dtype=np.uint8))
        with pytest.raises(ao.OutOfMemoryError):
            r.off.empty(1 << 30, np.uint8)
        await r.launch(add, ao.Scratch(8 << 20), 1)
        assert resource.attributes.used_mem_current >= 9 << 20
        buffer.close()
        assert (await r.off.get(r.off.zeros(10, np.uint8))).tolist() == [0] * 10
    gpu.sync()
    assert resource.attributes.used_mem_current == 0
