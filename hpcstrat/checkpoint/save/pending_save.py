"""A save under way, as one replica sees it, and the last steps that publish it."""

from __future__ import annotations

import atexit
import errno
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
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
    write_all,
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
from hpcstrat.checkpoint.save.part_writer import PartWriter
from hpcstrat.engine.gpu.transfers import Downloads
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError

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
    """The end of a save on replica 0: from parts on the disk to a checkpoint, or not.

    The file gets its name only when all of it is on the disk, and older checkpoints go
    only after that: at each moment, a loss of power leaves a whole one. The thread that
    saves or the caller does it, whoever is first.
    """

    path: str
    # Its name until then, in the same folder.
    temporary: str
    replaces: bool
    # The file that is replaced; another job may have replaced it since.
    found: Identity | None
    # Checkpoints of later steps, which go once this one is durable.
    abandoned: list[tuple[str, Identity | None]]
    # Removes older ones then.
    retention: Retention
    header: Header
    skeleton: Skeleton
    created_unix_ns: int
    error: BaseException | None = None
    # time.perf_counter() when it was durable; 0 before.
    ended: float = 0.0
    # Reentrant, as an interrupt may come within `do`.
    _lock: Any = field(default_factory=threading.RLock)

    @property
    def over(self) -> bool:
        return self.ended > 0 or self.error is not None

    def do(self, hashes: Array) -> None:
        """Make the checkpoint, as all parts are on the disk; keep an error."""
        with self._lock:
            if self.over:
                return
            replaces = published = False
            try:
                self._write(hashes)
                replaces = self._replaces()
                publish(self.temporary, self.path, replaces)
                published = True
                flush_folder(os.path.dirname(self.path))
            except BaseException as error:
                self.error = error
                self._remove()
                if published and not replaces:
                    # A loss of power may remove its name.
                    with suppress(OSError):
                        remove(self.path)
                return
            try:
                self._remove_abandoned()
            except BaseException as error:
                self.error = error
                return
            self.ended = time.perf_counter()
            # The new one is durable now.
            self._tidy()

    def drop(self, error: BaseException) -> None:
        """Remove the file, unless it is over."""
        with self._lock:
            if not self.over:
                self.error = error
                self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            remove(self.temporary)

    def _write(self, hashes: Array) -> None:
        """Write all but the data, and cut the file to its size."""
        plan, header = self.skeleton.plan, self.header
        prefix = self.skeleton.prefix(header, self.created_unix_ns)
        table = hashes.astype("<u8").tobytes()
        prefix[plan.table_start : plan.table_start + len(table)] = table
        record = pack_record(plan, bytes(prefix), header.step, header.num_replicas)
        # Not direct: these pieces are neither aligned nor large.
        with closing(open_to_write(self.temporary, False)) as file:
            write_all(file, memoryview(prefix), 0)
            write_all(file, memoryview(record), plan.data_end)
            # Verdicts of a save in the background stand behind the record.
            os.ftruncate(file, plan.size)
            flush(file)

    def _replaces(self) -> bool:
        if not self.replaces:
            return False
        there = identity_of(self.path)
        if there is not None and there != self.found:
            raise CheckpointError(
                f"expected {self.path} to stay as it was while it was being "
                "replaced, found a new file there; another job saves in this folder: "
                "use another one"
            )
        return there is not None

    def _remove_abandoned(self) -> None:
        left = []
        for path, identity in self.abandoned:
            try:
                # Leave a file that another job has put there since.
                if identity_of(path) == identity:
                    remove(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                left.append(f"{os.path.basename(path)} ({error.strerror})")
        if left:
            raise CheckpointError(
                f"expected to remove the checkpoints of later steps than that of "
                f"{self.path}, which is saved, found that these stay: "
                f"{', '.join(left)}; remove them, or they are restored as the newest"
            )
        if self.abandoned:
            flush_folder(os.path.dirname(self.path))

    def _tidy(self) -> None:
        step, metrics = self.header.step, self.header.metrics
        try:
            self.retention.apply(Found(self.path, step, self.created_unix_ns, metrics))
        except Exception as error:
            # The checkpoint is there, in spite of the error.
            get_logger("checkpoint").warning(
                "old checkpoints in %s were not removed: %s",
                os.path.dirname(self.path),
                error,
            )


_FIRST_NAP_SECONDS, _LAST_NAP_SECONDS = 0.001, 0.05
_PATIENCE_SECONDS = 60.0
# A thread stays so long for the freeing of old files: see `gives_back`.
_FREEING_SECONDS = 5.0


def checked_bandwidth(value: SupportsFloat | None) -> float:
    """Return a limit in bytes per second, infinite for None; else ValueError."""
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
    # Whether to replace one of this step, and to remove those of later steps.
    replaces: bool
    abandons: bool
    # time.perf_counter() when the caller asked for it.
    began: float
    # Bytes per second of all replicas together, in the background.
    bandwidth: float = math.inf


@dataclass(slots=True)
class NewFile:
    """The file that replica 0 has made, as it is sent to the others."""

    temporary: str
    # Distinguishes verdicts of this save from those of an earlier one.
    nonce: bytes
    # Plain state of replica 0, which all write parts of.
    python: dict[str, bytes]
    # None for the plan of the save before, which all replicas have kept.
    plan: FileLayout | None
    direct: bool


class PendingSave:
    """A save that is not yet over, as one replica sees it.

    Threads of this replica hash and write its blocks. In the background, they also
    write a verdict to the file, and replica 0's publishes when all parts are there,
    without any call of the main threads.
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
        # On replica 0 only.
        self.publication: Publication | None = None
        # None until it has begun; ``error`` says why it has not.
        self.part: PartWriter | None = None
        self.error: BaseException | None = None
        # Set when threads need no longer wait for verdicts of other replicas.
        self._stop = threading.Event()
        # Whether the file cannot tell the other ranks how this part has ended, so that
        # the main threads must exchange it.
        self._unheard = False

    @property
    def failed(self) -> bool:
        """Whether the save has failed, or needs the main threads to end."""
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
    ) -> None:
        """Copy this replica's blocks, and have them written.

        In the background all are copied on return; otherwise after `join`.
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
        self.part.start(values, ahead=ahead)

    def _in_background(self, part: PartWriter) -> None:
        """Write the verdict on this part, or publish on replica 0 (in a thread)."""
        error = part.error
        try:
            if self.publication is None:
                # Replica 0 needs no verdict on a part without blocks.
                if part.blocks:
                    verdict = part.hashes if error is None else _number(error)
                    write_verdict(*self._where(self.rank), verdict)
            elif error is not None:
                self.publication.drop(error)
            else:
                self._publish_when_all_are_there(self.publication, part)
                self._await_room()
        except OSError as problem:
            # The main threads will exchange the outcome instead.
            self._unheard = True
            get_logger("checkpoint").debug("no verdict on %s: %s", self.order, problem)

    def _where(self, rank: int) -> tuple[str, FileLayout, tuple[int, int], bytes]:
        """Return the place of a replica's verdict, for `read_verdict`."""
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
                # The main threads say which rank, and why, when they meet.
                publication.drop(OSError(verdict, os.strerror(verdict)))
                return
            hashes[list(blocks)] = verdict
        publication.do(hashes)

    def _await_room(self) -> None:
        """Wait for the removal of old files, which slows new ones."""
        end = time.monotonic() + _FREEING_SECONDS
        while gives_back() and time.monotonic() < end:
            if self._stop.wait(_FIRST_NAP_SECONDS):
                return

    def join(self) -> None:
        """Wait for the threads of this replica."""
        if self.part is not None:
            self._stop.set()
            self.part.join()
        _under_way.discard(self)

    def give_up(self, error: BaseException) -> None:
        """Wait for the threads, and drop the file if it was not published."""
        self.join()
        if self.publication is not None:
            self.publication.drop(error)

    def finish_alone(self) -> None:
        """Finish without the other replicas' main threads, or drop the file."""
        # Replica 0's thread may wait so long for verdicts of others.
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
                "%s; it is dropped: call wait() or close() before the end",
                self.order.path,
                error or "that this replica still writes",
            )


def _number(error: BaseException) -> int:
    return getattr(error, "errno", None) or errno.EIO


_under_way: weakref.WeakSet[PendingSave] = weakref.WeakSet()
# A child process must not end or drop the saves of its parent.
os.register_at_fork(after_in_child=_under_way.clear)


def give_up_all(error: BaseException) -> None:
    """Give up all saves under way, as their replicas will not meet again."""
    for save in list(_under_way):
        save.give_up(error)


@atexit.register
def finish_all() -> None:
    """Finish all saves under way at the end of the program, or drop them."""
    for save in list(_under_way):
        save.finish_alone()
