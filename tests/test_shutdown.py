"""The end of an Offload and of the process: nothing hangs, whatever is under way and wherever the end comes from.

What the end of an Offload does to each state of its work is in ``engine/test_engine.py``, what a process leaves that
only forgets it in ``test_offload.py``, closing while a handler hangs in ``test_reverse_bad_input.py``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiooffload as ao
from tests.kernels import add, nothing, rig, turns, until
from tests.reverse_kernels import ask, calling_rig, end_of, until_cancelled

ROOT = Path(__file__).parents[1]
LIMIT_S = 20
LOOPS = {
    "asyncio": "asyncio.run(main())",
    "uvloop": "uvloop.run(main())",
}
if sys.version_info >= (3, 12):
    LOOPS["eager"] = "asyncio.Runner(loop_factory=eager_loop).run(main())"
PREAMBLE = """
import asyncio, gc, os, signal, sys, threading, time, warnings
import numpy as np, uvloop
import aiooffload as ao
from tests.conftest import eager_loop
from tests.kernels import *
from tests.reverse_kernels import *
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background ignores it
"""


def run(source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the kernels of the tests at hand; fails if it hangs."""
    command = [sys.executable, *options, "-c", PREAMBLE + source]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as program:
        try:
            stdout, stderr = program.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)  # with its children
            stdout, stderr = program.communicate()
            pytest.fail(f"the program did not end within {LIMIT_S} s\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, program.returncode, stdout, stderr)


def check(done: subprocess.CompletedProcess[str], *, warns: bool = False) -> None:
    """Fail unless a program ended well: nothing but the warning that an Offload was left open was said."""
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1:] == ["end"], done.stdout
    for word in ("Traceback", "Fatal", "never retrieved", "Exception ignored"):
        assert word not in done.stderr, done.stderr
    assert ("was not closed" in done.stderr) == warns, done.stderr


# -- aclose() ------------------------------------------------------------------------------


async def test_closed_by_many_at_a_time(device_label: str) -> None:
    """Any number of tasks may close at a time, and one of them may give up: all the others wait for the one end."""
    async with rig(device_label, lanes=1, lane_depth=1) as r:
        word, gate = r.word(), await r.hold()
        queued = r.launch(add, word, 3)
        get = r.off.get(word)
        closing = [asyncio.create_task(r.off.aclose()) for _ in range(5)]
        await turns(3)
        closing[2].cancel()
        await turns(3)
        assert [task.done() for task in closing] == [False, False, True, False, False]
        with pytest.raises(ao.ClosedError):
            r.launch(nothing)
        gate.open()
        await asyncio.gather(*(task for task in closing if not task.cancelled()))
        assert (await get)[0] == 3
        assert queued.exception() is None


@pytest.mark.parametrize("opened", [True, False])
async def test_closed_while_a_gate_is_held(opened: bool) -> None:
    """aclose() waits for a gate and what stands behind it; at its deadline both end with ClosedError."""
    async with rig("host", lanes=2, bury=not opened) as r:
        word, lane = r.word(1), r.off.lanes[0]
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gate = r.off.gate(result, lane=lane)
        behind = r.launch(add, word, 1, lane=lane)
        closing = asyncio.create_task(r.off.aclose(5 if opened else 0.05))
        await turns()
        assert not closing.done()
        if opened:
            result.set_result(None)
        await closing
        assert isinstance(await end_of(behind), type(None) if opened else ao.ClosedError)
        assert isinstance(await end_of(gate), type(None) if opened else ao.ClosedError)
        assert result.done() == opened


async def test_terminated_while_it_closes() -> None:
    """terminate() ends an aclose() that waits, with everything that it waited for."""
    async with rig("host", lanes=1, lane_depth=1, bury=True) as r:
        await r.hold()
        queued = r.launch(nothing)
        closing = asyncio.create_task(r.off.aclose())
        await turns()
        r.off.terminate()
        await closing
        assert isinstance(await end_of(queued), ao.ClosedError)
        assert isinstance(await end_of(r.holds[0]), ao.ClosedError)


