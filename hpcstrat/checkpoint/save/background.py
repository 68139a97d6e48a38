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

from hpcstrat.checkpoint.disk.file_names import gives_back
from hpcstrat.checkpoint.file.extents import Plan
from hpcstrat.checkpoint.file.image import Image, Source
from hpcstrat.checkpoint.file.part_verdicts import read_verdict, write_verdict
from hpcstrat.checkpoint.save.commit import Commit
from hpcstrat.checkpoint.save.writing import Writing
from hpcstrat.gpu.transfers import Downloads
from hpcstrat.logs import get_logger

__all__ = ["Order", "Save", "Start", "checked_bandwidth", "finish_all", "give_up_all"]

_FIRST_NAP_SECONDS, _LAST_NAP_SECONDS = 0.001, 0.05
_PATIENCE_SECONDS = 60.0
_FREEING_SECONDS = 5.0


def checked_bandwidth(value: SupportsFloat | None) -> float:
    """Return a limit in bytes per second.

    Not collective.

    Parameters
    ----------
    value : number or None
        None for no limit.

    Returns
    -------
    float
        Infinite for no limit.

    Raises
    ------
    ValueError
        If it is no positive number.
    """
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
class Order:
    """How a save is to be done.

    Parameters
    ----------
    path : str
        Where the checkpoint is to be.
    asynchronous : bool
        Whether it is written in the background.
    replaces : bool
        Whether a checkpoint of this step is replaced.
    abandons : bool
        Whether later ones are removed.
    began : float
        ``time.perf_counter()`` when the caller asked for it.
    bandwidth : float
        How many bytes per second all replicas may write in the background.
    """

    path: str
    asynchronous: bool
    replaces: bool
    abandons: bool
    began: float
    bandwidth: float = math.inf


@dataclass(slots=True)
class Start:
    """What replica 0 tells the others.

    Parameters
    ----------
    temporary : str
        The file, which exists.
    nonce : bytes of length 16
        Tells the verdicts of this save from others.
    python : dict of str to bytes
        Plain state of replica 0, by name.
    plan : Plan or None
        The layout; None where it is the one of the save before.
    direct : bool
        Whether to go past the page cache.
    """

    temporary: str
    nonce: bytes
    python: dict[str, bytes]
    plan: Plan | None
    direct: bool


