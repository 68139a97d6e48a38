"""Calls that give every replica what others have: all_gather and broadcast."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from hpcstrat.arrays.indexed_slices import IndexedSlices
from hpcstrat.arrays.kinds import array_module, as_array, is_device
from hpcstrat.arrays.packing import pack, plan, unpack
from hpcstrat.channel.call import Call, describe_call, signature_text
from hpcstrat.channel.entries import collective
from hpcstrat.gpu.transports import byte_movers, transport_select
from hpcstrat.gpu.transports.byte_movers import Mover
from hpcstrat.gpu.transports.device_group import device_group
from hpcstrat.reduction.object_collectives import ObjectCollectives
from hpcstrat.reduction.reduction_arrays import by_memory, list_structure
from hpcstrat.tree import flatten, unflatten
from hpcstrat.typing import Array, Tree

__all__ = ["Gathers"]

_LARGE_BYTES = 1 << 30


class Gathers(ObjectCollectives):
    """The part of `Collectives` that moves arrays without adding them."""

    @collective
    def all_gather(self, tree: Tree, axis: int, what: str) -> Tree:
        """Concatenate the replicas' arrays along an axis, on every replica.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        tree : tree of array
            Of any fixed-size dtype; the lengths along ``axis`` may differ.
        axis : int
            At least 0, below the number of dimensions.
        what : str
            The call, for messages.

        Returns
        -------
        tree of ndarray
            Fresh arrays, in replica order.

        Raises
        ------
        ValueError
            For scalars, or an axis out of range; the others raise ReplicaError.
        NotImplementedError
            For IndexedSlices.
        CollectiveError
            If replicas disagree on dtype, rank or another dimension. On every replica.
        """
        leaves, structure = flatten(tree)
        arrays = [_gatherable(leaf, axis) for leaf in leaves]
        if self.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])
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
        """Gather arrays on GPUs, whose lengths are agreed on first."""
        module: Any = array_module(arrays[0])
        channel: Any = self.channel
        mover = self._mover(call)
        try:
            parts = [module.ascontiguousarray(np.moveaxis(a, axis, 0)) for a in arrays]
        except Exception as error:
            self.fail(call.text, error)
            raise
        lengths = self.all_gather_object([len(part) for part in parts], call.text)
        results: list[Array] = []
        for index, part in enumerate(parts):
            counts = [row[index] * math.prod(part.shape[1:]) for row in lengths]
            rows = sum(row[index] for row in lengths)
            try:
                whole = module.empty((rows, *part.shape[1:]), part.dtype)
            except Exception as error:
                self.fail(call.text, error)
                raise
            if whole.size:
                flat, result = part.reshape(-1), whole.reshape(-1)
                steps = byte_movers.all_gather(mover, flat, result, counts)
                channel.drive(steps, call, self._timeout_seconds)
            moved_back = np.moveaxis(whole, 0, axis)
            results.append(module.ascontiguousarray(moved_back))
        return results

    def _concatenated(self, arrays: list[Array], axis: int, call: Call) -> list[Array]:
        """Gather arrays in host memory, whose lengths are agreed on first."""
        channel: Any = self.channel
        rows = [np.moveaxis(array, axis, 0) for array in arrays]
        channel.agree(call, self._timeout_seconds)
        with channel.moving(call) as comm:
            lengths = comm.lengths([len(row) for row in rows])
        wholes, results = self._room(rows, lengths, axis)
        channel.agree(describe_call(f"data of {call.text}"), self._timeout_seconds)
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
        """Return memory for the rows of all replicas, and for the results.

        It runs out on all ranks or none, and makes this replica's rows contiguous.
        """
        wholes, results = list[Array](), list[Array]()
        for index, row in enumerate(rows):
            rows[index] = np.ascontiguousarray(row)
            shape = int(lengths[:, index].sum()), *row.shape[1:]
            whole = np.empty(shape, row.dtype)
            wholes.append(whole)
            if axis:
                whole = np.empty(np.moveaxis(whole, 0, axis).shape, row.dtype)
            results.append(whole)
        return wholes, results

    @collective
    def broadcast(self, tree: Tree, root: int, what: str) -> Tree:
        """Give every replica one replica's arrays.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        tree : tree of array
            Same structure, shapes and dtypes on every replica.
        root : int
            The replica whose values are taken.
        what : str
            The call, for messages.

        Returns
        -------
        tree of ndarray
            Fresh arrays.

        Raises
        ------
        CollectiveError
            If replicas disagree on root, structure, shape or dtype. On every replica.
        """
        leaves, structure = flatten(tree)
        arrays = [as_array(leaf) for leaf in leaves]
        if self.channel is None:
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
        channel: Any = self.channel
        packing = plan(tuple((a.dtype, a.shape) for a in arrays))
        flats = [pack(b, arrays, np.empty(b.size, b.dtype)) for b in packing.buckets]
        channel.agree(call, self._timeout_seconds)
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
        channel: Any = self.channel
        mover = self._mover(call)
        try:
            results = [array.copy("C") for array in arrays]
        except Exception as error:
            self.fail(call.text, error)
            raise
        filled = [result for result in results if result.size]
        steps = byte_movers.broadcast(mover, filled, filled, root)
        channel.drive(steps, call, self._timeout_seconds)
        return results

    def _mover(self, call: Call) -> Mover:
        """Return what moves bytes between GPUs, ready for a call."""
        channel: Any = self.channel
        group = device_group(channel, call.text, self._timeout_seconds)
        try:
            mover = transport_select.mover(group)
            mover.prepare()
        except Exception as error:
            self.fail(call.text, error)
            raise
        return mover


def _gather_rows(comm: Any, mine: Array, whole: Array, lengths: Array) -> None:
    """Fill an array with the rows of all replicas."""
    flat = whole.reshape(-1).view(np.uint8)
    sent = mine.reshape(-1).view(np.uint8)
    width = math.prod(whole.shape[1:]) * whole.itemsize
    sizes = [int(length) * width for length in lengths]
    if flat.nbytes < _LARGE_BYTES:
        byte = comm.mpi.BYTE
        comm.Allgatherv([sent, byte], [flat, sizes, byte])
        return
    # Displacements past 2**31 - 1 bytes are beyond many MPIs: one rank after the other.
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
