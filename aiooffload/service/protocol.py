"""The Open Inference Protocol v2 with its binary tensor extension: requests and responses as bytes.

Pure: bytes and declarations in, tensors and bytes out. Everything that a client can get wrong is a
:class:`ProtocolError`, whose text may be shown to it.

Source: "Open Inference Protocol" of KServe, "Binary Tensor Data Extension" and "HTTP/REST and GRPC Protocol" of Triton.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import orjson

from aiooffload.service.app import Declaration
from aiooffload.service.tensors import MAX_RANK, Data, Spec, array_of, bytes_elements, pack_bytes

__all__ = [
    "HEADER_LENGTH",
    "MAX_NAME",
    "InferRequest",
    "ProtocolError",
    "Tensor",
    "Wanted",
    "compress",
    "decompress",
    "encode_response",
    "error_body",
    "model_metadata",
    "parse_request",
    "repository_index",
    "server_metadata",
]

HEADER_LENGTH: Final = "inference-header-content-length"
"""The header that says how much of a body is JSON, where tensors follow it."""

VERSION: Final = "1"
"""The version of every model: a worker serves one program."""
MAX_NAME: Final = 256
"""Characters of a request's id."""
MAX_TIMEOUT_US: Final = 86_400_000_000
MAX_REQUESTED: Final = 256
MAX_EMPTY: Final = 1 << 39
"""The product of an empty tensor's dimensions other than 0. NumPy counts those in a signed integer of bytes, also when
as many rows as a call may have, 2**20, were joined."""
_NATIVE: Final = orjson.OPT_SERIALIZE_NUMPY
_WBITS: Final = {"gzip": 31, "deflate": 15}


_NO_PARAMETERS: Final[dict[str, Any]] = {}


