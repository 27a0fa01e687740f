"""The worker's settings: flags win over the environment (``AIOOFFLOAD_*``), which wins over a TOML file."""

from __future__ import annotations

import argparse
import ipaddress
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from aiooffload.errors import UsageError

__all__ = ["PREFIX", "Config", "add_flags", "load", "table"]

_FORMATS: Final = ("json", "console")
_LEVELS: Final = ("debug", "info", "warning", "error")
PREFIX: Final = "AIOOFFLOAD_"
_OTHERS: Final = frozenset(("AIOOFFLOAD_CACHE_DIR", "AIOOFFLOAD_CONFIG", "AIOOFFLOAD_APP"))
"""Variables with the prefix that are no settings."""
_OF_KUBERNETES: Final = ("AIOOFFLOAD_SERVICE_", "AIOOFFLOAD_PORT_")
"""What Kubernetes sets in every container where a Service is called ``aiooffload``: variables of these beginnings, and
``AIOOFFLOAD_PORT`` itself, as an address."""
_BOOLEANS: Final = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}


def _setting(default: Any, text: str, least: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "choices": choices})


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. A field is the flag of its name with dashes, the variable in capitals, the key in the file."""

    device: str = _setting("auto", "what to serve with: auto, host, cuda:N, or several, separated by commas")
    host: str = _setting("127.0.0.1", "address to listen on; any but loopback asks for a token")
    port: int = _setting(8000, "port to listen on; 0 for any that is free", 0)
    token: str = _setting("", "clients have to send 'Authorization: Bearer TOKEN', except to the health checks")
    insecure: bool = _setting(False, "listen on other addresses than loopback without a token")
    lanes: int = _setting(16, "streams of each device, 1 to 256", 1)
    max_queue: int = _setting(1024, "requests in the worker at a time; more get status 429", 1)
    max_queue_mib: int = _setting(1024, "MiB of bodies and answers in the worker; more get status 429", 1)
    concurrency: int = _setting(64, "calls of an endpoint without batching that a device has at a time", 1)
    max_connections: int = _setting(1024, "connections at a time; more are closed at once", 1)
    max_body_mib: int = _setting(64, "MiB that a request's body may have, also when decompressed", 1)
    max_json_mib: int = _setting(8, "MiB of a request that may be JSON; larger tensors come in binary", 1)
    receive_timeout_s: float = _setting(
        30.0, "seconds from a request's beginning to its end, and from a connection's", 0
    )
    keep_alive_s: float = _setting(60.0, "seconds that an idle connection is kept", 0)
    request_timeout_s: float = _setting(60.0, "longest time for a request, whatever it asks for; 0 for no limit", 0)
    hard_timeout_s: float = _setting(
        0.0, "a launch or call that takes longer, or a loop blocked for so long, ends the process; 0 for never", 0
    )
    stall_s: float = _setting(
        20.0, "with calls, but no answer and nothing done on the device for so long, it is not ready", 0
    )
    start_timeout_s: float = _setting(120.0, "seconds in which a device process has to be ready", 0)
    grace_s: float = _setting(30.0, "seconds in which requests may finish after SIGTERM, and the program stop", 0)
    log_format: str = _setting("json", "json, or console for people", choices=_FORMATS)
    log_level: str = _setting("info", "least severe lines that are written; info has one per request", choices=_LEVELS)

    @property
    def devices(self) -> list[str]:
        """The labels of the devices."""
        return [label.strip() for label in self.device.split(",")]

    def check(self) -> None:
        """Raise UsageError if a value is out of range, or a combination is unsafe."""
        for one in fields(self):
            value, least, choices = getattr(self, one.name), one.metadata["least"], one.metadata["choices"]
            if least is not None and not least <= value < 1e9:
                raise UsageError(f"{one.name} is at least {least}, not {value}")
            if choices and value not in choices:
                raise UsageError(f"{one.name} is {' or '.join(choices)}, not {value!r}")
        if self.max_queue_mib < self.max_body_mib:
            raise UsageError(f"max_queue_mib is at least max_body_mib, {self.max_body_mib}, not {self.max_queue_mib}")
        if self.port > 65_535:
            raise UsageError(f"port is at most 65535, not {self.port}")
        if not all(self.devices) or len(set(map(_numbered, self.devices))) != len(self.devices):
            raise UsageError(f"device names each device once, not {self.device!r}")
        if not (_is_loopback(self.host) or self.token or self.insecure):
            raise UsageError(
                f"whoever reaches {self.host} could use this worker: set a token ({PREFIX}TOKEN), "
                "or say --insecure if something else keeps strangers out"
            )


def _numbered(label: str) -> str:
    """Return the one name of a device that has several: ``host`` is ``host:0``."""
    name, _, index = label.partition(":")
    return label if label == "auto" or (index and not index.isdecimal()) else f"{name}:{int(index or 0)}"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"  # any other name may stand for any address


def _parse(one: Any, text: str, where: str) -> Any:
    """Return the value that ``text`` stands for."""
    kind = type(one.default)
    try:
        return _BOOLEANS[text.strip().lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise UsageError(f"{where} is a {kind.__name__}, not {text!r}") from None


def _of_file(path: str, read: Callable[[str], str]) -> dict[str, Any]:
    try:
        content = tomllib.loads(read(path))
    except OSError as error:
        raise UsageError(f"the configuration {path!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration {path!r} is not TOML: {error}") from None
    known = {one.name: one for one in fields(Config)}
    if unknown := sorted(content.keys() - known):
        raise UsageError(f"{path!r} has unknown keys: {', '.join(unknown)}")
    for name, value in content.items():
        kind = type(known[name].default)
        if kind is float and type(value) is int:
            content[name] = float(value)
        elif type(value) is not kind:
            raise UsageError(f"{name} in {path!r} is a {kind.__name__}, not {value!r}")
    return content


def _of_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    known = {PREFIX + one.name.upper(): one for one in fields(Config)}
    given = {name for name in environment if name.startswith(PREFIX) and not name.startswith(_OF_KUBERNETES)} - _OTHERS
    if environment.get("AIOOFFLOAD_PORT", "").startswith(("tcp://", "udp://")):
        given.remove("AIOOFFLOAD_PORT")
    if unknown := sorted(given - known.keys()):
        raise UsageError(f"unknown settings in the environment: {', '.join(unknown)}")
    return {known[name].name: _parse(known[name], environment[name], name) for name in given}


def load(
    flags: Mapping[str, str | bool | None],
    environment: Mapping[str, str],
    read: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8"),
) -> Config:
    """Return the settings.

    Parameters
    ----------
    flags
        What was said on the command line, by the name of the field, as text; ``config`` names the file.
    environment
        The variables; ``AIOOFFLOAD_CONFIG`` names the file if no flag does.
    read
        How the file is read.

    Raises
    ------
    UsageError
        A key is unknown, a value is none, or the whole would be unsafe. Nothing of a token is in the text.
    """
    path = flags.get("config") or environment.get("AIOOFFLOAD_CONFIG")
    values = _of_file(str(path), read) if path else {}
    values |= _of_environment(environment)
    for one in fields(Config):
        text = flags.get(one.name)
        if text is not None:
            values[one.name] = text if isinstance(text, bool) else _parse(one, text, _flag(one.name))
    config = Config(**values)
    config.check()
    return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each setting; what was not said is None."""
    for one in fields(Config):
        options: dict[str, Any] = {"action": "store_true"} if type(one.default) is bool else {"metavar": "X"}
        parser.add_argument(_flag(one.name), dest=one.name, default=None, help=argparse.SUPPRESS, **options)
    parser.add_argument("--config", metavar="FILE", help=argparse.SUPPRESS)


def table() -> str:
    """Return the table of all settings for ``--help``."""
    rows = [("flag", "variable", "default", "what it is")]
    rows += [
        (_flag(one.name), PREFIX + one.name.upper(), _shown(one.default), one.metadata["help"])
        for one in fields(Config)
    ]
    rows.append(("--config", PREFIX + "CONFIG", "", "a TOML file whose keys are the flags' names with _ for -"))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(
        "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3])) for row in rows
    )


def _shown(value: object) -> str:
    return {"": "none", False: "off"}.get(value, str(value)) if isinstance(value, str | bool) else f"{value:g}"
