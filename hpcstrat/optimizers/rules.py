"""Facts about an update rule that its class declares."""

from __future__ import annotations

__all__ = ["has_two_stages", "is_of_elements"]


def is_of_elements(kind: type) -> bool:
    """Whether the rule of a class is known to treat each element by itself.

    A subclass may have another rule than its base.
    """
    return _declares(kind, "elementwise")


def has_two_stages(kind: type) -> bool:
    """Whether a rule of a class is known to begin with each element by itself."""
    return _declares(kind, "_two_stages")


def _declares(kind: type, name: str) -> bool:
    for each in kind.__mro__:
        if name in vars(each):
            return bool(vars(each)[name])
        if "update" in vars(each) or "_direction" in vars(each):
            return False
    return False
