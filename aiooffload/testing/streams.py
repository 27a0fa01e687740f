"""Streams, events and kernels of a device that fails on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from aiooffload._native import LaunchPlan, Operation, Word
    from aiooffload.drivers.api import CallParameter, Event, Function, Stream
    from aiooffload.testing.device import FaultyDevice

__all__ = ["FaultyEvent", "FaultyFunction", "FaultyStream", "MarkEffect", "inner_of"]


def inner_of(wrapped: Any) -> Any:
    """Return what the driver knows: its own stream or event."""
    return getattr(wrapped, "inner", wrapped)


class FaultyFunction:
    """A kernel of a FaultyDevice."""

    __slots__ = ("_device", "_inner")

    def __init__(self, device: FaultyDevice, inner: Function) -> None:
        self._device = device
        self._inner = inner

    @property
    def parameter_sizes(self) -> tuple[int, ...] | None:
        """Those of the inner one."""
        return self._inner.parameter_sizes

    def plan(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        cluster: tuple[int, int, int] | None,
        cooperative: bool,
    ) -> LaunchPlan:
        """Return a launch plan."""
        geometry = (grid, block, shared_bytes, cluster, cooperative)
        return self._device.attempt("plan", lambda: self._inner.plan(*geometry))

    def prepare(self, plan: LaunchPlan, arguments: Any, calls: CallParameter | None = None) -> Any:
        """Pack arguments."""
        return self._inner.prepare(plan, arguments, calls)


class FaultyEvent:
    """An event of a FaultyDevice."""

    __slots__ = ("_device", "inner")

    def __init__(self, device: FaultyDevice, inner: Any) -> None:
        self._device = device
        self.inner = inner
        device.handles.add(self)

    def query(self) -> bool:
        """Whether it was reached."""
        return self._device.attempt("query_event", lambda: bool(self.inner.query()))

    def elapsed_ns(self, since: Any) -> int:
        """Return the time from ``since`` to this one."""
        return self._device.attempt("elapsed", lambda: int(self.inner.elapsed_ns(inner_of(since))))

    def close(self) -> None:
        """Destroy it."""
        self._device.attempt("close_event", self.give_back)

    def give_back(self) -> None:
        """Destroy it, whatever is planned."""
        self._device.handles.discard(self)
        self.inner.close()


class FaultyStream:
    """A stream of a FaultyDevice."""

    def __init__(self, device: FaultyDevice, inner: Stream) -> None:
        self._device: Final = device
        self.inner: Final = inner
        # What was enqueued last to be waited for: see let_go().
        self._awaited: tuple[Word, int] | None = None
        device.handles.add(self)

    @property
    def handle(self) -> int:
        """The inner stream's."""
        return self.inner.handle

    def bind_marks(self, slot: Word, bell: Word) -> None:
        """Name the words that marks write."""
        self.inner.bind_marks(slot, bell)

    def enqueue_kernel(self, plan: LaunchPlan, prepared: Any, operation: Operation, sequence: int) -> None:
        """Enqueue a kernel and, if ``sequence`` is not 0, its mark."""
        self._device.attempt("enqueue_kernel", lambda: self._kernel(plan, prepared, operation, sequence))

    def _kernel(self, plan: LaunchPlan, prepared: Any, operation: Operation, sequence: int) -> None:
        effect = self._device.mark_effect() if sequence else None
        self.inner.enqueue_kernel(plan, prepared, operation, 0 if effect is not None else sequence)
        if effect is not None:
            effect(self, sequence)

    def enqueue_mark(self, sequence: int) -> None:
        """Enqueue a mark alone."""
        self._device.attempt("enqueue_mark", lambda: self._mark(sequence))

    def _mark(self, sequence: int) -> None:
        effect = self._device.mark_effect()
        if effect is None:
            self.inner.enqueue_mark(sequence)
        else:
            effect(self, sequence)

    def drop_mark(self, sequence: int) -> None:
        """Enqueue no mark."""
        self._device.dropped += 1

    def delay_mark(self, sequence: int) -> None:
        """Enqueue a mark that waits for the device's release()."""
        self.inner.enqueue_wait(self._device.gate(), 1)
        self.inner.enqueue_mark(sequence)

    def enqueue_write(self, word: Word, value: int) -> None:
        """Store a word."""
        self._device.attempt("enqueue_write", lambda: self.inner.enqueue_write(word, value))

    def enqueue_wait(self, word: Word, value: int) -> None:
        """Wait for a word."""
        self._device.attempt("enqueue_wait", lambda: self._wait(word, value))

    def _wait(self, word: Word, value: int) -> None:
        self.inner.enqueue_wait(word, value)
        self._awaited = word, value

    def let_go(self) -> None:
        """Store what was waited for last, as nobody else will any more."""
        if self._awaited is not None:
            word, value = self._awaited
            word.store(value)

    def enqueue_wake(self, descriptor: int) -> None:
        """Write an eventfd."""
        self._device.attempt("enqueue_wake", lambda: self._wake(descriptor))

    def _wake(self, descriptor: int) -> None:
        self.inner.enqueue_wake(descriptor)
        self._device.will_write(descriptor)

    def enqueue_copy(self, destination: int, source: int, nbytes: int, /, *peers: int) -> None:
        """Copy bytes."""
        self._device.touch("enqueue_copy", destination, nbytes)
        self._device.touch("enqueue_copy", source, nbytes)
        self._device.attempt("enqueue_copy", lambda: self.inner.enqueue_copy(destination, source, nbytes, *peers))

    def enqueue_copy_box(
        self, destination: int, source: int, width: int, height: int, depth: int, /, *rest: int
    ) -> None:
        """Copy slices of rows."""
        destination_pitch, source_pitch, destination_slice, source_slice, *_ = rest
        for address, pitch, step in (
            (destination, destination_pitch, destination_slice),
            (source, source_pitch, source_slice),
        ):
            nbytes = (depth - 1) * step + (height - 1) * pitch + width
            self._device.touch("enqueue_copy_box", address, nbytes)
        box = (destination, source, width, height, depth, *rest)
        self._device.attempt("enqueue_copy_box", lambda: self.inner.enqueue_copy_box(*box))

    def enqueue_fill(self, address: int, pattern: bytes, count: int) -> None:
        """Fill memory."""
        self._device.touch("enqueue_fill", address, len(pattern) * count)
        self._device.attempt("enqueue_fill", lambda: self.inner.enqueue_fill(address, pattern, count))

    def enqueue_record(self, event: Event) -> None:
        """Record an event."""
        self._device.attempt("enqueue_record", lambda: self.inner.enqueue_record(inner_of(event)))

    def enqueue_wait_event(self, event: Event) -> None:
        """Wait for an event."""
        self._device.attempt("enqueue_wait_event", lambda: self.inner.enqueue_wait_event(inner_of(event)))

    def query(self) -> bool:
        """Whether everything enqueued is done."""
        return self._device.attempt("query", self.inner.query)

    def capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self._device.attempt("capturing", self.inner.capturing)

    def close(self) -> None:
        """Destroy it."""
        self._device.attempt("close_stream", self.give_back)

    def give_back(self) -> None:
        """Destroy it, whatever is planned."""
        self._device.handles.discard(self)
        self.inner.close()


MarkEffect: TypeAlias = Callable[[FaultyStream, int], None]
"""What happens on a stream instead of the mark with that number."""
