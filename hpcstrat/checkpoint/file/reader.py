"""Reader of a checkpoint's header, index and states, for all format versions."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np
from h5py import h5a

from hpcstrat.checkpoint.disk import PASSING, closing
from hpcstrat.checkpoint.file.commit_record import (
    Blocks,
    Vouched,
    has_record,
    read_vouched,
)
from hpcstrat.checkpoint.file.extents import Extent
from hpcstrat.checkpoint.file.plain_state import MOST_STATE_BYTES, from_text
from hpcstrat.checkpoint.file.schema import (
    FORMAT,
    FORMAT_VERSION,
    INDEX,
    METRICS,
    MOST_INDEX_BYTES,
    UNTYPED_VERSION,
    Entry,
    Header,
    from_index,
    named_dtype,
    saved_dtype,
    step_of,
)
from hpcstrat.checkpoint.file.structure import (
    attribute,
    attributes,
    datasets,
    member,
    place_of,
    require_stored_as,
)
from hpcstrat.engine.file_bytes import read_exactly
from hpcstrat.engine.hdf5_files import open_for_reading
from hpcstrat.engine.options import VariableAggregation
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "CheckpointFile",
    "NoCheckpointError",
    "check",
    "header_of",
    "is_passing",
    "map_values",
    "open_checkpoint",
    "other_file",
    "read_contents",
    "read_header",
    "read_root",
    "read_values",
]

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_FIRST_BYTES = 4096
_MOST_NAMES = 3
_BEGINNINGS = {
    b"PK\x03\x04": "a ZIP archive, such as numpy.savez and torch.save write",
    b"\x93NUMPY": "an array of numpy.save",
    b"\x1f\x8b": "a file compressed by gzip",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
}


class NoCheckpointError(CorruptCheckpointError):
    """Error for a file that seems to be of another format, not a damaged checkpoint."""


def other_file(path: str) -> str:
    """Return what a file that is no checkpoint is; empty if it may be a checkpoint."""
    try:
        with closing(_opened(path)) as file:
            if not stat.S_ISREG(os.fstat(file).st_mode) or has_record(file):
                return ""
            first = os.pread(file, _FIRST_BYTES, 0)
    except OSError:
        return ""
    if first.startswith(_SIGNATURE):
        return _other_hdf5(path)
    known = (what for begin, what in _BEGINNINGS.items() if first.startswith(begin))
    unknown = (
        ""
        if step_of(path) is not None
        else "a file of another kind"
        if first
        else "an empty file"
    )
    return next(known, "a text file" if _is_text(first) else unknown)


def _other_hdf5(path: str) -> str:
    # A file that HDF5 cannot open may be a damaged checkpoint.
    with contextlib.suppress(Exception), open_for_reading(path) as file:
        with contextlib.suppress(LookupError, ValueError):
            if attribute(file, "hpcstrat_format") == FORMAT.encode():
                return ""
        names = sorted(file)[:_MOST_NAMES]
        holds = f", which holds {', '.join(names)}" if names else ", which is empty"
        return f"an HDF5 file of another program{holds}"
    return ""


def _is_text(first: bytes) -> bool:
    # Decode incrementally, because the last character may be cut off.
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(first)
    except UnicodeDecodeError:
        return False
    return bool(text) and all(c.isprintable() or c in "\t\n\r\f" for c in text)


_Read = Callable[[h5py.Dataset], bytes]
_AGGREGATIONS = {name.lower() for name in VariableAggregation.__members__}


def header_of(file: h5py.File, vouched: Vouched | None) -> Header:
    """Return a header without entries and states; ``vouched`` is None for version 1."""
    kind = _text(attribute(file, "hpcstrat_format"))
    if kind != FORMAT:
        raise ValueError(f"its format is {kind!r}")
    version = int(attribute(file, "hpcstrat_format_version"))
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"expected a checkpoint of format version {FORMAT_VERSION} or lower, found "
            f"version {version} in {file.filename}; use a newer hpcstrat"
        )
    about = member(file, "hpcstrat")
    # Only version 1 has no commit record: a truncated file must not pass as version 1.
    if vouched is None and (version > 1 or about is not None):
        raise ValueError("it has no commit record")
    step, replicas = attribute(file, "step"), attribute(file, "num_replicas")
    header = Header(int(step), int(replicas))
    if vouched is not None and header.step != vouched.step:
        raise ValueError("its commit record is of another step")
    header.created_unix_ns = int(attribute(file, "created_unix_ns"))
    if h5a.exists(file.id, b"math_threads"):
        header.math_threads = int(attribute(file, "math_threads"))
    metrics = None if about is None else member(about, METRICS.rpartition("/")[2])
    if metrics is not None:
        header.metrics = {name: float(one) for name, one in attributes(metrics)}
    return header


def read_contents(
    file: h5py.File, header: Header, vouched: Vouched | None
) -> dict[str, Extent]:
    """Add entries and states to ``header``; return the extents of values by path."""
    start, stop = 0, os.path.getsize(file.filename)
    if vouched is not None:
        # The hashes of blocks cover only values between these two offsets.
        start, stop = vouched.plan.data_start, vouched.plan.data_end
    extents: dict[str, Extent] = {}
    index = None if vouched is None else _index(file, vouched)
    if index is None:
        places = [file["/"]]
    else:
        header.entries, extents = from_index(index, start, stop)
        places = [g for name in ("python", "rng") if (g := member(file, name))]
    for name, dataset in itertools.chain.from_iterable(map(datasets, places)):
        # Only datasets of variables have an aggregation.
        is_value = index is None and h5a.exists(dataset.id, b"aggregation")
        if is_value or name.startswith(("python/", "rng/")):
            extents[name] = Extent(name, *place_of(dataset, start, stop))
        if is_value:
            header.entries[name] = _entry(dataset, name)
    for entry in header.entries.values():
        if entry.aggregation not in _AGGREGATIONS:
            raise ValueError(f"{entry.path} has the aggregation {entry.aggregation!r}")
        _require_rows(entry, header.num_replicas)
    for name, group in (member(file, "iterators") or {}).items():
        header.iterators[name] = {k: int(v) for k, v in attributes(group)}
    if "rng" in file or "python" in file:
        with _reading(file.filename, vouched, extents) as read:
            _read_states(file, header, read)
    return {name: extent for name, extent in extents.items() if extent.nbytes}


@contextlib.contextmanager
def _reading(
    path: str, vouched: Vouched | None, extents: dict[str, Extent]
) -> Iterator[_Read]:
    """Yield a function that reads a dataset; it checks hashes if the file has some."""
    for section in ("python/", "rng/"):
        sizes = [e.nbytes for name, e in extents.items() if name.startswith(section)]
        # Extents in a forged file may overlap: reading them could exhaust the memory.
        if sum(sizes) > MOST_STATE_BYTES:
            raise ValueError(f"there are {sum(sizes):,} bytes in {section}")
    with contextlib.ExitStack() as stack:
        if vouched is not None:
            part = stack.enter_context(Blocks(path, vouched, False)).part
        else:
            file = stack.enter_context(open(path, "rb"))

            def part(start: int, stop: int) -> bytes:
                return read_exactly(file.fileno(), start, stop - start)

        def read(dataset: h5py.Dataset) -> bytes:
            extent = extents[dataset.name.lstrip("/")]
            return part(extent.offset, extent.stop)

        yield read


def _read_states(file: h5py.File, header: Header, read: _Read) -> None:
    typed = int(attribute(file, "hpcstrat_format_version")) > UNTYPED_VERSION
    for name, group in file.get("rng", {}).items():
        header.iterators[name] = {
            "bit_generator": _text(attribute(group, "bit_generator")),
            "root_entropy": int(attribute(group, "root_entropy")),
            "generation": int(attribute(group, "generation")),
            "state": _words(group["state"], read),
            "shared": _words(group["shared"], read),
        }
    for name, dataset in file.get("python", {}).items():
        header.python[name] = from_text(read(dataset), typed=typed)


def _words(dataset: h5py.Dataset, read: _Read) -> Array:
    require_stored_as(dataset, "uint64")
    words = np.frombuffer(read(dataset), "<u8").astype(np.uint64)
    return words.reshape(dataset.shape)


def _index(file: h5py.File, vouched: Vouched) -> bytes | None:
    """Return the bytes of the file's index, or None if the file has no index."""
    dataset = member(file, INDEX)
    if dataset is None:
        return None
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{INDEX} is no dataset")
    offset, nbytes = place_of(dataset, 0, vouched.plan.data_start)
    if nbytes > MOST_INDEX_BYTES:
        raise ValueError(f"its index has {nbytes:,} bytes")
    with open(file.filename, "rb") as raw:
        return read_exactly(raw.fileno(), offset, nbytes)


