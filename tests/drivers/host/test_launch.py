"""The first argument of a host kernel: how it lays out arguments, reads replies, and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from aiooffload.drivers.api import CallParameter
from aiooffload.drivers.host.launch import Calls, HostLaunch, Mapped, PendingCall, lent
from aiooffload.drivers.mapped import MappedMemory
from aiooffload.errors import HostFunctionError, LaunchError, OffloadTimeout, UsageError
from aiooffload.rules import wire
from aiooffload.rules.wire import Code, Kind, MapKind, Reply, Status

SHARED_WORDS = wire.SHARED_NBYTES // 8


class Wire:
    """Memory of a channel, with a launch at the device's end and nobody at the host's."""

    def __init__(self) -> None:
        self.shared, self.state = MappedMemory(wire.SHARED_NBYTES), MappedMemory(wire.STATE_NBYTES)
        self.bell = MappedMemory(8)
        addresses = self.shared.host_address, self.state.host_address, self.bell.host_address
        parameter = wire.LaunchParameter(*addresses, 10_000_000_000, 5).pack()
        self.launch = HostLaunch((1, 1, 1), (1, 1, 1), 0, CallParameter(parameter, self))
        self.words = self.shared.array[: SHARED_WORDS * 8].view(np.uint64)

    def request(self, ticket: int) -> wire.Descriptor:
        """Return the request of a ticket."""
        at = wire.slot_offset(ticket) // 8
        found = wire.Descriptor.unpack(ticket, int(self.words[at]), int(self.words[at + 1]))
        assert found is not None
        return found

    def payload(self, ticket: int) -> bytes:
        """Return the arguments of a ticket."""
        request = self.request(ticket)
        nbytes, _ = request.extent
        if request.form <= 8:
            return struct.pack("<Q", request.argument)[:nbytes]
        at = wire.payload_offset(ticket)
        return bytes(self.shared.array[at : at + nbytes])

    def answer(self, ticket: int, status: Status, kind: Kind = Kind.NONE, data: bytes = b"") -> None:
        """Write the reply to a ticket."""
        at = wire.cell_offset(self.request(ticket).cell)
        if len(data) > 8:
            self.shared.array[at + 64 : at + 64 + len(data)] = np.frombuffer(data, np.uint8)
        value = data.ljust(8, b"\0")[:8]
        self.words[at // 8] = np.frombuffer(value, np.uint64)[0]
        nbytes = 0 if status is Status.ERROR else len(data)
        self.words[at // 8 + 1] = Reply(ticket, status, kind, nbytes).pack()


@pytest.fixture
def line() -> Wire:
    return Wire()


@pytest.mark.parametrize(
    ("arguments", "layout"),
    [
        ((), ""),
        ((5,), "<q"),
        ((2.5,), "<d"),
        ((True,), "<?"),
        ((np.int8(1), 1.5 - 2j), "<bxxxxxxxdd"),
        ((np.int8(1), np.float64(2.0)), "<bxxxxxxxd"),
        ((np.int16(1), np.int8(2)), "<hbx"),
        ((1, np.int32(2)), "<qixxxx"),
        ((np.uint8(1), np.uint8(2), np.uint16(3), 4), "<BBHxxxxq"),
    ],
    ids=str,
)
def test_arguments_are_the_members_of_a_struct(line: Wire, arguments: tuple[Any, ...], layout: str) -> None:
    """Each argument is at a multiple of its alignment, and the whole at that of the largest."""
    line.launch.post("f", *arguments)
    members: list[Any] = []
    for value in arguments:
        plain = value.item() if hasattr(value, "item") else value
        members += [plain.real, plain.imag] if isinstance(plain, complex) else [plain]
    assert line.payload(0) == struct.pack(layout, *members)
    assert line.request(0).function == wire.function_id("f")
    assert line.request(0).cell == wire.NO_CELL
    assert line.request(0).launch == 5


def test_mapped_arguments_name_memory(line: Wire) -> None:
    """A mapped argument is its address, its size and what is copied; the array stays alive with the call."""
    array = np.arange(6, dtype=np.float32)
    for ticket, (make, kind) in enumerate(
        [
            (line.launch.alloc, MapKind.ALLOC),
            (line.launch.to, MapKind.TO),
            (line.launch.from_, MapKind.FROM),
            (line.launch.tofrom, MapKind.TOFROM),
        ]
    ):
        line.launch.post("f", np.int8(1), make(array))
        assert line.payload(ticket) == b"\1".ljust(8, b"\0") + wire.map_argument(array.ctypes.data, 24, kind)


@pytest.mark.parametrize("value", ["text", None, 2**63, [1], np.array([1, 2])], ids=repr)
def test_arguments_that_cannot_be_sent(line: Wire, value: Any) -> None:
    """What is no number is refused before anything is sent."""
    with pytest.raises(UsageError):
        line.launch.post("f", value)
    with pytest.raises(AssertionError):
        line.request(0)


@pytest.mark.parametrize("array", [np.zeros((3, 3))[:, 1], [1, 2]], ids=["strided", "list"])
def test_arrays_that_cannot_be_mapped(line: Wire, array: Any) -> None:
    """A mapped argument is a contiguous array."""
    with pytest.raises(UsageError, match="C-contiguous"):
        line.launch.to(array)


@pytest.mark.parametrize("dtype", [object, [("a", "i4"), ("b", "O")]], ids=str)
def test_array_of_references_is_not_mapped(line: Wire, dtype: Any) -> None:
    """Bytes that are references to objects go to nobody, who would write what is none."""
    for make in (line.launch.to, line.launch.from_, line.launch.tofrom, line.launch.alloc):
        with pytest.raises(UsageError, match="Python objects"):
            make(np.zeros(3, dtype))


def test_read_only_array_is_not_mapped_back(line: Wire) -> None:
    """What is copied back goes into an array that can be written."""
    array = np.zeros(3)
    array.flags.writeable = False
    line.launch.to(array)
    for make in (line.launch.from_, line.launch.tofrom):
        with pytest.raises(UsageError, match="writable"):
            make(array)


@pytest.mark.parametrize(
    ("kind", "data", "value"),
    [
        (Kind.NONE, b"", None),
        (Kind.INT, struct.pack("<q", -5), -5),
        (Kind.INT, struct.pack("<b", -5), -5),
        (Kind.UINT, struct.pack("<H", 65535), 65535),
        (Kind.FLOAT, struct.pack("<f", 0.5), 0.5),
        (Kind.FLOAT, struct.pack("<d", 0.1), 0.1),
        (Kind.BOOL, b"\1", True),
        (Kind.COMPLEX, struct.pack("<2d", 1, 2), 1 + 2j),
        (Kind.STRUCT, b"0123456789", b"0123456789"),
    ],
    ids=str,
)
def test_replies_by_kind(line: Wire, kind: Kind, data: bytes, value: Any) -> None:
    """A reply says what it is made of, and comes as a Python number, or as bytes."""
    pending = line.launch.call_async("f", 1)
    assert not pending.poll()
    line.answer(0, Status.OK, kind, data)
    assert pending.poll()
    result = pending.wait()
    assert result == value
    assert type(result) is type(value)
    assert pending.wait() == value  # any number of times


def test_result_as_a_struct(line: Wire) -> None:
    """With dtype= a struct comes as a record; one of another size is an error of which the host is told."""
    dtype = np.dtype([("a", np.int32), ("b", np.float32)])
    record = np.array((3, 0.5), dtype)[()]
    pending = line.launch.call_async("f", dtype=dtype)
    line.answer(0, Status.OK, Kind.STRUCT, record.tobytes())
    assert pending.wait() == record
    pending = line.launch.call_async("f", dtype=np.float32)
    line.answer(1, Status.OK, Kind.INT, struct.pack("<i", 1))
    with pytest.raises(HostFunctionError, match=r"returned 4 bytes \(int\), dtype= is float32") as caught:
        pending.wait()
    assert caught.value.code == Code.WRONG_REPLY
    at = (wire.launch_offset(5) + wire.LAUNCH_TROUBLE) // 8
    assert wire.trouble(int(line.words[at])) == (wire.function_id("f"), Code.WRONG_REPLY)


@pytest.mark.parametrize(
    ("status", "data", "expected"),
    [
        (Status.ERROR, struct.pack("<q", 17), HostFunctionError),
        (Status.ERROR, struct.pack("<q", Code.RAISED), HostFunctionError),
        (Status.CANCELLED, b"", asyncio.CancelledError),
        (Status.TIMEOUT, b"", OffloadTimeout),
    ],
    ids=str,
)
def test_what_is_not_ok_is_raised(line: Wire, status: Status, data: bytes, expected: type[BaseException]) -> None:
    """Each status but OK is an exception of its own, and an error has its code."""
    pending = line.launch.call_async("f")
    line.answer(0, status, Kind.NONE, data)
    with pytest.raises(expected) as caught:
        pending.wait()
    if isinstance(caught.value, HostFunctionError):
        assert caught.value.code == struct.unpack("<q", data)[0]


POINT = np.dtype([("x", np.int32), ("y", np.int32)])
PADDED = np.dtype([("tag", np.int8), ("value", np.float64)], align=True)
ORDER = np.dtype({"names": ["b", "a"], "formats": ["<i2", "<f4"], "offsets": [4, 0], "itemsize": 16})


def records(dtype: np.dtype[Any], rows: int) -> Any:
    """Return so many different records whose last bytes are zeros."""
    array = np.zeros(rows, dtype)
    for place, name in enumerate(dtype.names or ()):
        array[name] = np.arange(rows) + place
    return array


class Answering(Wire):
    """A line whose requests are answered when the kernel waits, all rows of one with a part of the same results."""

    def __init__(self, kind: Kind, results: Any) -> None:
        super().__init__()
        self.requests: list[tuple[bytes, int]] = []
        self._kind, self._results, self._given = kind, results, 0
        answering = self
        calls = self.launch._open_calls()
        made = calls.port

        class Answers:
            """The port, with a host at its other end."""

            report = made.report

            def call(self, function: int, data: bytes, rows: int = 1) -> Any:
                status, cell, ticket = made.call(function, data, rows)
                answering.serve(ticket, rows)
                return status, cell, ticket

            wait, poll, leave = made.wait, made.poll, made.leave

        calls.port = Answers()  # type: ignore[assignment, misc]  # in its place

    def serve(self, ticket: int, rows: int) -> None:
        """Answer a request with the next rows."""
        self.requests.append((self.payload(ticket), rows))
        results = b"" if self._results is None else self._results[self._given : self._given + rows].tobytes()
        self._given += rows
        self.answer(ticket, Status.OK, self._kind, results)


def test_rows_are_one_request() -> None:
    """call_each packs one row per element; rows that do not fit go as a request each."""
    line = Answering(Kind.INT, np.arange(3))
    assert line.launch.call_each("f", np.arange(3, dtype=np.int16)).tolist() == [0, 1, 2]
    assert line.requests == [(struct.pack("<3h", 0, 1, 2), 3)]
    line = Answering(Kind.INT, np.arange(2))
    assert line.launch.call_each("f", np.arange(2), np.arange(2.0)).tolist() == [0, 1]
    assert line.requests == [(struct.pack("<qd", 0, 0), 1), (struct.pack("<qd", 1, 1), 1)]


@pytest.mark.parametrize("rows", [1, 2, 5, 32])
@pytest.mark.parametrize("columns", [1, 2], ids=["one request", "a request for each row"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (Kind.INT, np.int8), (Kind.INT, np.int32), (Kind.UINT, np.uint64), (Kind.FLOAT, np.float32),
        (Kind.BOOL, np.bool_),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("named", [False, True], ids=["", "dtype="])
def test_results_of_rows(kind: Kind, dtype: Any, columns: int, rows: int, named: bool) -> None:
    """call_each returns an array of the function's own type, one element for each row, which can be written to."""
    results = np.arange(rows).astype(dtype)
    line = Answering(kind, results)
    found = line.launch.call_each("f", *[np.arange(rows)] * columns, dtype=dtype if named else None)
    assert (found.dtype, found.tolist()) == (results.dtype, results.tolist())
    assert len(line.requests) == (1 if columns == 1 else rows)
    found[0] = 0


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("dtype", [POINT, PADDED, ORDER], ids=["8 bytes", "aligned", "out of order"])
def test_structs_of_rows(dtype: np.dtype[Any], columns: int, rows: int) -> None:
    """Structs come as records with dtype=, laid out as it says; without it as their bytes, to the last zero."""
    results = records(dtype, rows)
    arguments = [np.arange(rows)] * columns
    found = Answering(Kind.STRUCT, results).launch.call_each("f", *arguments, dtype=dtype)
    assert (found.dtype, found.tolist()) == (dtype, results.tolist())
    assert found.dtype.itemsize == dtype.itemsize
    found = Answering(Kind.STRUCT, results).launch.call_each("f", *arguments)
    assert found.dtype == np.dtype(f"V{dtype.itemsize}")
    assert found.view(dtype).tolist() == results.tolist()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [1, 2])
