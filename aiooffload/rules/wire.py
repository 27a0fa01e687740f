"""The wire layout of a channel, as the host sees it: descriptors, reply cells, the launch parameter.

The constants are those of ``device/aiooffload_wire.h``, whose comments describe the two blocks of
memory; a test holds one against the other. Nothing here touches memory: words go in, values come
out, and the other way round.
"""

from __future__ import annotations

import enum
import operator
import struct
from typing import Final, NamedTuple

import numpy as np

__all__ = [
    "CELLS",
    "LAUNCHES",
    "NO_CELL",
    "PARAMETER_NBYTES",
    "PAYLOAD_NBYTES",
    "POSTS",
    "RING_SLOTS",
    "SHARED_NBYTES",
    "STATE_NBYTES",
    "WIRE_VERSION",
    "Code",
    "Descriptor",
    "Form",
    "Kind",
    "LaunchParameter",
    "MapKind",
    "Reply",
    "Status",
    "abort_message",
    "cell_offset",
    "function_id",
    "kind_of",
    "launch_offset",
    "map_argument",
    "map_extent",
    "payload_offset",
    "slot_offset",
    "tag_of",
    "trouble",
]

WIRE_VERSION: Final = 2

CELLS: Final = 16_384
"""Calls under way at a time; a call that finds no free cell waits for one."""
POSTS: Final = 16_384
"""Posts that the host has not read yet; a post beyond waits."""
RING_SLOTS: Final = CELLS + POSTS
LAUNCHES: Final = 1024
PAYLOAD_NBYTES: Final = 256
INLINE_NBYTES: Final = 8
NO_CELL: Final = 0x7FFF
PARAMETER_NBYTES: Final = 64

SHARED_NBYTES: Final = 14_225_408
STATE_NBYTES: Final = 136_192

TAIL_OFFSET: Final = 0
ABORT_OFFSET: Final = 128
ABORT_NBYTES: Final = 384
_ABORT_TEXT: Final = 24
_LAUNCHES_OFFSET: Final = 4096
_RING_OFFSET: Final = 69_632
_CELLS_OFFSET: Final = 593_920
_PAYLOADS_OFFSET: Final = 5_836_800
_LAUNCH_STRIDE: Final = 64
_CELL_STRIDE: Final = 320
CELL_DATA: Final = 64

LAUNCH_CANCEL: Final = 0
LAUNCH_SEEN: Final = 8
LAUNCH_TROUBLE: Final = 16
LAUNCH_GIVEN_UP: Final = 24
LAUNCH_PROGRESS: Final = 32
LAUNCH_END: Final = 48

STATE_HEAD: Final = 0

_FUNCTION_BITS: Final = 25
_LAUNCH_BITS: Final = 10
_CELL_BITS: Final = 15
_FORM_BITS: Final = 4
_TAG_BITS: Final = 10
_LAUNCH_SHIFT: Final = _FUNCTION_BITS
_CELL_SHIFT: Final = _LAUNCH_SHIFT + _LAUNCH_BITS
_FORM_SHIFT: Final = _CELL_SHIFT + _CELL_BITS
_TAG_SHIFT: Final = _FORM_SHIFT + _FORM_BITS

_KIND_SHIFT: Final = 10
_STATUS_SHIFT: Final = 13
_TICKET_SHIFT: Final = 16
_WORD: Final = (1 << 64) - 1
_MAP_SHIFT: Final = 56

NUMBERED: Final = 1 << 24
"""Function ids below are numbers given by hand, those from here on are made of names."""


class Status(enum.IntEnum):
    """How a call ended, as the kernel sees it."""

    OK = 0
    ERROR = 1
    CANCELLED = 2
    TIMEOUT = 3


class Code(enum.IntEnum):
    """What is wrong where the status is ERROR; a handler's own codes are positive."""

    RAISED = -1
    UNKNOWN_FUNCTION = -2
    TOO_LARGE = -3
    WRONG_ARGUMENTS = -4
    WRONG_REPLY = -5
    NO_ANSWER = -6


