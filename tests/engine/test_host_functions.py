"""Host functions: what may be registered, their types on the wire, and results as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import aiooffload as ao
from aiooffload.engine.host_functions import HostFunction, ReplyError, current_call, waiting_launches
from aiooffload.rules.wire import function_id

PAIR = np.dtype([("a", np.int8), ("b", np.float64)], align=True)
WIDE = np.dtype([("bytes", np.uint8, (257,))])


async def plain(a: int, b: np.float32, c: bool) -> np.int16:
    return np.int16(a)


async def nothing() -> None: ...


async def unannotated_result(a: int): ...  # type: ignore[no-untyped-def]


async def record(a: PAIR) -> PAIR:  # type: ignore[valid-type]
    return a


async def mapped(n: np.int8, x: ao.InOut[np.float32]) -> int:
    return n


async def columns(a: NDArray[np.int64], b: np.ndarray[Any, np.dtype[np.float32]], c: np.uint8) -> NDArray[np.float64]:
    return a + b


def test_name_and_number() -> None:
    """A function is known by its own name, a given one, or a number, which is its id itself."""
    assert HostFunction(plain).name == "plain"
    assert HostFunction(plain).number == function_id("plain")
    assert HostFunction(plain, name="other").number == function_id("other")
    assert (HostFunction(plain, name=7).name, HostFunction(plain, name=7).number) == (7, 7)


@pytest.mark.parametrize(
    ("function", "batch", "nbytes"),
    [
        (plain, False, 16),
        (nothing, False, 0),
        (unannotated_result, False, 8),
        (record, False, 16),
        (mapped, False, 24),
        (columns, True, 16),
        (plain, True, 16),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_arguments_are_laid_out_like_a_struct(function: Callable[..., Any], batch: bool, nbytes: int) -> None:
    """The size is that of a C struct of the annotated types, where a mapped argument is two 64-bit words."""
    made = HostFunction(function, batch=batch)
    assert (made.nbytes, made.batch) == (nbytes, batch)


async def star(*args: int) -> None: ...


async def keyword(*, a: int) -> None: ...


async def missing(a) -> None: ...  # type: ignore[no-untyped-def]


async def text(a: str) -> None: ...


async def listed(a: list[int]) -> None: ...


async def objects(a: np.object_) -> None: ...


async def unknown(a: NotThere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


async def too_large(a: WIDE) -> None: ...  # type: ignore[valid-type]


async def large_result() -> WIDE: ...  # type: ignore[empty-body,valid-type]


async def array_result() -> ao.Out[np.float32]: ...  # type: ignore[empty-body]


def not_a_coroutine(a: int) -> int:
    return a


async def generator(a: int):  # type: ignore[no-untyped-def]
    yield a


def packed(*types: Any) -> np.dtype[Any]:
    """Return a structured dtype as NumPy makes it unless told otherwise."""
    return np.dtype([(f"f{i}", t) for i, t in enumerate(types)])


INNER_PACKED = np.dtype([("a", np.float64), ("s", packed(np.int32))], align=True)
UNION = np.dtype({"names": ["a", "b"], "formats": [np.int32, np.float64], "offsets": [0, 0], "itemsize": 16})


def with_types(*types: Any, returned: Any = None) -> Callable[..., Any]:
    """Return a function of up to three parameters with these annotations."""

    async def one(a: Any) -> Any: ...

    async def two(a: Any, b: Any) -> Any: ...

    async def three(a: Any, b: Any, c: Any) -> Any: ...

    function: Callable[..., Any] = (one, two, three)[len(types) - 1]
    function.__annotations__ = dict(zip("abc", types, strict=False)) | {"return": returned}
    return function


@pytest.mark.parametrize(
    ("types", "returned", "named"),
    [
        ((np.int32, packed(np.float64), int), None, "b is"),  # 24 bytes in C, too, but at other offsets
        ((packed(np.int8, np.int32),), None, "a is"),
        ((packed(np.float64, np.int8),), None, "a is"),  # only what is behind it
        ((packed(np.int32), np.int8), None, "a is"),  # only what is behind all of them
        ((packed(np.int8, packed(np.int16)),), None, "a is"),
        ((np.dtype([("a", np.int8), ("s", packed(np.int32))], align=True),), None, "a is"),
        ((np.dtype([("s", packed(np.int8, np.int32), (2,))], align=True),), None, "a is"),
        ((np.int8, INNER_PACKED, packed(np.int8, np.int16)), None, "c is"),
        ((int,), packed(np.int8, np.int32), "result is"),
        ((int,), packed(np.float64, np.int8), "result is"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("batch", [False, True])
def test_struct_that_c_lays_out_otherwise(types: tuple[Any, ...], returned: Any, named: str, batch: bool) -> None:
    """A dtype without align=True is refused where a C compiler puts something elsewhere."""
    with pytest.raises(ao.UsageError, match="align=True") as caught:
        HostFunction(with_types(*types, returned=returned), batch=batch)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "annotation", [list[int], NDArray[np.float32], np.ndarray, np.ndarray[Any, Any], str, int | None], ids=str
)
def test_refusal_names_the_function_and_says_what_there_is(annotation: Any) -> None:
    """An annotation that is none says whose it is and what may stand there, whatever NumPy makes of it."""
    with pytest.raises(ao.UsageError, match=r"one: a is annotated .*ao\.In"):
        HostFunction(with_types(annotation))
    if annotation != NDArray[np.float32]:
        with pytest.raises(ao.UsageError, match="in a batch function"):
            HostFunction(with_types(annotation), batch=True)
    with pytest.raises(ao.UsageError, match=r"one: the result is annotated .*structured dtype"):
        HostFunction(with_types(int, returned=annotation))


@pytest.mark.parametrize("text", ["np.int65", "1 +", "NotThere", "int | 'x'"])
def test_text_that_is_no_annotation(text: str) -> None:
    """An annotation given as text that stands for nothing is refused, in host functions and in kernels."""
    with pytest.raises(ao.UsageError, match=r"one cannot be resolved"):
        HostFunction(with_types(text))

    def body(launch: Any, a: Any) -> None: ...

    body.__annotations__["a"] = text
    with pytest.raises(ao.UsageError, match=r"body cannot be resolved"):
        ao.kernel(body)


@pytest.mark.parametrize("limit", [None, 2])
def test_scalars_have_the_byte_order_of_kernels(limit: int | None) -> None:
    """A scalar of another byte order is refused; in a struct the program says what it wants."""
    for types, returned in (((np.dtype(">i8"),), None), ((int,), np.dtype(">f4"))):
        with pytest.raises(ao.UsageError, match="kernels have"):
            HostFunction(with_types(*types, returned=returned), limit=limit)
    HostFunction(with_types(packed(">i8")), limit=limit)


def test_text_has_all_its_bytes() -> None:
    """Text is as long as its dtype says, with zeros behind it; longer text is refused."""
    made = HostFunction(with_types(int, returned=np.dtype("S8")))
    assert made.encode(b"ab", 1, single=True) == b"ab".ljust(8, b"\0")
    assert made.encode([b"ab", b""], 2, single=False) == b"ab".ljust(16, b"\0")
    with pytest.raises(ReplyError, match="length 8"):
        made.encode(b"123456789", 1, single=True)


@pytest.mark.parametrize(
    ("types", "returned"),
    [
        ((packed(np.int32, np.int32),), packed(np.int32, np.int32)),
        ((np.int8, packed(np.uint8, (np.uint8, (7,)))), packed(np.uint8, np.bool_)),
        ((int, packed(np.float64)), None),
        ((np.int8, INNER_PACKED), INNER_PACKED),
        ((PAIR, np.int8, PAIR), PAIR),
        ((np.int8, np.dtype("V5"), np.dtype("S3")), np.dtype("V3")),
        ((UNION,), UNION),
        ((np.int8,), packed(np.float64)),
    ],
    ids=str,
)
def test_struct_that_is_like_c_anyway(types: tuple[Any, ...], returned: Any) -> None:
    """A dtype without align=True is accepted where that makes no difference."""
    HostFunction(with_types(*types, returned=returned))


def test_mapped_array_of_packed_records() -> None:
    """What a mapped array holds is the kernel's affair: it may point into a file."""
    made = HostFunction(with_types(np.int8, ao.In[packed(np.int8, np.int32)]))  # type: ignore[misc]  # a dtype
    assert made.nbytes == 24


