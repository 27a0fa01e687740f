"""The bell protocol: every interleaving of host and device, in a model and with the real ``Completion``.

The host looks at the slots, arms the monitor and sleeps; the device writes slots, rings the bell
and passes the monitor's wait. A completion is lost if the host sleeps and nothing that the device
still does can wake it. The wrong protocols below lose one in some interleaving, so that this
would notice if the right one did.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from aiooffload._native import Board, Operation, Word, now_ns
from aiooffload.engine.completion import Completion
from aiooffload.rules.wake import WakePolicy

# -- the model -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Protocol:
    """How the host arms, and in which order the device writes."""

    looks_before_reset: bool = False
    """Wrong: the slots are read again before the bell is set to 0, not after."""
    resets_while_armed: bool = False
    """Wrong: a look while armed sets the bell to 0 before it goes back to sleep."""
    forgets_armed: bool = False
    """Wrong: it arms in every turn, whether the last wait was seen to end or not."""
    rings_before_slot: bool = False
    """Wrong: the device rings the bell first and writes the slot then."""


@dataclass(frozen=True)
class State:
    """Everything of host and device at one point. A tuple has an entry per lane."""

    at: str
    """The host's next step."""
    left: tuple[int, ...]
    """Operations still to be submitted."""
    submitted: tuple[int, ...]
    slots: tuple[int, ...]
    rung: tuple[int, ...]
    seen: tuple[int, ...]
    lane: int = 0
    """The slot that the host reads next, while it looks."""
    found: bool = False
    bell: int = 0
    waits: int = 0
    """Waits on the monitor stream that were not passed."""
    passed: int = 0
    wakes: int = 0
    """Wakes on the monitor stream."""
    eventfd: int = 0
    armed: bool = False


def bump(counts: tuple[int, ...], lane: int, by: int = 1) -> tuple[int, ...]:
    return (*counts[:lane], counts[lane] + by, *counts[lane + 1 :])


def device_steps(state: State, protocol: Protocol) -> Iterator[State]:
    """What the device may do next: half a mark on a lane, pass the wait, write the eventfd."""
    for lane, submitted in enumerate(state.submitted):
        slot, rung = state.slots[lane], state.rung[lane]
        first, second = (rung, slot) if protocol.rings_before_slot else (slot, rung)
        if first == second == submitted:
            continue
        rings = (first == second) == protocol.rings_before_slot
        if rings:
            yield replace(state, rung=bump(state.rung, lane), bell=1)
        else:
            yield replace(state, slots=bump(state.slots, lane))
    if state.waits and state.bell:
        yield replace(state, waits=state.waits - 1, passed=state.passed + 1)
    if state.passed and state.wakes:
        yield replace(state, passed=state.passed - 1, wakes=state.wakes - 1, eventfd=1)


def read_slot(state: State, after: Callable[[State], State]) -> State:
    lane = state.lane
    found = state.found or state.slots[lane] != state.seen[lane]
    seen = (*state.seen[:lane], state.slots[lane], *state.seen[lane + 1 :])
    state = replace(state, seen=seen, found=found, lane=lane + 1)
    return after(replace(state, lane=0)) if state.lane == len(seen) else state


def after_look(state: State, protocol: Protocol) -> State:
    """The host has read every slot: is it idle, asleep, or to arm?"""
    if state.seen == state.submitted:
        return replace(state, at="idle")
    if state.armed and not protocol.forgets_armed:
        return replace(state, at="reset while armed" if protocol.resets_while_armed else "asleep")
    return replace(state, at="look again" if protocol.looks_before_reset else "reset", found=False)


def after_second_look(state: State, protocol: Protocol) -> State:
    if state.found:
        return replace(state, at="look", found=False)
    return replace(state, at="reset" if protocol.looks_before_reset else "wait")


def host_steps(state: State, protocol: Protocol) -> Iterator[State]:
    """What the host may do next; a choice only while it sleeps or is idle."""
    match state.at:
        case "look":
            yield read_slot(state, lambda done: after_look(done, protocol))
        case "reset":
            yield replace(state, bell=0, at="wait" if protocol.looks_before_reset else "look again")
        case "look again":
            yield read_slot(state, lambda done: after_second_look(done, protocol))
        case "wait":
            yield replace(state, waits=state.waits + 1, at="wake")
        case "wake":
            yield replace(state, wakes=state.wakes + 1, armed=True, at="asleep")
        case "reset while armed":
            yield replace(state, bell=0, at="asleep")
        case "asleep" | "idle":
            if state.eventfd:
                yield replace(state, eventfd=0, armed=False, found=False, at="look")
            for lane, left in enumerate(state.left):
                if left:
                    submitted = bump(state.submitted, lane)
                    yield replace(state, left=bump(state.left, lane, -1), submitted=submitted, found=False, at="look")


