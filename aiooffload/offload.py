"""What a program holds: the Offload, one device under one event loop."""

from __future__ import annotations

import asyncio
import atexit
import math
import os
import warnings
import weakref
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, TypeVar, overload

import numpy as np

from aiooffload.buffer import Allocation, Buffer, PinnedArray
from aiooffload.engine.engine import Engine
from aiooffload.engine.host_functions import HostFunction, OnError, check_outside
from aiooffload.engine.submission import After, Terms
from aiooffload.errors import ClosedError, UsageError
from aiooffload.operation import Operation
from aiooffload.scalars import scalar

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from aiooffload._native import Launcher
    from aiooffload.drivers.api import Device, DeviceProperties
    from aiooffload.engine.lanes import Lane
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
        ``"cuda:N"`` or ``"host"``.
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

    Raises
    ------
    UsageError
        A parameter is out of range, or no event loop is running at ``__aenter__``.
    DeviceUnavailableError
        The device or its driver does not exist or cannot be used.

    Notes
    -----
    *Thread.* It belongs to the loop and thread that entered it. From another thread go through
    ``asyncio.run_coroutine_threadsafe``. A forked child cannot use it.
    *Ordering.* See ``ordering``. Lanes run independently of each other.
    """

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
    ) -> None:
        # None before it was entered, and in a forked child.
        self._engine: Engine | None = None
        self._launcher: Launcher | None = None
        self._state = "was not entered yet: use `async with`"
        self._loop: asyncio.AbstractEventLoop | None = None
        counts = dict(lanes) if isinstance(lanes, Mapping) else {0: lanes}
        numbers = (*counts, *counts.values(), max_pending, lane_depth, calling_lanes)
        if any(type(number) is not int for number in numbers):
            raise UsageError("lanes, max_pending, lane_depth and calling_lanes are integers")
        if 0 not in counts or min(counts.values()) < 1 or sum(counts.values()) > 256:
            raise UsageError(f"lanes is 1 to 256, some of them of priority 0, not {lanes}")
        if not isinstance(device, str):
            raise UsageError(f'device is a label such as "auto", "cuda:0" or "host", not {device!r}')
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
        self._device = device
        self._options: Final[dict[str, Any]] = {
            "lanes": counts,
            "wake": wake,
            "program_order": ordering == "program",
            "max_pending": max_pending,
            "depth": lane_depth,
            "calling_lanes": calling_lanes,
            "call_timeout_s": call_timeout_s,
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
        if kind is not None and self._engine is not None:
            self._engine.reverse.stop_all()  # a kernel that waits for the program would wait for ever
        await self.aclose()

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
        try:
            await self._engine.aclose(timeout_s)
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
            One per parameter: Buffers and NumPy scalars; Python numbers where the kernel is
            annotated. Structs are NumPy structured scalars.
        shared_bytes
            Dynamic shared memory per block; above 48 KiB the kernel is opted in by itself.
        after
            Operations and awaitables that have to be done first. If one fails before this launch
            has started, it fails with DependencyError.
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
            next mark on its lane. Awaiting it, draining or idling enqueues the missing mark.
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
        special = after or shared_bytes or lane or priority or coarse or cluster or cooperative or timeout_s is not None
        if launcher is not None and not special:
            operation: Operation[None] | None = launcher.launch(kernel, grid, block, args)
            if operation is not None:
                return operation
        engine = self._open_engine()
        geometry = (grid, block, shared_bytes, cluster, cooperative)
        return engine.submission.launch(
            kernel, geometry, args, Terms(after, lane, instant, timeout_s, priority, coarse)
        )

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
        *Cancellation.* ``op.cancel()`` cancels the coroutine.
        """
        return self._open_engine().submission.host_task(function, after)

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
            goes on, and the error has all that were raised.

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
        self._fill(buffer, b"\0", (), None)
        return buffer

    async def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> PinnedArray:
        """Return pinned host memory of undefined content; copies to and from it need no staging.

        Parameters and errors as for :meth:`empty`. It comes from a pool that grows on demand, off the
        loop's thread, and is given back to the system when the Offload closes.
        """
        engine = self._open_engine()
        engine.check_open()
        return await engine.memory.pinned(shape, dtype, lambda nbytes: engine.offload(engine.memory.register, nbytes))

    # -- copying ---------------------------------------------------------------------------

    def put(
        self, array: ArrayLike | PinnedArray, *, after: Iterable[After] = (), lane: Lane | None = None
    ) -> Operation[Buffer]:
        """Allocate a Buffer and copy ``array`` into it; awaits to the Buffer.

        Parameters
        ----------
        array
            Anything NumPy makes a C-contiguous array of, or a PinnedArray. Do not change it before
            the operation is done.
        after, lane
            As for :meth:`launch`.

        Raises
        ------
        UsageError
            The array is not C-contiguous or holds Python objects.
        OutOfMemoryError
            The device is full; nothing was submitted.
        """
        source = array if isinstance(array, PinnedArray) else np.asarray(array)
        host = source.array if isinstance(source, PinnedArray) else source
        if not host.flags.c_contiguous:
            raise UsageError("put takes a C-contiguous array; pass np.ascontiguousarray(array)")
        target = self.empty(host.shape, host.dtype)
        operation: Operation[Buffer] = self._to_device("put", target, source, target, after, lane)
        return operation

    def get(
        self,
        buffer: Buffer,
        *,
        out: NDArray[Any] | PinnedArray | None = None,
        after: Iterable[After] = (),
        lane: Lane | None = None,
    ) -> Operation[NDArray[Any]]:
        """Copy ``buffer`` to the host; awaits to the array.

        Parameters
        ----------
        buffer
            The source.
        out
            Where to, C-contiguous, of the same shape and dtype; by default a new array. Its
            content is undefined until the operation is done.
        after, lane
            As for :meth:`launch`.
        """
        self._check_buffers(buffer)
        target = np.empty(buffer.shape, buffer.dtype) if out is None else out
        array = target.array if isinstance(target, PinnedArray) else target
        if not isinstance(array, np.ndarray):
            raise UsageError(f"out is a NumPy array or a PinnedArray, not {type(array).__name__}")
        if array.shape != buffer.shape or array.dtype != buffer.dtype:
            raise UsageError(
                f"out has shape {array.shape} and dtype {array.dtype}, the buffer {buffer.shape} and {buffer.dtype}"
            )
        operation: Operation[NDArray[Any]] = self._to_host("get", target, buffer, array, after, lane)
        return operation

    def copy(
        self,
        dst: Buffer | NDArray[Any] | PinnedArray,
        src: Buffer | NDArray[Any] | PinnedArray,
        *,
        after: Iterable[After] = (),
        lane: Lane | None = None,
    ) -> Operation[None]:
        """Copy all of ``src`` to ``dst``, at least one of them a Buffer; awaits to None.

        Parameters
        ----------
        dst, src
            C-contiguous, of the same size in bytes. A NumPy array must not be changed (``src``) or
            read (``dst``) before the operation is done.
        after, lane
            As for :meth:`launch`.

        Raises
        ------
        UsageError
            Not contiguous, of different sizes, overlapping slices of one Buffer, or no Buffer at all.
        ClosedError
            One of them was closed.
        WouldBlock
            ``max_pending`` operations wait on the host.

        Notes
        -----
        *Thread.* Above 256 KiB, pageable memory is copied by a worker thread, piece by piece.
        """
        if isinstance(dst, Buffer) and isinstance(src, Buffer):
            return self._on_device(dst, src, after, lane)
        if isinstance(dst, Buffer):
            assert not isinstance(src, Buffer)
            operation: Operation[None] = self._to_device("copy", dst, src, None, after, lane)
            return operation
        if isinstance(src, Buffer):
            back: Operation[None] = self._to_host("copy", dst, src, None, after, lane)
            return back
        raise UsageError("copy takes a Buffer as source, destination or both")

    def fill(
        self, buffer: Buffer, value: object, *, after: Iterable[After] = (), lane: Lane | None = None
    ) -> Operation[None]:
        """Set every element of ``buffer`` to ``value``; awaits to None.

        Parameters
        ----------
        buffer
            What to fill.
        value
            A Python number or NumPy scalar that its dtype can hold.
        after, lane
            As for :meth:`launch`.

        Raises
        ------
        UsageError
            The dtype cannot hold ``value``, or is not 1, 2, 4, 8 or 16 bytes wide (other widths can
            be filled with zero bytes only).
        WouldBlock
            ``max_pending`` operations wait on the host.
        """
        self._check_buffers(buffer)
        pattern = scalar(value, buffer.dtype, "the value").tobytes()
        if not any(pattern):
            pattern = b"\0"
        elif len(pattern) not in (1, 2, 4, 8, 16):
            raise UsageError(f"a dtype of {len(pattern)} bytes can be filled with zeros only")
        return self._fill(buffer, pattern, after, lane)

    def _fill(self, buffer: Buffer, pattern: bytes, after: Iterable[After], lane: Lane | None) -> Operation[None]:
        engine = self._open_engine()
        operation: Operation[None] = Operation(engine.loop, engine, "fill")
        engine.copies.fill(operation, buffer, pattern, buffer.nbytes // len(pattern))
        engine.submission.submit(operation, [(buffer.allocation, True)], Terms(after, lane))
        return operation

    def _to_device(
        self,
        name: str,
        dst: Buffer,
        src: NDArray[Any] | PinnedArray,
        result: object,
        after: Iterable[After],
        lane: Lane | None,
    ) -> Operation[Any]:
        engine = self._check_buffers(dst)
        operation: Operation[Any] = Operation(engine.loop, engine, name)
        data = _host_bytes(src, dst, writes=False)
        uses: list[tuple[Allocation | PinnedArray, bool]] = [(dst.allocation, True)]
        if isinstance(src, PinnedArray):
            uses.append((src, False))
            engine.copies.pinned_to_device(operation, dst, src)
            operation.arrival = lambda op: op.finish(result)
        else:
            engine.copies.host_to_device(operation, dst, data, result)
        engine.submission.submit(operation, uses, Terms(after, lane), keep=src)
        return operation

    def _to_host(
        self,
        name: str,
        dst: NDArray[Any] | PinnedArray,
        src: Buffer,
        result: object,
        after: Iterable[After],
        lane: Lane | None,
    ) -> Operation[Any]:
        engine = self._check_buffers(src)
        operation: Operation[Any] = Operation(engine.loop, engine, name)
        data = _host_bytes(dst, src, writes=True)
        uses: list[tuple[Allocation | PinnedArray, bool]] = [(src.allocation, False)]
        if isinstance(dst, PinnedArray):
            uses.append((dst, True))
            engine.copies.device_to_pinned(operation, dst, src)
            operation.arrival = lambda op: op.finish(result)
        else:
            engine.copies.device_to_host(operation, data, src, result)
        engine.submission.submit(operation, uses, Terms(after, lane), keep=dst)
        return operation

    def _on_device(self, dst: Buffer, src: Buffer, after: Iterable[After], lane: Lane | None) -> Operation[None]:
        engine = self._check_buffers(dst, src)
        if dst.nbytes != src.nbytes:
            raise UsageError(f"the source has {src.nbytes} bytes, the destination {dst.nbytes}")
        if dst.allocation is src.allocation and abs(dst.offset - src.offset) < dst.nbytes:
            raise UsageError("source and destination overlap")
        operation: Operation[None] = Operation(engine.loop, engine, "copy")
        engine.copies.device_to_device(operation, dst, src)
        engine.submission.submit(operation, [(dst.allocation, True), (src.allocation, False)], Terms(after, lane))
        return operation

    def _check_buffers(self, *buffers: Buffer) -> Engine:
        engine = self._open_engine()
        for buffer in buffers:
            if not isinstance(buffer, Buffer):
                raise UsageError(f"expected a Buffer, not {type(buffer).__name__}")
            buffer.check_open()
            if buffer.allocation.owner is not engine:
                raise UsageError("the buffer belongs to another Offload")
        return engine

    # -- the whole -------------------------------------------------------------------------

    async def drain(self) -> None:
        """Wait until everything submitted so far and meanwhile is done. Raises nothing of theirs."""
        await self._open_engine().drain()

    async def room(self) -> None:
        """Wait until a submission would not raise WouldBlock for ``max_pending``."""
        await self._open_engine().lanes.room()

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
        ``armings`` of the monitor, ``watchdog_checks``, ``buffers``, ``allocated_bytes``,
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
            "armings": engine.completion.armings,
            "watchdog_checks": engine.watchdog.checks,
            "buffers": engine.memory.live,
            "allocated_bytes": engine.memory.allocated_bytes,
            "calls": engine.reverse.stats(),
            "fallback": engine.fallback,
        }

    def __repr__(self) -> str:
        return f"<aiooffload.Offload {self._device}{', ' + self._state if self._state else ''}>"


def _host_bytes(array: NDArray[Any] | PinnedArray, buffer: Buffer, *, writes: bool) -> NDArray[np.uint8]:
    """Return host memory as bytes, checked against ``buffer``; raises UsageError, ClosedError."""
    if isinstance(array, PinnedArray):
        if array.lease is None:
            raise ClosedError("the pinned array was closed")
        array = array.array
    if not isinstance(array, np.ndarray):
        raise UsageError(f"expected a NumPy array or a PinnedArray, not {type(array).__name__}")
    if array.dtype.hasobject:
        raise UsageError(f"dtype {array.dtype} holds Python objects, which a device cannot")
    if not array.flags.c_contiguous:
        raise UsageError("the host array is not C-contiguous")
    if writes and not array.flags.writeable:
        raise UsageError("the host array is read-only")
    if array.nbytes != buffer.nbytes:
        raise UsageError(f"the host array has {array.nbytes} bytes, the buffer {buffer.nbytes}")
    return array.reshape(-1).view(np.uint8) if math.prod(array.shape) else np.empty(0, np.uint8)


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
