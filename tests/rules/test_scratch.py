"""``rules/scratch.py``: who gets which block, and what is kept, against a list of everything that is in use."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiooffload.rules.scratch import ALIGNMENT, ScratchPolicy, aligned

LANES = st.integers(0, 3)
SIZES = st.one_of(st.integers(0, 3000), st.sampled_from([0, 1, 255, 256, 257, 999, 1000, 1001, 2000]))
IDLE_NS = 100


class ScratchMachine(RuleBasedStateMachine):
    """Launches that start on any lane and end in the order of their lane, time, and memory that runs out."""

    @initialize(keep=st.sampled_from([0, 1000, 1024, 2500]), total=st.sampled_from([0, 1000, 3000, 10_000]))
    def begin(self, keep: int, total: int) -> None:
        self.keep, self.total, self.now = keep, total, 0
        self.policy: ScratchPolicy[int] = ScratchPolicy(keep, total, IDLE_NS)
        # Every block that was allocated and not freed: its size, lane, and when it was used last.
        self.blocks: dict[int, tuple[int, int]] = {}
        self.used_ns: dict[int, int] = {}
        # By lane, in order: the blocks of launches that are not done.
        self.running: dict[int, list[int]] = {lane: [] for lane in range(4)}
        self.made = 0

    def uses(self) -> Counter[int]:
        return Counter(block for blocks in self.running.values() for block in blocks)

    def free(self, blocks: list[int] | tuple[int, ...]) -> None:
        """Free them: none may be in use or have been freed."""
        for block in blocks:
            assert not self.uses()[block]
            del self.blocks[block]

    @rule(lane=LANES, nbytes=SIZES, full=st.booleans(), alone=st.booleans())
    def launch(self, lane: int, nbytes: int, full: bool, alone: bool) -> None:
        block, rounded, free = self.policy.want(lane, nbytes, alone)
        assert not (alone and self.uses()[block]), "somebody uses it"
        self.free(free)
        if block is None:
            assert nbytes <= rounded <= max(aligned(nbytes), nbytes + max(nbytes // 4, ALIGNMENT))
            assert rounded <= self.keep or nbytes > self.keep
            if full:
                return  # it cannot be allocated, and the launch fails
            self.made += 1
            block = self.made
            self.blocks[block] = (rounded, lane)
            self.policy.allocated(lane, block, rounded)
        assert self.blocks[block][0] >= nbytes
        assert self.blocks[block][1] == lane
        self.running[lane].append(block)

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from([lane for lane, blocks in self.running.items() if blocks]))
        block = self.running[lane].pop(0)
        self.used_ns[block] = self.now
        self.free(self.policy.done(block, self.now))

    @rule(later=st.integers(1, 2 * IDLE_NS))
    def time_passes(self, later: int) -> None:
        self.now += later
        self.free(self.policy.expire(self.now))
        uses = self.uses()
        assert all(uses[block] or self.now - self.used_ns[block] < IDLE_NS for block in self.blocks)

    @rule()
    def memory_runs_out(self) -> None:
        self.free(self.policy.out_of_memory())
        assert set(self.blocks) == set(self.uses())

    @invariant()
    def bounds_hold(self) -> None:
        """What nothing uses is within both bounds, known, and will be looked at when it is due."""
        if not hasattr(self, "policy"):
            return
        uses = self.uses()
        idle = [block for block in self.blocks if not uses[block]]
        assert all(self.blocks[block][0] <= self.keep for block in idle)
        assert self.policy.idle_nbytes == sum(self.blocks[block][0] for block in idle) <= self.total
        assert len(self.policy) == len(self.blocks)
        due = min((self.used_ns[block] + IDLE_NS for block in idle), default=None)
        assert self.policy.due_ns == due
        by_lane = Counter(self.blocks[block][1] for block in idle)
        assert not by_lane or max(by_lane.values()) == 1


TestScratch = ScratchMachine.TestCase


def run(policy: ScratchPolicy[int], lane: int, nbytes: int, block: int) -> int | None:
    """One launch, from its start to its end; return the block if it had to be allocated, which is ``block`` then."""
    found, rounded, _ = policy.want(lane, nbytes)
    if found is None:
        policy.allocated(lane, block, rounded)
    policy.done(block if found is None else found, 0)
    return block if found is None else None


@given(st.lists(st.tuples(LANES, st.integers(0, 1000)), min_size=1, max_size=50))
def test_nothing_is_allocated_after_warm_up(launches: list[tuple[int, int]]) -> None:
    """What every lane was once asked for it never allocates again, while the bounds have room for it."""
    policy: ScratchPolicy[int] = ScratchPolicy(1000, 4000, IDLE_NS)
    for number, (lane, nbytes) in enumerate(launches):
        run(policy, lane, nbytes, number)
    assert [run(policy, lane, nbytes, -1) for lane, nbytes in launches] == [None] * len(launches)


def test_creeping_sizes_allocate_rarely() -> None:
    """Ten thousand launches, each a little larger than the one before, allocate eight times per doubling at most."""
    policy: ScratchPolicy[int] = ScratchPolicy(1 << 20, 1 << 30, IDLE_NS)
    made = [run(policy, 0, 100 * number, number) for number in range(10_000)]
    assert 8 < sum(block is not None for block in made) <= 8 * 13


def test_the_longest_idle_goes_first() -> None:
    """Beyond the bound for all lanes the block goes that was idle longest, not the one that came last."""
    policy: ScratchPolicy[int] = ScratchPolicy(1000, 2000, IDLE_NS)
    for lane in range(3):
        policy.allocated(lane, lane, policy.want(lane, 1000).nbytes)
    assert [policy.done(lane, now) for now, lane in enumerate((1, 2, 0))] == [[], [], [1]]


def test_who_is_to_be_alone_gets_another_one() -> None:
    """A block in use is not shared with a launch whose lane does not end the uses before; its last user frees it."""
    policy: ScratchPolicy[int] = ScratchPolicy(1024, 1024, IDLE_NS)
    assert policy.want(0, 100, alone=True).block is None
    policy.allocated(0, 1, 256)
    assert policy.want(0, 100, alone=True).block is None
    policy.allocated(0, 2, 256)
    assert policy.done(1, 0) == [1]
    assert policy.done(2, 0) == []
    assert policy.want(0, 100, alone=True).block == 2
    assert len(policy) == 1


def test_in_use_is_shared_whatever_its_size() -> None:
    """A launch behind another on its lane uses its block, also above what is kept; it goes with the last of them."""
    policy: ScratchPolicy[int] = ScratchPolicy(0, 0, IDLE_NS)
    policy.allocated(5, 1, policy.want(5, 10_000).nbytes)
    assert policy.want(5, 9_000).block == 1
    assert policy.want(4, 9_000).block is None
    assert policy.done(1, 0) == []
    assert policy.done(1, 0) == [1]
    assert len(policy) == 0


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 511, 512, 513])
def test_alignment(nbytes: int) -> None:
    """It rounds up to the next multiple."""
    assert aligned(nbytes) % ALIGNMENT == 0
    assert 0 <= aligned(nbytes) - nbytes < ALIGNMENT
