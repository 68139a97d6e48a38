"""Columns of NumPy, Zarr and Parquet files."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.data.boxes import Box
from hpcstrat.data.files.arrow import ArrowLayout
from hpcstrat.data.files.columns import (
    BlockCache,
    BlockColumn,
    Column,
    ContiguousColumn,
)
from hpcstrat.data.files.open_files import OpenFiles
from hpcstrat.engine.typing import Array

__all__ = ["ZarrStore", "is_zarr", "npy_column", "parquet_columns"]


def _not_installed(library: str, path: str) -> ImportError:
    return ImportError(
        f"expected {library}, which reads {path}, found that it is not installed; "
        f"pip install {library}"
    )


def npy_column(path: str, files: OpenFiles) -> Column:
    """Return a column of the array in a file that `numpy.save` wrote."""
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, in_fortran_order, dtype = read(file)
        except ValueError as error:
            raise ValueError(
                f"expected an array of numpy.save in {path}, found none: {error}"
            ) from error
        offset = file.tell()
    if not shape or in_fortran_order or dtype.hasobject:
        raise ValueError(
            f"expected rows of numbers in C order in {path}, found shape {shape} of "
            f"{dtype}{' in Fortran order' if in_fortran_order else ''}; save "
            "numpy.ascontiguousarray(array)"
        )
    return ContiguousColumn(files, path, offset=offset, shape=shape, dtype=dtype)


class ZarrStore:
    """The arrays of a Zarr store as columns; ``zarr`` must be installed.

    A chunk without a file has fill values: it was never written. Therefore a change of
    the folders of chunks, as by the removal of a chunk, must be found.
    """

    def __init__(self, path: str, files: OpenFiles, cache: BlockCache) -> None:
        try:
            import zarr
        except ImportError as error:
            raise _not_installed("zarr", path) from error
        self._path, self._files, self._cache = path, files, cache
        for part in self._metadata_of(""):
            files.note(part)
        with _fast_codecs(zarr):
            store = zarr.open(path, mode="r")
            arrays: Iterable[tuple[str, Any]] = [("", store)]
            if hasattr(store, "members"):
                # Sort the arrays: zarr may list them in another order on other ranks.
                found_arrays = {
                    name: item
                    for name, item in store.members(max_depth=None)
                    if hasattr(item, "dtype")
                }
                arrays = [(name, found_arrays[name]) for name in sorted(found_arrays)]
        self.arrays = {name: array for name, array in arrays if array.shape}

    def files(self, names: Iterable[str]) -> list[str]:
        """Return the paths of the metadata of the store and of arrays."""
        return [part for name in ("", *names) for part in self._metadata_of(name)]

    def _metadata_of(self, name: str) -> list[str]:
        found = [os.path.join(self._path, name, each) for each in _ZARR_METADATA]
        return [each for each in found if os.path.exists(each)]

    def column(self, name: str) -> Column:
        array, files = self.arrays[name], self._files
        for part in self._metadata_of(name):
            files.note(part)
        shared, own = _chunk_folders(os.path.join(self._path, name))
        for folder in (*shared, *(each for block in own.values() for each in block)):
            files.note(folder)
        size = array.shards[0] if getattr(array, "shards", None) else array.chunks[0]

        def load(block: int, box: Box | None = None) -> Array:
            stop = min((block + 1) * size, array.shape[0])
            part = () if box is None else box.slices
            found = np.asarray(array[(slice(block * size, stop), *part)])
            files.check((*shared, *own.get(block, ())))
            return found

        return BlockColumn(
            self._cache,
            (self._path, name),
            np.arange(0, max(array.shape[0], 1), size),
            load,
            num_rows=array.shape[0],
            shape=tuple(array.shape[1:]),
            dtype=array.dtype,
            how=f"through {_zarr_library(array)}, {size} rows at once",
            load_box=load,
        )


@contextlib.contextmanager
def _fast_codecs(zarr: Any) -> Iterator[None]:
    """Let the package zarrs, if it is installed, decode the arrays that are opened.

    zarr decodes the arrays that zarrs does not support; a warning about it is dropped.
    """
    if importlib.util.find_spec("zarrs") is None:
        yield
        return
    pipeline = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}
    with zarr.config.set(pipeline), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Array is unsupported by Zarrs")
        yield


def _zarr_library(array: Any) -> str:
    pipeline = getattr(array.async_array, "codec_pipeline", None)
    # The pipeline of zarrs has no implementation for an array that it cannot decode.
    return "zarr" if getattr(pipeline, "impl", None) is None else "zarrs"


_ZARR_METADATA = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")


def _chunk_folders(folder: str) -> tuple[list[str], dict[int, list[str]]]:
    """Return the folders of an array's chunks: of all blocks, and of each block."""
    shared: list[str] = []
    own: dict[int, list[str]] = {}
    for path, _, _ in os.walk(folder):
        # Zarr 3 has chunk (2, 0) in c/2/0, and Zarr 2 in 2/0 or 2.0.
        parts = os.path.relpath(path, folder).split(os.sep)
        block = next((part for part in parts if part not in {".", "c"}), "")
        if block.isdecimal():
            own.setdefault(int(block), []).append(path)
        else:
            shared.append(path)
    return shared, own


def parquet_columns(
    path: str, cache: BlockCache, choose: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Column]:
    """Return columns of a Parquet file; ``pyarrow`` must be installed.

    ``choose`` selects columns from a mapping of names to types.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise _not_installed("pyarrow", path) from error
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"expected a Parquet file at {path}, found one that pyarrow cannot open: "
            f"{error}; check that it was written to its end"
        ) from error
    with file:
        metadata, schema = file.metadata, file.schema_arrow
        sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        starts = np.cumsum([0, *sizes])[:-1] if sizes else np.zeros(1, np.int64)
        how = f"through pyarrow, row groups of up to {max(sizes, default=0)} rows"
        found: dict[str, Column] = {}
        for name, kind in choose({each.name: each.type for each in schema}).items():
            if schema.names.count(name) > 1:
                raise ValueError(
                    f"expected one column {name!r} in {path}, found "
                    f"{schema.names.count(name)} of this name; rename them, or choose "
                    "other columns="
                )
            place = f"the column {name!r} of {path}"
            layout = ArrowLayout(kind, place, _first_row(file, name, kind, sizes))
            found[name] = BlockColumn(
                cache,
                (path, name),
                starts,
                partial(_read_group, path, name, layout),
                num_rows=metadata.num_rows,
                shape=layout.shape,
                dtype=layout.dtype,
                how=how,
            )
    return found


def _first_row(file: Any, name: str, kind: Any, sizes: list[int]) -> Any:
    """Return the first row of a column of lists; None if there is none."""
    if "list" not in str(kind) or not any(sizes):
        return None
    group = next(index for index, size in enumerate(sizes) if size)
    batches = file.iter_batches(1, row_groups=[group], columns=[name])
    return next(batches).column(name)


def _read_group(path: str, name: str, layout: ArrowLayout, group: int) -> Array:
    """Read one row group of a column of a Parquet file."""
    from pyarrow import parquet

    # Open the file in each call, because several threads may read at the same time.
    with parquet.ParquetFile(path) as file:
        # pyarrow may also read columns whose names begin with this name and a dot.
        column = file.read_row_group(group, columns=[name]).column(name)
    return layout.rows(column.combine_chunks(), group)


def is_zarr(path: str) -> bool:
    """Return whether a folder is a Zarr store."""
    names = ("zarr.json", ".zgroup", ".zarray")
    return any(os.path.exists(os.path.join(path, name)) for name in names)
