"""Rows of arrays written in place, the same way on a GPU as in host memory."""

from __future__ import annotations

import numpy as np

from hpcstrat.engine.arrays.casting import call_without_fp_warnings
from hpcstrat.engine.arrays.kinds import array_module, is_device, to_device, to_host
from hpcstrat.engine.typing import Array

__all__ = ["apply_at", "replace_at", "summed_rows"]


def summed_rows(indices: Array, values: Array) -> tuple[Array, Array]:
    """Add up the rows that come several times, in their order; fresh, and ascending.

    Rows on a GPU go through host memory: CuPy adds them in any order, with other bits
    each time. NumPy's addition at indices is slow, so that only repeated rows take it.
    """
    if is_device(values):
        own = summed_rows(to_host(indices), to_host(values))
        return to_device(own[0]), to_device(own[1])
    unique, first, places = np.unique(indices, return_index=True, return_inverse=True)
    sums = values[first]
    if unique.size < indices.size:
        again = np.ones(indices.size, bool)
        again[first] = False
        call_without_fp_warnings(np.add.at, sums, places[again], values[again])
    return unique, sums


def apply_at(name: str, array: Array, indices: Array, values: Array) -> None:
    """Apply a function of NumPy to rows in place; several times to rows that recur.

    On a GPU in the order of the rows, as in host memory, so that all replicas get the
    same bits, which CuPy's own form does not give; waits for the indices, and takes a
    step for each time that the most frequent row comes. All arrays are of one library.
    """
    if not is_device(array):
        call_without_fp_warnings(getattr(np, name).at, array, indices, values)
        return
    rows = to_host(indices)
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    # Number of times that each row has come before: one round for each.
    times = np.arange(rows.size) - np.searchsorted(ascending, ascending)
    operation = getattr(array_module(array), name)
    for time in range(times.max(initial=-1) + 1):
        places = order[times == time]
        chosen = to_device(rows[places])
        array[chosen] = operation(array[chosen], values[to_device(places)])


def replace_at(array: Array, indices: Array, values: Array) -> None:
    """Replace rows in place; the last of several values of a row counts.

    On a GPU it waits for the indices. All arrays are of one library.
    """
    if not is_device(array):
        array[indices] = values
        return
    rows = to_host(indices)
    # CuPy leaves open which of several writes to one row is the last.
    last = rows.size - 1 - np.unique(rows[::-1], return_index=True)[1]
    array[to_device(rows[last])] = values[to_device(last)]
