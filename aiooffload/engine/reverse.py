"""Reverse offload: the channel of one engine, its host functions, and the launches that call them.

A launch whose kernel calls goes through these states::

    waiting    on the host, like any other
    calling    on a calling lane; its requests are read with every look at the slots
    ending     its kernel is over; what it sent is still being read, up to the ring's head at its end
    ended      everything was read; handlers (of posts, or of calls nobody waited for) may still run
    done       no handler runs any more: the operation is finished

The channel's memory, the calling lanes and the lanes for mapped arguments are made when the first
such kernel is loaded. The layout is in :mod:`aiooffload.rules.wire`, the loop that reads it in
``_native/channel.c``.
"""

from __future__ import annotations

import asyncio
import operator
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from weakref import WeakKeyDictionary

from aiooffload._native import Caller, Channel, Handler, Request, Word, calling, now_ns
from aiooffload.drivers.api import CallParameter
from aiooffload.engine.host_functions import HandlerTimeout, HostFunction, ReplyError, RowsFailed, still_waiting
from aiooffload.engine.launches import retrieve
from aiooffload.errors import DeviceLostError, HostFunctionError, OffloadError, OffloadTimeout, UsageError, WouldBlock
from aiooffload.rules import wire

if TYPE_CHECKING:
    from aiooffload.buffer import Buffer
    from aiooffload.drivers.api import RegisteredMemory, Stream
    from aiooffload.engine.mapping import Mapping
    from aiooffload.operation import Operation

__all__ = ["CallingLaunch", "Opened", "Reverse"]

BUDGET_NS: Final = 200_000
"""How long one look reads requests and runs first steps before others have their turn."""
TORN_S: Final = 3.0
"""For so long a request may be missing from the ring although it has to be there."""
_MOST_FAILURES: Final = 100
_OF_CALLS: Final = (asyncio.CancelledError, HostFunctionError, OffloadTimeout)
"""What a call raises in a host kernel."""


class Opened(NamedTuple):
    """What a channel is made of."""

    shared: RegisteredMemory
    state: Buffer
    """What kernels keep on the device. This holds it: kernels only have its address."""
    bell: Word
    abort: Word
    """Not 0 once a kernel has given up."""
    mapping: Mapping
    keep: object
    """What keeps host memory alive for kernels that still run on it after everything else has ended."""


class CallingLaunch(Caller):
    """A launch on the device whose kernel calls."""

    __slots__ = ("failed", "failures", "goal", "index", "last", "parent", "prepared", "words")

    index: int
    """Its block in the shared memory, until everything it sent was read."""
    goal: int | None
    """The ring's head at the end of its kernel; None while that runs."""
    failures: list[HostFunctionError]
    """The first of them."""
    failed: int
    """How many there were."""
    parent: Caller | Request | None
    """What the host function served that launched it, if one did."""
    prepared: Any
    """What its kernel was started with: the host's driver looks there while the launch is not done."""
    words: dict[int, Word]
    """Of its block, by offset."""
    last: dict[int, int]
    """What they said when everything was read: from then on they may be another launch's."""

    def read(self, offset: int) -> int:
        """Return what its kernel has said there."""
        return self.last[offset] if self.ended else self.words[offset].load()


