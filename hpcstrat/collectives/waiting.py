"""How a rank waits for others.

It spins for a moment, and then naps and drives MPI's progress, so that signals are
served, late ranks are named, and the death of a process is seen.
"""

from __future__ import annotations

import os
import time
from typing import Any

from hpcstrat.collectives.call import Call, call_site
from hpcstrat.collectives.records import SegmentRecords
from hpcstrat.errors import CollectiveError
from hpcstrat.topology import Topology
from hpcstrat.tracing import get_logger

__all__ = ["Waiter", "late_ranks"]

_QUICK_LOOKS = 20
_LOOKS_BETWEEN_CLOCKS = 10
_SPIN_SECONDS = 0.001
_NAP_STEP_SECONDS = 2e-5
_LONGEST_NAP_SECONDS = 0.001
_WARN_SECONDS = 60.0
_LIMIT_SECONDS = 1800.0


class Waiter:
    """Waits for the other ranks of a channel.

    Parameters
    ----------
    topology : Topology
        Of the ranks.
    comm : mpi4py.MPI.Intracomm
        Of all of them; its progress is driven.
    steps : SegmentRecords
        What knows the processes of this worker.

    Attributes
    ----------
    quick_looks : int
        How often a caller may look before it calls `wait`.
    """

    def __init__(self, topology: Topology, comm: Any, steps: SegmentRecords) -> None:
        self._comm = comm
        self._rank = comm.rank
        self._steps = steps
        # Where ranks share cores, one that looks keeps the awaited one from running.
        self._shares_cores = topology.worker_comm.size > topology.num_cores
        self.quick_looks = 1 if self._shares_cores else _QUICK_LOOKS

    def wait(
        self, awaited: Any, call: Call, timeout_seconds: float | None = None
    ) -> bool:
        """Wait for other ranks.

        Collective over ``topology.replica_comm``, or what is awaited of it.

        Parameters
        ----------
        awaited : SegmentRecords, WireRecords or Message
            What is awaited.
        call : Call
            In which call, for messages.
        timeout_seconds : float, optional
            How long; default: the job's own limit.

        Returns
        -------
        bool
            Whether all ranks have announced the same; False if something else.

        Raises
        ------
        CollectiveError
            If a rank does not come in time, or its process has died.
        """
        agreed, start = awaited.agreed, time.monotonic()
        while time.monotonic() < start + _SPIN_SECONDS:
            for _ in range(_LOOKS_BETWEEN_CLOCKS):
                if agreed():
                    return True
                if self._shares_cores:
                    os.sched_yield()
        turns, look_at, warn_at = 0, start + 1, start + _WARN_SECONDS
        limit = start + (timeout_seconds or _LIMIT_SECONDS)
        while True:
            if not awaited.missing():
                return bool(awaited.agreed())
            now = time.monotonic()
            if now > look_at:
                look_at = now + 1
                self._check_alive(call)
            if now > warn_at:
                warn_at = now + 10 * _WARN_SECONDS
                get_logger().warning(
                    "rank %d has waited %.0f s in %s (%s) for %s",
                    *(
                        self._rank,
                        now - start,
                        call.text,
                        call_site(),
                        late_ranks(awaited),
                    ),
                )
            if now > limit:
                raise CollectiveError(
                    f"expected all ranks in {call.text} within {limit - start:g} s, "
                    f"found that {late_ranks(awaited)} did not come; see what they do, "
                    "or raise timeout_seconds"
                )
            self._comm.Iprobe()
            time.sleep(min(turns * _NAP_STEP_SECONDS, _LONGEST_NAP_SECONDS))
            turns += 1

    def _check_alive(self, call: Call) -> None:
        dead = self._steps.dead()
        if dead:
            raise CollectiveError(
                f"expected all ranks in {call.text}, found that the processes of ranks "
                f"{dead} have died; look for their last output",
                dead,
            )


def late_ranks(awaited: Any) -> str:
    """Say which ranks are awaited.

    Not collective.

    Parameters
    ----------
    awaited : SegmentRecords, WireRecords or Message
        What is awaited.

    Returns
    -------
    str
        Such as ``ranks [1, 3]``.
    """
    late = awaited.missing()
    return "other ranks" if late == [-1] else f"ranks {late}"
