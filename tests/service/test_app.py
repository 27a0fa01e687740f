"""What a program may declare, and what its handlers may return."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from aiooffload.service.app import Declaration
from aiooffload.service.tensors import bytes_elements, pack_bytes

X = {"x": (np.float32, (-1, 2))}
OFF: Any = object()


async def handler(off: Any, x: Any) -> dict[str, Any]:
    return {"y": x}


def declared(**options: Any) -> ao.App:
    app = ao.App()
    app.endpoint("e", **{"inputs": X, "outputs": {"y": (np.float32, (-1, 2))}} | options)(handler)
    return app


def test_app_is_exported_lazily() -> None:
    """``ao.App`` is the class, and an unknown name is still an AttributeError."""
    from aiooffload.service.app import App

    assert ao.App is App
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = ao.nothing_such  # type: ignore[attr-defined]


def test_decorators_return_what_they_decorate() -> None:
    """A handler, a host function and a hook stay what they are, and are noted in order."""
    app = ao.App("name")

    async def hook(off: ao.Offload) -> None: ...
    async def function() -> None: ...

    assert app.endpoint("e", inputs=X, outputs=X)(handler) is handler
    assert app.host_function(function) is function
    assert app.host_function(batch=True)(function) is function
    assert app.on_start(hook) is hook
    assert app.on_stop(hook) is hook
    assert app.host_functions == [(function, {}), (function, {"batch": True})]
    assert (app.start_hooks, app.stop_hooks, list(app.endpoints)) == ([hook], [hook], ["e"])
    assert repr(app) == "<aiooffload.App name: e>"


def test_declaration_round_trips_through_json() -> None:
    """What a device process tells the front of its endpoints is all there is."""
    declaration = declared(max_batch_size=8, batch_delay_us=100).endpoints["e"].declaration
    assert Declaration.from_message(json.loads(json.dumps(declaration.as_message()))) == declaration


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"inputs": {}}, "at least one name"),
        ({"outputs": [("y", np.float32)]}, "at least one name"),
        ({"inputs": {"x": np.float32}}, "declared as"),
        ({"inputs": {"x": (np.float32, 3)}}, "declared as"),
        ({"inputs": {"x": (np.float32, (-2,))}}, "integers from -1"),
        ({"inputs": {"x": (np.float32, (True,))}}, "integers from -1"),
        ({"inputs": {"x": (np.float32, (1,) * 33)}}, "integers from -1"),
        ({"inputs": {"x": (np.complex128, (1,))}}, "no data type"),
        ({"inputs": {"no space": (np.float32, (1,))}}, "has a name of letters"),
        ({"inputs": {"z": (np.float32, (1,))}}, "cannot be called with"),
        ({"max_batch_size": -1}, "max_batch_size is an integer"),
        ({"max_batch_size": True}, "max_batch_size is an integer"),
        ({"max_batch_size": 2, "batch_delay_us": 10_000_001}, "batch_delay_us is an integer"),
        ({"batch_delay_us": 1}, "without max_batch_size"),
        ({"max_batch_size": 2, "outputs": {"y": (np.float32, (1, 2))}}, "first dimension"),
        ({"max_batch_size": 2, "inputs": {"x": (np.float32, ())}}, "first dimension"),
    ],
)
def test_declarations_that_make_no_sense(options: dict[str, Any], text: str) -> None:
    """What could never be served is refused when it is declared."""
    with pytest.raises(ao.UsageError, match=text):
        declared(**options)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "ä", 7, "x" * 129])
def test_names_that_make_no_sense(name: Any) -> None:
    """A name has to fit into a path."""
    with pytest.raises(ao.UsageError, match="has a name of letters"):
        ao.App().endpoint(name, inputs=X, outputs=X)


def test_endpoint_declared_twice() -> None:
    """A name is taken once."""
    app = declared()
    with pytest.raises(ao.UsageError, match="already"):
        app.endpoint("e", inputs=X, outputs=X)


def test_handler_that_is_no_coroutine_function() -> None:
    """A handler that would block the loop is refused."""
    with pytest.raises(ao.UsageError, match="async def"):
        ao.App().endpoint("e", inputs=X, outputs=X)(lambda off, x: {})  # type: ignore[arg-type,return-value]


async def test_endpoint_calls_its_handler() -> None:
    """A handler gets arrays by name, read-only, and its arrays go back as bytes with their shapes."""
    app = ao.App()
    seen = {}

    @app.endpoint(
        "e", inputs={"x": ("INT16", (2,)), "s": (bytes, (-1,))}, outputs={"t": (str, (1,)), "y": ("FP64", ())}
    )
    async def both(off: Any, x: np.ndarray[Any, Any], s: np.ndarray[Any, Any]) -> dict[str, Any]:
        seen.update(off=off, x=x, s=s)
        return {"y": np.float64(1.5), "t": ["text"]}

    data = [np.array([1, 2], np.int16).tobytes(), pack_bytes([b"a"])]
    shapes, outputs = await app.endpoints["e"].call_with_data(OFF, [(2,), (1,)], data)
    assert (seen["off"], seen["x"].tolist(), seen["s"].tolist()) == (OFF, [1, 2], [b"a"])
    assert not seen["x"].flags.writeable
    assert shapes == [(1,), ()]
    assert (bytes_elements(outputs[0]), bytes(outputs[1])) == ([b"text"], np.float64(1.5).tobytes())


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (lambda x: None, "returned NoneType"),
        (lambda x: {}, r"returned \[\]"),
        (lambda x: {"y": x, "z": x}, "not a mapping with the outputs"),
        (lambda x: {"y": x.astype(np.float64)}, "is float64"),
        (lambda x: {"y": x[0]}, "has shape"),
        (lambda x: {"y": x[:1]}, "has 1 rows for inputs of 3"),
    ],
)
async def test_results_that_were_not_declared(result: Callable[[Any], Any], text: str) -> None:
    """A result that differs from its declaration is an error, not an answer."""
    app = ao.App()

    @app.endpoint("e", inputs=X, outputs={"y": (np.float32, (-1, 2))}, max_batch_size=4)
    async def wrong(off: Any, x: Any) -> Any:
        return result(x)

    with pytest.raises(ao.UsageError, match=text):
        await app.endpoints["e"](OFF, {"x": np.zeros((3, 2), np.float32)})
