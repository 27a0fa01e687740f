"""``rules/wire.py``: the words of a channel in both directions, and its layout against the C header."""

from __future__ import annotations

import enum
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import aiooffload
from aiooffload.rules import wire
from aiooffload.rules.wire import Code, Descriptor, Form, Kind, LaunchParameter, MapKind, Reply, Status

HEADER = Path(aiooffload.__file__).parent / "device" / "aiooffload_wire.h"
NUMBERS = {
    name: int(value) for name, value in re.findall(r"^#define AO_(\w+) +(-?\d+)\b", HEADER.read_text(), re.MULTILINE)
}
ENUMS: dict[str, type[enum.IntEnum]] = {
    "STATUS": Status,
    "CODE": Code,
    "KIND": Kind,
    "MAP": MapKind,
    "FORM": Form,
}
RENAMED = {
    "REPLY_KIND_SHIFT": "_KIND_SHIFT",
    "REPLY_STATUS_SHIFT": "_STATUS_SHIFT",
    "REPLY_TICKET_SHIFT": "_TICKET_SHIFT",
}
DEVICE_ONLY = {f"STATE_{name}" for name in ("POSTS", "TAIL", "REFRESH", "RUNG", "ABORT", "TAKEN", "LEFT", "TICKETS")}
HOST_ONLY = {"NUMBERED", "_WORD"}

U64 = st.integers(0, 2**64 - 1)
TICKETS = st.one_of(
    st.integers(0, 2**48 - 1),
    st.integers(0, 2100).flatmap(lambda lap: st.integers(-2, 2).map(lambda step: max(0, lap * wire.RING_SLOTS + step))),
)
DESCRIPTORS = st.builds(
    Descriptor,
    ticket=TICKETS,
    function=st.integers(0, 2**25 - 1),
    launch=st.integers(0, wire.LAUNCHES - 1),
    cell=st.one_of(st.integers(0, wire.CELLS - 1), st.just(wire.NO_CELL)),
    form=st.integers(0, Form.ROWS),
    argument=U64,
)


def counterpart(name: str) -> int | None:
    """The Python value that a number of the header stands for, or None."""
    prefix, _, member = name.partition("_")
    if prefix in ENUMS and member in ENUMS[prefix].__members__:
        return int(ENUMS[prefix][member])
    for candidate in (RENAMED.get(name, name), f"_{name}"):
        if candidate in vars(wire):
            return int(vars(wire)[candidate])
    return None


# -- the header ----------------------------------------------------------------------------


def test_every_define_of_a_number_was_read() -> None:
    """The expression that reads the header skips none of its definitions but the include guard."""
    defined = re.findall(r"^\s*#\s*define\s+(\w+)", HEADER.read_text(), re.MULTILINE)
    assert [name for name in defined if name != "AIOOFFLOAD_WIRE_H"] == [f"AO_{name}" for name in NUMBERS]


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_a_number_of_the_header_is_that_of_python(name: str) -> None:
    """Every number of the header is the Python constant or enumeration member of that name."""
    value = counterpart(name)
    if value is None:
        assert name in DEVICE_ONLY
    else:
        assert value == NUMBERS[name]


def test_python_has_no_number_of_its_own() -> None:
    """Every integer constant of the module, private ones too, is in the header under its name."""
    back = {private: public for public, private in RENAMED.items()}
    for name, value in vars(wire).items():
        if name.strip("_").isupper() and type(value) is int and name not in HOST_ONLY:
            assert NUMBERS[back.get(name, name.lstrip("_"))] == value, name


@pytest.mark.parametrize("prefix", sorted(ENUMS))
def test_enumerations_are_those_of_the_header(prefix: str) -> None:
    """Each member of Status, Code, Kind, MapKind and Form has the header's number, and none is missing."""
    ours = {f"{prefix}_{name}": int(member) for name, member in ENUMS[prefix].__members__.items()}
    shapes = {f"{prefix}_SHIFT", f"{prefix}_BITS"}  # not members: where the field is, how wide it is
    assert ours == {
        name: value for name, value in NUMBERS.items() if name.startswith(f"{prefix}_") and name not in shapes
    }


