"""``scripts/bench``: that every mechanism runs, and the shape of its figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import aiooffload as ao

ROOT = Path(__file__).resolve().parents[2]
OURS = ["hybrid", "interrupt", "poll"]
MECHANISMS = [*OURS, "sync", "executor", "sleep0", "callback", "usleep"]
CONCURRENT = [*OURS, "executor", "sleep0", "callback"]
KERNELS = [0, 20, 100, 1_000, 10_000]


def bench(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "_bench.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What one short run wrote to standard output, and its plot."""
    plot = tmp_path_factory.mktemp("bench") / "plot.png"
    extra = ["--memory", "--launches", "2000", "--faults", "--plot", str(plot)]
    done = bench("completion", "--device", "host", "--smoke", "--json", "-", *extra)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), plot


def test_every_mechanism_has_a_row_for_every_kernel(smoke: tuple[dict[str, Any], Path]) -> None:
    """``rows`` has the agreed keys, for all mechanisms and durations, in order."""
    figures, _ = smoke
    rows = figures["rows"]
    assert [(row["kernel_us"], row["mechanism"]) for row in rows] == [
        (us, name) for us in KERNELS for name in MECHANISMS
    ]
    for row in rows:
        assert set(row) == {"mechanism", "kernel_us", "excess_p50_us", "excess_p99_us", "cpu_percent"}
        assert row["excess_p50_us"] <= row["excess_p99_us"]
        assert row["cpu_percent"] >= 0
    assert (figures["device"], figures["loop"]) == ("host", "uvloop")


def test_throughput_of_what_can_run_at_once(smoke: tuple[dict[str, Any], Path]) -> None:
    """``throughput`` has the agreed keys, for every mechanism that does not block the loop."""
    figures, _ = smoke
    rows = figures["throughput"]
    assert [(row["tasks"], row["mechanism"]) for row in rows] == [
        (n, name) for n in (1, 16, 512) for name in CONCURRENT
    ]
    for row in rows:
        assert set(row) == {"mechanism", "tasks", "lanes", "awaits_per_s"}
        assert row["lanes"] == 16
        assert row["awaits_per_s"] > 0


def test_what_else_is_measured(smoke: tuple[dict[str, Any], Path]) -> None:
    """The loop's longest turn, the CPU of a long kernel, memory and the plot are there."""
    figures, plot = smoke
    assert set(figures["cpu_during_300ms"]) == set(MECHANISMS)
    held = {(row["mechanism"], row["load"]): row["longest_us"] for row in figures["loop_held"]}
    assert held["sync", "kernels of 10 ms"] >= 10_000
    assert all(value > 0 for value in held.values())
    memory = figures["memory"]
    assert memory["launches"] == 2000
    assert memory["before"]["descriptors"] == memory["after"]["descriptors"]
    assert figures["faults"] == []
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_tables_are_printed(tmp_path: Path) -> None:
    """Without timings only what was asked for is printed; figures go to a file."""
    arguments = ["--device", "host", "--loop", "asyncio", "--no-timings", "--memory", "--launches", "100"]
    done = bench("completion", *arguments, "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "100 launches in a row" in done.stdout
    assert json.loads((tmp_path / "figures.json").read_text())["loop"] == "asyncio"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["completion", "--device", "abacus", "--smoke"], "abacus"),
        (["completion", "--smoke", "--quick"], "not allowed with"),
        (["copies", "--device", "abacus", "--smoke"], "abacus"),
        (["nonsense"], "invalid choice"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str) -> None:
    """What the user got wrong is said on standard error, with exit code 2."""
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


# -- reverse -------------------------------------------------------------------------------

ANSWERED = ["eager", "awaiting", "batch", "spin", "libgomp", "llvm"]
SERVED = [*ANSWERED[:3], "post", *ANSWERED[3:]]


@pytest.fixture(scope="module")
def reverse(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """The figures of one short run, and what it printed."""
    target = tmp_path_factory.mktemp("reverse") / "figures.json"
    done = bench("reverse", "--device", "host", "--smoke", "--json", str(target))
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text()), done


