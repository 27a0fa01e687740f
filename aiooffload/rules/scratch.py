"""Which workspace block a launch gets, and how long the block is kept afterwards.

A lane runs in order, so all its launches may use one block: each lane has one that fits what it was asked for
so far, and reuses it whether or not the launches before are done. A launch whose kernel calls host functions is
not done with its kernel: what it posted may still map the block, so the next one gets another. Requests above
``keep_nbytes`` share another one, which goes when nothing in flight uses it. So does a block that was too small
and has a successor.

What nothing uses is *idle*. It is kept up to a bound for all lanes together (the one that was idle longest goes
first), for so long, and until memory runs out. The idea is libgomp's soft-stack cache, without its device-wide
synchronisation on growing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Generic, NamedTuple, TypeVar

__all__ = ["ALIGNMENT", "Decision", "ScratchPolicy", "aligned"]

ALIGNMENT: Final = 256
"""What every piece of scratch is aligned to, in bytes."""

_B = TypeVar("_B")


def aligned(nbytes: int) -> int:
    """Return the next multiple of the alignment."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Decision(NamedTuple, Generic[_B]):
    """What to do for a launch."""

    block: _B | None
    """The block to use; None: free ``free``, allocate ``nbytes`` and tell :meth:`ScratchPolicy.allocated`."""
    nbytes: int = 0
    free: tuple[_B, ...] = ()


class _Slot(Generic[_B]):
    __slots__ = ("block", "idle_since_ns", "key", "nbytes", "uses")

    def __init__(self, block: _B, nbytes: int, key: tuple[int, bool]) -> None:
        self.block: Final = block
        self.nbytes: Final = nbytes
        # Its place among the current ones: lane, and whether it is too large to be kept.
        self.key: Final = key
        # Launches that were given it and are not done.
        self.uses = 0
        self.idle_since_ns = 0


class ScratchPolicy(Generic[_B]):
    """The blocks of all lanes of a device. Events go in, decisions come out.

    Parameters
    ----------
    keep_nbytes
        The largest block that is kept while nothing uses it.
    total_nbytes
        What is kept so, of all lanes together, at most.
    idle_ns
        How long.
    """

    def __init__(self, keep_nbytes: int, total_nbytes: int, idle_ns: int) -> None:
        self._keep_nbytes = keep_nbytes
        self._total_nbytes = total_nbytes
        self._idle_ns = idle_ns
        # Every block that was allocated and not given up for freeing.
        self._slots: dict[_B, _Slot[_B]] = {}
        # Those that the next launch of a lane may get.
        self._current: dict[tuple[int, bool], _Slot[_B]] = {}
        # Those of them that nothing uses, longest idle first; `idle_nbytes` is their sum, never above the bound.
        self._idle: dict[_B, _Slot[_B]] = {}
        self.idle_nbytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def want(self, lane: int, nbytes: int, alone: bool = False) -> Decision[_B]:
        """A launch on ``lane`` is about to be enqueued; ``alone``: the lane's order does not end the uses before."""
        slot = self._current.get((lane, nbytes > self._keep_nbytes))
        if slot is not None and slot.nbytes >= nbytes and not (alone and slot.uses):
            self._use(slot)
            return Decision(slot.block)
        return Decision(None, self._rounded(nbytes), self._outgrown(slot))

    def _outgrown(self, slot: _Slot[_B] | None) -> tuple[_B, ...]:
        if slot is None:
            return ()
        if not slot.uses:
            return (self._forget(slot),)
        del self._current[slot.key]  # the last launch that uses it frees it
        return ()

    def _rounded(self, nbytes: int) -> int:
        """Round up by an eighth at most, so that sizes that creep up do not allocate each time."""
        if nbytes > self._keep_nbytes:
            return aligned(nbytes)
        step = max(1 << max(nbytes.bit_length() - 4, 0), ALIGNMENT)
        return min(-(-max(nbytes, 1) // step) * step, self._keep_nbytes)

    def allocated(self, lane: int, block: _B, nbytes: int) -> None:
        """What :meth:`want` asked for is there, and the launch uses it."""
        slot = _Slot(block, nbytes, (lane, nbytes > self._keep_nbytes))
        slot.uses = 1
        self._slots[block] = self._current[slot.key] = slot

    def _use(self, slot: _Slot[_B]) -> None:
        slot.uses += 1
        if self._idle.pop(slot.block, None) is not None:
            self.idle_nbytes -= slot.nbytes

    def done(self, block: _B, now_ns: int) -> list[_B]:
        """A launch that used ``block`` is done; return what to free."""
        slot = self._slots[block]
        slot.uses -= 1
        if slot.uses:
            return []
        if slot.nbytes > self._keep_nbytes or self._current.get(slot.key) is not slot:
            return [self._forget(slot)]
        slot.idle_since_ns = now_ns
        self._idle[block] = slot
        self.idle_nbytes += slot.nbytes
        return self._give_up(lambda _: self.idle_nbytes > self._total_nbytes)

    def expire(self, now_ns: int) -> list[_B]:
        """Return what has been idle long enough to be freed."""
        return self._give_up(lambda slot: now_ns - slot.idle_since_ns >= self._idle_ns)

    def out_of_memory(self) -> list[_B]:
        """Return everything idle, to be freed."""
        return self._give_up(lambda _: True)

    @property
    def due_ns(self) -> int | None:
        """When :meth:`expire` has something to do; None while nothing is idle."""
        first = next(iter(self._idle.values()), None)
        return None if first is None else first.idle_since_ns + self._idle_ns

    def _give_up(self, condition: Callable[[_Slot[_B]], bool]) -> list[_B]:
        """Forget idle blocks, longest idle first, while ``condition`` holds of the first."""
        free = []
        while self._idle and condition(slot := next(iter(self._idle.values()))):
            free.append(self._forget(slot))
        return free

    def _forget(self, slot: _Slot[_B]) -> _B:
        del self._slots[slot.block]
        if self._current.get(slot.key) is slot:
            del self._current[slot.key]
        if self._idle.pop(slot.block, None) is not None:
            self.idle_nbytes -= slot.nbytes
        return slot.block
