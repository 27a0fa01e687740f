"""What ``/metrics`` tells."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from aiooffload.service.dispatch import Answer
from aiooffload.service.metrics import Metrics

STATS = {
    "in_flight": 2,
    "pending": 3,
    "completed": 10,
    "allocated_bytes": 4096,
    "calls": {"served": 7},
    "wakes": {"timer": 1, "monitor": 5},
    "wake_latency": {"monitor": {"count": 5, "sum_s": 0.5, "buckets": [[0.001, 1], [0.02, 4]]}},
    "lanes_busy": 2,
}


def metrics_of(*slots: Any) -> Metrics:
    supervisor: Any = SimpleNamespace(slots=slots, why_not_ready=lambda: "" if slots else "none")
    return Metrics(supervisor, SimpleNamespace(in_flight=4, draining=False), "1.2")  # type: ignore[arg-type]


def slot(up: bool = True) -> Any:
    device = {"label": "cuda:0", "name": "H200", "driver": "1.2"}
    process = SimpleNamespace(stats=STATS, lag_s=0.25, calls={1: 1}, device=device) if up else None
    return SimpleNamespace(device="cuda:0", ready=process, faults=2, generation=3)


def samples(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """Return all samples by name and label values."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {(one.name, *one.labels.values()): one.value for family in families for one in family.samples}


def test_names_follow_the_conventions() -> None:
    """Every name has the prefix and a base unit; what only grows ends with ``_total``; everything has help."""
    metrics = metrics_of(slot())
    metrics.answered("e", Answer([], "host", 2, 0.1, 0.2, 0.3), 0.4)
    for family in text_string_to_metric_families(metrics.text().decode()):
        assert re.fullmatch(r"aiooffload_[a-z_]+", family.name)
        assert family.documentation
        assert not re.search(r"_(ms|us|milliseconds|mib|kb)\b", family.name)
        for sample in family.samples:
            assert sample.name.endswith("_total") is (family.type == "counter")


def test_requests_are_counted() -> None:
    """Requests by outcome, their times, and what is counted once for each call."""
    metrics = metrics_of()
    metrics.answered("e", Answer([], "host", 2, 0.1, 0.2, 0.3), 0.4)
    metrics.answered("e", Answer([], "host", 2, 0.1, 0.2, 0.3, first=False), 0.4)
    metrics.ended("e", "timeout")
    metrics.ended("", "invalid")
    found = samples(metrics)
    assert found["aiooffload_requests_total", "e", "ok"] == 2
    assert found["aiooffload_requests_total", "e", "timeout"] == 1
    assert found["aiooffload_requests_total", "", "invalid"] == 1
    assert found["aiooffload_request_duration_seconds_count", "e"] == 2
    assert found["aiooffload_queue_duration_seconds_sum", "e"] == 0.2
    assert found["aiooffload_handler_duration_seconds_count", "e"] == 1
    assert found["aiooffload_device_duration_seconds_sum", "e"] == 0.3
    assert found["aiooffload_batch_requests_sum", "e"] == 2
    assert found["aiooffload_build_info", "1.2"] == 1


def test_refusals_are_counted() -> None:
    """What was refused unread is counted by reason, of which all are told from the beginning."""
    metrics = metrics_of()
    metrics.refused("token")
    metrics.refused("token")
    found = {key[1]: value for key, value in samples(metrics).items() if key[0] == "aiooffload_refused_total"}
    assert found == {"token": 2, "connections": 0, "head": 0, "slow": 0, "not_http": 0}


def test_state_of_the_worker() -> None:
    """What is in flight, and whether it is ready."""
    found = samples(metrics_of(slot()))
    assert (found[("aiooffload_requests_in_flight",)], found[("aiooffload_ready",)]) == (4, 1)
    assert samples(metrics_of())[("aiooffload_ready",)] == 0


def test_devices() -> None:
    """What the device processes said last is told by device."""
    found = samples(metrics_of(slot()))
    expected = {
        "device_up": 1,
        "device_faults_total": 2,
        "device_starts_total": 3,
        "calls_in_flight": 1,
        "lanes_busy": 2,
        "operations_in_flight": 2,
        "operations_pending": 3,
        "operations_completed_total": 10,
        "device_memory_bytes": 4096,
        "reverse_calls_total": 7,
        "device_loop_lag_seconds": 0.25,
    }
    assert {name: found[f"aiooffload_{name}", "cuda:0"] for name in expected} == expected
    assert found["aiooffload_wakes_total", "monitor", "cuda:0"] == 5
    late = "aiooffload_wake_latency_seconds"
    assert found[f"{late}_sum", "monitor", "cuda:0"] == 0.5
    buckets = [found[f"{late}_bucket", "monitor", "cuda:0", bound] for bound in ("0.001", "0.02", "+Inf")]
    assert buckets == [1, 4, 5]


def test_what_the_device_is() -> None:
    """The device's name and driver are told."""
    found = [
        sample
        for family in text_string_to_metric_families(metrics_of(slot()).text().decode())
        for sample in family.samples
        if sample.name == "aiooffload_device_info"
    ]
    assert [sample.labels for sample in found] == [{"device": "cuda:0", "name": "H200", "driver": "1.2"}]


def test_device_that_is_gone() -> None:
    """Of a device without a process only that is told."""
    found = samples(metrics_of(slot(up=False)))
    assert found["aiooffload_device_up", "cuda:0"] == 0
    assert ("aiooffload_lanes_busy", "cuda:0") not in found
