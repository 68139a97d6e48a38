"""Rows of many files, one file after another, as one stage of a data set."""

from __future__ import annotations

import copy
import fnmatch
import glob
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcstrat.data.boxes import Box, Boxes
from hpcstrat.data.file_lists import digest_of, names_of
from hpcstrat.data.files.columns import BlockCache, Column
from hpcstrat.data.files.hdf5 import Hdf5Source, open_hdf5
from hpcstrat.data.files.netcdf import NetcdfVariable, is_netcdf, variables_of
from hpcstrat.data.files.open_files import OpenFiles
from hpcstrat.data.files.others import (
    ZarrStore,
    is_zarr,
    npy_column,
    parquet_columns,
)
from hpcstrat.data.rows import Places, Rows, as_places
from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.hdf5_files import datasets_of
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array, Tree

__all__ = ["FileRows", "files_of", "matching_files"]

_SHOWN = 6
_PARQUET = (".parquet", ".pq")


def files_of(paths: Any) -> list[str]:
    """Return the files that match a path, a pattern, or a list of paths and patterns.

    The result has the order of the list. A folder stands for its Parquet files, unless
    it is a Zarr store. Raises FileNotFoundError if nothing matches.
    """
    given = [paths] if isinstance(paths, (str, bytes, os.PathLike)) else list(paths)
    found: list[str] = []
    for entry in given:
        if not isinstance(entry, (str, bytes, os.PathLike)):
            raise ValueError(
                f"expected paths of files, found {type(entry).__name__}; pass arrays "
                "to Dataset.from_tensor_slices"
            )
        path = os.fsdecode(entry)
        if os.path.isdir(path) and not is_zarr(path):
            names = sorted(glob.glob(os.path.join(glob.escape(path), "*.parquet")))
        elif os.path.exists(path):
            names = [path]
        else:
            names = sorted(glob.glob(path))
        if not names:
            raise FileNotFoundError(
                f"expected a file, or a pattern that matches some, found nothing at "
                f"{path}; check the path"
            )
        found += names
    return found


def matching_files(patterns: Any) -> list[str]:
    """Return the files that match patterns, sorted; FileNotFoundError if none does."""
    if isinstance(patterns, (str, os.PathLike)):
        patterns = [patterns]
    found = {
        name
        for path in map(os.fspath, patterns)
        for name in ([path] if os.path.exists(path) else glob.glob(path))
    }
    if not found:
        raise FileNotFoundError(
            f"expected files, found none that match {list(map(str, patterns))}; check "
            "the pattern"
        )
    return sorted(found)


class _File:
    """One file: its columns by name, its number of rows, and all files it consists of.

    ``units`` are units of time by column: they must not differ between files.
    """

    def __init__(
        self,
        path: str,
        columns: dict[str, Column],
        parts: Iterable[str] = (),
        units: dict[str, str] | None = None,
    ) -> None:
        self.path = path
        self.columns = columns
        self.parts = list(dict.fromkeys(parts)) or [path]
        self.units = units or {}
        lengths = {name: column.num_rows for name, column in columns.items()}
        if len(set(lengths.values())) != 1:
            shown = ", ".join(
                f"{name}: {n}" for name, n in list(lengths.items())[:_SHOWN]
            )
            raise ValueError(
                f"expected columns with the same number of rows in {path}, found "
                f"{{{shown}}}; choose the columns of the examples with columns="
            )
        self.num_rows = next(iter(lengths.values()))

    def boxed(self, boxes: dict[str, Box]) -> _File:
        """Return the file with boxes of some columns, by the columns' names."""
        made = copy.copy(self)
        made.columns = dict(self.columns)
        for name, box in boxes.items():
            column = self.columns[name]
            made.columns[name] = column.boxed(replace(box, lengths=column.shape))
        return made


