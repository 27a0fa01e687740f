"""The header that kernels include, under every compiler that is at hand. Needs no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import aiooffload as ao
from aiooffload.drivers.cuda.compiler import compile_source
from aiooffload.errors import CompileError

EVERYTHING = r"""
#include <aiooffload.cuh>

struct Row { double values[4]; int count; };
struct Largest { char bytes[256]; };
struct TooLarge { char bytes[257]; };

__device__ void pass_on(ao::Launch& launch) { launch.post(ao::fn("note"), 1); }

extern "C" __global__ void everything(ao::Launch launch, long long* y, float* z, int n) {
    long long out = 0;
    ao::Status s = launch.call(ao::fn("twice"), out, 21LL);
    y[0] = s == ao::Status::OK ? out : launch.error();
    s = launch.call(7u, out);
    Row row;
    Largest largest;
    s = launch.call(ao::fn("row"), row, true, 2.0, 'c', ao::tofrom(z, n), ao::to(z, n), ao::from(z, n),
                    ao::alloc(z, n));
    s = launch.call(ao::fn("largest"), largest, largest);
    s = launch.call(ao::fn("none"), ao::None(), n);
    s = launch.post(ao::fn("too large"), TooLarge());
    pass_on(launch);
    float f;
    ao::Pending none, first = launch.call_async(ao::fn("f"), 1u), second = static_cast<ao::Pending&&>(first);
    none = launch.call_async(ao::fn("g"), static_cast<short>(1));
    while (!launch.poll(second, f, s)) {}
    s = launch.wait(none, f);
    s = launch.warp_call(ao::fn("row"), row, 5);
    s = launch.warp_call(ao::fn("none"), ao::None());
    s = launch.warp_post(ao::fn("note"), n);
    if (threadIdx.x % 2) s = launch.warp_call_each(ao::fn("each"), f, static_cast<double>(threadIdx.x));
    s = launch.warp_call_each(ao::fn("each"), row, row);
    launch.progress(1, 2);
    launch.set_timeout_ns(1000);
    if (launch.cancelled()) launch.abort(3, "text");
    y[1] = static_cast<long long>(s);
}
"""
HEADERS = Path(ao.include_dir())
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own."""
    monkeypatch.setenv("AIOOFFLOAD_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_everything_compiles_at_run_time(arch: str) -> None:
    """All that the header has compiles under NVRTC, with no other header, for each architecture of CUDA 13."""
    assert compile_source(EVERYTHING, arch, {})[:4] == b"\x7fELF"


def test_header_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose header and host part disagree about the wire does not compile, and says why."""
    monkeypatch.setattr("aiooffload.drivers.cuda.compiler.WIRE_VERSION", 999)
    with pytest.raises(CompileError, match="another version"):
        compile_source(EVERYTHING, "sm_90", {})


def test_header_is_part_of_the_cache_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Code compiled with another header is not taken from the cache."""
    compile_source(EVERYTHING, "sm_90", {})
    headers = tmp_path / "device"
    shutil.copytree(HEADERS, headers)
    (headers / "aiooffload.cuh").write_text("// nothing\n", encoding="utf-8")
    monkeypatch.setattr("aiooffload.drivers.cuda.compiler.HEADERS", headers)
    with pytest.raises(CompileError):
        compile_source(EVERYTHING, "sm_90", {})


@pytest.mark.parametrize(
    "options",
    [{"include_path": "/nowhere"}, {"include_path": ["/nowhere"]}, {"define_macro": "X"}, {"define_macro": ("X", "1")},
     {"define_macro": ["X", ("Y", "2")]}],
    ids=repr,
)  # fmt: skip
def test_options_of_the_program_stay(options: dict[str, object]) -> None:
    """Include folders and macros of the program's own are kept beside those of the header."""
    source = (
        EVERYTHING
        if "define_macro" not in options
        else f"// DOES NOT COMPILE without X\n#ifndef X\n#error X is missing\n#endif\n{EVERYTHING}"
    )
    assert compile_source(source, "sm_90", options)


@pytest.mark.parametrize("options", [["-O3"], ["-G"], ["-std=c++20"]], ids=" ".join)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
def test_everything_compiles_with_nvcc(tmp_path: Path, arch: str, options: list[str]) -> None:
    """It compiles under nvcc, without a warning, with optimisation, for the debugger, and as C++20."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    (tmp_path / "everything.cu").write_text(EVERYTHING, encoding="utf-8")
    standard = [] if options == ["-std=c++20"] else ["-std=c++17"]
    command = [nvcc, *standard, *options, f"-arch={arch}", "-Werror", "all-warnings", "-I", str(HEADERS), "-cubin"]
    result = subprocess.run(
        [*command, "everything.cu", "-o", "out"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_wire_header_is_plain_c(tmp_path: Path) -> None:
    """The layout's header is C11 on its own, so that others can speak the wire."""
    (tmp_path / "wire.c").write_text(
        '#include "aiooffload_wire.h"\nint main(void) { return AO_WIRE_VERSION < 1; }\n', encoding="utf-8"
    )
    compiler = os.environ.get("CC") or shutil.which("cc") or "gcc"
    command = [
        compiler,
        "-std=c11",
        "-pedantic",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        str(HEADERS),
        "wire.c",
        "-o",
        "wire",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    subprocess.run([tmp_path / "wire"], check=True)


def test_host_memory_is_never_modified_atomically() -> None:
    """No atomic operation has system scope: PCIe has none that all systems share (uccl #465)."""
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(EVERYTHING.encode(), b"everything.cu", 0, [], [])
    flags = [b"--gpu-architecture=compute_90", b"--std=c++17", f"-I{HEADERS}".encode()]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
    assert int(status) == 0
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    code = ptx.decode()
    atomics = re.findall(r"\b(?:atom|red)\.[\w.]+", code)
    assert len(atomics) > 10
    assert [found for found in atomics if ".sys" in found] == []
    assert re.search(r"\bst\.release\.sys\.global\.v2\.u64\b", code)
