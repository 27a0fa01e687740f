"""Types of the C extension. The comments in the C files are the full documentation."""

import asyncio
from collections.abc import Callable, Generator
from contextvars import Context, ContextVar
from typing import Any, Protocol, Self

def now_ns() -> int:
    """CLOCK_MONOTONIC in nanoseconds."""

def open_handles() -> tuple[int, int]:
    """(streams, events) of any driver that were neither closed nor collected."""

class Word:
    """A 64-bit word in memory shared with a device. ``owner`` is kept alive."""

    def __init__(self, host_address: int, device_address: int, owner: object) -> None: ...
    @property
    def host_address(self) -> int: ...
    @property
    def device_address(self) -> int: ...
    def load(self) -> int:
        """Read it (acquire)."""
    def store(self, value: int) -> None:
        """Write it (sequentially consistent, a full fence) and wake host streams waiting on words."""

class LaunchPlan:
    """Geometry of a launch on one device, with a running estimate of its duration."""

    def __init__(
        self,
        name: str,
        function: int,
        callable: Callable[..., object] | None,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        cluster: tuple[int, int, int] | None,
        cooperative: bool,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def function(self) -> int: ...
    @property
    def callable(self) -> Callable[..., object] | None: ...
    @property
    def grid(self) -> tuple[int, int, int]: ...
    @property
    def block(self) -> tuple[int, int, int]: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def expected_ns(self) -> int:
        """Expected duration, 0 while too few or too scattered samples are known."""
    def record(self, duration_ns: int) -> None:
        """Take an exactly measured duration into the estimate."""
    def record_between(self, lower_ns: int, upper_ns: int) -> None:
        """Take a duration known only to lie between two bounds into the estimate."""

class Operation:
    """Core of the awaitable: state, result, waiters. See :class:`aiooffload.operation.Operation`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, owner: Any = None, name: Any = None) -> None: ...
    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...
    @property
    def owner(self) -> Any: ...
    @property
    def name(self) -> Any: ...
    lane: Any
    deps: Any
    requires: tuple[Operation, ...] | None
    prepared: Any
    steps: Any
    stop: Any
    followers: Any
    holds: int
    streamed: bool
    calling: int
    priority: int
    gate: bool
    coarse: bool
    instant: bool
    plan: LaunchPlan | None
    keep: object
    arrival: Callable[[Any], None] | None
    failure: BaseException | None
    kind: Any
    nbytes: int
    submitted_ns: int
    @property
    def finished_ns(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def queue(self) -> LaneQueue | None: ...
    @property
    def finished(self) -> bool: ...
    @property
    def looked(self) -> bool: ...
    def finish(self, result: object = None, failure: BaseException | None = None) -> bool:
        """Make it done and wake everybody waiting; False if it already was."""
    def arrive(self) -> None:
        """Its mark was seen: run its arrival, or finish it."""
    def outcome(self) -> Any:
        """Return the result or raise the failure; only when finished."""
    def look(self) -> BaseException | None:
        """Return the failure, marking it as seen; only when finished or failed."""
    def add_done_callback(self, fn: Callable[[Any], object], *, context: Context | None = None) -> None: ...
    def remove_done_callback(self, fn: Callable[[Any], object]) -> int: ...
    def __await__(self) -> Generator[Any, None, Any]: ...

class History:
    """What was submitted on one allocation and may still be unfinished, by the rule of ``rules/ordering.py``."""

    def __init__(self) -> None: ...
    def conflicts(self, writes: bool) -> list[Any]:
        """Return the unfinished operations that one submitted now has to come after."""
    def record(self, operation: Operation, writes: bool) -> None:
        """Note that ``operation`` was submitted now; it is not kept alive."""

class LaneQueue:
    """The operations in flight on one stream, in order, and the slot that says how far it got."""

    @property
    def slot(self) -> Word: ...
    @property
    def depth(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def next_sequence(self) -> int:
        """What the next mark on this stream has to write."""
    @property
    def issued(self) -> int: ...
    @property
    def seen(self) -> int: ...
    def attach(self, stream: Any, lane: Any) -> None:
        """Name the stream and the lane it belongs to."""
    load: int
    """Operations queued for the lane on the host; counts for ``Board.pick``."""
    reserved: bool
    """Whether it takes only what names it: ``Board.pick`` passes over it."""
    @property
    def unmarked(self) -> bool:
        """Whether the last push was coarse, so that no mark will say that it is done."""
    precise: int
    """After so many more pushes an event is recorded."""
    def marked(self) -> None:
        """Take note that the mark ``issued`` was enqueued after all."""
    def push(self, operation: Operation) -> None:
        """Take an operation whose mark ``next_sequence`` was enqueued. Raises IndexError when full."""
    def due_ns(self) -> int:
        """When the oldest operation is expected to be done, 0 if unknown, on the clock of now_ns."""
    def running_since_ns(self) -> int:
        """When the last of what the oldest operation had to wait for was seen done, on the clock of now_ns.

        0 if it still waits for another lane, or nothing is in flight.
        """
    def operations(self) -> list[Any]: ...

class Board:
    """All lanes' queues of one Offload; finds what arrived."""

    def __init__(self) -> None: ...
    def add(self, slot: Word, depth: int, sequence: int = 0, *, apart: bool = False) -> LaneQueue:
        """Add a lane and return its queue; one that is ``apart`` takes no launch by itself."""
    @property
    def open(self) -> int:
        """How many lanes take any launch: the first ones."""
    channel: Channel | None
    """What a look watches besides the lanes."""
    @property
    def in_flight(self) -> int: ...
    @property
    def pushed(self) -> int: ...
    @property
    def completed(self) -> int: ...
    @property
    def progress_ns(self) -> int:
        """When something was last pushed or arrived, on the clock of now_ns."""
    pending: int
    """Operations waiting on the host."""
    paused: int
    """Why nothing starts: maintenance barriers that are up, and operations that are being put together."""
    @property
    def unmarked(self) -> int:
        """How many lanes are ``LaneQueue.unmarked``."""
    watched: bool
    """Whether a look is scheduled, so that a push need not tell anybody."""
    def pick(self, first: int, last: int) -> int:
        """Index of the least busy lane in range(first, last) that is not reserved, rotating among equals."""
    def pick_after(self, first: int, last: int, deps: list[Any], /) -> int:
        """Index of the lane in range(first, last) on which an operation would start first that comes after ``deps``.

        Of several that would start it as early: the one that holds all of ``deps``, so that it needs no event there;
        then the one that would be idle for the shortest time before, then the least busy. One that is full comes last.
        """
    def poll(self, spin_ns: int = 0) -> int:
        """Finish every operation whose mark arrived, read what the channel holds, and return how many of both.

        With ``spin_ns`` it looks, without the interpreter, until something arrives or the time is over.
        """
    def due_ns(self) -> int:
        """The earliest known due time over all lanes in flight, 0 if none is known."""
    def abandon(self) -> list[Any]:
        """Empty every queue, oldest first per lane, finishing nothing."""

Site = tuple[LaunchPlan, bytes | None, Any, bytes, tuple[Any, ...], Callable[[tuple[Any, ...]], Any]]

class Launcher:
    """The launch path of one Offload: plain launches that can go to the device at once."""

    def __init__(
        self,
        board: Board,
        loop: asyncio.AbstractEventLoop,
        owner: Any,
        operation_type: type[Operation],
        buffer_type: type[Any],
        allocation_type: type[Any],
        notice: Callable[[], None],
        on_error: Callable[[Any, BaseException], None],
    ) -> None: ...
    ready: bool
    """Whether the Offload is open and its marks are words."""
    ordered: bool
    """Whether operations that share a buffer are ordered by submission; true unless set."""
    def launch(self, kernel: Any, grid: Any, block: Any, args: Any, after: Any = (), /) -> Any:
        """Launch and return the operation, or None with nothing done: not for this path."""
    def learn(self, kernel: Any, grid: Any, block: Any, site: Site) -> None:
        """Take a kernel in one geometry.

        ``site`` is (plan, formats for ``pack`` or None, what the stream takes for a launch without
        arguments or None, whether each parameter is only read, the dtype of a buffer for each or None,
        ``prepare(arguments)`` where formats is None).
        """
    def forget(self) -> None: ...

class BoundLaunch:
    """A launch with arguments of its own; what the launch path does not take calls ``otherwise``."""

    def __new__(
        cls,
        launcher: Launcher,
        site: Site,
        arguments: tuple[Any, ...],
        formats: bytes,
        names: dict[str, int],
        packed: bytes | None,
        otherwise: Callable[..., Any],
    ) -> Self: ...
    @property
    def arguments(self) -> tuple[Any, ...]: ...
    def __call__(self, *, lane: Any = None, after: Any = (), **changed: Any) -> Any: ...

class Timer:
    """A one-shot timerfd with nanosecond resolution."""

    def __init__(self) -> None: ...
    def fileno(self) -> int: ...
    def set_at(self, when_ns: int) -> None:
        """Fire at an absolute time of now_ns; a time in the past fires at once."""
    def clear(self) -> None:
        """Disarm it and swallow a firing that was not read."""
    def close(self) -> None: ...

def timer_slack(slack_ns: int) -> int:
    """Set the calling thread's timer slack and return the old one, in nanoseconds."""

def pack(formats: bytes, arguments: tuple[Any, ...]) -> bytes | None:
    """Pack kernel parameters by format (P f d i I q Q); None if one needs the slow path."""

def dlpack_export(
    holder: object,
    address: int,
    device_type: int,
    device_id: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    code: int,
    bits: int,
    is_versioned: bool,
    /,
) -> Any:
    """Return a DLPack capsule of memory that ``holder`` keeps; strides are in elements."""

def dlpack_import(
    capsule: Any, /
) -> tuple[object, int, int, int, tuple[int, ...], tuple[int, ...] | None, int, int, int, bool]:
    """Return (keeper, address, device type, device, shape, strides in elements, code, bits, lanes, read-only).

    The capsule is used up, and its memory given back when ``keeper`` goes. Raises TypeError for what is no such
    capsule, BufferError for a version that is not known.
    """

def cuda_initialise(error: Callable[[str, int], BaseException]) -> None:
    """Resolve the CUDA driver's entry points; RuntimeError where there is none or it is too old."""

class CudaEvent:
    def __init__(self, context: int, timed: bool = False) -> None: ...
    @property
    def handle(self) -> int: ...
    def query(self) -> bool: ...
    def elapsed_ns(self, since: Any) -> int:
        """Nanoseconds on the device since another one; both timed and reached."""
    def close(self) -> None: ...

class CudaStream:
    def __init__(self, handle: int, context: int, owned: bool = True) -> None: ...
    @property
    def handle(self) -> int: ...
    def bind_marks(self, slot: Word, bell: Word) -> None: ...
    def enqueue_kernel(self, plan: LaunchPlan, prepared: Any, operation: Operation | None, sequence: int) -> None: ...
    def enqueue_mark(self, sequence: int) -> None: ...
    def enqueue_write(self, word: Word, value: int) -> None: ...
    def enqueue_wait(self, word: Word, value: int) -> None: ...
    def enqueue_wake(self, descriptor: int) -> None: ...
    def enqueue_copy(self, destination: int, source: int, nbytes: int, /, *peers: int) -> None: ...
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
    ) -> None: ...
    def enqueue_fill(self, address: int, pattern: bytes, count: int) -> None: ...
    def enqueue_record(self, event: Any) -> None: ...
    def enqueue_wait_event(self, event: Any) -> None: ...
    def capturing(self) -> bool: ...
    def query(self) -> bool: ...
    def close(self) -> None: ...

