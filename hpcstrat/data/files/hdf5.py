"""Columns of HDF5 files: the offsets of their bytes, and the unpacking of chunks.

h5py holds a lock while it reads, so that only one thread reads at a time. Therefore
this module itself reads contiguous datasets, and chunks whose filters `chunk_filters`
can undo, if the file has the values as NumPy has them. h5py reads all other datasets.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from hpcstrat.data.boxes import WHOLE, Box
from hpcstrat.data.files.chunk_filters import ChunkFilters, filters_of
from hpcstrat.data.files.columns import (
    BlockCache,
    BlockColumn,
    Column,
    ContiguousColumn,
)
from hpcstrat.data.files.open_files import OpenFiles
from hpcstrat.engine.hdf5_files import open_for_reading
from hpcstrat.engine.typing import Array

__all__ = ["Hdf5Source", "open_hdf5"]

# Number of bytes that one call of h5py reads from a dataset without chunks.
_BLOCK_BYTES = 1 << 20
_PLAIN_KINDS = "biufc"
_LEAVE_OUT = "choose other columns with columns="


def open_hdf5(path: str) -> Any:
    """Open a file for reading; raise ValueError if it cannot be opened."""
    with open(path, "rb") as file:
        magic = file.read(3)
    if magic == b"CDF":
        raise ValueError(
            f"expected HDF5 or NetCDF-4 in {path}, found NetCDF-3, which h5py cannot "
            "read; convert it: nccopy -k netCDF-4 OLD NEW"
        )
    try:
        return open_for_reading(path)
    except OSError as error:
        raise ValueError(
            f"expected an HDF5 file at {path}, found one that h5py cannot open: "
            f"{error}; check that it was written to its end"
        ) from error


class Hdf5Source:
    """A dataset that is to be a column, and the file that contains it.

    ``name`` and ``path`` are the column's name and the file in which the user looks for
    it, for error messages; a link may lead to another name in another file.

    Raises ValueError if the dataset cannot be read as rows.
    """

    def __init__(self, dataset: Any, name: str, path: str) -> None:
        import h5py

        self.where = f"{name} of {path}"
        if not isinstance(dataset, h5py.Dataset):
            raise ValueError(
                f"expected a dataset for the column {self.where}, found "
                f"{_target(dataset)}; restore it, or {_LEAVE_OUT}"
            )
        self.dataset = dataset
        self.dtype = self._checked_type()
        # An external link leads to another file.
        self.path, self.name = dataset.file.filename, dataset.name
        if os.path.samefile(self.path, path):
            self.path = path
        self.row_shape = (*dataset.shape[1:], *self.dtype.shape)
        self.is_text = self.dtype.kind == "O"

    def _checked_type(self) -> Any:
        import h5py

        try:
            dtype = self.dataset.dtype
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"expected numbers or text in the column {self.where}, found a type "
                f"without an equivalent in NumPy: {error}; {_LEAVE_OUT}"
            ) from error
        if dtype.hasobject and h5py.check_string_dtype(dtype) is None:
            if h5py.check_ref_dtype(dtype):
                found = "references to other objects"
            elif h5py.check_vlen_dtype(dtype):
                found = "lists of any length"
            else:
                found = f"{dtype}, with lists, text of any length, or references"
            raise ValueError(
                f"expected rows of one shape in the column {self.where}, found "
                f"{found}; write arrays of one length instead, or {_LEAVE_OUT}"
            )
        stored = self.dataset.id.get_type()
        if h5py.h5t.find(stored, h5py.h5t.py_create(dtype)) is None:
            raise ValueError(
                f"expected numbers or text in the column {self.where}, found a type "
                f"that HDF5 cannot convert to {dtype}; {_LEAVE_OUT}"
            )
        return dtype

    def _require_filters(self) -> None:
        """Require that HDF5, or the package hdf5plugin, can undo all filters."""
        import h5py

        for code, _, name in filters_of(self.dataset.id.get_create_plist()):
            if h5py.h5z.filter_avail(code):
                continue
            try:
                # The import registers the filters of this package in HDF5.
                import hdf5plugin  # noqa: F401
            except ImportError:
                found, advice = "is not installed", "pip install hdf5plugin"
            else:
                found = "the package hdf5plugin does not have"
                advice = "set HDF5_PLUGIN_PATH to the folder of its plugin"
            if not h5py.h5z.filter_avail(code):
                raise ValueError(
                    f"expected filters that can be undone in the column {self.where}, "
                    f"found filter {code} ({name}), which {found}; {advice}, or "
                    f"{_LEAVE_OUT}"
                )

    def files(self) -> list[str]:
        """Return the paths of all files that have values of the column."""
        return [self.path, *_sources(self.dataset, self.path, self.where)]

    def column(self, files: OpenFiles, cache: BlockCache) -> Column:
        return self._read_directly(files, cache) or self._through_h5py(files, cache)

    def _read_directly(self, files: OpenFiles, cache: BlockCache) -> Column | None:
        """Return a column that is read without h5py, or None."""
        from h5py import h5t

        dataset, dtype = self.dataset, self.dtype
        if dtype.kind not in _PLAIN_KINDS or dataset.is_virtual or dataset.external:
            return None
        # Both differ in integers with unused bits, for example, and bfloat16.
        if not dataset.id.get_type().equal(h5t.py_create(dtype, logical=True)):
            return None
        # Omit the names of an enumeration's values.
        dtype = np.dtype(dtype.str)
        offset = dataset.id.get_offset()
        # A dataset that was never written may have an offset, but no bytes in the file.
        if offset is not None and dataset.id.get_storage_size() >= dataset.nbytes > 0:
            return ContiguousColumn(
                files, self.path, offset=offset, shape=dataset.shape, dtype=dtype
            )
        properties = dataset.id.get_create_plist()
        filters = ChunkFilters.of(properties) if dataset.chunks else None
        num_rows = dataset.shape[0]
        if filters is None or not num_rows:
            return None
        chunks = _Chunks(dataset, self.path, files, cache, filters)
        return BlockColumn(
            cache,
            (self.path, self.name),
            np.arange(0, num_rows, dataset.chunks[0]),
            chunks.load,
            num_rows=num_rows,
            shape=self.row_shape,
            dtype=dtype,
            how=f"chunks of {dataset.chunks[0]} rows, {filters.how}",
            load_box=chunks.load,
            load_into=chunks.load_into,
        )

    def _through_h5py(self, files: OpenFiles, cache: BlockCache) -> Column:
        """Return a column that h5py reads, in blocks."""
        self._require_filters()
        num_rows, dtype = self.dataset.shape[0], self.dtype.base
        row_bytes = max(dtype.itemsize * int(np.prod(self.row_shape)), 1)
        chunks = self.dataset.chunks
        size = chunks[0] if chunks else max(_BLOCK_BYTES // row_bytes, 1)
        path, name, is_text = self.path, self.name, self.is_text

        def load(block: int, box: Box | None = None) -> Array:
            # The dataset must not keep the file open: there may be many files.
            dataset = files.get_hdf5(path).file[name]
            part, own = box.selections(chunks, dataset.ndim) if box else ((), ())
            rows = slice(block * size, min((block + 1) * size, num_rows)), *part
            found: Array = dataset.asstr()[rows] if is_text else dataset[rows]
            if dataset.is_virtual:
                # HDF5 reads fill values, without an error, if it cannot open a source
                # because all descriptors are in use. Then this raises an OSError.
                os.close(os.open(path, os.O_RDONLY))
            found = np.asarray(found)
            return np.ascontiguousarray(found[(slice(None), *own)])

        return BlockColumn(
            cache,
            (path, name),
            np.arange(0, max(num_rows, 1), size),
            load,
            num_rows=num_rows,
            shape=self.row_shape,
            dtype=np.dtype(object) if is_text else dtype,
            how=f"through h5py, {size} rows at once",
            load_box=load,
        )


def _target(link: Any) -> str:
    """Describe a link that h5py cannot follow."""
    if not hasattr(link, "path"):
        return "an object that HDF5 cannot open"
    inside = f" in {link.filename}" if hasattr(link, "filename") else ""
    return f"a link to {link.path}{inside}, which does not exist"


def _sources(dataset: Any, path: str, where: str) -> Iterator[str]:
    """Yield the other files that have values of a dataset, and their own such files.

    Raises ValueError if one does not exist, or ends before the dataset's last value,
    because HDF5 would read fill values or zeros instead.
    """
    left = dataset.size * dataset.id.get_type().get_size()
    for name, offset, size in dataset.external or ():
        used = min(size, left)
        left -= used
        if not os.path.exists(name) or os.path.getsize(name) < offset + used:
            raise ValueError(_without_source(where, name))
        yield name
    if dataset.is_virtual:
        found: dict[str, str] = {}
        for source in dataset.virtual_sources():
            if source.file_name != "." and "%b" not in source.dset_name:
                found.setdefault(source.file_name, source.dset_name)
        for name, inside in found.items():
            own = _virtual_paths(name, path)
            # The name may stand for any number of files, which need not exist.
            if not own and "%b" not in name:
                raise ValueError(_without_source(where, name))
            for file in own:
                yield file
                yield from _nested_sources(file, inside, where)


def _without_source(where: str, name: str) -> str:
    return (
        f"expected all values of the column {where}, found that some belong to {name}, "
        "which does not exist or does not have them; restore the file, or "
        f"{_LEAVE_OUT}"
    )


def _virtual_paths(name: str, path: str) -> list[str]:
    """Return the files that HDF5 opens for a virtual dataset's source."""
    prefix = os.environ.get("HDF5_VDS_PREFIX", "").replace(
        "${ORIGIN}", os.path.dirname(os.path.abspath(path))
    )
    folder = os.path.dirname(path)
    for candidate in (
        os.path.join(prefix, name),
        os.path.join(folder, name),
        name,
        os.path.join(folder, os.path.basename(name)),
    ):
        if "%b" in name:
            found = sorted(glob.glob(glob.escape(candidate).replace("%b", "*")))
        else:
            found = [candidate] if os.path.exists(candidate) else []
        if found:
            return found
    return []


