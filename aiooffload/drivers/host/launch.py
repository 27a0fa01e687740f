"""The first argument of a host kernel: geometry, shared memory, and calls to host functions.

Calls go through the same ring, reply cells and bell as those of a GPU's kernel; this is what
``aiooffload.cuh`` is there.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from itertools import count
from threading import Lock
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from aiooffload._native import Port
from aiooffload.drivers.api import CallParameter
from aiooffload.errors import HostFunctionError, LaunchError, OffloadTimeout, UsageError
from aiooffload.rules.wire import PAYLOAD_NBYTES, Code, Kind, MapKind, Status, function_id, map_argument

__all__ = ["HostLaunch", "PendingCall", "lent"]

_KINDS: Final = {Kind.BOOL: "b", Kind.INT: "i", Kind.UINT: "u", Kind.FLOAT: "f", Kind.COMPLEX: "c"}
_ROWS: Final = 32
_FOREVER_NS: Final = 1 << 62


class Mapped(NamedTuple):
    """A mapped argument: the array stays alive with it."""

    array: NDArray[Any]
    kind: MapKind


class Lent:
    """The arrays that calls map: the only memory besides blocks that the host touches because a kernel says so.

    A call lends them until its kernel has the reply, one that was given up or dropped until its launch is done: the
    host may look at them as long as that. Kernels of any thread lend, and the loop's thread looks. Each method changes
    the dictionary by one operation, so there is no lock, which whoever collects a forgotten call might hold already.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._arrays: dict[int, list[NDArray[Any]]] = {}

    def lend(self, arguments: Sequence[object]) -> int | None:
        """Lend the mapped arrays among ``arguments``; return what ends that, None if there are none."""
        arrays = [value.array for value in arguments if isinstance(value, Mapped)]
        if not arrays:
            return None
        number = next(self._numbers)
        self._arrays[number] = arrays
        return number

    def end(self, number: int) -> None:
        """The host does not look at them any more."""
        self._arrays.pop(number, None)

    def find(self, address: int, nbytes: int) -> NDArray[Any] | None:
        """Return the lent array that is just these bytes, or None."""
        lent = (array for arrays in list(self._arrays.values()) for array in arrays)
        return next((array for array in lent if (array.ctypes.data, array.nbytes) == (address, nbytes)), None)


lent: Final = Lent()
"""Of all kernels of this process."""


