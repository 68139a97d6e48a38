"""Save in a folder where others save: ``save_shared.py FOLDER NUMBER HOW COUNT WHICH``.

The values follow from the step and from ``NUMBER``, the job's. ``HOW`` is ``wait`` (for
each save) or ``go`` (on meanwhile). A job makes ``FOLDER/ready-NUMBER``, and begins
once ``FOLDER/start-NUMBER`` is there. With ``WHICH`` = ``same`` it tries the steps from
1 to ``COUNT``, with ``next`` the one that follows the newest, until ``COUNT`` saves
were acknowledged. Rank 0 writes the steps into ``FOLDER/acknowledged-NUMBER``, and what
was said of others into ``FOLDER/refused-NUMBER``.
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

# Every rank has blocks to write.
LARGE = 300_000


def make_objects() -> dict[str, Any]:
    """Return the variables that are saved, all zero."""
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
    """Save, and go on where a save is refused."""
    # As on a file system without locks, where nobody is refused.
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
