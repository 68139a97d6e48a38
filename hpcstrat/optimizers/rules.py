"""Facts that update rules declare in their classes, and the compiled rules."""

from __future__ import annotations

import functools
from types import ModuleType

from hpcstrat.engine.native import load_update_rules
from hpcstrat.engine.settings import Settings


@functools.cache
def compiled_rules() -> ModuleType | None:
    """Return the compiled rules; None without them, or with ``HPCSTRAT_NATIVE=0``.

    They give the bits of NumPy's rules, so that ranks need not agree on them.
    """
    return load_update_rules() if Settings().resolved().native else None


def is_of_elements(kind: type) -> bool:
    """Whether the rule of a class declares that it treats each element by itself.

    The declaration does not hold for a subclass with another rule.
    """
    return _declares(kind, "elementwise")


def has_two_stages(kind: type) -> bool:
    """Whether the rule of a class declares a first stage for each element by itself."""
    return _declares(kind, "_two_stages")


def _declares(kind: type, name: str) -> bool:
    for each in kind.__mro__:
        if name in vars(each):
            return bool(vars(each)[name])
        if "update" in vars(each) or "_first_stage" in vars(each):
            return False
    return False