class HostLaunch:
    """What a kernel on a GPU reads from its built-in variables, and its ``ao::Launch``.

    Whoever starts one that calls keeps it until the launch is done.
    """

    __slots__ = ("_aborted", "_calls", "_shared", "_shared_bytes", "block", "grid")

    def __init__(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        calls: CallParameter | None = None,
    ) -> None:
        self.grid = grid
        """Blocks in x, y and z."""
        self.block = block
        """Threads per block in x, y and z."""
        self._shared_bytes: Final = shared_bytes
        self._shared: NDArray[np.uint8] | None = None
        self._calls = None if calls is None else Calls(Port(calls.data, calls.keep))
        self._aborted: tuple[int, str] | None = None

    @property
    def shared(self) -> NDArray[np.uint8]:
        """Dynamic shared memory of this launch, ``(shared_bytes,) uint8``, zeroed."""
        if self._shared is None:  # most kernels never ask
            self._shared = np.zeros(self._shared_bytes, np.uint8)
        return self._shared

    # -- calls -----------------------------------------------------------------------------

    def _open_calls(self) -> Calls:
        if self._calls is None:
            raise UsageError("this kernel calls host functions: declare it with calls=True")
        if self._calls.over:  # what it would say there is another launch's by now
            raise UsageError("the kernel of this launch is over")
        return self._calls

    def _open_port(self) -> Port:
        return self._open_calls().port

    def end(self) -> None:
        """The kernel is over; raises LaunchError if it has aborted, whatever it has made of that."""
        if self._calls is not None:
            self._calls.end()
        if self._aborted is not None:
            raise _abort(*self._aborted) from None

    def call(self, function: str | int, *arguments: object, dtype: Any = None) -> Any:
        """Call a host function and wait for its result; see ``kernel.Launch``."""
        return self.call_async(function, *arguments, dtype=dtype).wait()

    def call_async(self, function: str | int, *arguments: object, dtype: Any = None) -> PendingCall:
        """Call it without waiting."""
        return self._send(function, _packed(arguments), 1, dtype, arguments)

    def call_each(self, function: str | int, *columns: Any, dtype: Any = None) -> Any:
        """Call it once per row of ``columns`` as the lanes of a warp do together; see ``kernel.Launch``."""
        arrays = [np.atleast_1d(np.asarray(column)) for column in columns]
        rows = len(arrays[0]) if arrays else 0
        if not 1 <= rows <= _ROWS or any(array.shape != (rows,) for array in arrays):
            raise UsageError(f"call_each takes columns of the same length, 1 to {_ROWS}")
        packed = [_packed([array[i] for array in arrays]) for i in range(rows)]
        largest = max(len(packed[0]), 0 if dtype is None else np.dtype(dtype).itemsize)
        if _ROWS * largest <= PAYLOAD_NBYTES:
            return self._send(function, b"".join(packed), rows, dtype, ()).wait_rows()
        # As in CUDA, a request for each, also where there are so few rows that one would do.
        calls = [self._send(function, one, 1, dtype, ()) for one in packed]
        results: list[Any] = [call.wait_rows() for call in calls]
        if results[0] is None:
            return None
        # np.concatenate would lay the members of a struct out anew.
        return np.frombuffer(bytearray().join(result.tobytes() for result in results), results[0].dtype)

    def _send(
        self, function: str | int, data: bytes, rows: int, dtype: Any, arguments: Sequence[object]
    ) -> PendingCall:
        calls, number = self._open_calls(), function_id(function)
        if len(data) > PAYLOAD_NBYTES:
            calls.port.report(number, Code.TOO_LARGE)
            raise HostFunctionError(f"{len(data)} bytes of arguments are too many for a call", code=Code.TOO_LARGE)
        loan = lent.lend(arguments)
        status, cell, ticket = calls.port.call(number, data, rows)
        if status != Status.OK:
            if loan is not None:
                lent.end(loan)
            raise _failure(function, status, b"")
        calls.add(ticket, cell, loan)
        return PendingCall(calls, function, ticket, rows, dtype)

    def post(self, function: str | int, *arguments: object) -> None:
        """Tell a host function something, without a reply."""
        port, number, data = self._open_port(), function_id(function), _packed(arguments)
        if len(data) > PAYLOAD_NBYTES:
            port.report(number, Code.TOO_LARGE)
            raise HostFunctionError(f"{len(data)} bytes of arguments are too many for a post", code=Code.TOO_LARGE)
        status = port.post(number, data)
        if status != Status.OK:
            raise _failure(function, status, b"")

    def cancelled(self) -> bool:
        """Whether the launch was asked to stop."""
        return self._open_port().cancelled()

    def progress(self, done: int, total: int) -> None:
        """Say how far the launch is."""
        self._open_port().progress(int(done), int(total))

    def set_timeout_s(self, timeout_s: float) -> None:
        """Let the waits of this launch end after so many seconds instead of the Offload's deadline."""
        if not timeout_s >= 0:  # nor NaN
            raise UsageError(f"timeout_s is a number of seconds, at least 0, not {timeout_s!r}")
        self._open_port().timeout_ns = int(min(timeout_s * 1e9, _FOREVER_NS))

    def abort(self, code: int, text: str) -> NoReturn:
        """Give up. Here a kernel can die alone, so this launch fails and nothing else."""
        self._aborted = int(code), text
        raise _abort(*self._aborted)

    def to(self, array: NDArray[Any]) -> Mapped:
        """Map an array whose content the host function gets."""
        return _mapped(array, MapKind.TO)

    def from_(self, array: NDArray[Any]) -> Mapped:
        """Map an array into which what the host function leaves is copied."""
        return _mapped(array, MapKind.FROM)

    def tofrom(self, array: NDArray[Any]) -> Mapped:
        """Map an array in both directions."""
        return _mapped(array, MapKind.TOFROM)

    def alloc(self, array: NDArray[Any]) -> Mapped:
        """Map an array in neither direction."""
        return _mapped(array, MapKind.ALLOC)


