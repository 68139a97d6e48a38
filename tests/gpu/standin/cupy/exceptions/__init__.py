"""NumPy's exceptions, where CuPy has them."""

from numpy.exceptions import (
    AxisError,
    ComplexWarning,
    TooHardError,
    VisibleDeprecationWarning,
)

__all__ = ["AxisError", "ComplexWarning", "TooHardError", "VisibleDeprecationWarning"]
