"""The contract between the engine and a driver.

A driver opens devices; a device makes streams, events, memory and loaded kernels. The engine
knows nothing else about it, and the same conformance suite (``tests/drivers``) runs against every
driver.

Rules that hold for everything below:

*Ordering.* A stream runs what is enqueued on it in order. Nothing is ordered between two streams
unless an event or a word orders it. A wait that was enqueued before its signal works.

*Thread.* A device, its streams and its memory are used from one thread, the one that opened it,
except where a method says otherwise.

*Errors.* A method raises a subclass of :class:`aiooffload.errors.DriverError`. Once it has raised
:class:`~aiooffload.errors.DeviceLostError`, no method of any device of this process may be called
again; registered memory stays readable.

*Blocking.* ``enqueue_*`` returns before the device has done the work and never waits for it, as
long as fewer than :data:`MAX_QUEUED` entries wait on that stream. Methods marked *maintenance*
wait until everything in flight on the device is done, armed waits included, and meanwhile block
every ``enqueue_kernel`` of every other thread: the engine calls them behind its maintenance
barrier only.

*Context.* The caller's current context and stream capture mode are left as they were found.

*HIP.* Each method names the equivalent in HIP, or the gap, so that such a driver could be added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from aiooffload._native import LaunchPlan, Operation, Word

__all__ = [
    "MAX_QUEUED",
    "Block",
    "CallParameter",
    "Compiled",
    "Device",
    "DeviceProperties",
    "Event",
    "Function",
    "KernelSource",
    "RegisteredMemory",
    "Stream",
    "TimedEvent",
]

MAX_QUEUED: Final = 500
"""Entries that any driver accepts on one stream without blocking (the CUDA driver takes 1,021)."""


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What a device can do. Sizes are in bytes, dimensions in threads or blocks."""

    driver: str
    """``"cuda"`` or ``"host"``."""
    index: int
    name: str
    max_threads_per_block: int
    max_block: tuple[int, int, int]
    max_grid: tuple[int, int, int]
    max_shared_bytes: int
    """Dynamic shared memory a block can get once opted in."""
    total_bytes: int
    multiprocessors: int
    compute_capability: tuple[int, int]
    """(0, 0) on the host device."""
    max_pitch: int
    """Bytes from one row to the next that ``enqueue_copy_box`` takes at most."""
    memory_operations: bool
    """Whether streams can wait for and write words (``enqueue_wait``, ``enqueue_mark``)."""
    spins: bool
    """Whether spinning on the slots pays by default (it steals the interpreter from host kernels)."""
    process_wide_faults: bool
    """Whether a fault ends every device of the process."""
    unique_id: str
    """The same for the same device in every process, such as a GPU's UUID."""

    @property
    def label(self) -> str:
        """The device as a user names it: ``"cuda:0"`` or ``"host"``."""
        return self.driver if self.driver == "host" else f"{self.driver}:{self.index}"


class KernelSource(Protocol):
    """What a driver reads of a kernel (see :class:`aiooffload.kernel.Kernel`)."""

    @property
    def name(self) -> str:
        """Entry point in the module."""

    @property
    def cuda_source(self) -> str | None:
        """CUDA C++ source, if it was given as source."""

    @property
    def image(self) -> bytes | None:
        """PTX or cubin, if it was given compiled."""

    @property
    def core(self) -> Any | None:
        """A ``cuda.core`` kernel, if it was given loaded."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Options for the runtime compiler: fields of ``cuda.core.ProgramOptions``."""

    @property
    def host_function(self) -> Any | None:
        """The host implementation, if there is one."""

    @property
    def calls(self) -> bool:
        """Whether its first parameter is an ``ao::Launch``."""


