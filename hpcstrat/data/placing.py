"""Transfer of batches between ranks, and to the device where the program computes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_device, to_host
from hpcstrat.engine.options import InputOptions
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Array, Replicas, Tree
from hpcstrat.engine.values import PerReplica

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.feeding import Feeder

__all__ = ["Placer", "packed"]


@dataclass(frozen=True, slots=True)
class _FromDevice:
    """A host copy of an array on this rank's GPU, to be sent to another rank."""

    host: Array


def packed(part: Tree) -> bytes:
    """Copy a replica's part of a batch from the GPU to the host, and pickle it."""
    staged = tree_map(
        lambda leaf: _FromDevice(to_host(leaf)) if is_device(leaf) else leaf, part
    )
    # Pickle can also send strings and fields of Python objects.
    return pickle.dumps(staged, protocol=5)


class Placer:
    """Puts batches on a strategy's device; on a GPU, only from the program's thread."""

    def __init__(self, strategy: Replicas, options: InputOptions) -> None:
        self._strategy = strategy
        self._wanted = strategy.puts_on_gpu and options.experimental_fetch_to_device
        # `place` makes the feeder when needed, because it allocates page-locked memory.
        self._feeder: Feeder | None = None

    @property
    def leaves_on_host(self) -> bool:
        """Return whether batches stay in host memory, so any thread can place them."""
        return not self._wanted

    @staticmethod
    def _takes(leaf: Any) -> bool:
        if not isinstance(leaf, np.ndarray):
            return False
        from hpcstrat.engine.gpu.feeding import fits_device

        return fits_device(leaf.dtype)

    def place(self, batch: Tree, *, copies: bool = False) -> Tree:
        """Put the numeric arrays of a batch on the GPU, if the options say so.

        The program's current stream waits for the copy; the host does not wait. Leaves
        that stay in host memory are copied if they are read-only or ``copies`` is set.
        """
        leaves, structure = flatten(batch)
        going = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, _FromDevice):
                leaves[index] = leaf.host
                going.append(index)
            elif self._wanted and self._takes(leaf):
                going.append(index)
            elif not is_device(leaf) and (copies or not leaf.flags.writeable):
                leaves[index] = np.array(leaf)
        if going:
            if self._feeder is None:
                from hpcstrat.engine.gpu.feeding import Feeder

                self._feeder = Feeder()
            fed = self._feeder.put([leaves[index] for index in going])
            for index, array in zip(going, fed, strict=True):
                leaves[index] = array
        return unflatten(structure, leaves)

    def deliver(self, parts: list[Any], *, copies: bool) -> Tree:
        """Return this rank's parts of a batch as one distributed element.

        ``copies`` is set if this rank's pipeline may overwrite the memory of its parts.
        """
        # Unpickling is safe, because a rank of this job pickled the parts.
        return self.wrap(
            [
                self.place(pickle.loads(part))
                if isinstance(part, bytes)
                else self.place(part, copies=copies)
                for part in parts
            ]
        )

    def wrap(self, parts: list[Tree]) -> Tree:
        """Combine the parts of this rank's replicas into one distributed element."""
        if len(parts) > 1:
            return self._strategy.replicas.joined(parts, "a batch")
        several = self._strategy.num_replicas_in_sync > 1
        return tree_map(PerReplica, parts[0]) if several else parts[0]
