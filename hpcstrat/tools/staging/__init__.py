"""The command ``hpcstrat stage``, which copies an environment to all nodes."""

from hpcstrat.tools.staging.stage_command import stage

__all__ = ["stage"]
