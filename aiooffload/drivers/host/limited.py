"""A host stream as on a GPU without stream memory operations, for testing the engine's fallback."""

from __future__ import annotations

from typing import Any, Final, NoReturn

from aiooffload._native import HostStream, LaunchPlan, Operation, Word
from aiooffload.errors import DriverError

__all__ = ["LimitedStream"]


def _refuse(operation: str) -> NoReturn:
    raise DriverError("this device has no stream memory operations", operation=operation, status="NOT_SUPPORTED")


def _nothing() -> None:
    """Close what is somebody else's."""


class LimitedStream:
    """Everything of a HostStream but waiting for words and writing them."""

    __slots__ = ("_stream", "close", "enqueue_copy", "enqueue_copy_box", "enqueue_fill", "enqueue_wake", "query")

    def __init__(self, stream: HostStream, owned: bool = True) -> None:
        self._stream: Final = stream
        self.close = stream.close if owned else _nothing
        self.enqueue_copy = stream.enqueue_copy
        self.enqueue_copy_box = stream.enqueue_copy_box
        self.enqueue_fill = stream.enqueue_fill
        self.enqueue_wake = stream.enqueue_wake
        self.query = stream.query

    @property
    def handle(self) -> int:
        """The stream's number."""
        return self._stream.handle

    def bind_marks(self, slot: Word, bell: Word) -> None:
        """Do nothing: no mark will ever be written."""

    def capturing(self) -> bool:
        """Return False: there are no graphs."""
        return False

    def enqueue_kernel(self, plan: LaunchPlan, prepared: Any, operation: Operation, sequence: int) -> None:
        """Enqueue a kernel; raises DriverError if it wants a mark."""
        if sequence:
            _refuse("enqueue_kernel")
        self._stream.enqueue_kernel(plan, prepared, operation, 0)

    def enqueue_mark(self, sequence: int) -> None:
        """Raise DriverError."""
        _refuse("enqueue_mark")

    def enqueue_write(self, word: Word, value: int) -> None:
        """Raise DriverError."""
        _refuse("enqueue_write")

    def enqueue_wait(self, word: Word, value: int) -> None:
        """Raise DriverError."""
        _refuse("enqueue_wait")

    def enqueue_record(self, event: Any) -> None:
        """Record ``event`` here."""
        self._stream.enqueue_record(event)

    def enqueue_wait_event(self, event: Any) -> None:
        """Hold later work until what ``event`` recorded last is done."""
        self._stream.enqueue_wait_event(event)