class Kind(enum.IntEnum):
    """What a result is made of; its size says the rest."""

    NONE = 0
    BOOL = 1
    INT = 2
    UINT = 3
    FLOAT = 4
    COMPLEX = 5
    STRUCT = 6


class Form(enum.IntEnum):
    """Where the arguments are; 0 to 8 are so many bytes in the descriptor itself."""

    PAYLOAD = 9
    ROWS = 10


class MapKind(enum.IntEnum):
    """What is copied of a mapped argument: the map types of OpenMP (5.2, section 5.8.3)."""

    ALLOC = 0
    TO = 1
    FROM = 2
    TOFROM = 3


_KINDS: Final = {"b": Kind.BOOL, "i": Kind.INT, "u": Kind.UINT, "f": Kind.FLOAT, "c": Kind.COMPLEX}


def kind_of(dtype: np.dtype[np.generic] | None) -> Kind:
    """Return the kind of a result of ``dtype``; None is no result."""
    return Kind.NONE if dtype is None else _KINDS.get(dtype.kind, Kind.STRUCT)


def function_id(function: str | int) -> int:
    """Return the id of a name (as ``ao::fn`` makes it), or of a number below 2**24, which it is itself.

    FNV-1a with 32 bits (Fowler, Noll and Vo; RFC 9923), folded to 24, with bit 24 set.
    Raises ValueError for a number out of range, TypeError for what is neither.
    """
    if not isinstance(function, str):
        try:
            number = operator.index(function)
        except TypeError:
            raise TypeError(f"a host function is called by its name or its number, not by {function!r}") from None
        if not 0 <= number < NUMBERED:
            raise ValueError(f"a function's number is 0 to {NUMBERED - 1}, not {function}")
        return number
    value = 2_166_136_261
    for byte in function.encode():
        value = ((value ^ byte) * 16_777_619) & 0xFFFFFFFF
    return ((value ^ (value >> 24)) & 0xFFFFFF) | NUMBERED


