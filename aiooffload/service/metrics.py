"""What ``/metrics`` tells, in Prometheus's conventions: seconds, bytes, ``_total`` for what only grows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from prometheus_client import CollectorRegistry, Gauge, Info
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from aiooffload.engine.latency import Histogram
from aiooffload.service.dispatch import Answer, Dispatcher
from aiooffload.service.supervisor import Slot, Supervisor

__all__ = ["CONTENT_TYPE", "Metrics", "Refused"]

Refused: TypeAlias = Literal["token", "connections", "head", "slow", "not_http"]
"""Why something was refused before it was a request: the token is wrong, there are too many connections, a head is too
large, a request does not come in time, or is none."""

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_REQUESTS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """All metrics of one worker.

    Parameters
    ----------
    supervisor
        Whose devices are told of.
    dispatcher
        Whose queue is told of.
    version
        The package's.
    """

    def __init__(self, supervisor: Supervisor, dispatcher: Dispatcher, version: str) -> None:
        self.registry: Final = CollectorRegistry()
        self._endpoints: dict[str, _Endpoint] = {}
        self._refused: dict[Refused, int] = dict.fromkeys(get_args(Refused), 0)
        Info("aiooffload_build", "What is running.", registry=self.registry).info({"version": version})
        in_flight = Gauge("aiooffload_requests_in_flight", "Requests waiting or on a device.", registry=self.registry)
        in_flight.set_function(lambda: dispatcher.in_flight)
        ready = Gauge("aiooffload_ready", "1 if requests can be served now.", registry=self.registry)
        ready.set_function(lambda: not (dispatcher.draining or supervisor.why_not_ready()))
        self.loop_lag = Gauge(
            "aiooffload_loop_lag_seconds", "How late the loop of the front was last.", registry=self.registry
        )
        self.registry.register(_Devices(supervisor))
        self.registry.register(self)

    def _of(self, endpoint: str) -> _Endpoint:
        found = self._endpoints.get(endpoint)
        if found is None:
            found = self._endpoints[endpoint] = _Endpoint()
        return found

    def answered(self, endpoint: str, answer: Answer, seconds: float) -> None:
        """A request has its result."""
        one = self._of(endpoint)
        one.outcomes["ok"] += 1
        one.duration.add(seconds)
        one.queue.add(answer.queue_s)
        if answer.first:
            one.handler.add(answer.handler_s)
            one.device.add(answer.device_s)
            one.batch.add(answer.batch)

    def ended(self, endpoint: str, outcome: str) -> None:
        """A request has ended without one; ``endpoint`` is one that exists, or ""."""
        self._of(endpoint).outcomes[outcome] += 1

    def refused(self, reason: Refused) -> None:
        """Something was refused before it was a request."""
        self._refused[reason] += 1

    def collect(self) -> Iterator[HistogramMetricFamily | CounterMetricFamily]:
        """Tell of requests, for a scrape."""
        requests = CounterMetricFamily(
            "aiooffload_requests", "Requests for inference, by how they ended.", labels=("endpoint", "outcome")
        )
        for name, one in self._endpoints.items():
            for outcome, count in one.outcomes.items():
                requests.add_metric((name, outcome), count)
        yield requests
        refused = CounterMetricFamily(
            "aiooffload_refused", "Connections and requests that were refused unread, by reason.", labels=("reason",)
        )
        for reason, count in self._refused.items():
            refused.add_metric((reason,), count)
        yield refused
        for field, (name, text) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"aiooffload_{name}", text, labels=("endpoint",))
            for endpoint, one in self._endpoints.items():
                histogram: Histogram = getattr(one, field)
                family.add_metric((endpoint,), _buckets(histogram.bounds, histogram.cumulated()), histogram.sum)
            yield family

    def text(self) -> bytes:
        """Return what a scrape gets."""
        return generate_latest(self.registry)


_HISTOGRAMS: Final = {
    "duration": ("request_duration_seconds", "From a request's head to its response, of those that succeeded."),
    "queue": ("queue_duration_seconds", "From a request's body to its call."),
    "handler": ("handler_duration_seconds", "Of a call, in the handler."),
    "device": (
        "device_duration_seconds",
        "Of a call, from its first operation's submission to the last one's end.",
    ),
    "batch": ("batch_requests", "Requests that shared a call."),
}


def _buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Return cumulated counts as the library takes them."""
    return list(zip([*(str(float(bound)) for bound in bounds), "+Inf"], counts, strict=True))


