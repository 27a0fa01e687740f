"""Data types and shapes of the protocol, and tensors as bytes.

A tensor is held as the protocol's binary form: little-endian, row by row, without gaps; each element of BYTES is its
length in four bytes, then its content. Only the device process makes arrays of it, and the front where it has to
read or write JSON.
"""

from __future__ import annotations

import importlib
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np

from aiooffload.errors import UsageError

__all__ = [
    "DATATYPES",
    "MAX_RANK",
    "Data",
    "Datatype",
    "Spec",
    "array_of",
    "bytes_elements",
    "data_of",
    "datatype_of",
    "pack_bytes",
    "split_rows",
]

Data: TypeAlias = bytes | bytearray | memoryview
"""A tensor's binary form."""

MAX_RANK: Final = 32
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Datatype:
    """One of the protocol's data types."""

    name: str
    numpy_name: str
    """The NumPy dtype's name; that of BF16 is registered by ml_dtypes."""
    nbytes: int
    """Of one element; 0 if that differs from element to element."""
    json: frozenset[type]
    """What an element may be in JSON."""
    most: float = math.inf
    """The largest magnitude of a floating-point type that JSON's numbers may exceed."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of a handler's array; elements of BYTES are ``bytes`` objects."""
        return _dtype(self.numpy_name)


@cache
def _dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        importlib.import_module("ml_dtypes")
    return np.dtype(name)


_INTEGER: Final = frozenset((int,))
_NUMBER: Final = frozenset((int, float))

DATATYPES: Final = {
    kind.name: kind
    for kind in (
        Datatype("BOOL", "bool", 1, frozenset((bool,))),
        *(Datatype(f"UINT{8 * n}", f"uint{8 * n}", n, _INTEGER) for n in (1, 2, 4, 8)),
        *(Datatype(f"INT{8 * n}", f"int{8 * n}", n, _INTEGER) for n in (1, 2, 4, 8)),
        Datatype("FP16", "float16", 2, _NUMBER, 65504.0),
        Datatype("FP32", "float32", 4, _NUMBER, float(np.finfo(np.float32).max)),
        Datatype("FP64", "float64", 8, _NUMBER),
        Datatype("BF16", "bfloat16", 2, _NUMBER, 255.0 * 2.0**120),
        Datatype("BYTES", "object", 0, frozenset((str,))),
    )
}
_BY_NUMPY_NAME: Final = {kind.numpy_name: kind for kind in DATATYPES.values()}


def datatype_of(dtype: Any) -> Datatype:
    """Return the protocol's data type for its name, a NumPy dtype, or ``bytes`` and ``str`` (BYTES).

    Raises
    ------
    UsageError
        The protocol has none for it.
    """
    if isinstance(dtype, str) and dtype in DATATYPES:
        return DATATYPES[dtype]
    if dtype in (bytes, str):
        return DATATYPES["BYTES"]
    try:
        return _BY_NUMPY_NAME[np.dtype(dtype).name if dtype is not None else ""]  # None is NumPy's default
    except (TypeError, KeyError):
        raise UsageError(f"{dtype!r} is no data type of the protocol: one of {', '.join(DATATYPES)}") from None


@dataclass(frozen=True, slots=True)
class Spec:
    """What an endpoint declares of one tensor: -1 stands for a dimension that a request chooses."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]

    def admits(self, shape: Sequence[int]) -> bool:
        """Whether a tensor may have that shape."""
        if len(shape) != len(self.shape):
            return False
        return all(declared in (-1, given) for declared, given in zip(self.shape, shape, strict=True))

    def as_metadata(self) -> dict[str, Any]:
        """Return it as the protocol's metadata has it."""
        return {"name": self.name, "datatype": self.datatype.name, "shape": list(self.shape)}

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> Spec:
        """Return what :meth:`as_metadata` was made from."""
        return cls(metadata["name"], DATATYPES[metadata["datatype"]], tuple(metadata["shape"]))


def pack_bytes(elements: Iterable[bytes]) -> bytearray:
    """Return the binary form of a BYTES tensor."""
    data = bytearray()
    for element in elements:
        data += _LENGTH.pack(len(element))
        data += element
    return data


def _ends(data: Data) -> Iterator[tuple[int, int]]:
    """Yield where the content of each element begins and ends.

    Raises
    ------
    ValueError
        The data ends within an element.
    """
    at, size = 0, len(data)
    while at < size:
        if at + 4 > size:
            raise ValueError("the data ends within an element's length")
        start = at + 4
        at = start + _LENGTH.unpack_from(data, at)[0]
        if at > size:
            raise ValueError("the data ends within an element")
        yield start, at


def bytes_elements(data: Data) -> list[bytes]:
    """Return the elements of a BYTES tensor; raises ValueError where the data ends within one."""
    return list(_elements(data))


def _elements(data: Data) -> Iterator[bytes]:
    content = bytes(data)
    return (content[start:end] for start, end in _ends(content))


def array_of(datatype: Datatype, shape: Sequence[int], data: Data) -> np.ndarray[Any, Any]:
    """Return the array of a tensor; it uses ``data`` in place, and is writable where that is.

    Raises
    ------
    ValueError
        The data is not of that shape.
    """
    if datatype.nbytes:
        return np.frombuffer(data, datatype.dtype).reshape(shape)
    return np.fromiter(_elements(data), object).reshape(shape)


def data_of(datatype: Datatype, array: np.ndarray[Any, Any]) -> Data:
    """Return the binary form of an array, in place where that is possible.

    Raises
    ------
    TypeError
        An element of a BYTES tensor is neither ``bytes`` nor ``str``.
    """
    if datatype.nbytes:
        return np.ascontiguousarray(array).data.cast("B") if array.size and _exports(array) else array.tobytes()
    return pack_bytes(map(_as_bytes, array.ravel().tolist()))


def _exports(array: np.ndarray[Any, Any]) -> bool:
    """Whether it has a buffer that ``cast`` takes: dtypes of other packages and float16 do not have to."""
    return array.dtype.isbuiltin == 1 and array.ndim > 0


def _as_bytes(element: object) -> bytes:
    if isinstance(element, bytes):
        return element
    if isinstance(element, str):
        return element.encode()
    raise TypeError(f"an element of a BYTES tensor is bytes or str, not {type(element).__name__}")


def split_rows(datatype: Datatype, shape: Sequence[int], data: Data, rows: Sequence[int]) -> list[Data]:
    """Cut a tensor along its first dimension, into pieces of so many rows each."""
    view = memoryview(data)
    each = math.prod(shape[1:])
    if datatype.nbytes:
        bounds = [0]
        for count in rows:
            bounds.append(bounds[-1] + count * each * datatype.nbytes)
    else:
        ends = [0, *(end for _, end in _ends(view))]
        at, bounds = 0, [0]
        for count in rows:
            at += count * each
            bounds.append(ends[at])
    return [view[start:end] for start, end in pairwise(bounds)]
