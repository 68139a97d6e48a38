"""Columns of files, whose rows are read with few and large system calls.

If an array is contiguous in the file, one call of ``preadv`` reads a run of adjacent
rows. Other arrays are read in blocks, such as the chunks of a compressed dataset; a
cache keeps blocks for the next batches.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

from hpcstrat.data.boxes import WHOLE, Box
from hpcstrat.data.files.open_files import OpenFiles
from hpcstrat.data.sources import runs_of
from hpcstrat.engine.arrays.recycling import is_unused
from hpcstrat.engine.native import load_reader
from hpcstrat.engine.typing import Array

__all__ = [
    "BlockCache",
    "BlockColumn",
    "BoxedColumn",
    "Column",
    "ContiguousColumn",
    "DecodedColumn",
    "PaddedColumn",
]

# If reading takes longer than this per row, apart from the copying, the file is not in
# the page cache. In the next batch, the kernel is notified of all rows before the first
# row is read, so that it fetches the rows at the same time.
_COLD_SECONDS = 2e-6
_BYTES_PER_SECOND = 2e9
# Maximum number of buffers in one call of ``preadv`` on Linux.
_MOST_VECTORS = 1024
# Maximum number of bytes between two rows that the compiled reader reads in one call.
_MOST_GAP = 4096
# Number of dropped blocks whose memory is kept for new ones: more than threads read.
_MOST_DROPPED = 8
# Number of bytes of whole rows that are read at once, if only parts of them are kept.
_WHOLE_BYTES = 8 << 20

_READER = load_reader()


class Column(Protocol):
    """Rows of one array of a file; ``how`` says in words how the rows are read."""

    how: str
    num_rows: int
    shape: tuple[int, ...]
    dtype: Any

    def read(self, rows: Array, out: Array, places: Array | None = None) -> None:
        """Read ascending rows into ``out``, in order or at the indices ``places``."""
        ...

    def boxed(self, box: Box) -> Column:
        """Return a column of a part of each row, which reads other parts if faster."""
        ...


class ContiguousColumn:
    """The rows of an array that is contiguous in a file."""

    how = "contiguous, read by preadv"

    def __init__(
        self,
        files: OpenFiles,
        path: str,
        *,
        offset: int,
        shape: tuple[int, ...],
        dtype: Any,
    ) -> None:
        self._files = files
        self._path = path
        self._offset = offset
        self.num_rows, self.shape = shape[0], shape[1:]
        self._stored = np.dtype(dtype)
        self.dtype = self._stored.newbyteorder("=")
        count = int(np.prod(self.shape, dtype=np.int64))
        self._row_bytes = self._stored.itemsize * count
        # Bytes from a row's begin to the next row's begin, and bytes between two rows
        # that may be read, too, to save a call.
        self._stride, self._most_gap = self._row_bytes, _MOST_GAP
        self._is_cold = False

    def read(self, rows: Array, out: Array, places: Array | None = None) -> None:
        if not len(rows) or not self._row_bytes:
            return
        file = self._files.get(self._path)
        flat: Any = out.reshape(len(out), -1).view(np.uint8)
        offsets = rows * self._stride + self._offset
        began = time.perf_counter()
        read = _read_rows if _READER is None else _READER.read_rows
        done = read(
            file.number,
            offsets,
            self._row_bytes,
            flat,
            places,
            self._is_cold,
            self._most_gap,
        )
        waited = time.perf_counter() - began - flat.nbytes / _BYTES_PER_SECOND
        self._is_cold = waited > _COLD_SECONDS * len(rows)
        if done < len(rows):
            raise ValueError(
                f"expected row {rows[done]} at {offsets[done]} of {self._path}, found "
                "that the file ends before it; write it again, and make the data set "
                "again"
            )
        if self._stored != self.dtype:
            # Convert by values, because fields may differ in their byte order.
            where = slice(None) if places is None else places
            out[where] = out[where].view(self._stored)

    def boxed(self, box: Box) -> Column:
        """Return a column that reads only a range of each row's first dimension.

        This range is contiguous in the file. Ranges of later dimensions would take
        many small reads, which are slower than reading whole rows.
        """
        (start, stop), *later = box.ranges
        made = self
        if stop is not None:
            made = copy.copy(self)
            made.shape = stop - start, *self.shape[1:]
            inner = self._row_bytes // max(self.shape[0], 1)
            made._offset = self._offset + start * inner
            made._row_bytes = (stop - start) * inner
            # A rank then reads at most 1.1 times the bytes of its part.
            made._most_gap = min(_MOST_GAP, made._row_bytes // 10)
        if all(each == WHOLE for each in later):
            return made
        return BoxedColumn(made, Box(box.name, made.shape, (WHOLE, *later)))


def _read_rows(  # noqa: PLR0917 - arguments of the compiled one
    fd: int,
    offsets: Array,
    row_bytes: int,
    out: Any,
    places: Any,
    announces: bool,
    _most_gap: int = 0,
) -> int:
    """Do the same as ``read_rows`` in reader.c: return the number of rows read.

    ``announces`` notifies the kernel of all rows before the first one is read. Bytes
    between rows are never read.
    """
    numbers = range(len(offsets)) if places is None else places.tolist()
    lines = [memoryview(out[number]) for number in numbers]
    runs = list(runs_of(offsets, row_bytes))
    for start, end in runs if announces else ():
        place, size = int(offsets[start]), (end - start) * row_bytes
        os.posix_fadvise(fd, place, size, os.POSIX_FADV_WILLNEED)
    for start, end in runs:
        for first in range(start, end, _MOST_VECTORS):
            last = min(first + _MOST_VECTORS, end)
            done = os.preadv(fd, lines[first:last], int(offsets[first]))
            if done != (last - first) * row_bytes:
                # Linux read fewer bytes than requested: read the other rows singly.
                for number in range(first + done // row_bytes, last):
                    if not _read_row(fd, lines[number], int(offsets[number])):
                        return number
    return len(offsets)


def _read_row(fd: int, line: memoryview, place: int) -> bool:
    while line:
        done = os.preadv(fd, [line], place)
        if not done:
            return False
        line, place = line[done:], place + done
    return True


class BlockCache:
    """The most recently used blocks of a data set's files, up to a number of bytes.

    If several threads request a block, one loads it, and the others wait for it.
    """

    def __init__(self, most_bytes: int = 64 << 20) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Any, Array] = OrderedDict()
        # Reuse memory: page faults of new memory cost as much as the unpacking.
        self._dropped: list[Array] = []
        self._bytes = 0
        self._lock = threading.Lock()
        self._loading: dict[Any, threading.Lock] = {}

    def get(self, key: Any, load: Callable[[], Array]) -> Array:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
            loading = self._loading.setdefault(key, threading.Lock())
        with loading:
            with self._lock:
                found = self._kept.get(key)
            if found is None:
                try:
                    found = load()
                except BaseException:
                    with self._lock:
                        self._loading.pop(key, None)
                    raise
                self._keep(key, found)
        return found

    def holds(self, key: Any) -> bool:
        """Return whether a block is in the cache, or is being loaded."""
        with self._lock:
            return key in self._kept or key in self._loading

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an uninitialized array for a block; reuse a dropped block's memory."""
        size = math.prod(shape) * dtype.itemsize
        with self._lock:
            for index in range(len(self._dropped)):
                is_fit = self._dropped[index].nbytes == size
                if is_fit and is_unused(self._dropped, index):
                    memory = self._dropped.pop(index)
                    break
            else:
                memory = np.empty(size, np.uint8)
        block: Array = memory.view(dtype).reshape(shape)
        return block

    def clear(self) -> None:
        """Drop all blocks."""
        with self._lock:
            self._kept.clear()
            self._bytes = 0

    def _keep(self, key: Any, block: Array) -> None:
        with self._lock:
            self._kept[key] = block
            self._bytes += block.nbytes
            self._loading.pop(key, None)
            while self._bytes > self._most_bytes and len(self._kept) > 1:
                _, dropped = self._kept.popitem(last=False)
                self._bytes -= dropped.nbytes
                # Do not reuse the memory of libraries, such as Arrow's.
                if getattr(dropped.base, "dtype", None) == np.uint8:
                    self._dropped = [*self._dropped[-_MOST_DROPPED:], dropped]


