"""Batches on their way to where the program computes, and between the replicas."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcstrat.data.batches import writable
from hpcstrat.engine.arrays.kinds import is_device, to_host
from hpcstrat.engine.options import InputOptions
from hpcstrat.engine.tree import flatten, tree_map, unflatten
from hpcstrat.engine.typing import Array, Replicas, Tree

if TYPE_CHECKING:
    from hpcstrat.engine.gpu.feeding import Feeder

__all__ = ["Placer", "packed"]


@dataclass(frozen=True, slots=True)
class _FromDevice:
    """An array of another replica's GPU, as it travels: a copy in host memory."""

    host: Array


def packed(part: Tree) -> bytes:
    """Return a part of a batch as it travels, for `Placer.unpacked`.

    Waits for a GPU that is still computing it.
    """
    staged = tree_map(
        lambda leaf: _FromDevice(to_host(leaf)) if is_device(leaf) else leaf, part
    )
    # By pickle, so that text and fields of Python objects travel, too.
    return pickle.dumps(staged, protocol=5)


class Placer:
    """Puts batches where a strategy wants them; made on the program's thread.

    ``experimental_fetch_to_device=False`` leaves batches where they come from.
    """

    def __init__(self, strategy: Replicas, options: InputOptions) -> None:
        self._wanted = strategy.puts_on_gpu and options.experimental_fetch_to_device
        # Made with the first batch: it takes memory that cannot be paged out.
        self._feeder: Feeder | None = None

    @property
    def leaves_on_host(self) -> bool:
        """Return whether batches stay in host memory; any thread may place those."""
        return not self._wanted

    def _takes(self, leaf: Any) -> bool:
        if not self._wanted or not isinstance(leaf, np.ndarray):
            return False
        from hpcstrat.engine.gpu.feeding import fits_device

        return fits_device(leaf.dtype)

    def place(self, batch: Tree) -> Tree:
        """Put the numbers of a batch on the GPU, if they are wanted there.

        The program's current stream waits for the copy, the host does not. Other leaves
        stay as they were, or become copies where they cannot be written: they are the
        program's own.
        """
        leaves, structure = flatten(batch)
        hosts = {
            index: leaf.host if isinstance(leaf, _FromDevice) else leaf
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, _FromDevice) or self._takes(leaf)
        }
        if not hosts:
            return writable(batch)
        if self._feeder is None:
            from hpcstrat.engine.gpu.feeding import Feeder

            self._feeder = Feeder()
        for index, array in zip(
            hosts, self._feeder.put(list(hosts.values())), strict=True
        ):
            leaves[index] = array
        return writable(unflatten(structure, leaves))

    def unpacked(self, data: bytes) -> Tree:
        """Return a part that another replica has sent, where it is wanted.

        It is in the library that it came from, unless numbers are wanted on the GPU.
        """
        # A rank of this job pickled it: this is nobody else's data.
        return self.place(pickle.loads(data))

    def own(self, part: Tree) -> Tree:
        """Put this replica's own part of a batch where it is wanted.

        What is in host memory is copied, as the pipeline may fill it again.
        """
        return self.place(
            tree_map(
                lambda leaf: (
                    leaf if is_device(leaf) or self._takes(leaf) else np.array(leaf)
                ),
                part,
            )
        )
