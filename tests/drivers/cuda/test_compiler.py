"""Compiling with NVRTC, and the cache on disk. Needs the compiler, no GPU."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from aiooffload.drivers.cuda import compiler
from aiooffload.drivers.cuda.compiler import cache_folder, compile_source
from aiooffload.errors import CompileError, UsageError

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURES = ("sm_75", "sm_90", "sm_100")
SOURCE = 'extern "C" __global__ void store(int* p, int value) { *p = value; }'
BROKEN = """// DOES NOT COMPILE
extern "C" __global__ void store(int* p)
{
    *p = this_is_not_declared;
}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("AIOOFFLOAD_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The architecture of every compilation that really took place."""
    seen: list[str] = []
    really = compiler._compile

    def counting(source: str, arch: str, options: Any) -> bytes:
        seen.append(arch)
        return really(source, arch, options)

    monkeypatch.setattr(compiler, "_compile", counting)
    return seen


# Every CUDA source of the project


@functools.cache
def named_strings(path: Path) -> dict[str, str]:
    """Return the strings that a module has under a name of its own, or imports from another of the project."""
    known: dict[str, str] = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = text_of(node.value, known)
            if value is not None:
                known[node.targets[0].id] = value
        elif isinstance(node, ast.ImportFrom):
            imported = ROOT / f"{(node.module or '').replace('.', '/')}.py"
            theirs = named_strings(imported) if imported.is_file() else {}
            known |= {name.asname or name.name: theirs[name.name] for name in node.names if name.name in theirs}
    return known


def constants(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the strings of a module with their lines: constants, and what is put together of them; no docstrings."""
    known = named_strings(path)
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        text = text_of(node, known) if not isinstance(node, ast.Name) else None
        if text is not None:
            yield getattr(node, "lineno", 0), text
        elif not isinstance(node, ast.JoinedStr) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):  # parts of a string that is put together at run time are no sources
            waiting += ast.iter_child_nodes(node)


def text_of(node: ast.AST, known: Mapping[str, str]) -> str | None:
    """Return the string that an expression of constants and known names stands for."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, known)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(node.left, known), text_of(node.right, known)]
    elif isinstance(node, ast.JoinedStr):
        parts = [text_of(value, known) for value in node.values]
    else:
        return None
    return None if None in parts else "".join(part or "" for part in parts)


def is_cuda(text: str) -> bool:
    """Whether it is a whole kernel in CUDA C++ that is meant to compile."""
    return bool(re.search(r"__global__\s+void\s+\w+\s*\(", text)) and "DOES NOT COMPILE" not in text


def sources() -> Iterator[tuple[str, str]]:
    """Yield every CUDA source of the package, its examples, scripts and tests, with where it stands."""
    for top in ("aiooffload", "scripts", "tests"):
        for path in sorted((ROOT / top).rglob("*.py")):
            where = path.relative_to(ROOT).as_posix()
            yield from ((f"{where}:{line}", text) for line, text in constants(path) if is_cuda(text))
        for path in sorted((ROOT / top).rglob("*.cu")):
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


SOURCES = dict(sources())


def test_sources_are_found() -> None:
    """The search below finds the sources of the package, the scripts and the tests."""
    files = {where.partition(":")[0] for where in SOURCES}
    assert {"aiooffload/examples/scan.py", "scripts/benchmarks/kernels.py", "tests/drivers/support.py"} <= files


@pytest.mark.parametrize(
    "arch", [arch if arch == "sm_75" else pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]
)
@pytest.mark.parametrize("where", SOURCES)
def test_every_cuda_source_compiles(where: str, arch: str) -> None:
    """Every kernel of the project compiles for the oldest architecture, this one and the next."""
    code = compile_source(SOURCES[where], arch, {})
    assert code[:4] == b"\x7fELF"


# Errors


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_log_is_in_the_error(arch: str) -> None:
    """A source that does not compile raises CompileError with the compiler's whole log."""
    with pytest.raises(CompileError, match=f"does not compile for {arch}") as caught:
        compile_source(BROKEN, arch, {})
    assert 'identifier "this_is_not_declared" is undefined' in caught.value.log
    assert "*p = this_is_not_declared;" in caught.value.log
    assert 'identifier "this_is_not_declared" is undefined' in str(caught.value)
    assert "\0" not in caught.value.log


def test_source_that_includes_a_host_header() -> None:
    """A header that NVRTC has not is named in the error."""
    with pytest.raises(CompileError, match=r"no_such_header\.h"):
        compile_source(f"#include <no_such_header.h> // DOES NOT COMPILE\n{SOURCE}", "sm_90", {})


@pytest.mark.parametrize("options", [{"no_such_option": True}, {"arch": "sm_80"}])
def test_option_that_does_not_exist(options: dict[str, Any]) -> None:
    """An option that is none, or not the caller's to set, is a usage error that names it."""
    with pytest.raises(UsageError, match=next(iter(options))):
        compile_source(SOURCE, "sm_90", options)


def test_architecture_that_does_not_exist() -> None:
    """An architecture that the compiler does not know is a CompileError."""
    with pytest.raises(CompileError, match="sm_12345"):
        compile_source(SOURCE, "sm_12345", {})


def test_failure_is_not_cached(folder: Path, compilations: list[str]) -> None:
    """What does not compile is compiled again, and leaves nothing in the cache."""
    for _ in range(2):
        with pytest.raises(CompileError):
            compile_source(BROKEN, "sm_90", {})
    assert len(compilations) == 2
    assert not folder.exists()


def test_missing_compiler_says_what_to_install() -> None:
    """Without NVRTC the error names the extra that brings it."""

    def version() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    with pytest.raises(CompileError, match=r"pip install 'aiooffload\[compiler\]'.*libnvrtc"):
        compiler._compiler(version)


def test_options_reach_the_compiler() -> None:
    """An option changes what is compiled."""
    source = '#ifndef CHOSEN\n#error not chosen\n#endif\nextern "C" __global__ void k() {} // DOES NOT COMPILE alone'
    assert compile_source(source, "sm_90", {"define_macro": "CHOSEN"})
    with pytest.raises(CompileError, match="not chosen"):
        compile_source(source, "sm_90", {})


# The cache


def test_second_time_comes_from_the_cache(compilations: list[str]) -> None:
    """The same source, architecture and options are compiled once."""
    first = compile_source(SOURCE, "sm_90", {"use_fast_math": True})
    assert compile_source(SOURCE, "sm_90", {"use_fast_math": True}) == first
    assert compilations == ["sm_90"]


def test_cache_tells_sources_architectures_and_options_apart(folder: Path, compilations: list[str]) -> None:
    """What may change the code is part of the key."""
    compile_source(SOURCE, "sm_90", {})
    compile_source(SOURCE + " ", "sm_90", {})
    compile_source(SOURCE, "sm_100", {})
    compile_source(SOURCE, "sm_90", {"use_fast_math": True})
    assert len(compilations) == len(list(folder.iterdir())) == 4


def test_cache_tells_compilers_apart(monkeypatch: pytest.MonkeyPatch, compilations: list[str]) -> None:
    """Another release of the compiler does not use the code of this one."""
    compile_source(SOURCE, "sm_90", {})
    monkeypatch.setattr(compiler, "_compiler", lambda call: [0, 99, 9])
    compile_source(SOURCE, "sm_90", {})
    assert len(compilations) == 2


def test_order_of_options_does_not_matter(compilations: list[str]) -> None:
    """The same options in another order are the same options."""
    compile_source(SOURCE, "sm_90", {"use_fast_math": True, "max_register_count": 32})
    compile_source(SOURCE, "sm_90", {"max_register_count": 32, "use_fast_math": True})
    assert len(compilations) == 1


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    return {
        "emptied": b"",
        "cut short": content[:middle],
        "digest alone": content[:32],
        "one bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "extended": content + b"x",
    }


@pytest.mark.parametrize("damage", damaged(b"xx"))
def test_damaged_file_is_compiled_again(folder: Path, compilations: list[str], damage: str) -> None:
    """A file of the cache that was damaged is not used, and is replaced."""
    code = compile_source(SOURCE, "sm_90", {})
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(damaged(content)[damage])
    assert compile_source(SOURCE, "sm_90", {}) == code
    assert file.read_bytes() == content
    assert len(compilations) == 2


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cache it compiles all the same, and says so in one line of the log."""
    blocker = tmp_path / "a file, not a folder"
    blocker.write_text("")
    monkeypatch.setenv("AIOOFFLOAD_CACHE_DIR", str(blocker / "cache"))
    with capture_logs() as lines:
        assert compile_source(SOURCE, "sm_90", {})[:4] == b"\x7fELF"
    assert [line["event"] for line in lines] == ["compiled code cannot be cached"]
    assert lines[0]["folder"] == str(blocker / "cache")


def test_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that fails half-way (a full disk) leaves no file behind."""

    def replace(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler.os, "replace", replace)
    with capture_logs() as lines:
        assert compile_source(SOURCE, "sm_90", {})
    assert len(lines) == 1
    assert list(folder.iterdir()) == []


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is where the environment says, then in the user's cache."""
    monkeypatch.setenv("AIOOFFLOAD_CACHE_DIR", "/somewhere/named")
    assert cache_folder() == Path("/somewhere/named")
    monkeypatch.delenv("AIOOFFLOAD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/else")
    assert cache_folder() == Path("/somewhere/else/aiooffload")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/.cache/aiooffload")
