"""A GPU with its primary context, which it shares with torch, CuPy and everybody else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from cuda.bindings import driver
from cuda.core import Device as CoreDevice
from cuda.core import Kernel as CoreKernel
from cuda.core import ObjectCode
from cuda.core import Stream as CoreStream
from numpy.typing import NDArray

from aiooffload._native import CudaEvent, CudaStream, cuda_initialise
from aiooffload.drivers.api import DeviceProperties
from aiooffload.drivers.cuda.allocator import Allocator, AllocatorBlock
from aiooffload.drivers.cuda.compiler import compile_source
from aiooffload.drivers.cuda.function import CudaFunction
from aiooffload.drivers.cuda.library import initialise
from aiooffload.drivers.cuda.room import NOTHING, NOTHING_IMAGE, local_nbytes, make_room
from aiooffload.drivers.cuda.rows import ROW_KERNELS, RowCopies
from aiooffload.drivers.cuda.status import status_error, unwrap
from aiooffload.drivers.cuda.xid import XidWatch
from aiooffload.drivers.mapped import MappedMemory, registered
from aiooffload.errors import CompileError, DeviceUnavailableError, OutOfMemoryError, UsageError
from aiooffload.rules.wire import PARAMETER_NBYTES

if TYPE_CHECKING:
    from aiooffload.drivers.api import Block, Compiled, KernelSource, RegisteredMemory, Stream

__all__ = ["CudaDevice"]

_KEEP_BYTES: Final = 256 << 20
"""Freed memory that the pool keeps for reuse rather than give back at every synchronisation."""
_LEGACY_STREAM: Final = int(driver.CU_STREAM_LEGACY)
_REGISTER_FLAGS: Final = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP


class CudaBlock:
    """One allocation of the device's pool."""

    __slots__ = ("address", "nbytes")
    host_array: NDArray[np.uint8] | None = None

    def __init__(self, address: int, nbytes: int) -> None:
        self.address: Final = address
        self.nbytes: Final = nbytes