def _entry(dataset: h5py.Dataset, name: str) -> Entry:
    # Most datasets have only the four required attributes.
    has_more = h5a.get_num_attrs(dataset.id) != 4
    entry = Entry(
        name,
        tuple(dataset.shape),
        _text(attribute(dataset, "dtype")),
        _text(attribute(dataset, "synchronization")),
        _text(attribute(dataset, "aggregation")),
        bool(attribute(dataset, "trainable")),
        has_more and bool(h5a.exists(dataset.id, b"replica_axis")),
        has_more and bool(h5a.exists(dataset.id, b"group_axis")),
    )
    require_stored_as(dataset, entry.dtype)
    return entry


def _require_rows(entry: Entry, num_replicas: int) -> None:
    """Raise ValueError if an entry has the wrong number of rows."""
    if entry.per_replica and entry.shape[:1] != (num_replicas,):
        raise ValueError(f"{entry.path} has not a row for each replica")
    if entry.per_group and not (entry.shape and 1 <= entry.shape[0] <= num_replicas):
        raise ValueError(f"{entry.path} has not a row for each group of replicas")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# Errors that h5py and this package raise for damaged files.
_UNREADABLE = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, RuntimeError),
    *(ArithmeticError, AttributeError),
)


def is_passing(error: Exception) -> bool:
    """Return whether an error may be temporary, so that the file may be intact."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in PASSING


@dataclass(slots=True)
class CheckpointFile:
    """A checkpoint that is intact except for its data, which have not been checked.

    ``vouched`` is None for format version 1. Empty values have no extents.
    """

    path: str
    header: Header
    vouched: Vouched | None = None
    extents: dict[str, Extent] = field(default_factory=dict)


def open_checkpoint(path: str) -> CheckpointFile:
    """Check a file, and read everything except the values of variables.

    Raises FileNotFoundError; CorruptCheckpointError if the file is no intact
    checkpoint; or CheckpointError if it cannot be read now, or is of a newer hpcstrat.
    """
    with _readable(path):
        vouched = _vouched(path)
        with open_for_reading(path) as file:
            found = CheckpointFile(path, header_of(file, vouched), vouched)
            found.extents = read_contents(file, found.header, vouched)
    return found


def read_header(path: str) -> Header:
    """Return the header of a file; raise errors as `open_checkpoint` does."""
    return open_checkpoint(path).header


def read_root(path: str) -> Header:
    """Return a header without entries and states; raise errors as `check` does."""
    with _readable(path):
        vouched = _vouched(path)
        with open_for_reading(path) as file:
            return header_of(file, vouched)


def check(path: str) -> None:
    """Check a file except for its data; raise errors as `open_checkpoint` does."""
    with _readable(path):
        vouched = _vouched(path)
    if vouched is None:
        # Without hashes, the only possible check is to read all structures.
        read_header(path)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Replace an error in reading a file by a CheckpointError with advice."""
    try:
        yield
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise CheckpointError(
                f"expected to read {path}, found: {error}; the file may be intact: try "
                "again"
            ) from error
        # Find the kind of file only after an error, because this opens the file again.
        other = other_file(path)
        if other:
            raise NoCheckpointError(
                f"expected a checkpoint, found {other} at {path}; give a file that "
                "CheckpointManager has written"
            ) from error
        advice = "restore an older one, or remove it"
        if isinstance(error, PermissionError):
            advice = "change its permissions, or restore an older one"
        raise CorruptCheckpointError(
            f"expected a checkpoint at {path}, found a file that cannot be read: "
            f"{error}; {advice}"
        ) from error


