"""Each replica's verdict on its part, in the file behind the commit record.

The threads that save in the background make no MPI call, so that replica 0 learns
through the file itself that all parts are on the disk. It cuts the file to its size
before it gives it its name. Each replica has pages of its own: no two hosts write into
one.
"""

from __future__ import annotations

import os
import struct

import numpy as np

from hpcstrat.checkpoint.disk.disk import PAGE_BYTES, open_to_read, write_all
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.hashing import block_hash
from hpcstrat.engine.typing import Array

__all__ = ["NONCE_BYTES", "read_verdict", "room_bytes", "write_verdict"]

NONCE_BYTES = 16

_MAGIC = b"hpcsverd"
# Magic, which save, replica, error number, number of hashes; then the hashes, and the
# hash of all that.
_HEAD = struct.Struct(f"<8s{NONCE_BYTES}sIIQ")
_TAIL = struct.Struct("<Q")


def _stride(plan: FileLayout, num_replicas: int) -> int:
    most = max(map(len, plan.parts(num_replicas)))
    nbytes = _HEAD.size + 8 * most + _TAIL.size
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
    head = _HEAD.pack(_MAGIC, nonce, place[0], code, len(hashes) // 8)
    said = head + hashes
    said += _TAIL.pack(block_hash(memoryview(said)))
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
        said = os.pread(file, _HEAD.size + 8 * count + _TAIL.size, offset)
    finally:
        os.close(file)
    if len(said) < _HEAD.size + _TAIL.size:
        return None
    magic, which, whose, code, found = _HEAD.unpack_from(said)
    # A verdict that another save has left there says nothing of this one.
    if (magic, which, whose) != (_MAGIC, nonce, rank) or found > count:
        return None
    end = _HEAD.size + 8 * found
    tail = said[end : end + _TAIL.size]
    if tail != _TAIL.pack(block_hash(memoryview(said)[:end])):
        # Half of it has arrived; the rest comes with one of the next looks.
        return None
    if code:
        return int(code)
    return np.frombuffer(said, "<u8", found, _HEAD.size).astype(np.uint64)
