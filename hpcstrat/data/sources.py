"""Sources of examples: anything whose rows can be read at random."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.data.boxes import Box, Boxes
from hpcstrat.data.elements import call_program, stack
from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.hdf5_files import datasets_of
from hpcstrat.engine.tree import flatten, is_leaf, unflatten
from hpcstrat.engine.typing import Array, Tree

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.feeding import Feeder

__all__ = ["Columns", "open_source", "runs_of"]


class Columns:
    """Columns of equal length, as the leaves of a nested structure (optree).

    A column is a NumPy or CuPy array, an HDF5 dataset or a sequence. The constructor
    raises ValueError if lengths differ.
    """

    def __init__(self, columns: list[Any], structure: Any) -> None:
        lengths = {len(column) for column in columns}
        if len(lengths) != 1:
            found = [len(column) for column in columns]
            raise ValueError(
                "expected at least one column, all with the same number of rows, found "
                f"lengths {found}; check the source"
            )
        self.columns = columns
        self.structure = structure
        # Copies row numbers to the GPU if columns are on the GPU.
        self._feeder: Feeder | None = None
        self.num_rows = lengths.pop()

    @classmethod
    def of_slices(cls, element: Tree) -> Columns:
        """Return the arrays of an element as columns; ValueError for scalars."""
        leaves, structure = flatten(element)
        if not all(map(np.ndim, leaves)):
            raise ValueError(
                "expected arrays with a first dimension, found a scalar; use "
                "from_tensors for one element"
            )
        return cls(leaves, structure)

    def read(self, rows: Array | slice) -> Tree:
        """Read rows of every column, in the order of ``rows``.

        If ``rows`` is a slice, rows of NumPy arrays are read-only views of the column.
        """
        places = rows
        if isinstance(rows, np.ndarray) and any(map(is_device, self.columns)):
            if self._feeder is None:
                from hpcstrat.engine.gpu.feeding import Feeder

                self._feeder = Feeder()
            (places,) = self._feeder.put([rows])
        parts = [
            _taken(column, places) if is_device(column) else _read(column, rows)
            for column in self.columns
        ]
        return unflatten(self.structure, parts)

    def alone(self, name: str) -> Columns | None:
        """Return one column as an array of rows; None if there is no such column."""
        names = ["/".join(map(str, path)) for path in self.structure.paths()]
        if name not in names or isinstance(self.columns[names.index(name)], _Items):
            return None
        return Columns([self.columns[names.index(name)]], flatten(0)[1])

    def boxed(self, boxes: Boxes) -> Columns | None:
        """Return columns of which only boxes are read; None if not possible."""
        made = copy.copy(self)
        if any(isinstance(column, _Items) for column in self.columns):
            return None
        made.columns = []
        for column, box in zip(self.columns, boxes, strict=True):
            if box is None:
                part = column
            elif isinstance(column, np.ndarray) or is_device(column):
                part = column[(slice(None), *box.slices)]  # a view
            elif _is_hdf5(column):
                part = _BoxedDataset(column, box)
            else:
                return None
            made.columns.append(part)
        return made

    def elements(self, rows: Array | slice) -> list[Tree] | None:
        """Read items, which may differ in shape; None if columns have no items."""
        (*others, first) = self.columns
        if others or not isinstance(first, _Items):
            return None
        return [unflatten(self.structure, [item]) for item in first.elements(rows)]

    def describe(self) -> str:
        """Describe the columns; the text must be equal on all ranks."""
        kinds = []
        for column in self.columns:
            if isinstance(column, _Items):
                kinds.append(column.describe())
                continue
            dtype = getattr(column, "dtype", type(column).__name__)
            kinds.append(f"{dtype}{list(getattr(column, 'shape', ())[1:])}")
        return f"{self.num_rows} rows of {', '.join(kinds)}"


class _BoxedDataset:
    """An HDF5 dataset of which h5py reads only a part of each row."""

    def __init__(self, dataset: Any, box: Box) -> None:
        self._dataset = dataset
        self._part, self._own = box.selections(dataset.chunks, dataset.ndim)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, rows: slice) -> Array:
        found = self._dataset[(rows, *self._part)]
        return np.ascontiguousarray(found[(slice(None), *self._own)])


class _Items:
    """A column whose items are structures of arrays, such as a torch data set.

    Reading raises ValueError if an item has another structure than the first item.
    """

    def __init__(self, items: Any) -> None:
        self._items = items
        leaves, self._structure = flatten(_as_item(items[0]))
        self._empty = [as_array(leaf)[np.newaxis][:0] for leaf in leaves]

    def __len__(self) -> int:
        return len(self._items)

    def describe(self) -> str:
        kinds = [f"{leaf.dtype}{list(leaf.shape[1:])}" for leaf in self._empty]
        return f"items of {', '.join(kinds)}"

    def elements(self, rows: Array | slice) -> list[Tree]:
        """Read items one by one; their arrays may differ in shape."""
        if isinstance(rows, slice):
            indices = list(range(*rows.indices(len(self))))
        else:
            indices = rows.tolist()
        # Torch and Hugging Face data sets may have this method, which is faster.
        at_once = getattr(self._items, "__getitems__", None)
        found = (
            call_program(at_once, indices)
            if at_once and indices
            else [call_program(self._items.__getitem__, index) for index in indices]
        )
        items = []
        for index, item in zip(indices, found, strict=True):
            leaves, structure = flatten(_as_item(item))
            if structure != self._structure:
                raise ValueError(
                    f"expected items of the structure {self._structure}, as item 0, "
                    f"found {structure} in item {index}; give all the same"
                )
            items.append(unflatten(structure, list(map(as_array, leaves))))
        return items

    def read(self, rows: Array | slice) -> Tree:
        """Read items, and stack each of their arrays."""
        items = self.elements(rows)
        return stack(items) if items else unflatten(self._structure, self._empty)


def _as_item(item: Any) -> Any:
    """Return an item, with arrays instead of its lists of numbers, such as tokens."""
    if isinstance(item, list) and item and all(map(_is_plain, item)):
        return as_array(item)
    if isinstance(item, list):
        return [_as_item(part) for part in item]
    if isinstance(item, dict):
        return type(item)({key: _as_item(part) for key, part in item.items()})
    if type(item) is tuple:
        return tuple(_as_item(part) for part in item)
    return item


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, np.generic))


def _taken(column: Array, places: Array | slice) -> Array:
    """Return a copy, on the GPU, of rows of a column on the GPU."""
    taken: Array = column[places]
    return taken.copy() if isinstance(places, slice) else taken


def _read(column: Any, rows: Array | slice) -> Tree:
    if isinstance(column, _Items):
        return column.read(rows)
    if isinstance(column, np.ndarray):
        part = column[rows]
        if isinstance(rows, slice):
            # A program that changes a batch in place must not change the data set.
            part = part.view()
            part.flags.writeable = False
        return part
    get = partial(call_program, column.__getitem__)
    if isinstance(rows, slice):
        return as_array(get(rows))
    if not rows.size:
        return as_array(get(slice(0, 0)))
    if _is_hdf5(column):
        # HDF5 reads slices of adjacent rows 10 times as fast as a list of rows.
        increasing, places = np.unique(rows, return_inverse=True)
        parts = [
            column[int(increasing[start]) : int(increasing[end - 1]) + 1]
            for start, end in runs_of(increasing)
        ]
        whole: Array = np.concatenate(parts)
        return whole[places]
    # A Python sequence can be indexed only by single integers.
    return as_array([get(int(row)) for row in rows])


def open_source(source: Any) -> Columns:
    """Return a source as columns; an HDF5 group becomes a mapping of its datasets."""
    if type(source).__module__.startswith("h5py") and hasattr(source, "visititems"):
        return Columns(*flatten(_datasets(source)))
    leaves, structure = flatten(source)
    for leaf in leaves:
        if isinstance(leaf, (str, bytes, os.PathLike)):
            raise ValueError(
                f"expected arrays, or the path of one HDF5 file, found {leaf!r:.80} "
                "among the columns; pass paths to Dataset.from_files, and text as a "
                "NumPy array"
            )
    # Turn other libraries' arrays (but not HDF5 datasets) into NumPy or CuPy arrays.
    leaves = [as_array(leaf) if _is_shared(leaf) else leaf for leaf in leaves]
    # Index the rows of pandas objects by position, not by label.
    leaves = [leaf.to_numpy() if hasattr(leaf, "iloc") else leaf for leaf in leaves]
    columns = [_column(leaf) for leaf in leaves]
    if any(c.ndim == 0 for c in columns if isinstance(c, np.ndarray) or is_device(c)):
        raise ValueError(
            "expected columns with a first dimension, found a scalar; give one row for "
            "each example"
        )
    return Columns(columns, structure)


def _is_hdf5(column: Any) -> bool:
    is_dataset = type(column).__module__.startswith("h5py")
    return is_dataset or isinstance(column, _BoxedDataset)


def _is_shared(leaf: Any) -> bool:
    shares = hasattr(leaf, "__dlpack__") or hasattr(leaf, "__cuda_array_interface__")
    return shares and not isinstance(leaf, np.ndarray)


def _column(leaf: Any) -> Any:
    """Return a leaf as a column: an array, a sequence, or items of a structure."""
    if not (hasattr(leaf, "__getitem__") and hasattr(leaf, "__len__")):
        return as_array(leaf)
    # An object with a dtype or a shape is an array: its first row need not be read. An
    # exception is a table with ``__getitems__``, such as a Hugging Face data set.
    is_table = hasattr(leaf, "__getitems__")
    if hasattr(leaf, "dtype") or (hasattr(leaf, "shape") and not is_table):
        return leaf
    return leaf if not len(leaf) or is_leaf(leaf[0]) else _Items(leaf)


def _datasets(group: Any) -> dict[str, Any]:
    """Return an HDF5 group's datasets by name; subgroups become nested mappings."""
    found: dict[str, Any] = {}
    for name, dataset in datasets_of(group):
        if not hasattr(dataset, "ndim"):
            raise ValueError(
                f"expected datasets in {group.name} of {group.file.filename}, found "
                f"the link {name}, which leads to nothing; remove it, or pass a dict "
                "of the datasets"
            )
        *above, last = name.split("/")
        inside = found
        for each in above:
            inside = inside.setdefault(each, {})
        inside[last] = dataset
    return found


def runs_of(rows: Array, step: int = 1) -> Iterator[tuple[int, int]]:
    """Yield the indices ``start, end`` of runs of numbers that increase by ``step``."""
    if not len(rows):
        return
    ends = np.flatnonzero(np.diff(rows) != step) + 1
    start = 0
    for end in ends.tolist():
        yield start, end
        start = end
    yield start, len(rows)
