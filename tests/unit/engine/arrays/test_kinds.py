"""Conversion of values to arrays, their types, and the types that can be summed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcstrat.engine.arrays.kinds import as_array, is_half, to_reducible

INT32 = st.integers(-(2**31), 2**31 - 1)
NUMERIC = "bBhHiIlLqQefdgFDG"


@given(INT32 | st.lists(INT32, max_size=4))
def test_python_integers_become_int32(value: Any) -> None:
    array = as_array(value)
    assert array.dtype == (np.int32 if value or value == 0 else np.float32)
    np.testing.assert_array_equal(array, value)


@given(st.integers().filter(lambda n: not -(2**31) <= n < 2**31))
def test_integers_that_do_not_fit_are_an_error_that_names_dtype(value: int) -> None:
    for nest in (value, [1, value]):
        with pytest.raises(ValueError, match="dtype"):
            as_array(nest)
    if -(2**63) <= value < 2**63:
        assert as_array(value, "int64") == value


@given(st.integers(-(2**65), 2**65), st.sampled_from("bBhHiIqQ"))
def test_python_integers_take_any_type_that_holds_them(value: int, code: str) -> None:
    dtype = np.dtype(code)
    fits = np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    for nest in (value, [value], [[0], [value]]):
        if fits:
            array = as_array(nest, dtype)
            assert array.dtype == dtype
            assert int(array.ravel()[-1]) == value
        else:
            with pytest.raises(ValueError, match="another dtype"):
                as_array(nest, dtype)


@given(st.floats(width=32))
def test_python_floats_become_float32(value: float) -> None:
    for array in (as_array(value), as_array([value, value])[0], as_array([[value]])):
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array.ravel(), [np.float32(value)])


def test_python_complex_numbers_and_truth_values_become_arrays() -> None:
    assert as_array(True).dtype == np.bool_
    assert as_array([True, False]).dtype == np.bool_
    assert as_array(1 + 2j).dtype.kind == "c"


@pytest.mark.parametrize("code", NUMERIC)
def test_arrays_and_scalars_keep_their_type(code: str) -> None:
    dtype = np.dtype(code)
    array = np.ones((2, 1), dtype)
    assert as_array(array) is array
    for value in (array[0, 0], [array[0, 0], array[1, 0]], [array]):
        assert as_array(value).dtype == dtype


@pytest.mark.parametrize("code", NUMERIC)
def test_byte_order_becomes_native(code: str) -> None:
    foreign = np.arange(3).astype(np.dtype(code).newbyteorder(">"))
    for function in (as_array, to_reducible):
        array = function(foreign)
        assert array.dtype == np.dtype(code)
        assert array.dtype.isnative
        np.testing.assert_array_equal(array, [0, 1, 2])
    big = as_array(np.arange(3), np.dtype(">i4"))
    assert big.dtype.isnative
    assert big.dtype == np.int32


def test_dtype_that_is_asked_for_is_given() -> None:
    assert as_array(1, "float64").dtype == np.float64
    assert as_array([0.1], "float64")[0] == 0.1
    assert as_array(np.array([1.5]), "float32").dtype == np.float32
    assert as_array(np.array([3, 4]), "uint8").dtype == np.uint8
    assert as_array(2**40, "int64") == 2**40
    assert as_array([], "int16").dtype == np.int16


@pytest.mark.parametrize(
    ("value", "dtype"),
    [(1.5, "int32"), (300, "int8"), (-1, "uint8"), (1j, "float64"), ("a", "int32")],
)
def test_numbers_that_do_not_fit_the_dtype_are_refused(value: Any, dtype: str) -> None:
    with pytest.raises(ValueError, match="expected numbers"):
        as_array(value, dtype)


@pytest.mark.parametrize(
    "value", [None, object(), {1, 2}, [[1], [2, 3]], [1, "a", None], np.array([None])]
)
def test_values_without_numbers_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="expected numbers"):
        as_array(value)


class _Exports:
    """An array of another library, which only exports the array protocol."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_dlpack_arrays_share_their_memory() -> None:
    array = np.arange(4.0)
    assert np.shares_memory(as_array(_Exports(array)), array)
    assert as_array(_Exports(array), "float32").dtype == np.float32


class _Refuses:
    """An array of another library that refuses to export its memory."""

    dtype = "other.float8"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        raise TypeError("Got unsupported ScalarType Float8")


def test_arrays_that_cannot_be_read_are_named() -> None:
    expected = r"NumPy can read, found .*_Refuses of other\.float8: Got unsupported"
    with pytest.raises(ValueError, match=expected):
        as_array(_Refuses())


def test_half_types_are_the_two_sixteen_bit_floats() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 is from ml_dtypes")
    halves = [np.dtype("f2"), np.dtype(">f2"), np.dtype(ml_dtypes.bfloat16)]
    assert all(is_half(dtype) for dtype in halves)
    others = ["f4", "i2", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2]
    assert not any(is_half(np.dtype(dtype)) for dtype in others)
    for dtype in halves:
        assert to_reducible(np.ones(2, dtype)).dtype == dtype.newbyteorder("=")


@pytest.mark.parametrize("code", ["?", "U1", "S1", "M8[s]", "m8[s]", "O", "V3"])
def test_types_without_a_sum_are_refused(code: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        to_reducible(np.zeros(2, code))
    with pytest.raises(ValueError, match="expected"):
        to_reducible(np.zeros((), np.dtype([("x", "i4")])))


def test_eight_bit_floats_are_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="they are from ml_dtypes")
    names = [n for n in dir(ml_dtypes) if n.startswith(("float8", "float4", "int4"))]
    assert names
    for name in names:
        with pytest.raises(ValueError, match="sum"):
            to_reducible(np.zeros(2, getattr(ml_dtypes, name)))
