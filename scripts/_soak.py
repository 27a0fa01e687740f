"""Run a random mix of everything for long, with cancels, timeouts and failures, and check every result.

Launches, copies of any shape, fills, custom operations, host tasks, gates, bound launches, scratch, calls from kernels
of every kind and traces, many at a time (see scripts/trials/acts.py); results are compared with NumPy's. In between, at
rest, it looks at what grows: memory, descriptors, threads, device memory.

Exits 1 if a result was wrong or something leaks, 2 if the soak could not be made.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from trials.world import Tally, World

    import aiooffload as ao

TASKS = 12
"""Acts at a time."""
EPOCHS = 20
"""How often everything comes to rest, to see what has grown."""
WARM_UP = 5
"""Epochs after which nothing should grow any more."""
SETTLED = 3
"""Epochs at the end that are compared with those: a thread that is about to end is no leak."""
LATE_THREADS = 2
"""An Offload's worker threads, each of which starts when it is needed first."""
GROWTH_BYTES = 24 << 20
"""Of resident memory: what the allocator's arenas and the interpreter's caches may take from there on."""
CANCELS = 0.04
"""Share of acts that are cancelled on their way."""
STUCK_S = 120.0
"""After so long an act hangs."""


@dataclass(frozen=True)
class Footprint:
    """What the process holds while nothing is going on."""

    resident_bytes: int
    device_bytes: int
    descriptors: int
    threads: int
    handles: int


async def footprint(off: ao.Offload) -> Footprint:
    """Come to rest and look."""
    await off.drain()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return measure(off)


def measure(off: ao.Offload) -> Footprint:
    """Look."""
    from aiooffload.testing import live_handles

    stats, handles = off.stats(), live_handles()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return Footprint(
        int(fields["VmRSS"].split()[0]) * 1024,
        stats["allocated_bytes"] - stats["scratch"]["kept_bytes"],
        len(list(Path("/proc/self/fd").iterdir())),
        int(fields["Threads"]),
        handles["streams"] + handles["offloads"],
    )


def compare(tally: Tally, prints: list[Footprint]) -> int:
    """Count what has grown since the warm-up; return the growth of resident memory in bytes."""
    warm, later = prints[: WARM_UP + 1], prints[WARM_UP + 1 :]
    if not later:
        return 0
    last = later[-SETTLED:]  # what is there in each of them stays
    growth = min(one.resident_bytes for one in last) - max(one.resident_bytes for one in warm)
    if growth > GROWTH_BYTES:
        tally.leak(f"resident memory grew by {growth >> 20} MiB after the warm-up")
    for name in ("device_bytes", "descriptors", "threads", "handles"):
        most, least = max(getattr(one, name) for one in warm), min(getattr(one, name) for one in last)
        if least > most + (LATE_THREADS if name == "threads" else 0):
            tally.leak(f"{name}: {least}, {most} at most in the warm-up")
    return growth


# -- acting ------------------------------------------------------------------------------------


async def keep_acting(world: World, until: float) -> None:
    """Do one act after another."""
    from trials.acts import ACTS

    loop = asyncio.get_running_loop()
    while loop.time() < until:
        (act,) = world.chance.choices(list(ACTS), list(ACTS.values()))
        task = asyncio.ensure_future(act(world))
        if world.maybe(CANCELS):
            loop.call_later(world.chance.random() * 0.005, task.cancel)
        done, _ = await asyncio.wait([task], timeout=STUCK_S)
        if not done:
            world.tally.mismatch(f"{act.__name__} hangs")
            task.cancel()
        elif task.cancelled():
            world.tally.cancelled += 1
        elif (error := task.exception()) is not None:
            world.tally.mismatch(f"{act.__name__} raised {error!r}")


def watch_loop(tally: Tally) -> None:
    """Count what goes to the loop's exception handler, unless it is work whose act was cancelled."""
    from trials.world import EXPECTED

    def on_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, EXPECTED):
            tally.mismatch(f"event loop: {context['message']}: {error!r}")

    asyncio.get_running_loop().set_exception_handler(on_error)


async def open_once(device: str) -> None:
    """Let a driver, and the first loop of a process, open what they keep for good."""
    import aiooffload as ao

    async with ao.Offload(device, lanes=1):
        pass


async def soak(device: str, seconds: float, seed: int, tally: Tally) -> tuple[str, int]:
    """Act for so long; return the device and the growth of resident memory."""
    from benchmarks.command import say
    from trials.kernels import CALLING, PLAIN
    from trials.world import World

    import aiooffload as ao

    watch_loop(tally)
    loop, prints = asyncio.get_running_loop(), []
    async with ao.Offload(device, lanes={0: 6, -1: 2}, calling_lanes=6, lane_depth=64) as off:
        await off.load(*PLAIN, *CALLING)
        label = off.properties.label
        world = World(off, label, random.Random(seed), tally)
        began = loop.time()
        for epoch in range(EPOCHS):
            until = began + seconds * (epoch + 1) / EPOCHS
            await asyncio.gather(*(keep_acting(world, until) for _ in range(TASKS)))
            prints.append(await footprint(off))
            tally.operations = off.stats()["completed"]
            resident = prints[-1].resident_bytes >> 20
            counts = f"{tally.operations} operations, {tally.cancelled} cancelled, {tally.faults} faults"
            say(f"{loop.time() - began:.0f} of {seconds:.0f} s: {counts}, {resident} MiB")
    return label, compare(tally, prints)


# -- the command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--device", default="auto", help="auto, host or cuda:N (default: auto)")
    parser.add_argument("--seed", type=int, help="of what is chosen (default: another one each time, which is printed)")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="default: uvloop")
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for standard output, alone")
    parser.add_argument("--no-setup", action="store_true", help="run in the Python at hand, installing nothing")
    options = parser.parse_args(argv)
    if not 0 < options.minutes < 60 * 24 * 365:
        parser.error("--minutes is above 0")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    from benchmarks.command import check_target, loop_factory, say, write
    from trials.world import Tally

    import aiooffload as ao
    from aiooffload.testing import Resources

    out = sys.stderr if options.json == "-" else sys.stdout
    print(f"seed {options.seed}", file=out, flush=True)
    tally, began = Tally(), time.monotonic()
    try:
        check_target(options.json)
        with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
            runner.run(open_once(options.device))
        before = Resources.now()
        with asyncio.Runner(loop_factory=loop_factory(options.loop)) as runner:
            label, growth = runner.run(soak(options.device, options.minutes * 60, options.seed, tally))
    except (ao.DeviceLostError, ao.UsageError, ao.DeviceUnavailableError, OSError) as error:
        print(f"scripts/soak: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nscripts/soak: stopped", file=sys.stderr)
        return 130
    for leak in before.leaks():
        tally.leak(f"at the end: {leak}")
    say("")
    for problem in tally.problems:
        print(problem, file=out)
    seconds = round(time.monotonic() - began, 1)
    verdict = "FAILED" if tally.mismatches or tally.leaks else "ok"
    counts = f"{tally.operations} operations, {tally.cancelled} cancelled, {tally.faults} faults"
    found = f"{tally.mismatches} mismatches, {tally.leaks} leaks"
    print(f"{verdict}: {label}, {counts}, {found} in {seconds} s", file=out)
    figures = {"device": label, "seed": options.seed, "seconds": seconds, "growth_bytes": growth}
    write(options.json, asdict(tally) | figures)
    return 1 if tally.mismatches or tally.leaks else 0


if __name__ == "__main__":
    sys.exit(main())
