"""What every test runs under: the loops, the GPU rules and the gates that fail a test for what it leaves behind.

A test fails if, beside its own assertions,

* anything warned (``filterwarnings`` in pyproject.toml), or an exception went to nobody,
* an event loop's exception handler was called, unless the test put its own in place (``loop_errors``),
* a call on the loop's thread could block (``blockbuster``),
* a thread, a file descriptor or a handle of the library outlives it, after a garbage collection.

Async tests run on uvloop; those marked ``all_loops`` run on asyncio in debug mode, uvloop and, from
Python 3.12, asyncio with eager tasks. ``gpu`` tests are skipped only where there is no device,
``slow`` ones unless ``--slow`` is given. The gates are tested in ``test_conftest_gates.py``.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import functools
import gc
import importlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import pytest
import uvloop
from blockbuster import BlockBuster

THREAD_GRACE_S = 1.0
"""How long a thread that is about to end may take to do so after its test."""

MARKS = (
    "gpu: needs an NVIDIA GPU; skipped where there is none, a failure there with --require-gpu",
    "slow: only run with --slow",
    "all_loops: run on every kind of event loop, not on uvloop alone",
    "allows_blocking(reason): calls on the loop's thread may block in this test",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("aiooffload")
    group.addoption("--slow", action="store_true", help="also run the tests marked slow")
    group.addoption("--require-gpu", action="store_true", help="a GPU test that is skipped fails")


def pytest_configure(config: pytest.Config) -> None:
    for mark in MARKS:
        config.addinivalue_line("markers", mark)
    # A time limit per example says more about the machine than about the code; pytest-timeout has one per test.
    hypothesis.settings.register_profile("fast", deadline=None, max_examples=50)
    hypothesis.settings.register_profile("slow", deadline=None, max_examples=1000)
    hypothesis.settings.load_profile("slow" if config.getoption("--slow") else "fast")
    config.pluginmanager.register(Gates(), "aiooffload-gates")


# Event loops. The hook below is pytest-asyncio's.


class DebugLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in debug mode, which stays on although asyncio.Runner turns it off."""

    def set_debug(self, enabled: bool) -> None:
        super().set_debug(True)


def eager_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.SelectorEventLoop()
    loop.set_task_factory(asyncio.eager_task_factory)
    return loop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"uvloop": uvloop.new_event_loop}
    if item.get_closest_marker("all_loops"):
        factories["debug"] = DebugLoop
        if sys.version_info >= (3, 12):
            factories["eager"] = eager_loop
    return factories


@pytest.fixture
async def loop_kind() -> str:
    """The kind of loop the test runs on: ``"uvloop"``, ``"debug"`` or ``"eager"``."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, DebugLoop):
        return "debug"
    return "eager" if loop.get_task_factory() else "uvloop"


@pytest.fixture
async def loop_errors() -> list[dict[str, Any]]:
    """What the loop's exception handler is given, for a test that expects something there."""
    contexts: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: contexts.append(context))
    return contexts


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Without the cyclic collector: what is dropped has to go by itself."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# Devices.


@pytest.fixture(scope="session")
def driver_is_up() -> None:
    """Open the GPU's driver once; what it keeps open from then on is no test's leak."""
    from tests.gpu.support import open_driver

    open_driver()


@pytest.fixture(autouse=True)
def _driver_opened_before(request: pytest.FixtureRequest) -> None:
    """Before a GPU test, whichever of them is the first."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("driver_is_up")


# In another process, since a driver reads its environment once, when it is initialised.
PROBE = """
import ctypes
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError:
    print("no NVIDIA driver (libcuda.so.1)")
else:
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    # A stub of the driver, or no device. Any other failure is a broken driver, which is no reason to skip.
    if status in (34, 100) or not (status or count.value):
        print("the NVIDIA driver has no device")
"""


@functools.cache
def why_no_gpu() -> str:
    """Return why there is no GPU to test on; an empty string if there is one."""
    return subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(params=["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device_label(request: pytest.FixtureRequest) -> str:
    """A device as ``Offload`` takes it; a test that uses it runs once on each."""
    return str(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    if gpu and (reason := why_no_gpu()):
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.get_closest_marker("gpu") and item.config.getoption("--require-gpu"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome, report.longrepr = "failed", f"--require-gpu, but: {reason}"
    return report


# Gates.

FAILED = pytest.StashKey[bool]()


def descriptors() -> set[str]:
    """Return the open file descriptors and what they stand for, less what a GPU driver opens for good."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
    return {entry for entry in found if "/dev/nvidia" not in entry}


