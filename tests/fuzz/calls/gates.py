"""Known faults of the library: tests leave out the calls that show them."""

from __future__ import annotations

from typing import Any

from tests.fuzz.calls.domain import Domain
from tests.fuzz.calls.moves import AllGather, Gather

__all__ = ["known_fault"]


def known_fault(domain: Domain, recipe: Any) -> str:
    """Return the fault that a call is known to show, or an empty text.

    The answer is the same on all ranks of the domain.
    """
    one_worker = domain.strategy.topology.num_workers == 1 and domain.size > 1
    gathers = one_worker and isinstance(recipe, AllGather | Gather)
    if gathers and 64 % recipe.dtype.itemsize:
        return "the rings have no view of types whose size does not divide 64 bytes"
    return ""
