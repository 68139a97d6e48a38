"""Arguments of a manager: what is refused, and who is told."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Any

from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.typing import SupportsCheckpoint
from hpcstrat.strategies import Strategy, get_strategy

__all__ = ["of_all_groups", "refuse_torch", "require_one_writer", "strategy_of"]

_MOST_NAMES = 3


def strategy_of(things: Any) -> Any:
    """Return the strategy of what may be faulty arguments; else the current one.

    To tell the other ranks: so it must be found in any structure, and by no means
    raise.
    """
    todo = [things]
    while todo:
        thing = todo.pop()
        if isinstance(thing, (Mapping, list, tuple)):
            todo.extend(thing.values() if isinstance(thing, Mapping) else thing)
            continue
        strategy = getattr(thing, "distribute_strategy", None)
        if getattr(strategy, "distributes", False):
            return of_all_groups(strategy)
        if isinstance(thing, SupportsCheckpoint):
            # The caller tells what is faulty here, with its own error.
            with suppress(Exception):
                todo.append(thing.checkpoint_variables())
    return of_all_groups(get_strategy())


def of_all_groups(strategy: Any) -> Any:
    """Return the strategy of all replicas, of which this one may be a group's."""
    split = getattr(strategy, "split", None)
    return strategy if split is None else split.whole


def refuse_torch(name: str, thing: Any) -> None:
    """Refuse what has tensors in its state, before a program has run for long."""
    kinds = {
        kind.__name__
        for kind in type(thing).__mro__
        if kind.__module__.partition(".")[0] == "torch"
    }
    # SGD without momentum has none.
    has_state = getattr(thing, "defaults", {}).get("momentum") != 0
    if "Module" in kinds or ("Optimizer" in kinds and has_state):
        raise ValueError(
            f"expected plain state as {name!r}, found a torch {type(thing).__name__}, "
            "whose state_dict() has tensors; pass **hpcstrat.integrations.torch.state("
            "model, optimizer), which makes Variables over their memory"
        )


def require_one_writer(strategy: Strategy, names: Collection[str]) -> None:
    """Refuse objects of which each rank of a job would write the same files."""
    # The launcher's number: a strategy of one replica has started no MPI to ask.
    size = launch_from_environment().size
    if not strategy.saves_checkpoints:
        raise RuntimeError(
            f"expected the first worker to save and restore, found another of "
            f"{strategy!r}; make the manager on worker 0 alone"
        )
    if size == 1 or not strategy.ranks_are_independent:
        return
    found, advice = f"those of {strategy!r}", "use MultiWorkerMirroredStrategy"
    if strategy.is_default:
        some = ", ".join(sorted(names)[:_MOST_NAMES]) or "none"
        found = f"{some}, made outside of a scope"
        advice = (
            "make variables and the manager inside `with strategy.scope():`; give a "
            "model of torch to hpcstrat.integrations.torch.replicate(model, strategy) "
            "before state, and one of Keras to hpcstrat.integrations.keras.distribute"
        )
    raise RuntimeError(
        f"expected objects of a strategy over the {size} ranks of this job, found "
        f"{found}, so that all ranks would write the same files; {advice}, or pass "
        "independent=True and a folder for each rank"
    )
