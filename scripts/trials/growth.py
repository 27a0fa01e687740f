"""What a soak looks for at rest: what has grown since its warm-up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

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
SHOWN = 20


@dataclass
class Findings:
    """What a soak has found so far."""

    leaks: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a problem's text, if it is one of the first."""
        if len(self.problems) < SHOWN:
            self.problems.append(text)

    def leak(self, text: str) -> None:
        self.leaks += 1
        self.problems.append(text)

    def figures(self) -> dict[str, Any]:
        """Return them as ``--json`` writes them."""
        return asdict(self)


@dataclass(frozen=True)
class Held:
    """What a process holds while nothing is going on."""

    resident_bytes: int
    descriptors: int
    threads: int


def held_by(process: int | str) -> dict[str, int]:
    """Return what a process holds, by its id; this one by "self"."""
    folder = Path("/proc", str(process))
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return {
        "resident_bytes": int(status["VmRSS"].split()[0]) * 1024,
        "descriptors": len(list((folder / "fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def compare(findings: Findings, prints: Sequence[Held]) -> int:
    """Count what has grown since the warm-up; return the growth of resident memory in bytes."""
    warm, later = prints[: WARM_UP + 1], prints[WARM_UP + 1 :]
    if not later:
        return 0
    last = later[-SETTLED:]  # what is there in each of them stays
    growth = min(one.resident_bytes for one in last) - max(one.resident_bytes for one in warm)
    if growth > GROWTH_BYTES:
        findings.leak(f"resident memory grew by {growth >> 20} MiB after the warm-up")
    for name in (one.name for one in fields(prints[0]) if one.name != "resident_bytes"):
        most, least = max(getattr(one, name) for one in warm), min(getattr(one, name) for one in last)
        if least > most + (LATE_THREADS if name == "threads" else 0):
            findings.leak(f"{name}: {least}, {most} at most in the warm-up")
    return growth
