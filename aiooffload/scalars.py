"""Python numbers as NumPy scalars: exactly, rounded where the dtype is a float, or not at all."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from aiooffload.errors import UsageError

__all__ = ["scalar"]

# What a narrower float can hold: beyond it NumPy warns and gives infinity.
_LARGEST: Final = {np.dtype(kind).str: float(np.finfo(kind).max) for kind in (np.float16, np.float32)}
_ACCEPTED: Final[dict[str, tuple[type, ...]]] = {
    "b": (bool,),
    "i": (int,),
    "u": (int,),
    "f": (int, float),
    "c": (int, float, complex),
}


def scalar(value: Any, dtype: np.dtype[Any], what: str) -> np.generic:
    """Return ``value`` as a scalar of ``dtype``.

    A NumPy scalar has to have that dtype; a Python number has to be one that the dtype can hold,
    where a float may round. Raises UsageError, in which ``what`` names the value.
    """
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if isinstance(value, np.generic):
        if value.dtype != dtype:
            raise UsageError(f"{what} has dtype {value.dtype}, not {dtype}")
        return value
    if dtype.kind not in _ACCEPTED:
        return _converted(value, dtype, what)
    if not isinstance(value, _ACCEPTED[dtype.kind]):
        raise UsageError(f"{what} cannot be {value!r}: it is of type {dtype}")
    largest = _LARGEST.get(dtype.str)
    if largest is not None and isinstance(value, int | float) and largest < abs(value) < math.inf:
        raise UsageError(f"{what} cannot be {value!r}: out of range of {dtype}")
    try:
        converted: np.generic = dtype.type(value)
    except OverflowError as error:
        raise UsageError(f"{what} cannot be {value!r}: {error}") from None
    return converted


def _converted(value: object, dtype: np.dtype[Any], what: str) -> np.generic:
    """A struct from a tuple, a date from its text: what NumPy makes of it."""
    try:
        array = np.array(value, dtype=dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be {value!r}: {error}") from None
    if array.shape != ():
        raise UsageError(f"{what} cannot be {value!r}: it is one {dtype}")
    element: Any = array[()]
    converted: np.generic = element
    return converted
