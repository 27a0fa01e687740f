"""A program that the tests serve: an endpoint for everything that a worker has to cope with."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

import aiooffload as ao
from aiooffload.service.app import RequestError
from aiooffload.service.tensors import DATATYPES

app = ao.App("sample")

SCALE = r"""
extern "C" __global__ void scale(float* y, float a, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] *= a;
}"""
WAIT = r"""
#include <aiooffload.cuh>
extern "C" __global__ void wait_for_host(ao::Launch launch) {
    launch.progress(1, 3);
    launch.call(ao::fn("answer"), ao::None());
    launch.progress(3, 3);
}"""


@ao.kernel(cuda=SCALE)
def scale(launch: Any, y: ao.InOut[np.float32], a: np.float32, n: np.int32) -> None:
    y[:n] *= a


@ao.kernel(cuda=WAIT, calls=True)
def wait_for_host(launch: Any) -> None:
    launch.progress(1, 3)
    launch.call("answer")
    launch.progress(3, 3)


class State:
    """What endpoints of one device process share, so that a test can wait for things instead of sleeping."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Condition()
        self.inside = 0
        self.cancelled = 0
        self.kernels_cancelled = 0

    async def change(self, inside: int, cancelled: int = 0) -> None:
        async with self.entered:
            self.inside += inside
            self.cancelled += cancelled
            self.entered.notify_all()

    async def pass_gate(self) -> None:
        """Wait until somebody opens the gate."""
        await self.change(1)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            await self.change(0, 1)
            raise
        finally:
            await self.change(-1)


states: list[State] = []
"""Of this process: one."""


@app.on_start
async def prepare(off: ao.Offload) -> None:
    states.append(state := State())
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, state.gate.set)  # for when no request is taken
    await off.load(scale, wait_for_host)


@app.on_stop
async def say_goodbye(off: ao.Offload) -> None:
    if path := os.environ.get("SAMPLE_APP_GOODBYE"):
        Path(path).write_text("stopped\n")  # noqa: ASYNC240  (the loop has nothing else to do)


@app.host_function
async def answer() -> None:
    await states[0].pass_gate()


