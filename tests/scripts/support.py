"""What the tests of the scripts share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load_script(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    """Load the module behind ``scripts/NAME``, which is in no package, with what it imports from beside it."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    spec = importlib.util.spec_from_file_location(f"aiooffload_{name}", SCRIPTS / f"_{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module