class CudaDevice:
    """GPU ``index``, opened. See ``drivers/api.py`` for the contract.

    Raises
    ------
    DeviceUnavailableError
        No driver, one that is too old, or no such GPU.
    """

    def __init__(self, index: int) -> None:
        initialise(index)
        try:
            cuda_initialise(status_error)
        except RuntimeError as error:
            raise DeviceUnavailableError(f"the CUDA driver is too old: {error}; install release 580") from error
        self._ordinal = unwrap("cuDeviceGet", driver.cuDeviceGet(index))
        self._context = _primary_context(self._ordinal)
        self.properties: Final = _describe(index, CoreDevice(index))
        # Of the context, which is what a copy between two devices names.
        self.handle: Final = int(self._context)
        self._arch = "sm_{}{}".format(*self.properties.compute_capability)
        with self.current():
            self._memory_stream = self.create_stream()
            self._pool = self._create_pool()
        _peers.join(self)
        # The program's, instead of the pool.
        self._allocator: Allocator | None = None
        self._rows: RowCopies | None = None
        self._xid = XidWatch(self.properties.unique_id)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current and the capture mode relaxed, and leave both as they were."""
        unwrap("cuCtxPushCurrent", driver.cuCtxPushCurrent(self._context))
        relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        mode = unwrap("cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(relaxed))
        try:
            yield
        finally:
            # Statuses are not looked at: after a fault each of these returns it, and what is under way raises it.
            driver.cuThreadExchangeStreamCaptureMode(mode)
            driver.cuCtxPopCurrent()

    # -- streams and events ----------------------------------------------------------------

    def create_stream(self, priority: int = 0) -> Stream:
        """Create a stream that does not wait for the default stream."""
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        with self.current():
            handle = unwrap("cuStreamCreate", driver.cuStreamCreateWithPriority(flags, priority))
        return CudaStream(int(handle), int(self._context))

    def adopt_stream(self, handle: int) -> Stream:
        """Use a stream of the primary context; 0 and 1 are the legacy default stream, 2 the calling thread's."""
        handle = handle or _LEGACY_STREAM
        with self.current():
            context = unwrap("cuStreamGetCtx", driver.cuStreamGetCtx(handle))
        if int(context) != int(self._context):
            raise UsageError(
                f"stream {handle:#x} belongs to another context than {self.properties.label}'s primary one: "
                "adopt it on the Offload of its device"
            )
        return CudaStream(handle, int(self._context), owned=False)

    def replay(self, graph: Any) -> Callable[[Stream], None]:
        """Replay an executable graph, such as cuda.core's ``GraphBuilder.complete()`` returns."""
        handle = getattr(graph, "handle", graph)
        if not isinstance(handle, driver.CUgraphExec) and type(handle) is not int:
            raise UsageError(f"expected an instantiated CUDA graph, not {graph!r}")
        executable = driver.CUgraphExec(int(handle))

        def enqueue(stream: Stream) -> None:
            with self.current():
                unwrap("cuGraphLaunch", driver.cuGraphLaunch(executable, stream.handle))

        return enqueue

    def create_event(self) -> CudaEvent:
        """Create an event without timing."""
        return CudaEvent(int(self._context))

    def create_timed_event(self) -> CudaEvent:
        """Create an event with timing."""
        return CudaEvent(int(self._context), timed=True)

    # -- memory ----------------------------------------------------------------------------

    def _create_pool(self) -> Any:
        """Create a pool of our own: what others do to the device's default pool does not concern us."""
        properties = driver.CUmemPoolProps()
        properties.allocType = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = int(self._ordinal)
        pool = unwrap("cuMemPoolCreate", driver.cuMemPoolCreate(properties))
        threshold = driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
        value = driver.cuuint64_t(_KEEP_BYTES)
        unwrap("cuMemPoolSetAttribute", driver.cuMemPoolSetAttribute(pool, threshold, value))
        return pool

    def share_pool(self, other: CudaDevice) -> None:
        """Let another device reach the memory of the pool, if it can."""
        (status, reaches) = driver.cuDeviceCanAccessPeer(other._ordinal, self._ordinal)
        if int(status) or not reaches:
            return  # copies go through the host's memory then
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = int(other._ordinal)
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with self.current():
            unwrap("cuMemPoolSetAccess", driver.cuMemPoolSetAccess(self._pool, [access], 1))

    def use_allocator(self, resource: object) -> None:
        """Allocate from ``resource`` instead of the pool; raises UsageError if its memory is not for devices."""
        with self.current():
            self._allocator = Allocator(resource, CoreStream.from_handle(self._memory_stream.handle))

    def allocate(self, nbytes: int) -> Block:
        """Allocate from the pool or the program's allocator; usable on every stream once this returns."""
        if nbytes == 0:
            return CudaBlock(0, 0)
        stream = self._memory_stream
        with self.current():
            block = self._from_pool(nbytes) if self._allocator is None else self._allocator.allocate(nbytes)
            # The stream carries allocations and frees alone, so this waits for no kernel; after it
            # the memory needs no ordering against other streams.
            if not stream.query():
                unwrap("cuStreamSynchronize", driver.cuStreamSynchronize(stream.handle))
        return block

    def _from_pool(self, nbytes: int) -> CudaBlock:
        result = driver.cuMemAllocFromPoolAsync(nbytes, self._pool, self._memory_stream.handle)
        return CudaBlock(int(unwrap("cuMemAllocFromPoolAsync", result, f"{nbytes} bytes")), nbytes)

    def free(self, block: Block) -> None:
        """Free to where it came from."""
        if block.nbytes == 0:
            return
        with self.current():
            if isinstance(block, AllocatorBlock):
                assert self._allocator is not None
                self._allocator.free(block)
                return
            unwrap("cuMemFreeAsync", driver.cuMemFreeAsync(block.address, self._memory_stream.handle))

    def trim(self) -> None:
        """Give what the pool keeps back to the device."""
        with self.current():
            # Waits for frees alone, and what was freed counts as kept only after it.
            unwrap("cuStreamSynchronize", driver.cuStreamSynchronize(self._memory_stream.handle))
            unwrap("cuMemPoolTrimTo", driver.cuMemPoolTrimTo(self._pool, 0))

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device."""
        with self.current():
            free, total = unwrap("cuMemGetInfo", driver.cuMemGetInfo())
        return int(free), int(total)

    def mapped_memory(self, address: int, nbytes: int) -> None:
        """Raise UsageError unless the driver knows all of these bytes: the copy would read any other of the process."""
        attribute, end = driver.CUpointer_attribute, address + nbytes
        ask = (attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE)
        with self.current():
            # Mapped in pieces, it has several ranges.
            while address < end:
                found = [driver.cuPointerGetAttribute(which, address) for which in ask]
                reached = 0 if any(int(status) for status, _ in found) else sum(int(value) for _, value in found)
                if reached <= address:
                    raise UsageError(f"{end - address} bytes at {address:#x} are no memory of a device")
                address = reached

    def register(self, nbytes: int) -> RegisteredMemory:
        """Map memory of our own and register it for every context."""
        memory = MappedMemory(nbytes)
        with self.current():
            (status,) = driver.cuMemHostRegister(memory.host_address, memory.nbytes, _REGISTER_FLAGS)
            if int(status):
                memory.unmap()
                raise OutOfMemoryError(
                    f"{nbytes} bytes of host memory cannot be pinned ({status.name})",
                    operation="cuMemHostRegister",
                    status=status.name,
                    code=int(status),
                )
            address = unwrap("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer(memory.host_address, 0))
        memory.device_address = int(address)
        _registered[memory.host_address] = memory
        registered.add(memory)
        return memory

    def unregister(self, memory: RegisteredMemory) -> None:
        """Unregister and unmap."""
        assert isinstance(memory, MappedMemory)
        with self.current():
            unwrap("cuMemHostUnregister", driver.cuMemHostUnregister(memory.host_address))
        del _registered[memory.host_address]
        memory.unmap()

    # -- kernels ---------------------------------------------------------------------------

    def compile(self, kernel: KernelSource) -> Compiled:
        """Return a cubin, PTX, or the ``cuda.core`` kernel that was given."""
        if kernel.core is not None:
            core: Compiled = kernel.core
            return core
        if kernel.image is not None:
            return kernel.image
        if kernel.cuda_source is None:
            raise UsageError(
                f"kernel {kernel.name} has no CUDA code: give it cuda= or image=, or launch it on the host"
            )
        return compile_source(kernel.cuda_source, self._arch, kernel.options)

    def load(self, kernel: KernelSource, compiled: Compiled) -> CudaFunction:
        """Load the code into the context now, so that no launch has to."""
        return self._load(kernel.name, compiled, kernel.calls)

    def _load(self, name: str, compiled: Compiled, calls: bool = False) -> CudaFunction:
        with self.current():
            core: Any = compiled
            if not isinstance(compiled, CoreKernel):
                assert isinstance(compiled, bytes)
                core = _core_kernel(self.properties.index, name, compiled)
            handle = driver.CUkernel(int(core.handle))
            function = unwrap("cuKernelGetFunction", driver.cuKernelGetFunction(handle))
            unwrap("cuFuncLoad", driver.cuFuncLoad(function))
            make_room(self.handle, local_nbytes(function), self._run_nothing)
            sizes = tuple(info.size for info in core.arguments_info)
        if calls:
            if sizes[:1] != (PARAMETER_NBYTES,):
                raise UsageError(f"kernel {name} calls host functions: its first parameter has to be an ao::Launch")
            sizes = sizes[1:]
        return CudaFunction(name, core, int(function), sizes, self.current)

    def selftest_function(self) -> CudaFunction:
        """Load the kernels of this driver and return the one that does nothing."""
        self._rows = RowCopies(lambda name: self._load(name, ROW_KERNELS), self.properties.multiprocessors)
        with self.current():
            make_room(self.handle, 1, self._run_nothing)
        return self._load(NOTHING, NOTHING_IMAGE)

    def _run_nothing(self) -> None:
        kernel, stream = _core_kernel(self.properties.index, NOTHING, NOTHING_IMAGE), self._memory_stream.handle
        unwrap("cuLaunchKernel", driver.cuLaunchKernel(int(kernel.handle), 1, 1, 1, 1, 1, 1, 0, stream, 0, 0))
        unwrap("cuStreamSynchronize", driver.cuStreamSynchronize(stream))

    def rows(self, *box: int) -> Callable[[Any], None] | None:
        """Return what copies rows by a kernel, once these are loaded."""
        return None if self._rows is None else self._rows.call(*box)

    # -- health ----------------------------------------------------------------------------

    def check(self, stream: Stream) -> None:
        """Query a stream: a fault anywhere in the context is returned by any query."""
        stream.query()

    def health_note(self) -> str:
        """Return the XIDs that NVML has seen."""
        return self._xid.note()

    def close(self) -> None:
        """Destroy the pool. The primary context stays, as everybody else's in the process does."""
        with _peers.without(self), self.current():
            unwrap("cuMemPoolDestroy", driver.cuMemPoolDestroy(self._pool))
            self._memory_stream.close()
        self._xid.close()


