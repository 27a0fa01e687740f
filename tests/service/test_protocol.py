"""Requests and responses of the Open Inference Protocol as bytes, and everything that clients may get wrong."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from aiooffload.service.app import Declaration
from aiooffload.service.protocol import (
    InferRequest,
    ProtocolError,
    Tensor,
    Wanted,
    compress,
    decompress,
    encode_response,
    error_body,
    model_metadata,
    parse_request,
    repository_index,
    server_metadata,
)
from aiooffload.service.tensors import DATATYPES, Spec, array_of, bytes_elements, data_of


def declaration(datatype: str = "FP32", shape: tuple[int, ...] = (-1, 2), batch: int = 0) -> Declaration:
    spec = DATATYPES[datatype]
    return Declaration("model", (Spec("x", spec, shape),), (Spec("y", spec, shape), Spec("z", spec, shape)), batch, 0)


def body_of(message: Any, binary: bytes = b"") -> tuple[bytes, int]:
    text = json.dumps(message).encode()
    return text + binary, len(text)


def request_of(entry: dict[str, Any] | None = None, binary: bytes = b"", **more: Any) -> tuple[bytes, int]:
    """Return a request for ``declaration()`` that is right, but for what is given."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]} | (entry or {})
    return body_of({"inputs": [{key: value for key, value in tensor.items() if value is not ...}]} | more, binary)


def parse(entry: dict[str, Any] | None = None, binary: bytes = b"", **more: Any) -> InferRequest:
    return parse_request(declaration(), *request_of(entry, binary, **more))


# -- round trips ---------------------------------------------------------------------------------


def elements(name: str) -> st.SearchStrategy[Any]:
    """Return elements of a data type that JSON can hold."""
    kind = DATATYPES[name]
    if name == "BOOL":
        return st.booleans()
    if name == "BYTES":
        return st.text(max_size=5)
    if kind.json == {int}:
        limits = np.iinfo(kind.dtype)
        return st.integers(int(limits.min), int(limits.max))
    if name == "BF16":
        return st.integers(-256, 256).map(float)
    return st.floats(width=8 * kind.nbytes, allow_nan=False, allow_infinity=False)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, list[int], np.ndarray[Any, Any]]:
    name = draw(st.sampled_from(sorted(DATATYPES)))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = math.prod(shape)
    values = draw(st.lists(elements(name), min_size=count, max_size=count))
    array = np.empty(count, DATATYPES[name].dtype)
    array[:] = [value.encode() for value in values] if name == "BYTES" else values
    return name, shape, array.reshape(shape)


def as_json(array: np.ndarray[Any, Any], nested: bool) -> Any:
    values = (array if nested else array.reshape(-1)).tolist()
    return json.loads(json.dumps(values if array.ndim else [values] if nested else values, default=bytes.decode))


@given(tensors(), st.booleans(), st.booleans())
def test_request_round_trip(tensor: tuple[str, list[int], np.ndarray[Any, Any]], binary: bool, nested: bool) -> None:
    """A tensor of any type arrives as it was, from JSON (flat or nested) and from binary."""
    name, shape, array = tensor
    kind = DATATYPES[name]
    data = bytes(data_of(kind, array))
    entry: dict[str, Any] = {"name": "x", "datatype": name, "shape": shape}
    if binary:
        body, size = body_of({"inputs": [entry | {"parameters": {"binary_data_size": len(data)}}]}, data)
    else:
        body, size = body_of({"inputs": [entry | {"data": as_json(array, nested)}]})
    request = parse_request(declaration(name, (-1,) * len(shape)), body, size if binary else None)
    assert request.inputs[0].shape == tuple(shape)
    assert bytes(request.inputs[0].data) == data


