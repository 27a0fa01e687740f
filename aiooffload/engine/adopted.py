"""Streams of somebody else, used as lanes.

Nothing is kept on the host for such a lane, since that would come after what its owner enqueues
meanwhile. It has a slot of its own, which is used again once the lane was released and everything
of ours on it is done. The stream is never destroyed and never synchronised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aiooffload.engine.lanes import Lane
from aiooffload.errors import DeviceLostError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiooffload._native import Board, LaneQueue, Word
    from aiooffload.drivers.api import Device, Event, Stream
    from aiooffload.engine.lanes import Lanes

__all__ = ["AdoptedLane", "Adoptions", "check_stream", "handle_of"]


def handle_of(stream: object) -> int:
    """Return the handle of a stream of any library; raises UsageError.

    ``__cuda_stream__`` is a method, or an attribute in older libraries, that gives (0, handle);
    torch before 2.9 and CuPy before 14 have ``cuda_stream`` and ``ptr``. An integer is a handle.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        version, handle = protocol() if callable(protocol) else protocol
        if version != 0:
            raise UsageError(f"{stream!r} speaks version {version} of __cuda_stream__, version 0 is known")
    else:
        handle = next((getattr(stream, name) for name in ("cuda_stream", "ptr") if hasattr(stream, name)), stream)
    if type(handle) is not int or handle < 0:
        raise UsageError(f"expected a stream (an object with __cuda_stream__, or a handle), not {stream!r}")
    return handle


def check_stream(stream: Stream) -> None:
    """Raise UsageError while ``stream`` captures a graph."""
    if stream.capturing():
        raise UsageError(f"stream {stream.handle:#x} is capturing a graph: what is enqueued would not run")


class AdoptedLane(Lane):
    """A stream of somebody else. It holds ``owner``, so that the stream lives as long."""

    __slots__ = ("_give_back", "owner")

    def __init__(
        self,
        index: int,
        stream: Stream,
        queue: LaneQueue,
        create_event: Callable[[], Event],
        on_lost: Callable[[DeviceLostError], None],
        give_back: Callable[[AdoptedLane], None],
        owner: object,
    ) -> None:
        super().__init__(index, stream, queue, create_event, on_lost, adopted=True)
        self._give_back = give_back
        self.owner = owner

    def let_go(self) -> None:
        """Hold the owner no longer than what is on the stream: a released lane stays until it is used again."""
        for last in self.queue.operations()[-1:]:
            last.keep = (last.keep, self.owner)
        self.owner = None

    def release(self) -> None:
        """Stop using the stream."""
        self._give_back(self)

    def enqueue_wait_for(self, sequence: int, waiter: Stream) -> None:
        """Hold later work of ``waiter``; raises UsageError where that would draw it into a graph."""
        if self._positions.at_or_after(sequence) is None:  # an event has to be recorded
            check_stream(self.stream)
        super().enqueue_wait_for(sequence, waiter)


class Adoptions:
    """The adopted streams of one engine.

    Parameters
    ----------
    device
        Knows streams by their handle.
    lanes, board
        Where the lanes go.
    bell
        What every mark rings.
    word
        Returns a new slot in registered memory.
    depth
        How many operations of ours such a lane takes at a time.
    on_lost
        Told when the driver says that the device is gone.
    """

    def __init__(
        self,
        device: Device,
        lanes: Lanes,
        board: Board,
        bell: Word,
        word: Callable[[], Word],
        depth: int,
        on_lost: Callable[[DeviceLostError], None],
    ) -> None:
        self._device: Final = device
        self._lanes: Final = lanes
        self._board: Final = board
        self._bell: Final = bell
        self._word: Final = word
        self._depth: Final = depth
        self._on_lost: Final = on_lost
        # By handle, of which a default stream may have two; and how often each was adopted and not released.
        self._known: dict[int, AdoptedLane] = {}
        self._uses: dict[AdoptedLane, int] = {}
        # Those whose queue is taken for the next adoption, once nothing on it is in flight.
        self._released: list[AdoptedLane] = []

    def adopt(self, stream: object, owner: object) -> Lane:
        """Return the lane of a stream; one that is a lane already stays that lane.

        Raises UsageError if it is no stream, is capturing, or belongs to another context.
        """
        handle = handle_of(stream)
        ours = next((lane for lane in self._lanes.open if lane.handle == handle), None)
        if ours is not None:
            return ours
        lane = self._known.get(handle)
        if lane is None:
            try:
                lane = self._make(handle, (stream, owner))
            except DeviceLostError as error:
                self._on_lost(error)
                raise
            self._known[handle] = self._known[lane.handle] = lane
        self._uses[lane] = self._uses.get(lane, 0) + 1
        return lane

    def check(self, lane: Lane) -> None:
        """Raise UsageError while the lane's stream captures a graph."""
        try:
            check_stream(lane.stream)
        except DeviceLostError as error:
            self._on_lost(error)
            raise

    def _make(self, handle: int, owner: object) -> AdoptedLane:
        stream = self._device.adopt_stream(handle)
        check_stream(stream)
        same = self._known.get(stream.handle)
        if same is not None:
            return same
        old = next((lane for lane in self._released if not lane.queue.in_flight), None)
        if old is not None:
            self._released.remove(old)
            old.close()
            index, queue = old.index, old.queue
        else:
            index, queue = len(self._lanes.lanes), self._board.add(self._word(), self._depth, apart=True)
        stream.bind_marks(queue.slot, self._bell)
        lane = AdoptedLane(index, stream, queue, self._device.create_event, self._on_lost, self._release, owner)
        queue.attach(stream, lane)
        self._lanes.lanes[index : index + 1] = [lane]  # in the old one's place, or behind all others
        self._lanes.adopted.add(lane)
        return lane

    def _release(self, lane: AdoptedLane) -> None:
        if lane not in self._lanes.adopted:
            raise UsageError(f"{lane!r} was released already")
        self._uses[lane] -= 1
        if self._uses[lane]:
            return
        del self._uses[lane]
        self._known = {handle: known for handle, known in self._known.items() if known is not lane}
        self._lanes.adopted.remove(lane)
        self._released.append(lane)
        lane.let_go()
