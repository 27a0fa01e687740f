"""The table of ``scripts/bench copies``, and the bar that its figures are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TextIO

from benchmarks.report import Figures, print_table
from benchmarks.reverse_report import bar, show_bars

Row = dict[str, Any]


def show(figures: Figures, out: TextIO) -> None:
    """Print everything that was measured."""
    size = figures["size"]
    print(f"device {figures['device']} ({figures['device_name']}), loop {figures['loop']}", file=out)
    print(f"\nHalf of the columns of {size} x {size} float32: GB/s, and % of the contiguous copy", file=out)
    cells = {
        row["direction"]: [
            f"{row['contiguous_gb_s']:.1f}",
            f"{row['strided_gb_s']:.1f} {row['percent']:>6.1f} %",
            f"{row['rows_gb_s']:.1f} {row['rows_percent']:>6.1f} %",
        ]
        for row in figures["rows"]
    }
    print_table(["", "1D", "strided", "rows"], cells, out)
    show_bars(figures, out)


def bars(rows: Sequence[Row], least_percent: float) -> list[dict[str, str]]:
    """Hold the figures of a GPU against what they should be."""
    return [bar(f"strided, {row['direction']}", row["percent"], "% of 1D", least_percent) for row in rows]
