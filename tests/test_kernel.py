"""Kernels and their parameters, without a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import aiooffload as ao
from aiooffload.kernel import Parameter, Signature
from aiooffload.types import Access


def read(launch: Any, a: np.float32, x: ao.In[np.float32], y: ao.Out[np.int64], z: ao.InOut[Any], free) -> None:  # type: ignore[no-untyped-def]
    """A host implementation with every kind of parameter."""


def test_signature_from_annotations() -> None:
    """Scalars, arrays and their access are read from the annotations; without one nothing is known."""
    signature = Signature.of(read)
    assert signature.parameters is not None
    a, x, y, _, free = signature.parameters
    assert (a.dtype, a.access, a.annotated) == (np.dtype(np.float32), None, True)
    assert (x.dtype, x.access) == (np.dtype(np.float32), Access.READ)
    assert (y.dtype, y.access) == (np.dtype(np.int64), Access.WRITE)
    assert (free.dtype, free.access, free.annotated) == (None, None, False)
    assert [signature.read_only(i) for i in range(6)] == [False, True, False, False, False, False]
    assert signature.formats is None


def test_formats() -> None:
    """A signature whose arguments can all be packed by the extension says how."""

    def body(launch: Any, a: np.float32, b: np.int64, c: np.uint32, x: ao.In[np.float32]) -> None: ...

    body.__annotations__ = {"a": np.float32, "b": np.int64, "c": np.uint32, "x": ao.In[np.float32]}
    assert Signature.of(body).formats == b"fqIP"
    assert Signature(None).formats is None
    assert Parameter("h", np.dtype(np.float16), None).format == "?"


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        *((one, "x is annotated") for one in (ao.Buffer, ao.Offload, NDArray[np.float32], np.ndarray)),
        ("nonsense", "an annotation of .*body cannot be resolved"),
    ],
)
def test_annotations_that_are_refused(annotation: Any, text: str) -> None:
    """An annotation that is no NumPy type raises UsageError when the kernel is made."""

    def body(launch: Any, x: Any) -> None: ...

    body.__annotations__ = {"x": annotation}
    with pytest.raises(ao.UsageError, match=text):
        ao.kernel(body)


def test_kernel_needs_a_launch_parameter() -> None:
    """A host implementation without parameters raises UsageError."""
    with pytest.raises(ao.UsageError, match="launch"):
        ao.kernel(lambda: None)


@pytest.mark.parametrize("what", ["coroutine", "generator", "asynchronous generator", "any number", "keyword"])
def test_host_implementations_that_are_refused(what: str) -> None:
    """One that would suspend never runs, and what a launch cannot pass is never given: UsageError that says so."""

    async def coroutine(launch: Any) -> None: ...

    def generator(launch: Any) -> Any:
        yield

    async def asynchronous(launch: Any) -> Any:
        yield

    def several(launch: Any, *rest: Any) -> None: ...

    def keyword(launch: Any, *, x: Any = None) -> None: ...

    functions: dict[str, Any] = {
        "coroutine": coroutine, "generator": generator, "asynchronous generator": asynchronous,
        "any number": several, "keyword": keyword,
    }  # fmt: skip
    with pytest.raises(ao.UsageError, match=f"{functions[what].__name__}: .*(plain function|positional)"):
        ao.kernel(calls=True)(functions[what])


@pytest.mark.parametrize(
    ("dtype", "value", "expected"),
    [("i4", 3, 3), ("i4", True, 1), ("f4", 2, 2.0), ("f4", 2.5, 2.5), ("c8", 1j, 1j), ("f4", float("inf"), np.inf),
     ("u8", 2**64 - 1, 2**64 - 1), ("i1", -128, -128), ("?", True, True)],
)  # fmt: skip
def test_numbers_are_converted(dtype: str, value: Any, expected: Any) -> None:
    """A Python number becomes the annotated type if it fits."""
    result = Parameter("x", np.dtype(dtype), None).check(value)
    assert isinstance(result, np.generic)
    assert result.dtype == np.dtype(dtype)
    assert result == expected


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("i4", 2**31), ("u4", -1), ("i4", 1.0), ("i4", "1"), ("f4", 1e300), ("f4", 1j), ("f4", None), ("f4", [1]),
     ("f4", np.float64(1)), ("i4", np.int64(1)), ("f4", np.ones(1, np.float32))],
)  # fmt: skip
def test_numbers_that_do_not_fit(dtype: str, value: Any) -> None:
    """A number that would change, and a NumPy scalar of another dtype, raise UsageError that names the argument."""
    with pytest.raises(ao.UsageError, match="argument x"):
        Parameter("x", np.dtype(dtype), None).check(value)


def test_unannotated_numbers_need_a_numpy_type() -> None:
    """Without an annotation a Python number raises UsageError that shows how; a NumPy scalar passes."""
    with pytest.raises(ao.UsageError, match=r"np\.float32\(2\.0\)"):
        Parameter("x", None, None).check(2.0)
    assert Parameter("x", None, None).check(np.float64(2)) == 2
    assert Signature(None).check("k", (np.int8(1), np.float32(2))) == (1, 2)


def test_array_parameters() -> None:
    """An array parameter takes a Buffer or a Scratch and nothing else."""
    scratch = ao.Scratch(4)
    assert Parameter("x", np.dtype("f4"), Access.READ).check(scratch) is scratch
    assert Parameter("x", None, None).check(scratch) is scratch
    with pytest.raises(ao.UsageError, match="a scalar of float32, not a Scratch"):
        Parameter("x", np.dtype("f4"), None).check(scratch)
    for value in (np.ones(3, np.float32), 3, None):
        with pytest.raises(ao.UsageError, match="pass a Buffer"):
            Parameter("x", np.dtype("f4"), Access.READ).check(value)


def test_argument_count() -> None:
    """A wrong count raises UsageError with both numbers."""
    with pytest.raises(ao.UsageError, match="takes 5 arguments, 2 were given"):
        Signature.of(read).check("read", (1, 2))


def test_kernel_forms() -> None:
    """@kernel works bare and with options; the entry point is the function's name unless given."""
    bare = ao.kernel(read)
    assert (bare.name, bare.cuda_source, bare.host_function) == ("read", None, read)
    full = ao.kernel(cuda="source", name="entry", options={"use_fast_math": True})(read)
    assert (full.name, full.cuda_source, full.options) == ("entry", "source", {"use_fast_math": True})
    assert repr(full) == "<aiooffload.Kernel entry>"
    with pytest.raises(ao.UsageError, match="not both"):
        ao.Kernel("k", cuda="a", image=b"b")
    assert ao.Kernel("k", image=b"b").signature.parameters is None
    assert ao.Kernel.from_core(object(), "c").core is not None  # type: ignore[arg-type]