class BlockColumn:
    """Rows that are read in blocks: chunks, row groups, or runs that h5py reads.

    Block i begins at row ``starts[i]``, and ``load(i)`` returns its rows. Both other
    functions have an argument ``box``, which is None for whole rows:
    ``load_box(i, box)`` returns a part of each row of block i, and reads no more than
    it must; by default, whole rows are loaded and cut. ``load_into(i, box, out)`` reads
    block i and those after it directly into ``out``, as many as it can and ``out`` has
    room for, and returns their number of rows.
    """

    def __init__(
        self,
        cache: BlockCache,
        key: Any,
        starts: Array,
        load: Callable[[int], Array],
        *,
        num_rows: int,
        shape: tuple[int, ...],
        dtype: Any,
        how: str,
        load_box: Callable[[int, Box], Array] | None = None,
        load_into: Callable[[int, Box | None, Array], int] | None = None,
    ) -> None:
        self.how = how
        self._cache = cache
        self._key = key
        self._starts = starts
        self._load_into = load_into
        self._load_box = load_box or (lambda block, box: box.of(load(block), 1).copy())
        self._load = load
        self._box: Box | None = None
        self.num_rows, self.shape = num_rows, shape
        self.dtype = np.dtype(dtype).newbyteorder("=")

    def read(self, rows: Array, out: Array, places: Array | None = None) -> None:
        blocks = np.searchsorted(self._starts, rows, side="right") - 1
        inside = rows - self._starts[blocks]
        borders = [
            0,
            *(np.flatnonzero(blocks[1:] != blocks[:-1]) + 1).tolist(),
            len(rows),
        ]
        done = 0
        for start, end in itertools.pairwise(borders if len(rows) else []):
            if start < done:
                continue
            block, first, last = int(blocks[start]), inside[start], inside[end - 1]
            is_run = last - first == end - start - 1
            if is_run and places is None:
                stop = end if rows[-1] - rows[start] >= len(rows) - start else len(rows)
                done = start + self._read_whole(block, out[start:stop])
                if start < done:
                    continue
            values = self._cache.get(
                (self._key, self._box, block), partial(self._loaded, block)
            )
            found = values[first : last + 1] if is_run else values[inside[start:end]]
            out[slice(start, end) if places is None else places[start:end]] = found

    def _loaded(self, block: int) -> Array:
        box = self._box
        return self._load(block) if box is None else self._load_box(block, box)

    def _read_whole(self, block: int, out: Array) -> int:
        """Read whole blocks into ``out``, unless the first one is cached.

        Returns the number of rows that were read.
        """
        load = self._load_into
        if load is None or self._cache.holds((self._key, self._box, block)):
            return 0
        return load(block, self._box, out)

    def boxed(self, box: Box) -> BlockColumn:
        made = copy.copy(self)
        made.shape = box.shape
        made._box = box.within(self._box)
        return made


