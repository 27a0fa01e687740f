"""The host device itself: properties, streams and their threads, memory accounting."""

from __future__ import annotations

import os
import platform
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final

from aiooffload._native import HostContext, HostEvent, HostStream
from aiooffload.drivers.api import (
    Block,
    Compiled,
    DeviceProperties,
    Event,
    KernelSource,
    RegisteredMemory,
    Stream,
    TimedEvent,
)
from aiooffload.drivers.host.adopted import AdoptedStream
from aiooffload.drivers.host.function import HostFunction, host_implementation
from aiooffload.drivers.host.launch import lent
from aiooffload.drivers.host.limited import LimitedStream
from aiooffload.drivers.host.memory import HostBlock
from aiooffload.drivers.mapped import MappedMemory, registered
from aiooffload.errors import ClosedError, DeviceUnavailableError, OutOfMemoryError, UsageError

__all__ = ["HostDevice"]

FRESH: Final = 0xCD
FREED: Final = 0xDD


_devices: Final[weakref.WeakSet[HostDevice]] = weakref.WeakSet()
"""All there are, for whoever adopts a stream."""


def _unique_id() -> str:
    """Return the machine's id, or its name where it has none."""
    try:
        identity = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        identity = ""
    return f"host-{identity or platform.node() or 'unnamed'}"


_UNIQUE_ID: Final = _unique_id()


def _properties(memory_operations: bool, memory_limit: int | None) -> DeviceProperties:
    """Describe the host with a GPU's limits, so that a geometry legal here is legal there."""
    return DeviceProperties(
        driver="host",
        index=0,
        name=platform.machine() or "host",
        max_threads_per_block=1024,
        max_block=(1024, 1024, 64),
        max_grid=(2**31 - 1, 65535, 65535),
        max_shared_bytes=227 << 10,
        total_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if memory_limit is None else memory_limit,
        multiprocessors=os.cpu_count() or 1,
        compute_capability=(0, 0),
        max_pitch=2**31 - 1,
        memory_operations=memory_operations,
        spins=False,
        process_wide_faults=False,
        unique_id=_UNIQUE_ID,
    )


def _nothing(launch: object) -> None:
    """Do nothing: the self-test's kernel."""