class Calls:
    """The calls of one launch: their reply cells and what they have lent.

    Threads of its kernel change the dictionaries, by one operation each: who takes a cell out of them has it.
    """

    __slots__ = ("_cells", "_loans", "over", "port")

    def __init__(self, port: Port) -> None:
        self.port: Final = port
        self._cells: Final[dict[int, int]] = {}  # by ticket, while nobody waits
        self._loans: Final[dict[int, int]] = {}  # until the reply has come
        self.over = False

    def add(self, ticket: int, cell: int, loan: int | None) -> None:
        """A call was made."""
        self._cells[ticket] = cell
        if loan is not None:
            self._loans[ticket] = loan

    def take(self, ticket: int) -> int | None:
        """Return the cell if the caller may look for the reply: only one does, and nobody once the kernel is over."""
        return self._cells.pop(ticket, None)

    def put_back(self, ticket: int, cell: int) -> None:
        """There is no reply yet."""
        self._cells[ticket] = cell
        if self.over:
            self.leave(ticket)

    def settled(self, ticket: int, status: int) -> None:
        """A call that was taken has ended, and its cell is another's."""
        # After CANCELLED and TIMEOUT the host may not have read the request yet.
        if status in (Status.OK, Status.ERROR) and (loan := self._loans.pop(ticket, None)) is not None:
            lent.end(loan)

    def leave(self, ticket: int) -> None:
        """Nobody waits for a call any more, if anybody did."""
        cell = self.take(ticket)
        if cell is not None:
            self.port.leave(cell, ticket)

    def end(self) -> None:
        """The kernel is over: its calls are left, though an exception of its may keep them."""
        self.over = True  # first: a thread that looks for a reply now puts its cell back after this
        for ticket in list(self._cells):
            self.leave(ticket)

    def __del__(self) -> None:
        for loan in self._loans.values():
            lent.end(loan)


class PendingCall:
    """A call under way. Dropped without ``wait``, its reply is dropped, too."""

    __slots__ = ("_calls", "_dtype", "_function", "_outcome", "_rows", "_settling", "_ticket")

    def __init__(self, calls: Calls, function: str | int, ticket: int, rows: int, dtype: Any) -> None:
        self._calls = calls
        self._function = function
        self._ticket = ticket
        self._rows = rows
        self._dtype = dtype
        self._outcome: tuple[int, int, bytes] | None = None
        # Whoever takes the reply frees the cell, and what is there next is another call's: one thread at a time looks.
        self._settling = Lock()

    def poll(self) -> bool:
        """Whether it is over."""
        if self._outcome is None and self._settling.acquire(blocking=False):  # else a thread waits for it
            try:
                if self._outcome is None and (cell := self._calls.take(self._ticket)) is not None:
                    outcome = self._calls.port.poll(cell, self._ticket)
                    if outcome is None:
                        self._calls.put_back(self._ticket, cell)
                    else:
                        self._settle(outcome)
            finally:
                self._settling.release()
        return self._outcome is not None

    def wait(self) -> Any:
        """Wait for its result."""
        kind, data = self._result()
        if self._dtype is not None:
            return self._values(kind, data)[0]
        if kind is Kind.NONE:
            return None
        return data if kind is Kind.STRUCT else self._values(kind, data)[0].item()

    def wait_rows(self) -> NDArray[Any] | None:
        """Wait for the results of all its rows: an array that can be written to, or None for no result."""
        kind, data = self._result()
        return None if kind is Kind.NONE and self._dtype is None else self._values(kind, bytearray(data))

    def _result(self) -> tuple[Kind, bytes]:
        """Wait until it is over; return what its result is made of."""
        if self._outcome is None:
            with self._settling:
                if self._outcome is None:
                    cell = self._calls.take(self._ticket)
                    if cell is None:
                        raise UsageError(f"the kernel that called {self._function!r} is over")
                    self._settle(self._calls.port.wait(cell, self._ticket, function_id(self._function)))
        assert self._outcome is not None
        status, kind, data = self._outcome
        if status != Status.OK:
            raise _failure(self._function, status, data)
        return Kind(kind), data

    def _settle(self, outcome: tuple[int, int, bytes]) -> None:
        """Take note of how it has ended."""
        self._calls.settled(self._ticket, outcome[0])  # first, as whoever sees an outcome goes on at once
        self._outcome = outcome

    def _values(self, kind: Kind, data: bytes | bytearray) -> NDArray[Any]:
        """Return the results of all rows."""
        if self._dtype is None:
            nbytes = len(data) // self._rows
            return np.frombuffer(data, f"V{nbytes}" if kind is Kind.STRUCT else f"{_KINDS[kind]}{nbytes}")
        dtype = np.dtype(self._dtype)
        if (
            kind is Kind.NONE
            or dtype.itemsize * self._rows != len(data)
            or (kind is not Kind.STRUCT and dtype.kind != _KINDS[kind])
        ):
            if not self._calls.over:
                self._calls.port.report(function_id(self._function), Code.WRONG_REPLY)
            found = f"{len(data) // self._rows} bytes ({kind.name.lower()})"
            text = f"host function {self._function!r} returned {found}, dtype= is {dtype}"
            raise HostFunctionError(text, code=Code.WRONG_REPLY)
        return np.frombuffer(data, dtype)

    def __del__(self) -> None:
        self._calls.leave(self._ticket)


