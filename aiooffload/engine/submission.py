"""Submitting: from what a program asked for to an operation with its place among the others.

Everything is checked before anything is changed, so a submission that raises has done nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextvars import copy_context
from functools import partial
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from aiooffload.engine.bound import BoundLaunch, bind
from aiooffload.engine.host_functions import waiting_launches
from aiooffload.engine.lanes import Lane, Lanes, dependency_error, waits_for
from aiooffload.engine.launches import Geometry, Kernels, Site, buffers
from aiooffload.errors import DeviceLostError, OffloadTimeout, UsageError, WouldBlock
from aiooffload.kernel import Kernel
from aiooffload.operation import Operation
from aiooffload.rules.ordering import unfinished

if TYPE_CHECKING:
    from contextvars import Context

    from aiooffload._native import Launcher
    from aiooffload.buffer import Allocation, PinnedArray
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


class Submission:
    """Takes the submissions of one engine.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    lanes
        Places the operations.
    kernels
        What is loaded, and the geometries that were used.
    launcher
        The launch path, which bound launches take.
    reverse
        Starts the launches whose kernels call.
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
        lanes: Lanes,
        kernels: Kernels,
        launcher: Launcher,
        reverse: Reverse,
        host_tasks: HostTasks,
        owner: OperationOwner,
        program_order: bool,
        check_open: Callable[[], None],
        cancel: Callable[[Operation[Any], BaseException], None],
        on_lost: Callable[[DeviceLostError], None],
    ) -> None:
        self._loop = loop
        self._lanes = lanes
        self._kernels = kernels
        self._launcher = launcher
        self._reverse = reverse
        self._host_tasks = host_tasks
        self._owner = owner
        self._program_order = program_order
        self._check_open = check_open
        self._cancel = cancel
        self._on_lost = on_lost

    # -- launches --------------------------------------------------------------------------

    def launch(self, kernel: Kernel, geometry: Geometry, args: tuple[Any, ...], terms: Terms) -> Operation[None]:
        """Submit a launch that the launch path does not take; see ``Offload.launch``."""
        site = self._site(kernel, geometry, args)
        if site is None:
            return self._launch_after_load(kernel, geometry, args, terms)
        uses = buffers(kernel, args, self._owner) if args else ()
        operation, terms = self._new(kernel, terms)
        self._equip(operation, site, args, copy_context() if kernel.calls else None)
        self.submit(operation, uses, terms, keep=args)
        return operation

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

        def launch(values: tuple[Any, ...], lane: Lane | None, after: Iterable[After]) -> Operation[None]:
            self._owner.check_caller()
            return self.launch(kernel, geometry, values, Terms(after, lane))

        return bind(self._launcher, kernel, site, args, launch)

    def _new(self, kernel: Kernel, terms: Terms) -> tuple[Operation[None], Terms]:
        """Make the operation of a launch; one that calls gets a lane of its own kind."""
        operation: Operation[None] = Operation(self._loop, self._owner, kernel.name)
        if not kernel.calls:
            return operation, terms
        if terms.lane is not None:
            raise UsageError(f"kernel {kernel.name} calls host functions: such launches have lanes of their own")
        operation.calling = 1
        operation.arrival = self._reverse.arrived
        if waiting_launches():
            lane = self._lanes.free_calling_lane()
            if lane is None:
                raise UsageError(
                    f"kernel {kernel.name} was launched by a host function, and no calling lane is free: it would wait "
                    "for the launch that waits for that function; raise calling_lanes"
                )
            operation.calling = 2
            terms = terms._replace(lane=lane)
        return operation, terms

    def _equip(self, operation: Operation[None], site: Site, args: tuple[Any, ...], context: Context | None) -> None:
        """Give it what it takes to start; raises UsageError for arguments that do not fit."""
        operation.plan = site.plan
        if context is None:
            operation.prepared = site.prepare(args)
        else:
            operation.steps = partial(self._reverse.start, operation, context, site.calling(args))

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
        if waiting_launches():
            raise UsageError(
                f"kernel {kernel.name} is not loaded, and loading it would wait for the launch that waits for this "
                "host function: await off.load(...) before"
            )
        operation, terms = self._new(kernel, terms)
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
                self._equip(operation, self._plan(kernel, geometry), args, context)
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
        self._host_tasks.prepare(operation, function, copy_context())
        try:
            self.submit(operation, (), Terms(after))
        except BaseException:
            self._host_tasks.forget(operation)
            raise
        return operation

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
        self._check_open()
        after, lane, instant, timeout_s = terms
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s >= 0):
            raise UsageError(f"timeout_s is a number of seconds, at least 0, not {timeout_s!r}")
        self._lanes.check_lane(operation, lane)
        ordered = uses if self._program_order else ()
        deps = [dep for memory, writes in ordered for dep in memory.history.conflicts(writes)]
        requires, awaited = self._sort_after(after)
        deps += unfinished(requires)
        self._check_no_deadlock(operation, deps)
        if instant and awaited:
            raise WouldBlock("it comes after something that only the host can wait for")
        self._lanes.check_room(operation, instant, deps, lane)
        for memory, writes in ordered:
            memory.history.record(operation, writes)
        # dict: one operation may be in the way for several reasons and must hold only once.
        operation.deps = list(dict.fromkeys(deps)) or None
        operation.requires = tuple(requires) or None
        leases = [memory.lease for memory, _ in uses]
        operation.keep = (operation.keep, keep, leases)
        if timeout_s is not None:
            self._expire_after(operation, timeout_s)
        for awaitable in awaited:
            self._hold_for(operation, awaitable)
        self._lanes.place(operation, lane)

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
        for item in (after,) if isinstance(after, Operation) else after:
            if not isinstance(item, Operation):
                if not isawaitable(item):
                    raise UsageError(f"after takes operations and awaitables, not {item!r}")
                if asyncio.isfuture(item) and item.get_loop() is not self._loop:
                    raise UsageError(
                        f"{item!r} in after= belongs to another event loop: wrap it with asyncio.wrap_future, "
                        "or submit there through asyncio.run_coroutine_threadsafe"
                    )
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
            self._lanes.stop(operation, dependency_error(f"an awaitable that {operation.name} came after", cause))

        future.add_done_callback(over)

    def _expire_after(self, operation: Operation[Any], timeout_s: float) -> None:
        handle = self._loop.call_later(
            timeout_s, lambda: self._cancel(operation, OffloadTimeout(f"{operation.name} took over {timeout_s} s"))
        )
        operation.add_done_callback(lambda _: handle.cancel())
