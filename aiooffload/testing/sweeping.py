"""Running a program once for each thing that can go wrong in it.

A *scenario* is a coroutine function that opens an Offload through its :class:`Run` and does something with it. For each
kind of fault it is run with the first call going wrong, then with the second, until it needs no more calls. After
each fault every operation has to be done, each has failed with that fault or given the right result, and nothing is
left behind.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from aiooffload.errors import (
    ClosedError,
    DeviceLostError,
    DriverError,
    HostFunctionError,
    LaunchError,
    OffloadTimeout,
    OutOfMemoryError,
)
from aiooffload.rules import wire
from aiooffload.testing.device import FaultyDevice
from aiooffload.testing.memory import POISON
from aiooffload.testing.opening import open_offload
from aiooffload.testing.resources import Resources

if TYPE_CHECKING:
    from aiooffload.offload import Offload
    from aiooffload.operation import Operation

__all__ = ["FAULTS", "TEARS", "Case", "Fault", "Run", "Scenario", "run_case", "sweep"]

_T = TypeVar("_T")
LoopFactory: TypeAlias = Callable[[], asyncio.AbstractEventLoop]
_LOOK_S: Final = 0.02
_PATIENCE_S: Final = 0.15
"""A completion that was dropped is not waited for longer than this, once nothing moves."""
_CLOSE_S: Final = 2.0
_POISONED: Final = bytes([POISON] * 8)


class Fault(NamedTuple):
    """A kind of fault."""

    name: str
    plan: Callable[[FaultyDevice, int], None]
    """Lets the n-th something of a device go wrong."""
    fired: Callable[[Run, int], bool]
    """Whether it has, once all is over."""
    explains: tuple[type[BaseException], ...] = ()
    """What an operation may fail with then, besides what was raised on demand."""


def _failing(name: str, error: type[DriverError]) -> Fault:
    return Fault(name, lambda device, n: device.fail(error=error, at=n), lambda run, n: bool(run.device.injected))


def _torn(name: str, function: int, form: int, argument: int) -> Fault:
    """Replace the n-th request of kernels, by one of the first launch's that no kernel has made."""

    def plan(device: FaultyDevice, n: int) -> None:
        device.tear(n - 1, wire.Descriptor(n - 1, function, 0, wire.NO_CELL, form, argument).pack())

    return Fault(name, plan, lambda run, n: run.requests >= n, (HostFunctionError, OffloadTimeout))


FAULTS: Final = (
    _failing("refused", DriverError),
    _failing("out of memory", OutOfMemoryError),
    _failing("launch failed", LaunchError),
    _failing("lost", DeviceLostError),
    Fault("delayed", lambda device, n: device.delay(at=n), lambda run, n: run.device.delayed > 0),
    Fault("dropped", lambda device, n: device.drop(at=n), lambda run, n: run.device.dropped > 0, (ClosedError,)),
)
"""What goes wrong with the n-th call, or the n-th completion."""
TEARS: Final = (
    _torn("torn", 0, wire.Form.ROWS, 0xFFFF_FFFF),
    _torn("forged", 123, 8, 0),
)
"""What goes wrong with the n-th request of kernels that call: one that makes no sense, one for an unknown function."""


