"""Numbers in half precision, compared with conversions by NumPy and ml_dtypes."""

from __future__ import annotations

import numpy as np
import pytest

from hpcstrat.engine.arrays.halves import narrowed, widened


def _type(name: str) -> np.dtype:
    if name == "bfloat16":
        return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    return np.dtype(name)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_all_finite_numbers_come_back(name: str) -> None:
    dtype = _type(name)
    bits = np.arange(1 << 16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        numbers = bits.view(dtype).astype(np.float32)
    bits, numbers = bits[np.isfinite(numbers)], numbers[np.isfinite(numbers)]
    np.testing.assert_array_equal(widened(bits, 0, dtype), numbers)
    np.testing.assert_array_equal(narrowed(np.abs(numbers), numbers, 0, dtype), bits)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [-149, -40, 0, 17, 112])
def test_scaled_numbers_are_rounded_to_nearest(name: str, scale: int) -> None:
    dtype, generator = _type(name), np.random.default_rng(scale % 7)
    values = generator.standard_normal(4096) * 2.0 ** generator.integers(-30, 1, 4096)
    values = np.ldexp(values, scale).astype(np.float32)
    exponent = 15 - int(np.frexp(np.abs(values).max())[1])
    wanted = np.ldexp(values, exponent).astype(dtype)
    with np.errstate(under="ignore"):
        bits = narrowed(np.abs(values), values, exponent, dtype)
    # Double rounding may change the last bit of a few of the smallest numbers.
    off = bits.astype(int) - wanted.view(np.uint16)
    assert np.abs(off).max() <= 1
    assert np.count_nonzero(off) <= 4
    assert (np.abs(wanted[off != 0].astype(float)) < 2.0**-14).all()
    with np.errstate(under="ignore"):
        found = widened(bits, exponent, dtype)
    back = np.ldexp(bits.view(dtype).astype(np.float32), -exponent)
    np.testing.assert_array_equal(found, back)