@pytest.mark.parametrize(
    "function",
    [star, keyword, missing, text, listed, objects, unknown, too_large, large_result, array_result, not_a_coroutine,
     generator, 5],
    ids=lambda value: getattr(value, "__name__", str(value)),
)  # fmt: skip
def test_what_cannot_be_registered(function: Any) -> None:
    """A function that is no coroutine function, or whose types no kernel can send, is refused."""
    with pytest.raises(ao.UsageError):
        HostFunction(function)


@pytest.mark.parametrize(
    "options",
    [{"limit": 0}, {"limit": 1.5}, {"limit": True}, {"timeout_s": 0}, {"timeout_s": -1}, {"timeout_s": "1"},
     {"on_error": "ignore"}, {"name": 2**24}, {"name": -1}, {"name": 1.5}, {"name": b"f"}],
    ids=str,
)  # fmt: skip
def test_bad_options(options: dict[str, Any]) -> None:
    """Options out of range are refused."""
    with pytest.raises(ao.UsageError):
        HostFunction(plain, **options)


def test_batches_take_no_mapped_arrays() -> None:
    """A batch has columns of scalars; each of its calls would need memory of its own."""
    with pytest.raises(ao.UsageError, match="batch"):
        HostFunction(mapped, batch=True)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(np.int16, 7), (np.float32, 0.5), (np.bool_, True), (np.uint64, 2**64 - 1), (np.complex128, 1j), (PAIR, (1, 2.0))],
    ids=str,
)
def test_a_result_is_the_bytes_of_its_type(dtype: Any, value: Any) -> None:
    """A result is converted to what is annotated."""

    async def function() -> Any: ...

    function.__annotations__["return"] = dtype
    whole = np.zeros((), dtype)  # with zeros also between the fields
    whole[()] = value
    expected = whole.tobytes()
    assert HostFunction(function).encode(value, 1, single=True) == expected
    assert HostFunction(function).encode([value] * 3, 3, single=False) == expected * 3


