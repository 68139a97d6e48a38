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

    The latest values given to its two methods are in ``last_step_outputs``, which
    begins with the initial loop values, and in ``non_tensor_outputs``; ``run_op`` is
    what the last step returned.
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

        Collective over the strategy's replicas with ``reduce_op``, by which the
        replicas' values are combined; without it, they stay PerReplica. In replica
        context the output is this replica's.
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

        Not collective in cross-replica context. In replica context it is this
        replica's, a tuple of this worker's is kept, and it is collective over the
        strategy's replicas.
        """
        replica_context = self._replica_context()
        if replica_context is not None:
            output = replica_context.merge_call(_local_results, (output,))
        self.non_tensor_outputs[name] = output

    def _replica_context(self) -> Any:
        entry = current()
        return None if entry is None else entry.replica_context


class Examples:
    """The rows of arrays of equal first dimension, one by one."""

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
        """Return global batches, for ``Strategy.experimental_distribute_dataset``.

        The arguments are those of `Dataset`.
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
