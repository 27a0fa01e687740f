"""Compiles and loads the parts that are written in C."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path


class Work(ctypes.Structure):
    """What a peer in C launches and waits for; mirrors ``struct work``."""

    _fields_ = (
        ("launch", ctypes.c_void_p),
        ("synchronize", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("function", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("block", ctypes.c_uint),
    )


@functools.cache
def library() -> ctypes.CDLL:
    """Return ``peers.c``. Its functions run without the interpreter lock."""
    loaded = compiled("peers.c")
    samples = ctypes.POINTER(ctypes.c_int64)
    for function in (loaded.peer_sync, loaded.peer_usleep):
        function.argtypes, function.restype = (ctypes.POINTER(Work), ctypes.c_int64, samples), ctypes.c_int
    loaded.wait_ns.argtypes, loaded.wait_ns.restype = (ctypes.c_int64,), ctypes.c_int64
    return loaded


def compiled(name: str) -> ctypes.CDLL:
    """Compile a file of this folder and load it."""
    source = Path(__file__).with_name(name)
    with tempfile.TemporaryDirectory(prefix="aiooffload-bench-") as folder:
        target = Path(folder, source.stem + ".so")
        try:
            subprocess.run(["gcc", "-O2", "-std=gnu11", "-Wall", "-shared", "-fPIC", "-o", target, source], check=True)
        except FileNotFoundError:
            raise SystemExit("scripts/bench needs gcc; on Debian and Ubuntu: apt-get install gcc libc6-dev") from None
        return ctypes.CDLL(str(target))
