"""Stages of batches with random access: any rows of any batch can be read.

The position of a batch is the number of rows before it, so that a saved position means
the same with any number of replicas.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hpcstrat.data.batches import piece, rows_of
from hpcstrat.data.costs import RowCosts
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
from hpcstrat.data.row_division import OwnRowDivision, RowDivision
from hpcstrat.data.rows import (
    INFINITE,
    UNKNOWN,
    Places,
    Rows,
    ShuffledRows,
    Stage,
    epoch_of_repetition,
)
from hpcstrat.engine.tree import flatten, tree_map
from hpcstrat.engine.typing import Array, Tree

__all__ = [
    "Batch",
    "Batched",
    "BatchesOfParent",
    "CachedBatches",
    "MappedBatches",
    "PaddedBatches",
    "RepeatedBatches",
    "RowBatches",
    "SomeBatches",
    "padded_spec",
    "shuffled_rows",
]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch of successive rows: an epoch, and positions of its start and end."""

    epoch: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Batched(Stage):
    """A stage of batches with random access; ``num_rows`` may be INFINITE."""

    # Costs of the rows, if batches are made or divided by cost.
    costs: RowCosts | None = None

    def stop(self, position: int, epoch: int) -> int:
        """Return the end position of the batch that begins at ``position``."""
        raise NotImplementedError

    def rows_before(self, batches: int) -> int:
        """Return the number of rows in the first ``batches`` batches of an epoch.

        Not possible if the cardinality is UNKNOWN.
        """
        raise NotImplementedError

    def part(self, batch: Batch, num_replicas: int, replica: int) -> tuple[int, int]:
        """Return ``first`` and ``last``, for `read`, of a replica's rows of a batch."""
        raise NotImplementedError

    def numbers(self, batch: Batch, first: int, last: int) -> Array:
        """Return the numbers of rows that `read` returns, by which rows have costs."""
        raise NotImplementedError

    def batch_at(self, epoch: int, start: int) -> Batch:
        """Return the batch that begins at ``start``."""
        return Batch(epoch, start, self.stop(start, epoch))

    def read(self, batch: Batch, first: int, last: int) -> Tree:
        """Read rows ``first`` to ``last`` of a batch, as replicas divide it."""
        raise NotImplementedError

    def divided(self, divide: Callable[[RowBatches], RowDivision | None]) -> Batched:
        """Return the same batches, whose rows replicas divide by another rule.

        ``divide`` returns the rule; with None, the batches stay as they are.
        """
        raise NotImplementedError

    def iterate(self, epoch: int) -> Iterator[Tree]:
        position = 0

        def step() -> Tree:
            nonlocal position
            if position == self.num_rows:
                raise StopIteration
            batch = self.batch_at(epoch, position)
            position = batch.stop
            return self.read(batch, 0, len(batch))

        return CallIterator(step)


