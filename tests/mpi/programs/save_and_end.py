"""Save some steps and end early: ``save_and_end.py FOLDER HOW``.

``HOW``: ``error`` or ``kill``, with the rank, such as ``kill0``; ``interrupt`` for a
Ctrl-C of all ranks; ``restored`` for an error after a restore; ``child`` for the end of
a child process before a good end.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import hpcstrat as hs


def main() -> None:
    """Save, then end as the second argument says."""
    folder, how = sys.argv[1:]
    strategy = hs.MultiWorkerMirroredStrategy()
    with strategy.scope():
        value = hs.Variable(0.0, name="value")
    manager = hs.CheckpointManager(folder, value=value)
    if how == "restored":
        manager.restore()
        raise ValueError("the cause")
    for step in (1, 2, 3):
        manager.save(step, asynchronous=step == 2)
    rank = strategy.replica_id
    if how == "child":
        pid = os.fork()
        if not pid:
            signal.pause()
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
    elif how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    elif how == f"error{rank}":
        raise ValueError("the cause")
    elif how == f"kill{rank}":
        os.kill(os.getpid(), signal.SIGKILL)
    if how[:-1] in ("error", "kill"):
        strategy.barrier()
    print("ended", flush=True)


if __name__ == "__main__":
    main()
