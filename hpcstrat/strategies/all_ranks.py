"""`AllRanks`: calls of all ranks, if a replica consists of several ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hpcstrat.engine.calls.replica_collectives import Collectives
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.topology import Topology

__all__ = ["AllRanks"]


@dataclass(frozen=True, slots=True)
class AllRanks:
    """The ranks of all replicas of a strategy; see `Strategy.all_ranks`."""

    collectives: Collectives
    topology: Topology
    settings: Settings

    @property
    def all_ranks(self) -> AllRanks:
        """This object, as code for any strategy reads this attribute."""
        return self

    @property
    def rank(self) -> int:
        """The number of this rank among the ranks of all replicas."""
        return self.collectives.rank

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all replicas."""
        return self.collectives.size
