"""Collective calls between logical replicas, for code that runs in a replica."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, as_array
from hpcstrat.engine.calls.gathers import started_gather
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.context import ActiveContext, current, pop, push
from hpcstrat.engine.logical.replica_sums import ReplicaSums
from hpcstrat.engine.logical.turns import Act, Turns
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.errors import CollectiveError

__all__ = ["EndedReduction", "Listener", "Meetings", "joined", "run_listened"]


class Listener(Protocol):
    """An object that is notified when a logical replica starts, pauses and resumes.

    ``index`` is the position of the replica among the replicas of this rank.
    """

    def start(self) -> None:
        """Begin a run; called in the thread that called `run_listened`."""

    def begin(self, index: int) -> None:
        """Begin a replica's function; called in the replica's thread."""

    def pause(self, index: int) -> None:
        """Pause, because another replica runs next; called in the replica's thread."""

    def resume(self, index: int) -> None:
        """Resume after `pause`; called in the replica's thread."""

    def end(self) -> None:
        """End a run; called in the thread that called `run_listened`."""


class EndedReduction:
    """A finished call that has the methods of `PendingCall`."""

    def __init__(self, result: Tree) -> None:
        self._result = result

    def test(self) -> bool:
        """Return True: the call has ended."""
        return True

    def wait(self) -> Tree:
        """Return the result of the call."""
        return self._result