@pytest.mark.parametrize("what", ["aclose", "drain"])
@pytest.mark.parametrize("where", ["handler", "host task", "task of a host task"])
async def test_closed_from_within(device_label: str, what: str, where: str) -> None:
    """Closing and draining in a host function or a host task, which they would wait for, is refused; it goes on."""
    async with calling_rig(device_label) as r:
        refused: list[str] = []

        async def close() -> None:
            with pytest.raises(ao.UsageError) as caught:
                await getattr(r.off, what)()
            refused.append(str(caught.value))

        async def step() -> None:
            await (asyncio.create_task(close()) if where == "task of a host task" else close())

        @r.off.host_function
        async def f(x: int) -> int:
            await close()
            return x

        if where == "handler":
            assert await r.asked(ask, 5) == ([0, 0], 5, None)
        else:
            await r.off.host_task(step)
        assert len(refused) == 1
        assert "would wait for" in refused[0]
        await r.launch(nothing)


async def test_closed_from_what_a_host_task_left_behind(device_label: str) -> None:
    """A task that outlives the host task that started it may close the Offload."""
    async with rig(device_label) as r:
        tasks: list[asyncio.Task[None]] = []
        go = asyncio.Event()

        async def close() -> None:
            await go.wait()
            await r.off.aclose()

        async def step() -> None:
            tasks.append(asyncio.create_task(close()))

        await r.off.host_task(step)
        go.set()
        await tasks[0]
        with pytest.raises(ao.ClosedError):
            r.launch(nothing)


async def test_other_offload_closed_in_a_host_task(device_label: str) -> None:
    """A host task of one Offload may close another one."""
    async with rig(device_label) as r, rig(device_label) as other:
        await r.off.host_task(other.off.aclose)
        with pytest.raises(ao.ClosedError):
            other.launch(nothing)


# -- signals -------------------------------------------------------------------------------


@pytest.mark.all_loops
@pytest.mark.parametrize("how", ["loop", "plain"])
async def test_closed_from_a_signal_handler(device_label: str, how: str) -> None:
    """A signal handler, the loop's or a plain one, can begin to close, and what was submitted is done first."""
    async with calling_rig(device_label) as r:
        loop, word = asyncio.get_running_loop(), r.word(1)
        started = asyncio.Event()
        closing: list[asyncio.Task[None]] = []

        @r.off.host_function(name="started")
        async def begun() -> None:
            started.set()

        def close(*_: Any) -> None:
            closing.append(loop.create_task(r.off.aclose()))
            op.cancel()

        await r.off.load(until_cancelled, add)
        op = r.launch(until_cancelled, r.array(1, np.int32))
        await started.wait()
        r.launch(add, word, 1)
        get = r.off.get(word)
        before = signal.getsignal(signal.SIGUSR1)
        if how == "loop":
            loop.add_signal_handler(signal.SIGUSR1, close)
        else:
            signal.signal(signal.SIGUSR1, close)
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
            await until(lambda: closing)
            await closing[0]
        finally:
            if how == "loop":
                loop.remove_signal_handler(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, before)
        assert op.cancelled()
        assert (await get)[0] == 2


STORM = """
import random
async def one(seed):
    off = await ao.Offload("host", lanes=2, lane_depth=4)._enter("host")
    await off.load(add, nothing)
    word = await off.put(np.zeros(1, np.uint64))
    random_ = random.Random(seed)
    closed = []
    def handler(*_):
        closed.append(True)
        off.terminate()
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, random_.uniform(1e-4, 8e-3))
    ops = []
    try:
        while True:
            for _ in range(20):
                ops.append(off.launch(add, grid=1, block=1, args=(word, 1)))
                ops.append(off.host_task(later, after=ops[-1:]))
                ops.append(off.put(np.zeros(8)))
            await asyncio.sleep(0)
            if len(ops) > 600:
                await ops[-1]
    except ao.ClosedError:
        pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert closed
    for op in ops:
        while not op.finished:
            await asyncio.sleep(0)
        assert isinstance(op.exception(), (ao.ClosedError, ao.DependencyError, type(None))), op.exception()
    await off.aclose()
    await asyncio.to_thread(off._engine.device.close)
async def later():
    await asyncio.sleep(0)
async def main():
    for seed in range(25):
        await asyncio.wait_for(one(seed), 10)
    print("end")
"""


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_terminated_from_a_signal_handler_at_any_moment(loop: str) -> None:
    """terminate() in a plain signal handler, in the midst of whatever the library does, ends everything."""
    check(run(STORM + LOOPS[loop], "-W", "ignore::ResourceWarning"))


