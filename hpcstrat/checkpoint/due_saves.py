"""The decision at which steps to save to the disk, and to the memory of the nodes."""

from __future__ import annotations

import time

from hpcstrat.checkpoint.checkpoint_options import CheckpointOptions
from hpcstrat.checkpoint.interval import SaveInterval, mean_seconds_between_losses
from hpcstrat.checkpoint.keep.watcher_contract import watcher
from hpcstrat.checkpoint.node_memory.node_memory import NodeMemory
from hpcstrat.engine.typing import Replicas

__all__ = ["DueSaves"]


class DueSaves:
    """The intervals of one manager, to the disk and to the memory of the nodes."""

    def __init__(
        self, options: CheckpointOptions, ranks: Replicas, memory: NodeMemory | None
    ) -> None:
        self._memory = memory
        self._disk = SaveInterval(options.every, ranks)
        every = "auto" if type(options.memory) is bool else options.memory
        self._snapshots = SaveInterval(every, ranks)
        self._made_at = time.time()

    def is_save_due(self, step: int, cost_seconds: float) -> bool:
        """Return whether a save to the disk is due; see `SaveInterval.is_due`."""
        return self._disk.is_due(step, cost_seconds, self._mean_life())

    def is_snapshot_due(self, step: int) -> bool:
        """Return whether a snapshot is due; see `SaveInterval.is_due`."""
        memory = self._memory
        if memory is None or memory.problem:
            return False
        return self._snapshots.is_due(step, memory.seconds, self._mean_life())

    def saved(self, step: int | None) -> None:
        """Count steps to the next save to the disk from this one."""
        self._disk.restart(step)

    def end_save(self, step: int, began: float, cost_seconds: float) -> None:
        """Choose the interval of saves to the disk, after a save; collective."""
        self._disk.end(step, began, cost_seconds, self._mean_life())

    def end_snapshot(self, step: int, began: float) -> None:
        """Choose the interval of snapshots, after a snapshot or save; collective."""
        if self._memory is not None:
            cost = self._memory.seconds
            self._snapshots.end(step, began, cost, self._mean_life())

    def restart(self, disk_step: int | None, memory_step: int | None) -> None:
        """Count from the steps of the newest checkpoint and snapshot, after a restore.

        Where a step is None, a save is due in the next call.
        """
        self._disk.restart(disk_step)
        self._snapshots.restart(memory_step)

    def _mean_life(self) -> float:
        """Return the estimated seconds between losses of this run, on each rank."""
        memory, now = self._memory, time.time()
        started = self._made_at if memory is None else memory.first_start
        generation = watcher().generation if memory is None else memory.generation
        return mean_seconds_between_losses(generation - 1, now - started)

    def __repr__(self) -> str:
        """Show the intervals."""
        disk, memory = self._disk.steps, self._snapshots.steps
        return f"<DueSaves each {disk} steps to the disk, each {memory} to the memory>"
