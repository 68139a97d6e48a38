"""Announcements of ranks whose headers differ, and the errors that all ranks raise."""

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
    "differing",
    "explain",
]

_Key = TypeVar("_Key")

LEFT = 1
FAILED = 2
# Only in headers: the rank has a notice, and continues, see `Channel.notice`.
NOTICE = 4


@dataclass(slots=True)
class Announcement:
    """One rank's description of its call, or of its failure, for the other ranks."""

    rank: int
    # ``LEFT``, ``FAILED``, or 0 for a rank that makes a call.
    flags: int
    # The rank's call, or the code in which it failed.
    text: str
    # The error of a rank that failed, as text.
    reason: str = ""
    # The error's class and its base classes, as returned by `_class_names`.
    classes: tuple[str, ...] = ()
    # True if the error only reports an error of another rank.
    secondary: bool = False
    # File name and line number of the call, or of the failure, in the program.
    site: str = ""
    # The rank's step counts, as in `Position.steps`.
    steps: tuple[int, int, int] = (0, 0, 0)
    # Number of the rank's started calls that have not ended.
    pending: int = 0
    # Number of sections that the rank is in.
    depth: int = 0
    # Hash of the call; the next place of the rank's ring, and `Call.lengths`.
    digest: int = 0
    place: int = 0
    lengths: int = 0
    # Number that represents the rank's steps and its copies of variables.
    run_fingerprint: int = 0
    # A text for the other ranks that does not end the call, see `Channel.notice`.
    notice: str = ""

    @property
    def at(self) -> str:
        """The file and line in brackets, or "" if they are not known."""
        return f" ({self.site})" if self.site else ""


def announce_error(rank: int, what: str, error: BaseException) -> Announcement:
    """Return the announcement of a rank that failed, which contains no object."""
    try:
        reason = f"{type(error).__name__}: {error}"
    except Exception:
        # The error may be of a class of the program whose ``__str__`` raises.
        reason = type(error).__name__
    site, trace = "", error.__traceback__
    while trace is not None:
        # Keep the innermost frame that belongs to the program.
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
    """Return the failures that no other rank's error caused; if none, all failures."""
    failed = [a for a in announcements if a.flags & FAILED]
    return [a for a in failed if not a.secondary] or failed


def differing(announcements: Sequence[Announcement]) -> set[str]:
    """Return the names of the attributes of `Announcement` in which calls differ."""
    names = "flags", "text", "digest", "steps", "place", "lengths", "run_fingerprint"
    return {n for n in names if len({getattr(a, n) for a in announcements}) > 1}


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
            + advice_on_lengths(a.text for a in announcements)
        )
    # Counts of backward() differ if a rank has skipped a step of its training.
    skipped = len({a.steps[2] for a in announcements}) > 1
    why = (
        "; a rank has left out a step, or made one too many: "
        + "skip a step on all ranks or on none, call a module under torch.no_grad() if "
        "no backward follows, and now "
        * skipped
        + "end the program, restore a checkpoint or make a new strategy, on every rank"
        if steps
        else ", but a rank was interrupted in an earlier call, or omitted it; make the "
        "same calls on every rank"
    )
    return CollectiveError(
        "expected all ranks at the same point of the program, found that "
        f"{calls}{steps}{why}"
    )


def advice_on_lengths(calls: Iterable[str]) -> str:
    """Return advice on calls that differ, if all of them are started gathers."""
    started = all(text.startswith("start_all_gather") for text in calls)
    return " (all_gather accepts different lengths)" if started else ""


class Failure:
    """A failure of ranks, or a difference between their calls, as all ranks know it.

    ``error`` is raised on ranks that have no error of their own; by default, it
    explains the ``announcements``.
    """

    def __init__(
        self,
        announcements: Sequence[Announcement],
        error: CollectiveError | None = None,
    ) -> None:
        self.error = error or explain(announcements)
        causes = _failed(announcements)
        # If no rank has failed, a rank keeps its own error only if it is of this kind.
        self._names = causes[0].classes if causes else ("",)
        self._kind = _common_class(self._names)[0] if causes else CollectiveError
        innermost = min(a.depth for a in announcements)
        # If a rank has several started calls, the ranks do not know which of them the
        # other ranks have started: then the innermost common section ends, too.
        several = any(a.pending > 1 for a in announcements)
        # All ranks leave the sections of this depth and deeper. If no rank is in such a
        # section, only the call has failed, and the program may continue.
        self.level = innermost + (0 if several and innermost else 1)
        self.loses_calls = any(
            a.pending > 1 and a.depth < self.level for a in announcements
        )

    def instead_of(self, error: BaseException | None) -> BaseException:
        """Return the error that this rank raises, given its own ``error`` or None.

        That is its own error if it has the class of the first failed rank's error, so
        that one ``except`` clause catches the errors of all ranks.
        """
        if error is None or error is self.error:
            return self.error
        alike = self._kind is not None and isinstance(error, self._kind)
        if alike or _class_names(error)[:1] == self._names[:1]:
            return error
        self.error.__cause__ = error
        return self.error


def _common_class(names: Sequence[str]) -> tuple[Any, type[ReplicaError]]:
    """Return the first class that `_combined` accepts, or None; and the combination."""
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
    """Return a subclass of ReplicaError and of an error's class; None if impossible."""
    if kind in (Exception, HpcstratError) or not issubclass(kind, Exception):
        return None
    # The first two end loops; tracebacks of the third do not show its message.
    if issubclass(kind, (StopIteration, StopAsyncIteration, SyntaxError)):
        return None
    if issubclass(ReplicaError, kind) and issubclass(kind, RuntimeError):
        return ReplicaError
    for base in kind.__mro__:
        # A class with one of these methods may need other arguments than a message.
        own = {"__init__", "__new__", "__str__"} & vars(base).keys()
        if own and base.__module__ != "builtins":
            return None
    try:
        made = type("ReplicaError", (ReplicaError, kind), {"__doc__": kind.__doc__})
        made("a message")
    except TypeError:
        # The two classes, or a message and a built-in class, do not fit each other.
        return None
    return made


def _ranks(announcements: Sequence[Announcement]) -> str:
    numbers = [a.rank for a in announcements]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > 8:
        return f"{len(numbers)} ranks ({', '.join(map(str, numbers[:8]))}, ...)"
    return f"ranks {', '.join(map(str, numbers))}"


def _calls(announcements: Iterable[Announcement]) -> str:
    """Return a text that names each different call once, and the ranks that made it."""
    groups = _grouped((a.text + a.at, a) for a in announcements)
    return " and ".join(f"{_ranks(g)} called {text}" for text, g in groups.items())


def _steps(announcements: Sequence[Announcement]) -> str:
    """Return a text with the ranks' step counts, or "" if they are equal."""
    groups = _grouped((a.steps, a) for a in announcements)
    if len(groups) == 1:
        return ""
    # Mention backward passes only if a rank has replicated a module.
    trains = any(backwards for _, _, backwards in groups)
    told = "; ".join(
        f"{_ranks(group)}: {runs} call{'s' * (runs != 1)} of run, {nexts} of next()"
        + f", {backwards} of backward()" * trains
        for (runs, nexts, backwards), group in groups.items()
    )
    return f", after different numbers of steps ({told})"


def _grouped(
    keyed: Iterable[tuple[_Key, Announcement]],
) -> dict[_Key, list[Announcement]]:
    groups: dict[_Key, list[Announcement]] = {}
    for key, announcement in keyed:
        groups.setdefault(key, []).append(announcement)
    return groups
