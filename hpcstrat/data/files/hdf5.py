"""Columns of HDF5 files: the offsets of their bytes, and the unpacking of chunks.

h5py holds a lock while it reads, so that only one thread reads at a time. Therefore
this module itself reads contiguous datasets, and chunks that are compressed by gzip
(with or without HDF5's shuffle filter) or not at all. h5py reads all other datasets.
"""

from __future__ import annotations

import importlib.util
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hpcstrat.data.files.columns import (
    Column,
    ContiguousColumn,
    OpenFiles,
    SlabCache,
    SlabColumn,
)
from hpcstrat.engine.hdf5_files import open_for_reading
from hpcstrat.engine.native import load_reader
from hpcstrat.engine.typing import Array

__all__ = ["datasets_of", "hdf5_column", "open_hdf5"]

_READER = load_reader()
# Number of bytes that one call of h5py reads from a dataset without chunks.
_SLAB_BYTES = 1 << 20
_PLAIN_KINDS = "biufc"


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


def datasets_of(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and dataset of each dataset in a group and its subgroups."""
    for name, item in group.items():
        if hasattr(item, "visititems"):
            yield from datasets_of(item, f"{prefix}{name}/")
        # Leave out scalars: they describe the file, and are not columns of examples.
        elif hasattr(item, "ndim") and item.ndim:
            yield prefix + name, item


def hdf5_column(dataset: Any, path: str, files: OpenFiles, cache: SlabCache) -> Column:
    shape, num_rows = dataset.shape[1:], dataset.shape[0]
    dtype = dataset.dtype
    properties = dataset.id.get_create_plist()
    is_plain = dtype.kind in _PLAIN_KINDS and not dtype.metadata
    if not is_plain or dataset.is_virtual or dataset.external:
        return _through_h5py(dataset, path, files, cache)
    offset = dataset.id.get_offset()
    # A dataset that was never written may have an offset, but no bytes in the file.
    if offset is not None and dataset.id.get_storage_size() >= dataset.nbytes > 0:
        return ContiguousColumn(
            files, path, offset=offset, shape=dataset.shape, dtype=dtype
        )
    unpack = _unpacking(properties, dtype) if dataset.chunks else None
    if unpack is None or not num_rows:
        return _through_h5py(dataset, path, files, cache)
    chunks = _Chunks(dataset, path, files, cache, unpack)
    if not chunks.are_plain:
        return _through_h5py(dataset, path, files, cache)
    return SlabColumn(
        cache,
        (path, dataset.name),
        np.arange(0, num_rows, dataset.chunks[0]),
        chunks.load,
        num_rows=num_rows,
        shape=shape,
        dtype=dtype,
        how=f"chunks of {dataset.chunks[0]} rows, {_unpacked_by(dataset)}",
        load_into=chunks.load_into,
    )


def _through_h5py(
    dataset: Any, path: str, files: OpenFiles, cache: SlabCache
) -> Column:
    """Return a column of a dataset that h5py reads, in slabs."""
    num_rows, shape, dtype = dataset.shape[0], dataset.shape[1:], dataset.dtype
    is_text = dtype.kind == "O" or (dtype.metadata and "vlen" in dtype.metadata)
    row_bytes = max(dataset.dtype.itemsize * int(np.prod(shape, dtype=np.int64)), 1)
    size = dataset.chunks[0] if dataset.chunks else max(_SLAB_BYTES // row_bytes, 1)
    known = files.size(path)

    def load(slab: int) -> Array:
        # h5py would return zeros for rows beyond the end of a shortened file.
        if os.stat(path).st_size < known:
            raise ValueError(
                f"expected {known} bytes in {path}, found that it was shortened; make "
                "the data set again"
            )
        rows = slice(slab * size, min((slab + 1) * size, num_rows))
        found: Array = dataset.asstr()[rows] if is_text else dataset[rows]
        return np.asarray(found)

    return SlabColumn(
        cache,
        (path, dataset.name),
        np.arange(0, max(num_rows, 1), size),
        load,
        num_rows=num_rows,
        shape=shape,
        dtype=np.dtype(object) if is_text else dtype,
        how=f"through h5py, {size} rows at once",
    )


def _unpacking(properties: Any, dtype: Any) -> Callable[[bytes, Array], None] | None:
    """Return the function that unpacks a chunk; None if only h5py can unpack it."""
    import h5py

    filters = [properties.get_filter(i)[0] for i in range(properties.get_nfilters())]
    deflate, shuffle = h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_SHUFFLE
    if filters == []:
        return _copy
    if filters == [deflate]:
        return _inflate
    if filters == [shuffle, deflate]:
        size = dtype.itemsize
        return lambda packed, out: _inflate_shuffled(packed, out, size)
    return None


def _unpacked_by(dataset: Any) -> str:
    if dataset.compression is None:
        return "not compressed"
    has_libdeflate = importlib.util.find_spec("deflate") is not None
    library = "libdeflate" if has_libdeflate else "zlib"
    return f"unpacked by {library}"


def _copy(packed: bytes, out: Array) -> None:
    out[:] = np.frombuffer(packed, np.uint8)


def _decompressed(packed: bytes, size: int) -> Any:
    """Decompress data in zlib's format, with libdeflate if it is installed."""
    try:
        import deflate
    except ImportError:
        return zlib.decompress(packed, bufsize=size)
    return deflate.zlib_decompress(packed, size)


def _inflate(packed: bytes, out: Array) -> None:
    out[:] = np.frombuffer(_decompressed(packed, out.size), np.uint8)


def _inflate_shuffled(packed: bytes, out: Array, size: int) -> None:
    """Decompress a chunk, and undo HDF5's shuffle filter on its bytes."""
    decompressed = _decompressed(packed, out.size)
    if _READER is not None:
        _READER.unshuffle(decompressed, out, size)
        return
    planes = np.frombuffer(decompressed, np.uint8).reshape(size, -1)
    numbers = out.reshape(-1, size)
    for index in range(size):
        numbers[:, index] = planes[index]


class _Chunks:
    """The chunks of a dataset: their offsets in the file, and their unpacking."""

    def __init__(
        self,
        dataset: Any,
        path: str,
        files: OpenFiles,
        cache: SlabCache,
        unpack: Callable[[bytes, Array], None],
    ) -> None:
        self._path, self._files, self._unpack = path, files, unpack
        self._cache = cache
        self._chunk = dataset.chunks
        self._shape, self._dtype = dataset.shape, dataset.dtype
        self._fill = dataset.fillvalue
        self._name = dataset.name
        self.are_plain = True
        self._places: dict[int, list[tuple[tuple[int, ...], int, int]]] = {}
        dataset.id.chunk_iter(self._note)

    def _note(self, found: Any) -> None:
        # A chunk whose mask is not 0 lacks some filters: let h5py read the dataset.
        self.are_plain = self.are_plain and not found.filter_mask
        slab = found.chunk_offset[0] // self._chunk[0]
        place = found.chunk_offset[1:], found.byte_offset, found.size
        self._places.setdefault(slab, []).append(place)

    def load(self, slab: int) -> Array:
        size = self._chunk[0]
        num_rows = min(size, self._shape[0] - slab * size)
        places = self._places.get(slab, [])
        file = self._files.get(self._path)
        if len(places) == 1 and self._chunk[1:] == self._shape[1:]:
            return self._chunk_at(file.number, places[0])[:num_rows]
        rows = np.full((num_rows, *self._shape[1:]), self._fill, self._dtype)
        for place in places:
            chunk = self._chunk_at(file.number, place)
            # A chunk at the dataset's edge is padded: keep the part in the dataset.
            inside = [
                slice(start, min(start + length, end))
                for start, length, end in zip(
                    place[0], self._chunk[1:], self._shape[1:], strict=True
                )
            ]
            kept = [slice(0, part.stop - part.start) for part in inside]
            rows[(slice(None), *inside)] = chunk[(slice(0, num_rows), *kept)]
        return rows

    def load_into(self, slab: int, out: Array) -> bool:
        """Unpack a slab of one chunk into ``out``; return False for other slabs."""
        places = self._places.get(slab, [])
        if len(places) != 1 or out.shape != self._chunk or out.dtype != self._dtype:
            return False
        self._unpack_at(self._files.get(self._path).number, places[0], out)
        return True

    def _chunk_at(self, fd: int, place: tuple[tuple[int, ...], int, int]) -> Array:
        chunk = self._cache.empty(self._chunk, self._dtype)
        self._unpack_at(fd, place, chunk)
        return chunk

    def _unpack_at(
        self, fd: int, place: tuple[tuple[int, ...], int, int], chunk: Array
    ) -> None:
        _, offset, size = place
        packed = os.pread(fd, size, offset)
        if len(packed) < size:
            raise ValueError(
                f"expected a chunk of {size} bytes at {offset} of {self._path}, found "
                f"{len(packed)}: the file was shortened; make the data set again"
            )
        try:
            self._unpack(packed, chunk.reshape(-1).view(np.uint8))
        # Each library raises its own types of errors.
        except Exception as error:
            raise ValueError(
                f"expected a chunk that can be unpacked at {offset} of {self._path} "
                f"({self._name}), found damaged bytes: {error}; check it: h5dump -d "
                f"{self._name} {self._path}"
            ) from error
