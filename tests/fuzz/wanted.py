"""The expected result of an operation, computed by the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ALIKE", "ANY", "EXACT", "LOOSE", "UNORDERED", "Refused", "Want"]

EXACT = "exact"
"""Just this, on every rank."""

LOOSE = "loose"
"""This or any error, on each rank by itself: ranks are at different points."""

ALIKE = "alike"
"""This on every rank, or an error on every rank: the strategy may be broken."""

UNORDERED = "unordered"
"""These rows in any order, each once; or an error on every rank."""

ANY = object()
"""A value that is not looked at."""

Names = tuple[str, ...]


@dataclass
class Want:
    """The expected result on each replica: a value, or an error of some classes.

    Parameters
    ----------
    values : sequence of object
        One value for each replica; ignored for replicas with an error.
    errors : sequence of tuple of str or None
        The allowed error classes of each replica, or None for no error.
    mode : str
        The strictness of the comparison.
    alike : bool
        Whether the values must be equal bit by bit on all replicas.
    bits : bool
        Whether floats must equal the oracle's bit by bit, too.
    may_refuse : bool
        Whether an error on every replica is also right; nothing is checked after it.
    ranks_per_replica : int
        How many ranks must see the result of each replica.
    """

    values: Sequence[Any]
    errors: Sequence[Names | None]
    mode: str = EXACT
    alike: bool = False
    bits: bool = False
    may_refuse: bool = False
    ranks_per_replica: int = 1


class Refused(Exception):
    """Raised for an operation that must fail, with each replica's error classes."""

    def __init__(self, errors: Sequence[Names]) -> None:
        super().__init__(errors)
        self.errors = list(errors)
