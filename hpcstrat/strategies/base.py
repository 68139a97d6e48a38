"""Strategy: the base class of all kinds of strategies."""

from __future__ import annotations

import math
import operator
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from hpcstrat.data import DealtDataset, distribute_dataset, distribute_from_function
from hpcstrat.data.batches import piece
from hpcstrat.engine.arrays.kinds import as_array
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.entries import collective, refuse_inner
from hpcstrat.engine.context import current, own_index, pop, push, second_strategy
from hpcstrat.engine.logical.meetings import joined
from hpcstrat.engine.observe import job_timeline
from hpcstrat.engine.observe.arrival_report import ArrivalReport, ReplicaArrivals
from hpcstrat.engine.observe.timeline import active, trace
from hpcstrat.engine.options import (
    InputContext,
    InputOptions,
    ReduceOp,
    RunOptions,
    ValueContext,
    VariableOptions,
    VariableSynchronization,
    check_on_error,
)
from hpcstrat.engine.scope_watchers import watch_loaded_libraries
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.tree import flatten, is_leaf, tree_map
from hpcstrat.engine.typing import Tree
from hpcstrat.engine.values import DistributedValues, PerReplica, part_of
from hpcstrat.randomness import RandomStreams
from hpcstrat.safety.divergence.equal_inputs import EqualInputs
from hpcstrat.safety.divergence.equality import check_equal
from hpcstrat.safety.divergence.step_digests import StepDigests
from hpcstrat.strategies import value_reduction
from hpcstrat.strategies.extended import StrategyExtended
from hpcstrat.strategies.inside import Inside, parse_shape
from hpcstrat.strategies.local_replicas import LocalReplicas
from hpcstrat.strategies.older_methods import OlderMethods
from hpcstrat.strategies.replica_context import OPERATIONS
from hpcstrat.strategies.split import Split
from hpcstrat.strategies.update_backends import Copies
from hpcstrat.variables import MirroredVariable, SyncOnReadVariable, Variable

if TYPE_CHECKING:
    from hpcstrat.engine.topology.topology import Topology


