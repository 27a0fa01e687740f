"""What launches on a GPU can ask for: shared memory, grids that synchronise, clusters, structs, code of any origin."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.gpu.launch_cases import BODIES
from tests.gpu.support import CLOCK, PTX_STORE, Words, add, latch, nothing, run_case, until

pytestmark = pytest.mark.gpu

STORE = 'extern "C" __global__ void store(unsigned long long* p, unsigned long long value) { *p = value; }'

SHARED = r"""
extern "C" __global__ void shared(unsigned long long* out, unsigned n)
{
    extern __shared__ unsigned char bytes[];
    for (unsigned i = threadIdx.x; i < n; i += blockDim.x)
        bytes[i] = (unsigned char)(i * 7 + 1);
    __syncthreads();
    if (threadIdx.x)
        return;
    unsigned long long sum = 0;
    for (unsigned i = 0; i < n; i++)
        sum += bytes[i];
    *out = sum;
}
"""

STATIC_SHARED = r"""
extern "C" __global__ void static_shared(unsigned long long* out)
{
    __shared__ volatile unsigned long long fixed[512];
    extern __shared__ unsigned char bytes[];
    fixed[threadIdx.x] = threadIdx.x;
    bytes[0] = 1;
    *out = fixed[threadIdx.x] + bytes[0];
}
"""

# A barrier over the grid by hand: with an ordinary launch it would depend on luck that all blocks run at once.
GRID_BARRIER = r"""
extern "C" __global__ void grid_barrier(unsigned* arrived, volatile unsigned* values, unsigned* sums)
{
    if (threadIdx.x)
        return;
    values[blockIdx.x] = blockIdx.x + 1;
    __threadfence();
    atomicAdd(arrived, 1);
    while (atomicAdd(arrived, 0) < gridDim.x) {}
    __threadfence();
    unsigned sum = 0;
    for (unsigned i = 0; i < gridDim.x; i++)
        sum += values[i];
    sums[blockIdx.x] = sum;
}
"""

CLUSTER = r"""
extern "C" __global__ void cluster_shape(unsigned* out)
{
    unsigned x = 0, y = 0, rank = 0;
#if __CUDA_ARCH__ >= 900
    asm("mov.u32 %0, %cluster_nctaid.x;" : "=r"(x));
    asm("mov.u32 %0, %cluster_nctaid.y;" : "=r"(y));
    asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
#endif
    unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
    out[3 * block] = x, out[3 * block + 1] = y, out[3 * block + 2] = rank;
}
"""

STRUCT = r"""
struct Settings { char tag; double scale; int index[3]; };
extern "C" __global__ void use_struct(Settings s, double* out)
{
    out[0] = s.tag, out[1] = s.scale;
    for (int i = 0; i < 3; i++)
        out[2 + i] = s.index[i];
}
"""
SETTINGS = np.dtype([("tag", np.int8), ("scale", np.float64), ("index", np.int32, (3,))], align=True)

LARGE_STRUCT = r"""
struct Table { float values[250]; };
extern "C" __global__ void use_table(Table t, float factor, float* out)
{
    out[threadIdx.x] = t.values[threadIdx.x] * factor;
}
"""
TABLE = np.dtype([("values", np.float32, (250,))])

BOUNDED = 'extern "C" __global__ void __launch_bounds__(64) bounded(unsigned long long* p) { *p = blockDim.x; }'
MIXED = r"""
extern "C" __global__ void mixed(char a, double b, short c, long long d, float e, double* out)
{
    out[0] = a, out[1] = b, out[2] = c, out[3] = (double)d, out[4] = e;
}
"""
MANY = (
    'extern "C" __global__ void many(unsigned long long* out, '
    "int a, int b, int c, int d, int e, int f, int g, int h, int i, int j, int k, int l, int m, int n, int o, int p) "
    "{ *out = a + 2*b + 3*c + 4*d + 5*e + 6*f + 7*g + 8*h + 9*i + 10*j + 11*k + 12*l + 13*m + 14*n + 15*o + 16*p; }"
)
HOG = (
    CLOCK
    + r"""
