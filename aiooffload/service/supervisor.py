"""Starts, watches and replaces device processes: one for each device, spawned, never forked.

The front asks no device anything. It knows what a device process says of itself, when it said something last, and
how old its oldest call is; so nothing here can hang because a device does.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from aiooffload.log import log
from aiooffload.service import frames
from aiooffload.service.app import Declaration
from aiooffload.service.tensors import Data

__all__ = ["Call", "DeviceProcess", "Settings", "Slot", "StartFailed", "Supervisor", "backoff_s"]

START_FAILURES_ALLOWED: Final = 5
"""After so many starts in a row that failed the worker counts as dead."""
HARD_MARGIN_S: Final = 1.0
"""The device process ends launches over the hard limit itself, and knows which; this is for when it does not."""
STEADY_S: Final = 10.0
"""A process that was up for so long is no part of a crash loop."""
LONGEST_BACKOFF_S: Final = 30.0
SILENCE_S: Final = 5.0
"""Without a beat for so long, a device process makes no progress."""
_WATCH_S: Final = 0.1
_EXIT_S: Final = 1.0
_MODULE: Final = "aiooffload.service.device"


def backoff_s(crashes: int) -> float:
    """Return how long to wait before the next start, after so many short lives in a row: the first costs nothing."""
    return 0.0 if crashes <= 1 else min(LONGEST_BACKOFF_S, 0.25 * 2.0 ** (crashes - 2))


class StartFailed(Exception):
    """A device process could not serve; the text says why."""


class Call(Protocol):
    """What hears how a call ended: of exactly one of the first two, once."""

    def on_answer(self, message: dict[str, Any], outputs: Sequence[memoryview]) -> None:
        """A result or an error arrived."""

    def on_lost(self, reason: str) -> None:
        """There will be no answer: the device process is gone."""

    def on_progress(self, done: int, total: int) -> None:
        """Its kernel said how far it is."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What device processes are started with, and how they are watched."""

    app: str
    offload: dict[str, Any]
    log_format: str = "json"
    log_level: str = "info"
    start_timeout_s: float = 120.0
    hard_timeout_s: float = 0.0
    """A call that takes longer costs the process its life; 0 for never."""
    stall_s: float = 20.0
    """Calls in flight, and neither an answer nor anything done on the device for so long, is no progress."""


