"""Builds the one C extension; everything else about the package is in pyproject.toml."""

from setuptools import Extension, setup

SOURCES = (
    "board",
    "bound",
    "channel",
    "clock",
    "cuda_stream",
    "dlpack",
    "handler",
    "history",
    "host_stream",
    "launcher",
    "module",
    "operation",
    "pack",
    "plan",
    "port",
    "request",
    "word",
)

setup(
    ext_modules=[
        Extension(
            "aiooffload._native._core",
            sources=[f"aiooffload/_native/{name}.c" for name in SOURCES],
            depends=[
                "aiooffload/_native/native.h",
                "aiooffload/_native/calls.h",
                "aiooffload/device/aiooffload_wire.h",
            ],
            extra_compile_args=["-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror=implicit", "-pthread"],
            libraries=["dl", "pthread"],
        )
    ]
)
