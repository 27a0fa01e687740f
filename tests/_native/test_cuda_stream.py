"""``cuda_stream.c``: what the conformance tests in tests/drivers do not ask of streams on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiooffload._native import CudaEvent, CudaStream, LaunchPlan, Operation, Word, cuda_initialise

# In a process of its own: what is initialised in this one stays so.
UNINITIALISED = """
from aiooffload._native import {type_name}
try:
    {type_name}{arguments}
except RuntimeError as error:
    assert "cuda_initialise" in str(error), error
else:
    raise SystemExit("it was made without a driver")
"""


@pytest.mark.parametrize(("type_name", "arguments"), [("CudaEvent", "(8,)"), ("CudaStream", "(8, 8)")])
def test_nothing_is_made_before_the_driver_is_resolved(type_name: str, arguments: str) -> None:
    """Without cuda_initialise() there are no entry points: RuntimeError, not a jump to nowhere."""
    program = UNINITIALISED.format(type_name=type_name, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_driver_is_named() -> None:
    """cuda_initialise() says which library is missing where there is no driver."""
    program = """
import ctypes
from aiooffload._native import cuda_initialise
try:
    ctypes.CDLL("libcuda.so.1")
except OSError:
    try:
        cuda_initialise(lambda entry_point, status: RuntimeError())
    except RuntimeError as error:
        assert "libcuda.so.1" in str(error), error
    else:
        raise SystemExit("a driver that is not there was resolved")
else:
    # A driver, or a stub of it that lacks nothing: it is resolved, or what it lacks is named.
    try:
        cuda_initialise(lambda entry_point, status: RuntimeError())
    except RuntimeError as error:
        assert "the CUDA driver has no cu" in str(error), error
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "arguments"), [(CudaEvent, ()), (CudaEvent, ("8",)), (CudaStream, ()), (CudaStream, (None,))]
)
def test_handles_are_integers(kind: type[Any], arguments: tuple[Any, ...]) -> None:
    """Missing handles and handles that are no integers raise TypeError."""
    with pytest.raises(TypeError):
        kind(*arguments)


# -- on a GPU ------------------------------------------------------------------------------


@pytest.fixture
def driver() -> Any:
    from cuda.bindings import driver

    return driver


@pytest.fixture
def device(driver: Any) -> Iterator[Any]:
    from aiooffload.drivers.cuda.device import CudaDevice

    opened = CudaDevice(0)
    yield opened
    opened.close()


@pytest.fixture
def stream(device: Any) -> Iterator[CudaStream]:
    made = device.create_stream()
    yield made
    if made.handle:
        made.close()


def current(driver: Any) -> int:
    status, context = driver.cuCtxGetCurrent()
    assert status == 0
    return int(context)


def set_current(driver: Any, context: int) -> None:
    (status,) = driver.cuCtxSetCurrent(context)
    assert status == 0


def calls(device: Any, stream: CudaStream, word: Word) -> dict[str, Any]:
    """Every call on a stream or event that ends by itself."""
    event = device.create_event()
    return {
        "event creation": lambda: device.create_event().close(),
        "enqueue_mark": lambda: stream.enqueue_mark(3),
        "enqueue_write": lambda: stream.enqueue_write(word, 1),
        "enqueue_wait": lambda: stream.enqueue_wait(word, 1),
        "enqueue_record": lambda: stream.enqueue_record(event),
        "enqueue_wait_event": lambda: stream.enqueue_wait_event(event),
        "query": stream.query,
        "event query": event.query,
        "event close": event.close,
    }


@pytest.mark.gpu
@pytest.mark.parametrize("has_context", [True, False])
def test_the_current_context_is_left_as_found(driver: Any, device: Any, stream: CudaStream, has_context: bool) -> None:
    """No call changes the context that is current, and none needs one: not even that there is none changes."""
    memory = device.register(4096)
    slot, bell = memory.word(0), memory.word(8)
    stream.bind_marks(slot, bell)
    before = current(driver)
    wanted = int(device._context) if has_context else 0
    set_current(driver, wanted)
    try:
        for name, call in calls(device, stream, bell).items():
            call()
            assert current(driver) == wanted, name
    finally:
        set_current(driver, before)
    while not stream.query():
        pass
    assert slot.load() == 3
    device.unregister(memory)


