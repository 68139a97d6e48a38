"""Search for ranks that are missing at the start, in the shared file of `presence`."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcstrat.engine.topology.process_stat import STATE, pid_namespace, process_stat
from hpcstrat.safety.presence import CREATES, FAILED, LEFT, MADE, STARTS, LaunchRegistry
from hpcstrat.safety.watchdog.late_ranks import LateRank
from hpcstrat.safety.watchdog.stacks import HELD, Process, Stacks, look_at

__all__ = ["Missing", "missing_ranks"]

_MOST_REASON = 160


@dataclass(frozen=True, slots=True)
class Missing:
    """A rank that is missing at the start, so that other ranks wait for it."""

    rank: int
    host: str
    # What is known about the rank, as a relative clause; may be empty.
    words: str = ""
    # True if this host has seen the rank, or knows that it has not started.
    known: bool = True
    # True if it is certain that the rank will not arrive.
    gone: bool = False
    page: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Describe the rank as a part of a sentence."""
        words = f", {self.words}" if self.words else ""
        return f"rank {self.rank} on {self.host}{words}"

    def described(self) -> LateRank:
        """Describe the rank and its stacks for a report, in up to half a second."""
        page, stacks = self.page, Stacks()
        if "process" in page and not page["ended"] and page["pids"] == pid_namespace():
            stacks = look_at(Process(*page["process"]))
        words = [self.words, "" if stacks.words == HELD else stacks.words]
        clause = ", ".join(filter(None, words))
        shown = Stacks(clause, stacks.where, stacks.text)
        return LateRank(self.rank, self.host, shown)


def missing_ranks(
    board: LaunchRegistry | None,
    ranks: Sequence[int],
    group: str,
    turn: int,
    *,
    seen_only: bool = False,
) -> list[Missing]:
    """Return the ranks among ``ranks`` that do not wait in the same step as this rank.

    The step is the ``turn``-th creation of a strategy by the ranks of a group, or, if
    ``group`` is empty, the start of MPI. If no rank of this host is missing, all ranks
    of other hosts are returned, because their steps are unknown, unless ``seen_only``.
    """
    if board is None:
        return []
    awaited, seen, found = set(ranks), set(), []
    for rank in board.present():
        page = board.read(rank) if rank in awaited else None
        if page is None:
            continue
        seen.add(rank)
        if rank == board.launch.rank or _is_there(page, group, turn):
            continue
        over = page["stage"] == LEFT or (page["ended"] and not _lives(page))
        same = page["stage"] == FAILED and _is_of(page, group, turn)
        # If the process had not started MPI, and the launcher is not its direct parent,
        # it may have been only an earlier command of the rank's script.
        gone = bool((over and (page["mpi"] or page["own"])) or same)
        host = str(page["host"])
        found.append(Missing(rank, host, _words(page), gone=gone, page=page))
    return found if seen_only else _with_unseen(found, board, awaited - seen)


def _with_unseen(
    found: list[Missing], board: LaunchRegistry, unseen: set[int]
) -> list[Missing]:
    here, known = platform.node(), board.num_local == board.launch.size
    if found and not known:
        # Return only the missing ranks of this host: other hosts report their own.
        return found
    if known:
        words = "which has not reached `import hpcstrat`"
    else:
        here, words = "another host", "about which this host has no information"
    more = [Missing(rank, here, words, known=known) for rank in unseen if rank >= 0]
    return sorted([*found, *more], key=lambda one: one.rank)


def _is_of(page: dict[str, Any], group: str, turn: int) -> bool:
    return bool(group) and page.get("group") == group and page.get("turn", 0) == turn


def _is_there(page: dict[str, Any], group: str, turn: int) -> bool:
    if any(made[0] == group and made[1] >= turn for made in page.get("made", ())):
        return True
    stage = page["stage"]
    if page["ended"] or stage in (LEFT, FAILED):
        return False
    if not group:
        return stage in (STARTS, CREATES, MADE)
    return _is_of(page, group, turn) and stage == CREATES


def _words(page: dict[str, Any]) -> str:
    stage = page["stage"]
    if stage == FAILED:
        reason = str(page.get("reason"))
        cut = reason if len(reason) < _MOST_REASON else f"{reason[:_MOST_REASON]} ..."
        return f"which has raised {cut}"
    if stage == LEFT:
        return "which has left the program"
    if page["ended"]:
        return f"whose process ({page['pid']}) has ended"
    if stage == STARTS:
        return "which waits for MPI to start"
    if stage == CREATES:
        return f"which waits in {page['text']}"
    return ""


def _lives(page: dict[str, Any]) -> bool:
    """Return whether a process that has released its page still runs."""
    if page["pids"] != pid_namespace():
        return False
    try:
        return process_stat(page["pid"])[1][STATE] not in "ZX"
    except OSError:
        return False
