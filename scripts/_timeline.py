"""Draw a trace of off.trace() as a picture: a row per lane and for the host, an arrow per dependency across rows."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COLOURS = {
    "launch": "#4c78a8",
    "copy": "#54a24b",
    "put": "#86c17b",
    "get": "#1f8a70",
    "fill": "#c9b037",
    "piece": "#b8dcae",
    "graph": "#3a4f9a",
    "custom operation": "#9467bd",
    "gate": "#8c8c8c",
    "completion": "#bab0ac",
    "host task": "#f58518",
    "host function": "#e45756",
}
OTHER = "#79706e"
FAILED = "#c00000"
WAITING = "#d8c7a8"
ARROW = "#333333"
MOST_ARROWS = 400
MOST_ROWS = 64
WIDTH_IN = 17.0
ROW_IN = 0.52
DPI = 110
CHARACTER_PX = 6.6
"""Width of a character of a label, rather too large."""


class NoTrace(Exception):
    """The file is not one that can be drawn; the text says why."""


@dataclass
class Slice:
    """Something that took time, in us."""

    name: str
    kind: str
    row: tuple[int, int]
    began: float
    ended: float
    failed: bool


@dataclass
class Picture:
    """What is drawn."""

    device: str
    rows: dict[tuple[int, int], str] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    arrows: list[tuple[tuple[tuple[int, int], float], tuple[tuple[int, int], float], str]] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    never: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read(file: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the events of a trace and what it says of itself."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoTrace(f"cannot read it: {error.strerror}") from None
    except ValueError:
        raise NoTrace("it is not JSON: a trace is complete once its block was left") from None
    events = content.get("traceEvents") if isinstance(content, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) and "ph" in event for event in events):
        raise NoTrace("it has no traceEvents: it is not a file of off.trace()")
    about = content.get("otherData")
    return events, about if isinstance(about, dict) else {}


def gather(events: list[dict[str, Any]], about: dict[str, Any], limit: int) -> Picture:
    """Return what to draw, of at most ``limit`` slices."""
    picture = Picture(str(about.get("device", "")))
    slices = sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
    if not slices:
        raise NoTrace("nothing in it has run")
    if len(slices) > limit:
        picture.notes.append(f"the first {limit} of {len(slices)} slices")
    slices = slices[:limit]
    until = max(float(event["ts"]) + float(event["dur"]) for event in slices)
    names = {
        (event["pid"], event["tid"]): str(event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name"
    }
    rows = sorted({(event["pid"], event["tid"]) for event in slices})
    if len(rows) > MOST_ROWS:
        picture.notes.append(f"the first {MOST_ROWS} of {len(rows)} rows")
    picture.rows = {row: names.get(row, str(row)) for row in rows[:MOST_ROWS]}
    picture.slices = [made for event in slices if (made := _slice(event)).row in picture.rows]
    picture.arrows = _arrows(events, picture, until)
    if len(picture.arrows) > MOST_ARROWS:
        picture.notes.append(f"the first {MOST_ARROWS} of {len(picture.arrows)} arrows")
        picture.arrows = picture.arrows[:MOST_ARROWS]
    begins = {event["id"]: float(event["ts"]) for event in events if event["ph"] == "b"}
    ends = ((event["id"], float(event["ts"])) for event in events if event["ph"] == "e")
    picture.waits = [(begins[key], min(ts, until)) for key, ts in ends if begins.get(key, until) < until]
    picture.never = [ts for event in events if event["ph"] == "i" and (ts := float(event["ts"])) <= until]
    if about.get("complete") is False:
        picture.notes.append("not everything was done when the trace ended")
    return picture


def _slice(event: dict[str, Any]) -> Slice:
    arguments, began = event.get("args", {}), float(event["ts"])
    kind = "host function" if event.get("cat") == "host function" else str(arguments.get("kind", "other"))
    failed = bool(arguments.get("failure") or arguments.get("failed"))
    row = (event["pid"], event["tid"])
    return Slice(str(event["name"]), kind, row, began, began + float(event["dur"]), failed)


def _arrows(events: list[dict[str, Any]], picture: Picture, until: float) -> list[Any]:
    """Return the arrows from one row to another."""
    sources = {event["id"]: event for event in events if event["ph"] == "s"}
    arrows = []
    for event in (event for event in events if event["ph"] == "f" and event["id"] in sources):
        source = sources[event["id"]]
        ends = [((one["pid"], one["tid"]), float(one["ts"])) for one in (source, event)]
        if ends[0][0] != ends[1][0] and all(row in picture.rows and ts <= until for row, ts in ends):
            arrows.append((*ends, str(event.get("cat", ""))))
    return sorted(arrows, key=lambda arrow: arrow[1][1])


# -- drawing -------------------------------------------------------------------------------


def unit_of(span_us: float) -> tuple[str, float]:
    """Return the unit of the axis and how many us it has."""
    if span_us < 10_000:
        return "us", 1.0
    return ("ms", 1000.0) if span_us < 10_000_000 else ("s", 1e6)


def draw(picture: Picture, title: str, target: Path) -> None:
    """Draw it into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    places = {row: place for place, row in enumerate(picture.rows)}
    began = min([one.began for one in picture.slices] + [wait for wait, _ in picture.waits])
    ended = max(one.ended for one in picture.slices)
    unit, scale = unit_of(ended - began)
    shift = Shift(began, scale)
    height = max(3.4, ROW_IN * (len(places) + 1.6 * bool(picture.waits)) + 2.0)
    figure, axes = pyplot.subplots(figsize=(WIDTH_IN, height), layout="constrained")
    margin = (ended - began) / scale * 0.01 or 1.0
    axes.set_xlim(-margin, (ended - began) / scale + margin)
    bottom = len(places) - 0.4 + (1.6 if picture.waits else 0)
    axes.set_ylim(bottom, -0.7)
    figure.canvas.draw()  # settles where the axes are, which the labels have to know
    for place in range(1, len(places), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#f4f4f4", zorder=0, linewidth=0)
    draw_slices(axes, picture, places, shift)
    draw_arrows(axes, picture, places, shift)
    ticks: list[float] = list(places.values())
    names = list(picture.rows.values())
    if picture.waits:
        most = draw_waits(axes, picture, shift, len(places) + 0.85)
        ticks.append(len(places) + 0.5)
        names.append(f"waiting on the host\n(at most {most} at a time)")
    axes.set_yticks(ticks, names, fontsize=9.5)
    if any(process == 2 for process, _ in places) and any(process == 1 for process, _ in places):
        first = next(place for (process, _), place in places.items() if process == 2)
        axes.axhline(first - 0.5, color="#888888", linewidth=1.2)
    axes.set_xlabel(f"{unit} since {shift.began / 1000:.3f} ms of the trace", fontsize=10)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    count = len(picture.slices)
    notes = f"  ({'; '.join(picture.notes)})" if picture.notes else ""
    axes.set_title(f"{title}: {count} slice{'s' * (count != 1)} on {picture.device}{notes}", fontsize=12.5, loc="left")
    legend(figure, picture)
    figure.savefig(target, dpi=DPI)
    pyplot.close(figure)


@dataclass
class Shift:
    """From us of the trace to the axis."""

    began: float
    scale: float

    def __call__(self, us: float) -> float:
        return (us - self.began) / self.scale


def draw_slices(axes: Any, picture: Picture, places: dict[tuple[int, int], int], shift: Shift) -> None:
    """Draw a bar for each, with its name where that has room: in it, or else above it."""
    to_px = axes.transData.transform
    free = dict.fromkeys(places, -1e9)  # per row: where the last label above ends, in pixels,
    last: dict[tuple[int, int], str] = {}  # and what it says
    many = len(picture.slices) > 60
    right = to_px((axes.get_xlim()[1], 0))[0]
    for one in picture.slices:
        place, left, width = places[one.row], shift(one.began), (one.ended - one.began) / shift.scale
        colour = COLOURS.get(one.kind, OTHER)
        edge, thick = (FAILED, 2.0) if one.failed else ("white" if len(picture.slices) < 600 else colour, 0.6)
        x, room = to_px((left, 0))[0], to_px((left + width, 0))[0] - to_px((left, 0))[0]
        if room < 2.5 and not one.failed:
            edge = colour  # or a white edge is all there is to see
        axes.barh(
            place + 0.12, width, left=left, height=0.56, color=colour, edgecolor=edge, linewidth=thick, zorder=2,
            hatch="///" if one.failed else None,
        )  # fmt: skip
        taken = CHARACTER_PX * len(one.name)
        if taken + 6 < room:
            dark = one.kind in ("piece", "put", "fill", "completion")
            axes.text(
                left + width / 2, place + 0.13, one.name, ha="center", va="center", fontsize=8,
                color="#202020" if dark else "white", zorder=4, clip_on=True,
            )  # fmt: skip
        elif x >= free[one.row] and x + taken < right + 60 and not (many and last.get(one.row) == one.name):
            axes.text(
                left, place - 0.2, one.name, ha="left", va="bottom", fontsize=7.5, color="#404040", zorder=4,
                bbox={"facecolor": "white", "alpha": 0.7, "pad": 0.6, "linewidth": 0},
            )  # fmt: skip
            free[one.row] = x + taken + 6
            last[one.row] = one.name


def draw_arrows(axes: Any, picture: Picture, places: dict[tuple[int, int], int], shift: Shift) -> None:
    """Draw what one row waits for on another."""
    thin = len(picture.arrows) > 60
    for (source, leaves), (target, arrives), what in picture.arrows:
        down = places[target] > places[source]
        start = (shift(leaves), places[source] + (0.4 if down else -0.16))
        end = (shift(arrives), places[target] + (-0.16 if down else 0.4))
        style = {
            "arrowstyle": "-|>",
            "color": COLOURS["host function"] if what == "call" else ARROW,
            "alpha": 0.35 if thin else 0.75,
            "linewidth": 0.6 if thin else 1.0,
            "shrinkA": 0,
            "shrinkB": 0,
            "mutation_scale": 7 if thin else 10,
            "connectionstyle": "arc3,rad=0.06",
        }
        axes.annotate("", xy=end, xytext=start, arrowprops=style, zorder=3)


def draw_waits(axes: Any, picture: Picture, shift: Shift, base: float) -> int:
    """Draw how many operations wait on the host, as an area; return the largest number."""
    changes = sorted([(began, 1) for began, _ in picture.waits] + [(ended, -1) for _, ended in picture.waits])
    times, counts, count = [shift(changes[0][0])], [0], 0
    for ts, change in changes:
        count += change
        times.append(shift(ts))
        counts.append(count)
    most = max(counts)
    tops = [base - 0.8 * count / most for count in counts]
    axes.fill_between(times, tops, base, step="post", color=WAITING, edgecolor="#a08050", linewidth=0.8, zorder=2)
    for ts in picture.never:
        axes.plot([shift(ts)], [base - 0.05], marker="x", color=FAILED, zorder=3)
    return most


def legend(figure: Any, picture: Picture) -> None:
    """Say what the colours are, below everything."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = dict.fromkeys(one.kind for one in picture.slices)
    order = [kind for kind in COLOURS if kind in kinds] + [kind for kind in kinds if kind not in COLOURS]
    handles: list[Any] = [Patch(color=COLOURS.get(kind, OTHER), label=kind) for kind in order]
    if any(one.failed for one in picture.slices):
        handles.append(Patch(facecolor="white", edgecolor=FAILED, hatch="///", label="failed"))
    for what, colour in (("dependency", ARROW), ("call", COLOURS["host function"])):
        if any(arrow[2] == what for arrow in picture.arrows):
            handles.append(Line2D([], [], color=colour, marker=">", markersize=5, linewidth=1, label=what))
    if picture.waits:
        handles.append(Patch(color=WAITING, label="waiting on the host"))
    if picture.never and picture.waits:
        handles.append(Line2D([], [], color=FAILED, marker="x", linestyle="", label="never started"))
    figure.legend(handles=handles, loc="outside lower left", ncols=10, frameon=False, fontsize=9.5)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/timeline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="what off.trace(FILE) has written")
    parser.add_argument("--output", type=Path, metavar="FILE.png", help="the picture (default: beside FILE)")
    parser.add_argument("--limit", type=int, default=3000, help="slices that are drawn at most (default: %(default)s)")
    parser.add_argument("--no-setup", action="store_true", help="run in the Python at hand, install nothing")
    options = parser.parse_args(argv)
    if options.limit < 1:
        parser.error("--limit is at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    output = options.output or options.file.with_suffix(".png")
    try:
        picture = gather(*read(options.file), options.limit)
    except NoTrace as error:
        print(f"scripts/timeline: {options.file}: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, ValueError) as error:
        print(f"scripts/timeline: {options.file}: an event in it makes no sense: {error!r}", file=sys.stderr)
        return 2
    try:
        draw(picture, options.file.name, output)
    except OSError as error:
        print(f"scripts/timeline: {output}: cannot write it: {error.strerror}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"scripts/timeline: {error.name} is missing: install the package's extra 'bench'", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
