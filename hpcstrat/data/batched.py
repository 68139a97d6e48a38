"""Stages of batches with random access: any rows of any batch can be read.

The position of a batch is the number of rows before it, so that a saved position means
the same with any number of replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from hpcstrat.data.batches import owned_first, rows_of
from hpcstrat.data.elements import (
    CallIterator,
    as_element,
    batched_spec,
    call_with,
    made_spec,
    name_of,
    only_shape,
    pad_and_stack,
    spec_of,
)
from hpcstrat.data.rows import (
    INFINITE,
    Rows,
    ShuffledRows,
    Stage,
    epoch_of_repetition,
)
from hpcstrat.engine.tree import flatten, tree_map
from hpcstrat.engine.typing import Tree

__all__ = [
    "Batched",
    "BatchesOfParent",
    "CachedBatches",
    "MappedBatches",
    "OwnRowBatches",
    "PaddedBatches",
    "RepeatedBatches",
    "RowBatches",
    "SomeBatches",
    "padded_spec",
    "shuffled_rows",
]


class Batched(Stage):
    """A stage of batches with random access; ``num_rows`` may be INFINITE."""

    batch_size: int

    def stop(self, position: int) -> int:
        """Return the end position of the batch that begins at ``position``."""
        raise NotImplementedError

    def rows_before(self, batches: int) -> int:
        """Return the number of rows in the first ``batches`` batches of an epoch."""
        raise NotImplementedError

    def read(self, epoch: int, start: int, first: int, last: int) -> Tree:
        """Read rows ``first`` to ``last`` of the batch that begins at ``start``."""
        raise NotImplementedError

    def owned(self, num_replicas: int, replicas: range) -> Batched:
        """Return the same batches, with rows sorted by the replicas that own them.

        The piece of each replica then has as many of its own rows as fit. ``replicas``
        are the replicas of this rank: its cache keeps only rows that these own.
        """
        raise NotImplementedError

    def iterate(self, epoch: int) -> Iterator[Tree]:
        position = 0

        def step() -> Tree:
            nonlocal position
            start = position
            if start == self.num_rows:
                raise StopIteration
            position = self.stop(start)
            return self.read(epoch, start, 0, position - start)

        return CallIterator(step)


class RowBatches(Batched):
    """Batches of successive rows."""

    def __init__(self, rows: Rows, size: int, *, drop_remainder: bool) -> None:
        self.rows, self.parents = rows, [rows]
        self.batch_size = size
        self.drop_remainder = drop_remainder
        drop = ", the last only if full" if drop_remainder else ""
        self.words = f"in batches of {size}{drop}"
        num_rows = rows.cardinality
        if num_rows == INFINITE:
            self.num_rows = self.cardinality = INFINITE
            return
        full, rest = divmod(num_rows, size)
        self.cardinality = full + (rest > 0 and not drop_remainder)
        self.num_rows = full * size if drop_remainder else num_rows

    def order_words(self) -> str:
        return f"{self.rows.order_words()}, in batches of {self.num_rows} rows together"

    def stop(self, position: int) -> int:
        end = position + self.batch_size
        return end if self.num_rows == INFINITE else min(end, self.num_rows)

    def rows_before(self, batches: int) -> int:
        start = batches * self.batch_size
        return start if self.num_rows == INFINITE else min(start, self.num_rows)

    def read(self, epoch: int, start: int, first: int, last: int) -> Tree:
        return self.rows.read(slice(start + first, start + last), epoch)

    def spec(self) -> Tree:
        length = self.batch_size if self.drop_remainder else None
        return batched_spec(self.rows.spec(), length)

    def owned(self, num_replicas: int, replicas: range) -> Batched:
        count = self.rows.num_homes
        if count == INFINITE:
            raise ValueError(
                "expected a data set with an end for own_rows, found "
                f"{self.rows.describe()}; leave own_rows out"
            )
        ends = replicas.start, replicas.stop
        first, last = (-(-r * count // num_replicas) for r in ends)
        self.rows.keep(first, last)
        return OwnRowBatches(self, num_replicas)


class OwnRowBatches(RowBatches):
    """Batches whose rows are sorted by the replicas that own them.

    Each replica owns an equal part of the source's rows, so that a rank reads mostly
    the same rows, from its cache, in each epoch. The method is SOLAR (Sun et al. 2022,
    arXiv:2211.00224).
    """

    def __init__(self, batches: RowBatches, num_replicas: int) -> None:
        super().__init__(
            batches.rows, batches.batch_size, drop_remainder=batches.drop_remainder
        )
        self.words += ", own rows first"
        self._num_replicas = num_replicas

    def read(self, epoch: int, start: int, first: int, last: int) -> Tree:
        stop, count = self.stop(start), self._num_replicas
        homes = self.rows.homes(slice(start, stop), epoch)
        owners = homes * count // self.rows.num_homes
        places = start + owned_first(owners, count)[first:last]
        return self.rows.read(places, epoch)


class PaddedBatches(RowBatches):
    """Batches of rows of different shapes, padded to one shape."""

    def __init__(
        self,
        rows: Rows,
        size: int,
        *,
        drop_remainder: bool,
        shapes: Tree,
        values: Tree,
    ) -> None:
        super().__init__(rows, size, drop_remainder=drop_remainder)
        self.words += ", padded"
        self._shapes, self._values = shapes, values

    def owned(self, num_replicas: int, replicas: range) -> Batched:
        """Return ``self``, because each rank reads all rows of a batch anyway."""
        return self

    def read(self, epoch: int, start: int, first: int, last: int) -> Tree:
        """Read the whole batch, because its longest row determines the padded shape."""
        rows = self.rows.elements(slice(start, self.stop(start)), epoch)
        return rows_of(pad_and_stack(rows, self._shapes, self._values), first, last)

    def spec(self) -> Tree:
        return padded_spec(super().spec(), self._shapes)


def shuffled_rows(stage: Stage) -> ShuffledRows | None:
    """Return the stage that shuffles the rows: ``stage``, or the stage it batches."""
    rows = stage.rows if isinstance(stage, RowBatches) else stage
    return rows if isinstance(rows, ShuffledRows) else None


def padded_spec(spec: Tree, shapes: Tree) -> Tree:
    """Return the spec of padded batches, given the spec of batches before padding."""
    leaves = flatten(spec)[0]
    if len(leaves) != 1 or shapes is None:
        return spec
    (leaf,) = leaves
    lengths = tuple(None if n == -1 else n for n in only_shape(shapes))
    return tree_map(lambda _: type(leaf)((leaf.shape[0], *lengths), leaf.dtype), spec)


class BatchesOfParent(Batched):
    """Base class of stages that change the batches of a parent stage."""

    def __init__(self, parent: Batched, words: str) -> None:
        self._set_parent(parent)
        self.words = words
        self.batch_size = parent.batch_size
        self.drop_remainder = parent.drop_remainder
        self.num_rows, self.cardinality = parent.num_rows, parent.cardinality

    def _set_parent(self, parent: Batched) -> None:
        self.parent, self.parents = parent, [parent]

    def stop(self, position: int) -> int:
        return self.parent.stop(position)

    def rows_before(self, batches: int) -> int:
        return self.parent.rows_before(batches)

    def owned(self, num_replicas: int, replicas: range) -> Batched:
        return self.after(self.parent.owned(num_replicas, replicas))

    def after(self, parent: Batched) -> Batched:
        """Return a copy of this stage that changes the batches of another parent."""
        found = copy.copy(self)
        found._set_parent(parent)
        return found

    def spec(self) -> Tree:
        return self.parent.spec()


class RepeatedBatches(BatchesOfParent):
    """All batches of a stage ``count`` times, each time as a new epoch of the stage."""

    def __init__(self, parent: Batched, count: int) -> None:
        super().__init__(parent, f"{count} times")
        self._repetitions = count
        self.num_rows = INFINITE if count < 0 else parent.num_rows * count
        self.cardinality = INFINITE if count < 0 else parent.cardinality * count

    def stop(self, position: int) -> int:
        repetition, inner = divmod(position, self.parent.num_rows)
        return repetition * self.parent.num_rows + self.parent.stop(inner)

    def rows_before(self, batches: int) -> int:
        if self.num_rows != INFINITE:
            batches = min(batches, self.cardinality)
        repetition, inner = divmod(batches, self.parent.cardinality)
        return repetition * self.parent.num_rows + self.parent.rows_before(inner)

    def read(self, epoch: int, start: int, first: int, last: int) -> Tree:
        repetition, inner = divmod(start, self.parent.num_rows)
        own = epoch_of_repetition(epoch, self._repetitions, repetition)
        return self.parent.read(own, inner, first, last)


class SomeBatches(BatchesOfParent):
    """Batches ``first`` to ``last - 1`` of a stage; INFINITE means up to its end."""

    def __init__(self, parent: Batched, first: int, last: int) -> None:
        self._first = first
        self._start = parent.rows_before(first)
        num_rows = cardinality = INFINITE
        if last != INFINITE or parent.cardinality != INFINITE:
            last = min(end for end in (last, parent.cardinality) if end != INFINITE)
            cardinality = max(last - first, 0)
            num_rows = max(parent.rows_before(last) - self._start, 0)
        super().__init__(parent, f"of these {cardinality} batches from {first}")
        self.num_rows, self.cardinality = num_rows, cardinality

    def order_words(self) -> str:
        parent = self.parent.order_words()
        return f"{parent}, {self.num_rows} rows from {self._start}"

    def stop(self, position: int) -> int:
        end = self.parent.stop(position + self._start) - self._start
        # A position of other batches of the same rows need not be where a batch begins.
        return end if self.num_rows == INFINITE else min(end, self.num_rows)

    def rows_before(self, batches: int) -> int:
        if self.cardinality != INFINITE:
            batches = min(batches, self.cardinality)
        return self.parent.rows_before(self._first + batches) - self._start

    def read(self, epoch: int, start: int, first: int, last: int) -> Tree:
        return self.parent.read(epoch, start + self._start, first, last)


class MappedBatches(BatchesOfParent):
    """The results of a function that is called with each whole batch.

    Reading a part of a batch raises ValueError if the function changes its length.
    """

    def __init__(self, parent: Batched, function: Callable[..., Any]) -> None:
        super().__init__(parent, f"mapped by {name_of(function)}")
        self._function = function

    def read(self, epoch: int, start: int, first: int, last: int) -> Tree:
        """Read and map the whole batch, because the function may mix its rows."""
        size = self.stop(start) - start
        batch = self._made(self.parent.read(epoch, start, 0, size))
        if (first, last) == (0, size):
            return batch
        lengths = {leaf.shape[:1] for leaf in flatten(batch)[0]}
        if lengths != {(size,)}:
            raise ValueError(
                f"expected {size} rows from the function that maps a batch, as many as "
                f"it got, found {sorted(lengths)}; map the rows before batch(), or "
                "distribute an iterable"
            )
        return rows_of(batch, first, last)

    def _made(self, batch: Tree) -> Tree:
        return as_element(call_with(self._function, batch))

    def order_words(self) -> str:
        return self.parent.order_words()

    def spec(self) -> Tree:
        """Call the function for some batches, and return the spec of its results."""
        return made_spec(self.parent, lambda batch: spec_of(self._made(batch)))


class CachedBatches(BatchesOfParent):
    """Batches of the parent's epoch 0, which stay in memory after they were read."""

    def __init__(self, parent: Batched) -> None:
        super().__init__(parent, "cached")
        self._kept: dict[tuple[int, int, int], Tree] = {}

    def owned(self, num_replicas: int, replicas: range) -> Batched:
        return CachedBatches(self.parent.owned(num_replicas, replicas))

    def read(self, epoch: int, start: int, first: int, last: int) -> Tree:
        key = start, first, last
        batch = self._kept.get(key)
        if batch is None:
            batch = self._kept[key] = self.parent.read(0, *key)
        return tree_map(lambda leaf: leaf.copy(), batch)
