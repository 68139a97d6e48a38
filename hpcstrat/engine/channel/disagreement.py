"""Errors that explain how the ranks' headers differ."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from hpcstrat.engine.call_sites import is_of_program
from hpcstrat.errors import CollectiveError, HpcstratError, ReplicaError

__all__ = [
    "FAILED",
    "LEFT",
    "NOTICE",
    "Announcement",
    "Failure",
    "announce_error",
    "explain",
    "only_fingerprints_differ",
    "same_call",
]

_Key = TypeVar("_Key")

LEFT = 1
FAILED = 2
# In a header only: the rank has something to tell, and goes on, see `Channel.notice`.
NOTICE = 4

# Errors that are made of a message alone, as all of ours are.
_COMBINABLE = (
    *(ArithmeticError, AssertionError, AttributeError, FileNotFoundError),
    *(FloatingPointError, IndexError, KeyError, LookupError, MemoryError),
    *(NotImplementedError, OSError, OverflowError, PermissionError, RuntimeError),
    *(TypeError, ValueError, ZeroDivisionError),
)


@dataclass(slots=True)
class Announcement:
    """One rank's announcement of its call."""

    rank: int
    # ``LEFT``, ``FAILED`` or 0.
    flags: int
    # The call, or what the rank was doing.
    text: str
    # The error of a rank that failed.
    reason: str = ""
    # Its class, and the bases of that, as of `_class_names`.
    classes: tuple[str, ...] = ()
    # Whether the error only tells of another rank's.
    secondary: bool = False
    # File and line of the program.
    site: str = ""
    # As `Position.steps`.
    steps: tuple[int, int, int] = (0, 0, 0)
    # Number of the rank's started calls that have not ended.
    pending: int = 0
    # Number of sections that the rank is in.
    depth: int = 0
    # Hash of the call; combined with `run_fingerprint` for a call that waits.
    digest: int = 0
    # Number that stands for the rank's steps and copies of variables in the record.
    run_fingerprint: int = 0
    # Text that the rank tells the others without ending a call.
    notice: str = ""

    @property
    def at(self) -> str:
        """The site in brackets, if it is known."""
        return f" ({self.site})" if self.site else ""


def announce_error(rank: int, what: str, error: BaseException) -> Announcement:
    """Return what a rank that failed tells the others.

    Only text and numbers: the error's class may be unknown elsewhere.
    """
    try:
        reason = f"{type(error).__name__}: {error}"
    except Exception:
        # The class may be a program's own and faulty.
        reason = type(error).__name__
    site, trace = "", error.__traceback__
    while trace is not None:
        # The last frame of the program that the error passed.
        name = trace.tb_frame.f_code.co_filename
        if is_of_program(name):
            site = f"{os.path.basename(name)}:{trace.tb_lineno}"
        trace = trace.tb_next
    secondary = isinstance(error, ReplicaError)
    return Announcement(
        *(rank, FAILED, what, reason, _class_names(error), secondary, site)
    )


def _class_names(error: BaseException) -> tuple[str, ...]:
    """Return ``module:qualified name`` of an error's class and bases, nearest first."""
    return tuple(
        f"{c.__module__}:{c.__qualname__}"
        for c in type(error).__mro__
        if c not in (Exception, BaseException, object)
    )


def _failed(announcements: Sequence[Announcement]) -> list[Announcement]:
    """Return the announcements of ranks that failed by themselves; else at all."""
    failed = [a for a in announcements if a.flags & FAILED]
    return [a for a in failed if not a.secondary] or failed


def same_call(announcements: Sequence[Announcement]) -> bool:
    """Return whether ranks are in the same call, whatever variables they have."""
    calls = {(a.flags, a.text, a.digest, a.steps) for a in announcements}
    return len(calls) == 1 and not announcements[0].flags


def only_fingerprints_differ(announcements: Sequence[Announcement]) -> bool:
    """Return whether ranks are in the same call, but may have other variables."""
    marks = {a.run_fingerprint for a in announcements}
    return len(marks) > 1 and same_call(announcements)


def explain(announcements: Sequence[Announcement]) -> CollectiveError:
    """Return the error that all ranks raise; its text is the same on every rank."""
    failed = _failed(announcements)
    if failed:
        words = "; ".join(
            f"rank {a.rank} failed in {a.text}{a.at}: {a.reason}" for a in failed
        )
        _, raised = _common_class(failed[0].classes)
        return raised(
            f"expected every replica to go on, found that {words}; handle the error on "
            "that rank, or skip this step on all",
            [a.rank for a in failed],
        )
    left = [a for a in announcements if a.flags & LEFT]
    calls = _calls(a for a in announcements if not a.flags & LEFT)
    steps = _steps(announcements)
    if left:
        return CollectiveError(
            f"expected all ranks in one call, found that {calls}, while "
            f"{_ranks(left)} had left the program{steps}; make the same calls on every "
            "rank until the end",
            [a.rank for a in left],
        )
    if len({a.text for a in announcements}) > 1:
        return CollectiveError(
            f"expected all ranks in one call, found that {calls}{steps}; make the same "
            "calls with the same shapes and dtypes, in the same order, on every rank"
        )
    why = (
        "; a rank has left out a step, or made one too many: end the program, restore "
        "a checkpoint or make a new strategy, on every rank"
        if steps
        else ", but that a rank was interrupted in an earlier call, or left it out; "
        "make the same calls on every rank"
    )
    return CollectiveError(
        "expected all ranks at the same point of the program, found that "
        f"{calls}{steps}{why}"
    )


