"""The files of a directory tree, and what plain Python counts in one.

Nothing here knows of kernels or chunks: this is what the counts of a device are compared with.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["Counts", "TreeFile", "list_files", "plain_counts"]

SKIPPED_FOLDERS: Final = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A file to scan, or a file or folder that cannot be read."""

    path: Path
    nbytes: int = 0
    """Its size when the tree was listed."""
    problem: str | None = None
    """Why it cannot be read, if that is known already."""


@dataclass(frozen=True, slots=True)
class Counts:
    """What was counted in one file."""

    nbytes: int
    lines: int
    matches: tuple[int, ...]
    """One number for each word."""


def list_files(root: Path) -> list[TreeFile]:
    """Return the files below ``root`` in order, without packages that were installed and caches.

    Links to files are taken for the files, links to folders are not followed. Sockets, pipes and
    devices are left out: reading them might never end.

    Raises
    ------
    NotADirectoryError
        ``root`` is not a folder.
    """
    if not root.is_dir():
        raise NotADirectoryError(f"{root} is not a folder")
    found: list[TreeFile] = []

    def unreadable(error: OSError) -> None:
        found.append(TreeFile(Path(error.filename), problem=error.strerror))

    for folder, folders, names in os.walk(root, onerror=unreadable):
        folders[:] = set(folders) - SKIPPED_FOLDERS
        for name in names:
            path = Path(folder, name)
            try:
                status = path.stat()
            except OSError as error:
                unreadable(error)
                continue
            if stat.S_ISREG(status.st_mode):
                found.append(TreeFile(path, status.st_size))
    return sorted(found, key=lambda file: file.path)


def plain_counts(content: bytes, words: Sequence[bytes]) -> Counts:
    """Count bytes, newlines and, for each word, the positions at which it stands, overlapping ones too."""
    return Counts(len(content), content.count(b"\n"), tuple(_occurrences(content, word) for word in words))


def _occurrences(content: bytes, word: bytes) -> int:
    number, position = 0, content.find(word)
    while position >= 0:
        number += 1
        position = content.find(word, position + 1)
    return number
