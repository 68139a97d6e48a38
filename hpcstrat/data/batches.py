"""Division of the rows of batches between replicas.

Batches are cut by two rules of tf.distribute. *Pieces*: each batch is cut into pieces
of ``ceil(length / replicas)`` rows. If all workers read the same batches, each worker
uses the pieces of its own replicas. If each worker reads its own batches, the worker
deals all pieces to its replicas in turn. *Slots*: the declared batch size is divided
into one slot per replica; the first slots may have one row more. The rows of all
batches, one after another, fill the slots.

If a batch cannot be read or cut, the iterators leave out only this batch and continue,
if the program's own iterator can continue.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from hpcstrat.data.elements import CallIterator, writable
from hpcstrat.engine.arrays.kinds import array_module, as_array, is_device
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Array, Tree

__all__ = [
    "as_batch",
    "batch_length",
    "deal_elements",
    "deal_pieces",
    "empty_like",
    "owned_first",
    "piece",
    "pieces_of",
    "pour_slots",
    "rows_of",
    "share",
    "slot_sizes",
    "warn_of_idle",
    "writable",
]

_END = object()


def piece(length: int, num_replicas: int, replica_id: int) -> tuple[int, int]:
    """Return start and end row of a replica's piece of a batch, which may be empty."""
    # Round up, as tf.distribute does, so that only the last replicas have fewer rows.
    size = -(-length // num_replicas)
    return min(replica_id * size, length), min((replica_id + 1) * size, length)


def share(length: int, num_replicas: int, replica_id: int) -> tuple[int, int]:
    """Return start and end row of a replica's share, for batches of other libraries.

    Shares differ by at most one row, whereas a `piece` may be empty; many layers of
    other libraries fail without rows.
    """
    first = replica_id * length // num_replicas
    return first, (replica_id + 1) * length // num_replicas


def owned_first(owners: Array, num_replicas: int) -> Array:
    """Return an order of a batch's rows that puts rows into their owners' pieces.

    ``owners`` (int64) has the replica that owns each row. Rows that do not fit into the
    `piece` of their owner fill the free places of other pieces, in order.
    """
    length = len(owners)
    ends = [piece(length, num_replicas, r) for r in range(num_replicas)]
    starts = np.array([first for first, _ in ends])
    room = np.array([last - first for first, last in ends])
    by_owner = np.argsort(owners, kind="stable")
    counts = np.bincount(owners, minlength=num_replicas)
    before = np.cumsum(counts) - counts
    sorted_owners = owners[by_owner]
    # The number of each row among the rows of its owner.
    number = np.arange(length) - before[sorted_owners]
    stays = number < room[sorted_owners]
    order = np.full(length, -1, np.int64)
    order[(starts[sorted_owners] + number)[stays]] = by_owner[stays]
    order[order < 0] = np.sort(by_owner[~stays])
    return order


def as_batch(element: Tree) -> Tree:
    """Return an element of the program's iterable, with its leaves as arrays."""
    return tree_map(_leaf, element)


def batch_length(
    batch: Tree,
    *,
    expected: str = "batches whose arrays have the same first dimension",
    advice: str = "batch the data set by its global batch size",
) -> int:
    """Return the number of rows of a batch; ValueError if it differs between arrays."""
    leaves = flatten(batch)[0]
    lengths = {leaf.shape[0] if leaf.ndim else -1 for leaf in leaves}
    if len(lengths) != 1 or -1 in lengths:
        shapes = [leaf.shape for leaf in leaves]
        raise ValueError(f"expected {expected}, found shapes {shapes}; {advice}")
    return int(lengths.pop())


def rows_of(batch: Tree, start: int, stop: int) -> Tree:
    return tree_map(lambda array: array[start:stop], batch)


def empty_like(batch: Tree) -> Tree:
    """Return a batch of 0 rows of the same structure; None if a leaf is a scalar."""
    if not all(leaf.ndim for leaf in flatten(batch)[0]):
        return None
    # Copy, because a view would keep the whole batch in GPU memory.
    return tree_map(lambda array: array[0:0].copy(), batch)


def pieces_of(batch: Tree, num_replicas: int, replicas: Sequence[int]) -> list[Tree]:
    """Cut a batch into pieces, and return the pieces of ``replicas`` as views."""
    length = batch_length(batch)
    return [rows_of(batch, *piece(length, num_replicas, r)) for r in replicas]


# The cache makes each batch length warn only once; it is bounded to 1,024 lengths.
@functools.lru_cache(maxsize=1024)
def warn_of_idle(length: int, num_replicas: int) -> None:
    """Warn, once for each batch length, if some replicas get no rows of a batch."""
    most = -(-length // num_replicas)
    busy = -(-length // most) if most else num_replicas
    if busy < num_replicas:
        get_logger("data").warning(
            "in global batches of %d rows, %d of %d replicas have no rows, and each of "
            "the others has up to %d; with a batch size of %d, a step takes as long, "
            "and each replica has %d rows",
            length,
            num_replicas - busy,
            num_replicas,
            most,
            most * num_replicas,
            most,
        )


def _own_array(value: Any) -> Array:
    """Return a copy of a leaf of a batch, as a NumPy or (on GPUs) CuPy array."""
    array = _leaf(value)
    return array.copy() if is_device(array) else np.array(array)


def _leaf(value: Any) -> Array:
    """Return a leaf as an array; unlike `as_array`, allow strings and object fields."""
    plain = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    refers = plain and value.dtype.hasobject and value.dtype.kind != "O"
    return value if refers else as_array(value)


def slot_sizes(batch_size: int, num_replicas: int) -> list[int]:
    """Return the number of rows in each replica's slot; the sum is ``batch_size``."""
    low, more = divmod(batch_size, num_replicas)
    return [low + (replica < more) for replica in range(num_replicas)]


def pour_slots(
    batches: Iterable[Tree],
    batch_size: int,
    num_replicas: int,
    replicas: Sequence[int],
) -> Iterator[list[Tree]]:
    """Fill the replicas' slots with the rows of all batches, as one stream.

    ``replicas`` are the worker's replicas. The worker begins with the slot of its first
    replica, and then uses the slots of all replicas in a cycle. Each step has one part
    per replica of the worker. A step raises ValueError for scalars and for arrays of
    different lengths.
    """
    slots = slot_sizes(batch_size, num_replicas)
    rows, count, first = _RowQueue(batches), len(replicas), replicas[0]

    def step() -> list[Tree]:
        nonlocal first
        sizes = [slots[slot % num_replicas] for slot in range(first, first + count)]
        # Rows that were read before an error are kept for the next step. A step whose
        # slots have 0 rows reads nothing, so that it may be one step after the end.
        if not rows.fill(sum(sizes)):
            raise StopIteration
        first += count
        return [rows.take(size) for size in sizes]

    return CallIterator(step)


class _RowQueue:
    """A queue of the rows of successive batches."""

    def __init__(self, batches: Iterable[Tree]) -> None:
        self._batches = iter(batches)
        self._parts: deque[tuple[Tree, int, int]] = deque()
        self._last: Tree = None
        self._num_rows = 0

    def fill(self, count: int) -> bool:
        """Queue at least ``count`` rows if there are; return False if none is left."""
        wanted = count if self._last is not None else max(1, count)
        while self._num_rows < wanted:
            element = next(self._batches, _END)
            if element is _END:
                break
            # Copy, because a pipeline may overwrite its buffer.
            batch = tree_map(_own_array, element)
            length = batch_length(batch)
            self._last = batch
            if length:
                self._parts.append((batch, 0, length))
                self._num_rows += length
        return self._num_rows > 0 or wanted == 0

    def take(self, count: int) -> Tree:
        """Remove and return ``count`` rows; fewer only at the end."""
        first = self._parts[0][0] if self._parts else self._last
        # Begin with a part of 0 rows, which is the result if no rows are left.
        parts = [rows_of(first, 0, 0)]
        while count > 0 and self._parts:
            batch, start, length = self._parts.popleft()
            stop = min(start + count, length)
            parts.append(rows_of(batch, start, stop))
            count -= stop - start
            self._num_rows -= stop - start
            if stop < length:
                self._parts.appendleft((batch, stop, length))
        if len(parts) < 3:
            return parts[-1]
        columns = zip(*(flatten(part)[0] for part in parts), strict=True)
        return unflatten(
            flatten(first)[1],
            [array_module(column[0]).concatenate(column) for column in columns],
        )


def deal_elements(elements: Iterable[Tree], count: int) -> Iterator[list[Tree]]:
    """Deal successive elements to the ``count`` replicas of a worker.

    In an incomplete last step, replicas without an element get batches without rows; if
    elements are scalars, this step is left out.
    """
    source = iter(elements)
    # Elements for this step; if reading one more fails, the next step uses them.
    ready: list[Tree] = []

    def step() -> list[Tree]:
        while len(ready) < count:
            element = next(source, _END)
            if element is _END:
                break
            # Copy, because a pipeline may overwrite its buffer.
            ready.append(tree_map(_own_array, element))
        parts = ready.copy()
        ready.clear()
        if len(parts) == count:
            return parts
        # Replicas without an element get 0 rows, because all must call the reductions.
        empty = empty_like(parts[0]) if parts else None
        if empty is None:
            raise StopIteration
        return parts + [empty] * (count - len(parts))

    return CallIterator(step)


def deal_pieces(
    batches: Iterable[Tree], num_replicas: int, count: int
) -> Iterator[list[Tree]]:
    """Cut every batch into pieces, and deal them to the worker's replicas in turn.

    A batch has ``num_replicas`` pieces; the worker has ``count`` replicas. A step
    raises ValueError for scalars and for arrays of different lengths.
    """
    source = iter(batches)
    ready: deque[Tree] = deque()

    def next_piece() -> Tree:
        if not ready:
            batch = as_batch(next(source))
            ready.extend(pieces_of(batch, num_replicas, range(num_replicas)))
        return ready.popleft()

    return deal_elements(CallIterator(next_piece), count)
