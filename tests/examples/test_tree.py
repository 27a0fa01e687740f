"""The files of a tree, and what plain Python counts in one."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload.examples.tree import Counts, list_files, plain_counts


def names(root: Path) -> list[str]:
    return [str(file.path.relative_to(root)) for file in list_files(root)]


def test_files_are_listed_in_order_with_their_sizes(tmp_path: Path) -> None:
    """Every regular file is found, at any depth, in the order of the paths."""
    (tmp_path / "b").write_bytes(b"12")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "empty").touch()
    assert [(file.path, file.nbytes, file.problem) for file in list_files(tmp_path)] == [
        (tmp_path / "a" / "empty", 0, None),
        (tmp_path / "b", 2, None),
    ]


def test_installed_packages_and_caches_are_left_out(tmp_path: Path) -> None:
    """``site-packages`` and ``__pycache__`` are not entered, at any depth."""
    for folder in ("site-packages", "deep/__pycache__", "kept"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "file").touch()
    assert names(tmp_path) == ["kept/file"]


def test_links_and_special_files(tmp_path: Path) -> None:
    """A link to a file counts as one; a loop of folders does not hang, and a pipe is left out."""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "loop").symlink_to(".")
    os.mkfifo(tmp_path / "pipe")
    assert names(tmp_path) == ["file", "link"]


def test_broken_link_is_listed_with_its_problem(tmp_path: Path) -> None:
    """What cannot be read is not lost: it is listed with the reason."""
    (tmp_path / "broken").symlink_to("nowhere")
    (file,) = list_files(tmp_path)
    assert file.problem == "No such file or directory"


def test_unreadable_folder_is_listed_with_its_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that may not be listed is reported, and the others are scanned."""
    closed = tmp_path / "closed"
    closed.mkdir()
    (tmp_path / "open").touch()
    scandir = os.scandir

    def deny(path: str) -> object:
        if Path(path) == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", deny)  # A test that runs as root may list everything.
    assert [(file.path.name, file.problem) for file in list_files(tmp_path)] == [
        ("closed", "Permission denied"),
        ("open", None),
    ]


@pytest.mark.parametrize("name", ["missing", "file"])
def test_what_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    """The root has to be a folder."""
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="is not a folder"):
        list_files(tmp_path / name)


def test_counts_of_an_empty_file() -> None:
    """Nothing is counted in nothing."""
    assert plain_counts(b"", [b"word"]) == Counts(0, 0, (0,))


@given(st.binary(max_size=200) | st.text("ab\n", max_size=200).map(str.encode), st.text("ab", min_size=1, max_size=4))
def test_counts_against_regular_expressions(content: bytes, word: str) -> None:
    """A word is counted wherever it stands, also where it overlaps itself."""
    places = re.findall(b"(?=%b)" % re.escape(word.encode()), content)
    assert plain_counts(content, [word.encode()]) == Counts(
        len(content), len(re.findall(b"\n", content)), (len(places),)
    )
