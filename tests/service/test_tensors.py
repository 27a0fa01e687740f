"""Data types of the protocol, and tensors as bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiooffload as ao
from aiooffload.service.tensors import (
    DATATYPES,
    Spec,
    array_of,
    bytes_elements,
    data_of,
    datatype_of,
    pack_bytes,
    split_rows,
)


@pytest.mark.parametrize("name", DATATYPES)
def test_datatype_of_every_form(name: str) -> None:
    """A data type is found by its name, by its dtype and by the dtype's name."""
    kind = DATATYPES[name]
    assert datatype_of(name) is kind
    assert datatype_of(kind.dtype) is kind
    assert datatype_of(kind.numpy_name) is kind
    assert kind.nbytes in (0, kind.dtype.itemsize)


def test_datatype_of_text() -> None:
    """Python's bytes and str are BYTES."""
    assert datatype_of(bytes) is datatype_of(str) is DATATYPES["BYTES"]


@pytest.mark.parametrize("dtype", ["FP128", np.complex64, ">f4x", "M8[s]", 7, None])
def test_datatype_of_what_the_protocol_lacks(dtype: object) -> None:
    """A dtype without a name in the protocol is refused."""
    with pytest.raises(ao.UsageError, match="no data type of the protocol"):
        datatype_of(dtype)


@pytest.mark.parametrize(
    ("declared", "given", "admitted"),
    [((-1, 4), (2, 4), True), ((-1, 4), (2, 3), False), ((-1,), (2, 4), False), ((), (), True), ((0,), (0,), True)],
)
def test_spec_admits(declared: tuple[int, ...], given: tuple[int, ...], admitted: bool) -> None:
    """Shapes agree in rank and in every dimension that is not free."""
    assert Spec("x", DATATYPES["FP32"], declared).admits(given) is admitted


def test_spec_round_trips_through_metadata() -> None:
    """Metadata says all of a declaration."""
    spec = Spec("x", DATATYPES["BF16"], (-1, 3))
    assert Spec.from_metadata(spec.as_metadata()) == spec


@given(st.lists(st.binary(max_size=20)))
def test_bytes_round_trip(elements: list[bytes]) -> None:
    """What is packed is found again."""
    assert bytes_elements(pack_bytes(elements)) == elements


@given(st.binary(max_size=40))
def test_bytes_elements_of_anything(data: bytes) -> None:
    """Any bytes are elements that pack to the same bytes, or are refused."""
    try:
        elements = bytes_elements(data)
    except ValueError:
        return
    assert pack_bytes(elements) == data


@pytest.mark.parametrize("name", DATATYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 4), (3, 0)])
def test_array_round_trip(name: str, shape: tuple[int, ...]) -> None:
    """An array of every data type and any shape is the same after a way through bytes."""
    kind = DATATYPES[name]
    count = int(np.prod(shape))
    if kind.nbytes:
        array = np.arange(count).astype(kind.dtype).reshape(shape)
    else:
        array = np.array([b"\xff" * i for i in range(count)], object).reshape(shape)
    data = data_of(kind, array)
    assert kind.nbytes == 0 or len(data) == count * kind.nbytes
    back = array_of(kind, shape, bytes(data))
    assert back.dtype == kind.dtype
    assert back.shape == shape
    assert back.tolist() == array.tolist()


def test_data_of_strides() -> None:
    """The binary form is row by row, whatever the array's strides are."""
    array = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert bytes(data_of(DATATYPES["INT32"], array.T)) == array.T.tobytes()
    assert bytes(data_of(DATATYPES["INT32"], array[:, ::-1])) == array[:, ::-1].tobytes()


def test_data_of_text_and_numbers() -> None:
    """An element of BYTES may be text, and nothing but text and bytes."""
    kind = DATATYPES["BYTES"]
    assert bytes_elements(data_of(kind, np.array(["ä", b"\xff"], object))) == ["ä".encode(), b"\xff"]
    with pytest.raises(TypeError, match="bytes or str, not int"):
        data_of(kind, np.array([1], object))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 3), st.data())
def test_split_rows(rows: list[int], columns: int, data: st.DataObject) -> None:
    """Pieces are of the asked rows, and together they are the whole, for BYTES as for numbers."""
    shape = (sum(rows), columns)
    numbers = np.arange(shape[0] * columns, dtype=np.int16)
    texts = data.draw(st.lists(st.binary(max_size=3), min_size=numbers.size, max_size=numbers.size))
    for kind, whole in (("INT16", numbers.tobytes()), ("BYTES", pack_bytes(texts))):
        pieces = split_rows(DATATYPES[kind], shape, whole, rows)
        assert b"".join(pieces) == whole
        for count, piece in zip(rows, pieces, strict=True):
            assert array_of(DATATYPES[kind], (count, columns), piece).shape == (count, columns)
