"""Hashes that find damaged bytes: xxh3, at the speed of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from hpcstrat.typing import Array

__all__ = [
    "ALGORITHM",
    "ROOT_BYTES",
    "block_hash",
    "hashes_from",
    "root_hash",
    "root_hasher",
]

ALGORITHM = "xxh3_64"
ROOT_BYTES = 16


def block_hash(data: memoryview) -> int:
    """Return the hash of a block of a file.

    Not collective. Lets other threads run meanwhile.

    Parameters
    ----------
    data : memoryview of bytes
        Contiguous.

    Returns
    -------
    int
        XXH3 of 64 bits, seed 0.
    """
    return xxhash.xxh3_64_intdigest(data)


def root_hasher() -> Any:
    """Return what makes a `root_hash` of many parts, by ``update`` and ``digest``.

    Not collective.

    Returns
    -------
    object
        Of the library of hashes.
    """
    return xxhash.xxh3_128()


def root_hash(data: bytes | memoryview) -> bytes:
    """Return the hash over names, types, places and the hashes of all blocks.

    Not collective.

    Parameters
    ----------
    data : bytes or memoryview
        All that comes before the values in the file.

    Returns
    -------
    bytes of length 16
        XXH3 of 128 bits, seed 0, big-endian (its canonical form).
    """
    return xxhash.xxh3_128_digest(data)


def hashes_from(table: bytes | memoryview, num_blocks: int) -> Array:
    """Return the hashes that a table holds.

    Not collective.

    Parameters
    ----------
    table : bytes or memoryview
        Little-endian words; longer than needed.
    num_blocks : int
        How many are in use.

    Returns
    -------
    ndarray of uint64 of shape (num_blocks,)
        A copy.
    """
    return np.frombuffer(table, "<u8", num_blocks).astype(np.uint64)