class BoxedColumn:
    """A part of each row of a column whose rows are read whole."""

    def __init__(self, column: Column, box: Box) -> None:
        self._column = column
        self._box = box
        self.how = column.how
        self.num_rows, self.shape, self.dtype = column.num_rows, box.shape, column.dtype

    def read(self, rows: Array, out: Array, places: Array | None = None) -> None:
        shape, dtype = self._column.shape, self.dtype
        row_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        count = max(_WHOLE_BYTES // max(row_bytes, 1), 1)
        for start in range(0, len(rows), count):
            some = rows[start : start + count]
            whole = np.empty((len(some), *shape), dtype)
            self._column.read(some, whole)
            end = start + len(some)
            where = slice(start, end) if places is None else places[start:end]
            out[where] = self._box.of(whole, 1)

    def boxed(self, box: Box) -> BoxedColumn:
        return BoxedColumn(self._column, box.within(self._box))


class PaddedColumn:
    """A column that is extended to ``num_rows`` rows by rows of a fill value."""

    def __init__(self, column: Column, num_rows: int, value: Any) -> None:
        self._column = column
        self.value = value
        self.how = column.how
        self.num_rows = num_rows
        self.shape, self.dtype = column.shape, column.dtype

    def read(self, rows: Array, out: Array, places: Array | None = None) -> None:
        count = int(np.searchsorted(rows, self._column.num_rows))
        if places is None:
            self._column.read(rows[:count], out[:count])
            out[count:] = self.value
        else:
            self._column.read(rows[:count], out, places[:count])
            out[places[count:]] = self.value

    def boxed(self, box: Box) -> PaddedColumn:
        return PaddedColumn(self._column.boxed(box), self.num_rows, self.value)


class DecodedColumn:
    """A column whose stored values the function ``decode(stored, out)`` decodes."""

    def __init__(
        self, column: Column, dtype: Any, decode: Callable[[Array, Array], None]
    ) -> None:
        self._column = column
        self._decode = decode
        self.how = column.how
        self.num_rows, self.shape = column.num_rows, column.shape
        self.dtype = np.dtype(dtype)

    def read(self, rows: Array, out: Array, places: Array | None = None) -> None:
        stored = np.empty((len(rows), *self.shape), self._column.dtype)
        self._column.read(rows, stored)
        if places is None:
            self._decode(stored, out)
        else:
            found = np.empty(stored.shape, self.dtype)
            self._decode(stored, found)
            out[places] = found

    def boxed(self, box: Box) -> DecodedColumn:
        return DecodedColumn(self._column.boxed(box), self.dtype, self._decode)
