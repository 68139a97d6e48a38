"""``strategy.extended``: the less common methods of strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.data import Dataset
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.context import CurrentStrategy, current
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.reduction.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.tree import flatten, tree_map
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.engine.values import ONE_OF_MANY, DistributedValues, PerReplica
from hpcstrat.errors import OutOfRangeError
from hpcstrat.strategies import value_reduction
from hpcstrat.strategies.own_reductions import call_in_cross_replica
from hpcstrat.strategies.steps import MultiStepContext
from hpcstrat.variables import MirroredVariable, Variable

_CONSTANTS = (bool, int, float, complex, str)


class StrategyExtended:
    """Methods for those who write optimizers and layers.

    Collective methods raise RuntimeError inside a replica function, except `update`.

    Parameters
    ----------
    strategy : Strategy
        The strategy that has these methods.
    """

    experimental_require_static_shapes = False

    def __init__(self, strategy: CurrentStrategy) -> None:
        self._strategy = strategy

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Devices of this worker's replicas, in replica order."""
        return self._devices()

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Devices that hold this worker's components of variables."""
        devices: tuple[str, ...] = (
            getattr(self._strategy, "parameter_devices", ()) or self._devices()
        )
        return devices

    def _devices(self) -> tuple[str, ...]:
        if self._strategy.is_default:
            raise RuntimeError(
                "expected a strategy with devices, found the default strategy; enter "
                "the scope of another one"
            )
        return tuple(getattr(self._strategy, "devices", (self._strategy.device,)))

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combine the replicas' values, for a destination.

        Collective over the strategy's replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        value : PerReplica or array_like of shape (...)
            A plain value is this rank's contribution.
        destinations : variable, distributed value or str
            Where the result is wanted.
        options, experimental_hints : CommunicationOptions, optional
            Accepted for tf.distribute's sake.

        Returns
        -------
        Mirrored or ndarray
            Mirrored for a variable or distributed value of several replicas.

        Raises
        ------
        ValueError
            As ``Strategy.reduce``.
        """
        del options, experimental_hints
        self._strategy._require_cross("reduce_to")
        result = self._strategy.reduce(reduce_op, value, axis=None)
        return self._for(destinations, result)

    def _for(self, destinations: Any, result: Any) -> Any:
        several = self._strategy.num_replicas_in_sync > 1
        if several and isinstance(destinations, DistributedValues):
            return self._strategy.replicas.mirrored(result)
        return result

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Combine several values at once, in as few messages as possible.

        Collective over the strategy's replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        value_destination_pairs : sequence of (value, destinations)
            As for `reduce_to`.
        options, experimental_hints : CommunicationOptions, optional
            Accepted for tf.distribute's sake.

        Returns
        -------
        list
            Results in order.

        Raises
        ------
        ValueError
            As ``Strategy.reduce``.
        """
        del options, experimental_hints
        values = [value for value, _ in value_destination_pairs]
        results = self._strategy.reduce(reduce_op, values, axis=None)
        return [
            self._for(destinations, result)
            for result, (_, destinations) in zip(
                results, value_destination_pairs, strict=True
            )
        ]

    def reduce_by(
        self,
        ops: CrossDeviceOps,
        reduce_op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions,
    ) -> list[Any]:
        """Combine values by an algorithm that need not be the strategy's own.

        Collective over the strategy's replicas. For the library's own modules.
        """
        self._strategy._require_cross("a reduction by a CrossDeviceOps")
        strategy, replicas = self._strategy, self._strategy.replicas

        def combine(
            op: ReduceOp, trees: list[Tree], what: str, out: Tree = None
        ) -> Tree:
            if strategy.meetings is not None:
                # Sums of logical replicas are added in the order of a tree.
                return replicas.reduce_parts(op, trees, what, out)
            reductions = strategy.collectives.reductions_by(ops)
            return reductions.reduce_in_call(op, trees[0], what, options, out=out)

        by_algorithm = partial(value_reduction.reduce, replicas, combine=combine)
        values = [value for value, _ in pairs]
        results = strategy.collectives.call("reduce", by_algorithm, reduce_op, values)
        return [
            self._for(destinations, result)
            for result, (_, destinations) in zip(results, pairs, strict=True)
        ]

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """Give all replicas replica 0's value.

        Collective over the strategy's replicas, for arrays.

        Parameters
        ----------
        tensor : array_like of any shape
            Python numbers are returned as they are; those of NumPy are arrays.
        destinations : variable, distributed value or str, optional
            Where the value is wanted; default: on all replicas.

        Returns
        -------
        Mirrored
            The value; a bare array with one replica.
        """
        # Python's numbers are constants of the program, the same on all replicas.
        # NumPy's were computed; some of their types are subclasses of Python's.
        if type(tensor) in (bool, int, float, complex):
            return tensor
        ops = self._strategy.collectives.ops
        if ops.overrides("broadcast_implementation"):
            call = call_in_cross_replica
            return call(self._strategy, ops.broadcast, tensor, destinations)
        return self.broadcast_by_rank(tensor)

    def broadcast_by_rank(self, tensor: Any) -> Any:
        """Give all replicas rank 0's value; for the library's own modules.

        Collective over the strategy's replicas.
        """
        strategy = self._strategy
        own = strategy.replicas.parts(tensor)[0]
        array = strategy.collectives.broadcast(own, 0, "broadcast_to")
        return strategy.replicas.mirrored(array) if strategy.distributes else array

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        group: bool = True,
    ) -> Any:
        """Call a function on each component of a variable.

        Logically collective over the strategy's replicas; collective in replica
        context, where all must call it together.

        Parameters
        ----------
        var : Variable
            Of this strategy.
        fn : callable
            Takes the variable, whose methods then change only this replica's component,
            and the arguments.
        args, kwargs : sequence, mapping, optional
            Arguments; Mirrored values are replaced by their components.
        group : bool
            Whether to return one value, or a tuple of this process's values.

        Returns
        -------
        object
            Arrays as Mirrored (PerReplica for a SyncOnRead variable), other results
            bare; with ``group=False`` a tuple with this replica's result.

        Raises
        ------
        ValueError
            If the variable is not of this strategy, or a mirrored one is given a
            PerReplica argument, with which its components would differ.
        """
        strategy = self._strategy
        entry = current()
        # As tf.distribute has it: an update in replica context is a merge call.
        if entry is not None and entry.strategy is strategy and entry.replica_context:
            return entry.replica_context.merge_call(
                _update_in_merge, (var, fn, *args), dict(kwargs or {}, group=group)
            )
        strategy._require_cross("update")
        # Checked before the change, so that after an error nothing is restored.
        with strategy.together("update"):
            self._check_update(var, args, kwargs)
        # One array of a mirrored variable serves all replicas of this process.
        mirrored = isinstance(var, MirroredVariable)
        replicas = strategy.replicas
        entries = replicas.update_entries[: 1 if mirrored else None]
        with strategy.all_or_none(var, "update"):
            results = [replicas.call(own, fn, [var, *args], kwargs) for own in entries]
        if not group:
            # One result for each replica, also if one call has served them all.
            missing = len(replicas.update_entries) - len(results)
            return tuple(results + results[:1] * missing)
        if strategy.num_replicas_in_sync == 1:
            return results[0]
        if len(results) > 1:
            return replicas.joined(results, "update")
        # Components of a SyncOnRead variable differ, and so do results made of them.
        return _grouped(results[0], replicas.mirrored if mirrored else PerReplica)

    def _check_update(self, var: Any, args: Any, kwargs: Any) -> None:
        strategy = self._strategy
        owner = var._strategy if isinstance(var, Variable) else self
        if owner is not (strategy if strategy.distributes else None):
            raise ValueError(
                f"expected a variable of {strategy!r} to update, found {var!r:.80}, "
                "of another strategy object or of none; create it in the strategy's "
                "scope"
            )
        if isinstance(var, MirroredVariable):
            what = f"the mirrored variable {var.name!r}"
            self._require_same(args, kwargs, what, "its copies")

    def _require_same(self, args: Any, kwargs: Any, what: str, found: str) -> None:
        """Refuse arguments of an update that differ between replicas."""
        leaves = flatten([*args, *(kwargs or {}).values()])[0]
        several = self._strategy.num_replicas_in_sync > 1
        if several and any(type(leaf) is PerReplica for leaf in leaves):
            raise ValueError(
                f"expected the same arguments on all replicas to update {what}, found "
                f"a PerReplica, with which {found} would come to differ; {ONE_OF_MANY}"
            )

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Put new variables on the devices of a variable.

        Not collective. Every process has one device, so that this only checks the
        variable.

        Parameters
        ----------
        colocate_with_variable : Variable
            Of this strategy.

        Yields
        ------
        None
            Nothing.

        Raises
        ------
        RuntimeError
            Outside of the strategy's scope.
        ValueError
            If it is not a variable of this strategy.
        """
        entry, own = current(), self._strategy
        if not own.is_default and (entry is None or entry.strategy is not own):
            raise RuntimeError(
                f"expected colocate_vars_with inside of the scope of {own!r}, found "
                "it outside; enter strategy.scope() before"
            )
        if not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                f"expected a variable of {self._strategy!r} to colocate with, found "
                f"{colocate_with_variable!r:.80}; create it in the strategy's scope"
            )
        yield

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
        owner = self._strategy if self._strategy.distributes else None
        return isinstance(v, Variable) and v._strategy is owner

    def value_container(self, value: Any) -> Any:
        """Return the value itself: functions get variables, not their components.

        Not collective.

        Parameters
        ----------
        value : object
            Anything.

        Returns
        -------
        object
            The value.
        """
        return value

    def read_var(self, v: Variable) -> Array:
        """Return a copy of a variable's value.

        Collective over the strategy's replicas for a SyncOnRead variable.

        Parameters
        ----------
        v : Variable
            Of this strategy.

        Returns
        -------
        ndarray
            The aggregate of a SyncOnRead variable.
        """
        return v.read_value()

    # Methods that programs for the first tf.distribute still call.

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

        All replicas call `CheckpointManager`, whatever this says.
        """
        return self._strategy.replica_id == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: replica 0 alone."""
        return self._strategy.replica_id == 0

    @contextmanager
    def _in_scope(self, what: str) -> Iterator[None]:
        """Enter the scope, or check that it is the current one."""
        if current() is not None:
            self._strategy._require_cross(what)
            yield
            return
        with self._strategy.scope():
            yield

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """The older name of ``Strategy.run``."""
        return self._strategy.run(fn, args, kwargs)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Return the devices of state that belongs to several variables.

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
            Runs in update context, where variables change only this replica's
            component.
        args, kwargs : sequence, mapping, optional
            Arguments; Mirrored values are replaced by their components.
        group : bool
            Whether to return one value, or a tuple of this process's values.

        Returns
        -------
        object
            Arrays as Mirrored, other results bare; with ``group=False`` a tuple with
            this replica's result.

        Raises
        ------
        ValueError
            For a PerReplica argument, with which the state would differ.
        """
        del colocate_with
        strategy, replicas = self._strategy, self._strategy.replicas
        strategy._require_cross("update_non_slot")
        self._require_same(args, kwargs, "state that they share", "it")
        result = replicas.call(replicas.update_entries[0], fn, args, kwargs)
        if not group:
            return (result,) * len(replicas.update_entries)
        several = strategy.num_replicas_in_sync > 1
        return _grouped(result, replicas.mirrored) if several else result

    def experimental_make_numpy_dataset(
        self, numpy_input: Tree, session: Any = None
    ) -> Dataset:
        """Return a data set of the rows of arrays.

        Not collective.

        Parameters
        ----------
        numpy_input : array, or nested structure of arrays
            Of equal first dimension; not copied.
        session : object, optional
            Accepted for tf.distribute's sake.

        Returns
        -------
        Dataset
            One element for each row.

        Raises
        ------
        ValueError
            If the first dimensions differ.
        """
        del session
        return Dataset(numpy_input)

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
            ``last_step_outputs`` before the first step.

        Returns
        -------
        MultiStepContext
            With the outputs of the last step; ``run_op`` is the last result of ``fn``.

        Raises
        ------
        OutOfRangeError
            If there are fewer batches, after the steps with these.
        ValueError
            For a negative number of steps.
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

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._strategy!r}>"


def _update_in_merge(
    strategy: CurrentStrategy,
    var: Variable,
    fn: Any,
    *args: Any,
    group: Any = True,
    **kwargs: Any,
) -> Any:
    # A merge call wraps each argument as a PerReplica, also the function.
    function = fn.values[0] if isinstance(fn, PerReplica) else fn
    same = [_unwrapped(argument) for argument in args]
    named = {k: _unwrapped(v) for k, v in kwargs.items()}
    return strategy.extended.update(var, function, same, named, _unwrapped(group))


def _unwrapped(tree: Tree) -> Tree:
    """Unwrap Python constants, which are the program's."""

    def bare(leaf: Any) -> Any:
        if type(leaf) is PerReplica and isinstance(leaf.values[0], _CONSTANTS):
            return leaf.values[0]
        return leaf

    return tree_map(bare, tree)


def _grouped(tree: Tree, kind: Any) -> Tree:
    """Wrap the arrays of a result; other leaves stay bare."""

    def wrapped(leaf: Any) -> Any:
        is_array = isinstance(leaf, (np.ndarray, np.generic)) or is_device(leaf)
        return kind(leaf) if is_array else leaf

    return tree_map(wrapped, tree)


_END = object()