class Peers:
    """The open devices of this process, of which each reaches the others' pools.

    Opened to each other when they are opened: it takes 20 ms for each direction, whatever runs there, and copies
    between them have ten times the rate (390 GB/s and 37, two H200).
    """

    def __init__(self) -> None:
        # Held while a pool is opened or destroyed; devices are opened and closed on any thread.
        self._lock = threading.Lock()
        # One that was terminated is not closed.
        self._devices: weakref.WeakSet[CudaDevice] = weakref.WeakSet()

    def join(self, device: CudaDevice) -> None:
        """Open the pools of ``device`` and those of other GPUs to one another."""
        with self._lock:
            for other in self._devices:
                if other.handle != device.handle:
                    other.share_pool(device)
                    device.share_pool(other)
            self._devices.add(device)

    @contextmanager
    def without(self, device: CudaDevice) -> Iterator[None]:
        """Have ``device`` no longer among them; none is opened to it meanwhile."""
        with self._lock:
            self._devices.discard(device)
            yield


_peers: Final = Peers()

# What must outlive the object that made it, for the life of the process:
_contexts: Final[dict[int, Any]] = {}
# By host address. The device may still write to it when an Offload is collected without being closed.
_registered: Final[dict[int, MappedMemory]] = {}
# By device and code, then by name. Unloading would wait for everything in flight, whoever's it is.
_libraries: Final[dict[tuple[int, bytes], ObjectCode]] = {}