def _vouched(path: str) -> Vouched | None:
    with closing(_opened(path)) as file:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            folder = stat.S_ISDIR(found.st_mode)
            raise ValueError(f"it is {'a folder' if folder else 'no regular file'}")
        if found.st_size == 0:
            raise ValueError("it is empty")
        return read_vouched(file, path) if has_record(file) else None


def _opened(path: str) -> int:
    # Without O_NONBLOCK, opening a pipe would wait for a process that writes to it.
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)


def map_values(file: CheckpointFile) -> dict[str, Array]:
    """Return all values by path, as memory-mapped arrays; hashes are not checked.

    A write to an array does not change the file. Raises ImportError or TypeError if a
    variable's type is unknown.
    """
    found = {}
    for name, entry in file.header.entries.items():
        dtype, extent = named_dtype(entry.dtype), file.extents.get(name)
        if extent is None:
            found[name] = np.empty(entry.shape, dtype)
            continue
        raw = np.memmap(file.path, np.uint8, "c", extent.offset, (extent.nbytes,))
        value = raw.view(saved_dtype(dtype))
        native = value.astype(value.dtype.newbyteorder("="), copy=False)
        found[name] = native.view(dtype).reshape(entry.shape)
    return found


def read_values(path: str, wanted: dict[str, np.dtype[Any]]) -> dict[str, Array]:
    """Return values of a file of format version 1, which has no hashes.

    ``wanted`` has the variable's type of each value by path. The returned values are in
    native byte order. Raises CorruptCheckpointError.
    """
    values = {}
    try:
        nbytes = os.path.getsize(path)
        with open_for_reading(path) as file:
            for name, dtype in wanted.items():
                dataset = file[name]
                # Check that the file has these bytes before allocating memory.
                place_of(dataset, 0, nbytes)
                value = np.empty(dataset.shape, saved_dtype(dtype))
                if value.size:
                    dataset.read_direct(value)
                native = value.astype(value.dtype.newbyteorder("="), copy=False)
                values[name] = native.view(dtype) if value.dtype.kind == "u" else native
    except _UNREADABLE as error:
        raise CorruptCheckpointError(
            f"expected readable data in {path}, found: {error}; restore an older "
            "checkpoint"
        ) from error
    return values
