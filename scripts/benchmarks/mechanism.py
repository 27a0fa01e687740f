"""What the benchmarks measure: one class per way to wait for a kernel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import ClassVar, Self

LANES = 16


class Shift:
    """Tells workers how long to go on."""

    goes_on = True

    def end(self) -> None:
        self.goes_on = False


class Mechanism(ABC):
    """A way to await kernels. It is entered before it is used, once per round."""

    name: ClassVar[str]
    concurrent: ClassVar[bool] = True
    """Whether many tasks can wait at once; the others block the loop's thread."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    @abstractmethod
    async def each(self, duration_ns: int, repeats: int) -> list[int]:
        """Launch and await kernels one after another; return how long each took, in nanoseconds.

        A duration of 0 means the empty kernel.
        """

    async def worker(self, lane: int, shift: Shift) -> int:
        """Launch and await empty kernels one after another, beside other workers; return how many."""
        raise NotImplementedError(f"{self.name} blocks the loop")
