"""Preparations at ``import hpcstrat``, before MPI starts."""

from __future__ import annotations

import contextlib
import os
from dataclasses import astuple

from hpcstrat.engine.topology.children import is_of_multiprocessing
from hpcstrat.engine.topology.starting import prepare_environment
from hpcstrat.safety import uncaught
from hpcstrat.safety.presence import own_registry
from hpcstrat.safety.watchdog import stacks

__all__ = ["begin"]

_SIGNAL = "HPCSTRAT_STACK_SIGNAL"


def begin() -> None:
    """Publish that this rank exists, and install the hook for uncaught exceptions.

    Also sets environment variables that MPI reads at its start, because the program may
    start MPI before it creates a strategy.
    """
    if is_of_multiprocessing():
        # A child process of multiprocessing has a rank's environment, but is no rank.
        return
    prepare_environment()
    uncaught.install()
    board = own_registry()
    if board is not None:
        with contextlib.suppress(ValueError):
            offset = int(os.environ.get(_SIGNAL, "9"))
            process = stacks.prepare(offset, quiet=True)
            board.show(process=list(astuple(process)))
