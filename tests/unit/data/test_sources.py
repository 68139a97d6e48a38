"""Sources of a dataset, and their columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcstrat.data.dataset import Dataset
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


class _Pairs:
    """A map-style dataset whose items are a row and its label."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[Any, dict[str, Any]]:
        row = np.full(3, index, np.float32)
        return row, {"label": index, "weight": index / 2}


@pytest.mark.parametrize("rows", [slice(1, 4), np.array([4, 1, 2]), slice(2, 2)])
def test_items_of_a_structure_keep_it_in_any_order(rows: Any) -> None:
    columns = open_source(_Pairs(5))
    numbers = np.arange(5)[rows]
    values, rest = columns.read(rows)
    np.testing.assert_array_equal(values, np.repeat(numbers[:, None], 3, axis=1))
    assert values.dtype == np.float32
    assert values.shape == (len(numbers), 3)
    np.testing.assert_array_equal(rest["label"], numbers)
    np.testing.assert_array_equal(rest["weight"], numbers / 2)
    assert "int32[]" in columns.describe()


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_of_items_have_one_layout(shuffle: bool) -> None:
    batches = list(Dataset(_Pairs(5), batch_size=2, shuffle=shuffle))
    labels = np.concatenate([rest["label"] for _, rest in batches])
    assert sorted(labels.tolist()) == list(range(5))
    for row, rest in batches:
        np.testing.assert_array_equal(row[:, 0], rest["label"])


class _Table:
    """Items with lists, like those of a Hugging Face table; counts its calls."""

    shape = (5, 2)

    def __init__(self) -> None:
        self.calls = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"tokens": list(range(index + 1)), "label": index}

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.calls += 1
        return [self[index] for index in indices]


def test_items_may_have_lists_of_any_length() -> None:
    table = _Table()
    rows = Dataset(table)
    batches = list(rows.map(lambda item: item["tokens"]).padded_batch(3))
    assert batches[1].tolist() == [[0, 1, 2, 3, 0], [0, 1, 2, 3, 4]]
    labels = Dataset(table).map(lambda item: item["label"]).batch(5)
    assert next(iter(labels)).tolist() == [0, 1, 2, 3, 4]
    assert table.calls > 0
    with pytest.raises(ValueError, match="use padded_batch"):
        next(iter(rows.batch(2)))


def test_item_of_another_structure_is_refused() -> None:
    columns = open_source([[np.zeros(2)], [np.zeros(2)]])
    assert columns.num_rows == 2

    class Odd(_Pairs):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) if index < 3 else (index,)

    with pytest.raises(ValueError, match="in item 3; give all the same"):
        open_source(Odd(5)).read(slice(0, 5))


@pytest.mark.parametrize(
    "source",
    [["a.h5", "b.h5"], {"x": np.zeros(2), "y": "b.h5"}, (Path("a.h5"),), [b"a", b"b"]],
)
def test_paths_and_text_are_never_columns_of_characters(source: Any) -> None:
    with pytest.raises(ValueError, match="pass paths to Dataset"):
        Dataset(source, batch_size=2)
