"""The calls of a strategy in cross-replica context."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from hpcstrat.channel.entries import collective
from hpcstrat.options import InputContext, InputOptions, ReduceOp, ValueContext
from hpcstrat.randomness import RandomStreams
from hpcstrat.reduction.replica_collectives import Collectives
from hpcstrat.safety.divergence.equality import check_equal
from hpcstrat.strategies import value_reduction
from hpcstrat.tree import flatten, tree_map, unflatten
from hpcstrat.typing import Tree
from hpcstrat.values import DistributedValues, PerReplica

if TYPE_CHECKING:
    from hpcstrat.data import DealtDataset
    from hpcstrat.strategies.base import Strategy

__all__ = ["CrossReplicaMethods"]


class CrossReplicaMethods:
    """What `Strategy` does with values of all replicas; for it alone."""

    collectives: Collectives
    replica_id: int
    distributes: bool
    num_replicas_in_sync: Any

    def _require_cross(self, what: str) -> None:
        raise NotImplementedError(what)

    def together(self, what: str) -> AbstractContextManager[None]:
        """Return what surrounds a part of the program; see `Strategy`.

        Not collective.

        Parameters
        ----------
        what : str
            The part.

        Returns
        -------
        context manager
            See `Strategy.together`.
        """
        raise NotImplementedError(what)

    @collective
    def reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        axis: Any = None,
        *,
        out: Tree = None,
    ) -> Tree:
        """Combine the replicas' values into one, on every rank.

        Collective over the strategy's replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        value : PerReplica, SyncOnRead variable, or array_like of shape (...)
            A plain value is this rank's contribution. A nested structure is allowed
            without an axis.
        axis : int or tuple of int, optional
            Also reduce over these dimensions of each replica's array, whose length may
            differ; the mean is then weighted by it.
        out : ndarray or tree of ndarray, optional
            Where the results go: of the structure, shapes and dtypes of the result,
            writable, in any memory order; no two share memory. The value itself reduces
            in place. An array of another library in host memory will do, such as a
            tensor of PyTorch, if it shares its memory by DLPack. Only without an axis,
            and for arrays.

        Returns
        -------
        ndarray or tree of ndarray
            ``out``, or arrays of their own; equal bit for bit on every rank. ``MEAN``
            of integers is float64.

        Raises
        ------
        ValueError
            For an unknown operation, an axis out of range, a type without a sum, the
            ``SUM`` of a Mirrored value, or an ``out`` that does not fit.
        TypeError
            For an axis that is no integer or tuple, or a structure with an axis.
        CollectiveError
            If ranks disagree on structure, shape or dtype. On every rank.
        RuntimeError
            In replica context.
        """
        self._require_cross("reduce")
        return value_reduction.reduce(self.collectives, reduce_op, value, axis, out)

    @collective
    def gather(self, value: Tree, axis: int) -> Tree:
        """Concatenate the replicas' values along an axis, on every rank.

        Collective over the strategy's replicas.

        Parameters
        ----------
        value : PerReplica or array_like of shape (...)
            A plain value is this rank's contribution.
        axis : int
            At least 0; the lengths along it may differ.

        Returns
        -------
        ndarray
            In replica order.

        Raises
        ------
        ValueError
            For scalars, or an axis out of range.
        NotImplementedError
            For IndexedSlices.
        CollectiveError
            If ranks disagree on another dimension. On every rank.
        RuntimeError
            In replica context.
        """
        self._require_cross("gather")
        parts = value_reduction.contributions(value)
        return self.collectives.all_gather(parts, axis, "gather")

    def local_value(self, tree: Tree) -> Tree:
        """Return this replica's part of every distributed value.

        Not collective.

        Parameters
        ----------
        tree : tree
            Other leaves stay as they are.

        Returns
        -------
        tree
            The same structure; variables give their component, read-only.
        """
        return tree_map(_local, tree)

    def experimental_local_results(self, value: Tree) -> tuple[Any, ...]:
        """Return the values of this worker's replicas.

        Not collective, except on a MirroredStrategy, where it is collective over its
        replicas.

        Parameters
        ----------
        value : tree
            A distributed value, or a structure that holds some.

        Returns
        -------
        tuple
            One value, or structure, per replica; ``(value,)`` for a plain one that is
            no structure.
        """
        leaves, structure = flatten(value)
        distributed = not structure.is_leaf() or isinstance(value, DistributedValues)
        own = unflatten(structure, [_local(leaf) for leaf in leaves])
        return self._local_results(value, own, distributed)

    def _local_results(
        self, value: Any, own: Any, distributed: bool
    ) -> tuple[Any, ...]:
        return (own if distributed else value,)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Tree]
    ) -> Tree:
        """Make a distributed value by a function.

        Not collective, but its end is with ``on_error="raise"``.

        Parameters
        ----------
        value_fn : callable
            Takes a ValueContext and returns this replica's part.

        Returns
        -------
        tree
            With PerReplica leaves, also for one replica.
        """
        with self.together("experimental_distribute_values_from_function"):
            value = value_fn(ValueContext(self.replica_id, self.num_replicas_in_sync))
        return tree_map(PerReplica, value) if self.distributes else value

    @collective
    def experimental_distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> Any:
        """Divide the global batches of a data set between the replicas.

        Collective over the strategy's replicas.

        Parameters
        ----------
        dataset : Dataset or iterable of batches
            Gives global batches.
        options : InputOptions, optional
            How.

        Returns
        -------
        DistributedDataset or DealtDataset
            Iterable of per-replica batches.
        """
        from hpcstrat.data import distribute_dataset

        return distribute_dataset(
            cast("Strategy", self), dataset, options or InputOptions()
        )

    @collective
    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DealtDataset:
        """Distribute per-replica batches that a function makes for each worker.

        Collective over the strategy's replicas.

        Parameters
        ----------
        dataset_fn : callable
            Takes an InputContext and returns an iterable of per-replica batches.
        options : InputOptions, optional
            How.

        Returns
        -------
        DealtDataset
            Iterable of per-replica batches.
        """
        from hpcstrat.data import distribute_from_function

        return distribute_from_function(
            cast("Strategy", self), dataset_fn, options or InputOptions()
        )

    @collective
    def random(self, name: str, seed: int = 0) -> RandomStreams:
        """Return random numbers: this replica's own, and some that all share.

        Collective over the strategy's replicas.

        Parameters
        ----------
        name : str
            Of the streams; those of two names are independent, and two calls with one
            name and seed give the same numbers.
        seed : int
            At least 0, below 2**63.

        Returns
        -------
        RandomStreams
            With ``generator`` and ``shared``; a `CheckpointManager` saves it.

        Raises
        ------
        ValueError
            For a seed out of range.
        CollectiveError
            If ranks disagree on name or seed. On every rank.
        """
        streams = RandomStreams(cast("Strategy", self), name, seed)
        self.collectives.barrier(f"random({name!r}, seed={streams.seed})")
        return streams

    @collective
    def barrier(self) -> None:
        """Wait for all replicas.

        Collective over the strategy's replicas.
        """
        self.collectives.barrier()

    def check_divergence(self) -> None:
        """Compare all copies of all mirrored variables now.

        Collective over the strategy's replicas. One replica has nothing to compare.

        Raises
        ------
        DivergenceError
            If copies of a variable differ. On every replica.
        RuntimeError
            In replica context.
        """
        self._require_cross("check_divergence")

    @collective
    def check_equal(self, tree: Tree) -> None:
        """Compare arrays and numbers of the program itself between replicas.

        Collective over the strategy's replicas. For what is no variable of a strategy,
        but has to be equal on all replicas: plain arrays, the parameters of a model of
        another library, a configuration. Costs the hashing of the bytes; arrays on a
        GPU are copied to the host for it.

        Parameters
        ----------
        tree : tree
            Of arrays of NumPy, CuPy or any library whose arrays can be given elsewhere,
            tensors of PyTorch with a gradient included, of any shape and type; numbers,
            str, bytes and None. Structure, types, shapes and all bits are compared:
            those of NaN count, and -0.0 is not 0.0. Of distributed values and variables
            it is this replica's component.

        Raises
        ------
        DivergenceError
            If anything differs, naming the first leaf that does, as ``variable``, its
            first ``element``, and the replicas whose value is not that of most of them,
            as ``ranks``. On every replica.
        ValueError
            For a leaf of another kind; on the other replicas ReplicaError.
        RuntimeError
            In replica context.
        """
        self._require_cross("check_equal")
        check_equal(cast("Strategy", self), tree)

    @collective
    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Give every replica one replica's Python object.

        Collective over the strategy's replicas.

        Parameters
        ----------
        value : object
            Anything that pickles, of any size; ignored on the other replicas.
        root : int
            The replica whose object is taken.

        Returns
        -------
        object
            The object on the root, a copy elsewhere.

        Raises
        ------
        ValueError
            If there is no such replica.
        CollectiveError
            If ranks disagree on the root. On every rank.
        """
        if not 0 <= root < self.num_replicas_in_sync:
            raise ValueError(
                f"expected 0 <= root < {self.num_replicas_in_sync}, the number of "
                f"replicas, found {root}; choose one of them"
            )
        return self.collectives.broadcast_object(value, root, "broadcast_object")


def _local(leaf: Any) -> Any:
    return leaf._local if isinstance(leaf, DistributedValues) else leaf
