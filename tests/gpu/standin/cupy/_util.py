"""What CuPy keeps under this name."""


class PerformanceWarning(RuntimeWarning):
    """Something works, but slowly."""
