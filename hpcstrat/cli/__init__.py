"""The command ``hpcstrat``, which also works on a login node, without MPI."""

# The first import notes the time, before the others take theirs.
from hpcstrat.cli.first_import import BEGAN
from hpcstrat.cli.main import main

__all__ = ["BEGAN", "main"]
