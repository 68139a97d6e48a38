"""The steps of a save on all ranks.

Rank 0 makes the file. Every rank copies its blocks, and threads hash and write the
blocks. Rank 0 publishes the file when all parts are on the disk. The main threads make
collective calls at the start, and in `finish`. After a background save, the next
`wait`, `save` or `close` calls `finish`; `PendingSave` publishes earlier.
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

from hpcstrat.checkpoint.agreement import explained, on_rank_0
from hpcstrat.checkpoint.disk import create, goes_direct
from hpcstrat.checkpoint.file.commit_record import NONCE_BYTES, room_bytes
from hpcstrat.checkpoint.file.extents import FileLayout
from hpcstrat.checkpoint.file.image import (
    ImageMemory,
    Source,
    as_bytes,
    is_elsewhere,
)
from hpcstrat.checkpoint.file.schema import Header, list_checkpoints, step_of
from hpcstrat.checkpoint.file.skeleton import packed_python, state_bytes
from hpcstrat.checkpoint.file.skeleton_cache import SkeletonCache
from hpcstrat.checkpoint.keep.folder import Folder, identity_of, temporary_name
from hpcstrat.checkpoint.keep.retention import Retention
from hpcstrat.checkpoint.keep.watcher_contract import require_newest_generation
from hpcstrat.checkpoint.outcomes import SaveStatistics
from hpcstrat.checkpoint.save.part_exchange import DividedDataset, PartExchange
from hpcstrat.checkpoint.save.part_writer import KINDS_OF_WORK, RING_SLOTS
from hpcstrat.checkpoint.save.pending_save import (
    NewFile,
    PendingSave,
    Publication,
    SaveOptions,
)
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.arrays.kinds import is_device
from hpcstrat.engine.gpu.transfers import Downloads
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array, Replicas
from hpcstrat.errors import CheckpointError, UnavailableError

__all__ = ["Saver"]


class Saver:
    """Saves checkpoints for one `CheckpointManager`, one save at a time.

    ``ranks`` are all ranks of the strategy (`Strategy.all_ranks`).
    """

    def __init__(
        self,
        ranks: Replicas,
        folder: Folder,
        retention: Retention,
        memory: ImageMemory,
    ) -> None:
        self._ranks, self._folder, self._memory = ranks, folder, memory
        self._directory, self._retention = folder.path, retention
        self._num_cores = _num_cores(ranks)
        self._skeletons = SkeletonCache()
        self._plan: FileLayout | None = None
        self._current: PendingSave | None = None
        self._downloads: Downloads | None = None
        self.last: SaveStatistics | None = None
        self._blocking_seconds = self._background_seconds = 0.0

    @property
    def cost_seconds(self) -> float:
        """Time that the last save has taken from the program on this rank.

        This is the time until its return, and the processor time of its threads, if
        they have ended, or that of the save before.
        """
        return self._blocking_seconds + self._background_seconds

    def save(
        self,
        order: SaveOptions,
        header: Header,
        values: Mapping[str, Array],
        compare: Callable[[], None],
    ) -> None:
        """Save, or start a save in the background; no other save may be running.

        Collective over all ranks; raises CheckpointError on every rank. ``values`` are
        values over all replicas, or this rank's parts. The program may change these
        arrays after the return (on a GPU: by later work in its current stream).
        ``compare`` is collective, and runs while rank 0 makes the file (asynchronous
        save), or while threads write the file (other saves).
        """
        file, publication = self.make_file(order, header, compare)
        if file.plan is not None:
            self._plan = file.plan
        assert self._plan is not None
        save = self._current = PendingSave(
            order,
            header.step,
            file,
            self._plan,
            rank=self._ranks.rank,
            num_ranks=self._ranks.num_ranks,
        )
        save.publication = publication
        self._start(save, header, values)
        save.blocking_seconds = time.perf_counter() - order.began
        self._blocking_seconds = save.blocking_seconds
        if order.asynchronous:
            return
        try:
            # Compare while threads write; if copies differ, the file is not published.
            compare()
        except BaseException as error:
            self._drop(save, error)
            raise
        self.finish()

    def make_file(
        self,
        order: SaveOptions,
        header: Header,
        compare: Callable[[], None],
        *,
        outlives: bool = False,
    ) -> tuple[NewFile, Publication | None]:
        """Make the file of a save; return also its publication, on rank 0.

        Collective over all ranks. See `save` for ``compare``, and `temporary_name` for
        ``outlives``.
        """
        publications: list[Publication] = []
        try:
            file = self._made(
                order,
                partial(self._make, order, header, publications, outlives),
                compare if order.asynchronous else lambda: None,
            )
        except BaseException as error:
            for publication in publications:
                publication.drop(error)
            raise
        return file, publications[0] if publications else None

    def _start(
        self, save: PendingSave, header: Header, values: Mapping[str, Array]
    ) -> None:
        """Let this rank's threads write its blocks, after an exchange with other ranks.

        Collective over all ranks if they have parts of datasets.
        """
        asynchronous = save.order.asynchronous
        blocks = save.plan.parts(save.num_ranks)[save.rank]
        exchange = PartExchange(save.plan, self._ranks, save.order.path)
        # An asynchronous save needs memory for all blocks of this rank.
        slots = max(len(blocks), 1) if asynchronous else RING_SLOTS
        try:
            with exchange.prepared():
                data = _sources(values, exchange.plan(values))
                data |= state_bytes(header, save.file.python)
                downloads = self._from_device(values)
                image = self._memory.image(slots, save.plan.block_bytes)
                if downloads is not None:
                    downloads.begin()
            rounds = exchange.rounds()
            save.write(
                *(image, data, blocks, self._num_cores),
                downloads=downloads,
                rounds=rounds,
            )
        except UnavailableError as error:
            # Raise here: a save with parameter servers has only this replica.
            self._drop(save, error)
            raise
        except Exception as error:
            if exchange.raises:
                self._drop(save, error)
                raise
            # Do not raise here: `finish` raises an error on all ranks.
            save.error = error
        except BaseException as error:
            self._drop(save, error)
            raise

    def _from_device(self, values: Mapping[str, Array]) -> Downloads | None:
        """Return the copier of values from a GPU; None if no value is on a GPU."""
        if not any(map(is_device, values.values())):
            return None
        if self._downloads is None:
            self._downloads = Downloads()
        return self._downloads

    def _made(
        self,
        order: SaveOptions,
        make: Callable[[], NewFile],
        compare: Callable[[], None],
    ) -> NewFile:
        """Make the file in a thread of replica 0, while all ranks call ``compare``."""
        with ThreadPoolExecutor(1, "hpcstrat-make") as pool:
            if self._ranks.rank == 0:
                # If the system refuses a thread, `on_rank_0` makes the file here.
                with suppress(RuntimeError):
                    make = pool.submit(make).result
            compare()
            file: NewFile = on_rank_0(self._ranks, f"save of {order.path}", make)
        return file

    def _drop(self, save: PendingSave, error: BaseException) -> None:
        """Give up a save on this rank, and remove its file on replica 0."""
        self._current = None
        if save.publication is not None:
            save.publication.drop(error)
        try:
            save.join()
        except BaseException:
            # After an interrupt, threads may still use this memory: do not reuse it.
            self._memory.leave()
            raise

    def _make(
        self,
        order: SaveOptions,
        header: Header,
        publications: list[Publication],
        outlives: bool,
    ) -> NewFile:
        """Make the file, and append its publication to ``publications``.

        Called on replica 0, in a thread. The publication is not returned, because after
        an error or interrupt the caller gets no result, but must remove the file.
        """
        path = order.path
        damaged = self._retention.is_damaged
        every = [p for p in list_checkpoints(self._directory) if _step(p) > header.step]
        later = [] if order.abandons else [p for p in every if not damaged(p)]
        replaces = order.replaces or damaged(path)
        exists = not replaces and os.path.lexists(path)
        if later or exists:
            # The advice to overwrite is wrong while another job saves these files.
            self._folder.require_no_other_job()
        if later:
            raise CheckpointError(
                f"expected no checkpoint of a later step than {header.step} in "
                f"{self._directory}, found {', '.join(map(os.path.basename, later))}; "
                "restore the newest, use another folder, or pass overwrite=True to "
                "remove them"
            )
        if exists:
            raise FileExistsError(errno.EEXIST, "File exists", path)
        python = packed_python(header)
        skeleton = self._skeletons.skeleton(header, python)
        plan = skeleton.plan
        name = temporary_name(os.path.basename(path), outlives=outlives)
        temporary = os.path.join(self._directory, name)
        room = room_bytes(plan, self._ranks.num_ranks) if order.asynchronous else 0
        publication = Publication(
            path=path,
            temporary=temporary,
            replaces=replaces,
            found=identity_of(path),
            abandoned=[(p, identity_of(p)) for p in every if order.abandons],
            retention=self._retention,
            created_unix_ns=time.time_ns(),
        )
        publication.header, publication.skeleton = header, skeleton
        require_newest_generation(f"a save in {self._directory}")
        # Make the folder only now, so that a refused save makes no folder.
        self._folder.make()
        create(temporary, plan.size + room)
        publications.append(publication)
        return NewFile(
            temporary,
            secrets.token_bytes(NONCE_BYTES),
            python,
            # Send no plan if the other replicas have this plan from the last save.
            None if plan is self._plan else plan,
            goes_direct(self._ranks.settings.direct_io, self._directory),
        )

    def busy(self) -> bool:
        """Return whether a replica is still writing a save, or freeing removed files.

        Collective over the strategy's replicas if a save has not been finished.
        """
        save = self._current
        if save is None:
            return False
        ended = save.part is None or save.part.ended()
        votes = self._ranks.collectives.all_gather_object(
            (ended, save.failed), f"whether the save of {save.order.path} is done"
        )
        # After a failure on one replica the save is over, even if threads still wait.
        return not all(ended for ended, _ in votes) and not any(
            failed for _, failed in votes
        )

    def finish(self) -> None:
        """Wait until the current save, if there is one, is on the disk.

        Collective over the strategy's replicas; raises CheckpointError on every rank.
        """
        save = self._current
        if save is None:
            return
        part = save.part
        try:
            save.join()
        except BaseException as interrupt:
            if not save.order.asynchronous:
                # Give up: the program may change variables that are not yet written.
                self._drop(save, interrupt)
            raise
        error = save.error or (part.error if part is not None else None)
        what = f"save of {save.order.path}"
        mine: tuple[bytes, dict[str, float]] = b"", dict.fromkeys(KINDS_OF_WORK, 0.0)
        if part is not None:
            mine = part.hashes.tobytes(), part.seconds
        try:
            parts = self._ranks.collectives.all_gather_object(
                (None if error is None else explained(what, error), mine),
                f"end of the {what}",
            )
            self._current = None
            wrong = [
                f"on rank {rank} {text}"
                for rank, (text, _) in enumerate(parts)
                if text is not None
            ]
            hashes = [part[0] for _, part in parts]
            conclude = partial(_conclude, save, hashes, wrong)
            total = on_rank_0(self._ranks, what, conclude)
        except BaseException as problem:
            # Remove the file, because after the loss of a rank nothing would finish it.
            self._drop(save, problem)
            raise
        self._account(save, [part[1] for _, part in parts], total)

    def _account(
        self, save: PendingSave, seconds: list[dict[str, float]], total: float
    ) -> None:
        """Set ``last``; ``seconds`` has each replica's times, ``total`` the save's."""
        asynchronous = save.order.asynchronous
        if not asynchronous:
            self._blocking_seconds, self._background_seconds = total, 0.0
        elif save.part is not None:
            self._background_seconds = save.part.cpu_seconds
        self.last = SaveStatistics(
            path=save.order.path,
            step=save.step,
            nbytes=save.plan.size,
            asynchronous=asynchronous,
            blocking_seconds=save.blocking_seconds if asynchronous else total,
            copy_seconds=seconds[save.rank]["copy"],
            total_seconds=total,
            hash_seconds=max(each["hash"] for each in seconds),
            write_seconds=max(each["write"] for each in seconds),
            flush_seconds=max(each["flush"] for each in seconds),
            bytes_per_second=save.plan.size / total,
        )
        if self._ranks.rank == 0:
            get_logger("checkpoint").info("saved %s", self.last)

    def close(self) -> None:
        """Wait for the current save as `finish` does, and free all memory."""
        try:
            self.finish()
        finally:
            self._memory.release()
            self._plan = self._downloads = None
            self._skeletons.close()


def _num_cores(ranks: Replicas) -> int:
    if ranks.num_ranks > 1:
        return int(ranks.topology.cores_each)
    # In a job of several ranks, the other ranks may use the other cores.
    alone = launch_from_environment().size <= 1
    return len(os.sched_getaffinity(0)) if alone else 1


def _sources(
    values: Mapping[str, Any], divided: Mapping[str, DividedDataset]
) -> dict[str, Source]:
    """Return each value's source of bytes: its parts, an `Elsewhere`, or an array."""
    rest = {path: value for path, value in values.items() if path not in divided}
    return {
        **divided,
        **{p: v if is_elsewhere(v) else as_bytes(v) for p, v in rest.items()},
    }


def _conclude(save: PendingSave, hashes: list[bytes], wrong: list[str]) -> float:
    """Publish the file on replica 0, unless a thread has; return the save's seconds."""
    publication = save.publication
    assert publication is not None
    # If a thread has published the file, ``wrong`` is only of replicas without blocks.
    if wrong and not publication.ended:
        error = CheckpointError("; ".join(wrong))
        publication.drop(error)
        raise error
    every = np.zeros(save.plan.num_blocks, np.uint64)
    for blocks, own in zip(save.plan.parts(len(hashes)), hashes, strict=True):
        every[list(blocks)] = np.frombuffer(own, np.uint64)
    publication.do(every)
    if publication.error is not None:
        raise publication.error
    return publication.ended - save.order.began


def _step(path: str) -> int:
    return step_of(path) or 0
