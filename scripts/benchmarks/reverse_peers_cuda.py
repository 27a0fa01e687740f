"""The GPU that calls the peers of ``scripts/bench reverse``: a kernel without aiooffload, through ``cuda.bindings``."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cuda.bindings import driver
from cuda.core import Program, ProgramOptions
from numpy.typing import NDArray

from benchmarks.peers_cuda import checked
from benchmarks.reverse_measure import CALLS_LIMIT
from benchmarks.reverse_ours import BLOCK, ONE_WARP_BLOCKS
from benchmarks.reverse_peers import Ask, Caller, Words

SOURCE = r"""
typedef unsigned long long u64;

// As in reverse_peers.c.
struct Ask {
    u64 *requests, *replies, *done;
    long long *times, *samples;
    unsigned* state;  // the lock of the one slot, its sequence, warps that are over
    long long silence_ns, limit_ns;
    int count, warps, one_slot, reserved;
};

__device__ long long now()
{
    long long ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns) :: "memory");
    return ns;
}

// Up to a quarter more than asked for, so that no call falls into step with a sleep of the host.
__device__ long long varied(long long ns, unsigned i)
{
    return ns + (ns / 4 * (i * 2654435761u >> 8) >> 24);
}

__device__ bool call(const Ask& a, unsigned slot, unsigned sequence, unsigned argument, long long end)
{
    u64 request = static_cast<u64>(sequence) << 32 | argument, reply;
    asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(a.requests + slot), "l"(request) : "memory");
    for (;;) {
        asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(reply) : "l"(a.replies + slot) : "memory");
        if (reply >> 32 == sequence) return static_cast<unsigned>(reply) == 2 * argument;
        if (now() > end) return false;
        if (a.warps > 1) __nanosleep(64);  // what LLVM's device side does between looks
    }
}

__device__ bool call_in_turn(const Ask& a, unsigned argument, long long end)
{
    while (atomicCAS(&a.state[0], 0u, 1u)) {
        if (now() > end) return false;
        __nanosleep(500);
    }
    __threadfence();
    unsigned sequence = atomicAdd(&a.state[1], 1u) + 1;
    bool good = call(a, 0, sequence, argument, end);
    __threadfence();
    atomicExch(&a.state[0], 0u);
    return good;
}

// One lane of each warp calls `count` times, after a silence of about that long each.
extern "C" __global__ void __launch_bounds__(256) ask(Ask a)
{
    if (threadIdx.x % 32) return;
    unsigned warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    long long start = now(), end = start + a.limit_ns;
    bool good = true;
    for (int i = 0; i < a.count && good; ++i) {
        for (long long still = now(), silent = varied(a.silence_ns, i); now() - still < silent;)
            ;
        long long before = now();
        good = a.one_slot ? call_in_turn(a, i, end) : call(a, warp, i + 1, i, end);
        if (a.samples && good) a.samples[i] = now() - before;
    }
    a.times[2 * warp] = start;
    a.times[2 * warp + 1] = good ? now() : -1;
    __threadfence();
    if (atomicAdd(&a.state[2], 1u) + 1 == a.warps)
        asm volatile("st.release.sys.global.u64 [%0], %1;" :: "l"(a.done), "l"(1ull) : "memory");
}
"""


class Gpu(Caller):
    """The primary context of a GPU, which aiooffload has opened before, with a stream and memory of its own."""

    def __init__(self, index: int, most_warps: int) -> None:
        checked(driver.cuInit(0))
        self._device = checked(driver.cuDeviceGet(index))
        self._context = checked(driver.cuDevicePrimaryCtxRetain(self._device))
        checked(driver.cuCtxSetCurrent(self._context))
        self._module, self._function = self._load()
        self._stream = checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        nbytes = Words.nbytes(most_warps)
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        # With unified addressing, which every 64-bit platform has, a GPU sees it at the same address.
        self._host = int(checked(driver.cuMemHostAlloc(nbytes, flags)))
        words = (ctypes.c_uint64 * (nbytes // 8)).from_address(self._host)
        self.words = Words(np.ctypeslib.as_array(words), most_warps)
        query = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuStreamQuery, ctypes.c_void_p).value
        assert query is not None
        self.query, self.stream = query, int(self._stream)
        self._times = checked(driver.cuMemAlloc(16 * most_warps))
        self._samples = checked(driver.cuMemAlloc(8 * CALLS_LIMIT))
        self._state = checked(driver.cuMemAlloc(16))

    def _load(self) -> tuple[Any, Any]:
        attribute = driver.CUdevice_attribute
        major = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        minor = attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
        parts = [checked(driver.cuDeviceGetAttribute(part, self._device)) for part in (major, minor)]
        program = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{parts[0]}{parts[1]}", std="c++17"))
        module = checked(driver.cuModuleLoadData(program.compile("cubin").code))
        return module, checked(driver.cuModuleGetFunction(module, b"ask"))

    def close(self) -> None:
        checked(driver.cuStreamDestroy(self._stream))
        for memory in (self._times, self._samples, self._state):
            checked(driver.cuMemFree(memory))
        checked(driver.cuMemFreeHost(self._host))
        checked(driver.cuModuleUnload(self._module))
        checked(driver.cuDevicePrimaryCtxRelease(self._device))

    def start(self, ask: Ask, sampled: bool) -> None:
        checked(driver.cuCtxSetCurrent(self._context))
        ask.times, ask.state = int(self._times), int(self._state)
        ask.samples = int(self._samples) if sampled else None
        checked(driver.cuMemsetD32Async(self._state, 0, 4, self._stream))
        checked(driver.cuMemsetD8Async(self._times, 0xFF, 16 * ask.warps, self._stream))
        block = 32 if ask.warps <= ONE_WARP_BLOCKS else BLOCK
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(ask))  # the driver copies what it points to
        parameters = ctypes.addressof(pointers)
        grid = ask.warps * 32 // block
        checked(driver.cuLaunchKernel(self._function, grid, 1, 1, block, 1, 1, 0, self._stream, parameters, 0))

    def finish(self) -> None:
        checked(driver.cuStreamSynchronize(self._stream))

    def times(self, warps: int) -> NDArray[np.int64]:
        return self._read(self._times, 2 * warps)

    def samples(self, count: int) -> NDArray[np.int64]:
        return self._read(self._samples, count)

    def _read(self, source: Any, count: int) -> NDArray[np.int64]:
        target = np.empty(count, np.int64)
        checked(driver.cuMemcpyDtoHAsync(target.ctypes.data, source, target.nbytes, self._stream))
        checked(driver.cuStreamSynchronize(self._stream))
        return target
