"""What a program holds: the Offload, one device under one event loop."""

from __future__ import annotations

import asyncio
import atexit
import os
import warnings
import weakref
from asyncio import _get_running_loop
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, overload

from aiooffload.buffer import Buffer, PinnedArray
from aiooffload.engine.engine import Engine
from aiooffload.engine.host_functions import HostFunction, OnError, check_outside
from aiooffload.engine.submission import After, Terms
from aiooffload.errors import ClosedError, UsageError
from aiooffload.operation import Operation
from aiooffload.trace import Trace

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from aiooffload._native import Launcher
    from aiooffload.drivers.api import Device, DeviceProperties
    from aiooffload.engine.bound import BoundLaunch
    from aiooffload.engine.lanes import Lane
    from aiooffload.errors import DeviceLostError
    from aiooffload.kernel import Kernel
    from aiooffload.rules.geometry import Dimensions
    from aiooffload.rules.wake import WakeMode

__all__ = ["Offload"]

_T = TypeVar("_T")
_F = TypeVar("_F", bound=Callable[..., Coroutine[Any, Any, Any]])

_entered: weakref.WeakSet[Offload] = weakref.WeakSet()


class Offload:
    """One device under the running event loop. Use it as an async context manager.

    Parameters
    ----------
    device
        ``"auto"`` (the first GPU, or the host device where no driver or no GPU exists),
        ``"cuda:N"`` or ``"host"``. Or several: ``"cuda:*"`` is every GPU, ``"cuda:0,cuda:2"`` are those named. Then
        what follows is what each of them has, and the methods choose among them, as the Notes say.
    lanes
        Streams to spread operations over, 1 to 256; or how many there are of each priority, as
        ``{0: 16, -1: 4}``, where smaller numbers are more urgent and 0 is what an operation has
        unless it names another. The device may know fewer priorities (CUDA: 0 to -5 on current GPUs).
    wake
        ``"hybrid"`` looks while a completion is near and sleeps otherwise; ``"interrupt"`` never
        spins; ``"poll"`` never sleeps while work is in flight.
    ordering
        ``"program"``: operations that share an allocation run in the order of submission, unless
        both only read it. ``"explicit"``: only ``after=``, a lane or an await orders.
    max_pending
        How many operations may wait on the host before submitting raises WouldBlock.
    lane_depth
        How many operations a lane takes at a time, 1 to 200; the rest wait on the host, in order.
    calling_lanes
        Streams for launches whose kernels call host functions, 1 to 64, beside ``lanes``: so many
        run at a time. They are made when the first such kernel is loaded.
    call_timeout_s
        Seconds after which a call of a kernel gives up waiting for the host (status TIMEOUT), on
        the device's clock.
    scratch_keep_bytes
        The largest block that a lane keeps between launches with a :class:`Scratch`; 0 keeps nothing. All lanes
        together keep an eighth of the device's memory at most, and nothing for longer than 5 seconds.
    allocator
        Where the memory of Buffers and scratch comes from, instead of a pool of the Offload's own: a
        ``cuda.core.MemoryResource``, or what has its ``allocate(nbytes, stream=...)``, whose result has
        ``handle`` and ``close(stream)``. For GPUs. Neither call may wait for kernels, as ``cudaFree`` does;
        the memory is aligned to 256 bytes. It has to live as long as the Offload.
    hard_timeout_s
        Seconds that a launch may run, counted from when nothing was left that it had to wait for on the device; by
        default it may run for ever. Nothing but the end of the process stops a kernel, so one that is past it
        counts as a lost device: everything fails with DeviceLostError, and memory in use stays as it is. It does not
        count what is on adopted streams; it counts waiting for what :meth:`order` names.
    on_lost
        Called as ``on_lost(error)`` with the DeviceLostError, once, on the loop's thread, after everything has
        failed with it: the place to have the process replaced. What it raises goes to the loop's exception handler.

    Raises
    ------
    UsageError
        A parameter is out of range; at ``__aenter__`` also where no event loop is running, or where the device
        cannot use ``allocator``.
    DeviceUnavailableError
        The device or its driver does not exist or cannot be used.

    Notes
    -----
    *Thread.* It belongs to the loop and thread that entered it. From another thread go through
    ``asyncio.run_coroutine_threadsafe``. A forked child cannot use it.
    *Ordering.* See ``ordering``. Lanes run independently of each other.
    *Several devices.* A submission goes to the device of the lane that it names, or of its Buffers, which have to be
    of one device (``copy`` moves between two: it goes to that of ``dst``), or else to the one with the least work, and
    among equals the least memory in use. So do ``empty``, ``zeros``, ``put`` and ``pinned``. ``off.devices`` are the
    Offloads of one device each, for what is a matter of one: its ``properties``, a ``trace``, a stream to ``adopt``.
    Operations of one may stand in ``after`` of another, which waits for them on the host. A GPU that is lost takes
    the others of the process with it; each error says which one it was.
    """

    _of_several: ClassVar[type[Offload]]
    """The class for several devices, which builds on this one; ``group.py`` sets it."""

    def __init__(
        self,
        device: str = "auto",
        *,
        lanes: int | Mapping[int, int] = 16,
        wake: WakeMode = "hybrid",
        ordering: str = "program",
        max_pending: int = 65_536,
        lane_depth: int = 128,
        calling_lanes: int = 8,
        call_timeout_s: float = 30.0,
        scratch_keep_bytes: int = 128 << 20,
        allocator: Any = None,
        hard_timeout_s: float | None = None,
        on_lost: Callable[[DeviceLostError], object] | None = None,
    ) -> None:
        # None before it was entered, and in a forked child.
        self._engine: Engine | None = None
        self._launcher: Launcher | None = None
        self._state = "was not entered yet: use `async with`"
        self._loop: asyncio.AbstractEventLoop | None = None
        counts = dict(lanes) if isinstance(lanes, Mapping) else {0: lanes}
        numbers = (*counts, *counts.values(), max_pending, lane_depth, calling_lanes, scratch_keep_bytes)
        if any(type(number) is not int for number in numbers):
            raise UsageError("lanes, max_pending, lane_depth, calling_lanes and scratch_keep_bytes are integers")
        if 0 not in counts or min(counts.values()) < 1 or sum(counts.values()) > 256:
            raise UsageError(f"lanes is 1 to 256, some of them of priority 0, not {lanes}")
        if not isinstance(device, str):
            raise UsageError(f'device is a label such as "auto", "cuda:0" or "host", not {device!r}')
        if type(self) is Offload and ("," in device or device.endswith(":*")):
            self.__class__ = self._of_several  # not by __new__, whose signature would hide this one
        if wake not in ("hybrid", "interrupt", "poll"):
            raise UsageError(f'wake is "hybrid", "interrupt" or "poll", not {wake!r}')
        if ordering not in ("program", "explicit"):
            raise UsageError(f'ordering is "program" or "explicit", not {ordering!r}')
        if not 1 <= lane_depth <= 200:
            raise UsageError(f"lane_depth is 1 to 200, not {lane_depth}")
        if max_pending < 1:
            raise UsageError(f"max_pending is at least 1, not {max_pending}")
        if not 1 <= calling_lanes <= 64:
            raise UsageError(f"calling_lanes is 1 to 64, not {calling_lanes}")
        if not (isinstance(call_timeout_s, int | float) and 0 < call_timeout_s <= 86_400):
            raise UsageError(f"call_timeout_s is above 0 and at most a day, not {call_timeout_s}")
        if scratch_keep_bytes < 0:
            raise UsageError(f"scratch_keep_bytes is at least 0, not {scratch_keep_bytes}")
        if allocator is not None and not callable(getattr(allocator, "allocate", None)):
            raise UsageError(f"an allocator has a method allocate(nbytes, stream=...), {allocator!r} has none")
        if hard_timeout_s is not None and not (isinstance(hard_timeout_s, int | float) and hard_timeout_s > 0):
            raise UsageError(f"hard_timeout_s is a number of seconds above 0, or None, not {hard_timeout_s!r}")
        if on_lost is not None and not callable(on_lost):
            raise UsageError(f"on_lost is called with the error, {on_lost!r} cannot be")
        if iscoroutinefunction(on_lost):
            raise UsageError(f"on_lost is a plain function, not {on_lost!r}: begin a task in it")
        self._device = device
        self._options: Final[dict[str, Any]] = {
            "lanes": counts,
            "wake": wake,
            "program_order": ordering == "program",
            "max_pending": max_pending,
            "depth": lane_depth,
            "calling_lanes": calling_lanes,
            "call_timeout_s": call_timeout_s,
            "scratch_keep_nbytes": scratch_keep_bytes,
            "allocator": allocator,
            "hard_timeout_s": hard_timeout_s,
            "on_lost": on_lost,
        }

    # -- opening and closing ---------------------------------------------------------------

    async def __aenter__(self) -> Offload:
        return await self._enter(self._device)

    async def _enter(self, device: Device | str) -> Offload:
        """Enter with a device's label, or with one that was opened already."""
        if self._loop is not None:
            raise UsageError("this Offload was entered already")
        self._loop = asyncio.get_running_loop()
        try:
            self._engine = await Engine.open(device, **self._options)
        except BaseException:
            self._loop = None
            raise
        self._launcher = self._engine.launcher
        self._state = ""
        _entered.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self._stop_calls()
        try:
            await self.aclose()
        except asyncio.CancelledError:  # by a deadline, say, while it waits: closing goes on without the program
            self._stop_calls()
            raise

    def _stop_calls(self) -> None:
        """Cancel what calls: a kernel that waits for the program would wait for ever."""
        if self._engine is not None:
            self._engine.stop_calls()

    async def aclose(self, timeout_s: float = 30.0) -> None:
        """Refuse new work, wait for what was submitted, release the device. Idempotent.

        Parameters
        ----------
        timeout_s
            After so many seconds it falls to :meth:`terminate`.

        Notes
        -----
        After a lost device it returns at once. It raises nothing of the operations'.
        """
        if self._engine is None:
            return
        self._check_loop()
        if not (isinstance(timeout_s, int | float) and timeout_s >= 0):
            raise UsageError(f"timeout_s is a number of seconds, at least 0, not {timeout_s!r}")
        closing = self._engine.aclose(timeout_s)  # raises if it is refused: then all is as it was
        try:
            await closing
        finally:
            self._finish("is closed")

    def terminate(self) -> None:
        """Close at once: everything not done fails with ClosedError. Idempotent; frees nothing in use."""
        if self._engine is not None:
            self._check_loop()
            self._engine.terminate()
            self._finish("was terminated")

    def _finish(self, state: str) -> None:
        self._state = state
        _entered.discard(self)

    def __del__(self) -> None:
        self._warn_if_open()

    def _warn_if_open(self) -> None:
        if self._engine is not None and not self._state:
            self._state = "was left open"
            text = f"{self!r} was not closed: use `async with`, or await aclose()"
            warnings.warn(text, ResourceWarning, stacklevel=2, source=self)

    # -- whose it is -----------------------------------------------------------------------

    def _open_engine(self) -> Engine:
        """Return the engine if the caller may use it now; the check of every public method."""
        if _get_running_loop() is not self._loop or self._engine is None:
            self._check_loop()
        assert self._engine is not None
        return self._engine

    def _check_loop(self) -> None:
        """Raise the UsageError that says what is wrong with this caller, if anything is."""
        if self._engine is None:
            raise (ClosedError if "closed" in self._state else UsageError)(f"this Offload {self._state}")
        self._engine.check_caller()

    # -- launching -------------------------------------------------------------------------

    def launch(
        self,
        kernel: Kernel,
        *,
        grid: Dimensions,
        block: Dimensions,
        args: tuple[Any, ...] = (),
        shared_bytes: int = 0,
        after: Iterable[After] = (),
        lane: Lane | None = None,
        priority: int = 0,
        instant: bool = False,
        coarse: bool = False,
        timeout_s: float | None = None,
        cluster: Dimensions | None = None,
        cooperative: bool = False,
    ) -> Operation[None]:
        """Submit a kernel and return at once.

        Parameters
        ----------
        kernel
            What to run. It is loaded on first use, and the launch waits for that on the host.
        grid, block
            Blocks of the grid and threads of a block: an integer, or up to three.
        args
            One per parameter: Buffers (of which a GPU gets the address of the first element) and NumPy
            scalars; Python numbers where the kernel is annotated. Structs are NumPy structured scalars.
            ``ao.Scratch(nbytes)`` in place of a Buffer is workspace for this launch alone.
        shared_bytes
            Dynamic shared memory per block; above 48 KiB the kernel is opted in by itself.
        after
            Operations and awaitables that have to be done first. If one fails before this launch
            has started, it fails with DependencyError. A coroutine is run as a task, and cancelled with the launch.
        lane
            The lane to use, one of ``off.lanes``; by default the one its buffers were last used
            on, or the least busy one.
        priority
            One of those that ``lanes`` of the Offload names, where no ``lane`` is given.
        instant
            Raise WouldBlock, which says why, unless it goes straight to the device; ``op.instant``
            says afterwards whether an operation did.
        coarse
            No completion mark of its own, which makes it cheaper to launch: it counts as done with the
            next mark on its lane. Awaiting it, draining or idling enqueues the missing mark. On an adopted
            stream it makes no difference: the mark would come behind what the owner enqueues.
        timeout_s
            Seconds from now after which the launch ends with OffloadTimeout if it still waits on the host.
            A kernel that calls host functions is asked to stop, too, as by ``Operation.cancel``.
        cluster
            Blocks of a thread block cluster (compute capability 9.0 and later).
        cooperative
            Launch all blocks at once, so that they may synchronise with each other.

        Returns
        -------
        Operation
            Awaits to None. A failure of the kernel (LaunchError, DeviceLostError) is raised there.

        Raises
        ------
        UsageError
            Wrong geometry, arguments, device, thread or loop. Nothing was submitted.
        WouldBlock
            ``max_pending`` operations wait on the host (then ``await off.room()``), or ``instant``.
        LaunchError
            The kernel cannot be launched in this geometry.

        Notes
        -----
        *Ordering.* After everything submitted earlier that shares a buffer, unless both only read it.
        *Cancellation.* Cancelling an await leaves the launch alone; see ``Operation.cancel``.
        *Source.* CUDA C++ Programming Guide, "Execution Configuration"; cuLaunchKernelEx.
        """
        launcher = self._launcher
        special = shared_bytes or lane or priority or coarse or cluster or cooperative or timeout_s is not None
        if launcher is not None and not special:
            operation: Operation[None] | None = launcher.launch(kernel, grid, block, args, after)
            if operation is not None:
                return operation
        engine = self._open_engine()
        geometry = (grid, block, shared_bytes, cluster, cooperative)
        return engine.submission.launch(
            kernel, geometry, args, Terms(after, lane, instant, timeout_s, priority, coarse)
        )

    def bind(
        self, kernel: Kernel, *, grid: Dimensions, block: Dimensions, args: tuple[Any, ...] = (), shared_bytes: int = 0
    ) -> BoundLaunch:
        """Check and pack the arguments of a kernel once; calling the result launches it at the least cost.

        Parameters
        ----------
        kernel
            A kernel that is loaded (``await off.load(kernel)``) and calls no host functions.
        grid, block, args, shared_bytes
            As for :meth:`launch`.

        Returns
        -------
        BoundLaunch
            ``bound()`` submits a launch and returns its Operation; ``bound(a=3.0)`` one in which the scalar
            ``a`` is another, for that launch alone.

        Raises
        ------
        UsageError
            The kernel is not loaded or calls host functions; wrong geometry, arguments, device, thread or loop.
        ClosedError
            A buffer or the Offload was closed.
        LaunchError
            The kernel cannot be launched in this geometry.

        Notes
        -----
        *Ordering.* Binding submits nothing; each call is ordered as a launch made then.
        *Lifetime.* The result holds its arguments, and may outlive the Offload: then it raises ClosedError.
        """
        engine = self._open_engine()
        return engine.submission.bind(kernel, (grid, block, shared_bytes, None, False), args)

    def host_task(
        self, function: Callable[[], Coroutine[Any, Any, _T]], *, after: Iterable[After] = ()
    ) -> Operation[_T]:
        """Submit a coroutine function as a step between launches and copies, and return at once.

        Parameters
        ----------
        function
            ``async def`` without parameters (``functools.partial`` gives it some). It is called, in a
            copy of the caller's context, when everything in ``after`` is done.
        after
            As for :meth:`launch`. If one of them fails, the function is not called, and the operation
            fails with DependencyError.

        Returns
        -------
        Operation
            Awaits to what the function returns, or raises what it raised.

        Raises
        ------
        UsageError
            ``function`` is no coroutine function. Nothing was submitted.
        WouldBlock
            ``max_pending`` operations wait on the host.

        Notes
        -----
        *Ordering.* What names it in ``after`` waits on the host until it has returned. It touches no
        buffer as far as ordering goes: what it submits is ordered as anything else.
        *Deadlock.* Draining or closing this Offload would wait for it and raises UsageError in it, and so does awaiting
        its own operation or what comes after that. A task that it starts may await those: it must not await the task.
        *Cancellation.* ``op.cancel()`` cancels the coroutine.
        """
        return self._open_engine().submission.host_task(function, after)

    def custom_operation(
        self,
        function: Callable[[Lane], _T],
        *,
        after: Iterable[After] = (),
        lane: Lane | None = None,
        priority: int = 0,
        instant: bool = False,
    ) -> Operation[_T]:
        """Submit a function that enqueues work of another library on a lane, and return at once.

        Parameters
        ----------
        function
            Called as ``function(lane)``, on the loop's thread, when its turn comes (at once, unless
            something is waited for on the host), with the device's context current. It enqueues on
            ``lane.handle``; ``lane`` is a stream to libraries that know ``__cuda_stream__``. It must not
            block, and what it submits to this Offload waits on the host until it has returned.
        after, lane, priority, instant
            As for :meth:`launch`. What other operations share with it is not known: order it by
            ``after`` and by naming it there.

        Returns
        -------
        Operation
            Awaits to what ``function`` returned, when all that it has enqueued is done. What it enqueued
            on other streams does not count: see :meth:`order` and :meth:`completion`.

        Raises
        ------
        UsageError
            ``function`` is a coroutine function. Nothing was submitted.
        WouldBlock
            As for :meth:`launch`.

        Notes
        -----
        *Failure.* If it raises, the operation fails with that, once what it had enqueued is done.
        *Source.* AdaptiveCpp's ``custom_operation`` is its model.
        """
        return self._open_engine().submission.custom(function, Terms(after, lane, instant, None, priority))

    def launch_graph(
        self,
        graph: Any,
        *,
        after: Iterable[After] = (),
        lane: Lane | None = None,
        priority: int = 0,
        instant: bool = False,
    ) -> Operation[None]:
        """Submit one replay of a CUDA graph and return at once; awaits to None.

        Parameters
        ----------
        graph
            An instantiated graph: what cuda.core's ``GraphBuilder.complete()`` returns, or a
            ``CUgraphExec``. It is held until the replay is done.
        after, lane, priority, instant
            As for :meth:`launch`. The buffers of its nodes are not known: order it by ``after``.

        Raises
        ------
        UsageError
            It is no graph, or the device is the host.

        Notes
        -----
        *Ordering.* The driver runs replays of one graph one after the other, whatever their lanes.
        *Source.* CUDA C++ Programming Guide, "CUDA Graphs"; cuGraphLaunch.
        """
        return self._open_engine().submission.graph(graph, Terms(after, lane, instant, None, priority))

    def gate(
        self, awaitable: Awaitable[Any], *, lane: Lane, after: Iterable[After] = (), timeout_s: float = 30.0
    ) -> Operation[None]:
        """Hold what is submitted to ``lane`` from now on until ``awaitable`` is done; awaits to None.

        Parameters
        ----------
        awaitable
            A future, a task, a coroutine, another operation: a result that later work on the lane needs.
        lane
            One of ``off.lanes``. Its later work waits on the host; nothing waits on the device.
        after
            As for :meth:`launch`.
        timeout_s
            After so many seconds the gate fails with OffloadTimeout: what opens it may wait, by a
            way round, for something that stands behind it.

        Notes
        -----
        *Failure.* If ``awaitable`` fails, or the time is over, the gate fails, with it what names it in
        ``after``, and the rest of the lane goes on. ``cancel()`` opens it the same way.
        """
        return self._open_engine().submission.gate(awaitable, lane, after, timeout_s)

    # -- streams of others -----------------------------------------------------------------

    def adopt(self, stream: Any, *, owner: object = None) -> Lane:
        """Return a lane that is a stream of somebody else, to launch and copy on.

        Parameters
        ----------
        stream
            Anything with ``__cuda_stream__`` (of cuda.core, CuPy, torch), or a handle. 0 and 1 are the
            legacy default stream of the device, 2 is the calling thread's. A lane of this Offload is
            returned as it is.
        owner
            What keeps the stream alive, besides ``stream`` itself; held until the lane is released.

        Returns
        -------
        Lane
            To be given as ``lane=``. It is never picked by itself. ``lane.release()`` ends the adoption.

        Raises
        ------
        UsageError
            It is no stream, belongs to another context, or is capturing a graph.

        Notes
        -----
        *Ordering.* Operations on it are enqueued at once, among what its owner enqueues, or refused
        with WouldBlock: nothing is kept on the host. It is never destroyed and never synchronised.
        *Capture.* While the stream captures a graph, submitting to it raises UsageError, and what comes after
        unfinished work of ours there fails with it: waiting would draw the waiting stream into the graph.
        *Source.* The ``__cuda_stream__`` protocol is described in the documentation of cuda.core.
        """
        engine = self._open_engine()
        engine.check_open()
        return engine.adoptions.adopt(stream, owner)

    def completion(self, stream: Any) -> Operation[None]:
        """Return an operation that is done when everything on ``stream`` so far is; awaits to None.

        Parameters and errors as for :meth:`adopt`. Nothing of the stream waits for it.
        """
        return self._open_engine().submission.completion(stream)

    def order(self, stream: Any, *, after: Iterable[After]) -> None:
        """Let the later work of ``stream`` wait, on the device, for operations.

        Parameters
        ----------
        stream
            As for :meth:`adopt`.
        after
            Operations that are on the device or done.

        Raises
        ------
        WouldBlock
            One of them waits on the host, or its kernel calls host functions: await it.
        """
        self._open_engine().submission.order(stream, after)

    @asynccontextmanager
    async def lease(self, *, priority: int = 0) -> AsyncIterator[Lane]:
        """Have a lane to oneself: ``async with off.lease() as lane``.

        Parameters
        ----------
        priority
            Of the lane.

        Raises
        ------
        UsageError
            There is only one lane of that priority, or none.
        ClosedError
            The Offload was closed meanwhile.

        Notes
        -----
        While it is leased, only operations that name it go there; those that name none use the others.
        What is on the lane already, and what is left there at the end, completes as usual. One lane of
        each priority stays with all others, so a lease waits while no second one is free.
        """
        engine = self._open_engine()
        engine.check_open()
        async with engine.lanes.lease(priority, engine.check_open) as lane:
            yield lane

    async def load(self, *kernels: Kernel) -> None:
        """Compile and load kernels up front, so that their first launch does not wait.

        Parameters
        ----------
        *kernels
            Those that are loaded already cost nothing.

        Raises
        ------
        CompileError
            The source does not compile, the compiler is not installed, or the module has no such
            kernel. The Offload stays usable.
        UsageError
            The annotations do not fit the compiled code, or the kernel has nothing for this device.

        Notes
        -----
        *Ordering.* Waits until what is in flight in the process is done; what is submitted meanwhile
        waits on the host. Loading would wait for it anyway (CUDA C++ Programming Guide, "Lazy Loading").
        """
        engine = self._open_engine()
        engine.check_open()
        for kernel in kernels:
            if not engine.kernels.loaded(kernel):
                check_outside("loading a kernel")
            load = engine.kernels.load(kernel)
            try:
                await asyncio.shield(load)
            except asyncio.CancelledError:
                if load.cancelled() and engine.refusal is not None:  # the Offload ended, not this task
                    raise engine.refusal() from None
                raise

    # -- calls from kernels ----------------------------------------------------------------

    @overload
    def host_function(self, function: _F, /) -> _F: ...
    @overload
    def host_function(
        self,
        function: None = None,
        /,
        *,
        name: str | int | None = None,
        batch: bool = False,
        limit: int | None = None,
        timeout_s: float | None = None,
        on_error: OnError = "cancel",
    ) -> Callable[[_F], _F]: ...
    def host_function(
        self,
        function: Any = None,
        /,
        *,
        name: str | int | None = None,
        batch: bool = False,
        limit: int | None = None,
        timeout_s: float | None = None,
        on_error: OnError = "cancel",
    ) -> Any:
        """Let kernels call a coroutine function while they run; a decorator, bare or with options.

        Parameters
        ----------
        function
            ``async def``. Each parameter is annotated: ``int`` (int64), ``float`` (float64),
            ``bool`` or a NumPy type for a scalar, which arrives as a Python number (a structured
            one as a NumPy record); ``ao.In``, ``ao.Out``, ``ao.InOut`` of a NumPy type for a mapped
            array. The return annotation likewise, or none.
        name
            What kernels call it, as in ``ao::fn("name")``: by default the name of ``function``.
            A number below 2**24 is its id itself.
        batch
            It takes all its pending requests at a time: for each parameter a ``(n,)`` array of the
            annotated type (``NDArray[np.int64]`` is the same as ``np.int64`` here), and returns
            ``(n,)`` results.
        limit
            How many may run at a time; the others wait, in order.
        timeout_s
            Seconds after which it is cancelled, and its kernel gets TIMEOUT.
        on_error
            When it raises, the kernel gets ERROR, and the launch ends with HostFunctionError once
            the kernel is over. ``"cancel"``: the launch is asked to stop at once; ``"collect"``: it
            goes on, and the error has all that were raised, at most the first hundred.

        Returns
        -------
        The function itself.

        Raises
        ------
        UsageError
            It is no ``async def``, an annotation is missing or fits nothing a kernel can send, or
            the name is taken (or has the id of another one).

        Notes
        -----
        *Ordering.* Requests of one thread of a kernel are started in their order, and nothing is
        promised between threads. A launch is done when its kernel is over and the functions it
        has called, posts included, have returned.
        *Thread.* It runs on the loop, in a copy of the launch's context (a batch: in the context of
        this registration); its first step runs as soon as the request is read, on Python 3.12 and
        later. ``ao.current_call()`` names the launch.
        *Deadlock.* What would wait for the calling launch raises UsageError: work on its buffers,
        loading a kernel, draining, closing. Other work on this Offload can be submitted and awaited.
        *Source.* The reverse offload of OpenMP 5.2 ("ancestor" device modifier) is its model.
        """
        engine = self._open_engine()
        engine.check_open()

        def register(function: _F) -> _F:
            engine.reverse.register(
                HostFunction(function, name=name, batch=batch, limit=limit, timeout_s=timeout_s, on_error=on_error)
            )
            return function

        return register if function is None else register(function)

    # -- memory ----------------------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """Allocate device memory of undefined content and return at once.

        Parameters
        ----------
        shape
            Length of each dimension; 0 is legal.
        dtype
            Anything NumPy takes for a dtype without Python objects.

        Raises
        ------
        OutOfMemoryError
            Free something and try again; the Offload stays usable.
        UsageError
            ``shape`` and ``dtype`` do not describe an array.
        """
        engine = self._open_engine()
        engine.check_open()
        return engine.memory.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """Allocate device memory and submit its clearing; later uses come after it.

        Parameters and errors as for :meth:`empty`, and WouldBlock where ``max_pending`` operations
        wait on the host.
        """
        buffer = self.empty(shape, dtype)
        self._open_engine().transfers.clear(buffer, Terms())
        return buffer

    async def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> PinnedArray:
        """Return pinned host memory of undefined content; copies to and from it need no staging.

        Parameters and errors as for :meth:`empty`. It comes from a pool that grows on demand, off the
        loop's thread, and is given back to the system when the Offload closes.
        """
        engine = self._open_engine()
        engine.check_open()
        return await engine.memory.pinned(shape, dtype, engine.register)

    # -- copying ---------------------------------------------------------------------------

    def put(
        self,
        array: ArrayLike | PinnedArray,
        *,
        after: Iterable[After] = (),
        lane: Lane | None = None,
        priority: int = 0,
        instant: bool = False,
    ) -> Operation[Buffer]:
        """Allocate a Buffer and copy ``array`` into it; awaits to the Buffer.

        Parameters
        ----------
        array
            Anything NumPy makes an array of, views with strides above 0 included, or a PinnedArray. Do
            not change it before the operation is done.
        after, lane, priority, instant
            As for :meth:`launch`.

        Raises
        ------
        UsageError
            The array is broadcast, runs backwards or holds Python objects.
        OutOfMemoryError
            The device is full; nothing was submitted.

        Notes
        -----
        The Buffer is C-contiguous, whatever the array is.
        """
        return self._open_engine().transfers.put(array, Terms(after, lane, instant, None, priority))

    def get(
        self,
        buffer: Buffer,
        *,
        out: NDArray[Any] | PinnedArray | None = None,
        after: Iterable[After] = (),
        lane: Lane | None = None,
        priority: int = 0,
        instant: bool = False,
    ) -> Operation[NDArray[Any]]:
        """Copy ``buffer`` to the host; awaits to the array.

        Parameters
        ----------
        buffer
            The source.
        out
            Where to, of the same shape and dtype, with any strides above 0; by default a new array. Its
            content is undefined until the operation is done.
        after, lane, priority, instant
            As for :meth:`launch`.

        Raises
        ------
        UsageError
            ``out`` has another shape or dtype, is read-only, is broadcast or runs backwards.
        ClosedError
            The buffer or ``out`` was closed.
        WouldBlock
            ``max_pending`` operations wait on the host.
        """
        return self._open_engine().transfers.get(buffer, out, Terms(after, lane, instant, None, priority))

    def copy(
        self,
        dst: Buffer | NDArray[Any] | PinnedArray,
        src: Buffer | NDArray[Any] | PinnedArray,
        extent: int | Sequence[int] | None = None,
        *,
        after: Iterable[After] = (),
        lane: Lane | None = None,
        priority: int = 0,
        instant: bool = False,
    ) -> Operation[None]:
        """Copy ``src`` to ``dst``, at least one of them a Buffer; awaits to None.

        Parameters
        ----------
        dst, src
            Of the same shape and item size, with any strides above 0; or both C-contiguous and of the same
            size in bytes. Bytes are copied, no dtype is converted. A NumPy array must not be changed
            (``src``) or read (``dst``) before the operation is done. One of two Buffers may be of another
            Offload under this loop, of this device or of another GPU.
        extent
            Elements to copy in each dimension, from the first one of each side, which then need not be of the
            same shape. For another place slice: ``off.copy(a[2:, 4:], b, (8, 8))``.
        after, lane, priority, instant
            As for :meth:`launch`.

        Raises
        ------
        UsageError
            Shapes or item sizes differ, the extent leaves one of them, one is broadcast or runs backwards,
            elements of ``dst`` overlap one another, or there is no Buffer at all. Two Buffers whose elements
            are spread over common bytes count as overlapping, even if none is in both. Or a Buffer is of an
            Offload of another loop, or of another kind of device.
        ClosedError
            One of them was closed, or the other Offload.
        WouldBlock
            ``max_pending`` operations wait on the host.

        Notes
        -----
        *Calls.* One driver call where one can do it: contiguous memory, rows at any pitch, slices of rows. What
        takes more is sent in portions, and nothing that shares a buffer with it comes in between.
        *Ordering.* With a Buffer of another Offload, by buffers in both (where ``ordering`` is ``"program"``), and
        neither closes before the copy is done. What it has to wait for there, it waits for on the host; it fails
        with DependencyError if that Offload is terminated meanwhile. If this one is while it copies, ``dst`` is closed:
        nobody would know when the device has done with it.
        *Thread.* Above 256 KiB, pageable memory is copied by a worker thread, piece by piece.
        *Source.* CUDA Driver API, "Memory Management": cuMemcpy2DAsync, cuMemcpy3DAsync, cuMemcpyPeerAsync.
        """
        return self._open_engine().transfers.copy(dst, src, extent, Terms(after, lane, instant, None, priority))

    def fill(
        self,
        buffer: Buffer,
        value: object,
        *,
        after: Iterable[After] = (),
        lane: Lane | None = None,
        priority: int = 0,
        instant: bool = False,
    ) -> Operation[None]:
        """Set every element of ``buffer`` to ``value``; awaits to None.

        Parameters
        ----------
        buffer
            What to fill. One that is not contiguous is filled from a block of up to 2 MiB of device memory.
        value
            A Python number or NumPy scalar that its dtype can hold.
        after, lane, priority, instant
            As for :meth:`launch`.

        Raises
        ------
        UsageError
            The dtype cannot hold ``value``, or is not 1, 2, 4, 8 or 16 bytes wide (other widths can
            be filled with zero bytes only), or elements of the buffer overlap one another.
        OutOfMemoryError
            The device has not even the block left; nothing was submitted.
        WouldBlock
            ``max_pending`` operations wait on the host.
        """
        return self._open_engine().transfers.fill(buffer, value, Terms(after, lane, instant, None, priority))

    # -- the whole -------------------------------------------------------------------------

    def trace(self, path: str | os.PathLike[str], *, timeout_s: float = 30.0) -> Trace:
        """Record what is submitted inside ``async with off.trace(path):``, and when it ran on which lane.

        Parameters
        ----------
        path
            The file to write: JSON that https://ui.perfetto.dev, chrome://tracing and ``scripts/timeline`` open. It is
            opened, and emptied, on entry, and complete once the block was left.
        timeout_s
            Leaving the block waits for what was submitted inside, for so many seconds at most. Then the file says
            of the rest that it is unfinished.

        Returns
        -------
        Trace
            To be entered, once.

        Raises
        ------
        UsageError
            On entry: there is a trace already, or a host function asks for one.
        OSError
            On entry: the file cannot be written. Nothing was recorded, and everything goes on.

        Notes
        -----
        *Times* are the device's, from events before and after each operation on its lane, put on the host's clock to
        within microseconds; ``op.duration_ns`` stays what the host saw.
        *Cost.* Inside, a launch takes the long way and two events more, and coarse ones have marks of their own. A
        lane has two entries more for each operation, so that with ``lane_depth`` above 128 a full one may block.
        *Failure.* Whatever ends the block, an exception or a lost device, what is known is written.
        *Source.* "Trace Event Format" of the Chromium project; cuEventElapsedTime.
        """
        self._open_engine()
        return Trace(path, timeout_s, self._open_engine)

    async def drain(self) -> None:
        """Wait until everything submitted so far and meanwhile is done. Raises nothing of theirs.

        When it returns, their done callbacks have been called, too, but for those of what such a callback has itself
        ended on the spot, by cancelling it for one: they come in the loop's next turns.
        """
        await self._open_engine().drain()

    async def room(self) -> None:
        """Wait until a submission would not raise WouldBlock for ``max_pending``.

        In a host function that may take until the deadline of its call, if all that is pending waits for its launch.
        """
        await self._open_engine().lanes.room()

    @property
    def devices(self) -> tuple[Offload, ...]:
        """The Offloads of one device each that this one consists of; itself, if it is of one."""
        return (self,)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """The lanes that take any operation, by index."""
        return tuple(self._open_engine().lanes.open)

    @property
    def properties(self) -> DeviceProperties:
        """What the device is and can do."""
        return self._open_engine().device.properties

    def stats(self) -> dict[str, Any]:
        """Return counters since it was opened.

        Keys: ``device``, ``submitted``, ``completed``, ``in_flight``, ``pending`` (waiting on the
        host), ``wakes`` (by ``timer`` and by ``monitor``; all else was found by looking),
        ``wake_latency`` (likewise: from the driver's wake, or the time of the timer, until the loop
        went on; ``count``, ``sum_s``, and ``buckets`` of seconds and how many were at most that),
        ``armings`` of the monitor, ``watchdog_checks``, ``buffers``, ``allocated_bytes`` (of buffers
        and scratch), ``scratch`` (``kept_bytes`` that nothing uses, ``blocks`` with those in use,
        ``reuses``, ``allocations``),
        ``calls`` (of kernels: ``served``, ``dropped`` because they made no sense, ``resident``
        kernels that call, ``open`` calls and posts), ``fallback`` (why completions use events,
        empty if they do not).
        """
        engine = self._open_engine()
        return {
            "device": engine.device.properties.label,
            "submitted": engine.board.pushed + engine.board.pending,
            "completed": engine.board.completed,
            "in_flight": engine.board.in_flight,
            "pending": engine.board.pending,
            "wakes": dict(engine.completion.wakes),
            "wake_latency": {by: late.stats() for by, late in engine.completion.late.items()},
            "armings": engine.completion.armings,
            "watchdog_checks": engine.watchdog.checks,
            "buffers": engine.memory.live - engine.scratch.blocks,
            "allocated_bytes": engine.memory.allocated_bytes,
            "scratch": engine.scratch.stats(),
            "calls": engine.reverse.stats(),
            "fallback": engine.fallback,
        }

    def __repr__(self) -> str:
        return f"<aiooffload.Offload {self._device}{', ' + self._state if self._state else ''}>"


def _after_fork_in_child() -> None:
    """A child has no threads of the parent and must not call its driver: every Offload is unusable."""
    for offload in list(_entered):
        offload._engine = offload._launcher = None
        offload._state = "belongs to the parent process: open a new one in the child"


def _warn_at_exit() -> None:
    """Warn while that still works: during the interpreter's end it depends on who holds the Offload."""
    for offload in list(_entered):
        offload._warn_if_open()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_warn_at_exit)
