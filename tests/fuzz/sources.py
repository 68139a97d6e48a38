"""The examples of datasets, and iterables of them, for both ranks and oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.fuzz.program import Op

__all__ = ["iterable_of", "per_replica", "rows_of"]


def rows_of(op: Op) -> Any:
    """Return the examples: distinct numbers whose sums are exact."""
    return np.arange(1.0, op.rows + 1)


class _Batches:
    """Global batches, shuffled at each iteration by an unseeded generator."""

    def __init__(self, op: Op) -> None:
        self._op = op

    def __iter__(self) -> Iterator[Any]:
        rows = rows_of(self._op)
        if self._op.form == "shuffling":
            np.random.default_rng().shuffle(rows)
        for start in range(0, len(rows), self._op.batch):
            yield rows[start : start + self._op.batch]


def per_replica(op: Op, pipelines: int, pipeline: int) -> list[Any]:
    """Return the batches of a worker's replicas, one batch per replica."""
    own = rows_of(op)[pipeline::pipelines]
    return [own[i : i + op.batch] for i in range(0, len(own), op.batch)]


def iterable_of(op: Op, context: Any) -> Any:
    """Return the iterable that a program passes to a strategy."""
    if op.form == "function":
        return per_replica(op, context.num_input_pipelines, context.input_pipeline_id)
    return list(_Batches(op)) if op.form == "list" else _Batches(op)