class Strategy(OlderMethods):
    """Base class of all strategies, with the methods that they share.

    Programs create an instance of a subclass, such as `MirroredStrategy`. Collective
    methods raise RuntimeError inside a replica function.

    Parameters
    ----------
    collectives : Collectives, optional
        Makes the collective calls between the processes; default: for a single process.
    rank : int
        The number of this process among the strategy's processes.
    device : str
        Name of this process's device, such as ``"CPU:0"``.
    logical_replicas : int, optional
        Total number of replicas in all processes; default: one in each process.
    on_error : str
        ``"abort"``: an exception in a replica function is raised only on the replica in
        which it occurred, and ends the job if the program does not catch it.
        ``"raise"``: the same call of ``run`` raises an error on all replicas, so that
        all can skip the step together. ``run``, merge calls, updates, assignments in
        cross-replica context and ``next()`` of a data set then end with a collective
        check for errors.

    Attributes
    ----------
    extended : StrategyExtended
        Less common methods of the strategy.
    rank, num_ranks : int
        The number of this process, and the number of all processes of the strategy.
    local_replicas : range
        The replicas of this process.
    inside : Inside
        The ranks of this process's replica, and the calls among them.
    """

    # Subclasses override these attributes, and the methods from `variable_class` to
    # `apply_gradients`. Other modules never test the class of a strategy.
    is_default = False
    # True if there may be several replicas, so that values are distributed values.
    distributes = True
    # True if each rank of a job runs an independent program, with its own variables.
    ranks_are_independent = False
    # True if every step sums gradients over the replicas. The integrations of PyTorch,
    # JAX and Keras refuse strategies for which this is False.
    sums_each_step = True
    # True if variables and batches in host memory are copied to this replica's GPU.
    puts_on_gpu = False
    # True if this rank may make a CheckpointManager.
    saves_checkpoints = True
    # The ranks of this process's replica, and the calls among them.
    inside = Inside(parse_shape(None, None), Collectives(None))

    def __init__(
        self,
        collectives: Collectives | None = None,
        rank: int = 0,
        device: str = "CPU:0",
        *,
        logical_replicas: int | None = None,
        on_error: str = "abort",
    ) -> None:
        check_on_error(on_error)
        self._ranks = collectives or Collectives(None)
        self.rank, self.num_ranks = rank, self._ranks.size
        self.device = device
        self.extended = StrategyExtended(self)
        # True if replicas are logical: a process may run several, one after the other.
        self.logical = logical_replicas is not None
        self.replicas = LocalReplicas(self, self._ranks, rank, logical_replicas)
        self.local_replicas = self.replicas.block
        # Makes the collective calls between logical replicas. None if replicas are not
        # logical; also None on one or two ranks with one replica each, because calls
        # between the ranks then return the same bits.
        self.meetings = self.replicas.meetings
        self.cross_context = self.replicas.cross_context
        self.raises_together = on_error == "raise"
        # Writes a digest of the variables at each call of `run`, on rank 0 only; None
        # on other ranks, and if the settings do not request digests.
        self.digests: StepDigests | None = None
        # Functions to call at the end of the current `run`, with True if it failed.
        self.run_ends: list[Callable[[bool], None]] = []
        # Compare the inputs of the first steps between ranks. None without MPI;
        # ``run_inputs`` also becomes None when the comparison has ended.
        self.run_inputs: EqualInputs | None = None
        self.module_inputs: EqualInputs | None = None
        # The division of the replicas into groups; None if there is one sync group.
        self.split: Split | None = None
        self._settings: Settings | None = None

    def variable_class(self, options: VariableOptions) -> Any:
        """Return the class of a new variable; for the library's own modules."""
        on_read = options.synchronization is VariableSynchronization.ON_READ
        return SyncOnReadVariable if on_read else MirroredVariable

    def variable_made(self, variable: MirroredVariable) -> None:
        """Add a new variable to those whose copies the divergence checks compare.

        Logically collective over the strategy's replicas. For the library's own
        modules.
        """

    def update_backend(self) -> type[Copies]:
        """Return the class that sums gradients in this strategy's optimizer steps.

        For the library's own modules."""
        return Copies

    def apply_gradients(self, optimizer: Any, grads_and_vars: Any) -> bool:
        """Make one step of an optimizer, on these ranks or on parameter servers.

        Collective over the strategy's replicas. For the library's own modules."""
        return bool(optimizer.apply_here(self, grads_and_vars))

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in this replica's sync group."""
        return self.replicas.num_replicas

    @property
    def replica_id(self) -> int:
        """Number of the replica whose function is running in this process.

        While no replica function runs, the number of the process's first replica."""
        block = self.local_replicas
        if len(block) == 1:
            return block.start
        entry = current()
        index = entry.index if entry is not None and entry.strategy is self else None
        return block[index or 0]

    @property
    def writes(self) -> bool:
        """True on the first rank of replica 0, which writes the program's own files.

        Not collective.
        """
        return self.replica_id == 0 == self.inside.position

    @property
    def all_ranks(self) -> Any:
        """The ranks of all replicas: an object with ``rank`` and ``num_ranks``.

        It also has the ``collectives``, ``topology`` and ``settings`` of these ranks.
        It is this strategy itself, unless a replica consists of several ranks. For the
        library's own modules.
        """
        return self

    @property
    def collectives(self) -> Any:
        """Object for collective calls of replicas (of ranks in cross-replica context).

        For the library's own modules."""
        if self.meetings is not None:
            entry = current()
            if entry is not None and entry.strategy is self and entry.replica_context:
                return entry.replica_context.collectives
        return self._ranks

    def device_of(self, replica: int) -> str:
        """Return the device of a replica; for the library's own modules."""
        del replica
        return self.device

    @property
    def topology(self) -> Topology:
        """The communicators of the replicas, which `close` frees."""
        raise RuntimeError(
            f"expected a strategy on MPI, found {self!r}, which has no communicators; "
            "use MirroredStrategy or MultiWorkerMirroredStrategy"
        )

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices of this worker's replicas."""
        return (self.device,)

    @property
    def lost_ranks(self) -> tuple[int, ...] | None:
        """The ranks that are known to have died; None before a loss is detected."""
        return None

    @property
    def cluster_resolver(self) -> Any:
        """The cluster resolver that the program passed to the constructor, or None."""
        return None

    @property
    def settings(self) -> Settings:
        """The settings of timeouts and checks; the same on every replica."""
        # Settings are not resolved in the constructor: importing the package makes the
        # default strategy, and would fail if an environment variable were wrong.
        if self._settings is None:
            self._settings = Settings().resolved()
        return self._settings

    @contextmanager
    def scope(self) -> Iterator[Self]:
        """Make this strategy the current one, in cross-replica context, inside a block.

        Not collective.

        Yields
        ------
        Strategy
            This strategy.

        Raises
        ------
        RuntimeError
            If called inside a replica function, or in another strategy's scope.
        """
        entry = current()
        if entry is not None:
            self._require_cross("scope")
            if entry.strategy is not self or self.is_default:
                raise RuntimeError(
                    f"expected no other strategy around the scope of {self!r}, found "
                    f"that of {entry.strategy!r}, which is another object; make one "
                    "strategy, pass it on, and do not nest scopes of two"
                )
        if not self.is_default:
            watch_loaded_libraries()
        token = push(self.cross_context)
        try:
            yield self
            if not self.is_default:
                watch_loaded_libraries()
        finally:
            pop(token)

    def _require_cross(self, what: str) -> None:
        """Raise RuntimeError in replica context, or in another strategy's scope."""
        entry = current()
        if entry is None or (entry.strategy is self and not entry.replica_context):
            return
        # The default strategy does not count as another strategy.
        if entry.strategy.is_default or self.is_default:
            return
        if entry.strategy is not self:
            raise RuntimeError(
                f"expected {what} of {self!r} in its own scope, "
                f"{second_strategy(entry.strategy)}"
            )
        raise RuntimeError(
            f"expected {what} in cross-replica context, found it inside a replica "
            "function; call it outside strategy.run, or inside merge_call"
        )

    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call a function once on every replica.

        Logically collective over the strategy's replicas: all must call ``run``, but
        the call communicates only with ``on_error="raise"``, at its end.

        Parameters
        ----------
        fn : callable
            The function, which runs in replica context.
        args : list or tuple
            Positional arguments. Each distributed value in them is replaced by this
            replica's component; variables are passed unchanged.
        kwargs : dict, optional
            Keyword arguments; distributed values are replaced in the same way.
        options : RunOptions, optional
            Ignored; accepted for compatibility with tf.distribute.

        Returns
        -------
        object
            The function's result. With several replicas each leaf becomes PerReplica,
            except None, variables and Mirrored values.

        Raises
        ------
        ValueError
            If ``args`` is neither a list nor a tuple.
        TypeError
            If the function does not accept the arguments.
        ReplicaError
            With ``on_error="raise"``, if the function failed on another replica.
        """
        del options
        entry = current()
        if entry is not None:
            self._require_cross("run")
        channel = self.collectives.channel
        # The call is counted before anything can fail, so that the step counts in the
        # headers differ only if a rank did not call `run`.
        self.inside.count_run()
        if channel is not None:
            if channel.elsewhere is not None:
                channel.elsewhere()
            if channel.state.thread or channel.pending:
                refuse_inner("run")
            channel.position.enter_run()
        if self.digests is not None or self.run_inputs is not None:
            self._begin_run(args, kwargs)
        if active.recorder is not None:
            number = None if channel is None else {"run": channel.position.run_index}
            fn = active.recorder.around(fn, "run", "step", number)
        try:
            # `together` is not used here, because its null context would take a fifth
            # of the time of a `run` whose function does nothing.
            if self.raises_together:
                with self.collectives.section("run"):
                    result = self.replicas.run(fn, args, kwargs)
            else:
                result = self.replicas.run(fn, args, kwargs)
        except BaseException:
            self._end_run(failed=True)
            raise
        if self.run_ends:
            self._end_run(failed=False)
        return result

    def _begin_run(self, args: Any, kwargs: Any) -> None:
        """Record this step's digest, and compare its inputs, if that is requested."""
        if self.digests is not None:
            self.digests.record()
        inputs = self.run_inputs
        if inputs is None:
            return
        leaves = flatten((args, kwargs))[0]
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            # The rows of this step have been dealt; plain arrays may be configuration.
            leaves = []
        inputs.see(leaves, _plain_array)
        if inputs.done:
            self.run_inputs = None
        else:
            # If the function makes a collective call, all ranks have entered this step
            # when it ends.
            self.run_ends.append(lambda failed: inputs.look())

    def chooses_rows(self) -> None:
        """Note that the program chooses a replica's rows by itself.

        All ranks may then pass the same arrays to `run`. Not collective. For the
        library's own modules.
        """
        if self.run_inputs is not None:
            self.run_inputs.stop()
            self.run_inputs = None

    def _end_run(self, failed: bool) -> None:
        # Empty the list first: if a function raises, the next run must not call it.
        ends, self.run_ends = self.run_ends, []
        for function in ends:
            function(failed)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Return a context manager for a block of code that all replicas run.

        With ``on_error="raise"`` the end of the block is collective over the strategy's
        replicas: all raise an error of one replica. For the library's own modules.
        """
        return self.collectives.section(what) if self.raises_together else _ALONE

    def require_idle(self, what: str) -> None:
        """Raise an error if scheduled functions run; for the library's own modules."""

    def expect_slow(self, seconds: float) -> AbstractContextManager[None]:
        """Let other ranks wait longer for this replica before they warn or give up.

        Not collective: any replica may make this call, in any context. The option
        ``timeout_seconds`` of a collective call still applies.

        Parameters
        ----------
        seconds : float
            How long the block may take. Waits for this replica, and this replica's own
            waits, then count ``warn_seconds`` and ``limit_seconds`` from the end of the
            block, or from ``seconds`` after the block's start if that is earlier.

        Returns
        -------
        context manager
            Use it in a ``with`` statement around the slow code. If such blocks are
            nested, the block whose ``seconds`` end last counts.

        Raises
        ------
        ValueError
            If ``seconds`` is not positive and finite.
        """
        if not 0 < seconds < math.inf:
            raise ValueError(
                f"expected seconds > 0 and finite, found {seconds}; say how long the "
                "block may take"
            )
        return nullcontext()

    def rows(self, length: int) -> slice:
        """Return which rows of an array this rank has, or this replica inside of `run`.

        Not collective. Rows are divided as in a global batch of a distributed data set:
        all replicas have the same number, rounded up, except the last ones, which may
        have fewer or none.

        Parameters
        ----------
        length : int
            The number of rows of the whole array, at least 0.

        Returns
        -------
        slice
            The rows, such as ``array[strategy.rows(len(array))]``. The slices of all
            ranks are disjoint, and cover the array in rank order.

        Raises
        ------
        ValueError
            If ``length`` is negative.
        TypeError
            If ``length`` is not an integer.
        """
        count = operator.index(length)
        if count < 0:
            raise ValueError(
                f"expected a number of rows that is at least 0, found {count}; pass "
                "len(array)"
            )
        self.chooses_rows()
        block, index = self.local_replicas, own_index()
        if index is not None:
            block = block[index : index + 1]
        start, _ = piece(count, self.num_replicas_in_sync, block[0])
        return slice(start, piece(count, self.num_replicas_in_sync, block[-1])[1])

    @contextmanager
    def all_or_none(self, variable: Variable, what: str) -> Iterator[None]:
        """Undo the changes that a block makes to a variable, if the block fails.

        With ``on_error="raise"`` the end of the block is collective over the strategy's
        replicas: if the change fails on any replica, all replicas restore the old
        values. For the library's own modules.
        """
        if not self.raises_together:
            yield
            return
        # The old values are needed even if the change succeeds here: this replica
        # undoes its change if the change fails on another replica.
        before = [component.copy() for component in variable.components]
        try:
            with self.together(f"{what} of variable {variable.name!r}"):
                yield
        except BaseException:
            for component, old in zip(variable.components, before, strict=True):
                np.copyto(component, old)
            raise

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: Any = None,
        *,
        out: Tree = None,
    ) -> Tree:
        """Combine the replicas' values by an operation; every rank gets the result.

        Collective over the strategy's replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM``, ``MEAN``, ``MAX``, ``MIN``, ``ALL`` or ``ANY``. ``MAX`` and ``MIN``
            take booleans, integers, and floating-point numbers of at most 8 bytes;
            ``ALL`` and ``ANY`` take booleans.
        value : PerReplica, SyncOnRead variable, or array_like of shape (...)
            A value that is not distributed is this rank's contribution. Without
            ``axis``, ``value`` may be a nested structure.
        axis : int or tuple of int, optional
            Also reduce over these dimensions of each replica's array. Their lengths may
            differ between replicas; ``MEAN`` is then the mean of all elements. If no
            replica has an element, ``MAX`` is minus infinity or the smallest integer,
            ``ALL`` is True, and ``ANY`` is False.
        out : ndarray or tree of ndarray, optional
            Arrays that receive the results; not with ``axis``. They must be writable,
            have the structure, shapes and dtypes of the result, and share no memory
            with each other; any memory order is allowed. ``out=value`` reduces in
            place. Host arrays with DLPack, such as PyTorch's tensors, are allowed.

        Returns
        -------
        ndarray or tree of ndarray
            ``out``, or new arrays; equal bit for bit on every rank. ``MEAN`` of
            integers is float64.

        Raises
        ------
        ValueError
            For an unknown operation, an axis out of range, a dtype that the operation
            does not take, IndexedSlices with another operation than SUM and MEAN, the
            ``SUM`` of a Mirrored value, or an ``out`` that does not fit the result.
        TypeError
            If ``axis`` is not an integer or a tuple of integers, or if ``value`` is a
            nested structure and ``axis`` is given.
        CollectiveError
            If ranks disagree on structure, shape or dtype. On every rank.
        """
        plain = self.meetings is None and axis is None
        if plain and type(reduce_op) in OPERATIONS:
            entry = current()
            if entry is None or (
                entry.strategy is self and entry.replica_context is None
            ):
                result = self.collectives.repeat("reduce", reduce_op, value, out)
                if result is not None:
                    return result
        return self._reduce(reduce_op, value, axis, out)

    @collective
    def _reduce(
        self, reduce_op: ReduceOp | str, value: Tree, axis: Any, out: Tree
    ) -> Tree:
        entry = current()
        if entry is not None and (
            entry.strategy is not self or entry.replica_context is not None
        ):
            self._require_cross("reduce")
        plain = self.meetings is None and axis is None
        if plain and type(value) is np.ndarray:
            # A fast path for plain arrays, the most frequent case: each further check
            # would cost a microsecond.
            op = ReduceOp.parse(reduce_op)
            return self.collectives.reduce_in_call(op, value, "reduce", out=out)
        return value_reduction.reduce(self.replicas, reduce_op, value, axis, out)

    def gather(self, value: Tree, axis: int) -> Tree:
        """Concatenate the replicas' values along an axis, on every rank.

        Collective over the strategy's replicas.

        Parameters
        ----------
        value : PerReplica or array_like of shape (...)
            A value that is not distributed is this rank's contribution.
        axis : int
            At least 0. The lengths along this axis may differ between replicas.

        Returns
        -------
        ndarray
            The values of all replicas, in replica order.

        Raises
        ------
        ValueError
            For scalars, or an axis out of range.
        NotImplementedError
            For IndexedSlices.
        CollectiveError
            If values of different ranks differ in another dimension. On every rank.
        """
        if self.meetings is None and type(axis) is int:
            entry = current()
            if entry is None or (
                entry.strategy is self and entry.replica_context is None
            ):
                result = self.collectives.repeat_gather("gather", axis, value, None)
                if result is not None:
                    return result
        return self._gather(value, axis)

    @collective
    def _gather(self, value: Tree, axis: int) -> Tree:
        self._require_cross("gather")
        own = joined(self.replicas.parts(value), axis, "gather", self.local_replicas)
        return self._ranks.all_gather(own, axis, "gather")

    def local_value(self, tree: Tree) -> Tree:
        """Return this replica's part of every distributed value.

        Not collective.

        Parameters
        ----------
        tree : tree
            A nested structure. Leaves that are not distributed are returned unchanged.

        Returns
        -------
        tree
            The same structure. For a variable, this replica's component, read-only.
        """
        index = own_index() or 0
        if len(self.local_replicas) > 1 and own_index() is None:
            return tree_map(_only, tree)
        return part_of(tree, index, variables=True)

    def experimental_local_results(self, value: Tree) -> tuple[Any, ...]:
        """Return the components of a distributed value that belong to local replicas.

        Not collective: local replicas are those of this process. But on a
        MirroredStrategy or CentralStorageStrategy the call is collective over the
        strategy's replicas, and local replicas are those of this worker.

        Parameters
        ----------
        value : tree
            A distributed value, or a structure of such values.

        Returns
        -------
        tuple
            One value or structure per local replica; ``(value,)`` for a plain value.
        """
        distributed = not is_leaf(value) or isinstance(value, DistributedValues)
        return self._local_results(value, self.replicas.parts(value), distributed)

    def _local_results(
        self, value: Any, parts: list[Any], distributed: bool
    ) -> tuple[Any, ...]:
        return tuple(parts) if distributed else (value,)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Tree]
    ) -> Tree:
        """Return a distributed value whose components a function computes.

        Not collective, except for the end of the call with ``on_error="raise"``.

        Parameters
        ----------
        value_fn : callable
            Takes a ValueContext and returns this replica's part.

        Returns
        -------
        tree
            The function's results with PerReplica leaves; plain leaves with the default
            strategy and OneDeviceStrategy.
        """
        what = "experimental_distribute_values_from_function"
        with self.together(what):
            values = [
                value_fn(ValueContext(replica, self.num_replicas_in_sync))
                for replica in self.local_replicas
            ]
        if len(values) > 1:
            return self.replicas.joined(values, what, PerReplica)
        return tree_map(PerReplica, values[0]) if self.distributes else values[0]

    @collective
    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Divide the global batches of a data set between the replicas.

        Collective over the strategy's replicas.

        Parameters
        ----------
        dataset : Dataset or iterable of batches
            The source of the global batches.
        options : InputOptions, optional
            Options for reading the data set.

        Returns
        -------
        DistributedDataset or DealtDataset
            Iterable of per-replica batches.
        """
        return distribute_dataset(self, dataset, options or InputOptions())

    @collective
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DealtDataset:
        """Return a data set of the per-replica batches that a function makes.

        Collective over the strategy's replicas.

        Parameters
        ----------
        dataset_fn : callable
            Takes a worker's InputContext; returns an iterable of per-replica batches.
        options : InputOptions, optional
            Options for reading the batches.

        Returns
        -------
        DealtDataset
            Iterable of per-replica batches.
        """
        return distribute_from_function(self, dataset_fn, options or InputOptions())

    @collective
    def random(self, name: str, seed: int = 0) -> RandomStreams:
        """Return random streams: one for this replica, and one that all replicas share.

        Collective over the strategy's replicas.

        Parameters
        ----------
        name : str
            Name of the streams. Streams of different names are independent; streams of
            the same name and seed return the same numbers.
        seed : int
            At least 0, below 2**63.

        Returns
        -------
        RandomStreams
            Has the streams ``generator`` and ``shared``, which a `CheckpointManager`
            can save.

        Raises
        ------
        ValueError
            For a seed out of range.
        CollectiveError
            If ranks disagree on name or seed. On every rank.
        """
        streams = RandomStreams(self, name, seed)
        # The header has a digest of this text: different names or seeds raise an error.
        self.collectives.barrier(f"random({name!r}, seed={streams.seed})")
        return streams

    def barrier(self) -> None:
        """Wait for all replicas.

        Collective over the strategy's replicas."""
        self.collectives.barrier()

    def check_divergence(self) -> None:
        """Compare the copies of all mirrored variables; raise an error if they differ.

        Collective over the strategy's replicas. The call compares the variables of all
        open strategies over the same ranks.

        Raises
        ------
        DivergenceError
            If copies of a variable differ. On every replica.
        """
        self._require_cross("check_divergence")

    @collective
    def check_equal(self, tree: Tree) -> None:
        """Raise an error if arrays or numbers of the program differ between replicas.

        Collective over the strategy's replicas. Use this check for data that is not in
        variables but must be equal on all replicas, such as the parameters of another
        library's model, or a configuration. All bytes are hashed; arrays on a GPU are
        copied to the host first.

        Parameters
        ----------
        tree : tree
            Arrays of NumPy, CuPy or other libraries, tensors of PyTorch, numbers, str,
            bytes and None. Structure, types, shapes and all bits must be equal; NaN
            equals NaN of the same bits, and -0.0 differs from 0.0. For distributed
            values and variables, this replica's component is compared.

        Raises
        ------
        DivergenceError
            If anything differs. ``variable`` is the first leaf that differs,
            ``element`` its first different element, and ``ranks`` the replicas whose
            value differs from the value of most replicas. On every replica.
        ValueError
            For a leaf of an unsupported type; the other replicas raise ReplicaError.
        """
        self._require_cross("check_equal")
        check_equal(self, tree)

    @collective
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Send one replica's Python object to all replicas.

        Collective over the strategy's replicas.

        Parameters
        ----------
        value : object
            On the root, an object of any size that can be pickled; ignored elsewhere.
        root : int
            The replica that sends its object.

        Returns
        -------
        object
            On the root the object itself, on other replicas a copy.

        Raises
        ------
        ValueError
            If ``root`` is not the number of a replica.
        CollectiveError
            If ranks disagree on the root. On every rank.
        """
        if not 0 <= root < self.num_replicas_in_sync:
            raise ValueError(
                f"expected 0 <= root < {self.num_replicas_in_sync}, the number of "
                f"replicas, found {root}; choose one of them"
            )
        if self.meetings is not None and own_index() is None:
            root = self.replicas.order.owner(root)
        return self.collectives.broadcast_object(value, root, "broadcast_object")

    def arrivals(self) -> ArrivalReport:
        """Return how long each replica has waited for the others so far.

        Collective over the strategy's replicas.

        Returns
        -------
        ArrivalReport
            Covers all collective calls since the first strategy over these ranks was
            made. ``str(report)`` is a table with the slowest replica first.
        """
        channel = self.collectives.channel
        if isinstance(channel, Channel):
            own = channel.arrivals.own()
        else:
            own = ReplicaArrivals(self.replica_id, platform.node(), 0.0)
        return ArrivalReport(tuple(self.collectives.all_gather_object(own, "arrivals")))

    @contextmanager
    def timeline(self, directory: str | os.PathLike[str]) -> Iterator[None]:
        """Record a timeline of each rank's work in a block of the program.

        Collective over the strategy's replicas, at both ends of the block.

        Parameters
        ----------
        directory : str or path
            The directory for one file from each rank; created if it is missing. The
            command ``hpcstrat timeline merge`` merges the files into one trace.

        Yields
        ------
        None
            Nothing.

        Raises
        ------
        RuntimeError
            If another timeline is already being recorded.
        OSError
            If a rank cannot write to the directory. On every rank.
        """
        path = os.fspath(directory)
        self.collectives.barrier(f"timeline in {path}")
        channel = self.collectives.channel
        place: Any = (None, None)
        if isinstance(channel, Channel):
            place = channel.topology, channel.arrivals.comm
        if not job_timeline.start(path, self.settings, *place):
            raise RuntimeError(
                "expected no timeline around this one, found that one is being "
                "recorded; end it first, or unset HPCSTRAT_TIMELINE"
            )
        together = False
        try:
            yield
            self.collectives.barrier("end of a timeline")
            together = True
        finally:
            # After an error, `stop` makes no collective call, because the other ranks
            # may be in another call.
            job_timeline.stop(together=together)

    def trace(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Show a block of the program under a name in the timeline, if one is recorded.

        Not collective.

        Parameters
        ----------
        name : str
            Name of the part.
        **args : object
            Details that the timeline shows with the part.

        Returns
        -------
        context manager
            The block to record. Blocks can be nested.
        """
        return trace(name, **args)

    def close(self) -> None:
        """Free the communicators, if no other open strategy uses them.

        Collective over the strategy's replicas; not collective if the loss of a rank
        has been detected. A second call does nothing.

        Raises
        ------
        CollectiveError
            If a rank makes another collective call instead. On every rank.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, *rest: Any) -> None:
        # Closing is collective, and after an error the other ranks may be in another
        # call: closing could deadlock.
        if kind is None:
            self.close()

    # Copies are refused: a copy would free the same communicators a second time.
    def __copy__(self) -> Self:
        raise RuntimeError(
            f"expected one object for {self!r}, found an attempt to copy it; share it"
        )

    def __deepcopy__(self, memo: Any) -> Self:
        return self.__copy__()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(replica {self.replica_id} of "
            f"{self.num_replicas_in_sync})"
        )


_ALONE = nullcontext()


def _plain_array(leaf: Any) -> Any:
    """Return an argument of `run` as an array; None if it is none of this rank alone.

    Variables are equal on all ranks, as are parameters that require gradients.
    """
    is_array = isinstance(leaf, np.ndarray) or hasattr(leaf, "__dlpack__")
    is_shared = isinstance(leaf, (Variable, DistributedValues))
    if not is_array or is_shared or getattr(leaf, "requires_grad", False):
        return None
    return as_array(leaf)


def _only(leaf: Any) -> Any:
    # For a PerReplica value, `_local` raises an error here, because no replica function
    # runs that would select one of this process's replicas.
    return leaf._local if isinstance(leaf, DistributedValues) else leaf
