"""What the clients of ``scripts/soak --serve`` ask, and whether an answer is one that it may have."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Message = dict[str, Any]

MALFORMED = 0.05
STREAMED = 0.15
BUSY = (429, 503)
"""Statuses of a request that is not served now."""
DATATYPES = {"uint64": "UINT64", "int64": "INT64"}


class Wrong(Exception):
    """An answer is none that the request may have."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as bytes, and the one result that it may have."""

    content: bytes
    id: str
    result: Array | None
    """None: it is malformed."""
    binary: bool = False
    streamed: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """A response, taken apart."""

    status: int
    headers: dict[str, str]
    body: bytes


def make(chance: random.Random) -> Request:
    """Choose an endpoint, its inputs and their form."""
    streamed = chance.random() < STREAMED
    binary = not streamed and chance.random() < 0.5
    name, inputs, result = chance.choice((_scaled, _joined, _asked))(chance)
    inputs_as_json, data = _tensors(inputs, chance.random() < 0.5)
    number = f"{chance.getrandbits(64):x}"
    message = {"id": number, "inputs": inputs_as_json, "parameters": {"binary_data_output": binary}}
    malformed = chance.random() < MALFORMED
    text = _spoilt(message, chance) if malformed else json.dumps(message)
    head = (
        f"POST /v2/models/{name}/infer{'?stream=1' if streamed else ''} HTTP/1.1\r\nhost: soak\r\n"
        f"inference-header-content-length: {len(text)}\r\ncontent-length: {len(text) + len(data)}\r\n\r\n"
    )
    return Request((head + text).encode() + data, number, None if malformed else result, binary, streamed)


def _numbers(chance: random.Random, *shape: int) -> Array:
    return np.frombuffer(chance.randbytes(8 * int(np.prod(shape))), np.uint64).reshape(shape)


def _scaled(chance: random.Random) -> tuple[str, dict[str, Array], Array]:
    most = 16 if chance.random() < 0.02 else 11  # a few are large: half a MiB
    inputs = {"x": _numbers(chance, int(2 ** chance.uniform(0, most)))}
    inputs |= {"a": _numbers(chance, 1), "b": _numbers(chance, 1)}
    return "scaled", inputs, inputs["x"] * inputs["a"] + inputs["b"]


def _joined(chance: random.Random) -> tuple[str, dict[str, Array], Array]:
    x = _numbers(chance, chance.randint(1, 8), chance.choice((1, 5, 16)))
    return "joined", {"x": x}, x * np.uint64(3) + np.uint64(1)


def _asked(chance: random.Random) -> tuple[str, dict[str, Array], Array]:
    x = (_numbers(chance, chance.randint(1, 16)) % np.uint64(1000)).astype(np.int64)
    return "asked", {"x": x}, x * 2 + 1


def _tensors(inputs: dict[str, Array], binary: bool) -> tuple[list[Message], bytes]:
    """Return inputs as JSON has them, and what follows the JSON."""
    entries = [
        {"name": name, "datatype": DATATYPES[array.dtype.name], "shape": list(array.shape)}
        | ({"parameters": {"binary_data_size": array.nbytes}} if binary else {"data": array.ravel().tolist()})
        for name, array in inputs.items()
    ]
    return entries, b"".join(array.tobytes() for array in inputs.values()) if binary else b""


def _spoilt(message: Message, chance: random.Random) -> str:
    """Return a message with one mistake in it, as text."""
    inputs = message["inputs"]
    tensor: Message = chance.choice(inputs)
    changes: list[tuple[Message, Message]] = [
        (message, {}),  # and the text is cut
        (message, {"inputs": inputs[1:]}),
        (message, {"inputs": [*inputs, tensor]}),
        (message, {"outputs": [{"name": "z"}]}),
        (message, {"id": 5}),
        (message, {"parameters": 7}),
        (tensor, {"name": "z"}),
        (tensor, {"datatype": "FP32"}),
        (tensor, {"shape": [*tensor["shape"], 1]}),
        (tensor, {"shape": [size + 1 for size in tensor["shape"]]}),
        (tensor, {"parameters": {"binary_data_size": 1 << 40}}),
    ]
    changed, change = chance.choice(changes)
    changed.update(change)
    text = json.dumps(message)
    return text if change else text[:-1]


def check(request: Request, response: Response) -> bool:
    """Whether a request was answered for good; False if it may be sent again.

    Raises
    ------
    Wrong
        It must not have been answered like this.
    """
    try:
        return _check(request, response)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise Wrong(f"an answer that makes no sense: {error!r}") from error


def _check(request: Request, response: Response) -> bool:
    status, body, result = response.status, response.body, request.result
    if status in BUSY:
        if not response.headers.get("retry-after", "").isdigit():
            raise Wrong(f"status {status} without Retry-After")
        return False
    if status != (400 if result is None else 200):
        raise Wrong(
            f"status {status} for a request that is {'malformed' if result is None else 'fine'}: {body[:200]!r}"
        )
    if result is None:
        if not json.loads(body)["error"]:
            raise Wrong("status 400 without a reason")
        return True
    if request.streamed:
        *progress, (event, body) = _events(body)
        if event == "error" and json.loads(body)["status"] in BUSY:
            return False
        if event != "result" or any(name != "progress" for name, _ in progress):
            raise Wrong(f"a stream that ends with {event!r}: {body[:200]!r}")
    length = int(response.headers.get("inference-header-content-length", len(body)))
    message, data = json.loads(body[:length]), body[length:]
    (output,) = message["outputs"]
    said = (message["id"], output["name"], output["datatype"], output["shape"])
    if said != (wanted := (request.id, "y", DATATYPES[result.dtype.name], list(result.shape))):
        raise Wrong(f"{said} instead of {wanted}")
    right = data == result.tobytes() if request.binary else output["data"] == result.ravel().tolist()
    if not right:
        raise Wrong(f"wrong values for {request.content[:40]!r}")
    return True


def _events(body: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield name and data of each event of a stream, without comments."""
    *events, rest = body.split(b"\n\n")
    if rest:
        raise Wrong("a stream that ends within an event")
    for event in events:
        if event != b":":
            name, data = event.split(b"\n")
            yield name.removeprefix(b"event: ").decode(), data.removeprefix(b"data: ")
