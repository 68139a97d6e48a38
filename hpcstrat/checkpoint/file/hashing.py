"""Hashes that find damaged bytes: xxh3, at the speed of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from hpcstrat.engine.typing import Array

__all__ = [
    "ALGORITHM",
    "ROOT_BYTES",
    "block_hash",
    "hashes_from",
    "root_hash",
    "root_hasher",
]

# Not cryptographic: against bit rot, torn writes and lost blocks, not against forgery.
ALGORITHM = "xxh3_64"
ROOT_BYTES = 16


def block_hash(data: memoryview) -> int:
    """Return XXH3 of 64 bits, seed 0, of contiguous bytes; other threads may run."""
    return xxhash.xxh3_64_intdigest(data)


def root_hasher() -> Any:
    """Return what makes a `root_hash` of many parts, by ``update`` and ``digest``."""
    return xxhash.xxh3_128()


def root_hash(data: bytes | memoryview) -> bytes:
    """Return the hash over names, types, places and the hashes of all blocks.

    XXH3 of 128 bits, seed 0, big-endian, which is its canonical form.
    """
    return xxhash.xxh3_128_digest(data)


def hashes_from(table: bytes | memoryview, num_blocks: int) -> Array:
    """Return the hashes that a table of little-endian words begins with; a copy."""
    return np.frombuffer(table, "<u8", num_blocks).astype(np.uint64)
