"""Reading what a checkpoint file says of itself, in this format and older ones."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.checkpoint.disk import PASSING
from hpcstrat.checkpoint.file.commit_record import Vouched, has_record, read_vouched
from hpcstrat.checkpoint.file.contents import header_of, read_contents
from hpcstrat.checkpoint.file.extents import Extent
from hpcstrat.checkpoint.file.other_files import NoCheckpointError, other_file
from hpcstrat.checkpoint.file.schema import Header, named_dtype, saved_dtype
from hpcstrat.checkpoint.file.structure import place_of
from hpcstrat.engine.hdf5_files import open_for_reading
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError, CorruptCheckpointError

__all__ = [
    "CheckpointFile",
    "check",
    "is_passing",
    "map_values",
    "open_checkpoint",
    "read_header",
    "read_root",
    "read_values",
]

# Errors of h5py and this package in damaged files, as tests that change bytes saw them.
_UNREADABLE = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, RuntimeError),
    *(ArithmeticError, AttributeError),
)


def is_passing(error: Exception) -> bool:
    """Whether a file could not be read now, and may be whole; not if there is none."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in PASSING


@dataclass(slots=True)
class CheckpointFile:
    """A checkpoint that was found to be whole, apart from its data.

    ``vouched``, with which the data are checked, is None for format version 1, which
    has no hashes. Values without bytes have no extents.
    """

    path: str
    header: Header
    vouched: Vouched | None = None
    extents: dict[str, Extent] = field(default_factory=dict)


def open_checkpoint(path: str) -> CheckpointFile:
    """Check a file, and read everything but the values of variables.

    Raises FileNotFoundError where there is none, CorruptCheckpointError where it is no
    whole checkpoint, and CheckpointError where it cannot be read now, or a newer
    library wrote it.
    """
    with _readable(path):
        vouched = _vouched(path)
        with open_for_reading(path) as file:
            found = CheckpointFile(path, header_of(file, vouched), vouched)
            found.extents = read_contents(file, found.header, vouched)
    return found


def read_header(path: str) -> Header:
    """Return the header of an `open_checkpoint`; raises as that."""
    return open_checkpoint(path).header


def read_root(path: str) -> Header:
    """Check a file as `check` does, and return its step, attributes and metrics alone.

    The time that it takes hardly depends on how much is in the file. Raises as
    `open_checkpoint`.
    """
    with _readable(path):
        vouched = _vouched(path)
        with open_for_reading(path) as file:
            return header_of(file, vouched)


def check(path: str) -> None:
    """Check a file as far as that takes next to no time: all but the data.

    Raises as `open_checkpoint`.
    """
    with _readable(path):
        vouched = _vouched(path)
    if vouched is None:
        # Without hashes, to read all of the structures is the only check.
        read_header(path)


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turn what a damaged file raises into one error."""
    try:
        yield
    except FileNotFoundError:
        raise
    except _UNREADABLE as error:
        if isinstance(error, OSError) and error.errno in PASSING:
            raise CheckpointError(
                f"expected to read {path}, found: {error}; it may be whole: try again"
            ) from error
        # Only now: a mistyped name is rare, and to look costs another open.
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
    # A pipe would wait for somebody who writes.
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            folder = stat.S_ISDIR(found.st_mode)
            raise ValueError(f"it is {'a folder' if folder else 'no regular file'}")
        if found.st_size == 0:
            raise ValueError("it is empty")
        return read_vouched(file, path) if has_record(file) else None
    finally:
        os.close(file)


def map_values(file: CheckpointFile) -> dict[str, Array]:
    """Return all values as maps of the file, whose hashes are not checked again.

    Changes of an array stay in memory. Raises ImportError or TypeError for a type that
    is not known here, such as bfloat16 without ml_dtypes.
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
    """Read some entries' data without checking hashes, as of format version 1.

    ``wanted`` are the types that were saved, by path. Returns fresh arrays in native
    byte order. Raises CorruptCheckpointError where the file cannot be read.
    """
    values = {}
    try:
        nbytes = os.path.getsize(path)
        with open_for_reading(path) as file:
            for name, dtype in wanted.items():
                dataset = file[name]
                # A shape that the file has no bytes for must not allocate memory.
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
