"""Names in a checkpoint file; ``docs/checkpoint-format.md`` is their specification."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = [
    "COMMIT",
    "FORMAT",
    "FORMAT_VERSION",
    "INDEX",
    "METRICS",
    "RESERVED",
    "TABLE",
    "UNTYPED_VERSION",
    "Entry",
    "Header",
    "checkpoint_name",
    "dtype_name",
    "list_checkpoints",
    "named_dtype",
    "saved_dtype",
    "section_of",
    "step_of",
]

FORMAT = "hpcstrat-checkpoint"
FORMAT_VERSION = 3
UNTYPED_VERSION = 2
"""Of files whose plain state has no types but those of JSON; still written for it.

Older libraries can then read what a newer one has saved.
"""

TABLE = "hpcstrat/block_xxh3_64"
"""Dataset with the hash of each block of the data."""

COMMIT = "hpcstrat/commit"
"""Dataset that is the commit record."""

INDEX = "hpcstrat/index"
"""Dataset of bytes: all variables and their places. Older files have none."""

METRICS = "hpcstrat/metrics"
"""Group whose attributes are the metrics of a save; only where there are any."""

RESERVED = ("variables", "iterators", "rng", "python", "hpcstrat")
"""Groups with a meaning of their own; no object may have such a name."""

_MOST_STEPS = 10**18
_NAME = re.compile(r"ckpt-(\d{1,18})\.h5")


@dataclass(slots=True)
class Entry:
    """A dataset of a checkpoint, and how its variable is combined over replicas.

    ``dtype`` is NumPy's name of the variable's type, not of the stored one;
    synchronization and aggregation are in lower case. With ``per_replica``, as of
    aggregation ``none`` or of logical replicas, the first axis counts replicas; with
    ``per_group``, groups. ``gathered`` says, of what is to be saved, that each rank has
    the rows of all.
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

    @property
    def has_rows(self) -> bool:
        """Whether not all replicas have the same value."""
        return self.per_replica or self.per_group


@dataclass(slots=True)
class Header:
    """The contents of a checkpoint, apart from the data.

    ``iterators`` are positions in data sets and states of random streams, which
    `section_of` tells apart. In a header that is to be saved, ``python`` holds text
    from `as_text`. ``created_unix_ns`` is when the save began; 0 before it has. In a
    header that is to be saved, ``group_of`` has the group of each replica, if they form
    any. ``math_threads`` are those of each rank's numerical libraries where the
    replicas were logical ones, else 0.
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


def checkpoint_name(step: int) -> str:
    """Return the file name of a step, such as ``ckpt-0000001200.h5``.

    Raises ValueError for a step that is negative, or has more than 18 digits.
    """
    if not 0 <= step < _MOST_STEPS:
        raise ValueError(f"expected 0 <= step < 10**18, found {step}; count from 0")
    return f"ckpt-{step:010d}.h5"


def step_of(path: str) -> int | None:
    """Return the step that the name of a path says; None for names of another form."""
    match = _NAME.fullmatch(os.path.basename(path))
    return None if match is None else int(match.group(1))


def list_checkpoints(directory: str) -> list[str]:
    """Return the checkpoints of a folder, which need not exist, oldest step first."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    steps = {name: step for name in names if (step := step_of(name)) is not None}
    # By number: steps of more than ten digits would be sorted wrongly by name.
    return [
        os.path.join(directory, name) for name in sorted(steps, key=steps.__getitem__)
    ]


def section_of(state: dict[str, Any]) -> str:
    """Return the group of the file to which one of a header's ``iterators`` belongs."""
    return "rng" if "bit_generator" in state else "iterators"


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """Return the name of a type, which NumPy works out anew each time."""
    return dtype.name


@functools.cache
def named_dtype(name: str) -> np.dtype[Any]:
    """Return the type of NumPy's name, or of ``bfloat16``, in native byte order."""
    if name == "bfloat16":
        # An optional library: whoever has a variable of the type has it.
        import ml_dtypes

        half: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return half
    return np.dtype(name)


def saved_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which values are stored: little-endian.

    bfloat16, which HDF5 does not name, is stored as its 16 bits.
    """
    if dtype_name(dtype) == "bfloat16":
        return np.dtype("<u2")
    return dtype.newbyteorder("<")