class HostContext:
    """What the streams of one host device share: the simulated context lock."""

    def __init__(self) -> None: ...
    def synchronise(self) -> None:
        """Wait, holding the context lock, until every stream of the context is idle; any thread."""
    @property
    def streams(self) -> int: ...

class HostEvent:
    def __init__(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_ns(self, since: Any) -> int:
        """Nanoseconds since another one was reached; RuntimeError unless both were."""
    def close(self) -> None: ...

class HostStream:
    def __init__(self, context: HostContext) -> None: ...
    @property
    def handle(self) -> int: ...
    def run(self) -> None:
        """Body of the stream's thread; returns after close() once the queue is empty."""
    def bind_marks(self, slot: Word, bell: Word) -> None: ...
    def enqueue_kernel(self, plan: LaunchPlan, prepared: Any, operation: Operation, sequence: int) -> None: ...
    def enqueue_mark(self, sequence: int) -> None: ...
    def enqueue_write(self, word: Word, value: int) -> None: ...
    def enqueue_wait(self, word: Word, value: int) -> None: ...
    def enqueue_wake(self, descriptor: int) -> None: ...
    # Peers are never given: all host devices have one handle.
    def enqueue_copy(self, destination: int, source: int, nbytes: int, /, *peers: int) -> None: ...
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
    ) -> None: ...
    def enqueue_fill(self, address: int, pattern: bytes, count: int) -> None: ...
    def enqueue_record(self, event: Any) -> None: ...
    def enqueue_wait_event(self, event: Any) -> None: ...
    def capturing(self) -> bool: ...
    def query(self) -> bool: ...
    def close(self) -> None: ...

