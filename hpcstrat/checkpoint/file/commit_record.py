"""The commit record: the last page of a file, which vouches for all the rest.

It holds the hash of the prefix, which holds the hashes of the blocks, and its own: no
byte of the file is left out. It says where everything is, so that a file is checked
without HDF5.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from hpcstrat.checkpoint.disk.disk import PAGE_BYTES, read_exactly
from hpcstrat.checkpoint.file.extents import RECORD_BYTES, FileLayout, is_block_size
from hpcstrat.checkpoint.file.hashing import (
    ROOT_BYTES,
    block_hash,
    hashes_from,
    root_hash,
    root_hasher,
)
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CorruptCheckpointError

__all__ = ["Vouched", "has_record", "pack_record", "read_vouched"]

_MAGIC = b"hpcstrat-commit\0"
_VERSION = 1
# Magic, version, step, replicas, table_start, data_start, data_end, block size, number
# of blocks, hash of the prefix.
_FIELDS = struct.Struct(f"<16s8Q{ROOT_BYTES}s")
_SELF = struct.Struct("<Q")
# So much of the prefix is in memory at a time: it may be large in a forged file.
_PART_BYTES = 16 << 20
# Twice what `Skeleton` lets structures take; and what rounding to stripes may add.
_MOST_STRUCTURE_BYTES = 1 << 33
_MORE_BYTES = 2 << 20


@dataclass(slots=True)
class Vouched:
    """The contents of a file's commit record; ``plan`` is without extents.

    ``hashes`` are the blocks', uint64, in the machine's order; ``root`` is the
    prefix's.
    """

    step: int
    num_replicas: int
    plan: FileLayout
    hashes: Array
    root: bytes


def pack_record(plan: FileLayout, prefix: bytes, step: int, num_replicas: int) -> bytes:
    """Return the commit record: a page, whose last 8 bytes are the hash of the rest."""
    fields = _FIELDS.pack(
        _MAGIC,
        _VERSION,
        step,
        num_replicas,
        plan.table_start,
        plan.data_start,
        plan.data_end,
        plan.block_bytes,
        plan.num_blocks,
        root_hash(prefix),
    )
    body = fields.ljust(RECORD_BYTES - _SELF.size, b"\0")
    return body + _SELF.pack(block_hash(memoryview(body)))


def has_record(file: int) -> bool:
    """Whether a file ends with something that looks like a commit record.

    Where not, it may be a file of format version 1.
    """
    start = os.fstat(file).st_size - RECORD_BYTES
    return start > 0 and os.pread(file, len(_MAGIC), start) == _MAGIC


def read_vouched(file: int, path: str) -> Vouched:
    """Check all of a file but the data, and return what these are checked with.

    The descriptor is open without O_DIRECT. Raises CorruptCheckpointError where a bit
    of the record, the structures or the hashes is not as it was written, or where the
    file is not as long as it was.
    """
    size = os.fstat(file).st_size
    if size <= RECORD_BYTES:
        raise _damaged(path, f"only {size} bytes")
    record = read_exactly(file, size - RECORD_BYTES, RECORD_BYTES)
    body = memoryview(record)[: -_SELF.size]
    if record[: len(_MAGIC)] != _MAGIC or _SELF.unpack(record[-_SELF.size :]) != (
        block_hash(body),
    ):
        raise _damaged(path, "no whole commit record at its end")
    _, version, step, num_replicas, *places, num_blocks, root = _FIELDS.unpack_from(
        record
    )
    plan = FileLayout(*places)
    # The record's own hash is no proof against forgery: whatever these numbers lead to
    # is bounded here, before anything is read or allocated by them.
    sound = (
        version == _VERSION
        and 0 < plan.table_start <= plan.data_start <= plan.data_end
        and is_block_size(plan.block_bytes)
        and plan.data_start % PAGE_BYTES == 0
        and plan.num_blocks == num_blocks
        and 8 * num_blocks <= plan.data_start - plan.table_start
        # More is never written, and would take long to read.
        and plan.table_start <= _MOST_STRUCTURE_BYTES
        and plan.data_start <= 2 * plan.table_start + 8 * num_blocks + _MORE_BYTES
    )
    if not sound:
        raise _damaged(path, "numbers that do not fit each other in its commit record")
    if plan.size != size:
        raise _damaged(path, f"{size} bytes where its commit record says {plan.size}")
    hasher, table = root_hasher(), bytearray()
    for start in range(0, plan.data_start, _PART_BYTES):
        part = read_exactly(file, start, min(_PART_BYTES, plan.data_start - start))
        hasher.update(part)
        table += memoryview(part)[max(plan.table_start - start, 0) :]
        # Behind the hashes in use there are zeros up to the end of a page.
        del table[8 * num_blocks :]
    if hasher.digest() != root:
        raise _damaged(path, "names, types or hashes that are not as they were written")
    return Vouched(
        step, num_replicas, plan, hashes_from(bytes(table), num_blocks), root
    )


def _damaged(path: str, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"expected a whole checkpoint at {path}, found {found}; restore an older one, "
        "or remove it"
    )
