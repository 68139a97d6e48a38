"""``strategy.extended``: what programs for the first tf.distribute still call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.arrays.kinds import is_device
from hpcstrat.context import current, pop, push
from hpcstrat.errors import OutOfRangeError
from hpcstrat.strategies.steps import Examples, MultiStepContext
from hpcstrat.tree import flatten, tree_map
from hpcstrat.typing import Tree
from hpcstrat.values import ONE_OF_MANY, Mirrored, PerReplica, localize

if TYPE_CHECKING:
    from hpcstrat.strategies.base import Strategy

__all__ = ["ExtendedV1"]


class ExtendedV1:
    """Methods and flags of the first version; for `StrategyExtended` alone."""

    _strategy: Strategy

    def _devices(self) -> tuple[str, ...]:
        raise NotImplementedError

    def variable_created_in_scope(self, v: Any) -> bool:
        """Whether a variable belongs to this strategy.

        Not collective.

        Parameters
        ----------
        v : object
            Anything.

        Returns
        -------
        bool
            True for its variables.
        """
        raise NotImplementedError

    @property
    def experimental_between_graph(self) -> bool:
        """Whether several workers each run the program."""
        strategy = self._strategy
        return strategy.distributes and strategy.topology.num_workers > 1

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes what all share: replica 0 alone."""
        return self._strategy.replica_id == 0

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes files of the program's own: replica 0 alone.

        `CheckpointManager` is not asked to: all replicas call it.
        """
        return self._strategy.replica_id == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: replica 0 alone."""
        return self._strategy.replica_id == 0

    @contextmanager
    def _in_scope(self, what: str) -> Iterator[None]:
        """Be in cross-replica context, also outside of every scope."""
        if current() is not None:
            self._strategy._require_cross(what)
            yield
            return
        with self._strategy.scope():
            yield

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function once on every replica, as ``Strategy.run`` does.

        Logically collective over the strategy's replicas.

        Parameters
        ----------
        fn : callable
            Runs in replica context.
        args : list or tuple
            Positional arguments.
        kwargs : dict, optional
            Keyword arguments.

        Returns
        -------
        object
            As of ``Strategy.run``.

        Raises
        ------
        RuntimeError
            In replica context.
        """
        return self._strategy.run(fn, args, kwargs)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Return where state lives that belongs to several variables.

        Not collective.

        Parameters
        ----------
        var_list : sequence of Variable
            Of this strategy.

        Returns
        -------
        tuple of str
            Devices of this worker's replicas.

        Raises
        ------
        ValueError
            If one is not a variable of this strategy.
        """
        for variable in var_list:
            if not self.variable_created_in_scope(variable):
                raise ValueError(
                    f"expected variables of {self._strategy!r}, found "
                    f"{variable!r:.80}; create it in the strategy's scope"
                )
        strategy = self._strategy
        return self._devices() if strategy.distributes else (strategy.device,)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Call a function that updates state which belongs to no single variable.

        Logically collective over the strategy's replicas.

        Parameters
        ----------
        colocate_with : object
            From `non_slot_devices`; every process has one device.
        fn : callable
            Runs in update context: variables act on this replica's component alone.
        args : sequence
            Mirrored values are replaced by their components.
        kwargs : mapping, optional
            Likewise.
        group : bool
            Whether to return one value, or a tuple of this process's.

        Returns
        -------
        object
            Arrays as Mirrored, other results bare; with ``group=False`` a tuple with
            this replica's result.

        Raises
        ------
        ValueError
            For a PerReplica argument, with which the state would come to differ.
        RuntimeError
            In replica context.
        """
        del colocate_with
        strategy, named = self._strategy, kwargs or {}
        strategy._require_cross("update_non_slot")
        several = strategy.num_replicas_in_sync > 1
        leaves = flatten([*args, *named.values()])[0]
        if several and any(type(leaf) is PerReplica for leaf in leaves):
            raise ValueError(
                "expected the same arguments on all replicas to update state that they "
                "share, found a PerReplica, with which it would come to differ; "
                f"{ONE_OF_MANY}"
            )
        token = push(strategy.update_entry)
        try:
            result = fn(
                *[localize(argument) for argument in args],
                **{key: localize(value) for key, value in named.items()},
            )
        finally:
            pop(token)
        if not group:
            return (result,)
        return tree_map(_mirrored, result) if several else result

    def experimental_make_numpy_dataset(
        self, numpy_input: Tree, session: Any = None
    ) -> Examples:
        """Return the rows of arrays as examples.

        Not collective.

        Parameters
        ----------
        numpy_input : array, or nested structure of arrays
            Of equal first dimension; not copied.
        session : object, optional
            Accepted for tf.distribute's sake.

        Returns
        -------
        Examples
            To be put into batches.

        Raises
        ------
        ValueError
            If the first dimensions differ.
        """
        del session
        return Examples(numpy_input)

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Any,
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Call a function on each of the next batches.

        Collective over the strategy's replicas as far as the function and the data set
        are.

        Parameters
        ----------
        fn : callable
            Takes a MultiStepContext and a batch; runs in cross-replica context, in the
            strategy's scope.
        iterator : iterator
            Gives a batch for each step.
        iterations : int
            Number of steps; at least 0.
        initial_loop_values : mapping of str to object, optional
            What ``last_step_outputs`` holds before the first step.

        Returns
        -------
        MultiStepContext
            With the outputs of the last step; ``run_op`` is what ``fn`` returned last.

        Raises
        ------
        OutOfRangeError
            If there are fewer batches. The steps until then were made.
        ValueError
            For a negative number of steps.
        RuntimeError
            In replica context.
        """
        if iterations < 0:
            raise ValueError(f"expected iterations >= 0, found {iterations}; change it")
        context = MultiStepContext(self._strategy, initial_loop_values)
        with self._in_scope("experimental_run_steps_on_iterator"):
            for step in range(iterations):
                batch = next(iterator, _END)
                if batch is _END:
                    raise OutOfRangeError(
                        f"expected {iterations} batches, found {step}; lower "
                        "iterations, or repeat the data set"
                    )
                context.run_op = fn(context, batch)
        return context


def _mirrored(leaf: Any) -> Any:
    is_array = isinstance(leaf, (np.ndarray, np.generic)) or is_device(leaf)
    return Mirrored(leaf) if is_array else leaf


_END = object()
