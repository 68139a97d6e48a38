"""Orders to write a snapshot to the disk: files in the watchers' shared folder.

An order is one file, whose suffix is its state: ``begun``, ``publishing``, ``done`` or
``failed``. Whoever renames the file decides: a save is published only if it was not
given up before, and the other way round. Each node that has written its blocks makes a
file ``wrote-<node>`` beside it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import pickle
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcstrat.checkpoint.disk import remove
from hpcstrat.checkpoint.node_memory.slot_files import Key
from hpcstrat.checkpoint.save.pending_save import Publication
from hpcstrat.engine.typing import Array

__all__ = ["GivenUpError", "OrderFile", "SaveOrder", "deal_blocks", "orders_in"]

_PREFIX = "save-"
_UNDER_WAY = ("begun", "publishing")


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
    key: Key
    digest: bytes
    nodes: tuple[str, ...]
    writers: Array
    job: str
    direct: bool = False
    bandwidth: float = math.inf
    spare: str = ""


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
        if state in (*_UNDER_WAY, "done", "failed"):
            yield OrderFile(base)


class OrderFile:
    """The file of an order; ``path`` has no suffix."""

    def __init__(self, path: str) -> None:
        self.path = path

    @classmethod
    def begin(cls, folder: str, order: SaveOrder) -> OrderFile:
        """Write an order to the watchers' folder; raises OSError."""
        name = f"{_PREFIX}{order.folder}-{secrets.token_hex(4)}"
        made = cls(os.path.join(folder, name))
        with open(f"{made.path}.new", "xb") as file:
            pickle.dump(order, file)
        os.rename(f"{made.path}.new", f"{made.path}.begun")
        return made

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

    def read(self) -> SaveOrder | None:
        """Return the order, or None if it was removed."""
        for state in (*_UNDER_WAY, "done", "failed"):
            with (
                contextlib.suppress(FileNotFoundError),
                open(f"{self.path}.{state}", "rb") as file,
            ):
                found: SaveOrder = pickle.load(file)
                return found
        return None

    def begin_publication(self) -> bool:
        """Return whether the file may be published now: nobody has given it up."""
        return self._move("begun", "publishing")

    def end(self) -> None:
        """Note that the checkpoint is on the disk."""
        self._move("publishing", "done")

    def give_up(self, cause: str = "") -> bool:
        """Give up the save, unless it is published; the first cause is kept."""
        if cause:
            with (
                contextlib.suppress(OSError),
                open(f"{self.path}.cause", "x", encoding="utf-8") as file,
            ):
                file.write(cause)
        return self._move("begun", "failed")

    def fail_publication(self, cause: str) -> None:
        """Give up the save after `begin_publication`."""
        self._move("publishing", "begun")
        self.give_up(cause)

    def _move(self, state: str, then: str) -> bool:
        try:
            os.rename(f"{self.path}.{state}", f"{self.path}.{then}")
        except FileNotFoundError:
            return False
        return True

    def cause(self) -> str:
        """Return why the save was given up."""
        with (
            contextlib.suppress(OSError),
            open(f"{self.path}.cause", encoding="utf-8") as file,
        ):
            return file.read()
        return "that it was given up; see the logs of the watchers"

    def hurry(self) -> None:
        """End the delays that limit the bandwidth of the save."""
        with contextlib.suppress(OSError), open(f"{self.path}.hurry", "x"):
            pass

    @property
    def is_urgent(self) -> bool:
        return self._is("hurry")

    def note_address(self, host: str, port: int, token: str) -> None:
        """Note where the process of the spare node listens."""
        new = os.open(f"{self.path}.new", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(new, "w", encoding="utf-8") as file:
            json.dump((host, port, token), file)
        os.rename(f"{self.path}.new", f"{self.path}.address")

    def address(self) -> tuple[str, int, str] | None:
        """Return host, port and token of the spare node's process, if it listens."""
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"{self.path}.address", encoding="utf-8") as file,
        ):
            host, port, token = json.load(file)
            return host, port, token
        return None

    def note_written(self, node: int, seconds: dict[str, float]) -> None:
        """Note that a node's blocks are on the disk, and its times."""
        with open(f"{self.path}.new-{node}", "w", encoding="utf-8") as file:
            json.dump(seconds, file)
        os.rename(f"{self.path}.new-{node}", f"{self.path}.wrote-{node}")

    def times(self) -> dict[str, float]:
        """Return the times of an ended save: those of the slowest node."""
        order = self.read()
        nodes = range(0 if order is None else len(order.nodes))
        found = [self.written(node) or {} for node in nodes]
        kinds = {kind for one in found for kind in one}
        return {kind: max(one.get(kind, 0.0) for one in found) for kind in kinds}

    def written(self, node: int) -> dict[str, float] | None:
        """Return a node's times if its blocks are on the disk."""
        with (
            contextlib.suppress(FileNotFoundError),
            open(f"{self.path}.wrote-{node}", encoding="utf-8") as file,
        ):
            found: dict[str, Any] = json.load(file)
            return found
        return None

    def remove(self) -> None:
        """Remove all files of an order that has ended, and its unpublished file."""
        order = self.read()
        publication = None if order is None else order.publication
        if publication is not None and not self.is_done:
            with contextlib.suppress(OSError):
                remove(publication.temporary)
        for path in glob.glob(f"{glob.escape(self.path)}.*"):
            with contextlib.suppress(OSError):
                os.unlink(path)

    def __repr__(self) -> str:
        return f"OrderFile({self.name!r})"
