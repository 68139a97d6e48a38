"""The end of a process after the loss of a rank.

``MPI_Finalize`` is skipped, because it may wait for dead ranks forever.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys

from hpcstrat.checkpoint.save.pending_save import finish_all
from hpcstrat.elastic.pool import Pool
from hpcstrat.engine.topology.starting import abandon_mpi

__all__ = ["end_without_finalize_after_loss"]


def end_without_finalize_after_loss(pool: Pool) -> None:
    """Register an exit function that skips MPI_Finalize if a rank was lost."""
    atexit.register(_end, pool, os.getpid())


def _end(pool: Pool, process: int) -> None:
    """End this process without MPI_Finalize if the pool knows of lost ranks."""
    # Forked child processes run this exit function, too, but must not end MPI.
    if os.getpid() != process or not pool.knows_of_losses():
        return
    if abandon_mpi():
        return
    # `abandon_mpi` had no effect, because the program itself has initialized MPI: end
    # the process before mpi4py calls MPI_Finalize.
    finish_all()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)