def test_fields_fill_the_control_words() -> None:
    """The fields of both control words follow each other without a gap and without an overlap."""
    at = 0
    for field in ("FUNCTION", "LAUNCH", "CELL", "FORM", "TAG"):
        assert NUMBERS.get(f"{field}_SHIFT", 0) == at
        at += NUMBERS[f"{field}_BITS"]
    assert at == 64
    assert 2 ** NUMBERS["LAUNCH_BITS"] == wire.LAUNCHES
    assert 2 ** NUMBERS["CELL_BITS"] - 1 == wire.NO_CELL >= wire.CELLS
    assert 2 ** NUMBERS["FORM_BITS"] > max(Form)
    assert 2 ** NUMBERS["REPLY_KIND_SHIFT"] > wire.PAYLOAD_NBYTES
    assert 2 ** (NUMBERS["REPLY_STATUS_SHIFT"] - NUMBERS["REPLY_KIND_SHIFT"]) > max(Kind)
    assert 2 ** (NUMBERS["REPLY_TICKET_SHIFT"] - NUMBERS["REPLY_STATUS_SHIFT"]) > max(Status)


# -- descriptors ---------------------------------------------------------------------------


@given(DESCRIPTORS)
def test_a_descriptor_comes_back(descriptor: Descriptor) -> None:
    """What was packed is unpacked, field by field, from two 64-bit words."""
    argument, control = descriptor.pack()
    assert 0 <= argument < 2**64
    assert 0 <= control < 2**64
    assert Descriptor.unpack(descriptor.ticket, argument, control) == descriptor


@given(TICKETS, U64)
def test_any_words_with_the_tag_come_back(ticket: int, control: int) -> None:
    """Any control word with the ticket's tag is one descriptor, which packs to that very word."""
    control = control % 2**54 | wire.tag_of(ticket) << 54
    descriptor = Descriptor.unpack(ticket, 7, control)
    assert descriptor is not None
    assert descriptor.pack() == (7, control)


@given(DESCRIPTORS)
def test_the_lap_before_is_not_taken_for_this_one(descriptor: Descriptor) -> None:
    """In the slot that still has the descriptor of the lap before, or of the next, there is none of this ticket."""
    argument, control = descriptor.pack()
    for ticket in (descriptor.ticket + wire.RING_SLOTS, descriptor.ticket - wire.RING_SLOTS):
        assert wire.slot_offset(ticket) == wire.slot_offset(descriptor.ticket)
        assert Descriptor.unpack(ticket, argument, control) is None


@given(st.integers(0, wire.RING_SLOTS - 1), U64, st.integers(0, 2**54 - 1))
def test_a_slot_never_written_is_unpublished(ticket: int, argument: int, rest: int) -> None:
    """In the first lap, where slots are zero, a control word without a tag is no request."""
    assert Descriptor.unpack(ticket, 0, 0) is None
    assert Descriptor.unpack(ticket, argument, rest) is None


