"""Threads that do not keep the interpreter from exiting."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from aiooffload.engine.threads import DaemonExecutor


def test_outcomes() -> None:
    """A call's result or exception becomes the future's, and it runs on a daemon thread of its own."""
    executor = DaemonExecutor()
    here = threading.get_ident()
    assert executor.submit(lambda a, b: a + b, 1, b=2).result(5) == 3
    with pytest.raises(ZeroDivisionError):
        executor.submit(lambda: 1 / 0).result(5)
    thread = executor.submit(threading.current_thread).result(5)
    assert thread.daemon
    assert thread.ident != here


def test_calls_do_not_wait_for_each_other() -> None:
    """A call that waits holds up no other."""
    executor, event = DaemonExecutor(), threading.Event()
    waiting = executor.submit(event.wait, 5)
    assert executor.submit(lambda: "done").result(5) == "done"
    assert not waiting.done()
    event.set()
    assert waiting.result(5)


def test_exit_does_not_wait_for_a_call() -> None:
    """The interpreter exits while a call still waits."""
    code = (
        "import threading; from aiooffload.engine.threads import DaemonExecutor; "
        "DaemonExecutor().submit(threading.Event().wait, 60); print('end')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "end\n"
