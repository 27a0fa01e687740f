"""Device processes are started, watched and replaced; nothing that a device does reaches the front."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
import structlog

from aiooffload.service import process as life
from aiooffload.service import supervisor as module
from aiooffload.service.frames import encode
from aiooffload.service.process import DeviceProcess, Settings, StartFailed
from aiooffload.service.supervisor import Slot, Supervisor, backoff_s
from tests.service.support import ROOT, SAMPLE, ends, held, until


class Heard:
    """A call that notes how it ended."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.first_progress: asyncio.Future[tuple[int, int]] = asyncio.get_running_loop().create_future()
        self.endings = 0

    def on_answer(self, message: dict[str, Any], outputs: Sequence[memoryview]) -> None:
        self.endings += 1
        self.answer.set_result((message, [bytes(one) for one in outputs]))

    def on_lost(self, reason: str) -> None:
        self.endings += 1
        self.answer.set_result(reason)

    def on_progress(self, done: int, total: int) -> None:
        if not self.first_progress.done():
            self.first_progress.set_result((done, total))


class Rig:
    """A supervisor whose changes can be waited for."""

    def __init__(self, devices: Sequence[str] = ("host",), **settings: Any) -> None:
        self.changed = asyncio.Condition()
        options = {"app": SAMPLE, "offload": {"lanes": 2}, "log_level": "error"} | settings
        self.supervisor = Supervisor(Settings(**options), devices, self._on_change)
        self._tasks: set[asyncio.Task[None]] = set()

    def _on_change(self) -> None:
        task = asyncio.create_task(self._tell())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Any) -> None:
        async with self.changed, asyncio.timeout(20):
            await self.changed.wait_for(condition)

    def call(self, endpoint: str, value: int = 0, progress: bool = False) -> Heard:
        heard = Heard()
        data: list[Any] = [np.array([value], np.int32).tobytes()]
        self.supervisor.ready[0].call(endpoint, [(1,)], data, heard, progress)
        return heard

    async def ask(self, endpoint: str, value: int = 0) -> Any:
        return await self.call(endpoint, value).answer


@contextlib.asynccontextmanager
async def rig_of(**options: Any) -> AsyncIterator[Rig]:
    rig = Rig(**options)
    rig.supervisor.start()
    try:
        await rig.supervisor.first_ready()
        yield rig
    finally:
        await rig.supervisor.stop(5.0)
        await asyncio.gather(*rig._tasks)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def number(answer: Any) -> int:
    """Return the one INT32 of a result."""
    message, [data] = answer
    assert message["kind"] == "result"
    return int(np.frombuffer(data, np.int32)[0])


@pytest.mark.parametrize(("crashes", "seconds"), [(0, 0), (1, 0), (2, 0.25), (3, 0.5), (5, 2), (9, 30), (99, 30)])
def test_backoff(crashes: int, seconds: float) -> None:
    """The first crash costs no wait, each further one in a row twice as much, up to a limit."""
    assert backoff_s(crashes) == seconds


async def test_calls_are_answered_by_another_process() -> None:
    """A device process declares its endpoints, beats, answers calls by number, and closes when it is told to stop."""
    async with rig_of() as rig:
        assert rig.supervisor.app_name == "sample"
        assert "double" in {one.name for one in rig.supervisor.declarations}
        process = rig.supervisor.ready[0]
        assert process.device["driver"] == "host"
        assert number(await rig.ask("pid")) == process.pid != os.getpid()
        assert (process.stats["device"], process.stats["lanes_busy"]) == ("host", 0)
        calls = [rig.call("gate", i) for i in range(3)]
        following = rig.call("gate_in_kernel", progress=True)
        await rig.ask("wait_inside", 4)
        assert await following.first_progress == (1, 3)
        await rig.ask("open_gate")
        assert [number(await call.answer) for call in (*calls, following)] == [0, 1, 2, 0]
    assert process.exit_status == 0
    assert not alive(process.pid)