@pytest.mark.gpu
def test_a_look_leaves_a_capture_alone(driver: Any, device: Any, stream: CudaStream) -> None:
    """While this thread captures in global mode, a look neither fails nor ends the capture, and its mode stays."""
    with device.current():
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        status, captured = driver.cuStreamCreate(flags)
        assert status == 0
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        event = device.create_event()
        assert driver.cuThreadExchangeStreamCaptureMode(mode)[0] == 0
        (status,) = driver.cuStreamBeginCapture(captured, mode)
        assert status == 0
        try:
            assert stream.query()
            assert event.query()
            status, active = driver.cuStreamIsCapturing(captured)
            assert (int(status), int(active)) == (0, 1)
            status, found = driver.cuThreadExchangeStreamCaptureMode(mode)
            assert (int(status), found) == (0, mode)
        finally:
            status, graph = driver.cuStreamEndCapture(captured)
            event.close()
            driver.cuStreamDestroy(captured)
        assert status == 0
        driver.cuGraphDestroy(graph)


@pytest.mark.gpu
def test_a_closed_stream_refuses(device: Any, stream: CudaStream) -> None:
    """After close(), which may be called twice, nothing goes to the default stream by accident."""
    memory = device.register(4096)
    word = memory.word(0)
    stream.bind_marks(word, word)
    stream.close()
    stream.close()
    assert stream.handle == 0
    attempts = [
        lambda: stream.enqueue_mark(1),
        lambda: stream.enqueue_write(word, 1),
        lambda: stream.enqueue_wait(word, 1),
        lambda: stream.enqueue_wake(0),
        lambda: stream.enqueue_copy(0, 0, 8),
        lambda: stream.enqueue_copy_box(0, 0, 8, 1, 1, 8, 8, 8, 8),
        lambda: stream.enqueue_fill(0, b"\0", 8),
        stream.query,
    ]
    for attempt in attempts:
        with pytest.raises(RuntimeError, match="closed"):
            attempt()
    device.unregister(memory)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", [b"", b"abc", b"12345678901234567"])
def test_a_pattern_has_a_width_that_the_device_knows(device: Any, stream: CudaStream, pattern: bytes) -> None:
    """Other widths than 1, 2, 4, 8 and 16 bytes raise ValueError."""
    with pytest.raises(ValueError, match="1, 2, 4, 8 or 16"):
        stream.enqueue_fill(0, pattern, 1)


@pytest.mark.gpu
def test_only_open_cuda_events_are_taken(device: Any, stream: CudaStream) -> None:
    """A closed event, or no event at all, raises TypeError."""
    event = device.create_event()
    event.close()
    event.close()
    for wrong in (event, None, 5):
        with pytest.raises(TypeError, match="CudaEvent"):
            stream.enqueue_record(wrong)
        with pytest.raises(TypeError, match="CudaEvent"):
            stream.enqueue_wait_event(wrong)


@pytest.mark.gpu
def test_the_drivers_refusals_become_the_given_exceptions(device: Any, stream: CudaStream) -> None:
    """A status other than success is raised as what the function given to cuda_initialise() makes of it."""
    from aiooffload.drivers.cuda.status import status_error

    seen: list[tuple[str, int]] = []

    def error(entry_point: str, status: int) -> BaseException:
        seen.append((entry_point, status))
        return KeyError(entry_point)

    cuda_initialise(error)
    try:
        plan = LaunchPlan("nothing", 0, None, (1, 1, 1), (1, 1, 1), 0, None, False)  # no function
        with pytest.raises(KeyError):
            stream.enqueue_kernel(plan, b"", Operation(None), 0)  # type: ignore[arg-type]
    finally:
        cuda_initialise(status_error)
    assert seen == [("cuLaunchKernel", 400)]


# What a driver is called with, seen by one that only takes notes

