"""The last steps of a save, on replica 0: from parts on the disk to a checkpoint.

The file gets its name only when all of it is on the disk, and older checkpoints go only
when that name is: at each moment, a loss of power leaves a whole one.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from hpcstrat.checkpoint.disk import (
    flush,
    flush_folder,
    open_to_write,
    publish,
    remove,
    write_all,
)
from hpcstrat.checkpoint.file.commit_record import pack_record
from hpcstrat.checkpoint.file.schema import Header
from hpcstrat.checkpoint.file.skeleton import Skeleton
from hpcstrat.checkpoint.keep.folder import Identity, identity_of
from hpcstrat.checkpoint.keep.keep_rules import Found
from hpcstrat.checkpoint.keep.retention import Retention
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.typing import Array
from hpcstrat.errors import CheckpointError

__all__ = ["Publication", "Target"]


@dataclass(slots=True)
class Target:
    """The path of a checkpoint, and the file that was there when its save began."""

    path: str
    # Its name until then, in the same folder.
    temporary: str
    replaces: bool
    # The file that is replaced: another one there at the end is another job's.
    found: Identity | None
    # Checkpoints of later steps, which go once this one is durable.
    abandoned: list[tuple[str, Identity | None]]
    # Removes older ones then.
    retention: Retention


class Publication:
    """From parts on the disk to a checkpoint, done or given up once.

    By the thread that saves or by the caller, whoever is first; what comes later
    changes nothing.
    """

    def __init__(
        self, target: Target, header: Header, skeleton: Skeleton, created_unix_ns: int
    ) -> None:
        self.target = target
        self.error: BaseException | None = None
        # time.perf_counter() when it was durable; 0 before.
        self.ended = 0.0
        self._header = header
        self._skeleton = skeleton
        self._created = created_unix_ns
        # An interrupt may leave it with the thread that gives up then.
        self._lock = threading.RLock()

    @property
    def over(self) -> bool:
        """Whether it has succeeded or failed."""
        return self.ended > 0 or self.error is not None

    def do(self, hashes: Array) -> None:
        """Make the checkpoint, all parts of which are on the disk; keep an error."""
        with self._lock:
            if self.over:
                return
            replaces = published = False
            try:
                self._write(hashes)
                replaces = self._replaces()
                publish(self.target.temporary, self.target.path, replaces)
                published = True
                flush_folder(os.path.dirname(self.target.path))
            except BaseException as error:
                self.error = error
                self._remove()
                if published and not replaces:
                    # Its name may not outlive a loss of power.
                    with suppress(OSError):
                        remove(self.target.path)
                return
            try:
                self._remove_abandoned()
            except BaseException as error:
                self.error = error
                return
            self.ended = time.perf_counter()
            # Only now is the new one durable.
            self._tidy()

    def drop(self, error: BaseException) -> None:
        """Give up, unless it is over."""
        with self._lock:
            if not self.over:
                self.error = error
                self._remove()

    def _remove(self) -> None:
        with suppress(OSError):
            remove(self.target.temporary)

    def _write(self, hashes: Array) -> None:
        """Write all but the data, and cut off what was behind the end."""
        plan, header = self._skeleton.plan, self._header
        prefix = self._skeleton.prefix(header, self._created)
        table = hashes.astype("<u8").tobytes()
        prefix[plan.table_start : plan.table_start + len(table)] = table
        record = pack_record(plan, bytes(prefix), header.step, header.num_replicas)
        # Not direct: these pieces are neither aligned nor large.
        file = open_to_write(self.target.temporary, False)
        try:
            write_all(file, memoryview(prefix), 0)
            write_all(file, memoryview(record), plan.data_end)
            # Verdicts of a save in the background stand behind the record.
            os.ftruncate(file, plan.size)
            flush(file)
        finally:
            os.close(file)

    def _replaces(self) -> bool:
        target = self.target
        if not target.replaces:
            return False
        there = identity_of(target.path)
        if there is not None and there != target.found:
            raise CheckpointError(
                f"expected {target.path} to stay as it was while it was being "
                "replaced, found a new file there; another job saves in this folder: "
                "use another one"
            )
        return there is not None

    def _remove_abandoned(self) -> None:
        """Remove checkpoints of later steps, which would be taken for the newest."""
        left = []
        for path, identity in self.target.abandoned:
            try:
                # Not what another job has put there since.
                if identity_of(path) == identity:
                    remove(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                left.append(f"{os.path.basename(path)} ({error.strerror})")
        if left:
            raise CheckpointError(
                f"expected to remove the checkpoints of later steps than that of "
                f"{self.target.path}, which is saved, found that these stay: "
                f"{', '.join(left)}; remove them, or they are restored as the newest"
            )
        if self.target.abandoned:
            flush_folder(os.path.dirname(self.target.path))

    def _tidy(self) -> None:
        header = self._header
        new = Found(self.target.path, header.step, self._created, header.metrics)
        try:
            self.target.retention.apply(new)
        except Exception as error:
            # The checkpoint is there all the same.
            get_logger("checkpoint").warning(
                "old checkpoints in %s were not removed: %s",
                os.path.dirname(self.target.path),
                error,
            )
