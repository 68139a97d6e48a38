"""Halos, transposes and adjoints of whole fields, in NumPy, in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["adjoint_of_halo", "halo_of", "lengths_of_part", "parts_of"]

Array = np.ndarray[Any, Any]


def lengths_of_part(length: int, count: int) -> list[int]:
    """Return the lengths of the parts of ``length`` rows."""
    return [(r + 1) * length // count - r * length // count for r in range(count)]


def parts_of(whole: Array, axis: int, lengths: Sequence[int]) -> list[Array]:
    """Divide an array along an axis."""
    return np.split(whole, np.cumsum(lengths)[:-1], axis)


def _rows(
    lengths: Sequence[int], position: int, width: tuple[int, int], periodic: bool
) -> tuple[Array, Array]:
    """Return the rows of the field in a padded array, and whether they exist."""
    start, whole = sum(lengths[:position]), sum(lengths)
    rows = np.arange(start - width[0], start + lengths[position] + width[1])
    exist = np.full(rows.shape, True) if periodic else (rows >= 0) & (rows < whole)
    return (rows % whole if whole else rows * 0), exist


def halo_of(
    whole: Array,
    axis: int,
    lengths: Sequence[int],
    position: int,
    width: tuple[int, int],
    *,
    periodic: bool,
) -> Array:
    """Return the padded array of a position."""
    rows, exist = _rows(lengths, position, width, periodic)
    moved = np.moveaxis(whole, axis, 0)
    found = np.zeros((len(rows), *moved.shape[1:]), whole.dtype)
    found[exist] = moved[rows[exist]]
    return np.ascontiguousarray(np.moveaxis(found, 0, axis))


def adjoint_of_halo(
    pads: Sequence[Array],
    axis: int,
    position: int,
    width: tuple[int, int],
    *,
    periodic: bool,
) -> Array:
    """Return the adjoint at a position; ``pads`` are the padded arrays of all.

    The terms of each element are added in the order that `FieldMoves` promises.
    """
    lengths = [array.shape[axis] - sum(width) for array in pads]
    start, length = sum(lengths[:position]), lengths[position]
    moved = [np.moveaxis(array, axis, 0) for array in pads]
    found = moved[position][width[0] : width[0] + length].copy()
    others = sorted(range(len(pads)), key=lambda p: (abs(p - position), p))
    for other in others:
        rows, exist = _rows(lengths, other, width, periodic)
        for i in (*range(width[0]), *range(width[0] + lengths[other], len(rows))):
            if exist[i] and start <= rows[i] < start + length:
                found[rows[i] - start] += moved[other][i]
    return np.ascontiguousarray(np.moveaxis(found, 0, axis))
