"""The steps of a restore: find a checkpoint, match it with the program, and load it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcstrat.checkpoint.agreement import on_rank_0
from hpcstrat.checkpoint.file.image import ImageMemory
from hpcstrat.checkpoint.file.reader import CheckpointFile
from hpcstrat.checkpoint.file.schema import Header, step_of
from hpcstrat.checkpoint.keep.retention import Retention, find_restorable, warn
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.checkpoint.node_memory.held_blocks import HeldSnapshot
from hpcstrat.checkpoint.node_memory.memory_saver import MemorySaver
from hpcstrat.checkpoint.node_memory.node_memory import NodeMemory
from hpcstrat.checkpoint.objects import Objects
from hpcstrat.checkpoint.outcomes import RestoreReport
from hpcstrat.checkpoint.restore.entry_matching import match_entries, renamed
from hpcstrat.checkpoint.restore.parallel_read import restore_values
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.observe.timeline import traced
from hpcstrat.engine.typing import Replicas
from hpcstrat.errors import CheckpointMismatchError, CorruptCheckpointError
from hpcstrat.safety import newest_checkpoint

__all__ = ["Restorer"]


class _Restorable(NamedTuple):
    """A checkpoint, and the snapshot in node memory if the checkpoint is one."""

    file: CheckpointFile
    held: HeldSnapshot | None = None


class Restorer:
    """Restores checkpoints for one `CheckpointManager`."""

    def __init__(
        self,
        strategy: Replicas,
        directory: str,
        objects: Objects,
        retention: Retention,
        memory: ImageMemory,
        *,
        node_memory: NodeMemory | None,
        saver: MemorySaver | None,
    ) -> None:
        self._strategy = strategy
        self._ranks = strategy.all_ranks
        self._collectives = self._ranks.collectives
        self._objects = objects
        self._retention, self._memory = retention, memory
        self._node_memory, self._saver = node_memory, saver
        self.directory = directory
        self.last: RestoreReport | None = None
        # True if the last restore left values to objects that make variables later.
        self.defers = False
        # Step of the newest checkpoint on the disk, or None, at the last restore.
        self.disk_step: int | None = None

    @traced("restore", "checkpoint")
    def restore(
        self, path: str | None, rename: Mapping[str, str], **rules: Any
    ) -> int | None:
        """Restore the checkpoint at ``path``, or the newest one; return its step.

        Without a path, the newest one may be a snapshot in node memory. Collective over
        all ranks. Returns None if there is no checkpoint. ``rename`` maps saved paths
        to the program's; ``rules`` are arguments of `match_entries`. Raises
        CheckpointError on every rank before variables change.
        """
        began = time.perf_counter()
        if self._collectives.channel is not None:
            self._collectives.channel.failures.meet()
        passed_over: list[str] = []
        damaged: set[bytes] = set()
        while True:
            found, passed_over = self._search(path, passed_over, damaged)
            if found is None:
                return None
            try:
                step = self._load(found, began, passed_over, rename, rules)
                if path is None and found.held is None and self._ranks.rank == 0:
                    newest_checkpoint.tell(found.file.path)
                return step
            except CorruptCheckpointError as error:
                # All ranks raise this error together: the data are damaged, which the
                # search does not read. Try the next older checkpoint.
                if found.held is None:
                    self._distrust([found.file.path])
                if path is not None:
                    raise
                if self._ranks.rank == 0:
                    warn(error)
                if found.held is None:
                    passed_over = [*passed_over, found.file.path]
                else:
                    damaged.add(found.held.digest)

    def _search(
        self, path: str | None, passed_over: list[str], damaged: set[bytes]
    ) -> tuple[_Restorable | None, list[str]]:
        """Return the checkpoint or snapshot to restore, and the files passed over."""
        held = None
        if path is None and self._node_memory is not None:
            held = self._node_memory.find(damaged)

        def search() -> tuple[str | None, bool, CheckpointFile | None, list[str]]:
            key = None if held is None else held.key
            saved = None if self._saver is None else self._saver.settle(key)
            found = find_restorable(self.directory, path, passed_over, held is None)
            return saved, os.path.isdir(self.directory), *found

        saved, exists, file, passed_over = on_rank_0(
            self._strategy, "search for a checkpoint", search
        )
        self._distrust(passed_over)
        self.disk_step = None if file is None else file.header.step
        if self._saver is not None:
            self._saver.follow(saved)
        if saved is not None:
            # It will soon be on the disk.
            self.disk_step = step_of(saved)
        # Without a watcher, a missing folder shows the start of another run.
        another = not exists and not watcher().run
        if another or self._node_memory is None or _is_newer(file, held):
            return None if file is None else _Restorable(file), passed_over
        assert held is not None
        self._node_memory.follow(held)
        return _Restorable(held.file, held), passed_over

    def _distrust(self, paths: list[str]) -> None:
        if self._ranks.rank == 0:
            self._retention.distrust(paths)

    def _look_at_threads(self, header: Header) -> None:
        """Log a warning if ``math_threads`` differs from that of the saving run."""
        saved, strategy = header.math_threads, self._strategy
        now = strategy.settings.math_threads if strategy.logical else saved
        if saved and now != saved and self._ranks.rank == 0:
            get_logger("checkpoint").warning(
                "restored step %d of a run with math_threads=%d into a run with %s, "
                "whose results have other bits; set HPCSTRAT_MATH_THREADS=%d for the "
                "same bits",
                *(header.step, saved, now, saved),
            )

    def _load(
        self,
        found: _Restorable,
        began: float,
        passed_over: list[str],
        rename: Mapping[str, str],
        rules: dict[str, Any],
    ) -> int:
        file, held = found
        variables, split = self._objects.variables(), self._strategy.split
        # The barrier fails if this text, with file, variables and rules, differs.
        how = {**rules, "rename": dict(rename)}
        self._collectives.barrier(
            f"restore of {file.path if held is None else held.name} into "
            f"{self._objects.describe(variables)} ({how})"
        )
        self._look_at_threads(file.header)
        header = renamed(file.header, rename)
        try:
            matches, unmade = match_entries(
                header,
                variables,
                self._objects,
                num_replicas=self._strategy.num_replicas_in_sync,
                num_groups=0 if split is None else split.num_groups,
                **rules,
            )
        except CheckpointMismatchError as error:
            if held is None:
                raise
            folder = os.path.dirname(file.path)
            raise CheckpointMismatchError(
                f"{error}; it is a snapshot in the memory of nodes: to start without "
                f"it, remove {folder} on them"
            ) from error
        nbytes, read_seconds = restore_values(
            file, matches, self._strategy, self._memory, held
        )
        only = rules.get("only")
        self._objects.reset(unmade)
        self.defers = any(match.variable is None for match in matches)
        saved, now = header.num_replicas, self._strategy.num_replicas_in_sync
        rows = [m.entry.shape[0] for m in matches if m.entry.per_group]
        if rows and split is not None:
            # A group's variable accumulates over one group: count one group's replicas.
            saved, now = saved // rows[0], now // split.num_groups
        self._objects.end_restore(saved, now, only)
        self._objects.restore_states(header, only)
        taken = {match.entry.path for match in matches}
        self.last = RestoreReport(
            path=file.path,
            step=header.step,
            num_replicas=header.num_replicas,
            verified=file.vouched is not None,
            nbytes=nbytes,
            seconds=time.perf_counter() - began,
            read_seconds=read_seconds,
            # Report unused paths as they are in the file, without ``rename``.
            unused=tuple(sorted(file.header.entries.keys() - taken)),
            passed_over=tuple(passed_over),
        )
        return header.step


def _is_newer(file: CheckpointFile | None, held: HeldSnapshot | None) -> bool:
    """Return whether a file was saved after a snapshot, at another step."""
    if held is None:
        return True
    if file is None or file.header.step == held.file.header.step:
        return False
    return file.header.created_unix_ns > held.file.header.created_unix_ns
