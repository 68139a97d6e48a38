"""The function ``embedding_lookup``, which reads rows of embedding tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from hpcstrat.engine.typing import Array
from hpcstrat.parameter_server.server_variables import ServerVariable
from hpcstrat.variables import Variable


def embedding_lookup(table: Variable, ids: Any) -> Array:
    """Return some rows of a table; servers send only these rows.

    Not collective.

    Parameters
    ----------
    table : Variable of shape (rows, ...)
        A variable on parameter servers, or any other variable.
    ids : array_like of int of any shape
        Numbers of the rows. If a number is repeated, a server on another node sends the
        row only once.

    Returns
    -------
    ndarray of shape (..., ...)
        A new array; its shape is the shape of ``ids`` followed by the shape of a row.
        Rows of one shard are read together, between two updates of the shard.

    Raises
    ------
    ValueError
        If ``ids`` are not integers, or out of range.
    """
    indices = np.asarray(ids)
    if not indices.size:
        # NumPy makes an array of floats from an empty list.
        indices = indices.astype(np.int64)
    if indices.dtype.kind not in "iu":
        raise ValueError(f"expected integers as ids, found {indices.dtype}; cast them")
    flat = indices.reshape(-1)
    if isinstance(table, ServerVariable):
        rows = table.read_rows(flat)
    else:
        length = table.shape[0] if table.shape else 0
        if flat.size and (flat.min() < 0 or flat.max() >= length):
            raise ValueError(
                f"expected ids from 0 to {length - 1} for variable {table.name!r}, "
                f"found {flat.min()} to {flat.max()}; check them"
            )
        rows = table.value()[flat]
    return rows.reshape(*indices.shape, *rows.shape[1:])
