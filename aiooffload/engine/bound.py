"""A launch that is checked and packed once and submitted many times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from aiooffload import _native
from aiooffload.buffer import Buffer
from aiooffload.errors import UsageError

if TYPE_CHECKING:
    from aiooffload._native import Launcher
    from aiooffload.engine.lanes import Lane
    from aiooffload.engine.launches import Site
    from aiooffload.engine.submission import After
    from aiooffload.kernel import Kernel
    from aiooffload.operation import Operation

__all__ = ["BoundLaunch", "bind"]

LongWay = Callable[[tuple[Any, ...], "Lane | None", "Iterable[After]", bool], "Operation[None]"]


class BoundLaunch(_native.BoundLaunch):
    """A kernel with its geometry and its arguments. Made by ``off.bind``; each call launches it.

    ``bound(*, lane=None, after=(), coarse=False, **changed)`` returns the Operation of a launch. ``lane``,
    ``after`` and ``coarse`` are those of ``off.launch``. Anything else is another value of a scalar, for this
    launch alone, by the name that its parameter has in the kernel's host implementation: ``bound(a=3.0)``.

    Attributes
    ----------
    arguments
        What it was bound to, as it was given: one per parameter.

    Raises
    ------
    UsageError
        No parameter has that name or it is a buffer, the value does not fit, ``lane`` is none of this
        Offload's, or it is called on another loop or thread. Nothing was submitted.
    ClosedError
        The Offload or one of the buffers was closed. Nothing was submitted.
    WouldBlock
        ``max_pending`` operations wait on the host (then ``await off.room()``).
    DeviceLostError
        The device is gone.

    Notes
    -----
    *Ordering.* That of ``off.launch``: after everything submitted earlier that shares a buffer, unless both
    only read it. It costs next to nothing while one lane's order is enough.
    *Lifetime.* It holds its arguments. Closing a buffer frees the memory all the same, once nothing in
    flight uses it.
    *Parameters named lane, after or coarse* cannot be changed: those are the call's own.
    *Thread.* The Offload's loop.
    """

    __slots__ = ("__weakref__", "_kernel")

    if TYPE_CHECKING:
        _kernel: Kernel

        def __call__(
            self, *, lane: Lane | None = None, after: Iterable[After] = (), coarse: bool = False, **changed: Any
        ) -> Operation[None]: ...

    def __repr__(self) -> str:
        return f"<aiooffload.BoundLaunch {self._kernel.name}>"


def bind(launcher: Launcher, kernel: Kernel, site: Site, args: tuple[Any, ...], launch: LongWay) -> BoundLaunch:
    """Return the bound launch of arguments whose buffers were checked; ``launch`` is the long way.

    Raises UsageError for other arguments that do not fit.
    """
    prepared = site.prepare(args)
    names = _changeable(kernel, args)

    def long_way(
        *, lane: Lane | None = None, after: Iterable[After] = (), coarse: bool = False, **changed: Any
    ) -> Operation[None]:
        values = list(args)
        for name, value in changed.items():
            if name not in names:
                raise UsageError(f"a call of bound kernel {kernel.name} may change {_listed(names)}, not {name}")
            values[names[name]] = value
        return launch(tuple(values), lane, after, coarse)

    long_way.__qualname__ = f"bound {kernel.name}"  # as Python's own messages of wrong arguments name it
    letters = kernel.signature.letters if kernel.signature.parameters is not None else b"?" * len(args)
    packed = prepared if isinstance(prepared, bytes) else None  # what the host device takes serves one launch
    bound = BoundLaunch(launcher, site.native, args, letters, names, packed, long_way)
    bound._kernel = kernel
    return bound


def _changeable(kernel: Kernel, args: tuple[Any, ...]) -> dict[str, int]:
    """Return the index of each scalar among the arguments by its parameter's name."""
    return {
        parameter.name: index
        for index, (parameter, value) in enumerate(zip(kernel.signature.parameters or (), args, strict=False))
        if not isinstance(value, Buffer) and parameter.name not in ("lane", "after", "coarse")
    }


def _listed(names: dict[str, int]) -> str:
    return f"only {', '.join(names)}" if names else "nothing"
