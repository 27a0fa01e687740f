"""``python -m aiooffload``: the commands of :mod:`aiooffload.service.cli`."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command that the arguments name; returns the exit status."""
    if sys.argv[1:2] == ["serve"]:
        # Until the worker has its own handler: the first process of a container has no default action.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    from aiooffload.service.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
