"""``scripts/timeline``: a picture of a real trace, and a clear word on what is none."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.kernels import add, fail, nothing

ROOT = Path(__file__).resolve().parents[2]


def timeline(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "_timeline.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


async def record(path: Path, launches: int) -> None:
    async with ao.Offload("host", lanes=3, lane_depth=4) as off, off.trace(path):
        await off.load(add, nothing, fail)

        async def step() -> None:
            await asyncio.sleep(0)

        word = off.zeros(1, np.uint64)
        last = off.launch(add, grid=1, block=1, args=(word, 1))
        off.launch(nothing, grid=1, block=1, after=[off.host_task(step, after=[last])])
        off.put(np.zeros(1 << 20, np.float32))
        off.launch(fail, grid=1, block=1).add_done_callback(ao.Operation.exception)
        for i in range(launches):
            off.launch(add, grid=1, block=1, args=(word, 1), lane=off.lanes[i % 3])


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real trace of about 50 operations."""
    path = tmp_path_factory.mktemp("traces") / "trace.json"
    asyncio.run(record(path, 40))
    return path


def size(png: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    head = png.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:24])


def test_picture_of_a_real_trace(trace: Path, tmp_path: Path) -> None:
    """It writes a PNG where it was told to, and says so."""
    target = tmp_path / "picture.png"
    done = timeline(trace, "--output", target)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{target}\n", "")
    width, height = size(target)
    assert 1000 < width < 3000
    assert 300 < height < 3000


def test_picture_is_beside_the_trace(trace: Path) -> None:
    """Without --output it has the name of the trace."""
    done = timeline(trace, "--limit", 10)
    assert done.returncode == 0, done.stderr
    size(trace.with_suffix(".png"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "not JSON"),
        ("", "not JSON"),
        ("[]", "no traceEvents"),
        ('{"traceEvents": 3}', "no traceEvents"),
        ('{"traceEvents": [1]}', "no traceEvents"),
        ('{"traceEvents": []}', "nothing in it has run"),
        ('{"traceEvents": [{"ph": "X", "ts": 1}]}', "makes no sense"),
        (None, "No such file"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: str | None, message: str) -> None:
    """It says what is wrong on standard error, with exit code 2, and writes nothing."""
    file = tmp_path / "file.json"
    if content is not None:
        file.write_text(content)
    done = timeline(file)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not file.with_suffix(".png").exists()


def test_picture_that_cannot_be_written(trace: Path, tmp_path: Path) -> None:
    """So does a place that is not there."""
    done = timeline(trace, "--output", tmp_path / "missing" / "picture.png")
    assert done.returncode == 2
    assert "cannot write" in done.stderr


def test_many_slices_are_truncated_with_a_note(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the first ones are drawn, and the title says so."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import _timeline as script

    events, about = script.read(trace)
    whole: Any = script.gather(events, about, 3000)
    assert whole.notes == []
    assert len(whole.slices) == len([event for event in events if event["ph"] == "X"])
    assert any(one.failed for one in whole.slices)
    assert {"launch", "fill", "host task", "put", "piece"} <= {one.kind for one in whole.slices}
    assert whole.arrows
    assert all(source[0] != target[0] for source, target, _ in whole.arrows)
    part = script.gather(events, about, 5)
    assert (len(part.slices), part.notes) == (5, [f"the first 5 of {len(whole.slices)} slices"])
    unfinished = script.gather(json.loads(json.dumps(events)), about | {"complete": False}, 3000)
    assert "not everything" in unfinished.notes[0]


@pytest.mark.parametrize(("span", "unit"), [(5, "us"), (9_999, "us"), (10_000, "ms"), (10_000_000, "s")])
def test_unit_of_the_axis(span: float, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The axis is in us, ms or s by how much it spans."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import _timeline as script

    assert script.unit_of(span)[0] == unit
