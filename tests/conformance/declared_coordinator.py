"""Results of a coordinator that rightly differ from TensorFlow's."""

from __future__ import annotations

from tests.conformance.rules import Memory
from tests.conformance.views import View

__all__ = ["any_function"]


def any_function(view: View, memory: Memory) -> str | None:
    """A function is scheduled that TensorFlow would have to compile before."""
    spec = view.spec
    if spec["op"] != "schedule" or "python_callable" not in spec["fn"]:
        return None
    declared = view.expected_error() == "TypeError" and not any(view.errors)
    return "schedule-any-function" if declared else None