def test_rows_without_a_result(columns: int, rows: int) -> None:
    """Without a result call_each returns None, as call does; with dtype= it is an error, as there."""
    arguments = [np.arange(rows)] * columns
    assert Answering(Kind.NONE, None).launch.call_each("f", *arguments) is None
    with pytest.raises(HostFunctionError) as caught:
        Answering(Kind.NONE, None).launch.call_each("f", *arguments, dtype=np.int64)
    assert caught.value.code == Code.WRONG_REPLY


@pytest.mark.parametrize("rows", [1, 2, 32])
@pytest.mark.parametrize(
    ("argument", "result", "split"),
    [("u1", "V8", False), ("u1", "V9", True), ("u8", "V1", False), ("c16", "V1", True), ("u8", "V256", True)],
)
def test_what_is_split(argument: str, result: str, split: bool, rows: int) -> None:
    """It is a request for each row where 32 of either the arguments or the results would not fit one."""
    line = Answering(Kind.STRUCT, np.zeros(rows, result))
    found = line.launch.call_each("f", np.ones(rows, argument), dtype=np.dtype(result))
    assert (found.dtype, found.shape) == (np.dtype(result), (rows,))
    assert [rows for _, rows in line.requests] == ([1] * rows if split else [rows])


@pytest.mark.parametrize("columns", [(), ([1] * 33,), ([1, 2], [1]), (np.zeros((2, 2)),), ([],)], ids=str)
def test_rows_that_do_not_fit_together(line: Wire, columns: Any) -> None:
    """Columns have one length, from 1 to 32."""
    with pytest.raises(UsageError, match="columns"):
        line.launch.call_each("f", *columns)


