"""Arrays of other libraries: describing ours to them, and theirs to us.

Two protocols say where an array is: ``__cuda_array_interface__`` (version 3, of numba) and DLPack (the
Python array API standard). Both leave the memory with its owner. Ordering is by streams: the one names
the producer's, the other is told the consumer's.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from aiooffload._native import dlpack_export, dlpack_import
from aiooffload.errors import UsageError

__all__ = ["CPU", "CUDA", "Described", "capsule", "describe", "is_array"]

CPU: Final = 1
CUDA: Final = 2
_REACHABLE: Final = (CUDA, 3, 13)
"""DLPack's device types that a GPU reads by address: its own, pinned and managed memory."""
_CODES: Final = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_BFLOAT: Final = 4


class Described(NamedTuple):
    """An array of somebody else."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """Bytes; None for C order."""
    dtype: np.dtype[Any]
    read_only: bool
    owner: object
    """What keeps the memory."""
    stream: int | None
    """The producer's, on which the memory is valid; None if it is by now."""
    gpu: int | None = None
    """The ordinal of the GPU whose memory it is; None if others reach it too, or nobody says."""


def is_array(value: object) -> bool:
    """Whether a value speaks one of the protocols, and is no NumPy array, which a device cannot reach."""
    kind = type(value)
    return not isinstance(value, np.ndarray | np.generic) and (
        hasattr(kind, "__cuda_array_interface__") or hasattr(kind, "__dlpack__")
    )


def describe(value: Any, device_type: int) -> Described:
    """Describe an array that a device of ``device_type`` can reach; raises UsageError."""
    if device_type == CUDA and hasattr(value, "__cuda_array_interface__"):
        array = _by_interface(value, value.__cuda_array_interface__)
    elif hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        array = _by_dlpack(value, device_type)
    else:
        raise UsageError(f"{type(value).__name__} is no array that the device reaches")
    if not hasattr(value, "__dlpack_device__"):
        return array
    kind, index = value.__dlpack_device__()
    return array._replace(gpu=int(index) if kind == CUDA else None)


def _by_interface(value: object, interface: dict[str, Any]) -> Described:
    if interface.get("mask") is not None:
        raise UsageError("a masked array cannot be used: pass its data")
    address, read_only = interface["data"]
    strides = interface.get("strides")
    stream = interface.get("stream")
    if stream == 0:
        raise UsageError("stream 0 is not allowed in __cuda_array_interface__")
    return Described(
        int(address or 0),
        tuple(interface["shape"]),
        None if strides is None else tuple(strides),
        np.dtype(interface["typestr"]),
        bool(read_only),
        value,
        stream,
    )


def _by_dlpack(value: Any, device_type: int) -> Described:
    kind, _ = value.__dlpack_device__()
    if kind not in (_REACHABLE if device_type == CUDA else (CPU,)):
        raise UsageError(f"the array is on a device of type {int(kind)} (DLPack), which this one does not reach")
    # -1: no synchronisation by the producer. What is under way there is for the program to order.
    made = value.__dlpack__(stream=-1) if device_type == CUDA else value.__dlpack__()
    keeper, address, _, _, shape, strides, code, bits, lanes, read_only = dlpack_import(made)
    dtype = _dtype(code, bits, lanes)
    steps = None if strides is None else tuple(step * dtype.itemsize for step in strides)
    return Described(address, shape, steps, dtype, read_only, keeper, None)


def _dtype(code: int, bits: int, lanes: int) -> np.dtype[Any]:
    letter = next((letter for letter, number in _CODES.items() if number == code), None)
    if lanes != 1 or bits % 8 or letter is None:
        if (code, bits, lanes) == (_BFLOAT, 16, 1):
            return np.dtype(np.uint16)  # NumPy has none; the bits are what a kernel gets
        raise UsageError(f"DLPack type (code {code}, {bits} bits, {lanes} lanes) is none of NumPy's")
    return np.dtype("?" if letter == "b" else f"{letter}{bits // 8}")


def capsule(
    holder: object,
    address: int,
    device: tuple[int, int],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    max_version: tuple[int, int] | None,
) -> Any:
    """Return a DLPack capsule of ours; raises BufferError for what DLPack cannot describe."""
    code = _CODES.get(dtype.kind)
    if code is None or not dtype.isnative or any(step % dtype.itemsize for step in strides):
        raise BufferError(f"DLPack cannot describe {dtype} with strides {strides}")
    steps = tuple(step // dtype.itemsize for step in strides)
    is_versioned = max_version is not None and max_version[0] >= 1
    return dlpack_export(holder, address, *device, shape, steps, code, 8 * dtype.itemsize, is_versioned)
