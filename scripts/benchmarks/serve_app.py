"""The programs that ``scripts/bench serve`` compares: one kernel, served in several ways.

``app`` is for ``aiooffload serve``. Run as ``python -m benchmarks.serve_app WAY PORT`` it serves the same with
``starlette`` (a bare echo of the request's bytes) or ``fastapi`` (the host kernel in ``run_in_executor``), on uvicorn
and uvloop.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import aiooffload as ao

SCALE = r"""
extern "C" __global__ void scale(float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] *= a;
}"""


@ao.kernel(cuda=SCALE)
def scale(launch: Any, y: ao.InOut[np.float32], a: np.float32, n: np.int32) -> None:
    y[:n] *= a


app = ao.App("bench")


@app.on_start
async def prepare(off: ao.Offload) -> None:
    await off.load(scale)


async def scaled(off: ao.Offload, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    y = await off.put(x)
    off.launch(scale, grid=(x.size + 127) // 128, block=128, args=(y, 2.0, x.size))
    result: np.ndarray[Any, Any] = await off.get(y)
    return result


ROWS = {"x": (np.float32, (-1, 16))}


@app.endpoint("single", inputs=ROWS, outputs={"y": ROWS["x"]})
async def single(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"y": await scaled(off, x)}


@app.endpoint("batched", inputs=ROWS, outputs={"y": ROWS["x"]}, max_batch_size=64)
async def batched(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"y": await scaled(off, x)}


@app.endpoint("nothing", inputs=ROWS, outputs={"y": ROWS["x"]})
async def nothing(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Only what the worker itself costs."""
    return {"y": x}


def starlette_app() -> Any:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def echo(request: Request) -> Response:
        return Response(await request.body(), media_type="application/json")

    return Starlette(routes=[Route("/echo", echo, methods=["POST"])])


def fastapi_app() -> Any:
    import asyncio

    from fastapi import FastAPI
    from pydantic import BaseModel

    class Tensor(BaseModel):
        name: str
        datatype: str
        shape: list[int]
        data: list[float]

    class Body(BaseModel):
        inputs: list[Tensor]

    def run_kernel(data: list[float]) -> list[float]:
        y = np.array(data, np.float32)
        y *= np.float32(2)
        return [float(one) for one in y]

    app = FastAPI()

    async def infer(body: Body) -> dict[str, Any]:
        one = body.inputs[0]
        data = await asyncio.get_running_loop().run_in_executor(None, run_kernel, one.data)
        return {"outputs": [{"name": "y", "datatype": "FP32", "shape": one.shape, "data": data}]}

    infer.__annotations__ = {"body": Body, "return": dict[str, Any]}  # FastAPI looks for them at the module's level
    app.post("/infer")(infer)
    return app


def main() -> None:
    import uvicorn

    way, port = sys.argv[1:]
    served = {"starlette": starlette_app, "fastapi": fastapi_app}[way]()
    uvicorn.run(served, port=int(port), loop="uvloop", http="httptools", log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