def _primary_context(ordinal: Any) -> Any:
    """Retain the primary context once per process: the last release would destroy it under loaded kernels."""
    if int(ordinal) not in _contexts:
        _contexts[int(ordinal)] = unwrap("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ordinal))
    return _contexts[int(ordinal)]


def _core_kernel(index: int, name: str, image: bytes) -> CoreKernel:
    """Load a cubin or PTX once; CompileError if it is neither or has no such kernel."""
    library = _libraries.get((index, image))
    if library is None:
        is_elf = image[:4] == b"\x7fELF"
        library = ObjectCode.from_cubin(image, name=name) if is_elf else ObjectCode.from_ptx(image, name=name)
        _libraries[index, image] = library
    try:
        return library.get_kernel(name)
    except Exception as error:  # CUDAError is private to cuda.core
        raise CompileError(
            f"the module has no kernel {name}, or cannot be loaded on this device: {error}",
            operation="cuLibraryGetKernel",
            log=str(error),
        ) from error


def _describe(index: int, device: CoreDevice) -> DeviceProperties:
    limits: Any = device.properties
    attributes = driver.CUdevice_attribute
    ordinal = unwrap("cuDeviceGet", driver.cuDeviceGet(index))

    def attribute(which: Any) -> int:
        return int(unwrap("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(which, ordinal)))

    capability = device.compute_capability
    return DeviceProperties(
        driver="cuda",
        index=index,
        name=device.name,
        max_threads_per_block=limits.max_threads_per_block,
        max_block=(limits.max_block_dim_x, limits.max_block_dim_y, limits.max_block_dim_z),
        max_grid=(limits.max_grid_dim_x, limits.max_grid_dim_y, limits.max_grid_dim_z),
        max_shared_bytes=limits.max_shared_memory_per_block_optin,
        total_bytes=int(unwrap("cuDeviceTotalMem", driver.cuDeviceTotalMem(ordinal))),
        multiprocessors=limits.multiprocessor_count,
        compute_capability=(capability.major, capability.minor),
        max_pitch=attribute(attributes.CU_DEVICE_ATTRIBUTE_MAX_PITCH),
        memory_operations=bool(attribute(attributes.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS)),
        spins=True,
        process_wide_faults=True,
        unique_id=device.uuid if device.uuid.startswith("GPU-") else f"GPU-{device.uuid}",
    )
