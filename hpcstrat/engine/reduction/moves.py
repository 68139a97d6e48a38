"""Collective calls that move arrays between replicas without combining them.

A gather, a broadcast, an all-to-all and an exchange between neighbors are made in one
way: a `MovePlan` for each kind of call, which the compiled kernel repeats.

The lengths of arrays may differ between ranks, and from call to call. The ranks
exchange them once. Later headers have a hash of the lengths that a rank expects all
ranks to have, so that a change on any rank is noticed by all, and makes them exchange
the lengths again. If the lengths change often, the ranks exchange them in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, as_array, is_device
from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.channel.call import Call, describe_call, signature_text
from hpcstrat.engine.channel.channel import Channel
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.waitable import LengthsDifferError
from hpcstrat.engine.collectives.blocks import (
    Blocks,
    broadcast_blocks,
    gathered_blocks,
    sent_blocks,
)
from hpcstrat.engine.collectives.kernel_call import KernelCall, cached_piece_bytes
from hpcstrat.engine.collectives.moves import MovePlan
from hpcstrat.engine.collectives.parts import reduce_scatter
from hpcstrat.engine.native import load, type_codes
from hpcstrat.engine.reduction.object_collectives import ObjectCollectives
from hpcstrat.engine.reduction.reduction_arrays import by_memory, list_structure
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.errors import CollectiveError

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.transports.byte_movers import Mover

__all__ = ["Moves"]

# Limits of the plans that are kept: kinds of calls, and for each kind different lengths.
_MOST_KINDS, _MOST_LENGTHS = 512, 64
# After this number of changes of the lengths, ranks exchange them in every call, until
# they have been the same in this number of calls in a row.
_MOST_CHANGES, _CALLS_UNCHANGED = 4, 8


class _Kind:
    """What a rank knows of one kind of call, the same on all ranks but for the plans."""

    def __init__(self) -> None:
        # The plans of calls by this rank's own lengths.
        self.plans: dict[Hashable, MovePlan] = {}
        # All ranks' lengths in their last exchange; None before the first exchange.
        self.lengths: Any = None
        # Number of changes of the lengths, and of the next calls that exchange them.
        self._changes = self._exchanges = 0

    @property
    def is_new(self) -> bool:
        """True until the ranks have first found that their lengths differ."""
        return self.lengths is None and not self._changes

    def plan(self, own: Hashable) -> MovePlan | None:
        """Return the plan for this rank's lengths, unless they change often."""
        return None if self._exchanges else self.plans.get(own)

    def change(self) -> None:
        """Note that the ranks expected different lengths."""
        self.plans.clear()
        self._changes += 1
        if self._changes >= _MOST_CHANGES:
            self._changes, self._exchanges = 1, _CALLS_UNCHANGED

    def learn(self, lengths: Any) -> bool:
        """Note all ranks' lengths, and return whether to keep a plan for them."""
        if lengths != self.lengths:
            self._exchanges = _CALLS_UNCHANGED if self._exchanges else 0
        elif self._exchanges:
            self._exchanges -= 1
        self.lengths = lengths
        return not self._exchanges


