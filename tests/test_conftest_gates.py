"""The gates of conftest.py catch what they are there for, and blame the right test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Stands in for the library's own count, which must not depend on the library's state here.
FAKE_TESTING = """
import sys, types
live = {}
module = types.ModuleType("aiooffload.testing")
module.live_handles = lambda: live
sys.modules[module.__name__] = module
"""

# One file, run once: each test is followed by a clean one, which must not be blamed.
OFFENDERS = """
import asyncio, os, sys, threading, time, warnings, _thread
import pytest
from fake_testing import live

kept = []

def test_thread():
    event = threading.Event()
    kept.append(event)
    threading.Thread(target=event.wait, name="left-running", daemon=True).start()

def test_raw_thread():
    started, end = _thread.allocate_lock(), _thread.allocate_lock()
    started.acquire()
    end.acquire()
    kept.append(end)
    def body():
        started.release()
        end.acquire()
    _thread.start_new_thread(body, ())
    started.acquire()

def test_descriptor():
    kept.append(os.eventfd(0))

def test_handle():
    live["stream"] = live.get("stream", 0) + 1

def test_warning():
    warnings.warn("something is deprecated", DeprecationWarning)

def test_resource_warning():
    open(os.devnull).fileno()

def test_cycle_with_failing_destructor():
    class Node:
        def __init__(self):
            self.me = self
        def __del__(self):
            raise ValueError("in a destructor")
    Node()

async def test_callback_raises():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)

def test_callback_raises_in_a_loop_of_its_own():
    async def main():
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(0)
    asyncio.run(main())

async def test_failure_never_retrieved():
    asyncio.get_running_loop().create_future().set_exception(ValueError("nobody looked"))

async def test_blocking_call():
    time.sleep(0.001)

async def test_blocking_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=0.001)

@pytest.mark.gpu
def test_gpu_that_skips():
    pytest.skip("the device is busy")

@pytest.mark.slow
def test_slow():
    pass
"""

INNOCENTS = """
import asyncio, os, threading, time
import pytest
from fake_testing import live

@pytest.fixture(scope="module")
def shared():
    live["buffer"] = 1
    descriptor = os.eventfd(0)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    yield
    stop.set()
    thread.join()
    os.close(descriptor)
    live.clear()

def test_shared_fixture_first(shared):
    pass

def test_shared_fixture_again(shared):
    pass

def test_thread_about_to_end():
    threading.Thread(target=time.sleep, args=(0.02,)).start()

async def test_executor_belongs_to_the_loop():
    await asyncio.to_thread(int)

async def test_expected_loop_error(loop_errors):
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0)
    assert isinstance(loop_errors[0]["exception"], ZeroDivisionError)

@pytest.mark.allows_blocking("it is what this test is about")
async def test_blocking_where_allowed():
    time.sleep(0.001)

@pytest.mark.all_loops
async def test_every_loop(loop_kind):
    loop = asyncio.get_running_loop()
    assert loop.get_debug() is (loop_kind == "debug")
    started = []
    async def child():
        started.append(True)
    task = asyncio.create_task(child())
    assert bool(started) is (loop_kind == "eager")
    await task

async def test_one_loop(loop_kind):
    assert loop_kind == "uvloop"
"""

EXPECTED = {
    "thread": "left-running",
    "raw_thread": "threads: 1 that the threading module does not know",
    "descriptor": r"file descriptor: \d+ -> anon_inode:\[eventfd\]",
    "handle": "handle: 1 x stream",
    "warning": "DeprecationWarning: something is deprecated",
    "resource_warning": "ResourceWarning: unclosed file",
    "cycle_with_failing_destructor": r"unraisable: ValueError\('in a destructor'\)",
    "callback_raises": "event loop: Exception in callback",
    "callback_raises_in_a_loop_of_its_own": "event loop: Exception in callback",
    "failure_never_retrieved": "event loop: Future exception was never retrieved",
    "blocking_call": "BlockingError: Blocking call to time.sleep",
    "blocking_lock": "BlockingError: Blocking call to lock.acquire",
}


def run_pytest(folder: Path, *arguments: str) -> str:
    """Run the files of ``folder`` under this project's conftest and settings; return the output."""
    (folder / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), "-p", "no:randomly", "-p", "fake_testing"]
    command = [sys.executable, "-m", "pytest", *settings, "-p", "no:cacheprovider", *arguments, str(folder)]
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=50, check=False
    ).stdout


def sections(output: str) -> dict[str, str]:
    """Split pytest's output into one text per failed test."""
    parts = re.split(r"^_+ (?:ERROR at (?:setup|teardown) of )?test_(\w+) _+$", output, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.fixture(scope="module")
def offenders(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("offenders")
    (folder / "fake_testing.py").write_text(FAKE_TESTING)
    (folder / "test_offenders.py").write_text(with_innocent_after_each(OFFENDERS))
    return run_pytest(folder, "--tb=short", "--require-gpu")


def with_innocent_after_each(source: str) -> str:
    """Put a test that does nothing behind every test of ``source``."""
    head, *tests = re.split(r"\n\n(?=def test_|async def test_|@)", source)
    pairs = [f"{test.rstrip()}\n\ndef test_innocent_{number}():\n    pass\n" for number, test in enumerate(tests)]
    return "\n\n".join([head, *pairs])


@pytest.mark.parametrize("name", EXPECTED)
def test_offender_fails_with_its_reason(offenders: str, name: str) -> None:
    """Each kind of offence fails the test that commits it, and says what it was."""
    assert re.search(EXPECTED[name], sections(offenders)[name])


def test_nobody_else_is_blamed(offenders: str) -> None:
    """A test that follows an offender passes."""
    assert {name for name in sections(offenders) if name.startswith("innocent")} == set()


def test_required_gpu_turns_a_skip_into_a_failure(offenders: str) -> None:
    """With --require-gpu a skipped GPU test fails, whatever the reason of the skip."""
    assert re.search("--require-gpu, but: .+", sections(offenders)["gpu_that_skips"])


def test_slow_tests_are_left_out(offenders: str) -> None:
    """Without --slow a slow test is not run."""
    assert "1 deselected" in offenders


def test_innocents_pass(tmp_path: Path) -> None:
    """Shared fixtures, ending threads, executors, expected errors and every kind of loop pass."""
    (tmp_path / "fake_testing.py").write_text(FAKE_TESTING)
    (tmp_path / "test_innocents.py").write_text(INNOCENTS)
    output = run_pytest(tmp_path)
    loops = 3 if sys.version_info >= (3, 12) else 2
    assert f"{7 + loops} passed in" in output, output
    assert "failed" not in output


def test_gpu_test_is_skipped_with_a_reason_where_there_is_no_gpu(tmp_path: Path) -> None:
    """Where the driver is missing, a GPU test is skipped and the reason names it."""
    (tmp_path / "fake_testing.py").write_text(FAKE_TESTING)
    (tmp_path / "test_gpu.py").write_text(
        "import conftest, pytest\n"
        "conftest.why_no_gpu = lambda: 'no NVIDIA driver'\n"
        "@pytest.mark.gpu\ndef test_gpu(): raise AssertionError\n"
    )
    assert "SKIPPED [1]" in (output := run_pytest(tmp_path))
    assert "no NVIDIA driver" in output
