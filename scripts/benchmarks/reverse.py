"""What a call costs that a running kernel makes to the host, and what waiting for it costs.

Measures aiooffload with each kind of host function (eager: a coroutine that does not suspend; awaiting:
one that does; batch; post: no reply) beside other ways to answer a kernel:

  spin      a C thread that spins on the request words: the lower bound
  libgomp   cuStreamQuery, a look at the request and usleep(1) in turn, in C, as GCC's libgomp does it
  llvm      a C thread that spins, and sleeps 250 us once 25 us went by without a call, as LLVM's RPC thread

The peers answer 2 * x in C; ours is a Python coroutine that returns 2 * x. The kernel takes the time: on a
GPU with %globaltimer. On the host device kernels are threads, in Python for ours and in C for the peers,
which compete with the host for the CPUs.

A call after a silence counts from its request to its answer; the silence is up to a quarter longer than
it is called, so that no call falls into step with a loop's sleeps. CPU is that of the process while the kernel
runs, its launch included; a kernel of the host device sleeps through its silence.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.command import add_efforts, check_target, device_of, loop_factory

if TYPE_CHECKING:
    from benchmarks.reverse_measure import Recorder, Served, Values, Watch
    from benchmarks.reverse_ours import Session

WARPS = {"host": (1, 8, 32), "cuda": (1, 32, 128, 1_056, 8_448)}
WARPS_ARE = {
    "host": "threads: for ours launches in flight, each a thread in Python that calls; for the peers threads in C",
    "cuda": "one lane of each calls",
}
SILENT_MS = 300
STEP_LIMIT_S = 10.0
"""A step of ours ends after so long; a peer's kernel and loop end by themselves before."""
HANG_LIMIT_S = 25.0
"""The process ends when a step hangs for so long where nothing can end it."""
BUDGET_S = 140.0
"""No further round is started that may not be over by then."""


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    rounds: int
    trips: int
    """Calls of a round trip's measurement."""
    seconds: float
    """What a rate's measurement takes."""
    silences: dict[int, int]
    """Calls by the silence before each, in microseconds."""
    maps: int


