"""Mixing data sets by weights, with random access."""

from __future__ import annotations

from collections.abc import Sequence

from hpcstrat.data.dataset import Dataset
from hpcstrat.data.joined_rows import MixedRows
from hpcstrat.data.rows import Rows, Stage

__all__ = ["mix"]


def mix(
    datasets: Sequence[Dataset],
    weights: Sequence[float] | None = None,
    *,
    seed: int = 0,
) -> Dataset:
    """Return the elements of several data sets, mixed by weights, without an end.

    Not collective. With random access, unlike `Dataset.sample_from_datasets`: on any
    number of replicas, and after a restore, each row of a data set comes exactly once
    in each of its own epochs, which begin when it has been gone through.

    Parameters
    ----------
    datasets : sequence of Dataset
        Of elements of one structure, with random access, not yet in batches.
    weights : sequence of float, optional
        Shares of the elements, to 1/4096; default: equal.
    seed : int
        Key of the order in which they alternate.

    Returns
    -------
    Dataset
        Of infinite cardinality.

    Raises
    ------
    ValueError
        For a data set without random access, or elements, and for weights that are not
        positive, or not one for each.
    TypeError
        Where elements differ in structure or dtype.
    """
    for dataset in datasets:
        if not isinstance(dataset.stage, Rows) or not dataset.stage.cardinality:
            raise ValueError(
                "expected data sets of rows that can be read at random, found "
                f"{dataset!r}; mix before batch() and filter(), or use "
                "sample_from_datasets"
            )

    def make(*parents: Rows) -> Stage:
        return MixedRows(parents, weights, seed)

    first, *others = (dataset.lineage for dataset in datasets)
    mixed = first.then(make, *others)
    mixed.seed = seed
    return Dataset(mixed)