def test_every_way_to_answer_is_measured(
    reverse: tuple[dict[str, Any], subprocess.CompletedProcess[str]],
) -> None:
    """Each section has the agreed keys, for everything that is compared in it, in order."""
    figures, _ = reverse
    assert [row["name"] for row in figures["round_trip"]] == ANSWERED
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in figures["round_trip"])
    assert [(row["warps"], row["name"]) for row in figures["rates"]] == [
        (n, name) for n in (1, 8, 32) for name in SERVED
    ]
    assert all(row["calls_per_s"] > 0 for row in figures["rates"])
    assert [(row["silence_us"], row["name"]) for row in figures["silence"]] == [
        (us, name) for us in (1_000, 10_000) for name in ANSWERED
    ]
    for row in figures["silence"]:
        assert set(row) == {"name", "silence_us", "excess_p50_us", "cpu_percent"}
    assert {row["name"]: row["cpu_percent"] >= 0 for row in figures["resident"]} == dict.fromkeys(
        ("eager", "spin", "libgomp", "llvm"), True
    )
    (mapped,) = figures["mapped"]
    assert mapped["speed_percent"] == pytest.approx(100 * mapped["copies_us"] / mapped["mapped_us"], rel=0.01)
    assert (figures["device"], figures["rounds"], figures["problems"], figures["bars"]) == ("host", 1, [], [])


def test_figures_are_printed_as_they_come_and_in_tables(
    reverse: tuple[dict[str, Any], subprocess.CompletedProcess[str]],
) -> None:
    """Progress is on standard error, a line for each figure; the tables are on standard output."""
    figures, done = reverse
    sections = ("round_trip", "rates", "silence", "resident", "mapped")
    assert len(done.stderr.splitlines()) == sum(len(figures[section]) for section in sections)
    assert "round 1 of 1: eager, round trip: p50_us" in done.stderr
    assert "vs libgomp" in done.stdout
    assert "The bars are for GPUs." in done.stdout


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the benchmark can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))


@pytest.mark.usefixtures("parts")
def test_bars_say_what_is_met() -> None:
    """Each figure of a GPU is held against its bar; one that is missing is not met."""
    from benchmarks import reverse_report

    figures = {
        "round_trip": [{"name": "eager", "p50_us": 6.5}, {"name": "libgomp", "p50_us": 45.5}],
        "rates": [
            {"name": "batch", "warps": 32, "calls_per_s": 4.2e6},
            {"name": "post", "warps": 32, "calls_per_s": 9e6},
        ],
        "resident": [{"name": "spin", "cpu_percent": 100.0}, {"name": "eager", "cpu_percent": 0.9}],
        "mapped": [],
    }
    met = {row["figure"]: (row["measured"], row["bar"], row["met"]) for row in reverse_report.bars(figures)}
    assert met["round trip, eager, p50"] == ("6.50 us", "<= 7 us", "yes")
    assert met["round trip, libgomp's loop over eager"] == ("7.00 x", ">= 8 x", "NO")
    assert met["batch, 32 warps"] == ("4.20 M/s", ">= 4 M/s", "yes")
    assert met["post, 32 warps"] == ("9.00 M/s", ">= 10 M/s", "NO")
    assert met["batch, 8,448 warps"] == ("-", ">= 8 M/s", "not measured")
    assert met["CPU, silent resident kernel"] == ("0.90 %", "<= 1 %", "yes")
    assert met["mapped tofrom, 1 MiB, speed of two copies"][2] == "not measured"
    assert len(met) == 10


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_kernels_for_gpus_compile(arch: str) -> None:
    """The CUDA code of ours and of the peers compiles, which needs no GPU."""
    from benchmarks import reverse_kernels, reverse_peers_cuda
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", include_path=[ao.include_dir()])
    for source in (reverse_kernels.SOURCE, reverse_peers_cuda.SOURCE):
        assert Program(source, "c++", options).compile("cubin").code


def program(text: str) -> subprocess.CompletedProcess[str]:
    """Run a program that can import the benchmarks' modules; they may block the loop, a test may not."""
    text = f"import asyncio, sys, time\nsys.path[:0] = ['.', 'scripts']\n{text}"
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, cwd=ROOT)


def test_a_loop_that_answers_nothing_fails_in_time() -> None:
    """Kernel and loop of a peer both end by themselves, and the step fails with a message."""
    done = program("""
from benchmarks import reverse_peers

reverse_peers.LIMIT_NS = 50_000_000
peer = reverse_peers.Spin(reverse_peers.HostThreads(2))
for status, step in (0, peer.rate(2, 1)), (-1, peer.calls(1)):
    peer._serve = lambda serving: status
    try:
        asyncio.run(step)
    except RuntimeError as error:
        print(error)
""")
    assert done.stdout.splitlines() == ["2 warps got no answer", "the loop ended with -1, too late"], done.stderr