@pytest.mark.parametrize("loop", LOOPS)
def test_interrupted_by_ctrl_c(device_label: str, loop: str) -> None:
    """Ctrl-C ends a program in `async with` whose kernel waits for it: the kernel is told, the Offload is closed."""
    done = run(
        f"""
async def main():
    async with ao.Offload({device_label!r}) as off:
        started = asyncio.Event()
        @off.host_function(name="started")
        async def begun():
            os.kill(os.getpid(), signal.SIGINT)
        await off.load(until_cancelled)
        op = off.launch(until_cancelled, grid=1, block=1, args=(off.zeros(1, np.int32),))
        try:
            await op
        finally:
            print("gave up", flush=True)
try:
    {LOOPS[loop]}
except KeyboardInterrupt:
    print("end")
"""
    )
    check(done)
    assert "gave up" in done.stdout


# -- the end of the loop and of the process ------------------------------------------------

EXITS = {
    "gate": "off.gate(loop.create_future(), lane=off.lanes[0]); off.launch(nothing, lane=off.lanes[0], **one)",
    "host task": "off.host_task(for_ever)",
    "after the host": "off.launch(nothing, after=[loop.create_future()], **one)",
    "in a call": "off.launch(ask, args=(3, off.zeros(1, np.int64), off.zeros(2, np.int32)), **one); await asked.wait()",
    "calling and silent": "off.launch(until_cancelled, args=(off.zeros(1, np.int32),), **one); await asked.wait()",
    "armed": "off.launch(hold, args=(gate,), **one); await asyncio.sleep(0.02)",
    "queued": "[off.launch(hold, args=(gate,), **one) for _ in range(500)]",
    "closing": "off.launch(hold, args=(gate,), **one); loop.create_task(off.aclose()); await asyncio.sleep(0)",
    "draining": "off.launch(hold, args=(gate,), **one); loop.create_task(off.drain()); await asyncio.sleep(0)",
    "in a trace": "await off.trace(os.devnull).__aenter__(); off.launch(hold, args=(gate,), **one)",
    "in a lease": "kept.append(loop.create_task(lease(off, gate))); await asyncio.sleep(0)",
    "watched": "kept.append(loop.create_task(anext(off.launch(hold, args=(gate,), **one).progress())))",
    "copying in a thread": "off.put(np.zeros(30_000_000, np.uint8)); await asyncio.sleep(0)",
    "kept by a cycle": "box = [off]; box.append(box); off.launch(hold, args=(gate,), **one)",
    "daemon thread": "threading.Thread(target=busy, daemon=True).start(); off.launch(hold, args=(gate,), **one)",
}
CALLS = ("in a call", "calling and silent")


