"""One request without a server: what ``aiooffload run`` does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import orjson
import uvloop

from aiooffload.errors import OffloadError, UsageError
from aiooffload.service.app import App, Endpoint, RequestError
from aiooffload.service.device import ServedOffload, load_app, result_of
from aiooffload.service.protocol import ProtocolError, Tensor, encode_response, parse_request
from aiooffload.service.tensors import data_of

__all__ = ["answer"]


def answer(target: str, name: str | None, inputs: Sequence[str], device: str) -> list[dict[str, Any]]:
    """Return the outputs as the protocol has them.

    Parameters
    ----------
    target
        The program, as ``MODULE:APP``.
    name
        The endpoint; by default the first.
    inputs
        Each ``NAME=JSON`` or ``NAME=@FILE.npy``.
    device
        Where it runs.

    Raises
    ------
    UsageError
        There is no such program, endpoint or file, or an input is not JSON.
    OffloadError
        A client would have been refused, or the device failed.
    """
    app = load_app(target)
    name = name or next(iter(app.endpoints))
    if name not in app.endpoints:
        raise UsageError(f"{target} has no endpoint {name!r}: there are {', '.join(app.endpoints)}")
    endpoint = app.endpoints[name]
    body, json_nbytes = _request(endpoint, dict(map(_split, inputs)))
    try:
        request = parse_request(endpoint.declaration, body, json_nbytes)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            outputs = runner.run(_call(app, endpoint, request.inputs, device))
        text, _ = encode_response(endpoint.declaration, request, outputs)
    except (ProtocolError, RequestError) as error:
        raise OffloadError(str(error)) from error
    found: list[dict[str, Any]] = orjson.loads(text)["outputs"]
    return found


async def _call(app: App, endpoint: Endpoint, inputs: Sequence[Tensor], device: str) -> list[Tensor]:
    off = ServedOffload(device)
    async with off:
        await app.start(off)
        try:
            given = [one.shape for one in inputs], [one.data for one in inputs]
            shapes, data = await result_of(endpoint, off, *given, operations=[])
        finally:
            if off.loss is None:
                await app.stop(off)
    return [Tensor(shape, bytes(content)) for shape, content in zip(shapes, data, strict=True)]


def _split(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"an input is NAME=JSON or NAME=@FILE.npy, not {text!r}")
    return name, value


def _request(endpoint: Endpoint, inputs: Mapping[str, str]) -> tuple[bytes, int]:
    """Return the request that a client would send, so that it is checked as a client's is."""
    specs = {spec.name: spec for spec in endpoint.declaration.inputs}
    entries, parts = [], []
    for name, text in inputs.items():
        entry: dict[str, Any] = {"name": name}
        if name in specs:
            entry["datatype"] = specs[name].datatype.name
        if text.startswith("@"):
            try:
                array = np.load(text[1:], allow_pickle=False)
            except (OSError, ValueError) as error:
                raise UsageError(f"input {name!r}: {text[1:]} cannot be read: {error}") from None
            if name in specs and array.dtype != specs[name].datatype.dtype:
                raise UsageError(f"input {name!r} is {specs[name].datatype.name}, the file has {array.dtype}")
            data = bytes(data_of(specs[name].datatype, array)) if name in specs else b""
            parts.append(data)
            entry |= {"shape": array.shape, "parameters": {"binary_data_size": len(data)}}
        else:
            try:
                value = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise UsageError(f"input {name!r} is not JSON: {error}") from None
            entry |= {"shape": _shape_of(value), "data": value if isinstance(value, list) else [value]}
        entries.append(entry)
    head = orjson.dumps({"inputs": entries})
    return b"".join((head, *parts)), len(head)


def _shape_of(value: Any) -> list[int]:
    shape = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape
