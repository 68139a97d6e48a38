"""The division of a job's replicas into groups that are in sync."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpcstrat.engine.typing import Replicas


@dataclass(frozen=True, slots=True)
class Split:
    """The strategy of all replicas, that of this one's group, and who is in which.

    Both strategies have it. ``group_of`` says for each replica of all its group, from
    0; each group has one.
    """

    whole: Replicas
    part: Replicas
    group_of: Sequence[int]

    @property
    def num_groups(self) -> int:
        return max(self.group_of) + 1

    @property
    def own(self) -> int:
        """This replica's group."""
        return self.group_of[self.whole.replica_id]