def test_too_many_arguments_are_told_to_the_host(line: Wire) -> None:
    """More than 256 bytes are an error here and in the launch's block; nothing is sent."""
    for send in (line.launch.call, line.launch.post):
        with pytest.raises(HostFunctionError) as caught:
            send("f", *range(33))
        assert caught.value.code == Code.TOO_LARGE
    at = (wire.launch_offset(5) + wire.LAUNCH_TROUBLE) // 8
    assert wire.trouble(int(line.words[at])) == (wire.function_id("f"), Code.TOO_LARGE)
    with pytest.raises(AssertionError):
        line.request(0)


def test_progress_and_timeout_take_numbers_of_any_type(line: Wire) -> None:
    """What a kernel got as an argument is a NumPy scalar, and will do."""
    line.launch.progress(np.int32(3), np.int64(10))
    at = (wire.launch_offset(5) + wire.LAUNCH_PROGRESS) // 8
    assert line.words[at : at + 2].tolist() == [3, 10]
    line.launch.set_timeout_s(float("inf"))
    line.launch.set_timeout_s(np.float32(0.01))
    with pytest.raises(OffloadTimeout):
        line.launch.call("f")


def test_abort_ends_the_kernel(line: Wire) -> None:
    """abort() raises with the code and the text."""
    with pytest.raises(LaunchError, match="no more tea") as caught:
        line.launch.abort(np.int32(7), "no more tea")
    assert caught.value.code == 7


