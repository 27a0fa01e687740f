"""What a trace has recorded, and the trace events it becomes.

The format is that of Chromium's "Trace Event Format": an object with ``traceEvents``, times in microseconds. The lanes
are the threads of one process and what happens on the host is another; work on the host that overlaps has as many rows
as it takes. Arrows are flow events, from the end of one operation to the start of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final

from aiooffload.rules.tie import Tie

__all__ = ["DEVICE", "HOST", "Recorded", "Served", "Span", "events"]

DEVICE: Final = 1
HOST: Final = 2
"""Numbers of the two processes."""

Event = dict[str, Any]


@dataclass(slots=True)
class Recorded:
    """One operation. Times in nanoseconds on the host's clock, None while something has not happened."""

    number: int
    name: str
    kind: str
    submitted_ns: int
    deps: tuple[int, ...] = ()
    """Numbers of those it had to come after."""
    part_of: int | None = None
    arguments: Event = field(default_factory=dict)
    waited_for: str = ""
    """Why it waited on the host, empty if it did not."""
    lane: int | None = None
    stream: int | None = None
    enqueued_ns: int | None = None
    """When the host began to enqueue it, or to work on it."""
    on_host: bool = False
    """The host does the work: a host task, a copy that goes piece by piece."""
    tie: Tie | None = None
    """Of the clock that the next two are on, once they are known."""
    began_ns: int = 0
    ended_ns: int | None = None
    """None although there is a tie: it had not ended."""
    seen_ns: int | None = None
    """When the host saw it done."""
    failure: str = ""


@dataclass(slots=True)
class Served:
    """One run of a host function."""

    name: str
    began_ns: int
    ended_ns: int
    rows: int
    failed: bool
    callers: tuple[int, ...]
    """Numbers of the launches that called it."""


@dataclass(slots=True)
class Span:
    """A slice of the timeline."""

    process: int
    track: int
    began_ns: int
    ended_ns: int


class Rows:
    """Rows of one kind of work on the host, as many as overlap."""

    def __init__(self, first: int) -> None:
        self._next = first
        self._free: list[int] = []
        self._busy: list[tuple[int, int]] = []  # (end, row)
        self.used: list[int] = []

    def place(self, began_ns: int, ended_ns: int) -> int:
        """Return the row of what begins at ``began_ns``; called in that order."""
        while self._busy and self._busy[0][0] <= began_ns:
            heappush(self._free, heappop(self._busy)[1])
        if self._free:
            row = heappop(self._free)
        else:
            row = self._next + len(self.used)
            self.used.append(row)
        heappush(self._busy, (ended_ns, row))
        return row


def events(
    operations: Iterable[Recorded], served: Iterable[Served], device: str, began_ns: int, ended_ns: int
) -> Iterator[Event]:
    """Yield the events of a trace that lasted from ``began_ns`` to ``ended_ns``, in no order of time."""
    recorded = sorted(operations, key=lambda one: one.number)
    spans = _on_lanes(recorded, ended_ns)
    for process, name in ((DEVICE, f"lanes of {device}"), (HOST, "host")):
        yield _name("process_name", process, 0, name)
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    yield from _lanes(recorded)
    if any(one.number not in spans and not one.on_host for one in recorded):
        yield from _titles("never started", [0])
    writer = _Writer(began_ns, ended_ns)
    rows = 1
    on_host = [one for one in recorded if one.on_host]
    for title, tasks in (("host tasks", True), ("copies in pieces", False)):
        some = [one for one in on_host if (one.kind == "host task") == tasks]
        placed, used = _in_rows([(_began(one), _ended(one, ended_ns)) for one in some], rows)
        spans.update(zip((one.number for one in some), placed, strict=True))
        yield from _titles(title, used)
        rows += len(used)
    for one in recorded:
        yield from writer.operation(one, spans.get(one.number))
    starts = _starts(recorded, spans)
    for one in recorded:
        for dep in one.deps:
            if dep in spans and one.number in starts:
                yield from writer.arrow("dependency", spans[dep], starts[one.number])
    by_function: dict[str, list[Served]] = {}
    for call in served:
        by_function.setdefault(call.name, []).append(call)
    for name, calls in by_function.items():
        placed, used = _in_rows([(call.began_ns, max(call.began_ns + 1, call.ended_ns)) for call in calls], rows)
        yield from _titles(f"host function {name}", used)
        rows += len(used)
        for call, span in zip(calls, placed, strict=True):
            yield writer.call(call, span)
            for caller in call.callers:
                if caller in spans:
                    yield from writer.arrow("call", spans[caller], span)


