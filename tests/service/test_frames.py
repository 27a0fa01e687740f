"""What front and device process say to each other."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload.service.frames import BrokenFrame, Decoder, cut, encode

KEYS = st.text(max_size=5).filter(lambda key: key not in ("kind", "sizes"))  # which are the frame's own
MESSAGES = st.lists(st.tuples(st.dictionaries(KEYS, st.integers(-9, 9), max_size=3), st.lists(st.binary(max_size=50))))


@given(MESSAGES, st.lists(st.integers(1, 60)))
def test_round_trip_however_it_is_cut(messages: list[tuple[dict[str, Any], list[bytes]]], sizes: list[int]) -> None:
    """What is encoded is decoded, whatever pieces the stream comes in."""
    stream = b"".join(b"".join(encode({"kind": "k", **message}, data)) for message, data in messages)
    decoder, found, at = Decoder(), [], 0
    for size in [*sizes, len(stream)]:
        found += decoder.feed(stream[at : at + size])
        at += size
    expected = [
        ({"kind": "k", **message} | ({"sizes": list(map(len, data))} if data else {}), data)
        for message, data in messages
    ]
    assert [(message, list(map(bytes, cut(message, data)))) for message, data in found] == expected


def test_data_stays_valid() -> None:
    """Data of a frame is not touched by what is fed later."""
    decoder = Decoder()
    [(_, first)] = decoder.feed(b"".join(encode({"kind": "k"}, [b"first"])))
    decoder.feed(b"".join(encode({"kind": "k"}, [b"other"])))
    assert bytes(first) == b"first"


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("<IQ", 1 << 31, 0),
        struct.pack("<IQ", 2, 1 << 60),
        struct.pack("<IQ", 2, 0) + b"{]",
        struct.pack("<IQ", 2, 0) + b"[]",
        struct.pack("<IQ", 2, 0) + b"{}",
        struct.pack("<IQ", 10, 0) + b'{"kind":1}',
    ],
)
def test_nonsense_is_recognised(stream: bytes) -> None:
    """Bytes that are no frame raise, and ask for no memory."""
    with pytest.raises(BrokenFrame):
        Decoder().feed(stream)


@given(st.binary(max_size=100))
def test_any_bytes(stream: bytes) -> None:
    """Any bytes give frames, wait for more, or raise BrokenFrame."""
    try:
        frames = Decoder().feed(stream)
    except BrokenFrame:
        return
    assert all("kind" in message for message, _ in frames)