async def doubled(off: ao.Offload, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    y = await off.put(x)
    off.launch(scale, grid=1, block=128, args=(y, 2.0, x.size))
    result: np.ndarray[Any, Any] = await off.get(y)
    return result


VECTOR = {"x": (np.float32, (-1,))}
NUMBER = {"x": (np.int32, (1,))}
COUNT = {"count": (np.int32, (1,))}


def count(value: int) -> dict[str, Any]:
    return {"count": np.array([value], np.int32)}


@app.endpoint("double", inputs=VECTOR, outputs={"y": (np.float32, (-1,))})
async def double(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"y": await doubled(off, x)}


ROWS = {"x": (np.float32, (-1, -1)), "name": (bytes, (-1,))}


@app.endpoint("rows", inputs=ROWS, outputs={**ROWS, "calls": (np.int32, (-1,))}, max_batch_size=32)
async def rows(off: ao.Offload, x: np.ndarray[Any, Any], name: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Double the rows, echo the names, and say how many rows the call had."""
    y = (await doubled(off, x.reshape(-1))).reshape(x.shape)
    return {"x": y, "name": name, "calls": np.full(len(x), len(x), np.int32)}


@app.endpoint("gated_rows", inputs=VECTOR, outputs={"rows": (np.int32, (-1,))}, max_batch_size=4)
async def gated_rows(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    await states[0].pass_gate()
    return {"rows": np.full(len(x), len(x), np.int32)}


@app.endpoint(
    "patient_rows", inputs=VECTOR, outputs={"rows": (np.int32, (-1,))}, max_batch_size=4, batch_delay_us=10_000_000
)
async def patient_rows(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return {"rows": np.full(len(x), len(x), np.int32)}


def declare_echo(name: str) -> None:
    @app.endpoint(f"echo_{name}", inputs={"x": (name, (-1, -1))}, outputs={"y": (name, (-1, -1))})
    async def echo(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
        return {"y": x}


for datatype in DATATYPES:
    declare_echo(datatype)


@app.endpoint("large", inputs=NUMBER, outputs={"y": (np.float32, (-1,)), "twice": (np.float32, (-1,))})
async def large(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return as many elements as asked for, from 0."""
    y = np.arange(x[0], dtype=np.float32)
    return {"y": y, "twice": y * 2}


SCRATCH = np.zeros(1 << 18, np.int32)


@app.endpoint("scratch", inputs=NUMBER, outputs={"y": (np.int32, (-1,))})
async def scratch(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return an array that the next call writes to."""
    SCRATCH[:] = x[0]
    return {"y": SCRATCH}


@app.endpoint("gate", inputs=NUMBER, outputs=COUNT)
async def gate(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Wait until the gate is open."""
    await states[0].pass_gate()
    return count(int(x[0]))


@app.endpoint("gate_in_kernel", inputs=NUMBER, outputs=COUNT)
async def gate_in_kernel(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Launch a kernel that calls a function that waits until the gate is open."""
    operation = off.launch(wait_for_host, grid=1, block=1, args=())
    operation.add_done_callback(note_kernel)
    await operation
    return count(int(x[0]))


def note_kernel(operation: ao.Operation[Any]) -> None:
    states[0].kernels_cancelled += operation.cancelled()


@app.endpoint("open_gate", inputs=NUMBER, outputs=COUNT)
async def open_gate(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Let everybody pass who waits now, or keep it open for good (x = 1)."""
    state = states[0]
    state.gate.set()
    if not x[0]:
        state.gate = asyncio.Event()
    return count(state.inside)


@app.endpoint("wait_inside", inputs=NUMBER, outputs=COUNT)
async def wait_inside(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Wait until so many wait at the gate."""
    async with states[0].entered:
        await states[0].entered.wait_for(lambda: states[0].inside >= x[0])
    return count(states[0].inside)


@app.endpoint("wait_cancelled", inputs=NUMBER, outputs={**COUNT, "kernels": (np.int32, (1,))})
async def wait_cancelled(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Wait until so many were cancelled at the gate since the start, nobody waits there and all kernels are over."""
    async with states[0].entered:
        await states[0].entered.wait_for(lambda: states[0].cancelled >= x[0] and not states[0].inside)
    await off.drain()
    return count(states[0].cancelled) | {"kernels": np.array([states[0].kernels_cancelled], np.int32)}


@ao.kernel
def fails(launch: Any) -> None:
    raise LookupError("not in the table")


@app.endpoint("unseen", inputs=NUMBER, outputs=COUNT)
async def unseen(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return what the kernel should have changed, without a look at how that ended."""
    off.launch(fails, grid=1, block=1, args=())
    await off.drain()
    return count(int(x[0]))


@app.endpoint("pid", inputs=NUMBER, outputs=COUNT)
async def pid(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    return count(os.getpid())


children: list[subprocess.Popen[bytes]] = []


@app.endpoint("child", inputs=NUMBER, outputs=COUNT)
async def child(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Leave a child that waits for its end, forked, another program (x = 1) or in a session of its own (x = 2)."""
    if x[0] == 1:
        children.append(subprocess.Popen(["sleep", "600"]))  # noqa: ASYNC220  (a moment)
        return count(children[-1].pid)
    ready, said = os.pipe()
    if child := os.fork():
        os.close(said)
        os.read(ready, 1)
        os.close(ready)
        return count(child)
    try:
        if x[0] == 2:
            os.setsid()
        os.write(said, b".")
        while True:
            signal.pause()
    finally:
        os._exit(1)  # nothing of the parent's is the child's to end


@app.endpoint("inheritable", inputs=NUMBER, outputs=COUNT)
async def inheritable(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Say how many sockets a program that is started here would have."""
    sockets = [int(one.name) for one in Path("/proc/self/fd").iterdir() if one.is_socket()]  # noqa: ASYNC240  (a moment)
    return count(sum(map(os.get_inheritable, sockets)))


@app.endpoint("die", inputs=NUMBER, outputs=COUNT)
async def die(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    os._exit(int(x[0]))


@app.endpoint("lose", inputs=NUMBER, outputs=COUNT)
async def lose(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Lose the device as after a fault, and return something all the same."""
    assert off._engine is not None
    off._engine.lose(ao.DeviceLostError("an injected fault"))
    return count(1)


@app.endpoint("block", inputs=NUMBER, outputs=COUNT)
async def block(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Block the device process's loop for so many milliseconds."""
    time.sleep(int(x[0]) / 1000)  # noqa: ASYNC251  (what it is for)
    return count(1)


@app.endpoint("fail", inputs=NUMBER, outputs=COUNT)
async def fail(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    raise [ValueError, RequestError, ao.UsageError, MemoryError, ao.WouldBlock, ao.OffloadTimeout][x[0]](
        "secret or not"
    )


@app.endpoint("wrong", inputs=NUMBER, outputs=COUNT)
async def wrong(off: ao.Offload, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return what was not declared."""
    results: list[Any] = [
        {"count": np.zeros(1)},
        {"count": np.zeros((1, 1), np.int32)},
        {},
        None,
        {"count": np.zeros(1, np.int32), "more": 1},
    ]
    return results[x[0]]