class FileRows(Rows):
    """The rows of files, as mappings of columns that are nested like the files' groups.

    ``columns`` selects columns by name or pattern; with one name, rows are arrays.
    """

    def __init__(
        self,
        paths: Sequence[str],
        columns: str | Sequence[str] | None = None,
        *,
        dimension: str | None = None,
        decode: bool = True,
    ) -> None:
        self.paths = list(paths)
        self._files = OpenFiles()
        self._cache = BlockCache()
        # Reuse batches' memory: page faults of new memory cost more than the copying.
        self._memory, self._recycling = Recycler(), threading.Lock()
        self._dimension, self._decode = dimension, decode
        wanted = [columns] if isinstance(columns, str) else columns
        opened = [self._open(path, wanted) for path in self.paths]
        # A file without rows may not show the lengths of its lists.
        first = next((file for file in opened if file.num_rows), opened[0])
        for other in opened:
            _require_alike(first, other)
        self._parts, self._first = opened, first
        self._starts = np.cumsum([0, *(file.num_rows for file in opened)])
        self.cardinality = int(self._starts[-1])
        self._is_bare = isinstance(columns, str) and list(first.columns) == [columns]
        self._is_bare = self._is_bare or list(first.columns) == [""]
        self.words = self._types()

    def _open(self, path: str, wanted: Sequence[str] | None) -> _File:
        if os.path.isdir(path):
            store = ZarrStore(path, self._files, self._cache)
            names = list(_chosen(store.arrays, wanted, path))
            columns = {name: store.column(name) for name in names}
            return _File(path, columns, store.files(names))
        self._files.note(path)
        if path.endswith(".npz"):
            raise ValueError(
                f"expected a file of one array, or of columns, found the archive {path}"
                "; save each array by numpy.save, or pass numpy.load(PATH)[NAME] to "
                "Dataset.from_tensor_slices"
            )
        if path.endswith(".npy"):
            if wanted is not None:
                raise ValueError(
                    f"expected no names of columns for {path}, which has one array, "
                    f"found {list(wanted)}; leave out columns=, and choose fields by "
                    "map"
                )
            return _File(path, _chosen({"": npy_column(path, self._files)}, None, path))
        if path.endswith(_PARQUET):
            return _File(
                path,
                parquet_columns(
                    path, self._cache, lambda found: _chosen(found, wanted, path)
                ),
            )
        with open_hdf5(path) as file:
            try:
                return self._open_hdf5(file, path, wanted)
            except (OSError, RuntimeError, TypeError, LookupError) as error:
                raise ValueError(
                    f"expected an HDF5 file that can be read at {path}, found "
                    f"{type(error).__name__}: {error}; check it: h5dump -H {path}"
                ) from error

    def _open_hdf5(self, file: Any, path: str, wanted: Sequence[str] | None) -> _File:
        found = dict(datasets_of(file))
        variables: dict[str, NetcdfVariable] = {}
        if is_netcdf(file, path):
            variables = variables_of(found, self._dimension, path, wanted)
            found = {name: each.dataset for name, each in variables.items()}
        columns: dict[str, Column] = {}
        parts: list[str] = []
        for name, dataset in _chosen(found, wanted, path).items():
            source = Hdf5Source(dataset, name, path)
            for part in source.files():
                self._files.note(part)
                parts.append(part)
            columns[name] = source.column(self._files, self._cache)
            if name in variables:
                columns[name] = variables[name].column(columns[name], self._decode)
        units = {name: variables[name].time_units for name in columns if variables}
        return _File(path, columns, parts, units if self._decode else None)

    def read(self, places: Places, epoch: int) -> Tree:
        rows, inverse = as_places(places), None
        where: Array | None = None
        if not isinstance(places, slice):
            where = np.argsort(rows)
            rows = rows[where]
            if (rows[1:] == rows[:-1]).any():
                # Some rows are requested several times: read each of them once.
                rows, inverse = np.unique(places, return_inverse=True)
                where = None
        ends = np.searchsorted(rows, self._starts)
        found = {
            name: self._empty((len(rows), *first.shape), first.dtype)
            for name, first in self._first.columns.items()
        }
        for index, file in enumerate(self._parts):
            start, end = int(ends[index]), int(ends[index + 1])
            if start < end:
                own = rows[start:end] - self._starts[index]
                if where is None:
                    parts = {name: out[start:end] for name, out in found.items()}
                    self._read_file(file, own, parts, None)
                else:
                    self._read_file(file, own, found, where[start:end])
        for name, out in found.items():
            array = out.astype(np.str_) if out.dtype == object else out
            found[name] = array if inverse is None else array[inverse]
        return self._structured(found)

    def _read_file(
        self, file: _File, rows: Array, found: dict[str, Array], where: Array | None
    ) -> None:
        """Read rows of one file; raise an error that names it if it has changed."""
        name = ""
        try:
            for name, out in found.items():
                file.columns[name].read(rows, out, where)
        except (OSError, ValueError, TypeError, LookupError, RuntimeError) as error:
            # A library may have failed because the file has changed.
            self._require_unchanged(file, error)
            if any(part in str(error) for part in (file.path, *file.parts)):
                raise
            raise ValueError(
                f"expected rows of {name or 'the array'} in {file.path}, found that "
                f"they cannot be read: {type(error).__name__}: {error}; check the file"
            ) from error
        self._require_unchanged(file, None)

    def _require_unchanged(self, file: _File, cause: Exception | None) -> None:
        try:
            self._files.check(file.parts)
        except (OSError, ValueError) as error:
            self._cache.clear()
            raise error from cause

    def _empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialized array; reuse the memory of a batch if possible."""
        if dtype.hasobject:
            return np.empty(shape, dtype)
        with self._recycling:
            return self._memory.empty(shape, dtype)

    def boxed(self, boxes: Boxes) -> FileRows:
        """Return the same rows, of which only boxes are read."""
        names = flatten(self._structured({name: name for name in self.columns()}))[0]
        chosen = {n: b for n, b in zip(names, boxes, strict=True) if b is not None}
        made = copy.copy(self)
        # The lists of a file without rows may have other lengths.
        made._parts = [
            file.boxed(chosen) if file.num_rows or file is self._first else file
            for file in self._parts
        ]
        made._first = made._parts[self._parts.index(self._first)]
        made.words = f"{self.words}, {boxes.words}"
        return made

    def column_alone(self, name: str) -> FileRows | None:
        if name not in self.columns():
            return None

        def only(file: _File) -> _File:
            made = copy.copy(file)
            made.columns = {name: file.columns[name]}
            return made

        made = copy.copy(self)
        made._parts = [only(file) for file in self._parts]
        made._first, made._is_bare = only(self._first), True
        return made

    def columns(self) -> dict[str, Column]:
        """Return a file's columns, which have the same types in all files."""
        return self._first.columns

    def _structured(self, found: dict[str, Any]) -> Tree:
        if self._is_bare:
            return next(iter(found.values()))
        if self._first.path.endswith(_PARQUET):
            # Parquet has no groups: a slash is a part of a name, such as in "m/s".
            return found
        tree: dict[str, Any] = {}
        for name, array in found.items():
            *groups, last = name.split("/")
            inside = tree
            for group in groups:
                inside = inside.setdefault(group, {})
            inside[last] = array
        return tree

    def order_words(self) -> str:
        names = names_of(self.paths)
        files = [f"{n} {f.num_rows}" for n, f in zip(names, self._parts, strict=True)]
        return f"{self.cardinality} rows of {len(files)} files ({digest_of(files):x})"

    def files(self) -> list[str]:
        return [
            f"{name} of {self._num_bytes(file.path)} bytes with {file.num_rows} rows"
            for name, file in zip(names_of(self.paths), self._parts, strict=True)
        ]

    def _num_bytes(self, path: str) -> int | str:
        return "any" if os.path.isdir(path) else self._files.size(path)

    def _types(self) -> str:
        kinds = ", ".join(
            f"{name} {column.dtype}{list(column.shape)}"
            for name, column in self._first.columns.items()
        )
        names = [os.path.basename(path) for path in self.paths]
        shown = ", ".join(names[:2] + (["..."] if len(names) > 2 else []))
        return f"{self.cardinality} rows of {len(names)} files ({shown}): {kinds}"


