"""Copies of rows by the driver's own kernel: what it is asked to do, and on a GPU that it does it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiooffload.drivers.cuda.rows import ROW_KERNELS, RowCopies
from tests.drivers.support import Rig, open_rig


class Loaded:
    """A loaded kernel that notes the geometries it was asked for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.plans: list[tuple[Any, Any]] = []

    def plan(self, grid: Any, block: Any, *rest: object) -> Any:
        self.plans.append((grid, block))
        return self.name, grid, block


class Recording:
    """A stream that notes what is enqueued."""

    def enqueue_kernel(self, plan: Any, prepared: bytes, operation: object, sequence: int) -> None:
        self.plan, self.values, self.sequence = plan, struct.unpack_from("<9Q", prepared, 16), sequence


def made(*box: int) -> Recording | None:
    """What is enqueued for a box on a device of 10 multiprocessors; None if that is left to the driver."""
    copies: Any = RowCopies(Loaded, 10)  # type: ignore[arg-type]
    call = copies.call(*box)
    if call is None:
        return None
    stream = Recording()
    call(stream)
    return stream


def test_each_kernel_is_in_the_module() -> None:
    """What is loaded by name has an entry of that name."""
    names: list[str] = []
    RowCopies(lambda name: names.append(name) or Loaded(name), 1)  # type: ignore[arg-type, func-returns-value]
    assert len(names) == 3
    assert all(f".visible .entry {name}(".encode() in ROW_KERNELS for name in names)


@pytest.mark.parametrize(
    "box", [(2, 0, 64, 64, 1), (0, 1, 64, 64, 1), (0, 0, 6, 64, 1), (0, 0, 64, 0, 3), (0, 0, 0, 3, 3)]
)
def test_what_has_no_words_is_the_drivers(box: tuple[int, ...]) -> None:
    """Without a word of 4 bytes a thread would move too little; what is empty is nothing to launch for."""
    assert made(*box, 128, 128, 1 << 20, 1 << 20) is None


@pytest.mark.parametrize(
    ("box", "word"),
    [
        ((4096, 8192, 1024, 100, 2, 2048, 4096, 4096 * 100, 4096 * 100), 16),
        ((4096 + 8, 8192, 1024, 100, 2, 2048, 4096, 4096 * 100, 4096 * 100), 8),
        ((4096, 8192 + 4, 1024, 100, 2, 2048, 4096, 4096 * 100, 4096 * 100), 4),
        ((4096, 8192, 1028, 100, 2, 2048, 4096, 4096 * 100, 4096 * 100), 4),
        ((4096, 8192, 1024, 100, 2, 2056, 4096, 2056 * 100, 4096 * 100), 8),
        ((4096, 8192, 1024, 100, 2, 2048, 4100, 4096 * 100, 4100 * 100), 4),
        ((4096, 8192, 1024, 100, 2, 2048, 4096, 2048 * 100, 4097 * 100), 4),
        ((4096, 8192, 1 << 20, 1, 2, 3, 5, 4096 * 1000, 4096 * 1000), 16),
        ((4096, 8192, 1024, 100, 1, 2048, 4096, 7, 9), 16),
    ],
)
def test_words_divide_everything(box: tuple[int, ...], word: int) -> None:
    """The widest word that addresses, widths and distances are multiples of; those of a single row do not matter."""
    stream = made(*box)
    assert stream is not None
    assert stream.plan[0] == f"aiooffload_rows{word}"
    assert stream.values[:5] == (box[0], box[1], box[2] // word, box[3], box[3] * box[4])
    assert stream.sequence == 0


@pytest.mark.parametrize(
    ("width", "height", "grid", "across"),
    [
        (1 << 20, 4, (4, 20), 512),
        (1 << 20, 30, (30, 2), 512),
        (16 * 600, 4, (4, 2), 512),
        (8192, 4096, (80, 1), 512),
        (16, 5000, (10, 1), 1),
        (48, 5000, (40, 1), 4),
        (16, 10**7, (80, 1), 1),
    ],
)
def test_blocks_fit_the_rows(width: int, height: int, grid: tuple[int, int], across: int) -> None:
    """A block of 512 threads is as wide as a row, up to all of it; there are as many as fit the device or the copy."""
    stream = made(0, 1 << 40, width, height, 1, 2 * width, 2 * width, 0, 0)
    assert stream is not None
    assert stream.plan[1:] == ((*grid, 1), (across, 512 // across, 1))


# On a GPU.


@pytest.fixture
def rig() -> Iterator[Rig]:
    """The first GPU, with its own kernels loaded."""
    from aiooffload.drivers.cuda import open_device

    device = open_device(0)
    device.selftest_function()
    with open_rig(device, {}) as made:
        yield made
    device.close()


def index(width: int, height: int, depth: int, pitch: int, slice_nbytes: int) -> NDArray[np.intp]:
    starts = np.arange(depth)[:, None] * slice_nbytes + np.arange(height) * pitch
    return (starts[..., None] + np.arange(width)).reshape(-1)


@pytest.mark.gpu
@pytest.mark.parametrize("word", [4, 8, 16])
@pytest.mark.parametrize("seed", range(20))
def test_rows_arrive(rig: Rig, word: int, seed: int) -> None:
    """Rows and slices of any pitch arrive, whatever the words, and no byte between them changes."""
    random = np.random.default_rng((word, seed))
    # Rows of one word to those longer than a block, a few to more than all blocks take at once.
    words = int(random.choice([1, 2, 3, 31, 200, 513, 5000]))
    depth = int(random.integers(1, 4))
    height = int(random.choice([1, 3, 50, 100_000 // words + 1]))
    width = words * word
    pitches = [width + word * int(random.integers(0, 5)) for _ in range(2)]
    slices = [pitch * (height + int(random.integers(0, 3))) for pitch in pitches]
    offsets = [word * int(random.integers(0, 3)) for _ in range(2)]
    to, at = (o + index(width, height, depth, p, s) for o, p, s in zip(offsets, pitches, slices, strict=True))
    content = random.integers(0, 256, int(at[-1]) + 1, np.uint8)
    expected = np.full(int(to[-1]) + 17, 0xA5, np.uint8)
    before = rig.bytes_on_device(expected)
    expected[to] = content[at]
    source, lane = rig.bytes_on_device(content), rig.lane()
    box = (before.address + offsets[0], source.address + offsets[1], width, height, depth, *pitches, *slices)
    call = rig.device.rows(*box)
    assert call is not None
    call(lane.stream)
    rig.finish(lane)
    assert np.array_equal(rig.read(before.address, expected.size), expected)