@pytest.mark.parametrize(
    "use",
    [lambda x: x.call("f"), lambda x: x.post("f"), lambda x: x.cancelled(), lambda x: x.progress(1, 2),
     lambda x: x.call_each("f", [1]), lambda x: x.set_timeout_s(1)],
)  # fmt: skip
def test_kernels_that_were_not_declared_to_call(use: Any) -> None:
    """Without calls=True everything that needs the channel says what to do."""
    with pytest.raises(UsageError, match="calls=True"):
        use(HostLaunch((1, 1, 1), (1, 1, 1), 0))


def test_shared_memory_is_made_when_asked_for() -> None:
    """Shared memory is zeroed, of the asked size, and the same at each look."""
    launch = HostLaunch((1, 1, 1), (1, 1, 1), 12)
    assert launch.shared.tolist() == [0] * 12
    launch.shared[0] = 1
    assert launch.shared[0] == 1


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The loans that have been ended, in order."""
    numbers: list[int] = []
    end = lent.end

    def note(number: int) -> None:
        numbers.append(number)
        end(number)

    monkeypatch.setattr(lent, "end", note)
    return numbers


def is_lent(array: np.ndarray[Any, Any]) -> bool:
    """Whether the host may touch it."""
    return lent.find(array.ctypes.data, array.nbytes) is array


@pytest.mark.parametrize("how", ["wait", "poll", "drop"])
@pytest.mark.parametrize("status", [Status.OK, Status.ERROR, Status.CANCELLED, Status.TIMEOUT])
def test_mapped_array_is_lent_until_the_host_is_through(line: Wire, ended: list[int], how: str, status: Status) -> None:
    """After an answer the host may touch a call's arrays no more; without one it may until the launch is done."""
    array = np.arange(6)
    pending = line.launch.call_async("f", line.launch.tofrom(array))
    assert not pending.poll()
    assert is_lent(array)
    assert not ended
    if how != "drop":
        line.answer(0, status, Kind.NONE, bytes(8) if status is Status.ERROR else b"")
    for _ in range(2 if how == "wait" else 0):
        with contextlib.nullcontext() if status is Status.OK else pytest.raises(BaseException):  # noqa: PT011  # which, is not the point
            pending.wait()
    assert how != "poll" or (pending.poll() and pending.poll())
    del pending
    answered = how != "drop" and status in (Status.OK, Status.ERROR)
    assert is_lent(array) is not answered
    assert len(ended) == answered
    del line.launch
    assert not is_lent(array)
    assert len(ended) == 1


