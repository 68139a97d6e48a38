"""The command ``hpcstrat jobs``, which writes job scripts for a user's project."""

from hpcstrat.tools.job_scripts.commands import jobs

__all__ = ["jobs"]
