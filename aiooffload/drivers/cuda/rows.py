"""Copies of rows within a device by a kernel, which has the whole memory bandwidth where a copy engine has half.

Measured on an H200, rows of 8 KiB out of 16: 1,690 GB/s by the kernel, 790 by ``cuMemcpy2DAsync``, at best 1,170 by any
way to divide them among calls and streams, 1,800 for the same bytes in one piece. Small copies are no slower either, on
the device (3.4 us, 4.3 by the driver) and to enqueue (3.3 us, 4.0). Where neither addresses nor distances are multiples
of 4 bytes, a thread moves so little at a time that the copy engine is ahead.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiooffload._native import CudaStream, LaunchPlan
    from aiooffload.drivers.cuda.function import CudaFunction

__all__ = ["ROW_KERNELS", "RowCopies"]

_THREADS: Final = 512
_BLOCKS_PER_MULTIPROCESSOR: Final = 8

# What _native.pack makes of one parameter: a count, its offset, and the value at a multiple of 16.
_PACKED: Final = struct.Struct("<2I8x9Q8x")

# By hand, since opening a device must not need a compiler, and for any architecture from 7.5. The parameter is
# {destination, source, words in a row, rows in a slice, rows in all, and the bytes to the next row and slice of each
# side}. A block is as wide as a row or 512 threads, and high with what is left; the grid's x is along the rows and its
# y across them, and each thread goes on by what the grid covers.
_ROWS: Final = """
.visible .entry %(name)s(.param .align 8 .b8 p[72])
{
    .reg .pred %%last;
    .reg .b32 %%r<8>;
    .reg .b64 %%d<32>;
    ld.param.u64 %%d1, [p];
    ld.param.u64 %%d2, [p + 8];
    ld.param.u64 %%d3, [p + 16];
    ld.param.u64 %%d4, [p + 24];
    ld.param.u64 %%d5, [p + 32];
    ld.param.u64 %%d6, [p + 40];
    ld.param.u64 %%d7, [p + 48];
    ld.param.u64 %%d8, [p + 56];
    ld.param.u64 %%d9, [p + 64];
    cvta.to.global.u64 %%d1, %%d1;
    cvta.to.global.u64 %%d2, %%d2;
    mov.u32 %%r1, %%ntid.x;
    mov.u32 %%r2, %%nctaid.y;
    mul.wide.u32 %%d10, %%r1, %%r2;     // how far it is to the next word of this thread
    mov.u32 %%r2, %%ctaid.y;
    mov.u32 %%r3, %%tid.x;
    mul.wide.u32 %%d11, %%r1, %%r2;
    cvt.u64.u32 %%d13, %%r3;
    add.u64 %%d11, %%d11, %%d13;        // and its first
    mov.u32 %%r1, %%ntid.y;
    mov.u32 %%r2, %%ctaid.x;
    mov.u32 %%r3, %%tid.y;
    mul.wide.u32 %%d12, %%r1, %%r2;
    cvt.u64.u32 %%d13, %%r3;
    add.u64 %%d12, %%d12, %%d13;        // its row
    mov.u32 %%r2, %%nctaid.x;
    mul.wide.u32 %%d13, %%r1, %%r2;     // and how far it is to the next one
row:
    setp.ge.u64 %%last, %%d12, %%d5;
    @%%last bra end;
    div.u64 %%d14, %%d12, %%d4;         // the slice
    mul.lo.u64 %%d15, %%d14, %%d4;
    sub.u64 %%d15, %%d12, %%d15;        // the row in it
    mad.lo.u64 %%d16, %%d15, %%d6, %%d1;
    mad.lo.u64 %%d16, %%d14, %%d8, %%d16;
    mad.lo.u64 %%d17, %%d15, %%d7, %%d2;
    mad.lo.u64 %%d17, %%d14, %%d9, %%d17;
    mov.u64 %%d18, %%d11;
word:
    setp.ge.u64 %%last, %%d18, %%d3;
    @%%last bra next;
    mad.lo.u64 %%d19, %%d18, %(word)d, %%d17;
    ld.global.%(type)s %(registers)s, [%%d19];
    mad.lo.u64 %%d19, %%d18, %(word)d, %%d16;
    st.global.%(type)s [%%d19], %(registers)s;
    add.u64 %%d18, %%d18, %%d10;
    bra word;
next:
    add.u64 %%d12, %%d12, %%d13;
    bra row;
end:
    ret;
}
"""
# By the bytes that a thread moves at a time.
_TYPES: Final = {
    4: ("u32", "%r4"),
    8: ("v2.u32", "{%r4, %r5}"),
    16: ("v4.u32", "{%r4, %r5, %r6, %r7}"),
}


def _entry(word: int) -> str:
    return f"aiooffload_rows{word}"


def _texts() -> Iterator[str]:
    yield ".version 7.0\n.target sm_75\n.address_size 64\n"
    for word, (kind, registers) in _TYPES.items():
        yield _ROWS % {"name": _entry(word), "word": word, "type": kind, "registers": registers}


ROW_KERNELS: Final = "".join(_texts()).encode() + b"\0"
"""The kernels, as PTX."""


class RowCopies:
    """The loaded kernels of one device.

    Parameters
    ----------
    load
        Loads a kernel of :data:`ROW_KERNELS` by its name.
    multiprocessors
        Of the device.
    """

    def __init__(self, load: Callable[[str], CudaFunction], multiprocessors: int) -> None:
        self._functions: Final = {word: load(_entry(word)) for word in _TYPES}
        self._most_blocks: Final = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors
        # By word, grid and width of a block: a few thousand at most.
        self._plans: Final[dict[tuple[int, int, int, int], LaunchPlan]] = {}

    def call(
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
    ) -> Callable[[CudaStream], None] | None:
        """Return what enqueues the copy, None if the driver's is as good. Arguments as of ``enqueue_copy_box``."""
        rows = height * depth
        pitches = (destination_pitch, source_pitch) if height > 1 else (0, 0)
        slices = (destination_slice, source_slice) if depth > 1 else (0, 0)
        word = _word(destination, source, width, *pitches, *slices)
        if word not in _TYPES or not width * rows:
            return None
        words = width // word
        packed = _PACKED.pack(1, 16, destination, source, words, height, rows, *pitches, *slices)
        plan = self._plan(word, words, rows)
        return lambda stream: stream.enqueue_kernel(plan, packed, None, 0)

    def _plan(self, word: int, words: int, rows: int) -> LaunchPlan:
        width = min(_THREADS, 1 << (words - 1).bit_length())
        height = _THREADS // width
        along = min(self._most_blocks, -(-rows // height))
        across = min(self._most_blocks // along, -(-words // width))
        key = (word, along, across, width)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._functions[word].plan((along, across, 1), (width, height, 1), 0, None, False)
            self._plans[key] = plan
        return plan


def _word(*numbers: int) -> int:
    """Return the largest word that divides all of them."""
    bits = 16
    for number in numbers:
        bits |= number
    return bits & -bits