calling: ContextVar[Any]
"""What a handler serves: the Caller, or the Request if that is a batch."""
host_steps: ContextVar[tuple[Any, ...]]
"""The operation of the host task that runs, last, and of those that submitted it from within."""

class Caller:
    """A launch on the device whose kernel calls; handlers of its requests start from ``context``."""

    def __init__(self, context: Context, operation: Any) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def operation(self) -> Any: ...
    @property
    def requests(self) -> set[Request]:
        """Requests of which the handler has started and not ended."""
    @property
    def active(self) -> int:
        """How many of its requests were read and are not over."""
    stopped: bool
    """Nothing of it is served any more."""
    told: bool
    """Some wait of it was answered CANCELLED."""
    ended: bool
    """Its kernel is over and everything it sent was read: ``owner.idle`` is called once ``active`` is 0."""

class Handler:
    """A host function, as the drain knows it.

    ``formats`` has a letter of the struct module per argument, ``nbytes`` is the size of all of them,
    ``read(request.data, dtype)`` makes an array of a batch's rows, with fields f0, f1 ... if they have several,
    ``reply_format`` is a letter or empty (``owner.encode`` makes the reply). ``plain``: the drain may
    decode and start it by itself. ``batch``: it takes all requests that one drain has found.
    """

    def __new__(
        cls,
        callable: Callable[..., Any],
        context: Context,
        formats: bytes,
        read: Callable[[Any, Any], Any],
        dtype: Any,
        nbytes: int,
        reply_format: bytes,
        reply_kind: int,
        reply_nbytes: int,
        plain: bool,
        batch: bool,
    ) -> Self: ...
    @property
    def callable(self) -> Callable[..., Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def batch(self) -> bool: ...

class Request:
    """One request, or a batch of them; also the coroutine that the task of its handler runs.

    As a coroutine it passes everything on to the handler's, answers when that is done, and returns None
    even if it failed: only CancelledError, KeyboardInterrupt and SystemExit are the task's, too.
    """

    @property
    def data(self) -> bytearray | None:
        """The arguments, row by row; None if the extension has decoded them."""
    @property
    def handler(self) -> Handler: ...
    @property
    def task(self) -> asyncio.Task[Any] | None:
        """The task of its handler, once that has suspended."""
    @property
    def rows(self) -> int: ...
    @property
    def count(self) -> int:
        """How many requests of a kernel it stands for."""
    @property
    def finished(self) -> bool: ...
    @property
    def callers(self) -> list[Caller]: ...
    def start(self, coroutine: Any) -> None:
        """Run the handler's coroutine in an eager task; its result is the reply."""
    def end(self, status: int, code: int = 0) -> None:
        """Answer what is open without a result; it is over unless its handler runs."""
    def drop(self) -> bool:
        """Answer CANCELLED to those launches that were stopped; whether it also comes from others."""
    def __await__(self) -> Self: ...
    def __iter__(self) -> Self: ...
    def __next__(self) -> Any: ...
    def send(self, value: Any, /) -> Any: ...
    def throw(self, *error: Any) -> Any: ...
    def close(self) -> None: ...
    # What shows tasks asks a coroutine for these: they are the handler's.
    __name__: str
    __qualname__: str
    cr_await: Any
    cr_code: Any
    cr_frame: Any
    cr_origin: Any
    cr_running: bool
    cr_suspended: bool

class ChannelOwner(Protocol):
    """What a Channel asks of its owner, on the loop's thread."""

    def begin(self, request: Request) -> None:
        """Start a request that is not plain."""
    def failed(self, request: Request, error: BaseException) -> None:
        """Answer a request whose handler raised; after a CancelledError it was answered CANCELLED."""
    def encode(self, request: Request, result: Any) -> bytes:
        """Return the reply for a result, rows one after the other; what it raises, the handler raised."""
    def idle(self, caller: Caller) -> None:
        """Take note that ``caller`` has ended and nothing of it is left."""
    def refused(self, caller: Caller, function: int, handler: Handler | None, nbytes: int) -> None:
        """Take note of a request of an unknown function (None) or with arguments of another size."""

class Channel:
    """The host's end of a channel: reads requests, starts handlers, writes replies."""

    def __init__(
        self,
        address: int,
        memory: object,
        loop: asyncio.AbstractEventLoop,
        handlers: dict[int, Any],
        owner: ChannelOwner,
    ) -> None: ...
    @property
    def position(self) -> int:
        """How many tickets were read."""
    @property
    def posts(self) -> int: ...
    @property
    def dropped(self) -> int:
        """Descriptors that made no sense."""
    served_ns: int
    """When something was last read, on the clock of now_ns."""
    gap_ns: int
    """How long the last silence between two reads was; bursts and seconds do not count."""
    @property
    def suspended(self) -> int:
        """How many handlers, ever, were not done with their first step."""
    on_served: Callable[[Request, int, int], object] | None
    """Told of each handler that ended (its request, when it began on the clock of now_ns, whether it failed)."""
    unsettled: int
    """Launches that have ended with something unread; kept by the owner."""
    @property
    def busy(self) -> bool: ...
    @property
    def closed(self) -> bool: ...
    def pending(self) -> bool: ...
    def drain(self, budget_ns: int) -> int:
        """Read requests and start their handlers, for about so long; 0 from within a drain."""
    def torn(self) -> bool:
        """Whether a request is missing that others came after."""
    def attach(self, launch: int, caller: Caller | None) -> None: ...
    def close(self) -> None:
        """Read and answer nothing any more; the memory may go."""

class Port:
    """The device's end of a channel, for one launch on the host device. Any thread.

    Of one call, one thread at a time: its outcome is there once, as it frees the cell for another call.
    """

    def __init__(self, parameter: bytes, owner: object) -> None: ...
    timeout_ns: int
    """After so long a wait ends with TIMEOUT."""
    def call(self, function: int, data: bytes, rows: int = 1) -> tuple[int, int, int]:
        """Send a request; returns (status, cell, ticket), the last two only if the status is OK."""
    def post(self, function: int, data: bytes, rows: int = 1) -> int: ...
    def poll(self, cell: int, ticket: int) -> tuple[int, int, bytes] | None:
        """Return (status, kind, bytes) if the reply is there; the bytes of an ERROR are its code."""
    def wait(self, cell: int, ticket: int, function: int) -> tuple[int, int, bytes]: ...
    def leave(self, cell: int, ticket: int) -> None:
        """Give a reply up."""
    def cancelled(self) -> bool: ...
    def report(self, function: int, code: int) -> None:
        """Say that a call went wrong in a way that the host does not see."""
    def progress(self, done: int, total: int) -> None: ...