class RowBatches(Batched):
    """Batches of successive rows.

    ``size`` may be None if ``costs`` have a limit of the cost of a batch.
    """

    # The rule by which replicas divide a batch; None: into `piece`s, in order.
    _division: RowDivision | None = None

    def __init__(
        self,
        rows: Rows,
        size: int | None,
        *,
        drop_remainder: bool,
        costs: RowCosts | None = None,
    ) -> None:
        self.rows, self.parents = rows, [rows]
        self.batch_size, self.costs = size, costs
        self.drop_remainder = drop_remainder
        drop = ", the last only if full" if drop_remainder else ""
        self.words = f"in batches of {size or 'rows'}{drop}"
        if costs is not None:
            self.words += f" {costs.words}"
        num_rows = rows.cardinality
        if num_rows == INFINITE:
            self.num_rows = self.cardinality = INFINITE
            return
        if size is None or (costs is not None and costs.max_cost is not None):
            self.num_rows, self.cardinality = num_rows, UNKNOWN
            return
        full, rest = divmod(num_rows, size)
        self.cardinality = full + (rest > 0 and not drop_remainder)
        self.num_rows = full * size if drop_remainder else num_rows

    def order_words(self) -> str:
        return f"{self.rows.order_words()}, in batches of {self.num_rows} rows together"

    def stop(self, position: int, epoch: int) -> int:
        ends = [] if self.batch_size is None else [position + self.batch_size]
        if self.num_rows != INFINITE:
            ends.append(self.num_rows)
        end = min(ends, default=None)
        if self.costs is not None and self.costs.max_cost is not None:
            return self.costs.stop(position, end, epoch)
        assert end is not None
        return end

    def rows_before(self, batches: int) -> int:
        assert self.batch_size is not None
        start = batches * self.batch_size
        return start if self.num_rows == INFINITE else min(start, self.num_rows)

    def part(self, batch: Batch, num_replicas: int, replica: int) -> tuple[int, int]:
        if self._division is None:
            return piece(len(batch), num_replicas, replica)
        return self._division.part(batch.epoch, batch.start, batch.stop, replica)

    def places(self, batch: Batch, first: int, last: int) -> Places:
        """Return the places of rows ``first`` to ``last`` of a batch."""
        if self._division is None:
            return slice(batch.start + first, batch.start + last)
        order = self._division.order(batch.epoch, batch.start, batch.stop)
        return batch.start + order[first:last]

    def numbers(self, batch: Batch, first: int, last: int) -> Array:
        assert self.costs is not None
        return self.costs.numbers(self.places(batch, first, last), batch.epoch)

    def read(self, batch: Batch, first: int, last: int) -> Tree:
        return self.rows.read(self.places(batch, first, last), batch.epoch)

    def spec(self) -> Tree:
        length = self.batch_size if self.drop_remainder else None
        return batched_spec(self.rows.spec(), length)

    def divided(self, divide: Callable[[RowBatches], RowDivision | None]) -> Batched:
        made = copy.copy(self)
        made._division = divide(self)
        return made

    def own_rows(self, num_replicas: int, replicas: range) -> RowDivision | None:
        """Return the rule that gives rows to the replicas that own them.

        ``replicas`` are the replicas of this rank: its cache keeps only rows that these
        own.
        """
        count = self.rows.num_homes
        if count == INFINITE:
            raise ValueError(
                "expected a data set with an end for own_rows, found "
                f"{self.rows.describe()}; leave own_rows out"
            )
        ends = replicas.start, replicas.stop
        first, last = (-(-r * count // num_replicas) for r in ends)
        self.rows.keep(first, last)
        return OwnRowDivision(self.rows.homes, count, num_replicas)


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

    def own_rows(self, num_replicas: int, replicas: range) -> RowDivision | None:
        """Return None, because each rank reads all rows of a batch anyway."""
        return None

    def read(self, batch: Batch, first: int, last: int) -> Tree:
        """Read the whole batch, because its longest row determines the padded shape."""
        rows = self.rows.elements(self.places(batch, 0, len(batch)), batch.epoch)
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
        self.costs = parent.costs

    def of_parent(self, batch: Batch) -> Batch:
        """Return the same batch with the epoch and positions that the parent uses."""
        return batch

    def stop(self, position: int, epoch: int) -> int:
        inner = self.of_parent(Batch(epoch, position, position))
        return position - inner.start + self.parent.stop(inner.start, inner.epoch)

    def part(self, batch: Batch, num_replicas: int, replica: int) -> tuple[int, int]:
        return self.parent.part(self.of_parent(batch), num_replicas, replica)

    def numbers(self, batch: Batch, first: int, last: int) -> Array:
        return self.parent.numbers(self.of_parent(batch), first, last)

    def read(self, batch: Batch, first: int, last: int) -> Tree:
        return self.parent.read(self.of_parent(batch), first, last)

    def rows_before(self, batches: int) -> int:
        return self.parent.rows_before(batches)

    def divided(self, divide: Callable[[RowBatches], RowDivision | None]) -> Batched:
        return self.after(self.parent.divided(divide))

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
        if count < 0 or parent.cardinality >= 0:
            self.cardinality = INFINITE if count < 0 else parent.cardinality * count

    def of_parent(self, batch: Batch) -> Batch:
        repetition, start = divmod(batch.start, self.parent.num_rows)
        epoch = epoch_of_repetition(batch.epoch, self._repetitions, repetition)
        return Batch(epoch, start, start + len(batch))

    def rows_before(self, batches: int) -> int:
        if self.num_rows != INFINITE:
            batches = min(batches, self.cardinality)
        repetition, inner = divmod(batches, self.parent.cardinality)
        return repetition * self.parent.num_rows + self.parent.rows_before(inner)


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

    def of_parent(self, batch: Batch) -> Batch:
        before = self._start
        return Batch(batch.epoch, batch.start + before, batch.stop + before)

    def stop(self, position: int, epoch: int) -> int:
        end = super().stop(position, epoch)
        # A position of other batches of the same rows need not be where a batch begins.
        return end if self.num_rows == INFINITE else min(end, self.num_rows)

    def rows_before(self, batches: int) -> int:
        if self.cardinality != INFINITE:
            batches = min(batches, self.cardinality)
        return self.parent.rows_before(self._first + batches) - self._start


class MappedBatches(BatchesOfParent):
    """The results of a function that is called with each whole batch.

    Reading a part of a batch raises ValueError if the function changes its length.
    """

    def __init__(self, parent: Batched, function: Callable[..., Any]) -> None:
        super().__init__(parent, f"mapped by {name_of(function)}")
        self._function = function

    def read(self, batch: Batch, first: int, last: int) -> Tree:
        """Read and map the whole batch, because the function may mix its rows."""
        size = len(batch)
        made = self._made(self.parent.read(batch, 0, size))
        if (first, last) == (0, size):
            return made
        lengths = {leaf.shape[:1] for leaf in flatten(made)[0]}
        if lengths != {(size,)}:
            raise ValueError(
                f"expected {size} rows from the function that maps a batch, as many as "
                f"it got, found {sorted(lengths)}; map the rows before batch(), or "
                "distribute an iterable"
            )
        return rows_of(made, first, last)

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
        self._kept: dict[tuple[Batch, int, int], Tree] = {}

    def of_parent(self, batch: Batch) -> Batch:
        return replace(batch, epoch=0)

    def divided(self, divide: Callable[[RowBatches], RowDivision | None]) -> Batched:
        return CachedBatches(self.parent.divided(divide))

    def read(self, batch: Batch, first: int, last: int) -> Tree:
        key = self.of_parent(batch), first, last
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = self.parent.read(*key)
        return tree_map(lambda leaf: leaf.copy(), found)