def _abort(code: int, text: str) -> LaunchError:
    return LaunchError(f"the kernel aborted with code {code}: {text}", operation="abort", code=code)


def _failure(function: str | int, status: int, data: bytes) -> BaseException:
    """Return what a host kernel gets for a status that is not OK."""
    if status == Status.CANCELLED:
        return asyncio.CancelledError()
    if status == Status.TIMEOUT:
        return OffloadTimeout(f"host function {function!r} gave no answer in time")
    (code,) = struct.unpack("<q", data)
    meaning = Code(code).name.lower().replace("_", " ") if code in set(Code) else "its own code"
    return HostFunctionError(f"host function {function!r} failed with code {code} ({meaning})", code=code)


def _mapped(array: NDArray[Any], kind: MapKind) -> Mapped:
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise UsageError("a mapped argument is a C-contiguous NumPy array")
    if array.dtype.hasobject:
        raise UsageError(f"an array of {array.dtype} cannot be mapped: it holds references to Python objects")
    if kind in (MapKind.FROM, MapKind.TOFROM) and not array.flags.writeable:
        raise UsageError("an array that is copied back to has to be writable")
    return Mapped(array, kind)


def _packed(arguments: Sequence[object]) -> bytes:
    """Lay the arguments out as the members of a C struct."""
    data, largest = b"", 1
    for value in arguments:
        member, alignment = _member(value)
        data += bytes(-len(data) % alignment) + member
        largest = max(largest, alignment)
    return data + bytes(-len(data) % largest)


def _member(value: object) -> tuple[bytes, int]:
    """Return (bytes, alignment) of one argument."""
    if isinstance(value, Mapped):
        return map_argument(value.array.ctypes.data, value.array.nbytes, value.kind), 8
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return value.tobytes(), value.dtype.alignment
    if isinstance(value, bool):
        return struct.pack("<?", value), 1
    if isinstance(value, int):
        try:
            return struct.pack("<q", value), 8
        except struct.error as error:
            raise UsageError(f"argument {value} of a call does not fit int64: pass np.uint64({value})") from error
    if isinstance(value, float):
        return struct.pack("<d", value), 8
    if isinstance(value, complex):
        return struct.pack("<2d", value.real, value.imag), 8
    hint = ": map it, as launch.to(array)" if isinstance(value, np.ndarray) else ""
    raise UsageError(f"a call takes numbers, NumPy scalars and mapped arrays, not {type(value).__name__}{hint}")
