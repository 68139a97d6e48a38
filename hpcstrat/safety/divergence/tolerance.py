"""Comparison of replicas' copies of variables, which may differ by rounding errors.

The values are compared by allreduces, piece by piece, so that buffers are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hpcstrat.engine.arrays.kinds import is_half, to_host
from hpcstrat.engine.typing import Array
from hpcstrat.errors import DivergenceError
from hpcstrat.safety.divergence.first_difference import (
    ADVICE,
    REPLICAS,
    Copy,
    Names,
    compare_bits,
    index_of,
    most_common,
)

__all__ = ["compare"]

# Number of real numbers in a piece; each needs four float64 in buffers.
_PIECE = 1 << 15


def compare(
    comm: Any, copies: Sequence[Copy], tolerance: float, names: Names = REPLICAS
) -> DivergenceError | None:
    """Compare arrays between ranks; return the same error on all ranks, or None.

    Collective over ``comm``; ``copies`` has the same variables in the same order on
    every rank. Bits are compared if ``tolerance`` is 0, and for arrays that are not of
    floating type. In floating arrays, the copies of an element may differ by
    ``tolerance`` times the largest absolute value in all copies of the array. NaN and
    infinities must be in the same places.
    """
    if not tolerance:
        return compare_bits(comm, copies, names)
    others = [c for c in copies if not _is_floating(c.array)]
    error = compare_bits(comm, others, names)
    if error is not None:
        return error
    from mpi4py import MPI

    floating = [c for c in copies if _is_floating(c.array)]
    # Use the largest value of all ranks, so that all ranks allow the same difference.
    largest = np.array([_largest(_reals(c.array)) for c in floating])
    comm.Allreduce(MPI.IN_PLACE, largest, op=MPI.MAX)
    for copy, scale in zip(floating, largest, strict=True):
        error = _compare_values(comm, copy, tolerance * float(scale), names)
        if error is not None:
            return error
    return None


def _is_floating(array: Array) -> bool:
    return array.dtype.kind in "fc" or is_half(array.dtype)


def _reals(array: Array) -> Array:
    flat = np.ascontiguousarray(to_host(array)).reshape(-1)
    return flat.view(flat.real.dtype) if flat.dtype.kind == "c" else flat


def _largest(reals: Array) -> float:
    largest = 0.0
    for start in range(0, reals.size, _PIECE):
        piece, _ = _split(reals[start : start + _PIECE])
        largest = max(largest, float(np.abs(piece).max()))
    return largest


def _split(piece: Array) -> tuple[Array, Array]:
    """Return the values with 0 for NaN and infinities, and a code for each of these."""
    with np.errstate(over="ignore"):
        values = piece.astype(np.float64)
    kinds = np.zeros(values.shape)
    kinds[values == np.inf] = 1
    kinds[values == -np.inf] = 2
    kinds[np.isnan(values)] = 3
    values[kinds > 0] = 0
    return values, kinds


def _compare_values(
    comm: Any, copy: Copy, allowed: float, names: Names
) -> DivergenceError | None:
    from mpi4py import MPI

    reals = _reals(copy.array)
    for start in range(0, reals.size, _PIECE):
        values, kinds = _split(reals[start : start + _PIECE])
        # The maximum of negated values is the negated minimum: one allreduce suffices.
        extremes = np.stack([values, -values, kinds, -kinds])
        comm.Allreduce(MPI.IN_PLACE, extremes, op=MPI.MAX)
        bad = extremes[2] != -extremes[3]
        bad |= extremes[0] + extremes[1] > allowed
        if bad.any():
            place = start + int(np.argmax(bad))
            return _error(comm, copy, place, allowed, names)
    return None


def _error(
    comm: Any, copy: Copy, place: int, allowed: float, names: Names
) -> DivergenceError:
    """Return an error that names ranks whose value at ``place`` differs too much."""
    reals = _reals(copy.array)
    found = np.array(comm.allgather(float(reals[place])))
    if np.isfinite(found).all():
        # As the reference, use the copy that has the most other copies close to it.
        order = np.sort(found)
        near = np.searchsorted(order, found + allowed, "right")
        near -= np.searchsorted(order, found - allowed, "left")
        reference = int(np.argmax(near))
        ranks = np.flatnonzero(np.abs(found - found[reference]) > allowed).tolist()
    else:
        reference, ranks = most_common([str(value) for value in found])
    element = index_of(place * copy.array.size // reals.size, copy.array.shape)
    return DivergenceError(
        f"expected copies of variable {copy.name!r} that differ by at most "
        f"{allowed:.3g} on {names.every}, found {names.names(ranks)} farther from "
        f"{names.name(reference)}, first in element {element}: {found[ranks[0]]} on "
        f"{names.name(ranks[0])}, {found[reference]} on {names.name(reference)}; "
        f"{ADVICE}",
        [names.number(rank) for rank in ranks],
        variable=copy.name,
        element=element,
    )
