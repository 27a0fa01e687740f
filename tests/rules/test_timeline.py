"""The events that records become."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aiooffload.rules.tie import Tie
from aiooffload.rules.timeline import DEVICE, HOST, Recorded, Served, events

ZERO = Tie(0, 0)


def launch(number: int, lane: int, began: int, ended: int, **more: Any) -> Recorded:
    """An operation that was enqueued 10 ns before it began and seen 10 ns after it ended."""
    record = Recorded(number, f"op{number}", "launch", began - 20, lane=lane, stream=lane + 100, **more)
    record.enqueued_ns, record.tie, record.began_ns, record.ended_ns = began - 10, ZERO, began, ended
    record.seen_ns = ended + 10
    return record


def made(operations: list[Recorded], served: list[Served] | None = None, ended_ns: int = 10**6) -> list[dict[str, Any]]:
    return list(events(operations, served or [], "gpu", 0, ended_ns))


def of(found: list[dict[str, Any]], **keys: Any) -> list[dict[str, Any]]:
    return [event for event in found if all(event.get(key) == value for key, value in keys.items())]


def test_slice_has_device_times_in_us() -> None:
    """An operation is a slice on its lane, from its beginning to its end on the device."""
    (event,) = of(made([launch(1, 3, 1500, 4500)]), cat="operation")
    assert (event["ph"], event["pid"], event["tid"], event["ts"], event["dur"]) == ("X", DEVICE, 3, 1.5, 3.0)
    assert event["args"]["clock"] == "device"
    assert (event["args"]["submitted_us"], event["args"]["enqueued_us"], event["args"]["seen_us"]) == (1.48, 1.49, 4.51)
    assert "waiting" not in {one.get("cat") for one in made([launch(1, 3, 1500, 4500)])}


def test_names_of_processes_and_lanes() -> None:
    """The lanes have their numbers and streams in their names, and only those that were used."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in of(made([launch(1, 3, 100, 200)]), name="thread_name")}
    assert names == {(DEVICE, 3): "lane 3 (stream 0x67)"}


def test_arrow_joins_the_end_and_the_start() -> None:
    """An arrow leaves within the slice it comes from, at its end, and arrives at the start of its target."""
    found = made([launch(1, 0, 1000, 2000), launch(2, 1, 5000, 6000, deps=(1,))])
    (start,), (finish,) = of(found, ph="s"), of(found, ph="f")
    assert (start["pid"], start["tid"], start["ts"]) == (DEVICE, 0, 1.999)
    assert (finish["pid"], finish["tid"], finish["ts"], finish["bp"]) == (DEVICE, 1, 5.0, "e")
    assert start["id"] == finish["id"]


def test_no_arrow_to_what_did_not_run() -> None:
    """A dependency that never started, or was not recorded, has no arrow."""
    never = Recorded(1, "op1", "launch", 10, seen_ns=50, failure="CancelledError()")
    found = made([never, launch(2, 1, 5000, 6000, deps=(1, 77))])
    assert of(found, ph="s") == of(found, ph="f") == []
    (instant,) = of(found, ph="i")
    assert (instant["cat"], instant["args"]["failure"], instant["ts"]) == ("operation", "CancelledError()", 0.05)


def test_copy_in_pieces_is_whole_on_the_host() -> None:
    """A streamed copy is a slice on the host; arrows to it go to its first piece, from it they leave its end."""
    whole = Recorded(2, "put", "put", 100, deps=(1,), on_host=True, enqueued_ns=200, seen_ns=9000)
    pieces = [launch(3, 0, 3000, 4000, part_of=2), launch(4, 0, 4000, 5000, part_of=2)]
    found = made([launch(1, 1, 1000, 2000), whole, *pieces, launch(5, 1, 9500, 9600, deps=(2,))])
    (event,) = of(found, name="put")
    assert (event["pid"], event["ts"], event["dur"]) == (HOST, 0.2, 8.8)
    assert [(e["pid"], e["tid"], e["ts"]) for e in of(found, ph="f")] == [(DEVICE, 0, 3.0), (DEVICE, 1, 9.5)]
    assert [(e["pid"], e["ts"]) for e in of(found, ph="s")] == [(DEVICE, 1.999), (HOST, 8.999)]
    assert [e["args"]["part_of"] for e in of(found, cat="operation") if "part_of" in e["args"]] == [2, 2]


