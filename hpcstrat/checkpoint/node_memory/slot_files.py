"""The files of a node's snapshots: two slots, each with data and a record.

The data file has the blocks of a checkpoint file that this node has, at their offsets
in that file; it has holes where other blocks are. The record has everything else: the
key, the header, the layout and the hash of each block. It is removed before the blocks
change, and written after them.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import mmap
import os
import pickle
import platform
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import xxhash

from hpcstrat.checkpoint.disk import closing
from hpcstrat.checkpoint.file.commit_record import Vouched
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.plain_state import from_text
from hpcstrat.checkpoint.file.reader import CheckpointFile
from hpcstrat.checkpoint.file.schema import Header
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.cluster_resolver import batch_job_from_environment
from hpcstrat.engine.typing import Array

__all__ = [
    "NUM_SLOTS",
    "Key",
    "Record",
    "SlotMap",
    "SnapshotAbout",
    "SnapshotFolder",
    "pack",
    "read_value",
    "unpack",
    "write_value",
]

NUM_SLOTS = 2
"""While one slot is written, the other slot has a complete snapshot."""

_SHARED_MEMORY = "/dev/shm"
_DIGEST_BYTES = 16
# Room for both records; that of a model with thousands of variables has some 100 KB.
_RECORD_BYTES = 1 << 20

Key: TypeAlias = tuple[int, int, int, int]
"""Key of a snapshot: generation, number, step, number of ranks; newer keys are larger.

