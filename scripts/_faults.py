"""Let every driver call of many small programs fail, one at a time, and see what becomes of the rest.

Each scenario (see scripts/trials/scenarios.py) runs once for each call that can fail in it and each way to fail:
refused, out of memory, a launch error, the device lost, a completion delayed or dropped, a request of a kernel torn.
Whatever went wrong, all operations have to end, with that failure or with the right result, and nothing may be left
behind.

Exits 1 if something hangs, is wrong or leaks, 2 if the sweep could not be made.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LIMIT_S = 10.0
"""After so long a run counts as hanging, and is cancelled."""
SILENT_S = 60.0
"""After so long without a word a process hangs as a whole, and is killed."""
SHOWN = 40
SMOKE_STEP = 11
SMOKE_KINDS = 5
"""Of all pairs of a scenario and a kind of fault, every so manieth is in a smoke test."""
DENSE = {"batched_calls": 12}
"""Scenarios with many requests alike, of which every so manieth is torn."""


class Unit(NamedTuple):
    """One scenario with one kind of fault, at every so manieth place."""

    scenario: str
    fault: str
    first: int
    step: int
    by_events: bool = False
    """On a device whose streams cannot write words."""

    def __str__(self) -> str:
        return f"{self.scenario}{' by events' if self.by_events else ''}, {self.fault}"


@dataclass
class Tally:
    """What was found so far."""

    injected: int = 0
    hangs: int = 0
    wrong: int = 0
    leaks: int = 0
    problems: list[str] = field(default_factory=list)

    def add(self, case: dict[str, Any]) -> None:
        self.injected += case["injected"]
        self.hangs += bool(case["hangs"])
        self.wrong += bool(case["wrong"])
        self.leaks += bool(case["leaks"])
        self.problems += case["problems"]

    @property
    def bad(self) -> bool:
        return bool(self.hangs or self.wrong or self.leaks)


def units(only: Sequence[str], step: int) -> list[Unit]:
    """Return everything there is to do, the longest first."""
    from trials.scenarios import BY_EVENTS, CALLING, SCENARIOS

    from aiooffload.testing import FAULTS, TEARS

    names = [scenario.__name__ for scenario in SCENARIOS]
    if unknown := set(only) - set(names):
        raise ValueError(f"no such scenario: {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    chosen = [name for name in names if not only or name in only]
    calling = [scenario.__name__ for scenario in CALLING]
    torn = [
        Unit(name, fault.name, 1, max(step, DENSE.get(name, 1)))
        for name in chosen
        for fault in TEARS
        if name in calling
    ]
    plain = [Unit(name, fault.name, 1, step) for name in chosen for fault in FAULTS]
    if step > 1:
        torn, plain = torn[::4], plain[::SMOKE_KINDS]
    events = [scenario.__name__ for scenario in BY_EVENTS]
    late = [Unit(name, fault, 1, step, True) for name in chosen if name in events for fault in ("refused", "lost")]
    return torn + sorted(plain, key=lambda unit: unit.fault != "dropped") + late


# -- a process that runs them ------------------------------------------------------------------


def work(commands: IO[str], words: IO[str], loop: str) -> None:
    """Do what each line of ``commands`` says, and say what was found, a line for each case."""
    import gc

    from benchmarks.command import loop_factory
    from trials.scenarios import SCENARIOS

    from aiooffload.drivers.host import HostDevice
    from aiooffload.testing import FAULTS, TEARS, FaultyDevice, sweep

    def limited() -> FaultyDevice:
        return FaultyDevice(HostDevice(memory_operations=False))

    factory = loop_factory(loop)
    factory().close()  # libuv keeps a pipe for signals from the first loop of a process on
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    faults = {fault.name: fault for fault in (*FAULTS, *TEARS)}
    gc.collect()
    gc.freeze()  # what is there by now stays: leaving it out makes the collections of each case cheap
    checked: set[tuple[str, bool]] = set()
    for line in commands:
        unit = Unit(*json.loads(line))
        check = (unit.scenario, unit.by_events) not in checked
        checked.add((unit.scenario, unit.by_events))
        for case in sweep(
            scenarios[unit.scenario],
            [faults[unit.fault]],
            make=limited if unit.by_events else FaultyDevice,
            first=unit.first,
            step=unit.step,
            limit_s=LIMIT_S,
            check=check,
            loop_factory=factory,
        ):
            print(json.dumps(asdict(case) | {"problems": case.problems}), file=words, flush=True)
        print("null", file=words, flush=True)


# -- the process that hands them out -------------------------------------------------------------


async def hand_out(ahead: deque[Unit], tally: Tally, loop: str) -> None:
    """Give units to one process after another: a new one only where the last has hung or crashed."""
    process: asyncio.subprocess.Process | None = None
    while ahead:
        unit = ahead.popleft()
        if process is None:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--worker", "--loop", loop),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        rest = await follow(process, unit, tally)
        if rest is not None:
            if process.returncode is None:
                process.kill()
            await process.wait()
            process = None
            ahead.appendleft(rest)
    if process is not None:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


async def follow(process: asyncio.subprocess.Process, unit: Unit, tally: Tally) -> Unit | None:
    """Let a process do a unit and count what it says; return what is left of it if it ended on the way."""
    from benchmarks.command import say

    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(unit).encode() + b"\n")
    at = unit.first - unit.step
    while True:
        try:
            line = await asyncio.wait_for(process.stdout.readline(), SILENT_S)
        except TimeoutError:
            tally.hangs += 1
            tally.problems.append(f"{unit} {at + unit.step}: hang: the process does not go on")
            return unit._replace(first=at + 2 * unit.step)
        if not line:
            tally.wrong += 1
            tally.problems.append(f"{unit} {at + unit.step}: wrong: the process ended with {await process.wait()}")
            return unit._replace(first=at + 2 * unit.step)
        case = json.loads(line)
        if case is None:
            return None
        at = case["at"]
        tally.add(case)
        say(f"{tally.injected} faults injected; {unit} {at}")


async def everything(ahead: deque[Unit], workers: int, loop: str) -> Tally:
    tally = Tally()
    await asyncio.gather(*(hand_out(ahead, tally, loop) for _ in range(workers)))
    return tally


# -- the command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="*", help="only these (default: all)")
    parser.add_argument("--device", default="host", choices=["host"], help="where faults can be injected: host")
    parser.add_argument("--smoke", action="store_true", help="only a few kinds and places: see that it runs")
    parser.add_argument("--workers", type=int, help="processes at a time (default: two per CPU, at most 8)")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="default: uvloop")
    parser.add_argument("--json", metavar="FILE", help="write the counts there; - for standard output, alone")
    parser.add_argument("--no-setup", action="store_true", help="run in the Python at hand, installing nothing")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.workers is None:
        options.workers = min(8, 2 * len(os.sched_getaffinity(0)))  # a good part of a run waits for deadlines
    if options.workers < 1:
        parser.error("--workers is at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        work(sys.stdin, sys.stdout, options.loop)
        return 0
    from benchmarks.command import check_target, say, write

    began = time.monotonic()
    try:
        check_target(options.json)
        ahead = deque(units(options.scenario, SMOKE_STEP if options.smoke else 1))
        tally = asyncio.run(everything(ahead, options.workers, options.loop))
    except (OSError, ValueError) as error:
        print(f"scripts/faults: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nscripts/faults: stopped", file=sys.stderr)
        return 130
    say("")
    seconds = round(time.monotonic() - began, 1)
    out = sys.stderr if options.json == "-" else sys.stdout
    for problem in tally.problems[:SHOWN]:
        print(problem, file=out)
    counts = f"{tally.injected} faults injected, {tally.hangs} hangs, {tally.wrong} wrong, {tally.leaks} leaks"
    print(f"{'FAILED' if tally.bad else 'ok'}: {counts} in {seconds} s", file=out)
    write(options.json, asdict(tally) | {"device": options.device, "seconds": seconds})
    return 1 if tally.bad else 0


if __name__ == "__main__":
    sys.exit(main())
