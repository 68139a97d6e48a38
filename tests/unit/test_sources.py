"""What becomes the columns of a data set."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.data.sources import open_source


class _Tensor:
    """An array of another library, whose rows are slow to read one by one."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, key: Any) -> Any:
        raise AssertionError("a row is read")

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_arrays_of_other_libraries_are_shared() -> None:
    array = np.arange(12.0).reshape(6, 2)
    columns = open_source({"x": _Tensor(array), "y": np.arange(6)})
    batch = columns.read(np.array([4, 1]))
    np.testing.assert_array_equal(batch["x"], array[[4, 1]])
    assert all(type(column) is np.ndarray for column in columns.columns)
    assert any(np.shares_memory(column, array) for column in columns.columns)