@pytest.mark.parametrize(("how", "reason"), [("lose", "host is lost"), ("kill", "it ended")])
async def test_lost_process_is_replaced(how: str, reason: str) -> None:
    """Whatever ends a device process: each call in flight hears of it once, and another process serves.

    Meanwhile the endpoints are still known, it is not ready, and says why, and it is not dead.
    """
    async with rig_of() as rig:
        first = rig.supervisor.ready[0]
        waiting = rig.call("gate")
        await rig.ask("wait_inside", 1)
        spare = rig.supervisor.slots[0]._spare
        assert spare is not None
        if how == "kill":
            os.kill(first.pid, signal.SIGKILL)
        else:
            assert reason in await rig.ask("lose")
        assert reason in await waiting.answer
        assert not rig.supervisor.ready
        assert rig.supervisor.declarations
        assert "is being replaced" in rig.supervisor.why_not_ready()
        assert rig.supervisor.why_dead() == ""
        await rig.until(lambda: rig.supervisor.ready)
        assert rig.supervisor.why_not_ready() == ""
        assert number(await rig.ask("pid")) == spare.pid != first.pid
        slot = rig.supervisor.slots[0]
        assert (slot.generation, slot.faults, waiting.endings) == (2, 1, 1)
        assert reason in slot.last_fault
        assert not alive(first.pid)


async def test_death_is_seen_whatever_its_children_hold() -> None:
    """A device process that dies is replaced although a child of its program has its connection, and reads nothing."""
    async with rig_of() as rig:
        process = rig.supervisor.ready[0]
        child = number(await rig.ask("child", 2))
        try:
            waiting = rig.call("gate")
            await rig.ask("wait_inside", 1)
            with held(process.pid):
                process.call("scratch", [(1 << 22,)], [bytes(1 << 24)], Heard(), False)  # more than a socket takes
                os.kill(process.pid, signal.SIGKILL)
            async with asyncio.timeout(20):
                assert await waiting.answer == "it ended"
            await rig.until(lambda: rig.supervisor.ready)
        finally:
            os.kill(child, signal.SIGKILL)


async def test_children_of_the_program_get_nothing_of_ours() -> None:
    """A program that a handler starts does not have the device process's connection."""
    async with rig_of() as rig:
        assert number(await rig.ask("inheritable")) == 0


@pytest.mark.parametrize("other", [0, 1], ids=["forked", "another program"])
@pytest.mark.parametrize("how", ["dies", "is ended", "stops"])
async def test_children_of_the_program_end_with_it(other: int, how: str) -> None:
    """What the program has started does not outlive its device process, however that ends."""
    async with rig_of() as rig:
        process = rig.supervisor.ready[0]
        pidfd = os.pidfd_open(number(await rig.ask("child", other)))
        if how == "dies":
            os.kill(process.pid, signal.SIGKILL)
        elif how == "is ended":
            process.kill_now()
        else:
            await rig.supervisor.stop(5.0)
            assert process.exit_status == 0
        await process.gone.wait()
        await process.kill()
        assert ends(pidfd)
        os.close(pidfd)


