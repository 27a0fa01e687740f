"""An Offload of several devices: finds the one for each submission and hands it on to that one's Offload."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from aiooffload.buffer import Buffer
from aiooffload.drivers import labels
from aiooffload.engine.host_functions import HostFunction
from aiooffload.engine.lanes import Lane
from aiooffload.engine.threads import DaemonExecutor
from aiooffload.errors import UsageError
from aiooffload.offload import Offload
from aiooffload.operation import Operation

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from aiooffload.buffer import PinnedArray
    from aiooffload.engine.bound import BoundLaunch
    from aiooffload.engine.engine import Engine
    from aiooffload.engine.submission import After
    from aiooffload.kernel import Kernel

__all__ = ["OffloadGroup"]

_T = TypeVar("_T")
_COUNTERS = ("submitted", "completed", "in_flight", "pending", "buffers", "allocated_bytes")


class OffloadGroup(Offload):
    """Several devices under the running event loop: what ``ao.Offload("cuda:*")`` makes.

    See :class:`aiooffload.Offload` for what a method does, and its ``device`` for where.
    """

    # Empty before it was entered.
    _members: tuple[Offload, ...] = ()

    # -- opening and closing ---------------------------------------------------------------

    async def __aenter__(self) -> Offload:
        if self._loop is not None:
            raise UsageError("this Offload was entered already")
        self._loop = asyncio.get_running_loop()
        members: list[Offload] = []
        try:
            # A thread of its own: a driver that hangs must not keep the interpreter from exiting.
            for label in await self._loop.run_in_executor(DaemonExecutor(), labels, self._device):
                member = Offload(label)
                member._options.update(self._options)
                await member.__aenter__()
                members.append(member)
        except BaseException:
            self._loop = None
            await _all(member.aclose() for member in members)
            raise
        self._members = tuple(members)
        kin = frozenset(engine for _, engine in self._engines())
        for engine in kin:
            engine.submission.kin = kin
        self._state = ""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await _all(member.__aexit__(kind, error, traceback) for member in self._members)
        self._state = self._state or "is closed"

    async def aclose(self, timeout_s: float = 30.0) -> None:
        await _all(member.aclose(timeout_s) for member in self._members)
        if self._members:
            self._state = self._state or "is closed"

    def terminate(self) -> None:
        for member in self._members:
            member.terminate()
        if self._members:
            self._state = self._state or "was terminated"

    # -- which one -------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[Offload, ...]:
        self._check_loop()
        return self._members

    def _check_loop(self) -> None:
        if not self._members:
            raise UsageError(f"this Offload {self._state}")
        self._members[0]._check_loop()

    def _open_engine(self) -> Engine:
        self._check_loop()
        raise UsageError("this is a matter of one device: take one of off.devices")

    def _engines(self) -> list[tuple[Offload, Engine]]:
        found = []
        for member in self._members:
            if member._engine is None:  # in a forked child
                member._check_loop()
            assert member._engine is not None
            found.append((member, member._engine))
        return found

    def _least(self) -> Offload:
        """Return the member with the least work; of several, that with the least memory in use."""
        self._check_loop()

        def work(pair: tuple[Offload, Engine]) -> tuple[int, int]:
            board = pair[1].board
            return board.in_flight + board.pending, pair[1].memory.allocated_bytes

        return min(self._engines(), key=work)[0]

    def _at(self, lane: Lane | None, *operands: object) -> Offload:
        """Return the member that has ``lane``, or the Buffers among ``operands``, or else the least work."""
        self._check_loop()
        if lane is not None:
            return self._with_lane(lane)
        there = {id(operand.allocation.owner): operand for operand in operands if isinstance(operand, Buffer)}
        found = [member for member, engine in self._engines() if id(engine) in there]
        if len(found) > 1:
            where = " and ".join(member.properties.label for member in found)
            raise UsageError(f"the arguments are on {where}: copy them to one device first")
        return found[0] if found else self._least()

    def _with_lane(self, lane: object) -> Offload:
        found = [member for member, engine in self._engines() if engine.lanes.has(lane)]
        if not found:
            raise UsageError(f"{lane!r} is not a lane of this Offload: take one of off.lanes")
        return found[0]

    # -- launching -------------------------------------------------------------------------

    def launch(
        self, kernel: Kernel, *, args: tuple[Any, ...] = (), lane: Lane | None = None, **options: Any
    ) -> Operation[None]:
        return self._at(lane, *args).launch(kernel, args=args, lane=lane, **options)

    def bind(self, kernel: Kernel, *, args: tuple[Any, ...] = (), **options: Any) -> BoundLaunch:
        return self._at(None, *args).bind(kernel, args=args, **options)

    def host_task(
        self, function: Callable[[], Coroutine[Any, Any, _T]], *, after: Iterable[After] = ()
    ) -> Operation[_T]:
        return self._least().host_task(function, after=after)

    def custom_operation(
        self, function: Callable[[Lane], _T], *, lane: Lane | None = None, **options: Any
    ) -> Operation[_T]:
        return self._at(lane).custom_operation(function, lane=lane, **options)

    def launch_graph(self, graph: Any, *, lane: Lane | None = None, **options: Any) -> Operation[None]:
        if lane is None:
            self._open_engine()  # a graph is one device's, and does not say which
        return self._at(lane).launch_graph(graph, lane=lane, **options)

    def gate(self, awaitable: Awaitable[Any], *, lane: Lane, **options: Any) -> Operation[None]:
        return self._at(lane).gate(awaitable, lane=lane, **options)

    def completion(self, stream: Any) -> Operation[None]:
        return self._of_stream(stream).completion(stream)

    def order(self, stream: Any, *, after: Iterable[After]) -> None:
        self._of_stream(stream).order(stream, after=after)

    def _of_stream(self, stream: object) -> Offload:
        if not isinstance(stream, Lane):
            self._open_engine()  # handles 0 to 2 are streams of each device
        return self._with_lane(stream)

    @asynccontextmanager
    async def lease(self, *, priority: int = 0) -> AsyncIterator[Lane]:
        async with self._least().lease(priority=priority) as lane:
            yield lane

    async def load(self, *kernels: Kernel) -> None:
        self._check_loop()
        await _all(member.load(*kernels) for member in self._members)

    def host_function(self, function: Any = None, /, **options: Any) -> Any:
        self._check_loop()

        def register(function: Any) -> Any:
            made = [(engine, HostFunction(function, **options)) for _, engine in self._engines()]
            for engine, one in made:  # all or none
                engine.check_open()
                engine.reverse.check_free(one)
            for engine, one in made:
                engine.reverse.register(one)
            return function

        return register if function is None else register(function)

    # -- memory and copies -----------------------------------------------------------------

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Buffer:
        return self._least().empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Buffer:
        return self._least().zeros(shape, dtype)

    async def pinned(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> PinnedArray:
        return await self._least().pinned(shape, dtype)

    def put(self, array: Any, *, lane: Lane | None = None, **options: Any) -> Operation[Buffer]:
        return self._at(lane).put(array, lane=lane, **options)

    def get(self, buffer: Buffer, *, lane: Lane | None = None, **options: Any) -> Operation[Any]:
        return self._at(lane, buffer).get(buffer, lane=lane, **options)

    def copy(
        self, dst: Any, src: Any, extent: Any = None, *, lane: Lane | None = None, **options: Any
    ) -> Operation[None]:
        place = dst if isinstance(dst, Buffer) else src
        return self._at(lane, place).copy(dst, src, extent, lane=lane, **options)

    def fill(self, buffer: Buffer, value: object, *, lane: Lane | None = None, **options: Any) -> Operation[None]:
        return self._at(lane, buffer).fill(buffer, value, lane=lane, **options)

    # -- the whole -------------------------------------------------------------------------

    async def drain(self) -> None:
        self._check_loop()
        while True:
            await _all(member.drain() for member in self._members)
            if all(engine.quiet for _, engine in self._engines()):  # what ended on one may have gone on on another
                return

    async def room(self) -> None:
        self._check_loop()
        await _all(member.room() for member in self._members)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        self._check_loop()
        return tuple(lane for member in self._members for lane in member.lanes)

    def stats(self) -> dict[str, Any]:
        self._check_loop()
        each = [member.stats() for member in self._members]
        sums = {name: sum(stats[name] for stats in each) for name in _COUNTERS}
        return {"device": self._device, **sums, "devices": each}


async def _all(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all of them to their ends, whatever becomes of one, and raise the first failure."""
    outcomes = await asyncio.gather(*coroutines, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


Offload._of_several = OffloadGroup
