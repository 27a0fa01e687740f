"""Compiling CUDA source with NVRTC, through ``cuda.core``, with a cache on disk. Needs no GPU."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aiooffload.errors import CompileError, UsageError
from aiooffload.log import log
from aiooffload.rules.wire import WIRE_VERSION

__all__ = ["cache_folder", "compile_source"]

_DIGEST = 32
HEADERS: Final = Path(__file__).parent.parent.parent / "device"


def cache_folder() -> Path:
    """Return where compiled code is kept: ``$AIOOFFLOAD_CACHE_DIR``, or under ``$XDG_CACHE_HOME``."""
    named = os.environ.get("AIOOFFLOAD_CACHE_DIR")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aiooffload"


def compile_source(source: str, arch: str, options: Mapping[str, Any]) -> bytes:
    """Return the cubin of ``source`` for ``arch`` (such as ``"sm_90"``).

    Parameters
    ----------
    source
        CUDA C++, which NVRTC must be able to compile: no host headers. ``aiooffload.cuh`` is found.
    arch
        The architecture, ``"sm_75"`` and up.
    options
        Fields of ``cuda.core.ProgramOptions``.

    Raises
    ------
    CompileError
        With the compiler's ``log``; or the compiler is not installed.
    UsageError
        An option does not exist.
    """
    includes = "aiooffload.cuh" in source
    headers = "".join(path.read_text() for path in sorted(HEADERS.glob("*.*h"))) if includes else ""
    path = cache_folder() / f"{_key(source + headers, arch, options)}.cubin"
    cached = _read(path)
    if cached is not None:
        return cached
    code = _compile(source, arch, _with_headers(options) if includes else options)
    _write(path, code)
    return code


def _key(source: str, arch: str, options: Mapping[str, Any]) -> str:
    from cuda.bindings import nvrtc

    version = _compiler(nvrtc.nvrtcVersion)
    text = json.dumps([source, arch, sorted(options.items()), version], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _with_headers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Add the folder of ``aiooffload.cuh``, and the wire version that it has to have."""
    folders, macros = options.get("include_path") or [], options.get("define_macro") or []
    folders = list(folders) if isinstance(folders, list | tuple) else [folders]
    macros = macros if isinstance(macros, list) else [macros]  # a tuple is one macro with its value
    version = ("AIOOFFLOAD_HOST_WIRE_VERSION", str(WIRE_VERSION))
    return {**options, "include_path": [*folders, str(HEADERS)], "define_macro": [*macros, version]}


def _compiler(call: Any, *args: Any) -> Any:
    """Call into NVRTC; CompileError says what to install if the library is missing."""
    try:
        return [int(value) for value in call(*args)]
    except Exception as error:  # the loader's error class differs between releases of cuda-bindings
        raise CompileError(
            f"NVRTC, CUDA's runtime compiler, is not installed: pip install 'aiooffload[compiler]' ({error})"
        ) from error


def _compile(source: str, arch: str, options: Mapping[str, Any]) -> bytes:
    from cuda.core import Program, ProgramOptions

    try:
        settings = ProgramOptions(arch=arch, **options)
    except TypeError as error:
        raise UsageError(f"options are fields of cuda.core.ProgramOptions: {error}") from error
    try:
        code: bytes = Program(source, "c++", settings).compile("cubin").code
    except Exception as error:  # NVRTCError is private to cuda.core; its text is the log
        text = str(error).replace("\0", "").strip()
        first = next((line for line in text.splitlines() if "error" in line.lower() and "NVRTC_" not in line), text)
        raise CompileError(f"the CUDA source does not compile for {arch}: {first}", log=text) from error
    return code


def _read(path: Path) -> bytes | None:
    """Return what was cached, or None if there is nothing or it was damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Cache ``code``; another process may do the same, and sees all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            whole = Path(folder, path.name)
            whole.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(whole, path)
    except OSError as error:
        log.warning("compiled code cannot be cached", folder=str(path.parent), error=str(error))
