"""Host tasks: coroutines that are steps of the same graph as launches and copies.

A host task starts when everything it comes after is done, and what comes after it waits on the host
until it has returned. It uses no lane.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aiooffload._native import host_steps
from aiooffload.engine.lanes import Lanes
from aiooffload.errors import UsageError
from aiooffload.operation import Operation
from aiooffload.rules.scheduler import dependency_failure, waits_for

if TYPE_CHECKING:
    from contextvars import Context

__all__ = ["HostTasks", "check_no_step"]


def check_no_step(owner: object, what: str) -> None:
    """Raise UsageError in a host task of ``owner`` that is not done: ``what`` would wait for it."""
    for step in _steps():
        if step.owner is owner and not step.finished:
            raise UsageError(f"{what} would wait for {step!r}, which is the host task that asks for it")


def _steps() -> tuple[Operation[Any], ...]:
    """Return the host task that runs, last, and those that submitted it from within."""
    return host_steps.get(())


class HostTasks:
    """Runs the host tasks of one engine.

    Parameters
    ----------
    loop
        The loop that owns the engine.
    lanes
        Holds what has to wait, and what comes after.
    on_finished
        Told when one has ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, lanes: Lanes, on_finished: Callable[[], None]) -> None:
        self._loop = loop
        self._lanes = lanes
        self._on_finished = on_finished
        # Those that run, each with the task that ends it; None where another engine does, for a visit.
        self.running: dict[Operation[Any], asyncio.Task[Any] | None] = {}

    def prepare(
        self, operation: Operation[Any], function: Callable[[], Coroutine[Any, Any, Any]], context: Context
    ) -> None:
        """Let ``operation`` run ``function`` once nothing holds it; UsageError if that is no coroutine function."""
        if not inspect.iscoroutinefunction(function):
            called = ": pass the function, without calling it" if inspect.iscoroutine(function) else ""
            raise UsageError(f"a host task is an async def, not {function!r}{called}")
        self._lanes.on_host[operation] = lambda: self._start(operation, function, context)

    def _start(
        self, operation: Operation[Any], function: Callable[[], Coroutine[Any, Any, Any]], context: Context
    ) -> None:
        failure = dependency_failure(operation)
        if failure is not None:
            self._end(operation, None, failure)
            return
        self._lanes.tell_on_host(operation)
        outer = tuple(step for step in context.run(_steps) if not step.finished)
        context.run(host_steps.set, (*outer, operation))
        coroutine = self._run(operation, function)
        try:
            task = self._loop.create_task(coroutine, name=f"aiooffload {operation.name}", context=context)
        except BaseException as error:  # SystemExit, say, of an eager task's first step, which ends the loop as well
            self.running.pop(operation, None)
            self._end(operation, None, error)
            raise
        self.running[operation] = task
        task.add_done_callback(lambda task: self._ended(operation, task))

    async def _run(self, operation: Operation[Any], function: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        self.running[operation] = asyncio.current_task()  # an eager task runs before whoever creates it has it
        return await function()

    def prepare_visit(self, operation: Operation[Any], begin: Callable[[], None]) -> Callable[[], None]:
        """Let ``operation`` call ``begin`` once nothing holds it; it lasts until what this returns is called."""

        def start() -> None:
            self._lanes.tell_on_host(operation)
            self.running[operation] = None
            begin()

        def leave() -> None:
            if operation in self.running:
                del self.running[operation]
                self._end(operation, None, None)
            else:  # not its turn yet, or the engine has ended it
                self._lanes.stop(operation, asyncio.CancelledError())

        self._lanes.on_host[operation] = start
        return leave

    def _ended(self, operation: Operation[Any], task: asyncio.Task[Any]) -> None:
        del self.running[operation]
        if task.cancelled():
            self._end(operation, None, operation.stop or asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._end(operation, None, error)
        else:
            self._end(operation, task.result(), None)

    def _end(self, operation: Operation[Any], result: Any, failure: BaseException | None) -> None:
        operation.deps = None
        operation.finish(result, failure)
        self._lanes.release_followers(operation)
        self._on_finished()

    def check_wait(self, operation: Operation[Any]) -> None:
        """Raise UsageError in a host task if ``operation`` is that task, or waits for it.

        Tasks that it has started may wait for what comes after it: it need not wait for them.
        """
        task = asyncio.current_task()
        for step in _steps() if task is not None else ():
            if self.running.get(step) is task and waits_for([operation], step, lanes=True):
                raise UsageError(f"awaiting {operation!r} would wait for {step!r}, the host task that awaits it")

    def forget(self, operation: Operation[Any]) -> None:
        """It was refused after all."""
        self._lanes.on_host.pop(operation, None)

    def cancel(self, operation: Operation[Any]) -> None:
        """Cancel the coroutine of a task that runs."""
        task = self.running.get(operation)
        if task is not None:
            task.cancel()

    def abandon(self, failure: BaseException) -> None:
        """The device or the Offload is gone, and with it what would have come after: what runs is cancelled."""
        for operation, task in list(self.running.items()):
            operation.finish(failure=failure)
            if task is None:
                del self.running[operation]
            else:
                task.cancel()
