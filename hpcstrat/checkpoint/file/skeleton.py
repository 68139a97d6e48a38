"""Skeleton of a checkpoint: its HDF5 structures, made once and used for many saves.

HDF5 chooses the offsets of datasets; saves write values to these offsets without HDF5.
Each save also writes a copy of the structures (the prefix), with a few changed numbers.
"""

from __future__ import annotations

import errno
import math
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import h5py
import numpy as np
from h5py import h5a, h5d, h5f, h5g, h5o, h5p, h5s, h5t

from hpcstrat._version import __version__
from hpcstrat.checkpoint.file.commit_record import ALGORITHM
from hpcstrat.checkpoint.file.division import (
    Box,
    Division,
    of_regions,
    of_rows,
)
from hpcstrat.checkpoint.file.extents import (
    RECORD_BYTES,
    Extent,
    FileLayout,
    choose_block_bytes,
)
from hpcstrat.checkpoint.file.image import as_bytes
from hpcstrat.checkpoint.file.plain_state import MOST_STATE_BYTES, is_typed
from hpcstrat.checkpoint.file.schema import (
    COMMIT,
    FORMAT,
    INDEX,
    METRICS,
    TABLE,
    TYPED_VERSION,
    UNTYPED_VERSION,
    Entry,
    Header,
    index_bytes,
    named_dtype,
    saved_dtype,
    section_of,
    to_index,
)
from hpcstrat.cluster_resolver import batch_job_from_environment
from hpcstrat.engine.file_bytes import PAGE_BYTES
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError
from hpcstrat.variables.aggregation_rules import format_version_of

__all__ = ["Maker", "Skeleton", "packed_python", "state_bytes"]


