"""The command ``hpcstrat``, which also works on a login node, without MPI."""

from hpcstrat.cli.main import main

__all__ = ["main"]
