"""Properties that update rules declare in their classes, and the compiled rules."""

from __future__ import annotations

import functools
from types import ModuleType

from hpcstrat.engine.native import load_update_rules
from hpcstrat.engine.settings import Settings


@functools.cache
def compiled_rules() -> ModuleType | None:
    """Return the module of compiled update rules; None if it is not installed.

    Also None with ``HPCSTRAT_NATIVE=0``. Compiled rules and NumPy rules have results
    with the same bits, so some ranks may use compiled rules and others NumPy.
    """
    return load_update_rules() if Settings().resolved().native else None


def is_of_elements(kind: type) -> bool:
    """Return whether a class declares that its rule updates each element by itself.

    A subclass that defines another rule does not inherit the declaration."""
    return _declares(kind, "elementwise")


def has_two_stages(kind: type) -> bool:
    """Return whether a class declares that its rule has a first, elementwise stage."""
    return _declares(kind, "_two_stages")


def _declares(kind: type, name: str) -> bool:
    for each in kind.__mro__:
        if name in vars(each):
            return bool(vars(each)[name])
        if "update" in vars(each) or "_first_stage" in vars(each):
            return False
    return False
