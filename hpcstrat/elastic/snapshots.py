"""Copies of a program's state in this rank's memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcstrat.arrays.kinds import to_host
from hpcstrat.checkpoint.file.layout import Entry, Header
from hpcstrat.checkpoint.file.plain_state import as_text, from_text
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.randomness import RandomStreams
from hpcstrat.typing import Array
from hpcstrat.variables import SyncOnReadVariable

__all__ = ["Commit", "Key"]

Key = tuple[int, int]
"""Of a commit: the generation of ranks that made it, and its number among theirs."""


@dataclass(slots=True, eq=False)
class Commit:
    """All that is tracked, as it was at one step.

    Parameters
    ----------
    key : tuple of int, optional
        None while it is not complete.
    step : int
        The program's own number.
    replica, num_replicas : int
        Which replica made it, of how many.
    entries : dict of str to Entry
        What each array is, by path.
    arrays : dict of str to ndarray
        This replica's components.
    iterators : dict of str to dict
        Positions in data sets, and this replica's row of random streams.
    python : dict of str to bytes
        Plain state, as of `as_text`; the program's own under an empty name.
    copies : dict of int to ndarray
        What other replicas alone have, by replica, see `own_part`.
    """

    key: Key | None = None
    step: int = 0
    replica: int = 0
    num_replicas: int = 1
    entries: dict[str, Entry] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)
    iterators: dict[str, dict[str, Any]] = field(default_factory=dict)
    python: dict[str, bytes] = field(default_factory=dict)
    copies: dict[int, Array] = field(default_factory=dict)

    def fill(self, objects: Objects, python: Mapping[str, bytes]) -> None:
        """Copy everything; the arrays of the last time are used again.

        Not collective.

        Parameters
        ----------
        objects : Objects
            What is tracked.
        python : mapping of str to bytes
            The program's own state.
        """
        self.key = None
        variables = objects.variables()
        # Of variables on a GPU this waits for their last update.
        values = {path: to_host(v.component) for path, v in variables.items()}
        self.entries = {
            path: Entry(
                *(path, variable.shape, variable.dtype.name),
                _on(isinstance(variable, SyncOnReadVariable)),
                variable.aggregation.name.lower(),
                variable.trainable,
            )
            for path, variable in variables.items()
        }
        for path in self.arrays.keys() - values.keys():
            del self.arrays[path]
        for path, value in values.items():
            kept = self.arrays.get(path)
            if kept is None or kept.shape != value.shape or kept.dtype != value.dtype:
                self.arrays[path] = value.copy()
            else:
                kept[...] = value
        self.iterators = {
            name: t.own_state() if isinstance(t, RandomStreams) else t.state()
            for name, t in objects.iterators.items()
        }
        self.python = dict(python)
        for name, thing in objects.python.items():
            self.python[name] = as_text(name, thing.state_dict())
        self.copies = {}

    def own_part(self) -> Array:
        """Return what no other replica has: SyncOnRead parts and random streams.

        Not collective.

        Returns
        -------
        ndarray of uint8 of shape (n,)
            Of the same length on every replica.
        """
        parts = [self.arrays[p].reshape(-1).view(np.uint8) for p in self.on_read()]
        parts += [row.reshape(-1).view(np.uint8) for row in self._rows()]
        return np.concatenate(parts) if parts else np.empty(0, np.uint8)

    def unpacked(self, part: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the arrays and the random streams' rows of an `own_part`.

        Not collective.

        Parameters
        ----------
        part : ndarray of uint8
            Of any replica at this step.

        Returns
        -------
        arrays, rows : dict of str to ndarray
            By path, and by name.
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
        """Return the paths of values of which each replica has a part.

        Not collective.

        Returns
        -------
        list of str
            In the same order on every replica.
        """
        return [p for p, e in self.entries.items() if e.synchronization == _on(True)]

    def mirrored(self) -> list[str]:
        """Return the paths of values that are the same on every replica.

        Not collective.

        Returns
        -------
        list of str
            In the same order on every replica.
        """
        return [p for p, e in self.entries.items() if e.synchronization != _on(True)]

    def _rows(self) -> list[Array]:
        states = self.iterators.values()
        return [state["state"] for state in states if "bit_generator" in state]

    def header(self) -> Header:
        """Return what `match_entries` compares with the program.

        Not collective.

        Returns
        -------
        Header
            As of a checkpoint.
        """
        python = {name: from_text(text) for name, text in self.python.items()}
        own = {name: state for name, state in python.items() if name}
        header = Header(self.step, self.num_replicas, dict(self.entries))
        header.iterators, header.python = self.iterators, own
        return header


def _on(read: bool) -> str:
    return "on_read" if read else "on_write"
