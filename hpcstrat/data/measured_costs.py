"""Costs of rows that are fitted to the times of steps."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import as_array, to_host
from hpcstrat.engine.observe.arrivals import Arrivals
from hpcstrat.engine.typing import Array, Replicas

__all__ = ["MeasuredCosts", "StepTimes"]

# Steps that take longer than this multiple of the median, such as those that compile,
# or that save a checkpoint, are left out.
_MOST_OF_MEDIAN = 3
# The weight of earlier epochs, relative to the epoch after them.
_KEPT = 0.5


class MeasuredCosts:
    """Costs of rows that hpcstrat fits to the measured times of steps.

    Not collective. Pass the object as ``costs=`` of `Dataset.batch` or of a
    `GlobalBatchSampler`. The cost of a row is ``a + b[0] * sizes[row, 0] + ...``. At
    the beginning of each epoch, ``a`` and ``b``, all >= 0, are fitted by least squares
    to the times of all replicas' steps, without the time that a replica waited for
    other replicas. In the first epoch, each column of ``sizes`` counts as much as the
    others.

    Batches have the same rows in all runs, but replicas divide them by times, which
    differ between runs. Therefore logical replicas, which promise the same bits,
    reject measured costs. Times on a GPU are those of the host.

    Parameters
    ----------
    sizes : array_like of shape (num_rows,) or (num_rows, k)
        Numbers >= 0 that describe each row, such as the numbers of atoms and of edges.

    Raises
    ------
    ValueError
        If a size is negative or not finite, or if the shape is another one.

    Examples
    --------
    >>> import hpcstrat as hs
    >>> costs = hs.data.MeasuredCosts([10, 20, 60])
    >>> chain = hs.Dataset.range(3).batch(3, costs=costs)
    """

    def __init__(self, sizes: Any) -> None:
        found = to_host(as_array(sizes, np.float64))
        columns = found[:, np.newaxis] if found.ndim == 1 else found
        if columns.ndim != 2 or not ((columns >= 0) & (columns < np.inf)).all():
            raise ValueError(
                "expected sizes >= 0 that are finite, as an array of one or two "
                f"dimensions, found shape {found.shape} with values from "
                f"{found.min(initial=0):g} to {found.max(initial=0):g}; correct them"
            )
        # The first column is for the constant ``a``.
        self._columns = np.column_stack([np.ones(len(columns)), columns])
        means = columns.mean(axis=0) if len(columns) else np.ones(columns.shape[1])
        self.coefficients = np.array([0.0, *(1 / np.where(means > 0, means, 1))])
        self._steps: list[tuple[Array, float]] = []
        self._products = np.zeros((len(self.coefficients), len(self.coefficients) + 1))

    @property
    def values(self) -> Array:
        """The present costs of all rows; float64 of shape (num_rows,)."""
        found: Array = self._columns @ self.coefficients
        return found

    def add(self, numbers: Array, seconds: float) -> None:
        """Record the numbers of a step's rows, and its time in seconds.

        For the library's own modules. Not collective.
        """
        self._steps.append((self._columns[numbers].sum(axis=0), seconds))

    def fit(self, strategy: Replicas) -> None:
        """Fit the coefficients to the steps of all replicas.

        For the library's own modules. Collective over the strategy's replicas.
        """
        steps, self._steps = self._steps, []
        if steps:
            most = _MOST_OF_MEDIAN * float(np.median([seconds for _, seconds in steps]))
            kept = [(*sums, s) for sums, s in steps if s <= most]
            rows = np.array(kept)
            mine = rows[:, :-1].T @ rows
        else:
            mine = np.zeros_like(self._products)
        # All ranks add in the same order, and so have the same coefficients.
        found = strategy.collectives.all_gather_object(mine, "measured costs")
        self._products = _KEPT * self._products + sum(found)
        self.coefficients = _fitted(self._products, self.coefficients)

    def __repr__(self) -> str:
        """Show the number of rows and the fitted coefficients."""
        return f"MeasuredCosts({len(self._columns)} rows, {self.coefficients})"


def _fitted(products: Array, before: Array) -> Array:
    """Return coefficients >= 0 with the least squares; ``before`` if none fits."""
    squares, targets = products[:, :-1], products[:, -1]
    # Scale the columns, because sizes may differ from 1 by many orders of magnitude.
    scale = np.sqrt(np.diag(squares))
    used = np.flatnonzero(scale > 0)
    while used.size:
        part = squares[np.ix_(used, used)] / np.outer(scale[used], scale[used])
        found = np.linalg.lstsq(part, targets[used] / scale[used], rcond=1e-9)[0]
        if (found > 0).all():
            coefficients = np.zeros_like(before)
            coefficients[used] = found / scale[used]
            return coefficients
        used = np.delete(used, np.argmin(found))
    return before


class StepTimes:
    """Measures the times of this rank's steps, from one batch to the next.

    The time that this rank waits for other ranks, or for their data, does not count, in
    whatever channel of hpcstrat it waits.
    """

    def __init__(self, costs: MeasuredCosts) -> None:
        self._costs = costs
        self._begun: tuple[Array, float] | None = None

    def begin(self, numbers: Array) -> None:
        """Begin a step with rows of these numbers."""
        self._begun = numbers, _own_seconds()

    def end(self) -> None:
        """End the step that was begun, if one was."""
        if self._begun is not None:
            numbers, start = self._begun
            self._begun = None
            self._costs.add(numbers, _own_seconds() - start)


def _own_seconds() -> float:
    return time.perf_counter() - Arrivals.process_seconds