FULL = Effort(rounds=3, trips=5000, seconds=0.4, silences={1_000: 200, 10_000: 40}, maps=150)
QUICK = Effort(rounds=1, trips=1000, seconds=0.1, silences={1_000: 50, 10_000: 10}, maps=50)
SMOKE = Effort(rounds=1, trips=20, seconds=0.001, silences={1_000: 3, 10_000: 2}, maps=3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_efforts(parser, FULL, QUICK, SMOKE, "under 30 seconds")


def main(options: argparse.Namespace) -> int:
    import aiooffload as ao
    from benchmarks import reverse_report

    out = sys.stderr if options.json == "-" else sys.stdout
    run, error = None, None
    try:
        check_target(options.json)
        with asyncio.Runner(loop_factory=loop_factory("uvloop")) as runner:
            run = Run(options.json, options.effort, *runner.run(device_of(options.device)))
            runner.run(run.run())
    except (ao.OffloadError, OSError, RuntimeError) as problem:
        error = problem
    if run is not None:  # What was measured before an error is still of use.
        reverse_report.show(run.figures(), out)
        run.write()
    if error is not None:
        print(f"scripts/bench reverse: {type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 1 if run is None or run.failed else 0


@dataclass(frozen=True)
class Step:
    """One measurement of one mechanism."""

    section: str
    served: Served
    at: int
    what: str
    measure: Callable[[], Awaitable[Values]]


class Run:
    """All steps, section by section, in each round; the first mechanism is a different one each time."""

    def __init__(self, target: str | None, effort: Effort, device: str, device_name: str) -> None:
        from benchmarks.reverse_measure import Recorder, Watch

        self._target = target
        self._effort = effort
        self._device, self._device_name = device, device_name
        self._kind = device.partition(":")[0]
        self._recorder: Recorder = Recorder()
        self._watch: Watch = Watch(self.write)
        self._known: dict[tuple[str, int], int] = {}
        self._labels: dict[str, str] = {}
        self._rounds = 0
        self._started = time.monotonic()

    @property
    def failed(self) -> bool:
        return bool(self._recorder.problems)

    async def run(self) -> None:
        async with all_served(self._device, self._watch) as (session, everybody):
            self._labels = {served.name: served.label for served in everybody}
            steps = self._steps(session, everybody)
            for number in range(self._effort.rounds):
                if number and self._took_s() * (number + 1) / number > BUDGET_S:
                    break
                for section in steps:
                    place = number % len(section)
                    for step in [*section[place:], *section[:place]]:
                        await self._take(step, f"round {number + 1} of {self._effort.rounds}: {step.what}", session)
                self._rounds = number + 1

    def _steps(self, session: Session, everybody: Sequence[Served]) -> list[list[Step]]:
        from benchmarks import reverse_measure as measure
        from benchmarks import reverse_ours

        effort, known = self._effort, self._known
        answered = [served for served in everybody if served.latency]
        # A silent kernel costs ours the same whatever it calls in the end.
        others = [served for served in answered if served.name not in ("awaiting", "batch")]
        return [
            [step("round_trip", one, 0, "round trip", measure.round_trip, effort.trips) for one in answered],
            *(
                [step("rates", one, n, f"{n:,} warps", measure.rate, n, effort.seconds, known) for one in everybody]
                for n in WARPS[self._kind]
            ),
            *(
                [step("silence", one, us, f"after {us:,} us", measure.after_silence, us, n) for one in answered]
                for us, n in effort.silences.items()
            ),
            [step("resident", one, 0, f"silent for {SILENT_MS} ms", measure.resident, SILENT_MS) for one in others],
            [step("mapped", everybody[0], 0, "1 MiB mapped", lambda _: reverse_ours.mapped(session, effort.maps))],
        ]

    async def _take(self, step: Step, what: str, session: Session) -> None:
        from benchmarks.reverse_ours import Ours

        try:
            with self._watch.step(what, HANG_LIMIT_S):
                async with asyncio.timeout(STEP_LIMIT_S):
                    values = await step.measure()
            self._recorder.add(step.section, (step.served.name, step.at), what, values)
        except Exception as error:  # of whichever peer: the row says so, and the others are measured
            self._recorder.fail(what, f"{type(error).__name__}: {error}")
            if isinstance(step.served, Ours):
                with self._watch.step("opening the device again", HANG_LIMIT_S):
                    await session.close()
                    await session.open()

    def _took_s(self) -> float:
        return time.monotonic() - self._started

    def figures(self) -> dict[str, Any]:
        """Return all figures so far, as ``--json`` writes them."""
        from benchmarks import reverse_report

        rows = self._recorder.rows
        figures: dict[str, Any] = {
            "device": self._device,
            "device_name": self._device_name,
            "loop": "uvloop",
            "rounds": self._rounds,
            "took_s": round(self._took_s(), 1),
            "labels": self._labels,
            "warps_are": WARPS_ARE[self._kind],
            "round_trip": rows("round_trip", None),
            "rates": rows("rates", "warps"),
            "silence": rows("silence", "silence_us"),
            "resident": rows("resident", None),
            "mapped": rows("mapped", None),
            "problems": self._recorder.problems,
        }
        figures["bars"] = reverse_report.bars(figures) if self._kind == "cuda" else []
        return figures

    def write(self) -> None:
        """Write ``--json``."""
        text = json.dumps(self.figures(), indent=2) + "\n"
        if self._target == "-":
            print(text, end="")
        elif self._target:
            Path(self._target).write_text(text)


def step(section: str, served: Served, at: int, what: str, measure: Any, *args: Any) -> Step:
    return Step(section, served, at, f"{served.name}, {what}", lambda: measure(served, *args))


@asynccontextmanager
async def all_served(device: str, watch: Watch) -> AsyncIterator[tuple[Session, list[Served]]]:
    """Yield what ours share, and ours and the peers of a device."""
    from benchmarks import reverse_ours, reverse_peers

    kind, _, index = device.partition(":")
    most = WARPS[kind][-1]
    async with AsyncExitStack() as stack:
        session = reverse_ours.Session(device, most)
        stack.push_async_callback(session.close)
        with watch.step("opening the device", 2 * HANG_LIMIT_S):
            await session.open()
            caller: reverse_peers.Caller
            if kind == "host":
                caller = reverse_peers.HostThreads(most)
            else:
                from benchmarks import reverse_peers_cuda

                caller = reverse_peers_cuda.Gpu(int(index), most)
        stack.callback(caller.close)
        yield session, [*reverse_ours.mechanisms(session), *reverse_peers.mechanisms(caller)]
        stack.enter_context(watch.step("closing the device", HANG_LIMIT_S))
