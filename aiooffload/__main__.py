"""``python -m aiooffload``: the commands of :mod:`aiooffload.service.cli`."""

from __future__ import annotations

import sys

from aiooffload.service.cli import main

if __name__ == "__main__":
    sys.exit(main())