A run that went back to an earlier step has a larger generation or number.
"""


def pack(value: Any) -> bytes:
    """Return a pickled value, behind its hash."""
    body = pickle.dumps(value, 5)
    return xxhash.xxh3_128_digest(body) + body


def unpack(data: bytes) -> Any:
    """Return a packed value; None if it was changed, or another version packed it."""
    if xxhash.xxh3_128_digest(data[_DIGEST_BYTES:]) == data[:_DIGEST_BYTES]:
        with contextlib.suppress(Exception):
            return pickle.loads(data[_DIGEST_BYTES:])
    return None


def write_value(path: str, value: Any) -> None:
    """Write a value to a file that others see at once, or not; raises OSError."""
    new = f"{path}.{secrets.token_hex(4)}"
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
    try:
        with open(os.open(new, flags, 0o600), "wb") as file:
            file.write(pack(value))
        os.replace(new, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise


def read_value(path: str) -> Any:
    """Return the value in a file; None if there is no such file, or it was changed."""
    # A shared file system may fail for some time.
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return unpack(file.read())
    return None


@dataclass(frozen=True)
class SnapshotAbout:
    """Description of a snapshot, which is the same on all nodes.

    ``run`` is the name of the run, and ``first_start`` the time of its first start.
    """

    run: str
    key: Key
    first_start: float
    header: Header
    plan: FileLayout


@dataclass(frozen=True)
class Record:
    """The record of a slot.

    ``common`` is the same on all nodes: a pickled `SnapshotAbout`. ``hashes`` has the
    hash of each block, ``held`` whether this node has the block.
    """

    common: bytes
    hashes: Array
    held: Array

    def __reduce__(self) -> tuple[Any, ...]:
        """Leave out what is computed from ``common``."""
        return Record, (self.common, self.hashes, self.held)

    @cached_property
    def digest(self) -> bytes:
        """Hash of everything that is the same on all nodes, and so of the snapshot."""
        return xxhash.xxh3_128_digest(self.common + self.hashes.tobytes())

    @cached_property
    def about(self) -> SnapshotAbout:
        """The description of the snapshot."""
        found: SnapshotAbout = pickle.loads(self.common)
        return found

    def file(self, path: str) -> CheckpointFile:
        """Return the snapshot as a checkpoint whose blocks are read from ``path``."""
        header, plan = copy.copy(self.about.header), self.about.plan
        header.python = {name: from_text(text) for name, text in header.python.items()}
        header.entries = {
            name: replace(entry, gathered=False, regions=())
            for name, entry in header.entries.items()
        }
        vouched = Vouched(
            header.step, header.num_replicas, plan, self.hashes, self.digest
        )
        extents = {extent.path: extent for extent in plan.extents}
        return CheckpointFile(path, header, vouched, extents)


class SnapshotFolder:
    """A node's folder of snapshots, of the run with this name."""

    def __init__(self, name: str, run: str = "") -> None:
        self.path = os.path.join(watcher().memory or _SHARED_MEMORY, name)
        self.run = watcher().run or run

    @classmethod
    def of(cls, directory: str) -> SnapshotFolder:
        """Return the folder for the checkpoints in ``directory``."""
        job = batch_job_from_environment()
        words = "" if job is None else job.job_id, os.path.realpath(directory)
        name = xxhash.xxh3_64_hexdigest(os.fsencode("\0".join(words)))
        return cls(f"hpcstrat-{os.getuid()}-{name}", name)

    @property
    def rules_path(self) -> str:
        """The file with the `Retention` of the checkpoints, for a save by watchers."""
        return os.path.join(self.path, "retention")

    def make(self) -> tuple[str, int, int]:
        """Make the folder, and return an identity that only ranks of this node share.

        Raises OSError if another user could have put files into it.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)
        found = os.lstat(self.path)
        mode = stat.S_IMODE(found.st_mode)
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.getuid()
            or mode != 0o700
        ):
            raise PermissionError(
                errno.EPERM,
                f"it is no folder of user {os.getuid()} with mode 700, but of user "
                f"{found.st_uid} with mode {mode:o}",
                self.path,
            )
        return platform.node(), found.st_dev, found.st_ino

    def data_path(self, slot: int) -> str:
        return os.path.join(self.path, f"slot-{slot}.data")

    def _record_path(self, slot: int) -> str:
        return os.path.join(self.path, f"slot-{slot}.record")

    def records(self) -> dict[int, Record]:
        """Return the intact records of this run, by slot."""
        found = {}
        for slot in range(NUM_SLOTS):
            record = read_value(self._record_path(slot))
            # There may be none, or one of another version of the library.
            with contextlib.suppress(Exception):
                if record.about.run == self.run:
                    found[slot] = record
        return found

    def older_slot(self) -> int:
        """Return the slot of the older snapshot, or one without any."""
        keys = {slot: one.about.key for slot, one in self.records().items()}
        return min(range(NUM_SLOTS), key=lambda slot: keys.get(slot, ()))

    def forget(self, slot: int) -> None:
        """Remove the record of a slot, before its blocks change."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._record_path(slot))

    def keep(self, slot: int, record: Record) -> None:
        """Write the record of a slot, whose blocks are complete."""
        write_value(self._record_path(slot), record)

    def reserve(self, slot: int, plan: FileLayout, held: Sequence[int]) -> None:
        """Make the data file of a slot anew, with memory for the blocks of this node.

        Raises OSError if there is too little for all slots. Without the reservation, a
        write to a full file system would end the process by SIGBUS. A new file cannot
        be changed by processes of an earlier generation.
        """
        needed = NUM_SLOTS * sum(b - a for a, b in _ranges(plan, held)) + _RECORD_BYTES
        space = os.statvfs(self.path)
        free = space.f_bavail * space.f_frsize
        for one in range(NUM_SLOTS):
            with contextlib.suppress(OSError):
                free += 512 * os.stat(self.data_path(one)).st_blocks
        where = f"{self.path} on {os.uname().nodename}"
        if free < needed:
            raise OSError(
                errno.ENOSPC,
                f"{where} needs {needed >> 20} MiB, of which {free >> 20} MiB are free",
            )
        path = self.data_path(slot)
        self.forget(slot)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            with closing(file):
                os.ftruncate(file, plan.data_end)
                for start, stop in _ranges(plan, held):
                    os.posix_fallocate(file, start, stop - start)
        except OSError as error:
            os.unlink(path)
            raise OSError(
                error.errno,
                f"{where} needs {needed >> 20} MiB, of which {free >> 20} MiB are free "
                f"({error.strerror})",
            ) from error

    def remove(self) -> None:
        """Remove the folder with all snapshots, which a process may still have open."""
        shutil.rmtree(self.path, ignore_errors=True)


class SlotMap:
    """The data file of a slot, mapped into this process."""

    def __init__(self, path: str, plan: FileLayout, *, reads: bool = False) -> None:
        self.plan = plan
        access = mmap.ACCESS_READ if reads else mmap.ACCESS_WRITE
        with closing(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as file:
            self._map = mmap.mmap(file, plan.data_end, access=access)
        # Leave the pages out of child processes, which never use them.
        self._map.madvise(mmap.MADV_DONTFORK)
        self._bytes: Array = np.frombuffer(self._map, np.uint8)

    def block(self, block: int) -> Array:
        """Return the bytes of a block, as a view."""
        start, stop = self.plan.span(block)
        return self._bytes[start:stop]


def _ranges(plan: FileLayout, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes of ascending blocks; adjacent blocks are one range."""
    begin = end = -1
    for block in blocks:
        start, stop = plan.span(block)
        if start != end:
            if end > begin:
                yield begin, end
            begin = start
        end = stop
    if end > begin:
        yield begin, end
