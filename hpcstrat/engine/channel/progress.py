"""A thread that takes started reductions further while the program computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hpcstrat.errors import TopologyError

__all__ = ["ProgressThread", "check_progress_thread"]

_PAUSE_SECONDS = 1e-4
# On the core on which its rank computes: between hosts of one core each both hid as
# much, and each look costs.
_SHARED_PAUSE_SECONDS = 1e-3


class ProgressThread:
    """Looks at the started calls of a channel, ten thousand times a second at most.

    A thousand times, where its rank has one core (``shares_core``). It makes MPI calls
    only while a started call is under way, of which the main thread then makes none of
    its own: a call of the strategy first lets them end.
    """

    def __init__(
        self, calls: Any, enter: Callable[[], object], *, shares_core: bool
    ) -> None:
        self._calls = calls
        self._pause = _SHARED_PAUSE_SECONDS if shares_core else _PAUSE_SECONDS
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
                pause.wait(self._pause)
            if self._ended:
                return


def check_progress_thread(topology: Any) -> None:
    """Refuse a thread beside an MPI that serves only one.

    Collective over ``topology.replica_comm``. TopologyError on every rank, if MPI was
    not started for threads on one of them.
    """
    mpi, comm = topology.mpi, topology.replica_comm
    if not all(comm.allgather(mpi.Query_thread() >= mpi.THREAD_MULTIPLE)):
        raise TopologyError(
            "expected MPI with THREAD_MULTIPLE for a progress thread, found it started "
            "with less; create this strategy first, or start MPI accordingly"
        )
