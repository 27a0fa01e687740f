"""A good neighbour: other CUDA libraries in the process, other Offloads, other processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.support import end_case, run_case, start_case
from tests.reverse_kernels import TIMEOUT

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]

WAKES = pytest.mark.parametrize("wake", ["hybrid", "interrupt", "poll"])
LIMIT_S = 90.0  # the first import of torch on a cold machine takes long


def run(case: str, *args: object, **options: Any) -> dict[str, Any]:
    return run_case("neighbour_cases", case, *args, timeout_s=LIMIT_S, **options)


# Idle and busy


@pytest.mark.parametrize("wake", ["hybrid", "interrupt"])
def test_idle_offload_holds_up_nobody(wake: str) -> None:
    """With the Offload open and idle, torch's waiting and loading calls return at once, and nothing gets armed."""
    found = run("torch_idle", wake)
    assert found["armings"] > 0  # the monitor was in use before
    assert found["armed_meanwhile"] == 0
    assert found["seconds"]["synchronize"] < 5  # torch initialises in the first call
    assert found["seconds"]["synchronize again"] < 0.5
    assert max(found["seconds"].values()) < 20
    assert found["sum"] == 200


def test_work_in_flight_is_waited_for() -> None:
    """What the test above rests on: a device-wide synchronisation does wait for a kernel of ours."""
    assert run("torch_blocked")["returned"] is False


@WAKES
def test_calls_return_when_our_work_ends(wake: str) -> None:
    """With a kernel of ours in flight, torch's calls return when it ends, whatever the policy left on the device."""
    found = run("torch_busy", wake)
    waiting = {name: late for name, late in found["late"].items() if name not in ("synchronize", "matmul", "item")}
    assert max(waiting.values()) < 1.0, found["late"]
    assert max(found["late"].values()) < 20.0, found["late"]  # the first of each kind loads its kernels, too
    assert found["sum"] == 200


def test_host_function_that_uses_a_library() -> None:
    """A host function may work with torch while its kernel waits, and read the result."""
    found = run("called", "item")
    assert (found["report"], found["value"], found["failure"]) == ([0, 0], 30, "None")
    assert found["sum"] == 200


def test_host_function_that_waits_for_the_whole_device() -> None:
    """A call that waits for every kernel, made for one of them, ends at that kernel's deadline, and the error says so.

    CUDA.jl #1140 reports the same as a deadlock.
    """
    found = run("called", "synchronize")
    assert found["report"][0] == TIMEOUT
    assert "got no answer within its deadline" in found["failure"]
    assert 0.5 < found["seconds"] < 20
    assert found["sum"] == 200


# Before, after and never


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_library_beside_the_offload(name: str, order: str) -> None:
    """torch and CuPy, initialised before or after, work in turns with an Offload, and both get their results right."""
    found = run("together", name, order)
    assert found["sums"] == [200] * 4
    assert set(found["theirs"]) == {999_000.0}
    print({"library": name, "order": order, "fallback": found["fallback"]})


def test_offload_alone() -> None:
    """Without any other library it works by itself, imports none, and needs no fallback."""
    found = run("alone", env={"CUDA_DEVICE_MAX_CONNECTIONS": None})
    assert (found["sum"], found["others"], found["fallback"]) == (200, [], "")


# One connection


@WAKES
def test_one_connection_works_through_the_fallback(wake: str) -> None:
    """With CUDA_DEVICE_MAX_CONNECTIONS=1 everything completes under every policy; one warning has the cure."""
    found = run("fallback", wake, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    assert found["sum"] == 1000
    assert found["stats"]["fallback"]
    assert found["stats"]["in_flight"] == 0
    assert len(found["warnings"]) == 1, found["warnings"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in found["warnings"][0]["cure"]
    assert found["warnings"][0]["cause"] == found["stats"]["fallback"]


@pytest.mark.parametrize("connections", [None, "32"])
def test_enough_connections_need_no_fallback(connections: str | None) -> None:
    """With the connections that the driver asks for, or that somebody set, nothing is logged."""
    found = run("fallback", "hybrid", env={"CUDA_DEVICE_MAX_CONNECTIONS": connections})
    assert (found["stats"]["fallback"], found["warnings"]) == ("", [])


# Several Offloads


def test_two_offloads_in_one_process() -> None:
    """Two Offloads of one device work at the same time, also while one of them loads kernels."""
    found = run("two")
    assert found["sums"] == [[300], [300]]
    assert min(found["rounds"]) >= 1


def test_two_processes() -> None:
    """Two processes work on one device at the same time."""
    peers = [start_case("neighbour_cases", "peer") for _ in range(2)]
    try:
        for process in peers:
            line = ""
            while line != "open":
                line = process.stdout.readline()
                assert line, process.stderr.read()
                line = line.strip()
        for process in peers:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in peers:
            found = end_case(process, LIMIT_S)
            assert (found["first"], found["sums"]) == (200, [1000] * 11)
    finally:
        for process in peers:
            if process.poll() is None:
                process.kill()
                process.communicate()


def test_collecting_an_offload_waits_for_nobody() -> None:
    """A closed Offload that is collected while another has a kernel in flight holds up neither loop nor launches."""
    found = run("collected")
    assert found["collecting"] < 1.0, found  # the kernel in flight would run for 20 s
    assert found["launching"] < 1.0, found


# What belongs to others


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_graph_capture_is_left_alone(mode: str) -> None:
    """Launches, copies and loads during torch's capture on the same thread are neither captured nor break it."""
    found = run("capture", mode)
    assert found["ours"] == 100 + 1000  # each once, whatever was replayed
    assert found["theirs"] == [1 + 2 * 10] * 4
    assert found["back"] == [0, 1, 2, 3, 4]


def test_offload_opens_during_a_capture() -> None:
    """Opening, using and closing an Offload during torch's capture in global mode leaves the capture alone."""
    found = run("opened_during_capture", "global")
    assert (found["sum"], found["theirs"], found["fallback"]) == (200, [3] * 4, "")


def test_current_context_is_left_alone() -> None:
    """Under a foreign current context, or none, an Offload works, and the thread has what it had afterwards."""
    found = run("contexts")
    assert set(found["sums"]) == {200}
    assert set(found["seen"]["none"]) == {1}
    assert set(found["seen"]["foreign"]) == {1}


def test_lane_handles_are_plain_numbers() -> None:
    """The handle of a lane is an int that torch, CuPy, cuda.core and the bindings take as a stream."""
    found = run("handles")
    assert found["torch"] == 2000.0
    assert found["cupy"] == 2.0
    assert (found["core"], found["int"], found["distinct"]) == (True, "int", 2)
    assert found["bindings"] in (0, 600)