class HostDevice:
    """The processor of this machine behind the driver contract.

    Parameters
    ----------
    index
        0; there is one host device.
    memory_operations
        False makes it a device whose streams refuse to wait for words and to write them.
    memory_limit
        Bytes that may be allocated at a time, instead of what the machine has. Registered memory
        does not count.
    poison
        Fill new memory with 0xCD and freed memory with 0xDD, so that use before a write and use
        after free show.

    Raises
    ------
    DeviceUnavailableError
        If ``index`` is not 0.
    """

    def __init__(
        self,
        index: int = 0,
        *,
        memory_operations: bool = True,
        memory_limit: int | None = None,
        poison: bool = False,
    ) -> None:
        if index != 0:
            raise DeviceUnavailableError(f"there is no host device {index}: the only one is 0, named 'host'")
        self.properties: Final = _properties(memory_operations, memory_limit)
        # One for all host devices: each reaches the memory of any other.
        self.handle: Final = 0
        self._context: Final = HostContext()
        self._limit: Final = memory_limit
        self._poison: Final = poison
        self._blocks: Final[dict[int, HostBlock]] = {}  # those that were not freed, by address
        self._allocated = 0  # bytes in them
        self._registered: Final[set[MappedMemory]] = set()  # changed by any thread, one operation at a time
        self._threads: Final[list[tuple[HostStream, threading.Thread]]] = []  # those that may still run
        self._closed = False
        _devices.add(self)

    # ---- streams and events ----

    def create_stream(self, priority: int = 0) -> Stream:
        """Create a stream and start its thread; ``priority`` makes no difference here."""
        if self._closed:
            raise ClosedError("the host device was closed")
        self._threads[:] = [pair for pair in self._threads if pair[1].is_alive()]
        stream = HostStream(self._context)
        name = f"aiooffload-host-stream-{stream.handle}"
        thread = threading.Thread(target=stream.run, name=name, daemon=True)
        thread.start()
        self._threads.append((stream, thread))
        return stream if self.properties.memory_operations else LimitedStream(stream)

    def adopt_stream(self, handle: int) -> Stream:
        """Use a stream of any host device of this process."""
        for device in list(_devices):
            for stream, thread in list(device._threads):
                if stream.handle == handle and thread.is_alive():
                    if not self.properties.memory_operations:
                        return LimitedStream(stream, owned=False)
                    return AdoptedStream(stream)
        raise UsageError(f"there is no host stream {handle}: on this device streams are lanes of an open Offload")

    def current(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def replay(self, graph: Any) -> Callable[[Stream], None]:
        """Raise UsageError."""
        raise UsageError("the host device has no graphs: they are made by cuda.core, on a GPU")

    def create_event(self) -> Event:
        """Create an event."""
        return HostEvent()

    def create_timed_event(self) -> TimedEvent:
        """Create an event that is asked for its time; its clock is the host's."""
        return HostEvent()

    # ---- memory ----

    def use_allocator(self, resource: object) -> None:
        """Raise UsageError: memory for a GPU is of no use here."""
        raise UsageError("the host device takes no allocator: its memory is NumPy's")

    def allocate(self, nbytes: int) -> Block:
        """Allocate memory; raises OutOfMemoryError beyond the limit, after which freeing helps."""
        if self._limit is not None and self._allocated + nbytes > self._limit:
            raise OutOfMemoryError(
                f"{nbytes} bytes were asked for, {self._limit - self._allocated} of {self._limit} are free",
                operation="allocate",
            )
        block = HostBlock(nbytes)
        self._blocks[block.address] = block
        self._allocated += nbytes
        if self._poison and block.host_array is not None:
            block.host_array.fill(FRESH)
        return block

    def free(self, block: Block) -> None:
        """Free a block; its memory goes when the last view of it does."""
        if not isinstance(block, HostBlock) or block.host_array is None:
            raise UsageError("this block was freed already, or is not the host device's")
        if self._poison:
            block.host_array.fill(FREED)
        block.host_array = None
        del self._blocks[block.address]
        self._allocated -= block.nbytes

    def trim(self) -> None:
        """Do nothing: no memory is kept for reuse."""

    def memory_info(self) -> tuple[int, int]:
        """Return (free, total) bytes, of the limit if there is one."""
        total = self.properties.total_bytes
        if self._limit is not None:
            return total - self._allocated, total
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), total

    def mapped_memory(self, address: int, nbytes: int) -> object:
        """Return the array that a running kernel has mapped, or the block; raises UsageError if it is neither."""
        found: object = lent.find(address, nbytes)
        if found is None:
            # A list: a Buffer may be collected meanwhile.
            within = (block for block in list(self._blocks.values()) if block.address <= address)
            ends = (block for block in within if address + nbytes <= block.address + block.nbytes)
            found = next((block.host_array for block in ends), None)
        if found is None:
            raise UsageError(
                f"{nbytes} bytes at {address:#x} are no array that a kernel has mapped: a post can map memory of a "
                "Buffer that the Offload has made, a call also an array of the kernel's own"
            )
        return found

    def register(self, nbytes: int) -> RegisteredMemory:
        """Map memory for both sides, rounded up to whole pages; raises OutOfMemoryError."""
        memory = MappedMemory(nbytes)
        self._registered.add(memory)
        registered.add(memory)
        return memory

    def unregister(self, memory: RegisteredMemory) -> None:
        """Unmap registered memory once every stream is idle; maintenance."""
        if not isinstance(memory, MappedMemory) or memory not in self._registered:
            raise UsageError("this memory was unregistered already, or is not the host device's")
        self._context.synchronise()
        self._registered.discard(memory)
        memory.unmap()

    # ---- kernels ----

    def compile(self, kernel: KernelSource) -> Compiled:
        """Return the kernel's host function; raises UsageError if it has none."""
        return host_implementation(kernel)

    def load(self, kernel: KernelSource, compiled: Compiled) -> HostFunction:
        """Return the kernel ready to launch, once every stream is idle; maintenance."""
        self._context.synchronise()
        return HostFunction(kernel.name, host_implementation(kernel), getattr(kernel, "signature", None))

    def selftest_function(self) -> HostFunction:
        """Return a kernel that does nothing; maintenance."""
        self._context.synchronise()
        return HostFunction("selftest", _nothing)

    def rows(self, *box: int) -> Callable[[Any], None] | None:
        """Return None: ``enqueue_copy_box`` is as fast as it gets."""
        return None

    # ---- health and the end ----

    def check(self, stream: Stream) -> None:
        """Do nothing: the host is never lost."""

    def health_note(self) -> str:
        """Return an empty string: the system knows of no faults."""
        return ""

    def close(self, timeout_s: float = 2.0) -> None:
        """End every stream's thread, waiting ``timeout_s`` seconds at most for all of them.

        A stream that still has work then is left to itself, with a ResourceWarning; memory that
        was not unregistered stays mapped in that case. Closing twice is harmless.
        """
        self._closed = True
        deadline = time.monotonic() + timeout_s
        for stream, _ in self._threads:
            stream.close()
        for _, thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._threads[:] = [pair for pair in self._threads if pair[1].is_alive()]
        if self._threads:
            names = ", ".join(thread.name for _, thread in self._threads)
            warnings.warn(f"host streams still busy when their device was closed: {names}", ResourceWarning, 2)
            return
        while self._registered:
            self._registered.pop().unmap()
