"""Calls that give every replica what others have: all_gather and broadcast."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.arrays import as_array
from hpcstrat.collectives.call import describe_call, signature_text
from hpcstrat.collectives.flat import all_gather_bytes, broadcast
from hpcstrat.indexed_slices import IndexedSlices
from hpcstrat.object_collectives import ObjectCollectives
from hpcstrat.packing import pack, plan, unpack
from hpcstrat.topology import Topology
from hpcstrat.tree import flatten, unflatten
from hpcstrat.typing import Array, Tree

__all__ = ["Gathers"]


class Gathers(ObjectCollectives):
    """The part of `Collectives` that moves arrays without adding them."""

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
        try:
            arrays = [_gatherable(leaf, axis) for leaf in leaves]
        except Exception as error:
            self.fail(what, error)
            raise
        if self.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])
        shapes = [(*a.shape[:axis], "any", *a.shape[axis + 1 :]) for a in arrays]
        text = ", ".join(
            f"{a.dtype}[{', '.join(map(str, s))}]"
            for a, s in zip(arrays, shapes, strict=True)
        )
        details = f"{text} in {structure}" if len(arrays) != 1 else text
        nbytes = sum(a.nbytes for a in arrays)
        call = describe_call(f"{what}(axis={axis})", details, nbytes)
        self.channel.agree(call, self._timeout_seconds)
        with self.channel.moving(call):
            leaves = self._concatenated(arrays, axis, self.channel.topology)
        return unflatten(structure, leaves)

    @staticmethod
    def _concatenated(
        arrays: list[Array], axis: int, topology: Topology
    ) -> list[Array]:
        lengths = topology.replica_comm.allgather([a.shape[axis] for a in arrays])
        results: list[Array] = []
        for index, array in enumerate(arrays):
            mine = np.ascontiguousarray(np.moveaxis(array, axis, 0))
            rest = mine.shape[1:]
            width = int(np.prod(rest, dtype=np.int64))
            counts = [row[index] for row in lengths]
            out = np.empty(sum(counts) * width, array.dtype)
            sizes = [count * width for count in counts]
            all_gather_bytes(mine.reshape(-1), out, sizes, topology)
            whole = np.moveaxis(out.reshape(sum(counts), *rest), 0, axis)
            results.append(np.ascontiguousarray(whole))
        return results

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
        try:
            arrays = [as_array(leaf) for leaf in leaves]
        except Exception as error:
            self.fail(what, error)
            raise
        if self.channel is None:
            return unflatten(structure, [array.copy() for array in arrays])
        text = signature_text(structure, arrays)
        nbytes = sum(a.nbytes for a in arrays)
        call = describe_call(f"{what}(root={root})", text, nbytes)
        packing = plan(tuple((a.dtype, a.shape) for a in arrays))
        flats = [pack(b, arrays, np.empty(b.size, b.dtype)) for b in packing.buckets]
        self.channel.agree(call, self._timeout_seconds)
        with self.channel.moving(call):
            for flat in flats:
                broadcast(flat, self.channel.topology, root)
        for bucket, flat in zip(packing.buckets, flats, strict=True):
            parts = unpack(bucket, flat)
            for index, part in zip(bucket.indices, parts, strict=True):
                leaves[index] = part
        return unflatten(structure, leaves)


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
