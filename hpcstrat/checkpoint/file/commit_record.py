"""The commit record: the last page of a file, which vouches for all the rest.

It holds the hash of the prefix, which holds the hashes of the blocks, and its own: no
byte of the file is left out. It says where everything is, so that a file is checked
without HDF5.

While a save in the background writes the file, each replica's verdict on its part
stands behind the record: the threads make no MPI call, so that replica 0 learns through
the file itself that all parts are on the disk. It cuts the file to its size before it
gives it its name. Each replica has pages of its own: no two hosts write into one.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from hpcstrat.checkpoint.disk import (
    PAGE_BYTES,
    open_to_read,
    read_exactly,
    write_all,
)
from hpcstrat.checkpoint.file.extents import RECORD_BYTES, FileLayout, is_block_size
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CorruptCheckpointError

__all__ = [
    "ALGORITHM",
    "NONCE_BYTES",
    "Vouched",
    "block_hash",
    "has_record",
    "pack_record",
    "read_verdict",
    "read_vouched",
    "room_bytes",
    "write_verdict",
]

# Not cryptographic: against bit rot, torn writes and lost blocks, not against forgery.
ALGORITHM = "xxh3_64"
_ROOT_BYTES = 16

_MAGIC = b"hpcstrat-commit\0"
_VERSION = 1
# Magic, version, step, replicas, table_start, data_start, data_end, block size, number
# of blocks, hash of the prefix.
_FIELDS = struct.Struct(f"<16s8Q{_ROOT_BYTES}s")
_SELF = struct.Struct("<Q")
# So much of the prefix is in memory at a time: it may be large in a forged file.
_PART_BYTES = 16 << 20
# Twice what `Skeleton` lets structures take; and what rounding to stripes may add.
_MOST_STRUCTURE_BYTES = 1 << 33
_MORE_BYTES = 2 << 20
NONCE_BYTES = 16

_VERDICT_MAGIC = b"hpcsverd"
# Magic, which save, replica, error number, number of hashes; then the hashes, and the
# hash of all that.
_VERDICT_HEAD = struct.Struct(f"<8s{NONCE_BYTES}sIIQ")
_VERDICT_TAIL = struct.Struct("<Q")


def block_hash(data: memoryview) -> int:
    """Return XXH3 of 64 bits, seed 0, of contiguous bytes; other threads may run."""
    return xxhash.xxh3_64_intdigest(data)


def _root_hasher() -> Any:
    """Return what makes a `_root_hash` of many parts, by ``update`` and ``digest``."""
    return xxhash.xxh3_128()


def _root_hash(data: bytes | memoryview) -> bytes:
    """Return the hash over names, types, places and the hashes of all blocks.

    XXH3 of 128 bits, seed 0, big-endian, which is its canonical form.
    """
    return xxhash.xxh3_128_digest(data)


def _hashes_from(table: bytes | memoryview, num_blocks: int) -> Array:
    """Return the hashes that a table of little-endian words begins with; a copy."""
    return np.frombuffer(table, "<u8", num_blocks).astype(np.uint64)


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
        _root_hash(prefix),
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
    hasher, table = _root_hasher(), bytearray()
    for start in range(0, plan.data_start, _PART_BYTES):
        part = read_exactly(file, start, min(_PART_BYTES, plan.data_start - start))
        hasher.update(part)
        table += memoryview(part)[max(plan.table_start - start, 0) :]
        # Behind the hashes in use there are zeros up to the end of a page.
        del table[8 * num_blocks :]
    if hasher.digest() != root:
        raise _damaged(path, "names, types or hashes that are not as they were written")
    return Vouched(
        step, num_replicas, plan, _hashes_from(bytes(table), num_blocks), root
    )


def _damaged(path: str, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"expected a whole checkpoint at {path}, found {found}; restore an older one, "
        "or remove it"
    )


def _stride(plan: FileLayout, num_replicas: int) -> int:
    most = max(map(len, plan.parts(num_replicas)))
    nbytes = _VERDICT_HEAD.size + 8 * most + _VERDICT_TAIL.size
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def room_bytes(plan: FileLayout, num_replicas: int) -> int:
    """Return how many bytes the file is longer until all verdicts are in."""
    return _stride(plan, num_replicas) * num_replicas


def write_verdict(
    path: str, plan: FileLayout, place: tuple[int, int], nonce: bytes, part: int | Array
) -> None:
    """Say that this replica's part is on the disk, or why it is not.

    ``place`` is this replica, and how many there are; ``nonce`` says which save;
    ``part`` is the number of an error, or the hashes of the replica's blocks.
    """
    failed = isinstance(part, int)
    hashes = b"" if failed else np.asarray(part).astype("<u8").tobytes()
    code = int(part) if isinstance(part, int) else 0
    head = _VERDICT_HEAD.pack(_VERDICT_MAGIC, nonce, place[0], code, len(hashes) // 8)
    said = head + hashes
    said += _VERDICT_TAIL.pack(block_hash(memoryview(said)))
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        offset = plan.size + place[0] * _stride(plan, place[1])
        write_all(file, memoryview(said), offset)
        # On network file systems, others see it from here on.
        os.fsync(file)
    finally:
        os.close(file)


def read_verdict(
    path: str, plan: FileLayout, place: tuple[int, int], nonce: bytes
) -> int | Array | None:
    """Return what a replica has said, as `write_verdict` took it; None before that."""
    rank, size = place
    count = len(plan.parts(size)[rank])
    # Opened anew, network file systems look at the server.
    file = open_to_read(path, False)
    try:
        offset = plan.size + rank * _stride(plan, size)
        said = os.pread(
            file, _VERDICT_HEAD.size + 8 * count + _VERDICT_TAIL.size, offset
        )
    finally:
        os.close(file)
    if len(said) < _VERDICT_HEAD.size + _VERDICT_TAIL.size:
        return None
    magic, which, whose, code, found = _VERDICT_HEAD.unpack_from(said)
    # A verdict that another save has left there says nothing of this one.
    if (magic, which, whose) != (_VERDICT_MAGIC, nonce, rank) or found > count:
        return None
    end = _VERDICT_HEAD.size + 8 * found
    tail = said[end : end + _VERDICT_TAIL.size]
    if tail != _VERDICT_TAIL.pack(block_hash(memoryview(said)[:end])):
        # Half of it has arrived; the rest comes with one of the next looks.
        return None
    if code:
        return int(code)
    return np.frombuffer(said, "<u8", found, _VERDICT_HEAD.size).astype(np.uint64)
