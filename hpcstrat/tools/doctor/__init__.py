"""The command ``hpcstrat doctor``: examines what a job would find, and its problems."""

from hpcstrat.tools.doctor.command import doctor

__all__ = ["doctor"]