class RegisteredMemory(Protocol):
    """Host memory that the device can read and write, mapped shared and not inherited by a fork.

    It stays readable and writable on the host after a fault, until the process ends.
    """

    @property
    def host_address(self) -> int:
        """Address for the host."""

    @property
    def device_address(self) -> int:
        """Address for the device."""

    @property
    def nbytes(self) -> int:
        """Size in bytes, a multiple of the page size."""

    @property
    def array(self) -> NDArray[np.uint8]:
        """The memory as ``(nbytes,) uint8``, C order, zeroed when new."""

    def word(self, offset: int) -> Word:
        """Return the 64-bit word at ``offset`` (a multiple of 8)."""


class Block(Protocol):
    """One allocation of device memory."""

    @property
    def address(self) -> int:
        """Device address; at least 256-byte aligned."""

    @property
    def nbytes(self) -> int:
        """Size in bytes as asked for (0 is legal)."""

    @property
    def host_array(self) -> NDArray[np.uint8] | None:
        """The memory as ``(nbytes,) uint8`` where the host can touch it (host driver), else None."""


class CallParameter(NamedTuple):
    """What a kernel that calls gets as its first parameter (:mod:`aiooffload.rules.wire`)."""

    data: bytes
    """The parameter itself, with the device's addresses of the channel."""
    keep: object
    """What keeps the channel's memory alive."""


Compiled: TypeAlias = object
"""The outcome of :meth:`Device.compile`; opaque to the engine."""


class Function(Protocol):
    """A kernel, loaded on one device and ready to launch without a further load."""

    @property
    def parameter_sizes(self) -> tuple[int, ...] | None:
        """Size of each parameter in bytes, without that of a kernel that calls; None where the driver does not know."""

    def plan(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        cluster: tuple[int, int, int] | None,
        cooperative: bool,
    ) -> LaunchPlan:
        """Return the launch plan of this geometry, opting in to shared memory above 48 KiB.

        The engine has validated the geometry against :class:`DeviceProperties`.
        Raises LaunchError if this kernel cannot run so (registers, cluster size). *Thread:* any
        that holds the interpreter. *HIP:* hipFuncSetAttribute.
        """

    def prepare(self, plan: LaunchPlan, arguments: Sequence[Any], calls: CallParameter | None = None) -> Any:
        """Pack checked arguments into what ``Stream.enqueue_kernel`` takes.

        ``arguments`` holds, per parameter, a :class:`aiooffload.buffer.Buffer` or a NumPy scalar;
        ``calls`` goes before them where the kernel calls.
        """


class Event(Protocol):
    """A point in a stream that other streams and the host can look at. Reusable."""

    def query(self) -> bool:
        """Whether the work before the last record is done; True if never recorded. *HIP:* hipEventQuery."""

    def close(self) -> None:
        """Destroy it; allowed while recorded work is pending. *HIP:* hipEventDestroy."""


class TimedEvent(Event, Protocol):
    """An event that knows when the device reached it."""

    def elapsed_ns(self, since: Any) -> int:
        """Return the nanoseconds on the device's clock from timer ``since`` to this one, both reached; may be negative.

        Exact to a microsecond if they are less than 4 seconds apart. *HIP:* hipEventElapsedTime.
        """


