"""Tools that kill, stop or slow down ranks of a running job at random.

They test how a program, a launcher and a batch system react to such failures. All
disturbances are drawn from a seed before the first one is executed, and only one rank
is disturbed at a time. A stopped rank always continues: at the end of its time, or when
the caller is interrupted, or, by a guard process, when the caller is killed::

    job = chaos.choose(chaos.find_jobs(), name)
    acts = chaos.draw([p.rank for p in job.ranks], ["stop"], every=5, count=10, seed=1)
    chaos.disturb(job, acts, chaos.Strength(stop_seconds=2))
"""

from hpcstrat.tools.chaos.disturbing import (
    KINDS,
    Act,
    Strength,
    disturb,
    draw,
    parse_ranks,
)
from hpcstrat.tools.chaos.processes import (
    JobRanks,
    NoSuchRankError,
    RankProcess,
    choose,
    find_jobs,
)

__all__ = [
    "KINDS",
    "Act",
    "JobRanks",
    "NoSuchRankError",
    "RankProcess",
    "Strength",
    "choose",
    "disturb",
    "draw",
    "find_jobs",
    "parse_ranks",
]
