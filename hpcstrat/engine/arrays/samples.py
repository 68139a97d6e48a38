"""Hashes of arrays, or of a sample of their rows if the arrays are large."""

from __future__ import annotations

from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from hpcstrat.engine.arrays.kinds import is_half, to_host
from hpcstrat.engine.typing import Array

__all__ = ["digest_of_rows", "has_plain_bytes"]


def has_plain_bytes(array: Array) -> bool:
    """Return whether equal values of the array's dtype have equal bytes.

    Structures and long doubles have undefined bytes between their values; Python
    objects and variable strings have pointers.
    """
    dtype = array.dtype
    plain = dtype.kind in "biufcmMSU" and dtype.char not in "gG"
    return dtype.itemsize > 0 and (plain or is_half(dtype))


def digest_of_rows(
    array: Array, most_bytes: int, most_rows: int | None = None
) -> tuple[int, bool]:
    """Return a hash of an array, and whether all hashed elements are equal.

    The hash covers dtype, shape and all bytes of an array of up to ``most_bytes``. For
    a larger array, it covers evenly spaced rows, among them the first and the last, or
    the beginnings of these rows. `has_plain_bytes` must be true.
    """
    mark = xxh3_64_intdigest(f"{array.dtype}{array.shape}".encode())
    rows, itemsize = len(array), array.dtype.itemsize
    if array.nbytes > most_bytes:
        width = array.size // rows
        count = min(rows, max(2, most_bytes // (width * itemsize)), most_rows or rows)
        keep = min(width, max(1, most_bytes // (count * itemsize)))
        positions = np.unique(np.linspace(0, rows - 1, count).astype(np.int64))
        parts = [
            to_host(array[position].reshape(-1)[:keep])
            for position in positions.tolist()
        ]
        array = np.concatenate(parts)
    own: Array = np.ascontiguousarray(to_host(array)).reshape(-1)
    octets: Any = own.view(np.uint8)
    elements = octets.reshape(own.size, itemsize)
    is_constant = bool((elements == elements[:1]).all())
    return xxh3_64_intdigest(octets, mark), is_constant
