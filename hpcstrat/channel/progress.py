"""A thread that takes started reductions further while the program computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hpcstrat.errors import TopologyError

__all__ = ["ProgressThread", "check_progress_thread"]

_PAUSE_SECONDS = 1e-4


class ProgressThread:
    """Looks at the started calls of a channel about ten thousand times a second.

    It makes MPI calls only while a started call is under way, of which the main thread
    then makes none of its own: a call of the strategy first lets them end.
    """

    def __init__(self, calls: Any, enter: Callable[[], object]) -> None:
        self._calls = calls
        self._enter = enter
        self._work = threading.Event()
        self._ended = False
        self._thread = threading.Thread(
            target=self._loop, name="hpcstrat-progress", daemon=True
        )
        self._thread.start()

    def wake(self) -> None:
        """Say that there is a started call.

        Not collective.
        """
        self._work.set()

    def end(self) -> None:
        """End the thread.

        Not collective.
        """
        self._ended = True
        self._work.set()
        self._thread.join()

    def _loop(self) -> None:
        pause = threading.Event()
        while True:
            self._work.wait()
            self._work.clear()
            self._enter()
            while self._calls:
                if self._ended:
                    return
                self._calls.progress()
                pause.wait(_PAUSE_SECONDS)
            if self._ended:
                return


def check_progress_thread(topology: Any) -> None:
    """Refuse a thread that would take the processor from the ranks, or from MPI.

    Collective over ``topology.replica_comm``. TopologyError on every rank, if MPI was
    not started for threads, or a rank has no second core.
    """
    mpi = topology.mpi
    problem = ""
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
        problem = (
            "expected MPI with THREAD_MULTIPLE for a progress thread, found it started "
            "with less; create this strategy first, or start MPI accordingly"
        )
    elif topology.cores_each < 2:
        problem = (
            "expected two cores for each rank for a progress thread, found less; give "
            "each more cores, such as by srun --cpus-per-task, or leave "
            "progress_thread out"
        )
    problems = [p for p in topology.replica_comm.allgather(problem) if p]
    if problems:
        raise TopologyError(problems[0])
