"""One batch: its rows, and the pieces into which it is cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.tree import flatten, tree_map
from hpcstrat.engine.typing import Array, Tree

__all__ = [
    "as_batch",
    "batch_length",
    "empty_like",
    "own_array",
    "owned_first",
    "piece",
    "pieces_of",
    "rows_of",
    "share",
    "warn_of_idle",
    "writable",
]


def piece(length: int, num_replicas: int, replica_id: int) -> tuple[int, int]:
    """Return where a replica's piece of a batch begins and ends.

    The last replicas may get fewer rows, or none.
    """
    # As tf.distribute rounds: up, so that the last replicas bear what is missing.
    size = -(-length // num_replicas)
    return min(replica_id * size, length), min((replica_id + 1) * size, length)


def share(length: int, num_replicas: int, replica_id: int) -> tuple[int, int]:
    """Return where a replica's rows of a batch begin and end, for other libraries.

    As even as can be, so that none is without rows where there is one for each: unlike
    pieces, of which the last replicas may have none, and many layers fail without rows.
    """
    first = replica_id * length // num_replicas
    return first, (replica_id + 1) * length // num_replicas


def owned_first(owners: Array, num_replicas: int) -> Array:
    """Return an order of a batch's rows in which replicas' pieces have their own rows.

    ``owners`` has the replica that owns each row, int64. Each replica takes the first
    of its rows that fit into its `piece`; what is left over fills the rest, in order.
    """
    length = len(owners)
    ends = [piece(length, num_replicas, r) for r in range(num_replicas)]
    starts = np.array([first for first, _ in ends])
    room = np.array([last - first for first, last in ends])
    by_owner = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=num_replicas)
    before = np.cumsum(counts) - counts
    sorted_owners = owners[by_owner]
    # Number of each row among those of its owner.
    number = np.arange(length) - before[sorted_owners]
    stays = number < room[sorted_owners]
    order = np.full(length, -1, np.int64)
    order[(starts[sorted_owners] + number)[stays]] = by_owner[stays]
    order[order < 0] = np.sort(by_owner[~stays])
    return order


def as_batch(element: Tree) -> Tree:
    """Return an element of a program's iterable with arrays as leaves."""
    return tree_map(_leaf, element)


def batch_length(
    batch: Tree,
    *,
    expected: str = "batches whose arrays have the same first dimension",
    advice: str = "batch the data set by its global batch size",
) -> int:
    """Return the number of rows of a batch.

    Raises ValueError for scalars, and arrays of different lengths.
    """
    leaves = flatten(batch)[0]
    lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(lengths) != 1 or -1 in lengths:
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(f"expected {expected}, found shapes {shapes}; {advice}")
    return int(lengths.pop())


def rows_of(batch: Tree, start: int, stop: int) -> Tree:
    """Return some rows of a batch, as views."""
    return tree_map(lambda array: array[start:stop], batch)


def empty_like(batch: Tree) -> Tree:
    """Return a batch of the same structure with no rows; None for scalars."""
    if not all(leaf.ndim for leaf in flatten(batch)[0]):
        return None
    # A view would keep the batch in the memory of a GPU.
    return tree_map(lambda array: array[0:0].copy(), batch)


def writable(batch: Tree) -> Tree:
    """Return a batch that the program may write, copies of what it may not.

    A copy takes less time than the rows of a shuffled data set, which are copies
    anyway; and other libraries take read-only memory as if they could write to it, or
    not at all.
    """
    return tree_map(
        lambda leaf: (
            leaf if is_device(leaf) or leaf.flags.writeable else np.array(leaf)
        ),
        batch,
    )


def pieces_of(batch: Tree, num_replicas: int, replicas: Sequence[int]) -> list[Tree]:
    """Cut a batch by itself; return the pieces of ``replicas``, as views."""
    length = batch_length(batch)
    return [rows_of(batch, *piece(length, num_replicas, r)) for r in replicas]


# The cache is what makes it once; its bound, for data whose batches all differ.
@functools.lru_cache(maxsize=1024)
def warn_of_idle(length: int, num_replicas: int) -> None:
    """Warn, once in a program, where replicas get no rows of a batch."""
    most = -(-length // num_replicas)
    busy = -(-length // most) if most else num_replicas
    if busy < num_replicas:
        get_logger("data").warning(
            "global batches of %d rows leave %d of %d replicas without rows, and give "
            "up to %d to each of the others; with a batch size of %d, which takes as "
            "long, all have %d",
            length,
            num_replicas - busy,
            num_replicas,
            most,
            most * num_replicas,
            most,
        )


def own_array(value: Any) -> Array:
    """Return a copy of a leaf of a batch, in its library, as an array."""
    array = _leaf(value)
    return array.copy() if is_device(array) else np.array(array)


def _leaf(value: Any) -> Array:
    """Return a leaf of a batch as an array; its parts travel pickled.

    So it may be text of any length, and fields may be Python objects, which no
    collective call takes.
    """
    plain = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    refers = plain and value.dtype.hasobject and value.dtype.kind != "O"
    return value if refers else as_array(value)
