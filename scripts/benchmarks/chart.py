"""The plot of ``scripts/bench completion``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.report import COMPARED, Figures, by_mechanism, duration, kernels_of, number

STYLES = {
    "hybrid": ("#d62728", "*"),
    "interrupt": ("#e8750a", "^"),
    "poll": ("#d65db1", "v"),
    "sync": ("#1f77b4", "s"),
    "executor": ("#2a8f2a", "D"),
    "sleep0": ("#139aab", "P"),
    "callback": ("#8256b5", "X"),
    "usleep": ("#555555", "o"),
}
LEAST = 0.1
"""What is below this (or negative) is drawn here: the scales are logarithmic."""
LABELS_AT = 0.61
"""Where the labels of a panel begin, as a share of its width."""
LABEL_GAP = 0.075


def plot(figures: Figures, target: str) -> None:
    """Draw excess against CPU, a panel for each kernel, and the rates."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    table = by_mechanism(figures["rows"])
    figure, axes = pyplot.subplots(2, 3, figsize=(17, 10), layout="constrained")
    *panels, last = axes.flat
    for panel, kernel in zip(panels, kernels_of(figures), strict=True):
        draw_kernel(panel, kernel, {name: rows[kernel] for name, rows in table.items()})
    draw_rates(last, figures["throughput"])
    figure.suptitle(
        f"Awaiting a kernel on {figures['device']} ({figures['device_name']}, {figures['loop']}): "
        "nearer to the lower left corner is better",
        fontsize=16,
    )
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def draw_kernel(panel: Any, kernel: int, rows: dict[str, Figures]) -> None:
    """Draw one point for each mechanism, with a whisker from its p50 to its p99, and a label."""
    from matplotlib.ticker import LogLocator

    points = {name: [max(row[key], LEAST) for key in KEYS] for name, row in rows.items()}
    left = min(0.2, *(x for x, _, _ in points.values())) / 1.3
    # The left part is for up to 300 %, the right for labels.
    right = left * math.exp(math.log(300 / left) / (LABELS_AT - 0.02))
    low = min(y for _, y, _ in points.values()) / 1.5
    high = max(y for _, _, y in points.values()) * 1.5
    panel.set(xscale="log", yscale="log", xlim=(left, right), ylim=(low, high))
    for name, (x, p50, p99) in points.items():
        colour, marker = STYLES[name]
        panel.plot([x, x], [p50, p99], color=colour, linewidth=1.6, alpha=0.6, zorder=1)
        size, order = (300, 3) if name == COMPARED else (95, 2)
        panel.scatter([x], [p50], s=size, color=colour, marker=marker, edgecolors="white", zorder=order)
    draw_labels(panel, points, low, high)
    panel.set_xticks([tick for tick in (0.1, 1, 10, 100) if tick >= left])
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    for set_formatter in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
        set_formatter(lambda value, _: f"{value:g}")
    panel.xaxis.set_ticks([], minor=True)
    panel.set_xlabel("CPU", x=LABELS_AT / 2)
    panel.set_ylabel("excess, us (line: p50 to p99)")
    panel.set_title("empty kernel" if kernel == 0 else f"kernel of {duration(kernel)}", fontsize=14)
    panel.grid(which="major", alpha=0.35)


KEYS = ("cpu_percent", "excess_p50_us", "excess_p99_us")


def draw_labels(panel: Any, points: dict[str, list[float]], low: float, high: float) -> None:
    """Write the figures of all points one above the other, with a line from each to its point."""
    height = math.log(high / low)
    wanted = sorted((math.log(p50 / low) / height, name) for name, (_, p50, _) in points.items())
    for place, (_, name) in zip(spread([place for place, _ in wanted]), wanted, strict=True):
        x, p50, _ = points[name]
        colour = STYLES[name][0]
        panel.annotate(
            f"{name} {number(p50)} us, {x:.0f} %" if x >= 10 else f"{name} {number(p50)} us, {x:.1f} %",
            xy=(x, p50),
            xytext=(LABELS_AT, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=10,
            fontweight="bold" if name == COMPARED else "normal",
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.45, "linewidth": 0.8},
        )


def spread(places: Sequence[float]) -> list[float]:
    """Move places, given in order, apart to at least the gap between labels, staying within the panel."""
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + LABEL_GAP if moved else 0.04))
    limit = 0.96
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - LABEL_GAP
    return moved


def draw_rates(panel: Any, rows: Sequence[Figures]) -> None:
    """Draw awaits per second as groups of bars."""
    tasks = sorted({row["tasks"] for row in rows})
    names = list(dict.fromkeys(row["mechanism"] for row in rows))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        rates = [
            next(row["awaits_per_s"] for row in rows if (row["mechanism"], row["tasks"]) == (name, n)) for n in tasks
        ]
        where = [group + (place - (len(names) - 1) / 2) * width for group in range(len(tasks))]
        panel.bar(where, [rate / 1000 for rate in rates], width * 0.92, color=STYLES[name][0], label=name)
    panel.set_xticks(range(len(tasks)), [f"{n} task" + "s" * (n > 1) for n in tasks])
    panel.set(ylabel="thousand awaits per second")
    panel.set_title(f"empty kernels over {rows[0]['lanes']} lanes (higher is better)", fontsize=14)
    panel.grid(axis="y", alpha=0.35)
    panel.set_axisbelow(True)
    panel.legend(frameon=False, loc="upper left")
