"""Ranks that their launcher has bound to fewer cores than there are ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["CoreMasks", "CrowdedRanks", "crowded_ranks", "own_masks"]


@dataclass(frozen=True, slots=True)
class CoreMasks:
    """The cores that a rank may use, and those of the process that started it."""

    own: frozenset[int]
    launcher: frozenset[int]


@dataclass(frozen=True, slots=True)
class CrowdedRanks:
    """Ranks of a host that share too few cores, while it has others."""

    ranks: tuple[int, ...]
    cores: frozenset[int]
    num_others: int

    def text(self, host: str, rank_words: str) -> str:
        """Return a sentence about these ranks, with advice."""
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
    """Return the cores of this process, and of its parent."""
    # Not os.cpu_count(), which counts cores that the launcher has not given.
    own = frozenset(os.sched_getaffinity(0))
    try:
        # The launcher's mask shows the cores that the rank was bound away from.
        return CoreMasks(own, frozenset(os.sched_getaffinity(os.getppid())))
    except OSError:
        return CoreMasks(own, own)


def crowded_ranks(masks: Sequence[CoreMasks]) -> Iterator[CrowdedRanks]:
    """Yield the ranks, numbered as the masks of one host, that share too few cores."""
    every = set().union(*(mask.launcher for mask in masks))
    for cores in dict.fromkeys(mask.own for mask in masks):
        ranks = tuple(rank for rank, mask in enumerate(masks) if mask.own <= cores)
        # Where the launcher has no other cores, binding is not the cause.
        if len(ranks) > len(cores) and every - cores:
            yield CrowdedRanks(ranks, cores, len(every - cores))
