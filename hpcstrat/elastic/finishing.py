"""The end of a process after the loss of a rank, and the marker of finished work.

After a loss, ``MPI_Finalize`` is skipped, because it may wait for dead ranks forever.
The launcher's exit status does not show success: it was 0 even after the loss of all
ranks. Therefore a marker file shows that the work is finished.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import time
from typing import Any

from hpcstrat.checkpoint.save.pending_save import finish_all
from hpcstrat.elastic.pool import Pool
from hpcstrat.engine.topology.starting import abandon_mpi

__all__ = ["end_without_finalize_after_loss", "remove_marker", "write_marker"]


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


def remove_marker(path: str | os.PathLike[str] | None) -> None:
    """Remove an earlier run's marker file, if there is one; call this on one rank."""
    if path is not None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def write_marker(path: str | os.PathLike[str] | None, told: dict[str, Any]) -> None:
    """Write the marker file of finished work, and flush it to the disk.

    Call this on one rank. Without a path, do nothing. The file has ``told`` and a time.
    """
    if path is None:
        return
    whole = os.path.abspath(os.fspath(path))
    temporary = f"{whole}.{os.getpid()}"
    text = json.dumps({"finished_unix_seconds": time.time(), **told})
    with open(temporary, "w", encoding="ascii") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    # Rename the complete file, so that a watching program never reads half of it.
    os.replace(temporary, whole)
    folder = os.open(os.path.dirname(whole), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
