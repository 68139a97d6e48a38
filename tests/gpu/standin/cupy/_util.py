"""The part of ``cupy._util`` that the stand-in has."""


class PerformanceWarning(RuntimeWarning):
    """A warning about an operation that works, but slowly."""