class _Endpoint:
    """What is counted for one endpoint. The library's own histograms take a lock for each of a dozen steps."""

    __slots__ = ("batch", "device", "duration", "handler", "outcomes", "queue")

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.duration, self.queue, self.handler, self.device = (Histogram(_SECONDS) for _ in range(4))
        self.batch = Histogram(_REQUESTS)


class _Devices:
    """Reads at each scrape what the device processes said last."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
        slots = self._supervisor.slots
        info = GaugeMetricFamily("aiooffload_device_info", "What serves now.", labels=("device", "name", "driver"))
        for slot in slots:
            if slot.ready is not None:
                known = slot.ready.device
                info.add_metric((slot.device, known["name"], known["driver"]), 1)
        yield info
        for name, text, value in _OF_SLOT:
            yield _family(name, text, [(slot.device, value(slot)) for slot in slots])
        for name, text, value in _OF_STATS:
            yield _family(name, text, [(slot.device, value(_stats(slot))) for slot in slots if _stats(slot)])
        wakes = CounterMetricFamily(
            "aiooffload_wakes", "How the device process's loop was woken for a completion.", labels=("device", "by")
        )
        for slot in slots:
            for by, count in _stats(slot).get("wakes", {}).items():
                wakes.add_metric((slot.device, by), count)
        yield wakes
        late = HistogramMetricFamily(
            "aiooffload_wake_latency_seconds",
            "From the driver's wake, or the time of a timer, until the device process's loop went on.",
            labels=("device", "by"),
        )
        for slot in slots:
            for by, stats in _stats(slot).get("wake_latency", {}).items():
                bounds, counts = zip(*stats["buckets"], strict=True)
                late.add_metric((slot.device, by), _buckets(bounds, [*counts, stats["count"]]), stats["sum_s"])
        yield late
        lag = GaugeMetricFamily(
            "aiooffload_device_loop_lag_seconds", "How late the device process's loop was last.", labels=("device",)
        )
        for slot in slots:
            if slot.ready is not None:
                lag.add_metric((slot.device,), slot.ready.lag_s)
        yield lag


def _stats(slot: Slot) -> dict[str, Any]:
    return slot.ready.stats if slot.ready is not None else {}


def _family(name: str, text: str, values: list[tuple[str, float]]) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    family = kind(f"aiooffload_{name.removesuffix('_total')}", text, labels=("device",))
    for device, value in values:
        family.add_metric((device,), value)
    return family


_OF_SLOT: Final[tuple[tuple[str, str, Any], ...]] = (
    ("device_up", "1 if the device process takes calls.", lambda slot: slot.ready is not None),
    ("device_faults_total", "Device processes that were lost, or could not start.", lambda slot: slot.faults),
    ("device_starts_total", "Device processes that were started.", lambda slot: slot.generation),
    ("calls_in_flight", "Calls of handlers now.", lambda slot: len(slot.ready.calls) if slot.ready else 0),
)
_OF_STATS: Final[tuple[tuple[str, str, Any], ...]] = (
    ("lanes_busy", "Lanes with operations on the device.", lambda stats: stats["lanes_busy"]),
    ("operations_in_flight", "Operations on the device.", lambda stats: stats["in_flight"]),
    ("operations_pending", "Operations that wait on the host.", lambda stats: stats["pending"]),
    ("operations_completed_total", "Operations of this device process.", lambda stats: stats["completed"]),
    ("device_memory_bytes", "Of Buffers and scratch.", lambda stats: stats["allocated_bytes"]),
    ("reverse_calls_total", "Calls from kernels that were served.", lambda stats: stats["calls"]["served"]),
)