@given(tensors(), st.sampled_from([[0, 1], [1], [1, 0]]), st.tuples(st.booleans(), st.booleans()), st.text(max_size=3))
def test_response_round_trip(
    tensor: tuple[str, list[int], np.ndarray[Any, Any]], order: list[int], binary: tuple[bool, bool], id: str
) -> None:
    """The outputs that are asked for are in the response, in that order, each in the form that is asked for."""
    name, shape, array = tensor
    kind = DATATYPES[name]
    declared = declaration(name, (-1,) * len(shape))
    data = bytes(data_of(kind, array))
    request = InferRequest(id, [], [Wanted(index, binary[index]) for index in order], None)
    body, size = encode_response(declared, request, [Tensor(tuple(shape), data)] * 2)
    assert (size is None) is not any(binary[index] for index in order)
    head, rest = json.loads(body[:size]), body[len(body) if size is None else size :]
    assert (head["model_name"], head["model_version"], head.get("id", "")) == ("model", "1", id)
    assert [entry["name"] for entry in head["outputs"]] == ["yz"[index] for index in order]
    for entry in head["outputs"]:
        assert (entry["datatype"], entry["shape"]) == (name, shape)
        if "data" in entry:
            # A float in JSON has the digits that its own type needs, which are fewer than a double's.
            back = entry["data"] if name == "BYTES" else np.array(entry["data"], kind.dtype).tolist()
            assert back == as_json(array, False)
        else:
            nbytes = entry["parameters"]["binary_data_size"]
            assert rest[:nbytes] == data
            rest = rest[nbytes:]
    assert rest == b""


def test_what_json_cannot_say_is_null() -> None:
    """NaN and infinity in JSON are null."""
    data = np.array([[math.nan, math.inf]], np.float32).tobytes()
    body, _ = encode_response(declaration(), InferRequest("", [], [Wanted(0, False)], None), [Tensor((1, 2), data)])
    assert json.loads(body)["outputs"][0]["data"] == [None, None]


def test_bytes_that_are_no_text() -> None:
    """A BYTES output that is no UTF-8 needs the binary form, and the client is told."""
    outputs = [Tensor((1, 1), data_of(DATATYPES["BYTES"], np.array([b"\xff"], object)))]
    declared = declaration("BYTES", (-1, -1))
    with pytest.raises(ProtocolError, match="no UTF-8"):
        encode_response(declared, InferRequest("", [], [Wanted(0, False)], None), outputs)
    body, size = encode_response(declared, InferRequest("", [], [Wanted(0, True)], None), outputs)
    assert bytes_elements(body[size:]) == [b"\xff"]


# -- what a request may say ----------------------------------------------------------------------


def test_request_without_options() -> None:
    """By default all outputs come as JSON, without an id and a deadline."""
    request = parse()
    assert (request.id, request.timeout_s, request.outputs) == ("", None, [Wanted(0, False), Wanted(1, False)])


def test_request_with_options() -> None:
    """Id, timeout and the form of each output are taken from the request; unknown parameters are left alone."""
    request = parse(
        id="seven",
        parameters={"timeout": 2_000_000, "binary_data_output": True, "priority": 3},
        outputs=[{"name": "z"}, {"name": "y", "parameters": {"binary_data": False}}],
    )
    assert (request.id, request.timeout_s) == ("seven", 2.0)
    assert request.outputs == [Wanted(1, True), Wanted(0, False)]


def test_inputs_in_any_order() -> None:
    """Binary data follows in the order of the request's inputs, whatever that is."""
    two = Declaration("m", (Spec("a", DATATYPES["INT8"], (1,)), Spec("b", DATATYPES["INT8"], (2,))), (), 0, 0)
    entries = [
        {"name": name, "datatype": "INT8", "shape": [size], "parameters": {"binary_data_size": size}}
        for name, size in (("b", 2), ("a", 1))
    ]
    request = parse_request(two, *body_of({"inputs": entries}, b"\2\3\1"))
    assert [bytes(tensor.data) for tensor in request.inputs] == [b"\1", b"\2\3"]


