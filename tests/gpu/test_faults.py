"""A fault ends every await with the right error, at once, and never hangs or lies."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gpu.support import run_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

LANES = 16
FAULTY_LANE = 5
LIMIT_MS = 10_000  # a bound on waiting, not a bar: a busy machine took 4.1 s for a trap
STATUS = {
    "illegal": {"CUDA_ERROR_ILLEGAL_ADDRESS"},
    "trap": {"CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_ILLEGAL_INSTRUCTION"},
    "misaligned": {"CUDA_ERROR_MISALIGNED_ADDRESS"},
    "assert": {"CUDA_ERROR_ASSERT"},
    "stack": {"CUDA_ERROR_HARDWARE_STACK_ERROR", "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_FAILED"},
}
KINDS = pytest.mark.parametrize("kind", ["illegal", "trap"])


def run(case: str, *args: object, **options: Any) -> dict[str, Any]:
    return run_case("fault_cases", case, *args, **options)


def on_lane(suspects: list[str], lane: int) -> list[str]:
    return [name for name in suspects if name.endswith(f" on lane {lane}")]


def check_loss(found: dict[str, Any], launches: int, kind: str) -> None:
    """What holds after every fault, whatever led to it."""
    assert found["ends"] == {"DeviceLostError": launches}
    assert found["status"] in STATUS[kind]
    assert set(found["after"].values()) == {"DeviceLostError"}, found["after"]
    assert found["aclose_ms"] < 500
    assert found["elapsed_ms"] < LIMIT_MS


@pytest.mark.parametrize(
    ("kind", "wake"),
    [
        *(("illegal", wake) for wake in ("hybrid", "interrupt", "poll")),
        *((kind, "hybrid") for kind in ("trap", "misaligned", "assert", "stack")),
    ],
)
def test_fault_ends_every_await(kind: str, wake: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With 1,000 operations in flight each await ends with DeviceLostError; slots stay readable; closing is instant."""
    found = run("in_flight", kind, wake, 1_000)
    with capsys.disabled():
        figures = {name: found[name] for name in ("elapsed_ms", "first_ms", "aclose_ms", "in_flight")}
        print("\n" + json.dumps({"fault": kind, "wake": wake, **figures}))
    check_loss(found, 1_000, kind)
    assert found["in_flight"] == 1_000
    assert found["slots"] == found["slots_closed"] == found["slots_before"]
    assert found["word"] == 1


@KINDS
def test_suspects_name_the_faulting_launch(kind: str) -> None:
    """The suspects are all launches that had not finished, oldest first per lane, the culprit first on its lane."""
    found = run("in_flight", kind, "hybrid", 400)
    suspects = found["suspects"]
    assert len(suspects) == 400
    assert on_lane(suspects, FAULTY_LANE)[0] == f"fault on lane {FAULTY_LANE}"
    assert sum(name.startswith("fault") for name in suspects) == 1
    assert sum(len(on_lane(suspects, lane)) for lane in range(LANES)) == 400


def test_error_says_what_a_fault_means() -> None:
    """The error says that this process can use no GPU any more, so that nobody tries to go on."""
    assert "process" in run("in_flight", "illegal", "hybrid", 10)["text"]


def test_what_waits_on_the_host_fails_as_well() -> None:
    """Operations beyond the lanes' depth, still on the host, end with DeviceLostError too."""
    found = run("in_flight", "illegal", "hybrid", 3_000)
    check_loss(found, 3_000, "illegal")
    assert 16 <= found["in_flight"] < 3_000