extern "C" __global__ void __launch_bounds__(1024) hog(unsigned* out) { atomicAdd(out, 1); wait_for((u64*)&out[2]); }
"""
)


@pytest.fixture
async def off() -> AsyncIterator[ao.Offload]:
    async with ao.Offload("cuda:0", lanes=4) as opened:
        yield opened
        await check_usable(opened)


async def check_usable(off: ao.Offload) -> None:
    """Whatever went wrong before, launches and copies go on."""
    x = off.zeros(1, np.uint64)
    for _ in range(3):
        off.launch(add, grid=2, block=2, args=(x, 5))
    assert (await off.get(x))[0] == 60
    await off.drain()
    assert off.stats()["in_flight"] == off.stats()["pending"] == 0


async def word(off: ao.Offload, buffer: ao.Buffer) -> int:
    return int((await off.get(buffer)).reshape(-1)[0])


# Shared memory


@pytest.mark.parametrize("nbytes", [1, 48 << 10, (48 << 10) + 1, 100 << 10, "most"])
async def test_dynamic_shared_memory(off: ao.Offload, nbytes: Any) -> None:
    """Any amount up to the device's limit can be used, also above 48 KiB, without asking for it first."""
    size = off.properties.max_shared_bytes if nbytes == "most" else nbytes
    kernel, out = ao.Kernel("shared", cuda=SHARED), off.zeros(1, np.uint64)
    await off.launch(kernel, grid=1, block=128, args=(out, np.uint32(size)), shared_bytes=size)
    assert await word(off, out) == sum((i * 7 + 1) % 256 for i in range(size))


async def test_less_shared_memory_after_more(off: ao.Offload) -> None:
    """A kernel may be launched with less shared memory after more, and with more again."""
    kernel, out = ao.Kernel("shared", cuda=SHARED), off.zeros(1, np.uint64)
    for size in (100 << 10, 1 << 10, 150 << 10, 100 << 10, 49 << 10):
        await off.launch(kernel, grid=1, block=128, args=(out, np.uint32(size)), shared_bytes=size)
        assert await word(off, out) == sum((i * 7 + 1) % 256 for i in range(size))


async def test_more_shared_memory_than_there_is(off: ao.Offload) -> None:
    """More than the device has is a usage error; more than is left beside static memory a LaunchError."""
    most = off.properties.max_shared_bytes
    kernel, out = ao.Kernel("static_shared", cuda=STATIC_SHARED), off.zeros(1, np.uint64)
    with pytest.raises(ao.UsageError, match=f"shared_bytes is 0 to {most}"):
        off.launch(kernel, grid=1, block=32, args=(out,), shared_bytes=most + 1)
    await off.load(kernel)
    with pytest.raises(ao.LaunchError, match="static_shared"):
        off.launch(kernel, grid=1, block=32, args=(out,), shared_bytes=most)
    await off.launch(kernel, grid=1, block=1, args=(out,), shared_bytes=most - 4096)
    assert await word(off, out) == 1


# Cooperative launches and clusters


