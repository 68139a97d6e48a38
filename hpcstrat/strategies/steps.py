"""What methods of the first tf.distribute return: outputs of steps, and examples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hpcstrat.context import CurrentStrategy, current
from hpcstrat.data import Dataset
from hpcstrat.options import ReduceOp
from hpcstrat.tree import tree_map
from hpcstrat.typing import Tree

__all__ = ["Examples", "MultiStepContext"]


class MultiStepContext:
    """Collects outputs of steps.

    Parameters
    ----------
    strategy : Strategy
        Whose replicas make the steps.
    initial_loop_values : mapping of str to object, optional
        Outputs before the first step.

    Attributes
    ----------
    last_step_outputs : dict of str to object
        The latest values given to `set_last_step_output`.
    non_tensor_outputs : dict of str to object
        The latest values given to `set_non_tensor_output`.
    run_op : object
        What the last step returned.
    """

    def __init__(
        self,
        strategy: CurrentStrategy,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> None:
        self._strategy = strategy
        self.last_step_outputs = dict(initial_loop_values or {})
        self.non_tensor_outputs: dict[str, Any] = {}
        self.run_op: Any = None

    def set_last_step_output(
        self, name: str, output: Tree, reduce_op: ReduceOp | str | None = None
    ) -> None:
        """Keep an output of this step, instead of the previous one's.

        Collective over the strategy's replicas with ``reduce_op``.

        Parameters
        ----------
        name : str
            Of the output.
        output : tree
            The value; in replica context this replica's.
        reduce_op : ReduceOp or str, optional
            How to combine the replicas' values; without it, they stay PerReplica.

        Raises
        ------
        ValueError
            For an unknown operation.
        """
        replica_context = self._replica_context()
        if replica_context is None:
            value = output
            if reduce_op is not None:
                value = self._strategy.reduce(reduce_op, output, axis=None)
        elif reduce_op is None:
            value = self._strategy.distributed(output)
        else:
            value = replica_context.all_reduce(reduce_op, output)
        self.last_step_outputs[name] = value

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keep an output that is no array.

        Not collective in cross-replica context; in replica context as
        ``Strategy.experimental_local_results``.

        Parameters
        ----------
        name : str
            Of the output.
        output : object
            The value; in replica context this replica's, and a tuple of this worker's
            is kept.
        """
        replica_context = self._replica_context()
        if replica_context is not None:
            output = replica_context.merge_call(_local_results, (output,))
        self.non_tensor_outputs[name] = output

    def _replica_context(self) -> Any:
        entry = current()
        return None if entry is None else entry.replica_context


class Examples:
    """The rows of arrays, one by one.

    Parameters
    ----------
    source : array, or nested structure of arrays
        Of equal first dimension.

    Raises
    ------
    ValueError
        If the first dimensions differ.
    """

    def __init__(self, source: Tree) -> None:
        self._source = source
        self._rows = self.batch(1)

    def batch(
        self,
        batch_size: int,
        drop_remainder: bool = False,
        *,
        shuffle: bool = False,
        seed: int = 0,
    ) -> Dataset:
        """Return a data set of global batches.

        Not collective.

        Parameters
        ----------
        batch_size : int
            Examples in a global batch.
        drop_remainder : bool
            Whether to leave out a last batch that is not full.
        shuffle : bool
            See `Dataset`.
        seed : int
            See `Dataset`.

        Returns
        -------
        Dataset
            For ``Strategy.experimental_distribute_dataset``.

        Raises
        ------
        ValueError
            If the batch size is not positive.
        """
        return Dataset(
            self._source,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_remainder=drop_remainder,
        )

    def __len__(self) -> int:
        """Return the number of examples."""
        return self._rows.num_rows

    def __iter__(self) -> Iterator[Tree]:
        """Give one example after another."""
        for row in self._rows:
            yield tree_map(lambda leaf: leaf[0], row)


def _local_results(strategy: CurrentStrategy, value: Any) -> Any:
    return strategy.experimental_local_results(value)
