"""Results of a coordinator that may differ from TensorFlow's."""

from __future__ import annotations

from tests.conformance.rules import Memory
from tests.conformance.views import View

__all__ = ["any_function"]


def any_function(view: View, memory: Memory) -> str | None:
    """Declare a scheduled Python function, which TensorFlow would have to compile."""
    spec = view.spec
    if spec["op"] != "schedule" or "python_callable" not in spec["fn"]:
        return None
    declared = view.expected_error() == "TypeError" and not any(view.errors)
    return "schedule-any-function" if declared else None
