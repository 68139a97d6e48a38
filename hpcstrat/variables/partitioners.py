"""Partitioners cut variables into shards; a shard is on one parameter server."""

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
    """Returns the number of parts of a variable along each of its dimensions."""

    @abstractmethod
    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Return the number of parts along each dimension: 1 except for ``axis``."""


class FixedShardsPartitioner(Partitioner):
    """A fixed number of shards; fewer if there are not enough rows.

    Parameters
    ----------
    num_shards : int
        At least 1.

    Raises
    ------
    ValueError
        For less.

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
    """As many shards as there can be of a least size.

    Parameters
    ----------
    min_shard_bytes : int
        Least size of a shard, in bytes.
    max_shards : int
        Most shards.
    bytes_per_string : int
        Accepted for tf.distribute's sake: there are no variables of texts.

    Raises
    ------
    ValueError
        For numbers below 1.

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
    """As few shards as there can be of a largest size.

    Parameters
    ----------
    max_shard_bytes : int
        Largest size of a shard, in bytes; a row is never cut.
    max_shards : int, optional
        Most shards, which may then be larger.
    bytes_per_string : int
        Accepted for tf.distribute's sake: there are no variables of texts.

    Raises
    ------
    ValueError
        For numbers below 1.

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
        # No shard is empty.
        parts[axis] = max(1, min(wanted, shape[axis]))
    return parts
