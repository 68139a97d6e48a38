"""Job scripts for a project of the user's own."""

from hpcstrat.tools.job_scripts.commands import jobs

__all__ = ["jobs"]
