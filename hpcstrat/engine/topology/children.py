"""Detects processes that a rank has created: data loader workers, pools, forks."""

from __future__ import annotations

import os
import sys

from hpcstrat.cluster_resolver.launch import launch_from_environment
from hpcstrat.errors import TopologyError

__all__ = ["is_of_multiprocessing", "refuse_children"]

# A forked process inherits this process number, but has another number itself.
_imported_by = os.getpid()


def is_of_multiprocessing() -> bool:
    """Return whether multiprocessing has created this process, by any start method."""
    module = sys.modules.get("multiprocessing.process")
    if module is None:
        return False
    # While a child imports its parent's program, parent_process() is still None; the
    # start methods `spawn` and `forkserver` set ``_inheriting`` during this import.
    imports = getattr(module.current_process(), "_inheriting", False)
    return imports or module.parent_process() is not None


def refuse_children() -> None:
    """Raise TopologyError in a child of a rank, because it cannot use the rank's MPI.

    Call this function before any collective call. It raises in a child of
    multiprocessing, such as a worker of a data loader, and in a fork.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    runs = mpi is not None and mpi.Is_initialized()
    # Without a launcher, a child may be a job of one rank, like its parent.
    inherits = runs or bool(launch_from_environment().launcher)
    if inherits and (is_of_multiprocessing() or os.getpid() != _imported_by):
        raise TopologyError(
            "expected a strategy in a process that the launcher has started, found "
            f"process {os.getpid()}, which is a child of such a process, and cannot "
            "use MPI; make strategies below `if __name__ == '__main__':`, which child "
            "processes do not run, and pass only arrays to them"
        )
