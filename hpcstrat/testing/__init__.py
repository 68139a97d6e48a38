"""Run functions and commands on several ranks of this machine, for tests.

``run(n, function, *args)`` calls a function on n ranks and returns their results;
``launch(n, command)`` runs a whole program. Both end every process that they started,
even after an error. If the time limit is reached, both show the stacks of each rank.

``check_adjoint(forward, adjoint, *shapes)`` is the dot-product test of an adjoint.
``compare_divisions(fn)`` compares results of one rank with those of several ranks, and
of replicas of several ranks.
"""

from hpcstrat.testing.adjoints import check_adjoint
from hpcstrat.testing.divisions import compare_divisions
from hpcstrat.testing.launcher import launch_command
from hpcstrat.testing.runner import Finished, RankFailure, RankTimeout, launch, run

__all__ = [
    "Finished",
    "RankFailure",
    "RankTimeout",
    "check_adjoint",
    "compare_divisions",
    "launch",
    "launch_command",
    "run",
]
