"""Where files of the package are, for other tools."""

from __future__ import annotations

from pathlib import Path

__all__ = ["include_dir"]


def include_dir() -> str:
    """Return the folder of ``aiooffload.cuh``, for the ``-I`` of a compiler of your own.

    Kernels that are declared with ``calls=True`` and compiled by this package have it already.
    """
    return str(Path(__file__).parent / "device")