@dataclass
class Case:
    """How one run has ended."""

    scenario: str
    fault: str
    at: int
    injected: bool
    """Whether the scenario got so far at all."""
    hangs: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Everything that was found, in words."""
        kinds = {"hang": self.hangs, "wrong": self.wrong, "leak": self.leaks}
        return [f"{self}: {kind}: {text}" for kind, texts in kinds.items() for text in texts]

    def __str__(self) -> str:
        return f"{self.scenario}, {self.fault} {self.at}"


class Run:
    """What a scenario has: its Offload, and the operations it is held to.

    Attributes
    ----------
    device
        The device, on which the fault is planned.
    operations
        What was noted so far.
    """

    def __init__(
        self, device: FaultyDevice, arm: Callable[[], None], explains: tuple[type[BaseException], ...]
    ) -> None:
        self.device: Final[FaultyDevice] = device
        self.operations: list[Operation[Any]] = []
        self.off: Offload | None = None
        self._arm = arm
        self._explains = explains
        # Whether the Offload was left by an exception, which stops kernels that call.
        self._left = False
        self._may: dict[Operation[Any], tuple[type[BaseException], ...]] = {}
        self._expected: list[tuple[Operation[Any], NDArray[Any], tuple[Operation[Any], ...]]] = []

    @asynccontextmanager
    async def open(self, *, armed: bool = False, **options: Any) -> AsyncIterator[Offload]:
        """Open the Offload; faults count from then on, or, if ``armed``, from before. Once in a scenario."""
        if armed:
            self._arm()
        async with open_offload(self.device, timeout_s=_CLOSE_S, **options) as off:
            self.off = off
            if not armed:
                self._arm()
            try:
                yield off
                await self.settle()
            except BaseException:
                self._left = True
                raise
            finally:
                if self.device.dropped:
                    await off.aclose(_LOOK_S)  # it will not end well: do not wait for it

    def __call__(self, operation: Operation[_T], *, may: tuple[type[BaseException], ...] = ()) -> Operation[_T]:
        """Note an operation, and return it. It may fail with ``may`` without any fault."""
        self.operations.append(operation)
        self._may[operation] = may
        return operation

    def expect(self, operation: Operation[Any], value: ArrayLike, needs: Sequence[Operation[Any]] = ()) -> None:
        """Hold the result of an operation against ``value``, unless one of ``needs`` has failed."""
        self._expected.append((operation, np.asarray(value), tuple(needs)))

    async def settle(self) -> None:
        """Wait until everything noted is done; raises nothing of theirs."""
        while ahead := [operation for operation in self.operations if not operation.finished]:
            await asyncio.gather(*(operation.wait() for operation in ahead), return_exceptions=True)

    @property
    def requests(self) -> int:
        """How many requests of kernels the host has read."""
        return self.off._engine.reverse.served if self.off is not None and self.off._engine is not None else 0

    # -- verdicts --------------------------------------------------------------------------

    def explains(self, error: BaseException, may: tuple[type[BaseException], ...] = ()) -> bool:
        """Whether an error comes from the fault, or may come anyhow."""
        accepted = self._explains + may
        if self._is_lost():
            accepted += (DeviceLostError, ClosedError)
        if self._left:
            accepted += (asyncio.CancelledError,)
        return any(one in self.device.injected or isinstance(one, accepted) for one in _chain(error))

    def _is_lost(self) -> bool:
        """Whether the Offload has given its device up."""
        engine = self.off._engine if self.off is not None else None
        return engine is not None and engine.lost is not None

    def wrong(self) -> Iterator[str]:
        """Yield in words what is not as it should be, once all is over."""
        yield from self.device.problems
        for operation in self.operations:
            if not operation.finished:
                yield f"{operation!r} is not done"
                continue
            failure = operation.look()
            if failure is not None and not self.explains(failure, self._may[operation]):
                yield f"{operation!r} failed with what nobody had injected"
        yield from self._wrong_results()
        yield from self._wrong_state()

    def _wrong_results(self) -> Iterator[str]:
        for operation, value, needs in self._expected:
            if not operation.finished or operation.failure is not None:
                continue
            result = np.asarray(operation.outcome())
            if _POISONED in result.tobytes():
                yield f"{operation!r} gave memory that was freed"
            elif all(need.finished and need.failure is None for need in needs) and not np.array_equal(result, value):
                yield f"{operation!r} gave {_short(result)}, not {_short(value)}"

    def _wrong_state(self) -> Iterator[str]:
        engine = self.off._engine if self.off is not None else None
        if engine is None:
            return
        if not engine.quiet:
            yield "the Offload was closed with something still to do"
        lost = engine.refusal is not None and isinstance(engine.refusal(), DeviceLostError)
        if lost and self.device.injected and all(map(_is_out_of_memory, self.device.injected)):
            yield "running out of memory was taken for the end of the device"

    def left(self) -> list[str]:
        """Return in words what a device that is well was not given back."""
        if self.device.lost or self._is_lost():
            return []
        return [f"{count} {kind} of the device" for kind, count in self.device.left().items()]


Scenario: TypeAlias = Callable[[Run], Coroutine[Any, Any, None]]


def sweep(
    scenario: Scenario,
    faults: Sequence[Fault] = FAULTS,
    *,
    make: Callable[[], FaultyDevice] = FaultyDevice,
    first: int = 1,
    step: int = 1,
    limit_s: float = 10.0,
    check: bool = True,
    loop_factory: LoopFactory | None = None,
) -> Iterator[Case]:
    """Run ``scenario`` with each fault at each place, and yield how each run has ended.

    Parameters
    ----------
    scenario
        ``async def scenario(run)``. It opens its Offload with ``run.open()``, notes each operation with
        ``run(operation)``, and says with ``run.expect`` what its results are to be. What it raises is judged like
        the failure of an operation.
    faults
        Kinds of fault.
    make
        Makes the device of a run.
    first, step
        The first place that is tried, and how far the next one is from it.
    limit_s
        Seconds after which a run counts as hanging; it is cancelled then.
    check
        Whether to run the scenario without any fault first.
    loop_factory
        Makes the event loop of a run; an asyncio one by default.

    Yields
    ------
    Case
        One for each fault that was injected.

    Raises
    ------
    AssertionError
        The scenario goes wrong without any fault.

    Notes
    -----
    *Thread.* Each run has an event loop of its own, so no loop may be running in this thread.
    """
    if check:
        none = Fault("none", lambda device, n: None, lambda run, n: True)
        healthy = run_case(scenario, none, 0, make, limit_s, loop_factory)
        assert not healthy.problems, healthy.problems
    for fault in faults:
        at = first
        while (case := run_case(scenario, fault, at, make, limit_s, loop_factory)).injected:
            yield case
            at += step
        if case.problems:  # what comes after the last place went wrong all the same
            yield case


def run_case(
    scenario: Scenario,
    fault: Fault,
    at: int,
    make: Callable[[], FaultyDevice] = FaultyDevice,
    limit_s: float = 10.0,
    loop_factory: LoopFactory | None = None,
) -> Case:
    """Run ``scenario`` once with one fault; parameters as for :func:`sweep`."""
    before = Resources.now()
    case = Case(getattr(scenario, "__name__", repr(scenario)), fault.name, at, False)
    with _watched(case):
        _run(scenario, fault, at, make, limit_s, loop_factory, case)
    case.leaks += before.leaks()
    return case


def _run(
    scenario: Scenario,
    fault: Fault,
    at: int,
    make: Callable[[], FaultyDevice],
    limit_s: float,
    loop_factory: LoopFactory | None,
    case: Case,
) -> None:
    """Run it on a loop of its own. Nothing of the run is held when this returns."""
    device = make()
    run = Run(device, lambda: fault.plan(device, at), fault.explains)
    unexplained: list[str] = []

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is None or not run.explains(error):
            unexplained.append(f"event loop: {context['message']}: {error!r}")

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.get_loop().set_exception_handler(on_error)
        outcome = runner.run(_watch(scenario(run), run, limit_s, case))
    case.injected = fault.fired(run, at)
    if outcome is not None and not run.explains(outcome):
        case.wrong.append(f"the scenario raised {outcome!r}")
    case.wrong += [*run.wrong(), *unexplained]
    case.leaks += run.left()


async def _watch(scenario: Coroutine[Any, Any, None], run: Run, limit_s: float, case: Case) -> BaseException | None:
    """Wait for a scenario, help it past delayed completions, end it if it hangs; return what it raised."""
    loop = asyncio.get_running_loop()
    task, deadline, calm = loop.create_task(scenario), loop.time() + limit_s, 0
    last: tuple[int, int] | None = None
    given_up = False
    while not task.done():
        await asyncio.wait([task], timeout=_LOOK_S)
        if run.device.delayed:
            run.device.release()
        now = (run.device.marks, sum(operation.finished for operation in run.operations))
        calm, last = calm + 1 if now == last else 0, now
        if run.device.dropped and not given_up and calm * _LOOK_S > _PATIENCE_S:
            given_up = task.cancel()
        if loop.time() > deadline:
            case.hangs.append(f"after {limit_s} s: {_where(task)}")
            await _end(task, run)
            return None
    left = [one for one in asyncio.all_tasks() if one is not asyncio.current_task()]
    if left:
        await asyncio.wait(left, timeout=_CLOSE_S)
        case.leaks += [f"{one!r}" for one in left if not one.done()]
    if task.cancelled():
        return None if given_up else asyncio.CancelledError()
    return task.exception()


async def _end(task: asyncio.Task[None], run: Run) -> None:
    """Get rid of a scenario that hangs, as far as that can be done from here."""
    task.cancel()
    await asyncio.wait([task], timeout=_CLOSE_S)
    if not task.done() and run.off is not None:
        run.off.terminate()
        await asyncio.wait([task], timeout=_CLOSE_S)


@contextmanager
def _watched(case: Case) -> Iterator[None]:
    """Count warnings and exceptions that nobody can receive; keep log lines off the terminal."""
    import structlog

    def unraisable(args: Any) -> None:
        case.wrong.append(f"unraisable: {args.exc_value!r} in {args.object!r}")

    previous, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        with warnings.catch_warnings(record=True) as caught, structlog.testing.capture_logs():
            warnings.simplefilter("always")
            yield
    finally:
        sys.unraisablehook = previous
    case.wrong += [f"{warning.category.__name__}: {warning.message}" for warning in caught]


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether an injected error says that nothing but memory is missing."""
    return isinstance(error, OutOfMemoryError) and error.operation in ("allocate", "register")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and everything that it came from."""
    ahead, seen = [error], set()
    while ahead:
        one = ahead.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        ahead += [cause for cause in (one.__cause__, getattr(one, "root", None)) if cause is not None]
        if isinstance(one, BaseExceptionGroup):
            ahead += one.exceptions


def _where(task: asyncio.Task[Any]) -> str:
    """Say where a task waits."""
    frames = task.get_stack()
    return ", ".join(f"{frame.f_code.co_name}:{frame.f_lineno}" for frame in frames) or repr(task)


def _short(array: NDArray[Any]) -> str:
    return np.array2string(array, threshold=8, edgeitems=3).replace("\n", " ")