BINARY = {"data": ...}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"entry": {"name": "w"}}, "unexpected input 'w'"),
    ({"entry": {"name": 1}}, "object with a name"),
    ({"entry": {"datatype": "FP64"}}, "is FP32, not 'FP64'"),
    ({"entry": {"datatype": ...}}, "is FP32, not 'None'"),
    ({"entry": {"shape": [1, 3]}}, "has shape"),
    ({"entry": {"shape": [2]}}, "has shape"),
    ({"entry": {"shape": [-1, 2]}}, "integers from 0"),
    ({"entry": {"shape": [1.0, 2]}}, "integers from 0"),
    ({"entry": {"shape": [True, 2]}}, "integers from 0"),
    ({"entry": {"shape": [1 << 63, 2]}}, "takes 18446744073709551616 elements"),
    ({"entry": {"shape": [1] * 33}}, "integers from 0"),
    ({"entry": {"shape": ...}}, "integers from 0"),
    ({"entry": {"data": ...}}, "has no data"),
    ({"entry": {"data": {"a": 1}}}, "has no data"),
    ({"entry": {"data": [1]}}, "takes 2 elements, not 1"),
    ({"entry": {"data": [[1], [2]]}}, "not nested"),
    ({"entry": {"data": [[1, 2], [3, 4]]}}, "not nested"),
    ({"entry": {"data": [[1, [2]]]}}, "not a FP32"),
    ({"entry": {"data": [1, "2"]}}, "not a FP32"),
    ({"entry": {"data": [1, None]}}, "not a FP32"),
    ({"entry": {"data": [1, True]}}, "not a FP32"),
    ({"entry": {"data": [1, 1e39]}}, "out of the range"),
    ({"entry": {"parameters": 3}}, "not a JSON object"),
    ({"entry": {"parameters": {"shared_memory_region": "r"}}}, "shared memory"),
    ({"entry": {"parameters": {"binary_data_size": 8}}, "binary": bytes(8)}, "both data and binary"),
    ({"entry": {**BINARY, "parameters": {"binary_data_size": 8}}}, "has no 8 bytes"),
    ({"entry": {**BINARY, "parameters": {"binary_data_size": -1}}, "binary": bytes(8)}, "has no -1 bytes"),
    ({"entry": {**BINARY, "parameters": {"binary_data_size": "8"}}, "binary": bytes(8)}, "has no '8' bytes"),
    ({"entry": {**BINARY, "parameters": {"binary_data_size": 4}}, "binary": bytes(4)}, "takes 8 bytes, not 4"),
    ({"binary": b"more"}, "belong to no input"),
    ({"inputs": None}, "has no inputs"),
    ({"inputs": []}, "has no input 'x'"),
    ({"inputs": [[]]}, "object with a name"),
    ({"inputs": [{}] * 2}, "has 1 inputs"),
    ({"id": 7}, "id is a string"),
    ({"id": "x" * 257}, "id is a string"),
    ({"parameters": []}, "not a JSON object"),
    ({"parameters": {"timeout": -1}}, "timeout is a number"),
    ({"parameters": {"timeout": "1"}}, "timeout is a number"),
    ({"parameters": {"timeout": 1 << 62}}, "timeout is a number"),
    ({"parameters": {"binary_data_output": 1}}, "true or false"),
    ({"outputs": {}}, "outputs are a list"),
    ({"outputs": [{"name": "w"}]}, "unexpected output"),
    ({"outputs": ["y"]}, "object with a name"),
    ({"outputs": [{"name": "y"}, {"name": "y"}]}, "asked for twice"),
    ({"outputs": [{"name": "y", "parameters": {"binary_data": "yes"}}]}, "true or false"),
    ({"outputs": [{"name": "y", "parameters": {"classification": 2}}]}, "classification is not supported"),
    ({"outputs": [{"name": "y"}] * 257}, "outputs are a list"),
]


@pytest.mark.parametrize(("wrong", "text"), WRONG)
def test_request_that_is_wrong(wrong: dict[str, Any], text: str) -> None:
    """Each mistake is a ProtocolError with status 400 that says what is wrong."""
    with pytest.raises(ProtocolError, match=text) as caught:
        parse(**wrong)
    assert caught.value.status == 400


@pytest.mark.parametrize("shape", [[1 << 63, 0], [1 << 40, 0], [0, (1 << 64) - 1], [1 << 20, 0, 1 << 20]])
def test_empty_tensors_of_great_shapes(shape: list[int]) -> None:
    """A dimension of 0 excuses no others: NumPy would not take them."""
    body, _ = body_of({"inputs": [{"name": "x", "datatype": "FP64", "shape": shape, "data": []}]})
    with pytest.raises(ProtocolError, match="too large"):
        parse_request(declaration("FP64", (-1,) * len(shape)), body, None)


