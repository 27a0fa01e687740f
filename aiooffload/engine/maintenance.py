"""The barrier for driver calls that wait for everything in flight.

Loading code, unregistering memory and synchronous frees wait until the device is idle, and some
of them block every other thread's launches meanwhile. So they run when nothing of ours is in
flight in the whole process, and nothing of ours starts until they have returned. The barrier
spans all Offloads of the process, whatever loop or thread they belong to.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol, TypeVar

__all__ = ["Barrier", "Participant", "barrier"]

_T = TypeVar("_T")
_LOOK_AGAIN_S: Final = 0.05


class Participant(Protocol):
    """What the barrier asks of an engine."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that owns it."""

    def pause(self, idle: Callable[[], None]) -> None:
        """Start nothing new and call ``idle`` once nothing is in flight. On its loop."""

    def resume(self) -> None:
        """Go on. On its loop."""

    def settle_pauses(self) -> None:
        """Begin the pauses that wait until no kernel that calls is on any device, if so. On its loop."""


class Barrier:
    """One maintenance call at a time, with every participant idle."""

    def __init__(self) -> None:
        # Guards those below; never held while waiting.
        self._lock = threading.Lock()
        self._calling: dict[asyncio.AbstractEventLoop, int] = {}  # none with 0
        self._participants: dict[Participant, None] = {}
        # Whoever is first has its turn; the others wait for theirs, each on its own loop.
        self._turns: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()

    def join(self, participant: Participant) -> None:
        """From now on maintenance waits for ``participant``."""
        with self._lock:
            self._participants[participant] = None

    def leave(self, participant: Participant) -> None:
        """``participant`` closed."""
        with self._lock:
            self._participants.pop(participant, None)

    def count(self) -> int:
        """Return how many participants there are."""
        return len(self._participants)

    @property
    def calling(self) -> int:
        """How many kernels that call are on devices of this process.

        No pause takes hold before they are over: their host functions may need any of the participants. Those of a
        loop that does not run have none.
        """
        return sum(count for loop, count in list(self._calling.items()) if loop.is_running())

    def count_calling(self, change: int, here: asyncio.AbstractEventLoop) -> None:
        """So many more kernels that call are on a device. When there are none, pauses that were asked for begin."""
        with self._lock:
            count = self._calling.pop(here, 0) + change
            if count:
                self._calling[here] = count
            participants = [] if self.calling else list(self._participants)
        for participant in participants:
            _call(participant, here, participant.settle_pauses)

    def after_fork(self) -> list[Participant]:
        """Forget the parent's participants, of which the child has copies that do nothing; return them."""
        inherited = list(self._participants)
        self.__init__()  # type: ignore[misc]  # the lock may be held by a thread that the child does not have
        return inherited

    async def run(self, call: Callable[[], _T], executor: Executor) -> _T:
        """Run ``call`` on ``executor`` while nothing is in flight; returns or raises its outcome."""
        async with self.alone():
            # Shielded: the call cannot be stopped, and nothing may start before it has returned.
            work = asyncio.get_running_loop().run_in_executor(executor, call)
            cancelled: asyncio.CancelledError | None = None
            while not work.done():
                try:
                    await asyncio.wait([work])
                except asyncio.CancelledError as error:
                    cancelled = error
            if cancelled is not None:
                if not work.cancelled():
                    work.exception()  # seen: the cancellation is what the caller gets
                raise cancelled
            return work.result()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Wait for the caller's turn, and until nothing is in flight; nothing starts before the end."""
        loop = asyncio.get_running_loop()
        turn = (loop, loop.create_future())
        with self._lock:
            self._turns.append(turn)
        try:
            while not self._is_first(turn):
                await asyncio.wait([turn[1]], timeout=_LOOK_AGAIN_S)
            async with self._all_paused(loop):
                yield
        finally:
            self._pass_on(turn)

    @asynccontextmanager
    async def _all_paused(self, loop: asyncio.AbstractEventLoop) -> AsyncIterator[None]:
        with self._lock:
            participants = list(self._participants)
        paused: dict[Participant, asyncio.Future[None]] = {}
        try:
            for participant in participants:
                future: asyncio.Future[None] = loop.create_future()
                if _pause(participant, loop, partial(_resolve, loop, future)):
                    paused[participant] = future
            for participant, future in paused.items():
                await self._until_idle(participant, future)
            yield
        finally:
            for participant in paused:
                _call(participant, loop, participant.resume)

    async def _until_idle(self, participant: Participant, idle: asyncio.Future[None]) -> None:
        """Wait for ``idle``, unless the participant closes or its loop ends before it could say so."""
        while not idle.done():
            await asyncio.wait([idle], timeout=_LOOK_AGAIN_S)
            if participant not in self._participants or not participant.loop.is_running():
                return
            # Nobody says so when a loop ends that has left kernels which call.
            if not idle.done() and not self.calling:
                _call(participant, asyncio.get_running_loop(), participant.settle_pauses)

    def _is_first(self, turn: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> bool:
        """Whether it is this one's turn. Whoever is before it on a loop that does not run is passed over."""
        with self._lock:
            while self._turns[0] is not turn and not self._turns[0][0].is_running():
                self._turns.popleft()
            return self._turns[0] is turn

    def _pass_on(self, turn: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]) -> None:
        with self._lock:
            if turn in self._turns:  # unless it was passed over
                self._turns.remove(turn)
            following = self._turns[0] if self._turns else None
        if following is not None:
            _resolve(*following)


def _pause(participant: Participant, here: asyncio.AbstractEventLoop, idle: Callable[[], None]) -> bool:
    """Ask for a pause; False if the participant's loop is not running.

    Then its engine starts nothing, since that takes a running loop; what it has in flight, the
    maintenance call itself waits for.
    """
    if participant.loop is not here and not participant.loop.is_running():
        return False
    return _call(participant, here, partial(participant.pause, idle))


def _call(participant: Participant, here: asyncio.AbstractEventLoop, call: Callable[[], object]) -> bool:
    """Run ``call`` on the participant's loop, in the order of asking; False if that loop is closed."""
    if participant.loop is here:
        call()
        return True
    try:
        participant.loop.call_soon_threadsafe(call)
    except RuntimeError:
        return False
    return True


def _resolve(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    """Resolve a future of ``loop`` from any thread."""

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    try:
        loop.call_soon_threadsafe(resolve)
    except RuntimeError:
        return  # that loop was closed: nobody waits there any more


barrier: Final = Barrier()
"""The barrier of this process."""