class Reverse:
    """Reverse offload of one engine. Everything runs on the loop's thread.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    timeout_s
        The device's deadline for a call.
    open
        Makes the memory and the lanes; called once.
    on_opened
        Told of the channel, once there is one.
    on_finished
        Told of every launch that is done, with its operation.
    on_resident
        Told how many more kernels that call are on the device, or fewer.
    on_lost
        Told when a kernel has said that it gives up, which ends the device.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeout_s: float,
        open: Callable[[], Coroutine[Any, Any, Opened]],
        on_opened: Callable[[Channel], None],
        on_finished: Callable[[Operation[None]], None],
        on_resident: Callable[[int], None],
        on_lost: Callable[[DeviceLostError], None],
    ) -> None:
        self._loop: Final = loop
        self._timeout_ns = int(timeout_s * 1e9)
        self._open = open
        self._on_opened = on_opened
        self._on_finished = on_finished
        self._on_resident = on_resident
        self._on_lost = on_lost
        self._opening: asyncio.Task[None] | None = None
        self._opened: Opened | None = None
        self.functions: Final[dict[int, HostFunction]] = {}
        self.channel: Channel | None = None
        # By operation, from the start of the kernel until no handler runs any more.
        self.callers: dict[Operation[None], CallingLaunch] = {}
        # Those of them whose kernel is over, but not everything they sent was read yet.
        self._ending: list[CallingLaunch] = []
        # How many kernels that call are on the device.
        self.resident = 0
        # How many requests were read when that was last looked at by check(), and when that number last changed.
        self._position, self._moved_ns = 0, 0
        # Indices of launches, the one that was free longest first.
        self._free = deque(range(wire.LAUNCHES))
        # What launches that are done said last, for whoever watches their progress.
        self._last_progress: WeakKeyDictionary[Operation[None], tuple[int, int]] = WeakKeyDictionary()

    # -- functions -------------------------------------------------------------------------

    def check_free(self, function: HostFunction) -> None:
        """Raise UsageError if its name or number is taken."""
        other = self.functions.get(function.number)
        if other is not None:
            if other.name == function.name:
                raise UsageError(
                    f"there is a host function {function.name!r} already: one serves every launch of the Offload"
                )
            raise UsageError(f"{function.name!r} and {other.name!r} have the same id: give one of them another name")

    def register(self, function: HostFunction) -> None:
        """Add a host function; raises UsageError if its name or number is taken."""
        self.check_free(function)
        self.functions[function.number] = function

    # -- opening ---------------------------------------------------------------------------

    async def open(self) -> None:
        """Make the channel unless that was done; several may wait for it."""
        if self._opening is None:
            self._opening = self._loop.create_task(self._make(), name="aiooffload open channel")
            self._opening.add_done_callback(retrieve)  # those who wait for it tell its failure
        await asyncio.shield(self._opening)

    async def finish_opening(self) -> None:
        """Wait until the channel is made, if that has begun; raises nothing of it."""
        if self._opening is not None:
            await asyncio.wait([self._opening])

    async def _make(self) -> None:
        try:
            opened = await self._open()
        except BaseException as error:
            self._opening = None
            if isinstance(error, DeviceLostError):
                self._on_lost(error)
            raise
        shared = opened.shared
        self.channel = Channel(shared.host_address, shared.array, self._loop, self.functions, self)
        self._opened = opened
        self._on_opened(self.channel)

    # -- launches --------------------------------------------------------------------------

    def start(
        self,
        operation: Operation[None],
        context: Context,
        prepare: Callable[[CallParameter | None], Any],
        stream: Stream,
    ) -> None:
        """Enqueue the kernel of ``operation`` and what tells the host where its requests end."""
        assert self._opened is not None
        assert self.channel is not None
        caller = self._attach(operation, context)
        opened = self._opened
        parameter = wire.LaunchParameter(
            opened.shared.device_address,
            opened.state.address,
            opened.bell.device_address,
            self._timeout_ns,
            caller.index,
        )
        try:
            caller.prepared = prepare(CallParameter(parameter.pack(), opened.keep))
            assert operation.plan is not None
            stream.enqueue_kernel(operation.plan, caller.prepared, operation, 0)
        except BaseException:
            self._detach(caller)
            del self.callers[operation]
            raise
        finally:
            operation.plan = None  # how long it takes says nothing about the next: it waits for others
        if not self.resident:
            self.channel.gap_ns = 0  # how another kernel called says nothing of this one
        self.resident += 1
        self._on_resident(1)
        self.channel.served_ns = now_ns()
        end = opened.shared.device_address + wire.launch_offset(caller.index) + wire.LAUNCH_END
        stream.enqueue_copy(end, opened.state.address + wire.STATE_HEAD, 8)

    def _attach(self, operation: Operation[None], context: Context) -> CallingLaunch:
        assert self._opened is not None
        assert self.channel is not None
        if not self._free:
            raise WouldBlock(f"{wire.LAUNCHES} launches that call are on the device")
        caller = CallingLaunch(context, operation)
        caller.parent = still_waiting(context.get(calling))
        context.run(calling.set, caller)
        caller.index = self._free.popleft()
        caller.goal = None
        caller.failures, caller.failed = [], 0
        offset = wire.launch_offset(caller.index)
        words = (
            wire.LAUNCH_CANCEL,
            wire.LAUNCH_SEEN,
            wire.LAUNCH_TROUBLE,
            wire.LAUNCH_GIVEN_UP,
            wire.LAUNCH_PROGRESS,
            wire.LAUNCH_PROGRESS + 8,
        )
        caller.words = {word: self._opened.shared.word(offset + word) for word in words}
        for word in caller.words.values():
            word.store(0)
        self.callers[operation] = caller
        self.channel.attach(caller.index, caller)
        return caller

    def _detach(self, caller: CallingLaunch) -> None:
        if self.channel is not None and not self.channel.closed:
            self.channel.attach(caller.index, None)
        self._free.append(caller.index)

    def arrived(self, operation: Operation[None]) -> None:
        """The kernel of ``operation`` is over: read what it sent, then wait for its handlers."""
        caller = self.callers.get(operation)
        if caller is None:  # refused by the driver before it started
            operation.finish(failure=operation.failure)
            self._on_finished(operation)
            return
        assert self._opened is not None
        assert self.channel is not None
        self.resident -= 1
        caller.goal = self._opened.shared.word(wire.launch_offset(caller.index) + wire.LAUNCH_END).load()
        if caller.goal > self.channel.position + wire.RING_SLOTS:  # whoever has a ticket has a slot
            self._on_resident(-1)
            self._on_lost(_corrupt(f"{_kernel(caller)} ended behind request {caller.goal}"))
            return
        self._ending.append(caller)
        try:
            try:
                if not self.channel.busy:
                    self.channel.drain(BUDGET_NS)
            finally:
                self.settle()
        except BaseException as error:  # of some host function: the loop's, not the failure of what has arrived
            self._loop.call_soon(_raise, error)
        finally:
            self._on_resident(-1)

    def check(self) -> None:
        """Raise DeviceLostError if requests that were sent can never be read; every look that is in doubt asks.

        Kernels publish what they have a ticket for within microseconds. Only one that writes where it must not makes
        a gap that stays, and everything behind it would wait for ever.
        """
        channel, now = self.channel, now_ns()
        still = channel is not None and channel.position == self._position and (self.resident or self._ending)
        # Where a host function looks in its first step nobody reads meanwhile: nothing is missing.
        if channel is None or channel.busy or not still:
            self._position, self._moved_ns = 0 if channel is None else channel.position, now
        elif now - self._moved_ns > TORN_S * 1e9:
            self._moved_ns = now
            if channel.torn() or any((caller.goal or 0) > channel.position for caller in self._ending):
                raise _corrupt(f"request {channel.position} is missing")

    @property
    def called_ns(self) -> int | None:
        """When a request was last read or a kernel started; None while none that calls is on the device."""
        if not self.resident or self.channel is None:
            return None
        return self.channel.served_ns

    @property
    def gap_ns(self) -> int:
        """How long the last silence between two requests was."""
        return self.channel.gap_ns if self.channel is not None else 0

    def settle(self) -> None:
        """End those launches of which everything was read."""
        assert self.channel is not None
        waiting = [caller for caller in self._ending if (caller.goal or 0) > self.channel.position]
        ended = [caller for caller in self._ending if caller not in waiting]
        self._ending = waiting
        self.channel.unsettled = len(waiting)
        for caller in ended:
            caller.last = {offset: word.load() for offset, word in caller.words.items()}
            self._detach(caller)
            caller.ended = True
            # Its kernel died, or gave up waiting: nobody wants what its handlers would give.
            if caller.operation.failure is not None or caller.read(wire.LAUNCH_GIVEN_UP):
                self._stop(caller)
        for caller in ended:
            try:
                if caller.active == 0:
                    self.idle(caller)
            except BaseException as error:  # of what comes after it: the others end all the same
                self._loop.call_soon(_raise, error)
        if waiting:
            try:
                self.check()
            except DeviceLostError as error:
                self._on_lost(error)

    # -- what the channel asks -------------------------------------------------------------

    def begin(self, request: Request) -> None:
        """Start a request that is not plain."""
        function = request.handler
        assert isinstance(function, HostFunction)
        assert self._opened is not None
        function.begin(request, self._opened.mapping)

    def encode(self, request: Request, result: Any) -> Any:
        """Return the bytes of a result."""
        function = request.handler
        assert isinstance(function, HostFunction)
        return function.encode(result, request.rows, single=request.rows == 1)

    def failed(self, request: Request, error: BaseException) -> None:
        """Answer a request whose handler raised, and let its launches know, whatever is wrong with the exception."""
        function = request.handler
        assert isinstance(function, HostFunction)
        error = _one_of(error)
        kind = type(error)  # isinstance() would run code of the exception's own, if it has a __class__
        code = _code_of(error) or 0
        if issubclass(kind, HandlerTimeout):
            code = wire.Code.NO_ANSWER
        elif issubclass(kind, ReplyError):
            code = wire.Code.WRONG_REPLY
        elif not 0 < code < 2**31:
            code = wire.Code.RAISED
        interrupt = error if issubclass(kind, KeyboardInterrupt | SystemExit) and request.task is None else None
        try:
            # The text of an error of ours, in which others may be quoted: each repr of a repr would be twice as long.
            said = f"failed: {kind.__name__}: {error}" if issubclass(kind, OffloadError) else f"failed: {error!r}"
        except BaseException as unsaid:
            said = f"failed: {object.__repr__(error)}"
            if isinstance(unsaid, KeyboardInterrupt | SystemExit):
                interrupt = unsaid
        # Before the answer, with which the launch may end; stopped after it, since that answers the rest.
        blamed = []
        for caller in request.callers:
            if issubclass(kind, asyncio.CancelledError) and caller.stopped:
                continue  # as it was asked to
            text = f"host function {function.name!r}, called by {_kernel(caller)}, {said}"
            failure = HostFunctionError(text, code=code)
            failure.__cause__ = error
            self._note(caller, failure)
            blamed.append(caller)
        if issubclass(kind, HandlerTimeout):
            request.end(wire.Status.TIMEOUT)
        elif not issubclass(kind, asyncio.CancelledError):
            request.end(wire.Status.ERROR, code)
        for caller in blamed if function.on_error == "cancel" else ():
            self._stop(caller, besides=request)
        # Those two end the loop, as from any task. If it has suspended, its task has raised it there already.
        if interrupt is not None:
            raise interrupt

    def refused(self, caller: Caller, function: int, handler: Handler | None, nbytes: int) -> None:
        """Take note of a call that no function could take."""
        if isinstance(handler, HostFunction):
            sent = f"{nbytes} bytes of arguments, it takes {handler.nbytes} ({handler.takes})"
            if nbytes == handler.nbytes:
                sent = "so many rows in one request that their results do not fit a reply"
            failure = HostFunctionError(
                f"{_kernel(caller)} called host function {handler.name!r} with {sent}", code=wire.Code.WRONG_ARGUMENTS
            )
            self._note(caller, failure)
            if handler.on_error == "cancel":
                self._stop(caller)
        else:
            known = ", ".join(repr(f.name) for f in self.functions.values()) or "none"
            text = (
                f"{_kernel(caller)} called host function {function:#x}, which is not registered: it is ao::fn of "
                f"another name than those there are: {known}"
            )
            self._note(caller, HostFunctionError(text, code=wire.Code.UNKNOWN_FUNCTION))
            self._stop(caller)

    def idle(self, caller: Caller) -> None:
        """No handler of an ended launch runs any more: finish its operation."""
        assert isinstance(caller, CallingLaunch)
        operation = caller.operation
        if operation not in self.callers:
            return
        del self.callers[operation]
        self._finish(caller, self._outcome(caller))
        self._on_finished(operation)

    def _finish(self, caller: CallingLaunch, failure: BaseException | None) -> None:
        self._last_progress[caller.operation] = self._said(caller)
        # The context names the launch: without this only the garbage collector would part the two.
        caller.context.run(calling.set, None)
        caller.operation.finish(failure=failure)
        caller.prepared = None
        caller.parent = still_waiting(caller.parent)  # or launches that call for one another keep all before them

    def _note(self, caller: Caller, failure: HostFunctionError) -> None:
        assert isinstance(caller, CallingLaunch)
        caller.failed += 1
        if len(caller.failures) < _MOST_FAILURES:
            caller.failures.append(failure)

    def _outcome(self, caller: CallingLaunch) -> BaseException | None:
        """Return how the launch has ended: what its program asked for, or what went wrong first."""
        operation = caller.operation
        stopped = operation.stop
        # It was asked to stop and has seen it; else it completed all the same.
        if stopped is not None and (caller.told or caller.read(wire.LAUNCH_SEEN) or operation.failure is not None):
            failure: BaseException = stopped
            if caller.failures and failure.__cause__ is None:  # what went wrong before, or while it was cancelled
                failure.__cause__ = _together(caller.failures, caller.failed)
            return failure
        if caller.failures:
            failed = _together(caller.failures, caller.failed)
            # A host kernel goes on after a call that failed, and may end with something else.
            if operation.failure is not None and not isinstance(operation.failure.__cause__, _OF_CALLS):
                failed.add_note(f"{_kernel(caller)} then failed itself: {operation.failure}")
            return failed
        trouble = wire.trouble(caller.read(wire.LAUNCH_GIVEN_UP) or caller.read(wire.LAUNCH_TROUBLE))
        if trouble is not None:
            return self._trouble(caller, *trouble)
        if stopped is None and not caller.stopped and caller.read(wire.LAUNCH_SEEN):
            text = f"{_kernel(caller)} was asked to stop by nobody: some kernel wrote where it must not"
            return HostFunctionError(text, code=wire.Code.RAISED)
        kernel_failure: BaseException | None = operation.failure
        return kernel_failure

    def _trouble(self, caller: CallingLaunch, function: int, code: wire.Code) -> HostFunctionError:
        """Say what the kernel has seen and the host has not."""
        known = self.functions.get(function)
        what = f"{_kernel(caller)} called host function {known.name if known else hex(function)!r}"
        if code is wire.Code.NO_ANSWER:
            error = HostFunctionError(f"{what} and got no answer within its deadline", code=code)
            text = "the host function did not return in time, or something blocked the event loop"
            error.__cause__ = OffloadTimeout(text)
            return error
        meaning = {
            wire.Code.TOO_LARGE: f"with more than {wire.PAYLOAD_NBYTES} bytes of arguments: map them",
            wire.Code.WRONG_REPLY: "and expected a result of another type or size",
        }
        return HostFunctionError(f"{what} {meaning.get(code, code.name)}", code=code)

    # -- stopping --------------------------------------------------------------------------

    def cancel(self, operation: Operation[None]) -> None:
        """Ask a launch on the device to stop: its waits return CANCELLED, its handlers are cancelled."""
        caller = self.callers.get(operation)
        if caller is not None:
            self._stop(caller)

    def stop_all(self) -> None:
        """Ask every launch on the device to stop."""
        for operation in list(self.callers):
            operation.cancel()

    def _stop(self, caller: Caller, besides: Request | None = None) -> None:
        """Stop it and its handlers, except that of ``besides``, which has just ended."""
        assert isinstance(caller, CallingLaunch)
        if caller.stopped:
            return
        caller.stopped = True
        # Once it has ended its block may be another launch's.
        if self.channel is not None and not self.channel.closed and not caller.ended:
            caller.words[wire.LAUNCH_CANCEL].store(1)
        if caller.active:  # something is cut short, so it does not complete all the same
            caller.told = True
        for request in list(caller.requests):
            if request is not besides and not request.drop() and request.task is not None:
                request.task.cancel()

    def look(self) -> None:
        """See whether a kernel has given up: nobody has to wait until the driver finds out."""
        if self._opened is None or not self.resident or not self._opened.abort.load():
            return
        offset = wire.ABORT_OFFSET
        message = wire.abort_message(bytes(self._opened.shared.array[offset : offset + wire.ABORT_NBYTES]))
        if message is None:  # a stray write that another one undid
            return
        index, code, text = message
        name = next((_kernel(caller) for caller in self.callers.values() if caller.index == index), "a kernel")
        self._on_lost(DeviceLostError(f"{name} aborted with code {code}: {text}", operation="abort", code=code))

    def abandon(self, failure: BaseException) -> None:
        """The device or the Offload is gone: stop every kernel that can be stopped, and every handler."""
        for caller in list(self.callers.values()):
            self._stop(caller)
        if self.channel is not None:
            self.channel.close()
        self._ending.clear()
        resident, self.resident = self.resident, 0
        if resident:
            self._on_resident(-resident)
        callers, self.callers = self.callers, {}
        for caller in callers.values():
            self._finish(caller, failure)
        if self._opening is not None:
            self._opening.cancel()

    def disown(self) -> list[Operation[None]]:
        """In a forked child, which does not have the channel's memory: touch it no more; returns what called."""
        if self.channel is not None:
            self.channel.close()
        self._opened = None
        self._ending.clear()
        callers, self.callers = self.callers, {}
        return list(callers)

    def close(self) -> None:
        """Let go of the channel's memory; nothing is on the device any more."""
        if self.channel is not None:
            self.channel.close()
        self._opened = None

    # -- looking in ------------------------------------------------------------------------

    @property
    def served(self) -> int:
        """How many requests were read."""
        return self.channel.position if self.channel is not None else 0

    def progress(self, operation: Operation[None]) -> tuple[int, int]:
        """Return (done, total) as the kernel said it last."""
        caller = self.callers.get(operation)
        if caller is None:
            return self._last_progress.get(operation, (0, 0))
        return self._said(caller)

    def _said(self, caller: CallingLaunch) -> tuple[int, int]:
        return caller.read(wire.LAUNCH_PROGRESS), caller.read(wire.LAUNCH_PROGRESS + 8)

    def stats(self) -> dict[str, int]:
        """Return counters: what was read, what made no sense, what is open."""
        channel = self.channel
        return {
            "served": self.served,
            "dropped": channel.dropped if channel is not None else 0,
            "resident": self.resident,
            "open": sum(caller.active for caller in self.callers.values()),
        }