async def test_cooperative_launch(off: ao.Offload) -> None:
    """All blocks of a cooperative launch run at once, so that they may wait for each other."""
    grid = off.properties.multiprocessors * 2
    arrived, values, sums = (off.zeros(n, np.uint32) for n in (1, grid, grid))
    kernel = ao.Kernel("grid_barrier", cuda=GRID_BARRIER)
    await off.launch(kernel, grid=grid, block=32, args=(arrived, values, sums), cooperative=True)
    assert set((await off.get(sums)).tolist()) == {grid * (grid + 1) // 2}


async def test_cooperative_launch_that_does_not_fit(off: ao.Offload) -> None:
    """More blocks than the device can run at once are a LaunchError of that operation alone."""
    out = off.zeros(4, np.uint32)
    kernel, grid = ao.Kernel("hog", cuda=HOG), off.properties.multiprocessors * 64
    with pytest.raises(ao.LaunchError) as caught:
        await off.launch(kernel, grid=grid, block=1024, args=(out,), cooperative=True)
    assert caught.value.status == "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"
    assert await word(off, out) == 0


def needs_clusters(off: ao.Offload) -> None:
    if off.properties.compute_capability < (9, 0):
        pytest.skip("clusters need compute capability 9.0")


@pytest.mark.parametrize(
    ("grid", "cluster", "shape"),
    [
        (8, 2, (2, 1)),
        (8, (4, 1, 1), (4, 1)),
        ((4, 4), (2, 2), (2, 2)),
        (16, 8, (8, 1)),
        (16, 16, (16, 1)),
        (3, 1, (1, 1)),
    ],
)
async def test_cluster_launch(off: ao.Offload, grid: Any, cluster: Any, shape: tuple[int, int]) -> None:
    """Blocks find themselves in clusters of the size asked for, up to 16, which is not portable."""
    needs_clusters(off)
    blocks = int(np.prod(grid))
    out = off.zeros(3 * blocks, np.uint32)
    kernel = ao.Kernel("cluster_shape", cuda=CLUSTER)
    await off.launch(kernel, grid=grid, block=32, args=(out,), cluster=cluster)
    found = (await off.get(out)).reshape(blocks, 3)
    assert {(x, y) for x, y, _ in found.tolist()} == {shape}
    size = shape[0] * shape[1]
    ranks = sorted(found[:, 2].tolist())
    assert ranks == sorted(list(range(size)) * (blocks // size))


async def test_cluster_that_does_not_fit(off: ao.Offload) -> None:
    """A grid that is no multiple of the cluster is a usage error; a cluster beyond the device a LaunchError."""
    needs_clusters(off)
    out = off.zeros(3 * 64, np.uint32)
    kernel = ao.Kernel("cluster_shape", cuda=CLUSTER)
    with pytest.raises(ao.UsageError, match="not a multiple of cluster"):
        off.launch(kernel, grid=9, block=32, args=(out,), cluster=2)
    with pytest.raises(ao.LaunchError):
        await off.launch(kernel, grid=64, block=32, args=(out,), cluster=64)


# Arguments


async def test_struct_argument(off: ao.Offload) -> None:
    """A NumPy structured scalar arrives as the struct that C has."""
    kernel, out = ao.Kernel("use_struct", cuda=STRUCT), off.zeros(5, np.float64)
    value = np.array((-3, 0.25, (4, 5, 6)), SETTINGS)
    for argument in (value[()], value):  # a 0-d array counts as its scalar
        await off.launch(kernel, grid=1, block=1, args=(argument, out))
        assert (await off.get(out)).tolist() == [-3, 0.25, 4, 5, 6]


async def test_annotated_struct_argument(off: ao.Offload) -> None:
    """An annotated struct is held against its dtype."""

    def use_struct(launch: Any, settings: SETTINGS, out: ao.Out[np.float64]) -> None: ...

    kernel, out = ao.Kernel("use_struct", cuda=STRUCT, host=use_struct), off.zeros(5, np.float64)
    await off.launch(kernel, grid=1, block=1, args=(np.array((1, 2, (3, 4, 5)), SETTINGS)[()], out))
    assert (await off.get(out)).tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(ao.UsageError, match="settings"):
        off.launch(kernel, grid=1, block=1, args=(np.zeros((), TABLE)[()], out))


async def test_struct_of_another_size(off: ao.Offload) -> None:
    """A packed struct, which lacks the padding of C, is refused by its size."""
    kernel, out = ao.Kernel("use_struct", cuda=STRUCT), off.zeros(5, np.float64)
    await off.load(kernel)
    packed = np.zeros((), np.dtype([(name, SETTINGS.fields[name][0]) for name in SETTINGS.names]))[()]
    with pytest.raises(ao.UsageError, match="has 21 bytes, the kernel takes 32"):
        off.launch(kernel, grid=1, block=1, args=(packed, out))


async def test_large_struct_argument(off: ao.Offload) -> None:
    """A struct of a thousand bytes arrives whole, and so does what follows it."""
    kernel, out = ao.Kernel("use_table", cuda=LARGE_STRUCT), off.zeros(250, np.float32)
    value = np.zeros((), TABLE)
    value["values"] = np.arange(250)
    await off.launch(kernel, grid=1, block=250, args=(value[()], np.float32(2), out))
    assert (await off.get(out) == 2 * np.arange(250)).all()


async def test_scalars_of_every_size(off: ao.Offload) -> None:
    """Scalars of 1, 2, 4 and 8 bytes arrive beside each other."""
    kernel, out = ao.Kernel("mixed", cuda=MIXED), off.zeros(5, np.float64)
    args = (np.int8(-5), np.float64(1.5), np.int16(-300), np.int64(2**40), np.float32(0.125), out)
    await off.launch(kernel, grid=1, block=1, args=args)
    assert (await off.get(out)).tolist() == [-5, 1.5, -300, 2**40, 0.125]


async def test_many_arguments(off: ao.Offload) -> None:
    """Seventeen arguments arrive in order."""
    kernel, out = ao.Kernel("many", cuda=MANY), off.zeros(1, np.uint64)
    await off.launch(kernel, grid=1, block=1, args=(out, *(np.int32(i * i) for i in range(1, 17))))
    assert await word(off, out) == sum(i**3 for i in range(1, 17))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "takes 2 arguments, 0 were given"),
        ((np.uint64(1),), "takes 2 arguments, 1 were given"),
        ((np.uint64(1), np.uint32(1)), "argument 1 of kernel store has 4 bytes, the kernel takes 8"),
        ((np.uint64(1), 1), "needs a NumPy type"),
    ],
)
async def test_arguments_that_do_not_fit(off: ao.Offload, args: tuple[Any, ...], text: str) -> None:
    """Wrong counts, sizes and types are usage errors, before the kernel is loaded or after."""
    kernel = ao.Kernel("store", cuda=STORE)

    async def submit() -> None:
        await off.launch(kernel, grid=1, block=1, args=args)

    for _ in range(2):
        with pytest.raises(ao.UsageError, match=text):
            await submit()
        await off.load(kernel)


