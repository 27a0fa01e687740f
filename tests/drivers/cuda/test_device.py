"""What is particular to a GPU as a device; what every driver does is in ``tests/drivers/test_conformance.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aiooffload.drivers.api import Device
from aiooffload.errors import CompileError, OutOfMemoryError, UsageError
from tests.drivers.support import SCALE_ADD, STORE, Kernel, Rig, load_all, open_rig, until
from tests.gpu.support import PTX_STORE

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[Device]:
    from aiooffload.drivers.cuda import open_device

    opened = open_device(0)
    yield opened
    opened.close()


@pytest.fixture
def gpu(device: Device) -> Iterator[Rig]:
    with open_rig(device, load_all(device)) as made:
        yield made


def current_context() -> int:
    from cuda.bindings import driver

    status, context = driver.cuCtxGetCurrent()
    assert int(status) == 0
    return int(context)


@contextlib.contextmanager
def foreign_context() -> Iterator[int]:
    """Make a context of somebody else current, as a library does that does not use the primary one."""
    from cuda.bindings import driver

    status, context = driver.cuCtxCreate(None, 0, 0)
    assert int(status) == 0
    try:
        yield int(context)
    finally:
        assert int(driver.cuCtxDestroy(context)[0]) == 0


def everything(rig: Rig) -> list[tuple[str, Callable[[], Any]]]:
    """Every kind of call that the engine makes, by name."""
    device, lane, word, event = rig.device, rig.lane(), rig.word(), rig.event()
    function = rig.functions[STORE.name]
    staging, block = rig.registered(4096), rig.block(4096)
    return [
        ("allocate and free", lambda: device.free(device.allocate(4096))),
        ("register and unregister", lambda: device.unregister(device.register(4096))),
        ("load", lambda: device.load(SCALE_ADD, device.compile(SCALE_ADD))),
        ("plan", lambda: function.plan((1, 1, 1), (1, 1, 1), 60_000, None, False)),
        ("stream", lambda: device.create_stream().close()),
        ("event", lambda: device.create_event().close()),
        ("launch", lambda: rig.launch(lane, STORE, word, 1)),
        ("copy", lambda: lane.stream.enqueue_copy(block.address, staging.device_address, 4096)),
        ("rows", lambda: lane.stream.enqueue_copy_box(block.address, staging.device_address, 8, 9, 1, 24, 16, 0, 0)),
        (
            "slices",
            lambda: lane.stream.enqueue_copy_box(block.address, staging.device_address, 8, 9, 2, 24, 8, 480, 80),
        ),
        ("fill", lambda: lane.stream.enqueue_fill(block.address, b"\x01\x02\x03\x04\x05\x06\x07\x08", 512)),
        ("write", lambda: lane.stream.enqueue_write(word, 3)),
        ("wait", lambda: lane.stream.enqueue_wait(word, 3)),
        ("record", lambda: lane.stream.enqueue_record(event)),
        ("wait for event", lambda: lane.stream.enqueue_wait_event(event)),
        ("mark", lambda: rig.mark(lane)),
        ("query stream", lane.stream.query),
        ("query event", event.query),
        ("check", lambda: device.check(lane.stream)),
        ("memory", device.memory_info),
        ("trim", device.trim),
        ("done", lambda: until(lane.done, "the lane gets done")),
    ]


def test_no_context_stays_none(gpu: Rig) -> None:
    """A thread without a current context has none after any call."""
    assert current_context() == 0
    for name, call in everything(gpu):
        call()
        assert current_context() == 0, name


def test_foreign_context_stays_current(gpu: Rig) -> None:
    """Under another library's current context every call works, and leaves that context current."""
    calls = everything(gpu)
    with foreign_context() as context:
        for name, call in calls:
            call()
            assert current_context() == context, name


def test_two_devices_share_the_primary_context(device: Device) -> None:
    """Opening the same GPU again uses the same context: what one allocated the other may touch."""
    from aiooffload.drivers.cuda import open_device

    other = open_device(0)
    try:
        with open_rig(other, load_all(other)) as rig:
            block = device.allocate(8)
            lane = rig.lane()
            rig.launch(lane, STORE, block.address, 12)
            until(lane.done, "the kernel completes")
            assert rig.read(block.address, 8).view(np.uint64)[0] == 12
            device.free(block)
    finally:
        other.close()


