"""`ReplicaContext`: the methods that a replica function calls during ``run``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.pending_calls import PendingCall
from hpcstrat.engine.context import current, pop, push
from hpcstrat.engine.logical.meetings import EndedReduction, Meetings
from hpcstrat.engine.logical.replica_sums import require_no_wire_dtype
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.typing import Tree
from hpcstrat.engine.values import localize

if TYPE_CHECKING:
    # Imported for types only: the strategy module imports this module.
    from hpcstrat.strategies.base import Strategy
    from hpcstrat.strategies.inside import Inside

# Types of ``reduce_op`` that the fast path can use as keys of a dict.
OPERATIONS = str, ReduceOp


class ReplicaContext:
    """One replica's view of the strategy in a running replica function.

    The strategy makes this object. Its methods raise RuntimeError outside of ``run``.

    Parameters
    ----------
    strategy : Strategy
        The strategy that runs the function.
    replica_id_in_sync_group : int
        The number of this replica, from 0 to ``num_replicas_in_sync - 1``.
    collectives : Collectives or Meetings
        The collective calls of this replica.
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
        # A function that knows its number can choose its rows of equal arguments.
        self._strategy.chooses_rows()
        return self._replica_id

    @property
    def inside(self) -> Inside:
        """The ranks of this replica, and the calls among them."""
        return self._strategy.inside

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in this replica's sync group."""
        return self._strategy.num_replicas_in_sync

    @property
    def devices(self) -> tuple[str, ...]:
        """This replica's device."""
        return (self._strategy.device_of(self._replica_id),)

    def _require_current(self, what: str) -> None:
        entry = current()
        active = None if entry is None else entry.replica_context
        # Outside of all scopes the default strategy's context is the current one.
        if active is not self and not (entry is None and self._strategy.is_default):
            raise RuntimeError(
                f"expected {what} inside the replica function of {self._strategy!r}, "
                "found another context; call get_replica_context() inside strategy.run"
            )

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a function in cross-replica context, together with all replicas.

        Collective over the strategy's replicas.

        Parameters
        ----------
        merge_fn : callable
            Called with the strategy, then the arguments as distributed values; runs in
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
            If a replica makes another collective call instead. On every replica.
        ReplicaError
            With ``on_error="raise"``, if ``merge_fn`` failed on another replica.
        """
        name = getattr(merge_fn, "__qualname__", type(merge_fn).__name__)
        # The header contains this text: different functions raise a CollectiveError.
        what = f"merge_call of {name}"
        meetings = self._strategy.meetings
        if meetings is not None:
            self._require_current("merge_call")
            act = functools.partial(self._strategy.replicas.merge, what, merge_fn)
            return meetings.meet(what, act, (args, kwargs or {}))
        # `_merged` is called outside of `together`, because it is a collective call,
        # whose errors are raised on every replica anyway.
        merged, named = self._merged(what, args, kwargs)
        strategy = self._strategy
        with strategy.together(what):
            token = push(strategy.cross_context)
            try:
                result = merge_fn(strategy, *merged, **named)
            finally:
                pop(token)
            return localize(result)

    @collective
    def _merged(self, what: str, args: Any, kwargs: Any) -> tuple[list[Any], Any]:
        """Wait for all replicas; return the arguments as distributed values."""
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
        """Combine the replicas' values by an operation; every replica gets the result.

        Collective over the strategy's replicas.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            An operation, as in ``Strategy.reduce``.
        value : tree of array or IndexedSlices, each of shape (...)
            This replica's value; structures, shapes and dtypes are equal on all
            replicas.
        options : CommunicationOptions, optional
            Options of this call only.
        experimental_hints : CommunicationOptions, optional
            Older name of ``options``.
        out : tree of ndarray, optional
            Arrays for the results, as in ``Strategy.reduce``; not for IndexedSlices.

        Returns
        -------
        tree
            ``out``, or new arrays; equal bit for bit on every replica. ``MEAN`` of
            integers is float64.

        Raises
        ------
        CollectiveError
            If replicas' structures, shapes, dtypes or operations differ. On every
            replica.
        ValueError
            For an unknown operation, a dtype that the operation does not take, or an
            ``out`` of another structure, shape or dtype.
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
        """Start an `all_reduce`, and return an object that can wait for its result.

        Collective over the strategy's replicas, but the call does not wait for them.

        Several reductions may be pending; they end in the order of their starts. While
        the program computes, messages between workers travel if the network hardware
        moves them without the CPU. Every call of the strategy, and every ``test``,
        continues the reduction; ranks of one worker exchange data only in these calls.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            An operation, as in ``Strategy.reduce``.
        value : tree of array, each of shape (...)
            As in `all_reduce`, but IndexedSlices are not allowed. Do not write to
            ``value`` before the reduction has ended.
        options : CommunicationOptions, optional
            Options of this call only.
        out : tree of ndarray, optional
            As in `all_reduce`. Do not use ``out`` before the reduction has ended.

        Returns
        -------
        PendingCall or EndedReduction
            ``test()`` returns whether the reduction has ended. ``wait()`` returns its
            result, or raises a CollectiveError if the replicas' calls differ.

        Raises
        ------
        ValueError
            As in `all_reduce`.
        """
        what = "start_all_reduce"
        self._require_current(what)
        op = ReduceOp.parse(reduce_op)
        return self.collectives.start_in_call(op, value, what, options, out=out)

    def all_gather(
        self, value: Tree, axis: int, options: CommunicationOptions | None = None
    ) -> Tree:
        """Concatenate the replicas' values along an axis, on every replica.

        Collective over the strategy's replicas.

        Parameters
        ----------
        value : tree of array, each of shape (...)
            This replica's value. Lengths along ``axis`` may differ between replicas.
        axis : int
            At least 0, below the number of dimensions.
        options : CommunicationOptions, optional
            Ignored; accepted for compatibility with tf.distribute.

        Returns
        -------
        tree of ndarray
            New arrays that contain the values in replica order.

        Raises
        ------
        ValueError
            For scalars, or an axis out of range.
        CollectiveError
            If the replicas' values differ in another dimension. On every replica.
        """
        del options
        entry = current()
        if entry is not None and entry.replica_context is self and type(axis) is int:
            result = self.collectives.repeat_gather("all_gather", axis, value, None)
            if result is not None:
                return result
        return self._all_gather(value, axis)

    @collective
    def _all_gather(self, value: Tree, axis: int) -> Tree:
        self._require_current("all_gather")
        return self.collectives.all_gather(value, axis, "all_gather")

    @collective
    def start_all_gather(self, value: Tree, axis: int) -> PendingCall | EndedReduction:
        """Start a gather of equal shapes, and return an object that can wait for it.

        Collective over the strategy's replicas, but the call does not wait for them.
        Started calls end in the order of their starts, see `start_all_reduce`.

        Parameters
        ----------
        value : tree of array, each of shape (...)
            This replica's value, in host memory; structures, shapes and dtypes are
            equal on all replicas. Do not write to ``value`` before the end of the call.
        axis : int
            At least 0, below the number of dimensions.

        Returns
        -------
        PendingCall or EndedReduction
            ``test()`` returns whether the gather has ended. ``wait()`` returns new
            arrays that contain the values in replica order, as `all_gather` does. It
            raises a CollectiveError, on every replica, if the replicas' calls or shapes
            differ.

        Raises
        ------
        ValueError
            For scalars, an axis out of range, or arrays on GPUs.
        """
        what = "start_all_gather"
        self._require_current(what)
        return self.collectives.start_all_gather(value, axis, what)

    def __repr__(self) -> str:
        return (
            f"ReplicaContext(replica {self._replica_id} of {self.num_replicas_in_sync})"
        )
