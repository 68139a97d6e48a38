"""Methods of tf.distribute's TPUStrategy for the logical devices of a replica."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.typing import Tree
from hpcstrat.strategies.inside import Inside

__all__ = ["LogicalDevices"]


class LogicalDevices:
    """Methods that place values on the ranks of a replica, its logical devices.

    In tf.distribute, `TPUStrategy` has these methods. There they tell a compiler where
    values are, and do not change them. Here each rank gets its own values.
    """

    inside: Inside

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Return this rank's block of an array.

        Not collective.

        Parameters
        ----------
        tensor : array_like
            The array, equal on all ranks of the replica.
        partition_dimensions : sequence of int
            The number of blocks along each dimension. Their product is the number of
            ranks of a replica. Lengths need not be multiples of these numbers: blocks
            are as in ``inside.part``.

        Returns
        -------
        array
            The block at this rank's position, in row-major order of blocks; a view. The
            array itself if a replica is one rank.

        Raises
        ------
        ValueError
            For another number of dimensions, or another product.
        """
        size = self.inside.size
        if size == 1:
            return tensor
        shape = np.shape(tensor)
        counts = [operator.index(count) for count in partition_dimensions]
        if len(counts) != len(shape) or min(counts, default=0) < 1:
            raise ValueError(
                f"expected a number of blocks for each of {len(shape)} dimensions, "
                f"found {list(partition_dimensions)}; write 1 for dimensions that are "
                "not divided"
            )
        if np.prod(counts) != size:
            raise ValueError(
                f"expected {size} blocks, one for each rank of a replica, found "
                f"{' x '.join(map(str, counts))} = {np.prod(counts)}; change "
                "partition_dimensions or ranks_per_replica"
            )
        places = np.unravel_index(self.inside.position, counts)
        block = tuple(
            slice(int(place) * length // count, (int(place) + 1) * length // count)
            for place, length, count in zip(places, shape, counts, strict=True)
        )
        return (tensor if hasattr(tensor, "shape") else np.asarray(tensor))[block]

    def experimental_replicate_to_logical_devices(self, tensor: Tree) -> Tree:
        """Return the array of the replica's first rank, on all its ranks.

        Collective over the ranks of the replica.

        Parameters
        ----------
        tensor : tree of array_like
            Structure, shapes and dtypes are equal on all ranks.

        Returns
        -------
        tree of array
            New arrays; the argument itself if a replica is one rank.

        Raises
        ------
        CollectiveError
            If the ranks disagree on structure, shapes or dtypes. On each of them.
        """
        return tensor if self.inside.size == 1 else self.inside.broadcast(tensor)

    def experimental_assign_to_logical_device(
        self, tensor: Any, logical_device_id: int
    ) -> Any:
        """Return an array on one rank of the replica, and None on the others.

        Not collective.

        Parameters
        ----------
        tensor : array_like
            The array.
        logical_device_id : int
            The position of the rank that keeps it.

        Returns
        -------
        array or None
            The argument, or None.

        Raises
        ------
        ValueError
            If there is no rank at this position.
        """
        if not 0 <= logical_device_id < self.inside.size:
            raise ValueError(
                f"expected 0 <= logical_device_id < {self.inside.size}, the ranks of a "
                f"replica, found {logical_device_id}; choose one of them"
            )
        return tensor if logical_device_id == self.inside.position else None
