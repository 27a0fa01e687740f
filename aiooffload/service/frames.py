"""What the front and a device process say to each other, as bytes.

A frame is a JSON object and any number of bytes behind it, so nothing that a client sent is ever executed or
unpickled. Pure; the invariants of the conversation:

* The front sends ``configure`` first; the device process answers with one ``ready`` or one ``failed``.
* Then the front sends ``call`` and ``cancel``, and each call gets exactly one ``result`` or ``error``, in any order,
  unless the connection ends first. ``progress`` of a call comes before its end.
* The device process sends ``beat`` at a steady rate, and ``lost`` at most once, as its last.
* ``stop`` is the front's last; what was called is still answered, then the device process closes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final

import orjson

from aiooffload.service.tensors import Data

__all__ = ["BrokenFrame", "Decoder", "cut", "encode"]

_HEAD: Final = struct.Struct("<IQ")
MOST_JSON: Final = 1 << 28
MOST_DATA: Final = 1 << 40


class BrokenFrame(Exception):
    """The bytes are no frame: the other side is broken, and so is the connection."""


def encode(message: dict[str, Any], data: Sequence[Data] = ()) -> list[Data]:
    """Return the pieces of a frame, to be written one behind the other; the sizes of ``data`` go into ``sizes``."""
    if data:
        message["sizes"] = [len(piece) for piece in data]
    text = orjson.dumps(message)
    return [_HEAD.pack(len(text), sum(map(len, data))) + text, *data]


def cut(message: dict[str, Any], data: memoryview) -> list[memoryview]:
    """Return the pieces of data that came with a message."""
    pieces, at = [], 0
    for size in message.get("sizes", ()):
        pieces.append(data[at : at + size])
        at += size
    return pieces


class Decoder:
    """Makes frames of a stream of bytes, however it is cut."""

    def __init__(self) -> None:
        self._buffer = bytearray()  # the beginning of a frame, never a whole one

    def feed(self, chunk: Data) -> list[tuple[dict[str, Any], memoryview]]:
        """Take some bytes and return the frames that are complete; their data stays valid.

        Raises
        ------
        BrokenFrame
            They are no frames. Nothing can be fed any more.
        """
        self._buffer += chunk
        frames = []
        at, there = 0, len(self._buffer)
        with memoryview(self._buffer) as view:
            while there - at >= _HEAD.size:
                json_nbytes, data_nbytes = _HEAD.unpack_from(view, at)
                if json_nbytes > MOST_JSON or data_nbytes > MOST_DATA:
                    raise BrokenFrame(f"a frame claims {json_nbytes} and {data_nbytes} bytes")
                start = at + _HEAD.size
                middle = start + json_nbytes
                end = middle + data_nbytes
                if there < end:
                    break
                frames.append((_message(bytes(view[start:middle])), memoryview(bytes(view[middle:end]))))
                at = end
        del self._buffer[:at]
        return frames


def _message(text: bytes) -> dict[str, Any]:
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise BrokenFrame(f"a frame's head is not JSON: {error}") from None
    if type(message) is not dict or type(message.get("kind")) is not str:
        raise BrokenFrame("a frame's head has no kind")
    return message