def _nested_sources(file: str, inside: str, where: str) -> Iterator[str]:
    with open_hdf5(file) as opened:
        source = opened.get(inside)
        if not hasattr(source, "is_virtual"):
            raise ValueError(_without_source(where, f"{inside} in {file}"))
        yield from _sources(source, file, where)


_Place = tuple[tuple[int, ...], int, int, int]
"""A chunk's offset in each dimension of a row, its offset in the file, its size, and
the mask of the filters that were not applied to it."""


class _Chunks:
    """The chunks of a dataset: their offsets in the file, and their unpacking."""

    def __init__(
        self,
        dataset: Any,
        path: str,
        files: OpenFiles,
        cache: BlockCache,
        filters: ChunkFilters,
    ) -> None:
        import h5py

        self._path, self._files, self._filters = path, files, filters
        self._cache = cache
        self._chunk = dataset.chunks
        self._has_whole_rows = dataset.chunks[1:] == dataset.shape[1:]
        self._shape, self._dtype = dataset.shape, dataset.dtype
        properties = dataset.id.get_create_plist()
        is_filled = properties.get_fill_time() != h5py.h5d.FILL_TIME_NEVER
        self._fill = dataset.fillvalue if is_filled else 0
        self._name = dataset.name
        self._places: dict[int, list[_Place]] = {}
        dataset.id.chunk_iter(self._note)

    def _note(self, found: Any) -> None:
        block = found.chunk_offset[0] // self._chunk[0]
        inside = found.chunk_offset[1:]
        place = inside, found.byte_offset, found.size, found.filter_mask
        self._places.setdefault(block, []).append(place)

    def load(self, block: int, box: Box | None = None) -> Array:
        size = self._chunk[0]
        num_rows = min(size, self._shape[0] - block * size)
        overlaps = self._overlaps(block, box)
        file = self._files.get(self._path)
        if len(overlaps) == 1 and box is None and self._has_whole_rows:
            return self._chunk_at(file.number, overlaps[0][0])[:num_rows]
        row_shape = self._shape[1:] if box is None else box.shape
        rows = np.full((num_rows, *row_shape), self._fill, self._dtype)
        for place, inside, kept in overlaps:
            if box is not None and not self._filters.filters:
                part = self._part_of_chunk(place, num_rows, kept)
            else:
                chunk = self._chunk_at(file.number, place)
                part = chunk[(slice(0, num_rows), *kept)]
            rows[(slice(None), *inside)] = part
        return rows

    def _overlaps(
        self, block: int, box: Box | None
    ) -> list[tuple[_Place, list[slice], list[slice]]]:
        """Return a block's chunks that have values of a box; None: of whole rows.

        With each chunk come the slices of these values in the box and in the chunk. A
        chunk at the dataset's edge is padded: its padding is outside of the slices.
        """
        places = self._places.get(block, [])
        if box is None and self._has_whole_rows:
            return [(place, [], []) for place in places]
        ranges = [WHOLE] * len(self._shape[1:]) if box is None else box.ranges
        found = []
        for place in places:
            inside, kept = [], []
            for begin, size, length, (first, last) in zip(
                place[0], self._chunk[1:], self._shape[1:], ranges, strict=True
            ):
                start = max(begin, first)
                stop = min(begin + size, length if last is None else last)
                inside.append(slice(start - first, stop - first))
                kept.append(slice(start - begin, stop - begin))
            if all(part.start < part.stop for part in kept):
                found.append((place, inside, kept))
        return found

    def _part_of_chunk(self, place: _Place, num_rows: int, kept: list[slice]) -> Array:
        """Return a part of each row of a chunk that is not compressed.

        A range of the first dimension is contiguous in each row of the chunk.
        """
        ranges = tuple(
            WHOLE if part == slice(0, size) else (part.start, part.stop)
            for part, size in zip(kept, self._chunk[1:], strict=True)
        )
        column = ContiguousColumn(
            self._files,
            self._path,
            offset=place[1],
            shape=self._chunk,
            dtype=self._dtype,
        ).boxed(Box(self._name, self._chunk[1:], ranges))
        rows = np.empty((num_rows, *column.shape), column.dtype)
        column.read(np.arange(num_rows), rows)
        return rows

    def load_into(self, block: int, box: Box | None, out: Array) -> int:
        """Unpack whole blocks of one chunk each into ``out``; return how many rows."""
        size, file, done = self._chunk[0], self._files.get(self._path), 0
        fits = out.shape[1:] == self._chunk[1:] and self._dtype.isnative
        while fits and done + size <= len(out):
            overlaps = self._overlaps(block, box)
            if len(overlaps) != 1:
                break
            self._unpack_at(file.number, overlaps[0][0], out[done : done + size])
            block, done = block + 1, done + size
        return done

    def _chunk_at(self, fd: int, place: _Place) -> Array:
        chunk = self._cache.empty(self._chunk, self._dtype)
        self._unpack_at(fd, place, chunk)
        return chunk

    def _unpack_at(self, fd: int, place: _Place, chunk: Array) -> None:
        _, offset, size, mask = place
        packed = os.pread(fd, size, offset)
        if len(packed) < size:
            raise ValueError(
                f"expected a chunk of {size} bytes at {offset} of {self._path}, found "
                f"that the file ends after {len(packed)}; write it again"
            )
        try:
            self._filters.undo(packed, chunk.reshape(-1).view(np.uint8), mask)
        # Each library raises its own types of errors.
        except Exception as error:
            raise ValueError(
                f"expected a chunk that can be unpacked at {offset} of {self._path} "
                f"({self._name}), found damaged bytes: {error}; check it: h5dump -d "
                f"{self._name} {self._path}"
            ) from error