def test_properties_are_the_drivers(device: Device) -> None:
    """The limits are those that the driver reports."""
    from cuda.bindings import driver

    def attribute(name: str) -> int:
        status, value = driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, name), 0)
        assert int(status) == 0
        return int(value)

    limits = device.properties
    major = attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR")
    minor = attribute("CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR")
    assert limits.compute_capability == (major, minor) >= (7, 5)
    assert limits.max_threads_per_block == attribute("CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK")
    assert limits.max_shared_bytes == attribute("CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
    assert limits.multiprocessors == attribute("CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT")
    assert limits.max_grid[0] == attribute("CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X")
    assert limits.max_block[2] == attribute("CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z")
    assert limits.unique_id.startswith("GPU-")
    assert limits.process_wide_faults
    assert limits.spins


def test_out_of_memory_is_typed_and_passes(device: Device) -> None:
    """More than the device has raises OutOfMemoryError, and the next small allocation works."""
    for _ in range(2):
        with pytest.raises(OutOfMemoryError) as caught:
            device.allocate(device.properties.total_bytes + (1 << 30))
        assert caught.value.status == "CUDA_ERROR_OUT_OF_MEMORY"
        block = device.allocate(1 << 20)
        assert block.address % 256 == 0
        device.free(block)


def test_trim_gives_memory_back(device: Device) -> None:
    """What was freed is kept for reuse, up to a limit, and given back by a trim."""
    device.trim()
    before, _ = device.memory_info()
    block = device.allocate(128 << 20)
    held, _ = device.memory_info()
    assert held <= before - (128 << 20)
    device.free(block)
    again = device.allocate(128 << 20)
    device.free(again)

    def given_back() -> bool:
        device.trim()
        return device.memory_info()[0] >= before - (16 << 20)

    until(given_back, "the memory goes back to the device")


def test_allocating_does_not_wait_for_kernels(gpu: Rig) -> None:
    """Allocating, freeing and trimming return while a kernel runs and while a stream waits for the host."""
    held, waiting, gate = gpu.lane(), gpu.lane(), gpu.word()
    latch = gpu.hold(held)
    waiting.stream.enqueue_wait(gate, 1)
    block = gpu.device.allocate(32 << 20)
    gpu.device.free(block)
    gpu.device.trim()
    gpu.device.free(gpu.device.allocate(1 << 20))
    assert not held.done()
    gate.store(1)
    latch.open()
    until(held.done, "the latch kernel ends")


@pytest.mark.parametrize("end", [b"", b"\0"], ids=["unterminated", "terminated"])
def test_ptx_is_loaded(gpu: Rig, end: bytes) -> None:
    """PTX for an older architecture loads, with or without a zero byte at its end."""
    kernel = Kernel("store", image=PTX_STORE + end)
    gpu.functions["ptx"] = gpu.device.load(kernel, gpu.device.compile(kernel))
    assert gpu.functions["ptx"].parameter_sizes == (8, 8)
    lane, word = gpu.lane(), gpu.word()
    gpu.launch(lane, Kernel("ptx"), word, 33)
    until(lane.done, "the kernel completes")
    assert word.load() == 33


@pytest.mark.parametrize(
    ("name", "image"),
    [("store", b"no code at all"), ("store", b"\x7fELF" + bytes(600)), ("missing", PTX_STORE), ("store", b"\0")],
    ids=["text", "damaged ELF", "other name", "nothing"],
)
def test_code_that_cannot_be_loaded(device: Device, name: str, image: bytes) -> None:
    """An image that is none, is damaged, or has no such kernel raises CompileError; the device goes on."""
    kernel = Kernel(name, image=image)
    with pytest.raises(CompileError, match=name):
        device.load(kernel, device.compile(kernel))
    device.load(STORE, device.compile(STORE))


def test_code_that_is_there_is_not_compiled(device: Device) -> None:
    """An image or a loaded kernel is taken as it is; nothing at all is a usage error."""
    assert device.compile(Kernel("store", image=PTX_STORE)) == PTX_STORE
    marker = object()
    assert device.compile(Kernel("store", core=marker)) is marker
    with pytest.raises(UsageError, match="has no CUDA code"):
        device.compile(Kernel("store"))


def test_parameter_sizes_are_those_of_the_code(device: Device) -> None:
    """Structs and small scalars have the sizes that the compiler gave them."""
    source = """struct Pair { char tag; double value; };
    extern "C" __global__ void sizes(char a, short b, Pair c, const void* d, float e) {}"""
    kernel = Kernel("sizes", source)
    assert device.load(kernel, device.compile(kernel)).parameter_sizes == (1, 2, 16, 8, 4)


def test_closed_stream_takes_nothing(device: Device) -> None:
    """A closed stream raises; the driver would take its handle for the default stream."""
    stream = device.create_stream()
    assert stream.handle
    stream.close()
    stream.close()
    for call in (stream.query, lambda: stream.enqueue_mark(1), lambda: stream.enqueue_wake(1)):
        with pytest.raises(RuntimeError, match="closed"):
            call()
