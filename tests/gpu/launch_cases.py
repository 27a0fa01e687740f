"""Cases that launch kernels for the first time in a process, each run in one of its own by ``test_launch.py``."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiooffload as ao
from tests.gpu.support import run_as_main

DECLARED = r"""
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, size_t);
extern "C" __device__ void* malloc(size_t);
extern "C" __device__ int vprintf(const char*, const char*);
"""
BODIES = {
    "locals": "volatile int values[3000]; for (int i = 0; i < 3000; i++) values[i] = i; *out = values[n];",
    "calls": "*out = deep(n, n);",
    "assert": 'if (n < 0) __assertfail("n >= 0", "launch_cases.py", 1, "first", 1); *out = n;',
    "malloc": "volatile int* word = (volatile int*)malloc(n * 4); if (word) { *word = n; *out = *word; }",
    "printf": 'if (n < 0) vprintf("negative", nullptr); *out = n;',
}
"""What needs memory of the driver's at its first launch, and sets ``*out`` to ``n``."""
DEEP = r"""
__device__ __noinline__ int deep(int depth, int n)
{
    volatile int values[32];
    for (int i = 0; i < 32; i++) values[i] = i;
    return depth ? deep(depth - 1, n) + values[n & 31] - (n & 31) : n;
}
"""
ask = ao.Kernel(
    "ask",
    cuda="""#include <aiooffload.cuh>
    extern "C" __global__ void ask(ao::Launch launch) { launch.call(ao::fn("answer"), ao::None()); }""",
    calls=True,
)


def first(name: str) -> ao.Kernel:
    """Return a kernel that was never launched."""
    head = f'extern "C" __global__ void first_{name}(volatile int* out, int n)'
    return ao.Kernel(f"first_{name}", cuda=f"{DECLARED}{DEEP}{head} {{ {BODIES[name]} }}")


async def in_a_handler() -> dict[str, Any]:
    """While a kernel waits for its handler, that launches each kind for the first time and awaits it."""
    async with ao.Offload("cuda:0") as off:
        kernels = {name: first(name) for name in BODIES}
        await off.load(ask, *kernels.values())
        out, found = off.zeros(1, np.int32), {}

        @off.host_function
        async def answer() -> None:
            for name, kernel in kernels.items():
                await off.launch(kernel, grid=1, block=1, args=(out, np.int32(7)))
                found[name] = int((await off.get(out))[0])
                await off.fill(out, 0)

        await off.launch(ask, grid=1, block=1, timeout_s=10)
        return {"found": found, "fallback": off.stats()["fallback"]}


if __name__ == "__main__":
    run_as_main({"in_a_handler": in_a_handler})
