"""Outputs of steps, for methods of TensorFlow 1's tf.distribute."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcstrat.engine.context import CurrentStrategy, current
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.typing import Tree


class MultiStepContext:
    """The outputs of the last step of ``experimental_run_steps_on_iterator``.

    Parameters
    ----------
    strategy : Strategy
        The strategy that makes the steps.
    initial_loop_values : mapping of str to object, optional
        The initial content of ``last_step_outputs``.

    Attributes
    ----------
    last_step_outputs, non_tensor_outputs : dict of str to object
        The latest values that were passed to `set_last_step_output` and
        `set_non_tensor_output`.
    run_op : object
        The result of the last step.
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
        """Store an output of this step, which replaces the previous step's output.

        Collective over the strategy's replicas if ``reduce_op`` is given.

        Parameters
        ----------
        name : str
            Name of the output.
        output : tree
            The value; in replica context, this replica's value.
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
            value = self._strategy.replicas.distributed(output)
        else:
            value = replica_context.all_reduce(reduce_op, output)
        self.last_step_outputs[name] = value

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Store an output of this step that is not an array.

        Not collective in cross-replica context; in replica context the call is
        collective, because it makes a merge call.

        Parameters
        ----------
        name : str
            Name of the output.
        output : object
            The value. In replica context, this replica's value: the stored value is
            then the tuple that ``Strategy.experimental_local_results`` returns.
        """
        replica_context = self._replica_context()
        if replica_context is not None:
            output = replica_context.merge_call(_local_results, (output,))
        self.non_tensor_outputs[name] = output

    def _replica_context(self) -> Any:
        entry = current()
        return None if entry is None else entry.replica_context

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} with outputs "
            f"{', '.join(sorted(self.last_step_outputs)) or 'none'}>"
        )


def _local_results(strategy: CurrentStrategy, value: Any) -> Any:
    return strategy.experimental_local_results(value)
