"""Compares values that are saved once over all replicas that have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from xxhash import xxh3_64_intdigest

from hpcstrat.checkpoint.objects import is_of_group
from hpcstrat.engine.typing import Replicas
from hpcstrat.errors import CollectiveError, DivergenceError
from hpcstrat.safety.divergence.divergence import check_mirrored
from hpcstrat.variables import Variable

__all__ = ["compare_copies", "require_same_state"]


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


def require_same_state(collectives: Any, states: Mapping[str, bytes]) -> None:
    """Refuse plain state that differs between replicas, of which one is saved for all.

    Collective over the strategy's replicas, if there are states. Raises CollectiveError
    on every replica.
    """
    if not states:
        return
    hashes = {name: xxh3_64_intdigest(text) for name, text in states.items()}
    found = collectives.all_gather_object(hashes, "comparison of plain state")
    for name in hashes:
        own = [other.get(name) for other in found]
        different = [rank for rank, value in enumerate(own) if value != own[0]]
        if different:
            raise CollectiveError(
                f"expected the same plain state of {name!r} on every replica, of which "
                f"one is saved for all, found another on replicas {different} than on "
                "replica 0; keep what each replica has of its own in a Variable with "
                "synchronization='on_read' and aggregation='none', and draw random "
                "numbers from strategy.random(...)",
                different,
            )