def test_what_fails_is_told_and_the_rest_is_measured() -> None:
    """A step that takes too long is a problem of its own; ours begin with a new Offload after it."""
    done = program("""
from benchmarks import reverse, reverse_ours

async def hangs(session, count):
    await asyncio.sleep(60)

async def take(run, step, what, session, _take=reverse.Run._take):
    reverse.STEP_LIMIT_S = 0.5 if step.section == "mapped" else 10.0
    await _take(run, step, what, session)

reverse_ours.mapped = hangs
reverse.Run._take = take
reverse.WARPS = {"host": (1,)}
run = reverse.Run("-", reverse.SMOKE, "host", "")
asyncio.run(run.run())
run.write()
""")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [problem["step"] for problem in figures["problems"]] == ["round 1 of 1: eager, 1 MiB mapped"]
    assert [row["name"] for row in figures["round_trip"]] == ANSWERED
    assert "FAILED: TimeoutError" in done.stderr


def test_a_hang_ends_the_process() -> None:
    """Where nothing else helps, the process ends with a message and what it had to say."""
    done = program("""
from benchmarks.reverse_measure import Watch

with Watch(lambda: print("last words")).step("a step", 0.2):
    time.sleep(60)
""")
    assert (done.returncode, done.stdout) == (3, "last words\n")
    assert "a step hangs" in done.stderr


# -- graph ---------------------------------------------------------------------------------


def test_graph(tmp_path: Path) -> None:
    """``graph`` measures every way with every duration, and the await beside a flood."""
    done = bench("graph", "--device", "host", "--smoke", "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    ways = [(us, way) for us in (400, 20) for way in ("device", "host", "callback")]
    assert [(row["kernel_us"], row["way"]) for row in figures["rows"]] == ways
    for row in figures["rows"]:
        # Nothing is faster than what bounds it on a device, kernels of the host take what they are asked for at least.
        assert row["wall_ms"] >= row["longest_path_ms"]
        assert row["over_bound"] > 0
    assert [row["path"] for row in figures["flood"]] == ["alone", "leased lane", "priority", "no lane of its own"]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in figures["flood"])
    assert "longest path" in done.stdout
    assert "bar <= 1.2" in done.stdout


# -- copies --------------------------------------------------------------------------------

DIRECTIONS = ["device to device", "pinned to device", "device to pinned", "pageable to device", "device to pageable"]


