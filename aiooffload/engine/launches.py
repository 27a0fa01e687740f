"""Kernels of one engine: loading them behind the barrier, planning and preparing their launches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aiooffload._native import Launcher, LaunchPlan, pack
from aiooffload.buffer import Allocation, Buffer
from aiooffload.errors import UsageError
from aiooffload.rules.geometry import Dimensions, check_launch, triple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiooffload.drivers.api import CallParameter, Compiled, Device, Function
    from aiooffload.engine.scratch import ScratchLayout
    from aiooffload.kernel import Kernel, Parameter
    from aiooffload.operation import OperationOwner

__all__ = ["PLAIN", "Geometry", "Kernels", "Site", "buffers", "check_sizes", "retrieve"]

Geometry = tuple[Dimensions, Dimensions, int, Dimensions | None, bool]
_MAX_SITES: Final = 4096
PLAIN: Final = (Buffer, np.generic, int, float, complex)
"""Arguments that are prepared as they are: no Scratch, no array of another library."""


class Site:
    """A kernel in one geometry on one device: what a launch of it needs, looked up once."""

    __slots__ = ("_function", "_kernel", "formats", "native", "plan")

    def __init__(self, kernel: Kernel, function: Function, plan: LaunchPlan) -> None:
        self._kernel = kernel
        self._function = function
        self.plan: Final = plan
        # Only a driver that knows sizes takes packed parameters; None: every launch goes the long way.
        self.formats: Final = kernel.signature.formats if function.parameter_sizes is not None else None
        # What the host device prepares serves one launch, unless there is no shared memory in it.
        reusable = function.parameter_sizes is not None or not plan.shared_bytes
        bare = self.prepare(()) if reusable and kernel.signature.takes_nothing(function.parameter_sizes) else None
        # What the launch path knows of it; a kernel that calls is not for that path.
        self.native: Final = (
            plan,
            self.formats,
            bare,
            kernel.signature.reads,
            kernel.signature.dtypes,
            self._prepare_now,
        )

    def prepare(self, arguments: tuple[Any, ...]) -> Any:
        """Check, convert and pack the arguments; raises UsageError."""
        if self.formats is not None:
            packed = pack(self.formats, arguments)
            if packed is not None:
                return packed
        return self._function.prepare(self.plan, self._kernel.signature.check(self._kernel.name, arguments))

    def _prepare_now(self, arguments: tuple[Any, ...]) -> Any:
        """Prepare for the launch path; None for what the long way makes something else of first."""
        return self.prepare(arguments) if all(isinstance(value, PLAIN) for value in arguments) else None

    def late(
        self,
        arguments: tuple[Any, ...],
        wanted: ScratchLayout | None,
        lend: Callable[[ScratchLayout, Sequence[Any]], Sequence[Any]],
    ) -> Callable[[CallParameter | None], Any]:
        """Check and convert the arguments, to be packed when the lane is known, and with it channel and scratch.

        ``lend`` is called then, and puts scratch where ``wanted`` says.
        """
        checked: Sequence[Any] = self._kernel.signature.check(self._kernel.name, arguments)
        if wanted is None:
            return lambda calls: self._function.prepare(self.plan, checked, calls)
        self._function.prepare(self.plan, wanted.fill(checked, None))  # now, what does not fit raises at submission
        return lambda calls: self._function.prepare(self.plan, lend(wanted, checked), calls)


class Kernels:
    """What is loaded on one device.

    Parameters
    ----------
    device
        Compiles and loads.
    launcher
        Told of every plain geometry, so that its next launch goes straight to the device.
    compile
        Runs a call that touches no device off the loop's thread.
    maintain
        Runs a call behind the maintenance barrier.
    open_channel
        Makes what kernels that call need, the first time.
    """

    def __init__(
        self,
        device: Device,
        launcher: Launcher,
        compile: Callable[[Callable[[], Compiled]], Awaitable[Compiled]],
        maintain: Callable[[Callable[[], Function]], Awaitable[Function]],
        open_channel: Callable[[], Awaitable[None]],
    ) -> None:
        self._device = device
        self._launcher = launcher
        self._compile = compile
        self._maintain = maintain
        self._open_channel = open_channel
        self._functions: dict[Kernel, Function] = {}
        self._loading: dict[Kernel, asyncio.Task[Function]] = {}
        # Keyed by the kernel and the geometry as the caller wrote it.
        self.sites: dict[tuple[Kernel, Dimensions, Dimensions, int, Dimensions | None, bool], Site] = {}

    def loaded(self, kernel: Kernel) -> bool:
        """Whether launches of ``kernel`` can go to the device at once."""
        return kernel in self._functions

    def load(self, kernel: Kernel) -> asyncio.Future[Function]:
        """Compile and load ``kernel`` unless that is done or going on."""
        function = self._functions.get(kernel)
        if function is not None:
            future: asyncio.Future[Function] = asyncio.get_running_loop().create_future()
            future.set_result(function)
            return future
        task = self._loading.get(kernel)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._load(kernel), name=f"aiooffload load {kernel.name}")
            task.add_done_callback(retrieve)  # those who wait for it tell its failure, if anybody does
            self._loading[kernel] = task
        return task

    async def _load(self, kernel: Kernel) -> Function:
        try:
            if kernel.calls:
                await self._open_channel()
            compiled = await self._compile(lambda: self._device.compile(kernel))
            function = await self._maintain(lambda: self._device.load(kernel, compiled))
            check_sizes(kernel, function)
            self._functions[kernel] = function
            return function
        finally:
            self._loading.pop(kernel, None)  # absent if it failed before its first await, in an eager task

    def cancel_loading(self) -> list[asyncio.Task[Function]]:
        """Cancel what is still loading and return it."""
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        return tasks

    async def finish_loading(self) -> None:
        """Cancel what is still loading and wait for it."""
        tasks = self.cancel_loading()
        if tasks:
            await asyncio.wait(tasks)

    def check_geometry(self, geometry: Geometry) -> None:
        """Raise UsageError unless the device can run this geometry."""
        self._normalise(geometry)

    def _normalise(self, geometry: Geometry) -> tuple[Any, Any, int, Any, bool]:
        limits = self._device.properties
        grid, block = triple(geometry[0], "grid"), triple(geometry[1], "block")
        cluster = None if geometry[3] is None else triple(geometry[3], "cluster")
        check_launch(
            grid,
            block,
            geometry[2],
            cluster,
            max_grid=limits.max_grid,
            max_block=limits.max_block,
            max_threads=limits.max_threads_per_block,
            max_shared_bytes=limits.max_shared_bytes,
        )
        return grid, block, geometry[2], cluster, geometry[4]

    def site(self, kernel: Kernel, geometry: Geometry) -> Site:
        """Plan ``geometry`` of a loaded kernel; raises UsageError, LaunchError."""
        function = self._functions[kernel]
        site = Site(kernel, function, function.plan(*self._normalise(geometry)))
        if len(self.sites) >= _MAX_SITES:
            self.sites.clear()
            self._launcher.forget()
        try:
            self.sites[(kernel, *geometry)] = site
        except TypeError:  # a list as grid: legal, looked up anew each time
            return site
        grid, block, *special = geometry
        if special == [0, None, False] and not kernel.calls:
            self._launcher.learn(kernel, grid, block, site.native)
        return site


def retrieve(task: asyncio.Task[Any]) -> None:
    """Look at the failure of a task that several may wait for, and perhaps nobody does."""
    if not task.cancelled():
        task.exception()


def check_sizes(kernel: Kernel, function: Function) -> None:
    """Hold the annotations against what the compiled code takes; raises UsageError."""
    sizes, parameters = function.parameter_sizes, kernel.signature.parameters
    if sizes is None or parameters is None:
        return
    if len(sizes) != len(parameters):
        raise UsageError(f"kernel {kernel.name} takes {len(sizes)} parameters in CUDA, {len(parameters)} in Python")
    for size, parameter in zip(sizes, parameters, strict=True):
        expected = _size(parameter)
        if expected is not None and expected != size:
            raise UsageError(
                f"parameter {parameter.name} of kernel {kernel.name} has {size} bytes in CUDA, {expected} as annotated"
            )


def _size(parameter: Parameter) -> int | None:
    if parameter.access is not None:
        return 8
    return None if parameter.dtype is None else parameter.dtype.itemsize


def buffers(kernel: Kernel, arguments: Sequence[object], owner: OperationOwner) -> list[tuple[Allocation, bool]]:
    """Return the memory of the Buffers among the arguments, each with whether the kernel may write it.

    Raises UsageError for a wrong count, dtype or device, ClosedError for a closed buffer.
    """
    kernel.signature.check_count(kernel.name, arguments)
    parameters = kernel.signature.parameters
    found: list[tuple[Allocation, bool]] = []
    for index, value in enumerate(arguments):
        if not isinstance(value, Buffer):
            continue
        parameter = parameters[index] if parameters is not None else None
        if parameter is not None:
            parameter.check(value)
        else:
            value.check_open()
        if not value.allocation.belongs_to(owner):
            raise UsageError(f"argument {index} of kernel {kernel.name} is a buffer of another Offload")
        found.append((value.allocation, not kernel.signature.read_only(index)))
    return found
