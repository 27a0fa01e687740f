"""The awaitable handle of submitted work.

States, in order; ``done`` is final::

    waiting   on the host: for a dependency, a kernel's load, or room on its lane
    enqueued  on the device, in order on its lane
    done      the device no longer touches its memory: a result, a failure or a cancellation
"""

from __future__ import annotations

from asyncio import CancelledError, Event, wait_for
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from aiooffload import _native

if TYPE_CHECKING:
    from collections.abc import Generator

    from aiooffload.drivers.api import Stream

__all__ = ["LaneLike", "Operation", "OperationOwner"]

_T = TypeVar("_T")


class LaneLike(Protocol):
    """What an operation knows of its lane."""

    @property
    def index(self) -> int:
        """Position in ``off.lanes``."""


class OperationOwner(Protocol):
    """What an operation asks of the engine that made it."""

    @property
    def label(self) -> str:
        """The device as a user names it."""

    def check_caller(self) -> None:
        """Raise UsageError unless the caller is on the loop that owns it."""

    def progress(self) -> int:
        """Look at the device once and finish what has arrived."""

    def cancel(self, operation: Operation[Any], failure: BaseException) -> None:
        """Stop ``operation`` as far as it can be stopped."""

    def device_progress(self, operation: Operation[Any]) -> tuple[int, int]:
        """Return (done, total) as its kernel said it last."""

    def share(self, operations: Sequence[Operation[Any]], stream: int | None) -> int | None:
        """Order somebody else's work after ``operations``; see ``Engine.share``."""

    def want_mark(self, operation: Operation[Any]) -> None:
        """Somebody waits for ``operation``, which is coarse."""

    def check_wait(self, operation: Operation[Any]) -> None:
        """Raise UsageError if the running host function must not wait for ``operation``."""

    def fail_dependent(self, operation: Operation[Any]) -> None:
        """Fail ``operation``, whose mark arrived although something it came after has failed."""


class Operation(_native.Operation, Generic[_T]):
    """Work submitted to an Offload. Await it, any number of times, from any task of its loop.

    Notes
    -----
    *Result.* ``await operation`` gives None for a launch, copy or fill, the Buffer for ``put``, the
    array for ``get``. Awaiting one that is done does not yield to the loop.
    *Cancellation.* Cancelling a task that awaits it ends that wait alone. ``cancel()`` asks the
    work itself to stop. An operation that nobody awaits runs all the same; a failure that nobody
    looked at, and that no other operation failed with (``after=``), is told once to the loop's
    exception handler.
    *Thread.* Everything belongs to the loop's thread.
    """

    __slots__ = ()

    # The engine's, all None (or 0) until it sets them; they live in the extension, since setting
    # a dozen slots from Python would cost every launch more than the rest of its bookkeeping.
    if TYPE_CHECKING:
        name: str
        owner: OperationOwner
        lane: Any  # the Lane once assigned
        deps: list[Operation[Any]] | None  # must come before it on the device
        requires: tuple[Operation[Any], ...] | None  # those of deps whose failure is its failure
        prepared: Any  # a kernel's packed parameters
        steps: Callable[[Stream], None] | None  # what to enqueue instead of a kernel
        calling: int  # its kernel calls: 1, or 2 if a host function launched it
        priority: int  # of the lanes it may go to
        gate: bool  # what comes after it on its lane waits behind it on the host
        coarse: bool  # no completion mark of its own
        instant: bool  # it went straight to the device when it was submitted
        streamed: bool  # goes piece by piece: its lane's order alone does not put others after it
        stop: BaseException | None  # what it ends with if it can be stopped
        holds: int  # how many things keep it on the host
        followers: list[Operation[Any]] | None  # held until this one is enqueued or done

        def __await__(self) -> Generator[Any, None, _T]: ...

    def done(self) -> bool:
        """Whether it is done. Looks at the device, so a loop that polls without yielding progresses.

        Only in the first step of a host function no call is read, so a launch that calls does not end there.
        """
        if not self.finished:
            self.owner.check_caller()
            if self.coarse:
                self.owner.want_mark(self)
            self.owner.progress()
        return self.finished

    def result(self) -> _T:
        """Return the result or raise the failure; raises RuntimeError if it is not done."""
        self.done()
        value: _T = self.outcome()
        return value

    def exception(self) -> BaseException | None:
        """Return the failure or None; raises RuntimeError if it is not done."""
        self.done()
        return self.look()

    def cancelled(self) -> bool:
        """Whether it ended by ``cancel()``."""
        return self.finished and isinstance(self.failure, CancelledError)

    async def wait(self) -> _T:
        """Await it, as a coroutine: for ``asyncio.create_task`` and ``TaskGroup.create_task``."""
        return await self

    def cancel(self) -> bool:
        """Ask the work to stop and return at once; False if it was done already.

        What waits on the host ends with ``asyncio.CancelledError``. What is on the device ends
        when the device is through with it, and then counts as completed; a kernel that calls is told
        (its waits return CANCELLED), and the operation is cancelled once it has seen that.
        """
        if self.done():
            return False
        self.owner.cancel(self, CancelledError())
        return True

    async def progress(self, interval_s: float = 0.05) -> AsyncIterator[tuple[int, int]]:
        """Iterate over (done, total) as the kernel says it with ``launch.progress``, until the operation is done.

        Parameters
        ----------
        interval_s
            Seconds between two looks; what is said in between is passed over, the last is not.

        Notes
        -----
        For a launch whose kernel calls; any other gives nothing. It raises nothing of the operation's: await that.
        """
        self.owner.check_wait(self)
        last = (0, 0)
        done = Event()
        self.add_done_callback(lambda _: done.set())
        while True:
            over = self.done()
            now = self.owner.device_progress(self)
            if now != last:
                last = now
                yield now
            if over:
                return
            with suppress(TimeoutError):
                await wait_for(done.wait(), interval_s)

    @property
    def duration_ns(self) -> int:
        """Nanoseconds from submission until it was seen done, 0 while it is not."""
        return self.finished_ns - self.submitted_ns if self.finished else 0

    async def __aenter__(self) -> Operation[_T]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                await self
        finally:
            self.cancel()  # unless it is done

    def __repr__(self) -> str:
        if not self.finished:
            state = "enqueued" if self.queue is not None else "waiting"
        else:
            state = f"failed: {self.failure!r}" if self.failure is not None else "done"
        where = "" if self.lane is None else f" on lane {self.lane.index}"
        return f"<aiooffload.Operation {self.name}{where}, {state}>"
