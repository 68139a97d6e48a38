"""In-place updates of array rows, with the same semantics on a GPU and on the host."""

from __future__ import annotations

import numpy as np

from hpcstrat.engine.arrays.casting import call_without_fp_warnings
from hpcstrat.engine.arrays.kinds import array_module, is_device, to_device, to_host
from hpcstrat.engine.typing import Array

__all__ = ["apply_at", "replace_at", "summed_rows"]


def summed_rows(indices: Array, values: Array) -> tuple[Array, Array]:
    """Return the unique indices, ascending, and the sum of the rows of each index.

    Rows with the same index are added in their order. Rows on a GPU are summed on the
    host, because CuPy adds in any order, so that the bits would differ from run to run.
    ``numpy.add.at``, which is slow, adds repeated rows only.
    """
    if is_device(values):
        own = summed_rows(to_host(indices), to_host(values))
        return to_device(own[0]), to_device(own[1])
    unique, first, positions = np.unique(
        indices, return_index=True, return_inverse=True
    )
    sums = values[first]
    if unique.size < indices.size:
        again = np.ones(indices.size, bool)
        again[first] = False
        call_without_fp_warnings(np.add.at, sums, positions[again], values[again])
    return unique, sums


def apply_at(name: str, array: Array, indices: Array, values: Array) -> None:
    """Apply a NumPy function to rows in place, once for each time that a row occurs.

    On a GPU, repeated rows are applied in their order, as on the host, so that all
    replicas get the same bits; CuPy's own ``at`` functions do not guarantee that order.
    On a GPU, the function waits for the indices, and makes a pass for each occurrence
    of the most frequent row. All arrays are of one library.
    """
    if not is_device(array):
        call_without_fp_warnings(getattr(np, name).at, array, indices, values)
        return
    rows = to_host(indices)
    order = np.argsort(rows, kind="stable")
    ascending = rows[order]
    # Number of earlier occurrences of each row; the loop makes a pass for each number.
    times = np.arange(rows.size) - np.searchsorted(ascending, ascending)
    operation = getattr(array_module(array), name)
    for time in range(times.max(initial=-1) + 1):
        positions = order[times == time]
        chosen = to_device(rows[positions])
        array[chosen] = operation(array[chosen], values[to_device(positions)])


def replace_at(array: Array, indices: Array, values: Array) -> None:
    """Replace rows in place; if a row has several values, the last one is kept.

    On a GPU, the function waits for the indices. All arrays are of one library.
    """
    if not is_device(array):
        array[indices] = values
        return
    rows = to_host(indices)
    # CuPy does not define which of several writes to one row is the last.
    last = rows.size - 1 - np.unique(rows[::-1], return_index=True)[1]
    array[to_device(rows[last])] = values[to_device(last)]