class Failure:
    """A failure, or calls that differ, as all ranks know them.

    ``error`` is raised on ranks that have no error of their own; ``announcements`` are
    of every rank, in order.
    """

    def __init__(
        self, error: CollectiveError, announcements: Sequence[Announcement]
    ) -> None:
        self.error = error
        causes = _failed(announcements)
        self._names = causes[0].classes if causes else ()
        self._kind, _ = _common_class(self._names)
        innermost = min(a.depth for a in announcements)
        # Started calls of which nobody knows whether the others have started them end
        # with the section that they belong to.
        several = any(a.pending > 1 for a in announcements)
        # All ranks leave their sections from this depth on. Where only the call failed,
        # it is greater than any depth: the program may go on inside.
        self.level = innermost + (0 if several and innermost else 1)
        self.loses_calls = any(
            a.pending > 1 and a.depth < self.level for a in announcements
        )

    def instead_of(self, error: BaseException | None) -> BaseException:
        """Return what a rank raises, so that one ``except`` decides alike on all.

        The rank's own error, if it is of the class of the first rank's that failed.
        """
        if error is None:
            return self.error
        if not self._names:
            keeps = isinstance(error, CollectiveError)
        elif self._kind is not None and isinstance(error, self._kind):
            keeps = True
        else:
            keeps = _class_names(error)[:1] == self._names[:1]
        if keeps or error is self.error:
            return error
        self.error.__cause__ = error
        return self.error


def _common_class(names: Sequence[str]) -> tuple[Any, type[ReplicaError]]:
    """Return the nearest class of `_class_names` that other ranks' errors can have.

    A common built-in class, or a class of the program that adds no constructor to one;
    None where there is none. Then ReplicaError as a subclass of it.
    """
    for name in names:
        module, _, path = name.partition(":")
        found: Any = sys.modules.get(module)
        for part in path.split("."):
            found = getattr(found, part, None)
        combined = _combined(found) if isinstance(found, type) else None
        if combined is not None:
            return found, combined
    return None, ReplicaError


@functools.lru_cache(maxsize=1024)
def _combined(kind: Any) -> type[ReplicaError] | None:
    """Return ReplicaError as a subclass of an error's class, if that can be.

    One ``except ValueError`` then does the same on every rank.
    """
    if kind in (Exception, HpcstratError) or not issubclass(kind, Exception):
        return None
    if issubclass(ReplicaError, kind) and issubclass(kind, RuntimeError):
        return ReplicaError
    for base in kind.__mro__:
        if base in _COMBINABLE or base in (Exception, HpcstratError):
            break
        # A class with one of these may need other arguments than a message.
        if {"__init__", "__new__", "__str__"} & vars(base).keys():
            return None
        if base.__module__ == "builtins":
            return None
    try:
        return type("ReplicaError", (ReplicaError, kind), {"__doc__": kind.__doc__})
    except TypeError:
        return None


def _ranks(announcements: Sequence[Announcement]) -> str:
    numbers = [a.rank for a in announcements]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"{len(numbers)} ranks ({', '.join(map(str, numbers[:8]))}, ...)"
    return f"ranks {', '.join(map(str, numbers))}"


def _calls(announcements: Iterable[Announcement]) -> str:
    """Name each different call once, with the ranks that made it."""
    groups = _grouped((a.text + a.at, a) for a in announcements)
    return " and ".join(f"{_ranks(g)} called {text}" for text, g in groups.items())


def _steps(announcements: Sequence[Announcement]) -> str:
    """Tell the ranks' steps where they differ."""
    groups = _grouped((a.steps, a) for a in announcements)
    if len(groups) == 1:
        return ""
    # Backwards are of those alone who replicate a module.
    trains = any(backwards for _, _, backwards in groups)
    told = "; ".join(
        f"{_ranks(group)}: {runs} of run, {nexts} of next()"
        + f", {backwards} of backward()" * trains
        for (runs, nexts, backwards), group in groups.items()
    )
    return f", not after equally many steps ({told})"


def _grouped(
    keyed: Iterable[tuple[_Key, Announcement]],
) -> dict[_Key, list[Announcement]]:
    groups: dict[_Key, list[Announcement]] = {}
    for key, announcement in keyed:
        groups.setdefault(key, []).append(announcement)
    return groups
