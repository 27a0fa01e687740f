"""Every status of the driver becomes one error class. Needs the bindings, no GPU."""

from __future__ import annotations

import pytest
from cuda.bindings import driver

from aiooffload.drivers.cuda import status as table
from aiooffload.drivers.cuda.status import STATUSES, status_error, status_name, unwrap
from aiooffload.errors import (
    CompileError,
    DeviceLostError,
    DeviceUnavailableError,
    DriverError,
    LaunchError,
    OutOfMemoryError,
)

FAILURES = {name: int(member) for name, member in driver.CUresult.__members__.items() if int(member)}

# After each of these the CUDA documentation says "the process must be terminated and relaunched".
STICKY = (
    *("ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION"),
    *("MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC", "LAUNCH_FAILED", "EXTERNAL_DEVICE"),
)


def test_bindings_name_statuses() -> None:
    """The enumeration that the next test goes through is not empty."""
    assert len(FAILURES) > 90


@pytest.mark.parametrize("name", FAILURES)
def test_every_status_of_the_bindings_is_known(name: str) -> None:
    """The table has each status under the driver's own name and number."""
    assert STATUSES[FAILURES[name]][0] == name


def test_no_status_is_in_two_classes() -> None:
    """A status stands once in the table, so its class does not depend on the order."""
    codes = [code for names in table._BY_CLASS.values() for code in names]
    assert sorted(codes) == sorted(set(codes)) == sorted(STATUSES)


def test_names_are_unique() -> None:
    """No two numbers share a name."""
    names = [name for name, _ in STATUSES.values()]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("code", STATUSES)
def test_error_carries_call_status_and_code(code: int) -> None:
    """The error has the class of the table, and says what failed and how."""
    name, kind = STATUSES[code]
    error = status_error("cuSomething", code, "about the call")
    assert type(error) is kind
    assert (error.operation, error.status, error.code) == ("cuSomething", name, code)
    assert str(error) == f"cuSomething failed with {name} ({code}): about the call"


@pytest.mark.parametrize("name", STICKY)
def test_what_ends_the_process_is_a_lost_device(name: str) -> None:
    """A status after which the driver answers nothing else any more is a DeviceLostError."""
    assert type(status_error("cuStreamQuery", FAILURES[f"CUDA_ERROR_{name}"])) is DeviceLostError


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("OUT_OF_MEMORY", OutOfMemoryError),
        ("NO_DEVICE", DeviceUnavailableError),
        ("SYSTEM_DRIVER_MISMATCH", DeviceUnavailableError),
        ("NOT_FOUND", CompileError),
        ("UNSUPPORTED_PTX_VERSION", CompileError),
        ("LAUNCH_OUT_OF_RESOURCES", LaunchError),
        ("COOPERATIVE_LAUNCH_TOO_LARGE", LaunchError),
        ("INVALID_CLUSTER_SIZE", LaunchError),
        ("INVALID_VALUE", DriverError),
        ("STREAM_CAPTURE_UNSUPPORTED", DriverError),
    ],
)
def test_class_of_well_known_statuses(name: str, kind: type[DriverError]) -> None:
    """What a program has to tell apart has a class of its own."""
    assert type(status_error("cuSomething", FAILURES[f"CUDA_ERROR_{name}"])) is kind


def test_out_of_memory_is_a_memory_error() -> None:
    """Code that knows nothing of this package can catch it."""
    assert isinstance(status_error("cuMemAlloc", 2), MemoryError)


def test_status_of_a_newer_driver() -> None:
    """A status that the table does not know is a plain DriverError with its number."""
    error = status_error("cuSomething", 98_765)
    assert type(error) is DriverError
    assert (error.status, error.code) == (status_name(98_765), 98_765) == ("CUDA_ERROR_98765", 98_765)


def test_unwrap_returns_what_comes_beside_the_status() -> None:
    """One value by itself, several as a tuple, none as None."""
    success = driver.CUresult.CUDA_SUCCESS
    assert unwrap("cuSomething", (success, 7)) == 7
    assert unwrap("cuSomething", (success, 7, 8)) == (7, 8)
    assert unwrap("cuSomething", (success,)) is None


def test_unwrap_raises_the_error_of_the_status() -> None:
    """A failed call raises its class, whatever stands beside the status."""
    with pytest.raises(OutOfMemoryError, match=r"cuMemAlloc failed with CUDA_ERROR_OUT_OF_MEMORY \(2\): 5 bytes"):
        unwrap("cuMemAlloc", (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None), "5 bytes")