class ProtocolError(Exception):
    """A request that cannot be served as it is; ``status`` is that of HTTP."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status: Final = status


class Tensor(NamedTuple):
    """A tensor as it was sent; its datatype is the declared one."""

    shape: tuple[int, ...]
    data: Data


class Wanted(NamedTuple):
    """An output that the response is to have: its place in the declaration, and in which form."""

    place: int
    binary: bool


@dataclass(slots=True)
class InferRequest:
    """What a client asks for."""

    id: str
    inputs: list[Tensor]
    """In the order of the declaration."""
    outputs: list[Wanted]
    timeout_s: float | None


def parse_request(declaration: Declaration, body: bytes, json_nbytes: int | None) -> InferRequest:
    """Read the body of an inference request.

    Parameters
    ----------
    declaration
        The endpoint that it is for.
    body
        All of it, not compressed.
    json_nbytes
        What the header ``Inference-Header-Content-Length`` says; None without one.

    Raises
    ------
    ProtocolError
        It is not what the protocol or the declaration asks for.
    """
    if json_nbytes is None:
        json_nbytes = len(body)
    elif not 0 <= json_nbytes <= len(body):
        raise ProtocolError(f"Inference-Header-Content-Length is {json_nbytes}, the body has {len(body)} bytes")
    view = memoryview(body)
    try:
        message = orjson.loads(view[:json_nbytes])
    except orjson.JSONDecodeError as error:
        raise ProtocolError(f"the request is not JSON: {error}") from None
    if type(message) is not dict:
        raise ProtocolError("the request is not a JSON object")
    parameters = _parameters(message, "the request")
    inputs = _parse_inputs(declaration, message.get("inputs"), view[json_nbytes:])
    if declaration.max_batch_size:
        _check_rows(declaration, inputs)
    return InferRequest(
        _parse_id(message.get("id", "")),
        inputs,
        _parse_outputs(declaration, message.get("outputs"), parameters.get("binary_data_output", False)),
        _parse_timeout(parameters.get("timeout")),
    )


def _parameters(holder: Mapping[str, Any], what: str) -> dict[str, Any]:
    parameters = holder.get("parameters")
    if parameters is None:
        return _NO_PARAMETERS
    if type(parameters) is not dict:
        raise ProtocolError(f"the parameters of {what} are not a JSON object")
    return parameters


def _parse_id(value: object) -> str:
    if type(value) is not str or len(value) > MAX_NAME:
        raise ProtocolError(f"the request's id is a string of {MAX_NAME} characters at most")
    return value


def _parse_timeout(value: object) -> float | None:
    """Return the seconds of the parameter ``timeout``, which is in microseconds; 0 means none."""
    if value is None or value == 0:
        return None
    if type(value) is not int or not 0 < value <= MAX_TIMEOUT_US:
        raise ProtocolError(f"the parameter timeout is a number of microseconds from 0 to {MAX_TIMEOUT_US}")
    return value / 1e6


# -- inputs ------------------------------------------------------------------------------------


def _parse_inputs(declaration: Declaration, given: object, binary: memoryview) -> list[Tensor]:
    """Return the inputs in the declared order; ``binary`` is what follows the JSON."""
    if type(given) is not list:
        raise ProtocolError("the request has no inputs")
    specs = declaration.inputs
    if len(given) > len(specs):
        raise ProtocolError(f"model {declaration.name!r} has {len(specs)} inputs, the request has {len(given)}")
    tensors: dict[str, Tensor] = {}
    used = 0
    for entry in given:
        spec = _spec_of(specs, entry, "input")
        if spec.name in tensors:
            raise ProtocolError(f"input {spec.name!r} is there twice")
        shape = _parse_shape(spec, entry)
        parameters = _parameters(entry, f"input {spec.name!r}")
        if "shared_memory_region" in parameters:
            raise ProtocolError(f"input {spec.name!r}: shared memory is not supported")
        nbytes = parameters.get("binary_data_size")
        if nbytes is None:
            tensors[spec.name] = Tensor(shape, _parse_data(spec, shape, entry.get("data")))
            continue
        if "data" in entry:
            raise ProtocolError(f"input {spec.name!r} has both data and binary_data_size")
        if type(nbytes) is not int or not 0 <= nbytes <= len(binary) - used:
            raise ProtocolError(f"input {spec.name!r}: the body has no {nbytes!r} bytes for it")
        data = binary[used : used + nbytes]
        used += nbytes
        _check_binary(spec, shape, data)
        tensors[spec.name] = Tensor(shape, data)
    if used != len(binary):
        raise ProtocolError(f"{len(binary) - used} bytes of the body belong to no input")
    if missing := [spec.name for spec in specs if spec.name not in tensors]:
        raise ProtocolError(f"the request has no input {missing[0]!r}")
    return [tensors[spec.name] for spec in specs]


def _spec_of(specs: Iterable[Spec], entry: object, kind: str) -> Spec:
    """Return what was declared of the tensor that ``entry`` names."""
    if type(entry) is not dict or type(name := entry.get("name")) is not str:
        raise ProtocolError(f"an {kind} is a JSON object with a name")
    for spec in specs:
        if spec.name == name:
            return spec
    raise ProtocolError(f"unexpected {kind} {name[:MAX_NAME]!r}: there are {', '.join(spec.name for spec in specs)}")


def _parse_shape(spec: Spec, entry: Mapping[str, Any]) -> tuple[int, ...]:
    if (datatype := entry.get("datatype")) != spec.datatype.name:
        raise ProtocolError(f"input {spec.name!r} is {spec.datatype.name}, not {str(datatype)[:MAX_NAME]!r}")
    shape = entry.get("shape")
    if type(shape) is not list or len(shape) > MAX_RANK:
        raise ProtocolError(f"the shape of input {spec.name!r} is a list of up to {MAX_RANK} integers from 0")
    for size in shape:
        if type(size) is not int or size < 0:
            raise ProtocolError(f"the shape of input {spec.name!r} is a list of up to {MAX_RANK} integers from 0")
    if not spec.admits(shape):
        raise ProtocolError(f"input {spec.name!r} has shape {shape}, and is {list(spec.shape)}")
    if 0 in shape and math.prod(filter(None, shape)) > MAX_EMPTY:  # others are held to their data
        raise ProtocolError(f"the shape {shape} of input {spec.name!r} is too large, though it is empty")
    return tuple(shape)


def _check_binary(spec: Spec, shape: tuple[int, ...], data: memoryview) -> None:
    """Refuse binary data that is not of the shape; the product is of Python's integers, so it cannot overflow."""
    count = math.prod(shape)
    if spec.datatype.nbytes:
        if len(data) != count * spec.datatype.nbytes:
            raise ProtocolError(
                f"input {spec.name!r}: shape {list(shape)} takes {count * spec.datatype.nbytes} bytes, not {len(data)}"
            )
        if spec.datatype.name == "BOOL" and count and np.frombuffer(data, np.uint8).max() > 1:
            raise ProtocolError(f"input {spec.name!r}: an element of BOOL is a byte 0 or 1")
        return
    try:
        elements = len(bytes_elements(data))
    except ValueError as error:
        raise ProtocolError(f"input {spec.name!r}: {error}") from None
    if elements != count:
        raise ProtocolError(f"input {spec.name!r}: shape {list(shape)} takes {count} elements, not {elements}")


