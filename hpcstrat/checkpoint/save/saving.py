"""A save on all replicas: who does what, and when all know that it is done.

Replica 0 makes the file; every replica copies its blocks, which threads hash and write;
replica 0 commits when all parts are on the disk. The main threads meet twice: at the
start, and when the save is asked for again, by `wait`, another save or `close`. A save
in the background is committed without the second meeting, too: see `verdicts`.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from hpcstrat.arrays.kinds import is_device
from hpcstrat.checkpoint.common_verdict import explained, on_first
from hpcstrat.checkpoint.disk.disk import create
from hpcstrat.checkpoint.disk.file_systems import is_local
from hpcstrat.checkpoint.file.extents import Plan
from hpcstrat.checkpoint.file.image import ImageMemory, Source, as_bytes
from hpcstrat.checkpoint.file.part_verdicts import NONCE_BYTES, room_bytes
from hpcstrat.checkpoint.file.schema import Header, list_checkpoints, step_of
from hpcstrat.checkpoint.file.skeleton import Skeleton, packed_python, state_bytes
from hpcstrat.checkpoint.keep.folder import Folder, identity_of, temporary_name
from hpcstrat.checkpoint.keep.retention import Retention
from hpcstrat.checkpoint.reports import SaveStatistics
from hpcstrat.checkpoint.save.background import Order, Save, Start
from hpcstrat.checkpoint.save.commit import Commit, Target
from hpcstrat.checkpoint.save.rows import Rows, exchange_rows
from hpcstrat.checkpoint.save.writing import KINDS_OF_WORK, RING_SLOTS
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.errors import CheckpointError
from hpcstrat.gpu.transfers import Downloads
from hpcstrat.logs import get_logger
from hpcstrat.typing import Array, Replicas

__all__ = ["Saver"]


class Saver:
    """Saves of one manager, one at a time.

    Parameters
    ----------
    strategy : Strategy
        Whose replicas save.
    folder : Folder
        Where.
    retention : Retention
        Removes what need not stay; replica 0's is used.
    memory : ImageMemory
        For copies.

    Attributes
    ----------
    last : SaveStatistics or None
        Of the last save that is done.
    """

    def __init__(
        self,
        strategy: Replicas,
        folder: Folder,
        retention: Retention,
        memory: ImageMemory,
    ) -> None:
        self._strategy, self._folder, self._memory = strategy, folder, memory
        self._directory, self._retention = folder.path, retention
        self._num_cores = _num_cores(strategy)
        self._skeletons: list[Skeleton] = []
        self._plan: Plan | None = None
        self._current: Save | None = None
        self._downloads: Downloads | None = None
        self.last: SaveStatistics | None = None

    def save(
        self,
        order: Order,
        header: Header,
        values: Mapping[str, Array],
        compare: Callable[[], None],
    ) -> None:
        """Save, or start to.

        Collective over the strategy's replicas. No save may be under way.

        Parameters
        ----------
        order : Order
            How.
        header : Header
            What.
        values : mapping of str to ndarray
            Logical values, by path; of those with a row for each replica, the row of
            this one. May change afterwards; in the memory of a GPU, by what its current
            stream is then given.
        compare : callable
            What finds out whether the values may be saved, while the file is being made
            or, where the caller waits for the end, written; collective, and raises on
            every rank.

        Raises
        ------
        CheckpointError
            On every rank.
        """
        commits: list[Commit] = []
        try:
            start = self._made(
                order,
                partial(self._start, order, header, commits),
                compare if order.asynchronous else _nothing,
            )
        except BaseException as error:
            for commit in commits:
                commit.drop(error)
            raise
        if start.plan is not None:
            self._plan = start.plan
        assert self._plan is not None
        place = self._strategy.replica_id, self._strategy.num_replicas_in_sync
        save = self._current = Save(*(order, start, self._plan, place), header.step)
        save.commit = commits[0] if commits else None
        blocks = save.plan.parts(place[1])[place[0]]
        rows = self._rows(save, values)
        try:
            data: dict[str, Source] = {
                path: as_bytes(value)
                for path, value in values.items()
                if path not in rows
            }
            data |= rows
            data |= state_bytes(header, start.python)
            # All of this replica's blocks, or a few at a time.
            slots = max(len(blocks), 1) if order.asynchronous else RING_SLOTS
            downloads = self._from_device(values)
            image = self._memory.image(slots, save.plan.block_bytes)
            if downloads is not None:
                downloads.begin(self._memory.lock())
            save.write(image, data, blocks, self._num_cores, downloads=downloads)
        except Exception as error:
            # All replicas raise it together, when they meet.
            save.error = error
        except BaseException as error:
            self._drop(save, error)
            raise
        save.blocking_seconds = time.perf_counter() - order.began
        if order.asynchronous:
            return
        try:
            compare()
        except BaseException as error:
            self._drop(save, error)
            raise
        self.finish()

    def _from_device(self, values: Mapping[str, Array]) -> Downloads | None:
        """Return what copies values from a GPU; None where none is there."""
        if not any(map(is_device, values.values())):
            return None
        if self._downloads is None:
            self._downloads = Downloads()
        return self._downloads

    def _made(
        self, order: Order, make: Callable[[], Start], compare: Callable[[], None]
    ) -> Start:
        """Have replica 0 make the file, and compare meanwhile."""
        with ThreadPoolExecutor(1, "hpcstrat-make") as pool:
            if self._strategy.replica_id == 0:
                # Where the system gives no more threads, it is made when all meet.
                with suppress(RuntimeError):
                    make = pool.submit(make).result
            compare()
            start: Start = on_first(self._strategy, f"save of {order.path}", make)
        return start

    def _rows(self, save: Save, values: Mapping[str, Array]) -> dict[str, Rows]:
        """Return what this replica writes of values with a row for each replica."""
        if not save.plan.has_rows:
            return {}
        try:
            fetch = None
            if (downloads := self._from_device(values)) is not None:
                downloads.begin(locked=False)
                fetch = downloads.fetch
            return exchange_rows(
                *(save.plan, values, self._strategy, save.order.path), fetch=fetch
            )
        except BaseException as error:
            self._drop(save, error)
            raise

    def _drop(self, save: Save, error: BaseException) -> None:
        """Give up a save, which is not committed before all have met, on this rank."""
        self._current = None
        if save.commit is not None:
            save.commit.drop(error)
        try:
            save.join()
        except BaseException:
            # Interrupted: threads may still use this memory.
            self._memory.leave()
            raise

    def _start(self, order: Order, header: Header, commits: list[Commit]) -> Start:
        """Make the file; on replica 0."""
        path = order.path
        damaged = self._retention.is_damaged
        every = [p for p in list_checkpoints(self._directory) if _step(p) > header.step]
        later = [] if order.abandons else [p for p in every if not damaged(p)]
        if later:
            raise CheckpointError(
                f"expected no checkpoint of a later step than {header.step} in "
                f"{self._directory}, found {', '.join(map(os.path.basename, later))}; "
                "restore the newest, use another folder, or pass overwrite=True to "
                "remove them"
            )
        replaces = order.replaces or damaged(path)
        if not replaces and os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, "File exists", path)
        python = packed_python(header)
        skeleton = self._skeleton(header, python)
        plan = skeleton.plan
        temporary = os.path.join(
            self._directory, temporary_name(os.path.basename(path))
        )
        room = room_bytes(plan, header.num_replicas) if order.asynchronous else 0
        abandoned = [(p, identity_of(p)) for p in every if order.abandons]
        target = Target(
            *(path, temporary, replaces, identity_of(path), abandoned),
            self._retention,
        )
        self._folder.make()
        create(temporary, plan.size + room)
        commits.append(Commit(target, header, skeleton, time.time_ns()))
        nonce = secrets.token_bytes(NONCE_BYTES)
        # The others have it, unless an earlier save failed before they were told.
        sent = None if plan is self._plan else plan
        return Start(temporary, nonce, python, sent, self._goes_direct())

    def _skeleton(self, header: Header, python: Mapping[str, bytes]) -> Skeleton:
        """Return the structures: those of a save before, or new ones."""
        known = [each for each in self._skeletons if each.fits(header, python)]
        others = [each for each in self._skeletons if each not in known]
        # Of two kinds of saves in turn, such as with metrics now and then, both stay.
        for old in others[:-1]:
            self._skeletons.remove(old)
            old.close()
        if not known:
            known = [Skeleton(header, python)]
        self._skeletons = [*others[-1:], *known]
        return known[0]

    def _goes_direct(self) -> bool:
        choice = self._strategy.settings.direct_io
        return choice == "on" or (choice == "auto" and is_local(self._directory))

    def busy(self) -> bool:
        """Whether a save is still being written, or old ones freed, on some replica.

        Collective over the strategy's replicas, if there is one.

        Returns
        -------
        bool
            The same everywhere.
        """
        save = self._current
        if save is None:
            return False
        ended = save.writing is None or save.writing.ended()
        votes = self._strategy.collectives.all_gather_object(
            (ended, save.failed), f"whether the save of {save.order.path} is done"
        )
        # Where it has failed on one replica, the others may wait for that one's part.
        return not all(ended for ended, _ in votes) and not any(
            failed for _, failed in votes
        )

    def finish(self) -> None:
        """Wait until a save is durable, if there is one.

        Collective over the strategy's replicas.

        Raises
        ------
        CheckpointError
            On every rank, if it failed on any.
        """
        save = self._current
        if save is None:
            return
        writing = save.writing
        try:
            save.join()
        except BaseException as interrupt:
            if not save.order.asynchronous:
                # What the threads still have to copy may change from here on.
                self._drop(save, interrupt)
            raise
        error = save.error or (writing.error if writing is not None else None)
        what = f"save of {save.order.path}"
        mine: tuple[bytes, dict[str, float]] = b"", dict.fromkeys(KINDS_OF_WORK, 0.0)
        if writing is not None:
            mine = writing.hashes.tobytes(), writing.seconds
        try:
            parts = self._strategy.collectives.all_gather_object(
                (None if error is None else explained(what, error), mine),
                f"end of the {what}",
            )
            self._current = None
            wrong = [
                f"on replica {rank} {text}"
                for rank, (text, _) in enumerate(parts)
                if text is not None
            ]
            conclude = partial(_conclude, save, parts, wrong)
            total = on_first(self._strategy, what, conclude)
        except BaseException as problem:
            # A rank may have been lost: nobody would come back to this file.
            self._drop(save, problem)
            raise
        self._account(save, [part for _, part in parts], total)

    def _account(self, save: Save, parts: list[Any], total: float) -> None:
        seconds = [part[1] for part in parts]
        asynchronous = save.order.asynchronous
        self.last = SaveStatistics(
            path=save.order.path,
            step=save.step,
            nbytes=save.plan.size,
            asynchronous=asynchronous,
            blocking_seconds=save.blocking_seconds if asynchronous else total,
            copy_seconds=seconds[save.place[0]]["copy"],
            total_seconds=total,
            hash_seconds=max(each["hash"] for each in seconds),
            write_seconds=max(each["write"] for each in seconds),
            flush_seconds=max(each["flush"] for each in seconds),
            bytes_per_second=save.plan.size / total,
        )
        if self._strategy.replica_id == 0:
            get_logger("checkpoint").info("saved %s", self.last)

    def close(self) -> None:
        """Wait for a save under way, and give back all memory.

        Collective over the strategy's replicas.

        Raises
        ------
        CheckpointError
            On every rank, if the save failed.
        """
        try:
            self.finish()
        finally:
            self._memory.release()
            self._plan = self._downloads = None
            while self._skeletons:
                self._skeletons.pop().close()


def _num_cores(strategy: Replicas) -> int:
    """Return how many cores are there for this replica."""
    if strategy.num_replicas_in_sync > 1:
        return int(strategy.topology.cores_each)
    # Of a job of several ranks, each with a strategy of its own, not all is known.
    alone = launch_from_environment().size <= 1
    return len(os.sched_getaffinity(0)) if alone else 1


def _nothing() -> None:
    pass


def _conclude(save: Save, parts: list[Any], wrong: list[str]) -> float:
    """Commit, if the thread has not, on replica 0; return how long it all took."""
    commit = save.commit
    assert commit is not None
    # Whose part is empty may fail without harm.
    if wrong and not commit.ended:
        error = CheckpointError("; ".join(wrong))
        commit.drop(error)
        raise error
    hashes = np.zeros(save.plan.num_blocks, np.uint64)
    for blocks, (_, part) in zip(save.plan.parts(len(parts)), parts, strict=True):
        hashes[list(blocks)] = np.frombuffer(part[0], np.uint64)
    commit.do(hashes)
    if commit.error is not None:
        raise commit.error
    return commit.ended - save.order.began


def _step(path: str) -> int:
    return step_of(path) or 0
