"""The tables of ``scripts/bench reverse``, and the bars that its figures are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from benchmarks.report import Figures, number, print_table, ratio

COMPARED = "libgomp"
Row = dict[str, Any]


def show(figures: Figures, out: TextIO) -> None:
    """Print everything that was measured."""
    print(f"device {figures['device']} ({figures['device_name']}), loop {figures['loop']}", file=out)
    print(f"rounds {figures['rounds']}, {figures['took_s']:.0f} s; figures are medians over the rounds\n", file=out)
    print_labels(figures["labels"], out)
    show_round_trip(figures["round_trip"], out)
    show_rates(figures["rates"], figures["warps_are"], out)
    show_silence(figures["silence"], out)
    show_resident(figures["resident"], out)
    show_mapped(figures["mapped"], out)
    show_bars(figures, out)
    for problem in figures["problems"]:
        print(f"\nFAILED: {problem['step']}: {problem['problem']}", file=out)


def print_labels(labels: dict[str, str], out: TextIO) -> None:
    width = max(map(len, labels), default=0)
    for name, label in labels.items():
        print(f"  {name.ljust(width)}  {label}", file=out)


def show_round_trip(rows: Sequence[Row], out: TextIO) -> None:
    print(f"\nRound trip of one device thread, warm, us (and p50 of {COMPARED}'s loop over it)", file=out)
    slow = next((row["p50_us"] for row in rows if row["name"] == COMPARED), 0)
    cells = {
        row["name"]: [*(f"{row[key]:.2f}" for key in ("p50_us", "p99_us", "mean_us")), ratio(slow, row["p50_us"])]
        for row in rows
    }
    print_table(["", "p50", "p99", "mean", f"vs {COMPARED}"], cells, out)
    if rows:
        print(f"  the device's clock goes in steps of {min(row['clock_step_ns'] for row in rows):.0f} ns", file=out)


def show_rates(rows: Sequence[Row], warps_are: str, out: TextIO) -> None:
    print(f"\nCalls per second, by warps ({warps_are})", file=out)
    show_grid(rows, "warps", lambda row: f"{row['calls_per_s']:,.0f}", "warps: {:,}", out)


def show_silence(rows: Sequence[Row], out: TextIO) -> None:
    print("\nCall after a silence: p50 in us, and CPU of the process in % of a core", file=out)
    show_grid(
        rows,
        "silence_us",
        lambda row: f"{number(row['excess_p50_us'])} {row['cpu_percent']:>6.1f} %",
        "{:,} us of silence",
        out,
    )


def show_grid(rows: Sequence[Row], key: str, cell: Any, heading: str, out: TextIO) -> None:
    """Print one line per name, one column per value of ``key``; what was not measured is a dash."""
    columns = sorted({row[key] for row in rows})
    table = {(row["name"], row[key]): cell(row) for row in rows}
    names = dict.fromkeys(row["name"] for row in rows)
    cells = {name: [table.get((name, column), "-") for column in columns] for name in names}
    print_table(["", *(heading.format(column) for column in columns)], cells, out)


def show_resident(rows: Sequence[Row], out: TextIO) -> None:
    print("\nCPU of the process while a kernel that can call is silent for 300 ms, % of a core", file=out)
    print_table(["", "CPU"], {row["name"]: [f"{row['cpu_percent']:.2f}"] for row in rows}, out)


def show_mapped(rows: Sequence[Row], out: TextIO) -> None:
    print("\n1 MiB, there and back, us", file=out)
    for row in rows:
        cells = {
            "call with tofrom": [f"{row['mapped_us']:.1f}"],
            "two awaited copies": [f"{row['copies_us']:.1f}"],
            "speed of the call": [f"{row['speed_percent']:.0f} %"],
        }
        print_table(["", "p50"], cells, out)


def show_bars(figures: Figures, out: TextIO) -> None:
    if not figures["bars"]:
        print("\nThe bars are for GPUs.", file=out)
        return
    print("\nBars", file=out)
    cells = {row["figure"]: [row["measured"], row["bar"], row["met"]] for row in figures["bars"]}
    print_table(["", "measured", "bar", "met"], cells, out)


def bars(figures: Figures) -> list[dict[str, str]]:
    """Hold the figures of a GPU against what they should be."""
    trips = {row["name"]: row["p50_us"] for row in figures["round_trip"]}
    rates = {(row["name"], row["warps"]): row["calls_per_s"] / 1e6 for row in figures["rates"]}
    resident = {row["name"]: row["cpu_percent"] for row in figures["resident"]}
    speed = next((row["speed_percent"] for row in figures["mapped"]), None)
    eager, slow = trips.get("eager"), trips.get(COMPARED)
    rows = [
        bar("round trip, eager, p50", eager, "us", 7, at_most=True),
        bar(f"round trip, {COMPARED}'s loop over eager", slow / eager if slow and eager else None, "x", 8),
    ]
    for name, warps, least in RATES:
        rows.append(bar(f"{name}, {warps:,} warps", rates.get((name, warps)), "M/s", least))
    rows.append(bar("CPU, silent resident kernel", resident.get("eager"), "%", 1, at_most=True))
    rows.append(bar("mapped tofrom, 1 MiB, speed of two copies", speed, "%", 60))
    return rows


RATES = (
    ("eager", 32, 0.6),
    ("awaiting", 32, 0.3),
    ("batch", 32, 4),
    ("post", 32, 10),
    ("batch", 1056, 8),
    ("batch", 8448, 8),
)
"""Name, warps and the least million calls per second."""


def bar(figure: str, value: float | None, unit: str, limit: float, *, at_most: bool = False) -> dict[str, str]:
    wanted = f"{'<=' if at_most else '>='} {limit:g} {unit}"
    if value is None:
        return {"figure": figure, "measured": "-", "bar": wanted, "met": "not measured"}
    met = value <= limit if at_most else value >= limit
    return {"figure": figure, "measured": f"{value:.2f} {unit}", "bar": wanted, "met": "yes" if met else "NO"}
