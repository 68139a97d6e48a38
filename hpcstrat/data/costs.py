"""Costs of the rows of a data set, by which batches are made and divided."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.data.batches import share
from hpcstrat.data.elements import call_with, name_of
from hpcstrat.data.file_lists import in_list
from hpcstrat.data.measured_costs import MeasuredCosts, StepTimes
from hpcstrat.data.row_division import CostDivision
from hpcstrat.data.rows import (
    INFINITE,
    CachedRows,
    Places,
    Rows,
    ShuffledRows,
    Stage,
)
from hpcstrat.engine.arrays.kinds import as_array, to_host
from hpcstrat.engine.tree import flatten
from hpcstrat.engine.typing import Array, Replicas, Tree
from hpcstrat.errors import CollectiveError

__all__ = ["RowCosts", "costs_of_batches"]

_WHAT = "costs of a data set"
_BLOCK_ROWS = 256


class RowCosts:
    """The costs of rows, and the rules that `Dataset.batch` derives from them.

    ``given`` is an array with a cost for each row, the name of a column, a function of
    a row, or `MeasuredCosts`. Rows count in the order that they have before they are
    shuffled or repeated. Costs of a column or a function are computed when they are
    needed first: `agree` divides this work between all ranks.
    """

    def __init__(
        self,
        given: Any,
        rows: Stage,
        *,
        max_cost: float | None = None,
        equal_rows: bool = False,
    ) -> None:
        if not isinstance(rows, Rows):
            raise ValueError(
                "expected single rows that can be read at random, to have costs, found "
                f"{rows.describe()}; leave out filter, interleave and the like, and "
                "call batch(costs=...) only once"
            )
        self._rows, self._source = rows, _source_of(rows)
        self.max_cost = None if max_cost is None else float(max_cost)
        if self.max_cost is not None and not 0 < self.max_cost < np.inf:
            raise ValueError(
                f"expected a positive, finite max_cost, found {max_cost}; change it"
            )
        if self.max_cost is not None and isinstance(given, MeasuredCosts):
            raise ValueError(
                "expected costs that are known before the first step to fill batches "
                "up to max_cost, found MeasuredCosts; pass an array, or leave out "
                "max_cost"
            )
        self._equal_rows = equal_rows
        self._given = given
        self._computes = isinstance(given, str) or callable(given)
        self._values: Array | None = None
        words = [CostDivision.words]
        if self.max_cost is not None:
            words = [f"up to cost {self.max_cost:g}", *words]
        if equal_rows:
            words.append("with equal numbers of rows")
        self.words = ", ".join(words)

    @property
    def num_rows(self) -> int:
        """Number of rows that have costs."""
        return self._source.cardinality

    def of(self, places: Places, epoch: int) -> Array:
        """Return the costs (float64) of the rows at places of an epoch."""
        if isinstance(self._given, MeasuredCosts):
            return self._given.values[self.numbers(places, epoch)]
        if self._values is None:
            values = (
                self._computed(0, self.num_rows) if self._computes else self._array()
            )
            self._values = self._checked(values)
        found: Array = self._values[self.numbers(places, epoch)]
        return found

    def numbers(self, places: Places, epoch: int) -> Array:
        """Return the numbers of the rows at places of an epoch."""
        return self._rows.homes(places, epoch)

    def stop(self, position: int, end: int | None, epoch: int) -> int:
        """Return where a batch ends whose costs add up to at most ``max_cost``.

        ``end`` is the greatest possible position; None means that there is none.
        """
        assert self.max_cost is not None
        left = self.max_cost
        while position != end:
            block = position + _BLOCK_ROWS
            last = block if end is None else min(block, end)
            sums = np.cumsum(self.of(slice(position, last), epoch))
            count = int(np.searchsorted(sums, left, side="right"))
            position += count
            if position < last:
                break
            left -= float(sums[-1])
        return position

    def division(self, num_replicas: int) -> CostDivision:
        """Return the rule that divides batches between replicas."""
        return CostDivision(self.of, num_replicas, equal_rows=self._equal_rows)

    # Calls between ranks

    def agree(self, strategy: Replicas) -> None:
        """Compute and check the costs on all ranks together.

        Collective over all ranks of the strategy. Raises ValueError on all ranks if a
        cost is wrong, and CollectiveError if the ranks have different costs.
        """
        ranks = strategy.all_ranks
        calls, count = ranks.collectives, ranks.num_ranks
        mine: Array = np.empty(0)
        with calls.all_raise(_WHAT):
            if isinstance(self._given, MeasuredCosts) and strategy.logical:
                raise ValueError(
                    "expected costs that do not depend on the time of steps, because "
                    "logical replicas promise the same bits, found MeasuredCosts; pass "
                    "an array, or leave out logical_replicas"
                )
            if self._computes:
                first, last = share(self.num_rows, count, ranks.rank)
                mine = (
                    self._computed(first, last)
                    if self._values is None
                    else self._values[first:last]
                )
            else:
                self._values = self._checked(self._array())
                bits = np.ascontiguousarray(self._values + 0.0)  # Make -0.0 be 0.0.
                mine = np.array(xxh3_64_intdigest(bits.data))
        parts = calls.all_gather_object(mine, _WHAT)
        if self._computes:
            # The ranks have the same values, so that all raise an error or none.
            self._values = self._checked(np.concatenate(parts))
        elif others := [r for r, part in enumerate(parts) if part != parts[0]]:
            own: Any = self._values
            values = calls.broadcast_object(own, 0, _WHAT)
            row = int(np.argmax(values != own))
            found = calls.all_gather_object((row, own[row]), _WHAT)
            row, cost = found[others[0]]
            raise CollectiveError(
                f"expected the same costs on all ranks, found {values[row]:g} for row "
                f"{row} on rank 0, {cost:g} on rank {others[0]}, and other costs than "
                f"rank 0's on ranks {in_list(others)} in total; compute costs from "
                "data that all ranks have, or read them from one file",
                others,
            )

    def update(self, strategy: Replicas) -> None:
        """Fit `MeasuredCosts` to the steps since the last call; nothing for others.

        Collective over the strategy's replicas.
        """
        if isinstance(self._given, MeasuredCosts):
            self._given.fit(strategy)

    def times(self) -> StepTimes | None:
        """Return an object that measures steps, or None if none are to be measured."""
        given = self._given
        measures = isinstance(given, MeasuredCosts)
        return StepTimes(given) if measures else None

    # Values

    def _array(self) -> Array:
        if isinstance(self._given, MeasuredCosts):
            return self._given.values
        try:
            return to_host(as_array(self._given, np.float64))
        except (TypeError, ValueError) as error:
            raise ValueError(
                "expected costs as an array of numbers, the name of a column, or a "
                f"function of a row, found {self._given!r:.80}; pass one of these"
            ) from error

    def _checked(self, values: Array) -> Array:
        if values.shape != (self.num_rows,):
            raise ValueError(
                f"expected one cost for each of {self.num_rows} rows, found costs of "
                f"shape {values.shape}; give each row, in the order before it is "
                "shuffled, one cost"
            )
        wrong = ~((values >= 0) & (values < np.inf))
        expected, advice = "costs >= 0 that are finite", "correct the costs"
        if not wrong.any() and self.max_cost is not None:
            wrong = values > self.max_cost
            expected = f"rows that cost at most max_cost={self.max_cost:g}"
            advice = "raise max_cost, or leave out these rows"
        if wrong.any():
            row, count = int(np.argmax(wrong)), int(wrong.sum())
            more = f", the first of {count} such rows" if count > 1 else ""
            raise ValueError(
                f"expected {expected}, found {values[row]:g} for row {row}{more}; "
                f"{advice}"
            )
        return values

    def _computed(self, first: int, last: int) -> Array:
        """Compute the costs of the rows of these numbers; not yet checked."""
        given, source = self._given, self._source
        function: Callable[[Tree], Any]
        if isinstance(given, str):
            column = source.column_alone(given)
            if column is not None:
                found = to_host(as_array(column.read(slice(first, last), 0)))
                return self._numbers_only(found, last - first)
            function = partial(_named, given)
        else:
            function = partial(call_with, given)
        # Read rows in the order of their numbers, in which they are in files.
        where = np.argsort(self.numbers(slice(0, source.cardinality), 0))[first:last]
        costs = [
            to_host(as_array(function(element), np.float64))
            for start in range(0, len(where), _BLOCK_ROWS)
            for element in self._rows.elements(where[start : start + _BLOCK_ROWS], 0)
        ]
        if shape := next((cost.shape for cost in costs if cost.shape), None):
            raise ValueError(
                f"expected a number from {self._told()} for each row, found an array "
                f"of shape {shape}; return one number"
            )
        return self._numbers_only(np.array(costs), last - first)

    def _numbers_only(self, found: Array, count: int) -> Array:
        if found.shape != (count,) or found.dtype.kind not in "biuf":
            raise ValueError(
                f"expected a number for each row from {self._told()}, found "
                f"{found.dtype} of shape {found.shape[1:]}; name a column of numbers, "
                "or pass a function of a row"
            )
        return found.astype(np.float64)

    def _told(self) -> str:
        given = self._given
        return f"column {given!r}" if isinstance(given, str) else name_of(given)


def costs_of_batches(
    rows: Stage,
    costs: Any,
    *,
    max_cost: float | None,
    equal_rows: bool,
    batch_size: int | None,
    drop_remainder: bool,
) -> RowCosts | None:
    """Return the costs that arguments of `Dataset.batch` give; ValueError if wrong."""
    given = (
        f"batch_size {batch_size}, max_cost {max_cost}, equal_rows {equal_rows} and "
        f"drop_remainder {drop_remainder}"
    )
    if batch_size is None and max_cost is None:
        raise ValueError(
            f"expected batch_size, or costs and max_cost, found {given}; pass one"
        )
    if costs is None:
        if max_cost is not None or equal_rows:
            raise ValueError(
                f"expected costs with max_cost and equal_rows, found {given}, and no "
                "costs; pass costs"
            )
        return None
    if max_cost is not None and drop_remainder:
        raise ValueError(
            "expected no drop_remainder with max_cost, with which a batch has no size "
            f"when it is full, found {given}; leave out one of them"
        )
    return RowCosts(costs, rows, max_cost=max_cost, equal_rows=equal_rows)


def _source_of(rows: Rows) -> Rows:
    """Return the stage whose places are the numbers of the rows in all epochs."""
    source = rows
    while source.origin is not None:
        source = source.origin
    if source.cardinality == INFINITE:
        raise ValueError(
            "expected rows with an end, each of which has a cost, found "
            f"{source.describe()}; call repeat() after batch(), and do not mix"
        )
    if _is_reshuffled(source):
        raise ValueError(
            "expected rows that keep their numbers in all epochs, to have costs, found "
            f"{source.describe()}; call shuffle() after take(), skip(), shard(), zip() "
            "and concatenate(), not before"
        )
    return source


def _is_reshuffled(stage: Stage) -> bool:
    """Return whether a place of a stage may have different rows in two epochs."""
    if isinstance(stage, CachedRows):
        return False
    own = isinstance(stage, ShuffledRows) and stage.reshuffles
    return own or any(_is_reshuffled(parent) for parent in stage.parents)


def _named(name: str, element: Tree) -> Any:
    leaves, structure = flatten(element)
    names = ["/".join(map(str, path)) for path in structure.paths()]
    if name not in names:
        raise ValueError(
            f"expected the column {name!r} for costs, found {', '.join(names) or 'a '}"
            f"{'' if any(names) else 'single array'}; change the name, or pass a "
            "function of a row"
        )
    return leaves[names.index(name)]