@dataclass
class Findings:
    """What came of every interleaving."""

    states: int = 0
    lost: bool = False
    most_waits: int = 0
    left_on_device: bool = False
    """A wait stayed on the device with nothing in flight."""


def explore(protocol: Protocol, now: tuple[int, ...], later: tuple[int, ...]) -> Findings:
    """Go through every state that any interleaving reaches.

    ``now`` operations per lane are in flight at the start, ``later`` are submitted at any time.
    """
    none = (0,) * len(now)
    start = State("look", later, now, none, none, none)
    findings, seen, open_states = Findings(), {start}, [start]
    while open_states:
        state = open_states.pop()
        findings.states += 1
        findings.most_waits = max(findings.most_waits, state.waits + state.passed + state.eventfd)
        following = [*device_steps(state, protocol), *host_steps(state, protocol)]
        if not following:
            findings.lost |= state.at != "idle"
            findings.left_on_device |= state.waits > 0
        for new in following:
            if new not in seen:
                seen.add(new)
                open_states.append(new)
    return findings


SIZES = [((1,), (0,)), ((1,), (3,)), ((3,), (1,)), ((1, 1), (1, 1)), ((2, 2), (1, 0)), ((1, 1, 1), (1, 0, 0))]


@pytest.mark.parametrize(("now", "later"), SIZES)
def test_no_interleaving_loses_a_completion(now: tuple[int, ...], later: tuple[int, ...]) -> None:
    """In the model the host never sleeps for ever, at most one wait is armed, and an idle one leaves none behind."""
    findings = explore(Protocol(), now, later)
    assert not findings.lost
    assert findings.most_waits == 1
    assert not findings.left_on_device
    assert findings.states > 20


@pytest.mark.parametrize("wrong", ["looks_before_reset", "resets_while_armed", "rings_before_slot"])
@pytest.mark.parametrize(("now", "later"), [((1,), (1,)), ((1, 1), (1, 0)), ((1, 1, 1), (1, 0, 0))])
def test_wrong_protocols_lose_a_completion(wrong: str, now: tuple[int, ...], later: tuple[int, ...]) -> None:
    """In the model each of the wrong orders lets the host sleep for ever in some interleaving."""
    assert explore(Protocol(**{wrong: True}), now, later).lost


def test_arming_while_armed_piles_up_waits() -> None:
    """A host that does not remember that it is armed has several waits on the device."""
    assert explore(Protocol(forgets_armed=True), (1, 1), (1, 1)).most_waits > 1


# -- the real Completion -------------------------------------------------------------------


class Explorer:
    """Repeats a run with other choices until every choice in every state was made."""

    def __init__(self) -> None:
        self._prefix: list[int] = []
        self._taken: list[tuple[int, int]] = []
        self._visited: set[Any] = set()
        self._pruned = False
        self.runs = 0

    def runs_left(self) -> Iterator[None]:
        """One turn of the loop over it is one run."""
        while True:
            self._taken, self._pruned = [], False
            self.runs += 1
            yield
            while self._taken and self._taken[-1][0] + 1 == self._taken[-1][1]:
                self._taken.pop()
            if not self._taken:
                return
            self._prefix = [choice for choice, _ in self._taken]
            self._prefix[-1] += 1

    def choose(self, state: Any, options: int) -> int:
        """Choose one of ``options`` in ``state``; states seen in an earlier run are not gone into again."""
        if options < 2 or self._pruned:
            return 0
        depth = len(self._taken)
        choice = self._prefix[depth] if depth < len(self._prefix) else 0
        if depth >= len(self._prefix):
            if state in self._visited:
                self._pruned = True
                return 0
            self._visited.add(state)
        self._taken.append((choice, options))
        return choice


@dataclass
class Lane:
    """A lane's slot in ordinary memory, and how far the device got with it."""

    box: ctypes.c_uint64
    queue: Any
    written: int = 0
    half: bool = False
    """The slot was written, the bell not yet rung."""


class Bell:
    """The bell; the device may act before every store of the host's."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.box = ctypes.c_uint64()

    def store(self, value: int) -> None:
        self._device.act("store")
        if value == 0 and self._device.outstanding:
            self._device.violations.add("reset while armed")
        self.box.value = value


class Monitor:
    """The monitor stream; the device may act before every enqueue."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.commands: list[tuple[str, int]] = []

    def enqueue_wait(self, bell: Bell, value: int) -> None:
        self._device.act("wait")
        if self._device.outstanding:
            self._device.violations.add("two waits")
        self._device.waits += 1
        self.commands.append(("wait", value))

    def enqueue_wake(self, descriptor: int) -> None:
        self._device.act("wake")
        self.commands.append(("wake", descriptor))


