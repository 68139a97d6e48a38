"""The replicas of this process: their contexts, function calls, and values."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any

from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.context import ActiveContext, own_index, pop, push
from hpcstrat.engine.logical.meetings import Listener, Meetings, run_listened
from hpcstrat.engine.logical.replica_sums import ReplicaSums
from hpcstrat.engine.logical.tree_order import TreeOrder
from hpcstrat.engine.options import ReduceOp
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Tree
from hpcstrat.engine.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    localize,
    part_of,
)
from hpcstrat.strategies.replica_context import ReplicaContext
from hpcstrat.variables import Variable

_READ_ONLY = (
    "hpcstrat: the values of variables are read-only; write into a variable with "
    "assign, or into a copy of its value"
)


class LocalReplicas:
    """The replicas of this process: one, or several logical replicas.

    ``ranks`` makes the collective calls between the processes; ``rank`` is the number
    of this process. ``count`` is the total number of logical replicas of all processes,
    or None if each process has one replica.
    """

    def __init__(
        self, strategy: Any, ranks: Collectives, rank: int, count: int | None
    ) -> None:
        self._strategy = strategy
        self._ranks = ranks
        self._rank = rank
        self.num_replicas = count or ranks.size
        self._logical = count is not None
        self.order = TreeOrder(self.num_replicas, ranks.size)
        self._sums = ReplicaSums(ranks, self.order, rank)
        self.block = self._sums.block
        # Objects that save a logical replica's state (such as its current GPU) when the
        # replica pauses, and restore it when the replica resumes.
        self.listeners: list[Listener] = []
        # Context entries are made once, to save time in every `run` and merge call.
        self.cross_context = ActiveContext(strategy)
        self.meetings: Meetings | None = None
        # With one replica on each of at most two ranks, sums need no tree order: two
        # values have the same sum in either order.
        plain = self.num_replicas == ranks.size <= 2
        if count is not None and not plain:
            self.meetings = Meetings(
                ranks, self._sums, self.cross_context, self.listeners
            )
        inside = self.meetings or ranks
        self.entries = [
            ActiveContext(
                strategy, ReplicaContext(strategy, replica, inside), index=index
            )
            for index, replica in enumerate(self.block)
        ]
        self.update_entries = [
            ActiveContext(strategy, updating=True, index=index)
            for index in range(len(self.block))
        ]

    def run(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function for each replica of this process, one after the other.

        Returns the results as distributed values."""
        if not isinstance(args, (list, tuple)):
            raise ValueError(
                f"expected a list or tuple of arguments, found {type(args).__name__}; "
                "write args=(value,), or args=(batch,) for a whole batch"
            )
        if self.meetings is None and not self.listeners:
            result = self._caller()(self.entries[0], fn, args, kwargs)
            return None if result is None else self.distributed(result)
        functions = [
            functools.partial(self._caller(), entry, fn, args, kwargs)
            for entry in self.entries
        ]
        one_by_one = None if self.meetings is None else self.meetings.take_turns
        results = run_listened(functions, self.listeners, one_by_one)
        return self.joined(results, "the results of run")

    def _caller(self) -> Callable[..., Any]:
        """Return `call`; with logical replicas, in a copy of the caller's context.

        So a replica finds the values of context variables that the program has set
        before `run`, and never those that a replica has set, whether the rank has one
        replica or several.
        """
        if not self._logical:
            return self.call
        run: Any = contextvars.copy_context().run
        return functools.partial(run, self.call)

    @staticmethod
    def call(
        entry: ActiveContext, fn: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call ``fn`` in the context ``entry``, with that replica's argument values."""
        token = push(entry)
        try:
            if args:
                args = [localize(argument) for argument in args]
            named = {k: localize(v) for k, v in kwargs.items()} if kwargs else {}
            return fn(*args, **named)
        except TypeError as error:
            _require_fitting(fn, args, kwargs or {}, error)
            raise
        except ValueError as error:
            if "read-only" in str(error):
                error.add_note(_READ_ONLY)
            raise
        finally:
            pop(token)

    def merge(
        self, what: str, merge_fn: Callable[..., Any], given: list[Any]
    ) -> list[Any]:
        """Call ``merge_fn`` once; return each local replica's part of the result.

        Collective over the strategy's replicas. ``given`` has the positional and the
        keyword arguments of each local replica; ``merge_fn`` gets distributed values.
        """
        self._ranks.barrier(what)
        with self._strategy.together(what):
            count, names = len(given[0][0]), given[0][1].keys()
            if any(len(a) != count or k.keys() != names for a, k in given):
                raise ValueError(
                    f"expected the same arguments in {what} on all replicas, found "
                    "different numbers or names of arguments; pass the same on all"
                )
            merged = [
                self.joined([args[i] for args, _ in given], what) for i in range(count)
            ]
            named = {
                name: self.joined([kwargs[name] for _, kwargs in given], what)
                for name in names
            }
            result = merge_fn(self._strategy, *merged, **named)
            return [part_of(result, index) for index in range(len(given))]

    def joined(
        self, trees: list[Tree], what: str, wrap: Callable[..., Any] | None = None
    ) -> Tree:
        """Combine trees, one for each replica, into one tree of distributed values.

        ``wrap`` makes a distributed value from corresponding leaves; by default, leaves
        are wrapped like results of `run`. Raises ValueError if the structures differ.
        """
        if len(trees) == 1:
            return self.distributed(trees[0])
        flats = [flatten(tree) for tree in trees]
        for replica, (_, structure) in zip(self.block, flats, strict=True):
            if structure != flats[0][1]:
                raise ValueError(
                    f"expected one structure in {what} on all replicas, found "
                    f"{flats[0][1]} on replica {self.block[0]} and {structure} on "
                    f"replica {replica}; return the same on all"
                )
        columns = zip(*(leaves for leaves, _ in flats), strict=True)
        return unflatten(flats[0][1], [(wrap or _wrap)(*column) for column in columns])

    def distributed(self, tree: Tree) -> Tree:
        """Return a tree with this replica's leaves wrapped as distributed values."""
        if self.meetings is not None and own_index() is not None:

            def act(trees: list[Tree]) -> list[Tree]:
                return [self.joined(trees, "an output")] * len(trees)

            return self.meetings.meet("output of a step", act, tree)
        return tree if self.num_replicas == 1 else tree_map(_wrap, tree)

    def mirrored(self, value: Any) -> Mirrored:
        """Return a Mirrored with this value for each replica of this process."""
        return Mirrored(*[value] * len(self.block))

    def parts(self, tree: Tree) -> list[Tree]:
        """Return, for each replica of this process, the tree of the replica's values.

        The replica's component replaces each distributed value and variable."""
        return [
            part_of(tree, index, variables=True) for index in range(len(self.block))
        ]

    def reduce_parts(
        self,
        op: ReduceOp,
        trees: list[Tree],
        what: str,
        out: Tree = None,
        *,
        are_roots: bool = False,
    ) -> Tree:
        """Sum or average trees of arrays, one for each replica, over all processes.

        Collective over the strategy's replicas, in cross-replica context. With
        ``are_roots``, ``trees`` are already this process's partial sums, added in the
        order that ``merges`` defines.
        """
        if self.meetings is None:
            return self._ranks.reduce_in_call(op, trees[0], what, out=out)
        return self._sums.reduce(op, trees, what, out=out, are_roots=are_roots)

    @property
    def merges(self) -> list[int]:
        """The result of `TreeOrder.merges` for this process."""
        return self.order.merges(self._rank)


def _require_fitting(
    fn: Callable[..., Any], args: Any, kwargs: Any, error: TypeError
) -> None:
    """Raise a TypeError with advice if a function cannot be called with arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        # Compiled functions may have no signature.
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise TypeError(
            f"expected arguments for {name}{signature}, found args with {len(args)} "
            f"values and {len(kwargs)} kwargs; write args=(value,) for one value, and "
            "args=(batch,) for a whole batch"
        ) from error


def _wrap(*leaves: Any) -> Any:
    # A leaf that is None on all replicas is not wrapped.
    first = leaves[0]
    if isinstance(first, (Variable, DistributedValues)):
        return first
    if all(leaf is None for leaf in leaves):
        return None
    return PerReplica(*leaves)
