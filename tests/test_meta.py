"""Rules about the project itself."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import aiooffload

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "aiooffload"

# Modules without a test module of their own, each with the reason.
UNTESTED = {
    "__main__.py": "tests/service/test_cli.py runs it",
    "_native/handler.c": "tests/_native/test_channel.py runs it",
    "_native/request.c": "tests/_native/test_channel.py runs it",
    "_native/host_stream.c": "the conformance tests in tests/drivers run it",
    "drivers/host/function.py": "tests/drivers/host/test_device.py runs it",
    "drivers/host/limited.py": "tests/drivers/host/test_device.py and tests/engine/test_selftest.py run it",
    "service/process.py": "tests/service/test_supervisor.py runs it",
    "service/once.py": "tests/service/test_cli.py runs it",
    "drivers/host/memory.py": "tests/drivers/host/test_device.py runs it",
}

# What `import aiooffload` must not load: each costs time, or talks to a driver.
HEAVY = (
    *("cuda", "uvloop", "structlog", "rich", "matplotlib", "orjson", "starlette", "uvicorn", "prometheus_client"),
    *("aiooffload.drivers.cuda", "aiooffload.examples", "aiooffload.service"),
)

# Paths that only one machine has.
PRIVATE = re.compile(r"(?<![\w.$}/])/(?:(?:work|root|home|Users)/\w|tmp/v3)")

TOP_LEVEL = {
    *("pyproject.toml", "setup.py", "README.md", "Dockerfile", "LICENSE", "CHANGELOG.md"),
    *("aiooffload", "tests", "scripts"),
}


def modules() -> list[str]:
    """Return the package's modules that hold code, as paths below the package."""
    paths = (path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    return sorted(paths)


def native_sources() -> list[str]:
    return sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("_native/*.c") if path.stem != "module")


def expected_tests(module: str) -> Path:
    path = Path(module)
    return ROOT / "tests" / path.parent / f"test_{path.stem}.py"


def test_modules_have_their_tests() -> None:
    """The tests of ``a/b.py`` (or ``.c``) are in ``tests/a/test_b.py``, unless a reason is given."""
    missing = [module for module in (*modules(), *native_sources()) if not expected_tests(module).exists()]
    assert sorted(missing) == sorted(UNTESTED)


def test_public_names_are_unique_and_there() -> None:
    """Every public name is exported once and can be imported."""
    assert len(set(aiooffload.__all__)) == len(aiooffload.__all__)
    missing = [name for name in aiooffload.__all__ if not hasattr(aiooffload, name)]
    assert missing == []


def test_public_objects_have_one_public_name() -> None:
    """No object is exported under two names."""
    objects = [id(getattr(aiooffload, name)) for name in aiooffload.__all__]
    assert len(set(objects)) == len(objects)


@pytest.mark.parametrize("name", aiooffload.__all__)
def test_public_object_is_documented(name: str) -> None:
    """Every public class and function has a docstring."""
    value = getattr(aiooffload, name)
    assert not callable(value) or value.__doc__


def test_all_of_errors_is_public() -> None:
    """A program can name every error from the package itself."""
    assert set(importlib.import_module("aiooffload.errors").__all__) <= set(aiooffload.__all__)


def run_python(source: str, **environment: str) -> str:
    """Run ``source`` in a new interpreter with warnings as errors, and return what it prints."""
    command = [sys.executable, "-W", "error", "-c", source]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=True
    ).stdout


def test_import_is_light() -> None:
    """``import aiooffload`` loads no driver and nothing slow (its time is not asserted, its cause is)."""
    loaded = json.loads(run_python("import aiooffload, json, sys; print(json.dumps(list(sys.modules)))"))
    heavy = [name for name in loaded if any(name == root or name.startswith(f"{root}.") for root in HEAVY)]
    assert heavy == []


def test_import_starts_nothing() -> None:
    """Importing the package starts no thread, opens no descriptor and loads no driver library."""
    source = """
import os, pathlib, threading
before = len(os.listdir("/proc/self/fd"))
import aiooffload
print(len(os.listdir("/proc/self/fd")) - before, threading.active_count())
print("libcuda" in pathlib.Path("/proc/self/maps").read_text())
"""
    assert run_python(source).split() == ["0", "1", "False"]


def project_files() -> list[Path]:
    """Return the files that a clean checkout has; everything else is ignored by git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [path for name in listed.split("\0") if name and (path := ROOT / name).is_file()]


def test_no_file_speaks_of_one_machine() -> None:
    """No file names a path that only the machine of its author has."""
    found = []
    for path in project_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if PRIVATE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_top_level_is_as_agreed() -> None:
    """Nothing but the agreed names lies in the top folder, apart from dot files."""
    names = {path.relative_to(ROOT).parts[0] for path in project_files()}
    assert {name for name in names if not name.startswith(".")} - TOP_LEVEL == set()
