"""A running save on one replica, and the publication of its file on replica 0."""

from __future__ import annotations

import atexit
import errno
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

import numpy as np

from hpcstrat.checkpoint.disk import (
    closing,
    flush,
    flush_folder,
    gives_back,
    open_to_write,
    publish,
    remove,
)
from hpcstrat.checkpoint.file.commit_record import (
    pack_record,
    read_verdict,
    write_verdict,
)
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.image import Image, Source
from hpcstrat.checkpoint.file.schema import Header
from hpcstrat.checkpoint.file.skeleton import Skeleton
from hpcstrat.checkpoint.keep.folder import Identity, identity_of
from hpcstrat.checkpoint.keep.retention import Found, Retention
from hpcstrat.checkpoint.keep.watcher_contract import require_newest_generation
from hpcstrat.checkpoint.save.part_writer import PartWriter
from hpcstrat.engine.file_bytes import write_all
from hpcstrat.engine.gpu.transfers import Downloads
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError
from hpcstrat.safety import newest_checkpoint

__all__ = [
    "NewFile",
    "PendingSave",
    "Publication",
    "SaveOptions",
    "checked_bandwidth",
    "finish_all",
    "give_up_all",
]


@dataclass(eq=False)
class Publication:
    """The last step of a save, on replica 0: publishes the file, or removes it.

    The file gets its final name when all its bytes are on the disk, and older
    checkpoints are removed only after that. So a power failure at any time leaves an
    intact checkpoint. The saving thread or the main thread publishes: the first one.
    """

    path: str
    # Name of the file until it is published, in the same folder.
    temporary: str
    replaces: bool
    # Identity of the file at ``path`` at the start of the save.
    found: Identity | None
    # Checkpoints of later steps, to remove when this checkpoint is on the disk.
    abandoned: list[tuple[str, Identity | None]]
    # Removes older checkpoints when this checkpoint is on the disk.
    retention: Retention
    created_unix_ns: int
    # Set before `do`.
    header: Header = field(init=False)
    skeleton: Skeleton = field(init=False)
    error: BaseException | None = None
    # time.perf_counter() when the checkpoint was on the disk; 0 before.
    ended: float = 0.0
    # Reentrant, or a signal handler that calls `drop` during `do` would deadlock.
    _lock: Any = field(default_factory=threading.RLock)

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs, without header and skeleton."""
        left_out = "_lock", "header", "skeleton"
        return {k: v for k, v in self.__dict__.items() if k not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    @property
    def over(self) -> bool:
        return self.ended > 0 or self.error is not None

    def do(self, hashes: Array) -> None:
        """Publish the checkpoint, whose parts are all on the disk; store any error."""
        with self._lock:
            if self.over:
                return
            replaces = published = False
            try:
                self._write(hashes)
                replaces = self._replaces()
                # This process may have been frozen since the save began.
                require_newest_generation(f"a save of {self.path}")
                publish(self.temporary, self.path, replaces)
                published = True
                flush_folder(os.path.dirname(self.path))
            except BaseException as error:
                self.error = error
                self._remove()
                if published and not replaces:
                    # Unflushed, the name may be lost in a power failure: remove it.
                    with suppress(OSError):
                        remove(self.path)
                return
            try:
                self._remove_abandoned()
            except BaseException as error:
                self.error = error
                return
            self.ended = time.perf_counter()
            newest_checkpoint.tell(self.path)
            self._tidy()

    def drop(self, error: BaseException) -> None:
        """Unless the save is over, remove its file, and store the error."""
        with self._lock:
            if not self.over:
                self.error = error
                self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            remove(self.temporary)

    def _write(self, hashes: Array) -> None:
        """Write the prefix and the commit record, and truncate the file to its size."""
        plan, header = self.skeleton.plan, self.header
        prefix = self.skeleton.prefix(header, self.created_unix_ns)
        table = hashes.astype("<u8").tobytes()
        prefix[plan.table_start : plan.table_start + len(table)] = table
        record = pack_record(plan, bytes(prefix), header.step, header.num_replicas)
        # Use the page cache: prefix and record are not page-aligned, and not large.
        with closing(open_to_write(self.temporary, False)) as file:
            write_all(file, memoryview(prefix), 0)
            write_all(file, memoryview(record), plan.data_end)
            # Remove the verdicts of a background save, which follow the record.
            os.ftruncate(file, plan.size)
            flush(file)

    def _replaces(self) -> bool:
        if not self.replaces:
            return False
        there = identity_of(self.path)
        if there is not None and there != self.found:
            raise CheckpointError(
                f"expected no other process to write {self.path} while it was being "
                "replaced, found a new file there; another job saves in this folder: "
                "use another folder"
            )
        return there is not None

    def _remove_abandoned(self) -> None:
        left = []
        for path, identity in self.abandoned:
            try:
                # Keep the file if another job has replaced it since.
                if identity_of(path) == identity:
                    remove(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                left.append(f"{os.path.basename(path)} ({error.strerror})")
        if left:
            raise CheckpointError(
                f"expected to remove the checkpoints of later steps than {self.path}, "
                "which is saved, found that these could not be removed: "
                f"{', '.join(left)}; remove them, or a restore will choose them as the "
                "newest"
            )
        if self.abandoned:
            flush_folder(os.path.dirname(self.path))

    def _tidy(self) -> None:
        step, metrics = self.header.step, self.header.metrics
        try:
            self.retention.apply(Found(self.path, step, self.created_unix_ns, metrics))
        except Exception as error:
            # The new checkpoint is complete: this error must not make the save fail.
            get_logger("checkpoint").warning(
                "old checkpoints in %s were not removed: %s",
                os.path.dirname(self.path),
                error,
            )


_FIRST_NAP_SECONDS, _LAST_NAP_SECONDS = 0.001, 0.05
_PATIENCE_SECONDS = 60.0
# Longest wait for the disk space of removed files: see `_await_room`.
_FREEING_SECONDS = 5.0


def checked_bandwidth(value: SupportsFloat | None) -> float:
    """Return a limit in bytes per second, infinity for None; raise if invalid."""
    if value is None:
        return math.inf
    try:
        limit = float(value)
    except (TypeError, ValueError):
        limit = math.nan
    if not limit > 0:
        raise ValueError(
            f"expected max_write_bandwidth to be a positive number of bytes per "
            f"second, found {value!r}; pass such as 500e6, or None for no limit"
        )
    return limit


@dataclass(frozen=True, slots=True)
class SaveOptions:
    path: str
    asynchronous: bool
    # True if the save replaces a checkpoint of this step (``replaces``), and removes
    # checkpoints of later steps (``abandons``).
    replaces: bool
    abandons: bool
    # time.perf_counter() at the call of `save`.
    began: float
    # Limit for the background writes of all replicas together, in bytes per second.
    bandwidth: float = math.inf


@dataclass(slots=True)
class NewFile:
    """Message of replica 0 about the file that it has made for a save."""

    temporary: str
    # Random bytes that identify verdicts of this save.
    nonce: bytes
    # Plain state of replica 0, because any replica may write a part of it.
    python: dict[str, bytes]
    # None if all replicas can use the plan of the last save again.
    plan: FileLayout | None
    direct: bool


class PendingSave:
    """A save that has not ended, on one replica.

    Threads of this replica hash and write its blocks. In a background save, the last
    thread then writes a verdict to the file; on replica 0, it reads all verdicts, and
    publishes the file when all parts are written. So the main threads make no MPI call.
    """

    def __init__(
        self,
        order: SaveOptions,
        step: int,
        file: NewFile,
        plan: FileLayout,
        *,
        rank: int,
        num_ranks: int,
    ) -> None:
        self.order, self.step = order, step
        self.file, self.plan = file, plan
        self.rank, self.num_ranks = rank, num_ranks
        self.blocking_seconds = 0.0
        # Only replica 0 has a publication.
        self.publication: Publication | None = None
        # None until writing begins. If that fails, ``error`` has the cause.
        self.part: PartWriter | None = None
        self.error: BaseException | None = None
        # Set to stop replica 0's thread, which may wait for verdicts of other replicas.
        self._stop = threading.Event()
        # True if a verdict could not be written or read; the main threads must then
        # exchange the results in `Saver.finish`.
        self._unheard = False

    @property
    def failed(self) -> bool:
        """True if the save has failed, or cannot end without the main threads."""
        error = None if self.part is None else self.part.error
        return self._unheard or self.error is not None or error is not None

    def write(
        self,
        image: Image,
        values: Mapping[str, Source],
        blocks: Sequence[int],
        num_cores: int,
        *,
        downloads: Downloads | None = None,
        rounds: Iterable[Sequence[int]] | None = None,
    ) -> None:
        """Start copying and writing this rank's blocks; see `PartWriter.start`.

        In a background save, all blocks are copied when this method returns; in other
        saves, they are copied when `join` returns.
        """
        ahead = self.order.asynchronous
        self.part = PartWriter(
            self.file.temporary,
            self.plan,
            blocks,
            image,
            direct=self.file.direct,
            then=self._in_background if ahead else None,
            spread_seconds=self.plan.size / self.order.bandwidth,
            num_cores=num_cores,
            downloads=downloads,
        )
        if ahead:
            _under_way.add(self)
        self.part.start(values, ahead=ahead, rounds=rounds)

    def _in_background(self, part: PartWriter) -> None:
        """Write this replica's verdict; on replica 0, publish. For the last thread."""
        error = part.error
        try:
            if self.publication is None:
                # Replica 0 does not wait for the verdict of a replica without blocks.
                if part.blocks:
                    verdict = part.hashes if error is None else _number(error)
                    write_verdict(*self._where(self.rank), verdict)
            elif error is not None:
                self.publication.drop(error)
            else:
                self._publish_when_all_are_there(self.publication, part)
                self._await_room()
        except OSError as problem:
            # The main threads will exchange the results instead.
            self._unheard = True
            get_logger("checkpoint").debug(
                "the outcome of %s could not be read: %s", self.order, problem
            )

    def _where(self, rank: int) -> tuple[str, FileLayout, tuple[int, int], bytes]:
        """Return the arguments of `read_verdict` for the replica of this rank."""
        place = rank, self.num_ranks
        return self.file.temporary, self.plan, place, self.file.nonce

    def _publish_when_all_are_there(
        self, publication: Publication, part: PartWriter
    ) -> None:
        hashes = np.zeros(self.plan.num_blocks, np.uint64)
        hashes[list(part.blocks)] = part.hashes
        nap = _FIRST_NAP_SECONDS
        for rank, blocks in enumerate(self.plan.parts(self.num_ranks)):
            if rank == 0 or not blocks:
                continue
            while (verdict := read_verdict(*self._where(rank))) is None:
                if self._stop.wait(nap):
                    return
                nap = min(1.5 * nap, _LAST_NAP_SECONDS)
            if isinstance(verdict, int):
                # `Saver.finish` will raise an error with the rank and the cause.
                publication.drop(OSError(verdict, os.strerror(verdict)))
                return
            hashes[list(blocks)] = verdict
        publication.do(hashes)

    def _await_room(self) -> None:
        """Wait until removed files' space is freed, because freeing slows writes."""
        end = time.monotonic() + _FREEING_SECONDS
        while gives_back() and time.monotonic() < end:
            if self._stop.wait(_FIRST_NAP_SECONDS):
                return

    def join(self) -> None:
        """Wait for this replica's threads, which stop waiting for other replicas."""
        if self.part is not None:
            self._stop.set()
            self.part.join()
        _under_way.discard(self)

    def give_up(self, error: BaseException) -> None:
        """Wait for the threads, and remove the file if it was not published."""
        self.join()
        if self.publication is not None:
            self.publication.drop(error)

    def finish_alone(self) -> None:
        """Finish without other replicas' main threads; if impossible, drop the save."""
        # Meanwhile, replica 0's thread may wait for verdicts of other replicas.
        done = self.part is None or self.part.join(_PATIENCE_SECONDS)
        self._stop.set()
        if self.publication is not None:
            self.publication.drop(
                TimeoutError("not all replicas had written their parts")
            )
        error = self.publication.error if self.publication is not None else None
        if error is not None or not done:
            get_logger("checkpoint").warning(
                "expected the save of %s to be done at the end of the program, found "
                "%s; the save is dropped: call wait() or close() before the end",
                self.order.path,
                error or "that this replica still writes",
            )


def _number(error: BaseException) -> int:
    return getattr(error, "errno", None) or errno.EIO


_under_way: weakref.WeakSet[PendingSave] = weakref.WeakSet()
# A forked child process must not finish or remove the saves of its parent.
os.register_at_fork(after_in_child=_under_way.clear)


def give_up_all(error: BaseException) -> None:
    """Give up all running saves, because a lost rank cannot write its parts."""
    for save in list(_under_way):
        save.give_up(error)


@atexit.register
def finish_all() -> None:
    """Finish all running saves at the end of the program, or remove their files."""
    for save in list(_under_way):
        save.finish_alone()