def test_source_in_place_of_a_function() -> None:
    """Source that is not given as ``cuda=`` raises UsageError that says so."""
    with pytest.raises(ao.UsageError, match="cuda="):
        ao.kernel("__global__ void f() {}")  # type: ignore[call-overload]


def test_takes_nothing() -> None:
    """A kernel without parameters is known as such from its function, or from the driver's sizes."""
    assert ao.kernel(lambda launch: None).signature.takes_nothing(None)
    assert not Signature.of(read).takes_nothing(())
    assert Signature(None).takes_nothing(())
    assert not Signature(None).takes_nothing((8,))
    assert not Signature(None).takes_nothing(None)


def test_scratch_sizes() -> None:
    """A size is given as a whole, or per thread; NumPy integers are integers."""
    assert [ao.Scratch(100).size(threads) for threads in (1, 64)] == [100, 100]
    assert [ao.Scratch(per_thread=np.int32(100)).size(threads) for threads in (1, 64)] == [100, 6400]
    assert [repr(ao.Scratch(0)), repr(ao.Scratch(per_thread=8))] == ["Scratch(0)", "Scratch(per_thread=8)"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "one of them"),
        ({"nbytes": 1, "per_thread": 1}, "one of them"),
        ({"nbytes": 0, "per_thread": 0}, "one of them"),
        ({"nbytes": -1}, "at least 0"),
        ({"per_thread": -1}, "at least 0"),
        ({"nbytes": 1.5}, "an integer"),
        ({"per_thread": "8"}, "an integer"),
    ],
    ids=str,
)
def test_scratch_that_is_none(options: dict[str, Any], text: str) -> None:
    """Both sizes, none, or one that is no size raises UsageError."""
    with pytest.raises(ao.UsageError, match=text):
        ao.Scratch(**options)