FAKE = r"""
#include <stdio.h>
#include <stdint.h>
#include <stdlib.h>
static int failing(const char *name)
{
    const char *which = getenv("FAIL");
    return which && !strcmp(which, name);
}
int cuCtxPushCurrent_v2(void *context) { dprintf(1, "push %p\n", context); return failing("push"); }
int cuCtxPopCurrent_v2(void **context) { *context = 0; dprintf(1, "pop\n"); return 0; }
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t nbytes, void *stream)
{
    dprintf(1, "copy %#lx %#lx %zu %p\n", to, from, nbytes, stream);
    return failing("copy");
}
/* Words of the structs in cuda.h, of the source and of the destination: (x, y, z, level), type, host, address, array,
   (reserved), pitch, (rows). */
static int copy_words(const char *name, const size_t *w, int dimensions, void *stream)
{
    int type = dimensions == 3 ? 4 : 2, one_side = dimensions == 3 ? 11 : 7;
    dprintf(1, "%s", name);
    for (int side = 0; side < 2; side++, w += one_side) {
        for (int i = 0; i < one_side; i++)
            if (w[i] && (i < type || i == type + 1 || i == type + 3)) dprintf(1, " word %d is %zu", i, w[i]);
        dprintf(1, " %d:%#zx", (int)w[type], w[type + 2]);
        for (int i = type + 4; i < one_side; i++) dprintf(1, ",%zu", w[i]);
    }
    for (int i = 0; i < dimensions; i++) dprintf(1, " %zu", w[i]);
    dprintf(1, " %p\n", stream);
    return failing(name);
}
int cuMemcpy2DAsync_v2(const size_t *copy, void *stream) { return copy_words("2d", copy, 2, stream); }
int cuMemcpy3DAsync_v2(const size_t *copy, void *stream) { return copy_words("3d", copy, 3, stream); }
int cuMemcpy3DPeerAsync(const size_t *copy, void *stream) { return copy_words("3d peer", copy, 3, stream); }
int cuMemcpyPeerAsync(uint64_t to, void *to_context, uint64_t from, void *from_context, size_t nbytes, void *stream)
{
    dprintf(1, "copy peer %#lx@%p %#lx@%p %zu %p\n", to, to_context, from, from_context, nbytes, stream);
    return failing("copy peer");
}
"""
COPYING = """
from aiooffload._native import CudaStream, cuda_initialise
cuda_initialise(lambda name, status: ValueError(f"{name} {status}"))
stream = CudaStream(0x10, 0x20)
stream.enqueue_copy(0x1000, 0x2000, 0)
try:
    stream.enqueue_copy(0x1000, 0x2000, 24)
except ValueError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that has every entry point and writes down those a copy uses."""
    folder = tmp_path_factory.mktemp("driver")
    source = (Path(__file__).resolve().parents[2] / "aiooffload/_native/cuda_stream.c").read_text(encoding="utf-8")
    symbols = re.findall(r'X\(\w+, "(cu\w+)"', source)
    others = [symbol for symbol in symbols if f"int {symbol}(" not in FAKE]
    assert len(symbols) - len(others) == 7
    text = "#include <string.h>\n" + FAKE + "".join(f"int {symbol}(void) {{ abort(); }}\n" for symbol in others)
    (folder / "fake.c").write_text(text, encoding="utf-8")
    command = [os.environ.get("CC") or "cc", "-shared", "-fPIC", "-o", "libcuda.so.1", "fake.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("", ["push 0x20", "copy 0x1000 0x2000 24 0x10", "pop"]),
        ("copy", ["push 0x20", "copy 0x1000 0x2000 24 0x10", "pop", "cuMemcpyAsync 1"]),
        ("push", ["push 0x20", "cuMemcpyAsync 1"]),
    ],
    ids=["well", "copy fails", "context fails"],
)
def test_copies_run_in_the_context_of_their_stream(fake_driver: Path, failing: str, expected: list[str]) -> None:
    """A copy makes its stream's context current and leaves the thread as it was found, also when it fails."""
    assert run_on(fake_driver, failing, COPYING) == expected


