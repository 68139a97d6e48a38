"""Functions that make the stages of a data set, with random access if possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcstrat.data import batch_streams, streams
from hpcstrat.data.batched import (
    Batched,
    CachedBatches,
    MappedBatches,
    PaddedBatches,
    RepeatedBatches,
    RowBatches,
    SomeBatches,
)
from hpcstrat.data.costs import RowCosts
from hpcstrat.data.joined_rows import ConcatenatedRows, RepeatedRows, ZippedRows
from hpcstrat.data.order import BlockOrder, BufferedOrder, Order, Permutation
from hpcstrat.data.rows import (
    INFINITE,
    UNKNOWN,
    CachedRows,
    MappedRows,
    RangeRows,
    Rows,
    ShuffledRows,
    Stage,
    StridedRows,
)
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Tree

__all__ = [
    "batch",
    "cache",
    "checked_size",
    "concatenate",
    "enumerate_elements",
    "map_elements",
    "padded_batch",
    "range_of",
    "repeat",
    "shard",
    "shuffle",
    "shuffle_blocks",
    "sizes_of_batches",
    "skip",
    "take",
    "zip_elements",
]


def _less(cardinality: int, count: int) -> int:
    """Return the cardinality of the elements without the first ``count``."""
    return cardinality if cardinality < 0 else max(cardinality - count, 0)


def _at_most(cardinality: int, count: int) -> int:
    if cardinality == INFINITE:
        return count
    return UNKNOWN if cardinality == UNKNOWN else min(cardinality, count)


def range_of(*numbers: int) -> Rows:
    """Return rows of integers; the arguments are as for Python's ``range``."""
    whole = range(*numbers)
    return RangeRows(whole.start, whole.step, len(whole))


def take(parent: Stage, count: int) -> Stage:
    """Return the first ``count`` elements; -1 returns all elements."""
    if count < 0:
        return parent
    cardinality = _at_most(parent.cardinality, count)
    if isinstance(parent, Rows):
        return StridedRows(parent, 0, 1, cardinality)
    if isinstance(parent, Batched):
        return _some_batches(parent, 0, count)
    return streams.strided(parent, 0, 1, count, cardinality)


def _some_batches(parent: Batched, first: int, last: int) -> Stage:
    if parent.costs is not None and parent.costs.max_cost is not None:
        raise ValueError(
            "expected take() and skip() of rows, or of batches of a known number of "
            f"rows, found {parent.describe()}; call take() and skip() before batch()"
        )
    return SomeBatches(parent, first, last)


def skip(parent: Stage, count: int) -> Stage:
    """Skip the first ``count`` elements; -1 skips all of them."""
    if count < 0:
        return take(parent, 0)
    cardinality = _less(parent.cardinality, count)
    if isinstance(parent, Rows):
        return StridedRows(parent, count, 1, cardinality)
    if isinstance(parent, Batched):
        return _some_batches(parent, count, INFINITE)
    return streams.strided(parent, count, 1, None, cardinality)


def shard(parent: Stage, num_shards: int, index: int) -> Stage:
    """Return every ``num_shards``-th element, beginning with element ``index``."""
    if num_shards < 1 or not 0 <= index < num_shards:
        raise ValueError(
            f"expected num_shards >= 1 and an index below it, found {num_shards} and "
            f"{index}; change them"
        )
    cardinality = parent.cardinality
    if cardinality >= 0:
        cardinality = len(range(index, cardinality, num_shards))
    if isinstance(parent, Rows):
        return StridedRows(parent, index, num_shards, cardinality)
    return streams.strided(parent, index, num_shards, None, cardinality)


def repeat(parent: Stage, count: int) -> Stage:
    """Repeat the elements ``count`` times, or forever if it is -1."""
    if not count and not isinstance(parent, (Rows, Batched)):
        return streams.strided(parent, 0, 1, 0, 0)
    if not parent.cardinality or not count:
        return take(parent, 0)
    if isinstance(parent, (Rows, Batched)) and parent.cardinality == INFINITE:
        return parent
    if isinstance(parent, Rows):
        return RepeatedRows(parent, count)
    if isinstance(parent, Batched):
        return RepeatedBatches(parent, count)
    return streams.repeated(parent, count)


