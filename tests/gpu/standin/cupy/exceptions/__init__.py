"""NumPy's exceptions, under CuPy's names."""

from numpy.exceptions import (
    AxisError,
    ComplexWarning,
    TooHardError,
    VisibleDeprecationWarning,
)

__all__ = ["AxisError", "ComplexWarning", "TooHardError", "VisibleDeprecationWarning"]
