"""Arrays of rows in one file, of which every process can write any rows.

The arrays are not compressed and lie at known places: each is a contiguous HDF5 dataset
or, in a Zarr store (format 2), has chunks of about 1 MiB.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcstrat.data.sources import runs_of
from hpcstrat.engine.file_bytes import read_exactly, write_all
from hpcstrat.engine.typing import Array

__all__ = ["RowArray", "RowFile"]

_MOST_OPEN_FILES = 64
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class RowArray:
    """An array in a file: its name, its number of rows, dtype and shape of a row."""

    name: str
    num_rows: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))

    @property
    def chunk_rows(self) -> int:
        """Number of rows in a chunk of Zarr."""
        return max(_CHUNK_BYTES // max(self.row_bytes, 1), 1)

    def zarr_metadata(self) -> dict[str, Any]:
        return {
            "zarr_format": 2,
            "shape": [self.num_rows, *self.shape],
            "chunks": [self.chunk_rows, *(max(n, 1) for n in self.shape)],
            "dtype": self.dtype.str,
            "compressor": None,
            "fill_value": None,
            "order": "C",
            "filters": None,
        }

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


class RowFile:
    """Writes rows of arrays in an HDF5 file, or in a store whose name ends in .zarr.

    ``offsets`` of the arrays are those that `open_file` returned on any rank.
    """

    def __init__(self, path: Path, offsets: dict[str, int]) -> None:
        self.path, self._offsets = path, offsets
        self._open: dict[str, int] = {}

    @staticmethod
    def create(path: Path, arrays: Sequence[RowArray]) -> None:
        """Make the file with arrays of zeros, and then give it its name."""
        part = path.with_name(path.name + ".part")
        if path.suffix == ".zarr":
            shutil.rmtree(part, ignore_errors=True)
            for array in arrays:
                folder = part / array.name
                folder.mkdir(parents=True)
                (folder / ".zarray").write_text(json.dumps(array.zarr_metadata()))
                for group in folder.parents[: len(Path(array.name).parts)]:
                    (group / ".zgroup").write_text('{"zarr_format": 2}')
        else:
            import h5py

            early = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            early.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            with h5py.File(part, "w") as file:
                for array in arrays:
                    shape = array.num_rows, *array.shape
                    file.create_dataset(array.name, shape, array.dtype, dcpl=early)
        os.replace(part, path)

    @staticmethod
    def open_file(path: Path, arrays: Sequence[RowArray]) -> dict[str, int]:
        """Return the arrays' offsets; ValueError if the file has other arrays."""
        offsets: dict[str, int] = {}
        if path.suffix == ".zarr":
            for array in arrays:
                metadata = path / array.name / ".zarray"
                known = metadata.exists() and json.loads(metadata.read_text())
                if known == array.zarr_metadata():
                    offsets[array.name] = 0
        else:
            import h5py

            with h5py.File(path) as file:
                for array in arrays:
                    found = file.get(array.name)
                    kind = array.dtype, (array.num_rows, *array.shape), None
                    about = (getattr(found, n, 0) for n in ("dtype", "shape", "chunks"))
                    if tuple(about) == kind:
                        offsets[array.name] = found.id.get_offset() or 0
        for array in arrays:
            if array.name not in offsets:
                raise ValueError(
                    f"expected {array.num_rows} rows of {array} in {path}, found "
                    "another file, or other predictions; remove it, or choose another "
                    "path"
                )
        return offsets

    def write(self, array: RowArray, rows: Array, values: Array) -> None:
        """Write rows, whose numbers increase."""
        data: Any = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        size = array.row_bytes
        for first, last in runs_of(rows) if size else ():
            for file, offset, start, stop in self._places(
                array, int(rows[first]), first, last
            ):
                write_all(file, data[start * size : stop * size], offset)

    def read(self, array: RowArray) -> Array:
        """Read all rows of an array of single bytes."""
        parts = [
            read_exactly(file, offset, stop - start)
            for file, offset, start, stop in self._places(array, 0, 0, array.num_rows)
        ]
        self.sync()
        return np.frombuffer(b"".join(parts), array.dtype)

    def _places(
        self, array: RowArray, row: int, first: int, last: int
    ) -> Iterator[tuple[int, int, int, int]]:
        """Yield file, offset, and range of the values that begin with row ``row``."""
        size, start = array.row_bytes, self._offsets[array.name]
        if self.path.suffix != ".zarr":
            if last > first:
                yield self._file(self.path), start + row * size, first, last
            return
        chunk = array.chunk_rows
        while first < last:
            block, inside = divmod(row, chunk)
            stop = min(last, first + chunk - inside)
            path = self.path / array.name / (str(block) + ".0" * len(array.shape))
            yield self._file(path, chunk * size), inside * size, first, stop
            row, first = row + stop - first, stop

    def _file(self, path: Path, num_bytes: int | None = None) -> int:
        """Return an open file, which is extended to ``num_bytes``."""
        name = str(path)
        if name not in self._open:
            if len(self._open) >= _MOST_OPEN_FILES:
                self.sync()
            self._open[name] = os.open(name, os.O_RDWR | os.O_CREAT, 0o666)
            if num_bytes is not None:
                os.ftruncate(self._open[name], num_bytes)
        return self._open[name]

    def sync(self) -> None:
        """Write all bytes to the disk, and close the files."""
        files, self._open = self._open, {}
        try:
            for file in files.values():
                os.fdatasync(file)
        finally:
            for file in files.values():
                os.close(file)
