"""Streams, graphs and calls of other libraries: cuda.core, torch, CuPy, cuBLAS, NCCL."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gpu.stream_cases import N
from tests.gpu.support import run_case

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(150)]


def run(case: str, *args: object) -> dict[str, Any]:
    return run_case(
        "stream_cases", case, *args, timeout_s=90.0
    )  # the first import of torch on a cold machine takes long


@pytest.mark.parametrize("which", ["side", "default"])
def test_kernel_between_torch_ops(which: str) -> None:
    """On torch's stream, the legacy default one too, ours runs between torch's, with no wait on the host."""
    found = run("torch_stream", which)
    assert found["sums"] == [14.0 * N]
    assert found["instant"]
    assert (found["handle"] == 1) == (which == "default")


def test_waiting_for_a_torch_stream() -> None:
    """``order`` holds torch's stream up until ours is done, ``completion`` is done when torch's work is."""
    found = run("torch_completion")
    assert (found["early"], found["late"], found["value"]) == (False, False, 2.0)


def test_capturing_stream_is_refused() -> None:
    """While a stream captures, adopting, launching and completing raise UsageError; the capture is unharmed."""
    found = run("torch_capture")
    assert len(found["texts"]) == 3
    assert all("capturing" in text for text in found["texts"])
    assert found["value"] == 12.0


def test_cupy_stream_both_ways() -> None:
    """CuPy's stream is a lane, and a lane is a stream to CuPy."""
    found = run("cupy_stream")
    assert (found["first"], found["second"]) == (6.0 * N, 60.0 * N)


def test_cublas_on_a_lane() -> None:
    """A custom operation calls cuBLAS between two kernels."""
    assert run("cublas")["right"]


def test_graphs_of_cuda_core() -> None:
    """Replays are operations: ordered, awaitable each, instant; what is no graph is refused."""
    found = run("graph")
    assert found["values"] == [3.0, 33.0]
    assert (found["early"], found["instant"]) == (False, True)
    assert len(found["wrong"]) == 3


def test_nccl_over_two_gpus() -> None:
    """An all-reduce is awaited between kernels on two GPUs."""
    assert run("nccl")["found"] == [[14.0], [14.0]]


def test_stream_of_another_context_is_refused() -> None:
    """It is adopted by the Offload of its device only."""
    assert "another context" in run("foreign_context")["text"]


def test_priorities_are_the_drivers() -> None:
    """Lanes have the priorities that were asked for."""
    found = run("priorities")
    assert found["asked"] == found["found"]
    assert found["sum"] == 3


@pytest.mark.parametrize("name", ["torch", "cupy", "numba"])
def test_arrays_of_others_as_arguments(name: str) -> None:
    """A launch takes them in the place of Buffers."""
    assert run("arrays_as_arguments", name)["right"]


@pytest.mark.parametrize("name", ["torch", "cupy"])
def test_our_buffers_in_others(name: str) -> None:
    """They are the same memory there, and what is done with them waits for what was submitted before."""
    found = run("buffers_in_others", name)
    assert not found["early"]
    assert found["error"] < 1e-3
    assert found["same"]
    assert found["shape"] == [4, N // 4]
