"""The index of a checkpoint file: all variables and their places, as one text.

HDF5 gives a variable's type, shape, place and attributes by about 45 calls, which for
20,000 variables take longer than to read their values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from hpcstrat.checkpoint.disk import PAGE_BYTES
from hpcstrat.checkpoint.file.extents import Extent
from hpcstrat.checkpoint.file.schema import Entry
from hpcstrat.checkpoint.file.structure import stored_dtype

__all__ = ["MOST_INDEX_BYTES", "from_index", "index_bytes", "to_index"]

MOST_INDEX_BYTES = 64 << 20
"""A file of so many variables that its index is longer has none."""

# Digits of the largest offset in an HDF5 file.
_MOST_DIGITS = 19


def index_bytes(entries: Mapping[str, Entry]) -> int:
    """Return the length of an index, before offsets are known: whole pages.

    0 where the index would be too long.
    """
    text = to_index(entries, {})
    nbytes = len(text) + _MOST_DIGITS * len(entries)
    nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    return nbytes if nbytes <= MOST_INDEX_BYTES else 0


def to_index(entries: Mapping[str, Entry], extents: Mapping[str, Extent]) -> bytes:
    """Return the index of entries, given the places of those that have values.

    A list in JSON for each entry: path, shape, NumPy's name of the type,
    synchronization, aggregation, trainable as 0 or 1, what the first axis counts
    (``replica``, ``group``, or nothing), offset in the file and number of bytes.
    """
    nowhere = Extent("", 0, 0)
    rows = []
    # In the order in which HDF5 lists them, as of files without an index.
    for path in sorted(entries, key=lambda path: path.encode().split(b"/")):
        entry = entries[path]
        place = extents.get(path, nowhere)
        axis = "replica" if entry.per_replica else "group" if entry.per_group else ""
        row: list[Any] = [path, entry.shape, entry.dtype, entry.synchronization]
        row += [entry.aggregation, int(entry.trainable), axis]
        rows.append([*row, place.offset, place.nbytes])
    return json.dumps(rows, separators=(",", ":")).encode()


def from_index(
    text: bytes, start: int, stop: int
) -> tuple[dict[str, Entry], dict[str, Extent]]:
    """Return entries and places of values from an index, both by path.

    Values without bytes have a place of length 0. Raises ValueError or TypeError where
    something cannot be, such as a place that is not between ``start`` and ``stop``.
    """
    entries, extents = {}, {}
    for row in json.loads(text):
        path, shape, dtype, synchronization, aggregation, trainable, axis, *place = row
        texts = path, dtype, synchronization, aggregation, axis
        offset, nbytes = place
        numbers = *shape, trainable, offset, nbytes
        if {*map(type, texts)} != {str} or {*map(type, numbers)} != {int}:
            raise ValueError(f"its index has a row {row}")
        count = math.prod(shape)
        stored = stored_dtype(dtype, nbytes // max(count, 1))
        known = stored is not None and nbytes == count * stored.itemsize
        if not known or min(numbers) < 0 or axis not in ("", "replica", "group"):
            raise ValueError(f"{path} is not {nbytes} bytes of {dtype} {shape}")
        if nbytes and not start <= offset <= stop - nbytes:
            raise ValueError(f"{path} has {nbytes:,} bytes, which are not in the file")
        entries[path] = Entry(
            *(path, tuple(shape), dtype, synchronization, aggregation, bool(trainable)),
            *(axis == "replica", axis == "group"),
        )
        extents[path] = Extent(path, offset, nbytes)
    return entries, extents
