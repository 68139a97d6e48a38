"""A program that restores its state, checks each byte, and kills one of its ranks.

Arguments: folder of checkpoints, folder of pretend nodes, number of nodes, number of
steps, rank to kill (-1: none), step at which it is killed, and the share of its copied
bytes after which it is killed. Rank 0 writes the restored step, and then each step
whose snapshot has ended, to the standard output.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.checkpoint.node_memory import node_memory, snapshot_blocks
from hpcstrat.cluster_resolver import launch_from_environment

_WEIGHTS, _ROWS = 300_001, 200_000
_DISK_STEPS = 7


def main() -> None:
    folder, memory, nodes, steps, victim, death, share = sys.argv[1:]
    launch = launch_from_environment()
    path = os.path.join(memory, f"node-{launch.rank * int(nodes) // launch.size}")
    os.makedirs(path, exist_ok=True)
    os.environ["HPCSTRAT_WATCH_MEMORY"] = path
    strategy = hs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = hs.Variable(np.zeros(_WEIGHTS))
        rows = hs.Variable(
            np.zeros(_ROWS), synchronization="on_read", aggregation="none"
        )
    options = hs.CheckpointOptions(memory=1, every=_DISK_STEPS)
    manager = hs.CheckpointManager(folder, options=options, weights=weights, rows=rows)
    step = manager.restore_or_initialize() or 0
    if step:
        assert (weights.component.view(np.uint64) == _weights_at(step)).all()
        assert (rows.component == _rows_at(step, strategy.rank)).all()
    if strategy.rank == 0:
        print("restored", step, flush=True)
    last = step + int(steps)
    while step < last:
        step += 1
        weights.component.view(np.uint64)[...] = _weights_at(step)
        rows.component[...] = _rows_at(step, strategy.rank)
        if strategy.rank == int(victim) and step == last - int(death):
            _die_in_a_snapshot(float(share), strategy.num_replicas_in_sync)
        manager.save_if_due(step)
        if strategy.rank == 0:
            print("kept", step, flush=True)
    manager.close()


def _weights_at(step: int) -> Any:
    words = np.arange(_WEIGHTS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words + np.uint64(step)


def _rows_at(step: int, rank: int) -> Any:
    return np.arange(_ROWS) * 0.5 + step + 1000 * rank


def _die_in_a_snapshot(share: float, num_ranks: int) -> None:
    """Kill this process in the next snapshot, after a share of its bytes is copied.

    A share of 1 and more is after the copies: before or after the record is written.
    """
    left = int(share * 8 * (_WEIGHTS / num_ranks + _ROWS))
    copying = snapshot_blocks._HashedCopy
    copy = copying._copy

    def copy_some(self: Any, data: Any) -> None:
        nonlocal left
        if data.size > left:
            whole = left // 1024 * 1024
            start = self._place
            self._target[start : start + whole] = data[:whole]
            os.kill(os.getpid(), signal.SIGKILL)
        left -= data.size
        copy(self, data)

    copying._copy = copy_some  # type: ignore[method-assign]
    if share >= 1:
        conclude = node_memory.NodeMemory._conclude

        def die(self: Any, *args: Any) -> None:
            if share > 1:
                conclude(self, *args)
            os.kill(os.getpid(), signal.SIGKILL)

        node_memory.NodeMemory._conclude = die  # type: ignore[method-assign]
        copying._copy = copy  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
