"""The commit record: the last page of a checkpoint, whose hash covers the whole file.

The record contains the hash of the prefix and its own hash. The prefix contains the
hashes of the data blocks. The record also contains the offsets of all parts, so that a
file can be checked without HDF5.

In a background save, each replica also writes a verdict to the file, behind the place
of the record: whether the replica's part is on the disk. The saving threads cannot call
MPI, so a thread of replica 0 reads the verdicts. When all parts are on the disk, this
thread truncates the file, to remove the verdicts, and renames the file. Each verdict
has its own pages, so that two hosts never write to the same page.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from hpcstrat.checkpoint.disk import PASSING, closing, open_to_read
from hpcstrat.checkpoint.file.extents import RECORD_BYTES, FileLayout, is_block_size
from hpcstrat.checkpoint.file.image import Image
from hpcstrat.engine.file_bytes import PAGE_BYTES, read_exactly, read_into, write_all
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CorruptCheckpointError

__all__ = [
    "ALGORITHM",
    "NONCE_BYTES",
    "Blocks",
    "Vouched",
    "block_hash",
    "has_record",
    "pack_record",
    "read_verdict",
    "read_vouched",
    "room_bytes",
    "write_verdict",
]

# Finds bit rot, torn writes and lost blocks, but no forgery (not cryptographic).
ALGORITHM = "xxh3_64"
_ROOT_BYTES = 16

_MAGIC = b"hpcstrat-commit\0"
_VERSION = 1
# Magic, version, step, replicas, table_start, data_start, data_end, block size, number
# of blocks, hash of the prefix.
_FIELDS = struct.Struct(f"<16s8Q{_ROOT_BYTES}s")
_SELF = struct.Struct("<Q")
# The prefix is read in parts of this size, because a forged prefix may be large.
_PART_BYTES = 16 << 20
# Upper limits for sizes in a record, which may be forged: twice the largest structures
# of a `Skeleton`; and the gaps in a prefix, two stripes.
_MOST_STRUCTURE_BYTES = 1 << 33
_MORE_BYTES = 2 << 20
NONCE_BYTES = 16

_VERDICT_MAGIC = b"hpcsverd"
# Magic, nonce of the save, replica, error number, number of hashes. After this head, a
# verdict has the hashes of the replica's blocks, and the hash of all these bytes.
_VERDICT_HEAD = struct.Struct(f"<8s{NONCE_BYTES}sIIQ")
_VERDICT_TAIL = struct.Struct("<Q")


def block_hash(data: memoryview) -> int:
    """Return the 64-bit XXH3 hash (seed 0) of bytes, without holding Python's lock."""
    return xxhash.xxh3_64_intdigest(data)


@dataclass(slots=True)
class Vouched:
    """The content of a file's commit record, and the hashes of the file's blocks.

    ``plan`` has no extents. ``hashes`` is uint64 in native byte order, one for each
    block. ``root`` is the hash of the prefix.
    """

    step: int
    num_replicas: int
    plan: FileLayout
    hashes: Array
    root: bytes


def pack_record(plan: FileLayout, prefix: bytes, step: int, num_replicas: int) -> bytes:
    """Return the commit record: a page that ends in the hash of its other bytes."""
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
        # The hash in its canonical (big-endian) form.
        xxhash.xxh3_128_digest(prefix),
    )
    body = fields.ljust(RECORD_BYTES - _SELF.size, b"\0")
    return body + _SELF.pack(block_hash(memoryview(body)))


def has_record(file: int) -> bool:
    """Return whether a file seems to end in a commit record; version 1 files do not."""
    start = os.fstat(file).st_size - RECORD_BYTES
    return start > 0 and os.pread(file, len(_MAGIC), start) == _MAGIC


def read_vouched(file: int, path: str) -> Vouched:
    """Check a file except for its data; return the hashes for a check of the data.

    ``file`` is open without O_DIRECT. Raises CorruptCheckpointError if the file's
    length, or a bit outside of the data, has changed.
    """
    size = os.fstat(file).st_size
    if size <= RECORD_BYTES:
        raise _damaged(path, f"only {size} bytes")
    record = read_exactly(file, size - RECORD_BYTES, RECORD_BYTES)
    body = memoryview(record)[: -_SELF.size]
    if record[: len(_MAGIC)] != _MAGIC or _SELF.unpack(record[-_SELF.size :]) != (
        block_hash(body),
    ):
        raise _damaged(path, "no complete commit record at its end")
    _, version, step, num_replicas, *places, num_blocks, root = _FIELDS.unpack_from(
        record
    )
    plan = FileLayout(*places)
    # A forged record can have a correct hash. Check its numbers before they determine
    # how much is read or allocated.
    sound = (
        version == _VERSION
        and 0 < plan.table_start <= plan.data_start <= plan.data_end
        and is_block_size(plan.block_bytes)
        and plan.data_start % PAGE_BYTES == 0
        and plan.num_blocks == num_blocks
        and 8 * num_blocks <= plan.data_start - plan.table_start
        # Saves never write larger structures; a forged size would make reading slow.
        and plan.table_start <= _MOST_STRUCTURE_BYTES
        and plan.data_start <= 2 * plan.table_start + 8 * num_blocks + _MORE_BYTES
    )
    if not sound:
        raise _damaged(path, "inconsistent numbers in its commit record")
    if plan.size != size:
        raise _damaged(path, f"{size} bytes where its commit record says {plan.size}")
    hasher, table = xxhash.xxh3_128(), bytearray()
    for start in range(0, plan.data_start, _PART_BYTES):
        part = read_exactly(file, start, min(_PART_BYTES, plan.data_start - start))
        hasher.update(part)
        table += memoryview(part)[max(plan.table_start - start, 0) :]
        # Drop the zeros that pad the hashes to the end of a page.
        del table[8 * num_blocks :]
    if hasher.digest() != root:
        raise _damaged(
            path, "names, types or hashes that have changed since they were written"
        )
    hashes = np.frombuffer(bytes(table), "<u8", num_blocks).astype(np.uint64)
    return Vouched(step, num_replicas, plan, hashes, root)