def test_copies_are_measured_in_each_direction(tmp_path: Path) -> None:
    """Each direction has the rates of all ways, and what they are in percent of the contiguous copy's."""
    done = bench("copies", "--device", "host", "--smoke", "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [row["direction"] for row in figures["rows"]] == DIRECTIONS
    for row in figures["rows"]:
        assert set(row) == {
            "direction", "contiguous_gb_s", "strided_gb_s", "rows_gb_s", "percent", "rows_percent"
        }  # fmt: skip
        assert all(value > 0 for key, value in row.items() if key != "direction")
        assert row["percent"] == pytest.approx(100 * row["strided_gb_s"] / row["contiguous_gb_s"], rel=0.02)
    assert (figures["device"], figures["size"], figures["bars"]) == ("host", 256, [])
    assert "Half of the columns of 256 x 256" in done.stdout
    assert "The bars are for GPUs." in done.stdout


def test_figures_of_copies_go_alone_to_standard_output() -> None:
    """With ``--json -`` the table is on standard error."""
    done = bench("copies", "--device", "host", "--smoke", "--json", "-")
    assert [row["direction"] for row in json.loads(done.stdout)["rows"]] == DIRECTIONS
    assert "strided" in done.stderr


@pytest.mark.usefixtures("parts")
def test_bar_of_copies() -> None:
    """Four fifths of the contiguous rate are enough, less is not."""
    from benchmarks import copies, copies_report

    rows = [{"direction": "up", "percent": 80.0}, {"direction": "down", "percent": 79.9}]
    met = [row["met"] for row in copies_report.bars(rows, copies.LEAST_PERCENT)]
    assert met == ["yes", "NO"]


# -- bind ----------------------------------------------------------------------------------


def test_ways_to_enqueue(tmp_path: Path) -> None:
    """``bind`` has a row for each of ours, prints tables, and holds no bar against the host device."""
    done = bench("bind", "--device", "host", "--smoke", "--json", "figures.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert [row["way"] for row in figures["enqueue"]] == ["launch", "bound", "changed", "coarse"]
    assert all(0 < row["p50_us"] <= row["p90_us"] for row in figures["enqueue"])
    tasks = {row["way"]: row["tasks"] for row in figures["throughput"]}
    assert tasks == {"launch": 512, "bound": 512, "coarse": 16}
    assert all(row["launches_per_s"] > 0 for row in figures["throughput"])
    assert (figures["device"], figures["burst"], figures["missing"], figures["bars"]) == ("host", 64, {}, [])
    assert "over bound" in done.stdout
    assert "Bars" not in done.stdout


def test_figures_alone_on_standard_output() -> None:
    """With ``--json -`` the tables go to standard error."""
    done = bench("bind", "--device", "host", "--smoke", "--json", "-", "--loop", "asyncio")
    assert json.loads(done.stdout)["loop"] == "asyncio", done.stderr
    assert "Launches per second" in done.stderr


@pytest.mark.usefixtures("parts")
def test_bars_of_bound_launches(capsys: pytest.CaptureFixture[str]) -> None:
    """A GPU's figures are held against the bars, and both are printed beside what is missing."""
    from benchmarks import bind

    ways = {"bound": 4.9, "changed": 6.1}
    figures = {
        "device": "cuda:0",
        "device_name": "a GPU",
        "loop": "uvloop",
        "burst": 64,
        "enqueue": [{"way": way, "p50_us": value, "p90_us": 9.0} for way, value in ways.items()],
        "throughput": [
            {"way": "launch", "tasks": 512, "launches_per_s": 100_000},
            {"way": "bound", "tasks": 512, "launches_per_s": 150_000},
            {"way": "coarse", "tasks": 16, "launches_per_s": 189_999},
        ],
        "missing": {"cupy": "No module named 'cupy'"},
    }
    figures["bars"] = bind.bars(figures)
    assert [row["met"] for row in figures["bars"]] == [True, False, True, False]
    bind.show(figures, sys.stdout)
    printed = capsys.readouterr().out
    assert "changed, enqueue, us: 6.1 <= 6 NO" in printed
    assert "coarse, launches/s, 16 tasks: 189,999 >= 190,000 NO" in printed
    assert "cupy: No module named 'cupy'" in printed


@pytest.mark.usefixtures("parts")
def test_peers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that can be opened are, the others are left out with the reason."""
    from benchmarks import bind_peers_cuda

    class Present(bind_peers_cuda.Peer):
        name = "present"

        def enqueue(self) -> None:
            pass

        def synchronise(self) -> None:
            pass

        def close(self) -> None:
            pass

    class Absent(Present):
        name = "absent"

        def __init__(self, *args: int) -> None:
            raise ImportError("No module named 'absent'")

    monkeypatch.setattr(bind_peers_cuda, "PEERS", (Absent, Present))
    peers, missing = bind_peers_cuda.open_all(0, 1, 2)
    assert [peer.way().name for peer in peers] == ["present"]
    assert peers[0].way().burst(3) > 0
    assert missing == {"absent": "No module named 'absent'"}


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("arch", ["sm_75", "sm_120"])
def test_kernel_of_bound_launches_compiles(arch: str) -> None:
    """Its CUDA code compiles, which needs no GPU."""
    from benchmarks import bind_ways
    from cuda.core import Program, ProgramOptions

    assert Program(bind_ways.SOURCE, "c++", ProgramOptions(arch=arch)).compile("cubin").code


# -- schedule ------------------------------------------------------------------------------


def test_scheduling_is_measured() -> None:
    """``schedule`` has a figure for each number of others and where they are, and says whether the bar is met."""
    done = bench("schedule", "--smoke", "--json", "-")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert [(row["where"], row["pending"]) for row in figures["rows"]] == [
        (where, pending) for where in ("waiting", "held") for pending in (100, 10_000)
    ]
    assert all(row["ns_per_operation"] > 0 for row in figures["rows"])
    assert set(figures["ratios"]) == {"waiting", "held"}
    assert figures["met"] is (max(figures["ratios"].values()) <= figures["bar"] == 2)
    assert "bar: 2x: " in done.stderr


# -- cancel --------------------------------------------------------------------------------


def test_cancel_smoke() -> None:
    """``cancel`` has a figure for each loop, way and order, and says whether the bar is met."""
    done = bench("cancel", "--smoke", "--json", "-")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert len({(row["loop"], row["way"], row["order"]) for row in figures["rows"]}) == len(figures["rows"]) == 18
    assert all(row["ms"] > 0 for row in figures["rows"])
    assert figures["met"] == (figures["slowest_ms"] <= figures["bar_ms"])


# -- serve ---------------------------------------------------------------------------------


@pytest.mark.slow  # six servers are started
def test_serving_is_measured() -> None:
    """``serve`` has figures for every way to serve, none of which fails, for replacements and for stops."""
    done = bench("serve", "--device", "host", "--smoke", "--json", "-")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert set(figures["rows"]) == {"echo", "fastapi", "nothing", "single", "batched"}
    assert all(row["requests_per_s"] > 0 and row["failures"] == 0 for row in figures["rows"].values())
    assert set(figures["ratios"]) == set(figures["bars"])
    assert len(figures["replaced_s"]) == 1
    assert [(stop["status"], stop["unanswered"]) for stop in figures["stops"]] == [(0, 0)]
    assert "SIGTERM under load" in done.stderr
