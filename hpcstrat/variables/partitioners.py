"""Partitioners divide variables into shards, each stored on one parameter server."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


class Partitioner(ABC):
    """Base class of callables that return the number of a variable's parts per axis."""

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts along each dimension: 1, except along ``axis``."""


class FixedShardsPartitioner(Partitioner):
    """Divide a variable into a fixed number of shards, or fewer if it has fewer rows.

    Parameters
    ----------
    num_shards : int
        Number of shards, at least 1.

    Raises
    ------
    ValueError
        If ``num_shards`` is less than 1.

    Examples
    --------
    >>> FixedShardsPartitioner(2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _positive("num_shards", num_shards)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        return _parts(shape, axis, self._num_shards)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._num_shards})"


class MinSizePartitioner(Partitioner):
    """Divide a variable into as many shards as a minimum shard size allows.

    Parameters
    ----------
    min_shard_bytes : int
        Minimum size of a shard, in bytes.
    max_shards : int
        Maximum number of shards.
    bytes_per_string : int
        Ignored, because variables cannot contain strings.

    Raises
    ------
    ValueError
        If an argument is less than 1.

    Examples
    --------
    >>> MinSizePartitioner(min_shard_bytes=16, max_shards=4)((6, 2), "float32")
    [3, 1]
    """

    def __init__(
        self,
        min_shard_bytes: int = 256 << 10,
        max_shards: int = 1,
        bytes_per_string: int = 16,
    ) -> None:
        self._least = _positive("min_shard_bytes", min_shard_bytes)
        self._most = _positive("max_shards", max_shards)
        _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        return _parts(shape, axis, min(self._most, max(1, nbytes // self._least)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._least}, {self._most})"


class MaxSizePartitioner(Partitioner):
    """Divide a variable into as few shards as a maximum shard size allows.

    Parameters
    ----------
    max_shard_bytes : int
        Maximum size of a shard, in bytes. Rows are never divided.
    max_shards : int, optional
        Maximum number of shards; shards may then be larger than ``max_shard_bytes``.
    bytes_per_string : int
        Ignored, because variables cannot contain strings.

    Raises
    ------
    ValueError
        If an argument is less than 1.

    Examples
    --------
    >>> MaxSizePartitioner(max_shard_bytes=16)((6, 2), "float32")
    [3, 1]
    """

    def __init__(
        self,
        max_shard_bytes: int,
        max_shards: int | None = None,
        bytes_per_string: int = 16,
    ) -> None:
        self._largest = _positive("max_shard_bytes", max_shard_bytes)
        self._most = None if max_shards is None else _positive("max_shards", max_shards)
        _positive("bytes_per_string", bytes_per_string)

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        length = shape[axis] if shape else 1
        row_bytes = math.prod(shape) * np.dtype(dtype).itemsize // max(1, length)
        rows = max(1, self._largest // max(1, row_bytes))
        wanted = max(1, -(-length // rows))
        return _parts(shape, axis, min(wanted, self._most or wanted))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._largest}, {self._most})"


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"expected {name} >= 1, found {value}; change it")
    return int(value)


def _parts(shape: Sequence[int], axis: int, wanted: int) -> list[int]:
    parts = [1] * len(shape)
    if shape:
        # The number of shards is at most the number of rows, so that no shard is empty.
        parts[axis] = max(1, min(wanted, shape[axis]))
    return parts
