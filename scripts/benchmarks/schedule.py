"""What the scheduler costs for each operation, while many others wait on the host.

An operation is made, ordered by what it writes, checked, placed, started, and finished by its mark:
the engine's own lanes, board and operations do it, on streams that do nothing. Meanwhile so many
others wait on the lanes, or are held by something that only the host can wait for. The garbage
collector is left out, and so is the time in which other programs have the CPU. The figures may
differ by no more than the bar.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.command import add_json, run

if TYPE_CHECKING:
    from aiooffload.engine.lanes import Lanes
    from aiooffload.operation import Operation

PENDING = (100, 10_000, 1_000_000)
LANES = 16
DEPTH = 64
BAR = 2.0
"""Times the cheapest that the dearest may cost."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", action="store_true", help="fewer operations and rounds")
    effort.add_argument("--smoke", action="store_true", help="only see that it runs, with 10,000 waiting at most")
    add_json(parser)


def main(options: argparse.Namespace) -> int:
    return run("schedule", options, lambda: measure(options), show)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, as ``--json`` writes them."""
    import gc

    rounds, count = (1, 500) if options.smoke else (3, 10_000) if options.quick else (7, 30_000)
    rows: list[dict[str, Any]] = []
    for where in ("waiting", "held"):
        for pending in PENDING[: 2 if options.smoke else None]:
            rig = Rig(where, pending)
            rig.run(LANES * DEPTH)
            gc.collect()
            gc.disable()
            samples = [rig.run(count) for _ in range(rounds)]
            gc.enable()
            rows.append({"where": where, "pending": pending, "ns_per_operation": round(statistics.median(samples))})
            rig.close()
    ratios = {}
    for where in ("waiting", "held"):
        costs = [row["ns_per_operation"] for row in rows if row["where"] == where]
        ratios[where] = round(max(costs) / min(costs), 2)
    return {"rows": rows, "ratios": ratios, "bar": BAR, "met": max(ratios.values()) <= BAR, "rounds": rounds}


def show(figures: dict[str, Any], out: TextIO) -> None:
    from benchmarks.report import print_table

    costs = {(row["where"], row["pending"]): row["ns_per_operation"] for row in figures["rows"]}
    counts = sorted({pending for _, pending in costs})
    print("ns for each operation, from its making to its end, with so many others on the host", file=out)
    cells = {
        where: [*(f"{costs[where, pending]:,}" for pending in counts), f"{ratio:.2f}x"]
        for where, ratio in figures["ratios"].items()
    }
    print_table(["", *(f"{pending:,}" for pending in counts), "spread"], cells, out)
    print(f"bar: {figures['bar']:.0f}x: {'met' if figures['met'] else 'MISSED'}", file=out)


class Nothing:
    """A stream, an event, a loop, an engine: whatever is asked of it, it does nothing."""

    marks = None

    def notice(self) -> None: ...
    def enqueue_mark(self, sequence: int) -> None: ...
    def enqueue_record(self, event: object) -> None: ...
    def enqueue_wait_event(self, event: object) -> None: ...


class Rig:
    """Lanes, and so many operations that wait on them, or are held."""

    def __init__(self, where: str, pending: int) -> None:
        import ctypes

        from aiooffload._native import Board, Word
        from aiooffload.engine.lanes import Lane, Lanes
        from aiooffload.rules.ordering import History

        nothing: Any = Nothing()
        self._nothing = nothing
        self._board = Board()
        self._marks = (ctypes.c_uint64 * (8 * LANES))()
        address = ctypes.addressof(self._marks)
        lanes = []
        for i in range(LANES):
            queue = self._board.add(Word(address + 64 * i, 0, self._marks), DEPTH)
            lanes.append(Lane(i, nothing, queue, nothing, nothing))
        groups = {0: (0, LANES)}
        self._lanes: Lanes = Lanes(self._board, lanes, groups, nothing, 1 << 40, lambda error: None, lambda: None)
        self._histories: list[History[Operation[Any]]] = [History() for _ in range(LANES)]
        self._held: list[Operation[Any]] = []
        self._next = 0
        self._done = [0] * LANES
        if where == "held":
            for _ in range(pending):
                self._submit(held=True)
        for _ in range(LANES * DEPTH // 2 if where == "held" else LANES * DEPTH + pending):
            self._submit()

    def _submit(self, held: bool = False) -> None:
        from aiooffload.operation import Operation

        operation: Operation[None] = Operation(self._nothing, self._nothing, "operation")
        operation.steps = _do_nothing
        self._lanes.check_lane(operation, None)
        if held:
            operation.holds = 1
            self._held.append(operation)
        else:
            self._next = (self._next + 1) % LANES
            history = self._histories[self._next]
            deps = history.conflicts(True)
            self._lanes.check_room(operation, False, deps, None)
            history.record(operation, True)
            operation.deps = deps or None
        self._lanes.place(operation, None)

    def run(self, count: int) -> float:
        """Let that many operations begin and end; returns ns of CPU for each."""
        board, lanes, done = self._board, self._lanes.lanes, self._done
        start = time.thread_time_ns()
        for _ in range(count):
            self._submit()
            index = self._next
            while not lanes[index].in_flight:
                index = (index + 1) % LANES
            done[index] += 1
            lanes[index].queue.slot.store(done[index])
            board.poll()
            if board.pending:
                self._lanes.flush()
        return (time.thread_time_ns() - start) / count

    def close(self) -> None:
        """Let go of everything; a chain of held ones must not be followed one into the other."""
        for operation in self._lanes.abandon(RuntimeError("closed")):
            operation.look()
        for operation in self._board.abandon():
            operation.finish()


def _do_nothing(stream: object) -> None: ...
