"""``dlpack.c``: the capsules, and whose the memory is."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from aiooffload._native import dlpack_export, dlpack_import
from aiooffload.interchange import CPU, capsule


def test_capsules_are_used_once() -> None:
    """A capsule that was taken, or is none, is refused."""
    made = capsule(object(), 0x1000, (CPU, 0), (2,), (4,), np.dtype("f4"), (1, 0))
    keeper, *described = dlpack_import(made)
    assert described == [0x1000, CPU, 0, (2,), (1,), 2, 32, 1, 0]
    for wrong in (made, object(), 5):
        with pytest.raises(TypeError, match="capsule"):
            dlpack_import(wrong)
    del keeper


@pytest.mark.parametrize("is_versioned", [False, True])
def test_holder_goes_with_the_last_of_them(is_versioned: bool) -> None:
    """What keeps the memory is let go when the capsule goes unused, or when what it was turned into goes."""

    class Holder:
        pass

    def make() -> tuple[Any, weakref.ref[Holder]]:
        holder = Holder()
        return dlpack_export(holder, 1, CPU, 0, (), (), 0, 8, is_versioned), weakref.ref(holder)

    made, held = make()
    del made
    assert held() is None
    made, held = make()
    taken = dlpack_import(made)
    del made
    assert held() is not None
    del taken
    assert held() is None


@pytest.mark.parametrize(("shape", "strides"), [((2,), ()), ((1,) * 65, (1,) * 65), (("a",), (1,)), ((2**64,), (1,))])
def test_sizes_that_do_not_fit(shape: Any, strides: Any) -> None:
    """Shape and strides are as many integers of 64 bits, up to 64."""
    with pytest.raises((ValueError, TypeError, OverflowError)):
        dlpack_export(object(), 1, CPU, 0, shape, strides, 0, 8, True)