class Stream(Protocol):
    """An in-order queue of device work that is not ordered with the default stream."""

    @property
    def handle(self) -> int:
        """The driver's handle (``CUstream``), or a number unique in the process."""

    def bind_marks(self, slot: Word, bell: Word) -> None:
        """Name the words that ``enqueue_kernel`` and ``enqueue_mark`` write. Called once."""

    def enqueue_kernel(self, plan: LaunchPlan, prepared: Any, operation: Operation, sequence: int) -> None:
        """Enqueue a kernel and, if ``sequence`` is not 0, its completion mark.

        The mark stores ``sequence`` in the slot, then 1 in the bell, after the kernel is done and
        its writes are visible to the host. On the host driver an exception of the kernel is put
        into ``operation.failure`` before the mark is written; on a GPU a fault means that no
        later mark of this process is ever written.
        Raises LaunchError (nothing enqueued), DeviceLostError. *HIP:* hipModuleLaunchKernel,
        then two hipStreamWriteValue64 (no batch, no write to the bell in one call).
        """

    def enqueue_mark(self, sequence: int) -> None:
        """Enqueue the completion mark alone. *HIP:* hipStreamWriteValue64 twice."""

    def enqueue_write(self, word: Word, value: int) -> None:
        """Store ``value`` in ``word`` when all earlier work is done. *HIP:* hipStreamWriteValue64."""

    def enqueue_wait(self, word: Word, value: int) -> None:
        """Hold later work until ``word - value``, as a signed 64-bit number, is at least 0.

        *HIP:* hipStreamWaitValue64 (needs signal memory there, the gap).
        """

    def enqueue_wake(self, descriptor: int) -> None:
        """Add the time, as ``now_ns``, to the eventfd ``descriptor`` when all earlier work is done.

        It runs on a thread of the driver's, at an unknown time, possibly while any other thread
        holds the interpreter or a lock: it is one ``write`` and takes nothing. After a fault it
        never runs. Never used on a stream that runs kernels. *HIP:* hipLaunchHostFunc.
        """

    def enqueue_copy(self, destination: int, source: int, nbytes: int, /, *peers: int) -> None:
        """Copy between device memory and registered memory, in any direction, by device address.

        ``peers`` are the handles of destination's and source's devices where these differ; one of them is this
        stream's. *HIP:* hipMemcpyAsync with hipMemcpyDefault, hipMemcpyPeerAsync.
        """

    def enqueue_copy_box(
        self,
        destination: int,
        source: int,
        width: int,
        height: int,
        depth: int,
        destination_pitch: int,
        source_pitch: int,
        destination_slice: int,
        source_slice: int,
        /,
        *peers: int,
    ) -> None:
        """Copy ``depth`` slices of ``height`` rows of ``width`` bytes between memory as for ``enqueue_copy``.

        A pitch is the distance in bytes from one row to the next, from ``width`` to
        ``DeviceProperties.max_pitch``; a slice is that from one slice to the next, a multiple of the pitch and
        at least ``height`` times it (any number where ``depth`` is 1). Nothing is written between the rows.
        Source and destination do not overlap. *HIP:* hipMemcpyParam2DAsync, hipDrvMemcpy3DAsync; none for peers.
        """

    def enqueue_fill(self, address: int, pattern: bytes, count: int) -> None:
        """Write ``pattern`` (1, 2, 4, 8 or 16 bytes) ``count`` times. *HIP:* hipMemsetD8/16/32Async."""

    def enqueue_record(self, event: Event) -> None:
        """Record ``event`` here; waits enqueued earlier keep what they saw. *HIP:* hipEventRecord."""

    def enqueue_wait_event(self, event: Event) -> None:
        """Hold later work until what ``event`` recorded last, as of now, is done. *HIP:* hipStreamWaitEvent."""

    def query(self) -> bool:
        """Whether everything enqueued is done. Raises DeviceLostError. *HIP:* hipStreamQuery."""

    def capturing(self) -> bool:
        """Whether what is enqueued would go into a graph that is being captured. *HIP:* hipStreamIsCapturing."""

    def close(self) -> None:
        """Destroy it, unless it was adopted. Pending work still runs. *HIP:* hipStreamDestroy."""


