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

import contextlib
import os
import struct
from dataclasses import dataclass

import numpy as np
import xxhash

from hpcstrat.checkpoint.disk import (
    PAGE_BYTES,
    PASSING,
    closing,
    open_to_read,
    read_exactly,
    read_into,
    write_all,
)
from hpcstrat.checkpoint.file.extents import RECORD_BYTES, FileLayout, is_block_size
from hpcstrat.checkpoint.file.image import Image
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

# Not cryptographic: it finds bit rot, torn writes and lost blocks, but no forgery.
ALGORITHM = "xxh3_64"
_ROOT_BYTES = 16

_MAGIC = b"hpcstrat-commit\0"
_VERSION = 1
# Magic, version, step, replicas, table_start, data_start, data_end, block size, number
# of blocks, hash of the prefix.
_FIELDS = struct.Struct(f"<16s8Q{_ROOT_BYTES}s")
_SELF = struct.Struct("<Q")
# Parts of the prefix that are in memory: a forged one may be large.
_PART_BYTES = 16 << 20
# Twice the limit of `Skeleton`, and the most that rounding to stripes adds.
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


@dataclass(slots=True)
class Vouched:
    """The contents of a file's commit record; ``plan`` is without extents.

    ``hashes`` of blocks are uint64 in the machine's order, ``root`` is the prefix's.
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
        # The canonical form of the hash.
        xxhash.xxh3_128_digest(prefix),
    )
    body = fields.ljust(RECORD_BYTES - _SELF.size, b"\0")
    return body + _SELF.pack(block_hash(memoryview(body)))


def has_record(file: int) -> bool:
    """Whether a file seems to end with a commit record; version 1 has none."""
    start = os.fstat(file).st_size - RECORD_BYTES
    return start > 0 and os.pread(file, len(_MAGIC), start) == _MAGIC


def read_vouched(file: int, path: str) -> Vouched:
    """Check all of a file but the data, and return what these are checked with.

    The descriptor is open without O_DIRECT. Raises CorruptCheckpointError where a bit
    differs from what was written, or the length does.
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
    # A forged record can have a right hash. So check its numbers before they decide how
    # much is read or allocated.
    sound = (
        version == _VERSION
        and 0 < plan.table_start <= plan.data_start <= plan.data_end
        and is_block_size(plan.block_bytes)
        and plan.data_start % PAGE_BYTES == 0
        and plan.num_blocks == num_blocks
        and 8 * num_blocks <= plan.data_start - plan.table_start
        # Saves never write more, and it would take long to read.
        and plan.table_start <= _MOST_STRUCTURE_BYTES
        and plan.data_start <= 2 * plan.table_start + 8 * num_blocks + _MORE_BYTES
    )
    if not sound:
        raise _damaged(path, "numbers that do not fit each other in its commit record")
    if plan.size != size:
        raise _damaged(path, f"{size} bytes where its commit record says {plan.size}")
    hasher, table = xxhash.xxh3_128(), bytearray()
    for start in range(0, plan.data_start, _PART_BYTES):
        part = read_exactly(file, start, min(_PART_BYTES, plan.data_start - start))
        hasher.update(part)
        table += memoryview(part)[max(plan.table_start - start, 0) :]
        # Zeros follow the hashes up to the end of a page.
        del table[8 * num_blocks :]
    if hasher.digest() != root:
        raise _damaged(path, "names, types or hashes that are not as they were written")
    hashes = np.frombuffer(bytes(table), "<u8", num_blocks).astype(np.uint64)
    return Vouched(step, num_replicas, plan, hashes, root)


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
    """Return the number of bytes for verdicts behind the end of the file."""
    return _stride(plan, num_replicas) * num_replicas


def write_verdict(
    path: str, plan: FileLayout, place: tuple[int, int], nonce: bytes, part: int | Array
) -> None:
    """Write whether this replica's part is on the disk behind the commit record.

    ``place`` is this replica, and how many there are; ``nonce`` identifies the save;
    ``part`` is the number of an error, or the hashes of the replica's blocks.
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
        # Other hosts see it from now on.
        os.fsync(file)


def read_verdict(
    path: str, plan: FileLayout, place: tuple[int, int], nonce: bytes
) -> int | Array | None:
    """Return the ``part`` of another replica's `write_verdict`; None before that."""
    rank, size = place
    count = len(plan.parts(size)[rank])
    most = _VERDICT_HEAD.size + 8 * count + _VERDICT_TAIL.size
    # Network file systems ask the server when a file is opened.
    with closing(open_to_read(path, False)) as file:
        said = os.pread(file, most, plan.size + rank * _stride(plan, size))
    if len(said) < _VERDICT_HEAD.size + _VERDICT_TAIL.size:
        return None
    magic, which, whose, code, found = _VERDICT_HEAD.unpack_from(said)
    # Another save may have left its verdict there.
    if (magic, which, whose) != (_VERDICT_MAGIC, nonce, rank) or found > count:
        return None
    end = _VERDICT_HEAD.size + 8 * found
    tail = said[end : end + _VERDICT_TAIL.size]
    if tail != _VERDICT_TAIL.pack(block_hash(memoryview(said)[:end])):
        # Only half of it has arrived; a later look finds the rest.
        return None
    if code:
        return int(code)
    return np.frombuffer(said, "<u8", found, _VERDICT_HEAD.size).astype(np.uint64)


class Blocks(contextlib.AbstractContextManager["Blocks"]):
    """The data of a file, read past the page cache where ``direct`` asks for it.

    Several threads may call `read` at a time, each with its own slot; not `part`.
    """

    def __init__(self, path: str, vouched: Vouched, direct: bool) -> None:
        self.path = path
        self.vouched = vouched
        self._file = open_to_read(path, direct)
        # For `part`, which mostly finds its bytes in the block that was read before.
        self._image: Image | None = None
        self._kept = -1

    def read(self, block: int, slot: Array) -> Array:
        """Read a block into a slot that is long enough, and return it, checked.

        CorruptCheckpointError where it is damaged; OSError where it cannot be read now.
        """
        start, stop = self.vouched.plan.span(block)
        data = slot[: stop - start]
        try:
            read_into(self._file, data.data, start)
        except (OSError, EOFError) as error:
            if isinstance(error, OSError) and error.errno in PASSING:
                # This is no damage; another try may succeed.
                raise
            raise CorruptCheckpointError(
                f"expected readable data in {self.path}, found: {error}; restore an "
                "older checkpoint"
            ) from error
        if block_hash(data.data) != int(self.vouched.hashes[block]):
            raise CorruptCheckpointError(
                f"expected the data of {self.path} as they were written, found other "
                f"ones in bytes {start} to {stop}; restore an older checkpoint"
            )
        return data

    def part(self, start: int, stop: int) -> bytes:
        """Return a part of the data, checked; for small ones: it reads whole blocks."""
        plan, found = self.vouched.plan, bytearray()
        if self._image is None:
            self._image = Image(1, plan.block_bytes)
        slot = self._image.slot(0)
        for block in plan.blocks_of(start, stop):
            begin, end = plan.span(block)
            if self._kept != block:
                # A read that fails may have written over the slot.
                self._kept = -1
                self.read(block, slot)
                self._kept = block
            found += slot[max(start, begin) - begin : min(stop, end) - begin].data
        return bytes(found)

    def close(self) -> None:
        # All reads have succeeded, or raised their errors.
        with contextlib.suppress(OSError):
            os.close(self._file)

    def __exit__(self, *_: object) -> None:
        self.close()
