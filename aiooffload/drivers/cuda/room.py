"""Memory that the driver would allocate when a kernel that needs it is launched for the first time.

For local variables and calls, for ``assert`` and for ``malloc`` in kernels, once per context each. A launch that comes
with an allocation waits for everything on the device: 980 ms behind a kernel of 1 s (H200, driver 580), and for ever if
that one waits for the loop, or is an armed wait whose end the launch itself would have been. So all of it is allocated
when a device is opened, and more of it when a kernel is loaded; both are maintenance, while nothing runs. Launches then
take 10 us. It takes 5 ms and, on an H200, 570 MB of 150 GB: 416 for local variables, which grow with the threads that
fit on the device, 96 for ``assert`` and 61 for ``malloc``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cuda.bindings import driver

from aiooffload.drivers.cuda.status import unwrap

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["NOTHING", "NOTHING_IMAGE", "local_nbytes", "make_room"]

NOTHING: Final = "aiooffload_nothing"
"""The entry of a kernel that does nothing, but needs all that the driver makes room for."""
# What it would call is called by no grid that can be launched with one block. PTX, since opening needs no compiler.
NOTHING_IMAGE: Final = (
    b"""
.version 7.0
.target sm_75
.address_size 64
.extern .func (.param .b64 address) malloc(.param .b64 nbytes);
.extern .func free(.param .b64 address);
.extern .func (.param .b32 count) vprintf(.param .b64 format, .param .b64 values);
.extern .func __assertfail(.param .b64 text, .param .b64 file, .param .b32 line, .param .b64 name, .param .b64 size);
.visible .entry aiooffload_nothing()
{
    .reg .pred %one;
    .reg .b32 %blocks;
    .param .b64 in;
    .param .b64 out;
    .param .b32 number;
    mov.u32 %blocks, %nctaid.z;
    setp.eq.u32 %one, %blocks, 1;
    @%one ret;
    st.param.b64 [in], 0;
    st.param.b32 [number], 0;
    call.uni (out), malloc, (in);
    call.uni free, (in);
    call.uni (number), vprintf, (in, in);
    call.uni __assertfail, (in, in, number, in, in);
    ret;
}
"""
    + b"\0"
)
_STEP: Final = 512  # for kernels that differ by less, once
# By context: for how many bytes of local variables of a thread there is room.
_rooms: Final[dict[int, int]] = {}


def make_room(context: int, nbytes: int, run_nothing: Callable[[], None]) -> None:
    """Have room for ``nbytes`` of local variables of each thread, and for the rest, in the context, which is current.

    ``run_nothing`` launches :data:`NOTHING` and waits for it: the driver allocates at the next launch, of whatever.
    What a kernel needs for its calls is not in its figure: there is always some.
    """
    if nbytes <= _rooms.get(context, 0):
        return
    limit = driver.CUlimit.CU_LIMIT_STACK_SIZE
    # Another limit than now, or the driver takes it for done already.
    now = int(unwrap("cuCtxGetLimit", driver.cuCtxGetLimit(limit)))
    room = max(now + _STEP, -(-nbytes // _STEP) * _STEP)
    unwrap("cuCtxSetLimit", driver.cuCtxSetLimit(limit, room))
    run_nothing()
    _rooms[context] = room


def local_nbytes(function: Any) -> int:
    """Return how many bytes of local variables a thread of a kernel has."""
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
    return int(unwrap("cuFuncGetAttribute", driver.cuFuncGetAttribute(attribute, function)))
