"""Save in a folder of several jobs: ``save_shared.py FOLDER NUMBER HOW COUNT WHICH``.

The values follow from the step and from ``NUMBER``, the number of the job. ``HOW`` is
``wait`` (for each save) or ``go`` (continue while the save runs). A job makes
``FOLDER/ready-NUMBER``, and begins when ``FOLDER/start-NUMBER`` exists. With ``WHICH``
= ``same`` the job tries to save the steps from 1 to ``COUNT``; with ``next`` it saves
the step after the newest, until ``COUNT`` saves were acknowledged. Rank 0 writes these
steps into ``FOLDER/acknowledged-NUMBER``, and the errors of refused saves into
``FOLDER/refused-NUMBER``.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import hpcstrat as hs
from hpcstrat.checkpoint.file.schema import step_of
from hpcstrat.errors import CheckpointError
from hpcstrat.testing.job import wait_until

# Large enough that every rank writes some blocks.
LARGE = 300_000


def make_objects() -> dict[str, Any]:
    """Return the saved variables, with all values zero."""
    return {"large": hs.Variable(np.zeros(LARGE)), "job": hs.Variable(0, dtype="int64")}


def large_value(job: int, step: int) -> Any:
    """Return the value of the large variable of a job after a step."""
    return np.random.default_rng((job, step)).standard_normal(LARGE)


def _no_locks(*_: Any) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def _steps(strategy: Any, manager: Any, which: str, count: int) -> Iterator[int]:
    if which == "same":
        yield from range(1, 1 + count)
        return
    while True:
        newest = max((step_of(path) or 0 for path in manager.checkpoints), default=0)
        yield strategy.broadcast_object(newest) + 1


def main() -> None:
    """Save all steps, and continue after each save that is refused."""
    # Act like a file system without locks, where no job is refused by a lock.
    fcntl.lockf = _no_locks
    folder, job, how = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    count, which = int(sys.argv[4]), sys.argv[5]
    strategy = hs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        objects = make_objects()
    first = strategy.replica_id == 0
    if first:
        (folder / f"ready-{job}").touch()
        wait_until((folder / f"start-{job}").exists, 60)
    strategy.barrier()
    manager = hs.CheckpointManager(folder / "checkpoints", max_to_keep=None, **objects)
    objects["job"].assign(job)
    done = itertools.count(1)
    with (
        (folder / f"acknowledged-{job}").open("a", buffering=1) as acknowledged,
        (folder / f"refused-{job}").open("a", buffering=1) as refused,
    ):
        for step in _steps(strategy, manager, which, count):
            objects["large"].assign(large_value(job, step))
            try:
                manager.save(step, asynchronous=how == "go")
                manager.wait()
            except CheckpointError as error:
                if first:
                    refused.write(f"{error}\n")
                continue
            if first:
                acknowledged.write(f"{step}\n")
            if which == "next" and next(done) == count:
                break
    print("ended", flush=True)


if __name__ == "__main__":
    main()
