"""What ``scripts/bench`` and other scripts have in common: options, the loop, progress, where figures go."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO


def add_efforts(parser: argparse.ArgumentParser, full: object, quick: object, smoke: object, quick_takes: str) -> None:
    """Add the options of every command that measures a device."""
    parser.add_argument("--device", default="auto", help="auto, host or cuda:N (default: auto)")
    effort = parser.add_mutually_exclusive_group()
    effort.add_argument("--quick", dest="effort", action="store_const", const=quick, help=quick_takes)
    effort.add_argument("--smoke", dest="effort", action="store_const", const=smoke, help="only see that it runs")
    add_json(parser)
    parser.set_defaults(effort=full)


def add_loop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--loop", choices=("uvloop", "asyncio"), default="uvloop", help="default: uvloop")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the figures there; - for standard output, alone")


def run(
    name: str,
    options: argparse.Namespace,
    measure: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any], TextIO], object],
) -> int:
    """Measure, print the tables, write the figures; return the exit status."""
    import aiooffload as ao

    try:
        check_target(options.json)
        figures = measure()
    except (ao.OffloadError, OSError, RuntimeError) as error:
        print(f"scripts/bench {name}: {error}", file=sys.stderr)
        return 2
    say("")
    show(figures, sys.stderr if options.json == "-" else sys.stdout)
    write(options.json, figures)
    return 0


def write(target: str | None, figures: dict[str, Any]) -> None:
    """Write the figures where ``--json`` says, if it was given."""
    if target == "-":
        print(json.dumps(figures, indent=2))
    elif target:
        Path(target).write_text(json.dumps(figures, indent=2) + "\n")


def check_target(target: str | None) -> None:
    """Raise OSError if a file cannot be written: better to know now than after minutes."""
    if target and target != "-":
        open(target, "a").close()


def loop_factory(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    if name == "asyncio":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop


async def device_of(name: str) -> tuple[str, str]:
    """Return the label and the name of the device that ``name`` stands for."""
    import aiooffload as ao

    async with ao.Offload(name, lanes=1) as off:
        return off.properties.label, off.properties.name


def say(text: str) -> None:
    """Show on a terminal what is being measured, in one line."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{text}", end="", file=sys.stderr, flush=True)
