"""A save under way, as one replica sees it, in the foreground or in the background."""

from __future__ import annotations

import atexit
import errno
import math
import os
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np

from hpcstrat.checkpoint.disk import gives_back
from hpcstrat.checkpoint.file.commit_record import read_verdict, write_verdict
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.image import Image, Source
from hpcstrat.checkpoint.save.part_writer import PartWriter
from hpcstrat.checkpoint.save.publication import Publication
from hpcstrat.engine.gpu.transfers import Downloads
from hpcstrat.engine.logs import get_logger

__all__ = [
    "NewFile",
    "PendingSave",
    "SaveOptions",
    "checked_bandwidth",
    "finish_all",
    "give_up_all",
]

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
    """The options of a save."""

    path: str
    asynchronous: bool
    # A checkpoint of this step goes; those of later steps go.
    replaces: bool
    abandons: bool
    # time.perf_counter() when the caller asked for it.
    began: float
    # Bytes per second of all replicas together, in the background.
    bandwidth: float = math.inf


@dataclass(slots=True)
class NewFile:
    """The file that replica 0 has made, as it tells the others."""

    temporary: str
    # Tells the verdicts of this save from what an earlier one left on the same blocks.
    nonce: bytes
    # Plain state is replica 0's, and all write parts of it.
    python: dict[str, bytes]
    # None where it is the one of the save before, which all replicas have kept.
    plan: FileLayout | None
    direct: bool


class PendingSave:
    """A save that is not yet over, as one replica sees it.

    Threads of this replica hash and write its blocks. In the background, they also say
    in the file how that ended, and replica 0's publishes when all parts are there,
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
        # Set when threads need not wait for other replicas' verdicts any more.
        self._stop = threading.Event()
        # Whether the file cannot tell the other ranks how this part has ended, so that
        # the main threads must exchange it.
        self._unheard = False

    @property
    def failed(self) -> bool:
        """Whether it does not end before the main threads meet, or has failed."""
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

        In the background all are copied on return; otherwise not before `join`.
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
        """Say that this part is done; on replica 0, publish when all are (a thread)."""
        error = part.error
        try:
            if self.publication is None:
                # Replica 0 waits for no verdict on a part without blocks.
                if part.blocks:
                    verdict = part.hashes if error is None else _number(error)
                    write_verdict(*self._where(self.rank), verdict)
            elif error is not None:
                self.publication.drop(error)
            else:
                self._publish_when_all_are_there(self.publication, part)
                self._await_room()
        except OSError as problem:
            # Nothing is lost: the main threads will meet.
            self._unheard = True
            get_logger("checkpoint").debug("no verdict on %s: %s", self.order, problem)

    def _where(self, rank: int) -> tuple[str, FileLayout, tuple[int, int], bytes]:
        """Return where a replica's verdict is, as `read_verdict` takes it."""
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
        """Wait for blocks of old files, which keep a disk from new ones meanwhile."""
        end = time.monotonic() + _FREEING_SECONDS
        while gives_back() and time.monotonic() < end:
            if self._stop.wait(_FIRST_NAP_SECONDS):
                return

    def join(self) -> None:
        """Wait for the threads of this replica, which no longer wait for others."""
        if self.part is not None:
            self._stop.set()
            self.part.join()
        _under_way.discard(self)

    def give_up(self, error: BaseException) -> None:
        """Wait for the threads, and drop the file unless the checkpoint is there."""
        self.join()
        if self.publication is not None:
            self.publication.drop(error)

    def finish_alone(self) -> None:
        """Finish without the other replicas' main threads, or drop it and warn."""
        # Replica 0's thread may wait for the others' verdicts as long as that.
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
# A child must not end, nor drop, what its parent saves.
os.register_at_fork(after_in_child=_under_way.clear)


def give_up_all(error: BaseException) -> None:
    """Give up all saves under way: their replicas will not meet again."""
    for save in list(_under_way):
        save.give_up(error)


@atexit.register
def finish_all() -> None:
    """Finish all saves under way, or drop them with a warning: the program ends."""
    for save in list(_under_way):
        save.finish_alone()
