"""Counts the ranks that use the same cores, and finds ranks with too few cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "CoreMasks",
    "CrowdedRanks",
    "crowded_ranks",
    "num_users",
    "own_masks",
    "remember_masks",
]

# The masks of the ranks of the largest topology of this job on this node.
_known: list[CoreMasks] = []


@dataclass(frozen=True, slots=True)
class CoreMasks:
    """The cores that a rank may use, and the cores that its parent process may use."""

    own: frozenset[int]
    launcher: frozenset[int]


@dataclass(frozen=True, slots=True)
class CrowdedRanks:
    """Ranks of a host that share too few cores, although the host has more cores."""

    ranks: tuple[int, ...]
    cores: frozenset[int]
    num_others: int

    def text(self, host: str, rank_words: str) -> str:
        """Return a warning about these ranks, with advice."""
        numbers = ", ".join(map(str, sorted(self.cores)))
        cores = f"core{'s' * (len(self.cores) > 1)} {numbers}"
        others = f"{self.num_others} other core{'s' * (self.num_others > 1)}"
        return (
            f"expected a core for each rank of host {host}, found that {rank_words} "
            f"are bound to {cores}, while it has {others}; ask for a core each "
            "(--cpus-per-task=1), and bind to cores (srun --cpu-bind=cores, mpirun "
            "--map-by core --bind-to core)"
        )


def own_masks() -> CoreMasks:
    """Return the cores that this process, and its parent process, may use."""
    # os.cpu_count() would also count cores that the launcher has not assigned.
    own = frozenset(os.sched_getaffinity(0))
    try:
        # The launcher's process may use the cores that the binding excludes.
        return CoreMasks(own, frozenset(os.sched_getaffinity(os.getppid())))
    except OSError:
        return CoreMasks(own, own)


def crowded_ranks(masks: Sequence[CoreMasks]) -> Iterator[CrowdedRanks]:
    """Yield groups of ranks that share too few cores; ``masks`` is in rank order."""
    every = set().union(*(mask.launcher for mask in masks))
    for cores in dict.fromkeys(mask.own for mask in masks):
        ranks = tuple(rank for rank, mask in enumerate(masks) if mask.own <= cores)
        # If the launcher has no other cores, the binding does not cause the sharing.
        if len(ranks) > len(cores) and every - cores:
            yield CrowdedRanks(ranks, cores, len(every - cores))


def remember_masks(masks: Sequence[CoreMasks], *, anew: bool) -> None:
    """Store the masks of the ranks of a topology on this node, for `num_users`.

    Masks of more ranks that were stored earlier are kept, unless ``anew`` is true.
    """
    if anew or len(masks) > len(_known):
        _known[:] = masks


def num_users(cores: frozenset[int]) -> int:
    """Return the number of known ranks of this node that use no other cores."""
    return sum(mask.own <= cores for mask in _known)