async def test_annotations_are_held_against_the_code(off: ao.Offload) -> None:
    """A kernel whose annotations do not fit its code is refused when it is loaded."""

    def store(launch: Any, p: Any, value: Any) -> None: ...

    store.__annotations__.update(p=ao.Out[np.uint64], value=np.uint32)
    with pytest.raises(ao.UsageError, match="value of kernel store has 8 bytes in CUDA, 4 as annotated"):
        await off.load(ao.Kernel("store", cuda=STORE, host=store))
    store.__annotations__["value"] = np.uint64
    await off.load(ao.Kernel("store", cuda=STORE, host=store))


# Geometry


@pytest.mark.parametrize("loaded", [False, True])
async def test_block_that_a_kernel_cannot_have(off: ao.Offload, loaded: bool) -> None:
    """A block within the device's limits but beyond the kernel's is a LaunchError."""
    kernel, out = ao.Kernel("bounded", cuda=BOUNDED), off.zeros(1, np.uint64)
    if loaded:
        await off.load(kernel)
        with pytest.raises(ao.LaunchError, match="bounded"):
            off.launch(kernel, grid=1, block=128, args=(out,))
    else:
        operation = off.launch(kernel, grid=1, block=128, args=(out,))
        with pytest.raises(ao.LaunchError, match="bounded"):
            await operation
    await off.launch(kernel, grid=1, block=64, args=(out,))
    assert await word(off, out) == 64


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        (0, 1),
        (1, 0),
        (1, 1025),
        (1, (1024, 2)),
        (1, (1, 1, 65)),
        ((1, 65536), 1),
        ((1, 1, 65536), 1),
        (2**31, 1),
        (-1, 1),
        ((1, 1, 1, 1), 1),
    ],
)
async def test_geometry_beyond_the_device(off: ao.Offload, grid: Any, block: Any) -> None:
    """A grid or block that the device cannot have is a usage error; nothing was submitted."""
    await off.load(nothing)
    before = off.stats()["submitted"]
    with pytest.raises(ao.UsageError):
        off.launch(nothing, grid=grid, block=block)
    assert off.stats()["submitted"] == before


async def test_largest_geometry(off: ao.Offload) -> None:
    """The largest block, and a grid of a million blocks, run."""
    x = off.zeros(1, np.uint64)
    await off.launch(add, grid=1 << 20, block=1, args=(x, 1))
    await off.launch(add, grid=(2, 3, 4), block=(32, 32), args=(x, 1))
    assert await word(off, x) == (1 << 20) + 24 * 1024


# Code


@pytest.mark.parametrize("end", [b"", b"\0"], ids=["unterminated", "terminated"])
async def test_kernel_from_ptx(off: ao.Offload, end: bytes) -> None:
    """image= takes PTX."""
    kernel, out = ao.Kernel("store", image=PTX_STORE + end), off.zeros(1, np.uint64)
    await off.launch(kernel, grid=1, block=1, args=(out, np.uint64(21)))
    assert await word(off, out) == 21


def compiled(arch: str) -> bytes:
    from aiooffload.drivers.cuda.compiler import compile_source

    return compile_source(STORE, arch, {})


async def test_kernel_from_cubin(off: ao.Offload) -> None:
    """image= takes a cubin."""
    image = await asyncio.to_thread(compiled, "sm_{}{}".format(*off.properties.compute_capability))
    kernel, out = ao.Kernel("store", image=image), off.zeros(1, np.uint64)
    await off.launch(kernel, grid=1, block=1, args=(out, np.uint64(22)))
    assert await word(off, out) == 22


async def test_kernel_from_cuda_core(off: ao.Offload) -> None:
    """A kernel that cuda.core loaded is launched as it is, and may still be used by its owner."""
    from cuda.core import Device, ObjectCode

    image = await asyncio.to_thread(compiled, "sm_{}{}".format(*off.properties.compute_capability))
    Device(0).set_current()  # as cuda.core asks of whoever loads with it
    core = ObjectCode.from_cubin(image, name="mine").get_kernel("store")
    kernel, out = ao.Kernel.from_core(core, "store"), off.zeros(1, np.uint64)
    for value in (23, 24):
        await off.launch(kernel, grid=1, block=1, args=(out, np.uint64(value)))
        assert await word(off, out) == value
    with pytest.raises(ao.UsageError, match="takes 2 arguments"):
        off.launch(kernel, grid=1, block=1, args=(out,))
    assert core.num_arguments == 2