def test_mapped_array_of_a_call_that_was_not_made(line: Wire) -> None:
    """Where no cell gets free in time nothing is lent."""
    array = np.arange(6)
    calls = [line.launch.call_async("f") for _ in range(wire.CELLS)]
    line.launch.set_timeout_s(0)
    with pytest.raises(OffloadTimeout):
        line.launch.call_async("f", line.launch.to(array))
    assert not is_lent(array)
    del calls


class Counting:
    """A port on which each look at the reply finds another one, as the cell is another call's after the first."""

    def __init__(self) -> None:
        self.looks = 0
        self.inside, self.reply = threading.Semaphore(0), threading.Event()

    def wait(self, cell: int, ticket: int, function: int) -> tuple[int, int, bytes]:
        """Wait for the event."""
        self.inside.release()
        assert self.reply.wait(10)
        return self._look()

    def poll(self, cell: int, ticket: int) -> tuple[int, int, bytes] | None:
        """Find it, as where the thread that waits has not been woken yet."""
        return self._look()

    def _look(self) -> tuple[int, int, bytes]:
        self.looks += 1
        return Status.OK, Kind.INT, struct.pack("<q", self.looks)

    def leave(self, cell: int, ticket: int) -> None:
        """Leave it; nobody asks for that here."""
        raise AssertionError("the call is over")


