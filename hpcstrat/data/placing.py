"""Batches on their way to where the program computes, and between the replicas."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.arrays.kinds import is_device, to_host
from hpcstrat.data.batches import writable
from hpcstrat.gpu.feeding import Feeder, fits_device
from hpcstrat.options import InputOptions
from hpcstrat.tree import flatten, tree_map, unflatten
from hpcstrat.typing import Array, Replicas, Tree

__all__ = ["Placer", "packed"]


@dataclass(frozen=True, slots=True)
class _FromDevice:
    """An array of another replica's GPU, as it travels.

    Parameters
    ----------
    host : ndarray
        A copy in host memory.
    """

    host: Array


def packed(part: Tree) -> bytes:
    """Return a part of a batch as it travels to another replica.

    Not collective. Waits for a GPU that is still computing it.

    Parameters
    ----------
    part : tree of ndarray
        Of either library.

    Returns
    -------
    bytes
        For `Placer.unpacked`.
    """
    staged = tree_map(
        lambda leaf: _FromDevice(to_host(leaf)) if is_device(leaf) else leaf, part
    )
    return pickle.dumps(staged, protocol=5)


class Placer:
    """Puts batches where a strategy wants them; made on the program's thread.

    Parameters
    ----------
    strategy : Strategy
        Whose replica's GPU, if it puts batches on one.
    options : InputOptions
        ``experimental_fetch_to_device`` False leaves batches where they come from.
    """

    def __init__(self, strategy: Replicas, options: InputOptions) -> None:
        self._wanted = strategy.puts_on_gpu and options.experimental_fetch_to_device
        self._feeder: Feeder | None = None

    def _takes(self, leaf: Any) -> bool:
        return self._wanted and isinstance(leaf, np.ndarray) and fits_device(leaf.dtype)

    def place(self, batch: Tree) -> Tree:
        """Put a batch where it is wanted.

        Not collective. The program's current stream waits for the copy, the host does
        not.

        Parameters
        ----------
        batch : tree of ndarray
            In host memory or on this replica's GPU.

        Returns
        -------
        tree of ndarray
            Numbers on the GPU, if they are wanted there; other leaves as they were, or
            copies of those that cannot be written: they are the program's own.
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
            self._feeder = Feeder()
        for index, array in zip(
            hosts, self._feeder.put(list(hosts.values())), strict=True
        ):
            leaves[index] = array
        return writable(unflatten(structure, leaves))

    def unpacked(self, data: bytes) -> Tree:
        """Return a part of a batch that another replica has sent.

        Not collective.

        Parameters
        ----------
        data : bytes
            From `packed`.

        Returns
        -------
        tree of ndarray
            In the library that it came from, or where it is wanted.
        """
        return self.place(pickle.loads(data))

    def own(self, part: Tree) -> Tree:
        """Return the part of a batch that this replica keeps for itself.

        Not collective.

        Parameters
        ----------
        part : tree of ndarray
            What is in host memory is copied, as the pipeline may fill it again.

        Returns
        -------
        tree of ndarray
            Where it is wanted.
        """
        return self.place(
            tree_map(
                lambda leaf: (
                    leaf if is_device(leaf) or self._takes(leaf) else np.array(leaf)
                ),
                part,
            )
        )