def _chosen(
    found: dict[str, Any], wanted: Sequence[str] | None, path: str
) -> dict[str, Any]:
    """Return the columns that match the patterns ``wanted``, in the patterns' order."""
    if not found:
        raise ValueError(f"expected columns with rows in {path}, found none")
    if wanted is None:
        return found
    chosen: dict[str, Any] = {}
    for pattern in wanted:
        # A name may have the characters of a pattern, such as in "temperature [K]".
        names = [pattern] if pattern in found else fnmatch.filter(found, pattern)
        if not names:
            shown = ", ".join(sorted(found)[: 4 * _SHOWN])
            raise ValueError(
                f"expected the column {pattern} in {path}, found {shown}; change "
                "columns="
            )
        chosen.update((name, found[name]) for name in names)
    return chosen


def _require_alike(first: _File, other: _File) -> None:
    if set(first.columns) != set(other.columns):
        differing = sorted(set(first.columns) ^ set(other.columns))[:_SHOWN]
        raise ValueError(
            f"expected the same columns in {first.path} and {other.path}, found "
            f"{', '.join(differing)} in one of them only; choose columns that all "
            "files have with columns="
        )
    for name, column in first.columns.items():
        found = other.columns[name]
        shape = found.shape if other.num_rows else column.shape
        if (column.dtype, column.shape) != (found.dtype, shape):
            raise ValueError(
                f"expected {name} as {column.dtype}{list(column.shape)} in "
                f"{other.path}, as in {first.path}, found {found.dtype}"
                f"{list(found.shape)}; leave it out by columns=, or convert the file"
            )
        units = first.units.get(name, ""), other.units.get(name, "")
        if units[0] != units[1]:
            raise ValueError(
                f"expected {name} in {units[0]!r} in {other.path}, as in {first.path}, "
                f"found {units[1]!r}; leave it out by columns=, or read the numbers as "
                "stored by decode=False"
            )
