"""A small stand-in for tf.data: sources and transforms, iterated lazily.

This test class has the attributes that any user's iterable of global batches may have,
besides ``__iter__``: ``batch_size`` (the declared global batch size, None if unknown),
``drop_remainder`` (whether all elements have one shape), ``auto_shard_policy``,
``files`` (None, or one entry for each file) and ``shard_files(num_shards, index)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

import hpcstrat as hs

__all__ = ["Pipeline"]

Stage = Callable[[], Iterator[Any]]


def _combine(function: Callable[..., Any], elements: list[Any]) -> Any:
    """Apply ``function`` to the arrays of elements, by columns if they are dicts."""
    if isinstance(elements[0], dict):
        return {
            key: function([element[key] for element in elements]) for key in elements[0]
        }
    return function(elements)


def _source(spec: dict[str, Any]) -> Stage:
    """Return a function that makes iterators of a source."""
    if "range" in spec:
        count = spec["range"]
        bounds = count if isinstance(count, list) else [count]
        return lambda: (np.asarray(i, np.int64) for i in range(*bounds))
    if "files" in spec:
        files = spec["files"]
        return lambda: (np.asarray(i, np.int64) for file in files for i in file)
    if "dict" in spec:
        columns = {k: np.asarray(v, np.float32) for k, v in spec["dict"].items()}
        length = min(len(column) for column in columns.values())
        return lambda: (
            {k: np.asarray(column[i]) for k, column in columns.items()}
            for i in range(length)
        )
    rows = spec["ragged_batches"] if "ragged_batches" in spec else spec["elements"]
    return lambda: (np.array(row, np.float32) for row in rows)


def _batch(upstream: Stage, size: int, *, drop_remainder: bool) -> Stage:
    """Return a stage that stacks ``size`` elements into one."""

    def iterate() -> Iterator[Any]:
        elements = upstream()
        while chunk := list(itertools.islice(elements, size)):
            if len(chunk) == size or not drop_remainder:
                yield _combine(np.stack, chunk)

    return iterate


def _repeat(upstream: Stage, times: int) -> Stage:
    """Return a stage that repeats its input; a negative number repeats without end."""

    def iterate() -> Iterator[Any]:
        rounds = itertools.count() if times < 0 else range(times)
        for _ in rounds:
            empty = True
            for element in upstream():
                empty = False
                yield element
            # Without this check, a source without elements would loop without end.
            if empty:
                return

    return iterate


def _map_mul(upstream: Stage, factor: float) -> Stage:
    """Return a stage that multiplies every array."""

    def multiply(arrays: list[Any]) -> Any:
        array = arrays[0]
        return array * np.asarray(factor, array.dtype)

    return lambda: (_combine(multiply, [element]) for element in upstream())


def _transform(upstream: Stage, spec: dict[str, Any]) -> Stage:
    """Return the stage of one transform."""
    if "batch" in spec:
        drop = bool(spec.get("drop_remainder", False))
        return _batch(upstream, spec["batch"], drop_remainder=drop)
    if "repeat" in spec:
        times = spec["repeat"]
        return _repeat(upstream, -1 if times is None else times)
    if "take" in spec:
        count = spec["take"]
        return lambda: itertools.islice(upstream(), count if count >= 0 else None)
    if "skip" in spec:
        return lambda: itertools.islice(upstream(), spec["skip"], None)
    if "shard" in spec:
        num_shards, index = spec["shard"]
        return lambda: itertools.islice(upstream(), index, None, num_shards)
    if "map_mul" in spec:
        return _map_mul(upstream, spec["map_mul"])
    raise KeyError(f"unknown transform {spec}")


class Pipeline:
    """Elements of a source after transforms; each iteration starts again."""

    def __init__(
        self,
        source: dict[str, Any],
        transforms: Sequence[dict[str, Any]] = (),
        auto_shard_policy: str | None = None,
    ) -> None:
        self._source = source
        self._transforms = list(transforms)
        self._policy_name = auto_shard_policy
        self.auto_shard_policy = hs.AutoShardPolicy[auto_shard_policy or "AUTO"]
        self.files = source.get("files")
        self._stage = _source(source)
        for spec in self._transforms:
            self._stage = _transform(self._stage, spec)
        batches = [spec for spec in self._transforms if "batch" in spec]
        sized = [spec for spec in self._transforms if {"batch", "map_mul"} & set(spec)]
        self.batch_size: int | None = None
        if batches:
            # TensorFlow knows no batch size after a map of batches with several sizes.
            known = "batch" in sized[-1] or batches[-1].get("drop_remainder")
            self.batch_size = batches[-1]["batch"] if known else None
        elif "elements" in source:
            # All elements have one shape.
            first = np.array(source["elements"][:1], np.float32)
            self.batch_size = first.shape[1] if first.ndim > 1 else None
        self.drop_remainder = (
            bool(batches[-1].get("drop_remainder", False))
            if batches
            else "ragged_batches" not in source
        )

    def shard_files(self, num_shards: int, index: int) -> Pipeline:
        """Return the pipeline over every ``num_shards``-th file, from ``index`` on."""
        if self.files is None:
            raise ValueError("expected a source of files to divide, found none")
        source = {"files": self.files[index::num_shards]}
        return Pipeline(source, self._transforms, self._policy_name)

    def __iter__(self) -> Iterator[Any]:
        """Start a new iteration."""
        return self._stage()