class Meetings:
    """Collective calls of a rank's logical replicas: the rank makes one call for all.

    The class has the methods of `Collectives`, for code in replica context: each
    replica of this rank makes the call, and receives its own result. ``ranks`` makes
    the calls between ranks, and ``cross_context`` is the cross-replica context in which
    ``ranks`` makes them.
    """

    # None, because channels belong to ranks, not to logical replicas.
    channel = None
    overlaps = False

    def __init__(
        self,
        ranks: Collectives,
        sums: ReplicaSums,
        cross_context: ActiveContext,
        listeners: Sequence[Listener],
    ) -> None:
        self._ranks = ranks
        self._sums = sums
        self._cross_context = cross_context
        self.block = sums.block
        self.size = sums.order.num_replicas
        # One `Turns` per nested run (a run in a merged function), the innermost last.
        self._running: list[Turns] = []
        self._kept: list[Turns] = []
        self._listeners = listeners
        # The number of runs in progress, including runs of a single replica.
        self.runs = 0

    @property
    def collectives(self) -> Meetings:
        """Return this object: the decorator `collective` reads this attribute."""
        return self

    @property
    def timeout_seconds(self) -> float | None:
        """The time for which a call waits for late ranks."""
        return self._ranks.timeout_seconds

    def take_turns(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Call one function for each replica of this rank, and return the results."""
        self.runs += 1
        try:
            if len(self.block) == 1:
                return [function() for function in functions]
            names = [f"replica {number}" for number in self.block]
            turns = self._kept.pop() if self._kept else Turns(names, self._ranks.fail)
            self._running.append(turns)
            try:
                return turns.run(functions)
            finally:
                self._running.remove(turns)
                self._kept.append(turns)
        finally:
            self.runs -= 1

    def close(self) -> None:
        """Stop the threads of the replicas."""
        for turns in self._kept:
            turns.close()

    def meet(self, what: str, act: Act, argument: Any) -> Any:
        """Make a call together with all replicas; return this replica's result.

        Collective over the strategy's replicas. ``act`` takes the arguments of this
        rank's replicas, in replica order, and returns one result for each replica; it
        is called in cross-replica context. Raises CollectiveError if another replica
        makes a different call.
        """
        active = current()
        number = 0 if active is None or active.index is None else active.index
        inside = functools.partial(self._in_cross_context, act)
        for listener in self._listeners:
            listener.pause(number)
        try:
            if not self._running:
                return inside([argument])[0]
            return self._running[-1].meet(number, what, inside, argument)
        finally:
            for listener in self._listeners:
                listener.resume(number)

    @property
    def running_replica(self) -> int:
        """The replica of this rank that runs now; can be read in any thread."""
        return self.block[self._running[-1].current if self._running else 0]

    def meet_later(
        self,
        what: str,
        act: Act,
        argument: Any,
        then: Callable[[Any, BaseException | None], None],
    ) -> None:
        """Make a call for the running replica, without waiting; usable in any thread.

        The arguments are the same as for `meet`. ``then`` is called with the replica's
        result, or an error, when the replica runs again.
        """
        inside = functools.partial(self._in_cross_context, act)
        if self._running:
            self._running[-1].meet_later(what, inside, argument, then)
            return
        try:
            (result,) = inside([argument])
        except Exception as error:
            then(None, error)
        else:
            then(result, None)

    def _in_cross_context(self, act: Act, arguments: list[Any]) -> Sequence[Any]:
        token = push(self._cross_context)
        try:
            return act(arguments)
        finally:
            pop(token)

    def _all_get(self, what: str, make: Callable[[list[Any]], Tree]) -> tuple[str, Act]:
        """Return the name and `Act` of a call that copies a result to each replica."""

        def act(arguments: list[Any]) -> list[Any]:
            result = self._ranks.call(what, make, arguments)
            more = len(arguments) - 1
            return [result, *(tree_map(_copied, result) for _ in range(more))]

        return what, act

    def call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that makes collective calls between replicas."""
        return function(*args)

    def barrier(self, what: str = "barrier") -> None:
        """Wait until all replicas have made this call."""

        def act(arguments: list[Any]) -> list[Any]:
            self._ranks.barrier(what)
            return arguments

        self.meet(what, act, None)

    def repeat(self, what: str, op: Any, value: Any, out: Any = None) -> None:
        """Return None: calls between replicas cannot use a rank's cached plan."""

    def reduce_in_call(
        self,
        op: ReduceOp,
        trees: Tree,
        what: str,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
    ) -> Tree:
        """Sum or average the arrays of all replicas, in the order of `TreeOrder`."""
        if out is None:
            return self.meet(*self.reducing(op, what, options), trees)
        label = f"{what}({op.name})"

        def act(pairs: list[Any]) -> list[Any]:
            values, outs = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            if any(given is None for given in outs):
                raise CollectiveError(
                    f"expected out on all replicas in {label}, found it on some "
                    "replicas only; pass one on all replicas, or on none"
                )
            first = self._sums.reduce(op, values, what, options, out=outs[0])
            leaves, _ = flatten(first)
            for others in outs[1:]:
                for into, leaf in zip(flatten(others)[0], leaves, strict=True):
                    _copy_into(into, leaf)
            return outs

        return self.meet(label, act, (trees, out))

    batch_reduce = reduce_in_call

    def reducing(
        self, op: ReduceOp, what: str, options: CommunicationOptions | None
    ) -> tuple[str, Act]:
        """Return the name and `Act` of a call that sums or averages arrays."""

        def make(trees: list[Tree]) -> Tree:
            return self._sums.reduce(op, trees, what, options)

        return self._all_get(f"{what}({op.name})", make)

    def start_in_call(
        self,
        op: ReduceOp,
        trees: Tree,
        what: str,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
        in_pass: bool = False,
    ) -> EndedReduction:
        """Reduce before returning: replicas run in turns, so nothing can overlap."""
        return EndedReduction(self.reduce_in_call(op, trees, what, options, out=out))

    start_reduce = start_in_call

    def repeat_gather(self, *_: Any) -> None:
        """Return None: calls between replicas cannot use a rank's cached plan."""

    def all_gather(self, tree: Tree, axis: int, what: str) -> Tree:
        """Concatenate the arrays of all replicas along an axis."""
        return self.meet(*self.gathering(axis, what), tree)

    def start_all_gather(self, tree: Tree, axis: int, what: str) -> EndedReduction:
        """Gather before returning: replicas run in turns, so nothing can overlap."""
        call, _, _ = started_gather(tree, axis, what)

        def make(trees: list[Tree]) -> Tree:
            # The header compares the shapes of all ranks' replicas.
            self._ranks.barrier(call.text)
            whole = joined(trees, axis, what, self.block)
            return self._ranks.all_gather(whole, axis, what)

        return EndedReduction(self.meet(*self._all_get(call.text, make), tree))

    def gathering(self, axis: int, what: str) -> tuple[str, Act]:
        """Return the name and `Act` of a call that concatenates arrays."""

        def make(trees: list[Tree]) -> Tree:
            return self._ranks.all_gather(
                joined(trees, axis, what, self.block), axis, what
            )

        return self._all_get(f"{what}(axis={axis})", make)

    def broadcast(self, tree: Tree, root: int, what: str) -> Tree:
        """Return the arrays of replica ``root`` on every replica."""
        return self.meet(*self.broadcasting(root, what), tree)

    def broadcasting(self, root: int, what: str) -> tuple[str, Act]:
        """Return the name and `Act` of a call that broadcasts one replica's arrays."""

        def make(trees: list[Tree]) -> Tree:
            rank = self._sums.order.owner(root)
            own = trees[root - self.block[0]] if root in self.block else trees[0]
            return self._ranks.broadcast(own, rank, what)

        return self._all_get(f"{what}(root={root})", make)

    def broadcast_object(self, value: Any, root: int, what: str) -> Any:
        """Return the object of replica ``root``; a rank's replicas share one object."""

        def act(values: list[Any]) -> list[Any]:
            rank = self._sums.order.owner(root)
            own = values[root - self.block[0]] if root in self.block else None
            found = self._ranks.broadcast_object(own, rank, what)
            return [found] * len(values)

        return self.meet(f"{what}(root={root})", act, value)

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Return the objects of all replicas, in replica order, on every replica."""

        def act(values: list[Any]) -> list[Any]:
            found = self._ranks.all_gather_object(values, what)
            return [[one for part in found for one in part] for _ in values]

        result: list[Any] = self.meet(what, act, value)
        return result

    def fail(self, what: str, error: BaseException) -> None:
        """Do nothing: `Turns` raises the error in the other, waiting replicas."""

    @contextmanager
    def all_raise(self, what: str) -> Iterator[None]:
        """Do nothing: `Turns` raises an error of the block in the other replicas."""
        yield

    def section(self, what: str) -> AbstractContextManager[None]:
        """Return an empty context: `run` is already inside of a section of its rank."""
        return nullcontext()

    def moving(self, what: str) -> NoReturn:
        """Raise NotImplementedError, because the call needs one rank per replica."""
        raise NotImplementedError(
            f"expected one rank for each replica in {what}, found logical replicas, "
            "which have no communicator; make the call outside of run"
        )


def run_listened(
    functions: Sequence[Callable[[], Any]],
    listeners: Sequence[Listener],
    run: Callable[[Sequence[Callable[[], Any]]], list[Any]] | None,
) -> list[Any]:
    """Call the functions of replicas by ``run``; notify listeners which replica runs.

    If ``run`` is None, the functions are called one after the other.
    """
    if not listeners and run is None:
        return [function() for function in functions]
    # A listener that a replica adds is notified of the replicas that run later.
    told = [
        functools.partial(_listened, listeners, index, function)
        for index, function in enumerate(functions)
    ]
    for listener in listeners:
        listener.start()
    try:
        return [function() for function in told] if run is None else run(told)
    finally:
        for listener in listeners:
            listener.end()


def _listened(
    listeners: Sequence[Listener], index: int, function: Callable[[], Any]
) -> Any:
    for listener in listeners:
        listener.begin(index)
    try:
        return function()
    finally:
        for listener in listeners:
            listener.pause(index)


def joined(trees: Sequence[Tree], axis: int, what: str, block: range) -> Tree:
    """Concatenate the arrays of a rank's replicas along an axis."""
    if len(trees) == 1:
        return trees[0]
    flats = [flatten(tree) for tree in trees]
    for number, (_, structure) in zip(block, flats, strict=True):
        if structure != flats[0][1]:
            raise CollectiveError(
                f"expected the same structure in {what} on all replicas, found "
                f"{flats[0][1]} on replica {block[0]} and {structure} on replica "
                f"{number}; gather the same on all",
                [block[0], number],
            )
    results = []
    for leaves in zip(*(leaves for leaves, _ in flats), strict=True):
        if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
            # Keep IndexedSlices: the gather of the result raises an error for them.
            results.append(leaves[0])
            continue
        arrays = [as_array(leaf) for leaf in leaves]
        first = arrays[0]
        if not 0 <= axis < first.ndim:
            results.append(first)
            continue
        for number, array in zip(block, arrays, strict=True):
            if _apart(array, axis) != _apart(first, axis):
                raise CollectiveError(
                    f"expected arrays in {what} that differ along axis {axis} alone, "
                    f"found {first.dtype}{list(first.shape)} on replica {block[0]} and "
                    f"{array.dtype}{list(array.shape)} on replica {number}; gather the "
                    "same on all",
                    [block[0], number],
                )
        results.append(array_module(first).concatenate(arrays, axis))
    return unflatten(flats[0][1], results)


def _apart(array: Array, axis: int) -> Any:
    """Return the properties that must be equal for arrays to be concatenated."""
    shape = array.shape
    return array.dtype, shape[:axis], shape[axis + 1 :]


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, IndexedSlices):
        values, indices = leaf.values.copy(), leaf.indices.copy()
        return IndexedSlices(values, indices, leaf.dense_shape)
    return leaf.copy() if hasattr(leaf, "copy") else leaf


def _copy_into(into: Any, leaf: Array) -> None:
    if not isinstance(into, np.ndarray) and not hasattr(into, "__setitem__"):
        raise ValueError(
            f"expected a writable array as out, found a {type(into).__name__}; make it "
            "with numpy.empty"
        )
    if into is not leaf:
        into[...] = leaf
