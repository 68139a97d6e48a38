"""Orders to write a snapshot to the disk: files in the watchers' shared folder.

An order is one file, whose suffix is its state: ``begun``, ``publishing``, ``done`` or
``failed``. Whoever renames the file decides: a save is published only if it was not
given up before, and the other way round. The processes that execute an order write
further files beside it.
"""

from __future__ import annotations

import contextlib
import glob
import math
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.checkpoint.disk import remove
from hpcstrat.checkpoint.node_memory.slot_files import Record, read_value, write_value
from hpcstrat.checkpoint.save.pending_save import Publication
from hpcstrat.engine.typing import Array

__all__ = ["GivenUpError", "OrderFile", "SaveOrder", "deal_blocks", "orders_in"]

_PREFIX = "save-"
_UNDER_WAY = ("begun", "publishing")
_STATES = (*_UNDER_WAY, "done", "failed")
_NAP_SECONDS = 0.05


class GivenUpError(Exception):
    """Raised if somebody has given up an order meanwhile."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """An order to write a snapshot to the disk, as all its nodes read it.

    ``folder`` is the name of the snapshots' folder on each node. ``nodes`` are the
    watchers' names of the nodes, the publishing one first; ``writers`` has the index of
    the node that writes each block. ``bandwidth`` is in bytes per second. Without a
    ``publication``, the blocks are sent to the node ``spare``.
    """

    publication: Publication | None
    folder: str
    record: Record
    nodes: tuple[str, ...]
    writers: Array
    job: str
    direct: bool = False
    bandwidth: float = math.inf
    spare: str = ""

    def blocks_of(self, node: str) -> list[int]:
        """Return the blocks that a node writes or sends, ascending."""
        found: list[int] = np.flatnonzero(
            self.writers == self.nodes.index(node)
        ).tolist()
        return found


def deal_blocks(held: Array) -> Array:
    """Return the node that writes each block; ``held`` is bool, (nodes, blocks).

    The nodes write ranges of equal lengths, as far as they have the blocks.
    """
    num_nodes, count = held.shape
    wanted = np.arange(count) * num_nodes // max(count, 1)
    has = held[wanted, np.arange(count)]
    writers: Array = np.where(has, wanted, held.argmax(axis=0))
    return writers


def orders_in(folder: str, snapshots: str) -> Iterator[OrderFile]:
    """Yield the orders in the watchers' folder for a folder of snapshots."""
    for path in glob.glob(f"{glob.escape(folder)}/{_PREFIX}{snapshots}-*"):
        base, _, state = path.rpartition(".")
        if state in _STATES and (found := OrderFile.open(base)):
            yield found


class OrderFile:
    """An order and its file; ``path`` has no suffix."""

    def __init__(self, path: str, order: SaveOrder) -> None:
        self.path, self.order = path, order

    @classmethod
    def begin(cls, folder: str, order: SaveOrder) -> OrderFile:
        """Write an order to the watchers' folder; raises OSError."""
        name = f"{_PREFIX}{order.folder}-{secrets.token_hex(4)}"
        made = cls(os.path.join(folder, name), order)
        made.note("begun", order)
        return made

    @classmethod
    def open(cls, path: str) -> OrderFile | None:
        """Return an order of another process, or None if it was removed."""
        found = (read_value(f"{path}.{state}") for state in _STATES)
        order = next(filter(None, found), None)
        return None if order is None else cls(path, order)

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def is_under_way(self) -> bool:
        return any(self._is(state) for state in _UNDER_WAY)

    def require(self) -> None:
        """Raise GivenUpError unless the order is under way."""
        if not self.is_under_way:
            raise GivenUpError

    @property
    def is_done(self) -> bool:
        return self._is("done")

    def _is(self, state: str) -> bool:
        return os.path.exists(f"{self.path}.{state}")

    def _move(self, state: str, then: str) -> bool:
        try:
            os.rename(f"{self.path}.{state}", f"{self.path}.{then}")
        except FileNotFoundError:
            return False
        return True

    def begin_publication(self) -> None:
        """Raise GivenUpError if somebody has given up the order; nobody can later."""
        if not self._move("begun", "publishing"):
            raise GivenUpError

    def end(self) -> None:
        """Note that the checkpoint is on the disk."""
        self._move("publishing", "done")

    def give_up(self, cause: str, state: str = "begun") -> None:
        """Give up the save if it is in a state; the first cause is kept."""
        if self.noted("cause") is None:
            with contextlib.suppress(OSError):
                self.note("cause", cause)
        self._move(state, "failed")

    def cause(self) -> str:
        """Return why the save was given up."""
        return self.noted("cause") or "that it was given up; see the watchers' logs"

    def hurry(self) -> None:
        """End the delays that limit the bandwidth of the save."""
        with contextlib.suppress(OSError):
            self.note("hurry", True)

    @property
    def is_urgent(self) -> bool:
        return self._is("hurry")

    def note(self, name: str, value: Any) -> None:
        """Write a value to a file beside the order, at once; raises OSError."""
        write_value(f"{self.path}.{name}", value)

    def noted(self, name: str) -> Any:
        """Return the value in a file beside the order; None if there is none yet."""
        return read_value(f"{self.path}.{name}")

    def await_note(self, name: str) -> Any:
        """Return the value in a file as soon as another node has written it."""
        while (found := self.noted(name)) is None:
            self.require()
            time.sleep(_NAP_SECONDS)
        return found

    def times(self) -> dict[str, float]:
        """Return the times of an ended save, as far as known: of the slowest node."""
        found = [self.noted(f"wrote-{node}") or {} for node in self.order.nodes]
        kinds = {kind for one in found for kind in one}
        return {kind: max(one.get(kind, 0.0) for one in found) for kind in kinds}

    def remove(self) -> None:
        """Remove all files of an order that has ended, and its unpublished file."""
        if self.order.publication is not None and not self.is_done:
            with contextlib.suppress(OSError):
                remove(self.order.publication.temporary)
        for path in glob.glob(f"{glob.escape(self.path)}.*"):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def __repr__(self) -> str:
        return f"OrderFile({self.name!r})"