def _raise(error: BaseException) -> None:
    raise error


def _one_of(error: BaseException) -> BaseException:
    """Return the first of several rows' failures where the kernel gets the same for each, else the group."""
    if type(error) is not RowsFailed:
        return error
    first = error.exceptions[0]
    if all(issubclass(type(one), HandlerTimeout) for one in error.exceptions):
        return first
    codes = {_code_of(one) for one in error.exceptions}
    if len(codes) == 1 and None not in codes:
        return first
    # As the program is to see it: an ExceptionGroup, if they are Exceptions.
    return BaseExceptionGroup(error.message, error.exceptions).with_traceback(error.__traceback__)


def _code_of(error: BaseException) -> int | None:
    """Return the code that a host function has chosen for its kernel, whether or not it fits; None if none."""
    if not issubclass(type(error), HostFunctionError):
        return None
    try:
        return operator.index(error.code)  # type: ignore[attr-defined]  # it is one, by its type
    except Exception:  # a subclass may have made no code, or another kind of it
        return None


def _corrupt(what: str) -> DeviceLostError:
    return DeviceLostError(
        f"the memory that kernels call through is corrupt: {what}; some kernel wrote where it must not"
    )


def _kernel(caller: Caller) -> str:
    return f"kernel {caller.operation.name}"


def _together(failures: list[HostFunctionError], count: int) -> HostFunctionError:
    """Return one failure for the first of ``count``."""
    if len(failures) == 1:
        return failures[0]
    error = HostFunctionError(f"{failures[0]} (and {count - 1} more)", code=failures[0].code)
    error.__cause__ = ExceptionGroup("host functions failed", failures)
    return error
