"""Where files of the package are."""

from __future__ import annotations

from pathlib import Path

import aiooffload as ao


def test_include_dir_has_the_headers() -> None:
    """The folder exists, is absolute, and holds the header and what it includes."""
    folder = Path(ao.include_dir())
    assert folder.is_absolute()
    assert {"aiooffload.cuh", "aiooffload_wire.h"} <= {path.name for path in folder.iterdir()}
