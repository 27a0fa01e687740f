"""Versions of what is installed, and of what is not."""

from __future__ import annotations

from importlib.metadata import version

from aiooffload.service.versions import version_of


def test_versions() -> None:
    """A package that is not installed has a version, too, or the worker would not run from a checkout."""
    assert version_of("numpy") == version("numpy")
    assert version_of("a package that nobody has") == "not installed"
