"""The error classes: their tree, and what each carries."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from aiooffload import errors

PUBLIC = [getattr(errors, name) for name in errors.__all__]


def drawn_tree() -> dict[str, str | None]:
    """Read the tree in the module's docstring as ``{class: parent}``."""
    tree: dict[str, str | None] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.fullmatch(r" {4}(?P<root>\w+)|(?P<bars> {4}[| ]*)\+-- (?P<name>\w+)(?: {2,}.*)?", line):
            depth = 0 if match["root"] else len(match["bars"]) // 4
            name = match["root"] or match["name"]
            tree[name] = path[depth - 1] if depth else None
            path[depth:] = [name]
    return tree


def test_docstring_draws_the_real_tree() -> None:
    """Every public class is in the drawn tree, under the class it derives from."""
    real = {cls.__name__: cls.__bases__[0].__name__ for cls in PUBLIC if cls is not errors.OffloadError}
    assert drawn_tree() == {"OffloadError": None} | real


def test_every_class_of_the_module_is_public() -> None:
    """Nothing is raised that a program cannot name."""
    defined = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == errors.__name__]
    assert set(defined) == set(PUBLIC)


def test_one_base_catches_all() -> None:
    """``except OffloadError`` catches everything."""
    assert all(issubclass(cls, errors.OffloadError) for cls in PUBLIC)


@pytest.mark.parametrize(
    ("cls", "standard"), [(errors.OutOfMemoryError, MemoryError), (errors.OffloadTimeout, TimeoutError)]
)
def test_standard_classes_catch_theirs(cls: type[Exception], standard: type[Exception]) -> None:
    """Code that knows only Python's own exceptions catches what corresponds to them."""
    assert issubclass(cls, standard)


def test_cancellation_is_none_of_ours() -> None:
    """No class of ours is a CancelledError, so cancelling is never caught by mistake."""
    assert not any(issubclass(cls, BaseException) and not issubclass(cls, Exception) for cls in PUBLIC)


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_message_is_the_text(cls: type[Exception]) -> None:
    """``str`` of an error is its message, also where the class has two bases."""
    assert str(cls("no room for 16 bytes")) == "no room for 16 bytes"


@pytest.mark.parametrize(
    "cls",
    [errors.DriverError, errors.DeviceUnavailableError, errors.OutOfMemoryError, errors.LaunchError],
    ids=lambda cls: cls.__name__,
)
def test_driver_error_says_what_failed(cls: type[errors.DriverError]) -> None:
    """A driver error carries the call, the status by name and number, and the lane."""
    error = cls("refused", operation="cuLaunchKernel", status="CUDA_ERROR_INVALID_VALUE", code=1, lane=3)
    assert (error.operation, error.status, error.code, error.lane) == (
        "cuLaunchKernel",
        "CUDA_ERROR_INVALID_VALUE",
        1,
        3,
    )
    assert (bare := cls("refused")).operation == bare.status == ""
    assert (bare.code, bare.lane) == (0, None)


def test_compile_error_has_the_log() -> None:
    """What the compiler printed is in the error."""
    error = errors.CompileError("does not compile", log="line 3: expected ;", operation="nvrtcCompileProgram", code=6)
    assert (error.log, error.operation, error.code, error.lane) == (
        "line 3: expected ;",
        "nvrtcCompileProgram",
        6,
        None,
    )


def test_device_lost_error_has_the_suspects() -> None:
    """A lost device names the launches that had not finished."""
    error = errors.DeviceLostError("illegal address", suspects=("saxpy#7", "scan#9"), code=700)
    assert (error.suspects, error.code) == (("saxpy#7", "scan#9"), 700)
    assert errors.DeviceLostError("trap").suspects == ()


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: cls.__name__)
def test_errors_travel_between_processes(cls: type[Exception]) -> None:
    """An error survives pickling, with its attributes, so a worker process can hand it on."""
    error = cls("gone")
    if isinstance(error, errors.DriverError):
        error.lane = 2
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (str(copy), vars(copy)) == (str(error), vars(error))
