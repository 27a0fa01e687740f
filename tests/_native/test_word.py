"""``word.c``: 64-bit words that the host shares with a device."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiooffload._native import Word

U64 = st.integers(0, 2**64 - 1)


class Memory:
    """Memory that can be watched going away."""

    def __init__(self) -> None:
        self.box = ctypes.c_uint64()
        self.address = ctypes.addressof(self.box)
        self.word: Word | None = None


def make(owner: Memory) -> Word:
    return Word(owner.address, owner.address, owner)


@given(U64)
def test_a_store_is_loaded_and_seen_by_others(value: int) -> None:
    """What is stored comes back, all 64 bits of it, and stands in the memory."""
    memory = Memory()
    word = make(memory)
    word.store(value)
    assert (word.load(), memory.box.value) == (value, value)


@given(U64)
def test_a_load_sees_what_others_wrote(value: int) -> None:
    """The device's side is ordinary memory: a write to it is what the next load returns."""
    memory = Memory()
    word = make(memory)
    memory.box.value = value
    assert word.load() == value


@given(st.integers(-(2**70), 2**70))
def test_a_store_wraps_at_64_bits(value: int) -> None:
    """Sequence numbers wrap, so a store takes any integer modulo 2**64."""
    word = make(Memory())
    word.store(value)
    assert word.load() == value % 2**64


def test_it_says_its_addresses() -> None:
    """The two addresses are those given; they may differ, and the device's may be 0."""
    memory = Memory()
    word = Word(memory.address, 0x7000_0000_1000, memory)
    assert (word.host_address, word.device_address) == (memory.address, 0x7000_0000_1000)
    assert Word(memory.address, 0, memory).device_address == 0


@pytest.mark.parametrize(("host", "device"), [(0, 8), (4, 8), (8, 4), (9, 8), (8, 1)])
def test_addresses_are_aligned_and_there(host: int, device: int) -> None:
    """An address that is no multiple of 8, or no memory of the host at all, is refused."""
    with pytest.raises(ValueError, match="multiples of 8"):
        Word(host, device, None)


@pytest.mark.parametrize("arguments", [(), (8,), (8, 8), ("8", 8, None), (8, None, None)])
def test_wrong_arguments_are_type_errors(arguments: tuple[Any, ...]) -> None:
    """A missing argument or an address that is no integer raises TypeError."""
    with pytest.raises(TypeError):
        Word(*arguments)


@pytest.mark.parametrize("value", [None, "1", 1.0])
def test_only_integers_are_stored(value: Any) -> None:
    """Storing anything but an integer raises TypeError and leaves the word as it was."""
    word = make(Memory())
    word.store(7)
    with pytest.raises(TypeError):
        word.store(value)
    assert word.load() == 7


def test_addresses_cannot_be_moved() -> None:
    """The addresses are read-only: the driver was told them."""
    word = make(Memory())
    with pytest.raises(AttributeError):
        word.host_address = 8  # type: ignore[misc]


def test_the_owner_lives_as_long_as_the_word() -> None:
    """The memory behind a word stays until the word is gone, and no longer."""
    memory = Memory()
    word, watched = make(memory), weakref.ref(memory)
    del memory
    word.store(5)
    assert watched() is not None
    del word
    assert watched() is None


def test_it_holds_its_owner_once() -> None:
    """A word holds one reference to its owner and gives it back."""
    memory = Memory()
    before = sys.getrefcount(memory)
    words = [make(memory) for _ in range(10)]
    assert sys.getrefcount(memory) == before + 10
    del words
    assert sys.getrefcount(memory) == before


def test_a_refused_word_holds_nothing() -> None:
    """A constructor that raises gives back the owner."""
    memory = Memory()
    before = sys.getrefcount(memory)
    with pytest.raises(ValueError, match="multiples"):
        Word(memory.address + 4, 0, memory)
    assert sys.getrefcount(memory) == before


def test_a_cycle_with_its_owner_is_collected() -> None:
    """A word that its own owner holds goes with the next collection."""
    memory = Memory()
    memory.word = make(memory)
    watched = weakref.ref(memory)
    del memory
    gc.collect()
    assert watched() is None