@functools.cache
def handle_counter() -> Callable[[], Mapping[str, int]]:
    """Return the library's own count of live handles by kind, if it has one."""
    try:
        return importlib.import_module("aiooffload.testing").live_handles
    except (ImportError, AttributeError):
        return dict


@dataclass
class Resources:
    """What a test might leave behind."""

    threads: set[threading.Thread] = field(default_factory=lambda: set(threading.enumerate()))
    thread_count: int = field(default_factory=_thread._count)  # has those that threading does not know, too
    descriptors: set[str] = field(default_factory=descriptors)
    handles: Counter[str] = field(default_factory=lambda: Counter(handle_counter()()))

    def absorb_growth(self, before: Resources, after: Resources) -> None:
        """Accept what came between ``before`` and ``after``."""
        self.threads |= after.threads - before.threads
        self.thread_count += after.thread_count - before.thread_count
        self.descriptors |= after.descriptors - before.descriptors
        self.handles += after.handles - before.handles

    def leaks(self) -> list[str]:
        """Return what is there now and was not when this was taken."""
        deadline = time.monotonic() + THREAD_GRACE_S
        for thread in set(threading.enumerate()) - self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        while _thread._count() > self.thread_count and time.monotonic() < deadline:
            time.sleep(0.001)
        now = Resources()
        found = [f"thread: {thread!r}" for thread in now.threads - self.threads]
        if not found and now.thread_count > self.thread_count:
            found.append(f"threads: {now.thread_count - self.thread_count} that the threading module does not know")
        found += [f"file descriptor: {entry}" for entry in now.descriptors - self.descriptors]
        found += [f"handle: {count} x {kind}" for kind, count in (now.handles - self.handles).items()]
        return found


class LoopErrors(logging.Handler):
    """Collects what any loop's default exception handler reports: it logs, on every kind of loop."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.setFormatter(logging.Formatter("event loop: %(message)s"))
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


@contextlib.contextmanager
def unraisable_into(texts: list[str]) -> Iterator[None]:
    """Collect exceptions that nobody can receive, such as those of destructors."""
    previous = sys.unraisablehook
    sys.unraisablehook = lambda args: texts.append(f"unraisable: {args.exc_value!r} in {args.object!r}")
    try:
        yield
    finally:
        sys.unraisablehook = previous


class Gates:
    """The pytest plugin that holds a test responsible for what is left when its fixtures are gone."""

    def __init__(self) -> None:
        self.loop_errors = LoopErrors()
        self.blocking = BlockBuster()
        # The end of a loop joins the thread that has joined those of its executor.
        self.blocking.functions["threading.Lock.acquire"].can_block_in("asyncio/runners.py", "close")
        self.baseline: Resources | None = None
        self.shared_depth = 0

    def pytest_sessionstart(self) -> None:
        logging.getLogger("asyncio").addHandler(self.loop_errors)
        self.blocking.activate()
        # libuv opens a pipe for signals with the first loop of a process and keeps it.
        uvloop.new_event_loop().close()

    def pytest_unconfigure(self) -> None:
        logging.getLogger("asyncio").removeHandler(self.loop_errors)
        self.blocking.deactivate()

    def pytest_collection_finish(self) -> None:
        gc.collect()
        gc.freeze()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        if item.get_closest_marker("allows_blocking"):
            self.blocking.deactivate()
        self.loop_errors.texts.clear()
        self.baseline = Resources()
        yield

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Let a fixture that several tests share keep what it opens."""
        if fixturedef.scope == "function":
            return (yield)
        before = Resources()
        self.shared_depth += 1
        try:
            return (yield)
        finally:
            self.shared_depth -= 1
            if self.baseline and not self.shared_depth:
                self.baseline.absorb_growth(before, Resources())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        try:
            yield
        finally:
            self.blocking.activate()
        # The traceback of a failed test keeps alive what its frames hold.
        if self.baseline is None or item.stash.get(FAILED, False):
            return
        problems: list[str] = []
        with unraisable_into(problems):
            getattr(item, "funcargs", {}).clear()  # the fixtures are over: what they gave is held for nobody
            gc.collect()
            leaks = self.baseline.leaks()
            if leaks:  # what a thread held that was just ending when the collector came: it has been waited for
                gc.collect()
                leaks = self.baseline.leaks()
        # What is left now is pytest's and of imports, and stays: without it the next test's collection is cheap.
        gc.freeze()
        problems += leaks
        problems += self.loop_errors.texts
        if problems:
            pytest.fail("left behind by the test:\n" + "\n".join(problems), pytrace=False)
