"""Job scripts for a user's own project."""

from hpcstrat.tools.job_scripts.commands import jobs

__all__ = ["jobs"]
