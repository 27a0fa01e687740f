"""``rules/scheduler.py``: which operation goes where and when, without a device."""

from __future__ import annotations

import subprocess
import sys


def test_is_pure() -> None:
    """Importing the scheduler imports neither asyncio nor threads nor CUDA."""
    code = "import sys, aiooffload.rules.scheduler; print('cuda' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
