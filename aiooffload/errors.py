"""Every exception that aiooffload raises.

::

    OffloadError
    +-- UsageError               the call is wrong; nothing was submitted, go on using the Offload
    |   +-- ClosedError          the Offload, buffer or lane was closed, by you
    +-- WouldBlock               the submission would have to wait, and you asked it not to
    +-- DependencyError          an operation this one waited for failed; it never started
    +-- DriverError              the driver refused or failed; read .operation .status .code .lane
    |   +-- DeviceUnavailableError   no such device, no driver, or one that cannot be used
    |   +-- OutOfMemoryError         also a MemoryError; retry after freeing, nothing was lost
    |   +-- LaunchError              this kernel could not run or raised; others are not concerned
    |   +-- CompileError             the source does not compile; read .log
    |   +-- DeviceLostError          the device is gone for this process; read .suspects
    +-- HostFunctionError        a coroutine called by a kernel raised; it is the cause
    +-- OffloadTimeout           also a TimeoutError

``asyncio.CancelledError`` is never wrapped.
"""

from __future__ import annotations

from typing import Final

__all__ = [
    "ClosedError",
    "CompileError",
    "DependencyError",
    "DeviceLostError",
    "DeviceUnavailableError",
    "DriverError",
    "HostFunctionError",
    "LaunchError",
    "OffloadError",
    "OffloadTimeout",
    "OutOfMemoryError",
    "UsageError",
    "WouldBlock",
]


class OffloadError(Exception):
    """Base of everything that aiooffload raises."""


class UsageError(OffloadError):
    """The call itself is wrong. Nothing was submitted and the Offload stays usable."""


class ClosedError(UsageError):
    """The object was closed by its owner and can no longer be used."""


class WouldBlock(OffloadError):
    """The submission would have to wait on the host. Nothing was submitted."""


class DependencyError(OffloadError):
    """An operation named in ``after`` failed, so this one never started. The failure is the cause."""

    # Where a chain of them began. Kept, since following the causes of each would make a long chain quadratic.
    root: BaseException | None = None


class DriverError(OffloadError):
    """The driver refused a call or failed.

    Parameters
    ----------
    message
        What went wrong, and what to do about it where that is known.
    operation
        The driver call, as the driver names it, such as ``"cuLaunchKernel"``.
    status
        The driver's name of its status, such as ``"CUDA_ERROR_INVALID_VALUE"``.
    code
        The driver's number of its status; 0 where no driver was involved.
    lane
        Index of the lane concerned, if one was.
    """

    def __init__(
        self,
        message: str,
        *,
        operation: str = "",
        status: str = "",
        code: int = 0,
        lane: int | None = None,
    ) -> None:
        super().__init__(message)
        self.operation: Final = operation
        self.status: Final = status
        self.code: Final = code
        self.lane = lane


class DeviceUnavailableError(DriverError):
    """No such device, no driver for it, or a driver that cannot be used."""


class OutOfMemoryError(DriverError, MemoryError):
    """The device or the pinned host memory is exhausted. Free something and try again."""


class LaunchError(DriverError):
    """A kernel could not be started, or a host kernel raised (then its exception is the cause)."""


class CompileError(DriverError):
    """The source does not compile, or the module has no such kernel. ``log`` is the compiler's."""

    def __init__(self, message: str, *, log: str = "", operation: str = "", status: str = "", code: int = 0) -> None:
        super().__init__(message, operation=operation, status=status, code=code)
        self.log: Final = log


class DeviceLostError(DriverError):
    """The device faulted. No GPU can be used by this process again.

    ``suspects`` names the launches that had not finished, oldest first per lane.
    """

    def __init__(
        self,
        message: str,
        *,
        suspects: tuple[str, ...] = (),
        operation: str = "",
        status: str = "",
        code: int = 0,
        lane: int | None = None,
    ) -> None:
        super().__init__(message, operation=operation, status=status, code=code, lane=lane)
        self.suspects: Final = suspects


class HostFunctionError(OffloadError):
    """A host function called by a kernel failed. Its exception is the cause, if there is one.

    A host function may raise it to choose the ``code`` that its kernel gets, 1 to 2**31 - 1; for any
    other code and any other exception that is -1. The negative ones are ``aiooffload.rules.wire.Code``.
    """

    def __init__(self, message: str, *, code: int = -1) -> None:
        super().__init__(message)
        self.code: Final = code


class OffloadTimeout(OffloadError, TimeoutError):
    """The time given with ``timeout_s`` passed before the operation was done."""