@pytest.mark.parametrize("how", ["cuda", "ptx"])
async def test_name_that_is_not_in_the_module(off: ao.Offload, how: str) -> None:
    """A name that the code has not is a CompileError that names it, from load and from a launch."""
    made = {"cuda": lambda: ao.Kernel("absent", cuda=STORE), "ptx": lambda: ao.Kernel("absent", image=PTX_STORE)}[how]
    with pytest.raises(ao.CompileError, match="absent"):
        await off.load(made())
    with pytest.raises(ao.CompileError, match="absent"):
        await off.launch(made(), grid=1, block=1, args=())


async def test_mangled_name(off: ao.Offload) -> None:
    """A kernel without extern "C" is not found by its plain name."""
    source = "__global__ void store(int* p) { *p = 1; }"
    with pytest.raises(ao.CompileError, match="store"):
        await off.load(ao.Kernel("store", cuda=source))


async def test_source_that_does_not_compile(off: ao.Offload) -> None:
    """The failure of a launch whose source does not compile has the compiler's log."""
    source = 'extern "C" __global__ void broken(int* p) { *p = nobody_knows; } // DOES NOT COMPILE'
    operation = off.launch(ao.Kernel("broken", cuda=source), grid=1, block=1)
    with pytest.raises(ao.CompileError) as caught:
        await operation
    assert "nobody_knows" in caught.value.log


async def test_kernel_without_cuda_code(off: ao.Offload) -> None:
    """A kernel for the host device alone is a usage error here."""

    @ao.kernel
    def host_only(launch: Any) -> None: ...

    with pytest.raises(ao.UsageError, match="no CUDA code"):
        await off.launch(host_only, grid=1, block=1)


async def test_options_reach_the_compiler(off: ao.Offload) -> None:
    """Options of the kernel are those of its compilation."""
    source = 'extern "C" __global__ void store(unsigned long long* p) {\n#ifdef VALUE\n*p = VALUE;\n#endif\n}'
    kernel = ao.Kernel("store", cuda=source, options={"define_macro": ("VALUE", "77")})
    out = off.zeros(1, np.uint64)
    await off.launch(kernel, grid=1, block=1, args=(out,))
    assert await word(off, out) == 77


LOCALS = r"""
extern "C" __global__ void locals(volatile int* out, int n)
{
    volatile int values[3000];
    for (int i = 0; i < 3000; i++) values[i] = i * n;
    *out = values[n];
}
"""


async def test_large_local_arrays_wait_for_nobody(off: ao.Offload) -> None:
    """The first launch of a kernel with large local arrays runs beside another kernel, and does not hold up the loop.

    Left to the driver, it would allocate their memory then, and block until the other kernel is over.
    """
    kernel = ao.Kernel("locals", cuda=LOCALS)
    await off.load(kernel, latch)
    out, words = off.zeros(1, np.int32), await Words.of(off)
    held = off.launch(latch, grid=1, block=1, args=(words.address(0), words.address(1)), lane=off.lanes[0])
    await words.until(0)
    await off.launch(kernel, grid=1, block=32, args=(out, np.int32(7)), lane=off.lanes[1])
    assert (await off.get(out, lane=off.lanes[1])).tolist() == [49]
    assert not held.done()
    words.array[1] = 1
    await held


def test_first_launches_wait_for_nobody() -> None:
    """What the driver allocates for the first kernel of a kind is there before: a handler's launches get through.

    The kernel that called waits for them; a launch that waited for that kernel would never be over.
    """
    found = run_case("launch_cases", "in_a_handler")
    assert (found["found"], found["fallback"]) == (dict.fromkeys(BODIES, 7), "")


async def test_launches_on_every_lane(off: ao.Offload) -> None:
    """A lane may be named; its launches run in order, and all lanes do their part."""
    await off.load(add)
    words = [off.zeros(1, np.uint64) for _ in off.lanes]
    ops = [
        off.launch(add, grid=1, block=1, args=(x, 1), lane=lane)
        for x, lane in zip(words, off.lanes, strict=True)
        for _ in range(300)  # more than a lane takes at a time
    ]
    await ops[-1]
    await until(lambda: all(op.done() for op in ops), "every launch is done")
    assert [await word(off, x) for x in words] == [300] * 4
    assert {op.lane.index for op in ops} == {0, 1, 2, 3}
