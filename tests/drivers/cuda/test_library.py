"""Finding the driver: missing, without a device, too old, broken. A stub library stands in for it."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from aiooffload.drivers import open_device
from aiooffload.drivers.cuda import library
from aiooffload.errors import DeviceUnavailableError

ROOT = Path(__file__).resolve().parents[3]

# As much of a driver as is asked for before it is used; what it answers comes from the environment.
STUB = """
#include <stdlib.h>
static int connections;
static int number(const char *name) { const char *text = getenv(name); return text ? atoi(text) : 0; }
int cuInit(unsigned flags)
{
    (void)flags;
    connections = number("CUDA_DEVICE_MAX_CONNECTIONS");
    return number("STUB_INIT");
}
int cuDeviceGetCount(int *count) { *count = number("STUB_COUNT"); return number("STUB_COUNT_STATUS"); }
int cuDriverGetVersion(int *version) { *version = number("STUB_VERSION"); return 0; }
int stub_connections(void) { return connections; }
"""

PROGRAM = """
import asyncio, ctypes, json, os, sys
import aiooffload as ao

async def main():
    try:
        async with ao.Offload(sys.argv[1], lanes=1) as off:
            return {"device": off.properties.label}
    except ao.OffloadError as error:
        fields = {name: getattr(error, name, None) for name in ("operation", "status", "code")}
        return {"error": type(error).__name__, "text": str(error), **fields}

found = asyncio.run(main())
found["connections"] = ctypes.CDLL("libcuda.so.1").stub_connections()
print("RESULT", json.dumps(found))
"""


@functools.cache
def stub_folder() -> Path:
    """Build the stub once; the folder stays until the process ends."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build a stub driver with")
    holder = tempfile.TemporaryDirectory(prefix="aiooffload-stub-")
    folder = Path(holder.name)
    (folder / "stub.c").write_text(STUB)
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "stub.c"]
    subprocess.run(command, cwd=folder, check=True)
    _keep.append(holder)
    return folder


_keep: list[tempfile.TemporaryDirectory[str]] = []


def open_on_stub(device: str, **environment: object) -> dict[str, Any]:
    """Open ``device`` in a process whose driver is the stub; return what came of it."""
    settings = os.environ | {name: str(value) for name, value in environment.items()}
    if "CUDA_DEVICE_MAX_CONNECTIONS" not in environment:
        settings.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    settings["LD_LIBRARY_PATH"] = str(stub_folder())
    command = [sys.executable, "-c", PROGRAM, device]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=50, check=False)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    result: dict[str, Any] = json.loads(lines[0])
    return result


# No driver


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_LIBRARY", "libcuda-of-nobody.so.1")


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_there_is_no_device() -> None:
    """Counting says 0 and raises nothing."""
    assert library.count_devices() == 0


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_the_error_says_what_to_install() -> None:
    """Opening a GPU without a driver says what to install, and what to use instead."""
    with pytest.raises(DeviceUnavailableError, match="install NVIDIA's driver, release 580 or newer") as caught:
        open_device("cuda:0")
    assert "libcuda-of-nobody.so.1" in str(caught.value)
    assert '"host"' in str(caught.value)


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_auto_is_the_host() -> None:
    """Where no driver exists, "auto" is the host device."""
    device = open_device("auto")
    assert device.properties.label == "host"
    device.close()


# A driver without a device


@pytest.mark.parametrize("answer", [{"STUB_INIT": 100}, {"STUB_COUNT": 0}])
def test_auto_is_the_host_where_the_driver_has_no_device(answer: dict[str, int]) -> None:
    """A driver that finds no GPU is no error for "auto", however it says so."""
    assert open_on_stub("auto", **answer)["device"] == "host"


@pytest.mark.parametrize("answer", [{"STUB_INIT": 100}, {"STUB_COUNT": 0}])
def test_no_device_is_named(answer: dict[str, int]) -> None:
    """Asking for a GPU that does not exist says that there is none."""
    found = open_on_stub("cuda:0", **answer)
    assert found["error"] == "DeviceUnavailableError"
    assert "no device cuda:0" in found["text"]
    assert "finds none" in found["text"]


def test_index_beyond_the_devices() -> None:
    """Asking for a GPU beyond the last says which ones exist."""
    found = open_on_stub("cuda:5", STUB_COUNT=2, STUB_VERSION=13_000)
    assert found["error"] == "DeviceUnavailableError"
    assert "no device cuda:5" in found["text"]
    assert "cuda:0 to cuda:1" in found["text"]


# A broken driver


@pytest.mark.parametrize(
    ("status", "name"),
    [
        (3, "CUDA_ERROR_NOT_INITIALIZED"),
        (802, "CUDA_ERROR_SYSTEM_NOT_READY"),
        (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE"),
        (999, "CUDA_ERROR_UNKNOWN"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_broken_driver_is_an_error(device: str, status: int, name: str) -> None:
    """A driver that is there and does not initialise raises, also for "auto", and names the status."""
    found = open_on_stub(device, STUB_INIT=status, STUB_COUNT=1, STUB_VERSION=13_000)
    assert found.get("error") == "DeviceUnavailableError", found
    assert (found["operation"], found["status"], found["code"]) == ("cuInit", name, status)
    assert "cannot be used" in found["text"]


def test_driver_that_cannot_count_is_an_error() -> None:
    """A driver that initialises but cannot count its devices is broken, also for "auto"."""
    found = open_on_stub("auto", STUB_COUNT_STATUS=999)
    assert found.get("error") == "DeviceUnavailableError", found
    assert (found["operation"], found["code"]) == ("cuDeviceGetCount", 999)


# A driver that is too old


@pytest.mark.parametrize("device", ["auto", "cuda:0"])
def test_old_driver_is_an_error(device: str) -> None:
    """A driver before CUDA 13.0 raises, also for "auto", and the error says what to install."""
    found = open_on_stub(device, STUB_COUNT=1, STUB_VERSION=12_080)
    assert found["error"] == "DeviceUnavailableError"
    assert "supports CUDA 12.8" in found["text"]
    assert "release 580" in found["text"]


def test_driver_without_an_entry_point_is_too_old() -> None:
    """A driver that lacks what the launch path needs raises, and the error names it."""
    found = open_on_stub("cuda:0", STUB_COUNT=1, STUB_VERSION=13_000)
    assert found["error"] == "DeviceUnavailableError"
    assert "the CUDA driver has no cu" in found["text"]


@pytest.mark.parametrize("version", [13_000, 13_010, 14_020])
def test_new_drivers_pass(version: int) -> None:
    """CUDA 13.0 and whatever comes later is new enough."""
    library.check_version(version)


@pytest.mark.parametrize("version", [0, 11_040, 12_090, 12_999])
def test_old_drivers_do_not_pass(version: int) -> None:
    """Whatever came before CUDA 13.0 is refused."""
    with pytest.raises(DeviceUnavailableError, match="too old"):
        library.check_version(version)


# The environment


def test_connections_are_asked_for_before_the_driver_initialises() -> None:
    """Where nobody set CUDA_DEVICE_MAX_CONNECTIONS, the driver finds 32 there."""
    assert open_on_stub("auto", STUB_COUNT=0)["connections"] == 32


def test_connections_that_somebody_set_are_respected() -> None:
    """A value that is set already is left alone."""
    assert open_on_stub("auto", STUB_COUNT=0, CUDA_DEVICE_MAX_CONNECTIONS=4)["connections"] == 4
