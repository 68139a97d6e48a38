"""The division of a job's replicas into groups, each of which is in sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstrat.engine.typing import Replicas


@dataclass(frozen=True, slots=True)
class Split:
    """A division of the job's replicas into groups, as seen by one replica.

    ``whole`` is the strategy of all replicas, ``part`` the strategy of this replica's
    group; both refer to this object. ``group_of`` has the group number, from 0, of each
    replica of the job; no group is empty.
    """

    whole: Replicas
    part: Replicas
    group_of: Sequence[int]

    @property
    def num_groups(self) -> int:
        return max(self.group_of) + 1

    @property
    def own(self) -> int:
        """The number of this replica's group."""
        return self.group_of[self.whole.replica_id]
