"""What the tests of the examples share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The module behind scripts/demo, which is in no package."""
    spec = importlib.util.spec_from_file_location("aiooffload_demo", ROOT / "scripts" / "_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