@pytest.mark.parametrize("value", [None, "text", 2**15, -(2**15) - 1, 0.5, float("nan"), np.int64(1), [1]], ids=repr)
def test_results_that_do_not_fit(value: Any) -> None:
    """What the annotated type cannot hold is an error, never a wrong number."""
    with pytest.raises(ReplyError, match="plain"):
        HostFunction(plain).encode(value, 1, single=True)


def test_result_where_none_is_due() -> None:
    """A function without a return annotation returns nothing."""
    with pytest.raises(ReplyError, match="no return annotation"):
        HostFunction(nothing).encode(5, 1, single=True)


@given(st.integers(1, 40), st.booleans())
def test_results_of_a_batch(rows: int, as_list: bool) -> None:
    """A batch returns a row for each of its own, as an array of the annotated type or what NumPy makes one of."""
    made = HostFunction(columns, batch=True)
    values = np.arange(rows) / 4
    assert bytes(made.encode(values.tolist() if as_list else values, rows, single=False)) == values.tobytes()
    assert bytes(made.encode(values[::-1], rows, single=False)) == values[::-1].tobytes()
    assert bytes(made.encode(np.arange(rows, dtype=np.int32), rows, single=False)) == np.arange(rows * 1.0).tobytes()


@pytest.mark.parametrize(
    "result",
    [None, 1.0, np.zeros(2), np.zeros(4), np.zeros((3, 1)), np.zeros(3, np.complex128), np.array(["a"] * 3), ["x"] * 3],
    ids=repr,
)
def test_results_of_a_batch_that_do_not_fit(result: Any) -> None:
    """Another number of rows, or a type that does not convert safely, is an error."""
    with pytest.raises(ReplyError):
        HostFunction(columns, batch=True).encode(result, 3, single=False)


def test_outside_of_a_host_function() -> None:
    """Elsewhere there is no call, and nothing waits."""
    assert current_call() is None
    assert waiting_launches() == []
