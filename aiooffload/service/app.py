"""What a program declares to be served: endpoints, host functions, what happens at start and stop."""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar, overload

import numpy as np

from aiooffload.errors import UsageError
from aiooffload.offload import Offload
from aiooffload.service.tensors import MAX_RANK, Data, Datatype, Spec, array_of, data_of, datatype_of
from aiooffload.service.threads import THREAD_FROM_NBYTES, maybe_in_thread

__all__ = ["App", "Declaration", "Endpoint", "Handler", "RequestError"]

Handler = Callable[..., Coroutine[Any, Any, Mapping[str, Any]]]
Hook = Callable[[Offload], Awaitable[object]]

_H = TypeVar("_H", bound=Handler)
_K = TypeVar("_K", bound=Hook)
_F = TypeVar("_F", bound=Callable[..., Coroutine[Any, Any, Any]])

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}")
MAX_BATCH_DELAY_US: Final = 10_000_000


class RequestError(Exception):
    """What a handler raises when the request is to blame: the client gets status 400 and the text.

    Any other exception is a fault of the program, status 500.
    """


@dataclass(frozen=True, slots=True)
class Declaration:
    """What clients may know of an endpoint; the front has only this."""

    name: str
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    max_batch_size: int
    """How many rows one call may have; 0 if requests are never joined."""
    batch_delay_us: int

    def as_message(self) -> dict[str, Any]:
        """Return it in the form that a frame carries."""
        return {
            "name": self.name,
            "inputs": [spec.as_metadata() for spec in self.inputs],
            "outputs": [spec.as_metadata() for spec in self.outputs],
            "max_batch_size": self.max_batch_size,
            "batch_delay_us": self.batch_delay_us,
        }

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Declaration:
        """Return what :meth:`as_message` was made from."""
        return cls(
            message["name"],
            tuple(map(Spec.from_metadata, message["inputs"])),
            tuple(map(Spec.from_metadata, message["outputs"])),
            message["max_batch_size"],
            message["batch_delay_us"],
        )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A declaration and the handler that answers it."""

    declaration: Declaration
    handler: Handler

    async def __call__(
        self, off: Offload, inputs: Mapping[str, np.ndarray[Any, Any]]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Call the handler with arrays and check what it returns.

        Raises
        ------
        UsageError
            It returned something else than it declared.
        """
        result = await self.handler(off, **inputs)
        rows = next(iter(inputs.values())).shape[0] if self.declaration.max_batch_size else None
        return _checked(self.declaration, result, rows)

    async def call_with_data(
        self, off: Offload, shapes: Sequence[Sequence[int]], data: Sequence[Data]
    ) -> tuple[list[tuple[int, ...]], list[Data]]:
        """Call the handler with tensors as bytes, in the declared order; return shapes and bytes of the outputs."""
        inputs = {}
        for spec, shape, content in zip(self.declaration.inputs, shapes, data, strict=True):
            if spec.datatype.nbytes:
                inputs[spec.name] = array_of(spec.datatype, shape, content)
            else:
                inputs[spec.name] = await maybe_in_thread(len(content), array_of, spec.datatype, shape, content)
        arrays = await self(off, inputs)
        outputs = [(spec.datatype, arrays[spec.name]) for spec in self.declaration.outputs]
        slow_nbytes = sum([array.nbytes for datatype, array in outputs if not datatype.nbytes])
        if slow_nbytes >= THREAD_FROM_NBYTES:  # the handler's next call may write to what it returned
            outputs = [(datatype, array.copy() if datatype.nbytes else array) for datatype, array in outputs]
        contents = await maybe_in_thread(slow_nbytes, _contents, outputs)
        return [array.shape for _, array in outputs], contents


def _contents(outputs: Sequence[tuple[Datatype, np.ndarray[Any, Any]]]) -> list[Data]:
    return [data_of(datatype, array) for datatype, array in outputs]


