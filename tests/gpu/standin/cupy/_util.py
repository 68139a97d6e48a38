"""The part of ``cupy._util`` that the stand-in has."""


class PerformanceWarning(RuntimeWarning):
    """Something works, but slowly."""
