"""The creation of a strategy: checks of the calls, time limit, reports of late ranks.

Before the first channel exists, ranks cannot exchange headers. Instead, ranks compare
their calls by a nonblocking allgather on the program's communicator. A rank finds the
missing ranks of its host in the shared file of `presence`. A thread reports missing
ranks, even while MPI starts, and ends the process if its main thread is blocked.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from hpcstrat.engine.call_sites import call_site
from hpcstrat.engine.channel.call import Call
from hpcstrat.engine.channel.disagreement import (
    FAILED,
    Announcement,
    announce_error,
    explain,
)
from hpcstrat.engine.logs import get_logger
from hpcstrat.engine.settings import Settings
from hpcstrat.engine.topology.kept_requests import keep
from hpcstrat.engine.topology.survival import is_loss, revoke
from hpcstrat.errors import CollectiveError, RankLostError
from hpcstrat.safety.presence import CREATES, MADE, STARTS, own_registry
from hpcstrat.safety.presence import FAILED as LEFT_BY_ERROR
from hpcstrat.safety.start.missing import Missing, missing_ranks
from hpcstrat.safety.uncaught import running_mpi
from hpcstrat.safety.watchdog.late_ranks import SHOWN_RANKS, LateReport, some_ranks
from hpcstrat.safety.watchdog.watchdog import end_process

__all__ = ["Creation"]

_REPEAT = 10
_MOST_MADE = 16
# Seconds from the report of missing ranks to the limit, and the smallest limit: because
# a start takes longer, a smaller ``limit_seconds`` is valid for collective calls only.
_LEAD_SECONDS = 5.0
_LEAST_LIMIT_SECONDS = 10.0
_SLOW_SECONDS = 60.0
_SHORTEST_TICK_SECONDS = 0.05
_LOOK_SECONDS = 0.25
_SPIN_SECONDS = 0.001
_NAP_STEP_SECONDS = 2e-5
_LONGEST_NAP_SECONDS = 0.001
# Delays before this process ends. First: time in which a failed rank can notify the
# other ranks by MPI, or the launcher can end the job. Second: time in which the main
# thread can raise an error.
_GRACE_SECONDS = 5.0
_MAIN_SECONDS = 20.0

# Number of strategies that this process has begun to create, by group of ranks.
_turns: dict[str, int] = {}


def _start_seconds() -> float:
    """Return the limit that ``hpcstrat watch`` sets for the start of its program.

    The watchers start a program again that ends at this limit. It is for the first
    strategy, as ranks may come to others much later than other ranks.
    """
    try:
        return float(os.environ.get("HPCSTRAT_WATCH_START_SECONDS", ""))
    except ValueError:
        return math.inf


class Creation:
    """Context manager that watches over the start of MPI and a strategy's creation."""

    def __init__(self, what: str, given: Settings) -> None:
        try:
            settings = given.resolved()
        except (AttributeError, TypeError, ValueError):
            # Use default settings: replica 0 or the caller reports the invalid setting.
            settings = Settings().resolved({})
        assert settings.warn_seconds is not None
        assert settings.limit_seconds is not None
        self._warn = settings.warn_seconds
        limit = min(settings.limit_seconds, math.inf if _turns else _start_seconds())
        self._limit = max(limit, _LEAST_LIMIT_SECONDS)
        self._watches = settings.watchdog
        self._what, self._site = what, call_site()
        self._board = own_registry()
        launch = None if self._board is None else self._board.launch
        self._ranks: Sequence[int] = range(0 if launch is None else launch.size)
        self._group, self._turn = "", 0
        self._survives = self._polls = self._pauses = self._met = False
        self._guess: Exception | None = None
        self._since = self._reported_at = time.monotonic()
        self._hopeless_since = math.inf
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._step(CREATES if running_mpi() else STARTS)
        if self._watches:
            try:
                threading.Thread(
                    target=self._watch, name="hpcstrat-start", daemon=True
                ).start()
            except RuntimeError as error:
                get_logger().warning("the start is not supervised: %s", error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the watching thread, and publish whether the creation succeeded."""
        self._ended.set()
        if self._board is not None:
            stage = MADE if kind is None else LEFT_BY_ERROR
            reason = "" if kind is None else f"{kind.__name__}: {error}"
            made = self._board.page.get("made", [])
            if kind is None:
                made = [*made, [self._group, self._turn]][-_MOST_MADE:]
            self._board.show(stage=stage, reason=reason, made=made)

    def _step(self, stage: str) -> None:
        """Record and publish that this rank begins a step of the creation now."""
        self._since = self._reported_at = time.monotonic()
        self._hopeless_since = math.inf
        if self._board is not None:
            self._board.show(
                stage=stage,
                text=f"{self._what}{f' ({self._site})' if self._site else ''}",
                group=self._group,
                turn=self._turn,
                mpi=running_mpi() is not None,
            )

    def pause(self, pauses: bool) -> None:
        """Pause or resume the watching thread; a channel's watchdog watches instead."""
        self._pauses = pauses
        self._step(CREATES)

    def meet(
        self,
        mpi: Any,
        comm: Any,
        call: Call,
        problem: Exception | None = None,
        *,
        survives: bool = False,
        guesses: bool = False,
    ) -> None:
        """Wait for all ranks, and check that all are about to create the same strategy.

        Collective over ``comm``. Raises a CollectiveError on every rank if ranks are
        about to create different strategies, or if some ranks do not arrive in time. If
        a rank has a ``problem`` (an exception), it raises this exception, and the other
        ranks raise a ReplicaError. If ``survives``, the death of a rank raises
        RankLostError. If ``guesses``, this rank may use another communicator than the
        other ranks: if they do not arrive within a few seconds, this rank raises its
        ``problem``.
        """
        self._survives, self._guess = survives, problem if guesses else None
        group, every = comm.Get_group(), mpi.COMM_WORLD.Get_group()
        self.join(mpi, group.Translate_ranks(None, every), call.text)
        group.Free()
        every.Free()
        if comm.size > 1:
            try:
                self._compare(comm, call, problem)
            except mpi.Exception as error:
                if not survives or not is_loss(mpi, error, comm):
                    raise
                # Revoke: other ranks may still wait for this rank in the allgather.
                revoke([comm])
                raise RankLostError(
                    f"expected all ranks in {call.text}, found that one was lost; form "
                    "another one of the remaining ranks"
                ) from error
        if problem is not None:
            raise problem
        self._met = True
        self._step(CREATES)

    def join(self, mpi: Any, ranks: Sequence[int], text: str) -> None:
        """Set the ranks of the job that create the strategy together.

        From now on, the watching thread reports which of these ranks are missing, and
        limits the wait for them, even while MPI blocks the main thread.
        """
        world = mpi.COMM_WORLD
        if self._board is not None and world.rank != self._board.launch.rank:
            # Do not use the pages: MPI has spawned these processes, or the launcher
            # numbers ranks in another way, so that a page's rank is unknown.
            self._board = None
        self._ranks = ranks
        some = len(self._ranks) < world.size
        self._what = text + (f" on {some_ranks(self._ranks)}" if some else "")
        words = ",".join(map(str, self._ranks)).encode()
        self._group = hashlib.blake2b(words, digest_size=8).hexdigest()
        self._turn = _turns[self._group] = _turns.get(self._group, 0) + 1
        self._step(CREATES)

    def _compare(self, comm: Any, call: Call, problem: Exception | None) -> None:
        """Compare all ranks' calls; raise any error, unless this rank has a problem."""
        own = np.array([call.digest, FAILED if problem else 0], np.int64)
        table = np.empty((comm.size, 2), np.int64)
        request = comm.Iallgather(own, table)
        try:
            self._await(request)
        except BaseException:
            keep([request])
            raise
        if (table == own).all() and problem is None:
            return
        announcement = Announcement(comm.rank, 0, call.text, digest=call.digest)
        if problem is not None:
            announcement = announce_error(comm.rank, call.text, problem)
        announcement.site = announcement.site or self._site
        announcements = comm.allgather(announcement)
        error = explain([replace(a, rank=self._ranks[a.rank]) for a in announcements])
        if problem is None:
            raise error

    def _await(self, request: Any) -> None:
        self._polls, start, turns = True, time.monotonic(), 0
        look_at = start + _LOOK_SECONDS
        try:
            while not request.Test():
                now = time.monotonic()
                if now > look_at:
                    look_at = now + _LOOK_SECONDS
                    self._check(now)
                if now > start + _SPIN_SECONDS:
                    turns += 1
                    nap = turns * _NAP_STEP_SECONDS
                    time.sleep(min(nap, _LONGEST_NAP_SECONDS))
        finally:
            self._polls = False

    def _check(self, now: float) -> None:
        """Raise an error if ranks will never arrive, or have not arrived in time."""
        if self._guess is not None and now > self._since + _GRACE_SECONDS:
            raise self._guess
        gone = self._hopeless(now)
        if gone:
            ranks = [one.rank for one in gone]
            raise CollectiveError(
                f"expected all ranks in {self._what}, found that these will not come: "
                f"{_named(gone)}; make the same strategies on every rank",
                ranks,
            )
        if now > self._since + self._limit:
            late = self._missing()
            raise CollectiveError(
                f"expected all ranks in {self._what} within {self._limit:g} s, found "
                f"that these did not come: {_named(late)}; see what they do, make the "
                "same strategies in the same order, or raise limit_seconds",
                [one.rank for one in late],
            )

    def _missing(self, *, seen_only: bool = False) -> list[Missing]:
        place = self._group, self._turn
        return missing_ranks(self._board, self._ranks, *place, seen_only=seen_only)

    def _hopeless(self, now: float) -> list[Missing]:
        """Return the ranks that will never arrive, if that is known for 5 seconds."""
        gone: list[Missing] = []
        if not self._survives:
            # With ``survives``, MPI itself (ULFM) reports dead ranks.
            gone = [one for one in self._missing(seen_only=True) if one.gone]
        self._hopeless_since = min(self._hopeless_since, now) if gone else math.inf
        return gone if now > self._hopeless_since + _GRACE_SECONDS else []

    def _watch(self) -> None:
        """Report missing ranks until the creation ends; runs in a thread."""
        least = min(self._warn, self._limit) / 4
        tick = min(max(least, _SHORTEST_TICK_SECONDS), 1.0)
        while not self._ended.wait(tick):
            if self._pauses:
                continue
            try:
                self._look()
            except Exception:
                get_logger().warning("nobody watches over the start", exc_info=True)
                return

    def _look(self) -> None:
        now, since = time.monotonic(), self._since
        waited, due = now - since, min(self._warn, self._limit - _LEAD_SECONDS)
        if self._reported_at > since:
            due = self._reported_at - since + _REPEAT * self._warn
        gone = [] if self._polls else self._hopeless(now)
        if gone and not self._ended.is_set():
            end_process(
                f"it waits in {self._what} for ranks that will not come: {_named(gone)}"
            )
        if waited < min(due, self._limit):
            return
        missing = self._missing(seen_only=self._met)
        # If no rank is missing, MPI and file systems may still need up to a minute.
        least = 0.0 if missing or self._polls else _SLOW_SECONDS
        if waited > max(due, least):
            self._report(now, missing)
        # If the main thread polls, wait longer, so that it can raise an error first.
        most = max(self._limit, least) + (_MAIN_SECONDS if self._polls else 0)
        if waited > most and self._since == since and not self._ended.is_set():
            end_process(
                f"it has waited {waited:.0f} s in {self._what} for {_named(missing)}, "
                "and cannot raise an error, because a call of MPI, or other C code, "
                "does not return"
            )

    def _report(self, now: float, missing: Sequence[Missing]) -> None:
        """Report the missing ranks; only one rank of each host does so."""
        self._reported_at, board = now, self._board
        own = 0 if board is None else board.launch.rank
        lacking = {one.rank for one in missing}
        here = [] if board is None else [r for r in board.present() if board.read(r)]
        there = sorted(set(here).intersection(self._ranks).difference(lacking))
        if there and there[0] != own:
            return
        knows = any(one.known for one in missing)
        if not knows and min(self._ranks, default=own) != own and lacking:
            # The lowest rank, on another host, reports: it has the same information.
            return
        late = [one.described() for one in missing[:SHOWN_RANKS]]
        if self._ended.is_set() or self._since > now:
            return
        site = f" ({self._site})" if self._site else ""
        report = LateReport(
            waiting=there or [own],
            seconds=now - self._since,
            place=f"in {self._what}{site}",
            late=late,
            num_late=len(missing),
        )
        get_logger().warning("%s", report)


def _named(missing: Sequence[Missing]) -> str:
    words = "; ".join(map(str, missing[:SHOWN_RANKS]))
    more = len(missing) - SHOWN_RANKS
    return (words or "other ranks") + (f"; and {more} more" if more > 0 else "")
