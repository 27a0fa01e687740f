"""A device that fails on demand: it stands between an Offload and a driver's device.

Everything is passed on, past a plan that says which call goes wrong. What a driver promises is watched meanwhile:
freed memory is poisoned, kept, and must be neither copied from nor written, and nobody calls a driver that has said
that its device is lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from aiooffload.drivers import open_device
from aiooffload.errors import DeviceLostError, DriverError
from aiooffload.rules import wire
from aiooffload.testing.memory import Freed
from aiooffload.testing.plan import Plan
from aiooffload.testing.streams import FaultyEvent, FaultyFunction, FaultyStream, MarkEffect, inner_of

if TYPE_CHECKING:
    from aiooffload._native import Word
    from aiooffload.drivers.api import (
        Block,
        Compiled,
        Device,
        DeviceProperties,
        Event,
        Function,
        KernelSource,
        RegisteredMemory,
        Stream,
        TimedEvent,
    )

__all__ = ["ALLOCATIONS", "ENQUEUES", "FaultyDevice"]

_T = TypeVar("_T")
Failure: TypeAlias = "type[DriverError] | Callable[[], BaseException]"

ENQUEUES: Final = frozenset(
    f"enqueue_{what}"
    for what in (
        *("kernel", "mark", "write", "wait", "wake", "copy", "copy_box", "fill", "record", "wait_event"),
        *("rows", "graph"),
    )
)
"""Calls that put something on a stream."""
ALLOCATIONS: Final = frozenset({"allocate", "register", "create_stream", "create_event", "create_timed_event"})
"""Calls that make something which has to be given back."""
_GIVING_BACK: Final = frozenset({"free", "unregister", "close_stream", "close_event", "close"})
_FRESH: Final = 0xCD
_GATES: Final = 64
_WORD_NBYTES: Final = 8


class FaultyDevice:
    """A device whose calls fail, whose completions are late or missing, or that is lost, as a test says.

    Calls are named as in :mod:`aiooffload.drivers.api` (``allocate``, ``enqueue_copy``, ``query``, ...), except
    ``close_stream``, ``close_event``, ``query_event``, ``elapsed``, ``enqueue_rows`` and ``enqueue_graph``.

    Parameters
    ----------
    inner
        The device, or its label: ``"host"`` (default), ``"cuda:0"``. It is closed with this one.

    Attributes
    ----------
    injected
        Every error that was raised on demand, in order.
    problems
        What nobody may do and somebody did, in words: use of freed memory, calls after a loss.
    lost
        Whether it was lost: from then on every call raises DeviceLostError and does nothing.

    Notes
    -----
    *Giving back.* A planned failure of a call that gives something back (``free``, ``unregister``, closing) is
    raised once that is done, as CUDA's such calls report errors of earlier work. Any other failed call does nothing.
    *Marks.* A completion is what ``enqueue_mark``, or ``enqueue_kernel`` with a sequence, enqueues.
    *Freed memory* is filled with 0xDD and kept until the device is closed, new memory is filled with 0xCD, where the
    host can touch it.
    """

    def __init__(self, inner: Device | str = "host") -> None:
        self.inner: Final = open_device(inner) if isinstance(inner, str) else inner
        self.injected: list[BaseException] = []
        self.problems: list[str] = []
        self.lost = False
        self.closed = False
        self._plan: Plan[_Effect] = Plan()
        self._marks: Plan[MarkEffect] = Plan()
        # The threads that were told of the loss, and should know better from then on.
        self._told: set[int] = set()
        self._freed = Freed(self.problems)
        # What was made and not given back.
        self._blocks: dict[int, Block] = {}
        self._registered: dict[int, RegisteredMemory] = {}
        self.handles: set[FaultyStream | FaultyEvent] = set()
        # Words that streams wait for with a mark behind them, in memory of this device's own.
        self._gates: RegisteredMemory | None = None
        self._delayed = 0
        self._torn: dict[int, tuple[int, int]] = {}
        # The eventfds that streams were to write, each with a duplicate: the number may be another's by the end.
        self._wakes: dict[int, int] = {}
        self.dropped = 0

    # -- what is to go wrong ---------------------------------------------------------------

    def fail(
        self,
        calls: str | Collection[str] | None = None,
        error: Failure = DriverError,
        *,
        at: int = 1,
        times: int = 1,
    ) -> None:
        """Let a call to come raise an error.

        Parameters
        ----------
        calls
            Name of a call, or several; None is any.
        error
            A class of :class:`~aiooffload.errors.DriverError`, or what returns the exception. DeviceLostError
            loses the device.
        at
            Which of those calls, counted from now, at least 1.
        times
            How many in a row fail, at least 1.
        """
        self._plan.add(partial(self._raise, error), calls, at, times)

    def skip(self, calls: str | Collection[str], *, at: int = 1, times: int = 1) -> None:
        """Let a call to come do nothing and seem to succeed: a driver that lies. Parameters as for :meth:`fail`."""
        self._plan.add(_skip, calls, at, times)

    def lose(self, calls: str | Collection[str] | None = None, *, at: int = 0) -> None:
        """Lose the device now, or with the ``at``-th of ``calls`` from now.

        What is on its streams still runs; no call is taken any more.
        """
        if at:
            self.fail(calls, DeviceLostError, at=at)
        else:
            self.lost = True

    def drop(self, *, at: int = 1, times: int = 1) -> None:
        """Let the ``at``-th completion from now never arrive; a later one of the same lane stands for it, too."""
        self._marks.add(FaultyStream.drop_mark, None, at, times)

    def delay(self, *, at: int = 1, times: int = 1) -> None:
        """Hold back the ``at``-th completion from now, and what follows it on its lane, until :meth:`release`."""
        self._marks.add(FaultyStream.delay_mark, None, at, times)

    def release(self) -> None:
        """Let every delayed completion arrive."""
        if self._gates is not None:
            for offset in range(0, min(_WORD_NBYTES * self._delayed, self._gates.nbytes), _WORD_NBYTES):
                self._gates.word(offset).store(1)

    def tear(self, ticket: int, descriptor: tuple[int, int] | None = None) -> None:
        """Put a descriptor that no kernel wrote into the ring of calls, where the host will read it.

        Parameters
        ----------
        ticket
            Which request, counted from 0 over the life of the Offload: the host reads this instead, and never sees
            the kernel's own, whose call then ends by its deadline.
        descriptor
            (argument, control), see :class:`aiooffload.rules.wire.Descriptor`; by default one that is published
            and makes no sense.
        """
        if descriptor is None:
            descriptor = wire.Descriptor(ticket, 0, 0, 0, wire.Form.ROWS, 0xFFFF_FFFF).pack()
        self._torn[ticket] = descriptor
        for memory in self._registered.values():
            self._tear_in(memory)

    def heal(self) -> None:
        """Let everything go well from now on, except what is lost."""
        self._plan.clear()
        self._marks.clear()

    @property
    def calls(self) -> int:
        """How many calls were made that could have failed."""
        return self._plan.calls

    @property
    def marks(self) -> int:
        """How many completions were enqueued, or should have been."""
        return self._marks.calls

    @property
    def delayed(self) -> int:
        """How many completions were held back, ever."""
        return self._delayed

    def left(self) -> dict[str, int]:
        """Return what was made and not given back, by kind; empty if there is nothing."""
        made = {
            "blocks": len(self._blocks),
            "registered": len(self._registered),
            "streams": len(self._of(FaultyStream)),
            "events": len(self._of(FaultyEvent)),
        }
        return {kind: count for kind, count in made.items() if count}

    def _of(self, kind: type[_T]) -> list[_T]:
        """Return the open handles of a kind."""
        return [handle for handle in self.handles if isinstance(handle, kind)]

    def bury(self) -> None:
        """Clear away what a loss or a deadline leaves on purpose; after a real fault only the end of the process does.

        What streams wait for is released, they run out, and everything is given back. A kernel that does not end
        holds it up. *Thread:* any; the Offload must be through with the device.
        """
        if self.closed:
            return
        self.release()
        wakes = {descriptor: _eventfd_id(copy) for descriptor, copy in self._wakes.items()}
        for stream in self._of(FaultyStream):
            stream.let_go()
            stream.give_back()
        for memory in list(self._registered.values()):
            self._unregister(memory)  # waits until everything is idle
        for event in self._of(FaultyEvent):
            event.give_back()
        for block in list(self._blocks.values()):
            self._free(block)
        self._close_inner()
        for descriptor, identity in wakes.items():
            if identity is not None and _eventfd_id(descriptor) == identity:
                os.close(descriptor)

    # -- passing on ------------------------------------------------------------------------

    def attempt(self, name: str, call: Callable[[], _T]) -> _T:
        """Make a call, unless the plan has something else in mind."""
        if self.lost:
            raise self._loss(name)
        effect = self._plan.take(name)
        if effect is None:
            return call()
        if name in _GIVING_BACK:
            call()
        return effect(name)  # type: ignore[no-any-return]  # what an effect gives is for its call to know

    def _raise(self, failure: Failure, name: str) -> Any:
        error = failure() if not isinstance(failure, type) else failure(f"{name} failed on demand", **_what(name))
        self.injected.append(error)
        if isinstance(error, DeviceLostError):
            self.lost = True
            self._told.add(threading.get_ident())
        raise error

    def _loss(self, name: str) -> DeviceLostError:
        """Return what every call gets once the device is lost; whoever got it before should not have called."""
        thread = threading.get_ident()
        if thread in self._told:
            self.problems.append(f"{name} was called after the device was lost")
        self._told.add(thread)
        error = DeviceLostError(f"{name}: the device was lost on demand", **_what(name))
        self.injected.append(error)
        return error

    # -- the contract: streams and events --------------------------------------------------

    @property
    def properties(self) -> DeviceProperties:
        """What the inner device can do."""
        return self.inner.properties

    @property
    def handle(self) -> int:
        """That of the inner device."""
        return self.inner.handle

    def create_stream(self, priority: int = 0) -> Stream:
        """Create a stream."""
        return self.attempt("create_stream", lambda: FaultyStream(self, self.inner.create_stream(priority)))

    def adopt_stream(self, handle: int) -> Stream:
        """Use a stream of somebody else."""
        return self.attempt("adopt_stream", lambda: FaultyStream(self, self.inner.adopt_stream(handle)))

    def current(self) -> AbstractContextManager[None]:
        """Enter the inner device."""
        return self.inner.current()

    def replay(self, graph: Any) -> Callable[[Stream], None]:
        """Return what enqueues a replay."""
        enqueue = self.inner.replay(graph)
        return lambda stream: self.attempt("enqueue_graph", lambda: enqueue(inner_of(stream)))

    def create_event(self) -> Event:
        """Create an event."""
        return self.attempt("create_event", lambda: FaultyEvent(self, self.inner.create_event()))

    def create_timed_event(self) -> TimedEvent:
        """Create an event with timing."""
        return self.attempt("create_timed_event", lambda: FaultyEvent(self, self.inner.create_timed_event()))

    # -- the contract: memory --------------------------------------------------------------

    def use_allocator(self, resource: object) -> None:
        """Allocate from the program's ``resource``."""
        self.attempt("use_allocator", lambda: self.inner.use_allocator(resource))

    def allocate(self, nbytes: int) -> Block:
        """Allocate memory that is filled with 0xCD."""
        block = self.attempt("allocate", lambda: self.inner.allocate(nbytes))
        if block.host_array is not None:
            block.host_array.fill(_FRESH)
        self._blocks[id(block)] = block
        return block

    def free(self, block: Block) -> None:
        """Free a block, and poison it."""
        if self._blocks.get(id(block)) is not block:
            self.problems.append(f"a block of {block.nbytes} bytes was freed that is none of this device's")
            return
        self.attempt("free", lambda: self._free(block))

    def _free(self, block: Block) -> None:
        del self._blocks[id(block)]
        if block.host_array is not None:
            self._freed.add(block.host_array)
        self.inner.free(block)

    def trim(self) -> None:
        """Give back what is kept for reuse."""
        self.attempt("trim", self.inner.trim)

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes."""
        return self.attempt("memory_info", self.inner.memory_info)

    def mapped_memory(self, address: int, nbytes: int) -> object:
        """Return what keeps memory alive that a kernel has named."""
        return self.attempt("mapped_memory", lambda: self.inner.mapped_memory(address, nbytes))

    def register(self, nbytes: int) -> RegisteredMemory:
        """Map and register host memory."""
        memory = self.attempt("register", lambda: self.inner.register(nbytes))
        self._registered[id(memory)] = memory
        self._tear_in(memory)
        return memory

    def _tear_in(self, memory: RegisteredMemory) -> None:
        if not 0 <= memory.nbytes - wire.SHARED_NBYTES < 4096:  # it is no channel
            return
        for ticket, words in self._torn.items():
            offset = wire.slot_offset(ticket)
            slot: NDArray[np.uint64] = memory.array[offset : offset + 16].view(np.uint64)
            slot[:] = words

    def unregister(self, memory: RegisteredMemory) -> None:
        """Unregister memory."""
        self.attempt("unregister", lambda: self._unregister(memory))

    def _unregister(self, memory: RegisteredMemory) -> None:
        del self._registered[id(memory)]
        self.inner.unregister(memory)

    # -- the contract: kernels and the rest ------------------------------------------------

    def compile(self, kernel: KernelSource) -> Compiled:
        """Compile."""
        return self.attempt("compile", lambda: self.inner.compile(kernel))

    def load(self, kernel: KernelSource, compiled: Compiled) -> Function:
        """Load a compiled kernel."""
        return self.attempt("load", lambda: FaultyFunction(self, self.inner.load(kernel, compiled)))

    def selftest_function(self) -> Function:
        """Load the kernel of the self-test."""
        return self.attempt("selftest_function", lambda: FaultyFunction(self, self.inner.selftest_function()))

    def rows(self, *box: int) -> Callable[[Any], None] | None:
        """Return what copies rows faster than ``enqueue_copy_box``, if anything does; no driver call."""
        call = self.inner.rows(*box)
        return None if call is None else lambda stream: self.attempt("enqueue_rows", lambda: call(inner_of(stream)))

    def check(self, stream: Stream) -> None:
        """Ask whether the device is well."""
        self.attempt("check", lambda: self.inner.check(inner_of(stream)))

    def health_note(self) -> str:
        """Return what the system knows of a fault; no driver call."""
        return self.inner.health_note()

    def close(self) -> None:
        """Close the inner device."""
        self.attempt("close", self._close_inner)

    def _close_inner(self) -> None:
        """Give back what is this device's own, check what was freed, and close."""
        if self.closed:
            return
        self.closed = True
        self.release()
        gates, self._gates = self._gates, None
        if gates is not None:
            self.inner.unregister(gates)
        self.inner.close()
        while self._wakes:
            os.close(self._wakes.popitem()[1])
        self._freed.check()

    # -- for its streams and events --------------------------------------------------------

    def mark_effect(self) -> MarkEffect | None:
        """Count a mark and return what is to happen to it."""
        return self._marks.take("mark")

    def gate(self) -> Word:
        """Return a word that :meth:`release` sets to 1."""
        if self._gates is None:
            self._gates = self.inner.register(_GATES * _WORD_NBYTES)
        word = self._gates.word(_WORD_NBYTES * self._delayed % self._gates.nbytes)
        self._delayed += 1
        word.store(0)
        return word

    def will_write(self, descriptor: int) -> None:
        """Note an eventfd that a stream will write, and that nobody closes if the device is lost meanwhile."""
        if descriptor not in self._wakes:
            self._wakes[descriptor] = os.dup(descriptor)

    def touch(self, call: str, address: int, nbytes: int) -> None:
        """Note a problem if memory is used that was freed."""
        self._freed.touch(call, address, nbytes)


_Effect: TypeAlias = Callable[[str], Any]


def _skip(name: str) -> None:
    """Do nothing, the effect of a lie."""


def _eventfd_id(descriptor: int) -> str | None:
    """Return the number of an eventfd, unique in the system; None if it is none, or the kernel is too old."""
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith("eventfd-id:")), None)


def _what(name: str) -> dict[str, Any]:
    """Return what an injected error says of the call."""
    return {"operation": name, "status": "INJECTED", "code": 999}