@given(TICKETS)
@example(0)
@example(1023 * wire.RING_SLOTS - 1)
@example(1023 * wire.RING_SLOTS)
@example(1024 * wire.RING_SLOTS)
def test_tags(ticket: int) -> None:
    """A tag has 10 bits, is one for a whole lap, and is next lap's less one."""
    tag = wire.tag_of(ticket)
    assert 0 <= tag < 1024
    assert wire.tag_of(ticket // wire.RING_SLOTS * wire.RING_SLOTS) == tag
    assert wire.tag_of(ticket + wire.RING_SLOTS) == (tag + 1) % 1024 != tag


@given(TICKETS, U64, U64)
def test_only_what_a_kernel_can_have_written_is_sound(ticket: int, argument: int, control: int) -> None:
    """``sound`` takes any two words without raising, and accepts exactly those with fields in range."""
    control = control % 2**54 | wire.tag_of(ticket) << 54
    check_sound(ticket, argument, control)


@given(
    st.integers(0, 2**25 - 1),
    st.one_of(st.integers(0, 2**15 - 1), st.just(wire.NO_CELL), st.integers(wire.CELLS - 1, wire.CELLS)),
    st.integers(0, 15),
    st.integers(0, 300),
    st.integers(0, 40),
    st.sampled_from([0, 0, 0, 1 << 40]),
)
def test_sound_near_the_limits(function: int, cell: int, form: int, nbytes: int, rows: int, stray: int) -> None:
    """The same for words around the limits of each field."""
    control = function | cell << 35 | form << 50 | 1 << 54
    check_sound(0, nbytes | rows << 16 | stray, control)


def check_sound(ticket: int, argument: int, control: int) -> None:
    descriptor = Descriptor.unpack(ticket, argument, control)
    assert descriptor is not None
    cell, form = control >> 35 & 0x7FFF, control >> 50 & 15
    nbytes, rows = argument & 0xFFFF, argument >> 16
    if form <= 8:
        nbytes, rows = form, 1
    expected = (
        (cell < 16_384 or cell == 0x7FFF)
        and form <= 10
        and nbytes <= 256
        and 1 <= rows <= (32 if form == 10 else 1)
        and nbytes % rows == 0
    )
    assert descriptor.extent == (nbytes, rows)
    assert descriptor.sound is expected


# -- replies -------------------------------------------------------------------------------


@given(
    # The last ticket but one: that of the last, plus one, has no room.
    st.one_of(st.integers(0, 2**48 - 2), st.just(-1)),
    st.sampled_from(Status),
    st.sampled_from(Kind),
    st.integers(0, wire.PAYLOAD_NBYTES),
)
def test_a_reply_comes_back(ticket: int, status: Status, kind: Kind, nbytes: int) -> None:
    """What was packed is unpacked, field by field, from one 64-bit word."""
    reply = Reply(ticket, status, kind, nbytes)
    word = reply.pack()
    assert 0 <= word < 2**64
    assert Reply.unpack(word) == reply


@given(U64)
def test_any_word_is_a_reply(word: int) -> None:
    """Every 64-bit word is a reply, which packs to that very word."""
    assert Reply.unpack(word).pack() == word


def test_a_cell_never_used() -> None:
    """A zero cell belongs to no ticket."""
    assert Reply.unpack(0) == Reply(-1, Status.OK, Kind.NONE, 0)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (None, Kind.NONE),
        ("?", Kind.BOOL),
        ("i1", Kind.INT),
        ("i8", Kind.INT),
        ("u2", Kind.UINT),
        ("u8", Kind.UINT),
        ("f2", Kind.FLOAT),
        ("f8", Kind.FLOAT),
        ("c16", Kind.COMPLEX),
        ("S4", Kind.STRUCT),
        ("M8[ns]", Kind.STRUCT),
        ([("x", "f4"), ("y", "i4")], Kind.STRUCT),
    ],
)
def test_kinds(dtype: object, kind: Kind) -> None:
    """A result's kind follows from its dtype; None is no result, and whatever is no number is a struct."""
    assert wire.kind_of(None if dtype is None else np.dtype(dtype)) is kind  # type: ignore[call-overload]  # of any type


# -- the launch parameter, mapped arguments, the message -----------------------------------

PARAMETERS = st.builds(
    LaunchParameter, shared=U64, state=U64, bell=U64, timeout_ns=U64, launch=st.integers(0, wire.LAUNCHES - 1)
)


@given(PARAMETERS)
def test_a_launch_parameter_comes_back(parameter: LaunchParameter) -> None:
    """What was packed is unpacked, and is as long as ``ao::Launch``, the rest of it zero."""
    data = parameter.pack()
    assert len(data) == wire.PARAMETER_NBYTES
    assert LaunchParameter.unpack(data) == parameter
    assert struct.unpack_from("<4Q2I", data) == (*parameter, wire.WIRE_VERSION)
    assert not any(data[40:])


@given(PARAMETERS, st.integers(0, 2**32 - 1).filter(lambda version: version != wire.WIRE_VERSION))
def test_another_version_is_refused(parameter: LaunchParameter, version: int) -> None:
    """A parameter of any other wire version raises ValueError that names both."""
    data = bytearray(parameter.pack())
    struct.pack_into("<I", data, 36, version)
    with pytest.raises(ValueError, match=rf"wire version {version}, not {wire.WIRE_VERSION}"):
        LaunchParameter.unpack(bytes(data))


@given(U64, st.integers(0, 2**56 - 1), st.sampled_from(MapKind))
def test_a_mapped_argument_comes_back(address: int, nbytes: int, kind: MapKind) -> None:
    """A mapped argument is its address and a word with its size and kind."""
    data = wire.map_argument(address, nbytes, kind)
    assert len(data) == 16
    where, extent = struct.unpack("<2Q", data)
    assert where == address
    assert wire.map_extent(extent) == (nbytes, kind)
    assert isinstance(wire.map_extent(extent)[1], MapKind)


