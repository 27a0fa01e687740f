"""The tables of ``scripts/bench completion``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TextIO

OURS = ("hybrid", "interrupt", "poll")
COMPARED = "hybrid"
Figures = dict[str, Any]


def show(figures: Figures, out: TextIO) -> None:
    """Print everything that was measured."""
    print(f"device {figures['device']} ({figures['device_name']}), loop {figures['loop']}", file=out)
    if figures["rows"]:
        show_latency(figures, out)
        show_ratios(figures, out)
        show_throughput(figures, out)
        show_held(figures, out)
    if "memory" in figures:
        show_memory(figures["memory"], out)
    if "faults" in figures:
        show_faults(figures["faults"], out)


def show_latency(figures: Figures, out: TextIO) -> None:
    table = by_mechanism(figures["rows"])
    kernels = kernels_of(figures)
    long = figures["cpu_during_300ms"]
    print("\nExcess over the kernel's own duration, launch included: p50 / p99, us", file=out)
    excess = {name: [excess_of(rows[kernel]) for kernel in kernels] for name, rows in table.items()}
    print_table(["", *map(duration, kernels)], excess, out)
    print("\nCPU of the process, %", file=out)
    cpu = {name: [f"{rows[kernel]['cpu_percent']:.1f}" for kernel in kernels] for name, rows in table.items()}
    for name, cells in cpu.items():
        cells.append(f"{long[name]:.1f}")
    print_table(["", *map(duration, kernels), "300 ms"], cpu, out)


def excess_of(row: Figures) -> str:
    return f"{number(row['excess_p50_us'])} / {number(row['excess_p99_us'])}"


def show_ratios(figures: Figures, out: TextIO) -> None:
    table = by_mechanism(figures["rows"])
    kernels = kernels_of(figures)
    ours, long = table[COMPARED], figures["cpu_during_300ms"]
    print(f"\nTimes {COMPARED}: excess p50 and CPU (above 1, {COMPARED} is better)", file=out)
    cells = {
        name: [
            *(both_ratios(rows[kernel], ours[kernel]) for kernel in kernels),
            ratio(long[name], long[COMPARED]),
        ]
        for name, rows in table.items()
        if name != COMPARED
    }
    print_table(["", *map(duration, kernels), "300 ms"], cells, out)


def both_ratios(peer: Figures, ours: Figures) -> str:
    excess = ratio(peer["excess_p50_us"], ours["excess_p50_us"])
    return f"{excess} {ratio(peer['cpu_percent'], ours['cpu_percent']):>7}"


def show_throughput(figures: Figures, out: TextIO) -> None:
    rates = {(row["mechanism"], row["tasks"]): row["awaits_per_s"] for row in figures["throughput"]}
    tasks = sorted({task for _, task in rates})
    names = list(dict.fromkeys(name for name, _ in rates))
    lanes = figures["throughput"][0]["lanes"]
    print(f"\nAwaits of an empty kernel per second, {lanes} lanes (and {COMPARED}'s rate over it)", file=out)
    cells = {
        name: [f"{rates[name, task]:,.0f} {ratio(rates[COMPARED, task], rates[name, task]):>7}" for task in tasks]
        for name in names
    }
    print_table(["", *(f"{task} task" + "s" * (task > 1) for task in tasks)], cells, out)


def show_held(figures: Figures, out: TextIO) -> None:
    longest = {(row["mechanism"], row["load"]): row["longest_us"] for row in figures["loop_held"]}
    loads = list(dict.fromkeys(row["load"] for row in figures["loop_held"]))
    names = list(dict.fromkeys(name for name, _ in longest))
    print("\nLongest time between two turns of the loop, us", file=out)
    cells = {
        name: [f"{longest[name, load]:,.0f}" if (name, load) in longest else "-" for load in loads] for name in names
    }
    print_table(["", *loads], cells, out)


def show_memory(memory: Figures, out: TextIO) -> None:
    before, after = memory["before"], memory["after"]
    print(
        f"\n{memory['launches']:,} launches in a row: resident memory grew by {memory['grown_mb']} MB to "
        f"{after['resident_bytes'] / 1e6:.1f} MB; descriptors {before['descriptors']} -> {after['descriptors']}, "
        f"threads {before['threads']} -> {after['threads']}",
        file=out,
    )


def show_faults(faults: Sequence[Figures], out: TextIO) -> None:
    print("\nFrom a fault to the last failed await", file=out)
    if not faults:
        print("  not on this device", file=out)
    for row in faults:
        if "problem" in row:
            print(f"  {row['fault']}: {row['problem']}", file=out)
            continue
        print(
            f"  {row['fault']}: {row['last_await_ms']} ms; {row['lost']} of {row['in_flight']} in flight ended with "
            f"DeviceLostError; aclose {row['aclose_ms']} ms",
            file=out,
        )


def by_mechanism(rows: Iterable[Figures]) -> dict[str, dict[int, Figures]]:
    table: dict[str, dict[int, Figures]] = {}
    for row in rows:
        table.setdefault(row["mechanism"], {})[row["kernel_us"]] = row
    return table


def kernels_of(figures: Figures) -> list[int]:
    return sorted({row["kernel_us"] for row in figures["rows"]})


def duration(microseconds: int) -> str:
    if microseconds == 0:
        return "empty"
    return f"{microseconds} us" if microseconds < 1000 else f"{microseconds // 1000} ms"


def number(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def ratio(over: float, under: float) -> str:
    """Return how many times ``under`` goes into ``over``, where that means anything."""
    if over <= 0 or under <= 0:
        return "-"
    value = over / under
    return f"{value:.2f}x" if value < 10 else f"{value:.0f}x"


def print_table(header: Sequence[str], rows: dict[str, list[str]], out: TextIO) -> None:
    """Print rows by name, every column but the first aligned to the right."""
    lines = [list(header), *([name, *cells] for name, cells in rows.items())]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        print(f"  {first.ljust(widths[0])}  {'   '.join(cells)}".rstrip(), file=out)
