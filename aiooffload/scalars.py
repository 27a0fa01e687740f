"""Python values as NumPy scalars and structs: exactly, rounded where the dtype is a float, or not at all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from aiooffload.errors import UsageError

__all__ = ["scalar", "scalar_bytes"]

# What a narrower float, or part of a complex number, can hold: beyond it NumPy warns and gives infinity.
_LARGEST: Final = {np.dtype(kind).str: float(np.finfo(kind).max) for kind in (np.float16, np.float32, np.complex64)}
_OF_OTHERS: Final = 2
"""``dtype.isbuiltin`` of a dtype that another library has registered, such as ml_dtypes'."""
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
    where a float may round. A struct is made of a tuple, whose elements have to fit in the same way.
    Raises UsageError, in which ``what`` names the value.
    """
    if isinstance(value, np.ndarray) and value.shape == ():
        value = value[()]
    if dtype.kind in "SU":
        return _text(value, dtype, what)
    if isinstance(value, np.generic):
        if value.dtype != dtype:
            raise UsageError(f"{what} has dtype {value.dtype}, not {dtype}")
        return value
    if dtype.names is not None:
        return _struct(value, dtype, what)
    if dtype.kind not in _ACCEPTED or dtype.isbuiltin == _OF_OTHERS:
        return _converted(value, dtype, what)
    if not isinstance(value, _ACCEPTED[dtype.kind]):
        raise UsageError(f"{what} cannot be {value!r}: it is of type {dtype}")
    number, largest = cast("complex", value), _LARGEST.get(dtype.str)  # or what has the same parts
    if largest is not None and any(largest < abs(part) < math.inf for part in (number.real, number.imag)):
        raise UsageError(f"{what} cannot be {value!r}: out of range of {dtype}")
    try:
        converted: np.generic = dtype.type(value)
    except OverflowError as error:
        raise UsageError(f"{what} cannot be {value!r}: {error}") from None
    return converted


def scalar_bytes(value: Any, dtype: np.dtype[Any], what: str) -> bytes:
    """Return the bytes of :func:`scalar`, as many as one ``dtype`` has: of text NumPy leaves out zeros at the end."""
    return scalar(value, dtype, what).tobytes().ljust(dtype.itemsize, b"\0")


def _struct(value: object, dtype: np.dtype[Any], what: str) -> np.generic:
    """A struct from a tuple; what is between its fields is 0."""
    names = dtype.names or ()
    if not isinstance(value, tuple) or len(value) != len(names):
        fields = ", ".join(f"{name}: {dtype[name]}" for name in names)
        raise UsageError(f"{what} cannot be {value!r}: it is a tuple, or a NumPy record, of ({fields})")
    record = np.zeros((), dtype)
    for name, element in zip(names, value, strict=True):
        record[name] = _field(element, dtype[name], f"field {name} of {what}")
    return cast("np.generic", record[()])


def _field(value: Any, dtype: np.dtype[Any], what: str) -> Any:
    """One field of a struct: as a scalar, where a NumPy number may have another dtype; an array from a sequence."""
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str | bytes) or len(value) != shape[0]:
            raise UsageError(f"{what} cannot be {value!r}: it is {shape[0]} of {base}")
        inner = np.dtype((base, shape[1:]))
        return [_field(element, inner, what) for element in value]
    if isinstance(value, np.number | np.bool) and value.dtype != dtype:
        value = value.item()
    return scalar(value, dtype, what)


def _text(value: object, dtype: np.dtype[Any], what: str) -> np.generic:
    """Text as long as the dtype has room for."""
    kind = bytes if dtype.kind == "S" else str
    room = dtype.itemsize if kind is bytes else dtype.itemsize // 4
    if not isinstance(value, kind) or len(value) > room:
        raise UsageError(f"{what} cannot be {value!r}: it is {kind.__name__} of length {room} at most")
    return _converted(value, dtype, what)


def _converted(value: object, dtype: np.dtype[Any], what: str) -> np.generic:
    """A date from its text, say: what NumPy makes of it."""
    try:
        array = np.array(value, dtype=dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(f"{what} cannot be {value!r}: {error}") from None
    if array.shape != ():
        raise UsageError(f"{what} cannot be {value!r}: it is one {dtype}")
    converted = cast("Any", array[()])
    is_number = dtype.isbuiltin == _OF_OTHERS and isinstance(value, int | float)
    if is_number and math.isfinite(cast("float", value)) and not math.isfinite(float(converted)):
        raise UsageError(f"{what} cannot be {value!r}: out of range of {dtype}")
    return cast("np.generic", converted)
