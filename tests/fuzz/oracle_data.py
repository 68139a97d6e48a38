"""The oracle of datasets: the expected rows of each replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.fuzz.program import Op
from tests.fuzz.sources import per_replica, rows_of

__all__ = ["Reader"]


class Reader:
    """A dataset, and its read position.

    Attributes
    ----------
    place : (int, int)
        Epoch and row at which the next iteration begins, if this point is saved.
    """

    def __init__(self, op: Op) -> None:
        self._op = op
        self.rows = rows_of(op)
        self.unordered = op.form == "shuffling"
        self._next = self.place = (0, 0)
        self._restored = True

    @property
    def place(self) -> tuple[int, int]:
        """Return the position at which an iteration continues after a restore."""
        return self._place

    @place.setter
    def place(self, value: tuple[int, int]) -> None:
        self._place = self._next = value

    def epoch(self, workers: list[int], steps: int | None) -> Iterator[list[Any]]:
        """Yield the replicas' batches of each step."""
        if self._op.form == "function":
            every = self._dealt(workers)
        else:
            every = self._cut(len(workers))
        for number, batches in enumerate(every):
            yield batches
            if steps is not None and number + 1 >= steps:
                return
        if self._op.form == "rows":
            self._place = (self._next[0], 0)

    def _cut(self, size: int) -> Iterator[list[Any]]:
        rows, start = self.rows, 0
        if self._op.form == "rows":
            epoch, start = self._next
            if self._op.shuffle:
                key = np.random.SeedSequence((self._op.seed or 0, epoch))
                bits = np.random.Philox(key)
                rows = rows[np.random.Generator(bits).permutation(len(rows))]
            self._next = (epoch + 1, 0)
            self._place = (epoch, start)
        while start < len(rows):
            batch = rows[start : start + self._op.batch]
            start += len(batch)
            if self._op.form == "rows":
                self._place = (self._place[0], start)
            most = -(-len(batch) // size)
            yield [batch[rank * most : (rank + 1) * most] for rank in range(size)]

    def _dealt(self, workers: list[int]) -> Iterator[list[Any]]:
        count = max(workers) + 1
        batches = [per_replica(self._op, count, worker) for worker in range(count)]
        places = [0] * count
        while any(places[w] < len(batches[w]) for w in range(count)):
            step = []
            for worker in workers:
                left = batches[worker][places[worker] :]
                step.append(left[0] if left else self.rows[:0])
                places[worker] += 1
            yield step
