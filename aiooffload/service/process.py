"""One life of a device process, as the front sees it: spawned, watched, asked, ended.

The front asks no device anything. It knows what a device process says of itself, when it said something last, and
how old its oldest call is; so nothing here can hang because a device does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from aiooffload.log import log
from aiooffload.service import frames
from aiooffload.service.app import Declaration
from aiooffload.service.tensors import Data

__all__ = ["Call", "DeviceProcess", "Settings", "StartFailed"]

HARD_MARGIN_S: Final = 1.0
"""The device process ends launches over the hard limit itself, and knows which; this is for when it does not."""
SILENCE_S: Final = 5.0
"""Without a beat for so long, a device process makes no progress."""
_SILENT: Final = "its loop has said nothing"
_EXIT_S: Final = 1.0
_MODULE: Final = "aiooffload.service.device"


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
        self.sent_nbytes = 0  # in all, with what still waits for it to read
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
        self._exit: asyncio.Task[Any] | None = None  # done when its exit was seen
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
            self._exit = self._loop.create_task(self._see_exit(self._process, ours))
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    async def _see_exit(self, process: asyncio.subprocess.Process, connection: socket.socket) -> None:
        """Let its children and the connection, of which they may have the other side, end with the process."""
        await process.wait()
        _kill_group(process.pid)  # before anything else can have its number
        if not self.gone.is_set():
            connection.shutdown(socket.SHUT_RD)  # what it said last is still read

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

    def eof_received(self) -> None:
        self.connection_lost(None)  # the loop's call may never come: whoever has the other side does not read

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
            pieces = frames.encode(message, data)
            self.sent_nbytes += sum(map(len, pieces))
            self._transport.writelines(pieces)

    def has_taken(self, nbytes: int) -> bool:
        """Whether so many of the bytes that were sent in all are no longer in this process."""
        if self._transport is None or self.gone.is_set():
            return True
        return self.sent_nbytes - self._transport.get_write_buffer_size() >= nbytes

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

    def stuck(self) -> tuple[str, float]:
        """Return why it makes no progress, and for how many seconds; ("", 0) if it does, or has nothing to do."""
        now = self._loop.time()
        if now - self._heard_at > SILENCE_S:
            return _SILENT, now - self._heard_at
        if self.calls and now - self._moved_at > self._settings.stall_s:
            return "no call was answered, and nothing done on the device", now - self._moved_at
        return "", 0.0

    def why_stuck(self) -> str:
        """Return the same as a text; "" if it makes progress, or has nothing to do."""
        why, seconds = self.stuck()
        return f"{why} for {seconds:.1f} s" if why else ""

    def excuse(self, seconds: float) -> None:
        """The front itself did not listen for so long, which is no silence."""
        self._heard_at += seconds

    def check_hard_limit(self) -> None:
        """End it if a call is over the hard limit, or its loop is, whatever that is held up by."""
        limit = self._settings.hard_timeout_s
        if not limit:
            return
        now = self._loop.time()
        if self.calls:
            began, _ = next(iter(self.calls.values()))
            if now - began > limit + HARD_MARGIN_S:
                self._end(f"a call took longer than the hard limit of {limit:g} s")
                return
        if now - self._heard_at > max(limit, SILENCE_S):
            self._end(f"{_SILENT} for longer than the hard limit of {limit:g} s")

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
        """End it at once, with its children, without waiting."""
        if self._process is not None and self._process.returncode is None:
            _kill_group(self._process.pid)

    async def kill(self) -> None:
        """End it at once and wait until it is gone; one that hangs in a driver, which nobody can end, is left."""
        self._end(self.fault or "it was ended")
        if self._transport is not None:
            self._transport.abort()
        if self._process is not None:
            if not self._exits:
                self.kill_now()
            exited = self._exit or self._loop.create_task(self._process.wait())
            _, left = await asyncio.wait((exited,), timeout=_EXIT_S)
            if left:
                self.kill_now()
                _, left = await asyncio.wait((exited,), timeout=_EXIT_S)
                if left:
                    log.error("a device process cannot be ended", pid=self.pid)

    async def stop(self, timeout_s: float) -> None:
        """Let it answer what it was called for and close; after so many seconds end it, a few if it starts or hangs."""
        if not self.up or self.stuck()[0]:
            timeout_s = min(timeout_s, SILENCE_S)
        was_up, self.up = self.up, False
        self._send({"kind": "stop"})
        try:
            async with asyncio.timeout(timeout_s):
                await self.gone.wait()
        except TimeoutError:
            if was_up:
                log.warning(
                    "device process is ended before the program has stopped",
                    device=self.device["label"],
                    pid=self.pid,
                    seconds=round(timeout_s, 3),
                )
        await self.kill()

    @property
    def pid(self) -> int:
        """The process's id, 0 before it has one."""
        return self._process.pid if self._process is not None else 0

    @property
    def exit_status(self) -> int | None:
        """How it ended, if it did."""
        return self._process.returncode if self._process is not None else None


def _kill_group(pid: int) -> None:
    """End a process that leads a session, and its children, but for those that began their own or took other rights."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
