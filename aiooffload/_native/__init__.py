"""The C extension: what has to run without the interpreter, or costs a microsecond too much in it.

One file per thing in C: ``word.c`` (64-bit words shared with a device), ``operation.c`` (the
awaitable's core), ``board.c`` (completion slots and the operations waiting on them), ``plan.c``
(a launch's geometry and its running time estimate), ``pack.c`` (kernel parameters), ``clock.c``
(timerfd), ``cuda_stream.c`` (streams and the wake on a GPU), ``launcher.c``
(plain launches, from the call to the driver), ``bound.c`` (those with arguments of their own),
``history.c`` (program order on one allocation), ``host_stream.c`` (the host device's streams),
``dlpack.c`` (arrays to and from other libraries), ``channel.c`` (the host's end of a channel) and
``port.c`` (the device's end, for host kernels).
"""

from aiooffload._native._core import (
    Board,
    BoundLaunch,
    Caller,
    Channel,
    CudaEvent,
    CudaStream,
    Handler,
    History,
    HostContext,
    HostEvent,
    HostStream,
    LaneQueue,
    Launcher,
    LaunchPlan,
    Operation,
    Port,
    Request,
    Timer,
    Word,
    calling,
    cuda_initialise,
    dlpack_export,
    dlpack_import,
    host_steps,
    now_ns,
    open_handles,
    pack,
    timer_slack,
)

__all__ = [
    "Board",
    "BoundLaunch",
    "Caller",
    "Channel",
    "CudaEvent",
    "CudaStream",
    "Handler",
    "History",
    "HostContext",
    "HostEvent",
    "HostStream",
    "LaneQueue",
    "LaunchPlan",
    "Launcher",
    "Operation",
    "Port",
    "Request",
    "Timer",
    "Word",
    "calling",
    "cuda_initialise",
    "dlpack_export",
    "dlpack_import",
    "host_steps",
    "now_ns",
    "open_handles",
    "pack",
    "timer_slack",
]
