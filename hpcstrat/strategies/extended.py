"""``strategy.extended``: methods of strategies for authors of optimizers and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.data import Dataset
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.calls.cross_device_ops import CrossDeviceOps
from hpcstrat.engine.context import CurrentStrategy, current
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
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
    """Methods of a strategy for authors of optimizers and layers.

    Collective methods except `update`, `broadcast_to` and `read_var` raise RuntimeError
    inside a replica function.

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
        """Sum or average the replicas' values, for use with a variable or on a device.

        Collective over the strategy's replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            An operation, as in ``Strategy.reduce``.
        value : PerReplica or array_like of shape (...)
            A value that is not distributed is this rank's contribution.
        destinations : variable, distributed value or str
            Where the program needs the result.
        options, experimental_hints : CommunicationOptions, optional
            Ignored; accepted for compatibility with tf.distribute.

        Returns
        -------
        Mirrored or ndarray
            Mirrored if the destination is a variable or distributed value, and there
            are several replicas.

        Raises
        ------
        ValueError
            In the cases listed at ``Strategy.reduce``.
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
        """Sum or average several values together, in as few messages as possible.

        Collective over the strategy's replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            An operation, as in ``Strategy.reduce``.
        value_destination_pairs : sequence of (value, destinations)
            Values and destinations, each as in `reduce_to`.
        options, experimental_hints : CommunicationOptions, optional
            Ignored; accepted for compatibility with tf.distribute.

        Returns
        -------
        list
            One result for each pair, in order.

        Raises
        ------
        ValueError
            In the cases listed at ``Strategy.reduce``.
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
        """Sum or average values by the algorithm ``ops`` instead of the strategy's own.

        Collective over the strategy's replicas. For the library's own modules."""
        self._strategy._require_cross("a reduction by a CrossDeviceOps")
        strategy, replicas = self._strategy, self._strategy.replicas

        def combine(
            op: ReduceOp, trees: list[Tree], what: str, out: Tree = None
        ) -> Tree:
            if strategy.meetings is not None:
                # ``ops`` is not used: values of logical replicas are added in a fixed
                # tree order, so that sums have the same bits on any number of ranks.
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
        """Send replica 0's value to all replicas.

        Collective over the strategy's replicas, if ``tensor`` is an array.

        Parameters
        ----------
        tensor : array_like of any shape
            Python numbers are returned unchanged; NumPy scalars are sent as arrays.
        destinations : variable, distributed value or str, optional
            Where the program needs the value; default: on all replicas.

        Returns
        -------
        Mirrored
            The value; an array with the default strategy and OneDeviceStrategy.
        """
        # Python numbers are constants of the program, equal on all replicas. NumPy
        # scalars are results of computations and may differ between replicas, so the
        # test is for exact types: ``np.float64`` is a subclass of ``float``.
        if type(tensor) in (bool, int, float, complex):
            return tensor
        ops = self._strategy.collectives.ops
        if ops.overrides("broadcast_implementation"):
            call = call_in_cross_replica
            return call(self._strategy, ops.broadcast, tensor, destinations)
        return self.broadcast_by_rank(tensor)

    def broadcast_by_rank(self, tensor: Any) -> Any:
        """Send rank 0's value to all replicas; for the library's own modules.

        Collective over the strategy's replicas."""
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

        Logically collective over the strategy's replicas. In replica context the call
        is collective, because it makes a merge call.

        Parameters
        ----------
        var : Variable
            A variable of this strategy.
        fn : callable
            Called with the variable and the arguments. Inside the function the
            variable's methods change only this replica's component.
        args, kwargs : sequence, mapping, optional
            Arguments; Mirrored values are replaced by their components.
        group : bool
            True: return one value. False: return a tuple, one result per local replica.

        Returns
        -------
        object
            The function's results. With several replicas, arrays are returned as
            Mirrored, or as PerReplica for a SyncOnRead variable. With ``group=False``,
            a tuple with the unchanged result of each replica of this process.

        Raises
        ------
        ValueError
            If the variable does not belong to this strategy, or if a mirrored variable
            would be updated with a PerReplica argument: its components would differ.
        """
        strategy = self._strategy
        entry = current()
        if entry is not None and entry.strategy is strategy and entry.replica_context:
            return entry.replica_context.merge_call(
                _update_in_merge, (var, fn, *args), dict(kwargs or {}, group=group)
            )
        strategy._require_cross("update")
        # Check the arguments first, so that a wrong argument leaves no change to undo.
        with strategy.together("update"):
            self._check_update(var, args, kwargs)
        # All replicas of this process share one array of a mirrored variable.
        mirrored = isinstance(var, MirroredVariable)
        replicas = strategy.replicas
        entries = replicas.update_entries[: 1 if mirrored else None]
        with strategy.all_or_none(var, "update"):
            results = [replicas.call(own, fn, [var, *args], kwargs) for own in entries]
        if not group:
            # Return one result for each replica, even if a single call updated the
            # array that the replicas share.
            missing = len(replicas.update_entries) - len(results)
            return tuple(results + results[:1] * missing)
        if strategy.num_replicas_in_sync == 1:
            return results[0]
        if len(results) > 1:
            return replicas.joined(results, "update")
        # Results from the components of a SyncOnRead variable differ between replicas.
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
        """Raise ValueError if an argument of an update is a PerReplica."""
        leaves = flatten([*args, *(kwargs or {}).values()])[0]
        several = self._strategy.num_replicas_in_sync > 1
        if several and any(type(leaf) is PerReplica for leaf in leaves):
            raise ValueError(
                f"expected the same arguments on all replicas to update {what}, found "
                f"a PerReplica, with which {found} would come to differ; {ONE_OF_MANY}"
            )

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Enter a block that creates its variables on the devices of a given variable.

        Not collective. Every process has only one device, so the method only checks
        that the variable belongs to the strategy.

        Parameters
        ----------
        colocate_with_variable : Variable
            A variable of this strategy.

        Yields
        ------
        None
            Nothing.

        Raises
        ------
        RuntimeError
            If the block is outside of the strategy's scope.
        ValueError
            If ``colocate_with_variable`` is not a variable of this strategy.
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
        """Return whether an object is a variable of this strategy.

        Not collective.

        Parameters
        ----------
        v : object
            Any object.

        Returns
        -------
        bool
            True for variables of this strategy.
        """
        owner = self._strategy if self._strategy.distributes else None
        return isinstance(v, Variable) and v._strategy is owner

    def value_container(self, value: Any) -> Any:
        """Return the value unchanged, because functions receive variables themselves.

        Not collective.

        Parameters
        ----------
        value : object
            Any object.

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
            A variable of this strategy.

        Returns
        -------
        ndarray
            The value; for a SyncOnRead variable, its combined components.
        """
        return v.read_value()

    # Methods of TensorFlow 1's tf.distribute, which old programs still call.

    @property
    def experimental_between_graph(self) -> bool:
        """True if the program runs on more than one worker."""
        strategy = self._strategy
        return strategy.distributes and strategy.topology.num_workers > 1

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process initializes shared data: True on replica 0 only."""
        return self._strategy.writes

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process writes the program's own files: True on replica 0 only.

        All replicas must call a `CheckpointManager`, including replicas where this
        property is False.
        """
        return self._strategy.writes

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes summaries: True on replica 0 only."""
        return self._strategy.writes

    @contextmanager
    def _in_scope(self, what: str) -> Iterator[None]:
        """Enter the strategy's scope, or check that it is already the current scope."""
        if current() is not None:
            self._strategy._require_cross(what)
            yield
            return
        with self._strategy.scope():
            yield

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """The older name of ``Strategy.run``, to call a function on every replica."""
        return self._strategy.run(fn, args, kwargs)

    def non_slot_devices(self, var_list: Sequence[Any]) -> tuple[str, ...]:
        """Return the devices for optimizer state that belongs to several variables.

        Not collective.

        Parameters
        ----------
        var_list : sequence of Variable
            Variables of this strategy.

        Returns
        -------
        tuple of str
            Devices of this worker's replicas.

        Raises
        ------
        ValueError
            If an object in ``var_list`` is not a variable of this strategy.
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
        """Call a function that updates optimizer state shared by several variables.

        Logically collective over the strategy's replicas.

        Parameters
        ----------
        colocate_with : object
            Ignored, because every process has one device.
        fn : callable
            Runs in update context: assignments change only this replica's component.
        args, kwargs : sequence, mapping, optional
            Arguments; Mirrored values are replaced by their components.
        group : bool
            True: return one value. False: return a tuple, one result per local replica.

        Returns
        -------
        object
            The function's result; with several replicas, its arrays are returned as
            Mirrored. With ``group=False``, a tuple that contains the unchanged result
            once for each replica of this process.

        Raises
        ------
        ValueError
            For a PerReplica argument: the state would differ between replicas.
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
        """Return a data set whose elements are the rows of arrays.

        Not collective.

        Parameters
        ----------
        numpy_input : array, or nested structure of arrays
            Arrays with equal first dimensions; not copied.
        session : object, optional
            Ignored; accepted for compatibility with tf.distribute.

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
        """Call a function for each of the next batches of an iterator.

        Collective over the strategy's replicas if the function or the data set makes
        collective calls.

        Parameters
        ----------
        fn : callable
            Called with a MultiStepContext and a batch, in the strategy's scope.
        iterator : iterator
            Returns a batch for each step.
        iterations : int
            Number of steps; at least 0.
        initial_loop_values : mapping of str to object, optional
            The initial content of ``last_step_outputs``.

        Returns
        -------
        MultiStepContext
            Has the outputs of the last step; ``run_op`` is the last result of ``fn``.

        Raises
        ------
        OutOfRangeError
            If the iterator ends before ``iterations`` batches; the steps with the
            earlier batches have been made.
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
    # A merge call wraps each argument in a PerReplica, including the function.
    function = fn.values[0] if isinstance(fn, PerReplica) else fn
    same = [_unwrapped(argument) for argument in args]
    named = {k: _unwrapped(v) for k, v in kwargs.items()}
    return strategy.extended.update(var, function, same, named, _unwrapped(group))


def _unwrapped(tree: Tree) -> Tree:
    """Replace each PerReplica that holds a Python constant by the constant itself.

    The constant is the same on all replicas."""

    def bare(leaf: Any) -> Any:
        if type(leaf) is PerReplica and isinstance(leaf.values[0], _CONSTANTS):
            return leaf.values[0]
        return leaf

    return tree_map(bare, tree)


def _grouped(tree: Tree, kind: Any) -> Tree:
    """Wrap each array of a result by calling ``kind``; keep other leaves unchanged."""

    def wrapped(leaf: Any) -> Any:
        is_array = isinstance(leaf, (np.ndarray, np.generic)) or is_device(leaf)
        return kind(leaf) if is_array else leaf

    return tree_map(wrapped, tree)


_END = object()