class Moves:
    """Calls in which replicas send values to each other.

    All calls are collective over ``topology.replica_comm``. ``what`` names the call in
    errors. Raises CollectiveError on every replica if the replicas disagree on the
    call, its root, or on shapes and dtypes, unless a method allows these to differ.
    Raises ValueError if the arrays of a replica do not fit each other; the other
    replicas raise ReplicaError. Calls that only move data accept any fixed-size dtype.
    """

    def __init__(self, collectives: ObjectCollectives) -> None:
        self.collectives = collectives
        self._size = collectives.size
        channel: Any = collectives.channel
        self._rank: int = 0 if channel is None else channel.topology.replica_id
        self._kinds: dict[Hashable, _Kind] = {}
        self._scatters: dict[Hashable, KernelCall] = {}
        self._recycler = Recycler()
        kernel = getattr(channel, "kernel", None)
        # Repeat earlier calls in the compiled kernel, or return None.
        none: Callable[..., Any] = lambda *_: None  # noqa: E731
        self._repeat_gather = none if kernel is None else kernel.repeater()
        self._repeat_broadcast = none if kernel is None else kernel.repeater()
        self._repeat_into = none if kernel is None else kernel.repeater()
        # The arrays of a barrier.
        self._nothing: list[Array] = []

    def close(self) -> None:
        """Forget the plans, which hold shared memory."""
        self._kinds.clear()
        self._scatters.clear()

    # Calls that return new arrays.

    def all_gather(self, tree: Tree, axis: int, what: str) -> Tree:
        """Concatenate the replicas' arrays along an axis, on every replica.

        Arrays may have any fixed-size dtype; their lengths along ``axis`` may differ
        between replicas. Results are new arrays, concatenated in replica order. Raises
        ValueError for scalars or an axis out of range, and NotImplementedError for
        IndexedSlices; the other replicas raise ReplicaError. Raises CollectiveError on
        every replica if the replicas disagree on dtype, number of dimensions, or a
        dimension other than ``axis``.
        """
        found = self.repeat_gather(what, axis, tree)
        return self._all_gather(tree, axis, what) if found is None else found

    def repeat_gather(self, what: str, axis: int, tree: Tree) -> Any:
        """Make an earlier `all_gather` again in the kernel; else return None."""
        return self._repeated(self._repeat_gather, what, axis, tree, None)

    @collective
    def _all_gather(self, tree: Tree, axis: int, what: str) -> Tree:
        found = self._repeated(self._repeat_gather, what, axis, tree, None, True)
        if found is not None:
            return found
        leaves, structure = flatten(tree)
        arrays = [_gatherable(leaf, axis) for leaf in leaves]
        if self.collectives.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])
        # Make the call for arrays in host memory first, then the call for arrays on
        # GPUs, because all replicas must make them in the same order.
        groups = by_memory(arrays)
        for indices in groups:
            some = [arrays[i] for i in indices]
            call = _gather_call(what, axis, some, structure)
            if some and is_device(some[0]):
                results: Sequence[Array] = self._concatenated_on_gpus(some, axis, call)
            else:
                kept = self._repeat_gather, what, axis, tree
                results = self._concatenated(some, axis, call, kept)
            for index, result in zip(indices, results, strict=True):
                leaves[index] = result
        return unflatten(structure, leaves)

    def _concatenated(
        self, arrays: list[Array], axis: int, call: Call, kept: Any
    ) -> Sequence[Array]:
        """Gather arrays in host memory."""
        shapes = [(*a.shape[:axis], *a.shape[axis + 1 :]) for a in arrays]
        inner = [math.prod(a.shape[axis + 1 :]) * a.itemsize for a in arrays]
        outer = [math.prod(a.shape[:axis]) for a in arrays]
        own = tuple(a.shape[axis] for a in arrays)

        def exchange(comm: Any) -> Any:
            return tuple(map(tuple, comm.lengths(own).tolist()))

        def plan(lengths: Any) -> tuple[Blocks, list[Any]]:
            whole = [sum(column) for column in zip(*lengths, strict=True)]
            results = [
                ((*s[:axis], length, *s[axis:]), a.dtype)
                for s, a, length in zip(shapes, arrays, whole, strict=True)
            ]
            return gathered_blocks(lengths, inner, outer, self._rank), results

        return self._move(
            call, own, arrays, None, exchange, plan, kept, equal=(own,) * self._size
        )

    def broadcast(self, tree: Tree, root: int, what: str) -> Tree:
        """Return the root's arrays on every replica, as new arrays.

        Raises CollectiveError on every replica if the replicas disagree on root,
        structure, shape or dtype.
        """
        found = self._repeated(self._repeat_broadcast, what, root, tree, None)
        return self._broadcast(tree, root, what) if found is None else found

    @collective
    def _broadcast(self, tree: Tree, root: int, what: str) -> Tree:
        found = self._repeated(self._repeat_broadcast, what, root, tree, None, True)
        if found is not None:
            return found
        leaves, structure = flatten(tree)
        arrays = [as_array(leaf) for leaf in leaves]
        if self.collectives.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])
        for indices in by_memory(arrays):
            some = [arrays[i] for i in indices]
            kind = structure if len(some) == len(arrays) else list_structure(len(some))
            text, nbytes = signature_text(kind, some), sum(a.nbytes for a in some)
            call = describe_call(f"{what}(root={root})", text, nbytes)
            if some and is_device(some[0]):
                results: Sequence[Array] = self._cast_on_gpus(some, root, call)
            else:
                sizes = [array.nbytes for array in some]
                blocks = broadcast_blocks(sizes, root, self._rank, self._size)
                kinds = [(array.shape, array.dtype) for array in some]
                kept = self._repeat_broadcast, what, root, tree
                results = self._move_known(call, some, None, blocks, kinds, kept)
            for index, result in zip(indices, results, strict=True):
                leaves[index] = result
        return unflatten(structure, leaves)

    def barrier(self) -> None:
        """Wait for all replicas."""
        given = "barrier", None, self._nothing, self._nothing
        if self._repeated(self._repeat_into, *given) is None:
            self._barrier("barrier")

    @collective
    def _barrier(self, what: str) -> None:
        given = what, None, self._nothing, self._nothing
        if self._alone() or self._repeated(self._repeat_into, *given, True) is not None:
            return
        blocks = Blocks([], [], [0] * self._size, None)
        kept = self._repeat_into, what, None, self._nothing
        self._move_known(describe_call(what), [], [], blocks, None, kept)

    # Calls that write into arrays of the caller, which are contiguous, in host memory.

    def all_gather_into(self, own: Array, parts: Sequence[Array], what: str) -> None:
        """Copy replica ``r``'s array into part ``r``, on every replica, for each ``r``.

        ``own`` may be this replica's part.
        """
        if self._repeated(self._repeat_into, what, None, own, parts) is None:
            self._all_gather_into(own, parts, what)

    @collective
    def _all_gather_into(self, own: Array, parts: Sequence[Array], what: str) -> None:
        if self._repeated(self._repeat_into, what, None, own, parts, True) is not None:
            return
        self._check_parts(parts, own, self._rank)
        call = _call(what, own, [_flat(part) for part in parts])
        if not self._alone(own, parts[self._rank]):
            sizes = [part.nbytes for part in parts]
            blocks = gathered_blocks([(n,) for n in sizes], (1,), (1,), self._rank)
            takes = [b._replace(array=b.rank, at=0) for b in blocks.takes]
            blocks = Blocks(
                blocks.puts, takes, sizes, None, (0, self._rank) if own.size else (-1, -1)
            )
            kept = self._repeat_into, what, None, own
            self._move_known(call, [own], parts, blocks, None, kept)

    def broadcast_into(self, array: Array, root: int, what: str) -> None:
        """Copy the root's values into ``array`` of every replica."""
        sends = self._rank == root
        given = ([array], []) if sends else ([], [array])
        if self._repeated(self._repeat_into, what, root, *given) is None:
            self._broadcast_into(array, root, what)

    @collective
    def _broadcast_into(self, array: Array, root: int, what: str) -> None:
        self._check_root(root)
        _flat(array)
        sends = self._rank == root
        sources, results = ([array], []) if sends else ([], [array])
        call = _call(f"{what}(root={root})", array)
        if not self._alone():
            blocks = broadcast_blocks(
                [array.nbytes], root, self._rank, self._size, in_place=True
            )
            kept = self._repeat_into, what, root, sources
            self._move_known(call, sources, results, blocks, None, kept)

    @collective
    def gather_into(
        self, own: Array, parts: Sequence[Array] | None, root: int, what: str
    ) -> None:
        """Copy replica ``r``'s array into part ``r`` on the root, for each ``r``.

        Only the root's ``parts`` are used, which must all have the size of ``own``.
        """
        here = self._rank == root
        outs = list(parts or ()) if here else []
        if self._repeated(self._repeat_into, what, root, own, outs, True) is not None:
            return
        self._check_root(root)
        if here:
            self._check_equal(outs, own, "gives")
        call = _call(f"{what}(root={root})", own)
        if not self._alone(own, outs[0] if here else None):
            table = np.zeros((self._size, self._size), np.int64)
            table[:, root] = own.nbytes
            results = {rank: rank for rank in range(self._size)}
            blocks = sent_blocks(table, self._rank, {root: 0}, results if here else {})
            kept = self._repeat_into, what, root, own
            self._move_known(call, [own], outs, blocks, None, kept)

    @collective
    def scatter_into(
        self, parts: Sequence[Array] | None, result: Array, root: int, what: str
    ) -> None:
        """Copy part ``r`` of the root into replica ``r``'s ``result``.

        Only the root's ``parts`` are used, which must all have the size of ``result``.
        """
        here = self._rank == root
        sources = list(parts or ()) if here else []
        given = what, root, sources, [result]
        if self._repeated(self._repeat_into, *given, True) is not None:
            return
        self._check_root(root)
        _flat(result)
        if here:
            self._check_equal(sources, result, "takes")
        call = _call(f"{what}(root={root})", result)
        if not self._alone(sources[0] if here else None, result):
            table = np.zeros((self._size, self._size), np.int64)
            table[root] = result.nbytes
            to = {rank: rank for rank in range(self._size)}
            blocks = sent_blocks(table, self._rank, to if here else {}, {root: 0})
            kept = self._repeat_into, what, root, sources
            self._move_known(call, sources, [result], blocks, None, kept)

    def all_to_all(
        self, sends: Sequence[Array], receives: Sequence[Array], what: str
    ) -> None:
        """Send one part to each replica, and receive one part from each replica.

        All parts have the same dtype. Their sizes may differ, but if a replica sends
        another number of elements than the receiver expects, all replicas raise
        CollectiveError.
        """
        given = what, "all", list(sends), list(receives)
        if self._repeated(self._repeat_into, *given) is None:
            self._all_to_all(*given[2:], what)

    @collective
    def _all_to_all(self, sends: list[Array], receives: list[Array], what: str) -> None:
        size = self._size
        if not len(sends) == len(receives) == size:
            raise ValueError(
                f"expected {size} parts to send and to receive, one for each replica, "
                f"found {len(sends)} and {len(receives)}; pass as many"
            )
        kinds = {str(array.dtype) for array in (*sends, *receives)}
        if len(kinds) > 1:
            raise ValueError(
                f"expected parts of one dtype, found {sorted(kinds)}; cast them first"
            )
        call = describe_call(what, f"{kinds.pop()} to {size} replicas")
        kept = self._repeat_into, what, "all", sends
        self._send(
            call, dict(enumerate(sends)), dict(enumerate(receives)), kept, equal=True
        )

    def exchange(
        self, sends: Mapping[int, Array], receives: Mapping[int, Array], what: str
    ) -> None:
        """Send an array to each of some replicas, and receive arrays from others.

        ``sends`` and ``receives`` have one array for each neighbor, by its number. If a
        replica sends to another that does not receive from it, or another size or
        dtype, all replicas raise CollectiveError. ``receives`` must not overlap with
        ``sends``, except for what a replica sends to itself.
        """
        name = tuple(sends), tuple(receives)
        given = what, name, list(sends.values()), list(receives.values())
        if self._repeated(self._repeat_into, *given) is None:
            self._exchange(sends, receives, what)

    @collective
    def _exchange(
        self, sends: Mapping[int, Array], receives: Mapping[int, Array], what: str
    ) -> None:
        for rank in (*sends, *receives):
            if not 0 <= rank < self._size:
                raise ValueError(
                    f"expected replicas from 0 to {self._size - 1} as neighbors, found "
                    f"{rank}; change it"
                )
        name = tuple(sends), tuple(receives)
        kept = self._repeat_into, what, name, list(sends.values())
        self._send(describe_call(what), sends, receives, kept)

    def _send(
        self,
        call: Call,
        sends: Mapping[int, Array],
        receives: Mapping[int, Array],
        kept: Any,
        *,
        equal: bool = False,
    ) -> None:
        """Send arrays to other replicas; ``equal`` if the sizes may all be equal."""
        own, arrays = [], (*sends.values(), *receives.values())
        for array in arrays:
            _flat(array)
        for parts in (sends, receives):
            own.append(tuple((r, p.size, str(p.dtype)) for r, p in parts.items()))
        if self.collectives.channel is None:
            text = _check_sent([(*own, "")])
            if text:
                raise CollectiveError(text)
            for rank, part in receives.items():
                part[...] = sends[rank].reshape(part.shape).copy()
            return
        sizes = {array.nbytes for array in arrays}
        me = self._rank

        def exchange(comm: Any) -> Any:
            found = comm.allgather((*own, call_site()))
            text = _check_sent(found)
            return CollectiveError(text) if text else tuple(row[:2] for row in found)

        def plan(told: Any) -> tuple[Blocks, list[Any]]:
            table = np.zeros((self._size, self._size), np.int64)
            if isinstance(told, int):
                table[...] = told
            else:
                for rank, (to, _) in enumerate(told):
                    for other, size, dtype in to:
                        table[rank, other] = size * np.dtype(dtype).itemsize
            sources = {rank: i for i, rank in enumerate(sends)}
            results = {rank: i for i, rank in enumerate(receives)}
            return sent_blocks(table, me, sources, results), []

        # If all sizes of this rank are equal, expect that those of all ranks are.
        expected = sizes.pop() if equal and len(sizes) == 1 else None
        self._move(
            call,
            tuple(own),
            list(sends.values()),
            list(receives.values()),
            exchange,
            plan,
            kept,
            equal=expected,
        )

    # Calls that reduce parts of arrays, by any function.

    def combine(self, function: np.ufunc, array: Array, what: str) -> None:
        """Combine the arrays of all replicas by a ufunc, in place, on every replica.

        The values are combined in replica order, as in the other reductions.
        """
        self.collectives.call(what, self._combine, function, array, what)

    def _combine(self, function: np.ufunc, array: Array, what: str) -> None:
        _check_function(function, array, what)
        parts = self._cut(array)
        own, call = parts[self._rank], _call(what, array)
        self._scatter(function, parts, own, call)
        self.all_gather_into(own, parts, f"all_gather of {what}")

    def reduce_to(
        self,
        function: np.ufunc,
        array: Array,
        root: int,
        what: str,
        *,
        divisor: int = 0,
    ) -> None:
        """Combine the arrays of all replicas by a ufunc, in place, on the root only.

        Divides the result by a ``divisor`` other than 0, in floating point.
        """
        self.collectives.call(
            what, self._reduce_to, function, array, root, what, divisor
        )

    def _reduce_to(
        self, function: np.ufunc, array: Array, root: int, what: str, divisor: int
    ) -> None:
        _check_function(function, array, what)
        self._check_root(root)
        if self._alone():
            return
        parts = self._cut(array)
        own, text = np.empty_like(parts[self._rank]), f"{what}(root={root})"
        self._scatter(function, parts, own, _call(text, array), divisor)
        # Other ranks do not send empty parts, which the root does not receive either.
        receives = {r: p for r, p in enumerate(parts) if p.size and self._rank == root}
        sends = {root: own} if own.size else {}
        self.exchange(sends, receives, f"gather of {text}")

    def _cut(self, array: Array) -> list[Array]:
        flat, size = _flat(array), self._size
        bounds = [flat.size * number // size for number in range(size + 1)]
        return [flat[bounds[n] : bounds[n + 1]] for n in range(size)]

    def reduce_scatter(
        self,
        function: np.ufunc,
        parts: Sequence[Array],
        result: Array,
        what: str,
        *,
        divisor: int = 0,
    ) -> None:
        """Combine part ``r`` of all replicas by a ufunc, on replica ``r``.

        The ``parts`` have one dtype, but may have different sizes. ``result`` receives
        this replica's part of the results; it may be the memory of this part itself.
        """
        parts = list(parts)
        name, outs = (function.__name__, divisor), [result]
        if self._repeated(self._repeat_into, what, name, parts, outs) is None:
            self._reduce_scatter(function, parts, result, what, divisor)

    @collective
    def _reduce_scatter(
        self,
        function: np.ufunc,
        parts: list[Array],
        result: Array,
        what: str,
        divisor: int,
    ) -> None:
        name = function.__name__, divisor
        given = what, name, parts, [result]
        if self._repeated(self._repeat_into, *given, True) is not None:
            return
        _check_function(function, result, what)
        self._check_parts(parts, result, self._rank)
        flat, flats = _flat(result), [_flat(part) for part in parts]
        call = _call(what, parts[0], flats)
        kernel_call = self._kernel_scatter(function, parts, result, call, divisor)
        if kernel_call is not None:
            seconds = self.collectives.timeout_seconds
            kernel_call.keep(self._repeat_into, what, (name,), True, seconds)
            if kernel_call.repeat(parts, [result], seconds) is not None:
                return
        if any(
            np.may_share_memory(flat, part)
            for rank, part in enumerate(flats)
            if rank != self._rank or part.ctypes.data != flat.ctypes.data
        ):
            flats = [part.copy() for part in flats]
        self._scatter(function, flats, flat, call, divisor)

    def _kernel_scatter(
        self,
        function: np.ufunc,
        parts: Sequence[Array],
        result: Array,
        call: Call,
        divisor: int,
    ) -> KernelCall | None:
        """Return the call of a reduce-scatter by the kernel; None if it cannot make it.

        Its sums have the same bits as those of `reduce_scatter`.
        """
        channel: Any = self.collectives.channel
        if channel is None or channel.kernel is None or channel.wire is not None:
            return None
        codes = type_codes([result.dtype], "SUM") if function is np.add else None
        if codes is None or (divisor and result.dtype.kind not in "fc"):
            return None
        key = call, divisor, tuple(a.shape for a in (*parts, result))
        found = self._scatters.get(key)
        if found is None:
            likes = [np.broadcast_to(np.empty((), a.dtype), a.shape) for a in parts]
            like = np.broadcast_to(np.empty((), result.dtype), result.shape)
            piece_bytes = cached_piece_bytes(channel.topology.slot_bytes, channel.topology)
            columns = piece_bytes // (result.itemsize * self._size)
            how = columns, divisor, call, call.digest
            one = load().scatter(channel.kernel, codes[0], likes, [like], *how)
            if len(self._scatters) >= _MOST_KINDS:
                self._scatters.clear()
            found = self._scatters[key] = KernelCall(channel, call, one, None)
        return found

    def _scatter(
        self,
        function: np.ufunc,
        parts: list[Array],
        result: Array,
        call: Call,
        divisor: int = 0,
    ) -> None:
        if not self._alone(parts[self._rank], result):
            channel: Any = self.collectives.channel
            steps = reduce_scatter(
                parts, result, function, call, channel, divisor=divisor
            )
            channel.drive(steps, call, self.collectives.timeout_seconds)

    # The one way of all calls that move arrays in host memory.

    def _repeated(
        self, repeat: Any, what: str, name: Any, value: Any, out: Any, *nested: bool
    ) -> Any:
        """Repeat a call in the kernel; return None if Python code must make the call."""
        try:
            return repeat(what, name, value, out, *nested)
        except LengthsDifferError as error:
            self._kinds.setdefault(_mark(error.call), _Kind()).change()
            return None

    def _move_known(
        self,
        call: Call,
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        blocks: Blocks,
        results: Any,
        kept: Any,
    ) -> Sequence[Array]:
        """Make a call whose header has all sizes, which are the same on all ranks."""

        def plan(_: Any) -> tuple[Blocks, Any]:
            return blocks, results

        own = tuple((a.shape, a.dtype) for a in (*arrays, *(outs or ())))
        return self._move(call, own, arrays, outs, None, plan, kept)

    def _move(
        self,
        call: Call,
        own: Hashable,
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        exchange: Callable[[Any], Any] | None,
        plan: Callable[[Any], tuple[Blocks, Any]],
        kept: Any,
        *,
        equal: Any = None,
    ) -> Sequence[Array]:
        """Move arrays by a plan, which is made at the first call of its kind.

        ``own`` has this rank's lengths. ``exchange`` returns the lengths of all ranks,
        or the error that all ranks raise because these do not fit each other; ``plan``
        returns the blocks for them, with the shapes and dtypes of new results.
        ``equal`` are the lengths of all ranks if all are equal. If ``exchange`` is None,
        the header compares the lengths, and ``plan`` does not need them. ``kept`` has
        what the kernel needs to repeat the call: its function, the names of the call
        and of the operation, and the value.
        """
        channel = cast("Channel", self.collectives.channel)
        timeout_seconds = self.collectives.timeout_seconds
        if len(self._kinds) >= _MOST_KINDS:
            self._kinds.clear()
        kind = self._kinds.setdefault(_mark(call), _Kind())
        while True:
            made = kind.plan(own)
            lengths, known = None, made is None and exchange is None
            if made is None and equal is not None and kind.is_new:
                lengths, known = equal, True
            try:
                if made is not None:
                    return made.run(arrays, outs, timeout_seconds)
                if known:
                    return self._make(
                        kind, own, call, lengths, plan, arrays, outs, kept, keeps=True
                    )
                channel.agree(call, timeout_seconds)
                break
            except LengthsDifferError:
                kind.change()
        assert exchange is not None
        with channel.moving(call) as comm:
            lengths = exchange(comm)
        if isinstance(lengths, CollectiveError):
            # All ranks raise this error.
            channel.failures.told_at = channel.num_calls
            raise lengths
        # A second header reports an error on one rank, such as a lack of memory.
        rest = kind, own, call, lengths, plan, arrays, outs, kept
        keeps = kind.learn(lengths)
        return cast(
            "Sequence[Array]", self.collectives.call(call.text, self._make, *rest, keeps)
        )

    def _make(
        self,
        kind: _Kind,
        own: Hashable,
        call: Call,
        lengths: Any,
        plan: Callable[[Any], tuple[Blocks, Any]],
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        kept: Any,
        keeps: bool,
    ) -> Sequence[Array]:
        """Make a plan for the lengths of all ranks, keep it, and run it."""
        channel: Any = self.collectives.channel
        blocks, results = plan(lengths)
        if outs is not None:
            results = [(out.shape, out.dtype) for out in outs]
        sources = [(array.shape, array.dtype) for array in arrays]
        marked = call if lengths is None else call.with_lengths(lengths)
        made = MovePlan(
            marked, blocks, sources, results, channel, self._recycler.arrays
        )
        repeat, what, name, value = kept
        if keeps:
            if len(kind.plans) >= _MOST_LENGTHS:
                kind.plans.clear()
            kind.plans[own] = made
            listed = type(value) is list
            if listed or type(value) is np.ndarray:
                seconds = self.collectives.timeout_seconds
                made.keep(repeat, what, name, listed, seconds)
        return made.run(arrays, outs, self.collectives.timeout_seconds)

    # Checks of arguments.

    def _alone(self, own: Array | None = None, result: Array | None = None) -> bool:
        """Return whether only one replica exists; if so, copy ``own`` to ``result``."""
        if self.collectives.channel is not None:
            return False
        if own is not None and result is not None:
            result[...] = own.reshape(result.shape)
        return True

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self._size:
            raise ValueError(
                f"expected a replica from 0 to {self._size - 1} as root, found {root}; "
                "change it"
            )

    def _check_parts(self, parts: Sequence[Array], own: Array, rank: int) -> None:
        if len(parts) != self._size:
            raise ValueError(
                f"expected {self._size} parts, one for each replica, found "
                f"{len(parts)}; pass as many"
            )
        kinds = {str(array.dtype) for array in (*parts, own)}
        if len(kinds) > 1:
            raise ValueError(
                f"expected arrays of one dtype, found {sorted(kinds)}; cast them first"
            )
        if parts[rank].size != own.size:
            raise ValueError(
                f"expected {parts[rank].size} elements, as part {rank} has, found "
                f"{own.size}; make the sizes equal"
            )
        for array in (*parts, own):
            _flat(array)

    def _check_equal(self, parts: Sequence[Array], own: Array, does: str) -> None:
        self._check_parts(parts, own, self._rank)
        if any(part.size != own.size for part in parts):
            raise ValueError(
                f"expected parts of {own.size} elements, as this replica {does}, found "
                f"sizes {[part.size for part in parts]}; make them equal"
            )

    # Arrays on GPUs.

    def _concatenated_on_gpus(
        self, arrays: list[Array], axis: int, call: Call
    ) -> list[Array]:
        """Exchange the lengths of arrays on GPUs, then gather the arrays."""
        from hpcstrat.engine.gpu.transports import byte_movers

        module: Any = array_module(arrays[0])
        channel: Any = self.collectives.channel
        mover = self._mover(call)
        # If these copies exhaust the memory of one rank, all ranks raise in the next
        # call, before the lengths are exchanged.
        with self.collectives.all_raise(call.text):
            parts = [module.ascontiguousarray(np.moveaxis(a, axis, 0)) for a in arrays]
        lengths = self.collectives.all_gather_object(
            [len(part) for part in parts], call.text
        )
        results: list[Array] = []
        for index, part in enumerate(parts):
            counts = [row[index] * math.prod(part.shape[1:]) for row in lengths]
            rows = sum(row[index] for row in lengths)
            with self.collectives.all_raise(call.text):
                whole = module.empty((rows, *part.shape[1:]), part.dtype)
            if whole.size:
                flat, result = part.reshape(-1), whole.reshape(-1)
                steps = byte_movers.all_gather(mover, flat, result, counts)
                channel.drive(steps, call, self.collectives.timeout_seconds)
            moved_back = np.moveaxis(whole, 0, axis)
            results.append(module.ascontiguousarray(moved_back))
        return results

    def _cast_on_gpus(self, arrays: list[Array], root: int, call: Call) -> list[Array]:
        """Broadcast arrays on GPUs."""
        from hpcstrat.engine.gpu.transports import byte_movers

        channel: Any = self.collectives.channel
        mover = self._mover(call)
        with self.collectives.all_raise(call.text):
            results = [array.copy("C") for array in arrays]
        filled = [result for result in results if result.size]
        steps = byte_movers.broadcast(mover, filled, filled, root)
        channel.drive(steps, call, self.collectives.timeout_seconds)
        return results

    def _mover(self, call: Call) -> Mover:
        """Return the mover that copies bytes between GPUs for a call."""
        from hpcstrat.engine.gpu.transports.device_group import device_group
        from hpcstrat.engine.gpu.transports.transport_select import mover

        channel: Any = self.collectives.channel
        group = device_group(channel, call.text, self.collectives.timeout_seconds)
        with self.collectives.all_raise(call.text):
            return mover(group)


def _mark(call: Call) -> Hashable:
    """Return what is equal in calls of one kind, whatever the lengths of the arrays."""
    return call.text, call.digest ^ call.lengths


def _gather_call(what: str, axis: int, arrays: list[Array], structure: Any) -> Call:
    shapes = [(*a.shape[:axis], "any", *a.shape[axis + 1 :]) for a in arrays]
    text = ", ".join(
        f"{a.dtype}[{', '.join(map(str, s))}]{' on a GPU' if is_device(a) else ''}"
        for a, s in zip(arrays, shapes, strict=True)
    )
    details = f"{text} in {structure}" if len(arrays) != 1 else text
    return describe_call(f"{what}(axis={axis})", details, sum(a.nbytes for a in arrays))


def _gatherable(leaf: Any, axis: Any) -> Array:
    if isinstance(leaf, IndexedSlices):
        raise NotImplementedError(
            "expected an array to gather, found IndexedSlices; gather its values and "
            "indices, or all_reduce it"
        )
    array = as_array(leaf)
    if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
        raise TypeError(f"expected an integer as axis, found {axis!r}; change it")
    if not 0 <= axis < array.ndim:
        raise ValueError(
            f"expected 0 <= axis < {array.ndim}, the dimensions of the array to "
            f"gather, found axis {axis}; "
            + ("give scalars a dimension first" if array.ndim == 0 else "change it")
        )
    return array


def _check_function(function: np.ufunc, array: Array, what: str) -> None:
    """Before the header, raise TypeError if the ufunc does not accept the dtype."""
    nothing = array.reshape(-1)[:0]
    try:
        function(nothing, nothing)
    except TypeError as error:
        raise TypeError(
            f"expected a type for which {function.__name__} is defined in {what}, "
            f"found {array.dtype}; use another reduction or another type"
        ) from error


def _check_sent(rows: Sequence[Any]) -> str:
    """Return a text on arrays that are not received as they are sent, or ""."""
    sent, wanted, sites = {}, {}, [f" ({row[2]})" if row[2] else "" for row in rows]
    for rank, (to, source, _) in enumerate(rows):
        sent |= {(rank, r): (size, dtype) for r, size, dtype in to if size}
        wanted |= {(r, rank): (size, dtype) for r, size, dtype in source if size}
    wrong = []
    for a, b in sorted(sent.keys() | wanted.keys()):
        gives, takes = sent.get((a, b)), wanted.get((a, b))
        if gives != takes:
            words = [f"{n} elements of {d}" if n else "nothing" for n, d in _pair(gives, takes)]
            wrong.append(
                f"replica {a}{sites[a]} sends {words[0]} to replica {b}{sites[b]}, "
                f"which expects {words[1]}"
            )
    if not wrong:
        return ""
    more = f"; and {len(wrong) - 4} more pairs differ" if len(wrong) > 4 else ""
    return (
        "expected each replica to receive what the others send to it, found that "
        + "; ".join(wrong[:4])
        + more
        + "; make neighbors, sizes and dtypes equal"
    )


def _pair(*kinds: Any) -> list[tuple[int, str]]:
    return [kind or (0, "") for kind in kinds]


def _flat(array: Array) -> Array:
    """Return a flat view of a contiguous array; raise ValueError for other arrays."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"expected a contiguous array, found shape {array.shape} with strides "
            f"{array.strides}; pass a copy"
        )
    return array.reshape(-1)


def _call(what: str, array: Array, parts: Sequence[Array] | None = None) -> Call:
    """Describe a call for an array, or for parts if their sizes differ."""
    sizes = {part.size for part in parts or ()}
    if len(sizes) > 1:
        text = f"{array.dtype} of sizes {[part.size for part in parts or ()]}"
        return describe_call(what, text, sum(part.nbytes for part in parts or ()))
    return describe_call(what, f"{array.dtype}{list(array.shape)}", array.nbytes)
