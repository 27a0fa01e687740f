"""Which versions of packages are here."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["version_of"]


def version_of(name: str) -> str:
    """Return the version of a package; ``"not installed"`` also for one that runs from its sources."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
