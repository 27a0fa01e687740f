"""One device under one event loop: puts the parts together, opens and closes them.

Everything here runs on the loop's thread. There is one way out, :meth:`Engine.aclose`, which falls to
:meth:`Engine.terminate` at its deadline, and one way to lose the device, :meth:`Engine.lose`.
"""

from __future__ import annotations

import asyncio
import os
from asyncio import _get_running_loop
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from aiooffload._native import Board, Launcher, now_ns
from aiooffload.buffer import Allocation, Buffer
from aiooffload.drivers import open_device
from aiooffload.engine.adopted import Adoptions
from aiooffload.engine.closing import close_all
from aiooffload.engine.completion import Completion, EventMarks
from aiooffload.engine.copies import (
    INLINE_NBYTES,
    LARGE_BLOCKS,
    MOST_LARGE_BLOCKS,
    PIECE_NBYTES,
    SMALL_BLOCKS,
    Copies,
    Staging,
)
from aiooffload.engine.health import LostMarks, Watchdog, first_of_each_lane, loss, loss_text, suspects
from aiooffload.engine.host_functions import check_outside, check_wait, waiting_launches
from aiooffload.engine.host_tasks import HostTasks, check_no_step
from aiooffload.engine.lanes import ALWAYS, Lane, Lanes
from aiooffload.engine.launches import Kernels, retrieve
from aiooffload.engine.maintenance import barrier
from aiooffload.engine.mapping import Arena, Mapping
from aiooffload.engine.memory import Memory
from aiooffload.engine.ranges import profiler_ranges
from aiooffload.engine.reverse import Opened, Reverse
from aiooffload.engine.scratch import SHARE, ScratchCache
from aiooffload.engine.selftest import selftest
from aiooffload.engine.submission import Submission
from aiooffload.engine.threads import DaemonExecutor
from aiooffload.engine.transfers import Transfers
from aiooffload.errors import ClosedError, DeviceLostError, DriverError, OffloadError, UsageError
from aiooffload.log import load_log, log
from aiooffload.operation import Operation
from aiooffload.rules import wire
from aiooffload.rules.scheduler import dependency_failure, needs_host
from aiooffload.rules.wake import WakeMode, WakePolicy

if TYPE_CHECKING:
    from aiooffload._native import Channel, Word
    from aiooffload.drivers.api import Device, RegisteredMemory, Stream
    from aiooffload.types import Recorder

__all__ = ["Engine"]

_T = TypeVar("_T")
_CLOSE_FAILED_S: Final = 5.0
_calls: Final = DaemonExecutor()
"""For calls that may wait for a device: opening, maintenance, closing."""
_in_use: Final[list[object]] = []
"""What devices may still use that their Offloads were terminated with; never freed, also if it is somebody else's."""
_MAPPING_DEPTH: Final = 64
_SPARE_WORDS: Final = 64
_WORD_STRIDE: Final = 64  # a cache line each, so that lanes do not disturb each other


