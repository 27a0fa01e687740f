"""Submitting: from what a program asked for to an operation with its place among the others.

Everything is checked before anything is changed, so a submission that raises has done nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextvars import copy_context
from functools import partial
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiooffload.buffer import Buffer
from aiooffload.engine.adopted import Adoptions
from aiooffload.engine.bound import BoundLaunch, bind
from aiooffload.engine.host_functions import waiting_launches
from aiooffload.engine.lanes import Lane, Lanes
from aiooffload.engine.launches import PLAIN, Geometry, Kernels, Site, buffers
from aiooffload.engine.scratch import ScratchCache, ScratchLayout, layout
from aiooffload.errors import DeviceLostError, OffloadTimeout, UsageError, WouldBlock
from aiooffload.interchange import CPU, CUDA, describe, is_array
from aiooffload.kernel import Kernel
from aiooffload.operation import Operation
from aiooffload.rules.ordering import unfinished
from aiooffload.rules.scheduler import dependency_error, needs_host, waits_for

if TYPE_CHECKING:
    from contextvars import Context

    from aiooffload._native import Launcher
    from aiooffload.buffer import Allocation, PinnedArray
    from aiooffload.drivers.api import CallParameter, Device, Stream
    from aiooffload.engine.host_tasks import HostTasks
    from aiooffload.engine.reverse import Reverse
    from aiooffload.operation import OperationOwner

__all__ = ["After", "Submission", "Terms"]

_T = TypeVar("_T")
After = Operation[Any] | Awaitable[Any]


class Terms(NamedTuple):
    """When and where an operation may run; see ``Offload.launch``."""

    after: Iterable[After] = ()
    lane: Lane | None = None
    instant: bool = False
    timeout_s: float | None = None
    priority: int = 0
    coarse: bool = False

    def also_after(self, more: Iterable[After]) -> Terms:
        """Return them with more to come after."""
        return self._replace(after=[*_as_list(self.after), *more])


def _as_list(after: Iterable[After]) -> Iterable[After]:
    """Allow a single one where several may stand."""
    if isinstance(after, list | tuple):
        return after
    if isawaitable(after):  # asked first: a future can be iterated over
        return (after,)
    try:
        return list(after)
    except TypeError:
        raise UsageError(f"after takes operations and awaitables, not {after!r}") from None


class Submission:
    """Takes the submissions of one engine.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    device
        What custom operations and graphs need of it.
    lanes
        Places the operations.
    adoptions
        Knows streams of somebody else.
    kernels
        What is loaded, and the geometries that were used.
    launcher
        The launch path, which bound launches take.
    reverse
        Starts the launches whose kernels call.
    scratch
        Lends workspace to launches.
    host_tasks
        Runs the steps on the host.
    owner
        The engine, as operations and memory name it.
    program_order
        Whether operations that share a buffer are ordered by submission.
    check_open
        Raises if nothing can be submitted any more.
    cancel
        Ends an operation as far as it can be ended.
    on_lost
        Told when the driver says that the device is gone.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        device: Device,
        lanes: Lanes,
        adoptions: Adoptions,
        kernels: Kernels,
        launcher: Launcher,
        reverse: Reverse,
        scratch: ScratchCache,
        host_tasks: HostTasks,
        owner: OperationOwner,
        program_order: bool,
        check_open: Callable[[], None],
        cancel: Callable[[Operation[Any], BaseException], None],
        on_lost: Callable[[DeviceLostError], None],
    ) -> None:
        self._loop = loop
        self._device = device
        self._lanes = lanes
        self._adoptions = adoptions
        self._kernels = kernels
        self._launcher = launcher
        self._reverse = reverse
        self._scratch = scratch
        self._host_tasks = host_tasks
        self._owner = owner
        self._program_order = program_order
        self._check_open = check_open
        self._cancel = cancel
        self._on_lost = on_lost
        # The engines whose operations may stand in after= as well: those of one Offload of several devices.
        self.kin: Collection[OperationOwner] = ()

    # -- launches --------------------------------------------------------------------------

    def launch(self, kernel: Kernel, geometry: Geometry, args: tuple[Any, ...], terms: Terms) -> Operation[None]:
        """Submit a launch that the launch path does not take; see ``Offload.launch``."""
        site = self._site(kernel, geometry, args)
        if not all(isinstance(value, PLAIN) for value in args):
            args, terms = self._adapt(kernel, args, terms)
        if site is None:
            return self._launch_after_load(kernel, geometry, args, terms)
        uses = buffers(kernel, args, self._owner) if args else ()
        wanted = layout(kernel, args, *geometry[:2]) if args else None
        if kernel.calls or wanted is not None:
            args = _retained(args)
        operation = self._new(kernel, terms)
        self._equip(operation, site, args, wanted, copy_context() if kernel.calls else None)
        self.submit(operation, uses, terms, keep=args)
        return operation

    def _adapt(self, kernel: Kernel, args: tuple[Any, ...], terms: Terms) -> tuple[tuple[Any, ...], Terms]:
        """Put Buffers in the place of other libraries' arrays, and let the launch come after their streams."""
        device_type = CPU if self._owner.label == "host" else CUDA
        adapted, streams = list(args), set()
        for index, value in enumerate(args):
            if isinstance(value, PLAIN) or not is_array(value):
                continue
            array = describe(value, device_type)
            if array.read_only and not kernel.signature.read_only(index):
                raise UsageError(
                    f"argument {index} of kernel {kernel.name} is a read-only array; annotate it with ao.In"
                )
            adapted[index] = Buffer._of(array, device_type)
            streams.add(array.stream)
        after = [self.completion(stream) for stream in streams - {None}]
        return tuple(adapted), terms.also_after(after) if after else terms

    def _site(self, kernel: Kernel, geometry: Geometry, args: tuple[Any, ...]) -> Site | None:
        """Return what a launch needs, None if the kernel is not loaded yet; raises for what is none."""
        self._check_open()
        if not isinstance(kernel, Kernel):
            raise UsageError(f"expected a Kernel, not {type(kernel).__name__}: make one with @ao.kernel")
        if type(geometry[2]) is not int:
            raise UsageError(f"shared_bytes is an integer, not {geometry[2]!r}")
        if not isinstance(args, tuple):
            raise UsageError(f"args is a tuple, not {type(args).__name__}")
        try:
            site = self._kernels.sites.get((kernel, *geometry))
        except TypeError:  # a list as grid or block
            site = None
        return self._plan(kernel, geometry) if site is None and self._kernels.loaded(kernel) else site

    def bind(self, kernel: Kernel, geometry: Geometry, args: tuple[Any, ...]) -> BoundLaunch:
        """Check and pack the arguments of launches to come; see ``Offload.bind``."""
        site = self._site(kernel, geometry, args)
        if kernel.calls:
            raise UsageError(f"kernel {kernel.name} calls host functions and cannot be bound: use off.launch")
        if site is None:
            raise UsageError(f"kernel {kernel.name} is not loaded: await off.load({kernel.name}) before binding it")
        buffers(kernel, args, self._owner)
        if layout(kernel, args, *geometry[:2]) is not None:
            raise UsageError(f"kernel {kernel.name} cannot be bound with scratch, which each lane has of its own")

        def launch(values: tuple[Any, ...], lane: Lane | None, after: Iterable[After], coarse: bool) -> Operation[None]:
            self._owner.check_caller()
            return self.launch(kernel, geometry, values, Terms(after, lane, coarse=coarse))

        return bind(self._launcher, kernel, site, args, launch)

    def _new(self, kernel: Kernel, terms: Terms) -> Operation[None]:
        """Make the operation of a launch; one that calls has lanes of its own kind."""
        operation: Operation[None] = Operation(self._loop, self._owner, kernel.name)
        if not kernel.calls:
            return operation
        if terms.lane is not None:
            raise UsageError(f"kernel {kernel.name} calls host functions: such launches have lanes of their own")
        if terms.coarse:
            raise UsageError(f"kernel {kernel.name} calls host functions: such launches are not coarse")
        operation.calling = 1
        operation.arrival = self._reverse.arrived
        if waiting_launches():
            if not self._lanes.may_nest():
                raise UsageError(
                    f"kernel {kernel.name} was launched by a host function, and no calling lane is free: it would wait "
                    "for the launch that waits for that function; raise calling_lanes"
                )
            operation.calling = 2
        return operation

    def _equip(
        self,
        operation: Operation[None],
        site: Site,
        args: tuple[Any, ...],
        wanted: ScratchLayout | None,
        context: Context | None,
    ) -> None:
        """Give it what it takes to start; raises UsageError for arguments that do not fit."""
        operation.plan = site.plan
        if context is None and wanted is None:
            operation.prepared = site.prepare(args)
            return
        prepare = site.late(args, wanted, partial(self._scratch.fill, operation))
        if context is None:
            operation.steps = partial(_start, operation, prepare)
        else:
            operation.steps = partial(self._reverse.start, operation, context, prepare)

    def _plan(self, kernel: Kernel, geometry: Geometry) -> Site:
        try:
            return self._kernels.site(kernel, geometry)
        except DeviceLostError as error:
            self._on_lost(error)
            raise

    def _launch_after_load(
        self, kernel: Kernel, geometry: Geometry, args: tuple[Any, ...], terms: Terms
    ) -> Operation[None]:
        """Check what can be checked now, and queue the launch behind the kernel's load."""
        self._kernels.check_geometry(geometry)
        kernel.signature.check(kernel.name, args)
        uses = buffers(kernel, args, self._owner)
        wanted = layout(kernel, args, *geometry[:2])
        args = _retained(args)
        if waiting_launches():
            raise UsageError(
                f"kernel {kernel.name} is not loaded, and loading it would wait for the launch that waits for this "
                "host function: await off.load(...) before"
            )
        operation = self._new(kernel, terms)
        if terms.instant:
            raise WouldBlock(f"kernel {kernel.name} is not loaded yet; await off.load(...) first")
        operation.holds = 1
        context = copy_context() if kernel.calls else None
        self.submit(operation, uses, terms, keep=args)

        def loaded(load: asyncio.Future[Any]) -> None:
            if operation.finished:
                return
            try:
                load.result()
                self._equip(operation, self._plan(kernel, geometry), args, wanted, context)
            except (Exception, asyncio.CancelledError) as error:  # whatever it was, the launch ends with it
                self._lanes.stop(operation, self._lanes.dead or error)
            else:
                self._lanes.release(operation)

        self._kernels.load(kernel).add_done_callback(loaded)
        return operation

    def host_task(self, function: Callable[[], Coroutine[Any, Any, _T]], after: Iterable[After]) -> Operation[_T]:
        """Submit a coroutine as a step of the graph; see ``Offload.host_task``."""
        self._check_open()
        name = getattr(function, "__name__", "host task")
        operation: Operation[_T] = Operation(self._loop, self._owner, name)
        operation.kind = "host task"
        self._host_tasks.prepare(operation, function, copy_context())
        try:
            self.submit(operation, (), Terms(after))
        except BaseException:
            self._host_tasks.forget(operation)
            raise
        return operation

    def stand_in(
        self, name: str, memory: Allocation | PinnedArray, writes: bool, begin: Callable[[], None]
    ) -> tuple[Operation[None], Callable[[], None]]:
        """Submit what stands for the use of ``memory`` by another engine, and return what ends it.

        ``begin`` is called when it is its turn.
        """
        self._check_open()
        operation: Operation[None] = Operation(self._loop, self._owner, name)
        operation.kind = "visit"
        leave = self._host_tasks.prepare_visit(operation, begin)
        try:
            self.submit(operation, [(memory, writes)], Terms())
        except BaseException:
            self._host_tasks.forget(operation)
            raise
        return operation, leave

    # -- other work ------------------------------------------------------------------------

    def custom(self, function: Callable[[Lane], _T], terms: Terms) -> Operation[_T]:
        """Submit a function that enqueues work by itself; see ``Offload.custom_operation``."""
        if not callable(function) or iscoroutinefunction(function):
            raise UsageError(f"a custom operation is a plain function, not {function!r}; a coroutine is a host task")
        operation: Operation[_T] = Operation(self._loop, self._owner, getattr(function, "__name__", "custom operation"))

        def steps(_: Stream) -> None:
            with self._lanes.nothing_else(), self._device.current():
                value = function(operation.lane)
            if isawaitable(value):
                if iscoroutine(value):
                    value.close()
                raise UsageError(f"custom operation {operation.name} returned {value!r}: it has to be a plain function")
            operation.arrival = lambda op: op.finish(value)

        operation.steps = steps
        operation.kind = "custom operation"
        self.submit(operation, (), terms, keep=function)  # it may be all that holds what its work on the device uses
        return operation

    def graph(self, graph: Any, terms: Terms) -> Operation[None]:
        """Submit a replay of a graph; see ``Offload.launch_graph``."""
        operation: Operation[None] = Operation(self._loop, self._owner, "graph")
        operation.steps = self._device.replay(graph)
        operation.kind = "graph"
        self.submit(operation, (), terms, keep=graph)
        return operation

    def gate(self, awaitable: Awaitable[Any], lane: Lane, after: Iterable[After], timeout_s: float) -> Operation[None]:
        """Submit a step of a lane that is done when ``awaitable`` is; see ``Offload.gate``."""
        self._check_open()
        operation: Operation[None] = Operation(self._loop, self._owner, "gate")
        operation.gate = True
        operation.kind = "gate"
        operation.steps = lambda stream: None
        if not isinstance(lane, Lane):
            raise UsageError(f"a gate stands on a lane: pass one of off.lanes, not {lane!r}")
        if lane.adopted:
            raise UsageError("a gate keeps work on the host, which a stream that is not ours cannot")
        if not isawaitable(awaitable):
            raise UsageError(f"a gate is opened by an awaitable, not by {awaitable!r}")
        self.submit(operation, (), Terms([awaitable, *_as_list(after)], lane, timeout_s=timeout_s))
        return operation

    def completion(self, stream: object) -> Operation[None]:
        """Submit what is done when everything on ``stream`` is; see ``Offload.completion``."""
        self._check_open()
        lane = self._adoptions.adopt(stream, None)
        operation: Operation[None] = Operation(self._loop, self._owner, "completion")
        operation.kind = "completion"
        operation.steps = lambda stream: None
        try:
            self.submit(operation, (), Terms(lane=lane))
        finally:
            if lane.adopted:
                lane.release()
        return operation

    def order(self, stream: object, after: Iterable[After]) -> None:
        """Let a stream wait for operations; see ``Offload.order``."""
        self._check_open()
        operations, awaitables = self._sort_after(after)
        if awaitables:
            raise UsageError(f"a stream waits for operations, not for {awaitables[0]!r}")
        for operation in operations:
            if needs_host(operation):
                raise WouldBlock(f"{operation!r} is something that only the host can wait for: await it")
        lane = self._adoptions.adopt(stream, None)
        try:
            self._adoptions.check(lane)
            for operation in operations:
                if not operation.finished and operation.lane is not lane:
                    operation.lane.enqueue_wait_for(operation.sequence, lane.stream)
        except DeviceLostError as error:
            self._on_lost(error)
            raise
        finally:
            if lane.adopted:
                lane.release()

    # -- everything ------------------------------------------------------------------------

    def submit(
        self,
        operation: Operation[Any],
        uses: Sequence[tuple[Allocation | PinnedArray, bool]],
        terms: Terms,
        keep: object = None,
    ) -> None:
        """Order ``operation`` after what it shares memory with and what ``after`` names, and place it.

        ``uses`` says which memory it touches and whether it writes it. Raises before anything
        was changed, or not at all.
        """
        try:
            awaited = self._order(operation, uses, terms, keep)
        except BaseException:
            operation.steps = None  # it may refer to the operation, and both would keep what it works on
            raise
        if terms.timeout_s is not None:
            self._expire_after(operation, terms.timeout_s)
        for awaitable in awaited:
            self._hold_for(operation, awaitable)
        self._lanes.place(operation, terms.lane)
        operation.instant = operation.queue is not None

    def _order(
        self,
        operation: Operation[Any],
        uses: Sequence[tuple[Allocation | PinnedArray, bool]],
        terms: Terms,
        keep: object,
    ) -> list[Awaitable[Any]]:
        """Check and order it; return the awaitables that it comes after. Raises before anything was changed."""
        self._check_open()
        after, lane, instant, timeout_s, priority, coarse = terms
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
            raise UsageError(f"timeout_s is a number of seconds, at least 0, not {timeout_s!r}")
        operation.priority = self._lanes.check_lane(operation, lane, priority)
        if lane is not None and lane.adopted:
            self._adoptions.check(lane)
            coarse = False  # its mark would come after what the owner enqueues, or into a graph that he captures
        operation.coarse = bool(coarse)
        requires, awaited = self._sort_after(after)  # first: it runs a program's code, which may submit
        ordered = uses if self._program_order else ()
        deps = [dep for memory, writes in ordered for dep in memory.history.conflicts(writes)]
        deps += unfinished(requires)
        self._check_no_deadlock(operation, deps)
        self._lanes.check_room(operation, instant, deps, lane, bool(awaited))
        for memory, writes in ordered:
            memory.history.record(operation, writes)
        # dict: one operation may be in the way for several reasons and must hold only once.
        operation.deps = list(dict.fromkeys(deps)) or None
        operation.requires = tuple(requires) or None
        leases = [memory.lease for memory, _ in uses]
        operation.keep = (operation.keep, keep, leases)
        return awaited

    def _check_no_deadlock(self, operation: Operation[Any], deps: Sequence[Operation[Any]]) -> None:
        """Refuse what a host function submits behind the very launch that waits for it."""
        for launch in waiting_launches() if deps else ():
            if waits_for(deps, launch):
                raise UsageError(
                    f"{operation.name} would come after {launch!r}, which waits for this host function: they share a "
                    "buffer, or after= names it; use mapped arguments for what a running kernel and the host exchange"
                )

    def _sort_after(self, after: Iterable[After]) -> tuple[list[Operation[Any]], list[Awaitable[Any]]]:
        operations: list[Operation[Any]] = []
        awaitables: list[Awaitable[Any]] = []
        for item in _as_list(after):
            if not isinstance(item, Operation):
                if not isawaitable(item):
                    raise UsageError(f"after takes operations and awaitables, not {item!r}")
                if asyncio.isfuture(item) and item.get_loop() is not self._loop:
                    raise UsageError(
                        f"{item!r} in after= belongs to another event loop: wrap it with asyncio.wrap_future, "
                        "or submit there through asyncio.run_coroutine_threadsafe"
                    )
                awaitables.append(item)
            elif item.owner in self.kin and item.owner is not self._owner:
                awaitables.append(item)
            elif item.owner is not self._owner:
                raise UsageError(f"{item!r} in after= belongs to another Offload")
            else:
                operations.append(item)
        return operations, awaitables

    def _hold_for(self, operation: Operation[Any], awaitable: Awaitable[Any]) -> None:
        operation.holds += 1
        future = asyncio.ensure_future(awaitable)

        def over(done: asyncio.Future[Any]) -> None:
            cause: BaseException | None = asyncio.CancelledError() if done.cancelled() else done.exception()
            if cause is None:
                self._lanes.release(operation)
                return
            what = repr(awaitable) if isinstance(awaitable, Operation) else "an awaitable"
            self._lanes.stop(operation, dependency_error(f"{what} that {operation.name} came after", cause))

        future.add_done_callback(over)
        # A loop has only weak references to tasks. A coroutine was handed over: nobody else can end it.
        operation.keep = (operation.keep, _Owned(future) if asyncio.iscoroutine(awaitable) else future)

    def _expire_after(self, operation: Operation[Any], timeout_s: float) -> None:
        handle = self._loop.call_later(
            timeout_s, lambda: self._cancel(operation, OffloadTimeout(f"{operation.name} took over {timeout_s} s"))
        )
        operation.add_done_callback(lambda _: handle.cancel())


class _Owned:
    """Ends a task with the operation that keeps this."""

    __slots__ = ("_task",)

    def __init__(self, task: asyncio.Future[Any]) -> None:
        self._task = task

    def __del__(self) -> None:
        if not self._task.get_loop().is_closed():
            self._task.cancel()


def _retained(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments that are packed when the launch starts: whoever gave them may close them before."""
    return tuple(value.retained() if isinstance(value, Buffer) else value for value in args)


def _start(operation: Operation[None], prepare: Callable[[CallParameter | None], Any], stream: Stream) -> None:
    """Enqueue a kernel whose arguments could not be packed before its lane was known."""
    assert operation.plan is not None
    stream.enqueue_kernel(operation.plan, prepare(None), operation, 0)
