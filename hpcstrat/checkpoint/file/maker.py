"""HDF5 files whose structures lie in front and whose values are written by others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5o, h5p, h5s, h5t

from hpcstrat.checkpoint.disk import PAGE_BYTES

__all__ = ["Maker"]


class Maker:
    """Makes datasets and attributes by HDF5's own functions; h5py's are slower.

    The file is made anew. ``room`` is how many bytes in front HDF5's structures may
    take; a multiple of a page.
    """

    def __init__(self, path: str, room: int) -> None:
        access = h5p.create(h5p.FILE_ACCESS)
        # Whichever HDF5 writes it, all since 1.10 can read it.
        access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
        # Structures in front, large values on pages.
        access.set_meta_block_size(room)
        access.set_alignment(PAGE_BYTES, PAGE_BYTES)
        access.set_fclose_degree(h5f.CLOSE_STRONG)
        self._file = h5f.create(os.fsencode(path), h5f.ACC_TRUNC, fapl=access)
        self._made = h5p.create(h5p.DATASET_CREATE)
        # Placed at once, written never, and without times.
        self._made.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._made.set_fill_time(h5d.FILL_TIME_NEVER)
        self._made.set_obj_track_times(False)
        self._link = h5p.create(h5p.LINK_CREATE)
        self._link.set_create_intermediate_group(True)
        self._link.set_char_encoding(h5t.CSET_UTF8)
        self._scalar = h5s.create(h5s.SCALAR)
        # To make one takes as long as to write an attribute.
        self._types: dict[tuple[np.dtype[Any], bool], Any] = {}

    def dataset(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        attributes: Mapping[str, Any],
    ) -> int | None:
        """Make a dataset, and the groups that it is in; return where its values go.

        None if it has none.
        """
        space = h5s.create_simple(shape) if shape else self._scalar
        kind = self._type(dtype, logical=True)
        made = h5d.create(
            self._file, path.encode(), kind, space, dcpl=self._made, lcpl=self._link
        )
        self._add(made, attributes)
        offset: int | None = made.get_offset()
        return offset

    def group(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Make a group, and those that it is in, if it is not there."""
        name = path.encode()
        if name in self._file:
            made = h5g.open(self._file, name)
        else:
            made = h5g.create(self._file, name, lcpl=self._link)
        self._add(made, attributes)

    def attributes(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Give an object that was made here attributes; the root has no path."""
        self._add(h5o.open(self._file, path.encode() or b"."), attributes)

    def _add(self, item: Any, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            text = isinstance(value, str)
            # Text of fixed length: HDF5 keeps other text in a heap, between the data.
            data = np.array(value.encode("ascii", "replace") or b" " if text else value)
            kind = self._type(data.dtype, logical=False)
            h5a.create(item, name.encode(), kind, self._scalar).write(data, kind)

    def _type(self, dtype: np.dtype[Any], *, logical: bool) -> Any:
        key = dtype, logical
        if key not in self._types:
            self._types[key] = h5t.py_create(dtype, logical=logical)
        return self._types[key]

    def close(self) -> None:
        """Write what HDF5 still holds, and close the file."""
        self._file.close()
