"""One batch: its rows, and the pieces into which it is cut."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.arrays.kinds import as_array, is_device
from hpcstrat.logs import get_logger
from hpcstrat.tree import flatten, tree_map
from hpcstrat.typing import Array, Tree

__all__ = [
    "as_batch",
    "batch_length",
    "empty_like",
    "own_array",
    "piece",
    "pieces_of",
    "rows_of",
    "warn_of_idle",
    "writable",
]


def piece(length: int, num_replicas: int, replica_id: int) -> tuple[int, int]:
    """Return which rows of a batch are a replica's piece.

    Not collective.

    Parameters
    ----------
    length : int
        Rows of the batch.
    num_replicas : int
        Number of pieces.
    replica_id : int
        Which piece.

    Returns
    -------
    start, stop : int
        Where it begins and ends; the last replicas may get fewer rows, or none.
    """
    size = -(-length // num_replicas)
    return min(replica_id * size, length), min((replica_id + 1) * size, length)


def as_batch(element: Tree) -> Tree:
    """Return a batch with arrays as leaves.

    Not collective.

    Parameters
    ----------
    element : tree of array_like
        A batch, as a program's iterable gives it.

    Returns
    -------
    tree of ndarray
        The same structure.
    """
    return tree_map(_leaf, element)


def batch_length(batch: Tree) -> int:
    """Return the number of rows of a batch.

    Not collective.

    Parameters
    ----------
    batch : tree of ndarray
        Any batch.

    Returns
    -------
    int
        That of each array.

    Raises
    ------
    ValueError
        For scalars, and arrays of different lengths.
    """
    leaves = flatten(batch)[0]
    lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(lengths) != 1 or -1 in lengths:
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(
            "expected batches whose arrays have the same first dimension, found shapes "
            f"{shapes}; batch the data set by its global batch size"
        )
    return int(lengths.pop())


def rows_of(batch: Tree, start: int, stop: int) -> Tree:
    """Return some rows of a batch, as views.

    Not collective.

    Parameters
    ----------
    batch : tree of ndarray, each of shape (n, ...)
        Any batch.
    start, stop : int
        Which rows.

    Returns
    -------
    tree of ndarray
        The same structure.
    """
    return tree_map(lambda array: array[start:stop], batch)


def empty_like(batch: Tree) -> Tree:
    """Return a batch of the same structure with no rows.

    Not collective.

    Parameters
    ----------
    batch : tree of ndarray, each of shape (n, ...) or ()
        Any batch.

    Returns
    -------
    tree of ndarray, each of shape (0, ...), or None
        Of the same dtypes; None for scalars, which have no rows to leave out.
    """
    if not all(leaf.ndim for leaf in flatten(batch)[0]):
        return None
    # A view would keep the batch in the memory of a GPU.
    return tree_map(lambda array: array[0:0].copy(), batch)


def writable(batch: Tree) -> Tree:
    """Return a batch that the program may write, copies of what it may not.

    Not collective. A copy takes less time than the rows of a shuffled data set, which
    are copies anyway; and other libraries take read-only memory as if they could write
    to it, or not at all.

    Parameters
    ----------
    batch : tree of ndarray
        Of either library.

    Returns
    -------
    tree of ndarray
        The arrays themselves, where they can be written.
    """
    return tree_map(
        lambda leaf: (
            leaf if is_device(leaf) or leaf.flags.writeable else np.array(leaf)
        ),
        batch,
    )


def pieces_of(element: Tree, num_replicas: int, replicas: Sequence[int]) -> list[Tree]:
    """Cut a batch by itself.

    Not collective.

    Parameters
    ----------
    element : tree of array_like, each of shape (n, ...)
        A global batch.
    num_replicas : int
        Number of pieces.
    replicas : sequence of int
        Which pieces are wanted.

    Returns
    -------
    list of tree of ndarray
        Views of the pieces wanted.

    Raises
    ------
    ValueError
        For scalars, and arrays of different lengths.
    """
    batch = as_batch(element)
    length = batch_length(batch)
    return [rows_of(batch, *piece(length, num_replicas, r)) for r in replicas]


@functools.lru_cache(maxsize=1024)
def warn_of_idle(length: int, num_replicas: int) -> None:
    """Warn, once in a program, where replicas get no rows of a batch.

    Not collective.

    Parameters
    ----------
    length : int
        Rows of the global batch.
    num_replicas : int
        Number of pieces.
    """
    most = -(-length // num_replicas)
    busy = -(-length // most) if most else num_replicas
    if busy < num_replicas:
        get_logger("data").warning(
            "global batches of %d rows leave %d of %d replicas without rows, and give "
            "up to %d to each of the others; with a batch size of %d, which takes as "
            "long, all have %d",
            *(length, num_replicas - busy, num_replicas),
            *(most, most * num_replicas, most),
        )


def own_array(value: Any) -> Array:
    """Return a copy of an array, or what else can be a leaf of a batch, as an array.

    Not collective.

    Parameters
    ----------
    value : array_like
        A pipeline may fill the same buffer again.

    Returns
    -------
    ndarray
        In the library of the value.
    """
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
