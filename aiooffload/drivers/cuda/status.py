"""Every status of the driver, and the one error class it becomes.

Source: CUDA Driver API, "Data types used by CUDA driver", enum CUresult.
"""

from __future__ import annotations

from typing import Any, Final

from aiooffload.errors import (
    CompileError,
    DeviceLostError,
    DeviceUnavailableError,
    DriverError,
    LaunchError,
    OutOfMemoryError,
)

__all__ = ["STATUSES", "status_error", "status_name", "unwrap"]

# By class, code: name without CUDA_ERROR_. What is listed under DriverError is a call that was refused:
# the device, and everything else submitted to it, goes on.
_BY_CLASS: Final[dict[type[DriverError], dict[int, str]]] = {
    OutOfMemoryError: {2: "OUT_OF_MEMORY"},
    DeviceUnavailableError: {
        3: "NOT_INITIALIZED",
        4: "DEINITIALIZED",
        34: "STUB_LIBRARY",
        36: "CALL_REQUIRES_NEWER_DRIVER",
        46: "DEVICE_UNAVAILABLE",
        100: "NO_DEVICE",
        101: "INVALID_DEVICE",
        102: "DEVICE_NOT_LICENSED",
        227: "INSUFFICIENT_LOADER_VERSION",
        304: "OPERATING_SYSTEM",
        802: "SYSTEM_NOT_READY",
        803: "SYSTEM_DRIVER_MISMATCH",
        804: "COMPAT_NOT_SUPPORTED_ON_DEVICE",
        805: "MPS_CONNECTION_FAILED",
        806: "MPS_RPC_FAILURE",
        807: "MPS_SERVER_NOT_READY",
        808: "MPS_MAX_CLIENTS_REACHED",
        809: "MPS_MAX_CONNECTIONS_REACHED",
        919: "FABRIC_NOT_READY",
    },
    CompileError: {
        200: "INVALID_IMAGE",
        209: "NO_BINARY_FOR_GPU",
        218: "INVALID_PTX",
        221: "JIT_COMPILER_NOT_FOUND",
        222: "UNSUPPORTED_PTX_VERSION",
        223: "JIT_COMPILATION_DISABLED",
        224: "UNSUPPORTED_EXEC_AFFINITY",
        225: "UNSUPPORTED_DEVSIDE_SYNC",
        300: "INVALID_SOURCE",
        301: "FILE_NOT_FOUND",
        302: "SHARED_OBJECT_SYMBOL_NOT_FOUND",
        303: "SHARED_OBJECT_INIT_FAILED",
        500: "NOT_FOUND",
        811: "CDP_NOT_SUPPORTED",
        812: "CDP_VERSION_MISMATCH",
    },
    LaunchError: {
        701: "LAUNCH_OUT_OF_RESOURCES",
        703: "LAUNCH_INCOMPATIBLE_TEXTURING",
        720: "COOPERATIVE_LAUNCH_TOO_LARGE",
        912: "INVALID_CLUSTER_SIZE",
        913: "FUNCTION_NOT_LOADED",
    },
    DeviceLostError: {
        214: "ECC_UNCORRECTABLE",
        220: "NVLINK_UNCORRECTABLE",
        226: "CONTAINED",
        700: "ILLEGAL_ADDRESS",
        702: "LAUNCH_TIMEOUT",
        709: "CONTEXT_IS_DESTROYED",
        710: "ASSERT",
        714: "HARDWARE_STACK_ERROR",
        715: "ILLEGAL_INSTRUCTION",
        716: "MISALIGNED_ADDRESS",
        717: "INVALID_ADDRESS_SPACE",
        718: "INVALID_PC",
        719: "LAUNCH_FAILED",
        721: "TENSOR_MEMORY_LEAK",
        810: "MPS_CLIENT_TERMINATED",
        911: "EXTERNAL_DEVICE",
        999: "UNKNOWN",
    },
    DriverError: {
        1: "INVALID_VALUE",
        5: "PROFILER_DISABLED",
        6: "PROFILER_NOT_INITIALIZED",
        7: "PROFILER_ALREADY_STARTED",
        8: "PROFILER_ALREADY_STOPPED",
        47: "MULTICAST_RESOURCE_FULL",
        201: "INVALID_CONTEXT",
        202: "CONTEXT_ALREADY_CURRENT",
        205: "MAP_FAILED",
        206: "UNMAP_FAILED",
        207: "ARRAY_IS_MAPPED",
        208: "ALREADY_MAPPED",
        210: "ALREADY_ACQUIRED",
        211: "NOT_MAPPED",
        212: "NOT_MAPPED_AS_ARRAY",
        213: "NOT_MAPPED_AS_POINTER",
        215: "UNSUPPORTED_LIMIT",
        216: "CONTEXT_ALREADY_IN_USE",
        217: "PEER_ACCESS_UNSUPPORTED",
        219: "INVALID_GRAPHICS_CONTEXT",
        400: "INVALID_HANDLE",
        401: "ILLEGAL_STATE",
        402: "LOSSY_QUERY",
        600: "NOT_READY",
        704: "PEER_ACCESS_ALREADY_ENABLED",
        705: "PEER_ACCESS_NOT_ENABLED",
        708: "PRIMARY_CONTEXT_ACTIVE",
        711: "TOO_MANY_PEERS",
        712: "HOST_MEMORY_ALREADY_REGISTERED",
        713: "HOST_MEMORY_NOT_REGISTERED",
        800: "NOT_PERMITTED",
        801: "NOT_SUPPORTED",
        900: "STREAM_CAPTURE_UNSUPPORTED",
        901: "STREAM_CAPTURE_INVALIDATED",
        902: "STREAM_CAPTURE_MERGE",
        903: "STREAM_CAPTURE_UNMATCHED",
        904: "STREAM_CAPTURE_UNJOINED",
        905: "STREAM_CAPTURE_ISOLATION",
        906: "STREAM_CAPTURE_IMPLICIT",
        907: "CAPTURED_EVENT",
        908: "STREAM_CAPTURE_WRONG_THREAD",
        909: "TIMEOUT",
        910: "GRAPH_EXEC_UPDATE_FAILURE",
        914: "INVALID_RESOURCE_TYPE",
        915: "INVALID_RESOURCE_CONFIGURATION",
        916: "KEY_ROTATION",
        917: "STREAM_DETACHED",
        918: "GRAPH_RECAPTURE_FAILURE",
    },
}