def shuffle(parent: Stage, size: int | None, seed: int, reshuffles: bool) -> Stage:
    """Shuffle the elements; with ``reshuffles``, each epoch has its own order."""
    num_rows = parent.cardinality
    if not isinstance(parent, Rows):
        if size is None and num_rows == INFINITE:
            raise _endless()
        return streams.buffered(parent, size, seed, reshuffles)
    is_whole = size is None or 0 <= num_rows <= size
    if is_whole and num_rows == INFINITE:
        raise _endless()

    def order(epoch: int) -> Order:
        if is_whole:
            return Permutation(num_rows, seed, epoch)
        assert size is not None
        length = None if num_rows == INFINITE else num_rows
        return BufferedOrder(length, size, seed, epoch)

    words = f"shuffled by seed {seed}"
    if not is_whole:
        words += f" through a buffer of {size}"
    return ShuffledRows(parent, order, words, reshuffles=reshuffles)


def _endless() -> ValueError:
    return ValueError(
        "expected a buffer_size to shuffle a data set without an end, found None; "
        "shuffle before repeat(), or pass buffer_size"
    )


def shuffle_blocks(
    parent: Stage, block: int, window: int, seed: int, reshuffles: bool
) -> Stage:
    """Permute blocks of rows, then shuffle the rows within each window of blocks."""
    if not isinstance(parent, Rows) or parent.cardinality == INFINITE:
        raise ValueError(
            "expected rows that can be read at random, and have an end, to shuffle by "
            f"blocks, found {parent.describe()}; shuffle by blocks before filter(), "
            "batch() and repeat(), or pass buffer_size"
        )
    num_rows = parent.cardinality
    return ShuffledRows(
        parent,
        lambda epoch: BlockOrder(num_rows, block, window, seed, epoch),
        f"shuffled by seed {seed} in windows of {window} blocks of {block}",
        reshuffles=reshuffles,
    )


def batch(
    parent: Stage,
    size: int | None,
    drop_remainder: bool,
    costs: RowCosts | None = None,
) -> Stage:
    """Stack successive elements into batches."""
    if isinstance(parent, Rows):
        return RowBatches(parent, size, drop_remainder=drop_remainder, costs=costs)
    assert size is not None
    return batch_streams.batches(parent, size, drop_remainder)


def padded_batch(
    parent: Stage, size: int, drop_remainder: bool, shapes: Tree, values: Tree
) -> Stage:
    """Pad successive elements to one shape, and stack them into batches."""
    if isinstance(parent, Rows):
        return PaddedBatches(
            parent, size, drop_remainder=drop_remainder, shapes=shapes, values=values
        )
    return batch_streams.padded(parent, size, drop_remainder, shapes, values)


def map_elements(
    parent: Stage, function: Callable[..., Any], seed: int | None
) -> Stage:
    """Call a function with each element, and return its results."""
    if isinstance(parent, Rows):
        return MappedRows(parent, function, seed)
    if isinstance(parent, Batched) and seed is None:
        return MappedBatches(parent, function)
    return streams.mapped(parent, function, seed)


def cache(parent: Stage) -> Stage:
    """Keep the elements of epoch 0 in memory, and return them in each epoch."""
    if isinstance(parent, Rows):
        return CachedRows(parent)
    if isinstance(parent, Batched):
        return CachedBatches(parent)
    return streams.cached(parent)


def concatenate(first: Stage, second: Stage) -> Stage:
    """Return the elements of ``first``, and then the elements of ``second``."""
    if isinstance(first, Rows) and isinstance(second, Rows):
        return ConcatenatedRows(first, second)
    return streams.concatenated(first, second)


def zip_elements(parents: Tree) -> Stage:
    """Combine one element of each stage into one element."""
    if all(isinstance(stage, Rows) for stage in flatten(parents)[0]):
        return ZippedRows(parents)
    return streams.zipped(parents)


def enumerate_elements(parent: Stage, start: int) -> Stage:
    """Return pairs of an element's number and the element."""
    return zip_elements((RangeRows(start, 1, INFINITE), parent))


def sizes_of_batches(sizes: int | Sequence[int]) -> list[int]:
    """Return the batch sizes of `rebatch` as a list; ValueError for wrong sizes."""
    found = [int(size) for size in np.atleast_1d(np.asarray(sizes))]
    if not found or min(found) < 0 or max(found) < 1:
        raise ValueError(f"expected batch sizes >= 1, found {sizes}; change them")
    return found


def checked_size(value: Any) -> int:
    """Return a size, such as a batch size, as an int; ValueError below 1."""
    if int(value) < 1:
        raise ValueError(f"expected a global batch size >= 1, found {value}; change it")
    return int(value)