class Maker:
    """Makes datasets and attributes by h5py's low-level functions, which are fast.

    HDF5's structures have ``room`` bytes (whole pages) at the start of the file.
    """

    def __init__(self, path: str, room: int) -> None:
        access = h5p.create(h5p.FILE_ACCESS)
        # The file must be readable by HDF5 1.10 and later.
        access.set_libver_bounds(h5f.LIBVER_V110, h5f.LIBVER_V110)
        # Put structures at the start of the file, and large values on page boundaries.
        access.set_meta_block_size(room)
        access.set_alignment(PAGE_BYTES, PAGE_BYTES)
        access.set_fclose_degree(h5f.CLOSE_STRONG)
        self._file = h5f.create(os.fsencode(path), h5f.ACC_TRUNC, fapl=access)
        self._made = h5p.create(h5p.DATASET_CREATE)
        # Allocate datasets when they are made, never fill them, and record no times.
        self._made.set_alloc_time(h5d.ALLOC_TIME_EARLY)
        self._made.set_fill_time(h5d.FILL_TIME_NEVER)
        self._made.set_obj_track_times(False)
        self._link = h5p.create(h5p.LINK_CREATE)
        self._link.set_create_intermediate_group(True)
        self._link.set_char_encoding(h5t.CSET_UTF8)
        self._scalar = h5s.create(h5s.SCALAR)
        # Cache of HDF5 types: making a type takes as long as writing an attribute.
        self._types: dict[tuple[np.dtype[Any], bool], Any] = {}

    def dataset(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        attributes: Mapping[str, Any],
    ) -> int | None:
        """Make a dataset and its parent groups; return its offset, or None if empty."""
        space = h5s.create_simple(shape) if shape else self._scalar
        kind = self._type(dtype, logical=True)
        made = h5d.create(
            self._file, path.encode(), kind, space, dcpl=self._made, lcpl=self._link
        )
        self._add(made, attributes)
        offset: int | None = made.get_offset()
        return offset

    def group(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Make a group (with its parents) if it does not exist, and add attributes."""
        name = path.encode()
        if name in self._file:
            made = h5g.open(self._file, name)
        else:
            made = h5g.create(self._file, name, lcpl=self._link)
        self._add(made, attributes)

    def attributes(self, path: str, attributes: Mapping[str, Any]) -> None:
        """Add attributes to the object at a path; an empty path is the root group."""
        self._add(h5o.open(self._file, path.encode() or b"."), attributes)

    def _add(self, item: Any, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            text = isinstance(value, str)
            # Use text of fixed length, because HDF5 stores other text between values.
            data = np.array(value.encode("ascii", "replace") or b" " if text else value)
            kind = self._type(data.dtype, logical=False)
            h5a.create(item, name.encode(), kind, self._scalar).write(data, kind)

    def _type(self, dtype: np.dtype[Any], *, logical: bool) -> Any:
        key = dtype, logical
        if key not in self._types:
            self._types[key] = h5t.py_create(dtype, logical=logical)
        return self._types[key]

    def close(self) -> None:
        """Flush the buffers of HDF5, and close the file."""
        self._file.close()


_BOUNDS = ("v110", "v110")
_TABLE_WORDS = PAGE_BYTES // 8
_LEAST_TEXT_BYTES = 256
_FIRST_BYTES = 1 << 14
_BYTES_PER_DATASET = 1 << 10
_MOST_BYTES = 1 << 32
# Values are aligned to stripes only in files with at least `_STRIPED_BYTES` of values:
# in a smaller file, the gap would be a large part of the file.
_STRIPE_BYTES = 1 << 20
_STRIPED_BYTES = 64 * _STRIPE_BYTES


def packed_python(header: Header) -> dict[str, bytes]:
    """Return the texts of plain state, by name, padded with blanks to a power of two.

    Because of the padding, most saves have the same lengths and can use the same
    skeleton. Raises CheckpointError if the total size is more than readers accept.
    """
    packed = {}
    for name, text in header.python.items():
        size = max(_LEAST_TEXT_BYTES, 1 << (len(text) - 1).bit_length())
        packed[name] = text.ljust(size)
    total = sum(map(len, packed.values()))
    if total > MOST_STATE_BYTES:
        largest = max(packed, key=lambda name: len(packed[name]))
        raise CheckpointError(
            f"expected plain state of at most {MOST_STATE_BYTES >> 20} MiB, found "
            f"{total >> 20} MiB, most of it from {largest!r}; keep large values in "
            "Variables"
        )
    return packed


def state_bytes(header: Header, python: Mapping[str, bytes]) -> dict[str, Array]:
    """Return the bytes to store, by path: arrays of random streams, and plain state."""
    found = {
        f"rng/{name}/{key}": as_bytes(value)
        for name, state in header.iterators.items()
        for key, value in state.items()
        if isinstance(value, np.ndarray)
    }
    for name, data in python.items():
        found[f"python/{name}"] = np.frombuffer(data, np.uint8)
    return found


class Skeleton:
    """HDF5's structures of files with the same names, types and shapes.

    Raises CheckpointError if HDF5 does not place datasets as expected.
    """

    def __init__(self, header: Header, python: Mapping[str, bytes]) -> None:
        self._key = _key(header, python)
        count = len(header.entries) + len(python) + len(header.metrics)
        count += 2 * len(header.iterators)
        # This estimate is nearly always enough. If not, try again with more room.
        room = _FIRST_BYTES + _BYTES_PER_DATASET * count
        made = None
        while made is None and room < _MOST_BYTES:
            made = _make(header, python, _pages(room))
            room *= 2
        if made is None:
            raise CheckpointError(
                f"expected HDF5 to keep its structures together, found them behind "
                f"{room} bytes; save fewer variables"
            )
        self.plan, prefix = made
        self._scratch = os.memfd_create("hpcstrat-skeleton")
        self._closer = weakref.finalize(self, os.close, self._scratch)
        # Keep the file open at exit, because a save may still be running then.
        self._closer.atexit = False
        os.pwrite(self._scratch, prefix, 0)
        # Extend the file sparsely to the length that HDF5 requires to open it.
        os.truncate(self._scratch, self.plan.size)

    def fits(self, header: Header, python: Mapping[str, bytes]) -> bool:
        """Return whether a file with this header can use this skeleton."""
        same: bool = _key(header, python) == self._key
        return same

    def prefix(self, header: Header, created_unix_ns: int) -> bytearray:
        """Return the prefix for one save, with an empty table of hashes."""
        # If an interrupt leaves the h5py file open, HDF5 may write to it later, in a
        # garbage collection. HDF5 therefore has its own descriptor; and the key is None
        # until the end, so that after an interrupt no later save uses this skeleton.
        key, self._key = self._key, None
        raw = os.fdopen(os.dup(self._scratch), "r+b", buffering=0)
        with h5py.File(raw, "r+", libver=_BOUNDS) as file:
            file.attrs.modify("step", np.int64(header.step))
            file.attrs.modify("created_unix_ns", np.int64(created_unix_ns))
            for name, value in header.metrics.items():
                file[METRICS].attrs.modify(name, np.float64(value))
            for name, state in header.iterators.items():
                group = file[f"{section_of(state)}/{name}"]
                for word, value in state.items():
                    if not isinstance(value, (str, np.ndarray)):
                        group.attrs.modify(word, np.int64(value))
        raw.close()
        self._key = key
        return bytearray(os.pread(self._scratch, self.plan.data_start, 0))

    def close(self) -> None:
        self._closer()


def _key(header: Header, python: Mapping[str, bytes]) -> Any:
    entries = tuple(
        (e.path, e.shape, e.dtype, e.synchronization, e.aggregation, e.trainable)
        for e in header.entries.values()
    )
    parts = tuple(
        (e.path, e.per_group, tuple(map(_ends, e.regions)))
        for e in header.entries.values()
        if e.has_rows or e.regions
    )
    states = tuple(
        (name, section_of(state), tuple((k, _kind(v)) for k, v in state.items()))
        for name, state in header.iterators.items()
    )
    sizes = tuple((name, len(data)) for name, data in python.items())
    metrics = tuple(header.metrics)
    # The key includes these attributes, because `prefix` cannot change them.
    about = (
        *(header.num_replicas, header.ranks_per_replica),
        *(header.group_of, header.math_threads),
        *(_job(), _version(header, python)),
    )
    return about, entries, parts, states, sizes, metrics


def _ends(region: Box) -> tuple[tuple[int, int], ...]:
    # Slices cannot be hashed before Python 3.12.
    return tuple((own.start, own.stop) for own in region)


def _version(header: Header, python: Mapping[str, bytes]) -> int:
    """Return the lowest format version for these aggregations and this plain state."""
    typed = any(map(is_typed, python.values()))
    own = format_version_of({entry.aggregation for entry in header.entries.values()})
    return max(own, TYPED_VERSION if typed else UNTYPED_VERSION)


def _kind(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape
    return value if isinstance(value, str) else "integer"


def _job() -> str:
    job = batch_job_from_environment()
    return "" if job is None else job.job_id


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def _datasets(
    header: Header, python: Mapping[str, bytes]
) -> list[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Return path, shape and type of all datasets of values, in the order to make them.

    Large datasets (at least a page) are first. The small ones, which HDF5 packs, are
    sorted by width of their elements, widest first, so that all values are aligned.
    """
    found = [
        (path, entry.shape, saved_dtype(named_dtype(entry.dtype)))
        for path, entry in header.entries.items()
    ]
    for name, state in header.iterators.items():
        found += [
            (f"{section_of(state)}/{name}/{key}", v.shape, saved_dtype(v.dtype))
            for key, v in state.items()
            if isinstance(v, np.ndarray)
        ]
    words = np.dtype(np.uint8)
    found += [(f"python/{name}", (len(data),), words) for name, data in python.items()]

    def order(dataset: tuple[str, tuple[int, ...], np.dtype[Any]]) -> tuple[bool, int]:
        _, shape, dtype = dataset
        small = math.prod(shape) * dtype.itemsize < PAGE_BYTES
        return small, -dtype.itemsize * small

    return sorted(found, key=order)


def _make(
    header: Header, python: Mapping[str, bytes], room: int
) -> tuple[FileLayout, bytes] | None:
    """Return the layout and prefix that HDF5 makes; None if ``room`` is too small."""
    datasets = _datasets(header, python)
    most = sum(_pages(math.prod(s) * d.itemsize) for _, s, d in datasets)
    block_bytes = choose_block_bytes(most, header.num_ranks)
    blocks = most // block_bytes + 2
    # Round the table of hashes up to pages, so that the data begin on a page. The table
    # is for ``blocks`` at most: the values, which follow it, have no offsets yet.
    words = -(-blocks // _TABLE_WORDS) * _TABLE_WORDS
    num_index = index_bytes(header.entries)
    if most >= _STRIPED_BYTES:
        # Start the data at a stripe's start, so that blocks consist of whole stripes.
        after = num_index + 8 * words
        room = -(-(room + after) // _STRIPE_BYTES) * _STRIPE_BYTES - after
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    octet = np.dtype(np.uint8)
    # The file is sparse: only HDF5's structures use space.
    with tempfile.NamedTemporaryFile(prefix="hpcstrat-", dir=folder) as scratch:
        maker = Maker(scratch.name, room)
        try:
            index_start = None
            if num_index:
                index_start = maker.dataset(INDEX, (num_index,), octet, {})
            table_start = maker.dataset(TABLE, (words,), np.dtype("<u8"), {})
            extents = _place(maker, header, datasets)
            data_end = maker.dataset(COMMIT, (RECORD_BYTES,), octet, {})
            plan = FileLayout(
                table_start=table_start or 0,
                data_start=(table_start or 0) + 8 * words,
                data_end=data_end or 0,
                block_bytes=block_bytes,
                extents=tuple(sorted(extents.values(), key=lambda each: each.offset)),
            )
            _describe(maker, header, plan, _version(header, python))
        finally:
            maker.close()
        _check(plan, words, os.fstat(scratch.fileno()).st_size)
        structures_end = plan.table_start - num_index
        if num_index and index_start != structures_end:
            raise _misplaced(f"the index at {index_start}", plan)
        try:
            os.lseek(scratch.fileno(), structures_end, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            # ENXIO: no data follow the structures, so that ``room`` was large enough.
            prefix = bytearray(os.pread(scratch.fileno(), plan.data_start, 0))
            if num_index:
                text = to_index(header.entries, extents).ljust(num_index)
                prefix[structures_end : plan.table_start] = text
            return plan, bytes(prefix)
        return None


def _place(
    maker: Maker,
    header: Header,
    datasets: list[tuple[str, tuple[int, ...], np.dtype[Any]]],
) -> dict[str, Extent]:
    """Make the datasets of values, and return their extents by path."""
    extents = {}
    for path, shape, dtype in datasets:
        entry = header.entries.get(path)
        offset = maker.dataset(path, shape, dtype, _attributes(entry) if entry else {})
        if offset is None:
            continue
        nbytes = math.prod(shape) * dtype.itemsize
        division = None if entry is None else _division(entry, dtype.itemsize, header)
        extents[path] = Extent(path, offset, nbytes, division)
    return extents


def _division(entry: Entry, itemsize: int, header: Header) -> Division | None:
    """Return how the ranks that save divide a dataset; None if each has all of it."""
    if entry.regions:
        return of_regions(entry.shape, itemsize, entry.regions, header.num_ranks)
    if not entry.has_rows or entry.gathered:
        return None
    row_of: Sequence[int] = range(header.num_replicas)
    if entry.per_group:
        row_of = header.group_of
    elif (count := header.ranks_per_replica) > 1:
        row_of = tuple(rank // count for rank in range(header.num_ranks))
    return of_rows(entry.shape, itemsize, row_of)


def _check(plan: FileLayout, words: int, size: int) -> None:
    """Raise CheckpointError if HDF5 has not placed the datasets as saves expect."""
    starts = [extent.offset for extent in plan.extents]
    stops = [extent.stop for extent in plan.extents]
    ordered = all(a <= b for a, b in zip(stops, starts[1:], strict=False))
    inside = not starts or (plan.data_start <= starts[0] and stops[-1] <= plan.data_end)
    aligned = plan.data_start % PAGE_BYTES == plan.data_end % PAGE_BYTES == 0
    known = plan.size == size and plan.num_blocks <= words
    if not (ordered and inside and aligned and known and plan.table_start > 0):
        raise _misplaced(f"{size} bytes", plan)


def _misplaced(found: str, plan: FileLayout) -> CheckpointError:
    return CheckpointError(
        f"expected HDF5 {h5py.version.hdf5_version} to place datasets one behind the "
        f"other, found {found} with {plan}; use another version of h5py"
    )


def _attributes(entry: Entry) -> dict[str, Any]:
    """Return the attributes of a variable's dataset."""
    found = {
        "dtype": entry.dtype,
        "synchronization": entry.synchronization,
        "aggregation": entry.aggregation,
        "trainable": np.int8(entry.trainable),
    }
    if entry.per_replica:
        found["replica_axis"] = np.int64(0)
    if entry.per_group:
        found["group_axis"] = np.int64(0)
    return found


def _describe(maker: Maker, header: Header, plan: FileLayout, version: int) -> None:
    """Write the attributes of groups and tables; numbers that saves change are 0."""
    number = np.int64
    root = {
        "hpcstrat_format": FORMAT,
        "hpcstrat_format_version": number(version),
        "hpcstrat_version": __version__,
        "step": number(0),
        "num_replicas": number(header.num_replicas),
        "created_unix_ns": number(0),
        "job_id": _job(),
    }
    if header.math_threads:
        root["math_threads"] = number(header.math_threads)
    maker.attributes("", root)
    for name, state in header.iterators.items():
        about = {
            key: value if isinstance(value, str) else number(0)
            for key, value in state.items()
            if not isinstance(value, np.ndarray)
        }
        maker.group(f"{section_of(state)}/{name}", about)
    if header.metrics:
        maker.group(METRICS, dict.fromkeys(header.metrics, np.float64(0)))
    table = {
        "algorithm": ALGORITHM,
        "block_bytes": number(plan.block_bytes),
        "data_start": number(plan.data_start),
        "data_end": number(plan.data_end),
    }
    maker.attributes(TABLE, table)