class Save:
    """A save under way, as one replica sees it.

    Parameters
    ----------
    order : Order
        How it is done.
    start : Start
        From replica 0.
    plan : Plan
        The layout.
    place : tuple of int
        This replica, and the number of replicas.
    step : int
        Of the checkpoint.

    Attributes
    ----------
    commit : Commit or None
        The last steps, on replica 0.
    writing : Writing or None
        This replica's part, once it has begun.
    error : BaseException or None
        Why it has not.
    blocking_seconds : float
        How long the caller was kept.
    stop : threading.Event
        Set when threads need not wait for other replicas' verdicts any more.
    unheard : bool
        Whether the other replicas cannot find out from the file how this one's part
        has ended: the main threads must meet for that.
    """

    def __init__(
        self,
        order: Order,
        start: Start,
        plan: Plan,
        place: tuple[int, int],
        step: int,
    ) -> None:
        self.order, self.start, self.plan, self.place = order, start, plan, place
        self.step = step
        self.commit: Commit | None = None
        self.blocking_seconds = 0.0
        self.stop = threading.Event()
        self.writing: Writing | None = None
        self.error: BaseException | None = None
        self.unheard = False

    @property
    def failed(self) -> bool:
        """Whether it does not end before the main threads meet, or has failed."""
        error = None if self.writing is None else self.writing.error
        return self.unheard or self.error is not None or error is not None

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

        Not collective.

        Parameters
        ----------
        image : Image
            For the copies.
        values : mapping of str to Source
            By path.
        blocks : sequence of int
            This replica's.
        num_cores : int
            For this replica.
        downloads : Downloads, optional
            Copies values that are in the memory of a GPU.
        """
        ahead = self.order.asynchronous
        self.writing = Writing(
            *(self.start.temporary, self.plan, blocks, image),
            direct=self.start.direct,
            then=self._in_background if ahead else None,
            spread_seconds=self.plan.size / self.order.bandwidth,
            num_cores=num_cores,
            downloads=downloads,
        )
        if ahead:
            _under_way.add(self)
        self.writing.start(values, ahead=ahead)

    def _in_background(self, writing: Writing) -> None:
        """Say that this part is done; on replica 0, commit when all are. A thread's."""
        error = writing.error
        try:
            if self.commit is None:
                if writing.blocks:
                    part = writing.hashes if error is None else _number(error)
                    write_verdict(*self._where(self.place[0]), part)
            elif error is not None:
                self.commit.drop(error)
            else:
                self._watch(writing)
                self._await_room()
        except OSError as problem:
            # Nothing is lost: the main threads will meet.
            self.unheard = True
            get_logger("checkpoint").debug("no verdict on %s: %s", self.order, problem)

    def _where(self, rank: int) -> tuple[str, Plan, tuple[int, int], bytes]:
        place = rank, self.place[1]
        return self.start.temporary, self.plan, place, self.start.nonce

    def _watch(self, writing: Writing) -> None:
        assert self.commit is not None
        hashes = np.zeros(self.plan.num_blocks, np.uint64)
        hashes[list(writing.blocks)] = writing.hashes
        nap = _FIRST_NAP_SECONDS
        parts = self.plan.parts(self.place[1])
        for rank, blocks in enumerate(parts):
            if rank == 0 or not blocks:
                continue
            while (part := read_verdict(*self._where(rank))) is None:
                if self.stop.wait(nap):
                    return
                nap = min(1.5 * nap, _LAST_NAP_SECONDS)
            if isinstance(part, int):
                # Which rank, and why, is said when the main threads meet.
                self.commit.drop(OSError(part, os.strerror(part)))
                return
            hashes[list(blocks)] = part
        self.commit.do(hashes)

    def _await_room(self) -> None:
        """Wait for blocks of old files, which keep a disk from new ones meanwhile."""
        end = time.monotonic() + _FREEING_SECONDS
        while gives_back() and time.monotonic() < end:
            if self.stop.wait(_FIRST_NAP_SECONDS):
                return

    def join(self) -> None:
        """Wait for the threads of this replica, which no longer wait for others.

        Not collective.
        """
        if self.writing is not None:
            self.stop.set()
            self.writing.join()
        _under_way.discard(self)

    def give_up(self, error: BaseException) -> None:
        """Give up, unless the checkpoint is there.

        Not collective.

        Parameters
        ----------
        error : BaseException
            Why.
        """
        self.join()
        if self.commit is not None:
            self.commit.drop(error)

    def finish_alone(self) -> None:
        """Finish without the other replicas' main threads, or give up.

        Not collective.
        """
        done = self.writing is None or self.writing.join(_PATIENCE_SECONDS)
        self.stop.set()
        if self.commit is not None:
            self.commit.drop(TimeoutError("not all replicas had written their parts"))
        error = self.commit.error if self.commit is not None else None
        if error is not None or not done:
            get_logger("checkpoint").warning(
                "expected the save of %s to be done at the end of the program, found "
                "%s; it is dropped: call wait() or close() before the end",
                *(self.order.path, error or "that this replica still writes"),
            )


def _number(error: BaseException) -> int:
    return getattr(error, "errno", None) or errno.EIO


_under_way: weakref.WeakSet[Save] = weakref.WeakSet()
# A child must not end, nor drop, what its parent saves.
os.register_at_fork(after_in_child=_under_way.clear)


def give_up_all(error: BaseException) -> None:
    """Give up all saves under way: their replicas will not meet again.

    Not collective.

    Parameters
    ----------
    error : BaseException
        Why.
    """
    for save in list(_under_way):
        save.give_up(error)


@atexit.register
def finish_all() -> None:
    """Finish all saves under way, or drop them with a warning: the program ends.

    Not collective.
    """
    for save in list(_under_way):
        save.finish_alone()