def test_host_tasks_that_overlap_have_rows_of_their_own() -> None:
    """Slices of one row never overlap; a row that is free again is used again."""
    tasks = [
        Recorded(n, f"task{n}", "host task", began, on_host=True, enqueued_ns=began, seen_ns=ended)
        for n, began, ended in [(1, 0, 100), (2, 50, 150), (3, 100, 200)]
    ]
    found = made(tasks)
    assert [event["tid"] for event in of(found, ph="X")] == [1, 2, 1]
    names = [event["args"]["name"] for event in of(found, name="thread_name")]
    assert names == ["host tasks", "host tasks (2)"]


def test_calls_have_a_row_per_function_and_an_arrow_from_their_launch() -> None:
    """A handler is a slice in the row of its function; its arrow leaves the launch when it began, or at its end."""
    calls = [Served("ask", 2000, 2500, 1, False, (1,)), Served("tell", 8000, 8100, 4, True, (1,))]
    found = made([launch(1, 0, 1000, 5000)], calls)
    assert [(e["name"], e["ts"], e["args"]["rows"], e["args"]["failed"]) for e in of(found, cat="host function")] == [
        ("ask", 2.0, 1, False),
        ("tell", 8.0, 4, True),
    ]
    assert [e["ts"] for e in of(found, ph="s", cat="call")] == [2.0, 4.999]
    assert len({e["tid"] for e in of(found, cat="host function")}) == 2


def test_wait_is_from_submission_to_the_enqueueing() -> None:
    """What waited on the host has a pair of events, also if it never got further."""
    found = made(
        [
            launch(1, 0, 1000, 2000, waited_for="room on lane 0"),
            Recorded(2, "op2", "launch", 10, waited_for="x", seen_ns=50),
        ]
    )
    assert [(e["id"], e["ts"]) for e in of(found, ph="b")] == [(1, 0.98), (2, 0.01)]
    assert [(e["id"], e["ts"]) for e in of(found, ph="e")] == [(1, 0.99), (2, 0.05)]


def test_without_device_times_the_hosts_have_to_do() -> None:
    """A launch that the device did not tell of lies between its enqueueing and what was seen, behind the one before."""
    records = [
        Recorded(n, f"op{n}", "launch", n, lane=0, stream=1, enqueued_ns=10 * n, seen_ns=seen)
        for n, seen in [(1, 100), (2, 100), (3, None)]
    ]
    found = of(made(records, ended_ns=500), ph="X")
    assert [(e["ts"], e["dur"]) for e in found] == [(0.01, 0.09), (0.1, 0.001), (0.101, 0.399)]
    assert {e["args"]["clock"] for e in found} == {"host"}
    assert ["unfinished" in e["args"] for e in found] == [False, False, True]


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 3000), st.booleans()),
        max_size=30,
    ),
    st.data(),
)
def test_any_records_give_a_timeline_in_order(rows: list[tuple[int, int, int, int, bool]], data: st.DataObject) -> None:
    """Whatever clocks say, slices of a row do not overlap, times are in order, and arrows join slices."""
    records = []
    for number, (lane, enqueued, began, length, on_host) in enumerate(rows, 1):
        deps = tuple(data.draw(st.sets(st.integers(1, number), max_size=3)) - {number})
        record = Recorded(number, "op", "host task" if on_host else "launch", enqueued // 2, deps, lane=lane, stream=1)
        record.enqueued_ns, record.on_host, record.seen_ns = enqueued, on_host, began + length
        if not on_host:
            record.tie, record.began_ns, record.ended_ns = Tie(-100, 50), began, began + length
        records.append(record)
    found = made(records)
    slices = sorted(of(found, ph="X"), key=lambda e: (e["pid"], e["tid"], e["ts"]))
    assert sorted(e["args"]["number"] for e in slices) == list(range(1, len(rows) + 1))
    for one, other in pairwise(slices):
        if (one["pid"], one["tid"]) == (other["pid"], other["tid"]):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-6
    for e in slices:
        arguments = e["args"]
        assert arguments["submitted_us"] <= arguments["enqueued_us"] <= e["ts"]
        assert e["ts"] + e["dur"] <= arguments["seen_us"] + 1e-6
    for e in of(found, ph="s") + of(found, ph="f"):
        assert any(
            (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] - 1e-6 <= e["ts"] < s["ts"] + s["dur"]
            for s in slices
        )
