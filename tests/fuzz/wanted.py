"""The outcome of an operation, as the oracle tells it."""

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
    """What each replica must see: a value, or an error of some classes.

    Parameters
    ----------
    values : sequence of object
        One for each replica; of those that have an error, not looked at.
    errors : sequence of tuple of str or None
        For each replica the classes that its error must be of; None for no error.
    mode : str
        How strictly.
    alike : bool
        Whether the values must have the same bits on all replicas.
    bits : bool
        Whether floats must be equal bit for bit, too.
    may_refuse : bool
        Whether an error on every replica is as good, and ends what can be judged.
    """

    values: Sequence[Any]
    errors: Sequence[Names | None]
    mode: str = EXACT
    alike: bool = False
    bits: bool = False
    may_refuse: bool = False


class Refused(Exception):
    """The operation is an error: for each replica, of which classes."""

    def __init__(self, errors: Sequence[Names]) -> None:
        super().__init__(errors)
        self.errors = list(errors)
