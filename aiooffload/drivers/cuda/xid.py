"""What the system noted about a fault: the XID events of NVML, where it is present.

It needs no context, so it can be asked after a loss. An XID names the kind of fault (31 is a bad
memory access, 43 a trap; NVIDIA's "XID Errors" guide lists them) but not the process.
"""

from __future__ import annotations

from typing import Any

from aiooffload.log import log

__all__ = ["XidWatch"]

_CRITICAL_XID = 8  # nvmlEventTypeXidCriticalError


class XidWatch:
    """Collects the XID events of one GPU.

    Parameters
    ----------
    uuid
        The GPU, as NVML names it (``"GPU-..."``).
    """

    def __init__(self, uuid: str) -> None:
        # None where NVML is missing or does not give events here (containers, MIG).
        self._nvml: Any = None
        self._events = 0
        try:
            from cuda.bindings import nvml
        except ImportError as error:
            log.debug("no NVML bindings", error=str(error))
            return
        try:
            nvml.init_v2()
        except Exception as error:  # NVML has one class per status, and no common base in every release
            log.debug("no NVML", error=str(error))
            return
        try:
            self._events = nvml.event_set_create()
            self._nvml = nvml
            device = nvml.device_get_handle_by_uuid(uuid)
            nvml.device_register_events(device, _CRITICAL_XID, self._events)
        except Exception as error:  # as above: containers and MIG give no events
            log.debug("no XID events from NVML", error=str(error))
            self.close()

    def note(self) -> str:
        """Return the XIDs seen so far as a sentence, or an empty string."""
        seen: list[str] = []
        while self._nvml is not None and len(seen) < 16:
            try:
                event = self._nvml.event_set_wait_v2(self._events, 0)
            except Exception:  # a time-out is an exception too: nothing more has happened
                break
            seen.append(str(event.event_data))
        return f"NVML reports XID {', '.join(dict.fromkeys(seen))}" if seen else ""

    def close(self) -> None:
        """Stop collecting."""
        if self._nvml is not None:
            self._nvml.event_set_free(self._events)
            self._nvml.shutdown()
            self._nvml = None
