"""A strategy whose calls are tested, the interface of these calls, and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import numpy as np

from tests.fuzz.calls.arrays import Key, difference

__all__ = ["Domain", "Failed", "Recipe", "compare"]


class Failed(AssertionError):
    """A result of a call is wrong."""


@dataclass
class Domain:
    """A strategy over the ranks of ``comm``, and the state of its sequence of calls."""

    name: str
    strategy: Any
    comm: Any
    # A number of the group of ranks; 0 if the domain has all ranks of the job.
    color: int = 0
    inside: bool = False
    # Functions that wait for the started calls, and compare their results.
    pending: list[Callable[[], None]] = field(default_factory=list)
    # Calls that may be made again, with the same arrays.
    recent: list[Any] = field(default_factory=list)
    moves: Any = None

    def __post_init__(self) -> None:
        self.moves = self.strategy.collectives.moves
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size

    @property
    def ranks(self) -> range:
        return range(self.size)


class Recipe(Protocol):
    """A call with its arrays, which can be made several times with other values."""

    def __init__(self, domain: Domain, style: Random, lengths: Random) -> None: ...

    def go(self, key: Key) -> None:
        """Make the call with the values of a key; raise Failed for a wrong result."""


def compare(found: Any, wanted: np.ndarray[Any, Any], what: str) -> None:
    """Raise Failed if an array differs from the wanted one."""
    if text := difference(found, wanted):
        raise Failed(f"{what}: {text}")
