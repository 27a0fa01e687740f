"""What an operator is told about a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from aiooffload.service.doctor import (
    Device,
    Finding,
    as_rows,
    devices,
    examine,
    failed,
    judge_environment,
    judge_limits,
)


def states(findings: list[Finding]) -> dict[str, str]:
    return {finding.what: finding.state for finding in findings}


@pytest.mark.parametrize(
    ("environment", "what", "state"),
    [
        ({}, "hardware queues", "ok"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, "hardware queues", "ok"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "hardware queues", "warning"),
        ({"CUDA_DEVICE_MAX_CONNECTIONS": "many"}, "hardware queues", "warning"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "blocking launches", "warning"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "visible GPUs", "note"),
        ({"CUDA_VISIBLE_DEVICES": "MIG-0f3b"}, "visible GPUs", "note"),
    ],
)
def test_environment(environment: dict[str, str], what: str, state: str, tmp_path: Path) -> None:
    """A variable that harms completions is named, with the cure."""
    findings = list(judge_environment(environment, tmp_path / "none"))
    assert states(findings)[what] == state
    assert all(finding.advice for finding in findings if finding.state == "warning")
    assert any("MIG" in finding.advice for finding in findings) == ("MIG-" in str(environment))


def test_harmless_environment(tmp_path: Path) -> None:
    """Nothing is said of what is not there."""
    findings = list(judge_environment({"CUDA_LAUNCH_BLOCKING": "0"}, tmp_path / "none"))
    assert [finding.what for finding in findings] == ["hardware queues"]


def test_mps(tmp_path: Path) -> None:
    """MPS is recognised by its pipe."""
    assert states(list(judge_environment({}, tmp_path)))["MPS"] == "warning"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((1024, 4096, 8), {"open files": "warning", "CPUs": "ok"}),
        ((65536, -1, 1), {"open files": "ok", "CPUs": "warning"}),
        ((-1, -1, 2), {"open files": "ok", "CPUs": "ok"}),
    ],
)
def test_limits(limits: tuple[int, int, int], expected: dict[str, str]) -> None:
    """Limits that a worker would run into are named."""
    assert states(list(judge_limits(*limits))) == expected


@pytest.mark.allows_blocking("it reads files of the system before anything runs")
async def test_examination_of_a_device(device_label: str) -> None:
    """A device that works is examined and measured, and nothing is a failure."""
    findings = await examine(device_label)
    found = states(findings)
    assert not failed(findings)
    assert {"versions", "NVIDIA driver", "device", "self-test", "await of a fill", "await after a pause"} <= set(found)
    measured = next(finding for finding in findings if finding.what == "await of a fill")
    assert measured.found.startswith("p50 ")


@pytest.mark.allows_blocking("it reads files of the system before anything runs")
async def test_device_that_is_not_there() -> None:
    """A device that cannot be opened is a failure, in the driver's words and with advice."""
    findings = await examine("cuda:77")
    assert failed(findings)
    assert findings[-1].what == "device cuda:77"
    assert findings[-1].advice


@pytest.mark.allows_blocking("looking for a driver's library reads files")
async def test_devices_end_with_the_host() -> None:
    """The host is always there, last, and every device has its properties."""
    found = await devices()
    assert found[-1].label == "host"
    assert all(isinstance(one, Device) and one.name for one in found)
    assert as_rows(found)[-1]["label"] == "host"