class DeviceProcess(asyncio.Protocol):
    """One life of a device process, from its start to its end."""

    def __init__(self, settings: Settings, device: str, on_change: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        self.up = False
        self.gone = asyncio.Event()
        self.device: dict[str, str] = {"label": device, "name": "", "driver": ""}
        self.app_name = ""
        self.declarations: list[Declaration] = []
        self.calls: dict[int, tuple[float, Call]] = {}  # in flight, with their time of sending, oldest first
        self.stats: dict[str, Any] = {}
        self.lag_s = 0.0
        self.fault = ""  # why the device process itself said that it ends
        self.up_at = 0.0
        self._settings = settings
        self._label = device
        self._loop = loop
        self._on_change = on_change
        self._decoder = frames.Decoder()
        self._transport: asyncio.Transport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._numbers = 0
        self._heard_at = loop.time()  # of anything
        self._moved_at = loop.time()  # of the last answer or step on the device, or of the first call after none
        self._exits = False  # it has closed the connection, thus exits by itself; only if not it is killed
        self._done = 0  # operations and calls of kernels, as the last beat counted them
        self._ready: asyncio.Future[None] = loop.create_future()

    async def spawn(self) -> None:
        """Spawn it. It imports what it needs and waits for :meth:`start`; nothing of the program runs yet.

        Raises
        ------
        StartFailed
            It was to end before it was there, and is gone; or the system has no room for it now.
        """
        try:
            await self._spawn()
        except OSError as error:
            self._end(f"it could not be spawned: {error}")
        if self.gone.is_set():
            await self.kill()
            raise StartFailed(self.fault)

    async def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        try:
            ours.setblocking(False)
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _MODULE, str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # the terminal's interrupt is the front's to handle
            )
            await self._loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def start(self) -> None:
        """Let it serve, and wait until it does; it is spawned if it was not yet.

        Raises
        ------
        StartFailed
            It does not, and is gone.
        """
        if self._process is None:
            await self.spawn()
        self._heard_at = self._loop.time()
        self._send(
            {
                "kind": "configure",
                "app": self._settings.app,
                "device": self._label,
                "offload": self._settings.offload,
                "log_format": self._settings.log_format,
                "log_level": self._settings.log_level,
            }
        )
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._ready
        except TimeoutError:
            await self.kill()
            raise StartFailed(f"it was not ready within {self._settings.start_timeout_s:g} s") from None
        except BaseException:
            await self.kill()
            raise

    # -- the connection --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for message, content in self._decoder.feed(data):
                self._on_message(message, content)
        except frames.BrokenFrame as error:
            self._end(f"it sent nonsense: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self._exits = True
        self._end(self.fault or "it ended")

    def _on_message(self, message: dict[str, Any], content: memoryview) -> None:
        kind = message["kind"]
        if kind in ("result", "error"):
            self._moved_at = self._heard_at
            found = self.calls.pop(message["call"], None)
            if found is not None:
                found[1].on_answer(message, frames.cut(message, content))
        elif kind == "beat":
            self.lag_s, self.stats = message["lag_s"], message["stats"]
            done = self.stats["completed"] + self.stats["calls"]["served"]
            if done != self._done:
                self._done, self._moved_at = done, self._heard_at
        elif kind == "progress":
            self._moved_at = self._heard_at
            if (running := self.calls.get(message["call"])) is not None:
                running[1].on_progress(message["done"], message["total"])
        elif kind == "ready":
            self.device, self.app_name = message["device"], message["app"]
            self.declarations = list(map(Declaration.from_message, message["endpoints"]))
            self.up, self.up_at = True, self._heard_at
            self._ready.set_result(None)
            self._on_change()
        elif kind in ("failed", "lost"):
            self.fault = message["text"]

    def _send(self, message: dict[str, Any], data: Sequence[Data] = ()) -> None:
        if self._transport is not None and not self.gone.is_set():
            self._transport.writelines(frames.encode(message, data))

    # -- calls -----------------------------------------------------------------------------

    def call(self, endpoint: str, shapes: list[tuple[int, ...]], data: list[Data], call: Call, progress: bool) -> int:
        """Send a call to a process that is up; returns its number, for :meth:`cancel`."""
        self._numbers += 1
        now = self._loop.time()
        if not self.calls:
            self._moved_at = now
        self.calls[self._numbers] = now, call
        message = {"kind": "call", "call": self._numbers, "endpoint": endpoint, "shapes": shapes}
        if progress:
            message["progress"] = True
        self._send(message, data)
        return self._numbers

    def cancel(self, number: int) -> None:
        """Ask for the end of a call, which is answered all the same."""
        if number in self.calls:
            self._send({"kind": "cancel", "call": number})

    # -- how it is -------------------------------------------------------------------------

    def why_stuck(self) -> str:
        """Return why it makes no progress; "" if it does, or has nothing to do."""
        now = self._loop.time()
        if now - self._heard_at > SILENCE_S:
            return f"its loop has said nothing for {now - self._heard_at:.1f} s"
        if self.calls and now - self._moved_at > self._settings.stall_s:
            return f"no call was answered, and nothing done on the device, for {now - self._moved_at:.1f} s"
        return ""

    def check_hard_limit(self) -> None:
        """End it if a call is over the hard limit."""
        limit = self._settings.hard_timeout_s
        if limit and self.calls:
            began, _ = next(iter(self.calls.values()))
            if self._loop.time() - began > limit + HARD_MARGIN_S:
                self._end(f"a call took longer than the hard limit of {limit:g} s")

    # -- the end: everything comes here ----------------------------------------------------

    def _end(self, reason: str) -> None:
        """Fail what is in flight and make sure that nothing of it is left; idempotent."""
        if self.gone.is_set():
            return
        self.up = False
        self.fault = reason
        self.gone.set()
        if self._transport is not None:
            self._transport.abort()
        if not self._exits:
            self.kill_now()
        calls, self.calls = self.calls, {}
        for _, call in calls.values():
            call.on_lost(reason)
        if not self._ready.done():
            self._ready.set_exception(StartFailed(reason))
            self._ready.exception()  # looked at: nobody may be waiting
        self._on_change()

    def kill_now(self) -> None:
        """End it at once, without waiting."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def kill(self) -> None:
        """End it at once and wait until it is gone; one that hangs in a driver, which nobody can end, is left."""
        self._end(self.fault or "it was ended")
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            if not self._exits:
                self.kill_now()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _EXIT_S)
            self.kill_now()
            try:
                await asyncio.wait_for(self._process.wait(), _EXIT_S)
            except TimeoutError:
                log.error("a device process cannot be ended", pid=self.pid)

    async def stop(self, timeout_s: float) -> None:
        """Let it answer what it was called for and close; after so many seconds end it."""
        self.up = False
        self._send({"kind": "stop"})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.gone.wait()
        await self.kill()

    @property
    def pid(self) -> int:
        """The process's id, 0 before it has one."""
        return self._process.pid if self._process is not None else 0

    @property
    def exit_status(self) -> int | None:
        """How it ended, if it did."""
        return self._process.returncode if self._process is not None else None


class Slot:
    """One device, and the process that serves it now.

    Parameters
    ----------
    settings
        How to start it.
    device
        The label that the process opens.
    on_change
        Called whenever a process comes up or goes.
    """

    def __init__(self, settings: Settings, device: str, on_change: Callable[[], None]) -> None:
        self.device = device
        self.process: DeviceProcess | None = None
        self.generation = 0
        self.faults = 0
        self.start_failures = 0  # in a row
        self.last_fault = ""
        self._settings = settings
        self._on_change = on_change
        self._short_lives = 0  # in a row
        # Spawned and idle, so that the next one is there sooner; None while there is none.
        self._spare: DeviceProcess | None = None
        self._stopping = asyncio.Event()

    @property
    def ready(self) -> DeviceProcess | None:
        """The process, if it takes calls."""
        return self.process if self.process is not None and self.process.up else None

    async def keep(self) -> None:
        """Start a process, and another whenever one ends, until stopped."""
        while not self._stopping.is_set():
            await self._live_once()
            # One that could not even start is not tried again at once: it may be the last thing the worker does.
            delay = backoff_s(max(2, self._short_lives) if self.start_failures else self._short_lives)
            if delay and not self._stopping.is_set():
                log.warning("waiting before the next start", device=self.device, seconds=delay)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), delay)
        if self._spare is not None:
            await self._spare.kill()

    async def _live_once(self) -> None:
        """One life: start it, wait for its end, draw the conclusions."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.generation += 1
        process = self.process = self._take_spare() or self._new()
        try:
            await process.start()
        except StartFailed as error:
            self.start_failures += 1
            self._short_lives += 1
            self._note_fault(process, f"it could not start: {error}")
            return
        self.start_failures = 0
        self.device = process.device["label"]  # "auto" is decided once: what replaces a GPU is no CPU
        log.info(
            "device process is ready",
            device=self.device,
            name=process.device["name"],
            pid=process.pid,
            generation=self.generation,
            seconds=round(loop.time() - began, 3),
        )
        try:
            if not self._stopping.is_set():
                self._spare = self._new()
                with contextlib.suppress(StartFailed):
                    await self._spare.spawn()
            await process.gone.wait()
        finally:
            await process.kill()
        if not self._stopping.is_set():
            self._short_lives = 1 if loop.time() - process.up_at >= STEADY_S else self._short_lives + 1
            self._note_fault(process, process.fault)

    def _new(self) -> DeviceProcess:
        return DeviceProcess(self._settings, self.device, self._on_change)

    def _take_spare(self) -> DeviceProcess | None:
        """Return the process that waits, if it still does."""
        spare, self._spare = self._spare, None
        return spare if spare is not None and not spare.gone.is_set() else None

    def _note_fault(self, process: DeviceProcess, reason: str) -> None:
        self.faults += 1
        self.last_fault = reason
        log.error(
            "device process is gone",
            device=self.device,
            pid=process.pid,
            generation=self.generation,
            exit_status=process.exit_status,
            reason=reason,
        )
        self._on_change()

    async def stop(self, timeout_s: float) -> None:
        """Let the process finish and start no other."""
        self._stopping.set()
        if self.process is not None:
            await self.process.stop(timeout_s)

    def kill_now(self) -> None:
        """End its processes at once, without waiting."""
        for process in (self.process, self._spare):
            if process is not None:
                process.kill_now()


class Supervisor:
    """All device processes of the worker.

    Parameters
    ----------
    settings
        How to start them.
    devices
        A label for each.
    on_change
        Called whenever one comes up or goes.
    """

    def __init__(self, settings: Settings, devices: Sequence[str], on_change: Callable[[], None]) -> None:
        self.slots: Final = [Slot(settings, device, self._changed) for device in devices]
        self.declarations: list[Declaration] = []
        """The endpoints, as the last process that was ready declared them; empty before the first."""
        self.app_name = ""
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._watch: asyncio.TimerHandle | None = None
        self._change = asyncio.Event()

    def start(self) -> None:
        """Start all of them; each is kept from then on."""
        self._tasks = [asyncio.create_task(slot.keep(), name=f"keep {slot.device}") for slot in self.slots]
        self._look()

    def _look(self) -> None:
        for slot in self.slots:
            if slot.ready is not None:
                slot.ready.check_hard_limit()
        self._watch = asyncio.get_running_loop().call_later(_WATCH_S, self._look)

    def _changed(self) -> None:
        for process in self.ready:
            self.declarations, self.app_name = process.declarations, process.app_name
        self._change.set()
        self._on_change()

    async def first_ready(self) -> None:
        """Wait until one device process serves.

        Raises
        ------
        StartFailed
            Every first start failed.
        """
        while not self.ready:
            if all(slot.start_failures for slot in self.slots):
                raise StartFailed("; ".join(f"{slot.device}: {slot.last_fault}" for slot in self.slots))
            self._change.clear()
            await self._change.wait()

    @property
    def ready(self) -> list[DeviceProcess]:
        """The device processes that take calls."""
        return [slot.process for slot in self.slots if slot.process is not None and slot.process.up]

    def why_dead(self) -> str:
        """Return why no device process can be brought back; "" while that is not so."""
        if all(slot.start_failures >= START_FAILURES_ALLOWED for slot in self.slots):
            return "; ".join(f"{slot.device}: {slot.last_fault}" for slot in self.slots)
        return ""

    def why_not_ready(self) -> str:
        """Return why no request can be served now; "" if one device process takes calls and moves."""
        reasons = []
        for slot in self.slots:
            process = slot.ready
            if process is None:
                first = slot.generation == 1 and slot.process is not None and not slot.process.up_at
                reasons.append(f"{slot.device}: the device process {'starts' if first else 'is being replaced'}")
                continue
            if not (stuck := process.why_stuck()):
                return ""
            reasons.append(f"{slot.device}: {stuck}")
        return "; ".join(reasons)

    async def stop(self, timeout_s: float) -> None:
        """Let all finish within so many seconds, end what does not, and start no others."""
        if self._watch is not None:
            self._watch.cancel()
        await asyncio.gather(*(slot.stop(timeout_s) for slot in self.slots))
        await asyncio.gather(*self._tasks)  # they end by themselves: none may be cancelled while it spawns

    def kill_now(self) -> None:
        """End all at once, from a signal's handler."""
        for slot in self.slots:
            slot.kill_now()