STATUSES: Final[dict[int, tuple[str, type[DriverError]]]] = {
    code: (f"CUDA_ERROR_{name}", kind) for kind, names in _BY_CLASS.items() for code, name in names.items()
}
"""Code to (the driver's name, error class)."""


MARK: Final = "cuStreamBatchMemOp"
"""The call that enqueues a completion mark."""


def status_name(code: int) -> str:
    """Return the driver's name of a status."""
    return STATUSES[code][0] if code in STATUSES else f"CUDA_ERROR_{code}"


def status_error(operation: str, code: int, detail: str = "") -> DriverError:
    """Return the error for a failed driver call; a status this table does not know is a DriverError."""
    name, kind = STATUSES.get(code, (f"CUDA_ERROR_{code}", DriverError))
    if operation == MARK:
        # Work was enqueued that nothing will ever report: its memory can never be used again.
        kind = DeviceLostError
    text = f"{operation} failed with {name} ({code})"
    return kind(f"{text}: {detail}" if detail else text, operation=operation, status=name, code=code)


def unwrap(operation: str, result: tuple[Any, ...], detail: str = "") -> Any:
    """Return what a call of ``cuda.bindings`` returned beside its status; raises DriverError."""
    code = int(result[0])
    if code:
        raise status_error(operation, code, detail)
    return result[1] if len(result) == 2 else result[1:] or None
