"""The tree of a sum over logical replicas is the same for any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hpcstrat.engine.logical.tree_order import TreeOrder


def added(leaves: list[Any], level: int, number: int) -> Any:
    """Return the sum at a node of the tree, by its recursive definition."""
    if level == 0:
        return leaves[number]
    left = added(leaves, level - 1, 2 * number)
    if (2 * number + 1) << (level - 1) >= len(leaves):
        return left
    return left + added(leaves, level - 1, 2 * number + 1)


def _on_stack(order: TreeOrder, rank: int, leaves: list[Any]) -> list[bytes]:
    """Return a rank's partial sums, added as its replicas arrive one by one."""
    stack: list[Any] = []
    for replica, count in zip(order.block(rank), order.merges(rank), strict=True):
        stack.append(leaves[replica])
        for _ in range(count):
            upper = stack.pop()
            stack[-1] = stack[-1] + upper
        assert len(stack) <= len(leaves).bit_length() + len(order.roots(rank))
    return [total.tobytes() for total in stack]


@pytest.mark.parametrize("count", [*range(1, 33), 100])
def test_any_ranks_make_the_sum_of_one_tree(count: int) -> None:
    rng = np.random.default_rng(count)
    # Scale the values so differently that any other order changes some bits.
    scales = 10.0 ** rng.integers(-6, 7, (count, 3, 97))
    leaves = list(rng.standard_normal((count, 3, 97)) * scales)
    wanted = added(leaves, (count - 1).bit_length(), 0)
    for ranks in range(1, min(count, 9) + 1):
        order = TreeOrder(count, ranks)
        roots: list[Any] = []
        dealt: list[int] = []
        for rank in range(ranks):
            block = order.block(rank)
            assert all(order.owner(replica) == rank for replica in block)
            own = order.sum_roots(rank, [leaves[replica] for replica in block])
            assert _on_stack(order, rank, leaves) == [sum_.tobytes() for sum_ in own]
            # A rank has few partial sums, and one sum if its block is a whole subtree.
            assert len(own) == len(order.roots(rank)) <= 2 * count.bit_length()
            roots += own
            dealt += block
        assert dealt == list(range(count))
        assert order.sum_all(roots).tobytes() == wanted.tobytes()


def test_values_are_not_modified_and_blocks_may_be_long() -> None:
    rng = np.random.default_rng(0)
    leaves = list(rng.standard_normal((5, 100_003)).astype(np.float32))
    before = [leaf.copy() for leaf in leaves]
    [total] = TreeOrder(5, 1).sum_roots(0, leaves)
    assert total.tobytes() == added(before, 3, 0).tobytes()
    assert all(map(np.array_equal, leaves, before))