@given(st.integers(0, 2**56 - 1), st.integers(4, 255))
def test_an_unknown_map_kind_is_refused(nbytes: int, kind: int) -> None:
    """A mapped argument with a kind that there is not raises ValueError."""
    with pytest.raises(ValueError, match=str(kind)):
        wire.map_extent(nbytes | kind << 56)


@given(st.integers(0, 2**25 - 1), st.sampled_from(Code))
def test_trouble_comes_back(function: int, code: Code) -> None:
    """The word of a call that went wrong unknown to the host says the function and what it was."""
    assert wire.trouble(function + 1 | -code << 32) == (function, code)


def test_no_trouble() -> None:
    """As long as that word is zero, no call went wrong."""
    assert wire.trouble(0) is None


def record(launch: int, code: int, length: int, text: bytes) -> bytes:
    """An abort record as a kernel leaves it."""
    return struct.pack("<Qqq", launch, code, length) + text.ljust(wire.ABORT_NBYTES - 24, b"\0")


@given(
    st.integers(0, wire.LAUNCHES - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.text(st.characters(codec="utf-8")).filter(lambda text: len(text.encode()) <= wire.ABORT_NBYTES - 24),
)
def test_a_message_is_read(launch: int, code: int, text: str) -> None:
    """The message of the launch that gave up: its index, its code and its text."""
    data = text.encode()
    assert wire.abort_message(record(launch + 1, code, len(data), data)) == (launch, code, text)


def test_no_message() -> None:
    """As long as the launch's word is zero there is no message, whatever else is there."""
    assert wire.abort_message(bytes(wire.ABORT_NBYTES)) is None
    assert wire.abort_message(record(0, 3, 4, b"text")) is None


@given(st.integers(-(2**63), 2**63 - 1), st.binary(max_size=wire.ABORT_NBYTES - 24))
def test_a_message_of_any_length_stays_in_its_record(length: int, text: bytes) -> None:
    """A length that cannot be and bytes that are no text are no reason to fail, nor to read on."""
    found = wire.abort_message(record(1, 2, length, text) + b"behind")
    assert found is not None
    shown = text.ljust(wire.ABORT_NBYTES - 24, b"\0")[: max(0, length)]
    assert found == (0, 2, shown.decode(errors="replace"))


# -- functions -----------------------------------------------------------------------------

# Published results of FNV-1a with 32 bits.
FNV1A = {
    "": 0x811C9DC5,
    "a": 0xE40C292C,
    "b": 0xE70C2DE5,
    "foobar": 0xBF9CF968,
}


def folded(value: int) -> int:
    return (value >> 24) ^ (value & 0xFFFFFF) | 0x1000000


@pytest.mark.parametrize(("name", "value"), FNV1A.items())
def test_names_have_known_ids(name: str, value: int) -> None:
    """A name's id is FNV-1a of 32 bits, folded to 24, above all numbers."""
    assert wire.function_id(name) == folded(value)


@given(st.text(st.characters(codec="utf-8")))
def test_names_are_hashed_byte_by_byte(name: str) -> None:
    """Any name has an id that fits the descriptor; it is made of the bytes of its UTF-8, as in C."""
    value = np.uint32(2_166_136_261)
    with np.errstate(over="ignore"):
        for byte in name.encode():
            value = (value ^ np.uint32(byte)) * np.uint32(16_777_619)
    number = wire.function_id(name)
    assert number == folded(int(value))
    assert wire.NUMBERED <= number < 2**25


@given(st.integers(0, wire.NUMBERED - 1))
def test_numbers_are_their_own_ids(number: int) -> None:
    """A number below 2**24 is its own id, which is no name's."""
    assert wire.function_id(number) == wire.function_id(np.int64(number)) == number  # type: ignore[arg-type]  # an integer, too


@pytest.mark.parametrize("number", [-1, -(2**70), wire.NUMBERED, 2**25, 2**70])
def test_numbers_out_of_range(number: int) -> None:
    """Any other number raises ValueError that says the range."""
    with pytest.raises(ValueError, match=f"0 to {2**24 - 1}, not {number}"):
        wire.function_id(number)


@pytest.mark.parametrize("function", [b"f", 1.5, None])
def test_neither_a_name_nor_a_number(function: Any) -> None:
    """A function is text or an integer."""
    with pytest.raises(TypeError, match="name or its number"):
        wire.function_id(function)


# -- where things are ----------------------------------------------------------------------


def check_disjoint(regions: list[tuple[int, int]], nbytes: int) -> None:
    """Regions (start, size) lie one behind the other, all within ``nbytes``."""
    end = 0
    for start, size in sorted(regions):
        assert start >= end
        end = start + size
    assert end <= nbytes


def test_nothing_of_the_shared_block_overlaps() -> None:
    """Tail, message, every launch, slot, cell and payload have memory of their own in the shared block."""
    regions = [(wire.TAIL_OFFSET, 8), (wire.ABORT_OFFSET, wire.ABORT_NBYTES)]
    regions += [(wire.launch_offset(index), NUMBERS["LAUNCH_STRIDE"]) for index in range(wire.LAUNCHES)]
    regions += [(wire.slot_offset(ticket), 16) for ticket in range(wire.RING_SLOTS)]
    regions += [(wire.cell_offset(cell), wire.CELL_DATA + wire.PAYLOAD_NBYTES) for cell in range(wire.CELLS)]
    regions += [(wire.payload_offset(ticket), wire.PAYLOAD_NBYTES) for ticket in range(wire.RING_SLOTS)]
    check_disjoint(regions, wire.SHARED_NBYTES)


def test_nothing_of_a_launch_overlaps() -> None:
    """The words of a launch have places of their own in its block; progress is a pair that one store writes."""
    words = {name: value for name, value in NUMBERS.items() if re.fullmatch("LAUNCH_(?!BITS|SHIFT|STRIDE).*", name)}
    pair = words.pop("LAUNCH_PROGRESS")
    check_disjoint([*((offset, 8) for offset in words.values()), (pair, 16)], NUMBERS["LAUNCH_STRIDE"])
    assert not [name for name, offset in words.items() if offset % 8]
    assert pair % 16 == 0


def test_nothing_of_the_state_overlaps() -> None:
    """The device's counters, bitmaps and tickets have memory of their own in the state block."""
    words = ("HEAD", "POSTS", "TAIL", "REFRESH", "RUNG", "ABORT")
    regions = [(NUMBERS[f"STATE_{name}"], 8) for name in words]
    regions += [(NUMBERS[f"STATE_{name}"], wire.CELLS // 8) for name in ("TAKEN", "LEFT")]
    regions += [(NUMBERS["STATE_TICKETS"], wire.CELLS * 8)]
    check_disjoint(regions, wire.STATE_NBYTES)
    assert not [start for start, _ in regions if start % 8]


@given(TICKETS, st.integers(0, wire.CELLS - 1), st.integers(0, wire.LAUNCHES - 1))
def test_alignment(ticket: int, cell: int, launch: int) -> None:
    """What one instruction reads or writes is aligned to its size, what several share to a cache line."""
    assert wire.slot_offset(ticket) % 16 == 0
    assert wire.payload_offset(ticket) % 16 == 0
    assert wire.cell_offset(cell) % 64 == 0
    assert wire.launch_offset(launch) % 64 == 0
    assert wire.TAIL_OFFSET % 64 == wire.ABORT_OFFSET % 64 == wire.CELL_DATA % 16 == 0


@given(TICKETS)
def test_tickets_of_a_lap_have_slots_of_their_own(ticket: int) -> None:
    """Slot and payload come back after a whole lap, and the next ticket has the next ones."""
    for offset, size in ((wire.slot_offset, 16), (wire.payload_offset, wire.PAYLOAD_NBYTES)):
        assert offset(ticket + wire.RING_SLOTS) == offset(ticket)
        if (ticket + 1) % wire.RING_SLOTS:
            assert offset(ticket + 1) == offset(ticket) + size
        else:
            assert offset(ticket + 1) == offset(0)


def test_a_slot_for_everybody() -> None:
    """Calls under way and posts unread have a slot each, and slots are a power of two."""
    assert wire.RING_SLOTS == wire.CELLS + wire.POSTS
    assert wire.RING_SLOTS & (wire.RING_SLOTS - 1) == 0