def run_on(driver: Path, failing: str, program: str) -> list[str]:
    """Return the lines that a program prints on the driver above, one entry point of which fails."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver), "FAIL": failing, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


BOXES = """
from aiooffload._native import CudaStream, cuda_initialise
cuda_initialise(lambda name, status: ValueError(f"{name} {status}"))
stream = CudaStream(0x10, 0x20)
slices = 12, 3, 2, 16, 20, 64, 100
for box in (12, 3, 1, 16, 20, 48, 60), slices, (0, *slices[1:]), (12, 3, 2, 0, *slices[4:]):
    try:
        stream.enqueue_copy_box(0x1000, 0x2000, *box)
    except ValueError as error:
        print(error)
"""
ROWS = "2d 4:0x2000,20 4:0x1000,16 12 3 0x10"
ROWS_AS_SLICE = "3d 4:0x2000,0,20,3 4:0x1000,0,16,3 12 3 1 0x10"
SLICES = "3d 4:0x2000,0,20,5 4:0x1000,0,16,4 12 3 2 0x10"
REFUSED = "slices have rows, which are a pitch above 0 apart"


@pytest.mark.parametrize(
    ("failing", "expected"),
    [
        ("", ["push 0x20", ROWS, "pop", "push 0x20", SLICES, "pop", REFUSED]),
        ("2d", ["push 0x20", ROWS, ROWS_AS_SLICE, "pop", "push 0x20", SLICES, "pop", REFUSED]),
        (
            "3d",
            ["push 0x20", ROWS, "pop", "push 0x20", SLICES, "pop", "cuMemcpy3DAsync 1", REFUSED],
        ),
        ("push", ["push 0x20", "cuMemcpy2DAsync 1", "push 0x20", "cuMemcpy3DAsync 1", REFUSED]),
    ],
    ids=["well", "rows refused", "slices refused", "context fails"],
)
def test_boxes_are_given_to_the_driver_as_it_lays_them_out(
    fake_driver: Path, failing: str, expected: list[str]
) -> None:
    """Rows are a 2D copy, or a 3D one where that is refused; slices are counted in rows; no rows are no call."""
    assert run_on(fake_driver, failing, BOXES) == expected


PEERS = """
from aiooffload._native import CudaStream, cuda_initialise
cuda_initialise(lambda name, status: ValueError(f"{name} {status}"))
stream = CudaStream(0x10, 0x20)
for copy in (
    lambda: stream.enqueue_copy(0x1000, 0x2000, 24, 48, 32),
    lambda: stream.enqueue_copy(0x1000, 0x2000, 0, 48, 32),
    lambda: stream.enqueue_copy_box(0x1000, 0x2000, 12, 3, 1, 16, 20, 0, 0, 48, 32),
    lambda: stream.enqueue_copy_box(0x1000, 0x2000, 12, 3, 2, 16, 20, 64, 100, 48, 32),
):
    try:
        copy()
    except ValueError as error:
        print(error)
"""
PEER_BYTES = "copy peer 0x1000@0x30 0x2000@0x20 24 0x10"
PEER_ROWS = "3d peer 2:0x2000,32,20,3 2:0x1000,48,16,3 12 3 1 0x10"
PEER_SLICES = "3d peer 2:0x2000,32,20,5 2:0x1000,48,16,4 12 3 2 0x10"


@pytest.mark.parametrize(
    ("failing", "bytes_fail", "box_fails"),
    [("", [], []), ("copy peer", ["cuMemcpyPeerAsync 1"], []), ("3d peer", [], ["cuMemcpy3DPeerAsync 1"])],
    ids=["well", "bytes refused", "boxes refused"],
)
def test_copies_between_devices_name_both(
    fake_driver: Path, failing: str, bytes_fail: list[str], box_fails: list[str]
) -> None:
    """The driver gets the contexts of both sides and device addresses; rows are one slice; no bytes are no call."""
    expected = ["push 0x20", PEER_BYTES, "pop", *bytes_fail]
    for box in (PEER_ROWS, PEER_SLICES):
        expected += ["push 0x20", box, "pop", *box_fails]
    assert run_on(fake_driver, failing, PEERS) == expected