@pytest.mark.parametrize("other", [0, 1], ids=["forked", "another program"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
async def test_children_of_the_program_end_as_ever(other: int, how: signal.Signals) -> None:
    """The signals that a device process leaves to the front end what its program has started."""
    async with rig_of() as rig:
        child = number(await rig.ask("child", other))
        pidfd = os.pidfd_open(child)
        os.kill(rig.supervisor.ready[0].pid, how)
        os.kill(child, how)
        assert ends(pidfd)
        os.close(pidfd)
        assert number(await rig.ask("pid")) == rig.supervisor.ready[0].pid


async def test_call_over_the_hard_limit_costs_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that takes too long ends its process, even one that blocks its loop and hears nothing."""
    monkeypatch.setattr(life, "HARD_MARGIN_S", 0.0)
    async with rig_of(hard_timeout_s=0.1) as rig:
        first = rig.supervisor.ready[0]
        reason = await rig.ask("block", 60_000)
        assert reason == "a call took longer than the hard limit of 0.1 s"
        await rig.until(lambda: rig.supervisor.ready)
        assert not alive(first.pid)


async def test_silence_over_the_hard_limit_costs_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs without a call is ended, too; none is that the front did not listen to."""
    monkeypatch.setattr(life, "SILENCE_S", 1.0)
    async with rig_of(hard_timeout_s=0.1) as rig:
        first, supervisor = rig.supervisor.ready[0], rig.supervisor
        assert supervisor._watch is not None
        supervisor._watch.cancel()
        supervisor._look_due -= 100.0
        first._heard_at -= 100.0
        supervisor._look()
        assert supervisor.ready == [first]
        with held(first.pid), structlog.testing.capture_logs() as lines:
            await rig.until(lambda: supervisor.slots[0].generation == 2 and supervisor.ready)
            supervisor.slots[0].watch(0.0)
        assert "device process makes progress again" not in [line["event"] for line in lines]  # it is another
        assert supervisor.slots[0].last_fault == "its loop has said nothing for longer than the hard limit of 0.1 s"
        assert not alive(first.pid)


def idle(settings: Settings) -> DeviceProcess:
    """A process that is up, as far as its supervisor knows."""
    process = DeviceProcess(settings, "host", lambda: None)
    process.up = True
    return process


async def test_hanging_is_in_the_log_once() -> None:
    """There is a line when a process stops making progress, and one when it goes on; the queue hears of it."""
    changes = []
    slot = Slot(Settings("", {}), "host", lambda: changes.append(slot.process))
    slot.process = process = idle(Settings("", {}))
    with structlog.testing.capture_logs() as lines:
        for heard_before_s in (0.0, 100.0, 100.0, 0.0, 0.0):
            process._heard_at = asyncio.get_running_loop().time() - heard_before_s
            slot.watch(0.0)
    assert [line["event"] for line in lines] == [
        "device process makes no progress",
        "device process makes progress again",
    ]
    assert lines[0].items() >= {"reason": "its loop has said nothing", "device": "host"}.items()
    assert len(changes) == 2


async def test_processes_that_move() -> None:
    """Those that hung when they were last looked at are left out, as long as there is another."""
    supervisor = Rig(["host", "host"]).supervisor
    first, second = processes = [idle(Settings("", {})) for _ in supervisor.slots]
    for slot, process in zip(supervisor.slots, processes, strict=True):
        slot.process = process
    assert supervisor.moving == [first, second]
    first._heard_at -= 100.0
    supervisor.slots[0].watch(0.0)
    assert supervisor.moving == [second]
    second._heard_at -= 100.0
    supervisor.slots[1].watch(0.0)
    assert supervisor.moving == supervisor.ready == [first, second]


async def test_no_progress_is_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """With calls that nobody answers, or without beats, it is not ready; that takes no question to the device."""
    async with rig_of(stall_s=-1.0) as rig:  # no time at all
        assert rig.supervisor.why_not_ready() == ""
        waiting = rig.call("gate")
        assert "no call was answered, and nothing done on the device for" in rig.supervisor.why_not_ready()
        await rig.ask("wait_inside", 1)
        await rig.ask("open_gate")
        await waiting.answer
        assert rig.supervisor.why_not_ready() == ""
        monkeypatch.setattr(life, "SILENCE_S", -1.0)
        assert "its loop has said nothing" in rig.supervisor.why_not_ready()
        assert rig.supervisor.why_dead() == ""


async def test_work_on_the_device_is_progress() -> None:
    """A long call is no stall while the device does something for it, or its kernel says how far it is."""
    process = DeviceProcess(Settings("", {}, stall_s=5.0), "host", lambda: None)
    process.calls[1] = 0.0, Heard()

    def stuck_after(message: dict[str, Any]) -> bool:
        process._moved_at -= 100.0
        assert process.why_stuck()
        process.data_received(b"".join(encode(message)))
        return bool(process.why_stuck())

    beat = {"kind": "beat", "lag_s": 0.0, "stats": {"completed": 5, "calls": {"served": 0}}}
    assert not stuck_after(beat)
    assert stuck_after(beat)
    assert not stuck_after({"kind": "progress", "call": 1, "done": 1, "total": 2})


async def test_program_that_cannot_start() -> None:
    """What keeps a program from starting is said in its own words, and it is not tried again at once."""
    rig = Rig(app="tests.service.broken_app:app")
    rig.supervisor.start()
    with pytest.raises(StartFailed, match="RuntimeError: cannot start"):
        await rig.supervisor.first_ready()
    await rig.supervisor.stop(0.0)
    assert rig.supervisor.slots[0].generation == 1
    await asyncio.gather(*rig._tasks)


async def test_system_without_room_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot be spawned is a start that failed; a spare that cannot be is done without."""
    spawn, room = asyncio.create_subprocess_exec, [False]

    async def spawn_if_there_is_room(*arguments: Any, **options: Any) -> Any:
        if not room.pop():
            room.append(False)
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return await spawn(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn_if_there_is_room)
    monkeypatch.setattr(module, "backoff_s", lambda crashes: 0.01)
    rig = Rig()
    rig.supervisor.start()
    with pytest.raises(StartFailed, match="temporarily unavailable"):
        await rig.supervisor.first_ready()
    await rig.until(rig.supervisor.why_dead)
    for _ in range(2):
        room.append(True)  # for one, and no spare
        await rig.until(lambda: rig.supervisor.ready)
        assert rig.supervisor.why_dead() == ""
        assert number(await rig.ask("pid")) == rig.supervisor.ready[0].pid
        await rig.ask("die")
    await rig.supervisor.stop(5.0)
    await asyncio.gather(*rig._tasks)


async def test_device_that_does_not_exist() -> None:
    """A GPU that is not there is no reason to serve with something else."""
    with pytest.raises(StartFailed, match="cuda:77"):
        async with rig_of(devices=["cuda:77"]):
            pass


async def test_process_that_is_not_ready_in_time() -> None:
    """A program that takes too long to start is ended."""
    with pytest.raises(StartFailed, match=r"not ready within 0\.01 s"):
        async with rig_of(start_timeout_s=0.01):
            pass


async def test_dead_after_some_starts_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no device process can be brought back, the worker says that it is dead; one that comes back resets that."""
    monkeypatch.setattr(module, "START_FAILURES_ALLOWED", 2)
    monkeypatch.setattr(module, "backoff_s", lambda crashes: 0.0)
    async with rig_of() as rig:
        slot = rig.supervisor.slots[0]
        assert slot._spare is not None
        await slot._spare.kill()  # it has the good settings
        good, bad = slot._settings, Settings("tests.service.nothing:app", {}, log_level="error", start_timeout_s=0.01)
        slot._settings = bad
        await rig.ask("die")
        await rig.until(lambda: slot.start_failures >= 2)
        assert "not ready within" in rig.supervisor.why_dead()
        slot._settings = good
        await rig.until(lambda: rig.supervisor.ready)
        assert rig.supervisor.why_dead() == ""


async def test_several_devices_fail_apart() -> None:
    """The loss of one device costs the others nothing."""
    async with rig_of(devices=["host", "host"]) as rig:
        await rig.until(lambda: len(rig.supervisor.ready) == 2)
        first, second = rig.supervisor.ready
        await rig.ask("die")
        assert rig.supervisor.ready == [second]
        assert rig.supervisor.why_not_ready() == ""
        await rig.until(lambda: len(rig.supervisor.ready) == 2)
        assert rig.supervisor.ready[0] is not first


async def test_stop_does_not_wait_for_ever() -> None:
    """A process that does not finish in time is ended, its calls hear of it, and so does whoever reads the log."""
    rig = Rig()
    rig.supervisor.start()
    await rig.supervisor.first_ready()
    process = rig.supervisor.ready[0]
    call = rig.call("gate")
    await rig.ask("wait_inside", 1)
    with structlog.testing.capture_logs() as lines:
        await rig.supervisor.stop(0.01)
    assert [line["event"] for line in lines] == ["device process is ended before the program has stopped"]
    assert lines[0].items() >= {"device": "host", "pid": process.pid, "seconds": 0.01}.items()
    assert isinstance(await call.answer, str)
    assert not alive(process.pid)
    await asyncio.gather(*rig._tasks)


@pytest.mark.parametrize("started", [False, True], ids=["starts", "hangs"])
async def test_stop_does_not_wait_for_what_does_not_move(started: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is not ready yet, or makes no progress, does not have all the time to finish."""
    rig = Rig()
    rig.supervisor.start()
    if started:
        await rig.supervisor.first_ready()
    (slot,) = rig.supervisor.slots
    await until(lambda: slot.process and slot.process.pid)
    assert slot.process is not None
    with held(slot.process.pid):
        monkeypatch.setattr(life, "SILENCE_S", -1.0 if started else 0.01)
        async with asyncio.timeout(20):
            await rig.supervisor.stop(600.0)
    assert not alive(slot.process.pid)
    await asyncio.gather(*rig._tasks)


async def test_processes_do_not_outlive_a_front_that_is_killed() -> None:
    """A device process ends with the front, even one whose loop is blocked."""
    code = """
import asyncio
from tests.service.test_supervisor import Rig
async def main():
    rig = Rig()
    rig.supervisor.start()
    await rig.supervisor.first_ready()
    rig.call("block", 600_000)
    print(rig.supervisor.ready[0].pid, flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code), cwd=ROOT, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    pidfd = os.pidfd_open(pid)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    process.kill()
    await process.wait()
    async with asyncio.timeout(10):
        await ended.wait()
        await process.stdout.read()  # ends with the last who has it: the spare process
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
