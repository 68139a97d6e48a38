"""Hashes of arrays are equal for equal bytes, dtypes and shapes only."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcstrat.engine.arrays.samples import digest_of_rows, has_plain_bytes

MOST_BYTES = 256


def random_array(rng: Any) -> Any:
    shape = tuple(rng.integers(1, 9, rng.integers(1, 4)))
    dtype = rng.choice(["f4", "f8", "c8", "i2", "u1", "?", "M8[s]", "U3", "S2"])
    array = rng.integers(0, 2, shape).astype("i8").astype(dtype)
    return array[::2] if rng.random() < 0.3 else array


def test_digests_are_equal_as_arrays_are() -> None:
    rng = np.random.default_rng(0)
    seen: dict[int, Any] = {}
    for _ in range(600):
        array = random_array(rng)
        digest, is_constant = digest_of_rows(array, 1 << 20)
        assert digest_of_rows(array.copy(), 1 << 20)[0] == digest
        assert is_constant == (len(np.unique(array)) == 1)
        known = seen.setdefault(digest, array)
        assert known.dtype == array.dtype
        assert known.shape == array.shape
        assert (known == array).all()


def test_samples_have_the_first_and_the_last_row() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        rows, columns = rng.integers(40, 200), rng.integers(1, 9)
        array = rng.random((rows, columns))
        most_rows = int(rng.integers(2, 9))
        digest = digest_of_rows(array, MOST_BYTES, most_rows)
        assert digest == digest_of_rows(array.copy(), MOST_BYTES, most_rows)
        for row in (0, -1):
            other = array.copy()
            other[row, 0] += 1
            assert digest_of_rows(other, MOST_BYTES, most_rows) != digest


@pytest.mark.parametrize(
    "dtype", [np.longdouble, object, [("a", "i1"), ("b", "f8")], "V3"]
)
def test_arrays_with_undefined_bytes_are_not_hashed(dtype: Any) -> None:
    assert not has_plain_bytes(np.zeros(2, dtype))
