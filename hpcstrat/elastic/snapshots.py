"""Copies of a program's state in memory, and the exchange of partner copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.checkpoint.file.plain_state import as_text, from_text
from hpcstrat.checkpoint.file.schema import Entry, Header
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.engine.arrays.kinds import to_host
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.variables import SyncOnReadVariable

__all__ = ["Key", "Snapshot", "exchange"]

_TAG = 17

Key = tuple[int, int]
"""Identifier of a commit: the generation of ranks, and the number of its commit."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of all tracked objects at one commit.

    ``arrays`` has this replica's components of variables. ``iterators`` has positions
    in datasets, and this replica's own row of each random stream. ``python`` has plain
    state by the object's name; the values passed to ``commit`` have an empty name.
    ``copies`` has partner copies: results of `own_part` on other replicas, by replica.
    """

    # None while `fill` runs, because an incomplete snapshot is no commit.
    key: Key | None = None
    step: int = 0
    # This rank's number, and the number of ranks, at the commit; a loss changes both.
    replica: int = 0
    num_ranks: int = 1
    num_replicas: int = 1
    entries: dict[str, Entry] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    iterators: dict[str, dict[str, Any]] = field(default_factory=dict)
    python: dict[str, bytes] = field(default_factory=dict)
    copies: dict[int, Array] = field(default_factory=dict)

    def fill(self, objects: Objects, python: Mapping[str, bytes]) -> None:
        """Copy the state of all objects into this snapshot, whose arrays are reused."""
        self.key = None
        variables = objects.variables()
        # For variables on a GPU, `to_host` waits for their last update.
        values = {path: to_host(v.component) for path, v in variables.items()}
        entries = {
            path: Entry(
                path,
                variable.shape,
                variable.dtype.name,
                synchronization=_on(isinstance(variable, SyncOnReadVariable)),
                aggregation=variable.aggregation.name.lower(),
                trainable=variable.trainable,
            )
            for path, variable in variables.items()
        }
        self._copy(entries, values)
        self.iterators = {
            name: t.own_state() if hasattr(t, "own_state") else t.state()
            for name, t in objects.iterators.items()
        }
        self._copy_python(objects, python)

    def fill_whole(self, objects: Objects, python: Mapping[str, bytes]) -> None:
        """Copy the state of all objects, with the parts of all logical replicas.

        Collective over the strategy's replicas. Each rank then has the whole state, so
        that the loss of other ranks loses no state.
        """
        self.key = None
        variables = objects.variables()
        found = objects.values(variables)
        values = {path: to_host(value) for path, value in found.items()}
        self._copy(objects.entries(variables, values), values)
        self.iterators = {name: t.state() for name, t in objects.iterators.items()}
        self._copy_python(objects, python)

    def _copy(self, entries: dict[str, Entry], values: Mapping[str, Array]) -> None:
        """Copy values, to the last call's arrays if shape and type are equal."""
        self.entries = entries
        for path in self.arrays.keys() - values.keys():
            del self.arrays[path]
        for path, value in values.items():
            kept = self.arrays.get(path)
            if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                self.arrays[path] = value.copy()
            else:
                # Reuse the array, whose pages are in memory, to avoid page faults.
                kept[...] = value

    def _copy_python(self, objects: Objects, python: Mapping[str, bytes]) -> None:
        """Copy ``python``, and the states of objects with plain state."""
        self.python = dict(python)
        for name, thing in objects.python.items():
            self.python[name] = as_text(name, thing.state_dict())
        self.copies = {}

    def own_part(self) -> Array:
        """Return the bytes of the state that only this replica has.

        These are its components of SyncOnRead variables, and its rows of random
        streams. The length is the same on every replica, as `exchange` requires.
        """
        parts = [self.arrays[p].reshape(-1).view(np.uint8) for p in self.on_read()]
        parts += [row.reshape(-1).view(np.uint8) for row in self._rows()]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def unpacked(self, part: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the arrays (by path) and random streams (by name) in an `own_part`.

        ``part`` may be that of any replica: all have the same order and sizes.
        """
        arrays, rows, start = {}, {}, 0
        for path in self.on_read():
            like = self.arrays[path]
            raw = part[start : start + like.nbytes].copy()
            arrays[path] = raw.view(like.dtype).reshape(like.shape)
            start += like.nbytes
        for name, state in self.iterators.items():
            if "bit_generator" in state:
                nbytes = state["state"].nbytes
                rows[name] = part[start : start + nbytes].copy().view(np.uint64)
                start += nbytes
        return arrays, rows

    def on_read(self) -> list[str]:
        """Return the paths of values that differ between replicas, in fixed order."""
        return [p for p, e in self.entries.items() if e.synchronization == _on(True)]

    def mirrored(self) -> list[str]:
        """Return the paths of values that are the same on every replica."""
        return [p for p, e in self.entries.items() if e.synchronization != _on(True)]

    def _rows(self) -> list[Array]:
        states = self.iterators.values()
        return [state["state"] for state in states if "bit_generator" in state]

    def header(self) -> Header:
        """Return a checkpoint's header with this state, for `match_entries`."""
        python = {name: from_text(text) for name, text in self.python.items()}
        # Leave out the values passed to ``commit``, which belong to no object.
        own = {name: state for name, state in python.items() if name}
        header = Header(self.step, self.num_replicas, dict(self.entries))
        header.iterators, header.python = self.iterators, own
        return header


def _on(read: bool) -> str:
    return "on_read" if read else "on_write"


def exchange(
    strategy: Replicas, part: Array, partners: Sequence[int]
) -> dict[int, Array]:
    """Send a part to this replica's partner; return the parts received, by sender.

    Collective over the strategy's replicas, of which there must be two or more. Parts
    have the same length on all replicas.
    """
    own = strategy.replica_id
    sources = [r for r, partner in enumerate(partners) if partner == own]
    received = {source: np.empty_like(part) for source in sources}
    collectives = strategy.collectives
    what = f"partner copies of {part.size} bytes"
    # Synchronize after allocating buffers: if memory is short, a rank fails before it.
    collectives.barrier(what)
    with collectives.moving(what) as comm:
        comm.exchange({partners[own]: part}, received, _TAG)
    return received