class HookedBoard:
    """A board; the device may act before every look."""

    def __init__(self, device: Device, board: Board) -> None:
        object.__setattr__(self, "_device", device)
        object.__setattr__(self, "_board", board)

    def poll(self, spin_ns: int = 0) -> int:
        self._device.act("look")
        return self._board.poll(spin_ns)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._board, name, value)


@dataclass
class Device:
    """A device whose every step is a choice of the explorer, under one Completion of the given kind."""

    explorer: Explorer
    kind: type[Completion]
    left: list[int]
    violations: set[str] = field(default_factory=set)
    waits: int = 0
    """Waits that were ever enqueued."""
    rung: int = 0
    """Wakes that the loop has read or will read."""
    marks: int = 0
    """How often the device rang the bell: at most as often may the loop be woken."""
    last: tuple[str, ...] = ("", "")
    """The host's last two steps, which tell where in its code it is."""

    def __post_init__(self) -> None:
        self.board, self.operations = Board(), []
        self.bell, self.monitor = Bell(self), Monitor(self)
        self.lanes = []
        for _ in self.left:
            box = ctypes.c_uint64()
            self.lanes.append(Lane(box, self.board.add(Word(ctypes.addressof(box), 0, box), 8)))
        # Set by the engine when somebody waits for the drain: progress is told also with nothing pending.
        self.completion: Any = self.kind(
            asyncio.get_running_loop(),
            HookedBoard(self, self.board),  # type: ignore[arg-type]
            self.bell,  # type: ignore[arg-type]
            self.monitor,  # type: ignore[arg-type]
            WakePolicy("interrupt", spins=False, monitor=True),
            self.on_progress,
            lambda: None,
            pytest.fail,
        )
        self.completion.attention = True

    @property
    def outstanding(self) -> int:
        """Waits whose wake the host has not read."""
        return self.waits - int(self.completion.wakes["monitor"])

    def submit(self, lane: int) -> None:
        self.left[lane] -= 1
        operation = Operation(asyncio.get_running_loop())
        self.operations.append(operation)
        self.lanes[lane].queue.push(operation)
        self.completion.notice()

    def submissions(self) -> list[Callable[[], None]]:
        return [lambda lane=lane: self.submit(lane) for lane, left in enumerate(self.left) if left]  # type: ignore[misc]

    def on_progress(self) -> None:
        """What arrived has made room: more may go to the device, or not."""
        options = self.submissions()
        choice = self.explorer.choose(self.state("progress"), 1 + len(options))
        if choice:
            options[choice - 1]()

    def state(self, where: str) -> Any:
        """Everything that what happens next depends on."""
        lanes = tuple((lane.written, lane.half, lane.queue.issued, lane.queue.in_flight) for lane in self.lanes)
        host = (self.completion.armed, self.board.watched, self.rung - self.completion.wakes["monitor"])
        return where, self.last, lanes, tuple(self.left), self.bell.box.value, tuple(self.monitor.commands), host

    def steps(self) -> list[Callable[[], None]]:
        """What the device can do now."""
        found: list[Callable[[], None]] = []
        for lane in self.lanes:
            if lane.half:
                found.append(lambda lane=lane: self.ring(lane))  # type: ignore[misc]
            elif lane.written < lane.queue.issued:
                found.append(lambda lane=lane: self.write(lane))  # type: ignore[misc]
        if self.monitor.commands:
            command, value = self.monitor.commands[0]
            if command == "wake" or self.bell.box.value >= value:
                found.append(self.pass_on)
        return found

    def write(self, lane: Lane) -> None:
        lane.written += 1
        lane.box.value = lane.written
        lane.half = True

    def ring(self, lane: Lane) -> None:
        lane.half = False
        self.bell.box.value = 1
        self.marks += 1

    def pass_on(self) -> None:
        command, descriptor = self.monitor.commands.pop(0)
        if command == "wake":
            self.rung = self.completion.wakes["monitor"] + 1  # two writes before a read are one
            os.eventfd_write(descriptor, now_ns())

    def act(self, where: str) -> None:
        """The host is about to do a step: any number of the device's may come before it."""
        while True:
            steps = self.steps()
            choice = self.explorer.choose(self.state(where), 1 + len(steps))
            if choice == 0:
                break
            steps[choice - 1]()
        self.last = (self.last[1], where)

    async def run(self) -> bool:
        """Run to the end; False if the host sleeps for ever."""
        while True:
            await self.settle()
            options = [*self.steps(), *self.submissions()]
            pending = self.rung > self.completion.wakes["monitor"]
            if not options and not pending:
                return self.board.in_flight == 0
            choice = self.explorer.choose(self.state("asleep"), len(options) + pending)
            if choice < len(options):
                options[choice]()
            else:
                await self.wake()

    async def settle(self) -> None:
        """Let the loop run the turns that are scheduled; afterwards the host is asleep."""
        for _ in range(100):
            if not self.board.watched:
                break
            await asyncio.sleep(0)
        else:
            pytest.fail("the host looks for ever")
        self.last = ("", "")

    async def wake(self) -> None:
        """Let the loop read the eventfd."""
        before = self.completion.wakes["monitor"]
        for _ in range(100):
            await asyncio.sleep(0)
            if self.completion.wakes["monitor"] > before:
                if before >= self.marks:
                    self.violations.add("woken for nothing")
                return
        pytest.fail("a written eventfd does not wake the loop")

    def close(self) -> None:
        descriptors = [value for command, value in self.monitor.commands if command == "wake"]
        armed = self.completion.armed
        self.completion.stop(lost=True)
        if armed:  # the protocol lost a completion, or was not run to its end: nobody writes it any more
            os.close(descriptors[0] if descriptors else self.completion._eventfd)


