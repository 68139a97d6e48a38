"""Names, entries and header of a checkpoint file: see ``docs/checkpoint-format.md``."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.checkpoint.file.division import Box
from hpcstrat.checkpoint.file.extents import Extent
from hpcstrat.engine.arrays.casting import FIRST_FOREIGN_TYPE
from hpcstrat.engine.file_bytes import PAGE_BYTES

__all__ = [
    "COMMIT",
    "FORMAT",
    "FORMAT_VERSION",
    "INDEX",
    "METRICS",
    "MOST_INDEX_BYTES",
    "RESERVED",
    "TABLE",
    "TYPED_VERSION",
    "UNTYPED_VERSION",
    "Entry",
    "Header",
    "checkpoint_name",
    "dtype_name",
    "from_index",
    "index_bytes",
    "list_checkpoints",
    "named_dtype",
    "saved_dtype",
    "section_of",
    "step_of",
    "stored_dtype",
    "to_index",
]

FORMAT = "hpcstrat-checkpoint"
FORMAT_VERSION = 3
"""Highest version that this library can read."""

TYPED_VERSION = 3
"""Version of files whose plain state has types that JSON does not have."""

UNTYPED_VERSION = 2
"""Version of all other files, which older libraries can then read."""

TABLE = "hpcstrat/block_xxh3_64"
"""Dataset with the hash of each block of the data."""

COMMIT = "hpcstrat/commit"
"""Dataset that is the commit record."""

INDEX = "hpcstrat/index"
"""Dataset of bytes: all variables and their places. Older files have no index."""

METRICS = "hpcstrat/metrics"
"""Group whose attributes are the metrics of a save; it is missing without metrics."""

RESERVED = ("variables", "iterators", "rng", "python", "hpcstrat")
"""Groups of the file format; no object may have one of these names."""

_MOST_STEPS = 10**18
_NAME = re.compile(r"ckpt-(\d{1,18})\.h5")


@dataclass(slots=True)
class Entry:
    """One variable in a checkpoint: its dataset, and how replicas' values are combined.

    ``dtype`` is NumPy's name of the variable's type; the stored type may differ. If
    ``per_replica`` (for aggregation ``none``, or logical replicas), the first axis has
    a row for each replica; if ``per_group``, a row for each group. If ``gathered``,
    each rank that saves has the rows of all replicas. ``regions`` (only in a save, and
    if the ranks of a replica divide the value) has the part of each of these ranks.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    synchronization: str
    aggregation: str
    trainable: bool
    per_replica: bool = False
    per_group: bool = False
    gathered: bool = False
    regions: tuple[Box, ...] = ()

    @property
    def has_rows(self) -> bool:
        """True if the dataset has a row for each replica, or for each group."""
        return self.per_replica or self.per_group


@dataclass(slots=True)
class Header:
    """The content of a checkpoint except for the values of its variables.

    ``iterators`` has the positions in datasets and the states of random streams, which
    `section_of` distinguishes. ``python`` has plain states: in a save, as texts of
    `as_text`; after reading, as Python objects. ``created_unix_ns`` is the time when
    the save began. ``group_of`` (only in a save, and if there are groups) has the group
    of each replica. ``ranks_per_replica`` is known only in a save. ``math_threads`` is
    0 without logical replicas.
    """

    step: int
    num_replicas: int
    entries: dict[str, Entry] = field(default_factory=dict)
    iterators: dict[str, dict[str, Any]] = field(default_factory=dict)
    python: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    created_unix_ns: int = 0
    group_of: tuple[int, ...] = ()
    math_threads: int = 0
    ranks_per_replica: int = 1

    @property
    def num_ranks(self) -> int:
        """The number of ranks that save, if each has one replica or a part of one."""
        return self.num_replicas * self.ranks_per_replica


def checkpoint_name(step: int) -> str:
    """Return the file name of a step, such as ``ckpt-0000001200.h5``.

    Raises ValueError for a step that is negative, or has more than 18 digits.
    """
    if not 0 <= step < _MOST_STEPS:
        raise ValueError(f"expected 0 <= step < 10**18, found {step}; count from 0")
    return f"ckpt-{step:010d}.h5"


def step_of(path: str) -> int | None:
    """Return the step in the file name of a checkpoint, or None for other names."""
    match = _NAME.fullmatch(os.path.basename(path))
    return None if match is None else int(match.group(1))


def list_checkpoints(directory: str) -> list[str]:
    """Return paths of the checkpoints in a folder, lowest step first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    # Sort by number: as text, names with steps of more than ten digits sort wrongly.
    return [
        os.path.join(directory, name) for name in sorted(steps, key=steps.__getitem__)
    ]


def section_of(state: dict[str, Any]) -> str:
    """Return the HDF5 group (``rng`` or ``iterators``) in which a state is stored."""
    return "rng" if "bit_generator" in state else "iterators"


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a type; cached, because NumPy computes the name each time."""
    return dtype.name


@functools.cache
def named_dtype(name: str) -> np.dtype[Any]:
    """Return the type ``name`` of NumPy or ml_dtypes, in native byte order."""
    if name == "bfloat16":
        # A variable of type bfloat16 exists only if ml_dtypes is installed.
        import ml_dtypes

        half: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return half
    return np.dtype(name)


def saved_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which a file stores values of ``dtype``: little-endian.

    HDF5 has no name for bfloat16, so that it is stored as 16-bit unsigned integers.
    """
    if dtype_name(dtype) == "bfloat16":
        return np.dtype("<u2")
    return dtype.newbyteorder("<")


@functools.lru_cache(maxsize=256)
def stored_dtype(name: str, itemsize: int) -> np.dtype[Any] | None:
    """Return the type in which a file stores type ``name``, or None if not a number."""
    # Do not use `named_dtype`, because the library for bfloat16 may be missing.
    if name == "bfloat16":
        return np.dtype("<u2")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError, SyntaxError):
        return np.dtype(f"V{itemsize}")
    if dtype.num >= FIRST_FOREIGN_TYPE:
        return np.dtype(f"V{dtype.itemsize}")
    return saved_dtype(dtype) if dtype.kind in "biufc" else None


MOST_INDEX_BYTES = 64 << 20
"""Largest index; a file whose index would be longer has no index."""

# Digits of the largest offset in an HDF5 file.
_MOST_DIGITS = 19


def index_bytes(entries: Mapping[str, Entry]) -> int:
    """Return the index's size in bytes: whole pages, or 0 if an index is too large."""
    text = to_index(entries, {})
    nbytes = len(text) + _MOST_DIGITS * len(entries)
    nbytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
    return nbytes if nbytes <= MOST_INDEX_BYTES else 0


def to_index(entries: Mapping[str, Entry], extents: Mapping[str, Extent]) -> bytes:
    """Return the text of the index; ``extents`` has the offsets of non-empty values.

    The index is JSON with one list for each entry: path, shape, type, synchronization,
    aggregation, trainable (0 or 1), the meaning of the first axis (``replica``,
    ``group`` or empty), offset in the file and number of bytes.
    """
    nowhere = Extent("", 0, 0)
    rows = []
    # Sort the paths in the order in which HDF5 lists datasets.
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
    """Return the entries, and the extents of their values, from an index; both by path.

    Empty values have an extent of length 0. Raises ValueError or TypeError for an
    invalid index, such as an extent that is not between ``start`` and ``stop``.
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
