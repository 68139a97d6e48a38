"""Variables that the ranks of a replica divide; each rank stores its own part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.indexed_slices import IndexedSlices
from hpcstrat.engine.arrays.kinds import to_host
from hpcstrat.engine.typing import Array
from hpcstrat.variables.replicated import MirroredVariable

__all__ = ["DividedVariable", "Split", "parse_split"]

# Advice for ranks of a replica that have the same part of an array, on a grid.
_ADVICE = (
    "give the ranks with the same part the same values: sum along the axis of the "
    "replica that does not divide the variable, for example"
)

Split = tuple[tuple[int, str | int | None], ...]
"""The divided axes of an array, each with the replica's axis that divides it.

None stands for all ranks of the replica. If the position of a rank is given instead,
this rank has all rows of the axis, and the others have none.
"""


class DividedVariable(MirroredVariable):
    """A variable of which each rank of a replica has a part.

    The parts at one position of all replicas are kept equal, as the copies of a
    mirrored variable are. ``value`` and ``shape`` are those of this rank's part.

    Attributes
    ----------
    split : tuple of (int, str, int or None)
        The divided axes, each with the axis of the replica that divides it, or with the
        position of the rank that has all of it.
    whole_shape : tuple of int
        The shape of the value of which the ranks have parts.
    """

    split: Split
    whole_shape: tuple[int, ...]

    def _initialize(self, initial_value: Any, dtype: Any) -> Array:
        inside, make = self._strategy.inside, super()._initialize

        def made() -> Array:
            with inside.divided():
                own = make(initial_value, dtype)
            given = self._given_split
            self.split = parse_split(given, inside.shape, own.ndim, self.name)
            if any(isinstance(p, int) and p != inside.position for _, p in self.split):
                # Another rank keeps the value. A view would keep it in memory.
                own = own[:0].copy()
            self.whole_shape = inside.whole_shape(own.shape, self.split)
            self._require_equal_parts("creation", own)
            return own

        # An error on one rank is raised on all ranks of its replica.
        what = f"creation of divided variable {self.name!r}"
        own: Array = inside.collectives.call(what, made)
        return own

    def _require_equal_parts(self, what: str, value: Any) -> None:
        """Raise CollectiveError if ranks with the same part have other values of it."""
        inside = self._strategy.inside
        if inside.has_copies(self.split):
            what, value = f"{what} of variable {self.name!r}", [value]
            inside.require_whole(what, value, splits=[self.split], advice=_ADVICE)

    def _update(self, method: str, value: Any, read_value: bool) -> Any:
        if self._mode() != "update":
            own = self._strategy.local_value(value)
            self._require_equal_parts(method, own)
        with self._strategy.inside.divided():
            return super()._update(method, value, read_value)

    def _scatter(self, method: str, rows: IndexedSlices) -> Any:
        if self._mode() != "update":
            self._require_equal_parts(method, rows)
        with self._strategy.inside.divided():
            return super()._scatter(method, rows)

    def numpy(self) -> Array:
        """Return the whole value as a NumPy array.

        Collective over the ranks of the replica.

        Returns
        -------
        numpy.ndarray
            A new array of shape ``whole_shape``.
        """
        own = np.ascontiguousarray(to_host(self.value()))
        inside = self._strategy.inside
        whole: Array = inside.assembled(own, self.whole_shape, self.split)
        return whole


def parse_split(split: Any, shape: Mapping[str, int], ndim: int, name: str) -> Split:
    """Return the divided axes of a variable, from its argument ``split``.

    ``split`` may also be the result of this function. Raises TypeError or ValueError
    for a wrong argument.
    """
    pairs = list(split) if isinstance(split, tuple) else [(split, None)]
    if isinstance(split, Mapping):
        pairs = [(axis, along) for along, axis in split.items()]
    for axis, along in pairs:
        if not isinstance(axis, (int, np.integer)) or isinstance(axis, bool):
            raise TypeError(
                f"expected an integer as split of variable {name!r}, or a dict from "
                f"the axes of the replica to integers, found {split!r}; change it"
            )
        if isinstance(along, int) and not ndim:
            raise ValueError(
                f"expected a variable with dimensions on one position, found {name!r}, "
                "a number; give it the shape (1,)"
            )
        if not 0 <= axis < ndim:
            raise ValueError(
                f"expected 0 <= split < {ndim}, the dimensions of variable {name!r}, "
                f"found {axis}; change it"
            )
        if isinstance(along, str) and along not in shape:
            raise ValueError(
                f"expected axes of the replica, {dict(shape)}, in split of variable "
                f"{name!r}, found {along!r}; change it"
            )
        size = math.prod(shape.values())
        if isinstance(along, int) and not 0 <= along < size:
            raise ValueError(
                f"expected a position from 0 to {size - 1} as on of variable {name!r}, "
                f"found {along}; change it"
            )
    axes = [axis for axis, _ in pairs]
    if len(set(axes)) < len(axes):
        raise ValueError(
            f"expected different axes in split of variable {name!r}, found {split!r}; "
            "name each axis once"
        )
    return tuple((int(axis), along) for axis, along in pairs)
