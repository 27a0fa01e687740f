"""Keeps a device process for each device: starts it, and another whenever one ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from aiooffload.log import log
from aiooffload.service.app import Declaration
from aiooffload.service.process import DeviceProcess, Settings, StartFailed

__all__ = ["Slot", "Supervisor", "backoff_s"]

START_FAILURES_ALLOWED: Final = 5
"""After so many starts in a row that failed the worker counts as dead."""
STEADY_S: Final = 10.0
"""A process that was up for so long is no part of a crash loop."""
LONGEST_BACKOFF_S: Final = 30.0
_WATCH_S: Final = 0.1


def backoff_s(crashes: int) -> float:
    """Return how long to wait before the next start, after so many short lives in a row: the first costs nothing."""
    return 0.0 if crashes <= 1 else min(LONGEST_BACKOFF_S, 0.25 * 2.0 ** (crashes - 2))


class Slot:
    """One device, and the process that serves it now.

    Parameters
    ----------
    settings
        How to start it.
    device
        The label that the process opens.
    on_change
        Called whenever a process comes up or goes, or makes progress no more or again.
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
        self._stuck = ""  # why the process makes no progress, as the log has it

    @property
    def ready(self) -> DeviceProcess | None:
        """The process, if it takes calls."""
        return self.process if self.process is not None and self.process.up else None

    @property
    def is_stuck(self) -> bool:
        """Whether the process made no progress when it was last looked at."""
        return bool(self._stuck)

    async def keep(self) -> None:
        """Start a process, and another whenever one ends, until stopped."""
        while not self._stopping.is_set():
            await self._live_once()
            # One that could not even start is not tried again at once: it may be the last thing the worker does.
            delay = backoff_s(max(2, self._short_lives) if self.start_failures else self._short_lives)
            # A worker of which no first start succeeds ends at once, and there is no pause to speak of.
            if delay and not await self._is_stopped_within(_WATCH_S):
                log.warning("waiting before the next start", device=self.device, seconds=delay)
                await self._is_stopped_within(delay - _WATCH_S)
        if self._spare is not None:
            await self._spare.kill()

    async def _is_stopped_within(self, seconds: float) -> bool:
        """Wait so long, or until it is to start no process any more; whether that is so."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()

    async def _live_once(self) -> None:
        """One life: start it, wait for its end, draw the conclusions."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.generation += 1
        process = self.process = self._take_spare() or self._new()
        self._stuck = ""
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

    def watch(self, late_s: float) -> None:
        """Look at the process, so much later than was meant: is it over the hard limit, does it make progress?"""
        process = self.ready
        if process is None:
            return
        process.excuse(late_s)
        process.check_hard_limit()
        why, seconds = process.stuck()
        if why and why != self._stuck:
            log.warning(
                "device process makes no progress",
                device=self.device,
                pid=process.pid,
                reason=why,
                seconds=round(seconds, 3),
            )
        elif self._stuck and not why:
            log.info("device process makes progress again", device=self.device, pid=process.pid)
        changed, self._stuck = why != self._stuck, why
        if changed:
            self._on_change()

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
        Called whenever one comes up or goes, or makes progress no more or again.
    """

    def __init__(self, settings: Settings, devices: Sequence[str], on_change: Callable[[], None]) -> None:
        self.slots: Final = [Slot(settings, device, self._changed) for device in devices]
        self.declarations: list[Declaration] = []
        """The endpoints, as the last process that was ready declared them; empty before the first."""
        self.app_name = ""
        self._on_change = on_change
        self._tasks: list[asyncio.Task[None]] = []
        self._watch: asyncio.TimerHandle | None = None
        self._look_due = 0.0
        self._change = asyncio.Event()

    def start(self) -> None:
        """Start all of them; each is kept from then on."""
        self._tasks = [asyncio.create_task(slot.keep(), name=f"keep {slot.device}") for slot in self.slots]
        self._look()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        late_s = max(0.0, now - self._look_due) if self._look_due else 0.0
        for slot in self.slots:
            slot.watch(late_s)
        self._look_due = now + _WATCH_S
        self._watch = loop.call_later(_WATCH_S, self._look)

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

    @property
    def moving(self) -> list[DeviceProcess]:
        """Those of them that make progress; all if none does."""
        moving = [slot.ready for slot in self.slots if slot.ready is not None and not slot.is_stuck]
        return moving or self.ready

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
