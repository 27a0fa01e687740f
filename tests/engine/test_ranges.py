"""NVTX ranges: what a profiler is told, here one that writes down every call."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What a profiler's library exports. NVTX looks it up by name, and it puts its functions into NVTX's tables. In module 5
# ("core 2": with a domain) 4 is DomainRangePushEx, 5 DomainRangePop, 10 DomainRegisterStringA, 12 DomainCreateA.
PROFILER = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
typedef void (*function)(void);
struct callbacks { size_t size; int (*module)(int module, function ***table, unsigned *size); };
struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const void *message;
};
static void *create(const char *name) { dprintf(1, "domain %s\n", name); return (void *)1; }
static void *intern(void *domain, const char *text) { (void)domain; return strdup(text); }
static int push(void *domain, const struct attributes *a)
{
    (void)domain;
    dprintf(1, "push %s\n", a->message_type == 3 ? (const char *)a->message : "?"); /* 3: a registered string */
    return 0;
}
static int pop(void *domain) { (void)domain; dprintf(1, "pop\n"); return 0; }
int InitializeInjectionNvtx2(const void *(*get)(uint32_t))
{
    const struct callbacks *callbacks = get(1);
    function **table;
    unsigned size;
    if (!callbacks || !callbacks->module(5, &table, &size) || size <= 12) return 0;
    *table[12] = (function)create, *table[10] = (function)intern, *table[4] = (function)push, *table[5] = (function)pop;
    return 1;
}
"""
PROGRAM = """
import asyncio
import numpy as np
import aiooffload as ao

@ao.kernel
def square(launch, x: ao.InOut[np.float64]):
    x *= x

@ao.kernel
def stumble(launch):
    raise ValueError("on purpose")

async def main():
    async with ao.Offload("host", lanes=1) as off:
        await off.load(square, stumble)
        await off.drain()
        print("begin", flush=True)
        x = await off.put(np.arange(4.0))
        bound = off.bind(square, grid=1, block=1, args=(x,))
        await off.launch(square, grid=1, block=1, args=(x,))
        await bound()
        stumbled = off.launch(stumble, grid=1, block=1)
        try:
            off.custom_operation(lambda lane: 1 / 0, after=[])
            await off.drain()
        finally:
            print(type(stumbled.exception()).__name__, (await off.get(x)).tolist(), flush=True)

async def run():
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    await main()

asyncio.run(run())
"""


@pytest.fixture(scope="module")
def profiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library as profilers inject it."""
    folder = tmp_path_factory.mktemp("profiler")
    (folder / "profiler.c").write_text(PROFILER, encoding="utf-8")
    command = [os.environ.get("CC") or "cc", "-shared", "-fPIC", "-o", "profiler.so", "profiler.c"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "profiler.so"


PROBE = """
import asyncio
import aiooffload as ao

async def main():
    async with ao.Offload("host") as off:
        print(off._engine.lanes.ranges, off._engine.launcher.ready)

asyncio.run(main())
"""


def run(program: str, **environment: str) -> list[str]:
    """Return what a program and the profiler write."""
    inherited = {name: value for name, value in os.environ.items() if name != "NVTX_INJECTION64_PATH"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=inherited | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


RESULT = "LaunchError [0.0, 1.0, 16.0, 81.0]"


def test_a_profiler_sees_each_operation_by_its_name(profiler: Path) -> None:
    """One range per operation around its driver calls, bound launches included; one that raises ends its range, too."""
    pytest.importorskip("nvtx", reason="the package nvtx is not installed")
    lines = run(PROGRAM, NVTX_INJECTION64_PATH=str(profiler))
    assert lines[0] == "domain aiooffload"
    told = lines[lines.index("begin") + 1 :]
    assert [line for line in told if line != "pop"] == [
        *(f"push {name}" for name in ("put", "square", "square", "stumble", "<lambda>")),
        "push get",
        RESULT,
    ]
    assert told.count("pop") == 6
    assert all(told[i + 1] == "pop" for i, line in enumerate(told) if line.startswith("push"))


def test_without_a_profiler_there_are_none() -> None:
    """Without one nothing is written, and the launch path stays short."""
    assert run(PROGRAM) == ["begin", RESULT]
    assert run(PROBE) == ["None True"]


def test_another_module_of_that_name_is_left_alone(tmp_path: Path) -> None:
    """What is called nvtx and is something else is no reason not to open."""
    (tmp_path / "nvtx.py").write_text("", encoding="utf-8")
    assert run(PROBE, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}") == ["None True"]
