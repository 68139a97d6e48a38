"""Collective calls that move arrays between replicas without combining them.

A gather, a broadcast, an all-to-all and an exchange between neighbors are made in one
way: by a plan for each kind of call, which the compiled kernel repeats, see
`hpcstrat.engine.calls.repeated_moves`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import (
    MoveBlocks,
    broadcast_blocks,
    gathered_blocks,
    sent_blocks,
)
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.calls.gpu_moves import broadcast_on_gpus, gathered_on_gpus
from hpcstrat.engine.calls.object_collectives import ObjectCollectives
from hpcstrat.engine.calls.reduction_arrays import by_memory, list_structure
from hpcstrat.engine.calls.repeated_moves import Move, RepeatedMoves
from hpcstrat.engine.channel.call import Call, describe_call, signature_text
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.channel.waitable import LengthsDifferError
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.errors import CollectiveError

__all__ = ["Moves", "describe_arrays", "flat_view", "repeat_nothing"]

# Objects are sent in a first message of this size, which begins with their size.
_FIRST_BYTES, _SIZE_BYTES = 512, 8
# A message names at most this number of pairs of replicas.
_MOST_NAMED = 4


def repeat_nothing(*_: Any) -> Any:
    """Return None, so that every call is made by Python code, not by the kernel."""


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
        self.size = collectives.size
        channel: Any = collectives.channel
        self.rank: int = 0 if channel is None else channel.topology.replica_id
        self._repeated = RepeatedMoves(collectives)
        kernel = getattr(channel, "kernel", None)
        # Repeat earlier calls in the compiled kernel, or return None.
        repeaters = [
            repeat_nothing if kernel is None else kernel.repeater() for _ in range(3)
        ]
        self._repeat_gather, self._repeat_broadcast, self._repeat_into = repeaters
        # The arrays of a barrier.
        self._nothing: list[Array] = []

    def close(self) -> None:
        """Forget the plans, which hold shared memory."""
        self._repeated.close()

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
        try:
            return self._repeat_gather(what, axis, tree, None)
        except LengthsDifferError as error:
            return self._repeated.change(error)

    @collective
    def _all_gather(self, tree: Tree, axis: int, what: str) -> Tree:
        found = self._repeated.repeat(self._repeat_gather, what, axis, tree, None, True)
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
                calls = self.collectives
                results: Sequence[Array] = gathered_on_gpus(calls, some, axis, call)
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

        def plan(lengths: Any) -> tuple[MoveBlocks, list[Any]]:
            whole = [sum(column) for column in zip(*lengths, strict=True)]
            results = [
                ((*s[:axis], length, *s[axis:]), a.dtype)
                for s, a, length in zip(shapes, arrays, whole, strict=True)
            ]
            return gathered_blocks(lengths, inner, outer, self.rank), results

        equal = (own,) * self.size
        return self._repeated.make(
            Move(call, arrays, None, own, plan, kept, exchange, equal)
        )

    def broadcast(self, tree: Tree, root: int, what: str) -> Tree:
        """Return the root's arrays on every replica, as new arrays.

        Raises CollectiveError on every replica if the replicas disagree on root,
        structure, shape or dtype.
        """
        found = self._repeated.repeat(self._repeat_broadcast, what, root, tree, None)
        return self._broadcast(tree, root, what) if found is None else found

    @collective
    def _broadcast(self, tree: Tree, root: int, what: str) -> Tree:
        found = self._repeated.repeat(
            self._repeat_broadcast, what, root, tree, None, True
        )
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
                calls = self.collectives
                results: Sequence[Array] = broadcast_on_gpus(calls, some, root, call)
            else:
                sizes = [array.nbytes for array in some]
                blocks = broadcast_blocks(sizes, root, self.rank, self.size)
                kinds = [(array.shape, array.dtype) for array in some]
                kept = self._repeat_broadcast, what, root, tree
                results = self._move_known(call, some, None, (blocks, kinds), kept)
            for index, result in zip(indices, results, strict=True):
                leaves[index] = result
        return unflatten(structure, leaves)

    def barrier(self) -> None:
        """Wait for all replicas."""
        nothing = self._nothing
        if self._repeat_into("barrier", None, nothing, nothing) is None:
            self._barrier("barrier")

    @collective
    def _barrier(self, what: str) -> None:
        given = what, None, self._nothing, self._nothing
        if (
            self.alone()
            or self._repeated.repeat(self._repeat_into, *given, True) is not None
        ):
            return
        blocks = MoveBlocks([], [], [0] * self.size, None)
        kept = self._repeat_into, what, None, self._nothing
        self._move_known(describe_call(what), [], [], (blocks, None), kept)

    def exchange_bytes(
        self, data: bytes, call: Call, root: int | None = None
    ) -> list[Array]:
        """Return the bytes of all replicas, or of the root, on every replica.

        The first message has a fixed length, and contains the number of bytes. If there
        are more bytes, a second message follows.
        """
        senders = [root] if root is not None else list(range(self.size))
        own = np.frombuffer(data if self.rank in senders else b"", np.uint8)
        first = np.zeros(_FIRST_BYTES if self.rank in senders else 0, np.uint8)
        if first.size:
            first[:_SIZE_BYTES].view(np.int64)[0] = own.size
            few = own[: _FIRST_BYTES - _SIZE_BYTES]
            first[_SIZE_BYTES : _SIZE_BYTES + few.size] = few
        parts = self._gather_known(first, senders, [_FIRST_BYTES] * len(senders), call)
        sizes = [int(part[:_SIZE_BYTES].view(np.int64)[0]) for part in parts]
        if max(sizes) <= _FIRST_BYTES - _SIZE_BYTES:
            return [
                part[_SIZE_BYTES:][:n] for part, n in zip(parts, sizes, strict=True)
            ]
        rest = describe_call(f"data of {call.text}", f"{sizes} bytes", own.size)
        given = own, senders, sizes, rest
        found: list[Array] = self.collectives.call(
            call.text, self._gather_known, *given
        )
        return found

    def _gather_known(
        self, own: Array, senders: list[int], sizes: list[int], call: Call
    ) -> list[Array]:
        """Return the bytes of some replicas, whose sizes all replicas know."""
        lengths = [(0,)] * self.size
        for rank, nbytes in zip(senders, sizes, strict=True):
            lengths[rank] = (nbytes,)
        blocks = gathered_blocks(lengths, (1,), (1,), self.rank)
        planned = blocks, [((sum(sizes),), np.dtype(np.uint8))]
        kept = self._repeat_into, call.text, None, None
        [whole] = self._move_known(call, [own], None, planned, kept)
        return np.split(whole, np.cumsum(sizes)[:-1])

    # Calls that write into arrays of the caller, which are contiguous, in host memory.

    def all_gather_into(self, own: Array, parts: Sequence[Array], what: str) -> None:
        """Copy replica ``r``'s array into part ``r``, on every replica, for each ``r``.

        ``own`` may be this replica's part.
        """
        if self._repeat_into(what, None, own, parts) is None:
            self._all_gather_into(own, parts, what)

    @collective
    def _all_gather_into(self, own: Array, parts: Sequence[Array], what: str) -> None:
        if (
            self._repeated.repeat(self._repeat_into, what, None, own, parts, True)
            is not None
        ):
            return
        self.check_parts(parts, own, self.rank)
        call = describe_arrays(what, own, [flat_view(part) for part in parts])
        if not self.alone(own, parts[self.rank]):
            sizes = [part.nbytes for part in parts]
            blocks = gathered_blocks([(n,) for n in sizes], (1,), (1,), self.rank)
            takes = [b._replace(array=b.rank, at=0) for b in blocks.takes]
            blocks = MoveBlocks(
                blocks.puts,
                takes,
                sizes,
                None,
                (0, self.rank) if own.size else (-1, -1),
            )
            kept = self._repeat_into, what, None, own
            self._move_known(call, [own], parts, (blocks, None), kept)

    def broadcast_into(self, array: Array, root: int, what: str) -> None:
        """Copy the root's values into ``array`` of every replica."""
        sends = self.rank == root
        arrays, outs = ([array], []) if sends else ([], [array])
        if self._repeat_into(what, root, arrays, outs) is None:
            self._broadcast_into(array, root, what)

    @collective
    def _broadcast_into(self, array: Array, root: int, what: str) -> None:
        self.check_root(root)
        flat_view(array)
        sends = self.rank == root
        sources, results = ([array], []) if sends else ([], [array])
        call = describe_arrays(f"{what}(root={root})", array)
        if not self.alone():
            blocks = broadcast_blocks(
                [array.nbytes], root, self.rank, self.size, in_place=True
            )
            kept = self._repeat_into, what, root, sources
            self._move_known(call, sources, results, (blocks, None), kept)

    @collective
    def gather_into(
        self, own: Array, parts: Sequence[Array] | None, root: int, what: str
    ) -> None:
        """Copy replica ``r``'s array into part ``r`` on the root, for each ``r``.

        Only the root's ``parts`` are used, which must all have the size of ``own``.
        """
        here = self.rank == root
        outs = list(parts or ()) if here else []
        if (
            self._repeated.repeat(self._repeat_into, what, root, own, outs, True)
            is not None
        ):
            return
        self.check_root(root)
        if here:
            self._check_equal(outs, own, "gives")
        call = describe_arrays(f"{what}(root={root})", own)
        if not self.alone(own, outs[0] if here else None):
            table = np.zeros((self.size, self.size), np.int64)
            table[:, root] = own.nbytes
            results = {rank: rank for rank in range(self.size)}
            blocks = sent_blocks(table, self.rank, {root: 0}, results if here else {})
            kept = self._repeat_into, what, root, own
            self._move_known(call, [own], outs, (blocks, None), kept)

    @collective
    def scatter_into(
        self, parts: Sequence[Array] | None, result: Array, root: int, what: str
    ) -> None:
        """Copy part ``r`` of the root into replica ``r``'s ``result``.

        Only the root's ``parts`` are used, which must all have the size of ``result``.
        """
        here = self.rank == root
        sources = list(parts or ()) if here else []
        given = what, root, sources, [result]
        if self._repeated.repeat(self._repeat_into, *given, True) is not None:
            return
        self.check_root(root)
        flat_view(result)
        if here:
            self._check_equal(sources, result, "takes")
        call = describe_arrays(f"{what}(root={root})", result)
        if not self.alone(sources[0] if here else None, result):
            table = np.zeros((self.size, self.size), np.int64)
            table[root] = result.nbytes
            to = {rank: rank for rank in range(self.size)}
            blocks = sent_blocks(table, self.rank, to if here else {}, {root: 0})
            kept = self._repeat_into, what, root, sources
            self._move_known(call, sources, [result], (blocks, None), kept)

    def all_to_all(
        self, sends: Sequence[Array], receives: Sequence[Array], what: str
    ) -> None:
        """Send one part to each replica, and receive one part from each replica.

        All parts have the same dtype. Their sizes may differ, but if a replica sends
        another number of elements than the receiver expects, all replicas raise
        CollectiveError.
        """
        arrays, outs = list(sends), list(receives)
        try:
            if self._repeat_into(what, "all", arrays, outs) is not None:
                return
        except LengthsDifferError as error:
            self._repeated.change(error)
        self._all_to_all(arrays, outs, what)

    @collective
    def _all_to_all(self, sends: list[Array], receives: list[Array], what: str) -> None:
        size = self.size
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
        arrays, outs = list(sends.values()), list(receives.values())
        try:
            if self._repeat_into(what, name, arrays, outs) is not None:
                return
        except LengthsDifferError as error:
            self._repeated.change(error)
        self._exchange(sends, receives, what)

    @collective
    def _exchange(
        self, sends: Mapping[int, Array], receives: Mapping[int, Array], what: str
    ) -> None:
        for rank in (*sends, *receives):
            if not 0 <= rank < self.size:
                raise ValueError(
                    f"expected replicas from 0 to {self.size - 1} as neighbors, found "
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
        arrays = *sends.values(), *receives.values()
        for array in arrays:
            flat_view(array)
        if self.collectives.channel is None:
            text = _check_sent([(_sizes(sends), _sizes(receives), "")])
            if text:
                raise CollectiveError(text)
            for rank, part in receives.items():
                self.alone(sends[rank].copy(), part)
            return
        sizes = {array.nbytes for array in arrays}
        me = self.rank

        def exchange(comm: Any) -> Any:
            own = _sizes(sends), _sizes(receives), call_site()
            found = comm.allgather(own)
            text = _check_sent(found)
            return CollectiveError(text) if text else tuple(row[:2] for row in found)

        def plan(told: Any) -> tuple[MoveBlocks, list[Any]]:
            sources = {rank: i for i, rank in enumerate(sends)}
            results = {rank: i for i, rank in enumerate(receives)}
            return sent_blocks(_table(told, self.size), me, sources, results), []

        # If all sizes of this rank are equal, expect that those of all ranks are.
        expected = sizes.pop() if equal and len(sizes) == 1 else None
        given = list(sends.values()), list(receives.values())
        # The kernel's plan is for arrays of these shapes.
        kinds = (*((array.shape, array.dtype) for array in arrays),)
        key = tuple(sends), tuple(receives), kinds
        self._repeated.make(Move(call, *given, key, plan, kept, exchange, expected))

    def _move_known(
        self,
        call: Call,
        arrays: Sequence[Array],
        outs: Sequence[Array] | None,
        planned: tuple[MoveBlocks, Any],
        kept: Any,
    ) -> Sequence[Array]:
        """Make a call whose header has all sizes, which are the same on all ranks.

        ``planned`` has its blocks, and the shapes and dtypes of new results.
        """

        def plan(_: Any) -> tuple[MoveBlocks, Any]:
            return planned

        shapes = [(a.shape, a.dtype) for a in (*arrays, *(outs or ()))]
        own = outs is None, len(arrays), *shapes
        return self._repeated.make(Move(call, arrays, outs, own, plan, kept))

    # Checks of arguments.

    def alone(self, own: Array | None = None, result: Array | None = None) -> bool:
        """Return whether only one replica exists; if so, copy ``own`` to ``result``."""
        if self.collectives.channel is not None:
            return False
        if own is not None and result is not None:
            result[...] = own.reshape(result.shape)
        return True

    def check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(
                f"expected a replica from 0 to {self.size - 1} as root, found {root}; "
                "change it"
            )

    def check_parts(self, parts: Sequence[Array], own: Array, rank: int) -> None:
        if len(parts) != self.size:
            raise ValueError(
                f"expected {self.size} parts, one for each replica, found "
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
            flat_view(array)

    def _check_equal(self, parts: Sequence[Array], own: Array, does: str) -> None:
        self.check_parts(parts, own, self.rank)
        if any(part.size != own.size for part in parts):
            raise ValueError(
                f"expected parts of {own.size} elements, as this replica {does}, found "
                f"sizes {[part.size for part in parts]}; make them equal"
            )


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


def _sizes(parts: Mapping[int, Array]) -> tuple[tuple[int, int, str, int], ...]:
    """Return each neighbor's number, and the size and dtype of its array."""
    return tuple((r, p.size, str(p.dtype), p.itemsize) for r, p in parts.items())


def _check_sent(rows: Sequence[Any]) -> str:
    """Return a text on arrays that are not received as they are sent, or ""."""
    sent, wanted = dict[Any, Any](), dict[Any, Any]()
    sites = [f" ({row[2]})" if row[2] else "" for row in rows]
    for rank, (to, source, _) in enumerate(rows):
        sent |= {(rank, r): (size, dtype) for r, size, dtype, _ in to if size}
        wanted |= {(r, rank): (size, dtype) for r, size, dtype, _ in source if size}
    wrong = []
    for a, b in sorted(sent.keys() | wanted.keys()):
        gives, takes = sent.get((a, b)), wanted.get((a, b))
        if gives != takes:
            wrong.append(
                f"replica {a}{sites[a]} sends {_amount(gives)} to replica {b}"
                f"{sites[b]}, which expects {_amount(takes)}"
            )
    if not wrong:
        return ""
    more = len(wrong) - _MOST_NAMED
    if more > 0:
        wrong[_MOST_NAMED:] = [f"and {more} more pairs differ"]
    return (
        "expected each replica to receive what the others send to it, found that "
        f"{'; '.join(wrong)}; make neighbors, sizes and dtypes equal"
    )


def _table(told: Any, size: int) -> Array:
    """Return how many bytes each rank sends to each other rank.

    ``told`` is what all ranks have told, or one number of bytes for all pairs.
    """
    if isinstance(told, int):
        return np.full((size, size), told, np.int64)
    table = np.zeros((size, size), np.int64)
    for rank, (to, _) in enumerate(told):
        for other, count, _, itemsize in to:
            table[rank, other] = count * itemsize
    return table


def _amount(kind: tuple[int, str] | None) -> str:
    return "nothing" if kind is None else f"{kind[0]} elements of {kind[1]}"


def flat_view(array: Array) -> Array:
    """Return a flat view of a contiguous array; raise ValueError for other arrays."""
    if not array.flags.c_contiguous:
        raise ValueError(
            f"expected a contiguous array, found shape {array.shape} with strides "
            f"{array.strides}; pass a copy"
        )
    return array.reshape(-1)


def describe_arrays(
    what: str, array: Array, parts: Sequence[Array] | None = None
) -> Call:
    """Describe a call for an array, or for parts if their sizes differ."""
    sizes = {part.size for part in parts or ()}
    if len(sizes) > 1:
        text = f"{array.dtype} of sizes {[part.size for part in parts or ()]}"
        return describe_call(what, text, sum(part.nbytes for part in parts or ()))
    return describe_call(what, f"{array.dtype}{list(array.shape)}", array.nbytes)
