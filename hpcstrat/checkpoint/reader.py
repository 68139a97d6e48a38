"""Reading what a checkpoint file says of itself, in this format and older ones."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h5py
import numpy as np

from hpcstrat.checkpoint.blocks import Blocks
from hpcstrat.checkpoint.disk import PASSING
from hpcstrat.checkpoint.layout import (
    FORMAT,
    FORMAT_VERSION,
    METRICS,
    Entry,
    Header,
    saved_dtype,
)
from hpcstrat.checkpoint.plan import Extent
from hpcstrat.checkpoint.record import Vouched, has_record, read_vouched
from hpcstrat.errors import CheckpointError, CorruptCheckpointError
from hpcstrat.typing import Array

__all__ = [
    "CheckpointFile",
    "check",
    "is_passing",
    "open_checkpoint",
    "read_header",
    "read_root",
    "read_values",
]

_UNREADABLE = (
    *(OSError, EOFError, LookupError, ValueError, TypeError, RuntimeError),
    *(ArithmeticError, AttributeError),
)


def is_passing(error: Exception) -> bool:
    """Whether a file could not be read now, and may be whole.

    Not collective.

    Parameters
    ----------
    error : Exception
        From a function of this module.

    Returns
    -------
    bool
        False also for files that are not there.
    """
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in PASSING


@dataclass(slots=True)
class CheckpointFile:
    """A checkpoint that was found to be whole, apart from its data.

    Parameters
    ----------
    path : str
        Its name.
    header : Header
        What it holds.
    vouched : Vouched or None
        What the data are checked with; None for format version 1, which has no hashes.
    extents : dict of str to Extent
        Where the values are, by path; none for those without bytes, nor for format
        version 1.
    """

    path: str
    header: Header
    vouched: Vouched | None = None
    extents: dict[str, Extent] = field(default_factory=dict)


def open_checkpoint(path: str) -> CheckpointFile:
    """Check a file, and read everything but the values of variables.

    Not collective.

    Parameters
    ----------
    path : str
        A checkpoint.

    Returns
    -------
    CheckpointFile
        For reading the values.

    Raises
    ------
    CorruptCheckpointError
        If the file is no whole checkpoint.
    CheckpointError
        If a newer library wrote it.
    FileNotFoundError
        If there is no such file.
    """
    with _readable(path):
        vouched = _vouched(path)
        with h5py.File(path, "r", locking=False) as file:
            found = CheckpointFile(path, _header(file, vouched), vouched)
            _add_values(file, found)
    return found


def read_header(path: str) -> Header:
    """Read everything but the values of variables.

    Not collective.

    Parameters
    ----------
    path : str
        A checkpoint.

    Returns
    -------
    Header
        Its contents.

    Raises
    ------
    CorruptCheckpointError
        If the file is no whole checkpoint.
    CheckpointError
        If a newer library wrote it.
    FileNotFoundError
        If there is no such file.
    """
    return open_checkpoint(path).header


def read_root(path: str) -> Header:
    """Check a file as `check` does, and read its own attributes and metrics.

    Not collective. The time that it takes hardly depends on how much is in the file.

    Parameters
    ----------
    path : str
        A checkpoint.

    Returns
    -------
    Header
        Without entries and states.

    Raises
    ------
    CorruptCheckpointError
        If the file is no whole checkpoint.
    CheckpointError
        If a newer library wrote it.
    FileNotFoundError
        If there is no such file.
    """
    with _readable(path):
        vouched = _vouched(path)
        with h5py.File(path, "r", locking=False) as file:
            return _header(file, vouched)


def check(path: str) -> None:
    """Check a file as far as that takes next to no time: all but the data.

    Not collective.

    Parameters
    ----------
    path : str
        A checkpoint.

    Raises
    ------
    CorruptCheckpointError
        If the file is no whole checkpoint.
    CheckpointError
        If a newer library wrote it.
    FileNotFoundError
        If there is no such file.
    """
    with _readable(path):
        vouched = _vouched(path)
    if vouched is None:
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


def _header(file: h5py.File, vouched: Vouched | None) -> Header:
    kind = _text(file.attrs.get("hpcstrat_format", b""))
    if kind != FORMAT:
        raise ValueError(f"its format is {kind!r}")
    version = int(file.attrs["hpcstrat_format_version"])
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"expected a checkpoint of format version {FORMAT_VERSION} or lower, found "
            f"version {version} in {file.filename}; use a newer hpcstrat"
        )
    if vouched is None and (version > 1 or "hpcstrat" in file):
        raise ValueError("it has no commit record")
    header = Header(int(file.attrs["step"]), int(file.attrs["num_replicas"]))
    if vouched is not None and header.step != vouched.step:
        raise ValueError("its commit record is of another step")
    header.created_unix_ns = int(file.attrs.get("created_unix_ns", 0))
    if METRICS in file:
        metrics = file[METRICS].attrs.items()
        header.metrics = {name: float(value) for name, value in metrics}
    return header


def _add_values(file: h5py.File, found: CheckpointFile) -> None:
    """Read all attributes, the state of generators and plain state."""
    header = found.header

    def visit(name: str, item: Any) -> None:
        if not isinstance(item, h5py.Dataset):
            return
        if "aggregation" in item.attrs:
            header.entries[name] = _entry(name, item)
        if found.vouched is not None and item.nbytes:
            extent = Extent(name, item.id.get_offset(), item.nbytes)
            found.extents[name] = extent

    file.visititems(visit)
    for name, group in file.get("iterators", {}).items():
        header.iterators[name] = {k: int(v) for k, v in group.attrs.items()}
    rng, python = dict(file.get("rng", {})), dict(file.get("python", {}))
    if found.vouched is None:
        _read_states(header, rng, python, lambda dataset: dataset[...].tobytes())
    elif rng or python:
        with Blocks(found.path, found.vouched, False) as blocks:

            def read(dataset: h5py.Dataset) -> bytes:
                extent = found.extents[dataset.name.lstrip("/")]
                return blocks.part(extent.offset, extent.stop)

            _read_states(header, rng, python, read)


def _read_states(header: Header, rng: Any, python: Any, read: Any) -> None:
    for name, group in rng.items():
        attributes = group.attrs
        header.iterators[name] = {
            "bit_generator": _text(attributes["bit_generator"]),
            "root_entropy": int(attributes["root_entropy"]),
            "generation": int(attributes["generation"]),
            "state": _words(group["state"], read),
            "shared": _words(group["shared"], read),
        }
    for name, dataset in python.items():
        header.python[name] = json.loads(read(dataset))


def _words(dataset: h5py.Dataset, read: Any) -> Array:
    words = np.frombuffer(read(dataset), "<u8").astype(np.uint64)
    return words.reshape(dataset.shape)


def _entry(name: str, dataset: h5py.Dataset) -> Entry:
    attributes = dataset.attrs
    return Entry(
        name,
        tuple(dataset.shape),
        _text(attributes["dtype"]),
        _text(attributes["synchronization"]),
        _text(attributes["aggregation"]),
        bool(attributes["trainable"]),
        "replica_axis" in attributes,
    )


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def read_values(path: str, wanted: dict[str, np.dtype[Any]]) -> dict[str, Array]:
    """Read the data of some entries of a file without hashes: of format version 1.

    Not collective.

    Parameters
    ----------
    path : str
        A checkpoint.
    wanted : dict of str to dtype
        Type of each entry wanted, by path; it is the type that was saved.

    Returns
    -------
    dict of str to ndarray
        Fresh arrays, in native byte order.

    Raises
    ------
    CorruptCheckpointError
        If the file cannot be read.
    """
    values = {}
    try:
        with h5py.File(path, "r", locking=False) as file:
            for name, dtype in wanted.items():
                dataset = file[name]
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
