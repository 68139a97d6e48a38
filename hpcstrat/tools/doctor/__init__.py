"""The command ``hpcstrat doctor``: examines what a job would find on these hosts."""

from hpcstrat.tools.doctor.command import doctor

__all__ = ["doctor"]
