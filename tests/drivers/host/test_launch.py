"""The first argument of a host kernel: how it lays out arguments, reads replies, and what it refuses."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import numpy as np
import pytest

from aiooffload.drivers.api import CallParameter
from aiooffload.drivers.host.launch import HostLaunch
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
    assert line.payload(0) == struct.pack(
        layout, *(value.item() if hasattr(value, "item") else value for value in arguments)
    )
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


@pytest.mark.parametrize("value", ["text", None, 2**63, [1], np.array([1, 2]), 1j], ids=repr)
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
    with pytest.raises(HostFunctionError) as caught:
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


def test_rows_are_one_request(line: Wire) -> None:
    """call_each packs one row per element; rows that do not fit go as a request each."""
    sent = []

    def send(function: Any, data: bytes, rows: int, dtype: Any, keep: Any) -> Any:
        sent.append((data, rows))
        return Answered(np.arange(rows) if rows > 1 else 7)

    wrapped = _Sending(line.launch, send)
    assert wrapped.call_each("f", np.arange(3, dtype=np.int16)).tolist() == [0, 1, 2]
    assert sent == [(struct.pack("<3h", 0, 1, 2), 3)]
    sent.clear()
    assert wrapped.call_each("f", np.arange(2), np.arange(2.0)).tolist() == [7, 7]
    assert sent == [(struct.pack("<qd", 0, 0), 1), (struct.pack("<qd", 1, 1), 1)]


class Answered:
    """A call whose result is there."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


class _Sending(HostLaunch):
    """A launch whose requests go elsewhere."""

    __slots__ = ("send",)

    def __init__(self, like: HostLaunch, send: Any) -> None:
        super().__init__(like.grid, like.block, 0)
        self.send = send

    def _send(self, *arguments: Any) -> Any:
        return self.send(*arguments)


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


def test_dropped_call_is_left(line: Wire) -> None:
    """A call that nobody waits for leaves its cell: nobody gets it before the late reply was written."""
    pending = line.launch.call_async("f", 1)
    cell = line.request(0).cell
    del pending
    left = line.state.array[3072 : 3072 + 2048].view(np.uint32)
    assert left[cell // 32] >> (cell % 32) & 1
