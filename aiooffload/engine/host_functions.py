"""Host functions: coroutines that kernels call, their types, and what is run around them.

A plain one (scalars in, a scalar or nothing out, no limits) is started by the C extension itself
(``_native/channel.c``); everything else goes through :meth:`HostFunction.serve`.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, Literal, get_args, get_origin

import numpy as np
from numpy.typing import NDArray

from aiooffload._native import Caller, Handler, Request, calling
from aiooffload.errors import OffloadTimeout, UsageError
from aiooffload.kernel import Parameter, called, parameter_of, signature_of
from aiooffload.rules.scheduler import waits_for
from aiooffload.rules.wire import PAYLOAD_NBYTES, function_id, kind_of, map_extent
from aiooffload.scalars import scalar, scalar_bytes

if TYPE_CHECKING:
    from aiooffload.engine.lanes import Lane
    from aiooffload.engine.mapping import Mapping
    from aiooffload.operation import Operation

__all__ = [
    "Call",
    "HandlerTimeout",
    "HostFunction",
    "OnError",
    "ReplyError",
    "RowsFailed",
    "check_outside",
    "check_wait",
    "current_call",
    "still_waiting",
    "waiting_launches",
]

OnError = Literal["cancel", "collect"]

_LETTERS: Final = {
    "b1": "?", "i1": "b", "u1": "B", "i2": "h", "u2": "H", "i4": "i", "u4": "I", "i8": "q", "u8": "Q",
    "f4": "f", "f8": "d",
}  # fmt: skip
_MAPPED: Final = np.dtype([("address", np.uint64), ("extent", np.uint64)], align=True)


class Call:
    """What a host function can know of who called it: ``ao.current_call()``."""

    __slots__ = ("_source",)

    def __init__(self, source: Caller | Request) -> None:
        self._source = source

    @property
    def operations(self) -> tuple[Operation[None], ...]:
        """The launches: one, or several for a batch."""
        return tuple(caller.operation for caller in _callers(self._source))

    @property
    def operation(self) -> Operation[None]:
        """The launch; raises ValueError for a batch of several."""
        operations = self.operations
        if len(operations) != 1:
            raise ValueError(f"this batch serves {len(operations)} launches: see operations")
        return operations[0]

    @property
    def lane(self) -> Lane:
        """The lane that the launch is on."""
        lane: Lane = self.operation.lane
        return lane

    @property
    def device(self) -> str:
        """The device, such as ``"cuda:0"`` or ``"host"``."""
        label: str = self.operations[0].owner.label
        return label

    def __repr__(self) -> str:
        return f"<aiooffload.Call from {', '.join(operation.name for operation in self.operations)} on {self.device}>"


def current_call() -> Call | None:
    """Return what is known of the call that the running host function serves, None outside of one.

    It is kept in a context variable, so tasks that a host function starts see it, too.
    """
    source = calling.get(None)
    return None if source is None else Call(source)


def waiting_launches() -> list[Operation[None]]:
    """Return the launches that wait for the running host function: it must not wait for any of them.

    Those are the ones that called it and are not done, and, where a host function launched one of
    them, whoever had called that. Empty outside of a host function.
    """
    source = calling.get(None)
    if source is None:
        return []
    callers = _callers(source)
    waiting = []
    while callers:
        caller = callers.pop()
        if not caller.operation.finished:
            waiting.append(caller.operation)
        if caller.parent is not None:
            callers += _callers(caller.parent)
    return waiting


def still_waiting(source: Caller | Request | None) -> Caller | Request | None:
    """Return ``source`` or what called that, whichever is the nearest of which a launch is not done; None for none."""
    while source is not None and all(caller.operation.finished for caller in _callers(source)):
        parents = [caller.parent for caller in _callers(source) if caller.parent is not None]
        if len(parents) > 1:
            return source  # of a batch: they lead to several
        source = parents[0] if parents else None
    return source


def _callers(source: Caller | Request) -> list[Any]:
    """Return the CallingLaunches that a handler's context names."""
    return source.callers if isinstance(source, Request) else [source]


def check_outside(what: str) -> None:
    """Raise UsageError in a host function whose launch still waits for it: ``what`` waits for the launch."""
    waiting = waiting_launches()
    if waiting:
        raise UsageError(f"{what} would wait for {waiting[0]!r}, which waits for this host function")


def check_wait(operation: Operation[Any]) -> None:
    """Raise UsageError in a host function, or a task of it, if ``operation`` waits for a launch that waits for that."""
    for launch in waiting_launches():
        if waits_for([operation], launch, lanes=True):
            raise UsageError(f"awaiting {operation!r} would wait for {launch!r}, which waits for this host function")


