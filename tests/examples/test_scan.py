"""The main job: every count of a tree, on the host device."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload.examples import scan as scan_module
from aiooffload.examples.scan import CHUNK_BYTES, Difference, ScanResult, count, find, scan
from aiooffload.examples.tree import Counts, TreeFile, list_files, plain_counts

WORDS = ("aa", "word", "\n", "é")

BIG = b"wo" + b"-" * (CHUNK_BYTES - 4) + b"word" + b"-" * (CHUNK_BYTES - 4) + b"aaa" + b"\n" * 5
NASTY = {
    "empty": b"",
    "no newline": b"one\ntwo",
    "overlap.txt": b"aaaa aaa",
    "binary.bin": bytes(range(256)) * 64,
    "words.txt": "word wordword\nw ord é\n".encode(),
    "shorter than the words": b"w",
    "word at the end": b"-word",
    "word cut off": b"wor",
    "one chunk": b"a" * CHUNK_BYTES,
    "one chunk and a byte": b"a" * (CHUNK_BYTES + 1),
    "across chunks": BIG,
    "folder/deep": b"word\r\n\0word\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, content in NASTY.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return tmp_path


async def scan_on(device: str, root: Path, words: tuple[str, ...] = WORDS) -> ScanResult:
    async with ao.Offload(device, lanes=4) as off:
        return await scan(off, root, words)


async def test_every_count_of_nasty_files(tree: Path, device_label: str) -> None:
    """Bytes, lines and words are right for files of any kind, on every device."""
    result = await scan_on(device_label, tree)
    words = [word.encode() for word in WORDS]
    assert {str(one.path): one.counts for one in result.files} == {
        name: plain_counts(content, words) for name, content in NASTY.items()
    }
    assert result.differences == []
    assert result.unreadable == []


async def test_some_counts_by_hand(tree: Path) -> None:
    """Matches may overlap, words may lie across chunks, and the last line needs no newline."""
    counts = {str(one.path): one.counts for one in (await scan_on("host", tree)).files}
    assert counts["empty"] == Counts(0, 0, (0, 0, 0, 0))
    assert counts["no newline"] == Counts(7, 1, (0, 0, 1, 0))
    assert counts["overlap.txt"] == Counts(8, 0, (5, 0, 0, 0))
    assert counts["words.txt"] == Counts(23, 2, (0, 3, 2, 1))
    assert counts["across chunks"] == Counts(len(BIG), 5, (2, 1, 5, 0))


async def test_totals(tree: Path) -> None:
    """The sums of a result are those of its files, and awaits are counted."""
    result = await scan_on("host", tree)
    assert [one.path for one in result.files] == sorted(one.path for one in result.files)
    assert result.nbytes == sum(map(len, NASTY.values()))
    assert result.lines == sum(content.count(b"\n") for content in NASTY.values())
    assert result.matches[1] == sum(content.count(b"word") for content in NASTY.values())
    # A file clears its counts and fetches them; each chunk is copied unless it is empty, one launch
    # counts in it and one per word finds.
    chunks = len(NASTY) + 3
    assert result.launches == chunks * (1 + len(WORDS))
    assert result.awaits == 2 * len(NASTY) + (chunks - 1) + result.launches
    assert result.awaits_per_s > 0
    assert 0 < result.peak_launches <= result.launches


@pytest.fixture
def odd_names(tree: Path) -> Path:
    (tree / "broken").symlink_to("nowhere")
    Path(os.fsdecode(os.fsencode(tree) + b"/\xff\xfe")).write_bytes(b"word")
    return tree


async def test_unreadable_files_are_reported(odd_names: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken link and a file that vanished end nothing; a file whose name is no text is scanned."""
    listed = [*await asyncio.to_thread(list_files, odd_names), TreeFile(odd_names / "gone", 3)]
    monkeypatch.setattr(scan_module, "list_files", lambda root: listed)
    result = await scan_on("host", odd_names)
    why = "No such file or directory"
    assert result.unreadable == [(Path("broken"), why), (Path("gone"), why)]
    assert len(result.files) == len(NASTY) + 1


