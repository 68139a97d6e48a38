"""The agreement of all ranks at the start of every collective call.

Before any data moves, each rank announces a record: its sequence number, how often it
has entered ``run``, the digest of the call, and flags. Only when the records of all
ranks are equal does any rank go on; a difference is an error on every rank, where MPI
itself would give wrong numbers or wait for ever. A rank that has failed, or leaves the
program, announces that in the same way.

`hpcstrat.channel.headers` says where the records lie.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

from hpcstrat.channel.call import Call, call_site, describe_call
from hpcstrat.channel.conduct import Conduct, EveryRankError
from hpcstrat.channel.disagreement import (
    FAILED,
    LEFT,
    Announcement,
    announce_error,
    explain,
    only_marks_differ,
)
from hpcstrat.channel.headers import WireRecords
from hpcstrat.channel.sections import Failure, Scopes
from hpcstrat.channel.started import Started
from hpcstrat.errors import CollectiveError
from hpcstrat.observe.timeline import active
from hpcstrat.topology.topology import Topology
from hpcstrat.typing import CopyCheck

__all__ = ["Agreement", "EveryRankError"]

_FAILING = describe_call("failure")
_MEETING = describe_call("meeting after ranks had made different numbers of steps")
# How far next() moves what headers carry: no number of runs is a multiple of it.
_NEXT = 0x1E3779B97F4A7C15
_MASK = (1 << 63) - 1
_RESUMING = describe_call("going on after an interrupt of all ranks")
_ANNOUNCED = "_hpcstrat_announced"


class Agreement(Conduct):
    """The headers of one topology's calls.

    Collective over ``topology.replica_comm``.

    Parameters
    ----------
    topology : Topology
        At least two replicas.

    Attributes
    ----------
    run_index : int
        How often this rank has entered ``run``; part of every header, so that a call
        left out in one step is noticed in the next.
    next_index : int
        How often it has asked for a batch of any data set that all replicas share;
        likewise, so that a step left out on one rank is noticed.
    run_mark : int
        What headers carry in their place: both, and what `copy_check` makes of
        them. Calls that are started carry `step_mark` alone: when their headers are
        compared, ranks may be at different points of the program.
    copy_check : CopyCheck or None
        Looks at the copies of variables at each entry into ``run``.
    started : deque of Started
        Calls that have been started and have not ended, in order.
    scopes : Scopes
        Parts of the program that all ranks leave together.
    """

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.run_index = 0
        self.next_index = 0
        self.run_mark = 0
        # Ranks have told each other different numbers of steps.
        self._apart = False
        self.copy_check: CopyCheck | None = None
        self.scopes = Scopes()
        self._records: Any = (
            self._steps
            if topology.num_workers == 1
            else WireRecords(topology, self._comm)
        )
        self.started: deque[Started] = deque()

    @abstractmethod
    def drain(self, last: Started | None = None) -> None:
        """Wait for the end of started calls.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        last : Started, optional
            Up to which; default: all.
        """

    def agree(self, call: Call, timeout_seconds: float | None = None) -> None:
        """Return once every rank has announced the same call.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        call : Call
            What this rank is about to do.
        timeout_seconds : float, optional
            How long to wait for late ranks.

        Raises
        ------
        CollectiveError
            On every rank, if any announced something else, or left the program.
        ReplicaError
            On every rank that did not fail, if another announced that it had.
        """
        if active.recorder is None:
            agreed = self._announce(self.run_mark, call, 0, timeout_seconds)
        else:
            agreed = self._announce_recorded(call, timeout_seconds)
        if not agreed:
            announcement = Announcement(self._rank, 0, call.text)
            announcement.digest = self._marked(call)
            announcement.run_mark = self.run_mark
            announcements = self._gather(announcement)
            error = None
            if self.copy_check is not None and only_marks_differ(announcements):
                with self.moving(call):
                    error = self.copy_check.difference(self.patient(self._comm))
                if error is None:
                    self.agree(call, timeout_seconds)
                    return
            error = error or explain(announcements)
            raise self._conclude(announcements, error).error

    def enter_run(self) -> None:
        """Take note that this rank enters ``run``.

        Logically collective over ``topology.replica_comm``.

        Raises
        ------
        CollectiveError
            On every rank, where copies of variables are compared here, and differ.
        """
        self.run_index = index = self.run_index + 1
        check, mark = self.copy_check, self.run_mark
        self.run_mark = mark + 1 & _MASK if check is None else check.mark(index, mark)

    def enter_next(self) -> None:
        """Take note that this rank asks for a batch.

        Logically collective over ``topology.replica_comm``.
        """
        self.next_index += 1
        self.run_mark = self.run_mark + _NEXT & _MASK

    @property
    def step_mark(self) -> int:
        """Stands for the steps that this rank has made: ``run`` and ``next()``."""
        return self.run_index + self.next_index * _NEXT & _MASK

    def set_steps(self, run_index: int, next_index: int) -> None:
        """Set how many steps this rank has made; all ranks are at the same call.

        Logically collective over ``topology.replica_comm``.

        Parameters
        ----------
        run_index : int
            Entries into ``run``.
        next_index : int
            Batches.
        """
        self.run_index, self.next_index = run_index, next_index
        self.run_mark = self.step_mark

    def meet(self) -> None:
        """Let ranks that are apart count their steps from 0 again.

        Collective over ``topology.replica_comm`` after an error that told different
        numbers of steps, else not collective. For restores and strategies that begin
        or end, which put all ranks at the same point of the program.
        """
        if not self._apart:
            return
        found = self.run_index, self.next_index
        self.set_steps(0, 0)
        try:
            self.agree(_MEETING)
        except BaseException:
            self.set_steps(*found)
            raise
        self._apart = False

    def fail(
        self, what: str, error: BaseException, *, leaves: bool = False
    ) -> Failure | None:
        """Tell the other ranks that this one failed; the caller then raises ``error``.

        Collective over ``topology.replica_comm``: it is this rank's part of the next
        call of the others.

        Parameters
        ----------
        what : str
            What this rank was doing.
        error : BaseException
            Why it cannot go on.
        leaves : bool
            Whether it leaves a scope, not a call only.

        Returns
        -------
        Failure or None
            What all ranks know; None where nobody was told.
        """
        if self.broken or self.closed:
            return None
        told = id(self), self.num_calls
        if not leaves and getattr(error, _ANNOUNCED, None) == told:
            # On its way up from a call of which all ranks know.
            return None
        announcement = announce_error(self._rank, what, error)
        agreed = self._announce(0, _FAILING, FAILED, None)
        with contextlib.suppress(Exception):
            setattr(error, _ANNOUNCED, (id(self), self.num_calls))
        # Even where all have failed, that may be at different points.
        failure = self._exchange(announcement)
        if not agreed and not announcement.secondary:
            error.add_note(f"hpcstrat: on the other replicas: {failure.error}")
        return failure

    def _announce(
        self, run: int, call: Call, flags: int, timeout_seconds: float | None
    ) -> bool:
        if self.broken or self.closed or self.scopes.failure is not None:
            self._refuse_if_broken(call)
        if self.started:
            self.drain()
            self._refuse_if_broken(call)
        try:
            self.num_calls += 1
            records = self._records
            mark = call.digest
            if records is self._steps:
                mark ^= self.slots.next
            records.post(run, mark, flags)
            agreed: Callable[[], bool] = records.agreed
            for _ in range(self._waiter.quick_looks):
                if agreed():
                    self.last_call = call
                    return True
            came = self.arrivals.wait(self._waiter, records, call, timeout_seconds)
            self.last_call = call
            return came
        except BaseException as error:
            self.interrupted(call, error)
            raise

    def _announce_recorded(self, call: Call, timeout_seconds: float | None) -> bool:
        """Announce a call where a timeline is recorded."""
        recorder: Any = active.recorder
        start = recorder.enter(call.text)
        try:
            return self._announce(self.run_mark, call, 0, timeout_seconds)
        finally:
            about = {
                "call": call.text,
                "bytes": call.nbytes,
                "sequence": self.num_calls,
                "channel": self.arrivals.number,
            }
            recorder.agreed(call.text, about, start)

    def _marked(self, call: Call) -> int:
        """Return what ranks compare: the call, and the place of its data.

        An interrupt before a header leaves a rank's ring a place ahead.
        """
        if self._records is self._steps:
            return call.digest ^ self.slots.next
        # Each worker has its own rings; its steps compare them.
        return call.digest

    def resume(self, what: str) -> bool:
        """Go on where all ranks have left the same call at the same point.

        Collective over ``topology.replica_comm``.

        Parameters
        ----------
        what : str
            What this rank is about to do; no data are laid out for it yet.

        Returns
        -------
        bool
            Whether they have.
        """
        if not self.between_calls or not self.met(describe_call(what)):
            return False
        # Until all have come, some may look at data that lie where the next ones go.
        self.agree(_RESUMING)
        return True

    def _refuse_if_broken(self, call: Call) -> None:
        if self.broken or self.closed:
            if self.deaths.error is not None:
                raise self.deaths.again(call.text)
            if not self.closed:
                # Others may have to be told yet; an error of MPI tells of dead ones.
                with contextlib.suppress(Exception):
                    self.breaks.look()
            if self.resume(call.text):
                return
            raise CollectiveError(
                f"expected a working strategy for {call.text}, found that "
                f"{self.broken or 'it is closed'}; end the program on every rank"
            )
        if self.scopes.failure is not None:
            raise self.scopes.failure.error

    def _raise_disagreement(self, announcement: Announcement) -> None:
        raise self._exchange(announcement).error

    def _exchange(self, announcement: Announcement) -> Failure:
        """Learn from all ranks what they announced."""
        announcements = self._gather(announcement)
        return self._conclude(announcements, explain(announcements))

    def _gather(self, announcement: Announcement) -> list[Announcement]:
        announcement.site = announcement.site or call_site()
        announcement.run_index = self.run_index
        announcement.next_index = self.next_index
        announcement.depth = self.scopes.depth
        announcement.pending = len(self.started)
        announcements: list[Announcement]
        try:
            announcements = self.patient(self._comm).allgather(announcement)
        except BaseException as error:
            self.interrupted(self.last_call or _FAILING, error)
            raise
        # Hashes begin anew. The steps stay what they are: ranks that have not made
        # equally many are not at the same point, whatever the program catches.
        self._apart = len({(a.run_index, a.next_index) for a in announcements}) > 1
        self.run_mark = self.step_mark
        return announcements

    def _conclude(
        self, announcements: list[Announcement], error: CollectiveError
    ) -> Failure:
        """Take note of what ends the call; no rank looks at its data any more."""
        self.slots.restart()
        leavers = [a.rank for a in announcements if a.flags & LEFT]
        if leavers:
            self.broken = f"ranks {leavers} have left the program"
        failure = Failure(error, announcements)
        if self.scopes.unwind(failure):
            for started in self.started:
                started.end(failure.error)
            self.started.clear()
        if failure.loses_calls and not self.broken:
            # Nobody knows which of them the others have started, or will start.
            self.broken = f"several started calls were under way when {failure.error}"
        self.told_at = self.num_calls
        setattr(failure.error, _ANNOUNCED, (id(self), self.num_calls))
        return failure
