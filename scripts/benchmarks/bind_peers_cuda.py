"""The peers of ``scripts/bench bind``: other ways to launch the same kernel on the same memory from Python."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any, ClassVar

import numpy as np
from cuda.bindings import driver
from cuda.core import Device, LaunchConfig, ObjectCode, Program, ProgramOptions, launch

from benchmarks.bind_ways import COUNT, SOURCE, Way
from benchmarks.peers_cuda import checked


class Peer(ABC):
    """A way to launch, with a stream of its own; opened while nothing is in flight, as loading waits for that."""

    name: ClassVar[str]

    def __init__(self, index: int, x: int, y: int) -> None:
        self.index, self.x, self.y = index, x, y

    @abstractmethod
    def enqueue(self) -> None:
        """Launch once."""

    @abstractmethod
    def synchronise(self) -> None:
        """Wait, in the loop's thread, until everything launched is done."""

    @abstractmethod
    def close(self) -> None:
        """Give the stream back."""

    async def settle(self) -> None:
        self.synchronise()

    def way(self) -> Way:
        return Way(self.name, self.enqueue, self.settle)


def compile_cubin(index: int) -> bytes:
    """Compile the kernel for a device."""
    options = ProgramOptions(arch=f"sm_{Device(index).arch}")
    return bytes(Program(SOURCE, "c++", options).compile("cubin").code)


class Driver(Peer):
    """``cuLaunchKernel`` with parameters that lie ready: the least that a launch from Python can cost."""

    name = "driver"

    def __init__(self, index: int, x: int, y: int) -> None:
        super().__init__(index, x, y)
        self._device = checked(driver.cuDeviceGet(index))
        checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(self._device))))
        self._module = checked(driver.cuModuleLoadData(compile_cubin(index)))
        self._function = checked(driver.cuModuleGetFunction(self._module, b"saxpy"))
        self.stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._values = ctypes.c_float(2), ctypes.c_uint64(x), ctypes.c_uint64(y), ctypes.c_int32(COUNT)
        self._pointers = (ctypes.c_void_p * 4)(*(ctypes.addressof(value) for value in self._values))
        self._parameters = ctypes.addressof(self._pointers)

    def enqueue(self) -> None:
        checked(driver.cuLaunchKernel(self._function, 1, 1, 1, COUNT, 1, 1, 0, self.stream, self._parameters, 0))

    def synchronise(self) -> None:
        checked(driver.cuStreamSynchronize(self.stream))

    def close(self) -> None:
        checked(driver.cuStreamDestroy(self.stream))
        checked(driver.cuModuleUnload(self._module))
        checked(driver.cuDevicePrimaryCtxRelease(self._device))


class DriverEvent(Driver):
    """The same, and an event, without which nobody learns of the end but by waiting for the stream."""

    name = "driver, event"

    def __init__(self, index: int, x: int, y: int) -> None:
        super().__init__(index, x, y)
        self._event = checked(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def enqueue(self) -> None:
        super().enqueue()
        checked(driver.cuEventRecord(self._event, self.stream))

    def close(self) -> None:
        checked(driver.cuEventDestroy(self._event))
        super().close()


class Core(Peer):
    """``cuda.core``: packs the arguments at each launch."""

    name = "cuda.core"

    def __init__(self, index: int, x: int, y: int) -> None:
        super().__init__(index, x, y)
        device = Device(index)
        device.set_current()
        self._stream = device.create_stream()
        self._kernel = ObjectCode.from_cubin(compile_cubin(index)).get_kernel("saxpy")
        self._config = LaunchConfig(grid=1, block=COUNT)
        self._a, self._n = np.float32(2), np.int32(COUNT)

    def enqueue(self) -> None:
        launch(self._stream, self._config, self._kernel, self._a, self.x, self.y, self._n)

    def synchronise(self) -> None:
        self._stream.sync()

    def close(self) -> None:
        self._stream.close()


class Cupy(Peer):
    """CuPy's ``RawKernel`` with arrays that view the same memory."""

    name = "cupy"

    def __init__(self, index: int, x: int, y: int) -> None:
        super().__init__(index, x, y)
        cupy: Any = import_module("cupy")
        cupy.cuda.Device(index).use()
        self._null, self._stream = cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)
        self._kernel = cupy.RawKernel(SOURCE, "saxpy")

        def array(address: int) -> Any:
            memory = cupy.cuda.UnownedMemory(address, 4 * COUNT, self, index)
            return cupy.ndarray(COUNT, np.float32, cupy.cuda.MemoryPointer(memory, 0))

        self._arguments = np.float32(2), array(x), array(y), np.int32(COUNT)

    def enqueue(self) -> None:
        self._kernel((1,), (COUNT,), self._arguments)

    def synchronise(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self._null.use()

    async def settle(self) -> None:
        self.synchronise()
        self._null.use()

    def way(self) -> Way:
        return CupyWay(self.name, self.enqueue, self.settle, self._stream)


class CupyWay(Way):
    """Makes its stream the current one for a burst, which is no part of a launch."""

    def __init__(self, name: str, enqueue: Any, settle: Any, stream: Any) -> None:
        super().__init__(name, enqueue, settle)
        self._stream = stream

    def burst(self, count: int) -> int:
        self._stream.use()
        return super().burst(count)


PEERS: tuple[type[Peer], ...] = (Driver, DriverEvent, Core, Cupy)


def open_all(index: int, x: int, y: int) -> tuple[list[Peer], dict[str, str]]:
    """Open the peers that are installed; the others by name, with the reason."""
    peers: list[Peer] = []
    missing: dict[str, str] = {}
    for kind in PEERS:
        try:
            peers.append(kind(index, x, y))
        except ImportError as error:
            missing[kind.name] = str(error)
    return peers, missing
