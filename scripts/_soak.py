"""Run a random mix of everything for long, with cancels, timeouts and failures, and check every result.

Launches, copies of any shape, fills, custom operations, host tasks, gates, bound launches, scratch, calls from kernels
of every kind and traces, many at a time (see scripts/trials/acts.py); results are compared with NumPy's. In between, at
rest, it looks at what grows: memory, descriptors, threads, device memory.

With --serve it starts `aiooffload serve` instead and kills the device process again and again while clients ask (see
scripts/trials/serving.py); each request has to be answered, rightly or with a status that says when to try again.

Exits 1 if a result was wrong, a request was not answered or something leaks, 2 if the soak could not be made.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trials.growth import EPOCHS, Held, compare, held_by

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from trials import serving
    from trials.world import Tally, World

    import aiooffload as ao

TASKS = 12
"""Acts at a time."""
CANCELS = 0.04
"""Share of acts that are cancelled on their way."""
STUCK_S = 120.0
"""After so long an act hangs."""


@dataclass(frozen=True)
class Footprint(Held):
    """What the process and its Offload hold while nothing is going on."""

    device_bytes: int
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
    device_bytes = stats["allocated_bytes"] - stats["scratch"]["kept_bytes"]
    return Footprint(**held_by("self"), device_bytes=device_bytes, handles=handles["streams"] + handles["offloads"])


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
            say(f"{loop.time() - began:.0f} of {seconds:.0f} s: {tally.done}, {prints[-1].resident_bytes >> 20} MiB")
    return label, compare(tally, prints)


def run_offload(options: argparse.Namespace) -> tuple[Tally, str, int]:
    """Soak an Offload; return what was found, the device and the growth of resident memory."""
    from benchmarks.command import loop_factory
    from trials.world import Tally

    from aiooffload.testing import Resources

    tally, factory = Tally(), loop_factory(options.loop or "uvloop")
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(open_once(options.device))
    before = Resources.now()
    with asyncio.Runner(loop_factory=factory) as runner:
        label, growth = runner.run(soak(options.device, options.minutes * 60, options.seed, tally))
    for leak in before.leaks():
        tally.leak(f"at the end: {leak}")
    return tally, label, growth


def run_worker(options: argparse.Namespace) -> tuple[serving.Tally, str, int]:
    """Soak a worker; return what was found, the device and the growth of the front's resident memory."""
    from trials import serving

    tally = serving.Tally()
    label, growth = serving.run(options.device, options.minutes * 60, options.seed, options.kill_every_s, tally)
    return tally, label, growth


# -- the command line ----------------------------------------------------------------------------


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default: 10)")
    parser.add_argument("--device", default="auto", help="auto, host or cuda:N (default: auto)")
    parser.add_argument("--seed", type=int, help="of what is chosen (default: another one each time, which is printed)")
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), help="default: uvloop")
    parser.add_argument("--serve", action="store_true", help="soak a worker, and kill its device process")
    parser.add_argument(
        "--kill-every-s", type=float, metavar="SECONDS", help="with --serve (default: 20, or what makes three)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for standard output, alone")
    parser.add_argument("--no-setup", action="store_true", help="run in the Python at hand, installing nothing")
    options = parser.parse_args(argv)
    if not 0 < options.minutes < 60 * 24 * 365:
        parser.error("--minutes is above 0")
    if options.serve and options.loop:
        parser.error("--loop is not for --serve: a worker has its own")
    if options.serve and "," in options.device:
        parser.error("--serve is for one device")
    if options.kill_every_s is None:
        options.kill_every_s = min(20.0, options.minutes * 60 / 4)
    elif not options.serve:
        parser.error("--kill-every-s is for --serve")
    if not options.kill_every_s > 0:
        parser.error("--kill-every-s is above 0")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32)
    return options


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    from benchmarks.command import check_target, say, write
    from benchmarks.serve import NotServing

    import aiooffload as ao

    out = sys.stderr if options.json == "-" else sys.stdout
    print(f"seed {options.seed}", file=out, flush=True)
    began = time.monotonic()
    tally: Tally | serving.Tally
    try:
        check_target(options.json)
        tally, label, growth = run_worker(options) if options.serve else run_offload(options)
    except (ao.DeviceLostError, ao.UsageError, ao.DeviceUnavailableError, NotServing, OSError) as error:
        print(f"scripts/soak: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nscripts/soak: stopped", file=sys.stderr)
        return 130
    say("")
    for problem in tally.problems:
        print(problem, file=out)
    seconds = round(time.monotonic() - began, 1)
    verdict = "FAILED" if tally.bad else "ok"
    print(f"{verdict}: {label}, {tally.done}, {tally.found} in {seconds} s", file=out)
    figures = {"device": label, "seed": options.seed, "seconds": seconds, "growth_bytes": growth}
    write(options.json, tally.figures() | figures)
    return 1 if tally.bad else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started has to end, too
    sys.exit(main())
