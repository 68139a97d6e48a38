"""Collective checks of the objects to save, and actions of replica 0 for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from xxhash import xxh3_64_intdigest

from hpcstrat.checkpoint.disk import NO_DESCRIPTORS
from hpcstrat.cluster_resolver import launch_from_environment
from hpcstrat.engine.typing import Replicas, SupportsCheckpoint
from hpcstrat.errors import CheckpointError, CollectiveError, DivergenceError
from hpcstrat.safety.divergence.divergence import check_mirrored
from hpcstrat.strategies import Strategy, get_strategy
from hpcstrat.variables import Variable

__all__ = [
    "among_some_ranks",
    "compare_copies",
    "explained",
    "is_of_group",
    "of_all_groups",
    "on_rank_0",
    "refuse_torch",
    "require_one_writer",
    "require_same_state",
    "strategy_of",
]

_MOST_NAMES = 3


def strategy_of(things: Any) -> Any:
    """Return the strategy of the objects in ``things``, or else the current strategy.

    This function never raises an error: the caller reports errors of invalid objects.
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
            # The caller raises its own error for this invalid object.
            with suppress(Exception):
                todo.append(thing.checkpoint_variables())
    return of_all_groups(get_strategy())


def of_all_groups(strategy: Any) -> Any:
    """Return the strategy of all replicas if ``strategy`` is of a group, or else it."""
    split = getattr(strategy, "split", None)
    return strategy if split is None else split.whole


def is_of_group(thing: Any) -> bool:
    """Return whether the strategy of ``thing`` is that of one group of replicas."""
    strategy = thing.distribute_strategy
    split = None if strategy is None else strategy.split
    return split is not None and split.part is strategy


def refuse_torch(name: str, thing: Any) -> None:
    """Raise ValueError for a torch module, or a torch optimizer with state.

    Their tensors cannot be saved as plain state. `Objects` calls this when an object is
    added, because the first save may come hours later.
    """
    kinds = {
        kind.__name__
        for kind in type(thing).__mro__
        if kind.__module__.partition(".")[0] == "torch"
    }
    # An SGD optimizer without momentum has no state.
    has_state = getattr(thing, "defaults", {}).get("momentum") != 0
    if "Module" in kinds or ("Optimizer" in kinds and has_state):
        raise ValueError(
            f"expected plain state as {name!r}, found a torch {type(thing).__name__}, "
            "whose state_dict() has tensors; pass **hpcstrat.integrations.torch.state("
            "model, optimizer), which makes Variables over their memory"
        )


def require_one_writer(strategy: Strategy, names: Collection[str]) -> None:
    """Raise RuntimeError if several ranks or workers would write the same files."""
    # Ask the launcher for the number of ranks: a strategy of one replica starts no MPI.
    size = launch_from_environment().size
    if not strategy.saves_checkpoints:
        raise RuntimeError(
            "expected the first worker to save and restore, found another worker of "
            f"{strategy!r}; make the manager only on worker 0"
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


def compare_copies(
    strategy: Replicas, variables: Mapping[str, Variable], turn: int | None
) -> None:
    """Compare the copies of mirrored variables; raise DivergenceError on every rank.

    Collective over all ranks. See `check_mirrored` for ``turn``.
    """
    split, ranks = strategy.split, strategy.all_ranks
    if split is None and ranks is strategy:
        check_mirrored(strategy, variables, turn)
        return
    # Only some ranks have copies of a group's variables, or of a divided variable's
    # part: those of the group, or those at the same position of all replicas.
    own = {p: v for p, v in variables.items() if v.split is not None or is_of_group(v)}
    shared = {p: v for p, v in variables.items() if p not in own}
    check_mirrored(ranks, shared, turn)
    error = None
    try:
        check_mirrored(strategy if split is None else split.part, own, turn)
    except DivergenceError as exc:
        error = exc
    found = ranks.collectives.all_gather_object(error, "comparison within groups")
    for each in found:
        if each is not None:
            raise error or each


@contextmanager
def among_some_ranks(strategy: Replicas, what: str) -> Iterator[None]:
    """A block with calls of a replica's ranks, and of the ranks at one position.

    Collective over all ranks, which enter the block and leave it together: an error of
    one rank is raised on all ranks. Without replicas of several ranks, calls in the
    block are calls of all ranks, and nothing is done.
    """
    if strategy.all_ranks is strategy:
        yield
        return
    strategy.all_ranks.collectives.barrier(what)
    # The ranks at the failed rank's position raise, and then the ranks of each replica.
    inside = strategy.inside.collectives
    with inside.section(what), strategy.collectives.section(what):
        yield


def require_same_state(collectives: Any, states: Mapping[str, bytes]) -> None:
    """Raise CollectiveError on every replica if an object's plain state differs.

    ``states`` has the plain state of each object, as text, by the object's name.
    Collective over the ranks of ``collectives``, if ``states`` is not empty.
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
                f"expected equal plain state of {name!r} on all replicas, because only "
                "one state is saved, found that it differs between replica 0 and "
                f"replicas {different}; keep values that differ between replicas in a "
                "Variable with synchronization='on_read' and aggregation='none', and "
                "draw random numbers from strategy.random(...)",
                different,
            )


def on_rank_0(strategy: Replicas, what: str, action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0, and return its (pickled) result on every rank.

    Collective over all ranks of the strategy. If the action raises an error, every rank
    raises a CheckpointError with its text.
    """
    # Send an error as its class and text, because some exceptions cannot be pickled.
    outcome: Any = None
    ranks = strategy.all_ranks
    if ranks.rank == 0:
        try:
            outcome = ("", action())
        except CheckpointError as error:
            outcome = (str(error), type(error))
        except Exception as error:
            outcome = (explained(what, error), CheckpointError)
    text, result = ranks.collectives.broadcast_object(outcome, 0, what)
    if text:
        raise result(text)
    return result


def explained(what: str, error: BaseException) -> str:
    """Return a message for an error in ``what`` (such as a save), with advice."""
    advice = "check the path, its permissions and the space on the file system"
    if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS:
        advice = "close files, or raise their number (ulimit -n)"
    if isinstance(error, FileExistsError) and what.startswith("save"):
        advice = "pass overwrite=True, or another step"
    return (
        f"expected {what} to succeed, found {type(error).__name__}: {error}; {advice}"
    )
