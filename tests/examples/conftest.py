"""What the tests of the examples share."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.scripts.support import load_script


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """The module behind scripts/demo."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield load_script(monkeypatch, "demo")
