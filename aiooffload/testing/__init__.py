"""For tests of programs that use aiooffload, and its own: devices that fail on demand, a latch, a clock.

``async with open_offload(FaultyDevice()) as off:`` is an Offload on the host device, past a plan of what goes wrong.
``sweep`` runs a whole program once for each driver call that could fail. Nothing else in the package imports this.
"""

from aiooffload.testing.clock import ForwardLoop
from aiooffload.testing.device import ALLOCATIONS, ENQUEUES, FaultyDevice
from aiooffload.testing.handles import live_handles
from aiooffload.testing.latch import Latch
from aiooffload.testing.opening import open_offload
from aiooffload.testing.resources import Resources
from aiooffload.testing.sweeping import FAULTS, TEARS, Case, Fault, Run, Scenario, run_case, sweep

__all__ = [
    "ALLOCATIONS",
    "ENQUEUES",
    "FAULTS",
    "TEARS",
    "Case",
    "Fault",
    "FaultyDevice",
    "ForwardLoop",
    "Latch",
    "Resources",
    "Run",
    "Scenario",
    "live_handles",
    "open_offload",
    "run_case",
    "sweep",
]
