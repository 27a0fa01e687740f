"""Programs that cannot be served."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiooffload as ao

app = ao.App()
empty = ao.App()
X = {"x": (np.int32, (1,))}


@app.on_start
async def fail(off: ao.Offload) -> None:
    raise RuntimeError("cannot start")


@app.endpoint("e", inputs=X, outputs=X)
async def handler(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"x": x}