@pytest.mark.allows_blocking("it writes its own files")
async def test_more_files_than_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool smaller than the tree is used again and again."""
    monkeypatch.setattr(scan_module, "FILES_IN_FLIGHT", 2)
    for number in range(20):
        (tmp_path / str(number)).write_bytes(b"aa" * number)
    result = await scan_on("host", tmp_path)
    assert result.differences == []
    assert result.peak_launches <= 2 * (1 + len(WORDS))


async def test_an_empty_tree(tmp_path: Path) -> None:
    """There is nothing to count, and that is no error."""
    result = await scan_on("host", tmp_path)
    assert (result.files, result.nbytes, result.awaits_per_s) == ([], 0, 0.0)


async def test_progress_ends_with_all_files(tree: Path) -> None:
    """Progress is told after each file, with the number of all."""
    told: list[tuple[int, int]] = []
    async with ao.Offload("host", lanes=2) as off:
        await scan(off, tree, WORDS, lambda done, total: told.append((done, total)))
    assert told == [(number, len(NASTY)) for number in range(1, len(NASTY) + 1)]


async def test_cancelling_leaves_the_offload_usable(tree: Path) -> None:
    """A scan that is cancelled half way gives everything back; the next one is right."""
    async with ao.Offload("host", lanes=2) as off:
        task = asyncio.create_task(scan(off, tree, WORDS, lambda done, total: task.cancel()))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await scan(off, tree, WORDS)).differences == []


async def test_bad_arguments(tree: Path) -> None:
    """An empty word and a root that is no folder are refused before anything is launched."""
    async with ao.Offload("host", lanes=1) as off:
        with pytest.raises(ValueError, match="at least one character"):
            await scan(off, tree, ["word", ""])
        with pytest.raises(NotADirectoryError):
            await scan(off, tree / "empty", WORDS)


async def test_a_difference_is_found(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If plain Python counts otherwise, the result says where, what and by how much."""
    plant_a_mismatch(monkeypatch)
    result = await scan_on("host", tree)
    assert result.differences == [Difference(Path("overlap.txt"), "'aa'", 5, 6)]


async def test_a_failing_kernel_ends_the_scan(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's error comes out as it is, not in a group."""

    @ao.kernel
    def broken(launch: object, data: ao.In[np.uint8], own: np.int64, counts: ao.InOut[np.uint64]) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(scan_module, "count", broken)
    with pytest.raises(ao.LaunchError):
        await scan_on("host", tree)


@given(
    content=st.text("ab\n", max_size=60).map(str.encode),
    words=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    chunk=st.integers(1, 20),
)
def test_chunks_count_as_the_whole(content: bytes, words: list[str], chunk: int) -> None:
    """However a file is cut, the host kernels count what plain Python counts in one piece."""
    encoded = [word.encode() for word in words]
    overlap = max(map(len, encoded)) - 1
    counts = np.zeros(2 + len(words), np.uint64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan_module, "CHUNK_BYTES", chunk)
        for data, own in scan_module._chunks(content, overlap):
            assert count.host_function is not None
            assert find.host_function is not None
            count.host_function(None, data, own, counts)
            for slot, word in enumerate(encoded):
                args = (data, own, data.size, np.frombuffer(word, np.uint8), len(word), counts, 2 + slot)
                find.host_function(None, *args)
    nbytes, lines, *matches = counts.tolist()
    assert Counts(nbytes, lines, tuple(matches)) == plain_counts(content, encoded)


# The demo around it.


def plant_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let plain Python find one ``aa`` too many in one file."""

    def wrong(content: bytes, words: list[bytes]) -> Counts:
        right = plain_counts(content, words)
        if content != NASTY["overlap.txt"]:
            return right
        return Counts(right.nbytes, right.lines, (right.matches[0] + 1, *right.matches[1:]))

    monkeypatch.setattr(scan_module, "plain_counts", wrong)


prints = pytest.mark.allows_blocking("the demo prints from the loop's thread")


@prints
def test_demo_ends_well(demo: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line sums up and the exit code is 0."""
    assert demo.main([str(tree), "--device", "host", "--words", "aa,word"]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    matches = sum(sum(plain_counts(content, [b"aa", b"word"]).matches) for content in NASTY.values())
    nbytes = sum(map(len, NASTY.values()))
    start = f"ok: {len(NASTY)} files, {nbytes} bytes, {matches} matches, "
    assert last.startswith(start)
    assert last.endswith(" awaits/s")
    assert last.removeprefix(start).removesuffix(" awaits/s").isdecimal()


@prints
def test_demo_writes_json_alone(demo: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With ``--json -`` standard output is JSON and nothing else, with the agreed keys."""
    assert demo.main([str(tree), "--device", "host", "--json", "-", "--lanes", "2"]) == 0
    captured = capsys.readouterr()
    figures = json.loads(captured.out)
    keys = {"files", "bytes", "matches", "mismatches", "awaits_per_s", "cpu_s", "wall_s", "device"}
    assert keys <= set(figures)
    assert (figures["files"], figures["mismatches"], figures["device"]) == (len(NASTY), 0, "host")
    assert "ok: " in captured.err


@prints
def test_demo_fails_on_a_difference(
    demo: ModuleType, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One count that differs is printed and makes the exit code 1."""
    plant_a_mismatch(monkeypatch)
    target = tmp_path.parent / f"{tmp_path.name}.json"
    assert demo.main([str(tree), "--device", "host", "--words", "aa", "--json", str(target)]) == 1
    output = capsys.readouterr().out
    assert "overlap.txt: 'aa': device 5, Python 6" in output
    assert output.splitlines()[-1].startswith("failed: ")
    assert json.loads(target.read_text())["mismatches"] == 1


@prints
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing", "--device", "host"], "is not a folder"),
        ([".", "--device", "abacus"], "abacus"),
        ([".", "--device", "host", "--json", "missing/file"], "missing/file"),
    ],
)
def test_demo_says_what_is_wrong(
    demo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """What the user got wrong is one line on standard error and exit code 2."""
    monkeypatch.chdir(tmp_path)
    assert demo.main(arguments) == 2
    assert message in capsys.readouterr().err
