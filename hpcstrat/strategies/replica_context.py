"""The context of a replica function: the strategy, as one replica sees it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.pending_calls import PendingCall
from hpcstrat.engine.context import current, pop, push
from hpcstrat.engine.logical.meetings import EndedReduction, Meetings
from hpcstrat.engine.logical.replica_sums import require_no_wire_dtype
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.reduction.replica_collectives import Collectives
from hpcstrat.engine.typing import Tree
from hpcstrat.engine.values import localize

if TYPE_CHECKING:
    # The strategy lies above: it makes the contexts.
    from hpcstrat.strategies.base import Strategy

# Types of an operation that can be keys of a dict.
OPERATIONS = str, ReduceOp


class ReplicaContext:
    """One replica's view of the strategy in a running replica function.

    Made by the strategy; outside of ``run`` its methods raise RuntimeError.

    Parameters
    ----------
    strategy : Strategy
        The strategy that runs the function.
    replica_id_in_sync_group : int
        The number of this replica, from 0 to ``num_replicas_in_sync - 1``.
    collectives : Collectives or Meetings
        The calls of this replica.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica_id_in_sync_group: int,
        collectives: Collectives | Meetings,
    ) -> None:
        self._strategy = strategy
        self._replica_id = replica_id_in_sync_group
        self.collectives = collectives

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs the function."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """The number of this replica."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """This replica's device."""
        return (self._strategy.device_of(self._replica_id),)

    def _require_current(self, what: str) -> None:
        entry = current()
        active = None if entry is None else entry.replica_context
        # The default strategy's context is what stands outside everything.
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
        args, kwargs : sequence, mapping, optional
            This replica's arguments.

        Returns
        -------
        object
            The result of ``merge_fn``, with this replica's part of distributed values.

        Raises
        ------
        CollectiveError
            If another replica made another call. On every replica.
        ReplicaError
            With ``on_error="raise"``, if ``merge_fn`` failed on another replica.
        """
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        # Part of the header, so that replicas which merge other functions get an error.
        what = f"merge_call of {name}"
        meetings = self._strategy.meetings
        if meetings is not None:
            self._require_current("merge_call")
            act = functools.partial(self._strategy.replicas.merge, what, merge_fn)
            return meetings.meet(what, act, (args, kwargs or {}))
        # Outside of `together`, as every replica raises its errors anyway.
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
        named = {k: strategy.replicas.distributed(v) for k, v in (kwargs or {}).items()}
        return [strategy.replicas.distributed(argument) for argument in args], named

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
            Where the results go, see ``Strategy.reduce``; not for IndexedSlices.

        Returns
        -------
        tree
            ``out``, or new arrays; equal bit for bit on every replica. ``MEAN`` of
            integers is float64.

        Raises
        ------
        CollectiveError
            If replicas disagree. On every replica.
        ValueError
            For an unknown operation, a type that has no sum, or an ``out`` that does
            not fit.
        """
        options = options or experimental_hints
        if options is None and type(reduce_op) in OPERATIONS:
            entry = current()
            if entry is not None and entry.replica_context is self:
                repeat = self.collectives.repeat
                result = repeat("all_reduce", reduce_op, value, out)
                if result is not None:
                    return result
        return self._all_reduce(reduce_op, value, options, out)

    @collective
    def _all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        options: CommunicationOptions | None,
        out: Tree,
    ) -> Tree:
        entry = current()
        if entry is None or entry.replica_context is not self:
            self._require_current("all_reduce")
        op = ReduceOp.parse(reduce_op)
        if options is not None and self._strategy.logical:
            require_no_wire_dtype(options)
        reduce = self.collectives.reduce_in_call
        return reduce(op, value, "all_reduce", options, out=out)

    @collective
    def start_all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Tree,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
    ) -> PendingCall | EndedReduction:
        """Start an `all_reduce`; the program waits for its result later.

        Collective over the strategy's replicas; does not wait for them.

        Several may be pending; they end in the order of their starts. Messages between
        workers travel meanwhile, as far as the network carries them by itself. Every
        call of the strategy, and ``test``, continues the reduction; ranks of a worker
        move data during those calls.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            ``SUM`` or ``MEAN``.
        value : tree of array, each of shape (...)
            As in `all_reduce`, without IndexedSlices; do not write it before the end.
        options : CommunicationOptions, optional
            For this call.
        out : tree of ndarray, optional
            As in `all_reduce`; do not read or write it before the end.

        Returns
        -------
        PendingCall or EndedReduction
            ``test()`` says whether it has ended; ``wait()`` returns the result of
            `all_reduce`, or raises the replicas' disagreement.

        Raises
        ------
        ValueError
            As in `all_reduce`.
        """
        what = "start_all_reduce"
        self._require_current(what)
        op = ReduceOp.parse(reduce_op)
        return self.collectives.start_in_call(op, value, what, options, out=out)

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
        """
        del options
        self._require_current("all_gather")
        return self.collectives.all_gather(value, axis, "all_gather")

    def __repr__(self) -> str:
        return (
            f"ReplicaContext(replica {self._replica_id} of {self.num_replicas_in_sync})"
        )
