"""Kernels of the host device: a Python function, called once per launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from aiooffload._native import LaunchPlan
from aiooffload.drivers.api import CallParameter, KernelSource
from aiooffload.drivers.host.launch import HostLaunch
from aiooffload.errors import LaunchError, UsageError

__all__ = ["HostFunction", "host_implementation"]


def host_implementation(kernel: KernelSource) -> Callable[..., object]:
    """Return the kernel's host function; raises UsageError if it has none."""
    function: Callable[..., object] | None = kernel.host_function
    if function is None:
        raise UsageError(
            f"kernel {kernel.name!r} has no host implementation: put @kernel(cuda=...) on a Python function"
            " that does the same work, or run it on a CUDA device"
        )
    return function


def _guarded(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """Return a Python function that does the same, and whose failures are LaunchErrors.

    It is a Python function even around one written in C: a stream keeps the interpreter from one
    kernel to the next, and offers it to others at the entry of a Python function alone.
    """

    def run(launch: HostLaunch, *arguments: object) -> None:
        try:
            function(launch, *arguments)
        except BaseException as error:  # SystemExit too: it must end neither the stream nor the program
            launch.end()
            try:
                said = f"{type(error).__name__}: {error}"
            except BaseException:  # a __str__ of the program's own
                said = object.__repr__(error)
            raise LaunchError(f"kernel {name} raised {said}", operation="launch") from error
        launch.end()

    return run


class HostFunction:
    """A loaded kernel. Its plans may be used on every stream of the device."""

    __slots__ = ("_callable", "_name", "_read_only")

    def __init__(self, name: str, callable: Callable[..., object], signature: Any = None) -> None:
        self._name: Final = name
        self._callable: Final = _guarded(name, callable)
        self._read_only: Final[Callable[[int], bool]] = (lambda _: False) if signature is None else signature.read_only

    @property
    def parameter_sizes(self) -> tuple[int, ...] | None:
        """None: a Python function takes any size."""
        return None

    def plan(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        cluster: tuple[int, int, int] | None,
        cooperative: bool,
    ) -> LaunchPlan:
        """Return the launch plan of this geometry; every one can run."""
        return LaunchPlan(self._name, 0, self._callable, grid, block, shared_bytes, cluster, cooperative)

    def prepare(
        self, plan: LaunchPlan, arguments: Sequence[Any], calls: CallParameter | None = None
    ) -> tuple[Any, ...]:
        """Return the function's arguments for one launch: a HostLaunch, then arrays and scalars.

        Buffers become views, read-only where the signature says so. The tuple serves one launch
        only, since the HostLaunch in it is that launch's.
        """
        read_only = self._read_only
        return (
            HostLaunch(plan.grid, plan.block, plan.shared_bytes, calls),
            *[
                value if isinstance(value, np.generic) else value.host_view(read_only(i))
                for i, value in enumerate(arguments)
            ],
        )