def _name(what: str, process: int, track: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _titles(title: str, tracks: list[int]) -> Iterator[Event]:
    for i, track in enumerate(tracks):
        yield _name("thread_name", HOST, track, title if i == 0 else f"{title} ({i + 1})")
        yield {"ph": "M", "name": "thread_sort_index", "pid": HOST, "tid": track, "args": {"sort_index": track}}


def _lanes(recorded: list[Recorded]) -> Iterator[Event]:
    streams = {one.lane: one.stream for one in recorded if one.lane is not None and one.enqueued_ns is not None}
    for lane in sorted(streams):
        yield _name("thread_name", DEVICE, lane, f"lane {lane} (stream {streams[lane] or 0:#x})")
        yield {"ph": "M", "name": "thread_sort_index", "pid": DEVICE, "tid": lane, "args": {"sort_index": lane}}


def _began(one: Recorded) -> int:
    return one.submitted_ns if one.enqueued_ns is None else one.enqueued_ns


def _ended(one: Recorded, otherwise_ns: int) -> int:
    """Return its end as the host saw it; nothing takes no time, or an arrow could not find it."""
    return max(_began(one) + 1, otherwise_ns if one.seen_ns is None else one.seen_ns)


def _in_rows(times: list[tuple[int, int]], first: int) -> tuple[list[Span], list[int]]:
    """Return the span of each, and the rows that they take."""
    rows = Rows(first)
    placed: dict[int, Span] = {}
    for i in sorted(range(len(times)), key=times.__getitem__):
        began, ended = times[i]
        placed[i] = Span(HOST, rows.place(began, ended), began, ended)
    return [placed[i] for i in range(len(times))], rows.used


def _on_lanes(recorded: list[Recorded], ended_ns: int) -> dict[int, Span]:
    """Return where each operation was on the device: on a lane one after the other, whatever two clocks say."""
    spans: dict[int, Span] = {}
    free: dict[int, int] = {}
    there = [one for one in recorded if one.enqueued_ns is not None and not one.on_host and one.lane is not None]
    for one in sorted(there, key=lambda one: (_began(one), one.number)):
        assert one.lane is not None
        began, ended = _began(one), _ended(one, ended_ns)
        if one.tie is not None:
            began = one.tie.host_ns(one.began_ns)
            ended = ended if one.ended_ns is None else one.tie.host_ns(one.ended_ns)
        began = max(began, _began(one), free.get(one.lane, 0))
        free[one.lane] = ended = max(began + 1, ended)
        spans[one.number] = Span(DEVICE, one.lane, began, ended)
    return spans


def _starts(recorded: list[Recorded], spans: dict[int, Span]) -> dict[int, Span]:
    """Return where each waits for what it comes after: a copy in pieces, which the host begins early, on its lane."""
    starts = dict(spans)
    for one in reversed(recorded):
        if one.part_of is not None and one.number in spans:
            starts[one.part_of] = spans[one.number]
    return starts


class _Writer:
    """Makes events, with times since the trace began."""

    def __init__(self, began_ns: int, ended_ns: int) -> None:
        self._began_ns = began_ns
        self._ended_ns = ended_ns
        self._arrows = 0

    def _us(self, time_ns: int) -> float:
        return max(0, time_ns - self._began_ns) / 1000

    def operation(self, one: Recorded, span: Span | None) -> Iterator[Event]:
        """Yield the slice of an operation, or the instant at which one ended that never started, and its wait."""
        yield self._slice(one, span)
        if one.waited_for:
            until = one.enqueued_ns if one.enqueued_ns is not None else _ended(one, self._ended_ns)
            common = {"cat": "waiting", "name": f"{one.name} waits", "id": one.number, "pid": HOST, "tid": 0}
            arguments = {"number": one.number, "for": one.waited_for}
            yield {"ph": "b", "ts": self._us(one.submitted_ns), **common, "args": arguments}
            yield {"ph": "e", "ts": self._us(until), **common}

    def _slice(self, one: Recorded, span: Span | None) -> Event:
        seen_ns = max(_ended(one, self._ended_ns), span.ended_ns if span else 0)
        arguments = {"number": one.number, "submitted_us": self._us(one.submitted_ns), **one.arguments}
        if one.enqueued_ns is not None:
            arguments["enqueued_us"] = self._us(one.enqueued_ns)
        if one.seen_ns is not None:
            arguments["seen_us"] = self._us(seen_ns)
        else:
            arguments["unfinished"] = True
        if one.deps:
            arguments["after"] = list(one.deps)
        if one.part_of is not None:
            arguments["part_of"] = one.part_of
        if span is not None and span.process == DEVICE:
            arguments |= {"lane": one.lane, "stream": one.stream, "clock": "host" if one.tie is None else "device"}
        if one.failure:
            arguments["failure"] = one.failure
        event: Event = {"cat": "operation", "name": one.name, "args": {"kind": one.kind, **arguments}}
        if one.failure:
            event["cname"] = "terrible"
        if span is None:
            return event | {"ph": "i", "s": "p", "ts": self._us(seen_ns), "pid": HOST, "tid": 0}
        return event | {"ph": "X", **self._where(span)}

    def call(self, call: Served, span: Span) -> Event:
        """Return the slice of a handler."""
        arguments = {"rows": call.rows, "failed": call.failed, "launches": list(call.callers)}
        return {"ph": "X", "cat": "host function", "name": call.name, "args": arguments, **self._where(span)}

    def _where(self, span: Span) -> Event:
        duration_us = (span.ended_ns - span.began_ns) / 1000
        return {"ts": self._us(span.began_ns), "dur": duration_us, "pid": span.process, "tid": span.track}

    def arrow(self, name: str, source: Span, target: Span) -> Iterator[Event]:
        """Yield both ends of an arrow: it leaves where its target begins, if its source has not ended, else there.

        Both are within their slices, which do not have their last nanosecond: viewers look for one around each end.
        """
        self._arrows += 1
        leaves = min(max(target.began_ns, source.began_ns), source.ended_ns - 1)
        common = {"cat": name, "name": name, "id": self._arrows}
        yield {"ph": "s", **common, "ts": self._us(leaves), "pid": source.process, "tid": source.track}
        yield {
            "ph": "f", "bp": "e", **common, "ts": self._us(target.began_ns), "pid": target.process, "tid": target.track,
        }  # fmt: skip
