"""What all acts of a soak share: the Offload, its host functions, chance, and the tally."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

import aiooffload as ao
from trials import kernels
from trials.growth import Findings

BAD = -(1 << 40)
"""An argument for which host functions raise."""


class Boom(Exception):
    """What host functions, host tasks and custom operations raise on purpose."""


EXPECTED = (Boom, ao.HostFunctionError, ao.OffloadTimeout, ao.DependencyError, asyncio.CancelledError)
"""How work may end that nobody looks at any more, because its act was cancelled."""


@dataclass
class Tally(Findings):
    """What happened so far."""

    operations: int = 0
    cancelled: int = 0
    faults: int = 0
    mismatches: int = 0

    def mismatch(self, text: str) -> None:
        self.mismatches += 1
        self.note(text)

    @property
    def bad(self) -> bool:
        return bool(self.mismatches or self.leaks)

    @property
    def done(self) -> str:
        return f"{self.operations} operations, {self.cancelled} cancelled, {self.faults} faults"

    @property
    def found(self) -> str:
        return f"{self.mismatches} mismatches, {self.leaks} leaks"


class World:
    """One Offload under soak."""

    def __init__(self, off: ao.Offload, device: str, chance: random.Random, tally: Tally) -> None:
        self.off = off
        self.device = device
        self.chance = chance
        self.tally = tally
        self.tracing = False
        self.others = asyncio.Semaphore(1)
        # What each launch that tells the host something has told so far.
        self.told: dict[Any, list[int]] = defaultdict(list)
        # Kernels that are loaded when they are launched first, behind everything that is in flight then.
        self.unloaded = [
            ao.Kernel("scale_add", cuda=kernels.scale_add.cuda_source, host=kernels.scale_add.host_function)
            for _ in range(4)
        ]
        self._register()

    def _register(self) -> None:
        off = self.off

        @off.host_function
        async def answer(x: int) -> int:
            if x == BAD:
                raise Boom("a host function broke")
            if x % 5 == 4:
                await asyncio.sleep(0)
            if x % 31 == 30:
                await off.fill(off.empty(8, np.uint8), 1)
            return 2 * x + 1

        @off.host_function(batch=True)
        async def batched(x: np.int64) -> np.int64:
            return x * np.int64(2) + np.int64(1)

        @off.host_function
        async def mapped(array: ao.InOut[np.int64]) -> int:
            if array[0] == BAD:
                raise Boom("a host function with an array broke")
            total = int(array.sum())
            await asyncio.sleep(0)
            array *= 3
            return total

        @off.host_function
        async def told(x: int) -> None:
            call = ao.current_call()
            assert call is not None
            self.told[call.operation].append(x)

    # -- chance ----------------------------------------------------------------------------

    def maybe(self, probability: float) -> bool:
        return self.chance.random() < probability

    def numbers(self, count: int) -> NDArray[np.uint64]:
        return np.random.default_rng(self.chance.getrandbits(64)).integers(0, 2**64, count, np.uint64)

    def integers(self, count: int) -> NDArray[np.int64]:
        return np.random.default_rng(self.chance.getrandbits(64)).integers(0, 1000, count, np.int64)

    def where(self) -> dict[str, Any]:
        """Choose a lane, a priority, or neither."""
        choice = self.chance.randrange(4)
        if choice == 0:
            return {"lane": self.chance.choice(self.off.lanes)}
        return {"priority": -1} if choice == 1 else {}

    # -- what everybody does -----------------------------------------------------------------

    def launch(self, kernel: ao.Kernel, count: int, *args: Any, **options: Any) -> ao.Operation[None]:
        """Launch with a thread for each of ``count`` elements."""
        block = min(256, count)
        return self.off.launch(kernel, grid=-(-count // block), block=block, args=args, **options)

    def check(self, what: str, result: ArrayLike, expected: ArrayLike) -> None:
        """Compare a result with NumPy's."""
        result, expected = np.asarray(result), np.asarray(expected)
        if result.shape != expected.shape or result.tobytes() != expected.tobytes():
            wrong = "shape" if result.shape != expected.shape else f"{np.count_nonzero(result != expected)} elements"
            self.tally.mismatch(f"{what}: {wrong} differ")

    async def ends(self, operation: ao.Operation[Any], *expected: type[BaseException]) -> BaseException | None:
        """Wait for an operation that may fail as named, count how it ended, and return its failure."""
        try:
            await operation
        except asyncio.CancelledError:
            if not operation.finished:  # it is this act that was cancelled
                raise
        except expected:
            pass
        failure: BaseException | None = operation.exception()
        if isinstance(failure, asyncio.CancelledError | ao.OffloadTimeout):
            self.tally.cancelled += 1
        elif failure is not None:
            self.tally.faults += 1
        return failure