@dataclass
class Outcome:
    """What came of every interleaving of the real thing."""

    runs: int
    lost: int
    violations: set[str]


async def explore_real(kind: type[Completion], submissions: tuple[int, ...]) -> Outcome:
    """Run a Completion of the given kind through every interleaving."""
    explorer, lost, violations = Explorer(), 0, set()
    for _ in explorer.runs_left():
        device = Device(explorer, kind, list(submissions))
        try:
            if await device.run():
                assert all(operation.finished for operation in device.operations)
                assert len(device.operations) == sum(submissions)
                if device.monitor.commands or device.completion.armed:
                    device.violations.add("left armed")
            else:
                lost += 1
        finally:
            device.close()
        violations |= device.violations
    return Outcome(explorer.runs, lost, violations)


@pytest.mark.all_loops
@pytest.mark.parametrize("submissions", [(1,), (2,), (1, 1)])
async def test_the_real_completion_loses_nothing(submissions: tuple[int, ...]) -> None:
    """Through every interleaving every operation finishes, and the bell is reset only while nothing is armed."""
    outcome = await explore_real(Completion, submissions)
    assert (outcome.lost, outcome.violations) == (0, set())
    assert outcome.runs > 10


@pytest.mark.slow
@pytest.mark.parametrize("submissions", [(4,), (2, 1), (1, 1, 1)])
async def test_the_real_completion_loses_nothing_of_more(submissions: tuple[int, ...]) -> None:
    """The same with more lanes and operations."""
    outcome = await explore_real(Completion, submissions)
    assert (outcome.lost, outcome.violations) == (0, set())


class LooksBeforeReset(Completion):
    """Wrong: reads the slots again before it sets the bell to 0."""

    def arm(self) -> bool:
        if self._board.poll():
            self._on_progress()
            return True
        self._bell.store(0)
        self._monitor.enqueue_wait(self._bell, 1)
        self._monitor.enqueue_wake(self._eventfd)
        self.armed = True
        return False


class ResetsWhileArmed(Completion):
    """Wrong: sets the bell to 0 before it goes back to sleep, armed or not."""

    def _decide(self) -> None:
        was_armed = self.armed
        super()._decide()
        if was_armed and self._board.in_flight:
            self._bell.store(0)


class ForgetsArmed(Completion):
    """Wrong: arms in every turn."""

    def _decide(self) -> None:
        self.armed = False
        super()._decide()


@pytest.mark.parametrize("kind", [LooksBeforeReset, ResetsWhileArmed])
async def test_a_wrong_completion_is_found_out(kind: type[Completion]) -> None:
    """The same exploration finds an interleaving in which the wrong orders lose a completion."""
    outcome = await explore_real(kind, (1, 1))
    assert outcome.lost > 0
    assert ("reset while armed" in outcome.violations) == (kind is ResetsWhileArmed)


class NeverResets(Completion):
    """Wrong: leaves the bell rung, so that every later wait ends at once."""

    def arm(self) -> bool:
        if self._board.poll():
            self._on_progress()
            return True
        self._monitor.enqueue_wait(self._bell, 1)
        self._monitor.enqueue_wake(self._eventfd)
        self.armed = True
        return False


@pytest.mark.parametrize(("kind", "violation"), [(ForgetsArmed, "two waits"), (NeverResets, "woken for nothing")])
async def test_a_wasteful_completion_is_found_out(kind: type[Completion], violation: str) -> None:
    """The same exploration notices a second wait on the monitor stream, and wakes that no mark has caused."""
    assert violation in (await explore_real(kind, (1, 1))).violations
