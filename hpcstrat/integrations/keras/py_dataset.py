"""Global batches of arrays for Keras; each replica reads its own rows of each batch."""

from __future__ import annotations

import copy

import keras

from hpcstrat.data import Dataset
from hpcstrat.data.batched import Batched
from hpcstrat.data.batches import share, writable
from hpcstrat.data.sources import Columns, open_source
from hpcstrat.engine.typing import Tree
from hpcstrat.strategies import Strategy, get_strategy

__all__ = ["Batches", "columns_of", "for_backend", "own_rows", "own_share"]


class Batches(keras.utils.PyDataset):
    """Gives each replica its rows of every global batch: each row once per epoch.

    Not collective.

    The global batches are the same on any number of replicas; the last batch may be
    smaller. An epoch has the same order as in `hpcstrat.Dataset` with the same seed, so
    that ``fit`` with ``initial_epoch`` continues as if it had not been interrupted.

    Parameters
    ----------
    x : array, or nested structure of arrays
        Inputs; one row per example, the same on every replica. Datasets of h5py are
        accepted, too.
    y : array, or nested structure of arrays, optional
        Targets.
    sample_weight : array, optional
        Weights of the examples.
    batch_size : int
        Examples in a global batch.
    strategy : Strategy, optional
        The strategy whose replicas read the batches; default: the current strategy.
    shuffle : bool
        Whether each epoch has its own order, drawn from ``(seed, epoch)``.
    seed : int
        Seed of the order.
    drop_remainder : bool
        Whether to leave out a last batch that is not full.

    Raises
    ------
    ValueError
        If the batch size is not positive, or if lengths of arrays differ.

    Examples
    --------
    >>> import numpy as np
    >>> batches = Batches(np.arange(5), batch_size=2)
    >>> [batches[index][0].tolist() for index in range(len(batches))]
    [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self,
        x: Tree,
        y: Tree = None,
        sample_weight: Tree = None,
        *,
        batch_size: int = 32,
        strategy: Strategy | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        super().__init__()
        self.x = x
        self.distribute_strategy = strategy or get_strategy()
        parts = (x,) if y is None else (x, y)
        self.dataset = Dataset(
            parts if sample_weight is None else (*parts, sample_weight),
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_remainder=drop_remainder,
        )
        # The next epoch; a distributed model's ``fit`` sets it.
        self.epoch = 0
        # True if ``fit`` begins at epoch 0 also with ``initial_epoch``.
        self.begins_anew = False
        self._steps: int | None = None
        # If set, a stage that replaces the dataset's, with another division of rows.
        self._dealt: Batched | None = None

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        strategy: Strategy | None = None,
        stage: Batched | None = None,
    ) -> Batches:
        """Return a dataset's batches of inputs and targets, in the same order.

        For the library's own modules. ``stage`` replaces the dataset's own stage.
        Raises ValueError if the dataset is not in batches, or has no random access.
        """
        if not isinstance(dataset.stage, Batched):
            raise ValueError(
                "expected a data set with random access in global batches, found "
                f"{dataset!r}; call batch(), and leave out filter, interleave and the "
                "like, or write a loop over strategy.experimental_distribute_dataset"
            )
        if dataset.stage.costs is not None:
            raise ValueError(
                "expected a data set without costs for Keras, which divides batches "
                f"into equal parts, found {dataset!r}; leave out costs and max_cost, "
                "or write a loop over strategy.experimental_distribute_dataset"
            )
        batches = cls.__new__(cls)
        keras.utils.PyDataset.__init__(batches)
        batches.x = None
        batches.distribute_strategy = strategy or get_strategy()
        batches.dataset = dataset
        batches.epoch, batches.begins_anew, batches._steps = 0, False, None
        batches._dealt = stage
        return batches

    def with_steps(self, steps: int | None) -> Batches:
        """Return a copy with the given number of steps per epoch, starting at epoch 0.

        Not collective. Each epoch starts after the last row of the previous epoch.

        Parameters
        ----------
        steps : int or None
            As ``steps_per_epoch`` of Keras; None: as many as there are batches.

        Returns
        -------
        Batches
            The copy, with the same rows.
        """
        other = copy.copy(self)
        other.epoch, other._steps = 0, steps
        return other

    def __len__(self) -> int:
        """Return the number of steps of an epoch."""
        if self._steps is None and self.dataset.cardinality() < 0:
            raise ValueError(
                "expected steps_per_epoch for a data set without an end, found none; "
                "pass it to fit, or leave out repeat()"
            )
        return self._steps or len(self.dataset)

    def __getitem__(self, index: int) -> Tree:
        """Return this rank's rows of the global batch ``index`` of the epoch."""
        stage, strategy = self._stage, self.distribute_strategy
        epoch, batch = 0, self.epoch * len(self) + index
        if stage.cardinality >= 0:
            epoch, batch = divmod(batch, stage.cardinality)
        start = stage.rows_before(batch)
        read = stage.batch_at(epoch, start)
        return for_backend(writable(stage.read(read, *own_share(len(read), strategy))))

    @property
    def _stage(self) -> Batched:
        stage = self._dealt or self.dataset.stage
        assert isinstance(stage, Batched)
        return stage

    def first_rows(self) -> Tree:
        """Return the first global batch; for the library's own modules."""
        stage = self._stage
        first = stage.batch_at(0, 0)
        return for_backend(stage.read(first, 0, len(first)))

    def __repr__(self) -> str:
        """Return a description of the rows as text."""
        return f"<{type(self).__name__} of {self.dataset.describe()}>"


def columns_of(data: Tree) -> Columns | None:
    """Return ``data`` as columns if it consists of arrays, or else None."""
    leaves = keras.tree.flatten(data)
    if all(hasattr(leaf, "shape") and hasattr(leaf, "__getitem__") for leaf in leaves):
        return open_source(data)
    return None


def for_backend(batch: Tree) -> Tree:
    """Return a batch with tuples for lists if the backend is TensorFlow, as Keras does.

    Data sets of TensorFlow would make one tensor of a list.
    """
    if keras.config.backend() == "tensorflow":
        return keras.tree.lists_to_tuples(batch)
    return batch


def own_rows(columns: Columns, strategy: Strategy) -> Tree:
    """Return this rank's rows of one global batch."""
    return writable(columns.read(slice(*own_share(columns.num_rows, strategy))))


def own_share(num_rows: int, strategy: Strategy) -> tuple[int, int]:
    """Return the first row of this rank's replicas, and the row after the last."""
    count, block = strategy.num_replicas_in_sync, strategy.local_replicas
    return share(num_rows, count, block[0])[0], share(num_rows, count, block[-1])[1]
