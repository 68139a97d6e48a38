"""Processes that a rank has made: workers of data loaders, pools, forks."""

from __future__ import annotations

import os
import sys

from hpcstrat.cluster_resolver.launch import launch_from_environment
from hpcstrat.errors import TopologyError

__all__ = ["is_of_multiprocessing", "refuse_children"]

# A fork inherits this number, and has another one itself.
_imported_by = os.getpid()


def is_of_multiprocessing() -> bool:
    """Return whether the program made this process by multiprocessing, in any way."""
    module = sys.modules.get("multiprocessing.process")
    if module is None:
        return False
    # A child that still imports its parent's program does not know its parent yet:
    # `spawn` and `forkserver` of the standard library set this mark meanwhile.
    imports = getattr(module.current_process(), "_inheriting", False)
    return imports or module.parent_process() is not None


def refuse_children() -> None:
    """Refuse processes that a rank has made: they cannot use the rank's MPI.

    Call it before anything that ranks do together. Raises TopologyError in a child of
    multiprocessing, such as a worker of a data loader, and in a fork.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    runs = mpi is not None and mpi.Is_initialized()
    # Outside of a job a child may be a program of one rank, like its parent.
    inherits = runs or bool(launch_from_environment().launcher)
    if inherits and (is_of_multiprocessing() or os.getpid() != _imported_by):
        raise TopologyError(
            "expected a strategy in a process that the launcher has started, found "
            f"process {os.getpid()}, which such a process has made, and which has no "
            "part in MPI; make strategies below `if __name__ == '__main__':`, which "
            "children do not run, and give them arrays only"
        )
