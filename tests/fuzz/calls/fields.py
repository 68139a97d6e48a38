"""Calls of `FieldMoves`, which move parts of fields, with their results by NumPy."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from tests.fuzz.calls.arrays import (
    NUMBERS,
    TYPES,
    Array,
    Key,
    contents,
    formed,
    numbers,
)
from tests.fuzz.calls.domain import Domain, Recipe, compare
from tests.whole_fields import adjoint_of_halo, halo_of, lengths_of_part, parts_of

__all__ = ["FIELDS"]

# Lengths of the other axes, and of one rank's rows.
_OTHERS, _ROWS = (0, 1, 2, 3, 16, 200), (0, 1, 2, 3, 10, 300)


class _Field(Recipe):
    """A field of which each rank has some rows along an axis."""

    types = TYPES

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None:
        self.domain, self.dtype = domain, style.choice(self.types)
        self.memory = style.getrandbits(40)
        self.axis, self.other = style.sample(range(2), 2)
        self.shape = [0, 0, style.choice((1, 2))]
        self.shape[self.other] = style.choice(_OTHERS)
        most = style.choice((1, 2, 2, 50))
        self.width = style.randint(0, most), style.randint(0, most)
        self.periodic = style.random() < 0.4
        self.lengths = [lengths.choice(_ROWS) for _ in domain.ranks]
        if lengths.random() < 0.5:
            self.lengths = [lengths.choice(_ROWS)] * domain.size
        if self.periodic:
            # The halo must not be wider than the field.
            self.lengths[0] += max(0, max(self.width) - sum(self.lengths))
        self.shape[self.axis] = sum(self.lengths)

    def __str__(self) -> str:
        return (
            f"{type(self).__name__} of {self.dtype}{self.shape}, axis {self.axis}, "
            f"lengths {self.lengths}, width {self.width}, periodic {self.periodic}"
        )

    def _whole(self, key: Key) -> Array:
        values = contents(self.dtype, math.prod(self.shape), key)
        return values.reshape(self.shape)

    def _given(self, array: Array) -> Array:
        return formed(Random(self.memory + self.domain.rank), array)

    def _move(self, name: str, array: Array) -> Any:
        call = getattr(self.domain.strategy.collectives.fields, name)
        return call(array, self.axis, self.width, periodic=self.periodic)


class Halo(_Field):
    """Each rank's rows between those of its neighbors."""

    def go(self, key: Key) -> None:
        whole, rank = self._whole(key), self.domain.rank
        own = self._given(parts_of(whole, self.axis, self.lengths)[rank])
        given = self.axis, self.lengths, rank, self.width
        wanted = halo_of(whole, *given, periodic=self.periodic)
        compare(self._move("halo", own), wanted, "the halo")


class HaloAdjoint(_Field):
    """The sums of all copies of each rank's rows."""

    types = NUMBERS

    def go(self, key: Key) -> None:
        pads = []
        for rank, length in enumerate(self.lengths):
            shape = list(self.shape)
            shape[self.axis] = length + sum(self.width)
            values = numbers(self.dtype, math.prod(shape), (*key, rank))
            pads.append(values.reshape(shape))
        rank, periodic = self.domain.rank, self.periodic
        given = pads, self.axis, rank, self.width
        wanted = adjoint_of_halo(*given, periodic=periodic)
        found = self._move("halo_adjoint", self._given(pads[rank]))
        compare(found, wanted, "the adjoint of a halo")


class Transpose(_Field):
    """A field that is divided along another axis than before."""

    def go(self, key: Key) -> None:
        whole, rank, size = self._whole(key), self.domain.rank, self.domain.size
        own, wanted = (
            parts_of(whole, axis, lengths_of_part(self.shape[axis], size))[rank]
            for axis in (self.axis, self.other)
        )
        call = self.domain.strategy.collectives.fields.transpose
        found = call(self._given(own), self.axis, self.other)
        compare(found, wanted, "the transpose")


FIELDS: list[type[Any]] = [Halo, HaloAdjoint, Transpose]
"""The kinds of calls of `FieldMoves`."""
