"""A worker that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.service.support import Served, served


@pytest.fixture(scope="session")
def worker() -> Iterator[Served]:
    """A worker process with the sample program; no test may break it, nor look at its log."""
    with served() as process:
        process.line("serving")
        yield process


@pytest.fixture
def port(worker: Served) -> int:
    """Where the shared worker listens."""
    return worker.port
