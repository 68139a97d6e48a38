"""Run functions and commands on several ranks of this machine, for tests.

``run(n, function, *args)`` calls a function on n ranks and returns their results;
``launch(n, command)`` runs a whole program. Both end every process that they started,
even after an error. If the time limit is reached, both show the stacks of each rank.
"""

from hpcstrat.testing.launcher import launch_command
from hpcstrat.testing.runner import Finished, RankFailure, RankTimeout, launch, run

__all__ = [
    "Finished",
    "RankFailure",
    "RankTimeout",
    "launch",
    "launch_command",
    "run",
]