def _damaged(path: str, found: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"expected a complete checkpoint at {path}, found {found}; restore an older "
        "one, or remove it"
    )


def _stride(plan: FileLayout, num_replicas: int) -> int:
    most = max(map(len, plan.parts(num_replicas)))
    nbytes = _VERDICT_HEAD.size + 8 * most + _VERDICT_TAIL.size
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def room_bytes(plan: FileLayout, num_replicas: int) -> int:
    """Return the size in bytes of all replicas' verdicts, which follow the record."""
    return _stride(plan, num_replicas) * num_replicas


def write_verdict(
    path: str, plan: FileLayout, place: tuple[int, int], nonce: bytes, part: int | Array
) -> None:
    """Write this replica's verdict (whether its part is on the disk) to the file.

    ``place`` is this replica's number and the number of replicas. ``nonce`` identifies
    the save. ``part`` is an error number (errno) if writing has failed, or else the
    hashes of the replica's blocks.
    """
    failed = isinstance(part, int)
    hashes = b"" if failed else np.asarray(part).astype("<u8").tobytes()
    code = int(part) if isinstance(part, int) else 0
    head = _VERDICT_HEAD.pack(_VERDICT_MAGIC, nonce, place[0], code, len(hashes) // 8)
    said = head + hashes
    said += _VERDICT_TAIL.pack(block_hash(memoryview(said)))
    with closing(os.open(path, os.O_WRONLY | os.O_CLOEXEC)) as file:
        offset = plan.size + place[0] * _stride(plan, place[1])
        write_all(file, memoryview(said), offset)
        # After fsync, other hosts can read the verdict.
        os.fsync(file)


def read_verdict(
    path: str, plan: FileLayout, place: tuple[int, int], nonce: bytes
) -> int | Array | None:
    """Return the ``part`` in a replica's verdict, or None if there is none yet."""
    rank, size = place
    count = len(plan.parts(size)[rank])
    most = _VERDICT_HEAD.size + 8 * count + _VERDICT_TAIL.size
    # Open the file anew, so that a network file system asks its server for changes.
    with closing(open_to_read(path, False)) as file:
        said = os.pread(file, most, plan.size + rank * _stride(plan, size))
    if len(said) < _VERDICT_HEAD.size + _VERDICT_TAIL.size:
        return None
    magic, which, whose, code, found = _VERDICT_HEAD.unpack_from(said)
    # The bytes may be a verdict of another save.
    if (magic, which, whose) != (_VERDICT_MAGIC, nonce, rank) or found > count:
        return None
    end = _VERDICT_HEAD.size + 8 * found
    tail = said[end : end + _VERDICT_TAIL.size]
    if tail != _VERDICT_TAIL.pack(block_hash(memoryview(said)[:end])):
        # Only a part of the verdict is visible yet; the caller will call again.
        return None
    if code:
        return int(code)
    return np.frombuffer(said, "<u8", found, _VERDICT_HEAD.size).astype(np.uint64)


class Blocks(contextlib.AbstractContextManager["Blocks"]):
    """Reads and checks the data of a file; ``direct`` bypasses the page cache.

    Several threads may call `read` at the same time, each with its own slot; `part` may
    be called by only one thread at a time.
    """

    def __init__(self, path: str, vouched: Vouched, direct: bool) -> None:
        self.path = path
        self.vouched = vouched
        self._file = open_to_read(path, direct)
        # `part` keeps its last block here: the next call mostly needs the same block.
        self._image: Image | None = None
        self._kept = -1

    def read(self, block: int, slot: Array) -> Array:
        """Read a block into a slot, check its hash, and return a view of the block.

        Raises CorruptCheckpointError for damage, or OSError if a retry may succeed.
        """
        start, stop = self.vouched.plan.span(block)
        data = slot[: stop - start]
        try:
            read_into(self._file, data.data, start)
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                raise
            raise CorruptCheckpointError(
                f"expected readable data in {self.path}, found: {error}; restore an "
                "older checkpoint"
            ) from error
        if block_hash(data.data) != int(self.vouched.hashes[block]):
            raise CorruptCheckpointError(
                f"expected the data of {self.path} as they were written, found that "
                f"bytes {start} to {stop} have changed; restore an older checkpoint"
            )
        return data

    def part(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``, after checking their blocks."""
        plan, found = self.vouched.plan, bytearray()
        if self._image is None:
            self._image = Image(1, plan.block_bytes)
        slot = self._image.slot(0)
        for block in plan.blocks_of(start, stop):
            begin, end = plan.span(block)
            if self._kept != block:
                # Forget the kept block, because a failed read may overwrite its slot.
                self._kept = -1
                self.read(block, slot)
                self._kept = block
            found += slot[max(start, begin) - begin : min(stop, end) - begin].data
        return bytes(found)

    def close(self) -> None:
        # Ignore an error of close(), because each read has reported its own errors.
        with contextlib.suppress(OSError):
            os.close(self._file)

    def __exit__(self, *_: object) -> None:
        self.close()