def _parse_data(spec: Spec, shape: tuple[int, ...], data: object) -> Data:
    """Return the binary form of JSON data, which is flat or nested as the shape is."""
    if type(data) is not list:
        raise ProtocolError(f"input {spec.name!r} has no data")
    elements = _flat(spec, shape, data)
    if len(elements) != (count := math.prod(shape)):
        raise ProtocolError(f"input {spec.name!r}: shape {list(shape)} takes {count} elements, not {len(elements)}")
    if not spec.datatype.json.issuperset(map(type, elements)):
        raise ProtocolError(f"input {spec.name!r}: an element of its data is not a {spec.datatype.name}")
    datatype = spec.datatype
    if not datatype.nbytes:
        return pack_bytes(element.encode() for element in elements)
    try:
        # Python's own are quicker than NumPy's for few elements, and no slower than the parser for many.
        if (
            elements
            and datatype.most < math.inf
            and not -datatype.most <= min(elements) <= max(elements) <= datatype.most
        ):
            raise OverflowError
        return np.array(elements, datatype.dtype).tobytes()
    except OverflowError:
        raise ProtocolError(f"input {spec.name!r}: an element is out of the range of {datatype.name}") from None


def _flat(spec: Spec, shape: Sequence[int], data: list[Any]) -> list[Any]:
    level: list[Any] = data
    for axis in range(1, len(shape)):
        if not level or type(level[0]) is not list:
            break
        if any(type(row) is not list or len(row) != shape[axis] for row in level):
            raise ProtocolError(f"the data of input {spec.name!r} is not nested as its shape {list(shape)} is")
        if axis == 1 and len(level) != shape[0]:
            raise ProtocolError(f"the data of input {spec.name!r} is not nested as its shape {list(shape)} is")
        level = list(chain.from_iterable(level))
    return level


def _check_rows(declaration: Declaration, inputs: list[Tensor]) -> None:
    """Refuse a request that could not be joined with others."""
    rows = {tensor.shape[0] for tensor in inputs}
    if len(rows) > 1:
        raise ProtocolError(f"the inputs have different first dimensions: {sorted(rows)}")
    if not 1 <= (count := rows.pop()) <= declaration.max_batch_size:
        raise ProtocolError(f"the first dimension is 1 to {declaration.max_batch_size}, not {count}")


def _parse_outputs(declaration: Declaration, given: object, binary_by_default: object) -> list[Wanted]:
    if type(binary_by_default) is not bool:
        raise ProtocolError("the parameter binary_data_output is true or false")
    if given is None or given == []:
        return [Wanted(index, binary_by_default) for index in range(len(declaration.outputs))]
    if type(given) is not list or len(given) > MAX_REQUESTED:
        raise ProtocolError(f"the outputs are a list of {MAX_REQUESTED} at most")
    wanted: dict[int, Wanted] = {}
    for entry in given:
        spec = _spec_of(declaration.outputs, entry, "output")
        parameters = _parameters(entry, f"output {spec.name!r}")
        for unsupported in ("classification", "shared_memory_region"):
            if parameters.get(unsupported):
                raise ProtocolError(f"output {spec.name!r}: {unsupported} is not supported")
        binary = parameters.get("binary_data", binary_by_default)
        if type(binary) is not bool:
            raise ProtocolError(f"output {spec.name!r}: binary_data is true or false")
        index = declaration.outputs.index(spec)
        if index in wanted:
            raise ProtocolError(f"output {spec.name!r} is asked for twice")
        wanted[index] = Wanted(index, binary)
    return list(wanted.values())


# -- responses ---------------------------------------------------------------------------------


