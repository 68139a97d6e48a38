"""Sums over logical replicas, computed by the ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hpcstrat.engine.algorithms.reduction_plans import result_dtype
from hpcstrat.engine.algorithms.work import divide, drain, fill
from hpcstrat.engine.arrays.casting import rounded, without_fp_warnings
from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, is_device, to_host, to_reducible
from hpcstrat.engine.arrays.order_keys import from_keys, to_keys
from hpcstrat.engine.arrays.packing import Run, cut, side_by_side, wire_dtype
from hpcstrat.engine.arrays.recycling import Recycler
from hpcstrat.engine.calls.reduction_arrays import (
    checked_outs,
    require_fitting,
    require_sum_of_rows,
)
from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.channel.call import describe_call, signature_text
from hpcstrat.engine.logical.tree_order import TreeOrder
from hpcstrat.engine.options import CommunicationOptions, ReduceOp
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree
from hpcstrat.errors import CollectiveError

__all__ = ["ReplicaSums", "require_no_wire_dtype"]

_PIECE_BYTES = 4 << 20
# Arrays of at most _SMALL_BYTES are packed into buffers of at most _PACK_BYTES, so that
# one NumPy call adds many arrays.
_SMALL_BYTES = 32 << 10
_PACK_BYTES = 256 << 10
# For a `Run` of at most this size, every rank gathers and adds all roots itself.
_GATHERED_BYTES = 8 << 10


class ReplicaSums:
    """Sums over logical replicas in the order of a `TreeOrder`.

    ``ranks`` makes the calls between ranks, and ``rank`` is this rank's number.
    """

    def __init__(self, ranks: Collectives, order: TreeOrder, rank: int) -> None:
        self._ranks = ranks
        self.order = order
        self.block = order.block(rank)
        self._rank = rank
        self._recycler = Recycler()
        self._num_roots = [len(order.roots(r)) for r in range(order.num_ranks)]

    def reduce(
        self,
        op: ReduceOp,
        trees: Sequence[Tree],
        what: str,
        options: CommunicationOptions | None = None,
        *,
        out: Tree = None,
        are_roots: bool = False,
    ) -> Tree:
        """Reduce trees of arrays over all replicas, given this rank's trees.

        Collective over ``topology.replica_comm``; the arguments are the same as for
        ``Collectives.reduce_in_call``. If ``are_roots``, ``trees`` are partial sums,
        one for each of this rank's `TreeOrder.roots`, and may be overwritten. The
        results have the same bits on any number of ranks. Raises CollectiveError on all
        ranks if replicas disagree on structure, shape or dtype.
        """
        how = {"out": out, "are_roots": are_roots}
        reduce = functools.partial(self._reduce, op, trees, what, options, **how)
        return self._ranks.call(what, reduce)

    def _reduce(
        self,
        op: ReduceOp,
        trees: Sequence[Tree],
        what: str,
        options: CommunicationOptions | None,
        *,
        out: Tree,
        are_roots: bool,
    ) -> Tree:
        if self.order.num_replicas == self.order.num_ranks <= 2:
            # A sum of at most two values, one per rank, is the same in any order.
            return self._ranks.reduce_in_call(op, trees[0], what, options, out=out)
        if options is not None:
            require_no_wire_dtype(options)
        flats = [flatten(tree) for tree in trees]
        structure = flats[0][1]
        columns = self._columns(op, flats, what)
        results: list[Any] = [None] * len(columns)
        sparse = [i for i, c in enumerate(columns) if isinstance(c[0], IndexedSlices)]
        if sparse:
            require_sum_of_rows(op)
        dense = [i for i in range(len(columns)) if i not in sparse]
        like = [c[0].values if i in sparse else c[0] for i, c in enumerate(columns)]
        outs = None if out is None else checked_outs(out, like, structure, sparse)
        if outs is not None:
            means = op is ReduceOp.MEAN
            wanted = [(a.shape, result_dtype(a.dtype, means)) for a in like]
            require_fitting(outs, wanted, bool(like) and is_device(like[0]))
        for index in sparse:
            results[index] = self._rows(op, columns[index], what)
        label = f"{what} of {structure}"
        some = self._dense(op, [columns[i] for i in dense], label, are_roots)
        for index, total in zip(dense, some, strict=True):
            results[index] = total
        if outs is None:
            return unflatten(structure, results)
        for into, result in zip(outs, results, strict=True):
            into[...] = result
        return out

    def _columns(
        self, op: ReduceOp, flats: Sequence[tuple[list[Any], Any]], what: str
    ) -> list[Any]:
        """Return the arrays of this rank's replicas, grouped by leaf of the tree."""
        rows, kinds = [], []
        for number, (leaves, structure) in enumerate(flats):
            if structure != flats[0][1]:
                self._disagree(what, number, flats[0][1], structure)
            row = [
                v if isinstance(v, IndexedSlices) else to_reducible(v, op)
                for v in leaves
            ]
            rows.append(row)
            kinds.append([*map(_kind, row)])
        for number, kind in enumerate(kinds):
            if kind != kinds[0]:
                pairs = zip(kinds[0], kind, strict=True)
                first, other = next(pair for pair in pairs if pair[0] != pair[1])
                self._disagree(what, number, _words(first), _words(other))
        return [list(column) for column in zip(*rows, strict=True)]

    def _disagree(self, what: str, number: int, first: Any, other: Any) -> None:
        replicas = self.block[0], self.block[number]
        raise CollectiveError(
            f"expected the same arrays in {what} on all replicas, found {first} on "
            f"replica {replicas[0]} and {other} on replica {replicas[1]}; make the "
            "same call on all",
            list(replicas),
        )

    @without_fp_warnings
    def _rows(self, op: ReduceOp, rows: Sequence[IndexedSlices], what: str) -> Any:
        """Concatenate the sparse rows of all replicas."""
        values = array_module(rows[0].values).concatenate([r.values for r in rows])
        indices = np.concatenate([r.indices for r in rows])
        shape = rows[0].dense_shape
        values, indices = self._ranks.all_gather(
            [values, indices], 0, f"{what}({op.name}) of rows of {shape}"
        )
        if op is ReduceOp.MEAN:
            values = values / self.order.num_replicas
        return IndexedSlices(values, indices, shape)

    @without_fp_warnings
    def _dense(
        self,
        op: ReduceOp,
        columns: Sequence[Sequence[Array]],
        what: str,
        are_roots: bool,
    ) -> list[Array]:
        """Return one result per column; a column has one array per replica."""
        means = op is ReduceOp.MEAN
        if not columns:
            return []
        firsts = [column[0] for column in columns]
        dtypes = [first.dtype for first in firsts]
        if not op.adds:
            columns = [[to_keys(a, op) for a in column] for column in columns]
            firsts = [column[0] for column in columns]
        function = np.add if op.adds else np.maximum
        plan = _planned(tuple((a.dtype, a.shape) for a in firsts), means)
        empty, roots = self._recycler.empty, []
        for pack in plan:
            arrays = [
                _side_by_side([columns[i][number] for i in pack.indices], pack, empty)
                for number in range(len(columns[0]))
            ]
            if not are_roots:
                arrays = self.order.sum_roots(self._rank, arrays, empty, function)
            roots.append(arrays)
        label = f"{what} ({op.name} of {self.order.num_replicas} replicas)"
        found = self._totals(roots, function, label)
        results: list[Any] = [None] * len(columns)
        for pack, total in zip(plan, found, strict=True):
            if means:
                divide(total, self.order.num_replicas)
            one = len(pack.indices) == 1
            parts = [total] if one else side_by_side(total, pack.shapes)
            for index, part in zip(pack.indices, parts, strict=True):
                first = firsts[index]
                result = rounded(part, first.dtype) if pack.narrows else part
                if not op.adds:
                    result = from_keys(result.copy("C"), dtypes[index], op)
                if is_device(first):
                    result = array_module(first).asarray(result)
                results[index] = result
        return results

    def _totals(
        self, roots: Sequence[list[Array]], function: np.ufunc, what: str
    ) -> list[Array]:
        """Return the sums of all ranks' partial sums, which are in ``roots``."""
        if self.order.num_ranks == 1:
            # With a single rank, its only root is the whole sum.
            return [found[0] for found in roots]
        if self.order.is_pair:
            firsts = [found[0] for found in roots]
            # Overwrite partial sums, but not a single replica's own array.
            out = firsts if len(self.block) > 1 else None
            op = ReduceOp.SUM if function is np.add else ReduceOp.MAX
            totals: list[Array] = self._ranks.reduce_in_call(op, firsts, what, out=out)
            return totals
        return self._exchanged(roots, function, what)

    def _exchanged(
        self, roots: Sequence[list[Array]], function: np.ufunc, what: str
    ) -> list[Array]:
        """Add partial sums: each rank adds one slice, then all ranks exchange sums."""
        firsts = [found[0] for found in roots]
        sources = [
            [found[k].reshape(-1) for found in roots]
            for k in range(self._num_roots[self._rank])
        ]
        totals = [np.empty_like(first) for first in firsts]
        flats = [total.reshape(-1) for total in totals]
        call = describe_call(
            what, signature_text(None, firsts), sum(first.nbytes for first in firsts)
        )
        signatures = [(first.dtype, first.shape) for first in firsts]
        channel: Any = self._ranks.channel
        channel.agree(call, self._ranks.timeout_seconds)
        with channel.moving(call) as comm:
            for piece in cut(signatures, False, _PIECE_BYTES):
                for run in piece:
                    rows = np.empty((len(sources), run.size), run.dtype)
                    for row, source in zip(rows, sources, strict=True):
                        fill(run, source, row)
                    drain(run, flats, self._added(comm, run, rows, function))
        return totals

    def _added(self, comm: Any, run: Run, rows: Array, function: np.ufunc) -> Array:
        """Return the sum of a `Run` over all ranks; ``rows`` has this rank's roots."""
        size, counts = run.size, self._num_roots
        if size * run.dtype.itemsize <= _GATHERED_BYTES:
            sizes = [n * size * rows.itemsize for n in counts]
            every = _gathered(comm, rows.reshape(-1), sizes).reshape(-1, size)
            return self.order.sum_all(list(every), function)
        ranks = self.order.num_ranks
        ends = [rank * size // ranks for rank in range(ranks + 1)]
        parts = [rows[:, a:b] for a, b in pairwise(ends)]
        own = ends[self._rank + 1] - ends[self._rank]
        sent = np.concatenate([part.reshape(-1) for part in parts])
        came = np.empty(sum(counts) * own, run.dtype)
        byte, width = comm.mpi.BYTE, run.dtype.itemsize
        comm.Alltoallv(
            [_bytes(sent), [part.size * width for part in parts], byte],
            [_bytes(came), [count * own * width for count in counts], byte],
        )
        roots = list(came.reshape(sum(counts), own))
        total = self.order.sum_all(roots, function)
        sizes = [(b - a) * width for a, b in pairwise(ends)]
        return _gathered(comm, total, sizes)


def require_no_wire_dtype(options: CommunicationOptions) -> None:
    """Raise ValueError if the options have a ``wire_dtype``."""
    if options.wire_dtype is not None:
        raise ValueError(
            "expected no wire_dtype with logical replicas, found "
            f"{options.wire_dtype}, whose roundings depend on the number of workers; "
            "leave it out"
        )


def _gathered(comm: Any, own: Array, sizes: Sequence[int]) -> Array:
    """Return the flat arrays of all ranks; rank ``r`` has ``sizes[r]`` bytes."""
    whole = np.empty(sum(sizes) // own.itemsize, own.dtype)
    first = sum(sizes[: comm.rank]) // own.itemsize
    whole[first : first + own.size] = own
    comm.Allgatherv(_bytes(whole), sizes)
    return whole


def _bytes(array: Array) -> Array:
    return array.view(np.uint8)


class _SumPack(NamedTuple):
    """Arrays of one type that are added in one buffer, or one large array alone.

    ``wire`` is the type of the sums. If ``narrows``, the sums are cast back at the end.
    """

    indices: list[int]
    shapes: list[tuple[int, ...]]
    wire: np.dtype[Any]
    narrows: bool
    size: int


@functools.lru_cache(maxsize=256)
def _planned(
    kinds: tuple[tuple[np.dtype[Any], tuple[int, ...]], ...], means: bool
) -> list[_SumPack]:
    """Group arrays of these types and shapes into packs, each added in one buffer."""
    groups: list[list[int]] = []
    filled: dict[np.dtype[Any], list[int]] = {}
    left: dict[np.dtype[Any], int] = {}
    for index, (dtype, shape) in enumerate(kinds):
        nbytes = math.prod(shape) * wire_dtype(dtype, means)[0].itemsize
        if nbytes > _SMALL_BYTES:
            groups.append([index])
            continue
        if left.get(dtype, -1) < nbytes:
            filled[dtype], left[dtype] = [], _PACK_BYTES
            groups.append(filled[dtype])
        filled[dtype].append(index)
        left[dtype] -= nbytes
    packs = []
    for indices in groups:
        shapes = [kinds[index][1] for index in indices]
        wire, narrows = wire_dtype(kinds[indices[0]][0], means)
        packs.append(
            _SumPack(indices, shapes, wire, narrows, sum(map(math.prod, shapes)))
        )
    return packs


def _side_by_side(
    arrays: Sequence[Array], pack: _SumPack, empty: Callable[..., Array]
) -> Array:
    """Return a pack's arrays as one contiguous array of the pack's wire type."""
    if len(arrays) == 1:
        array = rounded(to_host(arrays[0]), pack.wire)
        # ascontiguousarray would turn a scalar (0-d array) into a 1-d array.
        return array if array.flags.c_contiguous else array.copy("C")
    flat = empty((pack.size,), pack.wire)
    flats = [to_host(array).reshape(-1) for array in arrays]
    np.concatenate(flats, out=flat, casting="unsafe")
    return flat


def _kind(value: Any) -> tuple[Any, ...]:
    """Return the properties of an array that must be equal on all replicas."""
    if isinstance(value, IndexedSlices):
        return value.values.dtype, value.values.shape[1:], "rows"
    return value.dtype, value.shape


def _words(kind: tuple[Any, ...]) -> str:
    return f"{' '.join(kind[2:])} {kind[0]}{list(kind[1])}".strip()
