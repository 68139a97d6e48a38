"""What is said when the ranks' headers differ."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcstrat.errors import CollectiveError, ReplicaError

__all__ = ["FAILED", "LEFT", "Announcement", "explain"]

LEFT = 1
FAILED = 2

# Errors that are made of a message alone, as all of ours are.
_COMBINABLE = (
    *(ArithmeticError, AssertionError, AttributeError, FileNotFoundError),
    *(FloatingPointError, IndexError, KeyError, LookupError, MemoryError),
    *(NotImplementedError, OSError, OverflowError, PermissionError, TypeError),
    *(ValueError, ZeroDivisionError),
)


@dataclass(slots=True)
class Announcement:
    """What one rank announced.

    Parameters
    ----------
    rank : int
        Which rank.
    flags : int
        ``LEFT``, ``FAILED`` or 0.
    text : str
        The call, or what the rank was doing.
    reason : str
        The error of a rank that failed.
    kind : type, optional
        Its class.
    site : str
        File and line.
    run_index : int
        How often the rank has entered ``run``.
    pending : int
        How many of the rank's started calls have not ended.
    """

    rank: int
    flags: int
    text: str
    reason: str = ""
    kind: Any = None
    site: str = ""
    run_index: int = 0
    pending: int = 0


def explain(announcements: Sequence[Announcement]) -> CollectiveError:
    """Return the error that all ranks raise.

    Not collective.

    Parameters
    ----------
    announcements : sequence of Announcement
        Of every rank, in order.

    Returns
    -------
    CollectiveError
        The same text on every rank.
    """
    failed = [a for a in announcements if a.flags & FAILED]
    left = [a for a in announcements if a.flags & LEFT]
    if failed:
        words = "; ".join(
            f"rank {a.rank} failed in {a.text}{_at(a)}: {a.reason}" for a in failed
        )
        return _replica_error_class(failed[0].kind)(
            f"expected every replica to go on, found that {words}; handle the error on "
            "that rank, or skip this step on all",
            [a.rank for a in failed],
        )
    calls = _group([a for a in announcements if not a.flags & LEFT])
    if left:
        return CollectiveError(
            f"expected all ranks in one call, found that {calls}, while "
            f"{_ranks(left)} had left the program; make the same calls on every rank "
            "until the end",
            [a.rank for a in left],
        )
    if len({a.text for a in announcements}) == 1:
        if len({a.run_index for a in announcements}) == 1:
            return CollectiveError(
                "expected all ranks at the same point of the program, found that "
                f"{calls}, but that a rank was interrupted in an earlier call, or "
                "left it out; make the same calls on every rank"
            )
        runs = ", ".join(f"rank {a.rank}: {a.run_index}" for a in announcements)
        return CollectiveError(
            f"expected all ranks at the same point of the program, found that {calls}, "
            f"but not after the same number of calls of run ({runs}); a rank has left "
            "out a call, or made one too many"
        )
    return CollectiveError(
        f"expected all ranks in one call, found that {calls}; make the same calls with "
        "the same shapes and dtypes, in the same order, on every rank"
    )


@functools.cache
def _replica_error_class(kind: Any) -> type[ReplicaError]:
    """Return ReplicaError as a subclass of the error that another rank raised.

    One ``except ValueError`` then does the same on every rank.
    """
    if kind not in _COMBINABLE:
        return ReplicaError
    return type("ReplicaError", (ReplicaError, kind), {"__doc__": kind.__doc__})


def _at(announcement: Announcement) -> str:
    return f" ({announcement.site})" if announcement.site else ""


def _ranks(announcements: Sequence[Announcement]) -> str:
    numbers = [a.rank for a in announcements]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"{len(numbers)} ranks ({', '.join(map(str, numbers[:8]))}, ...)"
    return f"ranks {', '.join(map(str, numbers))}"


def _group(announcements: Sequence[Announcement]) -> str:
    """Name each different call once, with the ranks that made it."""
    groups: dict[str, list[Announcement]] = {}
    for announcement in announcements:
        groups.setdefault(announcement.text + _at(announcement), []).append(
            announcement
        )
    return " and ".join(f"{_ranks(g)} called {text}" for text, g in groups.items())
