"""What the machine has for a worker, what it lacks, and what to do about it, in an operator's words."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from aiooffload.errors import CompileError, DeviceUnavailableError, DriverError
from aiooffload.kernel import kernel
from aiooffload.offload import Offload
from aiooffload.service.versions import version_of

__all__ = ["Device", "Finding", "as_rows", "devices", "examine", "failed", "judge_environment", "judge_limits"]

_SAMPLES: Final = 300
_IDLE_S: Final = 0.005
_IDLE_SAMPLES: Final = 40
_MOST_DEVICES: Final = 64
_SLICE: Final = "a slice of a GPU (MIG): its queues and copy engines are fewer, and CUDA shows a process one slice only"


@kernel(cuda='extern "C" __global__ void aiooffload_doctor() {}', name="aiooffload_doctor")
def _nothing(launch: object) -> None:
    """Only for the compiler."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    state: str
    """``ok``, ``note``, ``warning`` (it works, worse than it could) or ``failure`` (it does not work)."""
    what: str
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """A device that an Offload can be opened on."""

    label: str
    name: str
    memory_mib: int
    multiprocessors: int
    compute_capability: str
    id: str


def failed(findings: Iterable[Finding]) -> bool:
    """Whether something does not work."""
    return any(finding.state == "failure" for finding in findings)


async def devices() -> list[Device]:
    """Return all devices: the GPUs in the driver's order, then the host."""
    found = []
    for index in range(_MOST_DEVICES):
        try:
            found.append(await _describe(f"cuda:{index}"))
        except DeviceUnavailableError:
            break
    return [*found, await _describe("host")]


async def _describe(label: str) -> Device:
    async with Offload(label, lanes=1) as off:
        properties = off.properties
    return Device(
        properties.label,
        properties.name,
        properties.total_bytes >> 20,
        properties.multiprocessors,
        "{}.{}".format(*properties.compute_capability) if properties.driver == "cuda" else "",
        properties.unique_id,
    )


async def examine(device: str) -> list[Finding]:
    """Look at everything that matters to a worker on ``device``, and measure what can be measured."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    findings = [
        Finding("ok", "versions", f"aiooffload {version_of('aiooffload')}, Python {platform.python_version()}"),
        _driver_version(Path("/proc/driver/nvidia/version")),
        *judge_environment(os.environ, Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))),
        *judge_limits(soft, hard, len(os.sched_getaffinity(0))),
    ]
    try:
        async with Offload(device) as off:
            findings += await _examine_device(off)
    except DriverError as error:
        findings.append(
            Finding("failure", f"device {device}", str(error), "check the driver and the container's GPUs (nvidia-smi)")
        )
    return findings


def _driver_version(path: Path) -> Finding:
    try:
        line = path.read_text(encoding="utf-8").splitlines()[0]
    except (OSError, IndexError):
        return Finding("note", "NVIDIA driver", "none on this machine", "only the host device can be used")
    return Finding("ok", "NVIDIA driver", line.removeprefix("NVRM version:").strip())


def judge_environment(environment: Mapping[str, str], mps: Path) -> Iterator[Finding]:
    """Yield what variables and services do to completions."""
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections is None:
        yield Finding("ok", "hardware queues", "CUDA_DEVICE_MAX_CONNECTIONS is not set: 32 are asked for")
    elif connections.isdecimal() and int(connections) >= 16:
        yield Finding("ok", "hardware queues", f"CUDA_DEVICE_MAX_CONNECTIONS={connections}")
    else:
        yield Finding(
            "warning",
            "hardware queues",
            f"CUDA_DEVICE_MAX_CONNECTIONS={connections}",
            "with so few queues a wait for the host holds up kernels: unset it, or set 32",
        )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield Finding(
            "warning",
            "blocking launches",
            "CUDA_LAUNCH_BLOCKING is set",
            "every launch blocks the loop until its kernel ends: unset it",
        )
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and "MIG-" in visible:
        yield Finding("note", "visible GPUs", f"CUDA_VISIBLE_DEVICES={visible!r}", _SLICE)
    elif visible is not None:
        yield Finding("note", "visible GPUs", f"CUDA_VISIBLE_DEVICES={visible!r}", "other GPUs are hidden, on purpose?")
    if mps.exists():
        yield Finding(
            "warning",
            "MPS",
            f"its control pipe is at {mps}",
            "a fault of one client ends the work of all others on that GPU: give each worker a GPU of its own",
        )


def judge_limits(soft: int, hard: int, cpus: int) -> Iterator[Finding]:
    """Yield what the system's limits do to a worker."""
    if 0 <= soft < 4096:
        yield Finding(
            "warning",
            "open files",
            f"at most {soft}",
            f"each connection is one: raise the limit (ulimit -n {4096 if hard < 0 else min(hard, 4096)})",
        )
    else:
        yield Finding("ok", "open files", f"at most {soft if soft >= 0 else 'any number'}")
    if cpus < 2:
        yield Finding(
            "warning", "CPUs", str(cpus), "the front and each device process want one of their own, or they wait for it"
        )
    else:
        yield Finding("ok", "CPUs", str(cpus))


async def _examine_device(off: Offload) -> list[Finding]:
    properties = off.properties
    findings = [Finding("ok", "device", f"{properties.label}: {properties.name}, {properties.total_bytes >> 20} MiB")]
    if " MIG " in properties.name:
        findings.append(Finding("note", "MIG", properties.name, _SLICE))
    fallback = off.stats()["fallback"]
    if fallback:
        advice = "awaits take longer; see the line about hardware queues, and the driver's version"
        findings.append(Finding("warning", "self-test", fallback, advice))
    else:
        findings.append(Finding("ok", "self-test", "lanes run beside a wait, and its wake arrives"))
    if properties.driver == "cuda":
        findings.append(await _compile(off))
    return findings + await _measure(off)


async def _compile(off: Offload) -> Finding:
    try:
        await off.load(_nothing)
    except CompileError as error:
        advice = "kernels given as CUDA source need it: pip install 'aiooffload[compiler]'"
        return Finding("warning", "runtime compiler", str(error), advice)
    return Finding("ok", "runtime compiler", "compiles")


async def _measure(off: Offload) -> list[Finding]:
    """Measure awaits of the least work there is, in a row and after a pause."""
    with off.empty(64, np.uint8) as buffer:
        for _ in range(10):
            await off.fill(buffer, 0)
        row = [await _time_of(off, buffer) for _ in range(_SAMPLES)]
        idle = []
        for _ in range(_IDLE_SAMPLES):
            await asyncio.sleep(_IDLE_S)
            idle.append(await _time_of(off, buffer))
    late = statistics.median(idle)
    woken = Finding("ok", "await after a pause", _percentiles(idle))
    if off.properties.driver == "cuda" and late > 500.0:
        advice = "the CPU sleeps deeply: set its governor to performance, or limit its C-states"
        woken = Finding("warning", "await after a pause", _percentiles(idle), advice)
    return [Finding("ok", "await of a fill", _percentiles(row)), woken]


async def _time_of(off: Offload, buffer: Any) -> float:
    began = time.perf_counter()
    await off.fill(buffer, 0)
    return (time.perf_counter() - began) * 1e6


def _percentiles(samples: list[float]) -> str:
    ordered = sorted(samples)
    return f"p50 {ordered[len(ordered) // 2]:.0f} us, p99 {ordered[len(ordered) * 99 // 100]:.0f} us"


def as_rows(records: Iterable[Finding | Device]) -> list[dict[str, Any]]:
    """Return findings or devices as ``--json`` writes them."""
    return [asdict(record) for record in records]
