"""The command ``hpcstrat doctor``: what a job finds here, and what would stop it."""

from hpcstrat.tools.doctor.command import doctor

__all__ = ["doctor"]