def tag_of(ticket: int) -> int:
    """Return the tag that makes the descriptor of ``ticket`` valid; never that of the lap before."""
    return (ticket // RING_SLOTS + 1) % (1 << _TAG_BITS)


def slot_offset(ticket: int) -> int:
    """Return where the descriptor of ``ticket`` is in the shared block."""
    return _RING_OFFSET + ticket % RING_SLOTS * 16


def payload_offset(ticket: int) -> int:
    """Return where the payload of ``ticket`` is in the shared block."""
    return _PAYLOADS_OFFSET + ticket % RING_SLOTS * PAYLOAD_NBYTES


def cell_offset(cell: int) -> int:
    """Return where reply cell ``cell`` is in the shared block."""
    return _CELLS_OFFSET + cell * _CELL_STRIDE


def launch_offset(launch: int) -> int:
    """Return where the block of launch ``launch`` is in the shared block."""
    return _LAUNCHES_OFFSET + launch * _LAUNCH_STRIDE


class Descriptor(NamedTuple):
    """A request: two 64-bit words in the ring."""

    ticket: int
    function: int
    launch: int
    cell: int
    """``NO_CELL`` for a post."""
    form: int
    """A number of bytes up to 8, or a ``Form``."""
    argument: int
    """The arguments themselves, or ``nbytes | rows << 16`` of those in the payload."""

    def pack(self) -> tuple[int, int]:
        """Return (argument, control)."""
        control = (
            self.function
            | self.launch << _LAUNCH_SHIFT
            | self.cell << _CELL_SHIFT
            | self.form << _FORM_SHIFT
            | tag_of(self.ticket) << _TAG_SHIFT
        )
        return self.argument, control

    @classmethod
    def unpack(cls, ticket: int, argument: int, control: int) -> Descriptor | None:
        """Return the request of ``ticket``, or None if that is not published yet."""
        if control >> _TAG_SHIFT != tag_of(ticket):
            return None
        return cls(
            ticket,
            control & ((1 << _FUNCTION_BITS) - 1),
            control >> _LAUNCH_SHIFT & ((1 << _LAUNCH_BITS) - 1),
            control >> _CELL_SHIFT & ((1 << _CELL_BITS) - 1),
            control >> _FORM_SHIFT & ((1 << _FORM_BITS) - 1),
            argument,
        )

    @property
    def extent(self) -> tuple[int, int]:
        """(bytes, rows) of the arguments."""
        if self.form <= INLINE_NBYTES:
            return self.form, 1
        return self.argument & 0xFFFF, self.argument >> 16

    @property
    def sound(self) -> bool:
        """Whether it can be what a kernel wrote: fields in range, the payload within its area."""
        if self.cell >= CELLS and self.cell != NO_CELL:
            return False
        nbytes, rows = self.extent
        if self.form <= INLINE_NBYTES:
            return True
        if self.form == Form.PAYLOAD:
            return rows == 1 and nbytes <= PAYLOAD_NBYTES
        return self.form == Form.ROWS and 1 <= rows <= 32 and nbytes <= PAYLOAD_NBYTES and nbytes % rows == 0


class Reply(NamedTuple):
    """The control word of a reply cell."""

    ticket: int
    status: int
    kind: int
    nbytes: int

    def pack(self) -> int:
        """Return the word."""
        head = self.nbytes | self.kind << _KIND_SHIFT | self.status << _STATUS_SHIFT
        return (head | (self.ticket + 1) << _TICKET_SHIFT) & _WORD

    @classmethod
    def unpack(cls, word: int) -> Reply:
        """Return what the word says; the ticket is -1 in a cell that was never used."""
        return cls((word >> _TICKET_SHIFT) - 1, word >> _STATUS_SHIFT & 7, word >> _KIND_SHIFT & 7, word & 1023)


class LaunchParameter(NamedTuple):
    """A kernel's first parameter, ``ao::Launch``."""

    shared: int
    """Device address of the shared block."""
    state: int
    """Device address of the state block."""
    bell: int
    """Device address of the bell."""
    timeout_ns: int
    launch: int

    def pack(self) -> bytes:
        """Return its bytes."""
        return struct.pack("<4Q2I24x", *self[:4], self.launch, WIRE_VERSION)

    @classmethod
    def unpack(cls, data: bytes) -> LaunchParameter:
        """Read it back; raises ValueError for another version."""
        *fields, version = struct.unpack("<4Q2I24x", data)
        if version != WIRE_VERSION:
            raise ValueError(f"the launch parameter has wire version {version}, not {WIRE_VERSION}")
        return cls(*fields)


def map_argument(address: int, nbytes: int, kind: MapKind) -> bytes:
    """Return the 16 bytes of a mapped argument."""
    return struct.pack("<2Q", address, nbytes | kind << _MAP_SHIFT)


def map_extent(extent: int) -> tuple[int, MapKind]:
    """Return (bytes, kind) from the second word of a mapped argument; raises ValueError for an unknown kind."""
    return extent & ((1 << _MAP_SHIFT) - 1), MapKind(extent >> _MAP_SHIFT)


def trouble(word: int) -> tuple[int, Code] | None:
    """Return (function, code) of a call that went wrong unknown to the host, or None."""
    if word == 0:
        return None
    code = -(word >> 32)
    return (word & 0xFFFFFFFF) - 1, Code(code) if code in set(Code) else Code.RAISED


def abort_message(shared: bytes) -> tuple[int, int, str] | None:
    """Return (launch, code, text) from the abort record (``ABORT_NBYTES`` bytes), or None if there is none."""
    launch, code, length = struct.unpack_from("<Qqq", shared)
    if launch == 0:
        return None
    text = shared[_ABORT_TEXT : _ABORT_TEXT + max(0, min(length, ABORT_NBYTES - _ABORT_TEXT))]
    return launch - 1, code, text.decode(errors="replace")