class Engine:
    """The engine of one Offload. Made by :meth:`open`.

    Parameters
    ----------
    device
        The opened device; the engine closes it.
    executor
        Worker threads for what would hold the loop up; the engine shuts them down.
    lanes
        How many lanes there are of each priority; 0 is among them.
    wake
        ``"hybrid"``, ``"interrupt"`` or ``"poll"``.
    program_order
        Whether operations that share a buffer are ordered by submission.
    max_pending
        How many operations may wait on the host.
    depth
        How many operations a lane takes at a time.
    calling_lanes
        How many lanes there are for launches whose kernels call.
    call_timeout_s
        The device's deadline for a call.
    scratch_keep_nbytes
        The largest block of scratch that is kept between launches.
    allocator
        Where device memory comes from, instead of the device's own pool.
    hard_timeout_s
        How long a launch may run before the device counts as lost; None: for ever.
    on_lost
        Called with the error once the device is lost.
    made
        Takes the calls that give back what was made here, for the case that it fails.
    """

    def __init__(
        self,
        device: Device,
        executor: ThreadPoolExecutor,
        *,
        lanes: dict[int, int],
        wake: WakeMode,
        program_order: bool,
        max_pending: int,
        depth: int,
        calling_lanes: int,
        call_timeout_s: float,
        scratch_keep_nbytes: int,
        allocator: object | None,
        hard_timeout_s: float | None,
        on_lost: Callable[[DeviceLostError], object] | None,
        made: list[Callable[[], object]],
    ) -> None:
        if allocator is not None:
            device.use_allocator(allocator)
        self.loop: Final = asyncio.get_running_loop()
        self.device: Final = device
        self.label: Final = device.properties.label
        self._calling_lanes = calling_lanes
        self._hard_timeout_s = hard_timeout_s
        self._tell_lost = on_lost
        # A program with a graph of its own names operations, and must not wait for others by accident.
        self._precise = not program_order
        # What a submission raises from now on; None while open.
        self.refusal: Callable[[], OffloadError] | None = None
        self.lost: DeviceLostError | None = None
        self.fallback = ""
        self._wake_mode: WakeMode = wake
        # Launches may take the short path as long as nothing else is wrong.
        self._may_hurry = False
        # There is a trace, or one that begins or ends.
        self.tracing = False
        self._closing: asyncio.Task[None] | None = None
        self._executor = executor
        # Registered memory that nobody waited for in the end, by its size.
        self._unclaimed: dict[int, list[RegisteredMemory]] = {}
        # Background tasks: large copies on their way, each of which ends its own operation, and registrations.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._idle_calls: list[Callable[[], None]] = []
        self._drains: list[asyncio.Future[None]] = []
        self.memory: Final = Memory(device, self.loop, self, self.lose)
        kept = device.properties.total_bytes // SHARE
        self.scratch: Final = ScratchCache(self.memory, self.loop, self, scratch_keep_nbytes, kept)
        self.board: Final = Board()
        words = self.memory.register((sum(lanes.values()) + 3) * _WORD_STRIDE)
        made.append(lambda: device.unregister(words))
        self._make_lanes(lanes, depth, words, max_pending, made)
        self.launcher: Final = Launcher(
            self.board,
            self.loop,
            self,
            Operation,
            Buffer,
            Allocation,
            self.completion.notice,
            self.lanes.refused,
        )
        self.launcher.ordered = program_order
        self.reverse: Final = Reverse(
            self.loop,
            call_timeout_s,
            self._open_channel,
            self._on_channel,
            self._on_called,
            self._on_resident,
            self.lose,
        )
        self.kernels: Final = Kernels(device, self.launcher, self.offload, self.maintain, self.reverse.open)
        self._spare: list[Word] = []
        self.adoptions: Final = Adoptions(
            device, self.lanes, self.board, self._bell, self._spare_word, depth, self.lose
        )
        self.host_tasks: Final = HostTasks(self.loop, self.lanes, self._check_drained)
        self.submission: Final = Submission(
            self.loop,
            device,
            self.lanes,
            self.adoptions,
            self.kernels,
            self.launcher,
            self.reverse,
            self.scratch,
            self.host_tasks,
            self,
            program_order,
            self.check_open,
            self.cancel,
            self.lose,
        )
        self.watchdog = Watchdog(
            self.loop,
            lambda: self.board.in_flight,
            lambda: self.board.completed + self.reverse.served,
            self._look,
            self._check_device,
            self.lose,
            self._warn_stall,
            self._check_limit,
        )
        self._lost_marks = LostMarks(lambda: self.lanes.lanes, self._look)

    def _make_lanes(
        self,
        counts: dict[int, int],
        depth: int,
        words: RegisteredMemory,
        max_pending: int,
        made: list[Callable[[], object]],
    ) -> None:
        device, properties, count = self.device, self.device.properties, sum(counts.values())
        self._bell = bell = words.word(0)
        self._monitor = device.create_stream()
        made.append(self._monitor.close)
        self._idle_stream = device.create_stream()
        made.append(self._idle_stream.close)
        self._idle_stream.bind_marks(words.word((count + 1) * _WORD_STRIDE), words.word((count + 2) * _WORD_STRIDE))
        # No monitor before the self-test has shown that it works: it arms one wait, and only one.
        policy = WakePolicy(self._wake_mode, spins=properties.spins, monitor=False)
        self.completion = Completion(
            self.loop,
            self.board,
            bell,
            self._monitor,
            policy,
            self._on_progress,
            self._on_flight,
            self.lose,
            self._warm_up,
            lambda: self.lanes.mark_all(),
        )
        # The launch path takes the first ones.
        priorities = [priority for priority in sorted(counts, key=bool) for _ in range(counts[priority])]
        groups = {p: (first := priorities.index(p), first + counts[p]) for p in counts}
        lanes: list[Lane] = []
        try:
            for i, priority in enumerate(priorities):
                slot = words.word((i + 1) * _WORD_STRIDE)
                lanes.append(self._make_lane(i, slot, bell, depth, priority, apart=priority != 0))
                made.append(lanes[i].close)
        except BaseException:
            self.completion.stop(lost=False)
            raise
        self.lanes = Lanes(self.board, lanes, groups, self.completion, max_pending, self.lose, self._check_drained)

    def _make_lane(
        self, index: int, slot: Word, bell: Word, depth: int, priority: int = 0, *, apart: bool = False
    ) -> Lane:
        stream = self.device.create_stream(priority)
        stream.bind_marks(slot, bell)
        queue = self.board.add(slot, depth, apart=apart)
        lane = Lane(index, stream, queue, self.device.create_event, self.lose, priority)
        if self._precise:
            queue.precise = ALWAYS
        lane.queue.attach(stream, lane)
        return lane

    def _spare_word(self) -> Word:
        """Return a slot for an adopted stream, of which there may be any number."""
        if not self._spare:
            memory = self.memory.register(_SPARE_WORDS * _WORD_STRIDE)
            self._spare = [memory.word(i * _WORD_STRIDE) for i in range(_SPARE_WORDS)]
        return self._spare.pop()

    async def _open_channel(self) -> Opened:
        """Make the memory and the lanes for kernels that call; none of it waits for what is in flight."""
        register = self.memory.register
        shared = await self.offload(register, wire.SHARED_NBYTES)
        words = await self.offload(register, (self._calling_lanes + 2) * _WORD_STRIDE)
        state = self.memory.empty(wire.STATE_NBYTES, np.uint8)
        cleared: Operation[None] = Operation(self.loop, self, "clear channel")
        cleared.kind, cleared.nbytes = "fill", wire.STATE_NBYTES
        cleared.steps = lambda stream: stream.enqueue_fill(state.address, b"\0", wire.STATE_NBYTES)
        self.lanes.place(cleared, None)
        await cleared
        if self.lost is not None and self.refusal is not None:  # closing is no reason: what was submitted still runs
            raise self.refusal()

        first = len(self.lanes.lanes)

        def lane(i: int, depth: int) -> Lane:
            made = self._make_lane(first + i, words.word(i * _WORD_STRIDE), self._bell, depth, apart=True)
            self.lanes.lanes.append(made)
            return made

        # One launch at a time: a second one behind it could hold up the queue that other lanes share.
        self.lanes.calling = [lane(i, 1) for i in range(self._calling_lanes)]
        to_host, to_device = (lane(self._calling_lanes + i, _MAPPING_DEPTH) for i in range(2))
        mapping = Mapping(self.loop, self.lanes, to_host, to_device, Arena(self.register), self, self._mapped_memory)
        return Opened(
            shared,
            state,
            self._bell,
            shared.word(wire.ABORT_OFFSET),
            mapping,
            (shared.array, state.allocation.host_array),
        )

    def _mapped_memory(self, address: int, nbytes: int) -> object:
        """Ask the driver for the memory of a mapped argument, on the way of a call: nobody else hears of a loss."""
        try:
            return self.device.mapped_memory(address, nbytes)
        except DeviceLostError as error:
            self.lose(error)
            raise

    def _on_channel(self, channel: Channel) -> None:
        self.board.channel = channel
        self._tell_served()
        self.completion.calls = self.reverse

    # -- opening ---------------------------------------------------------------------------

    @classmethod
    async def open(cls, device: Device | str, **options: Any) -> Engine:
        """Open the device if it is a label, on a worker thread, make its engine and run the self-test."""
        check_outside("opening an Offload")
        faults = device != "host" if isinstance(device, str) else device.properties.process_wide_faults
        if loss.error is not None and faults:
            raise loss.error.with_traceback(None)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(_calls, load_log)
        if isinstance(device, str):
            device = await _open(loop, device)
        executor = ThreadPoolExecutor(2, thread_name_prefix="aiooffload-worker")
        made: list[Callable[[], object]] = [device.close]
        try:
            engine = cls(device, executor, made=made, **options)
        except BaseException as error:
            executor.shutdown(wait=False)
            if not isinstance(error, DeviceLostError):  # then the driver is not called any more
                await barrier.run(lambda: close_all(reversed(made)), _calls)
            raise
        barrier.join(engine)
        if device.properties.process_wide_faults:
            loss.join(engine)
        try:
            await engine._prepare()
        except BaseException as error:
            if isinstance(error, DeviceLostError):
                engine.lose(error)
            await engine.aclose(_CLOSE_FAILED_S)
            raise
        return engine

    async def _prepare(self) -> None:
        """Allocate staging, then find out how completions can be seen on this device."""
        self.lanes.ranges = await self.offload(profiler_ranges)
        small = await self.offload(self.memory.register, SMALL_BLOCKS * INLINE_NBYTES)
        large = await self.offload(self.memory.register, LARGE_BLOCKS * PIECE_NBYTES)
        staging = Staging(large, PIECE_NBYTES, MOST_LARGE_BLOCKS, lambda: self._spawn(self._grow(staging)))
        self.copies = Copies(
            self.lanes,
            Staging(small, INLINE_NBYTES),
            staging,
            self.offload,
            self._spawn,
            self,
            self.device,
            lambda: barrier.calling > 0,
        )
        self.transfers = Transfers(self.loop, self.memory, self.copies, self.submission.submit, self, self.check_open)
        if not self.device.properties.memory_operations:
            self._fall_back("its streams cannot write or wait for words")
            async with barrier.alone():  # what was going on when this engine joined did not pause it
                return
        function = await self.maintain(self.device.selftest_function)
        async with barrier.alone():  # its armed wait and another's maintenance would wait for each other
            reason = await selftest(self.lanes.lanes, self.completion, self._look, function)
        if reason:
            cure = "set CUDA_DEVICE_MAX_CONNECTIONS=32, or leave it unset, before anything uses CUDA"
            self._fall_back(reason, cure)
        else:
            self.completion.policy.monitor = True
            self.launcher.ready = self._may_hurry = self.lanes.ranges is None

    async def _grow(self, staging: Staging) -> None:
        try:
            staging.add(await self.offload(self.memory.register, LARGE_BLOCKS * PIECE_NBYTES))
        except DeviceLostError as error:
            self.lose(error)
        except DriverError:
            staging.stay()

    def _fall_back(self, reason: str, cure: str = "") -> None:
        self.fallback = reason
        self.completion.marks = EventMarks(self.device.create_event)
        log.warning(
            "completions fall back to events, awaits will be slower",
            device=self.device.properties.label,
            cause=reason,
            cure=cure or "none: it is how this device is",
        )

    # -- who may -----------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise what says why nothing can be submitted any more, if that is so."""
        if self.refusal is not None:
            raise self.refusal()

    def check_caller(self) -> None:
        """Raise UsageError unless the caller runs on the loop that owns this engine."""
        if _get_running_loop() is not self.loop:
            raise UsageError(
                "this belongs to another event loop, thread or process: use it on its loop, for example through "
                "asyncio.run_coroutine_threadsafe(coroutine, loop)"
            )

    def share(self, operations: Sequence[Operation[Any]], stream: int | None) -> int | None:
        """Let ``stream`` wait for ``operations``, which use memory that somebody else is about to use.

        Without a stream, return the handle of one on which they are done; None if they are done now.
        Raises BufferError if only the host can wait for them.
        """
        self.check_caller()
        ahead = [operation for operation in operations if not operation.finished]
        waiting = next((operation for operation in ahead if needs_host(operation)), None)
        if waiting is not None or (ahead and self.device.properties.driver == "host"):
            raise BufferError(f"the memory is in use by {waiting or ahead[0]!r}: await it first")
        if stream is not None:
            self.submission.order(stream, ahead)
            return stream
        if not ahead:
            return None
        lane = ahead[-1].lane
        self.submission.order(lane.handle, [operation for operation in ahead if operation.lane is not lane])
        return int(lane.handle)

    def check_wait(self, operation: Operation[Any]) -> None:
        """Raise UsageError if that waits for the running host task, or the launch that waits for the host function."""
        check_wait(operation)
        self.host_tasks.check_wait(operation)
        if waiting_launches():
            self.lanes.wait_in_call(operation)

    def want_mark(self, operation: Operation[Any]) -> None:
        """Somebody waits for ``operation``, which has no mark of its own."""
        self.lanes.want_mark(operation)

    def fail_dependent(self, operation: Operation[Any]) -> None:
        """The mark of ``operation`` arrived, and something it came after has failed meanwhile."""
        failure = dependency_failure(operation)
        if operation.calling:  # its kernel has run all the same: what it sent has to be read, and it is over
            operation.failure = failure
            self.reverse.arrived(operation)
        else:
            operation.finish(failure=failure)

    def cancel(self, operation: Operation[Any], failure: BaseException) -> None:
        """End ``operation`` with ``failure`` if it is still on the host; ask a kernel that calls to stop."""
        if operation.stop is not None and operation in self.reverse.callers:
            return  # it was asked to stop already, and ends with what did that
        self.lanes.stop(operation, failure)
        if operation.calling and not operation.finished:
            self.reverse.cancel(operation)
        self.host_tasks.cancel(operation)

    def stop_calls(self) -> None:
        """Cancel every launch whose kernel calls: nobody is there any more who would answer it."""
        # Those that have not started first, the last one before what it comes after: none starts in the end.
        for operation in reversed([operation for operation in self.lanes.on_the_host() if operation.calling]):
            operation.cancel()
        self.reverse.stop_all()

    # -- traces ----------------------------------------------------------------------------

    def record(self, recorder: Recorder | None) -> None:
        """Tell ``recorder`` of everything from now on, for which all has to go the long way; None: nobody."""
        self.lanes.recorder = recorder
        self.launcher.ready = recorder is None and self._may_hurry and self.refusal is None
        self._tell_served()

    def _tell_served(self) -> None:
        if self.board.channel is not None:
            recorder = self.lanes.recorder
            self.board.channel.on_served = None if recorder is None else recorder.served

    def aside(self, call: Callable[..., _T], *args: Any) -> asyncio.Future[_T]:
        """Start a call that may wait for a disk on a thread of its own, also when nothing is open any more."""
        return self.loop.run_in_executor(_calls, call, *args)

    # -- progress --------------------------------------------------------------------------

    def device_progress(self, operation: Operation[Any]) -> tuple[int, int]:
        """Return (done, total) as the kernel of ``operation`` said it last."""
        return self.reverse.progress(operation)

    def progress(self) -> int:
        """Look at the device once; returns how many operations finished. For programs that poll."""
        arrived = self._look()
        if not arrived and self.lost is None:
            self.watchdog.ask_if_due()
        return arrived

    def _look(self) -> int:
        if self.lost is not None:
            return 0
        try:
            arrived = self.completion.look()
            self.reverse.look()
        except DeviceLostError as error:
            self.lose(error)
            return 0
        if arrived:
            self._on_progress()
        return arrived

    def _check_device(self) -> None:
        """Raise DeviceLostError if the driver says so, or the memory shared with the device does."""
        self.device.check(self.lanes.lanes[0].stream)
        self._lost_marks.check()
        self.reverse.check()

    def _on_progress(self) -> None:
        if self.board.pending:
            self.lanes.flush()
        if not self.board.in_flight and self.lanes.stopped:
            self._call_idle()
        self._check_drained()
        self.completion.attention = bool(self._idle_calls or self._drains)

    def _call_idle(self) -> None:
        """Tell the barriers that wait for it that nothing is in flight."""
        calls, self._idle_calls = self._idle_calls, []
        for call in calls:
            call()

    def _warm_up(self) -> None:
        """Go through the driver's code once: a query, and a mark on a stream that carries nothing else."""
        self._idle_stream.query()
        self._idle_stream.enqueue_mark(1)

    def _on_flight(self) -> None:
        self.watchdog.notice()

    @property
    def idle_stream(self) -> Stream:
        """A stream that carries nothing of the program's."""
        return self._idle_stream

    @property
    def quiet(self) -> bool:
        """Whether nothing is pending, in flight, being copied or in the hands of the host."""
        on_host = self._tasks or self.host_tasks.running or self.reverse.callers
        return not (self.board.in_flight or self.board.pending or on_host)

    def _on_called(self, operation: Operation[Any]) -> None:
        """A launch whose kernel called is done: what had to come after it may go."""
        self.lanes.release_followers(operation)
        self._check_drained()

    def _check_drained(self) -> None:
        if self._drains and self.quiet:
            drains, self._drains = self._drains, []
            for future in drains:
                if not future.done():
                    future.set_result(None)

    async def drain(self) -> None:
        """Wait until everything submitted is done and its callbacks have run; raises nothing of theirs."""
        check_outside("drain")
        check_no_step(self, "drain")
        while True:
            while not self.quiet:
                future = self.loop.create_future()
                self._drains.append(future)
                self.lanes.mark_all()
                self.completion.attention = True
                await future
            await asyncio.sleep(0)  # the callbacks of what ended in this very turn are still to come
            if self.quiet:
                return

    def _warn_stall(self, seconds: float) -> None:
        log.warning(
            "nothing has completed for a while",
            seconds=seconds,
            device=self.device.properties.label,
            in_flight=[repr(op) for lane in self.lanes.lanes for op in lane.queue.operations()[:1]],
        )

    def _check_limit(self) -> None:
        """Give the device up if a launch is past the hard limit: nothing but the end of the process stops a kernel."""
        if self._hard_timeout_s is None:
            return
        latest = now_ns() - self._hard_timeout_s * 1e9
        for lane in self.lanes.lanes:
            if 0 < lane.queue.running_since_ns() < latest:
                name = lane.queue.operations()[0].name
                text = (
                    f"{name} on lane {lane.index} is past hard_timeout_s={self._hard_timeout_s:g} and cannot be stopped"
                )
                self.lose(DeviceLostError(text, operation=name, lane=lane.index))
                return

    # -- off the loop's thread -------------------------------------------------------------

    async def offload(self, call: Callable[..., _T], *args: Any) -> _T:
        """Run a call that waits for no kernel on a worker thread."""
        try:
            return await self.loop.run_in_executor(self._executor, call, *args)
        except DeviceLostError as error:
            self.lose(error)
            raise

    async def register(self, nbytes: int) -> RegisteredMemory:
        """Register host memory on a worker thread. Whoever stops waiting leaves it to the next who wants as much."""
        unclaimed = self._unclaimed.setdefault(nbytes, [])
        if unclaimed:
            return unclaimed.pop()

        def keep(task: asyncio.Task[RegisteredMemory]) -> None:
            if not task.cancelled() and task.exception() is None:
                unclaimed.append(task.result())

        task = self._spawn(self.offload(self.memory.register, nbytes))
        caller = asyncio.current_task()
        asked = caller.cancelling() if caller is not None else 0
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and caller is not None and caller.cancelling() == asked:
                self.check_open()  # the end of the engine cancelled it
            task.add_done_callback(keep)
            raise
        finally:
            del caller  # it has its exception, whose traceback has this frame

    async def maintain(self, call: Callable[[], _T]) -> _T:
        """Run a call that waits for everything in flight, behind the barrier."""

        def unless_lost() -> _T:
            if self.lost is not None:
                raise self.lost.with_traceback(None)
            return call()

        try:
            return await barrier.run(unless_lost, _calls)
        except DeviceLostError as error:
            self.lose(error)
            raise

    def _spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        task = self.loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._check_drained())
        return task

    def pause(self, idle: Callable[[], None]) -> None:
        """Maintenance begins: see ``maintenance.Participant``."""
        self._look()
        self.lanes.mark_all()
        self._idle_calls.append(idle)
        self.lanes.pauses += 1
        self.settle_pauses()

    def _on_resident(self, change: int) -> None:
        """So many more kernels that call are on the device, or fewer."""
        barrier.count_calling(change, self.loop)

    def settle_pauses(self) -> None:
        """Let pauses begin for all lanes, unless a kernel that calls is on some device of the process.

        Until that is over, ordinary work goes on: the host functions it waits for may need it.
        No other kernel that calls starts meanwhile.
        """
        if not self.lanes.pauses or barrier.calling:
            return
        self.lanes.count_barriers(self.lanes.pauses)
        self.lanes.mark_all()
        if not self.board.in_flight and self.lanes.stopped:
            self._call_idle()
        else:
            self.completion.attention = True

    def resume(self) -> None:
        """Maintenance is over."""
        self.lanes.pauses -= 1
        if self.lanes.barriers:
            self.lanes.count_barriers(self.lanes.pauses)
        if not self.lanes.pauses and self.lost is None:
            self.lanes.flush()

    # -- the end ---------------------------------------------------------------------------

    def lose(self, error: DeviceLostError) -> None:
        """The device is gone: fail everything, call the driver never again."""
        if self.lost is not None:
            return
        abandoned = self.board.abandon()
        if not error.status:  # it has not faulted: what is on it still runs
            _in_use.extend(operation.keep for operation in abandoned)
        names, oldest = suspects(abandoned) or error.suspects, first_of_each_lane(abandoned)
        label, process_wide = self.device.properties.label, self.device.properties.process_wide_faults
        self.lost = lost = DeviceLostError(
            loss_text(label, error, oldest, self.device.health_note(), process_wide),
            suspects=names,
            operation=error.operation,
            status=error.status,
            code=error.code,
            lane=error.lane,
        )
        self.refusal = lambda: lost.with_traceback(None)  # one error, raised often, must not grow
        if process_wide:
            loss.latch(lost, self)
        self._stop_everything(abandoned, lost)
        log.error("device lost", device=label, status=error.status, suspects=oldest)
        if self._tell_lost is not None:
            self.loop.call_soon(self._tell_lost, lost)  # after those who are woken; what it raises is the loop's

    def _stop_everything(self, abandoned: list[Any], failure: BaseException) -> None:
        self.launcher.ready = False
        self.memory.lose()
        self.scratch.stop()
        self.watchdog.stop()
        self.completion.stop(lost=True)
        self._fail(abandoned, failure)
        self.lanes.wake_lessees()
        self.kernels.cancel_loading()
        self._call_idle()
        barrier.leave(self)
        self._check_drained()
        self.loop.call_soon(self._sweep, failure)

    def _fail(self, abandoned: list[Any], failure: BaseException) -> None:
        """End what was on the device and everything on the host."""
        self.reverse.abandon(failure)
        self.host_tasks.abandon(failure)
        for operation in abandoned:
            operation.finish(failure=failure)
        self.lanes.abandon(failure)
        for task in self._tasks:  # what is copied piece by piece has nowhere to go
            task.cancel()

    def _sweep(self, failure: BaseException) -> None:
        """End what was on its way when a signal handler terminated: the code that it interrupted has gone on since."""
        abandoned = self.board.abandon()
        _in_use.extend(operation.keep for operation in abandoned)
        self._fail(abandoned, failure)
        self.lanes.forget()
        self._check_drained()

    def terminate(self) -> None:
        """Close at once: fail what is not done, free nothing that the device may still use. Idempotent."""
        if self.lost is None and self.refusal is not _terminated:
            self.refusal = _terminated
            self.lost = DeviceLostError("terminated")
            failure = ClosedError("the Offload was terminated")
            abandoned = self.board.abandon()
            _in_use.extend(operation.keep for operation in abandoned)
            self._stop_everything(abandoned, failure)
            self._executor.shutdown(wait=False, cancel_futures=True)

    def disown(self) -> None:
        """In a forked child: end everything without a look at memory that the child does not have, or at the driver.

        The loop may go on here, if only to end. Its selector is the parent's as well and stays as it is.
        """
        self.refusal = _inherited
        self.lost = DeviceLostError("inherited")
        self.launcher.ready = False
        self.memory.lose()
        self.scratch.stop()
        self.watchdog.stop()
        self.completion.disown()
        callers = self.reverse.disown()
        with suppress(RuntimeError):  # its loop is closed, or another thread than its own has forked: nobody waits
            self.loop.call_soon(self._end_inherited, callers)

    def _end_inherited(self, callers: list[Operation[None]]) -> None:
        failure = _inherited()
        for operation in (*self.board.abandon(), *callers):
            operation.finish(failure=failure)
        self.lanes.abandon(failure)

    def aclose(self, timeout_s: float) -> asyncio.Future[None]:
        """Refuse new work, drain for up to ``timeout_s`` seconds, release everything. Idempotent.

        Raises UsageError at once where it would wait for its caller.
        """
        check_outside("closing the Offload")
        check_no_step(self, "closing the Offload")
        if self._closing is None:
            self.refusal = self.refusal or _closed
            self.launcher.ready = False
            self.lanes.wake_lessees()
            self._closing = self.loop.create_task(self._close(timeout_s), name="aiooffload close")
        return asyncio.shield(self._closing)

    async def _close(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.drain()
                await self.kernels.finish_loading()
                await self.reverse.finish_opening()
                if self.lost is None:
                    await self._release()
        except TimeoutError:
            log.warning("closing took too long, terminating", seconds=timeout_s, in_flight=self.board.in_flight)
            self.terminate()
        except DeviceLostError as error:
            self.lose(error)
        except OffloadError as error:
            log.error("closing failed, terminating", error=repr(error))
            self.terminate()
        finally:
            barrier.leave(self)
            self._executor.shutdown(wait=False)  # its threads are idle and end by themselves

    async def _release(self) -> None:
        """Everything is done: take the monitor off the device and give the rest back."""
        self.watchdog.stop()
        self.completion.cancel_monitor()
        if not self.fallback:  # then nobody armed it, or its wake was seen not to arrive
            await self.completion.disarmed()
        self.completion.stop(lost=False)
        self.reverse.close()
        if self.lanes.recorder is not None:
            self.lanes.recorder.release()
        if self.lost is not None:  # found out by giving the channel's memory back
            return
        close_all([*(lane.close for lane in self.lanes.lanes), self._monitor.close, self._idle_stream.close])
        self.scratch.stop()
        registered = self.memory.close()
        # A task of its own: past the deadline the call, which may wait for somebody else's kernel,
        # goes on without anybody waiting for it.
        last = self.loop.create_task(self.maintain(lambda: self._unregister(registered)))
        last.add_done_callback(retrieve)
        await asyncio.shield(last)

    def _unregister(self, registered: list[RegisteredMemory]) -> None:
        close_all([*(partial(self.device.unregister, memory) for memory in registered), self.device.close])


async def _open(loop: asyncio.AbstractEventLoop, label: str) -> Device:
    """Open a device on a thread of its own; if nobody waits for it any more, it is closed again."""
    opening = loop.run_in_executor(_calls, open_device, label)
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(lambda done: done.exception() or loop.run_in_executor(_calls, done.result().close))
        raise


def _closed() -> OffloadError:
    return ClosedError("the Offload is closed")


def _terminated() -> OffloadError:
    return ClosedError("the Offload was terminated")


def _disown_in_child() -> None:
    """A forked child has none of the parent's threads and must not call its driver: nothing works, nothing is freed."""
    for engine in barrier.after_fork():
        assert isinstance(engine, Engine)
        engine.disown()
    loss.after_fork()


def _inherited() -> OffloadError:
    return UsageError("this Offload belongs to the parent process: open a new one in the child")


os.register_at_fork(after_in_child=_disown_in_child)
