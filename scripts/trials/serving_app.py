"""The program that ``scripts/soak --serve`` lets a worker serve: arithmetic of integers, whose results are exact."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

import aiooffload as ao
from trials.kernels import ask, scale_add

Array = np.ndarray[Any, Any]

VECTOR = (np.uint64, (-1,))
SCALAR = (np.uint64, (1,))
ROWS = (np.uint64, (-1, -1))
ASKED = (np.int64, (-1,))

app = ao.App("soak")


@app.on_start
async def prepare(off: ao.Offload) -> None:
    await off.load(scale_add, ask)


@app.host_function
async def answer(x: int) -> int:
    if x % 64 == 0:
        await asyncio.sleep(0.03)  # so long that the worker watches whether the client is still there
    return 2 * x + 1


async def scaled_by(off: ao.Offload, x: Array, a: int, b: int) -> Array:
    y = await off.put(x)
    off.launch(scale_add, grid=(x.size + 127) // 128, block=128, args=(y, np.uint64(a), np.uint64(b), x.size))
    result: Array = await off.get(y)
    return result


@app.endpoint("scaled", inputs={"x": VECTOR, "a": SCALAR, "b": SCALAR}, outputs={"y": VECTOR})
async def scaled(off: ao.Offload, x: Array, a: Array, b: Array) -> dict[str, Array]:
    """Return ``a * x + b``."""
    return {"y": await scaled_by(off, x, a[0], b[0])}


@app.endpoint("joined", inputs={"x": ROWS}, outputs={"y": ROWS}, max_batch_size=32, batch_delay_us=1000)
async def joined(off: ao.Offload, x: Array) -> dict[str, Array]:
    """Return ``3 * x + 1``, of several requests at a time."""
    return {"y": (await scaled_by(off, x.reshape(-1), 3, 1)).reshape(x.shape)}


@app.endpoint("asked", inputs={"x": ASKED}, outputs={"y": ASKED})
async def asked(off: ao.Offload, x: Array) -> dict[str, Array]:
    """Return ``2 * x + 1``, which the kernel asks the host for."""
    y = off.zeros(x.size, np.int64)
    off.launch(ask, grid=1, block=1, args=(await off.put(x), y, x.size))
    return {"y": await off.get(y)}
