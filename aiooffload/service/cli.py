"""The commands: ``serve``, ``run``, ``devices``, ``doctor``, ``version``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence

import uvloop

from aiooffload.errors import UsageError
from aiooffload.service import config as settings
from aiooffload.service.logs import configure_logs

__all__ = ["main"]


def serve(options: argparse.Namespace) -> int:
    """Serve a program until a signal ends it."""
    from aiooffload.service.worker import serve as serve_worker

    app = options.app or os.environ.get("AIOOFFLOAD_APP")
    if not app:
        raise UsageError("name the program as MODULE:APP (or in AIOOFFLOAD_APP)")
    config = settings.load(vars(options), os.environ)
    writer = configure_logs(config.log_format, config.log_level)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve_worker(config, app))
    finally:
        writer.close()


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    top = argparse.ArgumentParser(prog="aiooffload", description="Await CUDA kernels, and serve programs that do.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    one = commands.add_parser(
        "serve",
        help="serve MODULE:APP over HTTP",
        description=serve.__doc__,
        epilog="A flag wins over its variable, a variable over the file:\n\n" + settings.table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="aiooffload serve [FLAGS] MODULE:APP",
    )
    one.add_argument(
        "app", nargs="?", metavar="MODULE:APP", help="where the ao.App is; modules of the working folder, too"
    )
    settings.add_flags(one)
    one.set_defaults(run=serve)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except UsageError as error:
        print(f"aiooffload {options.command}: {error}", file=sys.stderr)
        return 2
    return status
