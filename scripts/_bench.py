"""Measure aiooffload, side by side with other ways to do the same."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# A command is a module with add_arguments(parser) and main(options). Until main is called it may
# import nothing but the standard library.
from benchmarks import bind, cancel, completion, copies, graph, reverse, schedule, serve


class Command(Protocol):
    """A module of ``benchmarks``."""

    __doc__: str | None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...
    def main(self, options: argparse.Namespace) -> int: ...


COMMANDS: dict[str, Command] = {
    "completion": completion,
    "reverse": reverse,
    "bind": bind,
    "copies": copies,
    "graph": graph,
    "schedule": schedule,
    "cancel": cancel,
    "serve": serve,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        assert module.__doc__ is not None
        summary, _, _ = module.__doc__.partition("\n")
        command = commands.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_argument("--no-setup", action="store_true", help="run in the Python at hand, install nothing")
        module.add_arguments(command)
    options = parser.parse_args(argv)
    try:
        return COMMANDS[options.command].main(options)
    except KeyboardInterrupt:
        print(f"\nscripts/bench {options.command}: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
