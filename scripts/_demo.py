"""Scan a directory tree with kernels and compare every count with plain Python.

Counts bytes, lines and occurrences of words (overlapping ones too) in each file, with hundreds of
launches in flight. Exits 1 if any count differs from plain Python's, 2 if the scan could not be made.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from rich.console import Console

    from aiooffload.examples.scan import FileReport, ScanResult

Advance = Callable[[int, int], None]

DEFAULT_WORDS = "import,self,return,async,=="
SHOWN = 5
"""Rows of each ranking in the table."""
SHOWN_PROBLEMS = 10


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", nargs="?", help="the tree to scan (default: this Python's standard library)")
    parser.add_argument("--device", default="auto", help="auto, host or cuda:N (default: auto)")
    parser.add_argument("--lanes", type=positive, default=16, help="streams to spread the launches over (default: 16)")
    parser.add_argument("--words", type=words, default=DEFAULT_WORDS, metavar="WORD,...", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for standard output, alone")
    parser.add_argument("--no-setup", action="store_true", help="run in the Python at hand, install nothing")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def words(text: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(word for word in text.split(",") if word))
    if not found:
        raise argparse.ArgumentTypeError("name at least one word")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # File names need not be text.
    out = sys.stderr if options.json == "-" else sys.stdout
    import uvloop

    import aiooffload as ao

    root = Path(options.path or sysconfig.get_path("stdlib"))
    try:
        if options.json and options.json != "-":
            open(options.json, "a").close()  # Better to know now than after the scan.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result, device = runner.run(scan_tree(options, root, out))
    except (ao.OffloadError, OSError) as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nscripts/demo: stopped", file=sys.stderr)
        return 130
    if not result.files:
        print(f"scripts/demo: nothing to scan under {root}: no files that can be read", file=sys.stderr)
        return 2
    report(result, out)
    if options.json:
        write_json(options.json, figures(result, device))
    return 1 if result.differences else 0


async def scan_tree(options: argparse.Namespace, root: Path, out: TextIO) -> tuple[ScanResult, str]:
    import aiooffload as ao
    from aiooffload.examples.scan import scan

    async with ao.Offload(options.device, lanes=options.lanes) as off:
        device = off.properties.label
        print(f"scanning {root} on {device}, {options.lanes} lanes", file=out, flush=True)
        with progress_on(out) as advance:
            return await scan(off, root, options.words, advance), device


@contextmanager
def progress_on(out: TextIO) -> Iterator[Advance]:
    """Show progress as a bar on a terminal, as a line for each tenth elsewhere."""
    shown = -1

    def line(done: int, total: int) -> None:
        nonlocal shown
        if (tenth := done * 10 // total) > shown:
            shown = tenth
            print(f"{done} of {total} files", file=out, flush=True)

    console = rich_console(out)
    if console is None:
        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn("files"), TimeElapsedColumn())
    with Progress(*columns, console=console, auto_refresh=False) as bar:
        task = bar.add_task("", total=None)
        drawn = 0.0

        def draw(done: int, total: int) -> None:
            # Drawing takes the loop's time: ten times a second is enough.
            nonlocal drawn
            if done == total or time.monotonic() - drawn > 0.1:
                drawn = time.monotonic()
                bar.update(task, completed=done, total=total, refresh=True)

        yield draw


def rich_console(out: TextIO) -> Console | None:
    """Return what draws on ``out``, if that is a terminal and rich is there."""
    if not out.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=out, highlight=False)


def report(result: ScanResult, out: TextIO) -> None:
    """Print tables, whatever went wrong, and the final line."""
    for title, header, rows in tables(result):
        print_table(title, header, rows, out)
    print_some(f"{len(result.unreadable)} not read", [f"{path}: {why}" for path, why in result.unreadable], out)
    print_some(
        f"{len(result.differences)} counts differ from plain Python's",
        [f"{one.path}: {one.counter}: device {one.device}, Python {one.python}" for one in result.differences],
        out,
        shown=len(result.differences),
    )
    print(f"{result.launches:,} launches, at most {result.peak_launches:,} in flight; {result.wall_s:.2f} s", file=out)
    verdict = "failed" if result.differences else "ok"
    print(
        f"{verdict}: {len(result.files)} files, {result.nbytes} bytes, {sum(result.matches)} matches, "
        f"{result.awaits_per_s:.0f} awaits/s",
        file=out,
        flush=True,
    )


def tables(result: ScanResult) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """Yield title, header and rows; the first column is text, the others are numbers."""
    per_word = sorted(zip(result.words, result.matches, strict=True), key=lambda row: -row[1])
    yield "Words", ["word", "matches"], [[word, f"{matches:,}"] for word, matches in per_word]
    kinds: dict[str, list[FileReport]] = {}
    for one in result.files:
        kinds.setdefault(one.path.suffix or "(none)", []).append(one)
    header = ["extension", "files", "bytes", "lines", "matches"]
    yield (
        "Extensions with the most bytes",
        header,
        largest([kind, len(kinds[kind]), *sums(kinds[kind])] for kind in kinds),
    )
    files = ([str(one.path), 1, *sums([one])] for one in result.files)
    rows = [[name, *numbers] for name, _, *numbers in largest(files)]
    yield "Largest files", ["file", "bytes", "lines", "matches"], rows


def sums(reports: Sequence[FileReport]) -> list[int]:
    """Add up bytes, lines and matches of all words."""
    counts = [one.counts for one in reports]
    return [
        sum(one.nbytes for one in counts),
        sum(one.lines for one in counts),
        sum(sum(one.matches) for one in counts),
    ]


def largest(rows: Iterable[list[Any]]) -> list[list[str]]:
    """Return the rows with the most bytes (third column), numbers as text."""
    chosen = sorted(rows, key=lambda row: -row[2])[:SHOWN]
    return [[name, *(f"{number:,}" for number in numbers)] for name, *numbers in chosen]


def print_table(title: str, header: list[str], rows: list[list[str]], out: TextIO) -> None:
    console = rich_console(out)
    if console is None:
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        print(f"\n{title}", file=out)
        for first, *others in [header, *rows]:
            cells = [
                first.ljust(widths[0]),
                *(text.rjust(width) for text, width in zip(others, widths[1:], strict=True)),
            ]
            print("  " + "  ".join(cells), file=out)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def print_some(title: str, lines: Sequence[str], out: TextIO, shown: int = SHOWN_PROBLEMS) -> None:
    if not lines:
        return
    print(f"\n{title}", file=out)
    for line in lines[:shown]:
        print(f"  {line}", file=out)
    if len(lines) > shown:
        print(f"  and {len(lines) - shown} more", file=out)


def figures(result: ScanResult, device: str) -> dict[str, Any]:
    return {
        "files": len(result.files),
        "bytes": result.nbytes,
        "matches": sum(result.matches),
        "mismatches": len(result.differences),
        "awaits_per_s": round(result.awaits_per_s, 1),
        "cpu_s": round(result.cpu_s, 4),
        "wall_s": round(result.wall_s, 4),
        "device": device,
        "lines": result.lines,
        "launches": result.launches,
        "peak_launches": result.peak_launches,
        "unreadable": len(result.unreadable),
    }


def write_json(target: str, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


if __name__ == "__main__":
    sys.exit(main())
