"""What README.md shows: its example runs as printed, and what it names exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import aiooffload as ao

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROSE = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    """Return the text below a heading of the second level."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code_spans() -> list[str]:
    """Return what stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", PROSE)


EXAMPLES = {
    "Example": "{device} 1998.0",
    "Calls from kernels": "15.0",
    "Graphs, streams of others, and lanes": "answer 3.0 5.0",
    "Serving": "[[2.0, 2.0, 2.0, 2.0]]",
    "Several GPUs": "[7, 7, 12, 13] [10, 11, 12, 13]",
    "Testing your program": "4 of 5",
}
"""The headings with an example, in their order, and what it prints."""
on_each = pytest.mark.parametrize("heading", EXAMPLES)


def example_of(heading: str) -> str:
    """Return the example below a heading, which is the only one there."""
    assert len(blocks("python")) == len(EXAMPLES)
    example = blocks("python")[list(EXAMPLES).index(heading)]
    assert example in section(heading)
    return example


def check_example(tmp_path: Path, heading: str, device: str, **environment: str) -> None:
    """Run an example as printed, in a new interpreter with warnings as errors; the text says what it prints."""
    file = tmp_path / "example.py"
    file.write_text(example_of(heading), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-W", "error", str(file)],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
        | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    printed = EXAMPLES[heading].format(device=device)
    assert result.stdout == printed + "\n"
    assert f"`{printed}`" in section(heading)


@on_each
def test_examples_run_on_the_host(tmp_path: Path, heading: str) -> None:
    """Each example runs as printed where no GPU is visible, and prints what the text says."""
    check_example(tmp_path, heading, "host", CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@on_each
def test_examples_run_on_a_gpu(tmp_path: Path, heading: str) -> None:
    """Each example runs as printed on a GPU, and prints what the text says."""
    check_example(tmp_path, heading, "cuda:0")


def test_served_example_answers_a_request(tmp_path: Path) -> None:
    """The program of the section on serving can be asked as its first command does, which prints what is beside it."""
    (tmp_path / "scaler.py").write_text(example_of("Serving"), encoding="utf-8")
    line = next(line for block in blocks("sh") for line in block.splitlines() if line.startswith("aiooffload run "))
    command, _, comment = line.partition("#")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, "-m", *shlex.split(command), "--device", "host"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert comment.strip().endswith(f": {result.stdout.strip()}")


@on_each
def test_examples_are_short(heading: str) -> None:
    """An example has about 25 lines of code."""
    assert len([line for line in example_of(heading).splitlines() if line.strip()]) <= 26


def commands() -> list[list[str]]:
    """Return the commands that start a script, in blocks and in the text, as words."""
    lines = [line.partition("#")[0] for block in blocks("sh") for line in block.splitlines()] + code_spans()
    return [line.split() for line in lines if re.match(r"(scripts/\w+(?!\w*/)|\.ci/run)( |$)", line)]


@cache
def help_of(*command: str) -> str:
    """Return what a script prints for ``--help``, with which it sets nothing up."""
    environment = os.environ | {"PYTHON": sys.executable}
    result = subprocess.run([*command, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return result.stdout


def test_scripts_exist() -> None:
    """Every script that is named exists and can be run, and every script is named."""
    named = {words[0] for words in commands()}
    assert {"scripts/demo", "scripts/test"} <= named
    assert [name for name in sorted(named) if not os.access(ROOT / name, os.X_OK)] == []
    scripts = {f"scripts/{path.name}" for path in (ROOT / "scripts").iterdir() if path.name[0] not in "._"}
    executables = {name for name in scripts if (ROOT / name).is_file() and os.access(ROOT / name, os.X_OK)}
    assert executables <= named


def test_script_options_exist() -> None:
    """Every option in a command is one that the script's help lists, or one of pytest's."""
    unknown = []
    for script, *words in commands():
        if script == ".ci/run":
            continue
        subcommand = [word for word in words[:1] if script == "scripts/bench"]
        text = help_of(script, *subcommand)
        unknown += [f"{script} {word}" for word in words if word.startswith("--") and word not in text]
    assert unknown == []


def test_options_in_the_text_exist() -> None:
    """Every option that the text names on its own is one of some script's."""
    helps = "".join(
        help_of(*command)
        for command in (
            ("scripts/demo",),
            ("scripts/test",),
            ("scripts/check",),
            ("scripts/bench", "completion"),
            ("scripts/bench", "reverse"),
            (sys.executable, "-m", "aiooffload", "serve"),
        )
    )
    options = {word for span in code_spans() if span.startswith("--") for word in span.split() if word[0] == "-"}
    assert {"--help", "--json"} <= options
    assert [option for option in sorted(options) if option not in helps] == []


def test_public_names_exist() -> None:
    """Everything named as ``ao.X``, ``off.x`` or ``op.x`` is public, and so is every error."""
    missing = [f"ao.{name}" for name in re.findall(r"\bao\.(\w+)", README) if name not in ao.__all__]
    missing += [f"off.{name}" for name in re.findall(r"\boff\.(\w+)", README) if not hasattr(ao.Offload, name)]
    missing += [f"op.{name}" for name in re.findall(r"\bop\.(\w+)", README) if not hasattr(ao.Operation, name)]
    errors = [span for span in code_spans() if re.fullmatch(r"[A-Z]\w*Error", span)]
    builtin = ("MemoryError", "TimeoutError")
    missing += [name for name in errors if name not in ao.__all__ and name not in builtin]
    assert missing == []


def test_table_of_errors_is_right() -> None:
    """The table names public errors alone, and its last five are those that derive from DriverError."""
    rows = [line for line in section("Errors").splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    errors: list[Any] = [getattr(ao, name) for name in named]
    assert all(issubclass(error, ao.OffloadError) for error in errors)
    assert [error for error in errors if issubclass(error, ao.DriverError)] == errors[-5:]


def test_table_of_drivers_is_complete() -> None:
    """The table has a column for each driver in the package."""
    drivers = {path.name for path in (ROOT / "aiooffload" / "drivers").iterdir() if (path / "__init__.py").exists()}
    head = next(line for line in section("Drivers").splitlines() if line.startswith("|"))
    assert set(re.findall(r"`(\w+)`", head)) == drivers


def test_paths_exist() -> None:
    """Every path of this project that the text names exists."""
    paths = [span for span in code_spans() if re.fullmatch(r"(aiooffload|scripts|tests)/[\w./]*", span)]
    paths += re.findall(r"\]\(([\w./]+)\)", README)
    assert len(paths) > 10
    example = "tests/a/test_b.py"
    assert [path for path in paths if path != example and not (ROOT / path).exists()] == []


def test_extras_exist() -> None:
    """Every extra that is named is one of the package's."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    install = section("Install")
    named = set(re.findall(r"\.\[(\w+)\]", install)) | set(re.findall(r"`(\w+)`", install.partition("Other extras")[2]))
    assert named == set(extras)