@pytest.mark.parametrize(
    ("state", "loop"),
    [(state, "asyncio") for state in EXITS] + [(state, loop) for state in CALLS for loop in LOOPS if loop != "asyncio"],
)
def test_exit_with_the_offload_open(device_label: str, state: str, loop: str) -> None:
    """A program that ends with an Offload open ends at once and says so, whatever is under way."""
    done = run(
        f"""
kept = []
def busy():
    while True:
        sum(range(100))
async def for_ever():
    await asyncio.get_running_loop().create_future()
async def lease(off, gate):
    async with off.lease() as lane:
        await off.launch(hold, grid=1, block=1, args=(gate,), lane=lane)
async def main():
    loop, one, asked = asyncio.get_running_loop(), dict(grid=1, block=1), asyncio.Event()
    off = ao.Offload({device_label!r}, lanes=2)
    await off.__aenter__()
    @off.host_function
    async def f(x: int) -> int:
        asked.set()
        return await loop.create_future()
    @off.host_function
    async def started():
        asked.set()
    await off.load(hold, nothing, *((ask, until_cancelled) if {state in CALLS} else ()))
    pinned = await off.pinned(2, np.uint64)
    pinned.array[:] = 0
    gate = np.uint64(pinned.lease.block.device_address)
    kept.append(pinned)
    {EXITS[state].replace("off.launch(ask", "told = off.launch(ask")}
    if "told" in locals():  # the end of the loop cancels the host function, which is a failure of the launch
        locals()["told"].add_done_callback(lambda op: op.exception())
{LOOPS[loop]}
print("end")
""",
        "-W",
        "always::ResourceWarning",
    )
    assert "Task was destroyed" not in done.stderr, done.stderr
    check(done, warns=state != "closing" or "was not closed" in done.stderr)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_loop_that_stops_while_it_closes(device_label: str, loop: str, goes_on: bool) -> None:
    """A loop that is stopped in the middle of closing can go on and end it, or be closed, and the process ends."""
    done = run(
        f"""
loop = uvloop.new_event_loop() if {loop!r} == "uvloop" else asyncio.new_event_loop()
async def main():
    off = ao.Offload({device_label!r}, lanes=1)
    await off.__aenter__()
    await off.load(hold)
    pinned = await off.pinned(2, np.uint64)
    pinned.array[:] = 0
    op = off.launch(hold, grid=1, block=1, args=(np.uint64(pinned.lease.block.device_address),))
    while not pinned.array[0]:
        await asyncio.sleep(0)
    closing = asyncio.ensure_future(off.aclose())
    await asyncio.sleep(0)
    return off, pinned, op, closing
off, pinned, op, closing = loop.run_until_complete(main())
loop.call_soon(loop.stop)
loop.run_forever()
assert not closing.done()
pinned.array[1] = 1
if {goes_on}:
    loop.run_until_complete(closing)
    assert op.finished
    loop.close()
else:
    warnings.simplefilter("ignore")
    loop.close()
print("end")
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1:] == ["end"]
    assert "Fatal" not in done.stderr
    if goes_on:
        check(done)


LEAVES = ("sys.exit(7)", "os._exit(7)", "raise KeyError", "return 7")


@pytest.mark.parametrize(
    ("loop", "leave"),
    # A child that ends by way of its loop closes that, and libuv aborts a process where the other one has taken
    # something off the selector that both have. That is so without an Offload as well.
    [*(("asyncio", leave) for leave in LEAVES), ("uvloop", "os._exit(7)")],
)
def test_forked_child_that_ends(loop: str, leave: str) -> None:
    """A forked child ends by itself, however it leaves; the parent's work is not touched."""
    done = run(
        f"""
warnings.simplefilter("ignore")
async def main():
    async with ao.Offload("host", lanes=2, lane_depth=1) as off:
        await off.load(hold, add)
        pinned = await off.pinned(2, np.uint64)
        pinned.array[:] = 0
        word = off.zeros(1, np.uint64)
        await off.drain()
        held = off.launch(hold, grid=1, block=1, args=(np.uint64(pinned.lease.block.device_address),))
        queued = [off.launch(add, grid=1, block=1, args=(word, 1), lane=lane) for lane in off.lanes for _ in range(3)]
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            {leave}
        found = 0
        while not found:
            found, status = os.waitpid(child, os.WNOHANG)
            await asyncio.sleep(0)
        print("child", os.waitstatus_to_exitcode(status), flush=True)
        pinned.array[1] = 1
        print((await off.get(word))[0])
        # A child that closes the loop closes it for both: they share its selector. That is asyncio's affair.
        print("end", flush=True)
        os._exit(0)
sys.exit({LOOPS[loop]})
"""
    )
    check(done)
    assert done.stdout.split()[:3] == ["child", "1" if "KeyError" in leave else "7", "6"]


# -- leaving while kernels that call wait on the host ----------------------------------------


@pytest.mark.parametrize("why", ["no lane", "load", "after", "buffer"])
async def test_left_by_an_exception(device_label: str, why: str) -> None:
    """Launches that call and still wait on the host are cancelled with those that run: none starts any more."""
    called: list[int] = []
    ops: list[ao.Operation[Any]] = []
    off = ao.Offload(device_label, calling_lanes=2)

    async def f(x: int) -> int:
        called.append(x)
        await asyncio.Event().wait()
        return x

    async def submit() -> None:
        off.host_function(f)
        if why != "load":
            await off.load(ask)
        value, report = off.zeros(1, np.int64), off.zeros(2, np.int32)
        for x in range(10):
            args = (x, value, report) if why == "buffer" else (x, off.zeros(1, np.int64), off.zeros(2, np.int32))
            after = ops[-1:] if why == "after" else []
            ops.append(off.launch(ask, grid=1, block=1, args=args, after=after))
        if why != "load":
            await until(lambda: len(called) == (2 if why == "no lane" else 1))

    async def leave() -> None:
        async with asyncio.timeout(10), off:
            await submit()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await leave()
    assert len(called) == {"no lane": 2, "load": 0}.get(why, 1)
    ends = {type(op.exception()) for op in ops}
    assert asyncio.CancelledError in ends
    assert ends <= {asyncio.CancelledError, ao.DependencyError}


async def test_deadline_while_leaving_waits(device_label: str) -> None:
    """A timeout around `async with` that strikes while leaving waits cancels kernels that call; closing goes on."""
    ops: list[ao.Operation[Any]] = []
    off = ao.Offload(device_label)

    async def f(x: int) -> int:
        await asyncio.Event().wait()
        return x

    async def leave() -> None:
        async with asyncio.timeout(None) as deadline, off:
            off.host_function(f)
            ops.append(off.launch(ask, grid=1, block=1, args=(1, off.zeros(1, np.int64), off.zeros(2, np.int32))))
            await until(lambda: off.stats()["calls"]["open"] == 1)
            asyncio.get_running_loop().call_later(0.05, lambda: deadline.reschedule(0))

    with pytest.raises(TimeoutError):
        await leave()
    assert isinstance(await asyncio.wait_for(end_of(ops[0]), 5), asyncio.CancelledError)
    await off.aclose()


@pytest.mark.all_loops
@pytest.mark.parametrize("what", ["cancelled launch", "cancelled load", "load"])
async def test_closed_while_the_channel_is_made(what: str, loop_errors: list[dict[str, Any]]) -> None:
    """Closing waits until the channel that a load has begun is made: the device is not lost by it."""
    lost: list[Exception] = []
    for turns_before in range(6):
        async with ao.Offload("host", on_lost=lost.append) as off:
            if what == "cancelled launch":
                args = (1, off.zeros(1, np.int64), off.zeros(2, np.int32))
                off.launch(ask, grid=1, block=1, args=args).cancel()
            else:
                load = asyncio.ensure_future(off.load(ask))
                await turns(turns_before + 1)
                if what == "cancelled load":
                    load.cancel()
            await turns(turns_before)
        if what == "load":
            await asyncio.gather(load, return_exceptions=True)
        await asyncio.sleep(0.01)
    gc.collect()
    assert lost == []
    assert loop_errors == []


async def test_closing_that_takes_too_long_says_nothing_else(loop_errors: list[dict[str, Any]]) -> None:
    """A deadline that strikes while the device is given back leaves no failure that nobody takes."""
    off = ao.Offload("host")
    async with rig("host", load=False) as other:  # a kernel of it holds maintenance up
        await off.__aenter__()
        gate = await other.hold()
        await off.aclose(0.05)
        gate.open()
        await other.off.drain()
    await asyncio.sleep(0.05)
    gc.collect()
    assert loop_errors == []


@pytest.mark.parametrize("timeout_s", [-1, "a", None, float("nan")], ids=str)
async def test_closing_within_what_is_no_time(timeout_s: Any) -> None:
    """A timeout_s that is no number of seconds is refused, and the Offload stays open."""
    async with rig("host") as r:
        with pytest.raises(ao.UsageError, match="timeout_s"):
            await r.off.aclose(timeout_s)
        await r.launch(nothing)
