"""Save in the background and leave: ``save_and_leave.py FOLDER END``.

``END`` is ``plain``, ``exit`` (status 3), or ``raise`` (on the last rank).
"""

from __future__ import annotations

import sys

import numpy as np

import hpcstrat as hs


def main() -> None:
    """Save step 1, start to save step 2, and end without a further call."""
    folder, end = sys.argv[1:]
    strategy = hs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        x = hs.Variable(np.ones(1 << 20))
    manager = hs.CheckpointManager(folder, x=x)
    manager.save(1)
    x.assign(np.full(1 << 20, 2.0))
    manager.save(2, asynchronous=True)
    x.assign(np.zeros(1 << 20))
    if end == "raise" and strategy.replica_id == strategy.num_replicas_in_sync - 1:
        raise RuntimeError("the program's own")
    if end != "plain":
        sys.exit(3)


if __name__ == "__main__":
    main()
