"""Calls that return new arrays: gathers and broadcasts, also of bytes.

`hpcstrat.engine.calls.moves` has the calls that fill arrays of the caller. Both are
made by plans, see `hpcstrat.engine.calls.repeated_moves`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hpcstrat.engine.algorithms.blocks import (
    MoveBlocks,
    broadcast_blocks,
    gathered_blocks,
)
from hpcstrat.engine.algorithms.plan import Kinds
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import as_array, is_device
from hpcstrat.engine.calls.field_checks import check_axes
from hpcstrat.engine.calls.gpu_moves import broadcast_on_gpus, gathered_on_gpus
from hpcstrat.engine.calls.reduction_arrays import in_each_memory, list_structure
from hpcstrat.engine.calls.repeated_moves import Move, RepeatedMoves, kinds_of
from hpcstrat.engine.channel.call import Call, describe_call, signature_text
from hpcstrat.engine.channel.pending_calls import PendingCall
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree

__all__ = ["Gathers", "started_gather"]

# Objects are sent in rows of this size; the first row begins with their size.
_ROW_BYTES, _SIZE_BYTES = 512, 8
# Distinguishes the headers of objects from those of arrays.
_OBJECTS = 1


class Gathers:
    """Calls that return new arrays with the values of other replicas.

    All calls are collective over ``topology.replica_comm``. ``what`` names the call in
    errors. Raises CollectiveError on every replica if the replicas disagree on the
    call, its root, or on shapes and dtypes, unless a method allows these to differ.
    Arrays may have any fixed-size dtype.
    """

    def __init__(self, collectives: Any) -> None:
        # The `Collectives` of the replicas.
        self.collectives = collectives
        self._repeated: RepeatedMoves = collectives.repeated

    def all_gather(self, tree: Tree, axis: int, what: str) -> Tree:
        """Concatenate the replicas' arrays along an axis, on every replica.

        Lengths along ``axis`` may differ between replicas. Results are new arrays,
        concatenated in replica order. Raises ValueError for scalars or an axis out of
        range, and NotImplementedError for IndexedSlices; the other replicas raise
        ReplicaError. Raises CollectiveError on every replica if the replicas disagree
        on dtype, number of dimensions, or a dimension other than ``axis``.
        """
        return self._repeated.call(self._all_gather, what, axis, tree, None)

    def _all_gather(self, what: str, axis: int, tree: Tree, _: None) -> Tree:
        leaves, structure = flatten(tree)
        arrays = [_gatherable(leaf, axis, what) for leaf in leaves]
        if self.collectives.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])

        def gather(indices: list[int]) -> Sequence[Array]:
            some = [arrays[i] for i in indices]
            call = _gather_call(what, axis, some, structure)
            if some and is_device(some[0]):
                return gathered_on_gpus(self.collectives, some, axis, call)
            return self._repeated.make(
                self._gather(some, axis, call, (what, axis, tree))
            )

        return unflatten(structure, in_each_memory(gather, arrays))

    def _gather(
        self,
        arrays: list[Array],
        axis: int,
        call: Call,
        given: tuple[str, Any, Any] | None,
    ) -> Move:
        """Return the gather of arrays in host memory."""
        shapes = [(*a.shape[:axis], *a.shape[axis + 1 :]) for a in arrays]
        inner = [math.prod(a.shape[axis + 1 :]) * a.itemsize for a in arrays]
        outer = [math.prod(a.shape[:axis]) for a in arrays]
        own = tuple(a.shape[axis] for a in arrays)
        rank, all_equal = self.collectives.rank, (own,) * self.collectives.size

        def plan(lengths: Any) -> tuple[MoveBlocks, Kinds]:
            lengths = lengths or all_equal
            whole = [sum(column) for column in zip(*lengths, strict=True)]
            results = [
                ((*s[:axis], length, *s[axis:]), a.dtype)
                for s, a, length in zip(shapes, arrays, whole, strict=True)
            ]
            return gathered_blocks(lengths, inner, outer, rank), results

        return Move(call, arrays, None, own, plan, given, own, equal=all_equal)

    def start_all_gather(self, tree: Tree, axis: int, what: str) -> PendingCall:
        """Start the gather of arrays whose shapes are equal on all replicas.

        Collective over ``topology.replica_comm``, but does not wait. `PendingCall.wait`
        returns the result of `all_gather`. Until then, the arrays must not be written.
        Call this only from an entry. Raises ValueError for arrays on GPUs. If shapes
        differ, ``wait`` raises CollectiveError on every replica.
        """
        calls = self.collectives
        call, arrays, structure = started_gather(tree, axis, what)
        if calls.channel is None:
            copies = unflatten(structure, [array.copy() for array in arrays])
            return PendingCall(None, call, iter(()), copies)
        # The header compares all lengths.
        move = replace(self._gather(arrays, axis, call, None), integers=None)
        make = functools.partial(self._repeated.planned, move, None)
        plan: Any = self._repeated.plan(call, move.own, make)
        results = plan.allocate(plan.results)
        steps, whole = plan.steps(arrays, results), unflatten(structure, results)
        return PendingCall(
            calls.channel, plan.call, steps, whole, calls.timeout_seconds
        )

    def broadcast(self, tree: Tree, root: int, what: str) -> Tree:
        """Return the root's arrays on every replica, as new arrays."""
        name = "broadcast", root
        return self._repeated.call(self._broadcast, what, name, tree, None)

    def _broadcast(self, what: str, name: Any, tree: Tree, _: None) -> Tree:
        _, root = name
        leaves, structure = flatten(tree)
        arrays = [as_array(leaf) for leaf in leaves]
        calls = self.collectives
        if calls.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])

        def broadcast(indices: list[int]) -> Sequence[Array]:
            some = [arrays[i] for i in indices]
            kind = structure if len(some) == len(arrays) else list_structure(len(some))
            text, sizes = signature_text(kind, some), [a.nbytes for a in some]
            call = describe_call(f"{what}(root={root})", text, sum(sizes))
            if some and is_device(some[0]):
                return broadcast_on_gpus(calls, some, root, call)

            def plan() -> tuple[MoveBlocks, Kinds]:
                blocks = broadcast_blocks(sizes, root, calls.rank, calls.size)
                return blocks, kinds_of(some)

            given = what, name, tree
            return self._repeated.make_known(call, some, None, plan, given)

        return unflatten(structure, in_each_memory(broadcast, arrays))

    def gathered_bytes(
        self, data: bytes, call: Call, root: int | None = None
    ) -> list[Array]:
        """Return the bytes of all replicas, or of the root, on every replica.

        Each replica's bytes, behind their number, fill some rows of an array, and the
        replicas gather these rows. Call this only from an entry.
        """
        # A call that moves arrays may have the same name: do not take its lengths.
        call = replace(call, digest=call.digest ^ _OBJECTS)
        sends = root in (None, self.collectives.rank)
        num_rows = -(-(_SIZE_BYTES + len(data)) // _ROW_BYTES) if sends else 0
        rows = np.zeros((num_rows, _ROW_BYTES), np.uint8)
        if sends:
            rows.reshape(-1)[:_SIZE_BYTES].view(np.int64)[0] = len(data)
            own = rows.reshape(-1)[_SIZE_BYTES:][: len(data)]
            own[...] = np.frombuffer(data, np.uint8)
        # At the first call, replicas expect a single row of each that sends.
        senders = range(self.collectives.size)
        single = tuple((int(root in (None, rank)),) for rank in senders)
        equal = single if num_rows < 2 else None
        gather = replace(self._gather([rows], 0, call, None), equal=equal)
        [whole] = self._repeated.make(gather)
        found, left = [], whole.reshape(-1)
        while left.size:
            size = int(left[:_SIZE_BYTES].view(np.int64)[0])
            found.append(left[_SIZE_BYTES:][:size])
            left = left[-(-(_SIZE_BYTES + size) // _ROW_BYTES) * _ROW_BYTES :]
        return found


def _gather_call(what: str, axis: int, arrays: list[Array], structure: Any) -> Call:
    shapes = [(*a.shape[:axis], "any", *a.shape[axis + 1 :]) for a in arrays]
    text = ", ".join(
        f"{a.dtype}[{', '.join(map(str, s))}]{' on a GPU' if is_device(a) else ''}"
        for a, s in zip(arrays, shapes, strict=True)
    )
    details = f"{text} in {structure}" if len(arrays) != 1 else text
    return describe_call(f"{what}(axis={axis})", details, sum(a.nbytes for a in arrays))


def started_gather(tree: Tree, axis: int, what: str) -> tuple[Call, list[Array], Any]:
    """Return a gather's description, with all shapes, its arrays and structure."""
    leaves, structure = flatten(tree)
    arrays = [_gatherable(leaf, axis, what) for leaf in leaves]
    if any(is_device(array) for array in arrays):
        raise ValueError(
            f"expected arrays in host memory in {what}, found one on a GPU; use "
            "all_gather"
        )
    text, nbytes = signature_text(structure, arrays), sum(a.nbytes for a in arrays)
    return describe_call(f"{what}(axis={axis})", text, nbytes), arrays, structure


def _gatherable(leaf: Any, axis: Any, what: str) -> Array:
    if isinstance(leaf, IndexedSlices):
        raise NotImplementedError(
            "expected an array to gather, found IndexedSlices; gather its values and "
            "indices, or all_reduce it"
        )
    array = as_array(leaf)
    if type(axis) is not int or not 0 <= axis < array.ndim:
        check_axes([array], what, axis)
    return array
