"""Whether copies of variables may be saved: those of all replicas, or of a group."""

from __future__ import annotations

from collections.abc import Mapping

from hpcstrat.checkpoint.objects import is_of_group
from hpcstrat.errors import DivergenceError
from hpcstrat.safety.divergence.divergence import check_mirrored
from hpcstrat.typing import Replicas
from hpcstrat.variables import Variable

__all__ = ["compare_copies"]


def compare_copies(
    strategy: Replicas, variables: Mapping[str, Variable], turn: int | None
) -> None:
    """Compare mirrored variables between the replicas that are to have the same.

    Collective over the strategy's replicas. Raises a DivergenceError on every replica,
    also where copies differ in another group. ``turn`` as in `check_mirrored`.
    """
    split = strategy.split
    if split is None:
        check_mirrored(strategy, variables, turn)
        return
    shared = {p: v for p, v in variables.items() if not is_of_group(v)}
    check_mirrored(strategy, shared, turn)
    own = {p: v for p, v in variables.items() if is_of_group(v)}
    error = None
    try:
        check_mirrored(split.part, own, turn)
    except DivergenceError as exc:
        error = exc
    found = strategy.collectives.all_gather_object(error, "comparison within groups")
    for each in found:
        if each is not None:
            raise error or each
