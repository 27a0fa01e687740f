"""The real client, synchronous, against a worker: a program that prints ``ok``. Its greenlets stay out of the tests.

Usage: ``python triton_client.py PORT``
"""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "BOOL": np.array([[True, False]]),
    **{
        f"{sign}INT{8 * size}": np.array([[0, 1, 100]], f"{'u' if sign else ''}int{8 * size}")
        for sign in ("", "U")
        for size in (1, 2, 4, 8)
    },
    "FP16": np.array([[0.5, -2]], np.float16),
    "FP32": np.array([[0.5, -2], [1e-30, 3]], np.float32),
    "FP64": np.array([[0.1]]),
    "BF16": np.array([[0.5, -2]], ml_dtypes.bfloat16),
    "BYTES": np.array([["text", "ä"], ["", "x" * 5000]], object),
}


def tensor(name: str, datatype: str, array: np.ndarray[Any, Any], binary: bool) -> InferInput:
    given = InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def as_text(array: np.ndarray[Any, Any]) -> list[Any]:
    return [[one.decode() if isinstance(one, bytes) else one for one in row] for row in array.tolist()]


def check_every_type(client: InferenceServerClient) -> None:
    for datatype, array in ARRAYS.items():
        for binary_in in (True, False):
            if datatype in ("FP16", "BF16") and not binary_in:
                continue  # this client has no JSON for them
            for binary_out in (True, False):
                result = client.infer(
                    f"echo_{datatype}",
                    [tensor("x", datatype, array, binary_in)],
                    outputs=[InferRequestedOutput("y", binary_data=binary_out)],
                )
                if datatype == "BF16" and not binary_out:
                    assert result.get_response()["outputs"][0]["data"] == array.ravel().tolist()
                    continue
                back = result.as_numpy("y")
                assert as_text(back) == as_text(array), (datatype, binary_in, binary_out, back)


def check_state(client: InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("double")
    assert client.is_model_ready("double", "1")
    assert not client.is_model_ready("nothing")
    assert client.get_server_metadata()["name"] == "sample"
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("double", "1")
    assert metadata["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
    index = client.get_model_repository_index()
    assert {"name": "double", "version": "1", "state": "READY", "reason": ""} in index


def check_requests(client: InferenceServerClient) -> None:
    x = tensor("x", "FP32", np.array([1, 2], np.float32), True)
    result = client.infer("double", [x], request_id="seven")
    assert result.get_response()["id"] == "seven"
    assert result.get_response()["model_name"] == "double"
    assert result.as_numpy("y").tolist() == [2, 4]
    assert client.infer("double", [x], model_version="1").as_numpy("y").tolist() == [2, 4]
    count = tensor("x", "INT32", np.array([5000], np.int32), True)
    result = client.infer("large", [count], outputs=[InferRequestedOutput("twice")])
    assert [one["name"] for one in result.get_response()["outputs"]] == ["twice"]
    assert result.as_numpy("twice")[-1] == 9998
    assert result.as_numpy("y") is None
    pending = [client.async_infer("double", [x]) for _ in range(20)]
    assert all(one.get_result().as_numpy("y").tolist() == [2, 4] for one in pending)


def check_compression(client: InferenceServerClient) -> None:
    array = np.arange(4000, dtype=np.float32)
    for given in ("gzip", "deflate", None):
        for taken in ("gzip", "deflate", None):
            for binary in (True, False):
                result = client.infer(
                    "double",
                    [tensor("x", "FP32", array, binary)],
                    outputs=[InferRequestedOutput("y", binary_data=binary)],
                    request_compression_algorithm=given,
                    response_compression_algorithm=taken,
                )
                assert np.array_equal(result.as_numpy("y"), array * 2)


def refused(client: InferenceServerClient, model: str, given: InferInput, **options: Any) -> str:
    try:
        client.infer(model, [given], **options)
    except InferenceServerException as error:
        return f"{error.status()} {error.message()}"
    raise AssertionError(f"{model} did not refuse")


def check_errors(client: InferenceServerClient) -> None:
    x = tensor("x", "INT32", np.array([1], np.int32), True)
    assert refused(client, "nothing", x) == "404 unknown model 'nothing'"
    assert refused(client, "double", x).startswith("400 input 'x' is FP32")
    assert refused(client, "gate", x, timeout=20_000) == "504 the deadline of 0.02 s has passed"
    assert refused(client, "fail", x) == "400 secret or not"


def main() -> None:
    with InferenceServerClient(f"127.0.0.1:{sys.argv[1]}", concurrency=8) as client:
        check_state(client)
        check_every_type(client)
        check_requests(client)
        check_compression(client)
        check_errors(client)
    print("ok")


if __name__ == "__main__":
    main()
