"""Update rules: facts that their classes declare, and the compiled ones."""

from __future__ import annotations

import functools
from types import ModuleType

from hpcstrat.engine.native import load_update_rules
from hpcstrat.engine.settings import Settings


@functools.cache
def compiled_rules() -> ModuleType | None:
    """Return the compiled rules; None without them, or with ``HPCSTRAT_NATIVE=0``.

    Their results have the bits of NumPy's, so ranks need not agree on them.
    """
    return load_update_rules() if Settings().resolved().native else None


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
        if "update" in vars(each) or "_first_stage" in vars(each):
            return False
    return False
