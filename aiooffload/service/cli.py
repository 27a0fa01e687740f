"""The commands: ``serve``, ``run``, ``devices``, ``doctor``, ``version``."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import uvloop

from aiooffload.errors import OffloadError, UsageError
from aiooffload.service import config as settings
from aiooffload.service import doctor as examination
from aiooffload.service.versions import version_of

__all__ = ["main"]


def serve(options: argparse.Namespace) -> int:
    """Serve a program over HTTP until a signal ends it: the Open Inference Protocol v2, and /metrics.

    SIGTERM and SIGINT let requests finish for --grace-s seconds; the exit status is 0 if all did.
    """
    with _extra():
        from aiooffload.service.logs import bridge_logging, configure_logs
        from aiooffload.service.worker import serve as serve_worker

    app = options.app or os.environ.get("AIOOFFLOAD_APP")
    if not app:
        raise UsageError("name the program as MODULE:APP (or in AIOOFFLOAD_APP)")
    config = settings.load(vars(options), os.environ)
    writer = configure_logs(config.log_format, config.log_level)
    bridge_logging()
    try:
        status: int = _run(serve_worker(config, app))
        return status
    finally:
        writer.close()


def run(options: argparse.Namespace) -> int:
    """Answer one request without a server, and print the outputs.

    An input is NAME=JSON, such as x=[[1,2],[3,4]], or NAME=@FILE.npy.
    """
    with _extra():
        from aiooffload.service.once import answer

    sys.path.insert(0, os.getcwd())
    outputs = answer(options.app, options.endpoint, options.inputs, options.device)
    if options.json:
        _print_json(outputs)
    else:
        for output in outputs:
            shape = "x".join(map(str, output["shape"])) or "scalar"
            data = json.dumps(output["data"], ensure_ascii=False, separators=(",", ":"))
            print(f"{output['name']} ({output['datatype']}, {shape}): {data}")
    return 0


def devices(options: argparse.Namespace) -> int:
    """List what --device can name: the GPUs, and the host."""
    _show(examination.as_rows(_run(examination.devices())), options.json)
    return 0


def doctor(options: argparse.Namespace) -> int:
    """Look at driver, environment and limits, run the self-test, measure awaits, and say what to change and why.

    The exit status is 1 if something does not work.
    """
    findings = _run(examination.examine(options.device))
    _show(examination.as_rows(findings), options.json)
    return 1 if examination.failed(findings) else 0


def version(options: argparse.Namespace) -> int:
    """Print the version of the package and of what it runs on."""
    names = ("aiooffload", "cuda-python", "numpy", "uvloop", "starlette", "uvicorn")
    versions = {"python": platform.python_version()} | {name: version_of(name) for name in names}
    if options.json:
        _print_json(versions)
    else:
        for name, number in versions.items():
            print(name, number)
    return 0


@contextmanager
def _extra() -> Iterator[None]:
    """Import what only serving needs."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("aiooffload"):
            raise
        raise UsageError(f"{error.name} is not installed: pip install 'aiooffload[serve]'") from None


def _run(coroutine: Any) -> Any:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(coroutine)


def _print_json(value: object) -> None:
    json.dump(value, sys.stdout, indent=2, ensure_ascii=False)
    print()


def _show(rows: Sequence[Mapping[str, object]], as_json: bool) -> None:
    """Print rows as JSON, as a table on a terminal, or as plain lines."""
    if as_json:
        _print_json(rows)
        return
    cells = [[str(value) for value in row.values()] for row in rows]
    if not sys.stdout.isatty():
        for row in cells:
            print("\t".join(row))
        return
    cells.insert(0, [name.replace("_", " ") for name in rows[0]])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return what a command line asks for."""
    top = argparse.ArgumentParser(prog="aiooffload", description="Await CUDA kernels, and serve programs that do.")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(function: Any, help: str, **options: Any) -> argparse.ArgumentParser:
        one = commands.add_parser(
            function.__name__,
            help=help,
            description=inspect.getdoc(function),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **options,
        )
        one.set_defaults(run=function)
        return one

    epilog = "A flag wins over its variable, a variable over the file:\n\n" + settings.table()
    usage = "aiooffload serve [FLAGS] MODULE:APP"
    one = add(serve, "serve MODULE:APP over HTTP", epilog=epilog, usage=usage)
    one.add_argument("app", nargs="?", metavar="MODULE:APP", help="where the ao.App is, from the working folder on")
    settings.add_flags(one)
    one = add(run, "answer one request without a server")
    one.add_argument("app", metavar="MODULE:APP", help="where the ao.App is, from the working folder on")
    one.add_argument("--endpoint", metavar="NAME", help="default: the first one")
    one.add_argument("inputs", nargs="*", metavar="NAME=VALUE", help="JSON, or @FILE.npy")
    _add_device(one)
    _add_json(one)
    _add_json(add(devices, "list the devices"))
    one = add(doctor, "examine this machine")
    _add_device(one)
    _add_json(one)
    _add_json(add(version, "print versions"))
    options, rest = top.parse_known_args(arguments)
    if options.command == "run" and not any(one.startswith("-") for one in rest):
        options.inputs += rest  # argparse takes none of them behind a flag
    elif rest:
        commands.choices[options.command].error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def _add_device(one: argparse.ArgumentParser) -> None:
    one.add_argument("--device", default="auto", help="auto, host or cuda:N (default: auto)")


def _add_json(one: argparse.ArgumentParser) -> None:
    one.add_argument("--json", action="store_true", help="print JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = parse(arguments)
    try:
        status: int = options.run(options)
    except UsageError as error:
        print(f"aiooffload {options.command}: {error}", file=sys.stderr)
        return 2
    except OffloadError as error:
        print(f"aiooffload {options.command}: {error}", file=sys.stderr)
        return 1
    return status
