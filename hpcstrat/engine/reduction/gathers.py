"""Collective calls that copy arrays to every replica: all_gather and broadcast."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import array_module, as_array, is_device
from hpcstrat.engine.arrays.packing import pack, plan, unpack
from hpcstrat.engine.channel.call import Call, describe_call, signature_text
from hpcstrat.engine.channel.entries import collective
from hpcstrat.engine.reduction.object_collectives import ObjectCollectives
from hpcstrat.engine.reduction.reduction_arrays import by_memory, list_structure
from hpcstrat.engine.tree import flatten, unflatten
from hpcstrat.engine.typing import Array, Tree

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.transports.byte_movers import Mover

__all__ = ["Gathers"]

_LARGE_BYTES = 1 << 30


class Gathers:
    """Collective calls that copy arrays to every replica, without summing them."""

    def __init__(self, collectives: ObjectCollectives) -> None:
        self.collectives = collectives

    @collective
    def all_gather(self, tree: Tree, axis: int, what: str) -> Tree:
        """Concatenate the replicas' arrays along an axis, on every replica.

        Collective over ``topology.replica_comm``. Arrays may have any fixed-size dtype;
        their lengths along ``axis`` may differ between replicas. Results are new
        arrays, concatenated in replica order. Raises ValueError for scalars or an axis
        out of range, and NotImplementedError for IndexedSlices; the other replicas
        raise ReplicaError. Raises CollectiveError on every replica if the replicas
        disagree on dtype, number of dimensions, or a dimension other than ``axis``.
        """
        leaves, structure = flatten(tree)
        arrays = [_gatherable(leaf, axis) for leaf in leaves]
        if self.collectives.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])
        # Make the call for arrays in host memory first, then the call for arrays on
        # GPUs, because all replicas must make them in the same order.
        for indices in by_memory(arrays):
            some = [arrays[i] for i in indices]
            call = _gather_call(what, axis, some, structure)
            if some and is_device(some[0]):
                results = self._concatenated_on_gpus(some, axis, call)
            else:
                results = self._concatenated(some, axis, call)
            for index, result in zip(indices, results, strict=True):
                leaves[index] = result
        return unflatten(structure, leaves)

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

    def _concatenated(self, arrays: list[Array], axis: int, call: Call) -> list[Array]:
        """Exchange the lengths of arrays in host memory, then gather the arrays."""
        channel: Any = self.collectives.channel
        rows = [np.moveaxis(array, axis, 0) for array in arrays]
        channel.agree(call, self.collectives.timeout_seconds)
        with channel.moving(call) as comm:
            lengths = comm.lengths([len(row) for row in rows])
        # Allocate between two headers: the second header reports a lack of memory.
        wholes, results = self._room(rows, lengths, axis)
        channel.agree(
            describe_call(f"data of {call.text}"), self.collectives.timeout_seconds
        )
        with channel.moving(call) as comm:
            for index, (mine, whole) in enumerate(zip(rows, wholes, strict=True)):
                _gather_rows(comm, mine, whole, lengths[:, index])
                if results[index] is not whole:
                    results[index][...] = np.moveaxis(whole, 0, axis)
        return results

    @collective
    def _room(
        self, rows: list[Array], lengths: Array, axis: int
    ) -> tuple[list[Array], list[Array]]:
        """Allocate memory for the rows of all replicas, and for the results.

        If one rank has too little memory, all ranks raise. The method also replaces
        this replica's entries of ``rows`` by contiguous arrays.
        """
        wholes, results = list[Array](), list[Array]()
        for index, row in enumerate(rows):
            rows[index] = np.ascontiguousarray(row)
            # MPI concatenates along the first axis, which the caller moves to ``axis``.
            shape = int(lengths[:, index].sum()), *row.shape[1:]
            whole = np.empty(shape, row.dtype)
            wholes.append(whole)
            if axis:
                whole = np.empty(np.moveaxis(whole, 0, axis).shape, row.dtype)
            results.append(whole)
        return wholes, results

    @collective
    def broadcast(self, tree: Tree, root: int, what: str) -> Tree:
        """Return the root's arrays on every replica, as new arrays.

        Collective over ``topology.replica_comm``. Raises CollectiveError on every
        replica if the replicas disagree on root, structure, shape or dtype.
        """
        leaves, structure = flatten(tree)
        arrays = [as_array(leaf) for leaf in leaves]
        if self.collectives.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])
        for indices in by_memory(arrays):
            some = [arrays[i] for i in indices]
            kind = structure if len(some) == len(arrays) else list_structure(len(some))
            text, nbytes = signature_text(kind, some), sum(a.nbytes for a in some)
            call = describe_call(f"{what}(root={root})", text, nbytes)
            cast = self._cast_on_gpus if some and is_device(some[0]) else self._cast
            for index, result in zip(indices, cast(some, root, call), strict=True):
                leaves[index] = result
        return unflatten(structure, leaves)

    def _cast(self, arrays: list[Array], root: int, call: Call) -> list[Array]:
        """Broadcast arrays in host memory."""
        channel: Any = self.collectives.channel
        # All arrays of one dtype are sent in one message.
        packing = plan(tuple((a.dtype, a.shape) for a in arrays))
        flats = [pack(b, arrays, np.empty(b.size, b.dtype)) for b in packing.buckets]
        channel.agree(call, self.collectives.timeout_seconds)
        with channel.moving(call) as comm:
            for flat in flats:
                comm.cast_array(flat, root)
        results = list(arrays)
        for bucket, flat in zip(packing.buckets, flats, strict=True):
            parts = unpack(bucket, flat)
            for index, part in zip(bucket.indices, parts, strict=True):
                results[index] = part
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


def _gather_rows(comm: Any, mine: Array, whole: Array, lengths: Array) -> None:
    """Fill the array ``whole`` with the rows of all replicas."""
    # Send bytes, so that any fixed-size dtype works, even without an MPI datatype.
    flat = whole.reshape(-1).view(np.uint8)
    sent = mine.reshape(-1).view(np.uint8)
    width = math.prod(whole.shape[1:]) * whole.itemsize
    sizes = [int(length) * width for length in lengths]
    if flat.nbytes < _LARGE_BYTES:
        byte = comm.mpi.BYTE
        comm.Allgatherv([sent, byte], [flat, sizes, byte])
        return
    # Broadcast one rank's rows after the other, because many MPI libraries support no
    # displacements past 2**31 - 1 bytes.
    start = 0
    for root, nbytes in enumerate(sizes):
        part = flat[start : start + nbytes]
        if root == comm.rank:
            part[:] = sent
        comm.cast_array(part, root)
        start += nbytes


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