class Device(Protocol):
    """One opened device."""

    @property
    def properties(self) -> DeviceProperties:
        """What it can do."""

    @property
    def handle(self) -> int:
        """What streams of another device call this one in a copy; the same where no peer copy is needed.

        *HIP:* the device's ordinal.
        """

    def create_stream(self, priority: int = 0) -> Stream:
        """Create a stream; smaller numbers are more urgent. *HIP:* hipStreamCreateWithPriority."""

    def adopt_stream(self, handle: int) -> Stream:
        """Return the stream of somebody else that has this handle: it is used like ours and never destroyed.

        Where a driver has default streams, their handles are legal. Raises UsageError if it belongs to
        another context. *HIP:* nothing to call.
        """

    def current(self) -> AbstractContextManager[None]:
        """Enter the device as other libraries expect it (CUDA: its primary context); leave it as it was found.

        *HIP:* hipSetDevice.
        """

    def replay(self, graph: Any) -> Callable[[Stream], None]:
        """Return what enqueues a replay of an instantiated graph: an object with a ``handle``, or that handle.

        Raises UsageError if it is none, or the device has no graphs. *HIP:* hipGraphLaunch.
        """

    def create_event(self) -> Event:
        """Create an event without timing. *HIP:* hipEventCreateWithFlags."""

    def create_timed_event(self) -> TimedEvent:
        """Create an event with timing. *HIP:* hipEventCreate."""

    def use_allocator(self, resource: object) -> None:
        """Allocate from the program's ``resource`` from now on, which has the protocol of ``cuda.core.MemoryResource``.

        Raises UsageError where the driver cannot. *HIP:* none, its Python packages share no such protocol.
        """

    def allocate(self, nbytes: int) -> Block:
        """Allocate device memory, usable on every stream once this returns.

        Never waits for running kernels. Raises OutOfMemoryError; the device stays usable.
        *HIP:* hipMallocAsync.
        """

    def free(self, block: Block) -> None:
        """Free memory that nothing enqueued touches any more. Never waits. *HIP:* hipFreeAsync."""

    def trim(self) -> None:
        """Give memory that is kept for reuse back to the system. *HIP:* hipMemPoolTrimTo."""

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes. *HIP:* hipMemGetInfo."""

    def mapped_memory(self, address: int, nbytes: int) -> object:
        """Return what keeps alive the memory that a kernel has named for a mapped argument, None if its launch does.

        The numbers come from the device and may be anything. Raises UsageError unless all of these bytes are memory
        that the driver knows. *HIP:* hipPointerGetAttribute.
        """

    def register(self, nbytes: int) -> RegisteredMemory:
        """Map and register host memory. Never waits for kernels. *Thread:* any.

        Raises OutOfMemoryError. *HIP:* hipHostRegister.
        """

    def unregister(self, memory: RegisteredMemory) -> None:
        """Unregister and unmap; *maintenance*. *Thread:* any. *HIP:* hipHostUnregister."""

    def compile(self, kernel: KernelSource) -> Compiled:
        """Compile for this device, from the disk cache if possible. Touches no device.

        Raises CompileError, or UsageError where the kernel has nothing for this driver.
        *Thread:* any. *HIP:* hiprtcCompileProgram.
        """

    def load(self, kernel: KernelSource, compiled: Compiled) -> Function:
        """Load a compiled kernel; *maintenance*. *Thread:* any. *HIP:* hipModuleLoadData, hipModuleGetFunction."""

    def selftest_function(self) -> Function:
        """Load the driver's own kernels, and return one that does nothing and takes no parameters; *maintenance*."""

    def rows(self, *box: int) -> Callable[[Any], None] | None:
        """Return what enqueues the copy of ``box`` on a stream faster than ``enqueue_copy_box``; None if nothing does.

        ``box`` has the arguments of ``enqueue_copy_box`` but for peers; both sides are memory that kernels of this
        device reach. It is a kernel of the driver's, which waits for those that fill the device. None before
        ``selftest_function``. *HIP:* a kernel, too.
        """

    def check(self, stream: Stream) -> None:
        """Ask the driver whether the device is still well; raises DeviceLostError. Never waits."""

    def health_note(self) -> str:
        """Return what the system knows about a fault (the XID on NVIDIA), or an empty string.

        Makes no driver call and may be used after a loss.
        """

    def close(self) -> None:
        """Give the device back. Everything made from it was closed before."""
