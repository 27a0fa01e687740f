"""Threads for calls that may wait for a device, which must not keep the interpreter from exiting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

__all__ = ["DaemonExecutor"]

_T = TypeVar("_T")


class DaemonExecutor(Executor):
    """A daemon thread for each call.

    A pool's threads are joined when the interpreter exits. One that waits in the driver for a
    kernel that never ends would then hang the process, although its exit is what ends the kernel.
    """

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> Future[_T]:
        """Run ``fn`` on a new thread."""
        future: Future[_T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:  # the future's, like everything that a call raises
                future.set_exception(error)

        threading.Thread(target=run, name="aiooffload-call", daemon=True).start()
        return future