@pytest.mark.parametrize("datatype", DATATYPES)
def test_empty_tensors(datatype: str) -> None:
    """What is taken can be an array, also when many are joined."""
    body, _ = body_of({"inputs": [{"name": "x", "datatype": datatype, "shape": [1, 1 << 39, 0], "data": []}]})
    [tensor] = parse_request(declaration(datatype, (-1, -1, -1), batch=1 << 20), body, None).inputs
    assert array_of(DATATYPES[datatype], (1 << 20, *tensor.shape[1:]), tensor.data).size == 0


def test_input_twice() -> None:
    """An input is given once."""
    two = Declaration("m", tuple(Spec(name, DATATYPES["INT8"], (1,)) for name in "ab"), (), 0, 0)
    entry = {"name": "a", "datatype": "INT8", "shape": [1], "data": [1]}
    with pytest.raises(ProtocolError, match="twice"):
        parse_request(two, *body_of({"inputs": [entry, entry]}))


@pytest.mark.parametrize(
    ("datatype", "data"),
    [
        ("INT8", [128]),
        ("INT8", [1.0]),
        ("UINT64", [-1]),
        ("UINT64", [1 << 64]),
        ("INT64", [1 << 63]),
        ("FP16", [1e6]),
        ("BOOL", [1]),
        ("BYTES", [1]),
    ],
)
def test_elements_that_do_not_fit(datatype: str, data: list[Any]) -> None:
    """A number is never cut, rounded to an integer or wrapped around."""
    body, _ = body_of({"inputs": [{"name": "x", "datatype": datatype, "shape": [1], "data": data}]})
    with pytest.raises(ProtocolError, match=f"range of {datatype}|not a {datatype}"):
        parse_request(declaration(datatype, (1,)), body, None)


@pytest.mark.parametrize(
    ("datatype", "data", "text"),
    [
        ("BOOL", b"\2", "0 or 1"),
        ("BYTES", b"\5\0\0\0abc", "ends within an element"),
        ("BYTES", b"\0\0", "ends within an element's length"),
        ("BYTES", b"\0\0\0\0\0\0\0\0", "takes 1 elements, not 2"),
    ],
)
def test_binary_data_that_is_wrong(datatype: str, data: bytes, text: str) -> None:
    """Binary data has to be elements of its type, as many as the shape says."""
    entry = {"name": "x", "datatype": datatype, "shape": [1], "parameters": {"binary_data_size": len(data)}}
    with pytest.raises(ProtocolError, match=text):
        parse_request(declaration(datatype, (1,)), *body_of({"inputs": [entry]}, data))


@pytest.mark.parametrize("rows", [0, 5])
def test_rows_out_of_range(rows: int) -> None:
    """With batching a request has at least one row, and at most those of a call."""
    body, _ = body_of({"inputs": [{"name": "x", "datatype": "INT8", "shape": [rows], "data": [1] * rows}]})
    with pytest.raises(ProtocolError, match="first dimension is 1 to 4"):
        parse_request(declaration("INT8", (-1,), batch=4), body, None)


def test_rows_that_differ() -> None:
    """With batching the inputs of a request have equally many rows."""
    two = Declaration("m", tuple(Spec(name, DATATYPES["INT8"], (-1,)) for name in "ab"), (), 4, 0)
    entries = [{"name": n, "datatype": "INT8", "shape": [i], "data": [1] * i} for i, n in enumerate("ab", 1)]
    with pytest.raises(ProtocolError, match=r"different first dimensions: \[1, 2\]"):
        parse_request(two, *body_of({"inputs": entries}))


@pytest.mark.parametrize("size", [-1, 1 << 40])
def test_header_length_out_of_range(size: int) -> None:
    """The length of the JSON is within the body."""
    with pytest.raises(ProtocolError, match="Content-Length"):
        parse_request(declaration(), b"{}", size)