def encode_response(
    declaration: Declaration, request: InferRequest, outputs: Sequence[Tensor]
) -> tuple[bytes, int | None]:
    """Return the body of a response, and how much of it is JSON (None: all).

    Raises
    ------
    ProtocolError
        An element of a BYTES output that is to be JSON is no UTF-8 text.
    """
    entries, parts = [], []
    for index, binary in request.outputs:
        spec, (shape, data) = declaration.outputs[index], outputs[index]
        entry: dict[str, Any] = {"name": spec.name, "datatype": spec.datatype.name, "shape": shape}
        if binary:
            entry["parameters"] = {"binary_data_size": len(data)}
            parts.append(data)
        else:
            entry["data"] = _json_data(spec, shape, data)
        entries.append(entry)
    message: dict[str, Any] = {"model_name": declaration.name, "model_version": VERSION, "outputs": entries}
    if request.id:
        message["id"] = request.id
    head = orjson.dumps(message, option=_NATIVE)
    if not any(wanted.binary for wanted in request.outputs):
        return head, None
    return b"".join((head, *parts)), len(head)


def _json_data(spec: Spec, shape: Sequence[int], data: Data) -> object:
    if not spec.datatype.nbytes:
        try:
            return [element.decode() for element in bytes_elements(data)]
        except UnicodeDecodeError:
            raise ProtocolError(f"output {spec.name!r} is no UTF-8 text: ask for it with binary_data true") from None
    array = array_of(spec.datatype, (math.prod(shape),), data)
    return array.tolist() if spec.datatype.name == "BF16" else array


def error_body(text: str) -> bytes:
    """Return the body of a response that is an error."""
    return orjson.dumps({"error": text})


def server_metadata(name: str, version: str) -> dict[str, Any]:
    """Return what ``/v2`` answers."""
    return {"name": name, "version": version, "extensions": ["binary_tensor_data", "model_repository"]}


def model_metadata(declaration: Declaration) -> dict[str, Any]:
    """Return what ``/v2/models/NAME`` answers."""
    return {
        "name": declaration.name,
        "versions": [VERSION],
        "platform": "aiooffload",
        "inputs": [spec.as_metadata() for spec in declaration.inputs],
        "outputs": [spec.as_metadata() for spec in declaration.outputs],
    }


def repository_index(declarations: Iterable[Declaration], ready: bool, only_ready: bool) -> list[dict[str, str]]:
    """Return what ``/v2/repository/index`` answers."""
    if only_ready and not ready:
        return []
    state, reason = ("READY", "") if ready else ("UNAVAILABLE", "the device process is being replaced")
    return [{"name": one.name, "version": VERSION, "state": state, "reason": reason} for one in declarations]


# -- compression -------------------------------------------------------------------------------


def decompress(body: bytes, encoding: str, most: int) -> bytes:
    """Return what a body stands for.

    Parameters
    ----------
    body
        All of it.
    encoding
        What the header ``Content-Encoding`` says.
    most
        How many bytes the result may have.

    Raises
    ------
    ProtocolError
        The encoding is none of ``gzip``, ``deflate`` and ``identity``, the body is not in it, or stands for more.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if (wbits := _WBITS.get(encoding)) is None:
        raise ProtocolError(f"Content-Encoding {encoding[:32]!r} is not supported: gzip or deflate", 415)
    machine = zlib.decompressobj(wbits)
    try:
        content = machine.decompress(body, most + 1)
    except zlib.error as error:
        raise ProtocolError(f"the body is not {encoding}: {error}") from None
    if len(content) > most:
        raise ProtocolError(f"the body stands for more than {most} bytes", 413)
    if not machine.eof or machine.unused_data:
        raise ProtocolError(f"the body is not {encoding}: it ends too early or too late")
    return content


def compress(body: bytes, accepted: str) -> tuple[bytes, str]:
    """Return the body in the first encoding of ``Accept-Encoding`` that is known, and its name; "" for none."""
    for offer in accepted.split(","):
        name, _, weight = offer.strip().lower().partition(";")
        refused = weight.replace(" ", "").rstrip("0") in ("q=", "q=0.")
        if (wbits := _WBITS.get(name.strip())) is not None and not refused:
            machine = zlib.compressobj(1, zlib.DEFLATED, wbits)
            return machine.compress(body) + machine.flush(), name.strip()
    return body, ""
