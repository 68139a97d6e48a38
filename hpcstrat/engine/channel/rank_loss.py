"""Notices the death of a rank, and wakes the ranks that do not notice it."""

from __future__ import annotations

import time
from typing import Any

from hpcstrat.engine.topology.survival import is_loss, lost_ranks, revoke
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.errors import RankLostError

__all__ = ["RankLoss"]

_NAP_SECONDS = 0.002
# A rank that was woken waits so long for the launcher to tell it who has died.
_TOLD_SECONDS = 2.0


class RankLoss:
    """A channel's knowledge of ranks that have died; ``comm`` is the channel's own."""

    def __init__(self, topology: Topology, comm: Any) -> None:
        self._topology = topology
        self._comm = comm
        # The error that every further call raises.
        self.error: RankLostError | None = None

    def found(self, error: BaseException, what: str) -> RankLostError | None:
        """Return the error to raise where one comes of the death of a rank.

        None for other errors. Wakes the other ranks, where the topology survives a
        loss. ``error`` is of a call that moves data, or waits: of ``what``.
        """
        topology = self._topology
        known, comm = set[int](), self._comm if topology.survives else None
        if isinstance(error, RankLostError):
            known.update(error.ranks)
        elif not is_loss(topology.mpi, error, comm):
            return None
        if self.error is not None:
            return self.again(what)
        advice = "start the job again, and restore a checkpoint"
        if topology.survives:
            self.wake()
            known.update(self._told(bool(known)))
            advice = "leave this strategy, and form one of the ranks that are left"
        ranks = sorted(known)
        who = f"the processes of ranks {ranks} have" if ranks else "a rank has"
        text = f"expected all ranks in {what}, found that {who} died; {advice}"
        # Kept without a traceback, whose frames would hold the program's arrays.
        self.error = RankLostError(text, ranks)
        return RankLostError(text, ranks)

    def wake(self) -> None:
        """Make every call of MPI an error on all ranks, where a loss is survived."""
        if self._topology.survives:
            revoke([self._comm])
            self._topology.revoke()

    def again(self, what: str) -> RankLostError:
        """Return an error of the same ranks, for a call after the one that noticed."""
        assert self.error is not None
        ranks = self.error.ranks
        return RankLostError(
            f"expected a strategy of living ranks for {what}, found that of lost ranks "
            f"{list(ranks)}; leave it, and form one of the ranks that are left",
            ranks,
        )

    def _told(self, knows: bool) -> list[int]:
        """Return what the launcher says of dead ranks, which may come a bit later."""
        deadline = time.monotonic() + _TOLD_SECONDS
        while True:
            found = lost_ranks(self._comm)
            if found or knows or time.monotonic() > deadline:
                return found
            # A communicator of this rank alone drives the progress of all.
            self._topology.mpi.COMM_SELF.Iprobe()
            time.sleep(_NAP_SECONDS)
