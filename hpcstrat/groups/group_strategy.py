"""The strategy of one group of replicas, and the assignment of replicas to groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hpcstrat.engine.arrays.kinds import is_half
from hpcstrat.engine.topology.topology import Topology
from hpcstrat.strategies import MultiWorkerMirroredStrategy
from hpcstrat.strategies.connection import subset
from hpcstrat.strategies.split import Split
from hpcstrat.variables import MirroredVariable


class GroupStrategy(MultiWorkerMirroredStrategy):
    """The strategy of one group: synchronous training on the replicas of the group.

    Collective over ``comm``. Making a trainable variable of floating type in the scope
    is collective over all replicas of all groups, because the function ``take``
    broadcasts replica 0's value to all groups.
    """

    def __init__(
        self, take: Callable[[MirroredVariable], None], **options: Any
    ) -> None:
        self._take = take
        super().__init__(**options)

    def variable_made(self, variable: MirroredVariable) -> None:
        """Register a new variable; collective over all groups if they average it."""
        super().variable_made(variable)
        kind = variable.dtype
        if variable.trainable and (kind.kind in "fc" or is_half(kind)):
            self._take(variable)


def make_groups(
    whole: MultiWorkerMirroredStrategy,
    size: int | None,
    take: Callable[[MirroredVariable], None],
    **options: Any,
) -> GroupStrategy:
    """Return the strategy of this replica's group, and record the groups in ``split``.

    Collective over the replicas of ``whole``. By default each worker is a group; with
    ``size``, each ``size`` consecutive replicas form a group. ``whole`` and the group's
    strategy get the same attribute ``split``, which records the group of each replica.
    """
    topology = whole.topology
    group = topology.worker_id if size is None else topology.replica_id // size
    world = Topology.world()
    found = whole.collectives.all_gather_object((group, world.rank), "forming groups")
    comm = subset([rank for other, rank in found if other == group])
    try:
        part = GroupStrategy(take, comm=comm, settings=whole.settings, **options)
    finally:
        comm.Free()
    whole.split = part.split = Split(whole, part, [group for group, _ in found])
    return part