def _checked(declaration: Declaration, result: object, rows: int | None) -> dict[str, np.ndarray[Any, Any]]:
    """Return a handler's result as arrays of the declared dtypes and shapes."""
    name, outputs = declaration.name, {spec.name: spec for spec in declaration.outputs}
    if not isinstance(result, Mapping) or result.keys() != outputs.keys():
        what = sorted(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
        raise UsageError(f"endpoint {name!r} returned {what}, not a mapping with the outputs {sorted(outputs)}")
    arrays = {}
    for key, spec in outputs.items():
        array = np.asarray(result[key])
        if spec.datatype.nbytes:
            if array.dtype != spec.datatype.dtype:
                raise UsageError(f"output {key!r} of {name!r} is {array.dtype}, and was declared {spec.datatype.name}")
        else:
            array = array.astype(object)
        if not spec.admits(array.shape):
            raise UsageError(f"output {key!r} of {name!r} has shape {array.shape}, and was declared {spec.shape}")
        if rows is not None and array.shape[0] != rows:
            raise UsageError(f"output {key!r} of {name!r} has {array.shape[0]} rows for inputs of {rows}")
        arrays[key] = array
    return arrays


class App:
    """A program that ``aiooffload serve`` runs: endpoints, and what they need.

    Parameters
    ----------
    name
        What the server calls itself in its metadata.

    Raises
    ------
    UsageError
        The name is empty, or has other characters than letters, digits and ``_ . -``.

    Notes
    -----
    *Process.* Handlers run in the device process, of which there is one per device, on one event loop. What they
    share there (a database, a cache) is opened in ``on_start`` and closed in ``on_stop``.
    *Source.* "Open Inference Protocol", version 2.
    """

    def __init__(self, name: str = "aiooffload") -> None:
        self.name: Final = _check_name("an App", name)
        self.endpoints: Final[dict[str, Endpoint]] = {}
        self.host_functions: Final[list[tuple[Callable[..., Any], dict[str, Any]]]] = []
        self.start_hooks: Final[list[Hook]] = []
        self.stop_hooks: Final[list[Hook]] = []

    def endpoint(
        self,
        name: str,
        *,
        inputs: Mapping[str, Any],
        outputs: Mapping[str, Any],
        max_batch_size: int = 0,
        batch_delay_us: int = 0,
    ) -> Callable[[_H], _H]:
        """Serve the decorated ``async def handler(off, **inputs) -> dict`` under a name.

        Parameters
        ----------
        name
            The model name of the protocol: letters, digits and ``_ . -``, 128 at most.
        inputs, outputs
            A ``(dtype, shape)`` for each tensor by name: a NumPy dtype, ``bytes`` or a name such as ``"BF16"``, and a
            sequence of dimensions, of which -1 is one that each request chooses. The handler gets arrays that it must
            not write to, by keyword, and returns arrays of exactly these dtypes and shapes; elements of a ``bytes``
            tensor are ``bytes`` objects.
        max_batch_size
            Above 0, up to so many rows of several requests are joined along the first dimension, which is -1 for all
            tensors, into one call. Only requests whose other dimensions agree are joined.
        batch_delay_us
            Microseconds, up to ten seconds, that the first request of a call waits for others.

        Returns
        -------
        Callable
            The decorator; it returns the handler as it is.

        Raises
        ------
        UsageError
            A name, dtype, shape or number is none that can be declared, the name is taken, or the handler has not
            the parameters of its inputs.
        """
        declaration = Declaration(
            _check_name("an endpoint", name),
            _specs("input", inputs),
            _specs("output", outputs),
            _check_number("max_batch_size", max_batch_size, 1 << 20),
            _check_number("batch_delay_us", batch_delay_us, MAX_BATCH_DELAY_US),
        )
        if name in self.endpoints:
            raise UsageError(f"there is an endpoint {name!r} already")
        _check_batch(declaration)

        def declare(handler: _H) -> _H:
            _check_handler(declaration, handler)
            self.endpoints[name] = Endpoint(declaration, handler)
            return handler

        return declare

    @overload
    def host_function(self, function: _F, /) -> _F: ...
    @overload
    def host_function(self, /, **options: Any) -> Callable[[_F], _F]: ...
    def host_function(self, function: Any = None, /, **options: Any) -> Any:
        """Let kernels call the decorated coroutine function, as ``Offload.host_function`` does; same options."""

        def declare(decorated: _F) -> _F:
            self.host_functions.append((decorated, options))
            return decorated

        return declare if function is None else declare(function)

    def on_start(self, hook: _K) -> _K:
        """Await the decorated ``async def hook(off)`` before the first request, in the order of declaration.

        An exception there is the end of the device process, and of the worker if it was the first.
        """
        self.start_hooks.append(hook)
        return hook

    def on_stop(self, hook: _K) -> _K:
        """Await the decorated ``async def hook(off)`` after the last request, in reverse order of declaration.

        It is not called after the device was lost.
        """
        self.stop_hooks.append(hook)
        return hook

    async def start(self, off: Offload) -> None:
        """Register the host functions and run the start hooks, for whoever serves the program."""
        for function, options in self.host_functions:
            off.host_function(**options)(function)
        for hook in self.start_hooks:
            await hook(off)

    async def stop(self, off: Offload) -> None:
        """Run the stop hooks, the last declared first."""
        for hook in reversed(self.stop_hooks):
            await hook(off)

    def __repr__(self) -> str:
        return f"<aiooffload.App {self.name}: {', '.join(self.endpoints) or 'no endpoints'}>"


def _check_name(what: str, name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{what} has a name of letters, digits, '_', '.' and '-', not {name!r}")
    return name


def _check_number(what: str, value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise UsageError(f"{what} is an integer from 0 to {most}, not {value!r}")
    return value


def _specs(kind: str, tensors: Mapping[str, Any]) -> tuple[Spec, ...]:
    """Return what was declared as inputs or outputs."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise UsageError(f"{kind}s is a mapping of at least one name to (dtype, shape), not {tensors!r}")
    specs = []
    for name, declared in tensors.items():
        _check_name(f"an {kind}", name)
        try:
            dtype, given = declared
            shape = tuple(given)
        except (TypeError, ValueError):
            raise UsageError(f"{kind} {name!r} is declared as (dtype, shape), not {declared!r}") from None
        if len(shape) > MAX_RANK or any(type(n) is not int or n < -1 for n in shape):
            raise UsageError(f"the shape of {kind} {name!r} has {MAX_RANK} integers from -1 at most, not {shape}")
        specs.append(Spec(name, datatype_of(dtype), shape))
    return tuple(specs)


def _check_batch(declaration: Declaration) -> None:
    if not declaration.max_batch_size:
        if declaration.batch_delay_us:
            raise UsageError("batch_delay_us without max_batch_size means nothing")
        return
    for spec in (*declaration.inputs, *declaration.outputs):
        if spec.shape[:1] != (-1,):
            raise UsageError(f"with max_batch_size the first dimension of {spec.name!r} is -1, not {spec.shape[:1]}")


def _check_handler(declaration: Declaration, handler: object) -> None:
    """Refuse a handler that could not be called with the declared inputs."""
    if not inspect.iscoroutinefunction(handler):
        raise UsageError(f"the handler of {declaration.name!r} is an `async def`, not {handler!r}")
    names = [spec.name for spec in declaration.inputs]
    try:
        inspect.signature(handler).bind(None, **dict.fromkeys(names))
    except TypeError as error:
        raise UsageError(f"the handler of {declaration.name!r} cannot be called with (off, {names}): {error}") from None