class HandlerTimeout(OffloadTimeout):
    """A host function took longer than its ``timeout_s``."""


class ReplyError(UsageError):
    """What a host function returned is not what its annotation says."""


class RowsFailed(BaseExceptionGroup[BaseException]):
    """Several rows of one request failed, each by itself; a group that a host function raises is never one."""


class HostFunction(Handler):
    """A registered coroutine function.

    Parameters
    ----------
    function
        ``async def``, each parameter annotated: a NumPy type, ``int``, ``float``, ``bool`` or a
        structured dtype for a scalar, ``ao.In``, ``ao.Out``, ``ao.InOut`` for a mapped array. The
        return annotation likewise; none, or None, if it returns nothing. A structured dtype is
        laid out as C lays out the struct: made with ``align=True``, unless that changes nothing.
    name
        A name, or a number below 2**24.
    batch
        Whether it takes arrays: all requests at a time.
    limit
        How many may run at a time; the others wait, in order.
    timeout_s
        Seconds after which it is cancelled, and the kernel gets TIMEOUT.
    on_error
        What an exception does: ``"cancel"`` the launch, or let it go on and ``"collect"``.
    """

    number: int
    """Its id on the wire."""
    name: str | int
    on_error: OnError
    _parameters: list[Parameter]
    _result: np.dtype[Any] | None
    _row: np.dtype[Any]
    _limit: asyncio.Semaphore | None
    _timeout_s: float | None
    _mapped: bool

    def __new__(
        cls,
        function: Callable[..., Coroutine[Any, Any, Any]],
        *,
        name: str | int | None = None,
        batch: bool = False,
        limit: int | None = None,
        timeout_s: float | None = None,
        on_error: OnError = "cancel",
    ) -> HostFunction:
        """Read the types; raises UsageError where they do not describe what a kernel can send."""
        if not inspect.iscoroutinefunction(function):
            raise UsageError(f"a host function is an async def, not {function!r}; work that blocks: asyncio.to_thread")
        if on_error not in ("cancel", "collect"):
            raise UsageError(f'on_error is "cancel" or "collect", not {on_error!r}')
        if limit is not None and (type(limit) is not int or limit < 1):
            raise UsageError(f"limit is an integer of at least 1, not {limit!r}")
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
            raise UsageError(f"timeout_s is a number of seconds above 0, not {timeout_s!r}")
        parameters, result = _types(function, batch)
        row = _row([_MAPPED if p.access is not None else p.dtype for p in parameters])
        _check_layout(function, row, parameters, result)
        mapped = any(p.access is not None for p in parameters)
        if mapped and batch:
            raise UsageError(f"{called(function)}: a batch function takes scalars, not mapped arrays")
        for what, nbytes in (("arguments", row.itemsize), ("result", result.itemsize if result else 0)):
            if nbytes > PAYLOAD_NBYTES:
                raise UsageError(
                    f"{called(function)}: its {what} would take {nbytes} bytes, a call has room for {PAYLOAD_NBYTES}: "
                    "map an array"
                )
        letters = [
            _LETTERS.get(p.dtype.str[1:]) if p.access is None and p.dtype is not None else None for p in parameters
        ]
        plain = (None not in letters or batch) and limit is None and timeout_s is None
        self = super().__new__(
            cls,
            function,
            copy_context(),
            "".join(letter or "?" for letter in letters).encode(),
            np.frombuffer,
            row[0] if len(parameters) == 1 else row,
            row.itemsize if parameters else 0,
            (_LETTERS.get(result.str[1:], "") if result is not None else "").encode(),
            kind_of(result),
            0 if result is None else result.itemsize,
            plain,
            batch,
        )
        self.name = name if name is not None else getattr(function, "__name__", "")
        try:
            self.number = function_id(self.name)
        except (TypeError, ValueError) as error:
            raise UsageError(f"a host function's name is text or a number below 2**24, not {name!r}") from error
        if self.name == "":
            raise UsageError(f"{function!r} has no name: give it one with name=")
        self.on_error = on_error
        self._parameters = parameters
        self._result = result
        self._row = row
        self._limit = None if limit is None else asyncio.Semaphore(limit)
        self._timeout_s = timeout_s
        self._mapped = mapped
        return self

    # -- types -----------------------------------------------------------------------------

    @property
    def takes(self) -> str:
        """The parameters as a message names them."""
        return ", ".join(f"{p.name}: {p.dtype}{'' if p.access is None else ' array'}" for p in self._parameters)

    def encode(self, result: Any, rows: int, single: bool) -> Any:
        """Return the bytes of a result, or of one for each row; raises ReplyError where it does not fit."""
        what = f"the result of host function {self.name}"
        if self._result is None:
            raise ReplyError(f"{what} is {result!r}, but it has no return annotation")
        try:
            if self.batch:
                return _rows_of(result, self._result, rows, what)
            if single:
                return scalar_bytes(result, self._result, what)
            return b"".join(scalar_bytes(value, self._result, what) for value in result)
        except UsageError as error:
            raise ReplyError(str(error)) from error

    def _rows(self, request: Request) -> list[list[Any]]:
        """Return the arguments of each row: Python numbers, and the raw words of mapped arrays."""
        if not self._parameters:
            return [[] for _ in range(request.rows)]
        rows: Any = np.frombuffer(request.data or b"", self._row)
        return [[value if value.dtype.kind == "V" else value.item() for value in row] for row in rows]

    def _columns(self, request: Request) -> list[Any]:
        if not self._parameters:
            return []
        rows: Any = np.frombuffer(request.data or b"", self._row)
        return [rows[f"f{i}"] for i in range(len(self._parameters))]

    # -- running ---------------------------------------------------------------------------

    def begin(self, request: Request, mapping: Mapping) -> None:
        """Start what serves ``request``.

        That gets the arguments alone: what it raises is the launch's failure, and its frames would hold the launch.
        """
        if self.batch:
            request.start(self._call(self._columns(request)))
        elif self._mapped:
            request.start(self._map(self._rows(request), mapping))
        else:
            request.start(self._each(self._rows(request)))

    async def _call(self, arguments: Sequence[Any]) -> Any:
        """Run the function once, within its limits."""
        if self._limit is None and self._timeout_s is None:
            return await self.callable(*arguments)
        async with self._limit or nullcontext():
            try:
                async with asyncio.timeout(self._timeout_s) as deadline:
                    return await self.callable(*arguments)
            except TimeoutError as error:
                if deadline.expired():
                    raise HandlerTimeout(f"host function {self.name} took over {self._timeout_s} s") from error
                raise

    async def _each(self, rows: list[list[Any]]) -> Any:
        """Serve one row, or several that came as one request: all succeed or all fail."""
        if len(rows) == 1:
            return await self._call(rows[0])
        results = await _all_of(self._call(row) for row in rows)
        if self._result is not None:
            return results
        return next((result for result in results if result is not None), None)

    async def _map(self, rows: list[list[Any]], mapping: Mapping) -> Any:
        """Serve a request with mapped arrays: they come before the function runs and go back after it."""
        (row,) = rows
        places = [i for i, p in enumerate(self._parameters) if p.access is not None]
        words = [row[i].item() for i in places]
        fetched = await mapping.fetch([(address, *map_extent(extent)) for address, extent in words])
        try:
            for i, array in zip(places, fetched.views, strict=True):
                row[i] = _as_elements(array, self._parameters[i], self.name)
            result = await self._call(row)
            await mapping.copy_back(fetched)
        finally:
            mapping.release(fetched)
        return result


