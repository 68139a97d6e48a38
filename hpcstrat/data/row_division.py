"""Rules by which replicas divide the rows of a global batch.

A division never changes which rows are in a batch: it orders them, so that the rows of
each replica are adjacent.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import numpy as np

from hpcstrat.data.batches import owned_first, piece, share
from hpcstrat.engine.typing import Array

__all__ = [
    "CostDivision",
    "OwnRowDivision",
    "RowDivision",
    "ShareDivision",
    "divide_by_cost",
]

_KEPT_PLANS = 8


class RowDivision(Protocol):
    """A division of the batch from position ``start`` to ``stop`` of an epoch."""

    words: str

    def order(self, epoch: int, start: int, stop: int) -> Array:
        """Return the order of the batch's rows (int64 from 0), replica by replica."""
        ...

    def part(self, epoch: int, start: int, stop: int, replica: int) -> tuple[int, int]:
        """Return start and end of a replica's rows in this order."""
        ...


class ShareDivision:
    """Gives successive rows to replicas in equal shares, which differ by one row."""

    words = "in equal shares"

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def order(self, epoch: int, start: int, stop: int) -> Array:
        return np.arange(stop - start)

    def part(self, epoch: int, start: int, stop: int, replica: int) -> tuple[int, int]:
        return share(stop - start, self._num_replicas, replica)


class OwnRowDivision:
    """Gives rows to the replicas that own them, in pieces of equal size.

    Each replica owns an equal part of the source's rows, so that a rank reads mostly
    the same rows, from its cache, in each epoch. The method is SOLAR (Sun et al. 2022,
    arXiv:2211.00224). ``homes`` returns the numbers, below ``num_homes``, of the rows
    at places of an epoch.
    """

    words = "own rows first"

    def __init__(
        self, homes: Callable[[slice, int], Array], num_homes: int, num_replicas: int
    ) -> None:
        self._homes, self._num_homes = homes, num_homes
        self._num_replicas = num_replicas

    def order(self, epoch: int, start: int, stop: int) -> Array:
        homes = self._homes(slice(start, stop), epoch)
        owners = homes * self._num_replicas // self._num_homes
        return owned_first(owners, self._num_replicas)

    def part(self, epoch: int, start: int, stop: int, replica: int) -> tuple[int, int]:
        return piece(stop - start, self._num_replicas, replica)


class CostDivision:
    """Gives rows to replicas so that the largest sum of costs of a replica is small.

    ``costs`` returns the costs of the rows at places of an epoch.
    """

    words = "divided by cost"

    def __init__(
        self,
        costs: Callable[[slice, int], Array],
        num_replicas: int,
        *,
        equal_rows: bool,
    ) -> None:
        def plan(epoch: int, start: int, stop: int) -> tuple[Array, list[int]]:
            found = costs(slice(start, stop), epoch)
            return divide_by_cost(found, num_replicas, equal_rows=equal_rows)

        # Threads that read ahead, and the replicas of a rank, ask for the same plans.
        self._plan = lru_cache(_KEPT_PLANS)(plan)

    def order(self, epoch: int, start: int, stop: int) -> Array:
        return self._plan(epoch, start, stop)[0]

    def part(self, epoch: int, start: int, stop: int, replica: int) -> tuple[int, int]:
        ends = self._plan(epoch, start, stop)[1]
        return ends[replica], ends[replica + 1]


def divide_by_cost(
    costs: Array, num_replicas: int, *, equal_rows: bool = False
) -> tuple[Array, list[int]]:
    """Divide rows between replicas so that the largest sum of costs is small.

    The rows go to replicas in decreasing order of cost, each to the replica with the
    smallest sum so far: "longest processing time first", whose largest sum is at most
    4/3 of the smallest possible one (Graham 1969, doi:10.1137/0117039). Of equal sums,
    the replica with fewer rows, then the lower number, is first; of equal costs, the
    lower row is first. With ``equal_rows`` numbers of rows differ by at most one.

    Returns the order of the rows, replica by replica and increasing within a replica,
    and the ``num_replicas + 1`` places in this order where the replicas' rows begin.
    """
    # A replica takes at most this many rows, and ``extra`` replicas one row more.
    most, extra = len(costs), 0
    if equal_rows:
        most, extra = divmod(len(costs), num_replicas)
    by_cost = np.argsort(-costs, kind="stable")
    chosen: list[int] = []
    # Plain lists and a heap take 0.4 microseconds for each row.
    heap, exchange = [(0.0, 0, r) for r in range(num_replicas)], heapq.heapreplace
    for cost in costs[by_cost].tolist():
        total, count, replica = heap[0]
        while count == most and not extra:
            heapq.heappop(heap)
            total, count, replica = heap[0]
        chosen.append(replica)
        if count < most:
            exchange(heap, (total + cost, count + 1, replica))
        else:
            extra -= 1
            heapq.heappop(heap)
    replicas = np.empty(len(costs), np.int64)
    replicas[by_cost] = chosen
    counts = np.bincount(replicas, minlength=num_replicas)
    return np.argsort(replicas, kind="stable"), [0, *np.cumsum(counts).tolist()]