def test_fault_under_the_fallback() -> None:
    """Where completions go by events, a fault ends every await all the same."""
    found = run("in_flight", "illegal", "hybrid", 1_000, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    check_loss(found, 1_000, "illegal")


@KINDS
def test_loss_holds_for_every_offload(kind: str) -> None:
    """A second Offload of the process is lost as well, a new one cannot be opened, and the host device works."""
    found = run("second", kind)
    assert found["ends"] == {"DeviceLostError": 2}
    assert found["refused"] == "DeviceLostError"
    assert found["opened"] == "DeviceLostError"
    assert found["open_ms"] < 1_000
    assert found["host"] == "host"


def test_opening_after_a_loss_says_so() -> None:
    """Opening a GPU after a loss says that a fault came before and that it takes a new process."""
    text = run("second", "illegal")["text"]
    assert "process" in text


def test_idle_offload_is_told() -> None:
    """An Offload with nothing in flight refuses the next submission, and closes at once."""
    found = run("idle_other", "illegal")
    assert (found["error"], found["refused"]) == ("DeviceLostError", "DeviceLostError")
    assert found["closed_ms"] < 500


@KINDS
def test_fault_is_reported_though_nobody_asked(kind: str) -> None:
    """A fault of a launch that nobody awaits reaches the loop's exception handler, soon (capy #386)."""
    found = run("unasked", kind)
    assert found["error"] == "DeviceLostError"
    assert found["refused"] == "DeviceLostError"
    assert found["elapsed_ms"] < LIMIT_MS


def test_done_does_not_lie() -> None:
    """A program that looks at done() only sees the failure, not a success."""
    found = run("polled", "illegal")
    assert found["error"] == "DeviceLostError"
    assert found["suspects"] == [f"fault on lane {FAULTY_LANE}"]


def test_everything_behind_the_fault_fails() -> None:
    """Copies, fills, large copies and launches that come after the fault fail; drain returns."""
    found = run("chained", "illegal")
    assert set(found["ends"]) <= {"DeviceLostError", "DependencyError"}
    assert found["ends"][:4] == ["DeviceLostError"] * 4
    assert found["drain_ms"] < 1_000


def test_fault_behind_the_barrier() -> None:
    """A load that waits for the faulting launch ends with DeviceLostError, and so does what waits for the load."""
    found = run("maintenance", "illegal")
    assert found["ends"][0] == "DeviceLostError"
    assert set(found["ends"]) == {"DeviceLostError"}
    assert found["load"] == "DeviceLostError"
    assert found["aclose_ms"] < 1_000


@pytest.mark.parametrize("kinds", [("illegal", "illegal"), ("illegal", "trap"), ("assert", "misaligned")], ids=str)
def test_two_lanes_at_once(kinds: tuple[str, str]) -> None:
    """Two faults at the same time end both awaits, with both launches among the suspects."""
    found = run("two_lanes", *kinds)
    assert found["ends"] == {"DeviceLostError": 2}
    assert [name for name in found["suspects"] if name.startswith("fault")] == ["fault on lane 5", "fault on lane 6"]


def test_a_kernel_that_never_ends() -> None:
    """Past the hard limit everything fails, on_lost() is told once, and the process ends although the kernel runs.

    Until then other lanes go on (vllm #52247: an engine that is blocked for ever, with no timeout).
    """
    found = run("never_ends", 1.0)
    assert found["ends"] == {"DeviceLostError": 102}
    assert set(found["after"].values()) == {"DeviceLostError"}
    assert "forever on lane 5 is past hard_timeout_s=1" in found["text"]
    assert found["told"] == [found["text"]]
    assert found["others"] > 100
    assert found["still"] == 1
    assert found["elapsed_s"] < 10
    assert found["aclose_ms"] < 500


@pytest.mark.parametrize("kind", ["illegal", "trap"])
def test_fault_during_a_call(kind: str) -> None:
    """A launch that faults, or aborts, while its call is served ends with DeviceLostError; its handler is cancelled."""
    found = run("calling", kind)
    assert found["ends"] == {"DeviceLostError": 1}
    assert found["handler"] == ["entered", "cancelled"]
    assert ("the table is broken" in found["text"]) == (kind == "trap")


def test_fault_during_a_mapped_copy() -> None:
    """A fault while the array of a call is copied ends the calling launch, whether the copy gets through or not."""
    found = run("mapped_copy")
    assert found["ends"] == {"DeviceLostError": 2}
    assert found["handler"] in ([], ["called"])


def test_fault_below_a_host_function_of_others() -> None:
    """What an adopted stream's owner has left behind a fault never runs, and keeps nobody waiting."""
    found = run("host_function_left")
    assert found["ends"] == {"DeviceLostError": 2}
    assert found["ran"] == []
    assert found["aclose_ms"] < 500
