"""Check format, lint, types, import rules, spelling and docstrings; list everything that failed.

Settings are in pyproject.toml, except the docstring rules, which are in this file.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["scripts", "tests", "aiooffload", "setup.py"]

# Types are in the annotations, so numpydoc's rules about them are left out. A docstring without
# sections is fine; one that lists parameters lists the real ones.
DOCSTRING_RULES = {"GL01", "GL03", "GL05", "GL06", "GL07", "GL08", "SS01", "SS02", "SS03", "SS04", "SS05", "SS06"}
PARAMETER_RULES = {"PR01", "PR02", "PR03", "PR07", "PR08", "PR09"}


LINT_IMPORTS = "from importlinter.cli import lint_imports_command as run; run(['--no-logo'])"  # it has no "-m" form


def tool(*arguments: str) -> Callable[[], str]:
    """Return a step that runs Python with ``arguments`` and returns its output if that failed."""

    def step() -> str:
        command = [sys.executable, *arguments]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return (result.stdout + result.stderr or f"exit code {result.returncode}") if result.returncode else ""

    return step


PUBLIC = ("aiooffload", "aiooffload.testing")


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the public names of the package, those for tests too, and the public methods of its classes."""
    for package in PUBLIC:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)):  # an alias has no docstring of its own
                continue
            yield f"{package}.{name}", value
            if inspect.isclass(value):
                for member, item in vars(value).items():
                    if not member.startswith("_") and (callable(item) or isinstance(item, property | classmethod)):
                        yield f"{package}.{name}.{member}", item


def docstrings() -> str:
    """Check the public docstrings with numpydoc's rules."""
    from numpydoc.validate import validate

    problems = []
    for name, value in public_objects():
        text = inspect.getdoc(value) or ""
        rules = DOCSTRING_RULES | (PARAMETER_RULES if "\nParameters\n---" in text else set())
        problems += [f"{name}: {code} {what}" for code, what in validate(name)["errors"] if code in rules]
    return "\n".join(problems)


def shell_syntax() -> str:
    files = [path for path in [*sorted((ROOT / "scripts").iterdir()), ROOT / ".ci" / "run"] if is_shell(path)]
    result = subprocess.run(["bash", "-n", *map(str, files)], capture_output=True, text=True, check=False)
    return result.stderr


def is_shell(path: Path) -> bool:
    return path.is_file() and path.read_bytes()[:32].startswith(b"#!/usr/bin/env bash")


def steps(fix: bool) -> dict[str, Callable[[], str]]:
    return {
        "format": tool("-m", "ruff", "format", *([] if fix else ["--check", "--diff"]), *SOURCES),
        "lint": tool("-m", "ruff", "check", *(["--fix"] if fix else []), "--output-format=concise", *SOURCES),
        "types": tool("-m", "mypy"),
        "imports": tool("-c", LINT_IMPORTS),
        "spelling": tool("-m", "codespell_lib"),
        "docstrings": docstrings,
        "shell": shell_syntax,
    }


def attempt(step: Callable[[], str]) -> str:
    """Run a step, so that one that breaks is a failure beside the others."""
    try:
        return step().strip()
    except Exception:
        return traceback.format_exc()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", metavar="STEP", help=f"some steps only: {' '.join(steps(False))}")
    parser.add_argument("--fix", action="store_true", help="format, and repair what ruff can")
    parser.add_argument("--no-setup", action="store_true", help="run in the Python at hand, installing nothing")
    options = parser.parse_args()
    if unknown := set(options.only) - set(steps(False)):
        parser.error(f"no such step: {' '.join(sorted(unknown))}")
    return options


def main() -> int:
    options = parse()
    sys.path[0] = str(ROOT)
    failed = []
    for name, step in steps(options.fix).items():
        if options.only and name not in options.only:
            continue
        began = time.monotonic()
        output = attempt(step)
        print(f"{name:<11} {'FAILED' if output else 'ok':<7} {time.monotonic() - began:5.1f} s", flush=True)
        if output:
            failed.append(name)
            print("\n".join(f"    {line}" for line in output.splitlines()), flush=True)
    print(f"check: failed: {', '.join(failed)}" if failed else "check: ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
