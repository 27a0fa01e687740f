"""Scan a directory tree with kernels and compare every count with plain Python.

Counts bytes, lines and occurrences of words (overlapping ones too) in each file, with hundreds of
launches in flight. Exits 1 if any count differs from plain Python's, 2 if the scan could not be made.
"""

# Other jobs, each with its own --help: see LOOKUP, STREAM, HALO and SERVE. A folder of such a name is scanned
# as ./lookup.

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import io
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import sysconfig
import tempfile
import time
import unicodedata
import urllib.request
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from rich.console import Console

    from aiooffload.examples.lookup import Result
    from aiooffload.examples.scan import FileReport, ScanResult
    from aiooffload.examples.stream import Summary

_T = TypeVar("_T")
Advance = Callable[[int, int], None]
Job = Callable[[argparse.Namespace, TextIO], tuple[int, dict[str, Any] | None]]
"""Prints what there is to say; returns the exit code, and the figures if it has come that far."""

DEFAULT_WORDS = "import,self,return,async,=="
SHOWN = 5
"""Rows of each ranking in the table."""
SHOWN_PROBLEMS = 10

JOBS = """other jobs, in place of a path:
  lookup    a kernel resolves keys and asks a SQLite database for those it does not hold
  stream    a kernel takes a large file through a small buffer and asks for each chunk
  halo      MPI ranks relax one field, and exchange its edges while their kernels run
  --serve   a worker serves a search, and Triton's client asks it
"""
LOOKUP = """Resolve keys in a kernel that asks a SQLite database for those that its table does not hold.

The database is made for the purpose; most keys are asked for again and again, and a few of them it does
not have. Every value is compared with plain Python's. Exits 1 if one differs, 2 if it could not be done.
"""
STREAM = """Take a large file through a small device buffer, in one launch that asks for each chunk.

Counts byte values and makes a checksum, and compares them with plain Python's. Exits 1 if they differ,
2 if it could not be done.
"""
HALO = """Relax a field that is split over MPI ranks, which exchange the edges of their parts while kernels run.

Starts the ranks itself, by mpirun, and compares the result with plain NumPy's. Exits 1 if they differ,
2 if it could not be done.
"""
SERVE = """Serve a search for the nearest of many vectors, and ask it with Triton's client.

Starts `aiooffload serve aiooffload.examples.knn:app`, asks for the characters whose names are nearest to each text,
then for many at once, and stops it with SIGTERM. Every answer is compared with plain NumPy's. Exits 1 if one differs
or the worker does not end well, 2 if it could not be done.
"""
QUESTIONS = "black heart,arrow pointing left,smiling cat,musical note"
CONNECTIONS = 32
NEAREST = 3
"""Neighbours that are shown of each."""
MPI_ENVIRONMENT = {
    # Of Open MPI 4 and 5; others do not know these, nor do they need them. A rank bound to a core, as two or fewer
    # are, would have its event loop and the threads of its host device on that one.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    # More ranks than cores, and root, as in a container.
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    if argv[:1] == ["lookup"]:
        parser = job_parser("scripts/demo lookup", LOOKUP, lookup_job)
        parser.add_argument("--rows", type=positive, default=100_000, help="of the database (default: %(default)s)")
        parser.add_argument("--keys", type=positive, default=200_000, help="to resolve (default: %(default)s)")
        return parser.parse_args(argv[1:])
    if argv[:1] == ["stream"]:
        parser = job_parser("scripts/demo stream", STREAM, stream_job)
        parser.add_argument("path", nargs="?", help="the file (default: random bytes, made for the purpose)")
        parser.add_argument("--mib", type=positive, default=64, help="size of that file (default: %(default)s)")
        parser.add_argument("--chunk-kib", type=positive, default=1024, help="read at a time (default: %(default)s)")
        return parser.parse_args(argv[1:])
    if argv[:1] == ["halo"]:
        parser = job_parser("scripts/demo halo", HALO, halo_job)
        parser.add_argument("--ranks", type=positive, default=2, help="(default: %(default)s)")
        parser.add_argument("--rows", type=positive, default=514, help="two of them fixed (default: %(default)s)")
        parser.add_argument("--columns", type=positive, default=1024, help="(default: %(default)s)")
        parser.add_argument("--steps", type=positive, default=200, help="(default: %(default)s)")
        return parser.parse_args(argv[1:])
    if "--serve" in argv:
        parser = job_parser("scripts/demo --serve", SERVE, serve_job)
        parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
        parser.add_argument("--texts", type=words, default=QUESTIONS, metavar="TEXT,...", help="default: %(default)s")
        parser.add_argument("--requests", type=positive, default=400, help="at once, later (default: %(default)s)")
        return parser.parse_args(argv)
    parser = job_parser("scripts/demo", __doc__, scan_job, epilog=JOBS)
    parser.add_argument("path", nargs="?", help="the tree to scan (default: this Python's standard library)")
    parser.add_argument("--lanes", type=positive, default=16, help="streams to spread the launches over (default: 16)")
    parser.add_argument("--words", type=words, default=DEFAULT_WORDS, metavar="WORD,...", help="default: %(default)s")
    return parser.parse_args(argv)


def job_parser(name: str, description: str | None, job: Job, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return a parser with the options that every job has."""
    parser = argparse.ArgumentParser(
        prog=name, description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(job=job)
    parser.add_argument("--device", default="auto", help="auto, host or cuda:N (default: auto)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for standard output, alone")
    parser.add_argument("--no-setup", action="store_true", help="run in the Python at hand, install nothing")
    return parser


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
    options = arguments(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # File names need not be text.
    out = sys.stderr if options.json == "-" else sys.stdout
    import aiooffload as ao

    try:
        if options.json and options.json != "-":
            open(options.json, "a").close()  # Better to know now than after the job.
        code, found = options.job(options, out)
    except (ao.OffloadError, OSError, sqlite3.Error) as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nscripts/demo: stopped", file=sys.stderr)
        return 130
    if options.json and found is not None:
        write_json(options.json, found)
    return int(code)


def run(work: Coroutine[Any, Any, _T]) -> _T:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# The scan.


def scan_job(options: argparse.Namespace, out: TextIO) -> tuple[int, dict[str, Any] | None]:
    root = Path(options.path or sysconfig.get_path("stdlib"))
    result, device = run(scan_tree(options, root, out))
    if not result.files:
        print(f"scripts/demo: nothing to scan under {root}: no files that can be read", file=sys.stderr)
        return 2, None
    report(result, out)
    return 1 if result.differences else 0, figures(result, device)


async def scan_tree(options: argparse.Namespace, root: Path, out: TextIO) -> tuple[ScanResult, str]:
    import aiooffload as ao
    from aiooffload.examples.scan import scan

    async with ao.Offload(options.device, lanes=options.lanes) as off:
        device = off.properties.label
        print(f"scanning {root} on {device}, {options.lanes} lanes", file=out, flush=True)
        with progress_on(out) as advance:
            return await scan(off, root, options.words, advance), device


@contextmanager
def progress_on(out: TextIO, unit: str = "files") -> Iterator[Advance]:
    """Show progress as a bar on a terminal, as a line for each tenth elsewhere."""
    shown = -1

    def line(done: int, total: int) -> None:
        nonlocal shown
        if (tenth := done * 10 // max(total, 1)) > shown:
            shown = tenth
            print(f"{done} of {total} {unit}", file=out, flush=True)

    console = rich_console(out)
    if console is None:
        yield line
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=None), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
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


# The jobs whose kernels call the host.


def lookup_job(options: argparse.Namespace, out: TextIO) -> tuple[int, dict[str, Any] | None]:
    if importlib.util.find_spec("aiosqlite") is None:
        print("scripts/demo: this job needs aiosqlite: pip install 'aiooffload[demo]'", file=sys.stderr)
        return 2, None
    import numpy as np

    random = np.random.default_rng(0)
    known = random.choice(2**40, options.rows, replace=False)
    entries = dict(zip(known.tolist(), random.random(options.rows).tolist(), strict=True))
    # The eighth power: few keys are most of what is asked for.
    keys = known[(random.random(options.keys) ** 8 * options.rows).astype(np.int64)]
    keys[::101] += 2**40
    with tempfile.TemporaryDirectory() as folder:
        result, device = run(resolve_keys(options, Path(folder, "entries.sqlite"), entries, keys, out))
    expected = np.array([entries.get(key, np.nan) for key in keys.tolist()])
    differing = int(np.count_nonzero((result.values != expected) & ~(np.isnan(result.values) & np.isnan(expected))))
    print(
        f"{result.hits:,} hits, {result.misses:,} misses; {result.batches:,} queries gave {result.rows:,} rows; "
        f"{result.wall_s:.2f} s",
        file=out,
    )
    verdict = f"failed: {differing} values differ from plain Python's, of" if differing else "ok:"
    print(f"{verdict} {keys.size} keys, {keys.size / result.wall_s:.0f} keys/s", file=out, flush=True)
    return 1 if differing else 0, {
        "keys": keys.size,
        "hits": result.hits,
        "misses": result.misses,
        "batches": result.batches,
        "rows": result.rows,
        "mismatches": differing,
        "wall_s": round(result.wall_s, 4),
        "device": device,
    }


async def resolve_keys(
    options: argparse.Namespace, path: Path, entries: dict[int, float], keys: NDArray[np.int64], out: TextIO
) -> tuple[Result, str]:
    import aiooffload as ao
    from aiooffload.examples.lookup import Database, create_database, resolve

    await create_database(path, entries.items())
    async with Database(path) as database, ao.Offload(options.device) as off:
        device = off.properties.label
        print(f"resolving {keys.size} keys on {device}, {len(entries)} rows in the database", file=out, flush=True)
        with progress_on(out, "keys") as advance:
            return await resolve(off, database, keys, progress=advance), device


def stream_job(options: argparse.Namespace, out: TextIO) -> tuple[int, dict[str, Any] | None]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(options.path or write_random(Path(folder, "bytes"), options.mib))
        result, device = run(stream_file(options, path, out))
        histogram, checksum = plain_summary(path)
    same = result.histogram.tolist() == histogram.tolist() and result.checksum == checksum
    print(f"{result.chunks:,} chunks, checksum {result.checksum:016x}; {result.wall_s:.2f} s", file=out)
    verdict = "ok" if same else "failed: plain Python counts otherwise"
    rate = result.nbytes / 2**20 / result.wall_s
    print(f"{verdict}: {result.nbytes} bytes, {result.lines} lines, {rate:.0f} MiB/s", file=out, flush=True)
    return 0 if same else 1, {
        "bytes": result.nbytes,
        "lines": result.lines,
        "chunks": result.chunks,
        "checksum": f"{result.checksum:016x}",
        "mismatches": 0 if same else 1,
        "wall_s": round(result.wall_s, 4),
        "device": device,
    }


async def stream_file(options: argparse.Namespace, path: Path, out: TextIO) -> tuple[Summary, str]:
    import aiooffload as ao
    from aiooffload.examples.stream import stream

    async with ao.Offload(options.device) as off:
        device = off.properties.label
        print(f"streaming {path} through {device}, {options.chunk_kib} KiB at a time", file=out, flush=True)
        with progress_on(out, "bytes") as advance:
            return await stream(off, path, chunk_bytes=options.chunk_kib * 1024, progress=advance), device


def write_random(path: Path, mib: int) -> Path:
    import numpy as np

    random = np.random.default_rng(0)
    with path.open("wb") as file:
        for _ in range(mib):
            file.write(random.bytes(2**20))
    return path


def plain_summary(path: Path) -> tuple[NDArray[np.int64], int]:
    """Count byte values and make the checksum with NumPy alone."""
    import numpy as np

    data: NDArray[np.uint8] = np.fromfile(path, np.uint8)
    # A part at a time: the positions are eight times as large as the bytes.
    part = 2**20
    checksum = sum(
        int(np.arange(i + 1, i + 1 + len(data[i : i + part]), dtype=np.uint64) @ data[i : i + part])
        for i in range(0, data.size, part)
    )
    return np.bincount(data, minlength=256), checksum % 2**64


# The job of several processes.


def halo_job(options: argparse.Namespace, out: TextIO) -> tuple[int, dict[str, Any] | None]:
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        print("scripts/demo: this job needs mpirun; on Debian and Ubuntu: apt-get install openmpi-bin", file=sys.stderr)
        return 2, None
    if importlib.util.find_spec("mpi4py") is None:
        print("scripts/demo: this job needs mpi4py: pip install 'aiooffload[demo]'", file=sys.stderr)
        return 2, None
    print(f"relaxing {options.rows} x {options.columns} values with {options.ranks} ranks", file=out, flush=True)
    work = ["device", "rows", "columns", "steps"]
    command = [mpirun, "-n", str(options.ranks), sys.executable, "-m", "mpi4py", "-m", "aiooffload.examples.halo"]
    command += [f"--{name}={getattr(options, name)}" for name in work]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = MPI_ENVIRONMENT | os.environ | {"PYTHONPATH": path}
    ranks = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        figures: dict[str, Any] = json.loads(ranks.stdout)
    except ValueError:
        print(f"{ranks.stdout}{ranks.stderr}scripts/demo: mpirun ended with {ranks.returncode}", file=sys.stderr)
        return 2, None
    same = not figures["mismatches"]
    verdict = "ok:" if same else f"failed: {figures['mismatches']} values differ from plain NumPy's, after"
    print(
        f"{verdict} {figures['steps']} steps on {', '.join(figures['devices'])}, "
        f"{figures['steps'] / figures['wall_s']:.0f} steps/s",
        file=out,
        flush=True,
    )
    return 0 if same else 1, figures


# The job of a worker and its client.


def serve_job(options: argparse.Namespace, out: TextIO) -> tuple[int, dict[str, Any] | None]:
    try:
        import tritonclient.http  # noqa: F401  (to be told now)
    except (ImportError, RuntimeError) as error:  # not there, or without its HTTP part
        print(
            f"scripts/demo: this job needs Triton's client: pip install 'aiooffload[demo]' ({error})", file=sys.stderr
        )
        return 2, None
    from benchmarks.serve import NotServing, Worker

    app = "aiooffload.examples.knn:app"
    try:
        with Worker(options.device, app) as worker:
            print(f"{app} on {worker.device}: http://127.0.0.1:{worker.port}", file=out, flush=True)
            found = ask_worker(options, f"127.0.0.1:{worker.port}", out)
            worker.process.send_signal(signal.SIGTERM)
            found["exit_status"] = worker.process.wait(60)
    except NotServing as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 2, None
    good = not found["mismatches"] and not found["exit_status"]
    verdict = "ok" if good else f"failed: {found['mismatches']} answers differ, exit status {found['exit_status']}"
    rate = f"{found['requests_per_s']:.0f} requests/s in {found['calls']} calls of the handler"
    print(f"{verdict}: {found['requests']} requests, {rate}", file=out, flush=True)
    return 0 if good else 1, found | {"device": worker.device}


def ask_worker(options: argparse.Namespace, address: str, out: TextIO) -> dict[str, Any]:
    """Ask for each text, show the answers, then ask for many at once."""
    import gevent.pool
    import numpy as np
    from tritonclient.http import InferenceServerClient, InferInput

    from aiooffload.examples.knn import characters, embed

    gevent.get_hub().NOT_ERROR += (KeyboardInterrupt,)  # nothing to be printed by a greenlet

    known = list(characters())
    vectors = embed([unicodedata.name(one) for one in known])

    def inputs(query: NDArray[np.float32]) -> list[InferInput]:
        given = [InferInput("query", [1, query.size], "FP32"), InferInput("k", [1, 1], "INT32")]
        for one, array in zip(given, (query.reshape(1, -1), np.array([[NEAREST]], np.int32)), strict=True):
            one.set_data_from_numpy(array)
        return given

    def differs(query: NDArray[np.float32], answer: Any) -> bool:
        """Whether these are not the nearest: their scores decide, since some are equally near."""
        products = vectors @ query
        ids, scores = (answer.as_numpy(name)[0, :NEAREST] for name in ("id", "score"))
        names = [f"{known[i]} {unicodedata.name(known[i])}".encode() for i in ids]
        return not (
            np.allclose(scores, np.sort(products)[: -NEAREST - 1 : -1], atol=1e-5)
            and np.allclose(scores, products[ids], atol=1e-5)
            and names == answer.as_numpy("text")[0, :NEAREST].tolist()
        )

    with InferenceServerClient(address, concurrency=CONNECTIONS) as client:
        queries = embed(options.texts)
        answers = [client.infer("knn", inputs(query)) for query in queries]
        for text, answer in zip(options.texts, answers, strict=True):
            scores, texts = answer.as_numpy("score")[0, :NEAREST], answer.as_numpy("text")[0, :NEAREST]
            rows = [[one.decode(), f"{score:.2f}"] for one, score in zip(texts, scores, strict=True)]
            print_table(text, ["character", "likeness"], rows, out)
        mismatches = sum(map(differs, queries, answers))
        chosen = vectors[np.random.default_rng(0).integers(0, len(vectors), options.requests)]
        before, start = calls_of(address), time.perf_counter()
        # Not async_infer, which sleeps for 10 ms in each call.
        many = gevent.pool.Pool(CONNECTIONS).map(lambda query: client.infer("knn", inputs(query)), chosen)
        seconds = time.perf_counter() - start
        mismatches += sum(map(differs, chosen, many))
    print(file=out)
    return {
        "requests": len(many),
        "requests_per_s": round(len(many) / seconds, 1),
        "calls": calls_of(address) - before,
        "mismatches": int(mismatches),
    }


def calls_of(address: str) -> int:
    """Return how many calls of handlers the worker's metrics count."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("aiooffload_batch_requests_count"))


def write_json(target: str, data: dict[str, Any]) -> None:
    text = json.dumps(data, indent=2) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        Path(target).write_text(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started has to end, too
    sys.exit(main())
