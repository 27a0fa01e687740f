"""``python -m aiooffload``: the commands of :mod:`aiooffload.service.cli`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command that the arguments name; returns the exit status."""
    try:
        from aiooffload.service.cli import main as run
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("aiooffload"):
            raise
        print(f"aiooffload: {error.name} is not installed: pip install 'aiooffload[serve]'", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
