"""What a replica function sees of its strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcstrat.channel.entries import collective
from hpcstrat.channel.started import Started
from hpcstrat.context import current, pop, push
from hpcstrat.options import CommunicationOptions, ReduceOp
from hpcstrat.typing import Tree
from hpcstrat.values import localize

if TYPE_CHECKING:
    from hpcstrat.strategies.base import Strategy

__all__ = ["ReplicaContext"]


class ReplicaContext:
    """One replica's side of a running replica function.

    Made by the strategy; valid inside ``run`` only.

    Parameters
    ----------
    strategy : Strategy
        The strategy that runs the function.
    replica_id_in_sync_group : int
        Which replica this is, from 0 to ``num_replicas_in_sync - 1``.

    Attributes
    ----------
    collectives : Collectives
        For the library's own modules.
    """

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int) -> None:
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self.collectives = strategy.collectives

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs the function."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Which replica this is."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """This replica's device."""
        return (self._strategy.device,)

    def _require_current(self, what: str) -> None:
        entry = current()
        active = None if entry is None else entry.replica_context
        if active is not self and not (entry is None and self._strategy.is_default):
            raise RuntimeError(
                f"expected {what} inside the replica function of {self._strategy!r}, "
                "found another context; call get_replica_context() inside strategy.run"
            )

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Leave replica context together with all replicas, for one function.

        Collective over the strategy's replicas.

        Parameters
        ----------
        merge_fn : callable
            Takes the strategy, then the arguments as distributed values; runs in
            cross-replica context.
        args : sequence
            This replica's positional arguments.
        kwargs : mapping, optional
            This replica's keyword arguments.

        Returns
        -------
        object
            What ``merge_fn`` returned, distributed values replaced by this replica's
            part.

        Raises
        ------
        CollectiveError
            If another replica made another call. On every replica.
        ReplicaError
            With ``on_error="raise"``, if ``merge_fn`` failed on another replica.
        RuntimeError
            Outside the replica function.
        """
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        what = f"merge_call of {name}"
        merged, named = self._merged(what, args, kwargs)
        strategy = self._strategy
        with strategy.together(what):
            token = push(strategy.cross_entry)
            try:
                result = merge_fn(strategy, *merged, **named)
            finally:
                pop(token)
            return localize(result)

    @collective
    def _merged(self, what: str, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """Meet all replicas, and return the arguments of a merged function."""
        self._require_current("merge_call")
        strategy = self._strategy
        strategy.collectives.barrier(what)
        named = {k: strategy.distributed(v) for k, v in (kwargs or {}).items()}
        return [strategy.distributed(argument) for argument in args], named

    @collective
    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        options: CommunicationOptions | None = None,
        *,
        experimental_hints: CommunicationOptions | None = None,
        out: Tree = None,
    ) -> Tree:
        """Combine the replicas' values; every replica gets the result.

        Collective over the strategy's replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        value : tree of array or IndexedSlices, each of shape (...)
            This replica's part: same structure, shapes and dtypes on every replica.
        options : CommunicationOptions, optional
            For this call.
        experimental_hints : CommunicationOptions, optional
            The older name of ``options``.
        out : tree of ndarray, optional
            Where the results go: of the structure, shapes and dtypes of the result,
            writable, in any memory order; no two share memory. The value itself reduces
            in place. An array of another library in host memory will do, such as a
            tensor of PyTorch, if it shares its memory by DLPack. Only for arrays, not
            for IndexedSlices.

        Returns
        -------
        tree
            ``out``, or arrays of their own; equal bit for bit on every replica.
            ``MEAN`` of integers is float64.

        Raises
        ------
        CollectiveError
            If replicas disagree. On every replica.
        ValueError
            For an unknown operation, a type that has no sum, or an ``out`` that does
            not fit.
        RuntimeError
            Outside the replica function.
        """
        entry = current()
        if entry is None or entry.replica_context is not self:
            self._require_current("all_reduce")
        options = options or experimental_hints
        op = ReduceOp.parse(reduce_op)
        return self.collectives.reduce_inside(op, value, "all_reduce", options, out=out)

    @collective
    def start_all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
    ) -> Started:
        """Start an `all_reduce`, whose result is awaited later.

        Collective over the strategy's replicas; does not wait for them.

        Several may be under way; they end in the order in which they were started.
        Messages between workers travel meanwhile, as far as the network carries them by
        itself; every call of the strategy, and ``test``, takes the reduction further.
        Inside a worker the ranks themselves move the data, during those calls.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        value : tree of array, each of shape (...)
            As in `all_reduce`, without IndexedSlices; not to be written before the end.
        options : CommunicationOptions, optional
            For this call.
        out : tree of ndarray, optional
            As in `all_reduce`; not to be read or written before the end.

        Returns
        -------
        Started
            ``test()`` says whether it has ended, ``wait()`` returns what `all_reduce`
            would have returned.

        Raises
        ------
        ValueError
            As in `all_reduce`. A disagreement of the replicas is raised by ``wait``.
        RuntimeError
            Outside the replica function.
        """
        what = "start_all_reduce"
        self._require_current(what)
        op = ReduceOp.parse(reduce_op)
        return self.collectives.start_inside(op, value, what, options, out=out)

    @collective
    def all_gather(
        self, value: Tree, axis: int, options: CommunicationOptions | None = None
    ) -> Tree:
        """Concatenate the replicas' values along an axis; every replica gets them.

        Collective over the strategy's replicas.

        Parameters
        ----------
        value : tree of array, each of shape (...)
            This replica's part; the lengths along ``axis`` may differ.
        axis : int
            At least 0, below the number of dimensions.
        options : CommunicationOptions, optional
            Accepted for tf.distribute's sake.

        Returns
        -------
        tree of ndarray
            Fresh arrays, in replica order.

        Raises
        ------
        ValueError
            For scalars, or an axis out of range.
        CollectiveError
            If replicas disagree on another dimension. On every replica.
        RuntimeError
            Outside the replica function.
        """
        del options
        self._require_current("all_gather")
        return self.collectives.all_gather(value, axis, "all_gather")

    def __repr__(self) -> str:
        """Show the replica's place."""
        return (
            f"ReplicaContext(replica {self._replica_id} of {self.num_replicas_in_sync})"
        )