async def _all_of(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Return the results of all; the first failure stops the others, and several are raised as a group."""
    tasks: list[asyncio.Task[Any]] = []
    try:
        for coroutine in coroutines:  # an eager one may raise SystemExit
            tasks.append(asyncio.ensure_future(coroutine))  # noqa: PERF401  # those before it are to be stopped
        pending = set(tasks)
        while pending:  # FIRST_EXCEPTION would wait on where one was cancelled
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(task.cancelled() or task.exception() is not None for task in done):
                break
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    failures = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    if len(failures) > 1:
        raise RowsFailed("several rows failed", failures)
    if failures:
        raise failures[0]
    return [task.result() for task in tasks]  # raises CancelledError if one was cancelled


def _types(function: Callable[..., Any], batch: bool) -> tuple[list[Parameter], np.dtype[Any] | None]:
    """Return the parameters and the dtype of the result, None for none; raises UsageError."""
    signature = signature_of(function)
    parameters = []
    for p in signature.parameters.values():
        if p.kind not in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            raise UsageError(f"{called(function)}: a host function has positional parameters only, not {p}")
        parameters.append(_parameter(function, p.name, p.annotation, batch))
        dtype, access = parameters[-1].dtype, parameters[-1].access
        if dtype is None:
            raise UsageError(f"{called(function)}: parameter {p.name} needs a type: a kernel sends bytes")
        if dtype.subdtype is not None and access is None:
            raise UsageError(f"{called(function)}: {p.name} is an array, {dtype}: put it into a struct, or map it")
    returned = signature.return_annotation
    if returned in (None, type(None), signature.empty):
        return parameters, None
    result = _parameter(function, "the result", returned, batch)
    if result.access is not None or result.dtype is None or result.dtype.subdtype is not None:
        raise UsageError(f"{called(function)} returns a scalar; an array is a mapped argument")
    return parameters, result.dtype


def _parameter(function: Callable[..., Any], name: str, annotation: Any, batch: bool) -> Parameter:
    try:
        parameter = parameter_of(name, _element(annotation) if batch else annotation)
    except UsageError as error:
        hint = "; in a batch function NDArray[np.int64], say, or the type of an element" if batch else ""
        raise UsageError(f"{called(function)}: {error}{hint}") from None
    dtype = parameter.dtype
    if dtype is not None and parameter.access is None and dtype.fields is None and not dtype.isnative:
        raise UsageError(f"{called(function)}: {name} is {dtype!r}, but kernels have {dtype.newbyteorder('=')!r}")
    return parameter


def _element(annotation: Any) -> Any:
    """Return the element type of an array annotation such as ``NDArray[np.int64]``, any other as it is."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is np.ndarray:
        return next(iter(get_args(arguments[-1])), annotation)
    return arguments[0] if origin is NDArray else annotation  # NumPy 2.5 has it as an alias of its own


def _row(dtypes: Sequence[np.dtype[Any] | None]) -> np.dtype[Any]:
    """Return the arguments as a C compiler lays out a struct of them."""
    return np.dtype([(f"f{i}", dtype) for i, dtype in enumerate(dtypes)], align=True)


def _check_layout(
    function: Callable[..., Any], row: np.dtype[Any], parameters: Sequence[Parameter], result: np.dtype[Any] | None
) -> None:
    """Raise UsageError where C lays out a struct otherwise: with padding behind it the size may be the same."""
    scalars = [(p.name, p.dtype) for p in parameters if p.access is None and p.dtype is not None]
    returned = [] if result is None else [("its result", result)]
    wrong = [named for named in scalars + returned if not _is_like_c(named[1])]
    if not wrong and not _is_like_c(row):  # like C's by itself, but not in its place among the arguments
        wrong = [named for named in scalars if named[1].alignment < _alignment(named[1])]
    for name, dtype in wrong:
        text = "C lays out that struct otherwise: make the dtype with align=True"
        raise UsageError(f"{called(function)}: {name} is {dtype}, but {text}")


def _is_like_c(dtype: np.dtype[Any]) -> bool:
    """Whether everything in a struct is where its type can be in C. NumPy has it no further behind than C."""
    if dtype.subdtype is not None:
        return _is_like_c(dtype.subdtype[0])
    fields = [(field[0], field[1]) for field in (dtype.fields or {}).values()]
    if not all(_is_like_c(inner) and offset % _alignment(inner) == 0 for inner, offset in fields):
        return False
    return not fields or dtype.itemsize % _alignment(dtype) == 0


def _alignment(dtype: np.dtype[Any]) -> int:
    """Return what C aligns it to; NumPy says 1 for a struct made without align=True."""
    if dtype.subdtype is not None:
        return _alignment(dtype.subdtype[0])
    return max([dtype.alignment, *(_alignment(field[0]) for field in (dtype.fields or {}).values())])


def _rows_of(result: Any, dtype: np.dtype[Any], rows: int, what: str) -> Any:
    """Return the results of a batch as one contiguous array."""
    if isinstance(result, Sequence) and not isinstance(result, str | bytes):
        result = np.array([scalar(value, dtype, what) for value in result], dtype)
    else:
        try:
            result = np.asarray(result)
        except (OverflowError, TypeError, ValueError) as error:
            raise UsageError(f"{what} cannot be {result!r}: {error}") from None
    if result.shape != (rows,):
        raise UsageError(f"{what} has shape {result.shape}, the batch has {rows} rows")
    if result.dtype != dtype and not np.can_cast(result.dtype, dtype, "safe"):
        raise UsageError(f"{what} has dtype {result.dtype}, not {dtype}")
    return np.ascontiguousarray(result, dtype)


def _as_elements(array: np.ndarray[Any, Any], parameter: Parameter, name: str | int) -> np.ndarray[Any, Any]:
    assert parameter.dtype is not None
    if array.nbytes % parameter.dtype.itemsize:
        raise UsageError(
            f"argument {parameter.name} of host function {name} has {array.nbytes} bytes, "
            f"which are no whole number of {parameter.dtype}"
        )
    return array.view(parameter.dtype)
