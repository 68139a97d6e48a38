"""The summation tree of logical replicas: the same for any number of ranks.

The replicas are the leaves of a balanced binary tree, cut off after the last replica.
Every sum is computed in the order of this tree, so that its bits depend only on the
number of replicas. Each rank has a block of consecutive replicas. The rank adds up the
largest complete subtrees of its block, and sends only the sums at their roots to the
other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array

__all__ = ["TreeOrder"]

# Number of elements added at a time, so that intermediate sums stay in cache.
_BLOCK = 1 << 15

Empty = Callable[[tuple[int, ...], np.dtype[Any]], Array]
"""Function that makes an array of a shape and type."""

_Node = tuple[int, int]
"""A subtree: the number of levels below its root, and its index at that level."""


@dataclass(frozen=True)
class TreeOrder:
    """A tree of ``num_replicas`` leaves, split into blocks for ``num_ranks`` ranks.

    There are at least as many replicas as ranks. If a sum overflows, NumPy warns,
    unless the caller uses `hpcstrat.engine.arrays.casting.without_fp_warnings`.
    """

    num_replicas: int
    num_ranks: int

    def block(self, rank: int) -> range:
        """Return the range of replicas that a rank has."""
        count, ranks = self.num_replicas, self.num_ranks
        return range(rank * count // ranks, (rank + 1) * count // ranks)

    def owner(self, replica: int) -> int:
        """Return the rank that has a replica."""
        return ((replica + 1) * self.num_ranks - 1) // self.num_replicas

    @property
    def top(self) -> _Node:
        """The root of the whole tree."""
        return (self.num_replicas - 1).bit_length(), 0

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - of frozen objects, one each job
    def roots(self, rank: int) -> list[_Node]:
        """Return the largest subtrees whose leaves all belong to a rank, in order."""
        block = self.block(rank)
        found: list[_Node] = []

        def look(level: int, number: int) -> None:
            first = number << level
            last = min((number + 1) << level, self.num_replicas)
            if last <= block.start or first >= min(block.stop, self.num_replicas):
                return
            if block.start <= first and last <= block.stop:
                found.append((level, number))
            else:
                look(level - 1, 2 * number)
                look(level - 1, 2 * number + 1)

        look(*self.top)
        return found

    @functools.lru_cache(maxsize=1024)  # noqa: B019 - as above
    def merges(self, rank: int) -> list[int]:
        """Return how many pairs to add after each replica of a rank, in replica order.

        The sum is computed on a stack: the value of each replica is pushed, then the
        two topmost values are replaced by their sum this many times. At the end, the
        stack contains the sums at the rank's roots.
        """
        found: list[int] = []

        def go_down(level: int, number: int) -> None:
            if level == 0:
                found.append(0)
                return
            go_down(level - 1, 2 * number)
            right = 2 * number + 1
            if right << level - 1 < self.num_replicas:
                go_down(level - 1, right)
                found[-1] += 1

        for root in self.roots(rank):
            go_down(*root)
        return found

    @property
    def is_pair(self) -> bool:
        """True if the sum has two terms: one root on each of two ranks."""
        return self.num_ranks == 2 and all(len(self.roots(r)) == 1 for r in (0, 1))

    def sum_roots(
        self,
        rank: int,
        values: Sequence[Array],
        empty: Empty = np.empty,
        function: np.ufunc = np.add,
    ) -> list[Array]:
        """Add the values of a rank's replicas; return one array for each of its roots.

        ``values`` has one contiguous array per replica, all of one type and shape; they
        are not modified. If a root is a single replica, its result is that replica's
        array itself. ``empty`` allocates the other results. ``function`` combines two
        terms.
        """
        first = self.block(rank).start
        leaves = {(0, first + i): value for i, value in enumerate(values)}
        return [self._added(n, leaves, empty, function) for n in self.roots(rank)]

    def sum_all(self, roots: Sequence[Array], function: np.ufunc = np.add) -> Array:
        """Add the values at the roots of all ranks; ``roots`` is in rank order."""
        nodes = [n for rank in range(self.num_ranks) for n in self.roots(rank)]
        known = dict(zip(nodes, roots, strict=True))
        return self._added(self.top, known, np.empty, function)

    def _added(
        self,
        node: _Node,
        known: dict[_Node, Array],
        empty: Empty,
        function: np.ufunc,
    ) -> Array:
        """Return the sum at a node, computed from the known sums of its subtrees."""
        if node in known:
            return known[node]
        level, number = node
        left, right = (level - 1, 2 * number), (level - 1, 2 * number + 1)
        if right[1] << right[0] >= self.num_replicas:
            # The right subtree has no replicas: there is nothing to add.
            return self._added(left, known, empty, function)
        like = next(iter(known.values()))
        total = empty(like.shape, like.dtype)
        if like.size <= _BLOCK:
            self._add(node, known, total, function)
            return total
        flat = total.reshape(-1)
        flats = {key: value.reshape(-1) for key, value in known.items()}
        for start in range(0, flat.size, _BLOCK):
            part = slice(start, start + _BLOCK)
            some = {k: v[part] for k, v in flats.items()}
            self._add(node, some, flat[part], function)
        return total

    def _add(
        self, node: _Node, known: dict[_Node, Array], out: Array, function: np.ufunc
    ) -> Array:
        """Return a node's value if it is known; if not, add its leaves into ``out``."""
        if node in known:
            return known[node]
        level, number = node
        right = level - 1, 2 * number + 1
        if right[1] << right[0] >= self.num_replicas:
            return self._add((level - 1, 2 * number), known, out, function)
        first = self._add((level - 1, 2 * number), known, out, function)
        second = self._add(right, known, np.empty_like(out), function)
        function(first, second, out=out)
        return out
