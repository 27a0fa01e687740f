"""The GPU tests run with the driver opened once before the first of them."""

from __future__ import annotations

import pytest

from tests.gpu.support import driver_is_up

__all__ = ["driver_is_up"]


@pytest.fixture(autouse=True)
def _with_driver(driver_is_up: None) -> None:
    pass
