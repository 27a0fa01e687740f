"""A host stream that belongs to another Offload of the process, as an adopted stream."""

from __future__ import annotations

from typing import Any, Final

from aiooffload._native import HostStream, LaunchPlan, Operation, Word

__all__ = ["AdoptedStream"]


class AdoptedStream:
    """A HostStream with marks of its own beside its owner's; closing it does nothing."""

    __slots__ = (
        "_bell",
        "_slot",
        "_stream",
        "enqueue_copy",
        "enqueue_copy_box",
        "enqueue_fill",
        "enqueue_record",
        "enqueue_wait",
        "enqueue_wait_event",
        "enqueue_wake",
        "enqueue_write",
        "query",
    )

    def __init__(self, stream: HostStream) -> None:
        self._stream: Final = stream
        self._slot: Word | None = None
        self._bell: Word | None = None
        self.enqueue_copy = stream.enqueue_copy
        self.enqueue_copy_box = stream.enqueue_copy_box
        self.enqueue_fill = stream.enqueue_fill
        self.enqueue_record = stream.enqueue_record
        self.enqueue_wait = stream.enqueue_wait
        self.enqueue_wait_event = stream.enqueue_wait_event
        self.enqueue_wake = stream.enqueue_wake
        self.enqueue_write = stream.enqueue_write
        self.query = stream.query

    @property
    def handle(self) -> int:
        """The stream's number."""
        return self._stream.handle

    def bind_marks(self, slot: Word, bell: Word) -> None:
        """Name the words that marks write."""
        self._slot, self._bell = slot, bell

    def enqueue_kernel(self, plan: LaunchPlan, prepared: Any, operation: Operation, sequence: int) -> None:
        """Enqueue a kernel and, if ``sequence`` is not 0, its mark."""
        self._stream.enqueue_kernel(plan, prepared, operation, 0)
        if sequence:
            self.enqueue_mark(sequence)

    def enqueue_mark(self, sequence: int) -> None:
        """Enqueue the mark alone."""
        assert self._slot is not None
        assert self._bell is not None
        self._stream.enqueue_write(self._slot, sequence)
        self._stream.enqueue_write(self._bell, 1)

    def capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def close(self) -> None:
        """Do nothing: it is somebody else's."""