# -- hostile input -------------------------------------------------------------------------------


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def replaced(value: Any, path: list[int], new: Any) -> Any:
    """Return JSON with the place that ``path`` leads to replaced."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = keys[path[0] % len(keys)]
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[key] = replaced(value[key], path[1:], new)
    return copy


def survives(body: bytes, size: int | None) -> None:
    """Parse a body; a request that is accepted has to be one that a device process can take."""
    for declared in (declaration(), declaration("BYTES", (-1,)), declaration("BOOL", (-1, -1), batch=4)):
        try:
            request = parse_request(declared, body, size)
        except ProtocolError as error:
            refusal = error
        else:
            for spec, tensor in zip(declared.inputs, request.inputs, strict=True):
                assert spec.admits(tensor.shape)
                array_of(spec.datatype, tensor.shape, tensor.data)
            continue
        assert refusal.status == 400
        assert json.loads(error_body(str(refusal)))["error"] == str(refusal)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), JSON_VALUES, st.binary(max_size=8))
@example([0, 0, 3], [[1, 2]] * 2, b"")
def test_requests_with_something_replaced(path: list[int], new: Any, binary: bytes) -> None:
    """A request of which any part is any JSON is parsed or refused, never anything else."""
    message = {
        "id": "i",
        "parameters": {"timeout": 1, "binary_data_output": False},
        "inputs": [
            {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [[1, 2]], "parameters": {"binary_data_size": 8}}
        ],
        "outputs": [{"name": "y", "parameters": {"binary_data": True}}],
    }
    text = json.dumps(replaced(message, path, new)).encode()
    survives(text + binary, len(text))


@given(st.binary(max_size=60), st.none() | st.integers(-5, 70))
def test_bodies_of_any_bytes(body: bytes, size: int | None) -> None:
    """Any bytes are parsed or refused."""
    survives(body, size)


@pytest.mark.parametrize("text", [b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe", b"NaN", b'"\\ud800"', b"[]", b"1"])
def test_json_that_breaks_parsers(text: bytes) -> None:
    """Deep nesting, bad text and what is not an object are refused."""
    survives(text, None)


# -- metadata ------------------------------------------------------------------------------------


def test_metadata() -> None:
    """Server, model and repository are described in the protocol's form."""
    declared = declaration()
    assert server_metadata("s", "1.0") == {
        "name": "s",
        "version": "1.0",
        "extensions": ["binary_tensor_data", "model_repository"],
    }
    tensor = {"datatype": "FP32", "shape": [-1, 2]}
    assert model_metadata(declared) == {
        "name": "model",
        "versions": ["1"],
        "platform": "aiooffload",
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}, {"name": "z", **tensor}],
    }
    entry = {"name": "model", "version": "1"}
    assert repository_index([declared], True, True) == [{**entry, "state": "READY", "reason": ""}]
    assert repository_index([declared], False, False)[0]["state"] == "UNAVAILABLE"
    assert repository_index([declared], False, True) == []


# -- compression ---------------------------------------------------------------------------------


@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate", "identity", " GZIP "]))
def test_compression_round_trip(body: bytes, encoding: str) -> None:
    """What is compressed for a client that accepts it can be read back."""
    packed, name = compress(body, f"br, {encoding};q=0.5, *")
    assert name == ("" if encoding == "identity" else encoding.strip().lower())
    assert decompress(packed, name, 300) == body


@pytest.mark.parametrize("accepted", ["", "br", "gzip;q=0", "gzip; q = 0", "gzip;q=0.", "gzip;q=0.000"])
def test_no_compression(accepted: str) -> None:
    """Without an encoding that both know, nothing is compressed."""
    assert compress(b"body", accepted) == (b"body", "")


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (b"x", "br", 415),
        (b"x", "gzip", 400),
        (zlib.compress(b"x"), "gzip", 400),
        (gzip.compress(b"x", mtime=0)[:-1], "gzip", 400),
        (gzip.compress(b"x", mtime=0) + b"more", "gzip", 400),
        (gzip.compress(bytes(1 << 20), mtime=0), "gzip", 413),
        (b"", "deflate", 400),
    ],
    ids=["unknown", "not", "other", "short", "long", "bomb", "empty"],
)
def test_bodies_that_are_not_what_they_say(body: bytes, encoding: str, status: int) -> None:
    """A broken body is refused, and one that stands for too much is, without making it."""
    with pytest.raises(ProtocolError) as caught:
        decompress(body, encoding, 1000)
    assert caught.value.status == status
