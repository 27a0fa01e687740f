"""A worker that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.support import Served, served


@pytest.fixture(scope="session")
def worker() -> Iterator[Served]:
    """A worker process with the sample program; no test may break it."""
    with served("--log-level", "warning") as process:
        process.line  # noqa: B018
        yield process