def test_threads_that_wait_for_one_call(ended: list[int]) -> None:
    """One of them takes the reply and ends the loan; the others get the same result, and no other call's."""
    array, port = np.arange(3), Counting()
    loan = lent.lend([Mapped(array, MapKind.TO)])
    calls = Calls(port)  # type: ignore[arg-type]  # a port of the test
    calls.add(0, 0, loan)
    pending = PendingCall(calls, "f", 0, 1, None)
    with ThreadPoolExecutor(4) as threads:
        results = [threads.submit(lambda: (pending.wait(), is_lent(array))) for _ in range(4)]
        assert port.inside.acquire(timeout=10)
        port.inside.acquire(timeout=0.1)  # does another come?
        port.reply.set()
        assert [result.result() for result in results] == [(1, False)] * 4
    assert port.looks == 1
    assert ended == [loan]


def test_poll_while_another_thread_waits() -> None:
    """The reply is the waiting thread's: poll neither takes it nor waits until that has."""
    port = Counting()
    calls = Calls(port)  # type: ignore[arg-type]  # a port of the test
    calls.add(0, 0, None)
    pending = PendingCall(calls, "f", 0, 1, None)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(pending.wait)
        assert port.inside.acquire(timeout=10)
        assert not pending.poll()
        port.reply.set()
        assert waiting.result() == 1
    assert pending.poll()
    assert (pending.wait(), port.looks) == (1, 1)


def test_calls_end_with_their_kernel(line: Wire) -> None:
    """Once the kernel is over its calls are left, also those that something keeps; nobody waits for them any more."""
    kept = [line.launch.call_async("f", i) for i in range(3)]
    line.answer(1, Status.OK, Kind.INT, bytes(8))
    assert kept[1].poll()
    line.launch.end()
    left = line.state.array[3072 : 3072 + 2048].view(np.uint32)
    assert sum(int(word).bit_count() for word in left) == 2
    assert kept[1].wait() == 0
    assert not kept[0].poll()
    with pytest.raises(UsageError, match="is over"):
        kept[0].wait()
    del kept
    assert sum(int(word).bit_count() for word in left) == 2


def test_call_that_is_polled_while_its_kernel_ends(line: Wire) -> None:
    """A thread that looks for the reply at that moment leaves the cell instead of putting it back."""
    pending = line.launch.call_async("f", 1)
    calls = line.launch._open_calls()
    port = calls.port

    class Ending:
        leave = port.leave

        @staticmethod
        def poll(cell: int, ticket: int) -> Any:
            line.launch.end()
            return port.poll(cell, ticket)

    calls.port = Ending()  # type: ignore[assignment, misc]  # in its place
    assert not pending.poll()
    left = line.state.array[3072 : 3072 + 2048].view(np.uint32)
    assert sum(int(word).bit_count() for word in left) == 1
    assert calls.take(line.request(0).ticket) is None


def test_dropped_call_is_left(line: Wire) -> None:
    """A call that nobody waits for leaves its cell: nobody gets it before the late reply was written."""
    pending = line.launch.call_async("f", 1)
    cell = line.request(0).cell
    del pending
    left = line.state.array[3072 : 3072 + 2048].view(np.uint32)
    assert left[cell // 32] >> (cell % 32) & 1
