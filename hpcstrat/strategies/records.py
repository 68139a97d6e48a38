"""What a strategy tells of its ranks: who was late, and what each did when."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hpcstrat.channel.channel import Channel
from hpcstrat.observe import job_timeline
from hpcstrat.observe.arrival_report import ArrivalReport, ReplicaArrivals
from hpcstrat.observe.timeline import trace
from hpcstrat.reduction.replica_collectives import Collectives
from hpcstrat.settings import Settings

__all__ = ["RecordMethods"]


class RecordMethods:
    """Methods that all strategies share."""

    collectives: Collectives
    replica_id: int

    @property
    def settings(self) -> Settings:
        """How this strategy watches over its ranks."""
        raise NotImplementedError

    def arrivals(self) -> ArrivalReport:
        """Return how long each replica has waited for the others so far.

        Collective over the strategy's replicas.

        Returns
        -------
        ArrivalReport
            Of all collective calls since the strategies over these ranks were made;
            ``str`` gives a table, slowest replica first.
        """
        channel = self.collectives.channel
        if isinstance(channel, Channel):
            own = channel.arrivals.own()
        else:
            own = ReplicaArrivals(self.replica_id, platform.node(), 0.0)
        return ArrivalReport(tuple(self.collectives.all_gather_object(own, "arrivals")))

    @contextmanager
    def timeline(self, directory: str | os.PathLike[str]) -> Iterator[None]:
        """Record what each rank does in a block of the program.

        Collective over the strategy's replicas, at both ends of the block.

        Parameters
        ----------
        directory : str or path
            Where each rank writes a file of its own; made where it is missing. The
            command ``hpcstrat timeline merge`` makes one trace of them.

        Yields
        ------
        None
            Nothing.

        Raises
        ------
        RuntimeError
            If a timeline is being recorded already.
        OSError
            If a rank cannot write there. On every rank.
        """
        path = os.fspath(directory)
        self.collectives.barrier(f"timeline in {path}")
        channel = self.collectives.channel
        place: Any = (None, None)
        if isinstance(channel, Channel):
            place = channel.topology, channel.arrivals.comm
        if not job_timeline.start(path, self.settings, *place):
            raise RuntimeError(
                "expected no timeline around this one, found that one is being "
                "recorded; end it first, or unset HPCSTRAT_TIMELINE"
            )
        together = False
        try:
            yield
            self.collectives.barrier("end of a timeline")
            together = True
        finally:
            # After an error the others may be anywhere.
            job_timeline.stop(together=together)

    def trace(self, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record a part of the program under a name, where a timeline is recorded.

        Not collective.

        Parameters
        ----------
        name : str
            What the part is called.
        **args : object
            More about it, shown with it.

        Returns
        -------
        context manager
            Surrounds the part. Parts may lie in each other.
        """
        return trace(name, **args)
